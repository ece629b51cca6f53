"""Two runs side by side: which rows are alike, how far their times lie apart, and which
of that is a difference.

Rows are alike where group and point agree: system, pattern, shape, dtype, passes, ranks
and options. A row that stands in both runs, sample by sample, says nothing and is left
out. A row is called different only if its ratio lies beyond the drift of the machine by
more than the same work scatters. The *drift* is what the anchors of its group (work of
torch alone, ``measure.points.ANCHORS``) took longer in one run, on average. It is a floor
in its own direction and corrects no time: a call feels it more or less, and may not feel
it at all. The *scatter* is that of A/A controls within either run and of anchors around
the drift.

Runs without anchors, or of two machines, know no drift; one call from group to group
(``Study.between_group_sd``) then tells how far a machine scatters. p-values are corrected for the
number of rows (Benjamini and Hochberg 1995): of those called different at most 2 % are so
by chance.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev

from scipy.stats import false_discovery_control, t

from .. import measure
from ..advise import columns
from ..measure import stats, store
from ..measure.points import ANCHOR, Result
from ..measure.provenance import NoGit, device_of, git
from ..measure.stats import Ratio
from ..measure.store import NAME
from ..measure.validity import status, threads, why_not_quotable
from .places import UsageError, note
from .rows import label
from .study import Study, select_newest_run
from .tables import Table, cell, interval, number, size
from .templates import lines_of

CAUSES = {  # what is said where rows of two runs differ in it
    "engine": "other code",
    "method": "another way of measuring",
    "machine": "another machine",
    "device_name": "another device",
    "threads": "other threads",
    "torch": "another torch",
}
DEMANDED = [*CAUSES][1:]  # of a check, and of anchors: all but the engine
FALSE_ALARMS = 0.02  # of the rows that are called different, by chance
SEEN = 1.10  # the change of which a comparison says in how many rows it would be seen
GROWTH = 0.01  # bytes are counted, not sampled, and repeat
FEW = 4  # degrees of freedom of what is known from group to group alone
SAME = "the same row in both"
CROWDED, THREADS = UNLIKE = "oversubscribed", "with another number of threads"
SHOWN = 8  # rows of a table, unless all are asked for
# What a row may turn to on a disturbed machine; every other status is of the code.
BY_CHANCE = ("ok", "suspect")
BYTES = {  # what they are called where they grew, and how many a row has, if known
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
    """Rows with the name that the user gave them; ``no_times``: the file has rows that
    are no times.
    """

    name: str
    study: Study
    no_times: bool = False

    def values(self, name: str) -> list[str]:
        """What the provenance of its rows says of ``name``."""
        return sorted({str(r.provenance.get(name)) for r in self.study.results})


def alike(first: Side, second: Side, name: str) -> bool:
    """Whether all rows of both have one value of ``name``, or the same ones."""
    return first.values(name) == second.values(name)


def read_side(text: str, reports: Path) -> Side:
    """The rows that ``text`` names, of their newest machine, device and engine.

    ``text`` is a profile of ``reports``, a folder with samples.jsonl, such a file by
    any name, or REVISION:PROFILE, the rows as they were committed. Raises UsageError,
    one line, where there are none or another version wrote them.
    """
    data = _committed(text, reports) if ":" in text else _in_files(text, reports)
    schemas = set(map(int, re.findall(rb'"schema": (\d+)', data)))
    if other := sorted(schemas - {measure.SCHEMA}):
        raise UsageError(
            f"{text}: rows of schema {', '.join(map(str, other))}, this version of ringlab reads schema "
            f"{measure.SCHEMA}; compare runs of one version"
        )
    everything, faults, _ = store.scan(data)
    if faults:
        note(f"ringlab: {store.told(text, faults)}")
    if not everything:
        raise UsageError(f"{text}: no complete row in it")
    study = Study(None, folder=Path(text), **select_newest_run(everything))
    no_times = any(isinstance(x, store.NoTime) for x in faults.values())
    return Side(text, study, no_times)


def _in_files(text: str, reports: Path) -> bytes:
    names = f"data/{NAME}", NAME, "."
    for path in (reports / text / names[0], *(Path(text) / name for name in names)):
        if text and path.is_file():
            return path.read_bytes()
    known = sorted(path.parents[1].name for path in reports.glob(f"*/data/{NAME}"))
    raise UsageError(
        f"no rows of {text!r}; name a profile with rows ({', '.join(known) or 'there is none yet'}), a folder with "
        f"{NAME}, such a file, or REVISION:PROFILE"
    )


def _committed(text: str, reports: Path) -> bytes:
    revision, _, profile = text.partition(":")
    name = f"{revision}:./{profile}/data/{NAME}"  # ./ is the folder that git is run in
    try:
        return git(reports, "show", "--end-of-options", name)
    except NoGit as why:
        raise UsageError(f"no rows of {text!r}: {why}") from None


# --------------------------------------------------------------------------------------
# pairs of rows


@dataclass(frozen=True)
class Pair:
    """One point in both runs; ``ratio``: time of the first over time of the second,
    its interval with the scatter; None with the ``reason`` why not, if it has times.

    ``p``: the chance of such a ratio if nothing but the machine differs, corrected for
    the number of rows; ``seen``: what it would be of work ``SEEN`` times as long, uncorrected.
    """

    first: Result
    second: Result
    reason: str = ""
    ratio: Ratio | None = None
    p: float = 1.0
    seen: float = 1.0

    @property
    def verdict(self) -> str:
        """What is said of the first beside the second."""
        if self.ratio is None:
            return self.reason or "not timed"
        if self.p > FALSE_ALARMS:
            return "within noise"
        return "slower" if self.ratio.value > 1 else "faster"

    def bytes(self, what: str) -> tuple[int, int] | None:
        """Bytes of ``what`` of the first and of the second; None if not known of both."""
        if why_not_quotable(self.first) or why_not_quotable(self.second):
            return None
        known = tuple(map(BYTES[what][1], (self.first, self.second)))
        return None if None in known else known

    def growth(self, what: str) -> float | None:
        """How many times as many bytes the first has; a byte counts for none."""
        both = self.bytes(what)
        return both and max(1, both[0]) / max(1, both[1])

    @property
    def size(self) -> float:
        """The logarithm of the largest factor by which the two differ, 0 within noise."""
        by = [x for x in map(self.growth, BYTES) if x and abs(x - 1) > GROWTH]
        if self.p <= FALSE_ALARMS:
            by.append(self.ratio.value)
        return max((abs(math.log(x)) for x in by), default=0.0)


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, how many points are ``only`` in one, their noise.

    ``drifts``: by group, how many times as long its anchors took in the first run, on
    average. ``scatter``: the standard deviation of the logarithm of a ratio of the same
    work, beside that, and ``df``, its degrees of freedom; 0.0 and 0 if not known.
    """

    first: Side
    second: Side
    pairs: Sequence[Pair]
    only: dict[str, int]
    drifts: dict[str, float]
    scatter: float
    df: int

    @property
    def timed(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.ratio is not None]

    @property
    def same(self) -> bool:
        """Both sides are the same rows."""
        return all(pair.reason == SAME for pair in self.pairs)

    @property
    def whole(self) -> tuple[float, float, float] | None:
        """How many times as long the first run took as a whole, beside the drift of each
        group, with the ends of an interval over groups; None for few groups with anchors.
        """
        logs = defaultdict(list)
        for pair in self.timed:
            if (group := pair.first.group) in self.drifts:
                log = math.log(pair.ratio.value) - self.drifts[group]
                logs[group].append(log)
        if len(logs) < FEW:
            return None
        means = [*map(fmean, logs.values())]
        reach = quantile(len(means) - 1, FALSE_ALARMS) * stdev(means)
        reach /= math.sqrt(len(means))
        return tuple(math.exp(fmean(means) + x) for x in (0.0, -reach, reach))

    @property
    def seen(self) -> int:
        """How many rows would be called slower if all took ``SEEN`` times as long."""
        chances = _corrected([pair.seen for pair in self.timed])
        return sum(p <= FALSE_ALARMS for p in chances)


