"""Tile sizes of the Triton and Gluon kernels, by pass and head_dim.

They were compiled without a GPU, in bfloat16 for head_dim 64, 128 and 256,
causal or not, for compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0. None spills
registers or needs more shared memory than there is. On an H200 (2026-11-26, tree
8f63b8c) the Gluon kernels were the fastest of each pass in half precision, and right:
compute capability 9.0 takes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import HALF

LEAST = 16  # rows of the smallest tile that tensor cores take
LOG2E = 1.4426950408889634
TILE_PASSES = ("forward", "backward_q", "backward_kv")


@dataclass(frozen=True)
class Sizes:
    """Rows of a program's own tile, rows of a tile that it visits, warps of a program,
    stages of its pipeline.

    ``reads``: how tensors are read, by "pointers", or by "gluon", the kernels of
    ``gluon``.
    """

    rows: int
    cols: int
    warps: int
    stages: int
    reads: str = "pointers"


@dataclass(frozen=True)
class LaunchKind:
    """What tile sizes depend on. The sequence length is not part of it.

    ``name``: the pass. ``capability``: the GPU's. ``joins``: the launch adds to the
    results of an earlier one.
    """

    name: str
    head_dim: int
    dtype: torch.dtype
    capability: tuple[int, int]
    joins: bool = False


# By pass, then head_dim up to: (2-byte dtypes; the same on Hopper and data-centre
# Blackwell; fp32 anywhere).
SIZES = {
    "forward": {
        64: (Sizes(128, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 32, 8, 1)),
        128: (Sizes(64, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 8, 1)),
        256: (Sizes(64, 64, 8, 1), Sizes(128, 32, 8, 2), Sizes(16, 16, 4, 1)),
    },
    "backward_q": {
        64: (Sizes(128, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 32, 8, 1)),
        128: (Sizes(128, 32, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 8, 2)),
        256: (Sizes(32, 32, 4, 1), Sizes(32, 32, 4, 1), Sizes(16, 16, 8, 2)),
    },
    "backward_kv": {
        64: (Sizes(128, 32, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 4, 1)),
        128: (Sizes(64, 32, 8, 2), Sizes(128, 32, 8, 2), Sizes(32, 16, 8, 1)),
        256: (Sizes(32, 32, 8, 1), Sizes(32, 32, 8, 1), Sizes(16, 16, 8, 1)),
    },
}


# The Gluon kernels for 9.0, by pass and head_dim: 2-byte dtypes, launches that start
# from nothing. Eight computing warps come on top.
GLUON = {
    ("forward", 64): Sizes(128, 128, 4, 3, "gluon"),
    ("forward", 128): Sizes(128, 128, 4, 2, "gluon"),
    ("backward_q", 64): Sizes(128, 128, 4, 2, "gluon"),
    ("backward_q", 128): Sizes(128, 64, 4, 3, "gluon"),
    ("backward_kv", 64): Sizes(128, 64, 4, 3, "gluon"),
    ("backward_kv", 128): Sizes(128, 32, 4, 3, "gluon"),
}


def sizes(kind: LaunchKind) -> Sizes:
    """Return the sizes of a kind of launch: Gluon's where it can run."""
    known = (kind.name, kind.head_dim) in GLUON and kind.dtype in HALF
    if known and kind.capability == (9, 0) and not kind.joins:
        return GLUON[kind.name, kind.head_dim]
    return pointer_sizes(kind)


def pointer_sizes(kind: LaunchKind) -> Sizes:
    """Return the sizes of the kernels that read by pointers. Patterns with short row
    intervals make them smaller, and a launch that joins takes more registers.
    """
    by_head_dim = SIZES[kind.name].items()
    small, large, fp32 = next(x for most, x in by_head_dim if kind.head_dim <= most)
    if kind.dtype not in HALF:
        return fp32
    return large if kind.capability[0] in (9, 10) and not kind.joins else small


def precision(head_dim: int, dtype: torch.dtype) -> str:
    """How products are computed: fp32 as three tf32 products, which keeps its accuracy,
    or "ieee" for wide heads.
    """
    return "tf32" if dtype in HALF else "tf32x3" if head_dim <= 64 else "ieee"


def early(compute: tuple[int, int]) -> bool:
    """Whether a program fetches the next entry of its schedule early, which Triton 3.7
    fails to compile for 10.x.
    """
    return compute[0] != 10


def shortened(size: Sizes, schedule) -> str | None:
    """Why a launch has smaller tiles than its sizes, or None."""
    if (schedule.rows, schedule.cols) == (size.rows, size.cols):
        return None
    return f"the row intervals of the pattern are shorter than tiles of {size.rows} x {size.cols}"


def padded(head_dim: int) -> int:
    """Columns that a program computes with: a power of two that tensor cores take."""
    return max(LEAST, 1 << (head_dim - 1).bit_length())
