"""The pages about the five documents, from made-up rows: what they quote, what they
refuse to quote, what they say.
"""

import re
from dataclasses import replace

import pytest
import torch
from reporting import (
    PAGES,
    lean,
    longer,
    made,
    made_up,
    on_ranks,
    page,
    shown,
    slower,
    study_of,
    system,
    words,
)
from ringlab import block_patterns, cache, cost, hardware, patterns
from ringlab.estimate import longest
from ringlab.measure import Group, Point, suites, timing
from ringlab.measure.systems import SYSTEMS
from ringlab.report import columns, findings, rows, tables, trust
from ringlab.report.documents import optimization as single
from ringlab.report.documents import ring, session


def text(cell) -> str:
    return tables.cell(cell).text


LONG = (
    "tenth",
    "Extreme",
    "pattern cache where",
    "Scratch",
)  # a rehearsal leaves them out


@pytest.mark.parametrize(
    "number, profile, rehearsal",
    [
        ("000", "h200", False),
        ("001", "cpu", False),
        ("002", "cpu", False),
        ("002", "gtx1080", False),
        ("002", "gtx1080", True),
        ("003", "cpu", False),
        ("004", "cpu", False),
    ],
)
def test_every_table_is_filled_and_the_answer_is_short(number, profile, rehearsal):
    found, about = (
        shown(number, None, profile, rehearsal),
        page(number, None, profile, rehearsal),
    )
    for t in found.tables:
        empty = not t.rows or text(t.rows[0][0]) == "not measured"
        assert empty == (rehearsal and any(x in t.caption for x in LONG)), t.caption
    assert found.drawn and 1 <= len(PAGES[number].answer(about).lines) <= 5


# --------------------------------------------------------------------------------------
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
LEAN = {
    "floor_bytes": 2**30,
    "tracked_peak_bytes": int(4.321 * 2**30),
    "high_water_bytes": int(5.432 * 2**30),
}
LEAN |= {"operator_calls": 98765, "view_calls": 0}
SENT = [987654321]
MARKS = ("0.797", "4.32", "5.43", "4,640", "98,765", "942 MiB")


def spoiled(r, kind: str):
    """The row with numbers that nothing else has, and a flaw for which none of them may
    be quoted.
    """
    if r.status != "ok" or (not r.seconds and kind in ("too fast", "no time")):
        return r
    times = dict.fromkeys(("median", "q1", "q3"), FAST) | {
        "seconds": (FAST,) * 10,
        "ci": (FAST, FAST),
    }
    sent = {"ranks": r.ranks | {"bytes_sent": SENT}} if r.ranks else {}
    return replace(
        r,
        **{
            **(times if r.seconds else {}),
            "memory": LEAN,
            "share": 0.797,
            **sent,
            **BAD[kind],
        },
    )


def spoiling(number: str, kinds, every: int = 1, first: int = 0):
    """A change that spoils one in ``every`` rows of a document, by these kinds in turn."""
    order = {id(r): i for i, r in enumerate(made(number))}
    return lambda r: (
        spoiled(r, kinds[order[id(r)] % len(kinds)])
        if order[id(r)] % every == first
        else r
    )


def shows_no_marks(number: str, change):
    """What the page shows but for its lists of reasons, which say how fast is too fast."""
    found, about = (
        shown(number, change, without=("failures", "limits")),
        page(number, change),
    )
    marked = [r for r in about.results if r.median == FAST or r.memory == LEAN]
    assert (
        len(marked) > 10
        and all(map(trust.objection, marked))
        and len(about.failed) >= len(marked)
    )
    assert not [m for m in MARKS if m in found.text]
    assert not [v for v in found.drawn if v in (FAST, FAST * 1e3) or 4.3 < v < 4.33]
    return found


BY_ARITHMETIC = {
    "002": dict.fromkeys(["1161", "144mb", "262k"], "impossible as printed")
    | {"hit-rate": "holds"}
}
BY_ARITHMETIC["000"] = {
    "flash-dtype": "not reproduced here"
}  # by a module that is made for the page


