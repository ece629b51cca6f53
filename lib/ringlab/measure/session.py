"""Runs the points that have no rows yet, each in its own process; points of a group
take turns.

Every sample is stored at once, so that a run that was stopped goes on at its next
round. A process that dies costs its point alone.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
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
from .points import ANCHORS, ANCHORS_ON_GPU, Group, Point, Result
from .stats import summary, unsteady
from .store import Run, Store, latest, read, result_row, unfinished, warn, warn_once
from .timing import POINT_S, Bounds, available_bytes, rounds_for
from .validity import objection
from .workers import Workers

TIMEOUT_S = 120.0  # that one point may take, all its rounds included
CONTENTION = 0.1  # times are not trusted where more cores are missing, as a part of the threads that need them
MORE, MORE_S = (
    3,
    45.0,
)  # times the rounds that a point asks for, and seconds of a run, for points that are unstable
LEAST_S = 0.9  # the machine counts in hundredths of a second, too coarse for less


def busy_seconds() -> float:
    """CPU time that all processes of this machine have used since it started, with what
    a hypervisor stole.

    NaN without /proc/stat.
    """
    text = hardware.Probe().read("/proc/stat")
    if text is None:
        return math.nan
    user, nice, system, _idle, _iowait, irq, softirq, stolen = map(
        int, text.split()[1:9]
    )
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


class CpuContention:
    """CPU time that other processes use while samples are taken, which makes our times
    too long.

    It is the machine's busy time minus our own. ``threads``: how many of ours must not
    wait. Nothing is known of less than a second in all.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = time.monotonic):
        self.threads = threads
        self.clock = clock
        self.wall_s = 0.0
        self.others_s = 0.0

    @contextmanager
    def watched(self, workers: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Count inside this context; ``workers``: CPU seconds that our other processes
        have used so far.
        """
        ours = lambda: time.process_time() + workers()  # noqa: E731
        busy = busy_seconds()
        used = ours()
        begin = self.clock()
        yield
        self.wall_s += self.clock() - begin
        self.others_s += busy_seconds() - busy - (ours() - used)

    @property
    def cores(self) -> float | None:
        """Cores that others used on average."""
        known = self.wall_s >= LEAST_S and not math.isnan(self.others_s)
        return round(max(0.0, self.others_s / self.wall_s), 2) if known else None

    @property
    def high(self) -> bool:
        """Too few cores were left for our threads."""
        return (self.cores or 0.0) + self.threads - (
            os.cpu_count() or 1
        ) > CONTENTION * self.threads


EVERY_S = 10.0
PRIOR_POINTS, PRIOR_S = 6, 30.0  # assumed before the first points tell the pace
PREPARED = 0.2  # of a point is done once it is built and checked


class Progress:
    """What a run prints to stderr: a line for each group and point, and every ten
    seconds what is at work.

    The time left assumes that all points take equally long.
    """

    def __init__(self, total: int, show: bool, clock: Callable[[], float]):
        self.total = total
        self.show = show
        self.clock = clock
        self.count = 0
        self.done = 0.0
        self.start = self.said = clock()

    def say(self, text: str) -> None:
        if self.show:
            self.said = self.clock()
            warn(text)

    def left(self) -> str:
        pace = (self.clock() - self.start + PRIOR_S) / (
            self.done + PRIOR_POINTS
        )  # seconds per point
        seconds = max(0.0, self.total - self.done) * pace
        return (
            f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
        )

    def did(self, text: str, share: float) -> None:
        """Another ``share`` of a point is done; ``text`` says what."""
        self.done += share
        if self.clock() - self.said > EVERY_S:
            self.say(f"{text} ({self.left()})")

    def result(self, result: Result) -> None:
        self.count = self.done = self.count + 1
        found = [] if result.median is None else [f"{result.median * 1e3:.4g} ms"]
        found += ["unstable"] if result.unstable else []
        found += [f"{result.status}: {result.reason}"] if result.status != "ok" else []
        said = " ".join(found) or "checked"
        self.say(
            f"[{self.count}/{self.total}] {result.group}: {result.point.label()}: {said}"
        )


@dataclass
class Member:
    """A point of a group that is being measured: its processes, its row so far, and its
    samples by round.
    """

    point: Point
    samples: dict[int, float]
    timed: bool
    threads: int  # of each rank
    workers: Workers
    row: dict = field(
        default_factory=lambda: {"status": "ok", "reason": "", "cpu_s": 0.0}
    )
    wanted: int = 0
    spent: float = 0.0

    @property
    def alive(self) -> bool:
        return self.row["status"] == "ok"


CONTEXT_BYTES = (
    700 << 20
)  # of GPU memory that each waiting process holds, with its libraries' workspaces


class Session:
    """The state that all groups of a run share; arguments as ``run``. ``workers``
    starts the processes of a point.
    """

    def __init__(
        self,
        folder,
        *,
        profile,
        timeout_s=TIMEOUT_S,
        progress=False,
        workers: Callable[..., Workers] = Workers,
        contention: type[CpuContention] = CpuContention,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        name = getattr(profile, "name", profile)
        device = hardware.get_profile(name).kind
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"profile {name!r} is of a GPU, and torch drives none here"
            )
        self.here = provenance.collect(device) | {"profile": name}
        self.folder = folder
        self.device = device
        self.anchors = ANCHORS_ON_GPU if device == "cuda" else ANCHORS
        self.timeout_s = timeout_s
        self.threads = self.here["threads"]
        self.show = progress
        memory = (
            available_bytes(hardware.detect().ram_bytes) if device == "cpu" else None
        )
        self.settings = {
            "device": device,
            "threads": self.threads,
            "timeout_s": timeout_s,
            "memory_bytes": memory,
        }
        self.start = workers
        self.contention = contention
        self.clock = clock
        self.bounds = Bounds(device, name, self.probe)
        self.results: list[Result] = []
        self.more_s = MORE_S  # left for points that are unstable
        self.tolerances: dict[
            tuple, dict
        ] = {}  # by shape and dtype: half precision takes seconds

    def run(
        self, groups: Iterable[Group], force: bool = False, minutes: float | None = None
    ) -> list[Result]:
        groups = list(groups)
        if odd := [group for group in groups if not isinstance(group, Group)]:
            raise ValueError(
                f"groups must be measure.Group objects, got {type(odd[0]).__name__}"
            )
        if twice := [
            name for name, count in Counter(g.name for g in groups).items() if count > 1
        ]:
            raise ValueError(f"two groups have the name {twice[0]!r}")
        if minutes is not None and not minutes > 0:
            raise ValueError(f"minutes must be positive, got {minutes!r}")
        until = self.clock() + (math.inf if minutes is None else 60 * minutes)
        self.more_s = MORE_S if minutes is None else min(MORE_S, 6 * minutes)
        with Store(self.folder) as self.store:
            there = [] if force else read(self.folder)
            kept = [r for r in there if self._counts(r)]
            disturbed = {r.group for r in kept if r.provenance.get("crowded")}
            if disturbed and self._busy_now():
                disturbed = set()
            kept = [
                r
                for r in kept
                if not (r.group in disturbed and r.provenance.get("crowded"))
            ]
            done = {(r.group, r.composition, r.point.id) for r in kept}
            wanted = {
                (g.name, g.composition(p), p.id) for g in groups for p in g.points
            }
            missing = [
                (
                    g,
                    [
                        p
                        for p in g.points
                        if (g.name, g.composition(p), p.id) not in done
                    ],
                )
                for g in groups
            ]
            todo = [(group, points) for group, points in missing if points]
            apart = {
                name
                for r in there
                for name in provenance.differs(r.provenance, self.here)
            }
            if self.show and todo and apart:
                warn(
                    f"rows that differ from this run in {', '.join(sorted(apart))} do not count: measuring anew"
                )
            elif self.show and not todo:
                newest = max((r.provenance.get("utc", "") for r in kept), default="")
                warn(
                    f"all {len(wanted)} points are there, the newest measured {newest}: nothing to measure"
                )
            self.progress = Progress(
                sum(len(points) for _, points in todo), self.show, self.clock
            )
            try:
                for number, (group, points) in enumerate(todo):
                    if number and self.clock() >= until:
                        left = sum(len(p) for _, p in todo[number:])
                        names = "; ".join(g.name for g, _ in todo[number:])
                        warn(
                            f"{minutes:g} minutes are over: {left} points are left, of {names}; run again to go on"
                        )
                        break
                    anew = force or group.name in disturbed
                    earlier = (
                        None if anew else unfinished(self.folder, group, self.here)
                    )
                    self._run_group(group, points, earlier)
            except KeyboardInterrupt:
                said = f"{len(self.results)} whole points are kept, and the samples of those that were begun"
                raise Interrupted(f"interrupted: {said}; run again to go on") from None
        return latest(
            [
                r
                for r in kept + self.results
                if (r.group, r.composition, r.point.id) in wanted
            ]
        )

    def _counts(self, result: Result) -> bool:
        """Whether a result of an earlier run counts: the same code on this machine, and
        nothing to try again.
        """
        same = not provenance.differs(result.provenance, self.here)
        less_time = result.provenance.get("timeout_s", self.timeout_s) < self.timeout_s
        return result.final and same and not (result.status == "timeout" and less_time)

    def _busy_now(self) -> bool:
        """Whether other work takes cores that our threads need."""
        with (now := self.contention(self.threads)).watched():
            time.sleep(1.0)
        if now.high:
            warn(
                f"rows that other work disturbed are kept, as others use {now.cores:g} cores now too"
            )
        return now.high

    def _run_group(self, group: Group, points: list[Point], run: Run | None) -> None:
        """Measure points of a group, together or one by one; ``run``: one that was
        stopped, to go on with.
        """
        turns = ", taking turns" if group.interleave and len(points) > 1 else ""
        self.progress.say(
            f"{group.name}: {len(points)} point{'s' * (len(points) > 1)}{turns} ({self.progress.left()})"
        )
        if run is None:
            run = Run(uuid4().hex[:12])
            about = {"members": group.id, "key": provenance.key(self.here)}
            self.store.append(kind="run", run=run.name, group=group.name, **about)
        most = (
            len(points) if group.interleave else 1
        )  # points whose processes live at the same time
        if (
            group.interleave
            and self.device == "cuda"
            and self.here["device_memory_bytes"]
        ):
            most = max(2, int(0.6 * self.here["device_memory_bytes"] / CONTEXT_BYTES))
        cohorts = [points[i : i + most] for i in range(0, len(points), most)]
        if group.timed and group.interleave:
            cohorts[0] = [*cohorts[0], *self.anchors]
        elif group.timed:
            cohorts.insert(0, [*self.anchors])
        while cohorts:
            members: list[Member] = []
            try:
                for point in cohorts.pop(0):
                    members.append(self._start(group, run, point))
                cohorts += [
                    [member.point] for member in self._run_together(group, run, members)
                ]
            finally:
                for member in members:
                    member.workers.close()

    def _start(self, group: Group, run: Run, point: Point) -> Member:
        """Start a point's processes; on a GPU, where it takes seconds, those of a group
        build their systems at once.
        """
        early = self.device == "cuda" and point.world_size == 1
        threads = max(1, self.threads // group.ranks)
        settings = self.settings | {
            "point": point.to_dict(),
            "early": early,
            "threads": threads,
        }
        workers = self.start(settings, point.world_size)
        timed = (
            group.timed and point.world_size <= self.threads
        )  # no time without a core for each rank
        return Member(
            point, run.samples.setdefault(point.id, {}), timed, threads, workers
        )

    def _run_together(
        self, group: Group, run: Run, members: list[Member]
    ) -> list[Member]:
        """Prepare all members, take rounds in turn and store the results; return those
        to measure again, alone.
        """
        origin = (
            self.here | provenance.moment(self.device) | {"timeout_s": self.timeout_s}
        )
        others = self.contention(self.threads if self.device == "cpu" else 0)
        for member in members:
            known = self.tolerances.setdefault(
                (*member.point.shape.values(), member.point.dtype), {}
            )
            known |= self._ask(member, "prepare", PREPARED, tolerance=known).get(
                "known", {}
            )
            if not member.timed:
                member.workers.close()
        self._take_rounds(
            group, run, [m for m in members if m.timed and m.alive], others
        )
        starved = [m for m in members if m.row["status"] == "oom" and len(members) > 1]
        self._conclude(
            group, run, [m for m in members if m not in starved], origin, others
        )
        return starved

    def _take_rounds(
        self, group: Group, run: Run, members: list[Member], others: CpuContention
    ) -> None:
        for member in members:
            self._ask(member, "calibrate", 0.0)
        members = [m for m in members if m.alive]
        for member, count in zip(
            members, rounds_for([m.row["estimate"] for m in members], group.interleave)
        ):
            in_time = int(
                self.timeout_s / 2 / member.row["estimate"]
            )  # the rest is for its first call and its check
            member.wanted = max(count, min(group.rounds, in_time))
        while waiting := self._waiting(members):
            more = len(waiting[0].samples) >= waiting[0].wanted
            start = self.clock()
            turn = run.rounds % len(waiting)  # each comes first in some round
            for member in waiting[turn:] + waiting[:turn]:
                number = len(member.samples) + 1
                share = 0.0 if more else (1 - PREPARED) / member.wanted
                text = f"{group.name}: {'more of what is unstable' if more else f'round {number} of {member.wanted}'}"
                with others.watched(lambda member=member: member.row["cpu_s"]):
                    self._ask(
                        member, "sample", share, text, last=number == member.wanted
                    )
                if member.alive:
                    seconds = member.samples[run.rounds] = member.row["seconds"]
                    sample = {
                        "round": run.rounds,
                        "seconds": seconds,
                        "loops": member.row["loops"],
                    }
                    self.store.append(
                        kind="sample", run=run.name, point=member.point.id, **sample
                    )
            run.rounds += 1
            self.more_s -= (self.clock() - start) * more
        for member in members:
            if member.alive:
                self._ask(member, "verify", 0.0)

    def _waiting(self, members: list[Member]) -> list[Member]:
        """Whose turn it is: those that lack rounds, and once none does the unstable
        ones, with the anchors beside them, as time allows.
        """
        alive = [m for m in members if m.alive]
        lacking = [m for m in alive if len(m.samples) < m.wanted]
        if lacking or self.more_s <= 0:
            return lacking

        def worth(m: Member) -> bool:
            seconds = [*m.samples.values()]
            cheap = (
                m.row.get("loops", 1) * sum(seconds[m.wanted :]) < POINT_S
                and m.spent < self.timeout_s / 2
            )
            return len(seconds) < MORE * m.wanted and cheap and unsteady(seconds)

        again = [m for m in alive if m.point not in self.anchors and worth(m)]
        beside = [m for m in alive if m.point in self.anchors and again]
        return again + beside

    def _ask(
        self, member: Member, command: str, share: float, text: str = "", **arguments
    ) -> dict:
        """Send one command to a point's processes; the reply goes into its row, and a
        failure ends the point.
        """
        start = self.clock()
        reply = member.workers.ask(
            command, max(0.0, self.timeout_s - member.spent), **arguments
        )
        member.spent += self.clock() - start
        member.row |= reply
        self.progress.did(text or f"{command} {member.point.label()}", share)
        if not member.alive:
            member.workers.close()
        return reply

    def probe(self, names: list[str]) -> dict:
        """The CPU's rates, measured in a process of their own; {} if that fails or
        other processes disturb it.

        A disturbed rate is too low, and correct rows would be faster than the roofline
        that it gives.
        """
        others = self.contention(self.threads)
        reply = {"cpu_s": 0.0}
        with closing(self.start(self.settings | {"memory_bytes": None})) as worker:
            with others.watched(lambda: reply["cpu_s"]):
                reply |= worker.ask("probe", self.timeout_s, dtypes=names)
        why = (
            f"others used {others.cores:g} cores meanwhile"
            if others.high
            else reply["reason"]
        )
        if why:
            warn_once(
                f"the CPU's rates could not be measured, so these rows have no lower bound: {why}"
            )
        return {} if why else reply["peaks"]

    def _conclude(
        self,
        group: Group,
        run: Run,
        members: list[Member],
        origin: dict,
        others: CpuContention,
    ):
        """Store each point with its statistics and roofline; a result that cannot be
        true becomes suspect.
        """
        self.bounds.need({m.point.dtype for m in members if m.alive and m.samples})
        state = provenance.device_state(self.device)
        origin |= {"others_cores": others.cores, "crowded": others.high} | (
            {"gpu_after": state} if state else {}
        )
        if others.high:
            warn(
                f"{group.name}: others used {others.cores:g} cores meanwhile, so that these times are too long"
            )
        gemm = [
            m for m in members if m.point.system == "sgemm" and m.samples and m.alive
        ]
        rate = (
            gemm[0].row["cost"]["flops"] / median(gemm[0].samples.values())
            if gemm
            else None
        )
        for member in members:
            row = {
                k: v
                for k, v in member.row.items()
                if k not in ("cpu_s", "known", "estimate", "seconds")
            }
            if group.ranks > 1:
                oversubscribed = member.point.world_size > self.threads
                row["ranks"] = {
                    "threads": member.threads,
                    "oversubscribed": oversubscribed,
                } | row.get("ranks", {})
            if member.alive:
                row |= self._statistics(member, rate, others.high)
            samples = member.samples if row.get("median") is not None else {}
            result = Result(
                point=member.point,
                group=group.name,
                run=run.name,
                composition=group.composition(member.point),
                interleaved=group.interleave,
                seconds=tuple(samples.values()),
                rounds=tuple(samples),
                final=row["status"] != "crashed",
                provenance=origin | {"seed": member.point.id},
                **row,
            )
            if result.status == "ok" and (why := objection(result)):
                status, _, reason = why.partition(": ")
                result = replace(result, status=status, reason=reason)
            self.store.append(**result_row(result, member.spent))
            if member.point not in self.anchors:
                self.results.append(result)
                self.progress.result(result)

    def _statistics(self, member: Member, rate: float | None, crowded: bool) -> dict:
        """Of the samples of a point, with its roofline."""
        cost = Cost(**member.row["cost"])
        row = {}
        if member.samples:
            found = summary([*member.samples.values()])
            gpus = (
                member.point.world_size if self.device == "cuda" else 1
            )  # a CPU has one rate for all
            mine = replace(
                cost,
                folded_flops=cost.folded_flops // gpus,
                floor_bytes=cost.floor_bytes // gpus,
            )
            bound, _ = self.bounds.below(mine, member.point.dtype, found.median)
            share = cost.flops / found.median / rate if rate else None
            row = asdict(found) | {
                "bound_seconds": bound,
                "share": share,
                "unstable": found.unstable or crowded,
            }
        return row


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; the message says what is kept."""


def run(
    groups: Iterable[Group],
    folder: Path | str,
    *,
    force: bool = False,
    minutes: float | None = None,
    **session,
) -> list[Result]:
    """Measure the points of ``groups`` that have no rows in ``folder`` yet, and return
    the results of all of them.

    ``profile``: a hardware profile or its name, on whose kind of device it measures and
    whose rates bound GPU times. Others are ``timeout_s=120``, seconds per point, and
    ``progress=False``: a line per point on stderr. ``force``: measure again what is
    there. ``minutes``: after this time no further group is begun (the first always is),
    and the next run goes on there. Unstable points get up to three times their rounds,
    for three seconds each and 45 seconds of a run.

    A point is done if a result exists for the same point, group, engine, method, torch,
    device, machine and threads, and, if the group is interleaved, the same points in
    it. The next run repeats a point whose worker was killed from outside, whose time
    limit was shorter, or which other work disturbed (the last only on a quiet machine).
    Raises Interrupted on Ctrl-C (all rows so far are kept), Busy if another run uses
    the folder, OSError if the folder cannot be written, and ValueError for invalid
    arguments.
    """
    return Session(folder, **session).run(groups, force, minutes)
