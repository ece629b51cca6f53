"""Figures that read in light and dark, on a phone and in print: SVG for the page, PNG
for Markdown, alt text always.

Every series is labelled where it is drawn and error bars are the 95 % interval of the
median. Equal input gives equal bytes, so that figures do not change in git without a
reason.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import matplotlib

matplotlib.use("agg")  # no window, whatever the machine's default is

import matplotlib.pyplot as plt  # noqa: E402
import seaborn  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

from .tables import PLAIN_ONLY, Table  # noqa: E402
from .theme import FAINT, INK, PAPER, PATTERNS, SERIES  # noqa: E402

MARKERS = "osD^vPX*h"
LINE = 11.5  # points from one label at the right edge to the next
WIDTH = (
    4.6  # inches: at 10 pt the text is readable when the figure is as wide as a phone
)
STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "grid.color": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.bottom": False,
    "ytick.left": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ringlab",
    "savefig.facecolor": PAPER,
}


@contextmanager
def drawing(**style):
    """matplotlib with this project's style, whatever the user's own settings are,
    restored afterwards.
    """
    with plt.rc_context():
        matplotlib.rcdefaults()
        plt.rcParams.update({**STYLE, **style})
        yield


def in_ms(frame):
    """Rows of a DataFrame as ``lines`` draws them: their times in ms, of computed rows
    the rooflines.
    """
    y, low, high = (1e3 * frame[each] for each in ("shown_s", "ci_low_s", "ci_high_s"))
    return frame.assign(y=y, low=low, high=high)


def palette(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each name: a pattern's own, which it has on all pages; for
    others the ones that are left.
    """
    names = [*names]
    own = {name: PATTERNS[name] for name in names if name in PATTERNS}
    others = cycle(color for color in SERIES if color not in own.values())
    return {name: own.get(name) or next(others) for name in names}


def lines(
    each: Mapping,
    *,
    xlabel: str,
    colors: Mapping[str, str],
    x: str = "seq_len",
    by: str = "variant",
    dashed: Sequence[str] = (),
    linear: bool = False,
    height: float = 3.3,
):
    """Panels one above the other over the same x, each titled by what its y is, with a
    line for each name.

    Lines are labelled at their ends. x is logarithmic to base 2.

    Args:
        each: title -> a DataFrame with the columns ``x``, ``by``, y, and low and high
            where there are intervals.
        colors: by name; ``dashed`` names have no markers.
        linear: y is, instead of logarithmic.
        height: of a panel, in inches.
    """
    with drawing(**{"axes.grid": True}):
        fig, axes = plt.subplots(
            len(each), 1, figsize=(WIDTH, height * len(each)), squeeze=False
        )
        for ax, (title, frame) in zip(axes[:, 0], each.items()):
            _draw(ax, frame, x, by, colors, dashed)
            ax.set_title(title, loc="left", fontsize=10, pad=18)  # above all labels
            ends = frame.sort_values(x).drop_duplicates(by, keep="last")
            ends = [(*end, colors[end[2]]) for end in zip(ends[x], ends.y, ends[by])]
            label_ends(ax, ends, {*frame[x]}, linear)
        axes[-1, 0].set_xlabel(xlabel)
        return fig


def _draw(ax, frame, x: str, by: str, colors: Mapping, dashed: Sequence[str]) -> None:
    marks = zip(colors, cycle(MARKERS))
    known = frame.reindex(columns=[x, by, "y", "low", "high"])
    unsure = ~(known.high.astype(float) < math.inf)
    known[["low", "high"]] = known[["low", "high"]].mask(unsure)
    seaborn.lineplot(  # of a value and both ends of its interval the median is the value
        known.melt([x, by]),
        x=x,
        y="value",
        hue=by,
        palette=colors,
        style=by,
        markers={name: "," if name in dashed else marker for name, marker in marks},
        dashes={name: (3, 2) if name in dashed else "" for name in colors},
        estimator="median",
        errorbar=("pi", 100),
        err_style="bars",
        err_kws={"elinewidth": 1.2, "capsize": 3.5},
        legend=False,
        lw=2,
        ms=6,
        mew=0,
        ax=ax,
    )
    ax.set(xlabel="", ylabel="")


