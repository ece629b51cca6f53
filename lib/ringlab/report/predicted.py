"""What was predicted of the rows of a report, beside what was measured: peak memory, bytes between ranks, time bound.

A prediction runs no arithmetic: ``ringlab.estimate``, and the same run without data for systems that are no plain call
of the engine. The rates under the bounds are those that the rows' own bounds were made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .. import Simulated, compat, kernels, memory, patterns, ring, tracking
from ..cost import Cost
from ..engine import Execution
from ..engine.autograd import local_attention
from ..estimate import Estimate, estimate
from ..hardware import Rates
from ..measure.points import Point
from ..measure.systems import BLOCK_SPARSE, PUBLISHED, copying_attention
from ..measure.timing import WARM_TOKENS
from ..meta_run import FirstCall, MetaRun
from .study import cost_of, pattern_of

SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ENGINE = (*PUBLISHED, *BLOCK_SPARSE)
NO_ATTENTION = ("plan_build", "cache_workload", "pool_workload")
NOT_OURS, CHOSEN = "runs outside of this library", "what it reads depends on the data"


@dataclass(frozen=True)
class Prediction:
    """A row and its Estimate."""

    row: object
    estimate: Estimate

    @property
    def peak(self) -> float | None:
        """Predicted peak over the measured one; None where no peak was measured, or only a lower bound is predicted."""
        measured = self.row.memory.get("tracked_peak_bytes")
        return self.estimate.peak_bytes / measured if measured and not self.estimate.at_least else None

    @property
    def time(self) -> float | None:
        """Measured time over the bound; None where there is not both."""
        return self.row.median / self.estimate.bound_s if self.row.median and self.estimate.bound_s else None


def predict(results: Iterable, profile=None) -> list[Prediction]:
    """The predictions of rows that have tensors. ``profile``: of the GPU that they were measured on, None: on a CPU.

    On a CPU, rows of one dtype share the rates that their bounds tell of, and ranks share the machine.
    """
    results = [r for r in results if r.status in ("ok", "suspect") and r.point.system not in NO_ATTENTION]
    rates = {dtype: rates_of([r for r in results if r.point.dtype == dtype])
             for dtype in {r.point.dtype for r in results}}  # fmt: skip
    found = []
    for row in results:
        threads = row.ranks.get("threads") or row.provenance.get("threads") or torch.get_num_threads()
        one = estimate_of(row.point.first, threads, profile and profile.name)
        if profile is None:
            own, p = rates[row.point.dtype], row.point.world_size
            one = one.bounded(Rates(*(rate and rate / p for rate in (own.flops_per_s, own.bytes_per_s))))
        found.append(Prediction(row, one))
    return found


def rates_of(results: Iterable) -> Rates:
    """FLOP/s and bytes/s that the bounds of these rows were made with: a bound is the larger of work over rate, so the
    largest quotient is the rate, or less where that resource never binds, which gives no bound above the row's own."""
    known = [(r.cost, r.bound_seconds) for r in results if r.bound_seconds and r.cost]
    return Rates(*(max((cost[name] / s for cost, s in known if cost.get(name)), default=None)
                   for name in ("folded_flops", "floor_bytes")))  # fmt: skip


