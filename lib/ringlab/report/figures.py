"""Figures that read in light and dark, on a phone and in print: SVG for the page, PNG for Markdown, alt text always.

Every series is labelled where it is drawn and error bars are the 95 % interval of the median. Labels stand above their
bars, so that a figure needs no more width than a phone has. Equal input gives equal bytes, so that figures do not
change in git without a reason.
"""

from __future__ import annotations

import base64
import io
import math
import re
import textwrap
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib

matplotlib.use("agg")  # no window, whatever the machine's default is

import matplotlib.pyplot as plt  # noqa: E402
import seaborn  # noqa: E402

from . import theme  # noqa: E402
from .tables import PLAIN_ONLY, Table  # noqa: E402
from .theme import FAINT, INK, MARK, PAPER  # noqa: E402

BLUE, ORANGE, GREEN, RED, PURPLE = seaborn.color_palette("colorblind").as_hex()[:5]
GREY, SKY = theme.GREY, theme.SKY
WIDTH = 4.6  # inches: at 10 pt the text is readable when the figure is as wide as a phone
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
    """matplotlib with this project's style, whatever the user's own settings are, restored afterwards."""
    with plt.rc_context():
        matplotlib.rcdefaults()
        plt.rcParams.update({**STYLE, **style})
        yield


