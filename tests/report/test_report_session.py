"""The report on block-sparse attention and extreme lengths: what it quotes, and verdicts that follow the rows."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_up_suites import session_row, session_suite, slower, system, way
from reporting import Shown
from ringlab import block_patterns, cache, cost, hardware, patterns
from ringlab.measure import Group, Point, suites, timing
from ringlab.measure.systems import SYSTEMS
from ringlab.report import driver, study, trust
from ringlab.report import rows as names
from ringlab.report.session import claims, document, rows, sparsity
from ringlab.report.verdicts import WORDS

NAME = "session_summary"
NEW = {suites.ORIGINAL, suites.OPTIMIZED, suites.TORCH_SPARSE, "flex"}
LONG = ("tenth", "Extreme", "pattern cache where", "Scratch")  # a rehearsal leaves them out
PROFILES = [("cpu", "cpu", False), ("gtx1080", "cuda", False), ("h200", "cuda", False), ("gtx1080", "cpu", True)]


def page(change=lambda r: r, name: str = "cpu", device: str = "cpu", rehearsal: bool = False) -> study.Study:
    folder = Path(f"{name}-rehearsal/data" if rehearsal else f"{name}/data")
    results = [change(r) for r in session_suite(name, device, rehearsal)]
    return study.Study(hardware.get_profile(name), results, folder, suite=NAME)


def words(change=lambda r: r, **which) -> dict[str, str]:
    return {claim["key"]: verdict.word for claim, verdict in claims.judge(page(change, **which))}


def shown(change=lambda r: r, **which) -> Shown:
    found = [n for n in document.__all__ if n not in ("open_study", "provenance")]
    return Shown(document, page(change, **which), found)


@pytest.mark.parametrize("name, device, rehearsal", PROFILES)
def test_the_suite_holds_the_documents_points(name, device, rehearsal):
    groups = suites.SUITES[NAME](hardware.get_profile(name), device=device, rehearsal=rehearsal)
    by_name = {g.name: g.points for g in groups}
    points = [p for g in groups for p in g.points]
    others = {g.name for s in suites.SUITES if s != NAME for g in suites.SUITES[s](
        hardware.get_profile(name), device=device, rehearsal=rehearsal)}  # fmt: skip
    assert len(by_name) == len(groups) and not by_name.keys() & others, "rows are told apart by their groups' names"
    assert {p.system for p in points} <= set(SYSTEMS) | NEW
    assert all(Point.from_dict(p.to_dict()) == p for p in points)
    table = by_name[suites.SPARSE_TABLE]
    assert {p.system for p in table} == NEW - {"flex"} | {"ringlab", "dense_sdpa"}
    assert all(p.dtype == "float32" for p in table if p.system == suites.TORCH_SPARSE)
    assert {p.seq_len for p in table} == {4096} and int(suites.WINDOW.blocks(4096).sum()) == 314
    assert sum("twin" in dict(p.options) for p in points) == 2
    if rehearsal:
        assert max(p.seq_len for p in points) == 4096 and suites.EXTREME_LENGTHS not in by_name
        return
    assert max(p.seq_len for p in by_name[suites.EXTREME_LENGTHS]) == 262144
    for p in by_name[suites.EFFICIENCY]:
        if p.pattern["kind"] == "block_sparse" and not p.causal:
            assert 0.085 < patterns.from_dict(p.pattern).density(p.seq_len) < 0.11


@pytest.mark.parametrize("name, device, rehearsal", PROFILES)
def test_every_table_is_filled_and_every_claim_has_a_verdict(name, device, rehearsal):
    which = {"name": name, "device": device, "rehearsal": rehearsal}
    found, about = shown(**which), page(**which)
    answer = document.answer(about)
    assert 1 <= len(answer.lines) <= 5 and driver.headline(NAME, about)
    for table in found.tables:
        empty = "not measured" in table.markdown.split("\n")[4]
        assert table.rows and empty == (rehearsal and any(x in table.caption for x in LONG))
    assert len(found.drawn) > 12 and len(found.labels) == 3
    assert "not measured" not in answer.markdown.split("**Not measured**")[0]
    judged = words(**which)
    assert set(judged) == {c["key"] for c in rows.document()["claims"]}
    assert {c["test"] for c in rows.document()["claims"]} == set(claims.TESTS)
    assert set(judged.values()) <= set(WORDS)


def test_the_cache_and_the_pool_are_shown_by_what_they_may_hold():
    tables = {t.caption: t for t in shown().tables}
    kept = next(t for name, t in tables.items() if name.startswith("The pattern cache where 24 patterns"))
    assert [line[1] for line in kept.rows] == ["keeps nothing", "0.25 MiB", "1 MiB", "64 MiB", "64 MiB"]
    assert [line[5] for line in kept.rows] == ["0 %", *["88.0 %"] * 4]
    pool = next(t for name, t in tables.items() if name.startswith("Scratch"))
    assert [line[:2] for line in pool.rows] == [[f"{mb} MiB", n] for mb in (1, 4, 16, 64) for n in (1, 2)]
    assert {line[5] for line in pool.rows} == {"7 of 8"} and "takes at most 1 buffer from a pool" in pool.note


def test_blocks_chosen_by_content_stand_beside_the_patterns():
    line = document.patterns(page()).rows[-1]
    assert line[:3] == ["by content", "blocks of 64: the best 5 by content", "7.81 %"] and line[3].text


def test_times_stand_beside_errors_and_bounds():
    for table in shown().tables:
        columns = " ".join(table.columns)
        if "Time (ms)" in columns:
            assert "Error" in columns and "ower bound" in columns, table.caption


@pytest.mark.parametrize("flaw", [{"status": "incorrect"}, {"errors": {}}, {"errors": {"out": 0.5}}])
def test_no_row_without_a_passed_check_reaches_a_table_a_figure_or_a_verdict(flaw):
    def spoiled(r):
        memory = {"floor_bytes": 2**30, "tracked_peak_bytes": 4_321_000_000, "operator_calls": 98765, "view_calls": 0}
        marked = {"seconds": (5.43217e-4,) * 10, "median": 5.43217e-4, "ci": (5.43217e-4,) * 2} if r.seconds else {}
        return replace(r, memory=memory, **marked, **flaw)

    found = shown(spoiled)
    assert all(trust.objection(r) for r in page(spoiled).results) and not found.drawn
    for mark in ("0.543", "543", "4,321", "98,765"):
        assert mark not in found.text
    by_rows = {k: w for k, w in words(spoiled).items() if w in ("reproduced", "refuted")}
    decided_by_arithmetic = dict.fromkeys(["1161", "144mb", "262k", "baseline-oom"], "refuted")
    decided_by_arithmetic["hit-rate"] = "reproduced"
    assert by_rows == decided_by_arithmetic
    assert all(v.ours is None for c, v in claims.judge(page(spoiled)) if c["key"] in ("1161", "262k", "baseline-oom"))


def test_rows_without_operator_calls_load_and_render():
    older = shown(lambda r: replace(r, memory={k: v for k, v in r.memory.items() if not k.endswith("_calls")}))
    assert "operator calls become" not in older.text and older.tables
    assert words(lambda r: replace(r, memory={}))["launches"] == "undecided"


def test_verdicts_follow_the_rows():
    first = words()
    original, optimized = suites.ORIGINAL, suites.OPTIMIZED

    def moved(key: str, change, word: str) -> None:
        assert words(change)[key] == word != first[key], key

    moved("table", slower(2.4, system(original)), "reproduced")
    moved("extreme", slower(2.88, system(original)), "reproduced")
    moved("faster-now", slower(40, system(optimized)), "refuted")
    moved("slower-at-first", slower(20, system(original)), "reproduced")
    moved("torch-sparse", slower(0.01, system(suites.TORCH_SPARSE)), "refuted")
    moved("cache", slower(1.15, way("rows", cache=False)), "reproduced")
    moved("batching", slower(2.2, way("rows")), "reproduced")
    moved("131k", lambda r: replace(r, status="oom") if r.point.seq_len == 131072 else r, "undecided")
    moved(
        "131k", lambda r: replace(r, memory=r.memory | {"tracked_peak_bytes": 20 * r.memory["floor_bytes"]}), "refuted"
    )

    def counted(r):
        calls = {original: 308, optimized: 10}.get(r.point.system)
        return replace(r, memory=r.memory | {"operator_calls": calls, "view_calls": 0}) if calls else r

    moved("launches", counted, "reproduced")
    calls = {name: rows.way(page(), name).median for name in suites.BLOCK_WAYS}

    def builds_long(r):
        built = system("plan_build")
        return slower(1.5 * calls[r.option("blocks")] / r.median, built)(r) if built(r) else r

    moved("pattern-time", builds_long, "reproduced")
    for key in ("slower-at-first", "table", "cache", "pattern-time"):
        assert words(name="gtx1080", rehearsal=True)[key] == "not testable on this profile"


def test_verdicts_follow_the_documents_own_figures(monkeypatch):
    first, whole = words(), rows.document()

    def printed(key: str, word: str, **changes) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rows, "document", lambda: whole | changes)
            assert words()[key] == word != first[key], key

    def entries(table: str, index: int, **more) -> list:
        return [x | more if i == index else x for i, x in enumerate(whole[table])]

    printed("1161", "not testable on this profile", ring=entries("ring", 2, ms=2000.0))
    printed("23.5", "refuted", source=whole["source"] | {"ring_zero_heads": 0})
    printed("baseline-oom", "not testable on this profile",
            ring_shape=whole["ring_shape"] | {"segment_lengths": [65536, 131072, 131072]})  # fmt: skip
    printed("overall", "refuted", block_rows=entries("block_rows", 1, ms=68.36 * 0.331))
    printed("hit-rate", "refuted", source=whole["source"] | {"calls": 3})
    claim = next(c for c in whole["claims"] if c["key"] == "262k")
    assert claims.TESTS[claim["test"]](page(), claim | {"mb": 4000}).word == "reproduced"
    assert claims.TESTS[claim["test"]](page(), claim | {"mb": 1100}).word == "refuted"


def test_the_printed_factor_is_below_the_work_of_what_is_stated():
    pattern, shape = rows.stated()
    work = cost.count(pattern, **shape)
    assert rows.work() == work and work.floor_bytes == 512 * 2**20
    least = rows.least_seconds(work, hardware.get_profile("gtx1080"))
    assert 1.1 < least < 1.3 and least > 100 * 6.95e-3
    assert "1,177" in document.answer(page()).markdown


def test_the_share_of_dense_is_by_density_and_pass():
    found = page()
    dense = rows.one(found, suites.EFFICIENCY, "dense_sdpa")
    row = rows.one(found, suites.EFFICIENCY, passes="fwd+bwd")
    density = patterns.from_dict(row.point.pattern).density(row.point.seq_len)
    ratio = sparsity.over_share(found, row)
    assert ratio.value == pytest.approx(row.median / (3.5 * density * dense.median), rel=0.02)
    assert "taken as 3.5" in document.efficiency(found).note
    assert "taken as 3.5" not in document.efficiency(page(name="h200", device="cuda")).note
    about = "`Execution(results=False)`) they cost page faults: without these the call is 2.00× as fast"
    assert about in document.efficiency(page(slower(2, lambda r: dict(r.point.options) == suites.FRESH))).note
    assert "results=False" not in document.efficiency(page(name="h200", device="cuda")).note
    fast = page(slower(0.5, lambda r: r.group == suites.EFFICIENCY and r.point.system == "ringlab"))
    cells = [line[5] for line in document.efficiency(fast).rows if line[5]]
    assert {c.sub for c in cells} == {"met"} and [c.text for c in cells] == ["1.2×", "1.35×", "1.5×", "1.4×", "1.2×"]
    slow = page(slower(3, lambda r: r.group == suites.EFFICIENCY and r.point.system == "ringlab"))
    assert {line[5].sub for line in document.efficiency(slow).rows if line[5]} == {"missed"}


def test_every_row_that_a_verdict_rests_on_stands_in_a_table():
    lines = [line for line in document.lengths(page()).rows if line[0] == 8192]
    assert [line[1] for line in lines] == ["This library", "Original", "Optimized"]


def test_a_refused_kernel_says_why():
    why = "no C++ compiler"
    found = shown(lambda r: replace(r, status="unsupported", reason=why) if r.point.system == "flex" else r)
    table = next(t for t in found.tables if "tenth" in t.caption)
    assert {line[6].text for line in table.rows if line[6]} == {"unsupported"}
    assert why in found.text and "FlexAttention, blocks of 128" in found.text


def test_operators_of_a_call_are_counted_and_those_built_once_are_not():
    point = Point("ringlab", block_patterns.sliding_window(1, block_size=8), seq_len=64, heads=2, head_dim=8)

    def counted(**options) -> dict:
        system = SYSTEMS["ringlab"](point.but(options=options), "cpu")
        return timing.footprint(system, torch.device("cpu"))[2]

    cache.GLOBAL.clear()
    first, again, uncached = counted(), counted(), counted(cache=False)
    assert first["operator_calls"] == again["operator_calls"] > again["view_calls"] > 0
    assert uncached["operator_calls"] > again["operator_calls"], "what every call builds is part of it"


def test_labels_name_the_way_and_the_step():
    group = Group("g", (Point("ringlab", suites.WINDOW, seq_len=4096),))
    row = session_row(group.points[0], group)
    assert names.label(row) == "ringlab.attention as called"
    other = replace(row, point=row.point.but(options={"blocks": "rows", "cache": False}))
    assert names.label(other) == "ringlab.attention, blocks=rows, cache off"
    fresh = replace(row, point=row.point.but(options=suites.FRESH))
    assert names.label(fresh) == "ringlab.attention, results in fresh memory"
    built = replace(row, point=row.point.but(system="plan_build", options={"blocks": "rows", "warm": False}))
    assert names.label(built) == "Calls of blocks, rows, built"


def test_the_notebook_is_short_and_calls_the_library_alone():
    path = Path(__file__).parents[2] / "notebooks" / f"{NAME}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    source = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert max(text.count("\n") for text in source) <= 3 and len(cells) < 40
    used = {name for text in source for name in re.findall(r"document\.(\w+)\(", text)}
    assert used == set(document.__all__)
