"""The page of selected keys follows its rows: where methods pay, and what they cost."""

import functools
from dataclasses import replace

import analysis
import pytest
from reporting import Shown, longer, made_up, study_of
from ringlab import hardware
from ringlab.measure import suites

NAME = "selection"
FASTER_FROM = {"moba": 8192, "nsa": 16384, "dsa": 1 << 20, "vertical_slash": 1024}


def row_of(point, group):
    """Dense attention of torch twice as slow as ours, choices a tenth of it, methods
    faster by the length over their own.
    """
    row = made_up(point, group)
    factor = {"dense_sdpa": 2.0}.get(point.system, 1.0)
    if own := FASTER_FROM.get(point.system):
        factor = 0.8 * own / point.seq_len
        factor = 0.1 if dict(point.options).get("choice") else factor
    return longer(row, factor, bound_seconds=1e-9)


@functools.cache
def shown(change=None, **parameters) -> Shown:
    groups = suites.selection(hardware.get_profile("cpu"))
    rows = [row_of(p, g) for g in groups for p in g.points]
    page = study_of(map(change, rows) if change else rows, suite=NAME)
    return Shown(NAME, page, **parameters)


def pays(page: Shown) -> dict[str, tuple]:
    """Forward and training, by method."""
    table = page.table("From which length")
    return {row[0].text: row[1:3] for row in table.rows}


def test_a_method_pays_from_the_length_from_which_all_are_faster():
    found = pays(shown())
    assert found["MoBA"] == ("8,192", "8,192 or fewer")
    assert found["NSA"] == ("16,384", "not up to 8,192")
    assert found["DSA"] == ("not up to 4,096", "not measured")
    assert found["Vertical and slash"] == ("4,096 or fewer", "not measured")
    assert "MoBA from 8,192; NSA from 16,384; DSA not up to 4,096" in shown().text

    def slow_later(row):
        late = row.point.system == "moba" and row.point.seq_len == 16384
        return longer(row, 3.0) if late else row

    assert pays(shown(slow_later))["MoBA"] == ("32,768", "8,192 or fewer")


def test_dense_is_the_fastest_kernel_and_the_choice_a_share_of_the_call():
    lines = shown().table("Data: every length").rows
    over = {(row[0], row[1], row[2]): row[5] for row in lines}
    assert over["NSA", 32768, "forward, causal"].text.startswith("0.4")
    row = shown().table("From which length").rows[0]
    assert row[4].text.startswith("0.2") and row[5].text == "0.499×"

    def without_ours(row):
        ours = row.point.system == "ringlab" and row.point.seq_len == 4096
        return replace(row, status="crashed") if ours else row

    lines = shown(without_ours).table("Data: every length").rows
    again = {(row[0], row[1], row[2]): row[5] for row in lines}
    twice = again["NSA", 4096, "forward, causal"]
    assert twice.text.startswith("1.6"), "beside torch's, which is twice as slow"


def test_what_is_wrong_is_not_compared_and_is_named():
    def wrong(row):
        return replace(row, errors={"out": 1.0}) if row.point.system == "moba" else row

    page = shown(wrong)
    assert "MoBA" not in pays(page) and "rows are not shown" in page.text


@pytest.mark.parametrize("profile", ["h200", "gtx1080"])
def test_a_gpu_that_is_absent_has_computed_rows(profile):
    groups = suites.selection(hardware.get_profile(profile))
    rows = [made_up(p, g, computed=True) for g in groups for p in g.points]
    page = Shown(NAME, study_of(rows, profile, computed=True))
    assert "choosing pays is not computed" in page.text
    assert not page.panels


def test_what_models_learned_is_read_from_the_rows_of_trainings(tmp_path):
    page = shown()
    table = page.table("What small models learned with it")
    learned = {row[0]: row[1] for row in table.rows}
    assert [*learned] == analysis.BESIDE and learned["Dense"].text == "98.5"
    assert "**Selected keys**. Right answers" in page.text
    empty = shown(data=str(tmp_path))
    assert "**What models learn** with these is not told by times" in empty.text
    assert not any(t.caption.startswith("What small") for t in empty.tables)


def test_lengths_replace_those_of_the_page():
    points = shown(seq_lens="[2048]").points
    assert {*points.seq_len} == {2048}
    assert {*shown(head_dim=32).points.head_dim} == {32}
