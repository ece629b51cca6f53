"""List the groups of points of every suite: ``python tests/golden.py [--points] >
tests/golden_points.txt``.

A stored row counts only while the digests of its point and of its group stay as they
are. Each line is one group: profile, device, suite, digest of the group, number of
points, sha256 of the lines of its points, name. ``--points`` adds these lines: id,
composition and label of each point. ``--check`` prints the difference from the stored
file instead, and exits with 1 if there is one.
"""

import difflib
import hashlib
import importlib.metadata
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from ringlab import hardware
from ringlab.measure.suites import SUITES

PROFILES = "cpu", "gtx1080", "v100", "h200", "generic"
# Some points depend on which optional packages are installed: list them with none and
# with all.
NONE = {"side_effect": importlib.metadata.PackageNotFoundError}
ALL = {"return_value": SimpleNamespace(version="1.0", read_text=lambda file: None)}


def lines(points: bool = False) -> list[str]:
    """One line for each group that differs from the others, with ``points`` also one
    for each of its points.
    """
    found = {}
    for packages, name, (suite, make) in product((NONE, ALL), PROFILES, SUITES.items()):
        profile = hardware.get_profile(name)
        with mock.patch.object(importlib.metadata, "distribution", **packages):
            for group in make(profile):
                each = [
                    f"  {p.id} {group.composition(p)} {p.label()}" for p in group.points
                ]
                sha = hashlib.sha256("".join(each).encode()).hexdigest()[:16]
                found[
                    f"{name} {profile.kind} {suite} {group.id} {len(each)} {sha} {group.name}"
                ] = each if points else []
    return [f"{x}\n" for line, more in found.items() for x in (line, *more)]


if __name__ == "__main__":
    now = lines("--points" in sys.argv)
    if "--check" in sys.argv:
        stored = (
            Path(__file__).with_name("golden_points.txt").read_text().splitlines(True)
        )
        now = [*difflib.unified_diff(stored, now, "stored", "now", n=0)]
    sys.stdout.writelines(now)
    sys.exit("--check" in sys.argv and bool(now))
