"""What measuring keeps: points by content, rows that come back, statistics by
hand-checked numbers, provenance.
"""

import json
import math
import random
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from reporting import write_rows
from ringlab import cost, hardware, patterns
from ringlab.measure import (
    Group,
    Point,
    Result,
    load,
    provenance,
    ratio,
    stats,
    store,
    timing,
    workers,
)

PATTERN = patterns.Dilated([16, 32], [1, 2])
TINY = Point("ringlab", PATTERN, seq_len=64, heads=2, head_dim=8)


# --------------------------------------------------------------------------------------
# rows


def result(
    point=TINY, group="g", seconds=(1.0, 2.0, 3.0), interleaved=False, **more
) -> Result:
    described = {"median": 2.0, "ci": (1.0, 3.0)} if seconds else {}
    given = (
        {"provenance": {"engine": "e"}, "run": "r1", "composition": "c1"}
        | described
        | more
    )
    return Result(
        point=point,
        group=group,
        status="ok",
        seconds=seconds,
        interleaved=interleaved,
        **given,
    )


def test_rows_come_back_as_written_also_when_not_finite(tmp_path):
    r = result(
        errors={"out": float("inf")}, tolerance={"out": 5e-6}, memory={"floor_bytes": 7}
    )
    write_rows(tmp_path, [r])
    assert load(tmp_path) == [r]
    assert "Infinity" not in (tmp_path / store.NAME).read_text()
    assert load(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "damage, skipped",
    [
        (
            lambda text: text.split("\n", 1)[1],
            "1 unreadable or incomplete row (line 3)",
        ),  # without its first sample
        (
            lambda text: text + '[1]\n{"schema": 1}\n\x00\xff\n',
            "3 unreadable or incomplete rows (line 9, 10, 11)",
        ),
        (
            lambda text: text.replace('2.0, "l', f'{10**400}, "l', 1),
            "2 unreadable or incomplete rows (line 2, 4)",
        ),
        (lambda text: text + '{"schema": 2, "kind": "result"}\n', ""),
    ],
)
def test_what_cannot_be_read_is_skipped_with_a_warning_and_other_schemas_without(
    tmp_path, capsys, damage, skipped
):
    write_rows(tmp_path, [result(), result(TINY.but(causal=True))])
    path = tmp_path / store.NAME
    path.write_text(damage(path.read_text()))
    found = [r.point.causal for r in load(tmp_path)]
    assert found == (
        [True] if "(line 2" in skipped or "(line 3" in skipped else [False, True]
    )
    said = capsys.readouterr().err
    assert bool(said) == bool(skipped) and skipped in said


NO_TIMES = ["0", "-1", "NaN", "Infinity", "1e308", "1e-300", "true", '"0.5"', "[1]"]


@pytest.mark.parametrize(
    "field, value",
    [
        *((f, x) for f in ("seconds", "median", "bound_seconds") for x in NO_TIMES),
        ("seconds", "null"),
        ("ci", "[NaN, 1]"),
        ("ci", "[2, 1]"),
    ],
)
def test_rows_that_are_no_times_are_told_by_line_and_never_read(
    tmp_path, capsys, field, value
):
    write_rows(tmp_path, [result(), result(TINY.but(causal=True))])
    path = tmp_path / store.NAME
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if f'"{field}"' in line)
    row = json.loads(lines[number]) | {field: json.loads(value)}
    path.write_text("\n".join([*lines[:number], json.dumps(row), *lines[number + 1 :]]))
    found = store.read(tmp_path)
    assert [r.point.causal for r in found] == [True]
    assert f"{path}: skipped" in (err := capsys.readouterr().err)
    assert f"line {number + 1}: {field} " in err and err.count("\n") == 1


@pytest.mark.parametrize("field", ["round", "point", "run"])
def test_a_run_goes_on_beside_samples_that_name_none(tmp_path, field):
    group = Group("g", (TINY,))
    key = list(provenance.key({}))
    sample = {
        "kind": "sample",
        "run": "r",
        "point": TINY.id,
        "round": 0,
        "seconds": 0.1,
    }
    with store.Store(tmp_path) as rows:
        rows.append(kind="run", run="r", group="g", members=group.id, key=key)
        for changed in ({}, {"seconds": 0}, {field: []}, {field: None}):
            rows.append(**sample | changed)
    _, runs = store.read_with_runs(tmp_path)
    assert store.unfinished(runs, group, {}).samples == {TINY.id: {0: 0.1}}


