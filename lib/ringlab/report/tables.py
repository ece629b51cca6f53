"""Display objects that a notebook cell returns: each gives HTML for the page and
Markdown for all else from one value.

The HTML leans on the page's style, so it goes under a name of its own that only this
project's template looks for; in JupyterLab, in a stock nbconvert page and on a forge
the same object is a Markdown table. Nothing here knows any rows.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from numbers import Integral
from pathlib import PurePath

from ..measure.stats import FEWEST
from .templates import ENVIRONMENT, rendered

DASH = "–"
PAGE_HTML = "application/vnd.ringlab.html"  # the template renders what stands under this type as it is
FINDING = "application/vnd.ringlab.finding+json"  # a page's finding as data
PLAIN_ONLY = (
    "plain_only"  # in an output's metadata: left out by this project's own templates
)
WIDE = 26  # characters from which a column is of words, not of names or numbers


@dataclass(frozen=True)
class Cell:
    """One table cell: ``text``, a quieter second part ``sub`` (an interval, a reason)
    and a ``kind`` for its style.

    ``page`` names another report of the same profile, or a file with its ending, to
    which the text then links.
    """

    text: str
    sub: str = ""
    kind: str = ""
    page: str = ""

    @property
    def html(self) -> str:
        text = breakable(self.text)
        if self.kind:
            text = f'<span class="{escape(self.kind)}">{text}</span>'
        if self.page:
            link = escape(self._link("html"), quote=True)
            text = f'<a href="{link}">{text}</a>'
        parts = filter(None, self.sub.split("; "))
        return " ".join([text, *(f"<small>{escape(x)}</small>" for x in parts)])

    @property
    def plain(self) -> str:
        text = f"[{self.text}]({self._link('md')})" if self.page else self.text
        return f"{text} ({self.sub})" if self.sub else text

    def _link(self, kind: str) -> str:
        return self.page if PurePath(self.page).suffix else f"{self.page}.{kind}"


def cell(value) -> Cell:
    """Any value as a Cell; None, or pandas' NaN, is a dash, so that an absent number
    never reads as zero.

    >>> cell(None).plain, cell(3).plain, cell(Cell("7.66", "7.5 to 7.8")).plain
    ('–', '3', '7.66 (7.5 to 7.8)')
    """
    if isinstance(value, Cell):
        return value
    if value is None or value != value:
        return Cell(DASH, kind="none")
    return Cell(f"{value:,}" if isinstance(value, Integral) else str(value))


class Shown:
    """What a notebook displays by its ``html`` and ``markdown``."""

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {
            PAGE_HTML: self.html,
            "text/markdown": self.markdown,
            "text/plain": self.markdown,
        }


@dataclass
class Table(Shown):
    """A table with units in its ``columns``; a leading ``>`` on a column name aligns it
    right, as numbers are.

    ``marked`` are indices of rows to emphasise. With ``cards`` a phone shows a card for
    each row, as suits words. Without rows a table shows nothing.

    >>> print(Table("Times", ["System", ">Time (ms)"], [["dense", 2.5], ["a|b", None]]).markdown)
    **Times**
    <BLANKLINE>
    | System | Time (ms) |
    |:--|--:|
    | dense | 2.5 |
    | a\\|b | – |
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence] = field(default_factory=list)
    note: str = ""
    marked: Sequence[int] = ()
    folded: bool = False  # drawn closed, as the data under a figure is
    cards: bool = False

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.caption!r} has {len(self.columns)} columns, a row has {len(row)}"
                )

    @property
    def html(self) -> str:
        rows = [[*map(cell, row)] for row in self.rows]
        columns = [
            (name.lstrip(">"), _column_class(name, cells))
            for name, cells in zip(self.columns, zip(*rows))
        ]
        return rendered("table.html", table=self, rows=rows, columns=columns)

    @property
    def markdown(self) -> str:
        if not self.rows:
            return ""
        sides = ["--:" if c.startswith(">") else ":--" for c in self.columns]
        lines = [[c.lstrip(">") for c in self.columns]]
        lines += [[cell(x).plain for x in row] for row in self.rows]
        lines = [[*map(markdown_text, line)] for line in lines]
        for i in self.marked:
            lines[i + 1] = [x if x == DASH else f"**{x}**" for x in lines[i + 1]]
        head, *body = (f"| {' | '.join(line)} |" for line in lines)
        title = f"**{markdown_text(self.caption)}**"
        text = "\n".join([title, "", head, f"|{'|'.join(sides)}|", *body])
        return f"{text}\n\n{self.note}" if self.note else text


def table(caption: str, columns: Mapping[str, Iterable], **more) -> Table:
    """A table by its columns, as those of a DataFrame: header -> one value a row;
    ``more`` are other fields of ``Table``. A column without any value is left out.

    >>> print(table("Times", {"System": ["dense"], ">Time (ms)": [2.5]}).markdown)
    **Times**
    <BLANKLINE>
    | System | Time (ms) |
    |:--|--:|
    | dense | 2.5 |
    """
    each = {name: [*values] for name, values in columns.items()}
    for name in columns:
        if each[name] and all(cell(value).text == DASH for value in each[name]):
            del each[name]
    return Table(caption, [*each], [*zip(*each.values())], **more)


