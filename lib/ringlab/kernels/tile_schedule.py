"""Which tile of rows visits which other tiles: the schedule by which one GPU kernel
runs every pattern.

The rows are split into intervals. The rows of an interval lie ``stride`` apart and
attend to the same keys. For dilated branches the stride is the least common multiple of
their rates, so an interval lies in one residue class mod the stride, a free view of the
sequence. Intervals end at every boundary of a segment, so all pairs of two intervals
have one multiplicity M. A pair that several branches show is visited once (folded).
Block-sparse patterns have stride 1 and M = 1. A window of tokens is a band: a row x of
a tile sees y of the other side where ``-before <= y - x <= after``; it may be joined
with first tokens and segments of tokens, which a tile sees whole.

An entry of the schedule names a tile that is visited, its M and its number of rows. The
tiles of one interval share their entries; a causal tile takes a part of them. This is
index arithmetic in int64 on the CPU, int32 in the result. Nothing grows with n squared
except what a block-sparse pattern shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from ..block_patterns import BlockSparse, Global, Segment, Window
from ..patterns import Branch, Pattern

MAX_CANDIDATES = 1 << 22  # pairs of intervals that are examined at once
MIN_TILES = 4  # that an interval should hold for its branches to be folded
Source = BlockSparse | tuple[Branch, ...]


def split(
    pattern: Pattern, n: int, heads: int, kv_heads: int, rows: int = 128
) -> list[Source]:
    """The branches that are folded together, so that each group runs in one launch.
    Launches merge by log-sum-exp.

    Branches are added by rising rate while the intervals of a group hold several tiles
    of ``rows``: a larger stride makes intervals shorter. Heads with one branch each
    (head groups) run in one launch, whatever their rates.

    >>> from ringlab.patterns import Dilated
    >>> ladder = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
    >>> [[b.rate for b in group] for group in split(ladder, 65536, 4, 4)]
    [[1, 2, 4], [8, 16]]
    """
    if isinstance(pattern, BlockSparse):
        return [pattern]
    branches = sorted(pattern.branches(n, heads, kv_heads), key=lambda b: b.rate)
    all_heads = [h for b in branches for h in b.heads]
    if len(all_heads) == len(set(all_heads)):
        return [tuple(branches)]
    groups = [(branches[0],)]
    for branch in branches[1:]:
        group = *groups[-1], branch
        if interval_rows(group) >= MIN_TILES * rows:
            groups[-1] = group
        else:
            groups.append((branch,))
    return groups


def interval_rows(source: Source) -> int:
    """The rows of most intervals. Longer tiles are of no use."""
    if has_bands(source):
        lengths = [p.length for p in source.parts if isinstance(p, Segment)]
        return min(lengths, default=1 << ROWS_BITS)
    if isinstance(source, BlockSparse):
        return source.block_size
    return max(1, min(b.length for b in source) // lcm(*(b.rate for b in source)))


def has_bands(source: Source) -> bool:
    """Whether a source is of tokens that see windows, first tokens and segments, in any
    union.
    """
    if not isinstance(source, BlockSparse) or source.block_size > 1:
        return False
    known = Window | Global | Segment
    return all(
        isinstance(p, known) and vars(p).get("rate", 1) == 1 for p in source.parts
    )


class Pairs(NamedTuple):
    """Pairs of intervals that attend, each field (P,).

    ``interval``: of the side that owns tiles. ``first``, ``count``: the first row and
    the number of rows of the interval of the other side. ``times``: M.
    """

    interval: Tensor
    first: Tensor
    count: Tensor
    member: Tensor
    times: Tensor


class Intervals(NamedTuple):
    """Row intervals and the pairs of them that attend, repeated ``times`` times,
    ``period`` positions apart.

    Interval i has the rows ``first[i] + j * stride``, j < ``count[i]``.
    """

    first: Tensor
    count: Tensor
    pairs: Pairs
    stride: int = 1
    times: int = 1
    period: int = 0


def _intervals(
    source: Source, specs, n: int, keys: int, members: int, by: str
) -> Iterator[Intervals]:
    """The intervals of a period of the pattern, which repeats, and of the rest of the
    sequence.
    """
    if isinstance(source, BlockSparse):
        yield _blocks(source, n, members, by)
    elif keys != n:
        own, other = (
            torch.tensor([m]) for m in ((n, keys) if by == "query" else (keys, n))
        )
        member = torch.arange(members)
        zero = torch.zeros_like(member)
        pairs = Pairs(zero, zero, other.expand(members), member, zero + 1)
        yield Intervals(zero[:1], own, pairs)
    else:
        branches = [b for spec in specs for b in spec]
        stride = lcm(*(rate for _, rate, _ in branches))
        period = lcm(stride, *(length for length, _, _ in branches))
        whole = n // period
        if whole:
            yield _dilated(specs, stride, 0, period, whole)
        if n % period:
            yield _dilated(specs, stride, whole * period, n)


def _dilated(specs, stride: int, start: int, stop: int, times: int = 1) -> Intervals:
    """The intervals of [start, stop): a residue class mod ``stride`` between two
    boundaries of any segments.
    """
    branches = [b for spec in specs for b in spec]
    length, rate, offset = torch.tensor(branches).T  # (branches,)
    members = [member for member, spec in enumerate(specs) for _ in spec]
    inner = [torch.arange(-(-start // w) * w, stop, w) for w in length.tolist()]
    ends = torch.tensor([start, stop])
    edges = torch.cat([ends, *inner]).unique()  # (intervals + 1,)
    left = edges[:-1, None]  # (intervals, 1)
    # The first position of each branch's segment, and the residue class mod its rate
    # that the branch selects there.
    segment = left // length * length  # (intervals, branches)
    shown = (segment + offset) % rate  # (intervals, branches)
    classes = torch.arange(stride)
    selected = classes % rate[:, None] == shown[:, :, None]
    selected = selected.any(1)  # (intervals, stride)
    first = left + (classes - left) % stride  # (intervals, stride)
    count = (edges[1:, None] - first + stride - 1) // stride  # (intervals, stride)
    interval, residue = (selected & (count > 0)).nonzero(as_tuple=True)  # (P,)
    first, count = first[interval, residue], count[interval, residue]
    runs = residue[:, None] % rate == shown[interval]  # (P, branches)
    segment = segment[interval]
    # No interval attends outside of its segments, which begin and end at boundaries of
    # intervals.
    low = torch.where(runs, segment, stop).amin(1).clamp(min=start)
    high = torch.where(runs, segment + length, start).amax(1).clamp(max=stop)
    begin, end = (
        torch.searchsorted(interval, torch.searchsorted(edges, x)) for x in (low, high)
    )  # (P,)
    candidates = end - begin
    parts = []
    step = max(1, MAX_CANDIDATES // max(candidates.tolist(), default=1))
    for chunk in torch.arange(len(first)).split(step):
        nth, within = _ragged(candidates[chunk])
        a = chunk[nth]  # (candidates,)
        b = begin[a] + within  # (candidates,)
        both = runs[a] & runs[b] & (segment[a] == segment[b])  # (candidates, branches)
        counts = torch.zeros(len(a), len(specs), dtype=torch.int64)  # M by member
        counts.index_add_(1, torch.tensor(members), both.long())
        pair, member = counts.nonzero(as_tuple=True)
        a, b, times_shown = a[pair], b[pair], counts[pair, member]
        parts.append((a, first[b], count[b], member, times_shown))
    pairs = Pairs(*map(torch.cat, zip(*parts)))
    return Intervals(first, count, pairs, stride, times, stop - start)


def _ragged(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """(i, j) for every i and j < sizes[i], each (total,)."""
    i = torch.arange(len(sizes)).repeat_interleave(sizes)
    return i, torch.arange(len(i)) - (sizes.cumsum(0) - sizes)[i]


def _blocks(pattern: BlockSparse, n: int, members: int, by: str) -> Intervals:
    count = pattern.count(n)
    first = torch.arange(count) * pattern.block_size
    size = torch.diff(first, append=torch.tensor([n]))
    a, b = pattern.seen(n)  # (pairs,)
    if by == "key":
        order = b.argsort(stable=True)
        a, b = b[order], a[order]
    member = torch.arange(members).repeat_interleave(len(a))
    a, b = a.repeat(members), b.repeat(members)
    pairs = Pairs(a, first[b], size[b], member, torch.ones_like(a))
    return Intervals(first, size, pairs)


def _band(pattern: BlockSparse, n: int, causal: bool, by: str) -> tuple[int, int]:
    """before, after of the rows that own tiles; both -n where there is no window."""
    sides = [p.sides for p in pattern.parts if isinstance(p, Window)] or [(-n, -n)]
    before, after = (min(n, max(x)) for x in zip(*sides))
    after = min(after, 0) if causal else after
    return (before, after) if by == "query" else (after, before)


def _banded(
    pattern: BlockSparse,
    n: int,
    members: int,
    rows: int,
    cols: int,
    causal: bool,
    by: str,
) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """tiles (T, 9) and entries (E, 2), how often they come, and how far apart: of the
    first rows, of a period of those that see equally much, and of the last ones.
    """
    before, after = band = _band(pattern, n, causal, by)
    far = _band(BlockSparse([Window(n)], 1), n, causal, by)  # of what is seen whole
    lengths = [p.length for p in pattern.parts if isinstance(p, Segment)]
    # First rows that see all, and those that all see.
    seeing, seen = (
        max((p.count for p in pattern.parts if getattr(p, side, False)), default=0)
        for side in (("rows", "columns") if by == "query" else ("columns", "rows"))
    )
    period = lcm(*lengths) if lengths else rows
    start = -(-(max(seeing, seen) + max(before, 0)) // period) * period
    times = max(0, n - max(after, 0) - start) // period
    stop = start + times * period
    parts = (0, start, 1), (start, start + period, times), (stop, n, 1)
    for begin, end, repeats in parts if times else [(0, n, 1)]:
        if begin >= end:
            continue
        inner = [torch.arange(begin // w * w, end, w) for w in lengths]
        edges = torch.cat([torch.tensor([begin, end, seeing]), *inner])
        edges = edges.clamp(begin, end).unique()
        _, first, count = _cut(edges[:-1], edges.diff(), 1, rows)  # (T,)
        last = first + count - 1
        zero = torch.zeros_like(first)
        spans = [(first - before, last + after + 1), (zero, zero + seen)]
        spans += [(first // w * w, first // w * w + w) for w in lengths]
        spans += [(zero, n * (first < seeing))]
        low, high = (torch.stack(x, 1) for x in zip(*spans))  # (T, spans)
        points = torch.cat([low, high], 1).sort(1).values
        points = points.clamp((first - far[0])[:, None], (last + far[1] + 1)[:, None])
        starts, stops = points.clamp(0, n).unfold(1, 2, 1).unbind(2)
        inside = low[:, None] <= starts[..., None]  # (T, pieces, spans)
        inside &= stops[..., None] <= high[:, None]
        tile, piece = (inside.any(2) & (starts < stops)).nonzero(as_tuple=True)
        size = (stops - starts)[tile, piece]
        run, at, width = _cut(starts[tile, piece], size, 1, cols)  # (E,)
        whole, tile = inside[..., 1:].any(2)[tile, piece][run], tile[run]
        least, most = torch.tensor([band, far])[whole.long()].T
        full = (last[tile] - at <= least) & (at + width - 1 - first[tile] <= most)
        kind = 3 * tile + torch.where(full & (width == cols), 1, 2 * ~whole)
        counts = members * torch.bincount(kind, minlength=3 * len(first)).view(-1, 3)
        partial, fulls, rest = counts.T
        begins = counts.sum(1).cumsum(0) - counts.sum(1)
        tiles = (
            zero,
            first,
            count,
            zero + 1,
            zero,
            begins,
            partial,
            fulls,
            partial + rest,
        )
        # Tokens that all see lie where they are, whatever the base.
        at = torch.where(at < seen, -1 - at, at)
        entries = torch.stack([at, width + (1 << ROWS_BITS)], 1).int()
        entries = entries[kind.argsort(stable=True)].repeat_interleave(members, 0)
        member = torch.arange(members) << ROWS_BITS + TIMES_BITS
        entries[:, 1].view(-1, members).add_(member)
        yield torch.stack(tiles, 1)[counts.sum(1) > 0], entries, repeats, period


# The columns of ``TileSchedule.tiles``.
HEAD, FIRST, COUNT, STRIDE, BASE, START, PARTIAL, FULL, MASKED = range(9)
# Bits of a packed entry: rows that count, M; the rest is the member.
ROWS_BITS = 9
TIMES_BITS = 8
SPAN = 1 << 32  # more than any two positions lie apart


@dataclass(frozen=True)
class TileSchedule:
    """The tiles that programs own, one each, and the tiles that each of them visits.

    ``tiles`` (T, 9) int32, a row per program, with the columns

    - HEAD, FIRST, COUNT, STRIDE: the rows that it owns: their head, the first position,
      their number, and how far apart they lie;
    - BASE: added to the first positions of its entries;
    - START: where its entries begin: PARTIAL masked ones, FULL ones that need no mask,
      the rest of the masked ones;
    - PARTIAL, FULL, MASKED: numbers of entries; of MASKED ones rows are counted and, in
      causal calls, positions are compared; with a band in the rest of them, too.

    ``entries`` (E + 1, 2) int32: the first position less the base, and
    ``rows | M << 9 | member << 17``. The stride is the tile's. ``member``: the query
    head in the K/V head's group, if K/V heads own the tiles. The last entry is padding,
    so that the next one can always be fetched early. With a band a first position p
    below 0 is -1 - p, whatever the base.

    ``rows``, ``cols``: of an owned and of a visited tile. ``covered``: every row of
    every head lies in a tile. ``stride``: of every tile, or 0 if they differ.
    ``band``: (before, after), or None.
    """

    tiles: Tensor
    entries: Tensor
    rows: int
    cols: int
    covered: bool
    stride: int
    band: tuple[int, int] | None = None

    @property
    def visits(self) -> int:
        """The number of visits of all programs. Each costs ``rows * cols`` pairs,
        visible or not.
        """
        return int(self.tiles[:, [FULL, MASKED]].sum())

    def to(self, device) -> TileSchedule:
        return replace(
            self, tiles=self.tiles.to(device), entries=self.entries.to(device)
        )


def make_schedule(
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
) -> TileSchedule:
    """The schedule of ``source`` (of ``split``): tiles of ``rows`` rows that visit
    tiles of ``cols`` rows.

    ``by="query"``: query heads own tiles of queries and visit keys (forward, dq).
    ``by="key"``: K/V heads own tiles of keys and visit the queries of every head of
    their group (dk, dv), so that no sum crosses programs. ``keys``: the number of keys
    if it is not n, for one branch of rate 1 over all rows, not causal.

    Raises ValueError for more than 2**31 - 1 positions, 255 branches or 16,383 query
    heads per K/V head.

    >>> from ringlab.patterns import Dilated
    >>> from ringlab.kernels.tile_schedule import split
    >>> (fold,) = split(Dilated([512, 1024], [1, 2]), 1024, 1, 1, rows=64)
    >>> schedule = make_schedule(fold, 1024, 1, 1, rows=64, cols=64)
    >>> len(schedule.tiles), schedule.visits
    (16, 160)
    """
    group = heads // kv_heads
    longest = max(n, keys or 0)
    members = 1 if by == "query" else group
    if longest >= 1 << 31:
        raise ValueError(f"positions must fit 32 bits, got a sequence of {longest}")
    if not isinstance(source, BlockSparse) and len(source) >= 1 << TIMES_BITS:
        raise ValueError(
            f"at most {(1 << TIMES_BITS) - 1} branches fold together, got {len(source)}"
        )
    if members >= 1 << (31 - ROWS_BITS - TIMES_BITS):
        raise ValueError(f"a K/V head cannot serve {members} query heads")
    # By the branches of each member: heads with equal ones share their entries.
    owners_of: dict[tuple, list[int]] = {}
    for owner in range(heads // members):
        served = range(owner * members, (owner + 1) * members)
        specs = () if isinstance(source, BlockSparse) else _branches_of(source, served)
        owners_of.setdefault(specs, []).append(owner)
    all_tiles = [torch.zeros(0, MASKED + 1, dtype=torch.int32)]
    all_entries = []
    sizes = rows, cols, causal, by
    covered = True
    num_entries = 0
    for specs, owners in owners_of.items():
        num_rows = 0
        if has_bands(source):
            parts = _banded(source, n, members, *sizes)
        else:
            parts = (
                (*_tiles_and_entries(x, *sizes), x.times, x.period)
                for x in _intervals(source, specs, n, keys or n, members, by)
                if len(x.pairs.interval)  # else no branch selects a row there
            )
        for tiles, entries, times, period in parts:
            num_rows += times * int(tiles[:, COUNT].sum())
            tiles[:, START] += num_entries
            num_entries += len(entries)
            bases = torch.arange(times) * period  # (times,)
            tiles = tiles.int().repeat(len(owners), times, 1, 1)  # (.., .., T, 9)
            tiles[..., HEAD] = torch.tensor(owners)[:, None, None]
            tiles[..., FIRST] += bases[:, None]
            tiles[..., BASE] = bases[:, None]
            all_tiles.append(tiles.flatten(0, 2))
            all_entries.append(entries.int())
        covered &= num_rows == (n if by == "query" else keys or n)
    tiles = torch.cat(all_tiles)
    all_tiles.clear()  # millions of them take much memory
    # Programs that read the same keys come together, so that these stay in the cache,
    # and the longest first.
    span = 1 << 31 if isinstance(source, BlockSparse) else max(b.length for b in source)
    order = (tiles[:, FULL] + tiles[:, MASKED]).argsort(stable=True, descending=True)
    for key in (tiles[:, FIRST] // span, tiles[:, HEAD] // (group // members)):
        order = order[key[order].argsort(stable=True)]
    entries = torch.cat([*all_entries, torch.zeros(1, 2, dtype=torch.int32)])
    strides = tiles[:, STRIDE].unique().tolist()
    stride = strides[0] if len(strides) == 1 else 0
    band = _band(source, n, causal, by) if has_bands(source) else None
    made = tiles[order], entries, rows, cols, covered, stride, band
    return TileSchedule(*made)


def _branches_of(source: tuple[Branch, ...], heads: range) -> tuple:
    """Of each head, (length, rate, offset) of each of its branches."""
    return tuple(
        tuple(
            (b.length, b.rate, b.offsets[b.heads.index(h)])
            for b in source
            if h in b.heads
        )
        for h in heads
    )


def _tiles_and_entries(
    intervals: Intervals, rows: int, cols: int, causal: bool, by: str
) -> tuple[Tensor, Tensor]:
    """tiles (T, 9) with head 0, and entries (E, 2), both int64."""
    interval, first, count, packed = _entries(intervals, cols)  # (E,)
    # A causal tile visits the keys before it; if keys own tiles, with mirrored
    # positions, the queries after it.
    low, high = _bounds(first, count, intervals.stride, by)
    full = count == cols
    # Partial ones from the far end, then full ones.
    order = torch.where(full, low, -low).argsort(stable=True)
    order = order[(2 * interval + full)[order].argsort(stable=True)]
    number = len(intervals.first)
    stride = intervals.stride
    partials, fulls = (
        torch.bincount(interval[x], minlength=number) for x in (~full, full)
    )  # (intervals,)
    starts = (partials + fulls).cumsum(0) - partials - fulls
    owner, begin, size = _cut(intervals.first, intervals.count, stride, rows)  # (T,)
    partial, whole, seen = partials[owner], fulls[owner], fulls[owner]  # (T,)
    if causal:
        near, far = _bounds(begin, size, stride, by)
        whole = _count_up_to(interval[full], high[full], owner, near)
        seen = _count_up_to(interval[full], low[full], owner, far)
        partial = _count_up_to(interval[~full], low[~full], owner, far)
    tiles = torch.zeros(len(owner), MASKED + 1, dtype=torch.int64)
    tiles[:, FIRST], tiles[:, COUNT], tiles[:, STRIDE] = begin, size, stride
    tiles[:, START] = starts[owner] + partials[owner] - partial
    tiles[:, PARTIAL], tiles[:, FULL] = partial, whole
    tiles[:, MASKED] = partial + seen - whole
    entries = torch.stack([first, packed], 1)[order]
    return tiles[partial + seen > 0], entries


def _count_up_to(
    interval: Tensor, value: Tensor, owner: Tensor, limit: Tensor
) -> Tensor:
    """For each tile, how many entries of its interval have ``value <= limit``."""
    keys = (interval * SPAN + value).sort().values
    end = torch.searchsorted(keys, owner * SPAN + limit, right=True)
    return end - torch.searchsorted(keys, owner * SPAN - SPAN // 2)


def _bounds(
    first: Tensor, count: Tensor, stride: int, by: str
) -> tuple[Tensor, Tensor]:
    """The lowest and the highest position, mirrored if keys own the tiles, because
    causal queries come after keys.
    """
    last = first + (count - 1) * stride
    return (first, last) if by == "query" else (-last, -first)


def _entries(intervals: Intervals, cols: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """interval, first, count, packed of tiles of ``cols`` rows: adjacent intervals with
    one M are cut as one.
    """
    pairs = intervals.pairs
    stride = intervals.stride
    order = ((pairs.first % stride << 31) + pairs.first).argsort()  # class by class
    order = order[(pairs.interval * SPAN + pairs.member)[order].argsort(stable=True)]
    interval, first, count, member, times = (x[order] for x in pairs)
    joins = first[1:] == first[:-1] + stride * count[:-1]
    for x in (interval, member, times):
        joins &= x[1:] == x[:-1]
    new = torch.cat([torch.ones(1, dtype=torch.bool), ~joins])
    length = torch.zeros(int(new.sum()), dtype=torch.int64)
    length.index_add_(0, new.cumsum(0) - 1, count)
    run, begin, size = _cut(first[new], length, stride, cols)
    interval, member, times = (x[new][run] for x in (interval, member, times))
    packed = size + (times << ROWS_BITS) + (member << ROWS_BITS + TIMES_BITS)
    return interval, begin, size, packed


def _cut(
    first: Tensor, count: Tensor, stride: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(interval, first row, rows) of the tiles of intervals."""
    which, nth = _ragged(-(-count // rows))
    return (
        which,
        first[which] + nth * rows * stride,
        (count[which] - nth * rows).clamp(max=rows),
    )
