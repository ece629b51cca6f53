"""Processes that tests start, wait for, or read the rows of."""

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ringlab.measure import store

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def inside(folder: Path) -> list[int]:
    """The processes that were started with ``folder`` in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is not ours
            if str(folder).encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def torchrun(channel, arguments: list[str], env: dict[str, str]) -> None:
    """torchrun in a process of ``launch``, which has imported torch."""
    from torch.distributed.run import main

    os.environ |= env
    main(list(map(str, arguments)))


def make(*arguments: str):
    """make without anything installed: a plain interpreter, nothing set up; the test is
    skipped where there is none.
    """
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )


def rows_of(folder, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (folder / store.NAME).read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]
