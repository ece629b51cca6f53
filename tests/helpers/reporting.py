"""Shared by the tests of reports: made-up rows of suites as a CPU or a GPU would give
them, changes of rows, pages.
"""

import ast
import atexit
import functools
import hashlib
import random
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from ringlab import hardware, patterns, report
from ringlab.measure import Group, Point, stats, suites, validity
from ringlab.measure.points import Result
from ringlab.measure.store import Store, result_row
from ringlab.report import claims, figures, predicted, render, tables
from ringlab.report.places import RunTarget
from ringlab.report.published import DOCUMENTS, published
from ringlab.report.study import Study
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "optimization_results.ipynb"
CPU = hardware.Machine(
    cpu_model="a CPU", cores=2, ram_bytes=16 * 2**30, torch="2.13.0+cpu"
)
GOOD = dict(
    system="ringlab",
    pattern=patterns.Dilated([4, 8], [1, 2]),
    seq_len=64,
    heads=2,
    head_dim=8,
)
CALLS = {
    suites.ORIGINAL: (2318, 1281),
    suites.OPTIMIZED: (2069, 1200),
    "ringlab": (174, 122),
}
CORES = 2
MEMORY = 4 << 30  # few tokens, so that the longest sequences that fit are soon found


def made_up(
    point: Point, group: Group, computed: bool = False, rounds: int = 10, **changes
) -> Result:
    """An ok Result with plausible samples, or one as it is computed, without any."""
    where = {
        "device": "cpu",
        "device_name": "a CPU",
        "device_memory_bytes": None if computed else MEMORY,
        "commit": "0" * 40,
    }
    where |= {
        "dirty": False,
        "torch": "2.13.0+cpu",
        "machine": "made up",
        "interleaved": group.interleave,
    }
    work = point.call().cost()
    slow = 1.6 if dict(point.options).get("gather") else 1.0
    slow *= 1.1 if point.system == "copying" else 1.0
    slow *= 1.3 if point.dtype == "float16" else 1.0
    t, floor, cost = slow * work.flops / 1.0e11 + 2e-4, work.floor_bytes, asdict(work)
    noise = random.Random(point.id)
    taken = (
        tuple(t * (1 + 0.02 * noise.random()) for _ in range(rounds))
        if group.timed and not computed
        else ()
    )
    names = ["out", "lse"] + (["dq", "dk", "dv"] if point.passes != "fwd" else [])
    made = Result(
        point=point,
        group=group.name,
        status="ok",
        provenance=where,
        composition=group.composition(point),
        run=hashlib.sha256(group.name.encode()).hexdigest()[:12],
        errors=dict.fromkeys(names, 4e-7),
        tolerance=dict.fromkeys(names, 5e-6),
        memory={"floor_bytes": floor, "tracked_peak_bytes": int(1.12 * floor)},
        cost=cost,
        bound_seconds=0.6 * t,
    )
    if computed:
        made = replace(made, status="computed", errors={}, tolerance={})
    return replace(sampled(made, taken) if taken else made, **changes)


def sampled(r: Result, seconds, **changes) -> Result:
    """The row with these samples, and what follows from them."""
    found, about = (
        stats.summary(tuple(seconds)),
        {"seconds": tuple(seconds), "rounds": tuple(range(len(seconds)))},
    )
    return replace(
        r, **about | {k: getattr(found, k) for k in ("median", "ci")} | changes
    )


def longer(r: Result, factor: float, **changes) -> Result:
    """The row with all of its times ``factor`` times as long; one without times as it
    is.
    """
    if not r.seconds:
        return r
    seconds, ci = (tuple(x * factor for x in getattr(r, k)) for k in ("seconds", "ci"))
    scaled = {"median": r.median * factor, "seconds": seconds, "ci": ci}
    return replace(r, **scaled | changes)


def write_rows(folder: Path, results) -> None:
    with Store(folder) as store:
        for r in results:
            for i, s in enumerate(r.seconds):
                about = {"run": r.run, "point": r.point.id}
                store.append(kind="sample", **about, round=i, seconds=s, loops=1)
            store.append(
                run=r.run, **{k: v for k, v in result_row(r).items() if k != "run"}
            )


def document_row(point: Point, group: Group, computed: bool, device: str) -> Result:
    """A row of document 000 as a CPU or, with every kernel, a GPU would give it."""
    options = dict(point.options)
    backend = options.pop("backend", "auto")
    row = made_up(point.but(options=options), group, computed)
    row = replace(row, point=point, provenance=row.provenance | {"device": device})
    if device == "cpu" and backend not in ("auto", "eager", "compiled", "cpu_flash"):
        reason = f"backend '{backend}' cannot run on cpu in torch.float32: {backend}: needs a CUDA device, this is cpu"
        return replace(
            row,
            status="unsupported",
            reason=reason,
            errors={},
            seconds=(),
            median=None,
            ci=None,
        )
    if point.system == "plan_build":
        row = replace(
            row, memory={"floor_bytes": 0, "tracked_peak_bytes": 0}, bound_seconds=None
        )
    return longer(row, 2) if backend == "eager" else row


