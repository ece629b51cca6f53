"""The schemes by which ranks share attention. Each is the algorithm of one rank: a generator of requests (``comm``).

A forward takes the shards q, k, v (b, s, h, d) and returns out, lse (b, h, s), and what else its backward needs. A
backward takes dout, dlse or None, q, k, v, out, lse and the rest, and returns dq, dk, dv. No scheme saves the rows of a
hop: the backward of each call is exact with the final out and lse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import patterns
from ..block_patterns import BlockSparse
from ..engine import blocks as block_engine
from ..engine import dilated, execute
from ..engine.autograd import fold_lse_gradient
from ..kernels.base import accumulation_dtype
from ..patterns import Branch, Pattern
from .comm import AllToAll, Exchange, Steps, Wait
from .exchange import Problem, RankPlan
from .rank import Rank

# ---------------------------------------------------------------------------------------------------------------------
# plan: the rows that are seen, each once, by one all-to-all


def plan_forward(rank: Rank, q, k, v) -> Steps:
    plan = rank.plan
    rows = k.new_empty(sum(plan.received), 2, q.shape[0], q.shape[3])
    ticket = yield AllToAll(_packed(plan, k, v), plan.sent, rows, plan.received)
    out, lse = rank.local_forward(q, k, v)
    yield Wait(ticket)
    del ticket  # it holds the rows sent
    if len(rows):
        rank.add_forward(None, q, rank.keys(rows), out, lse)
    return out, lse, rows


def _packed(plan: RankPlan, k: Tensor, v: Tensor) -> Tensor:
    """The rows to send (R, 2, b, d), by destination."""
    rows = k.new_empty(sum(plan.sent), 2, k.shape[0], k.shape[3])
    for part, own in plan.pairs(rows, k, v):
        part.copy_(own)
    return rows


def plan_backward(rank: Rank, dout, dlse, q, k, v, out, lse, rows) -> Steps:
    plan, d = rank.plan, q.shape[3]
    if dlse is not None:
        dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
        rows = F.pad(rows, (0, q.shape[3] - d))
    dq = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    d_rows = torch.zeros(rows.shape, dtype=accumulation_dtype(rows.dtype), device=rows.device)
    if len(rows):
        rank.add_backward(None, (dout, q, out, lse), rank.keys(rows), dq, rank.keys(d_rows))
    home = d_rows.new_empty(sum(plan.sent), *d_rows.shape[1:])
    ticket = yield AllToAll(d_rows, plan.received, home, plan.sent)
    local = rank.local_backward(dout, q, k, v, out, lse)
    dq += local[0]
    yield Wait(ticket)
    for part, own in plan.pairs(home, *local[1:]):
        own.add_(part)
    return tuple(t[..., :d] for t in (dq, *local[1:]))


# ---------------------------------------------------------------------------------------------------------------------
# ring: shards hop from rank to rank, as far as someone sees them


def _shard(rank: Rank, source: int, k: Tensor, dtype=None, make=torch.Tensor.new_empty) -> tuple[Tensor, Tensor]:
    """Memory for k and v of another rank, or for their gradients."""
    shape = (k.shape[0], rank.problem.layout.size(source), *k.shape[2:])
    return tuple(make(k, shape, dtype=dtype) for _ in range(2))


def _hop(rank: Rank, t: int, current, k: Tensor) -> tuple[Exchange, tuple | None]:
    """The exchange before step t and the shard that comes, of rank - t. No shard goes where no query needs it."""
    p, me, hops = rank.problem.layout.ranks, rank.rank, rank.problem.hops
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
    """dK and dV of a shard follow it one hop behind, and return to its owner from the last rank that used it."""
    p, me, hops, d = rank.problem.layout.ranks, rank.rank, rank.problem.hops, q.shape[3]
    if dlse is not None:
        dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    dtype, reads = accumulation_dtype(k.dtype), (dout, q, out, lse)
    current, travelling, home, gradients = (k.contiguous(), v.contiguous()), None, None, None
    for t in range(p):
        exchange, coming = _hop(rank, t + 1, current, k)
        ticket = yield exchange
        source = (me - t) % p
        if t == 0:
            total = rank.local_backward(dout, q, k, v, out, lse)
            mine = None
        elif current is not None:
            mine = _shard(rank, source, k, dtype, torch.Tensor.new_zeros)
            rank.add_backward(source, reads, current, total[0], mine)
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
        gradients = yield onward
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
    p = rank.problem.layout.ranks
    others = [(rank.rank + i) % p for i in range(1, p)]
    shards = {j: _shard(rank, j, k) for j in others}
    return Exchange(dict.fromkeys(others, (k.contiguous(), v.contiguous())), shards), shards


def all_gather_forward(rank: Rank, q, k, v) -> Steps:
    exchange, shards = _gather(rank, k, v)
    ticket = yield exchange
    out, lse = rank.local_forward(q, k, v)
    out = out.to(accumulation_dtype(out.dtype))
    yield Wait(ticket)
    for source, shard in shards.items():
        rank.add_forward(source, q, shard, out, lse)
    return out.to(q.dtype), lse


def all_gather_backward(rank: Rank, dout, dlse, q, k, v, out, lse) -> Steps:
    p, me, dtype, d = rank.problem.layout.ranks, rank.rank, accumulation_dtype(k.dtype), q.shape[3]
    if dlse is not None:
        dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    exchange, shards = _gather(rank, k, v)
    ticket = yield exchange
    total = rank.local_backward(dout, q, k, v, out, lse)
    yield Wait(ticket)
    for t in range(1, p):  # one pair of ranks at a time, so that only two foreign gradients are held
        to, source = (me + t) % p, (me - t) % p
        part, coming = _shard(rank, to, k, dtype, torch.Tensor.new_zeros), _shard(rank, me, k, dtype)
        rank.add_backward(to, (dout, q, out, lse), shards.pop(to), total[0], part)
        yield Wait((yield Exchange({to: part}, {source: coming})))
        for a, b in zip(total[1:], coming):
            a += b
    return tuple(t[..., :d] for t in total)


# ---------------------------------------------------------------------------------------------------------------------
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
        found = []
        for b in self.pattern.branches(n, self.heads, self.kv_heads):
            if mine := [(h - self.mine.start, o) for h, o in zip(b.heads, b.offsets) if h in self.mine]:
                found.append(Branch(b.length, b.rate, *map(tuple, zip(*mine))))
        return tuple(found)


@dataclass(frozen=True)
class Share:
    """The heads of one rank: query heads, and the K/V heads that they see."""

    queries: range
    keys: range


def shares(heads: int, kv_heads: int, ranks: int) -> list[Share]:
    """Which heads each rank takes.

    >>> [s.queries for s in shares(5, 5, 2)]
    [range(0, 3), range(3, 5)]
    """
    whole, rest = divmod(heads, ranks)
    group, found, start = heads // kv_heads, [], 0
    for rank in range(ranks):
        stop = start + whole + (rank < rest)
        found.append(Share(range(start, stop), range(start // group, (stop - 1) // group + 1)))
        start = stop
    return found


def _to_heads(rank: Rank, tensors: list[Tensor], heads: list[list[range]]) -> Steps:
    """Sequence shards (b, s, h, d) to whole sequences (b, n, h', d); heads[i][u] are what rank u takes of tensor i."""
    layout, each = rank.problem.layout, list(zip(tensors, heads))
    parts = [[t[:, :, h[u].start : h[u].stop] for t, h in each] for u in range(layout.ranks)]
    shapes = [[(t.shape[0], size, len(h[rank.rank]), t.shape[3]) for t, h in each] for size in layout.sizes]
    received = yield from _all_to_all(parts, shapes)
    whole = [t.new_empty(t.shape[0], layout.n, len(h[rank.rank]), t.shape[3]) for t, h in each]
    for source, shards in enumerate(received):
        for into, shard in zip(whole, shards):
            for row, owned in layout.chunks(source):
                into[:, owned.start : owned.stop : owned.step] = shard[:, row : row + len(owned)]
    return whole


def _to_rows(rank: Rank, tensors: list[Tensor], heads: list[list[range]]) -> Steps:
    """The way back; what several ranks have of one K/V head is summed."""
    layout, each = rank.problem.layout, list(zip(tensors, heads))
    parts = [[_rows(t, layout.ranges(u)) for t in tensors] for u in range(layout.ranks)]
    size = layout.size(rank.rank)
    shapes = [[(t.shape[0], size, len(h[u]), t.shape[3]) for t, h in each] for u in range(layout.ranks)]
    received = yield from _all_to_all(parts, shapes)
    results = [t.new_zeros(t.shape[0], size, h[-1].stop, t.shape[3]) for t, h in each]
    for u, shards in enumerate(received):
        for into, shard, h in zip(results, shards, heads):
            into[:, :, h[u].start : h[u].stop] += shard
    return results


def _rows(t: Tensor, ranges) -> Tensor:
    return torch.cat([t[:, :0], *(t[:, r.start : r.stop : r.step] for r in ranges)], 1)


def _all_to_all(parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]) -> Steps:
    """Send lists of tensors of one dtype by rank, get those of these shapes by rank."""
    sent = [sum(t.numel() for t in part) for part in parts]
    counts = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    send = torch.cat([t.reshape(-1) for part in parts for t in part])
    receive = send.new_empty(sum(map(sum, counts)))
    yield Wait((yield AllToAll(send, sent, receive, [sum(c) for c in counts])))
    flat = iter(receive.split([c for each in counts for c in each]))
    return [[next(flat).view(shape) for shape in each] for each in shapes]


