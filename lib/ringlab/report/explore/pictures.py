"""The explorer's figures: who sees whom, what ranks send, what fills the memory, what bounds the time.

Each is HTML, an image with its alternative text and a caption, so that it reads without the image too.
"""

from __future__ import annotations

import base64
import functools
import io
from html import escape

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, PowerNorm

from ...cost import format_seconds
from ...patterns import Pattern
from .. import theme
from ..figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, WIDTH, Bar, bars, drawing
from ..tables import number, size
from . import view

DPI = 192  # twice what the page shows, for screens that have it
WIDE, HALF = 8.4, 4.1  # inches at 96 px
SHADES = LinearSegmentedColormap.from_list("seen", [theme.PAPER, "#bcd9ea", BLUE, "#00304d"])
PARTS = (BLUE, SKY, GREEN, ORANGE, RED, PURPLE, "#8a6d3b", GREY)
NAMED = 8  # ranks up to which each pair's bytes are written out


@functools.lru_cache(maxsize=32)
def pattern(
    chosen: Pattern, n: int, at: int, *, head: int, heads: int, kv_heads: int, causal: bool, shards: int = 1
) -> str:
    """M of one head: all of the sequence in cells, and positions one by one from ``at`` on; ``shards`` are marked.

    Raises ValueError for a position or a head that is not there.
    """
    if not 0 <= head < heads:
        raise ValueError(f"head {head} is none of the {heads}, which count from 0")
    about = {"head": head, "heads": heads, "kv_heads": kv_heads, "causal": causal}
    seen = view.span(chosen, n, at)
    close, whole = view.near(chosen, n, seen, **about), len(seen) == n  # (q, k)
    with drawing(**{"axes.spines.left": True, "axes.spines.right": True, "axes.spines.top": True}):
        fig, axes = plt.subplots(1, 1 if whole else 2, figsize=(HALF if whole else WIDE, 3.4), squeeze=False)
        if not whole:
            _afar(fig, axes[0, 0], n, view.afar(chosen, n, **about), shards)
        ax, most, edges = axes[0, -1], max(1, int(close.max())), (seen.start - 0.5, seen.stop - 0.5)
        shades = ListedColormap([SHADES(i / most * 0.8) for i in range(most + 1)])
        image = ax.imshow(
            close.numpy(), cmap=shades, vmin=-0.5, vmax=most + 0.5, extent=(*edges, *edges[::-1]),
            interpolation="nearest",
        )  # fmt: skip
        fig.colorbar(image, ax=ax, ticks=range(most + 1), shrink=0.5, label="M")
        _axes(ax, f"Positions {seen.start:,} to {seen.stop - 1:,}")
    caption = f"What head {head} of {heads} sees: {chosen}{', causal' if causal else ''}, n = {n:,}"
    pairs = f"{int((close > 0).sum())} of {close.numel()} pairs are seen"
    return image_html(fig, f"{caption}. Of positions {seen.start} to {seen.stop - 1}, {pairs}", caption)


