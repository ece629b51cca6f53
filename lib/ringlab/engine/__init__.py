"""The switches of one call, and which path runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import cache as caches
from .. import kernels, memory
from ..block_patterns import BlockSparse
from ..checks import check_choice, is_int, short_repr
from ..kernels.base import device_type_of
from ..patterns import Pattern
from . import block_sparse, execute, fused, gather
from .chunked import Ladder, Tiled

MERGES = ("auto", "eager", "fused")


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
                raise TypeError(f"Execution: {name} cannot be {short_repr(getattr(self, name))}")
        for name, names in (("blocks", block_sparse.WAYS), ("merge", MERGES)):
            check_choice(name, getattr(self, name), names)
        if self.gather and self.merge == "fused":
            raise ValueError("Execution: merge='fused' joins strided views, and gather=True makes copies")
        if isinstance(self.tile, int) and not is_int(self.tile):
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


def execution_of(text: str) -> Execution:
    """The execution of this text; an equal one is made unless it held objects, which must still be there."""
    found = _named.get(text)
    return Execution(*json.loads(text)) if found is None else found


def plain(execution: Execution) -> bool:
    """Whether nothing is asked for that a kernel of whole patterns does not do: it has no calls to choose or to cut."""
    asked = execution.gather or execution.merge == "fused" or execution.tile is not None
    return not asked and execution.blocks == "auto"


def pattern_kernel(q, causal, backward: bool, backend, execution: Execution) -> kernels.PatternKernel | None:
    """The kernel that runs the whole pattern, if it is such a one that was chosen."""
    found = kernels.choose(q.device, q.dtype, q.shape[3], causal=causal, backward=backward, backend=backend).kernel
    return found if plain(execution) and isinstance(found, kernels.PatternKernel) else None


def run(passes: str, tensors, pattern: Pattern, causal, scale, backend, execution: Execution):
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
        steps = execute.plan_for(q, k, pattern, execution.cached)
        path = execute
    with torch.autocast(device_type_of(q), enabled=False):  # the dtype of the inputs is the one that was asked for
        return getattr(path, passes)(*tensors, steps, causal, scale, kernel, execution.scratch(), **lending)
