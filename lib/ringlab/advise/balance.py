"""How evenly ranks share the work: pairs of their queries, counted branch by branch."""

from __future__ import annotations

from ..patterns import BlockSparse, Branch
from ..ring import Problem
from ..ring.ulysses import shares


def unevenness(problem: Problem, scheme: str) -> float:
    """Pairs that the busiest rank computes over the average; 1 where they are not counted (blocks, stripes).

    >>> from ringlab.patterns import Dense
    >>> from ringlab.ring import contiguous, zigzag
    >>> [unevenness(Problem(Dense(), layout(16, 2), True, 2, 2), "ring") for layout in (contiguous, zigzag)]
    [1.4705882352941178, 1.0]
    """
    if isinstance(problem.pattern, BlockSparse) or problem.layout.kind == "striped":
        return 1.0
    ranks, everyone = range(problem.layout.ranks), range(problem.heads)
    if scheme == "ulysses":
        parts = [(share.queries, [range(problem.layout.n)])
                 for share in shares(problem.heads, problem.kv_heads, len(ranks))]  # fmt: skip
    else:
        parts = [(everyone, problem.layout.ranges(rank)) for rank in ranks]
    work = [
        sum(_before(b, offset, r.stop, problem) - _before(b, offset, r.start, problem)
            for b in problem.branches for head, offset in zip(b.heads, b.offsets) if head in heads for r in ranges)
        for heads, ranges in parts
    ]  # fmt: skip
    return max(work) * len(ranks) / sum(work)


def _before(branch: Branch, offset: int, stop: int, problem: Problem) -> int:
    """Pairs of the queries before position ``stop``, in one head of a branch."""
    n, length, rate = problem.layout.n, branch.length, branch.rate

    def kept(positions: int) -> int:
        return max(0, -(-(positions - offset) // rate))

    whole, rest = divmod(stop, length)
    last = min(length, n - whole * length)  # of the segment that is cut
    if problem.causal:
        return whole * kept(length) * (kept(length) + 1) // 2 + kept(rest) * (kept(rest) + 1) // 2
    return whole * kept(length) ** 2 + kept(rest) * kept(last)
