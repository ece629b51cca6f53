"""Block-sparse attention by torch's own sparse forms: ``torch.sparse`` BSR tensors, and
FlexAttention.

BSR: the probabilities of one batch entry and head are a BSR tensor. Scores and the
softmax of each row are computed on the seen blocks alone, by dense calls on copied
blocks, since torch has neither for BSR tensors; the products with the probabilities and
their gradient are torch's, on a CPU by MKL. Memory grows with the seen pairs of one
head. Full precision only: torch does not multiply half-precision BSR tensors on a CPU.

FlexAttention (Dong et al. 2024, arXiv 2412.05496), compiled: the forward alone. A
kernel is compiled once for each device, dtype and shape; the pattern is data. The
backward is that of "views", which takes the final out and lse of any forward. On a CPU
torch's kernel returns no log-sum-exp.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import lcm

import torch
from torch import Tensor
from torch.compiler import config
from torch.nn import functional as F

from ..block_patterns import BlockSparse
from ..checks import Device
from ..kernels.base import wants_dtype
from ..torch_private import dispatch_modes, without_dispatch_modes

BSR_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Index:
    """Where the seen blocks of n positions lie, by rows of blocks; a short last block
    counts as a whole one.

    ``order`` sorts them by columns, which are the rows of the transposed tensor.
    """

    n: int
    size: int
    rows: Tensor  # (seen,)
    cols: Tensor  # (seen,)
    starts: Tensor  # (blocks + 1,) where each row of blocks begins
    order: Tensor  # (seen,)
    starts_by_column: Tensor  # (blocks + 1,)

    def cut(self, t: Tensor) -> Tensor:
        """t (n, d) as whole blocks (blocks, size, d), contiguous; zeros behind the last
        row.
        """
        blocks = len(self.starts) - 1
        return F.pad(t, (0, 0, 0, blocks * self.size - self.n)).reshape(
            blocks, self.size, -1
        )

    def times(self, values: Tensor, t: Tensor, transposed: bool = False) -> Tensor:
        """The BSR tensor of ``values`` (seen, size, size), or its transpose, times the
        blocks t (blocks, size, d).

        Returns (n, d).
        """
        _spend_warning()
        starts = self.starts
        cols = self.cols
        if transposed:  # its blocks in another order, each transposed
            starts = self.starts_by_column
            cols = self.rows[self.order]
            values = values.mT.index_select(
                0, self.order
            )  # (seen, size, size), contiguous
        dense = t.flatten(0, 1)  # (blocks * size, d)
        size = len(dense), len(dense)
        return (
            torch.sparse_bsr_tensor(starts, cols, values, size, check_invariants=False)
            @ dense
        )[: self.n]


@cache
def _spend_warning() -> None:
    """torch warns once in a process that BSR tensors are in beta; here that once is,
    silently.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Sparse BSR tensor support is in beta state", UserWarning
        )
        torch.sparse_bsr_tensor([0, 1], [0], [[[1.0]]], (1, 1), check_invariants=False)


def bsr_prepare(
    pattern: BlockSparse,
    n: int,
    causal: bool = False,
    device: Device = "cpu",
) -> Index:
    """The index of ``n`` positions of queries and of keys.

    >>> from ringlab.block_patterns import sliding_window
    >>> index = bsr_prepare(sliding_window(1, block_size=4), 10, causal=True)
    >>> index.starts.tolist(), index.cols.tolist(), index.order.tolist()
    ([0, 1, 3, 5], [0, 0, 1, 1, 2], [0, 1, 2, 3, 4])
    """
    rows, cols = (t.to(device) for t in pattern.seen(n))  # (seen,)
    if causal:
        rows, cols = (t[cols <= rows] for t in (rows, cols))
    starts, by_column = (
        F.pad(x.bincount(minlength=pattern.count(n)).cumsum(0), (1, 0))
        for x in (rows, cols)
    )
    return Index(
        n, pattern.block_size, rows, cols, starts, cols.argsort(stable=True), by_column
    )


