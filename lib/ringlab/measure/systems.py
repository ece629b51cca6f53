"""The copying form of dilated attention, as public implementations build it: a baseline, timed against the engine.

Per branch: the selected rows are copied to a contiguous tensor, one kernel call runs over them, its output and
log-sum-exp are scattered into full-length buffers; then all branches are mixed by the softmax of their log-sum-exps.
Unlike torchscale's, the mixing weights are differentiated, so that it is the same function forward and backward.

Attention to blocks chosen by content as a system under measurement: judged with the blocks that were chosen.

torch's FlexAttention on a pattern's own mask, compiled: what a block-sparse pattern is compared with.

A system on several ranks: each holds a shard of the same inputs, and all are judged together on global rows.

The systems under measurement, each with its own inputs, its own correctness check and its own cost.

A builder takes (point, device) and returns a System. An entry ``"module:function"`` names a builder of the user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import Execution, Simulated, attention, kernels, memory, patterns, reference
from ..adaptive import Adaptive, adaptive_attention, best_blocks
from ..cost import PASSES, Cost
from ..engine import torch_sparse
from ..ring import Problem, Traffic, choose, comm, counting
from ..ring.layout import layout_named
from ..ring.volume import sent_bytes
from . import peers
from .cache_systems import CacheWorkload, PlanBuild, PoolWorkload
from .contract import SAMPLED, Output, System, only
from .points import Point

UNSEEN = -1e8  # log-sum-exp of a row that a branch does not select, as torchscale has it: finite, and weightless


@dataclass(frozen=True)
class Part:
    """``segments`` whole segments of one branch from position ``start``, in which each selected head keeps m rows."""

    start: int
    segments: int
    length: int
    rate: int
    rows: int
    heads: tuple[tuple[int, list[int]], ...]  # (offset, heads that have it)

    def rows_of(self, t: Tensor, offset: int) -> Tensor:
        """The rows at ``offset`` of t (b, n, h, ...) as a view (b, segments, m, h, ...)."""
        t = t[:, self.start : self.start + self.segments * self.length]
        return t.unflatten(1, (self.segments, self.length))[:, :, offset :: self.rate][:, :, : self.rows]

    def take(self, t: Tensor) -> Tensor:
        """A contiguous copy (b * segments, m, h', ...) of the selected rows of t (b, n, h, ...)."""
        picked = [self.rows_of(t, offset)[:, :, :, _slice(heads)] for offset, heads in self.heads]
        return torch.cat(picked, 3).flatten(0, 1).contiguous()

    def put(self, t: Tensor, values: Tensor) -> None:
        """Write values (b * segments, m, h', ...) back to the rows of t (b, n, h, ...)."""
        values, first = values.unflatten(0, (-1, self.segments)), 0
        for offset, heads in self.heads:
            self.rows_of(t, offset)[:, :, :, _slice(heads)] = values[:, :, :, first : first + len(heads)]
            first += len(heads)


def _slice(heads: list[int]):
    """Evenly spaced heads as a slice, which copies faster than an index."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    even = list(range(heads[0], heads[-1] + 1, step)) == heads
    return slice(heads[0], heads[-1] + 1, step) if even else heads


def parts_of(branch, n: int) -> list[Part]:
    """A branch's kernel calls: whole segments and a short last one, heads of equal row counts together."""
    found = []
    whole, rest = divmod(n, branch.length)
    for start, segments, length in ((0, whole, branch.length), (whole * branch.length, 1, rest)):
        by_rows: dict[int, dict[int, list[int]]] = {}
        for head, offset in zip(branch.heads, branch.offsets):
            rows = -(-(length - offset) // branch.rate)
            if segments and rows > 0:
                by_rows.setdefault(rows, {}).setdefault(offset, []).append(head)
        for rows, heads in by_rows.items():
            found.append(Part(start, segments, length, branch.rate, rows, tuple(sorted(heads.items()))))
    return found


def copying_attention(q, k, v, pattern, causal: bool, kernel) -> Tensor:
    """out (b, n, h, d) of q (b, n, h, d), k, v (b, n, h_kv, d); ``kernel`` from ringlab.kernels, scale 1 / sqrt(d)."""
    n, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    branches = [parts_of(branch, n) for branch in pattern.branches(n, heads, kv_heads)]
    if kv_heads < heads:
        k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    return _Copying.apply(q, k, v, branches, causal, kernel)


class _Copying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, branches, causal, kernel):
        b, n, h, d = q.shape
        scale, wide = d**-0.5, torch.promote_types(q.dtype, torch.float32)
        outs, lses, kept = [], [], []
        for parts in branches:
            out = torch.zeros_like(q)
            lse = torch.full((b, n, h), UNSEEN, dtype=wide, device=q.device)
            for part in parts:
                rows = [part.take(t) for t in (q, k, v)]  # (b * segments, m, h', d)
                o, l = kernel.forward(*rows, causal, scale)
                part.put(out, o)
                part.put(lse, l.transpose(1, 2))
                kept += [*rows, l]
            outs.append(out)
            lses.append(lse)
        weights = torch.stack(lses).softmax(0)  # (branches, b, n, h), fp32 or wider
        mixed = sum(out * weight.unsqueeze(-1) for out, weight in zip(outs, weights)).to(q.dtype)  # (b, n, h, d)
        ctx.save_for_backward(mixed, weights, *kept)
        ctx.rest = branches, causal, scale, kernel
        return mixed

    @staticmethod
    def backward(ctx, dout):
        mixed, weights, *kept = ctx.saved_tensors
        branches, causal, scale, kernel = ctx.rest
        grads = [torch.zeros_like(mixed) for _ in range(3)]
        for parts, weight in zip(branches, weights):
            # d out_i = w_i dout and d lse_i = w_i dout (out_i - out): a flash backward, which subtracts
            # rowsum(d out_i * out), gives both at once when it is handed the mixed output.
            d_branch = dout * weight.unsqueeze(-1).to(dout.dtype)
            full = [torch.zeros_like(mixed) for _ in range(3)]
            for part in parts:
                *rows, l = kept[:4]
                del kept[:4]
                found = kernel.backward(part.take(d_branch), *rows, part.take(mixed), l, causal, scale)
                for t, values in zip(full, found):
                    part.put(t, values)
            grads = [g + t for g, t in zip(grads, full)]
        return (*grads, None, None, None)


ROUNDING = 1e-4  # by so much of the largest logit may a block that was left out be better: means are rounded


class Chosen(System):
    """Each block of queries chooses its blocks, and then attends to them; options ``block_size`` and ``top_k``.

    The point's pattern is dense, as any block may be chosen. Its check compares with the oracle on the blocks chosen,
    and these with the best by logits in float64. Raises ValueError for a batch: the oracle knows one choice a head.
    """

    def __init__(self, point: Point, device):
        self.chosen = Adaptive(**only(point, "block_size", "top_k"))
        if point.batch != 1 or point.pattern["kind"] != "dense":
            raise ValueError("adaptive is measured with batch 1 and a dense pattern, of which it chooses blocks")
        causal = point.causal
        super().__init__(point, device, lambda q, k, v: adaptive_attention(q, k, v, self.chosen, causal=causal,
                                                                           return_lse=True))  # fmt: skip
        pairs = point.heads * self.chosen.pairs(point.seq_len, causal)
        flops = PASSES[point.passes] * point.head_dim * pairs
        self.cost = replace(self.cost, pairs=pairs, distinct_pairs=pairs, flops=flops, folded_flops=flops)

    def check(self, inputs, output, starts=(None,)):
        q, k = (t.detach() for t in inputs[:2])
        table = seen(best_blocks(q, k, self.chosen, causal=self.point.causal), self.point.causal)[0]
        self.pattern = OfBlocks(table, self.chosen.block_size)
        errors, tolerance = super().check(inputs, output, starts)
        if worse(table, q, k, self.chosen, self.point.causal):
            errors = dict.fromkeys(errors, float("inf"))
        return errors, tolerance


def seen(picks: Tensor, causal: bool) -> Tensor:
    """Which blocks picks (b, h, blocks, top_k) are, bool (b, h, blocks, blocks)."""
    found = torch.zeros(*picks.shape[:3], picks.shape[2], dtype=torch.bool, device=picks.device)
    found.scatter_(-1, picks, True)
    return found.tril() if causal else found


def worse(table: Tensor, q: Tensor, k: Tensor, chosen: Adaptive, causal: bool) -> bool:
    """Whether a block was left out of ``table`` (h, blocks, blocks) whose logit in float64 is larger than a seen one's.

    Of q (1, n, h, d) and k (1, n, h_kv, d); plain means, a block at a time.
    """
    size = chosen.block_size
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    mean_q, mean_k = (torch.stack([part.double().mean(1)[0] for part in t.split(size, 1)], 1) for t in (q, k))
    if causal:  # asked by the block before, the first by none
        mean_q = torch.cat([torch.zeros_like(mean_q[:, :1]), mean_q[:, :-1]], 1)
    z = q.shape[3] ** -0.5 * mean_q @ mean_k.mT  # (h, blocks, blocks)
    open_ = torch.ones_like(table)
    if causal:
        open_, itself = open_.tril(-1), torch.eye(table.shape[1], dtype=torch.bool, device=table.device)
        if not table[:, itself].all():
            return True
        table = table & ~itself
    counts = open_.sum(-1).clamp(max=chosen.top_k - causal)
    least = z.masked_fill(~table, torch.inf).amin(-1)
    best_left = z.masked_fill(table | ~open_, -torch.inf).amax(-1)
    right = (table <= open_).all() and (table.sum(-1) == counts).all()
    return not (right and (best_left <= least + ROUNDING * z.abs().max()).all())


class OfBlocks:
    """A table of blocks (h, blocks, blocks) as the pattern of its heads."""

    def __init__(self, table: Tensor, size: int):
        self.table, self.size = table, size

    def multiplicity(self, queries, keys, *, head: int, **_) -> Tensor:
        return self.table[head][queries // self.size][:, keys // self.size].long()

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        return 0, n


def flex(point: Point, device) -> System:
    """The kernel that ``Execution(blocks="flex")`` calls, without the lse that views make for it; forward alone.

    Compiled, and the mask built, before anything is timed; its tracked memory lacks what it holds inside. Raises
    NotImplementedError where it cannot run.
    """
    only(point)
    pattern = patterns.from_dict(point.pattern)
    if not isinstance(pattern, patterns.BlockSparse):
        raise ValueError(f"flex computes block-sparse patterns, not {pattern}")
    if point.passes != "fwd":
        raise NotImplementedError("flex is measured forward alone: its backward is that of views")
    system = System(point, device, lambda q, k, v: torch_sparse.flex_forward(q, k, v, mask, point.head_dim**-0.5))
    why = torch_sparse.refusal(device, system.dtype, point.head_dim)
    if why:
        raise NotImplementedError(f"FlexAttention {why}")
    mask = torch_sparse.flex_prepare(pattern, point.seq_len, point.causal, device)
    system.run([torch.zeros(shape, dtype=system.dtype, device=device) for shape in system.shapes()])  # compiles
    return system


def begin() -> None:
    """Count a step that all ranks take together, so that the one that stays behind is known."""
    if comm.on_post is not None:
        comm.on_post()


class Sharded:
    """This rank's part of a system that works on shards over the default group; a ``System`` to who measures it.

    ``cost`` is the whole point's, but for ``floor_bytes``, which are those of the shard. Raises ValueError for a layout
    that the point cannot have.
    """

    def __init__(self, system: System):
        self.system, self.point = system, system.point
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        n = self.point.seq_len
        self.layout = layout_named(dict(self.point.options).get("layout", "contiguous"), n, self.ranks)
        floor = system.cost.floor_bytes * self.layout.size(self.rank) // n
        self.cost, self.tolerance = replace(system.cost, floor_bytes=floor), {}
        self.first: Traffic | None = None

    def inputs(self) -> list[Tensor]:
        """The shards of the point's inputs, which are the same on every rank."""
        mine = [self.layout.shard(t.detach(), self.rank).clone() for t in self.system.inputs()]
        return [t.requires_grad_(self.system.backward) for t in mine[:3]] + mine[3:]

    def run(self, inputs: list[Tensor]) -> Output:
        with counting() as traffic, torch.autograd.set_multithreading_enabled(False):  # count the backward's bytes too
            output = self.system.run(inputs)
        self.first = self.first or traffic
        return output

    def check(self, inputs: list[Tensor], output: Output) -> tuple[dict[str, float], dict[str, float]]:
        """(errors, tolerance) of all ranks' output, gathered on rank 0 and compared as a system on one device is."""
        mine = {name: t.detach().cpu() for name, t in output.named().items()}
        everyone = [None] * self.ranks
        begin()
        dist.gather_object(mine, everyone if self.rank == 0 else None)
        found = [self._judged(everyone) if self.rank == 0 else None]
        dist.broadcast_object_list(found)
        errors, tolerance, self.tolerance = found[0]
        return errors, tolerance

    def _judged(self, everyone: list[dict[str, Tensor]]) -> tuple[dict, dict, dict]:
        shapes = {name: [size[2 if name == "lse" else 1] for size in (e[name].shape for e in everyone)]
                  for name in everyone[0]}  # fmt: skip
        wanted = [self.layout.size(rank) for rank in range(self.ranks)]
        wrong = [name for name, sizes in shapes.items() if sizes != wanted]
        if wrong:
            return dict.fromkeys(wrong, float("inf")), dict.fromkeys(wrong, 0.0), {}
        device = self.system.device
        whole = {name: self.layout.unshard([e[name] for e in everyone], 2 if name == "lse" else 1).to(device)
                 for name in everyone[0]}  # fmt: skip
        grads = tuple(whole[name] for name in ("dq", "dk", "dv") if name in whole)
        self.system.tolerance = self.tolerance
        starts = [owned[0].start for rank in range(self.ranks) if (owned := self.layout.ranges(rank))]
        given = self.system.inputs()
        errors, tolerance = self.system.check(given, Output(whole["out"], whole.get("lse"), grads), starts)
        return errors, tolerance, self.system.tolerance

    def sent(self) -> dict:
        """What this rank sent in its first call, beside what its scheme's plan says; ``planned`` None: no scheme."""
        scheme, p = self.system.scheme, self.point
        bytes_, messages = self.first.from_rank(self.rank), self.first.messages
        found = {"scheme": scheme, "bytes_sent": bytes_, "messages": messages, "planned": None}
        if scheme is None:
            return found
        problem = Problem(self.system.pattern, self.layout, p.causal, p.heads, p.kv_heads)
        scheme = choose(problem).scheme if scheme == "auto" else scheme
        shape = {"batch": p.batch, "head_dim": p.head_dim, "dtype": self.system.dtype, "passes": p.passes}
        return found | {"scheme": scheme, "planned": sent_bytes(problem, self.rank, scheme, **shape)}


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
        from ringlab import compat

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
        home = compat if name in BLOCK_SPARSE else compat
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
