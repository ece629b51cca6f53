"""The planner of block-sparse patterns: their calls, by index arithmetic alone, without
tensors.

A block of queries is attended to each run of neighbouring blocks of keys that it sees.
Equal calls in arithmetic progression are one call over a strided view; scattered blocks
of keys are copied together first.

A window of tokens is cut in squares of 1, 2, 4, ... tokens, which make up its edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_patterns import AT_ONCE, BlockSparse, Random, window_of_tokens
from .dilated import even_runs, first_and_step
from .execute import Call, HeadBlock, Plan, Planner, View, altered

Entry = tuple[int, int, int, int]  # a dense call: rows, keys, first query, first key
EDGE = 128  # queries of a window of tokens that are taken together
JOINED = 1024  # queries, at most, of blocks that see the same keys
FEW_RUNS = 3  # of keys that a block of queries sees; of more the keys are copied


def planner(
    pattern: BlockSparse,
    n: int,
    heads: int,
    kv_heads: int,
    causal: bool,
) -> Planner:
    """The planner of dense calls."""
    call = pattern, n, heads, kv_heads, causal
    return Planner(("blocks", *call), lambda: make_plan(*call))


def make_plan(
    pattern: BlockSparse,
    n: int,
    heads: int = 1,
    kv_heads: int = 1,
    causal: bool = False,
) -> Plan:
    """The calls for ``n`` positions of queries and of keys.

    >>> from ringlab.block_patterns import local_global
    >>> call = make_plan(local_global(2, 4, block_size=128), 16384).calls[0]  # the global blocks of keys
    >>> call.repeats, call.q.rows, call.q.repeat_step, call.k.rows, call.k.repeat_step
    (15, 1024, 1024, 512, 0)
    """
    whole = BlockParts.of([range(n)], pattern.block_size)
    sizes = heads, kv_heads
    return plan_between(pattern, n, whole, whole, *sizes, causal=causal, itself=True)


def layers_of(
    pattern: BlockSparse,
) -> Iterator[tuple[BlockSparse, BlockSparse | None, bool]]:
    """(pattern, another, whether its keys are copied): disjoint layers, each what the
    other pattern does not show.

    First the parts that have an order, then what random blocks, which have no
    neighbours to be read with, add to them.
    """
    random = tuple(p for p in pattern.parts if isinstance(p, Random))
    regular = tuple(p for p in pattern.parts if p not in random)
    first, second = (
        BlockSparse(x, pattern.block_size) if x else None for x in (regular, random)
    )
    if first is not None:
        yield first, None, False
    if second is not None:
        yield second, first, True


@dataclass(frozen=True)
class BlockParts:
    """Chunks cut where blocks end, in the order of their rows: ``blocks``, ``starts``
    and ``stops`` (parts,).
    """

    blocks: Tensor
    starts: Tensor
    stops: Tensor

    @classmethod
    def of(cls, ranges: Sequence[range], size: int) -> BlockParts:
        """Ranges of positions cut at multiples of ``size``."""
        blocks = [
            torch.arange(r.start // size, (r.stop - 1) // size + 1) for r in ranges
        ]
        starts = [(b * size).clamp(min=r.start) for b, r in zip(blocks, ranges)]
        stops = [((b + 1) * size).clamp(max=r.stop) for b, r in zip(blocks, ranges)]
        none = torch.empty(0, dtype=torch.long)
        return cls(*(torch.cat([none, *parts]) for parts in (blocks, starts, stops)))

    @property
    def span(self) -> range | None:
        """The blocks, if they are neighbours in order."""
        if len(self.blocks) and (self.blocks.diff() == 1).all():
            return range(int(self.blocks[0]), int(self.blocks[-1]) + 1)
        return None

    @property
    def lengths(self) -> Tensor:
        """The rows of each (parts,)."""
        return self.stops - self.starts

    @property
    def rows(self) -> Tensor:
        """The first row of each (parts,), one behind the other."""
        return self.lengths.cumsum(0) - self.lengths

    def __getitem__(self, which) -> BlockParts:
        return BlockParts(self.blocks[which], self.starts[which], self.stops[which])

    def near(self, pattern: BlockSparse, queries: Tensor, n: int) -> Tensor:
        """Numbers of the parts (c,) outside of which the blocks ``queries`` see
        nothing; the same as in the pattern.
        """
        near = torch.zeros(pattern.count(n) + 1, dtype=torch.bool)
        near[pattern.near(queries, n)] = True
        inside = near[self.blocks]
        inside[1:] |= inside[:-1].clone()  # the first part of every gap
        return inside.nonzero().flatten()

    def before(self, others: BlockParts) -> Tensor:
        """Which of these lie before which others, bool (others, parts)."""
        return self.stops[None, :] <= others.starts[:, None]


def plan_between(
    pattern: BlockSparse,
    n: int,
    queries: BlockParts,
    keys: BlockParts,
    heads: int,
    kv_heads: int,
    *,
    causal: bool,
    itself: bool,
) -> Plan:
    """The plan of ``queries``, in this order of rows, on ``keys``, of ``n`` positions.

    ``itself``: the keys are those of the queries, so that causal attention needs the
    mask on the diagonal.
    """

    window = window_of_tokens(pattern, causal)
    rows = (queries.span, keys.span)
    if window and all(rows):
        arguments = *window, *rows, heads, kv_heads
        return window_plan(*arguments, causal=causal and itself)

    entries: list[Entry] = []
    gathered: list[Call] = []
    key_rows = keys.rows
    ends = key_rows + keys.lengths
    for shown, hidden, copied in layers_of(pattern):
        part, first, last = _runs(shown, hidden, queries, keys, n, causal)
        rows = queries.lengths[part]
        at = queries.rows[part]
        begin = key_rows[first]
        count = ends[last] - begin
        many = torch.bincount(part, minlength=1)[part] > FEW_RUNS
        apart = many | torch.full_like(many, copied)
        entries += torch.stack([rows, count, at, begin], 1)[~apart].tolist()
        for size in rows[apart].unique().tolist():
            some = apart & (rows == size)
            runs = part[some], begin[some], count[some], at[some]
            gathered += _gathered_calls(*runs, size)
    calls = _strided_calls(entries)
    if causal and itself:
        seen = [
            pattern.blocks(n, subset, subset).diagonal()
            for subset in queries.blocks.split(AT_ONCE)
        ]
        own = torch.cat(seen).nonzero().flatten()  # blocks that see themselves
        rows = queries.rows[own]
        size = queries.lengths[own]
        squares = torch.stack([size, size, rows, rows], 1).tolist()
        calls += _strided_calls(squares, causal=True)
    return _plan(calls, gathered, int(queries.lengths.sum()), heads, kv_heads)


def _runs(
    shown: BlockSparse,
    hidden: BlockSparse | None,
    queries: BlockParts,
    keys: BlockParts,
    n: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(part of the queries, first part of the keys, last) of each run of parts of keys
    that are seen, by queries. What ``hidden`` shows is left out.

    Queries are taken some at a time: time and memory then grow with what is near them,
    not with the square of all.
    """
    none = torch.empty(0, dtype=torch.long)
    runs = [(none, none, none)]
    for start in range(0, len(queries.blocks), AT_ONCE):
        subset = queries[start : start + AT_ONCE]
        cols = keys.near(shown, subset.blocks, n)
        blocks = n, subset.blocks, keys.blocks[cols]
        seen = shown.blocks(*blocks)  # (rows, cols)
        if hidden is not None:
            seen &= ~hidden.blocks(*blocks)
        if causal:
            seen &= keys[cols].before(subset)
        edge = torch.zeros(len(seen), 1, dtype=torch.int8)
        # 1 where a run begins, -1 behind its end.
        change = torch.cat([edge, seen.to(torch.int8), edge], 1).diff(dim=1)
        row, first = (change == 1).nonzero().unbind(1)
        last = (change == -1).nonzero()[:, 1] - 1
        runs.append((start + row, cols[first], cols[last]))
    return tuple(map(torch.cat, zip(*runs)))


