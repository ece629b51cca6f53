"""What this machine is: CPU, memory, GPUs as the driver and as torch see them, and the
CPU's peak rates, measured.

The CPU, memory and limits come from /proc, /sys and the control group; None where a
file does not tell. ``read`` is a function that returns a file's text, or None where it
cannot be read. Nothing here raises because hardware is absent.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch

from .. import native

Capability = tuple[int, int]  # of a GPU: its compute capability
Read = Callable[[str], "str | None"]
SMI_TIMEOUT_S = 10
SMI_FIELDS = (
    "name",
    "compute_cap",
    "memory.total",
    "uuid",
    "driver_version",
    "clocks.max.sm",
)
SIZES = (256, 512, 1024, 2048)  # of the matrices that are multiplied
# what the probes of one dtype take
MATMUL_S = 0.4
VECTOR_S = 0.1
DRAM_S = 0.18
CACHE_S = 0.09


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver or torch reports it; None where neither says."""

    name: str
    capability: Capability | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    clock_max_hz: float | None = None


@dataclass(frozen=True)
class Machine:
    """A machine: `device` is what torch can compute on ("cuda" or "cpu"); `gpus` are
    those that are there.

    A GPU that torch cannot drive is in `gpus` while `device` stays "cpu";
    :func:`ringlab.hardware.drivable` says why.
    """

    device: str = "cpu"
    gpus: tuple[Gpu, ...] = ()
    cpu_model: str = "unknown CPU"
    cpu_capability: str = (
        "DEFAULT"  # torch's widest instruction set here: AVX2, AVX512, ...
    )
    cores: int = 1  # that this process may run on
    cpu_quota: float | None = None  # cores' worth of time that the control group grants
    cache_bytes: int | None = None  # last level, summed over the usable cores
    ram_bytes: int | None = (
        None  # the smaller of the memory and the control group's limit
    )
    torch: str = ""
    torch_cuda: str | None = None  # None: a CPU build
    arch_list: tuple[str, ...] = ()
    torch_error: str | None = field(
        default=None, repr=False
    )  # what torch said when it could not start a GPU

    @property
    def name(self) -> str:
        """Name of the first GPU, or the CPU model where there is none."""
        return self.gpus[0].name if self.gpus else self.cpu_model


