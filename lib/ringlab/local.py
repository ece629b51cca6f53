"""Attention on one device: the autograd rule, and the choice between the strided and the plain path."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from . import block_sparse, fused, gather, kernels, memory, strided
from . import cache as caches
from .checks import known, shown, whole
from .kernels import triton_op
from .kernels.base import device_type_of
from .patterns import BlockSparse, Pattern
from .tiles import Ladder, Tiled

MERGES = ("auto", "eager", "fused")
IN_GRAPHS = torch.__version__ >= (2, 13)  # compilers before it take no pattern as a constant of a graph


@dataclass(frozen=True)
class Execution:
    """The switches of one call; none of them changes a value.

    ``gather``: index-select copies instead of strided views. ``cache``: keep plans and index tensors (True: the global
    pattern cache, False: rebuild them each call, or a ``PatternCache``). ``pool``: borrow large scratch buffers (True:
    the global pool, False: fresh ones, or a ``MemoryPool``). ``tile``: form at most tile x tile scores at a time (None:
    whole calls, or a ``Ladder``, which takes smaller tiles when memory runs out); a kernel that forms none gains
    nothing by it. ``blocks``: how a block-sparse pattern runs, one of ``block_sparse.WAYS``; "bsr" and the forward of
    "flex" call no kernel of ours, so there is nothing to tile. ``merge``: how the calls of a dilated pattern are
    joined, "eager" one after another in place, "fused" all at once by one Triton kernel (``fused``: CUDA, more memory,
    no pool); "auto" is "eager", for the other was never timed. ``results``: on a CPU, large outputs have the memory of
    earlier ones that nobody holds any more, which saves its page faults (True: ``memory.RESULTS``, which keeps 512 MiB
    at most, False: fresh memory, or a ``MemoryPool``); not with ``gather``, "bsr" and "flex". Over a group "fused" is
    refused, ``gather`` and ``results`` play no part, and ``blocks`` under ulysses alone.

    >>> Execution(gather=True, cache=False)
    Execution(gather=True, cache=False, pool=False, tile=None, blocks='auto', merge='auto', results=True)
    """

    gather: bool = False
    cache: bool | caches.PatternCache = True
    pool: bool | memory.MemoryPool = False
    tile: int | Ladder | None = None
    blocks: str = "auto"
    merge: str = "auto"
    results: bool | memory.MemoryPool = True

    def __post_init__(self):
        pool = bool | memory.MemoryPool
        kinds = {"gather": bool, "cache": bool | caches.PatternCache, "pool": pool, "results": pool}
        for name, kind in (kinds | {"tile": int | Ladder | None}).items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"Execution: {name} cannot be {shown(getattr(self, name))}")
        for name, names in (("blocks", block_sparse.WAYS), ("merge", MERGES)):
            known(name, getattr(self, name), names)
        if self.gather and self.merge == "fused":
            raise ValueError("Execution: merge='fused' joins strided views, and gather=True makes copies")
        if isinstance(self.tile, int) and not whole(self.tile):
            raise ValueError(f"Execution: tile must be a positive number of rows, got {self.tile!r}")

    def cached(self, key, build):
        if self.cache is False:
            return build()
        return (caches.GLOBAL if self.cache is True else self.cache).get(key, build)

    def scratch(self) -> memory.MemoryPool | None:
        return {True: memory.GLOBAL_POOL, False: None}.get(self.pool, self.pool)

    def results_of(self, q: Tensor) -> memory.MemoryPool | None:
        """The pool for results like q: on a CPU, where it lends and keeps that much. None for subclasses of tensors."""
        pool = {True: memory.RESULTS, False: None}.get(self.results, self.results)
        large = pool is not None and pool.threshold_bytes <= q.numel() * q.element_size() <= pool.max_bytes
        return pool if large and device_type_of(q) == "cpu" and type(q) in (Tensor, Parameter) else None

    def tiled(self, kernel: kernels.Kernel) -> kernels.Kernel | Tiled:
        return kernel if self.tile is None else Tiled(kernel, self.tile)

    def text(self) -> str:
        """What ``named`` finds it by, in this process: operators take strings, not objects."""
        values = [getattr(self, f.name) for f in fields(self)]
        text = json.dumps(values, default=lambda value: f"{type(value).__name__} {id(value):#x}")
        _named.setdefault(text, self)
        return text


_named: WeakValueDictionary = WeakValueDictionary()


def named(text: str) -> Execution:
    """The execution of this text; an equal one is made unless it held objects, which must still be there."""
    found = _named.get(text)
    return Execution(*json.loads(text)) if found is None else found


def attend(q, k, v, pattern: Pattern, *, causal: bool, scale: float, backend: str, execution: Execution):
    """out (b, n, h, d), lse (b, h, n) for checked arguments; differentiable once, in q, k, v, through out and lse."""
    if backend == "triton" and IN_GRAPHS and torch.compiler.is_compiling() and _plain(execution):
        flip, positive = positive_scale(scale)
        return triton_op.attend(flip(q), k, v, pattern, causal, positive)
    return outside_graphs(_attend)(q, k, v, pattern, causal, scale, backend, execution)  # plans are lists


def outside_graphs(call):
    """``call`` as torch.compile makes it but may not trace it; itself elsewhere, for this loads the compiler."""
    return torch.compiler.disable(call) if torch.compiler.is_compiling() else call


def _attend(q, k, v, *rest):
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _Attention.apply(q, k, v, *rest)


def _plain(execution: Execution) -> bool:
    """Whether nothing is asked for that a kernel of whole patterns does not do: it has no calls to choose or to cut."""
    asked = execution.gather or execution.merge == "fused" or execution.tile is not None
    return not asked and execution.blocks == "auto"


def _whole(q, causal, backward: bool, backend, execution: Execution) -> kernels.PatternKernel | None:
    """The kernel that runs the whole pattern, if it is such a one that was chosen."""
    found = kernels.choose(q.device, q.dtype, q.shape[3], causal=causal, backward=backward, backend=backend).kernel
    return found if _plain(execution) and isinstance(found, kernels.PatternKernel) else None


def _run(passes: str, tensors, pattern: Pattern, causal, scale, backend, execution: Execution):
    """``passes`` = "forward" on (q, k, v) or "backward" on (dout, q, k, v, out, lse), by the path chosen."""
    q, k = tensors[:2] if passes == "forward" else tensors[1:3]
    (_, n, heads, d), kv_heads = q.shape, k.shape[2]
    needs_backward = passes == "backward" or any(t.requires_grad for t in tensors)
    found = kernels.choose(q.device, q.dtype, d, causal=causal, backward=needs_backward, backend=backend)
    kernel = execution.tiled(found.kernel)
    # Gradients gained nothing by it when timed: many of them begin as zeros, as fresh memory does by itself.
    lending = {"results": execution.results_of(q)} if passes == "forward" else {}
    if execution.merge == "fused":
        if not q.is_meta:  # a run without data is of hardware that need not be here
            fused.check(q.device, q.dtype, pattern)
        with torch.autocast(device_type_of(q), enabled=False):
            return getattr(fused, passes)(*tensors, pattern, causal, scale, kernel, execution.cached)
    if isinstance(pattern, BlockSparse):
        with torch.autocast(device_type_of(q), enabled=False):
            return block_sparse.run(passes, tensors, pattern, causal, scale, kernel, execution, **lending)
    if execution.gather:
        key = caches.key("gather", pattern, n, heads, kv_heads, q.device)
        steps = execution.cached(key, lambda: gather.gather_indices(pattern, n, heads, kv_heads, q.device))
        path, lending = gather, {}
    else:
        steps = strided.plan_for(q, k, pattern, execution.cached)
        path = strided
    with torch.autocast(device_type_of(q), enabled=False):  # the dtype of the inputs is the one that was asked for
        return getattr(path, passes)(*tensors, steps, causal, scale, kernel, execution.scratch(), **lending)


class Once(torch.autograd.Function):
    """What both passes refuse: torch's transforms other than one reverse-mode derivative."""

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError("attention does not support torch.func.vmap or batched gradients; use the batch axis")

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("attention does not support forward-mode derivatives (torch.func.jvp); use backward")


