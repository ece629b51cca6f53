"""A small causal language model, and the attention patterns that it learns with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ringlab import Adaptive, Dense, Dilated, KVCache, blocks
from ringlab.block_patterns import block_count, hierarchical
from ringlab.nn import DecoderBlock
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
            DecoderBlock(embed_dim, num_heads, pattern, **options)
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


def patterns(block: int, n: int, layers: int = 4) -> dict[str, list]:
    """The pattern of each layer, by the name that readers see, for blocks of ``block``
    positions and sequences of ``n`` tokens.

    Every sparse pattern shows a query about 2.5 blocks of keys. All see all of a
    sequence of two blocks.

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
