"""Other ways to compute attention on one device: what the engine is measured against,
and what published classes ran. ``attend`` runs those of ``WAYS``, with gradients;
FlexAttention is forward alone.

"gather", "rows" and "batched" copy rows by index-select, attend to the copies, write
each result to a buffer as long as the sequence, and merge these buffers.

"bsr": the probabilities of one batch entry and head are a BSR tensor. Scores and the
softmax of each row are computed on the seen blocks alone, by dense calls on copied
blocks, since torch has neither for BSR tensors; the product with the probabilities is
torch's, on a CPU by MKL. Memory grows with the seen pairs of one head. Full precision
only: torch does not multiply half-precision BSR tensors on a CPU.

FlexAttention (Dong et al. 2024, arXiv 2412.05496), compiled. A kernel is compiled once
for each device, dtype and shape; the pattern is data.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterable
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import config
from torch.nn import functional as F

from . import kernels
from .attention import as_autocast, check_tensors
from .block_patterns import BlockSparse
from .checks import Backend, Device, check_choice
from .engine import DEFAULT, Execution
from .engine.autograd import (
    differentiable_once,
    fold_lse_gradient,
    is_followed,
    outside_graphs,
    positive_scale,
    requires_grad,
    without_autocast,
)
from .engine.execute import merge
from .engine.ways import LocalCall, Planned, in_turn
from .kernels.base import Kernel, accumulation_dtype, wants_dtype
from .patterns import Pattern
from .torch_private import dispatch_modes, without_dispatch_modes

WAYS = {
    "gather": "the rows of each branch copied by index-select; dense and dilated patterns",
    "rows": "the keys of each block of queries copied, a call for each; block-sparse patterns",
    "batched": "the same, blocks with equally many keys in one call",
    "bsr": "probabilities as torch.sparse BSR tensors; block-sparse patterns",
    "views": "dense calls on strided views, merged one after another; any pattern",
}
COPIES = ("gather", "rows", "batched")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    way: str,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: Backend = "auto",
    execution: Execution = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Return what ``ringlab.attention`` returns with ``return_lse``, computed by a way
    of ``WAYS``.

    q is (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim). The
    backward of all is that of "views", which takes any out and lse. Raises ValueError
    for arguments that do not fit, NotImplementedError for a dtype that a way does not
    take.

    >>> from ringlab.block_patterns import sliding_window
    >>> q, window = torch.randn(1, 64, 2, 8), sliding_window(1, block_size=16)
    >>> a, b = (attend(q, q, q, window, way)[0] for way in ("rows", "bsr"))
    >>> torch.allclose(a, b, atol=1e-6)
    True
    """
    check(pattern, way)
    q, k, v = as_autocast(q, k, v)
    check_tensors(q, k, v)
    if k.shape[1] != q.shape[1] or v.shape[3] != q.shape[3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"q, k and v must agree in seq and head_dim, got {shapes}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    call = LocalCall(pattern, causal, scale, backend, execution)
    run = _Attention.apply if is_followed(q, k, v) else _forward
    return outside_graphs(run)(q, k, v, call, way)


def check(pattern: Pattern, way: str) -> None:
    """Raise ValueError in one line unless ``way`` is one of ``WAYS`` that serves the
    pattern.
    """
    check_choice("way", way, WAYS)
    if way != "views" and isinstance(pattern, BlockSparse) == (way == "gather"):
        raise ValueError(f"{way!r} does not serve {pattern}; it is {WAYS[way]}")


def _views(q: Tensor, k: Tensor, call: LocalCall, differentiable: bool) -> Planned:
    """Return the way "views" with a kernel for these tensors."""
    options = {"causal": call.causal, "backend": call.backend}
    options["backward"] = differentiable
    choice = kernels.choose(q.device, q.dtype, q.shape[3], **options)
    kernel = call.execution.tiled(choice.kernel)
    return in_turn(call.pattern, *q.shape[1:3], k.shape[2], call.causal, kernel)


def _forward(q, k, v, call: LocalCall, way: str) -> tuple[Tensor, Tensor]:
    views = _views(q, k, call, requires_grad(q, k, v))
    flip, scale = positive_scale(call.scale)
    q, k, v = (t.contiguous() for t in (flip(q), k, v))
    with without_autocast(q):
        if way == "views":
            return views.forward((q, k, v), scale, call)
        where = call.pattern, *q.shape[1:3], k.shape[2], call.causal, q.device, way
        build = bsr_index if way == "bsr" else rows_to_copy
        index = call.execution.cached(("baseline", *where), partial(build, *where))
        if way == "bsr":
            return bsr_forward(q, k, v, index, call.causal, scale)
        options = call.causal, scale, views.kernel
        pool = call.execution.scratch()
        return copied_forward(q, k, v, index, *options, pool=pool)


def _backward(dout, dlse, q, k, v, out, lse, call: LocalCall, way: str):
    flip, scale = positive_scale(call.scale)
    with without_autocast(q):
        *reads, lse = fold_lse_gradient(dout, flip(q), k, v, out, lse, dlse)
        reads = [*(t.contiguous() for t in reads), lse]
        views = _views(*reads[1:3], call, True)
        grads = views.backward(None, reads, scale, call)
    dq, dk, dv = (grad[..., : q.shape[3]] for grad in grads)
    return flip(dq), dk, dv


_Attention = differentiable_once(_forward, _backward, 3)


# --------------------------------------------------------------------------------------
# copies


class Rows(NamedTuple):
    """Rows that are copied for one dense call.

    ``queries`` and ``keys`` are (positions (repeats, m), heads (h,)). ``square``: the
    causal mask applies, if the attention is causal.
    """

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]
    square: bool


