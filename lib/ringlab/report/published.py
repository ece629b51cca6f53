"""The five published documents as data: which report answers each, and what each
prints.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