def test_the_newest_result_counts_and_an_interleaved_group_is_of_one_make_up(tmp_path):
    other = TINY.but(causal=True)
    old, new = result(run="r1"), result(run="r2")
    before = [
        result(p, "both", run="r3", composition="ab", interleaved=True)
        for p in (TINY, other)
    ]
    after = result(TINY, "both", run="r4", composition="a", interleaved=True)
    write_rows(tmp_path, [old, new, *before, after])
    assert load(tmp_path) == [new, after]


# --------------------------------------------------------------------------------------
# points


def test_a_points_id_is_its_content():
    same = Point(
        "ringlab",
        PATTERN.to_dict(),
        seq_len=64,
        heads=2,
        kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
    )
    assert same == TINY and hash(same) == hash(TINY) and same.id == TINY.id
    assert Point.from_dict(json.loads(json.dumps(TINY.to_dict()))) == TINY
    changes = [
        {"seq_len": 65},
        {"causal": True},
        {"dtype": "bfloat16"},
        {"options": {"a": 1}},
        {"passes": "fwd+bwd"},
    ]
    assert len({TINY.but(**c).id for c in changes} | {TINY.id}) == 6
    assert TINY.but(options={"b": 1, "a": 2}) == TINY.but(options=(("a", 2), ("b", 1)))
    for bad in ({"passes": "bwd"}, {"heads": 0}):
        with pytest.raises(ValueError):
            TINY.but(**bad)
    with pytest.raises(ValueError, match="holds a point twice"):
        Group("g", [TINY, same])
    for interleave in (True, False):  # composition matters only where points take turns
        both, one = (
            Group("a", some, interleave).composition(TINY)
            for some in ([TINY, TINY.but(causal=True)], [TINY])
        )
        assert (both != one) == interleave


# --------------------------------------------------------------------------------------
# statistics


def test_summary_of_known_numbers():
    s = stats.summary([10.0, 11.0, 12.0, 13.0, 14.0])
    assert (s.median, s.unstable) == (12.0, False)
    assert stats.summary([1.0, 1.0, 10.0, 10.0]).unstable
    assert stats.summary([3.0]) == stats.Summary(3.0, (0.0, float("inf")), True), (
        "one sample says nothing"
    )
    assert stats.summary([2.0, 2.1, 2.0, 2.1]).ci == (0.0, float("inf")), "nor do four"
    assert stats.summary([2.0, 2.1, 2.0, 2.1, 2.0]).ci[0] > 1.9
    assert stats.summary([1.0] * 5 + [1.3] * 5).unstable, (
        "a run that drifts, quartiles or not"
    )
    assert not stats.summary([1.0, 1.1] * 5).unstable
    with pytest.raises(ValueError, match="no samples"):
        stats.summary([])
    for seconds in (
        [20 / 7] * 3,
        [20 / 7] * 12,
        [20 / 7] * 4 + [3.0],
        [1.0, 2.0, 2.5, 9.0],
    ):
        found = stats.summary(seconds)
        assert found.ci[0] <= found.median <= found.ci[1], "whatever rounding does"


@pytest.mark.parametrize("count", [5, 6, 15])
def test_intervals_hold_the_truth_however_few_the_samples_and_are_the_same_on_every_call(
    count,
):
    generator, state = random.Random(count), random.getstate()
    samples = [
        [100 * math.exp(generator.gauss(0, 0.1)) for _ in range(count)]
        for _ in range(100)
    ]
    found = [stats.summary(s).ci for s in samples]
    assert sum(low <= 100 <= high for low, high in found) >= 88
    assert stats.summary(samples[0]).ci == found[0] and random.getstate() == state, (
        "seeded, and its own generator"
    )


def test_ratio_is_taken_round_by_round():
    # The machine slows down fourfold half way; each round still says 2.
    a, b = (
        result(seconds=(2.0, 2.0, 2.2, 8.0, 8.2)),
        result(seconds=(1.0, 1.0, 1.1, 4.0, 4.1, 9.0)),
    )
    r = ratio(a, b)
    assert (r.value, r.ci, r.rounds, r.paired) == (
        pytest.approx(2.0),
        pytest.approx((2.0, 2.0)),
        5,
        True,
    )
    assert r.verdict == "slower" and not r.unstable, (
        "the rows drift, their ratio does not"
    )
    assert ratio([1.0, 4.0], [1.0, 1.0]).value == pytest.approx(2.0), (
        "the median of logs is their geometric mean"
    )
    undecided = ratio([1.0, 1.0, 2.0], [1.0, 2.0, 1.0])
    assert undecided.verdict == "within noise" and undecided.unstable
    few = ratio(replace(a, seconds=a.seconds[:4], rounds=()), b)
    assert few.ci == (0.0, math.inf) and few.verdict == "within noise"


