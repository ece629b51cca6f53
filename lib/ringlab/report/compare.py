"""Two runs side by side: which rows are alike, how far their times lie apart, and which
of that is a difference.

Rows are alike where group and point agree: system, pattern, shape, dtype, passes, ranks
and options. Two runs took no turns, so the interval of a ratio comes from the samples
of either side and from how unevenly either machine ran (``Study.pace``). A row is
called different only where all agree: its 95 % interval, two tests of its samples, and
Holm's step-down over all rows. As in a report, no factor counts that the same work
differed by in its run (``Study.noise_floor``).
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev

from scipy.stats import mannwhitneyu, t

from .. import measure
from ..advise import columns
from ..measure import stats, store
from ..measure.points import Result
from ..measure.stats import Ratio
from ..measure.store import NAME
from ..measure.validity import objection, threads
from .places import UsageError, note
from .rows import DEFAULTS
from .study import Study, settle
from .tables import Table, cell, counted, interval, number, size, some
from .trust import apart

DEMANDED = (
    "machine",
    "device",
    "device_name",
    "torch",
    "method",
)  # all but the engine, which a check is about
FALSE_ALARMS = (
    0.05  # the chance that any row of a comparison is called different where none is
)
FEW = 6  # samples below which the ranks of a row cannot tell, and its interval is Student's
GROWTH = 0.01  # bytes are counted, not sampled, and repeat
BY_CHANCE = (
    "ok",
    "suspect",
)  # what a row may turn to by a disturbed machine; every other status is of the code
PROBE = "sgemm"  # the machine's rate: no attention, so in no mean
UNSTABLE = "unstable: its samples spread or drift by over 20 % of their median, or an earlier run differs"
BYTES = {  # what they are called where they grew, and how many a row has, None where that is not known
    "Peak": ("higher peak of memory", lambda r: r.memory.get("tracked_peak_bytes")),
    "Sent": (
        "more bytes sent",
        lambda r: sum(r.ranks["bytes_sent"]) if r.ranks.get("bytes_sent") else None,
    ),
}


# --------------------------------------------------------------------------------------
# the rows of one side


@dataclass(frozen=True)
class Side:
    """Rows with the name that the user gave them."""

    name: str
    study: Study

    def about(self) -> dict[str, str]:
        """Where the rows come from, for the head of a comparison."""
        p = self.study.newest
        commits = {r.provenance.get("commit") for r in self.study.results}
        more = f" and {len(commits) - 1} more" if len(commits) > 1 else ""
        said = {
            name: str(p.get(name))
            for name in (
                "device_name",
                "device",
                "threads",
                "torch",
                "engine",
                "method",
            )
        }
        said["commit"] = (
            f"{str(p.get('commit'))[:10]}{' with changes' if p.get('dirty') is True else ''}{more}"
        )
        said |= {
            "machine": str(p.get("machine")),
            "measured": str(p.get("utc")),
            "rows": str(len(self.study.results)),
        }
        if self.study.left_out:
            said["rows"] += (
                f" ({self.study.left_out} of another machine, device or engine left out)"
            )
        return said


def read_side(text: str, reports: Path) -> Side:
    """The rows that ``text`` names, of their newest machine, device and engine.

    ``text`` is a profile of ``reports``, a folder with samples.jsonl, such a file by
    any name, or REVISION:PROFILE, the rows as they were committed. Raises UsageError,
    one line, where there are none or another version wrote them.
    """
    data = _committed(text, reports) if ":" in text else _found(text, reports)
    if other := sorted(
        {int(n) for n in re.findall(rb'"schema": (\d+)', data)} - {measure.SCHEMA}
    ):
        raise UsageError(
            f"{text}: rows of schema {', '.join(map(str, other))}, this version of ringlab reads schema "
            f"{measure.SCHEMA}; compare runs of one version"
        )
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # the store reads a folder; a committed file lies in none
        path = Path(folder) / NAME
        path.write_bytes(data)
        skipped: list[str] = []
        try:
            everything = store.read(folder, warn=skipped.append)
        except (AttributeError, TypeError) as error:
            raise UsageError(
                f"{text}: a row is damaged ({error}); restore the file or measure again"
            ) from None
    if not everything:
        raise UsageError(f"{text}: no complete row in it")
    for said in skipped:
        note(f"ringlab: {said.replace(str(path), text)}")
    return Side(text, Study(None, folder=Path(text), **settle(everything)))


def _found(text: str, reports: Path) -> bytes:
    for path in (
        reports / text / "data" / NAME,
        Path(text) / NAME,
        Path(text) / "data" / NAME,
        Path(text),
    ):
        if text and path.is_file():
            return path.read_bytes()
    there = sorted(path.parents[1].name for path in reports.glob(f"*/data/{NAME}"))
    raise UsageError(
        f"no rows of {text!r}; name a profile with rows ({', '.join(there) or 'there is none yet'}), a folder with "
        f"{NAME}, such a file, or REVISION:PROFILE"
    )


def _committed(text: str, reports: Path) -> bytes:
    revision, _, profile = text.partition(":")
    what = f"{revision}:./{profile}/data/{NAME}"  # ./ is the folder that git is run in
    done = subprocess.run(
        ["git", "-C", str(reports), "show", "--end-of-options", what],
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [
            "git failed"
        ]
        raise UsageError(f"no rows of {text!r}: {said[0].removeprefix('fatal: ')}")
    return done.stdout


# --------------------------------------------------------------------------------------
# pairs of rows


@dataclass(frozen=True)
class Pair:
    """One point in both runs; ``ratio``: time of the first over time of the second,
    None with the reason why not.

    ``p``: the chance of such a ratio where nothing differs, all rows of the comparison
    considered. ``refused``: the two are no measurements of one thing.
    """

    first: Result
    second: Result
    ratio: Ratio | None = None
    reason: str = ""
    refused: bool = False
    p: float = 1.0

    @property
    def verdict(self) -> str | None:
        """What is said of the time of the first beside the second; None for points that
        are not timed.
        """
        if self.ratio is None:
            return "excluded" if self.reason else None
        if self.p > FALSE_ALARMS or not (
            self.ratio.significantly_slower or self.ratio.significantly_faster
        ):
            return "not significant"
        return "slower" if self.ratio.significantly_slower else "faster"

    def bytes(self, what: str) -> tuple[int, int, float] | None:
        """Bytes of ``what`` of the first, of the second, and their ratio; None where
        they may not be compared.
        """
        first, second = (
            None if objection(r) else BYTES[what][1](r)
            for r in (self.first, self.second)
        )
        if first is None or second is None:
            return None
        return first, second, first / second if second else math.inf if first else 1.0


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and what only one of them holds; ``probe``: their
    machines' own matrix product.
    """

    first: Side
    second: Side
    pairs: Sequence[Pair]
    only: tuple[list[Result], list[Result]]
    probe: Ratio | None

    @property
    def timed(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.ratio is not None]

    @cached_property
    def mean(self) -> Ratio | None:
        return geometric_mean(self.timed)


