"""Communication between ranks.

An algorithm is a generator that runs on one rank. It yields a request to start a transfer, for which it gets a ticket,
and ``Wait(ticket)`` to finish it, so work between the two overlaps the transfer. ``drive`` runs the generator of one
rank over a torch.distributed group; ``simulate`` runs those of all ranks in one process, in step. Both can count the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class AllToAll:
    """One collective: rank j gets ``sent[j]`` rows of ``send``, in order, and ``received[j]`` rows come from it.

    ``control``: compares what the ranks are about to do, and is counted apart from the data.
    """

    send: Tensor
    sent: list[int]
    receive: Tensor
    received: list[int]
    control: bool = False

    def by_rank(self) -> tuple[dict, dict]:
        """The tensors that are sent, and those that are received, by rank."""
        parts = self.send.split(self.sent), self.receive.split(self.received)
        return tuple({rank: (part,) for rank, part in enumerate(each)} for each in parts)


@dataclass
class Exchange:
    """Point to point: contiguous tensors to some ranks and from some, none to oneself."""

    send: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    receive: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    control = False

    def by_rank(self) -> tuple[dict, dict]:
        return self.send, self.receive


@dataclass
class Wait:
    """Until the request of this ticket is done. Before, do not read received tensors or write to sent ones."""

    ticket: object


Steps = Generator[AllToAll | Exchange | Wait, object, object]


@dataclass
class Traffic:
    """Bytes by (from, to) and messages; on one rank of a group only what this rank sends.

    ``control``: bytes that were sent to compare what the ranks are about to do. They are in no other count.
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
            if to != rank and size and request.control:
                self.control += size
            elif to != rank and size:
                self.sent[rank, to] = self.sent.get((rank, to), 0) + size
                self.messages += 1


on_post: Callable[[], None] | None = None  # called at every request over a group: the launcher watches who falls behind
_counter: ContextVar[Traffic | None] = ContextVar("traffic", default=None)


@contextmanager
def counting():
    """Count the bytes that attention moves between ranks inside: ``with counting() as traffic``.

    >>> with counting() as traffic:
    ...     pass
    >>> traffic.total
    0
    """
    traffic = Traffic()
    token = _counter.set(traffic)
    try:
        yield traffic
    finally:
        _counter.reset(token)


def drive(steps: Steps, group: dist.ProcessGroup):
    """Run one rank's algorithm over a process group (gloo, NCCL) and return its result."""
    rank, traffic, answer = dist.get_rank(group), _counter.get(), None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(step, Wait):
            for work in step.ticket:
                work.wait()
            answer = work = None
        else:
            if traffic is not None:
                traffic.add(rank, step)
            if on_post is not None:
                on_post()
            answer = _post(step, group)
        step = None  # or the request and its tensors would stay until the next one


def _post(request: AllToAll | Exchange, group: dist.ProcessGroup) -> list:
    if isinstance(request, AllToAll):
        return [dist.all_to_all_single(
            request.receive, request.send, request.received, request.sent, group=group, async_op=True)]  # fmt: skip
    staged, ops, copies = _through_cpu(request, group), [], []
    for op, peers in ((dist.isend, request.send), (dist.irecv, request.receive)):
        for peer, t in ((peer, t) for peer, tensors in peers.items() for t in tensors):
            there = t
            if staged and op is dist.isend:
                there = t.cpu()
            elif staged:
                there = torch.empty_like(t, device="cpu")
                copies.append(_Copy(t, there))
            ops.append(dist.P2POp(op, there, group=group, group_peer=peer))
    return [*dist.batch_isend_irecv(ops), *copies] if ops else []


def _through_cpu(request: Exchange, group: dist.ProcessGroup) -> bool:
    """gloo sends CUDA tensors point to point only by way of the CPU."""
    tensors = [t for peers in (request.send, request.receive) for each in peers.values() for t in each]
    return any(t.is_cuda for t in tensors) and "cuda:gloo" in dist.get_backend_config(group)


@dataclass
class _Copy:
    """The last step of receiving by way of the CPU."""

    into: Tensor
    received: Tensor

    def wait(self) -> None:
        self.into.copy_(self.received)


def simulate(ranks: list[Steps]) -> list:
    """Run the algorithms of all ranks in this process, in step, and return their results by rank.

    A message arrives only when it is waited for: reading too early is as wrong here as over a network. Raises
    RuntimeError if the requests of the ranks do not fit together.
    """
    traffic, answer, results = _counter.get(), None, [None] * len(ranks)
    while True:
        steps = []
        for rank, algorithm in enumerate(ranks):
            try:
                steps.append(algorithm.send(answer))
            except StopIteration as end:
                results[rank] = end.value
        if not steps:
            return results
        if len(steps) < len(ranks) or len({type(step) for step in steps}) > 1:
            raise RuntimeError("the ranks do not agree on what comes next")
        answer = None
        if isinstance(steps[0], Wait):
            _deliver(steps[0].ticket)
        else:
            for rank, step in enumerate(steps if traffic is not None else ()):
                traffic.add(rank, step)
            answer = [step.by_rank() for step in steps]


def _deliver(posted: list[tuple[dict, dict]]) -> None:
    """Copy what each rank sends, by destination, to where the destination receives it, by source; once."""
    for to, (_, receive) in enumerate(posted):
        for source, into in receive.items():
            message = posted[source][0].get(to, ())
            if [(t.shape, t.dtype) for t in message] != [(t.shape, t.dtype) for t in into]:
                raise RuntimeError(f"rank {source} sends rank {to} other rows than it expects")
            for t, value in zip(into, message):
                t.copy_(value)
    posted.clear()
