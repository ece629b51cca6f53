"""Two runs side by side: which rows are alike, how far their times lie apart, and which
of that is a difference.

Rows are alike where group and point agree: system, pattern, shape, dtype, passes, ranks
and options. A row that stands in both runs, sample by sample, says nothing and is left
out. A row is called different if the 99.9 % interval of its ratio, which holds the noise
of both runs, lies beyond the drift of the machine, in the direction of the drift:
``noise.py`` says how both are known. The drift corrects no time: a call feels it more
or less, and may not feel it at all. Runs without anchors, or of two machines, know none.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean, median

from .. import measure
from ..advise import columns
from ..measure import stats, store
from ..measure.points import ANCHOR, Result
from ..measure.provenance import NoGit, device_of, git
from ..measure.stats import Ratio
from ..measure.store import NAME
from ..measure.validity import status, threads, why_not_quotable
from .noise import Noise, noise_between
from .places import UsageError, note, reports_folder
from .rows import label
from .study import Study, study_of
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
GROWTH = 0.01  # bytes are counted, not sampled, and repeat
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
        return sorted({str(row.provenance.get(name)) for row in self.study.results})


def alike(first: Side, second: Side, name: str) -> bool:
    """Whether all rows of both have one value of ``name``, or the same ones."""
    return first.values(name) == second.values(name)


def read_side(text: str, reports: Path | None = None) -> Side:
    """The rows that ``text`` names, of their newest machine, device and engine.

    ``text`` is a profile of ``reports`` (None: those of the checkout), a folder with
    samples.jsonl, such a file by any name, or REVISION:PROFILE, the rows as they were
    committed. Raises UsageError, one line, where there are none or another version
    wrote them.
    """
    reports = reports or reports_folder()
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
    study = study_of(everything, None, Path(text))
    no_times = any(isinstance(each, store.NoTime) for each in faults.values())
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
    """One point in both runs; ``ratio``: time of the first over time of the second, with
    the noise; None with the ``reason`` why not, if it has times.
    """

    first: Result
    second: Result
    reason: str = ""
    ratio: Ratio | None = None

    @property
    def verdict(self) -> str:
        """What is said of the first beside the second."""
        return self.ratio.verdict if self.ratio else self.reason or "not timed"

    @property
    def seen(self) -> float:
        """The least factor by which a slower first row would be called so."""
        return self.ratio.same[1] * self.ratio.value / self.ratio.low

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
        by = [
            each for each in map(self.growth, BYTES) if each and abs(each - 1) > GROWTH
        ]
        if self.verdict in ("slower", "faster"):
            by.append(self.ratio.value)
        return max((abs(math.log(each)) for each in by), default=0.0)


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, how many points are ``only`` in one, their noise.

    ``drifts``, ``noise``: as ``noise_between`` gives them; no drifts where not known.
    """

    first: Side
    second: Side
    pairs: Sequence[Pair]
    only: dict[str, int]
    drifts: dict[str, float]
    noise: Noise

    @property
    def timed(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.ratio is not None]


def compare(first: Side, second: Side) -> Comparison:
    """Pair the rows of two runs; raises UsageError where they have no point in common."""
    sides = first, second
    one, other = rows = [
        {row.id: row for row in side.study.rows() if not row.option(ANCHOR)}
        for side in sides
    ]
    if not one.keys() & other.keys():
        raise UsageError(f"{first.name} and {second.name} have no point in common")
    anchored = all(alike(*sides, name) for name in DEMANDED)
    drifts, noise = noise_between(first.study, second.study, anchored)
    mean = fmean(drifts.values() or [0.0])
    pairs = []
    for a, b in ((one[name], other[name]) for name in one if name in other):
        reason = _reason(a, b, sides)
        ratio = None
        if a.seconds and b.seconds and not reason:
            drift = math.exp(drifts.get(a.group, mean))
            ratio = noise.of(measure.ratio(a, b), (min(1.0, drift), max(1.0, drift)))
        pairs.append(Pair(a, b, reason, ratio))
    only = {
        f"only in {side.name}": len(own.keys() - them.keys())
        for side, own, them in zip(sides, rows, rows[::-1])
    }
    return Comparison(first, second, pairs, only, drifts, noise)


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
        why, count = Counter(pair.verdict for pair in pairs).most_common(1)[0]
        raise UsageError(
            f"no time of {now.name} may be compared with {base.name}: {why} ({count} of {len(pairs)} points)"
        )
    return comparison, failures


