"""The field on one page: attention functions and packages, each checked first and ranked by time where it is right."""

from __future__ import annotations

from ...measure import peers as packages
from .. import findings
from .. import study as studies
from ..cells import PEAK, bound, error, held, ms, peak, times
from ..findings import failures
from ..origins import provenance
from ..reading import reading
from ..rows import SHORT
from ..session.rows import percent
from ..study import Study
from ..tables import Cell, Table, Text, number
from ..trust import objection, reason, status
from . import field
from .drawn import memory_figure, time_figure
from .field import FIELD, INSIDE, RIGHT, UNRANKED, pair_cost, verdict

__all__ = [
    "answer", "checks", "failures", "limits", "memory_figure", "open_study", "over_length", "peers", "provenance",
    "ranking", "reading", "time_figure", "unranked",
]  # fmt: skip


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this page's suite."""
    return studies.open_study(profile, data, "landscape")


def answer(study: Study) -> Text:
    """At most five lines: the fastest, what a pair costs, what is wrong or absent, error, what was not measured."""
    lines = [_fastest_line(study), _pair_line(study), _wrong_line(study), findings.trust_line(study),
             findings.gaps_line(study)]  # fmt: skip
    return study.text(*lines, kind="answer", bullets=True)


def _fastest_line(study: Study) -> str:
    ns = field.lengths(study)
    first = field.standing(study, ns[-1]) if ns else []
    if not first:
        return "**Fastest**: none, no system that passed its checks was timed."
    entry, row = first[0][1:]
    low, high = (number(x * 1e3) for x in row.ci)
    share = field.density(row.point)
    other = "" if share == 1 else f"; it computes {percent(share, 2)} of the pairs, another function than dense SDPA"
    equal = [e.name for rank, e, _ in first[1:] if rank == 1]
    tied = f", not told apart from {', '.join(equal)}" if equal else ""
    return (
        f"**Fastest at {ns[-1]:,} tokens**: {entry.name}, **{number(row.median * 1e3)} ms** ({low} to {high}){tied}"
        f"{other}."
    )


def _pair_line(study: Study) -> str:
    """At the longest length at which dense attention was timed too."""
    for n in reversed(field.lengths(study)):
        found = [(x, e) for _, e, r in field.standing(study, n) if e is not FIELD[0] and (x := pair_cost(study, r))]
        if found:
            (low, cheap), (high, dear) = min(found, key=lambda x: x[0].value), max(found, key=lambda x: x[0].value)
            said = f"**{number(low.value)}×** ({cheap.name})"
            if dear is not cheap:
                said += f" to **{number(high.value)}×** ({dear.name})"
            return f"**A visible pair** costs {said} what it costs in dense SDPA, at {n:,} tokens."
    return "**A visible pair**: not compared with dense SDPA, which was not timed beside a sparse function."


def _wrong_line(study: Study) -> str:
    words = {e.name: verdict(study, e).word for e in FIELD}
    named = {word: [name for name, own in words.items() if own == word] for word in UNRANKED}
    said = [f"{word}: {', '.join(names)}" for word, names in named.items() if names]
    right = sum(word == RIGHT for word in words.values())
    rest = f"Without a rank, {'; '.join(said)}." if said else "All are ranked."
    return f"**Right** by the oracle of their own function: {right} of {len(words)} systems. {rest}"


def _memory(row) -> Cell | None:
    """Peak memory; of a system that is not seen inside, that of the process alone."""
    if row is None or row.point.system not in INSIDE:
        return peak(row)
    more = held(row)
    return Cell("not seen inside", f"{more[0]} {more[1]:.2f}" if more else "", kind="none")


def _pair_ns(row) -> str | None:
    found = field.per_pair(row)
    return None if found is None else number(found * 1e9)


def ranking(study: Study) -> Table:
    """The right systems at the longest length, the fastest first."""
    ns = field.lengths(study)
    found = field.standing(study, ns[-1]) if ns else []
    lines = [
        [rank, Cell(e.name, "a package of others" if e.peer else ""), ms(r), percent(field.density(r.point)), bound(r),
         _pair_ns(r), _memory(r), error(r), e.states]
        for rank, e, r in found
    ]  # fmt: skip
    beside = [(n, r) for n in ns if (r := field.dense(study, n)) is not None and field.per_pair(r)]
    dense = f" Dense SDPA takes {_pair_ns(beside[-1][1])} ns a pair at {beside[-1][0]:,} tokens." if beside else ""
    p = found[0][2].point if found else None
    shape = f", {p.seq_len:,} tokens, {p.heads} heads of {p.head_dim}, {SHORT[p.dtype]}, forward" if p else ""
    return study.table(
        f"Ranked by time{shape}",
        [">Rank", "System", ">Time (ms)", ">Of all pairs", ">Lower bound (ms)", ">Per pair (ns)", PEAK, ">Error",
         "A query sees"],
        lines or [["not measured", *[None] * 8]],
        marked=[i for i, (rank, *_) in enumerate(found) if rank == 1],
        note="Each row is right by the oracle of its own function, and these are different functions: the rank says "
        "which call is quickest, not which can stand in for which. Rows share a rank where this run does not tell them "
        "apart. A pair is a query and a key that it sees, counted once; LongNet's branches compute some of them "
        f"twice.{dense}",
    )  # fmt: skip


