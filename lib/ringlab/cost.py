"""FLOPs, bytes and pairs of an attention call, and how sizes and times are written.

A pair is one (query, key, head) that a pattern shows, per batch entry. The forward pass
does two matrix products over the pairs (4 d FLOPs each), the backward five (10 d), Dao
et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm

import torch

from .block_patterns import BlockSparse
from .checks import check_choice
from .patterns import Dilated, Pattern

PASSES = {"fwd": 4, "fwd+bwd": 14}  # FLOPs per pair and per head_dim
ARGUMENTS = (  # of ``count``, besides the pattern
    "batch",
    "seq_len",
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "causal",
    "passes",
)
MOST_CELLS = 2**25  # intervals that one count looks at: a second or two
TERM_CELLS = 2**11  # what any term of a count takes at least
LONGEST_IRREGULAR = 2**31  # products of two positions stay below 2**63


@dataclass(frozen=True)
class Cost:
    """Counts for one call: ``pairs`` branch by branch, ``distinct_pairs`` with each
    visible pair once (folded).

    ``flops`` follow from ``pairs``, ``folded_flops`` from ``distinct_pairs``.
    ``floor_bytes``: every input and output is read or written once.
    """

    pairs: int
    distinct_pairs: int
    flops: int
    folded_flops: int
    floor_bytes: int

    def seconds(self, flops_per_s: float | None, bytes_per_s: float | None) -> float:
        """Roofline time: the larger of folded FLOPs and floor bytes over the device's
        rates; 0 if both are unknown.
        """
        compute = self.folded_flops / flops_per_s if flops_per_s else 0.0
        memory = self.floor_bytes / bytes_per_s if bytes_per_s else 0.0
        return max(compute, memory)


def count(
    pattern: Pattern,
    *,
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool = False,
    passes: str = "fwd",
) -> Cost:
    """Count pairs, FLOPs and bytes of ``attention`` on (batch, seq_len, heads,
    head_dim) tensors.

    Raises ValueError for ``passes`` other than "fwd" and "fwd+bwd", and as
    ``count_pairs`` does.

    >>> from ringlab.patterns import Dense
    >>> c = count(Dense(), batch=1, seq_len=8, heads=2, head_dim=4, dtype=torch.float32)
    >>> c.pairs, c.flops, c.floor_bytes
    (128, 2048, 1024)
    """
    check_choice("passes", passes, PASSES)
    kv_heads = heads if kv_heads is None else kv_heads
    pairs, distinct = count_pairs(pattern, seq_len, heads, kv_heads, causal)
    pairs, distinct = batch * pairs, batch * distinct
    rate = PASSES[passes] * head_dim
    # q, out and k, v; the backward adds dO, dq and dk, dv
    rows = (2 * heads + 2 * kv_heads) * (1 if passes == "fwd" else 2)
    return Cost(
        pairs,
        distinct,
        rate * pairs,
        rate * distinct,
        rows * batch * seq_len * head_dim * dtype.itemsize,
    )


def count_pairs(
    pattern: Pattern,
    n: int,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = False,
):
    """(sum of M, number of pairs with M > 0) over one sequence of ``n`` positions and
    all heads.

    Raises ValueError in one line for a dilated pattern whose pairs take too long to
    count.

    >>> from ringlab.patterns import Dilated
    >>> count_pairs(Dilated([2048, 4096, 8192], [1, 2, 4]), 8192, 4)
    (117440512, 92274688)
    """
    if isinstance(pattern, BlockSparse):
        pairs = heads * pattern.pairs(n, causal)
        return pairs, pairs
    pairs = distinct = 0
    for number, branches, terms in _terms(pattern, n, heads, kv_heads):
        pairs += number * sum(branch.pairs(n, causal) for branch in branches)
        distinct += number * sum(
            times * term.pairs(n, causal) for term, times in terms.items()
        )
    return pairs, distinct


def far_queries(
    pattern: Pattern,
    n: int,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = False,
) -> int:
    """How many of ``n`` queries see a key at least half the sequence away, which is
    ``n // 2`` positions, in some head.

    One such key is enough. Dense attention: all ``n``. A window that is shorter than
    half the sequence: none. With ``causal`` the key lies before the query, so half of
    the queries at most.

    >>> from ringlab.patterns import Dilated
    >>> longnet = Dilated([2048 << i for i in range(10)], [1 << i for i in range(10)])
    >>> far_queries(longnet, 2**20, heads=8) / 2**20
    0.015625
    """
    far = n // 2
    if isinstance(pattern, Dilated):
        positions = set()
        for branch in pattern.branches(n, heads, kv_heads):
            steps = -(-far // branch.rate)
            for offset in set(branch.offsets):
                # Of the first segment: the later ones are too short.
                rows = range(offset, branch.length, branch.rate)
                positions.update(rows[steps:])
                if not causal:
                    positions.update(rows[::-1][steps:])
        return len(positions)
    if not isinstance(pattern, BlockSparse):
        return n - far * causal
    number = 0
    size = pattern.block_size
    for rows, cols, seen in pattern.chunks(n):
        if len(cols):
            # Of each block (r,): its positions, and those of the keys that it sees.
            first = rows * size
            stop = (first + size).clamp(max=n)
            start = torch.where(seen, cols * size, n).amin(1)
            end = torch.where(seen, cols * size + size, 0).amax(1).clamp(max=n)
            # The queries between these two are too near to all keys that they see.
            ahead = first if causal else torch.maximum(first, end - far)
            back = torch.minimum(stop, start + far)
            number += int((stop - first - (back - ahead).clamp(min=0)).sum())
    return number


@dataclass(frozen=True)
class PairSet:
    """A set of pairs: the rows that are ``offset`` mod ``rate``, where no multiple of
    any of ``cuts`` lies between.

    ``irregular`` branches (length, rate, offset), whose rate does not divide their
    length, restrict the rows further: to those whose place in their segment of that
    length is ``offset`` mod ``rate``. Their lengths are multiples of one of ``cuts``.
    """

    cuts: frozenset[int]
    rate: int
    offset: int
    irregular: frozenset[tuple[int, int, int]] = frozenset()

    @classmethod
    def of(cls, length: int, rate: int, offset: int, n: int) -> PairSet:
        """The pairs of one branch over ``n`` positions."""
        if length >= n:
            return cls(frozenset(), rate, offset)
        if length % rate == 0:
            return cls(frozenset({length}), rate, offset)
        return cls(frozenset({length}), 1, 0, frozenset({(length, rate, offset)}))

    def __and__(self, other: PairSet) -> PairSet | None:
        """The pairs in both; None where they have no row in common."""
        between = other.offset - self.offset
        common = gcd(self.rate, other.rate)
        if between % common:
            return None
        step = other.rate // common
        offset = self.offset + self.rate * (
            between // common * pow(self.rate // common, -1, step) % step
        )
        cuts = self.cuts | other.cuts
        cuts = frozenset(
            c for c in cuts if not any(c % each == 0 for each in cuts - {c})
        )
        return PairSet(cuts, self.rate * step, offset, self.irregular | other.irregular)

    def period(self, n: int) -> int:
        """After how many positions the pairs repeat, at most ``n``."""
        return (
            min(
                n,
                lcm(
                    self.rate, *self.cuts, *(length for length, _, _ in self.irregular)
                ),
            )
            if self.cuts
            else n
        )

    def cells(self, n: int) -> int:
        """How many intervals between cuts ``pairs`` looks at, about."""
        span = self.period(n)
        if self.irregular and span > LONGEST_IRREGULAR:
            return MOST_CELLS
        return TERM_CELLS + sum(-(-span // cut) for cut in self.cuts)

    def pairs(self, n: int, causal: bool) -> int:
        """The number of pairs over ``n`` positions; with ``causal``, of those whose key
        is not after the query.
        """
        whole, rest = divmod(n, self.period(n))
        return whole * self._in_span(self.period(n), causal) + (
            self._in_span(rest, causal) if rest else 0
        )

    def _in_span(self, n: int, causal: bool) -> int:
        edges = torch.cat(
            [torch.tensor([0, n]), *(torch.arange(0, n, cut) for cut in self.cuts)]
        ).unique()
        start, stop = edges[:-1], edges[1:]  # (cells,)
        rate = self.rate  # the rows of a cell are ``row`` mod ``rate``
        row = torch.full_like(start, self.offset)
        possible = torch.ones_like(start, dtype=torch.bool)
        for (
            length,
            other,
            offset,
        ) in self.irregular:  # joined by the Chinese remainder theorem
            between = start // length * length + offset - row
            # With one row at most, it is kept or not.
            common = other if rate >= n else gcd(rate, other)
            step = other // common
            possible &= between % common == 0
            row = row + rate * (
                between // common % step * pow(rate // common, -1, step) % step
            )
            rate *= step
        rows = ((stop - 1 - row) // rate - (start - 1 - row) // rate) * possible
        sizes, times = rows.unique(return_counts=True)
        return sum(
            t * (m * (m + 1) // 2 if causal else m * m)
            for m, t in zip(sizes.tolist(), times.tolist())
        )


def _terms(
    pattern: Pattern, n: int, heads: int, kv_heads: int | None
) -> Iterator[tuple[int, list, Counter]]:
    """For heads that see alike: their number, their branches as ``PairSet``, and the
    terms of inclusion-exclusion.

    The pairs that any branch shows are the sum of the terms' pairs, each times its
    count. Equal intersections are joined, so a ladder of b nested branches has 2 b - 1
    terms and not 2**b. Raises ValueError for too many.
    """
    branches = pattern.branches(n, heads, kv_heads)
    groups = Counter(
        tuple(
            sorted(
                (b.length, b.rate, b.offsets[b.heads.index(head)])
                for b in branches
                if head in b.heads
            )
        )
        for head in range(heads)
    )
    cells = 0
    for key, number in groups.items():
        shown = [PairSet.of(*branch, n) for branch in key]
        terms: Counter[PairSet] = Counter()
        for one in shown:
            joined = Counter(terms)
            joined[one] += 1
            for term, times in terms.items():
                if (both := term & one) is not None:
                    joined[both] -= times
            terms = Counter({term: times for term, times in joined.items() if times})
            if cells + len(terms) * TERM_CELLS > MOST_CELLS:
                break
        cells += sum(term.cells(n) for term in terms)
        if cells > MOST_CELLS:
            raise ValueError(
                f"{len(key)} branches that do not nest have too many pairs in common to count over {n:,} positions: "
                "take lengths that divide each other, or a shorter sequence"
            )
        yield number, shown, terms


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units, never in exponent form.

    >>> format_bytes(8 * 2**30), format_bytes(3 * 2**19), format_bytes(7), format_bytes(2**44)
    ('8 GiB', '1.5 MiB', '7 B', '16,384 GiB')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{_plain(nbytes / factor, 4)} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A time in the unit that suits it, never in exponent form.

    >>> format_seconds(0.0213), format_seconds(75.0), format_seconds(4321.0), format_seconds(2.5e-7)
    ('21.3 ms', '75 s', '72 min', '0.25 µs')
    """
    for least, factor, unit in (
        (7200, 3600, "h"),
        (300, 60, "min"),
        (1, 1, "s"),
        (1e-3, 1e-3, "ms"),
    ):
        if seconds >= least:
            return f"{_plain(seconds / factor, 3)} {unit}"
    return f"{_plain(seconds * 1e6, 3)} µs"


def _plain(x: float, digits: int) -> str:
    return f"{x:.{digits}g}" if x < 10**digits - 0.5 else f"{x:,.0f}"