def rank_row(point: Point, group: Group, computed: bool, device: str) -> Result:
    """Ranks divide work and memory, the ring holds two shards more, the all-gather all
    of them.
    """
    p = point.world_size
    row = made_up(point.but(world_size=1, options={}), group, computed)
    shard = row.memory["floor_bytes"] // p
    kept = {"RingDilatedAttentionV2Collective": p - 1, "ringlab": 0.2}.get(
        point.system, 1 if p > 1 else 0
    )
    memory = {
        "floor_bytes": shard,
        "tracked_peak_bytes": int(shard * (1.1 + 0.5 * kept * (p > 1))),
    }
    about = {}
    if group.ranks > 1:
        sent = [
            0
            if p == 1
            else int(shard * (0.1 if point.system == "ringlab" else 0.5 * (p - 1)))
        ] * p
        about |= {
            "threads": 1,
            "oversubscribed": p > CORES,
            "bytes_sent": sent,
            "planned": sent,
            "messages": [2] * p,
        }
    row = replace(
        row,
        point=point,
        memory=memory,
        ranks=about,
        provenance=row.provenance | {"device": device},
    )
    if not row.seconds or about.get("oversubscribed"):
        return replace(
            row, seconds=(), rounds=(), median=None, ci=None, bound_seconds=None
        )
    return longer(row, 1 / p, bound_seconds=row.bound_seconds / p)


def session_row(point: Point, group: Group, computed: bool, device: str) -> Result:
    """Row by row is slow, building is quick, and dense attention takes its pairs' time."""
    row = made_up(point.but(options={}), group, computed)
    options = dict(point.options)
    way = options.get(
        "blocks",
        {suites.ORIGINAL: "rows", suites.OPTIMIZED: "batched"}.get(point.system),
    )
    slow = {"rows": 2.2, "batched": 2.1}.get(way, 1.0) * (
        1.05 if options.get("cache") is False else 1.0
    )
    slow *= {suites.TORCH_SPARSE: 6.0, "flex": 1.3}.get(point.system, 1.0)
    if point.system == "plan_build":
        slow = (1e-5 if options["warm"] else 5e-3) / row.median
    calls, views = CALLS.get(point.system, (12, 8))
    memory = row.memory | {"operator_calls": calls, "view_calls": views}
    alone = {"bound_seconds": None, "cost": {}} if point.system == "plan_build" else {}
    row = longer(row, slow, **alone)
    return replace(
        row, point=point, memory=memory, provenance=row.provenance | {"device": device}
    )


ROWS = {"000": document_row, "002": session_row}  # of the other documents rank_row


def made(
    number: str, profile: str = "cpu", computed: bool = False
) -> tuple[Result, ...]:
    """Rows of a document's suite, as a profile's own device would give them: the same
    objects for each call.
    """
    return _made(number, profile, computed)


@functools.cache
def _made(number: str, profile: str, computed: bool) -> tuple[Result, ...]:
    about, row = hardware.get_profile(profile), ROWS.get(number, rank_row)
    few = row is rank_row and not computed
    suite = suites.SUITES[DOCUMENTS[number].suite]
    groups = suite(hardware.get_profile("cpu") if few else about)
    if computed and row is rank_row:  # which takes less than a second
        return tuple(predicted.rows_of(about, groups))
    if computed:
        return tuple(made_up(p, g, True) for g in groups for p in g.points)
    return tuple(row(p, g, False, about.kind) for g in groups for p in g.points)


@functools.cache
def code_of(name: str) -> list[tuple[str, object, object]]:
    """(tag, statements, last expression or None) of each code cell of a notebook."""
    found = []
    for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells:
        if cell.cell_type == "code":
            tree, last = ast.parse(cell.source), None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = compile(ast.Expression(tree.body.pop().value), name, "eval")
            tag = "".join(cell.metadata.get("tags", ()))
            found.append((tag, compile(tree, name, "exec"), last))
    return found


