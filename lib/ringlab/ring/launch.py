"""Functions in other processes of this machine: single ones, and the ranks of a group.

One server process imports torch once and forks all others, within milliseconds. A
``Process`` has a channel for messages. It ends when the channel closes, however its
caller ended. ``launch`` runs a function on p ranks and returns what each returned, or
raises which rank failed, and how. ``measure`` runs its workers by the same parts.
``joined`` is for ranks that torchrun started: a fault ends all of them in time, on
every host.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions keep, as a default, the group that is there when they are imported.
# torch's operators would import it at our first call; then destroy_process_group ended
# no thread of the group, which aborted some processes at their end.
import torch.distributed.nn  # noqa: F401

from ..checks import LARGEST, check_int, is_real, short_repr
from ..hardware import Probe
from ..hardware.detect import ram_bytes
from . import comm, watch
from .group import PlanMismatch
from .watch import (
    GRACE_S,
    Beat,
    End,
    Progress,
    RankFailed,
    culprit,
    describe,
    how_ended,
)

STARTUP_S = 180.0  # for a first import of torch from a cold disk
JOIN_S = 60.0  # for all ranks to join; the time of the call begins after that
LONGEST_S = 1_000_000  # poll(2), with which processes are waited for, counts milliseconds in 32 bits
RANK_BYTES, RANK_FILES = (
    8 << 20,
    2,
)  # what each rank needs at least: its memory, and open files of the caller
COMPILER = "torch._dynamo"  # a custom operator imports it at its first call, which takes seconds

# --------------------------------------------------------------------------------------
# processes


class Ended(RuntimeError):
    """A process ended without a message: ``code`` is its exit code or minus the signal,
    ``said`` its last line.

    >>> print(Ended(-9), Ended(0, "last words"), sep="; ")
    was ended by SIGKILL before it was done; left with exit code 0 before it was done: last words
    """

    def __init__(self, code: int, said: str = ""):
        super().__init__(how_ended(code) + (f": {said}" if said else ""))
        self.code, self.said = code, said


class ForkServer:
    """A fresh interpreter that imports torch and forks; it runs no operator, for
    threads and CUDA survive no fork.

    A request is a line of JSON: a number, a process to wait for or None to fork one,
    and the modules to import first. The three files of a process to fork (channel,
    stdout, stderr) come along as descriptors.
    """

    COMMAND = [
        sys.executable,
        "-c",
        "from ringlab.ring.launch import serve_forks; serve_forks()",
    ]
    REPLY = struct.Struct(
        "=qq"
    )  # the number of the request, and the process id or the exit code

    def __init__(self):
        ours, theirs = socket.socketpair()
        paths = [
            str(Path(__file__).resolve().parents[2]),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        self.stderr, self.socket, self.number = tempfile.TemporaryFile(), ours, 0
        self.owner, self.lock = os.getpid(), threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                self.COMMAND,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=self.stderr,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )

    def ask(
        self, pid: int | None, modules: tuple[str, ...] = (), descriptors=()
    ) -> int:
        """The id of a new process, or the exit code of process ``pid``; raises Ended
        where the server has ended.
        """
        with self.lock, suppress(OSError):
            self.number += 1
            request = json.dumps([self.number, pid, modules]).encode() + b"\n"
            self.socket.settimeout(STARTUP_S)
            socket.send_fds(self.socket, [request], descriptors)
            while reply := self.socket.recv(self.REPLY.size):
                number, value = self.REPLY.unpack(reply)
                if (
                    number == self.number
                ):  # an earlier request may have been interrupted
                    return value
        self.process.kill()
        raise Ended(self.process.wait(), last_line(self.stderr))


_server: ForkServer | None = None
_starting = threading.Lock()


class Process:
    """``target(channel, *args)`` in a process of its own, with the caller's path,
    environment and folder.

    ``target`` and ``args`` are pickled. ``modules`` are imported by the server, once
    for all processes. ``output``: where stdout and stderr go. Raises Ended where no
    process can be started.
    """

    def __init__(
        self,
        target: Callable,
        *args,
        modules: tuple[str, ...] = (),
        output: tuple[int, int] = (1, 2),
    ):
        global _server
        with _starting:
            if (
                _server is None
                or _server.owner != os.getpid()
                or _server.process.poll() is not None
            ):
                _server = ForkServer()
            self.server = _server
        ours, theirs = socket.socketpair()
        self.channel = Connection(ours.detach())
        with theirs:
            self.pid = self.server.ask(None, modules, (theirs.fileno(), *output))
        self.send(
            (sys.path, dict(os.environ), os.getcwd(), pickle.dumps((target, args)))
        )

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
            pid, self.pid = self.pid, None
            try:
                self.code = self.server.ask(pid)
            except Ended:  # the server itself has gone, and nobody knows
                self.code = -signal.SIGKILL
        return self.code


def last_line(file) -> str:
    """The last line of a file that a process wrote to."""
    file.seek(0)
    lines = [
        line.strip()
        for line in file.read().decode(errors="replace").splitlines()
        if line.strip()
    ]
    return lines[-1][:300] if lines else ""


def serve_forks() -> None:
    """The server: fork and wait as its stdin asks, until its owner has gone."""
    owner = socket.socket(fileno=0)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the owner, which then ends the processes
    while True:
        data, descriptors, _, _ = socket.recv_fds(owner, 1 << 16, 3)
        if not data:
            return
        for number, pid, modules in map(json.loads, data.splitlines()):
            if pid is None:
                for name in modules:
                    importlib.import_module(name)
                gc.freeze()  # collecting what was imported takes 0.1 s and copies its pages
                value = os.fork() or _run_forked(owner, *descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
            else:
                value = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            owner.sendall(ForkServer.REPLY.pack(number, value))


def _run_forked(owner: socket.socket, channel: int, stdout: int, stderr: int) -> None:
    """Run what comes over the channel, in the forked process, and leave it."""
    code = 1
    try:
        os.setsid()  # a group, so that a kill takes its children too
        owner.close()
        for source, target in (
            (os.open(os.devnull, os.O_RDONLY), 0),
            (stdout, 1),
            (stderr, 2),
        ):
            os.dup2(source, target)
        threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
        channel = Connection(channel)
        sys.path[:], environment, folder, job = pickle.loads(channel.recv_bytes())
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        target, args = pickle.loads(job)
        target(channel, *args)
        code = 0
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException:  # noqa: BLE001  a fork may not return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(stop: SystemExit) -> int:
    return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _end_with(channel: int) -> None:
    """End this process when the other end of its channel closes."""
    hangup = select.poll()
    hangup.register(channel, 0)
    hangup.poll()
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


def collect(processes: list[Process], timeout_s: float) -> dict[int, End]:
    """The next message of each process, an End, by rank: until all came, the time is
    up, or one has failed and a grace is over.
    """
    ends: dict[int, End] = {}
    deadline = time.monotonic() + timeout_s
    while len(ends) < len(processes) and (left := deadline - time.monotonic()) > 0:
        channels = {
            process.channel: rank
            for rank, process in enumerate(processes)
            if rank not in ends
        }
        for channel in wait(list(channels), left):
            rank = channels[channel]
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
    return ends


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
    machine has memory for, at 8 MiB each, or may open files for, at two each. Nothing
    is left running, what the ranks have started included.

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
            ends = collect(
                processes, JOIN_S
            )  # a rank's first message: it has joined. Then the time begins.
            if not culprit(ends, progress_of(folder, processes)):
                ends = collect(processes, timeout_s)
            progress = progress_of(folder, processes)
        finally:
            for process in processes:
                process.end()
    if found := culprit(ends, progress):
        if (
            found[0] is not None
            and progress[found[0]].begun < 0
            and found[0] not in ends
        ):
            raise RankFailed(
                found[0], f"rank {found[0]} has not joined within {JOIN_S:g} s"
            )
        raise describe(found, ends, progress, timeout_s)
    return [ends[rank].value for rank in range(ranks)]


def most_ranks() -> int:
    """The ranks that this machine could hold, by its memory and the files that a
    process may open.
    """
    memory, (files, _) = (
        ram_bytes(Probe().read),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    limits = (
        memory and memory // RANK_BYTES,
        files > 0 and files // RANK_FILES,
    )  # none where not known
    return min(filter(None, limits), default=LARGEST)


def _check(
    function: Callable, args: tuple, ranks: int, timeout_s: float, threads: int
) -> None:
    check_int("ranks", ranks)
    check_int("threads", threads)
    if not is_real(timeout_s) or not 0 < timeout_s <= LONGEST_S:
        wanted = f"timeout_s must be a positive number of seconds up to {LONGEST_S:,}"
        raise ValueError(f"{wanted}, got {short_repr(timeout_s)}")
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
    if dist.is_initialized():
        dist.destroy_process_group()


def join_group(
    folder: str, rank: int, ranks: int, timeout_s: float, backend: str = "gloo"
) -> None:
    """Join the default group when all ranks are there; ``timeout_s`` for each exchange
    from then on.

    The ranks find each other in ``folder``, where each also writes its ``Progress``.
    """
    comm.beat = Beat(open(Path(folder, f"{rank}.beat"), "wb"))
    # The loopback interface, where none is asked for. gloo else looks up the host's
    # name, which may lead nowhere.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = dist.FileStore(str(Path(folder, "store")), ranks)

    def wait_for_all(step: str) -> None:
        store.set(f"{step}/{rank}", "")
        store.wait(
            [f"{step}/{other}" for other in range(ranks)], timedelta(seconds=JOIN_S)
        )

    wait_for_all("here")
    group, limit = dist.PrefixStore("group", store), timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, store=group, rank=rank, world_size=ranks, timeout=limit
    )
    wait_for_all("joined")  # none goes on, and may leave, while another still joins
    comm.beat.begins()


def progress_of(folder: str, processes: list[Process]) -> list[Progress]:
    """How far each rank is."""
    return [
        Progress.read(Path(folder, f"{rank}.beat"), process.pid)
        for rank, process in enumerate(processes)
    ]


# --------------------------------------------------------------------------------------
# ranks of torchrun


@contextmanager
def joined(backend: str = "gloo", timeout_s: float = 60.0) -> Iterator[None]:
    """Join torch's default group inside, in place of ``init_process_group``, and leave
    it at the end.

    If a rank, a host or a link fails, the ranks of all hosts end within ``timeout_s`` +
    2 seconds, and torchrun if it starts none anew. An exchange may take ``timeout_s`` -
    1 seconds, and so long may a link be cut; the rest is for ending. Ranks that wait
    for the failed one raise RankFailed, which names it (``rank`` is None if a host does
    not answer, or nobody can know which rank is right). Those that do not wait get
    SIGTERM, then SIGKILL. A small process beside each rank watches it, by Linux's
    /proc. Raises ValueError for a ``timeout_s`` below 2.

    >>> with joined():                                      # doctest: +SKIP
    ...     out = ringlab.attention(q, k, v, pattern, group=torch.distributed.group.WORLD)
    """
    if not is_real(timeout_s) or not 2 <= timeout_s <= LONGEST_S:
        raise ValueError(
            f"timeout_s must be seconds from 2 to {LONGEST_S:,}, got {short_repr(timeout_s)}"
        )
    limit_s = timeout_s - 1
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    family = (
        {"family": socket.AF_INET6, "dualstack_ipv6": True}
        if socket.has_dualstack_ipv6()
        else {}
    )
    listener = (
        socket.create_server(("", 0), backlog=ranks, **family) if rank == 0 else None
    )
    told = [None] * ranks
    where = listener and (listener.getsockname()[1], secrets.token_hex(8))
    dist.all_gather_object(told, (socket.gethostname(), where))
    hosts, ((port, token), *_) = zip(*told)
    (ours, theirs), file = socket.socketpair(), tempfile.TemporaryFile()
    comm.beat = Beat(file)
    comm.beat.begins()  # with the first exchange, which is done
    about = {
        "rank": rank,
        "hosts": hosts,
        "pid": os.getpid(),
        "timeout_s": limit_s,
        "token": token,
        "port": port,
        "channel": theirs.fileno(),
        "progress": file.fileno(),
        "listener": listener and listener.fileno(),
        "launcher": os.getppid()
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() > 1
        else None,
    }
    passed = [
        about[name]
        for name in ("channel", "progress", "listener")
        if about[name] is not None
    ]
    command = [sys.executable, "-I", "-S", watch.__file__]
    with ours:
        with theirs, listener or theirs:
            monitor = subprocess.Popen(
                command, pass_fds=passed, stdin=subprocess.PIPE, start_new_session=True
            )
            with (
                monitor.stdin
            ):  # its command everybody can read, and the token is secret
                monitor.stdin.write(json.dumps(about).encode())
        try:
            yield
            comm.beat.does("is done")
            dist.barrier()  # none leaves while another still talks to it
        except SystemExit as stop:
            _found(ours, End("died", how_ended(_exit_code(stop))), timeout_s)
            raise
        except BaseException as error:
            own = end_of(error)
            found = _found(ours, own, timeout_s)
            if found is None or own.kind == "error" and found[0] in (rank, None):
                raise
            failure = RankFailed(*found[:2])
            failure.add_note(found[2])
            raise failure from error
        finally:
            comm.beat = None
        with suppress(OSError):  # the monitor was ended, and nothing else is wrong
            ours.sendall(b'{"kind": "ok"}\n')
    dist.destroy_process_group()


def _found(channel: socket.socket, end: End, timeout_s: float) -> list | None:
    """Tell the monitor how this rank ended; the rank that it found, the message and the
    traceback there.
    """
    channel.settimeout(timeout_s + 2)
    try:
        channel.sendall(
            json.dumps(vars(end) | {"trace": end.trace[-20_000:]}).encode() + b"\n"
        )
        return json.loads(channel.makefile().readline() or "null")
    except OSError:
        return None
