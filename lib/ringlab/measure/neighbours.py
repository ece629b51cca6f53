"""What else ran on the CPU while samples were taken: times measured beside other work are too long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CROWDED = 0.1  # cores missing for our threads, as a part of these, from which times are not trusted
STAT = Path("/proc/stat")
LEAST_S = 0.9  # the machine counts in hundredths of a second, too coarse for less


class Neighbours:
    """Adds up the CPU time of others over the samples of a group.

    Others' seconds are the machine's busy time, a hypervisor's stolen time included, less that of this process and of
    its workers. ``threads``: how many of ours must not wait. Without a /proc/stat, and over less than a second in all,
    it knows nothing.
    """

    def __init__(self, threads: int):
        self.threads, self.wall_s, self.theirs_s = threads, 0.0, 0.0

    @contextmanager
    def watched(self, workers: Callable[[], float] = float) -> Iterator[None]:
        """Watch what runs inside; ``workers``: CPU seconds that the workers have used so far."""
        before, begin = (self.busy(), time.process_time(), workers()), time.monotonic()
        yield
        self.wall_s += time.monotonic() - begin
        busy, own, theirs = self.busy(), time.process_time(), workers()
        if busy is not None:
            self.theirs_s += busy - before[0] - (own - before[1]) - (theirs - before[2])

    @staticmethod
    def busy() -> float | None:
        """Seconds of CPU time that all processes of this machine have used since it started."""
        try:
            fields = STAT.read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, stolen = (int(x) for x in fields[:8])
        return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")

    @classmethod
    def now(cls, threads: int, wall_s: float = 1.0) -> Neighbours:
        """What others take while this process waits."""
        found = cls(threads)
        with found.watched():
            time.sleep(wall_s)
        return found

    @property
    def cores(self) -> float | None:
        """Cores that others used on average."""
        known = self.wall_s >= LEAST_S and STAT.is_file()
        return round(max(0.0, self.theirs_s / self.wall_s), 2) if known else None

    @property
    def crowded(self) -> bool:
        """Too few cores were left for our threads."""
        missing = (self.cores or 0.0) + self.threads - (os.cpu_count() or 1)
        return missing > CROWDED * self.threads
