"""The work that the benchmark of document 002 states, and the least time that it takes
on the document's GPU.
"""

from __future__ import annotations

import torch

from .. import cost, hardware, patterns
from .published import published


def stated_work(seq_len: int | None = None) -> cost.Cost:
    """FLOPs and bytes of the function that the benchmark of document 002 states, at its
    own length by default.
    """
    ring, shape = (published("002")[x] for x in ("ring_shape", "shape"))
    pattern = patterns.Dilated(
        ring["segment_lengths"], ring["dilation_rates"], "head_groups", "branch"
    )
    return cost.count(
        pattern,
        seq_len=seq_len or ring["seq_len"],
        **shape | {"dtype": getattr(torch, shape["dtype"])},
    )


def least_ms() -> float:
    """The shortest time of that work in ms that the printed rates of the document's GPU
    allow.
    """
    document, work = published("002"), stated_work()
    card = hardware.get_profile(document["profile"])
    peak = card.peak(document["shape"]["dtype"])
    return 1e3 * work.seconds(peak, card.bandwidth(work.floor_bytes))
