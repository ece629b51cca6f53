"""Clocks and how often to call, in seconds; lower bounds on times; the memory of a first call."""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .. import hardware, memory, tracking
from ..cost import Cost
from .points import Point
from .systems import Output, Refused, System, build

MIN_SAMPLE_S = 0.02  # of one sample; shorter ones carry the scheduler's slices of several ms
SAMPLES = 10
POINT_S = 3.0  # of samples: with its warm-up and checks such a point takes 7 s, and longer ones get fewer samples
FEWEST = 4
FEWEST_LONG = 3  # for calls over LONG_S
LONG_S = 2.0
MAX_SAMPLES = 30
WARM_S = 0.1  # of calls before the first sample, at least one


class CpuClock:
    """Wall-clock time of ``loops`` calls in a row, per call."""

    def sample(self, call: Callable[[], object], loops: int) -> float:
        start = time.perf_counter()
        for _ in range(loops):
            call()
        return (time.perf_counter() - start) / loops


class CudaClock:
    """Time between two events on the current stream, per call; the L2 cache is flushed before each of them.

    The flush overwrites a buffer twice as large as L2, so that inputs come from memory as in a real network.
    """

    def __init__(self, device: torch.device):
        self.device = device
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self.buffer = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def sample(self, call: Callable[[], object], loops: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(loops)]
        torch.cuda.synchronize(self.device)
        for start, end in events:
            self.buffer.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return sum(start.elapsed_time(end) for start, end in events) / 1e3 / loops


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def loops_for(seconds: float, sample_s: float = 0.0) -> int:
    """Calls per sample, so that one sample is long enough to time, and takes ``sample_s`` at least.

    >>> loops_for(0.5), loops_for(0.003), loops_for(0.3, 1.0)
    (1, 7, 4)
    """
    return max(1, math.ceil(max(sample_s, MIN_SAMPLE_S) / max(seconds, 1e-7)))


def samples_for(seconds: float) -> int:
    """Samples of a point, each of which takes so long: 10, more for quick calls, fewer where they would take over 3 s.

    >>> samples_for(0.001), samples_for(0.2), samples_for(0.7), samples_for(2.5), samples_for(60.0)
    (30, 10, 4, 3, 3)
    """
    one = max(seconds, MIN_SAMPLE_S)
    if one > LONG_S:
        return FEWEST_LONG
    if one * SAMPLES > POINT_S:
        return max(FEWEST, int(POINT_S / one))
    return min(MAX_SAMPLES, max(SAMPLES, int(2.0 / one)))


def rounds_for(seconds: list[float], interleaved: bool) -> list[int]:
    """Samples of each point of a group; interleaved ones get no extra samples that others would not pair with.

    >>> rounds_for([0.001, 0.2, 2.5], True), rounds_for([0.001, 0.01], True), rounds_for([0.001, 2.5], False)
    ([10, 10, 3], [30, 30], [30, 3])
    """
    counts = [samples_for(s) for s in seconds]
    if not interleaved or not counts:
        return counts
    common = max(SAMPLES, min(counts))
    return [min(c, common) for c in counts]


PROBES = 3  # of the rates, before a row that is faster than its bound is called suspect


class Bounds:
    """``seconds(cost, dtype)`` that no call can beat on this device.

    ``probe(names)`` measures the rates of dtypes on the CPU: name -> (FLOP/s, bytes/s from memory, from cache). One
    that other processes disturb says too little, and its bound would accuse honest rows: the best of all counts.
    """

    def __init__(self, device: str, profile: str | None, probe: Callable[[list[str]], dict]):
        self.machine, self.on_gpu, self._probe = hardware.detect(), device == "cuda", probe
        found = hardware.get_profile(profile) if profile and self.on_gpu else None
        self.profile = found.on(self.machine) if found else None
        self.peaks: dict[str, hardware.Peaks] = {}

    def need(self, dtypes, again: bool = False) -> None:
        """Measure the rates of these dtypes, and of fp32, in which half precision may be computed: once each."""
        wanted = {*dtypes, "float32"} if dtypes and not self.on_gpu else set()
        wanted = sorted(wanted if again else wanted - self.peaks.keys())
        for name, rates in (self._probe(wanted) if wanted else {}).items():
            found = hardware.Peaks(*rates, self.machine.cache_bytes)
            self.peaks[name] = found.best(self.peaks[name]) if name in self.peaks else found

    def seconds(self, cost: Cost, dtype: str) -> float | None:
        if self.on_gpu:
            if self.profile is None:
                return None
            rates = self.profile.rates(getattr(torch, dtype), cost.floor_bytes, self.machine)
            return cost.seconds(rates.flops_per_s, rates.bytes_per_s) or None
        peaks = [self.peaks[name] for name in {"float32", dtype} & self.peaks.keys()]
        if not peaks:  # the probe failed
            return None
        rates = hardware.measured_rates(peaks, cost.floor_bytes)
        return cost.seconds(rates.flops_per_s, rates.bytes_per_s)

    def below(self, cost: Cost, dtype: str, seconds: float) -> tuple[float | None, bool]:
        """(bound, whether ``seconds`` lies below it even after the rates were probed again)."""
        bound = self.seconds(cost, dtype)
        for _ in range(0 if self.on_gpu else PROBES):
            if bound and seconds < bound:
                self.need({dtype}, again=True)
                bound = self.seconds(cost, dtype)
        return bound, bool(bound) and seconds < bound


