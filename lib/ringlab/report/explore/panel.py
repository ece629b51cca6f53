"""The explorer: controls, and what follows from them at once. It needs ipywidgets; ``overview`` does not."""

from __future__ import annotations

import base64
from html import escape

from ... import cost, hardware, measure, patterns, ring
from ..tables import Table, Text
from . import view
from .view import KINDS, PRESETS, Choice

MISSING = "The explorer needs ipywidgets: `python -m pip install -c lib/constraints.txt -e './lib[report,lab]'`"
STYLE = """<style>
.ringlab-explore.jp-RenderedHTMLCommon :is(th, td) { text-align: left; vertical-align: top; font-weight: normal; }
.ringlab-explore.jp-RenderedHTMLCommon .n { text-align: right; }
.ringlab-explore.jp-RenderedHTMLCommon small { display: block; color: var(--jp-ui-font-color2); }
</style>"""
OPTIONS = {
    "kind": tuple(KINDS), "mixing": patterns.MIXINGS, "offsets": patterns.OFFSETS, "passes": tuple(cost.PASSES),
    "dtype": ("float32", "bfloat16", "float16", "float64"), "ranks": (1, 2, 4, 8), "scheme": ("auto", *ring.SCHEMES),
    "layout": ("contiguous", "zigzag", "striped"), "profile": tuple(hardware.profiles()),
}  # fmt: skip
LABELS = {
    "Pattern": {
        "kind": "pattern", "lengths": "segments", "rates": "dilation rates", "mixing": "mixing",
        "offsets": "offsets by", "block_size": "block size", "window": "window",
        "global_blocks": "global blocks", "random_blocks": "random blocks", "causal": "causal",
    },
    "Tensors": {
        "seq_len": "length n", "batch": "batch", "heads": "heads", "kv_heads": "K/V heads",
        "head_dim": "head_dim", "dtype": "dtype", "passes": "passes",
    },
    "Hardware and view": {
        "profile": "hardware", "ranks": "ranks", "scheme": "scheme", "layout": "layout",
        "head": "head drawn", "at": "from position",
    },
}  # fmt: skip
CUSTOM = "choose a preset"
LENGTHS = [f"{1 << i}K" for i in range(11)]  # 1K to 1M
SHOWN = ("seen", "facts", "traffic", "memory", "code", "compared", "over_length")


def overview(profile: str = "auto", **start) -> Table:
    """Show the figure over length and return the table of variants, for those who see no widgets."""
    from IPython.display import display

    choice = Choice(profile=hardware.resolve(profile).name, **start)
    figure = view.over_length(choice)
    about = {"image/png": {"alt": figure.alt, "width": 500}}
    display({"image/png": base64.b64encode(figure.png).decode(), "text/plain": figure.alt}, metadata=about, raw=True)
    return view.compared(choice)


def explorer(profile: str = "auto", **start):
    """The explorer for JupyterLab, on a hardware profile and with other fields of ``Choice`` to start from.

    Without ipywidgets it is one line that says what to install. Raises UnknownProfile for a name that is none.
    """
    try:
        import ipywidgets
    except ModuleNotFoundError:
        return Text([MISSING])
    return Panel(ipywidgets, Choice(profile=hardware.resolve(profile).name, **start))


