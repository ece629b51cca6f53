"""The runner's ends of the processes it starts: a host that forks workers, and a handle on each worker.

The runner's end of a point on several ranks: one process each, forked by the host, asked and heard together.

They are forked and not started by torch's launcher, which takes seconds per point to import torch in every rank; the
host has done that once. Each has a channel of its own, so that one that ends is known at once and by name.

One point in its own process: built, its memory taken, checked, and only then timed, on the runner's word.

The runner sends a command a line and gets one line back: "prepare" (build, first call, check), "calibrate", "sample",
"verify". A reply with a ``status`` other than "ok" is the end of the point. What the process itself cannot survive (a
kill, a segfault, no end) is the runner's to tell. Workers are forked by ``host``.

One rank of a point in its own process: a worker whose calls, times and verdicts are those of all ranks.

The process that forks workers: ``python -m ringlab.measure.workers``, with a Unix socket as its stdin.

torch is imported once, here, and every worker starts as a copy within milliseconds, in which the garbage collector
leaves alone what was imported: looking through it takes 0.1 s each time, and copies its pages. The host itself runs no
operator and never touches a GPU: threads and CUDA do not survive a fork.

A request is one JSON line: {"do": "spawn", "settings": ...} with the worker's channel and stderr as file descriptors,
answered by {"pid": ...}; or {"do": "reap", "pid": ...}, answered by {"code": exit code, or minus the signal}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from .. import hardware, reference
from ..ring import launch
from ..ring.launch import End
from ..tracking import is_out_of_memory
from . import provenance
from .contract import Output, System
from .points import Point
from .systems import begin, build
from .timing import LONG_S, WARM_S, clock_for, footprint, limit_memory, loops_for, warm

STARTUP_S = 180.0  # a first import of torch from a cold disk


class TimedOut(Exception):
    """No reply within the time."""


class Died(Exception):
    """The process ended: ``status`` and ``reason`` for its point, ``final`` where trying again would not help."""

    def __init__(self, status: str, reason: str, final: bool):
        super().__init__(reason)
        self.status, self.reason, self.final = status, reason, final


class Line:
    """JSON lines over a socket, each with a deadline."""

    def __init__(self, end: socket.socket):
        self.socket, self.rest = end, b""

    def send(self, message: dict, descriptors=()) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            if descriptors:
                socket.send_fds(self.socket, [data], descriptors)
            else:
                self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):  # it died; receiving tells
            pass

    def receive(self, timeout_s: float) -> dict | None:
        """The next message, or None where the other end has closed; raises TimedOut."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self.rest:
            self.socket.settimeout(max(1e-3, end - time.monotonic()))
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                raise TimedOut from None
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)


