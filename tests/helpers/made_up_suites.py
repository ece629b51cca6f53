"""Made-up rows of whole suites as a CPU or a GPU would give them, pages of them, and changes of rows."""

import functools
from dataclasses import replace
from pathlib import Path

from reporting import Shown, longer, made_up
from ringlab import hardware
from ringlab.measure import Group, Point, suites
from ringlab.measure.points import Result
from ringlab.report import ledger, optimization
from ringlab.report.documents import DOCUMENTS, published
from ringlab.report.ring import comparison, hybrid, scaling
from ringlab.report.session import document as session
from ringlab.report.study import Study

BY_THEMSELVES = ("cache_workload", "pool_workload")
CALLS = {suites.ORIGINAL: (2318, 1281), suites.OPTIMIZED: (2069, 1200), "ringlab": (174, 122)}
CORES = 2


def document_row(point: Point, group: Group, rehearsal: bool, device: str) -> Result:
    """A row of document 000 as a CPU or, with every kernel, a GPU would give it."""
    options = dict(point.options)
    backend = options.pop("backend", "auto")
    row = made_up(point.but(options=options), group, rehearsal)
    row = replace(row, point=point, provenance=row.provenance | {"device": device})
    if device == "cpu" and backend not in ("auto", "eager", "cpu_flash"):
        reason = f"backend '{backend}' cannot run on cpu in torch.float32: {backend}: needs a CUDA device, this is cpu"
        return replace(row, status="unsupported", reason=reason, errors={}, seconds=(), median=None, ci=None)
    if point.system == "plan_build":
        row = replace(row, memory={"floor_bytes": 0, "tracked_peak_bytes": 0}, bound_seconds=None)
    return longer(row, 2) if backend == "eager" else row


def rank_row(point: Point, group: Group, rehearsal: bool, device: str) -> Result:
    """Ranks divide work and memory, the ring holds two shards more, the all-gather all of them."""
    p = point.world_size
    row = made_up(point.but(world_size=1, options={}), group, rehearsal)
    shard = row.memory["floor_bytes"] // p
    kept = {"RingDilatedAttentionV2Collective": p - 1, "ringlab": 0.2}.get(point.system, 1 if p > 1 else 0)
    memory = {"floor_bytes": shard, "tracked_peak_bytes": int(shard * (1.1 + 0.5 * kept * (p > 1)))}
    about = {}
    if group.ranks > 1:
        sent = [0 if p == 1 else int(shard * (0.1 if point.system == "ringlab" else 0.5 * (p - 1)))] * p
        about = {"threads": 1, "oversubscribed": p > CORES, "bytes_sent": sent, "planned": sent, "messages": [2] * p}
    row = replace(row, point=point, memory=memory, ranks=about, provenance=row.provenance | {"device": device})
    if not row.seconds or about.get("oversubscribed"):
        return replace(row, seconds=(), rounds=(), median=None, ci=None, q1=None, q3=None, bound_seconds=None)
    return longer(row, 1 / p, bound_seconds=row.bound_seconds / p)


def session_row(point: Point, group: Group, rehearsal: bool, device: str) -> Result:
    """Row by row is slow, building is quick, and dense attention takes its pairs' time."""
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
    alone = {"bound_seconds": None, "cost": {}} if point.system in ("plan_build", *BY_THEMSELVES) else {}
    row = longer(row, slow, **alone)
    return replace(row, point=point, memory=memory, provenance=row.provenance | {"device": device})


ROWS = {"000": document_row, "002": session_row}  # of the other documents rank_row


def made(number: str, profile: str = "cpu", rehearsal: bool = False) -> tuple[Result, ...]:
    """Rows of a document's suite, as a profile's own device would give them: the same objects for each call."""
    return _made(number, profile, rehearsal)


@functools.cache
def _made(number: str, profile: str, rehearsal: bool) -> tuple[Result, ...]:
    about = hardware.get_profile(profile)
    device = "cpu" if rehearsal else about.kind
    if (row := ROWS.get(number, rank_row)) is rank_row:
        groups = suites.SUITES[DOCUMENTS[number].suite](hardware.get_profile("cpu"), device="cpu", rehearsal=False)
    else:
        groups = suites.SUITES[DOCUMENTS[number].suite](about, device=device, rehearsal=rehearsal)
    return tuple(row(p, g, rehearsal, device) for g in groups for p in g.points)


PAGES = {"000": optimization, "001": scaling, "002": session, "003": comparison, "004": hybrid}


def study_of(results, profile: str = "cpu", rehearsal: bool = False, suite: str = "") -> Study:
    folder = Path(f"{profile}-rehearsal/data" if rehearsal else f"{profile}/data")
    return Study(hardware.get_profile(profile), list(results), folder, suite=suite)


@functools.cache
def page(number: str, change=None, profile: str = "cpu", rehearsal: bool = False) -> Study:
    """What a document's page is made from: its made-up rows, each after a change."""
    results = made(number, profile, rehearsal)
    return study_of(map(change, results) if change else results, profile, rehearsal, DOCUMENTS[number].suite)


@functools.cache
def shown(number: str, change=None, profile: str = "cpu", rehearsal: bool = False, without=()) -> Shown:
    """All that a document's page shows, ``without`` some of its parts."""
    names = [name for name in PAGES[number].__all__ if name not in ("open_study", "provenance", *without)]
    return Shown(PAGES[number], page(number, change, profile, rehearsal), names)


def words(study: Study, number: str) -> dict[str, str]:
    """The verdict on each claim of a document by these rows."""
    return {claim["key"]: ledger.verdict(study, number, claim).word for claim in published(number)["claims"]}


def on_ranks(result: Result, ranks: int, gain: float, **options) -> Result:
    point = result.point.but(world_size=ranks, options=dict(result.point.options) | options)
    return replace(longer(result, 1 / gain), point=point, bound_seconds=None)


def lean(r: Result, factor: float) -> Result:
    return replace(r, memory=r.memory | {"tracked_peak_bytes": int(r.memory["tracked_peak_bytes"] * factor)})


def slower(factor: float, test):
    """A change of rows: those that ``test`` picks take ``factor`` times as long."""
    return lambda r: longer(r, factor, bound_seconds=None) if test(r) else r


def system(name: str):
    return lambda r: r.point.system == name


def way(name: str, **more):
    return lambda r: r.group == suites.JOURNEY and r.point.system == "ringlab" and (
        dict(r.point.options) == {"blocks": name, **more})  # fmt: skip
