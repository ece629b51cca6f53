"""The ledger: every claim is data, is tested by points that exist, and its verdict
follows what it is computed from.
"""

import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bs4 import BeautifulSoup
from reporting import (
    Shown,
    lean,
    longer,
    made,
    page,
    slower,
    study_of,
    system,
    way,
)
from ringlab import compat, hardware
from ringlab.measure import Result, stats, suites
from ringlab.measure.suites import CORRECT, HILBERT, ROBUST, V2_COLLECTIVE
from ringlab.report import claims, claims_code, driver, rows, tables
from ringlab.report.published import BETWEEN, DOCUMENTS, published

CLAIMS = {f"{n} {c['key']}": (n, c) for n in DOCUMENTS for c in published(n)["claims"]}


def word(name: str, profile: str = "cpu", change=None) -> str:
    number, claim = CLAIMS[name]
    return claims_code.verdict(page(number, change, profile), number, claim).word


# --------------------------------------------------------------------------------------
# alterations of rows, by kind: times, memory, rows that fail, and what else is counted


def holds(factor: float, *tests):
    return lambda r: (
        lean(r, factor)
        if "tracked_peak_bytes" in r.memory and all(t(r) for t in tests)
        else r
    )


def fails(*tests, status: str = "oom"):
    return lambda r: (
        replace(r, status=status, reason="altered")
        if all(test(r) for test in tests)
        else r
    )


def option(**wanted):
    return lambda r: all(dict(r.point.options).get(k) == v for k, v in wanted.items())


def field(**wanted):
    return lambda r: all(getattr(r.point, k) == v for k, v in wanted.items())


def several(r) -> bool:
    return r.point.world_size > 1


def quick_on_two(r: Result) -> Result:
    """Sixty times faster in its samples; by its median such a row would be suspect."""
    return (
        replace(r, seconds=tuple(s / 60 for s in r.seconds))
        if r.point.world_size == 2
        else r
    )


def builds_long(r: Result) -> Result:
    """Building takes 1.5 times as long as the call that it is for."""
    if r.point.system != "plan_build" or r.option("warm"):
        return r
    call = next(x for x in made("002") if way(r.option("blocks"))(x))
    return longer(r, 1.5 * call.median / r.median, bound_seconds=None)


def as_counted(r: Result) -> Result:
    calls = {suites.ORIGINAL: 308, suites.OPTIMIZED: 10}.get(r.point.system)
    return (
        replace(r, memory=r.memory | {"operator_calls": calls, "view_calls": 0})
        if calls
        else r
    )


def as_printed_by_length(r: Result) -> Result:
    factor = {1024: 12.7, 2048: 9.5, 4096: 24.6}[r.point.seq_len]
    return lean(r, factor) if r.point.system == ROBUST else r


def chatty(r: Result) -> Result:
    sent = {"bytes_sent": [3 * x for x in r.ranks.get("bytes_sent", ())]}
    return (
        replace(r, ranks=r.ranks | sent)
        if r.point.system == V2_COLLECTIVE and r.ranks
        else r
    )


ORIGINAL, OPTIMIZED = system(suites.ORIGINAL), system(suites.OPTIMIZED)
WITHOUT_FLASH = fails(
    lambda r: "flash" in str(r.option("backend")), status="unsupported"
)
UNPOOLED = rows.FULL | {"gather": True, "pool": False}
AS_DENSE = 7.2  # makes Optimized take as long as dense attention
EVEN = 1.1 / 1.6  # undoes what several ranks hold more of in made-up rows

