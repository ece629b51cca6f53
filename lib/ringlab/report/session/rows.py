"""Which rows are which in document 002, and what each says beside the work that its shape needs."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ... import cost, hardware, patterns
from ...adaptive import Adaptive
from ...measure import suites as suite
from ..columns import timed
from ..published import MB, published
from ..rows import SHORT
from ..study import Study, best, cost_of
from ..tables import Cell, interval, number
from ..trust import objection

OURS = "ringlab"
WAYS = {
    "rows": "one call for each block of queries",
    "batched": "blocks copied together",
    "views": "overlapping views, nothing copied",
}


def document() -> dict:
    """Document 002 as data."""
    return published("002")


def one(study: Study, group: str, system: str = OURS, options=(), **wanted):
    """The row of a group with just these options, None where it is not there."""
    found = study.rows(group=group, system=system, **wanted)
    return best([r for r in found if dict(r.point.options) == dict(options)])


def dtype_of(study: Study) -> str:
    """The dtype of the document's table: that of dense attention in it."""
    dense = one(study, suite.SPARSE_TABLE, "dense_sdpa")
    return dense.point.dtype if dense else "float32"


def in_table(study: Study, system: str, dtype: str | None = None):
    """A system's row of the document's table."""
    return one(study, suite.SPARSE_TABLE, system, dtype=dtype or dtype_of(study))


def way(study: Study, name: str, **more):
    """The row of one way of execution in the journey."""
    return one(study, suite.JOURNEY, options={"blocks": name, **more})


def built(study: Study, name: str, warm: bool):
    """The row that builds the calls of a way, or finds them."""
    return one(study, suite.JOURNEY, "plan_build", {"blocks": name, "warm": warm})


def scaled(ratio, factor: float):
    """A ratio times an exact number."""
    return ratio and replace(ratio, **{k: getattr(ratio, k) * factor for k in ("value", "low", "high")})


def saved(ratio) -> Cell | None:
    """The part of the time that the second of two rows saves."""
    if ratio is None:
        return None
    if ratio.high == math.inf:
        return Cell(f"{number(ratio.value)}× as fast", interval(*ratio.ci))
    doubt = "" if ratio.significantly_slower or ratio.significantly_faster else "; within noise"
    if ratio.value < 1:
        value, low, high = (number(1 / x) for x in (ratio.value, ratio.high, ratio.low))
        return Cell(f"none, {value}× as long", f"{low} to {high}{doubt}")
    value, low, high = (f"{100 * (1 - 1 / x):.0f} %" for x in (ratio.value, ratio.low, ratio.high))
    return Cell(value, f"{low} to {high}{doubt}")


def operators(row) -> int | None:
    """Aten operators of one call, None where they were not counted."""
    return None if row is None or objection(row) else row.memory.get("operator_calls")


def views(row) -> int:
    """Those of them that only make a view."""
    return row.memory.get("view_calls", 0)


def computing(row) -> int | None:
    """Operators that compute, copy or allocate: each may be a kernel launch, a view is none."""
    found = operators(row)
    return None if found is None else found - views(row)


def calls(row) -> Cell | None:
    """Operator calls, and how many of them are views."""
    found = operators(row)
    return None if found is None else Cell(f"{found:,}", f"{views(row):,} views")


def peak_bytes(row) -> int | None:
    return None if row is None or objection(row) else row.memory.get("tracked_peak_bytes")


def floor_bytes(row) -> int | None:
    return row.memory.get("floor_bytes") if peak_bytes(row) else None


def peak(row) -> Cell | None:
    """Peak of live tensors in decimal megabytes, as published, and as a multiple of inputs and results."""
    held, floor = peak_bytes(row), floor_bytes(row)
    return Cell(number(held / MB), f"{held / floor:.2f} × tensors") if held and floor else None


def density(point) -> float:
    """Visible pairs over all pairs."""
    if point.system == "adaptive":
        return Adaptive(**dict(point.options)).pairs(point.seq_len, point.causal) / point.seq_len**2
    pattern = patterns.from_dict(point.pattern)
    return 1.0 if isinstance(pattern, patterns.Dense) else pattern.density(point.seq_len, point.causal)


def heads(point) -> str:
    return "one head" if point.heads == 1 else f"{point.heads} heads"


def percent(share: float, digits: int = 3) -> str:
    return f"{number(100 * share, digits)} %"


def stated(seq_len: int | None = None) -> tuple[patterns.Dilated, dict]:
    """(pattern, shape) of the document's ring table, by its own benchmark; ``seq_len`` replaces its length."""
    ring, shape = document()["ring_shape"], document()["shape"]
    pattern = patterns.Dilated(ring["segment_lengths"], ring["dilation_rates"], "head_groups", "branch")
    fields = {k: shape[k] for k in ("batch", "heads", "head_dim")}
    return pattern, fields | {"seq_len": seq_len or ring["seq_len"], "dtype": getattr(torch, shape["dtype"])}


def work(pattern=None, seq_len: int | None = None) -> cost.Cost:
    """FLOPs and bytes of a pattern at the document's shape; without one, of the function that it states."""
    own, shape = stated(seq_len)
    return cost.count(pattern or own, **shape)


def card():
    """The profile of the document's GPU."""
    return hardware.get_profile(document()["profile"])


def least_seconds(found: cost.Cost, profile, dtype: str | None = None) -> float | None:
    """The lower bound of a work on a profile by its printed rates; None where it has none."""
    rate, width = profile.peak(dtype or document()["shape"]["dtype"]), profile.bandwidth(found.floor_bytes)
    return found.seconds(rate, width) if rate and width else None


def rate(study: Study) -> float | None:
    """FLOP/s that bound the rows of a study: of dense attention, which no bandwidth holds back."""
    dense = one(study, suite.SPARSE_TABLE, "dense_sdpa")
    if dense is None or objection(dense) or not dense.bound_seconds:
        return None
    return cost_of(dense.point).folded_flops / dense.bound_seconds


def extreme(study: Study) -> dict[int, object]:
    """Tokens -> our row."""
    return {n: row for n in suite.EXTREME_TOKENS if (row := one(study, suite.EXTREME_LENGTHS, seq_len=n)) is not None}


def held_there(row) -> float | None:
    """Bytes at the document's heads and dtype: a row's peak as a multiple of q, k, v and out, times theirs there."""
    found, floor = peak_bytes(row), floor_bytes(row)
    return found / floor * work(seq_len=row.point.seq_len).floor_bytes if found and floor else None


def held(row) -> str | None:
    """What a row holds, in words."""
    there = held_there(row)
    if there is None:
        return None
    shape, p = document()["shape"], row.point
    return (
        f"{number(peak_bytes(row) / MB)} MB with {heads(p)} in {SHORT[p.dtype]}, in proportion "
        f"{number(there / MB)} MB with {shape['heads']} in {SHORT[shape['dtype']]}"
    )


def shares(study: Study) -> dict[str, float]:
    """Way -> building its plan, as a part of the time of a first call, which builds and then computes."""
    found = {}
    for name in suite.BLOCK_WAYS:
        cold, call = built(study, name, False), way(study, name)
        if timed(cold) and timed(call):
            found[name] = cold.median / (cold.median + call.median)
    return found
