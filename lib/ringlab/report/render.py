"""Pages of notebooks: each is run through papermill, then one offline HTML file and
Markdown with figures through nbconvert.

The stock templates fetch scripts from the network and know no alt text; the two in
``templates/`` do neither.
"""

import logging
import os
import re
import sys
import tempfile
from copy import deepcopy
from dataclasses import asdict, dataclass
from html import unescape
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_core.paths import ENV_JUPYTER_PATH
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter, MarkdownExporter
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from traitlets.config import Config

from . import theme
from .places import NO_MEASURING, ReportError
from .tables import FINDING, PAGE_HTML, inline_html
from .templates import TEMPLATES

PACKAGE = Path(__file__).resolve().parents[2]  # the folder that holds ringlab
INJECTED = "injected-parameters"  # the tag of the cell that papermill adds
MEASURED = "measured"  # of cells that show nothing without measurements
DATA = ("samples.jsonl", "summary.csv", "manifest.json")
for _logger in (
    "papermill",
    "asyncio",
):  # of a kernel that died with its driver asyncio reports a task nobody awaits
    logging.getLogger(
        _logger
    ).disabled = True  # the driver says what happened, in one line


class NotebookFailed(ReportError):
    """A notebook did not finish, or shows what cannot be read aloud."""


@dataclass(frozen=True)
class Page:
    """What a page says around its cells. On a ``computed`` page cells with the tag
    ``MEASURED`` are left out.
    """

    name: str
    subtitle: str = ""
    note: str = ""  # of where the rows come from, if not from here and now
    computed: bool = False
    made: str = ""  # when and of which commit the page was made
    data: tuple[str, ...] = DATA  # files of the folder data/ that it leads to


# --------------------------------------------------------------------------------------
# run a notebook


def read(source: Path) -> nbformat.NotebookNode:
    """The notebook in a file of any format, in the newest. Raises ReportError for a file
    that is none, and for a notebook that takes no parameters.
    """
    try:
        notebook = load_notebook_node(str(source))
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        raise ReportError(f"{source.name} is not a notebook: {_line(error)}") from error
    if not any("parameters" in cell.metadata.tags for cell in notebook.cells):
        raise ReportError(f"{source.name} has no cell with the tag 'parameters'")
    return notebook


def execute(
    source: Path,
    parameters: dict,
    cwd: Path,
    failed: Path,
    *,
    cell_timeout_s: int = 300,
) -> nbformat.NotebookNode:
    """Run ``source`` with ``parameters``, which it then records, in a kernel of its own
    in the folder ``cwd``.

    Raises NotebookFailed for a cell that raises, one that exceeds ``cell_timeout_s``
    seconds, or a kernel that dies; what the notebook got to is then kept as ``failed``.
    """
    how = {"kernel_name": "ringlab", "language": "python"}  # whatever the file says
    notebook = parameterize_notebook(read(source), parameters, **how)
    failed.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
        kernel = AsyncKernelManager(
            kernel_spec_manager=OwnKernel(), connection_file=f"{folder}/kernel.json"
        )
        client = NotebookClient(
            notebook,
            kernel,
            timeout=cell_timeout_s,
            resources={"metadata": {"path": str(cwd)}},
            shutdown_kernel="immediate",
        )
        index = 0  # of the cell that runs
        try:
            # Not ``execute``: it takes an interrupt for the end of the kernel alone.
            client.reset_execution_trackers()
            with client.setup_kernel(env=_environment(folder), cleanup_kc=True):
                reply = client.wait_for_reply(client.kc.kernel_info())
                notebook.metadata["language_info"] = reply["content"]["language_info"]
                for index, cell in enumerate(notebook.cells):
                    count = client.code_cells_executed + 1
                    client.execute_cell(cell, index, execution_count=count)
            return notebook
        except CellExecutionError as error:
            failure = f"raised {error.ename}: {_line(error.evalue)}"
        except CellTimeoutError:
            failure = f"did not end within {cell_timeout_s} s"
        except DeadKernelError:
            failure = "killed its kernel (often: out of memory)"
        except RuntimeError as error:  # of a kernel that does not come up
            raise NotebookFailed(f"{source.name}: {_line(error)}") from error
        finally:
            if kernel.has_kernel:  # stopped before it had a client
                run_sync(kernel.shutdown_kernel)(now=True)
    write(failed, nbformat.writes(notebook))
    raise NotebookFailed(f"{source.name}: {_where(notebook, index)} {failure}")


