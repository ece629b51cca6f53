"""Document 000's report: what it quotes, what it refuses to quote, and what it says of the gaps."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
from made_up_suites import document_suite, on_ranks, times_longer
from reporting import Shown
from ringlab import hardware, patterns
from ringlab.measure import Point, Result, stats, suites
from ringlab.report import cells, claims, lengths, render, reuse, rows, study, tables, trust
from ringlab.report import optimization as document

SHOWN = [name for name in document.__all__ if name not in ("open_study", "failures", "limits", "provenance")]


def page_of(results, name: str = "cpu", folder: str = "cpu/data") -> study.Study:
    return study.Study(hardware.get_profile(name), list(results), Path(folder), suite="optimization")


def shown_by(page: study.Study, names=SHOWN) -> Shown:
    return Shown(document, page, names)


@functools.cache
def shown_suite() -> Shown:
    return shown_by(page_of(document_suite()))


# ---------------------------------------------------------------------------------------------------------------------
# what may be quoted

BAD = {
    "incorrect": {"status": "incorrect", "reason": "out is off"},
    "unchecked": {"errors": {}, "tolerance": {}},
    "wrong": {"errors": {"out": 0.1}},
    "without a bound": {"tolerance": {}},
    "too fast": {"bound_seconds": 1.0},
    "too small": {"memory": {"floor_bytes": 2**30, "tracked_peak_bytes": 123}},
    "no time": {"median": 0.0},
}
FAST = 0.000797123  # seconds; 0.797 ms, 797 us
LEAN = {"floor_bytes": 2**30, "tracked_peak_bytes": int(4.321 * 2**30), "high_water_bytes": int(5.432 * 2**30)}
MARKS = ("0.797", "4.32", "5.43")


def spoiled(result: Result, **bad) -> Result:
    """The result with numbers that nothing else has, and a flaw for which none of them may be quoted."""
    if result.status != "ok" or not result.seconds:
        return result
    marked = {"seconds": (FAST,) * 10, "median": FAST, "q1": FAST, "q3": FAST, "ci": (FAST, FAST), "memory": LEAN}
    return replace(result, **{**marked, "share": 0.797, **bad})


def shows_none_of(results) -> Shown:
    page = page_of(results)
    marked = [r for r in results if r.median == FAST or r.memory == LEAN]
    assert len(marked) > 20 and all(map(trust.objection, marked)) and len(page.failed()) >= len(marked)
    shown = shown_by(page)
    assert not [m for m in MARKS if m in shown.text]
    assert not [v for v in shown.drawn if v in (FAST, FAST * 1e3) or 4.3 < v < 4.33]
    return shown


@pytest.mark.parametrize("kind", BAD)
def test_no_bad_row_reaches_a_table_a_figure_a_headline_a_verdict_or_the_recommendation(kind):
    results = [spoiled(r, **BAD[kind]) for r in document_suite()]
    shown = shows_none_of(results)
    page = page_of(results)
    assert "none, no row" in document.answer(page).lines[0]
    assert {round(v, 2) for v in shown.drawn} <= {1.12}  # peaks of points that are not timed
    assert {v.word for _, v in claims.judge(page, rows.published()["claims"])} <= {
        "undecided", "not testable on this profile", "confounded",
    }  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_bad_rows_among_good_ones_reach_nothing(first):
    kinds = [*BAD.values()]
    results = [spoiled(r, **kinds[i % 7]) if i % 2 == first else r for i, r in enumerate(document_suite())]
    assert any("ms" in x for x in shows_none_of(results).texts)


def test_superlinear_rows_are_suspect():
    row = next(r for r in document_suite() if rows.is_optimised(r))
    honest, swift = on_ranks(row, 2, 2.15, scheme="ring"), on_ranks(row, 2, 2.25, scheme="ring")
    assert [r.status for r in trust.judged([row, honest])] == ["ok", "ok"]
    assert trust.judged([row, swift])[1].reason.startswith("superlinear: 2.25 times faster on 2 ranks")
    assert trust.judged([swift])[0].status == "ok"  # nothing to compare with
    slow = replace(row, median=row.median * 9)  # a faster row on one rank is the one that counts
    assert trust.judged([slow, row, honest])[2].status == "ok"
    assert trust.judged([replace(row, errors={}), swift])[1].status == "ok"


def test_no_superlinear_row_reaches_a_page():
    row = next(r for r in document_suite() if rows.is_optimised(r))
    swift = replace(on_ranks(row, 2, row.median / FAST), memory=LEAN)
    page = page_of([*document_suite(), swift])
    shown = shown_by(page)
    assert not [m for m in MARKS if m in shown.text] and trust.status(page.results[-1]) == "suspect"
    assert "superlinear" in document.failures(page).markdown and "2 ranks" in document.failures(page).markdown

    def verdict(results):
        found = {c["test"]: v for c, v in claims.judge(page_of(results), rows.published()["claims"])}
        return found["two_cards"].word

    assert verdict([*document_suite(), swift]) == "not testable on this profile"
    assert verdict([*document_suite(), on_ranks(row, 2, 1.8)]) == "refuted"


# ---------------------------------------------------------------------------------------------------------------------
# what is shown


def timed_columns(table) -> list[str]:
    units = ("(ms)", "(µs)")
    return [c for c in table.columns if c.endswith(units) and not c.startswith((">Lower bound", ">Published"))]


def test_every_table_of_times_has_memory_and_dense_attention_beside_it():
    timed = [t for t in shown_suite().tables if timed_columns(t)]
    assert len(timed) >= 10
    for table in timed:
        first = {tables.cell(c).text for row in table.rows for c in row[:1]}
        assert any("eak memory" in c or "racked peak" in c for c in table.columns), table.caption
        assert any("Dense SDPA" in x for x in [*first, *table.columns]), table.caption


def test_figures_name_things_as_the_tables_do():
    shown = shown_suite()
    names = {column.lstrip(">").removesuffix(" (ms)") for t in shown.tables for column in t.columns}
    for table in shown.tables:
        for row in table.rows:
            texts = [tables.cell(c).text for c in row]
            names |= {", ".join(texts[:k]) for k in range(1, 6)}
    assert len(shown.labels) == 5
    for label in (x for labels in shown.labels for x in labels):
        assert label in names


def test_passes_hold_forward_and_backward_causal_and_not():
    table = document.passes(page_of(document_suite()))
    assert [row[0] for row in table.rows] == [
        "forward", "forward, causal", "forward and backward", "forward and backward, causal",
    ]  # fmt: skip
    for row in table.rows:
        assert tables.cell(row[3]).text != "not measured" and tables.cell(row[4]).text != "not measured"
        assert row[5] is not None and "process 2.00" in row[9].sub


def test_the_ceiling_has_a_backward_and_the_engine_is_held_against_it():
    page = page_of(document_suite())
    assert {row[2] for row in document.ceilings(page).rows} == {"fwd", "fwd, causal", "fwd+bwd"}
    speed, against = document.speed(page), document.against(page)
    backward = [row for row in against.rows if row[2] == "fwd+bwd"]
    assert len(backward) == 2 and all(row[-1] is not None for row in backward)
    assert [row[:3] for row in against.rows] == [row[:3] for row in speed.rows]
    assert all(tables.cell(row[-2]).text not in ("not measured", tables.DASH) for row in speed.rows)


def test_what_a_pool_is_asked_for_is_counted():
    point = Point("ringlab", patterns.Dilated([8, 32], [1, 2]), batch=16, seq_len=32, heads=1, dtype="bfloat16")
    size = 16 * 32 * 64 * 4
    assert reuse.lent(point, 0.0) == reuse.Lent(size, 1, 1, size)
    assert reuse.lent(point, 1.0) == reuse.Lent(size, 0, 1, 0)
    assert reuse.lent(point.but(dtype="float32"), 0.0) == reuse.Lent(0, 0, 0, 0)


def test_cache_and_pool_are_said_from_the_rows():
    page = page_of(document_suite())
    table = document.cache_table(page)
    assert len(table.rows) == 4 and {row[0] for row in table.rows} == {
        "Plan of strided views", "Index tensors, gathered",
    }  # fmt: skip
    pool = document.pool_table(page)
    assert {"off", "from 4 MiB", "from 16 MiB", "from 64 MiB"} <= {row[1] for row in pool.rows}
    lends = {(row[0], row[1]): row[3] for row in pool.rows}
    assert lends["Strided, bf16, 16 × 4,096 tokens", "from 16 MiB"] == "1 of 1"
    assert lends["Strided, bf16, 16 × 4,096 tokens", "from 64 MiB"] == "0 of 1"
    assert lends["Strided, fp32, 8,192 tokens", "from 16 MiB"] == "0 of 0"
    assert lends["Gathered, fp32, 8,192 tokens", "from 16 MiB"] == "2 of 4"
    lines = document.cache_and_pool(page).lines
    assert "building takes at most" in lines[0] and "of 4 calls in which it lends a buffer" in lines[1]


# ---------------------------------------------------------------------------------------------------------------------
# the configuration


@pytest.mark.parametrize("name, rehearsal", [("cpu", False), ("gtx1080", True), ("h200", False)])
def test_the_recommended_block_runs_as_it_is_rendered(tmp_path, name, rehearsal):
    folder = tmp_path / (f"{name}-rehearsal" if rehearsal else name) / "data"
    page = page_of(document_suite(name, rehearsal), name, folder)
    cell = nbformat.v4.new_code_cell("configuration")
    bundle = document.recommended(page)._repr_mimebundle_()
    cell.outputs = [nbformat.v4.new_output("display_data", data=bundle)]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A title"), cell])
    render.render(nb, render.Page("page"), tmp_path, formats=("md",))
    (block,) = re.findall(r"```python\n(.*?)```", (tmp_path / "page.md").read_text(), re.S)
    names: dict = {}
    with torch.no_grad():
        exec(block, names)
    assert names["out"].shape == (1, 8192, 8, 64) and torch.isfinite(names["out"]).all()
    evidence = [line for line in block.splitlines() if line.startswith("# ")]
    assert len(evidence) >= 5 and any(line.startswith("# dtype: With all optimizations") for line in evidence)
    assert ("a CPU's" in evidence[0]) == rehearsal


def work(r) -> dict:
    """What a row and its twin have in common: one alone that is slow would say that no difference can be told."""
    return {k: v for k, v in rows.switches(r.point).items() if k != "twin"}


def test_the_recommendation_follows_the_rows():
    def chosen(change):
        text = document.recommended(page_of([change(r) for r in document_suite()])).source
        return re.search(r"Execution\((.*?)\)", text)[1], re.search(r'backend="(\w+)"', text)[1], text

    execution, backend, text = chosen(lambda r: r)
    assert (execution, backend) == ("gather=False, cache=True, pool=False", "auto") and "torch.float32" in text

    def without_pool_is_slow(r):
        return times_longer(r, 2) if work(r) == rows.FULL | {"pool": False} and r.seconds else r

    def strided_is_slow(r):
        return times_longer(r, 2) if work(r) == rows.FULL and r.point.system == "ringlab" and r.seconds else r

    def half_is_quick(r):
        return times_longer(r, 0.7) if r.point.dtype == "bfloat16" and rows.is_optimised(r) and r.seconds else r

    assert "pool=True" in chosen(without_pool_is_slow)[0]
    assert "gather=True" in chosen(strided_is_slow)[0]
    assert "dtype=torch.bfloat16" in chosen(half_is_quick)[2]


# ---------------------------------------------------------------------------------------------------------------------
# words


def test_wide_intervals_are_undecided_and_only_hardware_makes_a_claim_untestable():
    wide = stats.Ratio(1.07, 0.9, 1.3, 10, True)
    assert claims.by_interval(wide, 1.05, 1.10, "x").word == "undecided"
    assert claims.by_interval(wide, 1.0, float("inf"), "x").why.endswith("its interval crosses 1")
    assert claims.by_interval(None, 1.05, 1.10, "x").word == "undecided"
    assert claims.by_interval(stats.Ratio(1.07, 1.06, 1.08, 10, True), 1.05, 1.10, "x").word == "reproduced"
    assert claims.by_interval(stats.Ratio(1.0, 0.99, 1.01, 10, True), 1.05, 1.10, "x").word == "refuted"

    def words(name, rehearsal=False):
        folder = f"{name}-rehearsal/data" if rehearsal else f"{name}/data"
        page = page_of(document_suite(name, rehearsal), name, folder)
        return {c["key"]: v.word for c, v in claims.judge(page, rows.published()["claims"])}

    untestable = "not testable on this profile"
    cpu, here, rehearsed = words("cpu"), words("gtx1080"), words("gtx1080", True)
    assert {k for k, v in cpu.items() if v == untestable} == {
        "fp16-slow", "dtype-first", "xformers", "flash-turing", "flash-slower", "throughput", "two-cards",
    }  # fmt: skip
    assert {k for k, v in here.items() if v == untestable} == {"flash-turing", "two-cards"}
    assert {rehearsed[k] for k in ("cache", "pool", "flash-slower", "throughput")} == {untestable}


def test_the_pool_is_judged_where_it_lends():
    def verdict(change):
        page = page_of([change(r) for r in document_suite()])
        return {c["key"]: v for c, v in claims.judge(page, rows.published()["claims"])}

    def gathered_alone_is_slow(r):
        plain = rows.switches(r.point) == rows.FULL | {"gather": True, "pool": False}
        return times_longer(r, 2) if plain and r.seconds else r

    assert verdict(gathered_alone_is_slow)["pool"].word == "reproduced"
    assert "(gathered, auto kernel, cache)" in verdict(lambda r: r)["pool"].why

    def long_is_slow(r):
        return times_longer(r, 2) if r.point.batch > 1 and r.point.seq_len == 4096 and not work(r)["pool"] else r

    assert verdict(long_is_slow)["pool-long"].word == "reproduced"


def test_what_the_same_work_differs_by_is_no_difference():
    """The second row of a call is 1.5 times slower: no factor below that is called faster or slower."""
    twin = max((r for r in document_suite() if r.option("twin")), key=lambda r: r.median)
    page = page_of([times_longer(r, 1.5) if r is twin else r for r in document_suite()])
    calm = page_of(document_suite())
    assert calm.resolution < 1.05 and page.resolution == pytest.approx(1.5, rel=0.05) and len(page.twins) == 5
    assert "differ by up to 1." in document.reading(page).markdown
    for one, tells in ((calm, True), (page, False)):
        copying, ours = (one.rows(system=s, pattern=suites.LADDER.to_dict())[0] for s in ("copying", "ringlab"))
        factor = one.ratio(copying, ours)
        assert factor.value == pytest.approx(1.1, rel=0.02) and factor.longer is tells
        assert ("not told apart" in cells.times(factor).sub) is not tells
    assert not {r.option("twin") for r in page.rows()} - {None} and len(page.results) == len(page.rows()) + 5


def test_limits_name_what_is_missing_refused_unstable_and_never_measured():
    results = [r for r in document_suite() if r.point.dtype != "bfloat16"]
    results = [replace(r, unstable=True) if rows.is_plain(r) else r for r in results]
    page = page_of(results)
    lines = document.limits(page).lines
    said = "\n".join(lines)
    missing = len(document_suite()) - len(results)
    assert "bf16: not measured." in lines and "no row passed" not in said
    assert f"What {missing} of the {len(document_suite())} points" in said and "every row ran on one" in said
    refused = next(line for line in lines if "needs a CUDA device" in line)
    assert all(name in refused for name in ("cudnn", "flash_attn_2", "flash_attn_3", "xformers", "efficient"))
    assert refused.count("needs a CUDA device") == 1
    assert "2 unstable points" in said and "Original (no optimizations), fp16, 8,192 tokens, fwd" in said
    assert "unstable" in document.implementations(page).markdown
    failed = document.failures(page)
    assert len(failed.rows) == 7 and all(row[3] == "needs a CUDA device, this is cpu" for row in failed.rows)
    assert all(tables.cell(row[2]).text == "unsupported" for row in failed.rows)
    nothing = [replace(r, errors={"out": 1.0}) if r.point.dtype == "bfloat16" else r for r in document_suite()]
    assert "bf16: no row passed, each with its reason below." in document.limits(page_of(nothing)).lines
    assert f"{missing} points of this profile" in document.answer(page).lines[-1]


def test_provenance_says_clocks_completeness_and_counts():
    def with_state(i, r):
        state = {"sm_clock_mhz": 1900.0 + i, "temperature_c": 50.0, "throttle_reasons": "0x0"}
        return replace(r, provenance=r.provenance | {"gpu_before": state, "gpu_after": state, "load_average": 0.1 * i})

    results = [with_state(i, r) for i, r in enumerate(document_suite())]
    facts = {row[0]: row[1] for row in document.provenance(page_of(results)).rows}
    assert facts["Complete"] == "yes" and facts["Points"].startswith(f"{len(results)} measured")
    assert "sm clock mhz 1900 to" in facts["GPU before a group"] and "temperature c 50" in facts["GPU after a group"]
    facts = {row[0]: row[1] for row in document.provenance(page_of(results[:-2])).rows}
    assert facts["Complete"] == f"no, 2 of {len(results)} are missing" and "GPU before a group" in facts
    plain = {row[0] for row in document.provenance(page_of(document_suite())).rows}
    assert "GPU before a group" not in plain and "Inputs" in plain


def test_longest_and_beginning_come_from_rows_that_may_be_quoted():
    found = lengths.over_dense(page_of(document_suite()))
    assert [n for n, *_ in found] == [1024, 2048, 4096, 8192] and lengths.begins(found) == 1024
    bad = page_of(spoiled(r, **BAD["too fast"]) if r.point.seq_len == 2048 else r for r in document_suite())
    assert lengths.begins(lengths.over_dense(bad)) == 4096
    assert "1,024" not in document.answer(bad).lines[2]


@pytest.mark.parametrize("name", ["gtx1080", "h200"])
def test_rows_of_a_gpu_fill_every_table(name):
    shown = shown_by(page_of(document_suite(name), name, f"{name}/data"))
    empty = [t.caption for t in shown.tables if not t.rows or tables.cell(t.rows[0][0]).text == "not measured"]
    assert not empty


def test_rows_that_cannot_be_read_do_not_stop_the_provenance(tmp_path):
    from types import SimpleNamespace

    from ringlab.report import origins

    (tmp_path / "samples.jsonl").write_bytes(b'\xff\n[1]\n{"kind": "res\n')
    assert origins._spent(SimpleNamespace(folder=tmp_path, results=[])) is not None