# claim: (profile, alteration, the verdict that it leads to)
BY_ROWS = {
    "000 fp16-slow": ("gtx1080", slower(5.5, field(dtype="float16")), "holds"),
    "000 dtype-first": ("gtx1080", slower(40, field(dtype="float16")), "holds"),
    "000 cache": ("cpu", fails(lambda r: True), "untested"),
    "000 pool": (
        "cpu",
        slower(2, lambda r: rows.switches(r.point) == UNPOOLED),
        "holds",
    ),
    "000 threshold": (
        "cpu",
        slower(2, lambda r: r.option("pool_threshold_mb") in (4.0, 64.0)),
        "holds",
    ),
    "000 pool-long": (
        "cpu",
        slower(2, field(batch=16, seq_len=4096), option(pool=None)),
        "holds",
    ),
    "000 xformers": ("gtx1080", slower(0.5, option(backend="xformers")), "holds"),
    "000 flash-turing": ("t4", WITHOUT_FLASH, "does not hold"),
    "000 flash-slower": (
        "gtx1080",
        slower(4.7, system("RingDilatedAttentionV2Flash")),
        "holds",
    ),
    "000 throughput": ("gtx1080", slower(0.0295, rows.is_optimised), "holds"),
    "000 two-cards": ("cpu", fails(several), "untested"),
    "001 memory-reduction": ("cpu", holds(0.73, several), "holds"),
    "001 kb-per-token": ("cpu", holds(0.73, several), "holds"),
    "001 scaling": ("cpu", holds(EVEN, several), "holds"),
    "001 extension": ("cpu", holds(EVEN, several), "holds"),
    "001 fastest-system": (
        "cpu",
        slower(2, lambda r: r.point.system in (CORRECT, HILBERT)),
        "holds",
    ),
    "001 leanest": (
        "cpu",
        holds(2, lambda r: r.point.system in (CORRECT, HILBERT)),
        "holds",
    ),
    "001 all-scale": (
        "cpu",
        holds(1.3, system(HILBERT), field(world_size=4)),
        "does not hold",
    ),
    "001 speedup": ("gtx1080", quick_on_two, "holds"),
    "001 million": ("cpu", fails(field(seq_len=2**20)), "untested"),
    "002 ring-v2-memory": ("cpu", fails(field(seq_len=131072)), "untested"),
    "002 131k": ("cpu", fails(field(seq_len=131072)), "untested"),
    "002 tested": ("cpu", fails(field(seq_len=262144)), "untested"),
    "002 23.5": ("cpu", slower(11, ORIGINAL), "holds"),
    "002 slower-at-first": ("cpu", slower(20, ORIGINAL), "holds"),
    "002 pattern-time": ("cpu", builds_long, "holds"),
    "002 launches": ("cpu", as_counted, "holds"),
    "002 batching": ("cpu", slower(2.2, way("rows")), "holds"),
    "002 torch-sparse": (
        "cpu",
        slower(0.01, system(suites.TORCH_SPARSE)),
        "does not hold",
    ),
    "002 table": ("cpu", slower(2.4, ORIGINAL), "holds"),
    "002 optimized-memory": ("cpu", holds(5.3, OPTIMIZED), "holds"),
    "002 extreme": ("cpu", slower(2.88, ORIGINAL), "holds"),
    "002 faster-now": ("cpu", slower(AS_DENSE, OPTIMIZED), "holds"),
    "003 by-length": ("cpu", as_printed_by_length, "holds"),
    "003 ring-causal": (
        "cpu",
        slower(3.2, system(ROBUST), field(causal=True)),
        "holds",
    ),
    "003 several": ("cpu", fails(system(ROBUST), several), "untested"),
    "003 rows-held": ("cpu", holds(17, system(ROBUST)), "does not hold"),
    "003 volume": ("cpu", chatty, "holds"),
    "003 use-collective": ("cpu", holds(10, system("ringlab")), "untested"),
    "003 n-over-p2": ("cpu", holds(2, system("ringlab"), field(world_size=2)), "holds"),
    "004 scaling": ("cpu", holds(EVEN, several), "holds"),
    "004 one-gb": ("cpu", holds(100), "not reproduced here"),
    "004 reduction": ("cpu", holds(60), "not reproduced here"),
    "004 longer": ("cpu", fails(lambda r: r.point.seq_len > 16384), "untested"),
}

