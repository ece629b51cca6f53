"""Ranks with monitors, by hand and without torchrun: ``Job`` forks them from a process
that has imported torch.

Each works on until a file "stop" is there, and at its exchange 10 the last one does
what ``KINDS`` says.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ringlab.ring import joined
from ringlab.ring.launch import Process
from started import gone

TOKEN = "5" * 16


class Job:
    """``ranks`` ranks of this host in a folder; all end with it."""

    def __init__(
        self,
        folder: Path,
        kind: str = "",
        ranks: int = 2,
        timeout_s: float = 60.0,
        address="127.0.0.1",
    ):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.folder, self.ranks = folder, []
        env = {
            "MASTER_ADDR": address,
            "LOCAL_RANK": "0",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
        }
        for rank in range(ranks):
            job = folder, kind, timeout_s, env | {"RANK": str(rank)}
            with open(folder / f"log-{rank}", "w") as log:
                said = log.fileno()
                self.ranks.append(
                    Process(
                        _rank,
                        *job,
                        modules=("ringlab.ring.launch",),
                        output=(said, said),
                    )
                )

    def __enter__(self):
        deadline = time.monotonic() + 90
        while (
            len(list(self.folder.glob("ready-*"))) < len(self.ranks)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        found = [
            json.loads((self.folder / f"ready-{rank}").read_text())
            for rank in range(len(self.ranks))
        ]
        self.port, self.monitors = found[0]["port"], [each["monitor"] for each in found]
        return self

    def __exit__(self, *_):
        for pid in [*self.monitors, *map(int, self.said("child").split())]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        for process in self.ranks:
            process.end()

    def said(self, name: str) -> str:
        """The text of a file: "failed-RANK", what a rank raised, or "log-RANK"."""
        return (self.folder / name).read_text() if (self.folder / name).exists() else ""

    def stop(self, within_s: float = 60.0) -> list[int]:
        """Let them end by themselves; their exit codes."""
        (self.folder / "stop").touch()
        return self.wait(within_s)

    def wait(self, within_s: float) -> list[int]:
        assert gone([process.pid for process in self.ranks], within_s), self.said(
            "log-0"
        )
        return [process.end() for process in self.ranks]


def _forks(folder):
    if pid := os.fork():
        (folder / "child").write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def _raises(folder):
    dist.destroy_process_group()  # so that the other rank gets an error, and asks
    raise ValueError("\N{MUSICAL SYMBOL G CLEF}" * 30_000)


KINDS = {"forks, and is killed": _forks, "raises much": _raises}


def _rank(
    channel, folder: Path, kind: str, timeout_s: float, env: dict[str, str]
) -> None:
    os.environ |= env
    try:
        _works(folder, kind, timeout_s)
    except Exception as error:
        shown = {"said": str(error), "notes": getattr(error, "__notes__", [])}
        (folder / f"failed-{env['RANK']}").write_text(json.dumps(shown))
        raise


def _works(folder: Path, kind: str, timeout_s: float) -> None:
    ports, serve, popen, monitors = [None], socket.create_server, subprocess.Popen, []

    def served(*args, **how):
        made = serve(*args, **how)
        ports[:] = [made.getsockname()[1]]
        return made

    def started(*args, **how):
        monitors.append(popen(*args, **how))
        return monitors[-1]

    secrets.token_hex, socket.create_server, subprocess.Popen = (
        lambda _: TOKEN,
        served,
        started,
    )
    with joined("gloo", timeout_s=timeout_s):
        rank, steps = dist.get_rank(), 0
        ready = json.dumps({"port": ports[0], "monitor": monitors[0].pid})
        (folder / f"new-{rank}").write_text(ready)
        (folder / f"new-{rank}").rename(folder / f"ready-{rank}")
        more = torch.ones(1)
        while more.item():
            if rank == dist.get_world_size() - 1 and steps == 10 and kind:
                KINDS[kind](folder)
            more.fill_(not (folder / "stop").exists())
            dist.all_reduce(more, dist.ReduceOp.MIN)
            steps += 1
            time.sleep(0.05)