def _afar(fig, ax, n: int, mean, shards: int) -> None:
    most = max(1.0, float(mean.max()))
    image = ax.imshow(
        mean.numpy(), cmap=SHADES, norm=PowerNorm(0.4, 0, most), extent=(0, n, n, 0), interpolation="nearest"
    )
    ticks = [x for x in (0, 0.01, 0.1, 0.5, 1, 2, 4, 8) if x <= most]
    fig.colorbar(image, ax=ax, ticks=ticks, format=lambda x, _: f"{x:g}", shrink=0.5, label="mean M")
    for k in range(1, shards):
        for line in (ax.axhline, ax.axvline):
            line(k * n / shards, color=ORANGE, lw=0.9, ls=":")
    _axes(ax, "The whole sequence" + (", dotted: shards" if shards > 1 else ""))
    if n % 4 == 0:
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(matplotlib.ticker.FixedLocator([i * n // 4 for i in range(5)]))


def _axes(ax, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10)
    ax.set_xlabel("key", loc="left")
    ax.set_ylabel("query", loc="top")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        axis.set_major_formatter(lambda x, _: position(x))


def position(x: float) -> str:
    """A position on an axis, short.

    >>> position(48), position(65536), position(3 * 2**20), position(1500)
    ('48', '64K', '3M', '1,500')
    """
    x = int(x)
    for unit, name in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if x and x % unit == 0:
            return f"{x // unit}{name}"
    return f"{x:,}"


def traffic(estimate) -> str:
    """Bytes of one call from rank to rank."""
    sent = view.matrix(estimate)
    total, p = sum(map(sum, sent)), estimate.ranks
    if not total:
        reason = "one rank has all rows" if p == 1 else "every rank has the rows that its queries see"
        return text_html(f"Nothing is sent: {reason}.")
    with drawing():
        fig, ax = plt.subplots(figsize=(HALF, 3.6))
        unit, factor = view.scaled(max(map(max, sent)), view.BYTES)
        shown = [[x / factor for x in row] for row in sent]
        image = ax.imshow(shown, cmap=SHADES, vmin=0, interpolation="nearest")
        fig.colorbar(image, ax=ax, shrink=0.6, label=unit)
        if p <= NAMED:
            most = max(map(max, shown))
            for a, row in enumerate(shown):
                for b, x in enumerate(row):
                    if x:
                        ink = theme.PAPER if x > 0.45 * most else theme.INK
                        ax.text(b, a, number(x, 2), ha="center", va="center", color=ink, fontsize=8)
        ax.set_xlabel("to rank", loc="left")
        ax.set_ylabel("from rank", loc="top")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))
    caption = f"Sent between {p} ranks by {estimate.scheme}: {size(total)}"
    each = "; ".join(f"rank {a} sends {size(sum(row))}" for a, row in enumerate(sent))
    return image_html(fig, f"{caption}. {each}", caption)


def memory(estimate, memory_bytes: int | None) -> str:
    """The parts of the highest rank's peak on top of each other, beside the memory there is."""
    parts = {name: x for name, x in estimate.parts.items() if x}
    unit, factor = view.scaled(estimate.peak_bytes, view.BYTES)
    with drawing():
        fig, ax = plt.subplots(figsize=(HALF, 1.5 + 0.21 * -(-len(parts) // 2)))
        start = 0
        for color, (name, x) in zip(PARTS, parts.items()):
            ax.barh(0, x / factor, left=start / factor, color=color, label=f"{name} {size(x)}", edgecolor=theme.PAPER)
            start += x
        if memory_bytes and memory_bytes <= 4 * start:
            ax.axvline(memory_bytes / factor, color=theme.INK, lw=1.4, ls="--", label=f"memory {size(memory_bytes)}")
        ax.set_yticks([])
        ax.set_ylim(-0.5, 0.5)
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
        ax.set_xlabel(unit, loc="left")
        fig.legend(loc="outside lower left", ncols=2, frameon=False, handlelength=1, columnspacing=1.2)
    caption = f"Peak memory of a rank: {size(estimate.peak_bytes)}"
    return image_html(fig, f"{caption}: {', '.join(f'{k} {size(x)}' for k, x in parts.items())}", caption)


def bounds(estimate) -> str:
    """The lower bounds of the time; the longest binds."""
    if not estimate.bounds:
        return ""
    unit, factor = view.scaled(estimate.bound_s, view.TIMES)
    items = [
        Bar(f"{name}, which binds" if name == estimate.binds else name, seconds / factor,
            color=BLUE if name == estimate.binds else GREY)
        for name, seconds in estimate.bounds.items()
    ]  # fmt: skip
    fig = bars(items, xlabel=unit)
    said = ", ".join(f"{name} {format_seconds(s)}" for name, s in estimate.bounds.items())
    caption = f"No call takes less than {format_seconds(estimate.bound_s)}: {estimate.binds} binds"
    return image_html(fig, f"{caption}. {said}", caption)


def image_html(fig, alt: str, caption: str) -> str:
    """The figure as an image that brings its own data, as wide as the panel's column or the whole of it; closes it."""
    png = io.BytesIO()
    with drawing():
        fig.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    width = round(96 * (WIDE if fig.get_figwidth() > WIDTH else HALF))
    plt.close(fig)
    data = base64.b64encode(png.getvalue()).decode("ascii")
    return (
        f'<figure style="margin:0"><img alt="{escape(alt, quote=True)}" style="width:{width}px;max-width:100%" '
        f'src="data:image/png;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def text_html(text: str, kind: str = "") -> str:
    """A line of text; ``kind`` "alert" is one that a screen reader reads out at once."""
    role, color = (' role="alert"', f"color:{RED};") if kind == "alert" else ("", "")
    return f'<p{role} style="{color}margin:.3em 0">{escape(text)}</p>'
