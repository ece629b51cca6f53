"""Real runs: no number without a passed check, no failure that stops a run, no sample
lost or counted twice.
"""

import itertools
import json
import os
import platform
import shutil
import signal
import sys
import time
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from statistics import median

import pytest
import torch
from hosts import MadeUp, OneProbe, measure, misbehaving
from ringlab import hardware, patterns
from ringlab.measure import (
    Busy,
    Group,
    Interrupted,
    Point,
    load,
    provenance,
    ratio,
    run,
    session,
    store,
    workers,
)
from ringlab.measure.points import ANCHOR, ANCHORS, Result
from ringlab.measure.timing import FEWEST_LONG
from ringlab.ring import launch
from started import alive, gone, rows_of

PATTERN = patterns.Dilated([16, 32], [1, 2])
TINY = Point("ringlab", PATTERN, seq_len=64, heads=2, head_dim=8)


@pytest.fixture(autouse=True, scope="module")
def broken(tmp_path_factory):
    """The folder of a module of systems that misbehave, importable in workers."""
    folder = tmp_path_factory.mktemp("systems")
    with misbehaving(folder, threads=1):  # tiny work: a second thread only waits
        yield folder


# --------------------------------------------------------------------------------------
# one run with everything in it

VERDICTS = {
    "zeros": ("incorrect", "out is off by 1.0e+00, allowed 5.0e-06"),
    **dict.fromkeys(("nans", "wide", "short"), ("incorrect", "out is off by inf")),
    "turns": ("incorrect", "between the checked and the last call"),
    "raises": ("crashed", "ZeroDivisionError: division by zero"),
    "aborts": ("crashed", "the worker was ended by SIGABRT"),
    "killed": (
        "crashed",
        "the worker was ended by SIGKILL (the system may have run out of memory)",
    ),
    "refuses": ("unsupported", "needs another machine"),
    "declines": ("unsupported", "not this pattern"),
    "buggy": ("crashed", "ValueError: invalid literal"),
    "exhausted": ("oom", "MemoryError"),
    "starves": ("oom", "can't allocate memory"),
    "too_fast": ("suspect", "is below its bound of"),
    "too_small": ("suspect", "smaller than its own tensors"),
}
CAUSAL, TRAINED = TINY.but(causal=True), TINY.but(passes="fwd+bwd")
DENSE = TINY.but(system="dense_sdpa", pattern=patterns.Dense())
TABLE = Group(
    "table",
    [TINY, *(TINY.but(system=f"broken:{name}") for name in VERDICTS), CAUSAL, DENSE],
)
ALONE = Group("alone", [TINY, CAUSAL], interleave=False)
WRONG_GRADIENT = TRAINED.but(system="broken:bad_grad")
CHECKED = Group("checked", [TRAINED, WRONG_GRADIENT], timed=False)


@pytest.fixture
def no_anchors(monkeypatch):
    """Groups measure their own points alone, so that samples and processes can be
    counted.
    """
    monkeypatch.setattr(session, "ANCHORS", ())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    return folder, measure([TABLE, ALONE, CHECKED], folder)


def found(measured, group: str, *points):
    """The results of these points of a group."""
    results = {r.point: r for r in measured[1] if r.group == group}
    return [results[point] for point in points]


@pytest.mark.parametrize("system", VERDICTS)
def test_what_cannot_be_quoted_says_why(measured, system):
    status, said = VERDICTS[system]
    (row,) = found(measured, "table", TINY.but(system=f"broken:{system}"))
    assert row.status == status and said in row.reason and "\n" not in row.reason
    assert (row.median is not None) == (status == "suspect"), (
        "no time without a passed check"
    )


def test_a_right_system_is_checked_then_timed(measured):
    (row,) = found(measured, "table", TINY)
    assert row.status == "ok" and 0 < row.errors["out"] <= row.tolerance["out"] == 5e-6
    assert (
        len(row.seconds) >= FEWEST_LONG
        and row.median == median(row.seconds)
        and row.warmups >= 2
    )
    assert row.ci[0] <= row.median <= row.ci[1]
    assert (
        row.memory["tracked_peak_bytes"]
        >= row.memory["floor_bytes"]
        == 4 * 64 * 2 * 8 * 4
    )


