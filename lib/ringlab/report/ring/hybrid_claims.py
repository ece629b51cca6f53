"""The claims of document 004, each judged by a function of the rows; its scaling claim is 001's too."""

from __future__ import annotations

from ..study import Study
from ..tables import number, size
from ..verdicts import Verdict, undecided, untestable
from . import rows
from .judging import CPU_TIMES, HYBRID, UNMEASURED, held_by, within
from .rows import published, rows_of


def ratio_printed(study: Study, claim: dict, document: str) -> Verdict:
    printed = {r["seq_len"]: r["mb"] / r["seq_len"] for r in published(document)["rows"]}
    first, last = min(printed), max(printed)
    real, own = printed[last] / printed[first], rows_of(study, HYBRID)
    known = {n: rows.per_token(own[n, 2]) for n in (first, last) if (n, 2) in own and rows.per_token(own[n, 2])}
    ours = f"{known[last] / known[first]:.2f}" if len(known) == 2 else None
    return Verdict(
        "inconsistent as printed", ours,
        f"its first two rows divide by twice the tokens: {printed[first] * 1e3:.0f} and {printed[last] * 1e3:.1f} "
        "KB a token, "
        f"a ratio of {real:.2f}",
    )  # fmt: skip


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
    ran = sorted({n for n, p in held_by(study, HYBRID) if p > 1 and n in claim["seq_lens"]})
    if len(ran) < len(claim["seq_lens"]):
        return undecided(f"not every one of {', '.join(f'{n:,}' for n in claim['seq_lens'])} tokens has passed")
    return Verdict(
        "reproduced", ", ".join(f"{n:,}" for n in ran), "rows at these lengths passed their checks on several ranks"
    )


TESTS = {
    f.__name__: f
    for f in (ratio_printed, standard_memory, memory_saved, throughput_falls, longer)
}  # fmt: skip
