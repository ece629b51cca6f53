"""What one rank computes: calls on its own chunks by the one-device engine, and calls on rows of other chunks.

Where a chunk of queries and a chunk of keys share a segment of a branch, every query sees every key of it (see
``exchange``), so cross-rank work is dense calls without a mask. Only a striped layout needs one: the square mask,
shifted by a row where its keys come later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..engine import Execution, dilated, execute
from ..engine.dilated import first_and_step, progressions
from ..engine.execute import Call, Plan, View, head_block
from ..kernels.base import HALF, Kernel, accumulation_dtype, supports_lower_right_causal
from ..patterns import Branch, Dense
from . import exchange
from .exchange import Problem, RankPlan, plan_rank
from .layout import Layout


def chunks(layout: Layout, rank: int) -> list[tuple[int, range]]:
    """(first row in the shard, positions) of each chunk of a rank."""
    found, row = [], 0
    for owned in layout.ranges(rank):
        found.append((row, owned))
        row += len(owned)
    return found


def cross_rank_calls(problem: Problem, rank: int, source: int) -> list[Call]:
    """The calls of a rank's queries on the shard of ``source``; on its own shard those between different chunks."""
    if problem.layout.kind == "striped":
        return _striped(problem, rank, source)
    found = []
    for q_row, queries in chunks(problem.layout, rank):
        for k_row, keys in chunks(problem.layout, source):
            for branch in problem.branches if queries != keys else ():
                if (shared := problem.shared(branch, queries, keys)) is not None:
                    start, asking, wanted = shared
                    rows = (q_row + asking.start - queries.start, k_row + wanted.start - keys.start)
                    found += _between(branch, problem, start, asking, wanted, rows)
    return found


