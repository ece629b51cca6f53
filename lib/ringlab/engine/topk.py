"""Attention of each block of queries to its own list of key blocks, with a weight each:
dense calls on gathered keys.

``picks`` (b, h, blocks, top_k) lists the key blocks that each (batch, head, query
block) sees, ``log_m`` of the same shape their log M, or None for M = 1. Not causal: all
slots are used, in ascending order. Causal: slot 0 is the block itself and row i uses
the slots up to i, of blocks before it. Several (batch, head, query block) are one
kernel call of one head. A kernel that gathers takes log M as a bias. For the others,
and in the backward, keys are copied and the head is widened by 8 columns, in which q
holds a constant and k the log M that the product with it and the scale is; dk there
gives the gradient of log M.

One of several ranks has a part of the queries, ``first`` blocks before them, and of the
keys what it holds, its own in front: picks count along these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import log2

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..kernels.base import Kernel, accumulation_dtype, gathers
from .autograd import (
    LSE_COLUMNS,
    differentiable_once,
    fold_lse_gradient,
    is_followed,
    positive_scale,
    without_autocast,
)
from .execute import head_block, merge_, piece_limit

Index = tuple[Tensor, ...]


def attend(
    q,
    k,
    v,
    log_m: Tensor | None,
    picks: Tensor,
    size: int,
    causal: bool,
    scale: float,
    backend,
):
    """out (b, n, h, d), lse (b, h, n) for checked arguments; differentiable once, in q,
    k, v and log_m.
    """
    call = _Attention.apply if is_followed(q, k, v, log_m) else forward
    return call(q, k, v, log_m, picks, size, causal, scale, backend)


def forward(
    q,
    k,
    v,
    log_m,
    picks,
    size: int,
    causal: bool,
    scale: float,
    backend,
    first=0,
    needs_backward=False,
):
    """out (b, n, h, d) and lse (b, h, n); a row's partial results are joined before
    they are rounded.

    ``needs_backward``: also where no tensor requires a gradient.
    """
    needs_backward |= any(t is not None and t.requires_grad for t in (q, k, v, log_m))
    kernel = _kernel(q, log_m, causal, needs_backward, backend)
    flip, scale = positive_scale(scale)
    q, d = flip(q), q.shape[3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    with without_autocast(q):
        whole = [t.reshape(1, -1, 1, d) for t in (k, v)] if gathers(kernel) else None
        for rows, parts in _pieces(
            q, k, picks, size, causal, first, copies=whole is None
        ):
            joined = None
            for part in parts:
                if whole:
                    result = _gathered(
                        kernel, q[rows], *whole, log_m, part, size, scale, k.shape
                    )
                else:
                    result = kernel.forward(
                        *_read(q[rows], k, v, log_m, part, size, scale), part[2], scale
                    )
                if joined is None:
                    joined = [
                        t.to(lse.dtype) for t in result
                    ]  # (m, r, 1, d), (m, 1, r)
                else:
                    merge_(*joined, *result)
            out[rows], lse[rows] = joined[0][:, :, 0, :d].to(out.dtype), joined[1][:, 0]
    return out, lse.transpose(1, 2)


def backward(
    dout,
    dlse,
    q,
    k,
    v,
    log_m,
    picks,
    out,
    lse,
    size,
    causal,
    scale,
    backend,
    first=0,
    unrounded=False,
):
    """dq, dk, dv and dlog_m or None; ``unrounded``: dk and dv in fp32 or wider, for
    others to add to.
    """
    flip, scale = positive_scale(scale)
    d = q.shape[3]
    dout, q, k, v, out, lse = fold_lse_gradient(dout, flip(q), k, v, out, lse, dlse)
    kernel = _kernel(q, log_m, causal, True, backend)
    wide = lse.dtype if unrounded else k.dtype
    grads = [
        torch.empty(t.shape, dtype=x, device=t.device)
        for t, x in ((q, q.dtype), (k, wide), (v, wide))
    ]
    dlog_m = None if log_m is None else torch.zeros_like(log_m)
    heads = q.shape[2]
    group = q.shape[2] // k.shape[2]
    step = head_block(q, k.shape[2], q.shape[1])
    with without_autocast(q):
        for start in range(0, heads, step):
            mine = slice(start, start + step)
            theirs = slice(start // group, -(-min(heads, start + step) // group))
            reads = (
                *(t[:, :, mine] for t in (dout, q, out)),
                lse[:, mine],
                *(t[:, :, theirs] for t in (k, v)),
            )
            into = [g[:, :, where] for g, where in zip(grads, (mine, theirs, theirs))]
            weights = (
                (None, None) if log_m is None else (log_m[:, mine], dlog_m[:, mine])
            )
            _heads_backward(
                reads,
                into,
                *weights,
                picks[:, mine],
                size,
                causal,
                scale,
                kernel,
                first,
            )
    dq, dk, dv = (g[..., :d] for g in grads)
    return flip(dq), dk, dv, dlog_m


_Attention = differentiable_once(forward, backward, 5)


def _kernel(
    q: Tensor, log_m: Tensor | None, causal: bool, backward: bool, backend
) -> Kernel:
    d = q.shape[3] + (0 if log_m is None else LSE_COLUMNS)
    return kernels.choose(
        q.device, q.dtype, d, causal=causal, backward=backward, backend=backend
    ).kernel


def _heads_backward(
    reads, grads, log_m, dlog_m, picks, size, causal, scale, kernel, first
) -> None:
    """The backward of some heads into ``grads``; what query blocks add to one key block
    is summed in fp32 or wider.
    """
    dout, q, out, lse, k, v = reads
    b, n, kv_heads, d = k.shape
    count = -(-n // size)
    dq = grads[0]
    accs = [
        torch.zeros(b * kv_heads * count, size * d, dtype=lse.dtype, device=q.device)
        for _ in range(2)
    ]
    for rows, parts in _pieces(q, k, picks, size, causal, first):
        final = lse.transpose(1, 2)[rows].unsqueeze(1)  # (m, 1, r)
        d_out, o = (
            F.pad(t[rows].unsqueeze(2), (0, 0 if log_m is None else 8))
            for t in (dout, out)
        )  # (m, r, 1, d)
        d_rows = 0.0
        for part in parts:
            slots, keys, square = part
            read = _read(q[rows], k, v, log_m, part, size, scale)
            found = kernel.backward(d_out, *read, o, final, square, scale)
            d_rows += found[0][..., :d].to(lse.dtype)
            # Keys by blocks, (m, keys, 1, d) as (m, c, size, d): what a short last
            # block lacks is zero.
            lacks = -read[1].shape[1] % size
            d_k, d_v = (
                F.pad(t[:, :, 0].to(lse.dtype), (0, 0, 0, lacks)).unflatten(
                    1, (-1, size)
                )
                for t in found[1:]
            )
            blocks = (keys[0] * kv_heads + keys[2]) * count + picks[slots]  # (m, c)
            for acc, t in zip(accs, (d_k, d_v)):
                acc.index_add_(0, blocks.flatten(), t[..., :d].flatten(2).flatten(0, 1))
            if dlog_m is not None:
                dlog_m[slots] = d_k[..., d].sum(2) / (scale * _unit(scale))
        dq[rows] = d_rows[:, :, 0].to(dq.dtype)
    for grad, acc in zip(grads[1:], accs):
        grad.copy_(acc.view(b, kv_heads, count * size, d)[:, :, :n].transpose(1, 2))


def _unit(scale: float) -> float:
    """What q holds for log M: a power of two, so without rounding, that keeps k's part
    of float16's size.
    """
    return 2.0 ** min(14, max(0, round(-log2(scale))))


def _read(
    q, k, v, log_m: Tensor | None, part, size: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows q (m, r, d) as (m, r, 1, d), k and v of a part as (m, keys, 1, d); widened
    if there are weights.
    """
    slots, keys, _ = part
    q, k, v = (t.unsqueeze(2) for t in (q, k[keys], v[keys]))
    if log_m is None:
        return q, k, v
    d, least = (
        q.shape[3],
        max(-1e30, torch.finfo(q.dtype).min),
    )  # finite: log M may be -inf, products not
    column = (log_m[slots] / (scale * _unit(scale))).clamp(min=least)  # (m, c)
    high = column.to(q.dtype)
    low = (column - high.to(column.dtype)).to(q.dtype)
    q, k, v = (F.pad(t, (0, 8)) for t in (q, k, v))
    q[..., d : d + 2] = _unit(scale)
    k[:, :, 0, d : d + 2] = torch.stack([high, low], -1).repeat_interleave(size, 1)[
        :, : k.shape[1]
    ]
    return q, k, v


