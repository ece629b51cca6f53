"""Two hosts in this machine: network namespaces with names of their own, joined by a
link.

Each side has a TUN device in its own namespace; one process passes packets between
them. Namespaces and devices go with the last process in them. It needs Linux, root and
/dev/net/tun.
"""

import ctypes
import fcntl
import os
import pickle
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from ringlab.ring.launch import Process

HOSTS, ADDRESSES = ("host-0", "host-1"), ("10.77.0.1", "10.77.0.2")
DEVICE = "link0"
NEW_NETWORK, NEW_HOST_NAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
# ioctls of TUN, then those of network interfaces
SET_DEVICE, SET_OFFLOAD = 0x400454CA, 0x400454D0
SET_FLAGS, SET_ADDRESS, SET_NETMASK, SET_QUEUE = 0x8914, 0x8916, 0x891C, 0x8943
TUN, NO_HEADER, OFFLOAD_HEADER, CHECKSUMS, SEGMENTS = 0x1, 0x1000, 0x4000, 0x1, 0x2
UP, RUNNING = 0x1, 0x40
PACKET_BYTES = 1 << 17
QUEUE = 10_000  # packets that a device holds for the relay: none is lost


class NotAllowed(Exception):
    """This machine or this user cannot make two hosts; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """The process that joins the two hosts, and its descriptors of their namespaces."""

    process: int
    namespaces: tuple[int, ...]

    def enter(self, host: int) -> None:
        """Move this thread, and those that it starts, to a host; gloo's device too."""
        path = f"/proc/{self.process}/fd/{self.namespaces[host]}"
        with open(path, "rb") as namespace:
            kernel("setns", namespace.fileno(), NEW_NETWORK)
        kernel("unshare", NEW_HOST_NAME)
        socket.sethostname(HOSTS[host])
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


class TwoHosts:
    """``with TwoHosts() as hosts``: ranks go there by ``Hosts.enter``.

    Raises NotAllowed where they cannot be made.
    """

    def __enter__(self):
        self.joins = Process(_join)
        if isinstance(made := self.joins.receive(), str):
            self.joins.end()
            raise NotAllowed(made)
        return Hosts(self.joins.pid, made)

    def __exit__(self, *_):
        self.joins.end()


def kernel(function: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")


def _host(address: str) -> tuple[int, int]:
    """(namespace, device): descriptors of a new network namespace, which this thread is
    in from now on.
    """
    kernel("unshare", NEW_NETWORK)
    name = DEVICE.encode()
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = TUN | NO_HEADER | OFFLOAD_HEADER
    fcntl.ioctl(device, SET_DEVICE, struct.pack("16sH22x", name, flags))
    fcntl.ioctl(device, SET_OFFLOAD, CHECKSUMS | SEGMENTS)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_QUEUE, struct.pack("16si20x", name, QUEUE))
        for request, value in ((SET_ADDRESS, address), (SET_NETMASK, "255.255.255.0")):
            number = socket.inet_aton(value)
            packed = struct.pack("16sHH4s16x", name, socket.AF_INET, 0, number)
            fcntl.ioctl(any_socket, request, packed)
        for up in (name, b"lo"):
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH22x", up, UP | RUNNING))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), device


def _join(channel) -> None:
    """Make the hosts, tell their namespaces or why there are none, and pass packets
    between them for ever.
    """
    try:
        made = [_host(address) for address in ADDRESSES]
    except (OSError, AttributeError) as error:
        why = f"two hosts need Linux, root and /dev/net/tun: {error}"
        channel.send_bytes(pickle.dumps(why))
        return
    channel.send_bytes(pickle.dumps(tuple(namespace for namespace, _ in made)))
    devices = [device for _, device in made]
    while True:
        for source in select.select(devices, [], [])[0]:
            with suppress(OSError):
                os.write(devices[source == devices[0]], os.read(source, PACKET_BYTES))
