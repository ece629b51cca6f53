"""Measuring: no number without a passed check, no failure that stops a run, no row lost or counted twice."""

import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from ringlab import hardware, patterns
from ringlab.measure import STATUSES, Busy, Group, Interrupted, Point, Result, load, main, ratio, run, select, sgemm

from ringlab.measure import provenance, runner, stats, store, suites, timing, worker  # isort: skip
from ringlab.measure.systems import SYSTEMS, build

BROKEN = '''
import os, signal, time
import torch
from dataclasses import replace
from ringlab import attention
from ringlab.measure.systems import Output, System

def right(q, k, v):
    return attention(q, k, v, PATTERN), None

def system(forward, point, device, **cost):
    global PATTERN
    made = System(point, device, forward)
    PATTERN = made.pattern
    made.cost = replace(made.cost, **cost)
    return made

def zeros(p, d): return system(lambda q, k, v: (torch.zeros_like(q), None), p, d)
def nans(p, d): return system(lambda q, k, v: (q * float("nan"), None), p, d)
def wide(p, d): return system(lambda q, k, v: (right(q, k, v)[0].double(), None), p, d)
def short(p, d): return system(lambda q, k, v: (right(q, k, v)[0][:, :-1], None), p, d)
def bad_grad(p, d): return system(lambda q, k, v: (right(q, k, v)[0] + 0.1 * (q - q.detach()), None), p, d)
def raises(p, d): return system(lambda q, k, v: 1 / 0, p, d)
def refuses(p, d): raise NotImplementedError("needs another machine")
def starves(p, d): return system(lambda q, k, v: (torch.ones(1 << 31, dtype=torch.uint8), None), p, d)
def exhausted(p, d): raise MemoryError
def too_fast(p, d): return system(right, p, d, folded_flops=10**18)
def too_small(p, d): return system(right, p, d, floor_bytes=10**9)
def sleeps(p, d): return system(lambda q, k, v: time.sleep(1000), p, d)
def killed(p, d): return system(lambda q, k, v: os.kill(os.getpid(), signal.SIGKILL), p, d)

def turns(p, d):
    calls = []
    def forward(q, k, v):
        calls.append(0)
        return (right(q, k, v)[0] if len(calls) < 3 else torch.zeros_like(q)), None
    return system(forward, p, d)
'''

PATTERN = patterns.Dilated([16, 32], [1, 2])
TINY = Point("ringlab", PATTERN, seq_len=64, heads=2, head_dim=8)


@pytest.fixture(autouse=True, scope="module")
def broken(tmp_path_factory):
    """A module of systems that misbehave, importable here and in workers."""
    folder = tmp_path_factory.mktemp("systems")
    (folder / "broken.py").write_text(BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(provenance, "threads", lambda: 1)  # tiny work: a second thread only waits
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch):
    """Constant peaks instead of a second of probing, and short samples."""
    for name, value in {"MIN_SAMPLE_S": 0.002, "MAX_SAMPLES": 10}.items():
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(worker, "WARM_S", 0.0)
    peaks = hardware.Peaks(1e12, 1e11, 1e12, cache_bytes=2**25)
    monkeypatch.setattr(hardware, "measure_cpu_peaks", lambda *_: peaks)


def inside(*points, **group) -> dict:
    """Run a group in this process; the rows that a worker would send, results by system."""
    rows = []
    made = Group("test", points, **group)
    worker.measure(made, {"device": "cpu", "profile": "cpu"}, lambda **row: rows.append(row))
    systems = {p.id: p.system for p in points}
    return {systems[r["point"]]: r for r in rows if r["kind"] == "result"} | {"rows": rows}


# ---------------------------------------------------------------------------------------------------------------------
# one worker, in this process


