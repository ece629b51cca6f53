"""How far times of the same work lie apart; by it intervals are widened, and two times
called different or not.

The samples of a point are taken within a minute or two, so their interval knows nothing
of a machine that is slower in the next quarter of an hour: shared caches, other
tenants, clocks. Rows of the same work show it: calls that stand in several groups of a
run, earlier runs of the same code, A/A controls, and anchors (work of torch alone,
``measure.points.ANCHORS``) of two runs. ``Noise.of`` adds it to a ratio, and
``Ratio.verdict`` says what follows, of rows of one run and of two.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median

from ..measure import ratio, stats
from ..measure.points import ANCHOR
from ..measure.provenance import key
from ..measure.stats import Ratio
from ..measure.validity import threads, why_not_quotable

FEWEST = 3  # pairs of the same work, below which they say nothing of the rest
MIDDLE = 0.6745  # standard deviations on either side of a half
# Standard deviations on either side of 95 %, and of 99.9 % where two runs are compared:
# of many rows hardly one is to differ by chance.
NORMAL = 1.96
TWO_RUNS = 3.29


@dataclass(frozen=True)
class Noise:
    """What times of the same work differ by, as standard deviations of logarithms.

    ``apart``: of one time, from group to group and from run to run; ``turns``: of the
    ratio of two rows that took turns, from run to run; 0.0 if not known. ``reach``: how
    many of them an interval has on either side.
    """

    apart: float = 0.0
    turns: float = 0.0
    reach: float = NORMAL

    def of(self, ratio: Ratio, same: tuple[float, float] = (1.0, 1.0)) -> Ratio:
        """A ratio whose interval also holds the noise, as an independent error; ``same``:
        its ``Ratio.same``.
        """
        by = self.turns if ratio.paired else math.sqrt(2) * self.apart
        low, high = self._widened(ratio.value, ratio.ci, by)
        return replace(ratio, low=low, high=high, same=same)

    def times(self, results: Iterable) -> list:
        """The results with intervals of their times that also hold the noise."""
        return [
            replace(row, ci=self._widened(row.median, row.ci, self.apart))
            if row.median and row.ci
            else row
            for row in results
        ]

    def _widened(
        self, middle: float, ci: tuple[float, float], sd: float
    ) -> tuple[float, float]:
        down = math.log(middle / ci[0]) if ci[0] else math.inf
        up = math.log(ci[1] / middle)
        scale = self.reach / NORMAL  # the interval as it is has 95 %
        down, up = (scale * math.hypot(each, NORMAL * sd) for each in (down, up))
        return middle * math.exp(-down), middle * math.exp(up)


# --------------------------------------------------------------------------------------
# of one study


def repeated(results: Iterable, kept: Iterable) -> list[tuple]:
    """(row, earlier row) of each of ``kept`` that an earlier run measured too: the same
    code on the same machine, beside the same calls, neither disturbed nor of too few
    samples for an interval.
    """
    newest = {row.key: row for row in filter(_steady, kept)}
    both = ((newest.get(row.key), row) for row in filter(_steady, results))
    return [
        (now, row)
        for now, row in both
        if now and row.run != now.run and key(row.provenance) == key(now.provenance)
    ]


def noise_of(kept: Iterable, again: Iterable[tuple]) -> Noise:
    """The noise of rows, some of which were measured ``again``, as ``repeated`` says.

    Two runs of a group differ by the machine's pace, which is the same for all its
    calls, and each call by a rest. The rests tell how far the ratio of two calls is
    from that of another run.
    """
    logs = defaultdict(list)  # by group
    for now, row in {now.id: (now, row) for now, row in again}.values():
        logs[row.group].append(math.log(now.median / row.median))
    groups = (each for each in logs.values() if len(each) >= FEWEST)
    rests = [value - median(each) for each in groups for value in each]
    known = [*kept, *(row for _, row in again)]
    return Noise(_apart(known), _spread(rests))


def _apart(results: Iterable) -> float:
    """From pairs of quotable, undisturbed rows of one call in two groups or runs, with
    the same threads; 0.0 for few. An A/A control counts as the call that it repeats.
    """
    logs = defaultdict(lambda: defaultdict(list))  # by call, by run of a group
    for row in filter(_steady, results):
        call = (row.point.without_control.id, threads(row))
        logs[call][row.group, row.run].append(math.log(row.median))
    pairs = [combinations(map(fmean, runs.values()), 2) for runs in logs.values()]
    return _spread([a - b for each in pairs for a, b in each]) / math.sqrt(2)


def _spread(logs: list[float]) -> float:
    """Their standard deviation around 0, by their median size: a few calls that went
    wrong have no weight.
    """
    return median(map(abs, logs)) / MIDDLE if len(logs) >= FEWEST else 0.0


def _steady(result) -> bool:
    """Its time may be quoted, has an interval, and no other work disturbed it."""
    return (
        len(result.seconds) >= stats.FEWEST
        and not why_not_quotable(result)
        and not result.provenance.get("crowded")
    )


def reproduced(again: Iterable[tuple], noise: Noise) -> dict[tuple[str, str], bool]:
    """For each (group, point) that was measured ``again``, whether its time differs
    from none of the earlier ones; none where the noise is not known.
    """
    noise = replace(noise, reach=TWO_RUNS)
    agreed: dict[tuple[str, str], bool] = {}
    for now, row in again if noise.apart else ():
        same = noise.of(ratio(now, row)).verdict == "within noise"
        agreed[row.id] = agreed.get(row.id, True) and same
    return agreed


# --------------------------------------------------------------------------------------
# of two runs


def noise_between(first, second, anchored: bool) -> tuple[dict[str, float], Noise]:
    """(drifts, noise) of two studies.

    The drift of a group is the logarithm of how many times as long its anchors took in
    the first, on average, where they are ``anchored``. The noise is that of A/A controls
    in either, and of anchors around the drift; without anchors it is at least that of
    one call from group to group.
    """
    other = {row.id: row for row in second.rows() if _steady(row)}
    logs = defaultdict(list)  # by group
    for row in first.rows() if anchored else ():
        if row.option(ANCHOR) and row.id in other and _steady(row):
            logs[row.group].append(math.log(ratio(row, other[row.id]).value))
    drifts = {group: fmean(each) for group, each in logs.items()}
    rests = [one - drifts[group] for group, each in logs.items() for one in each]
    controls = [*first.controls, *second.controls]
    rests += [math.log(one.value) for one in controls if not one.unstable]
    freedom = max(1, len(rests) - len(drifts))
    apart = math.hypot(*rests) / math.sqrt(2 * freedom)
    if not drifts:
        apart = max(apart, first.noise.apart, second.noise.apart)
    return drifts, Noise(apart, reach=TWO_RUNS)
