"""The strided path with one join: calls keep their results, then one kernel reads of each row all that hold it, once.

Forward, one call per view as in ``strided``: if the first call alone writes every row, its result is the output. Then a
Triton kernel joins, max-shifted in fp32, and writes each row that other calls hold once; rows that the first call alone
holds are not touched (of the log-sum-exp, which kernels lay out by segments, one copy is made). Backward: each call's
gradients with the final out and lse, added up in the same way.

Held until they are joined: the results of all calls but that first, so out and lse once more for each branch, divided
by its rate, and in the backward dq, dk and dv; one batch entry at a time where segments do not fold with the batch.
``estimate`` counts it. Nothing is cut into pieces, and no pool is used.

Proved without a GPU: values, by Triton's interpreter, and that it compiles for 8.0 to 12.0 without spills. Not
measured: any speed; so ``merge="auto"`` never takes it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from .. import cache as caches
from ..block_patterns import BlockSparse
from ..kernels.base import HALF, DeviceSpec, Kernel, needs_cuda, wants_dtype, accumulation_dtype
from ..kernels.external import missing
from ..kernels.triton import interpreted, on_device
from ..kernels.triton_config import padded
from ..patterns import Pattern
from .dilated import Call, Plan, make_plan
from .execute import call_backward, fold, views_of

ELEMENTS = 2048  # of a program's tile, in 64 registers of four warps


def check(device: torch.device | DeviceSpec, dtype: torch.dtype, pattern: Pattern) -> None:
    """Raise NotImplementedError in one line where the join cannot run."""
    why = None if interpreted() else needs_cuda(device, (8, 0))
    if why is None and not isinstance(device, DeviceSpec):
        why = missing("triton", "triton")
    why = why or wants_dtype(dtype, (torch.float32, *HALF))
    if isinstance(pattern, BlockSparse):
        why = "joins the branches of dilated patterns, not block-sparse ones"
    if why is not None:
        raise NotImplementedError(f"merge='fused' cannot run on {device.type} in {dtype}: {why}")


@dataclass(frozen=True)
class Rows:
    """Which rows of a call's result hold which positions, for the device code.

    ``table`` (heads, calls, 11) int64: first position, length, segments, rate, rows of a segment; then first element,
    stride of the batch and of rows in the result, and in its log-sum-exp; 0 segments: the call has not this head.
    ``firsts`` (owners,): rows to join are those ``step`` apart from there. ``aligned``: what all elements are
    multiples of, at most 16.
    """

    table: Tensor
    firsts: Tensor
    step: int
    aligned: int


def make_rows(calls: list[Call], heads: int, n: int, group: int, strides: tuple, over: bool, device="cpu") -> Rows:
    """The Rows of ``calls``; ``strides`` of each one's results: out's (batch, rows, heads), lse's (batch, heads, rows).

    An owner is a K/V head with its ``group`` of heads. ``over``: only rows that the calls hold are joined.

    >>> calls = [Call(8, 2, 0, 1, 4, 1, (0, 1), (0, 1), (1, 0), False)]
    >>> rows = make_rows(calls, 1, 8, 1, (((32, 8, 8), (4, 4, 1)),), True)
    >>> rows.step, rows.firsts.tolist(), rows.aligned, rows.table.flatten().tolist()
    (2, [1], 8, [1, 8, 1, 2, 4, 0, 32, 8, 0, 4, 1])
    """
    lines = [[[0] * 11 for _ in calls] for _ in range(heads)]
    for i, (call, ((o_b, o_n, o_h), (l_b, l_h, l_n))) in enumerate(zip(calls, strides)):
        for j in range(call.heads):
            head, offset = (first + j * step for first, step in (call.head, call.offset))
            place = call.base + offset, call.length, call.segments, call.rate, call.rows
            lines[head][i] = [*place, j * o_h, o_b, o_n, j * l_h, l_b, l_n]
    aligned = gcd(16, *(x for head in lines for line in head for x in line[5:8]))
    firsts, step = [0] * (heads // group), 1
    if over:
        step = 0
        for owner in range(heads // group):
            mine = [line for head in lines[owner * group : (owner + 1) * group] for line in head if line[2]]
            firsts[owner] = mine[0][0] if mine else n
            for start, length, segments, rate, rows, *_ in mine:
                step = gcd(step, start - firsts[owner], rate if rows > 1 else 0, length if segments > 1 else 0)
        step = step or n
        firsts = [first if first == n else first % step for first in firsts]
    return Rows(torch.tensor(lines, device=device), torch.tensor(firsts, device=device), step, aligned)


def tile_rows(head_dim: int) -> int:
    """Rows that a program of the join owns."""
    return max(1, ELEMENTS // padded(head_dim))


def join_bytes(plan: Plan, batch: int, n: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(read, written) bytes of the forward's join: rows of out in ``dtype``, and their log-sum-exps in fp32.

    Every result of a call is read once. Where the first call alone writes every row, in one go, its result is read, and
    written, only where others hold the row too.

    >>> from ringlab.patterns import Dilated
    >>> join_bytes(make_plan(Dilated([4, 8], [1, 2]), 16, 2, 2), 1, 16, 2, 8, torch.bfloat16)
    (640, 320)
    """
    calls = [call for _, some in plan.blocks for call in some]
    first = plan.whole(n)
    held = torch.zeros(1, n, heads, 1, dtype=torch.bool)
    parts = 0
    for call in calls:
        if call is not first:
            call.view(held, range(call.segments)).fill_(True)
            parts += call.segments * call.rows * call.heads
    written = n * heads if first is None else int(held.sum())
    row = batch * (head_dim * dtype.itemsize + 4)
    return (parts + (written if first is not None else 0)) * row, written * row


