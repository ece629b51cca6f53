"""Reports as PDF: a headless Chromium prints each HTML page beside itself, with the
network off.

Needs the standard library alone, besides the browser.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .. import hardware
from .places import REHEARSAL, ReportError, UsageError, reports_folder

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "install one (Debian, Fedora: apt or dnf install chromium) or name it: CHROMIUM=/path/to/chrome"
TIMEOUT_S = 120  # a page takes about two seconds
FLAGS = (
    "--headless",
    "--disable-gpu",
    "--no-pdf-header-footer",
    "--generate-pdf-document-outline",
    # The page is one offline file: no name resolves, and the browser's own errands are
    # not run.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-breakpad",
    "--no-first-run",
    "--no-default-browser-check",
)


def run(
    name: str = "auto",
    *,
    reports: Path | None = None,
    machine: hardware.Machine | None = None,
) -> list[Path]:
    """Print every report of a profile to ``<report>.pdf`` and return the paths; an
    earlier PDF is replaced whole.

    "auto" is the profile of this machine, or all profiles where that one has no report.
    Raises UsageError where there is no report, or no Chromium; ReportError where it
    fails.
    """
    found, browser = pages(name, Path(reports or reports_folder()), machine), chromium()
    return [print_page(page, browser) for page in found]


def pages(
    name: str, reports: Path, machine: hardware.Machine | None = None
) -> list[Path]:
    """The finished HTML reports of a profile, its own before its rehearsal's;
    UsageError where there is none.
    """
    profile = hardware.resolve(name.removesuffix(f"-{REHEARSAL}"), machine).name
    own = [] if name.endswith(REHEARSAL) else [profile]
    for folder in (*own, f"{profile}-{REHEARSAL}", *(["*"] if name == "auto" else [])):
        if found := sorted(reports.glob(f"{folder}/*.html")):
            return found
    given = "" if name == "auto" else f" GPU={name}"
    raise UsageError(
        f"no report in {os.path.relpath(reports / profile)} yet; write it first: make report{given}"
    )


def chromium() -> list[str]:
    """The browser's command: $CHROMIUM, which may carry options, or the first of NAMES;
    UsageError where none is.
    """
    named = os.environ.get("CHROMIUM", "").strip()
    if not named:
        found = [path for path in map(shutil.which, NAMES) if path]
        if not found:
            raise UsageError(
                f"PDF needs Chromium or Chrome, and none is here; {INSTALL}"
            )
        return found[:1]
    command = [named] if shutil.which(named) else shlex.split(named)
    if not shutil.which(command[0]):
        raise UsageError(f"CHROMIUM={named} is no program that can be run; {INSTALL}")
    return command


def print_page(
    page: Path, browser: Sequence[str], timeout_s: float = TIMEOUT_S
) -> Path:
    """Print one page to a PDF beside it; ReportError in one line if the browser fails
    or leaves half a file.
    """
    target, scratch = page.with_suffix(".pdf"), page.parent / "tmp"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="pdf-", dir=scratch, ignore_cleanup_errors=True
    ) as folder:
        partial = Path(folder).resolve() / target.name
        # Chromium's sandbox refuses to start for root.
        options = [
            *FLAGS,
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            f"--user-data-dir={folder}/browser",
        ]
        why = _call(
            [*browser, *options, f"--print-to-pdf={partial}", page.resolve().as_uri()],
            timeout_s,
        )
        data = partial.read_bytes() if partial.is_file() else b""
        if why or not (data.startswith(b"%PDF-") and b"%%EOF" in data[-1024:]):
            raise ReportError(
                f"{browser[0]} could not print {os.path.relpath(page)}: {why or 'it wrote no whole PDF'}"
            )
        os.replace(partial, target)
    return target


def _call(command: Sequence[str], timeout_s: float) -> str:
    """Run the browser in a group of its own, which ends with this call; returns what
    went wrong, or "".
    """
    how = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    with subprocess.Popen(
        command, start_new_session=True, errors="replace", **how
    ) as browser:
        try:
            said, _ = browser.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"it did not end within {timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)
    # The last line of its output that is not about the desktop's message bus, without
    # its time stamp.
    lines = [line.strip() for line in said.splitlines() if "dbus" not in line.lower()]
    last = re.sub(
        r"^\[[^\]]*\]\s*", "", next(filter(None, reversed(lines)), "it said nothing")
    )
    return f"exit code {browser.returncode}; {last[:300]}" if browser.returncode else ""
