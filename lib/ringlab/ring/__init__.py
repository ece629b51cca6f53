"""Attention across ranks: layouts, exchange plans, and the schemes that move rows by
them.

``ringlab.attention(..., group=, scheme=, layout=, exchange_dtype=)``: positions of the
pattern and of documents are global, and every scheme gives the answer of one device.
"auto" takes the scheme that sends the fewest bytes in the passes that the call needs: a
forward, or also a backward where gradients are recorded (``bytes_by_scheme``). "ulysses"
takes any number of heads: shares may be uneven, and ranks beyond the heads get none,
where "auto" takes another scheme. Under "plan" a row that several ranks of one host need
from another host crosses once: one of them receives it and passes it on, in a second
exchange. Hosts are told apart by name; ``Simulated(p, machines=m)`` shows what moves.

Over a 2-D DeviceMesh, or ``Simulated((2, 4))``, ``scheme`` names what runs along each
dimension: "ulysses" along one, "plan", "ring" or "all_gather" along the other. Shards
are numbered row by row, so ("ring", "ulysses") exchanges heads between neighbours. At
most as many ranks as heads are along "ulysses". Where heads are shared out so that a
rank's query heads see K/V heads unevenly, a K/V head travels along the other dimension
once for each query head. A striped layout needs "ulysses" first. Block-sparse patterns
need "plan". Caches and content-adaptive attention take one dimension.

Before they move data the ranks of a process group compare what they compute, and all
raise ``PlanMismatch`` where it differs. A rank that refuses its call takes part in that
exchange, so that all raise, with its number and its reason; nothing more is sent where
none does. With the backend "cpu:gloo,cuda:nccl" they do so in each call, through the CPU.
A group of NCCL alone compares only calls that are new to it, since reading more would
stall the GPU: one rank that repeats another call, or refuses a later one, may hang.

With documents the layout is "contiguous" or "zigzag", and a document inside a shard
moves nothing. Along a Hilbert layout the pattern runs along the curve: that is the
answer for the sequence in the curve's order.

``exchange_dtype``, for "plan", which "auto" then takes: rows of k and v travel in this
narrower dtype. Who receives them computes with the rounded rows, their owner with its
own, so the result depends on the ranks. Rounding changes an element by at most 2^-8 of
itself in bfloat16, 2^-11 in float16 (more below 6e-5, infinite beyond 65504) and 2^-24
in float32. Gradients take it for the identity, and travel in fp32 (fp64 for fp64).
"""

# Its functions keep, as a default, the group that is there when they are imported.
# torch's operators would import it at our first call; then destroy_process_group ended
# no thread of the group, which aborted some processes at their end.
import torch.distributed.nn  # noqa: F401

from .comm import Traffic, counting
from .exchange import Problem, RankPlan, plan_rank
from .group import PlanMismatch, Simulated, group_size
from .layout import Layout, contiguous, hilbert, striped, uneven, zigzag
from .rows import StridedRows
from .schemes import SCHEMES
from .volume import bytes_by_scheme, choose
from .watch import RankFailed

__all__ = [
    "SCHEMES",
    "Layout",
    "PlanMismatch",
    "Problem",
    "RankFailed",
    "RankPlan",
    "Simulated",
    "StridedRows",
    "Traffic",
    "bytes_by_scheme",
    "choose",
    "contiguous",
    "counting",
    "group_size",
    "hilbert",
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
