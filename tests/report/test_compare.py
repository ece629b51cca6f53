"""Two runs beside each other: what is alike, what differs, what is refused, how often nothing is called a change."""

import csv
import functools
import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from reporting import made_up, whole_suite, write_rows
from ringlab import cli
from ringlab.measure import Group, Point, ratio, stats
from ringlab.patterns import Dilated
from ringlab.report import compare_chance
from ringlab.report.compare import compare
from ringlab.report.compare_sides import read_side
from started import make

PATTERN = Dilated([64, 128], [1, 2])
GROUP = Group("lengths", tuple(Point("ringlab", PATTERN, seq_len=256 * n) for n in range(1, 9)))


def rows(scale=1.0, noise=0.01, seed=0, group=GROUP, rounds=10, about=None, **changes) -> list:
    """A run of its own: log-normal samples of ``scale`` times a base time that depends on the point alone."""
    found = []
    for point in group.points:
        rng = random.Random(f"{seed} {point.id}")
        factor = scale(point) if callable(scale) else scale
        taken = tuple(point.seq_len * 1e-5 * factor * math.exp(noise * rng.gauss(0, 1)) for _ in range(rounds))
        r = made_up(point, group, False)
        kept = stats.summary(taken)
        r = replace(r, seconds=taken, rounds=tuple(range(rounds)), median=kept.median, ci=kept.ci, run=f"run {seed}")
        r = replace(r, bound_seconds=None, provenance={**r.provenance, "threads": 2, "method": "m", **(about or {})})
        found.append(replace(r, **changes))
    return found


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    """Intervals a little coarser, and in a tenth of the time."""
    monkeypatch.setattr(stats, "RESAMPLES", 200)


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
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("ringlab: "), answer
    assert all(part in err for part in said), err


def test_identical_rows_differ_in_nothing(side, call):
    side("a", rows()), side("b", rows())
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and out.count(" not significant 1.000 ") == 8
    assert "Geometric mean of a / b over 8 points: 1.00 (1.00 to 1.00, points resampled)." in out
    assert "b is faster in 0 rows, slower in 0; not significant in 8." in out
    assert "8 of these are one measurement, kept in both." in out and "from a factor" not in out
    code, out, _ = call("check", "b", "--against", "a")
    assert code == 0 and "check passed: of 8 rows none is significantly slower than b by more than 10 %" in out


def test_another_run_of_the_same_differs_in_nothing(side, call):
    side("a", rows(noise=0.04)), side("b", rows(noise=0.04, seed=2))
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and "not significant in 8." in out
    assert call("check", "b", "--against", "a", "--tolerance", "0")[0] == 0


def test_rows_that_are_slower_are_named_and_fail(side, call):
    slow = {GROUP.points[2].id, GROUP.points[5].id}
    side("base", rows()), side("now", rows(lambda p: 1.2 if p.id in slow else 1.0, seed=2))
    code, out, _ = call("check", "base", "--against", "now")
    failed = out[out.index("check FAILED: 2 of 8 rows are worse than base:") :].splitlines()[1:]
    assert code == 1 and len(failed) == 2
    for line, n in zip(failed, (768, 1536)):
        assert f" lengths: ringlab, dilated [64, 128] / [1, 2], n={n} float32 fwd: 1." in line
        assert 1.17 < float(re.search(r"fwd: (\S+) times as long", line)[1]) < 1.23
    assert out.count(" slower 1.000 ") == 2 and "not significant 1.000" not in out, "only what differs is shown"
    code, out, _ = call("check", "now", "--against", "base")
    assert code == 0 and out.count(" faster 1.000 ") == 2, "faster is no failure"


