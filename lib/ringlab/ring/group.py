"""Ranks compare what they are about to do before the first exchange: a wrong one would complete, with garbage.

Attention over a torch.distributed group: one custom operator a pass, so that a compiler sees no communication and
checkpointing can keep its results.

All ranks simulated in one process: the same steps, with messages handed over instead of sent.

Attention over ranks: over a torch.distributed group, or simulated in this process.

The ranks that share a sequence, whether each is a process of a group or all are simulated in this one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import engine, patterns
from ..checks import check_choice, check_int, short_repr
from ..engine.autograd import IN_GRAPHS, local_attention, outside_graphs, positive_scale
from ..kernels.base import accumulation_dtype
from ..tracking import seen_inside
from . import schemes
from .comm import AllToAll, Post, Steps, Wait, drive, simulate
from .exchange import Problem, RankPlan, digest, plan_rank, text_digest
from .layout import Layout, layout_named, parse
from .schemes import SCHEMES, backward_of, choose, forward_of, rank_of

BYTES = 24  # to each other rank where all agree: two digests and a verdict


class PlanMismatch(RuntimeError):
    """Ranks disagree about what is computed or which rows move; ``rank`` differs from the others, if one does."""

    def __init__(self, said: str, rank: int | None = None):
        super().__init__(said)
        self.rank = rank


def agree(plan: RankPlan, same: dict | None = None, device=None) -> Steps:
    """Compare, for every pair of ranks, digests of the problem and of the rows to be sent and expected.

    ``same``: what else must be equal on all ranks, by name. All ranks raise PlanMismatch together, so that none waits
    in vain; it says which field differs and on which rank.
    """
    p = plan.problem.layout.ranks
    fields = _fields(plan.problem) | {name: str(value) for name, value in (same or {}).items()}
    problem = text_digest(json.dumps(fields))
    mine = torch.tensor([[problem, digest(blocks)] for blocks in plan.send], device=device)  # (p, 2)
    theirs = yield from _to_all(mine)
    expected = [[problem, digest(blocks)] for blocks in plan.receive]
    wrong = [j for j, found in enumerate(theirs.tolist()) if found != expected[j]]
    verdicts = yield from _to_all(torch.tensor([wrong[0] if wrong else -1] * p, device=device))
    bad = [(receiver, sender) for receiver, sender in enumerate(verdicts.tolist()) if sender >= 0]
    if bad:
        texts = yield from _texts_of_ranks(json.dumps(fields), p, device)
        raise _mismatch([json.loads(text) for text in texts], bad)


def _fields(problem) -> dict[str, str]:
    return {
        "pattern": str(problem.pattern), "layout": str(problem.layout), "causal": str(problem.causal),
        "heads": f"{problem.heads} / {problem.kv_heads}",
    }  # fmt: skip


def _to_all(rows: torch.Tensor) -> Steps:
    """Row j of ``rows`` to rank j; what the ranks sent, by rank."""
    received, ones = torch.empty_like(rows), [1] * len(rows)
    yield Wait((yield Post(AllToAll(rows, ones, received, ones))))
    return received


def _texts_of_ranks(text: str, p: int, device) -> Steps:
    """A text of each rank; only ranks that disagree come here."""
    data = list(text.encode())
    lengths = yield from _to_all(torch.tensor([len(data)] * p, device=device))
    received = [int(length) for length in lengths]
    send, into = (torch.empty(n, dtype=torch.uint8, device=device) for n in (p * len(data), sum(received)))
    send.copy_(torch.tensor(data * p, dtype=torch.uint8))
    yield Wait((yield Post(AllToAll(send, [len(data)] * p, into, received))))
    return [bytes(part.tolist()).decode() for part in into.cpu().split(received)]


def _mismatch(fields: list[dict[str, str]], bad: list[tuple[int, int]]) -> PlanMismatch:
    """Who differs from whom: by a field that the ranks state, else by the rows that move between them."""
    for name in fields[0]:
        values = [each.get(name) for each in fields]
        (common, times), *others = Counter(values).most_common()
        if not others:
            continue
        odd = [rank for rank, value in enumerate(values) if value != common]
        if times == others[0][1]:  # as many say this as that
            said = ", ".join(f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values))
            return PlanMismatch(f"ranks disagree about what is computed: {name} is {said}")
        found = ", ".join(f"{values[rank]} on rank {rank}" for rank in odd)
        return PlanMismatch(
            f"ranks disagree about what is computed: {name} is {found}, {common} on the others",
            odd[0] if len(odd) == 1 else None,
        )
    pairs = ", ".join(f"rank {sender} against rank {receiver}" for receiver, sender in bad)
    (most, times), *others = Counter(rank for pair in bad for rank in pair).most_common()
    alone = most if not others or times > others[0][1] else None
    return PlanMismatch(f"ranks disagree about which rows move: {pairs}", alone)


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
    flip, positive = positive_scale(scale)
    rank = rank_of(problem, dist.get_rank(pg), q, positive, _backend(backend), True, execution.named(execution))
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
        share = schemes.shares(h, k.shape[2], problem.layout.ranks)[rank]
        size = 2 * (len(share.queries) + len(share.keys)) * b * n * d
        kept = q.new_empty(size), q.new_empty(b, len(share.queries), n, dtype=accumulation_dtype(q.dtype))
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(b, h, s, dtype=accumulation_dtype(q.dtype)),
        *kept,
    )


@torch.library.custom_op("ringlab::ranks_backward", mutates_args=())
def ranks_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    more: Tensor, group: str, causal: bool, scale: float, backend: str, pattern: str, layout: str, scheme: str,
    execution: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of one rank's shards."""
    problem, pg = _problem(pattern, layout, causal, q.shape[2], k.shape[2]), _group(group)
    flip, positive = positive_scale(scale)
    rank = rank_of(problem, dist.get_rank(pg), q, positive, _backend(backend), True, execution.named(execution))
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
    ctx.execution = engine.execution_of(
        ctx.rest[-1]
    )  # its objects stay until the backward, which finds them by their text
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, kept, more)


