"""Systems of what models do beside training on one sequence: steps of generation, and
packed documents.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from .. import KVCache, attention, cache_bytes, cost, reference
from ..cost import Cost
from ..patterns import Pattern
from .points import Point
from .systems import Output, Refused, System, only

STEPS = 16  # of a call: so many that taking them back does not count
SHORTEST, LONGEST = 64, 4096  # tokens of a document


def visible(pattern: Pattern, n: int, heads: int, kv_heads: int) -> list[Tensor]:
    """M of the positions n .. n + STEPS - 1 over all up to themselves, (STEPS, n +
    STEPS) for each query head.
    """
    queries = torch.arange(n, n + STEPS)
    keys = torch.arange(n + STEPS)
    about = {"n": n + STEPS, "heads": heads, "kv_heads": kv_heads}
    before = keys <= queries[:, None]
    return [
        pattern.multiplicity(queries, keys, head=h, **about) * before
        for h in range(heads)
    ]


def generation(point: Point, device) -> System:
    """``STEPS`` new positions, one by one, after ``seq_len`` positions whose live rows
    a ``KVCache`` keeps.

    The roofline reads the rows that each step sees once. The check: each step is that
    row of the float64 reference.
    """
    only(point)
    if not point.causal or point.passes != "fwd":
        raise Refused("generation is causal and has no backward")
    system = System(point, device, None)
    n = point.seq_len
    group = point.heads // point.kv_heads
    tensors = system.inputs
    pattern = system.pattern
    sizes = {
        "batch": point.batch,
        "heads": point.heads,
        "kv_heads": point.kv_heads,
        "head_dim": point.head_dim,
    }
    sizes |= {"max_seq_len": n + STEPS, "dtype": system.dtype}
    seen = visible(pattern, n, point.heads, point.kv_heads)
    pairs, distinct = (
        point.batch * sum(int(m.sum()) for m in each)
        for each in (seen, [m > 0 for m in seen])
    )
    rows = sum(
        int(torch.stack(seen[h : h + group]).any(0).sum())
        for h in range(0, point.heads, group)
    )
    read = 2 * point.batch * rows * point.head_dim * system.dtype.itemsize
    counted = {
        "cache_bytes": cache_bytes(pattern, device=system.device, **sizes),
        "floor_bytes": read // STEPS,
    }  # read again by each step
    flops = [4 * point.head_dim * count for count in (pairs, distinct)]
    system.cost = Cost(pairs, distinct, *flops, floor_bytes=read)
    system.shapes = lambda: [
        (point.batch, STEPS if i == 0 else n + STEPS, heads, point.head_dim)
        for i, heads in enumerate((point.heads, point.kv_heads, point.kv_heads))
    ]
    cache = KVCache(pattern, device=device, max_crop=STEPS, **sizes)

    def inputs() -> list[Tensor]:
        q, k, v = tensors()
        cache.reset()
        cache.append(k[:, :n], v[:, :n])
        return [q, k, v]

    def run(given: list[Tensor]) -> Output:
        q = given[0]
        k = given[1][:, n:]
        v = given[2][:, n:]
        with torch.no_grad():
            steps = zip(*(t.split(1, 1) for t in (q, k, v)))
            out = torch.cat(
                [attention(*step, pattern, causal=True, cache=cache) for step in steps],
                1,
            )
        cache.crop(n)
        return Output(out, counted=counted)

    def check(
        given: list[Tensor], output: Output
    ) -> tuple[dict[str, float], dict[str, float]]:
        q, k, v = given
        wanted = []
        for h, m in enumerate(seen):
            keys, values = (
                t[:, :, h // group].double() for t in (k, v)
            )  # (b, n + STEPS, d)
            scores = (
                point.head_dim**-0.5 * q[:, :, h].double() @ keys.mT
                + m.to(q.device).double().log()
            )
            wanted.append(scores.softmax(-1) @ values)
        if "out" not in system.tolerance:
            system.tolerance = {
                "out": reference.tolerance(q, k[:, n:], v[:, n:], causal=True)["out"]
            }
        return {"out": reference.error(output.out, torch.stack(wanted, 2), 1.0)}, dict(
            system.tolerance
        )

    system.inputs = inputs
    system.run = run
    system.check = check
    return system


def document_lengths(count: int, equal: bool = False) -> list[int]:
    """Lengths of ``count`` documents, drawn once for all; ``equal``: as many tokens and
    pairs in equal documents.

    >>> lengths = document_lengths(100)
    >>> sum(lengths), sum(document_lengths(100, equal=True)), len(document_lengths(100, equal=True))
    (231236, 231236, 80)
    """
    rng = random.Random(0)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(count)]
    if not equal:
        return lengths
    total = sum(lengths)
    each = round(sum(x * x for x in lengths) / sum(lengths))
    return [each] * (total // each) + [total % each] * (total % each > 0)


def packed(point: Point, device) -> System:
    """``documents`` documents of different length in one sequence; ``equal=True``: as
    many pairs in equal ones.
    """
    options = only(point, "documents", "equal")
    lengths = document_lengths(options["documents"], options.get("equal", False))
    if point.seq_len != sum(lengths):
        raise Refused(
            f"{options['documents']} documents have {sum(lengths)} tokens, not {point.seq_len}"
        )
    borders = torch.tensor([0, *lengths]).cumsum(0)
    document = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths)
    )
    start = borders[document]

    def forward(q, k, v):
        return attention(
            q, k, v, pattern, causal=point.causal, cu_seqlens=borders, return_lse=True
        )

    def multiplicity(queries: Tensor, keys: Tensor, **about) -> Tensor:
        alike = document[queries][:, None] == document[keys]
        return (
            pattern.multiplicity(queries - start[queries], keys - start[keys], **about)
            * alike
        )

    system = System(point, device, forward)
    pattern = system.pattern
    system.pattern = SimpleNamespace(
        multiplicity=multiplicity, reach=lambda first, last, n: (0, n)
    )
    each = [
        cost.count(pattern, dtype=system.dtype, **point.shape | {"seq_len": n})
        for n in lengths
    ]
    system.cost = replace(
        each[0], **{name: sum(getattr(c, name) for c in each) for name in vars(each[0])}
    )
    return system
