"""Ranks as processes of this machine: run a function on p gloo ranks, get what each returns, or the culprit's name.

A forkserver that has imported torch starts them in a fraction of a second. Meant for tests and small notebook cells; a
benchmark over several machines is started by ``python -m torch.distributed.run``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from . import comm

JOIN_S = 60.0  # for all ranks to start and meet; only then their time begins
GRACE_S = 1.0  # for the others to say what they saw, once one rank has failed


class RankFailed(RuntimeError):
    """A rank failed: ``rank`` is the culprit, not the one that noticed."""

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


@dataclass
class _Report:
    """How a rank ended."""

    kind: str  # "ok", "error", "network", "died"
    value: object = None


def launch(function: Callable, ranks: int, *args, timeout_s: float = 60.0, threads: int = 1) -> list:
    """``function(*args)`` on every rank of a gloo group; the results by rank.

    ``function`` must be importable by name; ``threads`` per rank; ``timeout_s`` for the whole call and for every
    exchange. Raises RankFailed that names the rank which raised, died, left early or hangs, and ValueError for a
    function that other processes cannot import. Nothing is left running.

    >>> launch(torch.distributed.get_rank, 2)
    [0, 1]
    """
    if function.__module__ == "__main__" or "<" in getattr(function, "__qualname__", "<"):
        raise ValueError(f"{function} cannot be imported by other processes: put it into a module, as a plain function")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ringlab.ring.launch"])
    progress = context.Array("l", [-1] * ranks, lock=False)  # exchanges begun by each rank; -1: it has not joined
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                job = (rank, ranks, str(Path(folder, "store")), timeout_s, threads, progress, theirs, function, args)
                processes.append(context.Process(target=_rank, args=job, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            reports = _listen(processes, pipes, progress, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    _blame(reports, list(progress), timeout_s)
    return [reports[rank].value for rank in range(ranks)]


def _listen(processes, pipes, progress, timeout_s: float) -> dict[int, _Report]:
    """What each rank said until all have ended, one has failed (and a grace is over), or the time is up."""
    reports: dict[int, _Report] = {}
    joining, deadline = True, time.monotonic() + JOIN_S
    while len(reports) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        if joining and min(progress) >= 0:
            joining, left = False, timeout_s
            deadline = min(time.monotonic() + timeout_s, deadline if reports else float("inf"))
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in reports}
        for pipe in wait(list(open_pipes), 0.02 if joining else left):
            rank = open_pipes[pipe]
            try:
                reports[rank] = _Report(*pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):  # it ended without a word
                processes[rank].join(GRACE_S)
                reports[rank] = _Report("died", processes[rank].exitcode)
            if reports[rank].kind != "ok":
                joining, deadline = False, min(deadline, time.monotonic() + GRACE_S)
    return reports


def _blame(reports: dict[int, _Report], progress: list[int], timeout_s: float) -> None:
    """Raise RankFailed for the culprit: who died, else who raised, else who hangs, and never who only noticed it."""
    for rank, report in reports.items():
        if report.kind == "died":
            code = report.value
            how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"left with exit code {code}"
            raise RankFailed(rank, f"{how} before it was done")
    for rank, report in reports.items():
        if report.kind == "error":
            raise RankFailed(rank, f"raised {report.value}")
    silent = [rank for rank in range(len(progress)) if rank not in reports]
    if silent:
        rank = min(silent, key=lambda r: progress[r])
        if progress[rank] < 0:
            raise RankFailed(rank, f"has not joined within {JOIN_S:g} s")
        others = max(progress)
        raise RankFailed(rank, f"hangs: after {timeout_s:g} s it has begun {progress[rank]} exchanges, others {others}")
    for rank, report in reports.items():
        if report.kind == "network":
            raise RankFailed(rank, f"lost its peers: {report.value}")


def _rank(rank, ranks, store, timeout_s, threads, progress, pipe, function, args) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    comm.on_post = lambda: progress.__setitem__(rank, progress[rank] + 1)
    try:
        torch.set_num_threads(threads)
        limit, file = timedelta(seconds=timeout_s), dist.FileStore(store, ranks)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=ranks, timeout=limit)
        progress[rank] = 0
        result = function(*args)
        dist.barrier()  # none leaves while another still talks to it
        report = ("ok", result)
    except dist.DistError as error:
        report = ("network", _said(error))
    except RuntimeError as error:
        from_network = any(word in str(error).lower() for word in ("gloo", "connection", "timed out", "peer"))
        report = ("network" if from_network else "error", _said(error))
    except Exception as error:  # noqa: BLE001  whatever a rank raises is told to the caller
        traceback.print_exc()
        report = ("error", _said(error))
    pipe.send_bytes(pickle.dumps(report))  # by value: shared memory would end with this process
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
