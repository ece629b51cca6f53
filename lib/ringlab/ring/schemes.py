"""The ways in which ranks share attention, each as the algorithm of one rank: a generator of requests (see ``comm``).

Forward: (q, k, v) -> (out, lse, *kept); backward: (dout, dlse or None, q, k, v, out, lse, *kept) -> (dq, dk, dv), local
shards (b, s, h, d) and (b, h, s). ``kept`` is what was received and a backward needs again. Nothing else of a hop is
saved: each block's backward is exact with the final (out, lse).

Ulysses: sequence shards become head shards and back (Jacobs et al. 2023, arXiv 2309.14509).

Rank u takes a contiguous range of query heads, uneven where p does not divide H, and the K/V heads that they see; a K/V
head that several ranks need is sent to each. Head offsets and groups follow the global head index.

The schemes by name, which of them "auto" takes, and one rank's part in a forward or backward by one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import cache as caches
from .. import kernels, patterns
from ..block_patterns import BlockSparse
from ..engine import block_sparse, execute
from ..engine.autograd import fold_lse_gradient
from ..kernels.base import accumulation_dtype
from ..patterns import Branch, Pattern
from .comm import AllToAll, Exchange, Post, Steps, Wait
from .exchange import Problem
from .rank import BlockRank, Rank, local_rows, shard_of, widened

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
    dq = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    d_rows = torch.zeros(rows.shape, dtype=accumulation_dtype(rows.dtype), device=rows.device)
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
            out = out.to(accumulation_dtype(out.dtype))
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
    dtype, reads = accumulation_dtype(k.dtype), (dout, q, out, lse)
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
    out = out.to(accumulation_dtype(out.dtype))
    yield Wait(ticket)
    for source, shard in shards.items():
        rank.add_forward(rank.meetings(source), q, shard, out, lse)
    return out.to(q.dtype), lse.squeeze(-1).transpose(1, 2)


def all_gather_backward(rank: Rank, dout, dlse, q, k, v, out, lse) -> Steps:
    p, me, dtype, d = rank.problem.layout.ranks, rank.rank, accumulation_dtype(k.dtype), q.shape[3]
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


@dataclass(frozen=True)
class HeadRange:
    """A pattern as its heads ``first`` .. ``first + count - 1`` of ``heads`` see it, numbered from 0."""

    pattern: Pattern
    first: int
    count: int
    heads: int
    kv_heads: int

    def branches(self, n: int, heads: int, kv_heads: int | None = None) -> tuple[Branch, ...]:
        found = []
        for b in self.pattern.branches(n, self.heads, self.kv_heads):
            mine = [(h - self.first, o) for h, o in zip(b.heads, b.offsets) if 0 <= h - self.first < self.count]
            if mine:
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


class _Exchange:
    """Tensors (b, s, heads of one kind, d) to head shards (b, n, heads of this rank, d), and back."""

    def __init__(self, rank: Rank, heads: int, kv_heads: int):
        self.rank, self.layout = rank, rank.problem.layout
        self.shares = shares(heads, kv_heads, self.layout.ranks)
        self.mine = self.shares[rank.rank]

    def heads(self, share: Share, kind: str) -> slice:
        found = getattr(share, kind)
        return slice(found.start, found.stop)

    def to_heads(self, tensors: list[Tensor], kinds: list[str]) -> Steps:
        p, sizes = self.layout.ranks, [self.layout.size(j) for j in range(self.layout.ranks)]
        parts = [[t[:, :, self.heads(share, kind)] for t, kind in zip(tensors, kinds)] for share in self.shares]
        shapes = [[(t.shape[0], sizes[j], len(getattr(self.mine, kind)), t.shape[3]) for t, kind in zip(tensors, kinds)]
                  for j in range(p)]  # fmt: skip
        received = yield from _all_to_all(parts, shapes)
        whole = [t.new_empty(t.shape[0], self.layout.n, len(getattr(self.mine, kind)), t.shape[3])
                 for t, kind in zip(tensors, kinds)]  # fmt: skip
        for source, pieces in enumerate(received):
            for into, piece in zip(whole, pieces):
                row = 0
                for owned in self.layout.ranges(source):
                    into[:, owned.start : owned.stop : owned.step] = piece[:, row : row + len(owned)]
                    row += len(owned)
        return whole

    def to_rows(self, tensors: list[Tensor], kinds: list[str], likes: list[Tensor]) -> Steps:
        """The way back; what several ranks hold of one K/V head is summed."""
        parts = [[_rows(t, self.layout.ranges(j)) for t in tensors] for j in range(self.layout.ranks)]
        size = self.layout.size(self.rank.rank)
        shapes = [[(t.shape[0], size, len(getattr(share, kind)), t.shape[3]) for t, kind in zip(tensors, kinds)]
                  for share in self.shares]  # fmt: skip
        received = yield from _all_to_all(parts, shapes)
        results = [torch.zeros((*like.shape[:3], t.shape[3]), dtype=t.dtype, device=t.device)
                   for t, like in zip(tensors, likes)]  # fmt: skip
        for share, pieces in zip(self.shares, received):
            for into, piece, kind in zip(results, pieces, kinds):
                into[:, :, self.heads(share, kind)] += piece
        return results


def _rows(t: Tensor, ranges) -> Tensor:
    found = [t[:, r.start : r.stop : r.step] for r in ranges]
    return torch.cat(found, 1) if found else t[:, :0]


def _all_to_all(parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]) -> Steps:
    """Send lists of tensors of one dtype by rank, get those of these shapes by rank."""
    sent = [sum(t.numel() for t in part) for part in parts]
    counts = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    send = torch.cat([t.reshape(-1) for part in parts for t in part])
    receive = send.new_empty(sum(map(sum, counts)))
    yield Wait((yield Post(AllToAll(send, sent, receive, [sum(c) for c in counts]))))
    pieces = receive.split([c for each in counts for c in each])
    found, at = [], 0
    for each in shapes:
        found.append([piece.view(shape) for piece, shape in zip(pieces[at:], each)])
        at += len(each)
    return found


def _engine(rank: Rank, passes: str, share: Share, tensors):
    """The one-device engine on whole sequences of this rank's heads."""
    problem, run = rank.problem, (rank.problem.causal, rank.scale, rank.kernel)
    if isinstance(problem.pattern, BlockSparse):  # all heads see the same blocks
        return block_sparse.run(passes, tensors, problem.pattern, *run, rank.execution)
    pattern = HeadRange(problem.pattern, share.queries.start, len(share.queries), problem.heads, problem.kv_heads)
    q, k = tensors[:2] if passes == "forward" else tensors[1:3]
    plan = execute.plan_for(q, k, pattern, rank.cached)
    return getattr(execute, passes)(*tensors, plan, *run, rank.execution.scratch())


