"""Reports: the real driver on small profiles, with rows made up so that nothing has to be timed."""

import functools
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from ringlab import hardware, measure, patterns
from ringlab.measure import Group, Point, provenance, stats, suites
from ringlab.measure.points import Result
from ringlab.measure.store import Store, result_row
from ringlab.report import claims, computed, driver, execute, figures, index, places, render, rows, study, tables
from ringlab.report import optimization as document

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "optimization_results.ipynb"
CPU = hardware.Machine(cpu_model="a CPU", cores=2, ram_bytes=16 * 2**30, torch="2.13.0+cpu")
PASCAL = hardware.Gpu("NVIDIA GeForce GTX 1080", (6, 1), 8_510_000_000, driver="580.65")


def seconds_of(point: Point) -> float:
    """A plausible time, so that pages made from it look like real ones."""
    from ringlab.report.study import cost_of

    if point.system == "sgemm":
        return 2 * point.seq_len**3 / 1.2e11
    work = cost_of(point).flops / 1.0e11
    s = dict(point.options)
    slow = 1.6 if s.get("gather") else 1.0
    slow *= 2.4 if s.get("backend") == "eager" else 1.0
    slow *= 1.1 if point.system == "copying" else 1.0
    return work * slow * (1.3 if point.dtype == "float16" else 1.0) + 2e-4


def made_up(point: Point, group: Group, rehearsal: bool, rounds: int = 10, **changes) -> Result:
    """An ok Result with samples; kernels that need a GPU are refused as the real ones are."""
    where = {"device": "cpu", "device_name": "a CPU", "device_memory_bytes": 16 * 2**30, "commit": "0" * 40}
    where |= {"dirty": False, "torch": "2.13.0+cpu", "machine": "made up", "interleaved": group.interleave}
    base = {"point": point, "group": group.name, "rehearsal": rehearsal, "provenance": where}
    base |= {"composition": group.composition(point), "run": hashlib.sha256(group.name.encode()).hexdigest()[:12]}
    backend = dict(point.options).get("backend", "auto")
    if backend not in ("auto", "eager", "cpu_flash"):
        return Result(**base, status="unsupported", reason=f"backend {backend!r} cannot run on cpu: needs CUDA")
    noise = random.Random(point.id)
    t = seconds_of(point)
    taken = tuple(t * (1 + 0.02 * noise.random()) for _ in range(rounds)) if group.timed else ()
    found = stats.summary(taken) if taken else None
    floor = 12 * point.seq_len**2 if point.system == "sgemm" else study.cost_of(point).floor_bytes
    names = ["out", "lse"] + (["dq", "dk", "dv"] if point.passes != "fwd" else [])
    fields = {
        "status": "ok", "seconds": taken, "errors": dict.fromkeys(names, 4e-7), "tolerance": dict.fromkeys(names, 5e-6),
        "memory": {"floor_bytes": floor, "tracked_peak_bytes": int(1.12 * floor), "high_water_bytes": 2 * floor},
        "cost": {} if point.system == "sgemm" else {"flops": study.cost_of(point).flops},
        "bound_seconds": 0.6 * t, "share": 0.81 if point.system == "ringlab" else None,
    }  # fmt: skip
    if found:
        fields |= {"median": found.median, "q1": found.q1, "q3": found.q3, "ci": found.ci}
    return Result(**{**base, **fields, **changes})


def write_rows(folder: Path, results) -> None:
    with Store(folder) as store:
        for r in results:
            for i, s in enumerate(r.seconds):
                about = {"run": r.run, "point": r.point.id, "rehearsal": r.rehearsal}
                store.append(kind="sample", **about, round=i, seconds=s, loops=1)
            store.append(run=r.run, **{k: v for k, v in result_row(r, 0.1).items() if k != "run"})


@functools.cache
def whole_suite(name: str = "cpu", rehearsal: bool = False) -> tuple[Result, ...]:
    groups = suites.optimization(hardware.get_profile(name), device="cpu", rehearsal=rehearsal)
    return tuple(made_up(p, g, rehearsal) for g in groups for p in g.points)


