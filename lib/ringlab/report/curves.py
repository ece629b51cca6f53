"""Lines over sequence length, on logarithmic axes and labelled at the right edge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

from .figures import BLUE, GREEN, ORANGE, PURPLE, RED, WIDTH, drawing

MARKERS = "osD^vPX*h"
LINE = 11.5  # points from one label to the next


def lines(
    series: dict[str, list[tuple[float, float, float | None, float | None]]],
    *,
    xlabel: str,
    ylabel: str,
    colors: Sequence[str] = (BLUE, ORANGE, GREEN, PURPLE),
    dashed: Sequence[str] = (),
    limit: float | None = None,
    limit_label: str = "",
):
    """One line per name over (x, y, low, high), both axes logarithmic base 2 and 10, labelled at the line's end.

    ``limit``: where a vertical line stands, with its label.

    Raises ValueError for more lines than ``colors`` and markers tell apart.
    """
    if len(series) > min(len(colors), len(MARKERS)):
        raise ValueError(f"{len(series)} lines cannot be told apart, at most {min(len(colors), len(MARKERS))}")
    with drawing(**{"axes.grid": True}):
        fig, ax = plt.subplots(figsize=(WIDTH, 3.3))
        _draw(ax, series, list(zip(colors, MARKERS)), dashed)
        if limit:
            ax.axvline(limit, color=RED, lw=1.5, ls=":")
            ax.annotate(limit_label, (limit, 0.02), (-3, 0), xycoords=("data", "axes fraction"), rotation=90,
                        textcoords="offset points", ha="right", va="bottom", color=RED, fontsize=9)  # fmt: skip
        ax.set_xlabel(xlabel)
        ax.set_title(ylabel, loc="left", fontsize=10)  # above, where it takes no width and reads level
        return fig


def _draw(ax, series: dict, looks: Sequence[tuple[str, str]], dashed: Sequence[str]) -> None:
    ends = []
    for (name, points), (color, marker) in zip(series.items(), looks):
        x, y, *_ = zip(*sorted(points))
        style = {"ls": "--"} if name in dashed else {"marker": marker}
        ax.plot(x, y, color=color, lw=2, ms=5, **style)
        for at, middle, least, most in points:
            if least is not None and most < math.inf:
                err = [[middle - least], [most - middle]]
                ax.errorbar(at, middle, yerr=err, fmt="none", ecolor=color, elinewidth=1.2, capsize=3.5)
        ends.append((x[-1], y[-1], name, color))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = _apart(sorted({p[0] for points in series.values() for p in points}))
    ax.set_xticks(ticks, [tokens(t) for t in ticks])
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
    ax.autoscale_view()  # or positions were of the axes before
    # All names stand at the right edge, in the order of the lines' ends, each with a line to its own.
    used, points = -math.inf, 72 / ax.figure.dpi
    for x, y, name, color in sorted(ends, key=lambda e: e[1]):
        used = max(ax.transData.transform((x, y))[1] * points, used + LINE)
        place = 1.04, ax.transData.inverted().transform((0, used / points))[1]
        leader = {"arrowstyle": "-", "color": color, "lw": 0.8, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        ax.annotate(name, (x, y), place, textcoords=ax.get_yaxis_transform(), va="center", arrowprops=leader)


def _apart(ticks: list[float]) -> list[float]:
    """The ticks whose labels do not touch, the longest among them."""
    kept, least = [], (math.log2(ticks[-1] / ticks[0]) or 1) / 5.5
    for tick in reversed(ticks):
        if not kept or math.log2(kept[-1] / tick) >= least:
            kept.append(tick)
    return kept[::-1]


def tokens(n: float) -> str:
    """A sequence length as people say it.

    >>> tokens(8192), tokens(1000), tokens(262144), tokens(1 << 20)
    ('8K', '1000', '256K', '1M')
    """
    if n >= 1 << 20 and n % (1 << 20) == 0:
        return f"{int(n) >> 20}M"
    return f"{int(n) // 1024}K" if n >= 1024 and n % 1024 == 0 else str(int(n))
