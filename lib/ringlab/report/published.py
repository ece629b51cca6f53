"""The five published documents as data: which report answers each, and what each
prints.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .tables import Cell, Table, table

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Document:
    """The report that answers a document, and the suite whose rows that report is
    about.
    """

    report: str
    suite: str


DOCUMENTS = {
    "000": Document("optimization_results", "optimization"),
    "001": Document("benchmark_summary", "benchmark_summary"),
    "002": Document("session_summary", "session_summary"),
    "003": Document("performance_comparison", "performance_comparison"),
    "004": Document("hybrid_summary", "hybrid_summary"),
}


@cache
def published(number: str) -> dict:
    """A document as data, by its number ("000" to "004"); what they print of one quantity
    in two places by "between".

    >>> published("000")["rows"][0]["ms"], len(published("003")["claims"])
    (136.52, 16)
    """
    return tomllib.loads((FOLDER / f"{number}.toml").read_text(encoding="utf-8"))


def next_steps(number: str, key: str = "next") -> Table:
    """A document's own list of future work beside what became of it, with a link to the
    page or file that answers; of ``key`` "names" that of the names in its code.
    """

    def link(page: str) -> str:
        """Of a file only where it is, from the folder of reports: notebooks run there."""
        return page if not Path(page).suffix or Path(page[3:]).exists() else ""

    rows = published(number)[key]
    answers = [Cell(x["answer"], page=link(x["page"])) for x in rows]
    columns = {"In the document": [x["item"] for x in rows], "Here": answers}
    caption = f"What document {number} {'asked for next' if key == 'next' else 'names in its code'}"
    return table(caption, columns, cards=True)
