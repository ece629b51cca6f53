"""Two runs beside each other: what is alike, what differs, what is refused, how often
nothing is called a change.
"""

import functools
import json
import math
import random
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from reporting import made_up, sampled, write_rows
from ringlab import cli
from ringlab.measure import Group, Point
from ringlab.measure.points import ANCHOR, ANCHORS
from ringlab.patterns import Dilated
from ringlab.report import compare
from ringlab.report.study import study_of
from started import ROOT, make

README = (ROOT / "README.md").read_text()
PATTERN = Dilated([64, 128], [1, 2])
GROUP = Group(
    "lengths", tuple(Point("ringlab", PATTERN, seq_len=256 * n) for n in range(1, 9))
)


def rows(
    scale=1.0, noise=0.01, seed=0, group=GROUP, rounds=10, about=None, **changes
) -> list:
    """A run of its own: log-normal samples of ``scale`` times a base time that depends
    on the point alone.
    """
    found = []
    for point in group.points:
        rng = random.Random(f"{seed} {point.id}")
        factor = scale(point) if callable(scale) else scale
        taken = tuple(
            point.seq_len * 1e-5 * factor * math.exp(noise * rng.gauss(0, 1))
            for _ in range(rounds)
        )
        r = sampled(
            made_up(point, group, False, run=f"run {seed}", bound_seconds=None), taken
        )
        found.append(
            replace(
                r,
                provenance=r.provenance | {"threads": 2, "method": "m"} | (about or {}),
                **changes,
            )
        )
    return found


@pytest.fixture
def side(tmp_path):
    """Writes rows below a reports folder, as the profile of this name."""

    def write(name: str, results) -> str:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        write_rows(tmp_path / name / "data", results)
        return name

    return write


@pytest.fixture
def call(tmp_path, capsys):
    """(exit code, stdout, stderr) of a command on those rows."""

    def run(*argv: str):
        code = cli.main([*argv, "--reports", str(tmp_path)])
        out, err = capsys.readouterr()
        return code, re.sub(" +", " ", out), err

    return run


def refused(answer, *said: str) -> None:
    code, out, err = answer
    assert (
        code == 2 and out == "" and err.count("\n") == 1 and err.startswith("ringlab: ")
    ), answer
    assert all(part in err for part in said), err


def test_the_same_rows_are_not_compared(side, call):
    side("a", rows()), side("b", rows())
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and out.startswith("no time compared: a beside b: ")
    refused(
        call("check", "b", "--against", "a"), "the same row in both (8 of 8 points)"
    )
    more = rows(group=replace(GROUP, name="more"))
    (
        side("b", [*rows(), *(replace(r, run="later") for r in more)]),
        side("a", rows() + more),
    )
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and out.startswith(
        "a beside b: 0 slower, 0 faster, 8 within noise, of 8 rows; 8 left out (8 the same row in both)\n"
    )


def test_where_no_time_is_compared_that_is_said_first_and_no_check_passes(side, call):
    side("a", rows()), side("b", rows(seed=2, unstable=True))
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and out.startswith("no time compared: a beside b: ")
    refused(call("check", "b", "--against", "a"), "unstable in b (8 of 8 points)")


@pytest.mark.parametrize("value", ["0", "-1", "1e308", '"NaN"'])
def test_rows_that_are_no_times_are_told_and_fail_a_check(side, call, tmp_path, value):
    side("a", rows()), side("b", rows(seed=2))
    file = tmp_path / "b" / "data" / "samples.jsonl"
    text, changed = re.subn(r'(?<="seconds": )[^,]+', value, file.read_text(), count=1)
    file.write_text(text)
    said = "ringlab: b: skipped 2 unreadable or incomplete rows (line 1, 11); line 1: seconds "
    code, out, err = call("compare", "a", "b")
    assert code == 0 and changed and "of 7 rows; 1 left out (1 only in a)" in out
    assert err.startswith(said) and err.count("\n") == 1
    for names in (("b", "--against", "a"), ("a", "--against", "b")):
        code, out, err = call("check", *names)
        assert (code, out) == (2, "") and err.startswith(said)


# One call in three groups, a fifth apart: a row that is a fifth slower says nothing of
# the code.
UNEVEN = [(f"other {i}", f) for i, f in enumerate((1.0, 1.2, 0.8))]


