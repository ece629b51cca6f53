"""All trainings of a machine: what each model reached, and what a step of it takes.

    python notebooks/quality/trainings.py [--profile NAME] [--minutes N] [--data DIR]

trains what has no row yet in ``reports/<profile>/data/quality.jsonl``, one JSON object
per line:

    trained  one run: its ``definition``, ``status``, ``reason``, ``losses`` (means of
             ten steps, in nats), ``scores`` of held-out sequences (``train.evaluate``),
             ``tokens``, ``cpu_s``
    timed    steps of training of one pattern: ``task``, ``seq``, ``batch``, seconds of
             each step

Every row has ``origin``: the code of the training (``code``), that of the engine,
commit, versions and machine. A run counts as done where its id, the code of the
training, torch and the device agree. The library's own tests hold its layers to the
float64 reference, so a change there makes no row stale, and its hash stands beside.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from model import patterns
from ringlab import hardware
from ringlab.measure import Busy, provenance
from ringlab.measure.store import Store, warn
from ringlab.report.places import ReportError, UsageError, reports_folder, run_target
from ringlab.tracking import is_out_of_memory
from tasks import TASKS, text
from train import SIZES, Run, Sizes, build, step, train

NAME = "quality.jsonl"
SEEDS = 3
ROUNDS = 7  # of timed steps
AVERAGED = 10  # steps whose losses make one stored number
HERE = Path(__file__).resolve().parent
CODE = ("model.py", "tasks.py", "train.py")
# Hashes of earlier code that trains the same: its rows count as those of this code.
# Whoever changes what is trained empties it.
# 3af0c38740e0: the code before it was moved here from lib/ringlab. In float64, whole
# runs of four patterns have the losses of that code, bit for bit; so have whole runs in
# float32 by the code of the last commit before the move. In float32 the losses of
# stored rows come again to 5 decimals for the first 50 to 70 steps; then a difference
# of rounding between CPUs grows, as it does with the earlier code itself.
# tests/measure/test_learning.py trains the first steps of stored runs again.
# fbc5c21b039a: the same files, hashed with f-strings as Python 3.11 writes them.
# e6b87e518177: before MoBA, NSA and DSA. Losses of 20 steps of old patterns are equal
# bit for bit.
EQUAL = {"3af0c38740e0", "fbc5c21b039a", "e6b87e518177"}
# A subset for methods of which a step takes longer; of the others all tasks.
TASKS_OF = {"MoBA": ["recall", "text"], "NSA": ["recall", "text"], "DSA": ["recall"]}


@cache
def code() -> str:
    """The hash of the code of the training."""
    return provenance.code_hash([HERE / name for name in CODE], HERE)


def key(origin: dict) -> list:
    """What must agree for rows to be set beside each other."""
    trained_by = origin["code"]
    same = code() if trained_by in EQUAL else trained_by
    return [same, *(origin.get(x) for x in ("torch", "device", "device_name"))]


def read(folder: Path | str) -> list[dict]:
    """The newest row of each run and timing of the newest code, torch and device in
    ``folder``; [] if there is none.
    """
    path, rows = Path(folder) / NAME, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the line at which a writer was killed
            warn(f"{path}: skipped a line that cannot be read")
    same = [row for row in rows if key(row["origin"]) == key(rows[-1]["origin"])]
    return list({(row["kind"], row["id"]): row for row in same}.values())


def runs(sizes: Sizes) -> list[Run]:
    """All runs, those of the first seed first: what is stopped early has fewer seeds,
    not fewer patterns.
    """
    return [
        Run(task, name, seed, sizes)
        for seed in range(SEEDS)
        for task in TASKS
        for name in patterns(16, 512)
        if task in TASKS_OF.get(name, TASKS)
    ]


def run_all(
    folder: Path | str,
    *,
    device: str,
    minutes: float | None = None,
    wanted: Sequence[Run] | None = None,
) -> list[dict]:
    """Train what has no row in ``folder`` yet, then time steps; returns all rows.

    On a CPU each core trains one model at a time with one thread, each in its own
    process. After ``minutes`` the runs stop at a checkpoint, and the same call goes on
    there. Raises Busy if another process writes there, OSError if the folder cannot be
    written.
    """
    folder = Path(folder)
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    wanted = runs(SIZES[device]) if wanted is None else wanted
    origin = provenance.collect(device) | {"code": code()}
    origin["text"] = {"train": text(False)[1], "held out": text(True)[1]}
    threads = origin["threads"] if device == "cpu" else 1
    with Store(folder, NAME) as store:
        done = {
            row["id"]
            for row in read(folder)
            if key(row["origin"]) == key(origin) and row.get("status") != "crashed"
        }
        waiting = [run for run in wanted if run.id not in done]
        total, begun, ended = len(waiting), time.monotonic(), 0
        for run, row in in_processes(waiting, folder / "tmp", device, until, threads):
            about = origin | provenance.moment(device)
            definition = run.definition
            store.append(
                kind="trained", id=run.id, origin=about, definition=definition, **row
            )
            (folder / "tmp" / f"{run.id}.pt").unlink(missing_ok=True)
            ended += 1
            left = (time.monotonic() - begun) / ended * (total - ended) / 60
            warn(f"[{ended}/{total}] {summary(run, row)} ({left:.0f} min left)")
        if ended < total:
            warn(f"the time is over: {total - ended} runs are left; run again to go on")
        for (task, seq), some in timings(wanted).items():
            some = [run for run in some if f"{run.id}-{seq}" not in done]
            if not some or time.monotonic() > until:
                continue
            warn(f"timing steps of {task} at {seq:,} tokens")
            batch = next(batch for n, batch, _ in some[0].phases if n == seq)
            for run, seconds in seconds_of(some, seq, batch, device, threads):
                about = {"task": task, "pattern": run.pattern, "seq": seq}
                store.append(
                    kind="timed",
                    id=f"{run.id}-{seq}",
                    origin=origin | provenance.moment(device),
                    seconds=seconds,
                    batch=batch,
                    threads=threads,
                    **about,
                )
    return read(folder)


def summary(run: Run, row: dict) -> str:
    name = f"{run.task}, {run.pattern}, seed {run.seed}"
    if row["status"] != "ok":
        return f"{name}: {row['status']}: {row['reason']}"
    measure = TASKS[run.task].measure
    score = row["scores"][-1][measure]
    return f"{name}: {measure} {score:.3f} in {row['cpu_s']:.0f} s"


# --------------------------------------------------------------------------------------
# processes


def in_processes(
    waiting: list[Run], folder: Path, device: str, until: float, at_once: int
) -> Iterator[tuple[Run, dict]]:
    """(run, fields of its row) as each ends; none of a run that the clock stopped."""
    context, active = multiprocessing.get_context("spawn"), {}
    waiting = list(waiting)
    try:
        while True:
            while waiting and len(active) < at_once and time.monotonic() < until:
                run = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                job = theirs, run, folder, device, until
                process = context.Process(target=work, args=job, daemon=True)
                process.start()
                theirs.close()
                active[ours] = run, process
            if not active:
                return
            for channel in wait(list(active)):
                run, process = active.pop(channel)
                try:
                    row = channel.recv()
                except EOFError:
                    process.join()
                    row = {"status": "crashed", "reason": how_ended(process.exitcode)}
                if row is not None:
                    yield run, row
    finally:
        for _, process in active.values():
            process.kill()


def how_ended(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{hint}"


def work(
    channel: Connection, run: Run, folder: Path, device: str, until: float
) -> None:
    """In a process of its own: train, and send the fields of the row, or None where the
    time was over.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, who ends us
    threading.Thread(target=end_with_caller, daemon=True).start()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        row = train(run, folder, device=device, until=until)
    except Exception as error:
        kinds = {FloatingPointError: "diverged", NotImplementedError: "unsupported"}
        status = kinds.get(type(error), "oom" if is_out_of_memory(error) else "crashed")
        said = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {said}" if status == "crashed" else said
        row = {"status": status, "reason": reason}
    else:
        if row is not None:
            each = row["losses"]
            parts = [each[i : i + AVERAGED] for i in range(0, len(each), AVERAGED)]
            losses = [round(sum(part) / len(part), 5) for part in parts]
            row |= {"losses": losses, "status": "ok", "reason": ""}
    channel.send(row)