class Shown:
    """All that a page shows of a study: displayed values as Markdown, figures by what
    is drawn and said.

    The cells of the notebook ``name`` are run in this process, with other
    ``parameters`` if given; ``points`` is what its cell of points shows, ``names`` what
    the cells define. Nothing is measured: it gets the rows of ``page``, and of
    ``beside`` for what it asks for next.
    """

    def __init__(self, name: str, page: Study, *beside: Study, **parameters):
        self.tables, self.texts, self.labels, self.drawn = [], [], [], []
        self.panels = []
        here = RunTarget(page.profile, page.folder, "as asked", page.computed)
        pages = iter((page, *beside))

        def source(*asked):
            self.asked = asked
            return here

        fakes = {
            "source": source,
            "measured": lambda *_: next(pages, page),
            "lines": self._draw_lines,
            "show": self._show,
        }
        self.names: dict = {"__name__": name}
        with pytest.MonkeyPatch.context() as patch:
            for known, fake in fakes.items():
                patch.setattr(report, known, fake, raising=False)
            # It draws the whole figure each time.
            patch.setattr("seaborn.heatmap", lambda *_, **__: None)
            for tag, statements, last in code_of(name):
                exec(statements, self.names)
                value = last and eval(last, self.names)
                if tag == "parameters":
                    self.names |= {"profile": page.profile.name} | parameters
                elif tag == "points":
                    self.points = value
                elif tag != render.MEASURED or not page.computed:
                    self._keep(value)
        self.text = "\n".join(self.texts)

    def table(self, words: str):
        """The table whose caption has these words."""
        return next(t for t in self.tables if words in t.caption)

    def _keep(self, value) -> None:
        if value is not None:
            self.texts.append(value._repr_mimebundle_()["text/markdown"])
            if isinstance(value, tables.Table):
                self.tables.append(value)

    def _draw_lines(self, each, *, colors=(), by="variant", **_) -> None:
        self.panels += each
        for series in each.values():
            if isinstance(series, dict):
                points = [p for found in series.values() for p in found]
                self.labels.append([*series])
                self.drawn += [y for _, y, *_ in points if y is not None]
            else:
                self.labels.append([x for x in colors if x in {*series[by]}])
                self.drawn += series.y.dropna().tolist()

    def _show(self, fig, name, caption, alt, data=None):
        assert alt.strip() and caption.strip()
        self.texts += [caption, alt]
        self._keep(data)
        if fig is not None:
            figures.plt.close(fig)


def study_of(
    results, profile: str = "cpu", computed: bool = False, suite: str = ""
) -> Study:
    about, folder = hardware.get_profile(profile), Path(profile, "data")
    groups = suites.SUITES.get(suite, suites.every_group)(about)
    return Study(about, list(results), folder, groups=groups, computed=computed)


@functools.cache
def page(
    number: str, change=None, profile: str = "cpu", computed: bool = False
) -> Study:
    """What a document's page is made from: its made-up rows, each after a change."""
    results = made(number, profile, computed)
    return study_of(
        map(change, results) if change else results,
        profile,
        computed,
        DOCUMENTS[number].suite,
    )


@functools.cache
def shown(
    number: str, change=None, profile: str = "cpu", computed: bool = False
) -> Shown:
    """All that a document's page shows."""
    about = page(number, change, profile, computed)
    return Shown(DOCUMENTS[number].report, about)


# What may not be quoted: rows with numbers that nothing else has, and a flaw
BAD = {
    "incorrect": {"status": "incorrect", "reason": "out is off"},
    "unchecked": {"errors": {}, "tolerance": {}},
    "wrong": {"errors": {"out": 0.1}},
    "without a bound": {"tolerance": {}},
    "too fast": {"bound_seconds": 1.0},
    "too small": {"memory": {"floor_bytes": 2**30, "tracked_peak_bytes": 123}},
    "no time": {"median": 0.0},
}
FAST = 0.000797123  # seconds; 0.797 ms, 797 us
LEAN = {"floor_bytes": 2**30, "tracked_peak_bytes": int(4.321 * 2**30)}
LEAN |= {"operator_calls": 98765, "view_calls": 0}
SENT = [987654321]
MARKS = ("0.797", "4.32", "5.43", "4,640", "98,765", "942 MiB")


def spoiled(r, kind: str):
    """The row with numbers that nothing else has, and a flaw for which none of them may
    be quoted.
    """
    if r.status != "ok" or (not r.seconds and kind in ("too fast", "no time")):
        return r
    times = {"median": FAST} | {"seconds": (FAST,) * 10, "ci": (FAST, FAST)}
    sent = {"ranks": r.ranks | {"bytes_sent": SENT}} if r.ranks else {}
    return replace(
        r, **{**(times if r.seconds else {}), "memory": LEAN, **sent, **BAD[kind]}
    )


def spoiling(number: str, kinds, every: int = 1, first: int = 0):
    """A change that spoils one in ``every`` rows of a document, by these kinds in turn."""
    order = {id(r): i for i, r in enumerate(made(number))}
    return lambda r: (
        spoiled(r, kinds[order[id(r)] % len(kinds)])
        if order[id(r)] % every == first
        else r
    )


