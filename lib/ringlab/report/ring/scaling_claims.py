"""The claims of document 001, each judged by a function of the rows."""

from __future__ import annotations

from ..published import published
from ..study import Study
from ..tables import number, size
from ..verdicts import Verdict, by_interval, said, undecided, untestable
from . import rows
from .judging import CORRECT, CPU_TIMES, HILBERT, SDPA, SYSTEM, held_by, within
from .rows import KB, MB, rows_of


def memory_reduction(study: Study, claim: dict, document: str) -> Verdict:
    held = held_by(study, SYSTEM[document])
    found = {n: held[n, 1] / held[n, 2] for n, p in held if p == 2 and (n, 1) in held}
    ours = ", ".join(f"{x:.2f}× at {n:,}" for n, x in found.items())
    if why := _miscounted(document, "reductions", "mb", (1, 2)):
        return Verdict("inconsistent as printed", ours or None, why)
    return within(list(found.values()), claim["low"], claim["high"], ours, "one rank's peak over that of each of two")


def _miscounted(document: str, factors: str, column: str, ranks: tuple[int, int]) -> str:
    """Where a printed factor is not what the printed rows give, ``ranks``: which over which; empty if all agree."""
    found = {(r["ranks"], r["seq_len"]): r[column] for r in published(document)["rows"]}
    for x in published(document)[factors]:
        n, (over, under) = x["seq_len"], ranks
        own = found[over, n] / found[under, n]
        if abs(own / x["factor"] - 1) > 0.01:
            return f"its tables give {own:.2f} at {n:,} tokens, not {x['factor']}"
    return ""


def kb_per_token(study: Study, claim: dict, document: str) -> Verdict:
    held = held_by(study, SYSTEM[document])
    found = {n: 1 - held[n, 2] / held[n, 1] for n, p in held if p == 2 and (n, 1) in held}
    ours = ", ".join(f"{100 * x:.1f} % less at {n:,}" for n, x in found.items())
    return within(list(found.values()), claim["low"], claim["high"], ours, "the part saved on two ranks")


def memory_scaling(study: Study, claim: dict, document: str) -> Verdict:
    """p times a rank's peak, over one rank's, at the longest length of all p: 1 where memory falls as 1/p.

    Shown by three values of p or more; short sequences also hold rows of others and buffers of a fixed size.
    """
    held = held_by(study, SYSTEM[document])
    counts = {n: {p for m, p in held if m == n} for n, _ in held}
    n = max((n for n, found in counts.items() if 1 in found), key=lambda n: (len(counts[n]), n), default=None)
    found = {} if n is None else {p: p * held[n, p] / held[n, 1] for p in sorted(counts[n]) if p > 1}
    ours = ", ".join(f"{x:.2f} on {p}" for p, x in found.items())
    ours = f"ranks × peak over one rank's at {n:,}: {ours}" if ours else None
    if len(found) < 2:
        why = f"fewer than three numbers of ranks show no scaling; the document has {_counts(document)}"
        return undecided(why, ours)
    verdict = within(list(found.values()), claim["low"], claim["high"], ours, "ranks × a rank's peak over one rank's")
    return Verdict(verdict.word, verdict.ours, f"{verdict.why}; the document has {_counts(document)}")


def _counts(document: str) -> str:
    return {"001": "one and two GPUs", "004": "two GPUs alone"}[document]


def longest_printed(study: Study, claim: dict, document: str) -> Verdict:
    row = next(r for r in published(document)["rows"]
               if (r["ranks"], r["seq_len"]) == (claim["ranks"], claim["tokens"]))  # fmt: skip
    share = row["mb"] * MB / claim["memory_bytes"]
    longer = [n for n, p in held_by(study, SYSTEM[document]) if p == claim["ranks"] and n > claim["tokens"]]
    ours = f"{max(longer):,} tokens ran here" if longer else None
    used = f"its own row takes {row['mb']:.0f} MB, {100 * share:.0f} % of {claim['memory_bytes'] / 1e9:g} GB"
    if share < claim["share"]:
        why = f"{used}: about {claim['tokens'] / share:,.0f} tokens would fit"
        return Verdict("inconsistent as printed", ours, why)
    if longer:
        return Verdict("refuted", ours, "longer ones passed, and hold less")
    return untestable(f"{used}, and no longer row has passed here", ours)


def twice_as_long(study: Study, claim: dict, document: str) -> Verdict:
    held = held_by(study, SYSTEM[document])
    found = {n: held[2 * n, 2] / held[n, 1] for n, p in held if p == 1 and (2 * n, 2) in held}
    ours = ", ".join(f"{x:.2f}× at {2 * n:,}" for n, x in found.items())
    what = "the peak of each of two ranks over that of one with half of the tokens"
    return within(list(found.values()), claim["low"], claim["high"], ours, what)


def largest_printed(study: Study, claim: dict, document: str) -> Verdict:
    most = max(r["tokens_per_s"] for r in published(document)["rows"])
    if most < claim["tokens_per_s"]:
        return Verdict("inconsistent as printed", _fastest(study), f"the largest in its tables is {most:,}")
    return untestable(CPU_TIMES, _fastest(study))


def _fastest(study: Study) -> str | None:
    known = [r.tokens_per_s for r in rows_of(study, SDPA).values() if rows.timed(r)]
    return f"{number(max(known))} tokens/s at best" if known else None