def _gathered(
    kernel: Kernel, q, k, v, log_m: Tensor | None, part, size: int, scale: float, shape
):
    """The forward of rows q (m, r, d) on a part, by a kernel that gathers; k and v of
    ``shape`` as (1, rows, 1, d).
    """
    slots, (batch, seen, head), square = part
    _, n, heads, _ = shape
    index = ((batch * n + seen) * heads + head).unsqueeze(1)  # (m, 1, keys)
    bias = None
    if log_m is not None:
        bias = log_m[slots].repeat_interleave(size, 1)[
            :, None, None, : index.shape[2]
        ]  # (m, 1, 1, keys)
    k, v = (t.expand(len(q), -1, -1, -1) for t in (k, v))
    return kernel.forward(q.unsqueeze(2), k, v, square, scale, bias, index)


def _pieces(
    q: Tensor,
    k: Tensor,
    picks: Tensor,
    size: int,
    causal: bool,
    first: int,
    copies: bool = True,
) -> Iterator[tuple[Index, list[tuple[Index, Index, bool]]]]:
    """Every (batch, head, query block) once, m with equally many rows and keys at a
    time, so that copies, or the indices without ``copies``, stay small.

    Yields the index (m, r) of their rows in q and a part for each call that they make
    together: the index (m, c) of the blocks it sees in picks, that of their keys (m,
    keys) in k, and whether it is causal.
    """
    (b, n, heads, d), (count, top_k) = q.shape, picks.shape[2:]
    short, group = (
        n - (count - 1) * size,
        heads // k.shape[2],
    )  # positions of the last block, heads of q for one of k
    slot, inside = (torch.arange(m, device=q.device) for m in (top_k, size))

    def alike(i: int) -> tuple[int, int]:  # rows of block i, other blocks that it sees
        return short if i == count - 1 else size, min(
            first + i, top_k - 1
        ) if causal else top_k

    for (rows, others), members in groupby(range(count), alike):
        blocks = torch.tensor(list(members), device=q.device)
        items = (
            torch.arange(0, b * heads * count, count, device=q.device)[:, None] + blocks
        ).flatten()
        groups = [(items, others * size)]
        if not causal and short < size:
            last = picks.flatten(0, 2)[items, -1] == count - 1
            groups = [
                (items[~last], others * size),
                (items[last], (others - 1) * size + short),
            ]
        for items, keys in groups:
            key_bytes = 2 * (d + 8) * q.element_size() if copies else 16
            step = max(
                torch.get_num_threads(), piece_limit(q) // (key_bytes * max(keys, rows))
            )
            for some in items.split(step) if len(items) else ():
                heads_before = (some // count)[:, None]
                block = (some % count)[:, None]
                batch = heads_before // heads
                head = heads_before % heads
                kv_head, own = (
                    head // group,
                    block * size + inside[:rows],
                )  # own: (m, rows)
                parts = (
                    [((batch, head, block, slot[:1]), (batch, own, kv_head), True)]
                    if causal
                    else []
                )
                if others:
                    slots = batch, head, block, slot[1 : others + 1] if causal else slot
                    seen = (picks[slots][..., None] * size + inside).flatten(1)[
                        :, :keys
                    ]
                    parts.append((slots, (batch, seen, kv_head), False))
                yield (batch, own, head), parts
