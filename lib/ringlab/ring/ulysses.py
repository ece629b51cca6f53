"""Ulysses: sequence shards become head shards and back (Jacobs et al. 2023, arXiv
2309.14509).

A rank takes a contiguous range of query heads, uneven if the ranks do not divide the
heads, and the K/V heads that they see; a K/V head that several ranks need is sent to
each. Head offsets and groups follow the global head index.

Over a 2-D mesh (Fang and Zhao 2024, arXiv 2405.07719) heads are exchanged along one
dimension. The ranks along the other one have the same heads, and share the sequence by
another scheme.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..engine.autograd import fold_lse_gradient
from ..engine.walk import Walked
from ..engine.ways import LocalCall, in_turn
from ..kernels.base import accumulation_dtype
from ..patterns import Branch, Dense, Pattern
from .comm import Steps, all_to_all, among
from .exchange import Problem
from .rank import Rank


@dataclass(frozen=True)
class MeshScheme:
    """Ulysses along one dimension of a mesh of ranks, another scheme along the other.

    ``names``: the scheme of each dimension; ``shape``: the ranks along each. Ranks are
    numbered row by row. Ulysses alone is a mesh of one column.

    >>> mesh = MeshScheme(("ring", "ulysses"), (2, 3))
    >>> mesh.heads_line(4), mesh.sequence_line(4), mesh.other
    ((3, 4, 5), (1, 4), 'ring')
    """

    names: tuple[str, str]
    shape: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.names} over {self.shape} ranks"

    @property
    def other(self) -> str:
        """The scheme beside ulysses."""
        return self.names[self.names[0] == "ulysses"]

    def heads_line(self, rank: int) -> tuple[int, ...]:
        """The ranks that exchange heads with ``rank``, itself among them."""
        return self._line(rank, self.names.index("ulysses"))

    def sequence_line(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the heads of ``rank``, itself among them."""
        return self._line(rank, 1 - self.names.index("ulysses"))

    def _line(self, rank: int, dim: int) -> tuple[int, ...]:
        rows, columns = self.shape
        row, column = divmod(rank, columns)
        if dim == 0:
            return tuple(range(column, rows * columns, columns))
        return tuple(range(row * columns, (row + 1) * columns))


def mesh_of(scheme: str | MeshScheme, ranks: int) -> MeshScheme | None:
    """The mesh along which a scheme exchanges heads, or None if it does not."""
    if isinstance(scheme, MeshScheme):
        return scheme
    return MeshScheme(("ulysses", "ring"), (ranks, 1)) if scheme == "ulysses" else None


@dataclass(frozen=True)
class HeadRange:
    """The heads ``numbers`` of a pattern for ``heads`` heads, counted from 0."""

    pattern: Pattern
    numbers: range
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return str(self.pattern)

    def branches(self, n: int, heads: int, kv_heads: int) -> tuple[Branch, ...]:
        branches = []
        for b in self.pattern.branches(n, self.heads, self.kv_heads):
            pairs = [
                (head - self.numbers.start, offset)
                for head, offset in zip(b.heads, b.offsets)
                if head in self.numbers
            ]
            if pairs:
                branches.append(Branch(b.length, b.rate, *zip(*pairs)))
        return tuple(branches)


