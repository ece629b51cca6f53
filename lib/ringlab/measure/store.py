"""The rows: one file, samples.jsonl, to which every measurement is appended as it
comes.

Schema 1, one JSON object per line. Every row has ``schema``, ``kind`` and ``run`` (one
group measured, perhaps with interruptions), and all but the first kind ``point`` (its
id). Non-finite numbers are strings ("inf").

    run     a group is begun: ``group``, ``members`` (a digest of its points), ``key`` (engine, torch, machine, ...)
    sample  one time: ``round``, ``seconds`` for one call, ``loops`` calls that were timed together
    result  an attempt ended: the fields of ``points.Result`` but for ``seconds`` and ``rounds``, which are the rows
            "sample" of this run and point, as many as ``samples`` says; ``definition``
            is the whole point, ``duration`` all seconds spent on it

Lines that cannot be read are skipped with a warning; a result without all of its
samples does not count.
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from .points import ANCHOR, Group, Point, Result
from .provenance import key

SCHEMA = 1
NAME = "samples.jsonl"


class Busy(RuntimeError):
    """Another process is measuring into the same folder."""


class Store:
    """Appends rows to a file of ``folder``, one writer at a time; creates the folder,
    or raises OSError.
    """

    def __init__(self, folder: Path | str, name: str = NAME):
        self.path = Path(folder) / name

    def __enter__(self) -> Store:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise Busy(
                f"{self.path.parent} is in use by another measurement; wait for it or stop it"
            ) from None
        if self.file.seek(0, os.SEEK_END):
            self.file.seek(-1, os.SEEK_END)
            if (
                self.file.read() != b"\n"
            ):  # the last writer died in the middle of a line
                self.file.write(b"\n")
        return self

    def __exit__(self, *_):
        with suppress(OSError):  # it was reported when the row was written
            self.file.close()

    def append(self, **row) -> None:
        """Write one row through to the file."""
        line = json.dumps({"schema": SCHEMA, **_plain(row)}, allow_nan=False)
        self.file.write(line.encode() + b"\n")
        self.file.flush()
        if row["kind"] == "result":
            os.fsync(self.file.fileno())


def warn(text: str) -> None:
    """A line for the terminal; never part of a report."""
    print(text, file=sys.stderr, flush=True)


warn_once = functools.cache(warn)  # a report reads its rows more than once


def read(
    folder: Path | str,
    warn: Callable[[str], None] = warn_once,
    anchors: bool = False,
) -> list[Result]:
    """All complete results in the order of the file, without ``anchors`` unless asked
    for; [] if there is none yet.
    """
    samples: dict[tuple, dict] = {}
    results: list[Result] = []
    bad: list[int] = []
    for number, row in _rows(folder, bad):
        try:
            if row["kind"] == "sample":
                samples.setdefault((row["run"], row["point"]), {})[row["round"]] = (
                    float(row["seconds"])
                )
            elif row["kind"] == "result":
                one = _result(row, samples.pop((row["run"], row["point"]), {}))
                if anchors or not one.option(ANCHOR):
                    results.append(one)
        except (ValueError, KeyError, TypeError, OverflowError):
            bad.append(number)
    if bad:
        shown = ", ".join(map(str, sorted(bad)[:5])) + (", ..." if len(bad) > 5 else "")
        what = f"{len(bad)} unreadable or incomplete row{'s' * (len(bad) > 1)} (line {shown})"
        warn(
            f"{Path(folder) / NAME}: skipped {what}; without these lines in the file this is not said"
        )
    return results


def _rows(folder: Path | str, bad: list[int]) -> Iterator[tuple[int, dict]]:
    """(line number, row) of this schema; the numbers of unreadable lines are added to
    ``bad``.
    """
    path = Path(folder) / NAME
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip() and (row := json.loads(line))["schema"] == SCHEMA:
                yield number, row
        except (ValueError, KeyError, TypeError):
            bad.append(number)


@dataclass
class Run:
    """A run of a group: its name, the rounds begun, the samples of points without a
    result.
    """

    name: str
    rounds: int = 0
    samples: dict[str, dict[int, float]] = field(default_factory=dict)


def unfinished(folder: Path | str, group: Group, here: dict) -> Run | None:
    """The newest run of exactly these points by this engine, torch, device and machine."""
    run: Run | None = None
    same = {"group": group.name, "members": group.id, "key": list(key(here))}
    for _, row in _rows(folder, []):
        if row.get("kind") == "run" and same.items() <= row.items():
            run = Run(row["run"])
        elif run is None or row.get("run") != run.name:
            continue
        elif row["kind"] == "sample":
            run.samples.setdefault(row["point"], {})[row["round"]] = row["seconds"]
            run.rounds = max(run.rounds, row["round"] + 1)
        elif row["kind"] == "result":
            run.samples.pop(row["point"], None)
    return run


def load(
    folder: Path | str, *, warn: Callable[[str], None] = warn_once
) -> list[Result]:
    """The newest result of each point in each group; of an interleaved group only those
    of its newest composition.
    """
    return latest(read(folder, warn))


def latest(results: list[Result]) -> list[Result]:
    newest = {r.group: r.composition for r in results if r.interleaved}
    results_by_id: dict[tuple, Result] = {}
    for r in results:
        if not r.interleaved or r.composition == newest[r.group]:
            results_by_id.pop(r.id, None)
            results_by_id[r.id] = r
    return list(results_by_id.values())


OTHERWISE = (
    "point",
    "seconds",
    "rounds",
)  # fields of a Result that its row holds in another form


def result_row(result: Result, duration: float) -> dict:
    """The fields of a result as a row."""
    row = {name: x for name, x in vars(result).items() if name not in OTHERWISE}
    row |= {"point": result.point.id, "definition": result.point.to_dict()}
    row |= {"kind": "result", "samples": len(result.seconds)}
    return row | {"duration": round(duration, 3)}


def _result(row: dict, taken: dict[int, float]) -> Result:
    point = Point.from_dict(row["definition"])
    rounds = (
        sorted(taken) if row["samples"] else []
    )  # the samples of a point that failed do not count
    if point.id != row["point"] or len(rounds) != row["samples"]:
        raise ValueError("incomplete")
    values = {
        f.name: row[f.name]
        for f in fields(Result)
        if f.name in row and f.name not in OTHERWISE
    }
    for k in ("errors", "tolerance"):
        values[k] = {name: float(x) for name, x in values[k].items()}
    values["ci"] = tuple(map(float, values["ci"])) if values["ci"] else None
    return Result(
        point=point,
        seconds=tuple(taken[r] for r in rounds),
        rounds=tuple(rounds),
        **values,
    )


def _plain(value):
    """The same in JSON, where numbers that are not finite are strings."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return (
        str(value) if isinstance(value, float) and not math.isfinite(value) else value
    )
