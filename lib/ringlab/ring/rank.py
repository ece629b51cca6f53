"""Attention between rows that lie in different places: which strided views of two shards meet, and received rows.

Where a query chunk meets foreign keys of one segment, every query sees every key (see ``plan``), so each meeting is one
dense call without a mask. Only a striped layout needs one: the square mask, shifted by a row where its keys come later.

What one rank computes: its own chunks by the one-device engine, and its meetings with other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .. import cache as caches
from ..engine import Execution, block_passes, execute
from ..engine.block_calls import Tiling
from ..engine.dilated import first_and_step, progressions
from ..kernels.base import HALF, Kernel, supports_lower_right_causal, accumulation_dtype
from ..patterns import Branch, Dense
from . import exchange
from .exchange import Problem, RankPlan, StridedRows, plan_rank
from .layout import Layout


@dataclass(frozen=True)
class Rows:
    """``count`` rows of a shard at ``rate`` for each head of a call; ``head`` and ``first`` are (first, step)."""

    rate: int
    count: int
    head: tuple[int, int]
    first: tuple[int, int]

    def view(self, t: Tensor, heads: int) -> Tensor:
        """These rows of t (b, s, h, d) as (b, 1, count, heads, d)."""
        s_b, s_n, s_h, s_d = t.stride()
        size = (t.shape[0], 1, self.count, heads, t.shape[3])
        stride = (s_b, 0, self.rate * s_n, self.head[1] * s_h + self.first[1] * s_n, s_d)
        return t.as_strided(size, stride, t.storage_offset() + self.first[0] * s_n + self.head[0] * s_h)

    def skip(self, heads: int) -> Rows:
        """Without the first heads."""
        (head, h_step), (first, f_step) = self.head, self.first
        return replace(self, head=(head + heads * h_step, h_step), first=(first + heads * f_step, f_step))


@dataclass(frozen=True)
class Meeting:
    """One dense call for ``heads`` heads: rows of the query shard, and rows of a key shard or of what was received.

    ``keys``: Rows of a shard, or an index (count, heads) into received rows. ``block``: (first row, count, heads) of
    the received rows that form the shard. ``causal``: the square mask.
    """

    heads: int
    queries: Rows
    keys: Rows | Tensor
    causal: bool = False
    block: tuple[int, int, int] | None = None

    @property
    def shares_kv(self) -> bool:
        return isinstance(self.keys, Rows) and self.keys.head[1] == 0 and self.keys.first[1] == 0 and self.heads > 1

    def part(self, start: int, stop: int) -> Meeting | None:
        """The same for heads start .. stop - 1, with the queries' heads counted from ``start``; None: it has none."""
        first, step = self.queries.head
        mine = [i for i in range(self.heads) if start <= first + i * step < stop]
        if not mine:
            return None
        queries = self.queries.skip(mine[0])
        queries = replace(queries, head=(queries.head[0] - start, step))
        keys = self.keys.skip(mine[0]) if isinstance(self.keys, Rows) else self.keys[:, mine[0] : mine[-1] + 1]
        return replace(self, heads=len(mine), queries=queries, keys=keys)


