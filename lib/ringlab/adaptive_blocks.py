"""Which blocks of keys a block of queries chooses by content, and the weights that logits give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import LARGEST, flag, integer, positive
from .kernels.base import wide
from .ring import content
from .ring.world import World


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
        positive("block_size", self.block_size, most=LARGEST)
        positive("top_k", self.top_k, most=LARGEST)

    def count(self, n: int) -> int:
        """The number of blocks of ``n`` positions; ValueError where the pattern does not fit them."""
        if self.block_size > positive("the sequence length", integer(n), most=LARGEST):
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
        flag("causal", causal)
        if not causal:
            return n * min(n, self.top_k * size)
        lengths = [size] * (count - 1) + [n - (count - 1) * size]
        return sum(m * (m + 1) // 2 + m * size * min(i, self.top_k - 1) for i, m in enumerate(lengths))

    def to_dict(self) -> dict:
        return {"kind": "adaptive"} | asdict(self)

    def __str__(self) -> str:
        return f"blocks of {self.block_size}: the best {self.top_k} by content"


@torch.no_grad()
def best_blocks(
    q: Tensor,
    k: Tensor,
    pattern: Adaptive,
    scale: float | None = None,
    causal: bool = False,
    world: World | None = None,
    first: int = 0,
) -> Tensor:
    """The blocks that ``adaptive_attention`` chooses without z, as indices (batch, heads, blocks, top_k).

    Causal: the block itself comes first, and row i uses the first i + 1.

    >>> x = torch.eye(4).reshape(1, 4, 1, 4)  # blocks of one position that fit themselves alone
    >>> best_blocks(x, x, Adaptive(1, 1)).flatten().tolist()
    [0, 1, 2, 3]
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        z = logits(q, k, pattern.block_size, world, lambda *means: block_logits(*means, scale, causal))
        return choose(z, pattern.top_k, causal, first)


def block_means(t: Tensor, size: int) -> Tensor:
    """Means of t (b, n, h, d) over blocks of ``size`` positions, the last over those it has: (b, h, blocks, d)."""
    whole = t.shape[1] // size * size
    means = t[:, :whole].unflatten(1, (-1, size)).mean(2, dtype=wide(t.dtype))  # (b, n // size, h, d)
    if whole < t.shape[1]:
        means = torch.cat([means, t[:, whole:].mean(1, keepdim=True, dtype=wide(t.dtype))], 1)
    return means.transpose(1, 2).contiguous()  # one layout, so that products round alike on one device and on many


def block_logits(q: Tensor, k: Tensor, scale: float, causal: bool = False) -> Tensor:
    """z (b, h, blocks, blocks) of q (b, h, blocks, d) and k (b, h_kv, blocks, d), one vector a block.

    Causal: row i is of q's block i-1, row 0 of nothing; 0 on the diagonal and above.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if causal:
        q = F.pad(q[:, :, :-1], (0, 0, 1, 0))
    z = scale * q @ k.mT
    return z.tril(-1) if causal else z


def rows_of_blocks(q: Tensor, pattern: Adaptive, world: World | None) -> tuple[int, int, int]:
    """The numbers of all blocks, of the rows of blocks here, and of those before them; ValueError for a bad fit."""
    if world is None:
        count = pattern.count(q.shape[1])
        return count, count, 0
    count = pattern.count(world.positions(q.shape[1], pattern.block_size))
    return count, count // world.ranks * len(world.here), count // world.ranks * world.here[0]


def logits(q: Tensor, k: Tensor, size: int, world: World | None, score: Callable[..., Tensor]) -> Tensor:
    """The rows here of z (b, h, blocks, blocks), which ``score`` makes of the means of all blocks of q and k.

    Every rank scores all rows and takes its own: a product of fewer rows may round otherwise, and choose otherwise.
    """
    if world is None:
        return score(*(block_means(t, size) for t in (q, k)))
    means = [torch.cat([block_means(part, size) for part in world.shards(t)], 2) for t in (q, k)]
    each = zip(world.here, content.gather(world, *means, size))
    return torch.cat([score(*whole).chunk(world.ranks, 2)[rank] for rank, whole in each], 2)


def choose(z: Tensor, top_k: int, causal: bool, first: int = 0) -> Tensor:
    """S as indices (b, h, rows, top_k) for rows ``first``, ... of z (b, h, rows, blocks).

    Causal: the block itself, then the best before it, i of them in row i.
    """
    if not causal:
        return z.topk(top_k, -1).indices.sort(-1).values  # in order: a short last block comes last
    rows, count = z.shape[2:]
    itself = torch.arange(first, first + rows, device=z.device).expand(z.shape[:3]).unsqueeze(-1)
    hidden = torch.ones(rows, count, dtype=torch.bool, device=z.device).triu(first)
    before = z.clamp(min=torch.finfo(z.dtype).min).masked_fill(hidden, -torch.inf)  # the hidden come after all others
    return torch.cat([itself, before.topk(top_k - 1, -1).indices], -1)


def log_multiplicity(z: Tensor, picks: Tensor, causal: bool, first: int) -> Tensor:
    """log M (b, h, rows, top_k) on S; -inf where a causal row has fewer blocks."""
    logits, (rows, top_k) = z.gather(-1, picks), picks.shape[2:]
    number = torch.full((rows, 1), top_k, device=z.device)
    if causal:
        number = torch.arange(first + 1, first + rows + 1, device=z.device)[:, None].clamp(max=top_k)  # (rows, 1)
        logits = logits.masked_fill(torch.arange(top_k, device=z.device) >= number, -torch.inf)
    return logits.log_softmax(-1) + number.to(z.dtype).log()