# claim: (place of a printed figure, another figure, the verdict that it leads to);
# "claim" is the claim itself
BY_PRINT = {
    "000 fp32-speedup": ("rows.1.optimised", False, "not reproduced here"),
    "000 throughput": ("rows.0.tokens_per_s", 1, "contradicts itself"),
    "001 one-gpu-maximum": ("rows.3.mb", 7000.0, "untested"),
    "001 two-gpu-maximum": ("rows.8.mb", 7000.0, "untested"),
    "001 fastest": ("rows.4.tokens_per_s", 900000, "not reproduced here"),
    "001 memory-reduction": ("reductions.2.factor", 1.95, "contradicts itself"),
    "001 speedup": ("speedups.0.factor", 14.1, "contradicts itself"),
    "001 throughput": ("contradictions.4.within", 3.0, "not reproduced here"),
    "001 planning": ("rows.3.mb", 380.0, "not reproduced here"),
    "002 1161": ("ring.1.ms", 2000.0, "not reproduced here"),
    "002 144mb": ("claim.high", 4000, "not reproduced here"),
    "002 ring-v2": ("ring.0.ms", 800.0, "impossible as printed"),
    "002 ring-v2-memory": ("claim.high", 500, "impossible as printed"),
    "002 262k": ("claim.high", 4000, "not reproduced here"),
    "002 baseline-oom": (
        "ring_shape.segment_lengths",
        [65536, 65536, 131072],
        "untested",
    ),
    "002 ring-size": ("ring.0.ring_size", 8, "contradicts itself"),
    "002 hit-rate": ("source.calls", 3, "does not hold"),
    "002 cache": ("contradictions.0.within", 3.0, "not reproduced here"),
    "002 overall": ("block_rows.1.ms", 68.36 * 0.331, "not reproduced here"),
    "003 slower": ("contradictions.0.within", 20.0, "not reproduced here"),
    "003 memory": ("contradictions.1.within", 2.0, "not reproduced here"),
    "003 causal": ("times.0.collective_ms", 20.0, "holds"),
    "003 two-tables": ("memory.2.collective_mb", 60.0, "not reproduced here"),
    "003 two-tables-ring": ("memory.2.robust_mb", 1090.0, "not reproduced here"),
    "004 ratio": ("rows.0.mb", 58.0, "holds"),
    "004 constant": ("contradictions.3.within", 3.0, "holds"),
    "004 standard": ("claim.gb", 8.0, "holds"),
    "004 throughput": ("contradictions.1.within", 2.0, "not reproduced here"),
}
# claims that the document contradicts: an alteration of rows that would decide them
# otherwise
BEHIND_PRINT = {
    "002 cache": slower(1.15, way("rows", cache=False)),
    "003 slower": slower(2.5, system(ROBUST)),
    "003 memory": holds(17, system(ROBUST)),
    "004 throughput": slower(4, field(seq_len=16384)),
}
BY_CALL = {"000 flash-dtype"}


def test_every_claim_is_altered_by_its_rows_or_by_what_is_printed():
    assert (
        BY_ROWS.keys() | BY_PRINT.keys() | BY_CALL == CLAIMS.keys()
        and len(CLAIMS) == 69
    )


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_verdict_changes_when_the_rows_under_it_change(name):
    profile, change, expected = BY_ROWS[name]
    assert word(name, profile) != word(name, profile, change) == expected


def print_instead(name: str, monkeypatch) -> str:
    """Another printed figure for a claim; the verdict that it leads to."""
    (place, figure, expected), (number, claim) = BY_PRINT[name], CLAIMS[name]
    *steps, last = place.split(".")
    holder = {"claim": claim, **published(number)} if steps else published(number)
    for step in steps:
        holder = holder[int(step) if step.isdigit() else step]
    monkeypatch.setitem(holder, last, figure)
    return expected


@pytest.mark.parametrize("name", BY_PRINT)
def test_a_verdict_by_arithmetic_changes_when_the_printed_figures_change(
    name, monkeypatch
):
    before, expected = word(name), print_instead(name, monkeypatch)
    assert before != word(name, change=lambda r: r) == expected  # of rows judged anew


@pytest.mark.parametrize("name", BEHIND_PRINT)
def test_arithmetic_comes_before_rows(name, monkeypatch):
    assert word(name, change=BEHIND_PRINT[name]) == "contradicts itself"
    print_instead(name, monkeypatch)
    assert word(name, change=lambda r: BEHIND_PRINT[name](r)) == "holds"


