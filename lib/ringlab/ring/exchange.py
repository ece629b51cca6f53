"""Which K/V rows a rank needs from which other, each once: ``Problem.needed``; by which
rank of a host they come: ``Problem.routes``; and so what it sends and receives under
the scheme "plan": ``plan_rank``, a ``RankPlan``. Arithmetic on ranges, without tensors.

A row is one position of one K/V head. A shard consists of chunks of adjacent positions.

Dilated patterns: a query chunk and a key chunk that are disjoint share at most one
segment of a branch, and in it all keys come before all queries, or after them. So what
moves are whole intervals, and causality hides all of one or nothing.

Block-sparse patterns: chunks are cut where blocks end. Two of these parts are equal or
disjoint, so a part of the queries sees a part of the keys whole or not at all. Only a
part with itself needs the causal mask.

Hosts: where several ranks of one need the same row of another host, it crosses the link
between them once. One of these ranks gets it from its owner, and passes it on to the
others. Gradients go the same way back.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain, product

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..engine.blocks import BlockParts, window_of_tokens
from ..engine.execute import View
from ..patterns import Branch, Dense, Pattern
from ..torch_private import outside_modes
from .layout import Layout
from .rows import Intervals, Parts, ResidueInterval, RowSet, StridedRows

AT_A_TIME = 256  # parts of queries whose keys are looked up in one matrix


@dataclass(frozen=True)
class Problem:
    """What is computed and which rank owns what: all that an exchange plan depends on.

    ``hosts``: a number for the host of each rank; () where hosts change nothing (see
    ``on_hosts``). ``exchange_dtype``: of the rows of k and v on their way, None for
    theirs.
    """

    pattern: Pattern
    layout: Layout
    causal: bool
    heads: int
    kv_heads: int
    hosts: tuple[int, ...] = ()
    exchange_dtype: torch.dtype | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(
        self,
    ) -> int:  # a problem is part of the key of every plan that a call looks up
        shape = self.heads, self.kv_heads, self.hosts, self.exchange_dtype
        return hash((self.pattern, self.layout, self.causal, *shape))

    def check(self, scheme: str, length: bool = True) -> None:
        """Raise ValueError if a scheme of one dimension does not support the problem;
        ``length``: also if its length does not fit.
        """
        if self.exchange_dtype is not None and scheme != "plan":
            raise ValueError(
                f"exchange_dtype is for scheme 'plan' alone, got {scheme!r}"
            )
        if isinstance(self.pattern, BlockSparse):
            if length:
                self.pattern.count(self.layout.n)  # raises where it does not fit
            if scheme in ("ring", "all_gather"):
                raise ValueError(
                    f"scheme {scheme!r} does not serve block-sparse patterns; 'plan' and 'ulysses' do"
                )
        if self.layout.grid is not None and self.causal:
            raise ValueError(
                "causal attention along a Hilbert curve has no meaning: its steps are not in time order"
            )
        if scheme == "ulysses":
            return
        if self.layout.kind == "striped" and not isinstance(self.pattern, Dense):
            refusal = f"scheme {scheme!r} serves a striped layout with dense attention only, not {self.pattern}"
            raise ValueError(
                f"{refusal}: stripes have no neighbours; take another layout, or ulysses"
            )

    def refusals(self) -> dict[str, str]:
        """Why schemes of one dimension do not support the problem, by scheme."""
        reasons = {}
        for scheme in ("plan", "ring", "all_gather", "ulysses"):
            try:
                self.check(scheme)
            except ValueError as error:
                reasons[scheme] = str(error)
        return reasons

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of a dilated pattern by rate, so that the rows of a denser one
        come first.
        """
        branches = self.pattern.branches(self.layout.n, self.heads, self.kv_heads)
        return tuple(sorted(branches, key=lambda b: (b.rate, b.length)))

    def shared(
        self, branch: Branch, queries: range, keys: range
    ) -> tuple[int, range, range] | None:
        """(start, queries, keys) of the one segment where queries of a chunk see keys
        of another chunk, or None.
        """
        length = branch.length
        start = max(queries.start, keys.start) // length * length
        if min(queries.stop, keys.stop) <= start or (
            self.causal and keys.start > queries.start
        ):
            return None
        return start, *(
            range(max(r.start, start), min(r.stop, start + length))
            for r in (queries, keys)
        )

    def host_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of the host of ``rank``, itself among them; it alone where hosts
        change nothing.
        """
        return tuple(
            i for i, host in enumerate(self.hosts) if host == self.hosts[rank]
        ) or (rank,)

    def routes(
        self, ranks: tuple[int, ...], source: int
    ) -> dict[tuple[int, int], RowSet]:
        """By (from, to) how what some ranks of a host need from ``source`` comes to
        them, as ``needed``.

        Ranks are taken by how many rows they need, most first, equal ones in turns by
        source. Each gets from the source what no earlier one needs, and the rest from
        the first earlier one that needs it.
        """
        needed = {to: self.needed(to, source) for to in ranks}
        size = len(self.host_ranks(ranks[0]))
        rows = {}
        before = []
        for to in sorted(
            ranks, key=lambda to: (-needed[to].count, (to - source) % size)
        ):
            missing = needed[to]
            for earlier in before:
                remaining = missing.minus(needed[earlier])
                rows[earlier, to], missing = missing.minus(remaining), remaining
            rows[source, to] = missing
            before.append(to)
        return rows

    def needed(self, rank: int, source: int) -> RowSet:
        """The rows that ``rank`` needs from ``source``."""
        layout = self.layout
        if rank == source:
            return Intervals()
        if isinstance(self.pattern, BlockSparse):
            queries, keys = (
                BlockParts.of(layout.ranges(i), self.pattern.block_size)
                for i in (rank, source)
            )
            return Parts(keys, self._seen_parts(queries, keys), self.kv_heads)
        if layout.kind == "striped":  # of a causal sequence those before the last query
            stop = (
                max((r[-1] for r in layout.ranges(rank)), default=0)
                if self.causal
                else layout.n
            )
            pairs = frozenset((head, source) for head in range(self.kv_heads))
            stripe = ResidueInterval(layout.ranks, source, stop, pairs)
            return Intervals((stripe,) if source < stop else ())
        intervals = ()
        for keys in layout.ranges(source):
            rows = Intervals()
            for branch, queries in product(self.branches, layout.ranges(rank)):
                rows = rows.plus(Intervals(self._intervals(branch, queries, keys)))
            intervals += rows.intervals
        return Intervals(intervals)

    def _seen_parts(self, queries: BlockParts, keys: BlockParts) -> Tensor:
        """The numbers of the parts of keys (c,) that some part of the queries sees,
        ascending.
        """
        if (window := window_of_tokens(self.pattern, self.causal)) is not None:
            before, after = window
            # Of each key the first query that is not too early to see it.
            rows = torch.cat([queries.blocks, torch.tensor([2**62])])
            first = rows[torch.searchsorted(queries.blocks, keys.blocks - after)]
            return (first <= keys.blocks + before).nonzero().flatten()
        n = self.layout.n
        needed = torch.zeros(len(keys.blocks), dtype=torch.bool)
        for first in range(0, len(queries.blocks), AT_A_TIME):
            part = queries[slice(first, first + AT_A_TIME)]
            near = keys.near(self.pattern, part.blocks, n)
            seen = self.pattern.blocks(
                n, part.blocks, keys.blocks[near]
            )  # (part, near)
            if self.causal:
                seen &= keys[near].before(part)
            needed[near] |= seen.any(0)
        return needed.nonzero().flatten()

    @cached_property
    def hops(self) -> list[int]:
        """How far each rank's shard travels along the ring: to the last rank whose
        queries see some of it.
        """
        p = self.layout.ranks
        needed = rows_needed(self)
        return [
            max((t for t in range(1, p) if needed[(j + t) % p][j]), default=0)
            for j in range(p)
        ]

    def _intervals(
        self, branch: Branch, queries: range, keys: range
    ) -> tuple[ResidueInterval, ...]:
        """The rows of ``keys`` that the queries see in one branch: one interval, or
        none.
        """
        shared = self.shared(branch, queries, keys)
        if shared is None:
            return ()
        start, seeing, seen = shared
        pairs = _pairs(branch, self.heads // self.kv_heads, start % branch.rate)
        if len(seeing) < branch.rate:  # some heads may select no query here
            pairs = frozenset(
                p for p in pairs if (p[1] - seeing.start) % branch.rate < len(seeing)
            )
        interval = ResidueInterval(branch.rate, seen.start, seen.stop, pairs)
        return (interval,) if pairs and seen else ()


@lru_cache(maxsize=4096)
def _pairs(branch: Branch, group: int, phase: int) -> frozenset[tuple[int, int]]:
    return frozenset(
        (h // group, (phase + o) % branch.rate)
        for h, o in zip(branch.heads, branch.offsets)
    )


def _rows_of(rows: Iterable[StridedRows]) -> int:
    return sum(part.rows for part in rows)


@dataclass(frozen=True)
class RankPlan:
    """The rows that one rank receives from each other rank, and sends to it.

    ``passed`` and ``onward``, [rank][owner], are those of other hosts that ranks of one
    host pass on, to this rank and from it; () where hosts change nothing.
    """

    problem: Problem
    rank: int
    receive: tuple[tuple[StridedRows, ...], ...]
    send: tuple[tuple[StridedRows, ...], ...]
    passed: tuple[tuple[tuple[StridedRows, ...], ...], ...] = ()
    onward: tuple[tuple[tuple[StridedRows, ...], ...], ...] = ()

    @cached_property
    def received(self) -> list[int]:
        """The number of rows by source, without those passed on."""
        return list(map(_rows_of, self.receive))

    @cached_property
    def sent(self) -> list[int]:
        """The number of rows by destination, without those passed on."""
        return list(map(_rows_of, self.send))

    @cached_property
    def passing(self) -> tuple[list[int], list[int]]:
        """The numbers of rows that each rank passes on to this one, and gets from it."""
        return tuple(
            [_rows_of(chain(*each)) for each in rows]
            for rows in (self.passed, self.onward)
        )

    @cached_property
    def rows(self) -> int:
        """The number of rows that come in all."""
        return sum(self.received) + sum(self.passing[0])

    @cached_property
    def blocks(self) -> list[tuple[int, StridedRows]]:
        """(owner, rows) of all that comes, in the order in which they lie in the
        message: first what owners send.
        """
        each = chain.from_iterable(map(enumerate, (self.receive, *self.passed)))
        return [
            (owner, rows) for owner, rows_of_owner in each for rows in rows_of_owner
        ]

    def places(self) -> dict[int, Tensor]:
        """By K/V head, (2, rows): the positions that come, ascending, and where each
        lies in the message.
        """
        by_head: dict[int, list[Tensor]] = {}
        row = 0
        for _, block in self.blocks:
            for i, (head, where) in enumerate(block.members()):
                positions = torch.arange(where.start, where.stop, where.step)
                count = torch.arange(block.count)
                by_head.setdefault(head, []).append(
                    torch.stack([positions, row + i + block.heads * count])
                )
            row += block.rows
        by_kv_head = {head: torch.cat(parts, 1) for head, parts in by_head.items()}
        return {
            head: columns[:, columns[0].argsort()]
            for head, columns in by_kv_head.items()
        }

    def goes_on(self) -> Tensor:
        """Where the rows that are passed on lie in the message, by receiver (rows,)."""
        places = self.places()
        index = [torch.arange(0)]
        for block in chain.from_iterable(chain(*self.onward)):
            columns = []
            for head, where in block.members():
                positions, rows = places[head]
                columns.append(
                    rows[
                        torch.searchsorted(
                            positions, torch.arange(where.start, where.stop, where.step)
                        )
                    ]
                )
            index.append(torch.stack(columns, 1).flatten())  # position by position
        return torch.cat(index)

    @cached_property
    def _moves(self) -> list[tuple[int, View, View]]:
        """(heads, where in the message, where in the own shard) of all rows that are
        sent, in order.
        """
        moves = []
        first = 0
        for rows in chain(*self.send):
            message = View(rows.count, first, rows.heads, head_step=0, shift=1)
            moves.append(
                (rows.heads, message, rows.view(self.problem.layout, self.rank))
            )
            first += rows.rows
        return moves

    def pairs(
        self, message: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of the message (R, 2, b, d), the same rows of the own shard), views (b,
        count, heads, d).
        """
        for sent, own in zip(keys_of(message), (k, v)):
            for heads, message_rows, own_rows in self._moves:
                yield message_rows.strided(sent, heads), own_rows.strided(own, heads)


