"""Which rows may be quoted: each judged by itself, and those on several ranks by the row on one.

No time without a passed check, none that is faster than its bound, no peak smaller than its own tensors, no speed-up on
p ranks beyond 1.1 p.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .tables import number

SUPERLINEAR = 1.1  # times the number of ranks; caches may add a little, never more
PLACEMENT = ("group", "layout", "scheme")  # options that say how ranks share a point's work, not which work it is


def objection(result) -> str:
    """Why a row may not be quoted, or an empty string."""
    if result.status != "ok":
        return f"{result.status}: {result.reason}" if result.reason else result.status
    if result.median is not None and not result.median > 0:
        return "suspect: no time has passed"
    if not result.errors:
        return "suspect: no correctness check"
    for name, error in result.errors.items():
        bound = result.tolerance.get(name)
        if bound is None:
            return f"suspect: {name} was checked against no bound"
        if not error <= bound:
            return f"incorrect: {name} is off by {error:.1e}, allowed {bound:.1e}"
    if result.bound_seconds and result.median is not None and result.median < result.bound_seconds:
        return (
            f"suspect: {number(result.median * 1e3)} ms is below its bound of {number(result.bound_seconds * 1e3)} ms"
        )
    peak, floor = result.memory.get("tracked_peak_bytes"), result.memory.get("floor_bytes")
    if peak and floor and peak < floor:
        return f"suspect: a peak of {peak} bytes is smaller than its own tensors, {floor} bytes"
    return ""


def judged(results: Iterable) -> list:
    """The results, those that are superlinear marked as suspect: nobody who reads them can quote one by oversight."""
    results = list(results)
    alone: dict[str, list] = {}
    for r in results:
        if r.point.world_size == 1 and r.median and not objection(r):
            alone.setdefault(_on_one(r.point), []).append(r)
    return [_superlinear(r, _fastest_alone(r, alone)) if r.point.world_size > 1 else r for r in results]


def _on_one(point) -> str:
    """What the rows of one point on any number of ranks have in common."""
    return point.but(world_size=1, options={k: v for k, v in point.options if k not in PLACEMENT}).id


def _fastest_alone(result, alone: dict[str, list]) -> float | None:
    """The fastest time of the work on one rank with at least the threads that each of several has."""
    own = threads(result)
    fit = [r for r in alone.get(_on_one(result.point), ()) if None in (own, threads(r)) or threads(r) >= own]
    return min((r.median for r in fit), default=None)


def threads(result) -> int | None:
    """Those of each rank."""
    return result.ranks.get("threads") or result.provenance.get("threads")


def _superlinear(result, alone: float | None):
    ranks = result.point.world_size
    if alone is None or not result.median or objection(result) or alone / result.median <= SUPERLINEAR * ranks:
        return result
    said = f"{number(alone / result.median)} times faster on {ranks} ranks than on one, over {SUPERLINEAR} × {ranks}"
    return replace(result, status="suspect", reason=f"superlinear: {said}")


def reason(result) -> str:
    """Why a row is not quoted, without its status and without what its own name says already."""
    said = objection(result).partition(": ")[2] or objection(result)
    backend = dict(result.point.options).get("backend")
    return said.rpartition(f": {backend}: ")[2] if backend and said.startswith("backend ") else said


def status(result) -> str:
    """The word for a row that is not quoted."""
    return objection(result).partition(":")[0]
