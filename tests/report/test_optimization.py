"""The page of document 000, from made-up rows: what it quotes, what it refuses to
quote, and on a GPU each way to run one pattern.
"""

import functools
import re
from dataclasses import replace

import pytest
import torch
from reporting import (
    BAD,
    FAST,
    Shown,
    document_row,
    lean,
    longer,
    made,
    made_up,
    on_ranks,
    page,
    sampled,
    shown,
    shows_no_marks,
    slower,
    spoiled,
    spoiling,
    study_of,
    words,
)
from ringlab import hardware, patterns
from ringlab.measure import suites, validity
from ringlab.report import cells, rows, tables

NAME = "optimization_results"


@pytest.fixture(autouse=True)
def not_run(request, monkeypatch):
    """The recommended block takes half a second."""
    if "block_runs" not in request.node.name:
        monkeypatch.setattr(tables.Code, "run", lambda block: {})


def finding(found: Shown) -> list[str]:
    return found.texts[0].removeprefix("- ").split("\n- ")


def text(cell) -> str:
    return tables.cell(cell).text


def column(table, name: str, keys: int = 1) -> dict:
    """The texts of a column, by those of the first ``keys`` columns."""
    at = [c.lstrip(">") for c in table.columns].index(name)
    lines = [[getattr(x, "text", x) for x in row] for row in table.rows]
    return {tuple(row[:keys]) if keys > 1 else row[0]: row[at] for row in lines}


@pytest.mark.parametrize("profile", ["h200", "cpu"])
def test_every_table_is_filled_and_times_stand_beside_rooflines(profile):
    found = shown("000", None, profile)
    printed, *others = found.tables
    assert printed.caption == "Single GPU Performance (seq_len=8192)"
    for t in others:
        assert t.rows and text(t.rows[0][0]) != "not measured", t.caption
        names = " ".join(t.columns)
        assert "Time (ms)" not in names or "Roofline" in names, t.caption
    assert found.drawn and len(finding(found)) == 5


# --------------------------------------------------------------------------------------
# what may be quoted


@pytest.mark.parametrize("kind", BAD)
def test_no_bad_row_reaches_a_table_a_figure_a_headline_a_verdict_or_the_recommendation(
    kind,
):
    change = spoiling("000", [kind])
    assert not shows_no_marks("000", change).drawn
    found = words(page("000", change), "000").items()
    assert {word for _, word in found} == {"untested"}


@pytest.mark.parametrize("first", [0, 1])
def test_bad_rows_among_good_ones_reach_nothing(first):
    found = shows_no_marks("000", spoiling("000", [*BAD], 2, first))
    assert any("ms" in x for x in found.texts)


def test_superlinear_rows_are_suspect_and_reach_no_page():
    row = next(r for r in made("000") if dict(r.point.options) == suites.FULL)
    swift = on_ranks(row, 2, 2.25, scheme="ring")
    slow = replace(row, median=row.median * 9)
    # Of those on one rank the fastest counts, if it is right.
    for others, status in (([slow, row], "suspect"), ([replace(row, errors={})], "ok")):
        assert validity.mark_superlinear([*others, swift])[-1].status == status

    alone = [r for r in made("000") if r.point.world_size == 1]
    about = study_of(
        [*alone, on_ranks(row, 2, row.median / FAST)], suite="optimization"
    )
    assert validity.status(about.results[-1]) == "suspect"
    failures = Shown(NAME, about).table("rows are not shown").markdown
    assert "superlinear" in failures and "2 ranks" in failures


# --------------------------------------------------------------------------------------
# what is shown


