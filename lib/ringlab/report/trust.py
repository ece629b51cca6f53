"""Intervals of times: how wide they are, and by what they are widened.

The samples of a point are taken within a minute or two, so their interval knows nothing
of a machine that is slower in the next quarter of an hour: shared caches, other
tenants, clocks. Calls that stand in several groups of a run show it, and so do earlier
runs of the same code, where there are any. Intervals include it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean, median

from ..measure.provenance import key
from ..measure.validity import threads, why_not_quotable

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
        and not why_not_quotable(result)
        and not result.provenance.get("crowded")
    )


def between_group_sd(results: Iterable) -> float:
    """Standard deviation, between groups, of the logarithm of a call's median time; 0.0
    where too few calls repeat.

    It comes from pairs of quotable, undisturbed rows of one call in two groups or runs,
    with the same threads. Half the variance of their log ratios is that of one row. It
    is estimated from the median size of the log ratios, so that a few calls that went
    wrong have no weight. An A/A control counts as the call that it repeats.
    """
    logs = defaultdict(lambda: defaultdict(list))  # by call, by run of a group
    for r in filter(_steady, results):
        call = (r.point.without_control.id, threads(r))
        run = (r.group, r.run)
        logs[call][run].append(math.log(r.median))
    pairs = [combinations(map(mean, runs.values()), 2) for runs in logs.values()]
    sizes = [abs(a - b) for each in pairs for a, b in each]
    return median(sizes) / (MIDDLE * math.sqrt(2)) if len(sizes) >= FEWEST else 0.0


def earlier_runs(results: Iterable, kept: Iterable) -> list:
    """The quotable results that were measured as one of ``kept`` was, but in a run
    before: by the same code on the same machine, beside the same calls, and
    undisturbed.
    """
    newest = {r.key: r for r in filter(_steady, kept)}
    both = ((r, newest.get(r.key)) for r in filter(_steady, results))
    return [
        r
        for r, now in both
        if now and r.run != now.run and key(r.provenance) == key(now.provenance)
    ]


def paired_ratio_sd(kept: Iterable, before: Iterable) -> float:
    """Standard deviation, from run to run, of the logarithm of a ratio of calls that
    took turns; 0.0 if not known.

    Two runs of a group differ by the machine's pace, which is the same for all its
    calls, and each call by a rest. The rests tell how far the ratio of two calls is
    from that of another run.
    """
    earliest = {r.id: r for r in before}
    logs = defaultdict(list)  # by group
    for r in kept:
        if r.id in earliest and r.median and not why_not_quotable(r):
            logs[r.group].append(math.log(r.median / earliest[r.id].median))
    groups = (each for each in logs.values() if len(each) >= FEWEST)
    rests = [abs(x - median(each)) for each in groups for x in each]
    return median(rests) / MIDDLE if rests else 0.0


def reproduced(
    kept: Sequence, before: Sequence, between: float
) -> dict[tuple[str, str], bool]:
    """For each (group, point) that was measured ``before``, whether its interval meets
    all of the earlier ones.

    Both are widened by ``between``; where that is not known, two runs say nothing of
    each other.
    """
    if not between:
        return {}
    newest = {r.id: r.ci for r in widen_times(filter(_has_interval, kept), between)}
    agreed: dict[tuple[str, str], bool] = {}
    for r in widen_times(filter(_has_interval, before), between):
        if r.id in newest:
            low, high = r.ci
            least, most = newest[r.id]
            meets = low <= most and least <= high
            agreed[r.id] = agreed.get(r.id, True) and meets
    return agreed


def _has_interval(result) -> bool:
    """Not where there are too few samples for one."""
    return bool(result.median and result.ci) and result.ci[1] < math.inf


def interval_too_wide(result) -> bool:
    """Whether its own interval is too wide for a stable time."""
    if not _has_interval(result):
        return False
    low, high = result.ci
    return high - low > WIDEST * result.median


def widen_times(results: Iterable, between: float) -> list:
    """The results with intervals of their times that also hold ``between`` (of
    logarithms), as independent errors.
    """
    return [
        replace(r, ci=_widen(r.median, r.ci, NORMAL * between))
        if r.median and r.ci
        else r
        for r in results
    ]


def widen_ratio(ratio, between: float, turns: float = 0.0):
    """A ratio whose interval also holds what two runs differ by: ``turns`` of rows that
    took turns, else ``between`` on both sides.
    """
    by = turns if ratio.paired else math.sqrt(2) * between
    if not by:
        return ratio
    low, high = _widen(ratio.value, ratio.ci, NORMAL * by)
    return replace(ratio, low=low, high=high)


def _widen(
    middle: float, interval: tuple[float, float], reach: float
) -> tuple[float, float]:
    low, high = interval
    down = math.log(middle / low) if low else math.inf
    up = math.log(high / middle)
    return middle * math.exp(-math.hypot(down, reach)), middle * math.exp(
        math.hypot(up, reach)
    )