def fastest_of_three(study: Study, claim: dict, document: str) -> Verdict:
    found = {s: {k: r for k, r in rows_of(study, s).items() if rows.timed(r)} for s in (SDPA, CORRECT, HILBERT)}
    shared = set.intersection(*map(set, found.values()))
    if not shared:
        return undecided("the three systems were not timed at one length")
    at = max(shared, key=lambda k: (-k[1], k[0]))
    mine = found.pop(claim["system"])[at]
    ratios = {s.removeprefix("RingDilatedAttention"): study.ratio(x[at], mine) for s, x in found.items()}
    ours = ", ".join(f"{name} takes {said(x)} as long" for name, x in ratios.items()) + f" at {at[0]:,}"
    if study.rehearsal:
        return untestable(CPU_TIMES, ours)
    words = [by_interval(x, claim["low"], float("inf"), "").word for x in ratios.values()]
    if "refuted" in words:
        return Verdict("refuted", ours, "another of the three is faster")
    if set(words) == {"reproduced"}:
        return Verdict("reproduced", ours, "both others take longer")
    return undecided("not both of the others can be told apart from it", ours)


def all_scale(study: Study, claim: dict, document: str) -> Verdict:
    """One rank's peak over that of each of two, for every system at its longest length that has both."""
    found = {}
    for system in (SDPA, CORRECT, HILBERT):
        held = held_by(study, system)
        if n := max((n for n, p in held if p == 2 and (n, 1) in held), default=None):
            found[system.removeprefix("RingDilatedAttention")] = held[n, 1] / held[n, 2]
    ours = ", ".join(f"{name} {x:.2f}×" for name, x in found.items()) or None
    factors = list(found.values())
    if factors and (min(factors) < claim["least"] or max(factors) > claim["alike"] * min(factors)):
        return Verdict("refuted", ours, "one rank's peak over that of two: they do not scale alike")
    if len(found) < 3:
        return undecided(f"{len(found)} of the 3 systems were measured on one rank and on two", ours)
    return Verdict("reproduced", ours, "one rank's peak over that of two: all scale alike")


def leanest(study: Study, claim: dict, document: str) -> Verdict:
    held = {s: held_by(study, s) for s in (SDPA, CORRECT, HILBERT)}
    shared = set.intersection(*map(set, held.values()))
    if not shared:
        return undecided("the three systems were not measured at one length")
    (n, p) = max(shared)
    ours = ", ".join(f"{s.removeprefix('RingDilatedAttention')} {size(x[n, p])}" for s, x in held.items())
    ours = f"{ours} at {n:,} tokens on {p}"
    least = min(x[n, p] for x in held.values())
    if held[claim["system"]][n, p] > 1.01 * least:
        return Verdict("refuted", ours, "another of the three holds less")
    if max(x[n, p] for x in held.values()) <= 1.01 * least:
        return Verdict("refuted", ours, "all three hold the same, to 1 %")
    return Verdict("reproduced", ours, "the other two hold more")


def throughput_printed(study: Study, claim: dict, document: str) -> Verdict:
    factors = [r["tokens_per_s"] * r["seconds"] / r["seq_len"] for r in published(document)["rows"]]
    if all(1.75 < f < 2.25 for f in factors):  # within the rounding of the printed seconds
        why = "every row is twice its tokens over its time: a batch of 2 that the text does not state"
        return Verdict("inconsistent as printed", _fastest(study), why)
    return untestable(CPU_TIMES, _fastest(study))


def speedup(study: Study, claim: dict, document: str) -> Verdict:
    found = rows_of(study, SDPA)
    pairs = {
        n: study.ratio(found[n, 1], r) for (n, p), r in found.items() if p == 2 and rows.timed(r) and (n, 1) in found
    }
    known = {n: x for n, x in pairs.items() if x}
    if why := _miscounted(document, "speedups", "tokens_per_s", (2, 1)):
        return Verdict("inconsistent as printed", None, why)
    if not known:
        return undecided("no two ranks with a core each were timed beside one")
    n = max(known)
    if study.device_type == "cpu":
        why = "these ranks are processes of a CPU, two GPUs would test it; beyond 2.2 times it would be superlinear"
        return untestable(why, f"{said(known[n])} at {n:,} tokens")
    return by_interval(known[n], claim["low"], claim["high"], f"one rank's time over two ranks' at {n:,} tokens")


def planning(study: Study, claim: dict, document: str) -> Verdict:
    found = {
        p: rows.per_token(r) / KB for (n, p), r in rows_of(study, SDPA).items() if rows.per_token(r)
    }  # the longest
    both = {1, 2} <= found.keys()
    ours = f"{found[1]:.2f} KB on one rank, {found[2]:.2f} on two, inputs and results included" if both else None
    printed = [(r, r["mb"] * MB / KB / r["seq_len"]) for r in published(document)["rows"]]
    shares = [kb / claim["kb"][r["ranks"] - 1] for r, kb in printed]
    if not all(claim["low"] <= x <= claim["high"] for x in shares):
        own = " and ".join(f"{max(kb for r, kb in printed if r['ranks'] == p):.1f} KB on {p}" for p in (1, 2))
        return Verdict("inconsistent as printed", ours, f"its own rows come to {own}: they hold a batch of 2")
    return untestable("theirs counts projections and no inputs, ours inputs and results and no projections", ours)


TESTS = {
    f.__name__: f
    for f in (
        memory_reduction, kb_per_token, memory_scaling, longest_printed, twice_as_long, largest_printed,
        fastest_of_three, leanest, all_scale, throughput_printed, speedup, planning,
    )
}  # fmt: skip
