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

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..kernels.base import Kernel, accumulation_dtype, cost_of, gathers, supports_bias
from ..modes import is_fake
from ..selected import Selected
from .autograd import (
    differentiable_once,
    fold_lse_gradient,
    is_followed,
    positive_scale,
    requires_grad,
    without_autocast,
)
from .documents import Documents
from .execute import merge_
from .sinks import add_sinks_, sinks_gradient

TILE = 512  # queries that share the keys that one of them sees, where lists differ
PIECE = 1 << 25  # elements of masks and copies at a time
WHOLE, SOME, BESIDE = range(3)  # a block is seen whole; in part; for the window alone


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: what its queries see, and where.

    *Positions* count the keys of all batch entries and documents, one after the other;
    blocks are counted likewise. ``spans`` (documents, 2): the positions of each
    document, from, to. ``queries`` (documents, 3): the first row of q that is of the
    document, how many are, the position of the first. ``lists`` (streams, list rows,
    slots) holds blocks; ``blocks``, which is none, in an empty slot. ``lists_before``
    (documents,): list rows of earlier documents. ``held`` (blocks,): where rows of k
    and v begin that are of a block; None: at its position.
    """

    pattern: Selected
    causal: bool
    rows: int
    heads: int
    kv_heads: int
    spans: Tensor
    queries: Tensor
    lists: Tensor
    lists_before: Tensor
    held: Tensor | None = None

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
        document, within = _counted(self.queries[:, 1])
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
        document, within = _counted(self.block_counts)
        start, end = self.spans[document].unbind(1)
        first = start + within * self.pattern.granularity
        end = end.minimum(first + self.pattern.granularity)
        held = first if self.held is None else self.held
        table[:, :-1] = torch.stack([first, end, start, held])
        table[3, -1] = 0
        return table

    def keys_of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The positions and rows (..., c * granularity) of blocks (..., c). Beyond the
        end of a block positions are beyond all, and rows are its first.
        """
        within = torch.arange(self.pattern.granularity, device=blocks.device)
        first, end, _, held = self.by_block[:, blocks].unsqueeze(-1)
        beyond = first + within >= end
        positions = (first + within).masked_fill(beyond, int(self.by_block[0, -1]))
        rows = (held + within).masked_fill(beyond, 0)
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
        pattern, size = self.pattern, self.pattern.granularity
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


def _counted(number: Tensor) -> tuple[Tensor, Tensor]:
    """For each of so many things of each document: its document, and how many of that
    come before it.
    """
    document = torch.repeat_interleave(number)
    within = torch.arange(len(document), device=number.device)
    return document, within - (number.cumsum(0) - number)[document]


