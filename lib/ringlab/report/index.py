"""The manifest of one profile's run, and the index page over all profiles and reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .render import css, write
from .tables import Cell, Table

SCHEMA = 1
TITLE = "Reports"


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write ``data/manifest.json`` of a profile's folder, first without and at last with ``complete: true``."""
    path = folder / "data" / "manifest.json"
    body = {"schema": SCHEMA, **manifest}
    body["complete"] = body.pop("complete", False)
    write(path, json.dumps(body, indent=1, sort_keys=False) + "\n")


def read_manifest(folder: Path) -> dict:
    """The manifest of a profile's folder, empty if there is none that can be read."""
    try:
        return json.loads((folder / "data" / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}


def manifests(reports: Path) -> list[tuple[str, dict]]:
    """(folder name, manifest) of every profile under ``reports``, real runs before rehearsals."""
    found = [(p.name, read_manifest(p)) for p in reports.iterdir() if p.is_dir()] if reports.is_dir() else []
    return sorted(((n, m) for n, m in found if m), key=lambda x: (bool(x[1].get("rehearsal")), x[0]))


def write_index(reports: Path) -> list[Path]:
    """Write ``index.html`` and ``index.md`` over every profile and report found."""
    entries = manifests(reports)
    rows, links = [], {}
    for name, manifest in entries:
        for report in manifest.get("reports", ()):
            rows.append(_row(name, manifest, report))
            links[name] = links.get(name, []) + [report]
    columns = ["Profile", "Report", "Answer", "Date (UTC)", "Commit", "Not quoted"]
    table = Table("Every profile and report", columns, rows)
    return [
        write(reports / "index.html", _html(table, entries)),
        write(reports / "index.md", _markdown(table, entries)),
    ]


def _row(name: str, manifest: dict, report: dict) -> Sequence:
    state = "" if manifest.get("complete") else "unfinished"
    failed = report.get("failed", "")
    dirty = " + changes" if manifest.get("dirty") is True else ""
    stamp = "rehearsal" if manifest.get("rehearsal") else ""
    kind = "stamp" if stamp else ""
    return [
        Cell(name, " ".join(x for x in (stamp, state) if x), kind),
        report["title"],
        Cell(f"failed: {failed}", kind="bad") if failed else report.get("headline", ""),
        manifest.get("finished", manifest.get("started", ""))[:16].replace("T", " "),
        f"{manifest.get('commit', '')[:10]}{dirty}" or None,
        Cell(f"{report.get('unquoted', 0)} of {report.get('points', 0)} points"),
    ]


def _links(entries, ending: str) -> list[tuple[str, str]]:
    found = []
    for name, manifest in entries:
        for report in manifest.get("reports", ()):
            file = report["name"] + (".failed.html" if report.get("failed") else ending)
            found.append((f"{report['title']} ({name})", f"{name}/{file}"))
    return found


def _html(table: Table, entries) -> str:
    items = "".join(
        f'<li><a href="{escape(path, quote=True)}">{escape(text)}</a></li>' for text, path in _links(entries, ".html")
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{TITLE}</title>\n<style>\n{css()}</style>\n</head>\n'
        f"<body>\n<main>\n<h1>{TITLE}</h1>\n<ul>{items}</ul>\n{table.html}\n</main>\n</body>\n</html>\n"
    )


def _markdown(table: Table, entries) -> str:
    items = "\n".join(f"- [{text}]({path})" for text, path in _links(entries, ".md"))
    return f"# {TITLE}\n\n{items}\n\n{table.markdown}\n"
