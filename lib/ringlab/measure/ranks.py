"""The runner's end of a point on several ranks: one process each, forked by the host, asked and heard together.

They are forked and not started by torch's launcher, which takes seconds per point to import torch in every rank; the
host has done that once. Each has a channel of its own, so that one that ends is known at once and by name.
"""

from __future__ import annotations

import select
import tempfile
import time

from ..ring import blame
from ..ring.blame import End
from .processes import Died, Handle, Host, TimedOut


class Ranks:
    """The processes of one point; ``ask`` and ``close`` are those of a Handle, of all of them."""

    def __init__(self, host: Host, settings: dict, ranks: int):
        self.folder = tempfile.TemporaryDirectory(prefix="ringlab-")
        self.handles: list[Handle] = []
        try:
            for rank in range(ranks):
                self.handles.append(Handle(host, settings | {"rank": rank, "folder": self.folder.name}))
        except BaseException:
            self.close()
            raise

    def ask(self, command: str, timeout_s: float, **arguments) -> dict:
        """One reply for all ranks; raises TimedOut or Died with the rank that is behind or has gone."""
        for handle in self.handles:
            handle.send(command, **arguments)
        replies, ends = self._listen(timeout_s)
        counts = blame.beats(self.folder.name, len(self.handles))
        found = blame.culprit(ends, counts)
        if found is None:
            return self._merged([replies[rank] for rank in range(len(self.handles))])
        rank, kind = found
        if kind == "died":
            death = ends[rank].value
            raise Died(death.status, f"rank {rank}: {death.reason}", death.final)
        if kind == "silent":
            begun = max(counts[rank], 0)
            raise TimedOut(f"rank {rank} is behind, {begun} steps begun, others {max(0, *counts)}")
        reply = {"status": replies[rank]["status"], "reason": replies[rank]["reason"]}
        if len({(r["status"], r["reason"]) for r in replies.values()}) > 1 or len(replies) < len(self.handles):
            reply["reason"] = f"rank {rank}: {reply['reason']}"
        return reply

    def _listen(self, timeout_s: float) -> tuple[dict[int, dict], dict[int, End]]:
        """What each rank replied and how it fared, until all have, one has failed and a grace is over, or the time."""
        replies: dict[int, dict] = {}
        ends: dict[int, End] = {}
        deadline = time.monotonic() + timeout_s
        while len(ends) < len(self.handles) and (left := deadline - time.monotonic()) > 0:
            waiting = {h.line.socket: rank for rank, h in enumerate(self.handles) if rank not in ends}
            for socket in select.select(list(waiting), [], [], left)[0]:
                rank = waiting[socket]
                try:
                    replies[rank] = reply = self.handles[rank].reply(left)
                    failed = reply["status"] != "ok"
                    ends[rank] = End(reply.pop("kind", "error") if failed else "ok", culprit=reply.pop("culprit", None))
                except Died as death:
                    ends[rank] = End("died", death)
                if ends[rank].kind != "ok":
                    deadline = min(deadline, time.monotonic() + blame.GRACE_S)
        return replies, ends

    def _merged(self, replies: list[dict]) -> dict:
        """The first rank's reply, and of what they do not share the largest, or all by rank."""
        merged = replies[0]
        if "cpu_s" in merged:
            merged["cpu_s"] = sum(reply["cpu_s"] for reply in replies)
        if "memory" in merged:
            peaks = [reply["memory"]["tracked_peak_bytes"] for reply in replies]
            sent = [reply["sent"] for reply in replies]
            by_rank = {name: [each[name] for each in sent] for name in ("bytes_sent", "planned", "messages")}
            floors = sum(reply["cost"]["floor_bytes"] for reply in replies)
            merged |= {
                "memory": replies[peaks.index(max(peaks))]["memory"],
                "cost": merged["cost"] | {"floor_bytes": floors},
                "ranks": by_rank | {"scheme": sent[0]["scheme"], "tracked_peak_bytes": peaks},
            }
            del merged["sent"]
        return merged

    def close(self) -> None:
        for handle in self.handles:
            handle.close()
        self.folder.cleanup()
