"""The unoptimised baseline: index-select gather, full-length buffers, then one merge of
all branches.

It is what optimisations are measured against, and a second, differently built answer
that strided views must equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.base import Kernel, accumulation_dtype
from ..patterns import Pattern
from .execute import merge


def gather_indices(
    pattern: Pattern, n: int, heads: int, kv_heads: int, device
) -> list[list[tuple]]:
    """Per branch, per set of rows: (heads (h,), K/V heads (h,), positions (segments,
    m)) as index tensors.
    """
    group = heads // kv_heads
    branches = []
    for b in pattern.branches(n, heads, kv_heads):
        full, rest = divmod(n, b.length)
        sets = []
        for offset in sorted(set(b.offsets)):
            members = torch.tensor(
                [h for h, o in zip(b.heads, b.offsets) if o == offset], device=device
            )
            within = torch.arange(b.length, device=device)[offset :: b.rate]  # (m,)
            if full and len(within):
                starts = torch.arange(full, device=device) * b.length  # (segments,)
                sets.append((members, members // group, starts[:, None] + within))
            if offset < rest:
                sets.append(
                    (
                        members,
                        members // group,
                        full * b.length + within[within < rest][None],
                    )
                )
        branches.append(sets)
    return branches


def forward(
    q, k, v, indices, causal: bool, scale: float, kernel: Kernel, pool
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n): each branch gathered, run, scattered to full
    length, then merged.
    """
    b, n, heads, d = q.shape
    make = torch.empty if pool is None else pool.lend
    outs = []
    lses = []
    for sets in indices:
        out = make(q.shape, dtype=q.dtype, device=q.device).zero_()
        lse = make(
            (b, n, heads), dtype=accumulation_dtype(q.dtype), device=q.device
        ).fill_(-torch.inf)
        for members, kv_members, rows in sets:
            o, l = kernel.forward(
                _take(q, rows, members),
                _take(k, rows, kv_members),
                _take(v, rows, kv_members),
                causal,
                scale,
            )
            _put(out, rows, members, o)
            _put(lse.unsqueeze(-1), rows, members, l.transpose(1, 2).unsqueeze(-1))
        outs.append(out)
        lses.append(lse.transpose(1, 2))  # (b, h, n)
    out, lse = merge(outs, lses)
    return out.to(q.dtype), lse


def backward(
    dout, q, k, v, out, lse, indices, causal: bool, scale: float, kernel: Kernel, pool
):
    """dq, dk, dv of the merged result: the kernel's backward on each gathered set,
    added back in fp32 or wider.
    """
    acc = accumulation_dtype(q.dtype)
    grads = [torch.zeros(t.shape, dtype=acc, device=t.device) for t in (q, k, v)]
    lse = lse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    for sets in indices:
        for members, kv_members, rows in sets:
            reads = [_take(t, rows, members) for t in (dout, q)] + [
                _take(t, rows, kv_members) for t in (k, v)
            ]
            final = (
                _take(out, rows, members),
                _take(lse, rows, members).squeeze(-1).transpose(1, 2),
            )
            part_grads = kernel.backward(*reads, *final, causal, scale)
            for grad, part, where in zip(
                grads, part_grads, (members, kv_members, kv_members)
            ):
                _put(grad, rows, where, part.to(acc), add=True)
    return tuple(g.to(q.dtype) for g in grads)


def _take(t: Tensor, rows: Tensor, heads: Tensor) -> Tensor:
    """t (b, n, h, d) at rows (segments, m) and heads (h',) as a contiguous (b *
    segments, m, h', d).
    """
    picked = t.index_select(1, rows.flatten()).index_select(2, heads)
    return picked.reshape(-1, rows.shape[1], len(heads), t.shape[3])


def _put(
    t: Tensor, rows: Tensor, heads: Tensor, values: Tensor, add: bool = False
) -> None:
    """Write or add values (b * segments, m, h', d) to t (b, n, h, d); adding sums heads
    that occur more than once.
    """
    values = values.reshape(t.shape[0], rows.numel(), len(heads), t.shape[3])
    for i in range(t.shape[0]):
        t[i].index_put_(
            (rows.flatten()[:, None], heads), values[i].to(t.dtype), accumulate=add
        )
