"""How a call runs on one device: a class for each way, and ``way_of``, which chooses
the kernel and the way. What decides is asked once, and the way is remembered; plans and
index tensors are those of the call's cache.

Each way has ``forward(inputs, scale, call)`` of (q, k, v), which gives out (b, n,
h, d) and lse (b, h, n), and ``backward(dlse, reads, scale, call)`` of (dout, q, k,
v, out, lse), which gives dq, dk, dv; dlse is None unless the way ``takes_dlse``.
``scale`` is positive, and the last dimension of all tensors is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..block_patterns import BlockSparse
from ..checks import Backend
from ..kernels.base import PRETENDED, DeviceSpec, Kernel
from ..kernels.triton import interpreted
from ..patterns import Dilated, Pattern
from ..torch_private import outside_modes
from ..tracking import is_out_of_memory
from . import DEFAULT, Execution, blocks, dilated, execute
from .documents import Documents
from .execute import Planner
from .walk import Walked


@dataclass(frozen=True)
class WholePattern:
    """One kernel runs the pattern as it is."""

    kernel: Kernel
    pattern: Pattern
    causal: bool
    takes_dlse = True

    def forward(self, inputs, scale: float, call: LocalCall):
        options = self.pattern, self.causal, scale, call.execution.cached
        return self.kernel.attend(*inputs, *options)

    def backward(self, dlse, reads, scale: float, call: LocalCall):
        dout, *others = reads
        options = self.pattern, self.causal, scale, call.execution.cached
        return self.kernel.gradients(dout, dlse, *others, *options)


@dataclass(frozen=True)
class Planned:
    """Dense calls, merged one after the other. ``other_keys``: k and v are not at the
    positions of the queries.
    """

    kernel: Kernel
    planner: Planner
    causal: bool
    other_keys: bool = False
    takes_dlse = False

    def forward(self, inputs, scale: float, call: LocalCall):
        q, k, v = inputs
        execution = call.execution
        plan = self.planner.plan(q, k.shape[2], execution.cached, backward=False)
        options = plan, self.causal, scale, self.kernel
        lent = {"pool": execution.scratch(), "results": execution.results_of(q)}
        return execute.forward(q, k, v, *options, **lent)

    def backward(self, dlse, reads, scale: float, call: LocalCall):
        _, q, k, v, _, lse = reads
        execution = call.execution
        plan = self.planner.plan(q, k.shape[2], execution.cached, backward=True)
        options = plan, self.causal, scale, self.kernel
        pool = execution.scratch()
        if not self.other_keys:
            return execute.backward(*reads, *options, pool=pool)
        make = partial(torch.zeros, dtype=lse.dtype, device=q.device)
        into = [make(t.shape) for t in (q, k, v)]
        grads = execute.backward(*reads, *options, into=into, pool=pool)
        return tuple(grad.to(q.dtype) for grad in grads)


@dataclass(frozen=True)
class MergedOnce:
    """Dense calls, whose results one kernel merges; ``in_turn`` where memory runs out:
    that holds less.
    """

    in_turn: Planned
    planner: Planner
    takes_dlse = False

    def forward(self, inputs, scale: float, call: LocalCall):
        try:
            return _fused_merge().forward(*inputs, *self._options(scale, call))
        except torch.OutOfMemoryError:
            kernels.LOG.warning(OUT_OF_MEMORY)
        return self.in_turn.forward(inputs, scale, call)

    def backward(self, dlse, reads, scale: float, call: LocalCall):
        try:
            return _fused_merge().backward(*reads, *self._options(scale, call))
        except torch.OutOfMemoryError:
            kernels.LOG.warning(OUT_OF_MEMORY)
        return self.in_turn.backward(dlse, reads, scale, call)

    def _options(self, scale: float, call: LocalCall) -> tuple:
        cached = call.execution.cached
        way = self.in_turn
        return self.planner.whole(cached), way.causal, scale, way.kernel, cached


OUT_OF_MEMORY = "one merge is out of memory: calls are merged in turn"


class LocalCall(NamedTuple):
    """All of a checked call but its tensors and its ranks. ``softcap``: scores are
    ``softcap * tanh(s / softcap)``.
    """

    pattern: Pattern
    causal: bool
    scale: float
    backend: Backend
    execution: Execution
    softcap: float | None = None
    documents: Documents | None = None


Way = WholePattern | Planned | MergedOnce | Walked


def way_of(
    q: Tensor,
    k: Tensor,
    call: LocalCall,
    differentiable: bool,
    for_gradients: bool = False,
) -> Way:
    """How a call runs, without its documents. ``differentiable``: its backward must run, too;
    ``for_gradients``: the way is that of the backward.

    A way is remembered until ``kernels.forget_probes``, but not on a pretended device.
    Raises what ``kernels.choose`` raises.
    """
    choose = _kept_way if PRETENDED.get() is None else _way
    sizes = *q.shape[1:], *k.shape[1:3]
    options = call.pattern, call.causal, call.backend, call.softcap
    switches = call.execution.switches
    passes = differentiable, for_gradients
    return choose(sizes, q.dtype, q.device, *options, switches, *passes)


def _way(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    pattern: Pattern,
    causal: bool,
    backend,
    softcap: float | None,
    switches: Execution,
    differentiable: bool,
    for_gradients: bool,
) -> Way:
    n, heads, head_dim, keys, kv_heads = sizes
    here = n == keys
    place = (PRETENDED.get() or (device,))[0]
    shape = (n, heads, kv_heads)
    options = {"causal": causal, "backward": differentiable, "backend": backend}
    if place.type == "cpu" and switches.tile is None:
        if kernels.choose(device, dtype, head_dim, **options).kernel.name == "compiled":
            return Walked(pattern, causal, softcap)
    whole = here and switches.tile is None  # nothing cuts the pattern up
    options["softcap"] = softcap
    if whole and place.type == "cuda":
        options["pattern_kind"] = kernels.kind_of(pattern, *shape)
        options["for_gradients"] = for_gradients
    kernel = kernels.choose(device, dtype, head_dim, **options).kernel
    if whole and kernel.whole_patterns:
        return WholePattern(kernel, pattern, causal)
    kernel = switches.tiled(kernel)
    if not here and not isinstance(pattern, BlockSparse):
        planner = dilated.cross_planner(n, keys, heads, kv_heads, causal)
        return Planned(kernel, planner, causal, other_keys=True)
    way = in_turn(pattern, *shape, causal, kernel)
    several = isinstance(pattern, Dilated) and len(pattern.segment_lengths) > 1
    if several and whole and not switches.pool:  # no option asks for less memory
        if _merges_once(kernel, place, device, dtype):
            return MergedOnce(way, way.planner)
    return way


_kept_way = kernels.until_forgotten(_way)


def in_turn(
    pattern: Pattern, n: int, heads: int, kv_heads: int, causal: bool, kernel: Kernel
) -> Planned:
    """Return how a pattern runs by dense calls on views, branch by branch."""
    shape = pattern, n, heads, kv_heads
    planner = (
        blocks.planner(*shape, causal)
        if isinstance(pattern, BlockSparse)
        else dilated.planner(*shape)
    )
    return Planned(kernel, planner, causal)


def _fused_merge():
    """The module of the merging kernel, which loads Triton."""
    from ..kernels import fused_merge

    return fused_merge


def _merges_once(
    kernel: Kernel, place: torch.device | DeviceSpec, device: torch.device, dtype
) -> bool:
    """Whether one kernel merges the results of all calls: where it works, and the dense
    kernel stores no scores.
    """
    if not (place.type == "cuda" or interpreted()):
        return False  # before Triton is loaded
    if kernel.name == "eager" or _fused_merge().refuses(place, dtype) is not None:
        return False
    # A run without data is of hardware that need not be here.
    return device.type == "meta" or _merge_works(device, dtype)


@kernels.until_forgotten
def _merge_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the merging kernel gives what calls one after the other give; a failure
    is logged.
    """
    kernel = kernels.KERNELS["eager"]
    generator = torch.Generator().manual_seed(0)
    with outside_modes(), torch.no_grad():
        q, dout, k, v = (
            torch.randn(2, 128, heads, 16, generator=generator).to(device, dtype)
            for heads in (2, 2, 1, 1)
        )
        # A segment that is the whole sequence, too.
        pattern = Dilated([32, 128], [1, 2])
        call = (True, 0.25, kernel)
        plan = dilated.make_plan(pattern, 128, 2, 1)
        expected = execute.forward(q, k, v, plan, *call)
        tensors = dout, q, k, v, *expected
        expected += execute.backward(*tensors, plan, *call)
        try:
            module = _fused_merge()
            cached = DEFAULT.cached
            merged = module.forward(q, k, v, plan, *call, cached)
            merged += module.backward(*tensors, plan, *call, cached)
            off = max(
                float((x - y).norm() / y.norm()) for x, y in zip(merged, expected)
            )
            works = off <= kernels.PROBE_ERROR.get(dtype, 0.05)
            why = f"its results are off by {off:.1e}"
        except Exception as failure:  # Triton's and its compilers' are of any kind
            if is_out_of_memory(failure):
                raise
            works = False
            why = " ".join(str(failure).split())[:200]
    if not works:
        kernels.LOG.warning(f"branches are merged one after the other: {why}")
    return works
