"""A system on several ranks: each holds a shard of the same inputs, and all are judged together on global rows."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..ring import Problem, Traffic, choose, comm, counting
from ..ring.layout import named
from ..ring.volume import AGREEMENT_BYTES, sent_bytes
from .contract import Output, System


def begin() -> None:
    """Count a step that all ranks take together, so that the one that stays behind is known."""
    if comm.on_post is not None:
        comm.on_post()


class Sharded:
    """This rank's part of a system that works on shards over the default group; a ``System`` to who measures it.

    ``cost`` is the whole point's, but for ``floor_bytes``, which are those of the shard. Raises ValueError for a layout
    that the point cannot have.
    """

    def __init__(self, system: System):
        self.system, self.point = system, system.point
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        n = self.point.seq_len
        self.layout = named(dict(self.point.options).get("layout", "contiguous"), n, self.ranks)
        floor = system.cost.floor_bytes * self.layout.size(self.rank) // n
        self.cost, self.tolerance = replace(system.cost, floor_bytes=floor), {}
        self.first: Traffic | None = None

    def inputs(self) -> list[Tensor]:
        """The shards of the point's inputs, which are the same on every rank."""
        mine = [self.layout.shard(t.detach(), self.rank).clone() for t in self.system.inputs()]
        return [t.requires_grad_(self.system.backward) for t in mine[:3]] + mine[3:]

    def run(self, inputs: list[Tensor]) -> Output:
        with counting() as traffic, torch.autograd.set_multithreading_enabled(False):  # count the backward's bytes too
            output = self.system.run(inputs)
        self.first = self.first or traffic
        return output

    def check(self, inputs: list[Tensor], output: Output) -> tuple[dict[str, float], dict[str, float]]:
        """(errors, tolerance) of all ranks' output, gathered on rank 0 and compared as a system on one device is."""
        mine = {name: t.detach().cpu() for name, t in output.named().items()}
        everyone = [None] * self.ranks
        begin()
        dist.gather_object(mine, everyone if self.rank == 0 else None)
        found = [self._judged(everyone) if self.rank == 0 else None]
        dist.broadcast_object_list(found)
        errors, tolerance, self.tolerance = found[0]
        return errors, tolerance

    def _judged(self, everyone: list[dict[str, Tensor]]) -> tuple[dict, dict, dict]:
        shapes = {name: [size[2 if name == "lse" else 1] for size in (e[name].shape for e in everyone)]
                  for name in everyone[0]}  # fmt: skip
        wanted = [self.layout.size(rank) for rank in range(self.ranks)]
        wrong = [name for name, sizes in shapes.items() if sizes != wanted]
        if wrong:
            return dict.fromkeys(wrong, float("inf")), dict.fromkeys(wrong, 0.0), {}
        device = self.system.device
        whole = {name: self.layout.unshard([e[name] for e in everyone], 2 if name == "lse" else 1).to(device)
                 for name in everyone[0]}  # fmt: skip
        grads = tuple(whole[name] for name in ("dq", "dk", "dv") if name in whole)
        self.system.tolerance = self.tolerance
        starts = [owned[0].start for rank in range(self.ranks) if (owned := self.layout.ranges(rank))]
        given = self.system.inputs()
        errors, tolerance = self.system.check(given, Output(whole["out"], whole.get("lse"), grads), starts)
        return errors, tolerance, self.system.tolerance

    def sent(self) -> dict:
        """What this rank sent in its first call, beside what its scheme's plan says; ``planned`` None: no scheme."""
        scheme, p = self.system.scheme, self.point
        bytes_, messages = self.first.from_rank(self.rank), self.first.messages
        found = {"scheme": scheme, "bytes_sent": bytes_, "messages": messages, "planned": None}
        if scheme is None:
            return found
        problem = Problem(self.system.pattern, self.layout, p.causal, p.heads, p.kv_heads)
        scheme = choose(problem).scheme if scheme == "auto" else scheme
        shape = {"batch": p.batch, "head_dim": p.head_dim, "dtype": self.system.dtype, "passes": p.passes}
        agreed = AGREEMENT_BYTES * (self.ranks - 1), 2 * (self.ranks - 1)  # before the first exchange, once
        found |= {"scheme": scheme, "bytes_sent": bytes_ - agreed[0], "messages": messages - agreed[1]}
        return found | {"planned": sent_bytes(problem, self.rank, scheme, **shape)}
