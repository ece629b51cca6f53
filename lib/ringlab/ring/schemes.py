"""The schemes by which ranks share attention. Each is the algorithm of one rank: a
generator of requests (``comm``).

A forward takes the shards q, k, v (b, s, h, d) and returns out, lse (b, h, s), and what
else its backward needs. A backward takes dout, dlse or None, q, k, v, out, lse and the
rest, and returns dq, dk, dv. No scheme saves the rows of a hop: the backward of each
call is exact with the final out and lse.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import patterns
from ..block_patterns import BlockSparse
from ..engine import blocks, dilated, execute
from ..engine.autograd import fold_lse_gradient
from ..kernels.base import accumulation_dtype
from ..patterns import Branch, Pattern
from .comm import AllToAll, Exchange, Steps, Wait, all_to_all
from .exchange import Problem, RankPlan
from .rank import Rank

# --------------------------------------------------------------------------------------
# plan: the rows that are seen, each once, by one all-to-all. A second one passes on, inside each host, what one rank
# received for others.


def plan_forward(rank: Rank, q, k, v) -> Steps:
    plan = rank.plan
    rows = k.new_empty(
        plan.rows, 2, q.shape[0], q.shape[3], dtype=plan.problem.exchange_dtype
    )
    direct, passed = rows.tensor_split([sum(plan.received)])
    ticket = yield AllToAll(_packed(plan, k, v), plan.sent, direct, plan.received)
    out, lse = rank.local_forward(q, k, v)
    yield Wait(ticket)
    del ticket  # it holds the rows sent
    if plan.problem.hosts:
        coming, going = plan.passing
        yield Wait(
            (
                yield AllToAll(
                    direct.index_select(0, rank.goes_on(rows.device)),
                    going,
                    passed,
                    coming,
                )
            )
        )
    rows = rows.to(k.dtype)
    del direct, passed
    if len(rows):
        rank.add_forward(None, q, rank.keys(rows), out, lse)
    return out, lse, rows


def _packed(plan: RankPlan, k: Tensor, v: Tensor) -> Tensor:
    """The rows to send (R, 2, b, d), by destination, in the dtype of the exchange."""
    rows = k.new_empty(
        sum(plan.sent), 2, k.shape[0], k.shape[3], dtype=plan.problem.exchange_dtype
    )
    for part, own in plan.pairs(rows, k, v):
        part.copy_(own)
    return rows


def plan_backward(rank: Rank, dout, dlse, q, k, v, out, lse, rows) -> Steps:
    plan, d = rank.plan, q.shape[3]
    dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    if dlse is not None:
        rows = F.pad(rows, (0, q.shape[3] - d))
    dq = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    d_rows = torch.zeros(
        rows.shape, dtype=accumulation_dtype(rows.dtype), device=rows.device
    )
    if len(rows):
        rank.add_backward(
            None, (dout, q, out, lse), rank.keys(rows), dq, rank.keys(d_rows)
        )
    direct, passed = d_rows.tensor_split([sum(plan.received)])
    if plan.problem.hosts:
        coming, going = plan.passing
        back = yield from all_to_all(passed, coming, going)
        for where, part in zip(
            rank.goes_on(rows.device).split(going), back.split(going)
        ):
            direct.index_add_(
                0, where, part
            )  # each row once, so that the order of sums is fixed
    home = d_rows.new_empty(sum(plan.sent), *d_rows.shape[1:])
    ticket = yield AllToAll(direct, plan.received, home, plan.sent)
    local = rank.local_backward(dout, q, k, v, out, lse)
    dq += local[0]
    yield Wait(ticket)
    for part, own in plan.pairs(home, *local[1:]):
        own.add_(part)
    return tuple(t[..., :d] for t in (dq, *local[1:]))


# --------------------------------------------------------------------------------------
# ring: shards hop from rank to rank, as far as someone sees them


def _shard(
    rank: Rank, source: int, k: Tensor, dtype=None, make=torch.Tensor.new_empty
) -> tuple[Tensor, Tensor]:
    """Memory for k and v of another rank, or for their gradients."""
    shape = (k.shape[0], rank.problem.layout.size(source), *k.shape[2:])
    return tuple(make(k, shape, dtype=dtype) for _ in range(2))


def _hop(rank: Rank, t: int, current, k: Tensor) -> tuple[Exchange, tuple | None]:
    """The exchange before step t and the shard that comes, of rank - t. No shard goes
    where no query needs it.
    """
    p, me, hops = rank.problem.layout.ranks, rank.rank, rank.problem.hops
    exchange, coming = Exchange(), None
    if hops[(me - t + 1) % p] >= t:
        exchange.send[(me + 1) % p] = current
    if hops[(me - t) % p] >= t:
        coming = exchange.receive[(me - 1) % p] = _shard(rank, (me - t) % p, k)
    return exchange, coming


def ring_forward(rank: Rank, q, k, v) -> Steps:
    p, current = rank.problem.layout.ranks, (k.contiguous(), v.contiguous())
    for t in range(p):
        exchange, coming = _hop(rank, t + 1, current, k)
        ticket = yield exchange
        if t == 0:
            out, lse = rank.local_forward(q, k, v)
            out = out.to(accumulation_dtype(out.dtype))
        elif current is not None:
            rank.add_forward((rank.rank - t) % p, q, current, out, lse)
        yield Wait(ticket)
        del exchange, ticket  # both hold what was sent, and the next step receives
        current = coming
    return out.to(q.dtype), lse


def ring_backward(rank: Rank, dout, dlse, q, k, v, out, lse) -> Steps:
    """dK and dV of a shard follow it one hop behind, and return to its owner from the
    last rank that used it.
    """
    p, me, hops, d = rank.problem.layout.ranks, rank.rank, rank.problem.hops, q.shape[3]
    dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    dtype, travelling, home = accumulation_dtype(k.dtype), None, None
    exchange, coming = _hop(rank, 1, (k.contiguous(), v.contiguous()), k)
    ticket = yield exchange
    total = rank.local_backward(dout, q, k, v, out, lse)
    gradients = yield Exchange()
    yield Wait(ticket)
    for t in range(1, p):
        current, source, onward = coming, (me - t) % p, Exchange()
        exchange, coming = _hop(rank, t + 1, current, k)
        ticket = yield exchange
        if current is not None:
            mine = _shard(rank, source, k, dtype, torch.Tensor.new_zeros)
            rank.add_backward(source, (dout, q, out, lse), current, total[0], mine)
        yield Wait(gradients)
        if current is not None:
            for a, b in zip(mine, travelling or ()):
                a += b
            onward.send[(me + 1) % p if hops[source] > t else source] = mine
        travelling = None
        if coming is not None:
            travelling = onward.receive[(me - 1) % p] = _shard(
                rank, (source - 1) % p, k, dtype
            )
        if hops[me] == t:
            home = onward.receive[(me + t) % p] = _shard(rank, me, k, dtype)
        gradients = yield onward
        yield Wait(ticket)
    yield Wait(gradients)
    for a, b in zip(total[1:], home or ()):
        a += b
    return tuple(t[..., :d] for t in total)


# --------------------------------------------------------------------------------------
# all_gather: everyone gets every shard; gradients are scattered back and summed


def _gather(rank: Rank, k: Tensor, v: Tensor) -> Exchange:
    p = rank.problem.layout.ranks
    others = [(rank.rank + i) % p for i in range(1, p)]
    return Exchange(
        dict.fromkeys(others, (k.contiguous(), v.contiguous())),
        {j: _shard(rank, j, k) for j in others},
    )


def all_gather_forward(rank: Rank, q, k, v) -> Steps:
    exchange = _gather(rank, k, v)
    ticket = yield exchange
    out, lse = rank.local_forward(q, k, v)
    out = out.to(accumulation_dtype(out.dtype))
    yield Wait(ticket)
    for source, shard in exchange.receive.items():
        rank.add_forward(source, q, shard, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(rank: Rank, dout, dlse, q, k, v, out, lse) -> Steps:
    p, me, dtype, d = (
        rank.problem.layout.ranks,
        rank.rank,
        accumulation_dtype(k.dtype),
        q.shape[3],
    )
    dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    exchange = _gather(rank, k, v)
    ticket = yield exchange
    total = rank.local_backward(dout, q, k, v, out, lse)
    yield Wait(ticket)
    for t in range(
        1, p
    ):  # one pair of ranks at a time, so that only two foreign gradients are held
        to, source = (me + t) % p, (me - t) % p
        part, coming = (
            _shard(rank, to, k, dtype, torch.Tensor.new_zeros),
            _shard(rank, me, k, dtype),
        )
        rank.add_backward(
            to, (dout, q, out, lse), exchange.receive.pop(to), total[0], part
        )
        yield Wait((yield Exchange({to: part}, {source: coming})))
        for a, b in zip(total[1:], coming):
            a += b
    return tuple(t[..., :d] for t in total)


# --------------------------------------------------------------------------------------
# ulysses: sequence shards become head shards and back (Jacobs et al. 2023, arXiv 2309.14509). Rank u takes a contiguous
# range of query heads, uneven if p does not divide H, and the K/V heads that they see; a K/V head that several ranks
# need is sent to each. Head offsets and groups follow the global head index.


@dataclass(frozen=True)
class HeadRange:
    """The heads ``mine`` of a pattern for ``heads`` heads, numbered from 0."""

    pattern: Pattern
    mine: range
    heads: int
    kv_heads: int

    def branches(self, n: int, heads: int, kv_heads: int) -> tuple[Branch, ...]:
        whole = self.pattern.branches(n, self.heads, self.kv_heads)
        mine = [
            [
                (h - self.mine.start, o)
                for h, o in zip(b.heads, b.offsets)
                if h in self.mine
            ]
            for b in whole
        ]
        return tuple(
            Branch(b.length, b.rate, *zip(*some))
            for b, some in zip(whole, mine)
            if some
        )


def shares(heads: int, kv_heads: int, ranks: int) -> tuple[list[range], list[range]]:
    """By rank, the query heads that it takes, and the K/V heads that they see.

    >>> shares(5, 5, 2)[0]
    [range(0, 3), range(3, 5)]
    """
    (whole, rest), group = divmod(heads, ranks), heads // kv_heads
    cuts = [rank * whole + min(rank, rest) for rank in range(ranks + 1)]
    queries = [range(*pair) for pair in pairwise(cuts)]
    return queries, [
        range(q.start // group, (q.stop - 1) // group + 1) for q in queries
    ]


def _to_heads(rank: Rank, tensors: list[Tensor], heads: list[list[range]]) -> Steps:
    """Sequence shards (b, s, h, d) to whole sequences (b, n, h', d); heads[i][u] are
    what rank u takes of tensor i.
    """
    layout, each = rank.problem.layout, list(zip(tensors, heads))
    parts = [
        [t[:, :, h[u].start : h[u].stop] for t, h in each] for u in range(layout.ranks)
    ]
    shapes = [
        [(t.shape[0], size, len(h[rank.rank]), t.shape[3]) for t, h in each]
        for size in layout.sizes
    ]
    received = yield from _all_to_all(parts, shapes)
    whole = [
        t.new_empty(t.shape[0], layout.n, len(h[rank.rank]), t.shape[3])
        for t, h in each
    ]
    for source, shards in enumerate(received):
        for row, owned in layout.chunks(source):
            for into, shard in zip(whole, shards):
                into[:, owned.start : owned.stop : owned.step] = shard[
                    :, row : row + len(owned)
                ]
    return whole


def _to_rows(rank: Rank, tensors: list[Tensor], heads: list[list[range]]) -> Steps:
    """The way back; what several ranks have of one K/V head is summed."""
    layout, each = rank.problem.layout, list(zip(tensors, heads))
    owned = [
        [slice(r.start, r.stop, r.step) for r in layout.ranges(u)]
        for u in range(layout.ranks)
    ]
    parts = [
        [torch.cat([t[:, :0], *(t[:, rows] for rows in some)], 1) for t in tensors]
        for some in owned
    ]
    size = layout.size(rank.rank)
    shapes = [
        [(t.shape[0], size, len(h[u]), t.shape[3]) for t, h in each]
        for u in range(layout.ranks)
    ]
    received = yield from _all_to_all(parts, shapes)
    results = [t.new_zeros(t.shape[0], size, h[-1].stop, t.shape[3]) for t, h in each]
    for u, shards in enumerate(received):
        for into, shard, h in zip(results, shards, heads):
            into[:, :, h[u].start : h[u].stop] += shard
    return results


def _all_to_all(
    parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]
) -> Steps:
    """Send lists of tensors of one dtype by rank, get those of these shapes by rank."""
    counts = [[math.prod(shape) for shape in each] for each in shapes]
    send = torch.cat([t.reshape(-1) for part in parts for t in part])
    sent, received = (
        [sum(t.numel() for t in part) for part in parts],
        list(map(sum, counts)),
    )
    flat = iter(
        (yield from all_to_all(send, sent, received)).split(list(chain(*counts)))
    )
    return [[next(flat).view(shape) for shape in each] for each in shapes]


def _on_heads(rank: Rank, *tensors) -> tuple[Tensor, ...]:
    """The one-device engine on whole sequences of this rank's heads: forward of q, k,
    v, else backward.
    """
    problem, backward, how = rank.problem, len(tensors) > 3, (*rank.how, rank.execution)
    if isinstance(problem.pattern, BlockSparse):  # all heads see the same blocks
        return (blocks.backward if backward else blocks.forward)(
            *tensors, problem.pattern, *how
        )
    queries, _ = shares(problem.heads, problem.kv_heads, problem.layout.ranks)
    pattern = HeadRange(
        problem.pattern, queries[rank.rank], problem.heads, problem.kv_heads
    )
    q, k = tensors[backward : backward + 2]
    plan = dilated.plan_for(q, k, pattern, rank.execution.cached, backward=backward)
    run = execute.backward if backward else execute.forward
    return run(*tensors, plan, *rank.how, pool=rank.execution.scratch())


def _shares(rank: Rank) -> tuple[list[range], list[range], list[int] | None]:
    """The query heads and the K/V heads of all ranks, and the K/V head of each query
    head of this rank.

    The last is None where groups are whole; else the engine, which needs equal groups,
    gets a K/V head per query head.
    """
    problem, me = rank.problem, rank.rank
    queries, keys = shares(problem.heads, problem.kv_heads, problem.layout.ranks)
    seen = [
        head * problem.kv_heads // problem.heads - keys[me].start
        for head in queries[me]
    ]
    return queries, keys, None if len(set(Counter(seen).values())) == 1 else seen


def ulysses_forward(rank: Rank, q, k, v) -> Steps:
    queries, keys, seen = _shares(rank)
    whole = yield from _to_heads(rank, [q, k, v], [queries, keys, keys])
    out, lse = _on_heads(
        rank, whole[0], *(t if seen is None else t[:, :, seen] for t in whole[1:])
    )
    (mine,) = yield from _to_rows(rank, [out], [queries])
    (my_lse,) = yield from _to_rows(
        rank, [lse.transpose(1, 2).unsqueeze(-1)], [queries]
    )
    return (
        mine,
        my_lse.squeeze(-1).transpose(1, 2),
        *whole,
        out.contiguous(),
        lse.contiguous(),
    )


def ulysses_backward(rank: Rank, dout, dlse, q, k, v, out, lse, *whole) -> Steps:
    (queries, keys, seen), (whole_q, whole_k, whole_v, whole_out, whole_lse) = (
        _shares(rank),
        whole,
    )
    (whole_dout,) = yield from _to_heads(rank, [dout], [queries])
    wide = [t if seen is None else t[:, :, seen] for t in (whole_k, whole_v)]
    tensors = (whole_dout, whole_q, *wide, whole_out, whole_lse)
    if dlse is not None:
        (g,) = yield from _to_heads(
            rank, [dlse.transpose(1, 2).unsqueeze(-1)], [queries]
        )
        tensors = fold_lse_gradient(*tensors, g.squeeze(-1).transpose(1, 2))
    grads = [
        t[..., : q.shape[3]].to(accumulation_dtype(q.dtype))
        for t in _on_heads(rank, *tensors)
    ]
    if seen is not None:
        index = torch.tensor(seen, device=k.device)
        grads[1:] = [
            t.new_zeros(whole_k.shape).index_add_(2, index, t) for t in grads[1:]
        ]
    return tuple((yield from _to_rows(rank, grads, [queries, keys, keys])))


SCHEMES = {
    "plan": (plan_forward, plan_backward),
    "ring": (ring_forward, ring_backward),
    "all_gather": (all_gather_forward, all_gather_backward),
    "ulysses": (ulysses_forward, ulysses_backward),
}


class Choice(NamedTuple):
    """The scheme that ``scheme="auto"`` takes, and why."""

    scheme: str
    why: str


def choose(problem: Problem) -> Choice:
    """The scheme that moves the fewest K/V bytes forward; the ring where equal, as it
    holds the fewest rows.

    >>> from .layout import contiguous
    >>> choose(Problem(patterns.Dilated([4, 16], [1, 4]), contiguous(16, 4), False, 4, 4)).scheme
    'plan'
    """
    p, heads, kv_heads = problem.layout.ranks, problem.heads, problem.kv_heads
    if problem.exchange_dtype is not None:
        return Choice("plan", "no other scheme rounds rows for their way")
    kind = (
        "block-sparse"
        if isinstance(problem.pattern, patterns.BlockSparse)
        else "dilated"
    )
    if p == 1:
        return Choice(
            "plan" if kind == "block-sparse" else "ring",
            "one rank has all rows, and nothing moves",
        )
    if not isinstance(problem.pattern, patterns.Dense):
        if problem.layout.kind == "striped":
            return Choice(
                "ulysses", f"a {kind} pattern over stripes needs whole sequences"
            )
        return Choice(
            "plan",
            f"a {kind} pattern shows few foreign rows, and the plan moves just these",
        )
    ring, heads_moved = 2 * kv_heads * (p - 1), (2 * heads + 2 * kv_heads) * (p - 1) / p
    if p <= heads and heads_moved < ring:
        return Choice(
            "ulysses",
            f"exchanging heads moves {heads_moved / ring:.2f} of what passing K and V on does",
        )
    return Choice(
        "ring",
        f"exchanging heads would move {heads_moved / ring:.2f} of what passing K and V on does",
    )
