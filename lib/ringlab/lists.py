"""Which tile of rows meets which, and how often: the lists by which one GPU kernel runs every pattern.

A list names the tiles met, how often each pair counts (M) and how many rows are there. Tiles of one piece (``pieces``)
share one list, of which a causal tile takes a part. Pure index arithmetic in int64 on the CPU, int32 in the result;
nothing grows with n squared but what a block-sparse pattern shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .patterns import BlockSparse
from .pieces import Cut, Source, alike, ragged, stretches

HEAD, FIRST, COUNT, STRIDE, BASE, START, PARTIAL, FULL, MASKED = range(9)  # the columns of ``Lists.tiles``
ROWS_BITS, TIMES_BITS = 9, 8  # of a packed entry: rows that count, M; the rest is the member
SPAN = 1 << 32  # more than any two positions lie apart


@dataclass(frozen=True)
class Lists:
    """The tiles that programs own, one each, and what every one of them meets.

    ``tiles`` (T, 9) int32, a row per program: head, first position, rows, stride; base to add to the entries' rows;
    then where its entries lie: start, partial, full, masked. Entries ``start + partial`` on, ``full`` of them, are met
    whole; ``masked`` more need their rows counted and, if causal, positions compared: the i-th of them is
    ``start + i``, past ``partial`` of them ``start + full + i``.
    ``entries`` (E + 1, 2) int32: first position less the base, and ``rows | M << 9 | member << 17``; of stride as the
    tile's own. ``member``: which query head of the K/V head's group, where K/V heads own the tiles. The last entry is
    padding, so that the next one can always be fetched early.
    ``rows``, ``cols``: of a tile owned and of one met. ``covered``: every row of every head lies in a tile.
    ``stride``: of every tile, or 0 where they differ. ``whole``: no tile met needs to be masked.
    """

    tiles: Tensor
    entries: Tensor
    rows: int
    cols: int
    covered: bool
    stride: int
    whole: bool

    @property
    def visits(self) -> int:
        """Tiles met, of all programs: each costs ``rows * cols`` pairs, visible or not."""
        return int(self.tiles[:, [FULL, MASKED]].sum())

    def to(self, device) -> Lists:
        return replace(self, tiles=self.tiles.to(device), entries=self.entries.to(device))

    def of(self, tile: int) -> list[tuple[int, int, int, int, bool]]:
        """What tile number ``tile`` meets: (first position, rows, M, member, whether it must be masked)."""
        _, _, _, _, base, start, partial, full, masked = self.tiles[tile].tolist()
        whole = range(start + partial, start + partial + full)
        rest = (start + i + (full if i >= partial else 0) for i in range(masked))
        found = []
        for at, mask in [*((i, False) for i in whole), *((i, True) for i in rest)]:
            first, packed = self.entries[at].tolist()
            times, member = packed >> ROWS_BITS & (1 << TIMES_BITS) - 1, packed >> ROWS_BITS + TIMES_BITS
            found.append((base + first, packed & (1 << ROWS_BITS) - 1, times, member, mask))
        return found


def make_lists(
    source: Source,
    n: int,
    heads: int,
    kv_heads: int,
    *,
    rows: int,
    cols: int,
    causal: bool = False,
    by: str = "query",
    keys: int | None = None,
) -> Lists:
    """The lists of ``source`` (of ``split``): tiles of ``rows`` rows that meet tiles of ``cols`` rows.

    ``by="query"``: query heads own tiles of queries and meet keys (forward, dq); ``by="key"``: K/V heads own tiles of
    keys and meet the queries of every head of their group (dk, dv), so that no sum crosses programs. ``keys``: the
    number of keys where it is not n, for one branch of rate 1 over all rows, not causal.

    Raises ValueError for tiles of more than 256 rows, and for more than 2**31 - 1 positions or 255 branches.

    >>> from ringlab.patterns import Dilated
    >>> from ringlab.pieces import split
    >>> (fold,) = split(Dilated([512, 1024], [1, 2]), 1024, 1, 1, rows=64)
    >>> lists = make_lists(fold, 1024, 1, 1, rows=64, cols=64)
    >>> len(lists.tiles), lists.visits, [times for _, _, times, _, _ in lists.of(0)]
    (16, 160, [2, 1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1])
    """
    members = 1 if by == "query" else heads // kv_heads
    _check(source, n if keys is None else max(n, keys), members, rows, cols)
    parts: list[tuple[Tensor, Tensor]] = []
    covered = True
    for owners, specs in alike(source, heads, kv_heads, by):
        reached = 0
        for cut in stretches(source, specs, n, keys, members, by):
            if not len(cut.pairs):
                continue  # no branch keeps a row there
            tiles, entries = _listed(cut, rows, cols, causal, by)
            reached += cut.times * int(tiles[:, COUNT].sum())
            bases = torch.arange(cut.times) * cut.period  # (times,)
            tiles = tiles.repeat(len(owners) * cut.times, 1).unflatten(0, (len(owners), cut.times, -1))
            tiles[..., HEAD] = torch.tensor(owners)[:, None, None]
            tiles[..., FIRST] += bases[:, None]
            tiles[..., BASE] = bases[:, None]
            parts.append((tiles.flatten(0, 2), entries))
        covered &= reached == (n if by == "query" or keys is None else keys)
    at = 0
    for tiles, entries in parts:
        tiles[:, START] += at
        at += len(entries)
    tiles = torch.cat([torch.zeros(0, MASKED + 1, dtype=torch.int64), *(t for t, _ in parts)])
    entries = torch.cat([*(e for _, e in parts), torch.zeros(1, 2, dtype=torch.int64)])
    strides = tiles[:, STRIDE].unique().tolist()
    return Lists(*(t.to(torch.int32) for t in (tiles[_order(tiles, source, heads // kv_heads, by)], entries)),
                 rows, cols, covered, strides[0] if len(strides) == 1 else 0, not tiles[:, MASKED].any())  # fmt: skip


def _check(source: Source, n: int, members: int, rows: int, cols: int) -> None:
    if not (1 <= rows <= 256 and 1 <= cols <= 256):
        raise ValueError(f"tiles hold 1 to 256 rows, got {rows} and {cols}")
    if n >= 1 << 31:
        raise ValueError(f"positions must fit 32 bits, got a sequence of {n}")
    if not isinstance(source, BlockSparse) and len(source) >= 1 << TIMES_BITS:
        raise ValueError(f"at most {(1 << TIMES_BITS) - 1} branches fold together, got {len(source)}")
    if members >= 1 << (31 - ROWS_BITS - TIMES_BITS):
        raise ValueError(f"a K/V head cannot serve {members} query heads")


def _listed(cut: Cut, rows: int, cols: int, causal: bool, by: str) -> tuple[Tensor, Tensor]:
    """tiles (T, 9) without their heads, entries (E, 2), int64."""
    piece, first, count, packed = _met(cut, cols)  # (E,)
    # A tile meets what lies before it and, mirrored, K/V tiles the queries that come after them.
    low, high = _span(first, count, cut.stride, by)
    full = count == cols
    order = torch.where(full, low, -low).argsort(stable=True)
    order = order[(2 * piece + full)[order].argsort(stable=True)]  # by piece: partial ones from the far end, then full
    pieces = len(cut.first)
    partials, fulls = (torch.bincount(piece[x], minlength=pieces) for x in (~full, full))  # (pieces,)
    starts = (partials + fulls).cumsum(0) - partials - fulls
    owner, begin, size = _tiles(cut.first, cut.count, cut.stride, rows)  # (T,)
    partial, whole, seen = (x[owner] for x in (partials, fulls, fulls))  # (T,)
    if causal:
        near, far = _span(begin, size, cut.stride, by)
        whole = _below(piece[full], high[full], owner, near)
        seen = _below(piece[full], low[full], owner, far)
        partial = _below(piece[~full], low[~full], owner, far)
    zero = torch.zeros_like(owner)
    columns = {
        HEAD: zero, FIRST: begin, COUNT: size, STRIDE: zero + cut.stride, BASE: zero,
        START: starts[owner] + partials[owner] - partial, PARTIAL: partial, FULL: whole,
        MASKED: partial + seen - whole,
    }  # fmt: skip
    tiles = torch.stack([columns[i] for i in range(len(columns))], 1)
    return tiles[whole + partial + seen - whole > 0], torch.stack([first, packed], 1)[order]


def _below(piece: Tensor, value: Tensor, owner: Tensor, limit: Tensor) -> Tensor:
    """For each tile, how many entries of its piece have ``value <= limit``."""
    keys = (piece * SPAN + value).sort().values
    end = torch.searchsorted(keys, owner * SPAN + limit, right=True)
    return end - torch.searchsorted(keys, owner * SPAN - SPAN // 2)


def _span(first: Tensor, count: Tensor, stride: int, by: str) -> tuple[Tensor, Tensor]:
    """The lowest and the highest position; mirrored where keys own the tiles, as causal queries come after keys."""
    last = first + (count - 1) * stride
    return (first, last) if by == "query" else (-last, -first)


def _met(cut: Cut, cols: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """piece, first, count, packed of tiles of ``cols`` rows, cut from runs of neighbouring pieces with one M."""
    a, b, member, times = cut.pairs
    first, count = cut.met[0][b], cut.met[1][b]
    order = ((first % cut.stride << 31) + first).argsort()  # class by class
    order = order[(a * SPAN + member)[order].argsort(stable=True)]
    a, member, times, first, count = (x[order] for x in (a, member, times, first, count))
    new = torch.ones(len(a), dtype=torch.bool)
    joins = first[1:] == first[:-1] + cut.stride * count[:-1]
    for x in (a, member, times):
        joins &= x[1:] == x[:-1]
    new[1:] = ~joins
    heads = new.nonzero().squeeze(1)
    length = torch.zeros(len(heads), dtype=torch.int64).index_add_(0, new.cumsum(0) - 1, count)
    run, begin, size = _tiles(first[heads], length, cut.stride, cols)
    a, member, times = (x[heads][run] for x in (a, member, times))
    return a, begin, size, size + (times << ROWS_BITS) + (member << ROWS_BITS + TIMES_BITS)


def _tiles(first: Tensor, count: Tensor, stride: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(which, first row, rows) of the tiles of pieces."""
    number = -(-count // rows)
    which, nth = ragged(torch.arange(len(first)), torch.zeros_like(number), number)
    return which, first[which] + nth * rows * stride, (count[which] - nth * rows).clamp(max=rows)


def _order(tiles: Tensor, source: Source, group: int, by: str) -> Tensor:
    """Programs that read the same keys side by side, so that these stay in the cache, and the longest of them first."""
    length = 1 << 31 if isinstance(source, BlockSparse) else max(b.length for b in source)
    order = (tiles[:, FULL] + tiles[:, MASKED]).argsort(stable=True, descending=True)
    for key in (tiles[:, FIRST] // length, tiles[:, HEAD] // (group if by == "query" else 1)):
        order = order[key[order].argsort(stable=True)]
    return order
