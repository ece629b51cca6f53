"""The memory of a first call, in a process that did nothing else before."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from pathlib import Path

import torch

from .. import memory
from .points import Point
from .systems import Output, System, build

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
    before = torch.cuda.memory_allocated(device) if on_gpu else memory.resident_bytes()
    inputs = system.inputs()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    mark = not on_gpu and floor >= WORTH_BYTES and memory.reset_high_water()
    with memory.LiveStorageTracker() as tracker:
        tracker.register(*inputs)
        start = time.perf_counter()
        output = system.run(inputs)
        seconds = time.perf_counter() - start
    if on_gpu:
        torch.cuda.synchronize(device)
        found["allocator_peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    if mark:
        found["high_water_bytes"] = memory.high_water_bytes() - before
    found["tracked_peak_bytes"] = tracker.peak_bytes
    found |= {"operator_calls": tracker.operators, "view_calls": tracker.views}
    return inputs, output, found | output.counted, seconds


def warm(point: Point, device: torch.device) -> None:
    """Start threads and load code before any baseline is taken: pages that do not grow with n are not counted.

    A long point is preceded by a short one of its kind; what the allocator keeps of it is given back where the C
    library can (glibc).
    """
    x = torch.ones(1, 2, 64, 64, device=device, requires_grad=True)
    with memory.LiveStorageTracker():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x) @ x
        torch.autograd.grad(out.sum(), x)
    if device.type != "cpu" or point.seq_len <= 4 * WARM_TOKENS or point.system in ALREADY_WARM:
        return
    try:
        system = build(point.but(seq_len=WARM_TOKENS), device)
        with memory.LiveStorageTracker():
            system.run(system.inputs())
    except (ValueError, NotImplementedError):  # a length that this system refuses; the point itself comes next
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
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*available, *([ram_bytes] if ram_bytes else [])], default=None)
