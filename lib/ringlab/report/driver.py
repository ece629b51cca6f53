"""`make report`: measure what is missing, then run each notebook on the rows, render
its page, refresh the index. What the first screen of the index shows is measured first,
and shown at once.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from .. import __version__, hardware, measure
from ..measure import provenance, suites
from . import index, render
from .evidence import learned
from .first_screen import GROUPS, first_screen
from .places import ReportError, RunTarget, home, locked, note, run_target
from .published import DOCUMENTS
from .study import Study, read_study

# Each notebook; the page of claims is about the rows of all others, so it comes last.
REPORTS = [
    *(d.report for d in DOCUMENTS.values()),
    *("landscape", "selection", "quality", "claims"),
]
TRAININGS = "quality.jsonl"  # the rows of the page of quality
# A page changes with these, as it does with the code of this package.
MAKERS = (
    "papermill",
    "nbclient",
    "nbconvert",
    "mistune",
    "ipykernel",
    "matplotlib",
    "pandas",
    "seaborn",
)


def run(
    name: str = "auto",
    *,
    strict: bool = False,
    reports: Path | None = None,
    machine: hardware.Machine | None = None,
    notebooks: Sequence[Path] | None = None,
    suite: Callable = suites.every_group,
    cell_timeout_s: int = 300,
    force: bool = False,
    remeasure: bool = False,
) -> list[Path]:
    """Bring ``reports/<profile>/`` up to date and return the paths that were written,
    the index last; [] if all was up to date.

    ``notebooks`` and ``suite`` replace the built-in ones. Rows that are there already
    are not measured again, unless ``remeasure``. Pages are rendered again, all of them,
    if anything that they are made from has changed since the last complete run, or with
    ``force``. Raises UsageError, ReportError, UnknownProfile and ``measure.Busy``, each
    with a message of one line.
    """
    reports = home() / "reports" if reports is None else Path(reports)
    target = run_target(name, machine or hardware.detect(), reports, strict=strict)
    sources = notebooks
    if sources is None:
        trained = (target.data / TRAININGS).is_file()  # this command trains nothing
        names = [name for name in REPORTS if trained or name != "quality"]
        sources = [notebook_of(name) for name in names]
    pages = Pages(target, sources, notebooks is None, cell_timeout_s)
    if target.why:
        kind = "showing the rows recorded elsewhere"
        if target.computed:
            kind = "its rows are computed, nothing is measured"
        note(f"{target.profile.name}: {target.why}; {kind}")
    try:
        for source in sources:  # before minutes are spent on measuring
            render.read(source)
        try:
            with locked(pages.folder):
                before = pages.begin()
                if not target.why:
                    pages.measure(suite(target.profile), remeasure)
                written = pages.write(before, force)
        finally:  # after Ctrl-C too: the index says at once what is unfinished
            listed = index.write_index(reports)
        return written and written + listed
    except OSError as error:  # a full disk, a folder that may not be written; earlier pages are still whole
        raise ReportError(
            f"cannot use {error.filename or pages.folder}: {error.strerror or error}"
        ) from error


def notebook_of(name: str) -> Path:
    """The notebook of a page: in a folder of its name, if modules stand beside it."""
    folder = home() / "notebooks"
    beside = folder / name / f"{name}.ipynb"
    return beside if beside.is_file() else folder / f"{name}.ipynb"


@dataclass(frozen=True)
class Pages:
    """The pages of one profile's folder, from the rows that lie in it; held by one run
    at a time.
    """

    target: RunTarget
    notebooks: Sequence[Path]
    first_screen: bool  # of the index
    cell_timeout_s: int

    @property
    def folder(self) -> Path:
        return self.target.data.parent

    @property
    def parameters(self) -> dict:
        """The parameters of every notebook; the path is relative to ``reports/``, where
        notebooks run.
        """
        return {"profile": self.target.profile.name, "data": f"{self.folder.name}/data"}

    def begin(self) -> dict:
        """Remove what killed runs left half-written; the manifest of the last run,
        which is marked as incomplete.
        """
        for partial in (*self.folder.glob(".*.tmp"), *self.folder.glob("*/.*.tmp")):
            partial.unlink(missing_ok=True)
        before = index.read_manifest(self.folder)
        before.pop("measured_points", None)  # of a run that was stopped
        if before:
            index.write_manifest(self.folder, before, complete=False)
        return before

    def measure(self, groups: Sequence[measure.Group], anew: bool) -> None:
        """Measure what is missing, or with ``anew`` everything; first what the first
        screen shows, which is written as soon as it is there.
        """
        first = [g for name in GROUPS for g in groups if g.name == name]
        groups = [*first, *(g for g in groups if g not in first)]
        points = sum(len(g.points) for g in groups)

        def after(group: measure.Group | None, left: int) -> None:
            """Write to the manifest how far the run is."""
            manifest = index.read_manifest(self.folder)
            shown = self.first_screen and group in first and left
            if shown:
                study = read_study(self.target.profile, self.target.data)
                reports = manifest.get("reports", [])
                screen, _ = self._first_screen(study, reports)
                manifest = _about(study) | {"reports": reports, "first_screen": screen}
            manifest["measured_points"] = [points - left, points]
            index.write_manifest(self.folder, manifest, complete=False)
            if shown:
                path, _ = index.write_index(self.folder.parent)
                note(f"{path} has first answers, of {points - left} of {points} points")

        profile = self.target.profile
        measure.run(
            groups,
            self.target.data,
            profile=profile,
            force=anew,
            progress=True,
            after=after,
        )

    def write(self, before: dict, force: bool) -> list[Path]:
        """Render all pages and return their paths; [] if they are current. Raises
        ReportError that names every notebook that failed.
        """
        profile = self.target.profile
        data = self.target.data
        study = Study(profile, [], data, computed=True)  # whose rows notebooks compute
        data.mkdir(parents=True, exist_ok=True)
        if not self.target.computed:
            study = read_study(profile, data)
            if not study.results:
                raise ReportError(f"no rows in {data}: nothing was measured")
            summary = study.frame().drop(columns="row").to_csv(index=False)
            render.write(data / "summary.csv", summary)
        made_from = self._made_from(study)
        if not force and before.get("digest") == f"{made_from} {self._made()}":
            index.write_manifest(self.folder, before, complete=True)
            return []
        self._render(study, made_from, before)
        return [
            self.folder / f"{source.stem}.{ending}"
            for source in self.notebooks
            for ending in ("html", "md")
        ]

    def _render(self, study: Study, made_from: str, before: dict) -> None:
        known = {page["name"]: page for page in before.get("reports", ())}
        entries = []
        files = []
        failures = []
        manifest = _about(study) | {
            key: before[key] for key in ("reports", "first_screen") if key in before
        }
        for number, source in enumerate(self.notebooks, 1):
            note(f"[{number}/{len(self.notebooks)}] page {source.stem}")
            try:
                entry, written = self._report(source, study, manifest)
                files += written
            except render.NotebookFailed as failure:
                failures.append(str(failure))
                named = {
                    "name": source.stem,
                    "title": render.title_of(render.read(source)),
                }
                entry = known.get(source.stem, {}) | named | {"failed": str(failure)}
            entries.append(entry)
        if self.first_screen:
            manifest["first_screen"], written = self._first_screen(study, entries)
            files += written
        manifest["reports"] = entries
        if failures:
            index.write_manifest(self.folder, manifest, complete=False)
            raise ReportError("; ".join(failures))
        for figure in {*self.folder.glob("figures/*")} - {*files}:
            figure.unlink()
        index.write_manifest(
            self.folder,
            manifest | {"digest": f"{made_from} {self._made()}"},
            complete=True,
        )

    def _first_screen(
        self, study: Study, reports: Sequence[dict]
    ) -> tuple[dict, list[Path]]:
        """(what the manifest keeps, files) of the first screen, with what is known of
        the pages.
        """
        note("first screen of the index")
        screen = first_screen(study, learned(reports))
        files = []
        if figure := screen.figure:
            path = self.folder / "figures" / figure.name
            files = [
                render.write(path.with_suffix(".svg"), figure.svg),
                render.write(path.with_suffix(".png"), figure.png),
            ]
        return screen.stored(), files

    def _report(
        self, source: Path, study: Study, manifest: dict
    ) -> tuple[dict, list[Path]]:
        """(entry for the manifest, files) of one notebook, run and rendered."""
        trainings = self.target.data / TRAININGS
        if source.stem == "quality" and trainings.is_file():  # it has rows of its own
            newest = _newest(trainings)
            manifest = manifest | {
                "measured": newest.get("utc"),
                "device": provenance.device_of(newest),
                **{key: newest.get(key) for key in ("commit", "dirty", "torch")},
            }
        subtitle = " · ".join([study.profile.name, *index.facts(manifest)])
        by = manifest["made_by"]
        made = (
            f"Page made {by['utc'][:16].replace('T', ' ')} UTC by ringlab {by['ringlab']}, commit "
            f"{index.short_commit(by)}, torch {by['torch']}, Python {by['python']}."
        )
        page = render.Page(source.stem, subtitle, _note(study), study.computed, made)
        notebook = render.execute(
            source,
            self.parameters,
            self.folder.parent,
            self.folder / f"{source.stem}.failed.ipynb",
            cell_timeout_s=self.cell_timeout_s,
        )
        entry = {
            "name": source.stem,
            "title": render.title_of(notebook),
            **render.finding_of(notebook),
        }
        return entry, render.render(notebook, page, self.folder)

    def _made_from(self, study: Study) -> str:
        """Digest of all that the pages are made from: rows, notebooks, templates, code
        without its comments, versions.

        The state of git is no part of it: a page says of which commit it was made, and
        stays true at the next.
        """
        package = Path(__file__).resolve().parents[1]
        versions = [f"{p} {version(p)}" for p in MAKERS]
        endings = {".py", ".toml", ".j2", ".css", ".json"}
        files = (p for p in package.rglob("*") if p.suffix in endings)
        code = provenance.code_hash(files, package)
        texts = json.dumps(
            [
                study.origin,
                torch.__version__,
                sys.version,
                *versions,
                code,
                self.parameters,
            ]
        )
        rows = [
            p
            for p in (self.target.data / "samples.jsonl", self.target.data / TRAININGS)
            if p.is_file()
        ]
        beside = [
            module
            for notebook in self.notebooks
            if notebook.parent.name == notebook.stem
            for module in sorted(notebook.parent.glob("*.py"))
        ]
        return _digest(texts, [*rows, *self.notebooks, *beside])

    def _made(self) -> str:
        """Digest of the pages that are there, so that one edited or removed by hand is
        written again.
        """
        return _digest(
            "",
            sorted(
                path
                for x in ("*.html", "*.md", "figures/*")
                for path in self.folder.glob(x)
            ),
        )


def _digest(text: str, paths: Sequence[Path]) -> str:
    digest = hashlib.sha256(text.encode())
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _note(study: Study) -> str:
    """What a page says of its rows under its title; empty where they are from here and
    now.
    """
    if not study.computed:
        return study.origin
    profile = study.profile
    return (
        f"Nothing was measured on {profile.title}: times are lower bounds (≥), computed from the rates of its data "
        f"sheet, and memory is computed by running the library without data. `make report GPU={profile.name}` "
        "measures there."
    )


def _newest(rows: Path) -> dict:
    """The origin of the newest of the rows in a file of JSON lines."""
    for line in reversed(rows.read_text(encoding="utf-8").splitlines()):
        with suppress(ValueError):  # the line at which a writer was killed
            return json.loads(line)["origin"]
    return {}


def _about(study: Study) -> dict:
    """A manifest's fields: what was measured, where and of which commit, and what made
    the pages.
    """
    newest = study.newest
    commit, dirty = provenance.git_state()
    return {
        "profile": study.profile.name,
        "computed": study.computed,
        "device": study.device,
        "measured": newest.get("utc", ""),
        "dirty": newest.get("dirty"),
        **{name: newest.get(name, "") for name in ("commit", "torch")},
        "made_by": {
            "utc": provenance.utc(),
            "commit": commit,
            "dirty": dirty,
            "ringlab": __version__,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        },
    }
