"""What a compute capability implies: the dtype to run, the binaries that run, and the torch build to install.

Capabilities are pairs of integers. Facts about builds: pytorch RELEASE.md's support matrix (issues #172352, #182849,
#190385 of pytorch/pytorch), NVIDIA's CUDA compatibility guide for driver versions, and its rule that a cubin runs on
the same major and any later minor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch

Capability = tuple[int, int]
# Native fp16 arithmetic at twice the fp32 rate; on 6.1 it runs at 1/64. CUDA C Programming Guide, throughput of native
# arithmetic instructions (forums.developer.nvidia.com/t/108706).
FAST_FP16_WITHOUT_TENSOR_CORES = frozenset({(5, 3), (6, 0), (6, 2)})
TORCH = "2.13.0"  # the pin in constraints.txt
OLDEST = (5, 0)  # older GPUs have no kernels in any wheel of this version
OLDEST_CUDA13 = (7, 5)  # the default wheel is built with CUDA 13.0, which dropped Maxwell, Pascal and Volta
NEWEST_CUDA126 = (9, 0)  # the CUDA 12.6 wheel stops at Hopper and holds no PTX for later ones
CUDA126_DRIVER, CUDA13_DRIVER = 525, 580  # the oldest; docs.nvidia.com/deploy/cuda-compatibility, minor versions


def sm(capability: Capability | None) -> str:
    """Name a capability as the tools do.

    >>> sm((6, 1)), sm((12, 0)), sm(None)
    ('sm_61', 'sm_120', '-')
    """
    return "-" if capability is None else f"sm_{capability[0]}{capability[1]}"


def runs(arch_list: Iterable[str], capability: Capability) -> bool:
    """Say whether binaries for these architectures run on a capability.

    A cubin sm_XY runs on major X and any minor >= Y; PTX compute_XY on anything newer; sm_90a only on 9.0 itself, and
    sm_100f within its major.

    >>> runs(["sm_60"], (6, 1)), runs(["sm_61"], (6, 0)), runs(["sm_80"], (9, 0)), runs(["compute_80"], (9, 0))
    (True, False, False, True)
    """
    for arch in arch_list:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch):
            built = int(found[2]), int(found[3])
            same_major = capability[0] == built[0] and capability >= built
            exact, within = found[4] == "a", found[1] == "sm" or found[4] == "f"
            if capability == built or (not exact and (same_major if within else capability >= built)):
                return True
    return False


def has_tensor_cores(capability: Capability | None) -> bool:
    """Say whether fp16 products run on tensor cores: 7.0 and newer (7.5 also covers GTX 16xx, which emulate them)."""
    return capability is not None and capability >= (7, 0)


def has_bf16(capability: Capability | None) -> bool:
    """Say whether there is a bf16 unit: 8.0 and newer. (A CPU computes bf16 by other means; ask torch.)"""
    return capability is not None and capability >= (8, 0)


def default_dtype(capability: Capability | None) -> torch.dtype:
    """Choose the dtype for a compute capability, None meaning the CPU.

    float32 on the CPU and below 7.0, but float16 on 5.3, 6.0 and 6.2; float16 on 7.x; bfloat16 from 8.0 on, unknown
    and newer capabilities included. Kernels accumulate in fp32 everywhere.

    >>> default_dtype((6, 1)), default_dtype((6, 0)), default_dtype((7, 5)), default_dtype((8, 10))
    (torch.float32, torch.float16, torch.float16, torch.bfloat16)
    """
    return getattr(torch, dtype_reason(capability).partition(":")[0])


def dtype_reason(capability: Capability | None) -> str:
    """Say in one line which dtype :func:`default_dtype` chooses, and why.

    >>> dtype_reason((6, 1))
    'float32: native fp16 runs at 1/64 of the fp32 rate on sm_61 (fp16 is storage only), and there is no bf16 unit'
    """
    if capability is None:
        return "float32: the CPU's own arithmetic; bf16 and fp16 halve memory but rarely save time there"
    name = sm(capability)
    if has_bf16(capability):
        return f"bfloat16: {name} runs it on tensor cores with fp32 accumulation and the range of fp32"
    if has_tensor_cores(capability):
        return f"float16: {name} has fp16 tensor cores with fp32 accumulation, and no bf16 unit (that needs 8.0)"
    if capability in FAST_FP16_WITHOUT_TENSOR_CORES:
        return f"float16: native fp16 runs at twice the fp32 rate on {name}; stored as fp16, accumulated in fp32"
    if capability == (6, 1):
        why = "native fp16 runs at 1/64 of the fp32 rate on sm_61 (fp16 is storage only), and there is no bf16 unit"
        return f"float32: {why}"
    return f"float32: {name} has neither fp16 nor bf16 arithmetic"


def install_line(capability: Capability | None, driver: str | None = None) -> str:
    """Give the exact command that installs a torch which drives this compute capability, or say that none does.

    It is the default wheel (CUDA 13), or that of CUDA 12.6: for GPUs older than Turing, and for those up to Hopper
    where the driver is older than 580 and cannot start CUDA 13.

    >>> install_line((7, 5)), install_line((6, 1)) == install_line((8, 0), "550.54")
    ('pip install torch==2.13.0', True)
    >>> install_line((6, 1))
    'pip install torch==2.13.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126'
    >>> install_line((3, 7))
    'no torch 2.13.0 wheel has kernels for sm_37 (the oldest is sm_50): use the CPU, GPU=cpu'
    """
    if capability and capability < OLDEST:
        return f"no torch {TORCH} wheel has kernels for {sm(capability)} (the oldest is sm_50): use the CPU, GPU=cpu"
    old_driver = CUDA126_DRIVER <= driver_major(driver) < CUDA13_DRIVER
    if capability and (capability < OLDEST_CUDA13 or (old_driver and capability <= NEWEST_CUDA126)):
        return f"pip install torch=={TORCH}+cu126 --extra-index-url https://download.pytorch.org/whl/cu126"
    return f"pip install torch=={TORCH}"


def driver_major(driver: str | None) -> float:
    """The first number of a driver's version; infinite where the version is not known, as of a new driver."""
    found = re.match(r"\d+", driver or "")
    return int(found[0]) if found else math.inf
