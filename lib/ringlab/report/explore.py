"""The explorer: controls in JupyterLab, and what follows from them at once: pictures,
facts, variants, advice.

Every number is one of ``estimate``, ``longest`` or ``advise``. Only ``explorer`` needs
ipywidgets.
"""

import functools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from html import escape
from itertools import groupby

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap

from .. import cost, hardware, patterns, presets, ring
from ..advise import advise
from ..checks import DTYPES, parse_count, parse_counts
from ..cost import format_seconds
from ..estimate import SHAPE, Estimate, estimate, longest
from ..hardware import Profile
from . import theme
from .figures import BLUE, RED, Figure, drawing
from .first_screen import LENGTHS, rooflines
from .tables import Cell, Table, Text, number, size

MOST_BLOCKS = 1024  # of a block-sparse pattern; more take minutes to count
NEAR = 64  # positions that are drawn one by one
SHADES = LinearSegmentedColormap.from_list(
    "seen", [theme.PAPER, "#bcd9ea", BLUE, "#00304d"]
)
# groups
PATTERN = "Pattern"
TENSORS = "Tensors"
HARDWARE = "Hardware and view"
# views
ONE_CALL = "one call"
COMPARE = "variants"
ADVICE = "advice"


def control(default, group: str, label: str, values: Iterable = ()):
    """A field with its control: the group where it stands, what it is called, and the
    values it takes, if few.
    """
    return field(
        default=default, metadata={"group": group, "control": (label, tuple(values))}
    )


@dataclass(frozen=True)
class Choice:
    """The controls and their values by name, texts as they were typed; ``pattern`` and
    ``n`` raise ValueError for wrong ones.

    >>> Choice("dilated", segment_lengths="2K 4K", dilation_rates="1, 2").pattern
    Dilated(segment_lengths=(2048, 4096), dilation_rates=(1, 2), mixing='lse', offsets='head')
    """

    kind: str = control("ladder", PATTERN, "pattern", presets.NAMED)
    # Arguments of the function that makes the pattern.
    segment_lengths: str = control("2048, 4096", PATTERN, "segment lengths")
    dilation_rates: str = control("1, 2", PATTERN, "dilation rates")
    mixing: str = control("lse", PATTERN, "mixing", patterns.MIXINGS)
    offsets: str = control("head", PATTERN, "offsets by", patterns.OFFSETS)
    block_size: int = control(128, PATTERN, "block size")
    before: int = control(2, PATTERN, "blocks before")
    count: int = control(2, PATTERN, "global blocks")
    random: int = control(3, PATTERN, "random blocks")
    causal: bool = control(False, PATTERN, "causal")
    seq_len: str = control("8192", TENSORS, "length n")
    batch: int = control(1, TENSORS, "batch")
    heads: int = control(8, TENSORS, "heads")
    kv_heads: int = control(8, TENSORS, "K/V heads")
    head_dim: int = control(64, TENSORS, "head_dim")
    dtype: str = control("float32", TENSORS, "dtype", DTYPES)
    passes: str = control("fwd", TENSORS, "passes", cost.PASSES)
    profile: str = control("cpu", HARDWARE, "hardware", hardware.profiles())
    ranks: int = control(1, HARDWARE, "ranks", (1, 2, 4, 8))
    scheme: str = control("auto", HARDWARE, "scheme", ("auto", *ring.SCHEMES))
    layout: str = control(
        "contiguous", HARDWARE, "layout", ("contiguous", "zigzag", "striped")
    )
    view: str = control(ONE_CALL, HARDWARE, "show", (ONE_CALL, COMPARE, ADVICE))
    head: int = control(0, HARDWARE, "head drawn")
    # On, where positions are drawn one by one.
    at: str = control("0", HARDWARE, "from position")

    @property
    def n(self) -> int:
        """The sequence length."""
        return parse_count(self.seq_len, "the length")

    @property
    def pattern(self) -> patterns.Pattern:
        names = presets.arguments(self.kind)
        options = {name: getattr(self, name) for name in names if hasattr(self, name)}
        for name in ("segment_lengths", "dilation_rates"):
            if name in options:
                options[name] = parse_counts(options[name], f"each of {name}")
        return presets.named(self.kind, self.n, self.heads, **options)

    @property
    def shape(self) -> dict:
        """What ``estimate`` and ``advise`` both take."""
        shape = {name: getattr(self, name) for name in SHAPE}
        return shape | {"dtype": DTYPES[self.dtype]}

    @property
    def call(self) -> dict:
        """Everything that ``estimate`` takes besides the pattern and the length."""
        call = self.shape | {"profile": self.hardware}
        if self.ranks > 1:
            call |= {"scheme": self.scheme, "layout": self.layout}
        return call

    @property
    def hardware(self) -> Profile:
        return hardware.get_profile(self.profile).on(hardware.detect())

    def estimate(self, pattern: patterns.Pattern | None = None) -> Estimate:
        """The Estimate of the call, or of another ``pattern`` in its place."""
        pattern = pattern or self.pattern
        if isinstance(pattern, patterns.BlockSparse):
            if (count := pattern.count(self.n)) > MOST_BLOCKS:
                raise ValueError(
                    f"{self.n:,} positions are {count:,} blocks of {pattern.block_size}, too many to "
                    f"count here: take blocks of at least {-(-self.n // MOST_BLOCKS)}, or a shorter sequence"
                )
        return estimate(pattern, seq_len=self.n, **self.call)

    def share(self, estimated: Estimate) -> str:
        """The pairs that a call sees, as a part of all."""
        pairs = self.batch * self.heads * self.n**2
        return f"{100 * estimated.cost.distinct_pairs / pairs:.3g} %"