@pytest.mark.parametrize(
    "low, high, same, verdict",
    [
        (1.05, 1.10, (1.0, 1.0), "slower"),
        (1.05, 1.10, (1.0, 1.06), "within noise"),
        (0.90, 0.95, (1.0, 1.0), "faster"),
        (0.90, 1.10, (1.0, 1.0), "within noise"),
    ],
)
def test_a_difference_lies_beyond_what_the_same_work_differs_by(
    low, high, same, verdict
):
    assert stats.Ratio(1.0, low, high, 10, True, same=same).verdict == verdict


def test_only_results_that_share_rounds_of_a_run_are_paired():
    a = result(seconds=(2.0,) * 6, rounds=(0, 1, 2, 5, 6, 7))
    b = result(seconds=(9.0, *(1.0,) * 5), rounds=(9, 7, 5, 2, 1, 0))
    assert (ratio(a, b).rounds, ratio(a, b).value) == (5, pytest.approx(2.0))
    assert not ratio(a, replace(b, rounds=(0, 1, 2, 5, 8, 9))).paired
    a, b = result(seconds=(4.0,) * 3), replace(result(seconds=(2.0,) * 3), run="r2")
    assert (ratio(a, b).value, ratio(a, b).paired) == (pytest.approx(2.0), False)
    x, y = [4.0, 4.4, 3.8, 4.1, 4.0, 4.2], [2.0, 2.1, 1.9, 2.0, 2.2, 1.9]
    r = ratio(replace(a, seconds=tuple(x)), replace(b, seconds=tuple(y)))
    assert r.ci == pytest.approx((1.866, 2.191), abs=1e-3)
    with pytest.raises(ValueError, match="needs samples"):
        ratio(a, result(seconds=()))