def run_in_this_process(source, target, parameters, **_):
    """The notebook's cells without a kernel: quicker, and what they show is the same."""
    nb = nbformat.read(source, as_version=4)
    shell = InteractiveShell.instance()
    for cell in (c for c in nb.cells if c.cell_type == "code"):
        with capture_output() as said:
            done = shell.run_cell(cell.source)
        done.raise_error()
        shown = [(o.data, o.metadata or {}) for o in said.outputs]
        shown += [(done.result._repr_mimebundle_(), {})] if done.result is not None else []
        cell.outputs = [nbformat.v4.new_output("display_data", data=d, metadata=m) for d, m in shown]
        if "parameters" in cell.metadata.get("tags", ()):
            shell.push(parameters)
    InteractiveShell.clear_instance()
    return nb


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A folder with a rendered cpu report and a rendered rehearsal, from made-up rows of the whole suite."""
    folder = tmp_path_factory.mktemp("reports")
    write_rows(folder / "cpu" / "data", whole_suite())
    write_rows(folder / "gtx1080-rehearsal" / "data", whole_suite("gtx1080", True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "run", lambda *a, **k: [])
        patch.setattr(execute, "execute", run_in_this_process)
        patch.chdir(folder)
        driver.run("gtx1080", reports=folder, machine=CPU)
        driver.run("cpu", reports=folder, machine=CPU)
    return folder


class Page(HTMLParser):
    """Tags and attributes of a page, and the table rows with their text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.rows, self.titles, self.inside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)
        if tag == "tr":
            self.rows.append("")
        if tag in ("h1", "h2", "h3", "title"):
            self.titles.append("")

    def handle_endtag(self, tag):
        if tag in self.inside:
            self.inside = self.inside[: len(self.inside) - 1 - self.inside[::-1].index(tag)]

    def handle_data(self, data):
        if "tbody" in self.inside and self.rows:
            self.rows[-1] += data
        if {"h1", "h2", "h3", "title"} & set(self.inside):
            self.titles[-1] += data


@pytest.mark.parametrize("page", ["cpu/optimization_results", "gtx1080-rehearsal/optimization_results", "index"])
def test_page_is_one_offline_file_with_alt_text(reports, page):
    text = (reports / f"{page}.html").read_text()
    found = Page(text)
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", text)
    links = [a for t, a in found.tags if t in ("link", "iframe", "object", "embed", "video", "audio")]
    images = [a for t, a in found.tags if t == "img"]
    assert not links
    assert all(a["src"].startswith("data:image/") and a["alt"].strip() for a in images)
    assert len(images) >= 4 or page == "index"
    assert sum(t == "details" for t, _ in found.tags) == len(images)  # the data under each figure
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


@pytest.mark.parametrize("page", ["cpu/optimization_results", "gtx1080-rehearsal/optimization_results", "index"])
def test_markdown_has_no_html_and_its_figures_exist(reports, page):
    path = reports / f"{page}.md"
    text = path.read_text()
    plain = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
    assert not re.search(r"</?[a-zA-Z][^>]*>", plain)
    figures_found = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    assert all((path.parent / name).is_file() and name.startswith("figures/") for _, name in figures_found)
    assert len(figures_found) >= 4 or page == "index"
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_rehearsal_is_stamped_in_every_title_table_and_row(reports):
    folder = reports / "gtx1080-rehearsal"
    html, text = ((folder / f"optimization_results.{x}").read_text() for x in ("html", "md"))
    page = Page(html)
    assert page.titles and all("rehearsal" in t for t in page.titles)
    body = [r for r in page.rows if r]
    assert len(body) > 60 and all(r.startswith("rehearsal") for r in body)
    captions = re.findall(r'<p class="caption">(.*?)</p>|<summary>(.*?)</summary>', html)
    assert captions and all("".join(c).startswith("Rehearsal: ") for c in captions)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert all("rehearsal" in line for line in prose.splitlines() if line.startswith("#"))
    table_rows = [x for x in text.splitlines() if x.startswith("|") and not x.startswith(("|:", "| Run"))]
    assert all(x.startswith(("| rehearsal", "| **rehearsal")) for x in table_rows)
    assert "No NVIDIA GeForce GTX 1080 was at hand" in html
    summary = (folder / "data" / "summary.csv").read_text().splitlines()
    column = summary[0].split(",").index("rehearsal")
    assert {line.split(",")[column] for line in summary[1:] if line.count(",") == summary[0].count(",")} == {"True"}


