"""One point while it is measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from .points import Point
from .processes import Handle
from .ranks import Ranks


@dataclass
class Member:
    """A point on its way: its process, what its replies said, and its samples by round."""

    point: Point
    samples: dict[int, float] = field(default_factory=dict)
    handle: Handle | Ranks | None = None
    row: dict = field(default_factory=lambda: {"status": "ok", "reason": ""})
    estimate: float = 0.0  # seconds of a sample
    wanted: int = 0
    spent: float = 0.0
    cpu_s: float = 0.0  # CPU time of its processes so far

    @property
    def alive(self) -> bool:
        return self.row["status"] == "ok"

    @property
    def left(self) -> int:
        return max(0, self.wanted - len(self.samples)) if self.alive else 0


def crammed(member: Member) -> bool:
    """Its ranks have no core each, so that no time is taken."""
    return member.row.get("ranks", {}).get("oversubscribed", False)


def drawn(point: Point) -> tuple:
    """What decides a point's inputs, their random values aside."""
    shape = (point.batch, point.seq_len, point.heads, point.kv_heads, point.head_dim)
    return (*shape, point.dtype, point.causal, point.passes)
