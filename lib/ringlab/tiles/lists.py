"""The table of dense calls, windows, blocks and selected keys, of any documents: planned by
``native.cpp``, since lists may change from call to call.
"""

from __future__ import annotations

import struct
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import native
from .table import ENDLESS, TILE, VISIT, Table


@dataclass(frozen=True, eq=False)
class Lists:
    """What queries see: blocks of ``granularity`` keys, listed for each ``query_block``
    queries; a window from ``before`` keys before a query to ``after`` keys after it,
    none if ``before`` is below 0; and the ``first`` keys of its document.

    *Positions* count the keys of all batch entries and documents, one after the other,
    and so do blocks. ``spans`` (documents, 2): the positions of each document, from, to.
    ``queries`` (documents, 3): the first row of q that is of the document, how many are,
    the position of the first. ``lists`` (groups, list rows, slots) holds blocks;
    ``blocks``, which is none, in an empty slot; None: no lists. ``lists_before``
    (documents,): list rows of earlier documents. ``starts`` (groups * list rows + 1,):
    where lists of any length begin in ``lists``, which then is flat. ``held`` (blocks,):
    where rows of k and v begin that are of a block; None: at its position. All int64.

    ``weighed``: each place of the lists has a weight.
    """

    spans: Tensor
    queries: Tensor
    heads: int
    kv_heads: int
    causal: bool = False
    granularity: int = 1
    query_block: int = 1
    before: int = -1
    after: int = -1
    first: int = 0
    groups: int = 1
    lists: Tensor | None = None
    blocks: int = 0
    lists_before: Tensor | None = None
    starts: Tensor | None = None
    held: Tensor | None = None
    weighed: bool = False

    def table(self) -> Table:
        """The table, of batch entry 0 alone. Raises NotImplementedError without the compiled
        kernel.
        """
        shape = self.groups, 0, 0
        if self.lists is not None and self.starts is None:
            shape = tuple(self.lists.shape)
        elif self.starts is not None:
            shape = self.groups, (len(self.starts) - 1) // self.groups, 0
        documents = len(self.spans)
        lists_before = self.lists_before
        if lists_before is None:
            lists_before = torch.zeros(documents, dtype=torch.int64)
        tensors = self.lists, self.starts, self.spans, self.queries, lists_before
        kept = [None if t is None else t.contiguous() for t in (*tensors, self.held)]
        numbers = documents, self.blocks, self.granularity, self.query_block
        numbers += self.before, self.after, self.first, self.causal
        numbers += max(self.groups, self.kv_heads), self.heads, self.weighed
        addresses = [0 if t is None else t.data_ptr() for t in kept]
        call = struct.pack("20q", *shape, *numbers, *addresses)
        library, why = native.library()
        if library is None:
            raise NotImplementedError(f"a table needs the compiled kernel: {why}")
        library.plan_table.restype = c_void_p
        sizes = (c_int64 * 4)()
        planned = c_void_p(library.plan_table(call, sizes))
        if not planned:
            raise MemoryError("no memory for the plan of a call")
        *columns, source = (
            torch.empty(sizes[0], len(TILE), dtype=torch.int32),
            torch.empty(sizes[1], len(VISIT), dtype=torch.int32),
            torch.empty(sizes[2], dtype=torch.int32),
            torch.empty(sizes[3], dtype=torch.int64),
        )
        written = (c_void_p(t.data_ptr()) for t in (*columns, source))
        library.take_table(planned, *written)
        after = 0 if self.causal else ENDLESS
        bands = [
            [ENDLESS, after, -1, -1],
            [self.before, min(after, self.after), -1, -1],
            [ENDLESS, after, self.before, self.after],
        ]
        bands = torch.tensor(bands, dtype=torch.int32)
        return Table(*columns, bands, source if self.weighed else None)
