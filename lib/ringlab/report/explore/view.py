"""What the explorer shows of a call: pictures, facts, the variants beside each other, and a measurement.

Every number is one of ``estimate``, ``longest``, ``advise`` or ``measure.run``. Nothing here needs widgets.
"""

from __future__ import annotations

import base64
import functools
import io
import re
import tempfile
from dataclasses import dataclass, replace
from html import escape

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap

from ... import block_patterns, hardware, measure, patterns
from ...advise import Advice, advise, ladder, local
from ...cost import format_seconds
from ...estimate import Estimate, estimate, longest
from ...hardware import Profile
from ...measure.timing import available_bytes, samples_for
from .. import columns, theme
from ..figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Figure, drawing
from ..first_screen import LENGTHS, rooflines
from ..tables import Cell, Table, number, size
from ..trust import objection

# Block-sparse patterns: the function of ``ringlab.blocks``, and the controls that are its arguments.
BLOCKS = {
    "sliding window": ("sliding_window", ("window",)),
    "local and global": ("local_global", ("window", "global_blocks")),
    "BigBird": ("bigbird", ("window", "global_blocks", "random_blocks")),
}
# Each pattern with the controls that only it has.
KINDS = {"dilated": ("lengths", "rates", "mixing", "offsets"), "dense": ()}
KINDS |= {name: ("block_size", *arguments) for name, (_, arguments) in BLOCKS.items()}
LONGNET = {"kind": "dilated", "lengths": "2K 4K 8K 16K 32K 64K 128K", "rates": "1 2 4 8 16 32 64"}
PRESETS = {
    "LongNet, 128K tokens on 8 GB": LONGNET | {"seq_len": "128K", "profile": "gtx1080", "ranks": 1},
    "LongNet, 1M tokens on 4 GPUs of 8 GB": LONGNET | {"seq_len": "1M", "profile": "gtx1080", "ranks": 4},
    "Window of 2K, 32K tokens": {"kind": "sliding window", "block_size": 128, "window": 8, "seq_len": "32K"},
    "BigBird, 16K tokens": {"kind": "BigBird", "block_size": 64, "window": 1, "seq_len": "16K"},
    "Dense, 8K tokens": {"kind": "dense", "seq_len": "8K"},
}
MOST_BLOCKS = 1024  # of a block-sparse pattern; more take minutes to count
LIMIT_S = 60.0  # that a measurement may take
SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
NEAR = 64  # positions that are drawn one by one
DPI, WIDE, HALF = 192, 8.4, 4.1  # twice what a page shows; inches at 96 px
COLORS = (BLUE, SKY, GREEN, ORANGE, RED, PURPLE, "#8a6d3b", GREY)
SHADES = LinearSegmentedColormap.from_list("seen", [theme.PAPER, "#bcd9ea", BLUE, "#00304d"])


