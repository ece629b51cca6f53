"""Ulysses: sequence shards become head shards and back (Jacobs et al. 2023, arXiv 2309.14509).

Rank u takes a contiguous range of query heads, uneven where p does not divide H, and the K/V heads that they see; a K/V
head that several ranks need is sent to each. Head offsets and groups follow the global head index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import block_sparse, strided
from ..kernels.base import wide
from ..local import fold_lse_gradient
from ..patterns import BlockSparse, Branch, Pattern
from .comm import AllToAll, Post, Steps, Wait
from .rank import Rank


@dataclass(frozen=True)
class HeadRange:
    """A pattern as its heads ``first`` .. ``first + count - 1`` of ``heads`` see it, numbered from 0."""

    pattern: Pattern
    first: int
    count: int
    heads: int
    kv_heads: int

    def branches(self, n: int, heads: int, kv_heads: int | None = None) -> tuple[Branch, ...]:
        found = []
        for b in self.pattern.branches(n, self.heads, self.kv_heads):
            mine = [(h - self.first, o) for h, o in zip(b.heads, b.offsets) if 0 <= h - self.first < self.count]
            if mine:
                found.append(Branch(b.length, b.rate, *map(tuple, zip(*mine))))
        return tuple(found)


@dataclass(frozen=True)
class Share:
    """The heads of one rank: query heads, and the K/V heads that they see."""

    queries: range
    keys: range


def shares(heads: int, kv_heads: int, ranks: int) -> list[Share]:
    """Which heads each rank takes.

    >>> [s.queries for s in shares(5, 5, 2)]
    [range(0, 3), range(3, 5)]
    """
    whole, rest = divmod(heads, ranks)
    group, found, start = heads // kv_heads, [], 0
    for rank in range(ranks):
        stop = start + whole + (rank < rest)
        found.append(Share(range(start, stop), range(start // group, (stop - 1) // group + 1)))
        start = stop
    return found


class _Exchange:
    """Tensors (b, s, heads of one kind, d) to head shards (b, n, heads of this rank, d), and back."""

    def __init__(self, rank: Rank, heads: int, kv_heads: int):
        self.rank, self.layout = rank, rank.problem.layout
        self.shares = shares(heads, kv_heads, self.layout.ranks)
        self.mine = self.shares[rank.rank]

    def heads(self, share: Share, kind: str) -> slice:
        found = getattr(share, kind)
        return slice(found.start, found.stop)

    def to_heads(self, tensors: list[Tensor], kinds: list[str]) -> Steps:
        p, sizes = self.layout.ranks, [self.layout.size(j) for j in range(self.layout.ranks)]
        parts = [[t[:, :, self.heads(share, kind)] for t, kind in zip(tensors, kinds)] for share in self.shares]
        shapes = [[(t.shape[0], sizes[j], len(getattr(self.mine, kind)), t.shape[3]) for t, kind in zip(tensors, kinds)]
                  for j in range(p)]  # fmt: skip
        received = yield from _all_to_all(parts, shapes)
        whole = [t.new_empty(t.shape[0], self.layout.n, len(getattr(self.mine, kind)), t.shape[3])
                 for t, kind in zip(tensors, kinds)]  # fmt: skip
        for source, pieces in enumerate(received):
            for into, piece in zip(whole, pieces):
                row = 0
                for owned in self.layout.ranges(source):
                    into[:, owned.start : owned.stop : owned.step] = piece[:, row : row + len(owned)]
                    row += len(owned)
        return whole

    def to_rows(self, tensors: list[Tensor], kinds: list[str], likes: list[Tensor]) -> Steps:
        """The way back; what several ranks hold of one K/V head is summed."""
        parts = [[_rows(t, self.layout.ranges(j)) for t in tensors] for j in range(self.layout.ranks)]
        size = self.layout.size(self.rank.rank)
        shapes = [[(t.shape[0], size, len(getattr(share, kind)), t.shape[3]) for t, kind in zip(tensors, kinds)]
                  for share in self.shares]  # fmt: skip
        received = yield from _all_to_all(parts, shapes)
        results = [torch.zeros((*like.shape[:3], t.shape[3]), dtype=t.dtype, device=t.device)
                   for t, like in zip(tensors, likes)]  # fmt: skip
        for share, pieces in zip(self.shares, received):
            for into, piece, kind in zip(results, pieces, kinds):
                into[:, :, self.heads(share, kind)] += piece
        return results


def _rows(t: Tensor, ranges) -> Tensor:
    found = [t[:, r.start : r.stop : r.step] for r in ranges]
    return torch.cat(found, 1) if found else t[:, :0]


def _all_to_all(parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]) -> Steps:
    """Send lists of tensors of one dtype by rank, get those of these shapes by rank."""
    sent = [sum(t.numel() for t in part) for part in parts]
    counts = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    send = torch.cat([t.reshape(-1) for part in parts for t in part])
    receive = send.new_empty(sum(map(sum, counts)))
    yield Wait((yield Post(AllToAll(send, sent, receive, [sum(c) for c in counts]))))
    pieces = receive.split([c for each in counts for c in each])
    found, at = [], 0
    for each in shapes:
        found.append([piece.view(shape) for piece, shape in zip(pieces[at:], each)])
        at += len(each)
    return found


def _engine(rank: Rank, passes: str, share: Share, tensors):
    """The one-device engine on whole sequences of this rank's heads."""
    problem, run = rank.problem, (rank.problem.causal, rank.scale, rank.kernel)
    if isinstance(problem.pattern, BlockSparse):  # all heads see the same blocks
        return block_sparse.run(passes, tensors, problem.pattern, *run, rank.execution)
    pattern = HeadRange(problem.pattern, share.queries.start, len(share.queries), problem.heads, problem.kv_heads)
    q, k = tensors[:2] if passes == "forward" else tensors[1:3]
    plan = strided.plan_for(q, k, pattern, rank.cached)
    return getattr(strided, passes)(*tensors, plan, *run, rank.execution.scratch())


