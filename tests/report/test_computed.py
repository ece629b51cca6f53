"""Rows of a GPU that is absent: their numbers, and that none passes for a measured one."""

import re

import pytest
import torch
from bs4 import BeautifulSoup
from reporting import (
    CPU,
    Shown,
    figure,
    made,
    made_up,
    notebook,
    sampled,
    shown,
    study_of,
    write_rows,
)
from ringlab import cost, hardware, kernels, measure, patterns
from ringlab.estimate import estimate
from ringlab.measure import Group, Point, suites, validity
from ringlab.report import cells, driver, findings, noise, places, predicted, study
from ringlab.report.evidence import evidence
from ringlab.report.published import DOCUMENTS, published

GTX = hardware.get_profile("gtx1080")
POINT = Point("ringlab", patterns.Dilated([2048, 4096], [1, 2]), seq_len=8192)
PAIR = Group("pair", [POINT, POINT.but(system="dense_sdpa", pattern=patterns.Dense())])


def row_of(point: Point, profile=GTX):
    (row,) = predicted.rows_of(profile, [Group("one", [point])])
    return row


# --------------------------------------------------------------------------------------
# numbers


def test_a_row_on_one_device_is_as_estimated_and_as_by_hand():
    row = row_of(POINT)
    shape = {"seq_len": 8192, "heads": 8, "head_dim": 64, "dtype": torch.float32}
    expected = estimate(patterns.from_dict(POINT.pattern), profile="gtx1080", **shape)
    assert row.memory["tracked_peak_bytes"] == expected.peak_bytes
    assert row.bound_seconds == expected.bound_s
    # 2,048 keys in four segments; of 4,096 half the rows in two, a quarter of them known
    pairs = 8 * (4 * 2048**2 + 2 * 2048**2 - 4 * 1024**2)
    assert row.cost["distinct_pairs"] == pairs
    by_hand = 4 * 64 * pairs / GTX.peak(torch.float32)
    assert row.bound_seconds == pytest.approx(by_hand)
    assert row.memory["floor_bytes"] == 4 * 8192 * 8 * 64 * 4
    assert (row.status, row.seconds, row.median, row.errors) == (
        "computed",
        (),
        None,
        {},
    )
    assert row.provenance["device_name"] == GTX.title
    chosen = kernels.expected("cuda", (6, 1), torch.float32, 64, pattern_kind="ladder")
    assert row.provenance["kernel"] == chosen.name == "efficient"


def test_a_row_on_several_ranks_has_the_work_and_the_bytes_of_one_of_them():
    point = POINT.but(pattern=suites.DOCUMENT, seq_len=4096, world_size=4)
    row = row_of(point.but(options={"scheme": "plan"}))
    how = {"heads": 8, "head_dim": 64, "dtype": torch.float32, "seq_len": 4096}
    expected = estimate(
        suites.DOCUMENT, ranks=4, scheme="plan", profile="gtx1080", **how
    )
    sent = expected.sent_by_rank
    assert row.ranks["bytes_sent"] == sent and cells.sent_bytes(row) == max(sent) > 0
    assert cells.peak_bytes(row) == expected.peak_bytes
    whole = cost.count(suites.DOCUMENT, batch=1, **how)
    work = whole.folded_flops / 4 / GTX.peak("float32")
    link = max(sent) / max(GTX.links.values())
    assert row.bound_seconds == pytest.approx(max(work, link))


def test_what_is_not_known_is_left_out():
    window = suites.landscape(GTX)[0].points[0].but(pattern=suites.WINDOW)
    row = row_of(window.but(system=suites.TORCH_SPARSE))
    assert row.status == "computed" and row.bound_seconds
    assert cells.peak(row) is None, "it does not run without data"
    flex = row_of(window.but(system="flex"))
    assert flex.status == "unsupported" and "Triton" in flex.reason
    build = row_of(POINT.but(system="plan_build"))
    assert build.bound_seconds is None and cells.time(build).text == "–"
    refused = row_of(POINT.but(options={"backend": "flash"}))
    assert refused.status == "unsupported" and "8.0 or newer" in refused.reason


# --------------------------------------------------------------------------------------
# no computed row passes for a measured one


