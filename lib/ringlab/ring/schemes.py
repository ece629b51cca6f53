"""The ways in which ranks share attention, each as the algorithm of one rank: a generator of requests (see ``comm``).

Forward: (q, k, v) -> (out, lse, *kept); backward: (dout, dlse or None, q, k, v, out, lse, *kept) -> (dq, dk, dv), local
shards (b, s, h, d) and (b, h, s). ``kept`` is what was received and a backward needs again. Nothing else of a hop is
saved: each block's backward is exact with the final (out, lse).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import cache as caches
from ..kernels.base import wide
from ..local import fold_lse_gradient
from .comm import AllToAll, Exchange, Post, Steps, Wait
from .meet import local_rows
from .rank import Rank, shard_of, widened

# ---------------------------------------------------------------------------------------------------------------------
# plan: the rows that are seen, each once, by one all-to-all


def plan_forward(rank: Rank, q, k, v) -> Steps:
    plan = rank.plan
    rows = k.new_empty(sum(plan.received), 2, q.shape[0], q.shape[3])
    ticket = yield Post(AllToAll(_packed(rank, k, v), plan.sent, rows, plan.received))
    out, lse = rank.local_forward(q, k, v)
    yield Wait(ticket)
    del ticket  # it holds the rows sent
    rank.received_forward(q, rows, out, lse)
    return out, lse.squeeze(-1).transpose(1, 2), rows


def plan_backward(rank: Rank, dout, dlse, q, k, v, out, lse, rows) -> Steps:
    plan, d = rank.plan, q.shape[3]
    if dlse is not None:
        dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
        rows = F.pad(rows, (0, q.shape[3] - d))
    dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
    d_rows = torch.zeros(rows.shape, dtype=wide(rows.dtype), device=rows.device)
    rank.received_backward((dout, q, out, lse), rows, dq, d_rows)
    home = d_rows.new_empty(sum(plan.sent), *d_rows.shape[1:])
    ticket = yield Post(AllToAll(d_rows, plan.received, home, plan.sent))
    local = widened(rank.local_backward(dout, q, k, v, out, lse))
    dq += local[0]
    yield Wait(ticket)
    for first, block, shard in _sent_blocks(rank):
        for total, part in zip(local[1:], shard_of(home, first, block.count, block.heads)):
            shard.view(total, block.heads)[:, 0].add_(part)
    return tuple(t[..., :d] for t in (dq, *local[1:]))


def _packed(rank: Rank, k: Tensor, v: Tensor) -> Tensor:
    """The rows to send (R, 2, b, d), by destination."""
    rows = k.new_empty(sum(rank.plan.sent), 2, k.shape[0], k.shape[3])
    for first, block, shard in _sent_blocks(rank):
        for into, t in zip(shard_of(rows, first, block.count, block.heads), (k, v)):
            into.copy_(shard.view(t, block.heads)[:, 0])
    return rows


def _sent_blocks(rank: Rank):
    first = 0
    for blocks in rank.plan.send:
        for block in blocks:
            yield first, block, local_rows(rank.problem.layout, rank.rank, block)
            first += block.rows


# ---------------------------------------------------------------------------------------------------------------------
# ring: shards hop from rank to rank, as far as someone sees them


def _hops(rank: Rank) -> list[int]:
    """How far each rank's shard travels: to the last rank, in ring order, whose queries see it."""
    problem, p = rank.problem, rank.problem.layout.ranks
    key = caches.key("hops", problem)
    return rank.cached(key, lambda: [
        max((t for t in range(1, p) if problem.needs((j + t) % p, j)), default=0) for j in range(p)])  # fmt: skip


def _shard(rank: Rank, source: int, k: Tensor, dtype=None, zero: bool = False) -> tuple[Tensor, Tensor]:
    make = torch.zeros if zero else torch.empty
    shape = (k.shape[0], rank.problem.layout.size(source), *k.shape[2:])
    return tuple(make(shape, dtype=dtype or k.dtype, device=k.device) for _ in range(2))


def _hop(rank: Rank, t: int, current, k: Tensor) -> tuple[Exchange, tuple | None]:
    """The exchange before step t: the shard at hand goes on, the one of rank - t comes; each only where it is seen."""
    p, me, hops = rank.problem.layout.ranks, rank.rank, _hops(rank)
    exchange, coming = Exchange(), None
    if t < p and hops[(me - t + 1) % p] >= t:
        exchange.send[(me + 1) % p] = current
    if t < p and hops[(me - t) % p] >= t:
        coming = exchange.receive[(me - 1) % p] = _shard(rank, (me - t) % p, k)
    return exchange, coming


