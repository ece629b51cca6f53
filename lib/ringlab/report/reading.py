"""What the words and numbers in a report's tables mean: said once, above them."""

from __future__ import annotations

from .study import Study
from .tables import Text, number


def reading(study: Study) -> Text:
    """One line for each kind of number."""
    dense = [
        "**Over dense**: a sparse pattern computes fewer keys than dense attention, so it is another function, not the "
        "same one faster."
    ]
    dense = dense if study.rows(system="dense_sdpa") else []
    return study.text(
        "**Time**: the median of the samples of a call in a process of its own, with a 95 % interval. Unstable: the "
        "samples vary by more than 20 %, drift during the run, or disagree with an earlier run. The roofline (lower "
        "bound) is the shortest time that this device's peak rates allow." + _repeats(study),
        "**Speed-ups** are medians of back-to-back pairs, so they can differ from the quotient of the times. "
        + _resolution(study),
        "**Checks**: output, log-sum-exp and gradients against a float64 reference, as a relative norm. No row is "
        "shown without a passed check.",
        "**Peak memory** includes q, k, v and the output: the live tensors, and for calls of 32 MiB or more the growth "
        "of the process (on a GPU: the allocator's peak).",
        *dense,
        bullets=True,
        folded="How to read the numbers",
    )


def _repeats(study: Study) -> str:
    """How the times agree with those of an earlier run."""
    count, agreed = study.repeats
    if not count:
        return ""
    agree = "agrees within its interval" if agreed == 1 else "agree within their intervals"
    return f" Of {count} point{'s' * (count > 1)} that an earlier run of this code measured too, {agreed} {agree}."


def _resolution(study: Study) -> str:
    """What a factor must exceed to be called a difference."""
    if not study.twins:
        return "No call was measured twice, so that this run does not show its noise."
    count = f"{len(study.twins)} call{'s' * (len(study.twins) > 1)}"
    return (
        f"Identical calls ({count}) differ by up to {number(study.noise_floor)}× here: a speed-up whose interval "
        "reaches into that range is marked within noise."
    )
