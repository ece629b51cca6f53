"""Measuring: points in isolated workers, checked before they are timed, kept as rows that say where they come from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .points import STATUSES, Group, Point, Result, select, sgemm
from .provenance import engine_hash, machine_id
from .runner import Interrupted, run
from .stats import Ratio, ratio
from .store import SCHEMA, Busy, load

__all__ = [
    "SCHEMA", "STATUSES", "Busy", "Group", "Interrupted", "Point", "Ratio", "Result", "engine_hash", "load",
    "machine_id", "main", "ratio", "run", "select", "sgemm",
]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the points of a suite into a folder; exit code 0, 1 where rows cannot be written, 130 after Ctrl-C.

    >>> main(["--suite", "nothing", "--data", "/tmp"])
    2
    """
    from .. import hardware
    from . import suites

    parser = argparse.ArgumentParser(prog="python -m ringlab.measure", description="Measure what is missing.")
    parser.add_argument("--profile", default="auto", help="a hardware profile, or auto: this machine")
    parser.add_argument("--suite", default="optimization", help=f"one of: {', '.join(suites.SUITES)}")
    parser.add_argument("--data", required=True, metavar="DIR", help="where samples.jsonl goes")
    parser.add_argument("--group", action="append", metavar="NAME", help="only this group (may be repeated)")
    parser.add_argument("--force", action="store_true", help="measure again what is there already")
    arguments = parser.parse_args(argv)
    try:
        if arguments.suite not in suites.SUITES:
            raise ValueError(f"unknown suite {arguments.suite!r}; known: {', '.join(suites.SUITES)}")
        machine = hardware.detect()
        profile = hardware.resolve(arguments.profile, machine)
        runs, why = profile.runnable(machine)
        device = profile.kind if runs else "cpu"
        if not runs:
            print(f"{profile.name}: {why}; rehearsal on this CPU", file=sys.stderr)
        groups = suites.SUITES[arguments.suite](profile.on(machine), device=device, rehearsal=not runs)
        unknown = set(arguments.group or ()) - {g.name for g in groups}
        if unknown:
            raise ValueError(f"unknown group {sorted(unknown)[0]!r}; known: {', '.join(g.name for g in groups)}")
        groups = [g for g in groups if not arguments.group or g.name in arguments.group]
    except ValueError as error:
        print(f"ringlab: {error}", file=sys.stderr)
        return 2
    try:
        run(groups, arguments.data, profile=profile, device=device, rehearsal=not runs, progress=True,
            force=arguments.force)  # fmt: skip
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    except (OSError, Busy) as error:
        print(f"ringlab: {error}", file=sys.stderr)
        return 1
    return 0