@lru_cache(maxsize=32)
@outside_modes()
def rows_needed(problem: Problem) -> list[list[int]]:
    """The number of rows that each rank needs from each other, [rank][source], as
    ``Problem.needed`` has them.

    >>> from ringlab.ring.layout import contiguous
    >>> rows_needed(Problem(Dense(), contiguous(8, 2), True, 1, 1))
    [[0, 0], [4, 0]]
    """
    layout = problem.layout
    p = layout.ranks
    if isinstance(problem.pattern, BlockSparse):
        return _blocks_needed(problem)
    if layout.kind == "striped":
        likeness = torch.arange(p * p).view(p, p)
    else:
        likeness = _placed(problem)
    counts = torch.unique(likeness, return_inverse=True)[1].tolist()
    counted = {}
    for rank, row in enumerate(counts):
        for source, name in enumerate(row):
            if (
                rank != source and name not in counted
            ):  # pairs of shards that lie alike are counted once
                counted[name] = problem.needed(rank, source).count
            row[source] = counted[name] if rank != source else 0
    return counts


@lru_cache(maxsize=32)
@outside_modes()
def rows_moved(problem: Problem) -> list[list[int]]:
    """The number of rows that each rank gets from each other, [rank][from]: from their
    owners, or passed on.

    Between hosts these are the distinct rows that a host needs.

    >>> from ringlab.ring.layout import contiguous
    >>> rows_moved(on_hosts(Problem(Dense(), contiguous(8, 4), False, 1, 1), "plan", (0, 0, 1, 1)))
    [[0, 4, 2, 0], [4, 0, 0, 2], [2, 0, 0, 4], [0, 2, 4, 0]]
    """
    ranks = range(problem.layout.ranks)
    needed = rows_needed(problem)
    counts = [list(row) for row in needed]
    for host, source in product({problem.host_ranks(rank) for rank in ranks}, ranks):
        receivers = tuple(
            to for to in host if source not in host and needed[to][source]
        )
        if len(receivers) > 1:
            for to in receivers:
                counts[to][source] = 0
            for (by, to), rows in problem.routes(receivers, source).items():
                counts[to][by] += rows.count
    return counts


