"""The claims: what their TOML says follows from the figures that the documents print,
queries find the rows that they name, and verdicts follow these rows.
"""

import json
import math
import re
import statistics
from collections import Counter
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from reporting import Shown, lean, made, page, slower, study_of, system, way
from ringlab import compat, hardware, kernels
from ringlab.measure import Point, stats, suites
from ringlab.measure.suites import ROBUST, V2_COLLECTIVE
from ringlab.report import claims, driver, rows
from ringlab.report.published import DOCUMENTS, published

BETWEEN = "between"
DATA = {n: published(n) for n in (*DOCUMENTS, BETWEEN)}
CLAIMS = {f"{n} {c['key']}": (n, c) for n in DOCUMENTS for c in DATA[n]["claims"]}
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
# Every number in the text of each document, and the tables that hold what is printed.
PRINTED = json.loads((Path(__file__).parent / "recorded/printed.json").read_text())
TABLES = {
    "000": ["rows"],
    "001": ["rows", "reductions", "speedups"],
    "002": ["ring", "block_rows", "journey"],
    "003": ["times", "memory"],
    "004": ["rows"],
}


# --------------------------------------------------------------------------------------
# arithmetic on the documents


def leaves(value, path=()):
    """(path, number) of all numbers in nested tables and lists."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, x in items:
            yield from leaves(x, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def looked_up(document: dict, name: str):
    found = document
    for step in name.split("."):
        if isinstance(found, dict):
            found = found[step]
        elif step.isdigit():
            found = found[int(step)]
        else:
            found = next(x for x in found if step in (x.get("key"), x["name"]))
    return found


def amount(document: dict, x) -> float:
    if isinstance(x, str):
        return looked_up(document, x)
    if not isinstance(x, dict):
        return x
    if "mean" in x:
        return statistics.mean(amount(document, y) for y in x["mean"])
    return product(document, x["value"]) / product(document, x["over"])


def product(document: dict, factors) -> float:
    return math.prod(amount(document, x) for x in factors)


def ends(data: dict, number: str, figure: dict) -> tuple[float, float]:
    document = data[figure.get("document", number)]
    over = product(document, figure.get("over", ()))
    low = product(document, figure["value"]) / over
    high = product(document, figure.get("high", figure["value"])) / over
    bound = figure.get("bound")
    return (0.0 if bound == "most" else low, math.inf if bound == "least" else high)


def factor(found) -> float:
    """Between the two figures that lie furthest apart, by the closest ends of ranges."""
    return max(low for low, _ in found) / min(high for _, high in found)


def disagree(claim, found, document) -> bool:
    """Two figures of one quantity lie further apart than the claim allows."""
    return factor(found) > claim.get("within", 1.0)


def follows_policy(claim, found, document) -> bool:
    made = compat.RingDilatedAttentionV2Flash([64, 128], [1, 2], device="cpu")
    return made.dtype == torch.float32 == hardware.default_dtype(None)


def changes_two(claim, found, document) -> bool:
    first, second = (looked_up(document, x) for x in claim["changes"])
    return all(first[name] != second[name] for name in ("dtype", "optimised"))


def whole_segments(claim, found, document) -> bool:
    shards = [row["seq_len"] / document["shape"]["ranks"] for row in document["rows"]]
    return not any(n % document["shape"]["segment_lengths"][-1] for n in shards[1:])


def agree(*a) -> bool:
    return not disagree(*a)


def told(*a) -> bool:
    """Words stand against words, or against what the original's code does."""
    return True


RULES = {  # rule: (the verdict that it gives, whether it is met)
    "figures disagree": ("contradicts itself", disagree),
    "statements disagree": ("contradicts itself", told),
    "right once known": ("leaves out", agree),
    "left out": ("leaves out", told),
    "no bound is named": ("untestable as stated", told),
    "changes two things": ("mixes causes", changes_two),
    "beyond any system": ("untestable as stated", disagree),
    "below the least": ("does not hold", lambda c, x, d: x[0] < x[1]),
    "above the least": ("not reproduced here", lambda c, x, d: x[0] > x[1]),
    "figures agree": ("holds", agree),
    "its source says so": ("holds", told),
    "its record disagrees": ("does not hold", disagree),
    "explained otherwise": ("does not hold", agree),
    "by its source": ("does not hold", told),
    "the same alignment": ("does not hold", whole_segments),
    "too old": ("does not hold", lambda *a: kernels.Flash.oldest > (7, 5)),
    "our class follows the policy": ("not reproduced here", follows_policy),
    "too little is printed": ("untested", told),
}


