"""The claims of document 003, each judged by a function of the rows."""

from __future__ import annotations

from collections.abc import Callable

from ..published import published
from ..study import Study
from ..tables import size
from ..verdicts import Verdict, by_interval, said, undecided, untestable
from . import rows
from .judging import COLLECTIVE, CPU_TIMES, ROBUST, UNMEASURED, held_by, within
from .rows import MB, rows_of


def _one_rank(study: Study, causal: bool = False) -> list[tuple]:
    a, b = (rows_of(study, s, causal=causal) for s in (COLLECTIVE, ROBUST))
    return [(n, a[n, 1], b[n, 1]) for n, p in sorted(a.keys() & b.keys()) if p == 1]


def one_device_time(study: Study, claim: dict, document: str) -> Verdict:
    known = [(n, study.ratio(b, a)) for n, a, b in _one_rank(study)]
    known = [x for x in known if x[1]]
    if not known:
        return undecided(UNMEASURED)
    if study.rehearsal:
        return untestable(CPU_TIMES, said(known[-1][1]))
    printed = " and ".join(f"{t['robust_ms'] / t['collective_ms']:.2f}×" for t in published(document)["times"])
    verdict = by_interval(
        known[-1][1], claim["low"], claim["high"], f"the ring's time over the all-gather's at {known[-1][0]:,}"
    )
    return Verdict(verdict.word, verdict.ours, f"{verdict.why}; its own rows give {printed}")


def one_device_memory(study: Study, claim: dict, document: str) -> Verdict:
    found = {n: rows.peak_bytes(b) / rows.peak_bytes(a) for n, a, b in _one_rank(study)
             if rows.peak_bytes(a) and rows.peak_bytes(b)}  # fmt: skip
    ours = ", ".join(f"{x:.2f}× at {n:,}" for n, x in found.items())
    return within(list(found.values()), claim["low"], claim["high"], ours, "the ring's peak over the all-gather's")


def memory_by_length(study: Study, claim: dict, document: str) -> Verdict:
    printed = {m["seq_len"]: m["robust_mb"] / m["collective_mb"] for m in published(document)["memory"]}
    found = {n: rows.peak_bytes(b) / rows.peak_bytes(a) for n, a, b in _one_rank(study)
             if n in printed and rows.peak_bytes(a) and rows.peak_bytes(b)}  # fmt: skip
    ours = ", ".join(f"{x:.2f}× at {n:,}" for n, x in found.items())
    shares = [x / printed[n] for n, x in found.items()]
    return within(shares, claim["low"], claim["high"], ours, "the ring's peak over the all-gather's, of that printed,")


def ring_causal(study: Study, claim: dict, document: str) -> Verdict:
    ratio = _causal(study, ROBUST)
    ours = f"causal takes {said(ratio)} of the time" if ratio else None
    if study.rehearsal:
        return untestable(CPU_TIMES, ours)
    verdict = by_interval(ratio, claim["low"], claim["high"], "causal over not causal")
    return Verdict(verdict.word, ours, f"{verdict.why}; a causal call has about half of the work")


def _causal(study: Study, system: str):
    """The time of a causal call over that of the same one without, at the longest length that has both."""
    both = {c: rows_of(study, system, causal=c) for c in (True, False)}
    shared = [k for k in both[True].keys() & both[False].keys() if k[1] == 1]
    return study.ratio(both[True][max(shared)], both[False][max(shared)]) if shared else None


def causal_printed(study: Study, claim: dict, document: str) -> Verdict:
    times = {t["causal"]: t["collective_ms"] for t in published(document)["times"]}
    ratio = _causal(study, COLLECTIVE)
    ours = f"causal takes {said(ratio)} of the time" if ratio else None
    share = times[True] / times[False]
    if share < claim["low"]:
        return Verdict("inconsistent as printed", ours, f"{share:.2f} of the time, where causal can save about half")
    return by_interval(ratio, claim["low"], claim["high"], "causal over not causal")


def memory_printed(study: Study, claim: dict, document: str) -> Verdict:
    name = claim.get("system", "collective")
    other = next(m[f"{name}_mb"] for m in published(document)["memory"] if m["seq_len"] == claim["seq_len"])
    held = held_by(study, ROBUST if name == "robust" else COLLECTIVE).get((claim["seq_len"], 1))
    ours = f"{held / MB:.1f} MB, inputs and results included" if held else None
    if not claim["mb"][0] <= other <= claim["mb"][1]:
        return Verdict("inconsistent as printed", ours, f"its next table has {other} MB at the same length")
    return untestable("its tables agree, but the original does not run here", ours)


