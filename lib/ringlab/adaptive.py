"""Block sparsity that follows the content and trains: each block of queries chooses its top-k blocks of keys.

A scorer gives every (query block, key block) a logit z. S, the ``top_k`` visible blocks of a row of blocks with the
largest z, is chosen per batch entry and head; then ``out = softmax(scale * q k^T + log M) v`` with M = 0 off S and on S

- without z: M = 1; the logits are those of the blocks' mean q and k, and only choose,
- with z: ``M = count * softmax(z over S)``, count the number of blocks in S: equal logits are M = 1.

S is constant for the gradient, M is differentiable, so a scorer learns which of the chosen blocks deserve weight.

Causal: S is the block itself, always, and the best of those wholly before it, so the first rows choose fewer. Inside
the block itself the mask is exact. Logits of block i may then use blocks 0 .. i-1 alone: :func:`block_logits` asks with
the mean q of block i-1, and a block's logit for itself is 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import chosen
from .api import FLOATS, check_tensors
from .block_parts import positive
from .kernels.base import wide


@dataclass(frozen=True)
class Adaptive:
    """Each block of ``block_size`` queries sees ``top_k`` blocks of keys, whichever the content asks for.

    Raises ValueError for numbers that are not positive; and, once n is known, for blocks longer than the sequence or
    more of them than there are.

    >>> Adaptive(64, 4).pairs(1024, causal=True), Adaptive(64, 16).pairs(1000) == 1000**2
    (205312, True)
    """

    block_size: int = 64
    top_k: int = 8

    def __post_init__(self):
        positive("block_size", self.block_size)
        positive("top_k", self.top_k)

    def count(self, n: int) -> int:
        """The number of blocks of ``n`` positions; ValueError where the pattern does not fit them."""
        if self.block_size > n:
            raise ValueError(f"block_size {self.block_size} exceeds the sequence length {n}")
        count = -(-n // self.block_size)
        if self.top_k > count:
            raise ValueError(f"top_k {self.top_k} exceeds the {count} blocks of n = {n}")
        return count

    def pairs(self, n: int, causal: bool = False) -> int:
        """Visible (query, key) pairs of one head, whatever the content.

        Exact if causal (a short last block is only seen by itself), if block_size divides n, or if all blocks are
        seen; else the most there can be, as rows that choose the short last block see fewer.
        """
        count, size = self.count(n), self.block_size
        if not causal:
            return n * min(n, self.top_k * size)
        lengths = [size] * (count - 1) + [n - (count - 1) * size]
        return sum(m * (m + 1) // 2 + m * size * min(i, self.top_k - 1) for i, m in enumerate(lengths))

    def to_dict(self) -> dict:
        return {"kind": "adaptive"} | asdict(self)

    def __str__(self) -> str:
        return f"blocks of {self.block_size}: the best {self.top_k} by content"


def adaptive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Adaptive,
    z: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str | tuple[str, ...] = "auto",
    group=None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the blocks that z chooses and weighs, or that the means of q and k choose: see this module.

    q is (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim); z (batch, heads, blocks, blocks), of
    queries by keys, may have another float dtype; causal reads it on and below its diagonal alone. Returns out and,
    with ``return_lse``, lse (batch, heads, seq) as ``ringlab.attention`` does. Differentiable once, in q, k, v and z.

    Raises ValueError or TypeError for arguments that do not fit, NotImplementedError for a group.

    >>> q, z = torch.randn(1, 100, 4, 16), torch.zeros(1, 4, 7, 7, requires_grad=True)
    >>> adaptive_attention(q, q, q, Adaptive(16, 2), z, causal=True).square().sum().backward()
    >>> z.grad.shape
    torch.Size([1, 4, 7, 7])
    """
    _one_device(group)
    check_tensors(q, k, v)
    if not isinstance(pattern, Adaptive):
        raise TypeError(f"pattern must be a ringlab.Adaptive, got {type(pattern).__name__}")
    for name, value in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if isinstance(scale, bool) or not isinstance(scale, float | int) or not abs(scale) < float("inf"):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    if not backend or not isinstance(backend, str | tuple):
        raise ValueError(f"backend must be a name or a tuple of names, got {backend!r}")
    (b, _, heads, _), count, log_m = q.shape, pattern.count(q.shape[1]), None
    if z is None:
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            means = (block_means(t, pattern.block_size) for t in (q, k))
            picks = _choose(block_logits(*means, scale, causal), pattern.top_k, causal)
    else:
        wanted = (b, heads, count, count)
        if not isinstance(z, Tensor) or z.dtype not in FLOATS or z.shape != wanted or z.device != q.device:
            got = f"{tuple(z.shape)}, {z.dtype} on {z.device}" if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"z must be (batch, heads, blocks, blocks) = {wanted}, floats on {q.device}; got {got}")
        picks = _choose(z.detach(), pattern.top_k, causal)
        log_m = _log_multiplicity(z.to(torch.promote_types(z.dtype, wide(q.dtype))), picks, causal).to(wide(q.dtype))
    out, lse = chosen.attend(q, k, v, log_m, picks, pattern.block_size, causal, float(scale), backend)
    return (out, lse) if return_lse else out


