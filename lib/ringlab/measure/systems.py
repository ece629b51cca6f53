"""``SYSTEMS``, what is measured: each has inputs, one call, a check of that call
against the float64 reference, and its cost.

A builder takes (point, device) and returns a System. ``SYSTEMS`` names the builders; a
point may also name one of the user's own, as ``"module:function"``.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import (
    Execution,
    Simulated,
    attention,
    baselines,
    compat,
    kernels,
    memory,
    patterns,
    reference,
)
from ..cost import Cost
from ..engine.execute import merge
from ..ring import Traffic, comm, counting
from ..ring.layout import Layout, layout_named
from .points import Point, pattern_of

GRADIENT_KV_HEADS = 2
SAMPLED = 32  # rows and columns per head that are compared with the float64 oracle


@dataclass
class Output:
    """The results of one call, with gradients for "fwd+bwd"; ``counted``: other numbers
    by name.
    """

    out: Tensor
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    counted: dict[str, int] = field(default_factory=dict)

    def named(self) -> dict[str, Tensor]:
        return {
            name: t
            for name, t in vars(self).items()
            if name != "counted" and t is not None
        }


Checked = tuple[dict[str, float], dict[str, float]]  # errors and tolerance by name


class Refused(NotImplementedError):
    """A system does not support a point; the message says why. Any other error of a
    system is a fault.
    """


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a ValueError of the library, for an option of the point, into a refusal."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


class System:
    """Attention by ``forward(q, k, v) -> (out, lse or None)`` on (b, n, h, d), checked
    against ``pattern``.

    Subclasses for other work override ``inputs``, ``run`` and ``check``, and set
    ``cost``.
    """

    # Across ranks: what predicts its bytes, if anything does; its own layout, if any.
    scheme: str | None = None
    layout: Layout | None = None
    divided_by = 1  # a documented factor, which the check undoes

    def __init__(self, point: Point, device, forward: Callable = None, pattern=None):
        self.point = point
        self.device = torch.device(device)
        if forward is not None:
            self.forward = forward
        self.pattern = pattern or pattern_of(point)
        call = replace(point.call(), pattern=self.pattern)
        self.dtype, self.backward = call.dtype, call.backward
        # Known from inputs of the same shape, or computed by ``check``.
        self.tolerance: dict[str, float] = {}
        self.cost: Cost = call.cost()

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of q, k, v."""
        p = self.point
        return [
            (p.batch, p.seq_len, h, p.head_dim)
            for h in (p.heads, p.kv_heads, p.kv_heads)
        ]

    def inputs(self) -> list[Tensor]:
        """q, k, v, and dout for a backward: normal, from a generator seeded by the
        point's id.
        """
        generator = torch.Generator(self.device)
        generator.manual_seed(int(self.point.id, 16) >> 1)
        shapes = self.shapes()
        like = {"dtype": self.dtype, "device": self.device, "generator": generator}
        qkv = [torch.randn(s, **like, requires_grad=self.backward) for s in shapes]
        return qkv + [torch.randn(shapes[0], **like)] * self.backward

    def run(self, inputs: list[Tensor]) -> Output:
        q, k, v, *rest = inputs
        out, lse = self.forward(q, k, v)  # (b, n, h, d), (b, h, n)
        if not self.backward:
            return Output(out, lse)
        grads = torch.autograd.grad(out, (q, k, v), rest[0])
        return Output(out.detach(), None if lse is None else lse.detach(), *grads)

    def as_bnhd(self, t: Tensor) -> Tensor:
        """A tensor of the system's own layout as (b, n, h, d)."""
        return t

    def check(self, inputs: list[Tensor], output: Output, starts=(None,)) -> Checked:
        """(errors, tolerance) of this output against the float64 oracle at full size;
        inf: wrong shape or dtype.

        ``starts``: where the ranges of keys begin whose gradients are compared; None:
        one at a random place.
        """
        q, k, v, *dout = (self.as_bnhd(t.detach()) for t in inputs)
        results = output.named()
        for name in results.keys() - {"lse"}:
            t = self.as_bnhd(results[name])
            results[name] = t if self.divided_by == 1 else t * self.divided_by
        causal = self.point.causal
        if results.keys() - self.tolerance.keys():
            self.tolerance = reference.tolerance(q, k, v, *dout, causal=causal)
        b, n, h, _ = q.shape
        shapes = dict.fromkeys(("out", "dq"), q.shape) | {"lse": (b, h, n)}
        shapes |= dict.fromkeys(("dk", "dv"), k.shape)
        errors = {
            name: math.inf
            for name, t in results.items()
            if t.shape != shapes[name] or name != "lse" and t.dtype != q.dtype
        }
        if not errors:
            seed = int(self.point.id[:8], 16)
            lse = results.get("lse")
            options = {"causal": causal, "samples": SAMPLED, "seed": seed}
            errors = reference.sampled_errors(
                q, k, v, self.pattern, out=results["out"], lse=lse, **options
            )
            if dout:
                tensors = {"q": q, "k": k, "v": v, "dout": dout[0]} | results
                each = [
                    self._gradient_errors(tensors, **options, start=start)
                    for start in starts
                ]
                errors |= {name: max(e[name] for e in each) for name in each[0]}
        return errors, {name: self.tolerance[name] for name in errors}

    def _gradient_errors(self, tensors, *, seed: int, **options) -> dict[str, float]:
        """Errors of dq, dk, dv for a few neighbouring heads: each needs the exact
        softmax of many queries.
        """
        shape = {"heads": self.point.heads, "kv_heads": self.point.kv_heads}
        group = shape["heads"] // shape["kv_heads"]
        kv_heads = shape["kv_heads"]
        few = min(GRADIENT_KV_HEADS, kv_heads)
        first = seed % (kv_heads - few + 1)

        def multiplicity(queries, keys, *, n: int, head: int, **_) -> Tensor:
            head += first * group
            return self.pattern.multiplicity(queries, keys, n=n, head=head, **shape)

        q, out, dout, dq = (
            tensors[name][:, :, first * group : (first + few) * group]
            for name in ("q", "out", "dout", "dq")
        )
        k, v, dk, dv = (
            tensors[name][:, :, first : first + few] for name in ("k", "v", "dk", "dv")
        )
        pattern = SimpleNamespace(multiplicity=multiplicity, reach=self.pattern.reach)
        options |= {"out": out, "lse": None, "dout": dout, "grads": (dq, dk, dv)}
        errors = reference.sampled_errors(q, k, v, pattern, seed=seed, **options)
        return {name: errors[name] for name in ("dq", "dk", "dv")}


