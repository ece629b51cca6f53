"""Runs a function on p ranks, as processes of this machine: what each returns, or which rank failed, and how.

``launch`` is meant for tests and small notebook cells. ``collect`` and ``culprit`` also serve the ranks that measure.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mode

import torch
import torch.distributed as dist

from ..checks import LARGEST, check_int, is_real, short_repr
from ..hardware import Probe
from ..hardware.detect import ram_bytes
from . import comm
from .processes import Ended, Process

JOIN_S = 60.0  # for all ranks to join; the time of the call begins after that
GRACE_S = 1.0  # for the others to report what they saw, once one rank has failed
LONGEST_S = 1_000_000  # poll(2), with which processes are waited for, counts milliseconds in 32 bits
RANK_BYTES, RANK_FILES = 8 << 20, 2  # what each rank needs at least: its memory, and open files of the caller
COMPILER = "torch._dynamo"  # a custom operator imports it at its first call, which takes seconds
ABSENT, WAITING = -2, -1  # instead of a number of exchanges: not started; waits for the others to join


class RankFailed(RuntimeError):
    """A rank failed: ``rank`` is the culprit, not the one that noticed."""

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


@dataclass
class End:
    """How a rank ended: "ok" with its pickled value, "error" or "network" with a message, "died" with an ``Ended``.

    ``culprit``: another rank that the error itself names.
    """

    kind: str
    value: object = None
    trace: str = ""
    culprit: int | None = None

    @classmethod
    def ok(cls, result: object) -> End:
        """The end of a rank whose function returned; raises TypeError for a result that cannot be pickled."""
        try:
            return cls("ok", pickle.dumps(result))
        except Exception as error:  # noqa: BLE001  pickling runs the result's own code
            what = f"its result, of type {type(result).__name__}, cannot be sent back"
            raise TypeError(f"{what}: {type(error).__name__}: {error}") from None

    @classmethod
    def of(cls, error: BaseException) -> End:
        """The end of a rank that an exception ended; "network" where it only shows that another rank has gone."""
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if is_communication_error(error):
            return cls("network", said)
        trace = "".join(traceback.format_exception(error))
        return cls("error", said, trace, getattr(error, "rank", None))


def is_communication_error(error: BaseException) -> bool:
    """Whether torch.distributed raised this error: another rank has gone or does not answer.

    gloo raises plain RuntimeErrors. They come from a call of torch.distributed or of ``comm``, or name gloo's source.
    """
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return module.startswith("torch.distributed") or module == comm.__name__ or "gloo/transport" in str(error)


class Beat:
    """How far a rank has come, in a file that its launcher reads: each call is a step.

    ABSENT, WAITING, 0 (joined), 1 (has begun one exchange), ...

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Beat(folder, 1)()
    ...     beats(folder, 2)
    [-2, -1]
    """

    FORMAT = struct.Struct("=q")

    def __init__(self, folder: Path | str, rank: int):
        self.file = os.open(Path(folder, f"{rank}.beat"), os.O_CREAT | os.O_WRONLY, 0o600)
        self.count = ABSENT - 1
        self()

    def __call__(self) -> None:
        self.count += 1
        os.pwrite(self.file, self.FORMAT.pack(self.count), 0)


def beats(folder: Path | str, ranks: int) -> list[int]:
    """The exchanges that each rank has begun; ABSENT where it has not started."""
    files = [Path(folder, f"{rank}.beat") for rank in range(ranks)]
    data = [file.read_bytes() if file.exists() else b"" for file in files]
    return [Beat.FORMAT.unpack(each)[0] if each else ABSENT for each in data]


def culprit(ends: dict[int, End], counts: list[int]) -> tuple[int, str] | None:
    """(rank, "died", "error", "silent" or "network") of the rank to blame; None where all are well.

    >>> culprit({0: End("network"), 2: End("network")}, [4, 3, 4])
    (1, 'silent')
    >>> culprit({}, [4, 5, 4])
    (1, 'silent')
    """
    first = {ends[rank].kind: rank for rank in sorted(ends, reverse=True)}
    silent = [rank for rank in range(len(counts)) if rank not in ends]
    if "died" in first:
        return first["died"], "died"
    if "error" in first:
        named = ends[first["error"]].culprit
        return first["error"] if named not in ends else named, "error"
    if silent:
        usual = mode(counts)  # one that is ahead of all others differs as much as one that is behind
        odd = [rank for rank in silent if counts[rank] != usual] if 2 * counts.count(usual) > len(counts) else []
        return min(odd or silent, key=lambda rank: counts[rank]), "silent"
    return (first["network"], "network") if "network" in first else None


def results(ends: dict[int, End], counts: list[int], timeout_s: float) -> list:
    """What the ranks returned, from how they ended and the exchanges that each has begun; raises RankFailed."""
    if found := culprit(ends, counts):
        raise _failure(*found, ends, counts, timeout_s)
    values = []
    for rank in range(len(counts)):
        try:
            values.append(pickle.loads(ends[rank].value))
        except Exception as error:  # noqa: BLE001  reading it runs the result's own code
            raise RankFailed(rank, f"returned what cannot be read back: {End.of(error).value}") from error
    return values


def _failure(rank: int, kind: str, ends: dict[int, End], counts: list[int], timeout_s: float) -> RankFailed:
    if kind == "silent" and counts[rank] < 0:
        return RankFailed(rank, f"has not joined within {JOIN_S:g} s")
    if kind == "silent":
        begun, most = counts[rank], max(count for other, count in enumerate(counts) if other != rank)
        return RankFailed(rank, f"hangs: after {timeout_s:g} s it has begun {begun} exchanges, others {most}")
    how = {"died": "", "network": "lost its peers: ", "error": "raised " if ends[rank].culprit is None else "differs: "}
    failure = RankFailed(rank, f"{how[kind]}{ends[rank].value}")
    if ends[rank].trace:
        failure.add_note(ends[rank].trace)
    return failure


def collect(
    processes: list[Process], timeout_s: float, joining: bool = False, read=lambda message: message
) -> dict[int, End]:
    """How each process ended, by rank: until all have, the time is up, or one has failed and a grace is over.

    ``read`` makes an End of a process's message. ``joining``: each sends None when it has joined, and only when all
    have does the time begin.
    """
    ends: dict[int, End] = {}
    absent = set(range(len(processes))) if joining else set()
    deadline = time.monotonic() + (JOIN_S if joining else timeout_s)
    while len(ends) < len(processes) and (left := deadline - time.monotonic()) > 0:
        channels = {process.channel: rank for rank, process in enumerate(processes) if rank not in ends}
        for channel in wait(list(channels), left):
            rank = channels[channel]
            try:
                message = processes[rank].receive()
            except Ended as ended:
                ends[rank] = End("died", ended)
            else:
                if message is None:
                    absent.discard(rank)
                    deadline = deadline if absent or ends else time.monotonic() + timeout_s
                    continue
                ends[rank] = read(message)
            if ends[rank].kind != "ok":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return ends


def launch(function: Callable, ranks: int, *args, timeout_s: float = 60.0, threads: int = 1) -> list:
    """``function(*args)`` on every rank of a gloo group; the results by rank.

    ``function`` must be importable by name; ``threads`` per rank; ``timeout_s`` for the whole call and for every
    exchange. Raises RankFailed that names the rank which raised, died, left early or hangs, and ValueError for what
    cannot run in other processes, as a function of a notebook or script, and for more ranks than this machine has
    memory for, at 8 MiB each, or may open files for, at two each. Nothing is left running, what the ranks have started
    included.

    >>> launch(torch.distributed.get_rank, 2)
    [0, 1]
    """
    _check(function, args, ranks, timeout_s, threads)
    processes: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
        try:
            for rank in range(ranks):
                job = rank, ranks, folder, timeout_s, threads, function, args
                processes.append(Process(_rank, *job, modules=(COMPILER, __name__)))
            ends = collect(processes, timeout_s, joining=True)
            counts = beats(folder, ranks)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
            for process in processes:
                process.end()
    return results(ends, counts, timeout_s)


def most_ranks() -> int:
    """The ranks that this machine could hold, by its memory and the files that a process may open."""
    memory, (files, _) = ram_bytes(Probe().read), resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = (memory and memory // RANK_BYTES, files > 0 and files // RANK_FILES)  # none where not known
    return min(filter(None, limits), default=LARGEST)


def _check(function: Callable, args: tuple, ranks: int, timeout_s: float, threads: int) -> None:
    check_int("ranks", ranks)
    check_int("threads", threads)
    if not is_real(timeout_s) or timeout_s > LONGEST_S:
        raise ValueError(f"timeout_s must be a number of seconds up to {LONGEST_S:,}, got {short_repr(timeout_s)}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
    if ranks > (most := most_ranks()):
        raise ValueError(f"ranks is {short_repr(ranks)}: this machine has memory and open files for {most:,} at most")
    if not callable(function) or not hasattr(function, "__module__"):
        raise ValueError(f"there is no function to call in {short_repr(function)}")
    try:
        pickle.dumps(args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"the arguments cannot be sent to other processes: {error}") from None
    if function.__module__ == "__main__" or "<" in getattr(function, "__qualname__", "<"):
        raise ValueError(f"{function} cannot be imported by other processes: put it into a module, as a plain function")


def _rank(channel: Connection, rank, ranks, folder, timeout_s, threads, function, args) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    beat = Beat(folder, rank)
    try:
        torch.set_num_threads(threads)
        join_group(dist.FileStore(str(Path(folder, "store")), ranks), rank, ranks, timeout_s, beat)
        channel.send_bytes(pickle.dumps(None))
        result = function(*args)
        dist.barrier()  # none leaves while another still talks to it
        end = End.ok(result)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  whatever a rank raises is reported to the caller
        end = End.of(error)
    channel.send_bytes(pickle.dumps(end))
    if dist.is_initialized():
        dist.destroy_process_group()


def loopback() -> str:
    """This machine's loopback interface, for gloo, which else looks up the host's name: that may lead nowhere."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def join_group(store: dist.Store, rank: int, ranks: int, timeout_s: float, beat: Beat, backend: str = "gloo") -> None:
    """Join the default group when all ranks are there; ``timeout_s`` for each exchange from then on."""
    importlib.import_module(COMPILER)
    store.set(f"here/{rank}", "")
    beat()
    store.wait([f"here/{other}" for other in range(ranks)], timedelta(seconds=JOIN_S))
    group = dist.PrefixStore("group", store)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=group, rank=rank, world_size=ranks, timeout=limit)
    beat()
    comm.on_post = beat