def _between(branch: Branch, problem: Problem, start: int, asking: range, wanted: range, rows) -> Iterator[Call]:
    """The calls of one branch in the segment from ``start``; ``rows``: where the two parts begin in their shards."""
    alike: dict[tuple[int, int], list] = {}
    for head, offset in zip(branch.heads, branch.offsets):
        firsts = [(start + offset - part.start) % branch.rate for part in (asking, wanted)]
        counts = tuple(-(-(len(part) - first) // branch.rate) for part, first in zip((asking, wanted), firsts))
        if min(counts) > 0:
            member = (head, firsts[0] + rows[0], firsts[1] + rows[1], head // (problem.heads // problem.kv_heads))
            alike.setdefault(counts, []).append(member)
    for counts, members in alike.items():
        for run in progressions(members):
            yield _call(run, branch.rate, *counts)


def _call(run: list[tuple[int, ...]], rate: int, q_count: int, k_count: int, causal: bool = False) -> Call:
    """The call of a progression of (head, first query row, first key row, K/V head)."""
    (head, head_step), (q_first, q_shift), (k_first, k_shift), (kv_head, kv_step) = first_and_step(run)
    queries = View(q_count, q_first, rate, 0, head, head_step, q_shift)
    keys = View(k_count, k_first, rate, 0, kv_head, kv_step, k_shift)
    return Call(queries, keys, heads=len(run), causal=causal)


def _striped(problem: Problem, rank: int, source: int) -> list[Call]:
    """Dense attention between stripes: row i of a rank is at position i * ranks + rank."""
    q_count, k_count = problem.layout.size(rank), problem.layout.size(source)
    skip = 0
    if problem.causal:
        skip = int(source > rank)  # the first query comes before this source's first key
        q_count = k_count = min(q_count - skip, k_count)
    if min(q_count, k_count) < 1:
        return []
    group = problem.heads // problem.kv_heads
    runs = progressions([(h, skip, 0, h // group) for h in range(problem.heads)])
    return [_call(run, 1, q_count, k_count, problem.causal) for run in runs]


# Received rows (R, 2, b, d) are read as k and v (b, R, 1, d): one row for each position and K/V head of a block.


def received_calls(plan: RankPlan) -> list[Call]:
    """The calls of a rank's queries on the rows that it receives: one per branch, cut segment and group of heads."""
    problem = plan.problem
    if isinstance(problem.pattern, Dense):
        return _on_blocks(plan)
    table, found = _Table(plan), []
    for row, queries in chunks(problem.layout, plan.rank):
        for branch in problem.branches:
            for start, asking, sides in _cut_segments(problem, branch, queries):
                rows = row + asking.start - queries.start
                found += _on_received(branch, problem, start, asking, sides, rows, table)
    return found


def _on_blocks(plan: RankPlan) -> list[Call]:
    """Dense attention: what comes of a chunk is read where it lies, without an index."""
    found, row = [], 0
    for source, blocks in enumerate(plan.receive):
        calls = cross_rank_calls(plan.problem, plan.rank, source) if blocks else []
        starts = [first for first, _ in chunks(plan.problem.layout, source)]
        for block in blocks:
            begin, h = block.local(plan.problem.layout, source).first[0], block.heads
            for call in calls:
                k = call.k
                if max(s for s in starts if s <= k.first) == begin:
                    first = row + (k.first - begin) * h + k.head
                    keys = View(k.rows, first, k.step * h, head_step=0, shift=k.shift * h + k.head_step)
                    found.append(replace(call, k=keys))
            row += block.rows
    return found


def _cut_segments(problem: Problem, branch: Branch, queries: range) -> Iterator[tuple[int, range, list[range]]]:
    """(start, query part, ranges of foreign keys that it sees) of each segment that an end of the chunk cuts."""
    n, length = problem.layout.n, branch.length
    starts = {queries.start // length * length, (queries.stop - 1) // length * length}
    for start in sorted(starts):
        stop = min(n, start + length)
        before = range(start, max(start, queries.start))
        after = range(min(stop, queries.stop), stop if not problem.causal else 0)
        if sides := [side for side in (before, after) if side]:
            yield start, range(max(start, queries.start), min(stop, queries.stop)), sides


def _on_received(branch, problem: Problem, start: int, asking: range, sides, row: int, table: _Table):
    alike: dict[tuple[int, int], list] = {}
    for head, offset in zip(branch.heads, branch.offsets):
        first = (start + offset - asking.start) % branch.rate
        count = -(-(len(asking) - first) // branch.rate)
        if count > 0:
            kv_head = head // (problem.heads // problem.kv_heads)
            rows = table.find(kv_head, start + offset, branch.rate, sides)  # (keys,)
            if len(rows):
                alike.setdefault((count, len(rows)), []).append((head, first + row, rows))
    for (q_count, _), members in alike.items():
        indices = {head: rows for head, _, rows in members}
        for run in progressions([(head, first) for head, first, _ in members]):
            (head, head_step), (q_first, q_shift) = first_and_step(run)
            keys = View.of(torch.stack([indices[h] for h, _ in run], 1))  # of (keys, heads)
            queries = View(q_count, q_first, branch.rate, 0, head, head_step, q_shift)
            yield Call(queries, keys, heads=len(run))


class _Table:
    """Where in a rank's received rows each (K/V head, position) lies."""

    def __init__(self, plan: RankPlan):
        positions: dict[int, list[Tensor]] = {}
        numbers: dict[int, list[Tensor]] = {}
        row = 0
        for blocks in plan.receive:
            for block in blocks:
                for i, (head, where) in enumerate(block.members()):
                    positions.setdefault(head, []).append(torch.arange(where.start, where.stop, where.step))
                    numbers.setdefault(head, []).append(torch.arange(row + i, row + block.rows, block.heads))
                row += block.rows
        self.sorted: dict[int, tuple[Tensor, Tensor]] = {}
        for head, found in positions.items():
            where, order = torch.cat(found).sort()
            self.sorted[head] = where, torch.cat(numbers[head])[order]

    def find(self, head: int, first: int, rate: int, sides: list[range]) -> Tensor:
        """Row numbers of positions first + i * rate that lie in ``sides`` and were received."""
        if head not in self.sorted:
            return torch.empty(0, dtype=torch.long)
        where, numbers = self.sorted[head]
        found = []
        for side in sides:
            low, high = torch.searchsorted(where, torch.tensor([side.start, side.stop])).tolist()
            wanted = (where[low:high] - first) % rate == 0
            found.append(numbers[low:high][wanted])
        return torch.cat(found)


@dataclass
class Rank:
    """One rank of a problem: how it computes, and its plans."""

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
        """Which rows the rank receives and sends."""
        key = "exchange", self.problem, self.rank
        return self.cached(key, lambda: plan_rank(self.problem, self.rank))

    def calls(self, source: int | None, step: int | None = None) -> Plan:
        """The calls on the shard of a rank, or on the rows received (None); ``step``: for so many heads at a time."""
        given = *self._plan_key(), source
        plan = self.cached(given, lambda: self._plan(source))
        if step is None or step >= self.problem.heads:
            return plan
        return self.cached((*given, step), lambda: plan.in_head_blocks(step))

    def _plan_key(self) -> tuple:
        return "calls", self.problem, self.rank

    def _plan(self, source: int | None) -> Plan:
        calls = received_calls(self.plan) if source is None else cross_rank_calls(self.problem, self.rank, source)
        n, heads = self.problem.layout.size(self.rank), range(self.problem.heads)
        return Plan(((heads, tuple(calls), tuple(calls)),), (), merges=True, same_rows=False, rows=range(n), period=n)

    def heads_at_a_time(self, q: Tensor) -> int:
        """So few that the fp32 copy of a half-precision result stays within a quarter of it."""
        return max(1, self.problem.heads // 8)

    def keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """k and v as ``calls(None)`` reads them: views of all received rows (R, 2, b, d)."""
        return tuple(t.transpose(0, 1).unsqueeze(2) for t in rows.unbind(1))  # (b, R, 1, d)

    def local_forward(self, q, k, v) -> tuple[Tensor, Tensor]:
        """out (b, s, h, d) and lse (b, h, s) over the keys of the own shard."""
        parts = self._chunks()
        if len(parts) == 1:
            out, lse = self._chunk_forward(*parts[0], q, k, v)
        else:
            out, lse = empty(q)
            for row, positions in parts:
                rows = slice(row, row + len(positions))
                out[:, rows], lse[:, :, rows] = self._chunk_forward(row, positions, q, k, v)
        self.add_forward(self.rank, q, (k, v), out, lse)
        return out, lse

    def local_backward(self, dout, q, k, v, out, lse) -> tuple[Tensor, ...]:
        """dq, dk, dv, at least fp32 where more than one call adds to them."""
        parts, tensors = self._chunks(), (dout, q, k, v, out, lse)
        if len(parts) == 1 and not self.calls(self.rank).calls:
            return self._chunk_backward(*parts[0], *tensors)
        grads = tuple(torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in (q, k, v))
        for row, positions in parts:
            for total, part in zip(grads, self._chunk_backward(row, positions, *tensors)):
                total[:, row : row + len(positions)] += part
        self.add_backward(self.rank, (dout, q, out, lse), (k, v), grads[0], grads[1:])
        return grads

    def _chunks(self) -> list[tuple[int, range]]:
        return [] if self.problem.layout.kind == "striped" else chunks(self.problem.layout, self.rank)

    def _chunk_forward(self, row: int, positions: range, *tensors) -> tuple[Tensor, Tensor]:
        """The one-device engine on one chunk, its segments cut where the chunk ends."""
        q, k, v = (t[:, row : row + len(positions)] for t in tensors)
        plan = dilated.plan_for(q, k, self.problem.pattern, self.cached, n=self.problem.layout.n, chunk=positions)
        pool = self.execution.scratch()
        return execute.forward(q, k, v, plan, self.problem.causal, self.scale, self.kernel, pool=pool)

    def _chunk_backward(self, row: int, positions: range, *tensors) -> tuple[Tensor, ...]:
        *reads, lse = tensors
        rows = slice(row, row + len(positions))
        reads, n = [t[:, rows] for t in reads], self.problem.layout.n
        plan = dilated.plan_for(
            reads[1], reads[2], self.problem.pattern, self.cached, backward=True, n=n, chunk=positions
        )
        run = plan, self.problem.causal, self.scale, self.kernel
        return execute.backward(*reads, lse[:, :, rows], *run, pool=self.execution.scratch())

    def add_forward(self, source: int | None, q, keys, out, lse) -> None:
        """Merge the calls on ``source``, whose k and v are ``keys``, into out and lse (b, h, s)."""
        plan = self.calls(source, self.heads_at_a_time(q) if out.dtype in HALF else None)
        if plan.calls:
            execute.forward(q, *keys, plan, self.problem.causal, self.scale, self.kernel, into=(out, lse))

    def add_backward(self, source: int | None, reads, keys, dq, into) -> None:
        """Add the gradients of the calls on ``source`` to dq and to ``into``, those of ``keys``; all fp32 or wider.

        ``reads``: dout, q, out, lse.
        """
        (dout, q, out, lse), plan = reads, self.calls(source)
        if plan.calls:
            given = dout, q, *keys, out, lse, plan, self.problem.causal, self.scale, self.kernel
            execute.backward(*given, into=(dq, *into))

    def received_forward(self, q, rows, out, lse) -> None:
        """Merge the calls on the rows received under the plan into out and lse (b, h, s)."""
        if len(rows):
            self.add_forward(None, q, self.keys(rows), out, lse)

    def received_backward(self, reads, rows, dq, d_rows) -> None:
        """Add the gradients of the calls on the received rows to dq and ``d_rows``, fp32 or wider."""
        if len(rows):
            self.add_backward(None, reads, self.keys(rows), dq, self.keys(d_rows))


class BlockRank(Rank):
    """A rank of a block-sparse pattern under the plan: dense calls on the parts of blocks that it has."""

    def _plan_key(self) -> tuple:
        return "block calls", self.problem, self.rank, supports_lower_right_causal(self.kernel)

    def _plan(self, source: int | None) -> Plan:
        problem, ranges = self.problem, None
        if source is None:  # every block that moves is a range of positions of all K/V heads
            ranges = [next(block.members())[1] for blocks in self.plan.receive for block in blocks]
        own = problem.pattern, problem.layout, problem.causal, self.rank
        lower_right = supports_lower_right_causal(self.kernel)
        return exchange.block_calls(*own, ranges, problem.heads, problem.kv_heads, lower_right=lower_right)

    def heads_at_a_time(self, q: Tensor) -> int:
        return head_block(q, self.problem.kv_heads, q.shape[1])

    def keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.problem.kv_heads
        return shard_of(rows, 0, len(rows) // heads, heads)  # (b, positions, h_kv, d)

    def local_forward(self, q, k, v) -> tuple[Tensor, Tensor]:
        plan = self.calls(self.rank)
        if plan.narrow(q.dtype, q.shape[2] // k.shape[2], backward=False):
            plan = self.calls(self.rank, self.heads_at_a_time(q))
        pool = self.execution.scratch()
        return execute.forward(q, k, v, plan, self.problem.causal, self.scale, self.kernel, pool=pool)

    def local_backward(self, dout, q, k, v, out, lse) -> tuple[Tensor, ...]:
        grads = tuple(torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in (q, k, v))
        self.add_backward(self.rank, (dout, q, out, lse), (k, v), grads[0], grads[1:])
        return grads


def empty(q: Tensor) -> tuple[Tensor, Tensor]:
    """out (b, s, h, d) of zeros and lse (b, h, s) of -inf: no keys so far."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse.transpose(1, 2)


def shard_of(rows: Tensor, first: int, count: int, heads: int) -> tuple[Tensor, Tensor]:
    """k and v (b, count, heads, d) as views of received rows (R, 2, b, d)."""
    block = rows[first : first + count * heads].unflatten(0, (count, heads))  # (count, heads, 2, b, d)
    return tuple(t.permute(2, 0, 1, 3) for t in block.unbind(2))


def widened(tensors) -> tuple[Tensor, ...]:
    return tuple(t.to(accumulation_dtype(t.dtype)) for t in tensors)
