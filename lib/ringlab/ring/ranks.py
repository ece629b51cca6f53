"""Attention over ranks: over a torch.distributed group by one custom operator a pass, or simulated in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels, local, patterns
from ..kernels.base import wide
from ..tracking import seen_inside
from . import schemes, ulysses
from .agree import agree
from .comm import drive, simulate
from .layout import Layout, named, parse
from .plan import Problem, plan_rank
from .rank import BlockRank, Rank

SCHEMES = {
    "plan": (schemes.plan_forward, schemes.plan_backward),
    "ring": (schemes.ring_forward, schemes.ring_backward),
    "all_gather": (schemes.all_gather_forward, schemes.all_gather_backward),
    "ulysses": (ulysses.ulysses_forward, ulysses.ulysses_backward),
}


@dataclass(frozen=True)
class Simulated:
    """``ranks`` simulated in this process: q, k, v are whole, sharded inside, and the result is whole."""

    ranks: int

    def __post_init__(self):
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int) or self.ranks < 1:
            raise ValueError(f"ranks must be a positive integer, got {self.ranks!r}")


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


def attend(q, k, v, pattern, *, causal, scale, backend, execution, group, scheme, layout):
    """out and lse for checked tensors: local shards over a group or 1-D mesh, whole ones over Simulated ranks."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))  # kernels take no other
    if isinstance(group, Simulated):
        over, ranks = local.outside_graphs(_simulated), group.ranks
    else:
        over, ranks = _over_group if local.IN_GRAPHS else local.outside_graphs(_over_group), process_group(group)
    return over(q, k, v, pattern, causal, scale, backend, execution, ranks, scheme, layout)


def _over_group(q, k, v, pattern, causal, scale, backend, execution, group, scheme, layout):
    p, shape = dist.get_world_size(group), (q.shape[1], q.shape[2], k.shape[2])
    texts = _texts(pattern, layout, p, dist.get_rank(group), shape, causal, scheme, execution)
    if p == 1:
        return local.attend(q, k, v, pattern, causal=causal, scale=scale, backend=backend, execution=execution)
    names = ",".join(backend) if isinstance(backend, tuple) else backend
    return ranks_forward(q, k, v, group.group_name, causal, scale, names, *texts)[:2]


def _texts(pattern, layout, p: int, rank: int, shape, causal: bool, scheme: str, execution) -> tuple[str, ...]:
    """Pattern, layout, scheme, execution as the operators take them, checked; ``shape``: rows, heads, K/V heads."""
    rows, heads, kv_heads = shape
    found = named(layout, rows if isinstance(layout, Layout) else rows * p, p)
    problem = _checked(pattern, found, causal, heads, kv_heads, found.size(rank), rows)
    one_by_one(execution, p)
    return json.dumps(pattern.to_dict()), str(found), _scheme(problem, scheme), execution.text()


# Python objects and shapes in, strings out: nothing that a compiler must trace. This is torch.compiler's
# ``assume_constant_result``, which would load the compiler here and now.
_texts._dynamo_marked_constant = True


def one_by_one(execution, p: int) -> None:
    """Raise NotImplementedError where results should be joined at once that come to a rank one after another."""
    if p > 1 and execution.merge == "fused":
        raise NotImplementedError(f"merge='fused' joins the results of one device, not what {p} ranks exchange")


def _checked(pattern, layout: Layout, causal: bool, heads: int, kv_heads: int, want: int, have: int) -> Problem:
    if have != want:
        raise ValueError(f"the layout has {want} positions here, q has {have}")
    return Problem(pattern, layout, causal, heads, kv_heads)


def _scheme(problem: Problem, scheme: str) -> str:
    if scheme != "auto" and scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}; known: auto, {', '.join(SCHEMES)}")
    scheme = choose(problem).scheme if scheme == "auto" else scheme
    problem.check(scheme)
    return scheme


def _simulated(q, k, v, pattern, causal, scale, backend, execution, p: int, scheme, layout):
    found = named(layout, q.shape[1], p)
    problem = _checked(pattern, found, causal, q.shape[2], k.shape[2], found.n, q.shape[1])
    scheme = _scheme(problem, scheme)
    if p > 1:
        one_by_one(execution, p)
        return _Simulation.apply(q, k, v, problem, scheme, scale, backend, execution)
    along = found.grid is not None
    q, k, v = (found.shard(t, 0) if along else t for t in (q, k, v))
    out, lse = local.attend(q, k, v, pattern, causal=causal, scale=scale, backend=backend, execution=execution)
    return (found.unshard([out]), found.unshard([lse], 2)) if along else (out, lse)


def group_size(group) -> int:
    """The ranks of a ProcessGroup, a 1-D DeviceMesh or Simulated ones."""
    return group.ranks if isinstance(group, Simulated) else dist.get_world_size(process_group(group))


def process_group(group) -> dist.ProcessGroup:
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a 1-D mesh, got one of {group.ndim} dimensions; take one, as mesh['sp']")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group: new_group gave it no part")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or ringlab.Simulated, got {group!r}")
    return group


def _rank(problem: Problem, rank: int, q: Tensor, scale: float, backend, backward: bool, execution) -> Rank:
    found = kernels.choose(q.device, q.dtype, q.shape[3], causal=problem.causal, backward=backward, backend=backend)
    kind = BlockRank if isinstance(problem.pattern, patterns.BlockSparse) else Rank
    return kind(problem, rank, execution.tiled(found.kernel), scale, execution)


