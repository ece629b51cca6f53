"""What is kept from call to call: the pattern cache cold and warm, and the memory pool by its threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from .. import Execution, attention, memory
from . import figures
from .cells import PEAK, bound, error, ms, peak, times, us
from .engine import lists
from .rows import FULL, SHORT, dense_beside, document_rows, pattern, steps_of, switches
from .study import Study, best, pattern_of
from .tables import Table, Text, number, size
from .trust import objection

MIB = 2**20
DEFAULT_MB = 16.0  # the threshold of the document, and of the library's own pool


def cache_rows(study: Study) -> list[tuple]:
    """(cold row, warm row or None, row of the call that needs these steps or None), by what is built."""
    builds = study.rows(system="plan_build", world_size=1)
    cold = [r for r in builds if not dict(r.point.options)["warm"]]
    found = []
    for r in sorted(cold, key=lambda r: (steps_of(r.point), len(r.point.pattern["segment_lengths"]), r.point.seq_len)):
        options = dict(r.point.options)
        warm = best([x for x in builds if x.point == r.point.but(options=options | {"warm": True})])
        gathered = options.get("gather", False)
        calls = study.rows(system="ringlab", seq_len=r.point.seq_len, pattern=r.point.pattern, passes="fwd",
                           causal=False, batch=1, world_size=1)  # fmt: skip
        calls = [x for x in calls if x.median and _as_called(x.point, gathered)]
        found.append((r, warm, best([x for x in calls if dense_beside(study, x)]) or best(calls)))
    return found


def _as_called(point, gathered: bool) -> bool:
    """By the chosen kernel, and through the same steps."""
    s = switches(point)
    return s["backend"] == "auto" and s["gather"] == gathered and s["cache"] is True


def cache_table(study: Study) -> Table:
    """What a plan costs when it is built, when it is found, and how much of a call that is."""
    rows = []
    for cold, warm, call in cache_rows(study):
        dense = dense_beside(study, call) if call else None
        rows.append([steps_of(cold.point), lists(cold.point), cold.point.seq_len, us(cold), us(warm),
                     _share(cold, call), ms(call), peak(call), ms(dense), peak(dense)])  # fmt: skip
    return study.table(
        "The pattern cache: steps built in every call, and found",
        ["Steps", "Segments / rates", ">Tokens", ">Built (µs)", ">Found (µs)", ">Built, of a call", ">The call (ms)",
         PEAK, ">Dense SDPA (ms)", ">Peak memory, dense"],
        rows or [["not measured", *[None] * 9]],
        note="Built: the cache is cleared before every call. Found: the same call again. Their difference is all that "
        "the cache can save of the forward call beside it.",
    )  # fmt: skip


def _share(cold, call) -> str | None:
    known = call is not None and not objection(cold) and not objection(call) and cold.median and call.median
    return f"{number(100 * cold.median / call.median, 2)} %" if known else None


@dataclass(frozen=True)
class Lent:
    """What a call asks a pool for: its largest buffer, how many came from the pool, and what the pool keeps after."""

    largest: int
    served: int
    asked: int
    kept: int


class _Counting(memory.MemoryPool):
    """A pool that notes the sizes that it is asked for."""

    def __init__(self, threshold_bytes: int):
        super().__init__(threshold_bytes=threshold_bytes)
        self.sizes: list[int] = []

    def lend(self, shape, dtype=torch.float32, device="cpu"):
        self.sizes.append(math.prod(shape) * dtype.itemsize)
        return super().lend(shape, dtype, device)


@cache
def lent(point, threshold_mb: float) -> Lent:
    """What one forward call of a point borrows, counted by making it once on the CPU; sizes are the same on a GPU."""
    pool = _Counting(int(threshold_mb * MIB))
    execution = Execution(gather=switches(point)["gather"], blocks=switches(point).get("blocks", "auto"), pool=pool)
    shape = point.batch, point.seq_len, point.heads, point.head_dim
    q, k, v = torch.zeros(3, *shape, dtype=getattr(torch, point.dtype))
    attention(q, k, v, pattern_of(point), causal=point.causal, execution=execution)
    stats = pool.stats()
    return Lent(max(pool.sizes, default=0), stats.borrows - stats.bypassed, stats.borrows, stats.idle_bytes)


def threshold(point) -> float | None:
    """The threshold of a point's pool in MiB; None without a pool."""
    s = switches(point)
    return float(s.get("pool_threshold_mb", DEFAULT_MB)) if s["pool"] else None


def pool_rows(study: Study) -> list[tuple]:
    """(row without a pool, [(row with one, Ratio or None), ...] by threshold), by call; the document's calls last."""
    ours = study.rows(system="ringlab", world_size=1)
    calls: dict[str, tuple] = {}
    for on in ours:
        plain = on.point.but(options=())
        if "pool_threshold_mb" in switches(on.point):
            calls[plain.id] = (best([r for r in ours if r.point == plain]), [r for r in ours if _thresholds(r, plain)])
    ours = document_rows(study, system="ringlab", dtype="float32")
    for gathered in (True, False):
        off, on = (best([r for r in ours if switches(r.point) == FULL | {"gather": gathered, "pool": pool}])
                   for pool in (False, True))  # fmt: skip
        if on is not None and off is not None:
            calls[off.point.id] = (off, [on])
    found = [(off, sorted(on, key=lambda r: threshold(r.point))) for off, on in calls.values() if off is not None]
    return [(off, [(r, study.ratio(off, r)) for r in on]) for off, on in found]


def _thresholds(result, plain) -> bool:
    return "pool_threshold_mb" in switches(result.point) and result.point.but(options=()) == plain


