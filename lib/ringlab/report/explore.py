"""The explorer: controls in JupyterLab, and what follows from them at once: pictures,
an estimate, advice.

Every number is one of ``estimate``, ``longest`` or ``ringlab advise``. Only
``explorer`` needs ipywidgets.
"""

import threading
from html import escape

import matplotlib.pyplot as plt
import torch

from .. import cost, hardware, patterns, presets, ring
from ..advise import advise
from ..call import CallSpec
from ..checks import DTYPES, parse_count, parse_counts
from ..estimate import MOST_BYTES, SHAPE, estimate_call, longest
from . import theme
from .evidence import advised
from .figures import Figure, drawing
from .tables import Text
from .templates import lines_of

NEAR = 64  # positions that are drawn one by one

# Controls: a text to type, or a tuple of values of which the first is chosen.
PATTERN = {  # arguments of the function that makes the pattern
    "segment_lengths": "2048, 4096",
    "dilation_rates": "1, 2",
    "mixing": patterns.MIXINGS,
    "offsets": tuple(patterns.OFFSETS),
    "block_size": "128",
    "before": "2",
    "count": "2",
    "random": "3",
}
CALL = {
    "seq_len": "8192",
    "batch": "1",
    "heads": "8",
    "kv_heads": "8",
    "head_dim": "64",
    "causal": (False, True),
    "dtype": tuple(dict.fromkeys([torch.float32, *DTYPES.values()])),
    "passes": tuple(cost.PASSES),
    "profile": tuple(hardware.profiles()),
    "ranks": (1, 2, 4, 8),
    "scheme": ("auto", *ring.SCHEMES),
    "layout": ("contiguous", "zigzag", "striped"),
}
CONTROLS = {
    "show": ("one call", "advice"),
    "pattern": tuple(dict.fromkeys(["ladder", *presets.NAMED])),
    **PATTERN,
    **CALL,
    "head": "0",
    "position": "0",
}


def values_of(profile: str, seq_len: int | str, ranks: int) -> dict:
    """Return the values of all controls to start from; UnknownProfile for a name that
    is none.
    """
    first = {x: y[0] if isinstance(y, tuple) else y for x, y in CONTROLS.items()}
    profile = hardware.resolve(profile).name
    return first | {"profile": profile, "seq_len": str(seq_len), "ranks": ranks}


def parse(name: str, value):
    """Return what the value of a control means; ValueError for a wrong text."""
    if name == "profile":
        return hardware.get_profile(value).on(hardware.detect())
    if name in ("segment_lengths", "dilation_rates"):
        return parse_counts(value, f"each of {name}")
    return parse_count(value, name) if isinstance(CONTROLS[name], str) else value


def call_of(values: dict) -> CallSpec:
    """Return the call that the values of the controls name; ValueError for one that
    cannot be.

    >>> str(call_of(values_of("cpu", "16K", ranks=1)).pattern)
    'dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 8]'
    """
    name = values["pattern"]
    options = {x: parse(x, values[x]) for x in presets.arguments(name) if x in PATTERN}
    call = {x: parse(x, values[x]) for x in CALL}
    pattern = presets.named(name, call["seq_len"], call["heads"], **options)
    return CallSpec(pattern, **call)


# --------------------------------------------------------------------------------------
# one call


def fitting(call: CallSpec) -> int | None:
    """Return the longest sequence that fits the memory; None where that is not known,
    or, on several ranks, takes seconds to find. Raises ValueError where none fits.
    """
    memory = call.profile.memory_bytes
    if call.ranks > 1 or not memory:
        return None
    return longest(call.pattern, memory, **call.options(*SHAPE, "dtype", "profile"))


def estimated(call: CallSpec) -> str:
    """Return the estimate of a call as ``ringlab estimate`` prints it, with the longest
    sequence that fits.
    """
    most = fitting(call)
    about = {
        "e": estimate_call(call),
        "budget": call.profile.memory_bytes,
        "most": most,
    }
    lines = lines_of("estimate", **vars(call), **about)
    return "\n".join(lines if most else [*lines, "longest    see ringlab.longest"])


