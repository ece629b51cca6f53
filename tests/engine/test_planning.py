"""What planning costs at a million tokens, for the patterns of the README and of models,
on each way that ``backend="auto"`` takes on a GPU: counted, not timed. A CPU's costs
are printed.
"""

import sys
from typing import NamedTuple

import pytest
import torch
from ringlab import Dilated, Execution, blocks, kernels, ladder, presets
from ringlab.engine.walk import Walked
from ringlab.engine.ways import LocalCall, WholePattern, way_of
from ringlab.kernels.base import DeviceSpec, pretend
from ringlab.tiles.patterns import tables_of
from ringlab.tracking import LiveStorageTracker

BF16, F32 = torch.bfloat16, torch.float32
MILLION = 1 << 20
tokens = blocks.sliding_window
# pattern, heads, K/V heads, head_dim, causal
CALLS = {
    "ladder": (ladder(MILLION), 8, 8, 64, True),
    "dilated": (Dilated([2048, 4096], [1, 2]), 8, 8, 64, True),
    "local and global": (blocks.local_global(2, 4), 8, 8, 64, False),
    "BigBird": (blocks.bigbird(1, 1, 1), 8, 8, 64, True),
    "window": (tokens(tokens=256), 8, 8, 64, True),
    "window of Mistral": (tokens(tokens=4096), 32, 8, 128, True),
    "window of Gemma 3": (tokens(tokens=1024), 8, 4, 256, True),
    "window of Qwen 2": (tokens(tokens=32768), 28, 4, 128, True),
    "window of gpt-oss": (tokens(tokens=128), 64, 8, 64, True),
    "window of ModernBERT": (tokens(tokens=65), 12, 12, 64, False),
    "GigaPath": (presets.SHAPES["GigaPath"]["pattern"], 16, 16, 48, False),
}
GPUS = [((6, 1), F32), ((8, 0), BF16), ((9, 0), F32)]


def anew(key, build):
    """What ``build`` makes, in place of a cache's."""
    return build()


class Costs(NamedTuple):
    """``size``: entries and tiles of lists, or dense calls. ``calls``: of Python and of
    what it calls. ``peak``: bytes of tensors.
    """

    kernel: str
    size: int
    calls: int
    peak: int


def planned(call, n: int, device: DeviceSpec, dtype, backward: bool):
    """(kernel, size) of the plan of a pass."""
    pattern, heads, kv_heads, d, causal = call
    q, k = (
        torch.empty(1, n, h, d, device="meta", dtype=dtype) for h in (heads, kv_heads)
    )
    if device.type == "cpu":
        kernel = kernels.choose("cpu", dtype, d, causal=causal).kernel
    else:
        how = {"causal": causal, "for_gradients": backward}
        how["pattern_kind"] = kernels.kind_of(pattern, n, heads, kv_heads)
        kernel = kernels.expected("cuda", device.capability, dtype, d, **how).kernel
    local = LocalCall(pattern, causal, 1.0, "auto", Execution())
    with pretend(device, kernel):
        way = way_of(q, k, local, True, backward)
    if isinstance(way, Walked):
        plan = tables_of(pattern, (1, n, heads, n, kv_heads), causal)
        return kernel.name, sum(len(t.tiles) + len(t.visits) for t in plan.tables)
    if not isinstance(way, WholePattern):
        return kernel.name, len(way.planner.whole(anew).calls)
    size = 0
    for name in ("backward_q", "backward_kv") if backward else ("forward",):
        read = (q, q, k, k) if backward else (q, k, k)
        for launch in kernel.launches(name, read, pattern, causal, anew):
            size += len(launch.schedule.tiles) + len(launch.schedule.entries)
    return kernel.name, size


def costs(*call) -> Costs:
    """The costs of ``planned(*call)``."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        kernel, size = planned(*call)
    finally:
        sys.setprofile(None)
    with LiveStorageTracker() as tracker:
        planned(*call)
    found = Costs(kernel, size, calls, tracker.peak_bytes)
    print(*call[1:], found)
    return found


@pytest.mark.parametrize("have, dtype", GPUS)
@pytest.mark.parametrize("name", CALLS)
def test_a_million_tokens_are_planned_in_a_second_on_a_gpu(name, have, dtype):
    """A second is 600,000 calls, or two passes over 200 MB."""
    for backward in (False, True):
        found = costs(CALLS[name], MILLION, DeviceSpec("cuda", have), dtype, backward)
        assert found.calls < 600_000 and found.peak < 200e6, found


@pytest.mark.parametrize("have, dtype", GPUS)
def test_a_window_of_tokens_is_planned_in_milliseconds_on_a_gpu(have, dtype):
    for kv_heads in (32, 8):
        for backward in (False, True):
            call = tokens(tokens=4096), 32, kv_heads, 64, True
            device = DeviceSpec("cuda", have)
            found = costs(call, 65536, device, dtype, backward)
            assert found.calls < 5000 and found.peak < 10e6, found


@pytest.mark.parametrize("name", CALLS)
def test_what_a_cpu_takes_is_recorded(name):
    found = costs(CALLS[name], MILLION, DeviceSpec("cpu"), F32, False)
    assert found.size > 0