def compare(first: Side, second: Side) -> Comparison:
    """Pair the rows of two runs; raises UsageError where they have nothing alike,
    saying why.
    """
    if first.study.rehearsal != second.study.rehearsal:
        real, other = (second, first) if first.study.rehearsal else (first, second)
        raise UsageError(
            f"{other.name} is a rehearsal and {real.name} is not: their times say nothing about each other"
        )
    rows = [
        {(r.group, r.point.id): r for r in side.study.rows()}
        for side in (first, second)
    ]
    found = [
        _pair(rows[0][key], rows[1][key], first, second)
        for key in rows[0]
        if key in rows[1]
    ]
    pairs = [pair for pair in found if pair.first.point.system != PROBE]
    if not pairs:
        raise UsageError(f"{first.name} and {second.name} have no point in common")
    if all(pair.refused for pair in pairs):
        raise UsageError(
            f"no row of {first.name} is like one of {second.name}: {_most_common_reason(pairs)}"
        )
    probes = [
        pair
        for pair in found
        if pair.first.point.system == PROBE and pair.ratio is not None
    ]
    only = tuple(
        [r for key, r in own.items() if key not in other]
        for own, other in (rows, rows[::-1])
    )
    timed = [i for i, pair in enumerate(pairs) if pair.ratio is not None]
    for i, p in zip(timed, holm([pairs[i].p for i in timed])):
        pairs[i] = replace(pairs[i], p=p)
    return Comparison(first, second, pairs, only, geometric_mean(probes))


