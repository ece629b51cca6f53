"""How a block-sparse pattern becomes few dense calls: pure index arithmetic, no tensor data.

Kernels are slow on short keys and on few queries, so neighbouring blocks of queries are joined in a binary tree: a node
takes the keys that all of its blocks see and no larger node has taken, hence every pair is computed once. Equal nodes
in arithmetic progression are one call over a strided view; scattered blocks of keys are copied together first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import first_and_step

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
LONG, SHORT = 1024, 768  # fewer queries than SHORT take their keys LONG at a time, while these are in the cache
MOST_LEVELS = 6
SAMPLE = 512  # blocks of queries by which the levels are chosen, and which are looked at together: whole nodes

# Which blocks some blocks of queries see: a range of these -> bool (rows, c), and the numbers (c,) of the blocks of
# keys, in which neighbours that are both seen are neighbours; what is left out is not seen.
Layer = Callable[[range], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Run:
    """``nodes`` dense calls of ``rows`` queries by ``keys`` keys; ``query``, ``key``: (first, step) of their rows.

    ``causal``: the square mask. ``first``: no earlier call wrote these rows.
    """

    rows: int
    keys: int
    nodes: int
    query: tuple[int, int]
    key: tuple[int, int]
    causal: bool = False
    first: bool = False


@dataclass(frozen=True)
class Picked:
    """Dense calls of ``rows`` queries from ``queries`` (nodes,) on, each by the copied keys ``keys`` (nodes, m)."""

    rows: int
    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Tiling:
    """The calls, in order. ``covered``: each row is written first by a call that is alone on it."""

    runs: tuple[Run, ...]
    picked: tuple[Picked, ...]
    covered: bool


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


def tile(layers: list[Layer], queries: Cuts, keys: Cuts, diagonal: Tensor | None = None) -> Tiling:
    """The calls for disjoint ``layers`` of seen blocks: regular ones first.

    ``diagonal``: for each block of queries the block of keys at its own positions, whose square is causal, or -1.

    >>> from ringlab.blocks import local_global
    >>> cuts = Cuts.of(16384, 128)
    >>> run = tile([layer(local_global(2, 4).blocks(16384))], cuts, cuts).runs[0]  # the global blocks of keys
    >>> run.rows, run.keys, run.nodes, run.query, run.key
    (8192, 512, 2, (0, 8192), (0, 0))
    """
    runs: list[Run] = []
    picked: list[Picked] = []
    for seen in layers:
        for rows, level in _chains(queries):
            found, left = _nodes(seen, rows, level, queries, keys)
            runs += found
            picked += left
    runs += _squares(queries, keys, diagonal)
    return _ordered(runs, picked, int(queries.lengths.sum()))


def copied(
    seen: Layer, queries: Cuts, keys: Cuts, diagonal: Tensor | None = None, *, alone: bool = False
) -> Tiling:
    """As ``tile``, with all keys of a block of queries copied together; ``alone``: a call for each such block."""
    picked: list[Picked] = []
    for rows, _ in _chains(queries):
        ((_, node, first, stop),) = _found(seen, rows, (0,))
        size = int(queries.lengths[rows.start])
        picked += _copied(node, first, stop, queries.starts[rows.start] + node * size, size, keys, alone)
    squares = _squares(queries, keys, diagonal)
    if alone:
        squares = [
            Run(r.rows, r.keys, 1, (r.query[0] + i * r.query[1], 0), (r.key[0] + i * r.key[1], 0), causal=True)
            for r in squares for i in range(r.nodes)
        ]  # fmt: skip
    return _ordered(squares, picked, int(queries.lengths.sum()))


def _squares(queries: Cuts, keys: Cuts, diagonal: Tensor | None) -> list[Run]:
    """The causal calls."""
    if diagonal is None:
        return []
    mine = (diagonal >= 0).nonzero().flatten()
    entries = zip(queries.lengths[mine].tolist(), queries.starts[mine].tolist(), keys.starts[diagonal[mine]].tolist())
    return [Run(*shape, causal=True) for shape in _progressions([(length, length, q, k) for length, q, k in entries])]


def _chains(queries: Cuts) -> Iterator[tuple[range, int]]:
    """Stretches of equally long blocks and the levels of a tree over them: 2^level blocks are one node at most."""
    lengths = queries.lengths.tolist()
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or lengths[stop] != lengths[start]:
            yield range(start, stop), min(MOST_LEVELS, (stop - start).bit_length() - 1)
            start = stop


def _nodes(seen: Layer, rows: range, levels: int, queries: Cuts, keys: Cuts) -> tuple[list[Run], list[Picked]]:
    """The calls of one chain, at those levels of its tree that make it cheapest."""
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
    runs, picked = [], []
    for level, node, first, stop in _found(seen, rows, used):
        length = size << level
        at = queries.starts[rows.start] + node * length
        begin = keys.starts[first]
        count = keys.starts[stop - 1] + keys.lengths[stop - 1] - begin
        apart = torch.zeros(len(node), dtype=torch.bool)
        if level == 0:
            apart = _better_copied(node, count, len(rows), size)
            picked += _copied(node[apart], first[apart], stop[apart], at[apart], size, keys)
        entries = [(length, *e) for e in torch.stack([count, at, begin], 1)[~apart].tolist()]
        for shape in _progressions(entries):
            runs += _in_cache(Run(*shape))
    return runs, picked


def _in_cache(run: Run) -> Iterator[Run]:
    """A run of few queries by many keys, some of them at a time."""
    step = run.keys if run.rows >= SHORT or run.keys < 2 * LONG else LONG
    for at in range(0, run.keys, step):
        key = (run.key[0] + at, run.key[1])
        yield Run(run.rows, min(step, run.keys - at), run.nodes, run.query, key)


def _found(seen: Layer, rows: range, levels: tuple[int, ...]) -> list[tuple[int, Tensor, Tensor, Tensor]]:
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


def _better_copied(node: Tensor, count: Tensor, nodes: int, size: int) -> Tensor:
    """Which stretches belong to nodes whose keys are cheaper copied together than read stretch by stretch."""
    in_place = torch.zeros(nodes).index_add_(0, node, count * _weight(count, size) + JOIN)
    together = torch.zeros(nodes, dtype=torch.long).index_add_(0, node, count)
    return (together * _weight(together, size) * COPY + JOIN < in_place)[node]


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


def _progressions(entries: list[tuple[int, int, int, int]]) -> Iterator[tuple]:
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


def _ordered(runs: list[Run], picked: list[Picked], rows: int) -> Tiling:
    """Runs that write most rows go first; those alone on theirs need no merge."""
    written = torch.zeros(rows, dtype=torch.bool)
    found, clean = [], True
    for run in sorted(runs, key=lambda r: (-r.nodes * r.rows, r.query)):
        start, step = run.query
        mine = written.as_strided((run.nodes, run.rows), (step, 1), start)  # nodes never share rows
        first = not bool(mine.any())
        clean &= first or bool(mine.all())
        mine.fill_(True)
        found.append(Run(run.rows, run.keys, run.nodes, run.query, run.key, run.causal, first))
    return Tiling(tuple(found), tuple(picked), covered=clean and bool(written.all()))
