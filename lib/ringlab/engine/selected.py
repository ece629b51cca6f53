"""Attention to selected keys as dense calls, by queries or by blocks of keys.

*By queries*: a tile of queries with all keys that one of them sees. *By keys*: a block of
keys with all queries that see it, whose results are merged. The first suits queries that
share their keys, the second blocks of keys that many queries share.

Batch entries and documents lie one after the other in the rows of q and of k. A
``stream`` is the query heads that share both a choice and a K/V head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import kernels
from ..kernels.base import Kernel, accumulation_dtype, cost_of, gathers, supports_bias
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
    """A checked call: where its documents lie and what each query sees.

    ``rows`` and ``heads``, ``kv_heads``: of q and k. ``spans``: the first row and the
    end of each document. ``blocks_before``, ``lists_before``: how many blocks of keys,
    and rows of ``lists``, earlier documents have. ``lists`` (streams, list rows, slots)
    holds blocks counted through all documents; ``blocks`` in an empty slot.
    """

    pattern: Selected
    causal: bool
    rows: int
    heads: int
    kv_heads: int
    spans: Tensor  # (documents, 2)
    blocks_before: Tensor  # (documents,)
    lists_before: Tensor  # (documents,)
    blocks: int
    lists: Tensor

    @property
    def streams(self) -> int:
        return len(self.lists)

    @property
    def sharing(self) -> int:
        """Query heads of a stream."""
        return self.heads // self.streams

    @cached_property
    def by_row(self) -> Tensor:
        """(4, rows + 1): of the document of each row its first row, its end, the blocks
        before it, and the row's list. 0, 0, 0, 0 of padding and of one row more, which
        see nothing.
        """
        table = self.spans.new_zeros(4, self.rows + 1)
        lengths = self.spans[:, 1] - self.spans[:, 0]
        document = torch.repeat_interleave(lengths)  # of each row in a document
        first = self.spans[document, 0]
        within = torch.arange(len(document), device=first.device)
        within = within - (lengths.cumsum(0) - lengths)[document]
        lists = self.lists_before[document] + within // self.pattern.query_block
        values = first, self.spans[document, 1], self.blocks_before[document], lists
        table[:, first + within] = torch.stack(values)
        return table

    @cached_property
    def by_block(self) -> Tensor:
        """(3, blocks + 1): each block's first row and its end, and the first row of its
        document; of one block more, which nobody sees, the number of rows.
        """
        table = self.spans.new_full((3, self.blocks + 1), self.rows)
        size = self.pattern.granularity
        number = -(-(self.spans[:, 1] - self.spans[:, 0]) // size)
        document = torch.repeat_interleave(number)
        within = torch.arange(self.blocks, device=document.device)
        within = within - self.blocks_before[document]
        first = self.spans[document, 0] + within * size
        end = (first + size).minimum(self.spans[document, 1])
        table[:, :-1] = torch.stack([first, end, self.spans[document, 0]])
        return table

    def keys_of(self, blocks: Tensor) -> Tensor:
        """The rows (..., c * granularity) of blocks (..., c); ``rows`` beyond their end."""
        size = torch.arange(self.pattern.granularity, device=blocks.device)
        first, end, _ = self.by_block[:, blocks].unsqueeze(-1)
        keys = first + size
        return keys.masked_fill(keys >= end, self.rows).flatten(-2)

    def visible(self, queries: Tensor, blocks: Tensor, listed: Tensor) -> Tensor:
        """Which keys (..., t, c * granularity) of blocks (..., c) queries (..., t) see;
        ``listed`` (..., t, c): whether the block is in the query's list.
        """
        at, keys = queries.unsqueeze(-1), self.keys_of(blocks).unsqueeze(-2)
        first, end, *_ = self.by_row[:, queries].unsqueeze(-1)
        seen = listed.repeat_interleave(self.pattern.granularity, -1)
        if self.pattern.window:
            seen = seen | ((at - keys).abs() < self.pattern.window)
        if self.pattern.first:
            seen = seen | (keys < first + self.pattern.first)
        if self.causal:
            seen = seen & (keys <= at)
        return seen & (keys >= first) & (keys < end)


def call_of(
    pattern: Selected, q, k, causal: bool, documents: Documents | None = None
) -> Call:
    """The call for q (b, n, h, d) and k (b, n, h_kv, d); ValueError where the pattern
    does not fit them.
    """
    (b, n, heads, _), kv_heads = q.shape, k.shape[2]
    size, step = pattern.granularity, pattern.query_block
    spans = [(i, 0, n) for i in range(b)] if documents is None else documents.spans
    packed = b == 1 and spans[-1][2] == n
    lengths = [stop - start for _, start, stop in spans]
    rows_of = [-(-length // step) if packed else -(-n // step) for length in lengths]
    groups = pattern.indices.shape[1]
    shape = b, groups, sum(rows_of) if packed else rows_of[0]
    if pattern.indices.shape[:3] != shape or not groups or heads % groups:
        wanted = f"indices must be (batch, groups, rows, slots) = ({b}, groups, {shape[2]}, slots)"
        shared = f"groups dividing {heads} heads"
        got = tuple(pattern.indices.shape)
        raise ValueError(f"{wanted}, {shared}, got {got}")
    if groups % kv_heads and kv_heads % groups:
        raise ValueError(
            f"groups of heads must divide the K/V heads or be divided: {groups} and {kv_heads}"
        )
    for name, t in (("indices", pattern.indices), ("counts", pattern.counts)):
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, got {t.device}")
    made = {"dtype": torch.int64, "device": q.device}
    blocks_of = [-(-length // size) for length in lengths]
    number = torch.tensor(blocks_of, **made)
    before = number.cumsum(0) - number
    rows_of = torch.tensor(rows_of, **made)
    lists_before = rows_of.cumsum(0) - rows_of
    listed = pattern.listed().transpose(0, 1).flatten(1, 2)  # (groups, rows, slots)
    document = torch.repeat_interleave(rows_of)
    limit = number[document].unsqueeze(-1)
    if bool((listed >= limit).any()):
        most = int(pattern.listed().max())
        raise ValueError(
            f"indices must be below the {max(blocks_of)} blocks of {size} keys, got {most}"
            if documents is None
            else f"an index is beyond the last block of its document, got up to {most}"
        )
    listed = (listed + before[document].unsqueeze(-1)).masked_fill(
        listed < 0, sum(blocks_of)
    )
    listed = listed.repeat_interleave(max(1, kv_heads // groups), 0)
    starts = [entry * n + start for entry, start, _ in spans]
    ends = [entry * n + stop for entry, _, stop in spans]
    where = torch.tensor([starts, ends], **made).T
    sizes = b * n, heads, kv_heads
    return Call(
        pattern, causal, *sizes, where, before, lists_before, sum(blocks_of), listed
    )


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
    step, device = call.pattern.query_block, call.lists.device
    alike = tile == step  # all queries of a tile have one list
    if alike:
        number = -(-(call.spans[:, 1] - call.spans[:, 0]) // step)
        document = torch.repeat_interleave(number)
        within = torch.arange(len(document), device=device)
        within = (within - (number.cumsum(0) - number)[document]) * step
        first, end = (call.spans[document, 0] + within), call.spans[document, 1]
        queries = first.unsqueeze(1) + torch.arange(step, device=device)
        queries = queries.masked_fill(queries >= end.unsqueeze(1), call.rows)
    else:
        queries = torch.arange(-(-call.rows // tile) * tile, device=device)
        queries = queries.clamp(max=call.rows).view(-1, tile)
    most = call.streams * max(1 if alike else tile, 1)
    width = max(call.blocks + 1, call.lists.shape[2] * call.pattern.granularity * tile)
    count = max(1, PIECE // (most * width))
    for some in queries.split(count):
        if len(some):  # else all documents are empty
            yield from _tiles(call, some, alike)


def _tiles(call: Call, queries: Tensor, alike: bool) -> Iterator[Part]:
    """The tiles of queries (t, tile) for every stream."""
    tables = call.by_row[:, queries]  # (4, t, tile)
    rows = tables[3, :, :1] if alike else tables[3]  # (t, 1 or tile)
    listed = call.lists[:, rows]  # (streams, t, 1 or tile, slots)
    nobody = (tables[1, :, :1] if alike else tables[1]) == 0
    listed = listed.masked_fill(nobody.unsqueeze(-1), call.blocks)
    chosen = listed.new_zeros(*listed.shape[:3], call.blocks + 1, dtype=torch.bool)
    chosen.scatter_(3, listed, True)
    chosen[..., call.blocks] = False
    seen = chosen.any(2)  # (streams, t, blocks + 1)
    first, end, document = call.by_block.unsqueeze(1)  # (1, blocks + 1)
    here = queries < call.rows
    latest = queries.masked_fill(~here, -1).amax(1, keepdim=True)  # (t, 1)
    earliest = queries.amin(1, keepdim=True)
    pattern = call.pattern
    if pattern.window:
        last = latest if call.causal else latest + pattern.window - 1
        seen = seen | ((end > earliest - pattern.window + 1) & (first <= last))
    if pattern.first:
        seen = seen | (first < document + pattern.first)
    start = tables[0].masked_fill(tables[1] == 0, call.rows).amin(1, keepdim=True)
    inside = (first >= start) & (first < tables[1].amax(1, keepdim=True))
    if call.causal:
        inside = inside & (first <= latest)
    seen = (seen & inside).flatten(0, 1)  # (streams * t, blocks + 1)
    number = seen.sum(1)
    blocks = seen.new_full((len(seen), max(1, int(number.max()))), call.blocks)
    blocks = blocks.long().fill_(call.blocks)
    tile, block = seen.nonzero().unbind(1)
    place = torch.arange(len(tile), device=tile.device)
    blocks[tile, place - (number.cumsum(0) - number)[tile]] = block
    blocks = blocks.view(call.streams, len(queries), -1)  # (streams, t, c)
    listed = chosen.gather(3, blocks.unsqueeze(2).expand(-1, -1, chosen.shape[2], -1))
    visible = call.visible(queries, blocks, listed).flatten(0, 1)
    streams = torch.arange(call.streams, device=tile.device)
    yield Part(
        queries.repeat(call.streams, 1),
        streams.repeat_interleave(len(queries)),
        call.keys_of(blocks).flatten(0, 1),
        None if bool(visible.all()) else ~visible,
    )


def parts_by_keys(call: Call) -> Iterator[Part]:
    """Each block of keys with the queries that see it, for all streams at once."""
    kinds = 3 * call.blocks + 1  # three of each block, and pairs that are hidden
    kind = _kinds(call)  # (streams, rows * slots)
    slots = kind.shape[1] // call.rows
    order = kind.argsort(dim=1, stable=True)
    counts = torch.stack([each.bincount(minlength=kinds) for each in kind])
    starts = counts.cumsum(1) - counts
    streams = torch.arange(call.streams, device=kind.device)
    fewest, most = counts.amin(0).tolist(), counts[:, :-1].amax(0).tolist()
    first, end, _ = call.by_block.tolist()
    for number, longest in enumerate(most):
        if not longest:
            continue
        block, how = divmod(number, 3)
        place = torch.arange(longest, device=kind.device)
        taken = (starts[:, number, None] + place).clamp(max=order.shape[1] - 1)
        queries = order.gather(1, taken) // slots  # (streams, longest)
        queries = queries.masked_fill(place >= counts[:, number, None], call.rows)
        hidden, length = None, end[block] - first[block]
        # A block that its own queries, all of them, see up to themselves.
        square = how == SOME and call.sharing == 1 and fewest[number] == length
        if how != WHOLE and not square:
            blocks = torch.full((1,), block, device=kind.device)
            listed = torch.full((1, 1), how == SOME, device=kind.device)
            hidden = ~call.visible(queries, blocks, listed)
            hidden = hidden[..., :length]
        keys = slice(first[block], end[block])
        yield Part(queries, streams, keys, hidden, square)


def _kinds(call: Call) -> Tensor:
    """Of each pair of a query and a block that it may see, 3 * block + WHOLE, SOME or
    BESIDE; of others 3 * blocks: (streams, rows * slots).
    """
    pattern, size = call.pattern, call.pattern.granularity
    first, end, before, lists = call.by_row[:, :-1].unsqueeze(-1)  # (rows, 1)
    at = torch.arange(call.rows, device=first.device).unsqueeze(-1)
    pairs = [2 * call.lists[:, lists.squeeze(-1)]]  # (streams, rows, slots)
    if pattern.window:
        low = (at - pattern.window + 1).maximum(first)
        high = at if call.causal else (at + pattern.window - 1).minimum(end - 1)
        width = pattern.window if call.causal else 2 * pattern.window - 1
        place = torch.arange((width - 1) // size + 2, device=first.device)
        blocks = (low - first) // size + place
        late = blocks > (high - first) // size
        pairs.append((before + blocks).masked_fill(late, call.blocks) * 2 + 1)
    if pattern.first:
        blocks = torch.arange(-(-pattern.first // size), device=first.device)
        late = blocks * size >= end - first
        pairs.append((before + blocks).masked_fill(late, call.blocks) * 2 + 1)
    pairs = [each.expand(call.streams, -1, -1) for each in pairs]
    code = torch.cat(pairs, 2).masked_fill(end == 0, 2 * call.blocks)
    code = code.sort(2).values  # of equal blocks those of lists come first
    block, beside = code // 2, code % 2 == 1
    again = torch.zeros_like(beside)
    again[..., 1:] = block[..., 1:] == block[..., :-1]
    start, stop, _ = call.by_block[:, block]
    whole = ~beside
    if pattern.window:
        near = start > at - pattern.window
        whole = whole | (near if call.causal else near & (stop <= at + pattern.window))
    if pattern.first:
        whole = whole | (stop <= first + pattern.first)
    hidden = again | (block >= call.blocks)
    if call.causal:
        whole = whole & (stop <= at)  # no query sees the block that it lies in whole
        hidden = hidden | (start > at)
    kind = torch.where(whole, WHOLE, torch.where(beside, BESIDE, SOME))
    return (3 * block + kind).masked_fill(hidden, 3 * call.blocks).flatten(1)


def parts(call: Call, kernel: Kernel) -> Iterator[Part]:
    """The parts of a call in the order that is predicted to take less time."""
    pattern, cost = call.pattern, cost_of(kernel)
    slots, size, step = call.lists.shape[2], pattern.granularity, pattern.query_block
    length = call.rows / max(1, len(call.spans)) / (1 + call.causal)
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

    def kv_index(self, part: Part) -> Tensor:
        """The rows (tiles, c) of keys in k (rows * kv_heads, ...)."""
        heads = part.streams * self.call.kv_heads // self.call.streams
        keys = part.keys.clamp(max=self.call.rows - 1)
        return keys * self.call.kv_heads + heads.unsqueeze(1)

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
        return t.flatten(0, 1)[self.kv_index(part)].unsqueeze(2)

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
    rows = _rows(call, q, requires_grad(q, k, v, sinks), backend)
    flip, scale = positive_scale(scale)
    wide = accumulation_dtype(q.dtype)
    d = q.shape[3]
    with without_autocast(q):
        q_rows = _by_rows(flip(q), call.sharing)  # (rows * streams, sharing, d)
        k, v = (_by_rows(t, call.kv_heads) for t in (k, v))  # (rows, kv_heads, d)
        many = len(q_rows) + 1
        out = torch.zeros(many, call.sharing, d, dtype=wide, device=q.device)
        lse = torch.full((many, call.sharing), -torch.inf, dtype=wide, device=q.device)
        for part in parts(call, rows.kernel):
            if rows.in_place(part):
                held = rows.scattered(q_rows), *(rows.beside(t, part) for t in (k, v))
                bias = rows.bias(part, out)
                more = None if bias is None else bias.transpose(0, 2)
                into = rows.scattered(out), rows.scattered_lse(lse)
                lines = {"merge": True, "rows": rows.numbers(part)}
                rows.kernel.forward_into(
                    *into, *held, part.causal, scale, more, **lines
                )
                continue
            tiles, index = len(part.queries), rows.index(part)
            queries = rows.of_queries(q_rows, index, tiles)
            o, l = _attend(rows, part, queries, k, v, scale, wide)
            if part.hidden is not None:  # dropped: those that see nothing
                dead = part.hidden.all(2).repeat_interleave(call.sharing, 1)
                l = l.masked_fill(dead.unsqueeze(1), -torch.inf)
                o = o.masked_fill(dead[..., None, None], 0.0)
            if isinstance(part.keys, slice):
                had = out[index].view(o.shape), lse[index].view(l.shape)
                merge_(*had, o, l)
                o, l = had
            out[index], lse[index] = (
                o.view(-1, *out.shape[1:]),
                l.view(-1, call.sharing),
            )
        out = out[:-1].view(q.shape).to(q.dtype)
        lse = lse[:-1].view(q.shape[:3]).transpose(1, 2)
        return (out, lse) if sinks is None else add_sinks_(out, lse, sinks)


def _by_rows(t: Tensor, heads: int) -> Tensor:
    """t (b, n, h, d) as contiguous (rows, heads, d)."""
    return t.reshape(-1, heads, t.shape[3]).contiguous()


def _attend(rows: Rows, part: Part, queries, k, v, scale: float, wide):
    """The results of a part, (tiles, t * sharing, 1, d) and (tiles, 1, t * sharing)."""
    bias = rows.bias(part, queries.new_empty((), dtype=wide))
    kernel = rows.kernel_for(bias, queries.dtype)
    if not isinstance(part.keys, slice) and gathers(kernel):
        index = rows.kv_index(part).unsqueeze(1)
        held = [
            t.flatten(0, 1)[None, :, None].expand(len(queries), -1, -1, -1)
            for t in (k, v)
        ]
        o, l = kernel.forward(queries, *held, False, scale, bias, index)
    else:
        held = [rows.of_keys(t, part) for t in (k, v)]
        more = () if bias is None else (bias,)
        o, l = kernel.forward(queries, *held, part.causal, scale, *more)
    return o.to(wide), l.to(wide)


def backward(
    dout, dlse, q, k, v, out, lse, pattern, causal, scale, backend, documents
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for cotangents of out and, if not None, of lse."""
    flip, scale = positive_scale(scale)
    head_dim = q.shape[3]
    call = call_of(pattern, q, k, causal, documents)
    tensors = dout, flip(q), k, v, out, lse, dlse
    with without_autocast(q):
        dout, q, k, v, out, lse = fold_lse_gradient(*tensors)
        rows = _rows(call, q, True, backend)
        d, wide = q.shape[3], lse.dtype
        of_queries = [_by_rows(t.to(q.dtype), call.sharing) for t in (dout, q, out)]
        lse = lse.transpose(1, 2).reshape(-1, call.sharing)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # no probability
        k, v = (_by_rows(t, call.kv_heads) for t in (k, v))
        many = len(lse) + 1
        dq = torch.zeros(many, call.sharing, d, dtype=wide, device=q.device)
        dk, dv = (torch.zeros(t.shape, dtype=wide, device=q.device) for t in (k, v))
        ended = torch.cat([lse, lse.new_full((1, call.sharing), torch.inf)])
        for part in parts(call, rows.kernel):
            bias = rows.bias(part, lse)
            if rows.in_place(part):
                g, queries, o = map(rows.scattered, of_queries)
                held = [rows.beside(t, part) for t in (k, v)]
                mine = [torch.zeros_like(t, dtype=wide) for t in held]
                into = rows.scattered(dq), *mine
                final = o, rows.scattered_lse(lse)
                more = None if bias is None else bias.transpose(0, 2)
                rows.kernel.backward_into(
                    into,
                    g,
                    queries,
                    *held,
                    *final,
                    part.causal,
                    scale,
                    more,
                    rows=rows.numbers(part),
                )
                for whole, grad in zip((dk, dv), mine):
                    _add_keys(rows, part, whole, grad.transpose(0, 2))
                continue
            tiles, index = len(part.queries), rows.index(part)
            g, queries, o = (rows.of_queries(t, index, tiles) for t in of_queries)
            l = ended[index]
            if part.hidden is not None:
                dead = part.hidden.all(2).flatten().unsqueeze(1)
                l = l.masked_fill(dead, torch.inf)
            kernel = rows.kernel_for(bias, q.dtype)
            held = [rows.of_keys(t, part) for t in (k, v)]
            final = o, l.view(tiles, 1, -1)
            more = () if bias is None else (bias,)
            grads = kernel.backward(
                g, queries, *held, *final, part.causal, scale, *more
            )
            dq.index_add_(0, index, grads[0].to(wide).view(-1, *dq.shape[1:]))
            for whole, grad in zip((dk, dv), grads[1:]):
                _add_keys(rows, part, whole, grad.to(wide))
    dq = dq[:-1].view(q.shape)[..., :head_dim].to(q.dtype)
    grads = (t[..., :head_dim].to(k.dtype) for t in (dk, dv))
    shape = *q.shape[:2], call.kv_heads, head_dim
    return flip(dq), *(t.reshape(shape) for t in grads)


def _add_keys(rows: Rows, part: Part, to: Tensor, grad: Tensor) -> None:
    """Add the gradient (tiles, c, 1, d) of a part's keys to (rows, kv_heads, d)."""
    if isinstance(part.keys, slice):
        each = grad.squeeze(2).unflatten(0, (rows.call.kv_heads, -1)).sum(1)
        to[part.keys] += each.transpose(0, 1)
    else:
        index = rows.kv_index(part).flatten()
        to.flatten(0, 1).index_add_(0, index, grad.flatten(0, 2))


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
    call = _Attention.apply if is_followed(q, k, v, sinks) else forward
    choice = pattern.indices, pattern.counts, pattern
    return call(q, k, v, sinks, *choice, causal, scale, backend, documents)