def test_points_of_a_table_take_turns_in_processes_of_their_own(measured):
    folder, _ = measured
    a, b, c = found(measured, "table", TINY, CAUSAL, DENSE)
    ids = [r.point.id for r in (a, b, c)]
    taken = [
        (r["round"], r["point"])
        for r in rows_of(folder, "sample")
        if r["run"] == a.run and r["point"] in ids
    ]
    assert [number for number, _ in taken[:30]] == [
        number for number in range(10) for _ in ids
    ]
    firsts = {point for i, (_, point) in enumerate(taken[:30]) if i % 3 == 0}
    assert firsts == set(ids), "each is first in some round"
    assert (
        a.run == b.run and ratio(a, b).paired and ratio(a, b).rounds == len(a.seconds)
    )
    apart = found(measured, "alone", TINY, CAUSAL)
    samples = [r for r in rows_of(folder, "sample") if r["run"] == apart[0].run]
    order = [r["point"] for r in samples if r["point"] in ids]
    assert order == sorted(order, key=order.index) and not ratio(*apart).paired


def test_a_group_may_be_checked_without_being_timed(measured):
    row, wrong = found(measured, "checked", TRAINED, WRONG_GRADIENT)
    assert row.status == "ok" and row.median is None and row.seconds == ()
    assert set(row.errors) == {"out", "lse", "dq", "dk", "dv"}
    assert row.memory["floor_bytes"] == 8 * 64 * 2 * 8 * 4
    assert wrong.status == "incorrect" and wrong.reason.startswith("dv is off by"), (
        "even if the output is right"
    )


def test_rows_say_where_they_come_from_and_not_on_which_host(measured):
    folder, results = measured
    assert load(folder) == results
    for r in results:
        p = r.provenance
        assert (
            p["engine"] == provenance.engine_hash()
            and p["torch"] == torch.__version__
            and p["device"] == "cpu"
        )
        assert (
            len(p["machine"]) == 12
            and p["threads"] >= 1
            and p["seed"] == r.point.id
            and p["utc"].endswith("Z")
        )
        assert {
            "commit",
            "dirty",
            "ringlab",
            "python",
            "device_name",
            "cpu",
        } <= p.keys()
    rows = [json.loads(line) for line in (folder / store.NAME).read_text().splitlines()]
    assert {row["schema"] for row in rows} == {store.SCHEMA}
    values = {str(v) for row in rows for v in row.get("provenance", {}).values()}
    assert platform.node() not in values and str(Path.home()) not in values


# --------------------------------------------------------------------------------------
# again


@pytest.mark.usefixtures("no_anchors")
def test_a_rerun_measures_only_what_is_missing(measured, tmp_path, monkeypatch, capsys):
    folder, _ = measured
    rows = (folder / store.NAME).read_text().splitlines(keepends=True)
    kept, lost = found(measured, "alone", TINY, CAUSAL)
    of_run = [row for row in rows if kept.run in row]
    text = "".join(of_run)[:-25]  # the second result lost its end
    (tmp_path / store.NAME).write_text(text)
    again = measure([ALONE], tmp_path)
    assert (
        capsys.readouterr().err.count("skipped 1 unreadable or incomplete row (line")
        == 1
    )
    assert (
        again[0] == kept
        and again[1].point == lost.point
        and again[1].seconds == lost.seconds
    )
    rows = (tmp_path / store.NAME).read_text()
    bad = [line for line in rows.splitlines() if not line.endswith("}")]
    assert bad == text.splitlines()[-1:], "the next row starts on a fresh line"

    def started(**how) -> list[str]:
        (tmp_path / store.NAME).write_text(rows)
        found = measure([ALONE], tmp_path, workers=(made := MadeUp()), **how)
        assert found == again or made.started
        return made.started

    assert started() == [], "all done: no process"
    assert started(force=True) == ["ringlab"] * 2
    monkeypatch.setattr(provenance, "engine_hash", lambda: "another")
    assert started() == ["ringlab"] * 2


