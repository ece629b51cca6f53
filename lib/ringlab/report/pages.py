"""The pages of one profile's folder: which are current, which must be run and rendered, the manifest over them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__
from ..measure import provenance
from . import execute, index, render
from .first_screen import FirstScreen
from .places import ReportError, note
from .plan import Plan
from .study import Study, read_study

# A page changes with these, as it does with the code of this package.
MAKERS = ("papermill", "nbclient", "nbconvert", "mistune", "ipykernel", "matplotlib", "pandas")


@dataclass
class Pages:
    """The pages of one profile's folder, from the rows that lie in it; held by one run at a time."""

    asked: Plan
    folder: Path
    notebooks: Sequence[Path]
    own: Callable[[str, Study], Study]  # the rows of a report
    headline: Callable[[str, Study], str]  # the first line of its answer
    first_screen: Callable[[Study], FirstScreen] | None  # of the index
    parameters: dict
    cell_timeout_s: int
    force: bool
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
        render.sweep(self.folder)
        self.before = index.read_manifest(self.folder)
        if self.before:
            index.write_manifest(self.folder, self.before, complete=False)

    def write(self) -> list[Path]:
        """Render what is not current. Raises ReportError that names every notebook that failed."""
        study = read_study(self.asked.profile, self.data)
        if not study.results:
            raise ReportError(f"no rows in {self.data}: nothing was measured")
        render.write(self.data / "summary.csv", study.frame().to_csv(index=False))
        started, basis = time.time(), self._basis(study)
        known = {r["name"]: r for r in self.before.get("reports", ())}
        entries = {n.stem: known[n.stem] for n in self.notebooks if n.stem in known}
        about, rendered, failures = _about(study, started), False, []
        for source in self.notebooks:
            digest = hashlib.sha256(basis + source.read_bytes()).hexdigest()
            entry = known.get(source.stem, {})
            whole = entry.get("files") == _digests(self.folder, entry.get("files", ()))
            if not self.force and entry.get("digest") == digest and whole:
                continue
            # Without its digest an entry is not current, so that a run killed between two of its files is made good.
            entries |= {source.stem: _without(entry, "digest")} if entry else {}
            index.write_manifest(self.folder, about | {"reports": list(entries.values())}, complete=False)
            rendered = True
            entries[source.stem], failure = self._report(source, study, about, entry, digest)
            failures += [failure] if failure else []
        entries = [entries[n.stem] for n in self.notebooks]
        if self.first_screen:
            digest = hashlib.sha256(basis).hexdigest()
            known_screen = self.before.get("first_screen", {})
            if self.force or known_screen.get("digest") != digest:
                rendered, known_screen = True, self._screen(study) | {"digest": digest}
            about |= {"first_screen": known_screen}
        finished = time.time()
        if not rendered and entries == list(known.values()):
            index.write_manifest(self.folder, self.before, complete=True)
        else:
            about |= {"finished": _utc(finished), "duration_s": round(finished - started, 1), "reports": entries}
            index.write_manifest(self.folder, about, complete=not failures)
            self._drop_figures(known.values(), entries)
        if failures:
            raise ReportError("; ".join(str(f) for f in failures))
        return [page for source in self.notebooks for page in self._pages(source)]

    def _report(self, source: Path, study: Study, about: dict, entry: dict, digest: str):
        """(entry for the manifest, None or the failure) of one notebook, run and rendered."""
        entry = _without(entry, "digest", "failed")
        entry |= {"name": source.stem, "title": render.title_of(execute.read(source))}
        page = render.Page(
            source.stem, _subtitle(study, about), study.stamp, study.stamp_note, study.origin, made=_made(about)
        )
        failed_page = self.folder / f"{source.stem}.failed.html"
        try:
            notebook = execute.execute(
                source, self.folder / "tmp" / source.name, self.given,
                cwd=self.folder.parent, cell_timeout_s=self.cell_timeout_s,
            )  # fmt: skip
            try:
                written = render.render(notebook, page, self.folder)
            except render.MissingAlt as missing:
                raise execute.NotebookFailed(f"{source.name}: {missing}", notebook, 0) from missing
        except execute.NotebookFailed as failure:
            page = replace(page, name=failed_page.stem, failure=str(failure))
            render.render(failure.notebook, page, self.folder, formats=("html",))
            note(f"see {failed_page}")
            return entry | {"failed": str(failure)}, failure
        failed_page.unlink(missing_ok=True)
        own = self.own(source.stem, study)
        entry |= {"headline": self.headline(source.stem, own)}
        entry |= {"points": len(own.results), "unquoted": len(own.failed())}
        entry |= {"files": _digests(self.folder, [f.relative_to(self.folder).as_posix() for f in written])}
        entry |= {"digest": digest}
        return entry, None

    def _screen(self, study: Study) -> dict:
        """The first screen, its figures written."""
        screen = self.first_screen(study)
        for f in screen.figures:
            for ending, data in (("svg", f.svg), ("png", f.png)):
                render.write(self.folder / "figures" / f"{f.name}.{ending}", data)
        return screen.stored()

    def _pages(self, source: Path) -> list[Path]:
        return [self.folder / f"{source.stem}.html", self.folder / f"{source.stem}.md"]

    def _drop_figures(self, old, new) -> None:
        """Remove figures that no report shows any more."""
        kept = {name for entry in new for name in entry.get("files", ())}
        for name in {name for entry in old for name in entry.get("files", ())} - kept:
            if Path(name).parent.name == "figures":
                (self.folder / "figures" / Path(name).name).unlink(missing_ok=True)

    def _basis(self, study: Study) -> bytes:
        """Digest of everything that a page is made from but its notebook: rows, code without its comments, versions.

        The state of git is no part of it: a page says of which commit it was made, and stays true at the next.
        """
        package = Path(__file__).resolve().parents[1]
        versions = [f"{p} {_version(p)}" for p in MAKERS]
        code = provenance.code_hash(package.rglob("*.py"), package)
        said = [self.asked.folder, study.origin, torch.__version__, sys.version, *versions, code, self.given]
        digest = hashlib.sha256(json.dumps(said).encode())
        other = sorted(p for p in package.rglob("*") if p.suffix in {".toml", ".j2", ".css", ".json"})
        for path in (self.data / "samples.jsonl", *other):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.digest()


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 of each file of a report that is there, so that one edited or removed by hand is written again."""
    paths = {name: folder / name for name in names}
    return {n: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for n, p in paths.items() if p.is_file()}


def _without(entry: dict, *names: str) -> dict:
    return {k: v for k, v in entry.items() if k not in names}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


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
