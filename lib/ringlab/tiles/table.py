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


def shown(table: Table, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return what a table shows, by plain torch, each of ``shape`` (batch, heads, rows,
    keys): M, float64, without the weights of a pattern; and the number of the visit
    that shows a pair, the last of several, -1 for none.

    Of two tiles of four rows the first has one visit, up to the diagonal. The second has
    two: every other key of those before it, and its own up to the diagonal.

    >>> t = torch.tensor
    >>> tiles = rows_of(
    ...     TILE, 2, head=0, first=t([0, 4]), count=4, position=t([0, 4]),
    ...     visits_from=t([0, 1]), visits_to=t([1, 3])
    ... )
    >>> visits = rows_of(
    ...     VISIT, 3, key=t([0, 0, 4]), key_step=t([1, 2, 1]), keys=t([4, 2, 4]),
    ...     key_position=t([0, 0, 4]), rows=4, band=t([0, -1, 0])
    ... )
    >>> table = Table(tiles, visits, visits[0, :0], t([DIAGONAL]))
    >>> m, visit = shown(table, (1, 1, 8, 8))
    >>> print(drawn(visit[0, 0]))
    a.......
    aa......
    aaa.....
    aaaa....
    b.b.c...
    b.b.cc..
    b.b.ccc.
    b.b.cccc
    """
    m = torch.zeros(shape, dtype=torch.float64)
    visit_of = torch.full(m.shape, -1)
    times = table.visits[:, -1].view(torch.float32).exp()
    for tile in table.tiles.tolist():
        batch, head, heads, first, step, _, position, start, stop = tile
        for visit in range(start, stop):
            (
                key,
                key_step,
                keys,
                key_list,
                key_position,
                row,
                row_step,
                rows,
                row_list,
                band,
                ranges,
                grain,
                *_,
            ) = table.visits[visit].tolist()
            row = step * _listed(table, row, row_step, rows, row_list)  # (rows,)
            j = torch.arange(keys)
            query = (position + row).unsqueeze(1)  # (rows, 1)
            apart = key_position + key_step * j - query  # (rows, keys)
            seen = apart < ENDLESS  # all of them
            if band >= 0:
                before, after, inner_before, inner_after = table.bands[band].tolist()
                seen &= apart >= -before
                seen &= apart <= after
                if inner_before >= 0:
                    seen &= (apart < -inner_before) | (apart > inner_after)
            if ranges >= 0:
                group = torch.arange(rows).unsqueeze(1) // grain  # (rows, 1)
                at = ranges + 2 * group
                seen &= j >= table.numbers[at]
                seen &= j < table.numbers[at + 1]
            i, j = seen.nonzero(as_tuple=True)  # (pairs,) of each
            key = _listed(table, key, key_step, keys, key_list)
            of_tile = slice(head, head + heads)
            pairs = batch, of_tile, first + row[i], key[j]
            m[pairs] += times[visit]
            visit_of[pairs] = visit
    return m, visit_of


def _listed(table: Table, first: int, step: int, number: int, at: int) -> Tensor:
    """So many rows: a run, or if ``at`` is not below 0 what is listed there."""
    if at >= 0:
        return table.numbers[at : at + number]
    return first + step * torch.arange(number)


def drawn(visits: Tensor) -> str:
    """Draw the visits (rows, keys) of one head as text: letters, "." for none."""
    letters = (97 + visits % 26).where(visits >= 0, 46)  # as numbers
    return "\n".join(bytes(row).decode() for row in letters.tolist())
