"""Hardware: what is here (detect), what is known of it (profiles), and the dtype and
torch build that it needs.
"""

from .detect import Gpu, Machine, Peaks, Probe, detect, measure_cpu_peaks, runs  # noqa: I001
from .profiles import (
    Profile,
    Rates,
    UnknownProfile,
    default_dtype,
    drivable,
    dtype_reason,
    get_profile,
    has_bf16,
    has_tensor_cores,
    install_line,
    match,
    measured_rates,
    profiles,
    resolve,
    sm,
)

__all__ = [
    "Gpu",
    "Machine",
    "Peaks",
    "Probe",
    "Profile",
    "Rates",
    "UnknownProfile",
    "default_dtype",
    "detect",
    "drivable",
    "dtype_reason",
    "get_profile",
    "has_bf16",
    "has_tensor_cores",
    "install_line",
    "match",
    "measure_cpu_peaks",
    "measured_rates",
    "profiles",
    "resolve",
    "runs",
    "sm",
]
