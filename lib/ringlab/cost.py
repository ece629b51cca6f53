"""What a computation must cost: pairs, FLOPs, bytes and the lower time bound that follows from them.

A pair is one (query, key, head) that a pattern shows, per batch entry. The forward pass does two matrix products
over the pairs (4 d FLOPs each), the backward five (10 d), Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import lcm

import torch

from .block_patterns import BlockSparse
from .checks import check_choice
from .patterns import Pattern

PASSES = {"fwd": 4, "fwd+bwd": 14}  # FLOPs per pair and per head_dim


@dataclass(frozen=True)
class Cost:
    """Counts for one call: ``pairs`` branch by branch, ``distinct_pairs`` with each visible pair once (folded).

    ``flops`` = useful FLOPs from ``pairs``; ``folded_flops`` from ``distinct_pairs``; ``floor_bytes`` = every input and
    output tensor read or written once.
    """

    pairs: int
    distinct_pairs: int
    flops: int
    folded_flops: int
    floor_bytes: int

    def seconds(self, flops_per_s: float | None, bytes_per_s: float | None) -> float:
        """Lower bound on the time: the larger of folded FLOPs and floor bytes over the device's rates; 0 if unknown."""
        compute = self.folded_flops / flops_per_s if flops_per_s else 0.0
        memory = self.floor_bytes / bytes_per_s if bytes_per_s else 0.0
        return max(compute, memory)


def count(
    pattern: Pattern,
    *,
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool = False,
    passes: str = "fwd",
) -> Cost:
    """Count pairs, FLOPs and bytes of ``attention`` on (batch, seq_len, heads, head_dim) tensors.

    Raises ValueError for ``passes`` other than "fwd" and "fwd+bwd".

    >>> from ringlab.patterns import Dense
    >>> c = count(Dense(), batch=1, seq_len=8, heads=2, head_dim=4, dtype=torch.float32)
    >>> c.pairs, c.flops, c.floor_bytes
    (128, 2048, 1024)
    """
    check_choice("passes", passes, PASSES)
    kv_heads = heads if kv_heads is None else kv_heads
    pairs, distinct = count_pairs(pattern, seq_len, heads, kv_heads, causal)
    pairs, distinct = batch * pairs, batch * distinct
    rate = PASSES[passes] * head_dim
    # q, out and k, v; the backward adds dO, dq and dk, dv
    rows = (2 * heads + 2 * kv_heads) * (1 if passes == "fwd" else 2)
    return Cost(pairs, distinct, rate * pairs, rate * distinct, rows * batch * seq_len * head_dim * dtype.itemsize)


def count_pairs(pattern: Pattern, n: int, heads: int, kv_heads: int | None = None, causal: bool = False):
    """(sum of M, number of pairs with M > 0) over one sequence of ``n`` positions and all heads.

    >>> from ringlab.patterns import Dilated
    >>> count_pairs(Dilated([2048, 4096, 8192], [1, 2, 4]), 8192, 4)
    (117440512, 92274688)
    """
    if isinstance(pattern, BlockSparse):
        pairs = heads * pattern.pairs(n, causal)
        return pairs, pairs
    branches = pattern.branches(n, heads, kv_heads)
    alike: dict[tuple, int] = {}  # heads with the same (branch, offset) sets count alike
    for head in range(heads):
        mine = tuple((b.length, b.rate, b.offsets[b.heads.index(head)]) for b in branches if head in b.heads)
        alike[mine] = alike.get(mine, 0) + 1
    pairs = distinct = 0
    for mine, times in alike.items():
        alone = times * sum(_common_pairs((one,), n, causal) for one in mine)
        pairs += alone
        if _is_ladder(mine := sorted(mine), n):  # the branches that show a pair are neighbours
            distinct += alone - times * sum(_common_pairs(two, n, causal) for two in zip(mine, mine[1:]))
            continue
        for size in range(1, len(mine) + 1):  # inclusion-exclusion over the branches that show a pair
            sign = 1 if size % 2 else -1
            distinct += times * sign * sum(_common_pairs(some, n, causal) for some in combinations(mine, size))
    return pairs, distinct


def _is_ladder(branches: list[tuple[int, int, int]], n: int) -> bool:
    """Whether each branch's segments lie in the next one's, and its rows are among those of the one before."""
    plain = all(length % rate == 0 or length >= n for length, rate, _ in branches)  # x mod length mod rate = x mod rate
    return plain and all(
        (long % short == 0 or long >= n) and sparse % rate == 0 and other % rate == offset
        for (short, rate, offset), (long, sparse, other) in zip(branches, branches[1:])
    )


def _common_pairs(branches: tuple[tuple[int, int, int], ...], n: int, causal: bool) -> int:
    """Pairs that all of ``branches`` (length, rate, offset) show: both rows selected by all, in one segment of each."""
    period = lcm(*(length for length, _, _ in branches))
    whole, rest = divmod(n, period)
    return (whole * _in_period(branches, period, causal) if whole else 0) + _in_period(branches, rest, causal)


def _in_period(branches, n: int, causal: bool) -> int:
    if n == 0:
        return 0
    if len(branches) == 1:
        length, rate, offset = branches[0]
        whole, rest = divmod(n, length)
        return sum(
            times * (m * (m + 1) // 2 if causal else m * m)
            for times, rows in ((whole, length), (1, rest))
            for m in (max(0, -(-(rows - offset) // rate)),)
        )
    length, rate, offset = max(branches, key=lambda b: b[1])  # the sparsest branch holds every common row
    x = torch.arange(offset, n, rate) if length % rate == 0 and offset < n else torch.arange(n)
    cuts = [torch.tensor([0, n])]
    for length, rate, offset in branches:
        x = x[x % length % rate == offset]
        cuts.append(torch.arange(0, n, length))
    m = torch.searchsorted(x, torch.cat(cuts).unique()).diff()  # common rows per cell between segment boundaries
    return int((m * (m + 1) // 2 if causal else m * m).sum())
