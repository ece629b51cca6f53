"""One rank of a point in its own process: a worker whose calls, times and verdicts are those of all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from ..ring import blame
from .points import Point
from .sharded import begin
from .worker import Worker, outcome


class RankWorker(Worker):
    """A worker that joins the others in ``prepare``; every time it tells is the slowest rank's."""

    def __init__(self, point: Point, settings: dict):
        super().__init__(point, settings["device"])
        self.rank, self.folder, self.timeout_s = settings["rank"], settings["folder"], settings["timeout_s"]

    def prepare(self, tolerance: dict) -> dict:
        self._join()
        reply = super().prepare(tolerance)
        self.cold_s = slowest(self.cold_s, self.device)
        found = self.system.sent()
        reply["sent"] = found
        if reply.get("status", "ok") == "ok" and found["planned"] not in (None, found["bytes_sent"]):
            said = f"{found['bytes_sent']} bytes were sent, the plan has {found['planned']}"
            reply |= {"status": "incorrect", "reason": said}
        return reply

    def _join(self) -> None:
        ranks, backend = self.point.world_size, "gloo"
        if self.device.type == "cuda":
            if torch.cuda.device_count() < ranks:
                found = torch.cuda.device_count()
                raise NotImplementedError(f"{ranks} ranks need a GPU each, this machine has {found}")
            self.device, backend = torch.device("cuda", self.rank), "nccl"
            torch.cuda.set_device(self.device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", blame.loopback())
        beat = blame.Beat(self.folder, self.rank)
        store = dist.FileStore(str(Path(self.folder, "store")), ranks)
        # The runner's own time is up first, and it tells who is behind.
        blame.meet(store, self.rank, ranks, 2 * self.timeout_s, beat, backend)

    def make_clock(self):
        return SharedClock(super().make_clock(), self.device)

    def answer(self, command: str, **arguments) -> dict:
        """The reply to a command, and whether what was raised only tells that another rank has gone."""
        try:
            return getattr(self, command)(**arguments)
        except Exception as error:  # noqa: BLE001  any failure of a system is a result, reported with its reason
            status, reason = outcome(error)
            kind, culprit = blame.End.of(error).kind, getattr(error, "rank", None)
            return {"status": status, "reason": reason, "kind": kind, "culprit": culprit}


class SharedClock:
    """A clock that all ranks start together and that shows the slowest one's time."""

    def __init__(self, clock, device: torch.device):
        self.clock, self.device = clock, device

    def sample(self, call, loops: int) -> float:
        begin()
        dist.barrier()
        return slowest(self.clock.sample(call, loops), self.device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks' seconds."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    begin()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
