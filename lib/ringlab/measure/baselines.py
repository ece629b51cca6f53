"""The copying form of dilated attention, as public implementations build it: a baseline, timed against the engine.

Per branch: the selected rows are copied to a contiguous tensor, one kernel call runs over them, its output and
log-sum-exp are scattered into full-length buffers; then all branches are mixed by the softmax of their log-sum-exps.
Unlike torchscale's, the mixing weights are differentiated, so that it is the same function forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNSEEN = -1e8  # log-sum-exp of a row that a branch does not select, as torchscale has it: finite, and weightless


@dataclass(frozen=True)
class Part:
    """``segments`` whole segments of one branch from position ``start``, in which each selected head keeps m rows."""

    start: int
    segments: int
    length: int
    rate: int
    rows: int
    heads: tuple[tuple[int, list[int]], ...]  # (offset, heads that have it)

    def rows_of(self, t: Tensor, offset: int) -> Tensor:
        """The rows at ``offset`` of t (b, n, h, ...) as a view (b, segments, m, h, ...)."""
        t = t[:, self.start : self.start + self.segments * self.length]
        return t.unflatten(1, (self.segments, self.length))[:, :, offset :: self.rate][:, :, : self.rows]

    def take(self, t: Tensor) -> Tensor:
        """A contiguous copy (b * segments, m, h', ...) of the selected rows of t (b, n, h, ...)."""
        picked = [self.rows_of(t, offset)[:, :, :, _slice(heads)] for offset, heads in self.heads]
        return torch.cat(picked, 3).flatten(0, 1).contiguous()

    def put(self, t: Tensor, values: Tensor) -> None:
        """Write values (b * segments, m, h', ...) back to the rows of t (b, n, h, ...)."""
        values, first = values.unflatten(0, (-1, self.segments)), 0
        for offset, heads in self.heads:
            self.rows_of(t, offset)[:, :, :, _slice(heads)] = values[:, :, :, first : first + len(heads)]
            first += len(heads)


def _slice(heads: list[int]):
    """Evenly spaced heads as a slice, which copies faster than an index."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    even = list(range(heads[0], heads[-1] + 1, step)) == heads
    return slice(heads[0], heads[-1] + 1, step) if even else heads


def parts_of(branch, n: int) -> list[Part]:
    """A branch's kernel calls: whole segments and a short last one, heads of equal row counts together."""
    found = []
    whole, rest = divmod(n, branch.length)
    for start, segments, length in ((0, whole, branch.length), (whole * branch.length, 1, rest)):
        by_rows: dict[int, dict[int, list[int]]] = {}
        for head, offset in zip(branch.heads, branch.offsets):
            rows = -(-(length - offset) // branch.rate)
            if segments and rows > 0:
                by_rows.setdefault(rows, {}).setdefault(offset, []).append(head)
        for rows, heads in by_rows.items():
            found.append(Part(start, segments, length, branch.rate, rows, tuple(sorted(heads.items()))))
    return found


def copying_attention(q, k, v, pattern, causal: bool, kernel) -> Tensor:
    """out (b, n, h, d) of q (b, n, h, d), k, v (b, n, h_kv, d); ``kernel`` from ringlab.kernels, scale 1 / sqrt(d)."""
    n, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    branches = [parts_of(branch, n) for branch in pattern.branches(n, heads, kv_heads)]
    if kv_heads < heads:
        k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    return _Copying.apply(q, k, v, branches, causal, kernel)


class _Copying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, branches, causal, kernel):
        b, n, h, d = q.shape
        scale, wide = d**-0.5, torch.promote_types(q.dtype, torch.float32)
        outs, lses, kept = [], [], []
        for parts in branches:
            out = torch.zeros_like(q)
            lse = torch.full((b, n, h), UNSEEN, dtype=wide, device=q.device)
            for part in parts:
                rows = [part.take(t) for t in (q, k, v)]  # (b * segments, m, h', d)
                o, l = kernel.forward(*rows, causal, scale)
                part.put(out, o)
                part.put(lse, l.transpose(1, 2))
                kept += [*rows, l]
            outs.append(out)
            lses.append(lse)
        weights = torch.stack(lses).softmax(0)  # (branches, b, n, h), fp32 or wider
        mixed = sum(out * weight.unsqueeze(-1) for out, weight in zip(outs, weights)).to(q.dtype)  # (b, n, h, d)
        ctx.save_for_backward(mixed, weights, *kept)
        ctx.rest = branches, causal, scale, kernel
        return mixed

    @staticmethod
    def backward(ctx, dout):
        mixed, weights, *kept = ctx.saved_tensors
        branches, causal, scale, kernel = ctx.rest
        grads = [torch.zeros_like(mixed) for _ in range(3)]
        for parts, weight in zip(branches, weights):
            # d out_i = w_i dout and d lse_i = w_i dout (out_i - out): a flash backward, which subtracts
            # rowsum(d out_i * out), gives both at once when it is handed the mixed output.
            d_branch = dout * weight.unsqueeze(-1).to(dout.dtype)
            full = [torch.zeros_like(mixed) for _ in range(3)]
            for part in parts:
                *rows, l = kept[:4]
                del kept[:4]
                found = kernel.backward(part.take(d_branch), *rows, part.take(mixed), l, causal, scale)
                for t, values in zip(full, found):
                    part.put(t, values)
            grads = [g + t for g, t in zip(grads, full)]
        return (*grads, None, None, None)