@dataclass(frozen=True)
class Choice:
    """The values of the controls by name, texts as they were typed; ``pattern`` and ``n`` raise ValueError for wrong
    ones.

    >>> Choice(lengths="2K 4K", rates="1, 2", seq_len="128K").pattern
    Dilated(segment_lengths=(2048, 4096), dilation_rates=(1, 2), mixing='lse', offsets='head')
    """

    kind: str = "dilated"
    lengths: str = "2048, 4096, 8192"
    rates: str = "1, 2, 4"
    mixing: str = "lse"
    offsets: str = "head"
    block_size: int = 128
    window: int = 2
    global_blocks: int = 1
    random_blocks: int = 2
    seq_len: str = "8192"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    passes: str = "fwd"
    ranks: int = 1
    scheme: str = "auto"
    layout: str = "contiguous"
    profile: str = "cpu"
    head: int = 0  # the one that is drawn
    at: str = "0"  # from where on positions are drawn one by one

    @property
    def n(self) -> int:
        """The sequence length."""
        return one("sequence length", self.seq_len)

    @property
    def pattern(self) -> patterns.Pattern:
        if self.kind == "dense":
            return patterns.Dense()
        if self.kind == "dilated":
            lengths, rates = counts("segment lengths", self.lengths), counts("dilation rates", self.rates)
            return patterns.Dilated(lengths, rates, self.mixing, self.offsets)
        function, names = BLOCKS[self.kind]
        return getattr(block_patterns, function)(*(getattr(self, x) for x in names), block_size=self.block_size)

    @property
    def shape(self) -> dict:
        """What ``estimate`` and ``advise`` both take."""
        names = ("batch", "heads", "kv_heads", "head_dim", "causal", "passes", "ranks")
        return {name: getattr(self, name) for name in names}

    @property
    def call(self) -> dict:
        """Everything that ``estimate`` takes besides the pattern, the length and the profile."""
        across = {"scheme": self.scheme, "layout": self.layout} if self.ranks > 1 else {}
        return self.shape | across | {"dtype": getattr(torch, self.dtype)}

    @property
    def hardware(self) -> Profile:
        return hardware.get_profile(self.profile).on(hardware.detect())

    def estimate(self, profile: Profile | None = None) -> Estimate:
        """The Estimate of the call on ``profile`` or the chosen one."""
        if isinstance(self.pattern, patterns.BlockSparse) and self.pattern.count(self.n) > MOST_BLOCKS:
            raise ValueError(
                f"{self.n:,} positions are {self.pattern.count(self.n):,} blocks of {self.block_size}, too many to "
                f"count here: take blocks of at least {-(-self.n // MOST_BLOCKS)}, or a shorter sequence"
            )
        return estimate(self.pattern, seq_len=self.n, profile=profile or self.hardware, **self.call)


def counts(name: str, text: str) -> list[int]:
    """The integers of a text, separated by commas or spaces; K, M and G are powers of 1024.

    >>> counts("segment lengths", "2048, 4K 8_192")
    [2048, 4096, 8192]
    """
    words = text.replace(",", " ").strip("[]() ").split()
    found = [re.fullmatch(r"(\d+(?:_\d+)*)([KMG]?)", word, re.IGNORECASE) for word in words]
    if not words or None in found:
        wrong = f"not {words[found.index(None)]!r}" if words else "and there is none"
        raise ValueError(f"{name} must be positive integers, as 2048, 4096 or 2K 4K, {wrong}")
    return [int(m[1]) * SIZES[m[2].upper()] for m in found]


def one(name: str, text: str) -> int:
    """The only integer of a text."""
    found = counts(name, text)
    if len(found) != 1:
        raise ValueError(f"{name} must be one number, as 8192 or 128K, got {text!r}")
    return found[0]


# ---------------------------------------------------------------------------------------------------------------------
# one call


def facts(choice: Choice, found: Estimate) -> Table:
    """What the call costs, and what the chosen hardware makes of it."""
    n, profile = choice.n, choice.hardware
    share = 100 * found.cost.distinct_pairs / (choice.batch * choice.heads * n * n)
    bounds = "; ".join(f"{name} {format_seconds(seconds)}" for name, seconds in found.bounds.items())
    lines = [
        ["Pairs of n² that a head sees", f"{share:.3g} %"],
        ["Work", f"{number(found.cost.folded_flops / 1e9)} GFLOP"],
        ["Peak memory of a rank", size(found.peak_bytes)],
        ["Fits", _fits(found.peak_bytes, profile.memory_bytes)],
        ["Longest sequence that fits", _longest(choice)],
        ["Roofline", Cell(format_seconds(found.bound_s), bounds) if bounds else f"no rate is known of {profile.name}"],
    ]
    if choice.ranks > 1:
        lines += [["Scheme", found.scheme], ["Sent in all", size(sum(found.sent.values()))]]
    return Table(f"Estimate for {profile.title}", ["One call", ""], lines)


