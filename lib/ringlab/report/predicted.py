"""What ``ringlab.estimate`` says of points: the rows of a device that is absent, and how
many measured peaks of memory it predicts.

It knows the engine, as it is called or under a published name, each with the settings
of the point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import accumulate

import torch

from .. import compat, kernels, memory
from ..engine import Execution
from ..estimate import Estimate, estimate
from ..hardware import Profile, get_profile
from ..measure.points import Point, Result
from ..measure.suites import ORIGINAL
from ..measure.systems import BLOCK_SPARSE, PUBLISHED
from ..measure.timing import WARM_TOKENS
from ..measure.validity import threads
from .study import Study, cost_of, pattern_of
from .tables import Text, counted

ENGINE = ("ringlab", *PUBLISHED, *BLOCK_SPARSE)
OPERATORS = (
    2000  # of all rows together that a page runs without data, so that it stays quick
)
CLOSE = 0.01  # relative error of a peak that counts as predicted
BLOCKS = 4096  # a block-sparse row beyond would take seconds to plan
ROWS = 128  # of blocks, beyond which a call for each takes seconds without data
OTHER_WORK = (  # than that of their pattern: computed rows of them have no numbers
    *("sgemm", "adaptive", "contiguous_segments", "plan_build"),
    *("cache_workload", "pool_workload", "generation", "packed"),
)


# --------------------------------------------------------------------------------------
# rows of a device that is absent


def rows_of(profile: Profile, groups: Iterable) -> list[Result]:
    """For each point of the groups a row of what the profile's GPU needs at least.

    Its status is "computed", or "unsupported" for a kernel that cannot run there. It
    has no seconds and no errors, but the roofline, the cost, and where they are known
    the peak of memory, the bytes that ranks send, and in its provenance the kernel.
    """
    return [
        replace(row_of(profile.name, p.first), point=p, group=g.name)
        for g in groups
        for p in g.points
    ]


@lru_cache(maxsize=4096)
def row_of(name: str, point: Point) -> Result:
    """The row of one point on the GPU of a profile, in no group."""
    profile = get_profile(name)
    dtype = getattr(torch, point.dtype)
    ranks = point.world_size
    about = {"profile": name, "device": profile.kind, "device_name": profile.title}
    row = Result(point, "", "computed", provenance=about)
    if point.system in OTHER_WORK:
        return row
    work = cost_of(point)
    rates = profile.rates(dtype, work.floor_bytes // ranks)
    row = replace(
        row,
        cost=asdict(work),
        bound_seconds=work.seconds(rates.flops_per_s, rates.bytes_per_s) / ranks
        or None,
        memory={"floor_bytes": work.floor_bytes // ranks},
    )
    blocks = point.seq_len // point.pattern.get("block_size", point.seq_len)
    if blocks > (ROWS if point.system == ORIGINAL else BLOCKS):
        return row
    try:
        found = _estimate(point, name)
    except NotImplementedError as error:  # a kernel that cannot run there
        return replace(row, status="unsupported", reason=str(error))
    if found is None or found.at_least:
        return row
    how = {"causal": point.causal, "for_gradients": point.passes != "fwd"}
    call = profile.kind, profile.capability, dtype, point.head_dim
    shape = point.seq_len, point.heads, point.kv_heads
    how["pattern_kind"] = kernels.kind_of(pattern_of(point), *shape)
    kernel = kernels.expected(*call, **how).name
    sent = Counter()
    for (rank, _), size in found.sent.items():
        sent[rank] += size
    return replace(
        row,
        bound_seconds=found.bound_s or None,
        memory=row.memory | {"tracked_peak_bytes": found.peak_bytes},
        ranks={"bytes_sent": [sent[rank] for rank in range(ranks)]}
        if ranks > 1
        else {},
        provenance=about | {"kernel": kernel},
    )


# --------------------------------------------------------------------------------------
# measured peaks beside predicted ones


def predict(
    results: Iterable, profile: str | None = None
) -> list[tuple[Result, Estimate]]:
    """Rows with a peak and their Estimates. ``profile``: the GPU that they were
    measured on; None: a CPU.
    """
    found = []
    for row in results:
        with suppress(
            NotImplementedError
        ):  # by rule that kernel does not run on the GPU, and yet it did
            if row.memory.get("tracked_peak_bytes") and (
                one := estimate_of(row.point.first, threads(row), profile)
            ):
                found.append((row, one))
    return found


@lru_cache(maxsize=512)
def estimate_of(
    point: Point, threads: int | None, profile: str | None
) -> Estimate | None:
    """The Estimate of a measured point whose ranks have so many threads each; None for
    what is no call of the engine.

    None too for ranks that are simulated in one process, and for a published module on
    a short sequence: its first call also probes the kernels.
    """
    short = (
        point.system != "ringlab"
        and point.world_size == 1
        and point.seq_len <= 4 * WARM_TOKENS
    )
    if point.system not in ENGINE or short:
        return None
    return with_threads(threads, _estimate, point, profile)


def with_threads(threads: int | None, call: Callable, *args, **options):
    """What ``call`` returns where torch has so many threads: plans depend on them. It
    runs in a thread of its own, so that others keep theirs; None: as many as here.
    """
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as one:
        one.submit(torch.set_num_threads, threads or before)
        result = one.submit(copy_context().run, call, *args, **options)
        one.submit(torch.set_num_threads, before)  # what a new thread starts with
    return result.result()


def _estimate(point: Point, profile: str | None) -> Estimate | None:
    if point.system not in (*ENGINE, "dense_sdpa") or "simulated" in dict(
        point.options
    ):
        return None
    settings = {"ringlab": _ringlab, "dense_sdpa": lambda point: {}}
    how = settings.get(point.system, _published)(point)
    if how is None:
        return None
    return estimate(
        pattern_of(point),
        dtype=getattr(torch, point.dtype),
        ranks=point.world_size,
        profile=profile,
        **point.shape,
        **how,
    )


def _ringlab(point: Point) -> dict:
    """What ``measure.systems.ringlab`` makes of the options of a point, as keywords of
    ``estimate``.
    """
    options = dict(point.options)
    how = {
        name: options.pop(name)
        for name in ("backend", "scheme", "layout")
        if name in options
    }
    if (threshold := options.pop("pool_threshold_mb", None)) is not None:
        options["pool"] = memory.MemoryPool(threshold_bytes=int(threshold * 2**20))
    return how | {"execution": Execution(**options)}


def _published(point: Point) -> dict | None:
    """The settings of a published class, which its module has chosen; None for one that
    simulates ranks by itself.
    """
    pattern = pattern_of(point)
    options = {"dtype": getattr(torch, point.dtype), **dict(point.options)}
    if point.system in BLOCK_SPARSE:
        options["pattern"] = pattern
    else:
        options |= {
            "segment_lengths": pattern.segment_lengths,
            "dilation_rates": pattern.dilation_rates,
        }
    if point.world_size > 1:
        options["ring_size"] = point.world_size
    module = getattr(compat, point.system)(device="cpu", **options)
    across = module._ranks(point.seq_len)
    if across.pop("group", None) is not None and point.world_size == 1:
        return None
    return {"backend": module.chain, "execution": module.execution, **across}


def compared(study: Study) -> tuple[list[tuple[Result, float]], int]:
    """([(row, relative error of its predicted peak)], rows left out for their many
    operators); few operators first.
    """
    rows = [
        r
        for r in study.good
        if r.memory.get("tracked_peak_bytes") and not r.option("twin")
    ]
    rows = sorted(
        (r for r in rows if r.point.system in ENGINE),
        key=lambda r: r.memory.get("operator_calls") or 0,
    )
    spent = accumulate(r.memory.get("operator_calls") or 0 for r in rows)
    kept = [
        r
        for r, calls in zip(rows, spent)
        if calls <= OPERATORS
        and r.point.seq_len // r.point.pattern.get("block_size", r.point.seq_len)
        <= BLOCKS
    ]
    found = predict(kept, study.profile.name if study.device_type == "cuda" else None)
    over = [
        (r, x.peak_bytes / r.memory["tracked_peak_bytes"] - 1)
        for r, x in found
        if not x.at_least
    ]
    return over, len(rows) - len(kept)


def accuracy(study: Study) -> Text:
    """In a sentence how many peaks ``estimate`` predicts to 1 %, and which it does not."""
    over, left = compared(study)
    if not over:
        return Text(["Nothing was measured to set a prediction of memory beside."])
    off = [
        f"{r.point.system}, {r.point.seq_len:,} tokens on {counted(r.point.world_size, 'rank')} "
        f"({100 * x:+.1f} %)"
        for r, x in over
        if abs(x) > CLOSE
    ]
    exceptions = f"; not of {'; '.join(off)}" if off else ""
    many = (
        f" Not predicted: {counted(left, 'row')} whose calls have many operators."
        if left
        else ""
    )
    said = f"`ringlab.estimate` predicts {len(over) - len(off)} of {counted(len(over), 'peak')} of memory to 1 %"
    return Text([f"{said}, without running the calls{exceptions}.{many}"])
