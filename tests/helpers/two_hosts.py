"""The two hosts of ``measure.links``, joined by a link that can be cut, lose packets
and become slow.
"""

import os
import pickle
import random
import select
import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from ringlab.measure import links
from ringlab.ring.launch import Process
from started import torchrun

HOSTS, ADDRESSES = ("host-0", "host-1"), links.ADDRESSES
SOUND = {
    "open": (True, True),
    "loss": 0.0,
    "latency_s": 0.0,
}  # open: for packets from each host


class TwoHosts:
    """``with TwoHosts() as hosts``: start torchrun by ``run(0 or 1, arguments)``,
    change the link by ``link``.

    Raises ``links.NotAllowed`` where they cannot be made. All that was started ends
    with them.
    """

    def __init__(self):
        self.started = []

    def __enter__(self):
        self.joins = Process(_join)
        if isinstance(made := self.joins.receive(), str):
            self.joins.end()
            raise links.NotAllowed(made)
        self.hosts = links.Hosts(self.joins.pid, made)
        self.names = [
            os.stat(f"/proc/{self.joins.pid}/fd/{namespace}").st_ino
            for namespace in made
        ]
        return self

    def __exit__(self, *_):
        for host in range(2):
            self.kill(host)
        for process in self.started:
            process.end()
        self.joins.end()

    def link(self, **how) -> None:
        """Change what ``SOUND`` has."""
        self.joins.send(SOUND | how)

    def run(self, host: int, arguments: list, env: dict[str, str], log) -> None:
        said = (log.fileno(),) * 2
        self.started.append(
            Process(torchrun, arguments, env, self.hosts, host, output=said)
        )

    def pids(self, host: int) -> list[int]:
        """The processes of a host, without zombies."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (
                    int(path.name) != self.joins.pid
                    and os.stat(path / "ns" / "net").st_ino == self.names[host]
                ):
                    found.append(int(path.name))
        return found

    def kill(self, host: int) -> None:
        while pids := self.pids(host):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _join(channel) -> None:
    """As ``links._join``, with a link that changes as it is told over the channel."""
    try:
        made = [links._host(address, links.Link(1e9, 0.0)) for address in ADDRESSES]
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        channel.send_bytes(pickle.dumps(str(error)))
        return
    channel.send_bytes(pickle.dumps(tuple(namespace for namespace, _ in made)))
    devices, link, waiting = (
        [device for _, device in made],
        SOUND,
        deque(),
    )  # (when, device, packet)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([channel, *devices], [], [], left)[0]:
            if source is channel:
                link = pickle.loads(channel.recv_bytes())
                continue
            side, packet = devices.index(source), os.read(source, links.PACKET_BYTES)
            if link["open"][side] and random.random() >= link["loss"]:
                waiting.append(
                    (time.monotonic() + link["latency_s"], devices[1 - side], packet)
                )
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, packet = waiting.popleft()
            with suppress(OSError):
                os.write(device, packet)