@pytest.mark.parametrize(
    "noise, factor, more, said",
    [
        (0.04, 1.0, [], "scatter of the same work unknown"),
        (0.01, 1.2, UNEVEN, "drift unknown (no anchors of both)"),
        (0.01, 1.2, ["twins"], "scatter of the same work by 26 %"),
    ],
    ids=["alike", "uneven pace", "A/A control"],
)
def test_a_difference_that_the_noise_explains_is_none(
    side, call, noise, factor, more, said
):
    base = rows(noise=noise)
    if more == ["twins"]:
        pair = Group(
            "twins", (GROUP.points[0], GROUP.points[0].but(options={"twin": 1}))
        )
        base += rows(lambda p: 1.3 if dict(p.options) else 1.0, noise=0.001, group=pair)
    else:
        base += [
            r
            for name, pace in more
            for r in rows(pace, group=replace(GROUP, name=name))
        ]
    side("base", base), side("now", rows(factor, noise=noise, seed=2))
    code, out, _ = call("check", "base", "--against", "now")
    assert code == 0 and "0 slower, 0 faster, 8 within noise" in out and said in out


def test_rows_that_are_slower_are_named_and_fail(side, call):
    slow = {GROUP.points[2].id, GROUP.points[5].id}
    (
        side("base", rows()),
        side("now", rows(lambda p: 1.2 if p.id in slow else 1.0, seed=2)),
    )
    code, out, _ = call("check", "base", "--against", "now")
    verdict, *failed = out.splitlines()[:3]
    assert code == 1 and verdict == "check FAILED: 2 of 8 rows are worse than base:"
    for line, n in zip(failed, (768, 1536)):
        assert (
            f" lengths: ringlab, dilated [64, 128] / [1, 2], n={n} float32 fwd: 1."
            in line
        )
        assert 1.17 < float(re.search(r"fwd: (\S+) times as long", line)[1]) < 1.23
    assert "2 slower, 0 faster, 6 within noise, of 8 rows" in out
    code, out, _ = call("check", "now", "--against", "base")
    assert code == 0 and "0 slower, 2 faster" in out, "faster is no failure"


@pytest.mark.parametrize(
    "factor, tolerance, failed",
    [(1.2, "0.10", 8), (1.05, "0.10", 0), (1.05, "0.03", 8)],
)
def test_where_all_rows_are_slower_those_beyond_the_tolerance_fail(
    side, call, factor, tolerance, failed
):
    side("base", rows(noise=0.003)), side("now", rows(factor, noise=0.003, seed=2))
    code, out, _ = call("check", "base", "--against", "now", "--tolerance", tolerance)
    assert (
        code == bool(failed)
        and (f"check FAILED: {failed} of 8 rows" if failed else "check passed") in out
    )
    mean = float(re.search(r"Geometric mean of now / base: (\S+)\.\n", out)[1])
    assert "8 slower, 0 faster" in out and abs(mean - factor) < 0.01
    code, out, _ = call("compare", "now", "base")
    assert code == 0 and out.startswith("now beside base: 8 slower, 0 faster")


@pytest.mark.parametrize(
    "command", [("compare", "now", "base"), ("check", "base", "--against", "now")]
)
def test_the_answer_is_short_whatever_the_runs_hold(side, call, command):
    many = [replace(GROUP, name=f"group {i}") for i in range(8)]

    def run(scale, seed):
        found = [r for g in many for r in rows(scale, 0.003, seed, g)]
        return [replace(r, unstable=i % 5 == 0) for i, r in enumerate(found)]

    side("base", run(1.0, 0)), side("now", run(lambda p: 1 + p.seq_len / 4096, 2))
    code, out, _ = call(*command)
    assert code == (command[0] == "check") and len(out.splitlines()) <= 20
    assert ", of 51 rows; 13 left out (13 unstable in now)" in "".join(
        out.splitlines()[:12]
    )
    shown = [float(x) for x in re.findall(r"(?m)^ *\S+ \S+ (\d\.\d+) .* slower", out)]
    assert shown == sorted(shown, reverse=True), "the largest first"
    assert "--all shows every row" in out
    code, out, _ = call(*command, "--all")
    assert len(out.splitlines()) > 64


def test_what_may_be_why_is_said(side, call):
    side("a", rows(about={"engine": "one"}))
    for about, said in (
        ({"engine": "two"}, "Between the two: other code (one and two)."),
        ({"torch": "9"}, "another torch (2.13.0+cpu and 9)"),
        ({"machine": "m2"}, "another machine (made up and m2)"),
    ):
        side("b", rows(seed=2, about={"engine": "one"} | about))
        assert said in call("compare", "a", "b")[1]
    side("b", rows(1.3, seed=2, about={"engine": "one"}))
    same = "The same code, machine, threads and versions: what differs is the machine's state, or chance."
    assert same in call("compare", "a", "b")[1]