class Panel:
    """Controls by the field of ``Choice`` that they set, and places by what they show. ``results`` holds what was run,
    the oldest first."""

    def __init__(self, widgets, start: Choice):
        self.results: list[tuple[Choice, measure.Result]] = []
        self.controls = {
            name: _control(widgets, name, label, getattr(start, name))
            for group in LABELS.values()
            for name, label in group.items()
        }
        self.places = {name: widgets.HTML() for name in ("alert", *SHOWN, "advice", "status", "measured")}
        at = self.places
        self.preset = widgets.Dropdown(options=(CUSTOM, *PRESETS), description="preset")
        length = start.seq_len if start.seq_len in LENGTHS else "8K"
        look = {"description": "length", "continuous_update": False, "layout": {"width": "500px"}}
        self.slider = widgets.SelectionSlider(options=LENGTHS, value=length, **look)
        self.run_button = widgets.Button(description="Run on this machine", button_style="primary", icon="play")
        self.advise_button = widgets.Button(description="Advise me", icon="lightbulb-o")
        wrap = widgets.Layout(display="flex", flex_flow="row wrap", align_items="flex-start", grid_gap="8px 16px")
        columns = [
            widgets.VBox([widgets.HTML(f"<b>{title}</b>"), *(self.controls[n] for n in group)])
            for title, group in LABELS.items()
        ]
        right = widgets.VBox([at["memory"], at["traffic"]])
        one = widgets.VBox([at["seen"], widgets.HBox([at["facts"], right], layout=wrap), at["code"]])
        two = widgets.VBox([self.slider, at["compared"], at["over_length"]])
        self.tabs = widgets.Tab(children=[one, two], titles=("One call", "Compare"))
        buttons = widgets.HBox([self.advise_button, self.run_button, at["status"]], layout=wrap)
        self.box = widgets.VBox([
            self.preset, widgets.HBox(columns, layout=wrap), at["alert"], self.tabs, buttons, at["advice"],
            at["measured"],
        ])  # fmt: skip
        self.held = False
        self.refresh()
        for control in self.controls.values():
            control.observe(self.refresh, names="value")
        self.slider.observe(lambda change: self.set(seq_len=change.new), names="value")
        self.preset.observe(self.choose, names="value")
        self.tabs.observe(self.refresh, names="selected_index")
        self.run_button.on_click(self.run)
        self.advise_button.on_click(self.advise)

    @property
    def choice(self) -> Choice:
        return Choice(**{name: control.value for name, control in self.controls.items()})

    def choose(self, change) -> None:
        """Set all controls as a preset says, the hardware only where it does."""
        if change.new != CUSTOM:
            self.set(**vars(Choice(profile=self.choice.profile)) | PRESETS[change.new])

    def set(self, **fields) -> None:
        """Give several controls a value, and show what follows once."""
        self.held = True
        for name, value in fields.items():
            self.controls[name].value = value
        self.held = False
        self.refresh()

    def refresh(self, _=None) -> None:
        """Show what follows from the controls in the open tab; what cannot be is one line instead."""
        if self.held:
            return
        choice, shown = self.choice, {}
        self._hide(choice)
        self.places["alert"].value = view.line("Working ...")
        try:
            shown = self._compare(choice) if self.tabs.selected_index else self._one_call(choice)
        except Exception as error:  # noqa: BLE001  a control takes any text, and a callback's traceback goes nowhere
            shown["alert"] = _alert(error)
        for name in ("alert", "advice", *SHOWN):
            self.places[name].value = shown.get(name, "")
        self.run_button.disabled = self.advise_button.disabled = "alert" in shown

    def _one_call(self, choice: Choice) -> dict[str, str]:
        found = choice.estimate()
        code = _folded("This call as code", view.code(choice))
        return {"facts": _html(view.facts(choice, found)), "seen": view.seen(choice), "memory": view.memory(found),
                "traffic": view.traffic(found), "code": code}  # fmt: skip

    def _compare(self, choice: Choice) -> dict[str, str]:
        figure = view.over_length(choice)
        drawn = view.image(figure.png, figure.alt, figure.caption)
        return {"compared": _html(view.compared(choice)), "over_length": drawn}

    def _hide(self, choice: Choice) -> None:
        """Show the controls that this choice has."""
        own = {name for names in KINDS.values() for name in names}
        hidden = own - set(KINDS[choice.kind]) | ({"scheme", "layout"} if choice.ranks == 1 else set())
        for name, control in self.controls.items():
            control.layout.display = "none" if name in hidden else None

    def advise(self, _=None) -> None:
        """Show what to use for the length, shape, hardware and number of ranks, with code."""
        try:
            advice = view.advised(self.choice)
            html = f"<pre>{escape(advice.text())}</pre>{_folded('Advised call as code', advice.code())}"
        except Exception as error:  # noqa: BLE001  as above
            html = _alert(error)
        self.places["advice"].value = html

    def run(self, _=None) -> None:
        """Measure the call, and show it beside the estimate; the kernel is busy meanwhile."""
        self.run_button.disabled, said = True, ""
        self.places["status"].value = view.line(
            f"Running: checked against the reference, then timed. At most {view.LIMIT_S:.0f} s; interrupting the "
            "kernel stops it."
        )
        try:
            self.results.append((self.choice, view.run(self.choice, view.here())))
            self.places["measured"].value = _html(view.measured(self.results, view.here()))
        except KeyboardInterrupt:
            said = view.line("Stopped.", "alert")
        except Exception as error:  # noqa: BLE001  as above
            said = _alert(error)
        self.places["status"].value = said
        self.run_button.disabled = False

    def _repr_mimebundle_(self, **asked) -> dict:
        """The widgets, and for who shows none the variants as a table."""
        table = view.compared(self.choice).markdown
        return {**self.box._repr_mimebundle_(**asked), "text/markdown": table, "text/plain": table}


def _control(widgets, name: str, label: str, value):
    look = {"description": label, "style": {"description_width": "108px"}, "layout": {"width": "256px"}}
    if name in OPTIONS:
        return widgets.Dropdown(options=OPTIONS[name], value=value, **look)
    if isinstance(value, bool):
        return widgets.Checkbox(value=value, indent=True, **look)
    kind = widgets.IntText if isinstance(value, int) else widgets.Text
    return kind(value=value, continuous_update=False, **look)


def _html(table: Table) -> str:
    """A table in JupyterLab's own style, but that names stand left and numbers right."""
    return f'<div class="jp-RenderedHTMLCommon ringlab-explore">{STYLE}{table.html}</div>'


def _folded(title: str, code: str) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(code)}</pre></details>"


def _alert(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return view.line(text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}", "alert")
