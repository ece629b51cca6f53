"""The systems under measurement: inputs, one call, a check of that call against the
float64 reference, and its cost.

A builder takes (point, device) and returns a System. ``SYSTEMS`` names the builders; a
point may also name one of the user's own, as ``"module:function"``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
    compat,
    cost,
    kernels,
    memory,
    patterns,
    reference,
)
from ..adaptive import Adaptive, adaptive_attention, best_blocks
from ..cost import PASSES, Cost
from ..engine import dilated, torch_sparse
from ..engine.execute import Call
from ..ring import Problem, Traffic, choose, comm, counting
from ..ring.layout import Layout, layout_named
from ..ring.volume import sent_bytes
from .points import Point

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


class Refused(ValueError):
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

    Other kinds of systems replace ``inputs``, ``run`` and ``check``, and set ``cost``.
    """

    def __init__(self, point: Point, device, forward: Callable, pattern=None):
        self.point, self.device, self.forward = point, torch.device(device), forward
        self.dtype, self.backward = (
            getattr(torch, point.dtype),
            point.passes == "fwd+bwd",
        )
        self.pattern = patterns.from_dict(point.pattern) if pattern is None else pattern
        self.scheme: str | None = (
            None  # across ranks: predicts its bytes, None if nothing does
        )
        self.layout: Layout | None = None  # across ranks, where the system has its own
        self.tolerance: dict[
            str, float
        ] = {}  # known from inputs of the same shape, or computed by ``check``
        self.divided_by = 1  # a documented factor, which the check undoes
        self.cost: Cost = cost.count(self.pattern, dtype=self.dtype, **point.shape)

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
        generator = torch.Generator(self.device).manual_seed(
            int(self.point.id, 16) >> 1
        )
        shapes = self.shapes()
        shapes += shapes[:1] if self.backward else []
        made = [
            torch.empty(s, dtype=self.dtype, device=self.device).normal_(
                generator=generator
            )
            for s in shapes
        ]
        return [t.requires_grad_(self.backward) for t in made[:3]] + made[3:]

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

    def check(
        self, inputs: list[Tensor], output: Output, starts=(None,)
    ) -> tuple[dict[str, float], dict[str, float]]:
        """(errors, tolerance) of this output against the float64 oracle at full size;
        inf: wrong shape or dtype.

        ``starts``: where the ranges of keys begin whose gradients are compared; None:
        one at a random place.
        """
        q, k, v, *rest = (self.as_bnhd(t.detach()) for t in inputs)
        found = {
            n: t if n == "lse" else self.as_bnhd(t) for n, t in output.named().items()
        }
        if self.divided_by > 1:
            found = {
                n: t if n == "lse" else t * self.divided_by for n, t in found.items()
            }
        dout, causal = (rest[0] if rest else None), self.point.causal
        if found.keys() - self.tolerance.keys():
            self.tolerance = reference.tolerance(q, k, v, dout, causal=causal)
        b, n, h, _ = q.shape
        want = {
            "out": q.shape,
            "lse": (b, h, n),
            "dq": q.shape,
            "dk": k.shape,
            "dv": v.shape,
        }
        errors = {
            x: math.inf
            for x, t in found.items()
            if t.shape != want[x] or x != "lse" and t.dtype != q.dtype
        }
        if not errors:
            seed, lse = int(self.point.id[:8], 16), found.get("lse")
            how = {"causal": causal, "samples": SAMPLED, "seed": seed}
            errors = reference.sampled_errors(
                q, k, v, self.pattern, out=found["out"], lse=lse, **how
            )
            if rest:
                each = [
                    self._gradient_errors(q, k, v, dout, found, start=start, **how)
                    for start in starts
                ]
                errors |= {name: max(e[name] for e in each) for name in each[0]}
        return errors, {name: self.tolerance[name] for name in errors}

    def _gradient_errors(
        self, q, k, v, dout, found, *, seed: int, **how
    ) -> dict[str, float]:
        """Errors of dq, dk, dv for a few neighbouring heads: each needs the exact
        softmax of many queries.
        """
        heads, kv_heads = self.point.heads, self.point.kv_heads
        group, few = heads // kv_heads, min(GRADIENT_KV_HEADS, kv_heads)
        first = seed % (kv_heads - few + 1)
        kv, own = slice(first, first + few), slice(first * group, (first + few) * group)

        def multiplicity(queries, keys, *, n: int, head: int, **_) -> Tensor:
            own_head = own.start + head
            return self.pattern.multiplicity(
                queries, keys, n=n, head=own_head, heads=heads, kv_heads=kv_heads
            )

        pattern = SimpleNamespace(multiplicity=multiplicity, reach=self.pattern.reach)
        q, out, dout, dq = (t[:, :, own] for t in (q, found["out"], dout, found["dq"]))
        k, v, dk, dv = (t[:, :, kv] for t in (k, v, found["dk"], found["dv"]))
        how |= {
            "out": out,
            "lse": None,
            "dout": dout,
            "grads": (dq, dk, dv),
            "seed": seed,
        }
        errors = reference.sampled_errors(q, k, v, pattern, **how)
        return {name: errors[name] for name in ("dq", "dk", "dv")}


