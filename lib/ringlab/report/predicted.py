"""Computed rows, by ``ringlab.estimate``: those of a device that is absent, and how
many measured peaks of memory they predict.

It knows the engine, as it is called or under a published name, each with the settings
of the point; no way of ``baselines``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import accumulate

import torch

from ..estimate import Estimate, estimate_call
from ..hardware import Profile, get_profile
from ..hardware.profiles import has_tensor_cores
from ..measure.points import Point, Result
from ..measure.systems import (
    BLOCK_SPARSE,
    PUBLISHED,
    published_module,
    ringlab_call,
    way_of,
)
from ..measure.validity import threads, why_not_quotable
from .study import Study
from .tables import Text, counted

ENGINE = {"ringlab", *PUBLISHED, *BLOCK_SPARSE}
OPERATORS = (
    2000  # of all rows together that a page runs without data, so that it stays quick
)
PEAK = "tracked_peak_bytes"  # of a row's memory
CLOSE = 0.01  # relative error of a peak that counts as predicted
BLOCKS = 4096  # a block-sparse row beyond would take seconds to plan
OTHER_WORK = (  # than that of their pattern: computed rows of them have no numbers
    *("adaptive", "contiguous_segments", "plan_build", "generation", "packed"),
    *("moba", "nsa", "dsa", "vertical_slash"),
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
        replace(row_of(profile.name, p.without_control), point=p, group=g.name)
        for g in groups
        for p in g.points
    ]


@lru_cache(maxsize=4096)
def row_of(name: str, point: Point) -> Result:
    """The row of one point on the GPU of a profile, in no group."""
    profile = get_profile(name)
    ranks = point.world_size
    origin = {"profile": name, "device": profile.kind, "computed": True}
    origin |= {"device_name": profile.title}
    row = Result(point, "", "computed", provenance=origin)
    if point.system in OTHER_WORK:
        return row
    if point.system == "flex" and not has_tensor_cores(profile.capability):
        why = "FlexAttention needs Triton, which needs compute capability 7.0"
        return replace(row, status="unsupported", reason=why)
    call = replace(point.call(), profile=profile)
    work = call.cost()
    floor_bytes = work.floor_bytes // ranks
    rates = profile.rates(call.dtype, floor_bytes)
    bound_s = work.seconds(rates.flops_per_s, rates.bytes_per_s) / ranks or None
    memory = {"floor_bytes": floor_bytes}
    row = replace(row, cost=asdict(work), bound_seconds=bound_s, memory=memory)
    if blocks_of(point) > BLOCKS:
        return row
    try:
        estimated = _estimate(point, name)
    except NotImplementedError as error:  # a kernel that cannot run there
        return replace(row, status="unsupported", reason=str(error))
    if estimated is None:
        return row
    kernel = call.kernel_choice(for_gradients=call.backward).name
    return replace(
        row,
        bound_seconds=estimated.bound_s or None,
        memory=memory | {PEAK: estimated.peak_bytes},
        ranks={"bytes_sent": estimated.sent_by_rank} if ranks > 1 else {},
        provenance=origin | {"kernel": kernel},
    )


def blocks_of(point: Point) -> int:
    """The blocks of a block-sparse pattern at the point's length; 1 of another."""
    return point.seq_len // point.pattern.get("block_size", point.seq_len)


# --------------------------------------------------------------------------------------
# measured peaks beside predicted ones


def predict(
    results: Iterable, profile: str | None = None
) -> list[tuple[Result, Estimate]]:
    """Rows with a peak and their Estimates. ``profile``: the GPU that they were
    measured on; None: a CPU.
    """
    pairs = []
    for row in results:
        # By rule that kernel may not run on the GPU, and yet it did.
        with suppress(NotImplementedError):
            if row.memory.get(PEAK):
                call = row.point.without_control, threads(row), profile
                if estimated := estimate_of(*call):
                    pairs.append((row, estimated))
    return pairs


@lru_cache(maxsize=512)
def estimate_of(
    point: Point, threads: int | None, profile: str | None
) -> Estimate | None:
    """Return the Estimate of a measured point whose ranks have so many threads each;
    None for what is no call of the engine, and for ranks simulated in one process.
    """
    if point.system not in ENGINE:
        return None
    with with_threads(threads):
        return _estimate(point, profile)


@contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Inside torch has so many threads: plans depend on them. None: as many as here."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _estimate(point: Point, profile: str | None) -> Estimate | None:
    call = {}
    way = None
    if point.system == "ringlab":
        call = ringlab_call(point)
        way = way_of(point)
    elif point.system in ENGINE:
        module = published_module(point, "cpu", ring_size=point.world_size)
        call = module._ranks(point.seq_len)
        way = module.way
        call = call | {"backend": module.chain, "execution": module.execution}
    elif point.system != "dense_sdpa":
        return None
    if way is not None:
        return None  # a baseline, which no estimate knows
    if point.world_size == 1 and (
        "simulated" in dict(point.options) or "group" in call
    ):
        return None  # it simulates ranks in one process
    call.pop("group", None)
    return estimate_call(replace(point.call(), profile=profile, **call))


def accuracy(study: Study) -> Text:
    """In a sentence how many peaks ``estimate`` predicts to 1 %, and which it does not;
    those of few operators, as others take long.
    """

    def operators(row) -> int:
        return row.memory.get("operator_calls") or 0

    rows = [r for r in study.rows(system=[*ENGINE]) if not why_not_quotable(r)]
    rows = sorted((r for r in rows if r.memory.get(PEAK)), key=operators)
    kept = [
        r
        for r, calls in zip(rows, accumulate(map(operators, rows)))
        if calls <= OPERATORS and blocks_of(r.point) <= BLOCKS
    ]
    left = len(rows) - len(kept)
    pairs = predict(kept, study.profile.name if study.device_type == "cuda" else None)
    errors = [(r, x.peak_bytes / r.memory[PEAK] - 1) for r, x in pairs]
    if not errors:
        return Text([])
    off = [
        f"{r.point.system}, {r.point.seq_len:,} tokens on {counted(r.point.world_size, 'rank')} "
        f"({100 * x:+.1f} %)"
        for r, x in errors
        if abs(x) > CLOSE
    ]
    line = (
        f"`ringlab.estimate` predicts {len(errors) - len(off)} of {counted(len(errors), 'peak')} of memory to 1 %, "
        f"without running the calls{'; not of ' * bool(off)}{'; '.join(off)}."
    )
    if left:
        line += (
            f" Not predicted: {counted(left, 'row')} whose calls have many operators."
        )
    return Text([line])
