"""A small causal language model, and the attention patterns that it learns with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ringlab import (
    Adaptive,
    Dense,
    Dilated,
    KVCache,
    Selected,
    attention,
    blocks,
    selection,
)
from ringlab.block_patterns import block_count, hierarchical
from ringlab.nn import DecoderBlock, positions, rotary
from torch import Tensor, nn
from torch.nn import functional as F


class LanguageModel(nn.Module):
    """Embedding, a ``DecoderBlock`` for each of the ``patterns``, RMSNorm, and the
    embedding again as output layer: tokens (b, n) to logits (b, n, vocabulary).

    ``options`` are those of ``DecoderBlock``. Called with tokens and, as a block is,
    ``cu_seqlens`` or ``lengths``; ``caches`` holds one cache for each layer.

    >>> model = LanguageModel(100, 64, 4, [Dilated([32, 64], [1, 2])] * 2)
    >>> model(torch.randint(100, (1, 50)), cu_seqlens=[0, 20, 50]).shape
    torch.Size([1, 50, 100])
    """

    def __init__(
        self, vocabulary: int, embed_dim: int, num_heads: int, patterns, **options
    ):
        super().__init__()
        made = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.embedding = nn.Embedding(vocabulary, embed_dim, **made)
        self.blocks = nn.ModuleList(
            BLOCKS.get(type(pattern), DecoderBlock)(
                embed_dim, num_heads, pattern, **options
            )
            for pattern in patterns
        )
        self.norm = nn.RMSNorm(embed_dim, eps=1e-5, **made)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self, tokens: Tensor, *, caches: Sequence[KVCache] | None = None, **documents
    ) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, cache=caches and caches[i], **documents)
        return F.linear(self.norm(x), self.embedding.weight)


class PairEmbedding(nn.Embedding):
    """The embedding of each token and, through a matrix, of the one before it: tokens
    (b, n) to (b, n, dim); the first follows token 0.

    Models of this size learn to recall in minutes instead of hours where a layer need
    not copy the token before.
    """

    def __init__(self, vocabulary: int, dim: int):
        super().__init__(vocabulary, dim)
        self.before = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        here = F.embedding(tokens, self.weight)
        before = F.embedding(F.pad(tokens, (1, 0))[:, :-1], self.weight)
        return here + self.before(before)


@dataclass(frozen=True)
class MoBA:
    """Each query and head sees its own block and the best of those before it."""

    block_size: int
    top_k: int

    def __call__(self, q: Tensor, k: Tensor) -> Selected:
        return selection.moba(q, k, block_size=self.block_size, top_k=self.top_k)

    def __str__(self) -> str:
        return f"the best {self.top_k} blocks of {self.block_size} for each query"


@dataclass(frozen=True)
class NSA:
    """Pooled blocks, ``top_k`` of them whole, and a window: see ``selection.nsa``."""

    block_size: int
    top_k: int
    window: int

    def __str__(self) -> str:
        blocks = f"the best {self.top_k} blocks of {self.block_size}"
        return f"{blocks}, means of all, a window of {self.window}"


@dataclass(frozen=True)
class DSA:
    """All heads see the ``top_k`` keys that an indexer scores highest."""

    top_k: int

    def __str__(self) -> str:
        return f"the best {self.top_k} keys for each query"


class ContentBlock(DecoderBlock):
    """A block whose ``attend(y, q, k, v)`` asks more of its normed input y than q, k and
    v. Its shared weights are those of a ``DecoderBlock`` of the same seed.
    """

    def __init__(self, embed_dim: int, num_heads: int, pattern, **options):
        super().__init__(embed_dim, num_heads, Dense(), **options)
        self.attention.pattern = pattern
        made = {"device": options.get("device"), "dtype": options.get("dtype")}
        with torch.random.fork_rng():  # the next block draws what it draws elsewhere
            self.add_weights(embed_dim, num_heads, made)

    def forward(self, x: Tensor, *, cache=None) -> Tensor:
        if cache is not None:
            raise NotImplementedError("NSA and DSA are trained here, without a cache")
        y, layer = self.attention_norm(x), self.attention
        projections = layer.q_proj, layer.k_proj, layer.v_proj
        q, k, v = (f(y).unflatten(2, (layer.num_heads, -1)) for f in projections)
        q, k = (rotary(t, positions(x), layer.rotary_base) for t in (q, k))
        x = x + layer.out_proj(self.attend(y, q, k, v).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class NSABlock(ContentBlock):
    """Three gates for each head, by a linear layer and a sigmoid; all are 0.5 at first."""

    def add_weights(self, embed_dim: int, num_heads: int, made: dict) -> None:
        self.gates = nn.Parameter(torch.zeros(3 * num_heads, embed_dim, **made))

    def attend(self, y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gates = F.linear(y, self.gates).sigmoid().unflatten(2, (-1, 3))
        return selection.nsa(q, k, v, gates, **vars(self.attention.pattern))


class DSABlock(ContentBlock):
    """An indexer of as many small heads as the attention has. It learns by
    ``index_loss`` of the last forward alone: nothing else depends on its weights.
    """

    def add_weights(self, embed_dim: int, num_heads: int, made: dict) -> None:
        dim = embed_dim // num_heads
        self.index_q, self.index_k, self.index_weights = (
            nn.Linear(embed_dim, out, bias=False, **made)
            for out in (embed_dim, dim, num_heads)
        )

    def attend(self, y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, base = y.detach(), self.attention.rotary_base
        index_q, index_k = (
            rotary(f(y).unflatten(2, (-1, q.shape[3])), positions(y), base)
            for f in (self.index_q, self.index_k)
        )
        weights = self.index_weights(y) * q.shape[3] ** -0.5  # (b, n, index heads)
        top_k = self.attention.pattern.top_k
        choice = selection.dsa(index_q, index_k, weights, top_k=top_k)
        if torch.is_grad_enabled():
            index = index_q, index_k.squeeze(2), weights
            self.index_loss = index_loss(choice.indices.squeeze(1), *index, q, k)
        return attention(q, k, v, choice, causal=True)


def index_loss(
    chosen: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """The mean divergence of an indexer's shares from attention's, both over the
    ``chosen`` keys (b, n, slots), as in DSA's sparse stage of training.

    The target is the mean over heads of attention, without a gradient. q and k are (b,
    n, h, d), index_q (b, n, j, d), index_k (b, n, d), weights (b, n, j).
    """
    hidden, entry = chosen < 0, torch.arange(len(q), device=q.device)[:, None, None]
    keys = k.detach()[entry, chosen]  # (b, n, slots, h, d); hidden slots take any
    scores = q.shape[3] ** -0.5 * torch.einsum("bnhd,bnshd->bnhs", q.detach(), keys)
    target = scores.masked_fill(hidden.unsqueeze(2), -torch.inf).softmax(3).mean(2)
    products = torch.einsum("bnjd,bnsd->bnjs", index_q, index_k[entry, chosen]).relu()
    shares = torch.einsum("bnjs,bnj->bns", products, weights)
    shares = shares.masked_fill(hidden, -torch.inf).log_softmax(2)
    apart = F.kl_div(shares.masked_fill(hidden, 0), target, reduction="sum")
    return apart / hidden[..., 0].numel()


BLOCKS = {NSA: NSABlock, DSA: DSABlock}


def patterns(block: int, n: int, layers: int = 4) -> dict[str, list]:
    """The pattern of each layer, by the name that readers see, for blocks of ``block``
    positions and sequences of ``n`` tokens.

    Every sparse pattern shows a query about 2.5 blocks of keys; NSA shows it the means
    of all blocks, too. All see all of a sequence of two blocks.

    >>> print(patterns(16, 512)["LongNet"][0])
    dilated [64, 256, 1024] / [1, 4, 16]
    """
    # The last segment holds the whole sequence.
    rates = [4**i for i in range(12) if i == 0 or block * 4**i < n]
    window = blocks.sliding_window(2, block_size=block)
    ladder = Dilated([4 * block * rate for rate in rates], rates)
    alike = {
        "Dense": Dense(),
        "Window": window,
        "LongNet": ladder,
        "Local and global": blocks.local_global(1, 1, block_size=block),
        "BigBird": blocks.bigbird(1, 1, 1, block_size=block),
        "Hierarchical": hierarchical([(1, 1), (8, 16)], block_size=block),
        "Adaptive": Adaptive(block, min(3, block_count(n, block))),
        "MoBA": MoBA(block, 3),
        # 3 of the 8 blocks are always seen; the window has 10 keys more, of 16.
        "NSA": NSA(block // 4, 8, block),
        "DSA": DSA(block * 5 // 2),
    }
    mixed = {
        "Window, first layer dense": [Dense(), window, window, window],
        "Window, last layer dense": [window, window, window, Dense()],
        "LongNet and window": [ladder, window, ladder, window],
    }
    each = {name: [pattern] * 4 for name, pattern in alike.items()} | mixed
    return {name: [found[i % 4] for i in range(layers)] for name, found in each.items()}


@torch.no_grad()
def generate(
    model: LanguageModel, tokens: Tensor, count: int, *, lengths=None, piece: int = 8192
) -> Tensor:
    """``tokens`` (b, n) and ``count`` more, each the most likely one after those before
    it: (b, n + count).

    ``lengths`` (b,): how many tokens of each prompt are no padding; new ones follow
    these, then zeros. Prompts are computed ``piece`` tokens at a time. Over a group
    every rank takes all tokens and keeps its part of the caches.
    """
    (b, n), device = tokens.shape, tokens.device
    at = torch.tensor([n] * b if lengths is None else lengths, device=device)  # (b,)
    most = int(at.max()) + count
    caches = [block.attention.make_cache(b, most) for block in model.blocks]
    kept = torch.arange(n + count, device=device) < at[:, None]
    out = F.pad(tokens, (0, count)) * kept
    new = tokens[:, -1:].clone()
    for start in range(0, n, piece):
        some = tokens[:, start : start + piece]
        here = (at - start).clamp(0, some.shape[1])  # (b,)
        logits = model(some, caches=caches, lengths=here)
        ends = (here > 0) & (at <= start + piece)
        new[ends, 0] = logits[ends, here[ends] - 1].argmax(-1)
    for i in range(count):
        out.scatter_(1, (at + i)[:, None], new)
        if i + 1 < count:
            new = model(new, caches=caches)[:, -1:].argmax(-1)
    return out
