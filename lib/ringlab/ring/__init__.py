"""Attention across ranks: layouts, the plan of what moves, and the schemes that move it."""

from .comm import Traffic, counting
from .exchange import Block, Problem, RankPlan, plan_rank
from .group import PlanMismatch, Simulated, attend, group_size
from .layout import Layout, contiguous, hilbert, striped, uneven, zigzag
from .schemes import SCHEMES, Choice, choose

__all__ = [
    "SCHEMES", "Block", "Choice", "Layout", "PlanMismatch", "Problem", "RankPlan", "Simulated", "Traffic", "attend",
    "choose", "contiguous", "counting", "group_size", "hilbert", "plan_rank", "striped", "uneven", "zigzag",
]  # fmt: skip
