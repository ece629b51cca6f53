"""The schemes by name, which of them "auto" takes, and one rank's part in a forward or backward by one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .. import kernels, patterns
from . import schemes, ulysses
from .plan import Problem
from .rank import BlockRank, Rank

SCHEMES = {
    "plan": (schemes.plan_forward, schemes.plan_backward),
    "ring": (schemes.ring_forward, schemes.ring_backward),
    "all_gather": (schemes.all_gather_forward, schemes.all_gather_backward),
    "ulysses": (ulysses.ulysses_forward, ulysses.ulysses_backward),
}


@dataclass(frozen=True)
class Choice:
    """The scheme that ``scheme="auto"`` takes, and why."""

    scheme: str
    why: str


def choose(problem: Problem) -> Choice:
    """The scheme that moves the fewest K/V bytes forward; the ring where equal, as it holds the fewest rows.

    >>> from .layout import contiguous
    >>> choose(Problem(patterns.Dilated([4, 16], [1, 4]), contiguous(16, 4), False, 4, 4)).scheme
    'plan'
    """
    p, heads, kv_heads = problem.layout.ranks, problem.heads, problem.kv_heads
    kind = "block-sparse" if isinstance(problem.pattern, patterns.BlockSparse) else "dilated"
    if p == 1:
        return Choice("plan" if kind == "block-sparse" else "ring", "one rank has all rows, and nothing moves")
    if not isinstance(problem.pattern, patterns.Dense):
        if problem.layout.kind == "striped":
            return Choice("ulysses", f"a {kind} pattern over stripes needs whole sequences")
        return Choice("plan", f"a {kind} pattern shows few foreign rows, and the plan moves just these")
    ring, heads_moved = 2 * kv_heads * (p - 1), (2 * heads + 2 * kv_heads) * (p - 1) / p
    if p <= heads and heads_moved < ring:
        return Choice("ulysses", f"exchanging heads moves {heads_moved / ring:.2f} of what passing K and V on does")
    return Choice("ring", f"exchanging heads would move {heads_moved / ring:.2f} of what passing K and V on does")


def rank_of(problem: Problem, rank: int, q: Tensor, scale: float, backend, backward: bool, execution) -> Rank:
    """Rank number ``rank`` of a problem with the kernel for tensors like q."""
    found = kernels.choose(q.device, q.dtype, q.shape[3], causal=problem.causal, backward=backward, backend=backend)
    kind = BlockRank if isinstance(problem.pattern, patterns.BlockSparse) else Rank
    return kind(problem, rank, execution.tiled(found.kernel), scale, execution)


def forward_of(rank: Rank, scheme: str, q, k, v, run: Callable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse and what the backward needs of others' rows (up to two tensors); ``run`` drives a rank's steps."""
    out, lse, *kept = run(SCHEMES[scheme][0](rank, q, k, v))
    kept += [q.new_empty(0) for _ in range(2 - len(kept))]
    return out.contiguous(), lse.contiguous(), *kept


def backward_of(rank: Rank, scheme: str, dout, dlse, q, k, v, out, lse, kept, more, run: Callable):
    """dq, dk, dv in q's dtype; ``kept`` and ``more`` are those of the forward."""
    extra = {"plan": (kept,), "ulysses": (kept, more)}.get(scheme, ())
    grads = run(SCHEMES[scheme][1](rank, dout, dlse, q, k, v, out, lse, *extra))
    return tuple(g.to(q.dtype).contiguous() for g in grads)