def test_a_right_system_is_checked_then_timed(quick):
    found = inside(TINY, sgemm(64))
    row = found["ringlab"]
    assert row["status"] == "ok" and 0 < row["errors"]["out"] <= row["tolerance"]["out"] == 5e-6
    taken = [r["seconds"] for r in found["rows"] if r["kind"] == "sample" and r["point"] == TINY.id]
    assert len(taken) >= 10 and row["median"] == median(taken) and row["warmups"] >= 2
    assert row["q1"] <= row["median"] <= row["q3"] and row["ci"][0] <= row["median"] <= row["ci"][1]
    assert row["memory"]["tracked_peak_bytes"] >= row["memory"]["floor_bytes"] == 4 * 64 * 2 * 8 * 4
    rate = found["sgemm"]["cost"]["flops"] / found["sgemm"]["median"]
    assert row["share"] == pytest.approx(row["cost"]["flops"] / row["median"] / rate)
    assert found["sgemm"]["share"] == pytest.approx(1.0)


def test_interleaved_samples_take_turns(quick):
    other = TINY.but(options={"gather": True})
    rows = inside(TINY, other)["rows"]
    order = [r["point"] for r in rows if r["kind"] == "sample"]
    assert order == [TINY.id, other.id] * (len(order) // 2)
    apart = inside(TINY, other, interleave=False)["rows"]
    order = [r["point"] for r in apart if r["kind"] == "sample"]
    assert order == sorted(order, key=order.index)


@pytest.mark.parametrize(
    "system, status, said",
    [
        ("zeros", "incorrect", "out is off by 1.0e+00, allowed 5.0e-06"),
        ("nans", "incorrect", "out is off by inf"),
        ("wide", "incorrect", "out is off by inf"),
        ("short", "incorrect", "out is off by inf"),
        ("turns", "incorrect", "between the checked and the last call"),
        ("raises", "crashed", "ZeroDivisionError: division by zero"),
        ("refuses", "unsupported", "needs another machine"),
        ("exhausted", "oom", "MemoryError"),
        ("too_fast", "suspect", "is below its bound of"),
        ("too_small", "suspect", "smaller than its own tensors"),
    ],
)
def test_what_cannot_be_quoted_says_why(quick, system, status, said):
    point = TINY.but(system=f"broken:{system}")
    found = inside(point, TINY)
    row = found[point.system]
    assert row["status"] == status and said in row["reason"] and "\n" not in row["reason"]
    assert ("median" in row) == (status == "suspect"), "no time without a passed check"
    assert found["ringlab"]["status"] == "ok", "the others go on"


def test_wrong_gradient_is_incorrect_even_if_the_output_is_right(quick):
    row = inside(TINY.but(system="broken:bad_grad", passes="fwd+bwd"))["broken:bad_grad"]
    assert row["status"] == "incorrect" and row["reason"].startswith("dq is off by")


def test_untimed_group_has_memory_and_no_time(quick):
    found = inside(TINY.but(passes="fwd+bwd"), timed=False)
    row = found["ringlab"]
    assert row["status"] == "ok" and "median" not in row and not [r for r in found["rows"] if r["kind"] == "sample"]
    assert set(row["errors"]) == {"out", "lse", "dq", "dk", "dv"}
    assert row["memory"]["floor_bytes"] == 8 * 64 * 2 * 8 * 4


# ---------------------------------------------------------------------------------------------------------------------
# the systems


@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2, "seq_len": 100, "heads": 6, "kv_heads": 2, "pattern": patterns.Dilated([16, 25, 48], [1, 4, 7])},
        {"pattern": patterns.Dilated([32, 64], [2, 4], "head_groups", "branch"), "seq_len": 192},
        {"pattern": patterns.Dilated([8, 16], [1, 2], offsets="kv_head"), "heads": 4, "kv_heads": 2},
        {"pattern": patterns.Dilated([8, 16], [1, 2]), "dtype": "float64"},
        {"pattern": patterns.Dilated([32, 64], [1, 2]), "dtype": "bfloat16", "seq_len": 256},
    ],
)
def test_copying_form_is_the_same_function(changes, causal, passes):
    point = TINY.but(system="copying", causal=causal, passes=passes, **changes)
    system = build(point, "cpu")
    inputs = system.inputs()
    errors, tolerance = system.check(inputs, system.run(inputs))
    assert errors.keys() == ({"out"} if passes == "fwd" else {"out", "dq", "dk", "dv"})
    assert all(errors[name] <= tolerance[name] for name in errors), (errors, tolerance)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
