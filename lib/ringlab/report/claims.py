"""Claims of the five published documents: what is known about each, and the one rule
that gives the verdict.

A claim is a table in ``published/*.toml``. It names the rows that test it
(``[claims.rows]``), or a function of ``claims_code``. Either gives a ``Finding``, and
``judge`` turns the finding into one of the words in ``WORDS``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .. import hardware
from ..measure import Ratio
from ..measure.validity import objection, status
from .cells import beyond, peak_bytes, per_token, sent_bytes, timed
from .published import BETWEEN, DOCUMENTS, SIZES, published
from .study import Study, best
from .tables import Cell, interval, number

# word: (class of its style, the word for several claims, meaning)
WORDS = {
    "impossible as printed": (
        "bad",
        "are impossible as printed",
        "Below what the stated work or tensors need.",
    ),
    "contradicts itself": (
        "odd",
        "contradict themselves",
        "Its printed figures or own records disagree, or one factor changes two things.",
    ),
    "does not hold": (
        "bad",
        "do not hold",
        "A property that an implementation which passes its checks does not have.",
    ),
    "holds": (
        "good",
        "hold",
        "Tested here at every length and number of ranks that was measured.",
    ),
    "holds (upper limit)": (
        "good",
        "hold as an upper limit",
        "A one-sided limit is met; the exact figure is not tested.",
    ),
    "not reproduced here": (
        "untestable",
        "are not reproduced here",
        "A time or size of other code or another device.",
    ),
    "untested": (
        "untestable",
        "are untested",
        "No row decides it, or the difference is within noise.",
    ),
}
NO_PAIR = "a pair of rows that passed"
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
UNITS = {  # of a ratio, which is 0 at an end that is not known; others as they are
    "% saved": lambda x: 100 * (1 - 1 / x) if x else -math.inf,
    "% faster": lambda x: 100 * (x - 1),
}


@dataclass(frozen=True)
class Verdict:
    """A word of ``WORDS``, what was measured here, and why.

    ``apart`` is the factor between two printed figures that disagree, or between a
    printed figure and its limit.
    """

    word: str
    ours: str | None
    why: str
    apart: float = 1.0

    @property
    def kind(self) -> str:
        return WORDS[self.word][0]


@dataclass(frozen=True)
class Finding:
    """What is known about a claim, without a verdict.

    Args:
        values: what was measured, by where ("at 4,096 tokens"). Ratios have intervals, sizes and counts are exact.
        what: what the values are.
        ours: what was measured, in words; by default ``what`` and ``values``.
        holds: the result where it is not a number that lies within the claim's tolerance.
        why: what a reader should know besides, by default what the claim says; without values and ``holds``, why
            nothing is decided.
        impossible: why the printed figure cannot be.
        contradiction: how the document's own figures disagree.
        apart: by which factor they disagree, or the printed figure is impossible.
        elsewhere: why our rows are not of what the claim is about, by default what the claim says.
        missing: what is not measured.
        timed: the rows are compared by time.
    """

    values: Mapping[str, Ratio | float] = field(default_factory=dict)
    what: str = ""
    ours: str | None = None
    holds: bool | None = None
    why: str = ""
    impossible: str = ""
    contradiction: str = ""
    apart: float = 1.0
    elsewhere: str = ""
    missing: str = ""
    timed: bool = False


def judge(study: Study, claim: dict, finding: Finding) -> Verdict:
    """The verdict on a claim. Arithmetic on the document comes first, then whether our
    rows are of the same thing.

    A ratio counts only if its interval, widened by the noise floor of the run, lies
    inside or outside the tolerance.
    """
    values, unit, besides = (
        finding.values,
        claim.get("unit", "×"),
        finding.why or claim.get("why", ""),
    )
    ours = finding.ours or in_words(values, unit, finding.what)
    if study.rehearsal and unit == "tokens/s":
        ours = None  # a rate of this CPU, which says nothing of the GPU's
    if finding.impossible:
        return Verdict("impossible as printed", ours, finding.impossible, finding.apart)
    if finding.contradiction:
        return Verdict(
            "contradicts itself",
            ours,
            _sentence(finding.contradiction, besides),
            finding.apart,
        )
    if why := _elsewhere(study, claim, finding):
        return Verdict(
            "not reproduced here" if ours else "untested", ours, _sentence(why, besides)
        )
    if finding.missing or not values and finding.holds is None:
        missing = finding.missing or ("" if besides else NO_PAIR)
        return Verdict(
            "untested", ours, _sentence(missing and f"not measured: {missing}", besides)
        )
    met, why = (finding.holds, "") if finding.holds is not None else _met(claim, values)
    if met is None:
        word = "untested"
    elif met:
        word = "holds (upper limit)" if claim.get("limit") else "holds"
    else:
        word = "not reproduced here" if claim.get("theirs") else "does not hold"
    return Verdict(word, ours, _sentence(why, besides))


def _elsewhere(study: Study, claim: dict, finding: Finding) -> str:
    """Why our rows are not of the device that the claim is about."""
    needs = claim.get("needs", "")
    if needs in hardware.profiles():
        about = hardware.get_profile(needs)
        if study.rehearsal or study.profile.capability != about.capability:
            return f"it is about GPUs like the {about.title}, compute capability {'.'.join(map(str, about.capability))}"
    if study.rehearsal and finding.timed:
        return "these are times of a CPU, not of the GPU"
    if claim.get("gpus") and study.device_type == "cpu":
        return "these ranks are processes of a CPU"
    return finding.elsewhere or claim.get("elsewhere", "")


def _met(claim: dict, values: Mapping[str, Ratio | float]) -> tuple[bool | None, str]:
    """Whether all values lie within the tolerance, None if noise hides it; and why."""
    low, high, unit = (
        claim.get("low", -math.inf),
        claim.get("high", math.inf),
        claim.get("unit", "×"),
    )
    view = UNITS.get(unit, lambda x: x)
    outside, unsure = [], []
    for where, x in values.items():
        least, most = (
            (x.low / x.noise_floor, x.high * x.noise_floor)
            if isinstance(x, Ratio)
            else (x, x)
        )
        if view(most) < low or view(least) > high:
            outside.append(where)
        elif not low <= view(least) <= view(most) <= high:
            unsure.append(where)
    asked, one_sided = span(low, high, unit), math.inf in (-low, high)
    if outside:
        return (
            False,
            f"{'not' if one_sided else 'outside'} {asked}{_at(outside, values)}",
        )
    if unsure:
        floor = max(values[where].noise_floor for where in unsure)
        if any(values[where].high == math.inf for where in unsure):
            return None, f"too few samples for an interval{_at(unsure, values)}"
        by = f", widened by the noise floor of {number(floor)}×," if floor > 1 else ""
        edge = f"includes {low:g}" if one_sided else f"reaches over an edge of {asked}"
        return None, f"within noise: its interval{by} {edge}{_at(unsure, values)}"
    return (
        True,
        f"{'' if one_sided else 'within '}{asked}{f' in all {len(values)} cases' if len(values) > 1 else ''}",
    )


def _at(some: list[str], values: Mapping) -> str:
    return (
        f" {some[0]}{f' and {len(some) - 1} more' if len(some) > 1 else ''}"
        if len(some) < len(values)
        else ""
    )


def _sentence(*parts: str) -> str:
    return "; ".join(x for x in parts if x)


def span(low: float, high: float, unit: str = "×") -> str:
    """A tolerance in words.

    >>> span(5.0, 10.0, "% faster"), span(1.0, float("inf")), span(-float("inf"), 925, "MB")
    ('5 to 10 % faster', 'above 1×', 'at most 925 MB')
    """
    tail = unit if unit == "×" else f" {unit}" if unit else ""
    if high == math.inf:
        return f"above {low:,g}{tail}"
    return (
        f"at most {high:,g}{tail}"
        if low == -math.inf
        else f"{low:,g} to {high:,g}{tail}"
    )


def in_words(
    values: Mapping[str, Ratio | float], unit: str = "×", what: str = ""
) -> str | None:
    """Measured values with their intervals and where they were measured; of more than
    three the ends.

    >>> in_words({"at 1,024 tokens": 1.0, "at 2,048 tokens": 1.88}, what="peak on 1 rank over 2")
    'peak on 1 rank over 2: 1.00× at 1,024 tokens, 1.88× at 2,048 tokens'
    """
    shown = list(values.items())
    if len(shown) > 3:
        shown = [
            f(shown, key=lambda x: getattr(x[1], "value", x[1])) for f in (min, max)
        ]
    joint = " to " if len(shown) < len(values) else ", "
    said = joint.join(f"{_value(x, unit)} {where}".strip() for where, x in shown)
    if len(values) > 1 and len(same := {_value(x, unit) for x in values.values()}) == 1:
        said = f"{same.pop()} in all {len(values)} cases"
    return f"{what}: {said}" if said and what else said or None


def _value(x: Ratio | float, unit: str) -> str:
    view, tail = (
        UNITS.get(unit, lambda x: x),
        unit if unit == "×" else f" {unit}" if unit else "",
    )
    if isinstance(x, Ratio):
        low, high = x.ci if x.high == math.inf else map(view, x.ci)
        doubt = "" if beyond(x) or x.high == math.inf else "; within noise"
        return f"{number(view(x.value))}{tail} ({interval(low, high)}{doubt})"
    return f"{number(view(x))}{tail}"


# --------------------------------------------------------------------------------------
# rows that a claim names


def by_rows(study: Study, claim: dict) -> Finding:
    """What the rows that a claim names come to, of the groups in its ``points``: one
    over another, or by themselves.
    """
    rows = ({"group": claim["points"]} if "points" in claim else {}) | claim["rows"]
    quantity, printed, unit = (
        rows.get("quantity", "time"),
        rows.get("printed"),
        SIZES.get(claim.get("unit"), 1),
    )
    values, counts = {}, set()
    for where, (a, b) in pairs(study, rows).items():
        if quantity == "time":
            if "second" not in rows:
                raise KeyError(
                    f"the rows of claim {claim['key']} have no second: a time is shown over another"
                )
            x = study.ratio(a, b) if timed(a) and timed(b) else None
        else:
            first, second = map(QUANTITIES[quantity], (a, b))
            x = first and second and first / (second if "second" in rows else unit)
        if printed and x:
            x = x / printed[n] if (n := str(a.point.seq_len)) in printed else None
        if x:
            values[where] = x
            counts.add(a.point.world_size)
    systems = (rows | rows["first"]).get("system")
    absent = (
        [s for s in systems if not any(_name(s) in w for w in values)]
        if isinstance(systems, list)
        else []
    )
    one_fails = (
        values and _met(claim, values)[0] is False
    )  # then the others decide nothing
    failed = filter(objection, study.rows(system=absent, group=rows.get("group", [])))
    spoilt = {r.point.system: f" ({status(r)})" for r in failed}
    missing = (
        " and ".join(_name(s) + spoilt.get(s, "") for s in absent)
        if values and not one_fails
        else ""
    )
    if len(counts) < rows.get("counts", 0):
        missing = "three numbers of ranks or more, which a law needs"
    return Finding(
        values,
        rows.get("what", ""),
        missing=missing,
        timed=quantity in ("time", "tokens/s"),
    )


def pairs(study: Study, rows: dict) -> dict[str, tuple]:
    """Where -> (first, second): rows that agree in all of ``SAME`` that the claim does
    not set.

    ``rows["first"]`` and ``rows["second"]`` hold the fields that differ, ``rows``
    itself those of both. A list means any of its values. Options must be just those
    named. By default rows are forward and not causal. The first has ``rows["longer"]``
    times the tokens of the second, by default as many. Without a second it stands by
    itself.
    """
    common = {k: v for k, v in rows.items() if k not in ABOUT_ROWS}
    first, second = (
        select(study, **common | rows.get(k, {})) for k in ("first", "second")
    )
    set_apart = rows["first"] | rows.get("second", {})
    same = [name for name in SAME if name not in set_apart]
    several = common | rows["first"]
    found: dict[str, list[tuple]] = {}

    def key(row, longer: int = 1) -> list:
        return [
            getattr(row.point, name) * (longer if name == "seq_len" else 1)
            for name in same
        ]

    for a in sorted(first, key=lambda r: (r.point.seq_len, r.point.world_size)):
        b = (
            best([r for r in second if key(r, rows.get("longer", 1)) == key(a)])
            if "second" in rows
            else a
        )
        if b is not None:
            name = (
                f"for {_name(a.point.system)} "
                if isinstance(several.get("system"), list)
                else ""
            )
            counted = "world_size" in same or isinstance(
                several.get("world_size"), list
            )
            ranks = (
                f" on {a.point.world_size} ranks"
                if counted and a.point.world_size > 1
                else ""
            )
            found.setdefault(f"{name}at {a.point.seq_len:,} tokens{ranks}", []).append(
                (a, b)
            )
    return {
        where: next(x for x in each if x[0] is best([a for a, _ in each]))
        for where, each in found.items()
    }


def select(study: Study, **wanted) -> list:
    """Rows by fields of their points, as ``Study.rows``; their options must be exactly
    these.
    """
    wanted = {"passes": "fwd", "causal": False, "options": {}, **wanted}
    options = wanted.pop("options")
    return [r for r in study.rows(**wanted) if dict(r.point.options) == options]


QUANTITIES = {
    "peak": peak_bytes,
    "per token": per_token,
    "sent": sent_bytes,
    "all ranks": lambda r: (held := peak_bytes(r)) and held * r.point.world_size,
    # The scores of all heads in fp32 over the peak.
    "scores": lambda r: (
        (held := peak_bytes(r)) and 4 * r.point.heads * r.point.seq_len**2 / held
    ),
    "tokens/s": lambda r: r.tokens_per_s if timed(r) else None,
}
ABOUT_ROWS = (
    "first",
    "second",
    "what",
    "quantity",
    "printed",
    "longer",
    "counts",
)  # no fields of a point


def _name(system: str) -> str:
    return system.removeprefix("RingDilatedAttention")


# --------------------------------------------------------------------------------------
# printed figures of one thing, inside a document and between documents


@dataclass(frozen=True)
class Part:
    """What one place prints, as a range: one figure has equal ends, "at most" and "at
    least" an open one.
    """

    document: str
    where: str
    low: float
    high: float

    def said(self, unit: str) -> str:
        if self.low == 0:
            return f"at most {_figure(self.high)}{unit}"
        if self.high == math.inf:
            return f"at least {_figure(self.low)}{unit}"
        low, high = _figure(self.low), _figure(self.high)
        return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


@dataclass(frozen=True)
class Compared:
    """Printed figures of one thing. They contradict each other where two lie further
    apart than ``within``.

    ``factor`` is false for figures that are no amounts, as versions are.
    """

    key: str
    text: str
    parts: tuple[Part, ...]
    unit: str = "×"
    within: float = 1.0
    factor: bool = True

    @property
    def apart(self) -> float:
        """The factor between the two that lie furthest apart; 1 where all ranges meet."""
        return max(
            1.0, max(p.low for p in self.parts) / min(p.high for p in self.parts)
        )

    @property
    def contradict(self) -> bool:
        return self.apart > self.within

    @property
    def said(self) -> str:
        """The figures with their places; those of one document without its number."""
        one = len({p.document for p in self.parts}) == 1
        return ", ".join(
            f"{p.said(self.unit)} ({p.where if one else f'{p.document}, {p.where}'})"
            for p in self.parts
        )


def compared() -> Iterator[Compared]:
    """All printed figures that are compared, by document, those between documents last."""
    for name in (*DOCUMENTS, BETWEEN):
        for x in published(name)["contradictions"]:
            parts = tuple(_part(p, p.get("document", name)) for p in x["parts"])
            yield Compared(**x | {"key": f"{name} {x['key']}", "parts": parts})


def _part(part: dict, document: str) -> Part:
    under = _product(document, part.get("over", ()))
    low = _product(document, part["value"]) / under
    high = _product(document, part["high"]) / under if "high" in part else low
    bound = part.get("bound")
    return Part(
        document,
        part["where"],
        0.0 if bound == "most" else low,
        math.inf if bound == "least" else high,
    )


def _product(document: str, factors) -> float:
    return math.prod(printed(document, x) if isinstance(x, str) else x for x in factors)


def printed(document: str, name: str) -> float:
    """A figure of a document by its name: keys, keys of entries, and places in lists.

    >>> printed("000", "rows.original.ms"), printed("002", "journey.cache.0"), printed("000", "claims.fp16-slow.high")
    (136.52, 10, 10.0)
    """
    found = published(document)
    for step in name.split("."):
        if isinstance(found, dict):
            found = found[step]
        elif step.isdigit():
            found = found[int(step)]
        else:
            found = next(x for x in found if x["key"] == step)
    return found


# --------------------------------------------------------------------------------------
# a claim as a line of a table

COLUMNS = ["Verdict", "Claim", "Printed, tolerance", "Measured here", "Why"]


def cells(claim: dict, verdict: Verdict, document: str = "") -> list[Cell | str | None]:
    """A claim with its verdict, for the columns in ``COLUMNS``; of a named document also
    which rows of which page test it.
    """
    low, high = claim.get("low", -math.inf), claim.get("high", math.inf)
    tolerance = claim.get("rule") or span(low, high, claim.get("unit", "×"))
    tolerance = (
        "" if verdict.kind == "odd" else tolerance.replace(";", ",")
    )  # rows decide nothing there
    apart = f"{number(verdict.apart)}× apart" if verdict.apart > 1 else ""
    where, tested = claim["where"], []
    if document:
        where = f"{document}, {where}"
        rows = ", ".join(claim.get("points", [claim.get("by", "printed figures")]))
        tested = [Cell(rows, page=DOCUMENTS[document].report)]
    return [
        Cell(verdict.word, apart, verdict.kind),
        Cell(claim["text"], where.replace(";", ",")),
        Cell(claim["printed"], tolerance),
        verdict.ours,
        verdict.why,
        *tested,
    ]


def counted(verdicts: Iterable[Verdict], what: str = "") -> str:
    """How many have which verdict, in the order of ``WORDS``; ``what`` one of them is
    goes after the first number.

    >>> held, open_ = Verdict("holds", None, ""), Verdict("untested", None, "")
    >>> counted([held, open_, held], "claim"), counted([held, open_], "claim")
    ('2 claims hold, 1 untested', '1 claim holds, 1 untested')
    """
    found = Counter(verdict.word for verdict in verdicts)
    first, *others = [
        (found[w], w if found[w] == 1 else WORDS[w][1]) for w in WORDS if found[w]
    ]
    noun = f"{what}{'s' * (first[0] > 1)} " if what else ""
    return ", ".join(
        [f"{first[0]} {noun}{first[1]}", *(f"{count} {said}" for count, said in others)]
    )
