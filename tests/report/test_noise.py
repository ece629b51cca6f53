"""What the same call differs by from group to group, and the intervals that include it."""

import math
import random
from dataclasses import replace

import pytest
from reporting import longer, made_up, sampled, study_of, write_rows
from ringlab import hardware, measure
from ringlab.measure import Group, Point
from ringlab.patterns import Dense, Dilated
from ringlab.report import cells, compare, findings, noise, study

CALLS = [Point("ringlab", Dilated([16, 32], [1, 2]), seq_len=n) for n in (64, 128)] + [
    Point("dense_sdpa", Dense())
]


def row(point, group, seconds, run=""):
    group = Group(group, (point,)) if isinstance(group, str) else group
    made = made_up(
        point, group, False, run=run or group.name, provenance={}, bound_seconds=None
    )
    return sampled(made, [seconds * (1 + 0.001 * i) for i in range(10)])


def rows_at(paces, calls=CALLS):
    return [
        row(p, f"group {i}", 0.1 * (j + 1) * x)
        for i, x in enumerate(paces)
        for j, p in enumerate(calls)
    ]


def apart(rows) -> float:
    return noise.noise_of(rows, []).apart


def test_spread_is_that_of_the_pace():
    rng = random.Random(1)
    paces = [math.exp(rng.gauss(0, 0.1)) for _ in range(60)]
    assert apart(rows_at(paces)) == pytest.approx(0.1, rel=0.15)
    assert apart(rows_at([1.0, 1.0])) == pytest.approx(0.0, abs=1e-12)
    assert apart(rows_at([1.0, 1.2])) == pytest.approx(
        math.log(1.2) / math.sqrt(2) / noise.MIDDLE
    )


def test_only_the_same_call_in_another_group_counts():
    same = rows_at([1.0, 1.2])
    other_threads = [
        replace(r, provenance={"threads": 1}) if r.group == "group 1" else r
        for r in same
    ]
    refused = [
        replace(r, status="incorrect") if r.group == "group 1" else r for r in same
    ]
    twins = [
        *same[:3],
        *(replace(r, point=r.point.but(options={"twin": True})) for r in same[3:]),
    ]
    assert apart(other_threads) == apart(refused) == apart(same[:3]) == 0.0
    assert apart(same[:2] + same[3:5]) == 0.0  # two pairs say nothing of the rest
    assert apart(twins) == apart(same)


def test_an_interval_is_widened_by_both_errors_together():
    one = row(CALLS[0], "group", 1.0)
    one = replace(one, ci=(one.median * math.exp(-0.03), one.median * math.exp(0.03)))
    (wide,) = noise.Noise(0.04 / noise.NORMAL).times([one])
    assert [abs(math.log(end / one.median)) for end in wide.ci] == pytest.approx(
        [0.05, 0.05]
    )


def test_a_study_shows_them_and_ratios_of_rows_that_took_turns_do_not(tmp_path):
    write_rows(tmp_path, rows_at([1.0, 1.2]))
    found = study.read_study(hardware.get_profile("cpu"), tmp_path)
    between = math.log(1.2) / math.sqrt(2) / noise.MIDDLE
    assert (
        found.noise.apart == pytest.approx(between)
        and found.of("optimization").noise == found.noise
    )
    for r in found.results:
        assert math.log(r.ci[1] / r.median) == pytest.approx(1.96 * between, rel=0.01)
    a, b = found.results[0], found.results[3]  # of two groups
    two = found.ratio(b, a)
    assert not two.paired and two.low < 1 < two.high
    assert measure.ratio(b, a).low > 1.19
    turns = measure.ratio([2.0] * 5, [1.0] * 5)
    assert turns.paired and noise.Noise(between).of(turns).ci == pytest.approx(turns.ci)


def test_a_ratio_of_calls_that_took_turns_holds_what_two_runs_differ_by(tmp_path):
    """The second run is slower throughout, which no ratio shows, and each call differs
    by a rest, which ratios show.
    """
    calls = [
        Point("ringlab", Dilated([16, 32], [1, 2]), seq_len=64 * n)
        for n in range(1, 121)
    ]
    rng, company = random.Random(3), Group("group", calls)
    runs = [
        [row(p, company, 0.1 * slow * math.exp(rng.gauss(0, 0.05)), run) for p in calls]
        for run, slow in (("one", 1.0), ("two", 1.7))
    ]
    write_rows(tmp_path, [r for rows in runs for r in rows])
    found = study.read_study(hardware.get_profile("cpu"), tmp_path)
    assert found.noise.turns == pytest.approx(0.05 * math.sqrt(2), rel=0.2)
    assert noise.noise_of(runs[1], zip(runs[1][:2], runs[0])).turns == 0.0
    once, again = (
        [measure.ratio(a, b) for a, b in zip(rows, rows[1:])] for rows in runs
    )
    wide = [[found.noise.of(x) for x in ratios] for ratios in (once, again)]

    def meet(*sides) -> float:
        return sum(a.low <= b.high and b.low <= a.high for a, b in zip(*sides)) / len(
            sides[0]
        )

    assert meet(once, again) < 0.4 and meet(*wide) >= 0.93
    assert found.ratio(*found.results[:2]) == wide[1][0]


