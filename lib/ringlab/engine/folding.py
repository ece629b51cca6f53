"""Plans of dilated patterns that compute each visible pair once, however many branches show it.

Branches nest where their rates divide each other and their segments do, too. What a query sees then depends on the set
of branches that select it: of the keys that a branch selects, those outside of the segment of the next smaller branch.
A key that M branches show has log M added to its scores, as a bias of the keys of a call. A branch that does not nest
into the ones before it begins another chain; chains are merged as branches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import lcm

import torch
from torch import Tensor

from ..kernels.base import Kernel, accumulation_dtype, cost_of, device_type_of, supports_bias
from ..patterns import Dilated, Pattern
from . import dilated
from .dilated import even_runs, first_and_step, progressions
from .execute import Call, Plan, View, in_head_blocks

WIDEST = 8  # a segment that holds more of the next smaller ones is not split around each of them
SQUARE = 128  # keys of the squares on the diagonal of causal calls; such a square is computed whole
JOINED = 1 << 14  # pairs of a call up to which rows with another M of the same keys run together
MOST_RATE = 1024
Rung = tuple[int, int, int]  # the length, rate and offset of a branch for one head


def plan_for(
    q: Tensor, k: Tensor, pattern: Pattern, causal: bool, kernel: Kernel, cached, *, backward: bool = False
) -> Plan:
    """The plan for tensors q (b, n, h, d) and k: folded if that is predicted to be faster, else as ``dilated`` has it.

    ``cached(key, build)`` remembers it.
    """
    several = isinstance(pattern, Dilated) and pattern.mixing == "lse" and len(pattern.segment_lengths) > 1
    if several and device_type_of(q) == "cpu" and supports_bias(kernel, q.dtype):
        given = pattern, q.shape[1], q.shape[2], k.shape[2], causal, accumulation_dtype(q.dtype), kernel
        plan = cached(("folded", *given), lambda: faster(*given))
        if plan is not None:
            return in_head_blocks(("folded", *given), lambda: plan, q, k.shape[2], backward, cached)
    return dilated.plan_for(q, k, pattern, cached, backward=backward)


def faster(
    pattern: Pattern, n: int, heads: int, kv_heads: int, causal: bool, dtype: torch.dtype, kernel: Kernel
) -> Plan | None:
    """The folded plan, if it is predicted to be faster than branch by branch."""
    folded = fold(pattern, n, heads, kv_heads, causal, dtype)
    if folded is None:
        return None
    apart = dilated.make_plan(pattern, n, heads, kv_heads)
    return folded if cost(folded, causal, kernel) < cost_of(kernel).gain * cost(apart, causal, kernel) else None


def cost(plan: Plan, causal: bool, kernel: Kernel) -> float:
    """The predicted time of a forward pass, in pairs that ``kernel`` computes in long calls."""
    price, total = cost_of(kernel), 0.0
    for _, calls, _ in plan.blocks:
        for call in calls:
            rows, keys = call.q.rows, call.k.rows
            seen = min(keys, (keys + price.block) / 2) if causal and call.causal else keys
            slower = 1.0 if call.bias is None else price.bias if len(call.bias) == 1 else price.biases
            each = float(price.work(rows, torch.tensor(seen))) + rows * seen * (slower - 1)
            each += 0 if call.first else price.merge * rows
            total += price.call + call.nodes * call.heads * each
    return total


def fold(pattern: Pattern, n: int, heads: int, kv_heads: int, causal: bool, dtype: torch.dtype) -> Plan | None:
    """Plan ``pattern`` over ``n`` positions with every visible pair once; None where no branches nest.

    >>> pattern = Dilated([2048, 4096], [1, 2])  # branch by branch 1.5 * 2048 pairs for each position
    >>> fold(pattern, 16384, 1, 1, False, torch.float32).pairs / (1.5 * 2048 * 16384)
    0.8333333333333334
    """
    branches = pattern.branches(n, heads, kv_heads)
    found, covered, nested, biases = {}, True, False, {}
    for head in range(heads):
        mine = sorted((b.length, b.rate, b.offsets[b.heads.index(head)]) for b in branches if head in b.heads)
        if any((length % rate and length < n) or rate > MOST_RATE for length, rate, _ in mine):
            return None  # other rows in each segment, or too many classes of rows
        chains = list(_chains(mine, n))
        chains.sort(key=lambda chain: chain[0][1])  # one that writes all rows goes first
        covered &= bool(chains) and chains[0][0][1] == 1
        nested |= any(len(chain) > 1 for chain in chains)
        for i, chain in enumerate(chains):
            for shape, first, bias in _of_chain(chain, n, causal, dtype, biases):
                member = head, first[0], head // (heads // kv_heads), first[1]
                found.setdefault((i, *shape), []).append((member, bias))
    if not nested:
        return None
    calls = [call for shape, members in sorted(found.items(), key=_order) for call in _calls(shape, members)]
    block = range(heads), tuple(calls), tuple(calls)
    uncovered = () if covered else ((0, n),)
    return Plan((block,), uncovered, True, False, range(n), min(n, lcm(*(b.length for b in branches))))


def _order(item) -> tuple:
    (chain, first, *_), _ = item
    return chain, not first


def _chains(rungs: Iterable[Rung], n: int) -> Iterator[list[Rung]]:
    """Split branches by rising length into chains, in each of which all nest."""
    chain: list[Rung] = []
    for length, rate, offset in rungs:
        if chain:
            shortest, (inner, finer, _) = chain[0][0], chain[-1]
            divides = rate % finer == 0 and (length % inner == 0 or length == n)
            if not divides or shortest % rate or length > WIDEST * inner or offset >= n:
                yield chain
                chain = []
        chain.append((length, rate, offset))
    if chain:
        yield chain


def _of_chain(
    chain: list[Rung], n: int, causal: bool, dtype, biases: dict
) -> Iterator[tuple[tuple, tuple[int, int], Tensor | None]]:
    """(shape, (first query row, first key row), bias) of the calls of one head; equal biases are one tensor."""
    rate, alike = chain[-1][1], {}
    for residue in range(rate):
        rungs = tuple(j for j, (_, r, offset) in enumerate(chain) if residue % r == offset)
        for inner, j in zip((None, *rungs), rungs):  # rows that need the same keys, but perhaps another M of them
            alike.setdefault((j, inner), {}).setdefault(rungs, set()).add(residue)
    for (j, inner), selects in alike.items():
        length, key_step, offset = chain[j]
        inside = 0 if inner is None else chain[inner][0]
        pieces = _pieces(length, inside, n, causal, -(-SQUARE * key_step // rate) * rate)
        for nth_piece, (q, k, nodes, apart, square) in enumerate(pieces):
            keys = _rows(*k, key_step, offset)
            joined = square and causal or (q[1] - q[0]) // key_step * len(keys) <= JOINED
            groups = [frozenset().union(*selects.values())] if joined else [*map(frozenset, selects.values())]
            for nth, (step, residue) in enumerate(c for residues in groups for c in _classes(residues, rate)):
                queries = _rows(*q, step, residue)
                if not queries or not keys:
                    continue
                visible = queries if joined else queries[:1]
                bias = _bias(visible, keys, chain[j:], square and causal, dtype, biases)
                shape = not inside and square, step, len(queries), key_step, len(keys), nodes, apart
                yield (*shape, (j, inside, nth_piece, nth, bias is None)), (queries.start, keys.start), bias


@lru_cache(maxsize=1024)
def _classes(residues: frozenset[int], rate: int) -> list[tuple[int, int]]:
    """(step, residue) of as few residue classes of steps that divide ``rate`` as the residues modulo ``rate`` make."""
    left, found = set(residues), []
    for step in (s for s in range(1, rate + 1) if rate % s == 0):
        for first in sorted(r for r in left if r < step):
            if (whole := set(range(first, rate, step))) <= left:
                left -= whole
                found.append((step, first))
    return found


def _rows(start: int, stop: int, step: int, residue: int) -> range:
    return range(start + (residue - start) % step, stop, step)


@lru_cache(maxsize=256)
def _pieces(length: int, inner: int, n: int, causal: bool, square: int) -> list[tuple]:
    """((queries, keys), nodes, step, square): which intervals of positions attend to which within segments.

    ``inner`` > 0: keys in the segment of that length that the queries lie in are left out. ``causal``: what lies after
    the queries is, too, and squares on the diagonal are at most ``square`` positions long. ``nodes`` of them, a step
    apart.
    """
    found: dict[tuple, list] = {}

    def add(q, k, on_diagonal=False):
        shape = q[1] - q[0], k[1] - k[0], k[0] - q[0], on_diagonal
        found.setdefault(shape, []).append((q[0], k[0]))

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
        for (q_size, k_size, _, on_diagonal), places in found.items()
        for run in even_runs(places)
        for (q, step), (k, _) in [first_and_step(run)]
    ]


def _bias(queries: range, keys: range, rungs: list[Rung], square: bool, dtype, made: dict) -> Tensor | None:
    """log M (query rows or 1, keys), in a causal square -inf after the query; None where every M is 1.

    ``made`` remembers it: counted from the first key, many are the same.
    """
    if len(rungs) == 1 and not square:
        return None
    ahead = queries.start - keys.start
    ahead = ahead if square else ahead % rungs[-1][1]  # all rates divide the last one
    rows = range(ahead, ahead + len(queries) * queries.step, queries.step)
    strides = tuple((rate, (offset - keys.start) % rate) for _, rate, offset in rungs)
    key = rows, len(keys), keys.step, strides, square
    if key not in made:
        q, k = (torch.arange(r.start, r.stop, r.step) for r in (rows, range(0, len(keys) * keys.step, keys.step)))
        rates, offsets = torch.tensor(strides).T[..., None]  # (branches, 1)
        select_q, select_k = ((x % rates == offsets).to(dtype) for x in (q, k))  # (branches, rows)
        times = (select_k.T @ select_q).T  # (rows, keys), neighbouring rows side by side, as the kernel adds them
        if square:
            made[key] = times.log().masked_fill(k > q[:, None], -torch.inf)
        else:
            made[key] = times.log() if times.max() > 1 else None
    return made[key]


def _calls(shape: tuple, members: list) -> Iterator[Call]:
    chain, first, step, rows, key_step, keys, nodes, apart, _ = shape
    biases = {head: bias for (head, *_), bias in members}
    for run in progressions([member for member, _ in members]):
        (head, head_step), (row, shift), (kv_head, kv_step), (key, key_shift) = first_and_step(run)
        q = View(rows, row, step, apart, head, head_step, shift)
        k = View(keys, key, key_step, apart, kv_head, kv_step, key_shift)
        mine = [biases[h] for h, *_ in run]
        if (bias := mine[0]) is not None:
            same = all(other is bias or other.equal(bias) for other in mine)
            by_head = bias.T[None].expand(len(mine), -1, -1) if same else torch.stack([m.T for m in mine])
            bias = by_head.permute(2, 0, 1)  # (rows, heads, keys)
        yield Call(q, k, nodes, len(run), first=first and chain == 0, bias=bias)
