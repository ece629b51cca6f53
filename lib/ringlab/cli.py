"""``python -m ringlab report``, ``measure``, ``estimate`` and others. All but ``report`` need torch alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from . import __version__, cli_advise, cli_estimate, cli_tune

STOPPED = "interrupted: what is done is kept; run again to go on"
OK, FAILED, REFUSED = 0, 1, 2  # exit codes: done; a notebook, worker or browser failed; asked for what cannot be
# What pyproject.toml's [report] installs, asked for before minutes are spent on measuring.
REPORT_PACKAGES = ("ipykernel", "matplotlib", "nbclient", "nbconvert", "nbformat", "pandas", "papermill", "seaborn")


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(REFUSED, f"ringlab: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m ringlab", description="Attention measured on your own hardware.")
    parser.add_argument("--version", action="version", version=f"ringlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run, about: str):
        one = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        one.set_defaults(run=run)
        return one

    def choose_profile(one) -> None:
        one.add_argument(
            "--profile", default="auto", metavar="NAME", help="a profile's name, or auto: this machine (default: auto)"
        )

    report = command("report", _report, "measure what is missing and write reports/<profile>/")
    choose_profile(report)
    report.add_argument(
        "--strict", action="store_true", help="refuse a rehearsal or recorded rows, exit 2 (default: no, or STRICT=1)"
    )
    report.add_argument(
        "--reports", type=_folder, metavar="DIR", help="where reports go (default: reports/ of the checkout)"
    )
    report.add_argument(
        "--force", action="store_true", help="run and render the notebooks even if nothing changed (default: no)"
    )
    report.add_argument("--remeasure", action="store_true", help="measure again what is there already (default: no)")

    measure = command("measure", _measure, "measure what is missing, without a report (torch alone)")
    choose_profile(measure)
    measure.add_argument("--suite", default="all", metavar="NAME", help="the points of which pages (default: all)")
    measure.add_argument(
        "--group", action="append", metavar="NAME", help="only this group of points; may be repeated (default: all)"
    )
    measure.add_argument(
        "--minutes", type=_minutes, metavar="N", help="begin no group after so long; run again to go on (default: none)"
    )
    measure.add_argument("--data", type=_folder, metavar="DIR", help="where rows go (default: reports/<profile>/data)")
    measure.add_argument("--strict", action="store_true", help="refuse a rehearsal, exit 2 (default: no, or STRICT=1)")
    measure.add_argument("--force", action="store_true", help="measure again what is there already (default: no)")

    pdf = command("pdf", _pdf, "print the reports that are there to PDF, by a headless Chromium")
    choose_profile(pdf)
    pdf.add_argument(
        "--reports", type=_folder, metavar="DIR", help="where reports are (default: reports/ of the checkout)"
    )

    rows = "a profile with rows, a folder with samples.jsonl, such a file, or REVISION:PROFILE, as committed"
    compare = command("compare", _compare, "set two runs side by side: ratios with intervals (torch alone)")
    compare.add_argument("first", metavar="A", help=rows)
    compare.add_argument("second", metavar="B", help="the same; ratios are A over B")
    check = command("check", _check, "exit 1 where rows are significantly slower or larger than earlier ones")
    check.add_argument("base", metavar="BASE", help=rows)
    check.add_argument(
        "--against", default="auto", metavar="ROWS", help="which rows are checked; auto: this machine's (default: auto)"
    )
    check.add_argument(
        "--tolerance", type=_part, default=0.10, metavar="PART", help="slower by so much is no failure (default: 0.10)"
    )
    for one in (compare, check):
        one.add_argument(
            "--reports", type=_folder, metavar="DIR", help="where profiles lie (default: reports/ of the checkout)"
        )
        one.add_argument("--markdown", action="store_true", help="tables as Markdown (default: aligned text)")
        one.add_argument("--csv", type=Path, metavar="FILE", help="write every row to this file (default: none)")

    ask = command("estimate", _estimate, "what a call needs, without running it, and the longest sequence that fits")
    choose_profile(ask)
    cli_estimate.add_options(ask)

    advise = command("advise", _advise, "say what to run for a length, on what evidence, with code (torch alone)")
    choose_profile(advise)
    cli_advise.add_options(advise)

    tune = command("tune", _tune, "time the Triton kernels' tile sizes on this GPU and keep the fastest")
    choose_profile(tune)
    cli_tune.add_options(tune)

    command("profiles", _profiles, "list the hardware profiles and which of them run here")
    return parser


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("a folder needs a name")
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, not a folder")
    return Path(text)


def _part(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: 0.10 is 10 %")
    return found


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes")
    return found


def _refuse(message: str, code: int = REFUSED) -> int:
    print(f"ringlab: {message}", file=sys.stderr)
    return code


def _strict(arguments) -> bool:
    return arguments.strict or os.environ.get("STRICT", "") not in ("", "0")


def _report(arguments) -> int:
    if lacking := [name for name in REPORT_PACKAGES if not _installed(name)]:
        return _refuse(f"reports need what is not installed here: {', '.join(lacking)}; pip install -e './lib[report]'")
    from .report import driver
    from .report.places import ReportError

    try:
        pages = driver.run(
            arguments.profile, strict=_strict(arguments), reports=arguments.reports, force=arguments.force,
            remeasure=arguments.remeasure,
        )  # fmt: skip
    except ReportError as error:
        return _refuse(str(error), error.exit_code)
    return _show(pages)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # an import hook that hides it
        return False


def _show(paths: Sequence[Path]) -> int:
    for path in paths:
        print(os.path.relpath(path))
    return OK


def _measure(arguments) -> int:
    from . import hardware, measure
    from .measure import suites
    from .report.places import UsageError, reports_folder
    from .report.plan import plan

    if arguments.suite not in ("all", *suites.SUITES):
        return _refuse(f"unknown suite {arguments.suite!r}; known: all, {', '.join(suites.SUITES)}")
    asked_for = [arguments.suite] if arguments.suite != "all" else list(suites.SUITES)
    reports = reports_folder()
    try:
        asked = plan(arguments.profile, hardware.detect(), reports, strict=_strict(arguments), recorded=False)
    except UsageError as error:
        return _refuse(str(error))
    how = {"device": asked.device, "rehearsal": asked.rehearsal}
    groups = [g for name in asked_for for g in suites.SUITES[name](asked.profile, **how)]
    if not groups:
        return _refuse(f"suite {arguments.suite!r} has no points for {asked.profile.name!r} here: it is for a GPU")
    known = [g.name for g in groups]
    if unknown := [name for name in arguments.group or () if name not in known]:
        return _refuse(f"unknown group {unknown[0]!r}; known here: {'; '.join(known)}")
    groups = [g for g in groups if not arguments.group or g.name in arguments.group]
    if asked.why:
        print(f"{asked.profile.name}: {asked.why}; rehearsal on this CPU", file=sys.stderr)
    data = arguments.data or reports / asked.folder / "data"
    how |= {"profile": asked.profile, "force": arguments.force, "minutes": arguments.minutes}
    try:
        measure.run(groups, data, progress=True, **how)
    except measure.Busy as error:
        return _refuse(str(error), FAILED)
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot write {error.filename or data}: {error.strerror or error}", FAILED)
    return _show([data])


def _compare(arguments) -> int:
    return _side_by_side(arguments, arguments.first, arguments.second)


def _check(arguments) -> int:
    from . import hardware

    now = hardware.match(hardware.detect()) if arguments.against == "auto" else arguments.against
    return _side_by_side(arguments, now, arguments.base, tolerance=arguments.tolerance)


def _side_by_side(arguments, first: str, second: str, tolerance: float | None = None) -> int:
    """Compare two sides; with a ``tolerance`` check the first against the second, and show what differs alone."""
    from .report import compare_table as shown
    from .report.compare import check, compare
    from .report.compare_sides import read_side
    from .report.places import UsageError, reports_folder

    reports = arguments.reports or reports_folder()
    try:
        sides = read_side(first, reports), read_side(second, reports)
        found, failures = (compare(*sides), []) if tolerance is None else check(*sides, tolerance)
        if arguments.csv:
            shown.write_csv(arguments.csv, found)
    except UsageError as error:
        return _refuse(str(error))
    failed = [pair for pair, _ in failures]
    differ = None if tolerance is None else [p for p in found.pairs if p.longer or p.shorter or p in failed]
    parts = shown.sections(found, differ)
    if tolerance is not None:
        parts.append(shown.worse(found, failures, tolerance))
    print(shown.text(parts, arguments.markdown))
    return FAILED if failures else OK


def _pdf(arguments) -> int:
    from .report import pdf
    from .report.places import ReportError

    try:
        return _show(pdf.run(arguments.profile, reports=arguments.reports))
    except ReportError as error:
        return _refuse(str(error), error.exit_code)


def _estimate(arguments) -> int:
    try:
        print(cli_estimate.run(arguments))
    except (ValueError, NotImplementedError, TypeError) as error:  # JSON that is none is a ValueError too
        return _refuse(" ".join(str(error).split()))
    return OK


def _advise(arguments) -> int:
    try:
        print(cli_advise.run(arguments))
    except (ValueError, NotImplementedError) as error:
        return _refuse(" ".join(str(error).split()))
    return OK


def _tune(arguments) -> int:
    import torch

    try:
        for line in cli_tune.run(arguments):
            print(line, flush=True)
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        return _refuse(" ".join(str(error).split()))
    except OSError as error:
        return _refuse(f"cannot write {error.filename}: {error.strerror or error}", FAILED)
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
