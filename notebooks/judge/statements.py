"""What is asked of an implementation: small problems of attention, each with a reason why
people need it, and their answers in float64 by ``ringlab.reference``.

A window counts the keys that a query sees before and after itself, both inclusive, as
``window_size`` of flash-attn does. Documents are lengths of a packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from ringlab import BlockSparse, Dense, Dilated, Selected, reference
from ringlab.blocks import Global, Window, from_mask
from ringlab.patterns import AnyPattern
from torch import Tensor

# How far a result may be off: as many times the tolerance of ``ringlab.reference``, which
# is 5e-6 in fp32 and twice the error of a dense call in bf16. A ring adds roundings that
# one call has not, and a wrong mask is off by far more. The statement of rounding has 1.
SLACK = 4


@dataclass(frozen=True)
class Statement:
    """One problem."""

    name: str
    why: str
    n: int = 64
    heads: int = 4
    kv_heads: int = 4
    width: int = 16
    value_width: int = 16
    batch: int = 1
    causal: bool = True
    window: tuple[int, int] | None = None
    documents: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()  # of padded entries
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    size: float = 1.0  # of the entries of q
    pattern: str = ""
    how: str = ""  # strided, expanded, two calls, checkpoint, chunks or lse gradient
    ranks: tuple[int, ...] = (2, 4)
    slack: int = SLACK
    extra: tuple[str, ...] = ()  # needs that its sizes do not show

    @property
    def either(self) -> bool:
        """Whether it may be asked without a causal mask too."""
        shown = self.window or self.documents or self.pattern or self.how == "chunks"
        return not (shown or self.name == "causal" or "uneven length" in self.extra)

    @property
    def needs(self) -> list[str]:
        """What an implementation must offer."""
        named = {"documents", "lengths", "softcap", "sinks", "scale", "window"}
        found = {
            f.name for f in fields(self) if f.name in named and getattr(self, f.name)
        }
        found |= {"causal" if self.causal else "full", self.pattern, self.how}
        found |= {"two-sided window"} if self.window and self.window[1] else set()
        found |= {"GQA"} if self.kv_heads < self.heads else set()
        found |= {"wide keys"} if self.value_width != self.width else set()
        return [*self.extra, *sorted(found - {""})]

    def inputs(self, dtype: torch.dtype, call: int = 0) -> dict[str, Tensor]:
        """q, k, v, sinks and the gradients of out and lse that come in, the same on all
        ranks and machines; k and v are (batch, n, kv_heads, width).
        """
        random = torch.Generator().manual_seed(call)

        def drawn(*shape: int, size: float = 1.0) -> Tensor:
            values = torch.randn(shape, generator=random, dtype=torch.float64)
            return (size * values).to(dtype)

        rows, wide = (self.batch, self.n), self.value_width
        made = {
            "q": drawn(*rows, self.heads, self.width, size=self.size),
            "k": drawn(*rows, self.kv_heads, self.width),
            "v": drawn(*rows, self.kv_heads, wide),
            "sinks": drawn(self.heads),
            "dout": drawn(*rows, self.heads, wide),
            "dlse": drawn(self.batch, self.heads, self.n),
        }
        if self.how == "expanded":
            made["dout"] = torch.ones((), dtype=dtype).expand_as(made["dout"])
        for entry, length in enumerate(self.lengths):
            made["dout"][entry, length:] = 0
        return made

    def pattern_of(self, n: int) -> AnyPattern:
        """The pattern of a document of n tokens."""
        if not self.window:
            return PATTERNS[self.pattern]() if self.pattern else Dense()
        before, after = self.window
        distance = torch.arange(n)[None] - torch.arange(n)[:, None]  # (n, n)
        return from_mask((-before <= distance) & (distance <= after), block_size=1)

    def answer(
        self,
        inputs: dict[str, Tensor],
        translate: Callable[[Statement, Tensor], Tensor] = lambda statement, out: out,
    ) -> dict[str, Tensor]:
        """out, lse, dq, dk, dv and, of sinks, dsinks in float64; of ``translate``, a
        function of the statement and out, in place of out.
        """
        names = ("q", "k", "v", "sinks")
        leaves = {name: inputs[name].double().requires_grad_() for name in names}
        sinks = leaves["sinks"] if self.sinks else None
        out = torch.zeros(inputs["dout"].shape, dtype=torch.float64)
        lse = torch.full(inputs["dlse"].shape, -torch.inf, dtype=torch.float64)
        for entry in range(self.batch):
            start = 0
            for length in self.documents or (*self.lengths[entry:], self.n)[:1]:
                rows = slice(start, start + length)
                start += length
                if length:
                    found = reference.attention(
                        *(leaves[x][entry : entry + 1, rows] for x in names[:3]),
                        self.pattern_of(length),
                        causal=self.causal,
                        scale=self.scale,
                        sinks=sinks,
                        softcap=self.softcap,
                    )
                    out[entry, rows], lse[entry, :, rows] = found[0][0], found[1][0]
        out = translate(self, out)
        loss = (out * inputs["dout"].double()).sum()
        if self.how == "lse gradient":
            loss = loss + (lse * inputs["dlse"].double()).sum()
        loss.backward()
        grads = {f"d{n}": t.grad for n, t in leaves.items() if t.grad is not None}
        return {"out": out.detach(), "lse": lse.detach(), **grads}

    def allowed(self, inputs: dict[str, Tensor]) -> dict[str, float]:
        """The largest error of each result."""
        q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
        if v.shape[-1] != q.shape[-1]:  # the tolerance is of dense calls
            v, dout = k, q
        found = reference.tolerance(q, k, v, dout, causal=self.causal, scale=self.scale)
        found["dsinks"] = found["out"]
        return {name: self.slack * error for name, error in found.items()}


def selected() -> Selected:
    """Keys that differ from query to query, as an indexer picks them (DSA)."""
    random = torch.Generator().manual_seed(1)
    picked = torch.rand(1, 1, 64, 64, generator=random).tril().topk(8, -1).indices
    own = torch.arange(64)[None, None, :, None]
    return Selected(torch.cat([own, torch.where(picked <= own, picked, own)], -1))


def chosen_blocks() -> Selected:
    """Blocks of 8 keys for each query, its own among them (MoBA, NSA)."""
    random = torch.Generator().manual_seed(2)
    own = torch.arange(64)[None, None, :, None] // 8
    picked = torch.randint(8, (1, 4, 64, 2), generator=random).minimum(own)
    return Selected(torch.cat([own.expand(1, 4, 64, 1), picked], -1), granularity=8)


PATTERNS = {
    "dilated": lambda: Dilated([16, 64], [1, 4]),
    "dilated groups": lambda: Dilated([16, 64], [1, 2], "head_groups", "branch"),
    "blocks": lambda: BlockSparse([Window(1), Global(1)], 8),
    "local and global": lambda: BlockSparse([Window(8), Global(2)], 1),
    "selected": selected,
    "chosen blocks": chosen_blocks,
}
full = {"causal": False}
STATEMENTS = {
    s.name: s
    for s in (
        Statement("dense", "encoders, images and video see all", **full),
        Statement("causal", "every language model"),
        Statement(
            "GQA",
            "Llama 3, Qwen, Mistral: 2 query heads share a K/V head",
            heads=8,
        ),
        Statement(
            "one K/V head",
            "multi-query attention: Falcon, PaLM",
            kv_heads=1,
        ),
        Statement(
            "fewer K/V heads than ranks",
            "8 K/V heads on 16 GPUs are the usual case",
            kv_heads=2,
            ranks=(4,),
        ),
        Statement(
            "uneven heads",
            "6 heads on 4 ranks: 12, 20 or 28 heads on 8 GPUs",
            heads=6,
            kv_heads=6,
            ranks=(4,),
            extra=("uneven heads",),
        ),
        Statement(
            "uneven length",
            "61 tokens: a batch is as long as its text",
            n=61,
            extra=("uneven length",),
        ),
        Statement(
            "uneven length, full",
            "61 patches of an image",
            n=61,
            extra=("uneven length",),
            **full,
        ),
        Statement("window", "Mistral, Gemma, gpt-oss: 20 keys before", window=(20, 0)),
        Statement(
            "window of a few tokens", "the far shards are seen by nobody", window=(3, 0)
        ),
        Statement(
            "two-sided window",
            "Longformer, ModernBERT, genomes",
            window=(16, 16),
            **full,
        ),
        Statement(
            "documents in shards",
            "packing, each document in one shard of 4",
            documents=(16, 16, 16, 16),
        ),
        Statement(
            "documents across shards", "packing as it comes", documents=(24, 8, 32)
        ),
        Statement(
            "documents, full",
            "packed encoders, images of a batch",
            documents=(24, 8, 32),
            **full,
        ),
        Statement(
            "odd documents",
            "lengths that nothing divides",
            documents=(13, 30, 21),
            extra=("odd documents",),
        ),
        Statement(
            "documents of one and no token",
            "empty texts and single tokens are in every data set",
            documents=(1, 0, 31, 0, 32),
            extra=("odd documents",),
        ),
        Statement(
            "documents and window",
            "packing of Mistral and Gemma",
            window=(10, 0),
            documents=(24, 8, 32),
        ),
        Statement(
            "padding", "a batch of 40 and 64 tokens", batch=2, lengths=(40, 64), **full
        ),
        Statement("scale", "muP, Gemma, Granite set their own", scale=0.6),
        Statement("soft cap", "Gemma 2, Grok", softcap=1.5),
        Statement(
            "sinks",
            "gpt-oss: a logit per head without a value",
            sinks=True,
        ),
        Statement(
            "large scores",
            "scores of ±150: merges that take exp of an lse overflow",
            size=40.0,
        ),
        Statement(
            "values narrower than keys",
            "multi-head latent attention: DeepSeek",
            value_width=8,
        ),
        Statement(
            "strided inputs",
            "q, k and v are views of one projection",
            how="strided",
        ),
        Statement(
            "expanded gradient",
            "the gradient of a sum or mean",
            how="expanded",
        ),
        Statement(
            "gradient of lse",
            "losses and merges that use lse",
            how="lse gradient",
        ),
        Statement(
            "two calls before a backward",
            "two layers: state that a call leaves behind",
            how="two calls",
        ),
        Statement(
            "checkpointing",
            "recomputation runs a forward twice",
            how="checkpoint",
        ),
        Statement(
            "bf16 over 4 ranks",
            "rounding must not grow with ranks: at most twice the error of one dense call",
            n=256,
            ranks=(4,),
            slack=1,
            extra=("bf16",),
        ),
        Statement(
            "cache in chunks", "prefill in chunks of 24, 1 and 39 tokens", how="chunks"
        ),
        Statement(
            "dilated",
            "LongNet, branches mixed by lse, head h from offset h",
            pattern="dilated",
            **full,
        ),
        Statement(
            "dilated, groups of heads",
            "LongNet as ported to PyTorch: groups of heads run one branch each",
            pattern="dilated groups",
            **full,
        ),
        Statement(
            "blocks",
            "BigBird and block-sparse masks: blocks of 8",
            pattern="blocks",
            **full,
        ),
        Statement(
            "local and global",
            "Longformer: a window and 2 global tokens",
            pattern="local and global",
            **full,
        ),
        Statement(
            "selected keys",
            "DSA: 8 keys for each query, by content",
            pattern="selected",
        ),
        Statement(
            "chosen blocks",
            "MoBA and NSA: blocks of 8 keys for each query and head",
            pattern="chosen blocks",
        ),
    )
}
