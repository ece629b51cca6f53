"""Which rows a rank's queries see under a block-sparse pattern, and which calls read them: arithmetic on ranges alone.

A chunk of a shard is cut where blocks end, and also where it ends itself, maybe inside a block. Chunks share no
position: two pieces of one block are the same, or one lies wholly before the other. So a piece of queries sees a piece
of keys whole or not at all, and only a piece with itself needs the causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..block_calls import Tiling
from ..block_sparse import layers_of
from ..block_tree import Cuts, layer
from ..blocks import BlockSparse
from ..tiling import tile
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

    >>> from ringlab.blocks import sliding_window
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


def calls(
    pattern: BlockSparse, layout: Layout, causal: bool, rank: int, received: Sequence[range] | None = None,
    *, lower_right: bool = False,
) -> Tiling:  # fmt: skip
    """The calls of a rank's queries on its own keys, or on the rows ``received`` of others, in their order.

    ``lower_right``: as for ``tiling.tile``.
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
    return tile([layer(seen) for seen in layers], mine.cuts, theirs.cuts, diagonal, lower_right=lower_right)