def _backward(ctx, dout, dlse, *_):
    saved = ctx.saved_tensors
    if dout is None and dlse is None:  # the other ranks go through their backward, so this one does too
        dout = torch.zeros_like(saved[3])
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    return *ranks_backward(dout, dlse, *saved, *ctx.rest), *[None] * 8


ranks_forward.register_autograd(_backward, setup_context=_setup)


@dataclass(frozen=True)
class Simulated:
    """``ranks`` simulated in this process: q, k, v are whole, sharded inside, and the result is whole."""

    ranks: int

    def __post_init__(self):
        check_int("ranks", self.ranks)


class Simulation(torch.autograd.Function):
    """All ranks in this process, in step."""

    @staticmethod
    def forward(ctx, q, k, v, problem, scheme, scale, backend, execution):
        layout, (flip, positive) = problem.layout, positive_scale(scale)
        needs = any(ctx.needs_input_grad)
        ranks = [rank_of(problem, i, q, positive, backend, needs, execution) for i in range(layout.ranks)]
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


def attend(q, k, v, pattern, *, causal, scale, backend, execution, group, scheme, layout):
    """out and lse for checked tensors: local shards over a group or 1-D mesh, whole ones over Simulated ranks."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))  # kernels take no other
    if isinstance(group, Simulated):
        over, ranks = outside_graphs(_simulated), group.ranks
    else:
        over, ranks = _over_group if IN_GRAPHS else outside_graphs(_over_group), process_group(group)
    return over(q, k, v, pattern, causal, scale, backend, execution, ranks, scheme, layout)


def _over_group(q, k, v, pattern, causal, scale, backend, execution, group, scheme, layout):
    p, shape = dist.get_world_size(group), (q.shape[1], q.shape[2], k.shape[2])
    texts = _texts(pattern, layout, p, dist.get_rank(group), shape, causal, scheme, execution)
    if p == 1:
        return local_attention(q, k, v, pattern, causal=causal, scale=scale, backend=backend, execution=execution)
    names = ",".join(backend) if isinstance(backend, tuple) else backend
    return ranks_forward(q, k, v, group.group_name, causal, scale, names, *texts)[:2]


def _texts(pattern, layout, p: int, rank: int, shape, causal: bool, scheme: str, execution) -> tuple[str, ...]:
    """Pattern, layout, scheme, execution as the operators take them, checked; ``shape``: rows, heads, K/V heads."""
    rows, heads, kv_heads = shape
    found = layout_named(layout, layout.n if isinstance(layout, Layout) else rows * p, p)
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
    check_choice("scheme", scheme, ("auto", *SCHEMES))
    scheme = choose(problem).scheme if scheme == "auto" else scheme
    problem.check(scheme)
    return scheme


def _simulated(q, k, v, pattern, causal, scale, backend, execution, p: int, scheme, layout):
    found = layout_named(layout, q.shape[1], p)
    problem = _checked(pattern, found, causal, q.shape[2], k.shape[2], found.n, q.shape[1])
    scheme = _scheme(problem, scheme)
    if p > 1:
        one_by_one(execution, p)
        return Simulation.apply(q, k, v, problem, scheme, scale, backend, execution)
    along = found.grid is not None
    q, k, v = (found.shard(t, 0) if along else t for t in (q, k, v))
    out, lse = local_attention(q, k, v, pattern, causal=causal, scale=scale, backend=backend, execution=execution)
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
        raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh or ringlab.Simulated, got {short_repr(group)}")
    return group


_agreed_adaptive: WeakKeyDictionary = WeakKeyDictionary()  # process group -> what its ranks were found to share


@dataclass(frozen=True)
class World:
    """The ranks of a sequence; ``here`` are those of this process: one of a ``group``, or all, simulated (None).

    Tensors hold the rows of the ranks here, one behind the other.
    """

    ranks: int
    here: range
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, group) -> World | None:
        """None where there is one rank, or no group: all rows are here."""
        if group is None:
            return None
        if isinstance(group, Simulated):
            found = cls(group.ranks, range(group.ranks), None)
        else:
            group = process_group(group)
            rank = dist.get_rank(group)
            found = cls(dist.get_world_size(group), range(rank, rank + 1), group)
        return found if found.ranks > 1 else None

    def positions(self, rows: int, size: int) -> int:
        """The length of the sequence; ValueError unless shards end where blocks of ``size`` end."""
        n = rows if self.group is None else rows * self.ranks
        if n % (self.ranks * size):
            raise ValueError(f"every rank needs equally many whole blocks of {size}, got n = {n} on {self.ranks} ranks")
        return n

    def run(self, algorithms: list[Steps]) -> list:
        """What the algorithms of the ranks here return."""
        return simulate(algorithms) if self.group is None else [drive(each, self.group) for each in algorithms]

    def shards(self, t: Tensor | None, dim: int = 1) -> Sequence[Tensor | None]:
        """By rank here."""
        return [None] * len(self.here) if t is None else t.chunk(len(self.here), dim)

    def agree(self, problem: Problem, same: dict, device: torch.device) -> None:
        """Compare once what is about to be done, as in ``agree``: simulated ranks cannot differ."""
        if self.group is None:
            return
        known, key = _agreed_adaptive.setdefault(self.group, set()), (problem, *same.values())
        if key not in known:
            nothing = ((),) * self.ranks  # which rows move is asked for, later
            drive(agree(RankPlan(problem, self.here[0], nothing, nothing), same, device), self.group)
            known.add(key)
