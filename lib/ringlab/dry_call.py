"""One call of attention, all but its length, run without data: on one device, or each of several ranks alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from . import bsr, cost, flex, fused, hardware, local
from .checks import LARGEST, flag, float_dtype, known, one_device, positive, shown
from .dryrun import Cold, DryRun, kernel_for
from .kernels.base import Described, wants_dtype
from .local import Execution
from .patterns import BlockSparse, Pattern
from .ring import Problem, choose
from .ring.layout import named
from .ring.passes import SCHEMES, backward_of, forward_of
from .ring.rank import BlockRank, Rank
from .ring.ranks import one_by_one

MOST_ELEMENTS = 2**58  # bytes of several such tensors are still counted in 64 bits


@dataclass(frozen=True)
class Call:
    """All of a call but its length, checked."""

    pattern: Pattern
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    passes: str
    ranks: int
    scheme: str
    layout: object
    backend: str | tuple[str, ...]
    execution: Execution
    profile: hardware.Profile | None

    def __post_init__(self):
        for name in ("batch", "heads", "kv_heads", "head_dim", "ranks"):
            positive(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(f"query heads must be a multiple of K/V heads: {self.heads} and {self.kv_heads}")
        float_dtype(self.dtype)
        if not isinstance(self.pattern, Pattern):
            raise ValueError(f"pattern must be a ringlab pattern, got {type(self.pattern).__name__}")
        if not isinstance(self.execution, Execution):
            raise TypeError(f"execution must be a ringlab.Execution, got {shown(self.execution)}")
        if not isinstance(self.profile, hardware.Profile | None):
            raise TypeError(f"profile must be a hardware profile or its name, got {shown(self.profile)}")
        known("passes", self.passes, cost.PASSES)
        flag("causal", self.causal)
        if self.ranks == 1:
            one_device(self.scheme, self.layout)

    @property
    def device_type(self) -> str:
        return self.profile.kind if self.profile else "cpu"

    @cached_property
    def kernel(self):
        capability = self.profile and self.profile.capability
        return kernel_for(self.device_type, capability, self.dtype, self.head_dim, causal=self.causal,
                          backward=self.passes != "fwd", backend=self.backend)  # fmt: skip

    def at(self, n: int) -> tuple[DryRun, str | None, str]:
        """(the run of the rank that holds most, with the traffic of all; the scheme; why it may hold more)."""
        positive("seq_len", n, most=LARGEST)
        positive("batch * seq_len * heads * head_dim", self.batch * n * self.heads * self.head_dim, most=MOST_ELEMENTS)
        if self.ranks > 1:
            one_by_one(self.execution, self.ranks)
            return *self.shared(named(self.layout, n, self.ranks)), ""
        if self.execution.merge == "fused":
            have = self.profile and self.profile.capability
            fused.check(Described(self.device_type, have or (8, 0)), self.dtype, self.pattern)
        run = DryRun()
        rest = self.pattern, self.causal, self.head_dim**-0.5, "auto", Cold.of(self.execution, run)
        with torch.no_grad(), run.on(self.kernel, self.device_type):
            q, k, v, dout = self.inputs(run, n)
            if isinstance(self.pattern, BlockSparse) and (way := self.execution.blocks) in ("bsr", "flex"):
                self.outside(run, way, q, k, dout)
                return run, None, f"blocks={way!r} does not run without data"
            out, lse = local._Attention.forward(q, k, v, *rest)
            run.name("out", out)
            run.name("lse", lse)
            if dout is not None:
                grads = local._Gradients.forward(dout, None, q, k, v, out, lse, *rest)
                run.name("gradients", *grads)
        return run, None, ""

    def inputs(self, run: DryRun, rows: int):
        """q, k, v, and dout for a backward, else None."""
        shapes = [(self.batch, rows, h, self.head_dim) for h in (self.heads, self.kv_heads, self.kv_heads)]
        made = [run.tensor(part, shape, self.dtype) for part, shape in zip("qkv", shapes)]
        return *made, run.tensor("gradients", shapes[0], self.dtype) if self.passes != "fwd" else None

    def outside(self, run: DryRun, way: str, q, k, dout) -> None:
        """A lower bound: inputs, results, and for torch.sparse, which needs data to run, one head's probabilities."""
        if why := wants_dtype(self.dtype, flex.DTYPES if way == "flex" else bsr.DTYPES):
            raise NotImplementedError(f"blocks={way!r} {why}")
        seen, size = self.pattern.blocks(q.shape[1]), self.pattern.block_size
        held = int((seen.tril() if self.causal else seen).sum()) * size * size if way == "bsr" else 0
        del seen
        made = [run.tensor("out", q.shape, q.dtype), run.tensor("lse", q.shape[:3], q.dtype)]
        made += [run.tensor("workspace", (held,), q.dtype)]
        made += [run.tensor("gradients", t.shape, t.dtype) for t in (q, k, k)] if dout is not None else []

    def shared(self, layout) -> tuple[DryRun, str]:
        """(run of the rank that holds most, scheme)."""
        problem = Problem(self.pattern, layout, self.causal, self.heads, self.kv_heads)
        known("scheme", self.scheme, ("auto", *SCHEMES))
        scheme = choose(problem).scheme if self.scheme == "auto" else self.scheme
        problem.check(scheme)
        runs = [self.rank(problem, scheme, rank) for rank in range(layout.ranks)]
        most = max(runs, key=lambda run: run.peak_bytes)
        most.traffic.sent = {link: size for run in runs for link, size in run.traffic.sent.items()}
        return most, scheme

    def rank(self, problem: Problem, scheme: str, number: int) -> DryRun:
        """One rank of several, alone."""
        run = DryRun()
        execution = Cold.of(self.execution, run)
        kind = BlockRank if isinstance(self.pattern, BlockSparse) else Rank
        with torch.no_grad(), run.on(self.kernel, self.device_type):
            q, k, v, dout = self.inputs(run, problem.layout.size(number))
            rank = kind(problem, number, execution.tiled(self.kernel), self.head_dim**-0.5, execution)

            def drive(steps, parts=()):
                found = run.drive(steps, number)
                for part, t in zip(parts, found):  # before they are made contiguous
                    run.name(part, t)
                return found

            names = "out", "lse", "received", "received"
            out, lse, kept, more = forward_of(rank, scheme, q, k, v, lambda steps: drive(steps, names))
            for part, t in (("out", out), ("lse", lse), ("received", kept), ("received", more)):
                run.name(part, t)
            if dout is not None:
                run.name("gradients", *backward_of(rank, scheme, dout, None, q, k, v, out, lse, kept, more, drive))
        return run
