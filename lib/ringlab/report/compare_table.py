"""A comparison as text: aligned for a terminal, as Markdown, and row by row as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from .compare import BYTES, Comparison, Pair
from .places import UsageError
from .rows import DEFAULTS
from .tables import Table, cell, interval, number, size

NAMED = 3  # points that a line names before it only counts them
WORSE = {"slower": "slower", "peak": "higher peak of memory", "sent": "more bytes sent"}


def name_of(result) -> str:
    """A point in one line, without the switches that stand as they do by default."""
    point = result.point
    if point.system == "ringlab":
        point = point.but(options={k: v for k, v in point.options if DEFAULTS.get(k) != v})
    return point.label()


def sections(found: Comparison, pairs: Sequence[Pair] | None = None) -> list[Table | str]:
    """Where the rows come from, the ``pairs`` (default: all), what is left out and why, and what it comes to."""
    first, second = found.first.name, found.second.name
    shown = found.pairs if pairs is None else pairs
    abouts = found.first.about(), found.second.about()
    parts = [Table("Where the rows come from", ["", first, second], [[k, *(a[k] for a in abouts)] for k in abouts[0]])]
    if shown:
        columns = [f">{first} (ms)", f">{second} (ms)", f">{first} / {second}", ">95 % interval"]
        columns += [f"{second if pairs is None else first} is", ">Peak", ">Sent", "Group", "Point"]
        caption = f"Times of {first} and {second}; peak memory and bytes sent of {first} over those of {second}"
        rows = [_row(found, pair, turned=pairs is None) for pair in shown]
        parts.append(Table(caption, columns, rows))
    if found.excluded:
        rows = [[pair.reason, pair.first.group, name_of(pair.first)] for pair in found.excluded]
        parts.append(Table(f"{len(rows)} rows whose times are in no mean", ["Why", "Group", "Point"], rows))
    return [*parts, "\n".join(_summary(found))]


def _row(found: Comparison, pair: Pair, turned: bool) -> list:
    times = [number(median(r.seconds) * 1e3) if r.seconds else None for r in (pair.first, pair.second)]
    if pair.ratio is None:
        times, ratio, spread = [None, None], None, None
    else:
        ratio = number(pair.ratio.value)
        spread = interval(*pair.ratio.ci) if pair.ratio.rounds > 1 else None
    grown = [None if (g := pair.growth(what)) is None else "∞" if g == math.inf else number(g, 4) for what in BYTES]
    return [*times, ratio, spread, verdict(pair, turned), *grown, pair.first.group, name_of(pair.first)]


def verdict(pair: Pair, turned: bool = False) -> str | None:
    """What is said of the first beside the second; ``turned``: of the second beside the first."""
    if pair.ratio is None:
        return "excluded" if pair.reason else None
    if pair.significantly_slower or pair.significantly_faster:
        return "slower" if pair.significantly_slower != turned else "faster"
    return "not significant"


def _summary(found: Comparison) -> Iterable[str]:
    first, second = found.first.name, found.second.name
    longer, shorter = sum(p.significantly_slower for p in found.timed), sum(p.significantly_faster for p in found.timed)
    if found.first.study.rehearsal:
        yield "Rehearsals: no time says how fast the device of the profile is."
    if found.mean:
        spread = f" ({interval(*found.mean.ci)}, points resampled)" if found.mean.rounds > 1 else ""
        points = f"{found.mean.rounds} point{'s' * (found.mean.rounds > 1)}"
        yield f"Geometric mean of {first} / {second} over {points}: {number(found.mean.value)}{spread}."
        same = len(found.timed) - longer - shorter
        yield f"{second} is faster in {longer} rows, slower in {shorter}; not significant in {same}."
    else:
        yield "No time to compare."
    if found.same:
        yield f"{len(found.same)} of these are one measurement, kept in both."
    if found.noticed < math.inf:
        yield f"Half of the rows would be called different only from a factor of {number(found.noticed)} on."
    for side in (found.first, found.second):
        if side.study.pace:
            by = number(100 * side.study.pace, 2)
            yield f"One call differed by {by} % from group to group in {side.name}: in the intervals."
    if found.noise_floor > 1:
        yield f"The same work differed by up to {number(found.noise_floor)} within a run; no smaller factor counts."
    if found.probe:
        yield f"Their machines' own matrix product, {first} / {second}: {number(found.probe.value)}."
    if found.first.newest.get("method") != found.second.newest.get("method"):
        yield "How points are measured changed between the two (method): a part of a difference may come from that."
    for side, only in zip((found.first, found.second), found.only):
        if only:
            more = f"; and {len(only) - NAMED} more" if len(only) > NAMED else ""
            yield f"Only in {side.name}, {len(only)}: {'; '.join(map(name_of, only[:NAMED]))}{more}."


def worse(found: Comparison, failures: Sequence[tuple[Pair, str]], tolerance: float) -> str:
    """What a check comes to: every row that is worse, by name, or that none is."""
    base, counted = found.second.name, len(found.timed)
    if not failures:
        limit = f"{100 * tolerance:.3g} %"
        said = f"check passed: of {counted} rows none is significantly slower than {base} by more than {limit}"
        return f"{said}, of {len(found.pairs)} none fails newly or needs more bytes"
    return "\n".join(
        [f"check FAILED: {len({id(pair) for pair, _ in failures})} of {len(found.pairs)} rows are worse than {base}:"]
        + [f"  {pair.first.group}: {name_of(pair.first)}: {_how(pair, why)}" for pair, why in failures]
    )


def _how(pair: Pair, why: str) -> str:
    if why == "slower":
        return f"{number(pair.ratio.value)} times as long ({interval(*pair.ratio.ci)})"
    if why in BYTES:
        first, second = pair.bytes(why)
        return f"{WORSE[why]}, {size(second)} to {size(first)} ({first - second:+,} bytes)"
    return f"now {why}: {pair.first.reason or 'no reason given'}"


def aligned(table: Table) -> str:
    """A table for a terminal.

    >>> print(aligned(Table("Times", ["System", ">ms"], [["dense", "12.5"], ["ring", None]])))
    Times
    <BLANKLINE>
    System    ms
    dense   12.5
    ring       –
    """
    rows = [[c.lstrip(">") for c in table.columns], *([cell(x).plain for x in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    right = [c.startswith(">") for c in table.columns]

    def line(row):
        return "  ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in zip(row, widths, right)).rstrip()

    return "\n".join([table.caption, "", *map(line, rows)])


def text(parts: Iterable[Table | str], markdown: bool = False) -> str:
    """All parts under each other."""
    if markdown:
        return "\n\n".join(part.replace("\n", "  \n") if isinstance(part, str) else part.markdown for part in parts)
    return "\n\n".join(part if isinstance(part, str) else aligned(part) for part in parts)


FIELDS = (
    "point", "group", "name", "seconds_first", "seconds_second", "ratio", "low", "high", "p", "time_of_first",
    "peak_first", "peak_second", "sent_first", "sent_second", "not_compared_because",
)  # fmt: skip


def write_csv(path: Path, found: Comparison) -> None:
    """One line per point, those that only one side has included; raises UsageError where it cannot be written."""
    rows = []
    for pair in found.pairs:
        times = [median(r.seconds) if r.seconds and not pair.reason else None for r in (pair.first, pair.second)]
        ratio = (pair.ratio.value, *pair.ratio.ci, pair.p) if pair.ratio else (None,) * 4
        counted = [n for what in BYTES for n in pair.bytes(what)]
        rows.append([*_key(pair.first), *times, *ratio, verdict(pair), *counted, pair.reason])
    for side, only in zip((found.first, found.second), found.only):
        rows += [[*_key(r), *[None] * (len(FIELDS) - 4), f"only in {side.name}"] for r in only]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([FIELDS, *rows])
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _key(r) -> list[str]:
    return [r.point.id, r.group, name_of(r)]