def rows_to_copy(
    pattern: Pattern,
    n: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    device: Device,
    way: str,
) -> list[list[Rows]]:
    """Return the calls of each branch of a dilated pattern; of a block-sparse one those
    on the blocks before and, if it is causal, those on the diagonal.

    >>> from ringlab.block_patterns import sliding_window
    >>> [calls] = rows_to_copy(sliding_window(1, block_size=2), 6, 1, 1, False, "cpu", "batched")
    >>> [call.keys[0].tolist() for call in calls]
    [[[0, 1, 2, 3], [2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]]]
    """
    every = torch.arange(heads, device=device)
    group = heads // kv_heads
    at = torch.arange(n)
    if way == "gather":
        branches = []
        for branch in pattern.branches(n, heads, kv_heads):
            calls = []
            for offset in sorted(set(branch.offsets)):
                own = [h for h, o in zip(branch.heads, branch.offsets) if o == offset]
                rows = [x[offset :: branch.rate] for x in at.split(branch.length)]
                for q, k in _stacked(zip(rows, rows), False, device):
                    calls.append(Rows((q, every[own]), (k, every[own] // group), True))
            branches.append(calls)
        return branches
    size = pattern.block_size
    seen = pattern.blocks(n)
    branches = []
    for diagonal in (False, True)[: 1 + causal]:
        pairs = []
        for i, queries in enumerate(at.split(size)):
            keys = at[seen[i].repeat_interleave(size)[:n]]
            if causal:
                block = keys // size
                keys = keys[block == i if diagonal else block < i]
            pairs.append((queries, keys))
        stacked = _stacked(pairs, way == "rows", device)
        branches.append(
            [Rows((q, every), (k, every // group), diagonal) for q, k in stacked]
        )
    return branches


def _stacked(
    pairs: Iterable[tuple[Tensor, Tensor]], alone: bool, device: Device
) -> list[list[Tensor]]:
    """Queries (repeats, m) and keys (repeats, c) of pairs with as many, or of each pair
    alone; pairs without keys are left out.
    """
    alike: dict[tuple, list] = {}
    for i, (queries, keys) in enumerate(pairs):
        if len(keys):
            kind = i if alone else 0, len(queries), len(keys)
            alike.setdefault(kind, []).append((queries, keys))
    return [[torch.stack(x).to(device) for x in zip(*own)] for own in alike.values()]


def copied_forward(
    q, k, v, branches, causal: bool, scale: float, kernel: Kernel, *, pool=None
) -> tuple[Tensor, Tensor]:
    """Return out (b, n, h, d), lse (b, h, n): each branch copied, run, written to full
    length, then merged.
    """
    make = torch.empty if pool is None else pool.lend
    wide = accumulation_dtype(q.dtype)
    outs = []
    lses = []
    for calls in branches:
        out = make(q.shape, dtype=q.dtype, device=q.device).zero_()
        lse = make(q.shape[:3], dtype=wide, device=q.device).fill_(-torch.inf)
        for call in calls:
            rows, heads = call.queries
            copies = [_take(t, *call.keys) for t in (k, v)]
            o, l = kernel.forward(
                _take(q, rows, heads), *copies, causal and call.square, scale
            )  # (b * repeats, m, h', d), (b * repeats, h', m)
            rows = rows.flatten().unsqueeze(1)
            for t, part in ((out, o), (lse, l.transpose(1, 2))):
                part = part.reshape(len(t), len(rows), *part.shape[2:])
                t[:, rows, heads] = part.to(t.dtype)
        outs.append(out)
        lses.append(lse.transpose(1, 2))  # (b, h, n)
    out, lse = merge(outs, lses)
    return out.to(q.dtype), lse


def _take(t: Tensor, rows: Tensor, heads: Tensor) -> Tensor:
    """t (b, n, h, d) at rows (repeats, m) and heads (h',) as a contiguous (b * repeats,
    m, h', d).
    """
    picked = t.index_select(1, rows.flatten()).index_select(2, heads)
    return picked.reshape(-1, rows.shape[1], len(heads), t.shape[3])


# --------------------------------------------------------------------------------------
# torch.sparse

BSR_DTYPES = (torch.float32, torch.float64)


class Index(NamedTuple):
    """Where the seen blocks of ``size`` positions lie, by rows of blocks."""

    size: int
    rows: Tensor  # (seen,)
    cols: Tensor  # (seen,)
    starts: Tensor  # (blocks + 1,) where each row of blocks begins


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


def bsr_index(
    pattern: BlockSparse,
    n: int,
    heads: int = 1,
    kv_heads: int = 1,
    causal: bool = False,
    device: Device = "cpu",
    way: str = "bsr",
) -> Index:
    """The index of ``n`` positions of queries and of keys.

    >>> from ringlab.block_patterns import sliding_window
    >>> index = bsr_index(sliding_window(1, block_size=4), 10, causal=True)
    >>> index.starts.tolist(), index.cols.tolist()
    ([0, 1, 3, 5], [0, 0, 1, 1, 2])
    """
    rows, cols = (t.to(device) for t in pattern.seen(n))  # (seen,)
    if causal:
        rows, cols = (t[cols <= rows] for t in (rows, cols))
    starts = F.pad(rows.bincount(minlength=pattern.count(n)).cumsum(0), (1, 0))
    return Index(pattern.block_size, rows, cols, starts)


def bsr_forward(
    q, k, v, index: Index, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n) in q's dtype; q (b, n, h, d), k and v (b, n,
    h_kv, d).

    ``index`` was prepared with the same ``causal``.
    """
    if why := wants_dtype(q.dtype, BSR_DTYPES):
        raise NotImplementedError(f"'bsr' {why}")
    _spend_warning()
    size, rows, cols, starts = index
    b, n, heads, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty(b, heads, n)
    at = torch.arange((len(starts) - 1) * size, device=q.device).view(-1, size)
    keys = at[cols].unsqueeze(1)  # (seen, 1, size)
    hidden = keys >= n
    if causal:
        hidden = hidden | (keys > at[rows].unsqueeze(2))  # (seen, size, size)
    reduce = partial(torch.segment_reduce, offsets=starts, axis=0)

    def cut(t: Tensor) -> Tensor:
        """t (n, d) as (blocks, size, d), zeros behind the last row."""
        return F.pad(t, (0, 0, 0, at.numel() - n)).reshape(*at.shape, -1)

    for i, h in product(range(b), range(heads)):
        kv = h * k.shape[2] // heads
        probs = torch.bmm(cut(q[i, :, h])[rows], cut(k[i, :, kv])[cols].mT)
        probs.mul_(scale).masked_fill_(hidden, -torch.inf)  # (seen, size, size)
        top = reduce(probs.amax(2), "max", initial=-torch.inf)  # (blocks, size)
        probs.sub_(top[rows].unsqueeze(2)).exp_()
        total = reduce(probs.sum(2), "sum", initial=0.0)  # (blocks, size)
        probs.div_(total[rows].unsqueeze(2))
        shape = at.numel(), at.numel()
        sparse = torch.sparse_bsr_tensor(
            starts, cols, probs, shape, check_invariants=False
        )
        out[i, :, h] = (sparse @ cut(v[i, :, kv]).flatten(0, 1))[:n]
        # -inf for a row without blocks.
        lse[i, h] = (top + total.log()).flatten()[:n]
    return out, lse


# --------------------------------------------------------------------------------------
# FlexAttention

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


def flex_forward(q, k, v, mask, scale: float) -> Tensor:
    """Return out (b, n, h, d) for q (b, n, h, d), k and v (b, n, h_kv, d). Compiled at
    the first call of a shape.
    """
    grouped = q.shape[2] != k.shape[2]
    views = [t.detach().transpose(1, 2) for t in (q, k, v)]  # (b, h, n, d)
    # Under a dispatch mode, such as a memory tracker, nothing would be compiled. Where
    # torch can suspend the mode, it sees the results alone; elsewhere torch refuses,
    # since the call must compile whole.
    watched = bool(dispatch_modes())
    with torch.no_grad(), config.patch(recompile_limit=SHAPES):
        with without_dispatch_modes():
            out = _compiled()(*views, block_mask=mask, scale=scale, enable_gqa=grouped)
    return (out.clone() if watched else out).transpose(1, 2).contiguous()


@cache
def _compiled():
    from torch.nn.attention.flex_attention import flex_attention

    # Whole or not at all: never n x n scores in silence.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
