"""What one rank computes: its own chunks by the one-device engine, and its meetings with other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import block_passes, strided
from .. import cache as caches
from ..block_calls import Tiling
from ..kernels.base import HALF, Kernel, takes_lower_right, wide
from ..local import Execution
from . import block_rows
from .meet import Meeting, chunks, meetings, received_meetings
from .plan import Problem, RankPlan, plan_rank


@dataclass
class Rank:
    """One rank of a problem: how it computes, and what it has planned."""

    problem: Problem
    rank: int
    kernel: Kernel
    scale: float
    execution: Execution

    def cached(self, key, build: Callable):
        return self.execution.cached(key, build)

    @property
    def others(self) -> list[int]:
        p = self.problem.layout.ranks
        return [(self.rank + i) % p for i in range(1, p)]

    @cached_property
    def plan(self) -> RankPlan:
        key = caches.key("exchange", self.problem, self.rank)
        return self.cached(key, lambda: plan_rank(self.problem, self.rank))

    def meetings(self, source: int | None) -> list[Meeting]:
        """The calls on the shard of a rank, or on the rows received under the plan (None)."""
        key = caches.key("meetings", self.problem, self.rank, source)
        if source is None:
            return self.cached(key, lambda: received_meetings(self.plan))
        return self.cached(key, lambda: meetings(self.problem, self.rank, source))

    def local_forward(self, q, k, v) -> tuple[Tensor, Tensor]:
        """out (b, s, h, d) and lse (b, s, h, 1) of all that the own shard shows."""
        parts = self._chunks()
        results = [self._on_chunk("forward", (q, k, v), row, positions) for row, positions in parts]
        if len(parts) == 1:
            out, lse = results[0]
            lse = lse.transpose(1, 2).unsqueeze(-1)
        else:
            out, lse = empty(q, k)
            for (row, positions), (o, l) in zip(parts, results):
                out[:, row : row + len(positions)] = o
                lse[:, row : row + len(positions), :, 0] = l.transpose(1, 2)
        self.add_forward(self.meetings(self.rank), q, (k, v), out, lse)
        return out, lse

    def local_backward(self, dout, q, k, v, out, lse) -> tuple[Tensor, ...]:
        """dq, dk, dv, at least fp32 where more than one call adds to them; lse (b, h, s)."""
        parts, more = self._chunks(), self.meetings(self.rank)
        tensors = (dout, q, k, v, out, lse)
        if len(parts) == 1 and not more:
            return self._on_chunk("backward", tensors, *parts[0])
        grads = tuple(torch.zeros(t.shape, dtype=wide(t.dtype), device=t.device) for t in (q, k, v))
        for row, positions in parts:
            for total, part in zip(grads, self._on_chunk("backward", tensors, row, positions)):
                total[:, row : row + len(positions)] += part
        self.add_backward(more, tensors[:2] + tensors[4:], (k, v), grads[0], grads[1:])
        return grads

    def _chunks(self) -> list[tuple[int, range]]:
        return [] if self.problem.layout.kind == "striped" else chunks(self.problem.layout, self.rank)

    def _on_chunk(self, passes: str, tensors, row: int, positions: range):
        """The one-device engine on one chunk, its segments cut where the chunk ends."""
        rows = slice(row, row + len(positions))
        tensors = [t[:, rows] if t.dim() == 4 else t[:, :, rows] for t in tensors]
        q, k = tensors[:2] if passes == "forward" else tensors[1:3]
        plan = strided.plan_for(q, k, self.problem.pattern, self.cached, self.problem.layout.n, positions)
        run = getattr(strided, passes)
        return run(*tensors, plan, self.problem.causal, self.scale, self.kernel, self.execution.scratch())

    def received_forward(self, q, rows, out, lse) -> None:
        """Merge what the rows received under the plan show into out and lse (b, s, h, 1)."""
        self.add_forward(self.meetings(None), q, rows, out, lse)

    def received_backward(self, reads, rows, dq, d_rows) -> None:
        """Add the gradients of what the received rows show to dq and ``d_rows``, fp32 or wider."""
        self.add_backward(self.meetings(None), reads, rows, dq, d_rows)

    def add_forward(self, calls: list[Meeting], q, source, out, lse) -> None:
        """Merge calls on ``source`` (a pair k, v or received rows) into out and lse (b, s, h, 1)."""
        if not calls:
            return
        heads, limit = q.shape[2], strided.piece_limit(q)
        for start, stop in _head_blocks(out, heads):
            acc = out[:, :, start:stop].float() if out.dtype in HALF else out  # (b, s, h', d), rounded once at the end
            for call in filter(None, (c.part(start, stop) for c in calls)):
                k, v = keys_of(call, source)
                rows = call.queries
                views = (rows.view(q[:, :, start:stop], call.heads), k, v,
                         rows.view(lse[:, :, start:stop], call.heads), rows.view(acc, call.heads))  # fmt: skip
                strided.add_forward(views, limit, False, call.causal, self.scale, self.kernel)
            if acc is not out:
                out[:, :, start:stop] = acc

    def add_backward(self, calls: list[Meeting], reads, source, dq, into) -> None:
        """Add the gradients of calls: to dq, and ``into`` a pair dk, dv or gradients of received rows.

        ``reads``: dout, q, out, lse; dq and ``into`` are fp32 or wider.
        """
        dout, q, out, lse = reads
        lse, limit = lse.transpose(1, 2).unsqueeze(-1), strided.piece_limit(q)
        for call in calls:
            rows, h = call.queries, call.heads
            k, v = keys_of(call, source)
            indexed = isinstance(call.keys, Tensor)
            grads = _fresh(k) if indexed else keys_of(call, into)
            views = (*(rows.view(t, h) for t in (dout, q)), k, v, *(rows.view(t, h) for t in (out, lse, dq)), *grads)
            shared = call.shares_kv
            strided.add_backward(views, limit, False, shared, call.causal, self.scale, self.kernel)
            if indexed:
                both = torch.stack(grads, 0)[:, :, 0].permute(2, 3, 0, 1, 4)  # (keys, heads, 2, b, d)
                into.index_add_(0, call.keys.to(into.device).flatten(), both.flatten(0, 1))


class BlockRank(Rank):
    """A rank of a block-sparse pattern under the plan: dense calls on the parts of blocks that are at hand."""

    def _calls(self, received: bool) -> Tiling:
        """The calls on the rows received, or on the own shard."""

        def build() -> Tiling:
            ranges = None
            if received:  # every block that moves is a range of positions of all K/V heads
                ranges = [next(block.members())[1] for blocks in self.plan.receive for block in blocks]
            own = problem.pattern, problem.layout, problem.causal, self.rank
            return block_rows.calls(*own, ranges, lower_right=lower_right)

        problem, lower_right = self.problem, takes_lower_right(self.kernel)
        return self.cached(caches.key("block calls", problem, self.rank, received, lower_right), build)

    def _keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (b, positions, h_kv, d) as views of all received rows (R, 2, b, d)."""
        heads = self.problem.kv_heads
        return shard_of(rows, 0, len(rows) // heads, heads)

    def local_forward(self, q, k, v) -> tuple[Tensor, Tensor]:
        out, lse = block_passes.forward(q, k, v, self._calls(False), self.scale, self.kernel)
        return out, lse.transpose(1, 2).unsqueeze(-1)

    def local_backward(self, dout, q, k, v, out, lse) -> tuple[Tensor, ...]:
        grads = tuple(torch.zeros(t.shape, dtype=wide(t.dtype), device=t.device) for t in (q, k, v))
        return block_passes.backward(dout, q, k, v, out, lse, self._calls(False), self.scale, self.kernel, grads)

    def received_forward(self, q, rows, out, lse) -> None:
        if len(rows):
            block_passes.forward(q, *self._keys(rows), self._calls(True), self.scale, self.kernel, (out, lse))

    def received_backward(self, reads, rows, dq, d_rows) -> None:
        dout, q, out, lse = reads
        if len(rows):
            tensors, grads = (dout, q, *self._keys(rows), out, lse), (dq, *self._keys(d_rows))
            block_passes.backward(*tensors, self._calls(True), self.scale, self.kernel, grads)


def empty(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """out (b, s, h, d) of zeros and lse (b, s, h, 1) of -inf: nothing seen yet."""
    lse = torch.full((*q.shape[:3], 1), -torch.inf, dtype=wide(q.dtype), device=q.device)
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse


def _head_blocks(out: Tensor, heads: int) -> Iterator[tuple[int, int]]:
    """Heads at a time, so that the fp32 copy of a half-precision result stays within a quarter of it."""
    step = max(1, heads // 8) if out.dtype in HALF else heads
    return ((start, min(start + step, heads)) for start in range(0, heads, step))


def keys_of(call: Meeting, source) -> tuple[Tensor, Tensor]:
    """k and v (b, 1, m, h, d) of a call: views of a pair or of received rows (R, 2, b, d), copies where indexed."""
    if isinstance(call.keys, Tensor):
        rows = source[call.keys.to(source.device)]  # (m, h, 2, b, d)
        return tuple(t.permute(2, 0, 1, 3).unsqueeze(1) for t in rows.unbind(2))
    if call.block is not None:
        source = shard_of(source, *call.block)
    return tuple(call.keys.view(t, call.heads) for t in source)


def _fresh(k: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.zeros(k.shape, dtype=wide(k.dtype), device=k.device) for _ in range(2))


def shard_of(rows: Tensor, first: int, count: int, heads: int) -> tuple[Tensor, Tensor]:
    """k and v (b, count, heads, d) as views of received rows (R, 2, b, d)."""
    block = rows[first : first + count * heads].unflatten(0, (count, heads))  # (count, heads, 2, b, d)
    return tuple(t.permute(2, 0, 1, 3) for t in block.unbind(2))


def widened(tensors) -> tuple[Tensor, ...]:
    return tuple(t.to(wide(t.dtype)) for t in tensors)