class Host:
    """A fresh interpreter that finds this package and forks workers; in a session of its own, out of Ctrl-C's way."""

    def __init__(self, command=(sys.executable, "-m", "ringlab.measure.workers")):
        ours, theirs = socket.socketpair()
        paths = [str(provenance.PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.stderr = tempfile.TemporaryFile()
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=self.stderr, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        self.line = Line(ours)

    def ask(self, message: dict, descriptors=()) -> dict:
        """Raises Died where the host has ended, which no point survives."""
        if self.line.socket.fileno() < 0:
            raise Died("crashed", "the process that starts workers has ended", False)
        self.line.send(message, descriptors)
        try:
            reply = self.line.receive(STARTUP_S)
        except TimedOut:
            raise Died("crashed", f"no answer within {STARTUP_S:g} s", False) from None
        if reply is None:
            raise Died(*autopsy(self.process.wait(), _tail(self.stderr)))
        return reply

    def close(self) -> None:
        self.line.socket.close()
        self.process.kill()
        self.process.wait()
        self.stderr.close()


class Handle:
    """One worker process; ``ask`` sends a command and waits for its reply."""

    def __init__(self, host: Host, settings: dict):
        ours, theirs = socket.socketpair()
        self.host, self.line, self.pid = host, Line(ours), None
        self.stderr = tempfile.TemporaryFile()
        with theirs:
            request = {"do": "spawn", "settings": settings}
            self.pid = host.ask(request, [theirs.fileno(), self.stderr.fileno()])["pid"]

    def ask(self, command: str, timeout_s: float, **arguments) -> dict:
        """The reply; raises TimedOut, or Died with the reason. The process is gone after either."""
        self.send(command, **arguments)
        return self.reply(timeout_s)

    def send(self, command: str, **arguments) -> None:
        self.line.send({"do": command, **arguments})

    def reply(self, timeout_s: float) -> dict:
        try:
            reply = self.line.receive(timeout_s)
        except TimedOut:
            self.close()
            raise
        if reply is None:
            said, code = _tail(self.stderr), self.close()
            raise Died(*autopsy(-signal.SIGKILL if code is None else code, said))
        return reply

    def close(self) -> int | None:
        """End the process and its children; its exit code, None where it had gone before."""
        if self.pid is None:
            return None
        self.line.socket.close()  # a worker that waits ends by itself; one that is busy is killed
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has not come so far as to lead a group
            pass
        pid, self.pid = self.pid, None
        self.stderr.close()
        try:
            return self.host.ask({"do": "reap", "pid": pid})["code"]
        except Died:  # the host itself has gone; the system reaps what it left
            return None


def autopsy(code: int, said: str) -> tuple[str, str, bool]:
    """(status, reason, final) of a process that ended by itself."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return "crashed", f"the worker was ended by {name}{hint}", False
    if any(s in said.lower() for s in ("memoryerror", "can't allocate memory", "out of memory")):
        return "oom", said, True
    return "crashed", f"the worker ended with exit code {code}" + (f": {said}" if said else ""), False


def _tail(stderr) -> str:
    """The last line that a process wrote to stderr."""
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


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
        counts = launch.beats(self.folder.name, len(self.handles))
        found = launch.culprit(ends, counts)
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
                    deadline = min(deadline, time.monotonic() + launch.GRACE_S)
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


def first_line(error: BaseException, length: int = 300) -> str:
    return " ".join(str(error).split())[:length] or type(error).__name__


def outcome(error: Exception) -> tuple[str, str]:
    """(status, reason) of what a system raised.

    >>> outcome(NotImplementedError("needs CUDA")), outcome(RuntimeError("CUDA out of memory. Tried"))[0]
    (('unsupported', 'needs CUDA'), 'oom')
    """
    if is_out_of_memory(error):
        return "oom", first_line(error)
    if isinstance(error, NotImplementedError | ValueError):
        return "unsupported", first_line(error)
    return "crashed", f"{type(error).__name__}: {first_line(error)}"


class Worker:
    """A point on its way: its system, its inputs, and what its first call gave. Every method returns a reply."""

    def __init__(self, point: Point, device: str, flush_l2: bool = True):
        self.point, self.device, self.flush_l2 = point, torch.device(device), flush_l2
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
        return clock_for(self.device, self.flush_l2)

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
            return {"status": status, "reason": reason}


def probe(dtypes: list[str]) -> dict:
    """The rates of this CPU: dtype -> FLOP/s, bytes/s from memory, bytes/s from cache."""
    machine = hardware.detect()
    found = {name: hardware.measure_cpu_peaks(name, machine) for name in dtypes}
    return {"peaks": {n: [p.flops_per_s, p.bytes_per_s_dram, p.bytes_per_s_cache] for n, p in found.items()}}


def worker_for(point: Point, settings: dict) -> Worker:
    """The worker of a point, or of one of its ranks."""
    if "rank" in settings:
        pass  # it is built on this module

        return RankWorker(point, settings)
    return Worker(point, settings["device"])


def serve(channel: socket.socket, settings: dict) -> None:
    """Answer the runner's commands until it hangs up, which ends the process at once, whatever it is doing.

    Every reply says how much CPU time this process has used (``cpu_s``), so that the rest is known to be others'.
    """
    requests: queue.Queue = queue.Queue()
    lines = channel.makefile("rb")

    def listen():
        for line in lines:
            requests.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    torch.set_num_threads(settings["threads"])
    limit_memory(settings.get("memory_bytes"))
    worker = None
    if settings.get("early"):  # while others of its group do so too; what goes wrong, prepare will meet again
        worker = worker_for(Point.from_dict(settings["point"]), settings)
        worker.answer("start")
    while True:
        request = requests.get()
        command = request.pop("do")
        if command == "probe":
            reply = probe(**request)
        else:
            if worker is None:
                worker = worker_for(Point.from_dict(settings["point"]), settings)
            reply = worker.answer(command, **request)
        reply = {"status": "ok", "reason": "", "cpu_s": time.process_time()} | reply
        channel.sendall(json.dumps(reply).encode() + b"\n")


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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", launch.loopback())
        beat = launch.Beat(self.folder, self.rank)
        store = dist.FileStore(str(Path(self.folder, "store")), ranks)
        # The runner's own time is up first, and it tells who is behind.
        launch.meet(store, self.rank, ranks, 2 * self.timeout_s, beat, backend)

    def make_clock(self):
        return SharedClock(super().make_clock(), self.device)

    def answer(self, command: str, **arguments) -> dict:
        """The reply to a command, and whether what was raised only tells that another rank has gone."""
        try:
            return getattr(self, command)(**arguments)
        except Exception as error:  # noqa: BLE001  any failure of a system is a result, reported with its reason
            status, reason = outcome(error)
            kind, culprit = launch.End.of(error).kind, getattr(error, "rank", None)
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


def main() -> None:
    runner = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's, which then ends us
    while True:
        line, descriptors, _, _ = socket.recv_fds(runner, 1 << 20, 2)
        if not line:
            return
        request = json.loads(line)
        if request["do"] == "reap":
            _, status = os.waitpid(request["pid"], 0)
            reply = {"code": os.waitstatus_to_exitcode(status)}
        else:
            if "rank" in request["settings"]:
                importlib.import_module(launch.COMPILER)  # once here, not in every rank
            gc.freeze()
            reply = {"pid": _spawn(runner, request["settings"], *descriptors)}
        runner.sendall(json.dumps(reply).encode() + b"\n")


def _spawn(runner: socket.socket, settings: dict, channel: int, stderr: int) -> int:
    pid = os.fork()
    if pid:
        os.close(channel)
        os.close(stderr)
        return pid
    code = 1
    try:
        os.setsid()  # a group of its own, so that a kill takes its children too
        runner.close()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(stderr, 1)  # whatever a kernel prints
        os.dup2(stderr, 2)
        serve(socket.socket(fileno=channel), settings)
    except BaseException:  # noqa: BLE001  a fork may not return into the host's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
