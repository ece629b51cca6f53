"""Figures that read in light and dark, on a phone and in print: SVG for the page, PNG for Markdown, alt text always.

Colours are seaborn's colour-blind-safe set, every series is labelled where it is drawn, and error bars are the 95 %
interval of the median. Equal input gives equal bytes, so that figures do not change in git without a reason.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib

matplotlib.use("agg")  # no window, whatever the machine's default is

import matplotlib.pyplot as plt  # noqa: E402
import matplotlib.ticker  # noqa: E402
import seaborn  # noqa: E402

from .tables import Table, number  # noqa: E402

INK, FAINT = "#33373d", "#d4d7db"  # replaced in dark mode by the two below
DARK_INK, DARK_FAINT = "#d5d9de", "#3c434c"
BLUE, ORANGE, GREEN, RED, PURPLE, _, _, GREY, _, SKY = (
    matplotlib.colors.to_hex(c) for c in seaborn.color_palette("colorblind")
)
STYLE = {
    "figure.figsize": (5.6, 3.0),
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "grid.color": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.bottom": False,
    "ytick.left": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ringlab",
    "savefig.transparent": True,
}


@contextmanager
def drawing(**style):
    """matplotlib with this project's style, restored afterwards."""
    with plt.rc_context({**STYLE, **style}):
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


def bars(items: Sequence[Bar], *, xlabel: str, bound_label: str = "", log: bool = False, fmt="{:.3g}".format):
    """Horizontal bars from a zero line (dots on a log axis), labelled with their values; bound marks are diamonds."""
    with drawing():
        fig, ax = plt.subplots(figsize=(5.6, 0.9 + 0.42 * len(items)))
        known = [max(b.high or 0, b.value) for b in items if b.value is not None]
        top = max(known, default=1.0)
        for y, b in enumerate(items):
            if b.value is None:
                at = min(known, default=1.0) if log else 0
                ax.annotate(
                    b.missing or "not measured",
                    (at, y),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    style="italic",
                    fontsize=9,
                )
                continue
            error = None if b.low is None else [[max(0.0, b.value - b.low)], [max(0.0, b.high - b.value)]]
            if log:
                ax.errorbar(b.value, y, xerr=error, fmt="o", color=b.color, ms=6, capsize=3, ecolor=INK, elinewidth=1)
            else:
                ax.barh(y, b.value, 0.62, color=b.color)
                if error:
                    ax.errorbar(b.value, y, xerr=error, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
            ax.annotate(
                fmt(b.value), (b.high or b.value, y), (7, 0), textcoords="offset points", va="center", fontsize=9
            )
            if b.bound:
                ax.plot(b.bound, y, marker="D", ms=5, mfc="white", mec=INK, ls="none")
        if any(b.bound for b in items) and bound_label:
            ax.plot([], [], marker="D", ms=5, mfc="white", mec=INK, ls="none", label=bound_label)
            ax.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.4, 1.0), handletextpad=0.2)
        ax.set_yticks(range(len(items)), [wrapped(b.label) for b in items], fontsize=9)
        ax.set_ylim(len(items) - 0.5, -0.5)
        if log:
            ax.set_xscale("log")
            ax.margins(x=0.15)
        else:
            ax.set_xlim(0, top * 1.18)
        _finish(ax, xlabel, log)
        return fig


def ratios(items: Sequence[Bar], *, xlabel: str):
    """Ratios with their intervals around a line at 1; an interval that crosses it shows no difference."""
    with drawing():
        fig, ax = plt.subplots(figsize=(5.6, 0.9 + 0.42 * len(items)))
        ax.axvline(1.0, color=INK, lw=1)
        reach = max((abs(x - 1) for b in items for x in (b.value, b.low, b.high) if x is not None), default=0.1)
        for y, b in enumerate(items):
            if b.value is None:
                ax.annotate(
                    b.missing or "not measured",
                    (1, y),
                    (6, 0),
                    textcoords="offset points",
                    va="center",
                    style="italic",
                    fontsize=9,
                )
                continue
            error = None if b.low is None else [[max(0.0, b.value - b.low)], [max(0.0, b.high - b.value)]]
            ax.errorbar(b.value, y, xerr=error, fmt="o", color=b.color, ms=6, capsize=3, elinewidth=1.6)
            ax.annotate(
                f"{b.value:.2f}×", (b.high or b.value, y), (7, 0), textcoords="offset points", va="center", fontsize=9
            )
        ax.set_yticks(range(len(items)), [wrapped(b.label) for b in items], fontsize=9)
        ax.set_ylim(len(items) - 0.5, -0.5)
        low = min((b.low if b.low is not None else b.value for b in items if b.value is not None), default=1.0)
        ax.set_xlim(min(low, 1.0) - 0.08 * reach, 1 + 1.3 * reach if reach else 1.1)
        _finish(ax, xlabel, False)
        return fig