def call_of(
    pattern: Selected,
    q,
    k,
    causal: bool,
    documents: Documents | None = None,
    shard: tuple[int, int] | None = None,
) -> Call:
    """The call for q (b, n, h, d), the last positions, and k (b, m, h_kv, d);
    ``documents`` where n is m. ``shard``: (the first position, m) where k is a part.

    ValueError where the pattern does not fit.
    """
    (b, n, heads, _), (m, kv_heads) = q.shape, k.shape[1:3]
    start, m = shard or (m - n, m)
    step = pattern.query_block
    spans = [(i, 0, m) for i in range(b)] if documents is None else documents.spans
    packed = b == 1 and spans[-1][2] == m
    queries = [
        (entry * n + first, n, entry * m + start)
        if documents is None
        else (entry * n + first, stop - first, entry * m + first)
        for entry, first, stop in spans
    ]
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
        pattern,
        causal,
        b * n,
        heads,
        kv_heads,
        torch.tensor(places, **made),
        torch.tensor(queries, **made),
        pattern.indices,
        list_rows.cumsum(0) - list_rows,
    )
    listed = pattern.listed().transpose(0, 1).flatten(1, 2)  # (groups, rows, slots)
    document, _ = _counted(list_rows)
    number = call.block_counts
    beyond = listed >= number[document].unsqueeze(-1)
    if bool(beyond.any()):
        what = f"blocks of {pattern.granularity} keys of the document"
        most = int(listed[beyond].max())
        raise ValueError(f"indices must be below the number of {what}, got {most}")
    if not listed.shape[2]:  # an empty slot is as good as none
        listed = F.pad(listed, (0, 1), value=-1)
    before = (number.cumsum(0) - number)[document].unsqueeze(-1)
    listed = (listed + before).masked_fill(listed < 0, call.blocks)
    lists = listed.repeat_interleave(max(1, kv_heads // groups), 0)
    return replace(call, lists=lists)


@dataclass(frozen=True, eq=False)
class Part:
    """Tiles that are one kernel call, some queries by some keys each.

    ``queries`` (tiles, t): rows of q, ``call.rows`` for none; ``streams`` (tiles,).
    ``keys``: a range of rows of k and v, for all, or (tiles, c). ``hidden``: (tiles, t,
    c), or None where all see all, but for keys after the query if ``causal``.
    """

    queries: Tensor
    streams: Tensor
    keys: slice | Tensor
    hidden: Tensor | None
    causal: bool = False


def parts_by_queries(call: Call, tile: int) -> Iterator[Part]:
    """Tiles of ``tile`` queries with all keys that one of them sees."""
    if not call.blocks:  # all documents are empty
        return
    alike = tile == call.pattern.query_block  # all queries of a tile have one list
    if alike:
        document, within = _counted(-(-call.queries[:, 1] // tile))
        first, count, _ = call.queries[document].unbind(1)
        place = within.unsqueeze(1) * tile + torch.arange(tile, device=first.device)
        queries = (first.unsqueeze(1) + place).masked_fill(
            place >= count.unsqueeze(1), call.rows
        )
        width = call.pattern.window + call.pattern.first + tile
        width += call.lists.shape[2] * call.pattern.granularity
    else:
        queries = torch.arange(-(-call.rows // tile) * tile, device=call.lists.device)
        queries = queries.clamp(max=call.rows).view(-1, tile)
        width = call.blocks * call.pattern.granularity
    streams = torch.arange(call.streams, device=queries.device)
    pieces = max(1, PIECE // max(1, width * tile))
    for some in queries.split(max(1, pieces // call.streams)):
        for few in streams.split(pieces) if len(some) else ():
            yield _tiles(call, some, few, alike)


def _tiles(call: Call, queries: Tensor, streams: Tensor, alike: bool) -> Part:
    """The tiles of queries (t, tile) for some streams."""
    if alike:
        code = call.candidates(queries)[streams]
        listed = (code % 2 == 0).unsqueeze(2)  # (streams, t, 1, c)
        blocks = code // 2
    else:
        code = call.candidates(queries.flatten().unsqueeze(1))[streams]
        code = code.unflatten(1, queries.shape)  # (streams, t, tile, c)
        seen = code.new_zeros(*code.shape[:3], call.blocks + 1, dtype=torch.bool)
        chosen = seen.scatter(3, code // 2, code % 2 == 0)
        union = seen.scatter_(3, code // 2, True)[..., :-1].any(2)
        number = union.sum(2)  # (streams, t)
        most = max(1, int(number.max()))
        blocks = torch.full_like(code[..., 0, :1], call.blocks).expand(-1, -1, most)
        order = union.to(torch.uint8).argsort(dim=2, stable=True, descending=True)
        kept = torch.arange(most, device=code.device) < number.unsqueeze(2)
        blocks = torch.where(kept, order[..., :most], blocks)  # (streams, t, c)
        index = blocks.unsqueeze(2).expand(-1, -1, queries.shape[1], -1)
        listed = chosen.gather(3, index)  # (streams, t, tile, c)
    keys, rows = call.keys_of(blocks)
    listed = listed.repeat_interleave(call.pattern.granularity, 3)
    visible = call.visible(queries, keys, listed).flatten(0, 1)
    return Part(
        queries.repeat(len(streams), 1),
        streams.repeat_interleave(len(queries)),
        rows.flatten(0, 1),
        None if bool(visible.all()) else ~visible,
    )


def parts_by_keys(call: Call) -> Iterator[Part]:
    """Each block of keys with the queries that see it, for all streams at once."""
    kinds = 3 * call.blocks + 1  # three of each block, and pairs that are hidden
    kind = _kinds(call)  # (streams, rows * c)
    candidates = kind.shape[1] // call.rows
    order = kind.argsort(dim=1, stable=True)
    counts = torch.stack([each.bincount(minlength=kinds) for each in kind])
    starts = counts.cumsum(1) - counts
    streams = torch.arange(call.streams, device=kind.device)
    fewest, most = counts.amin(0).tolist(), counts[:, :-1].amax(0).tolist()
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
        yield Part(queries, streams, keys, hidden, square)


def _kinds(call: Call) -> Tensor:
    """Of each pair of a query and a block that it may see, 3 * block + WHOLE, SOME or
    BESIDE; of others 3 * blocks: (streams, rows * c).
    """
    pattern = call.pattern
    rows = torch.arange(call.rows, device=call.lists.device).unsqueeze(1)
    code = call.candidates(rows)  # (streams, rows, c)
    first, end, _, _, at = call.by_row[:, :-1].unsqueeze(-1)  # (rows, 1)
    block, beside = code // 2, code % 2 == 1
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
    block = _kinds(call) // 3  # (streams, rows * c)
    seen = torch.zeros(
        len(block), call.blocks + 1, dtype=torch.bool, device=block.device
    )
    seen.scatter_(1, block, True)
    return seen[:, :-1].unflatten(0, (call.kv_heads, -1)).any(1)


def parts(call: Call, kernel: Kernel) -> Iterator[Part]:
    """The parts of a call in the order that is predicted to take less time."""
    pattern, cost = call.pattern, cost_of(kernel)
    slots, size, step = call.lists.shape[2], pattern.granularity, pattern.query_block
    length = size * call.blocks / max(1, len(call.spans)) / (1 + call.causal)
    beside = pattern.window + pattern.first
    pairs = call.rows * call.streams * call.sharing

    def by_queries(tile: int) -> float:
        keys = min(length, slots * size * tile / step + beside + tile)
        one = cost.work(tile * call.sharing, keys) * cost.copied
        return (
            pairs / (tile * call.sharing) * one * (1 if tile == step else cost.biases)
        )

    seen = slots + beside / size + (beside > 0)
    shared = max(1.0, pairs * seen / (max(1, call.blocks) * call.streams))
    one = call.streams * (cost.work(shared, size) + cost.merge * shared) + cost.call
    tiles = {step, max(step, TILE // call.sharing // step * step)}
    tile = min(tiles, key=by_queries)
    if call.blocks * one < by_queries(tile):
        return parts_by_keys(call)
    return parts_by_queries(call, tile)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of q, k, v and their like as one kernel call takes them."""

    call: Call
    kernel: Kernel
    eager: Kernel

    def index(self, part: Part) -> Tensor:
        """Where the heads of a part's queries lie in (rows * streams + 1, ...)."""
        where = part.queries * self.call.streams + part.streams.unsqueeze(1)
        return where.clamp(max=self.call.rows * self.call.streams).flatten()

    def of_queries(self, t: Tensor, index: Tensor, tiles: int) -> Tensor:
        """t (rows * streams, sharing, d) of a part's queries: (tiles, t * sharing, 1, d)."""
        taken = t[index.clamp(max=len(t) - 1)]
        return taken.view(tiles, -1, 1, t.shape[-1])

    def kv_heads(self, part: Part) -> Tensor:
        """The K/V head (tiles, 1) of each tile."""
        return (part.streams * self.call.kv_heads // self.call.streams).unsqueeze(1)

    def of_keys(self, t: Tensor, part: Part) -> Tensor:
        """t (rows, kv_heads, d) of a part's keys: (tiles, c, 1, d)."""
        if isinstance(part.keys, slice):
            each = t[part.keys].transpose(0, 1)  # (kv_heads, c, d)
            times = self.call.streams // self.call.kv_heads
            return (
                each.repeat_interleave(times, 0).unsqueeze(2)
                if times > 1
                else each.unsqueeze(2)
            )
        return t[part.keys, self.kv_heads(part)].unsqueeze(2)

    def bias(self, part: Part, like: Tensor) -> Tensor | None:
        """0 and -inf (tiles, t * sharing or 1, 1, c). A query that sees nothing sees
        all: its result is dropped, and no kernel divides by 0.
        """
        if part.hidden is None:
            return None
        hidden = part.hidden & ~part.hidden.all(2, keepdim=True)
        if hidden.shape[1] > 1:
            hidden = hidden.repeat_interleave(self.call.sharing, 1)
        bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return bias.masked_fill_(hidden, -torch.inf).unsqueeze(2)

    def dead(self, part: Part) -> Tensor:
        """Which queries (tiles, t * sharing) see nothing of a part."""
        return part.hidden.all(2).repeat_interleave(self.call.sharing, 1)

    def in_place(self, part: Part) -> bool:
        """Whether the kernel reads and writes a part's queries where they lie."""
        return isinstance(part.keys, slice) and hasattr(self.kernel, "backward_into")

    def numbers(self, part: Part) -> Tensor:
        """The rows (1, streams, t * sharing) of a part's queries among all heads, of the
        first head of a stream; -1 for none.
        """
        call = self.call
        heads = torch.arange(call.sharing, device=part.queries.device)
        each = part.queries.unsqueeze(2) * call.heads + heads
        gone = (part.queries == call.rows).unsqueeze(2)
        return each.masked_fill(gone, -1).flatten(1).unsqueeze(0)

    def scattered(self, t: Tensor) -> Tensor:
        """t (rows * streams, sharing, d) as (1, any, streams, d), a row for each head."""
        d = t.shape[2]
        return t.as_strided((1, 1, self.call.streams, d), (0, d, t.stride(0), 1))

    def scattered_lse(self, t: Tensor) -> Tensor:
        """t (rows * streams, sharing) as (1, streams, any), a row for each head."""
        return t.as_strided((1, self.call.streams, 1), (0, t.stride(0), 1))

    def beside(self, t: Tensor, part: Part) -> Tensor:
        """t (rows, kv_heads, d) of a part's keys: (1, c, streams, d)."""
        return self.of_keys(t, part).transpose(0, 2)

    def kernel_for(self, bias: Tensor | None, dtype: torch.dtype) -> Kernel:
        fits = bias is None or supports_bias(self.kernel, dtype)
        return self.kernel if fits else self.eager


def forward(
    q, k, v, sinks, indices, counts, pattern, causal, scale, backend, documents
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n). ``indices`` and ``counts`` are the pattern's:
    torch then notices where they are written to before the backward.
    """
    call = call_of(pattern, q, k, causal, documents)
    differentiable = requires_grad(q, k, v, sinks)
    out, lse = results(call, q, k, v, scale, backend, differentiable)
    return (out, lse) if sinks is None else add_sinks_(out, lse, sinks)


def results(
    call: Call, q, k, v, scale: float, backend, differentiable: bool
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n) for q (b, n, h, d) and the rows of k and v (any,
    any, h_kv, d), which together are those of the call.
    """
    rows = _rows(call, q, differentiable, backend)
    flip, scale = positive_scale(scale)
    wide = accumulation_dtype(q.dtype)
    with without_autocast(q):
        q_rows = _by_rows(flip(q), call.sharing)  # (rows * streams, sharing, d)
        k, v = _by_keys(k, v)  # (rows, kv_heads, d)
        made = {"dtype": wide, "device": q.device}
        out = torch.zeros(len(q_rows) + 1, *q_rows.shape[1:], **made)
        lse = torch.full((len(q_rows) + 1, call.sharing), -torch.inf, **made)
        for part in parts(call, rows.kernel):
            bias = rows.bias(part, out)
            if rows.in_place(part):
                held = rows.scattered(q_rows), *(rows.beside(t, part) for t in (k, v))
                more = None if bias is None else bias.transpose(0, 2)
                into = rows.scattered(out), rows.scattered_lse(lse)
                lines = {"merge": True, "rows": rows.numbers(part)}
                rows.kernel.forward_into(
                    *into, *held, part.causal, scale, more, **lines
                )
                continue
            tiles, index = len(part.queries), rows.index(part)
            queries = rows.of_queries(q_rows, index, tiles)
            o, l = _attend(rows, part, queries, k, v, scale, bias)
            o, l = o.to(wide), l.to(wide)
            if part.hidden is not None:  # dropped: those that see nothing
                dead = rows.dead(part)  # (tiles, t * sharing)
                l = l.masked_fill(dead.unsqueeze(1), -torch.inf)
                o = o.masked_fill(dead[..., None, None], 0.0)
            if isinstance(part.keys, slice):
                had = out[index].view(o.shape), lse[index].view(l.shape)
                merge_(*had, o, l)
                o, l = had
            out[index] = o.view(-1, *out.shape[1:])
            lse[index] = l.view(-1, call.sharing)
    out = out[:-1].view(q.shape).to(q.dtype)
    return out, lse[:-1].view(q.shape[:3]).transpose(1, 2)


def _by_rows(t: Tensor, heads: int) -> Tensor:
    """t (b, n, h, d) as contiguous (rows, heads, d)."""
    return t.reshape(-1, heads, t.shape[3]).contiguous()


def _by_keys(k: Tensor, v: Tensor) -> list[Tensor]:
    """k and v (b, m, h_kv, d) as (rows, h_kv, d), which a cache may hold head by head;
    of equal strides, in whole rows.
    """
    views = [t.reshape(-1, *t.shape[2:]) for t in (k, v)]
    row, head, item = views[0].stride()
    d = k.shape[3]
    whole = item == 1 and row % d == head % d == 0
    if whole and views[0].stride() == views[1].stride():
        return views
    return [t.contiguous() for t in views]


def _attend(rows: Rows, part: Part, queries, k, v, scale: float, bias):
    """The results of a part, (tiles, t * sharing, 1, d) and (tiles, 1, t * sharing)."""
    kernel = rows.kernel_for(bias, queries.dtype)
    more = () if bias is None else (bias,)
    if isinstance(part.keys, slice) or not gathers(kernel):
        held = [rows.of_keys(t, part) for t in (k, v)]
        return kernel.forward(queries, *held, part.causal, scale, *more)
    d, (row, head, _) = k.shape[2], k.stride()
    index = part.keys * (row // d) + rows.kv_heads(part) * (head // d)
    # One row of k and v behind the other, whatever their heads: (tiles, any, 1, d).
    shape = len(queries), 1 + ((len(k) - 1) * row + (k.shape[1] - 1) * head) // d, 1, d
    held = [t.as_strided(shape, (0, d, d, 1)) for t in (k, v)]
    return kernel.forward(queries, *held, False, scale, bias, index.unsqueeze(1))


def backward(
    dout, dlse, q, k, v, out, lse, pattern, causal, scale, backend, documents
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for cotangents of out and, if not None, of lse."""
    call = call_of(pattern, q, k, causal, documents)
    dq, dk, dv = gradients(call, dout, dlse, q, k, v, out, lse, scale, backend)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def gradients(
    call: Call, dout, dlse, q, k, v, out, lse, scale: float, backend
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of ``results``; dk and dv in fp32 or wider."""
    flip, scale = positive_scale(scale)
    head_dim, shape = q.shape[3], k.shape
    tensors = dout, flip(q), k, v, out, lse, dlse
    with without_autocast(q):
        dout, q, k, v, out, lse = fold_lse_gradient(*tensors)
        rows = _rows(call, q, True, backend)
        wide = lse.dtype
        of_queries = [_by_rows(t.to(q.dtype), call.sharing) for t in (dout, q, out)]
        lse = lse.transpose(1, 2).reshape(-1, call.sharing)
        lse = F.pad(lse, (0, 0, 0, 1), value=-torch.inf)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # no probability
        k, v = _by_keys(k, v)
        made = {"dtype": wide, "device": q.device}
        dq = torch.zeros(len(lse), *of_queries[0].shape[1:], **made)
        dk, dv = (torch.zeros(t.shape, **made) for t in (k, v))
        for part in parts(call, rows.kernel):
            bias = rows.bias(part, lse)
            if rows.in_place(part):
                g, queries, o = map(rows.scattered, of_queries)
                held = [rows.beside(t, part) for t in (k, v)]
                grads = [torch.zeros(t.shape, **made) for t in held]
                into = rows.scattered(dq), *grads
                tensors = g, queries, *held, o, rows.scattered_lse(lse)
                more = None if bias is None else bias.transpose(0, 2)
                lines = {"rows": rows.numbers(part)}
                rows.kernel.backward_into(
                    into, *tensors, part.causal, scale, more, **lines
                )
                grads = [grad.transpose(0, 2) for grad in grads]
            else:
                tiles, index = len(part.queries), rows.index(part)
                g, queries, o = (rows.of_queries(t, index, tiles) for t in of_queries)
                l = lse[index].view(tiles, 1, -1)
                if part.hidden is not None:
                    l = l.masked_fill(rows.dead(part).unsqueeze(1), torch.inf)
                kernel = rows.kernel_for(bias, q.dtype)
                held = [rows.of_keys(t, part) for t in (k, v)]
                more = () if bias is None else (bias,)
                d_queries, *grads = kernel.backward(
                    g, queries, *held, o, l, part.causal, scale, *more
                )
                dq.index_add_(0, index, d_queries.to(wide).view(-1, *dq.shape[1:]))
            for whole, grad in zip((dk, dv), grads):
                _add_keys(rows, part, whole, grad.to(wide))
    dq = dq[:-1].view(q.shape)[..., :head_dim].to(q.dtype)
    return flip(dq), *(t[..., :head_dim].reshape(shape) for t in (dk, dv))


def _add_keys(rows: Rows, part: Part, to: Tensor, grad: Tensor) -> None:
    """Add the gradient (tiles, c, 1, d) of a part's keys to (rows, kv_heads, d)."""
    if isinstance(part.keys, slice):
        each = grad.squeeze(2).unflatten(0, (rows.call.kv_heads, -1)).sum(1)
        to[part.keys] += each.transpose(0, 1)
    else:
        index = part.keys * to.shape[1] + rows.kv_heads(part)
        to.flatten(0, 1).index_add_(0, index.flatten(), grad.flatten(0, 2))


def _rows(call: Call, q: Tensor, backward: bool, backend) -> Rows:
    options = {"causal": False, "backward": backward, "backend": backend}
    kernel = kernels.choose(q.device, q.dtype, q.shape[3], **options).kernel
    return Rows(call, kernel, kernels.KERNELS["eager"])


def _gradients(dout, dlse, q, k, v, sinks, indices, counts, out, lse, *rest):
    grads = backward(dout, dlse, q, k, v, out, lse, *rest)
    if sinks is None:
        return grads
    return *grads, sinks_gradient(dout, dlse, out, lse, sinks)


_Attention = differentiable_once(forward, _gradients, 6)


def attend(
    q,
    k,
    v,
    pattern: Selected,
    *,
    causal: bool,
    scale: float,
    backend,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n) for checked arguments; differentiable once, in q,
    k, v and sinks.
    """
    if is_fake(q):
        raise NotImplementedError("Selected needs the values of its indices")
    call = _Attention.apply if is_followed(q, k, v, sinks) else forward
    choice = pattern.indices, pattern.counts, pattern
    return call(q, k, v, sinks, *choice, causal, scale, backend, documents)
