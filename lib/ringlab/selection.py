"""Which keys a query sees by content, chosen as published methods choose: MoBA, NSA,
DSA, MInference. Each gives a ``Selected``, which ``ringlab.attention`` takes with
``causal=True``; ``nsa`` attends itself.

A query's choice depends on no later position, but for ``vertical_slash``, which is for a
prompt that is known whole. What a method always takes is taken whatever the scores are;
of others a score of NaN counts as the lowest. Of equal scores any may be chosen. A choice
has no gradient.
Its memory grows with the queries times ``top_k``; scores are computed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import attention, check_tensors
from .block_patterns import sliding_window
from .checks import LARGEST, check_floats, check_int
from .engine.autograd import without_autocast
from .kernels.base import accumulation_dtype
from .patterns import Dense
from .selected import Selected

PIECE = 1 << 21  # scores at a time, as the caches of a CPU hold; on a GPU 32 times


def padded_block_means(t: Tensor, size: int) -> Tensor:
    """Means of t (b, n, h, d) over blocks of ``size`` positions, (b, h, blocks, d) in
    fp32 or wider, differentiable. The last block counts positions that it lacks as 0:
    only its own queries see it, and they see it in any case.
    """
    count = -(-t.shape[1] // size)
    whole = F.pad(t, (0, 0, 0, 0, 0, count * size - t.shape[1]))
    means = whole.unflatten(1, (count, size)).mean(2, dtype=accumulation_dtype(t.dtype))
    return means.transpose(1, 2)


def _check(q: Tensor, k: Tensor) -> None:
    check_tensors(q, k, k)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q and k must agree in seq: {q.shape[1]} and {k.shape[1]}")


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q k^T (b, h, m, c) of q (b, m, h, d) and k (b, h_kv, c, d), in k's dtype."""
    rows = q.to(k.dtype).transpose(1, 2).unflatten(1, (k.shape[1], -1))
    return (rows.flatten(2, 3) @ k.mT).view(*q.shape[:1], q.shape[2], q.shape[1], -1)


