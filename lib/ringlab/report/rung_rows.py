"""The rows of the appendix on kernels: each way by its points, its rate, what it computes, what it moves at least."""

from __future__ import annotations

import tomllib
from functools import cache, lru_cache
from pathlib import Path

import torch

from .. import patterns
from ..engine.dilated import make_plan
from ..kernels import triton_config
from ..kernels.tile_schedule import make_schedule, split
from ..measure import suites as suite
from ..measure.systems import parts_of
from .study import Study, best, cost_of, pattern_of
from .trust import objection

OTHERS = {  # the rest are options of the system "ringlab", as the suite has them
    "copying": ("copying", {}),
    **{name: ("contiguous_segments", {"backend": name}) for name in suite.RUNG_PEERS},
    "dense": ("dense_sdpa", {}),
}
ORDER = (*suite.RUNG_WAYS, *OTHERS)
GB = 1e9


@cache
def data() -> dict:
    """Names, expectations and targets."""
    return tomllib.loads((Path(__file__).parent / "rungs.toml").read_text(encoding="utf-8"))


def measured(study: Study) -> list:
    """The rows of this suite."""
    return [r for r in study.results if r.group.startswith(suite.RUNGS)]


def one(
    study: Study, way: str, name: str = "forward", head_dim: int = 128, seq_len: int = suite.RUNG_TOKENS, mask=None
):
    """The row of a way by pass, head_dim, length and pattern, or None."""
    system, options = OTHERS.get(way) or ("ringlab", suite.RUNG_WAYS.get(way))
    pattern = patterns.Dense() if way == "dense" else mask or suite.RUNG_PATTERN
    wanted = {"passes": "fwd", "causal": False, "head_dim": head_dim, "seq_len": seq_len, "system": system}
    found = study.rows(measured(study), pattern=pattern.to_dict(), **wanted | suite.RUNG_PASSES[name])
    return best([r for r in found if dict(r.point.options) == options])


def quoted(row) -> bool:
    """There is a row, and its time may be quoted."""
    return row is not None and not objection(row) and bool(row.median)


def rate(row) -> tuple[float, float, float] | None:
    """Useful TFLOP/s with the interval; None where no time may be quoted."""
    if not quoted(row):
        return None
    work, (low, high) = row.cost["flops"] / 1e12, row.ci
    return work / row.median, work / high, work / low


def best_peer(study: Study, name: str, head_dim: int):
    """The peer of the highest rate on contiguous segments."""
    found = [one(study, peer, name, head_dim) for peer in suite.RUNG_PEERS]
    return max((r for r in found if quoted(r)), key=lambda r: rate(r)[0], default=None)


def over(study: Study, slow, fast, per_work: bool = False) -> tuple[float, float, float] | None:
    """How many times longer ``slow`` takes than ``fast``, with the interval; ``per_work``: per useful FLOP."""
    ratio = study.ratio(slow, fast)
    if ratio is None:
        return None
    factor = fast.cost["flops"] / slow.cost["flops"] if per_work else 1.0
    return ratio.value * factor, ratio.low * factor, ratio.high * factor


def expected(study: Study, way: str, name: str, head_dim: int) -> list | None:
    """[low, high] of what was expected in TFLOP/s, on the GPU for which it was."""
    if study.profile.name != data()["profile"]:
        return None
    return data()["expected"].get(way, {}).get(str(head_dim), {}).get(name)


def path_of(study: Study, way: str, name: str, head_dim: int) -> str:
    """The way that another one turns out to be: the default path runs as the one that makes the same operator calls."""
    own = one(study, way, name, head_dim)
    if way != "default" or own is None or not own.memory.get("operator_calls"):
        return way
    others = {other: one(study, other, name, head_dim) for other in suite.RUNG_WAYS if other != way}
    calls = own.memory["operator_calls"]
    return next((x for x, r in others.items() if r is not None and r.memory.get("operator_calls") == calls), way)


@lru_cache(maxsize=64)
def computed(point, capability: tuple[int, int]) -> float:
    """Products that the tile lists compute, over the useful ones: whole tiles, and folded branches once."""
    passes = [("forward", "query", 4)]
    if point.passes != "fwd":  # the backward forms the scores twice: three products for dq, four for dk and dv
        passes += [("backward_q", "query", 6), ("backward_kv", "key", 8)]
    pattern, n, heads, kv = pattern_of(point), point.seq_len, point.heads, point.kv_heads
    done = 0
    for name, by, flops in passes:
        size = triton_config.sizes(name, point.head_dim, getattr(torch, point.dtype), capability)
        for source in split(pattern, n, heads, kv, size.rows):
            lists = make_schedule(source, n, heads, kv, rows=size.rows, cols=size.cols, causal=point.causal, by=by)
            done += flops * lists.visits * size.rows * size.cols
    return point.batch * done * point.head_dim / cost_of(point).flops


def least_bytes(way: str, point) -> int | None:
    """Bytes that a forward of a dilated pattern moves at least between the GPU's memory and its kernels.

    Lists: q, k, v and out once. Branch by branch: the rows of each, read and written; merged one after another, those
    of all but the first once more, read with what they join, and that written; merged by one kernel, what it says. The
    copying form copies all of them before and after.
    """
    known = way in ("lists", "strided", "fused", "copying")
    if point.passes != "fwd" or point.pattern["kind"] != "dilated" or not known:
        return None
    row = point.head_dim * getattr(torch, point.dtype).itemsize * point.batch
    branches = [
        row * sum(call.nodes * call.q.rows * call.heads for part in parts_of(b, point.seq_len) for call in part)
        for b in pattern_of(point).branches(point.seq_len, point.heads, point.kv_heads)
    ]
    rows, later = sum(branches), sum(branches) - branches[0]
    whole = row * point.seq_len * point.heads
    if way == "lists":
        return 4 * whole
    if way == "strided":
        return 4 * rows + 3 * later
    if way == "fused":
        from ..kernels.experimental.fused_merge import join_bytes  # which loads Triton

        plan = make_plan(pattern_of(point), point.seq_len, point.heads, point.kv_heads)
        dtype = getattr(torch, point.dtype)
        return 4 * rows + sum(join_bytes(plan, point.batch, point.seq_len, point.heads, point.head_dim, dtype))
    return 4 * rows + 2 * 4 * rows + (len(branches) + 1) * whole