def test_every_system_passes_its_own_check(name, passes):
    pattern = patterns.Dilated([16, 32], [1, 2], "head_groups", "branch")
    point = TINY.but(system=name, passes=passes, pattern=patterns.Dense() if name == "dense_sdpa" else pattern)
    point = sgemm(64) if name == "sgemm" else point
    system = build(point, "cpu")
    inputs = system.inputs()
    output = system.run(inputs)
    errors, tolerance = system.check(inputs, output)
    assert errors and all(errors[k] <= tolerance[k] for k in errors), (errors, tolerance)
    assert system.cost.flops > 0
    assert sum(t.nbytes for t in [*inputs, output.out, *output.grads]) == system.cost.floor_bytes


def test_inputs_come_from_the_points_own_seed():
    one, same = (build(TINY, "cpu").inputs() for _ in range(2))
    other = build(TINY.but(options={"pool": True}), "cpu").inputs()
    assert all(torch.equal(a, b) for a, b in zip(one, same)) and not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"system": "flashy"}, "unknown system 'flashy'; known: ringlab, dense_sdpa"),
        ({"options": {"speed": 9}}, "ringlab has no option 'speed'; known: backend, gather, cache, pool"),
        ({"system": "dense_sdpa"}, "dense_sdpa computes dense attention"),
        ({"system": "contiguous_segments", "seq_len": 60}, "whole segments of 16"),
        ({"system": "RingDilatedAttentionV2Flash"}, "head groups with offsets by branch"),
    ],
)
def test_a_point_that_makes_no_sense_is_refused_in_one_line(changes, said):
    with pytest.raises(ValueError, match="^[^\n]*$") as error:
        build(TINY.but(**changes), "cpu")
    assert said in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# real workers

GOOD = (TINY, TINY.but(causal=True))
GROUP = Group("mixed", [*GOOD, *(TINY.but(system=f"broken:{n}") for n in ("killed", "starves"))], interleave=False)
ALONE = Group("mixed", GOOD, interleave=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    return folder, run([GROUP], folder, profile="cpu", progress=False, memory_bytes=1 << 30)


def test_a_dead_worker_costs_its_point_alone(measured):
    folder, results = measured
    found = {r.point.system: r for r in results}
    assert found["broken:killed"].status == "crashed" and "SIGKILL" in found["broken:killed"].reason
    assert found["broken:starves"].status == "oom" and "can't allocate memory" in found["broken:starves"].reason
    assert [(r.status, r.point.causal) for r in select(results, system="ringlab")] == [("ok", False), ("ok", True)]
    assert len(found["ringlab"].seconds) >= 10 and found["ringlab"].ci[0] <= found["ringlab"].median
    assert not found["broken:killed"].final and found["broken:starves"].final
    assert {r.status for r in results} <= set(STATUSES)
    assert load(folder) == results


def test_rows_say_where_they_come_from_and_not_on_which_host(measured):
    folder, results = measured
    for r in results:
        p = r.provenance
        assert p["engine"] == provenance.engine_hash() and p["torch"] == torch.__version__ and p["device"] == "cpu"
        assert len(p["machine"]) == 12 and p["threads"] >= 1 and p["seed"] == r.point.id and p["utc"].endswith("Z")
        assert {"commit", "dirty", "ringlab", "python", "device_name", "cpu", "load_average"} <= p.keys()
    rows = [json.loads(line) for line in (folder / store.NAME).read_text().splitlines()]
    assert all(row["schema"] == store.SCHEMA and row["rehearsal"] is False for row in rows)
    values = {str(v) for row in rows for v in row.get("provenance", {}).values()}
    assert platform.node() not in values and str(Path.home()) not in values


def test_a_rerun_measures_only_what_is_missing(measured, tmp_path, monkeypatch, capsys):
    folder, results = measured
    rows = (folder / store.NAME).read_text().splitlines(keepends=True)
    last = next(i for i, row in enumerate(rows) if '"kind": "result", "point": "' + GOOD[1].id in row)
    text = "".join(rows[: last + 1])
    (tmp_path / store.NAME).write_text(text[:-25])  # the second result lost its end
    kept, lost = select(results, system="ringlab")
    again = run([ALONE], tmp_path, profile="cpu", progress=False)
    assert capsys.readouterr().err.count("skipped 1 unreadable or incomplete row (line") == 1
    assert again[0] == kept and again[1].point == lost.point and again[1].run != lost.run
    lines = (tmp_path / store.NAME).read_text().splitlines()
    bad = [line for line in lines if not line.endswith("}")]
    assert len(bad) == 1 and bad[0] == text[:-25].splitlines()[-1], "the next row starts on a fresh line"

    asked = []
    monkeypatch.setattr(runner._Session, "run_group", lambda self, group, points: asked.append((group.name, points)))
    assert run([ALONE], tmp_path, profile="cpu", progress=False) == again and not asked, "all done: no process"
    run([ALONE], tmp_path, profile="cpu", progress=False, rehearsal=True)
    assert asked.pop() == ("mixed", list(GOOD)), "a rehearsal's rows are not real ones"
    run([ALONE], tmp_path, profile="cpu", progress=False, force=True)
    assert asked.pop() == ("mixed", list(GOOD))
    monkeypatch.setattr(provenance, "engine_hash", lambda: "another")
    run([ALONE], tmp_path, profile="cpu", progress=False)
    assert asked.pop() == ("mixed", list(GOOD))


def test_a_point_that_never_ends_is_timed_out(tmp_path):
    start = time.monotonic()
    point = TINY.but(system="broken:sleeps")
    (result,) = run([Group("slow", [point])], tmp_path, profile="cpu", timeout_s=0.5, progress=False)
    assert result.status == "timeout" and result.reason == "took more than 0.5 s" and result.final
    assert time.monotonic() - start < 60


def test_a_worker_ends_with_its_runner():
    process = runner._start(subprocess.DEVNULL)
    request = {"group": "g", "interleave": True, "timed": True, "device": "cpu", "threads": 1,
               "points": [TINY.but(system="broken:sleeps").to_dict()]}  # fmt: skip
    process.stdin.write((json.dumps(request) + "\n").encode())
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["kind"] == "at"
    process.stdin.close()
    assert process.wait(timeout=30) == 1


# ---------------------------------------------------------------------------------------------------------------------
# the runner, with stand-ins for workers


def stand_in(monkeypatch, script: str) -> list:
    """Workers that run ``script`` instead; the list of those started."""
    started = []

    def start(stderr):
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=stderr, start_new_session=True)  # fmt: skip
        started.append(process)
        return process

    monkeypatch.setattr(runner, "_start", start)
    return started