def _aligned(share: Share, group: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """k and v such that the engine's own grouping fits; where it cannot, a K/V head per query head."""
    counts = [len(range(max(g * group, share.queries.start), min((g + 1) * group, share.queries.stop)))
              for g in share.keys]  # fmt: skip
    if len(set(counts)) == 1:
        return k, v, None
    index = torch.tensor([i for i, c in enumerate(counts) for _ in range(c)], device=k.device)
    return k.index_select(2, index), v.index_select(2, index), index


def ulysses_forward(rank: Rank, q, k, v) -> Steps:
    exchange = _Exchange(rank, q.shape[2], k.shape[2])
    share, group = exchange.mine, q.shape[2] // k.shape[2]
    whole = yield from exchange.to_heads([q, k, v], ["queries", "keys", "keys"])
    out, lse = _engine(rank, "forward", share, (whole[0], *_aligned(share, group, *whole[1:])[:2]))
    (mine,) = yield from exchange.to_rows([out], ["queries"], [q])
    (my_lse,) = yield from exchange.to_rows([lse.transpose(1, 2).unsqueeze(-1)], ["queries"], [q])
    kept = torch.cat([t.reshape(-1) for t in (*whole, out)])
    return mine, my_lse.squeeze(-1).transpose(1, 2), kept, lse.contiguous()


def ulysses_backward(rank: Rank, dout, dlse, q, k, v, out, lse, kept, whole_lse) -> Steps:
    exchange = _Exchange(rank, q.shape[2], k.shape[2])
    share, group, (b, _, _, d), n = exchange.mine, q.shape[2] // k.shape[2], q.shape, exchange.layout.n
    counts = [len(share.queries), len(share.keys), len(share.keys), len(share.queries)]
    whole_q, whole_k, whole_v, whole_out = (
        t.view(b, n, h, d) for t, h in zip(kept.split([b * n * h * d for h in counts]), counts))  # fmt: skip
    (whole_dout,) = yield from exchange.to_heads([dout], ["queries"])
    wide_k, wide_v, index = _aligned(share, group, whole_k, whole_v)
    tensors = (whole_dout, whole_q, wide_k, wide_v, whole_out, whole_lse)
    if dlse is not None:
        (g,) = yield from exchange.to_heads([dlse.transpose(1, 2).unsqueeze(-1)], ["queries"])
        tensors = fold_lse_gradient(*tensors, g.squeeze(-1).transpose(1, 2))
    grads = [t[..., :d].to(accumulation_dtype(q.dtype)) for t in _engine(rank, "backward", share, tensors)]
    if index is not None:
        grads[1:] = [t.new_zeros(whole_k.shape).index_add_(2, index, t) for t in grads[1:]]
    return tuple((yield from exchange.to_rows(grads, ["queries", "keys", "keys"], [q, k, v])))


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


def rank_of(problem: Problem, rank: int, q: Tensor, scale: float, backend, backward: bool, execution) -> Rank:
    """Rank number ``rank`` of a problem with the kernel for tensors like q."""
    found = kernels.choose(q.device, q.dtype, q.shape[3], causal=problem.causal, backward=backward, backend=backend)
    kind = BlockRank if isinstance(problem.pattern, patterns.BlockSparse) else Rank
    return kind(problem, rank, execution.tiled(found.kernel), scale, execution)


def forward_of(rank: Rank, scheme: str, q, k, v, run: Callable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse and what the backward needs of others' rows (up to two tensors); ``run`` drives a rank's steps."""
    out, lse, *kept = run(SCHEMES[scheme][0](rank, q, k, v))
    kept += [q.new_empty(0) for _ in range(2 - len(kept))]
    return out.contiguous(), lse.contiguous(), *kept


def backward_of(rank: Rank, scheme: str, dout, dlse, q, k, v, out, lse, kept, more, run: Callable):
    """dq, dk, dv in q's dtype; ``kept`` and ``more`` are those of the forward."""
    extra = {"plan": (kept,), "ulysses": (kept, more)}.get(scheme, ())
    grads = run(SCHEMES[scheme][1](rank, dout, dlse, q, k, v, out, lse, *extra))
    return tuple(g.to(q.dtype).contiguous() for g in grads)