def test_rehearsal_says_policy_install_line_refusals_and_what_fits(reports):
    text = (reports / "gtx1080-rehearsal" / "optimization_results.md").read_text()
    assert "float32: native fp16 runs at 1/64" in text
    assert "pip install torch==2.13.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126" in text
    assert "needs compute capability 8.0 or newer, this is 6.1" in text
    assert "These rows were measured on another machine (a CPU), commit 0000000000" in text
    assert "does not fit" in text and "12 GiB" in text
    assert "dtype=torch.float32" in text
    fit = computed.two_cards()
    assert fit.original_bytes == 3 * 8 * 16384 * 8192 * 4 and not fit.original_fits and fit.ours_fits


def test_report_answers_first_and_judges_every_claim(reports):
    text = (reports / "cpu" / "optimization_results.md").read_text()
    opening = text.split("## ")[0]
    assert 1 <= len(re.findall(r"^- ", opening, re.M)) <= 5 and "**Fastest correct variant**" in opening
    ledger = text.split("## Published claims")[1].split("## ")[0]
    verdicts = [re.split(r"(?<!\\)\|", x)[3].strip() for x in ledger.splitlines() if x.startswith("| ")][1:]
    assert len(verdicts) == len(rows.published()["claims"]) and set(verdicts) <= set(claims.WORDS)
    assert "confounded" in verdicts and "136.52" in text and "rehearsal" not in opening
    for section in ("Implementations", "Every switch alone", "Kernels", "Memory", "What this run cannot tell"):
        assert f"## {section}" in text
    implementations = text.split("## Implementations")[1].split("## ")[0]
    assert "Dense SDPA" in implementations and "another function" in implementations


def test_unchanged_run_is_not_rendered_again_and_index_lists_both(reports, monkeypatch):
    monkeypatch.setattr(measure, "run", lambda *a, **k: [])
    monkeypatch.setattr(execute, "execute", lambda *a, **k: pytest.fail("ran the notebook again"))
    page = reports / "cpu" / "optimization_results.html"
    before = page.stat().st_mtime_ns
    pages = driver.run("cpu", reports=reports, machine=CPU)
    assert page in pages and page.stat().st_mtime_ns == before
    text = (reports / "index.md").read_text()
    assert "cpu/optimization_results.md" in text and "gtx1080-rehearsal/optimization_results.md" in text
    manifest = index.read_manifest(reports / "cpu")
    assert list(manifest)[-1] == "complete" and manifest["complete"] is True and manifest["commit"]
    assert manifest["reports"][0]["headline"].startswith("Fastest correct variant")


GOOD = dict(system="ringlab", pattern=patterns.Dilated([4, 8], [1, 2]), seq_len=64, heads=2, head_dim=8)


def two_points(profile=None, device="cpu", rehearsal=False):
    return [Group("pair", (Point(**GOOD), Point(**{**GOOD, "system": "dense_sdpa", "pattern": patterns.Dense()})))]


def notebook(path: Path, *cells: str) -> Path:
    elsewhere = {"name": "conda-env", "display_name": "x", "language": "python"}
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": elsewhere})
    parameters = nbformat.v4.new_code_cell('profile: str = "cpu"\ndata: str = ""', metadata={"tags": ["parameters"]})
    nb.cells = [nbformat.v4.new_markdown_cell("# A title\n\n## A section"), parameters]
    nb.cells += [nbformat.v4.new_code_cell(textwrap.dedent(c)) for c in cells]
    nbformat.write(nb, path)
    return path


def test_driver_measures_runs_and_renders_two_points(tmp_path, monkeypatch):
    """The real thing, end to end, with a wrong kernel installed and a folder name with a space."""
    spec = tmp_path / "elsewhere" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/nonexistent/python"], "display_name": "bad", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "elsewhere"))
    reports = tmp_path / "my reports"
    pages = driver.run("cpu", reports=reports, notebooks=[NOTEBOOK], suite=two_points, machine=CPU)
    assert [p.name for p in pages] == ["optimization_results.html", "optimization_results.md", "index.html", "index.md"]
    found = measure.load(reports / "cpu" / "data")
    assert len(found) == 2 and all(r.seconds and r.errors for r in found)
    text = (reports / "cpu" / "optimization_results.md").read_text()
    assert "no row of the document's function passed" in text and "2 measured" in text
    assert not list(reports.rglob("*.partial.ipynb")) and not list(reports.rglob("*.lock"))
    assert str(tmp_path) not in (reports / "cpu" / "tmp" / "optimization_results.ipynb").read_text()
    assert os.environ["JUPYTER_PATH"] == str(tmp_path / "elsewhere")