class AdaptiveBlockSparse(nn.Module):
    """Attention to content-chosen blocks with a scorer that trains: two projections of the blocks' mean q and k.

    ``forward(q, k, v, is_causal=False)`` on (batch, seq, heads, head_dim) tensors; all heads share the scorer, whose
    weights ``q_score`` and ``k_score`` (head_dim, head_dim) start as the identity: a new module chooses the blocks that
    ``adaptive_attention`` chooses without z.

    Raises ValueError for sizes that do not fit, NotImplementedError for a group.

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
        backend: str | tuple[str, ...] = "auto",
        group=None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _one_device(group)
        positive("head_dim", head_dim)
        self.pattern, self.backend = Adaptive(block_size, top_k), backend
        self.q_score, self.k_score = (nn.Parameter(torch.eye(head_dim, device=device, dtype=dtype)) for _ in range(2))

    def logits(self, q: Tensor, k: Tensor, causal: bool = False) -> Tensor:
        """z (b, h, blocks, blocks) in fp32 (fp64 for fp64) for q (b, n, h, d) and k (b, n, h_kv, d)."""
        means = (block_means(t, self.pattern.block_size) for t in (q, k))
        with torch.autocast(q.device.type, enabled=False):
            scored = (m @ w.to(m.dtype) for m, w in zip(means, (self.q_score, self.k_score)))  # (b, h, blocks, d)
            return block_logits(*scored, q.shape[3] ** -0.5, causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check_tensors(q, k, v)
        if q.shape[3] != len(self.q_score):
            raise ValueError(f"the scorer is for head_dim {len(self.q_score)}, got {q.shape[3]}")
        self.pattern.count(q.shape[1])
        z = self.logits(q, k, is_causal)
        return adaptive_attention(q, k, v, self.pattern, z, causal=is_causal, backend=self.backend)

    def extra_repr(self) -> str:
        return f"head_dim={len(self.q_score)}, {self.pattern}"


def block_means(t: Tensor, size: int) -> Tensor:
    """Means of t (b, n, h, d) over blocks of ``size`` positions, the last over those it has: (b, h, blocks, d)."""
    whole = t.shape[1] // size * size
    means = t[:, :whole].unflatten(1, (-1, size)).mean(2, dtype=wide(t.dtype))  # (b, n // size, h, d)
    if whole < t.shape[1]:
        means = torch.cat([means, t[:, whole:].mean(1, keepdim=True, dtype=wide(t.dtype))], 1)
    return means.transpose(1, 2)


def block_logits(q: Tensor, k: Tensor, scale: float, causal: bool = False) -> Tensor:
    """z (b, h, blocks, blocks) of q (b, h, blocks, d) and k (b, h_kv, blocks, d), one vector a block.

    Causal: row i is of q's block i-1, row 0 of nothing; 0 on the diagonal and above.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if causal:
        q = F.pad(q[:, :, :-1], (0, 0, 1, 0))
    z = scale * q @ k.mT
    return z.tril(-1) if causal else z


def _choose(z: Tensor, top_k: int, causal: bool) -> Tensor:
    """S as indices (b, h, blocks, top_k); causal: the block itself, then the best before it, i of them in row i."""
    if not causal:
        return z.topk(top_k, -1).indices.sort(-1).values  # in order: a short last block comes last
    count = z.shape[-1]
    itself = torch.arange(count, device=z.device).expand(z.shape[:3]).unsqueeze(-1)
    hidden = torch.ones(count, count, dtype=torch.bool, device=z.device).triu()
    before = z.clamp(min=torch.finfo(z.dtype).min).masked_fill(hidden, -torch.inf)  # the hidden come after all others
    return torch.cat([itself, before.topk(top_k - 1, -1).indices], -1)


def _log_multiplicity(z: Tensor, picks: Tensor, causal: bool) -> Tensor:
    """log M (b, h, blocks, top_k) on S; -inf where a causal row has fewer blocks."""
    logits, (count, top_k) = z.gather(-1, picks), picks.shape[2:]
    number = torch.full((count, 1), top_k, device=z.device)
    if causal:
        number = torch.arange(1, count + 1, device=z.device)[:, None].clamp(max=top_k)  # (blocks, 1)
        logits = logits.masked_fill(torch.arange(top_k, device=z.device) >= number, -torch.inf)
    return logits.log_softmax(-1) + number.to(z.dtype).log()


def _one_device(group) -> None:
    if group is not None:
        raise NotImplementedError("adaptive block sparsity runs on one device: a group of ranks is not supported yet")
