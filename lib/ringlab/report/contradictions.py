"""What the documents print of one thing, set against each other: inside a document, and between them.

Each is data in ``published/``; nothing here knows which of them disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .published import BETWEEN, DOCUMENTS, published


@dataclass(frozen=True)
class Part:
    """What one place prints, as a range: a single figure has equal ends, "at most" and "at least" an open one."""

    document: str
    where: str
    low: float
    high: float

    def said(self, unit: str) -> str:
        if self.low == 0:
            return f"at most {_figure(self.high)}{unit}"
        if self.high == math.inf:
            return f"at least {_figure(self.low)}{unit}"
        low, high = _figure(self.low), _figure(self.high)
        return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


@dataclass(frozen=True)
class Compared:
    """Printed figures of one thing; they contradict each other where some two lie further apart than ``within``."""

    key: str
    text: str
    unit: str
    within: float
    parts: tuple[Part, ...]

    @property
    def apart(self) -> float:
        """The factor between the two that lie furthest apart; 1 where all ranges meet."""
        return max(1.0, max(p.low for p in self.parts) / min(p.high for p in self.parts))

    @property
    def contradict(self) -> bool:
        return self.apart > self.within

    @property
    def inside(self) -> bool:
        """Of one document."""
        return len({p.document for p in self.parts}) == 1


def compared() -> Iterator[Compared]:
    """All that is set against each other, by document, those between documents last."""
    for name in (*DOCUMENTS, BETWEEN):
        for entry in published(name).get("contradictions", ()):
            parts = tuple(_part(p, p.get("document", name)) for p in entry["parts"])
            yield Compared(f"{name} {entry['key']}", entry["text"], entry["unit"], entry["within"], parts)


def _part(part: dict, document: str) -> Part:
    over = _product(document, part.get("over", ()))
    low = _product(document, part["value"]) / over
    high = _product(document, part["high"]) / over if "high" in part else low
    bound = part.get("bound")
    return Part(document, part["where"], 0.0 if bound == "most" else low, math.inf if bound == "least" else high)


def _product(document: str, factors) -> float:
    return math.prod(_found(document, x) if isinstance(x, str) else x for x in factors)


def _found(document: str, name: str) -> float:
    """A figure of a document by its name: keys, keys of entries, and places in lists.

    >>> _found("000", "rows.original.ms"), _found("002", "journey.cache.0"), _found("000", "claims.fp16-slow.high")
    (136.52, 10, 10.0)
    """
    found = published(document)
    for step in name.split("."):
        if isinstance(found, dict):
            found = found[step]
        elif step.isdigit():
            found = found[int(step)]
        else:
            found = next(x for x in found if x["key"] == step)
    return found
