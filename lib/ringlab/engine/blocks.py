"""The planner of block-sparse patterns: their calls, by index arithmetic alone, without
tensors.

Kernels are slow on short keys and on few queries, so neighbouring blocks of queries are
joined in a binary tree. A node of the tree takes the keys that all of its blocks see
and no larger node has taken, hence every pair is computed once. Only those levels of
the tree are used that make the calls cheapest. Equal nodes in arithmetic progression
are one call over a strided view; scattered blocks of keys are copied together first.

A window of tokens needs no tree: squares of 1, 2, 4, ... tokens make up its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_patterns import AT_ONCE, BlockSparse, Random, window_of_tokens
from ..kernels.base import PLAIN, Cost, Kernel
from .dilated import even_runs, first_and_step
from .execute import Call, HeadBlock, Plan, Planner, View, altered


def planner(
    pattern: BlockSparse,
    n: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    kernel: Kernel,
) -> Planner:
    """The planner for a kernel."""
    rest = heads, kv_heads, causal, kernel
    call = pattern, n, *rest

    def build(cached: Callable) -> Plan:
        size = pattern.block_size
        whole = pattern.count(n) * size
        # A call of LONG keys from inside a block might lie wholly behind n.
        if n == whole or LONG % size:
            return make_plan(*call)
        # Sequences of as many blocks share a plan: documents of a batch have hundreds
        # of lengths.
        longer = pattern, whole, *rest
        plan = cached(("blocks", *longer), lambda: make_plan(*longer))
        return plan.before(n)

    return Planner(("blocks", *call), build)


def make_plan(
    pattern: BlockSparse,
    n: int,
    heads: int = 1,
    kv_heads: int = 1,
    causal: bool = False,
    kernel: Kernel = PLAIN,
) -> Plan:
    """The calls for ``n`` positions of queries and of keys, for any kernel or those
    that are cheapest for ``kernel``.

    >>> from ringlab.block_patterns import local_global
    >>> call = make_plan(local_global(2, 4, block_size=128), 16384).calls[0]  # the global blocks of keys
    >>> call.repeats, call.q.rows, call.q.repeat_step, call.k.rows, call.k.repeat_step
    (16, 1024, 1024, 512, 0)
    """
    whole = BlockParts.of([range(n)], pattern.block_size)
    options = {"causal": causal, "itself": True, "kernel": kernel}
    return plan_between(pattern, n, whole, whole, heads, kv_heads, **options)


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


MOST_LEVELS = 6
SAMPLE = 512  # blocks of queries by which the levels are chosen
assert AT_ONCE % 2**MOST_LEVELS == 0  # chunks of whole nodes


@dataclass(frozen=True)
class Layer:
    """Blocks that are seen, and whether those of keys are copied together.

    ``seen``: for a range of blocks of queries bool (rows, c), and the numbers (c,) of
    the blocks of keys, in which neighbours that are both seen are neighbours; what is
    left out is not seen.
    """

    seen: Callable[[range], tuple[Tensor, Tensor]]
    copied: bool = False


@dataclass(frozen=True)
class Cuts:
    """Where blocks begin in a tensor's rows: ``starts`` (blocks,) and ``lengths``
    (blocks,), one behind the other.
    """

    starts: Tensor
    lengths: Tensor


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
    def cuts(self) -> Cuts:
        lengths = self.stops - self.starts
        return Cuts(lengths.cumsum(0) - lengths, lengths)

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
    kernel: Kernel,
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

    def layer(shown: BlockSparse, hidden: BlockSparse | None, copied: bool) -> Layer:
        def seen(rows: range) -> tuple[Tensor, Tensor]:
            subset = queries[rows.start : rows.stop]
            cols = keys.near(shown, subset.blocks, n)
            blocks = n, subset.blocks, keys.blocks[cols]
            visible = shown.blocks(*blocks)
            if hidden is not None:
                visible &= ~hidden.blocks(*blocks)
            return visible & keys[cols].before(subset) if causal else visible, cols

        return Layer(seen, copied)

    diagonal = None
    if causal and itself:
        seen = torch.cat(
            [
                pattern.blocks(n, subset, subset).diagonal()
                for subset in queries.blocks.split(AT_ONCE)
            ]
        )
        diagonal = torch.where(seen, torch.arange(len(seen)), -1)
    layers = [layer(*arguments) for arguments in layers_of(pattern)]
    return tile(layers, queries.cuts, keys.cuts, diagonal, heads, kv_heads, kernel)


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
        start, end = (at + k).clamp(min=0), (at + k + count).clamp(max=keys)
        cut = torch.stack([(stop - q - at).clamp(max=rows), end - start], 1)
        new = F.pad((cut.diff(dim=0) != 0).any(1), (1, 0), value=True)[: len(at)]
        begins = new.nonzero().flatten().tolist()
        pairs = torch.stack([at + q, start], 1)  # (repeats, 2)
        for shape, run in zip(cut[begins].tolist(), pairs.tensor_split(begins[1:])):
            if shape[1] > 0:
                yield _call(*shape, len(run), *first_and_step(run[:2].tolist()), square)


def chains(queries: Cuts) -> Iterator[tuple[range, int]]:
    """Ranges of blocks of one length, and the levels of the tree over each: a node has
    at most 2^level blocks.
    """
    lengths = queries.lengths.tolist()
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or lengths[stop] != lengths[start]:
            yield range(start, stop), min(MOST_LEVELS, (stop - start).bit_length() - 1)
            start = stop


def cheapest(
    layer: Layer, rows: range, levels: int, queries: Cuts, keys: Cuts, cost: Cost
) -> tuple[int, ...]:
    """The levels of the tree over ``rows`` that make the calls cheapest. Level 0,
    single blocks, is always used.
    """
    size = int(queries.lengths[rows.start])
    used: tuple[int, ...] = (0,)
    middle = (
        (len(rows) // 2 - SAMPLE // 2) >> levels << levels
    )  # of many blocks some are enough to tell
    sample, cols = layer.seen(rows[max(0, middle) :][:SAMPLE])
    common = _common(sample, levels)
    best = _cost(_taken(common, used), cols, size, keys, cost)
    for level in range(levels, 0, -1):
        time = _cost(_taken(common, with_it := (*used, level)), cols, size, keys, cost)
        if time < best:
            used = with_it
            best = time
    for level in used[1:]:  # a level that paid may not, beside smaller ones
        time = _cost(
            _taken(common, without := tuple(x for x in used if x != level)),
            cols,
            size,
            keys,
            cost,
        )
        if time < best:
            used = without
            best = time
    return used


def nodes(
    layer: Layer, rows: range, levels: tuple[int, ...]
) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """(level, node, first key block, end) of each run of key blocks that a node takes,
    the largest nodes first.

    ``rows`` are taken some at a time: time and memory then grow with what is near them,
    not with the square of all.
    """
    by_level: dict[int, list] = {level: [] for level in sorted(levels, reverse=True)}
    for start in range(0, len(rows), AT_ONCE):
        blocks_seen, cols = layer.seen(rows[start : start + AT_ONCE])
        for level, taken in _taken(_common(blocks_seen, max(levels)), levels):
            node, first, stop = _runs(taken, cols)
            by_level[level].append((node + (start >> level), first, stop))
    return [(level, *map(torch.cat, zip(*parts))) for level, parts in by_level.items()]


def _common(seen: Tensor, levels: int) -> list[Tensor]:
    """The key blocks that all query blocks of a node see, bool (nodes, c), for each
    level of the tree.
    """
    common = [seen]
    for _ in range(levels):
        below = common[-1][: len(common[-1]) // 2 * 2]
        common.append(below[0::2] & below[1::2])
    return common


def _taken(
    common: list[Tensor], levels: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """(level, key blocks that each of its nodes takes), the largest nodes first."""
    covered = torch.zeros_like(common[0])
    for level in sorted(levels, reverse=True):
        shared = common[level]
        width = 1 << level
        # What a larger node has taken is taken for all of its blocks, so the first one
        # tells.
        taken = shared & ~covered[::width][: len(shared)]
        covered[: len(shared) * width] |= taken.repeat_interleave(width, 0)
        yield level, taken


def _runs(taken: Tensor, cols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(node, first key block, end) of each run of neighbouring key blocks, by node."""
    edge = torch.zeros(len(taken), 1, dtype=torch.int8)
    change = torch.cat([edge, taken.to(torch.int8), edge], 1).diff(
        dim=1
    )  # 1 where one begins, -1 behind its end
    node, first = (change == 1).nonzero().unbind(1)
    return node, cols[first], cols[(change == -1).nonzero()[:, 1] - 1] + 1


