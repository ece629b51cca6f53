"""Runs what is missing and returns what is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .. import hardware
from . import provenance
from .bounds import Bounds
from .footprint import available_bytes
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
) -> list[Result]:
    """Measure the points of ``groups`` that have no rows in ``folder`` yet, and return the results of all of them.

    ``profile``: a hardware profile or its name, whose figures bound GPU times. ``device``: "cuda" or "cpu", by default
    what the profile is for, and "cpu" for a rehearsal. ``timeout_s``: seconds per point. ``progress``: a line per point
    on stderr. ``force``: measure again what is there. ``memory_bytes``: how much a worker on the CPU may grow, by
    default what is available.

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
    if memory_bytes is None and device == "cpu":
        memory_bytes = available_bytes(hardware.detect().ram_bytes)
    with Store(folder) as store:
        kept = [] if force else [r for r in read(folder) if _counts(r, here, rehearsal)]
        done = {(r.group, r.composition, r.point.id) for r in kept}
        wanted = {(g.name, g.composition(p), p.id) for g in groups for p in g.points}
        missing = [(g, [p for p in g.points if (g.name, g.composition(p), p.id) not in done]) for g in groups]
        todo = [(group, points) for group, points in missing if points]
        if progress and not todo:
            newest = max((r.provenance.get("utc", "") for r in kept), default="")
            warn(f"all {len(wanted)} points are there, the newest measured {newest}: nothing to measure")
        settings = {"device": device, "threads": here["threads"], "memory_bytes": memory_bytes}
        session = Session(store, here | {"profile": name}, rehearsal, settings, timeout_s)
        session.progress = Progress(todo, device, progress)
        session.bounds = Bounds(device, None if rehearsal else name, here["threads"], session.probe)
        try:
            for group, points in todo:
                session.run_group(group, points, None if force else unfinished(folder, group, here, rehearsal))
        except KeyboardInterrupt:
            session.progress.clear()
            kept_now = f"{len(session.results)} points and the finished samples of others are kept"
            raise Interrupted(f"interrupted: {kept_now}; run again to go on") from None
        finally:
            session.close()
    found = [r for r in kept + session.results if (r.group, r.composition, r.point.id) in wanted]
    return latest(found)


def _counts(result: Result, here: dict, rehearsal: bool) -> bool:
    return result.final and result.rehearsal == rehearsal and provenance.key(result.provenance) == provenance.key(here)
