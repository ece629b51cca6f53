"""How wide the intervals of times are.

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
from ..measure.validity import objection, threads

WIDEST = 0.25  # the widest interval of a stable time, within its run, as a part of its median
FEWEST = 3  # pairs of groups, below which they say nothing of the rest
NORMAL = 1.96  # standard deviations on either side of 95 %
MIDDLE = 0.6745  # standard deviations on either side of a half


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
        return [key(r.provenance), r.composition]

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
    down = math.log(middle / low) if low else math.inf
    up = math.log(high / middle)
    return middle * math.exp(-math.hypot(down, reach)), middle * math.exp(
        math.hypot(up, reach)
    )
