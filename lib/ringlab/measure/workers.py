"""Worker processes, which build, check and time a point on one rank or several as a
session asks. Times are taken in ``Worker.timed``.

A session sends a command and gets one reply for all ranks: "prepare" (build, first
call, check), "calibrate", "sample", "verify"; "probe" measures the CPU's rates. A reply
with a ``status`` other than "ok" ends the point. If a process is killed, crashes or
hangs, the session's side makes the reply and names the rank.
"""

import gc
import math
import os
import pickle
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from statistics import median

import torch
import torch.distributed as dist

from .. import hardware, reference
from ..ring import launch
from ..ring.launch import Ended, Process, end_of
from ..ring.watch import End, culprit, describe, signal_name
from ..tracking import OUT_OF_MEMORY, is_out_of_memory
from . import links
from .points import Point
from .systems import Output, System, build, count_step
from .timing import (
    LONG_S,
    MOST_ON_GPU,
    WARM_S,
    cpu_seconds,
    cuda_seconds,
    footprint,
    limit_memory,
    loops_for,
    warm,
)


def died(code: int, message: str) -> dict:
    """The reply for a process that ended with exit code ``code`` and ``message`` as its
    last line on stderr.
    """
    if code < 0:
        name = signal_name(-code)
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return {"status": "crashed", "reason": f"the worker was ended by {name}{hint}"}
    if any(words in message.lower() for words in ("memoryerror", *OUT_OF_MEMORY)):
        return {"status": "oom", "reason": message}
    return {
        "status": "crashed",
        "reason": f"the worker ended with exit code {code}"
        + (f": {message}" if message else ""),
    }


def last_line(file) -> str:
    """The last line of a file that a process wrote to."""
    file.seek(0)
    text = file.read().decode(errors="replace").strip()
    return text.rpartition("\n")[2].strip()[:300]


class Workers(ExitStack):
    """The processes of one point, one for each rank. If they cannot be started, every
    reply says why.

    ``close`` ends the processes and all that they started.
    """

    def __init__(self, settings: dict, ranks: int = 1):
        super().__init__()
        self.settings = settings
        self.failed = None
        self.processes = []
        self.folder = tempfile.mktemp(prefix="ringlab-")
        self.callback(shutil.rmtree, self.folder, ignore_errors=True)
        files = [tempfile.TemporaryFile() for _ in range(ranks)]
        self.stderrs = [self.enter_context(file) for file in files]
        modules = launch.MODULES if ranks > 1 else (__name__,)
        try:
            for rank, stderr in enumerate(self.stderrs):
                own = settings | {"rank": rank, "folder": self.folder}
                process = Process(
                    serve,
                    own,
                    modules=modules,
                    output=(stderr.fileno(), stderr.fileno()),
                    folder=self.folder,
                )
                self.callback(process.end)
                self.processes.append(process)
        except Ended as error:
            self.failed = died(error.code, error.last_line)

    def ask(self, command: str, timeout_s: float, **arguments) -> dict:
        """One reply for all ranks; ``timeout_s``: what is left of the time for the
        point.
        """
        if self.failed:
            return self.failed
        for process in self.processes:
            process.send((command, arguments))
        several = len(self.processes) > 1
        ends, progress = launch.collect(self.processes, self.folder, timeout_s)
        cause = culprit(ends, progress)
        if cause is None:
            return _merged([ends[rank].value for rank in range(len(ends))])
        rank, kind = cause
        if rank is None:  # ranks differ, and each that ended says in what
            rank = next((rank for rank, end in ends.items() if end.kind != "ok"), None)
        if rank not in ends:
            limit_s = self.settings["timeout_s"]
            text = f"took more than {limit_s:g} s"
            if several:
                # An error of another rank may name this one, which only hangs.
                cause = rank, "silent" if kind == "error" else kind
                text = f"{text}: {describe(cause, ends, progress, limit_s)}"
            return {"status": "timeout", "reason": text}
        reply = (
            ends[rank].value
            if kind != "died"
            else died(ends[rank].value.code, last_line(self.stderrs[rank]))
        )
        if several:
            replies = [
                end.value["reason"] for end in ends.values() if end.kind != "died"
            ]
            same = replies == [reply["reason"]] * len(self.processes)
            reason = reply["reason"] if same else f"rank {rank}: {reply['reason']}"
            # The rest is one rank's alone.
            reply = {"status": reply["status"], "reason": reason}
        return reply


