"""Clocks and how often to call; the least time of a call by the roofline; the memory of
a first call.
"""

import gc
import math
import re
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from .. import hardware, memory, tracking
from ..cost import Cost
from .points import Point
from .systems import Output, System, build

MIN_SAMPLE_S = (
    0.02  # of one sample; shorter ones carry the scheduler's slices of several ms
)
SAMPLES = 10
POINT_S = 3.0  # of samples: with its warm-up and checks such a point takes 7 s, and longer ones get fewer samples
FEWEST = 6  # with fewer than five a time has no interval
FEWEST_LONG = 3  # for calls over LONG_S, unless their group asks for more rounds
LONG_S = 2.0
MAX_SAMPLES = 30
WARM_S = 0.1  # of calls before the first sample, at least one
MOST_ON_GPU = (
    1000  # calls of a sample: the flush before each takes longer than short ones
)


def cpu_seconds(call: Callable[[], object], loops: int) -> float:
    """Wall-clock time of ``loops`` calls in a row, per call."""
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops


def cuda_seconds(
    call: Callable[[], object], loops: int, device: torch.device
) -> tuple[float, float]:
    """(time between two events on the current stream, time that the host takes to issue
    the call), per call; the L2 cache is flushed before each call. If the host takes
    longer, the first is about the second.

    The flush overwrites a buffer twice as large as L2, so that inputs come from memory
    as in a real network.
    """
    size = torch.cuda.get_device_properties(device).L2_cache_size or 64 << 20
    buffer = torch.empty(2 * size, dtype=torch.uint8, device=device)
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(loops)
    ]
    torch.cuda.synchronize(device)
    host_s = 0.0
    for start, end in events:
        buffer.zero_()
        start.record()
        begin = time.perf_counter()
        call()
        host_s += time.perf_counter() - begin
        end.record()
    torch.cuda.synchronize(device)
    gpu_s = sum(start.elapsed_time(end) for start, end in events) / 1e3
    return gpu_s / loops, host_s / loops


def loops_for(seconds: float) -> int:
    """Calls per sample, so that a sample is long enough to time.

    >>> loops_for(0.5), loops_for(0.003)
    (1, 7)
    """
    return max(1, math.ceil(MIN_SAMPLE_S / max(seconds, 1e-7)))


def samples_for(seconds: float) -> int:
    """How many samples of so many seconds to take: 10, more of quick calls, fewer if
    they would take over 3 s.

    >>> samples_for(0.001), samples_for(0.2), samples_for(0.7), samples_for(2.5), samples_for(60.0)
    (30, 10, 6, 3, 3)
    """
    one = max(seconds, MIN_SAMPLE_S)
    if one > LONG_S:
        return FEWEST_LONG
    if one * SAMPLES > POINT_S:
        return max(FEWEST, int(POINT_S / one))
    return min(MAX_SAMPLES, max(SAMPLES, int(2.0 / one)))


def rounds_for(seconds: list[float], interleaved: bool) -> list[int]:
    """How many samples to take of each point of a group; interleaved points get none
    that no other could pair with.

    >>> rounds_for([0.001, 0.2, 2.5], True), rounds_for([0.001, 0.01], True), rounds_for([0.001, 2.5], False)
    ([10, 10, 3], [30, 30], [30, 3])
    >>> rounds_for([], True)
    []
    """
    counts = [samples_for(s) for s in seconds]
    common = max(SAMPLES, min(counts, default=0)) if interleaved else MAX_SAMPLES
    return [min(c, common) for c in counts]


PROBES = (
    3  # of the rates, before a row that is faster than its roofline is called suspect
)


