"""An executed notebook as one offline HTML page and as Markdown with figures, through nbconvert.

The stock templates fetch scripts from the network and know no alt text; the two in ``templates/`` do neither.
"""

from __future__ import annotations

import os
import re
from copy import deepcopy
from dataclasses import asdict, dataclass
from html import unescape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter, MarkdownExporter
from traitlets.config import Config

from . import theme
from .execute import NotebookFailed
from .places import own_jupyter
from .tables import PAGE_HTML

TEMPLATES = Path(__file__).parent / "templates"
HIDDEN_TAGS = {"parameters", "injected-parameters", "papermill-error-cell-tag"}
DATA = ("samples.jsonl", "summary.csv", "manifest.json")


@dataclass(frozen=True)
class Page:
    """What a page says around its cells; ``stamp`` is the word that marks the title of a rehearsal."""

    name: str
    subtitle: str = ""
    stamp: str = ""
    stamp_note: str = ""
    origin: str = ""  # where the rows come from, if not from here and now
    made: str = ""  # when and of which commit the page was made
    failure: str = ""  # why the notebook did not get to its end


def render(notebook: nbformat.NotebookNode, page: Page, folder: Path, *, formats=("html", "md")) -> list[Path]:
    """Write ``<name>.html`` and ``<name>.md`` with ``figures/`` into ``folder``; earlier files are replaced whole.

    Returns the paths written, those of the pages first. Raises NotebookFailed for an image without alt text.
    """
    notebook = deepcopy(notebook)
    for i, cell in enumerate(notebook.cells):
        nameless = [output for output in cell.get("outputs", ()) if _nameless(output)]
        if nameless and not page.failure:
            why = f"cell {i} shows an image without alt text; use ringlab.report.figures.show"
            raise NotebookFailed(f"{page.name}.ipynb: {why}", notebook)
        for output in nameless:
            cell.outputs.remove(output)
    if page.stamp:
        _stamp_title(notebook, page.stamp)
    about = asdict(page) | {"title": title_of(notebook), "css": css(), "contents": _contents(notebook)}
    names = {"html": "This page as HTML", "md": "This page as Markdown"}
    about["files"] = [(names[x], f"{page.name}.{x}") for x in formats] + [(name, f"data/{name}") for name in DATA]
    pages, figures = {}, {}
    with own_jupyter():
        if "html" in formats:
            pages["html"], _ = _exporter("html").from_notebook_node(notebook, resources={"ringlab": about})
        if "md" in formats:
            resources = {"ringlab": about, "output_files_dir": "figures", "unique_key": page.name}
            body, resources = _exporter("markdown").from_notebook_node(notebook, resources=resources)
            pages["md"], figures = re.sub(r"\n{3,}", "\n\n", body).strip() + "\n", resources["outputs"]
    figures = [write(folder / name, data) for name, data in figures.items()]
    return [write(folder / f"{page.name}.{ending}", body) for ending, body in pages.items()] + figures


def write(path: Path, data: str | bytes) -> Path:
    """Replace ``path`` as a whole, so that a reader or a killed run never sees half a file; equal content stays."""
    data = data.encode() if isinstance(data, str) else data
    if path.is_file() and path.read_bytes() == data:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def css() -> str:
    """The style of a page, with that of its figures."""
    return (TEMPLATES / "html" / "report" / "report.css").read_text() + theme.css()


def title_of(notebook: nbformat.NotebookNode) -> str:
    """The first heading of the first Markdown cell."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^# (.+)$", cell.source, re.M)):
            return found[1].strip()
    return "Report"


def _stamp_title(notebook: nbformat.NotebookNode, stamp: str) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source, count = re.subn(r"^(# .+?)[ \t]*$", rf"\1 ({stamp})", cell.source, count=1, flags=re.M)
            if count:
                return


def _contents(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """(text, name within the page) of each section; its first cell is marked, as the contents go before it."""
    found = []
    for cell in notebook.cells:
        headings = re.findall(r"^## (.+)$", cell.source, re.M) if cell.cell_type == "markdown" else []
        if headings and not found:
            cell.metadata["first_section"] = True
        found += [(heading.strip(), slug(heading)) for heading in headings]
    return found


def _nameless(output) -> bool:
    """It shows an image that nobody can read aloud."""
    images = [mime for mime in output.get("data", ()) if mime.startswith("image/")]
    return any(not output.metadata.get(mime, {}).get("alt") for mime in images)


def slug(heading: str) -> str:
    """A heading's name within its page.

    >>> slug("dtype and <code>pool</code>, each alone")
    'dtype-and-pool-each-alone'
    """
    return re.sub(r"[^a-z0-9]+", "-", unescape(re.sub(r"<.*?>", "", heading)).lower()).strip("-")


def _named_headings(html: str) -> str:
    """nbconvert names headings only together with a link sign in each, which a page read aloud would repeat."""
    return re.sub(r"<h([2-6])>(.*?)</h\1>", lambda m: f'<h{m[1]} id="{slug(m[2])}">{m[2]}</h{m[1]}>', html, flags=re.S)


def _exporter(kind: str):
    config = Config()
    config.TemplateExporter.extra_template_basedirs = [str(TEMPLATES / kind)]
    config.TemplateExporter.exclude_input = True
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = HIDDEN_TAGS
    filters = {"named_headings": _named_headings, "inline": theme.inline}
    if kind == "html":
        config.HTMLExporter.exclude_anchor_links = True
        config.NbConvertBase.display_data_priority = [
            PAGE_HTML, "text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain"
        ]  # fmt: skip
        return HTMLExporter(config=config, template_name="report", filters=filters)
    config.ExtractOutputPreprocessor.extract_output_types = {"image/png"}
    config.NbConvertBase.display_data_priority = ["text/markdown", "image/png", "text/plain"]
    return MarkdownExporter(config=config, template_name="report", filters=filters)