PROTOCOL = """
import hashlib, json, os, sys
request = json.loads(sys.stdin.readline())
points = {}
for p in request["points"]:
    text = json.dumps(p, sort_keys=True, separators=(",", ":"))
    points[hashlib.sha256(text.encode()).hexdigest()[:16]] = p["system"]
def say(**row): print(json.dumps(row), flush=True)
for number in range(2):
    for id, system in points.items():
        say(kind="at", point=id)
        if system == "DIE": os.abort()
        say(kind="sample", point=id, round=number, seconds=1.0 + number, loops=1)
for id in points:
    say(kind="result", point=id, duration=1.0, status="ok", median=1.5, q1=1, q3=2, ci=[1, 2])
sys.stdout.write('{"kind": "resu')
"""


def test_an_interleaved_group_goes_on_without_the_dead_point_and_is_tried_again_whole(tmp_path, monkeypatch):
    started = stand_in(monkeypatch, PROTOCOL)
    group = Group("g", [TINY, TINY.but(system="DIE"), TINY.but(causal=True)])
    results = run([group], tmp_path, profile="cpu", progress=False)
    found = {r.point: r for r in results}
    assert [found[p].status for p in group.points] == ["ok", "crashed", "ok"] and len(started) == 2
    assert "SIGABRT" in found[group.points[1]].reason and found[group.points[1]].seconds == ()
    a, b = found[group.points[0]], found[group.points[2]]
    assert a.run == b.run and a.seconds == (1.0, 2.0) and ratio(a, b).paired
    assert load(tmp_path) == results, "samples of the dead worker do not count"
    run([group], tmp_path, profile="cpu", progress=False)
    assert len(started) == 4, "killed from outside, perhaps: once more, with those it takes turns with"
    fine = Group("h", [TINY, TINY.but(causal=True)])
    for _ in range(2):
        run([fine], tmp_path, profile="cpu", progress=False)
        assert len(started) == 5