def stored(folder) -> list[Result]:
    """All results in a folder, those of anchors too."""
    return store.scan((folder / store.NAME).read_bytes())[0]


def test_every_timed_group_has_rows_of_the_anchors(measured):
    folder, results = measured
    rows = [r for r in stored(folder) if r.option(ANCHOR)]
    assert [r.point for r in rows] == [*ANCHORS, *ANCHORS]
    table, alone = rows[:3], rows[3:]
    (beside,) = found(measured, "table", TINY)
    for row in table:
        assert row.status == "ok" and len(row.seconds) >= 10
        assert ratio(row, beside).paired, "they took turns with the points"
    assert {r.group for r in alone} == {"alone"}
    assert not any(r.option(ANCHOR) for r in [*results, *store.read(folder)])
    assert ANCHORS[0].without_control == Point(
        "dense_sdpa", patterns.Dense(), seq_len=1024
    )


@pytest.mark.usefixtures("no_anchors")
def test_only_what_crashed_is_tried_again(measured, tmp_path):
    shutil.copy(measured[0] / store.NAME, tmp_path)
    measure([TABLE, CHECKED], tmp_path, workers=(made := MadeUp()))
    assert made.started == [
        f"broken:{name}"
        for name, (status, _) in VERDICTS.items()
        if status == "crashed"
    ]


def test_processes_of_a_group_start_side_by_side_and_may_build_their_systems_at_once(
    tmp_path,
):
    points = [TINY, TINY.but(system="nothing"), CAUSAL]
    results = measure(
        [Group("both", points, timed=False)], tmp_path, workers=(made := MadeUp())
    )
    assert [command for command, _ in made.asked] == ["start"] * 3 + ["prepare"] * 3
    early = lambda settings, ranks=1: OneProbe(settings | {"early": True}, ranks)  # noqa: E731
    results = measure([Group("real", points, timed=False)], tmp_path, workers=early)
    assert [r.status for r in results] == ["ok", "unsupported", "ok"] and results[
        0
    ].errors["out"] <= 5e-6
    assert [r.reason[:24] for r in results] == ["", "unknown system 'nothing'", ""]


def test_a_run_begins_no_group_after_its_minutes_and_the_next_goes_on(tmp_path, capsys):
    now, groups = 0.0, [Group(name, [TINY], timed=False) for name in "abc"]

    def tick(command):
        nonlocal now
        now += 20.0  # twice for each point
        return {}

    def begun(minutes):
        found = measure(
            groups,
            tmp_path,
            workers=(made := MadeUp(tick)),
            clock=lambda: now,
            minutes=minutes,
        )
        return len(made.started), [r.group for r in found]

    assert begun(1.0) == (2, ["a", "b"])
    assert capsys.readouterr().err.endswith(
        "1 minutes are over: 1 points are left, of c; run again to go on\n"
    )
    groups.append(Group("d", [TINY], timed=False))
    assert begun(0.1) == (1, ["a", "b", "c"]), "one always is"