def label_ends(
    ax, ends: Sequence[tuple[float, float, str, str]], at: set[float], linear: bool
) -> None:
    """Name each line behind its end (x, y, name, color), on axes as ``token_axes``
    makes them.
    """
    token_axes(ax, at, linear)
    # Names of lines that end at the right stand there, in the order of the ends, each
    # with a line to its own; to those that end earlier it would read as data.
    used = -math.inf
    points = 72 / ax.figure.dpi
    for each, y, name, color in sorted(ends, key=lambda e: e[1]):
        if each < max(at):
            ax.annotate(name, (each, y), (4, 4), textcoords="offset points")
            continue
        used = max(ax.transData.transform((each, y))[1] * points, used + LINE)
        place = 1.04, ax.transData.inverted().transform((0, used / points))[1]
        leader = {
            "arrowstyle": "-",
            "color": color,
            "lw": 0.8,
            "shrinkA": 0,
            "shrinkB": 3,
            "relpos": (0, 0.5),
        }
        ax.annotate(
            name,
            (each, y),
            place,
            textcoords=ax.get_yaxis_transform(),
            va="center",
            arrowprops=leader,
        )


def token_axes(ax, at: Iterable[float], linear: bool = False) -> None:
    """Make x logarithmic to base 2 with ticks ``at`` lengths in tokens, y logarithmic
    too unless ``linear``.
    """
    ax.set_xscale("log", base=2)
    ax.set_yscale("linear" if linear else "log")
    ticks = _apart(sorted(at))
    ax.set_xticks(ticks, [tokens(t) for t in ticks])
    if not linear:
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,))
        )
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
    ax.autoscale_view()  # or positions were of the axes before


def _apart(ticks: list[float]) -> list[float]:
    """The ticks whose labels do not touch, the longest among them."""
    kept = []
    least = (math.log2(ticks[-1] / ticks[0]) or 1) / 5.5
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


@dataclass(frozen=True)
class Figure:
    """A drawn figure: its name, its caption, for those who do not see it ``alt``, and
    its image as SVG and PNG.
    """

    name: str
    caption: str
    alt: str
    svg: str
    png: bytes

    @classmethod
    def of(cls, fig, name: str, caption: str, alt: str) -> Figure:
        """Draw ``fig`` and close it. Raises ValueError for an empty ``alt``: a figure
        must be readable aloud.
        """
        if not alt.strip():
            raise ValueError(f"figure {name!r} needs alt text, got none")
        with drawing():
            svg = io.StringIO()
            png = io.BytesIO()
            fig.savefig(svg, format="svg", metadata={"Date": None})
            fig.savefig(png, format="png", dpi=200, metadata={"Software": None})
        plt.close(fig)
        return cls(name, caption, alt, svg.getvalue(), png.getvalue())


def show(
    fig,
    name: str,
    caption: str,
    alt: str,
    data: Table | None = None,
) -> None:
    """Display ``fig`` as ``figures/<name>.png`` and inline SVG, described by
    ``caption`` and ``alt``; ``data``, which a figure needs whose numbers stand in no
    table, is folded under it.
    """
    from IPython.display import display

    figure = Figure.of(fig, name, caption, alt)
    texts = {"alt": alt, "caption": caption}
    bundle = {
        "image/svg+xml": figure.svg,
        "image/png": base64.b64encode(figure.png).decode("ascii"),
    }
    metadata = {"filename": name, "image/png": texts, "image/svg+xml": texts}
    display(bundle | {"text/plain": alt}, metadata=metadata, raw=True)
    # Stock templates know no alt text: there it is read as a line under the figure.
    display(
        {"text/markdown": alt, "text/plain": ""}, metadata={PLAIN_ONLY: True}, raw=True
    )
    if data is not None:
        data.folded = True
        display(data)
