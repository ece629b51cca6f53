"""What one rank computes: calls on its own chunks by the one-device engine, and calls
on rows of other chunks. ``Rank.plan`` is the exchange of its rows, a ``RankPlan``;
``Rank.calls`` are dense calls, a ``Plan`` of the engine.

Where a chunk of queries and a chunk of keys share a segment of a branch, every query
sees every key of it (see ``exchange``), so cross-rank work is dense calls without a
mask. Only a striped layout needs one: the square mask, shifted by a row where its keys
come later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..engine import Execution, dilated, execute
from ..engine.blocks import BlockParts, plan_between
from ..engine.dilated import (
    calls_on_rows,
    first_and_step,
    fold_heads,
    progressions,
    runs_alike,
)
from ..engine.execute import Call, Plan, View, head_block
from ..kernels.base import HALF, Kernel, accumulation_dtype
from ..patterns import Branch, Dense
from .exchange import Problem, RankPlan, keys_of, plan_rank


def cross_rank_calls(problem: Problem, rank: int, source: int) -> list[Call]:
    """The calls of a rank's queries on the shard of ``source``; on its own shard those
    between different chunks.
    """
    if problem.layout.kind == "striped":
        return _striped(problem, rank, source)
    calls = []
    for q_row, queries in problem.layout.chunks(rank):
        for k_row, keys in problem.layout.chunks(source):
            for branch in problem.branches if queries != keys else ():
                if (shared := problem.shared(branch, queries, keys)) is not None:
                    start, seeing, seen = shared
                    rows = (
                        q_row + seeing.start - queries.start,
                        k_row + seen.start - keys.start,
                    )
                    calls += _between(branch, problem, start, seeing, seen, rows)
    return calls


def _between(
    branch: Branch, problem: Problem, start: int, seeing: range, seen: range, rows
) -> Iterator[Call]:
    """The calls of one branch in the segment from ``start``; ``rows``: where the two
    parts begin in their shards.
    """
    members = []
    for head, offset in zip(branch.heads, branch.offsets):
        firsts = [
            (start + offset - part.start) % branch.rate for part in (seeing, seen)
        ]
        counts = tuple(
            len(part[first :: branch.rate])
            for part, first in zip((seeing, seen), firsts)
        )
        member = (
            head,
            firsts[0] + rows[0],
            firsts[1] + rows[1],
            head // (problem.heads // problem.kv_heads),
        )
        members.append((counts, member))
    for counts, run in runs_alike(members):
        yield _call(run, branch.rate, *counts)


def _call(
    run: list[tuple[int, ...]],
    rate: int,
    q_count: int,
    k_count: int,
    causal: bool = False,
) -> Call:
    """The call of a progression of (head, first query row, first key row, K/V head)."""
    (head, head_step), (q_first, q_shift), (k_first, k_shift), (kv_head, kv_step) = (
        first_and_step(run)
    )
    queries = View(q_count, q_first, rate, 0, head, head_step, q_shift)
    keys = View(k_count, k_first, rate, 0, kv_head, kv_step, k_shift)
    return Call(queries, keys, heads=len(run), causal=causal)


def _striped(problem: Problem, rank: int, source: int) -> list[Call]:
    """Dense attention between stripes: row i of a rank is at position i * ranks + rank."""
    q_count = problem.layout.size(rank)
    k_count = problem.layout.size(source)
    skip = 0
    if problem.causal:
        skip = int(
            source > rank
        )  # the first query comes before this source's first key
        q_count = k_count = min(q_count - skip, k_count)
    if min(q_count, k_count) < 1:
        return []
    group = problem.heads // problem.kv_heads
    runs = progressions([(h, skip, 0, h // group) for h in range(problem.heads)])
    return [_call(run, 1, q_count, k_count, problem.causal) for run in runs]


def received_calls(plan: RankPlan) -> list[Call]:
    """The calls of a rank's queries on the message that it receives: one per branch,
    cut segment and group of heads.
    """
    problem = plan.problem
    if isinstance(problem.pattern, Dense):
        return _on_chunks(plan)
    received = plan.places()
    group = problem.heads // problem.kv_heads
    calls = []
    for row, queries in problem.layout.chunks(plan.rank):
        for branch in problem.branches:
            length = branch.length
            for start in sorted(
                {
                    queries.start // length * length,
                    (queries.stop - 1) // length * length,
                }
            ):
                seeing = range(
                    max(start, queries.start), min(start + length, queries.stop)
                )
                keys = range(start, queries.start if problem.causal else start + length)
                first_row = row + seeing.start - queries.start
                calls += calls_on_rows(
                    branch, group, start, seeing, keys, first_row, received
                )
    return calls


def _on_chunks(plan: RankPlan) -> list[Call]:
    """Dense attention: what comes of a chunk is read where it lies, without an index."""
    calls = []
    row = 0
    calls_on = cache(partial(cross_rank_calls, plan.problem, plan.rank))
    for source, block in plan.blocks:
        begin = block.view(plan.problem.layout, source).first
        h = block.heads
        for call in calls_on(source):
            k = call.k
            if begin <= k.first < begin + block.count:
                first = row + (k.first - begin) * h + k.head
                keys = View(
                    k.rows,
                    first,
                    k.step * h,
                    head_step=0,
                    shift=k.shift * h + k.head_step,
                )
                calls.append(replace(call, k=keys))
        row += block.rows
    return calls


@dataclass
class Rank:
    """One rank of a problem: how it computes, and its plans."""

    problem: Problem
    rank: int
    kernel: Kernel
    scale: float
    execution: Execution

    @cached_property
    def plan(self) -> RankPlan:
        """Which rows the rank receives and sends."""
        key = ("exchange", self.problem, self.rank)
        return self.execution.cached(key, lambda: plan_rank(self.problem, self.rank))

    def goes_on(self, device: torch.device) -> Tensor:
        """Where the rows that the rank passes on lie in its message."""
        key = ("goes on", self.problem, self.rank, device)
        plan = self.plan
        return self.execution.cached(key, lambda: plan.goes_on().to(device))

    def calls(self, source: int | None, step: int | None = None) -> Plan:
        """The calls on the shard of a rank, or on the message received (None);
        ``step``: for so many heads at a time.

        On its own shard these are the calls between different chunks, or of
        block-sparse patterns all calls.
        """
        key = ("calls", self.problem, self.rank, source, self.kernel, step)
        if step is None or step >= self.problem.heads:
            return self.execution.cached(key[:-1], lambda: self._calls(source))
        return self.execution.cached(
            key, lambda: self.calls(source).in_head_blocks(step)
        )

    def _calls(self, source: int | None) -> Plan:
        calls = (
            received_calls(self.plan)
            if source is None
            else cross_rank_calls(self.problem, self.rank, source)
        )
        n = self.problem.layout.size(self.rank)
        heads = range(self.problem.heads)
        return Plan.added(heads, fold_heads(calls), n)

    def heads_at_a_time(self, q: Tensor) -> int:
        """So few that the fp32 copy of a half-precision result stays within a quarter
        of it.
        """
        return max(1, self.problem.heads // 8)

    def keys(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """k and v as ``calls(None)`` reads them: views of all received rows (R, 2, b,
        d).
        """
        return keys_of(message)

    @property
    def kernel_args(self) -> tuple:
        """What a call of the engine takes beside tensors and plans."""
        return self.problem.causal, self.scale, self.kernel

    def _chunks(self, q: Tensor, k: Tensor, backward: bool) -> list[tuple[slice, Plan]]:
        """(rows, the one-device plan) of each chunk that is computed by itself; its
        ends cut segments.
        """
        if self.problem.layout.kind == "striped":
            return []
        plans = []
        layout = self.problem.layout
        chunks = layout.chunks(self.rank)
        for row, chunk in chunks:
            rows = slice(row, row + len(chunk))
            reads = (q, k) if len(chunks) == 1 else (q[:, rows], k[:, rows])
            plan = dilated.plan_for(
                *reads,
                self.problem.pattern,
                self.execution.cached,
                backward=backward,
                n=layout.n,
                chunk=chunk,
            )
            plans.append((rows, plan))
        return plans

    def local_forward(self, q, k, v) -> tuple[Tensor, Tensor]:
        """out (b, s, h, d) and lse (b, h, s) over the keys of the own shard."""
        chunks = self._chunks(q, k, False)
        pool = self.execution.scratch()
        if len(chunks) == 1:
            return execute.forward(q, k, v, chunks[0][1], *self.kernel_args, pool=pool)
        out = torch.zeros_like(
            q, memory_format=torch.contiguous_format
        )  # no keys so far
        lse = torch.full(
            q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device
        ).transpose(1, 2)
        for rows, plan in chunks:
            inputs = (t[:, rows] for t in (q, k, v))
            out[:, rows], lse[:, :, rows] = execute.forward(
                *inputs, plan, *self.kernel_args, pool=pool
            )
        self.add_forward(self.rank, q, (k, v), out, lse)
        return out, lse

    def local_backward(self, dout, q, k, v, out, lse) -> tuple[Tensor, ...]:
        """dq, dk, dv in fp32 or wider."""
        chunks = self._chunks(q, k, True)
        pool = self.execution.scratch()
        dtype = accumulation_dtype(q.dtype)
        if len(chunks) == 1:
            grads = execute.backward(
                dout, q, k, v, out, lse, chunks[0][1], *self.kernel_args, pool=pool
            )
            return tuple(grad.to(dtype) for grad in grads)
        grads = tuple(
            torch.zeros(t.shape, dtype=dtype, device=q.device) for t in (q, k, v)
        )
        for rows, plan in chunks:
            reads = [t[:, rows] for t in (dout, q, k, v, out)]
            part = execute.backward(
                *reads, lse[:, :, rows], plan, *self.kernel_args, pool=pool
            )
            for total, grad in zip(grads, part):
                total[:, rows] += grad
            del part, grad  # before the next ones are computed
        self.add_backward(self.rank, (dout, q, out, lse), (k, v), grads[0], grads[1:])
        return grads

    def add_forward(self, source: int | None, q, keys, out, lse) -> None:
        """Merge the calls on ``source``, whose k and v are ``keys``, into out and lse
        (b, h, s).
        """
        plan = self.calls(
            source, self.heads_at_a_time(q) if out.dtype in HALF else None
        )
        if plan.calls:
            execute.forward(q, *keys, plan, *self.kernel_args, into=(out, lse))

    def add_backward(self, source: int | None, reads, keys, dq, into) -> None:
        """Add the gradients of the calls on ``source`` to dq and to ``into``, those of
        ``keys``; all fp32 or wider.

        ``reads``: dout, q, out, lse.
        """
        (dout, q, out, lse), plan = reads, self.calls(source)
        if plan.calls:
            execute.backward(
                dout, q, *keys, out, lse, plan, *self.kernel_args, into=(dq, *into)
            )


class BlockRank(Rank):
    """A rank of a block-sparse pattern under the plan: dense calls on the parts of
    blocks that it has.
    """

    def _calls(self, source: int | None) -> Plan:
        problem = self.problem
        layout = problem.layout
        queries = keys = BlockParts.of(
            layout.ranges(self.rank), problem.pattern.block_size
        )
        if (
            source is None
        ):  # every block that moves is a range of positions of all K/V heads
            ranges = [next(block.members())[1] for _, block in self.plan.blocks]
            keys = BlockParts.of(ranges, problem.pattern.block_size)
        args = problem.pattern, layout.n, queries, keys, problem.heads, problem.kv_heads
        return plan_between(*args, causal=problem.causal, itself=source is not None)

    def heads_at_a_time(self, q: Tensor) -> int:
        return head_block(q, self.problem.kv_heads, q.shape[1])

    def keys(self, message: Tensor) -> tuple[Tensor, Tensor]:
        kv_heads = self.problem.kv_heads
        return tuple(
            t.unflatten(1, (-1, kv_heads)).squeeze(3) for t in keys_of(message)
        )  # (b, s, h_kv, d)

    def _chunks(self, q: Tensor, k: Tensor, backward: bool) -> list:
        return []

    def local_forward(self, q, k, v) -> tuple[Tensor, Tensor]:
        plan = self.calls(self.rank)
        if plan.needs_fp32_accumulator(
            q.dtype, q.shape[2] // k.shape[2], backward=False
        ):
            plan = self.calls(self.rank, self.heads_at_a_time(q))
        return execute.forward(
            q, k, v, plan, *self.kernel_args, pool=self.execution.scratch()
        )


def rank_of(
    problem: Problem, rank: int, kernel: Kernel, scale: float, execution: Execution
) -> Rank:
    """The work of one rank with a kernel, for a positive scale."""
    kind = BlockRank if isinstance(problem.pattern, BlockSparse) else Rank
    return kind(problem, rank, execution.tiled(kernel), scale, execution)
