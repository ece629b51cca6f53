"""One measured quantity, one cell; a row that may not be quoted gives its status instead of a number."""

from __future__ import annotations

from .columns import time as ms
from .columns import times
from .tables import Cell, number
from .trust import objection

__all__ = ["PEAK", "bound", "error", "has_peak", "held", "ms", "peak", "times", "within"]

PEAK = ">Peak memory (× tensors)"


def bound(result) -> Cell | None:
    if result is None or objection(result) or not result.bound_seconds:
        return None
    return Cell(number(result.bound_seconds * 1e3))


def error(result) -> Cell | None:
    """The error that comes nearest to its bound, among output, log-sum-exp and gradients."""
    if result is None or objection(result) or not result.errors:
        return None
    name = max(result.errors, key=lambda k: result.errors[k] / (result.tolerance.get(k) or float("inf")))
    return Cell(f"{result.errors[name]:.1e}", f"{name} ≤ {result.tolerance.get(name, float('nan')):.1e}")


def within(result) -> float:
    """Tracked peak as a multiple of the tensors that the caller holds."""
    return result.memory["tracked_peak_bytes"] / result.memory["floor_bytes"]


def has_peak(result) -> bool:
    """A peak that may be quoted, of a row that has tensors."""
    known = result is not None and not objection(result)
    return known and bool(result.memory.get("tracked_peak_bytes") and result.memory.get("floor_bytes"))


def held(result) -> tuple[str, float] | None:
    """(what was asked, its peak as a multiple of the tensors): the process, or on a GPU the allocator."""
    for name, key in (("process", "high_water_bytes"), ("allocator", "allocator_peak_bytes")):
        if has_peak(result) and result.memory.get(key):
            return name, result.memory[key] / result.memory["floor_bytes"]
    return None


def peak(result) -> Cell | None:
    """Peak memory in multiples of the tensors: tracked, and that of the process or the allocator."""
    if not has_peak(result):
        return None
    more = held(result)
    return Cell(f"{within(result):.2f}", f"{more[0]} {more[1]:.2f}" if more else "")