@dataclass(frozen=True)
class Bar:
    """One bar or dot with its interval; ``bound`` is a mark beside it, ``missing`` the reason for having no value."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    color: str = BLUE
    bound: float | None = None
    missing: str = ""

    @property
    def end(self) -> float:
        """Where the bar ends, its interval included."""
        return max(self.high, self.value) if self.error else self.value

    @property
    def error(self):
        """The interval as matplotlib wants it, None where there is none."""
        if self.low is None or self.high is None or self.high == math.inf:
            return None
        return [[max(0.0, self.value - self.low)], [max(0.0, self.high - self.value)]]


def bars(items: Sequence[Bar], *, xlabel: str, bound_label: str = "", log: bool = False, fmt="{:.3g}".format):
    """Horizontal bars from a zero line (dots on a log axis), labelled with their values; bound marks are diamonds."""
    with drawing():
        fig, ax, at = _rows(items)
        known = [b.end for b in items if b.value is not None]
        for y, b in zip(at, items):
            if b.value is None:
                _said(ax, b.missing or "not measured", min(known, default=1.0) if log else 0, y)
                continue
            if log:
                _dot(ax, b, y)
            else:
                ax.barh(y, b.value, 0.85, color=b.color)
                ax.errorbar(b.value, y, xerr=b.error, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)
            _said(ax, fmt(b.value), b.end, y, quoted=True)
            if b.bound:
                ax.plot(b.bound, y, marker="D", ms=5, mfc=MARK, mec=INK, ls="none")
        if any(b.bound for b in items) and bound_label:
            mark = ax.plot([], [], marker="D", ms=5, mfc=MARK, mec=INK, ls="none", label=bound_label)
            fig.legend(handles=mark, frameon=False, loc="outside upper left", handletextpad=0.2, borderpad=0.1)
        if log:
            ax.set_xscale("log")
            ax.margins(x=0.15)
        else:
            ax.set_xlim(0, max(known, default=1.0) * 1.18)
            _few_ticks(ax)
        ax.set_xlabel(xlabel, loc="left")
        return fig


def ratios(items: Sequence[Bar], *, xlabel: str):
    """Ratios with their intervals around a line at 1; an interval that crosses it shows no difference."""
    with drawing():
        fig, ax, at = _rows(items)
        known = [x for b in items if b.value is not None for x in (b.value, b.low if b.error else None, b.end) if x]
        low, high = min([1.0, *known]), max([1.0, *known])
        for y, b in zip(at, items):
            ax.plot([1, 1], [y - 0.45, y + 0.5], color=INK, lw=1.2)
            if b.value is None:
                _said(ax, b.missing or "not measured", 1, y)
                continue
            _dot(ax, b, y)
            _said(ax, f"{b.value:.2f}×", max(b.end, 1.0), y, quoted=True)
        room = max(high - low, 0.1)
        ax.set_xlim(low - 0.05 * room, high + 0.2 * room)
        _few_ticks(ax)
        ax.set_xlabel(xlabel, loc="left")
        return fig


def _rows(items: Sequence[Bar]):
    """(figure, axis, y of each item): a row for each, its label above it, where a long one has the whole width."""
    labels = [_wrapped(b.label) for b in items]
    at, used = [], 0.0  # in lines of text
    for text in labels:
        at.append(used + len(text) + 0.55)
        used = at[-1] + 0.9
    fig, ax = plt.subplots(figsize=(WIDTH, 0.75 + 0.175 * max(used, 1)))
    for y, text in zip(at, labels):
        place = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
        ax.annotate("\n".join(text), (0, y - 0.5), xytext=(0, 1), va="bottom", **place)
    ax.set_yticks([])
    ax.set_ylim(max(used, 1), 0)
    return fig, ax, at


def _wrapped(label: str, width: int = 54) -> list[str]:
    """Lines of a label: one where it fits, else broken at its own break first.

    >>> _wrapped("cache\\n(with pool)"), _wrapped("cache\\nwith pool"), _wrapped("cache\\nwith pool", 12)
    (['cache (with pool)'], ['cache, with pool'], ['cache,', 'with pool'])
    """
    label = re.sub(r"\n(?!\()", ",\n", label)
    joined = label.replace("\n", " ")
    return [joined] if len(joined) <= width else [x for part in label.split("\n") for x in textwrap.wrap(part, width)]


def _dot(ax, b: Bar, y: float) -> None:
    ax.plot(b.value, y, "o", color=b.color, ms=7)
    ax.errorbar(b.value, y, xerr=b.error, fmt="none", ecolor=INK, elinewidth=1.2, capsize=4)  # over a dot that is wider


def _said(ax, text: str, x: float, y: float, quoted: bool = False) -> None:
    style = {"weight": "bold"} if quoted else {"style": "italic"}
    ax.annotate(text, (x, y), (7 if quoted else 3, 0), textcoords="offset points", va="center", **style)


def _few_ticks(ax) -> None:
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


@dataclass(frozen=True)
class Figure:
    """A drawn figure: its name, its caption, for those who do not see it ``alt``, and its image as SVG and PNG."""

    name: str
    caption: str
    alt: str
    svg: str
    png: bytes

    @classmethod
    def of(cls, fig, name: str, caption: str, alt: str) -> Figure:
        """Draw ``fig`` and close it. Raises ValueError for an empty ``alt``: a figure must be readable aloud."""
        if not alt.strip():
            raise ValueError(f"figure {name!r} needs alt text, got none")
        with drawing():
            svg, png = io.StringIO(), io.BytesIO()
            fig.savefig(svg, format="svg", metadata={"Date": None})
            fig.savefig(png, format="png", dpi=200, metadata={"Software": None})
        plt.close(fig)
        return cls(name, caption, alt, svg.getvalue(), png.getvalue())


def show(fig, name: str, caption: str, alt: str, data: Table | None = None, *, stamp: str = "") -> None:
    """Display ``fig`` as ``figures/<name>.png`` and inline SVG, described by ``caption`` and ``alt``; ``data``, which
    a figure needs whose numbers stand in no table, is folded under it."""
    from IPython.display import display

    if stamp:
        caption, alt = (f"{stamp.capitalize()}: {text}" for text in (caption, alt))
        fig.suptitle(stamp, x=0.99, ha="right", fontsize=10, style="italic", color=RED)
    figure = Figure.of(fig, name, caption, alt)
    about = {"alt": alt, "caption": caption}
    bundle = {"image/svg+xml": figure.svg, "image/png": base64.b64encode(figure.png).decode("ascii")}
    metadata = {"filename": name, "image/png": about, "image/svg+xml": about}
    display(bundle | {"text/plain": alt}, metadata=metadata, raw=True)
    # Stock templates know no alt text: there it is read as a line under the figure.
    display({"text/markdown": alt, "text/plain": ""}, metadata={PLAIN_ONLY: True}, raw=True)
    if data is not None:
        data.folded = True
        display(data)