def check(
    now: Side, base: Side, tolerance: float
) -> tuple[Comparison, list[tuple[Pair, str]]]:
    """The comparison of ``now`` with ``base``, and every row that is worse, with the
    reason.

    A time is worse where its interval excludes no change, all rows taken together, and
    its ratio exceeds 1 + ``tolerance``; bytes are where they grew by more than 1 %; a
    row that was quoted is where it now fails, unless a disturbed machine may be why.
    Raises UsageError where more than the engine differs.
    """
    alike = (
        now.study.rehearsal == base.study.rehearsal
    )  # else compare() says what is wrong
    for name in DEMANDED if alike else ():
        one, other = (
            sorted({str(r.provenance.get(name)) for r in side.study.results})
            for side in (base, now)
        )
        if len({*one, *other}) > 1:
            raise UsageError(
                f"no check of {now.name} against {base.name}: they differ in {name} ({', '.join(one)}; "
                f"{', '.join(other)}); compare shows them side by side"
            )
    found = compare(now, base)
    failures = [(pair, why) for pair in found.pairs for why in _worse(pair, tolerance)]
    if not found.timed and not failures:  # to pass would say that something was seen
        why = _most_common_reason(found.pairs)
        raise UsageError(
            f"no time of {now.name} may be compared with {base.name}: {why}"
        )
    return found, failures


def _most_common_reason(pairs: Sequence[Pair]) -> str:
    why, count = Counter(pair.reason or "not timed" for pair in pairs).most_common(1)[0]
    return f"{why} ({count} of {len(pairs)} points)"


def _worse(pair: Pair, tolerance: float) -> Iterable[str]:
    if pair.verdict == "slower" and pair.ratio.value > 1 + tolerance:
        yield f"{number(pair.ratio.value)} times as long ({interval(*pair.ratio.ci)})"
    for what, (grown, _) in BYTES.items():
        if (found := pair.bytes(what)) and found[2] > 1 + GROWTH:
            first, second, _ = found
            yield f"{grown}, {size(second)} to {size(first)} ({first - second:+,} bytes)"
    if pair.first.status not in BY_CHANCE and not objection(pair.second):
        yield f"now {pair.first.status}: {pair.first.reason or 'no reason given'}"


def _pair(a: Result, b: Result, first: Side, second: Side) -> Pair:
    if unlike := _unlike(a, b, (first.name, second.name)):
        return Pair(a, b, reason=unlike, refused=True)
    for r, side in ((a, first), (b, second)):
        if why := objection(r) or (UNSTABLE if r.unstable else ""):
            return Pair(a, b, reason=f"{side.name}: {why}")
    if not a.seconds or not b.seconds:
        return Pair(a, b)  # a group that is not timed
    pace = math.hypot(first.study.pace, second.study.pace) / math.sqrt(2)
    floor = max(first.study.noise_floor, second.study.noise_floor)
    ratio = replace(apart(measure.ratio(a, b), pace), noise_floor=floor)
    return Pair(a, b, ratio, p=chance(a, b, ratio))


def _unlike(a: Result, b: Result, names: tuple[str, str]) -> str:
    """Why the times of one point in two runs are no times of one thing, or an empty
    string.
    """
    if crowded := [
        name for r, name in zip((a, b), names) if r.ranks.get("oversubscribed")
    ]:
        return f"oversubscribed in {' and '.join(dict.fromkeys(crowded))}"
    devices = [
        (r.provenance.get("device"), r.provenance.get("device_name")) for r in (a, b)
    ]
    if devices[0] == devices[1] and threads(a) != threads(b):
        return f"{threads(a)} and {threads(b)} threads a rank on the same device"
    return ""


# --------------------------------------------------------------------------------------
# which ratios are differences


def chance(a: Result, b: Result, ratio: Ratio) -> float:
    """p-value of a time of ``a`` over that of ``b`` that differs by more than the noise
    floor, two-sided.

    The larger of two: that of the 95 % interval (Altman and Bland 2011, BMJ 343, d2304)
    with Student's t, and, where samples are enough and took no turns, the exact one of
    their ranks, which holds for any distribution. Rows of fewer than six samples rest
    on Student's assumption that logarithms of times are normal.
    """
    beyond, reach = _distance(ratio)
    if beyond <= 0 or ratio.rounds < 2:
        return 1.0
    df = ratio.rounds - 1
    found = 2 * float(t.sf(quantile(df) * beyond / reach, df)) if reach else 0.0
    return (
        max(found, _by_ranks(a.seconds, b.seconds, ratio)) if _ranked(ratio) else found
    )


def _ranked(ratio: Ratio) -> bool:
    return not ratio.paired and ratio.rounds >= FEW