def compare(first: Side, second: Side) -> Comparison:
    """Pair the rows of two runs; raises UsageError where they have nothing alike,
    saying why.
    """
    sides = first, second
    one, other = rows = [{r.id: r for r in side.study.rows()} for side in sides]
    both = [(row, other[name]) for name, row in one.items() if name in other]
    anchors = [pair for pair in both if pair[0].option(ANCHOR)]
    both = [pair for pair in both if not pair[0].option(ANCHOR)]
    if not both:
        raise UsageError(f"{first.name} and {second.name} have no point in common")
    comparison = Comparison(first, second, [], {}, *_noise(sides, anchors))
    pairs = [with_noise(_pair(a, b, sides), comparison) for a, b in both]
    if {pair.reason for pair in pairs} <= {*UNLIKE}:
        raise UsageError(
            f"no row of {first.name} is like one of {second.name}: {_most_common(pairs)}"
        )
    p_values = iter(_corrected([x.p for x in pairs if x.ratio]))
    pairs = [replace(x, p=next(p_values)) if x.ratio else x for x in pairs]
    lone = [
        [r for name, r in own.items() if name not in both and not r.option(ANCHOR)]
        for own, both in zip(rows, (other, one))
    ]
    only = {f"only in {side.name}": len(each) for side, each in zip(sides, lone)}
    return replace(comparison, pairs=pairs, only=only)


