"""Where the files of a profile lie, and what a request for one comes to on this
machine; one run per folder at a time.

``reports/`` has the index over all profiles; ``reports/<profile>/`` holds

    *.html, *.md, figures/   the pages
    data/samples.jsonl       rows as they are measured, see ``ringlab.measure.store``
    data/quality.jsonl       rows of trainings, see ``notebooks/quality/trainings.py``
    data/summary.csv         one line per point of a group: median and interval in seconds (``_s``), errors,
                             memory (``_bytes``), cost, and why a row is not shown (``not_quoted_because``)
    data/added/              rows of points that no page lists; not committed
    data/manifest.json       what made the pages and what they say; ``complete`` if all are whole

Of a GPU without rows whose rows are computed, ``data/`` has the manifest alone.

Needs torch alone, so that a machine without the report's packages can measure.
"""

import json
import os
import shlex
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import hardware
from ..measure.provenance import NoGit, git
from ..measure.store import warn as note

NO_MEASURING = (
    "RINGLAB_NO_MEASURING"  # set where notebooks run on the rows that are there
)


class ReportError(Exception):
    """A message of one line for the user, with the exit code of the command."""

    exit_code = 1


class UsageError(ReportError):
    """Asked for something that cannot be."""

    exit_code = 2


def home() -> Path:
    """The checkout: the nearest folder at or above this one, or this package, with our
    notebooks; else UsageError.
    """
    for origin in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (origin, *origin.parents):
            if (folder / "notebooks" / "optimization_results.ipynb").is_file():
                return folder
    raise UsageError(
        "no checkout with notebooks/optimization_results.ipynb at or above this folder; run from inside it"
    )


def reports_folder() -> Path:
    """``reports/`` of the checkout, or of the working folder where there is none."""
    try:
        return home() / "reports"
    except UsageError:
        return Path("reports")


def changes(folder: Path) -> str:
    """How to keep or drop the changes of files below ``folder`` that git tracks; empty
    where there are none.
    """
    try:
        changed = git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except NoGit:
        return ""
    if not changed:
        return ""
    name = shlex.quote(os.path.relpath(folder))
    return (
        f"files that git tracks changed: `git add {name}` and a commit keep them, "
        f"`git checkout -- {name}` drops them, with the rows that were measured"
    )


@contextmanager
def locked(folder: Path, *, wait: bool = False):
    """Hold ``folder`` for one run; another run waits, or gets a ReportError that names
    the holder.

    The system drops the lock with its process, so a killed run leaves nothing that
    could block the next one.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".run.lock"
    lock = FileLock(path, blocking=wait)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text() if path.is_file() else ""
        raise ReportError(
            f"{folder} is in use by {holder or 'another process'}; wait for it or stop it"
        ) from None
    try:
        path.write_text(
            f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')}"
        )
        yield
    finally:
        path.unlink(
            missing_ok=True
        )  # while it is held: who waits for it sees that it is gone and begins anew
        lock.release()


def short_commit(origin: dict) -> str:
    """Ten digits, and whether anything was changed since.

    >>> short_commit({"commit": "898236a615fe4ea9d2c9", "dirty": True}), short_commit({"commit": "unknown"})
    ('898236a615 + changes', 'unknown')
    """
    changes = " + changes" if origin.get("dirty") is True else ""
    return f"{origin.get('commit') or 'unknown'}"[:10] + changes


def read_manifest(folder: Path) -> dict:
    """The manifest of a profile's folder, empty if there is none; one that cannot be
    read is empty too, and noted.
    """
    path = folder / "data" / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        reports = manifest.get("reports", [])
        if not all(isinstance(report["name"], str) for report in reports):
            raise ValueError("no list of reports with names")
        return manifest
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        note(f"{path} cannot be read: {error}")
        return {}


@dataclass(frozen=True)
class RunTarget:
    """What a request for a profile comes to on this machine: measuring into ``data``,
    or, with a reason ``why`` it cannot be measured here, showing the rows that lie
    there; without any, rows are ``computed``.
    """

    profile: hardware.Profile
    data: Path
    why: str = ""
    computed: bool = False

    @property
    def runs(self) -> bool:
        """Whether missing points can be measured here."""
        return not self.why


def run_target(
    name: str,
    machine: hardware.Machine,
    reports: Path,
    data: str | Path = "",
    *,
    strict: bool = False,
) -> RunTarget:
    """The RunTarget for a profile, whose rows lie in ``data`` or else below ``reports``.

    Raises UnknownProfile, and UsageError for a GPU that is here but that torch cannot
    drive (one line with what to install), for an absent one of unknown capability
    without rows, and with ``strict`` for any that cannot be measured here.
    """
    profile = hardware.resolve(name, machine)
    data = Path(data or reports / profile.name / "data")
    runnable, why = profile.runnable(machine)
    if runnable:
        return RunTarget(profile.on(machine), data)
    computed = not (data / "samples.jsonl").is_file()
    here = profile.name == hardware.match(machine)
    if strict or here or computed and profile.capability is None:
        raise UsageError(f"profile {profile.name!r} cannot be measured here: {why}")
    return RunTarget(profile, data, why, computed)
