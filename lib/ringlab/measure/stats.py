"""Medians, intervals and paired ratios, by the standard library alone and the same on every call.

Bootstrap: Efron 1979, percentile intervals; a ratio is the median of the log ratios of the rounds that both
took part in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

RESAMPLES = 2000
LEVEL = 0.95
UNSTABLE = 0.20  # IQR / median above this marks a point as unstable


@dataclass(frozen=True)
class Summary:
    """Median, quartiles, 95 % interval of the median, and whether the spread is too wide to quote it alone."""

    median: float
    q1: float
    q3: float
    ci: tuple[float, float]
    unstable: bool


@dataclass(frozen=True)
class Ratio:
    """``value`` = time of a / time of b, its 95 % interval, the rounds it rests on, and whether they were paired."""

    value: float
    low: float
    high: float
    rounds: int
    paired: bool

    @property
    def ci(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def significant(self) -> bool:
        """The interval excludes 1."""
        return not self.low <= 1.0 <= self.high


def summary(seconds: Sequence[float]) -> Summary:
    """Describe samples of one point; raises ValueError for none.

    >>> s = summary([4.0, 1.0, 2.0, 3.0])
    >>> s.median, s.q1, s.q3, s.unstable
    (2.5, 1.75, 3.25, True)
    """
    if not seconds:
        raise ValueError("no samples")
    mid = median(seconds)
    q1, _, q3 = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (mid, mid, mid)
    return Summary(mid, q1, q3, interval(lambda pick: median(pick(seconds))), mid > 0 and (q3 - q1) / mid > UNSTABLE)


def interval(statistic: Callable, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of ``statistic(pick)``, where ``pick`` draws a resample of a list.

    >>> interval(lambda pick: sum(pick([1.0, 1.0])))
    (2.0, 2.0)
    """
    generator = random.Random(seed)

    def pick(values):
        return generator.choices(values, k=len(values))

    found = sorted(statistic(pick) for _ in range(RESAMPLES))
    tail = round((1 - LEVEL) / 2 * RESAMPLES)
    return found[tail], found[-1 - tail]


def ratio(a, b) -> Ratio:
    """How many times longer a takes than b; a and b are Results, or lists of seconds by round.

    Results of one interleaved run are compared round by round, over the rounds that both took part in. Others are
    compared by their medians, each resampled on its own, and say so by ``paired=False``: drift between the two runs is
    then in the ratio but not in its interval.
    Raises ValueError where one of them has no samples.

    >>> ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    Ratio(value=2.0, low=2.0, high=2.0, rounds=3, paired=True)
    """
    x, y = getattr(a, "seconds", a), getattr(b, "seconds", b)
    if not x or not y:
        raise ValueError("a ratio needs samples of both")
    if logs := _paired_logs(a, b, x, y):
        low, high = interval(lambda pick: median(pick(logs)))
        return Ratio(math.exp(median(logs)), math.exp(low), math.exp(high), len(logs), True)
    low, high = interval(lambda pick: median(pick(x)) / median(pick(y)))
    return Ratio(median(x) / median(y), low, high, min(len(x), len(y)), False)


def _paired_logs(a, b, x, y) -> list[float]:
    """Log ratios of the rounds that both took; results of different runs or groups have none."""
    if hasattr(a, "rounds") and hasattr(b, "rounds"):
        if (a.run, a.composition) != (b.run, b.composition):  # points that take no turns have compositions of their own
            return []
        x, y = dict(zip(a.rounds, x)), dict(zip(b.rounds, y))
    else:
        x, y = dict(enumerate(x)), dict(enumerate(y))
    return [math.log(x[number] / y[number]) for number in sorted(x.keys() & y.keys())]
