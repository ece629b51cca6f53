"""Pieces of rows that see pieces of rows alike, and which launches they make: index arithmetic for ``lists``.

The rows of a piece lie ``stride`` apart. For dilated branches the stride is R = lcm of their rates, so a piece lies in
one residue class mod R, a free view of the sequence; cut at every boundary of a segment, all of its rows share one
multiplicity M with all rows of another piece. A pair that several branches show is seen once (folded). Block-sparse
patterns are the case R = 1, M = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from .patterns import BlockSparse, Branch, Pattern

CHUNK = 1 << 22  # candidate pairs of pieces looked at in one
LONG = 4  # tiles that a piece should hold for its branches to be folded
Source = BlockSparse | tuple[Branch, ...]


def split(pattern: Pattern, n: int, heads: int, kv_heads: int, rows: int = 128) -> list[Source]:
    """What to fold together, and so to run in one launch; several launches join by log-sum-exp.

    Branches by rising rate, for as long as the pieces of a fold hold several tiles of ``rows``: more classes make
    shorter pieces. Heads with one branch each (head groups) run in one launch, whatever their rates.

    >>> from ringlab.patterns import Dilated
    >>> ladder = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
    >>> [[b.rate for b in some] for some in split(ladder, 65536, 4, 4)]
    [[1, 2, 4], [8, 16]]
    """
    if isinstance(pattern, BlockSparse):
        return [pattern]
    branches = sorted(pattern.branches(n, heads, kv_heads), key=lambda b: b.rate)
    if len({h for b in branches for h in b.heads}) == sum(len(b.heads) for b in branches):
        return [tuple(branches)]
    found: list[tuple[Branch, ...]] = []
    for branch in branches:
        together = (*found[-1], branch) if found else (branch,)
        if found and piece_rows(together) >= LONG * rows:
            found[-1] = together
        else:
            found.append((branch,))
    return found


def piece_rows(source: Source) -> int:
    """The rows of most pieces: what lies between two boundaries in one class; no tile need be longer."""
    if isinstance(source, BlockSparse):
        return source.block_size
    return max(1, min(b.length for b in source) // lcm(*(b.rate for b in source)))


def alike(source: Source, heads: int, kv_heads: int, by: str) -> list[tuple[list[int], tuple]]:
    """(owning heads, what each of their members runs) for heads that run the same: one set of lists for all of them.

    What a member runs: the (length, rate, offset) of its branches; nothing is said of block-sparse patterns.
    """
    group = heads // kv_heads if by == "key" else 1
    if isinstance(source, BlockSparse):
        return [(list(range(heads // group)), ((),) * group)]
    runs = [
        tuple((b.length, b.rate, b.offsets[b.heads.index(head)]) for b in source if head in b.heads)
        for head in range(heads)
    ]
    found: dict[tuple, list[int]] = {}
    for owner in range(heads // group):
        found.setdefault(tuple(runs[owner * group : (owner + 1) * group]), []).append(owner)
    return [(owners, specs) for specs, owners in found.items() if any(specs)]


@dataclass(frozen=True)
class Cut:
    """Pieces of rows, their pairs, and how often all of it repeats, ``period`` positions apart.

    Piece i owns the rows ``first[i] + j * stride``, j < ``count[i]``; ``met`` are the pieces of the other side.
    ``pairs``: (piece, piece met, member, M), each (P,).
    """

    first: Tensor
    count: Tensor
    met: tuple[Tensor, Tensor]
    stride: int
    pairs: tuple[Tensor, Tensor, Tensor, Tensor]
    times: int = 1
    period: int = 0


def stretches(source: Source, specs, n: int, keys: int | None, members: int, by: str) -> Iterator[Cut]:
    """The sequence in stretches that no segment crosses: a period that repeats, and what is left."""
    if isinstance(source, BlockSparse):
        yield _blocks(source, n, members, by)
    elif keys is not None and keys != n:
        own, other = (torch.tensor([m]) for m in ((n, keys) if by == "query" else (keys, n)))
        zero = torch.zeros(members, dtype=torch.int64)
        pairs = (zero, zero, torch.arange(members), zero + 1)
        yield Cut(zero[:1], own, (zero[:1], other), 1, pairs)
    else:
        branches = [b for spec in specs for b in spec]
        stride = lcm(*(rate for _, rate, _ in branches))
        period = lcm(stride, *(length for length, _, _ in branches))
        whole = n // period
        if whole:
            yield _dilated(specs, stride, 0, period, whole)
        if n % period:
            yield _dilated(specs, stride, whole * period, n)


def _dilated(specs, stride: int, start: int, stop: int, times: int = 1) -> Cut:
    """Pieces of [start, stop): one residue class mod ``stride`` between two boundaries of any branch's segments."""
    length, rate, offset = torch.tensor([b for spec in specs for b in spec]).T  # (branches,)
    member = torch.tensor([g for g, spec in enumerate(specs) for _ in spec])  # (branches,)
    inner = [torch.arange(-(-start // w) * w, stop, w) for w in length.tolist()]
    edges = torch.cat([torch.tensor([start, stop]), *inner]).unique()  # (intervals + 1,)
    left = edges[:-1, None]  # (intervals, 1)
    segment = left // length * length  # where the segment of each branch began (intervals, branches)
    shown = (segment + offset) % rate  # the class mod its rate that a branch keeps there
    classes = torch.arange(stride)
    kept = torch.zeros(len(left), stride, dtype=torch.bool)
    for i in range(len(length)):
        kept |= classes % rate[i] == shown[:, i, None]
    first = left + (classes - left) % stride  # (intervals, stride)
    count = (edges[1:, None] - first + stride - 1).div(stride, rounding_mode="floor").clamp(min=0)
    interval, residue = (kept & (count > 0)).nonzero(as_tuple=True)  # (pieces,), by interval
    first, count = first[interval, residue], count[interval, residue]
    runs = residue[:, None] % rate == shown[interval]  # (pieces, branches)
    segment = segment[interval]
    # No piece sees another outside of the segments that it lies in: these begin and end at pieces' boundaries.
    low = torch.where(runs, segment, stop).amin(1).clamp(min=start)
    high = torch.where(runs, segment + length, start).amax(1).clamp(max=stop)
    from_, to = (torch.searchsorted(interval, torch.searchsorted(edges, x)) for x in (low, high))  # (pieces,)
    found = []
    for some in _chunks(to - from_):
        a, b = ragged(some, from_, to)
        both = runs[a] & runs[b] & (segment[a] == segment[b])  # (candidates, branches)
        for g in range(len(specs)):
            m = both[:, member == g].sum(1)
            seen = m > 0
            found.append((a[seen], b[seen], torch.full_like(a[seen], g), m[seen]))
    return Cut(first, count, (first, count), stride, _joined(found), times, stop - start)


def _chunks(sizes: Tensor) -> Iterator[Tensor]:
    """Indices into ``sizes``, consecutive, that add up to about CHUNK each."""
    number = sizes.cumsum(0).sub(1).clamp(min=0) // CHUNK
    return torch.arange(len(sizes)).split(torch.unique_consecutive(number, return_counts=True)[1].tolist())


def ragged(some: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """(i, j) for i in ``some`` and j from start[i] to stop[i], each (total,)."""
    sizes = (stop - start)[some]
    i = some.repeat_interleave(sizes)
    within = torch.arange(len(i)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return i, start[i] + within


def _joined(found: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*found))


def _blocks(pattern: BlockSparse, n: int, members: int, by: str) -> Cut:
    count = pattern.count(n)
    first = torch.arange(count) * pattern.block_size
    size = torch.diff(first, append=torch.tensor([n]))
    found = []
    for some in torch.arange(count).split(max(1, CHUNK // count)):
        seen = pattern.blocks(n, some) if by == "query" else pattern.blocks(n, None, some).T  # (some, count)
        a, b = seen.nonzero(as_tuple=True)
        found += [(some[a], b, torch.full_like(a, g), torch.ones_like(a)) for g in range(members)]
    return Cut(first, size, (first, size), 1, _joined(found))
