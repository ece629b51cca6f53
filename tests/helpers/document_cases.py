"""Packed sequences and padded batches as cases: each document by the float64 reference,
alone.
"""

import random
from dataclasses import replace

import torch
from matrix import BLOCK_SPARSE, DILATED, F32, F64, Case, differentiated, drawn, errors
from ringlab import Dense, reference

MASKS = [p for p in BLOCK_SPARSE if "given" in str(p)]  # of one length
PATTERNS = [Dense(), *DILATED, *(p for p in BLOCK_SPARSE if p not in MASKS)]
EXACT = reference.EXACT


def spans_of(how: dict) -> list[tuple[int, int, int]]:
    """(batch entry, first row, end) of each document."""
    if "cu_seqlens" not in how:
        return [(i, 0, int(length)) for i, length in enumerate(how["lengths"])]
    borders = [int(x) for x in how["cu_seqlens"]]
    return [(0, a, b) for a, b in zip(borders, borders[1:])]


def wanted(case: Case, inputs, dout, dlse) -> dict[str, torch.Tensor]:
    """Each document by the float64 reference; out 0, lse -inf and no gradient
    elsewhere.
    """
    leaves = [t.double().requires_grad_() for t in inputs]
    out = torch.zeros_like(leaves[0])
    lse = torch.full(dlse.shape, -torch.inf, dtype=F64)
    for i, a, b in spans_of(case.documents):
        if a < b:
            some = (t[i : i + 1, a:b] for t in leaves[:3])
            out[i : i + 1, a:b], lse[i : i + 1, :, a:b] = reference.attention(
                *some,
                case.pattern,
                causal=case.causal,
                sinks=leaves[3] if case.sinks else None,
            )
    return differentiated(out, lse, leaves, dout, dlse if case.lse_cotangent else None)


def wrong(case: Case, device="cpu", **how) -> dict[str, tuple[float, float]]:
    """(error, bound) of each result that misses its bound; ``how`` it is bounded."""
    inputs, dout, dlse = drawn(case)
    want = wanted(case, inputs, dout, dlse)
    there = [t.to(device) for t in inputs]
    found = case.run(there, dout.to(device), dlse.to(device))
    found = {name: t.cpu() for name, t in found.items()}
    bounds = reference.tolerance(*inputs[:3], dout, causal=case.causal, **how)
    bounds["dz"] = bounds["dq"]
    apart = errors(found, want, *inputs[:2], dout)
    return {x: (e, bounds[x]) for x, e in apart.items() if not e <= bounds[x]}


def drawn_case(rng: random.Random) -> Case:
    n, packed = rng.randint(1, rng.choice([40, 120])), rng.random() < 0.7
    heads = rng.choice([(1, 1), (4, 2), (6, 1), (4, 4)])
    batch = 1 if packed else rng.randint(1, 4)
    case = Case(
        rng.choice(PATTERNS),
        n,
        rng.choice([F64, F32]),
        rng.random() < 0.5,
        batch,
        *heads,
        rng.choice([8, 16]),
        lse_cotangent=rng.random() < 0.5,
        memory=rng.choice(["contiguous", "heads first", "every other"]),
        seed=rng.randrange(1 << 30),
    )
    if not packed:
        return replace(
            case,
            documents={
                "lengths": torch.tensor(
                    [rng.randint(int(not i), n) for i in range(batch)]
                )
            },
        )
    if rng.random() < 0.3:  # documents of few lengths, as a trainer's
        size = rng.randint(1, n)
        borders = [*range(0, n, size), n]
    else:
        borders = sorted(rng.choices(range(n + 1), k=rng.randint(0, 9)))
        borders = [0, *borders, n]
        if n % 3 == 0 and borders[-2]:  # rows behind the last border are of no document
            borders.pop()
    borders = torch.tensor(borders, dtype=rng.choice([torch.int32, torch.int64]))
    return replace(case, documents={"cu_seqlens": borders})
