"""The rows: one file, samples.jsonl, to which every measurement is appended as it
comes.

Schema 1, one JSON object per line. Every row has ``schema``, ``kind`` and ``run`` (one
group measured, perhaps with interruptions), and all but the first kind ``point`` (its
id). Non-finite numbers are strings ("inf").

    run     a group is begun: ``group``, ``members`` (a digest of its points), ``key`` (engine, torch, machine, ...)
    sample  one time: ``round``, ``seconds`` for one call, ``loops`` calls that were timed together
    result  an attempt ended: the fields of ``points.Result`` but for ``seconds`` and ``rounds``, which are the rows
            "sample" of this run and point, as many as ``samples`` says; ``definition``
            is the whole point

Lines that cannot be read, or that hold a number that is no time, are skipped with a
warning; a result without all of its samples does not count.
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from .points import ANCHOR, Group, Point, Result
from .provenance import key

SCHEMA = 1
NAME = "samples.jsonl"
# Seconds that a clock can tell of a call, and a roofline of its work.
LEAST_S = 1e-12
MOST_S = 1e6
TIMES = {"sample": ["seconds"], "result": ["median", "bound_seconds", "host_seconds"]}


class NoTime(ValueError):
    """A row holds a number that is no time; the message says which."""


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


def read(folder: Path | str) -> list[Result]:
    """All complete results in the order of the file but those of anchors; [] if there
    is none yet. Lines that are skipped are told, once in a process.
    """
    return read_with_runs(folder)[0]


def read_with_runs(folder: Path | str) -> tuple[list[Result], list[Run]]:
    """What ``read`` returns, and the runs in the order of the file."""
    path = Path(folder) / NAME
    results, faults, runs = scan(path.read_bytes() if path.exists() else b"")
    if faults:
        warn_once(told(path, faults))
    return [row for row in results if not row.option(ANCHOR)], runs


def scan(data: bytes) -> tuple[list[Result], dict[int, Exception], list[Run]]:
    """All complete results in the order of a file with this content, anchors too, what
    is wrong with each line that was skipped, and the runs.
    """
    runs: dict[str, Run] = {}
    results: list[Result] = []
    faults: dict[int, Exception] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            if not line.strip() or (row := json.loads(line))["schema"] != SCHEMA:
                continue
            _check(row)
            run = runs.setdefault(row["run"], Run(row["run"]))
            if row["kind"] == "run":
                run.begun = row
            elif row["kind"] == "sample":
                taken = run.samples.setdefault(row["point"], {})
                taken[row["round"]] = float(row["seconds"])
                run.rounds = max(run.rounds, row["round"] + 1)
            elif row["kind"] == "result":
                taken = run.samples.pop(row["point"], {})
                results.append(_result(row, taken))
        except UNREADABLE as error:
            faults[number] = error
    return results, faults, [*runs.values()]


# What a row raises that another program wrote or damaged.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


def told(name: Path | str, faults: dict[int, Exception]) -> str:
    """Which lines of a file were skipped, in one line, and which numbers are no times."""

    def shown(texts: list[str]) -> str:
        return ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")

    lines = shown([*map(str, sorted(faults))])
    what = f"{len(faults)} unreadable or incomplete row{'s' * (len(faults) > 1)}"
    found = [f"line {n}: {x}" for n, x in faults.items() if isinstance(x, NoTime)]
    why = f"; {shown(found)}" if found else ""
    return f"{name}: skipped {what} (line {lines}){why}; without these lines in the file this is not said"


def _check(row: dict) -> None:
    """Raise ValueError for a row without what all readers ask for, NoTime where a time
    is none.
    """
    if row["kind"] == "sample" and type(row["round"]) is not int:
        raise ValueError("a round is a whole number")
    if row["kind"] in TIMES and not isinstance(row["point"], str):
        raise ValueError("a point is named by its id")
    for name in TIMES.get(row["kind"], ()):
        value = row.get(name)
        if value is None and row["kind"] == "result":
            continue
        if type(value) not in (int, float) or not LEAST_S <= value <= MOST_S:
            raise NoTime(f"{name} {value!r:.40} is no time")


@dataclass
class Run:
    """A run of a group: its name, the rounds begun, the samples of points without a
    result, and the row with which it began.
    """

    name: str
    rounds: int = 0
    samples: dict[str, dict[int, float]] = field(default_factory=dict)
    begun: dict = field(default_factory=dict)


def unfinished(runs: list[Run], group: Group, here: dict) -> Run | None:
    """The newest run of exactly these points by this engine, torch, device and machine."""
    same = {"group": group.name, "members": group.id, "key": list(key(here))}
    found = (run for run in reversed(runs) if same.items() <= run.begun.items())
    return next(found, None)


def load(folder: Path | str) -> list[Result]:
    """The newest result of each point in each group; of an interleaved group only those
    of its newest composition.
    """
    return latest(read(folder))


def latest(results: list[Result]) -> list[Result]:
    newest = {row.group: row.composition for row in results if row.interleaved}
    results_by_id: dict[tuple, Result] = {}
    for row in results:
        if not row.interleaved or row.composition == newest[row.group]:
            results_by_id.pop(row.id, None)
            results_by_id[row.id] = row
    return list(results_by_id.values())


OTHERWISE = (
    "point",
    "seconds",
    "rounds",
)  # fields of a Result that its row holds in another form


def result_row(result: Result) -> dict:
    """The fields of a result as a row."""
    row = {name: x for name, x in vars(result).items() if name not in OTHERWISE}
    row |= {"point": result.point.id, "definition": result.point.to_dict()}
    return row | {"kind": "result", "samples": len(result.seconds)}


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
    values["duration"] = float(row.get("duration", 0.0))
    for kind in ("errors", "tolerance"):
        values[kind] = {name: float(x) for name, x in values[kind].items()}
    if values["ci"]:
        low, high = values["ci"] = tuple(map(float, values["ci"]))
        if not 0 <= low <= high:
            raise NoTime(f"ci {low} to {high} is no interval of times")
    return Result(
        point=point,
        seconds=tuple(taken[number] for number in rounds),
        rounds=tuple(rounds),
        **values,
    )


def _plain(value):
    """The same in JSON, where numbers that are not finite are strings."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return (
        str(value) if isinstance(value, float) and not math.isfinite(value) else value
    )
