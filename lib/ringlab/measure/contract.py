"""What a system under measurement owes: its inputs, one call, a check of that call against an oracle, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import cost, patterns, reference
from ..cost import Cost
from .points import Point

GRADIENT_KV_HEADS = 2
SAMPLED = 32  # rows and columns per head that are compared with the float64 oracle


@dataclass
class Output:
    """What one call gave; ``grads`` = (dq, dk, dv) for "fwd+bwd"; ``counted``: what else it did, by name."""

    out: Tensor
    lse: Tensor | None = None
    grads: tuple[Tensor, ...] = ()
    counted: dict[str, int] = field(default_factory=dict)

    def named(self) -> dict[str, Tensor]:
        found = {"out": self.out} | ({} if self.lse is None else {"lse": self.lse})
        return found | dict(zip(("dq", "dk", "dv"), self.grads))


class System:
    """Attention by ``forward(q, k, v) -> (out, lse or None)`` on (b, n, h, d), judged against ``pattern``.

    What is no such function overrides ``inputs``, ``run`` and ``check``, and sets ``cost``.
    """

    def __init__(self, point: Point, device, forward: Callable, pattern=None):
        self.point, self.device, self.forward = point, torch.device(device), forward
        self.dtype = getattr(torch, point.dtype)
        self.pattern = patterns.from_dict(point.pattern) if pattern is None else pattern
        self.scheme: str | None = None  # across ranks: by which its bytes are predicted, None where nothing is
        self.tolerance: dict[str, float] = {}  # where it is known already: inputs of one shape are drawn alike
        names = ("batch", "seq_len", "heads", "kv_heads", "head_dim", "causal", "passes")
        self.cost: Cost = cost.count(self.pattern, dtype=self.dtype, **{k: getattr(point, k) for k in names})

    @property
    def backward(self) -> bool:
        return self.point.passes == "fwd+bwd"

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of q, k, v."""
        p = self.point
        return [(p.batch, p.seq_len, h, p.head_dim) for h in (p.heads, p.kv_heads, p.kv_heads)]

    def inputs(self) -> list[Tensor]:
        """q, k, v, and for a backward dout; normal, from a generator seeded by the point's id, made in place."""
        generator = torch.Generator(self.device).manual_seed(int(self.point.id, 16) >> 1)
        shapes = self.shapes()
        shapes += shapes[:1] if self.backward else []
        made = [torch.empty(s, dtype=self.dtype, device=self.device).normal_(generator=generator) for s in shapes]
        return [t.requires_grad_(self.backward) for t in made[:3]] + made[3:]

    def run(self, inputs: list[Tensor]) -> Output:
        q, k, v, *rest = inputs
        out, lse = self.forward(q, k, v)  # (b, n, h, d), (b, h, n)
        if not self.backward:
            return Output(out, lse)
        grads = torch.autograd.grad(out, (q, k, v), rest[0])
        return Output(out.detach(), None if lse is None else lse.detach(), grads)

    def as_bnhd(self, t: Tensor) -> Tensor:
        """A tensor of the system's own layout as (b, n, h, d)."""
        return t

    def check(self, inputs: list[Tensor], output: Output, starts=(None,)) -> tuple[dict[str, float], dict[str, float]]:
        """(errors, tolerance) of this output against the float64 oracle at full size; inf: wrong shape or dtype.

        ``starts``: where the stretches of keys begin whose gradients are compared, None: one anywhere.
        """
        q, k, v, *rest = (self.as_bnhd(t.detach()) for t in inputs)
        found = {n: t if n == "lse" else self.as_bnhd(t) for n, t in output.named().items()}
        dout, causal = (rest[0] if rest else None), self.point.causal
        if found.keys() - self.tolerance.keys():
            self.tolerance = reference.tolerance(q, k, v, dout, causal=causal)
        tolerance = self.tolerance
        b, n, h, _ = q.shape
        want = {"out": q.shape, "lse": (b, h, n), "dq": q.shape, "dk": k.shape, "dv": v.shape}
        dtypes = {name: q.dtype for name in want} | {"lse": found["lse"].dtype if "lse" in found else None}
        wrong = [x for x, t in found.items() if tuple(t.shape) != tuple(want[x]) or t.dtype != dtypes[x]]
        if wrong:
            return dict.fromkeys(wrong, float("inf")), {name: tolerance[name] for name in wrong}
        seed = int(self.point.id[:8], 16)
        errors = reference.sampled_errors(
            q, k, v, self.pattern, causal=causal, out=found["out"], lse=found.get("lse"), samples=SAMPLED, seed=seed
        )
        if rest:
            each = [self._gradient_errors(q, k, v, dout, found, seed, start) for start in starts]
            errors |= {name: max(e[name] for e in each) for name in each[0]}
        return errors, {name: tolerance[name] for name in errors}

    def _gradient_errors(self, q, k, v, dout, found, seed: int, start: int | None) -> dict[str, float]:
        """dq, dk, dv of a few neighbouring heads: every query that sees a sampled key needs its exact softmax."""
        heads, kv_heads = self.point.heads, self.point.kv_heads
        group, few = heads // kv_heads, min(GRADIENT_KV_HEADS, kv_heads)
        first = seed % (kv_heads - few + 1)
        kv, own = slice(first, first + few), slice(first * group, (first + few) * group)
        errors = reference.sampled_errors(
            q[:, :, own], k[:, :, kv], v[:, :, kv], _HeadsFrom(self.pattern, own.start, heads, kv_heads),
            causal=self.point.causal, out=found["out"][:, :, own], lse=None, dout=dout[:, :, own],
            grads=(found["dq"][:, :, own], found["dk"][:, :, kv], found["dv"][:, :, kv]),
            samples=SAMPLED, seed=seed, start=start,
        )  # fmt: skip
        return {name: errors[name] for name in ("dq", "dk", "dv")}


class _HeadsFrom:
    """A pattern seen by some of its heads, ``first`` being number 0."""

    def __init__(self, pattern, first: int, heads: int, kv_heads: int):
        self.pattern, self.first, self.of = pattern, first, {"heads": heads, "kv_heads": kv_heads}

    def multiplicity(self, queries, keys, *, n: int, head: int, **_):
        return self.pattern.multiplicity(queries, keys, n=n, head=self.first + head, **self.of)

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        return self.pattern.reach(first, last, n)


def only(point: Point, *allowed: str) -> dict:
    """The options of a point; raises ValueError for one that the system does not have."""
    options = dict(point.options)
    unknown = options.keys() - set(allowed)
    if unknown:
        raise ValueError(f"{point.system} has no option {sorted(unknown)[0]!r}; known: {', '.join(allowed) or 'none'}")
    return options
