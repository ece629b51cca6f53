"""Every claim of the five documents in one ledger, judged by the rows of all suites, and what would decide the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .. import hardware
from . import claims as optimization_claims
from . import contradictions, figures
from . import study as studies
from .origins import provenance
from .published import DOCUMENTS, published
from .ring import claims as ring_claims
from .session import claims as session_claims
from .study import Study
from .tables import Cell, Table, Text, number
from .verdicts import WORDS, Verdict, span

__all__ = ["answer", "claims", "contradicting", "figure", "open_study", "provenance", "reading", "summary", "undecided"]
COLORS = dict(zip(WORDS, (figures.GREEN, figures.RED, figures.SKY, figures.PURPLE, figures.ORANGE, figures.GREY)))


@dataclass(frozen=True)
class Entry:
    """One claim of one document with its verdict."""

    document: str
    claim: dict
    verdict: Verdict

    @property
    def tolerance(self) -> str:
        """What was to be met, as it stands with the claim."""
        if "rule" in self.claim:
            return self.claim["rule"]
        return span(self.claim["low"], self.claim.get("high", float("inf")))

    @property
    def open(self) -> bool:
        """These rows do not decide it."""
        return self.verdict.kind == "untestable"


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of all suites."""
    return studies.open_study(profile, data)


def judge(study: Study, document: str) -> Iterator[Entry]:
    """The claims of a document, each judged by the rows of its own suite, as its own report does."""
    own = study.of(DOCUMENTS[document].suite)
    for claim in published(document)["claims"]:
        yield Entry(document, claim, verdict(own, document, claim))


def verdict(own: Study, document: str, claim: dict) -> Verdict:
    """One claim by the rows of its document's suite; raises KeyError for a claim whose test does not exist."""
    if document == "000":
        return optimization_claims.TESTS[claim["test"]](own, claim)
    if document == "002":
        return session_claims.TESTS[claim["test"]](own, claim)
    return ring_claims.TESTS[claim["test"]](own, claim, document)


def judged(study: Study) -> list[Entry]:
    """All claims, by document; judged once for a study."""
    return study.once("ledger", lambda: [entry for document in DOCUMENTS for entry in judge(study, document)])


def answer(study: Study) -> Text:
    """At most five lines: verdicts, the headlines, contradictions, what rows and arithmetic decide, what is open."""
    entries = judged(study)
    lines = [_count_line(entries), _headline_line(entries), _contradiction_line(entries), _open_line(study, entries)]
    return study.text(*lines, kind="answer", bullets=True)


def _counts(entries: list[Entry]) -> dict[str, int]:
    """Verdict -> number, all verdicts in their order."""
    found = Counter(e.verdict.word for e in entries)
    return {word: found[word] for word in WORDS}


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def _count_line(entries: list[Entry]) -> str:
    return f"**{len(entries)} claims** of five documents: {_listed(_counts(entries))}."


def _headline_line(entries: list[Entry]) -> str:
    said = [f"{e.claim['headline']} {e.verdict.word}" for e in entries if "headline" in e.claim]
    return f"**The headlines**: {'; '.join(said)}."


def _contradiction_line(entries: list[Entry]) -> str:
    found = [x for x in contradictions.compared() if x.contradict]
    inside = sum(x.inside for x in found)
    most = max(found, key=lambda x: x.apart, default=None)
    furthest = f"; furthest apart, {number(most.apart)}×: {most.text[0].lower()}{most.text[1:]}" if most else ""
    return (
        f"**Printed figures that contradict each other**: {inside} inside a document and {len(found) - inside} between "
        f"them, besides the claims that are inconsistent as printed{furthest}."
    )


def _open_line(study: Study, entries: list[Entry]) -> str:
    found = Counter(decider(study, e) for e in entries if e.open)
    if not found:
        return "**Not decided here**: nothing."
    what, count = found.most_common(1)[0]
    rest = sum(found.values()) - count
    more = f"; {rest} by other runs, listed below" if rest else ""
    return f"**Not decided here**: {sum(found.values())} claims. {count} of them by: {what}{more}."


def decider(study: Study, entry: Entry) -> str:
    """The run that would decide a claim which these rows leave open."""
    needs = entry.claim.get("needs", "")
    if needs == study.profile.name and not study.rehearsal:
        needs = ""  # this is such a run
    if needs in hardware.profiles():
        return _report(hardware.get_profile(needs))
    if needs:
        return needs
    if study.rehearsal:
        return _report(study.profile)
    return "more rows, or steadier ones: make report ARGS=--remeasure on a machine left alone"


def _report(profile) -> str:
    return f"make report GPU={profile.name} on a machine with that device"