@lru_cache(maxsize=512)
def estimate_of(point: Point, threads: int, profile: str | None = None) -> Estimate:
    """The Estimate of a measured point whose ranks have so many threads each; on a CPU without bounds.

    ``at_least`` says why where only inputs and results are counted: systems of others, and torch.sparse.
    """
    with _threads(threads):
        if profile is not None:  # kernels by rule, for calls of the engine alone
            asked = {"ringlab": _ringlab}.get(point.system, _published if point.system in ENGINE else None)
            how = asked(point) if asked else None
            plain = how and how[4] is None and how[1] == getattr(torch, point.dtype)
            try:
                return _engine(point, *how, profile=profile) if plain else _outside(point)
            except NotImplementedError:  # by rule that kernel does not run there, and yet it did
                return _outside(point)
        if point.system == "ringlab":
            return _engine(point, *_ringlab(point))
        if point.system in ENGINE:
            found = _engine(point, *_published(point))
            return found if point.world_size > 1 or point.seq_len > 4 * WARM_TOKENS else _with_probe(point, found)
        if point.system in ("dense_sdpa", "copying", "contiguous_segments", "sgemm") and point.heads == point.kv_heads:
            return _baseline(point)
    return _outside(point)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ringlab(point: Point):
    """What ``measure.systems`` makes of the point: (pattern, dtype, backend, execution, group, scheme, layout)."""
    options = dict(point.options)
    group, threshold = options.pop("simulated", None), options.pop("pool_threshold_mb", None)
    across = options.pop("scheme", "auto"), options.pop("layout", "contiguous")
    backend = options.pop("backend", "auto")
    if threshold is not None:
        options["pool"] = memory.MemoryPool(threshold_bytes=int(threshold * 2**20))
    dtype = getattr(torch, point.dtype)
    return pattern_of(point), dtype, backend, Execution(**options), group and Simulated(group), *across


def _published(point: Point):
    pattern, options = pattern_of(point), dict(point.options)
    size = options.pop("simulated", None) or point.world_size
    options |= {"device": "cpu", "dtype": getattr(torch, point.dtype)} | ({"ring_size": size} if size > 1 else {})
    if point.system in BLOCK_SPARSE:
        module = getattr(compat, point.system)(pattern=pattern, **options)
    else:
        lengths, rates = list(pattern.segment_lengths), list(pattern.dilation_rates)
        module = getattr(compat, point.system)(lengths, rates, **options)
    across = module._ranks(point.seq_len)
    group = across.get("group") if point.world_size == 1 else None
    where = across.get("scheme", "auto"), across.get("layout", "contiguous")
    dtype = module.dtype or getattr(torch, point.dtype)
    return pattern, dtype, module.chain, module.execution, group, *where


def _with_probe(point: Point, found: Estimate) -> Estimate:
    """A short point's first call probes its module's chain of kernels too, for no shorter one came before it."""
    chain = _published(point)[2]
    held = {part: found.parts[part] for part in ("q", "k", "v")}
    if point.passes != "fwd":
        held["gradients"] = found.parts["q"]
    probed = _probed(chain, point.dtype, point.head_dim, point.causal, point.passes != "fwd")
    if sum(held.values()) + probed <= found.peak_bytes:
        return found
    parts = dict.fromkeys(found.parts, 0) | held | {"workspace": probed}
    return replace(found, parts=parts, peak_bytes=sum(parts.values()))


@lru_cache(maxsize=32)
def _probed(chain, dtype: str, head_dim: int, causal: bool, backward: bool) -> int:
    """Bytes at the peak of probing a chain of kernels once."""
    how = {"causal": causal, "backward": backward, "backend": chain}
    kernels.choose("cpu", getattr(torch, dtype), head_dim, **how)  # what is loaded on the way is not counted
    kernels.forget_probes()
    with tracking.LiveStorageTracker() as tracker:
        kernels.choose("cpu", getattr(torch, dtype), head_dim, **how)
    return tracker.peak_bytes


def _shape(point: Point) -> dict:
    names = ("batch", "seq_len", "heads", "kv_heads", "head_dim", "causal", "passes")
    return {name: getattr(point, name) for name in names}


def _engine(point: Point, pattern, dtype, backend, execution, group, scheme, layout, profile=None) -> Estimate:
    given = getattr(torch, point.dtype)
    how = {"backend": backend, "execution": execution, "profile": profile}
    if group is None and dtype == given:
        across = {"ranks": point.world_size, "scheme": scheme, "layout": layout} if point.world_size > 1 else {}
        return estimate(pattern, dtype=dtype, **_shape(point), **across, **how)

    def call(run: MetaRun, q, k, v):
        own = {"causal": point.causal, "scale": point.head_dim**-0.5, "backend": "auto"}
        own["execution"] = FirstCall.of(execution, run)
        args = [t.to(dtype) for t in (q, k, v)]
        if group is None:
            out, lse = local_attention(*args, pattern, **own)
        else:
            out, lse = ring.attend(*args, pattern, group=group, scheme=scheme, layout=layout, **own)
        return out.to(given), lse if point.system == "ringlab" else None

    backward = point.passes != "fwd"
    kernel = kernels.choose(
        "cpu", dtype, point.head_dim, causal=point.causal, backward=backward, backend=backend
    ).kernel
    return _traced(point, cost_of(point), kernel, call)


