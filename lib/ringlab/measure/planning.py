"""What the pattern cache saves: building a plan, or gather's index tensors, against finding them in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .. import cache, gather, patterns
from ..block_calls import Tiling
from ..block_sparse import tiling_for
from ..cost import Cost
from ..plan import Plan, make_plan
from .contract import SAMPLED, Output, System, only
from .points import Point


class PlanBuild(System):
    """The steps of one attention call through a cache, without the attention; options ``gather``, ``blocks``, ``warm``.

    ``gather``: index tensors instead of the plan of strided views; ``blocks``: the way of a block-sparse pattern.
    ``warm=False`` clears the cache before every call,
    so that each builds anew. It has no tensors and no FLOPs, so no bound; its check is that the steps show just the
    pattern's pairs.
    """

    def __init__(self, point: Point, device):
        options = only(point, "gather", "blocks", "warm")
        self.point, self.device, self.dtype = point, torch.device(device), getattr(torch, point.dtype)
        self.pattern = patterns.from_dict(point.pattern)
        self.gather, self.warm = options.get("gather", False), options.get("warm", True)
        self.way = options.get("blocks", "views")
        self.cache, self.cost = cache.PatternCache(), Cost(0, 0, 0, 0, 0)

    def inputs(self) -> list[Tensor]:
        return []

    def run(self, inputs) -> Output:
        if not self.warm:
            self.cache.clear()
        shape = self.pattern, self.point.seq_len, self.point.heads, self.point.kv_heads
        if isinstance(self.pattern, patterns.BlockSparse):
            shape = self.pattern, self.point.seq_len, self.point.causal, self.way
            key, build = cache.key("tiling", *shape), lambda: tiling_for(*shape)
        elif self.gather:
            key, build = cache.key("gather", *shape, self.device), lambda: gather.gather_indices(*shape, self.device)
        else:
            key, build = cache.key("plan", *shape), lambda: make_plan(*shape)
        return Steps(self.cache.get(key, build), self.point)

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        p, keys = self.point, torch.arange(self.point.seq_len)
        of = {"n": p.seq_len, "heads": p.heads, "kv_heads": p.kv_heads}
        want = [self.pattern.multiplicity(sampled(p), keys, head=h, **of) for h in range(p.heads)]
        if p.causal:
            want = [m * (keys <= sampled(p)[:, None]) for m in want]
        wrong = (output.out != torch.stack(want)).double().mean()
        return {"out": float(wrong)}, {"out": 0.0}


def sampled(point: Point) -> Tensor:
    """The queries whose pairs are compared, the last one with them."""
    step = max(1, point.seq_len // SAMPLED)
    return torch.cat([torch.arange(0, point.seq_len, step), torch.tensor([point.seq_len - 1])])


class Steps(Output):
    """Steps as an output; only when looked at is ``out`` the multiplicity (heads, queries, n) that they come to."""

    def __init__(self, steps, point: Point):
        self.steps, self.point, self.counted = steps, point, {}

    @cached_property
    def out(self) -> Tensor:
        p, queries = self.point, sampled(self.point)
        found = torch.zeros(p.heads, len(queries), p.seq_len)
        for head, kv_head, rows, kv_rows in shown(self.steps, p):
            right = kv_head == head // (p.heads // p.kv_heads)
            for i, query in enumerate(queries):
                for keys in kv_rows[(rows == query).any(-1)]:  # (m,)
                    keys = keys[keys <= query] if p.causal else keys
                    found[head, i, keys] += 1.0 if right else torch.inf
        return found


def shown(steps, point: Point) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(head, K/V head, query positions (segments, m), key positions) that attend to each other, segment by segment."""
    n = point.seq_len
    if isinstance(steps, Tiling):  # the same for all heads
        runs = [[at[0] + torch.arange(r.nodes)[:, None] * at[1] + torch.arange(size) for at, size in
                 ((r.query, r.rows), (r.key, r.keys))] for r in steps.runs]  # fmt: skip
        runs += [[c.queries[:, None] + torch.arange(c.rows), c.keys] for c in steps.picked]
        yield from ((h, h // (point.heads // point.kv_heads), *run) for h in range(point.heads) for run in runs)
        return
    if not isinstance(steps, Plan):  # gather's indices
        for members, kv_members, rows in (s for sets in steps for s in sets):
            yield from ((int(h), int(kv), rows.cpu(), rows.cpu()) for h, kv in zip(members, kv_members))
        return
    numbers = [torch.arange(n * h).view(1, n, h, 1) for h in (point.heads, point.kv_heads)]
    for call in (call for _, calls in steps.blocks for call in calls):
        segments = call.within(0, n)
        own, kv = (call.view(t, segments, kv=i > 0)[0, ..., 0] for i, t in enumerate(numbers))  # (segments, m, h)
        for rows, kv_rows in zip(own.unbind(-1), kv.unbind(-1)):
            head, kv_head = int(rows[0, 0]) % point.heads, int(kv_rows[0, 0]) % point.kv_heads
            yield head, kv_head, rows // point.heads, kv_rows // point.kv_heads