@pytest.mark.parametrize(
    "number, kinds",
    [
        *(("000", [kind]) for kind in BAD),
        *((number, [*BAD][:4]) for number in PAGES if number != "000"),
    ],
    ids=str,
)
def test_no_bad_row_reaches_a_table_a_figure_a_headline_a_verdict_or_the_recommendation(
    number, kinds
):
    change = spoiling(number, kinds)
    found = shows_no_marks(number, change)
    assert {round(v, 2) for v in found.drawn} <= {
        1.12
    }  # peaks of points that are not timed
    verdicts = words(page(number, change), number).items()
    decided = {k: w for k, w in verdicts if w not in ("untested", "contradicts itself")}
    untimed = (
        {"two-cards": "not reproduced here"}
        if kinds[0] in ("too fast", "no time")
        else {}
    )
    assert decided == BY_ARITHMETIC.get(number, {}) | untimed


@pytest.mark.parametrize("first", [0, 1])
def test_bad_rows_among_good_ones_reach_nothing(first):
    assert any(
        "ms" in x
        for x in shows_no_marks("000", spoiling("000", [*BAD], 2, first)).texts
    )


def test_superlinear_rows_are_suspect_and_reach_no_page():
    row = next(r for r in made("000") if rows.is_optimised(r))
    honest, swift = (
        on_ranks(row, 2, 2.15, scheme="ring"),
        on_ranks(row, 2, 2.25, scheme="ring"),
    )
    assert trust.judged([row, swift])[1].reason.startswith(
        "superlinear: 2.25 times faster on 2 ranks"
    )
    assert trust.judged([swift])[0].status == "ok"  # nothing to compare with
    slow = replace(
        row, median=row.median * 9
    )  # a faster row on one rank is the one that counts
    assert trust.judged([slow, row, honest])[2].status == "ok"
    assert trust.judged([replace(row, errors={}), swift])[1].status == "ok"

    alone = [r for r in made("000") if r.point.world_size == 1]
    about = study_of(
        [*alone, on_ranks(row, 2, row.median / FAST)], suite="optimization"
    )
    assert trust.status(about.results[-1]) == "suspect"
    failures = single.failures(about).markdown
    assert "superlinear" in failures and "2 ranks" in failures
    assert words(about, "000")["two-cards"] == "untested"


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
    assert trust.judged([one, two])[1].status == status, "in whichever group it stands"


# --------------------------------------------------------------------------------------
# document 000: what is shown


def test_names_of_one_engine_share_a_line_and_no_name_is_the_fastest():
    """Made-up rows differ by 2 %: noise. V2Flash in fp16 is published, and so is its
    name beside that of the engine.
    """
    lines = single.implementations(page("000")).rows
    names = [(row[0].text, row[0].sub) for row in lines]
    assert names == [
        ("Naive (ours)", "fp16"),
        ("Naive (ours)", "fp32"),
        ("All optimizations", "fp16; also RingDilatedAttentionV2Flash"),
        ("All optimizations", "bf16"),
        ("All optimizations", "fp32; also RingDilatedAttentionV2Collective"),
        ("Dense SDPA", "fp32"),
    ]
    printed = {name: row[6].text for name, row in zip(names, lines) if row[6]}
    assert [*printed.values()] == [
        "136.52",
        "201.02",
        "7.66",
    ] and "Original" not in text(lines[0][0])
    first = single.answer(page("000")).lines[0]
    assert re.search(r"\*\*Optimizing pays 3\.\d times here\*\*", first)
    assert "Fastest" not in single.answer(page("000")).markdown
    apart = page(
        "000", lambda r: longer(r, 2) if r.point.system.endswith("V2Flash") else r
    )
    assert (
        single.implementations(apart).rows[2][0].sub
        == "fp16; also RingDilatedAttentionV2Flash, not as fast"
    )


