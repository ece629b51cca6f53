"""Ranks that torchrun started: a fault ends all of them in time, on every host, and the failed rank is named."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

# Its functions keep, as a default, the group that is there when they are imported. torch's operators would import it at
# our first call; then destroy_process_group ended no thread of the group, which aborted some processes at their end.
import torch.distributed.nn  # noqa: F401

from ..checks import is_real, short_repr
from . import comm, watch
from .launch import LONGEST_S, end_of
from .watch import Beat, End, RankFailed, how_ended


@contextmanager
def joined(backend: str = "gloo", timeout_s: float = 60.0) -> Iterator[None]:
    """Join torch's default group inside, in place of ``init_process_group``, and leave it at the end.

    If a rank, a host or a link fails, the ranks of all hosts end within ``timeout_s`` + 2 seconds, and torchrun if it
    starts none anew. An exchange may take ``timeout_s`` - 1 seconds, and so long may a link be cut; the rest is for
    ending. Ranks that wait for the failed one raise RankFailed, which names it (``rank`` is None if a host does not
    answer, or nobody can know which rank is right). Those that do not wait get SIGTERM, then SIGKILL. A small process
    beside each rank watches it, by Linux's /proc. Raises ValueError for a ``timeout_s`` below 2.

    >>> with joined():                                      # doctest: +SKIP
    ...     out = ringlab.attention(q, k, v, pattern, group=torch.distributed.group.WORLD)
    """
    if not is_real(timeout_s) or not 2 <= timeout_s <= LONGEST_S:
        raise ValueError(f"timeout_s must be seconds from 2 to {LONGEST_S:,}, got {short_repr(timeout_s)}")
    limit_s = timeout_s - 1
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    family = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    listener = socket.create_server(("", 0), backlog=ranks, **family) if rank == 0 else None
    told = [None] * ranks
    where = listener and (listener.getsockname()[1], secrets.token_hex(8))
    dist.all_gather_object(told, (socket.gethostname(), where))
    hosts, ((port, token), *_) = zip(*told)
    (ours, theirs), file = socket.socketpair(), tempfile.TemporaryFile()
    comm.beat = Beat(file)
    comm.beat.begins()  # with the first exchange, which is done
    about = {
        "rank": rank, "hosts": hosts, "pid": os.getpid(), "timeout_s": limit_s, "token": token, "port": port,
        "channel": theirs.fileno(), "progress": file.fileno(), "listener": listener and listener.fileno(),
        "launcher": os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() > 1 else None,
    }  # fmt: skip
    passed = [about[name] for name in ("channel", "progress", "listener") if about[name] is not None]
    command = [sys.executable, "-I", "-S", watch.__file__]
    with ours:
        with theirs, listener or theirs:
            monitor = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.PIPE, start_new_session=True)
            with monitor.stdin:  # its command everybody can read, and the token is secret
                monitor.stdin.write(json.dumps(about).encode())
        try:
            yield
            comm.beat.does("is done")
            dist.barrier()  # none leaves while another still talks to it
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            _found(ours, End("died", how_ended(code)), timeout_s)
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
    """Tell the monitor how this rank ended; the rank that it found, the message and the traceback there."""
    channel.settimeout(timeout_s + 2)
    try:
        channel.sendall(json.dumps(vars(end) | {"trace": end.trace[-20_000:]}).encode() + b"\n")
        return json.loads(channel.makefile().readline() or "null")
    except OSError:
        return None
