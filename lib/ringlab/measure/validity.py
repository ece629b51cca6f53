"""Which rows may be quoted: one rule for the run that measures, for pages and for
comparisons.

No time without a passed check, none that is faster than its bound, no peak smaller than
its own tensors, no speed-up on p ranks beyond 1.1 p. A row that was computed is shown as
such; it is never timed and enters no ratio.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from .points import Result

SUPERLINEAR = 1.1  # times the number of ranks; caches may add a little, never more
PLACEMENT = (
    "group",
    "layout",
    "scheme",
)  # options that say how ranks share a point's work, not which work it is


def why_not_quotable(result) -> str:
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
    peak = result.memory.get("tracked_peak_bytes")
    floor = result.memory.get("floor_bytes")
    if peak and floor and peak < floor:
        return f"suspect: a peak of {peak} bytes is smaller than its own tensors, {floor} bytes"
    bound = result.bound_seconds or 0
    if result.median and result.median < bound:
        return (
            f"suspect: {result.median * 1e3:.3g} ms is below its bound of "
            f"{bound * 1e3:.3g} ms"
        )
    return ""


def mark_superlinear(results: Iterable) -> list:
    """The results, those that are superlinear marked as suspect: nobody who reads them
    can quote one by oversight.
    """
    results = list(results)
    alone: dict[str, list] = defaultdict(list)
    for r in results:
        if r.point.world_size == 1 and r.median and not why_not_quotable(r):
            alone[_on_one(r.point)].append(r)
    return [
        r if r.point.world_size == 1 else _superlinear(r, alone[_on_one(r.point)])
        for r in results
    ]


def _on_one(point) -> str:
    """What the rows of one point on any number of ranks have in common."""
    return point.but(
        world_size=1, options={k: v for k, v in point.options if k not in PLACEMENT}
    ).id


def threads(result) -> int | None:
    """Those of each rank."""
    return result.ranks.get("threads") or result.provenance.get("threads")


def roofline_s(result) -> float | None:
    """The shortest time in seconds that the device's rates allow, of a CPU's for the
    threads of the row.
    """
    bound = result.bound_seconds
    # The rates under a stored roofline are those of all threads of the machine.
    every = result.provenance.get("threads")
    own = (threads(result) or 0) * result.point.world_size
    if bound and every and own and result.provenance.get("device") == "cpu":
        bound /= min(own / every, 1)
    return bound


def _superlinear(result, alone: Iterable):
    """A result on several ranks beside the rows ``alone`` on one that have at least the
    threads of each of them.
    """
    own = threads(result)
    ranks = result.point.world_size
    times = [r.median for r in alone if None in (own, threads(r)) or threads(r) >= own]
    if not times or not result.median or why_not_quotable(result):
        return result
    speedup = min(times) / result.median
    if speedup <= SUPERLINEAR * ranks:
        return result
    why = (
        f"superlinear: {speedup:.3g} times faster on {ranks} ranks than on one, over "
        f"{SUPERLINEAR} × {ranks}"
    )
    return replace(result, status="suspect", reason=why)


def reason(result) -> str:
    """Why a row is not quoted, without its status and without what its own name says
    already.
    """
    text = why_not_quotable(result)
    text = text.partition(": ")[2] or text
    backend = result.option("backend")
    if backend and text.startswith("backend "):
        text = text.rpartition(f": {backend}: ")[2]
    return text


def status(result) -> str:
    """The word for a row that is not quoted."""
    return why_not_quotable(result).partition(":")[0]


def is_row(x) -> bool:
    """Whether there is a row: not None, nor pandas' NaN."""
    return isinstance(x, Result)


def computed(row) -> bool:
    """It says what a device that is not here needs at least; nothing was measured."""
    return is_row(row) and row.status == "computed"


def shown(row) -> bool:
    return is_row(row) and (computed(row) or not why_not_quotable(row))


def simulated(row) -> bool:
    """Its ranks are no processes, so that it has no time and no memory of a rank."""
    return row.option("simulated") is not None


def timed(row) -> bool:
    """It has a time to compare: a process and a core for each rank, and a passed check."""
    return (
        is_row(row)
        and not why_not_quotable(row)
        and bool(row.median)
        and not simulated(row)
        and not row.ranks.get("oversubscribed")
    )
