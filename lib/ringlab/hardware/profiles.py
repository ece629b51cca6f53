"""What is known of hardware: profiles, and what a compute capability implies for dtypes
and builds of torch.

Profiles are TOML files with a source beside every number; peaks are dense, bytes and
rates in SI units. Facts about builds: pytorch RELEASE.md's support matrix (issues
#172352, #182849, #190385 of pytorch/pytorch), NVIDIA's CUDA compatibility guide for
driver versions, and its rule that a cubin runs on the same major and any later minor.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from .detect import Capability, Gpu, Machine, Peaks, detect, runs

FOLDER = Path(__file__).parent / "profiles"
MARGIN = 1.1  # measured rates are raised by this before they bound anything: a probe can be disturbed


class UnknownProfile(ValueError):
    """A name that no profile has, or a file that is no profile; the message is one line
    and says what is wrong.
    """


@dataclass(frozen=True)
class Profile:
    """One kind of hardware; a figure is None where no source states it.

    `flops` holds dense peak rates in FLOP/s by arithmetic: float32 (no tensor cores),
    tf32, float16 and bfloat16 (tensor cores with fp32 accumulation where there are
    any). `links` holds bytes/s in one direction per GPU.

    >>> get_profile("gtx1080").flops["bfloat16"] is None
    True
    """

    name: str
    title: str
    kind: str  # "cpu" or "cuda"
    capability: Capability | None = None
    memory_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    l2_bytes: int | None = None
    clock_hz: float | None = None  # at which `flops` hold
    flops: dict[str, float | None] = field(default_factory=dict)
    links: dict[str, float | None] = field(default_factory=dict)
    match: str | None = None  # regular expression for the device's name
    memory_gib: tuple[float, float] = (
        0,
        math.inf,
    )  # sizes, as the driver shows them, that are this card
    variants: tuple[Profile, ...] = ()

    def card(self, gpu: Gpu) -> Profile | None:
        """Return the profile or variant that a GPU is, by name, compute capability and
        memory; None if it is neither.

        What the driver does not tell is not compared.
        """
        named = self.match and re.search(self.match, gpu.name)
        if not named or gpu.capability not in (None, self.capability):
            return None
        for card in (self, *self.variants):
            least, most = (gib * 2**30 for gib in card.memory_gib)
            if gpu.memory_bytes is None or least <= gpu.memory_bytes <= most:
                return card
        return None

    def on(self, machine: Machine) -> Profile:
        """Return this profile for the machine at hand: its variant of the card, and
        memory as its driver shows it.
        """
        if self.kind == "cpu":
            return replace(
                self, title=machine.cpu_model, memory_bytes=machine.ram_bytes
            )
        if match(machine) != self.name:
            return self
        gpu = machine.gpus[0]
        generic = replace(self, title=gpu.name, capability=gpu.capability)  # no card is
        card = self.card(gpu) or generic
        return replace(card, memory_bytes=gpu.memory_bytes or card.memory_bytes)

    def runnable(self, machine: Machine) -> tuple[bool, str]:
        """Say in one line whether this profile can be measured on a machine, and why or
        why not.

        >>> get_profile("h100").runnable(Machine(cpu_model="some CPU"))
        (False, 'needs NVIDIA H100 SXM5 80 GB; no GPU here, only some CPU')
        """
        here = match(machine)
        if self.kind == "cpu":
            return True, f"{machine.cpu_model}, {machine.cores} cores"
        if here == "cpu":
            return False, f"needs {self.title}; no GPU here, only {machine.cpu_model}"
        if self.name not in (here, "generic"):
            return False, f"needs {self.title}; here is {machine.name} (profile {here})"
        if why := drivable(machine):
            return False, why
        return True, f"{machine.name} is here"

    def default_dtype(self) -> torch.dtype:
        """Return the dtype policy of this hardware; float32 where the capability is not
        known.
        """
        return default_dtype(self.capability)

    def dtype_reason(self) -> str:
        """Say in one line why :meth:`default_dtype` chooses as it does."""
        if self.kind == "cuda" and self.capability is None:
            return "float32: the choice is made when a GPU is there to ask"
        return dtype_reason(self.capability)

    def peak(
        self, dtype: torch.dtype | str, machine: Machine | None = None
    ) -> float | None:
        """Return the peak rate, FLOP/s, of the arithmetic that serves a storage dtype;
        None where no figure is known.

        fp16 without tensor cores and bf16 without a unit compute in fp32. With a
        machine, scaled up where its driver allows a higher clock than the sheet's, so
        that a bound is never below the truth.

        >>> p = get_profile("gtx1080")
        >>> p.peak("float16") == p.peak(torch.float32) == 8.873e12
        True
        """
        name = str(dtype).removeprefix("torch.")
        has_unit = {"float16": has_tensor_cores, "bfloat16": has_bf16}.get(name)
        if has_unit and self.capability and not has_unit(self.capability):
            name = "float32"
        rate = self.flops.get(name)
        here = self.kind == "cuda" and machine and match(machine) == self.name
        clock = machine.gpus[0].clock_max_hz if here else None
        if rate and clock and self.clock_hz:
            rate *= max(1.0, clock / self.clock_hz)
        return rate

    def bandwidth(self, working_set_bytes: float) -> float | None:
        """Return bytes/s of memory; None for a working set that fits the L2 cache,
        whose speed no sheet states.
        """
        cached = working_set_bytes <= (self.l2_bytes or -1)
        return None if cached else self.bandwidth_bytes_per_s

    def rates(
        self,
        dtype: torch.dtype,
        working_set_bytes: float,
        machine: Machine | None = None,
    ) -> Rates:
        """Return a GPU's rates for calls of a dtype on so many bytes; for links the
        fastest that it has.
        """
        rate = self.peak(dtype, machine)
        if dtype == torch.float32 and rate and self.flops.get("tf32"):
            # fp32 out of three tf32 products, as CUTLASS does
            rate = max(rate, self.flops["tf32"] / 3)
        link = max(filter(None, self.links.values()), default=None)
        return Rates(rate, self.bandwidth(working_set_bytes), link)


@dataclass(frozen=True)
class Rates:
    """What one rank's device does at most: FLOP/s, bytes/s of memory, bytes/s sent to
    others; None: not known.
    """

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


def measured_rates(peaks: Iterable[Peaks], working_set_bytes: float) -> Rates:
    """A CPU's rates from its measured peaks, the best of each, raised by ``MARGIN``."""
    rates = ((p.flops_per_s, p.bandwidth(working_set_bytes)) for p in peaks)
    return Rates(*(MARGIN * max(each) for each in zip(*rates)))


