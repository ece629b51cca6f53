"""Two hosts in this machine: network namespaces with names of their own, joined by a
link of a given rate and latency.

Each side has a TUN device in its own namespace. The kernel's token bucket (``tc``, tbf)
gives it its rate; it holds packets back at the sender, as a network card does, so that
acknowledgements are not stuck behind a long queue. One process passes packets on and
adds the latency. The kernel hands over whole segments of up to 64 KiB, so that a
gigabit a second takes a tenth of a core. Nothing is named, hence nothing is left
behind: namespaces and devices go with the last process in them. It needs Linux, root,
/dev/net/tun and ``tc``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from ..checks import is_real
from ..ring.launch import Process

NEW_NETWORK, NEW_HOST_NAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
DEVICE = "link0"
ADDRESSES = "10.77.0.1", "10.77.0.2"
SET_DEVICE, SET_OFFLOAD = (
    0x400454CA,
    0x400454D0,
)  # ioctls of TUN, then those of network interfaces
SET_FLAGS, SET_ADDRESS, SET_NETMASK, SET_QUEUE = 0x8914, 0x8916, 0x891C, 0x8943
TUN, NO_HEADER, OFFLOAD_HEADER, CHECKSUMS, SEGMENTS = 0x1, 0x1000, 0x4000, 0x1, 0x2
UP, RUNNING = 0x1, 0x40
BURST = 72_000  # bytes that may leave at once: a whole segment, which the kernel else cuts into small packets
PACKET_BYTES = 1 << 17
QUEUE = 10_000  # packets that a device holds for the relay: none is lost
AT_ONCE = 16  # packets that are read from one side before those due are sent on


@dataclass(frozen=True)
class Link:
    """A line between two hosts: bytes a second each way, and seconds of latency one
    way.

    >>> Link.of(mbit_per_s=100, round_trip_ms=10)
    Link(bytes_per_s=12500000.0, latency_s=0.005)
    """

    bytes_per_s: float
    latency_s: float

    @classmethod
    def of(cls, mbit_per_s: float, round_trip_ms: float) -> Link:
        if not (
            is_real(mbit_per_s)
            and is_real(round_trip_ms)
            and mbit_per_s > 0 <= round_trip_ms
        ):
            raise ValueError(
                f"a link needs a positive rate and a latency, got {mbit_per_s!r} and {round_trip_ms!r}"
            )
        return cls(mbit_per_s * 1e6 / 8, round_trip_ms / 2e3)


class NotAllowed(NotImplementedError):
    """This machine or this user cannot make shaped links; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """The two ends of a link: the process that joins them, and its descriptors of their
    namespaces.
    """

    process: int
    namespaces: tuple[int, ...]

    def enter(self, host: int) -> None:
        """Move this thread, and those that it starts, to a host: 0 or 1, named host-0
        and host-1; gloo's device too.
        """
        with open(
            f"/proc/{self.process}/fd/{self.namespaces[host]}", "rb"
        ) as namespace:
            _kernel("setns", namespace.fileno(), NEW_NETWORK)
        _kernel("unshare", NEW_HOST_NAME)
        socket.sethostname(f"host-{host}")
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


@contextmanager
def hosts(link: Link) -> Iterator[Hosts]:
    """Two hosts joined by a link. Raises NotAllowed where they cannot be made; at the
    end nothing is left of them.

    The process that joins them ends with its caller, however that ends.
    """
    joins = Process(_join, link)
    try:
        if isinstance(made := joins.receive(), str):
            raise NotAllowed(made)
        yield Hosts(joins.pid, made)
    finally:
        joins.end()


def _kernel(function: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(
            ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}"
        )


def _join(channel: Connection, link: Link) -> None:
    """Make the hosts, tell their namespaces or why there are none, and pass packets
    between them for ever.
    """
    try:
        made = [_host(address, link) for address in ADDRESSES]
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        channel.send(f"shaped links need Linux, root, /dev/net/tun and tc: {error}")
        return
    with suppress(OSError):  # a line does not wait for a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    channel.send(tuple(namespace for namespace, _ in made))
    _relay([device for _, device in made], link.latency_s)


def _host(address: str, link: Link) -> tuple[int, int]:
    """(namespace, device): descriptors of a new network namespace, which this thread is
    in from now on.
    """
    _kernel("unshare", NEW_NETWORK)
    name = DEVICE.encode()
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        device,
        SET_DEVICE,
        struct.pack("16sH22x", name, TUN | NO_HEADER | OFFLOAD_HEADER),
    )
    fcntl.ioctl(device, SET_OFFLOAD, CHECKSUMS | SEGMENTS)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_QUEUE, struct.pack("16si20x", name, QUEUE))
        for request, value in ((SET_ADDRESS, address), (SET_NETMASK, "255.255.255.0")):
            packed = struct.pack(
                "16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(value)
            )
            fcntl.ioctl(any_socket, request, packed)
        for up in (name, b"lo"):
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH22x", up, UP | RUNNING))
    shape = f"rate {int(8 * link.bytes_per_s)} burst {BURST} limit {1 << 26}".split()
    subprocess.run(
        ["tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape], check=True
    )
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), device


def _relay(devices: list[int], latency_s: float) -> None:
    """Each packet arrives so much later than it left."""
    ahead = dict(zip(devices, reversed(devices)))
    waiting = deque()  # (when, device, packet)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(devices, [], [], left)[0]:
            with suppress(BlockingIOError):
                for _ in range(AT_ONCE):
                    packet = os.read(device, PACKET_BYTES)
                    waiting.append(
                        (time.monotonic() + latency_s, ahead[device], packet)
                    )
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, packet = waiting.popleft()
            with suppress(
                OSError
            ):  # the other end refuses a packet, as a network may lose one
                os.write(device, packet)
