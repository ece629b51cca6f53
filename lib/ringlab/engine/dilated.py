"""Which strided views a dilated pattern reads: pure index arithmetic, no tensor data.

In a branch (w, r) the rows that head h keeps lie at ``segment * w + offset(h) + j * r``: affine in the segment and in
j. Heads whose (index, offset, K/V head) form an arithmetic progression share one view, so a branch takes at most
min(r, heads / r) calls, and as many again for a short last segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from torch import Tensor

from ..patterns import Branch, Pattern


@dataclass(frozen=True)
class Call:
    """``segments`` equal segments of ``rows`` selected rows each from row ``base`` on, for one progression of heads.

    ``head``, ``kv_head`` and ``offset`` (from the start of a segment) are (first, step) along the ``heads`` of the
    call. ``first`` says that no earlier call wrote these heads' rows.
    """

    length: int
    rate: int
    base: int
    segments: int
    rows: int
    heads: int
    head: tuple[int, int]
    kv_head: tuple[int, int]
    offset: tuple[int, int]
    first: bool

    @property
    def shares_kv(self) -> bool:
        """Whether all heads of the call read the same K/V rows, so that their gradients must be summed."""
        return self.kv_head[1] == 0 and self.offset[1] == 0

    def within(self, start: int, stop: int) -> range:
        """The numbers of this call's segments that lie in rows [start, stop), which must not cut a segment."""
        begin = max(0, -((self.base - start) // self.length))
        end = min(self.segments, -((self.base - stop) // self.length))
        return range(begin, max(begin, end))

    def view(self, t: Tensor, segments: range, *, kv: bool = False, origin: tuple[int, int] = (0, 0)) -> Tensor:
        """Rows of ``t`` (b, n, h, d) as (b, segments, rows, heads, d); ``origin``: t's first (position, head)."""
        s_b, s_n, s_h, s_d = t.stride()
        h0, h_step = self.kv_head if kv else self.head
        o0, o_step = self.offset
        position = self.base + segments.start * self.length + o0 - origin[0]
        return t.as_strided(
            (t.shape[0], len(segments), self.rows, self.heads, t.shape[3]),
            (s_b, self.length * s_n, self.rate * s_n, h_step * s_h + o_step * s_n, s_d),
            t.storage_offset() + position * s_n + (h0 - origin[1]) * s_h,
        )


@dataclass(frozen=True)
class Plan:
    """The calls of a pattern by block of heads.

    ``covered``: first calls write every (row, head). ``merges``: some rows are written by several branches.
    ``chunk``: the positions at hand; ``period``: a number of positions after which no segment is cut.
    """

    blocks: tuple[tuple[range, tuple[Call, ...]], ...]
    covered: bool
    merges: bool
    chunk: range
    period: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) that cut no segment but those that the chunk's ends cut, in order."""
        start = self.chunk.start
        while start < self.chunk.stop:
            stop = min(self.chunk.stop, (start // self.period + 1) * self.period)
            yield start - self.chunk.start, stop - self.chunk.start
            start = stop

    def whole(self, n: int) -> Call | None:
        """The first call, if it alone touches every row of every head in memory order."""
        (inside, calls), *more = self.blocks
        if not calls:  # a chunk so short that no head selects a row of it
            return None
        call = calls[0]
        fills = call.rate == 1 and call.heads == len(inside) and call.segments * call.rows == n
        return call if not more and fills and call.head in ((0, 1), (0, 0)) else None


def make_plan(
    pattern: Pattern, n: int, heads: int, kv_heads: int, block: int | None = None, chunk: range | None = None
) -> Plan:
    """Plan ``pattern`` over ``n`` positions, with calls that stay inside blocks of ``block`` heads (default: all).

    ``chunk``: only these positions are at hand, as rows 0, 1, ...; segments that its ends cut are run as far as they
    lie in it.

    >>> from ringlab.patterns import Dilated
    >>> ((_, calls),) = make_plan(Dilated([4, 8], [1, 2]), 16, 4, 4).blocks
    >>> [(c.rate, c.segments, c.heads) for c in calls]
    [(1, 4, 4), (2, 2, 2), (2, 2, 2)]
    """
    branches = sorted(pattern.branches(n, heads, kv_heads), key=lambda b: b.rate)  # a branch that writes all goes first
    first_branch = {h: b for b in reversed(branches) for h in b.heads}
    block, chunk = heads if block is None else block, range(n) if chunk is None else chunk
    blocks = []
    for start in range(0, heads, block):
        inside = range(start, min(start + block, heads))
        calls = [c for b in branches for c in _branch_calls(b, chunk, heads // kv_heads, inside, first_branch)]
        blocks.append((inside, tuple(calls)))
    return Plan(
        tuple(blocks),
        covered=all(h in first_branch and first_branch[h].rate == 1 for h in range(heads)),
        merges=sum(len(b.heads) for b in branches) > len(first_branch),
        chunk=chunk,
        period=min(n, lcm(*(b.length for b in branches))),
    )


def _branch_calls(b: Branch, chunk: range, group: int, inside: range, first_branch: dict[int, Branch]) -> list[Call]:
    calls = []
    for start, count, length in _pieces(chunk, b.length):
        alike: dict[tuple, list] = {}  # heads that keep equally many rows and agree on who writes first
        for head, offset in zip(b.heads, b.offsets):
            offset = (offset - start % b.length) % b.rate
            rows = -(-(length - offset) // b.rate)
            if head in inside and rows > 0:
                alike.setdefault((rows, first_branch[head] is b), []).append((head, offset, head // group))
        for (rows, first), members in alike.items():
            for run in progressions(members):
                head, offset, kv_head = first_and_step(run)
                base = start - chunk.start
                calls.append(Call(b.length, b.rate, base, count, rows, len(run), head, kv_head, offset, first))
    return calls


def _pieces(chunk: range, length: int) -> Iterator[tuple[int, int, int]]:
    """(first position, segments, positions of each): what is there of a cut segment, whole ones, and of another."""
    start = min(chunk.stop, -(-chunk.start // length) * length)
    if start > chunk.start:
        yield chunk.start, 1, start - chunk.start
    whole = (chunk.stop - start) // length
    if whole:
        yield start, whole, length
    start += whole * length
    if start < chunk.stop:
        yield start, 1, chunk.stop - start


def progressions(members: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Split (head, offset, ...) tuples into as few arithmetic progressions as three natural orders allow."""
    seen: dict[int, int] = {}
    nth = {}  # how many earlier heads have the same offset
    for head, offset, *_ in members:
        nth[head] = seen[offset] = seen.get(offset, -1) + 1
    found = []
    for order in (lambda x: x[0], lambda x: (x[1], x[0]), lambda x: (nth[x[0]], x[1])):
        runs: list[list] = []
        for item in sorted(members, key=order):
            run = runs[-1] if runs else [item]
            steps = [a - b for a, b in zip(item, run[-1])]
            alike = len(run) == 1 or steps == [a - b for a, b in zip(run[1], run[0])]
            if runs and alike and min(steps) >= 0:  # a view cannot have a negative stride
                run.append(item)
            else:
                runs.append([item])
        found.append(runs)
    return min(found, key=len)


def first_and_step(run: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """(first, step) of each column of a progression."""
    return [(a, b - a) for a, b in zip(run[0], run[min(1, len(run) - 1)])]
