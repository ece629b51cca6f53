"""`make report`: measure what is missing, then run each notebook on the rows, render its page, refresh the index."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch

from .. import __version__, hardware, measure
from ..measure import provenance
from . import execute, index, render
from .first_screen import FirstScreen, first_screen
from .places import Plan, ReportError, home, locked, note, plan
from .study import Study, read_study

# Each notebook, with the module of this package that fills its tables and the suite of points that it needs; a report
# without a suite of its own is about the rows of all others, so it comes last.
REPORTS = {
    "optimization_results": ("documents.optimization", "optimization"),
    "benchmark_summary": ("documents.ring", "benchmark_summary"),
    "session_summary": ("documents.session", "session_summary"),
    "performance_comparison": ("documents.ring", "performance_comparison"),
    "hybrid_summary": ("documents.ring", "hybrid_summary"),
    "landscape": ("documents.landscape", "landscape"),
    "claims": ("documents.claims", ""),
}
# Suites whose rows a report shows in an appendix.
BESIDE = {"optimization_results": ("kernels",)}
# A page changes with these, as it does with the code of this package.
MAKERS = ("papermill", "nbclient", "nbconvert", "mistune", "ipykernel", "matplotlib", "pandas")


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

    ``notebooks`` and ``suite`` replace the built-in ones, ``parameters`` go to every notebook beside its profile. Rows
    that are there already are not measured again, unless ``remeasure``. Pages are rendered again, all of them, if
    anything that they are made from has changed since the last complete run, or with ``force``. Raises UsageError and
    ReportError with messages of one line.
    """
    screen = first_screen if notebooks is None else None
    root = home() if reports is None or notebooks is None else None
    reports = Path(reports) if reports is not None else root / "reports"
    notebooks = (
        [root / "notebooks" / f"{n}.ipynb" for n in REPORTS] if notebooks is None else [Path(n) for n in notebooks]
    )
    asked = plan(name, machine or hardware.detect(), reports, strict=strict)
    folder = reports / asked.folder
    pages = Pages(asked, folder, notebooks, screen, parameters or {}, cell_timeout_s)
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
                    how = {"device": asked.device, "rehearsal": asked.rehearsal}
                    groups = (suite or _suite(notebooks))(asked.profile, **how)
                    measure.run(groups, pages.data, progress=True, profile=asked.profile, force=remeasure, **how)
                written = pages.write(force)
        except BaseException:  # Ctrl-C too: the index says at once what is unfinished
            with suppress(OSError):
                index.write_index(reports)
            raise
        return written + index.write_index(reports)
    except measure.Busy as error:
        raise ReportError(str(error)) from None
    except OSError as error:  # a full disk, a folder that may not be written; earlier pages are still whole
        raise ReportError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error


def _suite(notebooks: Sequence[Path]) -> Callable:
    from ringlab.measure import suites

    def groups(profile, **how):
        names = [n.stem for n in notebooks]
        if not all(REPORTS[name][1] for name in names):
            names = [*REPORTS]
        wanted = dict.fromkeys(s for name in names for s in (REPORTS[name][1], *BESIDE.get(name, ())) if s)
        return [g for suite in wanted for g in suites.SUITES[suite](profile, **how)]

    return groups


def headline(name: str, study: Study) -> str:
    """The first line of a report's answer, for the index; computed from the rows, not from a kernel's memory."""
    if name not in REPORTS:
        return ""
    document = importlib.import_module(f".{REPORTS[name][0]}", __package__)
    return document.answer(study).lines[0].replace("**", "").replace("`", "")


