"""Attention to selected keys across ranks: queries stay, and only blocks of K/V heads of
which a rank's queries see something move, each once.

Shards are contiguous. A rank asks each owner by a byte for each block of keys that lies
there, whole or in part, and K/V head. The rows come in one all-to-all, and their
gradients return likewise in fp32 or wider. ``gather_means`` gives a rank what
``adaptive_attention`` chooses by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from ..checks import short_repr
from ..engine import selected
from ..engine.autograd import gradients_once, is_followed
from ..engine.selected import Call, weighed_by
from ..engine.sinks import sinks_gradient
from ..engine.ways import LocalCall
from .comm import Steps, all_to_all, drive
from .exchange import Problem, digest
from .group import Group, length_of, refuse_transforms
from .layout import Layout, contiguous, layout_named
from .operators import Across


def attend(
    across: Across, q, k, v, sinks: Tensor | None, call: LocalCall
) -> tuple[Tensor, Tensor]:
    """Return out (b, n, h, d), lse (b, h, n) of the rows here; the call's ``Selected``
    lists keys of the whole sequence for these rows. Raises ValueError for a layout that
    is not contiguous.
    """
    group = across.group
    pattern = call.pattern
    ranks = Group.of(group)
    layout = layout_named(across.layout, length_of(q, group, across.layout), ranks.size)
    lists = pattern.indices, pattern.counts
    local = weighed_by(call, None)
    tensors = q, k, v, sinks, pattern.log_weights, *lists
    refuse_transforms(q, k, v)
    followed = is_followed(*tensors)
    return _Attention.apply(*tensors, ranks, layout, local, followed)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        sinks,
        log_weights,
        indices,
        counts,
        group,
        layout,
        local,
        followed,
    ):
        local = weighed_by(local, log_weights)
        heads = q.shape[2], k.shape[2]
        problem = Problem(str(local.pattern), layout, local.causal, *heads)
        options = {"scale": local.scale, "backend": local.backend}
        options["softcap"] = local.softcap
        options["sinks"] = sinks is not None
        options["groups"] = local.pattern.indices.shape[1]
        if local.documents is not None:
            borders = [span[1:] for span in local.documents.spans]
            options["borders"] = f"{short_repr(borders)} ({digest(borders)})"
        calls = _calls(group, layout, q, k, local)
        number = group.agree("forward", problem, q, **options, requires_grad=followed)
        differentiable = any(ctx.needs_input_grad)
        shards = zip(*(group.split(t, 1, layout) for t in (q, k, v)))
        steps = [
            _forward(layout, rank, *tensors, sinks, call, differentiable)
            for rank, tensors, call in zip(group.here, shards, calls)
        ]
        outs, lses, ks, vs, moves = zip(*drive(steps, group))
        out = group.join(outs, 1, layout)
        lse = group.join(lses, 2, layout)
        ctx.set_materialize_grads(False)
        tensors = q, k, v, sinks, log_weights, indices, counts, out, lse
        ctx.save_for_backward(*tensors, *ks, *vs)
        ctx.rest = group, problem, number, options, moves
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        tensors = ctx.saved_tensors
        # Without a cotangent too: the other ranks go through their backward.
        dout = torch.zeros_like(tensors[7]) if dout is None else dout
        grads = gradients_once(_gradients, dout, dlse, ctx.rest, *tensors)
        return *grads, *[None] * 6


def _gradients(
    dout, dlse, rest, q, k, v, sinks, log_weights, _indices, _counts, out, lse, *held
):
    """dq, dk, dv of the rows here, and the gradients of sinks and weights or None."""
    group, problem, number, options, moves = rest
    group.agree("backward", problem, q, number, **options)
    inputs = (dout, 1), (dlse, 2), (q, 1), (out, 1), (lse, 2)
    shards = zip(*(group.split(t, dim, problem.layout) for t, dim in inputs))
    ks = held[: len(moves)]
    vs = held[len(moves) :]
    steps = [
        _backward(move, *tensors, *rows)
        for move, tensors, rows in zip(moves, shards, zip(ks, vs))
    ]
    *grads, dweights = zip(*drive(steps, group))
    joined = [group.join(parts, 1, problem.layout) for parts in grads]
    dweights = None if log_weights is None else torch.cat(dweights, 2)
    dsinks = None if sinks is None else sinks_gradient(dout, dlse, out, lse, sinks)
    grads = (g.to(t.dtype) for g, t in zip(joined, (q, k, v)))
    return *grads, dsinks, dweights


def _calls(group: Group, layout: Layout, q, k, local: LocalCall) -> list[Call]:
    """The call of each rank here; ValueError or NotImplementedError where one cannot
    be.
    """
    step = local.pattern.query_block
    if layout.kind != "contiguous" or not all(layout.sizes):
        raise ValueError(
            f"Selected needs contiguous shards, none of them empty, not {layout}"
        )
    one_rank = group.process_group is not None
    rows = layout.size(group.here[0]) if one_rank else layout.n
    if q.shape[1] != rows:
        raise ValueError(f"the layout has {rows} positions here, q has {q.shape[1]}")
    spans = [(0, 0, layout.n)]
    if _packs(local, q):  # each document starts a new row
        spans = local.documents.spans
    starts = [layout.ranges(rank)[0].start for rank in range(layout.ranks)]
    for start, (_, first, stop) in product(starts, spans):
        if first < start < stop and (start - first) % step:
            raise ValueError(
                f"shards must begin where {step} queries with one list do, not at {start}"
            )
    patterns = [local.pattern]
    if not one_rank:
        numbers = [_list_rows(layout, rank, local, q) for rank in group.here]
        given = local.pattern.indices.shape[2]
        if given != sum(numbers):
            raise ValueError(f"indices must have {sum(numbers)} rows, got {given}")
        ends = [*accumulate(numbers, initial=0)]
        patterns = [local.pattern.rows(slice(None), slice(*p)) for p in pairwise(ends)]
    shards = zip(group.split(q, 1, layout), group.split(k, 1, layout), patterns)
    return [
        selected.call_of(
            local._replace(pattern=pattern), *both, shard=(starts[rank], layout.n)
        )
        for rank, (*both, pattern) in zip(group.here, shards)
    ]


def _packs(local: LocalCall, q) -> bool:
    return local.documents is not None and local.documents.packs(len(q))


def _list_rows(layout: Layout, rank: int, local: LocalCall, q) -> int:
    """How many rows of lists a rank's queries have."""
    own = layout.ranges(rank)[0]
    step = local.pattern.query_block
    if not _packs(local, q):
        return -(-len(own) // step)
    here = (
        max(0, min(stop, own.stop) - max(first, own.start))
        for _, first, stop in local.documents.spans
    )
    return sum(-(-count // step) for count in here)


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


def _parts(call: Call, own: range, n: int) -> Tensor:
    """Of blocks, the entry, first row and end of what lies in the shard ``own`` of each
    entry's ``n`` positions: (3, blocks); no rows of the others.
    """
    first, end = call.by_block[:2, :-1]
    entry = first // n
    start, stop = (t - entry * n - own.start for t in (first, end))
    return torch.stack([entry, start.clamp(min=0), stop.clamp(max=len(own))])


def _rows(part: Tensor, asked: Tensor) -> Tensor:
    """The rows (4, rows), by entry, row, K/V head and block, of ``asked`` blocks
    (blocks, h_kv) of which a shard has a ``part``.
    """
    block, head = asked.nonzero().unbind(1)
    entry, start, stop = part[:, block]
    item, within = selected.place_of_each(stop - start)
    rows = entry[item], start[item] + within, head[item], block[item]
    return torch.stack(rows)


def _ask(layout: Layout, rank: int, call: Call) -> Steps:
    """Ask every owner for the rows that the queries here see; returns what moves, and
    the number of rows that are held.
    """
    size = call.pattern.granularity
    needed = selected.blocks_seen(call).T  # (blocks, h_kv)
    owned = [layout.ranges(owner)[0] for owner in range(layout.ranks)]
    parts = [_parts(call, own, layout.n) for own in owned]
    inside = [part[1] < part[2] for part in parts]  # (blocks,) each
    ask = torch.cat([needed[each] for each in inside]).to(torch.uint8)
    counts = [int(each.sum()) for each in inside]
    mine = [counts[rank]] * layout.ranks
    came = yield from all_to_all(ask, counts, mine)
    there = []
    for each in came.split(mine):
        asked = torch.zeros_like(needed)
        asked[inside[rank]] = each.bool()
        there.append(_rows(parts[rank], asked)[:3])
    kept = needed.any(1)
    held = ((kept.cumsum(0) - 1) * size).clamp(min=0)
    here = []
    for own, part, each in zip(owned, parts, inside):
        entry, row, head, block = _rows(part, needed & each.unsqueeze(1))
        position = entry * layout.n + own.start + row
        where = held[block] + position - call.by_block[0, block]
        here.append(torch.stack([where, head]))
    return _Moves(
        replace(call, held=held),
        torch.cat(here, 1).unbind(0),
        [each.shape[1] for each in here],
        torch.cat(there, 1).unbind(0),
        [each.shape[1] for each in there],
    ), max(1, int(kept.sum())) * size


def _forward(layout, rank, q, k, v, sinks, call: Call, differentiable: bool) -> Steps:
    """out, lse, the rows of k and v that are held, (1, rows, h_kv, d), and what moved."""
    moves, rows = yield from _ask(layout, rank, call)
    send = torch.stack([t[moves.there] for t in (k, v)], 1)  # (rows sent, 2, d)
    came = yield from all_to_all(send, moves.sent, moves.received)
    held = [t.new_zeros(1, rows, *t.shape[2:]) for t in (k, v)]
    for t, values in zip(held, came.unbind(1)):
        t[0][moves.here] = values
    out, lse = selected.results(moves.call, q, *held, sinks, differentiable)
    return out, lse, *held, moves


def _backward(moves, dout, dlse, q, out, lse, k, v) -> Steps:
    """dq, dk, dv of one rank, dk and dv not yet rounded, and that of the weights."""
    call = moves.call
    dq, *grads, dweights = selected.gradients(call, dout, dlse, q, k, v, out, lse)
    send = torch.stack([t[0][moves.here] for t in grads], 1)  # (rows received, 2, d)
    home = yield from all_to_all(send, moves.received, moves.sent)
    shape = len(q), q.shape[1], call.kv_heads, q.shape[3]
    own = [torch.zeros(shape, dtype=send.dtype, device=q.device) for _ in grads]
    there = torch.stack(moves.there, 1).split(moves.sent)
    for rows, values in zip(there, home.split(moves.sent)):
        for t, value in zip(own, values.unbind(1)):
            t[rows.unbind(1)] += value
    return dq, *own, dweights


def gather_means(
    group: Group, parts: list[list[Tensor]], size: int
) -> list[tuple[Tensor, Tensor]]:
    """For every rank here, given the means of its blocks of ``size``, as many as each
    has, those of all: q's (b, h, blocks, d) and k's (b, h_kv, blocks, d). One exchange,
    whose backward sums the gradients at the owners.
    """
    heads = [t.shape[1] for t in parts[0]]
    layout = contiguous(parts[0][0].shape[2] * size * group.size, group.size)
    problem = Problem(f"means of blocks of {size}", layout, False, *heads)
    pairs = [torch.cat(pair, 1) for pair in parts]  # (b, h + h_kv, own blocks, d)
    refuse_transforms(*pairs)
    followed = is_followed(*pairs)
    every = _Gather.apply(group, problem, followed, *pairs)  # (b, h + h_kv, blocks, d)
    return [tuple(t.contiguous() for t in each.split(heads, 1)) for each in every]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, problem, followed, *means):
        number = group.agree("forward", problem, means[0], requires_grad=followed)
        ctx.rest = group, problem, number
        return tuple(
            drive([_everyone(group.size, tensors) for tensors in means], group)
        )

    @staticmethod
    def backward(ctx, *grads):
        group, problem, number = ctx.rest

        def gradients(*grads):
            group.agree("backward", problem, grads[0], number)
            steps = [_home(group.size, grad) for grad in grads]
            return tuple(drive(steps, group))

        return None, None, None, *gradients_once(gradients, *grads)


def _everyone(ranks: int, part: Tensor) -> Steps:
    """The blocks (b, h, c, d) of all ranks as (b, h, blocks, d)."""
    parts = yield from all_to_all(torch.stack([part] * ranks), [1] * ranks, [1] * ranks)
    return torch.cat(parts.unbind(), 2)


def _home(ranks: int, grad: Tensor) -> Steps:
    """The sum of all ranks' gradients for a rank's own blocks."""
    sums = yield from all_to_all(
        torch.stack(grad.chunk(ranks, 2)), [1] * ranks, [1] * ranks
    )  # (p, b, h, c, d)
    return sums.sum(0)
