"""One worker process: ``python -m ringlab.measure.worker`` reads a group on stdin and writes JSON lines on stdout.

For each point: build the system, take its memory on the first call, check that call against the oracle, and only then
time it. What the process itself cannot survive (a kill, a segfault, no end) is the runner's to report; therefore the
line {"kind": "at", "point": ...} precedes everything that is done for a point.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from dataclasses import asdict

import torch

from .. import cache, hardware, memory, reference
from .points import Group, Point
from .stats import summary
from .systems import Output, System, build
from .timing import WARM_S, clock_for, loops_for, rounds_for

MARGIN = 1.1  # rates measured by a probe are raised by this before they bound anything: a probe can be disturbed
WARM_TOKENS = 512
WORTH_BYTES = 32 << 20
PROBES = 3  # of the rates, before a row that is faster than its bound is called suspect
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def first_line(error: BaseException, length: int = 300) -> str:
    return " ".join(str(error).split())[:length] or type(error).__name__


def outcome(error: Exception) -> tuple[str, str]:
    """(status, reason) of what a system raised.

    >>> outcome(NotImplementedError("needs CUDA")), outcome(RuntimeError("CUDA out of memory. Tried"))[0]
    (('unsupported', 'needs CUDA'), 'oom')
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(s in str(error).lower() for s in OUT_OF_MEMORY):
        return "oom", first_line(error)
    if isinstance(error, NotImplementedError | ValueError):
        return "unsupported", first_line(error)
    return "crashed", f"{type(error).__name__}: {first_line(error)}"


class Member:
    """A point on its way through a worker: its system and inputs while it may be timed, and what is known of it."""

    def __init__(self, point: Point):
        self.point, self.row = point, {"status": "ok", "reason": ""}
        self.system: System | None = None
        self.inputs: list = []
        self.checked: Output | None = None
        self.latest: Output | None = None
        self.last_round = False
        self.seconds: list[float] = []
        self.loops, self.rounds, self.estimate = 1, 0, 0.0
        self.spent = 0.0

    @property
    def alive(self) -> bool:
        return self.row["status"] == "ok"

    def fail(self, status: str, reason: str) -> None:
        self.row |= {"status": status, "reason": reason}
        self.drop()

    def drop(self) -> None:
        self.system, self.inputs, self.checked, self.latest = None, [], None, None

    def call(self) -> None:
        output = self.system.run(self.inputs)
        if self.last_round:  # kept only then: a result that lives on would cost the next call its memory
            self.latest = output

    def prepare(self, device: torch.device, fresh: bool) -> None:
        """Build, take the memory of the first call, and check it."""
        if fresh:
            warm_system(self.point, device)
        self.system = build(self.point, device)
        cost = self.system.cost
        self.row["cost"] = asdict(cost)
        self.inputs, output, self.row["memory"] = footprint(self.system, device, fresh)
        self.row["warmups"] = 1
        errors, tolerance = self.system.check(self.inputs, output)
        self.row |= {"errors": errors, "tolerance": tolerance}
        wrong = [n for n, e in errors.items() if not e <= tolerance[n]]
        if wrong or not errors:
            said = ", ".join(f"{n} is off by {errors[n]:.1e}, allowed {tolerance[n]:.1e}" for n in wrong)
            return self.fail("incorrect", said or "nothing was checked")
        peak = self.row["memory"]["tracked_peak_bytes"]
        if peak < cost.floor_bytes:
            self.suspect(f"a peak of {peak} bytes is smaller than its own tensors, {cost.floor_bytes} bytes")
        self.checked = output

    def suspect(self, reason: str) -> None:
        self.row["suspicion"] = "; ".join(filter(None, [self.row.get("suspicion"), reason]))

    def calibrate(self, clock) -> None:
        """Warm up, longer where calls are quick, and choose the loops of a sample."""
        end = time.perf_counter() + WARM_S
        while self.row["warmups"] < 2 or time.perf_counter() < end:
            self.estimate = clock.sample(self.call, 1)
            self.row["warmups"] += 1
        self.loops = loops_for(self.estimate)

    def verify(self) -> None:
        """The last timed call must still give what was checked: memory that is reused may not change a result."""
        was, now = self.checked.named(), self.latest.named()
        for name, limit in self.row["tolerance"].items():
            # dout is standard normal, so this is the floor below which a gradient counts as zero
            floor = 1.0 if name in ("out", "lse") else 0.01 * was["out"].numel() ** 0.5
            apart = reference.error(now[name], was[name], floor)
            if not apart <= 2 * limit:
                return self.fail("incorrect", f"{name} changed by {apart:.1e} between the checked and the last call")


