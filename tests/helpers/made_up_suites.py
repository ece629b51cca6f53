"""Made-up rows of whole suites, as a CPU or a GPU would give them, and changes of rows, for the tests of reports."""

import functools
from dataclasses import replace

from reporting import made_up
from ringlab import hardware
from ringlab.measure import Group, Point, suites
from ringlab.measure.points import Result

BY_THEMSELVES = ("cache_workload", "pool_workload")
CALLS = {suites.ORIGINAL: (2318, 1281), suites.OPTIMIZED: (2069, 1200), "ringlab": (174, 122)}
CORES = 2


def document_row(point: Point, group: Group, rehearsal: bool, device: str) -> Result:
    """A made-up row as a CPU or, with every kernel, a GPU would give it."""
    options = dict(point.options)
    backend = options.pop("backend", "auto")
    row = made_up(point.but(options=options), group, rehearsal)
    row = replace(row, point=point, provenance=row.provenance | {"device": device})
    if device == "cpu" and backend not in ("auto", "eager", "cpu_flash"):
        reason = f"backend '{backend}' cannot run on cpu in torch.float32: {backend}: needs a CUDA device, this is cpu"
        return replace(row, status="unsupported", reason=reason, errors={}, seconds=(), median=None, ci=None)
    if backend == "eager":
        row = times_longer(row, 2)
    if point.system == "plan_build":
        row = replace(row, memory={"floor_bytes": 0, "tracked_peak_bytes": 0}, bound_seconds=None)
    return row


def times_longer(result: Result, factor: float, **changes) -> Result:
    scaled = {k: getattr(result, k) * factor for k in ("median", "q1", "q3")}
    scaled |= {k: tuple(x * factor for x in getattr(result, k)) for k in ("ci", "seconds")}
    return replace(result, **scaled | changes)


def on_ranks(result: Result, ranks: int, gain: float, **options) -> Result:
    point = result.point.but(world_size=ranks, options=dict(result.point.options) | options)
    return times_longer(result, 1 / gain, point=point, bound_seconds=None)


def rank_row(point: Point, group: Group, *_) -> Result:
    """A made-up row: ranks divide work and memory, the ring holds two shards more, the all-gather all of them."""
    p = point.world_size
    row = made_up(point.but(world_size=1, options={}), group, rehearsal=False)
    shard = row.memory["floor_bytes"] // p
    kept = {"RingDilatedAttentionV2Collective": p - 1, "ringlab": 0.2}.get(point.system, 1 if p > 1 else 0)
    memory = {"floor_bytes": shard, "tracked_peak_bytes": int(shard * (1.1 + 0.5 * kept * (p > 1)))}
    about = {}
    if group.ranks > 1:
        sent = [0 if p == 1 else int(shard * (0.1 if point.system == "ringlab" else 0.5 * (p - 1)))] * p
        about = {"threads": 1, "oversubscribed": p > CORES, "bytes_sent": sent, "planned": sent, "messages": [2] * p}
    row = replace(row, point=point, memory=memory, ranks=about)
    if not row.seconds or about.get("oversubscribed"):
        return replace(row, seconds=(), rounds=(), median=None, ci=None, q1=None, q3=None, bound_seconds=None)
    return times_longer(row, 1 / p, bound_seconds=row.bound_seconds / p)


def lean(r: Result, factor: float) -> Result:
    return replace(r, memory=r.memory | {"tracked_peak_bytes": int(r.memory["tracked_peak_bytes"] * factor)})


def on_gpu(r: Result) -> Result:
    return replace(r, provenance=r.provenance | {"device": "cuda"})


def session_row(point: Point, group: Group, rehearsal: bool = False, device: str = "cpu") -> Result:
    """A made-up row: row by row is slow, building is quick, and dense attention takes its pairs' time."""
    row = made_up(point.but(options={}), group, rehearsal)
    options = dict(point.options)
    way = options.get("blocks", {suites.ORIGINAL: "rows", suites.OPTIMIZED: "batched"}.get(point.system))
    slow = {"rows": 2.2, "batched": 2.1}.get(way, 1.0) * (1.05 if options.get("cache") is False else 1.0)
    slow *= {suites.TORCH_SPARSE: 6.0, "flex": 1.3}.get(point.system, 1.0)
    if point.system == "plan_build":
        slow = (1e-5 if options["warm"] else 5e-3) / row.median
    if point.system in BY_THEMSELVES:
        slow = (0.01 if options.get("pool") or options.get("max_mb") else 0.2) / row.median
    calls, views = CALLS.get(point.system, (12, 8))
    memory = row.memory | {"operator_calls": calls, "view_calls": views}
    if point.system == "cache_workload":
        hits = 176 if options["max_mb"] else 0
        memory |= {"cache_hits": hits, "cache_misses": 200 - hits, "cache_evictions": 0, "cache_bytes": 543_210}
    elif point.system == "pool_workload":
        memory |= {"pool_reuses": 7, "pool_allocations": 1, "pool_bytes": options["size_mb"] * 2**20}
    if row.seconds:
        row = times_longer(row, slow)
        if point.system in ("plan_build", *BY_THEMSELVES):
            row = replace(row, bound_seconds=None, cost={})
    return replace(row, point=point, memory=memory, provenance=row.provenance | {"device": device})


def rows_of(suite: str, row, name: str, device: str, rehearsal: bool = False) -> tuple[Result, ...]:
    groups = suites.SUITES[suite](hardware.get_profile(name), device=device, rehearsal=rehearsal)
    return tuple(row(p, g, rehearsal, device) for g in groups for p in g.points)


@functools.cache
def document_suite(name: str = "cpu", rehearsal: bool = False) -> tuple[Result, ...]:
    device = "cpu" if rehearsal else hardware.get_profile(name).kind
    return rows_of("optimization", document_row, name, device, rehearsal)


@functools.cache
def rank_suite(name: str) -> tuple[Result, ...]:
    return rows_of(name, rank_row, "cpu", "cpu")


@functools.cache
def session_suite(name: str = "cpu", device: str = "cpu", rehearsal: bool = False) -> tuple[Result, ...]:
    return rows_of("session_summary", session_row, name, device, rehearsal)


def slower(factor: float, test):
    """A change of rows: those that ``test`` picks take ``factor`` times as long."""
    return lambda r: times_longer(r, factor, bound_seconds=None) if r.seconds and test(r) else r


def system(name: str):
    return lambda r: r.point.system == name


def way(name: str, **more):
    return lambda r: r.group == suites.JOURNEY and r.point.system == "ringlab" and (
        dict(r.point.options) == {"blocks": name, **more})  # fmt: skip
