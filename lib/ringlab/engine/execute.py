"""Combining partial softmax results: branches, ring blocks and ranks are all joined here.

A partial result is (out, lse) over some keys. The union over disjoint multisets of keys is
``lse = log sum exp lse_i``, ``out = sum exp(lse_i - lse) out_i``; a partial that saw no key has lse -inf and weight 0.

The gather-free path: kernels read strided views, segments are folded into the batch, merging is in place.

Nothing of the sequence's size is allocated but the results. Kernels return fresh tensors, so calls are cut along the
batch into small pieces. Half-precision results to which several calls add are accumulated in fp32, for one tile of
positions and heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from .. import cache as caches
from ..kernels.base import HALF, Kernel, device_type_of, accumulation_dtype
from ..memory import MemoryPool
from ..patterns import Pattern
from .dilated import Plan, make_plan


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join partial results out (b, n, h, d), lse (b, h, n) into one; max-shifted, exact for lse -inf, differentiable.

    >>> out, lse = merge([torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)], [torch.zeros(1, 1, 1)] * 2)
    >>> out.flatten().tolist(), round(float(lse), 4)
    ([0.5, 0.5], 0.6931)
    """
    stacked = torch.stack(lses)  # (p, b, h, n)
    top = stacked.detach().amax(0)  # (b, h, n)
    shift = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = (stacked - shift).exp()  # (p, b, h, n)
    total = weights.sum(0)  # (b, h, n)
    dead = total == 0
    weights = weights / total.masked_fill(dead, 1.0)
    out = sum(o.to(w.dtype) * w.transpose(1, 2).unsqueeze(-1) for o, w in zip(outs, weights))  # (b, n, h, d)
    lse = (shift + total.masked_fill(dead, 1.0).log()).masked_fill(dead, -torch.inf)
    return out, lse


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Join a partial result into (out, lse) in place; all may be strided views, out in fp32 or wider.

    Shapes as in :func:`merge`: out (b, n, h, d), lse (b, h, n).

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    >>> merge_(out, lse, torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)); out.flatten().tolist(), float(lse)
    ([1.0, 1.0], 0.0)
    """
    # sigmoid(b - a) is exp(b - logaddexp(a, b)): 1 for a = -inf, 0 for b = -inf, nan only where neither saw a key.
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(0.0)  # (b, h, n)
    lse.copy_(torch.logaddexp(lse, other_lse))
    out.lerp_(other_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))


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


def plan_for(q: Tensor, k: Tensor, pattern: Pattern, cached, n: int | None = None, chunk: range | None = None) -> Plan:
    """The plan for tensors q (b, rows, h, d) and k that hold ``chunk`` of n positions (default: all of them).

    ``cached(key, build)`` keeps it.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    n = q.shape[1] if n is None else n
    where = () if chunk is None else (chunk.start, chunk.stop)

    def plan(*block):
        key = caches.key("plan", pattern, n, heads, kv_heads, *block, *where)
        return cached(key, lambda: make_plan(pattern, n, heads, kv_heads, *(block or (None,)), chunk))

    steps = plan()
    block = head_block(q, k, min(steps.period, q.shape[1]))
    return plan(block) if block < heads and (steps.merges or kv_heads < heads) else steps


