"""Medians, intervals and paired ratios; the same input gives the same numbers.

A ratio is the median of the log ratios of the rounds that both took part in. Intervals
of 95 %: percentiles of the bootstrap (Efron 1979); of five values, whose resamples
hardly differ, Student's t on their logarithms. Fewer have none: theirs is from 0 to
infinity, so that nothing is decided by it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, median, quantiles, stdev

import torch
from torch import Tensor

RESAMPLES = 2000
LEVEL = 0.95
UNSTABLE = 0.20  # of the median: quartiles, or medians of the halves of a run, that are further apart
FEWEST = 5  # values of an interval
STUDENT = 2.776  # 97.5 % quantile of t for so many


@dataclass(frozen=True)
class Summary:
    """Median, its 95 % interval, and whether the samples spread or drift too much."""

    median: float
    ci: tuple[float, float]
    unstable: bool


@dataclass(frozen=True)
class Ratio:
    """``value`` = time of a / time of b, its 95 % interval, the number of rounds, and
    whether they were paired.

    ``unstable``: the ratios of the rounds spread or drift too much, or, unpaired, the
    samples of one side. ``same``: the factors between which ratios of the same work lie.
    """

    value: float
    low: float
    high: float
    rounds: int
    paired: bool
    unstable: bool = False
    same: tuple[float, float] = (1.0, 1.0)

    @property
    def ci(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def verdict(self) -> str:
        """What a is beside b: "slower", if the interval lies above all that the same
        work differs by, "faster", if below it, else "within noise".
        """
        least, most = self.same
        if self.low > most:
            return "slower"
        return "faster" if self.high < least else "within noise"


def summary(seconds: Sequence[float]) -> Summary:
    """Median and interval of the samples of one point; raises ValueError for none.

    >>> s = summary([4.0, 1.0, 2.0, 3.0, 2.0, 3.0])
    >>> s.median, s.unstable
    (2.5, True)
    """
    if not seconds:
        raise ValueError("no samples")
    middle = median(seconds)
    low, high = map(math.exp, _interval(tuple(map(math.log, seconds))))
    # The median of logarithms may differ from the median's logarithm.
    ci = min(low, middle), max(high, middle)
    return Summary(middle, ci, is_unstable(seconds))


def is_unstable(values: Sequence[float]) -> bool:
    """The quartiles are too far apart, or the medians of the two halves; one value is
    never steady.
    """
    if len(values) == 1:
        return True
    q1, _, q3 = quantiles(values, n=4, method="inclusive")
    half = (len(values) + 1) // 2
    drift = abs(median(values[:half]) - median(values[-half:]))
    return max(q3 - q1, drift) > UNSTABLE * median(values)


@lru_cache(maxsize=4096)  # a page asks for a ratio more than once
def _interval(logs: tuple[float, ...]) -> tuple[float, float]:
    """95 % interval of the median of logarithms; of too few, all numbers."""
    if len(logs) < FEWEST:
        return -math.inf, math.inf
    if len(logs) == FEWEST:
        reach = STUDENT * stdev(logs) / math.sqrt(len(logs))
        return mean(logs) - reach, mean(logs) + reach
    drawn = torch.tensor(logs, dtype=torch.float64)[_draws(len(logs))].sort(1).values
    medians = (
        ((drawn[:, (len(logs) - 1) // 2] + drawn[:, len(logs) // 2]) / 2).sort().values
    )
    tail = round((1 - LEVEL) / 2 * RESAMPLES)
    return float(medians[tail]), float(medians[-1 - tail])


@lru_cache(maxsize=16)
def _draws(count: int) -> Tensor:
    """Which of ``count`` values each resample takes, (RESAMPLES, count)."""
    generator = random.Random(0)
    return torch.tensor(
        [generator.choices(range(count), k=count) for _ in range(RESAMPLES)]
    )


def ratio(a, b) -> Ratio:
    """How many times longer a takes than b; a and b are Results, or lists of seconds by
    round.

    Results of one interleaved run are compared round by round, if they share rounds
    enough for an interval. Others are compared by their medians, with ``paired=False``:
    drift between the two runs is then in the ratio but not in its interval. Raises
    ValueError if one of them has no samples.

    >>> ratio([2.0, 4.0, 8.0, 6.0, 2.0], [1.0, 2.0, 4.0, 3.0, 1.0]).ci
    (2.0, 2.0)
    """
    x, y = (
        dict(zip(r.rounds, r.seconds)) if hasattr(r, "rounds") else dict(enumerate(r))
        for r in (a, b)
    )
    if not x or not y:
        raise ValueError("a ratio needs samples of both")
    # Compositions differ for each point if the points took no turns.
    runs = [[getattr(r, x, None) for x in ("run", "composition")] for r in (a, b)]
    rounds = sorted(x.keys() & y.keys())
    if runs[0] == runs[1] and len(rounds) >= FEWEST:
        ratios = [x[number] / y[number] for number in rounds]
        logs = tuple(map(math.log, ratios))
        ends = map(math.exp, (median(logs), *_interval(logs)))
        return Ratio(*ends, len(logs), True, is_unstable(ratios))
    x = [*x.values()]
    y = [*y.values()]
    top, bottom = (tuple(map(math.log, seconds)) for seconds in (x, y))
    low, high = _interval(top)
    least, most = _interval(bottom)
    # The interval of a difference from those of its parts: Zou and Donner 2008.
    down = math.hypot(median(top) - low, most - median(bottom))
    up = math.hypot(high - median(top), median(bottom) - least)
    value = median(top) - median(bottom)
    ends = map(math.exp, (value, value - down, value + up))
    unstable = is_unstable(x) or is_unstable(y)
    return Ratio(*ends, min(len(x), len(y)), False, unstable)
