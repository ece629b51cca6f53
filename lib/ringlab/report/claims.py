"""The verdict on each claim of the five published documents.

A claim is a table in ``published/*.toml``. Where the document alone decides, its
``verdict`` and ``reason`` stand there. Elsewhere its ``rows`` say which rows are
compared, and between which bounds the result must lie. Computed rows decide by their
memory and by their rooflines, never by a time.
"""

import math
from dataclasses import dataclass, replace

from .. import hardware
from ..measure import Ratio
from ..measure.validity import computed, shown, status, why_not_quotable
from .cells import peak_bytes, sent_bytes, timed, times
from .study import Study, best
from .tables import span

# The verdicts, the strongest first, and what each means; the last three decide nothing.
WORDS = {
    "impossible as printed": "arithmetic with what is printed rules it out",
    "contradicts itself": "two statements of the document cannot both hold",
    "does not hold": "its own records or sources, or a test at every length, say otherwise",
    "leaves out": "right once a condition is known that is not printed",
    "mixes causes": "one factor for two changes",
    "untestable as stated": "no system could pass or fail",
    "holds": "tested here, or shown by its records or sources",
    "holds as an upper limit": "less than the printed figure was found",
    "not reproduced here": "other code or another device gives another figure",
    "hidden by noise": "the difference is smaller than the noise",
    "untested": "nothing here decides it",
}
BOUND = "least ms"  # the quantity that a printed time cannot lie below
SHAPE = ("batch", "seq_len", "world_size")  # a query has one value for each
# What a pair of rows shares, unless a query names it for one of the two.
SAME = (
    "system",
    "seq_len",
    "dtype",
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
    "passes",
    "causal",
    "world_size",
)


@dataclass(frozen=True)
class Verdict:
    """A word of ``WORDS``, and why."""

    word: str
    why: str


def verdict(study: Study, claim: dict) -> Verdict:
    """The verdict on a claim, by the rows of its document where it names some.

    A ratio counts only if its interval, widened by the noise floor of the run, lies
    inside or outside the tolerance.
    """
    if "verdict" in claim:
        return Verdict(claim["verdict"], claim["reason"])
    needs = hardware.get_profile(claim.get("needs", study.profile.name))
    here = needs.capability == study.profile.capability
    queries = claim["rows"] if here else []
    results = [(query, values(study, query)) for query in queries]
    met = [within(*result) for result in results]
    failed = [result for result, inside in zip(results, met) if inside is False]
    if any(query.get("quantity") == BOUND for query, _ in failed):
        word = "impossible as printed"
    elif failed:
        word = "not reproduced here" if claim.get("theirs") else "does not hold"
    elif not here or not all(measured for _, measured in results):
        word = "untested"
    elif None in met:
        word = "hidden by noise"
    else:
        word = "holds as an upper limit" if claim.get("limit") else "holds"
    why = [in_words(*result) for result in failed or results]
    used = (row for q, found in results if found for row in _rows(study, q, "first"))
    why += ["computed"] * any(map(computed, used))
    why += [] if here else [f"to be measured on {needs.title}"]
    return Verdict(
        word, "; ".join(filter(None, [*dict.fromkeys(why), claim.get("why")]))
    )


def values(study: Study, query: dict) -> list[Ratio | float]:
    """What a query comes to at each batch, length and number of ranks that has it.

    A ratio of the quantity of two rows that agree in ``SAME``; without ``second`` the
    quantity itself. Times are ratios with intervals, all else is exact. With ``ends``,
    a name of ``SHAPE``, the value where that is largest over the one where it is least.
    """
    first, second = (_rows(study, query, side) for side in ("first", "second"))
    named = query["first"].keys() | query.get("second", {}).keys()
    same = [name for name in SAME if name not in named]
    by_shape = {}
    for a in sorted(first, key=lambda r: r.median or math.inf):
        candidates = [
            b
            for b in second
            if all(getattr(a.point, name) == getattr(b.point, name) for name in same)
        ]
        value = _value(study, query, a, best(candidates))
        if value is not None:
            shape = tuple(getattr(a.point, name) for name in SHAPE)
            by_shape.setdefault(shape, value)
    if "ends" not in query:
        return [*by_shape.values()]
    place = SHAPE.index(query["ends"])
    growing = {}
    for shape in sorted(by_shape):
        rest = shape[:place] + shape[place + 1 :]
        growing.setdefault(rest, []).append(by_shape[shape])
    return [_over(each[-1], each[0]) for each in growing.values() if len(each) > 1]


