"""Which blocks of keys are taken together for which blocks of queries, so that a pattern is few large calls.

Kernels are slow on short keys and on few queries, so neighbouring blocks of queries are joined in a binary tree: a node
takes the keys that all of its blocks see and no larger node has taken, hence every pair is computed once. Only those
levels of the tree are used that make the calls cheapest.

How a block-sparse pattern becomes few dense calls: pure index arithmetic, no tensor data.

The nodes of a tree over the blocks of queries (``block_tree``) each take some keys. Equal ones in arithmetic
progression are one call over a strided view; scattered blocks of keys are copied together first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_calls import Picked, Run, Tiling, ordered
from .dilated import first_and_step

# What a pair costs in a call of so many queries (rows here) by so many keys (columns), against a pair of long dense
# attention: torch's CPU kernel, fp32. On a GPU the order is the same and the differences are smaller.
KEYS = (1, 64, 128, 256, 512)
QUERIES = (1, 64, 128, 256, 512, 768)
COST = torch.tensor([
    [6.0, 5.0, 3.5, 2.2, 1.7],
    [5.0, 4.0, 3.0, 1.7, 1.36],
    [4.0, 2.8, 1.7, 1.5, 1.34],
    [3.5, 2.4, 1.57, 1.33, 1.18],
    [3.0, 2.0, 1.45, 1.18, 1.05],
    [2.5, 1.75, 1.3, 1.1, 1.0],
])  # fmt: skip
JOIN = 48  # merging a row of a result costs about as much as so many pairs
COPY = 1.25  # copying scattered keys together, against reading them in place
MOST_LEVELS = 6
SAMPLE = 512  # blocks of queries by which the levels are chosen, and which are looked at together: whole nodes

# Which blocks some blocks of queries see: a range of these -> bool (rows, c), and the numbers (c,) of the blocks of
# keys, in which neighbours that are both seen are neighbours; what is left out is not seen.
Layer = Callable[[range], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cuts:
    """Where blocks begin in a tensor's rows: ``starts`` (blocks,) and ``lengths`` (blocks,), one behind the other."""

    starts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, n: int, block_size: int) -> Cuts:
        """Equal blocks of n rows; the last may be short."""
        starts = torch.arange(0, n, block_size)
        return cls(starts, torch.diff(starts, append=torch.tensor([n])))


def layer(seen: Tensor) -> Layer:
    """The layer of a table of seen blocks, bool (queries, keys)."""
    return lambda rows: (seen[rows.start : rows.stop], torch.arange(seen.shape[1]))


def chains(queries: Cuts) -> Iterator[tuple[range, int]]:
    """Stretches of equally long blocks and the levels of a tree over them: 2^level blocks are one node at most."""
    lengths = queries.lengths.tolist()
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or lengths[stop] != lengths[start]:
            yield range(start, stop), min(MOST_LEVELS, (stop - start).bit_length() - 1)
            start = stop


