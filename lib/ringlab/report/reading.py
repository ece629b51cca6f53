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
        "**Time**: the median of samples of a point in a process of its own, with a 95 % interval. Unstable: the "
        "quartiles, or the two halves of a run, lie over 20 % of the median apart, or an earlier run found another "
        "time. The lower bound is what this device's peak rates allow." + _repeats(study),
        "**Factors** are medians over rounds in which both took turns, not quotients of the medians beside them. "
        + _resolution(study),
        "**Error**: of out, the log-sum-exp or a gradient against the float64 oracle, as a relative norm, with what is "
        "allowed; no row without a passed check is quoted.",
        "**Peak memory** counts inputs and results, as a multiple of these: live torch storages, and from 32 MiB of "
        "tensors on the growth of the whole process (on a GPU: the allocator's peak).",
        *dense,
        bullets=True,
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
        return "No call stood in two rows, so that this run does not show what the same work differs by."
    count = f"{len(study.twins)} call{'s' * (len(study.twins) > 1)}"
    return (
        f"To see what a run can tell, the same work stands in two rows ({count}): these differ by up to "
        f"{number(study.noise_floor)}×. A factor whose interval reaches into that range says: not told apart."
    )