def shown(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def faults(data: dict, number: str, claim: dict) -> list[str]:
    """What in a claim does not follow from the printed figures."""
    found = [ends(data, number, x) for x in claim.get("figures", ())]
    verdict, met = RULES[claim.get("rule", "figures disagree")]
    edges = {x for pair in found for x in pair if 0 < x < math.inf}
    said = NUMBER.findall(f"{claim.get('printed')} {claim['reason']}")
    faults = [f"{x} is not in the reason" for x in edges if shown(x) not in said]
    if claim.get("verdict", verdict) != verdict:
        faults.append("verdict")
    if not met(claim, found, data.get(number)):
        faults.append("rule")
    if "apart" in claim and claim["apart"] != pytest.approx(factor(found), rel=5e-3):
        faults.append("apart")
    return faults


def unprinted(data: dict, number: str) -> list:
    """Numbers of a document's tables and claims that its text does not print."""
    document = data[number]
    tables = {name: document[name] for name in TABLES[number]}
    text = " ".join(f"{c['text']} {c['printed']}" for c in document["claims"])
    numbers = [float(x.replace(",", "")) for x in NUMBER.findall(text)]
    return sorted({*numbers, *(x for _, x in leaves(tables))} - {*PRINTED[number]})


def wrong(data: dict) -> list:
    judged = [
        *((n, c) for n in DOCUMENTS for c in data[n]["claims"] if "verdict" in c),
        *((BETWEEN, c) for c in data[BETWEEN]["contradictions"]),
    ]
    found = [(n, c["key"], *x) for n, c in judged if (x := faults(data, n, c))]
    return found + [(n, *x) for n in DOCUMENTS if (x := unprinted(data, n))]


def test_what_arithmetic_decides_follows_from_the_printed_figures():
    assert not wrong(DATA)
    decided = [c for _, c in CLAIMS.values() if "verdict" in c]
    by_rule = Counter(RULES[c["rule"]][0] for c in decided)
    assert by_rule["contradicts itself"] == 9 and by_rule["leaves out"] == 18
    assert {*by_rule} <= {*claims.WORDS}


def places():
    for number in DOCUMENTS:
        for name in TABLES[number]:
            yield from ((number, name, *path) for path, _ in leaves(DATA[number][name]))
        for i, claim in enumerate(DATA[number]["claims"]):
            for name in {"apart", "figures"} & claim.keys():
                found = leaves({name: claim[name]})
                yield from ((number, "claims", i, *path) for path, _ in found)


@pytest.mark.parametrize("number", DOCUMENTS)
def test_a_wrong_number_is_found(number):
    for path in (x for x in places() if x[0] == number):
        data, last = deepcopy(DATA), path[-1]
        holder = data
        for step in path[:-1]:
            holder = holder[step]
        holder[last] *= 1.37
        assert wrong(data), path


def test_every_printed_factor_follows_from_the_printed_rows():
    first = DATA["000"]["rows"][0]
    for row in DATA["000"]["rows"]:
        assert row["speedup"] == pytest.approx(first["ms"] / row["ms"], abs=0.006)
        assert row["tokens_per_s"] == pytest.approx(8192e3 / row["ms"], rel=1e-3)
    about = DATA["001"]
    found = {(row["world_size"], row["seq_len"]): row for row in about["rows"]}
    for name, quantity in (("reductions", "mb"), ("speedups", "tokens_per_s")):
        for x in about[name]:
            one, two = (found[p, x["seq_len"]][quantity] for p in (1, 2))
            ratio = one / two if quantity == "mb" else two / one
            assert ratio == pytest.approx(x["factor"], rel=0.01)


# --------------------------------------------------------------------------------------
# queries

QUERIES = [(n, c, q) for n, c in CLAIMS.values() for q in c.get("rows", ())]


def test_every_claim_has_a_verdict_or_rows():
    assert len(CLAIMS) == 94 == sum(len(DATA[n]["claims"]) for n in DOCUMENTS)
    for _, claim in CLAIMS.values():
        assert claim["text"] and claim["where"] and claim["printed"]
        assert ("verdict" in claim) != ("rows" in claim), claim["key"]
        sides = [{"low", "high"} & q.keys() for q in claim.get("rows", ())]
        assert all(sides) and ("limit" not in claim or len(sides[0]) == 1)


@pytest.mark.parametrize("number, claim, query", QUERIES)
def test_a_query_finds_rows_of_its_document(number, claim, query):
    known = {f.name for f in fields(Point)} | {"group"}
    assert {*query["points"], *query["first"], *query.get("second", ())} <= known
    assert "second" in query or query["quantity"] in claims.QUANTITIES
    device = claim.get("needs", "cpu")
    study = page(number, None, device)
    assert claims.values(study, query), claim["key"]


@pytest.mark.parametrize("number, claim, query", QUERIES)
def test_a_tolerance_has_room_for_what_is_printed(number, claim, query):
    figures = [float(x.replace(",", "")) for x in NUMBER.findall(claim["printed"])]
    if not figures or not {"low", "high"} <= query.keys():
        return
    near = {1.0, figures[0] / figures[-1], *figures}
    for x in figures:  # per cent: saved, faster, a part of the whole
        near |= {1 / abs(1 - x / 100), 1 + x / 100, x / abs(100 - x)}
    assert any(query["low"] <= x <= query["high"] for x in near)


# --------------------------------------------------------------------------------------
# verdicts on altered rows


def word(name: str, profile: str = "cpu", change=None, computed: bool = False) -> str:
    number, claim = CLAIMS[name]
    return claims.verdict(page(number, change, profile, computed), claim).word


def holds(factor: float, *tests):
    return lambda r: (
        lean(r, factor)
        if "tracked_peak_bytes" in r.memory and all(t(r) for t in tests)
        else r
    )


def fails(*tests):
    return lambda r: (
        replace(r, status="oom", reason="altered") if all(t(r) for t in tests) else r
    )


def field(**wanted):
    return lambda r: all(getattr(r.point, k) == v for k, v in wanted.items())


def several(r) -> bool:
    return r.point.world_size > 1


def chatty(r):
    sent = {"bytes_sent": [3 * x for x in r.ranks.get("bytes_sent", ())]}
    all_gather = r.point.system == V2_COLLECTIVE and r.ranks
    return replace(r, ranks=r.ranks | sent) if all_gather else r


EVEN = 1.1 / 1.6  # undoes what several ranks hold more of in made-up rows
UNPOOLED = suites.FULL | {"gather": True, "pool": False}


@pytest.mark.parametrize(
    "name, profile, change, expected",
    [
        ("000 fp16-slow", "gtx1080", slower(5.5, field(dtype="float16")), "holds"),
        ("000 pool", "cpu", fails(lambda r: True), "untested"),
        (
            "000 pool",
            "cpu",
            slower(2, lambda r: rows.DEFAULTS | dict(r.point.options) == UNPOOLED),
            "holds",
        ),
        ("001 memory-reduction", "cpu", holds(0.73, several), "holds"),
        ("001 scaling", "cpu", holds(EVEN, several), "holds"),
        (
            "000 pool-long",
            "cpu",
            slower(2, field(seq_len=4096), lambda r: not r.option("pool")),
            "holds",
        ),
        ("001 million", "cpu", fails(field(seq_len=2**20)), "untested"),
        ("002 cache", "cpu", slower(1.1, way("rows", cache=False)), "holds"),
        (
            "002 torch-sparse",
            "cpu",
            slower(0.01, system(suites.TORCH_SPARSE)),
            "does not hold",
        ),
        ("002 table", "cpu", slower(2.4, system(suites.ORIGINAL)), "holds"),
        ("003 several", "cpu", fails(system(ROBUST), several), "untested"),
        ("003 rows-held", "cpu", holds(17, system(ROBUST)), "does not hold"),
        ("003 volume", "cpu", chatty, "holds"),
        ("004 one-gb", "cpu", holds(100), "not reproduced here"),
    ],
)
def test_a_verdict_changes_when_the_rows_under_it_change(
    name, profile, change, expected
):
    assert word(name, profile) != word(name, profile, change) == expected


def test_a_claim_about_growth_is_judged_from_the_shortest_to_the_longest():
    """At the lengths and on the numbers of ranks that its document has."""
    even = holds(EVEN, several)
    for altered, expected in (
        (field(world_size=4), "holds"),
        (field(seq_len=16384), "does not hold"),
    ):
        change = lambda r, x=altered: holds(1.3, x)(even(r))  # noqa: E731
        assert word("001 scaling", change=change) == expected


def test_computed_rows_decide_by_memory_and_never_by_times():
    for name, (_, claim) in CLAIMS.items():
        asked = {q.get("quantity", "time") for q in claim.get("rows", ())}
        if asked and claims.BOUND not in asked:
            found = word(name, "gtx1080", computed=True)
            assert (found == "untested") == bool(asked & {"time", "passed"}), name
    assert word("000 pool") == "hidden by noise", "of a measured one"
    assert word("000 fp16-slow", "t4") == "untested", "another GPU"


@pytest.mark.parametrize("name, ms", [("throughput", 7.66), ("flash-slower", 201.02)])
def test_a_printed_time_below_the_bound_is_impossible(name, ms):
    for bound, expected in ((0.9, "untested"), (1.1, "impossible as printed")):
        change = lambda r, s=bound * ms / 1e3: replace(r, bound_seconds=s)  # noqa: E731
        assert word(f"000 {name}", "gtx1080", change, True) == expected


@pytest.mark.parametrize("lost", [None, fails(lambda r: True)])
def test_no_claim_is_without_a_reason(lost):
    for number, claim in CLAIMS.values():
        for study in (page(number, lost), page(number, lost, "gtx1080", True)):
            found = claims.verdict(study, claim)
            assert found.why and found.word in claims.WORDS


@pytest.mark.parametrize(
    "value, low, high, noise_floor, expected",
    [
        ((1.07, 0.9, 1.3), 1.05, 1.10, 1.0, None),
        ((1.07, 1.06, 1.08), 1.05, 1.10, 1.0, True),
        ((1.0, 0.99, 1.01), 1.05, 1.10, 1.0, False),
        ((2.0, 1.9, 2.1), 1.85, 2.15, 1.1, None),
        ((2.0, 1.9, 2.1), 2.2, 3.0, 1.1, None),
        ((1.05, 1.02, 1.08), 1.0, math.inf, 1.1, None),
        ((1.3, 1.2, 1.4), 1.0, math.inf, 1.1, True),
        ((2.0, 0.0, math.inf), 1.05, 1.10, 1.0, None),
    ],
)
def test_a_ratio_within_the_noise_of_the_run_decides_nothing(
    value, low, high, noise_floor, expected
):
    same = (1 / noise_floor, noise_floor)
    ratio = stats.Ratio(*value, 10, True, same=same)
    assert claims.within({"low": low, "high": high}, [ratio]) is expected


# --------------------------------------------------------------------------------------
# the page


@pytest.mark.parametrize("profile, computed", [("cpu", False), ("gtx1080", True)])
def test_the_page_has_every_claim_in_the_order_of_its_document(profile, computed):
    assert [*driver.REPORTS][-1] == "claims", "it is made after all others"
    made_rows = (r for n in DOCUMENTS for r in made(n, profile, computed))
    told = Shown("claims", study_of(made_rows, profile, computed))
    legend, *judged = told.tables[:6]
    assert sum(count for _, count, _ in legend.rows) == 94
    words = [word.text for word, *_ in legend.rows]
    lines = [line for table in judged for line in table.rows]
    assert {line[0].text for line in lines} == {*words} and all(
        x[2] for x in legend.rows
    )
    assert words == [x for x in claims.WORDS if x in words], "the strongest first"
    placed = [(of.page, of.text, *cells) for _, *cells, of, why in lines if why]
    assert placed == [
        (DOCUMENTS[n].report, *(c[x] for x in ("where", "text", "printed")))
        for n in DOCUMENTS
        for c in DATA[n]["claims"]
    ]
    assert "10.5×" in {line[0].sub for line in lines}
    for number, table in zip(DOCUMENTS, judged):
        assert f"({DATA[number]['url']}?plain=1)" in table.note
