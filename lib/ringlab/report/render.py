"""An executed notebook as one offline HTML page and as Markdown with figures, through nbconvert.

The stock templates fetch scripts from the network and drop alt text; the two in ``templates/`` do neither.
"""

from __future__ import annotations

import base64
import os
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter, MarkdownExporter
from traitlets.config import Config

TEMPLATES = Path(__file__).parent / "templates"
HIDDEN_TAGS = {"parameters", "injected-parameters"}


@dataclass(frozen=True)
class Page:
    """What a page says around its cells; ``stamp`` is the word that marks every title of a rehearsal."""

    name: str
    subtitle: str = ""
    stamp: str = ""
    stamp_note: str = ""
    origin: str = ""  # where the rows come from, if not from here and now


def render(notebook: nbformat.NotebookNode, page: Page, folder: Path, *, formats=("html", "md")) -> list[Path]:
    """Write ``<name>.html`` and ``<name>.md`` with ``figures/`` into ``folder``; earlier files are replaced whole.

    Returns the paths written. Raises ValueError for an image without alt text.
    """
    notebook = stamp_titles(notebook, page.stamp)
    check_alt(notebook)
    written = []
    if "html" in formats:
        body, _ = _exporter("html").from_notebook_node(notebook, resources={"ringlab": _about(notebook, page)})
        written.append(write(folder / f"{page.name}.html", body))
    if "md" in formats:
        body, resources = _exporter("markdown").from_notebook_node(
            notebook,
            resources={"ringlab": _about(notebook, page), "output_files_dir": "figures", "unique_key": page.name},
        )
        for name, data in resources["outputs"].items():
            write(folder / name, data)
        written.append(write(folder / f"{page.name}.md", re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"))
    return written


def write(path: Path, data: str | bytes) -> Path:
    """Replace ``path`` as a whole, so that a reader or a killed run never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_bytes(data.encode() if isinstance(data, str) else data)
    os.replace(partial, path)
    return path


def css() -> str:
    return (TEMPLATES / "html" / "report" / "report.css").read_text()


def title_of(notebook: nbformat.NotebookNode) -> str:
    """The first heading of the first Markdown cell."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^# (.+)$", cell.source, re.M)):
            return found[1].strip()
    return "Report"


def stamp_titles(notebook: nbformat.NotebookNode, stamp: str) -> nbformat.NotebookNode:
    """A copy in which every Markdown heading carries ``stamp``."""
    notebook = deepcopy(notebook)
    written = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in written if stamp else ():
        cell.source = re.sub(r"^(#{1,6} .+?)[ \t]*$", rf"\1 ({stamp})", cell.source, flags=re.M)
    for cell in [cell for cell in written if re.search("^## ", cell.source, re.M)][:1]:
        cell.metadata["first_section"] = True  # the contents go before it, after the opening answer
    return notebook


def check_alt(notebook: nbformat.NotebookNode) -> None:
    for i, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            for mime in output.get("data", ()):
                if mime.startswith("image/") and not output.metadata.get(mime, {}).get("alt"):
                    raise ValueError(f"cell {i} shows {mime} without alt text; use ringlab.report.figures.show")


def _about(notebook, page: Page) -> dict:
    headings = [
        found
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for found in re.findall(r"^## (.+)$", cell.source, re.M)
    ]
    plain = [(h.replace(f" ({page.stamp})", "") if page.stamp else h, h.replace(" ", "-")) for h in headings]
    return {
        "title": title_of(notebook),
        "subtitle": page.subtitle,
        "stamp": page.stamp,
        "stamp_note": page.stamp_note,
        "origin": page.origin,
        "css": css(),
        "contents": plain,
    }


def _exporter(kind: str):
    config = Config()
    config.TemplateExporter.extra_template_basedirs = [str(TEMPLATES / kind)]
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = HIDDEN_TAGS
    filters = {"b64": lambda text: base64.b64encode(text.encode()).decode("ascii")}
    if kind == "html":
        config.TemplateExporter.exclude_input = True
        config.HTMLExporter.exclude_anchor_links = True
        config.NbConvertBase.display_data_priority = ["text/html", "image/svg+xml", "image/png", "text/plain"]
        return HTMLExporter(config=config, template_name="report", filters=filters)
    config.TemplateExporter.exclude_input = True
    config.ExtractOutputPreprocessor.extract_output_types = {"image/png"}
    config.NbConvertBase.display_data_priority = ["text/markdown", "image/png", "text/plain"]
    return MarkdownExporter(config=config, template_name="report", filters=filters)