class _Simulation(torch.autograd.Function):
    """All ranks in this process, in step."""

    @staticmethod
    def forward(ctx, q, k, v, problem, scheme, scale, backend, execution):
        layout, (flip, positive) = problem.layout, local.positive_scale(scale)
        needs = any(ctx.needs_input_grad)
        ranks = [_rank(problem, i, q, positive, backend, needs, execution) for i in range(layout.ranks)]
        shards = [[layout.shard(t, i) for t in (flip(q), k, v)] for i in range(layout.ranks)]
        found = simulate([SCHEMES[scheme][0](r, *mine) for r, mine in zip(ranks, shards)])
        out, lse = (layout.unshard([each[i] for each in found], dim) for i, dim in ((0, 1), (1, 2)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *(t for each in found for t in each[2:]))
        ctx.rest = ranks, SCHEMES[scheme][1], flip
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, out, lse, *kept = ctx.saved_tensors
        ranks, backward, flip = ctx.rest
        layout, size = ranks[0].problem.layout, len(kept) // len(ranks)
        dout = torch.zeros_like(out) if dout is None else dout
        steps = []
        for i, rank in enumerate(ranks):
            mine = [layout.shard(t, i) for t in (flip(q), k, v, out)]
            g = None if dlse is None else layout.shard(dlse, i, 2)
            more = (layout.shard(lse, i, 2), *kept[size * i : size * (i + 1)])
            steps.append(backward(rank, layout.shard(dout, i), g, *mine, *more))
        grads = simulate(steps)
        dq, dk, dv = (layout.unshard([each[i] for each in grads]).to(q.dtype) for i in range(3))
        return flip(dq), dk, dv, None, None, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# over a group: one operator a pass, so that a compiler sees no communication and checkpointing can keep its results

_agreed: WeakKeyDictionary = WeakKeyDictionary()  # process group -> the problems that its ranks were found to share


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


@cache
def _problem(pattern: str, layout: str, causal: bool, heads: int, kv_heads: int) -> Problem:
    return Problem(patterns.from_dict(json.loads(pattern)), parse(layout), causal, heads, kv_heads)


def _backend(names: str):
    return tuple(names.split(",")) if "," in names else names


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


@torch.library.custom_op("ringlab::ranks_forward", mutates_args=())
def ranks_forward(
    q: Tensor, k: Tensor, v: Tensor, group: str, causal: bool, scale: float, backend: str, pattern: str, layout: str,
    scheme: str, execution: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse and what the backward needs of others' rows (up to two tensors), for one rank of a group."""
    problem, pg = _problem(pattern, layout, causal, q.shape[2], k.shape[2]), _group(group)
    flip, positive = local.positive_scale(scale)
    rank = _rank(problem, dist.get_rank(pg), q, positive, _backend(backend), True, local.named(execution))
    same = {"scheme": scheme, "batch": q.shape[0], "head_dim": q.shape[3], "dtype": q.dtype, "scale": scale,
            "backend": backend}  # fmt: skip
    known, key = _agreed.setdefault(pg, set()), (problem, *same.values())
    if key not in known:
        drive(agree(rank.plan, same, q.device), pg)
        known.add(key)
    with torch.autocast(q.device.type, enabled=False), seen_inside():
        return forward_of(rank, scheme, flip(q), k, v, lambda steps: drive(steps, pg))


@ranks_forward.register_fake
def _(q, k, v, group, causal, scale, backend, pattern, layout, scheme, execution):
    problem, rank = _problem(pattern, layout, causal, q.shape[2], k.shape[2]), dist.get_rank(_group(group))
    (b, s, h, d), n = q.shape, problem.layout.n
    kept = q.new_empty(0), q.new_empty(0)
    if scheme == "plan":
        kept = k.new_empty(sum(plan_rank(problem, rank).received), 2, b, d), kept[1]
    elif scheme == "ulysses":
        share = ulysses.shares(h, k.shape[2], problem.layout.ranks)[rank]
        size = 2 * (len(share.queries) + len(share.keys)) * b * n * d
        kept = q.new_empty(size), q.new_empty(b, len(share.queries), n, dtype=wide(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(b, h, s, dtype=wide(q.dtype)), *kept


@torch.library.custom_op("ringlab::ranks_backward", mutates_args=())
def ranks_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    more: Tensor, group: str, causal: bool, scale: float, backend: str, pattern: str, layout: str, scheme: str,
    execution: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of one rank's shards."""
    problem, pg = _problem(pattern, layout, causal, q.shape[2], k.shape[2]), _group(group)
    flip, positive = local.positive_scale(scale)
    rank = _rank(problem, dist.get_rank(pg), q, positive, _backend(backend), True, local.named(execution))
    tensors = (dout, dlse, flip(q), k, v, out, lse, kept, more)
    with torch.autocast(q.device.type, enabled=False), seen_inside():
        dq, dk, dv = backward_of(rank, scheme, *tensors, lambda steps: drive(steps, pg))
    return flip(dq), dk, dv


@ranks_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, *ctx.rest = inputs
    out, lse, kept, more = output
    ctx.execution = local.named(ctx.rest[-1])  # its objects stay until the backward, which finds them by their text
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, kept, more)


def _backward(ctx, dout, dlse, *_):
    saved = ctx.saved_tensors
    if dout is None and dlse is None:  # the other ranks go through their backward, so this one does too
        dout = torch.zeros_like(saved[3])
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    return *ranks_backward(dout, dlse, *saved, *ctx.rest), *[None] * 8


ranks_forward.register_autograd(_backward, setup_context=_setup)
