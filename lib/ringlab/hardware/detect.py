"""The host's CPU, memory and limits, from /proc, /sys and the control group; None where a file does not tell.

`read` returns a file's text, or None where it cannot be read.

What this machine is: CPU, memory, GPUs as the driver and as torch see them. Never raises for hardware's absence.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from .dtypes import Capability
from .torch_builds import runs

Read = Callable[[str], "str | None"]


def cpu_model(read: Read) -> str:
    """Name the CPU."""
    text = read("/proc/cpuinfo") or ""
    for key in ("model name", "Model", "Hardware", "cpu model"):
        if found := re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE):
            return " ".join(found[1].split())
    return platform.processor() or platform.machine() or "unknown CPU"


def _cgroup(read: Read, controller: str, v2_name: str, v1_name: str) -> Iterator[tuple[str, str]]:
    """Yield (directory, text) of a control group's file for this process's group and all groups above it."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        base, name = ("/sys/fs/cgroup", v2_name) if not controllers else (f"/sys/fs/cgroup/{controllers}", v1_name)
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts), -1, -1):
            directory = "/".join([base, *parts[:depth]])
            if (text := read(f"{directory}/{name}")) is not None:
                yield directory, text.strip()


def ram_bytes(read: Read) -> int | None:
    """Return the smaller of the memory and the limit of this process's control group, in bytes."""
    limits = []
    if found := re.search(r"^MemTotal:\s*(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE):
        limits.append(int(found[1]) * 1024)
    group = [text for _, text in _cgroup(read, "memory", "memory.max", "memory.limit_in_bytes")]
    limits += [int(text) for text in group if text.isdecimal()]  # "max": no limit
    return min(limits, default=None)


def cpu_quota(read: Read) -> float | None:
    """Return the cores' worth of time that the control group grants, None without a limit."""
    shares = []
    for directory, text in _cgroup(read, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        period = period or (read(f"{directory}/cpu.cfs_period_us") or "").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def cache_bytes(read: Read, cores: set[int]) -> int | None:
    """Sum the last-level caches that the usable cores reach, each shared one once."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}
    caches: dict[tuple[int, str], int] = {}
    for core in cores:
        for index in range(8):
            folder = f"/sys/devices/system/cpu/cpu{core}/cache/index{index}"
            if (size := read(f"{folder}/size")) is None:
                break
            found = re.fullmatch(r"(\d+)([KMG]?)", size.strip())
            level = (read(f"{folder}/level") or "").strip()
            if found and level.isdecimal():
                shared = (read(f"{folder}/shared_cpu_list") or str(core)).strip()
                caches[int(level), shared] = int(found[1]) * units[found[2]]
    last = max((level for level, _ in caches), default=None)
    return None if last is None else sum(size for (level, _), size in caches.items() if level == last)


SMI_TIMEOUT_S = 10
_SMI_FIELDS = (
    "name", "compute_cap", "memory.total", "uuid",
    "driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver or torch reports it; None where neither says."""

    name: str
    capability: Capability | None = None
    memory_bytes: int | None = None
    uuid: str | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    clock_max_hz: float | None = None
    memory_clock_max_hz: float | None = None


@dataclass(frozen=True)
class Machine:
    """A machine: `device` is what torch can compute on ("cuda" or "cpu"); `gpus` are those that are there.

    A GPU that torch cannot drive is in `gpus` while `device` stays "cpu"; :func:`ringlab.hardware.drivable` says why.

    >>> Machine(cpu_model="some CPU").name
    'some CPU'
    """

    device: str = "cpu"
    gpus: tuple[Gpu, ...] = ()
    cpu_model: str = "unknown CPU"
    cpu_capability: str = "DEFAULT"  # torch's widest instruction set here: AVX2, AVX512, ...
    cores: int = 1  # that this process may run on
    cpu_quota: float | None = None  # cores' worth of time that the control group grants
    cache_bytes: int | None = None  # last level, summed over the usable cores
    ram_bytes: int | None = None  # the smaller of the memory and the control group's limit
    threads: int = 1  # torch.get_num_threads()
    torch: str = ""
    torch_cuda: str | None = None  # None: a CPU build
    arch_list: tuple[str, ...] = ()
    torch_error: str | None = field(default=None, repr=False)  # what torch said when it could not start a GPU

    @property
    def name(self) -> str:
        """Name of the first GPU, or the CPU model where there is none."""
        return self.gpus[0].name if self.gpus else self.cpu_model

    @property
    def capability(self) -> Capability | None:
        """Compute capability of the first GPU as a (major, minor) pair, None without one."""
        return self.gpus[0].capability if self.gpus else None

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the first GPU, or the memory limit of this process where there is none, in bytes."""
        return self.gpus[0].memory_bytes if self.gpus else self.ram_bytes

    @property
    def driver(self) -> str | None:
        """NVIDIA driver version, None without a GPU."""
        return self.gpus[0].driver if self.gpus else None

    def without_gpu(self) -> Machine:
        """Return the same machine with its GPUs put aside: what a run on the CPU uses."""
        return replace(self, device="cpu", gpus=())

    def to_dict(self) -> dict:
        """Return all fields as plain JSON values."""
        return asdict(self)


class Probe:
    """Everything that :func:`detect` asks of the outside; override methods to describe another machine."""

    def nvidia_smi(self, fields: Sequence[str]) -> str | None:
        """Ask nvidia-smi for CSV fields; "" where it refuses, None where it is absent or takes longer than 10 s."""
        path = shutil.which("nvidia-smi")
        if path is None:
            return None
        command = [path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else ""

    def torch_gpus(self) -> tuple[list[Gpu], str | None]:
        """List the GPUs that torch opens, and what it said if it could not."""
        # torch warns about old drivers and missing kernels; both are reported by `drivable` in our own words.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gpus: list[Gpu] = []
            error = None
            try:
                for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                    p = torch.cuda.get_device_properties(i)
                    capability = None if torch.version.hip else (p.major, p.minor)  # AMD numbers mean something else
                    uuid = getattr(p, "uuid", None)
                    gpus.append(Gpu(p.name, capability, p.total_memory, None if uuid is None else str(uuid)))
            except (RuntimeError, AssertionError) as e:
                gpus, error = [], _first_line(e)
        if not gpus and error is None and said:
            error = _first_line(said[-1].message)
        return gpus, error

    def torch_build(self) -> tuple[str, str | None, tuple[str, ...]]:
        """Return torch's version, the CUDA (or HIP) version it was built with, and its architectures."""
        return torch.__version__, torch.version.cuda or torch.version.hip, tuple(torch.cuda.get_arch_list())

    def threads(self) -> int:
        """Return the number of threads that torch uses."""
        return torch.get_num_threads()

    def cpu_capability(self) -> str:
        """Return the widest instruction set that torch uses here."""
        return torch.backends.cpu.get_cpu_capability()

    def read(self, path: str) -> str | None:
        """Read a small text file; None where it cannot be read."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return None

    def affinity(self) -> set[int]:
        """Return the cores that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return set(os.sched_getaffinity(0))
        return set(range(os.cpu_count() or 1))

    def environ(self, name: str) -> str | None:
        """Return an environment variable."""
        return os.environ.get(name)


def detect(probe: Probe | None = None) -> Machine:
    """Describe this machine from torch, nvidia-smi (where present), /proc and the control group; raises for nothing.

    >>> detect().device in ("cpu", "cuda")
    True
    """
    probe = probe or Probe()
    version, cuda, arch_list = probe.torch_build()
    opened, error = probe.torch_gpus()
    gpus = _merge(opened, _smi_gpus(probe))
    # torch lists a GPU that it has no kernels for; a capability that nobody names is left to torch's word.
    works = bool(opened) and (opened[0].capability is None or not arch_list or runs(arch_list, opened[0].capability))
    cores = probe.affinity()
    return Machine(
        device="cuda" if works else "cpu",
        gpus=tuple(gpus),
        cpu_model=cpu_model(probe.read),
        cpu_capability=probe.cpu_capability(),
        cores=max(1, len(cores)),
        cpu_quota=cpu_quota(probe.read),
        cache_bytes=cache_bytes(probe.read, cores),
        ram_bytes=ram_bytes(probe.read),
        threads=probe.threads(),
        torch=version,
        torch_cuda=cuda,
        arch_list=tuple(arch_list),
        torch_error=error,
    )


def _smi_gpus(probe: Probe) -> list[Gpu]:
    """Ask nvidia-smi for all fields, then for fewer: old drivers refuse a whole query for one unknown field."""
    some = ("name", "compute_cap", "memory.total")
    for fields in (_SMI_FIELDS, some, some[:2], ("compute_cap",), ("name", "memory.total")):
        text = probe.nvidia_smi(fields)
        if text is None:
            break
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
        rows = [row for row in rows if any(row)]
        named = [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]
        if not named or len(named) != len(rows):
            continue
        # Text that is no answer must not become a GPU: each row needs a capability, or else a size.
        if not all(_capability(row.get("compute_cap", "")) or _number(row.get("memory.total")) for row in named):
            continue
        return [_from_smi(row) for row in _visible(probe, named)]
    return []


def _from_smi(row: dict[str, str]) -> Gpu:
    name = row.get("name", "")
    mebibytes = _number(row.get("memory.total"))
    clock, memory_clock = _number(row.get("clocks.max.sm")), _number(row.get("clocks.max.memory"))
    return Gpu(
        name=name,
        capability=_capability(row.get("compute_cap", "")) or _capability_by_name(name),
        memory_bytes=None if mebibytes is None else int(mebibytes * 2**20),
        uuid=row.get("uuid"),
        driver=row.get("driver_version"),
        power_limit_w=_number(row.get("power.limit")),
        clock_max_hz=None if clock is None else clock * 1e6,
        memory_clock_max_hz=None if memory_clock is None else memory_clock * 1e6,
    )


def _visible(probe: Probe, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Keep the rows that CUDA_VISIBLE_DEVICES names; a bad entry hides all that follow, as it does in CUDA."""
    wanted = probe.environ("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return rows
    kept = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdecimal() and int(entry) < len(rows):
            kept.append(rows[int(entry)])
        elif entry.startswith("GPU-") and any(row.get("uuid", "").startswith(entry) for row in rows):
            kept += [row for row in rows if row.get("uuid", "").startswith(entry)]
        else:
            break
    return kept


def _merge(opened: list[Gpu], listed: list[Gpu]) -> list[Gpu]:
    """Take names and sizes from torch, what only the driver knows from nvidia-smi, matched by UUID or else by name."""
    if not opened:
        return listed
    merged = []
    for gpu in opened:
        same = [x for x in listed if gpu.uuid and _bare(x.uuid) == _bare(gpu.uuid)]
        same = same or [x for x in listed if x.name == gpu.name]
        if same:
            x = same[0]
            gpu = replace(gpu, driver=x.driver, power_limit_w=x.power_limit_w, clock_max_hz=x.clock_max_hz,
                          memory_clock_max_hz=x.memory_clock_max_hz)  # fmt: skip
        merged.append(gpu)
    return merged


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-")  # torch leaves the prefix out


def _capability(text: str) -> Capability | None:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _capability_by_name(name: str) -> Capability | None:
    """Drivers before 510 do not tell the capability; the profiles know it for the cards that they describe."""
    from ringlab.hardware.profiles import profiles  # here, as profiles describe machines

    return next((p.capability for p in profiles().values() if p.pattern and re.search(p.pattern, name)), None)


def _number(text: str | None) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?: [A-Za-z]+)?", text or "")  # "[N/A]", "[Not Supported]": no figure
    return float(found[1]) if found else None


def _first_line(message: object) -> str:
    return (str(message).strip().splitlines() or [""])[0]