def test_names_of_one_engine_share_a_line_and_no_name_is_the_fastest():
    """Made-up rows differ by 2 %: noise. V2Flash in fp16 is published, and so is its
    name beside that of the engine.
    """
    found = shown("000")
    lines = found.table("8 heads of 64").rows
    names = [(row[0].text, row[0].sub) for row in lines]
    assert names == [
        ("Naive (ours)", "fp16"),
        ("Naive (ours)", "fp32"),
        ("All optimizations", "fp16; also RingDilatedAttentionV2Flash"),
        ("All optimizations", "bf16"),
        ("All optimizations", "fp32; also RingDilatedAttentionV2Collective"),
        ("Dense SDPA", "fp32"),
    ]
    assert "**Optimizing pays 3." in finding(found)[0] and "Fastest" not in found.text

    def apart(r):
        plain = dict(r.point.options) == suites.PLAIN
        flash = r.point.system.endswith("V2Flash")
        return lean(r, 3) if plain else longer(r, 2) if flash else r

    lines = shown("000", apart).table("8 heads of 64").rows
    assert lines[2][0].sub == "fp16; also RingDilatedAttentionV2Flash, not as fast"
    held = [row[5].sub for row in lines]
    assert held == ["3.36 × tensors"] * 2 + ["1.12 × tensors"] * 4


def work(r) -> dict:
    """What a row and its twin have in common: one alone that is slow would say that no
    difference can be told.
    """
    return {
        k: v for k, v in (rows.DEFAULTS | dict(r.point.options)).items() if k != "twin"
    }


def without(name: str, factor: float):
    """A change: the calls without one optimization take ``factor`` times as long."""
    options = suites.FULL | {name: suites.PLAIN[name]}
    return slower(factor, lambda r: r.point.system == "ringlab" and work(r) == options)


@pytest.mark.parametrize(
    "change, said",
    [
        (
            None,
            "**The gain comes from**: strided views instead of gathered copies, fused kernel "
            "instead of eager. No gain beyond noise: pattern cache on, memory pool on.",
        ),
        (without("cache", 2), "eager, pattern cache on. No gain beyond noise: memory"),
        (without("pool", 0.6), "A loss: memory pool on."),
        (
            slower(9, lambda r: r.option("twin")),
            "0 of 2 implementations beyond noise**",
        ),
    ],
)
def test_the_finding_says_which_switches_gain_and_which_do_not(change, said):
    found = str(finding(shown("000", change)))
    assert said in re.sub(r" \([\d.]+×\)", "", found)


def test_passes_hold_forward_and_training_causal_and_not():
    lines = shown("000").table("beside dense attention").rows
    assert [row[0] for row in lines] == ["forward", "forward, causal", "training"]
    shows = [text(x) not in ("not measured", tables.DASH) for row in lines for x in row]
    assert all(shows)


def test_time_over_roofline_is_that_of_the_rows():
    """Made-up rooflines are 0.6 of the time, for the row of all optimizations 0.5 of
    it.
    """

    def change(r):
        if dict(r.point.options) == suites.FULL:
            return replace(r, bound_seconds=r.median / 2)
        copying = r.point.system == "copying" and r.point.seq_len == 8192
        return longer(r, 2) if copying else r

    said = shown("000", change).text
    assert "document's call 2.0×, dense SDPA 1.7×, LongNet's own mixing 1.7×" in said
    assert re.search(r"copied branches 3\.[34]×", said)
    none = shown("000", lambda r: replace(r, bound_seconds=None)).text
    assert "**Time over roofline**: not measured." in none


def test_nested_branches_stand_with_the_gain_predicted_and_measured():
    lines = shown("000", slower(2, lambda r: r.option("merge"))).table("Nested").rows
    assert lines[0][3] == "3,072 → 2,560" and lines[0][4].sub == "each pair once"
    assert len(lines) == 7 and {round(float(x[5].text[:-1]), 1) for x in lines} == {2.0}


def test_a_kernel_has_a_time_or_a_reason_and_what_its_rules_say():
    found = shown("000")
    lines = found.table("Kernels according").rows
    kernels = {name: row[1:] for row in lines for name in row[0].split(", ")}
    assert kernels["cpu_flash"][0].text[0].isdigit()
    assert kernels["cudnn"][0].sub == "needs a CUDA device, this is cpu"
    assert any("cudnn, flash_attn_2, flash" in row[0] for row in lines), "refused alike"
    assert "rows are not shown" not in found.text, "that table says why"
    rules = {name: text(row[1]) for name, row in kernels.items()}
    assert rules["cudnn"] == "refused" and rules["xformers"] == "fp32, fp16"
    there = column(
        shown("000", None, "h200").table("Kernels according"),
        "On NVIDIA H200 SXM 141 GB",
    )
    assert [*there][0] == "flash_attn_4" and there["eager"] == "fp32, fp16, bf16"