def _noise(sides: Sequence[Side], anchors: Iterable) -> tuple[dict, float, int]:
    """(drifts, scatter, df) of a comparison, see there.

    The scatter is of A/A controls within either run, and of anchors around the drift of
    their group; where there are none, of one call from group to group.
    """
    logs = defaultdict(list)  # by group
    here = all(alike(*sides, name) for name in DEMANDED)
    for pair in anchors if here else ():
        if not any(r.provenance.get("crowded") or status(r) for r in pair):
            logs[pair[0].group].append(math.log(measure.ratio(*pair).value))
    drifts = {group: fmean(each) for group, each in logs.items()}
    rests = [x - drifts[group] for group, each in logs.items() for x in each]
    controls = (x for side in sides for x in side.study.controls)
    rests += [math.log(x.value) for x in controls if not x.unstable]
    df = len(rests) - len(drifts)
    scatter = math.sqrt(sum(x * x for x in rests) / df) if df else 0.0
    if not drifts:
        between = math.hypot(*(side.study.between_group_sd for side in sides))
        scatter = max(scatter, between)
        df = df or FEW * bool(between)
    return drifts, scatter, df


def check(
    now: Side, base: Side, tolerance: float
) -> tuple[Comparison, list[tuple[Pair, str]]]:
    """The comparison of ``now`` with ``base``, and every row that is worse, with the
    reason.

    A time is worse where it is slower, all rows taken together, and its ratio exceeds
    1 + ``tolerance``; bytes are where they grew by more than 1 %; a row that was quoted
    is where it now fails, unless a disturbed machine may be why. Raises UsageError
    where more than the engine differs, where no row was compared, and for rows that are
    no times: to pass would say all is well.
    """
    for side in (now, base):
        if side.no_times:
            raise UsageError(
                f"no check of {now.name} against {base.name}: rows of {side.name} are no times, see above; "
                "remove these lines"
            )
    comparison = compare(now, base)
    pairs = comparison.pairs
    for name in DEMANDED:
        if not alike(now, base, name):
            one, other = (", ".join(side.values(name)) for side in (base, now))
            raise UsageError(
                f"no check of {now.name} against {base.name}: they differ in {name} ({one}; {other}); "
                "compare shows them side by side"
            )
    failures = [(pair, why) for pair in pairs for why in _worse(pair, tolerance)]
    if not (comparison.timed or failures):
        raise UsageError(
            f"no time of {now.name} may be compared with {base.name}: {_most_common(pairs)}"
        )
    return comparison, failures


