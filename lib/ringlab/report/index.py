"""The manifest of one profile's run, and the index page over all profiles and reports."""

import json
import re
from pathlib import Path

from ..advise import rounded
from . import theme
from .first_screen import VERSION
from .places import locked, read_manifest, short_commit
from .render import DATA, css, tidy, write
from .templates import ENVIRONMENT, rendered

EXPLORER = "notebooks/explore.ipynb"  # beside the folder of reports
PAGES = {"html": "HTML", "md": "Markdown"}  # endings, as a link calls them


def write_manifest(folder: Path, manifest: dict, *, complete: bool) -> None:
    """Write ``data/manifest.json`` of a profile's folder; ``complete`` is true only
    when all its pages are whole.
    """
    write(
        folder / "data" / "manifest.json",
        json.dumps(manifest | {"complete": complete}, indent=1) + "\n",
    )


def facts(manifest: dict) -> list[str]:
    """What was measured on which device, when, of which commit, with which torch, as
    far as it is known.
    """
    known = [str(manifest.get("device") or "")]
    if measured := str(manifest.get("measured") or ""):
        known.append(f"measured {measured[:16].replace('T', ' ')} UTC")
    if manifest.get("commit"):
        known.append(f"commit {short_commit(manifest)}")
        known.append(f"torch {manifest.get('torch')}")
    return [*filter(None, known)]


def write_index(reports: Path) -> list[Path]:
    """Write ``index.html`` and ``index.md`` over every profile and report found."""
    ENVIRONMENT.filters |= {"inline": theme.inline, "rounded": rounded}
    explorer = f"`{EXPLORER}`"
    if (reports.parent / EXPLORER).is_file():
        explorer = f"[{EXPLORER}](../{EXPLORER})"
    ENVIRONMENT.globals |= {
        "title": "ringlab: which attention for a long sequence",
        "lead": "For each device: the attention that is advised, how long a sequence fits and how fast it is. "
        "The limit of 1 s for a layer's call lets a model of 32 layers read its prompt in half a minute. "
        "Documents 000 to 004 are answered on the pages with their titles.",
        "explained": "For other lengths, shapes, needs and GPUs ask "
        f"`.venv/bin/python -m ringlab advise`, or {explorer} in `make lab`.",
        "judge": (reports / "judge" / "judge.html").is_file(),
        "css": css(),
    }
    with locked(reports, wait=True):  # runs of two profiles may end at once
        folders = {
            path.parents[1] for x in DATA for path in reports.glob(f"*/data/{x}")
        }
        sections = [*map(_section, sorted(folders))]
        # The CPU, which is measured whole, then measured GPUs, then what was computed.
        sections.sort(key=lambda x: (x["computed"], x["name"] != "cpu"))
        return [
            write(
                reports / f"index.{x}",
                tidy(rendered(f"profiles.{x}", sections=sections)),
            )
            for x in PAGES
        ]


def _section(folder: Path) -> dict:
    """What the index says of one profile's folder; links are (text, path below
    reports/) of files that are there.
    """
    manifest = read_manifest(folder)
    data = folder / "data"
    state = ""  # where all is whole
    if not manifest and (data / "manifest.json").exists():
        state = "its manifest.json cannot be read: run it again to write a new one"
    elif not manifest:
        state = "measured, no report yet"
    elif not manifest.get("complete"):
        state = "unfinished: run it again to complete it"
        if count := manifest.get("measured_points"):
            state = (
                f"unfinished: {count[0]:,} of {count[1]:,} points are measured; the rest and the pages are still to "
                "come. Pages that are listed are of an earlier run. A run that was stopped goes on when started again."
            )
    files = [name for name in DATA if (data / name).is_file()]
    return {
        "folder": folder.name,
        "name": folder.name,
        "computed": bool(manifest.get("computed")),
        "state": state,
        "facts": facts(manifest),
        "files": [(name, f"{folder.name}/data/{name}") for name in files],
        "pages": [
            _page(folder, report, "measured_points" in manifest)
            for report in manifest.get("reports", ())
        ],
        "screen": _screen(folder, manifest),
    }


def _page(folder: Path, report: dict, earlier: bool) -> dict:
    """What the index says of a page; ``earlier``: it is of an earlier run."""
    links = {
        x: f"{folder.name}/{report['name']}.{x}"
        for x in PAGES
        if (folder / f"{report['name']}.{x}").is_file()
    }
    failed = str(report.get("failed") or "")
    earlier = "earlier " if failed or earlier else ""
    html = links.get("html")
    return {
        "title": str(report.get("title") or report["name"]),
        "answer": re.sub(r"\*\*|`", "", "".join(report.get("finding", [])[:1])),
        "failed": failed,
        "html": html,
        "md": links.get("md") or html,
        "files": [(earlier + PAGES[x], path) for x, path in links.items()],
    }


def _screen(folder: Path, manifest: dict) -> dict | None:
    """What the manifest has of the first screen, with the images of its figures; None
    unless all of them are there.
    """
    screen = manifest.get("first_screen")
    if not screen or screen.get("version") != VERSION:
        return None
    if figure := screen["figure"]:
        path = folder / "figures" / f"{figure['name']}.svg"
        if not path.is_file():
            return None
        figure = figure | {"svg": path.read_text("utf-8")}
    return screen | {"figure": figure}