def cheapest(seen: Layer, rows: range, levels: int, queries: Cuts, keys: Cuts) -> tuple[int, ...]:
    """Those levels of the tree over ``rows`` whose nodes make the calls cheapest; 0, the blocks, is one of them."""
    size = int(queries.lengths[rows.start])
    used: tuple[int, ...] = (0,)
    middle = (len(rows) // 2 - SAMPLE // 2) >> levels << levels  # of many blocks some are enough to tell
    some, cols = seen(rows[max(0, middle) :][:SAMPLE])
    common = _common(some, levels)
    best = _cost(_taken(common, used), cols, size, keys)
    for level in range(levels, 0, -1):
        cost = _cost(_taken(common, with_it := (*used, level)), cols, size, keys)
        if cost < best:
            used, best = with_it, cost
    for level in used[1:]:  # a level that paid may not, beside smaller ones
        cost = _cost(_taken(common, without := tuple(x for x in used if x != level)), cols, size, keys)
        if cost < best:
            used, best = without, cost
    return used


def nodes(seen: Layer, rows: range, levels: tuple[int, ...]) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """(level, node, first block of keys, one behind the last) of the stretches that nodes take, the largest first.

    ``rows`` are looked at some at a time, so that time and memory follow what is near them.
    """
    found: dict[int, list] = {level: [] for level in sorted(levels, reverse=True)}
    for start in range(0, len(rows), SAMPLE):
        some, cols = seen(rows[start : start + SAMPLE])
        for level, taken in _taken(_common(some, max(levels)), levels):
            node, first, stop = _stretches(taken, cols)
            found[level].append((node + (start >> level), first, stop))
    return [(level, *map(torch.cat, zip(*parts))) for level, parts in found.items()]


def _common(seen: Tensor, levels: int) -> list[Tensor]:
    """What all blocks of a node see, bool (nodes, c), by level of the tree."""
    common = [seen]
    for _ in range(levels):
        below = common[-1][: len(common[-1]) // 2 * 2]
        common.append(below[0::2] & below[1::2])
    return common


def _taken(common: list[Tensor], levels: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """(level, keys that each of its nodes takes), the largest nodes first."""
    covered = torch.zeros_like(common[0])
    for level in sorted(levels, reverse=True):
        shared = common[level]
        width = 1 << level
        # What a larger node has taken is taken for all of its blocks, so the first one tells.
        mine = shared & ~covered[::width][: len(shared)]
        covered[: len(shared) * width] |= mine.repeat_interleave(width, 0)
        yield level, mine


def _stretches(taken: Tensor, cols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(node, first block of keys, one behind the last) of each stretch of neighbouring blocks, by node."""
    edge = torch.zeros(len(taken), 1, dtype=torch.int8)
    change = torch.cat([edge, taken.to(torch.int8), edge], 1).diff(dim=1)  # 1 where one begins, -1 behind its end
    node, first = (change == 1).nonzero().unbind(1)
    return node, cols[first], cols[(change == -1).nonzero()[:, 1] - 1] + 1


def _weight(count: Tensor, rows: int) -> Tensor:
    """What the pairs of calls of ``rows`` queries by ``count`` (calls,) keys cost."""
    row = sum(rows >= least for least in QUERIES) - 1
    return COST[row][torch.bucketize(count, torch.tensor(KEYS), right=True) - 1]


def _cost(levels: Iterable[tuple[int, Tensor]], cols: Tensor, size: int, keys: Cuts) -> float:
    total = 0.0
    for level, taken in levels:
        _, first, stop = _stretches(taken, cols)
        count = keys.starts[stop - 1] + keys.lengths[stop - 1] - keys.starts[first]
        length = size << level
        total += length * float((count * _weight(count, length) + JOIN).sum())
    return total


def better_copied(node: Tensor, count: Tensor, nodes: int, size: int) -> Tensor:
    """Which stretches belong to nodes whose keys are cheaper copied together than read stretch by stretch."""
    in_place = torch.zeros(nodes).index_add_(0, node, count * _weight(count, size) + JOIN)
    together = torch.zeros(nodes, dtype=torch.long).index_add_(0, node, count)
    return (together * _weight(together, size) * COPY + JOIN < in_place)[node]


Entry = tuple[int, int, int, int]  # one dense call: rows, keys, the first query, the first key

# Fewer queries than SHORT take their keys LONG at a time, while these are in the cache; and those of few keys are in
# nodes of LONG queries or more, as far as halving goes.
LONG, SHORT = 1024, 768


def tile(
    layers: list[Layer], queries: Cuts, keys: Cuts, diagonal: Tensor | None = None, *, lower_right: bool = False
) -> Tiling:
    """The calls for disjoint ``layers`` of seen blocks: regular ones first.

    ``diagonal``: for each block of queries the block of keys at its own positions, whose square is causal, or -1.
    ``lower_right``: causal calls may have more keys than queries.

    >>> from ringlab.engine.blocks import layer
    >>> from ringlab.block_patterns import local_global
    >>> cuts = Cuts.of(16384, 128)
    >>> run = tile([layer(local_global(2, 4).blocks(16384))], cuts, cuts).runs[0]  # the global blocks of keys
    >>> run.rows, run.keys, run.nodes, run.query, run.key
    (1024, 512, 16, (0, 1024), (0, 0))
    """
    entries: list[Entry] = []
    picked: list[Picked] = []
    for seen in layers:
        for rows, level in chains(queries):
            found, left = _calls(seen, rows, level, queries, keys)
            entries += found
            picked += left
    squares = _squares(queries, keys, diagonal)
    if lower_right:
        entries, squares = _joined(entries, squares)
    runs = _runs([part for entry in entries for part in _halved(entry)])
    runs = [part for run in runs for part in _in_cache(run)]
    return ordered(runs + _runs(squares, causal=True), picked, int(queries.lengths.sum()))


def copied(seen: Layer, queries: Cuts, keys: Cuts, diagonal: Tensor | None = None, *, alone: bool = False) -> Tiling:
    """As ``tile``, with all keys of a block of queries copied together; ``alone``: a call for each such block."""
    picked: list[Picked] = []
    for rows, _ in chains(queries):
        ((_, node, first, stop),) = nodes(seen, rows, (0,))
        size = int(queries.lengths[rows.start])
        picked += _copied(node, first, stop, queries.starts[rows.start] + node * size, size, keys, alone)
    squares = _runs(_squares(queries, keys, diagonal), causal=True)
    if alone:
        squares = [
            Run(r.rows, r.keys, 1, (r.query[0] + i * r.query[1], 0), (r.key[0] + i * r.key[1], 0), causal=True)
            for r in squares for i in range(r.nodes)
        ]  # fmt: skip
    return ordered(squares, picked, int(queries.lengths.sum()))


def _squares(queries: Cuts, keys: Cuts, diagonal: Tensor | None) -> list[Entry]:
    """The causal calls."""
    if diagonal is None:
        return []
    mine = (diagonal >= 0).nonzero().flatten()
    entries = zip(queries.lengths[mine].tolist(), queries.starts[mine].tolist(), keys.starts[diagonal[mine]].tolist())
    return [(length, length, q, k) for length, q, k in entries]


def _joined(entries: list[Entry], squares: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """(calls, causal calls) with short calls that end where a square of the same queries begins joined to it."""
    alone = {(length, q, k): (length, length, q, k) for length, _, q, k in squares}
    rest, joined = [], []
    for entry in entries:
        rows, count, q, k = entry
        if rows < SHORT and rows + count < 2 * LONG and alone.pop((rows, q, k + count), None):
            joined.append((rows, count + rows, q, k))
        else:
            rest.append(entry)
    return rest, joined + list(alone.values())


def _calls(seen: Layer, rows: range, levels: int, queries: Cuts, keys: Cuts) -> tuple[list[Entry], list[Picked]]:
    """The calls of one chain, at those levels of its tree that make it cheapest."""
    size, used = int(queries.lengths[rows.start]), cheapest(seen, rows, levels, queries, keys)
    entries, picked = [], []
    for level, node, first, stop in nodes(seen, rows, used):
        length = size << level
        at = queries.starts[rows.start] + node * length
        begin = keys.starts[first]
        count = keys.starts[stop - 1] + keys.lengths[stop - 1] - begin
        apart = torch.zeros(len(node), dtype=torch.bool)
        if level == 0:
            apart = better_copied(node, count, len(rows), size)
            picked += _copied(node[apart], first[apart], stop[apart], at[apart], size, keys)
        entries += [(length, *e) for e in torch.stack([count, at, begin], 1)[~apart].tolist()]
    return entries, picked


def _runs(entries: list[Entry], causal: bool = False) -> list[Run]:
    return [_in_a_row(Run(*shape, causal=causal)) for shape in _progressions(entries)]


def _in_a_row(run: Run) -> Run:
    """The same with neighbouring nodes of few queries by the same keys as one, up to LONG queries."""
    if run.causal or run.nodes == 1 or run.key[1] or run.query[1] != run.rows or run.rows >= SHORT:
        return run
    joined = max(i for i in range(1, LONG // run.rows + 1) if run.nodes % i == 0)
    return Run(run.rows * joined, run.keys, run.nodes // joined, (run.query[0], run.rows * joined), run.key)


def _halved(entry: Entry) -> Iterator[Entry]:
    """A call of many queries by few keys, halved down to LONG: a thread then writes pages of its own, near each other.

    >>> [*_halved((4096, 512, 0, 0))][1:3], len([*_halved((3001, 512, 0, 0))])
    ([(1024, 512, 1024, 0), (1024, 512, 2048, 0)], 1)
    """
    rows, keys, q, k = entry
    pieces = 1
    while keys <= LONG and rows % (2 * pieces) == 0 and rows // pieces >= 2 * LONG:
        pieces *= 2
    for at in range(0, rows, rows // pieces):
        yield rows // pieces, keys, q + at, k


def _in_cache(run: Run) -> Iterator[Run]:
    """A run of few queries by many keys, LONG of them at a time: as nodes that share their queries, if it is of one."""
    if run.rows >= SHORT or run.keys < 2 * LONG:
        yield run
        return
    whole, rest = divmod(run.keys, LONG)
    if run.nodes == 1:
        yield Run(run.rows, LONG, whole, (run.query[0], 0), (run.key[0], LONG))
    else:
        for at in range(0, whole * LONG, LONG):
            yield Run(run.rows, LONG, run.nodes, run.query, (run.key[0] + at, run.key[1]))
    if rest:
        yield Run(run.rows, rest, run.nodes, run.query, (run.key[0] + whole * LONG, run.key[1]))


def _copied(node, first, stop, at, size: int, keys: Cuts, alone: bool = False) -> list[Picked]:
    """Nodes with equally many keys, together; or each by itself."""
    alike: dict[int, list] = {}
    ends = keys.starts + keys.lengths
    mine: dict[int, list] = {}
    where: dict[int, int] = {}
    for i, begin, end, q in zip(node.tolist(), keys.starts[first].tolist(), ends[stop - 1].tolist(), at.tolist()):
        mine.setdefault(i, []).append(torch.arange(begin, end))
        where[i] = q
    for i, parts in mine.items():
        rows = torch.cat(parts)
        alike.setdefault(i if alone else len(rows), []).append((where[i], rows))
    return [
        Picked(size, torch.tensor([q for q, _ in members]), torch.stack([rows for _, rows in members]))
        for _, members in sorted(alike.items())
    ]


def _progressions(entries: list[Entry]) -> Iterator[tuple]:
    """(rows, keys, nodes, query, key) for entries (rows, keys, q, k), in few arithmetic progressions of (q, k)."""
    alike: dict[tuple[int, int], list] = {}
    for rows, count, q, k in entries:
        alike.setdefault((rows, count), []).append((q, k))
    for (rows, count), members in alike.items():
        apart: dict[int, int] = {}
        same: dict[int, int] = {}
        for q, k in members:
            apart[k - q] = apart.get(k - q, 0) + 1
            same[k] = same.get(k, 0) + 1
        groups: dict[tuple, list] = {}  # by distance, as in a window, or by the keys themselves, as of a global block
        for q, k in members:
            groups.setdefault(("apart", k - q) if apart[k - q] >= same[k] else ("same", k), []).append((q, k))
        for group in groups.values():
            for run in _evenly(sorted(group)):
                yield rows, count, len(run), *first_and_step(run)


def _evenly(members: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    run = members[:1]
    for item in members[1:]:
        if len(run) == 1 or item[0] - run[-1][0] == run[1][0] - run[0][0]:
            run.append(item)
        else:
            yield run
            run = [item]
    if run:
        yield run
