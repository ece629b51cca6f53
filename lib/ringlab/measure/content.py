"""Attention to blocks chosen by content as a system under measurement: judged with the blocks that were chosen."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..adaptive import Adaptive, adaptive_attention, best_blocks
from ..cost import PASSES
from .contract import System, only
from .points import Point

ROUNDING = 1e-4  # by so much of the largest logit may a block that was left out be better: means are rounded


class Chosen(System):
    """Each block of queries chooses its blocks, and then attends to them; options ``block_size`` and ``top_k``.

    The point's pattern is dense, as any block may be chosen. Its check compares with the oracle on the blocks chosen,
    and these with the best by logits in float64. Raises ValueError for a batch: the oracle knows one choice a head.
    """

    def __init__(self, point: Point, device):
        self.chosen = Adaptive(**only(point, "block_size", "top_k"))
        if point.batch != 1 or point.pattern["kind"] != "dense":
            raise ValueError("adaptive is measured with batch 1 and a dense pattern, of which it chooses blocks")
        causal = point.causal
        super().__init__(point, device, lambda q, k, v: adaptive_attention(q, k, v, self.chosen, causal=causal,
                                                                           return_lse=True))  # fmt: skip
        pairs = point.heads * self.chosen.pairs(point.seq_len, causal)
        flops = PASSES[point.passes] * point.head_dim * pairs
        self.cost = replace(self.cost, pairs=pairs, distinct_pairs=pairs, flops=flops, folded_flops=flops)

    def check(self, inputs, output, starts=(None,)):
        q, k = (t.detach() for t in inputs[:2])
        table = seen(best_blocks(q, k, self.chosen, causal=self.point.causal), self.point.causal)[0]
        self.pattern = OfBlocks(table, self.chosen.block_size)
        errors, tolerance = super().check(inputs, output, starts)
        if worse(table, q, k, self.chosen, self.point.causal):
            errors = dict.fromkeys(errors, float("inf"))
        return errors, tolerance


def seen(picks: Tensor, causal: bool) -> Tensor:
    """Which blocks picks (b, h, blocks, top_k) are, bool (b, h, blocks, blocks)."""
    found = torch.zeros(*picks.shape[:3], picks.shape[2], dtype=torch.bool, device=picks.device)
    found.scatter_(-1, picks, True)
    return found.tril() if causal else found


def worse(table: Tensor, q: Tensor, k: Tensor, chosen: Adaptive, causal: bool) -> bool:
    """Whether a block was left out of ``table`` (h, blocks, blocks) whose logit in float64 is larger than a seen one's.

    Of q (1, n, h, d) and k (1, n, h_kv, d); plain means, a block at a time.
    """
    size = chosen.block_size
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    mean_q, mean_k = (torch.stack([part.double().mean(1)[0] for part in t.split(size, 1)], 1) for t in (q, k))
    if causal:  # asked by the block before, the first by none
        mean_q = torch.cat([torch.zeros_like(mean_q[:, :1]), mean_q[:, :-1]], 1)
    z = q.shape[3] ** -0.5 * mean_q @ mean_k.mT  # (h, blocks, blocks)
    open_ = torch.ones_like(table)
    if causal:
        open_, itself = open_.tril(-1), torch.eye(table.shape[1], dtype=torch.bool, device=table.device)
        if not table[:, itself].all():
            return True
        table = table & ~itself
    counts = open_.sum(-1).clamp(max=chosen.top_k - causal)
    least = z.masked_fill(~table, torch.inf).amin(-1)
    best_left = z.masked_fill(table | ~open_, -torch.inf).amax(-1)
    right = (table <= open_).all() and (table.sum(-1) == counts).all()
    return not (right and (best_left <= least + ROUNDING * z.abs().max()).all())


class OfBlocks:
    """A table of blocks (h, blocks, blocks) as the pattern of its heads."""

    def __init__(self, table: Tensor, size: int):
        self.table, self.size = table, size

    def multiplicity(self, queries, keys, *, head: int, **_) -> Tensor:
        return self.table[head][queries // self.size][:, keys // self.size].long()

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        return 0, n