class Probe:
    """Everything that :func:`detect` asks of the outside; override methods to describe
    another machine.
    """

    def nvidia_smi(self, fields: Sequence[str]) -> str | None:
        """Ask nvidia-smi for CSV fields; None where it is absent, refuses or takes
        longer than 10 s.
        """
        query = f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"
        options = {"text": True, "timeout": SMI_TIMEOUT_S, "stderr": subprocess.PIPE}
        try:
            return subprocess.check_output(["nvidia-smi", *query], **options)
        except (OSError, subprocess.SubprocessError):
            return None

    def torch_says(self) -> tuple[list[Gpu], dict]:
        """List the GPUs that torch opens; and its version, build, architectures and
        what it said if it opened none.
        """
        # torch warns about old drivers and missing kernels; `drivable` reports both in
        # our own words.
        gpus: list[Gpu] = []
        error = None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                count = torch.cuda.device_count() if torch.cuda.is_available() else 0
                for p in map(torch.cuda.get_device_properties, range(count)):
                    # AMD's numbers mean something else.
                    capability = None if torch.version.hip else (p.major, p.minor)
                    gpus.append(Gpu(p.name, capability, p.total_memory))
            except (RuntimeError, AssertionError) as failure:
                gpus = []
                error = failure
        if warned and not gpus:
            error = error or warned[-1].message
        return gpus, {
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda or torch.version.hip,
            "arch_list": tuple(torch.cuda.get_arch_list()),
            "torch_error": error and str(error).strip().partition("\n")[0],
        }

    def read(self, path: str) -> str | None:
        """Read a small text file; None where it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def affinity(self) -> set[int]:
        """Return the cores that this process may run on."""
        return set(
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )


@cache
def detect(probe: Probe | None = None) -> Machine:
    """Describe this machine from torch, nvidia-smi (where present), /proc and the
    control group; raises for nothing.

    It is found once per process, or per ``probe``.
    """
    probe = probe or Probe()
    opened, build = probe.torch_says()
    archs = build["arch_list"]
    # torch lists a GPU that it has no kernels for; a capability that nobody names is
    # left to torch's word.
    capabilities = {gpu.capability for gpu in opened[:1]}
    works = any(x is None or not archs or runs(archs, x) for x in capabilities)
    listed = _smi_gpus(probe)
    by_name = {gpu.name: gpu for gpu in listed}
    gpus = []
    for gpu in opened:
        same = by_name.get(gpu.name, gpu)
        gpus.append(replace(gpu, driver=same.driver, clock_max_hz=same.clock_max_hz))
    cores = probe.affinity()
    return Machine(
        device="cuda" if works else "cpu",
        gpus=tuple(gpus or listed),
        cpu_model=_cpu_model(probe.read),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cores=max(1, len(cores)),
        cpu_quota=_cpu_quota(probe.read),
        cache_bytes=_cache_bytes(probe.read, cores),
        ram_bytes=ram_bytes(probe.read),
        **build,
    )


def runs(arch_list: Iterable[str], capability: Capability) -> bool:
    """Say whether binaries for these architectures run on a capability.

    A cubin sm_XY runs on major X and any minor >= Y; PTX compute_XY on anything newer;
    sm_90a only on 9.0 itself, and sm_100f within its major.

    >>> runs(["sm_60"], (6, 1)), runs(["sm_61"], (6, 0)), runs(["sm_80"], (9, 0)), runs(["compute_80"], (9, 0))
    (True, False, False, True)
    """
    for arch in arch_list:
        if name := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch):
            built = int(name[2]), int(name[3])
            if name[4] == "a":
                fits = capability == built
            elif name[1] == "sm" or name[4] == "f":
                fits = capability[0] == built[0] and capability >= built
            else:
                fits = capability >= built
            if fits:
                return True
    return False


def _smi_gpus(probe: Probe) -> list[Gpu]:
    """The GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES names, in the order of
    the latter.
    """
    listed: list[tuple[str, Gpu]] = []  # with their UUIDs
    for line in (probe.nvidia_smi(SMI_FIELDS) or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(SMI_FIELDS):
            continue
        name, capability, memory, uuid, driver, clock = cells
        pair = re.fullmatch(r"(\d+)\.(\d+)", capability)
        nbytes = _number(memory, 2**20)
        hertz = _number(clock, 1e6)
        if pair or nbytes:  # text that is no answer must not become a GPU
            pair = pair and (int(pair[1]), int(pair[2]))
            listed.append((uuid, Gpu(name, pair, nbytes, driver, hertz)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu for _, gpu in listed]
    return [
        gpu
        for entry in map(str.strip, visible.split(","))
        for i, (uuid, gpu) in enumerate(listed)
        if entry == str(i) or (entry.startswith("GPU-") and uuid.startswith(entry))
    ]


def _number(text: str, unit: float) -> float | None:
    # "8192" or "8192 MiB"; "[N/A]" and "[Not Supported]" are no figures
    first = text.partition(" ")[0]
    return int(first) * unit if first.isdecimal() else None


def _cpu_model(read: Read) -> str:
    line = r"(?m)^(?:model name|Model|cpu model)\s*:\s*(.+)$"
    if model := re.search(line, read("/proc/cpuinfo") or ""):
        return " ".join(model[1].split())
    return platform.processor() or platform.machine() or "unknown CPU"


def _cgroup(
    read: Read, controller: str, v2_name: str, v1_name: str
) -> Iterator[tuple[str, str]]:
    """Yield (directory, text) of a control group's file for this process's group and
    all groups above it.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = f"/sys/fs/cgroup/{controllers}"
        name = v1_name if controllers else v2_name
        for group in (Path(path), *Path(path).parents):
            directory = f"{base.rstrip('/')}{group}".rstrip("/")
            if (text := read(f"{directory}/{name}")) is not None:
                yield directory, text.strip()


def ram_bytes(read: Read) -> int | None:
    """Return the smaller of the memory and the limit of this process's control group,
    in bytes.
    """
    total = re.findall(r"(?m)^MemTotal:\s*(\d+) kB", read("/proc/meminfo") or "")
    limits = [int(kib) * 1024 for kib in total]
    group = _cgroup(read, "memory", "memory.max", "memory.limit_in_bytes")
    limits += [int(text) for _, text in group if text.isdecimal()]  # "max": no limit
    return min(limits, default=None)


