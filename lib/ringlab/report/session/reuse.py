"""What is kept from call to call under block-sparse patterns: a cache where many are looked up, and a pool."""

from __future__ import annotations

from dataclasses import replace

from ...measure import cache_systems
from ...measure import suites as suite
from ...measure.points import Point
from ..cells import error, times, us
from ..reuse import lent
from ..study import Study
from ..tables import Table, size
from ..trust import objection
from . import rows

SHORT = 512  # tokens of a call that is made to see what it borrows


def each(row, count: int):
    """A row with the time of one of ``count`` alike things that its call does."""
    if row is None or not row.median:
        return row
    times_ = {"median": row.median / count, "ci": tuple(x / count for x in row.ci)}
    return replace(row, **times_)


def lookups(study: Study, way: str, max_mb: float):
    """The row of a cache of so many MiB."""
    return rows.one(study, suite.SESSION_REUSE, "cache_workload", {"blocks": way, "max_mb": max_mb})


def counted(row, name: str) -> int | None:
    return None if row is None or objection(row) else row.memory.get(name)


def cache_workload(study: Study) -> Table:
    """Hits, misses, evictions and time per lookup by the bytes that the cache may hold."""
    lines = []
    shown = [("batched", mb) for mb in suite.CACHES_MB] + [("views", suite.CACHES_MB[-1])]
    nothing = lookups(study, "batched", 0)
    for way, mb in shown:
        row = lookups(study, way, mb)
        if row is None:
            continue
        hits, misses, evictions, held = (counted(row, f"cache_{x}") for x in ("hits", "misses", "evictions", "bytes"))
        known = None not in (hits, misses)
        lines.append([
            way, f"{mb:g} MiB" if mb else "keeps nothing", hits, misses, evictions,
            rows.percent(hits / (hits + misses)) if known else None, size(held) if held is not None else None,
            us(each(row, cache_systems.LOOKUPS)), times(study.ratio(nothing, row)) if way == "batched" and mb else None,
            error(row),
        ])  # fmt: skip
    drawn = cache_systems.workload(Point("cache_workload", suite.WINDOW, seq_len=suite.LOOKED_UP))
    return study.table(
        f"The pattern cache where {len(set(drawn))} patterns are looked up {len(drawn)} times",
        ["Way", "The cache may hold", ">Hits", ">Misses", ">Evictions", ">Hit rate", ">Held at the end",
         ">A lookup (µs)", ">Faster than keeping nothing", ">Error"],
        lines or [["not measured", *[None] * 9]],
        note=f"Six kinds of pattern at four lengths up to {suite.LOOKED_UP:,} tokens, drawn by a Zipf law with a fixed "
        "seed, each time from an empty cache; the row that keeps nothing builds in every lookup. What is kept of views "
        "is a list of calls, and only keys that are copied are tensors, whose bytes the bound counts. The error is the "
        "share of lookups whose calls differ from those built anew.",
    )  # fmt: skip


def pool_workload(study: Study) -> Table:
    """Scratch from a pool beside fresh memory, by size and by threads."""
    lines = []
    for mb in suite.SCRATCH_MB:
        for threads in suite.THREADS:
            off, on = (rows.one(study, suite.SESSION_REUSE, "pool_workload",
                                {"size_mb": mb, "threads": threads, "pool": pool})
                       for pool in (False, True))  # fmt: skip
            if off is None and on is None:
                continue
            reuses, made, kept = (counted(on, f"pool_{x}") for x in ("reuses", "allocations", "bytes"))
            lines.append([
                f"{mb:g} MiB", threads, us(each(off, cache_systems.BORROWS)), us(each(on, cache_systems.BORROWS)),
                times(study.ratio(off, on)), f"{reuses} of {reuses + made}" if None not in (reuses, made) else None,
                size(kept) if kept is not None else None, error(on),
            ])  # fmt: skip
    half = Point("ringlab", suite.WINDOW, seq_len=SHORT, heads=1, dtype="bfloat16")
    asked = [lent(half.but(options={"blocks": way}), 0.0).asked for way in ("views", "batched")]
    named = f"{max(asked)} buffer{'' if max(asked) == 1 else 's'}"
    return study.table(
        "Scratch from the pool, and fresh, by size and threads",
        [">Size", ">Threads", ">Fresh (µs)", ">From the pool (µs)", ">Faster with it", ">Reused", ">Kept", ">Error"],
        lines or [["not measured", *[None] * 7]],
        note=f"Each thread takes scratch {cache_systems.BORROWS} times, writes every byte once and gives it back; the "
        "time is that of one such turn. Fresh: `torch.empty`. Reused and kept: of a first call. A block-sparse call in "
        f"half precision, by views or batched, takes at most {named} from a pool (counted for this page); dilated "
        "patterns: see `optimization_results`.",
    )  # fmt: skip