@torch.no_grad()
def _best(
    q: Tensor,
    score: Callable[[slice, int], Tensor],
    number: int,
    *,
    size: int,
    recent: int = 0,
    first: int = 0,
) -> Tensor:
    """Up to ``number`` blocks of ``size`` keys with the largest scores for each query, of
    those that begin before or at it; -1 where there are fewer: (b, groups, n, number).

    ``score(queries, count)``: (b, groups, queries, count) for the first blocks. The
    ``recent`` last blocks and the ``first`` are listed before the others, whatever their
    scores are.
    """
    b, n, heads, _ = q.shape
    every = -(-n // size)
    piece = PIECE if q.device.type == "cpu" else 32 * PIECE  # fewer launches
    step = max(1, piece // (b * heads * every))
    number = max(0, min(number, every) - recent - first)  # of the others
    back, ahead = (torch.arange(c, device=q.device) for c in (recent, first))
    rows = []
    with without_autocast(q):
        for start in range(0, n, step):
            stop = min(start + step, n)
            count = (stop - 1) // size + 1
            own = torch.arange(start, stop, device=q.device).unsqueeze(1) // size
            block = torch.arange(count, device=q.device)
            taken = (block > own - recent) | (block < first)  # (queries, count)
            scores = finite_(score(slice(start, stop), count))
            scores.masked_fill_(taken, -torch.inf)  # after any other, as later blocks
            best, blocks = scores.topk(min(number, count), sorted=False)
            blocks = blocks.masked_fill(best == -torch.inf, -1)
            last = own - back  # (queries, recent)
            always = [
                last.masked_fill(last < first, -1),
                torch.where(ahead <= own, ahead, -1),  # (queries, first)
            ]
            always = torch.cat(always, 1).expand(*blocks.shape[:3], -1)
            missing = number - blocks.shape[3]
            rows.append(F.pad(torch.cat([always, blocks], 3), (0, missing), value=-1))
    return torch.cat(rows, 2)


def finite_(scores: Tensor) -> Tensor:
    """The scores, changed in place to finite ones in the same order; NaN to the
    lowest.
    """
    limits = torch.finfo(scores.dtype)
    return scores.nan_to_num_(limits.min, limits.max, limits.min)


def moba(q: Tensor, k: Tensor, *, block_size: int = 128, top_k: int = 8) -> Selected:
    """MoBA (Lu et al. 2025, arXiv 2502.13189): each query and head sees its own block
    and those earlier ones whose mean key has the largest product with it, up to
    ``top_k`` in all.

    q is (batch, seq, heads, head_dim), k (batch, seq, kv_heads, head_dim). Raises
    ValueError or TypeError for arguments that do not fit.

    >>> x = torch.eye(4).reshape(1, 4, 1, 4)
    >>> moba(x + x[:, :1], x, block_size=1, top_k=2).indices.sort().values.tolist()
    [[[[-1, 0], [0, 1], [0, 2], [0, 3]]]]
    """
    _check(q, k)
    size = min(check_int("block_size", block_size, most=LARGEST), q.shape[1])
    top_k = check_int("top_k", top_k, most=LARGEST)
    means = padded_block_means(k.detach(), size)  # (b, kv_heads, blocks, d)

    def score(queries: slice, count: int) -> Tensor:
        return _products(q[:, queries], means[:, :, :count])

    return Selected(_best(q, score, top_k, size=size, recent=1), granularity=size)


def dsa(index_q: Tensor, index_k: Tensor, weights: Tensor, *, top_k: int) -> Selected:
    """The choice of DeepSeek-V3.2's sparse attention (DeepSeek-AI 2025, arXiv
    2512.02556): all heads of a query see the ``top_k`` keys with the largest score
    ``sum over j of weights_j relu(index_q_j . index_k)`` of a small indexer.

    index_q is (batch, seq, index heads, index dim), index_k (batch, seq, 1, index dim),
    weights (batch, seq, index heads). Raises ValueError or TypeError for arguments that
    do not fit.

    >>> x = torch.eye(4).reshape(1, 4, 1, 4)
    >>> dsa(x, x, torch.ones(1, 4, 1), top_k=1).indices.flatten().tolist()
    [0, 1, 2, 3]
    """
    try:
        _check(index_q, index_k)
    except (TypeError, ValueError) as error:
        raise type(error)(f"index_q and index_k as q and k: {error}") from None
    top_k = check_int("top_k", top_k, most=LARGEST)
    if index_k.shape[2] != 1:
        raise ValueError(f"index_k must have one head, got {index_k.shape[2]}")
    axes = "(batch, seq, index heads)"
    shape = index_q.shape[:3]
    check_floats("weights", weights, axes, shape, index_q.device)
    keys = index_k.to(accumulation_dtype(index_k.dtype)).transpose(1, 2)

    def score(queries: slice, count: int) -> Tensor:
        products = _products(index_q[:, queries], keys[:, :, :count]).relu_()
        each = weights[:, queries].to(products.dtype).transpose(1, 2).unsqueeze(3)
        return products.mul_(each).sum(1, keepdim=True)  # (b, 1, queries, count)

    return Selected(_best(index_q, score, top_k, size=1))


@torch.no_grad()
def vertical_slash(
    q: Tensor,
    k: Tensor,
    *,
    block_size: int = 64,
    vertical: int = 8,
    slash: int = 8,
    last: int = 64,
) -> Selected:
    """Vertical and slash lines in the way of MInference (Jiang et al. 2024, arXiv
    2407.02490), each as wide as a block: for each head the ``vertical`` blocks of keys,
    and the ``slash`` distances from query to key, that get the most attention of the
    ``last`` queries.

    The first block and the shortest distances are always among them. A distance of d
    blocks is two blocks of keys for a block of queries, d and d + 1 before it. q is
    (batch, seq, heads, head_dim), k (batch, seq, kv_heads, head_dim). Raises ValueError
    or TypeError for arguments that do not fit.

    >>> x = torch.zeros(1, 256, 2, 8)
    >>> vertical_slash(x, x, vertical=1, slash=1).indices[0, 0].tolist()
    [[0, 0, -1], [0, 1, 0], [0, 2, 1], [0, 3, 2]]
    """
    _check(q, k)
    sizes = {"block_size": block_size, "vertical": vertical, "slash": slash}
    for name, value in (sizes | {"last": last}).items():
        check_int(name, value, most=LARGEST)
    b, n, heads, d = q.shape
    count, last = -(-n // block_size), min(last, n)
    keys = torch.arange(n, device=q.device)
    apart = keys[n - last :].unsqueeze(1) - keys  # (last, n)
    with without_autocast(q):
        wide = k.to(accumulation_dtype(k.dtype)).transpose(1, 2)
        scores = finite_(d**-0.5 * _products(q[:, n - last :], wide))  # (b, h, last, n)
        seen = scores.masked_fill_(apart < 0, -torch.inf).softmax(3)
    down = seen.new_zeros(b, heads, count)
    along = down.clone()
    down.index_add_(2, keys // block_size, seen.sum(2))
    along.index_add_(2, apart.clamp(min=0).flatten() // block_size, seen.flatten(2))
    down, along = (
        each[..., 1:].topk(min(number, count) - 1).indices.unsqueeze(2) + 1
        for each, number in ((down, vertical), (along, slash))
    )  # (b, h, 1, lines)
    down, along = (F.pad(each, (1, 0)) for each in (down, along))  # 0 always
    row = torch.arange(count, device=q.device).unsqueeze(1)
    down = torch.where(down > row, -1, down)  # (b, h, rows, lines)
    indices = torch.cat([down, row - along, row - along - 1], 3)
    return Selected(indices, block_size, block_size)


def nsa_blocks(
    q: Tensor, k: Tensor, *, block_size: int = 64, top_k: int = 16
) -> Selected:
    """The blocks that ``nsa`` selects: for each query and K/V head the first, the two
    last, and those whose pooled keys get the most attention of all heads that share
    them, ``top_k`` in all.
    """
    _check(q, k)
    size = min(check_int("block_size", block_size, most=LARGEST), q.shape[1])
    if check_int("top_k", top_k, most=LARGEST) < 3:
        raise ValueError(f"top_k counts three blocks that are always seen, got {top_k}")
    means = padded_block_means(k.detach(), size)
    kv_heads = k.shape[2]

    def score(queries: slice, count: int) -> Tensor:
        at = torch.arange(queries.start, queries.stop, device=q.device)
        hidden = _ends(count, size, q.device) > at.unsqueeze(1)  # (queries, count)
        scores = q.shape[3] ** -0.5 * _products(q[:, queries], means[:, :, :count])
        scores = finite_(scores)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(3)
        return shares.unflatten(1, (kv_heads, -1)).sum(2)

    indices = _best(q, score, top_k, size=size, recent=2, first=1)
    return Selected(indices, granularity=size)


def _ends(count: int, size: int, device) -> Tensor:
    """The last positions of so many blocks."""
    return size * torch.arange(1, count + 1, device=device) - 1


def nsa_compressed(q: Tensor, k: Tensor, v: Tensor, block_size: int = 64) -> Tensor:
    """Attention to the means of k and v over blocks that end before or at the query; 0
    where there is none. Differentiable.
    """
    before = block_size - 1  # queries that see no whole block
    n, heads = q.shape[1:3]
    count = n // block_size
    if not count:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    pooled = [
        padded_block_means(t[:, : count * block_size], block_size)
        .to(q.dtype)
        .transpose(1, 2)
        for t in (k, v)
    ]
    # The queries that see the same blocks are heads of one position.
    rows = F.pad(q[:, before:], (0, 0, 0, 0, 0, count * block_size + before - n))
    rows = rows.unflatten(1, (count, block_size)).transpose(2, 3).flatten(2, 3)
    out = attention(rows, *pooled, Dense(), causal=True)  # (b, count, h * block, d)
    out = out.unflatten(2, (heads, block_size)).transpose(2, 3).flatten(1, 2)
    return F.pad(out[:, : n - before], (0, 0, 0, 0, before, 0))


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    block_size: int = 64,
    top_k: int = 16,
    window: int = 512,
) -> Tensor:
    """Native sparse attention (Yuan et al. 2025, arXiv 2502.11089), causal: the sum of
    attention to pooled blocks, to the blocks of ``nsa_blocks`` and to the last
    ``window`` keys, each times its gate.

    q is (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim), gates
    (batch, seq, heads, 3). Blocks are pooled by their mean, and are the same for
    pooling and for selecting. Returns out as q; differentiable once in all four. Raises
    ValueError or TypeError for arguments that do not fit.

    >>> q, gates = torch.randn(1, 200, 4, 16), torch.rand(1, 200, 4, 3)
    >>> nsa(q, q[:, :, :2], q[:, :, 2:], gates, block_size=16, window=32).shape
    torch.Size([1, 200, 4, 16])
    """
    check_tensors(q, k, v)
    check_int("window", window, most=LARGEST)
    check_floats("gates", gates, "(batch, seq, heads, 3)", (*q.shape[:3], 3), q.device)
    parts = nsa_parts(q, k, v, block_size=block_size, top_k=top_k, window=window)
    out = sum(gate.unsqueeze(3) * part for gate, part in zip(gates.unbind(3), parts))
    return out.to(parts[1].dtype)


def nsa_parts(
    q: Tensor, k: Tensor, v: Tensor, *, block_size: int, top_k: int, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of ``nsa`` without gates: compressed, selected, window."""
    choice = nsa_blocks(q, k, block_size=block_size, top_k=top_k)
    near = sliding_window(tokens=window)
    selected, windowed = (attention(q, k, v, x, causal=True) for x in (choice, near))
    return nsa_compressed(q, k, v, block_size), selected, windowed
