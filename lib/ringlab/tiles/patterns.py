"""The tables of a pattern: ``tables_of``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_patterns import BlockSparse, window_of_tokens
from ..patterns import Dense, Dilated, Pattern
from .dense import dense, for_batch
from .dilated import dilated_tables
from .lists import Lists
from .table import TILE, VISIT, Table


class Tables(NamedTuple):
    """The tables of a call, each of which continues the results of the one before;
    ``covered``: every row of q is in a tile of the first.
    """

    tables: list[Table]
    covered: bool


def tables_of(
    pattern: Pattern,
    sizes: tuple[int, int, int, int, int],
    causal: bool,
    spans: Sequence[tuple[int, int]] | None = None,
    once: bool = False,
) -> Tables:
    """Return the tables of q (b, n, h, d) and k (b, m, h_kv, d), of which ``sizes`` are
    b, n, h, m and h_kv. If m is not n, the pattern is dense and, with ``causal``, the
    queries are the last positions.

    ``spans``: the rows from, to of each document, with a batch of 1. ``once``: a single
    table, since results of half precision cannot be continued.
    """
    batch, n, heads, keys, kv_heads = sizes
    shape = heads, kv_heads, causal
    if isinstance(pattern, Dense) and spans is None:
        return Tables([dense(batch, n, keys, *shape)], True)
    spans = [(0, n)] if spans is None else spans
    tables = []
    if not isinstance(pattern, Dense | BlockSparse):
        tables = _dilated(pattern, spans, *shape, once)
    elif spans:
        tables = [_lists(pattern, spans, *shape).table()]
    tables = [for_batch(table, batch) for table in tables]
    first = tables[0].tiles if tables else torch.empty(0, len(TILE))
    each = first[:, TILE.index("heads")] * first[:, TILE.index("count")]
    return Tables(tables, int(each.sum()) == batch * n * heads)


def _lists(pattern: Dense | BlockSparse, spans, heads, kv_heads, causal: bool) -> Lists:
    """The lists of documents."""
    places = torch.tensor(spans, dtype=torch.int64)  # (documents, 2)
    lengths = places.diff().flatten()
    rows = torch.stack([places[:, 0], lengths, places[:, 0]], 1)
    call = places, rows, heads, kv_heads, causal
    if isinstance(pattern, Dense):
        return Lists(*call, first=int(lengths.max()))
    window = window_of_tokens(pattern, causal)
    if window is not None:
        return Lists(*call, before=window[0], after=window[1])
    size = pattern.block_size
    numbers = [pattern.count(length) for length in lengths.tolist()]
    seen = {number: pattern.seen(number * size) for number in set(numbers)}
    blocks = torch.tensor([0, *numbers]).cumsum(0)
    counts = []
    lists = []
    for number, first in zip(numbers, blocks.tolist()):
        of_queries, of_keys = seen[number]  # (pairs,) of each
        counts.append(torch.bincount(of_queries, minlength=number))
        lists.append(of_keys + first)
    return Lists(
        *call,
        granularity=size,
        query_block=size,
        lists=torch.cat(lists),
        blocks=int(blocks[-1]),
        lists_before=blocks[:-1],
        starts=F.pad(torch.cat(counts).cumsum(0), (1, 0)),
    )


def _dilated(
    pattern: Dilated, spans, heads: int, kv_heads: int, causal: bool, once: bool
) -> list[Table]:
    """The tables of documents: those of one length are shifted copies."""
    by_length: dict[int, list[int]] = {}
    for start, stop in spans:
        if start < stop:
            by_length.setdefault(stop - start, []).append(start)
    rounds: list[list[tuple[Table, Tensor]]] = []
    for length, starts in by_length.items():
        branches = pattern.branches(length, heads, kv_heads)
        tables = dilated_tables(branches, length, heads, causal, once)
        for i, table in enumerate(tables):
            rounds += [[]] if i == len(rounds) else []
            rounds[i].append((table, torch.tensor(starts, dtype=torch.int32)))
    return [_joined(copies) for copies in rounds]


def _joined(copies: list[tuple[Table, Tensor]]) -> Table:
    """One table of tables without lists, each copied to rows of q and k that begin at
    its starts.
    """
    tiles = []
    visits = []
    before = 0
    borders = TILE.index("visits_from")
    for table, starts in copies:
        number = len(starts)
        start = starts.view(-1, 1)
        own = table.tiles.repeat(number, 1, 1)  # (number, tiles, 9)
        seen = table.visits.repeat(number, 1, 1)
        own[:, :, TILE.index("first")] += start
        seen[:, :, VISIT.index("key")] += start
        earlier = before + len(table.visits) * torch.arange(number)
        own[:, :, borders:] += earlier.int().view(-1, 1, 1)
        before += number * len(table.visits)
        tiles.append(own.flatten(0, 1))
        visits.append(seen.flatten(0, 1))
    return replace(table, tiles=torch.cat(tiles), visits=torch.cat(visits))
