"""Forward and backward of the calls of a tiling: results on the same rows join by log-sum-exp.

Half-precision results to which several calls add are accumulated in fp32, some heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.base import HALF, Kernel, device_type_of, supports_lower_right_causal, accumulation_dtype
from ..memory import MemoryPool
from .block_calls import Picked, Run, Tiling
from .execute import add_forward, empty_like, fold, head_block, merge_, piece_limit, pieces

# torch's CPU kernel takes fewer queries than WIDE 32 at a time, so that each of STRIP costs no more than one of 128.
STRIP, WIDE = 64, 192


def forward(
    q, k, v, tiling: Tiling, scale: float, kernel: Kernel, into=None, results: MemoryPool | None = None
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in q's dtype and lse (b, h, n); q (b, n, h, d), k and v (b, m, h_kv, d).

    ``into``: out and lse (b, n, h, 1) of other keys, into which these are merged. ``results``: a pool that lends out.
    """
    fresh = into is None
    several = not fresh or bool(tiling.picked) or len(tiling.runs) > 1
    runs = tiling.runs
    if fresh and results is None and _begins_whole(tiling, q, k, several):
        first, *runs = runs  # one call writes every row: its result becomes the output
        keys = slice(first.key[0], first.key[0] + first.keys)
        views = q, k[:, keys], v[:, keys]
        # Node by node, so that a thread writes pages of its own; keys that all nodes share fold into no larger batch.
        if q.shape[0] == 1 and device_type_of(q) == "cpu":
            (views,) = fold(_views(first, (q, k, v), kv=(1, 2)))
        out, lse = kernel.forward(*views, False, scale)  # (b', m, h, d), (b', h, m)
        out, lse = out.reshape(q.shape).to(q.dtype), lse.transpose(1, 2).reshape(*q.shape[:3], 1)
    elif fresh:
        out = empty_like(q, results)
        lse = torch.empty(*q.shape[:3], 1, dtype=accumulation_dtype(q.dtype), device=q.device)  # (b, n, h, 1)
    else:
        out, lse = into
    bare = [slice(*rows) for rows in tiling.bare] if fresh else []
    for rows in bare:
        lse[:, rows] = -torch.inf
    for mine, theirs in head_blocks(q, k, several):
        q_, k_, v_, l_ = q[:, :, mine], k[:, :, theirs], v[:, :, theirs], lse[:, :, mine]
        acc = out[:, :, mine]
        if _narrow(q, several):
            acc = torch.empty(q_.shape, dtype=accumulation_dtype(q.dtype), device=q.device) if fresh else acc.to(accumulation_dtype(q.dtype))
        for rows in bare:
            acc[:, rows] = 0.0
        for g in range(group := q_.shape[2] // k_.shape[2]):
            some = slice(g, None, group)
            tensors = q_[:, :, some], k_, v_, l_[:, :, some], acc[:, :, some]
            for strip in (strip for run in runs for strip in _in_strips(run, kernel)):
                alone = fresh and strip.first
                add_forward(_views(strip, tensors, kv=(1, 2)), piece_limit(q), alone, strip.causal, scale, kernel)
            for call in tiling.picked:
                for part in _parts(call, q):
                    _picked_forward(part, tensors, scale, kernel)
        if acc.dtype != out.dtype:
            out[:, :, mine] = acc
    return out, lse.squeeze(-1).transpose(1, 2)


def backward(dout, q, k, v, out, lse, tiling: Tiling, scale: float, kernel: Kernel, into=None):
    """dq (b, n, h, d), dk, dv (b, m, h_kv, d) with the final out and lse (b, h, n).

    ``into``: dq, dk, dv in fp32 or wider, to which these are added.
    """
    lse = lse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    fresh = into is None
    grads = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)) if fresh else into
    for mine, theirs in head_blocks(q, k, fresh):
        reads = [t[:, :, mine] for t in (dout, q)] + [t[:, :, theirs] for t in (k, v)] + [
            t[:, :, mine] for t in (out, lse)]  # fmt: skip
        parts = [g[:, :, where] for g, where in zip(grads, (mine, theirs, theirs))]
        accs = parts
        if _narrow(q, fresh):
            accs = [torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in parts]
        group = reads[1].shape[2] // reads[2].shape[2]
        for g in range(group):
            some = slice(g, None, group)
            tensors = [t if i in (2, 3) else t[:, :, some] for i, t in enumerate(reads)]
            targets = accs[0][:, :, some], *accs[1:]
            for run in tiling.runs:
                _run_backward(run, tensors, targets, scale, kernel)
            for call in tiling.picked:
                for part in _parts(call, q):
                    _picked_backward(part, tensors, targets, scale, kernel)
        if accs is not parts:
            for g, acc in zip(parts, accs):
                g.copy_(acc)
    return grads


def _begins_whole(tiling: Tiling, q: Tensor, k: Tensor, several: bool) -> bool:
    """Whether the first call's result may become the output: kernels lay it out as q is."""
    fits = q.shape[2] == k.shape[2] and q.is_contiguous()
    return fits and not _narrow(q, several) and bool(tiling.runs) and tiling.runs[0].whole(q.shape[1])


