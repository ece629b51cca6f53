"""The exchange plan: which K/V rows a rank needs from which other, each once. Arithmetic on ranges, without tensors.

A row is one position of one K/V head. A shard consists of chunks of adjacent positions.

Dilated patterns: a query chunk and a key chunk that are disjoint share at most one segment of a branch, and in it all
keys come before all queries, or after them. So what moves are whole intervals, and causality hides all of one or
nothing.

StridedRows-sparse patterns: chunks are cut where blocks end. Two of these parts are equal or disjoint, so a part of the
queries sees a part of the keys whole or not at all. Only a part with itself needs the causal mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from math import lcm

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..engine.blocks import Cuts, layer, layers_of, tile
from ..engine.dilated import first_and_step, progressions
from ..engine.execute import Plan
from ..patterns import Branch, Dense, Pattern
from .layout import Layout


@dataclass(frozen=True)
class BlockParts:
    """Chunks cut where blocks end, in the order of their rows: ``blocks``, ``starts`` and ``stops`` (parts,)."""

    blocks: Tensor
    starts: Tensor
    stops: Tensor

    @classmethod
    def of(cls, ranges: Sequence[range], size: int) -> BlockParts:
        """Ranges of positions cut at multiples of ``size``."""
        blocks = [torch.arange(r.start // size, (r.stop - 1) // size + 1) for r in ranges]
        starts = [(b * size).clamp(min=r.start) for b, r in zip(blocks, ranges)]
        stops = [((b + 1) * size).clamp(max=r.stop) for b, r in zip(blocks, ranges)]
        none = torch.empty(0, dtype=torch.long)
        return cls(*(torch.cat([none, *parts]) for parts in (blocks, starts, stops)))

    @property
    def cuts(self) -> Cuts:
        lengths = self.stops - self.starts
        return Cuts(lengths.cumsum(0) - lengths, lengths)

    def before(self, others: BlockParts) -> Tensor:
        """Which of these lie before which others, bool (others, parts)."""
        return self.stops[None, :] <= others.starts[:, None]


def needed(pattern: BlockSparse, layout: Layout, causal: bool, rank: int, source: int) -> list[range]:
    """The positions of ``source`` that some query of ``rank`` sees, as few ranges, in the order of the shard.

    >>> from ringlab.block_patterns import sliding_window
    >>> from ringlab.ring.layout import contiguous
    >>> needed(sliding_window(1, block_size=4), contiguous(40, 3), False, 1, 0)  # of 0 .. 13 for 14 .. 26
    [range(8, 14)]
    """
    mine, theirs = (BlockParts.of(layout.ranges(i), pattern.block_size) for i in (rank, source))
    seen = pattern.blocks(layout.n, mine.blocks, theirs.blocks)  # (mine, theirs)
    if causal:
        seen &= theirs.before(mine)
    wanted = seen.any(0)
    found: list[range] = []
    for start, stop in zip(theirs.starts[wanted].tolist(), theirs.stops[wanted].tolist()):
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(range(start, stop))
    return found


def block_calls(
    pattern: BlockSparse, layout: Layout, causal: bool, rank: int, received: Sequence[range] | None = None,
    heads: int = 1, kv_heads: int = 1, *, lower_right: bool = False,
) -> Plan:  # fmt: skip
    """The calls of a rank's queries on its own keys, or on the rows ``received`` from others, in their order.

    ``lower_right``: as for ``tiling.tile``.
    """
    mine = BlockParts.of(layout.ranges(rank), pattern.block_size)
    theirs = mine if received is None else BlockParts.of(received, pattern.block_size)
    layers = [seen(mine.blocks, theirs.blocks) for seen in layers_of(pattern, layout.n)]
    diagonal = None
    if causal:
        if received is None:
            itself = torch.stack(layers).any(0).diagonal()
            diagonal = torch.where(itself, torch.arange(len(itself)), -1)
        layers = [seen & theirs.before(mine) for seen in layers]
    layers = [layer(seen) for seen in layers]
    return tile(layers, mine.cuts, theirs.cuts, diagonal, heads, kv_heads, lower_right=lower_right)


@dataclass(frozen=True)
class StridedRows:
    """Rows to send: every ``rate``-th position, ``count`` of them, of ``heads`` K/V heads.

    ``kv_head`` and ``first``, the first position, are (first, step) along the heads. Positions are those of the
    sequence, or after ``local`` rows of a shard. A message holds the rows position by position, (count, heads).
    """

    rate: int
    count: int
    heads: int
    kv_head: tuple[int, int]
    first: tuple[int, int]

    @property
    def rows(self) -> int:
        return self.count * self.heads

    def members(self) -> Iterator[tuple[int, range]]:
        """(kv_head, its positions) of each head."""
        for i in range(self.heads):
            first = self.first[0] + i * self.first[1]
            yield self.kv_head[0] + i * self.kv_head[1], range(first, first + self.count * self.rate, self.rate)

    def local(self, layout: Layout, rank: int) -> StridedRows:
        """The same rows, with positions counted in the shard of the rank that owns them."""
        row, position = 0, self.first[0]
        for owned in layout.ranges(rank):
            if position in owned:
                first = row + owned.index(position), self.first[1] // owned.step
                return replace(self, rate=max(1, self.rate // owned.step), first=first)
            row += len(owned)
        raise ValueError(f"rank {rank} does not own position {position}")

    def view(self, t: Tensor) -> Tensor:
        """These rows of a shard t (b, s, h_kv, d), as a view (b, count, heads, d)."""
        s_b, s_n, s_h, s_d = t.stride()
        size = (t.shape[0], self.count, self.heads, t.shape[3])
        stride = (s_b, self.rate * s_n, self.kv_head[1] * s_h + self.first[1] * s_n, s_d)
        return t.as_strided(size, stride, t.storage_offset() + self.first[0] * s_n + self.kv_head[0] * s_h)


@dataclass(frozen=True)
class ResidueInterval:
    """Positions start <= x < stop with x mod rate == residue, for (K/V head, residue) ``pairs``."""

    rate: int
    start: int
    stop: int
    pairs: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Problem:
    """What is computed and which rank owns what: all that an exchange plan depends on."""

    pattern: Pattern
    layout: Layout
    causal: bool
    heads: int
    kv_heads: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a problem is part of the key of every plan that a call looks up
        return hash((self.pattern, self.layout, self.causal, self.heads, self.kv_heads))

    def __reduce__(self):  # without the hash: another process has others of the same strings
        return Problem, (self.pattern, self.layout, self.causal, self.heads, self.kv_heads)

    def check(self, scheme: str) -> None:
        """Raise ValueError if a scheme does not support the problem."""
        if isinstance(self.pattern, BlockSparse):
            self.pattern.count(self.layout.n)  # raises where the pattern does not fit
            if scheme in ("ring", "all_gather"):
                raise ValueError(f"scheme {scheme!r} does not serve block-sparse patterns; 'plan' and 'ulysses' do")
        if self.layout.grid is not None and self.causal:
            raise ValueError("causal attention along a Hilbert curve has no meaning: its steps are not in time order")
        if scheme == "ulysses":
            if self.layout.ranks > self.heads:
                few = f"{self.layout.ranks} ranks are more than {self.heads} heads"
                raise ValueError(f"ulysses shares out heads: {few}")
        elif self.layout.kind == "striped" and not isinstance(self.pattern, Dense):
            raise ValueError(
                f"scheme {scheme!r} serves a striped layout with dense attention only, not {self.pattern}: "
                "stripes have no neighbours; take another layout, or ulysses"
            )

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of a dilated pattern by rate, so that the rows of a denser one come first."""
        found = self.pattern.branches(self.layout.n, self.heads, self.kv_heads)
        return tuple(sorted(found, key=lambda b: (b.rate, b.length)))

    def shared(self, branch: Branch, queries: range, keys: range) -> tuple[int, range, range] | None:
        """(start, queries, keys) of the one segment where queries of a chunk see keys of another chunk, or None."""
        if keys.start > queries.start:
            if self.causal:
                return None
            start = keys.start // branch.length * branch.length
            if (queries.stop - 1) // branch.length * branch.length != start:
                return None
            stop = min(keys.stop, start + branch.length)
            return start, range(max(queries.start, start), queries.stop), range(keys.start, stop)
        start = queries.start // branch.length * branch.length
        if (keys.stop - 1) // branch.length * branch.length != start:
            return None
        stop = min(queries.stop, start + branch.length)
        return start, range(queries.start, stop), range(max(keys.start, start), keys.stop)

    def needs(self, rank: int, source: int) -> tuple[StridedRows, ...]:
        """The rows that ``rank`` needs from ``source``, each once, in the order in which they are sent."""
        if rank == source:
            return ()
        if isinstance(self.pattern, BlockSparse):
            found = needed(self.pattern, self.layout, self.causal, rank, source)
            return tuple(StridedRows(1, len(keys), self.kv_heads, (0, 1), (keys.start, 0)) for keys in found)
        if self.layout.kind == "striped":
            return self._striped(rank, source)
        found = []
        for keys in self.layout.ranges(source):
            pairs = product(self.branches, self.layout.ranges(rank))
            intervals = [self._interval(branch, queries, keys) for branch, queries in pairs]
            for interval in _disjoint([i for i in intervals if i is not None]):
                found += _strided_rows(interval)
        return tuple(found)

    def hops(self) -> list[int]:
        """How far each rank's shard travels along the ring: to the last rank whose queries see some of it."""
        p = self.layout.ranks
        return [max((t for t in range(1, p) if self.needs((j + t) % p, j)), default=0) for j in range(p)]

    def _striped(self, rank: int, source: int) -> tuple[StridedRows, ...]:
        (keys,) = self.layout.ranges(source) or (range(0),)
        if self.causal:
            last = max((r[-1] for r in self.layout.ranges(rank)), default=-1)
            keys = range(keys.start, min(keys.stop, last + 1), keys.step)
        return (StridedRows(keys.step, len(keys), self.kv_heads, (0, 1), (keys.start, 0)),) if keys else ()

    def _interval(self, branch: Branch, queries: range, keys: range) -> ResidueInterval | None:
        found = self.shared(branch, queries, keys)
        if found is None:
            return None
        start, asking, wanted = found
        pairs = _pairs(branch, self.heads // self.kv_heads, start % branch.rate)
        if len(asking) < branch.rate:  # some heads may select no query here
            pairs = frozenset(p for p in pairs if (p[1] - asking.start) % branch.rate < len(asking))
        return ResidueInterval(branch.rate, wanted.start, wanted.stop, pairs) if pairs and wanted else None


@lru_cache(maxsize=4096)
def _pairs(branch: Branch, group: int, phase: int) -> frozenset[tuple[int, int]]:
    return frozenset((h // group, (phase + o) % branch.rate) for h, o in zip(branch.heads, branch.offsets))


@lru_cache(maxsize=4096)
def _held(pairs: frozenset, rate: int, of: frozenset) -> frozenset:
    """The ``pairs`` whose positions are all among the residues ``of`` modulo ``rate``."""
    return frozenset(p for p in pairs if (p[0], p[1] % rate) in of)


def _disjoint(intervals: list[ResidueInterval]) -> list[ResidueInterval]:
    """Disjoint intervals of the same rows; ``intervals`` are sorted by rate."""
    done: list[ResidueInterval] = []
    for interval in intervals:
        left = [interval]
        for earlier in done:
            left = [part for each in left for part in _without(each, earlier)]
        done += left
    return done


def _without(new: ResidueInterval, old: ResidueInterval) -> Iterator[ResidueInterval]:
    """Intervals of the rows of ``new`` that are not rows of ``old``."""
    start, stop = max(new.start, old.start), min(new.stop, old.stop)
    if start >= stop:
        yield new
        return
    if new.rate % old.rate == 0:
        held, rate = _held(new.pairs, old.rate, old.pairs), new.rate
    else:  # neither rate divides the other: split into residues of their common multiple
        rate = lcm(new.rate, old.rate)
        every = frozenset((g, x % rate) for g, c in new.pairs for x in _positions(new, c)[: rate // new.rate])
        held = _held(every, old.rate, old.pairs)
        if held:
            new = ResidueInterval(rate, new.start, new.stop, every)
    if not held:
        yield new
        return
    if held != new.pairs:
        yield ResidueInterval(rate, new.start, new.stop, new.pairs - held)
    if new.start < start:
        yield ResidueInterval(rate, new.start, start, held)
    if stop < new.stop:
        yield ResidueInterval(rate, stop, new.stop, held)


def _positions(interval: ResidueInterval, residue: int) -> range:
    return range(interval.start + (residue - interval.start) % interval.rate, interval.stop, interval.rate)


def _strided_rows(interval: ResidueInterval) -> Iterator[StridedRows]:
    """The rows of an interval: together those of heads with equal counts, evenly spaced indices and first positions."""
    alike: dict[int, list] = {}
    for head, residue in sorted(interval.pairs):
        found = _positions(interval, residue)
        if found:
            alike.setdefault(len(found), []).append((head, found.start))
    for count, members in sorted(alike.items()):
        for run in progressions(members):
            yield StridedRows(interval.rate, count, len(run), *first_and_step(run))


@dataclass(frozen=True)
class RankPlan:
    """The rows that one rank receives from each other rank, and sends to it."""

    problem: Problem
    rank: int
    receive: tuple[tuple[StridedRows, ...], ...]
    send: tuple[tuple[StridedRows, ...], ...]

    @cached_property
    def received(self) -> list[int]:
        """The number of rows by source."""
        return [sum(each.rows for each in some) for some in self.receive]

    @cached_property
    def sent(self) -> list[int]:
        """The number of rows by destination."""
        return [sum(each.rows for each in some) for some in self.send]

    @cached_property
    def sent_rows(self) -> list[tuple[int, StridedRows]]:
        """(first row in the message, rows in the own shard) of all that is sent, in order."""
        found, first = [], 0
        for rows in chain(*self.send):
            found.append((first, rows.local(self.problem.layout, self.rank)))
            first += rows.rows
        return found


def plan_rank(problem: Problem, rank: int) -> RankPlan:
    """The exchange plan of one rank.

    >>> from ringlab.patterns import Dilated
    >>> from ringlab.ring.layout import contiguous
    >>> plan_rank(Problem(Dilated([4, 16], [1, 4]), contiguous(16, 4), False, 4, 4), 0).received
    [0, 4, 4, 4]
    """
    ranks = range(problem.layout.ranks)
    receive = tuple(problem.needs(rank, source) for source in ranks)
    return RankPlan(problem, rank, receive, tuple(problem.needs(to, rank) for to in ranks))


def digest(value: object) -> int:
    """A 63-bit hash of ``repr(value)``, the same in every process: of a text, or of rows to send."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1
