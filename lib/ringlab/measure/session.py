"""Points on their way: each in its own process, those that are compared taking turns, every sample stored as it comes.

A run of an interleaved group that was stopped goes on where it stood, at its next round. A process that dies costs its
point alone.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from uuid import uuid4

from ..cost import Cost
from . import provenance
from .bounds import Bounds
from .member import Member, crammed, drawn
from .neighbours import Neighbours
from .points import Group, Point, Result
from .processes import Died, Handle, Host, TimedOut
from .progress import START_S, Progress
from .ranks import Ranks
from .stats import summary
from .store import Store, Unfinished, result_row, warn
from .timing import rounds_for

EARLY = ("cuda",)  # devices whose processes take seconds to be ready: those of a group start side by side
CONTEXT_BYTES = 700 << 20  # of GPU memory that each waiting process holds, its libraries' workspaces included


@dataclass
class Session:
    """What all groups of one run share, and the running of a group."""

    store: Store
    here: dict
    rehearsal: bool
    settings: dict
    timeout_s: float
    progress: Progress | None = None
    bounds: Bounds | None = None
    results: list[Result] = field(default_factory=list)
    host: Host | None = None
    said: set[str] = field(default_factory=set)  # warnings that need not come again
    tolerances: dict[tuple, dict] = field(default_factory=dict)  # by shape and dtype: half precision takes seconds

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
            self.host = None

    def run_group(self, group: Group, points: list[Point], earlier: Unfinished | None) -> None:
        """Measure points of a group, together or one by one, going on with a run that was stopped (``earlier``)."""
        self.progress.begin(group, points)
        if earlier is None:
            earlier = Unfinished(uuid4().hex[:12])
            self._append(earlier.run, kind="run", group=group.name, members=group.id, key=provenance.key(self.here))
        first = earlier.rounds
        for together in self._cohorts(group, points):
            members = [Member(p, earlier.samples.get(p.id, {})) for p in together]
            first = self._run_together(group, earlier.run, members, first)

    def _cohorts(self, group: Group, points: list[Point]) -> list[list[Point]]:
        """The points whose processes live at the same time: all that take turns, as far as a GPU has room for them."""
        if not group.interleave:
            return [[p] for p in points]
        most = len(points)
        if self.settings["device"] == "cuda" and self.here.get("device_memory_bytes"):
            most = max(2, int(0.6 * self.here["device_memory_bytes"] / CONTEXT_BYTES))
        return [points[i : i + most] for i in range(0, len(points), most)]

    def _run_together(self, group: Group, run: str, members: list[Member], first: int) -> int:
        """Prepare, then take rounds in turn, from number ``first``; returns the number after the last."""
        origin = self.here | provenance.moment(self.settings["device"]) | {"timeout_s": self.timeout_s}
        starved, others = [], Neighbours(self.here["threads"] if self.settings["device"] == "cpu" else 0)
        try:
            if self.settings["device"] in EARLY:
                self._start_early(group, members)
            for member in members:
                self._step(group, member, "prepare", START_S)
                if member.row["status"] == "oom" and any(m.handle for m in members):
                    starved.append(member)
                elif not group.timed or crammed(member):
                    self._close(member)
            last = self._take_rounds(group, run, members, first, others) if group.timed else first
            self._conclude(group, run, [m for m in members if m not in starved], origin, others)
        finally:
            for member in members:
                self._close(member)
        for member in starved:  # once more, with all of the memory
            last = self._run_together(group, run, [Member(member.point)], last)
        return last

    def _start_early(self, group: Group, members: list[Member]) -> None:
        """Start the processes of points on one rank; ``prepare`` tells of what goes wrong."""
        for member in (m for m in members if m.point.world_size == 1):
            try:
                member.handle = self._start_point(group, member)
            except Died:
                return

    def _take_rounds(self, group: Group, run: str, members: list[Member], first: int, others: Neighbours) -> int:
        for member in members:
            if member.alive and not crammed(member):
                reply = self._step(group, member, "calibrate", 0.0, sample_s=group.sample_s)
                member.estimate = reply.get("estimate", 0.0)
        alive = [m for m in members if m.alive and m.estimate]
        for member, count in zip(alive, rounds_for([m.estimate for m in alive], group.interleave)):
            member.wanted = max(count, group.rounds)
            self.progress.expect(group, member.point, member.left * max(member.estimate, 0.02))
        number = first
        while waiting := [m for m in members if m.left]:
            turn = number % len(waiting)  # or the same one would always come first, and another always after it
            for member in waiting[turn:] + waiting[:turn]:
                done, work = number - first, max(member.estimate, 0.02)
                text = f"{group.name}: round {done + 1} of {done + max(m.left for m in waiting)}"
                with others.watched(lambda member=member: member.cpu_s):
                    reply = self._step(group, member, "sample", work, text, last=member.left == 1)
                if member.alive:
                    member.samples[number] = reply["seconds"]
                    sample = {"round": number, "seconds": reply["seconds"], "loops": member.row["loops"]}
                    self._append(run, kind="sample", point=member.point.id, **sample)
            number += 1
        for member in members:
            if member.alive and member.samples:
                self._step(group, member, "verify", 0.0)
        return number

    def _step(self, group: Group, member: Member, command: str, work_s: float, text: str = "", **arguments) -> dict:
        """One command to a point's process; what goes wrong is that point's status and reason."""
        start, reply = time.monotonic(), {}
        if command == "prepare":
            arguments["tolerance"] = self.tolerances.get(drawn(member.point), {})
        try:
            if member.handle is None:
                member.handle = self._start_point(group, member)
                start = time.monotonic()  # the first one waits for the host, which is not the point's time
            reply = member.handle.ask(command, max(0.0, self.timeout_s - member.spent), **arguments)
        except TimedOut as late:
            behind = f": {late}" if str(late) else ""
            reply = {"status": "timeout", "reason": f"took more than {self.timeout_s:g} s{behind}"}
        except Died as death:
            reply = {"status": death.status, "reason": death.reason, "final": death.final}
        member.spent += time.monotonic() - start
        member.cpu_s = reply.pop("cpu_s", member.cpu_s)
        known = reply.pop("known", {})
        if "ranks" in reply:
            reply["ranks"] = member.row["ranks"] | reply["ranks"]
        member.row |= reply
        self.tolerances.setdefault(drawn(member.point), {}).update(known)
        self.progress.did(text or f"{group.name}: {command} {member.point.label()}", work_s)
        if not member.alive:
            self.progress.drop(group, member.point)
            self._close(member)
        return reply

    def _start_point(self, group: Group, member: Member) -> Handle | Ranks:
        point, cores = member.point, self.settings["threads"]
        more = {"point": point.to_dict(), "early": point.world_size == 1 and self.settings["device"] in EARLY}
        if group.ranks > 1:
            more |= {"threads": max(1, cores // group.ranks), "timeout_s": self.timeout_s}
            member.row["ranks"] = {"threads": more["threads"], "oversubscribed": point.world_size > cores}
        return self._start(more, point.world_size)

    def _start(self, more: dict, ranks: int = 1) -> Handle | Ranks:
        if self.host is None:
            self.host = Host()
        try:
            settings = self.settings | more
            return Handle(self.host, settings) if ranks == 1 else Ranks(self.host, settings, ranks)
        except Died:
            self.close()
            raise

    def _close(self, member: Member) -> None:
        if member.handle is not None:
            member.handle.close()
            member.handle = None

    def probe(self, names: list[str]) -> dict:
        """The CPU's rates, from a process of their own; none where that fails or others run beside it.

        A disturbed rate is too low, and the bound that it gives too high: it would accuse honest rows.
        """
        handle, others = None, Neighbours(self.here["threads"])
        try:
            handle = self._start({"memory_bytes": None})
            reply = {"cpu_s": 0.0}
            with others.watched(lambda: reply["cpu_s"]):
                reply |= handle.ask("probe", self.timeout_s, dtypes=names)
            if others.crowded:
                raise Died("crashed", f"others used {others.cores:g} cores meanwhile", False)
            return reply["peaks"]
        except (Died, TimedOut) as failure:
            why = str(failure) or "no answer"
            if why not in self.said:
                self.said.add(why)
                warn(f"the CPU's rates could not be measured, so these rows have no lower bound: {why}")
            return {}
        finally:
            if handle is not None:
                handle.close()

    def _conclude(self, group: Group, run: str, members: list[Member], origin: dict, others: Neighbours) -> None:
        """Statistics, bound and share of each point, stored; an ok that cannot be true becomes suspect."""
        self.bounds.need({m.point.dtype for m in members if m.alive and m.samples})
        state = provenance.device_state(self.settings["device"])
        origin |= {"others_cores": others.cores, "crowded": others.crowded} | ({"gpu_after": state} if state else {})
        if others.crowded:
            warn(f"{group.name}: others used {others.cores:g} cores meanwhile, so that these times are too long")
        gemm = [m for m in members if m.point.system == "sgemm" and m.samples and m.alive]
        rate = gemm[0].row["cost"]["flops"] / summary(list(gemm[0].samples.values())).median if gemm else None
        for member in members:
            row = {k: v for k, v in member.row.items() if k not in ("estimate", "seconds")}
            if member.alive:
                row |= self._judged(member, rate, others.crowded)
            self._store(group, run, member, row, origin)

    def _judged(self, member: Member, rate: float | None, crowded: bool) -> dict:
        cost, doubts, row = Cost(**member.row["cost"]), [], {}
        peak = member.row["memory"]["tracked_peak_bytes"]
        floor = member.row["memory"]["floor_bytes"]  # of one rank's tensors
        if peak < floor:
            doubts.append(f"a peak of {peak} bytes is smaller than its own tensors, {floor} bytes")
        if member.samples:
            found = summary([member.samples[number] for number in sorted(member.samples)])
            gpus = member.point.world_size if self.settings["device"] == "cuda" else 1  # a CPU has one rate for all
            mine = replace(cost, folded_flops=cost.folded_flops // gpus, floor_bytes=cost.floor_bytes // gpus)
            bound, below = self.bounds.below(mine, member.point.dtype, found.median)
            share = cost.flops / found.median / rate if rate else None
            row = asdict(found) | {"bound_seconds": bound, "share": share}
            row["unstable"] |= crowded
            if below:
                doubts.append(f"{found.median * 1e3:.3g} ms is below its bound of {bound * 1e3:.3g} ms")
        return row | ({"status": "suspect", "reason": "; ".join(doubts)} if doubts else {})

    def _store(self, group: Group, run: str, member: Member, row: dict, origin: dict) -> None:
        timed = row.get("median") is not None
        rounds = sorted(member.samples) if timed else []
        result = Result(
            point=member.point, group=group.name, run=run, rehearsal=self.rehearsal,
            composition=group.composition(member.point), interleaved=group.interleave,
            seconds=tuple(member.samples[number] for number in rounds), rounds=tuple(rounds),
            provenance=origin | {"seed": member.point.id}, **row,
        )  # fmt: skip
        self.store.append(**result_row(result, member.spent))
        self.results.append(result)
        self.progress.result(result)

    def _append(self, run: str, **row) -> None:
        self.store.append(run=run, rehearsal=self.rehearsal, **row)