def shares(heads: int, kv_heads: int, ranks: int) -> tuple[list[range], list[range]]:
    """By rank, the query heads that it takes, and the K/V heads that they see; none
    where ranks are more than heads.

    >>> shares(5, 5, 2)[0]
    [range(0, 3), range(3, 5)]
    """
    (size, rest), group = divmod(heads, ranks), heads // kv_heads
    cuts = [rank * size + min(rank, rest) for rank in range(ranks + 1)]
    queries = [range(*pair) for pair in pairwise(cuts)]
    return queries, [
        range(q.start // group, (q.stop - 1) // group + 1) for q in queries
    ]


@dataclass(frozen=True)
class HeadShare:
    """What a rank does under ulysses: it has ``queries`` and ``keys`` of the heads, at
    the positions of all ranks of ``line``.

    ``problem`` is that of its heads, for the ranks ``across``. ``kv_index``: the K/V
    head of each query head, where groups are not whole; else None. Then the engine,
    which needs equal groups, gets a K/V head per query head, and so move rows across.
    """

    line: tuple[int, ...]
    queries: list[range]  # by place in the line
    keys: list[range]
    place: int
    across: tuple[int, ...]
    problem: Problem
    kv_index: list[int] | None


@lru_cache(maxsize=256)
def head_share(problem: Problem, mesh: MeshScheme, rank: int) -> HeadShare:
    """The part of a rank. Raises ValueError for a layout that does not fit the mesh."""
    line = mesh.heads_line(rank)
    across = mesh.sequence_line(rank)
    queries, keys = shares(problem.heads, problem.kv_heads, len(line))
    place = line.index(rank)
    own = queries[place]
    group = problem.heads // problem.kv_heads
    index = [head // group - keys[place].start for head in own]
    even = len(set(Counter(index).values())) <= 1
    pattern = problem.pattern
    if not isinstance(pattern, Dense | BlockSparse):
        pattern = HeadRange(pattern, own, problem.heads, problem.kv_heads)
    part = replace(
        problem,
        pattern=pattern,
        layout=problem.layout.joined([mesh.heads_line(other) for other in across]),
        heads=len(own),
        kv_heads=len(keys[place]) if even else len(own),
        hosts=(),
    )
    return HeadShare(line, queries, keys, place, across, part, None if even else index)


def _to_heads(
    rank: Rank, share: HeadShare, tensors: list[Tensor], heads: list[list[range]]
) -> Steps:
    """Shards (b, s, h, d) to the positions of the line (b, n', h', d); heads[i][u] are
    what place u of the line takes of tensor i.
    """
    layout = rank.problem.layout
    joined = share.problem.layout
    me = share.across.index(rank.rank)
    each = list(zip(tensors, heads))
    parts = [
        [t[:, :, h[u].start : h[u].stop] for t, h in each]
        for u in range(len(share.line))
    ]
    shapes = [
        [(t.shape[0], layout.size(u), len(h[share.place]), t.shape[3]) for t, h in each]
        for u in share.line
    ]
    received = yield from _all_to_all(rank, share.line, parts, shapes)
    results = [
        t.new_empty(t.shape[0], joined.size(me), len(h[share.place]), t.shape[3])
        for t, h in each
    ]
    for source, shards in zip(share.line, received):
        for row, owned in layout.chunks(source):
            for into, shard in zip(results, shards):
                into[:, joined.rows(me, owned)] = shard[:, row : row + len(owned)]
    return results


def _to_rows(
    rank: Rank, share: HeadShare, tensors: list[Tensor], heads: list[list[range]]
) -> Steps:
    """The way back; what several ranks have of one K/V head is summed."""
    layout = rank.problem.layout
    joined = share.problem.layout
    me = share.across.index(rank.rank)
    each = list(zip(tensors, heads))
    owned = [[joined.rows(me, r) for r in layout.ranges(u)] for u in share.line]
    parts = [
        [torch.cat([t[:, :0], *(t[:, r] for r in rows)], 1) for t in tensors]
        for rows in owned
    ]
    size = layout.size(rank.rank)
    shapes = [
        [(t.shape[0], size, len(h[u]), t.shape[3]) for t, h in each]
        for u in range(len(share.line))
    ]
    received = yield from _all_to_all(rank, share.line, parts, shapes)
    results = [
        t.new_zeros(t.shape[0], size, max(r.stop for r in h), t.shape[3])
        for t, h in each
    ]
    for u, shards in enumerate(received):
        for into, shard, h in zip(results, shards, heads):
            into[:, :, h[u].start : h[u].stop] += shard
    return results


def _all_to_all(
    rank: Rank,
    line: tuple[int, ...],
    parts: list[list[Tensor]],
    shapes: list[list[tuple[int, ...]]],
) -> Steps:
    """Send lists of tensors of one dtype to the ranks of a line, get those of these
    shapes from them.
    """
    counts = [[math.prod(shape) for shape in each] for each in shapes]
    send = torch.cat([t.reshape(-1) for part in parts for t in part])
    sent = [sum(t.numel() for t in part) for part in parts]
    exchange = all_to_all(send, sent, list(map(sum, counts)))
    received = yield from among(line, exchange)
    flat = iter(received.split(list(chain(*counts))))
    return [[next(flat).view(shape) for shape in each] for each in shapes]


def _on_heads(rank: Rank, share: HeadShare, *tensors) -> tuple[Tensor, ...]:
    """The one-device engine on whole sequences of a rank's heads: forward of q, k, v,
    else backward.
    """
    backward = len(tensors) > 3
    q, k = tensors[backward : backward + 2]
    pattern = share.problem.pattern
    if not share.problem.heads:  # ranks are more than heads
        lse = q.new_empty(q.shape[0], 0, q.shape[1], dtype=accumulation_dtype(q.dtype))
        return tensors[1:4] if backward else (torch.empty_like(q), lse)
    causal, scale, kernel = rank.kernel_args
    execution = replace(rank.execution, results=False)
    call = LocalCall(pattern, causal, scale, "auto", execution)
    if kernel.name == "compiled":
        way = Walked(pattern, causal)
    else:
        way = in_turn(pattern, *q.shape[1:3], k.shape[2], causal, kernel)
    if backward:
        return way.backward(None, tensors, scale, call)
    return way.forward(tensors, scale, call)


def _across(rank: Rank, share: HeadShare, algorithm, *tensors) -> Steps:
    """The forward or backward of another scheme on this rank's heads."""
    part = replace(rank, problem=share.problem, rank=share.across.index(rank.rank))
    return among(share.across, algorithm(part, *tensors))


def _share(rank: Rank, mesh: MeshScheme | None) -> HeadShare:
    mesh = mesh or mesh_of("ulysses", rank.problem.layout.ranks)
    return head_share(rank.problem, mesh, rank.rank)


def ulysses_forward(
    rank: Rank, q, k, v, mesh: MeshScheme | None = None, inner=None
) -> Steps:
    """``inner``: the forward of the other scheme of a mesh."""
    share = _share(rank, mesh)
    saved = ()
    queries = share.queries
    keys = share.keys
    index = share.kv_index
    gathered = yield from _to_heads(rank, share, [q, k, v], [queries, keys, keys])
    wide = [t if index is None else t[:, :, index] for t in gathered[1:]]
    if len(share.across) == 1:
        out, lse = _on_heads(rank, share, gathered[0], *wide)
    else:
        out, lse, *saved = yield from _across(rank, share, inner, gathered[0], *wide)
    (rows,) = yield from _to_rows(rank, share, [out], [queries])
    (lse_rows,) = yield from _to_rows(
        rank, share, [lse.transpose(1, 2).unsqueeze(-1)], [queries]
    )
    lse_rows = lse_rows.squeeze(-1).transpose(1, 2)
    return rows, lse_rows, *gathered, out.contiguous(), lse.contiguous(), *saved


def ulysses_backward(
    rank: Rank,
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    *saved,
    mesh: MeshScheme | None = None,
    inner=None,
) -> Steps:
    """``inner``: the backward of the other scheme of a mesh."""
    share = _share(rank, mesh)
    queries = share.queries
    keys = share.keys
    index = share.kv_index
    line_q, line_k, line_v, line_out, line_lse, *inner_saved = saved
    (line_dout,) = yield from _to_heads(rank, share, [dout], [queries])
    wide = [t if index is None else t[:, :, index] for t in (line_k, line_v)]
    tensors = line_q, *wide, line_out, line_lse
    line_dlse = None
    if dlse is not None:
        rows = [dlse.transpose(1, 2).unsqueeze(-1)]  # (b, s, h, 1)
        (line_dlse,) = yield from _to_heads(rank, share, rows, [queries])
        line_dlse = line_dlse.squeeze(-1).transpose(1, 2)
    if len(share.across) == 1:
        tensors = fold_lse_gradient(line_dout, *tensors, line_dlse)
        grads = _on_heads(rank, share, *tensors)
    else:
        tensors = line_dout, line_dlse, *tensors, *inner_saved
        grads = yield from _across(rank, share, inner, *tensors)
    dtype = accumulation_dtype(q.dtype)
    grads = [t[..., : q.shape[3]].to(dtype) for t in grads]
    if index is not None:
        heads = torch.tensor(index, device=k.device)
        grads[1:] = [
            t.new_zeros(line_k.shape).index_add_(2, heads, t) for t in grads[1:]
        ]
    return tuple((yield from _to_rows(rank, share, grads, [queries, keys, keys])))
