"""Attention to keys that are selected for each query: by their indices, one by one or in
blocks, beside a window and the first keys.

NSA, DSA, MoBA and others choose keys by content. What they choose is a ``Selected``, which
``ringlab.attention`` takes as a pattern; ``ringlab.selection`` has such choices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks import LARGEST, check_floats, check_int, check_plain


@dataclass(frozen=True, eq=False)
class Selected:
    """A query sees the blocks of ``granularity`` keys that ``indices`` lists for it, the
    last ``window`` keys up to itself, and the ``first`` keys of its sequence.

    ``indices``: (batch, groups, rows, slots) of int32 or int64. Index i names the keys
    i * granularity to (i + 1) * granularity - 1; one below 0 is an empty slot. Row r is
    of the queries r * query_block to (r + 1) * query_block - 1. Query heads share
    ``groups`` evenly: 1 is one choice for all heads, as in DSA; the number of K/V heads
    one for each, as in NSA; the number of query heads one for each, as in MoBA.
    ``counts`` (batch, groups, rows): only so many slots of a row count; None: all do.

    ``log_weights``, of the shape of ``indices`` and any float dtype, are added to the
    scores of the keys of each slot, after ``scale``; -inf is an empty slot. The largest
    that a query sees is from -1,000 to 1,000. They are differentiable, take no window, first
    keys or soft cap, and no block may be listed twice.

    A key that is listed twice, or also lies in the window, is seen once. ``causal`` hides
    keys after the query, selected or not; without it the window has as many keys after
    the query as before it. With documents, all count from a document's first key; the
    rows of packed documents follow each other, each document starts a new row. Rows of
    padding are not read. Over ranks, whose shards are contiguous and cut no row, a rank
    gives the rows of its own queries, with indices of the whole sequence.

    Raises ValueError or TypeError for arguments that do not fit; and, once the sequence
    is known, for indices beyond its keys.

    >>> from ringlab import attention
    >>> q = torch.randn(1, 64, 4, 16)
    >>> blocks = torch.zeros(1, 1, 64, 1, dtype=torch.int64)  # the first block, for all
    >>> attention(q, q, q, Selected(blocks, granularity=16, window=8), causal=True).shape
    torch.Size([1, 64, 4, 16])
    """

    indices: Tensor
    granularity: int = 1
    query_block: int = 1
    counts: Tensor | None = None
    window: int = 0
    first: int = 0
    log_weights: Tensor | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("granularity", 1),
            ("query_block", 1),
            ("window", 0),
            ("first", 0),
        ):
            value = check_int(name, getattr(self, name), least, LARGEST)
            object.__setattr__(self, name, value)
        _check_integers("indices", self.indices, 4)
        shape = tuple(self.indices.shape)
        if self.counts is not None:
            _check_integers("counts", self.counts, 3)
            if self.counts.shape != shape[:3]:
                got = tuple(self.counts.shape)
                raise ValueError(f"counts must be {shape[:3]} as indices, got {got}")
        if self.log_weights is not None:
            axes = "(batch, groups, rows, slots)"
            device = self.indices.device
            check_floats("log_weights", self.log_weights, axes, shape, device)
            if self.window or self.first:
                raise ValueError("log_weights take no window and no first keys")

    def cut_to(self, length: int) -> Selected:
        """The same for sequences of at most ``length`` keys, with no number above it."""
        names = "granularity", "query_block", "window", "first"
        numbers = {name: min(getattr(self, name), length) for name in names}
        return replace(self, **numbers)

    def rows(self, entries: slice, rows: slice) -> Selected:
        """The same for some batch entries and rows."""
        names = "indices", "counts", "log_weights"
        each = {name: getattr(self, name) for name in names}
        each = {n: t if t is None else t[entries, :, rows] for n, t in each.items()}
        return replace(self, **each)

    def listed(self) -> Tensor:
        """``indices`` as int64, with -1 in the slots that do not count."""
        indices = self.indices.long()
        indices = indices.masked_fill(indices < 0, -1)
        if self.log_weights is not None:
            indices = indices.masked_fill(self.log_weights == -torch.inf, -1)
        if self.counts is None:
            return indices
        slots = torch.arange(indices.shape[3], device=indices.device)
        return indices.masked_fill(slots >= self.counts.long().unsqueeze(-1), -1)

    def multiplicity(
        self, queries: Tensor, keys: Tensor, *, head: int, heads: int, **_: object
    ) -> Tensor:
        """M (batch, queries, keys) at such positions for a query head, whatever
        ``causal`` hides: True or False; with ``log_weights`` their exponential, or 0.
        """
        group = head * self.indices.shape[1] // heads
        row = queries // self.query_block
        rows = self.listed()[:, group, row]  # (batch, queries, slots)
        blocks = keys // self.granularity
        near = (queries[:, None] - keys).abs() < self.window  # (queries, keys)
        # By block, the one before the first for those that are none or beyond.
        most = int(blocks.max())
        rows = rows.masked_fill(rows > most, -1) + 1
        if self.log_weights is not None:
            weights = self.log_weights[:, group, row].exp()
            listed = weights.new_zeros(*rows.shape[:2], most + 2)
            listed = listed.scatter(2, rows, weights.masked_fill(rows == 0, 0.0))
            return listed[:, :, blocks + 1]
        listed = rows.new_zeros(*rows.shape[:2], most + 2, dtype=torch.bool)
        listed.scatter_(2, rows, True)
        return near | (keys < self.first) | listed[:, :, blocks + 1]

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        """The range of keys that queries may see: any."""
        return 0, n

    def fewest_keys(self, n: int, heads: int, kv_heads: int | None = None) -> int:
        """The fewest keys that one kernel call usually sees: one."""
        return 1

    def __str__(self) -> str:
        keys = "keys" if self.granularity == 1 else f"blocks of {self.granularity}"
        parts = [f"{self.indices.shape[3]} selected {keys}"]
        if self.query_block > 1:
            parts.append(f"for {self.query_block} queries each")
        if self.window:
            parts.append(f"a window of {self.window}")
        if self.first:
            parts.append(f"the first {self.first}")
        if self.log_weights is not None:
            parts.append("weighed")
        return ", ".join(parts)


def _check_integers(name: str, t, dimensions: int) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    check_plain(name, t)
    if t.dtype not in (torch.int32, torch.int64) or t.dim() != dimensions:
        wanted = f"{name} must have {dimensions} dimensions of int32 or int64"
        raise ValueError(f"{wanted}, got {tuple(t.shape)} of {t.dtype}")
