"""What the judges of claims about ranks share."""

from __future__ import annotations

from ..study import Study
from ..verdicts import Verdict, undecided
from . import rows
from .rows import rows_of

SDPA, CORRECT, HILBERT = (f"RingDilatedAttention{x}" for x in ("SDPA", "Correct", "HilbertGPUOptimized"))
COLLECTIVE, ROBUST, HYBRID = (f"RingDilatedAttention{x}" for x in ("V2Collective", "V2Robust", "Hybrid"))
SYSTEM = {"001": SDPA, "004": HYBRID}  # whose memory the documents print
CPU_TIMES = "these are a CPU's times; only the devices themselves decide it"
UNMEASURED = "no pair of rows that passed"


def held_by(study: Study, system: str) -> dict[tuple[int, int], float]:
    """(tokens, ranks) -> peak bytes of a rank, of rows that may be quoted."""
    return {k: held for k, r in rows_of(study, system).items() if (held := rows.peak_bytes(r))}


def within(values: list[float], low: float, high: float, ours: str, what: str) -> Verdict:
    """A verdict on figures that are exact, as bytes are."""
    if not values:
        return undecided(f"{what}: {UNMEASURED}")
    inside = [low <= x <= high for x in values]
    if all(inside):
        return Verdict("reproduced", ours, f"{what} lies within {low:g} to {high:g}")
    if not any(inside):
        return Verdict("refuted", ours, f"{what} lies outside {low:g} to {high:g}")
    return Verdict("refuted", ours, f"{what} does not lie within {low:g} to {high:g} at every length")
