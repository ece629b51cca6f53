"""Attention of each block of queries to its own list of key blocks, with a weight each: dense calls on gathered copies.

``picks`` (b, h, blocks, top_k) lists the key blocks that each (batch, head, query block) sees, ``log_m`` of the same
shape their log M, or None for M = 1. Not causal: all slots are used, in ascending order. Causal: slot 0 is the block
itself and row i uses the slots up to i, of blocks before it. Several (batch, head, query block) are one kernel call of
one head. No kernel takes log M: the head is widened by 8 columns, in which q holds a constant and k the log M that the
product with it and the scale is; dk there gives the gradient of log M.

One of several ranks has a part of the queries, ``first`` blocks before them, and of the keys what it holds, its own in
front: picks count along these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import log2

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..kernels.base import Kernel, accumulation_dtype
from .autograd import (
    differentiable_once,
    fold_lse_gradient,
    is_followed,
    outside_graphs,
    positive_scale,
    without_autocast,
)
from .execute import head_block, merge_, piece_limit


def attend(q, k, v, log_m: Tensor | None, picks: Tensor, size: int, causal: bool, scale: float, backend):
    """out (b, n, h, d), lse (b, h, n) for checked arguments; differentiable once, in q, k, v and log_m."""
    call = _Attention.apply if is_followed(q, k, v, log_m) else forward
    return outside_graphs(call)(q, k, v, log_m, picks, size, causal, scale, backend)  # how many calls there are is data


def forward(q, k, v, log_m, picks, size: int, causal: bool, scale: float, backend, first=0, needs_backward=False):
    """out (b, n, h, d) and lse (b, h, n); ``needs_backward``: also where no tensor requires a gradient."""
    needs_backward |= any(t is not None and t.requires_grad for t in (q, k, v, log_m))
    flip, positive = positive_scale(scale)
    kernel = _kernel(q, log_m, causal, needs_backward, backend)
    with without_autocast(q):
        return _forward(flip(q), k, v, log_m, picks, size, causal, positive, kernel, first)


def backward(dout, dlse, q, k, v, log_m, picks, out, lse, size, causal, scale, backend, first=0, unrounded=False):
    """dq, dk, dv and dlog_m or None; ``unrounded``: dk and dv in fp32 or wider, for others to add to."""
    flip, positive = positive_scale(scale)
    d, tensors = q.shape[3], (dout, flip(q), k, v, out, lse)
    if dlse is not None:
        tensors = fold_lse_gradient(*tensors, dlse)
    kernel = _kernel(tensors[1], log_m, causal, True, backend)
    with without_autocast(q):
        *grads, dlog_m = _backward(*tensors, log_m, picks, size, causal, positive, kernel, first, unrounded)
    dq, dk, dv = (g[..., :d] for g in grads)
    return flip(dq), dk, dv, dlog_m


_Attention = differentiable_once(forward, backward, 5)


def _kernel(q: Tensor, log_m: Tensor | None, causal: bool, backward: bool, backend) -> Kernel:
    d = q.shape[3] + (0 if log_m is None else 8)
    return kernels.choose(q.device, q.dtype, d, causal=causal, backward=backward, backend=backend).kernel


def _forward(q, k, v, log_m, picks, size: int, causal: bool, scale: float, kernel: Kernel, first: int):
    """out (b, n, h, d) in q's dtype and lse (b, h, n); a row's partial results are joined before they are rounded."""
    b, n, heads, d = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, n, heads, dtype=accumulation_dtype(q.dtype), device=q.device)
    for piece in _pieces(q, k, picks, size, causal, first):
        rows = piece.queries(q)
        joined = None
        for part in piece.parts:
            result = kernel.forward(*piece.reads(rows, k, v, log_m, part, size, scale), part[2], scale)
            if joined is None:
                joined = [t.to(lse.dtype) for t in result]  # (m, r, 1, d), (m, 1, r)
            else:
                merge_(*joined, *result)
        out[piece.batch, piece.rows, piece.head] = joined[0][:, :, 0, :d].to(out.dtype)
        lse[piece.batch, piece.rows, piece.head] = joined[1][:, 0]
    return out, lse.transpose(1, 2)


def _backward(dout, q, k, v, out, lse, log_m, picks, size, causal, scale, kernel: Kernel, first: int, unrounded: bool):
    """dq (b, n, h, d), dk, dv (b, n, h_kv, d) and dlog_m or None, with the final out and lse (b, h, n)."""
    dtypes = (q.dtype, *[accumulation_dtype(k.dtype) if unrounded else k.dtype] * 2)
    grads = tuple(torch.empty(t.shape, dtype=dtype, device=t.device) for t, dtype in zip((q, k, v), dtypes))
    dlog_m = None if log_m is None else torch.zeros_like(log_m)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    step = head_block(q, k.shape[2], q.shape[1])
    for start in range(0, heads, step):
        mine, theirs = slice(start, start + step), slice(start // group, -(-min(heads, start + step) // group))
        reads = *(t[:, :, mine] for t in (dout, q)), *(t[:, :, theirs] for t in (k, v)), out[:, :, mine], lse[:, mine]
        weights = (None, None) if log_m is None else (t[:, mine] for t in (log_m, dlog_m))
        into = [g[:, :, where] for g, where in zip(grads, (mine, theirs, theirs))]
        _heads_backward(reads, into, *weights, picks[:, mine], size, causal, scale, kernel, first)
    return *grads, dlog_m


def _heads_backward(reads, grads, log_m, dlog_m, picks, size, causal, scale, kernel, first) -> None:
    """The backward of some heads into ``grads``; what query blocks add to one key block is summed in fp32 or wider."""
    dout, q, k, v, out, lse = reads
    b, n, kv_heads, d = k.shape
    count = -(-n // size)
    accs = [torch.zeros(b * kv_heads * count, size * d, dtype=lse.dtype, device=q.device) for _ in range(2)]
    for piece in _pieces(q, k, picks, size, causal, first):
        d_out, rows, o = (piece.queries(t) for t in (dout, q, out))  # (m, r, 1, d)
        final = lse[piece.batch, piece.head, piece.rows].unsqueeze(1)  # (m, 1, r)
        if log_m is not None:
            d_out, o = F.pad(d_out, (0, 8)), F.pad(o, (0, 8))
        d_rows = torch.zeros(rows.shape, dtype=lse.dtype, device=q.device)
        for part in piece.parts:
            slots, keys, square = part
            found = kernel.backward(d_out, *piece.reads(rows, k, v, log_m, part, size, scale), o, final, square, scale)
            d_rows += found[0][..., :d]
            # Keys by blocks, (m, keys, 1, d) as (m, c, size, d): what a short last block lacks is zero.
            lacks = -keys.shape[1] % size
            d_k, d_v = (F.pad(t[:, :, 0].to(lse.dtype), (0, 0, 0, lacks)).unflatten(1, (-1, size)) for t in found[1:])
            blocks = (piece.batch * kv_heads + piece.kv_head) * count + piece.at(picks, slots)  # (m, c)
            for acc, t in zip(accs, (d_k, d_v)):
                acc.index_add_(0, blocks.flatten(), t[..., :d].flatten(2).flatten(0, 1))
            if dlog_m is not None:
                dlog_m[piece.batch, piece.head, piece.block, slots] = d_k[..., d].sum(2) / (scale * _unit(scale))
        grads[0][piece.batch, piece.rows, piece.head] = d_rows[:, :, 0].to(q.dtype)
    for grad, acc in zip(grads[1:], accs):
        grad.copy_(acc.view(b, kv_heads, count * size, d)[:, :, :n].transpose(1, 2))


def _unit(scale: float) -> float:
    """What q holds for log M: a power of two, so without rounding, that keeps k's part of float16's size."""
    return 2.0 ** min(14, max(0, round(-log2(scale))))


@dataclass(frozen=True)
class _Piece:
    """Some (batch, head, query block) with equally many rows and keys, and the calls that they make together.

    ``batch``, ``head``, ``kv_head`` and ``block`` are (m, 1), ``rows`` (m, r) the positions of the queries. A part is
    (slots (c,) of the blocks it sees, positions of their keys (m, keys), whether causal).
    """

    batch: Tensor
    head: Tensor
    kv_head: Tensor
    block: Tensor
    rows: Tensor
    parts: list[tuple[Tensor, Tensor, bool]]

    def queries(self, t: Tensor) -> Tensor:
        """t (b, n, h, d) at the rows as (m, r, 1, d)."""
        return t[self.batch, self.rows, self.head].unsqueeze(2)

    def at(self, t: Tensor, slots: Tensor) -> Tensor:
        """t (b, h, blocks, top_k) as (m, c)."""
        return t[self.batch, self.head, self.block, slots]

    def reads(self, q, k, v, log_m: Tensor | None, part, size: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The rows q (m, r, 1, d), and k and v (m, keys, 1, d) of a part; widened if there are weights."""
        slots, keys, _ = part
        k, v = (t[self.batch, keys, self.kv_head].unsqueeze(2) for t in (k, v))
        if log_m is None:
            return q, k, v
        d, least = q.shape[3], max(-1e30, torch.finfo(q.dtype).min)  # finite: log M may be -inf, products not
        column = (self.at(log_m, slots) / (scale * _unit(scale))).clamp(min=least)  # (m, c)
        high = column.to(q.dtype)
        low = (column - high.to(column.dtype)).to(q.dtype)
        q, k, v = (F.pad(t, (0, 8)) for t in (q, k, v))
        q[..., d : d + 2] = _unit(scale)
        k[:, :, 0, d : d + 2] = torch.stack([high, low], -1).repeat_interleave(size, 1)[:, : keys.shape[1]]
        return q, k, v


