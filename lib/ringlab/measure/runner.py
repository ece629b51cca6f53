"""Runs what is missing: a worker process per group, its rows stored as they come, its death a result like any other."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from .. import hardware
from . import provenance
from .points import Group, Point, Result
from .store import Store, latest, read, result_row, warn

TIMEOUT_S = 120.0  # that one point may take, its share of a group's rounds included
STARTUP_S = 180.0  # a first import of torch from a cold disk


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; the message says what is kept."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "interrupted"


def run(
    groups: Iterable[Group],
    folder: Path | str,
    *,
    profile,
    device: str | None = None,
    rehearsal: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: bool | None = None,
    force: bool = False,
    memory_bytes: int | None = None,
) -> list[Result]:
    """Measure the points of ``groups`` that have no rows in ``folder`` yet, and return the results of all of them.

    ``profile``: a hardware profile or its name, whose figures bound GPU times. ``device``: "cuda" or "cpu", by default
    what the profile is for, and "cpu" for a rehearsal. ``timeout_s``: seconds per point. ``progress``: one line per
    point on stderr, by default where that is a terminal. ``force``: measure again what is there. ``memory_bytes``: how
    much a worker on the CPU may grow, by default what is available.

    A point is done where a result exists for the same point, group, engine, method, torch, device, machine and threads,
    and, if the group is interleaved, the same points in it; a worker killed from outside leaves its point to the next
    run. Raises Interrupted on Ctrl-C (all rows so far are kept), Busy where another run holds the folder, and OSError
    where the folder cannot be written.
    """
    groups = list(groups)
    name = getattr(profile, "name", profile)
    if device is None:
        device = "cpu" if rehearsal else hardware.get_profile(name).kind
    here = provenance.collect(device)
    plan = {"device": device, "profile": None if rehearsal else name, "threads": here["threads"]}
    plan["memory_bytes"] = memory_bytes if memory_bytes or device != "cpu" else _available_bytes()
    show = sys.stderr.isatty() if progress is None else progress
    with Store(folder) as store:
        kept = [] if force else [r for r in read(folder) if _counts(r, here, rehearsal)]
        done = {(r.group, r.composition, r.point.id) for r in kept}
        wanted = {(g.name, g.composition(p), p.id) for g in groups for p in g.points}
        todo = [(g, missing) for g in groups if (missing := _missing(g, done))]
        session = _Session(store, here | {"profile": name}, rehearsal, plan, timeout_s)
        session.progress = _Progress(sum(len(m) for _, m in todo)) if show else None
        try:
            for group, points in todo:
                session.run_group(group, points)
        except KeyboardInterrupt:
            if session.progress:
                session.progress.busy("")
            count = len(session.results)
            raise Interrupted(f"interrupted: {count} points measured are kept; run again to go on") from None
    found = [r for r in kept + session.results if (r.group, r.composition, r.point.id) in wanted]
    return latest(found)


def _counts(result: Result, here: dict, rehearsal: bool) -> bool:
    return result.final and result.rehearsal == rehearsal and provenance.key(result.provenance) == provenance.key(here)


def _missing(group: Group, done: set) -> list[Point]:
    missing = [p for p in group.points if (group.name, group.composition(p), p.id) not in done]
    return list(group.points) if missing and group.interleave else missing


@dataclass
class _Session:
    """What all groups of one run share."""

    store: Store
    here: dict
    rehearsal: bool
    plan: dict
    timeout_s: float
    results: list[Result] = field(default_factory=list)
    progress: _Progress | None = None

    def run_group(self, group: Group, points: list[Point]) -> None:
        """Run workers until every point has a result: each worker that dies costs the point it was busy with."""
        left = list(points)
        if self.progress:
            self.progress.begin(len(points) if group.interleave else 1)
        while left:
            worker = _Worker(self, group, left)
            status, reason, final = worker.serve()
            left = [p for p in left if p.id not in worker.finished]
            if not left:
                break
            guilty = [p for p in left if p.id == worker.at] or left
            for point in guilty:
                worker.conclude(point, {"status": status, "reason": reason, "final": final}, 0.0)
            left = [p for p in left if p not in guilty]


class _Worker:
    """One process: what it says goes to the store; ``at`` is the point that it is busy with."""

    def __init__(self, session: _Session, group: Group, points: list[Point]):
        self.session, self.group, self.points = session, group, {p.id: p for p in points}
        self.run = uuid4().hex[:12]
        self.at: str | None = None
        self.seconds: dict[str, list[float]] = {p.id: [] for p in points}
        self.charged = dict.fromkeys([None, *self.points], 0.0)
        self.finished: set[str] = set()
        self.provenance = session.here | provenance.moment()

    def serve(self) -> tuple[str, str, bool]:
        """Run the process to its end; (status, reason, final) for the point that it did not survive."""
        session = self.session
        for point in self.points.values():
            self._append(kind="point", point=point.id, group=self.group.name, label=point.label())
        request = session.plan | {
            "group": self.group.name, "interleave": self.group.interleave, "timed": self.group.timed,
            "points": [p.to_dict() for p in self.points.values()],
        }  # fmt: skip
        lines: queue.Queue = queue.Queue()
        with tempfile.TemporaryFile() as stderr:
            process = _start(stderr)
            threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
            try:
                process.stdin.write((json.dumps(request) + "\n").encode())
                process.stdin.flush()
            except BrokenPipeError:  # it died before it read; its exit tells why
                pass
            late = True
            try:
                late = self._listen(lines)
            finally:
                _end(process, grace_s=0.0 if late else 10.0)
            if late:
                return "timeout", f"took more than {session.timeout_s:g} s", True
            return self._autopsy(process.returncode, _tail(stderr))

    def _listen(self, lines: queue.Queue) -> bool:
        """Store what comes until the worker ends; True if a point (or the start) took too long."""
        while True:
            limit = STARTUP_S if self.at is None else self.session.timeout_s
            start = time.monotonic()
            try:
                line = lines.get(timeout=max(0.0, limit - self.charged[self.at]))
            except queue.Empty:
                return True
            self.charged[self.at] += time.monotonic() - start
            if line is None:
                return False
            row = json.loads(line)
            if row["kind"] == "at":
                self.at = row["point"]
            elif row["kind"] == "sample":
                if self.session.progress:
                    self.session.progress.busy(f"{self.group.name}: round {row['round'] + 1}")
                self.seconds[row["point"]].append(row["seconds"])
                self._append(**row)
            elif row["kind"] == "peaks":
                self.session.plan["peaks"] = row["peaks"]
            elif row["kind"] == "result":
                point = self.points[row.pop("point")]
                duration = row.pop("duration")
                row.pop("kind")
                self.conclude(point, row, duration)

    def conclude(self, point: Point, found: dict, duration: float) -> None:
        """Store the result of a point."""
        session = self.session
        timed = found.get("median") is not None
        found = found | {"ci": tuple(found["ci"]) if timed else None}
        result = Result(
            point=point, group=self.group.name, run=self.run, rehearsal=session.rehearsal,
            composition=self.group.composition(point), interleaved=self.group.interleave,
            seconds=tuple(self.seconds[point.id]) if timed else (),
            provenance=self.provenance | {"seed": point.id}, **found,
        )  # fmt: skip
        self._append(**result_row(result, duration))
        self.finished.add(point.id)
        session.results.append(result)
        if session.progress:
            session.progress.line(result)

    def _append(self, **row) -> None:
        self.session.store.append(**{"run": self.run, "rehearsal": self.session.rehearsal} | row)

    def _autopsy(self, code: int, said: str) -> tuple[str, str, bool]:
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
            return "crashed", f"the worker was ended by {name}{hint}", False
        if any(s in said.lower() for s in ("memoryerror", "can't allocate memory", "out of memory")):
            return "oom", said, True
        return "crashed", f"the worker ended with exit code {code}" + (f": {said}" if said else ""), False


def _start(stderr) -> subprocess.Popen:
    """A fresh interpreter that finds this package, in a session of its own so that Ctrl-C reaches the runner only."""
    package = str(provenance.PACKAGE.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "ringlab.measure.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def _pump(stream, lines: queue.Queue) -> None:
    for line in stream:
        if line.endswith(b"\n"):  # a process killed in the middle of a line leaves a part of it
            lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen, grace_s: float) -> None:
    """End a worker and its children; one that has closed its output gets the grace to end by itself."""
    try:
        process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        process.stdin.close()
    except BrokenPipeError:  # the request was never read
        pass


def _tail(stderr) -> str:
    """The last line that a worker wrote to stderr."""
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _available_bytes() -> int | None:
    """Memory that a process may still take, after the system's estimate; None where it gives none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit = hardware.detect().ram_bytes
    return min([*available, *([limit] if limit else [])], default=None)


class _Progress:
    """One line per point on stderr: what it gave, and the time left at this pace; on a terminal the round too."""

    def __init__(self, total: int):
        self.total, self.count, self.start = total, 0, time.monotonic()
        self.reached = 0  # points measured, the results of an interleaved group being known only together
        self.terminal = sys.stderr.isatty()

    def begin(self, together: int) -> None:
        self.reached = self.count + together

    def busy(self, text: str) -> None:
        if self.terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def line(self, result: Result) -> None:
        self.count += 1
        self.reached = max(self.reached, self.count)
        left = (time.monotonic() - self.start) / self.reached * (self.total - self.reached)
        time_left = f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"
        if result.median is not None:
            found = f"{result.median * 1e3:.4g} ms" + (" unstable" if result.unstable else "")
        else:
            found = "checked" if result.status == "ok" else ""
        if result.status != "ok":
            found = f"{found} {result.status}: {result.reason}".strip()
        self.busy("")
        warn(f"[{self.count}/{self.total}] {result.group}: {result.point.label()}: {found} ({time_left})")
