"""Systems that measure the pattern cache and the memory pool: plans built and looked
up, scratch memory borrowed.

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


def uncosted(system: System, run: Callable, check: Callable) -> System:
    """A system that takes no tensors and has no FLOPs, and so no roofline."""
    system.inputs, system.run, system.check, system.cost = (
        list,
        run,
        check,
        Cost(0, 0, 0, 0, 0),
    )
    return system


class Plans(Output):
    """Plans as an output; ``show(plans)`` gives the tensors that tell whether they are
    right, only when asked for.
    """

    def __init__(self, plans, show: Callable[..., dict[str, Tensor]], **counted: int):
        self.plans, self.show, self.counted = plans, show, counted

    def named(self) -> dict[str, Tensor]:
        return self.show(self.plans)


def plan_build(point: Point, device) -> System:
    """The plan of one attention call through a cache, without the attention; options
    ``gather``, ``blocks``, ``warm``.

    ``gather``: index tensors instead of strided views; ``blocks``: how a block-sparse
    pattern is executed. ``warm=False`` clears the cache before every call, so that each
    builds anew. The check: attention by this plan equals the float64 reference.
    """
    options, cache = only(point, "gather", "blocks", "warm"), PatternCache()
    system = System(point.but(passes="fwd"), device, None)
    tensors, check_attention = system.inputs, system.check
    key, make, attend = (
        (system.pattern, point.seq_len, point.heads, point.kv_heads),
        make_plan,
        execute.forward,
    )
    if isinstance(system.pattern, BlockSparse):
        key, make = (
            (*key, point.causal, options.get("blocks", "views")),
            blocks.make_plan,
        )
    elif options.get("gather"):
        key, make, attend = (*key, system.device), gather.gather_indices, gather.forward

    def run(inputs) -> Output:
        if not options.get("warm", True):
            cache.clear()
        return Plans(cache.get(key, lambda: make(*key)), attention)

    def attention(plan) -> dict[str, Tensor]:
        kernel, scale = chosen(point, device).kernel, point.head_dim**-0.5
        return dict(
            zip(
                ("out", "lse"),
                attend(*tensors(), plan, point.causal, scale, kernel, pool=None),
            )
        )

    return uncosted(
        system,
        run,
        lambda inputs, output: check_attention(tensors(), Output(**output.named())),
    )


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
    often = 1 / torch.arange(1, len(items) + 1)  # 1 / rank
    return [
        items[i]
        for i in order[
            torch.multinomial(often, LOOKUPS, True, generator=generator)
        ].tolist()
    ]


def cache_workload(point: Point, device) -> System:
    """All lookups of a ``workload`` through an empty cache; options ``max_mb``, in MiB,
    and ``blocks``.

    The check: each lookup gave the calls that are built anew; the error is the share of
    those that did not.
    """
    options = only(point, "max_mb", "blocks")
    pattern_of(point, "lookups of block-sparse patterns", kind="block_sparse")
    lookups = [
        (pattern, n, 1, 1, point.causal, options.get("blocks", "views"))
        for pattern, n in workload(point)
    ]

    def run(inputs) -> Output:
        cache = PatternCache(int(options.get("max_mb", 64) * 2**20))
        plans = [cache.get(x, lambda x=x: blocks.make_plan(*x)) for x in lookups]
        stats, names = cache.stats(), ("hits", "misses", "evictions", "bytes")
        return Plans(
            plans, wrong, **{f"cache_{name}": getattr(stats, name) for name in names}
        )

    def wrong(plans: list[Plan]) -> dict[str, Tensor]:
        """1 for each lookup that gave something else than is built anew."""
        fresh = {x: _listed(blocks.make_plan(*x)) for x in set(lookups)}
        return {
            "out": torch.tensor(
                [float(_listed(plan) != fresh[x]) for x, plan in zip(lookups, plans)]
            )
        }

    def check(inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        return {"out": float(output.named()["out"].mean())}, {"out": 0.0}

    return uncosted(System(point, device, None), run, check)


def _listed(plan: Plan) -> list:
    """The uncovered rows and the calls of a plan, with lists in place of tensors, so
    that two plans compare.
    """

    def listed(view):
        return view if view.index is None else replace(view, index=view.index.tolist())

    return [
        plan.uncovered,
        *(replace(c, q=listed(c.q), k=listed(c.k)) for c in plan.calls),
    ]


def pool_workload(point: Point, device) -> System:
    """Each of ``threads`` borrows scratch of ``size_mb`` MiB, writes and returns it;
    ``pool=False``: fresh memory.

    The pool is its own and has no threshold. The check: every thread reads what it
    wrote, also while all of them hold their scratch at once.
    """
    options, system = (
        only(point, "size_mb", "threads", "pool"),
        System(point, device, None),
    )
    size, threads = (
        int(options["size_mb"] * 2**20) // system.dtype.itemsize,
        options.get("threads", 1),
    )
    pool = memory.MemoryPool(threshold_bytes=0) if options.get("pool") else None
    each = max(1, torch.get_num_threads() // threads)  # they share the cores
    workers = ThreadPoolExecutor(
        max(2, threads), initializer=torch.set_num_threads, initargs=(each,)
    )

    def written(mark: int) -> Tensor:
        """Scratch (size,) that is full of ``mark``."""
        make = torch.empty if pool is None else pool.lend
        return make((size,), dtype=system.dtype, device=system.device).fill_(mark)

    def work(mark: int) -> Tensor:
        for _ in range(BORROWS):
            read = written(mark)[-1:].clone()
        return read

    def run(inputs) -> Output:
        marks = range(1, threads + 1)
        found = list(workers.map(work, marks) if threads > 1 else map(work, marks))
        stats = memory.PoolStats() if pool is None else pool.stats()
        counted = {
            "reuses": stats.reuses,
            "allocations": stats.allocations,
            "bytes": stats.idle_bytes,
        }
        return Output(
            torch.cat(found),
            counted={f"pool_{name}": value for name, value in counted.items()},
        )

    def check(inputs, output) -> tuple[dict[str, float], dict[str, float]]:
        all_written = threading.Barrier(max(2, threads), timeout=60)

        def changed(mark: int) -> bool:
            scratch = written(mark)
            all_written.wait()
            return bool((scratch != mark).any())

        lost = sum(workers.map(changed, range(1, all_written.parties + 1)))
        right = torch.arange(1, threads + 1, dtype=system.dtype, device=system.device)
        return {"out": float((output.out != right).double().mean()) + lost}, {
            "out": 0.0
        }

    return uncosted(system, run, check)