# --------------------------------------------------------------------------------------
# one call


def facts(choice: Choice, estimated: Estimate) -> Table:
    """What the call costs, and what the chosen hardware makes of it."""
    profile = choice.hardware
    bounds = [
        f"{x} {format_seconds(seconds)}" for x, seconds in estimated.bounds.items()
    ]
    roofline = f"no rate is known of {profile.name}"
    if bounds:
        roofline = Cell(format_seconds(estimated.bound_s), "; ".join(bounds))
    lines = [
        ["Pairs of n² that a head sees", choice.share(estimated)],
        ["Work", f"{number(estimated.cost.folded_flops / 1e9)} GFLOP"],
        ["Peak memory of a rank", size(estimated.peak_bytes)],
        ["Fits", _fits(estimated.peak_bytes, profile.memory_bytes)],
        ["Longest sequence that fits", _longest(choice)],
        ["Roofline", roofline],
    ]
    if choice.ranks > 1:
        lines += [
            ["Scheme", estimated.scheme],
            ["Sent in all", size(sum(estimated.sent.values()))],
        ]
    note = (
        "A call is attention alone, of one layer: a model needs more memory and time."
    )
    return Table(f"Estimate for {profile.title}", ["One call", ""], lines, note=note)


def _fits(peak: int, memory: int | None) -> str | Cell:
    """Whether a rank's peak fits its memory."""
    if not memory:
        return "the memory is not known"
    return "yes" if peak <= memory else Cell("no", f"of {size(memory)}", kind="bad")


def _longest(choice: Choice) -> int | str:
    if not choice.hardware.memory_bytes:
        return "the memory is not known"
    if choice.ranks > 1 or isinstance(choice.pattern, patterns.BlockSparse):
        return "takes seconds to find: `ringlab.longest`"
    try:
        return longest(choice.pattern, choice.hardware.memory_bytes, **choice.call)
    except (ValueError, NotImplementedError) as error:
        return str(error)