def _cost(
    levels: Iterable[tuple[int, Tensor]],
    cols: Tensor,
    size: int,
    keys: Cuts,
    cost: Cost,
) -> float:
    total = 0.0
    for level, taken in levels:
        _, first, stop = _runs(taken, cols)
        count = keys.starts[stop - 1] + keys.lengths[stop - 1] - keys.starts[first]
        length = size << level
        total += float((cost.work(length, count) + cost.merge * length).sum())
    return total


def better_copied(
    node: Tensor, count: Tensor, nodes: int, size: int, cost: Cost
) -> Tensor:
    """Which runs belong to nodes whose keys are cheaper to gather than to read run by
    run.
    """
    merge = cost.merge * size
    in_place = torch.zeros(nodes).index_add_(0, node, cost.work(size, count) + merge)
    together = torch.zeros(nodes, dtype=torch.long).index_add_(0, node, count)
    return (cost.work(size, together) * cost.copied + merge < in_place)[node]


Entry = tuple[
    int, int, int, int
]  # one dense call: rows, keys, the first query, the first key

# Calls of fewer than SHORT queries take LONG keys at a time, which then stay in the
# CPU's cache. Calls of few keys are split into parts of LONG queries or more.
LONG = 1024
SHORT = 768
EDGE = 128  # queries of a window of tokens that are taken together


