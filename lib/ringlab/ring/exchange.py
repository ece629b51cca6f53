"""Which rows a rank's queries see under a block-sparse pattern, and which calls read them: arithmetic on ranges alone.

A chunk of a shard is cut where blocks end, and also where it ends itself, maybe inside a block. Chunks share no
position: two pieces of one block are the same, or one lies wholly before the other. So a piece of queries sees a piece
of keys whole or not at all, and only a piece with itself needs the causal mask.

Which K/V rows a rank needs from which other, each once: pure arithmetic on ranges, no tensors and no process group.

A row is one position of one K/V head. Shards are made of chunks of neighbouring positions. A query chunk and a key
chunk that are disjoint share at most one segment of a branch, and there all keys lie before all queries or after them:
so every exchange is of whole stretches, and causality hides all of one or nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
class Pieces:
    """Parts of blocks in the order of the rows that hold them: ``blocks``, ``starts`` and ``stops`` (pieces,)."""

    blocks: Tensor
    starts: Tensor
    stops: Tensor

    @classmethod
    def of(cls, ranges: Sequence[range], size: int) -> Pieces:
        """Stretches of positions, one behind the other, cut into blocks of ``size``."""
        blocks = [torch.arange(r.start // size, (r.stop - 1) // size + 1) for r in ranges]
        starts = [(b * size).clamp(min=r.start) for b, r in zip(blocks, ranges)]
        stops = [((b + 1) * size).clamp(max=r.stop) for b, r in zip(blocks, ranges)]
        none = torch.empty(0, dtype=torch.long)
        return cls(*(torch.cat([none, *parts]) for parts in (blocks, starts, stops)))

    @property
    def cuts(self) -> Cuts:
        lengths = self.stops - self.starts
        return Cuts(lengths.cumsum(0) - lengths, lengths)

    def before(self, others: Pieces) -> Tensor:
        """Which of these lie before which others, bool (others, pieces)."""
        return self.stops[None, :] <= others.starts[:, None]


def needed(pattern: BlockSparse, layout: Layout, causal: bool, rank: int, source: int) -> list[range]:
    """The positions of ``source`` that some query of ``rank`` sees, in the order of the shard, as few ranges.

    >>> from ringlab.block_patterns import sliding_window
    >>> from ringlab.ring.layout import contiguous
    >>> needed(sliding_window(1, block_size=4), contiguous(40, 3), False, 1, 0)  # of 0 .. 13 for 14 .. 26
    [range(8, 14)]
    """
    mine, theirs = (Pieces.of(layout.ranges(i), pattern.block_size) for i in (rank, source))
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
    """The calls of a rank's queries on its own keys, or on the rows ``received`` of others, in their order.

    ``lower_right``: as for ``blocks.tile``.
    """
    mine = Pieces.of(layout.ranges(rank), pattern.block_size)
    theirs = mine if received is None else Pieces.of(received, pattern.block_size)
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
class Block:
    """``count`` positions at ``rate`` for ``heads`` K/V heads; ``kv_head`` and ``first`` are (first, step) along them.

    Positions are global. A message holds the rows position by position, (count, heads).
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


