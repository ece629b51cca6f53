"""The claims of document 004, each judged by a function of the rows; its scaling claim is 001's too."""

from __future__ import annotations

from ..published import published
from ..study import Study
from ..tables import number, size
from ..verdicts import Verdict, undecided, untestable
from . import rows
from .judging import CPU_TIMES, HYBRID, SYSTEM, UNMEASURED, held_by, within
from .rows import rows_of


def ratio_printed(study: Study, claim: dict, document: str) -> Verdict:
    printed = {r["seq_len"]: r["mb"] / r["seq_len"] for r in published(document)["rows"]}
    first, last = min(printed), max(printed)
    real, own = printed[last] / printed[first], rows_of(study, HYBRID)
    known = {n: rows.per_token(own[n, 2]) for n in (first, last) if (n, 2) in own and rows.per_token(own[n, 2])}
    ours = f"{known[last] / known[first]:.2f}" if len(known) == 2 else None
    if not claim["low"] <= real <= claim["high"]:
        why = (f"its rows at {first:,} and {last:,} tokens come to {printed[first] * 1e3:.0f} and "
               f"{printed[last] * 1e3:.1f} KB a token, a ratio of {real:.2f}: it divides the first by twice its "
               "tokens")  # fmt: skip
        return Verdict("inconsistent as printed", ours, why)
    found = [known[last] / known[first]] if len(known) == 2 else []
    return within(found, claim["low"], claim["high"], ours, "memory a token at the longest length over the shortest")


def constant_printed(study: Study, claim: dict, document: str) -> Verdict:
    """Spread of memory a token over lengths, by its own figures first."""
    per_token = [r["kb_per_token"] for r in published(document)["rows"]]
    own = {n: x for (n, p), r in rows_of(study, HYBRID).items() if p == 2 and (x := rows.per_token(r))}
    spread = max(own.values()) / min(own.values()) if len(own) > 1 else None
    ours = f"{spread:.2f}× apart over {len(own)} lengths" if spread else None
    low, high = min(per_token), max(per_token)
    if high / low > claim["high"]:
        why = f"its own figures lie {high / low:.2f}× apart, {low:g} to {high:g} KB"
        return Verdict("inconsistent as printed", ours, why)
    return within([spread] if spread else [], claim["low"], claim["high"], ours, "the spread of memory a token")


def holds_at_most(study: Study, claim: dict, document: str) -> Verdict:
    held = held_by(study, HYBRID).get((claim["seq_len"], 2))
    if not held:
        return undecided(f"two ranks at {claim['seq_len']:,} tokens: {UNMEASURED}")
    share = f"{100 * held / claim['most_bytes']:.0f} % of {size(claim['most_bytes'])}"
    word = "reproduced" if held <= claim["most_bytes"] else "refuted"
    return Verdict(word, f"{size(held)} a rank", f"that is {share}, inputs and results included")


def standard_memory(study: Study, claim: dict, document: str) -> Verdict:
    shape = published(document)["shape"]
    scores = shape["heads"] * claim["seq_len"] ** 2 * 4
    if abs(scores / 2**30 / claim["gb"] - 1) > 0.1:
        return Verdict("inconsistent as printed", None, f"in {shape['dtype']}, which it states, it is {size(scores)}")
    return Verdict("reproduced", None, "by arithmetic")


def memory_saved(study: Study, claim: dict, document: str) -> Verdict:
    shape, held = published(document)["shape"], held_by(study, HYBRID).get((claim["seq_len"], 2))
    if not held:
        return undecided(f"two ranks at {claim['seq_len']:,} tokens: {UNMEASURED}")
    saved = 1 - held / (shape["heads"] * claim["seq_len"] ** 2 * 4)
    return within(
        [saved], claim["low"], claim["high"], f"{100 * saved:.1f} % less than the fp32 scores", "the part saved"
    )


def throughput_falls(study: Study, claim: dict, document: str) -> Verdict:
    found = {n: r for (n, p), r in rows_of(study, HYBRID).items() if p == 2 and rows.timed(r)}
    if len(found) < 2:
        return undecided("two ranks were timed at fewer than two lengths")
    rates = [found[n].tokens_per_s for n in (min(found), max(found))]
    ours = f"{number(rates[0])} tokens/s at {min(found):,}, {number(rates[1])} at {max(found):,}"
    if study.rehearsal:
        return untestable(CPU_TIMES, ours)
    fall = rates[0] / rates[1]
    if fall > 2:
        return Verdict("reproduced", ours, "it falls by more than half")
    return Verdict("refuted", ours, "the work of a token does not grow with the sequence, and neither does its time")


def longer(study: Study, claim: dict, document: str) -> Verdict:
    longest = max((n for n, p in held_by(study, SYSTEM[document]) if p > 1), default=None)
    ours = f"{longest:,} tokens on several ranks" if longest else None
    wanted = " and ".join(f"{n:,}" for n in claim["seq_lens"])
    if not longest or longest < max(claim["seq_lens"]):
        return undecided(f"no row of {wanted} tokens has passed on several ranks", ours)
    return Verdict("reproduced", ours, f"{wanted} tokens passed, each row with its check")


TESTS = {
    f.__name__: f
    for f in (
        ratio_printed, constant_printed, holds_at_most, standard_memory, memory_saved, throughput_falls, longer,
    )
}  # fmt: skip
