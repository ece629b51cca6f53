"""Which rows may be quoted, and how wide the intervals of their times are.

No time without a passed check, none that is faster than its bound, no peak smaller than
its own tensors, no speed-up on p ranks beyond 1.1 p.

The samples of a point are taken within a minute or two, so their interval knows nothing
of a machine that is slower in the next quarter of an hour: shared caches, other
tenants, clocks. Calls that stand in several groups of a run show it, and so do earlier
runs of the same code, where there are any. Intervals include it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean, median

from ..measure.provenance import key
from .tables import number

SUPERLINEAR = 1.1  # times the number of ranks; caches may add a little, never more
PLACEMENT = (
    "group",
    "layout",
    "scheme",
)  # options that say how ranks share a point's work, not which work it is
WIDEST = 0.25  # the widest interval of a stable time, within its run, as a part of its median
FEWEST = 3  # pairs of groups, below which they say nothing of the rest
NORMAL = 1.96  # standard deviations on either side of 95 %
MIDDLE = 0.6745  # standard deviations on either side of a half


def objection(result) -> str:
    """Why a row may not be quoted, or an empty string."""
    if result.status != "ok":
        return f"{result.status}: {result.reason}" if result.reason else result.status
    if result.median is not None and not result.median > 0:
        return "suspect: no time has passed"
    if not result.errors:
        return "suspect: no correctness check"
    for name, error in result.errors.items():
        bound = result.tolerance.get(name)
        if bound is None:
            return f"suspect: {name} was checked against no bound"
        if not error <= bound:
            return f"incorrect: {name} is off by {error:.1e}, allowed {bound:.1e}"
    if (
        result.bound_seconds
        and result.median is not None
        and result.median < result.bound_seconds
    ):
        median, bound = result.median * 1e3, result.bound_seconds * 1e3
        return f"suspect: {number(median)} ms is below its bound of {number(bound)} ms"
    peak, floor = (
        result.memory.get("tracked_peak_bytes"),
        result.memory.get("floor_bytes"),
    )
    if peak and floor and peak < floor:
        return f"suspect: a peak of {peak} bytes is smaller than its own tensors, {floor} bytes"
    return ""


def judged(results: Iterable) -> list:
    """The results, those that are superlinear marked as suspect: nobody who reads them
    can quote one by oversight.
    """
    results = list(results)
    alone: dict[str, list] = {}
    for r in results:
        if r.point.world_size == 1 and r.median and not objection(r):
            alone.setdefault(_on_one(r.point), []).append(r)
    return [
        _judged(r, alone.get(_on_one(r.point), ())) if r.point.world_size > 1 else r
        for r in results
    ]


def _on_one(point) -> str:
    """What the rows of one point on any number of ranks have in common."""
    return point.but(
        world_size=1, options={k: v for k, v in point.options if k not in PLACEMENT}
    ).id


def threads(result) -> int | None:
    """Those of each rank."""
    return result.ranks.get("threads") or result.provenance.get("threads")


def roofline_s(result) -> float | None:
    """The shortest time in seconds that the device's rates allow, of a CPU's for the
    threads of the row.
    """
    # The rates under a stored roofline are those of all threads of the machine.
    every, own = (
        result.provenance.get("threads"),
        (threads(result) or 0) * result.point.world_size,
    )
    share = (
        own / every if every and own and result.provenance.get("device") == "cpu" else 1
    )
    return result.bound_seconds and result.bound_seconds / min(share, 1)


def _judged(result, alone: Iterable):
    """A result on several ranks beside the rows ``alone`` on one that have at least the
    threads of each of them.
    """
    own, ranks = threads(result), result.point.world_size
    times = [r.median for r in alone if None in (own, threads(r)) or threads(r) >= own]
    if (
        not times
        or not result.median
        or objection(result)
        or min(times) / result.median <= SUPERLINEAR * ranks
    ):
        return result
    faster = f"{number(min(times) / result.median)} times faster on {ranks} ranks than on one"
    return replace(
        result,
        status="suspect",
        reason=f"superlinear: {faster}, over {SUPERLINEAR} × {ranks}",
    )


def reason(result) -> str:
    """Why a row is not quoted, without its status and without what its own name says
    already.
    """
    said = objection(result).partition(": ")[2] or objection(result)
    backend = result.option("backend")
    return (
        said.rpartition(f": {backend}: ")[2]
        if backend and said.startswith("backend ")
        else said
    )


def status(result) -> str:
    """The word for a row that is not quoted."""
    return objection(result).partition(":")[0]


# --------------------------------------------------------------------------------------
# from group to group, and from run to run


def _steady(result) -> bool:
    """Its time may be quoted, and no other work disturbed it."""
    return (
        bool(result.median)
        and not objection(result)
        and not result.provenance.get("crowded")
    )


def spread(results: Iterable) -> float:
    """Standard deviation, between groups, of the logarithm of a call's median time; 0.0
    where too few calls repeat.

    It comes from pairs of quotable, undisturbed rows of one call in two groups or runs,
    with the same threads. Half the variance of their log ratios is that of one row. It
    is estimated from the median size of the log ratios, so that a few calls that went
    wrong have no weight. An A/A control counts as the call that it repeats.
    """
    found: dict[tuple, dict[tuple, list[float]]] = {}
    for r in results:
        if _steady(r):
            same = found.setdefault((r.point.first.id, threads(r)), {})
            same.setdefault((r.group, r.run), []).append(math.log(r.median))
    logs = [[mean(group) for group in groups.values()] for groups in found.values()]
    sizes = [abs(a - b) for same in logs for a, b in combinations(same, 2)]
    return median(sizes) / (MIDDLE * math.sqrt(2)) if len(sizes) >= FEWEST else 0.0


def earlier(results: Iterable, kept: Iterable) -> list:
    """The quotable results that were measured as one of ``kept`` was, but in a run
    before: by the same code on the same machine, beside the same calls, and
    undisturbed.
    """
    newest = {(r.group, r.point.id): r for r in kept if _steady(r)}

    def how(r) -> list:
        return [key(r.provenance), r.composition, r.rehearsal]

    both = ((r, newest.get((r.group, r.point.id))) for r in results if _steady(r))
    return [r for r, now in both if now and r.run != now.run and how(r) == how(now)]


def turns(kept: Iterable, before: Iterable) -> float:
    """Standard deviation, from run to run, of the logarithm of a ratio of calls that
    took turns; 0.0 if not known.

    Two runs of a group differ by the machine's pace, which is the same for all its
    calls, and each call by a rest. The rests tell how far the ratio of two calls is
    from that of another run.
    """
    earliest = {(r.group, r.point.id): r for r in before}
    groups: dict[str, list[float]] = {}
    for r in kept:
        if (
            (again := earliest.get((r.group, r.point.id))) is not None
            and r.median
            and not objection(r)
        ):
            groups.setdefault(r.group, []).append(math.log(r.median / again.median))
    rests = [
        abs(x - median(found))
        for found in groups.values()
        if len(found) >= FEWEST
        for x in found
    ]
    return median(rests) / MIDDLE if len(rests) >= FEWEST else 0.0


def reproduced(
    kept: Sequence, before: Sequence, between: float
) -> dict[tuple[str, str], bool]:
    """For each (group, point) that was measured ``before``, whether its interval meets
    all of the earlier ones.

    Both are widened by ``between``; where that is not known, two runs say nothing of
    each other.
    """
    newest = {
        (r.group, r.point.id): r
        for r in widened(kept, between)
        if r.ci and r.ci[1] < math.inf
    }
    found: dict[tuple[str, str], bool] = {}
    for r in widened(before, between) if between else ():
        at = r.group, r.point.id
        if r.ci and r.ci[1] < math.inf and at in newest:
            (low, high), (least, most) = r.ci, newest[at].ci
            found[at] = found.get(at, True) and low <= most and least <= high
    return found


def wide(result) -> bool:
    """Whether its own interval is too wide for a stable time; not where there are too
    few samples for one.
    """
    return (
        bool(result.median and result.ci)
        and WIDEST * result.median < result.ci[1] - result.ci[0] < math.inf
    )


def widened(results: Sequence, between: float) -> list:
    """The results with intervals of their times that also hold ``between`` (of
    logarithms), as independent errors.
    """
    return [
        replace(r, ci=_wider(r.median, r.ci, NORMAL * between))
        if r.median and r.ci
        else r
        for r in results
    ]


def apart(ratio, between: float, turns: float = 0.0):
    """A ratio whose interval also holds what two runs differ by: ``turns`` of rows that
    took turns, else ``between`` on both sides.
    """
    by = turns if ratio.paired else math.sqrt(2) * between
    if not by:
        return ratio
    low, high = _wider(ratio.value, ratio.ci, NORMAL * by)
    return replace(ratio, low=low, high=high)


def _wider(
    middle: float, interval: tuple[float, float], reach: float
) -> tuple[float, float]:
    low, high = interval
    down, up = (math.log(middle / low) if low else math.inf, math.log(high / middle))
    return middle * math.exp(-math.hypot(down, reach)), middle * math.exp(
        math.hypot(up, reach)
    )
