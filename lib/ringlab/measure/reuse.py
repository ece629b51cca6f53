"""What the cache and the pool are worth by themselves: many patterns looked up, scratch borrowed and given back."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from .. import blocks, cache, memory
from ..block_calls import Tiling
from ..block_sparse import tiling_for
from ..blocks import BlockSparse
from ..cost import Cost
from .contract import Output, System, only
from .points import Point

LOOKUPS = 200
BORROWS = 4  # of each thread in a call


def workload(point: Point) -> list[tuple[BlockSparse, int]]:
    """(pattern, n) of each lookup: six kinds of pattern at four lengths up to the point's, drawn by a Zipf law.

    The same for the same length and block size: the seed is fixed, and which pattern is frequent is drawn too.
    """
    size = point.pattern["block_size"]
    kinds = (
        blocks.sliding_window(1, block_size=size), blocks.sliding_window(4, block_size=size),
        blocks.local_global(1, 2, block_size=size), blocks.bigbird(1, 2, 3, block_size=size),
        blocks.hierarchical([(1, 2), (8, 32)], block_size=size),
        BlockSparse([blocks.Window(1), blocks.Strided(8)], size),
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
            raise ValueError("cache_workload looks block-sparse patterns up, give one of the block size to use")
        self.max_bytes, self.way = int(options.get("max_mb", 64) * 2**20), options.get("blocks", "views")
        self.lookups, self.cost = workload(point), Cost(0, 0, 0, 0, 0)

    def inputs(self) -> list[Tensor]:
        return []

    def run(self, inputs) -> Output:
        kept = cache.PatternCache(self.max_bytes)
        found = [kept.get(cache.key("tiling", *shape), lambda shape=shape: tiling_for(*shape))
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