def local_rows(layout: Layout, rank: int, block: StridedRows) -> Rows:
    """A block's rows in the shard of the rank that owns them."""
    row = 0
    for owned in layout.ranges(rank):
        if block.first[0] in owned:
            first = (row + owned.index(block.first[0]), block.first[1] // owned.step)
            return Rows(max(1, block.rate // owned.step), block.count, block.kv_head, first)
        row += len(owned)
    raise ValueError(f"rank {rank} does not own position {block.first[0]}")


def chunks(layout: Layout, rank: int) -> list[tuple[int, range]]:
    """(first row in the shard, positions) of each chunk of a rank."""
    found, row = [], 0
    for owned in layout.ranges(rank):
        found.append((row, owned))
        row += len(owned)
    return found


def meetings(problem: Problem, rank: int, source: int) -> list[Meeting]:
    """All calls of a rank's queries on the shard of ``source``; on its own shard those between different chunks."""
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


def _between(branch: Branch, problem: Problem, start: int, asking: range, wanted: range, rows) -> Iterator[Meeting]:
    """The calls of one branch in the segment from ``start``; ``rows``: where the two parts begin in their shards."""
    alike: dict[tuple[int, int], list] = {}
    for head, offset in zip(branch.heads, branch.offsets):
        firsts = [(start + offset - part.start) % branch.rate for part in (asking, wanted)]
        counts = tuple(-(-(len(part) - first) // branch.rate) for part, first in zip((asking, wanted), firsts))
        if min(counts) > 0:
            member = (head, firsts[0] + rows[0], firsts[1] + rows[1], head // (problem.heads // problem.kv_heads))
            alike.setdefault(counts, []).append(member)
    for (q_count, k_count), members in alike.items():
        for run in progressions(members):
            head, q_first, k_first, kv_head = first_and_step(run)
            queries, keys = (Rows(branch.rate, c, h, f) for c, h, f in (
                (q_count, head, q_first), (k_count, kv_head, k_first)))  # fmt: skip
            yield Meeting(len(run), queries, keys)


def _striped(problem: Problem, rank: int, source: int) -> list[Meeting]:
    """Dense attention between stripes: row i of a rank stands at position i * ranks + rank."""
    q_count, k_count = problem.layout.size(rank), problem.layout.size(source)
    skip = 0
    if problem.causal:
        skip = int(source > rank)  # the first query comes before this source's first key
        q_count = k_count = min(q_count - skip, k_count)
    if min(q_count, k_count) < 1:
        return []
    group = problem.heads // problem.kv_heads
    found = []
    for run in progressions([(h, skip, 0, h // group) for h in range(problem.heads)]):
        head, q_first, k_first, kv_head = first_and_step(run)
        queries, keys = Rows(1, q_count, head, q_first), Rows(1, k_count, kv_head, k_first)
        found.append(Meeting(len(run), queries, keys, problem.causal))
    return found


def received_meetings(plan: RankPlan) -> list[Meeting]:
    """All calls of a rank's queries on the rows that it receives: one per branch, cut segment and group of heads."""
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


def _on_blocks(plan: RankPlan) -> list[Meeting]:
    """Dense attention: what comes of a chunk is read where it lies, without an index."""
    found, row = [], 0
    for source, blocks in enumerate(plan.receive):
        calls = meetings(plan.problem, plan.rank, source) if blocks else []
        starts = [first for first, _ in chunks(plan.problem.layout, source)]
        for block in blocks:
            begin = local_rows(plan.problem.layout, source, block).first[0]
            for call in calls:
                if max(s for s in starts if s <= call.keys.first[0]) == begin:
                    keys = replace(call.keys, first=(call.keys.first[0] - begin, call.keys.first[1]))
                    found.append(replace(call, keys=keys, block=(row, block.count, block.heads)))
            row += block.rows
    return found


def _cut_segments(problem: Problem, branch: Branch, queries: range) -> Iterator[tuple[int, range, list[range]]]:
    """(start, query part, foreign key stretches that are seen) of the segments that the ends of a chunk cut."""
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
            head, q_first = first_and_step(run)
            index = torch.stack([indices[h] for h, _ in run], 1)  # (keys, heads)
            yield Meeting(len(run), Rows(branch.rate, q_count, head, q_first), index)


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
        grads = tuple(torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in (q, k, v))
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
        plan = execute.plan_for(q, k, self.problem.pattern, self.cached, self.problem.layout.n, positions)
        run = getattr(execute, passes)
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
        heads, limit = q.shape[2], execute.piece_limit(q)
        for start, stop in _head_blocks(out, heads):
            acc = out[:, :, start:stop].float() if out.dtype in HALF else out  # (b, s, h', d), rounded once at the end
            for call in filter(None, (c.part(start, stop) for c in calls)):
                k, v = keys_of(call, source)
                rows = call.queries
                views = (rows.view(q[:, :, start:stop], call.heads), k, v,
                         rows.view(lse[:, :, start:stop], call.heads), rows.view(acc, call.heads))  # fmt: skip
                execute.add_forward(views, limit, False, call.causal, self.scale, self.kernel)
            if acc is not out:
                out[:, :, start:stop] = acc

    def add_backward(self, calls: list[Meeting], reads, source, dq, into) -> None:
        """Add the gradients of calls: to dq, and ``into`` a pair dk, dv or gradients of received rows.

        ``reads``: dout, q, out, lse; dq and ``into`` are fp32 or wider.
        """
        dout, q, out, lse = reads
        lse, limit = lse.transpose(1, 2).unsqueeze(-1), execute.piece_limit(q)
        for call in calls:
            rows, h = call.queries, call.heads
            k, v = keys_of(call, source)
            indexed = isinstance(call.keys, Tensor)
            grads = _fresh(k) if indexed else keys_of(call, into)
            views = (*(rows.view(t, h) for t in (dout, q)), k, v, *(rows.view(t, h) for t in (out, lse, dq)), *grads)
            shared = call.shares_kv
            execute.add_backward(views, limit, False, shared, call.causal, self.scale, self.kernel)
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
            return exchange.block_calls(*own, ranges, lower_right=lower_right)

        problem, lower_right = self.problem, supports_lower_right_causal(self.kernel)
        return self.cached(caches.key("block calls", problem, self.rank, received, lower_right), build)

    def _keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (b, positions, h_kv, d) as views of all received rows (R, 2, b, d)."""
        heads = self.problem.kv_heads
        return shard_of(rows, 0, len(rows) // heads, heads)

    def local_forward(self, q, k, v) -> tuple[Tensor, Tensor]:
        out, lse = block_passes.forward(q, k, v, self._calls(False), self.scale, self.kernel)
        return out, lse.transpose(1, 2).unsqueeze(-1)

    def local_backward(self, dout, q, k, v, out, lse) -> tuple[Tensor, ...]:
        grads = tuple(torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in (q, k, v))
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
    lse = torch.full((*q.shape[:3], 1), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
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
    return tuple(torch.zeros(k.shape, dtype=accumulation_dtype(k.dtype), device=k.device) for _ in range(2))


def shard_of(rows: Tensor, first: int, count: int, heads: int) -> tuple[Tensor, Tensor]:
    """k and v (b, count, heads, d) as views of received rows (R, 2, b, d)."""
    block = rows[first : first + count * heads].unflatten(0, (count, heads))  # (count, heads, 2, b, d)
    return tuple(t.permute(2, 0, 1, 3) for t in block.unbind(2))


def widened(tensors) -> tuple[Tensor, ...]:
    return tuple(t.to(accumulation_dtype(t.dtype)) for t in tensors)
