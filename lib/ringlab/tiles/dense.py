"""The table of one dense call, and of few queries that see keys by their log M."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..torch_private import outside_modes, without_dispatch_modes
from .lists import Lists
from .table import DIAGONAL, TILE, VISIT, Table, rows_of


def dense(
    batch: int, rows: int, keys: int, heads: int, kv_heads: int, causal: bool
) -> Table:
    """Return the table of ``rows`` queries by ``keys`` keys.

    ``causal``: the last query sees all keys, each query before it one fewer.
    """
    with outside_modes(), without_dispatch_modes():  # no part of a call: it is kept
        spans = torch.tensor([[0, keys]])
        queries = torch.tensor([[0, rows, keys - rows]])
        lists = Lists(spans, queries, heads, kv_heads, causal, first=keys)
        table = lists.table()
        heads = table.tiles[:, TILE.index("head")]
        by_head = table.tiles[heads.argsort(stable=True)]
        return for_batch(replace(table, tiles=by_head), batch)


def for_batch(table: Table, batch: int) -> Table:
    """Return the table of ``batch`` entries that see the same."""
    tiles = table.tiles.repeat(batch, 1, 1)  # (batch, tiles, 9)
    tiles[:, :, TILE.index("batch")] = torch.arange(batch).unsqueeze(1)
    return replace(table, tiles=tiles.flatten(0, 1))


def weighed(log_m: Tensor, rows: int) -> tuple[Table, Tensor]:
    """Return the table of ``rows`` queries of each head by the keys whose ``log_m`` (b,
    h, 1 or rows, keys) is not -inf, and the weights of these.
    """
    batch, heads, lists, _ = log_m.shape
    seen = log_m > -torch.inf
    *_, keys = seen.nonzero(as_tuple=True)
    counts = seen.sum(3).flatten()  # of each head, or of each of its queries
    before = counts.cumsum(0) - counts
    number = torch.arange(len(counts))
    visits = rows_of(
        VISIT,
        len(counts),
        keys=counts,
        key_list=before,
        row=number % lists,
        rows=rows // lists,
        weights=before,
    )
    head = torch.arange(batch * heads)
    tiles = rows_of(
        TILE,
        len(head),
        batch=head // heads,
        head=head % heads,
        first=0,
        count=rows,
        visits_from=head * lists,
        visits_to=head * lists + lists,
    )
    bands = tiles.new_tensor([DIAGONAL])
    return Table(tiles, visits, keys.int(), bands), log_m[seen].float()