def _baseline(point: Point) -> Estimate:
    dtype, backward = getattr(torch, point.dtype), point.passes != "fwd"
    kernel = kernels.choose("cpu", dtype, point.head_dim, causal=point.causal, backward=backward).kernel
    pattern, cost, n = pattern_of(point), None, point.seq_len
    shape = (point.batch, n, point.heads, point.head_dim)
    if point.system == "sgemm":
        cost = Cost(0, 0, 2 * n**3, 2 * n**3, 12 * n * n)
        run = MetaRun()
        with run.on(kernel):
            run.name("out", run.tensor("q", (n, n), torch.float32) @ run.tensor("k", (n, n), torch.float32))
        return Estimate(cost, 1, None, run.parts(), run.peak_bytes, {})
    if point.system == "copying":
        return _traced(point, cost_of(point), kernel,
                       lambda run, *qkv: (copying_attention(*qkv, pattern, point.causal, kernel), None))  # fmt: skip
    if point.system == "dense_sdpa":  # which takes this kernel on a CPU

        def dense(run, *qkv):
            return SDPA(*(t.transpose(1, 2) for t in qkv), 0.0, point.causal)[0].transpose(1, 2), None

        return _traced(point, cost_of(point), kernel, dense)
    dilated = isinstance(pattern, patterns.Dilated)
    rows = pattern.segment_lengths[0] // pattern.dilation_rates[0] if dilated else n
    shape = (point.batch * n // rows, point.heads, rows, point.head_dim)
    plain = point.but(pattern=patterns.Dilated([rows], [1]))
    return _traced(point, cost_of(plain), kernel, lambda run, *qkv: (SDPA(*qkv, 0.0, point.causal)[0], None), shape)


def _traced(point: Point, cost: Cost, kernel, call: Callable, shape=None) -> Estimate:
    """A run without data of ``call(run, q, k, v) -> (out, lse or None)`` and of its backward, on one device."""
    run, dtype, backward = MetaRun(), getattr(torch, point.dtype), point.passes != "fwd"
    heads = (point.heads, point.kv_heads, point.kv_heads, point.heads)
    shapes = [shape or (point.batch, point.seq_len, h, point.head_dim) for h in heads]
    made = [run.tensor(part, s, dtype) for part, s in zip(("q", "k", "v", "gradients"), shapes[: 4 if backward else 3])]
    with run.on(kernel):
        qkv = [t.requires_grad_(backward) for t in made[:3]]
        out, lse = call(run, *qkv)
        run.name("out", out)
        run.name("lse", lse)
        if backward:
            run.name("gradients", *torch.autograd.grad(out, qkv, made[3]))
    return Estimate(cost, 1, None, run.parts(), run.peak_bytes, {})


def _outside(point: Point) -> Estimate:
    """Inputs and results of what does not run without data."""
    cost = cost_of(point)
    size = point.batch * point.seq_len * point.head_dim * getattr(torch, point.dtype).itemsize
    parts = {"q": size * point.heads, "k": size * point.kv_heads, "v": size * point.kv_heads, "out": size * point.heads}
    if point.passes != "fwd":
        parts["gradients"] = sum(parts.values())
    parts = dict.fromkeys(("q", "k", "v", "out", "lse", "gradients", "received", "workspace"), 0) | parts
    why = CHOSEN if point.system == "adaptive" else NOT_OURS
    return replace(Estimate(cost, 1, None, parts, sum(parts.values()), {}), at_least=why)
