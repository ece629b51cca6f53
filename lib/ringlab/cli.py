"""``python -m ringlab report / measure / profiles``. ``measure`` and ``profiles`` need torch alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

STOPPED = "interrupted: what was measured is kept; run again to go on"
OK, FAILED, REFUSED = 0, 1, 2  # exit codes: done; a notebook or a worker failed; asked for what cannot be


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what a user can cause is answered in one line on stderr.

    >>> main(["measure", "--profile", "gtx180"])
    2
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt as stop:
        print(f"\nringlab: {stop.args[0] if stop.args else STOPPED}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ringlab", description="Attention measured on your own hardware.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    report = commands.add_parser("report", help="measure what is missing and write reports/<profile>/")
    report.add_argument("--profile", default="auto", metavar="NAME", help="a profile's name, or auto: this machine")
    report.add_argument("--strict", action="store_true", help="refuse a rehearsal or recorded rows (exit 2)")
    report.add_argument(
        "--reports", type=Path, metavar="DIR", help="where reports go (default: reports/ of the checkout)"
    )
    report.add_argument("--force", action="store_true", help="run and render the notebooks even if nothing changed")
    report.set_defaults(run=_report)

    measure = commands.add_parser("measure", help="measure what is missing, without a report (torch alone)")
    measure.add_argument("--profile", default="auto", metavar="NAME", help="a profile's name, or auto: this machine")
    measure.add_argument("--suite", default="optimization", metavar="NAME", help="which points (default: optimization)")
    measure.add_argument("--data", type=Path, metavar="DIR", help="where rows go (default: reports/<profile>/data)")
    measure.add_argument("--strict", action="store_true", help="refuse a rehearsal (exit 2)")
    measure.add_argument("--force", action="store_true", help="measure again what is there already")
    measure.set_defaults(run=_measure)

    profiles = commands.add_parser("profiles", help="list the hardware profiles and which of them run here")
    profiles.set_defaults(run=_profiles)
    return parser


def _refuse(message: str, code: int = REFUSED) -> int:
    print(f"ringlab: {message}", file=sys.stderr)
    return code


def _report(arguments) -> int:
    try:
        from .report import driver
        from .report.places import ReportError
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("ringlab"):
            raise
        return _refuse(f"reports need {missing.name}, which is not installed: pip install -e './lib[report]'")
    strict = arguments.strict or os.environ.get("STRICT", "") not in ("", "0")
    try:
        pages = driver.run(arguments.profile, strict=strict, reports=arguments.reports, force=arguments.force)
    except ReportError as error:
        return _refuse(str(error), error.exit_code)
    for page in pages:
        print(os.path.relpath(page))
    return OK


def _measure(arguments) -> int:
    from . import hardware, measure
    from .measure import suites
    from .report.places import UsageError, reports_folder
    from .report.plan import plan

    if arguments.suite not in suites.SUITES:
        return _refuse(f"unknown suite {arguments.suite!r}; known: {', '.join(suites.SUITES)}")
    reports = reports_folder()
    try:
        asked = plan(arguments.profile, hardware.detect(), reports, strict=arguments.strict, recorded=False)
    except UsageError as error:
        return _refuse(str(error))
    if asked.why:
        print(f"{asked.profile.name}: {asked.why}; rehearsal on this CPU", file=sys.stderr)
    data = arguments.data or reports / asked.folder / "data"
    groups = suites.SUITES[arguments.suite](asked.profile, device=asked.device, rehearsal=asked.rehearsal)
    how = {"profile": asked.profile, "device": asked.device, "rehearsal": asked.rehearsal, "force": arguments.force}
    try:
        measure.run(groups, data, progress=True, **how)
    except measure.Busy as error:
        return _refuse(str(error), FAILED)
    except OSError as error:
        return _refuse(f"cannot write {error.filename or data}: {error.strerror or error}", FAILED)
    print(os.path.relpath(data))
    return OK


def _profiles(arguments) -> int:
    from . import hardware

    rows = [("profile", "device", "sm", "memory", "dtype", "runnable here")]
    for row in hardware.table():
        memory = f"{row['memory_bytes'] / 2**30:.0f} GiB" if row["memory_bytes"] else "-"
        runs = ("yes: " if row["runnable"] else "no: ") + row["why"]
        name = f"{row['name']} *" if row["matches"] else row["name"]
        rows.append((name, row["title"], row["sm"], memory, row["dtype"], runs))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[5]]).rstrip())
    print("\n* matches this machine (GPU=auto)")
    return OK
