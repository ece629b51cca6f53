"""The field on one page: attention functions and packages, each checked first and ranked by time where it is right."""

from __future__ import annotations

from .. import columns, curves, figures, findings
from .. import study as studies
from ..columns import ROOFLINE, TIME, TOKENS, Column, table, times
from ..findings import failures
from ..origins import provenance
from ..peers import peers
from ..reading import reading
from ..rows import SHORT
from ..session.rows import percent
from ..study import Study, pattern_of
from ..tables import Cell, Table, Text, number
from ..trust import objection, reason, status
from . import field
from .field import FIELD, RIGHT, UNRANKED, pair_cost, verdict

__all__ = [
    "answer", "checks", "failures", "limits", "open_study", "peers", "provenance", "ranking", "reading", "time_figure",
    "unranked",
]  # fmt: skip
COLORS = dict(zip((e.name for e in FIELD), (
    figures.GREY, figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE, figures.RED,
)))  # fmt: skip


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this page's suite."""
    return studies.open_study(profile, data, "landscape")


def answer(study: Study) -> Text:
    """At most five lines: the fastest, what a pair costs, what is wrong, error, what was not measured."""
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
    other = "" if share == 1 else f" It computes {percent(share, 2)} of the pairs, another function than dense SDPA."
    equal = [e.name for rank, e, _ in first[1:] if rank == 1]
    tied = f", within noise of {', '.join(equal)}" if equal else ""
    time = f"**{number(row.median * 1e3)} ms** ({low} to {high})"
    return f"**Fastest at {ns[-1]:,} tokens**: {entry.name}, {time}{tied}.{other}"


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
    said = "; ".join(f"{word}: {', '.join(names)}" for word, names in named.items() if names)
    right = sum(word == RIGHT for word in words.values())
    here = right + len(named["wrong"])
    return f"**Right**: {right} of the {here} systems that ran{f'. Not ranked: {said}' if said else ''}."


# ---------------------------------------------------------------------------------------------------------------------


def ranking(study: Study) -> Table:
    """The right systems at the longest length, the fastest first."""
    ns = field.lengths(study)
    found = field.standing(study, ns[-1]) if ns else []
    p = found[0][2].point if found else None
    shape = f", {p.seq_len:,} tokens, {p.heads} heads of {p.head_dim}, {SHORT[p.dtype]}, forward" if p else ""
    beside = [r for n in ns if (r := field.dense(study, n)) is not None and field.per_pair(r)]
    dense = f" Dense SDPA takes {_pair_ns(beside[-1])} ns at {beside[-1].point.seq_len:,} tokens." if beside else ""
    return table(
        study, f"Ranked by time{shape}",
        [Column("System", lambda x: x["entry"].name),
         Column(">Rank", lambda x: x["rank"]), TIME.of("row", ">Time (ms)"), ROOFLINE.of("row", ">Roofline (ms)"),
         Column(">Of all pairs", lambda x: percent(field.density(x["row"].point))),
         Column(">Time per pair (ns)", lambda x: _pair_ns(x["row"])),
         Column("A query sees", lambda x: Cell(x["entry"].states, str(pattern_of(x["row"].point))))],
        [{"rank": rank, "entry": e, "row": r} for rank, e, r in found],
        marked=[i for i, (rank, *_) in enumerate(found) if rank == 1],
        note="Each variant is correct for what it claims to compute. They compute different things: the ranking is by "
        "speed, they are not interchangeable. Rows share a rank where their difference is within noise. Each visible "
        f"pair is counted once; LongNet's branches compute some twice.{dense}",
    )  # fmt: skip


def _pair_ns(row) -> str | None:
    found = field.per_pair(row)
    return None if found is None else number(found * 1e9)


def unranked(study: Study) -> Table | Text:
    """The systems without a rank: wrong, refused, with the reason of each."""
    found = [(e, v) for e in FIELD if (v := verdict(study, e)).word != RIGHT]
    if not found:
        return study.text("Every system is here and right.")
    return study.table(
        "Without a rank", ["System", "Verdict", "Why"], [[e.name, v.cell, v.why] for e, v in found],
        note="Wrong: a result or a gradient differs from the reference of the system's own function by more than is "
        "allowed.",
    )  # fmt: skip


def time_figure(study: Study) -> None:
    """Time over length of the systems that have a rank; its data has what every length says beside dense attention."""
    found = [(n, rank, e, r) for n in field.lengths(study) for rank, e, r in field.standing(study, n)]
    series: dict[str, list[tuple]] = {}
    for n, _, e, r in found:
        series.setdefault(e.name, []).append((n, *(x * 1e3 for x in (r.median, *r.ci))))
    if not series:
        return
    series = {e.name: series[e.name] for e in FIELD if e.name in series}
    fig = curves.lines(series, xlabel="Tokens", ylabel="Time (ms)", colors=[COLORS[name] for name in series])
    data = table(
        study, "Data: time over length",
        [Column("System", lambda x: x["entry"].name), TOKENS.of("row", ">Tokens"), Column(">Rank", lambda x: x["rank"]),
         TIME.of("row", ">Time (ms)"), ROOFLINE.of("row", ">Roofline (ms)"),
         columns.ratio(study, "dense", "row", ">Faster than dense"),
         Column(">Cost of a pair, dense = 1", lambda x: times(pair_cost(study, x["row"])) if x["dense"] else None)],
        [{"rank": rank, "entry": e, "row": r, "dense": None if r is (d := field.dense(study, n)) else d}
         for n, rank, e, r in found],
    )  # fmt: skip
    caption = "Time over length of the systems that passed their checks; both axes are logarithmic."
    said = "; ".join(f"{x} {number(p[-1][1])} ms at {p[-1][0]:,} tokens" for x, p in series.items())
    figures.show(fig, "landscape-time", caption, f"{caption} {said}.", data, stamp=study.stamp)


def checks(study: Study) -> Table:
    """Each system's verdict, and how far it is from the reference: forward, and with gradients."""
    ways = {"Forward": "fwd", "With gradients": "fwd+bwd"}

    def worst(passes: str):
        return lambda e: _worst([r for r in e.rows(study) if r.point.passes == passes])

    return table(
        study, "Each system against the float64 reference of its own function",
        [Column("System", lambda e: e.name),
         Column("Verdict", lambda e: verdict(study, e).cell),
         *(Column(f">{name}", worst(way)) for name, way in ways.items())],
        FIELD, folded=True,
        note="The error that is nearest to what is allowed, or the check that failed: over all lengths forward, at the "
        "shortest with gradients.",
    )  # fmt: skip


def _worst(rows: list) -> Cell:
    """The failed row, else the error that comes nearest to its tolerance."""
    bad = [r for r in rows if objection(r)]
    if wrong := [r for r in bad if status(r) == "incorrect"]:
        return Cell("incorrect", reason(wrong[0]), kind="bad")
    near = max(((e / r.tolerance[k], e) for r in rows if not objection(r) for k, e in r.errors.items()), default=None)
    if near:
        return Cell(f"{near[1]:.1e}", f"{100 * near[0]:.0f} % of the tolerance")
    return Cell(status(bad[0]) if bad else "not checked", kind="none")


def limits(study: Study) -> Text:
    """What this page cannot tell."""
    return findings.limits(
        study,
        "Which pattern learns best: the same number of keys may be worth more or less to a model.",
        "The order at other densities, batches or head sizes: a query of the sparse ones sees 270 to 450 keys.",
        "Times of causal attention, and of training but beside other packages: gradients are checked and not timed.",
        "How the packages run across ranks: each ran on one device.",
    )