def only(point: Point, *allowed: str) -> dict:
    """The options of a point; raises Refused for one that the system does not have."""
    options = dict(point.options)
    if unknown := options.keys() - set(allowed):
        raise Refused(
            f"{point.system} has no option {sorted(unknown)[0]!r}; known: {', '.join(allowed) or 'none'}"
        )
    return options


def pattern_of(point: Point, computed: str, **fields):
    """The pattern of a point; raises Refused if it has other ``fields``, as
    ``kind="dense"``, than are ``computed``.
    """
    pattern = patterns.from_dict(point.pattern)
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
        self.system, self.point = system, system.point
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
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
        mine = [
            self.layout.shard(t.detach(), self.rank).clone()
            for t in self.system.inputs()
        ]
        return [t.requires_grad_(self.system.backward) for t in mine[:3]] + mine[3:]

    def run(self, inputs: list[Tensor]) -> Output:
        with (
            counting() as traffic,
            torch.autograd.set_multithreading_enabled(False),
        ):  # counts the backward too
            output = self.system.run(inputs)
        self.first = self.first or traffic
        return output

    def check(
        self, inputs: list[Tensor], output: Output
    ) -> tuple[dict[str, float], dict[str, float]]:
        """(errors, tolerance) of all ranks' output, gathered and checked on rank 0."""
        everyone, found = [None] * self.ranks if self.rank == 0 else None, [None]
        count_step()
        dist.gather_object(
            {name: t.detach().cpu() for name, t in output.named().items()}, everyone
        )
        if self.rank == 0:
            whole = {
                name: self._whole([each[name] for each in everyone], name)
                for name in everyone[0]
            }
            starts = [
                owned[0].start
                for rank in range(self.ranks)
                if (owned := self.layout.ranges(rank))
            ]
            found = [self.system.check(self.system.inputs(), Output(**whole), starts)]
        dist.broadcast_object_list(found)
        return found[0]

    def _whole(self, shards: list[Tensor], name: str) -> Tensor:
        """All ranks' shards of a result as one tensor; shards of wrong lengths are
        joined as they are.
        """
        axis = 2 if name == "lse" else 1
        right = [t.shape[axis] for t in shards] == [
            self.layout.size(rank) for rank in range(self.ranks)
        ]
        return (self.layout.unshard if right else torch.cat)(shards, axis).to(
            self.system.device
        )

    def sent(self) -> dict:
        """What this rank sent in its first call, and the bytes that its scheme plans
        (None without a scheme).
        """
        scheme, planned, p = self.system.scheme, None, self.point
        if scheme is not None:
            problem = Problem(
                self.system.pattern, self.layout, p.causal, p.heads, p.kv_heads
            )
            shape = {
                "head_dim": p.head_dim,
                "dtype": self.system.dtype,
                "passes": p.passes,
            }
            if scheme == "auto":
                scheme = choose(problem, **shape)
            planned = sent_bytes(problem, self.rank, scheme, batch=p.batch, **shape)
        return {
            "bytes_sent": self.first.from_rank(self.rank),
            "messages": self.first.messages,
            "scheme": scheme,
            "planned": planned,
        }


# --------------------------------------------------------------------------------------
# baselines