class Bounds:
    """``seconds(cost, dtype)``: the least time of a call on this device by its
    roofline.

    ``probe(names)`` measures the rates of dtypes on the CPU: name -> ``Peaks``. Other
    processes can only lower them, which would make correct rows suspect, so the best of
    all probes counts.
    """

    def __init__(self, device: str, profile: str, probe: Callable[[list[str]], dict]):
        self.machine = hardware.detect()
        self.on_gpu = device == "cuda"
        self.probe = probe
        self.profile = (
            hardware.get_profile(profile).on(self.machine) if self.on_gpu else None
        )
        self.peaks: dict[str, hardware.Peaks] = {}

    def need(self, dtypes, again: bool = False) -> None:
        """Measure the rates of these dtypes once, and of fp32, in which half precision
        may be computed.
        """
        names = {*dtypes, "float32"} if dtypes and not self.on_gpu else set()
        names = sorted(names if again else names - self.peaks.keys())
        for name, peaks in (self.probe(names) if names else {}).items():
            self.peaks[name] = peaks.best(self.peaks.get(name, peaks))

    def seconds(self, cost: Cost, dtype: str) -> float | None:
        peaks = [self.peaks[name] for name in {"float32", dtype} & self.peaks.keys()]
        if self.profile:
            rates = self.profile.rates(
                getattr(torch, dtype), cost.floor_bytes, self.machine
            )
        elif peaks:
            rates = hardware.measured_rates(peaks, cost.floor_bytes)
        else:  # a probe that failed
            return None
        return cost.seconds(rates.flops_per_s, rates.bytes_per_s) or None

    def below(self, cost: Cost, dtype: str, seconds: float) -> float | None:
        """The least time of a call that took so many seconds: where that is less, the
        rates are probed again.
        """
        bound = self.seconds(cost, dtype)
        for _ in range(PROBES):
            if bound and seconds < bound:
                self.need({dtype}, again=True)
                bound = self.seconds(cost, dtype)
        return bound


WARM_TOKENS = 512


def footprint(system: System, device: torch.device) -> tuple[list, Output, dict, float]:
    """(inputs, output, memory in bytes, seconds) of a first, cold call. Inputs, output
    and gradients count.

    ``tracked_peak_bytes``: live tensor storages. ``allocator_peak_bytes``: on CUDA.
    ``operator_calls``: aten operators of the call, ``view_calls`` those that only make
    a view, both without what a cache builds once. And what the system itself counted.
    """
    gc.collect()
    floor = system.cost.floor_bytes
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    inputs = system.inputs()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    with tracking.LiveStorageTracker() as tracker:
        tracker.register(*inputs)
        start = time.perf_counter()
        output = system.run(inputs)
        seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.synchronize(device)
    measured = {
        "floor_bytes": floor,
        "tracked_peak_bytes": tracker.peak_bytes,
        "allocator_peak_bytes": torch.cuda.max_memory_allocated(device) - before
        if on_gpu
        else None,
        "operator_calls": tracker.operators,
        "view_calls": tracker.views,
    }
    return inputs, output, measured | output.counted, seconds


def warm(point: Point, device: torch.device) -> None:
    """Start threads, load code and probe kernels first, so that what does not grow with
    n is not counted: each point is preceded by a short one of its kind.
    """
    x = torch.ones(1, 2, 64, 64, device=device, requires_grad=True)
    with tracking.LiveStorageTracker():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x) @ x
        torch.autograd.grad(out.sum(), x)
    # FlexAttention is compiled for one length as it is built.
    if device.type != "cpu" or point.system == "flex":
        return
    # Perhaps of this length alone; the point itself comes next.
    with suppress(NotImplementedError):
        shorter = min(WARM_TOKENS * point.world_size, point.seq_len)
        system = build(point.but(seq_len=shorter), device)
        with tracking.LiveStorageTracker():
            system.run(system.inputs())
    memory.GLOBAL_POOL.clear()
    memory.RESULTS.clear()
    gc.collect()


def limit_memory(extra_bytes: int | None) -> None:
    """Let the process grow by so many bytes only: too large an allocation then fails,
    and the system kills nobody.
    """
    if extra_bytes is not None:
        size = (
            int(Path("/proc/self/statm").read_text().split()[0])
            * resource.getpagesize()
        )
        resource.setrlimit(
            resource.RLIMIT_AS, (size + extra_bytes, resource.RLIM_INFINITY)
        )


def available_bytes(ram_bytes: int | None) -> int | None:
    """Memory that a process may still take, by the system's estimate and at most
    ``ram_bytes``; None: unknown.
    """
    line = re.search(
        r"^MemAvailable: +(\d+) kB",
        hardware.Probe().read("/proc/meminfo") or "",
        re.MULTILINE,
    )
    available = int(line[1]) * 1024 if line else None
    return min(available, ram_bytes) if available and ram_bytes else available