def footprint(system: System, device: torch.device, fresh: bool) -> tuple[list, Output, dict]:
    """(inputs, output, memory in bytes) of a first call that is not timed. Inputs, output and gradients count.

    ``tracked_peak_bytes``: live tensor storages. ``high_water_bytes``: the process's own mark above its resident size
    before the inputs were made, on the CPU, for 32 MiB of tensors or more, and only in a process that did nothing else
    before (``fresh``: what the allocator kept would hide what is taken from it). ``allocator_peak_bytes``: on CUDA.
    """
    memory.GLOBAL_POOL.clear()  # idle buffers of earlier points are not this one's, nor are its own then overlooked
    cache.GLOBAL.clear()
    gc.collect()
    floor = system.cost.floor_bytes
    found = {"floor_bytes": floor, "high_water_bytes": None, "allocator_peak_bytes": None}
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else memory.resident_bytes()
    inputs = system.inputs()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    mark = not on_gpu and fresh and floor >= WORTH_BYTES and memory.reset_high_water()
    with memory.LiveStorageTracker() as tracker:
        tracker.register(*inputs)
        output = system.run(inputs)
    if on_gpu:
        torch.cuda.synchronize(device)
        found["allocator_peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    if mark:
        found["high_water_bytes"] = memory.high_water_bytes() - before
    found["tracked_peak_bytes"] = tracker.peak_bytes
    return inputs, output, found


class Bounds:
    """Lower bounds on times: measured rates on a CPU, a profile's figures on a GPU; None where no figure is known.

    A probe that other processes disturb says too little, and its bound would accuse honest rows: the best of all probes
    counts, those of earlier workers (``known``: dtype -> FLOP/s, bytes/s from memory and from cache) included.
    """

    def __init__(self, device: torch.device, profile: str | None, known: dict):
        self.device, self.machine = device, hardware.detect()
        found = hardware.get_profile(profile) if profile and device.type == "cuda" else None
        self.profile = found.on(self.machine) if found else None
        cache_bytes, threads = self.machine.cache_bytes, torch.get_num_threads()
        self.peaks = {name: hardware.Peaks(*rates, cache_bytes, threads) for name, rates in known.items()}
        self.probed: set[str] = set()

    def probe(self, dtypes: set[str], again: bool = False) -> None:
        """Measure the rates of these dtypes, and of fp32, in which half precision may be computed: once each."""
        wanted = set() if self.device.type == "cuda" else dtypes | {"float32"}
        for name in sorted(wanted if again else wanted - self.probed):
            self.probed.add(name)
            found = hardware.measure_cpu_peaks(name, self.machine)
            self.peaks[name] = found.best(self.peaks[name]) if name in self.peaks else found

    def seconds(self, system: System) -> float | None:
        floor = system.cost.floor_bytes
        if self.device.type != "cuda":
            names = {"float32", str(system.dtype).removeprefix("torch.")}
            flops = max(self.peaks[name].flops_per_s for name in names)
            bandwidth = max(self.peaks[name].bandwidth(floor) for name in names)
            return system.cost.seconds(MARGIN * flops, MARGIN * bandwidth)
        if self.profile is None:
            return None
        rate = self.profile.peak(system.dtype, self.machine)
        if system.dtype == torch.float32 and rate and self.profile.flops.get("tf32"):
            rate = max(rate, self.profile.flops["tf32"] / 3)  # fp32 out of three tf32 products, as CUTLASS does
        return system.cost.seconds(rate, self.profile.bandwidth(floor)) or None

    def rates(self) -> dict:
        return {n: [p.flops_per_s, p.bytes_per_s_dram, p.bytes_per_s_cache] for n, p in self.peaks.items()}


def measure(group: Group, settings: dict, send) -> None:
    """Run all points of a group and send their samples and results."""
    device = torch.device(settings["device"])
    members = [Member(p) for p in group.points]

    def step(member: Member, action, *arguments) -> None:
        """One stage of one point; whatever it raises is that point's status and reason, and the others go on."""
        send(kind="at", point=member.point.id)
        start = time.perf_counter()
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  any failure of a system is a result, reported with its reason
            member.fail(*outcome(error))
            del error
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        member.spent += time.perf_counter() - start

    warm_libraries(device)
    clock, bounds = clock_for(device, settings.get("flush_l2", True)), Bounds(
        device, settings.get("profile"), settings.get("peaks", {})
    )

    def finish(member: Member) -> None:
        step(member, conclude, member, bounds)
        for name in ("suspicion", "sgemm_flops_per_s"):
            member.row.pop(name, None)
        send(kind="result", point=member.point.id, duration=member.spent, **member.row)

    def take(member: Member, number: int) -> None:
        member.last_round = number == member.rounds - 1
        member.seconds.append(clock.sample(member.call, member.loops))
        send(kind="sample", point=member.point.id, round=number, seconds=member.seconds[-1], loops=member.loops)

    batches = [members] if group.interleave else [[m] for m in members]
    for batch in batches:
        for number, member in enumerate(batch):
            step(member, member.prepare, device, number == 0 and batch is batches[0])
        if group.timed and any(m.alive for m in batch):
            bounds.probe({m.point.dtype for m in batch if m.alive})
            time_batch([m for m in batch if m.alive], group.interleave, clock, step, take)
        gemm = [m for m in batch if m.point.system == "sgemm" and m.seconds and m.alive]
        for member in batch:
            if gemm and member.seconds and member.alive:
                member.row["sgemm_flops_per_s"] = gemm[0].system.cost.flops / summary(gemm[0].seconds).median
            finish(member)
            member.drop()
    send(kind="peaks", peaks=bounds.rates())


def time_batch(members: list[Member], interleaved: bool, clock, step, take) -> None:
    gc.collect()
    gc.disable()
    try:
        for member in members:
            step(member, member.calibrate, clock)
        members = [m for m in members if m.alive]
        for member, count in zip(members, rounds_for([m.estimate for m in members], interleaved)):
            member.rounds = count
        for number in range(max((m.rounds for m in members), default=0)):
            for member in members:
                if member.alive and number < member.rounds:
                    step(member, take, member, number)
        for member in members:
            if member.alive:
                step(member, member.verify)
    finally:
        gc.enable()


def conclude(member: Member, bounds: Bounds) -> None:
    """Statistics, bound and share of a point; an ok that cannot be true becomes suspect."""
    row, system = member.row, member.system
    if not member.alive:
        return
    if member.seconds:
        found = summary(member.seconds)
        row |= asdict(found) | {"loops": member.loops}
        row["bound_seconds"] = bounds.seconds(system)
        for _ in range(PROBES):
            if row["bound_seconds"] and found.median < row["bound_seconds"]:
                bounds.probe({member.point.dtype}, again=True)
                row["bound_seconds"] = bounds.seconds(system)
        if row["bound_seconds"] and found.median < row["bound_seconds"]:
            member.suspect(f"{found.median * 1e3:.3g} ms is below its bound of {row['bound_seconds'] * 1e3:.3g} ms")
        rate = row.pop("sgemm_flops_per_s", None)
        row["share"] = system.cost.flops / found.median / rate if rate else None
    if row.get("suspicion"):
        row |= {"status": "suspect", "reason": row["suspicion"]}


def warm_libraries(device: torch.device) -> None:
    """Start threads and load kernels' code before any baseline is taken."""
    x = torch.ones(1, 2, 64, 64, device=device, requires_grad=True)
    with memory.LiveStorageTracker():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x) @ x
        torch.autograd.grad(out.sum(), x)
    torch.ones(1 << 16, device=device).mul_(2)


