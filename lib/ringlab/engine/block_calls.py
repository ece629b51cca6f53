"""The dense calls that a block-sparse pattern becomes, and the order in which they write their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Run:
    """``nodes`` dense calls of ``rows`` queries by ``keys`` keys; ``query``, ``key``: (first, step) of their rows.

    A query step of 0: all nodes have the same queries, and their results are merged. ``causal``: the last query of a
    node sees all its keys, each one before it one fewer. ``first``: no earlier call wrote these rows, and no two nodes
    do.
    """

    rows: int
    keys: int
    nodes: int
    query: tuple[int, int]
    key: tuple[int, int]
    causal: bool = False
    first: bool = False

    @property
    def shared(self) -> bool:
        return self.nodes > 1 and self.query[1] == 0

    def whole(self, n: int) -> bool:
        """Whether this is one dense call of all n queries, by the same keys."""
        one_piece = self.nodes == 1 or (self.query[1], self.key[1]) == (self.rows, 0)
        return one_piece and self.nodes * self.rows == n and not self.causal


@dataclass(frozen=True)
class Picked:
    """Dense calls of ``rows`` queries from ``queries`` (nodes,) on, each by the copied keys ``keys`` (nodes, m)."""

    rows: int
    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Tiling:
    """The calls, in order. ``bare``: (start, stop) of rows that no call writes first and alone."""

    runs: tuple[Run, ...]
    picked: tuple[Picked, ...]
    bare: tuple[tuple[int, int], ...]


def ordered(runs: list[Run], picked: list[Picked], rows: int) -> Tiling:
    """Runs that write most rows go first; those alone on theirs need no merge."""
    written, bare = torch.zeros(2, rows, dtype=torch.bool)
    found = []
    for run in sorted(runs, key=lambda r: (-r.rows * (1 if r.shared else r.nodes), r.shared, r.query)):
        (start, step), nodes = run.query, torch.arange(run.nodes)
        at = (start + step * nodes[:, None] + torch.arange(run.rows)).flatten()
        fresh = ~written[at]
        first = not run.shared and bool(fresh.all())
        bare[at[fresh]] = not first
        written[at] = True
        found.append(replace(run, first=first))
    bare |= ~written
    return Tiling(tuple(found), tuple(picked), tuple(_ranges(bare)))


def _ranges(rows: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of the stretches of bool rows (n,) that are True.

    >>> _ranges(torch.tensor([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    edges = F.pad(rows.int(), (1, 1)).diff().nonzero().flatten()
    return [*zip(edges[::2].tolist(), edges[1::2].tolist())]
