"""The systems under measurement, each with its own inputs, its own correctness check and its own cost.

A builder takes (point, device) and returns a System. An entry ``"module:function"`` names a builder of the user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import Execution, Simulated, attention, kernels, memory, patterns, reference
from ..cost import Cost
from . import peers
from .baselines import copying_attention
from .content import Chosen
from .contract import SAMPLED, Output, System, only
from .flex import flex
from .planning import PlanBuild
from .points import Point
from .reuse import CacheWorkload, PoolWorkload
from .sharded import Sharded

TORCHS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ringlab(point: Point, device) -> System:
    """This library; options are those of ``Execution``, backend, and pool_threshold_mb for a pool of its own.

    On several ranks, or ``simulated`` ones in this process: scheme and layout.
    """
    switches = ("backend", "gather", "blocks", "merge", "cache", "pool", "results", "pool_threshold_mb")
    options = only(point, *switches, "simulated", "scheme", "layout")
    across = {name: options.pop(name) for name in ("scheme", "layout") if name in options}
    group = ranks_of(point, options.pop("simulated", None))
    if group is not None:
        across["group"] = group
    backend, threshold_mb = options.pop("backend", "auto"), options.pop("pool_threshold_mb", None)
    if threshold_mb is not None:
        if not options.get("pool"):
            raise ValueError(f"pool_threshold_mb={threshold_mb} needs pool=True")
        options["pool"] = memory.MemoryPool(threshold_bytes=int(threshold_mb * 2**20))
    pattern, execution, causal = patterns.from_dict(point.pattern), Execution(**options), point.causal
    # Refused here, before any input is made.
    kernels.choose(device, getattr(torch, point.dtype), point.head_dim, causal=causal,
                   backward=point.passes == "fwd+bwd", backend=backend)  # fmt: skip

    def forward(q, k, v):
        return attention(q, k, v, pattern, causal=causal, backend=backend, execution=execution, return_lse=True,
                         **across)  # fmt: skip

    system = System(point, device, forward)
    system.scheme = across.get("scheme", "auto") if point.world_size > 1 else None
    return system


def ranks_of(point: Point, simulated: int | None):
    """The group of a point: its processes, ranks that are simulated in one, or None on one device."""
    if point.world_size > 1:
        if simulated is not None:
            raise ValueError(f"simulated={simulated} ranks are of one process, the point has {point.world_size}")
        return dist.group.WORLD
    return None if simulated is None else Simulated(simulated)


def dense_sdpa(point: Point, device) -> System:
    """torch's scaled_dot_product_attention over the whole sequence, whichever kernel it picks."""
    only(point)
    if point.pattern["kind"] != "dense":
        raise ValueError(f"dense_sdpa computes dense attention, not {patterns.from_dict(point.pattern)}")
    grouped = {"enable_gqa": True} if point.kv_heads != point.heads else {}

    def forward(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (b, h, n, d)
        return F.scaled_dot_product_attention(q, k, v, is_causal=point.causal, **grouped).transpose(1, 2), None

    return System(point, device, forward)


def copying(point: Point, device) -> System:
    """What others ship, on the same function: each branch made contiguous, the same kernel, scattered, then mixed."""
    only(point)
    pattern = patterns.from_dict(point.pattern)
    dtype, backward = getattr(torch, point.dtype), point.passes == "fwd+bwd"
    kernel = kernels.choose(device, dtype, point.head_dim, causal=point.causal, backward=backward).kernel
    return System(point, device, lambda q, k, v: (copying_attention(q, k, v, pattern, point.causal, kernel), None))


class ContiguousSegments(System):
    """torch's own kernel on segments that lie ready, as long as the first branch's selected rows: a ceiling for it.

    Another function than the point's pattern: plain segments of m = w / r rows, checked as such. The option ``backend``
    is a name of ``TORCHS``; without it torch takes which it likes. Raises ValueError if m does not divide the sequence
    length, and NotImplementedError where the named kernel cannot run.
    """

    def __init__(self, point: Point, device):
        self.backend = only(point, "backend").get("backend")
        if self.backend is not None:
            if self.backend not in TORCHS:
                raise ValueError(f"unknown kernel of torch's {self.backend!r}; known: {', '.join(TORCHS)}")
            kernels.choose(device, getattr(torch, point.dtype), point.head_dim, causal=point.causal,
                           backward=point.passes == "fwd+bwd", backend=self.backend)  # fmt: skip
        pattern = patterns.from_dict(point.pattern)
        dilated = isinstance(pattern, patterns.Dilated)
        self.rows = pattern.segment_lengths[0] // pattern.dilation_rates[0] if dilated else point.seq_len
        if point.seq_len % self.rows or point.kv_heads != point.heads:
            given = f"{point.heads} / {point.kv_heads} heads, {point.seq_len} positions"
            raise ValueError(f"contiguous_segments needs equal heads and whole segments of {self.rows}, got {given}")
        super().__init__(point, device, self._sdpa, patterns.Dilated([self.rows], [1]))

    def shapes(self):
        p = self.point
        return [(p.batch * p.seq_len // self.rows, p.heads, self.rows, p.head_dim)] * 3  # (b * segments, h, m, d)

    def _sdpa(self, q, k, v):
        with nullcontext() if self.backend is None else sdpa_kernel(TORCHS[self.backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.point.causal), None

    def as_bnhd(self, t):
        return t.transpose(1, 2).reshape(self.point.batch, self.point.seq_len, self.point.heads, self.point.head_dim)


class Sgemm(System):
    """(n, n) @ (n, n) in fp32: the matmul rate that this run reaches."""

    def __init__(self, point: Point, device):
        only(point)
        self.point, self.device, self.dtype = point, torch.device(device), torch.float32
        n = point.seq_len
        self.cost = Cost(pairs=0, distinct_pairs=0, flops=2 * n**3, folded_flops=2 * n**3, floor_bytes=12 * n * n)

    def shapes(self):
        return [(self.point.seq_len, self.point.seq_len)] * 2

    def run(self, inputs):
        return Output(inputs[0] @ inputs[1])

    def check(self, inputs, output):
        a, b = inputs
        rows = torch.arange(0, len(a), max(1, len(a) // SAMPLED), device=a.device)
        error = reference.error(output.out[rows], a[rows].double() @ b.double(), 1.0)
        return {"out": error}, {"out": reference.EXACT[torch.float32]}


def _published(name: str) -> Callable[[Point, torch.device], System]:
    """A published module by its own constructor and forward; options go to the constructor."""

    def builder(point: Point, device) -> System:
        from .. import block_variants, variants

        pattern = patterns.from_dict(point.pattern)
        if name in BLOCK_SPARSE:
            if not isinstance(pattern, patterns.BlockSparse):
                raise ValueError(f"{name} computes block-sparse patterns, not {pattern}")
            shape = {"pattern": pattern}
        else:
            dilated = isinstance(pattern, patterns.Dilated)
            if not dilated or (pattern.mixing, pattern.offsets) != ("head_groups", "branch"):
                raise ValueError(f"{name} computes head groups with offsets by branch, not {pattern}")
            lengths, rates = list(pattern.segment_lengths), list(pattern.dilation_rates)
            shape = {"segment_lengths": lengths, "dilation_rates": rates}
        options = dict(point.options)
        group = ranks_of(point, options.pop("simulated", None))
        if group is not None:
            options |= {"group": group} if point.world_size > 1 else {"ring_size": group.ranks}
        home = block_variants if name in BLOCK_SPARSE else variants
        module = getattr(home, name)(**shape, device=device, dtype=getattr(torch, point.dtype), **options)
        system = System(point, device, lambda q, k, v: (module(q, k, v, is_causal=point.causal), None))
        system.scheme = module.scheme if point.world_size > 1 else None
        layout = module._ranks(point.seq_len).get("layout")
        if layout is not None:  # the oracle goes along its curve
            order = torch.cat([layout.positions(rank) for rank in range(layout.ranks)]).to(device)
            system.as_bnhd = lambda t: t[:, order]
        return system

    return builder


PUBLISHED = (
    "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttentionV2", "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2Robust", "RingDilatedAttentionV2Flash", "RingDilatedAttentionHybrid",
    "RingDilatedAttentionSDPA", "RingDilatedAttentionCorrect", "RingDilatedAttentionHilbertGPUOptimized",
)  # fmt: skip
BLOCK_SPARSE = ("BlockSparseRingDilatedAttention", "BlockSparseOptimized", "BlockSparseTorchSparse")
ONE_DEVICE = ("flex", "adaptive", "dense_sdpa", "copying", "contiguous_segments", "sgemm", "plan_build",
              "cache_workload", "pool_workload", *peers.SYSTEMS)  # fmt: skip
SYSTEMS: dict[str, Callable[[Point, torch.device], System]] = {
    "ringlab": ringlab,
    "dense_sdpa": dense_sdpa,
    "copying": copying,
    "contiguous_segments": ContiguousSegments,
    "sgemm": Sgemm,
    "plan_build": PlanBuild,
    "cache_workload": CacheWorkload,
    "pool_workload": PoolWorkload,
    "flex": flex,
    "adaptive": Chosen,
    **peers.SYSTEMS,
    **{name: _published(name) for name in (*PUBLISHED, *BLOCK_SPARSE)},
}


def build(point: Point, device) -> System:
    """The system of a point; raises ValueError for an unknown name, and what its builder raises to refuse the point.

    The option ``twin=True`` changes nothing: the same work once more, which shows what the same work differs by.

    >>> build(Point("dense_sdpa", patterns.Dense(), seq_len=8), "cpu").cost.pairs
    512
    """
    if point.world_size > 1 and point.system in ONE_DEVICE:
        raise ValueError(f"{point.system} runs on one device, not on {point.world_size} ranks")
    system = _builder(point)(point.first, device)
    return system if point.world_size == 1 else Sharded(system)


def _builder(point: Point) -> Callable[[Point, torch.device], System]:
    if point.system in SYSTEMS:
        return SYSTEMS[point.system]
    module, found, name = point.system.partition(":")
    if not found:
        raise ValueError(f"unknown system {point.system!r}; known: {', '.join(SYSTEMS)}, or module:function")
    return getattr(importlib.import_module(module), name)