def _pieces(q: Tensor, k: Tensor, picks: Tensor, size: int, causal: bool, first: int) -> Iterator[_Piece]:
    """Every (batch, head, query block) once, so many at a time that copies stay small."""
    (b, n, heads, d), (count, top_k) = q.shape, picks.shape[2:]
    short, group = n - (count - 1) * size, heads // k.shape[2]  # positions of the last block, heads of q for one of k
    slot, inside = (torch.arange(m, device=q.device) for m in (top_k, size))

    def alike(i: int) -> tuple[int, int]:  # rows of block i, other blocks that it sees
        return short if i == count - 1 else size, min(first + i, top_k - 1) if causal else top_k

    for (rows, others), members in groupby(range(count), alike):
        blocks = torch.tensor(list(members), device=q.device)
        items = (torch.arange(0, b * heads * count, count, device=q.device)[:, None] + blocks).flatten()
        groups = [(items, others * size)]
        if not causal and short < size:
            last = picks.flatten(0, 2)[items, -1] == count - 1
            groups = [(items[~last], others * size), (items[last], (others - 1) * size + short)]
        for items, keys in groups:
            key_bytes = 2 * (d + 8) * q.element_size()
            step = max(torch.get_num_threads(), piece_limit(q) // (key_bytes * max(keys, rows)))
            for some in items.split(step) if len(items) else ():
                head, block = (some // count)[:, None], (some % count)[:, None]
                where = head // heads, head % heads, head % heads // group, block
                own = block * size + inside[:rows]  # (m, rows)
                parts = [(slot[:1], own, True)] if causal else []
                if others:
                    slots = slot[1 : others + 1] if causal else slot
                    starts = picks[where[0], where[1], block, slots] * size  # (m, c)
                    parts.append((slots, (starts[..., None] + inside).flatten(1)[:, :keys], False))
                yield _Piece(*where, own, parts)
