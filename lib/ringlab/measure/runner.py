"""Runs what is missing and returns what is there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from .. import hardware
from . import provenance
from .bounds import Bounds
from .footprint import available_bytes
from .neighbours import Neighbours
from .points import Group, Result
from .progress import Progress
from .session import Session
from .store import Store, latest, read, unfinished, warn

TIMEOUT_S = 120.0  # that one point may take, all its rounds included


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
    progress: bool = False,
    force: bool = False,
    memory_bytes: int | None = None,
    minutes: float | None = None,
) -> list[Result]:
    """Measure the points of ``groups`` that have no rows in ``folder`` yet, and return the results of all of them.

    ``profile``: a hardware profile or its name, whose figures bound GPU times. ``device``: "cuda" or "cpu", by default
    what the profile is for, and "cpu" for a rehearsal. ``timeout_s``: seconds per point. ``progress``: a line per point
    on stderr. ``force``: measure again what is there. ``memory_bytes``: how much a worker on the CPU may grow, by
    default what is available. ``minutes``: after so long no further group is begun (one always is), what is left is
    said, and the next run goes on there.

    A point is done where a result exists for the same point, group, engine, method, torch, device, machine and threads,
    and, if the group is interleaved, the same points in it. A worker that was killed from outside, a time that was too
    short, and other work that ran meanwhile leave a point to the next run (the last, once the machine is quiet).
    Raises Interrupted on Ctrl-C (all rows so far are kept), Busy where another run holds the folder, OSError where the
    folder cannot be written, and ValueError for arguments that cannot be.
    """
    groups = _checked(groups, timeout_s, minutes)
    until = time.monotonic() + (math.inf if minutes is None else 60 * minutes)
    name = getattr(profile, "name", profile)
    if device is None:
        device = "cpu" if rehearsal else hardware.get_profile(name).kind
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"profile {name!r} is of a GPU, and torch drives none here; rehearsal=True times this CPU")
    here = provenance.collect(device)
    if memory_bytes is None and device == "cpu":
        memory_bytes = available_bytes(hardware.detect().ram_bytes)
    with Store(folder) as store:
        there = [] if force else read(folder)
        kept = [r for r in there if _counts(r, here, rehearsal, timeout_s)]
        again = _disturbed(kept, here["threads"], progress)
        kept = [r for r in kept if (r.group, r.run) not in again]
        done = {(r.group, r.composition, r.point.id) for r in kept}
        wanted = {(g.name, g.composition(p), p.id) for g in groups for p in g.points}
        missing = [(g, [p for p in g.points if (g.name, g.composition(p), p.id) not in done]) for g in groups]
        todo = [(group, points) for group, points in missing if points]
        if progress and not todo:
            newest = max((r.provenance.get("utc", "") for r in kept), default="")
            warn(f"all {len(wanted)} points are there, the newest measured {newest}: nothing to measure")
        elif progress and (why := _foreign(there, here, wanted)):
            warn(why)
        settings = {"device": device, "threads": here["threads"], "memory_bytes": memory_bytes}
        session = Session(store, here | {"profile": name}, rehearsal, settings, timeout_s)
        session.progress = Progress(todo, device, progress)
        session.bounds = Bounds(device, None if rehearsal else name, here["threads"], session.probe)
        try:
            for number, (group, points) in enumerate(todo):
                if number and time.monotonic() >= until:
                    session.progress.clear()
                    warn(_left(todo[number:], minutes))
                    break
                anew = force or group.name in {name for name, _ in again}
                session.run_group(group, points, None if anew else unfinished(folder, group, here, rehearsal))
        except KeyboardInterrupt:
            session.progress.clear()
            kept_now = f"{len(session.results)} points and the finished samples of others are kept"
            raise Interrupted(f"interrupted: {kept_now}; run again to go on") from None
        finally:
            session.close()
    found = [r for r in kept + session.results if (r.group, r.composition, r.point.id) in wanted]
    return latest(found)


def _left(todo: list[tuple[Group, list]], minutes: float) -> str:
    points, names = sum(len(points) for _, points in todo), [group.name for group, _ in todo]
    return f"{minutes:g} minutes are over: {points} points are left, of {'; '.join(names)}; run again to go on"


def _checked(groups, timeout_s: float, minutes: float | None) -> list[Group]:
    groups = [groups] if isinstance(groups, Group) else list(groups)
    for group in groups:
        if not isinstance(group, Group):
            raise ValueError(f"groups must be measure.Group objects, got {type(group).__name__}")
    names = [g.name for g in groups]
    if len(set(names)) < len(names):
        raise ValueError(f"two groups have the name {next(n for n in names if names.count(n) > 1)!r}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes!r}")
    return groups


def _counts(result: Result, here: dict, rehearsal: bool, timeout_s: float) -> bool:
    same = result.rehearsal == rehearsal and provenance.key(result.provenance) == provenance.key(here)
    longer = result.status == "timeout" and result.provenance.get("timeout_s", timeout_s) < timeout_s
    return result.final and same and not longer


def _disturbed(kept: list[Result], threads: int, progress: bool) -> set[tuple[str, str]]:
    """(group, run) of the rows that others disturbed, if they no longer would."""
    found = {(r.group, r.run) for r in kept if r.provenance.get("crowded")}
    if found and (now := Neighbours.now(threads)).crowded:
        if progress:
            warn(f"rows that other work disturbed are kept, as others use {now.cores:g} cores now too")
        return set()
    return found


def _foreign(there: list[Result], here: dict, wanted: set) -> str:
    """Why rows that lie there do not count."""
    rows = [r for r in there if (r.group, r.composition, r.point.id) in wanted]
    apart = [provenance.differs(r.provenance, here) for r in rows]
    names = [name for name in provenance.KEY if any(name in found for found in apart)]
    if not names:
        return ""
    return f"{sum(map(bool, apart))} rows that are there are of another {', '.join(names)}: measuring these points here"
