"""Which ratios are differences: p-values of two runs that took no turns, adjusted for how many rows are looked at.

A row is called different only where all agree: its 95 % interval, two tests of its samples, and Holm's step-down over
all rows. The torch-only floor has no SciPy to take the tests from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean

from ..measure import stats
from ..measure.points import Result
from ..measure.stats import Ratio

FALSE_ALARMS = 0.05  # the chance that any row of a comparison is called different where none is
FEW = 6  # samples below which the ranks of a row cannot tell, and its interval is Student's


def chance(a: Result, b: Result, ratio: Ratio) -> float:
    """p-value of a time of ``a`` over that of ``b`` that differs by more than the noise floor, two-sided.

    The larger of two: that of the 95 % interval (Altman and Bland 2011, BMJ 343, d2304) with Student's t, and, where
    samples are enough and took no turns, the exact one of their ranks, which holds for any distribution. Rows of fewer
    than six samples rest on Student's assumption that logarithms of times are normal.
    """
    beyond, reach = _distance(ratio)
    if beyond <= 0 or ratio.rounds < 2:
        return 1.0
    df = ratio.rounds - 1
    found = student(quantile(df) * beyond / reach, df) if reach else 0.0
    return max(found, _by_ranks(a.seconds, b.seconds, ratio)) if _ranked(ratio) else found


def _ranked(ratio: Ratio) -> bool:
    return not ratio.paired and ratio.rounds >= FEW


def _distance(ratio: Ratio) -> tuple[float, float]:
    """(log distance of a ratio from what the same work differs by, that of its interval's nearer end from itself)."""
    value, end = ratio.value, ratio.low if ratio.value > 1 else ratio.high
    reach = abs(math.log(value / end)) if 0 < end < math.inf else math.inf
    return abs(math.log(value)) - math.log(ratio.noise_floor), reach


def noticed(ratio: Ratio, rows: int) -> float:
    """The factor from which a row as uncertain as this one is called different, the first among ``rows``.

    >>> noticed(Ratio(1.0, 0.95, 1.05, 10, False), 1) < 1.06 < 1.1 < noticed(Ratio(1.0, 0.95, 1.05, 10, False), 60)
    True
    """
    n, level = ratio.rounds, FALSE_ALARMS / rows
    if n < 2 or _ranked(ratio) and 2 / math.comb(2 * n, n) > level:
        return math.inf
    reach = max(_distance(ratio)[1], 0.0)
    return ratio.noise_floor * math.exp(reach * quantile(n - 1, level) / quantile(n - 1))


def holm(chances: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: the chance that any of the rows is below 0.05 while none differs is 5 %.

    Unadjusted, three of 60 unchanged rows would be. Holm 1979 (Scandinavian Journal of Statistics 6, 65-70), which asks
    nothing about how rows depend on each other.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    found, worst = [1.0] * len(chances), 0.0
    for rank, i in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        found[i] = worst = max(worst, min(1.0, (len(chances) - rank) * chances[i]))
    return found


def student(t: float, df: int) -> float:
    """P(abs(T) > t) for Student's t with ``df`` degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).

    >>> round(student(12.706, 1), 4), round(student(2.306, 8), 4)
    (0.05, 0.05)
    """
    angle, odd = math.atan(t / math.sqrt(df)), df % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1, df // 2 + 1):
        total, term = total + term, term * math.cos(angle) ** 2 * (2 * k - 1 + odd) / (2 * k + odd)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


@cache
def quantile(df: int, level: float = 1 - stats.LEVEL) -> float:
    """The t beyond which a part ``level`` lies, both sides together.

    >>> round(quantile(3), 3), round(quantile(9, 0.01), 3)
    (3.182, 3.25)
    """
    low, high = 0.0, 1.0
    while student(high, df) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, df) > level else (low, middle)
    return high


def _by_ranks(x: Sequence[float], y: Sequence[float], ratio: Ratio) -> float:
    """Two-sided p-value of Mann and Whitney's U (1947), one side made better by the noise floor; ties count for it."""
    if ratio.value < 1:
        x, y = y, x
    wins = sum(one > other * ratio.noise_floor for one in x for other in y)
    ways = _ways(len(x), len(y))
    return min(1.0, 2 * sum(ways[wins:]) / sum(ways))


@cache
def _ways(n: int, m: int) -> list[int]:
    """By u: the orders of n and m samples in which u pairs have the first above (the Gaussian binomial's coefficients).

    >>> _ways(2, 2)
    [1, 1, 2, 1, 1]
    """
    found = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for k in range(n * m, m + i - 1, -1):
            found[k] -= found[k - m - i]
        for k in range(i, n * m + 1):
            found[k] += found[k - i]
    return found


def geometric_mean(ratios: Mapping[str, Sequence[float]]) -> Ratio | None:
    """Of ratios by point, a point with several counting once; the 95 % interval resamples points (Efron 1979).

    >>> geometric_mean({"a": [2.0, 8.0], "b": [1.0]}).value, geometric_mean({})
    (2.0, None)
    """
    values = [fmean(map(math.log, of_one)) for of_one in ratios.values()]
    if not values:
        return None
    if len(values) == 1:
        return Ratio(math.exp(values[0]), 0.0, math.inf, 1, False)
    generator = random.Random(0)
    found = sorted(fmean(generator.choices(values, k=len(values))) for _ in range(stats.RESAMPLES))
    tail = round((1 - stats.LEVEL) / 2 * stats.RESAMPLES)
    low, high = math.exp(found[tail]), math.exp(found[-1 - tail])
    return Ratio(math.exp(fmean(values)), low, high, len(values), False)
