"""The process that forks workers: ``python -m ringlab.measure.host``, with a Unix socket as its stdin.

torch is imported once, here, and every worker starts as a copy within milliseconds, in which the garbage collector
leaves alone what was imported: looking through it takes 0.1 s each time, and copies its pages. The host itself runs no
operator and never touches a GPU: threads and CUDA do not survive a fork.

A request is one JSON line: {"do": "spawn", "settings": ...} with the worker's channel and stderr as file descriptors,
answered by {"pid": ...}; or {"do": "reap", "pid": ...}, answered by {"code": exit code, or minus the signal}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback

from ..ring import blame
from . import worker


def main() -> None:
    runner = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's, which then ends us
    while True:
        line, descriptors, _, _ = socket.recv_fds(runner, 1 << 20, 2)
        if not line:
            return
        request = json.loads(line)
        if request["do"] == "reap":
            _, status = os.waitpid(request["pid"], 0)
            reply = {"code": os.waitstatus_to_exitcode(status)}
        else:
            if "rank" in request["settings"]:
                importlib.import_module(blame.COMPILER)  # once here, not in every rank
            gc.freeze()
            reply = {"pid": _spawn(runner, request["settings"], *descriptors)}
        runner.sendall(json.dumps(reply).encode() + b"\n")


def _spawn(runner: socket.socket, settings: dict, channel: int, stderr: int) -> int:
    pid = os.fork()
    if pid:
        os.close(channel)
        os.close(stderr)
        return pid
    code = 1
    try:
        os.setsid()  # a group of its own, so that a kill takes its children too
        runner.close()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(stderr, 1)  # whatever a kernel prints
        os.dup2(stderr, 2)
        worker.serve(socket.socket(fileno=channel), settings)
    except BaseException:  # noqa: BLE001  a fork may not return into the host's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
