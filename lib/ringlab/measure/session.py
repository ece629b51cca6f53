"""The session: runs the points that have no rows yet, each in its own process; points
of a group take turns.

Every sample is stored at once, so that a run that was stopped goes on at its next
round. A process that dies costs its point alone.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import torch

from .. import hardware
from ..cost import Cost
from . import provenance
from .points import ANCHORS, ANCHORS_ON_GPU, Group, Point, Result
from .stats import is_unstable, summary
from .store import (
    Run,
    Store,
    latest,
    read_with_runs,
    result_row,
    unfinished,
    warn,
    warn_once,
)
from .timing import POINT_S, Bounds, available_bytes, rounds_for
from .validity import why_not_quotable
from .workers import Workers

TIMEOUT_S = 120.0  # that one point may take, all its rounds included
CONTENTION = 0.1  # times are not trusted where more cores are missing, as a part of the threads that need them
# times the rounds that a point asks for, and seconds of a run, for points that are unstable
MORE = 3
MORE_S = 45.0
LEAST_S = 0.9  # the machine counts in hundredths of a second, too coarse for less


def busy_seconds() -> float:
    """CPU time that all processes of this machine have used since it started, with what
    a hypervisor stole.

    NaN without /proc/stat.
    """
    text = hardware.Probe().read("/proc/stat")
    if text is None:
        return math.nan
    # user, nice, system, idle, waiting, interrupts of both kinds, stolen
    ticks = [*map(int, text.split()[1:9])]
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


@dataclass
class CpuContention:
    """CPU time that other processes use while samples are taken, which makes our times
    too long.

    It is the machine's busy time minus our own. ``threads``: how many of ours must not
    wait. Nothing is known of less than a second in all.
    """

    threads: int
    clock: Callable[[], float] = time.monotonic
    wall_s: float = 0.0
    others_s: float = 0.0

    @contextmanager
    def watched(self, workers: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Count inside this context; ``workers``: CPU seconds that our other processes
        have used so far.
        """

        def others() -> float:
            return busy_seconds() - time.process_time() - workers()

        begin = self.clock()
        before = others()
        yield
        self.wall_s += self.clock() - begin
        self.others_s += others() - before

    @property
    def cores(self) -> float | None:
        """Cores that others used on average."""
        if self.wall_s < LEAST_S or math.isnan(self.others_s):
            return None
        return round(max(0.0, self.others_s / self.wall_s), 2)

    @property
    def high(self) -> bool:
        """Too few cores were left for our threads."""
        missing = (self.cores or 0.0) + self.threads - (os.cpu_count() or 1)
        return missing > CONTENTION * self.threads


EVERY_S = 10.0
POINT_TAKES_S = 5.0  # if it was never measured
PRIOR_S = 60.0  # of points at the pace of earlier rows, until this run's own is known
PREPARED = 0.2  # of a point is done once it is built and checked


