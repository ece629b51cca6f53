"""``python -m ringlab compare`` and ``check``: their options, and two runs side by side as text."""

from __future__ import annotations

import argparse
from pathlib import Path

ROWS = "a profile with rows, a folder with samples.jsonl, such a file, or REVISION:PROFILE, as committed"


def add_options(one: argparse.ArgumentParser) -> None:
    """The options of ``compare``."""
    one.add_argument("first", metavar="A", help=ROWS)
    one.add_argument("second", metavar="B", help="the same; ratios are A over B")
    _add_shared(one)


def add_check_options(one: argparse.ArgumentParser) -> None:
    """The options of ``check``."""
    one.add_argument("base", metavar="BASE", help=ROWS)
    one.add_argument(
        "--against", default="auto", metavar="ROWS", help="which rows are checked; auto: this machine's (default: auto)"
    )
    one.add_argument(
        "--tolerance", type=_part, default=0.10, metavar="PART", help="slower by so much is no failure (default: 0.10)"
    )
    _add_shared(one)


def _add_shared(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--reports", type=folder, metavar="DIR", help="where profiles lie (default: reports/ of the checkout)"
    )
    one.add_argument("--markdown", action="store_true", help="tables as Markdown (default: aligned text)")
    one.add_argument("--csv", type=Path, metavar="FILE", help="write every row to this file (default: none)")


def folder(text: str) -> Path:
    """A folder that is there or may be made."""
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


def run(given: argparse.Namespace) -> str:
    """Two sides, every pair of rows; raises report's UsageError."""
    return _side_by_side(given, given.first, given.second)[0]


def run_check(given: argparse.Namespace) -> tuple[str, bool]:
    """What differs of one side from the other, and whether any of it is worse; raises report's UsageError."""
    from . import hardware

    now = hardware.match(hardware.detect()) if given.against == "auto" else given.against
    return _side_by_side(given, now, given.base, tolerance=given.tolerance)


def _side_by_side(given, first: str, second: str, tolerance: float | None = None) -> tuple[str, bool]:
    from .report import compare_table as shown
    from .report.compare import check, compare
    from .report.compare_sides import read_side
    from .report.places import reports_folder

    reports = given.reports or reports_folder()
    sides = read_side(first, reports), read_side(second, reports)
    found, failures = (compare(*sides), []) if tolerance is None else check(*sides, tolerance)
    if given.csv:
        shown.write_csv(given.csv, found)
    failed = [pair for pair, _ in failures]
    differ = None if tolerance is None else [p for p in found.pairs if p.longer or p.shorter or p in failed]
    parts = shown.sections(found, differ)
    if tolerance is not None:
        parts.append(shown.worse(found, failures, tolerance))
    return shown.text(parts, given.markdown), bool(failures)
