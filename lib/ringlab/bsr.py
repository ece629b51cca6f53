"""Block-sparse attention by torch.sparse: the probabilities of one batch entry and head are a BSR tensor.

Scores and one softmax per row are formed on the seen blocks alone, by dense calls on copied blocks, for torch has
neither for BSR tensors; every product with the probabilities or their gradient is torch's own, on a CPU by MKL. Memory
grows with the seen pairs of one head. Only full precision: torch multiplies no half-precision BSR tensors on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .blocks import BlockSparse
from .kernels.base import wants_dtype

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Index:
    """Where the seen blocks of n positions lie, by rows of blocks; a short last block counts as a whole one.

    ``order`` sorts them by columns, which are the rows of the transposed tensor.
    """

    n: int
    size: int
    rows: Tensor  # (seen,)
    cols: Tensor  # (seen,)
    starts: Tensor  # (blocks + 1,) where each row of blocks begins
    order: Tensor  # (seen,)
    starts_by_column: Tensor  # (blocks + 1,)

    def cut(self, t: Tensor) -> Tensor:
        """t (n, d) as whole blocks (blocks, size, d), contiguous; zeros behind the last row."""
        blocks = len(self.starts) - 1
        return F.pad(t, (0, 0, 0, blocks * self.size - self.n)).reshape(blocks, self.size, -1)

    def times(self, values: Tensor, t: Tensor) -> Tensor:
        """The BSR tensor of ``values`` (seen, size, size) times the blocks t (blocks, size, d), as (n, d)."""
        return self._product(self.starts, self.cols, values, t)

    def transposed_times(self, values: Tensor, t: Tensor) -> Tensor:
        """The same with the transposed BSR tensor: its blocks in another order, each transposed."""
        turned = values.mT.index_select(0, self.order)  # (seen, size, size), contiguous
        return self._product(self.starts_by_column, self.rows[self.order], turned, t)

    def _product(self, starts: Tensor, cols: Tensor, values: Tensor, t: Tensor) -> Tensor:
        _spend_warning()
        dense = t.flatten(0, 1)  # (blocks * size, d)
        size = (len(dense), len(dense))
        matrix = torch.sparse_bsr_tensor(starts, cols, values, size, check_invariants=False)
        return (matrix @ dense)[: self.n]


@cache
def _spend_warning() -> None:
    """torch warns once in a process that BSR tensors are in beta; here that once is, silently."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse BSR tensor support is in beta state", UserWarning)
        torch.sparse_bsr_tensor([0, 1], [0], [[[1.0]]], (1, 1), check_invariants=False)


def prepare(pattern: BlockSparse, n: int, causal: bool = False, device: torch.device | str = "cpu") -> Index:
    """The index of ``n`` positions of queries and of keys.

    >>> from ringlab.blocks import sliding_window
    >>> index = prepare(sliding_window(1, block_size=4), 10, causal=True)
    >>> index.starts.tolist(), index.cols.tolist(), index.order.tolist()
    ([0, 1, 3, 5], [0, 0, 1, 1, 2], [0, 1, 2, 3, 4])
    """
    seen = pattern.blocks(n)
    seen = (seen.tril() if causal else seen).to(device)
    rows, cols = seen.nonzero().unbind(1)
    starts, by_column = (F.pad(seen.sum(axis).cumsum(0), (1, 0)) for axis in (1, 0))
    return Index(n, pattern.block_size, rows, cols, starts, cols.argsort(stable=True), by_column)


def forward(q, k, v, index: Index, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n) in q's dtype; q (b, n, h, d), k and v (b, n, h_kv, d).

    ``index`` was prepared with the same ``causal``.
    """
    _refuse(q.dtype)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    for i, h, kv in _heads(q, k):
        probs = _scores(index.cut(q[i, :, h]), index.cut(k[i, :, kv]), index, causal, scale)  # (seen, size, size)
        top = _by_row(probs.amax(2), "max", -torch.inf, index)  # (blocks, size)
        probs.sub_(top[index.rows].unsqueeze(2)).exp_()
        total = _by_row(probs.sum(2), "sum", 0.0, index)  # (blocks, size)
        probs.div_(total[index.rows].unsqueeze(2))
        out[i, :, h] = index.times(probs, index.cut(v[i, :, kv]))
        lse[i, h] = (top + total.log()).flatten()[: index.n]  # -inf for a row without blocks
    return out, lse


def backward(dout, q, k, v, out, lse, index: Index, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq (b, n, h, d), dk, dv (b, n, h_kv, d) with the final out and lse (b, h, n)."""
    _refuse(q.dtype)
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    for i, h, kv in _heads(q, k):
        q_, k_, v_, dout_ = (index.cut(t) for t in (q[i, :, h], k[i, :, kv], v[i, :, kv], dout[i, :, h]))
        delta = (dout[i, :, h] * out[i, :, h]).sum(-1, keepdim=True)  # (n, 1)
        probs = _scores(q_, k_, index, causal, scale)  # (seen, size, size)
        # Rows behind the last get finite ones, and add nothing: their dout, q and delta are 0.
        probs.sub_(index.cut(lse[i, h, :, None])[index.rows]).exp_()
        dv[i, :, kv] += index.transposed_times(probs, dout_)
        # In blocks of one a row may see one key alone, with gradient 0: sum as delta does, so that it is, unrounded.
        at_q, at_k = dout_[index.rows], v_[index.cols]  # (seen, size, d)
        grads = torch.bmm(at_q, at_k.mT) if index.size > 1 else (at_q * at_k).sum(-1, keepdim=True)
        del at_q, at_k
        grads.sub_(index.cut(delta)[index.rows]).mul_(probs).mul_(scale)
        del probs  # before the next copy is made
        dq[i, :, h] = index.times(grads, k_)
        dk[i, :, kv] += index.transposed_times(grads, q_)
    return dq, dk, dv


def _refuse(dtype: torch.dtype) -> None:
    why = wants_dtype(dtype, DTYPES)
    if why:
        raise NotImplementedError(f"blocks='bsr' {why}")


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """(batch entry, head, its K/V head), one after the other."""
    group = q.shape[2] // k.shape[2]
    for i in range(q.shape[0]):
        for h in range(q.shape[2]):
            yield i, h, h // group


def _scores(q: Tensor, k: Tensor, index: Index, causal: bool, scale: float) -> Tensor:
    """The scores (seen, size, size) of q, k (blocks, size, d); -inf for later keys and for those behind the last."""
    scores = torch.bmm(q[index.rows], k[index.cols].mT).mul_(scale)
    if causal:
        square = index.rows == index.cols  # (seen,)
        later = scores.new_ones(scores.shape[1:], dtype=torch.bool).triu(1)  # (size, size)
        scores[square] = scores[square].masked_fill_(later, -torch.inf)
    blocks = len(index.starts) - 1
    behind = blocks * index.size - index.n
    if behind:
        scores[index.cols == blocks - 1, :, -behind:] = -torch.inf
    return scores


def _by_row(t: Tensor, how: str, nothing: float, index: Index) -> Tensor:
    """t (seen, size) reduced over the blocks of each row as (blocks, size); ``nothing`` where there are none."""
    return torch.segment_reduce(t, how, offsets=index.starts, axis=0, initial=nothing)
