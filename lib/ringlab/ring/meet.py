"""Attention between rows that lie in different places: which strided views of two shards meet, and received rows.

Where a query chunk meets foreign keys of one segment, every query sees every key (see ``plan``), so each meeting is one
dense call without a mask. Only a striped layout needs one: the square mask, shifted by a row where its keys come later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..patterns import Branch, Dense
from ..plan import first_and_step, progressions
from .layout import Layout
from .plan import Block, Problem, RankPlan


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


def local_rows(layout: Layout, rank: int, block: Block) -> Rows:
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
