"""The manifest of one profile's run, and the index page over all profiles and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from ..advise import rounded
from . import theme
from .first_screen import VERSION
from .places import locked, note, short_commit
from .render import DATA, TEMPLATES, css, write
from .tables import inline_html, markdown_text

EXPLORER = "notebooks/explore.ipynb"  # beside the folder of reports
PAGES = {"html": "HTML", "md": "Markdown"}  # endings, as a link calls them
SAID = {
    "title": "Which attention, how long a sequence, how fast",
    "explained": "For other lengths, shapes, needs and GPUs ask `.venv/bin/python -m ringlab advise`, or {explorer} "
    "in `make lab`.",
    "columns": ("Report", "Answer", "Files"),
}


def write_manifest(folder: Path, manifest: dict, *, complete: bool) -> None:
    """Write ``data/manifest.json`` of a profile's folder; ``complete`` is true only
    when all its pages are whole.
    """
    write(
        folder / "data" / "manifest.json",
        json.dumps(manifest | {"complete": complete}, indent=1) + "\n",
    )


def read_manifest(folder: Path) -> dict:
    """The manifest of a profile's folder, empty if there is none; one that cannot be
    read is empty too, and noted.
    """
    path = folder / "data" / "manifest.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(
            isinstance(report["name"], str) for report in found.get("reports", [])
        ):
            raise ValueError("no list of reports with names")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        note(f"{path} cannot be read: {error}")
        return {}
    return found


def facts(manifest: dict) -> list[str]:
    """What was measured on which device, when, of which commit, with which torch, as
    far as it is known.
    """
    device, measured = (
        str(manifest.get(name) or "") for name in ("device", "measured")
    )
    found = [device]
    found += [f"measured {measured[:16].replace('T', ' ')} UTC"] if measured else []
    found += (
        [f"commit {short_commit(manifest)}", f"torch {manifest.get('torch')}"]
        if manifest.get("commit")
        else []
    )
    return [fact for fact in found if fact]


def write_index(reports: Path) -> list[Path]:
    """Write ``index.html`` and ``index.md`` over every profile and report found."""
    templates = Environment(
        loader=FileSystemLoader(
            [TEMPLATES / "html" / "report", TEMPLATES / "markdown" / "report"]
        ),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "inline": theme.inline,
        "marked": inline_html,
        "text": markdown_text,
        "rounded": rounded,
    }
    explorer = (
        f"[{EXPLORER}](../{EXPLORER})"
        if (reports.parent / EXPLORER).is_file()
        else f"`{EXPLORER}`"
    )
    templates.globals |= {
        **SAID,
        "css": css(),
        "explained": SAID["explained"].format(explorer=explorer),
    }
    with locked(reports, wait=True):  # runs of two profiles may end at once
        folders = sorted(
            p
            for p in reports.iterdir()
            if any((p / "data" / name).exists() for name in DATA)
        )
        found = [_section(p) for p in folders]
        found.sort(  # measured GPUs, the CPU, then what was computed
            key=lambda section: (section["computed"], section["name"] == "cpu")
        )
        bodies = {
            x: templates.get_template(f"profiles.{x}.j2").render(sections=found)
            for x in ("html", "md")
        }
        return [
            write(
                reports / f"index.{ending}",
                re.sub(r"\n{3,}", "\n\n", body).strip() + "\n",
            )
            for ending, body in bodies.items()
        ]


def _section(folder: Path) -> dict:
    """What the index says of one profile's folder; links are (text, path below
    reports/) of files that are there.
    """
    manifest, state = read_manifest(folder), ""
    if not manifest and (folder / "data" / "manifest.json").exists():
        state = "its manifest.json cannot be read: run it again to write a new one"
    elif not manifest:
        state = "measured, no report yet"
    elif not manifest.get("complete"):
        state = "unfinished: run it again to complete it"
    return {
        "folder": folder.name,
        "name": folder.name,
        "computed": bool(manifest.get("computed")),
        "state": state,  # empty where all is whole
        "facts": facts(manifest),
        "files": [
            (name, f"{folder.name}/data/{name}")
            for name in DATA
            if (folder / "data" / name).is_file()
        ],
        "pages": [_page(folder, report) for report in manifest.get("reports", ())],
        "screen": _screen(folder, manifest),
    }


def _page(folder: Path, report: dict) -> dict:
    links = {
        x: f"{folder.name}/{report['name']}.{x}"
        for x in PAGES
        if (folder / f"{report['name']}.{x}").is_file()
    }
    failed = str(report.get("failed") or "")
    earlier = "earlier " if failed else ""  # pages of an earlier run, and whole
    return {
        "title": str(report.get("title") or report["name"]),
        "answer": re.sub(r"\*\*|`", "", "".join(report.get("finding", [])[:1])),
        "failed": failed,
        "html": links.get("html"),
        "md": links.get("md") or links.get("html"),
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
        figure = figure | {"svg": path.read_text()}
    return screen | {"figure": figure}
