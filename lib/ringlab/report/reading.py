"""What the words and numbers in the tables of a page mean, said once."""

from __future__ import annotations

from .study import Study
from .tables import Text, number


def reading(study: Study) -> Text:
    """One line for each kind of number, folded."""
    dense = (
        "**Faster than dense**: a sparse pattern leaves out keys, so it computes another function than dense attention."
    )
    return study.text(
        "**Time**: the median of repeated calls in a process of its own, with a 95 % interval. *Unstable*: the samples "
        "vary by more than 20 %, drift during the run, or disagree with an earlier run. The **roofline** is the "
        f"shortest time that this device's peak rates allow.{_repeats(study)}",
        "**Speed-ups** are medians of back-to-back pairs, so they can differ from the quotient of the two times. "
        + _noise(study),
        "**Checks**: each row was compared with the float64 reference in the process that timed it. Errors are "
        "relative norms. A row that fails, or is faster than its roofline, is listed with the reason and not shown.",
        "**Peak memory** includes q, k, v and the output, and is given as a multiple of them too.",
        *([dense] if study.rows(system="dense_sdpa") else []),
        bullets=True, summary="What the numbers mean",
    )  # fmt: skip


def _repeats(study: Study) -> str:
    """How the times agree with those of an earlier run."""
    count, agreed = study.repeats
    return f" {agreed} of {count} times agree with an earlier run of this code." if count else ""


def _noise(study: Study) -> str:
    """What a speed-up must exceed to be called a difference."""
    if not study.twins:
        return "No call was measured twice, so the noise floor of this run is not known."
    count = f"{len(study.twins)} call{'s' * (len(study.twins) > 1)} measured twice"
    return (
        f"{count} differed by up to {number(study.noise_floor)}× from themselves: this is the noise floor, and a "
        "speed-up whose interval reaches into it is marked *within noise*."
    )
