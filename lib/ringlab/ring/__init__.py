"""Attention across ranks: layouts, exchange plans, and the schemes that move rows by
them.
"""

# Its functions keep, as a default, the group that is there when they are imported.
# torch's operators would import it at our first call; then destroy_process_group ended
# no thread of the group, which aborted some processes at their end.
import torch.distributed.nn  # noqa: F401

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
    "length_of",
    "plan_rank",
    "striped",
    "uneven",
    "zigzag",
]


def joined(*_, **__):
    """Went, and says where its work is done now."""
    raise NotImplementedError(
        "joined went: torchrun's agent and torch.distributed.elastic's record do it, "
        "see notebooks/tutorials/train_elastic.py"
    )
