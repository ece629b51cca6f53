"""Shared by the tests: random attention cases, and results with gradients to compare."""

import random
from dataclasses import dataclass

import torch
from ringlab import Dense, Dilated, Execution, attention, reference
from ringlab.memory import MemoryPool
from ringlab.patterns import MIXINGS, OFFSETS

NAMES = ("out", "lse", "dq", "dk", "dv")


class Stained(MemoryPool):
    """Results of any size in memory that holds NaN, as memory that was used before may."""

    def __init__(self):
        super().__init__(threshold_bytes=0)

    def lend(self, *args, **kwargs):
        return super().lend(*args, **kwargs).fill_(torch.nan)


STAINED = Stained()


@dataclass
class Case:
    pattern: object
    batch: int
    n: int
    heads: int
    kv_heads: int
    d: int
    causal: bool
    dtype: torch.dtype
    scale: float | None
    execution: Execution
    backend: str
    lse_cotangent: bool
    transposed: bool

    def tensors(self):
        """q, k, v that require gradients, a cotangent for out and one for lse, random from the torch seed."""

        def draw(heads):
            if self.transposed:  # (b, h, n, d) memory
                return torch.randn(self.batch, heads, self.n, self.d).to(self.dtype).transpose(1, 2)
            return torch.randn(self.batch, self.n, heads, self.d).to(self.dtype)

        q, k, v = (draw(h).requires_grad_() for h in (self.heads, self.kv_heads, self.kv_heads))
        return q, k, v, draw(self.heads), torch.randn(self.batch, self.heads, self.n, dtype=torch.float64)


DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)


def random_case(rng: random.Random):
    kv_heads = rng.randint(1, 4)
    n = rng.choice([rng.randint(1, 80), rng.randint(100, 400), rng.choice([97, 131, 257])])
    lengths = [rng.choice([rng.randint(1, 90), rng.randint(90, 500)]) for _ in range(rng.randint(1, 3))]
    rates = [min(w, rng.choice([1, 1, 2, 3, 4, rng.randint(1, w)])) for w in lengths]
    dilated = Dilated(lengths, rates, rng.choice(MIXINGS), rng.choice(OFFSETS))
    return Case(
        pattern=dilated if rng.random() < 0.93 else Dense(),
        batch=rng.choice([1, 1, 2, 3]),
        n=n,
        heads=kv_heads * rng.choice([1, 1, 2, 3]),
        kv_heads=kv_heads,
        d=rng.choice([8, 16, 32]),
        causal=rng.random() < 0.5,
        dtype=rng.choice(DTYPES),
        scale=rng.choice([None] * 6 + [0.3] * 4 + [-0.2] * 4 + [0.0]),
        execution=Execution(
            gather=rng.random() < 0.3,
            cache=rng.random() < 0.5,
            pool=rng.random() < 0.5,
            results=rng.choice([True, STAINED]),
        ),
        backend=rng.choice(["auto", "eager"]),
        lse_cotangent=rng.random() < 0.5,
        transposed=rng.random() < 0.2,
    )


def results(out, lse, q, k, v, dout, dlse=None):
    """out, lse, dq, dk, dv by name; a cotangent on lse counts only where some key is seen."""
    loss = (out.double() * dout.double()).sum()
    if dlse is not None:
        seen = lse != -torch.inf
        loss = loss + (lse.double()[seen] * dlse[seen]).sum()
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(loss, (q, k, v)))))


def engine_results(case: Case, q, k, v, dout, dlse):
    out, lse = attention(
        q, k, v, case.pattern, causal=case.causal, scale=case.scale, backend=case.backend, execution=case.execution,
        return_lse=True,
    )  # fmt: skip
    return results(out, lse, q, k, v, dout, dlse if case.lse_cotangent else None)


def oracle_results(case: Case, q, k, v, dout, dlse):
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = reference.attention(*exact, case.pattern, causal=case.causal, scale=case.scale)
    return results(out, lse, *exact, dout, dlse if case.lse_cotangent else None)


def errors(got: dict, want: dict, q, k, dout, scale=None) -> dict[str, float]:
    floor = reference.gradient_floor(q, k, dout, scale)
    return {n: reference.error(got[n], want[n], 1.0 if n in ("out", "lse") else floor) for n in NAMES}
