"""Passes of the compiled kernel over the tables of a pattern, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.compiled import Walk, in_rows
from ..memory import MemoryPool
from ..patterns import Pattern
from ..tiles.patterns import tables_of

if TYPE_CHECKING:
    from .ways import LocalCall


def forward(
    walks: Sequence[Walk],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    covered: bool,
    results: MemoryPool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (b, n, h, d) in q's dtype and fp32 lse (b, h, n) of walks that
    continue each other. ``covered``: every row is in a tile. ``results`` lends out.
    """
    make = torch.empty if results is None else results.lend
    out = make(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not covered:
        out.zero_()
        lse.fill_(-torch.inf)
    lse = lse.transpose(1, 2)
    for i, walk in enumerate(walks):
        walk.forward(q, k, v, out, lse, merge=i > 0)
    return out, lse


def backward(
    walks: Sequence[Walk],
    dlse,
    reads,
    dweights: Tensor | None = None,
    pool: MemoryPool | None = None,
) -> list[Tensor]:
    """Return dq, in q's dtype, and fp32 dk, dv for ``reads``, which are (dout, q, k, v,
    out, lse). ``pool`` lends dk and dv.
    """
    *reads, lse = reads
    dtype = reads[1].dtype
    dout, q, k, v, out = (in_rows(t.to(dtype)) for t in reads)
    make = torch.empty if pool is None else pool.lend
    made = {"dtype": torch.float32, "device": q.device}
    grads = [torch.zeros(q.shape, dtype=dtype, device=q.device)]
    grads += [make(t.shape, **made).zero_() for t in (k, v)]
    for i, walk in enumerate(walks):
        walk.backward(dout, dlse, q, k, v, out, lse, grads, dweights, add=i > 0)
    return grads


def flat(t: Tensor) -> Tensor:
    """t (b, n, h, d) as (1, b * n, h, d)."""
    return in_rows(t.reshape(1, -1, *t.shape[2:]))


def flat_lse(lse: Tensor | None) -> Tensor | None:
    """lse (b, h, n), or its gradient, as fp32 (1, h, b * n)."""
    if lse is None:
        return None
    b, heads, n = lse.shape
    return lse.float().transpose(1, 2).reshape(1, b * n, heads).transpose(1, 2)


def unflat_lse(lse: Tensor, batch: int) -> Tensor:
    """lse (1, h, b * n) as (b, h, n)."""
    return lse.transpose(1, 2).unflatten(1, (batch, -1)).squeeze(0).transpose(1, 2)


@dataclass(frozen=True)
class Walked:
    """The compiled kernel walks the pattern's tables."""

    pattern: Pattern
    causal: bool
    softcap: float | None = None
    takes_dlse = True

    def forward(self, inputs, scale: float, call: LocalCall):
        q, k, v = inputs
        documents = call.documents
        results = call.execution.results_of(q)
        if documents is not None:
            q, k, v = map(flat, inputs)
        walks, covered = self._walks(q, k, scale, call)
        out, lse = forward(walks, q, k, v, covered, results)
        if documents is not None:
            return out.view(inputs[0].shape), unflat_lse(lse, len(inputs[0]))
        return out, lse

    def backward(self, dlse, reads, scale: float, call: LocalCall):
        dtype = reads[1].dtype
        shapes = [t.shape for t in reads[1:4]]
        if call.documents is not None:
            *reads, lse = reads
            dlse = flat_lse(dlse)
            lse = flat_lse(lse)
            reads = *map(flat, reads), lse
        walks, _ = self._walks(*reads[1:3], scale, call)
        # In fp32 they are results, which a pool does not lend.
        pool = None if dtype == torch.float32 else call.execution.scratch()
        grads = backward(walks, dlse, reads, pool=pool)
        return [grad.view(shape).to(dtype) for grad, shape in zip(grads, shapes)]

    def _walks(self, q, k, scale: float, call: LocalCall) -> tuple[list[Walk], bool]:
        """The walks of the tables, and whether every row of q is in a tile of the
        first.
        """
        spans = None if call.documents is None else call.documents.rows
        sizes = *q.shape[:3], *k.shape[1:3]
        plan = self.pattern, sizes, self.causal, spans, q.dtype != torch.float32

        def build():
            tables, covered = tables_of(*plan)
            return [Walk(table, scale, self.softcap) for table in tables], covered

        return call.execution.cached(("walks", *plan, scale, self.softcap), build)
