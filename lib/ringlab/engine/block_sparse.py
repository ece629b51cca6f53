"""Block-sparse attention on one device: one softmax per row and its exact backward, by dense calls on blocks.

Which way a pattern runs, and the calls that it becomes; ``block_passes`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .. import cache as caches
from ..block_patterns import AT_ONCE, BlockSparse, Random
from ..kernels.base import Kernel, supports_lower_right_causal
from . import block_passes, torch_sparse
from .block_calls import Tiling
from .blocks import Cuts, copied, tile

WAYS = {
    "auto": "the way that is expected to be fastest here",
    "views": "few dense calls on overlapping strided views, of neighbouring blocks joined in a tree",
    "batched": "the keys of each block of queries copied together, blocks with equally many in one call",
    "rows": "the same, one call for each block of queries",
    "bsr": "probabilities as a torch.sparse BSR tensor, one batch entry and head at a time",
    "flex": "torch's FlexAttention, compiled once for each shape; its backward is that of views",
}


def choose(pattern: BlockSparse, device: torch.device | str = "cpu") -> tuple[str, str]:
    """(way, why) of ``blocks="auto"``.

    Never "flex": on a CPU it takes longer than views in every measured row; on a GPU that is not measured.

    >>> from ringlab.block_patterns import local_global
    >>> choose(local_global(2, 4))[0]
    'views'
    """
    if all(isinstance(part, Random) for part in pattern.parts):
        return "batched", "blocks drawn at random have no neighbours to be read with"
    return "views", "neighbouring blocks are read where they lie, many at a time"


def run(passes: str, tensors, pattern: BlockSparse, causal: bool, scale: float, kernel: Kernel, execution, **lending):
    """``passes`` = "forward" on (q, k, v) or "backward" on (dout, q, k, v, out, lse), in the way that is asked for.

    "flex" on a CPU runs views too, for the lse that torch's kernel does not return there. ``lending``: the
    pool ``results`` of a forward, for the ways of ours.
    """
    q = tensors[passes == "backward"]
    n, way = q.shape[1], execution.blocks
    way = choose(pattern, q.device)[0] if way == "auto" else way
    if way == "bsr":
        key = caches.key("bsr", pattern, n, causal, q.device)
        index = execution.cached(key, lambda: torch_sparse.bsr_prepare(pattern, n, causal, q.device))
        run_bsr = torch_sparse.bsr_forward if passes == "forward" else torch_sparse.bsr_backward
        return run_bsr(*tensors, index, causal, scale)
    if way == "flex":
        by_views = partial(run, passes, tensors, pattern, causal, scale, kernel, replace(execution, blocks="views"))
        if passes == "backward":
            return by_views()
        torch_sparse.require(q)
        key = caches.key("flex", pattern, n, causal, q.device)
        mask = execution.cached(key, lambda: torch_sparse.flex_prepare(pattern, n, causal, q.device))
        out, lse = torch_sparse.flex_forward(*tensors, mask, scale, with_lse=True)
        return out, by_views()[1] if lse is None else lse
    shape = pattern, n, causal, way, supports_lower_right_causal(kernel)
    tiling = execution.cached(caches.key("tiling", *shape), lambda: tiling_for(*shape))
    return getattr(block_passes, passes)(*tensors, tiling, scale, kernel, **lending)


def tiling_for(
    pattern: BlockSparse, n: int, causal: bool = False, way: str = "views", lower_right: bool = False
) -> Tiling:
    """The calls of one device: ``n`` positions of queries and of keys; ``lower_right``: see ``tiling.tile``."""
    cuts = Cuts.of(n, pattern.block_size)

    def layer(seen, rows: range) -> tuple[Tensor, Tensor]:
        numbers, cols = torch.arange(rows.start, rows.stop), pattern.near(rows, n)
        found = seen(numbers, cols)
        return found & (cols < numbers[:, None]) if causal else found, cols

    diagonal = None
    if causal:
        blocks = torch.arange(len(cuts.starts))
        itself = torch.cat([pattern.blocks(n, some, some).diagonal() for some in blocks.split(AT_ONCE)])
        diagonal = torch.where(itself, blocks, -1)
    if way == "views":
        layers = [partial(layer, seen) for seen in layers_of(pattern, n)]
        return tile(layers, cuts, cuts, diagonal, lower_right=lower_right)
    return copied(partial(layer, partial(pattern.blocks, n)), cuts, cuts, diagonal, alone=way == "rows")


def layers_of(pattern: BlockSparse, n: int) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """``pattern.blocks`` in disjoint layers, each a function of blocks of queries and of keys.

    The parts that have an order, then what random blocks add to them.
    """
    whole = partial(pattern.blocks, n)
    regular = tuple(p for p in pattern.parts if not isinstance(p, Random))
    if not 0 < len(regular) < len(pattern.parts):
        return [whole]
    first = partial(BlockSparse(regular, pattern.block_size).blocks, n)
    return [first, lambda queries, keys: whole(queries, keys) & ~first(queries, keys)]