def _fits(peak: int, memory: int | None) -> str | Cell:
    """Whether a rank's peak fits its memory."""
    if not memory:
        return "the memory is not known"
    return "yes" if peak <= memory else Cell("no", f"of {size(memory)}", kind="bad")


def _longest(choice: Choice) -> int | str:
    if not choice.hardware.memory_bytes:
        return "the memory is not known"
    if choice.ranks > 1 or isinstance(choice.pattern, patterns.BlockSparse):
        return "takes seconds to find: ringlab.longest"
    try:
        return longest(choice.pattern, choice.hardware.memory_bytes, profile=choice.hardware, **choice.call)
    except (ValueError, NotImplementedError) as error:
        return str(error)


def code(choice: Choice) -> str:
    """The call as Python that runs, with the settings that ``advise`` chooses for this pattern."""
    dtype = getattr(torch, choice.dtype)
    shape = choice.shape | {"pattern": choice.pattern, "dtype": dtype, "estimates": False}
    return advise(choice.hardware, choice.n, **shape).code()


def seen(choice: Choice) -> str:
    """Which keys one head sees: of the whole sequence by samples, and of some positions one by one."""
    pattern, n, head, start = choice.pattern, choice.n, choice.head, one("position", choice.at)
    if not 0 <= head < choice.heads:
        raise ValueError(f"head {head} is none of the {choice.heads}, which count from 0")
    if start >= n:
        raise ValueError(f"position {start:,} is not in the sequence, which has {n:,}")
    whole = patterns.show(pattern, n, width=96, causal=choice.causal, head=head, heads=choice.heads)
    shades = [[patterns.SHADES.index(x) for x in line] for line in whole.split("\n")]
    first = max(0, min(start, n - NEAR))
    x = torch.arange(first, min(n, first + NEAR))
    near = pattern.multiplicity(x, x, n=n, head=head, heads=choice.heads, kv_heads=choice.kv_heads)  # (q, k)
    near = near.tril() if choice.causal else near
    with drawing(**{"axes.spines.left": True}):
        fig, axes = plt.subplots(1, 2, figsize=(WIDE, 3.4))
        axes[0].imshow(shades, cmap=SHADES, vmin=0, vmax=4, extent=(0, n, n, 0), interpolation="nearest")
        image = axes[1].imshow(near.numpy(), cmap=SHADES, vmin=0, extent=(first, first + len(x), first + len(x), first))
        fig.colorbar(image, ax=axes[1], ticks=range(int(near.max()) + 1), shrink=0.5, label="times counted")
        for ax, title in zip(axes, ("The whole sequence, sampled", f"From position {first:,} on")):
            ax.set_title(title, loc="left", fontsize=10)
            ax.set(xlabel="key", ylabel="query")
    caption = f"What head {head} of {choice.heads} sees: {pattern}{', causal' if choice.causal else ''}, n = {n:,}"
    return drawn(fig, f"{caption}. Of the positions drawn one by one, {int((near > 0).sum())} pairs are seen", caption)


def traffic(found: Estimate) -> str:
    """Bytes of one call from rank to rank."""
    p, total = found.ranks, sum(found.sent.values())
    if not total:
        reason = "one rank has all rows" if p == 1 else "every rank has the rows that its queries see"
        return line(f"Nothing is sent: {reason}.")
    sent = [[found.sent.get((a, b), 0) / 2**20 for b in range(p)] for a in range(p)]
    with drawing():
        fig, ax = plt.subplots(figsize=(HALF, 3.4))
        image = ax.imshow(sent, cmap=SHADES, vmin=0, interpolation="nearest")
        fig.colorbar(image, ax=ax, shrink=0.6, label="MiB")
        ax.set(xlabel="to rank", ylabel="from rank", xticks=range(p), yticks=range(p))
    caption = f"Sent between {p} ranks by {found.scheme}: {size(total)}"
    each = "; ".join(f"rank {a} sends {size(sum(row) * 2**20)}" for a, row in enumerate(sent))
    return drawn(fig, f"{caption}. {each}", caption)