def _merged(replies: list[dict]) -> dict:
    """One reply for all ranks: the first rank's, with the sums, the largest or the
    lists of what differs by rank.
    """
    merged = replies[0] | {"cpu_s": sum(reply["cpu_s"] for reply in replies)}
    if "ranks" in merged:
        peaks = [reply["memory"]["tracked_peak_bytes"] for reply in replies]
        by_rank = {
            n: [reply["ranks"][n] for reply in replies]
            for n in ("bytes_sent", "planned", "messages")
        }
        merged["ranks"] |= by_rank | {"tracked_peak_bytes": peaks}
        merged["memory"] = replies[peaks.index(max(peaks))]["memory"]
        merged["cost"]["floor_bytes"] = sum(
            reply["cost"]["floor_bytes"] for reply in replies
        )
    return merged


# --------------------------------------------------------------------------------------
# in the worker's process


class Worker:
    """A point in its process: its system, its inputs, and the output of its first call.
    Commands return a reply.

    On several ranks it joins the others in ``prepare``, and every time that it reports
    is the slowest rank's.
    """

    def __init__(self, settings: dict):
        self.settings = settings
        self.point = Point.from_dict(settings["point"])
        self.device = torch.device(settings["device"])
        self.ranks = self.point.world_size
        self.system: System | None = None
        self.latest: Output | None = None
        self.keep = False
        self.host_s: list[float] = []  # on a GPU, of each sample

    def start(self) -> dict:
        """Load libraries and build the system, which probes its kernel."""
        warm(self.point, self.device)
        self.system = build(self.point, self.device)
        return {}

    def prepare(self, tolerance: dict) -> dict:
        """Measure the memory of the first call and check its output; ``tolerance``:
        known already, by name.
        """
        gbps = dict(self.point.options).get("link_gbps")
        if gbps is not None:
            place = self.settings["folder"], self.settings["rank"]
            links.join(*place, self.ranks, gbps)
        if self.ranks > 1:
            self._join(self.settings["rank"])
        if self.system is None:
            self.start()
        self.system.tolerance = tolerance
        self.inputs, self.checked, memory, cold_s = footprint(self.system, self.device)
        errors, self.tolerance = self.system.check(self.inputs, self.checked)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes wait for this memory
        self.cold_s = self._slowest(cold_s)
        wrong = ", ".join(
            f"{name} is off by {error:.1e}, allowed {self.tolerance[name]:.1e}"
            for name, error in errors.items()
            if not error <= self.tolerance[name]
        )
        reply = {
            "cost": asdict(self.system.cost),
            "memory": memory,
            "errors": errors,
            "tolerance": self.tolerance,
            "known": self.system.tolerance,
            "warmups": 1,
        }
        if self.ranks > 1:
            sent = reply["ranks"] = self.system.sent()
            if not wrong and sent["planned"] not in (None, sent["bytes_sent"]):
                wrong = f"{sent['bytes_sent']} bytes were sent, the plan has {sent['planned']}"
        return reply | ({"status": "incorrect", "reason": wrong} if wrong else {})

    def _join(self, rank: int) -> None:
        backend = "gloo"
        if self.device.type == "cuda":
            if (count := torch.cuda.device_count()) < self.ranks:
                raise NotImplementedError(
                    f"{self.ranks} ranks need a GPU each, this machine has {count}"
                )
            self.device = torch.device("cuda", rank)
            backend = "nccl"
            torch.cuda.set_device(self.device)
        # The session's own time is up first, and it names the rank that is behind.
        launch.join_group(
            self.settings["folder"],
            rank,
            self.ranks,
            2 * self.settings["timeout_s"],
            backend,
        )

    def calibrate(self) -> dict:
        """Warm up unless the first call was long; choose the loops of a sample, and
        reply with its seconds.
        """
        gc.collect()
        gc.disable()
        warmups = 1
        estimate = self.cold_s
        spent = 0.0
        most = math.inf
        if self.device.type == "cuda":
            estimate = 0.0  # the first call may have compiled its kernels
            most = MOST_ON_GPU
        while (
            estimate < LONG_S
            and (warmups < 2 or spent < WARM_S)  # by the clock, which ranks share
            and warmups < most
        ):
            estimate = self.timed(1)
            warmups = warmups + 1
            spent = spent + estimate
        self.host_s.clear()
        self.loops = min(loops_for(estimate), most)
        return {
            "estimate": estimate * self.loops,
            "warmups": warmups,
            "loops": self.loops,
        }

    def timed(self, loops: int) -> float:
        """Seconds of a call, from so many of them."""
        if self.ranks > 1:
            count_step()
            dist.barrier()
        if self.device.type == "cuda":
            seconds, host_s = cuda_seconds(self._call, loops, self.device)
            self.host_s.append(host_s)
        else:
            seconds = cpu_seconds(self._call, loops)
        return self._slowest(seconds)

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks' seconds."""
        if self.ranks == 1:
            return seconds
        slowest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        count_step()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def sample(self, last: bool) -> dict:
        self.keep = last
        self.latest = None
        reply = {"seconds": self.timed(self.loops)}
        if self.host_s:
            reply["host_seconds"] = median(self.host_s)
        return reply

    def _call(self) -> None:
        output = self.system.run(self.inputs)
        if self.keep:  # only in the last round: a result that lives on would cost the next call its memory
            self.latest = output

    def verify(self) -> dict:
        """The last timed call must give the checked result again: reused memory may not
        change it.
        """
        latest = self.latest or self.system.run(
            self.inputs
        )  # an earlier process may have taken all samples
        was = self.checked.named()
        now = latest.named()
        for name, limit in self.tolerance.items():
            # dout is standard normal, so a gradient below this counts as zero
            floor = 1.0 if name in ("out", "lse") else 0.01 * was["out"].numel() ** 0.5
            distance = reference.error(now[name], was[name], floor)
            if not distance <= 2 * limit:
                reason = f"{name} changed by {distance:.1e} between the checked and the last call"
                return {"status": "incorrect", "reason": reason}
        return {}

    def answer(self, command: str, **arguments) -> dict:
        """The reply to a command; an error that a system raises becomes the point's
        status and reason.

        Only a refusal of the point is "unsupported".
        """
        try:
            return getattr(self, command)(**arguments)
        except Exception as error:  # noqa: BLE001  any failure of a system is a result, reported with its reason
            status = "crashed"
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if is_out_of_memory(error):
                status = "oom"
            elif isinstance(error, NotImplementedError):
                status = "unsupported"
            else:
                reason = f"{type(error).__name__}: {reason}"
            return {"status": status, "reason": reason, "end": end_of(error)}


def serve(channel: Connection, settings: dict) -> None:
    """Answer the session's commands.

    Every reply has the CPU time that this process has used (``cpu_s``), to tell it from
    that of other processes.
    """
    # What torch.compile keeps goes with the point, not into the user's temporary folder.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = settings["folder"]
    torch.set_num_threads(settings["threads"])
    limit_memory(settings.get("memory_bytes"))
    worker = Worker(settings) if "point" in settings else None
    if settings.get("early"):  # if this fails, so does ``prepare``
        worker.answer("start")
    while True:
        command, arguments = pickle.loads(channel.recv_bytes())
        if command == "probe":
            reply = {
                "peaks": {
                    name: hardware.measure_cpu_peaks(name)
                    for name in arguments["dtypes"]
                }
            }
        else:
            reply = worker.answer(command, **arguments)
        reply = {"status": "ok", "reason": "", "cpu_s": time.process_time()} | reply
        end = reply.pop("end", None) or End(
            "ok" if reply["status"] == "ok" else "error"
        )
        end.value = reply
        channel.send_bytes(pickle.dumps(end))