def name_of(point) -> str:
    """What a call is named in the table and in the figure."""
    many = f"{point.batch} × {point.seq_len:,}" if point.batch > 1 else f"{point.seq_len:,}"
    if point.system != "ringlab":
        return f"Dense SDPA, {SHORT[point.dtype]}, {many} tokens"
    return f"{'Gathered' if switches(point)['gather'] else 'Strided'}, {SHORT[point.dtype]}, {many} tokens"


def _from(point) -> str:
    return "off" if threshold(point) is None else f"from {threshold(point):g} MiB"


def pool_table(study: Study) -> Table:
    """Each threshold beside plain allocation, in time and memory; what is borrowed is counted."""
    rows = []
    for off, pairs in pool_rows(study):
        rows.append([name_of(off.point), "off", None, None, ms(off), None, error(off), bound(off), peak(off), None])
        for on, ratio in pairs:
            use = lent(on.point, threshold(on.point))
            rows.append([
                name_of(on.point), _from(on.point), size(use.largest) if use.asked else "nothing",
                f"{use.served} of {use.asked}", ms(on), times(ratio), error(on), bound(on), peak(on),
                size(use.kept) if use.kept else "nothing",
            ])  # fmt: skip
        dense = dense_beside(study, off)
        if dense is not None:
            rows.append([name_of(dense.point), None, None, None, ms(dense), None, error(dense), bound(dense),
                         peak(dense), None])  # fmt: skip
    return study.table(
        "The memory pool by its threshold",
        ["Call", "Pool", ">Largest buffer asked for", ">Lent by the pool", ">Time (ms)", ">Faster than off", ">Error",
         ">Lower bound (ms)", PEAK, ">Kept between calls"],
        rows or [["not measured", *[None] * 9]],
        note=f"{_pooled(study)}What a call asks for and what the pool keeps are counted in a call made for this page.",
    )  # fmt: skip


def _pooled(study: Study) -> str:
    """Which function the sweep calls."""
    names = {str(pattern_of(off.point)): off.point for off, _ in pool_rows(study) if off.point.batch > 1}
    said = [f"{p.heads} head of {p.head_dim} and {name}" for name, p in names.items()]
    chosen = "chosen for the pool: few products, and an accumulator in fp32 that every call needs"
    return f"The batched calls have {' and '.join(said)}, {chosen}. " if said else ""


def cache_and_pool(study: Study) -> Text:
    """What the cache and the pool come to, each in a line, from the rows."""
    return study.text(_cache_line(study), _pool_line(study), bullets=True)


def _shares(study: Study) -> list[tuple]:
    return [(c.median / call.median, c, call) for c, _, call in cache_rows(study) if _share(c, call)]


def largest_share(study: Study) -> float | None:
    """The largest part of a call that building its plan takes, for the document's pattern."""
    ours = [x for x in _shares(study) if pattern_of(x[1].point) == pattern()]
    return max((share for share, *_ in ours), default=None)


def _cache_line(study: Study) -> str:
    shares = _shares(study)
    if not shares:
        return "**Pattern cache**: not measured."
    share, cold, call = max(shares, key=lambda x: x[0])
    return (
        f"**Pattern cache**: building takes at most {number(100 * share, 2)} % of a call ({steps_of(cold.point)}, "
        f"{cold.point.seq_len:,} tokens: {number(cold.median * 1e6)} µs of {number(call.median * 1e3)} ms), so that no "
        "cache can save more there."
    )


def _pool_line(study: Study) -> str:
    pairs = [(on, x) for _, pairs in pool_rows(study) for on, x in pairs if x is not None]
    lending = [(on, x) for on, x in pairs if lent(on.point, threshold(on.point)).served]
    if not lending:
        return "**Memory pool**: not measured where it lends anything."
    won, lost = (
        [x for _, x in lending if test(x)]
        for test in (lambda x: x.significantly_slower, lambda x: x.significantly_faster)
    )
    middle = sorted(x.value for _, x in lending)
    idle = [x for on, x in pairs if not lent(on.point, threshold(on.point)).served]
    said = (
        f"**Memory pool**: of {len(lending)} calls in which it lends a buffer, {len(won)} are faster than without it, "
        f"{len(lost)} slower, {len(lending) - len(won) - len(lost)} cannot be told apart ({number(middle[0])} to "
        f"{number(middle[-1])} times faster)"
    )
    if not idle:
        return f"{said}."
    low, high = (f(x.value for x in idle) for f in (min, max))
    return f"{said}; where it lends nothing, which is the same work, the factors are {number(low)} to {number(high)}."


def pool_figure(study: Study) -> None:
    """Every threshold against plain allocation, by the names of the table."""
    items, rows = [], []
    for _, pairs in pool_rows(study):
        for on, x in pairs:
            use = lent(on.point, threshold(on.point))
            color = figures.BLUE if use.served else figures.GREY
            name = f"{name_of(on.point)}, {_from(on.point)}"
            known = (x.value, x.low, x.high) if x else (None, None, None)
            items.append(figures.Bar(name, *known, color, missing="not quoted"))
            rows.append([name_of(on.point), _from(on.point), f"{use.served} of {use.asked}", times(x),
                         x.rounds if x else None])  # fmt: skip
    if not items:
        return
    fig = figures.ratios(items, xlabel="Times faster with the pool (line: no difference)")
    said = "; ".join(f"{b.label} {b.value:.3f} times" if b.value else f"{b.label} not quoted" for b in items)
    data = study.table(
        "Data: the pool by its threshold", ["Call", "Pool", ">Lent by the pool", ">Faster than off", ">Rounds"], rows
    )
    caption = "Effect of the memory pool by threshold, with 95 % intervals; grey: it lends nothing there."
    figures.show(fig, "optimization-pool", caption, f"{caption} {said}.", data, stamp=study.stamp)