def shows_no_marks(number: str, change):
    """What the page shows but for its lists of reasons, which say how fast is too fast."""
    found, about = shown(number, change), page(number, change)
    marked = [r for r in about.results if r.median == FAST or r.memory == LEAN]
    assert (
        len(marked) > 10
        and all(map(validity.why_not_quotable, marked))
        and len(about.failed) >= len(marked)
    )
    said = [x for x in found.texts if "rows are not shown" not in x]
    assert not [m for m in MARKS if m in "".join(said)]
    assert not [v for v in found.drawn if v in (FAST, FAST * 1e3) or 4.3 < v < 4.33]
    return found


def words(study: Study, number: str) -> dict[str, str]:
    """The verdict on each claim of a document that rows decide, by these rows."""
    return {
        claim["key"]: claims.verdict(study, claim).word
        for claim in published(number)["claims"]
        if "rows" in claim
    }


def on_ranks(result: Result, ranks: int, gain: float, **options) -> Result:
    point = result.point.but(
        world_size=ranks, options=dict(result.point.options) | options
    )
    return replace(longer(result, 1 / gain), point=point, bound_seconds=None)


def lean(r: Result, factor: float) -> Result:
    return replace(
        r,
        memory=r.memory
        | {"tracked_peak_bytes": int(r.memory["tracked_peak_bytes"] * factor)},
    )


def slower(factor: float, *tests):
    """A change of rows: those that pass all ``tests`` take ``factor`` times as long."""
    return lambda r: (
        longer(r, factor, bound_seconds=None) if all(test(r) for test in tests) else r
    )


def system(name: str):
    return lambda r: r.point.system == name


def way(name: str, **more):
    return lambda r: (
        r.group == suites.JOURNEY
        and r.point.system == "ringlab"
        and (dict(r.point.options) == {"blocks": name, **more})
    )


def run_in_this_process(source, target, parameters, names=None, **_):
    """The notebook's cells without a kernel: quicker, and what they show is the same.

    ``names``: a dictionary to which what the cells define is added.
    """
    nb = nbformat.read(source, as_version=4)
    shell = InteractiveShell.instance(
        config=Config({"HistoryManager": {"enabled": False}})
    )
    for cell in (c for c in nb.cells if c.cell_type == "code"):
        with capture_output() as said:
            done = shell.run_cell(cell.source)
        done.raise_error()
        shown = [(o.data, o.metadata or {}) for o in said.outputs]
        shown += (
            [(done.result._repr_mimebundle_(), {})]
            if hasattr(done.result, "_repr_mimebundle_")
            else []
        )
        cell.outputs = [
            nbformat.v4.new_output("display_data", data=d, metadata=m) for d, m in shown
        ]
        if "parameters" in cell.metadata.get("tags", ()):
            shell.push(parameters)
    if names is not None:
        names.update(shell.user_ns)
    InteractiveShell.clear_instance()
    atexit.unregister(shell.atexit_operations)  # a quarter of a second each
    return nb


def two_points(profile=None):
    return [
        Group(
            "pair",
            (
                Point(**GOOD),
                Point(**{**GOOD, "system": "dense_sdpa", "pattern": patterns.Dense()}),
            ),
        )
    ]


def write_two_rows(reports: Path, profile: str = "cpu", **changes) -> None:
    """Made-up rows of the two points in ``reports/<profile>/data``."""
    rows = [made_up(p, g, **changes) for g in two_points() for p in g.points]
    write_rows(reports / profile / "data", rows)


FIGURE = """
import pandas
from ringlab.report import figures, tables
frame = pandas.DataFrame({"variant": ["a"], "seq_len": [8], "y": [VALUE]})
fig = figures.lines({"Time": frame}, xlabel="x", colors={"a": "#000000"})
figures.show(fig, "NAME", "A caption.", "Alt text.", tables.Table("data", ["a"], [["value VALUE"]]))
"""


def figure(value: int, name: str = "one") -> str:
    """The text of a cell."""
    return FIGURE.replace("VALUE", str(value)).replace("NAME", name)


def notebook(path: Path, *cells: str) -> Path:
    """A notebook with the parameters of a report and these code cells, saved with a
    kernel that is not there.
    """
    elsewhere = {"name": "conda-env", "display_name": "x", "language": "python"}
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": elsewhere})
    parameters = nbformat.v4.new_code_cell(
        'profile: str = "cpu"\ndata: str = ""', metadata={"tags": ["parameters"]}
    )
    nb.cells = [nbformat.v4.new_markdown_cell("# A title\n\n## A section"), parameters]
    nb.cells += [nbformat.v4.new_code_cell(textwrap.dedent(c)) for c in cells]
    for i, cell in enumerate(nb.cells):
        cell.id = f"cell-{i}"
    nbformat.write(nb, path)
    return path