def ring_forward(rank: Rank, q, k, v) -> Steps:
    p, current = rank.problem.layout.ranks, (k.contiguous(), v.contiguous())
    for t in range(p):
        exchange, coming = _hop(rank, t + 1, current, k)
        ticket = yield Post(exchange)
        if t == 0:
            out, lse = rank.local_forward(q, k, v)
            out = out.to(wide(out.dtype))
        elif current is not None:
            rank.add_forward(rank.meetings((rank.rank - t) % p), q, current, out, lse)
        yield Wait(ticket)
        del exchange, ticket  # both hold what was sent, and the next step receives
        current = coming
    return out.to(q.dtype), lse.squeeze(-1).transpose(1, 2)


def ring_backward(rank: Rank, dout, dlse, q, k, v, out, lse) -> Steps:
    """dK and dV of a shard follow it one hop behind, and go home from the last rank that saw it."""
    p, me, hops, d = rank.problem.layout.ranks, rank.rank, _hops(rank), q.shape[3]
    if dlse is not None:
        dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    dtype, reads = wide(k.dtype), (dout, q, out, lse)
    current, travelling, home, gradients = (k.contiguous(), v.contiguous()), None, None, None
    for t in range(p):
        exchange, coming = _hop(rank, t + 1, current, k)
        ticket = yield Post(exchange)
        source = (me - t) % p
        if t == 0:
            total = widened(rank.local_backward(dout, q, k, v, out, lse))
            mine = None
        elif current is not None:
            mine = _shard(rank, source, k, dtype, zero=True)
            rank.add_backward(rank.meetings(source), reads, current, total[0], mine)
        if gradients is not None:
            yield Wait(gradients)
        if t and current is not None and travelling is not None:
            for a, b in zip(mine, travelling):
                a += b
        onward = Exchange()
        if t and hops[source] >= t:
            onward.send[(me + 1) % p if hops[source] > t else source] = mine
        travelling = None
        if t and t + 1 < p and hops[(me - t - 1) % p] >= t + 1:
            travelling = onward.receive[(me - 1) % p] = _shard(rank, (me - t - 1) % p, k, dtype)
        if t and hops[me] == t:
            home = onward.receive[(me + t) % p] = _shard(rank, me, k, dtype)
        gradients = yield Post(onward)
        yield Wait(ticket)
        current = coming
    yield Wait(gradients)
    if home is not None:
        for a, b in zip(total[1:], home):
            a += b
    return tuple(t[..., :d] for t in total)


# ---------------------------------------------------------------------------------------------------------------------
# all_gather: everyone gets every shard; gradients are scattered back and summed


def _gather(rank: Rank, k: Tensor, v: Tensor) -> tuple[Exchange, dict]:
    mine = (k.contiguous(), v.contiguous())
    shards = {j: _shard(rank, j, k) for j in rank.others}
    return Exchange(dict.fromkeys(rank.others, mine), shards), shards


def all_gather_forward(rank: Rank, q, k, v) -> Steps:
    exchange, shards = _gather(rank, k, v)
    ticket = yield Post(exchange)
    out, lse = rank.local_forward(q, k, v)
    out = out.to(wide(out.dtype))
    yield Wait(ticket)
    for source, shard in shards.items():
        rank.add_forward(rank.meetings(source), q, shard, out, lse)
    return out.to(q.dtype), lse.squeeze(-1).transpose(1, 2)


def all_gather_backward(rank: Rank, dout, dlse, q, k, v, out, lse) -> Steps:
    p, me, dtype, d = rank.problem.layout.ranks, rank.rank, wide(k.dtype), q.shape[3]
    if dlse is not None:
        dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    exchange, shards = _gather(rank, k, v)
    ticket = yield Post(exchange)
    total = widened(rank.local_backward(dout, q, k, v, out, lse))
    yield Wait(ticket)
    for t in range(1, p):  # a pair of ranks at a time, so that one foreign gradient is held and one is on its way
        to, source = (me + t) % p, (me - t) % p
        part, coming = _shard(rank, to, k, dtype, zero=True), _shard(rank, me, k, dtype)
        rank.add_backward(rank.meetings(to), (dout, q, out, lse), shards.pop(to), total[0], part)
        yield Wait((yield Post(Exchange({to: part}, {source: coming}))))
        for a, b in zip(total[1:], coming):
            a += b
    return tuple(t[..., :d] for t in total)