def window_plan(
    before: int,
    after: int,
    queries: range,
    keys: range,
    heads: int,
    kv_heads: int,
    *,
    causal: bool,
) -> Plan:
    """The plan of a window of tokens. ``causal``: the keys are those of the queries,
    and the first of these see all before them.

    Others are taken EDGE at a time, with the keys that all of them see.
    """
    before = min(before, max(0, queries.stop - keys.start))
    after = min(after, max(0, keys.stop - queries.start))
    first = min(len(queries), before + 1) if causal else 0
    calls = [_call(first, first, 1, (0, 0), (0, 0), causal=True)] if causal else []
    seeing = range(  # queries that see a key
        max(queries.start + first, keys.start - after),
        min(queries.stop, keys.stop + before),
    )
    apart = queries.start - keys.start
    rows = seeing.start - queries.start, seeing.stop - queries.start
    sides = before - apart, after + apart
    calls += _squares_of_window(*sides, *rows, len(keys), causal)
    return _plan(calls, [], len(queries), heads, kv_heads)


def _squares_of_window(
    before: int, after: int, first: int, stop: int, keys: int, causal: bool
) -> Iterator[Call]:
    """The calls of the queries first .. stop - 1 on the first ``keys``
    keys: each pair of a window once. ``causal``: as of ``window_plan``.

    ``edge`` queries have a run of keys in common. What one of them alone sees before it
    and behind it are triangles: squares of half the edge, of a quarter, and so on.
    """
    half = edge = 1 << min(EDGE, before + after + 1).bit_length() - 1
    common = before + after + 2 - edge - causal
    # Rows, keys, where both begin in each step, the step, whether causal.
    shapes = [(edge, common, 0, edge - 1 - before, edge, False)]
    if causal:
        shapes.append((edge, edge, 0, 0, edge, True))
    while half := half // 2:
        shapes.append((half, half, 0, half - 1 - before, 2 * half, False))
        if not causal:
            shapes.append((half, half, half, after + 1, 2 * half, False))
    for rows, count, q, k, step, square in shapes:
        at = torch.arange(first, max(first, stop - q), step)  # (repeats,)
        start = (at + k).clamp(min=0)
        end = (at + k + count).clamp(max=keys)
        cut = torch.stack([(stop - q - at).clamp(max=rows), end - start], 1)
        new = F.pad((cut.diff(dim=0) != 0).any(1), (1, 0), value=True)[: len(at)]
        begins = new.nonzero().flatten().tolist()
        pairs = torch.stack([at + q, start], 1)  # (repeats, 2)
        for shape, run in zip(cut[begins].tolist(), pairs.tensor_split(begins[1:])):
            if shape[1] > 0:
                yield _call(*shape, len(run), *first_and_step(run[:2].tolist()), square)


