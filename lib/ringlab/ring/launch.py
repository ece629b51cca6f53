"""Functions in other processes of this machine: single ones, and the ranks of a group.

A server process of multiprocessing imports torch once and forks all others, within
milliseconds; it ends with its caller. A ``Process`` has a channel for messages. It ends
when the channel closes, however its caller ended. ``launch`` runs a function on p ranks
and returns what each returned, or raises which rank failed, and how. ``measure`` runs
its workers by the same parts.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from ..checks import LARGEST, check_int, is_real, short_repr
from ..hardware import Probe
from ..hardware.detect import ram_bytes
from ..torch_private import COMPILER
from . import comm
from .group import PlanMismatch
from .watch import (
    GRACE_S,
    Beat,
    End,
    Progress,
    RankFailed,
    culprit,
    describe,
    signal_name,
)

JOIN_S = 60.0  # for all ranks to join; the time of the call begins after that
LONGEST_S = 1_000_000  # poll(2), with which processes are waited for, counts milliseconds in 32 bits
MODULES = (COMPILER, __name__)  # what ranks need
# What each rank needs at least: its memory, and open files of the caller.
RANK_BYTES = 8 << 20
RANK_FILES = 3

# --------------------------------------------------------------------------------------
# processes


class Ended(RuntimeError):
    """A process ended without a message: ``code`` is its exit code or minus the signal,
    ``last_line`` its last line.

    >>> print(Ended(-9), Ended(0, "last words"), sep="; ")
    was ended by SIGKILL before it was done; left with exit code 0 before it was done: last words
    """

    def __init__(self, code: int, last_line: str = ""):
        how = (
            f"was ended by {signal_name(-code)}"
            if code < 0
            else f"left with exit code {code}"
        )
        said = f": {last_line}" if last_line else ""
        super().__init__(f"{how} before it was done{said}")
        self.code = code
        self.last_line = last_line


@cache
def server(caller: int, *modules: str) -> forkserver.ForkServer:
    """The server of forks for the process ``caller``, which imports ``modules`` first.
    No operator is run there: threads and CUDA survive no fork.

    An own one: multiprocessing's ``Process`` runs the caller's script once more in each
    fork.
    """
    forks = forkserver.ForkServer()
    forks.set_forkserver_preload(list(modules))
    return forks


class Process:
    """``target(channel, *args)`` in a process of its own, with the caller's path,
    environment and folder.

    ``target`` and ``args`` are pickled. ``modules`` are imported by the server, once
    for all processes with these. ``output``: where stdout and stderr go. ``folder`` is
    removed if the caller ends first. Raises Ended where no process can be started.
    """

    def __init__(
        self,
        target: Callable,
        *args,
        modules: tuple[str, ...] = MODULES,
        output: tuple[int, int] = (1, 2),
        folder: str = "",
    ):
        forked = Forked(pickle.dumps((target, args)), dict(os.environ), folder)
        job = {"sys_path": sys.path, "dir": os.getcwd()}, forked
        self.channel, other_end = Pipe()
        with other_end:
            try:
                self.status, write = server(
                    os.getpid(), *modules
                ).connect_to_new_process([other_end.fileno(), *output])
                with suppress(BrokenPipeError), open(write, "wb") as file:
                    file.writelines(map(pickle.dumps, job))
                self.pid = forkserver.read_signed(self.status)
            except (OSError, EOFError):
                raise Ended(1, "the server of processes could not run") from None

    def send(self, message) -> None:
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it has ended, which ``receive`` reports
            self.channel.send_bytes(pickle.dumps(message))

    def receive(self):
        """The next message; raises Ended where there is none any more."""
        try:
            return pickle.loads(self.channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise Ended(self.end()) from None

    def end(self) -> int:
        """Kill the process, if it still runs, and all that it has started; its exit
        code.
        """
        if self.pid is not None:
            for kill in (os.killpg, os.kill):  # it may not lead a group yet
                with suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
                    break
            self.channel.close()
            self.pid = None
            self.code = -signal.SIGKILL
            # Nobody knows its code where the server was killed.
            with suppress(EOFError), open(self.status, "rb") as status:
                self.code = forkserver.read_signed(status.fileno())
        return self.code


@dataclass
class Forked:
    """A pickled function with its arguments, for multiprocessing's server: it calls
    ``_bootstrap`` in the process that it has forked, prints what that raises, and leaves
    with what it returns.
    """

    job: bytes
    environment: dict[str, str]
    folder: str

    def _bootstrap(self, parent_sentinel: int) -> int:
        gc.freeze()  # collecting what was imported takes 0.1 s and copies its pages
        os.setsid()  # a group, so that a kill takes its children too
        channel, *output = forkserver.get_inherited_fds()
        for source, target in zip(output, (1, 2)):
            os.dup2(source, target)
        ending = threading.Thread(target=_end_with, args=(channel, self.folder))
        ending.daemon = True
        ending.start()
        os.environ.clear()
        os.environ.update(self.environment)
        try:
            target, args = pickle.loads(self.job)
            target(Connection(channel), *args)
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else stop.code is not None
        finally:
            sys.stdout.flush()
        return 0


def _end_with(channel: int, folder: str) -> None:
    """End this process when the other end of its channel closes, and remove ``folder``."""
    hangup = select.poll()
    hangup.register(channel, 0)
    hangup.poll()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def end_of(error: BaseException) -> End:
    """The end of a rank that an exception ended.

    gloo raises plain RuntimeErrors when a rank has gone: they come from
    ``torch.distributed`` or ``comm``, or name gloo's source.
    """
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    communicates = module.startswith(
        ("torch.distributed", comm.__name__)
    ) or "gloo/transport" in str(error)
    if (
        isinstance(error, dist.DistError)
        or type(error) is RuntimeError
        and communicates
    ):
        return End("network", message)
    named = None
    if isinstance(error, PlanMismatch):
        named = -1 if error.rank is None else error.rank
    return End("error", message, "".join(traceback.format_exception(error)), named)


def collect(
    processes: list[Process], folder: str, timeout_s: float
) -> tuple[dict[int, End], list[Progress]]:
    """The next message of each process, an End, by rank: until all came, the time is
    up, or one has failed and a grace is over. And how far each rank is, as it wrote to
    ``folder``.
    """
    ends: dict[int, End] = {}
    deadline = time.monotonic() + timeout_s
    ranks = {process.channel: rank for rank, process in enumerate(processes)}
    while ranks and (left := deadline - time.monotonic()) > 0:
        for channel in wait(list(ranks), left):
            rank = ranks.pop(channel)
            try:
                ends[rank] = processes[rank].receive()
            except Ended as ended:
                ends[rank] = End("died", ended)
            except Exception as error:  # noqa: BLE001  reading it runs the result's own code
                ends[rank] = End(
                    "died", f"returned what cannot be read back: {end_of(error).value}"
                )
            if ends[rank].kind != "ok":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    progress = [
        Progress.read(Path(folder, f"{rank}.beat"), process.pid)
        for rank, process in enumerate(processes)
    ]
    return ends, progress


# --------------------------------------------------------------------------------------
# ranks


def launch(
    function: Callable, ranks: int, *args, timeout_s: float = 60.0, threads: int = 1
) -> list:
    """``function(*args)`` on every rank of a gloo group; the results by rank.

    ``function`` must be importable by name; ``threads`` per rank; ``timeout_s`` for the
    whole call and for every exchange. Raises RankFailed that names the rank which
    raised, died, left early or hangs, and ValueError for what cannot run in other
    processes, as a function of a notebook or script, and for more ranks than this
    machine has memory for, at 8 MiB each, or may open files for, at three each. Nothing
    is left running, what the ranks have started included.

    >>> launch(torch.distributed.get_rank, 2)
    [0, 1]
    """
    _check(function, args, ranks, timeout_s, threads)
    with ExitStack() as stack:
        folder = tempfile.mktemp(prefix="ringlab-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        processes: list[Process] = []
        for rank in range(ranks):
            job = rank, ranks, folder, timeout_s, threads, function, args
            processes.append(Process(_rank, *job, folder=folder))
            stack.callback(processes[-1].end)
        # A rank's first message: it has joined. Then the time begins.
        ends, progress = collect(processes, folder, JOIN_S)
        if not culprit(ends, progress):
            ends, progress = collect(processes, folder, timeout_s)
    if blamed := culprit(ends, progress):
        rank, _ = blamed
        if rank is not None and progress[rank].begun < 0 and rank not in ends:
            raise RankFailed(rank, f"rank {rank} has not joined within {JOIN_S:g} s")
        raise describe(blamed, ends, progress, timeout_s)
    return [ends[rank].value for rank in range(ranks)]


def most_ranks() -> int:
    """The ranks that this machine could hold, by its memory and the files that a
    process may open.
    """
    memory = ram_bytes(Probe().read)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # None, or not positive, where not known.
    limits = memory and memory // RANK_BYTES, files > 0 and files // RANK_FILES
    return min(filter(None, limits), default=LARGEST)


def _check(
    function: Callable, args: tuple, ranks: int, timeout_s: float, threads: int
) -> None:
    check_int("ranks", ranks)
    check_int("threads", threads)
    if not is_real(timeout_s) or not 0 < timeout_s <= LONGEST_S:
        expected = f"timeout_s must be a positive number of seconds up to {LONGEST_S:,}"
        raise ValueError(f"{expected}, got {short_repr(timeout_s)}")
    if ranks > (most := most_ranks()):
        raise ValueError(
            f"ranks is {short_repr(ranks)}: this machine has memory and open files for {most:,} at most"
        )
    importable = (
        "<" not in getattr(function, "__qualname__", "<")
        and function.__module__ != "__main__"
    )
    if not callable(function) or not importable:
        what = f"{short_repr(function)} cannot be imported by other processes"
        raise ValueError(f"{what}: put it into a module, as a plain function")
    try:
        pickle.dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the arguments cannot be sent to other processes: {error}"
        ) from None


def _rank(
    channel: Connection, rank, ranks, folder, timeout_s, threads, function, args
) -> None:
    try:
        torch.set_num_threads(threads)
        join_group(folder, rank, ranks, timeout_s)
        channel.send_bytes(pickle.dumps(End("ok")))
        result = function(*args)
        comm.beat.does("is done")
        dist.barrier()  # none leaves while another still talks to it
        try:
            message = pickle.dumps(End("ok", result))
        except Exception as error:  # noqa: BLE001  pickling runs the result's own code
            what = f"its result, of type {type(result).__name__}, cannot be sent back"
            raise TypeError(f"{what}: {type(error).__name__}: {error}") from None
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  whatever a rank raises is reported to the caller
        message = pickle.dumps(end_of(error))
    channel.send_bytes(message)


def join_group(
    folder: str, rank: int, ranks: int, timeout_s: float, backend: str = "gloo"
) -> None:
    """Join the default group when all ranks are there; an exchange may take longer than
    ``timeout_s``, which the caller watches.

    The ranks find each other in ``folder``, which they make, and where each also writes
    its ``Progress``.
    """
    os.makedirs(folder, 0o700, exist_ok=True)
    comm.beat = Beat(Path(folder, f"{rank}.beat"))
    # The loopback interface, where none is asked for. gloo else looks up the host's
    # name, which may lead nowhere.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    limit = timedelta(seconds=JOIN_S + timeout_s)  # the caller's own time is up first
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=limit
    )
    store.set(f"joined/{rank}", "")
    # None goes on, and may leave, while another still joins.
    store.wait([f"joined/{other}" for other in range(ranks)], limit)
    comm.beat.begins()
