"""What a run shows on stderr: a line per group and per point, and the round at work with the time left.

On a terminal that is one line written over and over, in a file or a pipe a line every ten seconds.
"""

from __future__ import annotations

import sys
import time

import torch

from .. import cost, patterns
from .points import Group, Point, Result
from .store import warn
from .timing import samples_for

RATE = {"cpu": 1e11, "cuda": 1e14}  # FLOP/s, a first guess that only weighs points against each other
EVERY_S = 10.0
PRIOR_S = 30.0  # of work at the pace that was guessed, or the first points alone would decide
START_S = 0.7  # of a point, before its first sample


class Progress:
    """Time left = time so far, scaled by the work still to do; each point's work is guessed, then known."""

    def __init__(self, groups: list[tuple[Group, list[Point]]], device: str, show: bool):
        self.show, self.terminal = show, show and sys.stderr.isatty()
        self.samples = {(g.name, p.id): g.timed * _expected_s(p, device) for g, points in groups for p in points}
        self.total, self.count = len(self.samples), 0
        self.left_s = sum(self.samples.values()) + START_S * self.total
        self.done_s, self.start = 0.0, time.monotonic()
        self.said = self.start

    def begin(self, group: Group, points: list[Point]) -> None:
        turns = ", taking turns" if group.interleave and len(points) > 1 else ""
        self._line(f"{group.name}: {len(points)} point{'s' * (len(points) > 1)}{turns} ({self._left()})")

    def did(self, text: str, seconds: float) -> None:
        """So much of the work is done, by the guess that was made for it."""
        self.left_s, self.done_s = self.left_s - seconds, self.done_s + seconds
        if self.terminal:
            print(f"\r\033[K{text} ({self._left()})", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.said > EVERY_S:
            self._line(f"{text} ({self._left()})")

    def expect(self, group: Group, point: Point, seconds: float) -> None:
        """The samples of a point will take so long."""
        self.left_s += seconds - self.samples.get((group.name, point.id), 0.0)
        self.samples[group.name, point.id] = seconds

    def drop(self, group: Group, point: Point) -> None:
        """A point that failed takes no samples."""
        self.expect(group, point, 0.0)

    def result(self, result: Result) -> None:
        self.count += 1
        if result.median is not None:
            found = f"{result.median * 1e3:.4g} ms" + (" unstable" if result.unstable else "")
        else:
            found = "checked" if result.status == "ok" else ""
        if result.status != "ok":
            found = f"{found} {result.status}: {result.reason}".strip()
        self._line(f"[{self.count}/{self.total}] {result.group}: {result.point.label()}: {found}")

    def clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        self.clear()
        if self.show:
            self.said = time.monotonic()
            warn(text)

    def _left(self) -> str:
        pace = (time.monotonic() - self.start + PRIOR_S) / (self.done_s + PRIOR_S)
        left = max(0.0, self.left_s) * pace
        return f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"


def _expected_s(point: Point, device: str) -> float:
    """Seconds that the samples of a point may take, from its FLOPs."""
    names = ("batch", "seq_len", "heads", "kv_heads", "head_dim", "causal", "passes")
    shape = {name: getattr(point, name) for name in names}
    try:
        work = cost.count(patterns.from_dict(point.pattern), dtype=getattr(torch, point.dtype), **shape)
    except ValueError:  # a point that will be refused
        return 0.0
    seconds = work.flops / RATE[device]
    return samples_for(seconds) * max(seconds, 0.02)