def test_cache_and_pool_are_said_from_the_rows():
    slow = slower(2, lambda r: r.option("pool_threshold_mb") == 4.0)
    found, less = shown("000"), shown("000", slow)
    assert len(found.names["built"]) == 4 and len(found.names["used"]) == 6
    assert "building a plan takes at most" in found.text
    assert "of 6 calls 0 are faster with it, 0 slower, 6 within noise" in found.text
    assert "0 are faster with it, 2 slower" in less.text
    lines = found.table("The pool by its threshold").rows
    assert lines[0][:3] == (1024, "4 MB", "4 MiB")
    assert [x[1] for x in lines[1:]] == ["4 MB", "16 MB", "64 MB"]


# --------------------------------------------------------------------------------------
# the recommended configuration


def block(found: Shown) -> str:
    """The Python block of the recommended configuration, as the page shows it."""
    (source,) = re.findall(r"```python\n(.*?)```", found.text, re.S)
    return source


@pytest.mark.parametrize("name, computed", [("cpu", False), ("gtx1080", True)])
def test_the_recommended_block_runs(name, computed):
    source, names = block(shown("000", None, name, computed)), {}
    with torch.no_grad():
        exec(source, names)
    assert names["out"].shape == (1, 8192, 8, 64) and torch.isfinite(names["out"]).all()


# --------------------------------------------------------------------------------------
# noise, limits


def test_what_the_same_work_differs_by_is_no_difference():
    """The second row of a call is 1.5 times slower: no factor below that is called
    faster or slower.
    """
    twin = max((r for r in made("000") if r.option("twin")), key=lambda r: r.median)
    calm, uneven = (
        page("000"),
        page("000", lambda r: longer(r, 1.5) if r is twin else r),
    )
    assert calm.noise_floor < 1.05 and len(uneven.controls) == 4
    assert uneven.noise_floor == pytest.approx(1.5, rel=0.05)
    for one, tells in ((calm, True), (uneven, False)):
        copying, ours = (
            one.rows(system=s, pattern=suites.LADDER.to_dict())[0]
            for s in ("copying", "ringlab")
        )
        factor = one.ratio(copying, ours)
        assert factor.value == pytest.approx(1.1, rel=0.02)
        assert (factor.verdict == "slower") is tells
        assert ("within noise" in cells.times(factor).sub) is not tells
    assert not {r.option("twin") for r in calm.rows()} - {None}
    assert len(calm.results) == len(calm.rows()) + 4


def test_limits_name_what_is_missing_refused_unstable_and_never_measured():
    kept = [
        replace(r, unstable=dict(r.point.options) == suites.PLAIN)
        for r in made("000")
        if r.point.dtype != "bfloat16"
    ]
    found = Shown(NAME, study_of(kept, suite="optimization"))
    missing = len(made("000")) - len(kept)
    assert "bf16: not measured." in found.text and "no row passed" not in found.text
    assert f"**Not measured**: any GPU; {missing} points of this profile" in found.text
    assert f"{missing} points of this profile" in finding(found)[-1]
    assert "Unstable times: 2, among them" in found.text
    assert "ringlab backend=eager cache=False gather=True" in found.text
    assert "unstable" in found.table("8 heads of 64").markdown
    assert "every row ran on one" not in found.text

    def wrong(r):
        return replace(r, errors={"out": 1.0}) if r.point.dtype == "bfloat16" else r

    alone = [wrong(r) for r in made("000") if r.point.world_size == 1]
    found = Shown(NAME, study_of(alone, suite="optimization"))
    assert "bf16: no row passed, each with its reason below." in found.text
    assert "; 1 point of this profile" in finding(found)[-1]
    assert "every row ran on one" in found.text
    assert {row[1].text for row in found.table("are not shown").rows} == {"incorrect"}