def test_rows_that_are_not_quoted_enter_no_mean(side, call):
    bad = [
        {"status": "suspect", "reason": "too fast"},
        {"unstable": True},
        {"errors": {}},
        {"bound_seconds": 1e3},
        {"ranks": {"oversubscribed": True, "threads": 1}},
    ]
    now = [
        replace(r, **bad[i]) if i < len(bad) else r
        for i, r in enumerate(rows(9.0, seed=2))
    ]
    side("base", rows()), side("now", now)
    code, out, _ = call("compare", "now", "base")
    assert (
        code == 0
        and ", of 3 rows; 5 left out (" in out
        and "Geometric mean of now / base: 9." in out
    )
    reasons = "3 suspect in now", "1 unstable in now", "1 oversubscribed"
    assert all(why in out for why in reasons)


def test_a_row_that_fails_now_fails_the_check_unless_a_disturbed_machine_explains_it(
    side, call
):
    side("base", rows())
    for status, code in (("incorrect", 1), ("oom", 1), ("crashed", 1), ("suspect", 0)):
        now = [
            replace(rows(seed=2)[0], status=status, reason="why not"),
            *rows(seed=2)[1:],
        ]
        side("now", now)
        found = call("check", "base", "--against", "now")
        assert found[0] == code and (
            f"n=256 float32 fwd: now {status}: why not" in found[1]
        ) == bool(code)


def test_bytes_that_grow_by_more_than_a_hundredth_fail(side, call):
    def with_bytes(peak_mib, sent, seed):
        held = {
            "memory": {"floor_bytes": 1, "tracked_peak_bytes": peak_mib << 20},
            "ranks": {"bytes_sent": [sent] * 2},
        }
        return rows(
            seed=seed,
            group=Group("one", GROUP.points[-1:]),
            unstable=bool(seed),
            **held,
        )

    side("base", with_bytes(100, 4096, 0))
    for peak_mib, sent, code, said in (
        (101, 4096, 2, "no time of now may be compared with base: unstable in now"),
        (102, 4096, 1, "higher peak of memory, 100 MiB to 102 MiB (+2,097,152 bytes)"),
        (99, 4200, 1, "more bytes sent, 8 KiB to 8.20 KiB (+208 bytes)"),
    ):
        side(
            "now", with_bytes(peak_mib, sent, 1)
        )  # unstable times say nothing against their bytes
        found = call("check", "base", "--against", "now")
        assert found[0] == code and said in found[1] + found[2]


def test_missing_points_are_said(side, call):
    other = Group(
        "lengths",
        (*GROUP.points[:5], Point("ringlab", PATTERN, seq_len=64, dtype="bfloat16")),
    )
    side("a", rows()), side("b", rows(group=other, seed=2))
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and "3 only in a; 1 only in b" in out and "of 5 rows" in out


@pytest.mark.parametrize(
    "other, said",
    [
        (
            {"group": Group("lengths", tuple(p.but(batch=2) for p in GROUP.points))},
            "b and a have no point in common",
        ),
        (
            {"ranks": {"oversubscribed": True, "threads": 1}},
            "oversubscribed (8 of 8 points)",
        ),
        ({"about": {"threads": 8}}, "they differ in threads (2; 8)"),
    ],
)
def test_a_check_of_unlike_runs_is_refused_in_one_line(side, call, other, said):
    side("a", rows()), side("b", rows(seed=2, **other))
    refused(call("check", "a", "--against", "b"), said)


def test_another_device_has_threads_of_its_own_and_another_schema_is_refused(
    side, call, tmp_path
):
    (
        side("a", rows()),
        side(
            "b",
            rows(
                seed=2, about={"threads": 8, "device": "cuda", "device_name": "a GPU"}
            ),
        ),
    )
    assert call("compare", "a", "b")[0] == 0
    file = tmp_path / "a" / "data" / "samples.jsonl"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 2'))
    refused(
        call("compare", "a", "b"),
        "a: rows of schema 2, this version of ringlab reads schema 1",
    )


@pytest.mark.parametrize("field", ["machine", "device_name", "torch", "method"])
def test_a_check_wants_all_but_the_engine_alike(side, call, field):
    side("base", rows(about={"engine": "old"}))
    side("now", rows(seed=2, about={"engine": "new"}))
    assert call("check", "base", "--against", "now")[0] == 0
    side("now", rows(seed=2, about={"engine": "new", field: "another"}))
    refused(
        call("check", "base", "--against", "now"),
        f"they differ in {field} (",
        "; another)",
    )
    assert call("compare", "base", "now")[0] == 0


