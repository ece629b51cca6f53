"""Columns of tables: each quantity has one header, one unit and one way to be shown.

A line of a table is a Result, or a dict of Results by name where a line compares
several, or whatever the functions of its columns take. A row that may not be shown
gives its status instead of a number.

>>> Column("Tokens", lambda line: line["n"]).show({"n": 8})
8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .study import Study, best
from .tables import Cell, Table, interval, number, size
from .trust import objection, roofline_s, status


@dataclass(frozen=True)
class Column:
    """A ``header``, right-aligned after ``>``, and what it shows of a line."""

    header: str
    show: Callable

    def of(self, name: str, header: str = "") -> Column:
        """The same quantity of one of the rows of a line."""
        return Column(
            header or self.header,
            lambda line: None if line.get(name) is None else self.show(line[name]),
        )


def table(caption: str, columns: Sequence[Column], lines: Sequence, **more) -> Table:
    """A table with a row for each line. In a rehearsal the header of a roofline names
    its device, not the page's.
    """
    found = (
        r
        for x in lines
        for r in (x.values() if isinstance(x, dict) else (x,))
        if getattr(r, "rehearsal", False)
    )
    whose = next(
        (f"Roofline of {r.provenance.get('device_name')}" for r in found), "Roofline"
    )
    return Table(
        caption,
        [c.header.replace("Roofline", whose) for c in columns],
        [[c.show(x) for c in columns] for x in lines],
        **more,
    )


# --------------------------------------------------------------------------------------
# which rows may be shown, and how far


def shown(row) -> bool:
    return row is not None and not objection(row)


def simulated(row) -> bool:
    """Its ranks are no processes, so that it has no time and no memory of a rank."""
    return row.option("simulated") is not None


def ranks(row) -> int:
    """Ranks that share the work, as processes or simulated in one."""
    return max(row.point.world_size, row.option("simulated", 1))


def timed(row) -> bool:
    """It has a time to compare: a process and a core for each rank, and a passed check."""
    return (
        shown(row)
        and bool(row.median)
        and not simulated(row)
        and not row.ranks.get("oversubscribed")
    )


def rows_of(study: Study, system: str, **wanted) -> dict[tuple[int, int], object]:
    """(tokens, ranks) -> row of a system, real processes before simulated ones.

    By default forward, not causal, and of all eight heads: the longest rows have one.
    """
    wanted = {"passes": "fwd", "causal": False, "heads": 8, **wanted}
    found: dict[tuple[int, int], list] = {}
    for r in study.rows(system=system, **wanted):
        found.setdefault((r.point.seq_len, ranks(r)), []).append(r)
    return {
        key: best(sorted(rows, key=simulated)) for key, rows in sorted(found.items())
    }


def peak_bytes(row) -> int | None:
    """Peak of live tensors, inputs and results included, on the rank that holds most."""
    return (
        row.memory.get("tracked_peak_bytes")
        if shown(row) and not simulated(row)
        else None
    )


def floor_bytes(row) -> int | None:
    """Bytes of q, k, v and out (in a backward their gradients too) on that rank."""
    return row.memory.get("floor_bytes") if peak_bytes(row) else None


def per_token(row) -> float | None:
    """Peak bytes of a rank for each token of the whole sequence and batch."""
    held = peak_bytes(row)
    return held / (row.point.batch * row.point.seq_len) if held else None


def sent_bytes(row) -> int | None:
    """Bytes that the busiest rank sends in one call, counted; a row is ok only if they
    are those planned.
    """
    if not shown(row):
        return None
    return (
        max(row.ranks["bytes_sent"])
        if "bytes_sent" in row.ranks
        else 0
        if ranks(row) == 1
        else None
    )


# --------------------------------------------------------------------------------------
# cells


def time(row, scale: float = 1e3) -> Cell:
    """Median with its interval, of several ranks the slowest one's, or why there is
    none.
    """
    if row is None:
        return Cell("not measured", kind="none")
    if objection(row):
        return Cell(status(row), kind="bad")
    if not timed(row):
        why = (
            "simulated"
            if simulated(row)
            else "more ranks than cores"
            if row.ranks.get("oversubscribed")
            else ""
        )
        return Cell(why or "not timed", kind="none")
    said = interval(*(row.ci or (None, None)), scale) + (
        "; unstable" if row.unstable else ""
    )
    return Cell(number(row.median * scale), said)


def roofline(row) -> Cell | None:
    """The shortest time in ms that the device's rates allow, of a CPU's for the threads
    of the row.
    """
    return (
        Cell(number(roofline_s(row) * 1e3)) if timed(row) and roofline_s(row) else None
    )


def peak(row) -> Cell | None:
    """Peak memory, and as a multiple of inputs and results."""
    held, floor = peak_bytes(row), floor_bytes(row)
    return Cell(size(held), f"{held / floor:.2f} × tensors") if held and floor else None


def error(row) -> Cell | None:
    """The error that is nearest to what is allowed, among output, log-sum-exp and
    gradients.
    """
    if not shown(row) or not row.errors:
        return None
    name = max(row.errors, key=lambda k: row.errors[k] / row.tolerance[k])
    return Cell(f"{row.errors[name]:.1e}", f"{name} ≤ {row.tolerance[name]:.1e}")


def beyond(ratio) -> int:
    """1 where the second row of a ratio is faster beyond noise, -1 where it is slower,
    0 where neither is known.
    """
    return (
        0 if ratio is None else ratio.significantly_slower - ratio.significantly_faster
    )


def times(ratio) -> Cell | None:
    """How many times as fast, with its interval; a ratio within the noise of the run
    says so.
    """
    if ratio is None:
        return None
    doubts = (
        [] if beyond(ratio) or ratio.high == math.inf else ["within noise"]
    )  # not said without an interval
    doubts += ["unstable"] * ratio.unstable + ["unpaired"] * (not ratio.paired)
    return Cell(f"{number(ratio.value)}×", "; ".join([interval(*ratio.ci), *doubts]))


def ratio(study: Study, slow: str, fast: str, header: str) -> Column:
    """How many times longer one row of a line takes than another."""
    return Column(
        header, lambda line: times(study.ratio(line.get(slow), line.get(fast)))
    )


TOKENS = Column(">Tokens", lambda r: r.point.seq_len)
RANKS = Column(
    ">Ranks", lambda r: Cell(str(ranks(r)), "simulated" if simulated(r) else "")
)
MASK = Column("Mask", lambda r: "causal" if r.point.causal else "not causal")
PASS = Column("Pass", lambda r: "forward" if r.point.passes == "fwd" else "training")
TIME = Column(">Time (ms)", time)
RATE = Column(">Tokens/s", lambda r: number(r.tokens_per_s) if timed(r) else None)
ROOFLINE = Column(">Roofline (ms)", roofline)
PEAK = Column(">Peak memory", peak)
