"""Storage of the K/V rows that later queries still see, and attention to them.

``RetentionPolicy`` says which rows these are. The rows of a K/V head lie one behind the
other, by position, in its *slots*. New positions come as

* a *step*, one position: its row is stored, then its query attends to the slots from
  the first that it sees, on a CPU by one kernel call in most cases, on a GPU by the
  kernels of ``decode``, which also take a few positions at once;
* a *chunk*: a plan of dense calls, as elsewhere, on themselves and on the kept rows.

What a step needs beside q, k and v depends on positions alone, so it is worked out for
many steps together: ``PreparedSteps``. Rows that expire during these are dropped
afterwards.

One of several ranks keeps its part of the positions, and computes its part of a result:
over these, and for some heads over the new positions themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..kernels import KERNELS
from ..kernels.base import HALF, Kernel, accumulation_dtype
from ..kernels.compiled import Walk, dense_walk
from ..kernels.torch_kernels import cap_
from ..tiles.dense import weighed
from ..torch_private import outside_modes, refuse_recording
from . import blocks, dilated, execute
from .dilated import calls_on_rows, even_runs, fold_heads
from .execute import HeadBlock, Plan
from .retention import MAX_STEPS, RetentionPolicy

if TYPE_CHECKING:
    from ..kernels.decode import Decoder

WASTE = 2 << 20  # bytes that are read in vain rather than by another kernel call
MAX_DRAFT = 16  # new positions at once, as of a draft, that are steps of ``decode``
CONVERTED = 4096  # rows of half precision that are converted together
SAVED = "k", "v", "positions", "counts", "length", "peak"  # what a state holds


class LiveRows:
    """The rows k and v (b, h_kv, slots, d) that one rank keeps of ``batch`` sequences.

    There is one slot table per K/V head, or a single one if all heads select the same
    rows. ``counts`` (b, tables) slots hold rows, at ascending ``positions`` (b, tables,
    slots); the next slot is for a new row; v is 0 in those after it. ``length`` (b,)
    positions were taken; ``peak`` (b,) is the greatest length before the last crop.

    ``masks`` (b, tables, viewers, slots) are the policy's masks of the rows, 0 in
    unused slots, and ``firsts`` (b, tables, bits) the first slot with each bit. Both
    hold until the positions ``until`` (b,); at 0 they are computed anew.
    """

    @outside_modes()  # or it could not be used outside of that mode
    def __init__(
        self,
        policy: RetentionPolicy,
        batch: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.policy = policy
        tables = policy.tables
        slots = policy.slots
        shape = batch, policy.kv_heads, slots, head_dim
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        shape = batch, tables, policy.viewers, slots
        self.masks = torch.zeros(shape, dtype=policy.mask_dtype, device=device)
        self.positions = torch.zeros(batch, tables, slots, dtype=torch.int32)
        self.counts = torch.zeros(batch, tables, dtype=torch.int64)
        self.firsts = torch.zeros(batch, tables, policy.bits, dtype=torch.int64)
        self.length, self.peak, self.until = torch.zeros(3, batch, dtype=torch.int64)
        self._prepared: PreparedSteps | None = None
        self._horizon = 1  # steps that are prepared next
        self._recorded: RecordedStep | None = None
        self._refresh(list(range(batch)))  # what the policy remembers is made here, too
        triton = KERNELS["triton"]  # whose rules are those of the kernels of ``decode``
        self.decodes = triton.refuses(device, dtype, head_dim) is None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.k, self.v, self.positions, self.masks))

    def rows_of(self, entry: int) -> list[Tensor]:
        """The positions of the rows that are kept of a sequence, ascending, for each
        K/V head.
        """
        self._check_replays()
        self._drop([entry])
        rows = [
            positions[:count].long()
            for positions, count in zip(self.positions[entry], self.counts[entry])
        ]
        return rows * (self.policy.kv_heads // len(rows))

    def crop(self, lengths: list[int]) -> None:
        """Forget the positions of each sequence from its length on."""
        self._check_replays()
        for entry, length in enumerate(lengths):
            if length < self.length[entry]:
                self.peak[entry] = max(self.peak[entry], self.length[entry])
                self.length[entry] = length
                self._invalidate([entry])

    def reorder(self, index: list[int]) -> None:
        """Make sequence i a copy of what was sequence ``index[i]``."""
        self._check_replays()
        for name in (*SAVED, "masks", "firsts", "until"):
            t = self._in_use(name)
            t.copy_(t[index])
        self._prepared = None
        self._horizon = 1

    def reset(self) -> None:
        if self._recorded is not None:
            self._recorded.stop()
        for t in (self.k, self.v, self.counts, self.length, self.peak):
            t.zero_()
        self._invalidate(slice(None))

    def state(self) -> dict[str, Tensor]:
        """A copy of all that is kept."""
        self._check_replays()
        self._drop(list(range(len(self.k))))
        return {name: self._in_use(name).clone() for name in SAVED}

    def fits(self, state) -> bool:
        """Whether ``state`` holds tensors like those of ``state()``."""
        if not isinstance(state, dict) or state.keys() != {*SAVED}:
            return False
        if not all(isinstance(t, Tensor) for t in state.values()):
            return False
        if state["counts"].shape != self.counts.shape:
            return False
        used = int(state["counts"].max())
        own = {name: self._in_use(name, used) for name in SAVED}
        return used <= self.policy.slots and all(
            (t.dtype, t.shape) == (own[name].dtype, own[name].shape)
            for name, t in state.items()
        )

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        for name, saved in state.items():
            self._in_use(name, state["k"].shape[2]).copy_(saved)

    def append(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        """Take new rows k, v (b, c, h_kv, d), which see nothing: of entry i the first
        ``lengths[i]``.
        """
        for entries in self._of_equal_history(lengths):
            self._store(entries, k, v, lengths[entries[0]])

    def attend(
        self,
        q,
        k,
        v,
        lengths: list[int],
        scale: float,
        kernel: Kernel,
        execution,
        decodes: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """out (b, c, h, d), lse (b, h, c) of c new positions, of entry i the first
        ``lengths[i]``; their rows are kept. ``decodes``: up to ``MAX_DRAFT`` positions
        by the kernels of ``decode`` where they run.

        Of several ranks this rank's part of both.
        """
        self._check_replays()
        batch, c = q.shape[:2]
        decodes = decodes and self.decodes
        short: dict[int, list[int]] = {}  # entries by their number of new positions
        for entry, count in enumerate(lengths):
            if 0 < count <= (MAX_DRAFT if decodes else 1):
                short.setdefault(count, []).append(entry)
        out, lse = _empty_results(q)  # (b, c, h, d), (b, c, h)
        if not (decodes and len(short.get(c, ())) == batch):  # not all is written
            out.zero_()
            lse.fill_(-torch.inf)
        for count, entries in short.items():
            if decodes:
                self._decode(entries, count, q, k, v, out, lse, scale)
            else:
                self._step(entries, q, k, v, out, lse, scale, kernel)
        if sum(map(len, short.values())) < batch:
            long = [0 if count in short else count for count in lengths]
            for entries in self._of_equal_history(long):
                count = long[entries[0]]
                for i in _slices(entries):
                    new = q[i, :count], k[i, :count], v[i, :count]
                    tiled = execution.tiled(kernel)
                    o, l = self._chunk(entries[0], i, *new, scale, tiled, execution)
                    out[i, :count], lse[i, :count] = o, l.transpose(1, 2)
                self._store(entries, k, v, count)
        return out, lse.transpose(1, 2)

    def _of_equal_history(self, counts: list[int]) -> list[list[int]]:
        """The entries that have new rows, in groups of equally many new and the same
        kept rows.
        """
        groups: dict[tuple, list[int]] = {}
        for entry, count in enumerate(counts):
            if count:
                rows = self.rows_of(entry)[: self.policy.tables]
                if len(self.k) > 1:
                    rows = [tuple(positions.tolist()) for positions in rows]
                key = count, int(self.length[entry]), *rows
                groups.setdefault(key, []).append(entry)
        return list(groups.values())

    def _chunk(
        self,
        entry: int,
        entries: slice,
        q,
        k,
        v,
        scale: float,
        kernel: Kernel,
        execution,
    ) -> tuple[Tensor, Tensor]:
        """out (b, c, h, d), lse (b, h, c) of c new positions, over themselves and the
        kept rows.

        All ``entries`` have the history of ``entry``.
        """
        policy = self.policy
        t = int(self.length[entry])
        c = q.shape[1]
        pattern = policy.pattern
        heads = policy.heads
        n = policy.n
        new = range(t, t + c)
        kept = self.rows_of(entry)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        in_blocks = isinstance(pattern, BlockSparse)
        if in_blocks:
            queries = blocks.BlockParts.of([new], pattern.block_size)
            keys = list(_ranges(kept[0]))
            keys = blocks.BlockParts.of(keys, pattern.block_size) if keys else None
            sizes = heads, policy.kv_heads
            between = partial(blocks.plan_between, pattern, n, queries, causal=True)
            plan = between(queries, *sizes, itself=True)
        else:
            plan = dilated.plan_for(q, k, pattern, execution.cached, n=n, chunk=new)
        if policy.ranks > 1:
            plan = _of_heads(plan, policy.own_heads, c)
        if plan.needs_fp32_accumulator(
            q.dtype, heads // policy.kv_heads, backward=False
        ):
            plan = plan.in_head_blocks(max(1, heads // 8))
        pool = execution.scratch()
        out, lse = execute.forward(q, k, v, plan, True, scale, kernel, pool=pool)
        if not any(map(len, kept)):
            return out, lse
        if in_blocks:
            plan = between(keys, *sizes, itself=False)
            used = len(kept[0])
            rows = (x[entries, :, :used].transpose(1, 2) for x in (self.k, self.v))
            # (b, used, h_kv, d)
        else:
            plan = self._plan_of_kept(new, kept)
            rows = (x[entries].flatten(1, 2).unsqueeze(2) for x in (self.k, self.v))
            # (b, h_kv * slots, 1, d)
        if plan.calls:
            if out.dtype in HALF:
                plan = plan.in_head_blocks(max(1, heads // 8))
            execute.forward(q, *rows, plan, True, scale, kernel, into=(out, lse))
        return out, lse

    def _plan_of_kept(self, new: range, kept: list[Tensor]) -> Plan:
        """A plan of new positions over the rows at the positions ``kept`` of each K/V
        head, which lie one head behind the other.
        """
        policy = self.policy
        t = new.start
        keys = {
            head: (positions, head * policy.slots + torch.arange(len(positions)))
            for head, positions in enumerate(kept)
        }
        calls = []
        for branch in policy.branches:
            start = t // branch.length * branch.length
            queries = range(t, min(start + branch.length, new.stop))
            group = policy.heads // policy.kv_heads
            before = range(start, t)
            calls += calls_on_rows(branch, group, start, queries, before, 0, keys)
        return Plan.added(range(policy.heads), fold_heads(calls), len(new))

    def _store(self, entries: list[int], k: Tensor, v: Tensor, count: int) -> None:
        """Take ``count`` new rows of k and v of entries of equal history, but for those
        that no later query sees.
        """
        policy = self.policy
        first = int(self.length[entries[0]])
        new = torch.arange(first, first + count)
        self.length[entries] += count
        self._drop(entries)
        last = policy.last_query(new.expand(policy.tables, -1))  # (tables, count)
        kept = last >= first + count - policy.max_crop
        for table, start in enumerate(self.counts[entries[0]].tolist()):
            rows = kept[table].nonzero().flatten()
            heads = policy.heads_of(table)
            slots = slice(start, start + len(rows))
            for i in _slices(entries):
                self.positions[i, table, slots] = new[rows].int()
                for x, t in ((k, self.k), (v, self.v)):
                    x = x[i, :, heads][:, rows.to(x.device)]  # (e, rows, heads, d)
                    t[i, heads, slots] = x.transpose(1, 2)
        self.counts[entries] += kept.sum(1)
        self._invalidate(entries)

    def _drop(self, entries: list[int]) -> None:
        """Drop the rows that no later query sees, and cropped ones, and move the others
        together.
        """
        positions, used = self._rows(entries)
        length = self.length[entries][:, None, None]
        last = self.policy.last_query(positions)  # (entries, tables, m)
        expired = (last < length - self.policy.max_crop) | (positions >= length)
        expired &= used
        kept = used & ~expired  # (entries, tables, m)
        for i, table in expired.any(-1).nonzero().tolist():
            entry = entries[i]
            heads = self.policy.heads_of(table)
            first = int(expired[i, table].int().argmax())  # those before it stay there
            moved = kept[i, table, first:].nonzero().flatten() + first
            stop = first + len(moved)
            self.positions[entry, table, first:stop] = self.positions[
                entry, table, moved
            ]
            moved = moved.to(self.k.device)
            for rows in (self.k, self.v):
                rows[entry, heads, first:stop] = rows[entry, heads].index_select(
                    1, moved
                )
            self.v[entry, heads, stop : kept.shape[-1] + 1] = 0
            self.counts[entry, table] = stop
            self._invalidate([entry])

    def _rows(self, entries: list[int]) -> tuple[Tensor, Tensor]:
        """The positions (entries, tables, m) of the slots in use, and which hold a row."""
        counts = self.counts[entries][:, :, None]
        slots = torch.arange(int(counts.max()))
        return self.positions[entries, :, : len(slots)], slots < counts

    def _in_use(self, name: str, used: int | None = None) -> Tensor:
        """A tensor, of rows those in the first ``used`` slots; default: in all that hold
        a row of some sequence and head.
        """
        used = int(self.counts.max()) if used is None else used
        t = getattr(self, name)
        return t[:, :, :used] if name in ("k", "v", "positions") else t

    def _invalidate(self, entries) -> None:
        """Note that the slots of ``entries`` changed otherwise than by prepared steps."""
        self.until[entries], self._prepared = 0, None

    def _refresh(self, entries: list[int]) -> None:
        """Drop rows, and compute masks for the next positions."""
        policy = self.policy
        t = self.length[entries]
        self._drop(entries)
        positions, used = self._rows(entries)
        until = policy.next_boundary(t)
        masks = policy.row_masks(positions, until)  # (entries, tables, viewers, m)
        masks.masked_fill_(~used[:, :, None], 0)
        self.masks[entries] = 0
        self.masks[entries, :, :, : masks.shape[-1]] = masks.to(self.masks)
        self.until[entries] = until
        self.firsts[entries] = self.counts[entries][:, :, None]
        if masks.shape[-1]:
            for i, seen in enumerate(_by_bit(masks, policy.bits)):
                seen = seen.any(2)  # (entries, tables, m)
                first = seen.int().argmax(-1)
                self.firsts[entries, :, i] = torch.where(
                    seen.any(-1), first, self.counts[entries]
                )

    def _prepare_steps(
        self, entries: list[int], decodes: bool, least: int = 1
    ) -> PreparedSteps:
        """The prepared steps of ``entries``: those that are left, or new ones.

        New ones go on until masks end or slots are full, and are at most twice as many
        as the last time, or ``least``, since they may not be used.
        """
        prepared = self._prepared
        if (
            prepared is not None
            and prepared.entries == entries
            and decodes == (prepared.decoder is not None)
        ):
            if prepared.steps:
                return prepared
        else:
            self._horizon = 1
        slots = self.policy.slots
        stale = (self.until <= self.length) | (self.counts.amax(1) >= slots)
        if old := [entry for entry in entries if stale[entry]]:
            self._refresh(old)
        room = torch.minimum(self.until - self.length, slots - self.counts.amax(1))
        steps = max(self._horizon, least), int(room[entries].min()), MAX_STEPS
        self._horizon = min(2 * self._horizon, MAX_STEPS)
        columns = self._foresee(entries, min(steps))
        decoder = None
        if decodes:
            from ..kernels import decode

            decoder = self._decoder(decode.step_table(entries, *columns))
        firsts, counts, *_ = columns
        first = firsts.flatten(1).amin(1)
        used = counts.flatten(1).amax(1)
        level = (counts.flatten(1) == used[:, None]).all(1)
        columns[3:] = [x.to(self.masks) for x in columns[3:]]  # dtype and device
        columns += first.tolist(), used.tolist(), level.tolist()
        steps = [Step(*step) for step in zip(*columns)]
        every = len(entries) == len(self.k)
        self._prepared = PreparedSteps(entries, every, steps[::-1], decoder)
        return self._prepared

    def _foresee(self, entries: list[int], steps: int) -> list[Tensor]:
        """The first five fields of ``Step``, for so many steps: (steps, entries, tables,
        ...).
        """
        policy = self.policy
        until = self.until[entries]
        t = self.length[entries][:, None] + torch.arange(steps)  # (entries, steps)
        new = t[:, None].expand(-1, policy.tables, -1)  # (entries, tables, steps)
        row_masks = policy.row_masks(new, until)  # (entries, tables, viewers, steps)
        query_masks = policy.query_masks(row_masks, t, until)
        row_masks = row_masks.masked_fill(~policy.owns(t)[:, None, None], 0)
        kept = policy.last_query(new) + policy.max_crop > new
        counts = self.counts[entries][..., None] + kept.cumsum(-1) - kept.long()
        firsts = torch.full_like(counts, policy.slots)
        for i, asks in enumerate(_by_bit(query_masks, policy.bits)):
            first = self.firsts[entries, :, i, None]  # (entries, tables, 1)
            firsts = torch.where(asks.any(2), firsts.minimum(first), firsts)
        i, table, step = kept.nonzero(as_tuple=True)
        slots = torch.tensor(entries)[i], table, counts[i, table, step]
        self.positions[slots] = t[i, step].int()  # they count once the rows are there
        columns = firsts, counts, kept, query_masks, row_masks
        return [x.movedim(-1, 0) for x in columns]

    def _decoder(self, table: Tensor, counter: Tensor | None = None) -> Decoder:
        from ..kernels import decode

        policy = self.policy
        options = policy.bits, policy.heads // policy.kv_heads, table, counter
        return decode.Decoder(self.k, self.v, self.masks, *options)

    def _advance(self, prepared: PreparedSteps) -> None:
        """Count the rows of the next step, which are there now."""
        kept = prepared.steps.pop().kept
        if prepared.every:
            self.counts += kept
            self.length += 1
        else:
            self.counts[prepared.entries] += kept
            self.length[prepared.entries] += 1

    def _step(
        self, entries: list[int], q, k, v, out, lse, scale: float, kernel: Kernel
    ) -> None:
        """Write out (b, c, h, d) and lse (b, c, h) of one new position of each of
        ``entries``, and take their rows.
        """
        policy = self.policy
        prepared = self._prepare_steps(entries, decodes=False)
        step = prepared.steps[-1]
        every = prepared.every
        k, v = k[:, 0], v[:, 0]  # (b, h_kv, d)
        if every and step.level:
            self.k[:, :, step.used], self.v[:, :, step.used] = k, v
            self.masks[:, :, :, step.used] = step.row_masks
        else:
            i = torch.tensor(entries)
            each = i[:, None]
            tables = torch.arange(policy.tables)
            heads = torch.arange(policy.kv_heads)
            slots = step.counts.expand(-1, policy.kv_heads)  # (entries, h_kv)
            self.k[each, heads, slots], self.v[each, heads, slots] = k[i], v[i]
            self.masks[each, tables, :, step.counts] = step.row_masks
        # (b, h_kv, group, ...): the query heads of a K/V head share a call.
        q, out, lse = [
            x[:, 0].unflatten(1, (policy.kv_heads, -1)) for x in (q, out, lse)
        ]
        for numbers, tables, first, stop in self._reads(step):
            tables, slots = slice(tables.start, tables.stop), slice(first, stop)
            heads = tables if policy.tables > 1 else slice(None)
            if every and len(numbers) == len(entries):
                runs = [(slice(None), slice(None))]
            else:
                runs = _entry_slices(entries, numbers)
            for i, j in runs:  # of the cache and of the step
                bias = None
                if not (policy.sees_all and step.level):
                    masks = self.masks[i, tables, :, slots]
                    masks = masks & step.query_masks[j, tables, :, None]
                    bias = log_counts(masks, policy.bits, lse.dtype)
                rows = self.k[i, heads, slots], self.v[i, heads, slots]
                each = i, heads
                one_query(out[each], lse[each], q[each], *rows, bias, scale, kernel)
        self._advance(prepared)

    def _reads(self, step: Step) -> list[Read]:
        """The slots that the queries of a step see: in one read if this reads few bytes
        in vain, else neighbouring tables of equal entries together where this does.
        """
        entries, tables = step.counts.shape
        whole = Read(range(entries), range(tables), step.first, step.used + 1)
        row = 2 * self.k[0, 0, 0].nbytes * (self.policy.kv_heads // tables)
        most = WASTE // row  # slots
        if 0 < whole.size <= most:
            return [whole]
        groups: dict[tuple, list[int]] = {}  # of entries, by first slots and counts
        for number, slots in enumerate(
            torch.cat([step.firsts, step.counts], 1).tolist()
        ):
            groups.setdefault(tuple(slots), []).append(number)
        reads: list[Read] = []
        for slots, numbers in groups.items():
            for table, (first, count) in enumerate(zip(slots, slots[tables:])):
                if first > count:
                    continue  # none of its queries sees a row
                read = Read(numbers, range(table, table + 1), first, count + 1)
                if reads and reads[-1].entries is numbers:
                    both = reads[-1].joined(read)
                    if both.size - reads[-1].size - read.size <= most:
                        read = both
                        reads.pop()
                reads.append(read)
        waste = whole.size - sum(read.size for read in reads)
        return [whole] if reads and waste <= most * (len(reads) - 1) else reads

    def _decode(
        self, entries: list[int], count: int, q, k, v, out, lse, scale: float
    ) -> None:
        """The same of ``count`` positions by few launches on a GPU, with no copy from or
        to the host but those of preparing.
        """
        refuse_recording("Triton's kernels", "eager")
        start = 0
        while start < count:
            prepared = self._prepare_steps(entries, True, count - start)
            decoder = prepared.decoder
            steps = len(prepared.steps)
            new = min(count - start, steps, decoder.most)
            tensors = [t[:, start:] if start else t for t in (q, k, v, out, lse)]
            decoder.step(len(decoder.table) - steps, new, scale, *tensors)
            for _ in range(new):
                self._advance(prepared)
            start += new

    def prepare_step(self) -> None:
        """Prepare one more position of each sequence, for a step in a CUDA graph: to be
        recorded, then replayed once.
        """
        recorded = self._recorded
        if recorded is None or not recorded.steps or not self._prepared.steps:
            self._check_replays()
            prepared = self._prepare_steps(list(range(len(self.k))), True)
            table = prepared.decoder.table[-len(prepared.steps) :]
            if recorded is None:
                recorded = self._recorded = RecordedStep.of(self, table)
            recorded.start(table)
        recorded.prepare()
        self._advance(self._prepared)

    def record(self, q, k, v, scale: float) -> tuple[Tensor, Tensor]:
        """out (b, 1, h, d), lse (b, h, 1) of the step that ``prepare_step`` prepared,
        while a CUDA graph is recorded.
        """
        if self._recorded is None or not self._recorded.steps:
            raise RuntimeError(
                "call prepare_step() of the cache before a step is recorded, and before each replay"
            )
        refuse_recording("Triton's kernels", "eager")
        return self._recorded.step(q, k, v, scale)

    def _check_replays(self) -> None:
        """After steps in a CUDA graph: see that all were replayed, and go on without."""
        if self._recorded is not None and self._recorded.steps:
            self._recorded.check()
            self._recorded.stop()


class Step(NamedTuple):
    """One new position of some entries: what it sees, and what it leaves for later
    ones.
    """

    firsts: Tensor  # (entries, tables), the first slot that is seen
    counts: Tensor  # (entries, tables), slots in use before
    kept: Tensor  # (entries, tables), whether the new row is kept
    query_masks: Tensor  # (entries, tables, viewers)
    row_masks: Tensor  # (entries, tables, viewers), of the new row
    first: int  # the least of ``firsts``
    used: int  # the most of ``counts``
    level: bool  # whether all ``counts`` are equal


class PreparedSteps(NamedTuple):
    """The next steps of some entries, the next one last. With a ``decoder``, whose table
    has the same by lines, they are for a GPU.
    """

    entries: list[int]
    every: bool  # whether these are all
    steps: list[Step]
    decoder: Decoder | None


class Read(NamedTuple):
    """Slots of some tables of some entries of a step."""

    entries: list[int] | range  # by their numbers in the step
    tables: range
    first: int
    stop: int

    @property
    def size(self) -> int:
        return len(self.entries) * len(self.tables) * (self.stop - self.first)

    def joined(self, other: Read) -> Read:
        """Both, and what lies between, of the same entries."""
        tables = range(self.tables.start, other.tables.stop)
        first = min(self.first, other.first)
        stop = max(self.stop, other.stop)
        return Read(self.entries, tables, first, stop)


@dataclass
class RecordedStep:
    """A step in a CUDA graph: what it reads lies where it lay when it was recorded.

    ``state`` (2,): the line of the ``decoder``'s table that the next replay reads, and
    how many replays there were. A replay adds ``more``: it leaves a line that nobody
    prepared, which gives NaN. ``steps`` were prepared since the table was filled.
    """

    decoder: Decoder
    state: Tensor
    more: Tensor
    steps: int = 0

    @staticmethod
    @outside_modes()  # or it could not be used outside of that mode
    def of(rows: LiveRows, table: Tensor) -> RecordedStep:
        """Of a cache with tables like ``table`` (steps, entries, tables, numbers)."""
        from ..kernels import decode

        policy, (b, kv_heads, _, d) = rows.policy, rows.k.shape
        state, more = table.new_tensor([[MAX_STEPS, 0], [MAX_STEPS, 1]])
        lines = table.new_zeros(MAX_STEPS + 1, *table.shape[1:])
        lines[..., decode.COUNT.value] = (
            policy.slots
        )  # as many parts as these are worth
        lines[..., decode.ENTRY.value] = -1
        recorded = RecordedStep(rows._decoder(lines, state), state, more)
        recorded.decoder.table[..., decode.COUNT.value] = 0
        # Compiled and loaded before anything is recorded: nothing of it is kept.
        q, k = (rows.k.new_zeros(b, 1, h, d) for h in (policy.heads, kv_heads))
        recorded.step(q, k, k, 1.0)
        return recorded

    def start(self, table: Tensor) -> None:
        """Begin with the first step of a table."""
        lines = self.decoder.table
        lines[: len(table)] = table
        lines[len(table) : -1] = lines[-1]
        self.stop()

    def prepare(self) -> None:
        """Let the next replay read the next line."""
        self.state[:1].fill_(self.steps)
        self.steps += 1

    def step(self, q, k, v, scale: float) -> tuple[Tensor, Tensor]:
        """out (b, 1, h, d), lse (b, h, 1) of the step that was prepared."""
        out, lse = _empty_results(q)
        self.decoder.step(0, 1, scale, q, k, v, out, lse)
        self.state.add_(self.more)
        return out, lse.transpose(1, 2)

    def check(self) -> None:
        """Raise RuntimeError unless each prepared step was replayed, once."""
        if (replays := int(self.state[1])) != self.steps:
            raise RuntimeError(
                f"{replays} steps were replayed for {self.steps} that prepare_step() prepared: reset the cache"
            )

    def stop(self) -> None:
        """Nothing is prepared, and nothing was replayed."""
        self.state[:1].fill_(MAX_STEPS)
        self.state[1:].zero_()
        self.steps = 0


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for out and lse (b, c, h) of q (b, c, h, d)."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(q.shape[:3], dtype=lse_dtype, device=q.device)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _slices(entries: list[int]) -> Iterator[slice]:
    """The entries, as few slices of the batch."""
    return (i for i, _ in _entry_slices(entries, range(len(entries))))


def _entry_slices(entries: list[int], numbers) -> Iterator[tuple[slice, slice]]:
    """The entries with these ``numbers``, as few slices of the batch and of the
    numbers.
    """
    for run in even_runs([(entries[number], number) for number in numbers]):
        yield tuple(
            slice(first, last + 1, max(1, (last - first) // max(1, len(run) - 1)))
            for first, last in zip(run[0], run[-1])
        )


def _of_heads(plan: Plan, heads: range, rows: int) -> Plan:
    """The forward of a plan for some of its heads; the others see nothing."""
    calls = (call for block in plan.blocks for call in block.part(heads).calls)
    block = HeadBlock(heads, tuple(calls))
    return replace(plan, blocks=(block,), uncovered=((0, rows),), merges=True)


def _ranges(positions: Tensor) -> Iterator[range]:
    """The positions (m,), ascending, as ranges."""
    gaps = (positions.diff() != 1).nonzero().flatten() + 1
    for run in positions.tensor_split(gaps) if len(positions) else ():
        yield range(int(run[0]), int(run[-1]) + 1)


def one_query(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    kernel: Kernel,
) -> None:
    """Write out (b, c, g, d) and lse (b, c, g) of the queries q (b, c, g, d) over all
    rows k and v (b, c, m, d), by a kernel that reads rows where they lie, or by two
    matrix products.

    ``bias`` (b, c or 1, g or 1, m) is log M, -inf where a query does not see a row;
    None: 0.
    """
    b, c, g, d = q.shape
    if kernel.name == "compiled":
        o, q, k, v = [t.transpose(1, 2) for t in (out, q, k, v)]  # (b, g or m, c, d)
        walk = dense_walk(q, k, False, scale)
        if bias is not None:
            table, weights = weighed(bias.expand(b, c, -1, -1), g)
            walk = Walk(table, scale, weights=weights)
        walk.forward(q, k, v, o, lse)
        return
    if b > 1 and k.stride(0) != c * k.stride(1):  # (b, c) is no dimension of matrices
        for i in range(b):
            one = [t if t is None else t[i : i + 1] for t in (out, lse, q, k, v, bias)]
            one_query(*one, scale, kernel)
        return
    dtype = accumulation_dtype(q.dtype)
    q = q.to(dtype).flatten(0, 1) * scale  # (b * c, g, d)
    size = CONVERTED if k.dtype in HALF else k.shape[2]
    keys, values = (x.flatten(0, 1).split(size, 1) for x in (k, v))
    scores = torch.cat([torch.bmm(q, x.to(dtype).mT) for x in keys], -1)
    scores = cap_(scores, kernel.softcap)  # (b * c, g, m)
    if bias is not None:
        by_head = scores.unflatten(0, (b, c))
        by_head.add_(bias).masked_fill_(
            bias == -torch.inf, -torch.inf
        )  # a key that is not finite stays hidden
    top = scores.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)  # (b * c, g, 1)
    parts = zip(weights.split(size, -1), values)
    o = reduce(Tensor.add_, (torch.bmm(w, x.to(dtype)) for w, x in parts))
    o /= total.masked_fill(total == 0, 1.0)  # a query that sees nothing gets 0
    out.copy_(o.unflatten(0, (b, c)))
    lse.copy_((top + total.log()).squeeze(-1).unflatten(0, (b, c)))


def log_counts(masks: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The logarithm of how many of ``bits`` bits are set in each mask; with 1, of
    whether any is.

    >>> log_counts(torch.tensor([0, 1, 6]), 3, torch.float32).exp().tolist()
    [0.0, 1.0, 2.0]
    """
    if 1 < bits <= 12:
        counts = _all_log_counts(bits, dtype, masks.device)
        return counts.index_select(0, masks.flatten().long()).view(masks.shape)
    return sum(bit.to(dtype) for bit in _by_bit(masks, bits)).log()


@lru_cache(maxsize=64)
@outside_modes()
def _all_log_counts(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    masks = torch.arange(1 << bits, device=device)
    return sum(bit.to(dtype) for bit in _by_bit(masks, bits)).log()


def _by_bit(masks: Tensor, bits: int) -> Iterator[Tensor]:
    """For each of ``bits`` bits, which masks have it; with 1, which have any."""
    if bits == 1:
        yield masks != 0
    else:
        for i in range(bits):
            yield masks >> i & 1 != 0
