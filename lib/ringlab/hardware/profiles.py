"""Hardware profiles: TOML files with a source beside every number; peaks are dense, bytes and rates in SI units."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from . import dtypes
from .detect import Gpu, Machine, Peaks, detect
from .dtypes import Capability
from .torch_builds import obstacle

FOLDER = Path(__file__).parent / "profiles"
ORDER = ("cpu", "gtx1080", "v100", "t4", "rtx3090", "rtx4090", "a100", "h100", "h200", "generic")
MARGIN = 1.1  # measured rates are raised by this before they bound anything: a probe can be disturbed


class UnknownProfile(ValueError):
    """A profile name that does not exist; the message lists those that do."""


@dataclass(frozen=True)
class Profile:
    """One kind of hardware; a figure is None where no source states it.

    `flops` holds dense peak rates in FLOP/s by arithmetic: float32 (no tensor cores), tf32, float16 and bfloat16
    (tensor cores with fp32 accumulation where there are any). `links` holds bytes/s in one direction per GPU.

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
    memory_gib: tuple[float, float] | None = None  # sizes, as the driver shows them, that are this card
    variants: tuple[Profile, ...] = ()

    def matches(self, gpu: Gpu) -> bool:
        """Say whether a GPU is this card, by name, compute capability and memory (as far as the driver tells)."""
        known = self.match and re.search(self.match, gpu.name) and gpu.capability in (None, self.capability)
        return bool(known) and any(p._fits(gpu.memory_bytes) for p in (self, *self.variants))

    def _fits(self, memory_bytes: int | None) -> bool:
        if memory_bytes is None or self.memory_gib is None:
            return True
        return self.memory_gib[0] <= memory_bytes / 2**30 <= self.memory_gib[1]

    def on(self, machine: Machine) -> Profile:
        """Return this profile for the machine at hand: its variant of the card, and memory as its driver shows it."""
        if self.kind == "cpu":
            return replace(self, title=machine.cpu_model, memory_bytes=machine.ram_bytes)
        if not machine.gpus or match(machine) != self.name:
            return self
        gpu = machine.gpus[0]
        chosen = next((p for p in (self, *self.variants) if p._fits(gpu.memory_bytes)), self)
        if self.name == "generic":
            chosen = replace(chosen, title=gpu.name or chosen.title, capability=gpu.capability)
        return chosen if gpu.memory_bytes is None else replace(chosen, memory_bytes=gpu.memory_bytes)

    def runnable(self, machine: Machine) -> tuple[bool, str]:
        """Say in one line whether this profile can be measured on a machine, and why or why not.

        >>> get_profile("h100").runnable(Machine(cpu_model="some CPU"))
        (False, 'needs NVIDIA H100 SXM5 80 GB; no GPU here, only some CPU')
        """
        if self.kind == "cpu":
            return True, f"{machine.cpu_model}, {machine.cores} cores"
        if not machine.gpus:
            wanted = "a GPU" if self.name == "generic" else self.title
            return False, f"needs {wanted}; no GPU here, only {machine.cpu_model}"
        here = match(machine)
        described = machine.name or f"a GPU of {dtypes.sm(machine.capability)}"
        if self.name != "generic" and here != self.name:
            return False, f"needs {self.title}; here is {described} (profile {here})"
        if found := obstacle(machine):
            return False, "; ".join(found)
        return True, f"{described} is here"

    def default_dtype(self) -> torch.dtype:
        """Return the dtype policy of this hardware; float32 where the capability is not known."""
        return dtypes.default_dtype(self.capability)

    def dtype_reason(self) -> str:
        """Say in one line why :meth:`default_dtype` chooses as it does."""
        if self.name == "generic" and self.capability is None:
            return "float32: the choice is made when a GPU is there to ask"
        return dtypes.dtype_reason(self.capability)

    def peak(self, dtype: torch.dtype | str, machine: Machine | None = None) -> float | None:
        """Return the peak rate, FLOP/s, of the arithmetic that serves a storage dtype; None where no figure is known.

        fp16 without tensor cores and bf16 without a unit compute in fp32. With a machine, scaled up where its driver
        allows a higher clock than the sheet's, so that a bound is never below the truth.

        >>> p = get_profile("gtx1080")
        >>> p.peak("float16") == p.peak(torch.float32) == 8.873e12
        True
        """
        arithmetic, _ = dtypes.compute_dtype(dtype, self.capability)
        rate = self.flops.get(arithmetic)
        clock = machine.gpus[0].clock_max_hz if machine and machine.gpus and match(machine) == self.name else None
        if rate is None or clock is None or self.clock_hz is None:
            return rate
        return rate * max(1.0, clock / self.clock_hz)

    def peak_reason(self, dtype: torch.dtype | str) -> str:
        """Say in one line what :meth:`peak` is the rate of.

        >>> get_profile("gtx1080").peak_reason("float16")
        'sm_61 has no tensor cores: fp16 is storage, products accumulate in fp32'
        """
        if self.kind == "cpu":
            return "measured in the run, not tabled"
        arithmetic, reason = dtypes.compute_dtype(dtype, self.capability)
        return reason if self.flops.get(arithmetic) is not None else f"no figure for {arithmetic} on {self.title}"

    def bandwidth(self, working_set_bytes: float | None = None) -> float | None:
        """Return bytes/s of memory; None for a working set that fits the L2 cache, whose speed no sheet states."""
        if working_set_bytes is not None and self.l2_bytes is not None and working_set_bytes <= self.l2_bytes:
            return None
        return self.bandwidth_bytes_per_s

    def rates(self, dtype: torch.dtype, working_set_bytes: float, machine: Machine | None = None) -> Rates:
        """Return a GPU's rates for calls of a dtype on so many bytes; for links the fastest that it has."""
        rate = self.peak(dtype, machine)
        if dtype == torch.float32 and rate and self.flops.get("tf32"):
            rate = max(rate, self.flops["tf32"] / 3)  # fp32 out of three tf32 products, as CUTLASS does
        return Rates(rate, self.bandwidth(working_set_bytes), max(filter(None, self.links.values()), default=None))