def _over(last: Ratio | float, first: Ratio | float) -> Ratio | float:
    if not isinstance(last, Ratio):
        return last / first
    return replace(
        last,
        value=last.value / first.value,
        low=last.low / first.high,
        high=last.high / first.low if first.low else math.inf,
        same=tuple(each * each for each in last.same),
    )


def _rows(study: Study, query: dict, side: str) -> list:
    if side not in query:
        return []
    return study.same_calls(**query["points"] | query[side])


def _value(study: Study, query: dict, a, b) -> Ratio | float | None:
    name = query.get("quantity", "time")
    if name == "time":
        return study.ratio(a, b) if timed(a) and timed(b) else None
    amount = QUANTITIES[name](a)
    if "second" not in query:
        return amount
    over = b and QUANTITIES[name](b)
    return amount / over if amount and over else None


QUANTITIES = {  # besides the time
    "peak": peak_bytes,
    "peak in GB": lambda r: (held := peak_bytes(r)) and held / 1e9,
    "a token": lambda r: (held := peak_bytes(r)) and held / r.point.seq_len,
    "all ranks": lambda r: (held := peak_bytes(r)) and held * r.point.world_size,
    "sent": sent_bytes,
    "tokens/s": lambda r: r.tokens_per_s if timed(r) else None,
    # Tokens of a row that ran and passed its check, 0 of one that the device refuses.
    "passed": lambda r: (
        (0 if status(r) == "unsupported" else None)
        if why_not_quotable(r)
        else r.point.seq_len
    ),
    BOUND: lambda r: r.bound_seconds * 1e3 if shown(r) and r.bound_seconds else None,
}


def within(query: dict, measured: list[Ratio | float]) -> bool | None:
    """Whether all values lie within the tolerance; None if noise hides it, or there is
    no value.
    """
    low = query.get("low", -math.inf)
    high = query.get("high", math.inf)
    ends = [
        (each.low / each.same[1], each.high / each.same[0])
        if isinstance(each, Ratio)
        else (each, each)
        for each in measured
    ]
    if any(most < low or least > high for least, most in ends):
        return False
    inside = all(low <= least and most <= high for least, most in ends)
    return True if ends and inside else None


def amounts(query: dict, measured: list[Ratio | float]) -> str:
    """The values of a query in its unit, of several the ends.

    >>> amounts({}, [1.31, 2.0, 1.5]), amounts({"unit": "GB"}, [0.0674])
    ('1.31 to 2.00×', '0.0674 GB')
    """
    sizes = [each.value if isinstance(each, Ratio) else each for each in measured]
    unit = f" {query['unit']}" if "unit" in query else "×"
    return span(sizes) + unit


def in_words(query: dict, measured: list[Ratio | float]) -> str:
    """What a query compares, its values, of one ratio the interval, and what was to be
    met; rows that only had to pass say no more, nor does what has no row.

    >>> in_words({"what": "peak", "low": 1.8, "high": 2.2}, [1.31, 2.0])
    'peak: 1.31 to 2.00×, accepted 1.8 to 2.2'
    """
    if not measured:
        return f"{query['what']}: not measured here"
    text = amounts(query, measured)
    if len(measured) == 1 and isinstance(measured[0], Ratio):
        text = times(measured[0]).plain
    if query.get("quantity") == "passed":
        accepted = ""
    elif "low" not in query:
        accepted = f", accepted at most {query['high']:,}"
    elif "high" not in query:
        accepted = f", accepted at least {query['low']:,}"
    else:
        accepted = f", accepted {query['low']:,} to {query['high']:,}"
    return f"{query['what']}: {text}{accepted}"
