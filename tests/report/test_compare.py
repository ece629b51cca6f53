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
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from reporting import made_up, sampled, write_rows
from ringlab import cli
from ringlab.measure import Group, Point, ratio, store
from ringlab.measure.stats import Ratio
from ringlab.patterns import Dilated
from ringlab.report import compare
from started import make

RECORDED = Path(__file__).parent / "recorded"
# Of the ranks of neighbours among the recorded rows, by place.
WRITTEN_OUT = {
    0: 0.00024975024975024975,
    1: 0.0011655011655011655,
    3: 0.9117971811470263,
    4: 0.002879473467708762,
    31: 0.6437684206907486,
    32: 0.20252631445330502,
    33: 0.0038908472197040508,
}
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


def test_identical_rows_differ_in_nothing(side, call):
    side("a", rows()), side("b", rows())
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and out.count(" not significant 1.000 ") == 8
    assert (
        "Geometric mean of a / b over 8 points: 1.00 (1.00 to 1.00, over the points)."
        in out
    )
    assert "a is faster in 0 rows, slower in 0; not significant in 8." in out
    assert (
        "8 of these are one measurement, kept in both." in out
        and "from a factor" not in out
    )
    code, out, _ = call("check", "b", "--against", "a")
    assert (
        code == 0
        and "check passed: of 8 rows none is significantly slower than b by more than 10 %"
        in out
    )


# One call in three groups, a fifth apart: a row that is a fifth slower says nothing of
# the code.
UNEVEN = [(f"other {i}", f) for i, f in enumerate((1.0, 1.2, 0.8))]


@pytest.mark.parametrize(
    "noise, factor, more, said",
    [
        (0.04, 1.0, [], ""),
        (
            0.25,
            1.2,
            [],
            "",
        ),  # medians lie about 20 % apart, and so do the samples of one run
        (
            0.01,
            1.2,
            UNEVEN,
            "One call differed by 21 % from group to group in base: in the intervals.",
        ),
        (
            0.01,
            1.2,
            ["twins"],
            "The same work differed by up to 1.30 within a run; no smaller factor counts.",
        ),
    ],
    ids=["alike", "noisy", "uneven pace", "A/A control"],
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
    assert code == 0 and "not significant in 8." in out and said in out
    if noise == 0.25:
        assert float(re.search(r"only from a factor of (\S+) on", out)[1]) > 1.3


def test_rows_that_are_slower_are_named_and_fail(side, call):
    slow = {GROUP.points[2].id, GROUP.points[5].id}
    (
        side("base", rows()),
        side("now", rows(lambda p: 1.2 if p.id in slow else 1.0, seed=2)),
    )
    code, out, _ = call("check", "base", "--against", "now")
    failed = out[
        out.index("check FAILED: 2 of 8 rows are worse than base:") :
    ].splitlines()[1:]
    assert code == 1 and len(failed) == 2
    for line, n in zip(failed, (768, 1536)):
        assert (
            f" lengths: ringlab, dilated [64, 128] / [1, 2], n={n} float32 fwd: 1."
            in line
        )
        assert 1.17 < float(re.search(r"fwd: (\S+) times as long", line)[1]) < 1.23
    assert out.count(" slower 1.000 ") == 2 and "not significant 1.000" not in out, (
        "only what differs is shown"
    )
    code, out, _ = call("check", "now", "--against", "base")
    assert code == 0 and out.count(" faster 1.000 ") == 2, "faster is no failure"


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
    mean, low, high = map(
        float, re.search(r"over 8 points: (\S+) \((\S+) to (\S+),", out).groups()
    )
    assert (
        out.count(" slower 1.000 ") == 8
        and factor - 0.01 < low <= mean <= high < factor + 0.01
    )
    code, out, _ = call("compare", "now", "base")
    assert (
        code == 0
        and "now is faster in 0 rows, slower in 8; not significant in 0." in out
    )


def test_a_point_with_several_rows_counts_once_in_the_mean(side, call):
    first, second = GROUP.points[:2]
    one, again = Group("lengths", (first, second)), Group("again", (first,))
    side(
        "a",
        rows(lambda p: 2.0 if p == first else 1.0, 0, 2, one) + rows(8.0, 0, 2, again),
    )
    side("b", rows(1.0, 0, 0, one) + rows(1.0, 0, 0, again))
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and "Geometric mean of a / b over 2 points: 2.00 (" in out


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
        and "5 rows whose times are in no mean" in out
        and "over 3 points: 9." in out
    )
    reasons = (
        "suspect: too fast",
        "unstable: its",
        "suspect: no correctness check",
        "is below its bound",
    )
    assert (
        all(f"now: {why}" in out for why in reasons[:3])
        and reasons[3] in out
        and "oversubscribed in now" in out
    )


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
        (101, 4096, 2, "no time of now may be compared with base: now: unstable"),
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
    assert (
        code == 0
        and "Only in a, 3: ringlab, dilated [64, 128] / [1, 2], n=1536 float32 fwd; "
        in out
    )
    assert (
        "Only in b, 1: ringlab, dilated [64, 128] / [1, 2], n=64 bfloat16 fwd." in out
    )


