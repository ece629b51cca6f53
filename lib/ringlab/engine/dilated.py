"""The planner of dense and dilated patterns: their calls, by index arithmetic alone,
without tensors.

In a branch (w, r) the rows that head h selects are at ``segment * w + offset(h) + j *
r``: affine in the segment and in j. Heads whose (index, offset, K/V head) form an
arithmetic progression share one view, so a branch takes at most min(r, heads / r)
calls, and as many again for a short last segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import lcm
from operator import sub

import torch
from torch import Tensor

from ..patterns import Branch, Pattern
from .execute import Call, HeadBlock, Plan, Planner, View, altered


def planner(
    pattern: Pattern, n: int, heads: int, kv_heads: int, chunk: range | None = None
) -> Planner:
    """The planner of ``make_plan`` with these arguments."""
    call = pattern, n, heads, kv_heads, chunk
    return Planner(
        ("plan", *call),
        lambda: make_plan(*call),
        lambda plan, block: make_plan(*call, block),
    )


def plan_for(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    cached,
    *,
    backward: bool = False,
    n: int | None = None,
    chunk: range | None = None,
) -> Plan:
    """The plan for tensors q (b, rows, h, d) and k that hold ``chunk`` of ``n``
    positions (default: all of them).

    ``cached(key, build)`` remembers it.
    """
    n = q.shape[1] if n is None else n
    plans = planner(pattern, n, q.shape[2], k.shape[2], chunk)
    return plans.plan(q, k.shape[2], cached, backward)


def make_plan(
    pattern: Pattern,
    n: int,
    heads: int,
    kv_heads: int,
    chunk: range | None = None,
    block: int | None = None,
) -> Plan:
    """Plan ``pattern`` over ``n`` positions, with calls that stay inside blocks of
    ``block`` heads (default: all).

    ``chunk``: only these positions are there, as rows 0, 1, ...; of a segment that its
    ends cut, the part inside runs.

    >>> from ringlab.patterns import Dilated
    >>> [(c.q.step, c.repeats, c.heads) for c in make_plan(Dilated([4, 8], [1, 2]), 16, 4, 4).calls]
    [(1, 4, 4), (2, 2, 2), (2, 2, 2)]
    """
    branches = sorted(
        pattern.branches(n, heads, kv_heads), key=lambda b: b.rate
    )  # a branch that writes all goes first
    first_branch = {h: b for b in reversed(branches) for h in b.heads}
    chunk, block, blocks = range(n) if chunk is None else chunk, block or heads, []
    for start in range(0, heads, block):
        inside = range(start, min(start + block, heads))
        each = (
            _branch_calls(b, chunk, heads // kv_heads, inside, first_branch)
            for b in branches
        )
        calls = tuple(call for calls in each for call in fold_heads(calls))
        blocks.append(HeadBlock(inside, calls))
    covered = all(h in first_branch and first_branch[h].rate == 1 for h in range(heads))
    return Plan(
        tuple(blocks),
        uncovered=() if covered else ((0, len(chunk)),),
        merges=sum(len(b.heads) for b in branches) > len(first_branch),
        same_rows=True,
        rows=chunk,
        period=min(n, lcm(*(b.length for b in branches))),
    )


def cross_planner(
    n: int, keys: int, heads: int, kv_heads: int, causal: bool
) -> Planner:
    """The planner of dense attention to other keys, or to more."""
    call = n, keys, heads, kv_heads, causal
    return Planner(("cross", *call), lambda: _cross_plan(*call), cut=None)


def _cross_plan(n: int, keys: int, heads: int, kv_heads: int, causal: bool) -> Plan:
    """Every one of ``n`` queries by every one of ``keys`` keys.

    If ``causal``, the queries are the last of the keys' positions: all of them see the
    keys before, in one call, and in another one those of their own positions.
    """
    before = keys - n if causal and n > 1 else keys  # seen by all queries
    calls = []
    for run in progressions([(h, h // (heads // kv_heads)) for h in range(heads)]):
        (head, head_step), (kv_head, kv_step) = first_and_step(run)
        queries = View(n, 0, 1, 0, head, head_step)
        rows = View(before, 0, 1, 0, kv_head, kv_step)
        calls.append(Call(queries, rows, heads=len(run), first=True))
        if before < keys:
            own = altered(rows, rows=n, first=before)
            calls.append(Call(queries, own, heads=len(run), causal=True))
    block = HeadBlock(range(heads), tuple(calls))
    return Plan((block,), (), before < keys, False, range(n), n)


def _branch_calls(
    b: Branch, chunk: range, group: int, inside: range, first_branch: dict[int, Branch]
) -> Iterator[Call]:
    for start, count, length in _pieces(chunk, b.length):
        by_shape: dict[
            tuple, list
        ] = {}  # heads that select equally many rows and agree on who writes first
        for head, offset in zip(b.heads, b.offsets):
            offset = (offset - start % b.length) % b.rate
            rows = -(-(length - offset) // b.rate)
            if head in inside and rows > 0:
                member = head, start - chunk.start + offset, head // group
                by_shape.setdefault((rows, first_branch[head] is b), []).append(member)
        for (rows, first), members in by_shape.items():
            for run in progressions(members):
                (head, head_step), (row, shift), (kv_head, kv_step) = first_and_step(
                    run
                )
                queries = View(rows, row, b.rate, b.length, head, head_step, shift)
                keys = View(rows, row, b.rate, b.length, kv_head, kv_step, shift)
                yield Call(queries, keys, count, len(run), causal=True, first=first)


def fold_heads(calls: Iterable[Call]) -> Iterator[Call]:
    """Join calls that differ by their heads, and perhaps by where their rows begin, as
    repeats of one call.
    """

    def place(call: Call) -> tuple[int, ...]:
        return call.q.first, call.q.head, call.k.first, call.k.head

    def shape(call: Call) -> object:
        if call.repeats > 1 or call.q.index is not None or call.k.index is not None:
            return id(call)
        return altered(
            call, q=altered(call.q, first=0, head=0), k=altered(call.k, first=0, head=0)
        )

    for _, similar in groupby(calls, shape):
        similar = list(similar)
        for run in even_runs([place(call) for call in similar]):
            members, similar = similar[: len(run)], similar[len(run) :]
            (_, q_step), (_, q_head), (_, k_step), (_, k_head) = first_and_step(run)
            q = members[0].q
            k = members[0].k
            apart = all(
                not by or by >= v.step * v.rows for v, by in ((q, q_step), (k, k_step))
            )
            if (
                len(run) > 1 and apart and q_head and (k_step or k_head)
            ):  # no row of a gradient twice
                q, k = (
                    altered(q, repeat_step=q_step, repeat_head=q_head),
                    altered(k, repeat_step=k_step, repeat_head=k_head),
                )
                yield altered(members[0], q=q, k=k, repeats=len(run))
            else:
                yield from members


def _pieces(chunk: range, length: int) -> Iterator[tuple[int, int, int]]:
    """(first position, segments, positions of each) of a cut segment, of the whole
    ones, and of another cut one.
    """
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
    """Split (head, offset, ...) tuples into as few arithmetic progressions as three
    natural orders allow.
    """
    seen: dict[int, int] = {}
    nth = {}  # how many earlier heads have the same offset
    for head, offset, *_ in members:
        nth[head] = seen[offset] = seen.get(offset, -1) + 1
    orders = (lambda x: x[0], lambda x: (x[1], x[0]), lambda x: (nth[x[0]], x[1]))
    return min(([*even_runs(sorted(members, key=order))] for order in orders), key=len)


def even_runs(items: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Split a list into arithmetic progressions; none goes down, since a view cannot
    have a negative stride.
    """
    run: list[tuple[int, ...]] = []
    step: tuple[int, ...] = ()
    for item in items:
        apart = tuple(map(sub, item, run[-1])) if run else ()
        if not run or (apart == step if len(run) > 1 else min(apart) >= 0):
            run.append(item)
            step = apart
        else:
            yield run
            run = [item]
    if run:
        yield run