def test_the_beginning_comes_from_rows_that_may_be_shown():
    found = shown("000")
    assert [*found.names["lengths"].seq_len] == [1024, 2048, 4096, 8192]
    assert "from 1,024 tokens on" in finding(found)[1]
    bad = shown(
        "000", lambda r: spoiled(r, "too fast") if r.point.seq_len == 2048 else r
    )
    assert "from 4,096 tokens on" in finding(bad)[1]


# --------------------------------------------------------------------------------------
# other values of the parameters


@pytest.mark.parametrize(
    "given",
    [{"heads": 2}, {"head_dim": 32}, {"dtype": "bfloat16"}, {"longest": 4096}],
    ids=str,
)
def test_a_parameter_changes_the_points_and_the_page_follows(given):
    about = hardware.get_profile("cpu")
    groups = suites.vary(suites.optimization(about), **given)
    asked = {(g.name, p.id) for g in groups for p in g.points}
    usual = {(r.group, r.point.id) for r in made("000")}
    assert asked and (asked < usual if "longest" in given else asked - usual)
    varied = [document_row(p, g, False, "cpu") for g in groups for p in g.points]
    found = Shown(NAME, replace(study_of(varied), groups=groups), **given)
    assert {*zip(found.points.group, found.points.point)} == asked
    n, heads = given.get("longest", 8192), given.get("heads", 8)
    head_dim = given.get("head_dim", 64)
    table = found.table(f"{n:,} tokens, {heads} heads of {head_dim}")
    kinds = [row[0].text for row in table.rows]
    assert "All optimizations" in kinds and "Dense SDPA" in kinds
    assert ">Published (ms)" not in table.columns, "none is of this shape or dtype"
    assert "points of this profile" not in finding(found)[-1]
    assert f"{n:,} tokens" in finding(found)[1], "beside dense attention"


# --------------------------------------------------------------------------------------
# kernels on a GPU

# Useful TFLOP/s of each way, so that what follows from them can be worked out by hand.
RATES = {
    "ringlab": 600,
    "ringlab backend=triton": 580,
    "ringlab backend=sdpa": 590,
    "ringlab backend=sdpa merge=eager": 520,
    "copying": 260,
    "contiguous_segments backend=cudnn": 640,
    "contiguous_segments backend=flash": 360,
    "dense_sdpa": 690,
    "flex": 400,
}
BRANCHES = str(suites.RUNG_PATTERN)
DEFAULT = "Default path", 65536, 128, BRANCHES, "forward"
FLASH = "contiguous_segments backend=flash"


def way_of(point) -> str:
    options = (f"{k}={v}" for k, v in point.options if k != "twin")
    return " ".join([point.system, *options])


def on_gpu(point, group, rate: float | None = None, noise: float = 0.0):
    """An ok row of a GPU whose useful work ran at ``rate`` TFLOP/s, every other sample
    slower by ``noise``.
    """
    row = made_up(point.but(options={}), replace(group, timed=True), False, rounds=1)
    dense = point.system == "dense_sdpa"
    work = point.but(pattern={"kind": "dense"}) if dense else point
    flops = work.call().cost().flops
    flops /= 1.75 if point.system == "contiguous_segments" else 1  # one branch of three
    taken = flops / (rate or RATES[way_of(point)]) / 1e12
    where = {"device": "cuda", "device_memory_bytes": 150_000_000_000}
    return sampled(
        row,
        [taken * (1 + noise * (i % 2)) for i in range(10)],
        point=point,
        composition=group.composition(point),
        provenance=row.provenance | where,
        host_seconds=2e-4,
        cost={"flops": flops},
        bound_seconds=0.5 * taken,
    )


def groups_of(name: str = "h200") -> list:
    return suites.kernel_suite(hardware.get_profile(name))


@functools.cache
def kernels(change=on_gpu, name: str = "h200", groups: int = 19) -> Shown:
    """The page of a GPU with few rows beside those of its kernels."""
    few = [r for r in made("000", name) if r.group == "lengths"]
    asked = groups_of(name)[:groups]
    found = [r for g in asked for p in g.points if (r := change(p, g))]
    return Shown(NAME, study_of(few, name), study_of(found, name))