def _aligned(share: Share, group: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """k and v such that the engine's own grouping fits; where it cannot, a K/V head per query head."""
    counts = [len(range(max(g * group, share.queries.start), min((g + 1) * group, share.queries.stop)))
              for g in share.keys]  # fmt: skip
    if len(set(counts)) == 1:
        return k, v, None
    index = torch.tensor([i for i, c in enumerate(counts) for _ in range(c)], device=k.device)
    return k.index_select(2, index), v.index_select(2, index), index


def ulysses_forward(rank: Rank, q, k, v) -> Steps:
    exchange = _Exchange(rank, q.shape[2], k.shape[2])
    share, group = exchange.mine, q.shape[2] // k.shape[2]
    whole = yield from exchange.to_heads([q, k, v], ["queries", "keys", "keys"])
    out, lse = _engine(rank, "forward", share, (whole[0], *_aligned(share, group, *whole[1:])[:2]))
    (mine,) = yield from exchange.to_rows([out], ["queries"], [q])
    (my_lse,) = yield from exchange.to_rows([lse.transpose(1, 2).unsqueeze(-1)], ["queries"], [q])
    kept = torch.cat([t.reshape(-1) for t in (*whole, out)])
    return mine, my_lse.squeeze(-1).transpose(1, 2), kept, lse.contiguous()


def ulysses_backward(rank: Rank, dout, dlse, q, k, v, out, lse, kept, whole_lse) -> Steps:
    exchange = _Exchange(rank, q.shape[2], k.shape[2])
    share, group, (b, _, _, d), n = exchange.mine, q.shape[2] // k.shape[2], q.shape, exchange.layout.n
    counts = [len(share.queries), len(share.keys), len(share.keys), len(share.queries)]
    whole_q, whole_k, whole_v, whole_out = (
        t.view(b, n, h, d) for t, h in zip(kept.split([b * n * h * d for h in counts]), counts))  # fmt: skip
    (whole_dout,) = yield from exchange.to_heads([dout], ["queries"])
    wide_k, wide_v, index = _aligned(share, group, whole_k, whole_v)
    tensors = (whole_dout, whole_q, wide_k, wide_v, whole_out, whole_lse)
    if dlse is not None:
        (g,) = yield from exchange.to_heads([dlse.transpose(1, 2).unsqueeze(-1)], ["queries"])
        tensors = fold_lse_gradient(*tensors, g.squeeze(-1).transpose(1, 2))
    grads = [t[..., :d].to(wide(q.dtype)) for t in _engine(rank, "backward", share, tensors)]
    if index is not None:
        grads[1:] = [t.new_zeros(whole_k.shape).index_add_(2, index, t) for t in grads[1:]]
    return tuple((yield from exchange.to_rows(grads, ["queries", "keys", "keys"], [q, k, v])))
