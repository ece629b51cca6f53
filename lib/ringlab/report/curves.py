"""Lines over sequence length: one axis, or panels of them, on logarithmic axes and labelled at their ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

from .figures import BLUE, GREEN, ORANGE, PURPLE, WIDTH, drawing
from .tables import number

MARKERS = "osD^vPX*h"
LINE = 11.5  # points from one label to the next


def lines(
    series: dict[str, list[tuple[float, float, float | None, float | None]]],
    *,
    xlabel: str,
    ylabel: str,
    colors: Sequence[str] = (BLUE, ORANGE, GREEN, PURPLE),
    dashed: Sequence[str] = (),
):
    """One line per name over (x, y, low, high), both axes logarithmic base 2 and 10, labelled at the line's end.

    Raises ValueError for more lines than ``colors`` and markers tell apart.
    """
    if len(series) > min(len(colors), len(MARKERS)):
        raise ValueError(f"{len(series)} lines cannot be told apart, at most {min(len(colors), len(MARKERS))}")
    with drawing(**{"axes.grid": True}):
        fig, ax = plt.subplots(figsize=(WIDTH, 3.3))
        _draw(ax, series, list(zip(colors, MARKERS)), dashed)
        ax.set_xlabel(xlabel)
        ax.set_title(ylabel, loc="left", fontsize=10)  # above, where it takes no width and reads level
        return fig


def panels(items: Sequence[tuple[str, dict]], *, xlabel: str, colors: Sequence[str] = (BLUE, ORANGE, GREEN, PURPLE)):
    """(title, series) each in a panel of its own, two beside each other; axes and labels as in ``lines``."""
    with drawing(**{"axes.grid": True}):
        rows = -(-len(items) // 2)
        fig, axes = plt.subplots(rows, 2, figsize=(WIDTH, 3.0 * rows), squeeze=False)
        names = list(dict.fromkeys(name for _, series in items for name in series))  # one colour each in all panels
        looks = dict(zip(names, zip(colors, MARKERS)))
        for ax, (title, series) in zip(axes.flat, items):
            _draw(ax, series, [looks[name] for name in series], ())
            ax.set_title(title, loc="left", fontsize=10)
            ax.margins(x=0.25)
        for ax in list(axes.flat)[len(items) :]:
            ax.set_visible(False)
        for ax in axes[-1]:
            ax.set_xlabel(xlabel)
        return fig


def _draw(ax, series: dict, looks: Sequence[tuple[str, str]], dashed: Sequence[str]) -> None:
    ends = []
    for (name, points), (color, marker) in zip(series.items(), looks):
        x, y, low, high = zip(*sorted(points))
        style = {"ls": "--"} if name in dashed else {"marker": marker}
        ax.plot(x, y, color=color, lw=2, ms=5, **style)
        if all(v is not None for v in low):
            err = [[b - a for a, b in zip(low, y)], [b - a for a, b in zip(y, high)]]
            ax.errorbar(x, y, yerr=err, fmt="none", ecolor=color, elinewidth=1.2, capsize=3.5)
        ends.append((x[-1], y[-1], name))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = sorted({p[0] for points in series.values() for p in points})
    ax.set_xticks(ticks, [tokens(t) for t in ticks])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda y, _: number(y).removesuffix(".0"))
    longest = max(x for x, *_ in ends)
    early = [end for end in ends if end[0] < longest]
    ax.margins(y=0.05 + 0.07 * len(early))
    ax.autoscale_view()  # or positions were of the axes before
    for some in (early, [end for end in ends if end[0] == longest]):
        used = -math.inf
        for x, y, name in sorted(some, key=lambda e: e[1]):
            at = ax.transData.transform((x, y))[1] * 72 / ax.figure.dpi
            used = max(at, used + LINE)
            if x < longest:  # left of its end and above, or it would lie on the lines that go on
                ax.annotate(name, (x, y), (-5, used - at + 6), textcoords="offset points", ha="right", va="center")
            else:
                ax.annotate(name, (x, y), (8, used - at), textcoords="offset points", va="center")


def tokens(n: float) -> str:
    """A sequence length as people say it.

    >>> tokens(8192), tokens(1000), tokens(262144)
    ('8K', '1000', '256K')
    """
    return f"{int(n) // 1024}K" if n >= 1024 and n % 1024 == 0 else str(int(n))