def warm_system(point: Point, device: torch.device) -> None:
    """Run a short point of the same kind, so that code pages and threads, which do not grow with n, are not counted.

    What the allocator keeps of it is given back where the C library can (glibc). Short points are not worth it.
    """
    if device.type != "cpu" or point.seq_len <= 4 * WARM_TOKENS or point.system == "sgemm":
        return
    try:
        system = build(point.but(seq_len=WARM_TOKENS), device)
        with memory.LiveStorageTracker():
            system.run(system.inputs())
    except (ValueError, NotImplementedError):  # a length that this system refuses; the point itself comes next
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    memory.GLOBAL_POOL.clear()
    gc.collect()
    if trim is not None:
        trim(0)


def limit_memory(extra_bytes: int | None) -> None:
    """Let the process grow by so much more, so that a failing allocation is an error here and not a kill elsewhere."""
    if extra_bytes is None:
        return
    import resource

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + extra_bytes, resource.RLIM_INFINITY))


def main() -> None:
    # Whatever a kernel prints goes to stderr: stdout is the channel to the runner.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())

    def wait_for_runner():
        while os.read(0, 1):  # ends when the runner does, even by SIGKILL
            pass
        os._exit(1)

    threading.Thread(target=wait_for_runner, daemon=True).start()

    def send(**row) -> None:
        channel.write(json.dumps(row) + "\n")

    torch.set_num_threads(settings["threads"])
    limit_memory(settings.get("memory_bytes"))
    points = tuple(Point.from_dict(p) for p in settings["points"])
    measure(Group(settings["group"], points, settings["interleave"], settings["timed"]), settings, send)
    send(kind="done")


if __name__ == "__main__":
    main()
