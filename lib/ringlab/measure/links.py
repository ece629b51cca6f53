"""A link between two ranks of this machine: each in a network namespace of its own,
joined by a pair of virtual Ethernet devices of a limited rate.

The namespaces have no names: they end with the processes of the ranks, however these
end, and the link ends with them.
"""

import ctypes
import os
import shutil
import subprocess

from torch.distributed import FileStore

CLONE_NEWNET = 0x40000000  # of linux/sched.h
DEVICE = "link0"  # in both namespaces


def join(folder: str, rank: int, ranks: int, gbps: float) -> None:
    """Move this process, one of two ranks, to a namespace whose only way out is a link
    to the other's, which sends at most ``gbps`` Gbit/s each way; 0: without a limit.

    The ranks find each other in ``folder``, which they make; gloo is told to use the
    link. Raises NotImplementedError for another number of ranks, and on a machine
    that makes no link.
    """
    if ranks != 2 or not shutil.which("tc") or ctypes.CDLL(None).unshare(CLONE_NEWNET):
        raise NotImplementedError(
            "a link needs two ranks, root, iproute2 and network namespaces"
        )
    os.makedirs(folder, 0o700, exist_ok=True)
    store = FileStore(os.path.join(folder, "link"), ranks)
    if rank == 0:
        store.set("process", str(os.getpid()))
        store.wait(["joined"])
    else:
        other = store.get("process").decode()
        _run(f"ip link add {DEVICE} type veth peer name {DEVICE} netns {other}")
        store.set("joined", "")
    _run(f"ip address add 10.0.0.{rank + 1}/24 dev {DEVICE}")
    _run(f"ip link set {DEVICE} up")
    if gbps:
        # What may pass at once is what a packet holds before it is cut.
        limit = f"tbf rate {gbps:f}gbit burst 64kb latency 50ms"
        _run(f"tc qdisc add dev {DEVICE} root {limit}")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def _run(command: str) -> None:
    subprocess.run(command, shell=True, check=True)
