"""Attention across ranks: layouts, the plan of what moves, and the schemes that move it."""

from .agree import PlanMismatch
from .comm import Traffic, counting
from .layout import Layout, contiguous, hilbert, striped, uneven, zigzag
from .passes import SCHEMES, Choice, choose
from .plan import Block, Problem, RankPlan, plan_rank
from .ranks import attend, group_size
from .simulated import Simulated

__all__ = [
    "SCHEMES", "Block", "Choice", "Layout", "PlanMismatch", "Problem", "RankPlan", "Simulated", "Traffic", "attend",
    "choose", "contiguous", "counting", "group_size", "hilbert", "plan_rank", "striped", "uneven", "zigzag",
]  # fmt: skip
