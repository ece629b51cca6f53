"""The exchange plan: which K/V rows a rank needs from which other, each once. Arithmetic on ranges, without tensors.

A row is one position of one K/V head. A shard consists of chunks of adjacent positions.

Dilated patterns: a query chunk and a key chunk that are disjoint share at most one segment of a branch, and in it all
keys come before all queries, or after them. So what moves are whole intervals, and causality hides all of one or
nothing.

Block-sparse patterns: chunks are cut where blocks end. Two of these parts are equal or disjoint, so a part of the
queries sees a part of the keys whole or not at all. Only a part with itself needs the causal mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from math import lcm
from operator import itemgetter

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..engine.blocks import BlockParts
from ..engine.dilated import first_and_step, runs_alike
from ..engine.execute import WHOLE, View, views_of
from ..patterns import Branch, Dense, Pattern
from .layout import Layout


@dataclass(frozen=True)
class StridedRows:
    """Rows to send: every ``rate``-th position, ``count`` of them, of ``heads`` K/V heads.

    ``kv_head`` and ``first``, the first position, are (first, step) along the heads. Positions are those of the
    sequence. A message holds the rows position by position, (count, heads).
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

    def view(self, layout: Layout, rank: int) -> View:
        """These rows in the shard of ``rank``, which owns them."""
        position, step = self.first
        row, owned = next((row, owned) for row, owned in layout.chunks(rank) if position in owned)
        first, rate = row + owned.index(position), max(1, self.rate // owned.step)
        return View(self.count, first, rate, 0, *self.kv_head, step // owned.step)


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

    def check(self, scheme: str) -> None:
        """Raise ValueError if a scheme does not support the problem."""
        if isinstance(self.pattern, BlockSparse):
            self.pattern.count(self.layout.n)  # raises where the pattern does not fit
            if scheme in ("ring", "all_gather"):
                raise ValueError(f"scheme {scheme!r} does not serve block-sparse patterns; 'plan' and 'ulysses' do")
        if self.layout.grid is not None and self.causal:
            raise ValueError("causal attention along a Hilbert curve has no meaning: its steps are not in time order")
        if scheme == "ulysses":
            if (ranks := self.layout.ranks) > self.heads:
                raise ValueError(f"ulysses shares out heads: {ranks} ranks are more than {self.heads} heads")
        elif self.layout.kind == "striped" and not isinstance(self.pattern, Dense):
            what = f"scheme {scheme!r} serves a striped layout with dense attention only, not {self.pattern}"
            raise ValueError(f"{what}: stripes have no neighbours; take another layout, or ulysses")

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of a dilated pattern by rate, so that the rows of a denser one come first."""
        found = self.pattern.branches(self.layout.n, self.heads, self.kv_heads)
        return tuple(sorted(found, key=lambda b: (b.rate, b.length)))

    def shared(self, branch: Branch, queries: range, keys: range) -> tuple[int, range, range] | None:
        """(start, queries, keys) of the one segment where queries of a chunk see keys of another chunk, or None."""
        length = branch.length
        start = max(queries.start, keys.start) // length * length
        if min(queries.stop, keys.stop) <= start or (self.causal and keys.start > queries.start):
            return None
        return start, *(range(max(r.start, start), min(r.stop, start + length)) for r in (queries, keys))

    def needs(self, rank: int, source: int) -> tuple[StridedRows, ...]:
        """The rows that ``rank`` needs from ``source``, each once, in the order in which they are sent."""
        if rank == source:
            return ()
        layout = self.layout
        if isinstance(self.pattern, BlockSparse):
            return tuple(self._all_heads(keys) for keys in self._seen_blocks(rank, source))
        if layout.kind == "striped":
            keys = range(source, layout.n, layout.ranks)
            if self.causal:  # those before the last query
                keys = range(source, max((r[-1] for r in layout.ranges(rank)), default=0), layout.ranks)
            return (self._all_heads(keys),) if keys else ()
        found = []
        for keys in layout.ranges(source):
            intervals: list[ResidueInterval] = []  # disjoint
            for branch, queries in product(self.branches, layout.ranges(rank)):
                new = self._intervals(branch, queries, keys)
                for old in intervals:
                    new = [part for each in new for part in _without(each, old)]
                intervals += new
            found += chain.from_iterable(map(_strided_rows, intervals))
        return tuple(found)

    def _all_heads(self, keys: range) -> StridedRows:
        return StridedRows(keys.step, len(keys), self.kv_heads, (0, 1), (keys.start, 0))

    def _seen_blocks(self, rank: int, source: int) -> list[range]:
        """The positions of ``source`` that some query of ``rank`` sees, as few ranges, in the order of the shard."""
        mine, theirs = (BlockParts.of(self.layout.ranges(i), self.pattern.block_size) for i in (rank, source))
        wanted, found = theirs[self._seen_parts(mine, theirs)], []
        for start, stop in zip(wanted.starts.tolist(), wanted.stops.tolist()):
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(range(start, stop))
        return found

    def _seen_parts(self, mine: BlockParts, theirs: BlockParts) -> Tensor:
        """The numbers of the parts of keys (c,) that some part of the queries sees, ascending."""
        near = theirs.near(self.pattern, mine.blocks, self.layout.n)
        if not len(near):
            return near
        seen = self.pattern.blocks(self.layout.n, mine.blocks, theirs.blocks[near])  # (mine, near)
        if self.causal:
            seen &= theirs[near].before(mine)
        return near[seen.any(0)]

    @cached_property
    def hops(self) -> list[int]:
        """How far each rank's shard travels along the ring: to the last rank whose queries see some of it."""
        p, needed = self.layout.ranks, rows_needed(self)
        return [max((t for t in range(1, p) if needed[(j + t) % p][j]), default=0) for j in range(p)]

    def _intervals(self, branch: Branch, queries: range, keys: range) -> list[ResidueInterval]:
        """The rows of ``keys`` that the queries see in one branch: one interval, or none."""
        found = self.shared(branch, queries, keys)
        if found is None:
            return []
        start, asking, wanted = found
        pairs = _pairs(branch, self.heads // self.kv_heads, start % branch.rate)
        if len(asking) < branch.rate:  # some heads may select no query here
            pairs = frozenset(p for p in pairs if (p[1] - asking.start) % branch.rate < len(asking))
        return [ResidueInterval(branch.rate, wanted.start, wanted.stop, pairs)] if pairs and wanted else []


@lru_cache(maxsize=4096)
def _pairs(branch: Branch, group: int, phase: int) -> frozenset[tuple[int, int]]:
    return frozenset((h // group, (phase + o) % branch.rate) for h, o in zip(branch.heads, branch.offsets))


@lru_cache(maxsize=4096)
def _held(pairs: frozenset, rate: int, of: frozenset) -> frozenset:
    """The ``pairs`` whose positions are all among the residues ``of`` modulo ``rate``."""
    return frozenset(p for p in pairs if (p[0], p[1] % rate) in of)


def _without(new: ResidueInterval, old: ResidueInterval) -> Iterator[ResidueInterval]:
    """Intervals of the rows of ``new`` that are not rows of ``old``."""
    start, stop = max(new.start, old.start), min(new.stop, old.stop)
    if start >= stop:
        yield new
        return
    rate, pairs = lcm(new.rate, old.rate), new.pairs
    if rate != new.rate:  # neither rate divides the other: split into residues of their common multiple
        pairs = frozenset((g, x % rate) for g, c in pairs for x in _positions(new, c)[: rate // new.rate])
    held = _held(pairs, old.rate, old.pairs)
    if not held:
        yield new
        return
    new = ResidueInterval(rate, new.start, new.stop, pairs)
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
    found = ((head, _positions(interval, residue)) for head, residue in sorted(interval.pairs))
    for (count,), run in sorted(runs_alike(((len(x),), (head, x.start)) for head, x in found), key=itemgetter(0)):
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
    def _moves(self) -> list[tuple[int, View, View]]:
        """(heads, where in the message, where in the own shard) of all rows that are sent, in order."""
        found, first = [], 0
        for rows in chain(*self.send):
            message = View(rows.count, first, rows.heads, head_step=0, shift=1)
            found.append((rows.heads, message, rows.view(self.problem.layout, self.rank)))
            first += rows.rows
        return found

    def pairs(self, message: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of the message (R, 2, b, d), the same rows of the own shard), views (b, count, heads, d)."""
        sent_k, sent_v = keys_of(message)
        for heads, there, here in self._moves:
            entries = (sent_k, WHOLE, there), (k, WHOLE, here), (sent_v, WHOLE, there), (v, WHOLE, here)
            for into_k, own_k, into_v, own_v in views_of(entries, range(1), heads):
                yield into_k, own_k
                yield into_v, own_v


@lru_cache(maxsize=32)
def rows_needed(problem: Problem) -> list[list[int]]:
    """The number of rows that each rank needs from each other, [rank][source], as ``Problem.needs`` lists them.

    >>> from ringlab.ring.layout import contiguous
    >>> rows_needed(Problem(Dense(), contiguous(8, 2), True, 1, 1))
    [[0, 0], [4, 0]]
    """
    layout, p = problem.layout, problem.layout.ranks
    if isinstance(problem.pattern, BlockSparse):
        return _blocks_needed(problem)
    if layout.kind == "striped":
        alike = torch.arange(p * p).view(p, p)
    else:
        alike = _placed(problem)
    found, counted = torch.unique(alike, return_inverse=True)[1].tolist(), {}
    for rank, row in enumerate(found):
        for source, name in enumerate(row):
            if rank != source and name not in counted:  # pairs of shards that lie alike are counted once
                counted[name] = sum(rows.rows for rows in problem.needs(rank, source))
            row[source] = counted[name] if rank != source else 0
    return found


def _placed(problem: Problem) -> Tensor:
    """A number for how the queries of each rank and the keys of each other lie to each other, (rank, source).

    Pairs of one number need equally many rows: these depend on where the keys of shared segments begin and end, seen
    from the first key, on where rates begin, and on which heads select a query at all. A number is 64 bits of a hash.
    """
    layout, place = problem.layout, torch.zeros((), dtype=torch.long)
    chunks = torch.tensor([[*layout.cuts[i : i + 2]] for i in range(len(layout.cuts) - 1)])  # (chunks, 2)
    if layout.kind == "zigzag":
        chunks = torch.stack([chunks[: layout.ranks], chunks.flip(0)[: layout.ranks]], 1)
    for keys, queries in product(chunks.view(layout.ranks, -1, 2).unbind(1), repeat=2):
        (k_start, k_stop), (q_start, q_stop) = keys.unbind(1), queries[:, None].unbind(2)
        for branch in problem.branches:
            start = torch.maximum(q_start, k_start) // branch.length * branch.length  # (rank, source)
            apart = torch.minimum(q_stop, k_stop) <= start
            if problem.causal:
                apart |= k_start > q_start
            asking, wanted = (
                (torch.maximum(first, start), torch.minimum(stop, start + branch.length))
                for first, stop in ((q_start, q_stop), (k_start, k_stop))
            )
            count = asking[1] - asking[0]
            few = torch.where(count < branch.rate, 1 + count + branch.rate * ((asking[0] - k_start) % branch.rate), 0)
            for part in (wanted[0] - k_start, wanted[1] - k_start, (start - k_start) % branch.rate, few):
                place = place * 6364136223846793005 + torch.where(apart, 1, 2 * part)
    return place


def _blocks_needed(problem: Problem) -> list[list[int]]:
    layout, found = problem.layout, []
    shards = [BlockParts.of(layout.ranges(rank), problem.pattern.block_size) for rank in range(layout.ranks)]
    owners = torch.repeat_interleave(torch.tensor([len(shard.blocks) for shard in shards]))
    everyone = BlockParts(*(torch.cat([getattr(s, x) for s in shards]) for x in ("blocks", "starts", "stops")))
    lengths = everyone.stops - everyone.starts
    for rank, mine in enumerate(shards):
        seen = problem._seen_parts(mine, everyone)
        seen = seen[owners[seen] != rank]
        rows = torch.zeros(layout.ranks, dtype=torch.long).index_add_(0, owners[seen], lengths[seen])
        found.append((problem.kv_heads * rows).tolist())
    return found


def keys_of(message: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (b, R, 1, d) as views of a message (R, 2, b, d): one row for each position and K/V head."""
    return tuple(t.transpose(0, 1).unsqueeze(2) for t in message.unbind(1))


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
