"""The gather-free path: kernels read strided views, segments are folded into the batch, merging is in place.

Nothing of the sequence's size is allocated but the results. Kernels return fresh tensors, so calls are cut along the
batch into small pieces. Half-precision results to which several calls add are accumulated in fp32, for one tile of
positions and heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from .kernels.base import HALF, Kernel, wide
from .merge import merge_
from .plan import Plan

# A kernel's result at most (or one head per thread): on a CPU small enough for the allocator to reuse it, on a GPU
# large enough to fill it.
PIECE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
SHARE = 4  # and about this part of the whole result, so that small problems stay small too
HALF_SHARE = 32  # a piece of half precision is converted, with its inputs, to fp32


def head_block(q: Tensor, k: Tensor, period: int) -> int:
    """How many heads to take at a time so that fp32 accumulators stay within an eighth of a result."""
    b, n, heads, d = q.shape
    if q.dtype not in HALF:
        return heads
    group = heads // k.shape[2]
    budget = q.numel() * q.element_size() // 8
    return min(heads, group * max(1, budget // (4 * b * period * d * group)))


def forward(q, k, v, plan: Plan, causal: bool, scale: float, kernel: Kernel, pool) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in q's dtype and lse (b, h, n) of all branches, merged; q (b, n, h, d), k, v (b, n, h_kv, d)."""
    b, n, heads, d = q.shape
    narrow = q.dtype in HALF and plan.merges
    first = plan.whole(n) if q.dtype not in HALF and heads == k.shape[2] else None
    views = first and _fold(_views(first, range(first.segments), (q, k, v), kv=(1, 2)))
    if views and len(views) == 1:  # one call writes every row: its result becomes the output
        o, l = kernel.forward(*views[0], causal, scale)  # (b', m, h, d), (b', h, m)
        out, lse = o.reshape(q.shape), l.transpose(1, 2).reshape(b, n, heads, 1)
    else:
        first = None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(b, n, heads, 1, dtype=wide(q.dtype), device=q.device)
        if not plan.covered:
            out.zero_()
            lse.fill_(-torch.inf)
    for inside, calls in plan.blocks:
        calls = [c for c in calls if c is not first]
        for start, stop in _tiles(n, plan.period if narrow else n):
            with _accumulators((out,), (inside,), start, stop, narrow, not plan.covered, pool) as (accs, origins):
                for call in calls:
                    segments = call.within(start, stop)
                    if segments:
                        into = call.view(lse, segments), call.view(accs[0], segments, origin=origins[0])
                        _add_forward(call, segments, (q, k, v), into, causal, scale, kernel)
    return out, lse.squeeze(-1).transpose(1, 2)


def _add_forward(call, segments: range, reads, into, causal: bool, scale: float, kernel: Kernel) -> None:
    """Run the call on its views of q, k, v, piece by piece, and write or merge it ``into`` views of lse and out."""
    views = [*_views(call, segments, reads, kv=(1, 2)), *into]  # (b, segments, m, h, d)
    for q, k, v, lse, out in _pieces(views, _limit(reads[0])):  # (b', m, h, d)
        o, l = kernel.forward(q, k, v, causal, scale)
        lse = lse.squeeze(-1).transpose(1, 2)  # (b', h, m)
        if call.first:
            out.copy_(o)
            lse.copy_(l)
        else:
            merge_(out, lse, o, l)


