"""``python -m ringlab measure``: its options, and which groups of points they ask for."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .cli_compare import folder


def add_options(one: argparse.ArgumentParser) -> None:
    """The options of the command; ``--profile`` is there already."""
    add = one.add_argument
    add("--suite", default="all", metavar="NAME", help="the points of which pages (default: all)")
    add("--group", action="append", metavar="NAME", help="only this group of points; may be repeated (default: all)")
    add("--minutes", type=_minutes, metavar="N", help="begin no group after so long; a rerun goes on (default: none)")
    add("--data", type=folder, metavar="DIR", help="where rows go (default: reports/<profile>/data)")
    add("--strict", action="store_true", help="refuse a rehearsal, exit 2 (default: no, or STRICT=1)")
    add("--force", action="store_true", help="measure again what is there already (default: no)")


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes")
    return found


def strict(given: argparse.Namespace) -> bool:
    """Whether a rehearsal is refused, by the option or by the environment."""
    return given.strict or os.environ.get("STRICT", "") not in ("", "0")


def run(given: argparse.Namespace) -> Path:
    """Measure, and return the folder of the rows.

    Raises ValueError, report's UsageError, measure.Busy, or OSError with the name of what cannot be written.
    """
    from . import hardware, measure
    from .measure import suites
    from .report.places import reports_folder
    from .report.plan import plan

    if given.suite not in ("all", *suites.SUITES):
        raise ValueError(f"unknown suite {given.suite!r}; known: all, {', '.join(suites.SUITES)}")
    asked_for = [given.suite] if given.suite != "all" else list(suites.SUITES)
    reports = reports_folder()
    asked = plan(given.profile, hardware.detect(), reports, strict=strict(given), recorded=False)
    how = {"device": asked.device, "rehearsal": asked.rehearsal}
    groups = [g for name in asked_for for g in suites.SUITES[name](asked.profile, **how)]
    if not groups:
        raise ValueError(f"suite {given.suite!r} has no points for {asked.profile.name!r} here: it is for a GPU")
    known = [g.name for g in groups]
    if unknown := [name for name in given.group or () if name not in known]:
        raise ValueError(f"unknown group {unknown[0]!r}; known here: {'; '.join(known)}")
    groups = [g for g in groups if not given.group or g.name in given.group]
    if asked.why:
        print(f"{asked.profile.name}: {asked.why}; rehearsal on this CPU", file=sys.stderr)
    data = given.data or reports / asked.folder / "data"
    how |= {"profile": asked.profile, "force": given.force, "minutes": given.minutes}
    try:
        measure.run(groups, data, progress=True, **how)
    except OSError as error:
        error.filename = error.filename or str(data)
        raise
    return data