def seen(call: CallSpec, head: int, position: int) -> Figure:
    """Return which keys one head sees: of the whole sequence by samples, and of the
    positions from ``position`` on one by one. Raises ValueError for no such head.
    """
    n = call.seq_len
    heads = call.heads
    pattern = call.pattern
    if head >= heads:
        raise ValueError(f"head {head} is none of the {heads}, which count from 0")
    shape = {"n": n, "head": head, "heads": heads}
    sampled = patterns.show(pattern, width=96, causal=call.causal, **shape)
    shades = [[*map(patterns.SHADES.index, line)] for line in sampled.split("\n")]
    first = max(0, min(position, n - NEAR))
    end = min(n, first + NEAR)
    x = torch.arange(first, end)
    near = pattern.multiplicity(x, x, kv_heads=call.kv_heads, **shape)  # (q, k)
    near = near.tril() if call.causal else near
    caption = f"What head {head} of {heads} sees: {pattern}{', causal' if call.causal else ''}, n = {n:,}"
    alt = f"{caption}. Of the positions drawn one by one, {int((near > 0).sum())} pairs are seen"
    with drawing(**{"axes.spines.left": True, "image.cmap": "Blues"}):
        fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
        left.imshow(shades, vmin=0, extent=(0, n, n, 0))
        left.set(title="The whole sequence, sampled", xlabel="key", ylabel="query")
        image = right.imshow(near.numpy(), vmin=0, extent=(first, end, end, first))
        right.set(title=f"From position {first:,} on", xlabel="key")
        fig.colorbar(image, shrink=0.5, label="times counted")
        left.locator_params(nbins=5)
        return Figure.of(fig, "seen", caption, alt)


# --------------------------------------------------------------------------------------
# the page and its controls


MISSING = "The explorer needs ipywidgets: `python -m pip install -c lib/constraints.txt -e './lib[report,lab]'`"
# Names stand left and numbers right in a table; figures have the colours of
# JupyterLab's theme.
STYLE = f"""<style>
.ringlab-explore .controls {{ display: grid; grid-template-columns: repeat(auto-fill, 310px); }}
.ringlab-explore :is(th, td) {{ text-align: left; vertical-align: top; font-weight: normal; }}
.ringlab-explore .n {{ text-align: right; }}
.ringlab-explore small {{ display: block; color: var(--jp-ui-font-color2); }}
.ringlab-explore .widget-label {{ width: 108px; }}
.ringlab-explore figure {{ margin: 0; }}
.ringlab-explore svg {{ max-width: 100%; height: auto; {theme.LIGHT} }}
[data-jp-theme-light=false] .ringlab-explore svg {{ {theme.DARK} }}
</style>"""


def overview(profile: str, seq_len: int | str, ranks: int) -> None:
    """Show the advice to start from, for those who see no widgets."""
    from IPython.display import HTML, display

    start = values_of(profile, seq_len, ranks) | {"show": "advice"}
    display(HTML(f'{STYLE}<div class="ringlab-explore">{page(start)}</div>'))


def page(values: dict) -> str:
    """Return the view that the controls choose, as HTML; what cannot be is one line
    instead, which a screen reader reads out at once.
    """
    try:
        call = call_of(values)
        if values["show"] == "advice":
            advice = advised(**call.options("profile", "seq_len", *SHAPE))
            return f"<pre>{escape(str(advice))}</pre>"
        about = call.options("profile", "seq_len", "pattern", "dtype", *SHAPE)
        # What the memory does not hold is shown too: the estimate says so.
        code = advise(**about, memory_bytes=MOST_BYTES, estimates=False).code()
        drawn = (parse(name, values[name]) for name in ("head", "position"))
        figure = seen(call, *drawn)
        image = theme.inline(figure.svg, figure.alt)
        return (
            f"<figure>{image}<figcaption>{escape(figure.caption)}</figcaption></figure>"
            f"<pre>{escape(estimated(call))}</pre>"
            f"<details><summary>This call as code</summary><pre>{escape(code)}</pre></details>"
        )
    except (ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        return f'<p role="alert" style="color:{theme.RED};margin:.3em 0">{escape(text)}</p>'


def explorer(profile: str, seq_len: int | str, ranks: int):
    """Return the explorer for JupyterLab, on a hardware profile, with a length and a
    number of ranks to start from.

    Without ipywidgets it is one line that says what to install. Raises UnknownProfile
    for a name that is none.
    """
    try:
        import ipywidgets as widgets
    except ModuleNotFoundError:
        return Text([MISSING])
    controls = {}
    for name, value in values_of(profile, seq_len, ranks).items():
        kind, look = widgets.Text, {"continuous_update": False}
        if isinstance(CONTROLS[name], tuple):
            kind, look = widgets.Dropdown, {"options": CONTROLS[name]}
        label = name.replace("_", " ")
        controls[name] = kind(value=value, description=label, **look)
    shown = widgets.HTML().add_class("jp-RenderedHTMLCommon")
    lock = threading.Lock()

    def refresh(**_) -> None:
        # JupyterLab handles widgets in several threads: one refresh at a time, with the
        # values that controls have by then, so that the last shows the latest.
        with lock:
            values = {name: control.value for name, control in controls.items()}
            arguments = presets.arguments(values["pattern"])
            for name in PATTERN:
                controls[name].layout.display = None if name in arguments else "none"
            shown.value = "<p>Working ...</p>"
            shown.value = page(values)

    output = widgets.interactive_output(refresh, controls)
    box = widgets.Box([*controls.values()]).add_class("controls")
    whole = widgets.VBox([widgets.HTML(STYLE), box, shown, output])
    return whole.add_class("ringlab-explore")
