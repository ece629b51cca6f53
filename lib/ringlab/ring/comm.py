"""How ranks talk. An algorithm is a generator of one rank: it yields what to post and what to wait for.

``drive`` runs it over a torch.distributed group, ``simulate`` runs those of all ranks in one process, in step; both can
count the bytes. Posting returns at once, so work between a ``Post`` and its ``Wait`` overlaps the transfer.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class AllToAll:
    """Rows [sum(sent[:j]), ...) of ``send`` go to rank j, rows of ``receive`` come by rank: one collective."""

    send: Tensor
    sent: list[int]
    receive: Tensor
    received: list[int]


@dataclass
class Exchange:
    """Contiguous tensors to some ranks and from some, point to point; none of it to oneself."""

    send: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    receive: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass
class Post:
    """Start a request; the generator gets a ticket for it."""

    request: AllToAll | Exchange


@dataclass
class Wait:
    """Until the request of this ticket is done: its received tensors may be read, its sent ones written."""

    ticket: object


Steps = Generator[Post | Wait, object, object]


@dataclass
class Traffic:
    """Bytes by (from, to); on one rank of a group only what this rank sends."""

    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    messages: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def from_rank(self, rank: int) -> int:
        return sum(size for (source, _), size in self.sent.items() if source == rank)

    def add(self, rank: int, request: AllToAll | Exchange) -> None:
        for to, size in _sizes(request).items():
            if to != rank and size:
                self.sent[rank, to] = self.sent.get((rank, to), 0) + size
                self.messages += 1


def _sizes(request: AllToAll | Exchange) -> dict[int, int]:
    if isinstance(request, Exchange):
        return {to: sum(t.numel() * t.element_size() for t in tensors) for to, tensors in request.send.items()}
    row = request.send[:1].numel() * request.send.element_size()
    return {to: count * row for to, count in enumerate(request.sent)}


on_post = None  # called at every request over a group, for a launcher that watches who falls behind
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


def _count(rank: int, request: AllToAll | Exchange) -> None:
    if (traffic := _counter.get()) is not None:
        traffic.add(rank, request)


def drive(steps: Steps, group: dist.ProcessGroup):
    """Run one rank's algorithm over a group (gloo, NCCL); returns what it returns."""
    rank, answer = dist.get_rank(group), None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(step, Post):
            _count(rank, step.request)
            if on_post is not None:
                on_post()
            answer = _post(step.request, group)
        else:
            for work in step.ticket:
                work.wait()
            answer = work = None
        step = None  # or the request and its tensors would stay until the next one


def _post(request: AllToAll | Exchange, group: dist.ProcessGroup) -> list:
    if isinstance(request, AllToAll):
        return [dist.all_to_all_single(
            request.receive, request.send, request.received, request.sent, group=group, async_op=True)]  # fmt: skip
    return [_Staged(request, group)] if _through_cpu(request, group) else _direct(request, group)


def _direct(request: Exchange, group: dist.ProcessGroup) -> list:
    ops = []
    for op, peers in ((dist.isend, request.send), (dist.irecv, request.receive)):
        ops += [dist.P2POp(op, t, group=group, group_peer=peer) for peer, tensors in peers.items() for t in tensors]
    return dist.batch_isend_irecv(ops) if ops else []


def _through_cpu(request: Exchange, group: dist.ProcessGroup) -> bool:
    """gloo sends point to point from the CPU's memory alone."""
    tensors = [t for peers in (request.send, request.receive) for each in peers.values() for t in each]
    return any(t.is_cuda for t in tensors) and "cuda:gloo" in dist.get_backend_config(group)


class _Staged:
    """An exchange by way of copies in the CPU's memory; sent ones are made at once, received ones read at ``wait``."""

    def __init__(self, request: Exchange, group: dist.ProcessGroup):
        self.into = request.receive
        self.copies = {peer: tuple(torch.empty_like(t, device="cpu") for t in ts) for peer, ts in self.into.items()}
        sent = {peer: tuple(t.cpu() for t in tensors) for peer, tensors in request.send.items()}
        self.works = _direct(Exchange(sent, self.copies), group)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for peer, tensors in self.into.items():
            for t, copy in zip(tensors, self.copies[peer]):
                t.copy_(copy)


def simulate(ranks: list[Steps]) -> list:
    """Run the algorithms of all ranks in this process, in step; what they return, by rank.

    A message arrives when it is waited for, so that reading before is as wrong here as over a network. Raises
    RuntimeError where the ranks' requests do not fit together.
    """
    answers: list = [None] * len(ranks)
    results: list = [None] * len(ranks)
    while True:
        steps, ended = [], 0
        for rank, algorithm in enumerate(ranks):
            try:
                steps.append(algorithm.send(answers[rank]))
            except StopIteration as end:
                results[rank] = end.value
                ended += 1
        if ended == len(ranks):
            return results
        if ended or len({type(step) for step in steps}) > 1:
            raise RuntimeError("the ranks do not agree on what comes next")
        if isinstance(steps[0], Post):
            requests = [step.request for step in steps]
            for rank, request in enumerate(requests):
                _count(rank, request)
            answers = [_Delivery(requests)] * len(ranks)
        else:
            for delivery in {id(step.ticket): step.ticket for step in steps}.values():
                delivery.deliver()
            answers = [None] * len(ranks)


class _Delivery:
    """The requests that all ranks posted together."""

    def __init__(self, requests: list[AllToAll | Exchange]):
        self.requests = requests

    def deliver(self) -> None:
        for to, request in enumerate(self.requests):
            if isinstance(request, AllToAll):
                sources = {source: (piece,) for source, piece in enumerate(request.receive.split(request.received))}
            else:
                sources = request.receive
            for source, into in sources.items():
                message = self._sent(source, to)
                if [(t.shape, t.dtype) for t in message] != [(t.shape, t.dtype) for t in into]:
                    raise RuntimeError(f"rank {source} sends rank {to} other rows than it expects")
                for t, value in zip(into, message):
                    t.copy_(value)
        self.requests = []

    def _sent(self, source: int, to: int) -> tuple[Tensor, ...]:
        request = self.requests[source]
        if isinstance(request, Exchange):
            return request.send.get(to, ())
        return (request.send.split(request.sent)[to],)