def bsr_forward(
    q, k, v, index: Index, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n) in q's dtype; q (b, n, h, d), k and v (b, n,
    h_kv, d).

    ``index`` was prepared with the same ``causal``.
    """
    refuse("bsr", wants_dtype(q.dtype, BSR_DTYPES))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    for i, h, kv in _heads(q, k):
        probs = _scores(
            index.cut(q[i, :, h]), index.cut(k[i, :, kv]), index, causal, scale
        )  # (seen, size, size)
        top = _by_row(probs.amax(2), "max", -torch.inf, index)  # (blocks, size)
        probs.sub_(top[index.rows].unsqueeze(2)).exp_()
        total = _by_row(probs.sum(2), "sum", 0.0, index)  # (blocks, size)
        probs.div_(total[index.rows].unsqueeze(2))
        out[i, :, h] = index.times(probs, index.cut(v[i, :, kv]))
        lse[i, h] = (top + total.log()).flatten()[
            : index.n
        ]  # -inf for a row without blocks
    return out, lse


def bsr_backward(
    dout, q, k, v, out, lse, index: Index, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (b, n, h, d), dk, dv (b, n, h_kv, d) with the final out and lse (b, h, n)."""
    refuse("bsr", wants_dtype(q.dtype, BSR_DTYPES))
    dq, dk, dv = (
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
    )
    for i, h, kv in _heads(q, k):
        q_, k_, v_, dout_ = (
            index.cut(t) for t in (q[i, :, h], k[i, :, kv], v[i, :, kv], dout[i, :, h])
        )
        delta = (dout[i, :, h] * out[i, :, h]).sum(-1, keepdim=True)  # (n, 1)
        probs = _scores(q_, k_, index, causal, scale)  # (seen, size, size)
        # Rows behind the last get finite ones, and add nothing: their dout, q and delta
        # are 0.
        probs.sub_(index.cut(lse[i, h, :, None])[index.rows]).exp_()
        dv[i, :, kv] += index.times(probs, dout_, transposed=True)
        # In blocks of one a row may see one key alone, with gradient 0: sum as delta
        # does, so that it is, unrounded.
        at_q, at_k = dout_[index.rows], v_[index.cols]  # (seen, size, d)
        grads = (
            torch.bmm(at_q, at_k.mT)
            if index.size > 1
            else (at_q * at_k).sum(-1, keepdim=True)
        )
        del at_q, at_k
        grads.sub_(index.cut(delta)[index.rows]).mul_(probs).mul_(scale)
        del probs  # before the next copy is made
        dq[i, :, h] = index.times(grads, k_)
        dk[i, :, kv] += index.times(grads, q_, transposed=True)
    return dq, dk, dv


def refuse(way: str, why: str | None) -> None:
    """Raise NotImplementedError if there is a reason."""
    if why:
        raise NotImplementedError(f"blocks={way!r} {why}")


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """(batch entry, head, its K/V head), one after the other."""
    group = q.shape[2] // k.shape[2]
    for i in range(q.shape[0]):
        for h in range(q.shape[2]):
            yield i, h, h // group


def _scores(q: Tensor, k: Tensor, index: Index, causal: bool, scale: float) -> Tensor:
    """The scores (seen, size, size) of q, k (blocks, size, d); -inf for later keys and
    for those behind the last.
    """
    scores = torch.bmm(q[index.rows], k[index.cols].mT).mul_(scale)
    if causal:
        square = index.rows == index.cols  # (seen,)
        later = scores.new_ones(scores.shape[1:], dtype=torch.bool).triu(
            1
        )  # (size, size)
        scores[square] = scores[square].masked_fill_(later, -torch.inf)
    blocks = len(index.starts) - 1
    behind = blocks * index.size - index.n
    if behind:
        scores[index.cols == blocks - 1, :, -behind:] = -torch.inf
    return scores


def _by_row(t: Tensor, how: str, nothing: float, index: Index) -> Tensor:
    """t (seen, size) reduced over the blocks of each row as (blocks, size); ``nothing``
    where there are none.
    """
    return torch.segment_reduce(t, how, offsets=index.starts, axis=0, initial=nothing)


FLEX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GPU_TILE = 128  # a tile of the mask holds whole tiles of the kernel
CPU_TILE = 16  # torch's CPU kernel reads uninitialised memory for some tiles that are no multiple of it
SHAPES = 256  # kernels that a process may compile; beyond torch's own limit of 8 it would form n x n scores instead


@dataclass(frozen=True)
class Mask:
    """torch's mask of tiles ``blocks``, a ``BlockMask``, and the table of blocks that
    it reads in cut ones, if any.
    """

    blocks: object
    seen: Tensor | None