def _finish(ax, xlabel: str, log: bool) -> None:
    ax.set_xlabel(xlabel, loc="right")  # grows to the left, over the labels, instead of out of the figure
    if not log:
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))


def lines(
    series: dict[str, list[tuple[float, float, float | None, float | None]]],
    *,
    xlabel: str,
    ylabel: str,
    colors: Sequence[str] = (BLUE, ORANGE, GREEN, PURPLE),
    dashed: Sequence[str] = (),
):
    """One line per name over (x, y, low, high), both axes logarithmic base 2 and 10, labelled at the line's end."""
    with drawing(**{"axes.grid.axis": "both"}):
        fig, ax = plt.subplots(figsize=(5.6, 3.3))
        ends = []
        for (name, points), color, marker in zip(series.items(), colors, "osD^"):
            x, y, low, high = zip(*sorted(points))
            ax.plot(
                x,
                y,
                color=color,
                lw=1.8,
                ls="--" if name in dashed else "-",
                marker="" if name in dashed else marker,
                ms=5,
            )
            if all(v is not None for v in low):
                err = [[b - a for a, b in zip(low, y)], [b - a for a, b in zip(y, high)]]
                ax.errorbar(x, y, yerr=err, fmt="none", ecolor=color, elinewidth=1, capsize=3)
            ends.append((x[-1], y[-1], name, color))
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = sorted({p[0] for points in series.values() for p in points})
        ax.set_xticks(ticks, [tokens(t) for t in ticks])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(lambda y, _: number(y))
        last = None
        for x, y, name, color in sorted(ends, key=lambda e: e[1]):
            shift = 0 if last is None or y / last > 1.35 else 11
            ax.annotate(name, (x, y), (8, shift), textcoords="offset points", color=color, va="center", fontsize=9)
            last = y
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        return fig


def wrapped(label: str) -> str:
    """A label in lines that leave room for the bars.

    >>> wrapped("RingDilatedAttentionV2Flash, fp32").splitlines()
    ['RingDilatedAttention', 'V2Flash, fp32']
    """
    return re.sub(r"(RingDilatedAttention|torch's kernel, )(?=\w)", r"\1\n", label)


def tokens(n: float) -> str:
    """A sequence length as people say it.

    >>> tokens(8192), tokens(1000), tokens(262144)
    ('8K', '1000', '256K')
    """
    return f"{int(n) // 1024}K" if n >= 1024 and n % 1024 == 0 else str(int(n))


def show(fig, name: str, caption: str, alt: str, data: Table, *, stamp: str = "") -> None:
    """Display ``fig`` as ``figures/<name>.png`` and inline SVG, described by ``caption`` and, for those who
    do not see it, ``alt``; ``data`` is folded under it.

    Raises ValueError for an empty ``alt``: a figure that cannot be read aloud is not finished.
    """
    from IPython.display import display

    if not alt.strip():
        raise ValueError(f"figure {name!r} needs alt text, got none")
    if stamp:
        caption, alt = (f"{stamp.capitalize()}: {text}" for text in (caption, alt))
        fig.suptitle(stamp, x=0.99, ha="right", fontsize=9, style="italic", color=RED)
    with drawing():
        svg, png = io.StringIO(), io.BytesIO()
        fig.savefig(svg, format="svg", metadata={"Date": None})
        fig.savefig(png, format="png", dpi=160, facecolor="white", transparent=False, metadata={"Software": None})
    plt.close(fig)
    bundle = {
        "image/svg+xml": themed(svg.getvalue()),
        "image/png": base64.b64encode(png.getvalue()).decode("ascii"),
        "text/plain": alt,
    }
    about = {"alt": alt, "caption": caption}
    metadata = {"filename": name, "image/png": about, "image/svg+xml": about}
    display(bundle, metadata=metadata, raw=True)
    data.folded = True
    display(data)


def themed(svg: str) -> str:
    """matplotlib's SVG with ink and grid that follow the reader's colour scheme, and without what only it needs."""
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    style = (
        f"<style>svg{{--ink:{INK};--faint:{FAINT}}}"
        f"@media (prefers-color-scheme:dark){{svg{{--ink:{DARK_INK};--faint:{DARK_FAINT}}}}}</style>"
    )
    return re.sub(r"(<svg [^>]*>)", rf"\1{style}", svg, count=1).strip() + "\n"
