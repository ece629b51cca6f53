"""Which blocks of keys are taken together for which blocks of queries, so that a pattern is few large calls.

Kernels are slow on short keys and on few queries, so neighbouring blocks of queries are joined in a binary tree: a node
takes the keys that all of its blocks see and no larger node has taken, hence every pair is computed once. Only those
levels of the tree are used that make the calls cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
