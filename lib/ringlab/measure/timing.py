"""Clocks, and how often to call: warm-up, loops per sample, samples per point. Units: seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

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
    """Time between two events on the current stream, per call; the L2 cache is flushed before unless ``flush=False``.

    The flush overwrites a buffer twice as large as L2, so that inputs come from memory as in a real network.
    """

    def __init__(self, device: torch.device, flush: bool = True):
        self.device = device
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self.buffer = torch.empty(2 * size, dtype=torch.uint8, device=device) if flush else None

    def sample(self, call: Callable[[], object], loops: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.buffer is not None:
            self.buffer.zero_()
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(loops):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / loops


def clock_for(device: torch.device, flush: bool = True):
    return CudaClock(device, flush) if device.type == "cuda" else CpuClock()


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
