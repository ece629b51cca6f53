"""Ranks as processes: how they meet, what each leaves in a folder for its launcher, and which of them is to blame.

A rank keeps two files: ``<rank>.beat``, its process id and the exchanges it has begun, and ``<rank>.end``, how it
ended, written under another name and then renamed, so that nobody reads half of it.

Ranks as processes of this machine: run a function on p gloo ranks, get what each returns, or the culprit's name.

A forkserver that has imported torch starts them in a fraction of a second. Meant for tests and small notebook cells;
benchmarks, GPUs and several machines are started by ``elastic``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mode

import torch
import torch.distributed as dist

from ..checks import LARGEST, check_int, is_real, short_repr
from ..hardware import Probe
from ..hardware.detect import ram_bytes
from . import comm

JOIN_S = 60.0  # for all ranks to start and meet; only then their time begins
GRACE_S = 1.0  # for the others to say what they saw, once one rank has failed
ABSENT, WAITING = -2, -1  # instead of a count of exchanges: not come yet; at the meeting place
COMPILER = "torch._dynamo"  # a custom operator loads it at its first call: seconds, to be spent before any time counts
_BEAT = struct.Struct("=qq")


class RankFailed(RuntimeError):
    """A rank failed: ``rank`` is the culprit, not the one that noticed."""

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


@dataclass
class End:
    """How a rank ended: "ok" with its value, pickled, "error", "network" or "died" with what is known of it.

    "stopped": it was told to end, because another rank had. ``culprit``: another rank that the error itself names.
    """

    kind: str
    value: object = None
    trace: str = ""
    culprit: int | None = None

    @classmethod
    def ok(cls, result: object) -> End:
        """The end of a rank whose function returned; pickled here, where what cannot be is this rank's own error."""
        try:
            return cls("ok", pickle.dumps(result))
        except Exception as error:  # noqa: BLE001  pickling runs the result's own code
            what = f"its result, of type {type(result).__name__}, cannot be sent back"
            raise TypeError(f"{what}: {type(error).__name__}: {error}") from None

    @classmethod
    def of(cls, error: BaseException) -> End:
        """The end of a rank that an exception ended; those of the network only tell that another has gone."""
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if notices_another(error):
            return cls("network", said)
        trace = "".join(traceback.format_exception(error))
        return cls("error", said, trace, getattr(error, "rank", None))


def notices_another(error: BaseException) -> bool:
    """Whether an exception is what a rank sees when another one has gone or does not answer."""
    words = ("gloo", "nccl", "connection", "timed out", "peer")
    plain = type(error) is RuntimeError and any(word in str(error).lower() for word in words)
    return plain or isinstance(error, dist.DistError)


class Beat:
    """How far a rank has come, kept where its launcher can read it: each call is a step.

    ABSENT, WAITING, 0 (joined), 1 (has begun one exchange), ...

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Beat(folder, 1)()
    ...     beats(folder, 2)
    [-2, -1]
    """

    def __init__(self, folder: Path | str, rank: int):
        self.file = os.open(Path(folder, f"{rank}.beat"), os.O_CREAT | os.O_WRONLY, 0o600)
        self.count = ABSENT - 1
        self()

    def __call__(self) -> None:
        self.count += 1
        os.pwrite(self.file, _BEAT.pack(os.getpid(), self.count), 0)


def beats(folder: Path | str, ranks: int) -> list[int]:
    """The exchanges that each rank has begun; ABSENT where it has not joined."""
    return [_beat(folder, rank)[1] for rank in range(ranks)]


def process_of(folder: Path | str, rank: int) -> int | None:
    """The process id of a rank, None where it has not come so far as to write it."""
    return _beat(folder, rank)[0]


def _beat(folder, rank: int) -> tuple[int | None, int]:
    try:
        data = Path(folder, f"{rank}.beat").read_bytes()
    except FileNotFoundError:
        return None, ABSENT
    return _BEAT.unpack(data) if len(data) == _BEAT.size else (None, ABSENT)


def write_end(folder: Path | str, rank: int, end: End) -> None:
    partial, whole = Path(folder, f"{rank}.end.partial"), Path(folder, f"{rank}.end")
    partial.write_bytes(pickle.dumps(end))
    partial.replace(whole)


def read_ends(folder: Path | str, ranks: int) -> dict[int, End]:
    """What the ranks have left so far."""
    paths = {rank: Path(folder, f"{rank}.end") for rank in range(ranks)}
    return {rank: pickle.loads(path.read_bytes()) for rank, path in paths.items() if path.exists()}