def memory(found: Estimate) -> str:
    """What fills the memory of the rank that needs most, at its peak."""
    parts = {name: x for name, x in found.parts.items() if x}
    with drawing():
        fig, ax = plt.subplots(figsize=(HALF, 1.5 + 0.21 * -(-len(parts) // 2)))
        start = 0.0
        for color, (name, x) in zip(COLORS, parts.items()):
            ax.barh(0, x / 2**20, left=start, color=color, label=f"{name} {size(x)}", edgecolor=theme.PAPER)
            start += x / 2**20
        ax.set_yticks([])
        ax.set_xlabel("MiB", loc="left")
        fig.legend(loc="outside lower left", ncols=2, frameon=False, handlelength=1, columnspacing=1.2)
    caption = f"Peak memory of a rank: {size(found.peak_bytes)}"
    return drawn(fig, f"{caption}: {', '.join(f'{name} {size(x)}' for name, x in parts.items())}", caption)


def drawn(fig, alt: str, caption: str) -> str:
    """A figure as HTML that brings its own image; closes it."""
    png = io.BytesIO()
    with drawing():
        fig.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    plt.close(fig)
    return image(png.getvalue(), alt, caption, width=round(96 * fig.get_figwidth()))


def image(png: bytes, alt: str, caption: str, width: int = 500) -> str:
    data, alt = base64.b64encode(png).decode("ascii"), escape(alt, quote=True)
    shown = f'<img alt="{alt}" style="width:{width}px;max-width:100%" src="data:image/png;base64,{data}">'
    return f'<figure style="margin:0">{shown}<figcaption>{escape(caption)}</figcaption></figure>'


def line(text: str, kind: str = "") -> str:
    """A line of text; ``kind`` "alert" is one that a screen reader reads out at once."""
    role, color = (' role="alert"', f"color:{RED};") if kind == "alert" else ("", "")
    return f'<p{role} style="{color}margin:.3em 0">{escape(text)}</p>'


# ---------------------------------------------------------------------------------------------------------------------
# variants, and advice


def variants(choice: Choice) -> dict[str, patterns.Pattern]:
    """The patterns that are compared: the kinds that ``advise`` knows, BigBird, and the one that is chosen."""
    window = local(choice.n, choice.ranks)
    found = {"Dense": patterns.Dense(), "LongNet ladder": ladder(choice.n), "Local window": window}
    if choice.ranks == 1:  # its random blocks take seconds to plan on several
        found["BigBird"] = block_patterns.bigbird(1, 1, 1, block_size=window.block_size)
    return found | {"Chosen": choice.pattern}


def compared(choice: Choice) -> Table:
    """All variants at the chosen length, shape, hardware and number of ranks."""
    n, profile, lines = choice.n, choice.hardware, []
    for name, pattern in variants(choice).items():
        try:
            found = estimate(pattern, seq_len=n, profile=profile, **choice.call)
        except (ValueError, NotImplementedError) as error:
            lines.append([Cell(name, str(pattern)), *[None] * 4, Cell("cannot run", str(error), kind="bad")])
            continue
        share = 100 * found.cost.distinct_pairs / (choice.batch * choice.heads * n * n)
        lines.append([
            Cell(name, str(pattern)), f"{share:.3g} %", format_seconds(found.bound_s) if found.bound_s else None,
            size(found.peak_bytes), size(sum(found.sent.values())), _fits(found.peak_bytes, profile.memory_bytes),
        ])  # fmt: skip
    title = f"Variants at {n:,} tokens on {profile.title}" + (f", {choice.ranks} ranks" if choice.ranks > 1 else "")
    note = "They compute different functions: this says what they cost, not which a model learns from."
    return Table(title, ["Variant", ">Of all pairs", ">Roofline", ">Peak of a rank", ">Sent", "Fits"], lines, note=note)


def over_length(choice: Choice) -> Figure:
    """Rooflines of the variants over length, as on the first screen of a report."""
    return _over_length(replace(choice, kind="dense", seq_len="", head=0, at=""))  # what the figure does not depend on


@functools.lru_cache(maxsize=32)
def _over_length(choice: Choice) -> Figure:
    found, dtype = {}, getattr(torch, choice.dtype)
    for n in LENGTHS:
        try:
            found[n] = advise(choice.hardware, n, dtype=dtype, **choice.shape)
        except ValueError:  # not even the inputs fit
            break
    if not found:
        raise ValueError(f"{choice.hardware.title} holds none of the lengths from {LENGTHS[0]:,} tokens on")
    end = _longest(choice)
    return rooflines(choice.hardware, found, end if isinstance(end, int) else None)


def advised(choice: Choice) -> Advice:
    """What to use for the chosen length, shape, hardware and number of ranks, whatever the pattern."""
    return advise(choice.hardware, choice.n, **choice.shape)


# ---------------------------------------------------------------------------------------------------------------------
# a measurement


def here() -> Profile:
    """The profile that drives this machine, with the memory that is free now."""
    machine = hardware.detect()
    found = hardware.resolve("auto", machine)
    found = (found if found.runnable(machine)[0] else hardware.get_profile("cpu")).on(machine)
    return replace(found, memory_bytes=available_bytes(machine.ram_bytes)) if found.kind == "cpu" else found


def point(choice: Choice) -> measure.Point:
    """The point of a choice."""
    shape = choice.shape
    ranks = shape.pop("ranks")
    options = {"scheme": choice.scheme, "layout": choice.layout} if ranks > 1 else {}
    more = {"seq_len": choice.n, "dtype": choice.dtype, "world_size": ranks, "options": options}
    return measure.Point("ringlab", choice.pattern, **shape, **more)


def run(choice: Choice, profile: Profile) -> measure.Result:
    """Measure the call on this machine, after its check against the float64 reference.

    Raises ValueError for a call that cannot be or would take too much memory or time here, and
    ``measure.Interrupted`` on Ctrl-C.
    """
    chosen, found = point(choice), choice.estimate(profile)
    sharing = choice.ranks if profile.kind == "cpu" else 1  # ranks on GPUs have one each
    # One rank gathers inputs and outputs of all, twice, to compare them with the reference.
    needs = found.peak_bytes * sharing + (2 if choice.ranks > 1 else 1) * found.cost.floor_bytes
    seconds = found.bound_s * sharing
    calls = 2 + samples_for(seconds)
    if profile.memory_bytes and needs > profile.memory_bytes:
        free = size(profile.memory_bytes)
        raise ValueError(f"too large: a checked run needs about {size(needs)}, free are {free}")
    if seconds * calls > LIMIT_S:
        raise ValueError(f"too long: {calls} calls of at least {number(seconds)} s each")
    with tempfile.TemporaryDirectory(prefix="ringlab-explore-", ignore_cleanup_errors=True) as folder:
        return measure.run([measure.Group("explore", (chosen,))], folder, profile=profile, timeout_s=LIMIT_S)[0]


def measured(results: list[tuple[Choice, measure.Result]], profile: Profile) -> Table:
    """What was measured here, the newest first, beside what was estimated; no time where the check did not pass."""
    heads = ["Point", ">Time (ms)", ">Roofline (ms)", ">Peak of a rank", ">Error"]
    lines = []
    for choice, result in reversed(results):
        if why := objection(result):
            lines.append([result.point.label(), Cell(why, kind="bad"), *[None] * 3])
            continue
        peak = Cell(size(result.memory["tracked_peak_bytes"]), f"estimated {size(choice.estimate(profile).peak_bytes)}")
        shown = columns.time(result), columns.roofline(result), peak, columns.error(result)
        lines.append([result.point.label(), *shown])
    return Table(f"Measured on {profile.title}", heads, lines)
