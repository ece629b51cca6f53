"""Two runs beside each other: which rows are alike, how far their times lie apart, and which of that is a difference.

Rows are alike where group and point agree: system, pattern, shape, dtype, passes, ranks and options. Two runs took no
turns, so the interval of a ratio comes from the samples of either side and from how unevenly either machine ran
(``Study.pace``). As in a report, no factor counts that the same work differed by in its run (``Study.noise_floor``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from .. import measure
from ..measure.points import Result
from .compare_chance import FALSE_ALARMS, chance, geometric_mean, holm, noticed
from .compare_sides import Side, demand_alike
from .pace import apart
from .places import UsageError
from .trust import objection, threads

GROWTH = 0.01  # bytes are counted, not sampled, and repeat
BY_CHANCE = ("ok", "suspect")  # what a row may turn to by a disturbed machine; every other status is of the code
PROBE = "sgemm"  # the machine's rate: no attention, so in no mean
BYTES = {
    "peak": lambda r: r.memory.get("tracked_peak_bytes"),
    "sent": lambda r: sum(r.ranks["bytes_sent"]) if r.ranks.get("bytes_sent") else None,
}


@dataclass(frozen=True)
class Pair:
    """One point in both runs; ``ratio``: time of the first over time of the second, None with the reason why not.

    ``p``: the chance of such a ratio where nothing differs, all rows of the comparison considered. ``refused``: the two
    are no measurements of one thing.
    """

    first: Result
    second: Result
    ratio: measure.Ratio | None = None
    reason: str = ""
    refused: bool = False
    p: float = 1.0

    @property
    def significantly_slower(self) -> bool:
        """The first takes longer, significantly."""
        return self.ratio is not None and self.ratio.significantly_slower and self.p <= FALSE_ALARMS

    @property
    def significantly_faster(self) -> bool:
        return self.ratio is not None and self.ratio.significantly_faster and self.p <= FALSE_ALARMS

    def bytes(self, what: str) -> tuple[int | None, int | None]:
        """``peak`` or ``sent`` of both, None where it is not known or may not be quoted."""
        return tuple(None if objection(r) else BYTES[what](r) for r in (self.first, self.second))

    def growth(self, what: str) -> float | None:
        """Bytes of the first over those of the second; None where one of them is not known."""
        first, second = self.bytes(what)
        if first is None or second is None:
            return None
        return first / second if second else math.inf if first else 1.0


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and what only one of them holds; ``probe``: their machines' own matrix product."""

    first: Side
    second: Side
    pairs: Sequence[Pair]
    only: tuple[list[Result], list[Result]]
    probe: measure.Ratio | None

    @property
    def timed(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.ratio is not None]

    @property
    def excluded(self) -> list[Pair]:
        """Rows whose times are in no mean, each with its reason; those that are never timed are not among them."""
        return [pair for pair in self.pairs if pair.reason]

    @property
    def noise_floor(self) -> float:
        return max(self.first.study.noise_floor, self.second.study.noise_floor)

    @cached_property
    def mean(self) -> measure.Ratio | None:
        return _mean(self.timed)

    @property
    def same(self) -> list[Pair]:
        """Rows that are one measurement, in both files."""
        return [pair for pair in self.timed if pair.ratio.paired]

    @property
    def noticed(self) -> float:
        """The factor by which the row of middling certainty has to differ to be called different."""
        found = [noticed(pair.ratio, len(self.timed)) for pair in self.timed if not pair.ratio.paired]
        return median(found) if found else math.inf


def compare(first: Side, second: Side) -> Comparison:
    """Pair the rows of two runs; raises UsageError where they have nothing alike, saying why."""
    if first.study.rehearsal != second.study.rehearsal:
        real, other = (second, first) if first.study.rehearsal else (first, second)
        raise UsageError(
            f"{other.name} is a rehearsal and {real.name} is not: their times say nothing about each other"
        )
    rows = [{(r.group, r.point.id): r for r in side.study.rows()} for side in (first, second)]
    common = [key for key in rows[0] if key in rows[1]]
    found = [_pair(rows[0][key], rows[1][key], first, second) for key in common]
    pairs = [pair for pair in found if pair.first.point.system != PROBE]
    if not pairs:
        raise UsageError(f"{first.name} and {second.name} have no point in common")
    if all(pair.refused for pair in pairs):
        why, count = Counter(pair.reason for pair in pairs).most_common(1)[0]
        raise UsageError(f"no row of {first.name} is like one of {second.name}: {why} ({count} of {len(pairs)} points)")
    probes = [pair for pair in found if pair.first.point.system == PROBE and pair.ratio is not None]
    only = tuple([r for key, r in own.items() if key not in other] for own, other in (rows, rows[::-1]))
    return Comparison(first, second, _adjusted(pairs), only, _mean(probes))