def parse_options(point: Point, *allowed: str) -> dict:
    """The options of a point; raises Refused for one that the system does not have."""
    options = dict(point.options)
    if unknown := options.keys() - set(allowed):
        raise Refused(
            f"{point.system} has no option {sorted(unknown)[0]!r}; known: {', '.join(allowed) or 'none'}"
        )
    return options


def require_pattern(point: Point, computed: str, **fields):
    """The pattern of a point; raises Refused if it has other ``fields``, as
    ``kind="dense"``, than are ``computed``.
    """
    pattern = pattern_of(point)
    if any(point.pattern.get(name) != value for name, value in fields.items()):
        raise Refused(f"{point.system} computes {computed}, not {pattern}")
    return pattern


# --------------------------------------------------------------------------------------
# shards


def count_step() -> None:
    """Count a step that all ranks take together; the counts show which rank is behind."""
    if comm.beat is not None:
        comm.beat.begins()


class Sharded:
    """This rank's part of a system that works on shards over the default group, with
    the interface of ``System``.

    ``cost`` is that of the whole point, except for ``floor_bytes``, which are those of
    the shard. Raises Refused for a layout that the point cannot have.
    """

    def __init__(self, system: System):
        self.system = system
        self.point = system.point
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        n = self.point.seq_len
        with refusing():
            named = dict(self.point.options).get("layout", "contiguous")
            self.layout = layout_named(system.layout or named, n, self.ranks)
        self.cost = replace(
            system.cost,
            floor_bytes=system.cost.floor_bytes * self.layout.size(self.rank) // n,
        )
        self.first: Traffic | None = None  # of the first call

    def inputs(self) -> list[Tensor]:
        """The shards of the point's inputs, which are the same on every rank."""
        return [
            self.layout.shard(t.detach(), self.rank)
            .clone()
            .requires_grad_(t.requires_grad)
            for t in self.system.inputs()
        ]

    def run(self, inputs: list[Tensor]) -> Output:
        with (
            counting() as traffic,
            torch.autograd.set_multithreading_enabled(False),
        ):  # counts the backward too
            output = self.system.run(inputs)
        self.first = self.first or traffic
        return output

    def check(self, inputs: list[Tensor], output: Output) -> Checked:
        """(errors, tolerance) of all ranks' output, gathered and checked on rank 0."""
        outputs = [None] * self.ranks if self.rank == 0 else None
        checked = [None]
        count_step()
        shards = {name: t.detach().cpu() for name, t in output.named().items()}
        dist.gather_object(shards, outputs)
        if self.rank == 0:
            whole = {
                name: self._whole([each[name] for each in outputs], name)
                for name in shards
            }
            ranges = map(self.layout.ranges, range(self.ranks))
            starts = [owned[0].start for owned in ranges if owned]
            checked = [self.system.check(self.system.inputs(), Output(**whole), starts)]
        dist.broadcast_object_list(checked)
        return checked[0]

    def _whole(self, shards: list[Tensor], name: str) -> Tensor:
        """All ranks' shards of a result as one tensor; shards of wrong lengths are
        joined as they are.
        """
        axis = 2 if name == "lse" else 1
        sizes = map(self.layout.size, range(self.ranks))
        right = [t.shape[axis] for t in shards] == [*sizes]
        join = self.layout.unshard if right else torch.cat
        return join(shards, axis).to(self.system.device)

    def sent(self) -> dict:
        """What this rank sent in its first call, and the bytes that its scheme plans
        (None without a scheme).
        """
        scheme = self.system.scheme
        planned = None
        if scheme is not None:
            call = replace(self.point.call(), layout=self.layout, scheme=scheme)
            _, scheme = call.problem()
            sent = call.sent().items()
            planned = sum(size for (rank, _), size in sent if rank == self.rank)
        return {
            "bytes_sent": self.first.from_rank(self.rank),
            "messages": self.first.messages,
            "scheme": scheme,
            "planned": planned,
        }


