"""Attention over ranks: over a torch.distributed group, or simulated in this process."""

from __future__ import annotations

import json

import torch.distributed as dist

from .. import local
from ..checks import known, shown
from .layout import Layout, named
from .operators import ranks_forward
from .passes import SCHEMES, choose
from .plan import Problem
from .simulated import Simulated, Simulation


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
    found = named(layout, layout.n if isinstance(layout, Layout) else rows * p, p)
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
    known("scheme", scheme, ("auto", *SCHEMES))
    scheme = choose(problem).scheme if scheme == "auto" else scheme
    problem.check(scheme)
    return scheme


def _simulated(q, k, v, pattern, causal, scale, backend, execution, p: int, scheme, layout):
    found = named(layout, q.shape[1], p)
    problem = _checked(pattern, found, causal, q.shape[2], k.shape[2], found.n, q.shape[1])
    scheme = _scheme(problem, scheme)
    if p > 1:
        one_by_one(execution, p)
        return Simulation.apply(q, k, v, problem, scheme, scale, backend, execution)
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
        raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or ringlab.Simulated, got {shown(group)}")
    return group