@lru_cache(maxsize=64)
@outside_modes()
def on_hosts(problem: Problem, scheme: str, hosts: tuple[int, ...]) -> Problem:
    """The problem with the host of each rank, where that changes what a scheme moves.

    It does under "plan" alone, and not where all ranks are on one host or each is on
    its own.
    """
    if scheme != "plan" or len(set(hosts)) in (0, 1, len(hosts)):
        return problem
    return replace(problem, hosts=tuple(map(hosts.index, hosts)))


def _placed(problem: Problem) -> Tensor:
    """A number for how the queries of each rank and the keys of each other lie to each
    other, (rank, source).

    Pairs of one number need equally many rows: these depend on where the keys of shared
    segments begin and end, seen from the first key, on where rates begin, and on which
    heads select a query at all. A number is 64 bits of a hash.
    """
    layout = problem.layout
    number = torch.zeros((), dtype=torch.long)
    owned = [[(r.start, r.stop) for r in layout.ranges(i)] for i in range(layout.ranks)]
    longest = max(map(len, owned))
    chunks = torch.tensor(
        [shard + [(0, 0)] * (longest - len(shard)) for shard in owned]
    )
    for keys, queries in product(chunks.unbind(1), repeat=2):  # (ranks, 2)
        (k_start, k_stop), (q_start, q_stop) = (
            keys.unbind(1),
            queries[:, None].unbind(2),
        )
        for branch in problem.branches:
            start = (
                torch.maximum(q_start, k_start) // branch.length * branch.length
            )  # (rank, source)
            hidden = torch.minimum(q_stop, k_stop) <= start
            if problem.causal:
                hidden |= k_start > q_start
            seeing, seen = (
                (
                    torch.maximum(first, start),
                    torch.minimum(stop, start + branch.length),
                )
                for first, stop in ((q_start, q_stop), (k_start, k_stop))
            )
            count = seeing[1] - seeing[0]
            few = torch.where(
                count < branch.rate,
                1 + count + branch.rate * ((seeing[0] - k_start) % branch.rate),
                0,
            )
            for part in (
                seen[0] - k_start,
                seen[1] - k_start,
                (start - k_start) % branch.rate,
                few,
            ):
                number = number * 6364136223846793005 + torch.where(hidden, 1, 2 * part)
    return number


