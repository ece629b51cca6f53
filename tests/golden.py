"""List every suite's groups of points by digest: ``python tests/golden.py [--points] > tests/golden_points.txt``.

A row that is stored counts as done only while its point and its group keep these digests: they must not change. A line
for each group: profile, device, suite, digest of the group, number of points, sha256 of what ``--points`` adds,
name. That is a line for each point: its id, its composition and its label. ``--check`` prints the lines that
differ from the stored ones instead, and exits with 1 if there are any.
"""

import difflib
import hashlib
import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

PROFILES = "cpu", "gtx1080", "v100", "h200", "generic"


def groups():
    """(profile, device, suite, group) of every suite: what is asked of the library is asked here."""
    from ringlab import hardware
    from ringlab.measure.suites import SUITES

    for name in PROFILES:
        profile = hardware.get_profile(name)
        for suite, made in SUITES.items():
            ways = (profile.kind, {"device": profile.kind}), ("rehearsal", {"device": "cpu", "rehearsal": True})
            yield from ((name, way, suite, group) for way, how in ways for group in made(profile, **how))


def packages(there: bool):
    """Packages of others are all there, at version 1.0, or none is: some points depend on it."""

    def distribution(name: str):
        if there:
            return SimpleNamespace(version="1.0", read_text=lambda file: None)
        raise importlib.metadata.PackageNotFoundError(name)

    return mock.patch.object(importlib.metadata, "distribution", distribution)


def lines(points: bool = False) -> list[str]:
    found = {}
    for there in (False, True):
        with packages(there):
            for *about, group in groups():
                each = [f"  {p.id} {group.composition(p)} {p.label()}" for p in group.points]
                sha = hashlib.sha256("".join(each).encode()).hexdigest()[:16]
                found[" ".join(map(str, (*about, group.id, len(each), sha, group.name)))] = each if points else []
    return [f"{x}\n" for line, more in found.items() for x in (line, *more)]


if __name__ == "__main__":
    now = lines("--points" in sys.argv)
    if "--check" in sys.argv:
        stored = Path(__file__).with_name("golden_points.txt").read_text().splitlines(True)
        now = [*difflib.unified_diff(stored, now, "stored", "now", n=0)]
    sys.stdout.writelines(now)
    sys.exit("--check" in sys.argv and bool(now))