def loopback() -> str:
    """This machine's loopback interface, for gloo, which else looks up the host's name: that may lead nowhere."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def meet(store: dist.Store, rank: int, ranks: int, timeout_s: float, beat: Beat, backend: str = "gloo") -> None:
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


def results(ends: dict[int, End], counts: list[int], timeout_s: float) -> list:
    """What the ranks returned; raises RankFailed as ``blame`` does, and for what cannot be read back."""
    blame(ends, counts, timeout_s)
    found = []
    for rank in range(len(counts)):
        try:
            found.append(pickle.loads(ends[rank].value))
        except Exception as error:  # noqa: BLE001  reading it runs the result's own code
            raise RankFailed(rank, f"returned what cannot be read back: {End.of(error).value}") from error
    return found


def blame(ends: dict[int, End], counts: list[int], timeout_s: float) -> None:
    """Raise RankFailed for the culprit: who died, else who raised, else who hangs, and never who only noticed it.

    ``ends`` of the ranks that have ended, ``counts`` of the exchanges that each rank has begun.
    """
    found = culprit(ends, counts)
    if found is None:
        return
    rank, kind = found
    if kind == "died":
        raise RankFailed(rank, ends[rank].value)
    if kind == "silent" and counts[rank] < 0:
        raise RankFailed(rank, f"has not joined within {JOIN_S:g} s")
    if kind == "silent":
        begun, most = counts[rank], max(count for other, count in enumerate(counts) if other != rank)
        raise RankFailed(rank, f"hangs: after {timeout_s:g} s it has begun {begun} exchanges, others {most}")
    if kind == "network":
        raise RankFailed(rank, f"lost its peers: {ends[rank].value}")
    named = ends[rank].culprit is not None
    failure = RankFailed(rank, f"{'differs:' if named else 'raised'} {ends[rank].value}")
    failure.add_note(ends[rank].trace)
    raise failure


def culprit(ends: dict[int, End], counts: list[int]) -> tuple[int, str] | None:
    """(rank, "died", "error", "silent" or "network") of the rank to blame; None where all are well.

    >>> culprit({0: End("network"), 2: End("network")}, [4, 3, 4])
    (1, 'silent')
    >>> culprit({}, [4, 5, 4])
    (1, 'silent')
    """
    ends = {rank: end for rank, end in sorted(ends.items()) if end.kind != "stopped"}
    first = {end.kind: rank for rank, end in reversed(ends.items())}
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


def death(code: int | None, said: str = "") -> str:
    """How a process ended that left no word, by its exit code (negative: the signal), for a message.

    >>> death(-9), death(0, "last words")
    ('was ended by SIGKILL before it was done', 'left with exit code 0 before it was done: last words')
    """
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = "ended" if code is None else f"left with exit code {code}"
    return f"{how} before it was done" + (f": {said}" if said else "")


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
    context.set_forkserver_preload(["torch", COMPILER, "ringlab.ring.launch"])
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
            counts = beats(folder, ranks)
        finally:
            for process in processes:
                _kill(process.pid)
            for process in processes:
                process.join()
    return results(ends, counts, timeout_s)


def checked(function: Callable, args: tuple, ranks: int, timeout_s: float, threads: int) -> None:
    """Raise ValueError unless other processes can run a function that they import by its name."""
    checked_numbers(ranks, timeout_s, threads)
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


def most_ranks() -> int:
    """The ranks that this machine could hold, by its memory and the files that a process may open."""
    memory, (files, _) = ram_bytes(Probe().read), resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = (memory and memory // RANK_BYTES, files > 0 and files // RANK_FILES)  # none where not known
    return min(filter(None, limits), default=LARGEST)


def checked_numbers(ranks: int, timeout_s: float, threads: int = 1) -> None:
    """Raise ValueError for counts that are none, and for a time that cannot be waited for."""
    for name, value in (("ranks", ranks), ("threads", threads)):
        check_int(name, value)
    if not is_real(timeout_s) or timeout_s > LONGEST_S:
        raise ValueError(f"timeout_s must be a number of seconds up to {LONGEST_S:,}, got {short_repr(timeout_s)}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")


def _listen(processes, pipes, folder: str, timeout_s: float) -> dict[int, End]:
    """What each rank said until all have ended, one has failed (and a grace is over), or the time is up."""
    ends: dict[int, End] = {}
    joining, deadline = True, time.monotonic() + JOIN_S
    while len(ends) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        if joining and min(beats(folder, len(pipes))) >= 0:
            joining, left = False, timeout_s
            deadline = min(time.monotonic() + timeout_s, deadline if ends else float("inf"))
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in ends}
        for pipe in wait(list(open_pipes), 0.02 if joining else left):
            rank = open_pipes[pipe]
            try:
                ends[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):  # it ended without a word
                processes[rank].join(GRACE_S)
                code = processes[rank].exitcode
                unmet = code == 1 and process_of(folder, rank) is None
                ends[rank] = End("died", death(code, f"it never began; {GUARD}" if unmet else ""))
            if ends[rank].kind != "ok":
                joining, deadline = False, min(deadline, time.monotonic() + GRACE_S)
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
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    beat = Beat(folder, rank)
    try:
        torch.set_num_threads(threads)
        meet(dist.FileStore(str(Path(folder, "store")), ranks), rank, ranks, timeout_s, beat)
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