def _cpu_quota(read: Read) -> float | None:
    shares = []
    for directory, text in _cgroup(read, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        period = period or (read(f"{directory}/cpu.cfs_period_us") or "").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _cache_bytes(read: Read, cores: set[int]) -> int | None:
    """Sum the last-level caches that the usable cores reach, each shared one once."""
    # (The cores that share it, KiB) of the last level that a core has.
    last: dict[int, tuple[str, int]] = {}
    for core in cores:
        for index in range(8):
            folder = f"/sys/devices/system/cpu/cpu{core}/cache/index{index}"
            size = read(f"{folder}/size")
            shared = read(f"{folder}/shared_cpu_list")
            if not (size and shared):
                break
            last[core] = shared, int(size.strip().removesuffix("K"))
    return 1024 * sum(size for _, size in set(last.values())) or None


@dataclass(frozen=True)
class Peaks:
    """Measured upper bounds of this CPU with the current threads: FLOP/s, and bytes/s
    (read plus written).
    """

    flops_per_s: float
    bytes_per_s_dram: float
    bytes_per_s_cache: float
    cache_bytes: int | None = None  # last-level cache; None: unknown

    def bandwidth(self, working_set_bytes: float) -> float:
        """Return bytes/s that a working set can see at best: what the cache holds at
        its speed, the rest at DRAM's.

        An unknown cache size counts as large enough, so that the bound stays above the
        truth.
        """
        total = cached = max(working_set_bytes, 1)
        if self.cache_bytes is not None:
            cached = min(total, self.cache_bytes)
        seconds = cached / self.bytes_per_s_cache
        return total / (seconds + (total - cached) / self.bytes_per_s_dram)

    def best(self, other: Peaks) -> Peaks:
        """Join two measurements of the same machine: the higher of each."""
        return Peaks(*map(max, astuple(self)[:3], astuple(other)[:3]), self.cache_bytes)


def measure_cpu_peaks(dtype: str = "float32") -> Peaks:
    """Measure arithmetic rate, memory bandwidth and in-cache bandwidth in about a
    second, the best of several each.

    The rate of arithmetic is that of torch's products, or of this CPU's vector units
    where that is higher and a C++ compiler is here. Low-precision dtypes count the fp32
    rate too where it is higher: a kernel may compute in fp32.
    """
    machine = detect()
    names = {dtype} if dtype in ("float32", "float64") else {"float32", dtype}
    # No cache holds the buffer for DRAM: it has four times the size of the last level,
    # at most 1/32 of the memory.
    cache = machine.cache_bytes or 2**25
    memory = machine.ram_bytes or 2**33
    buffer = min(4 * cache, 2**28, memory // 32)
    each_s = MATMUL_S / len(names)
    with torch.no_grad():
        flops = max(_matmul_rate(getattr(torch, name), each_s) for name in names)
        if dtype != "float64":
            units = torch.get_num_threads(), dtype == "bfloat16"
            shortest = partial(_best_seconds, budget_s=VECTOR_S)
            flops = max(flops, native.multiply_rate(*units, shortest))
        dram = _bandwidth(max(buffer, 2**22), DRAM_S)
        in_cache = max(_bandwidth(size, CACHE_S / 3) for size in (2**18, 2**20, 2**22))
    return Peaks(flops, dram, max(in_cache, dram), machine.cache_bytes)


def _best_seconds(call: Callable[[], object], budget_s: float) -> float:
    """Return the shortest of as many calls as fit the budget, at least one."""
    best = math.inf
    end = time.perf_counter() + budget_s
    while best == math.inf or time.perf_counter() + best < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _matmul_rate(dtype: torch.dtype, budget_s: float) -> float:
    """Return FLOP/s of square products; where 2048 would take longer than the budget
    (slow fp16), of smaller ones.
    """
    best = 0.0
    for size in SIZES:
        if best and 2 * size**3 / best > budget_s / 2:
            break
        a = torch.randn(size, size).to(dtype)  # (size, size)
        multiply = partial(torch.mm, a, a, out=torch.empty_like(a))
        multiply()  # the first call picks a kernel and touches the memory
        seconds = _best_seconds(multiply, budget_s if size == SIZES[-1] else 0.01)
        best = max(best, 2 * size**3 / seconds)
    return best


def _bandwidth(buffer_bytes: int, budget_s: float) -> float:
    """Return bytes/s, the best of copying (read plus write), summing (read) and filling
    (write) a buffer.
    """
    a = torch.ones(buffer_bytes // 4)
    b = torch.ones_like(a)
    tries = [
        (2 * buffer_bytes, lambda: b.copy_(a)),
        (buffer_bytes, a.sum),
        (buffer_bytes, lambda: b.fill_(1.0)),
    ]
    return max(
        moved / _best_seconds(call, budget_s / len(tries)) for moved, call in tries
    )
