"""Attention to selected keys as dense calls, by queries or by blocks of keys.

*By queries*: a tile of queries with all keys that one of them sees. *By keys*: a block of
keys with all queries that see it, whose results are merged. The first suits queries that
share their keys, the second blocks of keys that many queries share.

Batch entries and documents lie one after the other in the rows of q and of k. A
``stream`` is the query heads that share both a choice and a K/V head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..kernels.base import Kernel, accumulation_dtype
from ..kernels.compiled import Walk
from ..selected import Selected
from ..tiles.lists import Lists
from ..torch_private import is_fake
from . import walk
from .autograd import (
    LSE_COLUMNS,
    differentiable_once,
    fold_lse_gradient,
    is_followed,
    positive_scale,
    requires_grad,
    without_autocast,
)
from .execute import merge_, piece_limit
from .sinks import add_sinks_, sinks_gradient
from .ways import LocalCall

TILE = 512  # queries that share the keys that one of them sees, where lists differ
PIECE = 1 << 25  # elements of masks and copies at a time
# What takes time beside products, as so many pairs of a query and a key in a long call of
# the compiled kernel; measured on a CPU. MASK: to make and add a mask, a pair. PLANNED:
# to sort a query and a block that it sees by blocks.
MASK = 6
PLANNED = 40
LARGEST_WEIGHT = (
    1e3  # the largest of a row: its key holds it, in half precision as well
)
# A block is seen whole; it is listed and seen in part; it is not listed, and in part in
# the window or among the first keys.
WHOLE, SOME, BESIDE = range(3)


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: what its queries see, and where.

    *Positions* count the keys of all batch entries and documents, one after the other;
    blocks are counted likewise. ``spans`` (documents, 2): the positions of each
    document, from, to. ``queries`` (documents, 3): the first row of q that is of the
    document, how many are, the position of the first. ``lists`` (streams, list rows,
    slots) holds blocks; ``blocks``, which is none, in an empty slot. ``lists_before``
    (documents,): list rows of earlier documents. ``held`` (blocks,): where rows of k
    and v begin that are of a block; None: at its position. ``weights``, of the shape of
    ``lists``, which then ascend: what is added to the scores of a block's keys;
    ``order``: which slot of the pattern each was.
    """

    options: LocalCall
    rows: int
    heads: int
    kv_heads: int
    spans: Tensor
    queries: Tensor
    lists: Tensor
    lists_before: Tensor
    held: Tensor | None = None
    weights: Tensor | None = None
    order: Tensor | None = None

    @property
    def pattern(self) -> Selected:
        return self.options.pattern

    @property
    def causal(self) -> bool:
        return self.options.causal

    @property
    def streams(self) -> int:
        return len(self.lists)

    @property
    def sharing(self) -> int:
        """Query heads of a stream."""
        return self.heads // self.streams

    @cached_property
    def block_counts(self) -> Tensor:
        lengths = self.spans[:, 1] - self.spans[:, 0]
        return -(-lengths // self.pattern.granularity)

    @cached_property
    def blocks(self) -> int:
        return int(self.block_counts.sum())

    @cached_property
    def by_row(self) -> Tensor:
        """(5, rows + 1), of each query: the first position of its document, the end,
        the blocks before it, the query's list row and its position. 0 of padding and of
        one row more, which see nothing.
        """
        table = self.spans.new_zeros(5, self.rows + 1)
        document, within = place_of_each(self.queries[:, 1])
        before = self.block_counts.cumsum(0) - self.block_counts
        first, _, at = self.queries[document].unbind(1)
        lists = self.lists_before[document] + within // self.pattern.query_block
        start, end = self.spans[document].unbind(1)
        values = start, end, before[document], lists, at + within
        table[:, first + within] = torch.stack(values)
        return table

    @cached_property
    def by_block(self) -> Tensor:
        """(4, blocks + 1), of each block: its first position, its end, the first
        position of its document, its first row of k and v. Of one block more, which
        nobody sees, positions beyond all and row 0.
        """
        beyond = int(self.spans.max()) if len(self.spans) else 0
        table = self.spans.new_full((4, self.blocks + 1), beyond)
        document, within = place_of_each(self.block_counts)
        start, end = self.spans[document].unbind(1)
        first = start + within * self.pattern.granularity
        end = end.minimum(first + self.pattern.granularity)
        held = first if self.held is None else self.held
        table[:, :-1] = torch.stack([first, end, start, held])
        table[3, -1] = 0
        return table

    def keys_of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The positions and rows (..., c * granularity) of blocks (..., c). Beyond the
        end of a block positions are beyond all, and rows those of the first block's
        first key: a value elsewhere that is not finite must not be read.
        """
        within = torch.arange(self.pattern.granularity, device=blocks.device)
        first, end, _, held = self.by_block[:, blocks].unsqueeze(-1)
        beyond = first + within >= end
        positions = (first + within).masked_fill(beyond, int(self.by_block[0, -1]))
        rows = torch.where(beyond, held[..., :1, :], held + within)
        return positions.flatten(-2), rows.flatten(-2)

    def visible(self, queries: Tensor, keys: Tensor, listed: Tensor) -> Tensor:
        """Which keys (..., c) of the positions ``keys`` the rows ``queries`` (..., t)
        see; ``listed`` (..., t, c): whether the key is in the query's list.
        """
        first, end, _, _, at = self.by_row[:, queries].unsqueeze(-1)
        keys, seen = keys.unsqueeze(-2), listed
        if self.pattern.window:
            seen = seen | ((at - keys).abs() < self.pattern.window)
        if self.pattern.first:
            seen = seen | (keys < first + self.pattern.first)
        if self.causal:
            seen = seen & (keys <= at)
        return seen & (keys >= first) & (keys < end)

    def candidates(self, queries: Tensor) -> Tensor:
        """The blocks that the rows ``queries`` (t, tile) may see, whose list is one:
        (streams, t, c), ascending, each once, as 2 * block, + 1 where it is not in the
        list; 2 * blocks where there is none.
        """
        pattern = self.pattern
        size = self.pattern.granularity
        tables = self.by_row[:, queries]  # (5, t, tile)
        first, end, before, row, low = tables[..., :1]  # (t, 1)
        high = tables[4].amax(1, keepdim=True)
        parts = [2 * self.lists[:, row.squeeze(1)]]  # (streams, t, slots)

        def beside(start: Tensor, stop: Tensor, most: int) -> Tensor:
            """The blocks of positions from ``start`` to ``stop``, at most so many."""
            place = torch.arange((most - 1) // size + 2, device=queries.device)
            number = (start - first) // size + place
            late = number > (stop - first) // size
            blocks = (before + number).masked_fill(late, self.blocks)
            return (2 * blocks + 1).expand(self.streams, -1, -1)

        if window := pattern.window:
            start = (low - window + 1).maximum(first)
            stop = high if self.causal else (high + window - 1).minimum(end - 1)
            most = window * (1 if self.causal else 2) + queries.shape[1]
            parts.append(beside(start, stop, most))
        if pattern.first:
            stop = (first + pattern.first).minimum(end) - 1
            parts.append(beside(first, stop, pattern.first))
        code = torch.cat(parts, 2).sort(2).values  # first the one that is in the list
        again = torch.zeros_like(code, dtype=torch.bool)
        again[..., 1:] = code[..., 1:] // 2 == code[..., :-1] // 2
        hidden = again | (end == 0)
        if self.causal:
            hidden = hidden | (self.by_block[0, code // 2] > high)
        return code.masked_fill(hidden, 2 * self.blocks)


def place_of_each(number: Tensor) -> tuple[Tensor, Tensor]:
    """For each of so many things of each document: its document, and how many of that
    come before it.
    """
    document = torch.repeat_interleave(number)
    within = torch.arange(len(document), device=number.device)
    return document, within - (number.cumsum(0) - number)[document]


def call_of(
    options: LocalCall,
    q,
    k,
    shard: tuple[int, int] | None = None,
) -> Call:
    """The call for q (b, n, h, d), the last positions, and k (b, m, h_kv, d).
    ``shard``: (the first position, m) where q and k are a part.

    Raises ValueError where the pattern does not fit, NotImplementedError for weights with
    a soft cap or a scale that is too small for them.
    """
    (b, n, heads, _), (m, kv_heads) = q.shape, k.shape[1:3]
    documents = options.documents
    start, m = shard or (m - n, m)
    pattern = options.pattern.cut_to(m)
    options = options._replace(pattern=pattern)
    step = pattern.query_block
    spans = [(i, 0, m) for i in range(b)] if documents is None else documents.spans
    packed = documents is not None and documents.packs(b)
    queries = []
    for entry, first, stop in spans:
        at = max(first, start)
        count = max(0, min(stop, start + n) - at)
        queries.append((entry * n + at - start, count, entry * m + at))
    list_rows = [-(-(count if packed else n) // step) for _, count, _ in queries]
    groups = pattern.indices.shape[1]
    shape = b, groups, sum(list_rows) if packed else list_rows[0]
    if pattern.indices.shape[:3] != shape or not groups or heads % groups:
        wanted = f"({b}, groups dividing {heads} heads, {shape[2]} rows, slots)"
        got = tuple(pattern.indices.shape)
        raise ValueError(f"indices must be {wanted}, got {got}")
    if groups % kv_heads and kv_heads % groups:
        wanted = f"groups must divide the {kv_heads} K/V heads, or they the groups"
        raise ValueError(f"{wanted}, got {groups}")
    for name, t in (("indices", pattern.indices), ("counts", pattern.counts)):
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, got {t.device}")
    made = {"dtype": torch.int64, "device": q.device}
    list_rows = torch.tensor(list_rows, **made)
    places = [(entry * m + first, entry * m + stop) for entry, first, stop in spans]
    call = Call(
        options,
        b * n,
        heads,
        kv_heads,
        torch.tensor(places, **made),
        torch.tensor(queries, **made),
        pattern.indices,  # until they are blocks of all documents, below
        list_rows.cumsum(0) - list_rows,
    )
    listed = pattern.listed().transpose(0, 1).flatten(1, 2)  # (groups, rows, slots)
    document, within = place_of_each(list_rows)
    used = -(-call.queries[:, 1] // step)[document]
    listed = listed.masked_fill((within >= used).unsqueeze(-1), -1)  # of padding
    number = call.block_counts
    beyond = listed >= number[document].unsqueeze(-1)
    if bool(beyond.any()):
        row = int(beyond.any(2).any(0).nonzero()[0])
        limit = f"the {int(number[document[row]])} blocks of {pattern.granularity} keys"
        most = int(listed[:, row].max())
        raise ValueError(f"indices must be below {limit}, got {most} in row {row}")
    if not listed.shape[2]:  # an empty slot is as good as none
        listed = F.pad(listed, (0, 1), value=-1)
    before = (number.cumsum(0) - number)[document].unsqueeze(-1)
    listed = (listed + before).masked_fill(listed < 0, call.blocks)
    weights = order = None
    if pattern.log_weights is not None:
        if options.softcap is not None:
            raise NotImplementedError("log_weights take no soft cap")
        listed, order = listed.sort(2)
        again = (listed[..., 1:] == listed[..., :-1]) & (listed[..., 1:] < call.blocks)
        if bool(again.any()):
            raise ValueError("with log_weights no block may be listed twice")
        weights = pattern.log_weights.detach().to(accumulation_dtype(q.dtype))
        weights = F.pad(weights, (0, listed.shape[2] - weights.shape[3]))
        weights = weights.transpose(0, 1).flatten(1, 2).gather(2, order)
        _, scale = positive_scale(options.scale)
        lowest = -min(1e30, torch.finfo(q.dtype).max * scale * _unit(scale))
        if -lowest < 40 * LARGEST_WEIGHT:  # has no share, beside the largest
            what = f"log_weights with {q.dtype} need a larger scale than {scale:g}"
            raise NotImplementedError(what)
        none = listed == call.blocks
        seen = ~none
        if options.causal:  # by the first query; others see more of the ascending list
            at = call.queries[document, 2] + within * step
            seen &= call.by_block[0, listed] <= at.unsqueeze(1)
            seen[..., 0] = ~none[..., 0]
        for some in (~none, seen):
            largest = weights.masked_fill(~some, -torch.inf).amax(2)[~none.all(2)]
            beyond = largest[largest.abs() > LARGEST_WEIGHT]
            if len(beyond):
                limits = f"from {-LARGEST_WEIGHT:g} to {LARGEST_WEIGHT:g}"
                what = f"the largest log_weight that a query sees must be {limits}"
                raise ValueError(f"{what}, got {float(beyond[0]):g}")
        weights = weights.clamp(min=lowest)
    if not listed.shape[1]:  # a list for the queries here, which are of no document
        listed = F.pad(listed, (0, 0, 0, 1), value=call.blocks)
    return replace(call, lists=listed, weights=weights, order=order)


def by_streams(call: Call) -> Call:
    """The call with lists for each stream, where K/V heads share them."""
    times = max(1, call.kv_heads // len(call.lists))
    each = (call.lists, call.weights, call.order)
    lists, weights, order = (
        None if t is None else t.repeat_interleave(times, 0) for t in each
    )
    return replace(call, lists=lists, weights=weights, order=order)


@dataclass(frozen=True, eq=False)
class Part:
    """Tiles that are one kernel call, some queries by some keys each.

    ``queries`` (tiles, t): rows of q, ``call.rows`` for none; ``streams`` (tiles,).
    ``blocks``: one of keys, for all, or (tiles, c), ``call.blocks`` for none. ``keys``:
    their rows of k and v, a slice or (tiles, c * granularity). ``hidden``: (tiles, t,
    keys), or None where all see all, but for keys after the query if ``causal``.
    ``slots``: where ``call.weights`` has those of the blocks.
    """

    queries: Tensor
    streams: Tensor
    blocks: int | Tensor
    keys: slice | Tensor
    hidden: Tensor | None
    causal: bool = False
    slots: tuple[Tensor, Tensor, Tensor] | None = None

    def lines(self, call: Call) -> Tensor:
        """Where the heads of the queries lie (tiles, t * sharing) in (rows * heads + 1,
        ...). The last one is of those that see nothing of the keys: it is 0 in what is
        read, since a value that is not finite must not meet a probability of 0.
        """
        heads = torch.arange(call.sharing, device=self.queries.device)
        first = self.queries * call.heads + self.streams.unsqueeze(1) * call.sharing
        lines = (first.unsqueeze(2) + heads).flatten(1)
        none = call.rows * call.heads
        if self.hidden is None:
            return lines.clamp(max=none)
        dead = self.hidden.all(2)  # (tiles, t or 1)
        if dead.shape[1] > 1:
            dead = dead.repeat_interleave(call.sharing, 1)
        return lines.clamp(max=none).masked_fill(dead, none)

    def kv_heads(self, call: Call) -> Tensor:
        """The K/V head (tiles, 1) of each tile."""
        return (self.streams * call.kv_heads // call.streams).unsqueeze(1)

    def of_keys(self, call: Call, t: Tensor) -> Tensor:
        """The keys' rows of t (rows, kv_heads, d): (tiles, c, 1, d)."""
        if isinstance(self.keys, slice):
            each = t[self.keys].transpose(0, 1).unsqueeze(2)  # (kv_heads, c, 1, d)
            times = call.streams // call.kv_heads
            return each if times == 1 else each.repeat_interleave(times, 0)
        return t[self.keys, self.kv_heads(call)].unsqueeze(2)

    def add_keys(self, call: Call, to: Tensor, grad: Tensor) -> None:
        """Add the gradient (tiles, keys, 1, d) to that of blocks, ``to`` (blocks + 1,
        kv_heads, granularity, d).
        """
        kv_heads, size = to.shape[1:3]
        if isinstance(self.blocks, int):
            each = grad.squeeze(2).unflatten(0, (kv_heads, -1)).sum(1)
            to[self.blocks, :, : each.shape[1]] += each
        else:
            index = self.blocks * kv_heads + self.kv_heads(call)
            to.view(-1, size * to.shape[3]).index_add_(
                0, index.flatten(), grad.reshape(index.numel(), -1)
            )

    def bias(self, call: Call, like: Tensor, exact: bool) -> Tensor | None:
        """0 and -inf (tiles, t * sharing or 1, 1, keys). Unless ``exact`` a query that
        sees nothing sees all: its result is dropped, and no kernel divides by 0.
        """
        if self.hidden is None:
            return None
        hidden = self.hidden
        if not exact:
            hidden = hidden & ~hidden.all(2, keepdim=True)
        if hidden.shape[1] > 1:
            hidden = hidden.repeat_interleave(call.sharing, 1)
        bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return bias.masked_fill_(hidden, -torch.inf).unsqueeze(2)

    def weights(self, call: Call) -> Tensor:
        """What is added to the scores of the keys: (tiles, keys)."""
        none = self.blocks == call.blocks
        each = call.weights[self.slots].masked_fill(none, 0.0)
        return each.repeat_interleave(call.pattern.granularity, 1)

    def weigh_(self, call: Call, k: Tensor, d: int, scale: float) -> None:
        """Write weights to the columns from ``d`` on of the keys (tiles, keys, 1, d +
        LSE_COLUMNS), so that products with ``_weighed`` queries, times the scale, add
        them to the scores: one column rounded, the next the remainder.
        """
        column = self.weights(call) / (scale * _unit(scale))
        high = column.to(k.dtype)
        k[:, :, 0, d] = high
        k[:, :, 0, d + 1] = (column - high.to(column.dtype)).to(k.dtype)


def _unit(scale: float) -> float:
    """What queries hold for the weights: a power of two, so without rounding, that keeps
    those of the keys of float16's size.
    """
    return 2.0 ** min(14, max(0, round(-log2(scale))))


def _weighed(q: Tensor, d: int, scale: float) -> Tensor:
    """Queries q (..., d or d + LSE_COLUMNS) for keys with weights beside d columns."""
    q = F.pad(q, (0, d + LSE_COLUMNS - q.shape[-1]))
    q[..., d : d + 2] = _unit(scale)
    return q


def parts_by_queries(call: Call, tile: int, most: int = PIECE) -> Iterator[Part]:
    """Tiles of ``tile`` queries with all keys that one of them sees, at most ``most``
    keys in a part unless one tile has more.
    """
    if not call.blocks:  # all documents are empty
        return
    alike = tile == call.pattern.query_block  # all queries of a tile have one list
    if alike:
        width = call.pattern.window + call.pattern.first + tile
        width += call.lists.shape[2] * call.pattern.granularity
    else:
        width = call.blocks * call.pattern.granularity
        tile = max(1, min(tile, int(call.queries[:, 1].max())))
    # No tile holds queries of two documents: what is not finite stays in its own.
    document, within = place_of_each(-(-call.queries[:, 1] // tile))
    first, count, _ = call.queries[document].unbind(1)
    place = within.unsqueeze(1) * tile + torch.arange(tile, device=first.device)
    queries = (first.unsqueeze(1) + place).masked_fill(
        place >= count.unsqueeze(1), call.rows
    )
    streams = torch.arange(call.streams, device=queries.device)
    pieces = max(1, min(PIECE // tile, most) // max(1, width))
    tiles = _tiles_of_lists if alike else _tiles
    for some in queries.split(max(1, pieces // call.streams)):
        for few in streams.split(pieces) if len(some) else ():
            yield from tiles(call, some, few)


def _tiles_of_lists(call: Call, queries: Tensor, streams: Tensor) -> Iterator[Part]:
    """The tiles of queries (t, tile), which have one list, for some streams: with the
    blocks that all of a tile see whole, and with the others.
    """
    code = call.candidates(queries)[streams]  # (streams, t, c)
    blocks = code // 2
    whole = (code % 2 == 0) & (blocks < call.blocks)
    first = call.by_row[4, queries[:, :1]]  # (t, 1), the position of a tile's first
    if call.causal:
        whole = whole & (call.by_block[1, blocks] <= first + 1)
    for chosen in (whole, ~whole & (blocks < call.blocks)):
        most = int(chosen.sum(2).max())
        if not most:
            continue
        kept, slots = (
            t[..., :most] for t in code.masked_fill(~chosen, 2 * call.blocks).sort(2)
        )
        blocks = kept // 2
        keys, rows = call.keys_of(blocks)
        # Only the block of the tile itself: its queries see it up to themselves.
        itself = (call.by_block[0, blocks] == first) & (kept % 2 == 0)
        shape = call.sharing, most, call.pattern.granularity
        if chosen is whole:  # but for what a tile has fewer of than others
            visible = (keys < call.by_block[0, -1]).unsqueeze(2)
        elif shape == (1, 1, queries.shape[1]) and bool(itself.all()):
            visible = None
        else:
            listed = (kept % 2 == 0).unsqueeze(2)
            listed = listed.repeat_interleave(call.pattern.granularity, 3)
            visible = call.visible(queries, keys, listed)
        if call.weights is not None:
            row = call.by_row[3, queries[:, :1]]  # (t, 1)
            slots = streams[:, None, None], row, slots
            slots = tuple(t.expand(kept.shape).flatten(0, 1) for t in slots)
        else:
            slots = None
        yield _part(queries, streams, blocks, rows, visible, slots)


def _tiles(call: Call, queries: Tensor, streams: Tensor) -> Iterator[Part]:
    """The tiles of queries (t, tile) for some streams."""
    code = call.candidates(queries.flatten().unsqueeze(1))[streams]
    code = code.unflatten(1, queries.shape)  # (streams, t, tile, c)
    seen = code.new_zeros(*code.shape[:3], call.blocks + 1, dtype=torch.bool)
    chosen = seen.scatter(3, code // 2, code % 2 == 0)
    union = seen.scatter_(3, code // 2, True)[..., :-1].any(2)
    number = union.sum(2)  # (streams, t)
    most = max(1, int(number.max()))
    order = union.to(torch.uint8).argsort(dim=2, stable=True, descending=True)
    beyond = torch.arange(most, device=code.device) >= number.unsqueeze(2)
    blocks = order[..., :most].masked_fill(beyond, call.blocks)  # (streams, t, c)
    index = blocks.unsqueeze(2).expand(-1, -1, queries.shape[1], -1)
    listed = chosen.gather(3, index)  # (streams, t, tile, c)
    listed = listed.repeat_interleave(call.pattern.granularity, 3)
    keys, rows = call.keys_of(blocks)
    yield _part(queries, streams, blocks, rows, call.visible(queries, keys, listed))


def _part(
    queries: Tensor,
    streams: Tensor,
    blocks: Tensor,
    rows: Tensor,
    visible: Tensor | None,
    slots: tuple[Tensor, ...] | None = None,
) -> Part:
    """The part of queries (t, tile) for streams: of ``blocks`` (streams, t, c), whose
    keys are at ``rows``, those keys that are ``visible`` (streams, t, tile or 1, keys);
    None: each query those up to itself.
    """
    return Part(
        queries.repeat(len(streams), 1),
        streams.repeat_interleave(len(queries)),
        blocks.flatten(0, 1),
        rows.flatten(0, 1),
        None if visible is None or bool(visible.all()) else ~visible.flatten(0, 1),
        visible is None,
        slots,
    )


def parts_by_keys(call: Call) -> Iterator[Part]:
    """Each block of keys with the queries that see it, for all streams at once: those
    that see it whole, and those that see it in part, listed or not.
    """
    kinds = 3 * call.blocks + 1  # three of each block, and pairs that are hidden
    kind = _kinds(call)  # (streams, rows * c)
    candidates = kind.shape[1] // call.rows
    order = kind.argsort(dim=1, stable=True)
    counts = torch.stack([each.bincount(minlength=kinds) for each in kind])
    starts = counts.cumsum(1) - counts
    streams = torch.arange(call.streams, device=kind.device)
    fewest = counts.amin(0).tolist()
    most = counts[:, :-1].amax(0).tolist()
    first, end, _, held = call.by_block.tolist()
    for number, longest in enumerate(most):
        if not longest:
            continue
        block, how = divmod(number, 3)
        length = end[block] - first[block]
        place = torch.arange(longest, device=kind.device)
        taken = (starts[:, number, None] + place).clamp(max=order.shape[1] - 1)
        queries = order.gather(1, taken) // candidates  # (streams, longest)
        queries = queries.masked_fill(place >= counts[:, number, None], call.rows)
        hidden = None
        # A block that its own queries, all of them, see up to themselves.
        square = how == SOME and call.sharing == 1 and fewest[number] == length
        if how != WHOLE and not square:
            keys = torch.arange(first[block], end[block], device=kind.device)
            listed = torch.full((1, 1), how == SOME, device=kind.device)
            hidden = ~call.visible(queries, keys, listed)
        keys = slice(held[block], held[block] + length)
        yield Part(queries, streams, block, keys, hidden, square)


def _kinds(call: Call) -> Tensor:
    """Of each pair of a query and a block that it may see, 3 * block + WHOLE, SOME or
    BESIDE; of others 3 * blocks: (streams, rows * c).
    """
    pattern = call.pattern
    rows = torch.arange(call.rows, device=call.lists.device).unsqueeze(1)
    code = call.candidates(rows)  # (streams, rows, c)
    first, end, _, _, at = call.by_row[:, :-1].unsqueeze(-1)  # (rows, 1)
    block = code // 2
    beside = code % 2 == 1
    start, stop, _, _ = call.by_block[:, block]
    whole = ~beside
    if pattern.window:
        near = start > at - pattern.window
        if not call.causal:
            near = near & (stop <= at + pattern.window)
        whole = whole | near
    if pattern.first:
        whole = whole | (stop <= first + pattern.first)
    if call.causal:
        whole = whole & (stop <= at)  # no query sees the block that it lies in whole
    kind = torch.where(whole, WHOLE, torch.where(beside, BESIDE, SOME))
    kind = (3 * block + kind).masked_fill(block == call.blocks, 3 * call.blocks)
    return kind.flatten(1)


def blocks_seen(call: Call) -> Tensor:
    """Which blocks of each K/V head the queries see something of: (h_kv, blocks)."""
    call = by_streams(call)
    block = _kinds(call) // 3  # (streams, rows * c)
    seen = torch.zeros(
        len(block), call.blocks + 1, dtype=torch.bool, device=block.device
    )
    seen.scatter_(1, block, True)
    return seen[:, :-1].unflatten(0, (call.kv_heads, -1)).any(1)


def parts(call: Call, kernel: Kernel, most: int) -> Iterator[Part]:
    """The parts of a call in the order that is predicted to take less time, by queries
    of at most ``most`` keys.
    """
    pattern = call.pattern
    if call.weights is not None:
        return parts_by_queries(call, pattern.query_block, most)
    cost = kernel.cost
    slots = call.lists.shape[2]
    size = pattern.granularity
    step = pattern.query_block
    length = size * call.blocks / max(1, len(call.spans)) / (1 + call.causal)
    beside = pattern.window + pattern.first
    pairs = call.rows * call.streams * call.sharing

    def by_queries(tile: int) -> float:
        """In (query, key) pairs of a long call."""
        rows = tile * call.sharing
        keys = min(length, slots * size * tile / step + beside + tile)
        one = cost.work(rows, keys) * cost.copied
        squares = tile == step == size and call.sharing == 1 and not beside
        if tile > 1 and not squares:
            masked = keys if tile > step else beside + 2 * tile
            one += MASK * rows * min(keys, masked)
        return pairs / rows * one

    seen = slots + beside / size + (beside > 0)
    shared = max(1.0, pairs * seen / (max(1, call.blocks) * call.streams))
    one = call.streams * (cost.work(shared, size) + cost.merge * shared) + cost.call
    by_keys = call.blocks * one + PLANNED * call.rows * call.streams * seen
    tile = min({step, max(step, TILE // call.sharing // step * step)}, key=by_queries)
    if by_keys < by_queries(tile):
        return parts_by_keys(call)
    return parts_by_queries(call, tile, most)


def forward(
    q, k, v, sinks, log_weights, indices, counts, options: LocalCall
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n). ``log_weights``, ``indices`` and ``counts`` are
    the pattern's: torch then notices where they are written to before the backward.
    """
    call = call_of(weighed_by(options, log_weights), q, k)
    followed = requires_grad(q, k, v, sinks, log_weights)
    return results(call, q, k, v, sinks, followed)


def results(call: Call, q, k, v, sinks, differentiable: bool) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n) for q (b, n, h, d) and the rows of k and v (any,
    any, h_kv, d), which together are those of the call. ``sinks``: (h,) or None.
    """
    if walks(call, q):
        return _walked(call, q, k, v, sinks)
    call = by_streams(call)
    kernel, masked = kernels_of(call, q, differentiable)
    flip, scale = positive_scale(call.options.scale)
    d = q.shape[3]
    made = {"dtype": accumulation_dtype(q.dtype), "device": q.device}
    with without_autocast(q):
        rows = flip(q).reshape(-1, d).contiguous()  # (rows * heads, d)
        k, v = (t.flatten(0, 1) for t in (k, v))  # (rows, h_kv, d)
        if call.weights is not None:
            rows = _weighed(rows, d, scale)
            k, v = (F.pad(t, (0, LSE_COLUMNS)) for t in (k, v))
        rows = F.pad(rows, (0, 0, 0, 1))  # (rows * heads + 1, d)
        out = torch.zeros(rows.shape, **made)
        lse = torch.full(rows.shape[:1], -torch.inf, **made)
        for part in parts(call, kernel, _copies(q)):
            index = part.lines(call)
            bias = part.bias(call, out, False)
            queries = rows[index].unsqueeze(2)
            held = [part.of_keys(call, t) for t in (k, v)]
            if call.weights is not None:
                part.weigh_(call, held[0], d, scale)
            run, more = (kernel, ()) if bias is None else (masked, (bias,))
            o, l = run.forward(queries, *held, part.causal, scale, *more)
            o, l = o.to(out.dtype), l.to(lse.dtype)
            had = out[index].unsqueeze(2), lse[index].unsqueeze(1)
            merge_(*had, o, l)
            out[index], lse[index] = had[0].squeeze(2), had[1].squeeze(1)
    out = out[:-1, :d].reshape(q.shape).to(q.dtype)
    lse = lse[:-1].view(q.shape[:3]).transpose(1, 2)
    if sinks is not None:
        out, lse = add_sinks_(out, lse, sinks)
        padding = (call.by_row[1, :-1] == 0).view(len(q), 1, -1)
        lse = lse.masked_fill(padding, -torch.inf)
    return out, lse


def backward(
    dout, dlse, q, k, v, out, lse, options: LocalCall
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv for cotangents of out and, if not None, of lse; and the gradient of
    the weights, if there are any.
    """
    call = call_of(options, q, k)
    dq, dk, dv, dweights = gradients(call, dout, dlse, q, k, v, out, lse)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dweights


def gradients(
    call: Call, dout, dlse, q, k, v, out, lse
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of ``results``, dk and dv in fp32 or wider; and the gradient of the
    pattern's ``log_weights``.
    """
    if walks(call, q):
        return _walked_gradients(call, dout, dlse, q, k, v, out, lse)
    call = by_streams(call)
    flip, scale = positive_scale(call.options.scale)
    head_dim = q.shape[3]
    shape = k.shape
    weights = call.weights
    tensors = dout, flip(q), k, v, out, lse, dlse
    with without_autocast(q):
        dout, q, k, v, out, lse = fold_lse_gradient(*tensors)
        if weights is not None:
            q = _weighed(q, head_dim, scale)
            wide = (0, q.shape[3] - v.shape[3])  # the columns of lse, if there are any
            dout, k, v, out = (F.pad(t, wide) for t in (dout, k, v, out))
        kernel, masked = kernels_of(call, q, True)
        d = q.shape[3]
        made = {"dtype": lse.dtype, "device": q.device}
        reads = [t.to(q.dtype).reshape(-1, d) for t in (dout, q, out)]
        reads = [F.pad(t, (0, 0, 0, 1)) for t in reads]  # (rows * heads + 1, d)
        lse = F.pad(lse.transpose(1, 2).flatten(), (0, 1), value=-torch.inf)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # no probability
        k, v = (t.flatten(0, 1) for t in (k, v))
        dq = torch.zeros(len(lse), d, **made)  # (rows * heads + 1, d)
        blocks = call.blocks + 1, call.kv_heads, call.pattern.granularity, d
        dk, dv = (torch.zeros(blocks, **made) for _ in range(2))
        dweights = None if weights is None else torch.zeros_like(weights)
        for part in parts(call, kernel, _copies(q)):
            index = part.lines(call)
            bias = part.bias(call, lse, True)
            held = [part.of_keys(call, t) for t in (k, v)]
            if weights is not None:
                part.weigh_(call, held[0], head_dim, scale)
            g, queries, o = (t[index].unsqueeze(2) for t in reads)
            l = lse[index].unsqueeze(1)
            run, more = (kernel, ()) if bias is None else (masked, (bias,))
            call_ = g, queries, *held, o, l, part.causal, scale
            d_queries, *grads = run.backward(*call_, *more)
            d_queries = d_queries.to(dq.dtype).flatten(0, 2)
            dq.index_add_(0, index.flatten(), d_queries)
            grads = [grad.to(dk.dtype) for grad in grads]
            for whole, grad in zip((dk, dv), grads):
                part.add_keys(call, whole, grad)
            if weights is not None:
                each = grads[0][..., head_dim].unflatten(1, (part.blocks.shape[1], -1))
                each = each.sum((2, 3)) / (scale * _unit(scale))
                none = part.blocks == call.blocks
                dweights[part.slots] += each.masked_fill(none, 0.0)
    dq = dq[:-1].view(q.shape)[..., :head_dim].to(q.dtype)
    dk, dv = (_of_rows(call, t[..., :head_dim], shape) for t in (dk, dv))
    return flip(dq), dk, dv, None if weights is None else _of_slots(call, dweights)


def walks(call: Call, q: Tensor) -> bool:
    """Whether the compiled kernel walks the call's table."""
    options = {"causal": call.causal, "backend": call.options.backend}
    kernel = kernels.choose(q.device, q.dtype, q.shape[3], **options).kernel
    return kernel.name == "compiled"


def _walk(call: Call, scale: float, sinks: Tensor | None = None) -> Walk:
    """The walk of the call's table."""
    pattern = call.pattern
    window = pattern.window - 1
    table = Lists(
        call.spans,
        call.queries,
        call.heads,
        call.kv_heads,
        call.causal,
        pattern.granularity,
        pattern.query_block,
        window,
        min(window, 0) if call.causal else window,
        pattern.first,
        len(call.lists),
        call.lists,
        call.blocks,
        call.lists_before,
        held=call.held,
        weighed=call.weights is not None,
    ).table()
    sinks = None if sinks is None else sinks.float().contiguous()
    weights = None
    if call.weights is not None:
        weights = call.weights.float().flatten()[table.source]
    return Walk(table, scale, call.options.softcap, sinks, weights)


def _walked(call: Call, q, k, v, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """``results`` by the compiled kernel."""
    flip, scale = positive_scale(call.options.scale)
    tensors = (walk.flat(t) for t in (flip(q), k, v))
    covered = int(call.queries[:, 1].sum()) == call.rows  # padding is in no tile
    out, lse = walk.forward([_walk(call, scale, sinks)], *tensors, covered)
    return out.view(q.shape), walk.unflat_lse(lse, len(q))


def _walked_gradients(call: Call, dout, dlse, q, k, v, out, lse):
    """``gradients`` by the compiled kernel."""
    flip, scale = positive_scale(call.options.scale)
    one = _walk(call, scale)
    dweights = None
    if one.weights is not None:
        shared = max(1, call.kv_heads // len(call.lists))
        dweights = torch.zeros(shared, len(one.weights))
    reads = *map(walk.flat, (dout, flip(q), k, v, out)), walk.flat_lse(lse)
    grads = walk.backward([one], walk.flat_lse(dlse), reads, dweights)
    dq, dk, dv = (grad.view(t.shape) for grad, t in zip(grads, (q, k, v)))
    if dweights is not None:
        each = torch.zeros_like(call.weights, dtype=torch.float32)
        each.view(-1).index_add_(0, one.table.source, dweights.sum(0))
        dweights = _of_slots(call, each)
    return flip(dq), dk, dv, dweights


def _of_rows(call: Call, grad: Tensor, shape) -> Tensor:
    """The gradient of keys (b, m, h_kv, d) from that of blocks (blocks + 1, h_kv,
    granularity, d).
    """
    numbers = torch.arange(call.blocks, device=grad.device)
    positions, rows = call.keys_of(numbers)
    there = positions < call.by_block[0, -1]
    each = grad[:-1].transpose(1, 2).flatten(0, 1)  # (keys, h_kv, d)
    number = shape[0] * shape[1]
    if call.held is None and len(each) == number and bool(there.all()):  # in order
        return each.view(shape)
    result = grad.new_zeros(number, *shape[2:])
    return result.index_add_(0, rows[there], each[there]).view(shape)


def _of_slots(call: Call, grad: Tensor) -> Tensor:
    """The gradient of the pattern's weights from that of ``call.weights``."""
    pattern = call.pattern
    slots = torch.zeros_like(grad).scatter_(2, call.order, grad)
    batch, groups, _, number = pattern.log_weights.shape
    slots = slots.unflatten(0, (groups, -1)).sum(1)  # (groups, batch * rows, slots)
    slots = slots[..., :number].unflatten(1, (batch, -1)).transpose(0, 1)
    return slots.to(pattern.log_weights.dtype)


def kernels_of(call: Call, q: Tensor, differentiable: bool) -> tuple[Kernel, Kernel]:
    """The kernel of a call, and the one for parts that hide keys: matrix products where
    the first cannot hide keys that are not finite.
    """
    options = {"causal": call.causal, "backward": differentiable}
    options["softcap"] = call.options.softcap
    backends = call.options.backend, "eager"
    kernel, products = (
        kernels.choose(q.device, q.dtype, q.shape[3], backend=backend, **options).kernel
        for backend in backends
    )
    return kernel, kernel if kernel.takes_bias else products


def _copies(q: Tensor) -> int:
    """How many keys of one head are copied at a time."""
    return 4 * piece_limit(q) // (2 * q.shape[3] * q.element_size())


def weighed_by(options: LocalCall, log_weights: Tensor | None) -> LocalCall:
    """The options with these weights, which autograd follows apart from them."""
    assert isinstance(options.pattern, Selected)
    pattern = replace(options.pattern, log_weights=log_weights)
    return options._replace(pattern=pattern)


def _gradients(
    dout, dlse, q, k, v, sinks, log_weights, indices, counts, out, lse, options
):
    options = weighed_by(options, log_weights)
    *grads, dweights = backward(dout, dlse, q, k, v, out, lse, options)
    dsinks = None if sinks is None else sinks_gradient(dout, dlse, out, lse, sinks)
    return *grads, dsinks, dweights


_Attention = differentiable_once(forward, _gradients, 7)


def attend(
    q,
    k,
    v,
    sinks: Tensor | None,
    call: LocalCall,
) -> tuple[Tensor, Tensor]:
    """Return out (b, n, h, d), lse (b, h, n) of a checked call of a ``Selected``;
    differentiable once, in q, k, v, sinks and the pattern's weights.
    """
    if is_fake(q):
        raise NotImplementedError("Selected needs the values of its indices")
    pattern = call.pattern
    learned = sinks, pattern.log_weights
    run = _Attention.apply if is_followed(q, k, v, *learned) else forward
    choice = pattern.indices, pattern.counts
    return run(q, k, v, *learned, *choice, weighed_by(call, None))
