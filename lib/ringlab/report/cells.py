"""One measured quantity, one cell; a row that may not be quoted gives its status instead of a number."""

from __future__ import annotations

from .tables import Cell, interval, number
from .trust import objection, status

PEAK = ">Peak memory (× tensors)"


def ms(result) -> Cell:
    """Median time in ms with its 95 % interval, or why there is none."""
    return _time(result, 1e3)


def us(result) -> Cell:
    """The same in microseconds."""
    return _time(result, 1e6)


def _time(result, scale: float) -> Cell:
    if result is None or (not objection(result) and result.median is None):
        return Cell("not measured", kind="none")
    if objection(result):
        return Cell(status(result), kind="bad")
    low, high = result.ci or (None, None)
    said = interval(low, high, scale) + ("; unstable" if result.unstable else "")
    return Cell(number(result.median * scale), said)


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


def peaks(before, after) -> Cell | None:
    """Peak memory of the second row, and what it was in the first."""
    if not has_peak(after):
        return None
    return Cell(f"{within(after):.2f}", f"off: {within(before):.2f}" if has_peak(before) else "")


def times(ratio) -> Cell | None:
    """A ratio with its interval; one within the noise of the run, unstable or not paired says so."""
    if ratio is None:
        return None
    doubts = [] if ratio.significantly_slower or ratio.significantly_faster else ["; within noise"]
    doubts += ["; unstable"] if ratio.unstable else []
    doubts += [] if ratio.paired else ["; unpaired"]
    return Cell(f"{number(ratio.value)}×", f"{number(ratio.low)} to {number(ratio.high)}{''.join(doubts)}")