@dataclass(frozen=True)
class Rates:
    """What one rank's device does at most: FLOP/s, bytes/s of memory, bytes/s sent to others; None: not known."""

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


def measured_rates(peaks: Iterable[Peaks], working_set_bytes: float) -> Rates:
    """A CPU's rates from its measured peaks, the best of each, raised by ``MARGIN``.

    >>> measured_rates([Peaks(1e11, 4e10, 4e10)], 2**20).bytes_per_s
    44000000000.0
    """
    peaks = list(peaks)
    flops, moved = max(p.flops_per_s for p in peaks), max(p.bandwidth(working_set_bytes) for p in peaks)
    return Rates(MARGIN * flops, MARGIN * moved)


def load(path: Path) -> Profile:
    """Read one profile file, in which every number is a table of its ``value`` and ``source``."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    variants = [_fields(row) for row in data.pop("variant", ())]
    base = Profile(**_fields(data))
    return replace(base, variants=tuple(replace(base, **row) for row in variants))


def _fields(data: dict) -> dict:
    """The arguments of Profile from a table of a file; notes and sources are for the reader of the file."""
    fields: dict = {}
    for key, value in data.items():
        if key in ("flops", "links"):
            fields[key] = {name: row.get("value") for name, row in value.items()}
        elif key == "capability":
            fields[key] = tuple(value["value"])
        elif key != "notes":
            fields[key] = value.get("value") if isinstance(value, dict) else value
    return fields


@cache
def profiles() -> Mapping[str, Profile]:
    """Return all profiles by name: cpu first, then GPUs by age, generic last.

    >>> list(profiles())
    ['cpu', 'gtx1080', 'v100', 't4', 'rtx3090', 'rtx4090', 'a100', 'h100', 'h200', 'generic']
    """
    names = {path.stem for path in FOLDER.glob("*.toml")}
    return MappingProxyType({name: load(FOLDER / f"{name}.toml") for name in (*ORDER, *sorted(names - {*ORDER}))})


def get_profile(name: str) -> Profile:
    """Return a profile by name, in any case and with any dashes; UnknownProfile lists those there are and the closest.

    >>> get_profile("gtx180")
    Traceback (most recent call last):
    ...
    ringlab.hardware.profiles.UnknownProfile: unknown profile 'gtx180'; did you mean 'gtx1080'? known: auto, cpu, ...
    """
    known = profiles()
    folded = {re.sub(r"[^a-z0-9]", "", key): key for key in (*known, "auto")}
    asked = re.sub(r"[^a-z0-9]", "", str(name).lower())
    if folded.get(asked, "auto") != "auto":
        return known[folded[asked]]
    close = difflib.get_close_matches(asked, folded, n=1, cutoff=0.5)
    hint = f" did you mean {folded[close[0]]!r}?" if close else ""
    raise UnknownProfile(f"unknown profile {str(name)!r};{hint} known: auto, {', '.join(known)}")


def resolve(name: str = "auto", machine: Machine | None = None) -> Profile:
    """Return the profile that a user asked for, "auto" being the one that matches the machine."""
    if str(name) != "auto":
        return get_profile(name)
    return get_profile(match(machine or detect()))


def match(machine: Machine) -> str:
    """Name the profile of a machine: by its first GPU's name, capability and memory; "generic" or "cpu" otherwise.

    >>> match(Machine(gpus=(Gpu("NVIDIA GeForce GTX 1080", (6, 1), 8_510_000_000),))), match(Machine())
    ('gtx1080', 'cpu')
    """
    if not machine.gpus:
        return "cpu"
    return next((name for name, profile in profiles().items() if profile.matches(machine.gpus[0])), "generic")
