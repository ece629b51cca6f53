"""All ranks simulated in one process: the same steps, with messages handed over instead of sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import local
from ..checks import positive
from .comm import simulate
from .passes import SCHEMES, rank_of


@dataclass(frozen=True)
class Simulated:
    """``ranks`` simulated in this process: q, k, v are whole, sharded inside, and the result is whole."""

    ranks: int

    def __post_init__(self):
        positive("ranks", self.ranks)


class Simulation(torch.autograd.Function):
    """All ranks in this process, in step."""

    @staticmethod
    def forward(ctx, q, k, v, problem, scheme, scale, backend, execution):
        layout, (flip, positive) = problem.layout, local.positive_scale(scale)
        needs = any(ctx.needs_input_grad)
        ranks = [rank_of(problem, i, q, positive, backend, needs, execution) for i in range(layout.ranks)]
        shards = [[layout.shard(t, i) for t in (flip(q), k, v)] for i in range(layout.ranks)]
        found = simulate([SCHEMES[scheme][0](r, *mine) for r, mine in zip(ranks, shards)])
        out, lse = (layout.unshard([each[i] for each in found], dim) for i, dim in ((0, 1), (1, 2)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *(t for each in found for t in each[2:]))
        ctx.rest = ranks, SCHEMES[scheme][1], flip
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, out, lse, *kept = ctx.saved_tensors
        ranks, backward, flip = ctx.rest
        layout, size = ranks[0].problem.layout, len(kept) // len(ranks)
        dout = torch.zeros_like(out) if dout is None else dout
        steps = []
        for i, rank in enumerate(ranks):
            mine = [layout.shard(t, i) for t in (flip(q), k, v, out)]
            g = None if dlse is None else layout.shard(dlse, i, 2)
            more = (layout.shard(lse, i, 2), *kept[size * i : size * (i + 1)])
            steps.append(backward(rank, layout.shard(dout, i), g, *mine, *more))
        grads = simulate(steps)
        dq, dk, dv = (layout.unshard([each[i] for each in grads]).to(q.dtype) for i in range(3))
        return flip(dq), dk, dv, None, None, None, None, None
