"""Groups of ranks, and attention over them: a torch.distributed group, or ranks simulated in this process.

Over a process group a forward or backward is one custom operator, so that a compiler sees no communication and
checkpointing can save its results. Before it moves data it compares with the other ranks what is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..checks import check_choice, check_int, short_repr
from ..engine import Execution
from ..engine.autograd import IN_GRAPHS, local_attention, outside_graphs, positive_scale, without_autocast
from ..kernels.base import accumulation_dtype
from ..tracking import seen_inside
from .comm import AllToAll, Post, Steps, Wait, drive, simulate
from .exchange import Problem, RankPlan, digest, plan_rank
from .layout import Layout, layout_named
from .rank import Rank, rank_of
from .schemes import SCHEMES, choose, shares

# ---------------------------------------------------------------------------------------------------------------------
# groups


@dataclass(frozen=True)
class Simulated:
    """``ranks`` simulated in this process: q, k, v are whole, sharded inside, and the result is whole."""

    ranks: int

    def __post_init__(self):
        object.__setattr__(self, "ranks", check_int("ranks", self.ranks))


@dataclass(frozen=True)
class Group:
    """The ranks that share a sequence. ``here`` are the ranks of this process.

    With a process group that is one rank; without (None) it is all of them, simulated. Tensors hold the rows of the
    ranks here, one rank after the other.
    """

    size: int
    here: range
    process_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group) -> Group:
        """The group of a ProcessGroup, a 1-D DeviceMesh or Simulated ranks; raises TypeError for anything else."""
        if isinstance(group, Simulated):
            return cls(group.ranks, range(group.ranks))
        group = process_group(group)
        rank = dist.get_rank(group)
        return cls(dist.get_world_size(group), range(rank, rank + 1), group)

    @classmethod
    def sharing(cls, group) -> Group | None:
        """As ``of``; None if all rows are here: no group is given, or one of a single rank."""
        found = None if group is None else cls.of(group)
        return found if found is not None and found.size > 1 else None

    def run(self, algorithms: list[Steps]) -> list:
        """Run the algorithms of the ranks here, with those of all others; returns their results."""
        if self.process_group is None:
            return simulate(algorithms)
        return [drive(steps, self.process_group) for steps in algorithms]

    def split(self, t: Tensor | None, dim: int = 1) -> Sequence[Tensor | None]:
        """The equal shards of the ranks here."""
        return [None] * len(self.here) if t is None else t.chunk(len(self.here), dim)

    def agree(self, passes: str, problem: Problem, options: tuple, device, number: int = 0, plan=None) -> int:
        """Compare with the other ranks what a call computes, before it moves data; returns the call's number.

        ``options``: (name, value) pairs that must be equal as well. ``number``: of the forward, in its backward.
        ``plan()``: the RankPlan, which is compared if it is new to a rank. Raises PlanMismatch on all ranks.

        It costs one all-to-all of 24 bytes to each other rank, from CPU memory. The digest cannot travel with the data:
        data of unexpected size ends the process inside gloo. A group of NCCL alone compares only what is new to it,
        because reading the digests would stall the GPU.
        """
        if self.process_group is None:  # simulated ranks cannot differ
            return 0
        past = _history.setdefault(self.process_group, _History())
        past.calls += passes == "forward"
        number = number or past.calls
        stated, mine = _fields(passes, problem, options)
        on_cpu, new = "cpu:" in dist.get_backend_config(self.process_group), mine not in past.agreed
        if on_cpu or new:
            device = "cpu" if on_cpu else device
            theirs = self._to_all([[mine, number, new and plan is not None]] * self.size, device)
            if any(row[:2] != [mine, number] for row in theirs):
                raise _fields_differ(self._gather(stated | {"forward call": f"number {number}"}))
            if any(row[2] for row in theirs):
                self._compare_rows(plan(), device)
            past.agreed.add(mine)
        return number

    def _compare_rows(self, plan: RankPlan, device) -> None:
        """Compare, for every pair of ranks, the rows that one sends with those that the other expects."""
        theirs = self._to_all([digest(rows) for rows in plan.send], device)
        wrong = [sender for sender, rows in enumerate(plan.receive) if digest(rows) != theirs[sender]]
        bad = [(sender, rank) for rank, senders in enumerate(self._gather(wrong)) for sender in senders]
        if bad:
            pairs = ", ".join(f"rank {sender} against rank {receiver}" for sender, receiver in bad)
            (most, times), *others = Counter(rank for pair in bad for rank in pair).most_common()
            odd = most if not others or times > others[0][1] else None
            raise PlanMismatch(f"ranks disagree about which rows move: {pairs}", odd)

    def _to_all(self, rows: list, device) -> list:
        """Send integers, element j to rank j; returns what the ranks sent."""

        def steps() -> Steps:
            send, ones = torch.tensor(rows, device=device), [1] * self.size
            received = torch.empty_like(send)
            yield Wait((yield Post(AllToAll(send, ones, received, ones, control=True))))
            return received.tolist()

        return drive(steps(), self.process_group)

    def _gather(self, value) -> list:
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.process_group)
        return found


class PlanMismatch(RuntimeError):
    """Ranks disagree about what is computed or which rows move. ``rank`` differs from all others, if one does."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