def test_all_rows_slower_all_fail_and_the_mean_says_by_how_much(side, call):
    side("base", rows()), side("now", rows(1.2, seed=2))
    code, out, _ = call("check", "base", "--against", "now")
    assert code == 1 and "check FAILED: 8 of 8 rows" in out
    mean, low, high = re.search(r"over 8 points: (\S+) \((\S+) to (\S+),", out).groups()
    assert 1.18 < float(low) <= float(mean) <= float(high) < 1.22
    code, out, _ = call("compare", "now", "base")
    assert code == 0 and "base is faster in 8 rows, slower in 0; not significant in 0." in out


def test_a_small_difference_is_one_and_within_the_tolerance_no_failure(side, call):
    side("base", rows(noise=0.003)), side("now", rows(1.05, noise=0.003, seed=2))
    code, out, _ = call("check", "base", "--against", "now")
    assert code == 0 and out.count(" slower 1.000 ") == 8 and "check passed" in out
    assert call("check", "base", "--against", "now", "--tolerance", "0.03")[0] == 1


def test_a_large_difference_of_noisy_rows_is_none(side, call):
    """Their medians lie about 20 % apart, and so do the samples of one run."""
    side("base", rows(noise=0.25)), side("now", rows(1.2, noise=0.25, seed=2))
    code, out, _ = call("check", "base", "--against", "now")
    assert code == 0 and "not significant in 8." in out
    assert float(re.search(r"only from a factor of (\S+) on", out)[1]) > 1.3


def test_the_same_work_differing_within_a_run_widens_every_row(side, call):
    point = GROUP.points[0]
    pair = Group("twins", (point, point.but(options={"twin": 1})))
    twins = rows(lambda p: 1.3 if dict(p.options) else 1.0, noise=0.001, group=pair)
    side("base", rows() + twins), side("now", rows(1.2, seed=2))
    code, out, _ = call("check", "base", "--against", "now")
    assert code == 0 and "The same work differed by up to 1.30 within a run; no smaller factor counts." in out


def test_an_uneven_pace_of_either_machine_widens_every_interval(side, call):
    """One call in three groups, a fifth apart: a row that is a fifth slower says nothing of the code."""
    uneven = [r for i, f in enumerate((1.0, 1.2, 0.8)) for r in rows(f, group=replace(GROUP, name=f"other {i}"))]
    side("base", rows() + uneven), side("now", rows(1.2, seed=2))
    code, out, _ = call("check", "base", "--against", "now")
    assert code == 0 and "not significant in 8." in out
    assert "One call differed by 21 % from group to group in base: in the intervals." in out


def test_rows_that_are_not_quoted_enter_no_mean(side, call):
    bad = [
        dict(status="suspect", reason="too fast"),
        dict(unstable=True),
        dict(errors={}),
        dict(bound_seconds=1e3),
        dict(ranks={"oversubscribed": True, "threads": 1}),
    ]
    now = [replace(r, **bad[i]) if i < len(bad) else r for i, r in enumerate(rows(9.0, seed=2))]
    base = rows()
    side("base", base), side("now", now)
    code, out, _ = call("compare", "now", "base")
    assert code == 0 and "5 rows whose times are in no mean" in out and "over 3 points: 9." in out
    reasons = ("suspect: too fast", "unstable: its", "suspect: no correctness check", "is below its bound")
    assert all(f"now: {why}" in out for why in reasons[:3]) and reasons[3] in out and "oversubscribed in now" in out


def test_a_row_that_fails_now_fails_the_check_unless_a_disturbed_machine_explains_it(side, call):
    side("base", rows())
    for status, code in (("incorrect", 1), ("oom", 1), ("crashed", 1), ("suspect", 0)):
        now = [replace(rows(seed=2)[0], status=status, reason="why not"), *rows(seed=2)[1:]]
        side("now", now)
        found = call("check", "base", "--against", "now")
        assert found[0] == code and (f"n=256 float32 fwd: now {status}: why not" in found[1]) == bool(code)


