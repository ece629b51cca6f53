"""What is asked of an implementation: small problems of attention, each with a reason why
people need it, and their answers in float64 by ``ringlab.reference``.

A window counts the keys that a query sees before and after itself, both inclusive, as
``window_size`` of flash-attn does. Documents are lengths of a packed sequence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
        named = "documents", "lengths", "softcap", "sinks", "scale", "window"
        needed = {name: getattr(self, name) for name in named}
        needed |= {self.pattern: self.pattern, self.how: self.how}
        needed |= {"causal": self.causal, "full": not self.causal}
        needed["two-sided window"] = self.window and self.window[1]
        needed["GQA"] = self.kv_heads < self.heads
        needed["wide keys"] = self.value_width != self.width
        return [*self.extra, *sorted(name for name in needed if needed[name])]

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


def read(path: Path) -> dict[str, Statement]:
    """The statements of a file, by name; lists of TOML become tuples."""
    found = {}
    for name, facts in tomllib.loads(path.read_text(encoding="utf-8")).items():
        facts = {k: tuple(x) if isinstance(x, list) else x for k, x in facts.items()}
        found[name] = Statement(name, **facts)
    return found


STATEMENTS = read(Path(__file__).with_name("statements.toml"))