@pytest.mark.parametrize("name", ["001 scaling", "004 scaling"])
def test_a_claim_about_all_lengths_fails_at_one_length_or_number_of_ranks(name):
    ranks = {"001 scaling": (2, 4), "004 scaling": (2,)}[name]
    for p in ranks:

        def uneven(r, p=p):
            r = holds(EVEN, several)(r)
            return (
                lean(r, 1.2)
                if r.point.world_size == p and r.point.seq_len <= 2048
                else r
            )

        number, claim = CLAIMS[name]
        found = claims_code.verdict(page(number, uneven), number, claim)
        assert found.word == "does not hold" and f"on {p} ranks" in found.why
    few = claims_code.verdict(page(number, fails(field(world_size=4))), number, claim)
    assert few.word == "untested" and "three numbers of ranks" in few.why


def test_the_verdict_on_a_class_follows_the_dtype_that_it_chooses(monkeypatch):
    assert word("000 flash-dtype") == "not reproduced here"
    half = SimpleNamespace(dtype=torch.float16)
    monkeypatch.setattr(compat, "RingDilatedAttentionV2Flash", lambda *_, **__: half)
    assert word("000 flash-dtype", change=lambda r: r) == "holds"


@pytest.mark.parametrize(
    "number, profile, rehearsal, keys",
    [
        (
            "000",
            "cpu",
            False,
            "fp16-slow dtype-first xformers flash-turing flash-slower throughput two-cards",
        ),
        ("000", "gtx1080", False, "flash-turing two-cards"),
        (
            "000",
            "gtx1080",
            True,
            "cache pool threshold pool-long flash-slower throughput",
        ),
        ("001", "gtx1080", True, "fastest-system speedup"),
        ("003", "gtx1080", True, "ring-causal"),
        (
            "002",
            "gtx1080",
            True,
            "slower-at-first table torch-sparse batching pattern-time faster-now",
        ),
    ],
)
def test_another_device_and_a_rehearsal_decide_no_times(
    number, profile, rehearsal, keys
):
    found = {
        c["key"]: claims_code.verdict(page(number, None, profile, rehearsal), number, c)
        for c in published(number)["claims"]
    }
    assert {found[key].word for key in keys.split()} <= {
        "not reproduced here",
        "untested",
    }
    assert not [
        k for k in keys.split() if (found[k].word == "untested") != (not found[k].ours)
    ]


@pytest.mark.parametrize(
    "name, profile, rehearsal, change, expected, why",
    [
        (
            "001 speedup",
            "cpu",
            False,
            quick_on_two,
            "not reproduced here",
            "these ranks are processes of a CPU",
        ),
        (
            "000 flash-turing",
            "t4",
            True,
            WITHOUT_FLASH,
            "untested",
            "it is about GPUs like the NVIDIA T4",
        ),
        (
            "001 fastest-system",
            "cpu",
            False,
            slower(0.5, system(CORRECT)),
            "not reproduced here",
            "not above 1×",
        ),
        (
            "001 fastest-system",
            "cpu",
            False,
            fails(system(HILBERT)),
            "untested",
            "not measured: HilbertGPUOptimized",
        ),
    ],
)
def test_what_is_missing_or_of_another_device_decides_nothing(
    name, profile, rehearsal, change, expected, why
):
    number, claim = CLAIMS[name]
    found = claims_code.verdict(page(number, change, profile, rehearsal), number, claim)
    assert found.word == expected and found.why.startswith(why)


INTERVAL = (1.07, 0.9, 1.3)


@pytest.mark.parametrize(
    "ends, low, high, noise_floor, expected",
    [
        (INTERVAL, 1.05, 1.10, 1.0, "untested"),
        ((1.07, 1.06, 1.08), 1.05, 1.10, 1.0, "holds"),
        ((1.0, 0.99, 1.01), 1.05, 1.10, 1.0, "does not hold"),
        (None, 1.05, 1.10, 1.0, "untested"),
        ((2.0, 1.9, 2.1), 1.85, 2.15, 1.1, "untested"),
        ((2.0, 1.9, 2.1), 2.2, 3.0, 1.1, "untested"),
        ((1.05, 1.02, 1.08), 1.0, math.inf, 1.1, "untested"),
        ((1.3, 1.2, 1.4), 1.0, math.inf, 1.1, "holds"),
    ],
)
def test_a_ratio_within_the_noise_of_the_run_decides_nothing(
    ends, low, high, noise_floor, expected
):
    ratio = ends and replace(stats.Ratio(*ends, 10, True), noise_floor=noise_floor)
    finding = claims.Finding({"here": ratio} if ratio else {})
    found = claims.judge(study_of([]), {"low": low, "high": high}, finding)
    assert found.word == expected
    assert (expected == "untested" and ends is not None) == found.why.startswith(
        "within noise"
    )


