"""Attention across ranks: layouts, the plan of what moves, and the schemes that move it."""

from .agree import PlanMismatch
from .comm import Traffic, counting
from .layout import Layout, contiguous, hilbert, striped, uneven, zigzag
from .plan import Block, Problem, RankPlan, plan_rank
from .ranks import SCHEMES, Choice, Simulated, attend, choose, group_size

__all__ = [
    "SCHEMES", "Block", "Choice", "Layout", "PlanMismatch", "Problem", "RankPlan", "Simulated", "Traffic", "attend",
    "choose", "contiguous", "counting", "group_size", "hilbert", "plan_rank", "striped", "uneven", "zigzag",
]  # fmt: skip
