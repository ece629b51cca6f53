"""Layouts: which rank owns which positions of a sequence. Each is a partition of
range(n).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..checks import LARGEST, check_int, is_int, short_repr
from ..torch_private import outside_modes

MOST_RANKS = 2**20  # beyond any cluster, and a layout lists them all


@dataclass(frozen=True)
class Layout:
    """A sequence split over ranks; made by `contiguous`, `uneven`, `zigzag`, `striped`
    or `hilbert`.

    ``cuts``: the p + 1 borders of the shards of a contiguous, uneven or Hilbert layout,
    the 2 p + 1 borders of the chunks of a zigzag one, (n, p) of a striped one.
    ``grid``: (height, width) of a Hilbert layout, whose positions are steps of the
    curve. ``owners``: of a layout made by ``joined``, the rank of each chunk.

    >>> layout = zigzag(16, 2)
    >>> layout.ranges(0), layout.ranges(1)
    ((range(0, 4), range(12, 16)), (range(4, 8), range(8, 12)))
    >>> x = torch.arange(16)
    >>> layout.shard(x, 0, dim=0).tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    >>> torch.equal(layout.unshard([layout.shard(x, k, dim=0) for k in range(2)], dim=0), x)
    True
    """

    kind: str
    cuts: tuple[int, ...]
    grid: tuple[int, int] | None = None
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind != "striped" and not self.owners:
            chunks = len(self.cuts) - 1
            owners = range(chunks)
            if self.kind == "zigzag":
                owners = [min(i, chunks - 1 - i) for i in owners]
            object.__setattr__(self, "owners", tuple(owners))

    @cached_property
    def n(self) -> int:
        return self.cuts[0] if self.kind == "striped" else self.cuts[-1]

    @cached_property
    def ranks(self) -> int:
        return self.cuts[-1] if self.kind == "striped" else max(self.owners) + 1

    def chunks(self, rank: int) -> list[tuple[int, range]]:
        """(first row in the shard, positions) of each of ``ranges(rank)``. ValueError
        for a rank that is none.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be in 0 .. {self.ranks - 1}, got {rank}")
        return self._chunks[rank]

    @cached_property
    def _chunks(self) -> list[list[tuple[int, range]]]:
        if self.kind == "striped":
            owned = [[range(rank, self.n, self.ranks)] for rank in range(self.ranks)]
        else:
            owned = [[] for _ in range(self.ranks)]
            for owner, chunk in zip(self.owners, pairwise(self.cuts)):
                owned[owner].append(range(*chunk))
        rows = [accumulate(map(len, chunks), initial=0) for chunks in owned]
        return [[pair for pair in zip(*each) if pair[1]] for each in zip(rows, owned)]

    def ranges(self, rank: int) -> tuple[range, ...]:
        """The positions of the pattern that a rank owns, in the order of its rows,
        increasing, without empty ranges.
        """
        return tuple(positions for _, positions in self.chunks(rank))

    def size(self, rank: int) -> int:
        """The number of positions that a rank owns."""
        return sum(map(len, self.ranges(rank)))

    @cached_property
    def sizes(self) -> list[int]:
        """The number of positions of every rank."""
        return [self.size(rank) for rank in range(self.ranks)]

    def rows(self, rank: int, positions: range) -> slice:
        """The rows in the shard of ``rank`` that hold positions of one of its chunks."""
        if not positions:
            return slice(0, 0)
        row, owned = next(
            chunk for chunk in self.chunks(rank) if positions[0] in chunk[1]
        )
        first = row + owned.index(positions[0])
        step = max(1, positions.step // owned.step)
        return slice(first, first + step * len(positions), step)

    def joined(self, lines: Sequence[tuple[int, ...]]) -> Layout:
        """The layout in which the ranks of each line are one.

        Raises ValueError for stripes that do not join to stripes.
        """
        ranks = len(lines)
        if self.kind == "striped":
            if any(rank % ranks != i for i, line in enumerate(lines) for rank in line):
                raise ValueError(
                    "a striped layout over a 2-D mesh needs ulysses along the first dimension"
                )
            return striped(self.n, ranks)
        new = {rank: i for i, line in enumerate(lines) for rank in line}
        cuts = [0]
        owners = []
        for owner, stop in zip(map(new.get, self.owners), self.cuts[1:]):
            if owners[-1:] == [owner]:
                cuts.pop()
            else:
                owners.append(owner)
            cuts.append(stop)
        kind = "contiguous" if owners == [*range(ranks)] else "joined"
        return Layout(kind, tuple(cuts), owners=tuple(owners))

    @outside_modes()
    def positions(self, rank: int) -> Tensor:
        """The positions in the sequence of a rank's rows, int64 (size,): for position
        embeddings.
        """
        chunks = [torch.arange(r.start, r.stop, r.step) for r in self.ranges(rank)]
        steps = torch.cat([torch.empty(0, dtype=torch.long), *chunks])
        return steps if self.grid is None else _curve(*self.grid)[steps]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's rows of a whole tensor, as a view if they are adjacent. Raises
        ValueError for another length.
        """
        if x.shape[dim] != self.n:
            raise ValueError(
                f"the layout is of {self.n} positions, the tensor has {x.shape[dim]} along dim {dim}"
            )
        chunks = self.chunks(rank)
        if self.grid is None and len(chunks) == 1 and (owned := chunks[0][1]).step == 1:
            return x.narrow(dim, owned.start, len(owned))
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole tensor from the shards of all ranks, in order. Raises ValueError if
        their sizes do not fit.
        """
        sizes = [t.shape[dim] for t in shards]
        if sizes != self.sizes:
            raise ValueError(f"shards have sizes {sizes}, the layout has {self.sizes}")
        rows = torch.cat(list(shards), dim)
        if self.grid is None and self.kind == "contiguous":
            return rows
        order = torch.cat([self.positions(k) for k in range(self.ranks)]).to(
            rows.device
        )
        return torch.empty_like(rows).index_copy_(dim, order, rows)

    def __str__(self) -> str:
        grid = f"@{self.grid[0]}x{self.grid[1]}" if self.grid else ""
        return f"{self.kind}{grid}:{','.join(map(str, self.cuts))}"


def contiguous(n: int, ranks: int) -> Layout:
    """Adjacent positions in each shard, as equal as possible: the first ones take the
    remainder.
    """
    return Layout("contiguous", _borders(n, ranks))


def uneven(sizes: Iterable[int]) -> Layout:
    """Adjacent positions in each shard, of these sizes; 0 is allowed."""
    sizes = tuple(sizes) if isinstance(sizes, Iterable) else ()
    if not all(is_int(s, 0) for s in sizes) or not sum(sizes):
        raise ValueError(
            f"sizes must be integers from 0 up with a positive sum, got {short_repr(sizes)}"
        )
    return Layout("contiguous", tuple(accumulate(map(int, sizes), initial=0)))


def zigzag(n: int, ranks: int) -> Layout:
    """2 p chunks; rank k owns chunks k and 2 p - 1 - k: equal causal work (Brandon et
    al. 2023; Llama 3).
    """
    return Layout("zigzag", _borders(n, ranks, 2))


def striped(n: int, ranks: int) -> Layout:
    """Rank k owns every p-th position from k on (Striped Attention, arXiv 2311.09431)."""
    return Layout(
        "striped",
        (check_int("n", n, most=LARGEST), check_int("ranks", ranks, most=MOST_RANKS)),
    )


def hilbert(height: int, width: int, ranks: int) -> Layout:
    """Shards of a Hilbert curve over a grid, whose cells are the sequence row by row.
    The pattern follows the curve.

    Any height and width: the generalised curve of J. Cerveny
    (github.com/jakubcerveny/gilbert).
    """
    grid = check_int("height", height), check_int("width", width)
    return Layout("hilbert", _borders(grid[0] * grid[1], ranks), grid)


def layout_named(layout: str | Layout, n: int, ranks: int) -> Layout:
    """The layout of this name for n positions, or the given layout. Raises ValueError
    if it does not fit.
    """
    if isinstance(layout, Layout):
        if layout.ranks != ranks:
            raise ValueError(
                f"the layout is for {layout.ranks} ranks, the group has {ranks}"
            )
        if layout.n != n:
            raise ValueError(
                f"the layout is for {layout.n} positions, the sequence has {n}"
            )
        return layout
    makers = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
    if not isinstance(layout, str) or layout not in makers:
        raise ValueError(
            f"unknown layout {short_repr(layout)}; known: {', '.join(makers)}, or a ringlab.ring.Layout"
        )
    return makers[layout](n, ranks)


def _borders(n: int, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    parts = chunks * check_int("ranks", ranks, most=MOST_RANKS)
    size, longer = divmod(check_int("n", n, most=LARGEST), parts)
    return tuple(i * size + min(i, longer) for i in range(parts + 1))


@cache
def _curve(height: int, width: int) -> Tensor:
    """Row-major index of each step of the curve (height * width,): consecutive steps
    are neighbours on the grid.
    """
    cells: list[complex] = []
    # Blocks of cells x + iy: the corner, the side to walk along, the side to cross.
    stack = [(0, width, height * 1j) if width >= height else (0, height * 1j, width)]
    while stack:
        corner, along, across = stack.pop()
        length = int(abs(along))
        depth = int(abs(across))
        step = along / length
        side_step = across / depth
        if depth == 1 or length == 1:
            cells += [
                corner + i * (step if depth == 1 else side_step)
                for i in range(max(length, depth))
            ]
            continue
        half = length // 2
        half_depth = depth // 2
        if 2 * length > 3 * depth:
            if (
                half % 2 and length > 2
            ):  # an even step keeps the ends of the halves next to each other
                half += 1
            first = half * step
            parts = [(corner, first, across), (corner + first, along - first, across)]
        else:
            if half_depth % 2 and depth > 2:
                half_depth += 1
            first = half * step
            up = half_depth * side_step
            end = corner + along - step + up - side_step
            parts = [
                (corner, up, first),
                (corner + up, along, across - up),
                (end, -up, first - along),
            ]
        stack += reversed(parts)
    return torch.tensor([int(cell.imag) * width + int(cell.real) for cell in cells])
