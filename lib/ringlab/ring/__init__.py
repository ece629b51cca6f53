"""Attention across ranks: layouts, exchange plans, and the schemes that move rows by
them.
"""

from .comm import Traffic, counting
from .exchange import Problem, RankPlan, StridedRows, plan_rank
from .group import (
    PlanMismatch,
    Simulated,
    attend,
    attend_documents,
    check_one_device,
    group_size,
    length_of,
)
from .launch import joined
from .layout import Layout, contiguous, hilbert, striped, uneven, zigzag
from .schemes import SCHEMES, Choice, choose
from .watch import RankFailed

__all__ = [
    "SCHEMES",
    "Choice",
    "Layout",
    "PlanMismatch",
    "Problem",
    "RankFailed",
    "RankPlan",
    "Simulated",
    "StridedRows",
    "Traffic",
    "attend",
    "attend_documents",
    "check_one_device",
    "choose",
    "contiguous",
    "counting",
    "group_size",
    "hilbert",
    "joined",
    "length_of",
    "plan_rank",
    "striped",
    "uneven",
    "zigzag",
]
