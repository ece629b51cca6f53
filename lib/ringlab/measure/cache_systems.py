"""Systems that measure the pattern cache and the memory pool: plans built and looked
up, scratch memory borrowed.

They have no FLOPs and no roofline. Each checks what the cache or pool gave.
"""

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
from .systems import (
    Checked,
    Output,
    System,
    choose_kernel,
    parse_options,
    require_pattern,
)


class Uncosted(System):
    """A system that takes no tensors and has no FLOPs, and so no roofline; ``allowed``
    are its options.
    """

    allowed: tuple[str, ...] = ()

    def __init__(self, point: Point, device):
        self.options = parse_options(point, *self.allowed)
        super().__init__(point, device)
        self.cost = Cost(0, 0, 0, 0, 0)

    def inputs(self) -> list[Tensor]:
        return []


class Plans(Output):
    """Plans as an output; ``show(plans)`` gives the tensors that tell whether they are
    right, only when asked for.
    """

    def __init__(self, plans, show: Callable[..., dict[str, Tensor]], **counted: int):
        self.plans = plans
        self.show = show
        self.counted = counted

    def named(self) -> dict[str, Tensor]:
        return self.show(self.plans)


class PlanBuild(Uncosted):
    """The plan of one attention call through a cache, without the attention; options
    ``gather``, ``blocks``, ``warm``.

    ``gather``: index tensors instead of strided views; ``blocks``: how a block-sparse
    pattern is executed. ``warm=False`` clears the cache before every call, so that each
    builds anew. The check: attention by this plan equals the float64 reference.
    """

    allowed = "gather", "blocks", "warm"

    def __init__(self, point: Point, device):
        super().__init__(point.but(passes="fwd"), device)
        self.kernel = choose_kernel(point, device).kernel
        self.cache = PatternCache()
        self.key = self.pattern, point.seq_len, point.heads, point.kv_heads
        self.make = make_plan
        self.execute = execute.forward
        if isinstance(self.pattern, BlockSparse):
            self.key += point.causal, self.options.get("blocks", "views")
            self.make = blocks.make_plan
        elif self.options.get("gather"):
            self.key += (self.device,)
            self.make = gather.gather_indices
            self.execute = gather.forward

    def run(self, inputs) -> Output:
        if not self.options.get("warm", True):
            self.cache.clear()
        plan = self.cache.get(self.key, lambda: self.make(*self.key))
        return Plans(plan, self.attention)

    def attention(self, plan) -> dict[str, Tensor]:
        """out and lse by this plan."""
        call = plan, self.point.causal, self.point.head_dim**-0.5, self.kernel
        results = self.execute(*System.inputs(self), *call, pool=None)
        return dict(zip(("out", "lse"), results))

    def check(self, inputs, output) -> Checked:
        return super().check(System.inputs(self), Output(**output.named()))


LOOKUPS = 200
BORROWS = 4  # of each thread in a call


def workload(point: Point) -> list[tuple[BlockSparse, int]]:
    """(pattern, n) of each lookup: six kinds of pattern at four lengths up to the
    point's, drawn by a Zipf law.

    The seed is fixed, so the same length and block size give the same lookups.
    """
    size = point.pattern["block_size"]
    kinds = (
        block_patterns.sliding_window(1, block_size=size),
        block_patterns.sliding_window(4, block_size=size),
        block_patterns.local_global(1, 2, block_size=size),
        block_patterns.bigbird(1, 2, 3, block_size=size),
        block_patterns.hierarchical([(1, 2), (8, 32)], block_size=size),
        BlockSparse([block_patterns.Window(1), block_patterns.Strided(8)], size),
    )
    items = [(kind, point.seq_len >> halved) for halved in range(4) for kind in kinds]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(items), generator=generator)
    frequencies = 1 / torch.arange(1, len(items) + 1)  # 1 / rank
    drawn = torch.multinomial(frequencies, LOOKUPS, True, generator=generator)
    return [items[i] for i in order[drawn].tolist()]