TEXTS = ("name", "title", "kind", "match")
FIGURES = (
    "capability",
    "memory_bytes",
    "bandwidth_bytes_per_s",
    "l2_bytes",
    "clock_hz",
)
KEYS = *TEXTS, "memory_gib", *FIGURES, "flops", "links", "notes", "variant"
# What the profile of a GPU has beside name, title and kind, and from 8.0 on flops.tf32.
NEEDED = (
    "match",
    "memory_gib",
    "capability",
    "memory_bytes",
    "bandwidth_bytes_per_s",
    "flops.float32",
    "flops.float16",
    "flops.bfloat16",
    "links.pcie",
)
NUMBERS = (int, float)  # no Booleans
UNREAD = "vendor data sheet, not re-read"  # a source without a page


def load(path: Path) -> Profile:
    """Read one profile file, NAME.toml of the profile NAME, in small letters and digits.

    ``name``, ``title`` and ``kind`` ("cpu" or "cuda") are texts. A GPU has ``match``, a
    regular expression for its driver's name, ``memory_gib``, the least and the most
    that the driver shows, and figures: ``capability``, ``memory_bytes``,
    ``bandwidth_bytes_per_s``, ``flops.float32``, ``flops.float16``, ``flops.bfloat16``,
    ``links.pcie``, from capability 8.0 on ``flops.tf32``; if they are known
    ``l2_bytes``, ``clock_hz`` and other ``links``. A figure is a table of its ``value``
    and its ``source``, which has the address of a page; without a value it is not
    known. ``notes`` are texts for the reader. Each ``[[variant]]`` has what is
    different on a card of the same name.

    Raises UnknownProfile, one line with the file and the key that is wrong.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        base = _profile(_fields(data), path.stem)
        rows = [_fields(row, "variant.") for row in data.get("variant", ())]
        return replace(base, variants=tuple(replace(base, **row) for row in rows))
    except (OSError, TypeError, ValueError) as error:
        raise UnknownProfile(f"{path} is no profile: {error}") from None


def _profile(found: dict, name: str) -> Profile:
    """A profile without its variants; ValueError names the key that is missing."""
    needed = ["name", "title", "kind"]
    if found.get("kind") == "cuda" and name != "generic":
        new = found.get("capability", ()) >= (8, 0)
        needed += [*NEEDED, "flops.tf32"] if new else NEEDED
    for key in needed:
        group, _, part = key.partition(".")
        if group not in found or part and part not in found[group]:
            raise ValueError(f"{key}: is missing")
    if found["name"] != name or not re.fullmatch("[a-z0-9]+", name):
        raise ValueError(
            f"name: must be {name!r} as the file, of small letters and digits"
        )
    if found["kind"] not in ("cpu", "cuda"):
        raise ValueError(f"kind: must be cpu or cuda, not {found['kind']!r}")
    return Profile(**found)


def _fields(table: dict, where: str = "") -> dict:
    """The fields of a Profile that a table of a file has, figures without sources."""
    found = {}
    if not isinstance(table, dict):
        raise ValueError("variant: must be tables, [[variant]]")
    for key, entry in table.items():
        at = where + key
        if key not in KEYS:
            raise ValueError(f"{at}: no such key; known: {', '.join(KEYS)}")
        try:
            if key in FIGURES:
                found[key] = _figure(entry, at)
            elif key in ("flops", "links"):
                found[key] = {x: _figure(entry[x], f"{at}.{x}") for x in entry}
            elif key == "memory_gib":
                if [type(x) in NUMBERS for x in entry] != [True, True]:
                    raise ValueError(
                        f"{at}: must be the least and the most, two numbers"
                    )
                found[key] = tuple(entry)
            elif key in TEXTS:
                re.compile(entry)
                found[key] = entry
        except (TypeError, re.error) as error:
            raise ValueError(f"{at}: {entry!r} does not fit: {error}") from None
    return found


def _figure(entry, at: str):
    """The value of a figure; None where its source states none."""
    if not isinstance(entry, dict) or not entry.keys() <= {"value", "source"}:
        raise ValueError(f"{at}: must be a table of value and source")
    source = str(entry.get("source"))
    if "http" not in source and UNREAD not in source:
        raise ValueError(f"{at}: its source must have the address of a page, http...")
    value = entry.get("value")
    if at.endswith("capability"):
        if [type(x) for x in value] != [int, int]:
            raise ValueError(f"{at}: must be two whole numbers, as [7, 5]")
        return tuple(value)
    if value is not None and (type(value) not in NUMBERS or not 0 < value < math.inf):
        raise ValueError(f"{at}: {value!r} is no number above 0")
    return value


@cache
def profiles() -> dict[str, Profile]:
    """Return all profiles by name: cpu first, then GPUs by compute capability, generic
    last. A file that is no profile is told on stderr, and missing.
    """

    def order(p: Profile) -> tuple:
        return p.kind != "cpu", p.name == "generic", p.capability or (), p.name

    known = []
    for path in sorted(FOLDER.glob("*.toml")):
        try:
            known.append(load(path))
        except UnknownProfile as error:
            print(f"ringlab: {error}", file=sys.stderr)
    return {profile.name: profile for profile in sorted(known, key=order)}


def get_profile(name: str) -> Profile:
    """Return a profile by name, in any case and with any dashes; UnknownProfile lists
    those there are and the closest.

    >>> get_profile("gtx180")
    Traceback (most recent call last):
    ...
    ringlab.hardware.profiles.UnknownProfile: unknown profile 'gtx180'; did you mean 'gtx1080'? known: auto, cpu, ...
    """
    requested = re.sub(r"[^a-z0-9]", "", str(name).lower())
    if requested in profiles():
        return profiles()[requested]
    if (path := FOLDER / f"{requested}.toml").is_file():
        return load(path)  # which says what is wrong with it
    close = difflib.get_close_matches(requested, ("auto", *profiles()), n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    raise UnknownProfile(
        f"unknown profile {str(name)!r};{hint} known: auto, {', '.join(profiles())}"
    )


def resolve(name: str = "auto", machine: Machine | None = None) -> Profile:
    """Return the profile that a user asked for, "auto" being the one that matches the
    machine.
    """
    return get_profile(match(machine or detect()) if name == "auto" else name)


def match(machine: Machine) -> str:
    """Name the profile of a machine: by its first GPU's name, capability and memory;
    "generic" or "cpu" otherwise.

    >>> match(Machine(gpus=(Gpu("NVIDIA GeForce GTX 1080", (6, 1), 8_510_000_000),))), match(Machine())
    ('gtx1080', 'cpu')
    """
    if not machine.gpus:
        return "cpu"
    return next(
        (name for name, profile in profiles().items() if profile.card(machine.gpus[0])),
        "generic",
    )


# --------------------------------------------------------------------------------------
# what a compute capability implies

# Native fp16 arithmetic at twice the fp32 rate; on 6.1 it runs at 1/64. CUDA C
# Programming Guide, throughput of native arithmetic instructions
# (forums.developer.nvidia.com/t/108706).
FAST_FP16_WITHOUT_TENSOR_CORES = frozenset({(5, 3), (6, 0), (6, 2)})
TORCH = "2.13.0"  # the pin in constraints.txt
OLDEST = (5, 0)  # older GPUs have no kernels in any wheel of this version
OLDEST_CUDA13 = (
    7,
    5,
)  # the default wheel is built with CUDA 13.0, which dropped Maxwell, Pascal and Volta
NEWEST_CUDA126 = (
    9,
    0,
)  # the CUDA 12.6 wheel stops at Hopper and holds no PTX for later ones
# the oldest; docs.nvidia.com/deploy/cuda-compatibility, minor versions
CUDA126_DRIVER = 525
CUDA13_DRIVER = 580


def sm(capability: Capability | None) -> str:
    """Name a capability as the tools do.

    >>> sm((6, 1)), sm((12, 0)), sm(None)
    ('sm_61', 'sm_120', '-')
    """
    return "-" if capability is None else f"sm_{capability[0]}{capability[1]}"


def has_tensor_cores(capability: Capability | None) -> bool:
    """Say whether fp16 products run on tensor cores: 7.0 and newer (7.5 also covers GTX
    16xx, which emulate them).
    """
    return capability is not None and capability >= (7, 0)


def has_bf16(capability: Capability | None) -> bool:
    """Say whether there is a bf16 unit: 8.0 and newer. (A CPU computes bf16 by other
    means; ask torch.)
    """
    return capability is not None and capability >= (8, 0)


def default_dtype(capability: Capability | None) -> torch.dtype:
    """Choose the dtype for a compute capability, None meaning the CPU.

    float32 on the CPU and below 7.0, but float16 on 5.3, 6.0 and 6.2; float16 on 7.x;
    bfloat16 from 8.0 on, unknown and newer capabilities included. Kernels accumulate in
    fp32 everywhere.

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
    """Give the exact command that installs a torch which drives this compute
    capability, or say that none does.

    It is the default wheel (CUDA 13), or that of CUDA 12.6: for GPUs older than Turing,
    and for those up to Hopper where the driver is older than 580 and cannot start CUDA
    13.

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
    if capability and (
        capability < OLDEST_CUDA13 or (old_driver and capability <= NEWEST_CUDA126)
    ):
        return f"pip install torch=={TORCH}+cu126 --extra-index-url https://download.pytorch.org/whl/cu126"
    return f"pip install torch=={TORCH}"


def driver_major(driver: str | None) -> float:
    """The first number of a driver's version; infinite where the version is not known,
    as of a new driver.
    """
    digits = re.match(r"\d+", driver or "")
    return int(digits[0]) if digits else math.inf


def drivable(machine: Machine) -> str | None:
    """Return None where torch can use the machine's GPU or there is none; else one line
    that says why not, and what to install.
    """
    if not machine.gpus or machine.device == "cuda":
        return None
    gpu = machine.gpus[0]
    torch = f"this torch ({machine.torch})"
    archs = machine.arch_list
    line = install_line(gpu.capability, gpu.driver)
    driver = driver_major(gpu.driver)
    remedy = line if line.startswith("no ") else f"install: {line}"
    if gpu.capability is None:
        remedy += f" (a card older than Turing: {install_line((7, 0))})"
    cuda13 = int((machine.torch_cuda or "0").split(".")[0]) >= 13
    needed = CUDA13_DRIVER if cuda13 else CUDA126_DRIVER
    if not machine.torch_cuda:
        reason = f"is here, but {torch} is a CPU build and drives no GPU"
    elif gpu.capability and archs and not runs(archs, gpu.capability):
        reason = (
            f"is {sm(gpu.capability)}; {torch} has kernels only for {' '.join(archs)}"
        )
    elif driver < needed:
        reason = f"has driver {gpu.driver}; {torch} needs {needed} or newer"
        if "cu126" not in line or driver < CUDA126_DRIVER:
            remedy = f"install: an NVIDIA driver of version {needed} or newer"
    else:
        cause = f": {machine.torch_error}" if machine.torch_error else ""
        reason = f"is here, but {torch} cannot start it{cause}"
    return f"{gpu.name} {reason}; {remedy}; or GPU=cpu measures this CPU"