def _in_strips(run: Run, kernel: Kernel) -> Iterator[Run]:
    """A causal call of blocks of 128 queries as one of their first and one of their last halves: the first leaves out
    the keys that it does not see. For forward alone: in backward each would add gradients of all its keys."""
    few = run.causal and STRIP < run.rows < WIDE and run.rows % STRIP == 0
    rows = STRIP if few and supports_lower_right_causal(kernel) else run.rows
    for at in range(0, run.rows, rows):
        later = run.rows - rows - at
        yield replace(run, rows=rows, keys=run.keys - later, query=(run.query[0] + at, run.query[1]))


def _narrow(q: Tensor, several: bool) -> bool:
    return q.dtype in HALF and several


def head_blocks(q: Tensor, k: Tensor, several: bool) -> Iterator[tuple[slice, slice]]:
    """Heads of q and of k to take at a time, so that fp32 accumulators stay small."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    step = head_block(q, k, q.shape[1]) if _narrow(q, several) else heads
    for start in range(0, heads, step):
        stop = min(heads, start + step)
        yield slice(start, stop), slice(start // group, -(-stop // group))


def _view(t: Tensor, at: tuple[int, int], rows: int, nodes: int) -> Tensor:
    """Rows of t (b, n, h, d) from first + i * step on as (b, nodes, rows, h, d)."""
    s_b, s_n, s_h, s_d = t.stride()
    size, stride = (t.shape[0], nodes, rows, *t.shape[2:]), (s_b, at[1] * s_n, s_n, s_h, s_d)
    return t.as_strided(size, stride, t.storage_offset() + at[0] * s_n)


def _views(run: Run, tensors, kv: tuple[int, ...]) -> list[Tensor]:
    return [_view(t, run.key if i in kv else run.query, run.keys if i in kv else run.rows, run.nodes)
            for i, t in enumerate(tensors)]  # fmt: skip


def _run_backward(run: Run, reads, grads, scale: float, kernel: Kernel) -> None:
    dq, dk, dv = grads
    step = run.key[1]
    shared = run.nodes > 1 and step == 0
    # Neighbouring nodes may read the same keys: their gradients are added slice by slice, none of which overlap.
    width = min(step, run.keys) or run.keys
    slices = [(at, min(width, run.keys - at)) for at in range(0, run.keys, width)]
    targets = [_view(t, (run.key[0] + at, step), rows, run.nodes) for t in (dk, dv) for at, rows in slices]
    views = [*_views(run, reads, kv=(2, 3)), _view(dq, run.query, run.rows, run.nodes), *targets]
    limit = max(1, piece_limit(reads[1]) * slices[-1][1] // max(run.keys, run.rows))  # of the last view
    for dout, q, k, v, out, lse, dq, *targets in pieces(views, limit):  # (nodes', rows, h, d)
        found = kernel.backward(dout, q, k, v, out, lse.squeeze(-1).transpose(1, 2), run.causal, scale)
        if run.shared:
            dq[:1].add_(found[0].to(dq.dtype).sum(0, keepdim=True))
        else:
            dq.add_(found[0])
        for grad, into in zip(found[1:], (targets[: len(slices)], targets[len(slices) :])):
            for (at, rows), target in zip(slices, into):
                part = grad[:, at : at + rows]
                if shared:
                    target[:1].add_(part.to(target.dtype).sum(0, keepdim=True))
                else:
                    target.add_(part)


def _parts(call: Picked, q: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(query rows (nodes, rows), key rows (nodes, m)) of some nodes at a time, so that copies stay small."""
    limit = piece_limit(q) // 2
    row_bytes = q.shape[0] * q.shape[2] * q.shape[3] * q.element_size()
    step = max(1, limit // (row_bytes * call.keys.shape[1]))
    queries = call.queries[:, None] + torch.arange(call.rows)
    for i in range(0, len(queries), step):
        yield queries[i : i + step].to(q.device), call.keys[i : i + step].to(q.device)


def _take(t: Tensor, rows: Tensor) -> Tensor:
    """t (b, n, h, d) at rows (nodes, m) as (b * nodes, m, h, d)."""
    return t[:, rows].flatten(0, 1)


def _picked_forward(rows, tensors, scale: float, kernel: Kernel) -> None:
    queries, keys = rows
    q, k, v, lse, out = tensors
    o, l = kernel.forward(_take(q, queries), _take(k, keys), _take(v, keys), False, scale)
    have, sums = _take(out, queries), _take(lse, queries)
    merge_(have, sums.squeeze(-1).transpose(1, 2), o, l)
    b = out.shape[0]
    out[:, queries] = have.unflatten(0, (b, -1))
    lse[:, queries] = sums.unflatten(0, (b, -1))


def _picked_backward(rows, reads, grads, scale: float, kernel: Kernel) -> None:
    queries, keys = rows
    taken = [_take(t, keys if i in (2, 3) else queries) for i, t in enumerate(reads)]
    found = kernel.backward(*taken[:5], taken[5].squeeze(-1).transpose(1, 2), False, scale)
    for grad, part, where in zip(grads, found, (queries, keys, keys)):
        flat = part.to(grad.dtype).unflatten(0, (grad.shape[0], -1)).flatten(1, 2)  # (b, nodes * m, h, d)
        grad.index_add_(1, where.flatten(), flat)
