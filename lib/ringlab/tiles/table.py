"""The table of tiles: which query sees which key, as kernels walk it.

A *tile* is some rows of q, of query heads that share a K/V head. Its *visits* are the keys
that its rows see: each a run or a list of keys, and which rows of the tile see them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
NOT_GIVEN = {  # what a column is where nothing is said; others are -1
    "batch": 0,
    "heads": 1,
    "step": 1,
    "position": 0,
    "key": 0,
    "key_step": 1,
    "key_position": 0,
    "row": 0,
    "row_step": 1,
    "grain": 64,
    "log_m": 0,
}
ENDLESS = 1 << 30  # more positions than any sequence has
DIAGONAL = (ENDLESS, 0, -1, -1)  # a band: no key after the query


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


def rows_of(names: Sequence[str], number: int, **columns: int | Tensor) -> Tensor:
    """Return ``number`` rows of a table's tiles or visits, int32 (number, names), from
    columns by name: a number, or one for each row.
    """
    values = (columns.get(name, NOT_GIVEN.get(name, -1)) for name in names)
    each = [torch.as_tensor(x, dtype=torch.int32).expand(number) for x in values]
    return torch.stack(each, 1)
