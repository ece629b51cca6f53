"""The table of tiles: which query sees which key, as kernels walk it.

A *tile* is some rows of q, of query heads that share a K/V head. Its *visits* are the keys
that its rows see: each a run or a list of keys, and which rows of the tile see them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = (
    "batch",
    "head",
    "heads",
    "first",
    "step",
    "count",
    "position",
    "visits_from",
    "visits_to",
)
VISIT = (
    "key",
    "key_step",
    "keys",
    "key_list",
    "key_position",
    "row",
    "row_step",
    "rows",
    "row_list",
    "band",
    "ranges",
    "grain",
    "weights",
    "log_m",
)
ENDLESS = 1 << 30  # more positions than any sequence has


@dataclass(frozen=True, eq=False)
class Table:
    """What each tile of queries sees.

    ``tiles`` (tiles, 9), int32, by the names of ``TILE``: the batch entry; the first of
    so many query heads; the first row of q, the step to the next and how many there are
    of each head; the position of the first; its visits, from, to.

    ``visits`` (visits, 14), int32, by the names of ``VISIT``: the first row of k and v,
    the step to the next, how many; or, if ``key_list`` is not below 0, where in
    ``numbers`` the rows are listed; the position of the first key. Likewise the rows of
    the tile that see these keys, counted in the tile, the same for each of its heads.
    Then, each below 0 for none: the row of ``bands``; where in ``numbers`` there are a
    first key and an end for each ``grain`` of the rows; where in ``source`` the weights of the
    keys begin, if they are listed, or else of the rows. And log M, a float32.

    ``bands`` (bands, 4), int32: a key is seen if its position less the query's is from
    -before to after, and is not from -inner_before to inner_after; columns in this order,
    no inner band if its first is below 0.

    ``source``: which log weights of the pattern the weights are, if it has any.
    """

    tiles: Tensor
    visits: Tensor
    numbers: Tensor
    bands: Tensor
    source: Tensor | None = None

    def multiplicity(self, shape: tuple[int, int, int, int]) -> Tensor:
        """Return M (batch, heads, queries, keys), a shape, in float64, without the
        pattern's log weights. Slow: for tests and pictures.
        """
        keys = shape[3]
        seen = torch.zeros(shape, dtype=torch.float64)
        weights = self.visits[:, -1].contiguous().view(torch.float32).double().exp()
        numbers = self.numbers.tolist()
        for tile in self.tiles.tolist():
            entry, head, several, first, step, count, position, start, stop = tile
            for number in range(start, stop):
                visit = dict(zip(VISIT, self.visits[number].tolist()))
                mask = self._seen(visit, numbers, position, step)  # (rows, keys)
                key = _listed(numbers, visit, "key", "keys", visit["key_step"])
                row = _listed(numbers, visit, "row", "rows", visit["row_step"])
                at = first + row * step
                part = seen[entry, head : head + several]
                index = at.unsqueeze(1) * keys + key  # (rows, keys)
                value = (mask * weights[number]).expand(several, *mask.shape)
                part.view(several, -1).scatter_add_(
                    1, index.flatten().expand(several, -1), value.flatten(1)
                )
        return seen

    def _seen(self, visit: dict, numbers: list[int], position: int, step: int):
        """Which keys of a visit its rows see, in float64: (rows, keys)."""
        rows = _listed(numbers, visit, "row", "rows", visit["row_step"])
        place = torch.arange(visit["keys"])
        seen = torch.ones(len(rows), len(place), dtype=torch.bool)
        if visit["band"] >= 0:
            before, after, *inner = self.bands[visit["band"]].tolist()
            apart = visit["key_position"] + place * visit["key_step"]
            apart = apart - (position + rows * step).unsqueeze(1)
            seen &= (apart >= -before) & (apart <= after)
            if inner[0] >= 0:
                seen &= (apart < -inner[0]) | (apart > inner[1])
        if visit["ranges"] >= 0:
            for group, some in enumerate(seen.split(visit["grain"])):
                at = visit["ranges"] + 2 * group
                some &= (place >= numbers[at]) & (place < numbers[at + 1])
        return seen.double()


def _listed(
    numbers: list[int], visit: dict, first: str, count: str, step: int
) -> Tensor:
    """The rows of k or of the tile that a visit names."""
    at = visit[f"{first}_list"]
    if at >= 0:
        return torch.tensor(numbers[at : at + visit[count]], dtype=torch.int64)
    return visit[first] + step * torch.arange(visit[count])
