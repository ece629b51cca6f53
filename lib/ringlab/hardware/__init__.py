"""Hardware: what is here (detect), what is known of it (profiles), which dtype and torch build it needs."""

from .detect import Gpu, Machine, Peaks, Probe, detect, measure_cpu_peaks
from .dtypes import default_dtype, dtype_reason, has_bf16, has_tensor_cores, runs, sm
from .profiles import MARGIN, Profile, Rates, UnknownProfile, get_profile, match, measured_rates, profiles, resolve
from .torch_builds import drivable, install_line, torch_build

__all__ = [
    "MARGIN", "Gpu", "Machine", "Peaks", "Probe", "Profile", "Rates", "UnknownProfile",
    "default_dtype", "detect", "drivable", "dtype_reason", "get_profile", "has_bf16", "has_tensor_cores",
    "install_line", "match", "measure_cpu_peaks", "measured_rates", "profiles", "resolve", "runs", "sm", "torch_build",
]  # fmt: skip