def code(choice: Choice) -> str:
    """The call as Python that runs, with the settings that ``advise`` chooses for this
    pattern.
    """
    call = choice.shape | {"pattern": choice.pattern, "estimates": False}
    return advise(choice.hardware, choice.n, **call).code()


def seen(choice: Choice) -> Figure:
    """Which keys one head sees: of the whole sequence by samples, and of some positions
    one by one.
    """
    pattern = choice.pattern
    n = choice.n
    head = choice.head
    start = parse_count(choice.at, "the position")
    if not 0 <= head < choice.heads:
        raise ValueError(
            f"head {head} is none of the {choice.heads}, which count from 0"
        )
    if start >= n:
        raise ValueError(f"position {start:,} is not in the sequence, which has {n:,}")
    shape = {"head": head, "heads": choice.heads}
    sampled = patterns.show(pattern, n, width=96, causal=choice.causal, **shape)
    shades = [[patterns.SHADES.index(x) for x in line] for line in sampled.split("\n")]
    first = max(0, min(start, n - NEAR))
    x = torch.arange(first, min(n, first + NEAR))
    near = pattern.multiplicity(x, x, n=n, kv_heads=choice.kv_heads, **shape)  # (q, k)
    near = near.tril() if choice.causal else near
    caption = f"What head {head} of {choice.heads} sees: {pattern}{', causal' if choice.causal else ''}, n = {n:,}"
    alt = f"{caption}. Of the positions drawn one by one, {int((near > 0).sum())} pairs are seen"
    with drawing(**{"axes.spines.left": True}):
        fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
        look = {"cmap": SHADES, "vmin": 0}
        whole = {"vmax": 4, "extent": (0, n, n, 0), "interpolation": "nearest"}
        left.imshow(shades, **look, **whole)
        end = first + len(x)
        image = right.imshow(near.numpy(), **look, extent=(first, end, end, first))
        counts = {"ticks": range(int(near.max()) + 1), "label": "times counted"}
        fig.colorbar(image, ax=right, shrink=0.5, **counts)
        titles = "The whole sequence, sampled", f"From position {first:,} on"
        for ax, title in zip((left, right), titles):
            ax.set_title(title, loc="left", fontsize=10)
            ax.set(xlabel="key", ylabel="query")
            ax.locator_params(nbins=5)
        return Figure.of(fig, "seen", caption, alt)


def traffic(estimated: Estimate) -> Table | Text:
    """Bytes of one call from rank to rank."""
    if not any(estimated.sent.values()):
        why = (
            "one rank has all rows"
            if estimated.ranks == 1
            else "every rank has the rows that its queries see"
        )
        return Text([f"Nothing is sent: {why}."])
    ranks = range(estimated.ranks)
    sent = [[estimated.sent.get((a, b), 0) for b in ranks] for a in ranks]
    lines = [
        [f"rank {a}", size(sum(row)), *(size(x) if x else None for x in row)]
        for a, row in enumerate(sent)
    ]
    caption = f"Sent between {estimated.ranks} ranks by {estimated.scheme}: {size(sum(estimated.sent.values()))}"
    return Table(caption, ["From", ">To all", *(f">To rank {b}" for b in ranks)], lines)


def memory(estimated: Estimate) -> Table:
    """What fills the memory of the rank that needs most, at its peak."""
    parts = sorted(estimated.parts.items(), key=lambda part: -part[1])
    lines = [
        [name, size(x), f"{100 * x / estimated.peak_bytes:.0f} %"]
        for name, x in parts
        if x
    ]
    return Table(
        f"Peak memory of a rank: {size(estimated.peak_bytes)}",
        ["Part", ">Size", ">Share"],
        lines,
    )


# --------------------------------------------------------------------------------------
# variants


