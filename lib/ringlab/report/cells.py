"""What a table shows of a row: each quantity has one unit and one way to be shown.

A row that may not be shown gives its status instead of a number.
"""

import math
from dataclasses import replace

import torch

from ..adaptive import Adaptive
from ..attention import attention
from ..measure.validity import (
    computed,
    is_row,
    roofline_s,
    shown,
    simulated,
    status,
    threads,
    timed,
    why_not_quotable,
)
from .rows import pass_of
from .study import Study, pattern_of
from .tables import Cell, cell, counted, interval, number, percent, size

# --------------------------------------------------------------------------------------
# which rows may be shown, and how far


def ranks(row) -> int:
    """Ranks that share the work, as processes or simulated in one."""
    return max(row.point.world_size, row.option("simulated", 1))


def on_ranks(study: Study, rows):
    """The rows of ``study.frame()`` by length and ranks, each beside the same call on
    one rank, and without those that simulate ranks in one process.

    It adds columns: ``at``, length and ranks in words; ``peak`` and ``sent``, bytes of
    the rank that holds or sends most; on several ranks ``faster``, the Ratio of the time
    on one rank to this one, and ``less``, that of the peaks.
    """
    rows = rows[~rows.row.map(simulated).astype(bool)]
    rows = rows.sort_values(["seq_len", "world_size"])
    peak, sent = (rows.row.map(f).astype(float) for f in (peak_bytes, sent_bytes))
    shapes = zip(rows.seq_len, rows.world_size)
    at = [f"{n:,} tokens on {counted(p, 'rank')}" for n, p in shapes]
    rows = rows.assign(at=at, peak=peak, sent=sent)
    call = ["system", "pattern", "batch", "heads", "causal", "seq_len"]
    one = rows[rows.world_size == 1].set_index(call)[["row", "peak"]]
    rows = rows.join(one.add_prefix("one_"), on=call)
    several = rows.world_size > 1
    pairs = zip(rows.one_row, rows.row.where(several & rows.timed))
    less = (rows.one_peak / rows.peak).where(several)
    return rows.assign(faster=[study.ratio(*pair) for pair in pairs], less=less)


def peak_bytes(row) -> int | None:
    """Peak of live tensors, inputs and results included, on the rank that holds most."""
    if shown(row) and not simulated(row):
        return row.memory.get("tracked_peak_bytes")
    return None


def floor_bytes(row) -> int | None:
    """Bytes of q, k, v and out (in a backward their gradients too) on that rank."""
    return row.memory.get("floor_bytes") if peak_bytes(row) else None


def sent_bytes(row) -> int | None:
    """Bytes that the busiest rank sends in one call, counted; a row is ok only if they
    are those planned.
    """
    if not shown(row):
        return None
    if "bytes_sent" in row.ranks:
        return max(row.ranks["bytes_sent"])
    return 0 if ranks(row) == 1 else None


def density(point) -> float:
    """Visible pairs over all pairs."""
    if point.system == "adaptive":
        adaptive = Adaptive(**dict(point.options))
        return adaptive.pairs(point.seq_len, point.causal) / point.seq_len**2
    return point.call().cost().distinct_pairs / (
        point.batch * point.heads * point.seq_len**2
    )


def zero_rows(pattern, seq_len: int, heads: int) -> str:
    """A sentence of how many rows (position, head) of a result no branch fills, counted
    by a call.
    """
    ones = [torch.ones(1, seq_len, heads, 1)] * 3
    zero = 1 - attention(*ones, pattern).mean().item()
    return (
        f"Counted: {percent(zero)} of the rows (position, head) of the result are zero, "
        "as a group of heads with rate r has one position in r. `ringlab.attention` over "
        '`Dilated(..., mixing="lse")` leaves none: there every head runs every branch.'
    )


def pair_cost(study: Study, row, dense):
    """Time for a visible pair over that of a row of dense attention of the same length
    and pass, a Ratio or None.
    """
    if (ratio := study.ratio(row, dense)) is None:
        return None
    factor = density(dense.point) / density(row.point)
    return replace(
        ratio, **{key: getattr(ratio, key) * factor for key in ("value", "low", "high")}
    )


def calls(rows) -> str:
    """A sentence of what rows compute and with how many threads, each call once; empty
    for no rows.
    """
    points = [(row.point, threads(row)) for row in filter(is_row, rows)]
    texts = [
        f"batch {p.batch}, {p.heads} heads of {p.head_dim}, {p.dtype}, {pattern_of(p)}, "
        f"{pass_of(p)}{f', threads of a rank: {n}' if n else ''}"
        for p, n in points
    ]
    return f"Every call: {' or '.join(dict.fromkeys(texts))}. " if texts else ""


# --------------------------------------------------------------------------------------
# cells


def time(row, scale: float = 1e3) -> Cell:
    """Median with its interval, of several ranks the slowest one's, or why there is
    none; of a computed row the roofline, as a lower bound.
    """
    if not is_row(row):
        return Cell("not measured", kind="none")
    if computed(row):
        bound = row.bound_seconds
        return Cell(f"≥ {number(bound * scale)}", "computed") if bound else cell(None)
    if why_not_quotable(row):
        return Cell(status(row), kind="bad")
    if timed(row):
        doubt = "; unstable" * row.unstable
        ends = interval(*(row.ci or (None, None)), scale)
        return Cell(number(row.median * scale), ends + doubt)
    why = "more ranks than cores" if row.ranks.get("oversubscribed") else "not timed"
    return Cell("simulated" if simulated(row) else why, kind="none")


def rate(row) -> str | None:
    """Tokens per second."""
    return number(row.tokens_per_s) if timed(row) else None


def roofline(row) -> Cell | None:
    """The shortest time in ms that the device's rates allow, of a CPU's for the threads
    of the row.
    """
    return (
        Cell(number(roofline_s(row) * 1e3)) if timed(row) and roofline_s(row) else None
    )


def peak(row) -> Cell | None:
    """Peak memory, and as a multiple of inputs and results."""
    held = peak_bytes(row)
    floor = floor_bytes(row)
    return Cell(size(held), f"{held / floor:.2f} × tensors") if held and floor else None


def error(row) -> Cell | None:
    """The error that is nearest to what is allowed, among output, log-sum-exp and
    gradients.
    """
    if not is_row(row) or why_not_quotable(row) or not row.errors:
        return None
    name = max(row.errors, key=lambda k: row.errors[k] / row.tolerance[k])
    return Cell(f"{row.errors[name]:.1e}", f"{name} ≤ {row.tolerance[name]:.1e}")


def significance(ratio) -> int:
    """1 where the second row of a ratio is faster beyond noise, -1 where it is slower,
    0 where neither is known.
    """
    return {"slower": 1, "faster": -1}.get(ratio and ratio.verdict, 0)


def times(ratio) -> Cell | None:
    """How many times as fast, with its interval; a ratio within the noise of the run
    says so.
    """
    if ratio is None:
        return None
    known = significance(ratio) or ratio.high == math.inf  # or without an interval
    doubts = ["within noise"] * (not known) + ["unstable"] * ratio.unstable
    doubts += ["unpaired"] * (not ratio.paired)
    return Cell(f"{number(ratio.value)}×", "; ".join([interval(*ratio.ci), *doubts]))
