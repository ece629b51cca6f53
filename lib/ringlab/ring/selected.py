"""Attention to selected keys across ranks: queries stay, and only rows of K/V heads that
a rank's queries see move, each once.

Shards are contiguous. A rank asks each owner by a byte for each block of keys and K/V
head. The rows come in one all-to-all, and their gradients return likewise in fp32 or
wider. ``bytes_sent`` tells how much that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engine import selected
from ..engine.selected import Call
from ..engine.ways import LocalCall
from ..kernels.base import accumulation_dtype
from ..selected import Selected
from .comm import Steps, all_to_all, drive
from .exchange import Problem
from .group import Group, length_of
from .layout import Layout, layout_named


def attend(
    group,
    layout: str | Layout,
    q,
    k,
    v,
    pattern: Selected,
    *,
    sinks: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n) of the rows here; ``pattern`` lists keys of the
    whole sequence for these rows. ``options``: those of a ``LocalCall``. ValueError for
    a layout that is not contiguous.
    """
    ranks = Group.of(group)
    layout = layout_named(layout, length_of(q, group, layout), ranks.size)
    step = pattern.query_block
    if layout.kind != "contiguous" or not all(layout.sizes):
        raise ValueError(
            f"Selected needs contiguous shards, none of them empty, not {layout}"
        )
    if any(layout.ranges(rank)[0].start % step for rank in range(ranks.size)):
        raise ValueError(f"shards must begin where {step} queries with one list do")
    choice = pattern.indices, pattern.counts
    local = LocalCall(pattern, **options)
    out, lse = _Attention.apply(q, k, v, *choice, ranks, layout, local)
    if sinks is None:
        return out, lse
    logits = sinks.to(lse.dtype).unsqueeze(1)  # (h, 1)
    weight = torch.sigmoid(lse - logits).masked_fill(lse == -torch.inf, 0.0)
    out = out * weight.transpose(1, 2).unsqueeze(3).to(out.dtype)
    return out, torch.logaddexp(lse, logits)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, indices, counts, group, layout, local):
        heads = q.shape[2], k.shape[2]
        problem = Problem(str(local.pattern), layout, local.causal, *heads)
        options = {"scale": local.scale, "backend": local.backend}
        options["softcap"] = local.softcap
        number = group.agree("forward", problem, q, **options)
        differentiable = any(ctx.needs_input_grad)
        shards = zip(*(group.split(t, 1, layout) for t in (q, k, v)))
        steps = []
        for rank, tensors, part in zip(
            group.here, shards, _patterns(group, layout, local.pattern)
        ):
            own = local._replace(pattern=part)
            steps.append(_forward(layout, rank, *tensors, own, differentiable))
        outs, lses, ks, vs, moves = zip(*drive(steps, group.process_group))
        out = group.join(outs, 1, layout)
        lse = group.join(lses, 2, layout)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, indices, counts, out, lse, *ks, *vs)
        ctx.rest = group, problem, number, options, moves
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, _, _, out, lse, *held = ctx.saved_tensors
        group, problem, number, options, moves = ctx.rest
        # Without a cotangent too: the other ranks go through their backward.
        group.agree("backward", problem, q, number, **options)
        dout = torch.zeros_like(out) if dout is None else dout
        inputs = (dout, 1), (dlse, 2), (q, 1), (out, 1), (lse, 2)
        shards = zip(*(group.split(t, dim, problem.layout) for t, dim in inputs))
        ks = held[: len(moves)]
        vs = held[len(moves) :]
        steps = [
            _backward(move, *tensors, *rows)
            for move, tensors, rows in zip(moves, shards, zip(ks, vs))
        ]
        grads = zip(*drive(steps, group.process_group))
        joined = [group.join(parts, 1, problem.layout) for parts in grads]
        return *(g.to(t.dtype) for g, t in zip(joined, (q, k, v))), *[None] * 5


