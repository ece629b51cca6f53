"""Worker processes: build, check and time a point on one rank or several, as a session asks.

A session sends a command and gets one reply for all ranks: "prepare" (build, first call, check), "calibrate", "sample",
"verify"; "probe" measures the CPU's rates. A reply with a ``status`` other than "ok" ends the point. If a process is
killed, crashes or hangs, the session's side reports it and names the rank.
"""

from __future__ import annotations

import gc
import pickle
import tempfile
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from .. import hardware, reference
from ..ring import launch
from ..ring.launch import End, Ended, Process, last_line, signal_name
from ..tracking import is_out_of_memory
from .points import Point
from .systems import Output, Refused, System, build, count_step
from .timing import LONG_S, WARM_S, cpu_seconds, cuda_seconds, footprint, limit_memory, loops_for, warm


class TimedOut(Exception):
    """No reply within the time; the message names the rank that is behind."""


class Died(Exception):
    """The process ended: ``status`` and ``reason`` for its point, ``final`` if trying again would not help."""

    def __init__(self, status: str, reason: str, final: bool = False):
        super().__init__(reason)
        self.status, self.reason, self.final = status, reason, final


def cause_of_death(code: int, said: str) -> Died:
    """The failure of a point whose process ended with exit code ``code`` and ``said`` as its last line on stderr."""
    if code < 0:
        name = signal_name(-code)
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return Died("crashed", f"the worker was ended by {name}{hint}")
    if any(s in said.lower() for s in ("memoryerror", "can't allocate memory", "out of memory")):
        return Died("oom", said, final=True)
    return Died("crashed", f"the worker ended with exit code {code}" + (f": {said}" if said else ""))


class Workers:
    """The processes of one point, one for each rank. Raises Died if they cannot be started."""

    def __init__(self, settings: dict, ranks: int = 1):
        self.folder = tempfile.TemporaryDirectory(prefix="ringlab-")
        self.processes: list[Process] = []
        self.stderrs = [open(Path(self.folder.name, f"{rank}.stderr"), "w+b") for rank in range(ranks)]
        modules = (__name__, launch.COMPILER) if ranks > 1 else (__name__,)
        try:
            for rank, stderr in enumerate(self.stderrs):
                own = settings | ({"rank": rank, "folder": self.folder.name} if ranks > 1 else {})
                output = stderr.fileno(), stderr.fileno()
                self.processes.append(Process(serve, own, modules=modules, output=output))
        except Ended as error:
            self.close()
            raise cause_of_death(error.code, error.said) from None

    def ask(self, command: str, timeout_s: float, **arguments) -> dict:
        """One reply for all ranks; raises TimedOut, or Died with the reason."""
        for process in self.processes:
            process.send((command, arguments))
        several = len(self.processes) > 1
        ends = launch.collect(self.processes, timeout_s, read=_end_of)
        counts = launch.beats(self.folder.name, len(self.processes))
        found = launch.culprit(ends, counts)
        if found is None:
            return _merged([ends[rank].value for rank in range(len(ends))])
        rank, kind = found
        if kind == "died":
            death = cause_of_death(ends[rank].value.code, last_line(self.stderrs[rank]))
            raise Died(death.status, f"rank {rank}: {death.reason}" if several else death.reason, death.final)
        if kind == "silent":
            begun = max(counts[rank], 0)
            raise TimedOut(f"rank {rank} is behind, {begun} steps begun, others {max(0, *counts)}" if several else "")
        reply = ends[rank].value
        if several:  # the rest is one rank's alone
            reply = {name: reply[name] for name in ("status", "reason", "final") if name in reply}
        replies = {(end.value["status"], end.value["reason"]) for end in ends.values() if end.kind != "died"}
        if len(replies) > 1 or len(ends) < len(self.processes):
            reply["reason"] = f"rank {rank}: {reply['reason']}"
        return reply

    def close(self) -> None:
        """End the processes and all that they started."""
        for process in self.processes:
            process.end()
        for stderr in self.stderrs:
            stderr.close()
        self.folder.cleanup()


def _end_of(reply: dict) -> End:
    kind, culprit = reply.pop("kind", "error"), reply.pop("culprit", None)
    return End("ok" if reply["status"] == "ok" else kind, reply, culprit=culprit)


def _merged(replies: list[dict]) -> dict:
    """One reply for all ranks: the first rank's, with the sums, the largest or the lists of what differs by rank."""
    merged = replies[0]
    if "cpu_s" in merged:
        merged["cpu_s"] = sum(reply["cpu_s"] for reply in replies)
    if "sent" in merged:
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


# ---------------------------------------------------------------------------------------------------------------------
# in the worker's process


def outcome(error: Exception) -> tuple[str, str]:
    """(status, reason) of an error that a system raised; only a refusal of the point is "unsupported".

    >>> outcome(NotImplementedError("needs CUDA")), outcome(ValueError("shapes differ"))
    (('unsupported', 'needs CUDA'), ('crashed', 'ValueError: shapes differ'))
    """
    said = " ".join(str(error).split())[:300] or type(error).__name__
    if is_out_of_memory(error):
        return "oom", said
    if isinstance(error, NotImplementedError | Refused):
        return "unsupported", said
    return "crashed", f"{type(error).__name__}: {said}"