def test_the_answer_says_which_switches_gain_and_which_do_not():
    def without(name: str, factor: float):
        options = rows.FULL | {name: rows.PLAIN[name]}
        return lambda r: (
            longer(r, factor)
            if r.point.system == "ringlab" and work(r) == options
            else r
        )

    def said(change=None) -> str:
        return re.sub(r" \([\d.]+×\)", "", single.answer(page("000", change)).lines[0])

    assert (
        "The gain comes from: strided views instead of gathered copies, fused kernel instead of eager."
        in said()
    )
    assert "No gain beyond noise: pattern cache on, memory pool on." in said()
    assert "eager, pattern cache on. No gain beyond noise: memory pool on." in said(
        without("cache", 2)
    )
    assert "A loss: memory pool on." in said(without("pool", 0.6))
    assert "times here, within noise**" in said(
        lambda r: longer(r, 9) if r.option("twin") else r
    )


def test_how_long_a_sequence_fits_is_what_longest_says():
    for name, rehearsal, dtype in (
        ("cpu", False, torch.float32),
        ("gtx1080", True, torch.float32),
    ):
        about = page("000", None, name, rehearsal)
        said = next(line for line in single.answer(about).lines if "How long" in line)
        for passes in ("fwd", "fwd+bwd"):
            most = longest(
                rows.pattern(),
                about.memory_bytes,
                dtype=dtype,
                profile=name,
                passes=passes,
            )
            assert f"{most:,} tokens" in said or f", {most:,} in training" in said
    assert said == single.answer(about).lines[0], "computed figures come first"
    assert (
        "computed for NVIDIA GeForce GTX 1080 in fp32, over 8,192 tokens on one device: dilated"
        in said
    )
    assert "takes at least 2.90 ms" in said


@pytest.mark.parametrize("number", PAGES)
def test_a_rehearsal_opens_with_what_is_computed_and_holds_the_times_of_a_cpu_in_one_line(
    number,
):
    first, second, *others = (
        PAGES[number].answer(page(number, None, "gtx1080", True)).lines
    )
    computed = (
        "computed for NVIDIA GeForce GTX 1080 in fp32, over",
        "takes at least",
        "8 GiB",
    )
    assert all(words in first for words in computed)
    assert (
        second.startswith("**Measured on a CPU, not on that GPU**: ")
        and second.count("**") == 2
    )
    assert [line.split("**")[1] for line in others] == ["Trust", "Not measured"]
    assert "Measured on" not in PAGES[number].answer(page(number)).markdown


def test_passes_hold_forward_and_training_causal_and_not():
    lines = single.passes(page("000")).rows
    assert [(row[0], row[1]) for row in lines] == [
        ("forward", "not causal"),
        ("forward", "causal"),
        ("training", "not causal"),
    ]
    assert all(
        text(row[i]) not in ("not measured", tables.DASH)
        for row in lines
        for i in range(2, 7)
    )


def test_each_implementation_stands_with_its_peak_of_memory():
    found = single.implementations(
        page("000", lambda r: lean(r, 3) if rows.is_plain(r) else r)
    )
    assert [row[5].sub for row in found.rows] == ["3.36 × tensors"] * 2 + [
        "1.12 × tensors"
    ] * 4


def test_efficiency_is_time_over_roofline():
    """Made-up rooflines are 0.6 of the time, for the row of all optimizations 0.5 of
    it.
    """
    half = page(
        "000",
        lambda r: replace(r, bound_seconds=r.median / 2) if rows.is_optimised(r) else r,
    )
    said = single.efficiency(half).lines[0]
    assert (
        "the document's call 2.0×, dense SDPA 1.7×, LongNet's own mixing 1.7×" in said
    )
    spread = page(
        "000",
        lambda r: (
            longer(r, 2)
            if r.point.system == "copying" and r.point.seq_len == 8192
            else r
        ),
    )
    assert re.search(r"copied branches 3\.[34]×", single.efficiency(spread).lines[0])
    none = page("000", lambda r: replace(r, bound_seconds=None))
    assert "**Time over roofline**: not measured." in single.efficiency(none).lines[0]