def check(now: Side, base: Side, tolerance: float) -> tuple[Comparison, list[tuple[Pair, str]]]:
    """The comparison of ``now`` with ``base``, and every row that is worse, with the reason.

    A time is worse where its interval excludes no change, all rows taken together, and its ratio exceeds 1 +
    ``tolerance``; bytes are where they grew by more than 1 %; a row that was quoted is where it now fails, unless a
    disturbed machine may be why. Raises UsageError where more than the engine differs.
    """
    if now.study.rehearsal == base.study.rehearsal:  # else compare() says what is wrong
        demand_alike(now, base)
    found = compare(now, base)
    failures = [(pair, why) for pair in found.pairs for why in _worse(pair, tolerance)]
    if not found.timed and not failures:  # to pass would say that something was seen
        why, count = Counter(pair.reason or "not timed" for pair in found.pairs).most_common(1)[0]
        raise UsageError(f"no time of {now.name} may be compared with {base.name}: {why} ({count} of "
                         f"{len(found.pairs)} points)")  # fmt: skip
    return found, failures


def _worse(pair: Pair, tolerance: float) -> Iterable[str]:
    if pair.significantly_slower and pair.ratio.value > 1 + tolerance:
        yield "slower"
    yield from (what for what in BYTES if (growth := pair.growth(what)) is not None and growth > 1 + GROWTH)
    if pair.first.status not in BY_CHANCE and not objection(pair.second):
        yield pair.first.status


def _pair(a: Result, b: Result, first: Side, second: Side) -> Pair:
    if unlike := _unlike(a, b, (first.name, second.name)):
        return Pair(a, b, reason=unlike, refused=True)
    for r, side in ((a, first), (b, second)):
        if why := objection(r) or _untrusted(r):
            return Pair(a, b, reason=f"{side.name}: {why}")
    if not a.seconds or not b.seconds:
        return Pair(a, b)  # a group that is not timed
    studies = first.study, second.study
    pace = math.hypot(*(study.pace for study in studies)) / math.sqrt(2)
    ratio = replace(apart(measure.ratio(a, b), pace), noise_floor=max(study.noise_floor for study in studies))
    return Pair(a, b, ratio, p=chance(a, b, ratio))


def _unlike(a: Result, b: Result, names: tuple[str, str]) -> str:
    """Why the times of one point in two runs are no times of one thing, or an empty string."""
    if crowded := [name for r, name in zip((a, b), names) if r.ranks.get("oversubscribed")]:
        return f"oversubscribed in {' and '.join(dict.fromkeys(crowded))}"
    devices = [(r.provenance.get("device"), r.provenance.get("device_name")) for r in (a, b)]
    if devices[0] == devices[1] and threads(a) != threads(b):
        return f"{threads(a)} and {threads(b)} threads a rank on the same device"
    return ""


def _untrusted(r: Result) -> str:
    if r.unstable:
        return "unstable: its samples spread or drift by over 20 % of their median, or an earlier run differs"
    return "" if all(0 < s < math.inf for s in r.seconds) else "suspect: a sample that is no time"


def _adjusted(pairs: list[Pair]) -> list[Pair]:
    timed = [i for i, pair in enumerate(pairs) if pair.ratio is not None]
    found = dict(zip(timed, holm([pairs[i].p for i in timed])))
    return [replace(pair, p=found.get(i, 1.0)) for i, pair in enumerate(pairs)]


def _mean(pairs: Iterable[Pair]) -> measure.Ratio | None:
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        ratios.setdefault(pair.first.point.id, []).append(pair.ratio.value)
    return geometric_mean(ratios)