def test_missing_and_damaged_data_is_one_line(side, call, tmp_path):
    side("a", rows())
    for name, said in (
        ("h200", "; name a profile with rows (a), a folder with samples.jsonl"),
        ("", ""),
        (str(tmp_path), ""),
        ("HEAD:a", ": not a git repository"),
    ):
        refused(call("compare", "a", name), f"no rows of '{name}'{said}")
    file = tmp_path / "bad.jsonl"
    row = json.loads((tmp_path / "a/data/samples.jsonl").read_text().splitlines()[10])
    assert row["kind"] == "result"
    for damage in (
        b"",
        b"\x00\xff\n",
        b"[1]\n{}\n",
        b'{"schema": 1, "kind": "result", "point": "x"}\n',
        json.dumps(row | {"errors": [1], "samples": 0}).encode(),
    ):
        file.write_bytes(damage)
        code, out, err = call("compare", "a", str(file))
        assert (
            code == 2
            and out == ""
            and f"{file}: no complete row in it" in err
            and "Traceback" not in err
        )
        assert err.count("\n") == 1 + ("skipped" in err)


def test_a_truncated_file_is_compared_as_far_as_it_goes_and_says_so(
    side, call, tmp_path
):
    side("a", rows()), side("b", rows(seed=2))
    file = tmp_path / "b" / "data" / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    code, out, err = call("compare", "a", "b")
    assert code == 0 and "1 left out (1 only in a)" in out and "7 within noise" in out
    assert (
        err.count("\n") == 1
        and "ringlab: b: skipped 1 unreadable or incomplete row (line 88)" in err
    )


def test_markdown_holds_every_row(side, call):
    side("a", rows()), side("b", rows(1.2, seed=2)[:6])
    code, out, _ = call("compare", "a", "b", "--markdown")
    assert (
        code == 0
        and "|--:|--:|--:|--:|:--|--:|--:|:--|:--|" in out
        and out.count("| faster |") == 6
    )
    for line in (x for x in out.splitlines() if "| faster |" in x):
        first, second, over, between = [x.strip() for x in line.split("|")[1:5]]
        low, high = map(float, between.split(" to "))
        assert low < float(over) < high < 0.87
        assert float(over) == pytest.approx(float(first) / float(second), rel=0.01)