def _plan(
    calls: list[Call],
    gathered: list[Call],
    n: int,
    heads: int,
    kv_heads: int,
) -> Plan:
    """Strided calls that write most rows run first: those that write them first need no
    merge. Then gathered ones.
    """
    written, uncovered = torch.zeros(2, n, dtype=torch.bool)
    ordered = []
    for call in sorted(calls, key=_order) + gathered:
        q = call.q
        starts = (
            q.first + q.repeat_step * torch.arange(call.repeats)[:, None]
            if q.index is None
            else q.index
        )
        at = (starts + torch.arange(q.rows)).flatten()
        fresh = ~written[at]
        first = q.index is None and not _merged(call) and bool(fresh.all())
        uncovered[at[fresh]] = not first
        written[at] = True
        ordered.append(altered(call, first=first))
    uncovered |= ~written
    edges = F.pad(uncovered.int(), (1, 1)).diff().nonzero().flatten()
    ranges = tuple(zip(edges[::2].tolist(), edges[1::2].tolist()))
    merges = len(ordered) > 1 or any(map(_merged, ordered))
    group = heads // kv_heads

    # The heads of one K/V head one after another.
    every_head = [
        altered(c, heads=kv_heads, q=altered(c.q, head=g, head_step=group))
        for g in range(group)
        for c in ordered
    ]
    block = HeadBlock(range(heads), tuple(every_head))
    return Plan((block,), ranges, merges, same_rows=False, rows=range(n), period=n)


def _order(call: Call) -> tuple:
    written = call.q.rows * (1 if _merged(call) else call.repeats)
    return -written, _merged(call), call.q.first, call.q.repeat_step


def _merged(call: Call) -> bool:
    """Whether all repeats have the same queries."""
    return call.repeats > 1 and call.q.shared


