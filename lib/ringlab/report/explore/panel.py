"""The explorer itself: controls, what follows from them at once, and Run; ipywidgets is asked for when it is opened."""

from __future__ import annotations

import threading
from html import escape

from ... import hardware, measure, patterns
from ...estimate import estimate, longest
from ..tables import Table, Text
from . import pictures, trial, view
from .choice import DTYPES, KINDS, LAYOUTS, MOST_BLOCKS, PASSES, SCHEMES, Choice

SOUGHT = 8  # ranks on which the longest sequence is sought at most
MARKED = 16  # shards that are marked in the pattern at most
MISSING = "The explorer needs ipywidgets: `python -m pip install -c lib/constraints.txt -e './lib[report,lab]'`"
STYLE = """<style>
.ringlab-explore.jp-RenderedHTMLCommon table { margin: 0 0 .5em; }
.ringlab-explore.jp-RenderedHTMLCommon :is(th, td) { text-align: left; vertical-align: top; max-width: 24em; }
.ringlab-explore.jp-RenderedHTMLCommon tbody th { font-weight: normal; white-space: normal; }
.ringlab-explore.jp-RenderedHTMLCommon .n { text-align: right; }
.ringlab-explore.jp-RenderedHTMLCommon small { display: block; color: var(--jp-ui-font-color2); }
.ringlab-explore.jp-RenderedHTMLCommon .n small { white-space: nowrap; }
.ringlab-explore.jp-RenderedHTMLCommon .caption { font-weight: bold; }
</style>"""
OPTIONS = {
    "kind": tuple(KINDS), "mixing": patterns.MIXINGS, "offsets": patterns.OFFSETS, "dtype": DTYPES, "passes": PASSES,
    "scheme": SCHEMES, "layout": LAYOUTS,
}  # fmt: skip
LABELS = {
    "Pattern": {
        "kind": "pattern", "lengths": "segments", "rates": "dilation rates", "mixing": "mixing",
        "offsets": "offsets by", "block_size": "block size", "window": "window",
        "global_blocks": "global blocks", "random_blocks": "random blocks", "levels": "stride × reach",
        "causal": "causal",
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
    """Controls by name of the field, places by name of what they show; ``results`` holds what was run, oldest first."""

    def __init__(self, widgets, start: Choice):
        self.machine = hardware.detect()
        self.results: list[tuple[Choice, measure.Result]] = []
        self.summary = ""
        self.known: dict[tuple, int | str] = {}  # what was found, by all that it depends on
        self.wanted: tuple | None = None  # what the thread is to find next
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()
        self.controls = {
            name: _control(widgets, name, label, getattr(start, name))
            for group in LABELS.values()
            for name, label in group.items()
        }
        names = ("alert", "pattern", "facts", "memory", "traffic", "bounds", "code", "status", "measured")
        self.places = {name: widgets.HTML() for name in names}
        self.button = widgets.Button(description="Run on this machine", button_style="primary", icon="play")
        self.button.layout.width = "200px"
        columns = [
            widgets.VBox([widgets.HTML(f"<b>{title}</b>"), *(self.controls[n] for n in group)])
            for title, group in LABELS.items()
        ]
        wrap = widgets.Layout(display="flex", flex_flow="row wrap", align_items="flex-start", grid_gap="8px 16px")
        half = widgets.Layout(width="400px")
        left, right = (
            widgets.VBox([self.places[name] for name in some], layout=half)
            for some in (("facts", "memory"), ("bounds", "traffic"))
        )
        at = self.places
        self.box = widgets.VBox([
            widgets.HBox(columns, layout=wrap), at["alert"], at["pattern"], widgets.HBox([left, right], layout=wrap),
            at["code"], widgets.HBox([self.button, at["status"]], layout=wrap), at["measured"],
        ])  # fmt: skip
        self.refresh()
        for control in self.controls.values():
            control.observe(self.refresh, names="value")
        self.button.on_click(self.run)

    @property
    def choice(self) -> Choice:
        return Choice(**{name: control.value for name, control in self.controls.items()})

    def refresh(self, _=None) -> None:
        """Show what follows from the controls, one thing after the other; what cannot be is one line instead."""
        choice, shown, self.wanted = self.choice, set(), None
        self._fit(choice)
        self.button.disabled, said = True, ""
        self.places["alert"].value = pictures.text_html("Working ...")
        try:
            for name, html in self._parts(choice):
                self.places[name].value = html
                shown.add(name)
            self.button.disabled = False
        except Exception as error:  # noqa: BLE001  a control takes any text, and a callback's traceback goes nowhere
            said = pictures.text_html(_line(error), "alert")
        for name in {"pattern", "facts", "memory", "traffic", "bounds", "code"} - shown:
            self.places[name].value = ""
        self.places["alert"].value = said

    def _parts(self, choice: Choice):
        """(place, HTML), the quickest first."""
        call = choice.call
        seen = {name: call[name] for name in ("heads", "kv_heads", "causal")} | {"head": choice.head}
        marked = choice.ranks if choice.layout == "contiguous" and choice.ranks <= MARKED else 1
        yield "pattern", pictures.pattern(choice.pattern, choice.n, choice.start, **seen, shards=marked)
        profile = hardware.get_profile(choice.profile).on(self.machine)
        found = estimate(choice.pattern, **call, profile=profile)
        yield "memory", pictures.memory(found, profile.memory_bytes)
        yield "traffic", pictures.traffic(found)
        yield "bounds", pictures.bounds(found)
        yield "facts", self._facts(choice, found, profile)
        yield "code", f"<details><summary>This call as code</summary><pre>{escape(view.code(choice))}</pre></details>"

    def _facts(self, choice: Choice, found, profile: hardware.Profile) -> str:
        """The facts, where the longest sequence follows from a thread: on many ranks it takes seconds."""
        call = {name: value for name, value in choice.call.items() if name != "seq_len"}
        key = (choice.pattern, profile.name, *call.values())
        with self.lock:
            self.wanted = None if key in self.known else (key, call, choice, found, profile)
            if self.wanted and self.thread is None:
                self.thread = threading.Thread(target=self._seek)
                self.thread.start()
        return self._table(choice, found, profile, self.known.get(key, "..."))

    def _table(self, choice: Choice, found, profile: hardware.Profile, fits: int | str) -> str:
        table = view.facts(choice, found, profile, fits)
        self.summary = table.markdown
        return _html(table)

    def _seek(self) -> None:
        """Find what is wanted, and what has been asked for meanwhile; show what still is."""
        while True:
            with self.lock:
                wanted = self.wanted
                if wanted is None:
                    self.thread = None
                    return
            key, call, choice, found, profile = wanted
            self.known[key] = _longest(choice.pattern, profile, call)
            with self.lock:
                if self.wanted is wanted:
                    self.wanted = None
                    self.places["facts"].value = self._table(choice, found, profile, self.known[key])

    def settle(self) -> None:
        """Wait until all that the controls ask for is shown."""
        if (thread := self.thread) is not None:
            thread.join()

    def _fit(self, choice: Choice) -> None:
        """Show the controls that this choice has."""
        own = {name for names in KINDS.values() for name in names}
        hidden = own - set(KINDS[choice.kind]) | ({"scheme", "layout"} if choice.ranks == 1 else set())
        for name, control in self.controls.items():
            control.layout.display = "none" if name in hidden else None

    def run(self, _=None) -> None:
        """Measure what is chosen, and set it beside the estimate; the kernel is busy meanwhile."""
        self.button.disabled, said = True, ""
        self.places["status"].value = pictures.text_html(
            f"Running: checked against the oracle first, then timed. At most {trial.LIMIT_S:.0f} s; "
            "interrupting the kernel stops it."
        )
        try:
            self.settle()  # or the thread would be timed too
            here = trial.Here.now(self.machine)
            self.results.append((self.choice, trial.run(self.choice, here)))
            self.places["measured"].value = _html(trial.table(self.results, here))
        except KeyboardInterrupt:
            said = pictures.text_html("Stopped.", "alert")
        except Exception as error:  # noqa: BLE001  as above
            said = pictures.text_html(_line(error), "alert")
        self.places["status"].value = said
        self.button.disabled = False

    def _repr_mimebundle_(self, **asked) -> dict:
        """The widgets, and for who shows none the facts as a table."""
        self.settle()
        return {**self.box._repr_mimebundle_(**asked), "text/markdown": self.summary, "text/plain": self.summary}


def _control(widgets, name: str, label: str, value):
    look = {"description": label, "style": {"description_width": "108px"}, "layout": {"width": "256px"}}
    if name == "profile":
        return widgets.Dropdown(options=tuple(hardware.profiles()), value=value, **look)
    if name in OPTIONS:
        return widgets.Dropdown(options=OPTIONS[name], value=value, **look)
    if isinstance(value, bool):
        return widgets.Checkbox(value=value, indent=True, **look)
    kind = widgets.IntText if isinstance(value, int) else widgets.Text
    return kind(value=value, continuous_update=False, **look)


def _longest(pattern, profile: hardware.Profile, call: dict) -> int | str:
    if not profile.memory_bytes:
        return "the profile names no memory"
    if call.get("ranks", 1) > SOUGHT:
        return f"not sought on more than {SOUGHT} ranks: estimate.longest tells in minutes"
    try:
        if isinstance(pattern, patterns.BlockSparse):  # a mask of many more blocks would fill this machine's memory
            most = MOST_BLOCKS * pattern.block_size
            if estimate(pattern, seq_len=most, **call, profile=profile).peak_bytes <= profile.memory_bytes:
                return f"more than {most:,}, beyond which blocks are not counted here"
        return longest(pattern, profile.memory_bytes, **call, profile=profile)
    except (ValueError, NotImplementedError) as error:
        return _line(error)


def _html(table: Table) -> str:
    """A table in JupyterLab's own style, but that names stand left and numbers right."""
    return f'<div class="jp-RenderedHTMLCommon ringlab-explore">{STYLE}{table.html}</div>'


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