# --------------------------------------------------------------------------------------
# baselines

TORCHS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


SWITCHES = ("cache", "pool", "results")  # of Execution
# Options that name a way of ``baselines``, instead of this library's own.
WAYS = {
    ("gather", False): None,
    ("gather", True): "gather",
    ("merge", "eager"): "views",
}
WAYS |= {("blocks", way): way for way in baselines.WAYS if way != "gather"}
CALL = ("backend", "scheme", "layout")  # arguments of ``attention``


def way_of(point: Point) -> str | None:
    """Return the way of ``baselines`` that the options of a point name; None for this
    library's own. Raises Refused for one that is unknown or does not serve the point.
    """
    names = {name for name, _ in WAYS}
    ways = [WAYS.get(x, x) for x in point.options if x[0] in names]
    ways = [way for way in ways if way is not None]
    if not ways:
        return None
    if len(ways) > 1 or point.world_size > 1 or "simulated" in dict(point.options):
        raise Refused(f"{point.system} takes one of {sorted(names)}, on one device")
    with refusing():
        baselines.check(pattern_of(point), ways[0])
    return ways[0]


def ringlab_call(point: Point) -> dict:
    """What the options of a point of this library mean for ``attention`` and for
    ``estimate``: ``backend``, ``execution``, and on several ranks scheme and layout.
    """
    own = "pool_threshold_mb", "simulated", "link_gbps", "gather", "blocks", "merge"
    options = parse_options(point, *SWITCHES, *CALL, *own)
    call = {name: options.pop(name) for name in CALL if name in options}
    threshold_mb, *_ = (options.pop(name, None) for name in own)
    if threshold_mb is not None:
        if not options.get("pool"):
            raise Refused(f"pool_threshold_mb={threshold_mb} needs pool=True")
        options["pool"] = memory.MemoryPool(threshold_bytes=int(threshold_mb * 2**20))
    with refusing():
        return call | {"execution": Execution(**options)}


