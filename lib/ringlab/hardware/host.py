"""The host's CPU, memory and limits, from /proc, /sys and the control group; None where a file does not tell.

`read` returns a file's text, or None where it cannot be read.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator

Read = Callable[[str], "str | None"]


def cpu_model(read: Read) -> str:
    """Name the CPU."""
    text = read("/proc/cpuinfo") or ""
    for key in ("model name", "Model", "Hardware", "cpu model"):
        if found := re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE):
            return " ".join(found[1].split())
    return platform.processor() or platform.machine() or "unknown CPU"


def _cgroup(read: Read, controller: str, v2_name: str, v1_name: str) -> Iterator[tuple[str, str]]:
    """Yield (directory, text) of a control group's file for this process's group and all groups above it."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        base, name = ("/sys/fs/cgroup", v2_name) if not controllers else (f"/sys/fs/cgroup/{controllers}", v1_name)
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts), -1, -1):
            directory = "/".join([base, *parts[:depth]])
            if (text := read(f"{directory}/{name}")) is not None:
                yield directory, text.strip()


def ram_bytes(read: Read) -> int | None:
    """Return the smaller of the memory and the limit of this process's control group, in bytes."""
    limits = []
    if found := re.search(r"^MemTotal:\s*(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE):
        limits.append(int(found[1]) * 1024)
    group = [text for _, text in _cgroup(read, "memory", "memory.max", "memory.limit_in_bytes")]
    limits += [int(text) for text in group if text.isdecimal()]  # "max": no limit
    return min(limits, default=None)


def cpu_quota(read: Read) -> float | None:
    """Return the cores' worth of time that the control group grants, None without a limit."""
    shares = []
    for directory, text in _cgroup(read, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        period = period or (read(f"{directory}/cpu.cfs_period_us") or "").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def cache_bytes(read: Read, cores: set[int]) -> int | None:
    """Sum the last-level caches that the usable cores reach, each shared one once."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}
    caches: dict[tuple[int, str], int] = {}
    for core in cores:
        for index in range(8):
            folder = f"/sys/devices/system/cpu/cpu{core}/cache/index{index}"
            if (size := read(f"{folder}/size")) is None:
                break
            found = re.fullmatch(r"(\d+)([KMG]?)", size.strip())
            level = (read(f"{folder}/level") or "").strip()
            if found and level.isdecimal():
                shared = (read(f"{folder}/shared_cpu_list") or str(core)).strip()
                caches[int(level), shared] = int(found[1]) * units[found[2]]
    last = max((level for level, _ in caches), default=None)
    return None if last is None else sum(size for (level, _), size in caches.items() if level == last)
