"""Train the models of ``learning`` and store what they reached, in ``quality.jsonl``,
one JSON object per line.

    trained  one run: its ``definition``, ``status``, ``reason``, ``losses`` (means of ten steps, in nats), ``scores``
             of held-out sequences (``learning.evaluate``), ``tokens``, ``cpu_s``
    timed    steps of training of one pattern: ``task``, ``seq``, ``batch``, seconds of each step

Every row has ``origin``: the code of the training (``code``), that of the engine,
commit, versions and machine. A run counts as done where its id, the code of the
training, torch and the device agree; the engine's own tests hold its results to the
float64 reference, so a change there makes no row stale, and its hash stands beside.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryFile

import torch

from ..ring.launch import Ended, Process, last_line
from ..tracking import is_out_of_memory
from . import provenance
from .learning import (
    SIZES,
    Run,
    Sizes,
    build,
    optimizer_of,
    patterns,
    set_length,
    step,
    train,
)
from .store import Store, warn
from .tasks import TASKS, text
from .workers import died

NAME = "quality.jsonl"
SEEDS = 3
CODE = ("nn.py", "adaptive.py", "measure/tasks.py", "measure/learning.py")
SAME = ("code", "torch", "device", "device_name")
ROUNDS = 7
AVERAGED = 10  # steps whose losses make one stored number


def origin_of(device: str) -> dict:
    """Where rows come from that are made here and now."""
    here = provenance.collect(device)
    code = provenance.code_hash(
        [provenance.PACKAGE / name for name in CODE], provenance.PACKAGE
    )
    digests = {"train": text(False)[1], "held out": text(True)[1]}
    return here | {
        "code": code,
        "text": digests,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


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
    same = [r for r in rows if _key(r["origin"]) == _key(rows[-1]["origin"])]
    return list({(r["kind"], r["id"]): r for r in same}.values())


def _key(origin: dict) -> list:
    return [origin.get(name) for name in SAME]


def runs(sizes: Sizes) -> list[Run]:
    """All runs, those of the first seed first: what is stopped early has fewer seeds,
    not fewer patterns.
    """
    return [
        Run(task, name, seed, sizes)
        for seed in range(SEEDS)
        for task in TASKS
        for name in patterns(16, 512)
    ]


def run(
    folder: Path | str,
    *,
    device: str,
    minutes: float | None = None,
    progress: bool = False,
    wanted: Sequence[Run] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict]:
    """Train what has no row in ``folder`` yet, then time steps; returns all rows.

    On a CPU each core trains one model at a time with one thread, each in its own
    process. After ``minutes`` the runs stop at a checkpoint, and the same call goes on
    there. Raises Busy if another run writes there, OSError if the folder cannot be
    written.
    """
    folder, until = (
        Path(folder),
        clock() + (math.inf if minutes is None else 60 * minutes),
    )
    wanted = runs(SIZES[device]) if wanted is None else list(wanted)
    here = origin_of(device)
    with Store(folder, NAME) as store:
        rows = [
            r
            for r in read(folder)
            if _key(r["origin"]) == _key(here) and r.get("status") != "crashed"
        ]
        done = {r["id"] for r in rows}
        session = _Session(store, folder / "tmp", device, here, progress, until)
        session.train([r for r in wanted if r.id not in done])
        if clock() < until:
            session.time(
                [r for r in _timings(wanted) if f"{r[0].id}-{r[1]}" not in done]
            )
    return read(folder)


def _timings(wanted: list[Run]) -> list[tuple[Run, int]]:
    """(run, seq) of the steps to time: one of each pattern, at all lengths of text, so
    that scores have a time.
    """
    return [
        (r, seq)
        for r in wanted
        if r.seed == 0
        for seq, *_ in r.phases
        if r.task == "text" or (r.task, seq) == ("recall", r.phases[-1][0])
    ]


class _Session:
    """What the steps of ``run`` share."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        device: str,
        here: dict,
        progress: bool,
        until: float,
    ):
        self.store, self.folder, self.device, self.here, self.until = (
            store,
            folder,
            device,
            here,
            until,
        )
        self.say = warn if progress else lambda text: None

    def append(self, kind: str, identity: str, **row) -> None:
        self.store.append(
            kind=kind,
            id=identity,
            origin=self.here | provenance.moment(self.device),
            **row,
        )

    def train(self, waiting: list[Run]) -> None:
        total, begun, active = len(waiting), time.monotonic(), {}
        at_once = self.here["threads"] if self.device == "cpu" else 1
        try:
            while waiting or active:
                while (
                    waiting and len(active) < at_once and time.monotonic() < self.until
                ):
                    one, stderr = waiting.pop(0), TemporaryFile()
                    job = one, self.folder, self.device, self.until
                    process = Process(
                        _train,
                        *job,
                        modules=(__name__,),
                        output=(stderr.fileno(), stderr.fileno()),
                    )
                    active[process.channel] = one, process, stderr
                if not active:
                    self.say(
                        f"the time is over: {len(waiting)} runs are left; run again to go on"
                    )
                    return
                for channel in wait(list(active)):
                    one, process, stderr = active.pop(channel)
                    try:
                        reply = process.receive()
                    except Ended as ended:
                        reply = died(ended.code, last_line(stderr))
                    process.end()
                    if reply is None:  # stopped at a checkpoint
                        continue
                    self.append("trained", one.id, definition=one.definition, **reply)
                    (self.folder / f"{one.id}.pt").unlink(missing_ok=True)
                    left = len(waiting) + len(active)
                    minutes = (
                        (time.monotonic() - begun) / max(1, total - left) * left / 60
                    )
                    said = f"{one.task}, {one.pattern}, seed {one.seed}: {_said(one, reply)}"
                    self.say(
                        f"[{total - left}/{total}] {said} ({minutes:.0f} min left)"
                    )
        finally:
            for _, process, _ in active.values():
                process.end()

    def time(self, wanted: list[tuple[Run, int]]) -> None:
        """Steps of training in turns, all threads of the machine for one pattern at a
        time.
        """
        for task, seq in dict.fromkeys((one.task, seq) for one, seq in wanted):
            some = [one for one, n in wanted if (one.task, n) == (task, seq)]
            self.say(f"timing steps of {task} at {seq:,} tokens")
            threads = self.here["threads"] if self.device == "cpu" else 1
            processes = [
                Process(_time, one, seq, self.device, threads, modules=(__name__,))
                for one in some
            ]
            try:
                taken: dict[str, list[float]] = {one.pattern: [] for one in some}
                for number in range(ROUNDS + 1):  # the first warms up
                    for one, process in zip(some, processes):
                        process.send("go")
                        seconds = process.receive()
                        taken[one.pattern] += [seconds] * (number > 0)
                for one in some:
                    batch = next(b for n, b, _ in one.phases if n == seq)
                    about = {
                        "task": task,
                        "pattern": one.pattern,
                        "seq": seq,
                        "batch": batch,
                        "threads": threads,
                    }
                    self.append(
                        "timed", f"{one.id}-{seq}", seconds=taken[one.pattern], **about
                    )
            finally:
                for process in processes:
                    process.end()


