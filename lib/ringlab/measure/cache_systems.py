"""Systems that measure the pattern cache and the memory pool: plans built and looked up, scratch memory borrowed.

They have no FLOPs and no roofline. Each checks what the cache or pool gave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from .. import block_patterns, memory
from ..block_patterns import BlockSparse
from ..cache import PatternCache
from ..cost import Cost
from ..engine import blocks, execute, gather
from ..engine.dilated import make_plan
from ..engine.execute import Plan
from .points import Point
from .systems import Output, System, chosen, only, pattern_of


class Uncosted(System):
    """A system without tensors and FLOPs, and so without a roofline; ``allowed`` names its options."""

    allowed: tuple[str, ...] = ()

    def __init__(self, point: Point, device):
        self.options = only(point, *self.allowed)
        super().__init__(point, device, None)
        self.cost = Cost(0, 0, 0, 0, 0)

    def inputs(self) -> list[Tensor]:
        return []


class Plans(Output):
    """Plans as an output; ``show(plans)`` gives the tensors that tell whether they are right, only when asked for."""

    def __init__(self, plans, show: Callable[..., dict[str, Tensor]], **counted: int):
        self.plans, self.show, self.counted = plans, show, counted

    def named(self) -> dict[str, Tensor]:
        return self.show(self.plans)


class PlanBuild(Uncosted):
    """The plan of one attention call through a cache, without the attention; options ``gather``, ``blocks``, ``warm``.

    ``gather``: index tensors instead of strided views; ``blocks``: how a block-sparse pattern is executed.
    ``warm=False`` clears the cache before every call, so that each builds anew. The check: attention by this plan
    equals the float64 reference.
    """

    allowed = ("gather", "blocks", "warm")

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        self.cache, self.make, self.attend = PatternCache(), make_plan, execute.forward
        self.key = self.pattern, point.seq_len, point.heads, point.kv_heads
        if isinstance(self.pattern, BlockSparse):
            self.key, self.make = (*self.key, point.causal, self.options.get("blocks", "views")), blocks.make_plan
        elif self.options.get("gather"):
            self.key, self.make, self.attend = (*self.key, self.device), gather.gather_indices, gather.forward

    def run(self, inputs) -> Output:
        if not self.options.get("warm", True):
            self.cache.clear()
        return Plans(self.cache.get(self.key, lambda: self.make(*self.key)), self._attention)

    def tensors(self) -> list[Tensor]:
        """q, k, v of the attention that the plan is for."""
        return [t.detach() for t in System.inputs(self)[:3]]

    def _attention(self, plan) -> dict[str, Tensor]:
        p, (q, k, v) = self.point, self.tensors()
        kernel = chosen(p, self.device).kernel
        return dict(zip(("out", "lse"), self.attend(q, k, v, plan, p.causal, p.head_dim**-0.5, kernel, pool=None)))

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        return super().check(self.tensors(), Output(**output.named()))


LOOKUPS = 200
BORROWS = 4  # of each thread in a call


def workload(point: Point) -> list[tuple[BlockSparse, int]]:
    """(pattern, n) of each lookup: six kinds of pattern at four lengths up to the point's, drawn by a Zipf law.

    The seed is fixed, so the same length and block size give the same lookups.
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
    """All lookups of a ``workload`` through an empty cache; options ``max_mb``, in MiB, and ``blocks``.

    The check: each lookup gave the calls that are built anew; the error is the share of those that did not.
    """

    allowed = ("max_mb", "blocks")

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        pattern_of(point, "lookups of block-sparse patterns", kind="block_sparse")
        way = self.options.get("blocks", "views")
        self.lookups = [(pattern, n, 1, 1, point.causal, way) for pattern, n in workload(point)]

    def run(self, inputs) -> Output:
        cache = PatternCache(int(self.options.get("max_mb", 64) * 2**20))
        plans = [cache.get(x, lambda x=x: blocks.make_plan(*x)) for x in self.lookups]
        stats, names = cache.stats(), ("hits", "misses", "evictions", "bytes")
        return Plans(plans, self._wrong, **{f"cache_{name}": getattr(stats, name) for name in names})

    def _wrong(self, plans: list[Plan]) -> dict[str, Tensor]:
        """1 for each lookup that gave something else than is built anew."""
        fresh = {x: _listed(blocks.make_plan(*x)) for x in set(self.lookups)}
        return {"out": torch.tensor([float(_listed(plan) != fresh[x]) for x, plan in zip(self.lookups, plans)])}

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        return {"out": float(output.named()["out"].mean())}, {"out": 0.0}


def _listed(plan: Plan) -> list:
    """The uncovered rows and the calls of a plan, with lists in place of tensors, so that two plans compare."""

    def listed(view):
        return view if view.index is None else replace(view, index=view.index.tolist())

    return [plan.uncovered, *(replace(c, q=listed(c.q), k=listed(c.k)) for c in plan.calls)]


class PoolWorkload(Uncosted):
    """Each of ``threads`` borrows scratch of ``size_mb`` MiB, writes and returns it; ``pool=False``: fresh memory.

    The pool is its own and has no threshold. The check: every thread reads what it wrote, also while all of them hold
    their scratch at once.
    """

    allowed = ("size_mb", "threads", "pool")

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        self.size = int(self.options["size_mb"] * 2**20) // self.dtype.itemsize
        self.threads = self.options.get("threads", 1)
        self.pool = memory.MemoryPool(threshold_bytes=0) if self.options.get("pool") else None
        each = max(1, torch.get_num_threads() // self.threads)  # they share the cores
        self.workers = ThreadPoolExecutor(max(2, self.threads), initializer=torch.set_num_threads, initargs=(each,))

    def written(self, mark: int) -> Tensor:
        """Scratch (size,) that is full of ``mark``."""
        make = torch.empty if self.pool is None else self.pool.lend
        return make((self.size,), dtype=self.dtype, device=self.device).fill_(mark)

    def run(self, inputs) -> Output:
        def work(mark: int) -> Tensor:
            for _ in range(BORROWS):
                read = self.written(mark)[-1:].clone()
            return read

        marks = range(1, self.threads + 1)
        found = list(self.workers.map(work, marks) if self.threads > 1 else map(work, marks))
        stats = self.pool.stats() if self.pool is not None else memory.PoolStats()
        counted = {"reuses": stats.reuses, "allocations": stats.allocations, "bytes": stats.idle_bytes}
        return Output(torch.cat(found), counted={f"pool_{name}": value for name, value in counted.items()})

    def check(self, inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        all_written = threading.Barrier(max(2, self.threads), timeout=60)

        def changed(mark: int) -> bool:
            scratch = self.written(mark)
            all_written.wait()
            return bool((scratch != mark).any())

        lost = sum(self.workers.map(changed, range(1, all_written.parties + 1)))
        right = torch.arange(1, self.threads + 1, dtype=self.dtype, device=self.device)
        return {"out": float((output.out != right).double().mean()) + lost}, {"out": 0.0}