@lru_cache(maxsize=256)
def _fields(passes: str, problem: Problem, options: tuple) -> tuple[dict[str, str], int]:
    """What all ranks must have equal, by name, and its digest."""
    found = {
        "pass": passes, "pattern": str(problem.pattern), "layout": str(problem.layout), "causal": str(problem.causal),
        "heads": f"{problem.heads} / {problem.kv_heads}",
    }  # fmt: skip
    found |= {name: str(value) for name, value in options}
    return found, digest(found)


def _fields_differ(fields: list[dict[str, str]]) -> PlanMismatch:
    """The first field that differs, and the rank that differs from all others, if one does."""
    name = next(name for name in fields[0] if len({each.get(name) for each in fields}) > 1)
    values = [each.get(name) for each in fields]
    (common, times), (_, next_times), *_ = Counter(values).most_common()
    if times == next_times:
        found, odd = ", ".join(f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values)), []
    else:
        odd = [rank for rank, value in enumerate(values) if value != common]
        found = ", ".join(f"{values[rank]} on rank {rank}" for rank in odd) + f", {common} on the others"
    message = f"ranks disagree about what is computed: {name} is {found}"
    return PlanMismatch(message, odd[0] if len(odd) == 1 else None)


@dataclass
class _History:
    """What a process group has computed: digests that its ranks agreed on, and the number of forward calls."""

    agreed: set[int] = field(default_factory=set)
    calls: int = 0


_history: WeakKeyDictionary[dist.ProcessGroup, _History] = WeakKeyDictionary()


def group_size(group) -> int:
    """The number of ranks of a ProcessGroup, a 1-D DeviceMesh or Simulated ranks."""
    return group.ranks if isinstance(group, Simulated) else dist.get_world_size(process_group(group))


def process_group(group) -> dist.ProcessGroup:
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a 1-D mesh, got one of {group.ndim} dimensions; take one, as mesh['sp']")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group: new_group gave it no part")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or ringlab.Simulated, got {short_repr(group)}")
    return group


# ---------------------------------------------------------------------------------------------------------------------
# attention


@dataclass(frozen=True, eq=False)
class _Call:
    """All of a call but its tensors and scale. Operators take its name, by which they find it."""

    name: str
    problem: Problem
    scheme: str
    backend: str | tuple[str, ...]
    execution: Execution

    def options(self, q: Tensor, scale: float) -> tuple:
        """What else all ranks must have equal."""
        return (
            ("scheme", self.scheme), ("batch", q.shape[0]), ("head_dim", q.shape[3]), ("dtype", q.dtype),
            ("scale", scale), ("backend", self.backend),
        )  # fmt: skip

    def ranks(self, group: Group, q: Tensor, scale: float, backward: bool) -> list[Rank]:
        """The work of the ranks here, by a kernel for tensors like q."""
        found = kernels.choose(q.device, q.dtype, q.shape[3], causal=self.problem.causal, backward=backward,
                               backend=self.backend)  # fmt: skip
        scale = positive_scale(scale)[1]
        return [rank_of(self.problem, rank, found.kernel, scale, self.execution) for rank in group.here]


_calls: WeakValueDictionary[str, _Call] = WeakValueDictionary()  # by name; whoever passes a name on holds its call
_compiled: set[_Call] = set()  # the calls of compiled graphs


