"""Which K/V rows a cache keeps: for each position, the last later query that sees it.

``RetentionPolicy`` says it for Dense and Dilated patterns, ``BlockRetention`` for
block-sparse ones. Both also say, as bit masks, which of the kept rows the next queries
see: a query sees a row if their masks have a bit in common.

Positions are tensors (..., tables, m). There is one *table* of rows per K/V head, or a
single one if all heads select the same rows; the query heads of a table that may see
different rows of it are its *viewers*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from ..block_patterns import BlockSparse, Window
from ..patterns import Branch, Pattern

NEVER = -(1 << 40)  # the last query of a row that none sees
RUN = 16  # consecutive positions that one rank keeps
MAX_STEPS = 63  # new positions that are prepared together: bits of an int64
PIECE = 4096  # positions whose masks are computed at once, to bound the memory


@dataclass(frozen=True, eq=False)
class RetentionPolicy:
    """The policy of Dense and Dilated patterns over ``n`` positions, and which of
    ``ranks`` keeps a row.

    Bit i of a mask stands for branch i, and a query sees a row as often as bits of both
    masks agree. The masks of rows hold inside the open segments: until
    ``next_boundary``. Rows are kept for ``max_crop`` positions longer.
    """

    pattern: Pattern
    heads: int
    kv_heads: int
    n: int
    max_crop: int
    rank: int
    ranks: int
    on_gpu: bool = False  # steps may run by the kernels of ``decode``
    run = RUN

    @property
    def own_heads(self) -> range:
        """The query heads for which this rank attends to new positions."""
        first, stop = (
            self.kv_heads * rank // self.ranks * (self.heads // self.kv_heads)
            for rank in (self.rank, self.rank + 1)
        )
        return range(first, stop)

    def owns(self, positions: Tensor) -> Tensor:
        """Which positions this rank keeps: runs of them, by a hash, so that no rate of
        a pattern favours a rank.
        """
        hashed = (positions // self.run * 2654435761 & 0xFFFFFFFF) >> 16
        return hashed % self.ranks == self.rank

    @cached_property
    def branches(self) -> list[Branch]:
        branches = self.pattern.branches(self.n, self.heads, self.kv_heads)
        return sorted(branches, key=lambda branch: branch.rate)

    @cached_property
    def bits(self) -> int:
        """How many bits of masks count; 1: a row counts once if any bit agrees."""
        return len(self.branches)

    @cached_property
    def mask_dtype(self) -> torch.dtype:
        if self.bits < 16:
            return torch.int16
        return torch.int32 if self.bits < 32 else torch.int64

    @cached_property
    def offsets(self) -> Tensor:
        """The offset of each branch (tables, viewers, branches), -1 where a head does
        not run it.
        """
        offsets = torch.full((self.heads, self.bits), -1)
        for i, branch in enumerate(self.branches):
            offsets[list(branch.heads), i] = torch.tensor(branch.offsets)
        if (offsets == offsets[0]).all():
            return offsets[None, :1]
        return offsets.unflatten(0, (self.kv_heads, -1))

    @cached_property
    def tables(self) -> int:
        return len(self.offsets)

    @cached_property
    def viewers(self) -> int:
        return self.offsets.shape[1]

    def heads_of(self, table: int) -> slice:
        """The K/V heads of a table."""
        return slice(table, table + 1) if self.tables > 1 else slice(None)

    @cached_property
    def sees_all(self) -> bool:
        """Whether each query sees each row that is kept here, once."""
        first = self.branches[0]
        closed = first.length < self.n and self.max_crop  # rows of a closed segment
        return self.bits == first.rate == self.ranks == 1 and not closed

    @cached_property
    def slots(self) -> int:
        """The most rows of a table that must be kept at once, and spare ones."""
        kinds = {tuple(table.flatten().tolist()): table for table in self.offsets}
        most = max(map(self._most, kinds.values()))
        return min(self.n + 1, most + self._spare(most))

    def _spare(self, most: int) -> int:
        """Slots beside those of ``most`` rows: at least one, for a new row."""
        return 1

    def _most(self, offsets: Tensor) -> int:
        """The most rows of a table with these offsets (viewers, branches)."""
        last = torch.full((self.n,), NEVER)
        for i, branch in enumerate(self.branches):
            w = branch.length
            r = branch.rate
            whole = self.n // w * w  # the positions of full segments
            for offset in {*offsets[:, i].tolist()} - {-1}:
                for part, size in ((last[:whole], w), (last[whole:], self.n - whole)):
                    if offset < size and len(part):
                        rows = part.view(-1, size)[:, offset::r]  # (segments, selected)
                        final = offset + (size - 1 - offset) // r * r
                        starts = torch.arange(len(rows)) * size + whole * (size < w)
                        rows.copy_(rows.maximum((starts + final)[:, None]))
        last.masked_fill_(~self.owns(torch.arange(self.n)), NEVER)
        return most_alive(last + self.max_crop)

    def needs_dropped(self, length: int, peak: int) -> bool:
        """Whether a query from ``length`` on sees a row that was dropped when there
        were ``peak`` positions.
        """
        if length >= peak - self.max_crop:
            return False
        last = in_pieces(self._last, torch.arange(length).expand(self.tables, -1))
        return bool(((last >= length) & (last < peak - self.max_crop)).any())

    def last_query(self, positions: Tensor) -> Tensor:
        """The last query that sees each row; ``NEVER`` if there is none, or another
        rank keeps the row: (..., tables, m).
        """
        positions = positions.long()
        last = in_pieces(self._last, positions)
        return last.masked_fill_(~self.owns(positions), NEVER)

    def _last(self, positions: Tensor) -> Tensor:
        """The same, whichever rank keeps the row."""
        start, selected = self._selected(positions)
        size = (self.n - start).clamp(max=self._lengths)
        offsets = self.offsets[:, :, None]  # (tables, viewers, 1, branches)
        last = start + offsets + (size - 1 - offsets) // self._rates * self._rates
        return torch.where(selected, last, NEVER).amax((-3, -1))

    def row_masks(self, positions: Tensor, until: Tensor) -> Tensor:
        """Which queries see each row (e, tables, m), of those before the boundaries
        ``until`` (e,) at which the masks end: (e, tables, viewers, m).
        """
        segment = (until[:, None] - 1) // self._lengths  # (e, branches), the open ones
        start = (segment * self._lengths)[:, None, None, None]

        def masks(piece: Tensor) -> Tensor:
            begins, selected = self._selected(piece)
            return ((selected & (begins == start)) << self._shifts).sum(-1)

        return in_pieces(masks, positions)

    def query_masks(self, rows: Tensor, t: Tensor, until: Tensor) -> Tensor:
        """The masks of the queries at t (e, steps), from those of their own ``rows``
        (e, tables, viewers, steps): here the same.
        """
        return rows

    def _selected(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of positions (..., tables, m), the start of the segment in each branch
        (..., tables, 1, m, branches), and whether a viewer selects the position there
        (..., tables, viewers, m, branches).
        """
        positions = positions[..., None, :, None]
        start = positions - positions % self._lengths
        at = (positions - start) % self._rates
        return start, at == self.offsets[:, :, None]

    @cached_property
    def _lengths(self) -> Tensor:
        return torch.tensor([branch.length for branch in self.branches])

    @cached_property
    def _rates(self) -> Tensor:
        return torch.tensor([branch.rate for branch in self.branches])

    @cached_property
    def _shifts(self) -> Tensor:
        return torch.arange(self.bits)

    def next_boundary(self, t: Tensor) -> Tensor:
        """The positions until which masks that are computed at t (e,) hold: where the
        next segment ends.
        """
        ends = (t[:, None] // self._lengths + 1) * self._lengths  # (e, branches)
        return ends.amin(1).clamp(max=self.n)


class BlockRetention(RetentionPolicy):
    """The policy of block-sparse patterns, where all heads select the same rows.

    Bit i of a mask stands for the query ``MAX_STEPS - i`` positions before the
    boundary. Where rows leave every few positions, spare slots let them leave together:
    many on a GPU, where this costs copies, an eighth of the rows at most elsewhere.
    """

    branches = ()
    bits = 1
    mask_dtype = torch.int64
    sees_all = False
    offsets = torch.zeros(1, 1, 1)

    @property
    def run(self) -> int:
        return self.pattern.block_size

    def _spare(self, most: int) -> int:
        if self.run >= MAX_STEPS:
            return 1
        return MAX_STEPS if self.on_gpu else min(1 + most // 8, MAX_STEPS)

    @cached_property
    def _last_of_block(self) -> Tensor:
        """The last query that sees each block, or ``NEVER``: (blocks,)."""
        count = self.pattern.count(self.n)
        parts = self.pattern.parts
        if all(isinstance(part, Window) for part in parts):  # of tokens, maybe
            before = max(part.before for part in parts)
            last = (torch.arange(count) + before).clamp(max=count - 1)
        else:
            last = torch.full((count,), -1)
            for rows, cols, seen in self.pattern.chunks(self.n):
                seen = seen & (cols <= rows[:, None])
                newest = torch.where(seen, rows[:, None], -1).amax(0)
                last[cols] = last[cols].maximum(newest)
        ends = ((last + 1) * self.run).clamp(max=self.n) - 1
        return torch.where(last < 0, NEVER, ends)

    def _most(self, offsets) -> int:
        return most_alive(self.last_query(torch.arange(self.n)) + self.max_crop)

    def _last(self, positions):
        return self._last_of_block[positions // self.run]

    def row_masks(self, positions, until):
        entries = zip(positions[:, 0].long(), until.tolist())
        masks = [
            in_pieces(partial(self._masks, first=end - MAX_STEPS), rows)
            for rows, end in entries
        ]
        return torch.stack(masks)[:, None, None]  # (e, 1, 1, m)

    def _masks(self, rows: Tensor, first: int) -> Tensor:
        """The masks of rows (m,), with bits from the query at ``first`` on."""
        steps = torch.arange(MAX_STEPS)
        queries = (first + steps).clamp(min=0) // self.run
        blocks, of_row = (rows // self.run).unique(return_inverse=True)
        seen = self.pattern.blocks(self.n, queries, blocks)  # (steps, blocks)
        return (seen.long() << steps[:, None]).sum(0)[of_row]

    def query_masks(self, rows, t, until):
        return (1 << (t - until[:, None] + MAX_STEPS))[:, None, None]

    def next_boundary(self, t):
        return (t + MAX_STEPS).clamp(max=self.n)


def in_pieces(call: Callable[[Tensor], Tensor], positions: Tensor) -> Tensor:
    """``call`` of ``positions`` (..., m), some at a time."""
    if positions.shape[-1] <= PIECE:
        return call(positions)
    return torch.cat([call(piece) for piece in positions.split(PIECE, -1)], -1)


def most_alive(last: Tensor) -> int:
    """The most rows at once, of rows x that are there from position x + 1 to
    ``last[x]`` (n,), if that is not before.

    >>> most_alive(torch.tensor([3, 0, 3, 3, NEVER]))
    2
    """
    n = len(last)
    there = last > torch.arange(n)
    gone = torch.bincount(last[there].clamp(max=n), minlength=n + 1)[:n]
    return int((there.long() - gone).cumsum(0).max())


@lru_cache(maxsize=64)
def retention_policy(
    pattern: Pattern,
    heads: int,
    kv_heads: int,
    n: int,
    max_crop: int,
    rank: int = 0,
    ranks: int = 1,
    on_gpu: bool = False,
) -> RetentionPolicy:
    """The policy of these sizes, for one of ``ranks``.

    >>> from ringlab.patterns import Dilated
    >>> policy = retention_policy(Dilated([4, 8], [1, 2]), 1, 1, 16, 0)
    >>> policy.last_query(torch.arange(8)[None]).tolist()
    [[6, 3, 6, 3, 7, 7, 7, 7]]
    """
    kind = BlockRetention if isinstance(pattern, BlockSparse) else RetentionPolicy
    return kind(pattern, heads, kv_heads, n, max_crop, rank, ranks, on_gpu)