def test_a_run_beside_an_earlier_commit_of_itself(side, call, tmp_path, monkeypatch):
    git = functools.partial(
        subprocess.run, cwd=tmp_path, check=True, capture_output=True
    )
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    side("cpu", rows())
    (
        git(["git", "init", "-q"]),
        git(["git", "add", "."]),
        git(["git", *who, "commit", "-qm", "rows"]),
    )
    side("cpu", rows(1.3, seed=2))
    code, out, _ = call("check", "HEAD:cpu", "--against", "cpu")
    assert code == 1 and "check FAILED: 8 of 8 rows are worse than HEAD:cpu:" in out
    assert call("compare", "cpu", str(tmp_path / "cpu" / "data"))[0] == 0
    refused(
        call("check", "HEAD~7:cpu", "--against", "cpu"),
        "no rows of 'HEAD~7:cpu': invalid object name 'HEAD~7'",
    )
    refused(
        call("check", "HEAD:gpu", "--against", "cpu"),
        "'gpu/data/samples.jsonl' does not exist in 'HEAD'",
    )
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # as hooks have them
        monkeypatch.setenv(name, str(ROOT / ".git"))
    assert call("check", "HEAD:cpu", "--against", "cpu") == (1, out, "")
    refused(call("compare", "cpu", "a\0:cpu"), "git cannot be asked: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(call("compare", "cpu", "HEAD:cpu"), ": git is not installed")


# --------------------------------------------------------------------------------------
# how often nothing is called a difference, and how often a difference is seen


GROUPS = [
    Group(
        f"group {i}",
        (
            *(p.but(batch=i) for p in points),
            points[0].but(batch=i, options={"twin": True}),
        ),
    )
    for i in range(1, 6)
    for points in [[Point("ringlab", PATTERN, seq_len=256 * n) for n in range(1, 11)]]
]


def session(seed: int, slow=1.0, rounds=20, anchors=ANCHORS) -> compare.Side:
    """A run of fifty points on a machine that drifts: by 4 % from run to run, 1 % from
    group to group, 1 % from process to process, and in phases of some seconds.

    Times are skewed as those of a shared machine, and a tenth of what a call feels of the
    drift is its own.
    """
    rng = random.Random(f"session {seed}")
    pace, found = rng.gauss(0, 0.04), []
    for group in GROUPS:
        here, phase = pace + rng.gauss(0, 0.01), [0.0]
        for _ in range(rounds - 1):
            phase.append(0.8 * phase[-1] + rng.gauss(0, 0.004))
        for point in (*group.points, *anchors):
            own = rng.gauss(0, 0.01) + here * rng.uniform(0.9, 1.1)
            if point in group.points:
                own += math.log(slow)
            taken = [
                math.exp(own + x + rng.gauss(0, 0.008)) * (1 + rng.expovariate(100))
                for x in phase
            ]
            row = made_up(point, group, False, run=f"run {seed}", bound_seconds=None)
            about = row.provenance | {"threads": 2, "method": "m", "engine": "e"}
            found.append(replace(sampled(row, taken), provenance=about))
    return compare.Side(f"run {seed}", study_of(found, None, Path("run")))


def test_one_code_measured_four_times_differs_in_at_most_two_rows_of_a_hundred():
    sides = [session(seed) for seed in range(4)]
    found = [compare.compare(a, b) for a, b in combinations(sides, 2)]
    verdicts = Counter(pair.verdict for each in found for pair in each.timed)
    assert verdicts.total() == 6 * 50
    assert verdicts["slower"] + verdicts["faster"] <= 0.02 * verdicts.total()
    drifts = [x for each in found for x in each.drifts.values()]
    assert max(map(abs, drifts)) > 0.05, "more than what rows scatter by"


def test_a_slowdown_of_a_tenth_is_found_where_the_noise_allows_it():
    bases = [session(seed) for seed in range(3)]
    found = [
        compare.compare(session(seed + 10, slow=1.10), base)
        for seed, base in enumerate(bases)
    ]
    slower = sum(pair.verdict == "slower" for each in found for pair in each.timed)
    allowed = sum(pair.seen < 1.10 for each in found for pair in each.timed)
    assert allowed >= 0.5 * 150 and slower >= 0.95 * allowed


def test_without_anchors_the_drift_of_a_run_passes_for_a_difference_and_is_said():
    found = compare.compare(*(session(seed, anchors=()) for seed in (0, 1)))
    assert not found.drifts
    assert "drift unknown (no anchors of both)" in compare.sections(found)[0]


def test_two_machines_have_no_drift():
    """Their anchors differ by as much as their rows do, and that is no noise."""
    fast, slow = session(0), session(1, slow=3.0)
    for row in slow.study.results:
        row.provenance["machine"] = "another"
        if row.option(ANCHOR):
            object.__setattr__(row, "seconds", tuple(3 * s for s in row.seconds))
    found = compare.compare(slow, fast)
    assert not found.drifts and {p.verdict for p in found.timed} == {"slower"}


# --------------------------------------------------------------------------------------
# make


@pytest.mark.parametrize("target", ["compare", "check"])
def test_the_examples_of_the_readme_show_something_in_any_clone(
    target, capsys, monkeypatch
):
    """Of files alone, not of earlier commits: a shallow clone has none."""
    monkeypatch.chdir(ROOT)
    given = dict(
        re.findall(
            r"(\w+)=([^\s`]+)",
            README.partition(f"`make {target} ")[2].partition("`")[0],
        )
    )
    assert all(Path(x).is_file() for x in given.values()), given
    first, second = (
        given[x] for x in {"compare": "AB"}.get(target, ("AGAINST", "BASE"))
    )
    argv = {"compare": (first, second), "check": (second, "--against", first)}
    assert cli.main([target, *argv[target]]) == 0
    assert "1 faster, 14 within noise, of 15 rows" in capsys.readouterr().out


def test_make_passes_both_on_and_wants_them():
    shown = make(
        "-n",
        "compare",
        "check",
        "NOENV=1",
        "A=cpu",
        "B= h200 ",
        "BASE=HEAD~3:cpu",
        "TOLERANCE=0.2",
    ).stdout
    assert 'ringlab compare "cpu" "h200"' in shown
    assert 'ringlab check "HEAD~3:cpu" --against "auto" --tolerance "0.2"' in shown
    for target, given in (
        ("compare", "A=cpu"),
        ("compare", "B=cpu"),
        ("check", "A=cpu"),
    ):
        done = make(target, "NOENV=1", given)
        assert (
            done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        )
        assert f"usage: make {target} " in done.stderr


@pytest.mark.parametrize("given", ["-1", "nan", "inf"])
def test_a_tolerance_is_a_part(given, capsys):
    assert cli.main(["check", "cpu", f"--tolerance={given}"]) == 2
    assert f"'{given}' is no part: 0.10 is 10 %" in capsys.readouterr().err
