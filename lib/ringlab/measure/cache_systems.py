"""Systems that measure the pattern cache and the memory pool: plans built and looked up, scratch memory borrowed.

They have no FLOPs and no bound. Each checks what the cache or pool gave.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from .. import block_patterns, memory, patterns
from .. import cache as caches
from ..block_patterns import BlockSparse
from ..cost import Cost
from ..engine import blocks, gather
from ..engine.dilated import make_plan
from ..engine.execute import WHOLE, Plan, View, views_of
from .points import Point
from .systems import SAMPLED, Output, Refused, System, only


class Uncosted(System):
    """A system without tensors and FLOPs, and so without a bound; ``allowed`` names its options."""

    allowed: tuple[str, ...] = ()

    def __init__(self, point: Point, device):
        self.options = only(point, *self.allowed)
        self.point, self.device, self.dtype = point, torch.device(device), getattr(torch, point.dtype)
        self.pattern, self.cost = patterns.from_dict(point.pattern), Cost(0, 0, 0, 0, 0)

    def inputs(self) -> list[Tensor]:
        return []


class PlanBuild(Uncosted):
    """The steps of one attention call through a cache, without the attention; options ``gather``, ``blocks``, ``warm``.

    ``gather``: index tensors instead of the plan of strided views; ``blocks``: the way of a block-sparse pattern.
    ``warm=False`` clears the cache before every call, so that each builds anew. Its check is that the steps show just
    the pattern's pairs.
    """

    allowed = ("gather", "blocks", "warm")

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        self.gather, self.warm = self.options.get("gather", False), self.options.get("warm", True)
        self.way, self.cache = self.options.get("blocks", "views"), caches.PatternCache()

    def run(self, inputs) -> Output:
        if not self.warm:
            self.cache.clear()
        shape = self.pattern, self.point.seq_len, self.point.heads, self.point.kv_heads
        if isinstance(self.pattern, patterns.BlockSparse):
            shape = *shape, self.point.causal, self.way
            key, build = ("tiling", *shape), lambda: blocks.make_plan(*shape)
        elif self.gather:
            key, build = ("gather", *shape, self.device), lambda: gather.gather_indices(*shape, self.device)
        else:
            key, build = ("plan", *shape), lambda: make_plan(*shape)
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
    if not isinstance(steps, Plan):  # gather's indices
        for members, kv_members, rows in (s for sets in steps for s in sets):
            yield from ((int(h), int(kv), rows.cpu(), rows.cpu()) for h, kv in zip(members, kv_members))
        return
    for call in steps.calls:
        own, kv = (_positions(v, call, point.seq_len, h) for v, h in ((call.q, point.heads), (call.k, point.kv_heads)))
        for i in range(call.heads):
            yield call.q.head + i * call.q.head_step, call.k.head + i * call.k.head_step, own[i], kv[i]


def _positions(view: View, call, n: int, heads: int) -> list[Tensor]:
    """The positions (nodes, rows) that one side of a call reads, by its heads."""
    if view.index is not None:
        rows = view.index if view.index.shape[1] == view.rows else view.index + torch.arange(view.rows)
        return [rows] * call.heads
    numbers = torch.arange(n)[:, None].expand(n, heads).reshape(1, n, heads, 1).contiguous()
    ((found,),) = views_of([(numbers, WHOLE, view)], range(call.nodes), call.heads)
    return list(found[..., 0].unbind(-1))


LOOKUPS = 200
BORROWS = 4  # of each thread in a call


def workload(point: Point) -> list[tuple[BlockSparse, int]]:
    """(pattern, n) of each lookup: six kinds of pattern at four lengths up to the point's, drawn by a Zipf law.

    The same for the same length and block size: the seed is fixed, and which pattern is frequent is drawn too.
    """
    size = point.pattern["block_size"]
    kinds = (
        block_patterns.sliding_window(1, block_size=size), block_patterns.sliding_window(4, block_size=size),
        block_patterns.local_global(1, 2, block_size=size), block_patterns.bigbird(1, 2, 3, block_size=size),
        block_patterns.hierarchical([(1, 2), (8, 32)], block_size=size),
        BlockSparse([block_patterns.Window(1), block_patterns.Strided(8)], size),
    )  # fmt: skip
    items = [(kind, point.seq_len >> halved) for halved in range(4) for kind in kinds]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(items), generator=generator)
    often = 1 / torch.arange(1, len(items) + 1)  # 1 / rank
    return [items[i] for i in order[torch.multinomial(often, LOOKUPS, True, generator=generator)].tolist()]


class CacheWorkload(Uncosted):
    """All lookups of a ``workload`` through an empty cache; options ``max_mb``, in MiB, and ``blocks``, the way.

    Its check: the calls that every lookup gave are those built anew, and
    the cache counted the hits, misses and evictions of a plain model of such a cache.
    """

    allowed = ("max_mb", "blocks")

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        if point.pattern["kind"] != "block_sparse":
            raise Refused("cache_workload looks block-sparse patterns up, give one of the block size to use")
        self.max_bytes = int(self.options.get("max_mb", 64) * 2**20)
        self.way, self.lookups = self.options.get("blocks", "views"), workload(point)

    def run(self, inputs) -> Output:
        kept = caches.PatternCache(self.max_bytes)
        found = [kept.get(("tiling", *shape), lambda shape=shape: blocks.make_plan(*shape))
                 for shape in ((p, n, 1, 1, self.point.causal, self.way) for p, n in self.lookups)]  # fmt: skip
        stats = kept.stats()
        counted = {"cache_hits": stats.hits, "cache_misses": stats.misses, "cache_evictions": stats.evictions,
                   "cache_bytes": stats.bytes}  # fmt: skip
        return Found(found, counted)

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        fresh = {x: blocks.make_plan(*x, 1, 1, self.point.causal, self.way) for x in set(self.lookups)}
        wrong = sum(not same(found, fresh[x]) for x, found in zip(self.lookups, output.plans)) / LOOKUPS
        wrong += output.counted != modelled(self.lookups, {x: _bytes(t) for x, t in fresh.items()}, self.max_bytes)
        return {"out": float(wrong)}, {"out": 0.0}


class Found(Output):
    """What lookups gave; only when looked at is ``out`` the pairs that each comes to (lookups,)."""

    def __init__(self, plans: list[Plan], counted: dict[str, int]):
        self.plans, self.counted, self.lse, self.grads = plans, counted, None, ()

    @cached_property
    def out(self) -> Tensor:
        return torch.tensor([sum(c.q.rows * c.k.rows * c.nodes for c in plan.calls) for plan in self.plans])


def same(a: Plan, b: Plan) -> bool:
    """Whether two plans are the same calls."""
    return a.uncovered == b.uncovered and len(a.calls) == len(b.calls) and all(map(_same_call, a.calls, b.calls))


def _same_call(a, b) -> bool:
    strided = [replace(c, q=replace(c.q, index=None), k=replace(c.k, index=None)) for c in (a, b)]
    indices = [[t for t in (c.q.index, c.k.index) if t is not None] for c in (a, b)]
    return strided[0] == strided[1] and len(indices[0]) == len(indices[1]) and all(map(torch.equal, *indices))


def modelled(lookups, sizes: dict, max_bytes: int) -> dict[str, int]:
    """What a least-recently-used cache of ``max_bytes`` counts; what is larger than all of it is not kept."""
    kept: OrderedDict = OrderedDict()
    hits = evictions = 0
    for x in lookups:
        hits += x in kept
        if x in kept or sizes[x] <= max_bytes:
            kept[x] = sizes[x]
            kept.move_to_end(x)
        while sum(kept.values()) > max_bytes:
            kept.popitem(last=False)
            evictions += 1
    return {"cache_hits": hits, "cache_misses": len(lookups) - hits, "cache_evictions": evictions,
            "cache_bytes": sum(kept.values())}  # fmt: skip


def _bytes(plan: Plan) -> int:
    found = {id(t): t.numel() * t.element_size() for c in plan.calls for t in (c.q.index, c.k.index) if t is not None}
    return sum(found.values())


class PoolWorkload(Uncosted):
    """Scratch of ``size_mb`` MiB borrowed, written once and given back, by each of ``threads``; ``pool=False``: fresh.

    The pool is its own and has no threshold. Its check: every thread reads what it wrote, also
    while all of them hold their scratch at once.
    """

    allowed = ("size_mb", "threads", "pool")

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        self.size = int(self.options["size_mb"] * 2**20) // self.dtype.itemsize
        self.threads = self.options.get("threads", 1)
        self.pool = memory.MemoryPool(threshold_bytes=0) if self.options.get("pool") else None
        each = max(1, torch.get_num_threads() // self.threads)  # they share the cores, and do not crowd them
        self.workers = ThreadPoolExecutor(max(2, self.threads), initializer=torch.set_num_threads, initargs=(each,))

    def scratch(self):
        """Uninitialised scratch (size,)."""
        make = torch.empty if self.pool is None else self.pool.lend
        return make((self.size,), dtype=self.dtype, device=self.device)

    def run(self, inputs) -> Output:
        def work(mark: int) -> Tensor:
            for _ in range(BORROWS):
                read = self.scratch().fill_(mark)[-1:].clone()
            return read

        marks = range(1, self.threads + 1)
        found = list(self.workers.map(work, marks) if self.threads > 1 else map(work, marks))
        stats = self.pool.stats() if self.pool is not None else memory.PoolStats()
        return Output(torch.cat(found), counted={"pool_reuses": stats.reuses, "pool_allocations": stats.allocations,
                                                 "pool_bytes": stats.idle_bytes})  # fmt: skip

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        meet = threading.Barrier(max(2, self.threads), timeout=60)

        def hold(mark: int) -> bool:
            scratch = self.scratch().fill_(mark)
            meet.wait()  # now all have written
            kept = bool((scratch == mark).all())
            meet.wait()
            return kept

        kept = list(self.workers.map(hold, range(1, meet.parties + 1)))
        right = torch.arange(1, self.threads + 1, dtype=self.dtype, device=self.device)
        wrong = (output.out != right).double().mean() + kept.count(False)
        return {"out": float(wrong)}, {"out": 0.0}