def forward(q, k, v, pattern: Pattern, causal: bool, scale: float, kernel: Kernel, cached) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in q's dtype and lse (b, h, n) in fp32; q (b, n, h, d), k, v (b, n, h_kv, d)."""
    b, n, heads, _ = q.shape
    reads, kv = (q, k, v), (1, 2)
    plan = _plan(q, k, pattern, cached)
    first, views = _first(plan, n, reads, kv)
    if first is not None:
        o, l = kernel.forward(*views, causal, scale)  # (b', m, h, d), (b', h, m)
        out = o.reshape(q.shape).to(q.dtype)
        lse = l.unflatten(0, (b, first.segments)).transpose(1, 2).reshape(b, heads, n).contiguous()
        del o, l
    else:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(b, heads, n, dtype=accumulation_dtype(q.dtype), device=q.device)
    rest = [call for _, calls in plan.blocks for call in calls if call is not first]
    for some, calls in _entries(rest, reads, kv):
        found = [kernel.forward(*views, causal, scale) for views in calls]
        if found:
            _join(out[some], lse[some], rest, *zip(*found), 1, first is not None, pattern, cached)
        del found  # before those of the next entry are made
    return out, lse


def backward(dout, q, k, v, out, lse, pattern: Pattern, causal: bool, scale: float, kernel: Kernel, cached):
    """dq (b, n, h, d), dk, dv (b, n, h_kv, d): the kernel's backward per call, with the final out and lse (b, h, n)."""
    n, group = q.shape[1], q.shape[2] // k.shape[2]
    reads, kv = (dout, q, k, v, out, lse.transpose(1, 2).unsqueeze(-1)), (2, 3)
    plan = _plan(q, k, pattern, cached)
    first, views = _first(plan, n, reads, kv) if group == 1 else (None, None)
    if first is not None:
        grads = tuple(g.reshape(q.shape).to(q.dtype) for g in call_backward(kernel, views, causal, scale))
    else:
        grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    rest = [call for _, calls in plan.blocks for call in calls if call is not first]
    for some, calls in _entries(rest, reads, kv):
        found = [call_backward(kernel, views, causal, scale) for views in calls]
        for grad, parts, members in zip(grads, zip(*found), (1, group, group)):
            _join(grad[some], None, rest, parts, parts, members, first is not None, pattern, cached)
        del found
    return grads


def _plan(q: Tensor, k: Tensor, pattern: Pattern, cached) -> Plan:
    n, heads, kv_heads = *q.shape[1:3], k.shape[2]
    return cached(caches.key("plan", pattern, n, heads, kv_heads), lambda: make_plan(pattern, n, heads, kv_heads))


def _first(plan: Plan, n: int, reads, kv) -> tuple[Call | None, list[Tensor] | None]:
    """The call whose result becomes the output, with its views; none if it does not write every row in one go."""
    call = plan.whole(n)
    views = [] if call is None else fold(views_of(call, range(call.segments), reads, kv=kv))
    return (call, views[0]) if len(views) == 1 else (None, None)


def _entries(calls: list[Call], reads, kv) -> list[tuple[slice, list[list[Tensor]]]]:
    """(batch entries to run at a time, each call's views of them): all, or one where segments do not fold with them."""
    b = reads[0].shape[0]
    for size in (b, 1):
        found = []
        for some in (slice(i, i + size) for i in range(0, b, size)):
            found.append((some, [fold(views_of(c, range(c.segments), [t[some] for t in reads], kv)) for c in calls]))
        if all(len(views) == 1 for _, each in found for views in each):
            break
    return [(some, [views for (views,) in each]) for some, each in found]


def _join(into: Tensor, lse: Tensor | None, calls, parts, lses, group: int, over: bool, pattern, cached) -> None:
    """Sum what ``calls`` found, ``parts`` (b', m, h', d), in ``into`` (b, n, owners, d).

    ``lses`` (b', h', m) are not looked at unless there is an ``lse`` (b, owners, n) to write.
    """
    b, n, owners, d = into.shape
    parts = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in parts)
    strides = tuple((_strides(t)[:3], _strides(l)[:3]) for t, l in zip(parts, lses))
    key = caches.key("rows", pattern, n, owners, group, strides, over, into.device)
    rows = cached(key, lambda: make_rows(calls, owners * group, n, group, strides, over, into.device))
    if into.is_meta:  # a run without data
        return
    size = tile_rows(d)
    tiles = -(-n // (rows.step * size))
    code = importlib.import_module("ringlab.kernels.experimental.fused_merge")
    with on_device(into):
        code.join[(tiles * owners * b,)](
            parts, lses, into, into if lse is None else lse, rows.table, rows.firsts, rows.step, n, tiles,
            owners, *into.stride()[:3], WEIGH=lse is not None, OVER=over, GROUP=group, ROWS=size, DIM=d, PAD=padded(d),
            ALIGNED=gcd(rows.aligned, *into.stride()[:3]), num_warps=4,
        )  # fmt: skip


def _strides(t: Tensor) -> tuple[int, ...]:
    """Strides, 0 where there is one: such a stride says nothing."""
    return tuple(step if size > 1 else 0 for size, step in zip(t.shape, t.stride()))
