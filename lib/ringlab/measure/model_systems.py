"""Systems that measure what models do beside training on one sequence: steps of
generation, and packed documents.
"""

import random
from dataclasses import astuple, replace

import torch
from torch import Tensor

from .. import KVCache, attention, cache_bytes, reference
from ..cost import Cost
from ..patterns import Pattern
from .points import Point
from .systems import (
    Checked,
    Output,
    Refused,
    System,
    parse_options,
    without_reach,
)

STEPS = 16  # of a call: so many that taking them back does not count
# tokens of a document
SHORTEST = 64
LONGEST = 4096


def visible(pattern: Pattern, n: int, heads: int, kv_heads: int) -> Tensor:
    """M of the positions n .. n + STEPS - 1 over all up to themselves, (heads, STEPS,
    n + STEPS).
    """
    queries = torch.arange(n, n + STEPS)
    keys = torch.arange(n + STEPS)
    shape = {"n": n + STEPS, "heads": heads, "kv_heads": kv_heads}
    each = [pattern.multiplicity(queries, keys, head=h, **shape) for h in range(heads)]
    return torch.stack(each) * (keys <= queries[:, None])


class Generation(System):
    """``STEPS`` new positions, one by one, after ``seq_len`` positions whose live rows
    a ``KVCache`` keeps.

    The roofline reads the rows that each step sees once. The check: each step is that
    row of the float64 reference.
    """

    def __init__(self, point: Point, device):
        parse_options(point)
        if not point.causal or point.passes != "fwd":
            raise Refused("generation is causal and has no backward")
        super().__init__(point, device)
        b = point.batch
        n = point.seq_len
        d = point.head_dim
        self.seen = visible(self.pattern, n, point.heads, point.kv_heads)
        pairs, distinct = (b * int(m.sum()) for m in (self.seen, self.seen > 0))
        # (kv_heads, group, STEPS, n + STEPS): a row is read if a head of the group sees it
        rows = int(self.seen.unflatten(0, (point.kv_heads, -1)).any(1).sum())
        read = 2 * b * rows * d * self.dtype.itemsize
        self.cost = Cost(pairs, distinct, 4 * d * pairs, 4 * d * distinct, read)
        names = "batch", "heads", "kv_heads", "head_dim"
        sizes = {name: getattr(point, name) for name in names}
        sizes |= {"max_seq_len": n + STEPS, "dtype": self.dtype, "device": self.device}
        self.counted = {
            "cache_bytes": cache_bytes(self.pattern, **sizes),
            "floor_bytes": read // STEPS,
        }  # read again by each step
        self.cache = KVCache(self.pattern, max_crop=STEPS, **sizes)

    def shapes(self) -> list[tuple[int, ...]]:
        (b, n, h, d), (*_, kv_heads, _), _ = super().shapes()
        return [(b, STEPS, h, d)] + [(b, n + STEPS, kv_heads, d)] * 2

    def inputs(self) -> list[Tensor]:
        q, k, v = super().inputs()
        self.cache.reset()
        self.cache.append(*(t[:, : self.point.seq_len] for t in (k, v)))
        return [q, k, v]

    def run(self, inputs: list[Tensor]) -> Output:
        n = self.point.seq_len
        call = {"causal": True, "cache": self.cache}
        steps = zip(*(t[:, -STEPS:].split(1, 1) for t in inputs))  # q, k, v of each
        with torch.no_grad():
            out = torch.cat([attention(*qkv, self.pattern, **call) for qkv in steps], 1)
        self.cache.crop(n)
        return Output(out, counted=self.counted)

    def check(self, inputs: list[Tensor], output: Output) -> Checked:
        seen = self.seen.to(self.device)
        steps = without_reach(lambda *_, head, **__: seen[head])
        expected, _ = reference.attention(*inputs, steps)
        if "out" not in self.tolerance:
            last = (t[:, -STEPS:] for t in inputs)
            self.tolerance = {"out": reference.tolerance(*last, causal=True)["out"]}
        error = reference.error(output.out, expected, 1.0)
        return {"out": error}, dict(self.tolerance)


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
    options = parse_options(point, "documents", "equal")
    lengths = document_lengths(options["documents"], options.get("equal", False))
    if point.seq_len != sum(lengths):
        raise Refused(
            f"{options['documents']} documents have {sum(lengths)} tokens, not {point.seq_len}"
        )
    borders = torch.tensor([0, *lengths]).cumsum(0)
    document = torch.arange(len(lengths)).repeat_interleave(borders.diff())
    start = borders[document]
    call = {"causal": point.causal, "cu_seqlens": borders, "return_lse": True}
    system = System(point, device, lambda *qkv: attention(*qkv, pattern, **call))
    pattern = system.pattern

    def multiplicity(queries: Tensor, keys: Tensor, **shape) -> Tensor:
        same = document[queries][:, None] == document[keys]
        inside = (rows - start[rows] for rows in (queries, keys))
        return pattern.multiplicity(*inside, **shape) * same

    system.pattern = without_reach(multiplicity)
    costs = [replace(point.call(), seq_len=n).cost() for n in lengths]
    system.cost = Cost(*map(sum, zip(*map(astuple, costs))))
    return system
