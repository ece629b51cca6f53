"""The systems under measurement, each with its own inputs, its own correctness check and its own cost.

A builder takes (point, device) and returns a System. An entry ``"module:function"`` names a builder of the user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import Execution, attention, cost, kernels, patterns, reference
from ..cost import Cost
from .baselines import copying_attention
from .points import Point

GRADIENT_KV_HEADS = 2
_TOLERANCES: dict[tuple, dict[str, float]] = {}
SAMPLED = 32  # rows and columns per head that are compared with the float64 oracle


@dataclass
class Output:
    """What one call gave; ``grads`` = (dq, dk, dv) for "fwd+bwd"."""

    out: Tensor
    lse: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

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
        names = ("batch", "seq_len", "heads", "kv_heads", "head_dim", "causal", "passes")
        self.cost: Cost = cost.estimate(self.pattern, dtype=self.dtype, **{k: getattr(point, k) for k in names})

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

    def check(self, inputs: list[Tensor], output: Output) -> tuple[dict[str, float], dict[str, float]]:
        """(errors, tolerance) of this output against the float64 oracle at full size; inf: wrong shape or dtype."""
        q, k, v, *rest = (self.as_bnhd(t.detach()) for t in inputs)
        found = {n: t if n == "lse" else self.as_bnhd(t) for n, t in output.named().items()}
        dout, causal = (rest[0] if rest else None), self.point.causal
        key = (q.dtype, q.shape, k.shape, causal, q.device, dout is None)
        if key not in _TOLERANCES:  # all inputs are drawn alike, so points of one shape share it
            _TOLERANCES[key] = reference.tolerance(q, k, v, dout, causal=causal)
        tolerance = _TOLERANCES[key]
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
            errors |= self._gradient_errors(q, k, v, dout, found, seed)
        return errors, {name: tolerance[name] for name in errors}


    def _gradient_errors(self, q, k, v, dout, found, seed: int) -> dict[str, float]:
        """dq, dk, dv of a few neighbouring heads: every query that sees a sampled key needs its exact softmax."""
        heads, kv_heads = self.point.heads, self.point.kv_heads
        group, few = heads // kv_heads, min(GRADIENT_KV_HEADS, kv_heads)
        first = seed % (kv_heads - few + 1)
        kv, own = slice(first, first + few), slice(first * group, (first + few) * group)
        errors = reference.sampled_errors(
            q[:, :, own], k[:, :, kv], v[:, :, kv], _HeadsFrom(self.pattern, own.start, heads, kv_heads),
            causal=self.point.causal, out=found["out"][:, :, own], lse=None, dout=dout[:, :, own],
            grads=(found["dq"][:, :, own], found["dk"][:, :, kv], found["dv"][:, :, kv]), samples=SAMPLED, seed=seed,
        )  # fmt: skip
        return {name: errors[name] for name in ("dq", "dk", "dv")}


class _HeadsFrom:
    """A pattern seen by some of its heads, ``first`` being number 0."""

    def __init__(self, pattern, first: int, heads: int, kv_heads: int):
        self.pattern, self.first, self.of = pattern, first, {"heads": heads, "kv_heads": kv_heads}

    def multiplicity(self, queries, keys, *, head: int, **_):
        return self.pattern.multiplicity(queries, keys, head=self.first + head, **self.of)

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        return self.pattern.reach(first, last, n)


def _only(point: Point, *allowed: str) -> dict:
    options = dict(point.options)
    unknown = options.keys() - set(allowed)
    if unknown:
        raise ValueError(f"{point.system} has no option {sorted(unknown)[0]!r}; known: {', '.join(allowed) or 'none'}")
    return options


def ringlab(point: Point, device) -> System:
    """This library; options backend, gather, cache, pool."""
    options = _only(point, "backend", "gather", "cache", "pool")
    backend = options.pop("backend", "auto")
    pattern, execution, causal = patterns.from_dict(point.pattern), Execution(**options), point.causal
    # Refused here, before any input is made.
    kernels.choose(device, getattr(torch, point.dtype), point.head_dim, causal=causal,
                   backward=point.passes == "fwd+bwd", backend=backend)  # fmt: skip

    def forward(q, k, v):
        return attention(q, k, v, pattern, causal=causal, backend=backend, execution=execution, return_lse=True)

    return System(point, device, forward)


def dense_sdpa(point: Point, device) -> System:
    """torch's scaled_dot_product_attention over the whole sequence, whichever kernel it picks."""
    _only(point)
    if point.pattern["kind"] != "dense":
        raise ValueError(f"dense_sdpa computes dense attention, not {patterns.from_dict(point.pattern)}")
    grouped = {"enable_gqa": True} if point.kv_heads != point.heads else {}

    def forward(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (b, h, n, d)
        return F.scaled_dot_product_attention(q, k, v, is_causal=point.causal, **grouped).transpose(1, 2), None

    return System(point, device, forward)


def copying(point: Point, device) -> System:
    """What others ship, on the same function: each branch made contiguous, the same kernel, scattered, then mixed."""
    _only(point)
    pattern = patterns.from_dict(point.pattern)
    dtype, backward = getattr(torch, point.dtype), point.passes == "fwd+bwd"
    kernel = kernels.choose(device, dtype, point.head_dim, causal=point.causal, backward=backward).kernel
    return System(point, device, lambda q, k, v: (copying_attention(q, k, v, pattern, point.causal, kernel), None))


class ContiguousSegments(System):
    """torch's own kernel on segments that lie ready, as long as the first branch's selected rows: a ceiling for it.

    Another function than the point's pattern: plain segments of m = w / r rows, checked as such. Raises ValueError if
    m does not divide the sequence length.
    """

    def __init__(self, point: Point, device):
        _only(point)
        pattern = patterns.from_dict(point.pattern)
        dilated = isinstance(pattern, patterns.Dilated)
        self.rows = pattern.segment_lengths[0] // pattern.dilation_rates[0] if dilated else point.seq_len
        if point.seq_len % self.rows or point.kv_heads != point.heads:
            given = f"{point.heads} / {point.kv_heads} heads, {point.seq_len} positions"
            raise ValueError(f"contiguous_segments needs equal heads and whole segments of {self.rows}, got {given}")
        super().__init__(point, device, self._sdpa, patterns.Dilated([self.rows], [1]))

    def shapes(self):
        p = self.point
        return [(p.batch * p.seq_len // self.rows, p.heads, self.rows, p.head_dim)] * 3  # (b * segments, h, m, d)

    def _sdpa(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.point.causal), None

    def as_bnhd(self, t):
        return t.transpose(1, 2).reshape(self.point.batch, self.point.seq_len, self.point.heads, self.point.head_dim)


class Sgemm(System):
    """(n, n) @ (n, n) in fp32: the matmul rate that this run reaches."""

    def __init__(self, point: Point, device):
        _only(point)
        self.point, self.device, self.dtype = point, torch.device(device), torch.float32
        n = point.seq_len
        self.cost = Cost(pairs=0, distinct_pairs=0, flops=2 * n**3, folded_flops=2 * n**3, floor_bytes=12 * n * n)

    def shapes(self):
        return [(self.point.seq_len, self.point.seq_len)] * 2

    def run(self, inputs):
        return Output(inputs[0] @ inputs[1])

    def check(self, inputs, output):
        a, b = inputs
        rows = torch.arange(0, len(a), max(1, len(a) // SAMPLED), device=a.device)
        error = reference.error(output.out[rows], a[rows].double() @ b.double(), 1.0)
        return {"out": error}, {"out": reference.EXACT[torch.float32]}


def _published(name: str) -> Callable[[Point, torch.device], System]:
    """A published module by its own constructor and forward; options go to the constructor."""

    def builder(point: Point, device) -> System:
        from .. import variants

        pattern = patterns.from_dict(point.pattern)
        if pattern != patterns.Dilated(pattern.segment_lengths, pattern.dilation_rates, "head_groups", "branch"):
            raise ValueError(f"{name} computes head groups with offsets by branch, not {pattern}")
        module = getattr(variants, name)(
            segment_lengths=list(pattern.segment_lengths), dilation_rates=list(pattern.dilation_rates),
            device=device, dtype=getattr(torch, point.dtype), **dict(point.options),
        )  # fmt: skip
        return System(point, device, lambda q, k, v: (module(q, k, v, is_causal=point.causal), None))

    return builder


PUBLISHED = (
    "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttentionV2Collective", "RingDilatedAttentionV2Flash",
)  # fmt: skip
SYSTEMS: dict[str, Callable[[Point, torch.device], System]] = {
    "ringlab": ringlab,
    "dense_sdpa": dense_sdpa,
    "copying": copying,
    "contiguous_segments": ContiguousSegments,
    "sgemm": Sgemm,
    **{name: _published(name) for name in PUBLISHED},
}


def build(point: Point, device) -> System:
    """The system of a point; raises ValueError for an unknown name, and what its builder raises to refuse the point.

    >>> build(Point("dense_sdpa", patterns.Dense(), seq_len=8), "cpu").cost.pairs
    512
    """
    if point.system in SYSTEMS:
        return SYSTEMS[point.system](point, device)
    module, found, name = point.system.partition(":")
    if not found:
        raise ValueError(f"unknown system {point.system!r}; known: {', '.join(SYSTEMS)}, or module:function")
    return getattr(importlib.import_module(module), name)(point, device)
