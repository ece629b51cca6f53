"""The tables that the documents print, with what is known here in each cell."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from reporting import made, page, study_of
from ringlab import hardware, report
from ringlab.measure import suites
from ringlab.report import predicted, tables
from ringlab.report.documents import counterpart, printed
from ringlab.report.index import read_manifest
from ringlab.report.places import RunTarget
from ringlab.report.published import DOCUMENTS, published

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = json.loads((Path(__file__).parent / "recorded/printed.json").read_text())
# The pages of cpu join when its rows are measured with these points.
PROFILES = ["cpu", "gtx1080", "h200"]


def cells(number: str, *args):
    """The cells of all tables of a document, on the rows of ``page``."""
    return printed(page(number, *args), number)


@functools.cache
def computed_cells(number: str):
    profile = hardware.get_profile("gtx1080")
    groups = suites.SUITES[DOCUMENTS[number].suite](profile)
    return printed(
        study_of(predicted.rows_of(profile, groups), "gtx1080", True), number
    )


def one(found, **where):
    for name, value in where.items():
        found = found[found[name] == value]
    (cell,) = found.itertuples()
    return cell


@pytest.mark.parametrize("number", DOCUMENTS)
def test_what_is_printed_is_what_the_document_prints(number):
    """Its numbers are among those of the document's text."""
    known = {*map(float, NUMBERS[number])}
    for cell in cells(number).itertuples():
        digits = re.findall(r"\d[\d,]*\.?\d*", cell.text)
        values = [float(x.replace(",", "")) for x in digits]
        if cell.printed == cell.printed:
            assert values == [cell.printed], cell
        assert cell.what == "" or known.issuperset(values), cell


@pytest.mark.parametrize("number", DOCUMENTS)
def test_nearly_every_cell_has_a_value_or_a_bound_and_the_others_a_reason(number):
    """On the GPU of the documents all but ratios of two bounds; on it a printed time
    or size is divided by ours, on another device counts alone are.
    """
    for found, own in ((computed_cells(number), True), (cells(number), False)):
        found = found[found.what != ""]
        assert found.here.notna().mean() >= (0.6 if own else 0.8), number
        assert (found.reason.where(found.here.isna()) != "").all()
        with_unit = found[found.what.isin(["s", "ms", "MB", "tokens/s"])]
        plain = with_unit[with_unit.unit != "×"]
        ratios = plain.column.str.contains("Ratio|Factor|Efficiency|Speed|vs")
        assert (plain[~ratios].compared == own).all()


def test_quantities_are_those_of_the_row():
    """Made-up rows of one and of two ranks: memory, tokens and their quotients."""
    rows = study_of(made("001"))
    call = {"system": suites.SDPA, "batch": 2, "seq_len": 4096}
    (one_,), (two,) = (rows.rows(**call, world_size=n) for n in (1, 2))
    found = cells("001")
    at = {
        "seq_len": 4096,
        "ranks": 2,
        "table": "Multi-GPU Performance (World Size = 2)",
    }
    peak, ms = two.memory["tracked_peak_bytes"], 1e3 * two.median
    assert one(found, column="Time (s)", **at).here == pytest.approx(ms / 1e3)
    assert one(found, column="Memory (MB)", **at).here == pytest.approx(peak / 2**20)
    assert one(found, column="KB/Token", **at).here == pytest.approx(
        peak / 2**13 / 1024
    )
    rate = one(found, column="Throughput (tok/s)", **at)
    assert rate.here == pytest.approx(2 * 4096 / two.median) and not rate.compared
    assert one(found, column="Effective Seq/GPU", **at).here == 2048
    factor = one_.memory["tracked_peak_bytes"] / peak
    assert one(found, column="Reduction Factor", seq_len=4096).here == pytest.approx(
        factor
    )
    assert one(found, column="Efficiency", seq_len=4096).here == pytest.approx(
        50 * factor
    )
    speed = one(found, table="Speedup with 2 GPUs", column="Speedup", seq_len=4096)
    assert (
        speed.here == pytest.approx(one_.median / two.median, rel=0.1)
        and speed.compared
    )


def test_a_computed_time_is_a_bound_and_ranks_bound_a_speed_up():
    found = computed_cells("002")
    ring = {"table": "Ring Attention (131K tokens)", "row": 2}
    time = one(found, column="Time", **ring)
    assert (time.sign, round(time.here)) == ("≥", 1177) and time.compared
    assert one(found, column="Memory", **ring).sign == "≥"
    speed = one(
        computed_cells("001"),
        table="Speedup with 2 GPUs",
        column="Speedup",
        seq_len=8192,
    )
    assert (speed.sign, speed.here, speed.printed) == ("≤", 2, 122.2)
    rate = one(computed_cells("000"), column="Throughput (tokens/s)", row=1)
    assert rate.sign == "≤" and rate.printed < rate.here


def test_a_row_that_may_not_be_quoted_gives_its_status_and_none_says_so():
    spoiled = cells("004", lambda r: replace(r, status="oom", reason="no"))
    assert {*spoiled[spoiled.what != ""].reason} == {"oom"}
    table = counterpart(study_of([]), "004", "Memory Scaling (2 GPUs)")
    assert "113 MB (here not measured)" in table.markdown
    with pytest.raises(ValueError, match="has no table 'Memory'"):
        counterpart(study_of([]), "004", "Memory")


def test_points_without_a_row_are_computed_and_marked_on_a_gpu_that_is_not_here(
    tmp_path,
):
    """Of half of the points rows were recorded: only these are times, and counted."""
    profile = hardware.get_profile("gtx1080")
    here = RunTarget(profile, tmp_path, "as asked")
    groups = suites.hybrid_summary(profile)
    nothing = report.measured(here, groups)
    assert nothing.computed and not nothing.measured
    assert len(nothing.results) == sum(len(g.points) for g in groups)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("number", DOCUMENTS)
def test_every_printed_cell_stands_on_its_committed_page(number, profile):
    text = (ROOT / "reports" / profile / f"{DOCUMENTS[number].report}.md").read_text()
    said = known = 0
    for about in published(number)["tables"]:
        body = text.split(f"**{tables.markdown_text(about['title'])}**", 1)[1]
        lines = body.strip().split("\n\n")[0].splitlines()
        assert len(lines) > 2
        for line in lines[2:]:
            for cell in line.strip("| ").split(" | "):
                said += "(here " in cell
                known += bool(re.search(r"\(here [≥≤ ]*\d", cell))
    expected = cells(number)
    assert said == (expected.what != "").sum()
    assert read_manifest(ROOT / "reports" / profile) and known >= 0.6 * said