def end_with_caller() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


# --------------------------------------------------------------------------------------
# times


def timings(wanted: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    """(task, seq) to the runs of which steps are timed: each pattern at all lengths of
    text, so that scores have a time, and at the longest of recall.
    """
    found: dict[tuple[str, int], list[Run]] = {}
    for run in wanted:
        for seq, *_ in run.phases:
            last = run.task == "recall" and seq == run.phases[-1][0]
            if run.seed == 0 and (run.task == "text" or last):
                found.setdefault((run.task, seq), []).append(run)
    return found


def seconds_of(
    some: list[Run], seq: int, batch: int, device: str, threads: int
) -> list[tuple[Run, list[float]]]:
    """(run, seconds of each step of training) in turns, with all threads of the machine
    for one pattern at a time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = [build(run, device) for run in some]
        seconds: list[list[float]] = [[] for _ in some]
        for number in range(ROUNDS + 1):  # the first warms up
            for run, (model, optimizer), taken in zip(some, made, seconds):
                run.set_length(model, seq)
                data = TASKS[run.task].batch(batch, seq, "timed")
                begin = time.perf_counter()
                step(
                    model, optimizer, data, run.sizes.rate
                )  # it reads the loss: a GPU is done
                if number:
                    taken.append(time.perf_counter() - begin)
        return list(zip(some, seconds))
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------
# the command


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing; returns the exit code, and refuses in one line."""
    parser = argparse.ArgumentParser(
        description="Train small models that differ in their attention alone, for the page `quality`."
    )
    parser.error = lambda message: sys.exit(refuse(f"{message}; see --help", 2))
    about = "auto: this machine (default: auto)"
    parser.add_argument("--profile", default="auto", metavar="NAME", help=about)
    about = "stop after so long; a rerun goes on (default: none, all runs)"
    parser.add_argument("--minutes", type=float, metavar="N", help=about)
    about = "where rows go (default: reports/<profile>/data)"
    parser.add_argument("--data", type=Path, metavar="DIR", help=about)
    given = parser.parse_args(argv)
    try:
        if given.minutes is not None and not given.minutes > 0:
            raise UsageError(f"--minutes must be positive, got {given.minutes:g}")
        machine, folders = hardware.detect(), (reports_folder(), given.data or "")
        asked = run_target(given.profile, machine, *folders, strict=True)
        folder = asked.data
        rows = run_all(folder, device=asked.profile.kind, minutes=given.minutes)
    except KeyboardInterrupt:
        return refuse("interrupted: what is done is kept; run again to go on", 130)
    except (ReportError, hardware.UnknownProfile) as error:
        return refuse(error, getattr(error, "exit_code", 2))
    except (Busy, OSError) as error:
        return refuse(error, 1)
    there = sum(row["kind"] == "trained" for row in rows)
    warn(
        f"{there} of {len(runs(SIZES[asked.profile.kind]))} runs are there: {folder / NAME}"
    )
    return 0


def refuse(message, code: int) -> int:
    warn(f"quality: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())
