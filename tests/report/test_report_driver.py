"""The driver: what is current stays, what fails is named, and no page is ever
half-written.
"""

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from reporting import (
    CPU,
    GOOD,
    NOTEBOOK,
    ROOT,
    figure,
    made_up,
    notebook,
    run_in_this_process,
    study_of,
    two_points,
    write_rows,
    write_two_rows,
)
from ringlab import cli, measure
from ringlab.measure import Group, Point, provenance, suites, timing
from ringlab.report import driver, first_screen, index, places, render
from started import gone, inside


def in_process(source, parameters, *_, **__):
    return run_in_this_process(source, None, parameters)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A reports/ folder with rows; nothing is measured, notebooks run without a kernel,
    time stands still.
    """
    write_two_rows(tmp_path / "reports")
    monkeypatch.setattr(measure, "run", lambda *a, **k: [])
    monkeypatch.setattr(render, "execute", in_process)
    monkeypatch.setattr(provenance, "utc", lambda: "2026-01-01T00:00:00Z")
    (
        provenance.engine_hash(),
        provenance.method_hash(),
    )  # they are cached: later tests need the true ones
    monkeypatch.setattr(provenance, "code_hash", lambda *_: "this code")
    return tmp_path / "reports"


def report(place: Path, *notebooks: Path, **more) -> list[Path]:
    return driver.run(
        "cpu",
        reports=place,
        notebooks=notebooks,
        suite=lambda *a, **k: [],
        machine=CPU,
        **more,
    )


def state(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_two_points_measured_run_rendered_and_then_left_alone(tmp_path, monkeypatch):
    """The real thing, end to end: foreign kernels and templates installed, a folder
    name with a space and braces.
    """
    for name in ("python3", "ringlab"):
        spec = tmp_path / "elsewhere" / "kernels" / name / "kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(
            json.dumps(
                {
                    "argv": ["/nonexistent/python"],
                    "display_name": "bad",
                    "language": "python",
                }
            )
        )
    render.write(
        tmp_path
        / "elsewhere"
        / "nbconvert"
        / "templates"
        / "base"
        / "display_priority.j2",
        "not ours",
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(
        provenance, "threads", lambda: 1
    )  # tiny work: a second thread only waits
    monkeypatch.setattr(timing, "MAX_SAMPLES", timing.SAMPLES)
    reports = tmp_path / "my {reports}"
    how = {
        "notebooks": [NOTEBOOK],
        "suite": two_points,
        "machine": CPU,
        "cell_timeout_s": 120,
    }
    written = driver.run("cpu", reports=reports, **how)
    assert [p.name for p in written[:2]] == [
        "optimization_results.html",
        "optimization_results.md",
    ]
    assert [p.name for p in written[2:]] == ["index.html", "index.md"]
    found = measure.load(reports / "cpu" / "data")
    assert len(found) == 2 and all(r.seconds and r.errors for r in found)
    assert (
        "<main>" in written[0].read_text() and "not ours" not in written[0].read_text()
    )
    assert not [
        *reports.rglob("*.partial.ipynb"),
        *reports.rglob("*.lock"),
        *reports.rglob("*.tmp"),
    ]
    assert not any(
        str(tmp_path) in p.read_text(errors="replace")
        for p in reports.rglob("*")
        if p.is_file()
    )
    assert os.environ["JUPYTER_PATH"] == str(tmp_path / "elsewhere")
    manifest = index.read_manifest(reports / "cpu")
    assert (
        list(manifest)[-1] == "complete"
        and manifest["complete"] is True
        and manifest["commit"]
    )
    assert (
        manifest["made_by"]["dirty"] in (True, False, "unknown")
        and manifest["reports"][0]["finding"]
    )

    before = state(reports)
    monkeypatch.setattr(
        render, "execute", lambda *a, **k: pytest.fail("ran the notebook again")
    )
    assert driver.run("cpu", reports=reports, **how) == []
    assert state(reports) == before


def test_pages_are_run_again_only_if_something_changed(place, tmp_path, monkeypatch):
    one, two = (
        notebook(tmp_path / "one.ipynb", "'fine'"),
        notebook(tmp_path / "two.ipynb", figure(1, "two")),
    )
    ran = []

    def recorded(source, *rest, **more):
        ran.append(source.stem)
        return in_process(source, *rest, **more)

    def runs(**more) -> list[str]:
        ran.clear()
        report(place, one, two, **more)
        return list(ran)

    monkeypatch.setattr(render, "execute", recorded)
    both = ["one", "two"]
    assert runs() == both
    assert runs() == []
    one.write_text(one.read_text().replace("A section", "Another section"))
    assert (
        runs() == both and "Another section" in (place / "cpu" / "one.html").read_text()
    )
    monkeypatch.setattr(
        provenance, "git_state", lambda *_: ("f" * 40, True)
    )  # a commit that changes no page
    assert runs() == []
    monkeypatch.setattr(provenance, "code_hash", lambda *_: "other code")
    assert runs() == both
    write_two_rows(place)  # the same rows measured again
    assert runs() == both
    (place / "cpu" / "two.md").unlink()
    assert runs() == both and (place / "cpu" / "two.md").is_file()
    for name in ("one.html", "figures/two.png"):  # edited by hand
        (place / "cpu" / name).write_bytes(b"not ours")
        assert runs() == both and (place / "cpu" / name).read_bytes() != b"not ours"
    assert runs(force=True) == both
    assert runs() == []
    notebook(two, figure(1, "new"))
    assert runs() == both and {
        p.name for p in (place / "cpu" / "figures").iterdir()
    } == {"new.png"}


class Killed(BaseException):
    """Stands for a signal: nothing in the driver may catch it and go on."""


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_run_stopped_at_any_write_leaves_whole_pages_and_the_next_completes(
    place, tmp_path, monkeypatch
):
    page = notebook(tmp_path / "page.ipynb", figure(1))
    report(place, page)
    old = state(place)
    report(place, notebook(page, figure(2)))
    new = state(place)
    changed = {name for name in old if old[name] != new[name]} - {
        "cpu/data/manifest.json"
    }
    assert changed >= {"cpu/page.html", "cpu/page.md", "cpu/figures/one.png"}
    replace, stops, stopped = os.replace, 0, tmp_path / "stopped"
    report(place, notebook(page, figure(1)))
    while True:
        failure, left = (Killed(), FULL)[stops % 2], iter(range(stops))

        def stopping(source, target, failure=failure, left=left):
            if next(left, None) is None:
                raise failure
            return replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(render.os, "replace", stopping)
            try:
                report(place, notebook(page, figure(2)))
                break
            except places.ReportError as error:
                assert (
                    failure is FULL
                    and str(error).endswith("No space left on device")
                    and "\n" not in str(error)
                )
            except Killed:
                pass
        stops += 1
        (place / "cpu" / ".page.html.1.tmp").write_text("what a killed process leaves")
        now = state(place)
        assert all(now[name] in (old[name], new[name]) for name in changed)
        assert json.loads(now["cpu/data/manifest.json"])["complete"] is False or all(
            now[n] == old[n] for n in changed
        )
        shutil.copytree(place, stopped)
        for value, whole in (
            (2, new),
            (1, old),
        ):  # gone on with, and undone: the page is then of neither version
            shutil.rmtree(place)
            shutil.copytree(stopped, place)
            report(place, notebook(page, figure(value)))
            assert {n: b for n, b in state(place).items() if n in changed} == {
                n: whole[n] for n in changed
            }
            assert index.read_manifest(place / "cpu")["complete"] is True and not list(
                place.rglob("*.tmp")
            )
        shutil.rmtree(stopped)
    assert stops == 5, "the manifest twice, HTML, Markdown, a figure"


@pytest.mark.parametrize(
    "cell, said",
    [
        ("raise ValueError('no luck')", "raised ValueError: no luck"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "killed its kernel",
        ),
        ("while True: pass", "did not end within 1 s"),
    ],
)
def test_failures_are_told_apart(tmp_path, monkeypatch, capfd, cell, said):
    write_two_rows(tmp_path)
    monkeypatch.setattr(measure, "run", lambda *a, **k: [])
    kept = render.write(tmp_path / "cpu" / "bad.html", "an earlier page")
    source = notebook(tmp_path / "bad.ipynb", "'fine'", cell, "'never'")
    with pytest.raises(places.ReportError, match=re.escape(said)) as error:
        report(tmp_path, source, cell_timeout_s=1)
    assert error.value.exit_code == 1
    assert "bad.ipynb: code cell 3 under 'A section'" in str(
        error.value
    ) and "\n" not in str(error.value)
    assert kept.read_text() == "an earlier page"
    assert index.read_manifest(tmp_path / "cpu")["complete"] is False
    listed = (tmp_path / "index.md").read_text()
    assert (
        said in listed
        and "[earlier HTML](cpu/bad.html)" in listed
        and "unfinished" in listed
    )
    assert capfd.readouterr().err == "[1/1] page bad\n"


@pytest.mark.parametrize("stopped", [False, True])
def test_the_points_of_the_first_screen_are_measured_and_shown_first(
    place, tmp_path, monkeypatch, stopped
):
    """The index at each step of a run that is then stopped, or goes on to its end."""
    names = ["first", suites.LANDSCAPE, "between", suites.LANDSCAPE_ADVISED]
    point = Point(**GOOD)
    groups = [Group(name, [point, point.but(causal=True)]) for name in names]
    page, steps = notebook(tmp_path / "page.ipynb", "'fine'"), []
    shutil.rmtree(place)
    screen = first_screen.first_screen(study_of([]), {})

    def of(study, *_):
        return replace(screen, figure=None, title=f"{len(study.results)} rows")

    def made(groups, folder, *, after, **_):
        after(None, 8)
        for left, group in zip((6, 4, 2, 0), groups):
            write_rows(folder, [made_up(p, group) for p in group.points])
            after(group, left)
            text = (place / "index.md").read_text()
            counts = re.findall(r"cpu: (\d) rows|(\d) of 8 points are measured", text)
            steps.append((group.name, *counts))
            if stopped and left == 2:
                raise measure.Interrupted

    monkeypatch.setattr(measure, "run", made)
    monkeypatch.setattr(driver, "first_screen", of)
    how = {"reports": place, "notebooks": None, "suite": lambda profile: groups}
    monkeypatch.setattr(driver, "REPORTS", ["page", "quality"])
    monkeypatch.setattr(driver, "notebook_of", lambda name: page)
    with pytest.raises(measure.Interrupted) if stopped else nullcontext():
        driver.run("cpu", machine=CPU, **how)
    expected = [
        (suites.LANDSCAPE_ADVISED, ("2", ""), ("", "2")),
        (suites.LANDSCAPE, ("4", ""), ("", "4")),
        ("first", ("4", ""), ("", "4")),
        ("between", ("4", ""), ("", "4")),
    ]
    assert steps == expected[: 3 if stopped else 4]
    manifest = index.read_manifest(place / "cpu")
    assert manifest["complete"] is not stopped
    assert manifest.get("measured_points") == ([6, 8] if stopped else None)
    found = "6 of 8 points" in (place / "index.md").read_text()
    assert found == stopped and (place / "cpu" / "page.html").exists() != stopped


@pytest.mark.parametrize("older", [{}, {"nbformat_minor": 0}, {"nbformat": 3}])
def test_notebooks_of_older_formats_and_without_a_kernel_run(tmp_path, older):
    source = notebook(tmp_path / "x.ipynb", "assert profile == 'h200'")
    nb = nbformat.read(source, 4)
    nb.metadata.clear()
    for cell in nb.cells if older else ():
        del cell["id"]
    if "nbformat" in older:
        nb = nbformat.v4.downgrade(nb)
    source.write_text(json.dumps(nb | older))
    done = render.execute(source, {"profile": "h200"}, tmp_path, tmp_path / "failed")
    html, *_ = render.render(done, render.Page("x"), tmp_path)
    assert "A title" in html.read_text()


def test_how_to_keep_or_drop_changes_of_tracked_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my reports"
    assert places.changes(folder) == ""
    kept = render.write(folder / "kept", "1")
    assert places.changes(folder) == ""
    as_me = ["-c", "user.name=me", "-c", "user.email=me@here", "commit", "-m", "x"]
    for command in (["init"], ["add", "."], as_me):
        subprocess.run(["git", *command], check=True, capture_output=True)
    render.write(folder / "new", "untracked")
    assert places.changes(folder) == ""
    kept.write_text("2")
    drop = re.search("`(git checkout .*?)`", places.changes(folder))[1]
    subprocess.run(drop, shell=True, check=True, capture_output=True)
    assert kept.read_text() == "1" and places.changes(folder) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, stop",
    [
        ("make", signal.SIGTERM),
        ("make", signal.SIGKILL),
        (sys.executable, signal.SIGTERM),
    ],
)
def test_a_stopped_report_leaves_no_process_and_no_folder(program, stop, tmp_path):
    if shutil.which(program) is None:
        pytest.skip("make is not installed")
    reports, scratch = tmp_path / "reports", tmp_path / "tmp"
    scratch.mkdir()
    how = ["-m", "ringlab", "report", "--profile", "cpu", "--reports", reports]
    if program == "make":
        how = ["report", "GPU=cpu", "NOENV=1", f"PYTHON={sys.executable}"]
        how.append(f"ARGS=--reports {reports}")
    running = subprocess.Popen(
        [program, *how],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    rows, until = reports / "cpu/data/samples.jsonl", time.monotonic() + 240
    while not (rows.exists() and '"run"' in rows.read_text()):
        assert time.monotonic() < until and running.poll() is None
        time.sleep(0.1)
    assert len(inside(scratch)) > 1
    running.send_signal(stop)
    _, said = running.communicate(timeout=120)
    assert gone(inside(scratch), 60) and not [*scratch.iterdir()]
    assert " points are kept" in said and "Traceback" not in said


def test_a_notebook_has_a_kernel_of_its_own_and_a_failed_one_is_kept(tmp_path):
    ids = f"import os\nprint(os.getpid(), file=open('{tmp_path}/ran', 'a'))\n"
    good, bad = (
        notebook(tmp_path / "good.ipynb", ids),
        notebook(tmp_path / "bad.ipynb", f"{ids}x = 1 / 0"),
    )
    kept, before = tmp_path / "kept.ipynb", dict(os.environ)
    with pytest.raises(render.NotebookFailed, match="division by zero"):
        render.execute(bad, {"profile": "cpu"}, tmp_path, kept)
    assert 'profile = \\"cpu' in kept.read_text()
    done = render.execute(good, {"profile": "h200"}, tmp_path, kept)
    assert done.metadata.papermill.parameters == {"profile": "h200"}
    assert not kept.exists() and dict(os.environ) == before
    pids = {int(line) for line in (tmp_path / "ran").read_text().split()}
    assert len(pids) == 2 and gone(pids, 10)


def test_a_kernel_that_is_stopped_before_it_has_a_client_is_ended(
    tmp_path, monkeypatch
):
    pids = set()

    def stop(client):
        pids.add(client.km.provisioner.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(render.NotebookClient, "start_new_kernel_client", stop)
    source = notebook(tmp_path / "good.ipynb", "")
    with pytest.raises(KeyboardInterrupt):
        render.execute(source, {}, tmp_path, tmp_path / "kept.ipynb")
    assert len(pids) == 1 and gone(pids, 10)


def test_a_failed_notebook_does_not_keep_the_others_and_is_mended_by_the_next_run(
    place, tmp_path, monkeypatch
):
    bad, good = (
        notebook(tmp_path / "bad.ipynb", figure(1, "a")),
        notebook(tmp_path / "good.ipynb", figure(1, "b")),
    )

    def fails(source, *rest, **more):
        if source.stem == "bad":
            raise render.NotebookFailed("bad.ipynb: no luck")
        return in_process(source, *rest, **more)

    about = study_of([])
    screen = first_screen.first_screen(about, {}).stored()
    screen |= {"figure": None, "html": "It was fast."}
    index.write_manifest(
        place / "cpu", {"reports": [], "first_screen": screen}, complete=True
    )
    monkeypatch.setattr(render, "execute", fails)
    with pytest.raises(places.ReportError, match="^bad.ipynb: no luck$"):
        report(place, bad, good)
    assert "It was fast." in (place / "index.html").read_text(), (
        "the earlier first screen stays"
    )
    assert (place / "cpu" / "good.html").is_file() and not (
        place / "cpu" / "bad.html"
    ).exists()
    monkeypatch.setattr(render, "execute", in_process)
    report(place, bad, good)
    assert (place / "cpu" / "bad.html").is_file()
    assert "failed" not in (place / "index.md").read_text()


def test_an_image_without_alt_text_is_a_failure(place, tmp_path):
    cell = """
    from IPython.display import display
    display({"image/png": "aGVsbG8="}, raw=True)
    """
    with pytest.raises(
        places.ReportError, match="page.ipynb: cell 2 shows an image without alt text"
    ):
        report(place, notebook(tmp_path / "page.ipynb", cell))
    assert not (place / "cpu" / "page.html").exists()


def test_notebooks_are_checked_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "run", lambda *a, **k: pytest.fail("measured"))
    source = tmp_path / "x.ipynb"
    source.write_text("{")
    with pytest.raises(places.ReportError, match="x.ipynb is not a notebook"):
        report(tmp_path / "reports", source)
    nbformat.write(nbformat.v4.new_notebook(), source)
    with pytest.raises(places.ReportError, match="x.ipynb has no cell with the tag"):
        report(tmp_path / "reports", source)
    source.unlink()
    with pytest.raises(places.ReportError, match="cannot use .*x.ipynb: No such file"):
        report(tmp_path / "reports", source)
    assert not (tmp_path / "reports").exists()


def test_profile_and_rows_reach_the_notebook(place, tmp_path):
    cell = "from ringlab.report import tables\ntables.Text([f'for {profile}, {data}'])"
    report(place, notebook(tmp_path / "x.ipynb", cell))
    assert "for cpu, cpu/data" in (place / "cpu" / "x.md").read_text()


def test_recorded_rows_of_an_absent_gpu_are_shown_with_their_origin(
    place, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(measure, "run", lambda *a, **k: pytest.fail("measured"))
    write_two_rows(place, "gtx1080")
    driver.run(
        "gtx1080",
        reports=place,
        notebooks=[notebook(tmp_path / "page.ipynb", figure(1))],
        machine=CPU,
    )
    assert (
        "measured on another machine (a CPU), commit 0000000000"
        in (place / "gtx1080" / "page.md").read_text()
    )
    assert "showing the rows recorded elsewhere" in capsys.readouterr().err
    assert "## gtx1080\n" in (place / "index.md").read_text()


def hold(folder: Path, held) -> None:
    with places.locked(folder):
        held.set()
        time.sleep(60)


def test_a_second_run_is_told_in_one_line_and_a_lock_outlives_nobody(place, tmp_path):
    page = notebook(tmp_path / "page.ipynb", figure(1))
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    other = fork.Process(target=hold, args=(place / "cpu", held))
    other.start()
    assert held.wait(30)
    with pytest.raises(
        places.ReportError,
        match=f"in use by process {other.pid} on .*; wait for it or stop it$",
    ):
        report(place, page)
    other.kill()
    with places.locked(place / "cpu", wait=True):
        pass
    other.join()
    report(place, page)
    assert not list(place.rglob("*.lock"))


# `python -m ringlab report` on rows that are there already, with another notebook: a
# process for each reports/ folder, forked after the imports, which take longer than all
# else. Prints their exit codes.
COMMAND = """
import functools, json, os, signal, sys
from pathlib import Path
from ringlab import cli, measure
from ringlab.measure import provenance
from ringlab.report import driver
measure.run = lambda *a, **k: []
provenance.code_hash = lambda *_: "this code"
page, *folders = sys.argv[1:]
driver.run = functools.partial(driver.run, notebooks=[Path(page)], suite=lambda *a, **k: [])
signal.signal(signal.SIGINT, signal.default_int_handler)
children = []
for reports in folders:
    children.append(os.fork())
    if not children[-1]:
        sys.exit(cli.main(["report", "--profile", "cpu", "--reports", reports]))
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