WARM_TOKENS = 512
WORTH_BYTES = 32 << 20
ALREADY_WARM = ("sgemm", "flex")  # one has no code of ours to load, the other is compiled for one length as it is built


def footprint(system: System, device: torch.device) -> tuple[list, Output, dict, float]:
    """(inputs, output, memory in bytes, seconds) of a first, cold call. Inputs, output and gradients count.

    ``tracked_peak_bytes``: live tensor storages. ``high_water_bytes``: the process's own mark above its resident size
    before the inputs were made, on the CPU and for 32 MiB of tensors or more, below which the libraries' own pages
    would be most of it. ``allocator_peak_bytes``: on CUDA. ``operator_calls``: aten operators that the call dispatched,
    ``view_calls`` those of them that only make a view; what a cache builds once is in neither. And what the system
    itself counted in that call.
    """
    gc.collect()
    floor = system.cost.floor_bytes
    found = {"floor_bytes": floor, "high_water_bytes": None, "allocator_peak_bytes": None}
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else tracking.resident_bytes()
    inputs = system.inputs()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    mark = not on_gpu and floor >= WORTH_BYTES and tracking.reset_high_water()
    with tracking.LiveStorageTracker() as tracker:
        tracker.register(*inputs)
        start = time.perf_counter()
        output = system.run(inputs)
        seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.synchronize(device)
        found["allocator_peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    if mark:
        found["high_water_bytes"] = tracking.high_water_bytes() - before
    found["tracked_peak_bytes"] = tracker.peak_bytes
    found |= {"operator_calls": tracker.operators, "view_calls": tracker.views}
    return inputs, output, found | output.counted, seconds


def warm(point: Point, device: torch.device) -> None:
    """Start threads and load code before any baseline is taken: pages that do not grow with n are not counted.

    A long point is preceded by a short one of its kind; what the allocator keeps of it is given back where the C
    library can (glibc).
    """
    x = torch.ones(1, 2, 64, 64, device=device, requires_grad=True)
    with tracking.LiveStorageTracker():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x) @ x
        torch.autograd.grad(out.sum(), x)
    if device.type != "cpu" or point.seq_len <= 4 * WARM_TOKENS or point.system in ALREADY_WARM:
        return
    try:
        system = build(point.but(seq_len=WARM_TOKENS), device)
        with tracking.LiveStorageTracker():
            system.run(system.inputs())
    except (Refused, NotImplementedError):  # this length alone, perhaps; the point itself comes next
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    memory.GLOBAL_POOL.clear()
    memory.RESULTS.clear()
    gc.collect()
    if trim is not None:
        trim(0)


def limit_memory(extra_bytes: int | None) -> None:
    """Let the process grow by so much more, so that a failing allocation is an error here and not a kill elsewhere."""
    if extra_bytes is not None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + extra_bytes, resource.RLIM_INFINITY))


def available_bytes(ram_bytes: int | None) -> int | None:
    """Memory that a process may still take, by the system's estimate and at most ``ram_bytes``; None: unknown."""
    lines = (hardware.Probe().read("/proc/meminfo") or "").splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*available, *([ram_bytes] if available and ram_bytes else [])], default=None)
