"""The manifest of one profile's run, and the index page over all profiles and reports."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from .places import locked, note
from .plan import REHEARSAL
from .render import DATA, css, write
from .tables import DASH, inline_html, markdown_text
from .theme import themed

SCHEMA = 2
TITLE = "Which attention, how long a sequence, how fast"
COLUMNS = ("Report", "Answer", "Points quoted", "Not quoted", "Files")
EXPLAINED = (
    "A measurement is shown only if its output matches a float64 reference and its time is physically possible. Each "
    "page lists the rejected ones with the reason."
)


def write_manifest(folder: Path, manifest: dict, *, complete: bool) -> None:
    """Write ``data/manifest.json`` of a profile's folder; ``complete`` is true only when all its pages are whole."""
    body = {"schema": SCHEMA, **{k: v for k, v in manifest.items() if k not in ("schema", "complete")}}
    write(folder / "data" / "manifest.json", json.dumps(body | {"complete": complete}, indent=1) + "\n")


class BadManifest(ValueError):
    """A manifest that is there and says nothing."""


def load_manifest(folder: Path) -> dict:
    """The manifest of a profile's folder, empty if there is none. Raises BadManifest for one that cannot be read."""
    path = folder / "data" / "manifest.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadManifest(f"{path} cannot be read: {error}") from error
    reports = found.get("reports", []) if isinstance(found, dict) else None
    named = isinstance(reports, list) and all(isinstance(r, dict) and isinstance(r.get("name"), str) for r in reports)
    if not named:
        raise BadManifest(f"{path} cannot be read: no list of reports with names")
    return found


def read_manifest(folder: Path) -> dict:
    """The manifest of a profile's folder, empty if there is none that can be read."""
    try:
        return load_manifest(folder)
    except BadManifest:
        return {}


def short_commit(about: dict) -> str:
    """Ten digits, and whether anything was changed since.

    >>> short_commit({"commit": "898236a615fe4ea9d2c9", "dirty": True}), short_commit({"commit": "unknown"})
    ('898236a615 + changes', 'unknown')
    """
    return f"{about.get('commit') or 'unknown'}"[:10] + (" + changes" if about.get("dirty") is True else "")


@dataclass
class Entry:
    """One line of the index; links are (text, path below reports/) of files that are there."""

    title: str
    answer: str = ""
    failed: str = ""
    quoted: int | None = None
    unquoted: int | None = None
    page: str = ""
    files: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Section:
    """One profile's folder."""

    name: str
    rehearsal: bool
    facts: list[str]
    state: str  # empty where all is whole
    files: list[tuple[str, str]]
    entries: list[Entry]
    screen: dict | None = None  # as `FirstScreen.stored` made it, with the images of its figures


def sections(reports: Path) -> list[Section]:
    """Every folder with rows or a manifest, real runs before rehearsals; one that cannot be read says so in a line."""
    folders = [p for p in reports.iterdir() if (p / "data").is_dir()] if reports.is_dir() else []
    found = [_section(p) for p in folders if any((p / "data" / name).exists() for name in DATA)]
    return sorted(found, key=lambda s: (s.rehearsal, s.name))


def _section(folder: Path) -> Section:
    manifest, state = {}, ""
    try:
        manifest = load_manifest(folder)
        if not manifest:
            state = "measured, no report yet"
        elif not manifest.get("complete"):
            state = "unfinished: run it again to complete it"
    except BadManifest as error:
        note(str(error))
        state = "its manifest.json cannot be read: run it again to write a new one"
    measured = str(manifest.get("measured") or "")[:16].replace("T", " ")
    facts = [str(manifest.get("device") or ""), f"measured {measured} UTC" if measured else ""]
    facts += [f"commit {short_commit(manifest)}", f"torch {manifest.get('torch')}"] if manifest.get("commit") else []
    files = [(name, f"{folder.name}/data/{name}") for name in DATA if (folder / "data" / name).is_file()]
    rehearsal = bool(manifest.get("rehearsal")) or folder.name.endswith(f"-{REHEARSAL}")
    entries = [_entry(folder, r) for r in manifest.get("reports", ())]
    return Section(folder.name, rehearsal, [f for f in facts if f], state, files, entries, _screen(folder, manifest))


def _screen(folder: Path, manifest: dict) -> dict | None:
    """What the manifest has of the first screen, if its figures are there."""
    found = manifest.get("first_screen")
    images = [folder / "figures" / f"{figure['name']}.svg" for figure in found["figures"]] if found else []
    if not found or not all(path.is_file() for path in images):
        return None
    figures = [figure | {"svg": path.read_text()} for figure, path in zip(found["figures"], images)]
    return found | {"figures": figures}


