"""The pages of documents 001, 003 and 004, which are about attention across ranks: their
cells on made-up rows.
"""

import re
from dataclasses import replace

import pandas
import pytest
from reporting import (
    BAD,
    DOCUMENTS,
    Shown,
    made,
    page,
    rank_row,
    shown,
    shows_no_marks,
    slower,
    spoiling,
    study_of,
    system,
    words,
)
from ringlab import hardware
from ringlab.estimate import longest
from ringlab.measure import suites, validity
from ringlab.report.tables import DASH, cell

each_page = pytest.mark.parametrize("number", ["001", "003", "004"])


def lengths(found: Shown) -> pandas.DataFrame:
    """The texts of the table of what 001 or 004 did not test, by tokens and ranks."""
    table = next(t for t in found.tables if ">Ranks" in t.columns)
    rows = [[cell(x).text for x in row] for row in table.rows]
    return pandas.DataFrame(rows, columns=table.columns).set_index(
        [">Tokens", ">Ranks"]
    )


@each_page
def test_every_table_is_filled_and_the_answer_is_short(number):
    found = shown(number)
    assert found.drawn and all(t.rows for t in found.tables)
    assert len(found.texts[0].splitlines()) == 5


@each_page
def test_no_bad_row_reaches_a_table_a_figure_a_headline_or_a_verdict(number):
    change = spoiling(number, [*BAD][:4])
    assert not shows_no_marks(number, change).drawn
    assert {*words(page(number, change), number).values()} == {"untested"}


@each_page
@pytest.mark.parametrize(
    "varied",
    [{"heads": 4}, {"head_dim": 32}, {"dtype": "bfloat16"}, {"longest": 2048}],
    ids=str,
)
def test_a_parameter_changes_the_points_and_the_page_stands(number, varied):
    suite = suites.SUITES[DOCUMENTS[number].suite]
    groups = suites.vary(suite(hardware.get_profile("cpu")), **varied)
    rows = [rank_row(p, g, False, "cpu") for g in groups for p in g.points]
    found = Shown(DOCUMENTS[number].report, study_of(rows), **varied)
    assert [*found.points.point] == [r.point.id for r in rows]
    assert {*found.points.point} != {*shown(number).points.point}
    assert found.tables[0].rows and found.drawn


@each_page
def test_rows_are_those_of_the_profile_and_the_folder(number):
    about = page(number, None, "gtx1080", True)
    found = Shown(DOCUMENTS[number].report, about, data="elsewhere")
    assert found.asked == ("gtx1080", "elsewhere", True)


def test_more_ranks_than_cores_enter_no_time():
    crowded = [r for r in page("004").results if r.ranks.get("oversubscribed")]
    assert crowded and not any(validity.timed(r) for r in crowded)
    slow = {"median": 9.0, "ci": (9.0, 9.0), "seconds": (9.0,)}
    forced = shown("004", lambda r: replace(r, **slow) if r in crowded else r)
    assert lengths(forced).index.is_unique, "of ranks in one process it has none"
    four = lengths(forced).xs("4", level=">Ranks")
    assert {*four[">Time (ms)"]} == {"more ranks than cores"}
    assert {*four[">Roofline (ms)"], *four[">Tokens/s"]} == {DASH}
    assert "4 ranks, for which there are too few cores" in forced.texts[0]


def test_the_finding_says_what_falls_what_it_gains_and_where_segments_are_cut():
    """Made-up rows all send. Those of the run do not, but one: it alone is named, with
    what it holds.
    """
    found = shown("001").names
    falls = r"16,384 tokens .* 1\.\d+× on 2 ranks, which are 2\.0\d× \(.* 2\.\d+× on 4 "
    assert re.search(falls, found["ranks_line"])
    assert found["shard_line"].count("segments are cut") == 1

    def silent(r):
        short = (r.point.seq_len, r.point.world_size) == (2048, 4)
        if short or "bytes_sent" not in r.ranks:
            return r
        return replace(r, ranks=r.ranks | {"bytes_sent": [0, 0]})

    quiet = shown("001", silent).names["shard_line"]
    assert quiet.count("segments are cut") == 1
    assert re.search(r"At 2,048 tokens on 4 ranks .* falls 2\.\d+×\.", quiet)
    none = shown("001", lambda r: replace(r, status="oom")).names
    assert none["ranks_line"].endswith("not measured.")
    assert "segments are cut" not in none["shard_line"]