def tile(
    layers: list[Layer],
    queries: Cuts,
    keys: Cuts,
    diagonal: Tensor | None = None,
    heads: int = 1,
    kv_heads: int = 1,
    kernel: Kernel = PLAIN,
) -> Plan:
    """The plan of disjoint ``layers`` of seen blocks: regular calls first.

    ``diagonal``: for each block of queries the block of keys at its own positions, whose square is causal, or -1.
    """
    cost = kernel.cost
    entries: list[Entry] = []
    gathered: list[Call] = []
    for layer in layers:
        for rows, level in chains(queries):
            strided, left = _calls(layer, rows, level, queries, keys, cost)
            entries += strided
            gathered += left
    squares = _squares(queries, keys, diagonal)
    calls = _strided_calls(
        [part for entry in entries for part in _split_queries(entry)]
    )
    calls = [part for call in calls for part in _split_keys(call)]
    calls += _strided_calls(squares, causal=True)
    return _plan(calls, gathered, int(queries.lengths.sum()), heads, kv_heads)


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


def _squares(queries: Cuts, keys: Cuts, diagonal: Tensor | None) -> list[Entry]:
    """The causal calls, on the blocks of the diagonal."""
    if diagonal is None:
        return []
    on_diagonal = (diagonal >= 0).nonzero().flatten()
    entries = zip(
        queries.lengths[on_diagonal].tolist(),
        queries.starts[on_diagonal].tolist(),
        keys.starts[diagonal[on_diagonal]].tolist(),
    )
    return [(length, length, q, k) for length, q, k in entries]


def _calls(
    layer: Layer,
    rows: range,
    levels: int,
    queries: Cuts,
    keys: Cuts,
    cost: Cost,
) -> tuple[list[Entry], list[Call]]:
    """The calls of one range of blocks of one length, at the levels of its tree that
    make them cheapest.
    """
    size = int(queries.lengths[rows.start])
    used = (0,) if layer.copied else cheapest(layer, rows, levels, queries, keys, cost)
    entries = []
    gathered = []
    for level, node, first, stop in nodes(layer, rows, used):
        length = size << level
        at = queries.starts[rows.start] + node * length
        begin = keys.starts[first]
        count = keys.starts[stop - 1] + keys.lengths[stop - 1] - begin
        apart = torch.full((len(node),), layer.copied)
        if level == 0:
            if not layer.copied:
                apart = better_copied(node, count, len(rows), size, cost)
            gathered += _gathered_calls(
                node[apart], begin[apart], count[apart], at[apart], size
            )
        entries += [
            (length, *e) for e in torch.stack([count, at, begin], 1)[~apart].tolist()
        ]
    return entries, gathered


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
    return [_join_neighbours(_call(*shape, causal)) for shape in _progressions(entries)]


def _join_neighbours(call: Call) -> Call:
    """The same call, with neighbouring repeats that see the same keys joined up to LONG
    queries.
    """
    rows = call.q.rows
    if (
        call.causal
        or call.repeats == 1
        or call.k.repeat_step
        or call.q.repeat_step != rows
        or rows >= SHORT
    ):
        return call
    joined = max(i for i in range(1, LONG // rows + 1) if call.repeats % i == 0)
    return altered(
        call,
        q=altered(call.q, rows=rows * joined, repeat_step=rows * joined),
        repeats=call.repeats // joined,
    )


def _split_queries(entry: Entry) -> Iterator[Entry]:
    """Halve a call of many queries by few keys down to LONG queries: each thread then
    writes neighbouring pages.

    >>> [*_split_queries((4096, 512, 0, 0))][1:3], len([*_split_queries((3001, 512, 0, 0))])
    ([(1024, 512, 1024, 0), (1024, 512, 2048, 0)], 1)
    """
    rows, keys, q, k = entry
    pieces = 1
    while keys <= LONG and rows % (2 * pieces) == 0 and rows // pieces >= 2 * LONG:
        pieces *= 2
    for at in range(0, rows, rows // pieces):
        yield rows // pieces, keys, q + at, k


def _split_keys(call: Call) -> Iterator[Call]:
    """Split a call of few queries by many keys into LONG keys at a time; parts of one
    repeat share its queries.
    """
    if call.q.rows >= SHORT or call.k.rows < 2 * LONG:
        yield call
        return
    count, rest = divmod(call.k.rows, LONG)
    first = call.k.first
    if call.repeats == 1:
        yield altered(
            call,
            repeats=count,
            q=altered(call.q, repeat_step=0),
            k=View(LONG, first, repeat_step=LONG),
        )
    else:
        for at in range(0, count * LONG, LONG):
            yield altered(call, k=altered(call.k, rows=LONG, first=first + at))
    if rest:
        yield altered(call, k=altered(call.k, rows=rest, first=first + count * LONG))


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