def _most_common(pairs: Sequence[Pair]) -> str:
    why, count = Counter(pair.verdict for pair in pairs).most_common(1)[0]
    return f"{why} ({count} of {len(pairs)} points)"


def _worse(pair: Pair, tolerance: float) -> Iterable[str]:
    if pair.verdict == "slower" and pair.ratio.value > 1 + tolerance:
        yield f"{number(pair.ratio.value)} times as long ({interval(*pair.ratio.ci)})"
    for name, (grown, _) in BYTES.items():
        if (pair.growth(name) or 1) > 1 + GROWTH:
            now, was = pair.bytes(name)
            yield f"{grown}, {size(was)} to {size(now)} ({now - was:+,} bytes)"
    if pair.first.status not in BY_CHANCE and not why_not_quotable(pair.second):
        yield f"now {pair.first.status}: {pair.first.reason or 'no reason given'}"


def _pair(a: Result, b: Result, sides: Sequence[Side]) -> Pair:
    devices = {device_of(r.provenance) for r in (a, b)}
    doubts = [
        f"{why} in {side.name}" for r, side in zip((a, b), sides) if (why := _doubt(r))
    ]
    if a.run == b.run and a.seconds == b.seconds:
        reason = SAME
    elif a.ranks.get("oversubscribed") or b.ranks.get("oversubscribed"):
        reason = CROWDED
    elif len(devices) == 1 and threads(a) != threads(b):
        reason = THREADS
    elif doubts:
        reason = doubts[0]
    elif a.seconds and b.seconds:
        return Pair(a, b, ratio=measure.ratio(a, b))
    else:  # a group that is not timed
        reason = ""
    return Pair(a, b, reason)


def _doubt(row: Result) -> str:
    """Why its time is not compared, in a word, or an empty string."""
    few = row.seconds and len(row.seconds) < stats.FEWEST
    return status(row) or ("unstable" if row.unstable else "few samples" if few else "")


# --------------------------------------------------------------------------------------
# which ratios are differences


def with_noise(pair: Pair, comparison: Comparison) -> Pair:
    """The pair with a ratio that holds the noise of the comparison, and its p-value,
    two-sided.

    The scatter widens its interval, of Student's t, and the drift of its group is its
    floor, in the direction of the drift. The p-value is that of the interval (Altman and
    Bland 2011, BMJ 343, d2304).
    """
    if pair.ratio is None:
        return pair
    ratio = pair.ratio
    drifts = comparison.drifts
    value, low, high = map(math.log, (ratio.value, *ratio.ci))
    drift = drifts.get(pair.first.group, fmean(drifts.values() or [0.0]))
    beyond = abs(value) - max(0.0, drift if value > 0 else -drift)
    df = min(ratio.rounds - 1, comparison.df or math.inf)
    scatter = quantile(df) * comparison.scatter
    down = math.hypot(value - low, scatter)
    up = math.hypot(high - value, scatter)

    def p_value(distance: float, reach: float) -> float:
        return 2 * float(t.sf(quantile(df) * max(0.0, distance) / (reach or 1e-9), df))

    return replace(
        pair,
        ratio=replace(ratio, low=math.exp(value - down), high=math.exp(value + up)),
        p=p_value(beyond, down if value > 0 else up),
        seen=p_value(math.log(SEEN) + min(0.0, drift), down),
    )


