"""Runs functions in other processes of this machine, each with a channel for messages.

One server process imports torch once and forks all others, within milliseconds. A process ends when its channel
closes, however its caller ended. ``launch`` runs the ranks of a group this way, and ``measure`` its workers.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

STARTUP_S = 180.0  # for a first import of torch from a cold disk


class Ended(RuntimeError):
    """A process ended without a message: ``code`` is its exit code or minus the signal, ``said`` its last line."""

    def __init__(self, code: int, said: str = ""):
        super().__init__(death(code, said))
        self.code, self.said = code, said


def death(code: int | None, said: str = "") -> str:
    """How a process ended, by its exit code (negative: the signal).

    >>> death(-9), death(0, "last words")
    ('was ended by SIGKILL before it was done', 'left with exit code 0 before it was done: last words')
    """
    if code is not None and code < 0:
        how = f"was ended by {signal_name(-code)}"
    else:
        how = "ended" if code is None else f"left with exit code {code}"
    return f"{how} before it was done" + (f": {said}" if said else "")


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class ForkServer:
    """A fresh interpreter that imports torch and forks; it runs no operator, for threads and CUDA survive no fork.

    A request is a line of JSON: a number, a process to wait for or None to fork one, and the modules to import first.
    The three files of a process to fork (channel, stdout, stderr) come along as descriptors.
    """

    COMMAND = [sys.executable, "-c", "from ringlab.ring.processes import serve_forks; serve_forks()"]
    REPLY = struct.Struct("=qq")  # the number of the request, and the process id or the exit code

    def __init__(self):
        ours, theirs = socket.socketpair()
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.stderr, self.socket, self.number = tempfile.TemporaryFile(), ours, 0
        self.owner, self.lock = os.getpid(), threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                self.COMMAND, stdin=theirs, stdout=subprocess.DEVNULL, stderr=self.stderr, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip

    def ask(self, pid: int | None, modules: tuple[str, ...] = (), descriptors=()) -> int:
        """The id of a new process, or the exit code of process ``pid``; raises Ended where the server has ended."""
        with self.lock, suppress(OSError):
            self.number += 1
            request = json.dumps([self.number, pid, modules]).encode() + b"\n"
            self.socket.settimeout(STARTUP_S)
            socket.send_fds(self.socket, [request], descriptors)
            while reply := self.socket.recv(self.REPLY.size):
                number, value = self.REPLY.unpack(reply)
                if number == self.number:  # an earlier request may have been interrupted
                    return value
        self.process.kill()
        raise Ended(self.process.wait(), last_line(self.stderr))


_server: ForkServer | None = None
_starting = threading.Lock()


def _running_server() -> ForkServer:
    """This process's server, started if it is not there."""
    global _server
    with _starting:
        if _server is None or _server.owner != os.getpid() or _server.process.poll() is not None:
            _server = ForkServer()
        return _server


class Process:
    """``target(channel, *args)`` in a process of its own, with the caller's path, environment and folder.

    ``target`` and ``args`` are pickled. ``modules`` are imported by the server, once for all processes. ``output``:
    where stdout and stderr go. Raises Ended where no process can be started.
    """

    def __init__(self, target: Callable, *args, modules: tuple[str, ...] = (), output: tuple[int, int] = (1, 2)):
        ours, theirs = socket.socketpair()
        self.channel, self.server = Connection(ours.detach()), _running_server()
        with theirs:
            self.pid = self.server.ask(None, modules, (theirs.fileno(), *output))
        self.send((sys.path, dict(os.environ), os.getcwd(), pickle.dumps((target, args))))

    def send(self, message) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which ``receive`` reports
            self.channel.send_bytes(pickle.dumps(message))

    def receive(self):
        """The next message; raises Ended where there is none any more."""
        try:
            return pickle.loads(self.channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise Ended(self.end()) from None

    def kill(self) -> None:
        """End the process and all that it has started."""
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with suppress(ProcessLookupError):
                return kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process where it still runs; its exit code."""
        if self.pid is not None:
            self.kill()
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
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def serve_forks() -> None:
    """The server: fork and wait as its stdin asks, until its owner has gone."""
    owner = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which then ends the processes
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
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
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
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  a fork may not return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with(channel: int) -> None:
    """End this process when the other end of its channel closes."""
    hangup = select.poll()
    hangup.register(channel, 0)
    hangup.poll()
    os._exit(1)
