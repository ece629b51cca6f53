"""`make report`: measure what is missing, run each notebook on the rows, render, refresh the index."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .. import hardware, measure
from . import execute, index
from .first_screen import first_screen
from .pages import Pages
from .places import ReportError, home, locked, note
from .plan import Plan, plan
from .study import Study

# Each notebook, with the module of this package that fills its tables and the suite of points that it needs; a report
# without a suite of its own is about the rows of all others, so it comes last.
REPORTS = {
    "optimization_results": ("optimization", "optimization"),
    "benchmark_summary": ("documents.ring", "benchmark_summary"),
    "session_summary": ("session.document", "session_summary"),
    "performance_comparison": ("documents.ring", "performance_comparison"),
    "hybrid_summary": ("documents.ring", "hybrid_summary"),
    "landscape": ("landscape.document", "landscape"),
    "claims": ("ledger", ""),
}
# Suites whose rows a report shows in an appendix.
BESIDE = {"optimization_results": ("kernels",)}


def run(
    name: str = "auto",
    *,
    strict: bool = False,
    reports: Path | None = None,
    machine: hardware.Machine | None = None,
    notebooks: Sequence[Path] | None = None,
    suite: Callable | None = None,
    parameters: dict | None = None,
    cell_timeout_s: int = 300,
    force: bool = False,
    remeasure: bool = False,
) -> list[Path]:
    """Bring ``reports/<profile>/`` up to date and return the paths of its pages, the index last.

    ``notebooks`` and ``suite`` replace the built-in ones, ``parameters`` go to every notebook beside its profile. What
    has not changed since the last complete run is neither measured again, unless ``remeasure``, nor rendered, unless
    ``force``. Raises UsageError and ReportError with messages of one line.
    """
    screen = first_screen if notebooks is None else None
    root = home() if reports is None or notebooks is None else None
    reports = Path(reports) if reports is not None else root / "reports"
    notebooks = (
        [root / "notebooks" / f"{n}.ipynb" for n in REPORTS] if notebooks is None else [Path(n) for n in notebooks]
    )
    asked = plan(name, machine or hardware.detect(), reports, strict=strict)
    folder = reports / asked.folder
    pages = Pages(asked, folder, notebooks, own, headline, screen, parameters or {}, cell_timeout_s, force)
    if asked.why:
        kind = "rehearsal on this CPU" if asked.rehearsal else "showing the rows recorded elsewhere"
        note(f"{asked.profile.name}: {asked.why}; {kind}")
    try:
        for source in notebooks:  # before minutes are spent on measuring
            execute.check_parameters(source, pages.given)
        try:
            with locked(folder):
                pages.begin()
                if asked.measure:
                    groups = (suite or _suite(notebooks))(asked.profile, device=asked.device, rehearsal=asked.rehearsal)
                    _measure(groups, pages.data, asked, remeasure)
                written = pages.write()
        except BaseException:  # Ctrl-C too: the index says at once what is unfinished
            with suppress(OSError):
                index.write_index(reports)
            raise
        return written + index.write_index(reports)
    except OSError as error:  # a full disk, a folder that may not be written; earlier pages are still whole
        raise ReportError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error


def _measure(groups, data: Path, asked: Plan, force: bool) -> None:
    try:
        how = {"profile": asked.profile, "device": asked.device, "rehearsal": asked.rehearsal, "force": force}
        measure.run(groups, data, progress=True, **how)
    except measure.Busy as error:
        raise ReportError(str(error)) from None


def _suite(notebooks: Sequence[Path]) -> Callable:
    from ringlab.measure import suites

    def groups(profile, **how):
        names = [n.stem for n in notebooks]
        if not all(REPORTS[name][1] for name in names):
            names = [*REPORTS]
        wanted = dict.fromkeys(s for name in names for s in (REPORTS[name][1], *BESIDE.get(name, ())) if s)
        return [g for suite in wanted for g in suites.SUITES[suite](profile, **how)]

    return groups


def own(name: str, study: Study) -> Study:
    """The rows that a report is about."""
    suite = REPORTS[name][1] if name in REPORTS else ""
    return study.of(suite) if suite else study


def headline(name: str, study: Study) -> str:
    """The first line of a report's answer, for the index; computed from the rows, not from a kernel's memory."""
    if name not in REPORTS:
        return ""
    document = importlib.import_module(f".{REPORTS[name][0]}", __package__)
    return document.answer(study).lines[0].replace("**", "").replace("`", "")