@lru_cache(maxsize=64)
def _problem(
    pattern, layout, scheme: str, causal: bool, shape: tuple[int, int, int], ranks: int, rank: int | None
) -> tuple[Problem, str, str]:
    """Problem, scheme, and a text for both, checked. ``shape``: rows, heads, K/V heads; ``rank`` None: of all rows."""
    rows, heads, kv_heads = shape
    n = rows if rank is None else layout.n if isinstance(layout, Layout) else rows * ranks
    layout = layout_named(layout, n, ranks)
    if rank is not None and layout.size(rank) != rows:
        raise ValueError(f"the layout has {layout.size(rank)} positions here, q has {rows}")
    problem = Problem(pattern, layout, causal, heads, kv_heads)
    scheme = choose(problem).scheme if scheme == "auto" else scheme
    problem.check(scheme)
    return problem, scheme, f"{digest(problem):x} {scheme}"


def _call(q_shape, kv_heads: int, pattern, layout, scheme, causal, backend, group, execution) -> _Call:
    """The call, checked; ``group``: a ProcessGroup or Simulated."""
    check_choice("scheme", scheme, ("auto", *SCHEMES))
    if not isinstance(layout, str | Layout):
        layout_named(layout, 1, 1)  # raises
    ranks, rank = group_size(group), None
    if not isinstance(group, Simulated):
        rank, _groups[group.group_name] = dist.get_rank(group), group
    problem, scheme, text = _problem(pattern, layout, scheme, causal, (*q_shape[1:3], kv_heads), ranks, rank)
    check_merge(execution, ranks)
    name = f"{text} {backend} {id(execution)}"  # a call holds its execution, so that the id is its alone
    return _calls.setdefault(name, _Call(name, problem, scheme, backend, execution))


def check_merge(execution: Execution, ranks: int) -> None:
    """Raise NotImplementedError for the fused merge, since several ranks merge results as they come."""
    if ranks > 1 and execution.merge == "fused":
        raise NotImplementedError(f"merge='fused' joins the results of one device, not what {ranks} ranks exchange")


def attend(q, k, v, pattern, *, causal, scale, backend, execution, group, scheme, layout):
    """out and lse for checked tensors: local shards over a group or 1-D mesh, whole ones over Simulated ranks."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))  # kernels need that
    if isinstance(group, Simulated):
        over = outside_graphs(_over_simulated)
    else:
        over, group = _over_group if IN_GRAPHS else outside_graphs(_over_group), process_group(group)
    return over(q, k, v, pattern, layout, scheme, causal, scale, backend, group, execution)


# ---------------------------------------------------------------------------------------------------------------------
# over a process group


def _over_group(q, k, v, pattern, layout, scheme, causal, scale, backend, group, execution):
    about = (*q.shape,), k.shape[2], pattern, layout, scheme, causal, backend, group, execution
    if torch.compiler.is_compiling():
        name = _name_in_graph(*about)
    else:
        call = _call(*about)  # held until the operator has found it
        name = call.name
    if dist.get_world_size(group) == 1:
        return local_attention(q, k, v, pattern, causal=causal, scale=scale, backend=backend, execution=execution)
    return ranks_forward(q, k, v, scale, group.group_name, name)[:2]


def _name_in_graph(*about) -> str:
    """The name of a call that lives as long as compiled graphs."""
    call = _call(*about)
    _compiled.add(call)
    return call.name


# Python objects and shapes in, a string out: a compiler need not trace it. This is ``assume_constant_result`` of
# torch.compiler, without its import of the compiler.
_name_in_graph._dynamo_marked_constant = True

_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()  # by name


def _group(name: str) -> Group:
    # A private function of torch. It also knows a group that was made anew under the name since a graph was compiled.
    resolve = getattr(dist.distributed_c10d, "_resolve_process_group", _groups.get)
    return Group.of(resolve(name))


@torch.library.custom_op("ringlab::ranks_forward", mutates_args=())
def ranks_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, group: str, call: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out, lse, the number of the call, and what else its backward needs, for one rank of a group."""
    call, group = _calls[call], _group(group)
    [rank], tensors = call.ranks(group, q, scale, True), (positive_scale(scale)[0](q), k, v)
    number = group.agree("forward", call.problem, call.options(q, scale), q.device, plan=lambda: rank.plan)
    with seen_inside(), without_autocast(q):
        out, lse, *saved = drive(SCHEMES[call.scheme][0](rank, *tensors), group.process_group)
    return out.contiguous(), lse.contiguous(), torch.tensor(number), saved