def test_ctrl_c_ends_the_worker_and_is_one_line(tmp_path, monkeypatch):
    started = stand_in(monkeypatch, "import time; time.sleep(1000)")

    def interrupted(self, lines):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner._Worker, "_listen", interrupted)
    with pytest.raises(Interrupted, match="^interrupted: 0 points measured are kept; run again to go on$"):
        run([Group("g", [TINY])], tmp_path, profile="cpu", progress=False)
    assert started[0].returncode == -9
    with pytest.raises(KeyboardInterrupt):
        raise Interrupted("is one")


def test_workers_that_die_at_once_or_talk_nonsense(tmp_path, monkeypatch):
    stand_in(monkeypatch, "import sys; print('no', file=sys.stderr); sys.exit('ImportError: no torch')")
    results = run([Group("g", [TINY, sgemm(8)])], tmp_path, profile="cpu", progress=False)
    assert [r.status for r in results] == ["crashed"] * 2
    assert results[0].reason == "the worker ended with exit code 1: ImportError: no torch" and not results[0].final


def test_progress_is_one_line_a_point(tmp_path, monkeypatch, capsys):
    stand_in(monkeypatch, "raise SystemExit(3)")
    run([Group("g", [TINY, sgemm(8)])], tmp_path, profile="cpu", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("[1/2] g: ringlab, dilated") and "left)" in lines[1]


def test_two_runs_in_one_folder_are_kept_apart(tmp_path):
    with store.Store(tmp_path), pytest.raises(Busy, match="in use by another measurement"):
        run([ALONE], tmp_path, profile="cpu", progress=False)


def test_main_answers_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for argv, code in (
        (["--suite", "x", "--data", str(tmp_path)], 2),
        (["--profile", "gtx180", "--data", str(tmp_path)], 2),
        (["--profile", "cpu", "--group", "x", "--data", str(tmp_path)], 2),
        (["--profile", "cpu", "--data", str(tmp_path / "file" / "deeper")], 1),
    ):
        assert main(argv) == code
        assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# rows


def result(point=TINY, group="g", seconds=(1.0, 2.0, 3.0), interleaved=False, **more) -> Result:
    described = {"median": 2.0, "q1": 1.5, "q3": 2.5, "ci": (1.0, 3.0)} if seconds else {}
    given = {"provenance": {"engine": "e"}, "run": "r1", "composition": "c1"} | described | more
    return Result(point=point, group=group, status="ok", seconds=seconds, interleaved=interleaved, **given)


def write(folder, *results):
    with store.Store(folder) as opened:
        for r in results:
            for i, s in enumerate(r.seconds):
                opened.append(kind="sample", run=r.run, point=r.point.id, round=i, seconds=s, loops=1)
            opened.append(**store.result_row(r, 1.0))


def test_rows_come_back_as_written_also_when_not_finite(tmp_path):
    r = result(errors={"out": float("inf")}, tolerance={"out": 5e-6}, share=0.5, memory={"floor_bytes": 7})
    write(tmp_path, r)
    assert load(tmp_path) == [r]
    assert "Infinity" not in (tmp_path / store.NAME).read_text()
    assert load(tmp_path / "nowhere") == []


def test_a_result_without_all_its_samples_does_not_count(tmp_path):
    write(tmp_path, result(), result(TINY.but(causal=True)))
    path, said = tmp_path / store.NAME, []
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]) + '[1]\n{"schema": 1}\n\x00\xff\n')
    assert [r.point.causal for r in load(tmp_path, warn=said.append)] == [True]
    assert len(said) == 1 and "skipped 4 " in said[0] and "(line 3, 8, 9, 10)" in said[0]


