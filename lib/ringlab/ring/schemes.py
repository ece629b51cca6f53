"""``SCHEMES``, by which ranks share attention. Each is the algorithm of one rank: a
generator of requests (``comm``).

A forward takes the shards q, k, v (b, s, h, d) and returns out, lse (b, h, s), and what
else its backward needs. A backward takes dout, dlse or None, q, k, v, out, lse and the
rest, and returns dq, dk, dv. No scheme saves the rows of a hop: the backward of each
call is exact with the final out and lse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import check_choice, short_repr
from ..engine.autograd import fold_lse_gradient
from ..kernels.base import accumulation_dtype
from .comm import AllToAll, Exchange, Steps, Wait, all_to_all
from .exchange import Problem, RankPlan
from .rank import Rank
from .ulysses import MeshScheme, head_share, ulysses_backward, ulysses_forward

# --------------------------------------------------------------------------------------
# plan: the rows that are seen, each once, by one all-to-all. A second one passes on, inside each host, what one rank
# received for others.


def plan_forward(rank: Rank, q, k, v) -> Steps:
    plan = rank.plan
    rows = k.new_empty(
        plan.rows, 2, q.shape[0], q.shape[3], dtype=plan.problem.exchange_dtype
    )
    direct = rows[: sum(plan.received)] if plan.problem.hosts else rows
    ticket = yield AllToAll(_packed(plan, k, v), plan.sent, direct, plan.received)
    out, lse = rank.local_forward(q, k, v)
    yield Wait(ticket)
    del ticket  # it holds the rows sent
    if plan.problem.hosts:
        received, sent = plan.passing
        index = rank.goes_on(rows.device)
        yield Wait(
            (
                yield AllToAll(
                    direct.index_select(0, index), sent, rows[len(direct) :], received
                )
            )
        )
    rows = rows.to(k.dtype)
    del direct
    if len(rows):
        rank.add_forward(None, q, rank.keys(rows), out, lse)
    return out, lse, rows


def _packed(plan: RankPlan, k: Tensor, v: Tensor) -> Tensor:
    """The rows to send (R, 2, b, d), by destination, in the dtype of the exchange."""
    rows = k.new_empty(
        sum(plan.sent), 2, k.shape[0], k.shape[3], dtype=plan.problem.exchange_dtype
    )
    for part, shard_rows in plan.pairs(rows, k, v):
        part.copy_(shard_rows)
    return rows


def plan_backward(rank: Rank, dout, dlse, q, k, v, out, lse, rows) -> Steps:
    plan = rank.plan
    d = q.shape[3]
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
    direct = d_rows
    if plan.problem.hosts:
        received, sent = plan.passing
        direct, passed = d_rows.tensor_split([sum(plan.received)])
        back = yield from all_to_all(passed, received, sent)
        onward = rank.goes_on(rows.device).split(sent)
        for index, part in zip(onward, back.split(sent)):
            # Each row once, so that the order of sums is fixed.
            direct.index_add_(0, index, part)
    home = d_rows.new_empty(sum(plan.sent), *d_rows.shape[1:])
    ticket = yield AllToAll(direct, plan.received, home, plan.sent)
    local = rank.local_backward(dout, q, k, v, out, lse)
    dq += local[0]
    yield Wait(ticket)
    for part, shard_rows in plan.pairs(home, *local[1:]):
        shard_rows.add_(part)
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
    p = rank.problem.layout.ranks
    me = rank.rank
    hops = rank.problem.hops
    exchange = Exchange()
    incoming = None
    if hops[(me - t + 1) % p] >= t:
        exchange.send[(me + 1) % p] = current
    if hops[(me - t) % p] >= t:
        incoming = exchange.receive[(me - 1) % p] = _shard(rank, (me - t) % p, k)
    return exchange, incoming


def ring_forward(rank: Rank, q, k, v) -> Steps:
    p = rank.problem.layout.ranks
    current = (k.contiguous(), v.contiguous())
    for t in range(p):
        exchange, incoming = _hop(rank, t + 1, current, k)
        ticket = yield exchange
        if t == 0:
            out, lse = rank.local_forward(q, k, v)
            out = out.to(accumulation_dtype(out.dtype))
        elif current is not None:
            rank.add_forward((rank.rank - t) % p, q, current, out, lse)
        yield Wait(ticket)
        del exchange, ticket  # both hold what was sent, and the next step receives
        current = incoming
    return out.to(q.dtype), lse


def ring_backward(rank: Rank, dout, dlse, q, k, v, out, lse) -> Steps:
    """dK and dV of a shard follow it one hop behind, and return to its owner from the
    last rank that used it.
    """
    p = rank.problem.layout.ranks
    me = rank.rank
    hops = rank.problem.hops
    d = q.shape[3]
    dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    dtype = accumulation_dtype(k.dtype)
    travelling = None
    home = None
    exchange, incoming = _hop(rank, 1, (k.contiguous(), v.contiguous()), k)
    ticket = yield exchange
    total = rank.local_backward(dout, q, k, v, out, lse)
    gradients = yield Exchange()
    yield Wait(ticket)
    for t in range(1, p):
        current = incoming
        source = (me - t) % p
        onward = Exchange()
        exchange, incoming = _hop(rank, t + 1, current, k)
        ticket = yield exchange
        if current is not None:
            gradient_shard = _shard(rank, source, k, dtype, torch.Tensor.new_zeros)
            rank.add_backward(
                source, (dout, q, out, lse), current, total[0], gradient_shard
            )
        yield Wait(gradients)
        if current is not None:
            for a, b in zip(gradient_shard, travelling or ()):
                a += b
            onward.send[(me + 1) % p if hops[source] > t else source] = gradient_shard
        travelling = None
        if incoming is not None:
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
    p = rank.problem.layout.ranks
    me = rank.rank
    dtype = accumulation_dtype(k.dtype)
    d = q.shape[3]
    dout, q, k, v, out, lse = fold_lse_gradient(dout, q, k, v, out, lse, dlse)
    exchange = _gather(rank, k, v)
    ticket = yield exchange
    total = rank.local_backward(dout, q, k, v, out, lse)
    yield Wait(ticket)
    for t in range(
        1, p
    ):  # one pair of ranks at a time, so that only two foreign gradients are held
        to = (me + t) % p
        source = (me - t) % p
        part = _shard(rank, to, k, dtype, torch.Tensor.new_zeros)
        incoming = _shard(rank, me, k, dtype)
        rank.add_backward(
            to, (dout, q, out, lse), exchange.receive.pop(to), total[0], part
        )
        yield Wait((yield Exchange({to: part}, {source: incoming})))
        for a, b in zip(total[1:], incoming):
            a += b
    return tuple(t[..., :d] for t in total)


SCHEMES: dict[str, tuple[Callable[..., Steps], ...]] = {
    "plan": (plan_forward, plan_backward),
    "ring": (ring_forward, ring_backward),
    "all_gather": (all_gather_forward, all_gather_backward),
    "ulysses": (ulysses_forward, ulysses_backward),
}


def algorithms(scheme: str | MeshScheme) -> tuple:
    """The forward and the backward of a scheme."""
    if isinstance(scheme, str):
        return SCHEMES[scheme]
    pairs = zip(SCHEMES["ulysses"], SCHEMES[scheme.other])
    return tuple(partial(outer, mesh=scheme, inner=inner) for outer, inner in pairs)


def check_problem(
    problem: Problem, scheme: str | MeshScheme, length: bool = True
) -> None:
    """Raise ValueError if a scheme does not support the problem; ``length``: also if
    its length does not fit.
    """
    if isinstance(scheme, str):
        return problem.check(scheme, length)
    ulysses = len(scheme.heads_line(0))
    if ulysses > problem.heads:
        raise ValueError(
            f"{ulysses} ranks along ulysses are more than {problem.heads} heads of one pattern: put more of them along"
            " the other dimension of the mesh"
        )
    problem.check("ulysses", length)
    if len(scheme.sequence_line(0)) > 1:
        head_share(problem, scheme, 0).problem.check(scheme.other, length)


def check_scheme(scheme, shape: tuple[int, int] | None = None) -> str | MeshScheme:
    """A scheme as a caller names it, for a group of one dimension or a mesh of this
    shape. Raises ValueError for one that is unknown or does not fit.
    """
    if shape is None and not isinstance(scheme, tuple | list):
        check_choice("scheme", scheme, ("auto", *SCHEMES))
        return scheme
    if shape is None:
        raise ValueError(
            f"the scheme {short_repr(scheme)} needs a group of two dimensions: a 2-D mesh, or Simulated((2, 3))"
        )
    others = [name for name in SCHEMES if name != "ulysses"]
    names = tuple(scheme) if isinstance(scheme, tuple | list) else ()
    if len(names) != 2 or "ulysses" not in names or not {*names} & {*others}:
        raise ValueError(
            f"a 2-D mesh takes a scheme for each dimension, 'ulysses' and one of {', '.join(others)}, got"
            f" {short_repr(scheme)}; or take one dimension, as mesh['sp']"
        )
    return MeshScheme(names, shape)