def _corrected(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Benjamini and Hochberg 1995)."""
    return false_discovery_control(p_values).tolist()


def quantile(df: int, level: float = 1 - stats.LEVEL) -> float:
    """The t beyond which a part ``level`` of Student's t with ``df`` degrees of freedom
    lies, both sides together.

    >>> round(quantile(3), 3), round(quantile(9, 0.01), 3)
    (3.182, 3.25)
    """
    return float(t.isf(level / 2, df))


# --------------------------------------------------------------------------------------
# a comparison as text


def sections(comparison: Comparison, everything: bool = False) -> list[Table | str]:
    """The verdict, then the rows that differ, the largest differences first, and how
    many more there are; ``everything``: all rows.
    """
    first = comparison.first.name
    second = comparison.second.name
    if comparison.same:
        return [f"{first} and {second} are the same rows: nothing compared"]
    differ = sorted((x for x in comparison.pairs if x.size), key=lambda x: -x.size)
    pairs = comparison.pairs if everything else differ[:SHOWN]
    parts = ["\n".join(_summary(comparison))]
    if pairs:
        lines = [_line(pair, first, second) for pair in pairs]
        caption = f"Times, peak memory and bytes sent of {first} over {second}"
        parts.append(Table(caption, [*lines[0]], [[*x.values()] for x in lines]))
    return [*parts, *_more(len(differ) - len(pairs))]


def _more(count: int) -> list[str]:
    return [f"and {count} more: --all shows every row"] if count > 0 else []


def _line(pair: Pair, first: str, second: str) -> dict:
    """A row of the table, by column."""
    ratio = pair.ratio
    rows = (pair.first, pair.second)
    times = [ratio and number(median(r.seconds) * 1e3) for r in rows]
    return {
        f">{first} (ms)": times[0],
        f">{second} (ms)": times[1],
        ">Ratio": ratio and number(ratio.value),
        ">95 % interval": ratio and interval(*ratio.ci),
        f"{first} is": pair.verdict,
        **{f">{x}": (by := pair.growth(x)) and number(by, 4) for x in BYTES},
        "Group": pair.first.group,
        "Point": label(pair.first.point),
    }


def _summary(comparison: Comparison) -> list[str]:
    """The verdict in one line, then what it rests on."""
    sides = (comparison.first, comparison.second)
    timed = comparison.timed
    left = Counter(pair.reason for pair in comparison.pairs if pair.reason)
    ratios = [pair.ratio.value for pair in timed]
    return lines_of(
        "comparison",
        comparison=comparison,
        first=sides[0].name,
        second=sides[1].name,
        rows=len(timed),
        verdicts=Counter(pair.verdict for pair in timed),
        left=left + Counter(comparison.only),
        causes=[
            f"{cause} ({' and '.join(', '.join(side.values(name)) for side in sides)})"
            for name, cause in CAUSES.items()
            if not alike(*sides, name)
        ],
        drifts=[math.exp(x) for x in sorted(comparison.drifts.values())],
        known=comparison.df,
        change=SEEN,
        mean=geometric_mean(ratios or [1.0]),
    )


def worse(
    comparison: Comparison, failures: Sequence[tuple[Pair, str]], tolerance: float
) -> str:
    """What a check comes to, in one line, then the rows that are worse, by name, and
    the verdict of the comparison.
    """
    named = [(f"{x.first.group}: {label(x.first.point)}", why) for x, why in failures]
    verdict = lines_of(
        "check",
        failures=named[:SHOWN],
        worse=len({id(pair) for pair, _ in failures}),
        count=len(comparison.pairs),
        timed=len(comparison.timed),
        base=comparison.second.name,
        tolerance=tolerance,
    )
    more = _more(len(failures) - SHOWN)
    return "\n".join([*verdict, *more, *_summary(comparison)])


def aligned(table: Table) -> str:
    """A table for a terminal.

    >>> print(aligned(Table("Times", ["System", ">ms"], [["dense", "12.5"], ["ring", None]])))
    Times
    <BLANKLINE>
    System    ms
    dense   12.5
    ring       –
    """
    rows = [[c.lstrip(">") for c in table.columns]]
    rows += [[cell(x).plain for x in row] for row in table.rows]
    sides = [">" if c.startswith(">") else "<" for c in table.columns]
    return "\n".join([table.caption, "", *columns(rows, sides)])


def text(parts: Iterable[Table | str], markdown: bool = False) -> str:
    """All parts under each other."""
    line = "  \n" if markdown else "\n"

    def shown(part: Table | str) -> str:
        if isinstance(part, str):
            return part.replace("\n", line)
        return part.markdown if markdown else aligned(part)

    return "\n\n".join(map(shown, parts))
