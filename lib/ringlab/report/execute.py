"""One notebook through papermill, in this interpreter, with its failures told apart."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from traitlets.config import Config

from .places import EXPECTED_PREFIX, ReportError, UsageError, own_jupyter

PACKAGE = Path(__file__).resolve().parents[2]  # the folder that holds ringlab
KERNEL = "ringlab-own"  # a name nobody else installs, so that no other kernel can shadow it
logging.getLogger("papermill").disabled = True  # the driver says what happened, in one line


class NotebookFailed(ReportError):
    """A notebook did not finish; ``notebook`` holds what it got to."""

    def __init__(self, message: str, notebook: nbformat.NotebookNode):
        super().__init__(message)
        self.notebook = notebook


def execute(
    source: Path, target: Path, parameters: dict, *, cwd: Path, cell_timeout_s: int = 300
) -> nbformat.NotebookNode:
    """Run ``source`` with ``parameters`` into ``target``, which is replaced only by a run that finished.

    Raises UsageError for a parameter that the notebook does not have (papermill alone would only warn), and
    NotebookFailed for a cell that raises, one that exceeds ``cell_timeout_s`` seconds, or a kernel that dies.
    """
    check_parameters(source, parameters)
    partial = target.with_name(f"{target.stem}.partial.ipynb")
    partial.parent.mkdir(parents=True, exist_ok=True)
    failure = None
    with own_kernel() as config:
        try:
            papermill.execute_notebook(
                _literal(source),
                _literal(partial),
                parameters=parameters,
                kernel_name=KERNEL,
                language="python",
                config=config,
                cwd=str(cwd),
                execution_timeout=cell_timeout_s,
                progress_bar={"desc": source.stem, "leave": False, "disable": not sys.stderr.isatty()},
            )
        except papermill.PapermillExecutionError as error:
            failure = f"raised {error.ename}: {_line(error.evalue)}"
        except CellTimeoutError:
            failure = f"did not end within {cell_timeout_s} s"
        except DeadKernelError:
            failure = "killed its kernel (often: out of memory)"
        except RuntimeError as error:  # so says jupyter_client of a kernel that does not come up
            raise NotebookFailed(f"{source.name}: {_line(error)}", read(source)) from error
    notebook = read(partial)
    if failure:
        raise NotebookFailed(f"{source.name}: {_where(notebook)} {failure}", notebook)
    for place in ("input_path", "output_path"):  # where this machine keeps its files
        notebook.metadata.get("papermill", {}).pop(place, None)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(notebook, partial)
    os.replace(partial, target)
    return notebook


def read(source: Path) -> nbformat.NotebookNode:
    """The notebook in a file. Raises ReportError for a file that is none."""
    try:
        return nbformat.read(source, as_version=4)
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        raise ReportError(f"{source.name} is not a notebook: {_line(error)}") from error


def check_parameters(source: Path, parameters: dict) -> None:
    """Raises UsageError for names that the notebook's parameters cell does not define."""
    cells = [c.source for c in read(source).cells if "parameters" in c.metadata.get("tags", ())]
    try:
        nodes = [node for text in cells for node in ast.parse(text).body]
    except SyntaxError as error:
        raise UsageError(f"{source.name}: its parameters cell is not plain Python: {error.msg}") from error
    targets = [t for node in nodes for t in getattr(node, "targets", None) or [getattr(node, "target", None)]]
    known = [t.id for t in targets if isinstance(t, ast.Name)]
    if unknown := sorted(parameters.keys() - set(known)):
        raise UsageError(f"{source.name} has no parameter {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")


@contextmanager
def own_kernel():
    """A kernel specification for this very interpreter, whatever JUPYTER_PATH or the user has installed."""
    with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
        spec = Path(folder, "kernels", KERNEL, "kernel.json")
        spec.parent.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=CRITICAL"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "ringlab", "language": "python"}))
        paths = [str(PACKAGE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        config = Config()
        if len(folder) < 60:  # a socket's path has 107 bytes; beyond, the default TCP
            config.KernelManager.transport = "ipc"
        with own_jupyter(
            JUPYTER_PATH=folder,
            JUPYTER_RUNTIME_DIR=str(Path(folder, "run")),
            IPYTHONDIR=str(Path(folder, "ipython")),
            PYDEVD_DISABLE_FILE_VALIDATION="1",
            PYTHONPATH=os.pathsep.join(map(os.path.abspath, paths)),  # this ringlab, wherever the kernel starts
            **{EXPECTED_PREFIX: sys.prefix},
        ):
            yield config


def _literal(path: Path) -> str:
    """A path whose braces papermill does not take for parameters."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _where(notebook: nbformat.NotebookNode) -> str:
    """The last cell that ran, as a reader would name it: its number among the code cells, the nearest heading above."""
    # papermill calls every cell completed, but only those that were started have a time.
    started = [i for i, c in enumerate(notebook.cells) if c.metadata.get("papermill", {}).get("start_time")]
    added = {"injected-parameters", "papermill-error-cell-tag"}  # by papermill
    cells = [c for c in notebook.cells[: max(started, default=0) + 1] if not added & {*c.metadata.get("tags", ())}]
    lines = [line for c in cells if c.cell_type == "markdown" for line in c.source.splitlines()]
    heading = next((line.lstrip("# ").strip() for line in reversed(lines) if line.startswith("#")), "")
    number = sum(c.cell_type == "code" for c in cells)
    return f"code cell {number} under {heading!r}" if heading else f"code cell {number}"


def _line(text: str, limit: int = 300) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
