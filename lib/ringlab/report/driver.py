"""`make report`: measure what is missing, run each notebook on the rows, render, refresh the index."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import nbformat
import torch

from .. import hardware, measure
from ..measure import provenance
from . import execute, index, render
from .places import ReportError, home, locked, note
from .plan import Plan, plan
from .study import Study, read_study

# Each notebook, with the module of this package that fills its tables and the suite of points that it needs.
REPORTS = {"optimization_results": ("optimization", "optimization")}


def run(
    name: str = "auto",
    *,
    strict: bool = False,
    reports: Path | None = None,
    machine: hardware.Machine | None = None,
    notebooks: Sequence[Path] | None = None,
    suite: Callable | None = None,
    cell_timeout_s: int = 300,
    force: bool = False,
) -> list[Path]:
    """Bring ``reports/<profile>/`` up to date and return the paths of its pages, the index last.

    ``notebooks`` and ``suite`` replace the built-in ones. What has not changed since the last complete run is neither
    measured nor rendered again, unless ``force``. Raises UsageError and ReportError with messages of one line.
    """
    root = home() if reports is None or notebooks is None else None
    reports = Path(reports) if reports is not None else root / "reports"
    notebooks = (
        [root / "notebooks" / f"{n}.ipynb" for n in REPORTS] if notebooks is None else [Path(n) for n in notebooks]
    )
    asked = plan(name, machine or hardware.detect(), reports, strict=strict)
    folder = reports / asked.folder
    if asked.why:
        kind = "rehearsal on this CPU" if asked.rehearsal else "showing the rows recorded elsewhere"
        note(f"{asked.profile.name}: {asked.why}; {kind}")
    try:
        with locked(folder):
            if asked.measure:
                groups = (suite or _suite(notebooks))(asked.profile, device=asked.device, rehearsal=asked.rehearsal)
                _measure(groups, folder / "data", asked)
            pages = _write_reports(asked, folder, notebooks, cell_timeout_s=cell_timeout_s, force=force)
        return pages + index.write_index(reports)
    except OSError as error:  # a full disk, a folder that may not be written; earlier pages are still whole
        raise ReportError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error


def _measure(groups, data: Path, asked: Plan) -> None:
    try:
        measure.run(groups, data, profile=asked.profile, device=asked.device, rehearsal=asked.rehearsal, progress=True)
    except measure.Busy as error:
        raise ReportError(str(error)) from None


def _suite(notebooks: Sequence[Path]) -> Callable:
    from ..measure import suites

    def groups(profile, **how):
        wanted = dict.fromkeys(REPORTS[n.stem][1] for n in notebooks)
        return [g for suite in wanted for g in suites.SUITES[suite](profile, **how)]

    return groups


def _write_reports(asked: Plan, folder: Path, notebooks, *, cell_timeout_s: int, force: bool) -> list[Path]:
    study = read_study(asked.profile, folder / "data")
    results = study.results
    if not results:
        raise ReportError(f"no rows in {folder / 'data'}: nothing was measured")
    old = {r["name"]: r for r in index.read_manifest(folder).get("reports", ())}
    started, pages, reports, failures = time.time(), [], [], []
    about = _about(study, started)
    _write_summary(study, folder / "data" / "summary.csv")
    for source in notebooks:
        digest = _digest(source, folder / "data" / "samples.jsonl", asked.profile.name)
        files = [folder / f"{source.stem}.html", folder / f"{source.stem}.md"]
        known = old.get(source.stem, {})
        if not force and known.get("digest") == digest and all(f.is_file() for f in files):
            reports.append(known)
            pages += files
            continue
        index.write_manifest(folder, {**about, "reports": list(old.values())})  # complete: false while at work
        entry = {"name": source.stem, "title": _title(source), "points": len(results), "unquoted": len(study.failed())}
        page = render.Page(source.stem, _subtitle(study, about), study.stamp, study.stamp_note, study.origin)
        try:
            notebook = execute.execute(
                source,
                folder / "tmp" / source.name,
                {"profile": asked.profile.name, "data": os.path.relpath(folder / "data", folder.parent)},
                cwd=folder.parent,
                cell_timeout_s=cell_timeout_s,
            )
        except execute.NotebookFailed as failure:
            failures.append(failure)
            shown = _failed_page(failure, page, folder)
            entry |= {"failed": str(failure)}
            reports.append(entry)
            note(f"see {shown}")
            continue
        pages += render.render(notebook, page, folder)
        (folder / f"{source.stem}.failed.html").unlink(missing_ok=True)
        reports.append(entry | {"headline": _headline(source.stem, study), "digest": digest})
    finished = time.time()
    about |= {"finished": _utc(finished), "duration_s": round(finished - started, 1), "reports": reports}
    index.write_manifest(folder, about | {"complete": not failures})
    if failures:
        index.write_index(folder.parent)
        raise ReportError("; ".join(str(f) for f in failures))
    return pages


def _headline(name: str, study: Study) -> str:
    """The first line of a report's answer, for the index; computed from the rows, not from a kernel's memory."""
    if name not in REPORTS:
        return ""
    document = importlib.import_module(f".{REPORTS[name][0]}", __package__)
    return document.answer(study).lines[0].replace("**", "").replace("`", "")


def _failed_page(failure: execute.NotebookFailed, page: render.Page, folder: Path) -> Path:
    banner = nbformat.v4.new_markdown_cell(f"**This report is unfinished.** {failure}")
    notebook = nbformat.from_dict(failure.notebook)
    notebook.cells = [c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", ())]
    notebook.cells.insert(1, banner)
    page = replace(page, name=f"{page.name}.failed")
    return render.render(notebook, page, folder, formats=("html",))[0]


def _title(source: Path) -> str:
    return render.title_of(nbformat.read(source, as_version=4))


def _subtitle(study: Study, about: dict) -> str:
    return f"{study.profile.name} · {study.device} · {about['started'][:10]} · commit {about['commit'][:10]}" + (
        " + changes" if about["dirty"] is True else ""
    )


def _about(study: Study, started: float) -> dict:
    commit, dirty = provenance.git_state()
    return {
        "profile": study.profile.name,
        "rehearsal": study.rehearsal,
        "device": study.device,
        "commit": commit or "",
        "dirty": dirty,
        "started": _utc(started),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _write_summary(study: Study, path: Path) -> None:
    render.write(path, study.frame().to_csv(index=False))


def _digest(source: Path, samples: Path, profile: str) -> str:
    """Of everything a page is made from: the notebook, the rows, this package, the versions, the commit."""
    digest = hashlib.sha256(repr((profile, torch.__version__, sys.version, provenance.git_state())).encode())
    package = Path(__file__).resolve().parents[1]
    code = sorted(p for p in package.rglob("*") if p.suffix in {".py", ".toml", ".j2", ".css", ".json"})
    for path in (source, samples, *code):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
