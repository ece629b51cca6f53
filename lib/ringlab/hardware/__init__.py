"""Hardware: what is here (detect), what is known of it (profiles), and the dtype and torch build that it needs."""

from .capability import default_dtype, dtype_reason, has_bf16, has_tensor_cores, install_line, runs, sm
from .detect import Gpu, Machine, Peaks, Probe, detect, drivable, measure_cpu_peaks
from .profiles import Profile, Rates, UnknownProfile, get_profile, match, measured_rates, profiles, resolve

__all__ = [
    "Gpu", "Machine", "Peaks", "Probe", "Profile", "Rates", "UnknownProfile", "default_dtype", "detect", "drivable",
    "dtype_reason", "get_profile", "has_bf16", "has_tensor_cores", "install_line", "match", "measure_cpu_peaks",
    "measured_rates", "profiles", "resolve", "runs", "sm",
]  # fmt: skip
