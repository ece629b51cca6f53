"""What several ranks must exchange, computed for lengths and numbers of ranks that no machine here has."""

from __future__ import annotations

from ...ring.volume import ladder_rows
from ..study import Study
from ..tables import Table, size

HEADS, HEAD_DIM, BYTES = 32, 128, 2  # of the bytes column
SIZES = ((2**17, 8), (2**20, 8), (2**20, 64), (2**22, 64), (2**24, 64), (2**24, 512))


def volumes(study: Study) -> Table:
    """K/V rows that the busiest rank receives under LongNet's ladder, by four ways."""
    lines = []
    for moved in (ladder_rows(*each) for each in SIZES):
        counts = [moved.plan, moved.segment_gather, moved.world_gather, moved.ring]
        whole = 2 * HEADS * HEAD_DIM * BYTES
        lines.append([moved.seq_len, moved.ranks, *counts, size(moved.plan * whole), size(moved.ring * whole)])
    return study.table(
        "Rows of K and V that a rank receives, computed",
        [">Tokens", ">Ranks", ">Plan", ">Segment gather (LongNet)", ">World gather (torchscale)", ">Ring or all-gather",
         ">Plan, bytes", ">Ring, bytes"],
        lines,
        note="Per K/V head, forward, not causal: segments 2,048, 4,096, 8,192, ... up to the sequence, at rates 1, "
        "2, 4, "
        f"... The plan's are checked against the library's own plan. Bytes: K and V, {HEADS} heads of {HEAD_DIM}, "
        "fp16.",
    )  # fmt: skip