def _distance(ratio: Ratio) -> tuple[float, float]:
    """(log distance of a ratio from what the same work differs by, that of its
    interval's nearer end from itself).
    """
    value, end = ratio.value, ratio.low if ratio.value > 1 else ratio.high
    reach = abs(math.log(value / end)) if 0 < end < math.inf else math.inf
    return abs(math.log(value)) - math.log(ratio.noise_floor), reach


def noticed(ratio: Ratio, rows: int) -> float:
    """The factor from which a row as uncertain as this one is called different, the
    first among ``rows``.

    >>> noticed(Ratio(1.0, 0.95, 1.05, 10, False), 1) < 1.06 < 1.1 < noticed(Ratio(1.0, 0.95, 1.05, 10, False), 60)
    True
    """
    n, level = ratio.rounds, FALSE_ALARMS / rows
    if n < 2 or _ranked(ratio) and 2 / math.comb(2 * n, n) > level:
        return math.inf
    reach = max(_distance(ratio)[1], 0.0)
    return ratio.noise_floor * math.exp(
        reach * quantile(n - 1, level) / quantile(n - 1)
    )


def holm(chances: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: the chance that any of the rows is below 0.05
    while none differs is 5 %.

    Unadjusted, three of 60 unchanged rows would be. Holm 1979 (Scandinavian Journal of
    Statistics 6, 65-70), which asks nothing about how rows depend on each other.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    found, worst = [1.0] * len(chances), 0.0
    for rank, i in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        found[i] = worst = max(worst, min(1.0, (len(chances) - rank) * chances[i]))
    return found


def quantile(df: int, level: float = 1 - stats.LEVEL) -> float:
    """The t beyond which a part ``level`` of Student's t with ``df`` degrees of freedom
    lies, both sides together.

    >>> round(quantile(3), 3), round(quantile(9, 0.01), 3)
    (3.182, 3.25)
    """
    return float(t.isf(level / 2, df))


def _by_ranks(x: Sequence[float], y: Sequence[float], ratio: Ratio) -> float:
    """Two-sided p-value of Mann and Whitney's U (1947), one side made better by the
    noise floor; ties count for it.
    """
    if ratio.value < 1:
        x, y = y, x
    x = [math.nextafter(one, 0) for one in x]  # SciPy would count a tie as half a win
    y = [other * ratio.noise_floor for other in y]
    found = mannwhitneyu(x, y, alternative="greater", method="exact")
    return min(1.0, 2 * float(found.pvalue))


def geometric_mean(pairs: Iterable[Pair]) -> Ratio | None:
    """Of their ratios, a point with several counting once; the 95 % interval is
    Student's, over the points.
    """
    points: dict[str, list[float]] = {}
    for pair in pairs:
        points.setdefault(pair.first.point.id, []).append(math.log(pair.ratio.value))
    if not points:
        return None
    logs = [fmean(of_one) for of_one in points.values()]
    middle, n = fmean(logs), len(logs)
    reach = quantile(n - 1) * stdev(logs) / math.sqrt(n) if n > 1 else math.inf
    return Ratio(
        math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), n, False
    )


# --------------------------------------------------------------------------------------
# a comparison as text


def sections(found: Comparison, pairs: Sequence[Pair]) -> list[Table | str]:
    """Where the rows come from, some ``pairs``, what is left out and why, and what it
    all comes to.
    """
    first, second = found.first.name, found.second.name
    abouts = found.first.about(), found.second.about()
    parts = [
        Table(
            "Where the rows come from",
            ["", first, second],
            [[k, *(a[k] for a in abouts)] for k in abouts[0]],
        )
    ]
    if pairs:
        heads = [
            f">{first} (ms)",
            f">{second} (ms)",
            f">{first} / {second}",
            ">95 % interval",
            f"{first} is",
        ]
        heads += [*(f">{what}" for what in BYTES), "Group", "Point"]
        caption = f"Times of {first} and {second}; peak memory and bytes sent of {first} over those of {second}"
        parts.append(Table(caption, heads, [_row(pair) for pair in pairs]))
    excluded = [
        [pair.reason, pair.first.group, _name(pair.first)]
        for pair in found.pairs
        if pair.reason
    ]
    if excluded:
        parts.append(
            Table(
                f"{len(excluded)} rows whose times are in no mean",
                ["Why", "Group", "Point"],
                excluded,
            )
        )
    return [*parts, "\n".join(_summary(found))]