def test_the_newest_result_counts_and_an_interleaved_group_is_of_one_make_up(tmp_path):
    other = TINY.but(causal=True)
    old, new = result(run="r1"), result(run="r2")
    before = [result(p, "both", run="r3", composition="ab", interleaved=True) for p in (TINY, other)]
    after = result(TINY, "both", run="r4", composition="a", interleaved=True)
    write(tmp_path, old, new, *before, after)
    assert load(tmp_path) == [new, after]
    mine = replace(old, provenance={"engine": "mine"})
    write(tmp_path, mine, replace(new, run="r5"))
    assert select(load(tmp_path), "g")[0].run == "r5"
    assert select(load(tmp_path, prefer={"engine": "mine"}), "g") == [mine]


def test_other_schemas_are_left_alone(tmp_path):
    (tmp_path / store.NAME).write_text('{"schema": 2, "kind": "result"}\n')
    said = []
    assert load(tmp_path, warn=said.append) == [] and said == []


# ---------------------------------------------------------------------------------------------------------------------
# points


def test_a_points_id_is_its_content():
    same = Point("ringlab", PATTERN.to_dict(), seq_len=64, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    assert same == TINY and hash(same) == hash(TINY) and same.id == TINY.id
    assert Point.from_dict(json.loads(json.dumps(TINY.to_dict()))) == TINY
    changes = [{"seq_len": 65}, {"causal": True}, {"dtype": "bfloat16"}, {"options": {"a": 1}}, {"passes": "fwd+bwd"}]
    assert len({TINY.but(**c).id for c in changes} | {TINY.id}) == 6
    assert TINY.but(options={"b": 1, "a": 2}) == TINY.but(options=(("a", 2), ("b", 1)))
    for bad in ({"passes": "bwd"}, {"heads": 0}):
        with pytest.raises(ValueError):
            TINY.but(**bad)
    with pytest.raises(ValueError, match="holds a point twice"):
        Group("g", [TINY, same])


def test_composition_matters_only_where_points_take_turns():
    other = TINY.but(causal=True)
    assert Group("a", [TINY, other]).composition(TINY) != Group("a", [TINY]).composition(TINY)
    apart = [Group("a", points, interleave=False).composition(TINY) for points in ([TINY, other], [TINY])]
    assert apart[0] == apart[1]


# ---------------------------------------------------------------------------------------------------------------------
# statistics


def test_summary_of_known_numbers():
    s = stats.summary([10.0, 11.0, 12.0, 13.0, 14.0])
    assert (s.median, s.q1, s.q3, s.unstable) == (12.0, 11.0, 13.0, False)
    assert stats.summary([1.0, 1.0, 10.0, 10.0]).unstable
    assert stats.summary([3.0]) == stats.Summary(3.0, 3.0, 3.0, (3.0, 3.0), False)
    with pytest.raises(ValueError, match="no samples"):
        stats.summary([])


def test_bootstrap_is_the_same_on_every_call_and_covers():
    generator = random.Random(1)
    values = [generator.gauss(100, 5) for _ in range(30)]
    one = stats.summary(values)
    state = random.getstate()
    assert one == stats.summary(values) and random.getstate() == state, "seeded, and its own generator"
    assert one.ci[0] < one.median < one.ci[1] and one.ci[1] - one.ci[0] < 8
    hits = 0
    for _ in range(60):
        low, high = stats.summary([generator.gauss(100, 5) for _ in range(15)]).ci
        hits += low <= 100 <= high
    assert hits >= 50


def test_ratio_is_taken_round_by_round():
    # The machine slows down fourfold half way; each round still says 2.
    a, b = result(seconds=(2.0, 2.0, 8.0, 8.2)), result(seconds=(1.0, 1.0, 4.0, 4.1, 9.0))
    r = ratio(a, b)
    assert (r.value, r.ci, r.rounds, r.paired, r.significant) == (pytest.approx(2.0), (2.0, 2.0), 4, True, True)
    assert ratio([1.0, 4.0], [1.0, 1.0]).value == pytest.approx(2.0), "the median of logs is their geometric mean"
    assert not ratio([1.0, 1.0, 2.0], [1.0, 2.0, 1.0]).significant


def test_results_of_different_runs_are_not_paired():
    a, b = result(seconds=(4.0,) * 3), replace(result(seconds=(2.0,) * 3), run="r2")
    assert (ratio(a, b).value, ratio(a, b).paired) == (2.0, False)
    with pytest.raises(ValueError, match="needs samples"):
        ratio(a, result(seconds=()))


def test_loops_make_a_sample_long_enough():
    for seconds in (1e-6, 1e-4, 0.003, 0.02, 0.5):
        assert timing.loops_for(seconds) * seconds >= 0.005
    assert timing.rounds_for([0.01, 0.05], True) == [30, 30] and timing.rounds_for([], True) == []


# ---------------------------------------------------------------------------------------------------------------------
# provenance


def test_engine_hash_sees_code_and_nothing_else(tmp_path):
    source = 'def f(x):\n    return x + 1\n\nclass A:\n    y = "text"\n'
    same = '"""Module."""\n# comment\ndef f(x):\n    """Doc."""\n    return (x +\n            1)  # why\n\n\n'
    same += "class A:\n    'Doc.'\n    y = 'text'\n"

    def hashed(name, text, **others):
        package = tmp_path / name
        package.mkdir()
        (package / "patterns.py").write_text(text)
        for file, content in others.items():
            path = package / file.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".py").write_text(content)
        return provenance.engine_hash(package)

    base = hashed("a", source)
    assert hashed("b", same) == base
    assert hashed("c", source.replace("+ 1", "+ 2")) != base
    assert hashed("d", source.replace('"text"', '"Text"')) != base
    assert hashed("e", source.replace('    y = "text"', '    z = 1\n    y = "text"')) != base
    assert hashed("f", source, measure__worker="x = 1", report__driver="x = 1", cli="x = 1") == base
    assert hashed("g", source, kernels__eager="x = 1") != base
    assert hashed("h", source, hardware__detect="x = 1") != base