def reading(study: Study) -> Text:
    """What the words mean."""
    return study.text(
        "**Published** is the printed value; under it the tolerance, which stands with the claim as data and follows "
        "from what is printed, not from these rows.",
        "**Reproduced**, **refuted**: the interval of what is measured here lies inside or outside that tolerance, or "
        "arithmetic on the printed figures decides it. **Undecided**: the rows are too few or too uncertain.",
        "**Inconsistent as printed**: the document's own figures disagree. **Confounded**: it changed several things "
        "at once. **Not testable on this profile**: this hardware cannot decide it; the last table says what can.",
        "**Here** one function is computed, equal in every variant and checked against a float64 oracle. The "
        "published code computed others, so that a refuted factor is about the claim, not about that code's clock.",
        bullets=True,
    )  # fmt: skip


def summary(study: Study) -> Table:
    """Verdicts by document."""
    entries = judged(study)
    lines = []
    for name, document in DOCUMENTS.items():
        own = [e for e in entries if e.document == name]
        title = Cell(published(name)["title"], published(name)["date"], page=document.report)
        lines.append([name, title, len(own), *(n or None for n in _counts(own).values())])
    lines.append(["all", None, len(entries), *(n or None for n in _counts(entries).values())])
    return study.table(
        "How many claims got which verdict",
        ["Document", "Title", ">Claims", *(f">{word.capitalize()}" for word in WORDS)],
        lines, marked=[len(lines) - 1], cards=True,
    )  # fmt: skip


def figure(study: Study) -> None:
    """Verdicts by document, as bars of one scale."""
    entries = judged(study)
    counts = {name: _counts([e for e in entries if e.document == name]) for name in DOCUMENTS}
    bars = {f"Document {name}, {sum(found.values())} claims": list(found.values()) for name, found in counts.items()}
    said = "; ".join(f"{name}: {_listed(found)}" for name, found in counts.items())
    fig = figures.stacked(bars, COLORS, xlabel="Claims")
    caption = f"Verdicts on {len(entries)} claims, by document."
    figures.show(fig, "claims-verdicts", caption, f"{caption} {said}.", summary(study), stamp=study.stamp)


def claims(study: Study, document: str) -> Table:
    """Every claim of a document: published, measured, judged, why, and by which rows of which report."""
    return study.table(
        f"Document {document}, claim by claim",
        ["Claim", "Published, tolerance", "Measured here", "Verdict", "Why", "Tested by"],
        [_line(study, e) for e in judged(study) if e.document == document],
        note=f"{published(document)['title']}, {published(document)['date']}, {published(document)['device']}. "
        "Tested by: groups of points, with their tables in the report behind the link.",
        cards=True,
    )


def _line(study: Study, entry: Entry) -> list[Cell | str | None]:
    claim, verdict = entry.claim, entry.verdict
    groups = ", ".join(claim["points"]) or claim.get("by", "printed figures")
    return [
        Cell(claim["text"], claim["where"]), Cell(claim["printed"], entry.tolerance.replace(";", ",")), verdict.ours,
        Cell(verdict.word, kind=verdict.kind), verdict.why, Cell(groups, page=DOCUMENTS[entry.document].report),
    ]  # fmt: skip


def contradicting(study: Study) -> Table:
    """Printed figures of one thing, set against each other."""
    lines = []
    for x in contradictions.compared():
        printed = [f"{p.said(x.unit)} ({p.document}, {p.where})" for p in x.parts]
        word = Cell("contradict", kind="inconsistent") if x.contradict else Cell("agree", kind="reproduced")
        lines.append([x.text, " / ".join(printed), f"{number(x.apart)}×", f"{x.within:g}×", word])
    return study.table(
        "Printed figures of one thing, inside and between the documents",
        ["What", "Printed", ">Apart", ">Allowed", "Verdict"],
        lines,
        note="Apart: the factor between the ends nearest to each other of the two that differ most. Allowed: what "
        "rounding, a batch of 2 or layers around the attention may explain. Computed from the printed figures alone.",
        cards=True,
    )  # fmt: skip


def undecided(study: Study) -> Table | Text:
    """What a run on which profile would decide."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in judged(study):
        if entry.open:
            found.setdefault((decider(study, entry), entry.document), []).append(entry)
    if not found:
        return study.text("These rows decide every claim.")
    runs = Counter(what for (what, _), entries in found.items() for _ in entries)
    lines = sorted(found.items(), key=lambda x: (-runs[x[0][0]], x[0]))
    return study.table(
        f"{sum(map(len, found.values()))} claims that these rows leave open",
        ["Decided by", "Document", ">Claims", "Which"],
        [[what, document, len(es), "; ".join(e.claim["text"] for e in es)] for (what, document), es in lines],
        cards=True,
    )