def refusal(
    device: Device,
    dtype: torch.dtype,
    head_dim: int = 64,
    block_size: int = GPU_TILE,
) -> str | None:
    """Why FlexAttention cannot run here, in one line; None if it can.

    >>> refusal("cpu", torch.float64)
    'takes float32, float16, bfloat16, not float64'
    """
    why = wants_dtype(dtype, FLEX_DTYPES)
    kind = torch.device(device).type
    if why:
        return why
    if kind == "cpu":
        if block_size % CPU_TILE:
            return f"needs a block size that is a multiple of {CPU_TILE} on a CPU, got {block_size}"
        compiler = (os.environ.get("CXX") or "g++").split()[0]
        if shutil.which(compiler) is None:
            return f"needs a C++ compiler on a CPU, {compiler} is not there"
        headers = sysconfig.get_path("include")
        if not os.path.exists(os.path.join(headers, "Python.h")):
            return "needs Python's headers on a CPU (Debian, Ubuntu: python3-dev)"
        avx2 = torch.cpu.get_capabilities().get("avx2")
        return None if avx2 else "needs AVX2 on a CPU"
    if head_dim < 16:
        return f"needs a head_dim of 16 at least on a GPU, got {head_dim}"
    if not (
        find_spec("triton")
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= (7, 0)
    ):
        return "needs Triton and compute capability 7.0 on a GPU"
    return None


def flex_prepare(
    pattern: BlockSparse,
    n: int,
    causal: bool = False,
    device: Device = "cpu",
) -> Mask:
    """The mask of ``n`` positions of queries and of keys; its memory grows with the
    square of the number of blocks.

    A tile is one block, on a GPU as many as make it a multiple of 128 positions. Tiles
    that are seen in part are cut by a table of blocks.

    >>> from ringlab.block_patterns import sliding_window
    >>> mask = flex_prepare(sliding_window(1, block_size=16), 100, causal=True).blocks
    >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()  # diagonal, and wholly seen
    ([[[1, 1, 1, 1, 1, 1, 1]]], [[[0, 1, 1, 1, 1, 1, 1]]])
    """
    from torch.nn.attention.flex_attention import (
        BlockMask,
    )  # brings the compiler with it

    size, device = pattern.block_size, torch.device(device)
    tile = size if device.type == "cpu" else lcm(size, GPU_TILE)
    seen = pattern.blocks(n)
    seen_in_part, seen_whole = (
        _pooled(seen, tile // size, whole) for whole in (False, True)
    )  # (tiles, tiles)
    if causal:
        seen_in_part, seen_whole = seen_in_part.tril(), seen_whole.tril(-1)
    table = None if tile == size else seen.to(device)

    def shown(b, h, q, k):
        later = k > q
        if table is None:  # only the causal diagonal is cut
            return ~later
        here = table[q // size, k // size]
        return here & ~later if causal else here

    parts = [
        t.to(device)
        for mask in (seen_in_part & ~seen_whole, seen_whole)
        for t in _listed(mask)
    ]
    return Mask(
        BlockMask.from_kv_blocks(
            *parts, BLOCK_SIZE=tile, mask_mod=shown, seq_lengths=(n, n)
        ),
        table,
    )


def flex_forward(
    q, k, v, mask: Mask, scale: float, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """out (b, n, h, d) and, where it is asked for and the device gives it, lse (b, h,
    n) in fp32.

    q is (b, n, h, d), k and v (b, n, h_kv, d). Compiled at the first call of a shape.
    """
    with_lse = with_lse and q.device.type != "cpu"
    grouped = q.shape[2] != k.shape[2]
    views = [t.detach().transpose(1, 2) for t in (q, k, v)]  # (b, h, n, d)
    # Under a dispatch mode, such as a memory tracker, nothing would be compiled. Where
    # torch can suspend the mode, it sees the results alone; elsewhere torch refuses,
    # since the call must compile whole.
    watched = bool(dispatch_modes())
    with torch.no_grad(), config.patch(recompile_limit=SHAPES):
        with without_dispatch_modes():
            results = _compiled(with_lse)(
                *views, block_mask=mask.blocks, scale=scale, enable_gqa=grouped
            )
    out, lse = results if with_lse else (results, None)
    return (out.clone() if watched else out).transpose(1, 2).contiguous(), lse


@cache
def _compiled(with_lse: bool):
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def call(q, k, v, **options):
        if not with_lse:
            return flex_attention(q, k, v, **options)
        out, more = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
        return out, more.lse

    return torch.compile(
        call, dynamic=False, fullgraph=True
    )  # whole or not at all: never n x n scores in silence


def _pooled(seen: Tensor, width: int, whole: bool) -> Tensor:
    """Whether all or some of each ``width`` x ``width`` blocks are seen; those behind
    the last count as the others.
    """
    if width == 1:
        return seen
    behind = -len(seen) % width
    seen = F.pad(seen, (0, behind, 0, behind), value=whole)
    tiles = seen.unflatten(1, (-1, width)).unflatten(
        0, (-1, width)
    )  # (tiles, width, tiles, width)
    return tiles.all(3).all(1) if whole else tiles.any(3).any(1)


def _listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row sees (1, 1, tiles), and which, these first (1, 1, tiles,
    tiles), as torch lists them.
    """
    order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return mask.sum(1).int()[None, None], order.int()[None, None]