def test_misspelt_parameter_is_refused(tmp_path):
    source = notebook(tmp_path / "x.ipynb", "1")
    with pytest.raises(places.UsageError, match="no parameter profil; it has: profile, data"):
        execute.execute(source, tmp_path / "out.ipynb", {"profil": "cpu"}, cwd=tmp_path)


@pytest.mark.parametrize(
    "cell, said",
    [
        ("raise ValueError('no luck')", "raised ValueError: no luck"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed its kernel"),
        ("import time; time.sleep(60)", "did not end within 2 s"),
    ],
)
def test_failures_are_told_apart_and_rendered(tmp_path, cell, said):
    write_rows(tmp_path / "cpu" / "data", [made_up(p, g, False) for g in two_points() for p in g.points])
    kept = render.write(tmp_path / "cpu" / "bad.html", "an earlier page")
    asked = driver.Plan(hardware.get_profile("cpu"), "cpu", False, False, "cpu")
    source = notebook(tmp_path / "bad.ipynb", "'fine'", cell, "'never'")
    with pytest.raises(places.ReportError, match=re.escape(said)) as error:
        driver._write_reports(asked, tmp_path / "cpu", [source], cell_timeout_s=2, force=False)
    assert error.value.exit_code == 1
    assert "bad.ipynb: code cell" in str(error.value) and "under 'A section'" in str(error.value)
    assert "\n" not in str(error.value)
    assert said in (tmp_path / "cpu" / "bad.failed.html").read_text().replace("&#39;", "'")
    assert kept.read_text() == "an earlier page"
    assert index.read_manifest(tmp_path / "cpu")["complete"] is False


@pytest.mark.parametrize(
    "change, said",
    [
        ({"status": "oom", "reason": "out of memory"}, "oom: out of memory"),
        ({"errors": {}}, "no correctness check"),
        ({"errors": {"out": 1e-2}}, "incorrect: out is off by"),
        ({"errors": {"out": float("nan")}}, "incorrect: out is off by"),
        ({"bound_seconds": 1e3}, "below its bound"),
        ({"memory": {"tracked_peak_bytes": 1, "floor_bytes": 2}}, "smaller than its own tensors"),
        ({"status": "suspect", "reason": "superlinear"}, "superlinear"),
    ],
)
def test_no_bad_row_reaches_a_table(change, said):
    bad = [replace(r, **change) if r.status == "ok" else r for r in whole_suite()]
    page = study.Study(hardware.get_profile("cpu"), bad, Path("cpu/data"))
    assert not [r for r in page.good if r.seconds] and rows.fastest_row(page) is None
    filled = (document.implementations, document.switch_table, document.speed, document.two_by_two, document.lengths)
    shown = [f(page).markdown for f in filled]
    times = {tables.number(r.median * 1e3) for r in bad if r.median}
    cells = {x.strip().split(" (")[0] for t in shown for line in t.splitlines() for x in line.split("|")}
    assert not times & cells
    assert said in document.failures(page).markdown
    assert "none" in document.answer(page).lines[0]


def test_verdicts_follow_the_interval():
    ratio = stats.Ratio(1.07, 1.06, 1.08, 10, True)
    assert claims.by_interval(ratio, 1.05, 1.10, "x").word == "reproduced"
    assert claims.by_interval(ratio, 1.2, 1.4, "x").word == "refuted"
    assert claims.by_interval(ratio, 1.065, 1.4, "x").word == "not testable on this profile"
    assert claims.by_interval(None, 1.0, 2.0, "x").word == "not testable on this profile"


def test_every_claim_has_a_test_and_every_number_its_place():
    data = rows.published()
    assert {c["test"] for c in data["claims"]} <= claims.TESTS.keys()
    for row in data["rows"]:
        assert row["speedup"] == pytest.approx(data["rows"][0]["ms"] / row["ms"], abs=0.006)
        assert row["tokens_per_s"] == pytest.approx(8192e3 / row["ms"], rel=1e-3)


def test_the_recommended_configuration_runs(reports):
    page = study.open_study("cpu", str(reports / "cpu" / "data"))
    names = document.recommended(page).run()
    assert names["out"].shape == (1, 8192, 8, 64)


def test_a_figure_needs_alt_text():
    with pytest.raises(ValueError, match="needs alt text"):
        figures.show(None, "x", "caption", " ", tables.Table("t", ["a"]))


def test_figures_do_not_change_without_a_reason():
    import io

    def drawn():
        out = io.StringIO()
        with figures.drawing():
            fig = figures.bars([figures.Bar("a", 1.0, 0.9, 1.1, bound=0.5)], xlabel="x")
            fig.savefig(out, format="svg", metadata={"Date": None})
        return figures.themed(out.getvalue())

    assert drawn() == drawn() and "var(--ink)" in drawn()


def test_table_refuses_a_ragged_row():
    with pytest.raises(ValueError, match="has 2 columns, a row has 1"):
        tables.Table("t", ["a", "b"], [[1]])


def test_html_and_markdown_are_escaped():
    table = tables.Table("<b>", ["a"], [["<script>|"]])
    assert "<script>" not in table.html and "\\<script>\\|" in table.markdown


def test_plan(tmp_path):
    def folder(name, machine, **more):
        p = driver.plan(name, machine, tmp_path, **more)
        return p.folder, p.measure, p.rehearsal, p.device

    build = {"torch": "2.13.0+cu126", "torch_cuda": "12.6", "arch_list": ("sm_60",)}
    on_card = hardware.Machine(device="cuda", gpus=(PASCAL,), **build)
    assert folder("auto", CPU) == ("cpu", True, False, "cpu")
    assert folder("gtx1080", CPU) == ("gtx1080-rehearsal", True, True, "cpu")
    assert folder("auto", on_card) == ("gtx1080", True, False, "cuda")
    assert folder("cpu", on_card) == ("cpu", True, False, "cpu")
    with pytest.raises(places.UsageError, match="strict"):
        driver.plan("gtx1080", CPU, tmp_path, strict=True)
    with pytest.raises(places.UsageError, match="unknown profile 'nope'.*known: auto, cpu, gtx1080"):
        driver.plan("nope", CPU, tmp_path)
    write_rows(tmp_path / "gtx1080" / "data", [made_up(p, g, False) for g in two_points() for p in g.points])
    assert folder("gtx1080", CPU) == ("gtx1080", False, False, "cpu")
    assert folder("gtx1080", CPU, recorded=False) == ("gtx1080-rehearsal", True, True, "cpu")


def test_a_gpu_that_torch_cannot_drive_gets_the_install_line(tmp_path):
    machine = hardware.Machine(gpus=(PASCAL,), torch="2.13.0", torch_cuda="13.0", arch_list=("sm_75", "sm_80", "sm_90"))
    for name in ("auto", "gtx1080"):
        with pytest.raises(places.UsageError, match=r"pip install torch==2\.13\.0\+cu126 --extra-index-url") as error:
            driver.plan(name, machine, tmp_path)
        assert error.value.exit_code == 2 and len(str(error.value).splitlines()) < 12
    assert driver.plan("cpu", machine, tmp_path).device == "cpu"


def test_lock_names_its_holder_and_outlives_nobody(tmp_path):
    code = "from ringlab.report.places import locked\nfrom pathlib import Path\n"
    code += f"with locked(Path({str(tmp_path)!r})): print('held', flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(places.ReportError, match=f"in use by process {other.pid} "), places.locked(tmp_path):
        pass
    other.kill()
    other.communicate()
    with places.locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_read_only_folder_is_one_line(tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "reports").write_text("a file where a folder should be")
    else:
        (tmp_path / "reports").mkdir(mode=0o500)
    with pytest.raises(places.ReportError, match="cannot use") as error:
        driver.run("cpu", reports=tmp_path / "reports", notebooks=[NOTEBOOK], suite=two_points, machine=CPU)
    assert "\n" not in str(error.value)


def test_notebook_is_clean_and_short():
    nb = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(nb)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None and len(c.source.splitlines()) <= 8 for c in code)
    assert sum("parameters" in c.metadata.get("tags", ()) for c in code) == 1
    assert len({c.id for c in nb.cells}) == len(nb.cells)
    assert nb.metadata.kernelspec.name == "python3"
    assert "tqdm" not in NOTEBOOK.read_text() and "injected" not in NOTEBOOK.read_text()


def test_without_rows_the_notebook_says_how_to_measure(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m ringlab measure --profile h200"):
        places.data_folder("h200", str(tmp_path))


def test_provenance_knows_the_state_of_the_checkout():
    commit, dirty = provenance.git_state()
    assert isinstance(commit, str) and dirty in (True, False, "unknown")
