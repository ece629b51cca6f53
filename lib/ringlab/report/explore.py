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
from ..checks import FLOATS, parse_count, parse_counts
from ..estimate import MOST_BYTES, SHAPE, estimate_call, longest
from . import theme
from .evidence import advised
from .figures import Figure, drawing
from .templates import lines_of

NEAR = 64  # positions that are drawn one by one

# Controls to choose from; into the others a number or a text is typed.
CHOICES = {
    "show": ("one call", "advice"),
    "profile": hardware.profiles(),
    "pattern": presets.NAMED,
    "mixing": patterns.MIXINGS,
    "offsets": patterns.OFFSETS,
    "causal": (False, True),
    "passes": cost.PASSES,
    "dtype": FLOATS,
    "scheme": ("auto", *ring.SCHEMES),
    "layout": ("contiguous", "zigzag", "striped"),
}
LISTS = {"segment_lengths": "2048, 4096", "dilation_rates": "1, 2"}
# Arguments of the function that makes the pattern, and those of the call.
PATTERN = presets.DEFAULTS | LISTS | {"mixing": "lse", "offsets": "head"}
CALL = (*SHAPE, "dtype", "scheme", "layout")


def values_of(profile: str, seq_len: int | str, ranks: int) -> dict:
    """Return the values of all controls to start from; UnknownProfile for a name that
    is none.
    """
    return {
        "show": "one call",
        "profile": hardware.resolve(profile).name,
        "seq_len": str(seq_len),
        "pattern": "ladder",
        **PATTERN,
        **{x: getattr(CallSpec, x) for x in CALL},
        "kv_heads": CallSpec.heads,
        "ranks": ranks,
        "head": 0,
        "position": 0,
    }


def call_of(values: dict) -> CallSpec:
    """Return the call that the values of the controls name; ValueError for one that
    cannot be.

    >>> str(call_of(values_of("cpu", "16K", ranks=1)).pattern)
    'dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 8]'
    """
    name = values["pattern"]
    seq_len = parse_count(values["seq_len"], "seq_len")
    options = {
        x: parse_counts(values[x], f"each of {x}") if x in LISTS else values[x]
        for x in presets.arguments(name)
        if x in PATTERN
    }
    pattern = presets.named(name, seq_len, values["heads"], **options)
    profile = hardware.get_profile(values["profile"]).on(hardware.detect())
    return CallSpec(pattern, seq_len, profile=profile, **{x: values[x] for x in CALL})


# --------------------------------------------------------------------------------------
# one call


def estimated(call: CallSpec) -> str:
    """Return the estimate of a call as ``ringlab estimate`` prints it, with the longest
    sequence that fits; not on several ranks, where that takes seconds to find. Raises
    ValueError where none fits.
    """
    memory = call.profile.memory_bytes
    most = None
    if memory and call.ranks == 1:
        most = longest(call.pattern, memory, **call.options(*SHAPE, "dtype", "profile"))
    about = {"e": estimate_call(call), "budget": memory, "most": most}
    return "\n".join(lines_of("estimate", **vars(call), **about))


def seen(call: CallSpec, head: int, position: int) -> str:
    """Return which keys one head sees, as an image in HTML: of the whole sequence by
    samples, and of the positions from ``position`` on one by one. Raises ValueError for
    no such head.
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
    with drawing(**{"image.cmap": "Blues"}):
        fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
        left.imshow(shades, vmin=0, extent=(0, n, n, 0))
        left.set(title="The whole sequence, sampled", xlabel="key", ylabel="query")
        left.locator_params(nbins=5)
        image = right.imshow(near.numpy(), vmin=0, extent=(first, end, end, first))
        right.set(title=f"From position {first:,} on", xlabel="key")
        fig.colorbar(image, shrink=0.5, label="times counted")
        svg = Figure.of(fig, "seen", caption, alt).svg
    return f"<figure>{theme.inline(svg, alt)}<figcaption>{escape(caption)}</figcaption></figure>"


# --------------------------------------------------------------------------------------
# the page and its controls


MISSING = "The explorer needs ipywidgets: `python -m pip install -c lib/constraints.txt -e './lib[report,lab]'`"
# Figures have the colours of JupyterLab's theme.
STYLE = f"""<style>
.ringlab-explore .widget-interact {{ display: grid; grid-template-columns: repeat(auto-fill, 310px); }}
.ringlab-explore .widget-label {{ width: 108px; }}
.ringlab-explore figure {{ margin: 0; }}
.ringlab-explore svg {{ max-width: 100%; height: auto; {theme.LIGHT} }}
[data-jp-theme-light=false] .ringlab-explore svg {{ {theme.DARK} }}
</style>"""


def page(values: dict) -> str:
    """Return the view that the controls choose, as HTML; what cannot be is one line
    instead, which a screen reader reads out at once.
    """
    try:
        call = call_of(values)
        about = call.options("profile", "seq_len", *SHAPE)
        if values["show"] == "advice":
            advice = advised(**about)
            return f"<pre>{escape(str(advice))}</pre>"
        # What the memory does not hold is shown too: the estimate says so.
        own = call.options("pattern", "dtype") | {"memory_bytes": MOST_BYTES}
        code = advise(**about, **own, estimates=False).code()
        return (
            f"{seen(call, values['head'], values['position'])}"
            f"<pre>{escape(estimated(call))}</pre>"
            f"<details><summary>This call as code</summary><pre>{escape(code)}</pre></details>"
        )
    except (ValueError, RuntimeError) as error:
        return f'<p role="alert" style="color:{theme.RED}">{escape(str(error))}</p>'


def explorer(profile: str, seq_len: int | str, ranks: int):
    """Return the explorer for JupyterLab, on a hardware profile, with a length and a
    number of ranks to start from.

    Without ipywidgets show the advice to start from, and what to install. Raises
    UnknownProfile for a name that is none.
    """
    start = values_of(profile, seq_len, ranks)
    try:
        import ipywidgets as widgets
    except ModuleNotFoundError:
        from IPython.display import HTML, display

        display(HTML(f"{page(start | {'show': 'advice'})}<p>{MISSING}</p>"))
        return None
    controls = {}
    for name, value in start.items():
        if name in CHOICES:
            control = widgets.Dropdown(options=[*CHOICES[name]])
        elif isinstance(value, int):
            control = widgets.IntText()
        else:
            control = widgets.Text(continuous_update=False)
        control.value = value
        controls[name] = control
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

    box = widgets.interactive(refresh, **controls)
    whole = widgets.VBox([widgets.HTML(STYLE), box, shown])
    return whole.add_class("ringlab-explore")
