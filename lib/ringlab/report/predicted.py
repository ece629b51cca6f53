"""How many measured peaks of memory ``ringlab.estimate`` predicts.

It predicts the rows of the engine, as it is called or under a published name, each with the settings of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

import torch

from .. import compat, memory
from ..engine import Execution
from ..estimate import Estimate, estimate
from ..measure.points import Point
from ..measure.systems import BLOCK_SPARSE, PUBLISHED
from ..measure.timing import WARM_TOKENS
from .study import Study, pattern_of
from .tables import Text
from .trust import threads

ENGINE = ("ringlab", *PUBLISHED, *BLOCK_SPARSE)
OPERATORS = 2000  # of all rows together that a page runs without data, so that it stays quick
BLOCKS = 4096  # a block-sparse row beyond would take seconds to plan


@dataclass(frozen=True)
class Prediction:
    """A row and its Estimate."""

    row: object
    estimate: Estimate

    @property
    def peak(self) -> float | None:
        """Predicted peak over the measured one; None where only a lower bound is predicted."""
        return None if self.estimate.at_least else self.estimate.peak_bytes / self.row.memory["tracked_peak_bytes"]


def predict(results: Iterable, profile: str | None = None) -> list[Prediction]:
    """The predictions of rows with a peak. ``profile``: the GPU that they were measured on; None: a CPU."""
    found = []
    for row in results:
        with suppress(NotImplementedError):  # by rule that kernel does not run on the GPU, and yet it did
            if row.memory.get("tracked_peak_bytes") and (one := estimate_of(row.point.first, threads(row), profile)):
                found.append(Prediction(row, one))
    return found


@lru_cache(maxsize=512)
def estimate_of(point: Point, threads: int | None, profile: str | None) -> Estimate | None:
    """The Estimate of a measured point whose ranks have so many threads each; None for what is no call of the engine.

    None too for ranks that are simulated in one process, and for a published module on a short sequence: its first call
    also probes the kernels.
    """
    short = point.system != "ringlab" and point.world_size == 1 and point.seq_len <= 4 * WARM_TOKENS
    if point.system not in ENGINE or short or "simulated" in dict(point.options):
        return None
    with _threads(threads or torch.get_num_threads()):
        how = _ringlab(point) if point.system == "ringlab" else _published(point)
        if how is None:
            return None
        dtype = getattr(torch, point.dtype)
        return estimate(pattern_of(point), dtype=dtype, ranks=point.world_size, profile=profile, **point.shape, **how)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ringlab(point: Point) -> dict:
    """What ``measure.systems.ringlab`` makes of the options of a point, as keywords of ``estimate``."""
    options = dict(point.options)
    how = {name: options.pop(name) for name in ("backend", "scheme", "layout") if name in options}
    if (threshold := options.pop("pool_threshold_mb", None)) is not None:
        options["pool"] = memory.MemoryPool(threshold_bytes=int(threshold * 2**20))
    return how | {"execution": Execution(**options)}


def _published(point: Point) -> dict | None:
    """The settings of a published class, which its module has chosen; None for one that simulates ranks by itself."""
    pattern, options = pattern_of(point), {"dtype": getattr(torch, point.dtype), **dict(point.options)}
    if point.system in BLOCK_SPARSE:
        options["pattern"] = pattern
    else:
        options |= {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
    if point.world_size > 1:
        options["ring_size"] = point.world_size
    module = getattr(compat, point.system)(device="cpu", **options)
    across = module._ranks(point.seq_len)
    if across.pop("group", None) is not None and point.world_size == 1:
        return None
    return {"backend": module.chain, "execution": module.execution, **across}


def found(study: Study) -> tuple[list[Prediction], int]:
    """(the predictions of the rows that may be quoted, how many rows are left out): rows of few operators first."""
    rows = [r for r in study.good if r.memory.get("tracked_peak_bytes") and not r.option("twin")]
    rows = [r for r in rows if r.point.system in ENGINE]
    rows.sort(key=lambda r: r.memory.get("operator_calls") or 0)
    kept, left = [], OPERATORS
    for row in rows:
        left -= row.memory.get("operator_calls") or 0
        if left >= 0 and row.point.seq_len // row.point.pattern.get("block_size", row.point.seq_len) <= BLOCKS:
            kept.append(row)
    return predict(kept, study.profile.name if study.device_type == "cuda" else None), len(rows) - len(kept)


def accuracy(study: Study) -> Text:
    """In a sentence how many peaks ``estimate`` predicts to 1 %, and which it does not."""
    known, left = found(study)
    known = [x for x in known if x.peak]
    if not known:
        return study.text("Nothing was measured to set a prediction of memory beside.")
    off = [x for x in known if abs(x.peak - 1) > 0.01]
    exceptions = "; ".join(
        f"{name(x)}, {x.row.point.seq_len:,} tokens on {x.row.point.world_size} ranks ({100 * (x.peak - 1):+.1f} %)"
        for x in off
    )
    return study.text(
        f"`ringlab.estimate` predicts {len(known) - len(off)} of {len(known)} peaks of memory to 1 %, without running "
        f"the calls{f'; not of {exceptions}' if off else ''}."
        + (f" Rows of many operators were not tried: {left}." if left else "")
    )


def name(x: Prediction) -> str:
    """What a reader calls the system."""
    return "This library" if x.row.point.system == "ringlab" else x.row.point.system
