"""The planner of dilated patterns on a CPU: plans that compute each visible pair once,
however many branches show it.

Branches nest where their rates divide each other and their segments do, too. What a
query sees then depends on the set of branches that select it: of the keys that a branch
selects, those outside of the segment of the next smaller branch. A key that M branches
show has log M added to its scores, as a bias of the keys of a call. A chain is a run of
branches that nest and are computed together; chains are merged as branches are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..kernels.base import PLAIN, Cost, Kernel, accumulation_dtype
from ..patterns import Dilated, Pattern
from . import dilated
from .dilated import even_runs, first_and_step, progressions
from .execute import Call, HeadBlock, Plan, Planner, View, altered, anew

WIDEST = 8  # a segment that holds more of the next smaller ones is not split around each of them
TABLE = 128  # rows and keys of a table of biases at least
SQUARE = 128  # keys of the squares on the diagonal of causal calls; such a square is computed whole
MOST_RATE = 1024
Rung = tuple[int, int, int]  # the length, rate and offset of a branch for one head


def planner(
    pattern: Pattern,
    n: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    dtype: torch.dtype,
    kernel: Kernel,
) -> Planner:
    """The planner of a call on a CPU: folded if that is predicted to be faster, else as
    ``dilated`` has it.
    """
    shape = pattern, n, heads, kv_heads
    several = (
        isinstance(pattern, Dilated)
        and pattern.mixing == "lse"
        and len(pattern.segment_lengths) > 1
    )
    if not several or not kernel.takes_bias_in(dtype):
        return dilated.planner(*shape)
    call = *shape, causal, accumulation_dtype(dtype), kernel

    def cut(plan: Plan, block: int) -> Plan:
        if plan.same_rows:  # branch by branch
            return dilated.make_plan(*shape, block=block)
        return plan.in_head_blocks(block)

    return Planner(("folded", *call), lambda cached: faster(*call, cached), cut)


def faster(
    pattern: Pattern,
    n: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    dtype: torch.dtype,
    kernel: Kernel,
    cached=anew,
) -> Plan:
    """The folded plan, if it is predicted to be faster than the one branch by branch,
    else that one.
    """
    apart = dilated.make_plan(pattern, n, heads, kv_heads)
    most = kernel.cost.gain * cost(apart, causal, kernel)
    options = causal, dtype, kernel, most, cached
    return fold(pattern, n, heads, kv_heads, *options) or apart


def cost(plan: Plan, causal: bool, kernel: Kernel) -> float:
    """The predicted time of a forward pass, in pairs that ``kernel`` computes in long
    calls.
    """
    price = kernel.cost
    total = 0.0
    for block in plan.blocks:
        for call in block.calls:
            rows = call.q.rows
            keys = call.k.rows
            seen = (
                min(keys, (keys + price.block) / 2) if causal and call.causal else keys
            )
            slower = (
                1.0
                if call.bias is None
                else price.bias
                if len(call.bias) == 1
                else price.biases
            )
            total += price.call + call.repeats * call.heads * _price(
                price, rows, seen, slower, call.first
            )
    return total


def _price(cost: Cost, rows: int, keys: float, slower: float, first: bool) -> float:
    """The time of rows by keys for one head, with pairs that a bias makes ``slower``."""
    work = cost.work(rows, keys) + rows * keys * (slower - 1)
    return work if first else work + cost.merge * rows


def fold(
    pattern: Pattern,
    n: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    dtype: torch.dtype,
    kernel: Kernel = PLAIN,
    most: float = math.inf,
    cached=anew,
) -> Plan | None:
    """Plan ``pattern`` over ``n`` positions with the visible pairs of nested branches
    once; None where none nest.

    Of the branches that nest, those are folded together that make the calls cheapest
    for ``kernel``; None where they are predicted to take ``most`` or more, a ``cost``.

    >>> pattern = Dilated([2048, 4096], [1, 2])  # branch by branch 1.5 * 2048 pairs for each position
    >>> fold(pattern, 16384, 1, 1, False, torch.float32).pairs() / (1.5 * 2048 * 16384)
    0.8333333333333334
    """
    branches = sorted(
        pattern.branches(n, heads, kv_heads), key=lambda b: (b.length, b.rate)
    )
    if any(
        (b.length % b.rate and b.length < n) or b.rate > MOST_RATE for b in branches
    ):
        return None  # other rows in each segment, or too many classes of rows
    rungs = [
        tuple((b.length, b.rate, b.offsets[b.heads.index(head)]) for b in branches)
        for head in range(heads)
    ]
    price = kernel.cost

    @cache
    def parts(chain: tuple[Rung, ...], first: bool) -> list[_Part]:
        return [*_of_chain(chain, n, causal, price, heads, first)]

    best: list[tuple[float, list[range]]] = [
        (0.0, [])
    ]  # the cheapest chains of the first 0, 1, ... branches
    for stop in range(1, len(branches) + 1):
        ways = []
        for start in range(stop):
            if all(_nest(head_rungs[start:stop], n) for head_rungs in rungs):
                chain = parts(rungs[0][start:stop], not start)
                time = best[start][0] + sum(part.price(price, heads) for part in chain)
                ways.append((time, [*best[start][1], range(start, stop)]))
        best.append(min(ways, key=lambda way: way[0]))
    chains = sorted(
        best[-1][1], key=lambda chain: branches[chain.start].rate
    )  # one that writes all rows goes first
    if max(map(len, chains)) == 1 or best[-1][0] * heads >= most:
        return None
    calls = []
    tables = _Tables(dtype, cached)
    for chain in chains:
        nested = [
            parts(head_rungs[chain.start : chain.stop], chain is chains[0])
            for head_rungs in rungs
        ]
        calls += _calls(nested, kv_heads, tables)
    block = HeadBlock(range(heads), tuple(calls))
    uncovered = () if branches[chains[0].start].rate == 1 else ((0, n),)
    return Plan(
        (block,),
        uncovered,
        True,
        False,
        range(n),
        min(n, math.lcm(*(b.length for b in branches))),
    )


def _nest(chain: tuple[Rung, ...], n: int) -> bool:
    """Whether each branch nests into the one before, by rising length."""
    for (inner, finer, _), (length, rate, offset) in zip(chain, chain[1:]):
        divides = rate % finer == 0 and (length % inner == 0 or length == n)
        if not divides or chain[0][0] % rate or length > WIDEST * inner or offset >= n:
            return False
    return True


@dataclass(frozen=True)
class _Part:
    """Some rows of one head that see some keys, in ``repeats`` places a step ``apart``;
    no bias is made yet.

    ``place`` tells it from parts of the same shape. ``rungs``: the branches that count
    into M. ``masked``: causal, on the diagonal. ``each``: the bias differs from row to
    row. ``first``: no other part writes these rows before.
    """

    place: tuple[int, ...]
    queries: range
    keys: range
    repeats: int
    apart: int
    rungs: tuple[Rung, ...]
    masked: bool
    each: bool
    first: bool

    def split(
        self, positions: tuple[int, int], classes: list[tuple[int, int]], each: bool
    ) -> list[_Part]:
        """A part for each residue class that has queries among ``positions``."""
        rows = [_rows(*positions, *one) for one in classes]
        return [
            altered(self, place=(*self.place, i), queries=x, each=each)
            for i, x in enumerate(rows)
            if x
        ]

    def price(self, cost: Cost, heads: int) -> float:
        """The time, if calls of equal parts of all ``heads`` are one."""
        slower = cost.biases if self.each else cost.bias if len(self.rungs) > 1 else 1.0
        return cost.call / heads + self.repeats * _price(
            cost, len(self.queries), len(self.keys), slower, self.first
        )


def _of_chain(
    chain: tuple[Rung, ...], n: int, causal: bool, cost: Cost, heads: int, first: bool
) -> Iterator[_Part]:
    """The parts of one head of nested branches; ``first``: they write rows to which no
    other chain wrote before.
    """
    rate = chain[-1][1]
    for j, inner, classes, by_set in _alike(tuple((r, first) for _, r, first in chain)):
        length, key_step, offset = chain[j]
        inside = 0 if inner is None else chain[inner][0]
        pieces = _pieces(
            length, inside, n, causal, -(-SQUARE * key_step // rate) * rate
        )
        for nth_piece, (q, k, repeats, apart, square) in enumerate(pieces):
            keys = _rows(*k, key_step, offset)
            masked = square and causal
            if not keys:
                continue
            alone = first and square and not inside
            place = (j, inside, nth_piece)
            where = place, q, keys, repeats, apart, chain[j:], masked
            part = _Part(*where, each=False, first=alone)
            several = len(by_set) > 1
            together = part.split(q, classes, masked or several)
            if masked or not several:
                yield from together
                continue
            separate = part.split(q, [one for each in by_set for one in each], False)
            yield from min(
                together,
                separate,
                key=lambda way: sum(x.price(cost, heads) for x in way),
            )


@lru_cache(maxsize=1024)
def _alike(strides: tuple[tuple[int, int], ...]) -> list[tuple]:
    """Rows that need the same keys, by (rate, offset) of nested branches: (the branch
    of the keys, the one before it that selects the rows or None, the rows' classes, and
    those of each set of branches that selects rows: M may differ).
    """
    rate = strides[-1][0]
    groups = {}
    for residue in range(rate):
        rungs = tuple(j for j, (r, first) in enumerate(strides) if residue % r == first)
        for inner, j in zip((None, *rungs), rungs):
            groups.setdefault((j, inner), {}).setdefault(rungs, set()).add(residue)
    return [
        (
            *key,
            _classes(set().union(*selects.values()), rate),
            [_classes(residues, rate) for residues in selects.values()],
        )
        for key, selects in groups.items()
    ]


def _calls(parts: list[list[_Part]], kv_heads: int, tables: _Tables) -> list[Call]:
    """The calls of nested branches, whose ``parts`` are those of each head."""
    heads = len(parts)
    by_shape = {}
    biases = {id(own): [*map(tables.bias, own)] for own in parts}  # heads may be alike
    for head, own in enumerate(parts):
        for part, bias in zip(own, biases[id(own)]):
            q = part.queries
            k = part.keys
            shape = (
                not part.first,
                q.step,
                len(q),
                k.step,
                len(k),
                part.repeats,
                part.apart,
                part.place,
            )
            shape = *shape, 0 if bias is None else len(q) if part.each else 1
            by_shape.setdefault(shape, []).append(
                ((head, q.start, head // (heads // kv_heads), k.start), bias)
            )
    calls = []
    for (later, step, rows, key_step, keys, repeats, apart, _, each), members in sorted(
        by_shape.items(), key=lambda x: x[0][0]
    ):
        made = {head: bias for (head, *_), bias in members}
        for run in progressions([member for member, _ in members]):
            (head, head_step), (row, shift), (kv_head, kv_step), (key, key_shift) = (
                first_and_step(run)
            )
            q = View(rows, row, step, apart, head, head_step, shift)
            k = View(keys, key, key_step, apart, kv_head, kv_step, key_shift)
            bias = tables.by_head([made[h] for h, *_ in run], each, keys)
            calls.append(Call(q, k, repeats, len(run), first=not later, bias=bias))
    return calls


def _classes(residues: set[int], rate: int) -> list[tuple[int, int]]:
    """(step, residue) of as few residue classes of steps that divide ``rate`` as the
    residues modulo ``rate`` make.
    """
    left = set(residues)
    classes = []
    for step in (s for s in range(1, rate + 1) if rate % s == 0):
        for first in sorted(r for r in left if r < step):
            if (whole := set(range(first, rate, step))) <= left:
                left -= whole
                classes.append((step, first))
    return classes


def _rows(start: int, stop: int, step: int, residue: int) -> range:
    return range(start + (residue - start) % step, stop, step)


@lru_cache(maxsize=256)
def _pieces(length: int, inner: int, n: int, causal: bool, square: int) -> list[tuple]:
    """((queries, keys), repeats, step, square): which intervals of positions attend to
    which within segments.

    ``inner`` > 0: keys in the segment of that length that the queries lie in are left
    out. ``causal``: what lies after the queries is, too, and squares on the diagonal
    are at most ``square`` positions long. ``repeats`` of them, a step apart.
    """
    by_shape: dict[tuple, list] = {}

    def add(q, k, on_diagonal=False):
        shape = q[1] - q[0], k[1] - k[0], k[0] - q[0], on_diagonal
        by_shape.setdefault(shape, []).append((q[0], k[0]))

    def triangle(start, stop):
        if stop - start <= square:
            return add((start, stop), (start, stop), True)
        half = (stop - start) // 2 // square * square or square
        triangle(start, start + half)
        triangle(start + half, stop)
        add((start + half, stop), (start, start + half))

    for begin in range(0, n, length):
        end = min(begin + length, n)
        for start in range(begin, end, inner) if inner else ():
            stop = min(start + inner, end)
            if start > begin:
                add((start, stop), (begin, start))
            if stop < end and not causal:
                add((start, stop), (stop, end))
        if not inner:
            triangle(begin, end) if causal else add((begin, end), (begin, end), True)
    return [
        ((q, q + q_size), (k, k + k_size), len(run), step, on_diagonal)
        for (q_size, k_size, _, on_diagonal), places in by_shape.items()
        for run in even_runs(places)
        for (q, step), (k, _) in [first_and_step(run)]
    ]


class _Tables:
    """Tables of log M, of which biases are parts: from ``cached``, since sequences of
    many lengths share them.
    """

    def __init__(self, dtype: torch.dtype, cached):
        self.dtype = dtype
        self.cached = cached
        self.table = cache(lambda key: cached(key, lambda: _table(*key[1:])))

    def _part(self, key: tuple, rows: int, keys: int) -> Tensor:
        return self.table(key)[:rows, :keys]

    def bias(self, part: _Part) -> tuple | None:
        """The key of the table with the bias of a part, which begins at its first row
        and key; None where every M is 1.
        """
        queries = part.queries
        keys = part.keys
        rungs = part.rungs
        if len(rungs) == 1 and not part.masked:
            return None
        rows, period = len(queries) if part.each else 1, rungs[-1][1]  # all divide it
        ahead = queries.start - keys.start
        ahead = ahead if part.masked else ahead % period
        strides = tuple((rate, (first - keys.start) % rate) for _, rate, first in rungs)
        size = 1 if rows == 1 else _room(rows), _room(len(keys)), self.dtype
        key = "bias", ahead, queries.step, keys.step, strides, part.masked, *size
        first = self._part(key, min(rows, period), min(len(keys), period))
        return key if part.masked or first.max() > 0 else None

    def by_head(self, keys_of_heads: list[tuple | None], rows: int, keys: int):
        """The biases of heads from their tables, (rows, heads, keys), or None."""
        if keys_of_heads[0] is None:
            return None
        first, *others = (
            self._part(key, rows, keys) for key in dict.fromkeys(keys_of_heads)
        )
        if all(other.equal(first) for other in others):
            by_head = first.T[None].expand(len(keys_of_heads), -1, -1)
        else:
            by_head = self.cached(
                ("biases", *keys_of_heads),
                lambda: torch.stack([self.table(key).T for key in keys_of_heads]),
            )[:, :keys, :rows]
        return by_head.permute(2, 0, 1)


def _room(count: int) -> int:
    """Rows or keys of the table in which so many find room: few sizes are shared."""
    return max(TABLE, 1 << (count - 1).bit_length())


def _table(
    ahead: int, step: int, key_step: int, strides, masked: bool, rows, keys, dtype
) -> Tensor:
    """log M (rows, keys) of queries ``step`` apart, the first of which is ``ahead`` of
    the first key; ``strides``: the rate and offset of each branch.
    """
    q = ahead + step * torch.arange(rows)
    k = key_step * torch.arange(keys)
    rates, offsets = torch.tensor(strides).T[..., None]  # (branches, 1)
    select_q, select_k = (
        (x % rates == offsets).to(dtype) for x in (q, k)
    )  # (branches, rows)
    # (rows, keys), neighbouring rows side by side, as the kernel adds them
    times = (select_k.T @ select_q).T
    return (
        times.log().masked_fill(k > q[:, None], -torch.inf) if masked else times.log()
    )
