"""Bytes that a rank sends in a call, and ``choose``, the scheme that sends the fewest;
rows that LongNet's ladder moves in closed form; how evenly ranks share work.

A row is one position of one K/V head.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from ..block_patterns import BlockSparse
from ..kernels.base import accumulation_dtype
from ..patterns import Branch
from .exchange import Problem, rows_moved
from .schemes import SCHEMES
from .ulysses import MeshScheme, head_share, mesh_of, shares


def sent_bytes(problem: Problem, rank: int, scheme: str | MeshScheme, **shape) -> int:
    """Bytes that a rank sends to all others in one call: the sum of ``sent_to``, whose
    batch, head_dim, dtype and passes are the ``shape``.

    >>> from ringlab.patterns import Dense
    >>> from ringlab.ring.layout import contiguous
    >>> problem = Problem(Dense(), contiguous(8, 2), False, 1, 1)
    >>> [sent_bytes(problem, 0, s, batch=1, head_dim=4, dtype=torch.float32) for s in ("plan", "ring", "all_gather")]
    [128, 128, 128]
    """
    return sum(sent_to(problem, rank, scheme, **shape).values())


def sent_to(
    problem: Problem,
    rank: int,
    scheme: str | MeshScheme,
    *,
    batch: int,
    head_dim: int,
    dtype: torch.dtype,
    passes: str = "fwd",
) -> dict[int, int]:
    """Bytes that a rank sends to each other in one call, where there are some, without
    what ranks compare before it.

    Gradients are fp32 or wider.
    """
    layout = problem.layout
    p = layout.ranks
    kv_heads = problem.kv_heads
    narrow = dtype.itemsize
    broad = accumulation_dtype(dtype).itemsize
    trains = passes == "fwd+bwd"
    sizes = layout.sizes
    others = [to for to in range(p) if to != rank]
    if (mesh := mesh_of(scheme, p)) is not None:
        share = head_share(problem, mesh, rank)
        queries, keys = (
            dict(zip(share.line, map(len, heads)))
            for heads in (share.queries, share.keys)
        )
        bytes_to = {}
        for to in share.line:
            results = sizes[to] * queries[rank]
            sent = (sizes[rank] * (queries[to] + 2 * keys[to]) + results) * narrow
            if trains:
                sent += (
                    sizes[rank] * queries[to] * narrow
                    + (results + 2 * sizes[to] * keys[rank]) * broad
                )
            # A log-sum-exp has no head_dim.
            bytes_to[to] = batch * (head_dim * sent + results * broad)
        del bytes_to[rank]
        if len(share.across) > 1:
            across = sent_to(
                share.problem,
                share.across.index(rank),
                mesh.other,
                batch=batch,
                head_dim=head_dim,
                dtype=dtype,
                passes=passes,
            )
            bytes_to |= {share.across[to]: size for to, size in across.items()}
        return {to: size for to, size in bytes_to.items() if size}
    # rows of K and of V forward, and rows of gradients back
    rows = Counter()
    gradients = Counter()
    if scheme == "plan":
        narrow = (problem.exchange_dtype or dtype).itemsize
        moved = rows_moved(problem)
        rows.update({to: moved[to][rank] for to in others})
        gradients.update({to: moved[rank][to] for to in others})
    elif scheme == "all_gather":
        rows.update({to: kv_heads * sizes[rank] for to in others})
        gradients.update({to: kv_heads * sizes[to] for to in others})
    elif scheme == "ring":
        # A shard at distance t from home is sent on where it goes further; its gradient
        # leaves every rank it reached, and the last of these sends it home.
        hops = problem.hops
        after = (rank + 1) % p
        for t in range(p):
            home = (rank - t) % p
            rows[after] += kv_heads * sizes[home] * (hops[home] > t)
            if t and hops[home] >= t:
                gradients[after if hops[home] > t else home] += kv_heads * sizes[home]
    else:
        raise ValueError(f"the bytes of the scheme {scheme!r} are not counted")
    again = scheme != "plan"  # the plan keeps the rows that it received
    per_row = 2 * batch * head_dim
    bytes_to = {
        to: per_row
        * (
            rows[to] * narrow * (1 + (again and trains))
            + trains * gradients[to] * broad
        )
        for to in rows.keys() | gradients.keys()
    }
    return {to: size for to, size in bytes_to.items() if size}


def bytes_by_scheme(
    problem: Problem, *, head_dim: int, dtype: torch.dtype, passes: str = "fwd"
) -> dict[str, int]:
    """Bytes that all ranks send in a call for a batch of 1, by scheme: the fewest
    first, which is what ``scheme="auto"`` takes.

    A gradient through lse, which widens what travels back, is not counted. Of equal
    ones first the scheme that shares work most evenly, then the ring, which
    holds the fewest rows, or the plan where nothing moves. Without ulysses where it
    leaves ranks without heads and another scheme serves. Raises ValueError if none does.

    >>> from ringlab.patterns import Dilated
    >>> from ringlab.ring.layout import contiguous
    >>> problem = Problem(Dilated([4, 16], [1, 4]), contiguous(16, 4), False, 4, 4)
    >>> bytes_by_scheme(problem, head_dim=8, dtype=torch.float32)
    {'plan': 3072, 'ulysses': 6336, 'ring': 12288, 'all_gather': 12288}
    """
    shape = {"head_dim": head_dim, "dtype": dtype, "passes": passes}
    refusals = problem.refusals()
    ranks = range(problem.layout.ranks)
    totals = {
        scheme: sum(sent_bytes(problem, r, scheme, batch=1, **shape) for r in ranks)
        for scheme in SCHEMES
        if scheme not in refusals
    }
    if not totals:
        raise ValueError(next(iter(refusals.values())))
    if problem.layout.ranks > problem.heads and len(totals) > 1:
        totals.pop("ulysses", None)

    def order(scheme: str) -> tuple:
        first = "ring" if totals[scheme] else "plan"
        return totals[scheme], unevenness(problem, scheme), scheme != first

    return {scheme: totals[scheme] for scheme in sorted(totals, key=order)}


def choose(
    problem: Problem, *, head_dim: int, dtype: torch.dtype, passes: str = "fwd"
) -> str:
    """The scheme that ``scheme="auto"`` takes: the first of ``bytes_by_scheme``."""
    shape = {"head_dim": head_dim, "dtype": dtype, "passes": passes}
    return next(iter(bytes_by_scheme(problem, **shape)))


class Moved(NamedTuple):
    """Rows per K/V head that the busiest rank receives in a forward pass."""

    seq_len: int
    ranks: int
    plan: int
    segment_gather: int
    world_gather: int
    ring: int


def ladder_rows(seq_len: int, ranks: int) -> Moved:
    """Rows received per rank and K/V head under LongNet's ladder, not causal, by four
    ways.

    The ladder is of segments 2048 * 2^i at rates 2^i, up to the whole sequence.
    ``plan``: each row once; ``segment_gather``: every branch gathers its segment
    (LongNet, arXiv 2307.02486); ``world_gather``: every branch that leaves the shard
    gathers from all ranks (torchscale); ``ring``: every shard, as an all-gather does.
    Raises ValueError where the closed forms do not hold.

    >>> ladder_rows(2**20, 8)
    Moved(seq_len=1048576, ranks=8, plan=3072, segment_gather=4352, world_gather=12544, ring=917504)
    """
    shard, rest = divmod(seq_len, ranks)
    if rest or any(n % 2048 or n.bit_count() != 1 for n in (shard, seq_len)):
        raise ValueError(
            f"{seq_len} positions on {ranks} ranks are no ladder of 2048 x 2^i"
        )
    if seq_len // 2048 > shard:
        raise ValueError(
            f"the sparsest rate, {seq_len // 2048}, is more than a shard of {shard}"
        )
    lengths = [
        shard << i for i in range(1, ranks.bit_length())
    ]  # of the branches that leave a shard
    rates = [length // 2048 for length in lengths]
    # A branch's rows lie among those of a denser one as far as that one's segment
    # reaches.
    plan = sum(length // 2 // rate for length, rate in zip(lengths, rates))
    gathered = sum((length - shard) // rate for length, rate in zip(lengths, rates))
    world = sum((seq_len - shard) // rate for rate in rates)
    return Moved(seq_len, ranks, plan, gathered, world, seq_len - shard)


def unevenness(problem: Problem, scheme: str) -> float:
    """Pairs that the busiest rank computes over the average; 1 where they are not
    counted (blocks, stripes).

    >>> from ringlab.patterns import Dense
    >>> from ringlab.ring import contiguous, zigzag
    >>> [unevenness(Problem(Dense(), layout(16, 2), True, 2, 2), "ring") for layout in (contiguous, zigzag)]
    [1.4705882352941178, 1.0]
    """
    if isinstance(problem.pattern, BlockSparse) or problem.layout.kind == "striped":
        return 1.0
    ranks = range(problem.layout.ranks)
    everyone = range(problem.heads)
    if scheme == "ulysses":
        queries, _ = shares(problem.heads, problem.kv_heads, len(ranks))
        parts = [(heads, [range(problem.layout.n)]) for heads in queries]
    else:
        parts = [(everyone, problem.layout.ranges(rank)) for rank in ranks]
    work = [
        sum(
            _before(b, offset, r.stop, problem) - _before(b, offset, r.start, problem)
            for b in problem.branches
            for head, offset in zip(b.heads, b.offsets)
            if head in heads
            for r in ranges
        )
        for heads, ranges in parts
    ]
    return max(work) * len(ranks) / sum(work)


def _before(branch: Branch, offset: int, stop: int, problem: Problem) -> int:
    """Pairs of the queries before position ``stop``, in one head of a branch."""
    segments, rest = divmod(stop, branch.length)
    last = min(
        branch.length, problem.layout.n - segments * branch.length
    )  # of the segment that is cut
    segment, queries, keys = (
        len(range(offset, end, branch.rate)) for end in (branch.length, rest, last)
    )
    if problem.causal:
        return segments * segment * (segment + 1) // 2 + queries * (queries + 1) // 2
    return segments * segment**2 + queries * keys