def first_and_step(run: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """(first, step) of each column of a progression."""
    return [(a, b - a) for a, b in zip(run[0], run[min(1, len(run) - 1)])]


def runs_alike(
    entries: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
) -> Iterator[tuple[tuple[int, ...], list]]:
    """(counts, progression of members) of pairs (counts, member) with equal counts,
    none of which is 0.
    """
    by_counts: dict[tuple[int, ...], list] = {}
    for counts, member in entries:
        if min(counts) > 0:
            by_counts.setdefault(counts, []).append(member)
    for counts, members in by_counts.items():
        for run in progressions(members):
            yield counts, run


def calls_on_rows(
    branch: Branch,
    group: int,
    start: int,
    queries: range,
    keys: range,
    row: int,
    held: dict[int, tuple[Tensor, Tensor]],
) -> Iterator[Call]:
    """The calls of one branch on rows of other positions, in the segment from
    ``start``.

    The positions ``queries``, of which ``row`` is the first row, see the
    positions ``keys``. ``held`` says by K/V head, for ``group`` heads, which positions
    are there, and in which rows.
    """
    entries = []
    indices = {}
    for head, offset in zip(branch.heads, branch.offsets):
        first = (start + offset - queries.start) % branch.rate
        count = len(queries[first :: branch.rate])
        kv_head = head // group
        if count and kv_head in held:
            positions, rows = held[kv_head]
            in_segment = (positions >= keys.start) & (positions < keys.stop)
            indices[head] = rows[
                in_segment & ((positions - start - offset) % branch.rate == 0)
            ]
            entries.append(((count, len(indices[head])), (head, first + row)))
    for (count, _), run in runs_alike(entries):
        (head, head_step), (q_first, q_shift) = first_and_step(run)
        view = View(count, q_first, branch.rate, 0, head, head_step, q_shift)
        yield Call(
            view,
            View.of(torch.stack([indices[h] for h, _ in run], 1)),
            heads=len(run),
        )