def test_lengths_are_those_of_longest_and_one_that_failed_has_no_number():
    found, budget = shown("001").names["fits_line"], page("001").memory_bytes
    for ranks in (1, 2):
        most = longest(suites.RING_DOCUMENT, budget, ranks=ranks)
        assert f"{most:,} tokens on {ranks} rank" in found
    none = {"status": "oom", "reason": "no"}
    last = shown("001", lambda r: replace(r, **none) if r.point.seq_len == 16384 else r)
    *_, row = last.table("World Size = 1").rows
    assert [x.sub for x in row] == ["", *["here oom"] * 4]


def test_a_roofline_is_of_the_threads_of_the_row():
    """One rank of one thread has half of a machine of two: its shortest time is twice
    that of two ranks.
    """

    def two(r):
        about = r.provenance | {"threads": 2, "device": "cpu"}
        return replace(r, bound_seconds=0.01, provenance=about) if r.seconds else r

    found = shown("004", two)
    each = lengths(found)[">Roofline (ms)"].groupby(">Ranks").agg(set)
    assert each["1"] == {"20.0"} and each["2"] == {"10.0"}
    bounds = (
        page("004", two).frame().groupby(["world_size", "threads"])["bound_s"].min()
    )
    assert bounds[1, 1] == 0.02 and bounds[2, 1] == 0.01, "in the data too"
    assert "and of dense attention: 1." in shown("001", two).table("The systems").note


def test_schemes_that_send_as_much_share_a_name():
    found = shown("003").names
    sent = r"sends [\d.]+ KiB by plan, 12 MiB by ring and all-gather\*\*, at 4,096 tokens on 4 "
    held = r"[\d.]+ MiB by plan, [\d.]+ MiB by ring, [\d.]+ MiB by all-gather; .* are 8 MiB"
    assert re.search(sent, found["ranks_line"]) and re.search(held, found["ranks_line"])
    assert "within noise" in found["one_line"] and "1.00× the mem" in found["one_line"]
    apart = shown("003", slower(1.5, system(suites.ROBUST))).names
    assert "within noise" not in apart["one_line"]
    within = [
        int(re.search(r"(\d+) of 8 differences", x["ranks_line"])[1])
        for x in (found, apart)
    ]
    assert within[0] > 4 >= within[1] > 0


def test_times_over_a_link_stand_beside_what_sending_and_computing_take():
    """Made-up rows take as long at every rate; those of a machine without links have
    no times.
    """
    groups = suites.links(hardware.get_profile("cpu"))
    rows = [rank_row(p, g, False, "cpu") for g in groups for p in g.points]
    absent = [replace(r, status="unsupported", reason="no root") for r in rows]
    for each, answer in (rows, "yes"), (absent, None):
        about = study_of(each, suite="links")
        found = Shown("performance_comparison", page("003"), about)
        table = found.table("Over a link")
        ten, _, fifth, *_ = (dict(zip(table.columns, row)) for row in table.rows)
        assert len(table.rows) == 60 and ten.get("Between") == answer
        assert (fifth[">Sent by a rank"], fifth[">Sending (ms)"]) == ("4 MiB", "168")
    assert fifth[">Time (ms)"].text == "unsupported"


def test_a_row_of_one_head_is_named_with_its_heads():
    more = lengths(shown("001"))
    assert {*more[">Heads"].loc["1,048,576"]} == {"1"} != {*more[">Heads"].loc["8,192"]}
    said = "The longest call here, 1,048,576 tokens on 2 ranks, heads: 1, needs"
    assert said in shown("001").names["shard_line"]
    one = {"seq_len": 2**20, "world_size": 2, "heads": 1, "kv_heads": 1}
    row = made("004")[0]
    long = replace(row, point=row.point.but(**one))
    about = study_of([*made("004"), long], suite="hybrid_summary")
    assert words(about, "004") == words(page("004"), "004")
