"""The page of document 002, from made-up rows: block-sparse attention and extreme
lengths.
"""

from dataclasses import replace

import pytest
import torch
from reporting import (
    Shown,
    longer,
    made,
    made_up,
    page,
    session_row,
    shown,
    study_of,
    system,
)
from ringlab import block_patterns, cache, cost, hardware, patterns
from ringlab.measure import Point, suites, timing
from ringlab.measure.systems import SYSTEMS
from ringlab.report import rows
from ringlab.report.published import published

NAME = "session_summary"


@pytest.mark.parametrize(
    "how",
    [{"heads": 4}, {"head_dim": 32}, {"dtype": "bfloat16"}, {"longest": 2048}],
    ids=str,
)
def test_a_parameter_changes_the_points_and_the_page_is_of_them(how):
    groups = suites.session_summary(hardware.get_profile("cpu"))
    groups = suites.vary(groups, **how)
    results = [session_row(p, g, False, "cpu") for g in groups for p in g.points]
    found = Shown(NAME, study_of(results), **how)
    assert [*found.points.point] == [r.point.id for r in results] and found.drawn
    assert {*found.points.point} != {*shown("002").points.point}


def test_blocks_chosen_by_content_stand_beside_the_patterns():
    *others, last = shown("002").table("Every kind").rows
    assert last[:3] == ("by content", "blocks of 64: the best 5 by content", "7.81 %")
    assert [line[0] for line in others] == [*suites.KINDS] and last[3].text


def test_rows_without_operator_calls_are_shown():
    def older(r):
        kept = {k: v for k, v in r.memory.items() if not k.endswith("_calls")}
        return replace(r, memory=kept)

    def counted(r):
        first = dict(r.point.options) == {"blocks": "rows", "cache": False}
        held = {"operator_calls": 2318, "view_calls": 1315} if first else {}
        return replace(r, memory=r.memory | held)

    told = shown("002", counted).texts[0]
    assert "2,318 (1,315 views) operator calls become 174 (122 views)" in told
    found = shown("002", older)
    assert "operator calls become" not in found.text and found.tables


def test_the_steps_are_compared_among_the_rows_that_took_turns():
    first = {"blocks": "rows", "cache": False}

    def slow(r):
        return longer(r, 3.0) if dict(r.point.options) == first else r

    found = shown("002", slow)
    factors = [row[4] for row in found.table("The steps").rows]
    assert factors[0] is None and len(factors) == 4
    before = [row[4].text for row in shown("002").table("The steps").rows[1:]]
    assert [x.text for x in factors[1:]] != before
    assert f"{factors[-1].text} (" in found.texts[0]

    def original(r):  # another group: no step
        return longer(r, 3.0) if r.point.system == suites.ORIGINAL else r

    told = [row[4].text for row in shown("002", original).table("The steps").rows[1:]]
    assert told == before


def test_the_printed_factor_is_below_the_work_of_what_is_stated():
    pattern = patterns.Dilated(
        [65536, 131072, 262144], [1, 2, 4], "head_groups", "branch"
    )
    work = cost.count(
        pattern, batch=1, seq_len=131072, heads=8, head_dim=64, dtype=torch.float16
    )
    card = hardware.get_profile("gtx1080")
    bandwidth = card.bandwidth(work.floor_bytes)
    least_ms = 1e3 * work.seconds(card.peak("float16"), bandwidth)
    assert work.floor_bytes == 512 * 2**20
    assert least_ms == pytest.approx(published("002")["least_ms"], rel=1e-3)
    assert "1,177" in shown("002").texts[0]


def test_the_share_of_dense_is_by_density_and_pass():
    found, gpu = shown("002"), shown("002", None, "gtx1080")
    tenth, (ratio, *_) = found.names["tenth"].row, found.names["over"]
    row, dense = tenth.iloc[0], next(filter(system("dense_sdpa"), tenth))
    density = patterns.from_dict(row.point.pattern).density(row.point.seq_len)
    assert ratio.value == pytest.approx(row.median / (density * dense.median), rel=0.02)
    here, there = (
        next(line[-1] for line in x.table("tenth").rows if line[3] == "training")
        for x in (found, gpu)
    )
    assert here is None and there.text.endswith("×"), "where dense training was timed"
    [fresh] = [x[4] for x in found.table("tenth").rows if "fresh memory" in x[0]]
    assert fresh.text


def test_every_row_that_a_verdict_rests_on_stands_in_the_data_of_the_figure():
    lines = shown("002").table("Data: time over length").rows
    assert [line[0].text for line in lines if line[1] == 8192] == [
        "This library",
        "Row by row",
        "Batched",
        "Dense SDPA",
    ]


def test_dense_attention_of_another_page_stands_beside_the_window_as_not_timed_in_turns():
    suite = suites.landscape(hardware.get_profile("cpu"))
    wanted = ("dense_sdpa", 16384)
    other = [
        made_up(p, g, False)
        for g in suite
        for p in g.points
        if (p.system, p.seq_len) == wanted
    ]
    about = replace(page("002"), all_suites=study_of(other))
    found, where = Shown(NAME, about), "at 16,384 tokens"
    last = found.names["known"].iloc[-1]
    assert last.seq_len == 16384 and last.dense in other and not last.faster.paired
    assert where in found.texts[0] and "not timed in turns" in found.texts[0]
    assert where not in shown("002").texts[0]


def test_a_refused_kernel_says_why():
    why = "no C++ compiler"

    def refused(r):
        unfit = system("flex")(r)
        return replace(r, status="unsupported", reason=why) if unfit else r

    found = shown("002", refused, "h200")
    lines = found.table("tenth").rows
    assert [x[4].text for x in lines if x[0] == "FlexAttention"] == ["unsupported"]
    said = found.table("are not shown").markdown
    assert why in said and "flex, blocks of 128" in said


def test_operators_of_a_call_are_counted_and_those_built_once_are_not():
    window = block_patterns.sliding_window(1, block_size=8)
    point = Point("ringlab", window, seq_len=64, heads=2, head_dim=8)

    def counted(**options) -> dict:
        call = SYSTEMS["ringlab"](point.but(options=options), "cpu")
        return timing.footprint(call, torch.device("cpu"))[2]

    cache.GLOBAL.clear()
    first, again, uncached = counted(), counted(), counted(cache=False)
    assert first["operator_calls"] == again["operator_calls"] > again["view_calls"] > 0
    assert uncached["operator_calls"] > again["operator_calls"], (
        "what every call builds is part of it"
    )


def test_labels_leave_out_what_stands_by_default():
    labels = {rows.label(r.point).partition(",")[0] for r in made("002")}
    assert {
        "ringlab",
        "ringlab results=False",
        "ringlab blocks=rows cache=False",
        "plan_build blocks=rows warm=False",
    } <= labels