def runs_on_several(study: Study, claim: dict, document: str) -> Verdict:
    found = [(n, p) for n, p in held_by(study, ROBUST) if p > 1]
    if not found:
        return undecided("no row of the ring on several ranks has passed")
    most = max(p for _, p in found)
    return Verdict(
        "refuted", f"passed on up to {most} ranks", "every one of these rows passed its check against the oracle"
    )


def _by_scheme(study: Study, value: Callable) -> tuple[tuple[int, int], dict[str, float]] | None:
    """((tokens, ranks), scheme -> value) at the longest sequence on the most ranks that all have."""
    found = {s: {k: value(r) for k, r in rows_of(study, s).items() if k[1] > 1 and value(r)}
             for s in (COLLECTIVE, ROBUST, "ringlab")}  # fmt: skip
    shared = set.intersection(*map(set, found.values()))
    at = max(shared, key=lambda k: (k[1], k[0]), default=None)
    return at and (at, {s: x[at] for s, x in found.items()})


def rows_held(study: Study, claim: dict, document: str) -> Verdict:
    a, b = held_by(study, COLLECTIVE), held_by(study, ROBUST)
    shared = sorted({(n, p) for n, p in a.keys() & b.keys() if p > 1}, key=lambda k: (k[1], k[0]))
    if not shared:
        return undecided(UNMEASURED)
    n, p = shared[-1]
    ours = f"all-gather {size(a[n, p])}, ring {size(b[n, p])} a rank at {n:,} tokens on {p}"
    if p < 3:
        return undecided("on two ranks a ring holds as much as an all-gather: its own shard and the other", ours)
    if b[n, p] < a[n, p]:
        return Verdict("reproduced", ours, "the ring holds less")
    return Verdict("refuted", ours, "the ring holds no less")


def volume(study: Study, claim: dict, document: str) -> Verdict:
    found = _by_scheme(study, rows.sent_bytes)
    if not found:
        return undecided(UNMEASURED)
    (n, p), sent = found
    ours = (f"all-gather {size(sent[COLLECTIVE])}, ring {size(sent[ROBUST])}, plan {size(sent['ringlab'])} a rank "
            f"at {n:,} on {p}")  # fmt: skip
    if sent[ROBUST] < 0.99 * sent[COLLECTIVE]:
        return Verdict("reproduced", ours, "the ring sends less than the all-gather")
    return Verdict("refuted", ours, "both send every shard to every other rank; the plan sends what is seen")


def best_choice(study: Study, claim: dict, document: str) -> Verdict:
    held, sent = (_by_scheme(study, f) for f in (rows.peak_bytes, rows.sent_bytes))
    if not held or not sent:
        return undecided(UNMEASURED)
    (n, p), peaks = held
    ours = f"at {n:,} on {p}: all-gather {size(peaks[COLLECTIVE])} a rank, plan {size(peaks['ringlab'])}"
    if peaks["ringlab"] < peaks[COLLECTIVE] and sent[1]["ringlab"] < sent[1][COLLECTIVE]:
        return Verdict("refuted", ours, "the plan computes the same with less memory and fewer bytes")
    return undecided("neither scheme is better in both memory and bytes", ours)


def falls_by_p_squared(study: Study, claim: dict, document: str) -> Verdict:
    """The plan partitions q too: its peak on two ranks over that on four, 4 if memory fell by the square."""
    held = held_by(study, "ringlab")
    found = {n: held[n, 2] / held[n, 4] for n, p in held if p == 4 and (n, 2) in held}
    ours = ", ".join(f"{x:.2f}× less on four ranks than on two at {n:,}" for n, x in found.items())
    what = "what the plan, which partitions q, holds on two ranks over four"
    verdict = within(list(found.values()), claim["low"], claim["high"], ours, what)
    return Verdict(verdict.word, verdict.ours, f"{verdict.why}; q, k, v and out of a rank alone fall as n/p")


TESTS = {
    f.__name__: f
    for f in (
        one_device_time, one_device_memory, memory_by_length, causal_printed, ring_causal, memory_printed,
        runs_on_several, rows_held, volume, best_choice, falls_by_p_squared,
    )
}  # fmt: skip