def test_a_kernel_has_a_time_or_a_reason_and_what_its_rules_say():
    about = page("000")
    found = {
        name: row[1:]
        for row in single.kernels_table(about).rows
        for name in row[0].split(", ")
    }
    assert (
        found["cpu_flash"][0].text[0].isdigit()
        and found["cudnn"][0].sub == "needs a CUDA device, this is cpu"
    )
    assert any(
        "cudnn, flash_attn_2, flash" in row[0]
        for row in single.kernels_table(about).rows
    ), "refused alike"
    assert (
        single.failures(about) is None
        and single.failures(page("000", spoiling("000", ["wrong"], 9))).rows
    )
    assert (
        found["cudnn"][1].text == "refused"
        and found["xformers"][1].text == "fp32, fp16"
    )
    h200 = single.kernels_table(page("000", None, "h200"))
    rules = {row[0]: text(row[2]) for row in h200.rows}
    assert [*rules][0] == "flash_attn_3" and rules["eager"] == "fp32, fp16, bf16"


def test_cache_and_pool_are_said_from_the_rows():
    about = page("000")
    assert len(single.built(about)) == 4
    lines = single.reuse(about).lines
    assert "building a plan takes at most" in lines[0]
    assert (
        len(single.pool_rows(about)) == 6
        and "of 6 calls 0 are faster with it, 0 slower, 6 within noise" in lines[1]
    )
    slow = single.reuse(
        page("000", slower(2, lambda r: r.option("pool_threshold_mb") == 4.0))
    ).lines[1]
    assert "0 are faster with it, 2 slower" in slow


def block(about) -> str:
    """The Python block of the recommended configuration, as a page shows it."""
    (found,) = re.findall(
        r"```python\n(.*?)```",
        single.recommended(about)._repr_mimebundle_()["text/markdown"],
        re.S,
    )
    return found


@pytest.mark.parametrize("name, rehearsal", [("cpu", False), ("gtx1080", True)])
def test_the_recommended_block_runs(name, rehearsal):
    source = block(page("000", None, name, rehearsal))
    names: dict = {}
    with torch.no_grad():
        exec(source, names)
    assert names["out"].shape == (1, 8192, 8, 64) and torch.isfinite(names["out"]).all()
    evidence = [line for line in source.splitlines() if line.startswith("# ")]
    assert len(evidence) >= 10 and ("of a CPU" in evidence[0]) == rehearsal


def work(r) -> dict:
    """What a row and its twin have in common: one alone that is slow would say that no
    difference can be told.
    """
    return {k: v for k, v in rows.switches(r.point).items() if k != "twin"}


