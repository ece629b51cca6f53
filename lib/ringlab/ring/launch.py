"""Ranks as processes of this machine: run a function on p gloo ranks, get what each returns, or the culprit's name.

A forkserver that has imported torch starts them in a fraction of a second. Meant for tests and small notebook cells;
benchmarks, GPUs and several machines are started by ``elastic``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from ..checks import LARGEST, positive, real, shown
from ..hardware import Probe, host
from . import blame
from .blame import End, RankFailed

__all__ = ["RankFailed", "launch"]

LONGEST_S = 1_000_000  # poll(2), with which ranks are waited for, counts milliseconds in 32 bits
RANK_BYTES, RANK_FILES = 8 << 20, 2  # a rank's own memory, before it has tensors, and files open here for it, at least
GUARD = "a script must call launch under `if __name__ == '__main__':`, for every rank imports it"


def launch(function: Callable, ranks: int, *args, timeout_s: float = 60.0, threads: int = 1) -> list:
    """``function(*args)`` on every rank of a gloo group; the results by rank.

    ``function`` must be importable by name; ``threads`` per rank; ``timeout_s`` for the whole call and for every
    exchange. Raises RankFailed that names the rank which raised, died, left early or hangs, and ValueError for what
    cannot be run in other processes, as a function of a notebook or script, and for more ranks than this machine has
    memory for, at 8 MiB each, or may open files for, at two each. Nothing is left running, what the ranks have started
    included.

    >>> launch(torch.distributed.get_rank, 2)
    [0, 1]
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a rank, importing the script
        raise SystemExit(GUARD)  # ends it without a traceback: the caller's own error says why
    checked(function, args, ranks, timeout_s, threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", blame.COMPILER, "ringlab.ring.launch"])
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                job = (rank, ranks, folder, timeout_s, threads, theirs, function, args)
                process = context.Process(target=_rank, args=job, daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
                pipes.append(ours)
            ends = _listen(processes, pipes, folder, timeout_s)
            counts = blame.beats(folder, ranks)
        finally:
            for process in processes:
                _kill(process.pid)
            for process in processes:
                process.join()
    return blame.results(ends, counts, timeout_s)


def checked(function: Callable, args: tuple, ranks: int, timeout_s: float, threads: int) -> None:
    """Raise ValueError unless other processes can run a function that they import by its name."""
    checked_numbers(ranks, timeout_s, threads)
    if ranks > (most := most_ranks()):
        raise ValueError(f"ranks is {shown(ranks)}: this machine has memory and open files for {most:,} at most")
    if not callable(function) or not hasattr(function, "__module__"):
        raise ValueError(f"there is no function to call in {shown(function)}")
    try:
        pickle.dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"the arguments cannot be sent to other processes: {error}") from None
    if function.__module__ == "__main__" or "<" in getattr(function, "__qualname__", "<"):
        raise ValueError(f"{function} cannot be imported by other processes: put it into a module, as a plain function")


def most_ranks() -> int:
    """The ranks that this machine could hold, by its memory and the files that a process may open."""
    memory, (files, _) = host.ram_bytes(Probe().read), resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = (memory and memory // RANK_BYTES, files > 0 and files // RANK_FILES)  # none where not known
    return min(filter(None, limits), default=LARGEST)


def checked_numbers(ranks: int, timeout_s: float, threads: int = 1) -> None:
    """Raise ValueError for counts that are none, and for a time that cannot be waited for."""
    for name, value in (("ranks", ranks), ("threads", threads)):
        positive(name, value)
    if not real(timeout_s) or timeout_s > LONGEST_S:
        raise ValueError(f"timeout_s must be a number of seconds up to {LONGEST_S:,}, got {shown(timeout_s)}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")


def _listen(processes, pipes, folder: str, timeout_s: float) -> dict[int, End]:
    """What each rank said until all have ended, one has failed (and a grace is over), or the time is up."""
    ends: dict[int, End] = {}
    joining, deadline = True, time.monotonic() + blame.JOIN_S
    while len(ends) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        if joining and min(blame.beats(folder, len(pipes))) >= 0:
            joining, left = False, timeout_s
            deadline = min(time.monotonic() + timeout_s, deadline if ends else float("inf"))
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in ends}
        for pipe in wait(list(open_pipes), 0.02 if joining else left):
            rank = open_pipes[pipe]
            try:
                ends[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):  # it ended without a word
                processes[rank].join(blame.GRACE_S)
                code = processes[rank].exitcode
                unmet = code == 1 and blame.process_of(folder, rank) is None
                ends[rank] = End("died", blame.death(code, f"it never began; {GUARD}" if unmet else ""))
            if ends[rank].kind != "ok":
                joining, deadline = False, min(deadline, time.monotonic() + blame.GRACE_S)
    return ends


def _kill(pid: int) -> None:
    """End a rank and all that it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it leads no group yet, or all have gone
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _rank(rank, ranks, folder, timeout_s, threads, pipe, function, args) -> None:
    os.setsid()  # a group of its own, so that what it starts ends with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = blame.loopback()
    beat = blame.Beat(folder, rank)
    try:
        torch.set_num_threads(threads)
        blame.meet(dist.FileStore(str(Path(folder, "store")), ranks), rank, ranks, timeout_s, beat)
        result = function(*args)
        dist.barrier()  # none leaves while another still talks to it
        end = End.ok(result)
    except Exception as error:  # noqa: BLE001  whatever a rank raises is told to the caller
        end = End.of(error)
    pipe.send_bytes(pickle.dumps(end))  # by value: shared memory would end with this process
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
