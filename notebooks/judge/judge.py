"""The judge: which public implementations of long attention are right?

    python -m ringlab judge [NAME ...] [--adapter FILE] [--statement NAME]

asks every implementation whose name begins with a NAME (default: all) every statement,
each cell in processes of its own, and appends what has no row yet to
``reports/judge/data/cells.jsonl``. A run that was stopped goes on. With statements, the
cells run now, and their rows go to a temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

import torch
from cells import ABSENT, WRONG, Adapter, Outcome, all_of, judged, prepare
from ringlab.measure import provenance
from ringlab.measure.store import Store, warn
from ringlab.report.places import UsageError, home
from ringlab.ring import launch as launcher
from statements import STATEMENTS, Statement

HERE = Path(__file__).resolve().parent
ADAPTERS = HERE / "adapters.py"
NAME = "cells.jsonl"
cell = itemgetter("implementation", "statement")


def install(adapter: Adapter) -> tuple[str, str]:
    """The folder of an implementation's packages, which share this environment's torch,
    and why it cannot be filled, if so; pip fills it once. "" for the environment's own.
    """
    if "==" not in adapter.package:
        return "", ""
    folder = home() / "build" / "judge" / adapter.package.replace("==", "-")
    if (folder / ".ready").exists():
        return str(folder), ""
    warn(f"installing {adapter.package} into {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--target", str(folder)]
    pip += ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    pip += adapter.package, *adapter.needs
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        return "", (done.stderr.strip() or "pip failed").splitlines()[-1]
    (folder / ".ready").touch()
    return str(folder), ""


def code(source: Path) -> list[str]:
    """Hashes of the code that decides what a cell says, and of a file of adapters."""
    names = "cells.py flash_doubles.py packages.toml statements.py statements.toml"
    files = [HERE / name for name in names.split()]
    own = provenance.code_hash([source], source.parent)
    return [provenance.code_hash(files, HERE), own]


def read(folder: Path) -> list[dict]:
    """The newest row of each cell."""
    path = folder / NAME
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    rows = []
    for line in lines:
        with suppress(ValueError):  # the line at which a writer was killed
            rows.append(json.loads(line))
    return list({cell(row): row for row in rows}.values())


def run(
    wanted: Sequence[Adapter],
    source: Path,
    data: Path,
    asked: Sequence[Statement],
    again: bool,
) -> list[dict]:
    """Ask what has no row of this code in ``data`` yet; the rows of all these cells."""
    key = [*code(source), provenance.engine_hash(), torch.__version__]
    done = [] if again else [cell(r) for r in read(data) if r["key"] == key]
    with Store(data, NAME) as store:
        for adapter in wanted:
            waiting = [s for s in asked if (adapter.name, s.name) not in done]
            waiting = [s for s in waiting if s.name in (adapter.only or STATEMENTS)]
            if not waiting:
                continue
            folder, lacking = install(adapter)
            prepare(adapter, folder)
            for statement in waiting:
                begun = time.monotonic()
                outcome = Outcome(ABSENT, lacking)
                if not lacking:
                    outcome = judged(adapter, str(source), statement, folder)
                row = {"implementation": adapter.name, "statement": statement.name}
                row |= {"seconds": round(time.monotonic() - begun, 2), "key": key}
                row |= asdict(outcome)
                store.append(kind="cell", **row)
                if len(asked) > 1:
                    warn(f"{told(row)} ({row['seconds']:.0f} s)")
            launcher.server(os.getpid(), *launcher.MODULES)._stop()  # and its memory
    cells = {(a.name, s.name) for a in wanted for s in asked}
    return [r for r in read(data) if r["key"] == key and cell(r) in cells]


def told(row: dict) -> str:
    """A cell in one line."""
    text = f"{row['implementation']} | {row['statement']}: {row['status']}"
    if row["status"] == WRONG:
        wrong = row["reason"].split(", ")
        errors, allowed = row["errors"], row["allowed"]
        each = [f"{x} {float(errors[x]):.2g} > {allowed[x]:.2g}" for x in wrong]
        return f"{text}: {', '.join(each)} on {row['ranks']} ranks"
    return f"{text}: {row['reason']}" if row["reason"] else text


def write_page(data: Path) -> None:
    """Run the notebook on all rows and write the page beside ``data``, and the index."""
    from ringlab.report import index, render

    reports = data.parents[1]
    parameters = {"data": str(data.relative_to(reports))}
    failed = data.parent / "judge.failed.ipynb"
    notebook = render.execute(HERE / "judge.ipynb", parameters, reports, failed)
    commit = index.short_commit(dict(zip(("commit", "dirty"), provenance.git_state())))
    made = f"Page made {provenance.utc()[:10]} of commit {commit}, torch {torch.__version__}."
    page = render.Page("judge", "on this machine's CPU", made=made, data=(NAME,))
    render.render(notebook, page, data.parent)
    index.write_index(reports)


def ask(
    names: Sequence[str] = (),
    adapter: str | None = None,
    statements: Sequence[str] | None = None,
    again: bool = False,
    data: Path | None = None,
) -> int:
    """Judge what is asked for, and print it: the implementations whose names begin so,
    or those of a file; 1 where one is silently wrong. All of them: write the page, 0.
    """
    source = Path(adapter).resolve() if adapter else ADAPTERS
    if data is None and statements:  # to be seen now, not to be stored
        folder = tempfile.TemporaryDirectory(prefix="ringlab-")  # until this returns
        data = folder.name
    data = Path(data or home() / "reports" / "judge" / "data").resolve()
    if not source.is_file():
        raise UsageError(f"no such file: {adapter}")
    known = all_of(source)
    wanted = [a for a in known if not names or a.name.startswith(tuple(names))]
    if not wanted:
        packages = ", ".join(dict.fromkeys(a.name.split(":")[0] for a in known))
        raise UsageError(f"no implementation is called {names[0]!r}; known: {packages}")
    for name in statements or ():
        if name not in STATEMENTS:
            known = ", ".join(STATEMENTS)
            raise UsageError(f"unknown statement {name!r}; known: {known}")
    asked = [STATEMENTS[name] for name in statements or STATEMENTS]
    rows = run(wanted, source, data, asked, again)
    if not (names or adapter or statements):
        write_page(data)
        return 0
    print(*map(told, rows), sep="\n")
    return int(any(row["status"] == WRONG for row in rows))
