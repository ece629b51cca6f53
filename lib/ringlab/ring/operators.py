"""Attention over a group of ranks: ``attend``, and the operators of torch behind it.

A forward or backward over several ranks is one custom operator, so that a compiler sees
no communication and checkpointing can save its results. An operator takes tensors,
numbers and texts: it finds the rest of its call by a name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .. import kernels
from ..checks import Backend, check_float_dtype
from ..engine import Execution
from ..engine.autograd import (
    LSE_COLUMNS,
    gradients_once,
    local_attention,
    positive_scale,
    requires_grad,
    with_sinks,
    without_autocast,
)
from ..engine.sinks import add_sinks_
from ..engine.ways import LocalCall
from ..kernels.base import accumulation_dtype
from ..torch_private import (
    IN_GRAPHS,
    constant_in_graphs,
)
from ..tracking import seen_inside
from .comm import drive
from .exchange import Problem, digest, on_hosts, plan_rank
from .group import (
    AnyGroup,
    Group,
    Simulated,
    refuse_transforms,
    shared_refusals,
    with_shared_refusals,
)
from .layout import Layout, layout_named
from .rank import Rank, rank_of
from .schemes import algorithms, check_problem, check_scheme
from .ulysses import MeshScheme, head_share, mesh_of
from .volume import choose


@dataclass(frozen=True, eq=False)
class RankCall:
    """All of a call but its group, tensors and scale. ``follows``: whether autograd
    records it.
    """

    name: str
    follows: bool
    problem: Problem
    scheme: str | MeshScheme
    backend: Backend
    softcap: float | None
    execution: Execution

    def ranks(
        self, group: Group, q: Tensor, scale: float, backward: bool, columns: int = 0
    ) -> tuple[list[Rank], Callable]:
        """The work of the ranks here, for a positive scale, and what makes q, and dq of
        its, one for that scale. ``columns``: by how many the heads will be wider.
        """
        problem = self.problem
        kernel = kernels.choose(
            q.device,
            q.dtype,
            q.shape[3] + columns,
            causal=problem.causal,
            backward=backward,
            backend=self.backend,
            softcap=self.softcap,
        ).kernel
        flip, scale = positive_scale(scale)
        if group.process_groups:
            problem = on_hosts(problem, self.scheme, group.hosts(q.device))
        return [
            rank_of(problem, rank, kernel, scale, self.execution) for rank in group.here
        ], flip


class Across(NamedTuple):
    """How ranks share a call, as the caller named it."""

    group: AnyGroup
    scheme: str | tuple[str, str]
    layout: str | Layout
    exchange_dtype: torch.dtype | None


@with_shared_refusals(lambda across, *_: across.group)
def attend(
    across: Across, q, k, v, sinks: Tensor | None, local: LocalCall
) -> tuple[Tensor, Tensor]:
    """Return out and lse for checked tensors: local shards over a group or mesh, whole
    ones over Simulated ranks.
    """
    group, scheme, layout, exchange_dtype = across
    compiling = torch.compiler.is_compiling()
    simulated = isinstance(group, Simulated)
    if compiling and (simulated or not IN_GRAPHS or not isinstance(scheme, str)):
        return torch.compiler.disable(attend)(across, q, k, v, sinks, local)
    if not compiling:
        refuse_transforms(q, k, v)  # operators know of none
    # Kernels read a row of head_dim as it lies in memory.
    q, k, v = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v)]
    machines, group = group.machines if simulated else 1, Group.of(group, dimensions=2)
    check_exchange_dtype(exchange_dtype, q.dtype)
    follows = torch.is_grad_enabled() and requires_grad(q, k, v, sinks)
    scheme, width = check_scheme(scheme, group.shape), None
    if scheme == "auto":
        width = q.shape[3], q.dtype, "fwd+bwd" if follows else "fwd"
    scale = local.scale
    key = (
        follows,
        local.backend,
        local.softcap,
        local.execution,
        group.process_groups,
        local.pattern,
        layout,
        scheme,
        local.causal,
        exchange_dtype,
        (*q.shape[1:3], k.shape[2]),
        width,
        group.size,
        machines,
    )
    if compiling:
        name = _name_in_graph(*key)
    else:
        call = _call(*key)
        if simulated and not follows and group.size > 1:
            return forward(call, group, q, k, v, sinks, scale, operator=False)[:2]
        call = _calls.setdefault(call.name, call)  # until the operator has found it
        name = call.name
    if group.size > 1:
        return ranks_forward(q, k, v, sinks, scale, group.name, name)[:2]
    if not simulated or call.problem.layout.grid is None:
        return local_attention(q, k, v, sinks, local)
    layout = call.problem.layout  # the pattern runs along the curve
    shards = (layout.shard(t, 0) for t in (q, k, v))
    out, lse = local_attention(*shards, sinks, local)
    return layout.unshard([out]), layout.unshard([lse], 2)


def check_exchange_dtype(value, dtype: torch.dtype) -> None:
    """Raise ValueError unless rows of a dtype can travel as ``value``: None, that dtype
    or a narrower one.
    """
    if value is not None and value is not dtype:
        check_float_dtype(value)
        if value.itemsize >= dtype.itemsize:
            raise ValueError(
                f"exchange_dtype must be narrower than {dtype}, got {value}"
            )


def check_one_device(scheme, layout, exchange_dtype=None) -> None:
    """Raise ValueError for an unknown scheme, and for what is for several ranks,
    without a group.
    """
    if not isinstance(scheme, tuple | list):
        check_scheme(scheme)
    for argument, is_given in (
        ("a scheme", scheme != "auto"),
        ("an exchange_dtype", exchange_dtype is not None),
        ("a layout", not isinstance(layout, str) or layout != "contiguous"),
    ):
        if is_given:
            raise ValueError(
                f"{argument} is for several ranks: give a group, or ringlab.Simulated(p)"
            )


def _call(
    follows, backend, softcap, execution, process_groups, pattern, layout, *key
) -> RankCall:
    """The call, checked; ``key``: what more ``_problem`` takes."""
    if not isinstance(layout, str | Layout):
        layout_named(layout, 1, 1)  # raises
    rank = None
    if process_groups:
        group = Group.over(process_groups)
        group.keep_name()
        (rank,) = group.here
    problem, scheme, text = _problem(rank, pattern, layout, *key)
    # Of pools and caches the text has addresses, which are theirs alone: a call holds them.
    # With the rank, by which sizes differ: processes share compiled graphs by their texts.
    name = f"{text} {backend} {softcap} {execution.text} {rank} {follows}"
    return RankCall(name, follows, problem, scheme, backend, softcap, execution)


# Calls by name. Whoever passes a name on holds its call: the context of a backward, or
# for compiled graphs ``_compiled``, which keeps the last that were used.
_calls: WeakValueDictionary[str, RankCall] = WeakValueDictionary()
_compiled: OrderedDict[str, RankCall] = OrderedDict()
MOST_COMPILED = 4096


@lru_cache(maxsize=64)
def _problem(
    rank: int | None,
    pattern,
    layout,
    scheme: str | MeshScheme,
    causal: bool,
    exchange_dtype: torch.dtype | None,
    shape: tuple[int, int, int],
    width: tuple[int, torch.dtype, str] | None,
    ranks: int,
    machines: int,
) -> tuple[Problem, str | MeshScheme, str]:
    """Problem, scheme, and a text for both, checked. ``rank`` None: of all rows;
    ``shape``: rows, heads, K/V heads; ``width``: head_dim, dtype and passes, which
    decide between schemes, for "auto" alone.
    """
    rows, heads, kv_heads = shape
    n = (
        rows
        if rank is None
        else layout.n
        if isinstance(layout, Layout)
        else rows * ranks
    )
    layout = layout_named(layout, n, ranks)
    if rank is not None and layout.size(rank) != rows:
        raise ValueError(
            f"the layout has {layout.size(rank)} positions here, q has {rows}"
        )
    problem = Problem(
        pattern, layout, causal, heads, kv_heads, exchange_dtype=exchange_dtype
    )
    if scheme == "auto":
        head_dim, dtype, passes = width
        scheme = choose(problem, head_dim=head_dim, dtype=dtype, passes=passes)
    check_problem(problem, scheme)
    problem = on_hosts(
        problem, scheme, tuple(i * machines // ranks for i in range(ranks))
    )
    return problem, scheme, f"{digest(problem):x} {scheme}"


@constant_in_graphs
def _name_in_graph(*key) -> str:
    """The name of a call that lives as long as compiled graphs."""
    call = _call(*key)
    _compiled[call.name] = _calls.setdefault(call.name, call)
    if len(_compiled) > MOST_COMPILED:
        _compiled.popitem(last=False)
    return call.name


def _look_up(name: str, group: str) -> tuple[RankCall, Group]:
    """The call of a name, and the process group of a name or, of "", its simulated
    ranks.
    """
    call = _calls.get(name)
    if call is None:
        raise RuntimeError(
            f"a compiled graph's call is gone: more than {MOST_COMPILED} were compiled since; compile it again"
        )
    if name in _compiled:
        _compiled.move_to_end(name)
    if not group:
        return call, Group.of(Simulated(call.problem.layout.ranks))
    return call, Group.named(group)


def forward(
    call: RankCall,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    operator: bool = True,
) -> tuple[Tensor, Tensor, int, list[Tensor]]:
    """out, lse, the number of the call, and what else its backward needs, for one rank
    here after the other.

    q, k, v hold the rows of the ranks here. ``operator``: it is one, hence needs a
    kernel that has a backward.
    """
    ranks, flip = call.ranks(
        group, q, scale, operator
    )  # probes the kernel, which is no part of the call
    layout = call.problem.layout
    with seen_inside() if operator else nullcontext(), without_autocast(q):
        number = 0
        if group.process_groups:
            number = group.agree(
                "forward",
                ranks[0].problem,
                q,
                plan=lambda: ranks[0].plan,
                sinks=sinks is not None,
                requires_grad=call.follows,
                scheme=call.scheme,
                scale=scale,
                backend=call.backend,
                softcap=call.softcap,
            )
        shards = [group.split(t, 1, layout) for t in (flip(q), k, v)]
        steps = list(map(algorithms(call.scheme)[0], ranks, *shards))
        del shards  # a rank lets go of its own
        results = drive(steps, group)
        if sinks is not None:
            mesh = mesh_of(call.scheme, layout.ranks)
            for rank, (out, lse, *kept) in zip(group.here, results):
                add_sinks_(out, lse, sinks)
                if mesh is not None:  # its backward reads those of its heads
                    share = head_share(call.problem, mesh, rank)
                    if heads := share.queries[share.place]:
                        add_sinks_(*kept[3:5], sinks[heads.start : heads.stop])
        outs, lses, *saved = zip(*results)
        out = group.join(outs, 1, layout)
        lse = group.join(lses, 2, layout)
    return out, lse, number, [*chain(*zip(*saved))]


@torch.library.custom_op(
    "ringlab::ranks_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, str group, str name)"
    " -> (Tensor, Tensor, Tensor, Tensor[])",
)
def ranks_forward(q, k, v, sinks, scale, group, name):
    """As ``forward``, of the call and the group of a name."""
    out, lse, number, saved = forward(*_look_up(name, group), q, k, v, sinks, scale)
    return out, lse, torch.full((), number), saved


@ranks_forward.register_fake
def _(q, k, v, sinks, scale, group, name):
    (call, group), (b, s, h, d), saved = _look_up(name, group), q.shape, []
    layout = call.problem.layout
    broad = accumulation_dtype(q.dtype)
    for rank in group.here:
        problem = call.problem
        scheme = call.scheme
        if (mesh := mesh_of(scheme, layout.ranks)) is not None:
            share = head_share(problem, mesh, rank)
            rank = share.across.index(rank)
            n = share.problem.layout.size(rank)
            queries = len(share.queries[share.place])
            keys = len(share.keys[share.place])
            saved += [
                q.new_empty(b, n, heads, d) for heads in (queries, keys, keys, queries)
            ]
            saved.append(q.new_empty(b, queries, n, dtype=broad))
            problem = share.problem
            scheme = mesh.other
        if scheme == "plan":
            saved.append(k.new_empty(plan_rank(problem, rank).rows, 2, b, d))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return (
        out,
        q.new_empty(b, h, s, dtype=broad),
        torch.empty((), dtype=torch.long),
        saved,
    )


@torch.library.custom_op("ringlab::ranks_backward", mutates_args=())
def ranks_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    saved: list[Tensor],
    scale: float,
    group: str,
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the rows here; ``number`` and ``saved``, of all ranks here, are
    those of the forward.
    """
    call, group = _look_up(name, group)
    with seen_inside(), without_autocast(q), shared_refusals(group):
        columns = 0 if dlse is None else LSE_COLUMNS
        ranks, flip = call.ranks(group, q, scale, True, columns)
        group.agree(
            "backward",
            ranks[0].problem,
            q,
            int(number),
            scheme=call.scheme,
            scale=scale,
            backend=call.backend,
            softcap=call.softcap,
            **{"gradient of lse": dlse is not None},
        )
        layout = call.problem.layout
        reads = ((dout, 1), (dlse, 2), (flip(q), 1), (k, 1), (v, 1), (out, 1), (lse, 2))
        count = len(saved) // len(ranks)
        shards = [group.split(t, dim, layout) for t, dim in reads]
        shards += [saved[i::count] for i in range(count)]
        steps = list(map(algorithms(call.scheme)[1], ranks, *shards))
        del shards  # a rank lets go of its own
        gradients = drive(steps, group)
        dq, dk, dv = [
            group.join([g.to(q.dtype) for g in parts], 1, layout)
            for parts in zip(*gradients)
        ]
        return flip(dq), dk, dv


@ranks_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)
    )


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.group, name = inputs
    out, lse, number, saved = output
    ctx.call = _calls[name]  # lives until the backward has found it
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, number, *saved)


def _backward(ctx, dout, dlse, *_):
    q, k, v, sinks, out, lse, number, *saved = ctx.saved_tensors
    # Also without any gradient: the other ranks go through their backward.
    dout = torch.zeros_like(out) if dout is None else dout
    tensors = dout, dlse, q, k, v, sinks, out, lse, number
    call = saved, ctx.scale, ctx.group, ctx.call.name
    grads = gradients_once(with_sinks(ranks_backward), *tensors, *call)
    return *grads, None, None, None


ranks_forward.register_autograd(_backward, setup_context=_setup)