def interruptible(channel, points, folder):
    """A run in a process of its own, as from a shell."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the server that forks it ignores Ctrl-C
    provenance.threads = lambda: 1
    try:
        run([Group("slow", points)], folder, profile="cpu", progress=True)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(1)


@pytest.mark.parametrize(
    "stop, code", [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_run_stopped_at_any_moment_goes_on_at_its_next_round(
    stop, code, tmp_path, broken
):
    points = [
        TINY.but(system="broken:slow", options={"x": x, "stop": int(stop)})
        for x in range(3)
    ]
    path, deadline = tmp_path / store.NAME, time.monotonic() + 120
    with open(tmp_path / "said", "w") as said:
        process = launch.Process(
            interruptible, points, tmp_path, output=(1, said.fileno())
        )
    while not path.exists() or path.read_text().count('"sample"') < 10:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [
        int(file.read_text()) for p in points for file in broken.glob(f"pid-{p.id}-*")
    ]
    (server,) = {
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in workers
    }
    assert len(workers) == 3 and all(map(alive, [server, *workers])), (
        "one process forked them all"
    )
    os.kill(process.pid, stop)
    with pytest.raises(launch.Ended) as ended:
        process.receive()
    assert ended.value.code == code and gone([server, *workers], 60.0), (
        "they end with their session"
    )
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0].startswith("slow: 3 points, taking turns (") and not [
        line for line in said if "Traceback" in line
    ]
    assert said[-1].startswith("interrupted: 0 of 3 points are kept") == (
        stop == signal.SIGINT
    )

    before = rows_of(tmp_path, "sample")
    results = measure([Group("slow", points)], tmp_path)
    after = rows_of(tmp_path, "sample")
    assert after[: len(before)] == before and len(before) >= 10
    counts = [len(r.seconds) for r in results]
    assert 10 <= min(counts) == max(counts) <= 20
    kept = stored(tmp_path)
    assert len(after) == sum(len(r.seconds) for r in kept), (
        "no sample is lost or taken twice"
    )
    assert {r.run for r in results} == {before[0]["run"]} == {r["run"] for r in after}
    paired = ratio(results[0], results[2])
    assert paired.paired and paired.rounds >= counts[0] - 1, (
        "the round that was cut has samples of some points"
    )


# --------------------------------------------------------------------------------------
# processes that misbehave


@pytest.mark.usefixtures("no_anchors")
def test_a_point_that_never_ends_is_timed_out(tmp_path):
    start = time.monotonic()
    group = Group("slow", [TINY.but(system="broken:sleeps")])
    (result,) = measure([group], tmp_path, timeout_s=1.5)
    assert result.status == "timeout" and result.reason == "took more than 1.5 s"
    assert time.monotonic() - start < 60
    for timeout_s, started in ((1.0, 0), (2.0, 1)):  # it is tried again with more time
        measure([group], tmp_path, timeout_s=timeout_s, workers=(made := MadeUp()))
        assert len(made.started) == started


def test_a_server_of_processes_that_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "server", launch.server.__wrapped__)
    resource_tracker.ensure_running()
    false = os.fsencode(shutil.which("false"))
    monkeypatch.setattr(spawn, "get_executable", lambda: false)
    results = measure([Group("g", [TINY, DENSE])], tmp_path)
    assert [r.status for r in results] == ["crashed"] * 2
    assert (
        results[0].reason
        == "the worker ended with exit code 1: the server of processes could not run"
    )


def test_a_server_of_processes_that_is_killed_is_started_again(tmp_path, monkeypatch):
    """Its workers live on."""
    forks = launch.server(-1, workers.__name__)
    monkeypatch.setattr(launch, "server", lambda *_: forks)
    begun = []

    def kill(command):
        begun.append(command)
        if command in ("start", "sample") and begun.count(command) == 2:
            os.kill(forks._forkserver_pid, signal.SIGKILL)
            assert gone([forks._forkserver_pid], 10.0)

    class Mortal(OneProbe):
        def __init__(self, *settings):
            super().__init__(*settings)
            kill("start")

        def ask(self, command, timeout_s, **arguments):
            kill(command)
            return super().ask(command, timeout_s, **arguments)

    results = measure(
        [Group("g", [TINY, CAUSAL, DENSE]), Group("h", [TINY])],
        tmp_path,
        workers=Mortal,
    )
    assert [r.status for r in results] == ["ok"] * 4


def test_a_probe_that_fails_leaves_rows_without_a_bound(tmp_path, capsys):
    def reply(command):
        return (
            {"status": "crashed", "reason": "a bad day"} if command == "probe" else {}
        )

    (result,) = measure([Group("g", [TINY])], tmp_path, workers=MadeUp(reply))
    assert result.status == "ok" and result.median and result.bound_seconds is None
    assert (
        "could not be measured, so these rows have no lower bound: a bad day"
        in capsys.readouterr().err
    )


def test_progress_is_a_line_a_group_and_a_point_and_at_times_what_is_at_work(
    tmp_path, capsys
):
    clock, refused = (
        itertools.count(0, 11),
        {"status": "unsupported", "reason": "needs another machine"},
    )
    made = MadeUp(lambda command: refused if command == "verify" else {})
    how = {"workers": made, "clock": lambda: next(clock)}
    measure([Group("g", [TINY, CAUSAL])], tmp_path, progress=True, **how)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("g: 2 points, taking turns (")
    assert said[-2].startswith("[1/2] g: ringlab, dilated") and said[-2].endswith(
        "unsupported: needs another machine"
    )
    for start, inside in (("prepare ringlab", ""), ("g: round ", " of 6 (")):
        assert any(
            line.startswith(start) and inside in line and line.endswith(" left)")
            for line in said
        )
    measure([Group("quiet", [TINY, CAUSAL])], tmp_path, **how)
    assert capsys.readouterr().err == ""


def test_all_whole_points_are_told_when_a_run_stops_and_after_each_group(tmp_path):
    """Those of earlier runs too."""
    groups, left = [Group(name, [TINY], timed=False) for name in "abcd"], []

    def stop(command):
        if command == "prepare" and made.started == ["ringlab"] * 2:
            raise KeyboardInterrupt
        return {}

    for there in (1, 2, 3):
        made = MadeUp(stop)
        how = {"workers": made, "after": lambda *step: left.append(step)}
        with pytest.raises(Interrupted, match=f": {there} of 4 points are kept"):
            measure(groups, tmp_path, **how)
    a, b, c, _ = groups
    assert left == [(None, 4), (a, 3), (None, 3), (b, 2), (None, 2), (c, 1)]


def test_the_time_left_follows_what_points_took_before():
    """A slow group first: no longer than it took before, so the rest is neither."""
    took = {("slow", TINY.id): 1140.0, ("quick", TINY.id): 60.0}
    took["quick", CAUSAL.id] = 600.0
    now = 0.0
    progress = session.Progress(took, False, lambda: now)
    told = [progress.left()]
    for name, seconds in (("slow", 1140.0), ("quick", 60.0)):
        now += seconds
        progress.result(Result(TINY, name, "ok"))
        told.append(progress.left())
    assert told == ["30 min left", "11 min left", "10 min left"]
    now += 1260.0  # twice as long as before, from here on
    progress.did("half", 300.0)
    assert progress.left() == "8 min left"


def test_others_are_the_busy_time_that_is_not_ours(monkeypatch):
    monkeypatch.setattr(
        session, "CONTENTION", 0.1
    )  # other tests run beside this one, and do not count
    monkeypatch.setattr(session.os, "cpu_count", lambda: 4)
    tick, now = os.sysconf("SC_CLK_TCK"), {"wall": 0.0, "ours": 0.0, "stat": None}
    monkeypatch.setattr(hardware.Probe, "read", lambda probe, path: now["stat"])

    def watched(wall, others=None, **more):
        others = others or session.CpuContention(threads=3, clock=lambda: now["wall"])
        with others.watched(lambda: now["ours"]):
            now.update(more, wall=now["wall"] + wall)
        return others

    def stat(user, idle, stolen=0):
        return (
            f"cpu  {user * tick} 0 0 {idle * tick} 0 0 0 {stolen * tick} 0 0\ncpu0 0\n"
        )

    unknown = watched(5.0, stat=stat(10, 50))
    assert unknown.cores is None and not unknown.high, "no /proc/stat at first"
    others = watched(
        2.0, ours=3.0, stat=stat(15, 90, stolen=1)
    )  # 6 seconds busy: 3 of them ours, 1 stolen
    assert others.cores == pytest.approx(1.5, abs=0.02) and others.high, (
        "2.5 cores for 3 threads"
    )
    assert (
        watched(6.0, others).cores == pytest.approx(0.38, abs=0.02) and not others.high
    )
    short = watched(0.5, stat=stat(99, 90))
    assert short.cores is None and not short.high, "too short to tell"


def test_rows_that_others_disturbed_are_measured_again_once_it_is_quiet(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        session.time, "sleep", lambda seconds: None
    )  # to see whether it is quiet now

    class Crowded(session.CpuContention):
        cores, high = 1.5, True

    class Quiet(Crowded):
        high = False

    group = Group("g", [TINY])
    first, kept, again, last = (
        measure(
            [group], tmp_path, workers=MadeUp(), contention=contention, progress=True
        )[0]
        for contention in (Crowded, Crowded, Quiet, Quiet)
    )
    assert (
        first.unstable
        and first.provenance["crowded"]
        and first.provenance["others_cores"] == 1.5
    )
    assert first.bound_seconds is None, "rates that others disturb give no bound"
    assert first.run == kept.run != again.run == last.run and again.bound_seconds
    said = capsys.readouterr().err
    assert (
        "so that these times are too long" in said
        and "rows that other work disturbed are kept" in said
    )


def test_rounds_that_a_group_asks_for_are_taken_as_far_as_the_time_limit_allows(
    tmp_path,
):
    group = Group("g", [TINY], rounds=40)
    assert group.composition(TINY) != Group("g", [TINY]).composition(TINY)
    for timeout_s, count in (
        (120.0, 40),
        (4.0, 6),
    ):  # samples of half a second
        (row,) = measure(
            [group], tmp_path / f"{timeout_s}", workers=MadeUp(), timeout_s=timeout_s
        )
        assert len(row.seconds) == count


@pytest.mark.usefixtures("no_anchors")
def test_unstable_points_get_more_rounds_while_there_is_time(tmp_path, monkeypatch):
    """The first samples are of a disturbed machine, the later ones are not; or all are."""
    group = Group("g", [TINY, CAUSAL])

    def counts(name, seconds, more_s=1e9):
        taken = itertools.chain(seconds, itertools.repeat(0.1))
        made = MadeUp(
            lambda command: {"seconds": next(taken)} if command == "sample" else {}
        )
        monkeypatch.setattr(session, "MORE_S", more_s)
        rows = measure(
            [group],
            tmp_path / name,
            workers=made,
            clock=itertools.count().__next__,
            timeout_s=1e9,
        )
        assert store.load(tmp_path / name) == rows
        return [len(r.seconds) for r in rows], [r.unstable for r in rows]

    assert counts("steady", []) == ([6, 6], [False, False])
    # The two take turns in coming first: one is slow in its first three rounds.
    assert counts("burst", [0.3, 0.1, 0.1, 0.3, 0.3, 0.1]) == (
        [13, 6],
        [False, False],
    ), "until both halves agree"
    assert counts("little time", [0.3, 0.1, 0.1, 0.3, 0.3, 0.1], more_s=1.0) == (
        [7, 6],
        [True, False],
    )
    assert counts("always", [0.03 * 1.05**i for i in range(99)]) == (
        [18, 18],
        [True, True],
    ), "three times the rounds"
    assert max(counts("long", [0.9 * 1.05**i for i in range(99)])[0]) == 8, (
        "three seconds of each"
    )


IMPOSSIBLE = [
    ([ALONE, ALONE], {}, "two groups have the name 'alone'"),
    ([TINY], {}, "must be measure.Group objects, got Point"),
    ([ALONE], {"timeout_s": -1}, "timeout_s must be positive"),
    ([ALONE], {"minutes": 0}, "minutes must be positive, got 0"),
    ([ALONE], {"profile": "h100"}, "torch drives none here"),
]


@pytest.mark.parametrize("groups, more, why", IMPOSSIBLE)
def test_a_run_that_cannot_be_is_one_line(tmp_path, groups, more, why):
    with pytest.raises(ValueError, match=why):
        run(groups, tmp_path, **({"profile": "cpu"} | more))
    assert not list(tmp_path.iterdir())
    with (
        store.Store(tmp_path),
        pytest.raises(Busy, match="in use by another measurement"),
    ):
        measure([ALONE], tmp_path)
