"""Worker processes: a point on one rank or several, built, checked and then timed, on the session's word.

A session sends a command and gets one reply for all ranks: "prepare" (build, first call, check), "calibrate", "sample",
"verify"; "probe" measures the CPU's rates. A reply with a ``status`` other than "ok" is the end of the point. What the
process itself cannot survive (a kill, a segmentation fault, no end) is reported from outside, with the rank's name.
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
from .timing import LONG_S, WARM_S, clock_for, footprint, limit_memory, loops_for, warm


class TimedOut(Exception):
    """No reply within the time; the message names the rank that is behind."""


class Died(Exception):
    """The process ended: ``status`` and ``reason`` for its point, ``final`` where trying again would not help."""

    def __init__(self, status: str, reason: str, final: bool = False):
        super().__init__(reason)
        self.status, self.reason, self.final = status, reason, final


def cause_of_death(code: int, said: str) -> Died:
    """What a point's row says of a process that ended by itself: its exit code, and the last line on its stderr."""
    if code < 0:
        name = signal_name(-code)
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return Died("crashed", f"the worker was ended by {name}{hint}")
    if any(s in said.lower() for s in ("memoryerror", "can't allocate memory", "out of memory")):
        return Died("oom", said, final=True)
    return Died("crashed", f"the worker ended with exit code {code}" + (f": {said}" if said else ""))


class Workers:
    """The processes of one point, one for each rank. Raises Died where they cannot be started."""

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
        except BaseException as error:
            self.close()
            if isinstance(error, Ended):
                raise cause_of_death(error.code, error.said) from None
            raise

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
        """End the processes and all that they have started."""
        for process in self.processes:
            process.end()
        for stderr in self.stderrs:
            stderr.close()
        self.folder.cleanup()


def _end_of(reply: dict) -> End:
    kind, culprit = reply.pop("kind", "error"), reply.pop("culprit", None)
    return End("ok" if reply["status"] == "ok" else kind, reply, culprit=culprit)


def _merged(replies: list[dict]) -> dict:
    """The first rank's reply, and of what they do not share the largest, or all by rank."""
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


def first_line(error: BaseException, length: int = 300) -> str:
    return " ".join(str(error).split())[:length] or type(error).__name__


def outcome(error: Exception) -> tuple[str, str]:
    """(status, reason) of what a system raised: only what is raised to refuse a point is "unsupported".

    >>> outcome(NotImplementedError("needs CUDA")), outcome(ValueError("shapes differ"))
    (('unsupported', 'needs CUDA'), ('crashed', 'ValueError: shapes differ'))
    """
    if is_out_of_memory(error):
        return "oom", first_line(error)
    if isinstance(error, NotImplementedError | Refused):
        return "unsupported", first_line(error)
    return "crashed", f"{type(error).__name__}: {first_line(error)}"