NOT_ALL = {"at 1,024 tokens": 1.0, "at 2,048 tokens": 1.9}


@pytest.mark.parametrize(
    "finding, claim, expected, why",
    [
        (
            claims.Finding(NOT_ALL),
            {},
            "does not hold",
            "outside 0.9 to 1.1× at 2,048 tokens",
        ),
        (
            claims.Finding(NOT_ALL),
            {"theirs": True},
            "not reproduced here",
            "outside 0.9 to 1.1× at 2,048 tokens",
        ),
        (
            claims.Finding(NOT_ALL),
            {"high": 2.0},
            "holds",
            "within 0.9 to 2× in all 2 cases",
        ),
        (
            claims.Finding(NOT_ALL),
            {"high": 2.0, "limit": True},
            "holds (upper limit)",
            "within 0.9 to 2× in all 2 cases",
        ),
        (
            claims.Finding(NOT_ALL),
            {"needs": "t4"},
            "not reproduced here",
            "it is about GPUs like the NVIDIA T4, compute capability 7.5",
        ),
        (
            claims.Finding(),
            {"needs": "t4"},
            "untested",
            "it is about GPUs like the NVIDIA T4, compute capability 7.5",
        ),
        (
            claims.Finding(NOT_ALL, contradiction="no"),
            {"needs": "t4"},
            "contradicts itself",
            "no",
        ),
        (
            claims.Finding(NOT_ALL, impossible="never", contradiction="no"),
            {},
            "impossible as printed",
            "never",
        ),
        (
            claims.Finding(NOT_ALL, missing="a row"),
            {},
            "untested",
            "not measured: a row",
        ),
        (claims.Finding(), {}, "untested", "not measured: a pair of rows that passed"),
        (claims.Finding(holds=False, why="so"), {}, "does not hold", "so"),
        (
            claims.Finding({"": stats.Ratio(2.0, 0.0, math.inf, 3, True)}),
            {"unit": "% saved"},
            "untested",
            "too few samples for an interval",
        ),
    ],
)
def test_one_rule_gives_every_verdict(finding, claim, expected, why):
    found = claims.judge(study_of([]), {"low": 0.9, "high": 1.1, **claim}, finding)
    assert (found.word, found.why) == (expected, why)


def test_a_tolerance_and_our_figure_have_the_unit_of_the_claim():
    number, claim = CLAIMS["002 batching"]
    found = claims_code.verdict(page(number, slower(2.2, way("rows"))), number, claim)
    assert found.word == "holds" and found.why == "within 45 to 64 % saved"
    saved = float(re.match(r"by batching: ([\d.]+) % saved", found.ours)[1])
    assert saved == pytest.approx(100 * (1 - 2.1 / (2.2 * 2.2)), abs=2)
    cell = claims.cells(claim, found)[2]
    assert (cell.text, cell.sub) == ("50 to 60 %", "45 to 64 % saved")


# --------------------------------------------------------------------------------------
# printed figures of one thing

COMPARED = {x.key: x for x in claims.compared()}
AGREED = {"000 rate", "001 reduction", "001 gain", "between cache"}


def scale(key: str, monkeypatch) -> None:
    """Print the lowest part so much higher that it meets the highest; much lower where
    all meet already.
    """
    number, _, name = key.partition(" ")
    entry = next(x for x in published(number)["contradictions"] if x["key"] == name)
    found = next(x for x in claims.compared() if x.key == key)
    lowest = min(range(len(found.parts)), key=lambda i: found.parts[i].high)
    factor = found.apart if found.contradict else 1 / 8
    part = entry["parts"][lowest]
    for end in {"value", "high"} & part.keys():
        first, *others = part[end]
        holder, _, last = (
            first.rpartition(".") if isinstance(first, str) else ("", "", "")
        )
        holder = holder and claims.printed(part.get("document", number), holder)
        if isinstance(holder, dict):  # a field of a row or of a claim
            monkeypatch.setitem(holder, last, holder[last] * factor)
        else:  # a figure that stands in the part itself, or one of a range
            monkeypatch.setitem(
                part, end, [(holder[int(last)] if holder else first) * factor, *others]
            )


