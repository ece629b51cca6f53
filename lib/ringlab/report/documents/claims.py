"""The page of claims: what is wrong as printed first, then every other claim of the
five documents by its verdict.
"""

from __future__ import annotations

from functools import lru_cache

from ... import hardware
from .. import claims_code
from ..claims import COLUMNS, WORDS, cells, compared, counted
from ..claims_code import Entry
from ..findings import provenance
from ..published import DOCUMENTS
from ..study import Study
from ..tables import Cell, Table, Text, number

__all__ = ["answer", "claims", "contradicting", "provenance"]
PRINTED = (
    "impossible as printed",
    "contradicts itself",
)  # by arithmetic on a document alone
OPEN = ("not reproduced here", "untested")  # these rows do not decide it
AGAIN = "a steadier run: `make report ARGS=--remeasure` on a machine left alone"
ORIGINAL = "the original's code on a GTX 1080"


@lru_cache(maxsize=4)
def judged(study: Study) -> list[Entry]:
    """All claims by document, each with the verdict by the rows of its document's
    suite.
    """
    own = {name: study.of(document.suite) for name, document in DOCUMENTS.items()}
    return [
        entry for name in DOCUMENTS for entry in claims_code.judged(own[name], name)
    ]


def answer(study: Study) -> Text:
    """The verdicts in numbers, the strongest contradictions, the headlines of the
    documents, and what is open.
    """
    entries = judged(study)
    said = "; ".join(
        f"{e.claim['headline']}: {e.verdict.word}"
        for e in entries
        if "headline" in e.claim
    )
    lines = [
        f"**{len(entries)} claims of five documents**: {counted(e.verdict for e in entries)}."
    ]
    if wrong := [e for e in _sorted(entries) if e.verdict.word == PRINTED[0]]:
        first = wrong[0]
        lines.append(
            f"**Impossible**: {first.claim['text']}. In fact {first.verdict.why}."
        )
    apart = sorted(
        (x for x in compared() if x.contradict and x.factor), key=lambda x: -x.apart
    )
    far = "; ".join(
        f"{x.text[0].lower()}{x.text[1:]}, {number(x.apart)}×: {x.said}"
        for x in apart[:2]
    )
    lines.append(f"**Printed figures furthest apart**: {far}.")
    lines.append(f"**The headlines**: {said}.")
    run = _report(study.profile.name)
    if here := sum(
        e.verdict.word in OPEN and decider(study, e) == run for e in entries
    ):
        lines.append(f"**Decided by {run}**: {here} claims.")
    return Text(lines, kind="answer", bullets=True)


def _sorted(entries: list[Entry]) -> list[Entry]:
    """By verdict; within one the strongest contradictions first."""
    return sorted(
        entries, key=lambda e: ([*WORDS].index(e.verdict.word), -e.verdict.apart)
    )


def decider(study: Study, entry: Entry) -> str:
    """The run that would decide a claim which these rows leave open."""
    needs, untested = entry.claim.get("needs", ""), entry.verdict.word == "untested"
    if needs and needs not in hardware.profiles():
        return needs
    if entry.claim.get("theirs") and not untested:
        return ORIGINAL
    if study.rehearsal or needs not in ("", study.profile.name):
        return _report(needs or study.profile.name)
    return AGAIN if untested else ORIGINAL


def _report(profile: str) -> str:
    return f"`make report GPU={profile}` on a machine with that device"


def claims(study: Study, *words: str) -> Table | Text:
    """The claims with one of these verdicts, the strongest first: where each is
    printed, our figure, why, and by which rows of which report. The table is drawn
    closed but for what is wrong as printed.
    """
    found = [e for e in _sorted(judged(study)) if e.verdict.word in words]
    if not found:
        return Text([f"No claims {WORDS[words[0]][1]}."])
    columns = [*COLUMNS, "Tested by", *(["Decided by"] if words[0] in OPEN else [])]
    return Table(
        counted((e.verdict for e in found), "claim"),
        columns,
        [_line(study, e)[: len(columns)] for e in found],
        note=" ".join(f"{word.capitalize()}: {WORDS[word][2]}" for word in words),
        folded=words[0] not in PRINTED,
        cards=True,
    )


def _line(study: Study, entry: Entry) -> list:
    groups = ", ".join(entry.claim.get("points", ())) or entry.claim.get(
        "by", "printed figures"
    )
    rows = Cell(groups, page=DOCUMENTS[entry.document].report)
    return [
        *cells(entry.claim, entry.verdict, entry.document),
        rows,
        decider(study, entry),
    ]


def contradicting(study: Study) -> Table:
    """Printed figures of one thing that cannot all be right and stand with no claim,
    those furthest apart first.
    """
    told = {
        f"{e.document} {e.claim['contradiction']}"
        for e in judged(study)
        if "contradiction" in e.claim
    }
    found = sorted(
        (x for x in compared() if x.contradict and x.key not in told),
        key=lambda x: -x.apart * x.factor,
    )
    return Table(
        f"{len(found)} more quantities that are printed twice, with different figures",
        ["What", "Printed (document, place)", ">Apart"],
        [[x.text, x.said, f"{number(x.apart)}×" if x.factor else None] for x in found],
        note="Apart: the largest over the smallest figure, by the closest ends of ranges. Listed only if that is more "
        "than rounding, a batch of 2 or layers around the attention could explain.",
        cards=True,
    )