@dataclass
class Text(Shown):
    """Running text with ``code``, **strong** and *emphasised* marks; ``kind`` names a
    box of the page's style.

    With a ``summary`` it is folded under it.
    """

    lines: Sequence[str]
    kind: str = ""
    bullets: bool = False
    summary: str = ""

    @property
    def html(self) -> str:
        tag = "li" if self.bullets else "p"
        body = "".join(f"<{tag}>{inline_html(x)}</{tag}>" for x in self.lines)
        body = f"<ul>{body}</ul>" if self.bullets else body
        if self.summary:
            return f'<details><summary class="text">{escape(self.summary)}</summary>{body}</details>'
        return f'<div class="{escape(self.kind)}">{body}</div>' if self.kind else body

    @property
    def markdown(self) -> str:
        if self.bullets:
            return "\n".join(f"- {x}" for x in self.lines)
        return "\n\n".join(self.lines)


@dataclass
class Code(Shown):
    """A block of Python that the reader may copy; ``run`` executes it, so that what is
    shown is known to work.
    """

    source: str

    def run(self) -> dict:
        """The names that the code defines; an error in it is raised as it is."""
        names: dict = {"__name__": "__recommended__"}
        exec(compile(self.source, "recommended configuration", "exec"), names)
        return names

    @property
    def html(self) -> str:
        return (
            f'<pre class="code" tabindex="0"><code>{escape(self.source)}</code></pre>'
        )

    @property
    def markdown(self) -> str:
        return f"```python\n{self.source.rstrip()}\n```"


def _column_class(name: str, cells: Sequence[Cell]) -> str:
    """Numbers go right; words get room, or a phone would break them into one a line."""
    if name.startswith(">"):
        return ' class="n"'
    return ' class="w"' if max((len(c.text) for c in cells), default=0) > WIDE else ""


def breakable(text: str) -> str:
    """Escaped text with `code`, in which a long name may break before its capitals.

    >>> breakable("RingDilatedAttentionV2Flash, fp32")
    'Ring<wbr>Dilated<wbr>Attention<wbr>V2<wbr>Flash, fp32'
    >>> breakable("run `make a<b`")
    'run <code>make a&lt;b</code>'
    """

    def broken(word: re.Match) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "\0", word[0])

    text = escape(re.sub(r"[^ ]{17,}", broken, text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text).replace("\0", "<wbr>")


def inline_html(text: str) -> str:
    """The inline marks that ``Text`` and notes use, as HTML. A link to another report
    names its Markdown.

    >>> inline_html("**3.1x** by `a<b`, [landscape](landscape.md)")
    '<strong>3.1x</strong> by <code>a&lt;b</code>, <a href="landscape.html">landscape</a>'
    """
    text = escape(text, quote=False)
    text = re.sub(r"\]\((\S+?)[.]md\)", r"](\1.html)", text)
    text = re.sub(r"\[([^]]+)\]\((\S+?)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\*([A-Za-z][^*]*?)\*", r"<em>\1</em>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def markdown_text(text: str) -> str:
    """Text that is safe in a pipe table and brings no HTML with it."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")


def number(x: float, digits: int = 3) -> str:
    """``x`` with ``digits`` significant digits, thousands separated, never in exponent
    form between 1e-4 and 1e15.

    >>> number(7.6634), number(136.52), number(199987.4), number(0.01234), number(1.2e-7), number(99.96)
    ('7.66', '137', '199,987', '0.0123', '1.2e-07', '100')
    """
    if x == 0:
        return "0"
    if abs(x) < 1e-4:
        return f"{x:.1e}"
    rounded = abs(float(f"{x:.{digits}g}"))
    return (
        f"{x:,.{max(0, digits - len(str(int(rounded))))}f}"
        if rounded >= 1
        else f"{x:.{digits}g}"
    )


def span(values: Iterable[float], digits: int = 3) -> str:
    """The least and the most as text, once where they read alike.

    >>> span([1.31, 2.0, 1.5]), span([0.0674])
    ('1.31 to 2.00', '0.0674')
    """
    values = [*values]
    return " to ".join(dict.fromkeys(number(f(values), digits) for f in (min, max)))


def percent(share: float, digits: int = 3) -> str:
    """A share as text.

    >>> percent(0.0223)
    '2.23 %'
    """
    return f"{number(100 * share, digits)} %"


def interval(
    low: float | None, high: float | None, scale: float = 1.0, digits: int = 3
) -> str:
    """A 95 % interval as text, empty where there is none; too few samples for one say
    so.

    >>> interval(0.0409, 0.0418, 1e3), interval(0.0, math.inf)
    ('40.9 to 41.8', 'fewer than 5 samples')
    """
    if low is None or high is None:
        return ""
    if high == math.inf:
        return f"fewer than {FEWEST} samples"
    return f"{number(low * scale, digits)} to {number(high * scale, digits)}"


def counted(n: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "call"), counted(2000, "call")
    ('1 call', '2,000 calls')
    """
    return f"{n:,} {noun}{'s' * (n != 1)}"


def shortened(names: Sequence[str]) -> str:
    """The first of several names, and how many are left.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a; b; c; and 2 more'
    """
    rest = len(names) - 3
    return "; ".join(names[:3] + [f"and {rest} more"] * (rest > 0))


def size(nbytes: float | None) -> str:
    """Bytes in binary units.

    >>> size(64 * 2**20), size(8 * 2**30), size(None)
    ('64 MiB', '8 GiB', '–')
    """
    if nbytes is None:
        return DASH
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{number(nbytes / factor).removesuffix('.00').removesuffix('.0')} {unit}"
    return f"{nbytes:.0f} B"


ENVIRONMENT.filters |= {
    "marked": inline_html,
    "text": markdown_text,
    "shortened": shortened,
}
ENVIRONMENT.filters |= {"number": number, "interval": interval}
