"""Block-sparse attention whose blocks are chosen by content: each block of queries sees
its top-k blocks of keys.

A scorer gives every (query block, key block) a logit z. S, the ``top_k`` visible blocks
of a row of blocks with the largest z, is chosen per batch entry and head; then ``out =
softmax(scale * q k^T + log M) v`` with M = 0 off S and on S

- without z: M = 1; the logits are those of the blocks' mean q and k, and only choose,
- with z: ``M = count * softmax(z over S)``, count the number of blocks in S: equal
  logits are M = 1.

S is constant for the gradient, M is differentiable, so a scorer learns which of the
chosen blocks deserve weight. NaN counts as the largest logit: its block is chosen, and
the rows that it weighs, or that see the NaN itself, are NaN.

With ``top_p`` below 1 a row keeps fewer: its best blocks until their shares of softmax(z)
over all blocks that it could choose reach ``top_p``.

Causal: S is the block itself, always, and the best of those wholly before it, so the
first rows choose fewer. Inside the block itself the mask is exact. Logits of block i
may then use blocks 0 .. i-1 alone: ``block_logits`` asks with the mean q of block i-1,
and a block's logit for itself is 0.

Across ranks shards are contiguous, equal and of whole blocks. Every rank chooses for its
own rows, without z by the means of all blocks, which it gets, and receives the blocks
that it chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import attention, check_tensors
from .block_patterns import block_count
from .checks import (
    LARGEST,
    Backend,
    Device,
    check_backend,
    check_bool,
    check_float_dtype,
    check_floats,
    check_int,
    is_real,
    short_repr,
)
from .engine.autograd import outside_graphs, without_autocast
from .kernels import device_of
from .kernels.base import accumulation_dtype
from .ring.exchange import Problem
from .ring.group import AnyGroup, Group, given_group, with_shared_refusals
from .ring.layout import contiguous
from .ring.selected import gather_means
from .selected import Selected
from .selection import padded_block_means


@dataclass(frozen=True)
class Adaptive:
    """Each block of ``block_size`` queries sees the ``top_k`` blocks of keys with the
    largest logits; with ``top_p`` only the first of these whose shares of attention,
    softmax of the logits, reach it together.

    Raises ValueError for numbers that are not positive or a ``top_p`` above 1; and, once
    n is known, for blocks longer than the sequence or a ``top_k`` above their number.

    >>> Adaptive(64, 4).pairs(1024, causal=True), Adaptive(64, 16).pairs(1000) == 1000**2
    (205312, True)
    """

    block_size: int = 64
    top_k: int = 8
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("block_size", "top_k"):
            object.__setattr__(
                self, name, check_int(name, getattr(self, name), most=LARGEST)
            )
        if not is_real(self.top_p) or not 0 < self.top_p <= 1:
            got = short_repr(self.top_p)
            raise ValueError(f"top_p must be above 0 and at most 1, got {got}")

    def count(self, n: int) -> int:
        """The number of blocks of ``n`` positions; ValueError where the pattern does
        not fit them.
        """
        count = block_count(n, self.block_size)
        if self.top_k > count:
            raise ValueError(
                f"top_k {self.top_k} exceeds the {count} blocks of n = {n}"
            )
        return count

    def pairs(self, n: int, causal: bool = False) -> int:
        """Visible (query, key) pairs of one head, whatever the content; with ``top_p``
        the most there can be.

        Exact if causal (a short last block is only seen by itself), if block_size
        divides n, or if all blocks are seen; else the most there can be, as rows that
        choose the short last block see fewer.
        """
        count, size, n = self.count(n), self.block_size, int(n)
        check_bool("causal", causal)
        if not causal:
            return n * min(n, self.top_k * size)
        lengths = [size] * (count - 1) + [n - (count - 1) * size]
        return sum(
            m * (m + 1) // 2 + m * size * min(i, self.top_k - 1)
            for i, m in enumerate(lengths)
        )

    def __str__(self) -> str:
        share = f", up to a share of {self.top_p:g}" if self.top_p < 1 else ""
        return f"blocks of {self.block_size}: the best {self.top_k} by content{share}"


@with_shared_refusals(given_group)
def choose(
    q: Tensor,
    k: Tensor,
    pattern: Adaptive,
    z: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    group: AnyGroup = None,
) -> Selected:
    """Return the blocks that z chooses and weighs, or that the means of q and k choose,
    as this module says: indices (batch, heads, blocks, top_k), the best first, causal
    the block itself; -1 where there are fewer.

    Arguments are those of ``adaptive_attention``. Differentiable in z, by
    ``log_weights``.

    >>> x = torch.eye(4).reshape(1, 4, 1, 4)  # blocks of one position that fit themselves alone
    >>> choose(x, x, Adaptive(1, 1)).indices.flatten().tolist()
    [0, 1, 2, 3]
    """
    ranks = Group.sharing(group)
    check_tensors(q, k, k)
    if not isinstance(pattern, Adaptive):
        raise TypeError(
            f"pattern must be a ringlab.Adaptive, got {type(pattern).__name__}"
        )
    check_bool("causal", causal)
    if scale is not None and not (is_real(scale) and abs(scale) < float("inf")):
        raise ValueError(f"scale must be a finite number, got {short_repr(scale)}")
    size = pattern.block_size
    if z is None:
        with torch.no_grad():
            z = logits(q, k, pattern, scale, causal, ranks)
        return Selected(choose_blocks(z, pattern, causal, ranks), size, size)
    outside_graphs(check_blocks)(q, k, z, pattern, causal, ranks)
    picks = choose_blocks(z.detach(), pattern, causal, ranks)
    z = z.to(torch.promote_types(z.dtype, accumulation_dtype(q.dtype)))
    return Selected(picks, size, size, log_weights=log_multiplicity(z, picks))


def check_blocks(
    q: Tensor,
    k: Tensor,
    z: Tensor | None,
    pattern: Adaptive,
    causal: bool,
    ranks: Group | None,
) -> None:
    """Raise ValueError unless the pattern fits q, k and z, PlanMismatch where ranks
    differ.
    """
    size, here = (1, 1) if ranks is None else (ranks.size, len(ranks.here))
    n = q.shape[1] * size // here
    if q.shape[1] != k.shape[1]:
        got = f"{q.shape[1]} and {k.shape[1]}"
        raise ValueError(f"q and k must agree in seq, got {got}")
    if size > 1 and n % (size * pattern.block_size):
        wanted = f"every rank needs equally many whole blocks of {pattern.block_size}"
        raise ValueError(f"{wanted}, got n = {n} on {size} ranks")
    count = pattern.count(n)
    if z is not None:
        axes = "(batch, heads, blocks, blocks)"
        shape = q.shape[0], q.shape[2], count // size * here, count
        check_floats("z", z, axes, shape, q.device)
    if ranks is not None:
        asked = Problem(pattern, contiguous(n, size), causal, q.shape[2], k.shape[2])
        ranks.agree("choice", asked, q, z=z is not None)


def block_means(t: Tensor, size: int) -> Tensor:
    """Means of t (b, n, h, d) over blocks of ``size`` positions, the last over those it
    has: (b, h, blocks, d).
    """
    means = padded_block_means(t, size)
    if short := t.shape[1] % size:
        larger = means.new_ones(means.shape[2], 1)
        larger[-1] = size / short
        means = means * larger
    # One layout, so that products round alike on one device and on many.
    return means.contiguous()


def logits(
    q: Tensor,
    k: Tensor,
    pattern: Adaptive,
    scale: float | None,
    causal: bool,
    ranks: Group | None,
    weights=(),
) -> Tensor:
    """The rows here of z (b, h, blocks, blocks), from the blocks' mean q and k, each
    times its weight if there are any.

    Causal: row i is of q's block i-1, row 0 of nothing; 0 on the diagonal and above.
    Every rank computes all rows and takes its own: a product of fewer rows may round
    otherwise, and choose otherwise.
    """
    outside_graphs(check_blocks)(q, k, None, pattern, causal, ranks)
    size, scale = (
        pattern.block_size,
        q.shape[3] ** -0.5 if scale is None else float(scale),
    )

    def product(
        *means: Tensor,
    ) -> Tensor:  # q (b, h, blocks, d), k (b, h_kv, blocks, d)
        q, k = (m @ w.to(m.dtype) for m, w in zip(means, weights)) if weights else means
        if causal:
            q = F.pad(q[:, :, :-1], (0, 0, 1, 0))
        z = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        return z.tril(-1) if causal else z

    with without_autocast(q):
        if ranks is None:
            return product(block_means(q, size), block_means(k, size))
        parts = [
            [block_means(t, size) for t in pair]
            for pair in zip(ranks.split(q), ranks.split(k))
        ]
        whole = outside_graphs(gather_means)(ranks, parts, size)
        return torch.cat(
            [
                product(*m).chunk(ranks.size, 2)[rank]
                for rank, m in zip(ranks.here, whole)
            ],
            2,
        )


def choose_blocks(
    z: Tensor, pattern: Adaptive, causal: bool, ranks: Group | None
) -> Tensor:
    """S as indices (b, h, rows, top_k) for the rows here of z (b, h, rows, blocks), the
    best first; -1 where there are fewer.

    Causal: the block itself, then the best before it.
    """
    itself = rows_here(z, ranks)  # (rows, 1)
    limits = torch.finfo(z.dtype)
    z = z.nan_to_num(limits.max, limits.max, limits.min)
    if causal:
        hidden = torch.arange(z.shape[3], device=z.device) >= itself
        z = z.masked_fill(hidden, -torch.inf)  # after all others
    best, picks = z.topk(pattern.top_k - causal, -1)
    dropped = best == -torch.inf
    if pattern.top_p < 1:
        shares = (best - z.logsumexp(-1, keepdim=True)).exp()
        dropped |= shares.cumsum(-1) - shares >= pattern.top_p  # reached before it
    picks = picks.masked_fill(dropped, -1)
    if not causal:
        return picks
    return torch.cat([itself.expand(*z.shape[:3], 1), picks], -1)


def log_multiplicity(z: Tensor, picks: Tensor) -> Tensor:
    """log M (b, h, rows, top_k) on S; -inf where there are fewer blocks."""
    none = picks < 0
    logits = z.gather(-1, picks.clamp(min=0)).masked_fill(none, -torch.inf)
    number = (~none).sum(-1, keepdim=True)
    return logits.log_softmax(-1) + number.to(z.dtype).log()


def rows_here(z: Tensor, ranks: Group | None) -> Tensor:
    """The numbers (rows, 1) of the rows of z (b, h, rows, blocks) that are here."""
    first = 0 if ranks is None else ranks.here[0] * z.shape[2]
    return torch.arange(first, first + z.shape[2], device=z.device)[:, None]


def adaptive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Adaptive,
    z: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: Backend = "auto",
    group: AnyGroup = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the blocks that z chooses and weighs, or that the means of q and k
    choose, as this module says.

    q is (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim); z
    (batch, heads, blocks, blocks), of queries by keys, may have another float dtype;
    causal reads it on and below its diagonal alone. Returns out and, with
    ``return_lse``, lse (batch, heads, seq) as ``ringlab.attention`` does.
    Differentiable once, in q, k, v and z.

    ``group``: a ProcessGroup or 1-D DeviceMesh, and q, k, v are this rank's shards,
    contiguous and equal, of whole blocks, and z its rows (batch, heads, own blocks, all
    blocks); or ``ringlab.Simulated(p)``, and all are whole.

    Raises ValueError or TypeError for arguments that do not fit.

    >>> q, z = torch.randn(1, 100, 4, 16), torch.zeros(1, 4, 7, 7, requires_grad=True)
    >>> adaptive_attention(q, q, q, Adaptive(16, 2), z, causal=True).square().sum().backward()
    >>> z.grad.shape
    torch.Size([1, 4, 7, 7])
    """
    options = {"causal": causal, "scale": scale, "group": group}
    chosen = choose(q, k, pattern, z, **options)
    options |= {"backend": backend, "return_lse": return_lse}
    with without_autocast(q):
        return attention(q, k, v, chosen, **options)