def _on_heads(rank: Rank, share: Share, *tensors) -> tuple[Tensor, ...]:
    """The one-device engine on whole sequences of this rank's heads: forward of q, k, v, else backward."""
    problem, backward = rank.problem, len(tensors) > 3
    blocks = isinstance(problem.pattern, BlockSparse)  # all heads see the same blocks
    engine = block_engine if blocks else execute
    run = engine.backward if backward else engine.forward
    if blocks:
        return run(*tensors, problem.pattern, *rank.how, rank.execution)
    pattern = HeadRange(problem.pattern, share.queries, problem.heads, problem.kv_heads)
    q, k = tensors[backward : backward + 2]
    plan = dilated.plan_for(q, k, pattern, rank.execution.cached, backward=backward)
    return run(*tensors, plan, *rank.how, pool=rank.execution.scratch())


def _aligned(share: Share, group: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """k and v for the engine, which needs equal groups: if groups are cut, a K/V head per query head, and the index."""
    seen = [head // group - share.keys.start for head in share.queries]  # by query head
    if len(set(Counter(seen).values())) == 1:
        return k, v, None
    index = torch.tensor(seen, device=k.device)
    return k.index_select(2, index), v.index_select(2, index), index


def _shares(rank: Rank) -> tuple[Share, list[range], list[range]]:
    """This rank's heads, then the query heads and the K/V heads of all ranks."""
    found = shares(rank.problem.heads, rank.problem.kv_heads, rank.problem.layout.ranks)
    return found[rank.rank], [share.queries for share in found], [share.keys for share in found]


def ulysses_forward(rank: Rank, q, k, v) -> Steps:
    (share, queries, keys), group = _shares(rank), q.shape[2] // k.shape[2]
    whole = yield from _to_heads(rank, [q, k, v], [queries, keys, keys])
    out, lse = _on_heads(rank, share, whole[0], *_aligned(share, group, *whole[1:])[:2])
    (mine,) = yield from _to_rows(rank, [out], [queries])
    (my_lse,) = yield from _to_rows(rank, [lse.transpose(1, 2).unsqueeze(-1)], [queries])
    return mine, my_lse.squeeze(-1).transpose(1, 2), *whole, out.contiguous(), lse.contiguous()


def ulysses_backward(
    rank: Rank, dout, dlse, q, k, v, out, lse, whole_q, whole_k, whole_v, whole_out, whole_lse
) -> Steps:
    (share, queries, keys), d = _shares(rank), q.shape[3]
    (whole_dout,) = yield from _to_heads(rank, [dout], [queries])
    wide_k, wide_v, index = _aligned(share, q.shape[2] // k.shape[2], whole_k, whole_v)
    tensors = (whole_dout, whole_q, wide_k, wide_v, whole_out, whole_lse)
    if dlse is not None:
        (g,) = yield from _to_heads(rank, [dlse.transpose(1, 2).unsqueeze(-1)], [queries])
        tensors = fold_lse_gradient(*tensors, g.squeeze(-1).transpose(1, 2))
    grads = [t[..., :d].to(accumulation_dtype(q.dtype)) for t in _on_heads(rank, share, *tensors)]
    if index is not None:
        grads[1:] = [t.new_zeros(whole_k.shape).index_add_(2, index, t) for t in grads[1:]]
    return tuple((yield from _to_rows(rank, grads, [queries, keys, keys])))


SCHEMES = {
    "plan": (plan_forward, plan_backward),
    "ring": (ring_forward, ring_backward),
    "all_gather": (all_gather_forward, all_gather_backward),
    "ulysses": (ulysses_forward, ulysses_backward),
}


@dataclass(frozen=True)
class Choice:
    """The scheme that ``scheme="auto"`` takes, and why."""

    scheme: str
    why: str


def choose(problem: Problem) -> Choice:
    """The scheme that moves the fewest K/V bytes forward; the ring where equal, as it holds the fewest rows.

    >>> from .layout import contiguous
    >>> choose(Problem(patterns.Dilated([4, 16], [1, 4]), contiguous(16, 4), False, 4, 4)).scheme
    'plan'
    """
    p, heads, kv_heads = problem.layout.ranks, problem.heads, problem.kv_heads
    kind = "block-sparse" if isinstance(problem.pattern, patterns.BlockSparse) else "dilated"
    if p == 1:
        return Choice("plan" if kind == "block-sparse" else "ring", "one rank has all rows, and nothing moves")
    if not isinstance(problem.pattern, patterns.Dense):
        if problem.layout.kind == "striped":
            return Choice("ulysses", f"a {kind} pattern over stripes needs whole sequences")
        return Choice("plan", f"a {kind} pattern shows few foreign rows, and the plan moves just these")
    ring, heads_moved = 2 * kv_heads * (p - 1), (2 * heads + 2 * kv_heads) * (p - 1) / p
    if p <= heads and heads_moved < ring:
        return Choice("ulysses", f"exchanging heads moves {heads_moved / ring:.2f} of what passing K and V on does")
    return Choice("ring", f"exchanging heads would move {heads_moved / ring:.2f} of what passing K and V on does")