@pytest.mark.parametrize("planted", [False, True])
def test_a_computed_row_enters_no_ratio_no_noise_floor_and_no_evidence(planted):
    """Not even with times, errors and a median that nothing should give it."""
    twin = POINT.but(options={"twin": True})
    group = Group("pair", [*PAIR.points, twin])
    good = [made_up(p, group) for p in group.points]
    rows = predicted.rows_of(GTX, [group])
    if planted:
        same = "errors", "run", "tolerance", "composition"
        rows = [
            sampled(r, [1e3 * s for s in x.seconds], **{n: vars(x)[n] for n in same})
            for r, x in zip(rows, good)
        ]
    found = study_of(rows, "gtx1080")
    assert found.computed and not found.good and not found.failed
    assert not any(
        validity.timed(r) or validity.why_not_quotable(r) == "" for r in rows
    )
    for row in rows:
        assert found.ratio(row, good[0]) is found.ratio(good[0], row) is None
        assert cells.time(row).text.startswith("≥ ") and cells.rate(row) is None
        assert cells.time(row).sub == "computed" and cells.roofline(row) is None
        assert cells.error(row) is None
    assert found.controls == [] and found.noise_floor == 1.0
    assert evidence(found) == ()
    assert noise.noise_of(rows * 4, []) == noise.Noise() and not noise.repeated(
        rows, rows
    )
    assert cells.pair_cost(found, *rows[:2]) is None
    frame = found.frame()
    assert not frame.timed.any() and {*frame.status} == {"computed"}
    assert list(frame.shown_s) == [r.bound_seconds for r in rows]
    assert validity.mark_superlinear(rows) == rows
    with_good = study_of([*rows, *good])
    assert with_good.noise_floor == study_of(good).noise_floor


def test_a_source_of_an_absent_gpu_computes_and_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "run", lambda *a, **k: pytest.fail("measured"))
    monkeypatch.setattr(hardware, "detect", lambda: CPU)
    here = study.source("gtx1080", str(tmp_path))
    assert here.computed and not here.runs
    found = study.measured(here, [PAIR])
    assert found.computed and len(found.results) == 2 and not [*tmp_path.iterdir()]
    with pytest.raises(places.UsageError, match="no samples.jsonl in the folder"):
        study.source("gtx1080", str(tmp_path / "absent"))
    with pytest.raises(
        places.UsageError, match="cannot be measured here: needs NVIDIA"
    ):
        places.run_target("gtx1080", CPU, tmp_path, strict=True)
    write_rows(tmp_path, [made_up(p, PAIR) for p in PAIR.points])
    assert not study.source("gtx1080", str(tmp_path)).computed, "recorded elsewhere"


# --------------------------------------------------------------------------------------
# pages


def pages():
    for number in DOCUMENTS:
        yield shown(number, None, "gtx1080", True)
    groups = suites.landscape(GTX)
    rows = []
    for g in groups:
        rows += [
            made_up(p, g, True, memory={"cache_bytes": 2**20, "floor_bytes": 1})
            for p in g.points
            if p.system not in ("packed", "torchscale_dilated")
        ]
    yield Shown("landscape", study_of(rows, "gtx1080", True, "landscape"))


@pytest.fixture(scope="module")
def computed_pages():
    return [*pages()]


def test_pages_of_computed_rows_say_what_is_computed_and_nothing_of_measurements(
    computed_pages,
):
    printed = {t["title"] for n in DOCUMENTS for t in published(n)["tables"]}
    for found in computed_pages:
        opening = found.texts[0]
        assert re.search(r"\d", opening) or "is not computed" in opening
        for word in ("Trust", "not measured", "noise", "passed"):
            assert word not in opening
        for table in found.tables:
            assert table.rows, table.caption
            if table.caption in printed:
                continue
            names = " ".join(table.columns)
            for word in ("Roofline", "Faster", "Published (ms)", "tokens/s"):
                assert word not in names or "claim" in table.caption, table.caption
        assert all("Time (ms)" != title for title in found.panels)
    drawn = [title for found in computed_pages for title in found.panels]
    assert drawn.count("Shortest possible time (ms), computed") == 3
    assert "4,096 tokens on 4 ranks" in computed_pages[3].texts[0]


def test_a_page_of_measured_rows_has_the_axis_of_times():
    assert (
        "Time (ms)" in shown("000").panels and study_of(made("000")).computed is False
    )
    assert (
        "Trust" in findings.finding(study_of(made("000")), "a", computed=["b"]).markdown
    )


def test_make_report_computes_an_absent_gpu_and_gives_the_same_twice(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(measure, "run", lambda *a, **k: pytest.fail("measured"))
    source = notebook(tmp_path / "one.ipynb", figure(1))

    def run() -> dict[str, bytes]:
        how = {"reports": tmp_path / "reports", "machine": CPU, "notebooks": [source]}
        driver.run("gtx1080", force=True, **how)
        folder = tmp_path / "reports" / "gtx1080"
        return {p.name: p.read_bytes() for p in folder.glob("*.html")}

    first = run()
    page = BeautifulSoup(first["one.html"].decode(), "html.parser")
    (banner,) = page.select(".banner")
    assert banner.code.text == "make report GPU=gtx1080"
    strip = [
        x.decode().partition("Page made")[0] for x in (*first.values(), *run().values())
    ]
    assert strip[0] == strip[1]
    assert {p.name for p in (tmp_path / "reports").iterdir()} >= {"gtx1080", "index.md"}
