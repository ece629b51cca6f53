"""Runs the points that have no rows yet, each in its own process; points of a group take turns.

Every sample is stored at once, so that a run that was stopped goes on at its next round. A process that dies costs
its point alone.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from uuid import uuid4

import torch

from .. import hardware
from ..cost import Cost
from . import provenance
from .points import Group, Point, Result
from .stats import summary
from .store import Store, Unfinished, latest, read, result_row, unfinished, warn
from .timing import Bounds, available_bytes, rounds_for
from .workers import Died, TimedOut, Workers

TIMEOUT_S = 120.0  # that one point may take, all its rounds included
CONTENTION = 0.1  # times are not trusted where more cores are missing, as a part of the threads that need them
STAT = Path("/proc/stat")
LEAST_S = 0.9  # the machine counts in hundredths of a second, too coarse for less


class CpuContention:
    """CPU time that other processes use while samples are taken, which makes our times too long.

    It is the machine's busy time, with the time that a hypervisor steals, minus our own. ``threads``: how many of ours
    must not wait. Nothing is known without /proc/stat, or of less than a second in all.
    """

    def __init__(self, threads: int, cores: int | None = None, stat: Path = STAT, clock: Callable = time.monotonic):
        self.threads, self.available = threads, cores or os.cpu_count() or 1
        self.stat, self.clock, self.wall_s, self.others_s = stat, clock, 0.0, 0.0

    @contextmanager
    def watched(self, ours: Callable[[], float] = time.process_time) -> Iterator[None]:
        """Count inside this context; ``ours``: CPU seconds that this process and its workers have used so far."""
        busy, used, begin = self._busy(), ours(), self.clock()
        yield
        self.wall_s += self.clock() - begin
        if None not in (busy, now := self._busy()):
            self.others_s += now - busy - (ours() - used)

    def _busy(self) -> float | None:
        """Seconds of CPU time that all processes of this machine have used since it started."""
        text = hardware.Probe().read(str(self.stat))
        if text is None:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, text.split()[1:9])
        return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")

    @property
    def cores(self) -> float | None:
        """Cores that others used on average."""
        known = self.wall_s >= LEAST_S and self.stat.is_file()
        return round(max(0.0, self.others_s / self.wall_s), 2) if known else None

    @property
    def high(self) -> bool:
        """Too few cores were left for our threads."""
        return (self.cores or 0.0) + self.threads - self.available > CONTENTION * self.threads


EVERY_S = 10.0
PRIOR_POINTS, PRIOR_S = 6, 30.0  # assumed before the first points tell the pace
PREPARED = 0.2  # of a point is done once it is built and checked


class Progress:
    """What a run prints to stderr: a line for each group and point, and the current round with the time left.

    On a terminal that is one line which is overwritten, in a file or a pipe a line every ten seconds. The time left
    assumes that all points take equally long.
    """

    def __init__(self, total: int, show: bool, clock: Callable[[], float]):
        self.show, self.terminal, self.clock = show, show and sys.stderr.isatty(), clock
        self.total, self.count, self.done = total, 0, 0.0
        self.start = self.said = clock()

    def begin(self, group: Group, points: list[Point]) -> None:
        turns = ", taking turns" if group.interleave and len(points) > 1 else ""
        self._line(f"{group.name}: {len(points)} point{'s' * (len(points) > 1)}{turns} ({self._left()})")

    def did(self, text: str, share: float) -> None:
        """Another ``share`` of a point is done; ``text`` says what."""
        self.done += share
        if self.terminal:
            print(f"\r\033[K{text} ({self._left()})", end="", file=sys.stderr, flush=True)
        elif self.clock() - self.said > EVERY_S:
            self._line(f"{text} ({self._left()})")

    def result(self, result: Result, share: float) -> None:
        """A point is done; ``share``: what was left of it."""
        self.count, self.done = self.count + 1, self.done + share
        found = [] if result.median is None else [f"{result.median * 1e3:.4g} ms"]
        found += ["unstable"] if result.unstable else []
        found += [f"{result.status}: {result.reason}"] if result.status != "ok" else []
        said = " ".join(found) or "checked"
        self._line(f"[{self.count}/{self.total}] {result.group}: {result.point.label()}: {said}")

    def clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        self.clear()
        if self.show:
            self.said = self.clock()
            warn(text)

    def _left(self) -> str:
        pace = (self.clock() - self.start + PRIOR_S) / (self.done + PRIOR_POINTS)  # seconds per point
        left = max(0.0, self.total - self.done) * pace
        return f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"


@dataclass
class Member:
    """A point of a group that is being measured: its processes, its row so far, and its samples by round."""

    group: Group
    point: Point
    samples: dict[int, float] = field(default_factory=dict)
    workers: Workers | None = None
    row: dict = field(default_factory=lambda: {"status": "ok", "reason": ""})
    estimate: float = 0.0  # seconds of a sample
    wanted: int = 0
    spent: float = 0.0
    cpu_s: float = 0.0  # CPU time of its processes so far
    done: float = 0.0  # as a part of the point
    timed: bool = True

    @property
    def alive(self) -> bool:
        return self.row["status"] == "ok"

    @property
    def left(self) -> int:
        return max(0, self.wanted - len(self.samples)) if self.alive else 0

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
            self.workers = None


CONTEXT_BYTES = 700 << 20  # of GPU memory that each waiting process holds, with its libraries' workspaces


class Session:
    """The state that all groups of a run share. ``workers`` starts the processes of a point.

    ``memory_bytes``: how much a worker on the CPU may grow, by default what is available. Other arguments as ``run``.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        profile,
        device: str | None = None,
        rehearsal: bool = False,
        timeout_s: float = TIMEOUT_S,
        progress: bool = False,
        memory_bytes: int | None = None,
        workers: Callable[..., Workers] = Workers,
        contention: type[CpuContention] = CpuContention,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        name = getattr(profile, "name", profile)
        if device is None:
            device = "cpu" if rehearsal else hardware.get_profile(name).kind
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"profile {name!r} is of a GPU, and torch drives none here; rehearsal=True times this CPU")
        here = provenance.collect(device)
        if memory_bytes is None and device == "cpu":
            memory_bytes = available_bytes(hardware.detect().ram_bytes)
        self.folder, self.device, self.rehearsal, self.timeout_s = folder, device, rehearsal, timeout_s
        self.here, self.threads, self.show = here | {"profile": name}, here["threads"], progress
        self.settings = {"device": device, "threads": self.threads, "memory_bytes": memory_bytes}
        self.start, self.contention, self.clock = workers, contention, clock
        self.bounds = Bounds(device, None if rehearsal else name, self.probe)
        self.results: list[Result] = []
        self.said: set[str] = set()  # warnings that were printed
        self.tolerances: dict[tuple, dict] = {}  # by shape and dtype: half precision takes seconds

    def run(self, groups: Iterable[Group], force: bool = False, minutes: float | None = None) -> list[Result]:
        groups = _checked(groups, minutes)
        until = self.clock() + (math.inf if minutes is None else 60 * minutes)
        with Store(self.folder) as self.store:
            there = [] if force else read(self.folder)
            kept = [r for r in there if self._counts(r)]
            disturbed = self._disturbed(kept)
            kept = [r for r in kept if (r.group, r.run) not in disturbed]
            done = {(r.group, r.composition, r.point.id) for r in kept}
            wanted = {(g.name, g.composition(p), p.id) for g in groups for p in g.points}
            missing = [(g, [p for p in g.points if (g.name, g.composition(p), p.id) not in done]) for g in groups]
            todo = [(group, points) for group, points in missing if points]
            if self.show:
                self._explain(there, kept, wanted, todo)
            self.progress = Progress(sum(len(points) for _, points in todo), self.show, self.clock)
            try:
                for number, (group, points) in enumerate(todo):
                    if number and self.clock() >= until:
                        self.progress.clear()
                        rest = todo[number:]
                        left, names = sum(len(points) for _, points in rest), "; ".join(g.name for g, _ in rest)
                        warn(f"{minutes:g} minutes are over: {left} points are left, of {names}; run again to go on")
                        break
                    anew = force or group.name in {name for name, _ in disturbed}
                    earlier = None if anew else unfinished(self.folder, group, self.here, self.rehearsal)
                    self._run_group(group, points, earlier)
            except KeyboardInterrupt:
                self.progress.clear()
                said = f"{len(self.results)} points and the finished samples of others are kept"
                raise Interrupted(f"interrupted: {said}; run again to go on") from None
        return latest([r for r in kept + self.results if (r.group, r.composition, r.point.id) in wanted])

    def _explain(self, there: list[Result], kept: list[Result], wanted: set, todo: list) -> None:
        """Say why there is nothing to measure, or why rows that are there do not count."""
        if not todo:
            newest = max((r.provenance.get("utc", "") for r in kept), default="")
            warn(f"all {len(wanted)} points are there, the newest measured {newest}: nothing to measure")
            return
        rows = [r for r in there if (r.group, r.composition, r.point.id) in wanted]
        apart = [found for r in rows if (found := provenance.differs(r.provenance, self.here))]
        if apart:
            names = ", ".join(name for name in provenance.KEY if any(name in found for found in apart))
            warn(f"{len(apart)} rows that are there are of another {names}: measuring these points here")

    def _counts(self, result: Result) -> bool:
        """Whether a result of an earlier run counts: the same code on this machine, and nothing to try again."""
        same = result.rehearsal == self.rehearsal and not provenance.differs(result.provenance, self.here)
        less_time = result.provenance.get("timeout_s", self.timeout_s) < self.timeout_s
        return result.final and same and not (result.status == "timeout" and less_time)

    def _disturbed(self, kept: list[Result]) -> set[tuple[str, str]]:
        """(group, run) of the rows that other work disturbed, if the machine is quiet now."""
        found = {(r.group, r.run) for r in kept if r.provenance.get("crowded")}
        if found:
            with (now := self.contention(self.threads)).watched():
                time.sleep(1.0)
            if now.high:
                if self.show:
                    warn(f"rows that other work disturbed are kept, as others use {now.cores:g} cores now too")
                return set()
        return found

    def _run_group(self, group: Group, points: list[Point], earlier: Unfinished | None) -> None:
        """Measure points of a group, together or one by one; ``earlier``: a run that was stopped, to go on with."""
        self.progress.begin(group, points)
        if earlier is None:
            earlier = Unfinished(uuid4().hex[:12])
            self._append(earlier.run, kind="run", group=group.name, members=group.id, key=provenance.key(self.here))
        first = earlier.rounds
        for together in self._cohorts(group, points):
            members = [Member(group, p, earlier.samples.get(p.id, {})) for p in together]
            first = self._run_together(group, earlier.run, members, first)

    def _cohorts(self, group: Group, points: list[Point]) -> list[list[Point]]:
        """The points whose processes live at the same time: all that take turns, as many as fit on a GPU."""
        most = len(points) if group.interleave else 1
        if group.interleave and self.device == "cuda" and self.here["device_memory_bytes"]:
            most = max(2, int(0.6 * self.here["device_memory_bytes"] / CONTEXT_BYTES))
        return [points[i : i + most] for i in range(0, len(points), most)]

    def _run_together(self, group: Group, run: str, members: list[Member], first: int) -> int:
        """Prepare all, then take rounds in turn, from number ``first``; returns the number after the last."""
        origin = self.here | provenance.moment(self.device) | {"timeout_s": self.timeout_s}
        starved, others = [], self.contention(self.threads if self.device == "cpu" else 0)
        try:
            for member in members:
                self._start(member)
            for member in (m for m in members if m.alive):
                self._step(member, "prepare", PREPARED)
                if member.row["status"] == "oom" and any(m.workers for m in members):
                    starved.append(member)
                elif not group.timed or not member.timed:
                    member.close()
            last = self._take_rounds(group, run, members, first, others) if group.timed else first
            self._conclude(group, run, [m for m in members if m not in starved], origin, others)
        finally:
            for member in members:
                member.close()
        for member in starved:  # once more, with all of the memory
            last = self._run_together(group, run, [Member(group, member.point)], last)
        return last

    def _start(self, member: Member) -> None:
        """Start a point's processes; on a GPU, where it takes seconds, those of a group build their systems at once."""
        early = self.device == "cuda" and member.point.world_size == 1
        settings = self.settings | {"point": member.point.to_dict(), "early": early}
        if (ranks := member.group.ranks) > 1:
            settings |= {"threads": max(1, self.threads // ranks), "timeout_s": self.timeout_s}
            oversubscribed = member.point.world_size > self.threads  # its ranks have no core each: no time is taken
            member.row["ranks"] = {"threads": settings["threads"], "oversubscribed": oversubscribed}
            member.timed = not oversubscribed
        try:
            member.workers = self.start(settings, member.point.world_size)
        except Died as death:
            member.row |= {"status": death.status, "reason": death.reason, "final": death.final}

    def _take_rounds(self, group: Group, run: str, members: list[Member], first: int, others: CpuContention) -> int:
        for member in members:
            if member.alive and member.timed:
                reply = self._step(member, "calibrate", 0.0, sample_s=group.sample_s)
                member.estimate = reply.get("estimate", 0.0)
        alive = [m for m in members if m.alive and m.estimate]
        for member, count in zip(alive, rounds_for([m.estimate for m in alive], group.interleave)):
            member.wanted = max(count, group.rounds)
        number = first
        while waiting := [m for m in members if m.left]:
            turn = number % len(waiting)  # each comes first in some round
            for member in waiting[turn:] + waiting[:turn]:
                done, share = number - first, (1 - PREPARED) / member.wanted
                text = f"{group.name}: round {done + 1} of {done + max(m.left for m in waiting)}"
                with others.watched(lambda member=member: time.process_time() + member.cpu_s):
                    reply = self._step(member, "sample", share, text, last=member.left == 1)
                if member.alive:
                    member.samples[number] = reply["seconds"]
                    sample = {"round": number, "seconds": reply["seconds"], "loops": member.row["loops"]}
                    self._append(run, kind="sample", point=member.point.id, **sample)
            number += 1
        for member in members:
            if member.alive and member.samples:
                self._step(member, "verify", 0.0)
        return number

    def _step(self, member: Member, command: str, share: float, text: str = "", **arguments) -> dict:
        """Send one command to a point's process; a failure becomes the point's status and reason."""
        start = self.clock()
        known = self.tolerances.setdefault((*member.point.shape.values(), member.point.dtype), {})
        if command == "prepare":
            arguments["tolerance"] = known
        try:
            reply = member.workers.ask(command, max(0.0, self.timeout_s - member.spent), **arguments)
        except TimedOut as late:
            behind = f": {late}" if str(late) else ""
            reply = {"status": "timeout", "reason": f"took more than {self.timeout_s:g} s{behind}"}
        except Died as death:
            reply = {"status": death.status, "reason": death.reason, "final": death.final}
        member.spent += self.clock() - start
        member.cpu_s = reply.pop("cpu_s", member.cpu_s)
        known |= reply.pop("known", {})
        if "ranks" in reply:
            reply["ranks"] = member.row["ranks"] | reply["ranks"]
        member.row |= reply
        member.done += share
        self.progress.did(text or f"{member.group.name}: {command} {member.point.label()}", share)
        if not member.alive:
            member.close()
        return reply

    def probe(self, names: list[str]) -> dict:
        """The CPU's rates, measured in a process of their own; {} if that fails or other processes disturb it.

        A disturbed rate is too low, and correct rows would be faster than the roofline that it gives.
        """
        others, reply = self.contention(self.threads), {"cpu_s": 0.0}
        try:
            with closing(self.start(self.settings | {"memory_bytes": None})) as worker:
                with others.watched(lambda: time.process_time() + reply["cpu_s"]):
                    reply |= worker.ask("probe", self.timeout_s, dtypes=names)
            if others.high:
                raise Died("crashed", f"others used {others.cores:g} cores meanwhile")
            return reply["peaks"]
        except (Died, TimedOut) as failure:
            why = str(failure) or "no answer"
            if why not in self.said:
                self.said.add(why)
                warn(f"the CPU's rates could not be measured, so these rows have no lower bound: {why}")
            return {}

    def _conclude(self, group: Group, run: str, members: list[Member], origin: dict, others: CpuContention) -> None:
        """Store each point with its statistics and roofline; a result that cannot be true becomes suspect."""
        self.bounds.need({m.point.dtype for m in members if m.alive and m.samples})
        state = provenance.device_state(self.device)
        origin |= {"others_cores": others.cores, "crowded": others.high} | ({"gpu_after": state} if state else {})
        if others.high:
            warn(f"{group.name}: others used {others.cores:g} cores meanwhile, so that these times are too long")
        gemm = [m for m in members if m.point.system == "sgemm" and m.samples and m.alive]
        rate = gemm[0].row["cost"]["flops"] / median(gemm[0].samples.values()) if gemm else None
        for member in members:
            row = {k: v for k, v in member.row.items() if k not in ("estimate", "seconds")}
            if member.alive:
                row |= self._judged(member, rate, others.high)
            rounds = sorted(member.samples) if row.get("median") is not None else []
            result = Result(
                point=member.point, group=group.name, run=run, rehearsal=self.rehearsal,
                composition=group.composition(member.point), interleaved=group.interleave,
                seconds=tuple(member.samples[number] for number in rounds), rounds=tuple(rounds),
                provenance=origin | {"seed": member.point.id}, **row,
            )  # fmt: skip
            self.store.append(**result_row(result, member.spent))
            self.results.append(result)
            self.progress.result(result, 1 - member.done)

    def _judged(self, member: Member, rate: float | None, crowded: bool) -> dict:
        cost, doubts, row = Cost(**member.row["cost"]), [], {}
        peak = member.row["memory"]["tracked_peak_bytes"]
        floor = member.row["memory"]["floor_bytes"]  # of one rank's tensors
        if peak < floor:
            doubts.append(f"a peak of {peak} bytes is smaller than its own tensors, {floor} bytes")
        if member.samples:
            found = summary([member.samples[number] for number in sorted(member.samples)])
            gpus = member.point.world_size if self.device == "cuda" else 1  # a CPU has one rate for all
            mine = replace(cost, folded_flops=cost.folded_flops // gpus, floor_bytes=cost.floor_bytes // gpus)
            bound, below = self.bounds.below(mine, member.point.dtype, found.median)
            share = cost.flops / found.median / rate if rate else None
            row = asdict(found) | {"bound_seconds": bound, "share": share}
            row["unstable"] |= crowded
            if below:
                doubts.append(f"{found.median * 1e3:.3g} ms is below its bound of {bound * 1e3:.3g} ms")
        return row | ({"status": "suspect", "reason": "; ".join(doubts)} if doubts else {})

    def _append(self, run: str, **row) -> None:
        self.store.append(run=run, rehearsal=self.rehearsal, **row)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; the message says what is kept."""


def run(
    groups: Iterable[Group],
    folder: Path | str,
    *,
    profile,
    device: str | None = None,
    rehearsal: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: bool = False,
    force: bool = False,
    minutes: float | None = None,
) -> list[Result]:
    """Measure the points of ``groups`` that have no rows in ``folder`` yet, and return the results of all of them.

    ``profile``: a hardware profile or its name, whose rates bound GPU times. ``device``: "cuda" or "cpu", by default
    the profile's kind, and "cpu" for a rehearsal. ``timeout_s``: seconds per point. ``progress``: a line per point on
    stderr. ``force``: measure again what is there. ``minutes``: after this time no further group is begun (the first
    always is), and the next run goes on there.

    A point is done if a result exists for the same point, group, engine, method, torch, device, machine and threads,
    and, if the group is interleaved, the same points in it. The next run repeats a point whose worker was killed from
    outside, whose time limit was shorter, or which other work disturbed (the last only on a quiet machine).
    Raises Interrupted on Ctrl-C (all rows so far are kept), Busy if another run uses the folder, OSError if the folder
    cannot be written, and ValueError for invalid arguments.
    """
    how = {"profile": profile, "device": device, "rehearsal": rehearsal, "timeout_s": timeout_s, "progress": progress}
    return Session(folder, **how).run(groups, force, minutes)


def _checked(groups, minutes: float | None) -> list[Group]:
    groups = [groups] if isinstance(groups, Group) else list(groups)
    for group in groups:
        if not isinstance(group, Group):
            raise ValueError(f"groups must be measure.Group objects, got {type(group).__name__}")
    names = [g.name for g in groups]
    if len(set(names)) < len(names):
        raise ValueError(f"two groups have the name {next(n for n in names if names.count(n) > 1)!r}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes!r}")
    return groups