@dataclass
class Progress:
    """What a run prints to stderr: a line for each group and point, and every ten
    seconds what is at work.

    The time left is what the missing points took when they were last measured,
    ``expected`` by (group, point id), on this machine or another, times how much longer
    those of this run take.
    """

    expected: dict[tuple[str, str], float]
    show: bool
    clock: Callable[[], float]
    count: int = 0
    finished: float = 0.0  # seconds of whole points
    done: float = 0.0  # of parts too

    def __post_init__(self):
        self.start = self.last_line = self.clock()

    def say(self, text: str) -> None:
        if self.show:
            self.last_line = self.clock()
            warn(text)

    def left(self) -> str:
        pace = (self.clock() - self.start + PRIOR_S) / (self.done + PRIOR_S)
        left = max(0.0, sum(self.expected.values()) - self.done) * pace
        return f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"

    def did(self, text: str, seconds: float) -> None:
        """Another part of a point is done, as long as expected; ``text`` says what."""
        self.done += seconds
        if self.clock() - self.last_line > EVERY_S:
            self.say(f"{text} ({self.left()})")

    def result(self, result: Result) -> None:
        self.count += 1
        self.finished += self.expected[result.id]
        self.done = self.finished
        parts = [] if result.median is None else [f"{result.median * 1e3:.4g} ms"]
        parts += ["unstable"] * result.unstable
        parts += [f"{result.status}: {result.reason}"] * (result.status != "ok")
        self.say(
            f"[{self.count}/{len(self.expected)}] {result.group}: {result.point.label()}: "
            f"{' '.join(parts) or 'checked'}"
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
    expected_s: float
    workers: Workers
    row: dict = field(
        default_factory=lambda: {"status": "ok", "reason": "", "cpu_s": 0.0}
    )
    rounds: int = 0  # to take
    spent: float = 0.0

    @property
    def alive(self) -> bool:
        return self.row["status"] == "ok"


# Of GPU memory that each waiting process holds, with its libraries' workspaces.
CONTEXT_BYTES = 700 << 20
PASSING = "cpu_s", "known", "estimate"  # parts of a reply that no row keeps


@dataclass
class Session:
    """The state that all groups of a run share; arguments as ``run``. ``workers``
    starts the processes of a point.
    """

    folder: Path | str
    profile: hardware.Profile | str
    timeout_s: float = TIMEOUT_S
    progress: bool = False
    after: Callable[[Group | None, int], None] = lambda group, left: None
    workers: Callable[..., Workers] = Workers
    contention: type[CpuContention] = CpuContention
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self):
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s!r}")
        name = getattr(self.profile, "name", self.profile)
        self.device = hardware.get_profile(name).kind
        on_cpu = self.device == "cpu"
        if not on_cpu and not torch.cuda.is_available():
            raise ValueError(
                f"profile {name!r} is of a GPU, and torch drives none here"
            )
        self.here = provenance.collect(self.device) | {"profile": name}
        self.anchors = ANCHORS if on_cpu else ANCHORS_ON_GPU
        self.threads = self.here["threads"]
        ram_bytes = hardware.detect().ram_bytes
        self.settings = {
            "device": self.device,
            "threads": self.threads,
            "timeout_s": self.timeout_s,
            "memory_bytes": available_bytes(ram_bytes) if on_cpu else None,
        }
        self.bounds = Bounds(self.device, name, self.probe)
        self.results: list[Result] = []
        # By shape and dtype: of half precision they take seconds.
        self.tolerances: dict[tuple, dict] = {}

    def run(
        self, groups: Iterable[Group], force: bool = False, minutes: float | None = None
    ) -> list[Result]:
        groups = list(groups)
        if odd := [group for group in groups if not isinstance(group, Group)]:
            raise ValueError(
                f"groups must be measure.Group objects, got {type(odd[0]).__name__}"
            )
        names = [g.name for g in groups]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two groups have the name {twice[0]!r}")
        if minutes is not None and not minutes > 0:
            raise ValueError(f"minutes must be positive, got {minutes!r}")
        minutes = math.inf if minutes is None else minutes
        until = self.clock() + 60 * minutes
        self.more_s = min(MORE_S, 6 * minutes)
        with Store(self.folder) as self.store:
            everything, runs = read_with_runs(self.folder)
            stored = [] if force else everything
            kept = [r for r in stored if self._counts(r)]
            crowded = [r for r in kept if r.provenance.get("crowded")]
            disturbed = set()
            if crowded and not self._busy_now():
                disturbed = {r.group for r in crowded}
                kept = [r for r in kept if not r.provenance.get("crowded")]
            requested = {key for g in groups for key in g.keys}
            missing = requested - {row.key for row in kept}
            count = len(missing)
            if self.progress:
                self._say_what_counts(stored, kept, count, len(requested))
            took = {r.id: r.duration for r in everything if r.duration}
            ids = ((name, point) for name, _, point in missing)
            expected = {each: took.get(each, POINT_TAKES_S) for each in ids}
            self.lines = Progress(expected, self.progress, self.clock)
            todo = [group for group in groups if missing & {*group.keys}]
            try:
                self.after(None, count)
                while todo:
                    group = todo.pop(0)
                    each = zip(group.points, group.keys)
                    points = [point for point, key in each if key in missing]
                    anew = force or group.name in disturbed
                    run = None if anew else unfinished(runs, group, self.here)
                    self._run_group(group, points, run)
                    missing -= {*group.keys}
                    self.after(group, len(missing))
                    if todo and self.clock() >= until:
                        names = "; ".join(g.name for g in todo)
                        warn(
                            f"{minutes:g} minutes are over: {len(missing)} points are left, of {names}; "
                            "run again to go on"
                        )
                        break
            except KeyboardInterrupt:
                there = len(requested) - count + len(self.results)
                raise Interrupted(
                    f"interrupted: {there} of {len(requested)} points are kept, and the samples of those that "
                    "were begun; run again to go on"
                ) from None
        return latest([r for r in kept + self.results if r.key in requested])

    def _say_what_counts(self, stored, kept, missing: int, requested: int) -> None:
        """Say why rows that are there do not count, or that all are there."""
        differing = [provenance.differs(row.provenance, self.here) for row in stored]
        newest = max((row.provenance.get("utc", "") for row in kept), default="")
        if not missing:
            warn(
                f"all {requested} points are there, the newest measured {newest}: nothing to measure"
            )
        elif names := sorted({name for each in differing for name in each}):
            warn(
                f"rows that differ from this run in {', '.join(names)} do not count: measuring anew"
            )

    def _counts(self, result: Result) -> bool:
        """Whether a result of an earlier run counts: the same code on this machine, and
        nothing to try again.
        """
        same = not provenance.differs(result.provenance, self.here)
        less_time = result.provenance.get("timeout_s", self.timeout_s) < self.timeout_s
        again = {"crashed", "timeout"} if less_time else {"crashed"}
        return same and result.status not in again

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
        self.lines.say(
            f"{group.name}: {len(points)} point{'s' * (len(points) > 1)}{turns} ({self.lines.left()})"
        )
        if run is None:
            run = Run(uuid4().hex[:12])
            self.store.append(
                kind="run",
                run=run.name,
                group=group.name,
                members=group.id,
                key=provenance.key(self.here),
            )
        most = 1  # points whose processes live at the same time
        if group.interleave:
            most = len(points)
            memory = self.here["device_memory_bytes"]
            if self.device == "cuda" and memory:
                most = max(2, int(0.6 * memory / CONTEXT_BYTES))
        cohorts = [points[i : i + most] for i in range(0, len(points), most)]
        if group.timed and group.interleave:
            cohorts[0] = [*cohorts[0], *self.anchors]
        elif group.timed:
            cohorts.insert(0, [*self.anchors])
        while cohorts:
            with ExitStack() as stack:
                members = []
                for point in cohorts.pop(0):
                    members.append(self._start(group, run, point))
                    stack.callback(members[-1].workers.close)
                starved = self._run_together(group, run, members)
            cohorts += [[member.point] for member in starved]

    def _start(self, group: Group, run: Run, point: Point) -> Member:
        """Start a point's processes; on a GPU, where it takes seconds, those of a group
        build their systems at once.
        """
        ranks = point.world_size
        threads = max(1, self.threads // group.ranks)
        early = self.device == "cuda" and ranks == 1
        own = {"point": point.to_dict(), "early": early, "threads": threads}
        workers = self.workers(self.settings | own, ranks)
        timed = group.timed and ranks <= self.threads  # with a core for each rank
        samples = run.samples.setdefault(point.id, {})
        expected_s = self.lines.expected.get((group.name, point.id), 0.0)
        return Member(point, samples, timed, threads, expected_s, workers)

    def _run_together(
        self, group: Group, run: Run, members: list[Member]
    ) -> list[Member]:
        """Prepare all members, take rounds in turn and store the results; return those
        to measure again, alone.
        """
        origin = self.here | provenance.moment(self.device)
        origin["timeout_s"] = self.timeout_s
        others = self.contention(self.threads if self.device == "cpu" else 0)
        for member in members:
            shape = *member.point.shape.values(), member.point.dtype
            known = self.tolerances.setdefault(shape, {})
            reply = self._ask(member, "prepare", PREPARED, tolerance=known)
            known |= reply.get("known", {})
            if not member.timed:
                member.workers.close()
        timed = [m for m in members if m.timed and m.alive]
        self._take_rounds(group, run, timed, others)
        starved = [m for m in members if m.row["status"] == "oom" and len(members) > 1]
        done = [m for m in members if m not in starved]
        self._conclude(group, run, done, origin, others)
        return starved

    def _take_rounds(
        self, group: Group, run: Run, members: list[Member], others: CpuContention
    ) -> None:
        for member in members:
            self._ask(member, "calibrate", 0.0)
        members = [m for m in members if m.alive]
        estimates = [m.row["estimate"] for m in members]
        counts = rounds_for(estimates, group.interleave)
        for member, seconds, count in zip(members, estimates, counts):
            # The rest of its time is for its first call and its check.
            in_time = int(self.timeout_s / 2 / seconds)
            member.rounds = max(count, min(group.rounds, in_time))
        while waiting := self._waiting(members):
            more = len(waiting[0].samples) >= waiting[0].rounds
            start = self.clock()
            turn = run.rounds % len(waiting)  # each comes first in some round
            for member in waiting[turn:] + waiting[:turn]:
                row = member.row
                number = len(member.samples) + 1
                share = 0.0 if more else (1 - PREPARED) / member.rounds
                text = f"{group.name}: {'more of what is unstable' if more else f'round {number} of {member.rounds}'}"
                with others.watched(lambda row=row: row["cpu_s"]):
                    last = number == member.rounds
                    self._ask(member, "sample", share, text, last=last)
                if member.alive:
                    member.samples[run.rounds] = row["seconds"]
                    self.store.append(
                        kind="sample",
                        run=run.name,
                        round=run.rounds,
                        point=member.point.id,
                        seconds=row["seconds"],
                        loops=row["loops"],
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
        lacking = [m for m in alive if len(m.samples) < m.rounds]
        if lacking or self.more_s <= 0:
            return lacking

        def worth_more(m: Member) -> bool:
            seconds = [*m.samples.values()]
            more_s = m.row.get("loops", 1) * sum(seconds[m.rounds :])
            in_time = more_s < POINT_S and m.spent < self.timeout_s / 2
            return len(seconds) < MORE * m.rounds and in_time and is_unstable(seconds)

        anchors = [m for m in alive if m.point in self.anchors]
        unstable = [m for m in alive if m not in anchors and worth_more(m)]
        return unstable and unstable + anchors

    def _ask(
        self, member: Member, command: str, share: float, text: str = "", **arguments
    ) -> dict:
        """Send one command to a point's processes; the reply goes into its row, and a
        failure ends the point.
        """
        start = self.clock()
        left = max(0.0, self.timeout_s - member.spent)
        reply = member.workers.ask(command, left, **arguments)
        member.spent += self.clock() - start
        member.row |= reply
        text = text or f"{command} {member.point.label()}"
        self.lines.did(text, share * member.expected_s)
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
        with closing(self.workers(self.settings | {"memory_bytes": None})) as worker:
            with others.watched(lambda: reply["cpu_s"]):
                reply |= worker.ask("probe", self.timeout_s, dtypes=names)
        why = reply["reason"]
        if others.high:
            why = f"others used {others.cores:g} cores meanwhile"
        if not why:
            return reply["peaks"]
        warn_once(
            f"the CPU's rates could not be measured, so these rows have no lower bound: {why}"
        )
        return {}

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
        origin |= {"others_cores": others.cores, "crowded": others.high}
        if state := provenance.device_state(self.device):
            origin["gpu_after"] = state
        if others.high:
            warn(
                f"{group.name}: others used {others.cores:g} cores meanwhile, so that these times are too long"
            )
        for member in members:
            point = member.point
            row = member.row
            if group.ranks > 1:
                oversubscribed = point.world_size > self.threads
                known = {"threads": member.threads, "oversubscribed": oversubscribed}
                row["ranks"] = known | row.get("ranks", {})
            if member.alive and member.samples:
                row |= self._statistics(member, others.high)
            samples = member.samples if row.get("median") is not None else {}
            row |= {"seconds": tuple(samples.values()), "rounds": tuple(samples)}
            result = Result(
                point=point,
                group=group.name,
                run=run.name,
                composition=group.composition(point),
                interleaved=group.interleave,
                duration=round(member.spent, 3),
                provenance=origin | {"seed": point.id},
                **{name: x for name, x in row.items() if name not in PASSING},
            )
            if result.status == "ok" and (why := why_not_quotable(result)):
                status, _, reason = why.partition(": ")
                result = replace(result, status=status, reason=reason)
            self.store.append(**result_row(result))
            if point not in self.anchors:
                self.results.append(result)
                self.lines.result(result)

    def _statistics(self, member: Member, crowded: bool) -> dict:
        """Of the samples of a point, with its roofline."""
        cost = Cost(**member.row["cost"])
        point = member.point
        times = summary([*member.samples.values()])
        gpus = point.world_size if self.device == "cuda" else 1  # a CPU has one rate
        own = {x: getattr(cost, x) // gpus for x in ("folded_flops", "floor_bytes")}
        bound = self.bounds.below(replace(cost, **own), point.dtype, times.median)
        return asdict(times) | {
            "bound_seconds": bound,
            "unstable": times.unstable or crowded,
        }


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
    whose rates bound GPU times. Others are ``timeout_s=120``, seconds per point;
    ``progress=False``: a line per point on stderr; ``after``, which is called with each
    group that is done and the number of points that are still missing, and at the start
    with None. ``force``: measure again what is there. ``minutes``: after this time no
    further group is begun (the first always is), and the next run goes on there.
    Unstable points get up to three times their rounds, for three seconds each and 45
    seconds of a run.

    A point is done if a result exists for the same point, group, engine, method, torch,
    device, machine and threads, and, if the group is interleaved, the same points in
    it. The next run repeats a point whose worker was killed from outside, whose time
    limit was shorter, or which other work disturbed (the last only on a quiet machine).
    Raises Interrupted on Ctrl-C (all rows so far are kept), Busy if another run uses
    the folder, OSError if the folder cannot be written, and ValueError for invalid
    arguments.
    """
    return Session(folder, **session).run(groups, force, minutes)