def _patterns(group: Group, layout: Layout, pattern: Selected) -> list[Selected]:
    """The pattern of the queries of each rank here."""
    if group.process_group is not None:
        return [pattern]
    rows = [-(-size // pattern.query_block) for size in layout.sizes]
    if pattern.indices.shape[2] != sum(rows):
        raise ValueError(
            f"indices must have {sum(rows)} rows, got {pattern.indices.shape[2]}"
        )
    indices = pattern.indices.split(rows, 2)
    counts = (
        [None] * len(rows) if pattern.counts is None else pattern.counts.split(rows, 2)
    )
    return [replace(pattern, indices=i, counts=c) for i, c in zip(indices, counts)]


@dataclass(frozen=True)
class _Moves:
    """What one rank receives and sends. ``here``: of each row that comes, where it is
    held, and the K/V head; ``there``: of each that is sent, its entry, row and K/V head.
    ``received`` and ``sent``: how many, by rank.
    """

    call: Call
    here: tuple[Tensor, Tensor]
    received: list[int]
    there: tuple[Tensor, Tensor, Tensor]
    sent: list[int]


def _rows(asked: Tensor, positions: range, size: int) -> Tensor:
    """The rows (rows, 3), by entry, row and K/V head, that an owner of ``positions``
    sends of blocks (b, blocks, h_kv) that it has a part of.
    """
    before = positions.start % size
    every = asked.repeat_interleave(size, 1)[:, before : before + len(positions)]
    return every.nonzero()


def _ask(layout: Layout, rank: int, call: Call, batch: int) -> Steps:
    """Ask every owner for the rows that the queries here see; returns what moves, and
    the number of rows that are held.
    """
    size = call.pattern.granularity
    needed = selected.blocks_seen(call)  # (h_kv, blocks)
    needed = needed.unflatten(1, (batch, -1)).permute(1, 2, 0)  # (b, blocks, h_kv)
    owned = [layout.ranges(owner)[0] for owner in range(layout.ranks)]
    parts = [slice(own.start // size, -(-own.stop // size)) for own in owned]
    asks = [needed[:, part] for part in parts]
    ask = torch.cat([each.transpose(0, 1) for each in asks]).to(torch.uint8)
    counts = [part.stop - part.start for part in parts]
    mine = [counts[rank]] * layout.ranks
    came = yield from all_to_all(ask.contiguous(), counts, mine)
    came = [each.transpose(0, 1).bool() for each in came.split(mine)]
    there = [_rows(each, owned[rank], size) for each in came]
    kept = needed.any(2).flatten()  # (b * blocks,)
    held = ((kept.cumsum(0) - 1) * size).clamp(min=0)
    here = []
    for own, each in zip(owned, asks):
        entry, row, head = _rows(each, own, size).unbind(1)
        position = row + own.start
        block = entry * needed.shape[1] + position // size
        here.append(torch.stack([held[block] + position % size, head], 1))
    return _Moves(
        replace(call, held=held),
        torch.cat(here).unbind(1),
        list(map(len, here)),
        torch.cat(there).unbind(1),
        list(map(len, there)),
    ), max(1, int(kept.sum())) * size


def _forward(layout, rank, q, k, v, options: LocalCall, differentiable: bool) -> Steps:
    """out, lse, the rows of k and v that are held, (1, rows, h_kv, d), and what moved."""
    shard = layout.ranges(rank)[0].start, layout.n
    call = selected.call_of(options, q, k, shard=shard)
    moves, rows = yield from _ask(layout, rank, call, len(q))
    send = torch.stack([t[moves.there] for t in (k, v)], 1)  # (rows sent, 2, d)
    came = yield from all_to_all(send, moves.sent, moves.received)
    held = [t.new_zeros(1, rows, *t.shape[2:]) for t in (k, v)]
    for t, values in zip(held, came.unbind(1)):
        t[0][moves.here] = values
    out, lse = selected.results(moves.call, q, *held, differentiable)
    return out, lse, *held, moves


def _backward(moves, dout, dlse, q, out, lse, k, v) -> Steps:
    """dq, dk, dv of one rank; dk and dv are not yet rounded."""
    call = moves.call
    dq, *grads = selected.gradients(call, dout, dlse, q, k, v, out, lse)
    send = torch.stack([t[0][moves.here] for t in grads], 1)  # (rows received, 2, d)
    home = yield from all_to_all(send, moves.received, moves.sent)
    shape = len(q), q.shape[1], call.kv_heads, q.shape[3]
    own = [torch.zeros(shape, dtype=send.dtype, device=q.device) for _ in grads]
    there = torch.stack(moves.there, 1).split(moves.sent)
    for rows, values in zip(there, home.split(moves.sent)):
        for t, value in zip(own, values.unbind(1)):
            t[rows.unbind(1)] += value
    return dq, *own


def bytes_sent(
    pattern: Selected, layout: Layout, rank: int, seen: list[Tensor], q: Tensor
) -> tuple[int, int]:
    """The bytes that a rank sends in the forward, and in the backward after it.

    ``seen``: of every rank, which blocks (b, blocks, h_kv) its queries see; q (b, n, h,
    d): its dtype and head_dim.
    """
    size = pattern.granularity
    owned = [layout.ranges(owner)[0] for owner in range(layout.ranks)]
    blocks = [slice(own.start // size, -(-own.stop // size)) for own in owned]
    batch, _, kv_heads = seen[rank].shape
    asks = rows_out = rows_back = 0
    for other, part in enumerate(blocks):
        if other == rank:
            continue
        asks += batch * kv_heads * (part.stop - part.start)
        rows_out += len(_rows(seen[other][:, blocks[rank]], owned[rank], size))
        rows_back += len(_rows(seen[rank][:, part], owned[other], size))
    width = 2 * q.shape[3]
    wide = accumulation_dtype(q.dtype).itemsize
    return asks + rows_out * width * q.element_size(), rows_back * width * wide