class Worker:
    """A point in its process: its system, its inputs, and the output of its first call. Commands return a reply."""

    def __init__(self, settings: dict):
        self.settings, self.point = settings, Point.from_dict(settings["point"])
        self.device = torch.device(settings["device"])
        self.system: System | None = None
        self.latest: Output | None = None
        self.keep = False

    def start(self) -> dict:
        """Load libraries and build the system, which probes its kernel."""
        warm(self.point, self.device)
        self.system = build(self.point, self.device)
        return {}

    def prepare(self, tolerance: dict) -> dict:
        """Measure the memory of the first call and check its output; ``tolerance``: known already, by name."""
        if self.system is None:
            self.start()
        self.system.tolerance = tolerance
        reply = {"cost": asdict(self.system.cost)}
        self.inputs, self.checked, reply["memory"], self.cold_s = footprint(self.system, self.device)
        errors, self.tolerance = self.system.check(self.inputs, self.checked)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes wait for this memory
        reply |= {"errors": errors, "tolerance": self.tolerance, "warmups": 1, "known": self.system.tolerance}
        wrong = [n for n, e in errors.items() if not e <= self.tolerance[n]]
        if wrong or not errors:
            said = ", ".join(f"{n} is off by {errors[n]:.1e}, allowed {self.tolerance[n]:.1e}" for n in wrong)
            reply |= {"status": "incorrect", "reason": said or "nothing was checked"}
        return reply

    def calibrate(self, sample_s: float) -> dict:
        """Warm up unless the first call was long; choose the loops of a sample that takes ``sample_s`` at least, and
        reply with the seconds that it takes.
        """
        gc.collect()
        gc.disable()
        warmups, estimate, spent = 1, self.cold_s, 0.0
        while self.cold_s < LONG_S and (warmups < 2 or spent < WARM_S):  # by the clock, which ranks share
            estimate = self.timed(1)
            warmups, spent = warmups + 1, spent + estimate
        self.loops = loops_for(estimate, sample_s)
        return {"estimate": estimate * self.loops, "warmups": warmups, "loops": self.loops}

    def timed(self, loops: int) -> float:
        """Seconds of a call, from so many of them."""
        on_gpu = self.device.type == "cuda"
        return cuda_seconds(self._call, loops, self.device) if on_gpu else cpu_seconds(self._call, loops)

    def sample(self, last: bool) -> dict:
        self.keep = last
        return {"seconds": self.timed(self.loops)}

    def _call(self) -> None:
        output = self.system.run(self.inputs)
        if self.keep:  # only in the last round: a result that lives on would cost the next call its memory
            self.latest = output

    def verify(self) -> dict:
        """The last timed call must give the checked result again: reused memory may not change it."""
        latest = self.latest or self.system.run(self.inputs)  # an earlier process may have taken all samples
        was, now = self.checked.named(), latest.named()
        for name, limit in self.tolerance.items():
            # dout is standard normal, so a gradient below this counts as zero
            floor = 1.0 if name in ("out", "lse") else 0.01 * was["out"].numel() ** 0.5
            apart = reference.error(now[name], was[name], floor)
            if not apart <= 2 * limit:
                said = f"{name} changed by {apart:.1e} between the checked and the last call"
                return {"status": "incorrect", "reason": said}
        return {}

    def answer(self, command: str, **arguments) -> dict:
        """The reply to a command; an error that a system raises becomes the point's status and reason."""
        try:
            return getattr(self, command)(**arguments)
        except Exception as error:  # noqa: BLE001  any failure of a system is a result, reported with its reason
            status, reason = outcome(error)
            found = {"status": status, "reason": reason, "final": status != "crashed"}
            return found | {"kind": End.of(error).kind, "culprit": getattr(error, "rank", None)}


def probe(dtypes: list[str]) -> dict:
    """The rates of this CPU: dtype -> FLOP/s, bytes/s from memory, bytes/s from cache."""
    found = {name: hardware.measure_cpu_peaks(name) for name in dtypes}
    return {"peaks": {n: [p.flops_per_s, p.bytes_per_s_dram, p.bytes_per_s_cache] for n, p in found.items()}}


def serve(channel: Connection, settings: dict) -> None:
    """Answer the session's commands.

    Every reply has the CPU time that this process has used (``cpu_s``), to tell it from that of other processes.
    """
    torch.set_num_threads(settings["threads"])
    limit_memory(settings.get("memory_bytes"))
    worker = (RankWorker if "rank" in settings else Worker)(settings) if "point" in settings else None
    if settings.get("early"):  # if this fails, so does ``prepare``
        worker.answer("start")
    while True:
        command, arguments = pickle.loads(channel.recv_bytes())
        reply = probe(**arguments) if command == "probe" else worker.answer(command, **arguments)
        reply = {"status": "ok", "reason": "", "cpu_s": time.process_time()} | reply
        channel.send_bytes(pickle.dumps(reply))


class RankWorker(Worker):
    """A worker that joins the others in ``prepare``; every time that it reports is the slowest rank's."""

    def prepare(self, tolerance: dict) -> dict:
        self._join(self.settings["rank"], self.point.world_size)
        reply = super().prepare(tolerance)
        self.cold_s = slowest(self.cold_s, self.device)
        found = reply["sent"] = self.system.sent()
        if reply.get("status", "ok") == "ok" and found["planned"] not in (None, found["bytes_sent"]):
            said = f"{found['bytes_sent']} bytes were sent, the plan has {found['planned']}"
            reply |= {"status": "incorrect", "reason": said}
        return reply

    def _join(self, rank: int, ranks: int) -> None:
        backend = "gloo"
        if self.device.type == "cuda":
            if (found := torch.cuda.device_count()) < ranks:
                raise NotImplementedError(f"{ranks} ranks need a GPU each, this machine has {found}")
            self.device, backend = torch.device("cuda", rank), "nccl"
            torch.cuda.set_device(self.device)
        # The session's own time is up first, and it names the rank that is behind.
        launch.join_group(self.settings["folder"], rank, ranks, 2 * self.settings["timeout_s"], backend)

    def timed(self, loops: int) -> float:
        count_step()
        dist.barrier()
        return slowest(super().timed(loops), self.device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks' seconds."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    count_step()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