class FirstDerivative(Once):
    """A backward as a node of its own, so that every way to a second derivative ends here and none is silently zero."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *second):
        raise NotImplementedError("attention is differentiable once: double backward is not supported")


class _Attention(Once):
    @staticmethod
    def forward(q, k, v, pattern, causal, scale, backend, execution):
        flip, positive = positive_scale(scale)
        if whole := _whole(q, causal, any(t.requires_grad for t in (q, k, v)), backend, execution):
            with torch.autocast(q.device.type, enabled=False):
                return whole.attend(flip(q), k, v, pattern, causal, positive, execution.cached)
        return _run("forward", (flip(q), k, v), pattern, causal, positive, backend, execution)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *ctx.rest = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, out, lse = ctx.saved_tensors  # once: checkpointing recomputes them as they are read
        dout = torch.zeros_like(out) if dout is None else dout
        return *_Gradients.apply(dout, dlse, q, k, v, out, lse, *ctx.rest), None, None, None, None, None


class _Gradients(FirstDerivative):
    """dq, dk, dv."""

    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, pattern, causal, scale, backend, execution):
        flip, positive = positive_scale(scale)
        tensors = (dout, flip(q), k, v, out, lse)
        if whole := _whole(q, causal, True, backend, execution):
            with torch.autocast(q.device.type, enabled=False):
                rest = (*tensors[1:], pattern, causal, positive, execution.cached)
                dq, dk, dv = whole.gradients(dout, dlse, *rest)
            return flip(dq), dk, dv
        d = q.shape[3]
        if dlse is not None:
            tensors = fold_lse_gradient(*tensors, dlse)
        tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors[:-1]] + [tensors[-1]]
        dq, dk, dv = (g[..., :d] for g in _run("backward", tensors, pattern, causal, positive, backend, execution))
        return flip(dq), dk, dv


def positive_scale(scale: float):
    """Fused kernels find the maximum before they scale, which is wrong for scale <= 0: give q the sign instead."""
    if scale > 0:
        return (lambda t: t), scale
    if scale < 0:
        return torch.neg, -scale
    return torch.zeros_like, 1.0


def fold_lse_gradient(dout, q, k, v, out, lse, dlse: Tensor):
    """Widen the head so that a flash backward, which knows no lse cotangent g, computes ``rowsum(dO * O) - g``.

    Two more columns of O hold -g, its rounded value and the rest, those of dO hold 1; v, q and k get zeros, so no score
    and no ``dO v^T`` changes. Padded to 8 columns, which every kernel's alignment allows.
    """
    g = -dlse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    dead = lse.transpose(1, 2).unsqueeze(-1) == -torch.inf
    g = g.masked_fill(dead, 0.0)
    high = g.to(out.dtype)
    low = (g - high.to(g.dtype)).to(out.dtype)
    zeros = out.new_zeros(*out.shape[:3], 6)
    ones = torch.ones_like(high)
    wide_q, wide_k, wide_v = (F.pad(t, (0, 8)) for t in (q, k, v))
    return torch.cat([dout, ones, ones, zeros], -1), wide_q, wide_k, wide_v, torch.cat([out, high, low, zeros], -1), lse