def unranked(study: Study) -> Table | Text:
    """The systems without a rank: wrong, absent, refused, with the reason of each."""
    found = [(e, v) for e in FIELD if (v := verdict(study, e)).word != RIGHT]
    if not found:
        return study.text("Every system is here and right.")
    return study.table(
        "Without a rank", ["System", "Verdict", "Why"], [[e.name, v.cell, v.why] for e, v in found],
        note="Wrong: a result is further from the oracle of the system's own stated function than is allowed, "
        "forward or in its gradients. Absent: its package is not installed here; the line installs it, and the next "
        "`make report` measures it.",
    )  # fmt: skip


def over_length(study: Study) -> Table:
    """Every length: time, what a pair costs, memory and error, and the ranks that follow."""
    lines = []
    for n in field.lengths(study):
        dense = field.dense(study, n)
        for rank, e, r in field.standing(study, n):
            lines.append([n, rank, e.name, ms(r), percent(field.density(r.point)), bound(r),
                          None if r is dense else times(study.ratio(dense, r)),
                          None if r is dense else times(pair_cost(study, r)), _memory(r), error(r)])  # fmt: skip
    return study.table(
        "Over length",
        [">Tokens", ">Rank", "System", ">Time (ms)", ">Of all pairs", ">Lower bound (ms)", ">Faster than dense",
         ">A pair over dense's", PEAK, ">Error"],
        lines or [["not measured", *[None] * 9]],
        note="Faster than dense: dense SDPA's time over this one's, at the same length and taking turns; what does not "
        "compute all pairs is another function. A pair over dense's: 1 where a visible pair costs what it costs in "
        "dense attention.",
    )  # fmt: skip


def checks(study: Study) -> Table:
    """Each system's verdict, and how far it is from the oracle: forward, with gradients, causal where that was run."""
    ways = {"Error forward": ("fwd", False), "With gradients": ("fwd+bwd", False), "Causal": ("fwd+bwd", True)}
    done = {(r.point.passes, r.point.causal) for r in study.results}
    ways = {name: way for name, way in ways.items() if way in done}
    lines = []
    for e in FIELD:
        rows = e.rows(study)
        found = [_worst([r for r in rows if (r.point.passes, r.point.causal) == way]) for way in ways.values()]
        lines.append([Cell(e.name, e.version(study)), e.states, verdict(study, e).cell, *found])
    return study.table(
        "Each system against the oracle of its own function",
        ["System", "Says that a query sees", "Verdict", *(f">{name}" for name in ways)],
        lines,
        note="The error that comes nearest to what is allowed, or the check that failed, over all lengths forward and "
        "at the shortest with gradients. The oracle is one float64 softmax for all, by the pattern that each states.",
    )  # fmt: skip


def _worst(rows: list) -> Cell:
    """The failed row, else the error that comes nearest to its bound."""
    bad = [r for r in rows if objection(r)]
    if wrong := [r for r in bad if status(r) == "incorrect"]:
        return Cell("incorrect", reason(wrong[0]), kind="bad")
    good = [r for r in rows if not objection(r)]
    if good:
        return error(max(good, key=lambda r: max(r.errors[k] / r.tolerance[k] for k in r.errors)))
    return Cell(status(bad[0]) if bad else "not checked", kind="none")


def peers(study: Study) -> Table:
    """Packages of others beside this library on their own function."""
    lines = []
    for e in (e for e in FIELD if e.peer):
        v, rows = verdict(study, e), [r for r in e.rows(study) if r.median and not objection(r)]
        row = rows[-1] if rows else None
        ours = field.same_function(study, e, row.point.seq_len) if row else None
        lines.append([Cell(e.name, e.version(study)), e.states, v.cell, row.point.seq_len if row else None,
                      ms(row) if row else None, ms(ours) if ours else None,
                      times(study.ratio(row, ours)) if row and ours else None, v.why or None])  # fmt: skip
    cpu = " On a CPU torch's kernel stands in for the one that a package calls, which needs a GPU." * (
        study.device_type == "cpu")  # fmt: skip
    return study.table(
        "Packages of others, and this library on their function",
        ["Package", "Says that a query sees", "Verdict", ">Tokens", ">Time (ms)", ">Here, the same function (ms)",
         ">Its time over ours", "Why, or how to install it"],
        lines,
        note="Here: ringlab.attention, for dense attention torch's SDPA. A package whose output is right and whose "
        f"gradients are wrong shows its forward time, without a rank.{cpu}",
    )  # fmt: skip


def limits(study: Study) -> Text:
    """What this page cannot tell."""
    versions = [f"{packages.PEERS[e.system][0]} {e.version(study)}" for e in FIELD if e.peer and e.version(study)]
    return findings.limits(
        study,
        "Which pattern learns best: the same number of keys may be worth more or less to a model.",
        "The order at other densities, batches or head sizes: a query of the sparse ones sees 270 to 450 keys.",
        "Times of causal attention and of training: gradients are checked here and not timed.",
        "How the packages run across ranks: each ran on one device.",
        *([f"Other versions of the packages than these: {', '.join(versions)}."] if versions else []),
    )
