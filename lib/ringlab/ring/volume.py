"""How much a rank sends and receives: by scheme from a plan, and in closed form for any length and number of ranks.

Rows are positions of one K/V head. The closed forms are those of a nested ladder: segments w, w a, w a^2, ... at rates
1, a, a^2, ... up to n, shards of a power of a times w, and every rate at most a shard.

How evenly ranks share the work: pairs of their queries, counted branch by branch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..block_patterns import BlockSparse
from ..kernels.base import accumulation_dtype
from ..patterns import Branch
from .exchange import Problem, plan_rank
from .schemes import shares


def sent_bytes(
    problem: Problem, rank: int, scheme: str, *, batch: int, head_dim: int, dtype: torch.dtype, passes: str = "fwd"
) -> int:
    """Bytes that a rank sends to others in one call, gradients in ``wide(dtype)``; without what ranks agree on first.

    >>> from ringlab.patterns import Dense
    >>> from ringlab.ring.layout import contiguous
    >>> problem = Problem(Dense(), contiguous(8, 2), False, 1, 1)
    >>> [sent_bytes(problem, 0, s, batch=1, head_dim=4, dtype=torch.float32) for s in ("plan", "ring", "all_gather")]
    [128, 128, 128]
    """
    narrow, broad = dtype.itemsize, accumulation_dtype(dtype).itemsize
    forward, gradients = _ulysses(problem, rank, broad, narrow) if scheme == "ulysses" else _rows(problem, rank, scheme)
    if scheme == "ulysses":  # elements per position and head, and log-sum-exps, which have no head_dim
        (vectors, scalars), back = forward, gradients
        return batch * (head_dim * vectors + scalars + (head_dim * back if passes == "fwd+bwd" else 0))
    again = 0 if scheme == "plan" else forward  # the plan keeps the rows that it received
    backward = again * narrow + gradients * broad if passes == "fwd+bwd" else 0
    return 2 * batch * head_dim * (forward * narrow + backward)


def _rows(problem: Problem, rank: int, scheme: str) -> tuple[int, int]:
    """(rows sent forward, rows of gradients sent back)."""
    layout, p, heads = problem.layout, problem.layout.ranks, problem.kv_heads
    if scheme == "plan":
        plan = plan_rank(problem, rank)
        return sum(plan.sent), sum(plan.received)
    sizes = [layout.size(j) * heads for j in range(p)]
    if scheme == "all_gather":
        return (p - 1) * sizes[rank], sum(sizes) - sizes[rank]
    hops = _hops(problem)
    # A shard at distance t from home is sent on where it goes further; its gradient leaves every rank that it reached.
    forward = sum(sizes[(rank - t) % p] for t in range(p) if hops[(rank - t) % p] > t)
    gradients = sum(sizes[(rank - t) % p] for t in range(1, p) if hops[(rank - t) % p] >= t)
    return forward, gradients


_hops = lru_cache(maxsize=64)(Problem.hops)


def _ulysses(problem: Problem, rank: int, broad: int, narrow: int) -> tuple[tuple[int, int], int]:
    """((bytes per head_dim, bytes of log-sum-exps) forward, bytes per head_dim backward), to others."""
    layout, share = problem.layout, shares(problem.heads, problem.kv_heads, problem.layout.ranks)
    mine, own, foreign = share[rank], layout.size(rank), layout.n - layout.size(rank)
    queries = sum(len(s.queries) for j, s in enumerate(share) if j != rank)
    keys = sum(len(s.keys) for j, s in enumerate(share) if j != rank)
    out = foreign * len(mine.queries)
    forward = own * (queries + 2 * keys) * narrow + out * narrow
    grads = foreign * (len(mine.queries) + 2 * len(mine.keys)) * broad
    return (forward, out * broad), own * queries * narrow + grads


@dataclass(frozen=True)
class Moved:
    """Rows per K/V head that the busiest rank receives in a forward pass."""

    seq_len: int
    ranks: int
    plan: int
    segment_gather: int
    world_gather: int
    ring: int


def ladder_rows(seq_len: int, ranks: int, segment: int = 2048, step: int = 2) -> Moved:
    """Rows received per rank and K/V head under a ladder, not causal, by four ways.

    ``plan``: each row once; ``segment_gather``: every branch gathers its segment (LongNet, arXiv 2307.02486);
    ``world_gather``: every branch that leaves the shard gathers from all ranks (torchscale); ``ring``: every shard, as
    an all-gather does. Raises ValueError where the closed forms do not hold.

    >>> ladder_rows(2**20, 8)
    Moved(seq_len=1048576, ranks=8, plan=3072, segment_gather=4352, world_gather=12544, ring=917504)
    """
    shard, rest = divmod(seq_len, ranks)
    if rest or not _power(shard, segment, step) or not _power(seq_len, segment, step):
        raise ValueError(f"{seq_len} positions on {ranks} ranks are no ladder of {segment} x {step}^i")
    if seq_len // segment > shard:
        raise ValueError(f"the sparsest rate, {seq_len // segment}, is more than a shard of {shard}")
    lengths = [shard * step**i for i in range(1, _log(ranks, step) + 1)]  # of the branches that leave a shard
    rates = [length // segment for length in lengths]
    # A branch's rows lie among those of a denser one as far as that one's segment reaches.
    plan = sum((length - length // step) // rate for length, rate in zip(lengths, rates))
    gathered = sum((length - shard) // rate for length, rate in zip(lengths, rates))
    world = sum((seq_len - shard) // rate for rate in rates)
    return Moved(seq_len, ranks, plan, gathered, world, seq_len - shard)


def ladder_table(sizes: Iterable[tuple[int, int]], segment: int = 2048, step: int = 2) -> list[Moved]:
    """``ladder_rows`` of each (seq_len, ranks).

    >>> [(m.plan, m.ring) for m in ladder_table([(2**17, 8), (2**24, 512)])]
    [(3072, 114688), (9216, 16744448)]
    """
    return [ladder_rows(n, p, segment, step) for n, p in sizes]


def _log(value: int, base: int) -> int:
    exponent = 0
    while base**exponent < value:
        exponent += 1
    return exponent


def _power(value: int, first: int, step: int) -> bool:
    """Whether ``value`` is ``first`` times a power of ``step``."""
    return value % first == 0 and step ** _log(value // first, step) == value // first


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
