"""Measuring: points in isolated workers, checked before they are timed, kept as rows
that say where they come from.
"""

from .points import Group, Point, Result
from .provenance import engine_hash, machine_id
from .session import Interrupted, run
from .stats import Ratio, ratio
from .store import SCHEMA, Busy, load

__all__ = [
    "SCHEMA",
    "Busy",
    "Group",
    "Interrupted",
    "Point",
    "Ratio",
    "Result",
    "engine_hash",
    "load",
    "machine_id",
    "ratio",
    "run",
]
