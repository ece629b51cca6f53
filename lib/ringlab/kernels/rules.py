"""What ``backend="auto"`` takes on a GPU: a table, each line with its measurement.

Two ways run a pattern. "lists": the list kernels (``triton``, or the one that a line
names) take the whole pattern in one launch a pass. "calls": dense calls on strided
views, whose results one kernel merges where it can (``fused_merge``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..block_patterns import BlockSparse
from ..patterns import Dense, Pattern
from . import tile_schedule
from .base import HALF

BLOCKS = ("blocks", "blocks of 128")
LISTED = (*BLOCKS, "tokens")
KINDS = ("dense", *LISTED, "branches", "ladder")
MAX_LISTED = 1024  # blocks of 128: each has a list as long as the longest of all
BY_ANALOGY = "by analogy, not measured"


@lru_cache(maxsize=4096)
def kind_of(pattern: Pattern, n: int, heads: int, kv_heads: int) -> str:
    """One of KINDS: "dense" is one call; "tokens" see windows and first tokens, not
    blocks; "branches" are dilated branches that the list kernels run in one launch a
    pass, a "ladder" needs several, of which the later add to the earlier.

    >>> from ringlab.patterns import Dilated
    >>> three = Dilated([2048, 4096, 8192], [1, 2, 4])
    >>> kind_of(three, 65536, 16, 16), kind_of(Dilated([512, 1024], [1, 2]), 4096, 8, 8)
    ('branches', 'ladder')
    """
    if tile_schedule.has_bands(pattern):
        return "tokens"
    if isinstance(pattern, BlockSparse):
        listed = pattern.block_size == 128 and pattern.count(n) <= MAX_LISTED
        return "blocks of 128" if listed else "blocks"
    if isinstance(pattern, Dense) or len(pattern.segment_lengths) == 1:
        return "dense"
    launches = tile_schedule.split(pattern, n, heads, kv_heads)
    return "branches" if len(launches) == 1 else "ladder"


@dataclass(frozen=True)
class Rule:
    """A line of the table. None and () stand for any.

    ``least``, ``most``: compute capabilities. ``backward``: of the backward pass, or of
    the forward. ``kernel``: by this kernel, which is then tried first; where it cannot
    run the line does not count.
    """

    way: str
    kinds: tuple[str, ...]
    evidence: str
    least: tuple[int, int] = (0, 0)
    most: tuple[int, int] = (99, 9)
    dtypes: tuple[torch.dtype, ...] = ()
    head_dims: tuple[int, ...] = ()
    causal: bool | None = None
    backward: bool | None = None
    kernel: str | None = None

    def __str__(self) -> str:
        return f"{self.way} ({self.evidence})"

    def _fits(self, capability, dtype, head_dim, kind, causal, backward) -> bool:
        """Whether the line is about such a pass."""
        return (
            kind in self.kinds
            and self.least <= capability <= self.most
            and (not self.dtypes or dtype in self.dtypes)
            and (not self.head_dims or head_dim in self.head_dims)
            and self.causal in (None, causal)
            and self.backward in (None, backward)
        )


ON_H200 = {"least": (9, 0), "most": (9, 0), "dtypes": HALF}
H200 = "H200, 2026-11-26, bf16, 65,536 tokens"
# The first line that fits counts. Times in ms: of this way against the next best.
# Where flash-attn-4 is not installed, the calls are cuDNN's.
RULES = (
    Rule(
        "calls",
        ("dense",),
        "H200, 2026-11-26, bf16, 16,384 tokens, head_dim 128: forward 3.46 against 3.84",
        head_dims=(64, 128),
        **ON_H200,
    ),
    Rule("calls", ("dense",), BY_ANALOGY),
    Rule(
        "lists",
        ("blocks of 128",),
        f"{H200}, a tenth of all blocks, head_dim 128: forward 5.06 against 5.93, "
        "both 20.2 against 29.5",
        head_dims=(64, 128),
        causal=False,
        kernel="flash_attn_4_blocks",
        **ON_H200,
    ),
    Rule(
        "lists",
        BLOCKS,
        f"{H200}, a tenth of all blocks: forward 5.70 against 50.7, both 29.5 against 130",
        head_dims=(64, 128),
        **ON_H200,
    ),
    Rule(
        "calls",
        ("branches", "ladder"),
        f"{H200}, ladder, head_dim 128, flash_attn_4: backward 11.2 against 12.7",
        head_dims=(64, 128),
        backward=True,
        kernel="flash_attn_4",
        **ON_H200,
    ),
    Rule(
        "calls",
        ("ladder",),
        f"{H200}, cudnn: forward 3.77 against 4.01 of flash_attn_4",
        head_dims=(128,),
        causal=False,
        backward=False,
        kernel="cudnn",
        **ON_H200,
    ),
    Rule(
        "calls",
        ("branches",),
        f"{H200}: forward 1.40 against 1.64",
        head_dims=(64,),
        causal=True,
        backward=False,
        **ON_H200,
    ),
    Rule(
        "lists",
        ("branches",),
        f"{H200}, head_dim 128: forward 2.78 against 3.29, both 13.3 against 14.3",
        head_dims=(64, 128),
        **ON_H200,
    ),
    Rule(
        "lists",
        ("ladder",),
        f"{H200}: forward 2.41 against 2.66",
        head_dims=(64,),
        causal=False,
        backward=False,
        **ON_H200,
    ),
    Rule(
        "calls",
        ("ladder",),
        f"{H200}, head_dim 128: forward 3.77 against 4.10, both 16.5 against 18.2",
        head_dims=(64, 128),
        **ON_H200,
    ),
    # A list kernel takes one launch for what are hundreds of calls.
    Rule("lists", LISTED, BY_ANALOGY, least=(8, 0)),
    Rule(
        "calls",
        ("branches", "ladder"),
        "H200, 2026-11-26, fp32, document 000, 8,192 tokens, merged one after the other: "
        "forward 0.88 against 1.96",
        least=(9, 0),
        most=(9, 0),
    ),
    Rule("calls", KINDS, BY_ANALOGY),
)


def rule_for(
    capability,
    dtype,
    head_dim: int,
    kind: str,
    causal,
    backward,
    runs: Callable[[str], bool] = lambda kernel: False,
) -> Rule:
    """The line that decides for a pass. ``runs(kernel)``: whether a kernel that a line
    names can run.

    >>> rule_for((9, 0), torch.bfloat16, 128, "blocks", False, False).way
    'lists'
    """
    call = capability, dtype, head_dim, kind, causal, backward
    fitting = (rule for rule in RULES if rule._fits(*call))
    return next(rule for rule in fitting if rule.kernel is None or runs(rule.kernel))