def test_bytes_that_grow_by_more_than_a_hundredth_fail(side, call):
    def with_bytes(peak, sent, seed):
        return [
            replace(r, memory={**r.memory, "tracked_peak_bytes": peak}, ranks={"bytes_sent": [sent, sent]})
            for r in rows(seed=seed, group=Group("one", GROUP.points[-1:]), unstable=bool(seed))
        ]

    side("base", with_bytes(100 << 20, 4096, 0))
    for peak, sent, said in (
        (101 << 20, 4096, None),
        (102 << 20, 4096, "higher peak of memory, 100 MiB to 102 MiB (+2,097,152 bytes)"),
        (99 << 20, 4200, "more bytes sent, 8 KiB to 8.20 KiB (+208 bytes)"),
    ):
        side("now", with_bytes(peak, sent, 1))  # unstable times say nothing against their bytes
        code, out, err = call("check", "base", "--against", "now")
        assert code == (1 if said else 2)
        assert (said or "no time of now may be compared with base: now: unstable") in out + err


def test_rows_of_which_none_can_be_compared_do_not_pass(side, call):
    side("base", rows()), side("now", [replace(r, seconds=tuple(-s for s in r.seconds)) for r in rows(seed=2)])
    code, out, err = call("check", "base", "--against", "now")
    assert (code, out) == (2, "") and "no time of now may be compared with base: now: suspect" in err


def test_missing_points_are_said(side, call):
    other = Group("lengths", (*GROUP.points[:5], Point("ringlab", PATTERN, seq_len=64, dtype="bfloat16")))
    side("a", rows()), side("b", rows(group=other, seed=2))
    code, out, _ = call("compare", "a", "b")
    assert code == 0 and "Only in a, 3: ringlab, dilated [64, 128] / [1, 2], n=1536 float32 fwd; " in out
    assert "Only in b, 1: ringlab, dilated [64, 128] / [1, 2], n=64 bfloat16 fwd." in out


def test_unlike_runs_are_refused_in_one_line(side, call, tmp_path):
    side("a", rows())
    side("b", rows(seed=2, group=Group("lengths", tuple(p.but(dtype="bfloat16") for p in GROUP.points))))
    refused(call("compare", "a", "b"), "a and b have no point in common")
    side("b", rows(seed=2, rehearsal=True))
    refused(call("compare", "a", "b"), "b is a rehearsal and a is not")
    refused(call("check", "a", "--against", "b"), "b is a rehearsal and a is not")
    side("b", rows(seed=2, ranks={"oversubscribed": True, "threads": 1}))
    refused(call("compare", "b", "a"), "oversubscribed in b (8 of 8 points)")
    side("b", rows(seed=2, about={"threads": 8}))
    refused(call("compare", "a", "b"), "2 and 8 threads a rank on the same device (8 of 8 points)")
    refused(call("check", "a", "--against", "b"), "2 threads a rank")
    side("b", rows(seed=2, about={"threads": 8, "device": "cuda", "device_name": "a GPU"}))
    assert call("compare", "a", "b")[0] == 0, "another device has threads of its own"
    file = tmp_path / "a" / "data" / "samples.jsonl"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 2'))
    refused(call("compare", "a", "b"), "a: rows of schema 2, this version of ringlab reads schema 1")


@pytest.mark.parametrize("field", ["machine", "device", "device_name", "torch", "method"])
def test_a_check_wants_all_but_the_engine_alike(side, call, field):
    side("base", rows(about={"engine": "old"}))
    side("now", rows(seed=2, about={"engine": "new"}))
    assert call("check", "base", "--against", "now")[0] == 0
    side("now", rows(seed=2, about={"engine": "new", field: "another"}))
    refused(call("check", "base", "--against", "now"), f"they differ in {field} (", "; another)")
    assert call("compare", "base", "now")[0] == 0


