"""The tables that the five documents print, with what is known here in each cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace

from ..measure import Point
from ..measure.validity import computed, is_row, shown, status
from .cells import peak_bytes, times
from .published import published
from .study import Study, best
from .tables import Cell, Table, number

FIELDS = {f.name for f in fields(Point)}
# Quantities, by what a document writes behind them: of a row's seconds and tokens, of
# MB (2^20 bytes) and tokens, and of its shape.
TIMES = {
    "s": lambda s, n: s,
    "ms": lambda s, n: 1e3 * s,
    "tokens/s": lambda s, n: n / s,
    "calls/s": lambda s, n: 1 / s,
}
RATES = ("tokens/s", "calls/s")  # of which a bound is the most, not the least
MEMORY = {"MB": lambda mb, n: mb, "KB/token": lambda mb, n: 1024 * mb / n}
SHARD = "tokens/GPU"
ANYWHERE = ("KB/token", SHARD)  # compared on every device


@dataclass(frozen=True)
class Printed:
    """A cell of a document: in which table, row and column it stands, its text, its
    value if it is a number, and what is known here.

    ``what``: the quantity, empty of a cell that names a row; ``compared``: ``printed``
    and ``here`` may be divided. ``here``: the value, with a ``sign`` a bound of it, or
    None with the ``reason``. ``doubt``: the interval of a value, or "computed".
    """

    table: str
    row: int
    column: str
    text: str
    printed: float | None
    what: str = ""
    seq_len: int = 0
    ranks: int = 1
    unit: str = ""
    compared: bool = False
    here: float | None = None
    sign: str = ""
    doubt: str = ""
    reason: str = ""

    @property
    def cell(self) -> Cell:
        """The printed text, then ours and the printed value over it."""
        if not self.what:
            return Cell(self.text)
        if self.here is None:
            return Cell(self.text, f"here {self.reason}")
        factor = ""
        if self.compared and self.printed:
            factor = f"{number(self.printed / self.here)}×"
        ours = f"here {self.sign} {number(self.here)}{self.unit}".replace("  ", " ")
        parts = filter(None, [ours, factor, self.doubt])
        return Cell(self.text, "; ".join(parts))

    def of(self, study: Study, row) -> Printed:
        """With the quantity of a row, a bound of it, or why there is neither."""
        if not is_row(row):
            return replace(self, reason="not measured")
        if not shown(row):
            return replace(self, reason=status(row))
        tokens = row.point.batch * row.point.seq_len
        # Of a page that is computed as a whole the page says so.
        found = replace(self, doubt="computed" * (computed(row) and not study.computed))
        if self.what == SHARD:
            return replace(found, here=row.point.seq_len / row.point.world_size)
        if self.what in MEMORY:
            size = peak_bytes(row) or row.memory["floor_bytes"]
            sign = "" if peak_bytes(row) else "≥"
            return replace(
                found, here=MEMORY[self.what](size / 2**20, tokens), sign=sign
            )
        seconds = row.bound_seconds if computed(row) else row.median
        if not seconds:
            few = row.ranks.get("oversubscribed")
            return replace(self, reason="more ranks than cores" if few else "not known")
        sign = ("≤" if self.what in RATES else "≥") if computed(row) else ""
        return replace(self, here=TIMES[self.what](seconds, tokens), sign=sign)

    def over(self, study: Study, row, other, scale: float) -> Printed:
        """With a quantity of a row over that of another, times ``scale``."""
        both = [self.of(study, result) for result in (row, other)]
        for each in both:
            if each.here is None:
                return each
        found = replace(both[0], unit="", compared=True, sign="")
        if any(each.sign for each in both):
            ranks = row.point.world_size / other.point.world_size
            if ranks > 1:
                return replace(found, here=ranks, sign="≤")
            return replace(found, here=None, reason="two bounds, no ratio")
        if self.what in MEMORY:
            return replace(found, here=scale * both[0].here / both[1].here)
        ratio = study.ratio(other, row)  # of seconds
        if ratio is None:
            return replace(found, here=None, reason="not timed")
        return replace(found, here=scale * ratio.value, doubt=times(ratio).sub)


def counterpart(study: Study, document: str, title: str) -> Table:
    """The table of a document ("000" to "004") that has this title there, with its rows
    and columns, and what is known here in each cell.

    Raises ValueError for a title that it does not have.
    """
    data = published(document)
    rows: dict[int, list[Printed]] = {}
    for cell in printed_cells(study, document):
        if cell.table == title:
            rows.setdefault(cell.row, []).append(cell)
    if not rows:
        titles = ", ".join(repr(x["title"]) for x in data["tables"])
        raise ValueError(f"document {document} has no table {title!r}, but {titles}")
    columns = [
        ">" * any(cell.what for cell in cells) + cells[0].column
        for cells in zip(*rows.values())
    ]
    note = ""
    if title == data["tables"][0]["title"]:
        note = (
            f"In each cell what was printed ({data['device']}), then what is known here (≥, ≤: a bound), "
            "then, where the two can be compared, the printed number over it. "
        )
        if study.profile.name != data["profile"]:
            note += "Times and memory of two devices are not divided by each other; quotients and sizes per token are. "
        note += data.get("note", "")
    cells = [[cell.cell for cell in each] for each in rows.values()]
    return Table(title, columns, cells, note=note)


def printed(study: Study, document: str):
    """All cells of a document's tables as a DataFrame, with the fields of ``Printed``."""
    import pandas

    return pandas.DataFrame(map(asdict, printed_cells(study, document)))


def printed_cells(study: Study, document: str) -> Iterator[Printed]:
    """The cells of a document's tables, in its order."""
    data = published(document)
    own = study.profile.name == data["profile"]
    for about in data["tables"]:
        kept = about.get("where", {}).items()
        measured = {c["key"] for c in about["columns"] if c.keys() & {"what", "over"}}
        rows = (each for name in about["rows"] for each in data[name])
        rows = (
            each for each in rows if kept <= each.items() and measured & each.keys()
        )
        for place, row in enumerate(rows):
            for column in about["columns"]:
                yield _cell(study, about, place, row, column, own)


def _cell(
    study: Study, about: Mapping, index: int, row: Mapping, column: Mapping, own: bool
) -> Printed:
    value = row[column["key"]]
    number = None if isinstance(value, str) else value
    show = row.get("show") or column.get("show", "{}")
    text = value if number is None else show.format(value)
    cell = Printed(about["title"], index, column["title"], text, number)
    if not column.keys() & {"what", "point"}:
        return cell
    what = column.get("what") or row["what"]
    of_row = {name: x for name, x in row.items() if name in FIELDS}
    point = about["points"] | of_row | column.get("point", {})
    cell = replace(
        cell,
        what=what,
        seq_len=point["seq_len"],
        ranks=point.get("world_size", 1),
        unit="" if "(" in column["title"] else f" {what}",
        compared=own or what in ANYWHERE,
    )
    found = best(study.same_calls(**point))
    if "over" not in column:
        return cell.of(study, found)
    other = best(study.same_calls(**point | column["over"]))
    return cell.over(study, found, other, column.get("scale", 1))