@pytest.mark.parametrize("key", COMPARED)
def test_contradictions_follow_the_printed_figures(key, monkeypatch):
    first = COMPARED[key].contradict
    for _ in range(3):
        scale(key, monkeypatch)
        now = next(x for x in claims.compared() if x.key == key)
        if now.contradict != first:
            break
    assert now.contradict != first and now.apart != COMPARED[key].apart


def test_what_is_set_against_each_other():
    assert len(COMPARED) == 31 and len({k.split(" ")[0] for k in COMPARED}) == 6
    assert {k for k, x in COMPARED.items() if not x.contradict} == AGREED
    assert all(
        (len({p.document for p in x.parts}) > 1) == k.startswith(BETWEEN)
        for k, x in COMPARED.items()
    )
    apart = {k: x.apart for k, x in COMPARED.items()}
    assert apart["between time-8192"] == pytest.approx(4362 / 7.66)
    assert apart["003 slower"] == pytest.approx((70.5 / 3.5) / (43.3 / 32.3))
    assert apart["004 saved"] == pytest.approx(2 * 1.038 / 4 / 0.25)
    assert COMPARED["001 perfect"].parts[1].said(" %") == "92.3 to 93.5 %"


# --------------------------------------------------------------------------------------
# the data and the page


def test_the_page_of_claims_is_made_after_all_others():
    assert [*driver.REPORTS][-1] == "claims"


@pytest.mark.parametrize("number", DOCUMENTS)
def test_every_claim_says_what_is_printed_what_was_to_be_met_and_which_points_test_it(
    number,
):
    ways = (("cpu", "cpu"), ("gtx1080", "cuda"))
    suite = suites.SUITES[DOCUMENTS[number].suite]
    groups = {
        g.name
        for name, device in ways
        for g in suite(hardware.get_profile(name), device=device)
    }
    keys = [c["key"] for c in published(number)["claims"]]
    assert len(set(keys)) == len(keys)
    for claim in published(number)["claims"]:
        assert claim["text"] and claim["where"] and claim["printed"], claim["key"]
        assert (
            "points" not in claim or claim["points"] and set(claim["points"]) <= groups
        ), claim["key"]
        assert "points" in claim or {"by", "code", "contradiction"} & claim.keys(), (
            f"{claim['key']}: of which rows?"
        )
        assert {"rule", "low", "high"} & claim.keys(), claim["key"]
        assert {"rows", "code", "contradiction"} & claim.keys(), claim["key"]
        assert "limit" not in claim or {"low", "high"} - claim.keys(), (
            f"{claim['key']}: a limit has one side"
        )
        assert (
            claim.get("needs", "gtx1080") in hardware.profiles()
            or " " in claim["needs"]
        )


def test_every_printed_factor_follows_from_the_printed_rows():
    first = published("000")["rows"][0]
    for row in published("000")["rows"]:
        assert row["speedup"] == pytest.approx(first["ms"] / row["ms"], abs=0.006)
        assert row["tokens_per_s"] == pytest.approx(8192e3 / row["ms"], rel=1e-3)
    about = published("001")
    found = {(row["ranks"], row["seq_len"]): row for row in about["rows"]}
    for x in about["reductions"]:
        one, two = (found[p, x["seq_len"]]["mb"] for p in (1, 2))
        assert one / two == pytest.approx(x["factor"], rel=0.01)
    for x in about["speedups"]:
        one, two = (found[p, x["seq_len"]]["tokens_per_s"] for p in (1, 2))
        assert two / one == pytest.approx(x["factor"], rel=0.01)
    for row in about["rows"]:
        batch = row["tokens_per_s"] * row["seconds"] / row["seq_len"]
        assert batch == pytest.approx(2, rel=0.12), "what the document does not state"


