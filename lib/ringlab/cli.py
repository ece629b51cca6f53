"""``python -m ringlab report``, ``measure``, ``estimate`` and others. All but ``report`` need torch alone."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from . import __version__, cli_advise, cli_compare, cli_estimate, cli_measure, cli_tune
from .cli_compare import folder

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
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        print(f"\nringlab: {stop.args[0] if stop.args else STOPPED}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left
        _drop_output()
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return _refuse(f"cannot write what was asked for: {error.strerror}", FAILED)


def _drop_output() -> None:
    """Nothing that is still held back is written at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        "--reports", type=folder, metavar="DIR", help="where reports go (default: reports/ of the checkout)"
    )
    report.add_argument(
        "--force", action="store_true", help="run and render the notebooks even if nothing changed (default: no)"
    )
    report.add_argument("--remeasure", action="store_true", help="measure again what is there already (default: no)")

    measure = command("measure", _measure, "measure what is missing, without a report (torch alone)")
    choose_profile(measure)
    cli_measure.add_options(measure)

    pdf = command("pdf", _pdf, "print the reports that are there to PDF, by a headless Chromium")
    choose_profile(pdf)
    pdf.add_argument(
        "--reports", type=folder, metavar="DIR", help="where reports are (default: reports/ of the checkout)"
    )

    about = "set two runs side by side: ratios with intervals (torch alone)"
    cli_compare.add_options(command("compare", _compare, about))
    about = "exit 1 where rows are significantly slower or larger than earlier ones"
    cli_compare.add_check_options(command("check", _check, about))

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


def _refuse(message: str, code: int = REFUSED) -> int:
    print(f"ringlab: {message}", file=sys.stderr)
    return code


def _report(arguments) -> int:
    if lacking := [name for name in REPORT_PACKAGES if not _installed(name)]:
        return _refuse(f"reports need what is not installed here: {', '.join(lacking)}; pip install -e './lib[report]'")
    from .report import driver
    from .report.places import ReportError

    try:
        pages = driver.run(
            arguments.profile, strict=cli_measure.strict(arguments), reports=arguments.reports, force=arguments.force,
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
    from . import measure
    from .report.places import UsageError

    try:
        return _show([cli_measure.run(arguments)])
    except measure.Busy as error:
        return _refuse(str(error), FAILED)
    except (UsageError, ValueError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot write {error.filename or 'rows'}: {error.strerror or error}", FAILED)


def _compare(arguments) -> int:
    from .report.places import UsageError

    try:
        print(cli_compare.run(arguments))
    except UsageError as error:
        return _refuse(str(error))
    return OK


def _check(arguments) -> int:
    from .report.places import UsageError

    try:
        said, worse = cli_compare.run_check(arguments)
    except UsageError as error:
        return _refuse(str(error))
    print(said)
    return FAILED if worse else OK


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
