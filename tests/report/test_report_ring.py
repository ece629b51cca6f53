"""Reports about ranks: what they quote, what they refuse to time, and verdicts that follow the rows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_suites import lean, on_gpu, rank_suite
from reporting import Shown, made_up
from ringlab import hardware, patterns
from ringlab.measure import Group, Point
from ringlab.report import claims as single
from ringlab.report import study, trust
from ringlab.report.ring import claims, comparison, hybrid, rows, scaling

DOCUMENTS = {
    "001": (scaling, "benchmark_summary"),
    "003": (comparison, "performance_comparison"),
    "004": (hybrid, "hybrid_summary"),
}


def page(number: str, change=lambda r: r) -> study.Study:
    _, suite = DOCUMENTS[number]
    results = [change(r) for r in rank_suite(suite)]
    return study.Study(hardware.get_profile("cpu"), results, Path("cpu/data"), suite=suite)


def words(number: str, change=lambda r: r) -> dict[str, str]:
    return {claim["key"]: verdict.word for claim, verdict in claims.judge(page(number, change), number)}


def shown(number: str, change=lambda r: r) -> Shown:
    document = DOCUMENTS[number][0]
    return Shown(document, page(number, change), [n for n in document.__all__ if n not in ("open_study", "provenance")])


@pytest.mark.parametrize("number", DOCUMENTS)
def test_every_table_is_filled_and_every_claim_has_a_verdict(number):
    found = shown(number)
    document = DOCUMENTS[number][0]
    assert 1 <= len(document.answer(page(number)).lines) <= 5
    assert all(table.rows for table in found.tables) and "not measured" not in found.tables[0].markdown.split("\n")[4]
    judged = words(number)
    assert set(judged) == {c["key"] for c in rows.published(number)["claims"]}
    assert set(judged.values()) <= set(single.WORDS)


@pytest.mark.parametrize("number", DOCUMENTS)
@pytest.mark.parametrize("flaw", [{"status": "incorrect"}, {"errors": {}}, {"errors": {"out": 0.5}}])
def test_no_row_without_a_passed_check_reaches_a_table_a_figure_or_a_verdict(number, flaw):
    def spoiled(r):
        memory = {"floor_bytes": 2**30, "tracked_peak_bytes": int(4.321 * 2**30)}
        about = r.ranks | ({"bytes_sent": [987654321]} if r.ranks else {})
        fast = 0.000543217
        marked = {"seconds": (fast,) * 10, "median": fast, "ci": (fast, fast)} if r.seconds else {}
        return replace(r, memory=memory, ranks=about, **marked, **flaw)

    found = shown(number, spoiled)
    assert all(trust.objection(r) for r in page(number, spoiled).results)
    for mark in ("0.543", "4.32", "942 MiB"):
        assert mark not in found.text
    assert not found.drawn
    decided = {k for k, w in words(number, spoiled).items() if w in ("reproduced", "refuted")}
    assert not decided


def test_more_ranks_than_cores_enter_no_time():
    found = page("001")
    crowded = [r for r in found.results if r.ranks.get("oversubscribed")]
    assert crowded and not any(rows.timed(r) for r in crowded)
    forced = page("001", lambda r: replace(r, median=9.0, ci=(9.0, 9.0), seconds=(9.0,)) if r in crowded else r)
    table = scaling.times(forced)
    lines = [row for row in table.rows if row[1].text == "4" and not row[1].sub]
    assert lines and all(row[2].text == "more ranks than cores" and row[3] is None and row[4] is None for row in lines)
    assert "4 ranks, for which there are too few cores" in scaling.answer(found).lines[-1]


def test_scaling_needs_three_numbers_of_ranks():
    assert words("001")["scaling"] != "undecided"
    assert re.search(r"O\(n/p\), where .* on 2, .* on 4\.", scaling.memory(page("001")).note)
    few = page("001", lambda r: r if r.point.world_size <= 2 else replace(r, status="oom"))
    verdicts = {c["key"]: v for c, v in claims.judge(few, "001")}
    assert verdicts["scaling"].word == "undecided" and "not shown by 2 numbers" in scaling.memory(few).note


def test_a_length_that_failed_is_named():
    assert "Nothing failed at the lengths measured" in scaling.answer(page("001")).markdown
    last = page("001", lambda r: replace(r, status="oom", reason="no") if r.point.seq_len == 16384 else r)
    for text in (scaling.answer(last).markdown, scaling.longest(last).note):
        assert "16,384 on 2 ranks (oom)" in text and "Nothing failed" not in text


def test_superlinear_is_told_from_one_rank_with_as_many_threads():
    one, two = (Point("ringlab", patterns.Dense(), seq_len=64, world_size=p) for p in (1, 2))
    rows_ = [made_up(p, Group("g", [p]), False) for p in (one, two)]
    base = rows_[0].median

    def status(threads_alone, threads_each, faster):
        alone = replace(rows_[0], ranks={"threads": threads_alone})
        both = replace(rows_[1], group="another", ranks={"threads": threads_each}, median=base / faster)
        found = [alone, replace(both, bound_seconds=None)]
        return trust.judged(found)[1].status

    assert status(1, 1, 2.3) == status(2, 1, 2.3) == "suspect", "in whichever group it stands"
    assert status(1, 1, 2.1) == "ok" == status(1, 4, 2.3)


def test_verdicts_follow_the_rows():
    several = words("001", lambda r: lean(r, 0.73) if r.point.world_size > 1 else r)
    assert several["memory-reduction"] == "reproduced" != words("001")["memory-reduction"]
    assert several["kb-per-token"] == "reproduced"

    def quick(r):  # a hundred times faster on two ranks: such rows are suspect, and prove nothing
        r = on_gpu(r)
        return replace(r, seconds=tuple(s / 60 for s in r.seconds)) if r.point.world_size == 2 else r

    assert words("001")["speedup"] == "not testable on this profile"
    assert words("001", on_gpu)["speedup"] == "refuted" and words("001", quick)["speedup"] == "reproduced"
    assert trust.judged([replace(r, median=r.median and r.median / 60) if r.point.world_size == 2 else r
                         for r in rank_suite("benchmark_summary")])  # fmt: skip

    def heavy(r):
        return lean(r, 17) if r.point.system.endswith("Robust") else r

    assert words("003")["memory"] == "refuted" and words("003", heavy)["memory"] == "reproduced"
    assert words("003")["rows-held"] == "reproduced" and words("003", heavy)["rows-held"] == "refuted"
    assert words("003")["use-collective"] == "refuted" == words("003")["several"]

    def chatty(r):
        sent = {"bytes_sent": [3 * x for x in r.ranks.get("bytes_sent", ())]}
        return replace(r, ranks=r.ranks | sent) if r.point.system.endswith("Collective") and r.ranks else r

    assert words("003")["volume"] == "refuted" and words("003", chatty)["volume"] == "reproduced"
    assert words("004")["longer"] == "reproduced"
    assert words("004", lambda r: replace(r, status="oom") if r.point.seq_len > 16384 else r)["longer"] == "undecided"
    assert words("004")["standard"] == "inconsistent as printed" == words("004")["ratio"]


def test_a_report_takes_its_own_rows_alone():
    everything = [r for _, name in DOCUMENTS.values() for r in rank_suite(name)]
    whole = study.Study(hardware.get_profile("cpu"), everything, Path("cpu/data"))
    for _, name in DOCUMENTS.values():
        own = whole.of(name)
        assert len(own.results) == len(rank_suite(name)) and own.suite == name
    mine = Point("ringlab", patterns.Dense(), seq_len=64)
    stray = made_up(mine, Group("mine", [mine]), False)
    assert stray in study.Study(whole.profile, [*everything, stray], whole.folder).of("hybrid_summary").results
