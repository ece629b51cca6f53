"""One point in its own process: built, its memory taken, checked, and only then timed, on the runner's word.

The runner sends a command a line and gets one line back: "prepare" (build, first call, check), "calibrate", "sample",
"verify". A reply with a ``status`` other than "ok" is the end of the point. What the process itself cannot survive (a
kill, a segfault, no end) is the runner's to tell. Workers are forked by ``host``.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import socket
import threading
import time
from dataclasses import asdict

import torch

from .. import hardware, reference
from ..tracking import is_out_of_memory
from .footprint import footprint, limit_memory, warm
from .points import Point
from .systems import Output, System, build
from .timing import LONG_S, WARM_S, clock_for, loops_for


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
        from .rank import RankWorker  # it is built on this module

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