class Worker:
    """A point on its way: its system, its inputs, and what its first call gave. Every method returns a reply."""

    def __init__(self, point: Point, device: str):
        self.point, self.device = point, torch.device(device)
        self.system: System | None = None
        self.inputs: list = []
        self.checked: Output | None = None
        self.latest: Output | None = None
        self.tolerance: dict[str, float] = {}
        self.loops, self.keep, self.cold_s = 1, False, 0.0

    def start(self) -> dict:
        """Load libraries and build the system, which tries its kernel."""
        warm(self.point, self.device)
        self.system = build(self.point, self.device)
        return {}

    def prepare(self, tolerance: dict) -> dict:
        """Take the memory of the first call, and check it; ``tolerance``: what is known of it already."""
        if self.system is None:
            self.start()
        self.tolerance = tolerance
        self.system.tolerance = self.tolerance
        reply = {"cost": asdict(self.system.cost)}
        self.inputs, self.checked, reply["memory"], self.cold_s = footprint(self.system, self.device)
        errors, self.tolerance = self.system.check(self.inputs, self.checked)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the check took is for the processes that wait beside this one
        reply |= {"errors": errors, "tolerance": self.tolerance, "warmups": 1, "known": self.system.tolerance}
        wrong = [n for n, e in errors.items() if not e <= self.tolerance[n]]
        if wrong or not errors:
            said = ", ".join(f"{n} is off by {errors[n]:.1e}, allowed {self.tolerance[n]:.1e}" for n in wrong)
            reply |= {"status": "incorrect", "reason": said or "nothing was checked"}
        return reply

    def calibrate(self, sample_s: float) -> dict:
        """Warm up, longer where calls are quick and not where the checked call was long; choose a sample's loops, so
        that it takes ``sample_s`` at least, and reply with the seconds that it takes.
        """
        self.clock = self.make_clock()
        gc.collect()
        gc.disable()
        warmups, estimate, spent = 1, self.cold_s, 0.0
        while self.cold_s < LONG_S and (warmups < 2 or spent < WARM_S):  # by the clock, which ranks share
            estimate = self.clock.sample(self._call, 1)
            warmups, spent = warmups + 1, spent + estimate
        self.loops = loops_for(estimate, sample_s)
        return {"estimate": estimate * self.loops, "warmups": warmups, "loops": self.loops}

    def make_clock(self):
        return clock_for(self.device)

    def sample(self, last: bool) -> dict:
        self.keep = last
        return {"seconds": self.clock.sample(self._call, self.loops)}

    def _call(self) -> None:
        output = self.system.run(self.inputs)
        if self.keep:  # only in the last round: a result that lives on would cost the next call its memory
            self.latest = output

    def verify(self) -> dict:
        """The last timed call must still give what was checked: memory that is reused may not change a result."""
        latest = self.latest or self.system.run(self.inputs)  # an earlier process may have taken all samples
        was, now = self.checked.named(), latest.named()
        for name, limit in self.tolerance.items():
            # dout is standard normal, so this is the floor below which a gradient counts as zero
            floor = 1.0 if name in ("out", "lse") else 0.01 * was["out"].numel() ** 0.5
            apart = reference.error(now[name], was[name], floor)
            if not apart <= 2 * limit:
                said = f"{name} changed by {apart:.1e} between the checked and the last call"
                return {"status": "incorrect", "reason": said}
        return {}

    def answer(self, command: str, **arguments) -> dict:
        """The reply to a command; whatever a system raises is that point's status and reason."""
        try:
            return getattr(self, command)(**arguments)
        except Exception as error:  # noqa: BLE001  any failure of a system is a result, reported with its reason
            status, reason = outcome(error)
            found = {"status": status, "reason": reason, "final": status != "crashed"}
            return found | {"kind": End.of(error).kind, "culprit": getattr(error, "rank", None)}


def probe(dtypes: list[str]) -> dict:
    """The rates of this CPU: dtype -> FLOP/s, bytes/s from memory, bytes/s from cache."""
    machine = hardware.detect()
    found = {name: hardware.measure_cpu_peaks(name, machine) for name in dtypes}
    return {"peaks": {n: [p.flops_per_s, p.bytes_per_s_dram, p.bytes_per_s_cache] for n, p in found.items()}}


def serve(channel: Connection, settings: dict) -> None:
    """Answer the session's commands.

    Every reply says how much CPU time this process has used (``cpu_s``), so that the rest is known to be others'.
    """
    torch.set_num_threads(settings["threads"])
    limit_memory(settings.get("memory_bytes"))
    worker = None
    if settings.get("early"):  # while others of its group do so too; what goes wrong, prepare will raise again
        worker = _worker(settings)
        worker.answer("start")
    while True:
        command, arguments = pickle.loads(channel.recv_bytes())
        if command == "probe":
            reply = probe(**arguments)
        else:
            worker = worker or _worker(settings)
            reply = worker.answer(command, **arguments)
        reply = {"status": "ok", "reason": "", "cpu_s": time.process_time()} | reply
        channel.send_bytes(pickle.dumps(reply))


def _worker(settings: dict) -> Worker:
    point = Point.from_dict(settings["point"])
    return RankWorker(point, settings) if "rank" in settings else Worker(point, settings["device"])


class RankWorker(Worker):
    """A worker that joins the others in ``prepare``; every time that it reports is the slowest rank's."""

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
        # The session's own time is up first, and it names the rank that is behind.
        launch.join_group(self.folder, self.rank, ranks, 2 * self.timeout_s, backend)

    def make_clock(self):
        return SharedClock(super().make_clock(), self.device)


class SharedClock:
    """A clock that all ranks start together and that shows the slowest one's time."""

    def __init__(self, clock, device: torch.device):
        self.clock, self.device = clock, device

    def sample(self, call, loops: int) -> float:
        count_step()
        dist.barrier()
        return slowest(self.clock.sample(call, loops), self.device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks' seconds."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    count_step()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