def test_commit_is_unknown_outside_a_checkout(tmp_path):
    (tmp_path / "patterns.py").write_text("")
    assert provenance.git_state(tmp_path) == ("unknown", "unknown")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_dirty_looks_aside_from_reports(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    package = tmp_path / "lib"
    package.mkdir()
    (package / "patterns.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "one")
    commit, dirty = provenance.git_state(package)
    assert len(commit) == 40 and dirty is False
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "rows").write_text("1")
    assert provenance.git_state(package) == (commit, False)
    (package / "patterns.py").write_text("x = 2\n")
    assert provenance.git_state(package) == (commit, True)


# ---------------------------------------------------------------------------------------------------------------------
# the suite of document 000


@pytest.mark.parametrize("name", ["cpu", "gtx1080", "v100", "h100", "generic"])
@pytest.mark.parametrize("rehearsal", [False, True])
def test_optimization_suite_holds_the_documents_points(name, rehearsal):
    profile = hardware.get_profile(name)
    device = "cpu" if rehearsal else profile.kind
    groups = suites.optimization(profile, device=device, rehearsal=rehearsal)
    assert len({g.name for g in groups}) == len(groups)
    table = groups[0].points
    dtypes = {p.dtype for p in table}
    assert {"float32", "float16"} <= dtypes and ("bfloat16" in dtypes) == (name in ("cpu", "h100") and
                                                                         not (name == "cpu" and rehearsal))  # fmt: skip
    full = [p for p in table if dict(p.options) == suites.FULL]
    plain = [p for p in table if dict(p.options) == suites.PLAIN]
    assert {"float32", "float16"} <= {p.dtype for p in full} & {p.dtype for p in plain}
    systems = {"RingDilatedAttentionV2Flash", "RingDilatedAttentionV2Collective", "dense_sdpa"}
    assert systems <= {p.system for p in table}
    for base, other in ((suites.PLAIN, suites.FULL), (suites.FULL, suites.PLAIN)):
        for switch in base if base is suites.FULL else ("gather", "backend"):
            wanted = TINY.but(options=base | {switch: other[switch]}).options
            assert any(p.options == wanted and p.dtype == "float32" for p in table), (switch, base)
    from ringlab.kernels import KERNELS

    assert {dict(p.options).get("backend") for p in table} >= {"auto", *KERNELS}
    assert ("engine forward" in {g.name for g in groups}) == (not rehearsal)
    for p in (p for g in groups for p in g.points):
        assert Point.from_dict(p.to_dict()) == p and p.system in SYSTEMS