def test_l2_is_flushed_before_each_timed_call(monkeypatch):
    order = []
    event = SimpleNamespace(
        record=lambda: order.append("event"), elapsed_time=lambda end: 3.0
    )  # ms
    cuda = SimpleNamespace(
        Event=lambda enable_timing: event,
        synchronize=lambda device: None,
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=1 << 20),
    )
    buffer = SimpleNamespace(zero_=lambda: order.append("flush"))
    monkeypatch.setattr(
        timing,
        "torch",
        SimpleNamespace(cuda=cuda, uint8=None, empty=lambda size, **_: buffer),
    )
    clock = iter([0.0, 1.0, 5.0, 5.5, 7.0, 7.0])  # around each call
    monkeypatch.setattr(
        timing, "time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    gpu_s, host_s = timing.cuda_seconds(lambda: order.append("call"), 3, "cuda")
    assert (gpu_s, host_s) == (pytest.approx(0.003), pytest.approx(0.5))
    assert order == ["flush", "event", "call", "event"] * 3


@pytest.mark.parametrize(
    "call_s, warmups, loops", [(2e-6, 1000, 1000), (4e-3, 26, 5), (0.5, 2, 1)]
)
def test_on_a_gpu_the_first_call_may_compile_and_short_calls_are_bounded(
    monkeypatch, call_s, warmups, loops
):
    worker = object.__new__(workers.Worker)
    worker.device, worker.cold_s, worker.host_s = torch.device("cuda"), 8.0, [1.0]
    worker.timed = lambda loops: call_s
    monkeypatch.setattr(workers.gc, "disable", lambda: None)
    found = worker.calibrate()
    assert (found["warmups"], found["loops"]) == (warmups, loops)
    assert worker.host_s == []


def test_a_bound_is_below_what_the_measured_rates_allow():
    """A probe may be disturbed, so its rates are raised by a margin; and the best of
    all probes counts.
    """
    rates = iter([2e9, 1e9, 4e9, 1e9])
    bounds = timing.Bounds(
        "cpu", None, lambda names: {"float32": hardware.Peaks(next(rates), 1e9, 1e9)}
    )
    work = cost.Cost(0, 0, 2_200_000_000, 2_200_000_000, 8)
    bounds.need({"float32"})
    assert bounds.seconds(work, "float32") == pytest.approx(1.0)
    assert bounds.below(work, "float32", 1.01) == pytest.approx(1.0)
    assert bounds.below(work, "float32", 0.9) == pytest.approx(0.5), (
        "probed again, and found faster"
    )
    assert bounds.seconds(work, "float64") == pytest.approx(0.5), (
        "computed in float32 at least"
    )


# --------------------------------------------------------------------------------------
# provenance


def test_hashes_see_code_and_nothing_else(tmp_path):
    source = 'def f(x):\n    if x < 0:\n        raise ValueError(f"{x} is bad")\n    return x + 1\n\n'
    source += 'class A:\n    y = "text"\n'
    same = '"""Module."""\n# comment\ndef f(x):\n    """Doc."""\n    if x < 0:\n        raise ValueError("another")\n'
    same += "    return (x +\n            1)  # why\n\n\nclass A:\n    'Doc.'\n    y = 'text'\n"
    edits = [
        ("+ 1", "+ 2"),
        ('"text"', '"Text"'),
        ("    y", "    z = 1\n    y"),
        ("Value", "Type"),
        ("<", "<="),
    ]
    engine = [{"patterns": source.replace(*edit)} for edit in edits] + [
        {"kernels/eager": ""},
        {"ring/group": ""},
    ]
    method = [{"measure/timing": ""}, {"measure/systems": ""}, {"cost": ""}]
    neither = [{"patterns": same}]  # and what only starts or shows
    neither += [{"measure/session": ""}, {"report/driver": ""}, {"ring/launch": ""}]

    def hashes(files) -> tuple[str, str]:
        package = tmp_path / str(len(list(tmp_path.iterdir())))
        for file, text in ({"patterns": source} | files).items():
            path = package / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return provenance.engine_hash(package), provenance.method_hash(package)

    base = hashes({})
    for changes, differ in (
        (engine, (True, False)),
        (method, (False, True)),
        (neither, (False, False)),
    ):
        for files in changes:
            assert tuple(a != b for a, b in zip(hashes(files), base)) == differ, files


def test_every_module_is_on_a_side(tmp_path):
    """A new module changes neither hash, unless it lies in a folder that does: it is to
    be named here or there.
    """
    outside = {
        *"__init__ __main__ advise blocks call checks cli estimate "
        "integrations measure meta_run nn presets report".split()
    }
    sides = [
        {name.split("/")[0] for name in names}
        for names in (provenance.ENGINE, provenance.METHOD)
    ]
    there = {
        p.stem
        for p in provenance.PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert there == outside | sides[0] | sides[1] and not sides[0] & sides[1]
    for name in (*provenance.ENGINE, *provenance.METHOD, *provenance.NOT_RUN):
        assert (provenance.PACKAGE / name).is_dir() or (
            provenance.PACKAGE / f"{name}.py"
        ).exists(), name


@pytest.mark.parametrize(
    "told, commit",
    [("", "unknown"), ("0123abc", "0123abc"), ("not a commit!", "unknown")],
)
def test_commit_is_unknown_outside_a_checkout_unless_it_is_told(
    tmp_path, monkeypatch, told, commit
):
    monkeypatch.setenv("RINGLAB_COMMIT", told)
    (tmp_path / "patterns.py").write_text("")
    assert provenance.git_state(tmp_path) == (commit, "unknown")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_dirty_looks_aside_from_reports_and_variables_of_hooks(tmp_path, monkeypatch):
    package, reports = tmp_path / "lib", tmp_path / "reports"
    for folder in (package, reports):
        folder.mkdir()
    (package / "patterns.py").write_text("x = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init"], ["add", "."], ["commit", "-m", "one"]):
        subprocess.run(git + command, check=True, capture_output=True)
    (reports / "rows").write_text("1")
    for name in "DIR WORK_TREE INDEX_FILE COMMON_DIR OBJECT_DIRECTORY".split():
        monkeypatch.setenv(f"GIT_{name}", str(reports))
    commit, dirty = provenance.git_state(package)
    assert len(commit) == 40 and dirty is False
    (package / "patterns.py").write_text("x = 2\n")
    assert provenance.git_state(package) == (commit, True)