class AdaptiveBlockSparse(nn.Module):
    """Attention to content-chosen blocks with a scorer that trains: two projections of
    the blocks' mean q and k.

    ``forward(q, k, v, is_causal=False)`` on (batch, seq, heads, head_dim) tensors; all
    heads share the scorer, whose weights ``q_score`` and ``k_score`` (head_dim,
    head_dim) start as the identity: a new module chooses the blocks that
    ``adaptive_attention`` chooses without z. ``group`` is that of
    ``adaptive_attention``: the weights are replicated then, and over a ProcessGroup
    their gradients are this rank's part: sum them over the ranks.

    Raises ValueError for sizes that do not fit, TypeError for a group that is none.

    >>> layer = AdaptiveBlockSparse(16, block_size=8, top_k=3)
    >>> q = torch.randn(2, 100, 4, 16)
    >>> layer(q, q, q, is_causal=True).sum().backward(); layer.q_score.grad.shape
    torch.Size([16, 16])
    """

    def __init__(
        self,
        head_dim: int,
        block_size: int = 64,
        top_k: int = 8,
        *,
        backend: Backend = "auto",
        group: AnyGroup = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        Group.sharing(group)  # raises for a wrong group now, not at the first call
        check_int("head_dim", head_dim, most=LARGEST)
        backend = check_backend(backend)
        if dtype is not None:
            check_float_dtype(dtype)
        device = device if device is None else device_of(device)
        self.pattern: Adaptive = Adaptive(block_size, top_k)
        self.backend = backend
        self.group: AnyGroup = Group.kept(group)
        start = torch.eye(head_dim, device=device, dtype=dtype)
        self.q_score: nn.Parameter = nn.Parameter(start)
        self.k_score: nn.Parameter = nn.Parameter(start.clone())

    @with_shared_refusals(lambda layer, *_, **__: layer.group)
    def logits(self, q: Tensor, k: Tensor, causal: bool = False) -> Tensor:
        """z (b, h, blocks, blocks) in fp32 (fp64 for fp64) for q (b, n, h, d) and k (b,
        n, h_kv, d); a rank's rows.
        """
        check_tensors(q, k, k)
        check_bool("causal", causal)
        if q.shape[3] != len(self.q_score):
            raise ValueError(
                f"the scorer is for head_dim {len(self.q_score)}, got {q.shape[3]}"
            )
        weights = self.q_score, self.k_score
        return logits(
            q, k, self.pattern, None, causal, Group.sharing(self.group), weights
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False
    ) -> Tensor:
        z = self.logits(q, k, is_causal)
        options = {"backend": self.backend, "group": self.group}
        return adaptive_attention(q, k, v, self.pattern, z, causal=is_causal, **options)

    def extra_repr(self) -> str:
        return f"head_dim={len(self.q_score)}, {self.pattern}"