def _worse(pair: Pair, tolerance: float) -> Iterable[str]:
    if pair.verdict == "slower" and pair.ratio.value > 1 + tolerance:
        yield f"{number(pair.ratio.value)} times as long ({interval(*pair.ratio.ci)})"
    for name, (grown, _) in BYTES.items():
        if (pair.growth(name) or 1) > 1 + GROWTH:
            now, was = pair.bytes(name)
            yield f"{grown}, {size(was)} to {size(now)} ({now - was:+,} bytes)"
    if pair.first.status not in BY_CHANCE and not why_not_quotable(pair.second):
        yield f"now {pair.first.status}: {pair.first.reason or 'no reason given'}"


def _reason(a: Result, b: Result, sides: Sequence[Side]) -> str:
    """Why the times of two rows are not compared, or an empty string."""
    if a.run == b.run and a.seconds == b.seconds:
        return "the same row in both"
    if a.ranks.get("oversubscribed") or b.ranks.get("oversubscribed"):
        return "oversubscribed"
    same_device = device_of(a.provenance) == device_of(b.provenance)
    if same_device and threads(a) != threads(b):
        return "with another number of threads"
    doubts = zip(map(_doubt, (a, b)), sides)
    return next((f"{why} in {side.name}" for why, side in doubts if why), "")


def _doubt(row: Result) -> str:
    """Why its time is not compared, in a word, or an empty string."""
    few = row.seconds and len(row.seconds) < stats.FEWEST
    return status(row) or ("unstable" if row.unstable else "few samples" if few else "")


# --------------------------------------------------------------------------------------
# a comparison as text


def sections(comparison: Comparison, everything: bool = False) -> list[Table | str]:
    """The verdict, then the rows that differ, the largest differences first, and how
    many more there are; ``everything``: all rows.
    """
    first = comparison.first.name
    second = comparison.second.name
    differ = sorted((x for x in comparison.pairs if x.size), key=lambda x: -x.size)
    pairs = comparison.pairs if everything else differ[:SHOWN]
    parts = ["\n".join(_summary(comparison))]
    if pairs:
        lines = [_line(pair, first, second) for pair in pairs]
        caption = f"Times, peak memory and bytes sent of {first} over {second}"
        rows = [[*x.values()] for x in lines]
        parts.append(Table(caption, [*lines[0]], rows))
    return [*parts, *_more(len(differ) - len(pairs))]


def _more(count: int) -> list[str]:
    return [f"and {count} more: --all shows every row"] if count > 0 else []


def _line(pair: Pair, first: str, second: str) -> dict:
    """A row of the table, by column."""
    ratio = pair.ratio
    rows = (pair.first, pair.second)
    times = [ratio and number(median(row.seconds) * 1e3) for row in rows]
    return {
        f">{first} (ms)": times[0],
        f">{second} (ms)": times[1],
        ">Ratio": ratio and number(ratio.value),
        ">99.9 % interval": ratio and interval(*ratio.ci),
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
        drifts=[math.exp(each) for each in sorted(comparison.drifts.values())],
        seen=sorted(pair.seen for pair in timed),
        scatter=math.sqrt(2) * comparison.noise.apart,
        mean=geometric_mean([pair.ratio.value for pair in timed] or [1.0]),
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
    rows += [[cell(each).plain for each in row] for row in table.rows]
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