@dataclass(frozen=True)
class Stretch:
    """Keys start .. stop - 1 at ``rate``, for (kv_head, residue) pairs: positions x with x mod rate == residue."""

    rate: int
    start: int
    stop: int
    pairs: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Problem:
    """What is attended by whom: everything that a plan depends on."""

    pattern: Pattern
    layout: Layout
    causal: bool
    heads: int
    kv_heads: int

    def check(self, scheme: str) -> None:
        """Raise ValueError, in one line, for what a scheme cannot serve."""
        if isinstance(self.pattern, BlockSparse):
            self.pattern.count(self.layout.n)  # raises where the pattern does not fit
            if scheme in ("ring", "all_gather"):
                raise ValueError(f"scheme {scheme!r} does not serve block-sparse patterns; 'plan' and 'ulysses' do")
        if self.layout.grid is not None and self.causal:
            raise ValueError("causal attention along a Hilbert curve has no meaning: its steps are not in time order")
        if scheme == "ulysses":
            if self.layout.ranks > self.heads:
                raise ValueError(
                    f"ulysses shares out heads: {self.layout.ranks} ranks are more than {self.heads} heads"
                )
        elif self.layout.kind == "striped" and not isinstance(self.pattern, Dense):
            raise ValueError(
                f"scheme {scheme!r} serves a striped layout with dense attention only, not {self.pattern}: "
                "stripes have no neighbours; take another layout, or ulysses"
            )

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """By rate, so that the rows of a branch are there when a sparser one asks for a part of them."""
        found = self.pattern.branches(self.layout.n, self.heads, self.kv_heads)
        return tuple(sorted(found, key=lambda b: (b.rate, b.length)))

    def shared(self, branch: Branch, queries: range, keys: range) -> tuple[int, range, range] | None:
        """(start, query part, key part) of the segment in which disjoint chunks meet and the queries see the keys."""
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

    def needs(self, rank: int, source: int) -> tuple[Block, ...]:
        """The rows that ``rank`` needs from ``source``, each once, in the order in which they travel."""
        if rank == source:
            return ()
        if isinstance(self.pattern, BlockSparse):
            found = needed(self.pattern, self.layout, self.causal, rank, source)
            return tuple(Block(1, len(keys), self.kv_heads, (0, 1), (keys.start, 0)) for keys in found)
        if self.layout.kind == "striped":
            return self._striped(rank, source)
        found = []
        for keys in self.layout.ranges(source):
            stretches = [
                stretch
                for branch in self.branches
                for queries in self.layout.ranges(rank)
                if (stretch := self._stretch(branch, queries, keys)) is not None
            ]
            found += [block for stretch in _distinct(stretches) for block in _blocks(stretch)]
        return tuple(found)

    def _striped(self, rank: int, source: int) -> tuple[Block, ...]:
        (keys,) = self.layout.ranges(source) or (range(0),)
        if self.causal:
            last = max((r[-1] for r in self.layout.ranges(rank)), default=-1)
            keys = range(keys.start, min(keys.stop, last + 1), keys.step)
        return (Block(keys.step, len(keys), self.kv_heads, (0, 1), (keys.start, 0)),) if keys else ()

    def _stretch(self, branch: Branch, queries: range, keys: range) -> Stretch | None:
        found = self.shared(branch, queries, keys)
        if found is None:
            return None
        start, asking, wanted = found
        pairs = _pairs(branch, self.heads // self.kv_heads, start % branch.rate)
        if len(asking) < branch.rate:  # some heads may select no query here
            pairs = frozenset(p for p in pairs if (p[1] - asking.start) % branch.rate < len(asking))
        return Stretch(branch.rate, wanted.start, wanted.stop, pairs) if pairs and wanted else None


@lru_cache(maxsize=4096)
def _pairs(branch: Branch, group: int, phase: int) -> frozenset[tuple[int, int]]:
    return frozenset((h // group, (phase + o) % branch.rate) for h, o in zip(branch.heads, branch.offsets))


@lru_cache(maxsize=4096)
def _held(pairs: frozenset, rate: int, of: frozenset) -> frozenset:
    """Those of ``pairs`` whose positions are all among the residues ``of`` modulo ``rate``."""
    return frozenset(p for p in pairs if (p[0], p[1] % rate) in of)


def _distinct(stretches: list[Stretch]) -> list[Stretch]:
    """The same rows with none twice; stretches come by rate."""
    done: list[Stretch] = []
    for stretch in sorted(stretches, key=lambda s: s.rate):
        left = [stretch]
        for earlier in done:
            left = [part for each in left for part in _without(each, earlier)]
        done += left
    return done


def _without(new: Stretch, old: Stretch) -> Iterator[Stretch]:
    """Stretches of the rows of ``new`` that are not rows of ``old``."""
    start, stop = max(new.start, old.start), min(new.stop, old.stop)
    if start >= stop:
        yield new
        return
    if new.rate % old.rate == 0:
        held, rate = _held(new.pairs, old.rate, old.pairs), new.rate
    else:  # rates that do not divide each other meet in single residues of their common multiple
        rate = lcm(new.rate, old.rate)
        every = frozenset((g, x % rate) for g, c in new.pairs for x in _positions(new, c)[: rate // new.rate])
        held = _held(every, old.rate, old.pairs)
        if held:
            new = Stretch(rate, new.start, new.stop, every)
    if not held:
        yield new
        return
    if held != new.pairs:
        yield Stretch(rate, new.start, new.stop, new.pairs - held)
    if new.start < start:
        yield Stretch(rate, new.start, start, held)
    if stop < new.stop:
        yield Stretch(rate, stop, new.stop, held)


def _positions(stretch: Stretch, residue: int) -> range:
    return range(stretch.start + (residue - stretch.start) % stretch.rate, stretch.stop, stretch.rate)


def _blocks(stretch: Stretch) -> Iterator[Block]:
    """A stretch as blocks: heads with equally many rows there whose indices and first positions are evenly spaced."""
    alike: dict[int, list] = {}
    for head, residue in sorted(stretch.pairs):
        found = _positions(stretch, residue)
        if found:
            alike.setdefault(len(found), []).append((head, found.start))
    for count, members in sorted(alike.items()):
        for run in progressions(members):
            yield Block(stretch.rate, count, len(run), *first_and_step(run))


@dataclass(frozen=True)
class RankPlan:
    """What one rank receives from and sends to each other one."""

    problem: Problem
    rank: int
    receive: tuple[tuple[Block, ...], ...]
    send: tuple[tuple[Block, ...], ...]

    @property
    def received(self) -> list[int]:
        """Rows by source."""
        return [sum(b.rows for b in blocks) for blocks in self.receive]

    @property
    def sent(self) -> list[int]:
        """Rows by destination."""
        return [sum(b.rows for b in blocks) for blocks in self.send]


def plan_rank(problem: Problem, rank: int) -> RankPlan:
    """A rank's part of the exchange.

    >>> from ringlab.patterns import Dilated
    >>> from ringlab.ring.layout import contiguous
    >>> plan_rank(Problem(Dilated([4, 16], [1, 4]), contiguous(16, 4), False, 4, 4), 0).received
    [0, 4, 4, 4]
    """
    ranks = range(problem.layout.ranks)
    receive = tuple(problem.needs(rank, source) for source in ranks)
    return RankPlan(problem, rank, receive, tuple(problem.needs(to, rank) for to in ranks))


def digest(blocks: tuple[Block, ...]) -> int:
    """63 bits that tell two lists of rows apart, the same on every rank."""
    return text_digest(repr([(b.rate, b.count, b.heads, b.kv_head, b.first) for b in blocks]))


def text_digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