def test_missing_and_damaged_data_is_one_line(side, call, tmp_path):
    side("a", rows())
    refused(
        call("compare", "a", "h200"), "no rows of 'h200'; name a profile with rows (a), a folder with samples.jsonl"
    )
    refused(call("compare", "a", str(tmp_path)), "no rows of")
    refused(call("compare", "a", ""), "no rows of ''")
    refused(call("compare", "a", "HEAD:a"), "no rows of 'HEAD:a': not a git repository")
    file = tmp_path / "bad.jsonl"
    for damage in (b"", b"\x00\xff\n", b"[1]\n{}\n", b'{"schema": 1, "kind": "result", "point": "x"}\n'):
        file.write_bytes(damage)
        code, out, err = call("compare", "a", str(file))
        assert code == 2 and out == "" and f"{file}: no complete row in it" in err and "Traceback" not in err
        assert err.count("\n") == 1 + ("skipped" in err)
    line = json.loads((tmp_path / "a" / "data" / "samples.jsonl").read_text().splitlines()[10])
    assert line["kind"] == "result"
    file.write_text(json.dumps({**line, "errors": [1], "samples": 0}))
    refused(call("compare", "a", str(file)), "a row is damaged")


def test_a_truncated_file_is_compared_as_far_as_it_goes_and_says_so(side, call, tmp_path):
    side("a", rows()), side("b", rows(seed=2))
    file = tmp_path / "b" / "data" / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    code, out, err = call("compare", "a", "b")
    assert code == 0 and "Only in a, 1: " in out and "not significant in 7." in out
    assert err.count("\n") == 1 and "ringlab: b: skipped 1 unreadable or incomplete row (line 88)" in err