def ringlab(point: Point, device) -> System:
    """This library; options: those of ``Execution``, backend, pool_threshold_mb for a
    pool of its own, and those of ``WAYS``.

    On several ranks, or ``simulated`` ones in this process, also scheme and layout.
    """
    way = way_of(point)
    call = ringlab_call(point) | {"causal": point.causal}
    several = point.world_size > 1
    if (simulated := dict(point.options).get("simulated")) is not None:
        if several:
            raise Refused(
                f"simulated={simulated} ranks are of one process, the point has {point.world_size}"
            )
        call["group"] = Simulated(simulated)
    elif several:
        call["group"] = dist.group.WORLD
    backend = call.get("backend", "auto")
    choose_kernel(point, device, backend)  # refused before any input is made
    pattern = pattern_of(point)
    if torch.device(device).type == "cuda":  # the first call probes, and compiles, none
        kind = kernels.kind_of(pattern, point.seq_len, point.heads, point.kv_heads)
        for gradients in {False, point.passes == "fwd+bwd"}:
            use = {"pattern_kind": kind, "for_gradients": gradients}
            choose_kernel(point, device, backend, **use)
    run = partial(attention, return_lse=True)
    if way is not None:
        run = partial(baselines.attend, way=way)
    system = System(point, device, lambda *qkv: run(*qkv, pattern, **call))
    if several:
        system.scheme = call.get("scheme", "auto")
    return system


def choose_kernel(point: Point, device, backend: str = "auto", **use) -> kernels.Choice:
    """The kernel for a point, ``use`` as in ``kernels.choose``; raises
    NotImplementedError if there is none.
    """
    call = replace(point.call(), backend=backend)
    use |= call.options("causal", "backward", "backend")
    return kernels.choose(device, call.dtype, call.head_dim, **use)


def dense_sdpa(point: Point, device) -> System:
    """torch's scaled_dot_product_attention over the whole sequence, whichever kernel it
    picks.
    """
    parse_options(point)
    require_pattern(point, "dense attention", kind="dense")
    gqa = point.kv_heads != point.heads
    options = {"is_causal": point.causal, "enable_gqa": gqa}

    def forward(*qkv):
        heads_first = (t.transpose(1, 2) for t in qkv)  # (b, h, n, d)
        out = F.scaled_dot_product_attention(*heads_first, **options)
        return out.transpose(1, 2), None

    return System(point, device, forward)