def of_default(point) -> bool:
    """The default path, and its twin, of one group."""
    shape = point.seq_len, point.head_dim, point.causal, point.passes
    same = point.pattern == suites.RUNG_PATTERN.to_dict()
    return shape == (65536, 128, False, "fwd") and same and way_of(point) == "ringlab"


def test_each_way_stands_with_its_time_its_roofline_and_its_share_of_the_best_peer():
    ways = kernels().table("Ways to run")
    found = column(ways, "Of the best peer", 5)
    points = [(p, g) for g in groups_of() for p in g.points]
    assert len(ways.rows) == len(points) - 1  # but for the twin
    assert {key[1] for key in found} == {4096, 16384, 65536, 262144, 1048576}
    lists = "Tile lists (Triton)", *DEFAULT[1:]
    assert column(ways, "Useful TFLOP/s", 5)[lists] == "580"
    assert column(ways, "Host (ms)", 5)[lists] == "0.2"
    for d in (128, 64):
        for name in ("forward", "forward, causal", "training"):
            assert (
                found["Default path", 65536, d, BRANCHES, name] == "93.8 %"
            )  # 600/640
    assert found[lists] == "90.6 %"
    blocks = str(suites.RUNG_MASK)
    assert found["FlexAttention", 65536, 128, blocks, "forward"] is None
    assert found["Default path", 65536, 128, blocks, "forward"] == "150 %"  # 600 / 400
    assert found["Dense SDPA", 65536, 128, str(patterns.Dense()), "forward"] is None
    assert found["Default path", 1048576, *DEFAULT[2:]] is None
    row = next(on_gpu(p, g) for p, g in points if of_default(p))
    for name, seconds in (("Time", row.median), ("Roofline", row.bound_seconds)):
        assert column(ways, f"{name} (ms)", 5)[DEFAULT] == tables.number(seconds * 1e3)
    assert "Not measured" not in ways.note


def test_a_share_follows_the_row_and_its_peers():
    def change(p, g):
        rate = 800 if way_of(p) == FLASH else 560 if of_default(p) else None
        return on_gpu(p, g, rate, 0.1 * of_default(p))

    table = kernels(change).table("Ways to run")
    found = column(table, "Of the best peer", 5)
    assert found["Default path", 65536, 64, BRANCHES, "forward"] == "75.0 %"  # 600/800
    cell = next(row[7] for row in table.rows if (row[0].text, *row[1:5]) == DEFAULT)
    low, high = map(float, cell.sub.split(" to "))
    assert low < float(cell.text[:-2]) < min(high, 70)


def test_rows_that_may_not_be_quoted_say_why_and_missing_ones_are_counted():
    def change(p, g):
        gone = {"status": "oom", "reason": "no memory", "median": None, "seconds": ()}
        row = on_gpu(p, g)
        row = replace(row, **gone, ci=None) if of_default(p) else row
        return None if p.system == "flex" else row

    found = kernels(change)
    table = found.table("Ways to run")
    assert column(table, "Time (ms)", 5)[DEFAULT] == "oom"
    for name in ("Of the best peer", "Useful TFLOP/s"):
        assert text(column(table, name, 5)[DEFAULT]) == tables.DASH
    assert [(x[1].text, x[2]) for x in found.table("not shown").rows] == [
        ("oom", "no memory")
    ]
    assert "Not measured: 1 points." in table.note
    few = kernels(name="a100", groups=1).table("Ways to run")
    assert "Not measured: 81 points." in few.note


def test_without_rows_of_kernels_nothing_is_said_of_them():
    for found in (kernels(groups=0), shown("000"), shown("000", None, "h200")):
        assert not re.search("Ways to run|Tile sizes", found.text)


@pytest.mark.parametrize("name, more", [("h200", 19), ("cpu", 0)])
def test_the_report_measures_the_kernels_too_where_there_is_a_gpu(name, more):
    profile = hardware.get_profile(name)
    every = {g.name for g in suites.every_group(profile)}
    kernels = {g.name for g in suites.kernel_suite(profile)}
    assert len(kernels) == more and kernels <= every