def test_markdown_and_csv_hold_every_row(side, call, tmp_path):
    side("a", rows()), side("b", rows(1.2, seed=2)[:6])
    code, out, _ = call("compare", "a", "b", "--markdown", "--csv", str(tmp_path / "rows.csv"))
    assert code == 0 and "|--:|--:|--:|--:|:--|--:|--:|:--|:--|" in out and out.count("| slower |") == 6
    with open(tmp_path / "rows.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8 and [x["not_compared_because"] for x in lines] == [""] * 6 + ["only in a"] * 2
    for line in lines[:6]:
        assert line["time_of_first"] == "faster" and float(line["p"]) < 0.05
        assert float(line["low"]) < float(line["ratio"]) < float(line["high"]) < 0.87
        assert float(line["ratio"]) == pytest.approx(float(line["seconds_first"]) / float(line["seconds_second"]), 1e-4)
    refused(call("compare", "a", "b", "--csv", str(tmp_path / "no" / "rows.csv")), "cannot write", "No such file")


def test_a_run_beside_an_earlier_commit_of_itself(side, call, tmp_path):
    git = functools.partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    side("cpu", rows())
    git(["git", "init", "-q"]), git(["git", "add", "."]), git(["git", *who, "commit", "-qm", "rows"])
    side("cpu", rows(1.3, seed=2))
    code, out, _ = call("check", "HEAD:cpu", "--against", "cpu")
    assert code == 1 and "check FAILED: 8 of 8 rows are worse than HEAD:cpu:" in out
    assert call("compare", "cpu", str(tmp_path / "cpu" / "data"))[0] == 0
    refused(call("check", "HEAD~7:cpu", "--against", "cpu"), "no rows of 'HEAD~7:cpu': invalid object name 'HEAD~7'")
    refused(call("check", "HEAD:gpu", "--against", "cpu"), "'gpu/data/samples.jsonl' does not exist in 'HEAD'")


def test_a_run_beside_itself_and_beside_a_rehearsal(tmp_path, capsys):
    for name in ("cpu", "gtx1080-rehearsal"):
        write_rows(tmp_path / name / "data", whole_suite("cpu", rehearsal=name != "cpu"))
    assert cli.main(["compare", "cpu", "gtx1080-rehearsal", "--reports", str(tmp_path)]) == 2
    assert "gtx1080-rehearsal is a rehearsal and cpu is not" in capsys.readouterr().err
    found = compare(*(read_side("cpu", tmp_path) for _ in range(2)))
    assert len(found.timed) > 50 and found.mean.ci == (1.0, 1.0) and not any(p.longer or p.shorter for p in found.pairs)
    assert all(pair.growth("peak") in (None, 1.0) for pair in found.pairs)


# ---------------------------------------------------------------------------------------------------------------------
# how often nothing is called a difference, and how often a difference is seen


class Row:
    def __init__(self, run: str, seconds):
        self.run, self.composition, self.seconds, self.rounds = run, "", seconds, range(len(seconds))


NOISE = {
    "normal": lambda rng: math.exp(rng.gauss(0, 0.04)),
    "skewed": lambda rng: 1 + rng.expovariate(15),
    "two speeds": lambda rng: math.exp(rng.gauss(0, 0.01)) * rng.choice([1.0, 1.12]),
}


def families(kind: str, samples: int, count: int, size: int, factor: float = 1.0):
    """(differences by the 95 % interval alone, by all rows together) of each family of rows."""
    rng = random.Random(7)
    for _ in range(count):
        pairs = [[Row(run, [NOISE[kind](rng) for _ in range(samples)]) for run in "ab"] for _ in range(size)]
        for a, _ in pairs:
            a.seconds = [s * factor for s in a.seconds]
        ratios = [ratio(a, b) for a, b in pairs]
        found = compare_chance.holm([compare_chance.chance(a, b, r) for (a, b), r in zip(pairs, ratios)])
        yield sum(r.longer or r.shorter for r in ratios), sum(p <= compare_chance.FALSE_ALARMS for p in found)


@pytest.mark.parametrize(
    "kind, samples, count, size", [("normal", 5, 60, 60), ("normal", 9, 40, 30), ("two speeds", 9, 40, 30)]
)
def test_of_many_unchanged_rows_none_is_called_different(monkeypatch, kind, samples, count, size):
    monkeypatch.setattr(stats, "RESAMPLES", 100)
    alone, together = zip(*families(kind, samples, count, size))
    assert sum(alone) / count > 0.8, "of so many rows some lie outside their own interval"
    assert sum(x > 0 for x in together) / count <= compare_chance.FALSE_ALARMS


def test_of_sixty_slower_rows_each_is():
    assert [together for _, together in families("skewed", 10, 1, 60, factor=1.3)] == [60]


def test_the_exact_distribution_of_ranks_is_that_of_all_orders():
    ways = compare_chance._ways(10, 10)
    assert sum(ways) == math.comb(20, 10) and ways == ways[::-1] and len(ways) == 101
    # Mann and Whitney 1947, table I: P(U <= 23) of two samples of 10 is 0.022.
    assert sum(ways[:24]) / sum(ways) == pytest.approx(0.0216, abs=5e-4)


# ---------------------------------------------------------------------------------------------------------------------
# make


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_passes_both_on_and_wants_them():
    shown = make("-n", "compare", "check", "NOENV=1", "A=cpu", "B= h200 ", "BASE=HEAD~3:cpu", "TOLERANCE=0.2").stdout
    assert 'ringlab compare "cpu" "h200"' in shown
    assert 'ringlab check "HEAD~3:cpu" --against "auto" --tolerance "0.2"' in shown
    for target, given in (("compare", "A=cpu"), ("compare", "B=cpu"), ("check", "A=cpu")):
        done = make(target, "NOENV=1", given)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert f"usage: make {target} " in done.stderr
    listed = make("help", "NOENV=1").stdout
    assert re.search(r"^  compare  ", listed, re.M) and re.search(r"^  check  ", listed, re.M)


@pytest.mark.parametrize("given", ["-1", "nan", "inf"])
def test_a_tolerance_is_a_part(given, capsys):
    assert cli.main(["check", "cpu", f"--tolerance={given}"]) == 2
    assert f"'{given}' is no part: 0.10 is 10 %" in capsys.readouterr().err