class CacheWorkload(Uncosted):
    """All lookups of a ``workload`` through an empty cache; options ``max_mb``, in MiB,
    and ``blocks``.

    The check: each lookup gave the calls that are built anew; the error is the share of
    those that did not.
    """

    allowed = "max_mb", "blocks"

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        require_pattern(point, "lookups of block-sparse patterns", kind="block_sparse")
        call = 1, 1, point.causal, self.options.get("blocks", "views")
        self.lookups = [(*lookup, *call) for lookup in workload(point)]

    def run(self, inputs) -> Output:
        cache = PatternCache(int(self.options.get("max_mb", 64) * 2**20))
        plans = [cache.get(x, lambda x=x: blocks.make_plan(*x)) for x in self.lookups]
        stats = cache.stats()
        names = ("hits", "misses", "evictions", "bytes")
        counted = {f"cache_{name}": getattr(stats, name) for name in names}
        return Plans(plans, self.wrong, **counted)

    def wrong(self, plans: list[Plan]) -> dict[str, Tensor]:
        """1 for each lookup that gave something else than is built anew."""
        fresh = {x: _comparable(blocks.make_plan(*x)) for x in set(self.lookups)}
        pairs = zip(self.lookups, plans)
        return {
            "out": torch.tensor([float(_comparable(p) != fresh[x]) for x, p in pairs])
        }

    def check(self, inputs, output) -> Checked:
        return {"out": float(output.named()["out"].mean())}, {"out": 0.0}


def _comparable(plan: Plan) -> list:
    """The uncovered rows and the calls of a plan, with lists in place of tensors, so
    that two plans compare.
    """

    def listed(view):
        return view if view.index is None else replace(view, index=view.index.tolist())

    calls = (replace(c, q=listed(c.q), k=listed(c.k)) for c in plan.calls)
    return [plan.uncovered, *calls]


class PoolWorkload(Uncosted):
    """Each of ``threads`` borrows scratch of ``size_mb`` MiB, writes and returns it;
    ``pool=False``: fresh memory.

    The pool is its own and has no threshold. The check: every thread reads what it
    wrote, also while all of them hold their scratch at once.
    """

    allowed = "size_mb", "threads", "pool"

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        self.size = int(self.options["size_mb"] * 2**20) // self.dtype.itemsize
        self.threads = self.options.get("threads", 1)
        pooled = self.options.get("pool")
        self.pool = memory.MemoryPool(threshold_bytes=0) if pooled else None
        each = max(1, torch.get_num_threads() // self.threads)  # they share the cores
        self.workers = ThreadPoolExecutor(
            max(2, self.threads), initializer=torch.set_num_threads, initargs=(each,)
        )

    def written(self, mark: int) -> Tensor:
        """Scratch (size,) that is full of ``mark``."""
        make = torch.empty if self.pool is None else self.pool.lend
        return make((self.size,), dtype=self.dtype, device=self.device).fill_(mark)

    def borrow(self, mark: int) -> Tensor:
        """The last element of scratch that was borrowed and written several times."""
        for _ in range(BORROWS):
            last = self.written(mark)[-1:].clone()
        return last

    def run(self, inputs) -> Output:
        each = self.workers.map if self.threads > 1 else map
        out = torch.cat([*each(self.borrow, range(1, self.threads + 1))])
        stats = memory.PoolStats() if self.pool is None else self.pool.stats()
        counted = {
            "pool_reuses": stats.reuses,
            "pool_allocations": stats.allocations,
            "pool_bytes": stats.idle_bytes,
        }
        return Output(out, counted=counted)

    def check(self, inputs, output) -> Checked:
        all_written = threading.Barrier(max(2, self.threads), timeout=60)

        def changed(mark: int) -> bool:
            scratch = self.written(mark)
            all_written.wait()
            return bool((scratch != mark).any())

        lost = sum(self.workers.map(changed, range(1, all_written.parties + 1)))
        right = torch.arange(1, self.threads + 1).to(output.out)
        return {"out": float((output.out != right).double().mean()) + lost}, {
            "out": 0.0
        }
