"""Block-sparse attention by torch's own sparse forms: ``torch.sparse`` BSR tensors, and
FlexAttention.

BSR: the probabilities of one batch entry and head are a BSR tensor. Scores and the
softmax of each row are computed on the seen blocks alone, by dense calls on copied
blocks, since torch has neither for BSR tensors; the product with the probabilities is
torch's, on a CPU by MKL. Memory grows with the seen pairs of one head. Full precision
only: torch does not multiply half-precision BSR tensors on a CPU.

FlexAttention (Dong et al. 2024, arXiv 2412.05496), compiled. A kernel is compiled once
for each device, dtype and shape; the pattern is data. On a CPU torch's kernel returns
no log-sum-exp.

Both are forwards alone: the backward is that of "views", which takes the final out and
lse of any forward.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
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
    """

    n: int
    size: int
    rows: Tensor  # (seen,)
    cols: Tensor  # (seen,)
    starts: Tensor  # (blocks + 1,) where each row of blocks begins

    def cut(self, t: Tensor) -> Tensor:
        """t (n, d) as whole blocks (blocks, size, d), contiguous; zeros behind the last
        row.
        """
        blocks = len(self.starts) - 1
        return F.pad(t, (0, 0, 0, blocks * self.size - self.n)).reshape(
            blocks, self.size, -1
        )

    def times(self, values: Tensor, t: Tensor) -> Tensor:
        """The BSR tensor of ``values`` (seen, size, size) times the blocks t (blocks,
        size, d), as (n, d).
        """
        _spend_warning()
        dense = t.flatten(0, 1)  # (blocks * size, d)
        whole = self.starts, self.cols, values, (len(dense), len(dense))
        sparse = torch.sparse_bsr_tensor(*whole, check_invariants=False)
        return (sparse @ dense)[: self.n]


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
    >>> index.starts.tolist(), index.cols.tolist()
    ([0, 1, 3, 5], [0, 0, 1, 1, 2])
    """
    rows, cols = (t.to(device) for t in pattern.seen(n))  # (seen,)
    if causal:
        rows, cols = (t[cols <= rows] for t in (rows, cols))
    starts = F.pad(rows.bincount(minlength=pattern.count(n)).cumsum(0), (1, 0))
    return Index(n, pattern.block_size, rows, cols, starts)


def bsr_forward(
    q, k, v, index: Index, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n) in q's dtype; q (b, n, h, d), k and v (b, n,
    h_kv, d).

    ``index`` was prepared with the same ``causal``.
    """
    refuse("bsr", wants_dtype(q.dtype, BSR_DTYPES))
    b, n, heads, _ = q.shape
    out = q.new_empty(b, n, heads, v.shape[3])
    lse = q.new_empty(b, heads, n)
    square = index.rows == index.cols  # (seen,)
    later = q.new_ones(index.size, index.size, dtype=torch.bool).triu(1)
    last = index.cols == len(index.starts) - 2  # (seen,)
    reduce = partial(torch.segment_reduce, offsets=index.starts, axis=0)
    for i, h in product(range(b), range(heads)):
        kv = h * k.shape[2] // heads
        at_q, at_k = index.cut(q[i, :, h])[index.rows], index.cut(k[i, :, kv])
        probs = torch.bmm(at_q, at_k[index.cols].mT).mul_(scale)  # (seen, size, size)
        if causal:
            probs[square] = probs[square].masked_fill_(later, -torch.inf)
        if behind := len(at_k) * index.size - n:  # keys behind the last
            probs[last, :, -behind:] = -torch.inf
        top = reduce(probs.amax(2), "max", initial=-torch.inf)  # (blocks, size)
        probs.sub_(top[index.rows].unsqueeze(2)).exp_()
        total = reduce(probs.sum(2), "sum", initial=0.0)  # (blocks, size)
        probs.div_(total[index.rows].unsqueeze(2))
        out[i, :, h] = index.times(probs, index.cut(v[i, :, kv]))
        # -inf for a row without blocks.
        lse[i, h] = (top + total.log()).flatten()[:n]
    return out, lse


def refuse(way: str, why: str | None) -> None:
    """Raise NotImplementedError if there is a reason."""
    if why:
        raise NotImplementedError(f"blocks={way!r} {why}")


FLEX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GPU_TILE = 128  # a tile of the mask holds whole tiles of the kernel
CPU_TILE = 16  # torch's CPU kernel reads uninitialised memory for some tiles that are no multiple of it
SHAPES = 256  # kernels that a process may compile; beyond torch's own limit of 8 it would form n x n scores instead


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
):
    """torch's ``BlockMask`` of ``n`` positions of queries and of keys, which is made
    from all pairs, a byte each.

    A tile is one block, on a GPU as many as make it a multiple of 128 positions.

    >>> from ringlab.block_patterns import sliding_window
    >>> mask = flex_prepare(sliding_window(1, block_size=16), 96, causal=True)
    >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()  # diagonal, and wholly seen
    ([[[1, 1, 1, 1, 1, 1]]], [[[0, 1, 1, 1, 1, 1]]])
    """
    # It brings the compiler with it.
    from torch.nn.attention.flex_attention import create_block_mask

    size, device = pattern.block_size, torch.device(device)
    tile = size if device.type == "cpu" else lcm(size, GPU_TILE)
    seen = pattern.blocks(n).to(device)

    def shown(b, h, q, k):
        here = seen[q // size, k // size]
        return here & (k <= q) if causal else here

    with without_dispatch_modes():
        return create_block_mask(shown, None, None, n, n, device, tile)


def flex_forward(
    q, k, v, mask, scale: float, with_lse: bool = False
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
                *views, block_mask=mask, scale=scale, enable_gqa=grouped
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
