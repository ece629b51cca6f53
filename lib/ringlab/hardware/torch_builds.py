"""Which torch build drives a GPU, and the line that installs it.

Facts: pytorch RELEASE.md's support matrix (issues #172352, #182849, #190385 of pytorch/pytorch), NVIDIA's CUDA
compatibility guide for driver versions, and its rule that a cubin runs on the same major and any later minor.
"""

from __future__ import annotations

import math
import re

from .detect import Machine
from .dtypes import Capability, runs, sm

TORCH = "2.13.0"  # the pin in constraints.txt
INDEX_URL = "https://download.pytorch.org/whl"
OLDEST = (5, 0)  # older GPUs have no kernels in any wheel of this version
OLDEST_CUDA13 = (7, 5)  # the default wheel is built with CUDA 13.0, which dropped Maxwell, Pascal and Volta
NEWEST_CUDA126 = (9, 0)  # the CUDA 12.6 wheel stops at Hopper and holds no PTX for later ones
MIN_DRIVER = {"cu126": 525, "cu130": 580}  # docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility


def torch_build(capability: Capability | None, driver: str | None = None) -> str | None:
    """Name the torch build that drives a GPU: "cu126", "" for the default wheel, None where no wheel does.

    A driver older than 580 cannot start the default wheel (CUDA 13); cards up to Hopper then take cu126 as well.

    >>> torch_build((6, 1)), torch_build((7, 5)), torch_build((8, 0), "550.54"), torch_build((3, 5))
    ('cu126', '', 'cu126', None)
    """
    if capability is None:
        return ""
    if capability < OLDEST:
        return None
    old_driver = MIN_DRIVER["cu126"] <= _major(driver) < MIN_DRIVER["cu130"]
    return "cu126" if capability < OLDEST_CUDA13 or (old_driver and capability <= NEWEST_CUDA126) else ""


def install_line(capability: Capability | None, driver: str | None = None) -> str:
    """Give the exact command that installs a torch which drives this compute capability, or say that none does.

    >>> install_line((6, 1))
    'pip install torch==2.13.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126'
    >>> install_line((3, 7))
    'no torch 2.13.0 wheel has kernels for sm_37 (the oldest is sm_50): use the CPU, GPU=cpu'
    """
    build = torch_build(capability, driver)
    if build is None:
        return f"no torch {TORCH} wheel has kernels for {sm(capability)} (the oldest is sm_50): use the CPU, GPU=cpu"
    if not build:
        return f"pip install torch=={TORCH}"
    return f"pip install torch=={TORCH}+{build} --extra-index-url {INDEX_URL}/{build}"


def drivable(machine: Machine) -> str | None:
    """Return None where torch can use the machine's GPU or there is none; else one screen that says what to install.

    >>> drivable(Machine()) is None
    True
    """
    if (found := obstacle(machine)) is None:
        return None
    (reason, remedy), gpu = found, machine.gpus[0]
    known = sm(gpu.capability) if gpu.capability else "compute capability unknown"
    memory = f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else "memory unknown"
    cuda = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "a CPU build"
    return "\n".join([
        reason,
        f"  found:   {gpu.name}, {known}, {memory}, driver {gpu.driver or 'unknown'}",
        f"  torch:   {machine.torch}, {cuda}, kernels for: {' '.join(machine.arch_list) or 'no GPU'}",
        f"  {remedy}",
        "  or:      GPU=cpu measures the CPU of this machine instead",
    ])  # fmt: skip


def obstacle(machine: Machine) -> tuple[str, str] | None:
    """Say why torch cannot use the GPU that is there, and what would help; None where it can or there is none."""
    if not machine.gpus or machine.device == "cuda":
        return None
    gpu, torch = machine.gpus[0], f"this torch ({machine.torch})"
    line, driver = install_line(gpu.capability, gpu.driver), _major(gpu.driver)
    remedy = line if line.startswith("no ") else f"install: {line}"
    if gpu.capability is None:
        remedy += f" (a card older than Turing: {install_line((7, 0))})"
    if not machine.torch_cuda:
        return f"{gpu.name} is here, but {torch} is a CPU build and drives no GPU", remedy
    if gpu.capability and machine.arch_list and not runs(machine.arch_list, gpu.capability):
        return f"{gpu.name} is {sm(gpu.capability)}; {torch} has kernels only for {' '.join(machine.arch_list)}", remedy
    needed = MIN_DRIVER["cu130" if int(machine.torch_cuda.split(".")[0]) >= 13 else "cu126"]
    if driver < needed:
        if torch_build(gpu.capability, gpu.driver) == "" or driver < MIN_DRIVER["cu126"]:
            remedy = f"install: an NVIDIA driver of version {needed} or newer"
        return f"{gpu.name} has driver {gpu.driver}; {torch} needs {needed} or newer", remedy
    cause = f": {machine.torch_error}" if machine.torch_error else ""
    return f"{gpu.name} is here, but {torch} cannot start it{cause}", remedy


def _major(driver: str | None) -> float:
    """The first number of a driver's version; infinite where the version is not known, as of a new driver."""
    found = re.match(r"\d+", driver or "")
    return int(found[0]) if found else math.inf