@dataclass
class Pages:
    """The pages of one profile's folder, from the rows that lie in it; held by one run at a time."""

    asked: Plan
    folder: Path
    notebooks: Sequence[Path]
    first_screen: Callable[[Study], FirstScreen] | None  # of the index
    parameters: dict
    cell_timeout_s: int
    before: dict = field(default_factory=dict)  # the manifest of the last run

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def given(self) -> dict:
        """What every notebook is given; the path is relative, or an executed notebook would name this machine's."""
        data = os.path.relpath(self.data, self.folder.parent)
        return {"profile": self.asked.profile.name, "data": data, **self.parameters}

    def begin(self) -> None:
        """Remove what killed runs left half-written, and mark the last run's manifest as incomplete."""
        for partial in (*self.folder.glob(".*.tmp"), *self.folder.glob("*/.*.tmp")):
            partial.unlink(missing_ok=True)
        self.before = index.read_manifest(self.folder)
        if self.before:
            index.write_manifest(self.folder, self.before, complete=False)

    def write(self, force: bool) -> list[Path]:
        """Render all pages unless they are current. Raises ReportError that names every notebook that failed."""
        study = read_study(self.asked.profile, self.data)
        if not study.results:
            raise ReportError(f"no rows in {self.data}: nothing was measured")
        render.write(self.data / "summary.csv", study.frame().to_csv(index=False))
        digest, shown = self._digest(study), self.before.get("files", {})
        if not force and self.before.get("digest") == digest and shown == self._digests(shown):
            index.write_manifest(self.folder, self.before, complete=True)
        else:
            self._render(study, digest)
        return [self.folder / f"{source.stem}.{ending}" for source in self.notebooks for ending in ("html", "md")]

    def _render(self, study: Study, digest: str) -> None:
        started = time.time()
        known = {r["name"]: r for r in self.before.get("reports", ())}
        entries = {n.stem: known[n.stem] for n in self.notebooks if n.stem in known}
        shown = self.before.get("files", {})
        kept = {name: self.before[name] for name in ("files", "first_screen") if name in self.before}
        about, files, failures = kept | _about(study, started), [], []
        for source in self.notebooks:
            # The pages are current only with a digest, which the manifest of a run that was stopped does not have.
            index.write_manifest(self.folder, about | {"reports": [*entries.values()]}, complete=False)
            try:
                entries[source.stem], written = self._report(source, study, about)
                files += written
            except execute.NotebookFailed as failure:
                title = render.title_of(execute.read(source))
                entries[source.stem] = known.get(source.stem, {}) | {"name": source.stem, "title": title}
                entries[source.stem] |= {"failed": str(failure)}
                failures.append(str(failure))
        if self.first_screen:
            screen = self.first_screen(study)
            images = ((f"{f.name}.{x}", data) for f in screen.figures for x, data in (("svg", f.svg), ("png", f.png)))
            files += [render.write(self.folder / "figures" / name, data) for name, data in images]
            about["first_screen"] = screen.stored()
        finished = time.time()
        about |= {"finished": _utc(finished), "duration_s": round(finished - started, 1)}
        about["reports"] = [entries[n.stem] for n in self.notebooks]
        names = [f.relative_to(self.folder).as_posix() for f in files]
        if failures:
            index.write_manifest(self.folder, about | {"files": self._digests([*shown, *names])}, complete=False)
            raise ReportError("; ".join(failures))
        index.write_manifest(self.folder, about | {"files": self._digests(names), "digest": digest}, complete=True)
        for name in shown.keys() - {*names}:
            if Path(name).parent.name == "figures":
                (self.folder / "figures" / Path(name).name).unlink(missing_ok=True)

    def _report(self, source: Path, study: Study, about: dict) -> tuple[dict, list[Path]]:
        """(entry for the manifest, files) of one notebook, run and rendered; what it got to is rendered if it fails."""
        page = render.Page(
            source.stem, _subtitle(study, about), study.stamp, study.stamp_note, study.origin, made=_made(about)
        )
        failed_page = self.folder / f"{source.stem}.failed.html"
        try:
            notebook = execute.execute(
                source, self.folder / "tmp" / source.name, self.given,
                cwd=self.folder.parent, cell_timeout_s=self.cell_timeout_s,
            )  # fmt: skip
            written = render.render(notebook, page, self.folder)
        except execute.NotebookFailed as failure:
            page = replace(page, name=failed_page.stem, failure=str(failure))
            render.render(failure.notebook, page, self.folder, formats=("html",))
            note(f"see {failed_page}")
            raise
        failed_page.unlink(missing_ok=True)
        _, suite = REPORTS.get(source.stem, ("", ""))
        rows = study.of(suite) if suite else study  # that the report is about
        entry = {"name": source.stem, "title": render.title_of(notebook), "headline": headline(source.stem, rows)}
        return entry | {"points": len(rows.results), "unquoted": len(rows.failed())}, written

    def _digest(self, study: Study) -> str:
        """Digest of all that the pages are made from: rows, notebooks, templates, code without its comments, versions.

        The state of git is no part of it: a page says of which commit it was made, and stays true at the next.
        """
        package = Path(__file__).resolve().parents[1]
        versions = [f"{p} {version(p)}" for p in MAKERS]
        code = provenance.code_hash(package.rglob("*.py"), package)
        said = [self.asked.folder, study.origin, torch.__version__, sys.version, *versions, code, self.given]
        digest = hashlib.sha256(json.dumps(said).encode())
        other = sorted(p for p in package.rglob("*") if p.suffix in {".toml", ".j2", ".css", ".json"})
        for path in (self.data / "samples.jsonl", *self.notebooks, *other):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()

    def _digests(self, names: Iterable[str]) -> dict[str, str]:
        """sha256 of each file that is there, so that one edited or removed by hand is written again."""
        paths = {name: self.folder / name for name in names}
        return {n: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for n, p in paths.items() if p.is_file()}


def _about(study: Study, started: float) -> dict:
    """A manifest's fields: what was measured, where and of which commit, and what made the pages."""
    newest = max((r.provenance for r in study.results), key=lambda p: p.get("utc", ""))
    commit, dirty = provenance.git_state()
    return {
        "profile": study.profile.name, "rehearsal": study.rehearsal, "device": study.device,
        "measured": newest.get("utc", ""), "commit": newest.get("commit", ""), "dirty": newest.get("dirty"),
        "torch": newest.get("torch", ""),
        "made_by": {
            "commit": commit, "dirty": dirty, "ringlab": __version__, "python": sys.version.split()[0],
            "torch": torch.__version__,
        },
        "started": _utc(started),
    }  # fmt: skip


def _subtitle(study: Study, about: dict) -> str:
    measured = f"measured {about['measured'][:10]}" if about["measured"] else ""
    parts = [study.profile.name, study.device, measured, f"commit {index.short_commit(about)}"]
    return " · ".join(p for p in parts if p)


def _made(about: dict) -> str:
    by = about["made_by"]
    return (
        f"Page made {about['started'][:16].replace('T', ' ')} UTC by ringlab {by['ringlab']}, commit "
        f"{index.short_commit(by)}, torch {by['torch']}, Python {by['python']}."
    )


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
