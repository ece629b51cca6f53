"""A CPU's peaks, measured: they bound what a run can claim, so the best seen counts, never the average."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .detect import Machine, detect

MATMUL_SIZE = 2048
_BUDGET_S = {"matmul": 0.4, "dram": 0.18, "cache": 0.09}


@dataclass(frozen=True)
class Peaks:
    """Measured upper bounds of this CPU with the current threads: FLOP/s, and bytes/s (read plus written)."""

    flops_per_s: float
    bytes_per_s_dram: float
    bytes_per_s_cache: float
    cache_bytes: int | None = None  # last-level cache; None: unknown
    threads: int = 1

    def bandwidth(self, working_set_bytes: float) -> float:
        """Return bytes/s that a working set can see at best: what the cache holds at its speed, the rest at DRAM's.

        An unknown cache size counts as large enough, so that the bound stays above the truth.

        >>> Peaks(1e11, 4e10, 1e11, cache_bytes=2**25).bandwidth(2**25)
        100000000000.0
        """
        cached = working_set_bytes if self.cache_bytes is None else min(working_set_bytes, self.cache_bytes)
        if cached <= 0:
            return self.bytes_per_s_cache
        seconds = cached / self.bytes_per_s_cache + (working_set_bytes - cached) / self.bytes_per_s_dram
        return working_set_bytes / seconds

    def best(self, other: Peaks) -> Peaks:
        """Join two measurements of the same machine: the higher of each."""
        return Peaks(
            max(self.flops_per_s, other.flops_per_s),
            max(self.bytes_per_s_dram, other.bytes_per_s_dram),
            max(self.bytes_per_s_cache, other.bytes_per_s_cache),
            self.cache_bytes if self.cache_bytes is not None else other.cache_bytes,
            max(self.threads, other.threads),
        )


def measure_cpu_peaks(dtype: torch.dtype | str = torch.float32, machine: Machine | None = None) -> Peaks:
    """Measure matmul rate, memory bandwidth and in-cache bandwidth in about a second, the best of several each.

    Low-precision dtypes count the fp32 rate too where it is higher: a kernel may convert and compute in fp32.
    Raises ValueError for a dtype that is not floating point.

    >>> measure_cpu_peaks(torch.float32).flops_per_s > 1e8
    True
    """
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ValueError(f"peaks are measured for a floating-point dtype, not {dtype!r}")
    machine = machine or detect()
    arithmetics = [wanted] if wanted in (torch.float32, torch.float64) else [torch.float32, wanted]
    budget = _BUDGET_S["matmul"] / len(arithmetics)
    with torch.no_grad():
        flops = max(_matmul_rate(each, budget) for each in arithmetics)
        dram = _bandwidth(_dram_buffer_bytes(machine), _BUDGET_S["dram"])
        cache = max(_bandwidth(size, _BUDGET_S["cache"] / 3) for size in (2**18, 2**20, 2**22))
    return Peaks(flops, dram, max(cache, dram), machine.cache_bytes, torch.get_num_threads())


def _best_seconds(call: Callable[[], object], budget_s: float) -> float:
    """Return the shortest of as many calls as fit the budget, at least one."""
    best, end = float("inf"), time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now + best > end:
            return best


def _matmul_rate(dtype: torch.dtype, budget_s: float) -> float:
    """Return FLOP/s of square products; where 2048 would take longer than the budget (slow fp16), of smaller ones."""
    best = 0.0
    for size in (256, 512, 1024, MATMUL_SIZE):
        if best and 2 * size**3 / best > budget_s / 2:
            break
        a = torch.randn(size, size).to(dtype)  # (size, size)
        out = torch.empty_like(a)
        torch.mm(a, a, out=out)  # the first call picks a kernel and touches the memory
        seconds = _best_seconds(lambda a=a, out=out: torch.mm(a, a, out=out), budget_s if size == MATMUL_SIZE else 0.01)
        best = max(best, 2 * size**3 / seconds)
    return best


def _dram_buffer_bytes(machine: Machine) -> int:
    """Choose a buffer that no cache holds: four times the last level, at most 1/32 of the memory."""
    size = min(4 * (machine.cache_bytes or 2**25), 2**28)
    if machine.ram_bytes:
        size = min(size, machine.ram_bytes // 32)
    return max(size, 2**22)


def _bandwidth(buffer_bytes: int, budget_s: float) -> float:
    """Return bytes/s, the best of copying (read plus write), summing (read) and filling (write) a buffer."""
    a = torch.ones(buffer_bytes // 4)
    b = torch.ones_like(a)
    tries = [(2 * buffer_bytes, lambda: b.copy_(a)), (buffer_bytes, a.sum), (buffer_bytes, lambda: b.fill_(1.0))]
    return max(moved / _best_seconds(call, budget_s / len(tries)) for moved, call in tries)