def backward(dout, q, k, v, out, lse, plan: Plan, causal: bool, scale: float, kernel: Kernel, pool):
    """dq (b, n, h, d), dk, dv (b, n, h_kv, d): the kernel's backward per call, with the final out and lse (b, h, n)."""
    n, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    group = heads // kv_heads
    narrow = q.dtype in HALF and (plan.merges or group > 1)
    lse = lse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    reads = (dout, q, k, v, out, lse)
    first = plan.whole(n) if q.dtype not in HALF and group == 1 else None
    views = first and _fold(_views(first, range(first.segments), reads, kv=(2, 3)))
    if views and len(views) == 1:
        grads = tuple(g.reshape(q.shape) for g in _call_backward(kernel, views[0], causal, scale))
    else:
        first = None
        grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        if not (plan.covered and group == 1):
            for g in grads:
                g.zero_()
    for inside, calls in plan.blocks:
        calls = [c for c in calls if c is not first]
        kv_inside = range(inside.start // group, -(-inside.stop // group))
        ranges = (inside, kv_inside, kv_inside)
        for start, stop in _tiles(n, plan.period if narrow else n):
            with _accumulators(grads, ranges, start, stop, narrow, True, pool) as (accs, origins):
                for call in calls:
                    segments = call.within(start, stop)
                    if segments:
                        into = [
                            call.view(acc, segments, kv=i > 0, origin=origin)
                            for i, (acc, origin) in enumerate(zip(accs, origins))
                        ]
                        alone = call.first and group == 1 and not narrow  # nothing else wrote these rows before
                        _add_backward(call, segments, reads, into, alone, causal, scale, kernel)
    return grads


def _add_backward(call, segments: range, reads, into, alone: bool, causal: bool, scale: float, kernel: Kernel) -> None:
    """Run the call's backward on its views of (dout, q, k, v, out, lse) and add it ``into`` views of dq, dk, dv."""
    views = [*_views(call, segments, reads, kv=(2, 3)), *into]  # (b, segments, m, h, d)
    for *read, dq, dk, dv in _pieces(views, _limit(reads[0])):  # (b', m, h, d)
        for i, (result, grad) in enumerate(zip((dq, dk, dv), _call_backward(kernel, read, causal, scale))):
            if alone:
                result.copy_(grad)
            elif i > 0 and call.shares_kv:
                result[:, :, :1].add_(grad.to(result.dtype).sum(2, keepdim=True))
            else:
                result.add_(grad)


def _call_backward(kernel: Kernel, reads, causal: bool, scale: float):
    dout, q, k, v, out, lse = reads
    return kernel.backward(dout, q, k, v, out, lse.squeeze(-1).transpose(1, 2), causal, scale)


def _views(call, segments: range, tensors, kv: tuple[int, ...]) -> list[Tensor]:
    return [call.view(t, segments, kv=i in kv) for i, t in enumerate(tensors)]


def _tiles(n: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, n)) for start in range(0, n, step))


def _fold(views: list[Tensor]) -> list[list[Tensor]]:
    """(b, segments, m, h, d) views as lists of (b', m, h, d): one list where the strides let b and segments fold."""
    b, segments = views[0].shape[:2]
    if segments == 1:
        return [[x[:, 0] for x in views]]
    if b == 1 or all(x.stride(0) == segments * x.stride(1) for x in views):
        return [[x.flatten(0, 1) for x in views]]
    return [[x[i] for x in views] for i in range(b)]


def _pieces(views: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The folded views, cut along the batch, then along the heads, to at most ``limit`` bytes of the last one each."""
    for folded in _fold(views):
        batch, rows, heads, d = folded[-1].shape
        head_bytes = rows * d * folded[-1].element_size()
        # A CPU kernel shares out (batch, head) pairs: never fewer of them than threads.
        step = max(1, limit // (head_bytes * heads), -(-torch.get_num_threads() // heads))
        head_step = heads if step > 1 else max(torch.get_num_threads(), limit // head_bytes)
        for i in range(0, batch, step):
            for j in range(0, heads, head_step):
                yield [x[i : i + step, :, j : j + head_step] for x in folded]


def _limit(t: Tensor) -> int:
    """Bytes of a piece for results like ``t``."""
    most = PIECE_BYTES.get(t.device.type, 8 << 20)
    share = HALF_SHARE if t.dtype in HALF else SHARE
    return min(most, max(most // 16, t.numel() * t.element_size() // share))


@contextmanager
def _accumulators(results, ranges, start: int, stop: int, narrow: bool, zero: bool, pool):
    """Yield (tensors to add to, their first (position, head)): the results, or fp32 tiles that are then rounded."""
    if not narrow:
        yield results, ((0, 0),) * len(results)
        return
    with ExitStack() as stack:
        accs = []
        for result, inside in zip(results, ranges):
            shape = (result.shape[0], stop - start, len(inside), result.shape[3])
            if pool is None:
                acc = torch.empty(shape, dtype=torch.float32, device=result.device)
            else:
                acc = stack.enter_context(pool.borrow(shape, torch.float32, result.device))
            accs.append(acc.zero_() if zero else acc)
        yield accs, tuple((start, inside.start) for inside in ranges)
        for result, inside, acc in zip(results, ranges, accs):
            result[:, start:stop, inside.start : inside.stop].copy_(acc)
