"""Block-sparse attention by torch's FlexAttention, compiled (Dong et al. 2024, arXiv 2412.05496): the forward alone.

A kernel is compiled once for each device, dtype and shape; the pattern is data. Its backward is that of views, which
takes the final out and lse of whatever made them. On a CPU torch's kernel returns no log-sum-exp.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import lcm

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton

from .blocks import BlockSparse
from .kernels.base import wants_dtype

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GPU_TILE = 128  # a tile of the mask holds whole tiles of the kernel
SHAPES = 256  # kernels that a process may compile; beyond torch's own limit of 8 it would form n x n scores instead


@dataclass(frozen=True)
class Mask:
    """torch's mask of tiles ``blocks``, a ``BlockMask``, and the table of blocks that it reads in cut ones, if any."""

    blocks: object
    seen: Tensor | None


def refusal(device: torch.device | str, dtype: torch.dtype, head_dim: int = 64) -> str | None:
    """Why it cannot run here, in one line; None where it can.

    >>> refusal("cpu", torch.float64)
    'takes float32, float16, bfloat16, not float64'
    """
    why, kind = wants_dtype(dtype, DTYPES), torch.device(device).type
    if why:
        return why
    if kind == "cpu":
        if shutil.which("g++") is None:
            return "needs a C++ compiler on a CPU, g++ is not there"
        return None if torch.cpu._is_avx2_supported() else "needs AVX2 on a CPU"
    if head_dim < 16:
        return f"needs a head_dim of 16 at least on a GPU, got {head_dim}"
    return None if has_triton() else "needs Triton and compute capability 7.0 on a GPU"


def require(q: Tensor) -> None:
    """Raise NotImplementedError with what ``refusal`` says of q (b, n, h, d), if anything."""
    why = refusal(q.device, q.dtype, q.shape[3])
    if why:
        raise NotImplementedError(f"blocks='flex' {why}")


def prepare(
    pattern: BlockSparse, n: int, causal: bool = False, device: torch.device | str = "cpu", tile: int | None = None
) -> Mask:
    """The mask of ``n`` positions of queries and of keys; its memory grows with the square of the number of blocks.

    ``tile``: positions of a tile, a multiple of the block size; by default one block, on a GPU as many as make it one
    of 128. Tiles that are seen in part are cut by a table of blocks.

    >>> from ringlab.blocks import sliding_window
    >>> mask = prepare(sliding_window(1, block_size=16), 100, causal=True).blocks
    >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()  # diagonal, and wholly seen
    ([[[1, 1, 1, 1, 1, 1, 1]]], [[[0, 1, 1, 1, 1, 1, 1]]])
    """
    from torch.nn.attention.flex_attention import BlockMask  # brings the compiler with it

    size, device = pattern.block_size, torch.device(device)
    tile = tile or (size if device.type == "cpu" else lcm(size, GPU_TILE))
    seen = pattern.blocks(n)
    some, all_ = (_pooled(seen, tile // size, whole) for whole in (False, True))  # (tiles, tiles)
    if causal:
        some, all_ = some.tril(), all_.tril(-1)
    table = None if tile == size else seen.to(device)

    def shown(b, h, q, k):
        later = k > q
        if table is None:  # only the causal diagonal is cut
            return ~later
        here = table[q // size, k // size]
        return here & ~later if causal else here

    parts = [t.to(device) for mask in (some & ~all_, all_) for t in _listed(mask)]
    return Mask(BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=tile, mask_mod=shown, seq_lengths=(n, n)), table)


def forward(q, k, v, mask: Mask, scale: float, with_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """out (b, n, h, d) and, where it is asked for and the device gives it, lse (b, h, n) in fp32.

    q is (b, n, h, d), k and v (b, n, h_kv, d). Compiled at the first call of a shape.
    """
    import torch._dynamo

    with_lse = with_lse and q.device.type != "cpu"
    grouped = q.shape[2] != k.shape[2]
    views = [t.detach().transpose(1, 2) for t in (q, k, v)]  # (b, h, n, d)
    # Under a dispatch mode, as a memory tracker is one, nothing would be compiled: it sees the results alone.
    watched = torch._C._len_torch_dispatch_stack() > 0
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=SHAPES):
        with _disable_current_modes() if watched else nullcontext():
            found = _compiled(with_lse)(*views, block_mask=mask.blocks, scale=scale, enable_gqa=grouped)
    out, lse = found if with_lse else (found, None)
    return (out.clone() if watched else out).transpose(1, 2).contiguous(), lse


@cache
def _compiled(with_lse: bool):
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def call(q, k, v, **options):
        if not with_lse:
            return flex_attention(q, k, v, **options)
        out, more = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
        return out, more.lse

    return torch.compile(call, dynamic=False, fullgraph=True)  # whole or not at all: never n x n scores in silence


def _pooled(seen: Tensor, width: int, whole: bool) -> Tensor:
    """Whether all or some of each ``width`` x ``width`` blocks are seen; those behind the last count as the others."""
    if width == 1:
        return seen
    behind = -len(seen) % width
    seen = F.pad(seen, (0, behind, 0, behind), value=whole)
    tiles = seen.unflatten(1, (-1, width)).unflatten(0, (-1, width))  # (tiles, width, tiles, width)
    return tiles.all(3).all(1) if whole else tiles.any(3).any(1)


def _listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row sees (1, 1, tiles), and which, these first (1, 1, tiles, tiles), as torch lists them."""
    order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return mask.sum(1).int()[None, None], order.int()[None, None]