def forward(
    q, k, v, plan: Plan, causal: bool, scale: float, kernel: Kernel, pool, results=None
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in q's dtype and lse (b, h, n) of all branches, merged; q (b, n, h, d), k, v (b, n, h_kv, d).

    ``pool`` lends accumulators, ``results`` what is returned.
    """
    b, n, heads, d = q.shape
    narrow = q.dtype in HALF and plan.merges
    first = plan.whole(n) if results is None and heads == k.shape[2] and _in_one_call(q, narrow) else None
    views = first and fold(views_of(first, range(first.segments), (q, k, v), kv=(1, 2)))
    if views and len(views) == 1:  # one call writes every row: its result becomes the output
        o, l = kernel.forward(*views[0], causal, scale)  # (b', m, h, d), (b', h, m)
        out, lse = o.reshape(q.shape).to(q.dtype), l.transpose(1, 2).reshape(b, n, heads, 1)
    else:
        first = None
        out = empty_like(q, results)
        lse = torch.empty(b, n, heads, 1, dtype=accumulation_dtype(q.dtype), device=q.device)
        if not plan.covered:
            out.zero_()
            lse.fill_(-torch.inf)
    for inside, calls in plan.blocks:
        calls = [c for c in calls if c is not first]
        for start, stop in plan.tiles() if narrow else [(0, n)]:
            with _accumulators((out,), (inside,), start, stop, narrow, not plan.covered, pool) as (accs, origins):
                for call in calls:
                    segments = call.within(start, stop)
                    if segments:
                        views = views_of(call, segments, (q, k, v), kv=(1, 2))
                        into = call.view(lse, segments), call.view(accs[0], segments, origin=origins[0])
                        add_forward([*views, *into], piece_limit(q), call.first, causal, scale, kernel)
    return out, lse.squeeze(-1).transpose(1, 2)


def empty_like(t: Tensor, results: MemoryPool | None) -> Tensor:
    """An output like t, contiguous and uninitialised, lent by the pool if there is one."""
    make = torch.empty if results is None else results.lend
    return make(t.shape, dtype=t.dtype, device=t.device)


def add_forward(views, limit: int, alone: bool, causal: bool, scale: float, kernel: Kernel) -> None:
    """Attend over views (b, segments, m, h, d) of q, k, v, piece by piece, merging into those of lse and out.

    ``limit``: bytes of a piece's result; ``alone``: nothing was written there yet. Segments that are the same rows of
    out (step 0) are merged one by one.
    """
    for q, k, v, lse, out in pieces(views, limit):  # (b', m, h, d)
        o, l = kernel.forward(q, k, v, causal, scale)
        lse = lse.squeeze(-1).transpose(1, 2)  # (b', h, m)
        if alone:
            out.copy_(o)
            lse.copy_(l)
        else:
            step = 1 if out.stride(0) == 0 else len(out)
            for i in range(0, len(out), step):
                merge_(*(t[i : i + step] for t in (out, lse, o, l)))
        del o, l  # before the next piece is made


def backward(dout, q, k, v, out, lse, plan: Plan, causal: bool, scale: float, kernel: Kernel, pool):
    """dq (b, n, h, d), dk, dv (b, n, h_kv, d): the kernel's backward per call, with the final out and lse (b, h, n)."""
    n, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    group = heads // kv_heads
    narrow = q.dtype in HALF and (plan.merges or group > 1)
    lse = lse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    reads = (dout, q, k, v, out, lse)
    first = plan.whole(n) if group == 1 and _in_one_call(q, narrow) else None
    views = first and fold(views_of(first, range(first.segments), reads, kv=(2, 3)))
    if views and len(views) == 1:
        grads = tuple(g.reshape(q.shape).to(q.dtype) for g in call_backward(kernel, views[0], causal, scale))
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
        for start, stop in plan.tiles() if narrow else [(0, n)]:
            with _accumulators(grads, ranges, start, stop, narrow, True, pool) as (accs, origins):
                for call in calls:
                    segments = call.within(start, stop)
                    if segments:
                        into = [
                            call.view(acc, segments, kv=i > 0, origin=origin)
                            for i, (acc, origin) in enumerate(zip(accs, origins))
                        ]
                        alone = call.first and group == 1 and not narrow  # nothing else wrote these rows before
                        views = views_of(call, segments, reads, kv=(2, 3))
                        add_backward([*views, *into], piece_limit(q), alone, call.shares_kv, causal, scale, kernel)
    return grads


def add_backward(views, limit: int, alone: bool, shares_kv: bool, causal: bool, scale: float, kernel: Kernel) -> None:
    """The backward over views (b, segments, m, h, d) of dout, q, k, v, out, lse, added to those of dq, dk, dv.

    ``limit``: bytes of a piece's result; ``alone``: nothing was written there yet; ``shares_kv``: all heads see the
    same rows of k and v.
    """
    for *read, dq, dk, dv in pieces(views, limit):  # (b', m, h, d)
        for i, (result, grad) in enumerate(zip((dq, dk, dv), call_backward(kernel, read, causal, scale))):
            if alone:
                result.copy_(grad)
            elif i > 0 and shares_kv:
                result[:, :, :1].add_(grad.to(result.dtype).sum(2, keepdim=True))
            else:
                result.add_(grad)


def _in_one_call(q: Tensor, narrow: bool) -> bool:
    """A call's result may become the output: nothing is rounded later, no piece is converted (half on a CPU), and it is
    laid out as q is."""
    return q.is_contiguous() and not narrow and (q.dtype not in HALF or device_type_of(q) != "cpu")


def call_backward(kernel: Kernel, reads, causal: bool, scale: float):
    dout, q, k, v, out, lse = reads
    return kernel.backward(dout, q, k, v, out, lse.squeeze(-1).transpose(1, 2), causal, scale)


def views_of(call, segments: range, tensors, kv: tuple[int, ...]) -> list[Tensor]:
    return [call.view(t, segments, kv=i in kv) for i, t in enumerate(tensors)]


def fold(views: list[Tensor]) -> list[list[Tensor]]:
    """(b, segments, m, h, d) views as lists of (b', m, h, d): one list where the strides let b and segments fold."""
    b, segments = views[0].shape[:2]
    if segments == 1:
        return [[x[:, 0] for x in views]]
    if b == 1 or all(x.stride(0) == segments * x.stride(1) for x in views):
        return [[x.flatten(0, 1) for x in views]]
    return [[x[i] for x in views] for i in range(b)]


def pieces(views: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The folded views, cut along the batch, then along the heads, to at most ``limit`` bytes of the last one each."""
    for folded in fold(views):
        batch, rows, heads, d = folded[-1].shape
        head_bytes = rows * d * folded[-1].element_size()
        # A CPU kernel shares out (batch, head) pairs: never fewer of them than threads.
        step = max(1, limit // (head_bytes * heads), -(-torch.get_num_threads() // heads))
        head_step = heads if step > 1 else max(torch.get_num_threads(), limit // head_bytes)
        for i in range(0, batch, step):
            for j in range(0, heads, head_step):
                yield [x[i : i + step, :, j : j + head_step] for x in folded]


def piece_limit(t: Tensor) -> int:
    """Bytes of a piece for results like ``t``."""
    most = PIECE_BYTES.get(device_type_of(t), 8 << 20)
    share = HALF_SHARE if t.dtype in HALF else SHARE
    return min(most, max(most // 8, t.numel() * t.element_size() // share))


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
