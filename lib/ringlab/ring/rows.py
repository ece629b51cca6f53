"""``RowSet``: sets of the rows of k and v that one rank needs of another. A row is one
position of one K/V head.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import Protocol

import torch
from torch import Tensor

from ..engine.blocks import BlockParts
from ..engine.dilated import first_and_step, runs_alike
from ..engine.execute import View
from .layout import Layout


class RowSet(Protocol):
    """Rows of one rank."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def minus(self, other: RowSet) -> RowSet:
        """The rows that are not in another set of the same rank."""

    def strided(self) -> tuple[StridedRows, ...]:
        """The rows as they are sent, in order."""


@dataclass(frozen=True)
class StridedRows:
    """Rows to send: every ``rate``-th position, ``count`` of them, of ``heads`` K/V
    heads.

    ``kv_head`` and ``first``, the first position, are (first, step) along the heads.
    Positions are those of the sequence. A message holds the rows position by position,
    (count, heads).
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
            yield (
                self.kv_head[0] + i * self.kv_head[1],
                range(first, first + self.count * self.rate, self.rate),
            )

    def view(self, layout: Layout, rank: int) -> View:
        """These rows in the shard of ``rank``, which owns them."""
        position, step = self.first
        stop = position + self.count * self.rate
        rows = layout.rows(rank, range(position, stop, self.rate))
        spacing = layout.ranks if layout.kind == "striped" else 1
        return View(
            self.count, rows.start, rows.step, 0, *self.kv_head, step // spacing
        )


@dataclass(frozen=True)
class ResidueInterval:
    """Positions start <= x < stop with x mod rate == residue, for (K/V head, residue)
    ``pairs``.
    """

    rate: int
    start: int
    stop: int
    pairs: frozenset[tuple[int, int]]

    def positions(self, residue: int) -> range:
        first = self.start + (residue - self.start) % self.rate
        return range(first, self.stop, self.rate)

    def minus(self, other: ResidueInterval) -> Iterator[ResidueInterval]:
        """Intervals of the rows that are not in another one."""
        start = max(self.start, other.start)
        stop = min(self.stop, other.stop)
        if start >= stop:
            yield self
            return
        rate = lcm(self.rate, other.rate)
        pairs = self.pairs
        if rate != self.rate:  # split into residues of the common multiple
            pairs = frozenset(
                (head, x % rate)
                for head, residue in pairs
                for x in self.positions(residue)[: rate // self.rate]
            )
        common = _common(pairs, other.rate, other.pairs)
        if not common:
            yield self
            return
        if common != pairs:
            yield ResidueInterval(rate, self.start, self.stop, pairs - common)
        if self.start < start:
            yield ResidueInterval(rate, self.start, start, common)
        if stop < self.stop:
            yield ResidueInterval(rate, stop, self.stop, common)

    def strided(self) -> Iterator[StridedRows]:
        """The rows as they are sent: together those of heads with equal counts, evenly
        spaced indices and first positions.
        """
        heads = (
            (head, self.positions(residue)) for head, residue in sorted(self.pairs)
        )
        for (count,), run in sorted(
            runs_alike(((len(x),), (head, x.start)) for head, x in heads),
            key=operator.itemgetter(0),
        ):
            yield StridedRows(self.rate, count, len(run), *first_and_step(run))


@lru_cache(maxsize=4096)
def _common(pairs: frozenset, rate: int, of: frozenset) -> frozenset:
    """The ``pairs`` whose positions are all among the residues ``of`` modulo ``rate``."""
    return frozenset(p for p in pairs if (p[0], p[1] % rate) in of)


@dataclass(frozen=True)
class Intervals:
    """Rows that dilated or dense attention needs: intervals that share no row.

    >>> evens = Intervals((ResidueInterval(2, 0, 8, frozenset({(0, 0)})),))
    >>> fours = Intervals((ResidueInterval(4, 0, 8, frozenset({(0, 0)})),))
    >>> evens.count, [rows.first for rows in evens.minus(fours).strided()]
    (4, [(2, 0)])
    """

    intervals: tuple[ResidueInterval, ...] = ()

    @property
    def count(self) -> int:
        return sum(
            len(each.positions(residue))
            for each in self.intervals
            for _, residue in each.pairs
        )

    def minus(self, other: Intervals) -> Intervals:
        intervals = self.intervals
        for removed in other.intervals:
            intervals = tuple(
                chain.from_iterable(each.minus(removed) for each in intervals)
            )
        return Intervals(intervals)

    def plus(self, other: Intervals) -> Intervals:
        """The rows of both; those of ``other`` that are new come last."""
        return Intervals(self.intervals + other.minus(self).intervals)

    def strided(self) -> tuple[StridedRows, ...]:
        return tuple(chain.from_iterable(each.strided() for each in self.intervals))


@dataclass(frozen=True)
class Parts:
    """Rows that block-sparse attention needs: of the parts of blocks of a rank those
    with these ``numbers`` (c,), ascending, of all K/V heads.
    """

    parts: BlockParts
    numbers: Tensor
    kv_heads: int

    @property
    def count(self) -> int:
        parts = self.parts[self.numbers]
        return self.kv_heads * int((parts.stops - parts.starts).sum())

    def minus(self, other: Parts) -> Parts:
        kept = ~torch.isin(self.numbers, other.numbers)
        return replace(self, numbers=self.numbers[kept])

    def strided(self) -> tuple[StridedRows, ...]:
        """As few ranges of all heads, in the order of the shard."""
        parts = self.parts[self.numbers]
        ranges = []
        for start, stop in zip(parts.starts.tolist(), parts.stops.tolist()):
            if ranges and ranges[-1].stop == start:
                start = ranges.pop().start
            ranges.append(range(start, stop))
        return tuple(
            StridedRows(1, len(keys), self.kv_heads, (0, 1), (keys.start, 0))
            for keys in ranges
        )