@ranks_forward.register_fake
def _(q, k, v, scale, group, call):
    call, (rank,), (b, s, h, d) = _calls[call], _group(group).here, q.shape
    n, saved, broad = call.problem.layout.n, [], accumulation_dtype(q.dtype)
    if call.scheme == "plan":
        saved = [k.new_empty(sum(plan_rank(call.problem, rank).received), 2, b, d)]
    elif call.scheme == "ulysses":
        share = shares(h, k.shape[2], call.problem.layout.ranks)[rank]
        size = 2 * (len(share.queries) + len(share.keys)) * b * n * d
        saved = [q.new_empty(size), q.new_empty(b, len(share.queries), n, dtype=broad)]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(b, h, s, dtype=broad), torch.empty((), dtype=torch.long), saved


@torch.library.custom_op("ringlab::ranks_backward", mutates_args=())
def ranks_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: Tensor,
    saved: list[Tensor], scale: float, group: str, call: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of one rank's shards; ``number`` and ``saved`` are those of the forward."""
    call, group = _calls[call], _group(group)
    options = *call.options(q, scale), ("gradient of lse", dlse is not None)
    group.agree("backward", call.problem, options, q.device, int(number))
    [rank], flip = call.ranks(group, q, scale, True), positive_scale(scale)[0]
    tensors = dout, dlse, flip(q), k, v, out, lse, *saved
    with seen_inside(), without_autocast(q):
        grads = drive(SCHEMES[call.scheme][1](rank, *tensors), group.process_group)
    dq, dk, dv = (g.to(q.dtype).contiguous() for g in grads)
    return flip(dq), dk, dv


@ranks_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.group, name = inputs
    out, lse, number, saved = output
    ctx.call = _calls[name]  # lives until the backward has found it
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, number, *saved)


def _backward(ctx, dout, dlse, *_):
    q, k, v, out, lse, number, *saved = ctx.saved_tensors
    if dout is None:  # also without any gradient: the other ranks go through their backward, so this one does too
        dout = torch.zeros_like(out)
    how = ctx.scale, ctx.group, ctx.call.name
    return *ranks_backward(dout, dlse, q, k, v, out, lse, number, saved, *how), None, None, None


ranks_forward.register_autograd(_backward, setup_context=_setup)


# ---------------------------------------------------------------------------------------------------------------------
# over ranks simulated in this process


def _over_simulated(q, k, v, pattern, layout, scheme, causal, scale, backend, group, execution):
    call = _call(q.shape, k.shape[2], pattern, layout, scheme, causal, backend, group, execution)
    if group.ranks > 1:
        return _Simulation.apply(q, k, v, scale, call)
    layout = call.problem.layout
    along = layout.grid is not None
    q, k, v = (layout.shard(t, 0) if along else t for t in (q, k, v))
    out, lse = local_attention(q, k, v, pattern, causal=causal, scale=scale, backend=backend, execution=execution)
    return (layout.unshard([out]), layout.unshard([lse], 2)) if along else (out, lse)


class _Simulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, call):
        layout, (flip, _) = call.problem.layout, positive_scale(scale)
        whole = flip(q), k, v
        group = Group(layout.ranks, range(layout.ranks))
        ranks = call.ranks(group, q, scale, any(ctx.needs_input_grad))
        with without_autocast(q):
            forward, _ = SCHEMES[call.scheme]
            found = group.run([forward(rank, *(layout.shard(t, rank.rank) for t in whole)) for rank in ranks])
        out, lse = (layout.unshard([each[i] for each in found], dim) for i, dim in ((0, 1), (1, 2)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *(t for each in found for t in each[2:]))
        ctx.rest = call, group, ranks, flip
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 5
        q, k, v, out, lse, *saved = ctx.saved_tensors
        call, group, ranks, flip = ctx.rest
        layout, each = call.problem.layout, len(saved) // group.size
        dout = torch.zeros_like(out) if dout is None else dout
        whole, steps = ((dout, 1), (dlse, 2), (flip(q), 1), (k, 1), (v, 1), (out, 1), (lse, 2)), []
        for i, rank in enumerate(ranks):
            mine = [None if t is None else layout.shard(t, i, dim) for t, dim in whole]
            steps.append(SCHEMES[call.scheme][1](rank, *mine, *saved[each * i : each * (i + 1)]))
        with without_autocast(q):
            grads = group.run(steps)
        dq, dk, dv = (layout.unshard([parts[i] for parts in grads]).to(q.dtype) for i in range(3))
        return flip(dq), dk, dv, None, None