class OwnKernel(KernelSpecManager):
    """A kernel of this interpreter, whatever kernels are installed."""

    def get_kernel_spec(self, name: str) -> KernelSpec:
        options = "-f", "{connection_file}", "--log-level=CRITICAL"
        argv = [sys.executable, "-m", "ipykernel_launcher", *options]
        return KernelSpec(argv=argv, display_name="ringlab", language="python")


def _environment(folder: str) -> dict[str, str]:
    """Of a kernel: this ringlab, wherever it starts, and no settings of others. It
    measures nothing: whoever runs notebooks has done so.
    """
    paths = [str(PACKAGE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {
        "IPYTHONDIR": f"{folder}/ipython",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, paths))),
        NO_MEASURING: "1",
    }
    return {
        key: value for key, value in os.environ.items() if key != "MPLBACKEND"
    } | own


def _where(notebook: nbformat.NotebookNode, index: int) -> str:
    """A cell as a reader would name it: its number among the code cells, the nearest
    heading above.
    """
    cells = [
        c
        for c in notebook.cells[: index + 1]
        if INJECTED not in c.metadata.get("tags", ())
    ]
    number = sum(c.cell_type == "code" for c in cells)
    headings = [f" under {text!r}" for c in cells for _, text in _headings(c)]
    return f"code cell {number}{''.join(headings[-1:])}"


def _line(text: str) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= 300 else f"{flat[:297]}..."


# --------------------------------------------------------------------------------------
# render a page


def render(notebook: nbformat.NotebookNode, page: Page, folder: Path) -> list[Path]:
    """Write ``<name>.html`` and ``<name>.md`` with ``figures/`` into ``folder``;
    earlier files are replaced whole.

    Returns the paths written, those of the pages first. Raises NotebookFailed for an
    image without alt text.
    """
    notebook = deepcopy(notebook)
    for i, cell in enumerate(notebook.cells):
        if any(map(_nameless, cell.get("outputs", ()))):
            why = f"cell {i} shows an image without alt text; use ringlab.report.figures.show"
            raise NotebookFailed(f"{page.name}.ipynb: {why}")
    if page.computed:
        cells = notebook.cells
        notebook.cells = [
            c for c in cells if MEASURED not in c.metadata.get("tags", ())
        ]
    notebook.cells = filled(notebook.cells)
    contents = []
    for cell in notebook.cells:
        sections = [text for level, text in _headings(cell) if level == 2]
        # The contents go before the first section.
        cell.metadata["first_section"] = bool(sections and not contents)
        contents += [(text, slug(text)) for text in sections]
    data = DATA[-1:] if page.computed else page.data
    resources = {
        "output_files_dir": "figures",
        "unique_key": page.name,
        "ringlab": asdict(page)
        | {
            "title": title_of(notebook),
            "css": css(),
            "contents": contents,
            "files": [
                ("This page as HTML", f"{page.name}.html"),
                ("This page as Markdown", f"{page.name}.md"),
                *((name, f"data/{name}") for name in data),
            ],
        },
    }
    html, _ = _exporter("html").from_notebook_node(notebook, resources)
    text, resources = _exporter("markdown").from_notebook_node(notebook, resources)
    figures = resources["outputs"].items()
    return [
        write(folder / f"{page.name}.html", html),
        write(folder / f"{page.name}.md", tidy(text)),
        *(write(folder / name, data) for name, data in figures),
    ]


