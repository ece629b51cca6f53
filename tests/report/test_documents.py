"""The pages about the five documents, from made-up rows: what they quote, what they
refuse to quote, what they say.
"""

from dataclasses import replace

import pytest
from reporting import (
    BAD,
    made,
    made_up,
    page,
    shown,
    shows_no_marks,
    spoiling,
    study_of,
    words,
)
from ringlab import patterns
from ringlab.measure import Group, Point, validity
from ringlab.report import findings, tables


def text(cell) -> str:
    return tables.cell(cell).text


@pytest.mark.parametrize("profile", ["cpu", "gtx1080"])
def test_every_table_is_filled_and_the_answer_is_short(profile):
    found = shown("002", None, profile)
    for t in found.tables:
        assert t.rows and text(t.rows[0][0]) != "not measured", t.caption
        names = " ".join(t.columns)
        timed = "Time (ms)" in names and "published" not in t.caption
        assert not timed or "Roofline" in names, t.caption
    assert found.drawn and len(found.texts[0].splitlines()) <= 5


# --------------------------------------------------------------------------------------
# what may be quoted


def test_no_bad_row_reaches_a_table_a_figure_a_headline_or_a_verdict():
    change = spoiling("002", [*BAD][:4])
    found = shows_no_marks("002", change)
    assert {round(v, 2) for v in found.drawn} <= {
        1.12
    }  # peaks of points that are not timed
    assert {*words(page("002", change), "002").values()} == {"untested"}


@pytest.mark.parametrize(
    "alone, each, faster, status",
    [
        (1, 1, 2.3, "suspect"),
        (2, 1, 2.3, "suspect"),
        (1, 1, 2.1, "ok"),
        (1, 4, 2.3, "ok"),
    ],
)
def test_superlinear_is_told_from_one_rank_with_as_many_threads(
    alone, each, faster, status
):
    points = [
        Point("ringlab", patterns.Dense(), seq_len=64, world_size=p) for p in (1, 2)
    ]
    one, two = (
        made_up(p, Group("g", [p]), False, ranks={"threads": n})
        for p, n in zip(points, (alone, each))
    )
    two = replace(two, group="another", median=one.median / faster, bound_seconds=None)
    assert validity.mark_superlinear([one, two])[1].status == status, (
        "in whichever group it stands"
    )


def test_provenance_says_clocks_completeness_and_counts(tmp_path):
    def facts(results) -> dict:
        return {
            row[0]: row[1]
            for row in findings.provenance(study_of(results, suite="optimization")).rows
        }

    results = []
    for i, r in enumerate(made("000")):
        state = {
            "sm_clock_mhz": 1900.0 + i,
            "temperature_c": 50.0,
            "throttle_reasons": "0x0",
        }
        more = {"gpu_before": state, "gpu_after": state, "load_average": 0.1 * i}
        results.append(replace(r, provenance=r.provenance | more))
    found = facts(results)
    assert found["Complete"] == "yes" and found["Points"].startswith(
        f"{len(results)} measured"
    )
    assert (
        "sm clock mhz 1900 to" in found["GPU before a group"]
        and "temperature c 50" in found["GPU after a group"]
    )
    found = facts(results[:-2])
    assert (
        found["Complete"] == f"no, 2 of {len(results)} are missing"
        and "GPU before a group" in found
    )
    plain = facts(made("000"))
    assert "GPU before a group" not in plain and "Complete" in plain
    # Lines that are no rows do not stop it.
    (tmp_path / "samples.jsonl").write_bytes(b'\xff\n[1]\n{"kind": "res\n')
    assert findings.provenance(replace(study_of(made("000")), folder=tmp_path)).rows


def test_a_row_of_no_suite_is_of_every_report():
    mine = Point("ringlab", patterns.Dense(), seq_len=64)
    stray = made_up(mine, Group("mine", [mine]), False)
    assert stray in study_of([*made("004"), stray]).of("hybrid_summary").results


# --------------------------------------------------------------------------------------
# several documents
