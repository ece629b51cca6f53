"""What ranks run under NCCL's contract: over its double here, over NCCL where there are
GPUs. Importable by name, so that other processes find it.
"""

import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from content_cases import shard_of, step, tensors
from matrix import BLOCK_SPARSE, LADDER, Case, Dense, Dilated, drawn, fits
from nccl_double import IN_FLIGHT, Violation, become_gpu, held, idle, nccl_group
from ring_cases import told
from ringlab import KVCache, attention
from ringlab.ring import (
    SCHEMES,
    comm,
    contiguous,
    counting,
    hilbert,
    schemes,
    striped,
    uneven,
    zigzag,
)
from ringlab.ring.comm import AllToAll, Exchange, Wait, drive
from ringlab.ring.group import Group
from torch.utils._pytree import tree_map_only

N = 53
PATTERNS = [
    Dense(),
    LADDER,
    Dilated([20, 30, 70], [1, 2, 3], "head_groups", "branch"),
    *BLOCK_SPARSE[:2],
]


def attention_cases(ranks: int) -> list[Case]:
    """Every scheme with every pattern that it serves; the rest is drawn in turn."""
    sizes = [N // 2, N - N // 2, *[0] * (ranks - 2)]
    layouts = [make(N, ranks) for make in (contiguous, zigzag, striped)]
    layouts += [uneven(sizes), hilbert(1, N, ranks)]
    cases, turn = [], ranks
    for scheme in SCHEMES:
        for pattern in PATTERNS:
            turn, how = turn + 1, {"causal": turn % 3 > 0, "scheme": scheme}
            served = [x for x in layouts if fits(pattern, x, how["causal"], scheme)]
            if served:
                how |= {"layout": served[turn % len(served)], "batch": 1 + turn % 2}
                how |= {"lse_cotangent": turn % 2 > 0, "sinks": turn % 4 == 0}
                how |= {"kv_heads": (1, 2, 4)[turn % 3], "backend": "eager"}
                cases.append(Case(pattern, N, d=8, seed=turn, **how))
    return cases + mesh_cases(ranks)


def mesh_cases(ranks: int) -> list[Case]:
    """Two dimensions: 2 ranks along each, or all of them along one."""
    cases = []
    mesh = (2, 2) if ranks == 4 else (ranks, 1)
    for turn, (scheme, pattern, layout) in enumerate(
        [
            (("ring", "ulysses"), LADDER, zigzag),
            (("ulysses", "ring"), Dense(), striped),
            (("plan", "ulysses"), BLOCK_SPARSE[0], contiguous),
            (("ulysses", "all_gather"), PATTERNS[2], zigzag),
        ]
    ):
        how = {"causal": turn % 2 == 0, "sinks": turn % 2 > 0, "backend": "eager"}
        how |= {"layout": layout(N, ranks), "scheme": scheme, "mesh": mesh}
        cases.append(Case(pattern, N, d=8, seed=turn, **how))
    return cases


def answers(kind: str, machines: int, jobs: list[tuple]) -> list:
    """The results of (function, *arguments) on this rank, each called with a group of
    all ranks, on so many pretended machines, and this rank's device. ``kind``: "double"
    or "nccl".
    """
    machine = dist.get_rank() * machines // dist.get_world_size()
    socket.gethostname = lambda: f"machine {machine}"
    if kind == "double":
        device = become_gpu(dist.get_rank())
        group = nccl_group(timeout=timedelta(seconds=60))  # for a call that hangs
    else:
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    results = []
    for job, *arguments in jobs:
        results.append(on("cpu", job(group, device, *arguments)))
        idle()
    return results


def on(device, values):
    """Tensors on a device; those of four dimensions have the second and third swapped
    in memory, as models make them.
    """

    def moved(t):
        t = t.to(device)
        return t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t

    return tree_map_only(torch.Tensor, moved, values)


def mesh_like(group, shape) -> dist.DeviceMesh:
    """A mesh of all ranks whose columns and rows are groups of the backend of ``group``;
    a collective call.
    """
    ranks, own = torch.arange(dist.get_world_size()).view(shape), []
    for line in [*ranks.T.tolist(), *ranks.tolist()]:
        made = dist.new_group(line, backend=dist.get_backend(group))
        own += [made] * (dist.get_rank() in line)
    return dist.DeviceMesh.from_group(
        own, "cpu", mesh=ranks, mesh_dim_names=("rows", "columns")
    )


def attend(group, device, case: Case):
    """The results of a case on this rank, and the bytes that it sends."""
    given = on(device, case.shards(dist.get_rank()))
    if case.mesh:
        group = mesh_like(group, case.mesh)
    with counting() as traffic:
        results = case.run(*given, group)
    return results, traffic.total


def by_content(group, device, shape, kind, causal):
    given = shard_of(tensors(shape, kind), dist.get_rank(), dist.get_world_size())
    return step(on(device, given), kind, causal, group, "eager")


def generate(group, device, case: Case, sizes):
    """out and lse of chunks of these sizes, with a cache over the group."""
    made = {"batch": case.batch, "heads": case.heads, "kv_heads": case.kv_heads}
    made |= {"head_dim": case.d, "max_seq_len": case.n, "dtype": case.dtype}
    cache = KVCache(case.pattern, device=device, group=group, **made)
    how = {"causal": True, "cache": cache, "return_lse": True, "backend": "eager"}
    chunks = zip(*(t.split(sizes, 1) for t in on(device, drawn(case)[0])))
    parts = [attention(*chunk, case.pattern, **how) for chunk in chunks]
    return [torch.cat(each, dim) for each, dim in zip(zip(*parts), (1, 2))]


def disagree(group, device):
    """What this rank is told where rank 1 calls a causal attention."""
    q = torch.ones(1, 8, 2, 8, dtype=torch.float64, device=device)
    how = {"causal": dist.get_rank() == 1, "group": group, "backend": "eager"}
    return told(attention, q, q, q, Dense(), **how)


# --------------------------------------------------------------------------------------
# mistakes: of the library, or in what ranks ask for


def mistakes(names: list[str]) -> list[str]:
    """By name, what the double tells this rank of a mistake; "" for nothing."""
    device, found = become_gpu(dist.get_rank()), []
    for name in names:
        at = SimpleNamespace(device=device, group=nccl_group())
        asked(at, exchange(at))
        with pytest.MonkeyPatch.context() as at.patch:
            try:
                MISTAKES[name](at)
                idle()
                found.append("")
            except Violation as error:
                found.append(str(error))
        IN_FLIGHT.clear()
    return found


MISTAKES: dict[str, Callable] = {}
REASONS: dict[str, str] = {}


def mistake(reason: str):
    """A function that makes a mistake; the ``reason`` is a part of what is told."""

    def named(function):
        MISTAKES[function.__name__], REASONS[function.__name__] = function, reason
        return function

    return named


def call(at, scheme: str) -> None:
    """A forward of the library, as it is patched."""
    layout = contiguous(24, dist.get_world_size())
    how = {"layout": layout, "scheme": scheme, "backend": "eager"}
    case = Case(Dense(), 24, heads=3, kv_heads=3, d=8, **how)
    case.call(*on(at.device, case.shards(dist.get_rank())[0]), group=at.group)


def changed(at, change: Callable, scheme: str = "plan") -> None:
    """A forward in which ``change`` is made to each request for data."""
    post = comm._post

    def changed_post(request, group):
        if not request.control:
            change(request)
        return post(request, group)

    at.patch.setattr(comm, "_post", changed_post)
    call(at, scheme)


IMPATIENT = timedelta(seconds=1)


def asked(at, request, meanwhile=lambda: None) -> None:
    """One request of this rank."""

    def steps():
        ticket = yield request
        meanwhile()
        yield Wait(ticket)

    drive([steps()], Group.of(at.group))


def rows(at, count: int = 6, dtype=torch.float64):
    return torch.ones(count, 4, dtype=dtype, device=at.device)


def exchange(at, dtype=torch.float64, **counts) -> AllToAll:
    """Two rows to each rank; ``counts``: other numbers of rows."""
    sent, received = (counts.get(x, [2, 2, 2]) for x in ("sent", "received"))
    send, receive = (rows(at, sum(x), dtype) for x in (sent, received))
    return AllToAll(send, sent, receive, received)


def hop(at, to=(), of=()) -> Exchange:
    """Rows to some ranks, and from some."""
    return Exchange(*({rank: (rows(at),) for rank in ranks} for ranks in (to, of)))


@mistake("")
def nothing(at):
    me = dist.get_rank()
    asked(at, hop(at, [(me + 1) % 3], [(me - 1) % 3]))
    asked(at, exchange(at, sent=[0, 6, 0], received=[6 * (me == 1)] * 3))


@mistake("nobody waited")
def nobody_waits(at):
    drop = lambda request, group, post=comm._post: post(request, group) and []  # noqa: E731
    at.patch.setattr(comm, "_post", drop)
    asked(at, exchange(at))


@mistake("uses what batch receives")
def a_wait_is_missing_in_the_ring(at):
    at.patch.setattr(schemes, "Wait", lambda ticket: Exchange())
    call(at, "ring")


@mistake("contiguous")
def a_strided_buffer_is_sent(at):
    def change(request):
        request.send = request.send.repeat_interleave(2, -1)[..., ::2]

    changed(at, change)


@mistake("sum.default uses what all_to_all receives")
def rows_are_read_before_they_come(at):
    request = exchange(at)
    asked(at, request, lambda: request.receive.sum())


@mistake("others wrote")
def rows_are_written_by_a_kernel_before_they_come(at):
    request = exchange(at)
    asked(at, request, lambda: held(request.receive).zero_())


@mistake("writes what all_to_all sends")
def sent_rows_are_overwritten(at):
    request = exchange(at)
    asked(at, request, lambda: request.send[:2].mul_(2))


@mistake("sends what was written")
def sent_rows_are_overwritten_by_a_kernel(at):
    request = exchange(at)
    asked(at, request, lambda: held(request.send).mul_(2))


@mistake("freed")
def a_buffer_is_freed_early(at):
    request = exchange(at)
    asked(at, request, lambda: request.receive.untyped_storage().resize_(0))


@mistake("calls differ")
def ranks_hop_where_others_exchange(at):
    me = dist.get_rank()
    others = {0, 1, 2} - {me}
    same = exchange(at, sent=[6] * 3, received=[6] * 3)
    asked(at, same if me == 2 else hop(at, others, others))


@mistake("makes no call")
def each_rank_sends_before_it_receives(at):
    at.group.timeout = IMPATIENT
    me = dist.get_rank()
    asked(at, hop(at, to=[(me + 1) % 3]))
    asked(at, hop(at, of=[(me - 1) % 3]))


@mistake("splits")
def splits_do_not_add_up(at):
    asked(at, replace(exchange(at), sent=[2, 2, 1]))


@mistake("CUDA and dense")
def agreement_is_on_the_cpu(at):
    at.patch.setattr(Group, "_on_cpu", True)
    call(at, "plan")


@mistake("calls differ")
def a_dtype_differs(at):
    asked(at, exchange(at, (torch.float64, torch.int64)[dist.get_rank() == 1]))


@mistake("outside of a batch")
def hops_are_no_batch(at):
    post = lambda ops: [op.op(op.tensor, op.peer, op.group) for op in ops]  # noqa: E731
    at.patch.setattr(dist, "batch_isend_irecv", post)
    call(at, "ring")


@mistake("leaves out")
def the_first_call_leaves_out_a_rank(at):
    at.group = nccl_group()
    if dist.get_rank() < 2:
        asked(at, hop(at, *[[1 - dist.get_rank()]] * 2))


@mistake("both on GPU 0")
def two_ranks_use_one_gpu(at):
    asked(at, exchange(SimpleNamespace(device="cuda:0")))