def filled(cells: list) -> list:
    """The cells without headings that nothing stands under, before the next one."""
    kept = []
    below = False
    for cell in reversed(cells):
        if cell.cell_type == "code":
            below |= any(x.get("data", {}).get(PAGE_HTML, x) for x in cell.outputs)
        elif below or not re.fullmatch("#+ .*", cell.source.strip()):
            below = not cell.source.startswith("#")
        else:
            continue
        kept.append(cell)
    return kept[::-1]


def tidy(text: str) -> str:
    """The text of a file, with one empty line at most between two others."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def write(path: Path, data: str | bytes) -> Path:
    """Replace ``path`` as a whole, so that a reader or a killed run never sees half a
    file; equal content stays.
    """
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
    return (TEMPLATES / "html" / "report" / "report.css").read_text(
        "utf-8"
    ) + theme.css()


def title_of(notebook: nbformat.NotebookNode) -> str:
    """The first heading."""
    return next(
        (text for cell in notebook.cells for _, text in _headings(cell)), "Report"
    )


def finding_of(notebook: nbformat.NotebookNode) -> dict:
    """A page's finding, for the index: its lines, and ``facts`` if it states any."""
    findings = (output.get("data", {}).get(FINDING) for output in _outputs(notebook))
    return next((dict(data) for data in findings if data), {"finding": []})


def _outputs(notebook: nbformat.NotebookNode) -> list:
    return [x for cell in notebook.cells for x in cell.get("outputs", ())]


def _headings(cell) -> list[tuple[int, str]]:
    """(level, text) of the headings of a cell."""
    if cell.cell_type != "markdown":
        return []
    matches = re.findall(r"^(#+) (.+)$", cell.source, re.M)
    return [(len(marks), text.strip()) for marks, text in matches]


def _nameless(output) -> bool:
    """It shows an image that nobody can read aloud."""
    images = [mime for mime in output.get("data", ()) if mime.startswith("image/")]
    return any(not output.metadata.get(mime, {}).get("alt") for mime in images)


def slug(heading: str) -> str:
    """A heading's name within its page.

    >>> slug("dtype and <code>pool</code>, each alone")
    'dtype-and-pool-each-alone'
    """
    heading = unescape(re.sub(r"<.*?>", "", heading)).lower()
    return re.sub(r"[^a-z0-9]+", "-", heading).strip("-")


def _named_headings(html: str) -> str:
    """nbconvert names headings only together with a link sign in each, which a page
    read aloud would repeat.
    """
    return re.sub(
        r"<h([2-6])>(.*?)</h\1>",
        lambda m: f'<h{m[1]} id="{slug(m[2])}">{m[2]}</h{m[1]}>',
        html,
        flags=re.S,
    )


def _exporter(kind: str):
    config = Config()
    config.TemplateExporter.extra_template_basedirs = [str(TEMPLATES / kind)]
    config.TemplateExporter.exclude_input = True
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = {"parameters", "points", INJECTED}
    config.HTMLExporter.exclude_anchor_links = True
    config.ExtractOutputPreprocessor.extract_output_types = {"image/png"}
    shown = "text/markdown", "image/png", "text/plain"
    if kind == "html":
        shown = PAGE_HTML, "text/html", "image/svg+xml", "image/png", *shown[::2]
    config.NbConvertBase.display_data_priority = [*shown]
    filters = {
        "named_headings": _named_headings,
        "inline": theme.inline,
        "marked": inline_html,
    }
    exporter = {"html": HTMLExporter, "markdown": MarkdownExporter}[kind]

    class Exporter(exporter):
        def get_prefix_root_dirs(self) -> list[str]:
            """Where the templates lie on which ours build: first beside nbconvert."""
            return [*ENV_JUPYTER_PATH, *super().get_prefix_root_dirs()]

    return Exporter(config=config, template_name="report", filters=filters)
