"""The runner's ends of the processes it starts: a host that forks workers, and a handle on each worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from . import provenance

STARTUP_S = 180.0  # a first import of torch from a cold disk


class TimedOut(Exception):
    """No reply within the time."""


class Died(Exception):
    """The process ended: ``status`` and ``reason`` for its point, ``final`` where trying again would not help."""

    def __init__(self, status: str, reason: str, final: bool):
        super().__init__(reason)
        self.status, self.reason, self.final = status, reason, final


class Line:
    """JSON lines over a socket, each with a deadline."""

    def __init__(self, end: socket.socket):
        self.socket, self.rest = end, b""

    def send(self, message: dict, descriptors=()) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            if descriptors:
                socket.send_fds(self.socket, [data], descriptors)
            else:
                self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):  # it died; receiving tells
            pass

    def receive(self, timeout_s: float) -> dict | None:
        """The next message, or None where the other end has closed; raises TimedOut."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self.rest:
            self.socket.settimeout(max(1e-3, end - time.monotonic()))
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                raise TimedOut from None
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)


class Host:
    """A fresh interpreter that finds this package and forks workers; in a session of its own, out of Ctrl-C's way."""

    def __init__(self, command=(sys.executable, "-m", "ringlab.measure.host")):
        ours, theirs = socket.socketpair()
        paths = [str(provenance.PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.stderr = tempfile.TemporaryFile()
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=self.stderr, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        self.line = Line(ours)

    def ask(self, message: dict, descriptors=()) -> dict:
        """Raises Died where the host has ended, which no point survives."""
        if self.line.socket.fileno() < 0:
            raise Died("crashed", "the process that starts workers has ended", False)
        self.line.send(message, descriptors)
        try:
            reply = self.line.receive(STARTUP_S)
        except TimedOut:
            raise Died("crashed", f"no answer within {STARTUP_S:g} s", False) from None
        if reply is None:
            raise Died(*autopsy(self.process.wait(), _tail(self.stderr)))
        return reply

    def close(self) -> None:
        self.line.socket.close()
        self.process.kill()
        self.process.wait()
        self.stderr.close()


class Handle:
    """One worker process; ``ask`` sends a command and waits for its reply."""

    def __init__(self, host: Host, settings: dict):
        ours, theirs = socket.socketpair()
        self.host, self.line, self.pid = host, Line(ours), None
        self.stderr = tempfile.TemporaryFile()
        with theirs:
            request = {"do": "spawn", "settings": settings}
            self.pid = host.ask(request, [theirs.fileno(), self.stderr.fileno()])["pid"]

    def ask(self, command: str, timeout_s: float, **arguments) -> dict:
        """The reply; raises TimedOut, or Died with the reason. The process is gone after either."""
        self.send(command, **arguments)
        return self.reply(timeout_s)

    def send(self, command: str, **arguments) -> None:
        self.line.send({"do": command, **arguments})

    def reply(self, timeout_s: float) -> dict:
        try:
            reply = self.line.receive(timeout_s)
        except TimedOut:
            self.close()
            raise
        if reply is None:
            said, code = _tail(self.stderr), self.close()
            raise Died(*autopsy(-signal.SIGKILL if code is None else code, said))
        return reply

    def close(self) -> int | None:
        """End the process and its children; its exit code, None where it had gone before."""
        if self.pid is None:
            return None
        self.line.socket.close()  # a worker that waits ends by itself; one that is busy is killed
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has not come so far as to lead a group
            pass
        pid, self.pid = self.pid, None
        self.stderr.close()
        try:
            return self.host.ask({"do": "reap", "pid": pid})["code"]
        except Died:  # the host itself has gone; the system reaps what it left
            return None


def autopsy(code: int, said: str) -> tuple[str, str, bool]:
    """(status, reason, final) of a process that ended by itself."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return "crashed", f"the worker was ended by {name}{hint}", False
    if any(s in said.lower() for s in ("memoryerror", "can't allocate memory", "out of memory")):
        return "oom", said, True
    return "crashed", f"the worker ended with exit code {code}" + (f": {said}" if said else ""), False


def _tail(stderr) -> str:
    """The last line that a process wrote to stderr."""
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