def _blocks_needed(problem: Problem) -> list[list[int]]:
    layout = problem.layout
    counts = []
    shards = [
        BlockParts.of(layout.ranges(rank), problem.pattern.block_size)
        for rank in range(layout.ranks)
    ]
    owners = torch.repeat_interleave(
        torch.tensor([len(shard.blocks) for shard in shards])
    )
    all_parts = BlockParts(
        *(
            torch.cat([getattr(s, x) for s in shards])
            for x in ("blocks", "starts", "stops")
        )
    )
    lengths = all_parts.stops - all_parts.starts
    for rank, queries in enumerate(shards):
        seen = problem._seen_parts(queries, all_parts)
        seen = seen[owners[seen] != rank]
        rows = torch.zeros(layout.ranks, dtype=torch.long).index_add_(
            0, owners[seen], lengths[seen]
        )
        counts.append((problem.kv_heads * rows).tolist())
    return counts


def keys_of(message: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (b, R, 1, d) as views of a message (R, 2, b, d): one row for each
    position and K/V head.
    """
    return message.permute(1, 2, 0, 3).unsqueeze(3).unbind()  # of (2, b, R, 1, d)


def plan_rank(problem: Problem, rank: int) -> RankPlan:
    """The exchange plan of one rank.

    >>> from ringlab.patterns import Dilated
    >>> from ringlab.ring.layout import contiguous
    >>> plan_rank(Problem(Dilated([4, 16], [1, 4]), contiguous(16, 4), False, 4, 4), 0).received
    [0, 4, 4, 4]
    """
    rank, ranks, routes = (
        operator.index(rank),
        range(problem.layout.ranks),
        cache(problem.routes),
    )

    def rows(by: int, to: int, owner: int) -> tuple[StridedRows, ...]:
        """Of what ``to`` needs from ``owner``, the rows that ``by`` sends it."""
        host = problem.host_ranks(to)
        route = routes((to,) if owner in host else host, owner)
        return route.get((by, to), Intervals()).strided()

    def passed(by: int, to: int) -> tuple[tuple[StridedRows, ...], ...]:
        same_host = problem.hosts[by] == problem.hosts[to]
        return tuple(
            rows(by, to, owner) if same_host and owner != by else () for owner in ranks
        )

    receive, send = zip(
        *((rows(other, rank, other), rows(rank, other, rank)) for other in ranks)
    )
    if not problem.hosts:
        return RankPlan(problem, rank, receive, send)
    return RankPlan(
        problem,
        rank,
        receive,
        send,
        *zip(*((passed(by, rank), passed(rank, by)) for by in ranks)),
    )


def digest(value: object) -> int:
    """A 63-bit hash of ``repr(value)``, the same in every process: of a text, or of
    rows to send.
    """
    return (
        int.from_bytes(
            hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big"
        )
        >> 1
    )