@pytest.mark.parametrize(
    "factor, test, said",
    [
        (1, rows.is_plain, "causal=False, backend='auto')"),
        (1, rows.is_plain, "'dtype': torch.float32"),
        (2, lambda r: work(r) == rows.FULL | {"pool": False}, "pool=True"),
        (
            2,
            lambda r: (
                work(r) | {"backend": "auto"} == rows.FULL
                and r.point.system == "ringlab"
            ),
            "gather=True",
        ),
        (
            0.7,
            lambda r: r.point.dtype == "bfloat16" and rows.is_optimised(r),
            "'dtype': torch.bfloat16",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_recommendation_follows_the_rows(factor, test, said):
    source = block(page("000", lambda r: longer(r, factor) if test(r) else r))
    assert said in source and "backend='auto'" in source


def test_what_the_same_work_differs_by_is_no_difference():
    """The second row of a call is 1.5 times slower: no factor below that is called
    faster or slower.
    """
    twin = max((r for r in made("000") if r.option("twin")), key=lambda r: r.median)
    calm, uneven = (
        page("000"),
        page("000", lambda r: longer(r, 1.5) if r is twin else r),
    )
    assert (
        calm.noise_floor < 1.05
        and uneven.noise_floor == pytest.approx(1.5, rel=0.05)
        and len(uneven.controls) == 4
    )
    assert "differed by up to 1." in single.answer(uneven).markdown
    for one, tells in ((calm, True), (uneven, False)):
        copying, ours = (
            one.rows(system=s, pattern=suites.LADDER.to_dict())[0]
            for s in ("copying", "ringlab")
        )
        factor = one.ratio(copying, ours)
        assert (
            factor.value == pytest.approx(1.1, rel=0.02)
            and factor.significantly_slower is tells
        )
        assert ("within noise" in columns.times(factor).sub) is not tells
    assert (
        not {r.option("twin") for r in calm.rows()} - {None}
        and len(calm.results) == len(calm.rows()) + 4
    )


def test_limits_name_what_is_missing_refused_unstable_and_never_measured():
    results = [
        replace(r, unstable=rows.is_plain(r))
        for r in made("000")
        if r.point.dtype != "bfloat16"
    ]
    about = study_of(results, suite="optimization")
    lines = single.limits(about).lines
    said = "\n".join(lines)
    missing = len(made("000")) - len(results)
    assert "bf16: not measured." in lines and "no row passed" not in said
    assert (
        f"What {missing} of the {len(made('000'))} points" in said
        and "every row ran on one" not in said
    )
    alone = study_of(
        [r for r in results if r.point.world_size == 1], suite="optimization"
    )
    assert "every row ran on one" in "".join(single.limits(alone).lines)
    assert (
        "Unstable times: 2, among them" in said
        and "Naive (ours), fp16, 8,192 tokens, forward" in said
    )
    assert "unstable" in single.implementations(about).markdown
    failed = findings.failures(about)
    (refused,) = failed.rows  # they agree in shape and reason
    assert (
        refused[0].count("kernel") == 7
        and failed.caption.startswith("7 of ")
        and "CUDA" not in said
    )
    assert all(
        name in refused[0]
        for name in ("cudnn", "flash_attn_2", "flash_attn_3", "xformers", "efficient")
    )
    assert (text(refused[2]), refused[3]) == (
        "unsupported",
        "needs a CUDA device, this is cpu",
    )
    assert f"{missing} points of this profile" in single.answer(about).lines[-1]
    assert (
        "; 1 point of this profile"
        in single.answer(study_of(made("000")[1:], suite="optimization")).lines[-1]
    )
    nothing = page(
        "000",
        lambda r: replace(r, errors={"out": 1.0}) if r.point.dtype == "bfloat16" else r,
    )
    assert (
        "bf16: no row passed, each with its reason below."
        in single.limits(nothing).lines
    )


def test_provenance_says_clocks_completeness_and_counts(tmp_path):
    def facts(results) -> dict:
        return {
            row[0]: row[1]
            for row in single.provenance(study_of(results, suite="optimization")).rows
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
    assert "GPU before a group" not in plain and "Inputs" in plain
    # Lines that are no rows do not stop it.
    (tmp_path / "samples.jsonl").write_bytes(b'\xff\n[1]\n{"kind": "res\n')
    assert findings.provenance(replace(study_of(made("000")), folder=tmp_path)).rows


def test_the_beginning_comes_from_rows_that_may_be_shown():
    found = single.over_dense(page("000"))
    assert [n for n, *_ in found] == [1024, 2048, 4096, 8192] and rows.begins(
        found
    ) == 1024
    bad = page(
        "000", lambda r: spoiled(r, "too fast") if r.point.seq_len == 2048 else r
    )
    assert rows.begins(single.over_dense(bad)) == 4096
    assert "1,024" not in single.answer(bad).lines[2]


# --------------------------------------------------------------------------------------
# documents 001, 003 and 004: ranks


def cells_of(table, *names: str) -> dict[tuple, list]:
    """(tokens, ranks) -> the cells of a table in these columns."""
    at = [[c.lstrip(">") for c in table.columns].index(name) for name in names]
    return {(row[0], row[1]): [row[i] for i in at] for row in table.rows}


def test_more_ranks_than_cores_enter_no_time():
    crowded = [r for r in page("001").results if r.ranks.get("oversubscribed")]
    assert crowded and not any(columns.timed(r) for r in crowded)
    forced = page(
        "001",
        lambda r: (
            replace(r, median=9.0, ci=(9.0, 9.0), seconds=(9.0,)) if r in crowded else r
        ),
    )
    found = cells_of(ring.lengths(forced), "Time (ms)", "Roofline (ms)")
    lines = [found[n, p] for n, p in found if p == 4]
    assert lines and all(
        time.text == "more ranks than cores" and bound is None for time, bound in lines
    )
    assert (
        "4 ranks, for which there are too few cores"
        in ring.answer(page("001")).lines[-1]
    )


def test_the_finding_says_what_falls_what_it_gains_and_whether_ranks_exchange_anything():
    """Made-up rows all send. Those of the run do not, but one: it alone is named, with
    what it holds.
    """
    first = ring.answer(page("001")).lines[0]
    assert re.search(
        r"16,384 tokens 2 ranks are 2\.0\d× as fast .* a rank falls 1\.\d+× on 2 and 2\.\d+× on 4",
        first,
    )
    assert "exchange nothing" not in first

    def silent(r):
        short = (r.point.seq_len, r.point.world_size) == (2048, 4)
        return (
            r
            if short or "bytes_sent" not in r.ranks
            else replace(r, ranks=r.ranks | {"bytes_sent": [0, 0]})
        )

    quiet = ring.answer(page("001", silent)).lines[0]
    assert (
        "exchange nothing while every segment" in quiet
        and "at most 1,024 tokens" in quiet
    )
    cut = r"Segments are cut at 2,048 tokens on 4 ranks: a rank sends .* and its memory falls 2\.\d+×\."
    assert re.search(cut, quiet)
    none = ring.answer(page("001", lambda r: replace(r, status="oom"))).lines
    assert none[0].endswith("not measured.") and not any(
        "exchange" in line for line in none
    )


def test_lengths_are_those_of_longest_and_one_that_failed_is_named():
    found = ring.answer(page("001")).lines[1]
    budget, pattern = page("001").memory_bytes, suites.RING_DOCUMENT
    for ranks in (1, 2):
        assert (
            f"{longest(pattern, budget, ranks=ranks):,} tokens on {ranks} rank" in found
        )
    assert "Not shown" not in found
    last = page(
        "001",
        lambda r: (
            replace(r, status="oom", reason="no") if r.point.seq_len == 16384 else r
        ),
    )
    assert "16,384 tokens on 2 ranks (oom)" in ring.answer(last).lines[1]


def test_a_roofline_is_of_the_threads_of_the_row():
    """One rank of one thread has half of a machine of two: its shortest time is twice
    that of two ranks.
    """
    change = {"threads": 2, "device": "cpu"}
    two = page(
        "001",
        lambda r: (
            replace(r, bound_seconds=0.01, provenance=r.provenance | change)
            if r.seconds
            else r
        ),
    )
    found = cells_of(ring.lengths(two), "Roofline (ms)")
    assert {text(found[n, p][0]) for n, p in found if p == 1} == {"20.0"}
    assert {text(found[n, p][0]) for n, p in found if p == 2 and found[n, p][0]} == {
        "10.0"
    }
    bounds = two.frame().groupby(["world_size", "threads"])["bound_s"].min()
    assert bounds[1, 1] == 0.02 and bounds[2, 1] == 0.01, "in the data too"
    assert "Each rank has 1 thread, and so has dense attention." in ring.names(two).note


def test_schemes_that_send_as_much_share_a_name():
    sent, held, alone = ring.answer(page("003")).lines[:3]
    assert re.search(r"sends [\d.]+ KiB by plan, 12 MiB by ring and all-gather", sent)
    assert "4,096 tokens on 4 ranks" in sent
    assert re.search(
        r"[\d.]+ MiB by plan, [\d.]+ MiB by ring, [\d.]+ MiB by all-gather.* alone are 8 MiB",
        held,
    )
    assert "within noise" in alone and "1.00× the memory" in alone
    apart = page(
        "003",
        lambda r: longer(r, 1.5, bound_seconds=None) if system(suites.ROBUST)(r) else r,
    )
    assert "within noise" not in ring.answer(apart).lines[2]
    within = [
        int(re.search(r"(\d+) of 8 differences", ring.answer(x).lines[1])[1])
        for x in (page("003"), apart)
    ]
    assert within[0] > 4 >= within[1] > 0


def test_a_row_of_other_heads_enters_no_table_of_the_documents_shape():
    row = next(
        r for r in made("004") if r.point.seq_len == 16384 and r.point.world_size == 2
    )
    long = replace(row, point=row.point.but(seq_len=2**20, heads=1, kv_heads=1))
    about = study_of([*made("004"), long], suite="hybrid_summary")
    assert [line[0] for line in ring.lengths(about).rows] == [
        line[0] for line in ring.lengths(page("004")).rows
    ]
    said, there = ring.answer(about).markdown, "1,048,576 tokens on 2 ranks"
    assert (
        words(about, "004") == words(page("004"), "004")
        and said.count("1,048,576") == 1
    )
    assert f"The longest run here, {there}, with one head, held" in said, (
        "named with its heads"
    )
    row = next(
        r for r in made("000") if rows.is_optimised(r) and r.point.seq_len == 8192
    )
    narrow = replace(row, point=row.point.but(seq_len=16384, heads=1, kv_heads=1))
    about = study_of([*made("000"), narrow], suite="optimization")
    assert len(single.over_dense(about)) == len(single.over_dense(page("000")))


def test_a_row_of_no_suite_is_of_every_report():
    mine = Point("ringlab", patterns.Dense(), seq_len=64)
    stray = made_up(mine, Group("mine", [mine]), False)
    assert stray in study_of([*made("004"), stray]).of("hybrid_summary").results


# --------------------------------------------------------------------------------------
# document 002: block-sparse attention and extreme lengths


def test_what_a_cache_and_a_pool_gain_is_said_by_what_they_may_hold():
    """Made-up lookups and buffers are 20 times as fast as without."""
    kept, pool = session.reuse(page("002")).lines
    assert re.findall(r"([\d.]+) MiB hit 88\.0 %, (?:20\.\d|19\.\d)×", kept) == [
        "0.25",
        "1",
        "64",
    ]
    names = [
        f"{mb} MiB on {n} thread{'s' * (n > 1)}"
        for mb in (1, 4, 16, 64)
        for n in (1, 2)
    ]
    assert f"faster for {', '.join(names)}." in pool
    slow = slower(
        100,
        lambda r: (
            r.point.system == "pool_workload"
            and r.option("pool")
            and r.option("size_mb") == 4
        ),
    )
    mixed = session.reuse(page("002", slow)).lines[1]
    assert (
        "slower for 4 MiB on 1 thread, 4 MiB on 2 threads." in mixed
        and " 4 MiB" not in mixed.split("slower")[0]
    )
    lost = session.reuse(page("002", lambda r: replace(r, status="oom"))).lines
    assert all("not measured" in line for line in lost)


def test_blocks_chosen_by_content_stand_beside_the_patterns():
    line = session.patterns(page("002")).rows[-1]
    assert (
        line[:3] == ["by content", "blocks of 64: the best 5 by content", "7.81 %"]
        and line[3].text
    )


@pytest.mark.parametrize("number", ["000", "002"])
def test_times_stand_beside_rooflines(number):
    for t in shown(number).tables:
        names = " ".join(t.columns)
        assert (
            "Time (ms)" not in names or "Roofline" in names or "published" in t.caption
        ), t.caption


@pytest.mark.parametrize(
    "number, name", [("002", "Published (ms)"), ("004", "Published tokens/s")]
)
def test_no_published_time_of_a_gpu_stands_beside_one_of_a_cpu_in_a_rehearsal(
    number, name
):
    """Nor any other figure of the document. The roofline says whose it is."""
    for rehearsal in (False, True):
        profile = "gtx1080" if number == "002" or rehearsal else "cpu"
        about = page(number, None, profile, rehearsal)
        found = (session.block_sparse if number == "002" else ring.lengths)(
            about
        ).columns
        assert (f">{name}" in found) != rehearsal
        assert (">Published (MB)" in found) != rehearsal
        assert any("Roofline of a CPU" in x for x in found) == rehearsal


def test_rows_without_operator_calls_are_shown():
    def older(r):
        return replace(
            r, memory={k: v for k, v in r.memory.items() if not k.endswith("_calls")}
        )

    found = shown("002", older)
    assert "operator calls become" not in found.text and found.tables
    assert words(page("002", older), "002")["launches"] == "untested"


def test_the_printed_factor_is_below_the_work_of_what_is_stated():
    pattern = patterns.Dilated(
        [65536, 131072, 262144], [1, 2, 4], "head_groups", "branch"
    )
    counted = cost.count(
        pattern, batch=1, seq_len=131072, heads=8, head_dim=64, dtype=torch.float16
    )
    assert session.work() == counted and counted.floor_bytes == 512 * 2**20
    assert 1100 < session.least_ms(
        counted
    ) < 1300 and session.card() == hardware.get_profile("gtx1080")
    assert "1,177" in session.answer(page("002")).markdown


def test_the_share_of_dense_is_by_density_and_pass():
    found, gpu = page("002"), page("002", None, "gtx1080")
    dense = session.one(found, suites.EFFICIENCY, "dense_sdpa")
    row = next(
        r
        for r in found.rows(
            group=suites.EFFICIENCY, system="ringlab", passes="fwd", causal=False
        )
    )
    density = patterns.from_dict(row.point.pattern).density(row.point.seq_len)
    ratio = session.pair_cost(found, row, dense)
    assert ratio.value == pytest.approx(row.median / (density * dense.median), rel=0.02)
    training = [
        next(line[-1] for line in session.efficiency(x).rows if line[4] == "training")
        for x in (found, gpu)
    ]
    assert training[0] is None and training[1].text.endswith("×"), (
        "only where a dense backward was timed"
    )
    fresh = [
        line
        for line in session.efficiency(found).rows
        if line[0].sub == "results in fresh memory"
    ]
    assert len(fresh) == 1 and fresh[0][5].text


def test_every_row_that_a_verdict_rests_on_stands_in_the_data_of_the_figure():
    lines = [
        line
        for line in shown("002").table("Data: time over length").rows
        if line[1] == 8192
    ]
    assert [line[0].text for line in lines] == [
        "This library",
        "Row by row",
        "Batched",
        "Dense SDPA",
    ]


def test_dense_attention_of_another_page_stands_beside_the_window_as_not_timed_in_turns():
    suite = suites.landscape(hardware.get_profile("cpu"), device="cpu", rehearsal=False)
    other = [
        made_up(p, g, False)
        for g in suite
        for p in g.points
        if p.system == "dense_sdpa" and p.seq_len == 16384
    ]
    about = replace(page("002"), whole=study_of([*page("002").results, *other]))
    n, ratio, dense, _ = session.over_dense(about)[-1]
    assert n == 16384 and dense in other and not ratio.paired
    assert (
        "16,384 tokens" in session.answer(about).lines[0]
        and "not timed in turns" in session.answer(about).lines[0]
    )


def test_a_refused_kernel_says_why():
    why = "no C++ compiler"

    def refused(r):
        unfit = system("flex")(r)
        return replace(r, status="unsupported", reason=why) if unfit else r

    about = page("002", refused, "h200")
    flex = [
        line
        for line in session.efficiency(about).rows
        if line[0].text == "FlexAttention"
    ]
    assert [line[5].text for line in flex] == ["unsupported"]
    said = session.failures(about).markdown
    assert why in said and "FlexAttention, blocks of 128" in said


def test_operators_of_a_call_are_counted_and_those_built_once_are_not():
    point = Point(
        "ringlab",
        block_patterns.sliding_window(1, block_size=8),
        seq_len=64,
        heads=2,
        head_dim=8,
    )

    def counted(**options) -> dict:
        return timing.footprint(
            SYSTEMS["ringlab"](point.but(options=options), "cpu"), torch.device("cpu")
        )[2]

    cache.GLOBAL.clear()
    first, again, uncached = counted(), counted(), counted(cache=False)
    assert first["operator_calls"] == again["operator_calls"] > again["view_calls"] > 0
    assert uncached["operator_calls"] > again["operator_calls"], (
        "what every call builds is part of it"
    )


def test_labels_name_the_way_and_the_step():
    ours = {rows.label(r) for r in made("002")}
    assert {
        "ringlab.attention as called",
        "ringlab.attention, results in fresh memory",
    } <= ours
    assert {
        "ringlab.attention, blocks=rows, cache off",
        "Calls of blocks, rows, built",
    } <= ours