TORCHS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def ringlab(point: Point, device) -> System:
    """This library; options: those of ``Execution``, backend, and pool_threshold_mb for
    a pool of its own.

    On several ranks, or ``simulated`` ones in this process, also scheme and layout.
    """
    switches = (
        "backend",
        "gather",
        "blocks",
        "merge",
        "cache",
        "pool",
        "results",
        "pool_threshold_mb",
    )
    options = only(point, *switches, "simulated", "scheme", "layout")
    across = {
        name: options.pop(name) for name in ("scheme", "layout") if name in options
    }
    if (simulated := options.pop("simulated", None)) is not None:
        if point.world_size > 1:
            raise Refused(
                f"simulated={simulated} ranks are of one process, the point has {point.world_size}"
            )
        across["group"] = Simulated(simulated)
    elif point.world_size > 1:
        across["group"] = dist.group.WORLD
    backend, threshold_mb = (
        options.pop("backend", "auto"),
        options.pop("pool_threshold_mb", None),
    )
    if threshold_mb is not None:
        if not options.get("pool"):
            raise Refused(f"pool_threshold_mb={threshold_mb} needs pool=True")
        options["pool"] = memory.MemoryPool(threshold_bytes=int(threshold_mb * 2**20))
    with refusing():
        how = {
            "causal": point.causal,
            "backend": backend,
            "execution": Execution(**options),
            "return_lse": True,
        }
    chosen(point, device, backend)  # refused before any input is made
    pattern = patterns.from_dict(point.pattern)
    if torch.device(device).type == "cuda":  # the first call probes, and compiles, none
        kind = kernels.kind_of(pattern, point.seq_len, point.heads, point.kv_heads)
        for gradients in {False, point.passes == "fwd+bwd"}:
            how_chosen = {"pattern_kind": kind, "for_gradients": gradients}
            chosen(point, device, backend, **how_chosen)
    system = System(
        point, device, lambda q, k, v: attention(q, k, v, pattern, **how, **across)
    )
    system.scheme = across.get("scheme", "auto") if point.world_size > 1 else None
    return system


def chosen(point: Point, device, backend: str = "auto", **how) -> kernels.Choice:
    """The kernel for a point, ``how`` as in ``kernels.choose``; raises
    NotImplementedError if there is none.
    """
    dtype, backward = getattr(torch, point.dtype), point.passes == "fwd+bwd"
    return kernels.choose(
        device,
        dtype,
        point.head_dim,
        causal=point.causal,
        backward=backward,
        backend=backend,
        **how,
    )


def dense_sdpa(point: Point, device) -> System:
    """torch's scaled_dot_product_attention over the whole sequence, whichever kernel it
    picks.
    """
    only(point)
    pattern_of(point, "dense attention", kind="dense")
    grouped = {"enable_gqa": True} if point.kv_heads != point.heads else {}

    def forward(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (b, h, n, d)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=point.causal, **grouped
        ).transpose(1, 2), None

    return System(point, device, forward)


def copying(point: Point, device) -> System:
    """The published way of the same function: copies each branch, runs the same kernel,
    scatters, then mixes.
    """
    only(point)
    pattern, kernel = patterns.from_dict(point.pattern), chosen(point, device).kernel
    return System(
        point,
        device,
        lambda q, k, v: (
            copying_attention(q, k, v, pattern, point.causal, kernel),
            None,
        ),
    )