def _row(pair: Pair) -> list:
    times = [None] * 4
    if ratio := pair.ratio:
        times = [number(median(r.seconds) * 1e3) for r in (pair.first, pair.second)]
        times += [
            number(ratio.value),
            interval(*ratio.ci) if ratio.rounds > 1 else None,
        ]
    held = map(pair.bytes, BYTES)
    grown = [
        None if x is None else "∞" if x[2] == math.inf else number(x[2], 4)
        for x in held
    ]
    return [*times, pair.verdict, *grown, pair.first.group, _name(pair.first)]


def _name(result) -> str:
    """A point in one line, without the switches that stand as they do by default."""
    point = result.point
    if point.system == "ringlab":
        point = point.but(
            options={k: v for k, v in point.options if DEFAULTS.get(k) != v}
        )
    return point.label()


def _summary(found: Comparison) -> Iterable[str]:
    first, second, timed = found.first.name, found.second.name, found.timed
    studies = found.first.study, found.second.study
    if studies[0].rehearsal:
        yield "Rehearsals: no time says how fast the device of the profile is."
    if found.mean:
        spread = (
            f" ({interval(*found.mean.ci)}, over the points)"
            if found.mean.rounds > 1
            else ""
        )
        points = counted(found.mean.rounds, "point")
        yield f"Geometric mean of {first} / {second} over {points}: {number(found.mean.value)}{spread}."
        said = Counter(pair.verdict for pair in timed)
        yield (
            f"{first} is faster in {said['faster']} rows, slower in {said['slower']}; not significant in "
            f"{said['not significant']}."
        )
    else:
        yield "No time to compare."
    if one := sum(pair.ratio.paired for pair in timed):
        yield f"{one} of these are one measurement, kept in both."
    factors = [
        noticed(pair.ratio, len(timed)) for pair in timed if not pair.ratio.paired
    ]
    if factors and median(factors) < math.inf:
        yield f"Half of the rows would be called different only from a factor of {number(median(factors))} on."
    for side in (found.first, found.second):
        if side.study.pace:
            by = number(100 * side.study.pace, 2)
            yield f"One call differed by {by} % from group to group in {side.name}: in the intervals."
    if (floor := max(study.noise_floor for study in studies)) > 1:
        yield f"The same work differed by up to {number(floor)} within a run; no smaller factor counts."
    if found.probe:
        yield f"Their machines' own matrix product, {first} / {second}: {number(found.probe.value)}."
    if studies[0].newest.get("method") != studies[1].newest.get("method"):
        yield "How points are measured changed between the two (method): a part of a difference may come from that."
    for side, only in zip((found.first, found.second), found.only):
        if only:
            yield f"Only in {side.name}, {len(only)}: {some([*map(_name, only)])}."


def worse(
    found: Comparison, failures: Sequence[tuple[Pair, str]], tolerance: float
) -> str:
    """What a check comes to: every row that is worse, by name, or that none is."""
    base, rows = found.second.name, len(found.timed)
    if not failures:
        limit = f"{100 * tolerance:.3g} %"
        said = f"check passed: of {rows} rows none is significantly slower than {base} by more than {limit}"
        return f"{said}, of {len(found.pairs)} none fails newly or needs more bytes"
    return "\n".join(
        [
            f"check FAILED: {len({id(pair) for pair, _ in failures})} of {len(found.pairs)} rows are worse than {base}:"
        ]
        + [
            f"  {pair.first.group}: {_name(pair.first)}: {why}"
            for pair, why in failures
        ]
    )


def aligned(table: Table) -> str:
    """A table for a terminal.

    >>> print(aligned(Table("Times", ["System", ">ms"], [["dense", "12.5"], ["ring", None]])))
    Times
    <BLANKLINE>
    System    ms
    dense   12.5
    ring       –
    """
    rows = [
        [c.lstrip(">") for c in table.columns],
        *([cell(x).plain for x in row] for row in table.rows),
    ]
    sides = [">" if c.startswith(">") else "<" for c in table.columns]
    return "\n".join([table.caption, "", *columns(rows, sides)])


def text(parts: Iterable[Table | str], markdown: bool = False) -> str:
    """All parts under each other."""
    if markdown:
        return "\n\n".join(
            part.replace("\n", "  \n") if isinstance(part, str) else part.markdown
            for part in parts
        )
    return "\n\n".join(
        part if isinstance(part, str) else aligned(part) for part in parts
    )