@pytest.mark.parametrize(
    "other, said",
    [
        (
            {"group": Group("lengths", tuple(p.but(batch=2) for p in GROUP.points))},
            "a and b have no point in common",
        ),
        (
            {"ranks": {"oversubscribed": True, "threads": 1}},
            "oversubscribed in b (8 of 8 points)",
        ),
        (
            {"about": {"threads": 8}},
            "2 and 8 threads a rank on the same device (8 of 8 points)",
        ),
    ],
)
def test_unlike_runs_are_refused_in_one_line(side, call, other, said):
    side("a", rows()), side("b", rows(seed=2, **other))
    refused(call("compare", "a", "b"), said)
    assert call("check", "a", "--against", "b")[0] == 2


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


@pytest.mark.parametrize(
    "field", ["machine", "device", "device_name", "torch", "method"]
)
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
    for damage in (
        b"",
        b"\x00\xff\n",
        b"[1]\n{}\n",
        b'{"schema": 1, "kind": "result", "point": "x"}\n',
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
    line = json.loads(
        (tmp_path / "a" / "data" / "samples.jsonl").read_text().splitlines()[10]
    )
    assert line["kind"] == "result"
    file.write_text(json.dumps({**line, "errors": [1], "samples": 0}))
    refused(call("compare", "a", str(file)), "a row is damaged")


def test_a_truncated_file_is_compared_as_far_as_it_goes_and_says_so(
    side, call, tmp_path
):
    side("a", rows()), side("b", rows(seed=2))
    file = tmp_path / "b" / "data" / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    code, out, err = call("compare", "a", "b")
    assert code == 0 and "Only in a, 1: " in out and "not significant in 7." in out
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


def test_a_run_beside_an_earlier_commit_of_itself(side, call, tmp_path):
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


# --------------------------------------------------------------------------------------
# how often nothing is called a difference, and how often a difference is seen


NOISE = {
    "normal": lambda rng: math.exp(rng.gauss(0, 0.04)),
    "skewed": lambda rng: 1 + rng.expovariate(15),
    "two speeds": lambda rng: math.exp(rng.gauss(0, 0.01)) * rng.choice([1.0, 1.12]),
}


def differences(
    rng, kind: str, samples: int, size: int, factor: float = 1.0
) -> tuple[int, int]:
    """How many of ``size`` rows differ by their own 95 % interval alone, and by all of
    them together.
    """

    def row(run: str, factor: float):
        seconds = [factor * NOISE[kind](rng) for _ in range(samples)]
        return SimpleNamespace(
            run=run, composition="", seconds=seconds, rounds=range(samples)
        )

    pairs = [(row("a", factor), row("b", 1.0)) for _ in range(size)]
    ratios = [ratio(a, b) for a, b in pairs]
    found = compare.holm([compare.chance(a, b, r) for (a, b), r in zip(pairs, ratios)])
    alone = [r.significantly_slower or r.significantly_faster for r in ratios]
    return sum(alone), sum(p <= compare.FALSE_ALARMS for p in found)


@pytest.mark.parametrize(
    "kind, samples, count, size", [("normal", 5, 60, 60), ("two speeds", 9, 40, 30)]
)
def test_of_many_unchanged_rows_none_is_called_different(kind, samples, count, size):
    rng = random.Random(7)
    alone, together = zip(
        *(differences(rng, kind, samples, size) for _ in range(count))
    )
    assert sum(alone) / count > 0.8, (
        "of so many rows some lie outside their own interval"
    )
    assert sum(x > 0 for x in together) / count <= compare.FALSE_ALARMS


def test_of_sixty_slower_rows_each_is():
    assert differences(random.Random(7), "skewed", 10, 60, factor=1.3)[1] == 60


@pytest.mark.parametrize("floor", [1.0, 1.05])
def test_the_chance_of_ranks_is_that_of_all_orders(floor):
    """Counted over every order of 6 and 5 samples; a tie is no win."""
    orders = [set(chosen) for chosen in combinations(range(11), 6)]
    wins = [sum(i > j for i in s for j in {*range(11)} - s) for s in orders]
    rng = random.Random(7)
    for _ in range(20):
        x, y = (
            [round(f + rng.random(), 1) for _ in range(n)]
            for f, n in ((2, 6), (1.5, 5))
        )
        seen = sum(a > b * floor for a in x for b in y)
        part = sum(w >= seen for w in wins) / len(wins)
        ratio = Ratio(1.2, 1.1, 1.3, 5, False, noise_floor=floor)
        found = compare._by_ranks(x, y, ratio)
        assert found == pytest.approx(min(1.0, 2 * part), rel=1e-12)
        turned = compare._by_ranks(y, x, replace(ratio, value=1 / 1.2))
        assert turned == found


def test_chances_are_those_of_the_tests_written_out():
    """As computed before by this project's own Student's t and orders of ranks."""
    rows = [r for r in store.read(RECORDED) if r.seconds]
    found = {}
    for i, (a, b) in enumerate(pairwise(rows)):
        found[i] = compare._by_ranks(a.seconds, b.seconds, ratio(a, b))
    found = {i: found[i] for i in WRITTEN_OUT}
    assert found == pytest.approx(WRITTEN_OUT, rel=1e-12)
    for row, p in (
        (Ratio(1.1, 1.05, 1.2, 10, True), 0.001228447039931635),
        (Ratio(0.9, 0.8, 0.98, 5, True, noise_floor=1.02), 0.04933777800473493),
        (Ratio(1.3, 1.1, 1.5, 2, True), 0.03187524710762024),
    ):
        assert compare.chance(None, None, row) == pytest.approx(p, rel=1e-12)


# --------------------------------------------------------------------------------------
# make


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