def contiguous_segments(point: Point, device) -> System:
    """torch's own kernel on contiguous segments as long as the first branch's selected
    rows: an upper limit for it.

    This is another function than the point's pattern: plain segments of m = w / r rows,
    checked as such. The option ``backend`` is a name of ``TORCHS``; without it torch
    chooses. Raises Refused if m does not divide the sequence length, and
    NotImplementedError if the named kernel cannot run.
    """
    backend = only(point, "backend").get("backend")
    if backend is not None:
        if backend not in TORCHS:
            raise Refused(
                f"unknown kernel of torch's {backend!r}; known: {', '.join(TORCHS)}"
            )
        chosen(point, device, backend)
    b, n, h, pattern = (
        point.batch,
        point.seq_len,
        point.heads,
        patterns.from_dict(point.pattern),
    )
    m = (
        pattern.segment_lengths[0] // pattern.dilation_rates[0]
        if isinstance(pattern, patterns.Dilated)
        else n
    )
    if n % m or point.kv_heads != h:
        given = f"{h} / {point.kv_heads} heads, {n} positions"
        raise Refused(
            f"contiguous_segments needs equal heads and whole segments of {m}, got {given}"
        )

    def forward(q, k, v):
        with nullcontext() if backend is None else sdpa_kernel(TORCHS[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=point.causal), None

    system = System(point, device, forward, patterns.Dilated([m], [1]))
    system.shapes = lambda: (
        [(b * n // m, h, m, point.head_dim)] * 3
    )  # (b * segments, h, m, d)
    system.as_bnhd = lambda t: t.transpose(1, 2).reshape(b, n, h, point.head_dim)
    return system


def sgemm(point: Point, device) -> System:
    """(n, n) @ (n, n) in fp32: the matmul rate of this run."""
    only(point)
    n, system = point.seq_len, System(point.but(dtype="float32"), device, None)

    def check(inputs, output):
        a, b = inputs
        rows = torch.arange(0, n, max(1, n // SAMPLED), device=a.device)
        error = reference.error(output.out[rows], a[rows].double() @ b.double(), 1.0)
        return {"out": error}, {"out": reference.EXACT[torch.float32]}

    system.shapes = lambda: [(n, n)] * 2
    system.run = lambda inputs: Output(inputs[0] @ inputs[1])
    system.check = check
    system.cost = Cost(
        pairs=0,
        distinct_pairs=0,
        flops=2 * n**3,
        folded_flops=2 * n**3,
        floor_bytes=12 * n * n,
    )
    return system


# --------------------------------------------------------------------------------------
# the copying form of dilated attention

UNSEEN = -1e8  # log-sum-exp of a row that a branch does not select, as in torchscale: finite, with weight 0


def parts_of(branch: patterns.Branch, n: int) -> list[list[Call]]:
    """The kernel calls of a branch, each as the views of rows that it takes: heads of
    equal row counts together.
    """
    found = defaultdict(list)
    every = range(max(branch.heads) + 1)
    for call in dilated._branch_calls(
        branch, range(n), 1, every, dict.fromkeys(branch.heads, branch)
    ):
        found[call.nodes, call.q.rows].append(call)
    return [*found.values()]


def _view(t: Tensor, call: Call) -> Tensor:
    """The rows of t (b, n, h, ...) that a call reads: (b, segments, m, h', ...)."""
    rows, (s_b, s_n, s_h, *s_d) = call.q, t.stride()
    shape = t.shape[0], call.nodes, rows.rows, call.heads, *t.shape[3:]
    strides = (
        s_b,
        rows.node_step * s_n,
        rows.step * s_n,
        rows.head_step * s_h + rows.shift * s_n,
        *s_d,
    )
    return t.as_strided(
        shape, strides, t.storage_offset() + rows.first * s_n + rows.head * s_h
    )


def _take(t: Tensor, part: list[Call]) -> Tensor:
    """A contiguous copy (b * segments, m, h', ...) of the selected rows of t (b, n, h,
    ...).
    """
    return torch.cat([_view(t, call) for call in part], 3).flatten(0, 1)


def _put(t: Tensor, part: list[Call], values: Tensor) -> None:
    """Write values (b * segments, m, h', ...) back to the rows of t (b, n, h, ...)."""
    each = values.unflatten(0, (-1, part[0].nodes)).split(
        [call.heads for call in part], 3
    )
    for call, rows in zip(part, each):
        _view(t, call).copy_(rows)


def copying_attention(q, k, v, pattern, causal: bool, kernel) -> Tensor:
    """out (b, n, h, d) of q (b, n, h, d), k, v (b, n, h_kv, d); ``kernel`` from
    ringlab.kernels, scale 1 / sqrt(d).
    """
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
                rows = [_take(t, part) for t in (q, k, v)]  # (b * segments, m, h', d)
                o, l = kernel.forward(*rows, causal, scale)
                _put(out, part, o)
                _put(lse, part, l.transpose(1, 2))
                kept += [*rows, l]
            outs.append(out)
            lses.append(lse)
        weights = torch.stack(lses).softmax(0)  # (branches, b, n, h), fp32 or wider
        mixed = sum(
            out * weight.unsqueeze(-1) for out, weight in zip(outs, weights)
        ).to(q.dtype)  # (b, n, h, d)
        ctx.save_for_backward(mixed, weights, *kept)
        ctx.rest = branches, causal, scale, kernel
        return mixed

    @staticmethod
    def backward(ctx, dout):
        mixed, weights, *kept = ctx.saved_tensors
        branches, causal, scale, kernel = ctx.rest
        grads = [torch.zeros_like(mixed) for _ in range(3)]
        for parts, weight in zip(branches, weights):
            # d out_i = w_i dout and d lse_i = w_i dout (out_i - out): a flash backward
            # subtracts rowsum(d out_i * out), so with the mixed output it computes both
            # at once.
            d_branch = dout * weight.unsqueeze(-1).to(dout.dtype)
            full = [torch.zeros_like(mixed) for _ in range(3)]
            for part in parts:
                *rows, l = kept[:4]
                del kept[:4]
                found = kernel.backward(
                    _take(d_branch, part), *rows, _take(mixed, part), l, causal, scale
                )
                for t, values in zip(full, found):
                    _put(t, part, values)
            grads = [g + t for g, t in zip(grads, full)]
        return (*grads, None, None, None)


# --------------------------------------------------------------------------------------
# block-sparse: FlexAttention, and blocks chosen by content


def flex(point: Point, device) -> System:
    """The kernel that ``Execution(blocks="flex")`` calls, without lse; forward only.

    It is compiled and its mask built before anything is timed; tracked memory lacks
    what it allocates inside. Raises NotImplementedError if it cannot run.
    """
    only(point)
    pattern = pattern_of(point, "block-sparse patterns", kind="block_sparse")
    if point.passes != "fwd":
        raise NotImplementedError(
            "flex is measured forward alone: its backward is that of views"
        )
    system = System(
        point,
        device,
        lambda q, k, v: torch_sparse.flex_forward(q, k, v, mask, point.head_dim**-0.5),
    )
    why = torch_sparse.refusal(device, system.dtype, point.head_dim, pattern.block_size)
    if why:
        raise NotImplementedError(f"FlexAttention {why}")
    mask = torch_sparse.flex_prepare(pattern, point.seq_len, point.causal, device)
    system.run(
        [
            torch.zeros(shape, dtype=system.dtype, device=device)
            for shape in system.shapes()
        ]
    )  # compiles
    return system


ROUNDING = 1e-4  # of the largest logit: a block that was left out may be better by this much, as means are rounded


def adaptive(point: Point, device) -> System:
    """Each block of queries chooses its blocks by content, then attends to them;
    options ``block_size``, ``top_k``.

    The point's pattern is dense, as any block may be chosen. The check compares with
    the oracle on the chosen blocks, and these with the best blocks in float64. Raises
    Refused for a batch: the oracle has one choice per head.
    """
    chosen, causal = Adaptive(**only(point, "block_size", "top_k")), point.causal
    if point.batch != 1 or point.pattern["kind"] != "dense":
        raise Refused(
            "adaptive is measured with batch 1 and a dense pattern, of which it chooses blocks"
        )
    how = {"causal": causal, "return_lse": True}
    system = System(
        point, device, lambda q, k, v: adaptive_attention(q, k, v, chosen, **how)
    )
    pairs = point.heads * chosen.pairs(point.seq_len, causal)
    flops = PASSES[point.passes] * point.head_dim * pairs
    system.cost = replace(
        system.cost, pairs=pairs, distinct_pairs=pairs, flops=flops, folded_flops=flops
    )

    def check(inputs, output):
        (q, k), size = (t.detach() for t in inputs[:2]), chosen.block_size
        picks = best_blocks(q, k, chosen, causal=causal)[0]  # (h, blocks, top_k)
        table = torch.zeros(
            *picks.shape[:2], picks.shape[1], dtype=torch.bool, device=q.device
        )  # (h, blocks, blocks)
        table.scatter_(-1, picks, True)
        table = table.tril() if causal else table

        def multiplicity(queries, keys, *, head: int, **_) -> Tensor:
            return table[head][queries // size][:, keys // size].long()

        system.pattern = SimpleNamespace(
            multiplicity=multiplicity, reach=lambda first, last, n: (0, n)
        )
        errors, tolerance = System.check(system, inputs, output)
        right = are_best(table, q, k, chosen, causal)
        return errors if right else dict.fromkeys(errors, math.inf), tolerance

    system.check = check
    return system


def are_best(
    table: Tensor, q: Tensor, k: Tensor, chosen: Adaptive, causal: bool
) -> bool:
    """Whether ``table`` (h, blocks, blocks) has the blocks of the largest logits in
    float64, up to rounding.

    Of q (1, n, h, d) and k (1, n, h_kv, d); a block is represented by its mean.
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    mean_q, mean_k = (
        torch.stack([x.double().mean(1)[0] for x in t.split(chosen.block_size, 1)], 1)
        for t in (q, k)
    )
    if causal:  # the query is the mean of the block before
        mean_q = torch.cat([torch.zeros_like(mean_q[:, :1]), mean_q[:, :-1]], 1)
    z = q.shape[3] ** -0.5 * mean_q @ mean_k.mT  # (h, blocks, blocks)
    rounding = ROUNDING * float(z.abs().max())
    if (
        causal
    ):  # the block itself is always chosen, and not by its logit; then those before it
        z = torch.where(torch.ones_like(table).tril(), z, -torch.inf)
        z.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    best, taken = (
        each.topk(chosen.top_k).values
        for each in (z, z.masked_fill(~table, -torch.inf))
    )
    return torch.allclose(taken, best, rtol=0.0, atol=rounding)


# --------------------------------------------------------------------------------------
# published modules


PUBLISHED = (
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2Robust",
    "RingDilatedAttentionV2Flash",
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


def published(point: Point, device) -> System:
    """A published module, by its own constructor and forward; options go to the
    constructor.
    """
    name, options = point.system, dict(point.options)
    if name in BLOCK_SPARSE:
        options["pattern"] = pattern_of(
            point, "block-sparse patterns", kind="block_sparse"
        )
    else:
        fields = {"kind": "dilated", "mixing": "head_groups", "offsets": "branch"}
        pattern = pattern_of(point, "head groups with offsets by branch", **fields)
        options |= {
            "segment_lengths": pattern.segment_lengths,
            "dilation_rates": pattern.dilation_rates,
        }
    if "simulated" in options:
        options["ring_size"] = options.pop("simulated")
    curved = (
        name == "RingDilatedAttentionHilbertGPUOptimized"
    )  # over a group its layout goes to ``attention``
    if point.world_size > 1:
        options |= (
            {"ring_size": point.world_size} if curved else {"group": dist.group.WORLD}
        )
    with refusing():
        module = getattr(compat, name)(
            device=device, dtype=getattr(torch, point.dtype), **options
        )
    system = System(
        point, device, lambda q, k, v: (module(q, k, v, is_causal=point.causal), None)
    )
    system.scheme = module.scheme if point.world_size > 1 else None
    if curved:  # the reference follows its curve
        layout = module._ranks(point.seq_len)["layout"]
        if point.world_size > 1:
            across = {
                "group": dist.group.WORLD,
                "scheme": module.scheme,
                "layout": layout,
            }
            module._ranks, system.layout = lambda rows: across, layout
        order = torch.cat([layout.positions(rank) for rank in range(layout.ranks)]).to(
            device
        )
        system.as_bnhd = lambda t: t[:, order]
    return system


SEVERAL_RANKS = ("ringlab", *PUBLISHED, *BLOCK_SPARSE)
SYSTEMS: dict[str, Callable[[Point, torch.device], System] | str] = {
    "ringlab": ringlab,
    "dense_sdpa": dense_sdpa,
    "copying": copying,
    "contiguous_segments": contiguous_segments,
    "sgemm": sgemm,
    "plan_build": "ringlab.measure.cache_systems:plan_build",
    "cache_workload": "ringlab.measure.cache_systems:cache_workload",
    "pool_workload": "ringlab.measure.cache_systems:pool_workload",
    "generation": "ringlab.measure.model_systems:generation",
    "packed": "ringlab.measure.model_systems:packed",
    "flex": flex,
    "adaptive": adaptive,
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
    if (
        point.world_size > 1
        and point.system in SYSTEMS
        and point.system not in SEVERAL_RANKS
    ):
        raise Refused(
            f"{point.system} runs on one device, not on {point.world_size} ranks"
        )
    system = builder(point.first, device)
    return system if point.world_size == 1 else Sharded(system)
