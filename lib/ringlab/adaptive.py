"""Block sparsity that follows the content and trains: each block of queries chooses its top-k blocks of keys.

A scorer gives every (query block, key block) a logit z. S, the ``top_k`` visible blocks of a row of blocks with the
largest z, is chosen per batch entry and head; then ``out = softmax(scale * q k^T + log M) v`` with M = 0 off S and on S

- without z: M = 1; the logits are those of the blocks' mean q and k, and only choose,
- with z: ``M = count * softmax(z over S)``, count the number of blocks in S: equal logits are M = 1.

S is constant for the gradient, M is differentiable, so a scorer learns which of the chosen blocks deserve weight. NaN
counts as the largest logit: its block is chosen, and the rows that it weighs, or that see the NaN itself, are NaN.

Causal: S is the block itself, always, and the best of those wholly before it, so the first rows choose fewer. Inside
the block itself the mask is exact. Logits of block i may then use blocks 0 .. i-1 alone: ``block_logits`` asks with
the mean q of block i-1, and a block's logit for itself is 0.

Across ranks shards are contiguous, equal and of whole blocks. Every rank gets the means of all blocks, chooses for its
own rows, and receives what these chose.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import adaptive_blocks, chosen
from .adaptive_blocks import Adaptive, best_blocks
from .api import check_tensors
from .checks import FLOATS, LARGEST, backends, flag, float_dtype, positive, real, shown
from .kernels import device_of
from .kernels.base import wide
from .ring import content
from .ring.world import World


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

    ``group``: a ProcessGroup or 1-D DeviceMesh, and q, k, v are this rank's shards, contiguous and equal, of whole
    blocks, and z its rows (batch, heads, own blocks, all blocks); or ``ringlab.Simulated(p)``, and all are whole.

    Raises ValueError or TypeError for arguments that do not fit.

    >>> q, z = torch.randn(1, 100, 4, 16), torch.zeros(1, 4, 7, 7, requires_grad=True)
    >>> adaptive_attention(q, q, q, Adaptive(16, 2), z, causal=True).square().sum().backward()
    >>> z.grad.shape
    torch.Size([1, 4, 7, 7])
    """
    world = World.of(group)
    check_tensors(q, k, v)
    if not isinstance(pattern, Adaptive):
        raise TypeError(f"pattern must be a ringlab.Adaptive, got {type(pattern).__name__}")
    flag("causal", causal)
    flag("return_lse", return_lse)
    if scale is not None and not (real(scale) and abs(scale) < float("inf")):
        raise ValueError(f"scale must be a finite number, got {shown(scale)}")
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    backend = backends(backend)
    (b, _, heads, _), (count, rows, first), log_m = q.shape, adaptive_blocks.rows_of_blocks(q, pattern, world), None
    if z is None:
        picks = best_blocks(q, k, pattern, scale, causal, world, first)
    else:
        wanted = (b, heads, rows, count)
        if not isinstance(z, Tensor) or z.dtype not in FLOATS or z.shape != wanted or z.device != q.device:
            got = f"{tuple(z.shape)}, {z.dtype} on {z.device}" if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"z must be (batch, heads, blocks, blocks) = {wanted}, floats on {q.device}; got {got}")
        picks = adaptive_blocks.choose(z.detach(), pattern.top_k, causal, first)
        z = z.to(torch.promote_types(z.dtype, wide(q.dtype)))
        log_m = adaptive_blocks.log_multiplicity(z, picks, causal, first).to(wide(q.dtype))
    if world is None:
        out, lse = chosen.attend(q, k, v, log_m, picks, pattern.block_size, causal, float(scale), backend)
    else:
        out, lse = content.attend(world, q, k, v, log_m, picks, pattern, causal, float(scale), backend)
    return (out, lse) if return_lse else out


class AdaptiveBlockSparse(nn.Module):
    """Attention to content-chosen blocks with a scorer that trains: two projections of the blocks' mean q and k.

    ``forward(q, k, v, is_causal=False)`` on (batch, seq, heads, head_dim) tensors; all heads share the scorer, whose
    weights ``q_score`` and ``k_score`` (head_dim, head_dim) start as the identity: a new module chooses the blocks that
    ``adaptive_attention`` chooses without z. ``group`` is that of ``adaptive_attention``: the weights are replicated
    then, and over a ProcessGroup their gradients are this rank's part: sum them over the ranks.

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
        backend: str | tuple[str, ...] = "auto",
        group=None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        World.of(group)  # raises what is wrong with it now, not at the first call
        positive("head_dim", head_dim, most=LARGEST)
        backend = backends(backend)
        if dtype is not None:
            float_dtype(dtype)
        device = device if device is None else device_of(device)
        self.pattern, self.backend, self.group = Adaptive(block_size, top_k), backend, group
        self.q_score, self.k_score = (nn.Parameter(torch.eye(head_dim, device=device, dtype=dtype)) for _ in range(2))

    def logits(self, q: Tensor, k: Tensor, causal: bool = False) -> Tensor:
        """z (b, h, blocks, blocks) in fp32 (fp64 for fp64) for q (b, n, h, d) and k (b, n, h_kv, d); a rank's rows."""
        check_tensors(q, k, k)
        flag("causal", causal)
        weights = self.q_score, self.k_score

        def score(*means: Tensor) -> Tensor:
            scored = (m @ w.to(m.dtype) for m, w in zip(means, weights))  # (b, h, blocks, d)
            return adaptive_blocks.block_logits(*scored, q.shape[3] ** -0.5, causal)

        with torch.autocast(q.device.type, enabled=False):
            return adaptive_blocks.logits(q, k, self.pattern.block_size, World.of(self.group), score)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check_tensors(q, k, v)
        if q.shape[3] != len(self.q_score):
            raise ValueError(f"the scorer is for head_dim {len(self.q_score)}, got {q.shape[3]}")
        adaptive_blocks.rows_of_blocks(q, self.pattern, World.of(self.group))
        z = self.logits(q, k, is_causal)
        options = {"causal": is_causal, "backend": self.backend, "group": self.group}
        return adaptive_attention(q, k, v, self.pattern, z, **options)

    def extra_repr(self) -> str:
        return f"head_dim={len(self.q_score)}, {self.pattern}"
