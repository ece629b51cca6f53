"""Systems that measure the pattern cache and the memory pool: plans built and looked up, scratch memory borrowed.

They have no FLOPs and no bound. Each checks what the cache or pool gave.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from .. import block_patterns, memory, patterns
from .. import cache as caches
from ..block_patterns import BlockSparse
from ..cost import Cost
from ..engine import gather
from ..engine.block_calls import Tiling
from ..engine.block_sparse import tiling_for
from ..engine.dilated import Plan, make_plan
from .points import Point
from .systems import SAMPLED, Output, Refused, System, only


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
        self.cache, self.cost = caches.PatternCache(), Cost(0, 0, 0, 0, 0)

    def inputs(self) -> list[Tensor]:
        return []

    def run(self, inputs) -> Output:
        if not self.warm:
            self.cache.clear()
        shape = self.pattern, self.point.seq_len, self.point.heads, self.point.kv_heads
        if isinstance(self.pattern, patterns.BlockSparse):
            shape = self.pattern, self.point.seq_len, self.point.causal, self.way
            key, build = caches.key("tiling", *shape), lambda: tiling_for(*shape)
        elif self.gather:
            key, build = caches.key("gather", *shape, self.device), lambda: gather.gather_indices(*shape, self.device)
        else:
            key, build = caches.key("plan", *shape), lambda: make_plan(*shape)
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


class CacheWorkload(System):
    """All lookups of a ``workload`` through an empty cache; options ``max_mb``, in MiB, and ``blocks``, the way.

    It has no tensors and no FLOPs, so no bound. Its check: the calls that every lookup gave are those built anew, and
    the cache counted the hits, misses and evictions of a plain model of such a cache.
    """

    def __init__(self, point: Point, device):
        options = only(point, "max_mb", "blocks")
        self.point, self.device, self.dtype = point, torch.device(device), getattr(torch, point.dtype)
        if point.pattern["kind"] != "block_sparse":
            raise Refused("cache_workload looks block-sparse patterns up, give one of the block size to use")
        self.max_bytes, self.way = int(options.get("max_mb", 64) * 2**20), options.get("blocks", "views")
        self.lookups, self.cost = workload(point), Cost(0, 0, 0, 0, 0)

    def inputs(self) -> list[Tensor]:
        return []

    def run(self, inputs) -> Output:
        kept = caches.PatternCache(self.max_bytes)
        found = [kept.get(caches.key("tiling", *shape), lambda shape=shape: tiling_for(*shape))
                 for shape in ((p, n, self.point.causal, self.way) for p, n in self.lookups)]  # fmt: skip
        stats = kept.stats()
        counted = {"cache_hits": stats.hits, "cache_misses": stats.misses, "cache_evictions": stats.evictions,
                   "cache_bytes": stats.bytes}  # fmt: skip
        return Found(found, counted)

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        fresh = {x: tiling_for(*x, self.point.causal, self.way) for x in set(self.lookups)}
        wrong = sum(not same(found, fresh[x]) for x, found in zip(self.lookups, output.tilings)) / LOOKUPS
        wrong += output.counted != modelled(self.lookups, {x: _bytes(t) for x, t in fresh.items()}, self.max_bytes)
        return {"out": float(wrong)}, {"out": 0.0}


class Found(Output):
    """What lookups gave; only when looked at is ``out`` the pairs that each comes to (lookups,)."""

    def __init__(self, tilings: list[Tiling], counted: dict[str, int]):
        self.tilings, self.counted, self.lse, self.grads = tilings, counted, None, ()

    @cached_property
    def out(self) -> Tensor:
        runs = [sum(r.rows * r.keys * r.nodes for r in t.runs) for t in self.tilings]
        picked = [sum(c.rows * c.keys.numel() for c in t.picked) for t in self.tilings]
        return torch.tensor(runs) + torch.tensor(picked)


def same(a: Tiling, b: Tiling) -> bool:
    """Whether two tilings are the same calls."""
    pairs = list(zip(a.picked, b.picked))
    alike = all(x.rows == y.rows and x.queries.equal(y.queries) and x.keys.equal(y.keys) for x, y in pairs)
    return alike and (a.runs, a.bare, len(a.picked)) == (b.runs, b.bare, len(b.picked))


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


def _bytes(tiling: Tiling) -> int:
    return sum(t.numel() * t.element_size() for c in tiling.picked for t in (c.queries, c.keys))


class PoolWorkload(System):
    """Scratch of ``size_mb`` MiB borrowed, written once and given back, by each of ``threads``; ``pool=False``: fresh.

    The pool is its own and has no threshold. No FLOPs, so no bound. Its check: every thread reads what it wrote, also
    while all of them hold their scratch at once.
    """

    def __init__(self, point: Point, device):
        options = only(point, "size_mb", "threads", "pool")
        self.point, self.device, self.dtype = point, torch.device(device), getattr(torch, point.dtype)
        self.size = int(options["size_mb"] * 2**20) // self.dtype.itemsize
        self.threads, self.cost = options.get("threads", 1), Cost(0, 0, 0, 0, 0)
        self.pool = memory.MemoryPool(threshold_bytes=0) if options.get("pool") else None
        each = max(1, torch.get_num_threads() // self.threads)  # they share the cores, and do not crowd them
        self.workers = ThreadPoolExecutor(max(2, self.threads), initializer=torch.set_num_threads, initargs=(each,))

    def inputs(self) -> list[Tensor]:
        return []

    def scratch(self):
        """A context that gives uninitialised scratch (size,)."""
        if self.pool is not None:
            return self.pool.borrow((self.size,), self.dtype, self.device)
        return nullcontext(torch.empty(self.size, dtype=self.dtype, device=self.device))

    def run(self, inputs) -> Output:
        def work(mark: int) -> Tensor:
            for _ in range(BORROWS):
                with self.scratch() as scratch:
                    read = scratch.fill_(mark)[-1:].clone()
                    del scratch
            return read

        marks = range(1, self.threads + 1)
        found = list(self.workers.map(work, marks) if self.threads > 1 else map(work, marks))
        stats = self.pool.stats() if self.pool is not None else memory.PoolStats()
        return Output(torch.cat(found), counted={"pool_reuses": stats.reuses, "pool_allocations": stats.allocations,
                                                 "pool_bytes": stats.idle_bytes})  # fmt: skip

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        meet = threading.Barrier(max(2, self.threads), timeout=60)

        def hold(mark: int) -> bool:
            with self.scratch() as scratch:
                scratch.fill_(mark)
                meet.wait()  # now all have written
                kept = bool((scratch == mark).all())
                meet.wait()
                del scratch
            return kept

        kept = list(self.workers.map(hold, range(1, meet.parties + 1)))
        right = torch.arange(1, self.threads + 1, dtype=self.dtype, device=self.device)
        wrong = (output.out != right).double().mean() + kept.count(False)
        return {"out": float(wrong)}, {"out": 0.0}
