"""Causal attention, and training: the document's function beside dense attention in every pass."""

from __future__ import annotations

from .cells import PEAK, bound, error, ms, peak, times
from .rows import SHORT, dense_beside, is_optimised, pattern
from .study import Study, best
from .tables import Table

ORDER = (("fwd", False), ("fwd", True), ("fwd+bwd", False), ("fwd+bwd", True))
WORDS = {"fwd": "forward", "fwd+bwd": "forward and backward"}


def pass_rows(study: Study) -> list[tuple]:
    """(our row, dense row) by pass, causal or not, at the longest n at which a backward was timed, in its dtype."""
    ours = study.rows(pattern=pattern().to_dict(), world_size=1, batch=1)
    ours = [r for r in ours if is_optimised(r)]
    trained = [r for r in ours if r.point.passes == "fwd+bwd"]
    if not trained:
        return []
    first = max(trained, key=lambda r: r.point.seq_len).point
    here = [r for r in ours if (r.point.seq_len, r.point.dtype) == (first.seq_len, first.dtype)]
    found = [best([r for r in here if (r.point.passes, r.point.causal) == way]) for way in ORDER]
    return [(r, dense_beside(study, r)) for r in found if r is not None]


def passes(study: Study) -> Table:
    """Forward, and forward with backward; not causal, and causal."""
    rows = [
        [way(r.point), r.point.seq_len, SHORT[r.point.dtype], ms(r), ms(d), times(study.ratio(d, r)), error(r),
         bound(r), bound(d), peak(r), peak(d)]
        for r, d in pass_rows(study)
    ]  # fmt: skip
    return study.table(
        f"Every pass: all optimizations, {pattern()}, beside dense SDPA",
        ["Pass", ">Tokens", "dtype", ">With all optimizations (ms)", ">Dense SDPA (ms)", ">Faster than dense", ">Error",
         ">Lower bound (ms)", ">Lower bound, dense (ms)", PEAK, ">Peak memory, dense"],
        rows or [["not measured", *[None] * 10]],
        note="Forward and backward are timed together, with a random cotangent.",
    )  # fmt: skip


def way(point) -> str:
    """A pass in words.

    >>> from ringlab.measure import sgemm
    >>> way(sgemm(8).but(passes="fwd+bwd", causal=True))
    'forward and backward, causal'
    """
    return WORDS[point.passes] + (", causal" if point.causal else "")