def _call(
    rows: int,
    keys: int,
    repeats: int,
    query: tuple[int, int],
    key: tuple[int, int],
    causal: bool = False,
) -> Call:
    """``repeats`` calls of ``rows`` queries by ``keys`` keys; ``query``, ``key``: (first,
    step) of their rows.
    """
    return Call(
        View(rows, query[0], repeat_step=query[1]),
        View(keys, key[0], repeat_step=key[1]),
        repeats,
        causal=causal,
    )


def _strided_calls(entries: list[Entry], causal: bool = False) -> list[Call]:
    calls = (_call(*shape, causal) for shape in _progressions(entries))
    return [part for call in calls for part in _join_neighbours(call)]


def _join_neighbours(call: Call) -> Iterator[Call]:
    """The same calls, with neighbouring blocks of queries that see the same keys joined up
    to JOINED queries.
    """
    rows = call.q.rows
    each = max(1, JOINED // rows)
    if call.causal or call.k.repeat_step or call.q.repeat_step != rows or each == 1:
        yield call
        return
    whole, rest = divmod(call.repeats, each)
    first = call.q.first + whole * each * rows
    if whole:
        q = altered(call.q, rows=each * rows, repeat_step=each * rows)
        yield altered(call, q=q, repeats=whole)
    if rest:
        yield altered(call, q=View(rest * rows, first), repeats=1)


def _gathered_calls(
    node: Tensor, begin: Tensor, count: Tensor, at: Tensor, size: int
) -> list[Call]:
    """Calls on copied keys: nodes with equally many keys together.

    Each run (runs,) has its node, ascending, its first key and their number, and the
    node's first query.
    """
    if not len(node):
        return []
    shift = begin - (count.cumsum(0) - count)
    rows = shift.repeat_interleave(count) + torch.arange(
        int(count.sum())
    )  # keys of all runs
    nodes, which, runs = node.unique_consecutive(
        return_inverse=True, return_counts=True
    )
    total = torch.zeros_like(nodes).index_add_(0, which, count)  # keys of each node
    first = at[runs.cumsum(0) - runs]
    calls = []
    for number in total.unique():
        members = total == number
        keys = rows[members.repeat_interleave(total)].view(
            int(members.sum()), -1
        )  # (nodes, keys)
        calls.append(
            Call(
                _rows_from(first[members], size),
                View(keys.shape[1], index=keys),
                len(keys),
            )
        )
    return calls


def _rows_from(starts: Tensor, size: int) -> View:
    """``size`` rows from each of the ascending ``starts`` (nodes,) on: strided where
    these are evenly apart.
    """
    step = int(starts[min(1, len(starts) - 1)] - starts[0])
    if starts.diff().eq(step).all():
        return View(size, int(starts[0]), repeat_step=step)
    return View(size, index=starts[:, None])


def _progressions(entries: list[Entry]) -> Iterator[tuple]:
    """(rows, keys, repeats, query, key) for entries (rows, keys, q, k), in few arithmetic
    progressions of (q, k).
    """
    alike: dict[tuple[int, int], list] = {}
    for rows, count, q, k in entries:
        alike.setdefault((rows, count), []).append((q, k))
    for (rows, count), members in alike.items():
        apart: dict[int, int] = {}
        same: dict[int, int] = {}
        for q, k in members:
            apart[k - q] = apart.get(k - q, 0) + 1
            same[k] = same.get(k, 0) + 1
        groups: dict[
            tuple, list
        ] = {}  # by distance, as in a window, or by the keys themselves, as of a global block
        for q, k in members:
            groups.setdefault(
                ("apart", k - q) if apart[k - q] >= same[k] else ("same", k), []
            ).append((q, k))
        for group in groups.values():
            for run in _even_combs(sorted(group)):
                yield rows, count, len(run), *first_and_step(run)


def _even_combs(pairs: list[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Arithmetic progressions; of many equal ones in a row all first members, all
    second members, and so on.
    """
    alike: dict[tuple, dict] = {}
    for run in even_runs(pairs):
        steps = tuple(step for _, step in first_and_step(run))
        alike.setdefault((len(run), steps), {})[run[0]] = run
    for (length, _), runs in alike.items():
        for firsts in even_runs([*runs]):
            several = [runs[first] for first in firsts]
            yield from zip(*several) if len(several) > length else several
