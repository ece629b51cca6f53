"""The table of selected keys, planned in each call by ``native.cpp``: a sort of lists."""

from __future__ import annotations

import struct
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from .. import native
from ..selected import Selected
from .table import ENDLESS, TILE, VISIT, Table


def plan_lists(
    pattern: Selected,
    lists: Tensor,
    by_row: Tensor,
    by_block: Tensor,
    *,
    heads: int,
    kv_heads: int,
    causal: bool,
) -> Table:
    """The table of ``lists`` (groups, list rows, slots), int64, of blocks of keys, whose
    number stands in an empty slot.

    ``by_row`` (5, rows + 1), int64, of each query: the first position of its document,
    the end, the blocks before it, its list row, its position; an end of 0 for padding.
    ``by_block`` (4, blocks + 1), of each block: its first position, its end, the first
    position of its document, its first row of k. Needs the compiled kernel.
    """
    groups, list_rows, slots = lists.shape
    numbers = groups, list_rows, slots, by_row.shape[1] - 1, by_block.shape[1] - 1
    options = pattern.granularity, pattern.window, pattern.first, causal
    weighed = pattern.log_weights is not None
    tensors = [t.contiguous() for t in (lists, by_row, by_block)]
    values = *numbers, *options, max(groups, kv_heads), heads, weighed
    addresses = (t.data_ptr() for t in tensors)
    call = struct.pack("15q", *values, *addresses)
    library = native.library()[0]
    assert library is not None
    library.plan_table.restype = c_void_p
    sizes = (c_int64 * 4)()
    planned = c_void_p(library.plan_table(call, sizes))
    if not planned:
        raise MemoryError("no memory for the plan of selected keys")
    made = [
        torch.empty(sizes[0], len(TILE), dtype=torch.int32),
        torch.empty(sizes[1], len(VISIT), dtype=torch.int32),
        torch.empty(sizes[2], dtype=torch.int32),
        torch.empty(sizes[3], dtype=torch.int64),
    ]
    library.take_table(planned, *(c_void_p(t.data_ptr()) for t in made))
    after = 0 if causal else ENDLESS
    near = pattern.window - 1
    bands = [
        [ENDLESS, after, -1, -1],
        [near, min(after, near), -1, -1],
        [ENDLESS, after, near, near],
    ]
    *columns, source = made
    table = *columns, torch.tensor(bands, dtype=torch.int32)
    return Table(*table, source if weighed else None)
