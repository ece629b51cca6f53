"""Communication between ranks: the requests of an algorithm, and ``drive``, which
serves them.

An algorithm is a generator that runs on one rank. It yields a request to start a
transfer, for which it gets a ticket, and ``Wait(ticket)`` to finish it, so work between
the two overlaps the transfer. ``drive`` runs the generator of one rank over a
torch.distributed group, or those of all ranks in one process, in step. It can count the
bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_private import keep, kept
from .watch import Beat

if TYPE_CHECKING:
    from .group import Group


Rows = dict[int, tuple[Tensor, ...]]  # by rank


@dataclass
class AllToAll:
    """One collective: rank j gets ``sent[j]`` rows of ``send``, in order, and
    ``received[j]`` rows come from it.

    ``control``: compares what the ranks are about to do, and is counted apart from the
    data. ``members``: the ranks that take part, if not all; j counts them.
    """

    send: Tensor
    sent: list[int]
    receive: Tensor
    received: list[int]
    control: bool = False
    members: Sequence[int] | None = None

    def by_rank(self) -> tuple[Rows, Rows]:
        """The tensors that are sent, and those that are received, by rank."""
        ranks = self.members or range(len(self.sent))
        sent = self.send.split_with_sizes(self.sent)
        received = self.receive.split_with_sizes(self.received)
        return dict(zip(ranks, zip(sent))), dict(zip(ranks, zip(received)))


@dataclass
class Exchange:
    """Point to point: contiguous tensors to some ranks and from some, none to oneself.
    ``members``: the ranks that take part, if not all.
    """

    send: Rows = field(default_factory=dict)
    receive: Rows = field(default_factory=dict)
    members: Sequence[int] | None = None
    control = False

    def by_rank(self) -> tuple[Rows, Rows]:
        return self.send, self.receive


@dataclass
class Wait:
    """Until the request of this ticket is done. Before, do not read received tensors or
    write to sent ones.
    """

    ticket: object


Steps = Generator[AllToAll | Exchange | Wait, object, object]


@dataclass
class Traffic:
    """Bytes by (from, to) and messages; on one rank of a group only what this rank
    sends.

    ``control``: bytes that were sent to compare what the ranks are about to do. They
    are in no other count.
    """

    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    messages: int = 0
    control: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def from_rank(self, rank: int) -> int:
        return sum(size for (source, _), size in self.sent.items() if source == rank)

    def add(self, rank: int, request: AllToAll | Exchange) -> None:
        for to, tensors in request.by_rank()[0].items():
            size = sum(t.numel() * t.element_size() for t in tensors)
            if request.control and to != rank:
                self.control += size
            elif size and to != rank:
                self.sent[rank, to] = self.sent.get((rank, to), 0) + size
                self.messages += 1


beat: Beat | None = None  # tells those who watch this rank how far it is
_counter: ContextVar[Traffic | None] = ContextVar("traffic", default=None)


@contextmanager
def counting():
    """Count the bytes that attention moves between ranks inside: ``with counting() as
    traffic``.

    >>> with counting() as traffic:
    ...     pass
    >>> traffic.total
    0
    """
    traffic = Traffic()
    token = _counter.set(traffic)
    before = keep(_counter.name, traffic)
    try:
        yield traffic
    finally:
        _counter.reset(token)
        keep(_counter.name, before)


def drive(algorithms: list[Steps], group: Group | None = None) -> list:
    """The results of algorithms: of this rank's over a group of processes (gloo, NCCL),
    or of all ranks' in step (simulated, or None).

    A message arrives only when it is waited for: reading too early is as wrong in one
    process as over a network. Raises RuntimeError if the requests of simulated ranks do
    not fit together.
    """
    simulated = group is None or not group.process_groups
    first = 0 if simulated else group.here[0]
    traffic = _counter.get() or kept(_counter.name)
    watched = not simulated and beat is not None
    ticket = None
    results = [None] * len(algorithms)
    while True:
        steps = []  # the earlier requests and their tensors are kept no longer
        for i, algorithm in enumerate(algorithms):
            try:
                steps.append(algorithm.send(ticket))
            except StopIteration as end:
                results[i] = end.value
        if not steps:
            return results
        if len(steps) < len(algorithms) or len(set(map(type, steps))) > 1:
            raise RuntimeError("the ranks do not agree on what comes next")
        if isinstance(steps[0], Wait):
            if watched:
                beat.does("waits")
            for work in steps[0].ticket:
                work.wait()
            if watched:
                beat.does("computes")
            ticket = work = None
            continue
        for i in range(len(steps) if traffic is not None else 0):
            traffic.add(first + i, steps[i])
        if watched:
            beat.begins()
        ticket = (
            [_Simulated([step.by_rank() for step in steps])]
            if simulated
            else _post(steps[0], group)
        )


def all_to_all(
    send: Tensor, sent: Sequence[int], received: Sequence[int], control: bool = False
) -> Steps:
    """Send ``sent[j]`` rows to rank j, in order; returns the rows that came,
    ``received[j]`` from rank j.
    """
    into = send.new_empty(sum(received), *send.shape[1:])
    yield Wait((yield AllToAll(send, sent, into, received, control)))
    return into


def among(members: Sequence[int], steps: Steps) -> Steps:
    """The steps of an algorithm of a few ranks, which it numbers from 0: ``members`` are
    their numbers among all.
    """
    ticket = None
    while True:
        try:
            request = steps.send(ticket)
        except StopIteration as end:
            return end.value
        if isinstance(request, Exchange):
            request = Exchange(
                {members[i]: part for i, part in request.send.items()},
                {members[i]: part for i, part in request.receive.items()},
                members,
            )
        elif isinstance(request, AllToAll):
            request = replace(request, members=members)
        ticket = yield request


def _post(request: AllToAll | Exchange, ranks: Group) -> list:
    members = request.members or range(ranks.size)
    group = ranks.among(members)
    if isinstance(request, AllToAll) and "gloo" not in dist.get_backend_config(group):
        return [
            dist.all_to_all_single(
                request.receive,
                request.send,
                request.received,
                request.sent,
                group=group,
                async_op=True,
            )
        ]
    send, receive = request.by_rank()
    if isinstance(request, AllToAll):
        rank = ranks.here[0]
        for sent, into in zip(send.pop(rank), receive.pop(rank)):
            into.copy_(sent)
    staged = _through_cpu(send, receive, group)
    ops = []
    copies = []
    # Receives first: gloo tells the sender that a receive is there, and this waits
    # behind data that are sent already. Then the two directions would take turns, and
    # the exchange twice the time; as gloo's own all-to-all does.
    for op, peers in ((dist.irecv, receive), (dist.isend, send)):
        for peer, tensors in peers.items():
            for t in filter(Tensor.numel, tensors):
                buffer = t
                if staged and op is dist.isend:
                    buffer = t.cpu()
                elif staged:
                    buffer = torch.empty_like(t, device="cpu")
                    copies.append(_Copy(t, buffer))
                place = members.index(peer)
                ops.append(dist.P2POp(op, buffer, group=group, group_peer=place))
    return [*dist.batch_isend_irecv(ops), *copies] if ops else []


def _through_cpu(send: dict, receive: dict, group: dist.ProcessGroup) -> bool:
    """gloo sends CUDA tensors point to point only by way of the CPU."""
    tensors = [
        t for peers in (send, receive) for parts in peers.values() for t in parts
    ]
    return any(t.is_cuda for t in tensors) and "cuda:gloo" in dist.get_backend_config(
        group
    )


@dataclass
class _Copy:
    """The last step of receiving by way of the CPU."""

    into: Tensor
    received: Tensor

    def wait(self) -> None:
        self.into.copy_(self.received)


_SHAPE = attrgetter("shape", "dtype")


@dataclass
class _Simulated:
    """A request of all ranks of this process: what each sends, by destination, and
    where it receives, by source.
    """

    posted: list[tuple[dict, dict]]

    def wait(self) -> None:
        for to, (_, receive) in enumerate(self.posted):
            for source, into in receive.items():
                message = self.posted[source][0].get(to, ())
                if list(map(_SHAPE, message)) != list(map(_SHAPE, into)):
                    raise RuntimeError(
                        f"rank {source} sends rank {to} other rows than it expects"
                    )
                for t, value in zip(into, message):
                    t.copy_(value)
        self.posted.clear()  # the tickets of all ranks hold it