def variants(choice: Choice) -> dict[str, patterns.Pattern]:
    """The named patterns and the one that is chosen, in blocks that are few enough to
    count.
    """
    size = max(128, -(-choice.n // MOST_BLOCKS))
    names = ["window", "local_global"]
    if choice.ranks == 1:  # its random blocks take seconds to plan on several
        names.append("bigbird")
    return {
        "dense": patterns.Dense(),
        "ladder": presets.ladder(choice.n, heads=choice.heads),
        **{name: presets.named(name, block_size=size) for name in names},
        "chosen": choice.pattern,
    }


def compared(choice: Choice) -> Table:
    """All variants at the chosen length, shape, hardware and number of ranks."""
    profile = choice.hardware
    lines = []
    for name, pattern in variants(choice).items():
        line = [Cell(name, str(pattern))]
        try:
            estimated = choice.estimate(pattern)
            line += [
                choice.share(estimated),
                format_seconds(estimated.bound_s) if estimated.bound_s else None,
                size(estimated.peak_bytes),
                size(sum(estimated.sent.values())),
                _fits(estimated.peak_bytes, profile.memory_bytes),
            ]
        except (ValueError, NotImplementedError) as error:
            line += [*[None] * 4, Cell("cannot run", str(error), kind="bad")]
        lines.append(line)
    ranks = f", {choice.ranks} ranks" if choice.ranks > 1 else ""
    return Table(
        f"Variants at {choice.n:,} tokens on {profile.title}{ranks}",
        ["Variant", ">Of all pairs", ">Roofline", ">Peak of a rank", ">Sent", "Fits"],
        lines,
        note="They compute different functions: this says what they cost, not which a model learns from.",
    )


@functools.lru_cache(maxsize=32)
def over_length(choice: Choice) -> Figure:
    """Rooflines of the variants over length, as on the first screen of a report."""
    choice = replace(choice, kind="dense")  # whose longest sequence is soon found
    advised = {}
    for n in LENGTHS:
        try:
            advised[n] = advise(choice.hardware, n, **choice.shape)
        except ValueError:  # not even the inputs fit
            break
    if not advised:
        raise ValueError(
            f"{choice.hardware.title} holds none of the lengths from {LENGTHS[0]:,} tokens on"
        )
    end = _longest(choice)
    return rooflines(choice.hardware, advised, end if isinstance(end, int) else None)


# --------------------------------------------------------------------------------------
# the panel


MISSING = "The explorer needs ipywidgets: `python -m pip install -c lib/constraints.txt -e './lib[report,lab]'`"
# Names stand left and numbers right in a table; figures have the colours of
# JupyterLab's theme.
STYLE = f"""<style>
.ringlab-explore .row {{ display: flex; flex-flow: row wrap; gap: 8px 16px; }}
.ringlab-explore :is(th, td) {{ text-align: left; vertical-align: top; font-weight: normal; }}
.ringlab-explore .n {{ text-align: right; }}
.ringlab-explore small {{ display: block; color: var(--jp-ui-font-color2); }}
.ringlab-explore figure {{ margin: 0; }}
.ringlab-explore svg {{ max-width: 100%; height: auto; {theme.LIGHT} }}
[data-jp-theme-light=false] .ringlab-explore svg {{ {theme.DARK} }}
</style>"""


def overview(profile: str = "auto", **start) -> Table:
    """Show the figure over length and return the table of variants, for those who see
    no widgets.
    """
    from IPython.display import Image, display

    choice = Choice(profile=hardware.resolve(profile).name, **start)
    figure = over_length(choice)
    display(Image(figure.png, width=500, alt=figure.alt))
    return compared(choice)


def explorer(profile: str = "auto", **start):
    """The explorer for JupyterLab, on a hardware profile and with other fields of
    ``Choice`` to start from.

    Without ipywidgets it is one line that says what to install. Raises UnknownProfile
    for a name that is none.
    """
    try:
        import ipywidgets
    except ModuleNotFoundError:
        return Text([MISSING])
    return Panel(ipywidgets, Choice(profile=hardware.resolve(profile).name, **start))


def page(choice: Choice) -> str:
    """The view that a choice names, as HTML; what cannot be is one line instead, which a
    screen reader reads out at once.
    """
    try:
        return VIEWS[choice.view](choice)
    except Exception as error:  # noqa: BLE001  a control takes any text, and a callback's traceback goes nowhere
        text = " ".join(str(error).split())
        if not text or not isinstance(error, ValueError):
            text = f"{type(error).__name__}: {text}"
        return f'<p role="alert" style="color:{RED};margin:.3em 0">{escape(text)}</p>'


def _one_call(choice: Choice) -> str:
    estimated = choice.estimate()
    tables = [facts(choice, estimated), memory(estimated), traffic(estimated)]
    return (
        f'{_html(seen(choice))}<div class="row">{"".join(x.html for x in tables)}</div>'
        f"{_folded('This call as code', code(choice))}"
    )


def _compare(choice: Choice) -> str:
    return compared(choice).html + _html(over_length(choice))


def _advice(choice: Choice) -> str:
    """What to use for the length, shape, hardware and ranks, whatever the pattern and
    the dtype, with code.
    """
    advice = advise(choice.hardware, choice.n, **choice.shape | {"dtype": None})
    code = _folded("Advised call as code", advice.code())
    return f"<pre>{escape(advice.text())}</pre>{code}"


VIEWS = {ONE_CALL: _one_call, COMPARE: _compare, ADVICE: _advice}


class Panel:
    """Controls by the field of ``Choice`` that they set, and below them the ``page``
    that follows.
    """

    def __init__(self, widgets, start: Choice):
        own = fields(Choice)
        self.controls = {
            f.name: _control(widgets, getattr(start, f.name), *f.metadata["control"])
            for f in own
        }
        self.page = widgets.HTML().add_class("jp-RenderedHTMLCommon")
        columns = []
        for title, group in groupby(own, key=lambda f: f.metadata["group"]):
            head = widgets.HTML(f"<b>{title}</b>")
            columns.append(
                widgets.VBox([head, *(self.controls[f.name] for f in group)])
            )
        parts = [widgets.HTML(STYLE), widgets.HBox(columns).add_class("row"), self.page]
        self.box = widgets.VBox(parts).add_class("ringlab-explore")
        # JupyterLab handles widgets in a thread beside that of the cells, and the first
        # messages in both: one refresh at a time, so that the last shows the latest.
        self.lock = threading.RLock()
        self.refresh()
        for control in self.controls.values():
            control.observe(self.refresh, names="value")

    @property
    def choice(self) -> Choice:
        values = {name: control.value for name, control in self.controls.items()}
        return Choice(**values)

    def refresh(self, _=None) -> None:
        """Show the controls that the choice has, and what follows from them."""
        with self.lock:
            choice = self.choice
            hidden = {
                name for kind in presets.NAMED for name in presets.arguments(kind)
            }
            hidden -= {*presets.arguments(choice.kind)}
            if choice.ranks == 1:
                hidden |= {"scheme", "layout"}
            for name, control in self.controls.items():
                control.layout.display = "none" if name in hidden else None
            self.page.value = "<p>Working ...</p>"
            self.page.value = page(choice)

    def _repr_mimebundle_(self, **options) -> dict:
        return self.box._repr_mimebundle_(**options)


def _control(widgets, value, label: str, values: tuple):
    look = {
        "description": label,
        "style": {"description_width": "108px"},
        "layout": {"width": "256px"},
    }
    if values:
        return widgets.Dropdown(options=values, value=value, **look)
    if isinstance(value, bool):
        return widgets.Checkbox(value=value, indent=True, **look)
    kind = widgets.IntText if isinstance(value, int) else widgets.Text
    return kind(value=value, continuous_update=False, **look)


def _html(figure: Figure) -> str:
    return f"<figure>{theme.inline(figure.svg, figure.alt)}<figcaption>{escape(figure.caption)}</figcaption></figure>"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"