@pytest.fixture(scope="module")
def whole():
    """The rows of all documents."""
    return study_of(r for number in DOCUMENTS for r in made(number))


@pytest.fixture(scope="module")
def told(whole):
    """The page of claims."""
    return Shown("claims", whole)


def test_the_ledger_judges_as_each_report_does(whole, told):
    found = {}
    for number, document in DOCUMENTS.items():
        own = whole.of(document.suite)
        assert len(own.results) == len(made(number)) and own.suite == document.suite
        found |= {
            f"{number} {claim['key']}": verdict
            for _, claim, verdict in claims_code.judged(own, number)
        }
        table = claims_code.ledger(own, number)
        assert [tables.cell(line[0]).text for line in table.rows] == [
            found[f"{number} {c['key']}"].word for c in published(number)["claims"]
        ]
        # Drawn closed: what stays open is how many claims there are of each verdict.
        closed = BeautifulSoup(table.html, "html.parser").details
        counts = map(int, re.findall(r"\d+", closed.summary.text))
        assert (
            closed.table
            and "open" not in closed.attrs
            and sum(counts) == len(table.rows)
        )
    entries = told.names["entries"]
    assert {f"{e.document} {e.claim['key']}": e.verdict for e in entries} == found
    named = {claim["code"] for _, claim in CLAIMS.values() if "code" in claim}
    assert claims_code.FINDERS.keys() == named, "no function without a claim"


def test_every_claim_stands_once_on_the_page_by_its_verdict_the_strongest_first(told):
    first, _, *others, _ = told.tables
    assert not first.folded and all(t.folded for t in others)
    verdicts = [[line[0].text for line in t.rows] for t in others]
    assert all(len({*each}) == 1 for each in verdicts) and first.columns[0] == "Verdict"
    assert [each[0] for each in verdicts] == [*claims.WORDS][2:]
    lines = [line for t in (first, *others) for line in t.rows]
    apart = {e.claim["text"]: e.verdict.apart for e in told.names["entries"]}
    assert len(lines) == 69 and sorted(x[1].text for x in lines) == sorted(apart)
    for word in [*claims.WORDS][:2]:
        shown = [apart[x[1].text] for x in first.rows if x[0].text == word]
        assert shown == sorted(shown, reverse=True) and len(shown) > 2
    assert first.rows[0][0] == tables.Cell("impossible as printed", "169× apart", "bad")
    for table in others[-2:]:
        assert table.columns[-1] == "Decided by" and all(x[-1] for x in table.rows)
    every = "".join(t.html for t in (first, *others))
    assert all(f'href="{d.report}.html"' in every for d in DOCUMENTS.values())
    assert 'class="table cards"' in every
    assert "make report GPU=t4" in every and "make report GPU=gtx1080" in every


def test_the_page_counts_every_claim_and_answers_in_five_lines(told):
    words = Counter(e.verdict.word for e in told.names["entries"])
    each = [
        f"{n} {w if n == 1 else claims.WORDS[w][1]}"
        for w in claims.WORDS
        if (n := words[w])
    ]
    lines = told.texts[0].splitlines()
    assert lines[0] == f"- **69 claims of five documents**: {', '.join(each)}."
    assert len(lines) == 5 and "1,177 ms" in lines[1] and "569×" in lines[2]
    twice = told.table("printed twice").rows
    assert len(twice) == 10 and twice[0][2] == "569×"
    assert "Compute capability" in twice[-1][0]
    assert twice[-1][2] is None, "versions are no amounts"


def test_a_rehearsal_is_decided_by_its_own_device_and_no_rows_decide_nothing():
    results = [r for number in ("000", "002") for r in made(number, "gtx1080", True)]
    found = Shown("claims", study_of(results, "gtx1080", True)).names["runs"]
    assert found["`make report GPU=gtx1080` on a machine with that device"] > 1
    assert not [x for x in found.index if "remeasure" in x]
    rest = {
        f"{n} {e.claim['key']}": e.verdict.word
        for n in DOCUMENTS
        for e in claims_code.judged(study_of([]), n)
        if e.verdict.word not in ("untested", *[*claims.WORDS][:2])
    }
    assert rest == {"002 hit-rate": "holds", "000 flash-dtype": "not reproduced here"}