def test_stopped_while_a_notebook_runs(place, tmp_path):
    """By Ctrl-C and by SIGKILL: one line, no orphan, earlier pages whole, and the next
    run completes.
    """
    page = notebook(tmp_path / "page.ipynb", "'fine'")
    stops = {tmp_path / stop.name: stop for stop in (signal.SIGINT, signal.SIGKILL)}
    for reports in stops:
        write_two_rows(reports)
        report(reports, page)
    old = [(reports / "cpu" / "page.html").read_bytes() for reports in stops]
    notebook(
        page,
        "import os, time; print(os.getppid(), os.getpid(), file=open('started', 'w')); time.sleep(60)",
    )
    command, pipe = [sys.executable, "-c", COMMAND, page, *stops], subprocess.PIPE
    # What is killed by SIGKILL leaves its temporary folder.
    how = {"cwd": tmp_path, "env": os.environ | {"TMPDIR": str(tmp_path)}}
    running = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **how)
    until, kernels = time.monotonic() + 120, []
    for reports, stop in stops.items():
        while not (
            (reports / "started").exists()
            and (reports / "started").read_text().endswith("\n")
        ):
            assert time.monotonic() < until and running.poll() is None
            time.sleep(0.05)
        driver_id, kernel = map(int, (reports / "started").read_text().split())
        os.kill(driver_id, stop)
        kernels.append(kernel)
    out, err = running.communicate(timeout=30)
    assert json.loads(out) == [130, -signal.SIGKILL]
    (line,) = (x for x in err.splitlines() if x.startswith("ringlab: "))
    assert line == f"ringlab: {cli.STOPPED}"
    assert [(reports / "cpu" / "page.html").read_bytes() for reports in stops] == old
    for reports in stops:
        assert index.read_manifest(reports / "cpu")["complete"] is False
        report(reports, notebook(page, "'done'"))
        assert index.read_manifest(reports / "cpu")["complete"] is True
    assert gone(kernels, 30)
