"""The tables of dilated branches.

A tile is a progression of query rows. Where branches nest, that is, their rates and
their segments divide each other, tiles may be of rows that the same branches select:
each visible pair is then computed once, with log M, and not once for each branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns import Branch
from .table import DIAGONAL, TILE, VISIT, Table, rows_of

ROWS = 1024  # query rows of a tile
FEWEST = 64  # rows of a visit at least: with fewer a branch has tiles of its own
NESTED = 128  # rows of a class in the shortest segment at least
GAIN = 0.95  # of the pairs that are left, where it pays to compute each once


class Rung(NamedTuple):
    """A branch of one head: it selects the rows x with (x mod length) mod rate ==
    offset.
    """

    length: int
    rate: int
    offset: int

    def is_regular(self, n: int) -> bool:
        """Whether the same rows are selected in each segment: x mod rate == offset."""
        return self.length % self.rate == 0 or self.length >= n


def dilated_tables(
    branches: Sequence[Branch],
    n: int,
    heads: int,
    causal: bool,
    once: bool = False,
) -> list[Table]:
    """Return the tables of ``n`` positions, each of which continues the results of the
    one before. ``once``: a single table, as narrow results need it.
    """
    alike: dict[tuple[Rung, ...], list[int]] = {}  # heads that see the same
    for head in range(heads):
        rungs = (
            Rung(b.length, b.rate, b.offsets[b.heads.index(head)])
            for b in branches
            if head in b.heads
        )
        alike.setdefault(tuple(sorted(rungs)), []).append(head)
    rounds: list[list[tuple[_Head, list[int]]]] = []
    for rungs, members in alike.items():
        for i, part in enumerate(_parts(rungs, n, causal, once)):
            rounds += [[]] if i == len(rounds) else []
            rounds[i].append((part, members))
    return [_joined(parts) for parts in rounds]


class _Head:
    """The tiles and visits of one head, of ``first`` (t,), ``step`` and ``count`` rows."""

    def __init__(self, first: Tensor, step: int, count: Tensor, causal: bool) -> None:
        self.first = first
        self.step = step
        self.count = count
        self.causal = causal
        self.pairs = 0  # of a query and a key that it sees, about
        self.visits: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def of(n: int, step: int, offsets: Sequence[int], rows: int, causal: bool) -> _Head:
        """Tiles of ``rows`` rows of the classes ``offsets`` modulo ``step``."""
        cuts = [
            (at, min(rows, len(range(at, n, step))))
            for offset in offsets
            for at in range(offset, n, step * rows)
        ]
        first, count = torch.tensor(cuts, dtype=torch.int64).view(-1, 2).unbind(1)
        return _Head(first, step, count, causal)

    def segments(self, length: int) -> tuple[Tensor, Tensor]:
        """Return which tiles meet which segments: (pairs,) of each."""
        low = self.first // length
        count = (self.first + self.step * (self.count - 1)) // length - low + 1
        tile = torch.repeat_interleave(count)
        before = count.cumsum(0) - count
        return tile, (low - before)[tile] + torch.arange(len(tile))

    def see(
        self, tile: Tensor, queries: Class, keys: Class, times: int | Tensor = 1
    ) -> None:
        """Add visits: the rows of a tile that are ``queries`` see ``keys`` so many
        times, each (pairs,).
        """
        last = self.first + self.step * (self.count - 1)  # (tiles,)
        row, rows = queries.cut(self.first[tile], last[tile] + 1).rows()
        key, number = keys.rows()
        end = row + queries.step * (rows - 1)
        band = torch.full_like(row, -1)
        average = number
        if self.causal:
            number = number.minimum((end - key) // keys.step + 1)
            band[key + keys.step * (number - 1) > row] = 0
            average = number.minimum(((row + end) // 2 - key) // keys.step + 1)
        there = (rows > 0) & (number > 0)
        self.pairs += int((rows * average)[there].sum())
        visits = rows_of(
            VISIT,
            len(tile),
            key=key,
            key_step=keys.step,
            keys=number,
            key_position=key,
            row=(row - self.first[tile]) // self.step,
            row_step=queries.step // self.step,
            rows=rows,
            band=band,
            log_m=torch.as_tensor(times).float().log().view(torch.int32),
        )
        self.visits.append((tile[there], visits[there]))

    def sorted_visits(self) -> tuple[Tensor, Tensor]:
        """Return the visits (visits, 14) by tile, and where those of each tile begin."""
        tile, visits = map(torch.cat, zip(*self.visits))
        order = tile.argsort(stable=True)
        borders = torch.arange(len(self.first) + 1)
        return visits[order], torch.searchsorted(tile[order], borders)


class Class(NamedTuple):
    """The positions from ``start`` to ``stop``, both (pairs,), that are ``offset``
    modulo ``step``.
    """

    start: Tensor
    stop: Tensor
    step: int | Tensor
    offset: int | Tensor

    def cut(self, start: Tensor, stop: Tensor) -> Class:
        """Return those from ``start`` to ``stop``."""
        return self._replace(
            start=self.start.maximum(start), stop=self.stop.minimum(stop)
        )

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the first of them and how many there are."""
        first = self.start + (self.offset - self.start) % self.step
        return first, (-((first - self.stop) // self.step)).clamp(min=0)


def _parts(rungs: tuple[Rung, ...], n: int, causal: bool, once: bool) -> list[_Head]:
    """The tiles of one head, table by table."""
    rungs = sorted(rungs, key=lambda rung: (rung.rate, rung.length))
    nested = _nested(rungs, n)
    chain = rungs[:nested]
    others = rungs[nested:]
    if nested > 1 and not (once and others):
        one = _folded(chain, n, causal)
        apart = _unfolded(chain, n, causal, once)
        if one.pairs < GAIN * sum(part.pairs for part in apart):
            return [one, *_unfolded(others, n, causal, once)]
    return _unfolded(rungs, n, causal, once)


def _nested(rungs: list[Rung], n: int) -> int:
    """How many of the first branches nest, with enough rows in each segment."""
    for i, rung in enumerate(rungs):
        first = rungs[0]
        before = rungs[max(0, i - 1)]
        nests = (
            rung.is_regular(n)
            and rung.rate % before.rate == 0
            and rung.offset % before.rate == before.offset % before.rate
            and (rung.length % before.length == 0 or rung.length >= n)
            and rung.rate * NESTED <= first.length
        )
        if not nests:
            return i
    return len(rungs)


def _unfolded(rungs: Sequence[Rung], n: int, causal: bool, once: bool) -> list[_Head]:
    """Tiles whose rows lie closely, with a visit for each branch and segment."""
    heads = []
    left = list(rungs)
    while left:
        step = left[0].rate
        offset = left[0].offset
        within = [r.rate % step == 0 and (r.offset - offset) % step == 0 for r in left]
        if not all(r.is_regular(n) for r in left) or (once and not all(within)):
            step, offset = 1, 0
        own = [
            rung
            for rung in left
            if once
            or rung == left[0]
            or (
                rung.rate % step == 0
                and (rung.offset - offset) % step == 0
                and ROWS // (rung.rate // step) >= FEWEST
            )
        ]
        shortest = max(1, min(rung.length for rung in own) // step)
        whole = ROWS // shortest * shortest or ROWS
        head = _Head.of(n, step, [offset], whole, causal)
        for rung in own:
            tile, segment = head.segments(rung.length)
            start = segment * rung.length
            stop = (start + rung.length).clamp(max=n)
            seen = Class(start, stop, rung.rate, start + rung.offset)
            head.see(tile, seen, seen)
        heads.append(head)
        left = [rung for rung in left if rung not in own]
    return heads


def _folded(chain: Sequence[Rung], n: int, causal: bool) -> _Head:
    """Tiles of rows that the same branches select, with a visit for keys of one M."""
    rate = chain[-1].rate
    level = [
        sum(residue % r.rate == r.offset % r.rate for r in chain) - 1
        for residue in range(rate)
    ]
    residues = [residue for residue in range(rate) if level[residue] >= 0]
    head = _Head.of(n, rate, residues, ROWS // 2, causal)
    level_of = torch.tensor(level)[head.first % rate]  # (tiles,)
    for inner, branch in enumerate(chain):
        # Rows of a segment of the branch before see what is not in that segment.
        within = chain[max(0, inner - 1)].length
        tile, segment = head.segments(within)
        begin = segment * within
        end = (begin + within).clamp(max=n)
        start = begin // branch.length * branch.length
        stop = (start + branch.length).clamp(max=n)
        spans = [(start, begin), (end, stop)] if inner else [(begin, end)]
        by_level = [_key_classes(chain, inner, top) for top in range(len(chain))]
        classes = torch.tensor([one for own in by_level for one in own])  # (classes, 3)
        number = torch.tensor([len(own) for own in by_level])
        first = number.cumsum(0) - number
        each = number[level_of[tile]]  # of each tile and segment
        pair = torch.repeat_interleave(each)
        place = torch.arange(len(pair)) - (each.cumsum(0) - each)[pair]
        tile, begin, end = (t[pair] for t in (tile, begin, end))
        step, offset, times = classes[first[level_of[tile]] + place].unbind(1)
        queries = Class(begin, end, rate, head.first[tile] % rate)
        for span in spans:
            keys = Class(*(t[pair] for t in span), step, offset)
            head.see(tile, queries, keys, times)
    return head


def _key_classes(
    chain: Sequence[Rung], inner: int, top: int
) -> list[tuple[int, int, int]]:
    """(step, offset, M) of the keys that a row of the branches up to ``top`` sees by
    those from ``inner`` on.
    """
    if top < inner:
        return []
    classes = []
    for i in range(inner, top):
        step = chain[i].rate
        after = chain[i + 1]
        classes += [
            (after.rate, residue, i - inner + 1)
            for residue in range(chain[i].offset % step, after.rate, step)
            if residue != after.offset % after.rate
        ]
    return [*classes, (chain[top].rate, chain[top].offset, top - inner + 1)]


def _joined(parts: list[tuple[_Head, list[int]]]) -> Table:
    """One table of tiles, each for the heads that are told."""
    tiles = []
    visits = []
    before = 0
    for head, members in parts:
        own, borders = head.sorted_visits()
        for member in members:
            columns = {
                "head": member,
                "first": head.first,
                "step": head.step,
                "count": head.count,
                "position": head.first,
                "visits_from": before + borders[:-1],
                "visits_to": before + borders[1:],
            }
            tiles.append(rows_of(TILE, len(head.first), **columns))
        visits.append(own)
        before += len(own)
    tiles = torch.cat(tiles)
    last = tiles[:, TILE.index("first")] // ROWS
    tiles = tiles[last.argsort(stable=True)]
    band = torch.tensor([DIAGONAL], dtype=torch.int32)
    return Table(tiles, torch.cat(visits), band[0, :0], band)