def _entry(folder: Path, report: dict) -> Entry:
    points, unquoted = report.get("points"), report.get("unquoted")
    pages = {
        x: f"{folder.name}/{report['name']}.{x}"
        for x in ("html", "md", "failed.html")
        if (folder / f"{report['name']}.{x}").is_file()
    }
    failed = str(report.get("failed") or "")
    names = {"html": "HTML", "md": "Markdown", "failed.html": "what it got to"}
    if failed and "html" in pages:  # they are of an earlier run, and whole
        names |= {"html": "earlier HTML", "md": "earlier Markdown"}
    return Entry(
        str(report.get("title") or report["name"]), str(report.get("headline") or ""), failed,
        points - unquoted if isinstance(points, int) and isinstance(unquoted, int) else None, unquoted,
        pages.get("html") or pages.get("failed.html", ""), [(names[x], path) for x, path in pages.items()],
    )  # fmt: skip


def write_index(reports: Path) -> list[Path]:
    """Write ``index.html`` and ``index.md`` over every profile and report found."""
    with locked(reports, wait=True):  # runs of two profiles may end at once
        found = sections(reports)
        return [write(reports / "index.html", _html(found)), write(reports / "index.md", _markdown(found))]


def _link(text: str, path: str) -> str:
    return f'<a href="{escape(path, quote=True)}">{escape(text)}</a>' if path else escape(text)


def _html(found: list[Section]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{TITLE}</title>\n<style>\n{css()}</style>\n</head>\n'
        f"<body>\n<main>\n<h1>{TITLE}</h1>\n<p>{EXPLAINED}</p>\n{''.join(map(_html_section, found))}</main>\n"
        "</body>\n</html>\n"
    )


def _html_section(section: Section) -> str:
    stamp = f' <span class="stamp">{REHEARSAL}</span>' if section.rehearsal else ""
    facts = " · ".join([*map(escape, section.facts), *(_link(*file) for file in section.files)])
    state = f'<p class="bad">{escape(section.state)}</p>\n' if section.state else ""
    kinds = ("", "", ' class="n"', ' class="n"', "")
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(COLUMNS, kinds))
    rows = "".join(map(_html_row, section.entries))
    table = (
        f'<div class="table cards" role="region" tabindex="0" aria-label="{escape(section.name, quote=True)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n"
    )
    table = table if section.entries else ""
    if section.screen is None:
        return f'<h2>{escape(section.name)}{stamp}</h2>\n{state}<p class="facts">{facts}</p>\n{table}'
    screen = section.screen
    lines = "".join(f"<li>{inline_html(line)}</li>" for line in screen["lines"])
    figures = "".join(
        f'<figure><div role="img" aria-label="{escape(f["alt"], quote=True)}">{themed(f["svg"])}</div>'
        f"<figcaption>{escape(f['caption'])}</figcaption></figure>\n"
        for f in screen["figures"]
    )
    return (
        f"<h2>{escape(section.name)}: {escape(screen['title'])}</h2>\n{state}"
        f'<div class="answer"><ul>{lines}</ul></div>\n<div class="figures">\n{figures}</div>\n{screen["html"]}\n'
        f'<details class="data"><summary>{len(section.entries)} pages and the data</summary>\n'
        f'<p class="facts">{facts}</p>\n{table}</details>\n'
    )


def _html_row(entry: Entry) -> str:
    failed = f'<span class="bad">failed: {escape(entry.failed)}</span>' if entry.failed else ""
    counts = (
        f'<td class="n" data-name="{name}">{DASH if count is None else count}</td>'
        for name, count in zip(COLUMNS[2:4], (entry.quoted, entry.unquoted))
    )
    files = " · ".join(_link(*file) for file in entry.files)
    return (
        f'<tr><th scope="row">{_link(entry.title, entry.page)}</th><td class="w">{failed or escape(entry.answer)}</td>'
        f'{"".join(counts)}<td class="keep">{files}</td></tr>'
    )


def _markdown(found: list[Section]) -> str:
    return f"# {TITLE}\n\n{EXPLAINED}\n\n" + "\n".join(map(_markdown_section, found))


def _markdown_section(section: Section) -> str:
    facts = " · ".join([*map(markdown_text, section.facts), *(f"[{text}]({path})" for text, path in section.files)])
    screen = section.screen
    title = f"{section.name}: {screen['title']}" if screen else section.name
    lines = [f"## {title}", ""] + ([f"**{markdown_text(section.state)}**", ""] if section.state else [])
    if screen:
        lines += [*(f"- {line}" for line in screen["lines"]), ""]
        for f in screen["figures"]:
            lines += [f"![{f['alt']}]({section.name}/figures/{f['name']}.png)", "", f["caption"], ""]
        lines += [screen["markdown"], "", "### Pages", ""]
    lines += [facts, ""]
    if section.entries:
        lines += ["| " + " | ".join(COLUMNS) + " |", "|:--|:--|--:|--:|:--|"]
    for e in section.entries:
        page = e.page.removesuffix(".html") + ".md" if any(p.endswith(".md") for _, p in e.files) else e.page
        title = f"[{markdown_text(e.title)}]({page})" if page else markdown_text(e.title)
        answer = f"**failed: {markdown_text(e.failed)}**" if e.failed else markdown_text(e.answer)
        counts = [DASH if count is None else str(count) for count in (e.quoted, e.unquoted)]
        files = " · ".join(f"[{text}]({path})" for text, path in e.files)
        lines.append("| " + " | ".join([title, answer, *counts, files]) + " |")
    return "\n".join(lines) + "\n"
