"""The verdict on each claim of the five published documents.

A claim is a table in ``published/*.toml``. Where the document alone decides, its
``verdict`` and ``reason`` stand there. Elsewhere its ``rows`` say which measured rows
are compared, and between which bounds the result must lie.
"""

import math
from dataclasses import dataclass

from .. import hardware
from ..measure import Ratio
from ..measure.validity import shown, status
from .cells import peak_bytes, sent_bytes, timed, times
from .study import Study, best
from .tables import span

WORDS = (  # the strongest first
    "impossible as printed",
    "contradicts itself",
    "does not hold",
    "holds",
    "holds as an upper limit",
    "not reproduced here",  # this and what follows decide nothing
    "hidden by noise",
    "untested",
)
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
    """A word of ``WORDS``, why, and what was measured here."""

    word: str
    why: str
    here: str = ""


def verdict(study: Study, claim: dict) -> Verdict:
    """The verdict on a claim, by the rows of its document where it names some.

    A ratio counts only if its interval, widened by the noise floor of the run, lies
    inside or outside the tolerance.
    """
    if "verdict" in claim:
        return Verdict(claim["verdict"], claim["reason"])
    results = [(query, values(study, query)) for query in claim["rows"]]
    met = [within(query, measured) for query, measured in results]
    needs = hardware.get_profile(claim.get("needs", study.profile.name))
    if study.computed or needs.capability != study.profile.capability:
        word = "not reproduced here" if any(x for _, x in results) else "untested"
    elif False in met:
        word = "not reproduced here" if claim.get("theirs") else "does not hold"
        results = [x for x, inside in zip(results, met) if inside is False]
    elif None in met:
        complete = all(measured for _, measured in results)
        word = "hidden by noise" if complete else "untested"
    else:
        word = "holds as an upper limit" if claim.get("limit") else "holds"
    results = [(query, measured) for query, measured in results if measured]
    why = [in_words(*x) for x in results] + [claim.get("why", "")]
    here = [f"{query['what']} {amounts(query, x)}" for query, x in results]
    return Verdict(
        word, *("; ".join(filter(None, dict.fromkeys(x))) for x in (why, here))
    )


def values(study: Study, query: dict) -> list[Ratio | float]:
    """What a query comes to at each length and number of ranks that has it.

    A ratio of the quantity of two rows that agree in ``SAME``; without ``second`` the
    quantity itself. Times are ratios with intervals, all else is exact.
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
            by_shape.setdefault((a.point.seq_len, a.point.world_size), value)
    return [*by_shape.values()]


def _rows(study: Study, query: dict, side: str) -> list:
    if side not in query:
        return []
    fields = {"passes": "fwd", "causal": False, **query["points"], **query[side]}
    options = fields.pop("options", {})
    return [r for r in study.rows(**fields) if dict(r.point.options) == options]


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
    "all ranks": lambda r: (held := peak_bytes(r)) and held * r.point.world_size,
    "sent": sent_bytes,
    "tokens/s": lambda r: r.tokens_per_s if timed(r) else None,
    # Operators of one call, views not counted.
    "operators": lambda r: (
        r.memory["operator_calls"] - r.memory["view_calls"]
        if shown(r) and "operator_calls" in r.memory
        else None
    ),
    # Tokens of a row that passed its check, 0 of one that the device refuses.
    "passed": lambda r: (
        r.point.seq_len if shown(r) else 0 if status(r) == "unsupported" else None
    ),
}


def within(query: dict, measured: list[Ratio | float]) -> bool | None:
    """Whether all values lie within the tolerance; None if noise hides it, or there is
    no value.
    """
    low = query.get("low", -math.inf)
    high = query.get("high", math.inf)
    ends = [
        (x.low / x.same[1], x.high / x.same[0]) if isinstance(x, Ratio) else (x, x)
        for x in measured
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
    sizes = [x.value if isinstance(x, Ratio) else x for x in measured]
    unit = f" {query['unit']}" if "unit" in query else "×"
    return span(sizes) + unit


def in_words(query: dict, measured: list[Ratio | float]) -> str:
    """What a query compares, its values, of one ratio the interval, and what was to be
    met; rows that only had to pass say no more.

    >>> in_words({"what": "peak", "low": 1.8, "high": 2.2}, [1.31, 2.0])
    'peak: 1.31 to 2.00×, accepted 1.8 to 2.2'
    """
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
