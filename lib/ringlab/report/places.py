"""Where things lie: the checkout, its notebooks, the reports, found from any working folder; and one run per folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path

EXPECTED_PREFIX = "RINGLAB_EXPECTED_PREFIX"  # tells a kernel which environment its driver runs in
FOREIGN = ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLBACKEND")


class ReportError(Exception):
    """A message of one line for the user, with the exit code of the command."""

    exit_code = 1


class UsageError(ReportError):
    """Asked for something that cannot be."""

    exit_code = 2


def home(start: Path | None = None) -> Path:
    """The checkout: the nearest folder at or above ``start`` (default: here, then this package) with our notebooks.

    Raises UsageError when there is none.
    """
    package = Path(__file__).resolve().parent
    for origin in (start or Path.cwd(), package):
        for folder in (origin.resolve(), *origin.resolve().parents):
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


def data_folder(profile: str, data: str = "") -> Path:
    """The rows that a notebook reads: ``data`` if given, else the profile's own, else its rehearsal's.

    Raises FileNotFoundError that says how to measure them.
    """
    if data:
        choices = [Path(data)]
    else:
        reports = home() / "reports"
        choices = [reports / profile / "data", reports / f"{profile}-rehearsal" / "data"]
    for folder in choices:
        if (folder / "samples.jsonl").is_file():
            return folder
    raise FileNotFoundError(
        f"no rows for profile {profile!r} in {choices[0]}; measure them first: python -m ringlab measure --profile "
        f"{profile}"
    )


@contextmanager
def own_jupyter(**variables: str):
    """The environment without what leads Jupyter to another's kernels, templates and settings; restored afterwards."""
    before = dict(os.environ)
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(JUPYTER_PREFER_ENV_PATH="1", **variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def locked(folder: Path, *, wait: bool = False):
    """Hold ``folder`` for one run; another run waits, or gets a ReportError that names the holder.

    The system drops the lock with its process, so a killed run leaves nothing that could block the next one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".run.lock"
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "{}"
            file.close()
            raise ReportError(f"{folder} is in use by {_name(holder)}; wait for it or stop it") from None
        if _is_still(file, path):
            break
        file.close()  # the former holder removed this file between our open and our lock
    try:
        file.truncate(0)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%H:%M:%S")}
        file.write(json.dumps(about))
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _is_still(file, path: Path) -> bool:
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _name(holder: str) -> str:
    try:
        about = json.loads(holder)
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (ValueError, KeyError):
        return "another process"


def note(text: str) -> None:
    """A line for the terminal; never part of a report."""
    print(text, file=sys.stderr, flush=True)
