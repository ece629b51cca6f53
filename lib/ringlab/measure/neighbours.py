"""What else ran on the CPU while samples were taken: times measured beside other work are too long."""

from __future__ import annotations

import os
import time
from pathlib import Path

CROWDED = 0.1  # cores missing for our threads, as a part of these, from which times are not trusted
STAT = Path("/proc/stat")


class Neighbours:
    """Adds up the CPU time of others over the samples of a group.

    ``since(begin)``, ``begin`` being an earlier ``busy()``: others' seconds are the machine's busy time, a hypervisor's
    stolen time included, less our own. ``threads``: how many of ours must not wait. Without a /proc/stat it knows
    nothing.
    """

    def __init__(self, threads: int):
        self.threads, self.wall_s, self.theirs_s = threads, 0.0, 0.0

    @staticmethod
    def busy() -> float | None:
        """Seconds of CPU time that all processes of this machine have used since it started."""
        try:
            fields = STAT.read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, stolen = (int(x) for x in fields[:8])
        return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")

    def add(self, begin: float | None, wall_s: float, ours_s: float) -> None:
        """A sample that began at ``begin``, took ``wall_s`` and used ``ours_s`` of CPU time."""
        end = self.busy()
        if begin is not None and end is not None:
            self.wall_s += wall_s
            self.theirs_s += end - begin - ours_s

    @classmethod
    def now(cls, threads: int, wall_s: float = 0.5) -> Neighbours:
        """What others take while this process waits."""
        found, begin = cls(threads), cls.busy()
        time.sleep(wall_s)
        found.add(begin, wall_s, 0.0)
        return found

    @property
    def cores(self) -> float | None:
        """Cores that others used on average."""
        return round(max(0.0, self.theirs_s / self.wall_s), 2) if self.wall_s else None

    @property
    def crowded(self) -> bool:
        """Too few cores were left for our threads."""
        missing = (self.cores or 0.0) + self.threads - (os.cpu_count() or 1)
        return missing > CROWDED * self.threads
