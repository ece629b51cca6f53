"""What advice is made of: measured comparisons, choices that rest on them, and patterns that were compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import log

import torch

from ..checks import shown
from ..local import Execution
from ..patterns import Pattern

POLICY, ESTIMATE, ASKED = "by policy", "by estimate", "as asked"


@dataclass(frozen=True)
class Evidence:
    """A measured comparison of two rows that differ in one thing: ``against`` takes ``ratio`` times as long as
    ``setting``, from ``low`` to ``high`` at 95 %.

    ``about``: what they differ in, "dtype", "backend", "scheme", "pattern" or a switch of ``Execution``; ``origin``
    which rows they are. ``counts`` is false for rows of another machine and of a rehearsal: they are shown and decide
    nothing. No ratio below ``least`` is a difference.

    >>> e = Evidence("backend", "eager", "auto", 0.5, 0.4, 0.6, "8K", "rows of today")
    >>> e.faster, e.slower, e.turned().setting, e.turned().ratio
    (False, True, 'auto', 2.0)
    """

    about: str
    setting: str
    against: str
    ratio: float
    low: float
    high: float
    label: str
    origin: str
    pattern: str = ""
    dtype: str = ""
    seq_len: int = 1
    passes: str = "fwd"
    causal: bool = False
    ranks: int = 1
    counts: bool = True
    least: float = 1.0
    share: float = 0.0  # of the pairs of dense attention that its pattern has, branch by branch; 0: not known

    @property
    def faster(self) -> bool:
        return self.low > self.least

    @property
    def slower(self) -> bool:
        return self.high < 1 / self.least

    def turned(self) -> Evidence:
        """The same comparison from the other side."""
        sides = {"setting": self.against, "against": self.setting}
        return replace(self, **sides, ratio=1 / self.ratio, low=1 / self.high, high=1 / self.low)

    def distance(self, seq_len: int, passes: str, causal: bool) -> tuple:
        """How far its shape is from another; the less, the more it says there."""
        return self.passes != passes, self.causal != causal, abs(log(self.seq_len / seq_len))

    @property
    def text(self) -> str:
        word = "faster than" if self.faster else "slower than" if self.slower else "not told apart from"
        sides = [f"{self.about}={x}" if x in ("True", "False") else x for x in (self.setting, self.against)]
        said = f"{sides[0]} {self.figures} {word} {sides[1]}, {self.label}, {self.origin}"
        return said if self.counts else f"{said}: decides nothing"

    @property
    def kind(self) -> str:
        """The first word of its pattern: "dense", "dilated" or "blocks"."""
        return self.pattern.partition(" ")[0]

    @property
    def how(self) -> str:
        return f"measured: {self.figures}, {self.origin}"

    @property
    def figures(self) -> str:
        return f"{self.ratio:.3g}x ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Choice:
    """One setting: its ``value``, ``how`` it was chosen ("by policy", "by estimate", "measured: ...", "as asked"),
    ``why``, and the measured comparisons that concern it."""

    name: str
    value: object
    how: str
    why: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def shown(self) -> str:
        if isinstance(self.value, torch.dtype):
            return str(self.value).removeprefix("torch.")
        if isinstance(self.value, Execution):
            return ", ".join(f"{k}={v}" for k, v in changed(self.value).items()) or "as it stands"
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return ", ".join(self.value) if isinstance(self.value, tuple) else str(self.value)


@dataclass(frozen=True)
class Proposal:
    """A pattern for the length, with what it comes to where it is run as advised."""

    name: str
    pattern: Pattern
    share: float  # of the pairs of dense attention, each once
    bound_s: float  # 0: not known
    binds: str | None
    peak_bytes: int | None  # of the rank that needs most; None: not estimated
    sent_bytes: int  # all ranks together


def changed(execution: Execution) -> dict:
    """The switches of an execution that are not as it stands by itself."""
    plain = Execution()
    values = {f.name: getattr(execution, f.name) for f in fields(execution)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


def evidence(rows: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """The rows given; TypeError for what are none."""
    found = tuple(rows) if isinstance(rows, Iterable) else (rows,)
    if not all(isinstance(row, Evidence) for row in found):
        raise TypeError(f"rows must be ringlab.Evidence, got {shown(rows)}")
    return found


def size(nbytes: int) -> str:
    """Bytes in binary units.

    >>> size(8 * 2**30), size(3 * 2**19), size(7), size(2**44)
    ('8 GiB', '1.5 MiB', '7 B', '16,384 GiB')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{_plain(nbytes / factor, 4)} {unit}"
    return f"{nbytes:.0f} B"


def duration(time: float) -> str:
    """A time in the unit that suits it.

    >>> duration(0.0213), duration(75.0), duration(4321.0), duration(2.5e-7)
    ('21.3 ms', '75 s', '4,321 s', '0.25 µs')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if time >= factor:
            return f"{_plain(time / factor, 3)} {unit}"
    return f"{_plain(time * 1e6, 3)} µs"


def _plain(x: float, digits: int) -> str:
    """``x`` to so many digits, large ones whole: never in exponent form."""
    return f"{x:.{digits}g}" if x < 10**digits - 0.5 else f"{x:,.0f}"