def test_the_line_of_trust_counts_what_passed_and_what_was_rejected():
    rows = rows_at([1.0])
    rows[0] = replace(rows[0], status="incorrect", reason="out is off")
    shown = " ".join(findings.trust_lines(study_of(rows)))
    assert f"{len(rows) - 1} of {len(rows)} measurements passed" in shown
    assert "rejected: 1 of this library. No call was measured twice" in shown


def test_only_undisturbed_rows_of_the_same_code_and_company_are_earlier_ones():
    now = [replace(r, run="now") for r in rows_at([1.0])]
    before = [replace(r, run="before") for r in now]
    pairs = [*zip(now, before)]
    assert noise.repeated([*before, *now], now) == pairs
    for change in (
        {"provenance": {"engine": "other"}},
        {"provenance": {"crowded": True}},
        {"composition": "other"},
        {"status": "incorrect"},
        {"group": "other"},
        {"run": "now"},
    ):
        assert not noise.repeated([replace(r, **change) for r in before], now), change
    for change in ({"provenance": {"crowded": True}}, {"status": "incorrect"}):
        assert not noise.repeated(before, [replace(r, **change) for r in now])
    known = noise.Noise(0.01)
    assert noise.reproduced(pairs, known) == {r.id: True for r in now}
    far = [*zip(now, (longer(r, 2) for r in before))]
    for each in (pairs + far, far + pairs):  # with all earlier runs, or not
        assert not any(noise.reproduced(each, known).values())
    assert noise.reproduced(pairs, noise.Noise()) == {}, (
        "nothing is known of the machine's pace"
    )


@pytest.mark.parametrize(
    "count, factor", [(3, 1.5), (10, 1.5), (20, 1.5), (3, 100.0), (20, 100.0)]
)
def test_a_row_that_an_earlier_run_found_otherwise_is_unstable_and_does_not_excuse_itself(
    tmp_path, count, factor
):
    """One of some calls took ``factor`` times as long the second time, which its own
    samples do not show.

    It is marked, and the intervals of the others stay narrow.
    """
    calls = [
        Point("ringlab", Dilated([16, 32], [1, 2]), seq_len=64 * n)
        for n in range(1, count + 1)
    ]
    rng, rows = random.Random(count), []
    for run, slow in (("one", 1.0), ("two", factor)):
        paces = [
            0.1 * math.exp(rng.gauss(0, 0.01)) * (slow if p == calls[0] else 1)
            for p in calls
        ]
        rows += [row(p, "group", x, run) for p, x in zip(calls, paces)]
    write_rows(tmp_path, rows)
    found = study.read_study(hardware.get_profile("cpu"), tmp_path)
    assert not any(r.unstable for r in rows) and {r.run for r in found.results} == {
        "two"
    }
    assert len(found.reproduced) == count and found.noise.apart < 0.05
    marked = [r.point.seq_len for r in found.results if r.unstable]
    assert 64 in marked and len(marked) <= 1 + count // 5
    side = compare.read_side(str(tmp_path), tmp_path)
    assert [r.point.seq_len for r in side.study.results if r.unstable] == marked
    shown = "\n".join([*findings.trust_lines(found), *findings.limits(found).lines])
    assert f"{count - len(marked)} of {count} times agree with an earlier run" in shown
    twice = [
        r.point.seq_len for r in found.results if found.reproduced[r.group, r.point.id]
    ]
    first = found.results[[r.point.seq_len for r in found.results].index(64)]
    assert all(
        found.ratio(r, first).unstable
        for r in found.results
        if r.point.seq_len in twice
    )
    assert f"Unstable times: {len(marked)} of {count};" in shown
    assert f"Unstable times: {len(marked)}, among them" in shown


def test_a_lone_run_says_that_it_is_one():
    found = study_of(rows_at([1.0]))
    lone = "from run to run"
    assert lone in findings.limits(found).markdown
    again = replace(found, noise=noise.Noise(turns=0.1))
    assert lone not in findings.limits(again).markdown


def test_rows_with_few_rounds_in_common_are_compared_by_all_their_samples(tmp_path):
    slow, fast = (replace(r, run="one", composition="c") for r in rows_at([1.0])[:2])
    shown = study.Study(hardware.get_profile("cpu"), [slow, fast], tmp_path)
    assert shown.ratio(fast, slow).paired and shown.ratio(fast, slow).rounds == 10
    apart = replace(fast, rounds=tuple(range(7, 17)))  # three rounds with the other
    found = shown.ratio(apart, slow)
    assert (
        not found.paired
        and found.verdict == "slower"
        and found.value == pytest.approx(2)
    )
    few = shown.ratio(sampled(apart, apart.seconds[:3]), slow)
    assert (few.low, few.high) == (0.0, math.inf) and cells.times(
        few
    ).sub == "fewer than 5 samples; unpaired"