def _said(one: Run, reply: dict) -> str:
    if reply["status"] != "ok":
        return f"{reply['status']}: {reply['reason']}"
    name = TASKS[one.task].measure
    return f"{name} {reply['scores'][-1][name]:.3f} in {reply['cpu_s']:.0f} s"


def _train(
    channel: Connection, one: Run, folder: Path, device: str, until: float
) -> None:
    """In a process of its own: train, and send the row, or None where the time was
    over.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        reply = train(one, folder, device=device, until=until)
        if reply is not None:
            parts = [
                reply["losses"][i : i + AVERAGED]
                for i in range(0, len(reply["losses"]), AVERAGED)
            ]
            reply |= {
                "losses": [round(sum(part) / len(part), 5) for part in parts],
                "status": "ok",
                "reason": "",
            }
    except FloatingPointError as error:
        reply = {"status": "diverged", "reason": str(error)}
    except NotImplementedError as error:
        reply = {"status": "unsupported", "reason": str(error)}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reply = {"status": "oom", "reason": str(error).splitlines()[0]}
    channel.send_bytes(pickle.dumps(reply))


def _time(channel: Connection, one: Run, seq: int, device: str, threads: int) -> None:
    """In a process of its own: the seconds of one step of training, each time that it
    is asked.
    """
    torch.set_num_threads(threads)
    model, batch = build(one, device), next(b for n, b, _ in one.phases if n == seq)
    set_length(model, one, seq)
    optimizer, data = (
        optimizer_of(model, one),
        TASKS[one.task].batch(batch, seq, "timed"),
    )
    while channel.recv_bytes():
        begin = time.perf_counter()
        step(
            model, optimizer, data, one.sizes.rate
        )  # its loss is read, so a GPU is done
        channel.send_bytes(pickle.dumps(time.perf_counter() - begin))