def copying(point: Point, device) -> System:
    """The published way of the same function: copies the rows of each branch, runs
    attention on their segments, scatters, then mixes by the log-sum-exp. Raises Refused
    for a rate that does not divide its segments.
    """
    parse_options(point)
    choose_kernel(point, device)  # refused before any input is made
    n = point.seq_len
    each = pattern_of(point).branches(n, point.heads, point.kv_heads)
    if any(x.length % x.rate and x.length < n for x in each):
        raise Refused("copying needs rates that divide their segments")

    def forward(*qkv):
        # Each head has its own offset, whichever its K/V head.
        q, k, v = (t.repeat_interleave(point.heads // t.shape[2], 2) for t in qkv)
        wide = torch.promote_types(q.dtype, torch.float32)
        outs = []
        lses = []
        for branch in each:
            rows = patterns.Dilated([-(-branch.length // branch.rate)], [1])
            out = torch.zeros_like(q)
            lse = torch.full_like(q[..., 0], -torch.inf, dtype=wide)  # (b, n, h)
            for offset in {*branch.offsets}:
                pairs = zip(branch.heads, branch.offsets)
                heads = [h for h, own in pairs if own == offset]
                at = slice(None), slice(offset, None, branch.rate), heads
                copies = [t[at] for t in (q, k, v)]  # (b, rows, h', d)
                call = {"causal": point.causal, "return_lse": True}
                out[at], own_lse = attention(*copies, rows, **call)
                lse[at] = own_lse.transpose(1, 2)
            outs.append(out)
            lses.append(lse.transpose(1, 2))  # (b, h, n)
        return merge(outs, lses)[0].to(q.dtype), None

    return System(point, device, forward)


class ContiguousSegments(System):
    """torch's own kernel on contiguous segments as long as the first branch's selected
    rows: an upper limit for it.

    This is another function than the point's pattern: plain segments of m = w / r rows,
    checked as such. The option ``backend`` is a name of ``TORCHS``; without it torch
    chooses. Raises Refused if m does not divide the sequence length, and
    NotImplementedError if the named kernel cannot run.
    """

    def __init__(self, point: Point, device):
        backend = parse_options(point, "backend").get("backend")
        self.limited = nullcontext
        if backend is not None:
            if backend not in TORCHS:
                raise Refused(
                    f"unknown kernel of torch's {backend!r}; known: {', '.join(TORCHS)}"
                )
            choose_kernel(point, device, backend)
            self.limited = partial(sdpa_kernel, TORCHS[backend])
        pattern = pattern_of(point)
        m = point.seq_len
        if isinstance(pattern, patterns.Dilated):
            m = pattern.segment_lengths[0] // pattern.dilation_rates[0]
        if point.seq_len % m or point.kv_heads != point.heads:
            shape = f"{point.heads} / {point.kv_heads} heads, {point.seq_len} positions"
            raise Refused(
                f"contiguous_segments needs equal heads and whole segments of {m}, got {shape}"
            )
        self.segment = m
        super().__init__(point, device, pattern=patterns.Dilated([m], [1]))

    def forward(self, *qkv):
        """out, without lse, of q, k, v (b * segments, h, m, d)."""
        with self.limited():
            options = {"is_causal": self.point.causal}
            return F.scaled_dot_product_attention(*qkv, **options), None

    def shapes(self) -> list[tuple[int, ...]]:
        (b, n, h, d), *_ = super().shapes()
        return [(b * n // self.segment, h, self.segment, d)] * 3

    def as_bnhd(self, t: Tensor) -> Tensor:
        return t.transpose(1, 2).reshape(super().shapes()[0])


# --------------------------------------------------------------------------------------
# block-sparse: FlexAttention


def flex(point: Point, device) -> System:
    """torch's FlexAttention, without lse; forward only.

    It is compiled and its mask built before anything is timed; tracked memory lacks
    what it allocates inside. Raises NotImplementedError if it cannot run.
    """
    parse_options(point)
    pattern = require_pattern(point, "block-sparse patterns", kind="block_sparse")
    if point.passes != "fwd":
        raise NotImplementedError("flex is measured forward alone")
    d = point.head_dim
    dtype = getattr(torch, point.dtype)
    if why := baselines.refusal(device, dtype, d, pattern.block_size):
        raise NotImplementedError(f"FlexAttention {why}")
    mask = baselines.flex_prepare(pattern, point.seq_len, point.causal, device)
    system = System(
        point, device, lambda *qkv: (baselines.flex_forward(*qkv, mask, d**-0.5), None)
    )
    system.run(system.inputs())  # compiles
    return system


def without_reach(multiplicity: Callable) -> SimpleNamespace:
    """What the reference asks of a pattern whose rows may see any key."""
    return SimpleNamespace(multiplicity=multiplicity, reach=lambda _, __, n: (0, n))


# --------------------------------------------------------------------------------------
# published modules


PUBLISHED = (
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2Robust",
    "RingDilatedAttentionV2Flash",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionHybrid",
    "RingDilatedAttentionSDPA",
    "RingDilatedAttentionCorrect",
    "RingDilatedAttentionHilbertGPUOptimized",
)
BLOCK_SPARSE = (
    "BlockSparseRingDilatedAttention",
    "BlockSparseOptimized",
    "BlockSparseTorchSparse",
)


def published_module(point: Point, device, **arguments):
    """The published module of a point by its own constructor, to which its options and
    these ``arguments`` go.
    """
    arguments |= dict(point.options)
    if point.system in BLOCK_SPARSE:
        pattern = require_pattern(point, "block-sparse patterns", kind="block_sparse")
        arguments["pattern"] = pattern
    else:
        fields = {"kind": "dilated", "mixing": "head_groups", "offsets": "branch"}
        pattern = require_pattern(point, "head groups with offsets by branch", **fields)
        for name in ("segment_lengths", "dilation_rates"):
            arguments[name] = getattr(pattern, name)
    if "simulated" in arguments:
        arguments["ring_size"] = arguments.pop("simulated")
    dtype = getattr(torch, point.dtype)
    with refusing():
        return getattr(compat, point.system)(device=device, dtype=dtype, **arguments)


def published(point: Point, device) -> System:
    """A published module, by its own constructor and forward."""
    # Over a group the layout of this one goes to ``attention``.
    curved = point.system == "RingDilatedAttentionHilbertGPUOptimized"
    several = point.world_size > 1
    ranks = {"ring_size": point.world_size} if curved else {"group": dist.group.WORLD}
    module = published_module(point, device, **ranks if several else {})
    system = System(
        point, device, lambda *qkv: (module(*qkv, is_causal=point.causal), None)
    )
    if several:
        system.scheme = module._scheme
    if curved:  # the reference follows its curve
        call = module._ranks(point.seq_len)
        layout = call["layout"]
        if several:
            over = call | {"group": dist.group.WORLD}
            module._ranks = lambda rows: over
            system.layout = layout
        positions = torch.cat([*map(layout.positions, range(layout.ranks))])
        system.as_bnhd = lambda t: t[:, positions.to(device)]
    return system


SEVERAL_RANKS = ("ringlab", *PUBLISHED, *BLOCK_SPARSE)
SYSTEMS: dict[str, Callable[[Point, torch.device], System] | str] = {
    "ringlab": ringlab,
    "dense_sdpa": dense_sdpa,
    "copying": copying,
    "contiguous_segments": ContiguousSegments,
    "plan_build": "ringlab.measure.cache_systems:PlanBuild",
    "generation": "ringlab.measure.model_systems:Generation",
    "packed": "ringlab.measure.model_systems:packed",
    "flex": flex,
    "adaptive": "ringlab.measure.selection_systems:Choosing",
    "moba": "ringlab.measure.selection_systems:Choosing",
    "nsa": "ringlab.measure.selection_systems:Native",
    "dsa": "ringlab.measure.selection_systems:Indexed",
    "vertical_slash": "ringlab.measure.selection_systems:Choosing",
    "dilated_attention_pytorch": "ringlab.measure.peers:dilated_attention_pytorch",
    "torchscale_dilated": "ringlab.measure.peers:torchscale_dilated",
    "local_attention": "ringlab.measure.peers:local_attention",
    "ring_attention_pytorch": "ringlab.measure.peers:ring_attention_pytorch",
    **dict.fromkeys((*PUBLISHED, *BLOCK_SPARSE), published),
}


def build(point: Point, device) -> System | Sharded:
    """The system of a point; raises Refused or NotImplementedError if there is none.

    The option ``twin=True`` changes nothing: it marks the A/A control, which does the
    same work again.

    >>> build(Point("dense_sdpa", patterns.Dense(), seq_len=8), "cpu").cost.pairs
    512
    """
    builder = SYSTEMS.get(point.system, point.system)
    if isinstance(builder, str):
        if ":" not in builder:
            raise Refused(
                f"unknown system {builder!r}; known: {', '.join(SYSTEMS)}, or module:function"
            )
        builder = resolve_name(builder)
    on_one = point.system in SYSTEMS and point.system not in SEVERAL_RANKS
    if point.world_size > 1 and on_one:
        raise Refused(
            f"{point.system} runs on one device, not on {point.world_size} ranks"
        )
    system = builder(point.without_control, device)
    return system if point.world_size == 1 else Sharded(system)
