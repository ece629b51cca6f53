"""Hardware: what is here (detect), what is known of it (profiles), which dtype and torch build it needs."""

from .detect import Gpu, Machine, Probe, detect
from .dtypes import compute_dtype, default_dtype, dtype_reason, fp16_ratio, has_bf16, has_tensor_cores, sm
from .peaks import Peaks, measure_cpu_peaks
from .profiles import Profile, UnknownProfile, get_profile, match, profiles, resolve, table
from .torch_builds import drivable, install_line, refusal, runs, torch_build

__all__ = [
    "Gpu",
    "Machine",
    "Peaks",
    "Probe",
    "Profile",
    "UnknownProfile",
    "compute_dtype",
    "default_dtype",
    "detect",
    "drivable",
    "dtype_reason",
    "fp16_ratio",
    "get_profile",
    "has_bf16",
    "has_tensor_cores",
    "install_line",
    "match",
    "measure_cpu_peaks",
    "profiles",
    "refusal",
    "resolve",
    "runs",
    "sm",
    "table",
    "torch_build",
]
