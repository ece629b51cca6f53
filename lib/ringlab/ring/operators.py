"""Attention over a torch.distributed group: one custom operator a pass, so that a compiler sees no communication and
checkpointing can keep its results."""

from __future__ import annotations

import json
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import local, patterns
from ..kernels.base import wide
from ..tracking import seen_inside
from . import ulysses
from .agree import agree
from .comm import drive
from .layout import parse
from .passes import backward_of, forward_of, rank_of
from .plan import Problem, plan_rank

_agreed: WeakKeyDictionary = WeakKeyDictionary()  # process group -> the problems that its ranks were found to share


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


@cache
def _problem(pattern: str, layout: str, causal: bool, heads: int, kv_heads: int) -> Problem:
    return Problem(patterns.from_dict(json.loads(pattern)), parse(layout), causal, heads, kv_heads)


def _backend(names: str):
    return tuple(names.split(",")) if "," in names else names


@torch.library.custom_op("ringlab::ranks_forward", mutates_args=())
def ranks_forward(
    q: Tensor, k: Tensor, v: Tensor, group: str, causal: bool, scale: float, backend: str, pattern: str, layout: str,
    scheme: str, execution: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse and what the backward needs of others' rows (up to two tensors), for one rank of a group."""
    problem, pg = _problem(pattern, layout, causal, q.shape[2], k.shape[2]), _group(group)
    flip, positive = local.positive_scale(scale)
    rank = rank_of(problem, dist.get_rank(pg), q, positive, _backend(backend), True, local.named(execution))
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
    rank = rank_of(problem, dist.get_rank(pg), q, positive, _backend(backend), True, local.named(execution))
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
