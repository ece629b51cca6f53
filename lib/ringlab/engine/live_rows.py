"""The K/V rows that later queries of a sequence still see: which they are, where they
lie, and attention to them.

The rows of a K/V head lie one behind the other, by position. Rows that no later query
sees are dropped when a segment, or a block, ends. One new position is one call on the
rows that are seen; more of them are a plan of dense calls, as elsewhere, on themselves
and on the rows that are kept.

One of several ranks keeps its part of the positions, and computes its part of a result:
over these, and for some heads over the new positions themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..kernels import KERNELS
from ..kernels.base import HALF, Kernel, accumulation_dtype, gathers
from ..kernels.torch_kernels import cap_
from ..modes import outside_modes, refuse_recording
from ..patterns import Branch, Pattern
from . import blocks, dilated, execute
from .dilated import calls_on_rows, even_runs, fold_heads
from .execute import Plan

if TYPE_CHECKING:
    from ..kernels.decode import Decoder

ONE_READ = (
    2 << 20
)  # so many bytes are rather read in vain than left out by another pair of products
NEVER = -(1 << 40)  # the last query of a row that none sees
RUN = 16  # so many positions one after another are on one rank
AHEAD = 64  # so many steps of one position are prepared together at most
FEW = 16  # so many positions at once, as of a draft, are steps of ``decode``
BITS = 63  # of the longest word
PAIRS = 1 << 22  # of a step and a row are looked at together at most
CONVERTED = 4096  # rows of half precision that are converted together


class LiveRows:
    """What one rank keeps of ``batch`` sequences: rows k and v (b, h_kv, slots, d), and
    which they are.

    A table says what lies in the slots of one K/V head, or of all where all heads see
    alike. The first ``counts[entry, table]`` slots hold rows, ascending by position;
    the next one is for a new row; in those after it v and ``shown`` are 0. ``shown``
    tells, as bits, by which branches a query at ``length`` sees a row, and ``firsts``
    the first slot that it sees by each. ``peak`` is the greatest length before the last
    crop. Until the position ``until`` no row is dropped and no segment ends. ``_ahead``
    has the next steps of one position, prepared together; ``until`` and ``all_seen``
    are what they are after these. ``_late``: rows are there that should have been
    dropped, and ``shown`` holds bits of steps, see ``_through``. ``_recorded`` is there
    once a step was prepared for a CUDA graph.
    """

    @outside_modes()  # or it could not be used outside of that mode
    def __init__(
        self,
        rules: Rules,
        batch: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.rules, tables, slots = rules, rules.tables, rules.slots
        shape = batch, rules.kv_heads, slots, head_dim
        self.k, self.v = (
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)
        )
        self.shown = torch.zeros(
            batch, tables, rules.seers, slots, dtype=rules.word, device=device
        )
        self.positions = torch.zeros(batch, tables, slots, dtype=torch.int32)
        self.counts = torch.zeros(batch, tables, dtype=torch.int64)
        self.firsts = torch.zeros(batch, tables, rules.bits, dtype=torch.int64)
        self.length, self.peak, self.until = (
            torch.zeros(batch, dtype=torch.int64) for _ in range(3)
        )
        self.all_seen = torch.ones(
            batch, dtype=torch.bool
        )  # no row is kept for later queries alone
        self._far, self._late = 1, False  # so many steps are prepared next
        self._recorded: _Recorded | None = None
        self._refresh(list(range(batch)))
        triton = KERNELS["triton"]  # whose rules are those of the kernels of ``decode``
        self.decodes = triton.refuses(device, dtype, head_dim) is None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.k, self.v, self.positions, self.shown))

    @property
    def used(self) -> int:
        """How many slots hold a row of some sequence and head."""
        return int(self.counts.max())

    def rows_of(self, entry: int) -> list[Tensor]:
        """The positions of the rows that are kept of a sequence, ascending, for each
        K/V head.
        """
        self._settle()
        found = [
            rows[:count].long()
            for rows, count in zip(self.positions[entry], self.counts[entry])
        ]
        return found * (self.rules.kv_heads // len(found))

    def crop(self, lengths: list[int]) -> None:
        """Forget the positions of each sequence from its length on."""
        self._settle()
        for entry, length in enumerate(lengths):
            if length < self.length[entry]:
                for table, count in enumerate(self.counts[entry].tolist()):
                    left = int((self.positions[entry, table, :count] < length).sum())
                    self.v[entry, self.rules.heads_of(table), left : count + 1] = 0
                    self.counts[entry, table] = left
                self.peak[entry] = max(self.peak[entry], self.length[entry])
                self.length[entry] = length
                self._refresh([entry])

    def reorder(self, index: list[int]) -> None:
        """Make sequence i a copy of what was sequence ``index[i]``."""
        self._settle()
        rows = [t[:, :, : self.used] for t in (self.k, self.v)]
        for t in (
            *rows,
            self.shown,
            self.positions,
            self.counts,
            self.firsts,
            self.length,
            self.peak,
            self.until,
            self.all_seen,
        ):
            t.copy_(t[index])
        self._ahead, self._far = None, 1

    def reset(self) -> None:
        if self._recorded is not None:
            self._recorded.stop()
        for t in (self.k, self.v, self.counts, self.length, self.peak):
            t.zero_()
        self._refresh(list(range(len(self.k))))

    def state(self) -> dict:
        """A copy of all that is kept."""
        self._settle()
        rows = {
            name: getattr(self, name)[:, :, : self.used].clone()
            for name in ("k", "v", "positions")
        }
        return rows | {
            name: getattr(self, name).clone() for name in ("counts", "length", "peak")
        }

    def fits(self, state) -> bool:
        """Whether ``state`` holds tensors like those of ``state()``."""
        own = self.state()
        if not isinstance(state, dict) or state.keys() != own.keys():
            return False
        if not all(
            isinstance(state[name], Tensor) and _form(state[name]) == _form(own[name])
            for name in own
        ):
            return False
        used = {state[name].shape[2] for name in ("k", "v", "positions")}
        return (
            len(used) == 1
            and int(state["counts"].max()) <= max(used) <= self.rules.slots
        )

    def restore(self, state: dict) -> None:
        self.reset()
        for name, saved in state.items():
            t = getattr(self, name)
            (t[:, :, : saved.shape[2]] if saved.dim() > 2 else t).copy_(saved)
        self._refresh(list(range(len(self.k))))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Take new rows k, v (b, c, h_kv, d), which see nothing."""
        for entries in self._alike([k.shape[1]] * len(k)):
            self._store(entries, k, v, k.shape[1])

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
        ``lengths[i]``; their rows are kept. ``decodes``: ``FEW`` positions by the
        kernels of ``decode`` where they run.

        Of several ranks this rank's part of both.
        """
        self._replayed()
        most, counts = FEW if decodes and self.decodes else 1, {*lengths}
        form = {"dtype": accumulation_dtype(q.dtype), "device": q.device}
        if most > 1 and counts == {q.shape[1]}:  # all will be written
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            lse = torch.empty(q.shape[:3], **form)  # (b, c, h)
        else:
            out = torch.zeros_like(q, memory_format=torch.contiguous_format)
            lse = torch.full(q.shape[:3], -torch.inf, **form)
        for few in sorted(count for count in counts if 0 < count <= most):
            some = [entry for entry, count in enumerate(lengths) if count == few]
            if most > 1:
                self._decode(some, few, q, k, v, out, lse, scale)
            else:
                self._step(some, q, k, v, out, lse, scale, kernel)
        if max(counts) <= most:
            return out, lse.transpose(1, 2)
        for entries in self._alike([count * (count > most) for count in lengths]):
            count = lengths[entries[0]]
            for i in _slices(entries):
                given = q[i, :count], k[i, :count], v[i, :count]
                o, l = self._chunk(
                    entries[0], i, *given, scale, execution.tiled(kernel), execution
                )
                out[i, :count], lse[i, :count] = o, l.transpose(1, 2)
            self._store(entries, k, v, count)
        return out, lse.transpose(1, 2)

    def _alike(self, counts: list[int]) -> list[list[int]]:
        """The entries that have new rows, together those of equal history and as many."""
        found: dict[tuple, list[int]] = {}
        for entry, count in enumerate(counts):
            if count:
                rows = [
                    tuple(rows.tolist())
                    for rows in self.rows_of(entry)[: self.rules.tables]
                    if len(self.k) > 1
                ]
                found.setdefault((count, int(self.length[entry]), *rows), []).append(
                    entry
                )
        return list(found.values())

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
    ):
        """out (b, c, h, d), lse (b, h, c) of c new positions, over themselves and the
        rows of the cache.

        All ``entries`` have the history of ``entry``.
        """
        rules, t, c = self.rules, int(self.length[entry]), q.shape[1]
        heads, kv_heads, pattern = rules.heads, rules.kv_heads, rules.pattern
        new, held = range(t, t + c), self.rows_of(entry)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if isinstance(pattern, BlockSparse):
            mine = blocks.BlockParts.of([new], pattern.block_size)
            given, how = (pattern, rules.n, mine), {"causal": True, "kernel": kernel}
            own = blocks.plan_between(*given, mine, heads, kv_heads, itself=True, **how)
        else:
            own = dilated.plan_for(
                q, k, pattern, execution.cached, n=rules.n, chunk=new
            )
        if rules.ranks > 1:
            own = _of_heads(own, rules.share, c)
        if own.narrow(q.dtype, heads // kv_heads, backward=False):
            own = own.in_head_blocks(max(1, heads // 8))
        out, lse = execute.forward(
            q, k, v, own, True, scale, kernel, pool=execution.scratch()
        )
        if not any(map(len, held)):
            return out, lse
        if isinstance(pattern, BlockSparse):
            theirs = blocks.BlockParts.of(
                list(_neighbours(held[0])), pattern.block_size
            )
            plan = blocks.plan_between(
                *given, theirs, heads, kv_heads, itself=False, **how
            )
            rows = [
                x[entries, :, : len(held[0])].transpose(1, 2) for x in (self.k, self.v)
            ]  # (b, held, h_kv, d)
        else:
            calls = []
            where = {
                h: (rows, h * rules.slots + torch.arange(len(rows)))
                for h, rows in enumerate(held)
            }
            for branch in rules.branches:
                start = t // branch.length * branch.length
                asking = range(t, min(start + branch.length, t + c))
                calls += calls_on_rows(
                    branch, heads // kv_heads, start, asking, range(start, t), 0, where
                )
            calls = tuple(fold_heads(calls))
            plan = Plan(
                ((range(heads), calls, calls),),
                (),
                merges=True,
                same_rows=False,
                rows=range(c),
                period=c,
            )
            rows = [
                x[entries].flatten(1, 2).unsqueeze(2) for x in (self.k, self.v)
            ]  # (b, h_kv * slots, 1, d)
        if plan.calls:
            plan = (
                plan.in_head_blocks(max(1, heads // 8)) if out.dtype in HALF else plan
            )
            execute.forward(q, *rows, plan, True, scale, kernel, into=(out, lse))
        return out, lse

    def _store(self, entries: list[int], k: Tensor, v: Tensor, count: int) -> None:
        """Take ``count`` new rows of k and v of entries of equal history, but for those
        that no later query sees.
        """
        rules, first = self.rules, int(self.length[entries[0]])
        t, new = first + count, torch.arange(first, first + count)
        self._drop(entries, torch.full((len(entries),), t))
        live = (
            rules.last(new.expand(rules.tables, -1)) >= t - rules.max_crop
        )  # (tables, count)
        for table, start in enumerate(self.counts[entries[0]].tolist()):
            kept, heads = live[table].nonzero().flatten(), rules.heads_of(table)
            stop = start + len(kept)
            for i in _slices(entries):
                for rows, given in ((self.k, k), (self.v, v)):
                    rows[i, heads, start:stop] = given[i, :, heads][
                        :, kept.to(k.device)
                    ].transpose(1, 2)
                self.positions[i, table, start:stop] = new[kept].int()
            self.counts[entries, table] = stop
        self.length[entries] = t
        self._refresh(entries)

    def _drop(self, entries: list[int], t: Tensor) -> None:
        """Drop the rows that no query from the positions ``t`` (entries,) on sees, and
        move the others together.
        """
        positions, there = self._rows(entries)
        live = there & (
            self.rules.last(positions) >= (t - self.rules.max_crop)[:, None, None]
        )
        alike: dict[
            tuple, list[int]
        ] = {}  # entries and tables of which the same slots stay
        for i, table in (there & ~live).any(-1).nonzero().tolist():
            alike.setdefault((table, tuple(live[i, table].tolist())), []).append(i)
        for (table, _), mine in alike.items():
            stays, heads = live[mine[0], table], self.rules.heads_of(table)
            first = int(stays.int().argmin())
            moved = stays.nonzero().flatten()[first:]
            stop = first + len(moved)
            for i in _slices([entries[x] for x in mine]):
                for rows in (self.k, self.v):
                    rows[i, heads, first:stop] = rows[i, heads][
                        :, :, moved.to(rows.device)
                    ]
                self.v[i, heads, stop : len(stays) + 1] = 0
                self.positions[i, table, first:stop] = self.positions[i, table][
                    :, moved
                ]
                self.counts[i, table] = stop

    def _rows(self, entries: list[int]) -> tuple[Tensor, Tensor]:
        """The positions (entries, tables, m) of the slots in use, and which hold a row."""
        counts = self.counts[entries]
        used = int(counts.max())
        return self.positions[entries, :, :used], torch.arange(used) < counts[
            :, :, None
        ]

    def _settle(self) -> None:
        """Drop what ``_through`` has left for later."""
        self._replayed()
        if self._late:
            self._late, every = False, list(range(len(self.k)))
            self._drop(every, self.length)
            self._refresh(every)

    def _refresh(self, entries: list[int]) -> None:
        """Make new what is known of the rows, after some came or went, or a segment
        ended.
        """
        self._ahead = None
        rules, length = self.rules, self.length[entries]
        positions, there = self._rows(entries)
        bits = rules.visible(positions, length).masked_fill_(
            ~there[:, :, None], 0
        )  # (entries, tables, seers, m)
        self.shown[entries] = 0
        self.shown[entries, :, :, : bits.shape[-1]] = bits.to(self.shown)
        self.all_seen[entries] = ~((bits == 0) & there[:, :, None]).flatten(1).any(1)
        self.firsts[entries] = self.counts[entries][:, :, None].expand(
            -1, -1, rules.bits
        )
        self.until[entries] = rules.end(length)
        if bits.shape[-1]:
            seen = torch.stack(
                [(bits >> i & 1).any(2) for i in range(rules.bits)], 2
            )  # (entries, tables, bits, m)
            self.firsts[entries] = torch.where(
                seen.any(-1), seen.int().argmax(-1), self.firsts[entries]
            )
            leaves = rules.last(positions).masked_fill_(~there, rules.n).amin((1, 2))
            self.until[entries] = torch.minimum(
                self.until[entries], leaves + 1 + rules.max_crop
            )

    def _step(
        self, entries: list[int], q, k, v, out, lse, scale: float, kernel: Kernel
    ) -> None:
        """Write out (b, c, h, d) and lse (b, c, h) of one new position of each of
        ``entries``, and take their rows.
        """
        rules, g, every = (
            self.rules,
            self.rules.heads // self.rules.kv_heads,
            len(entries) == len(self.k),
        )
        self._settle()
        ahead = self._prepared(entries, False)
        each = slice(None) if every else torch.tensor(entries)
        step, given = ahead.steps[-1], (k[each, 0], v[each, 0])  # (entries, h_kv, d)
        if rules.ranks > 1:
            given = (
                x.masked_fill(~step.mine[..., None].to(x.device), 0) for x in given
            )
        if every and step.level:
            at = rows_at = slice(None), slice(None), step.used
        else:
            at = (
                torch.tensor(entries)[:, None],
                torch.arange(rules.tables),
                step.counts,
            )  # (entries, tables)
            rows_at = (
                at[0],
                torch.arange(rules.kv_heads),
                step.counts.expand(-1, rules.kv_heads),
            )
        for rows, x in zip((self.k, self.v), given):
            rows[rows_at] = x
        self.positions[at] = step.positions
        self.shown[at[0], at[1], :, at[2]] = step.shown
        everything = range(len(entries)), slice(0, rules.tables), 0, step.used + 1
        for some, tables, start, stop in (
            [everything] if step.plain else self._reads(step)
        ):
            heads = slice(None) if rules.shared else tables
            for run in even_runs([(entries[x], x) for x in some]):
                i, j = (_slice([(x,) for x in column]) for column in zip(*run))
                bias = None
                if not step.plain:
                    seen = (
                        self.shown[i, tables, :, start:stop]
                        & step.mask[j, tables, :, None]
                    )
                    bias = log_counts(
                        seen, rules.bits, lse.dtype
                    )  # (entries, tables, seers, m)
                rows = self.k[i, heads, start:stop], self.v[i, heads, start:stop]
                o, l = one_query(
                    q[i, 0].unflatten(1, (-1, g))[:, heads], *rows, bias, scale, kernel
                )
                out[i, 0].unflatten(1, (-1, g))[:, heads] = o.to(out.dtype)
                lse[i, 0].unflatten(1, (-1, g))[:, heads] = l
        self._count(ahead, ahead.steps.pop().kept)
        self._end(ahead)

    def _decode(
        self, entries: list[int], count: int, q, k, v, out, lse, scale: float
    ) -> None:
        """The same of ``count`` positions by few launches on a GPU, with no copy from or
        to the host but those of a look-ahead.
        """
        refuse_recording("Triton's kernels", "eager")
        start = 0
        while start < count:
            ahead = self._prepared(entries, True, count - start)
            number = len(ahead.decoder.table) - len(ahead.steps)
            new = min(count - start, len(ahead.steps), ahead.decoder.most)
            given = [t[:, start:] if start else t for t in (q, k, v, out, lse)]
            ahead.decoder.step(number, new, scale, *given)
            for _ in range(new):
                self._count(ahead, ahead.steps.pop())
            self._end(ahead)
            start += new

    def prepare_step(self) -> None:
        """Prepare one more position of each sequence, for a step in a CUDA graph: to be
        recorded, then replayed once.
        """
        entries, recorded = list(range(len(self.k))), self._recorded
        if recorded is not None and recorded.steps and self._ahead.steps:
            ahead = self._ahead  # made below
        else:
            self._replayed()
            ahead = self._prepared(entries, True)
            table = ahead.decoder.table[-len(ahead.steps) :]
            if recorded is None:
                recorded = self._recorded = _Recorded.of(self, table)
            recorded.start(table)
        recorded.prepare()
        self._count(ahead, ahead.steps.pop())

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

    def _replayed(self) -> None:
        """After steps in a CUDA graph: see that all were replayed, and go on without."""
        if self._recorded is None or not self._recorded.steps:
            return
        self._recorded.check()
        self._recorded.stop()
        self._end(self._ahead)

    def _prepared(self, entries: list[int], decodes: bool, least: int = 1) -> _Ahead:
        """The prepared steps of ``entries``, for ``_decode`` or for ``_step``; new ones
        are ``least`` or more, where no row leaves before.
        """
        ahead = self._ahead
        if ahead is not None and (
            ahead.entries != entries or decodes != (ahead.decoder is not None)
        ):
            self._ahead, self._far = None, 1
        if self._ahead is None:
            self._far = max(self._far, least)
            far = self._through if self.rules.ahead > 1 else self._launches
            self._ahead = far(entries) if decodes else self._look_ahead(entries)
        return self._ahead

    def _count(self, ahead: _Ahead, kept: Tensor) -> None:
        """Count the rows of a step, ``kept`` (entries, tables) of them."""
        if len(ahead.entries) == len(self.k):
            self.counts += kept
            self.length += 1
        else:
            self.counts[ahead.entries] += kept
            self.length[ahead.entries] += 1

    def _end(self, ahead: _Ahead) -> None:
        """After the last of the prepared steps: drop rows, or end a segment."""
        if not ahead.steps:
            self._ahead = None
            if ahead.due:
                self._drop(ahead.due, self.length[ahead.due])
                self._refresh(ahead.due)

    def _foresee(self, entries: list[int]) -> tuple:
        """What the next positions of ``entries``, one at a time, see and leave: tensors
        (entries, steps, ...), and the entries that are due after them.

        Until a row is dropped or a segment ends; at most twice as many as the last
        time, since they may not be used.
        """
        rules = self.rules
        t, counts = (
            self.length[entries],
            self.counts[entries],
        )  # (entries,), (entries, tables)
        far = min(
            self._far, rules.n - int(t.max()), int((self.until[entries] - t).min())
        )
        self._far = min(2 * self._far, AHEAD)
        t = t[:, None] + torch.arange(far)  # (entries, steps)
        asked, shown, last = (x.unflatten(0, t.shape) for x in rules.row(t.flatten()))
        mine = rules.owns(t)[..., None]  # (entries, steps, 1)
        shown, last = (
            shown.masked_fill(~mine[..., None], 0),
            last.masked_fill(~mine, NEVER),
        )
        kept = last + rules.max_crop > t[..., None]  # (entries, steps, tables)
        leaves = (last + 1 + rules.max_crop).masked_fill_(~kept, rules.n + 1).amin(2)
        until = torch.minimum(
            self.until[entries][:, None], leaves.cummin(1).values
        )  # (entries, steps)
        due = t + 1 >= until
        steps = int(due.any(0).int().argmax()) + 1 if due.any() else t.shape[1]
        counts = (
            counts[:, None] + kept.cumsum(1) - kept.long()
        )  # (entries, steps, tables): before each step
        asks = (
            (asked.unsqueeze(-1) >> torch.arange(rules.bits) & 1).bool().any(3)
        )  # (entries, steps, tables, bits)
        firsts = (
            self.firsts[entries][:, None].masked_fill(~asks, rules.slots).amin(-1)
        )  # (entries, steps, tables)
        self.until[entries] = until[:, steps - 1]
        due = [
            entry for entry, ends in zip(entries, due[:, steps - 1].tolist()) if ends
        ]
        columns = t[..., None].int(), mine, counts, kept, firsts, asked, shown
        return *(x[:, :steps] for x in columns), due

    def _look_ahead(self, entries: list[int]) -> _Ahead:
        """What ``_foresee`` says, by steps."""
        t, mine, counts, kept, firsts, asked, shown, due = self._foresee(entries)
        used = counts.amax((0, 2))
        level = (counts == used[:, None]).all(2).all(0)
        plain = torch.zeros_like(level)  # whether each query sees each row, once
        if self.rules.bits == 1:
            unseen = (shown == 0).flatten(2).any(2)  # (entries, steps)
            all_seen = self.all_seen[entries][:, None] & (unseen.cumsum(1) == 0)
            plain = level & all_seen.all(0) & (asked > 0).flatten(2).all(2).all(0)
            self.all_seen[entries] = all_seen[:, -1]
        words = (x.to(self.shown) for x in (asked, shown))
        columns = t, mine, counts, kept, firsts, asked, *words
        numbers = firsts.amin((0, 2)), used, level, plain
        each = zip(*(x.unbind(1) for x in columns), *(x.tolist() for x in numbers))
        return _Ahead(entries, [_Step(*one) for one in each][::-1], due)

    def _launches(self, entries: list[int]) -> _Ahead:
        """What ``_foresee`` says, where ``decode`` reads it."""
        t, _, *told, due = self._foresee(entries)
        unseen = (told[-1] == 0).flatten(1).any(1)
        self.all_seen[entries] = self.all_seen[entries] & ~unseen
        return self._decoder(entries, t, *told, due)

    def _through(self, entries: list[int]) -> _Ahead:
        """The same for steps in which rows leave, where blocks are small: these are
        dropped together, before the next look-ahead, and until then a bit of ``shown``
        says for each of the steps whether its query sees a row.
        """
        rules, size, t = self.rules, self.rules.run, self.length[entries]
        self._drop(entries, t)
        self._late = True
        positions, there = (x[:, 0] for x in self._rows(entries))  # (entries, m)
        held = positions.shape[1]
        far = min(self._far, rules.ahead, rules.n - int(t.max()))
        far = max(1, min(far, PAIRS // (held + 1)))
        self._far = min(2 * self._far, AHEAD)
        step = torch.arange(far)
        t = t[:, None] + step  # (entries, steps)
        words = []
        for now, rows in zip(t, torch.cat([positions, t], 1)):
            seen = rules.pattern.blocks(rules.n, now // size, rows // size)
            seen = seen & (rows <= now[:, None])  # (steps, m + steps)
            words.append((seen.long() << step[:, None]).sum(0))
        old, new = torch.stack(words).split([held, far], 1)
        self.shown[entries, 0, 0, :held] = old.masked_fill(~there, 0).to(self.shown)
        kept = (rules.last(t) + rules.max_crop > t)[..., None]  # (entries, steps, 1)
        counts = self.counts[entries][:, None] + kept.cumsum(1) - kept.long()
        asked = (1 << step).expand_as(t)[..., None, None]
        shown = new.masked_fill(~rules.owns(t), 0)[..., None, None]
        told = counts, kept, torch.zeros_like(counts), asked, shown
        return self._decoder(entries, t[..., None].int(), *told, [])

    def _decoder(
        self, entries, t, counts, kept, firsts, asked, shown, due: list[int]
    ) -> _Ahead:
        """These steps of ``decode``, all of (entries, steps, ...); their rows' places
        are noted, which counts once the rows are there.
        """
        from ..kernels import decode

        entry, step, table = kept.nonzero(as_tuple=True)
        places = torch.tensor(entries)[entry], table, counts[entry, step, table]
        self.positions[places] = t[entry, step, 0]
        told = decode.told(entries, firsts, counts, kept, asked, shown)
        rules = self.rules
        how = rules.bits, rules.heads // rules.kv_heads, told
        decoder = decode.Decoder(self.k, self.v, self.shown, *how)
        return _Ahead(entries, [*kept.unbind(1)][::-1], due, decoder)

    def _reads(self, step: _Step) -> list[tuple[Sequence[int], slice, int, int]]:
        """(numbers of entries, tables, first slot, end) to read for new queries; what
        sees alike is read together.
        """
        asked, counts, firsts = step.asked, step.counts, step.firsts
        one = range(len(asked)), slice(0, asked.shape[1]), step.first, step.used + 1
        if one[2] < one[3] and self._bytes([one]) <= ONE_READ:
            return [one]
        alike: dict[tuple, list[int]] = {}
        for i, told in enumerate(
            torch.cat([asked.flatten(1), firsts, counts], 1).tolist()
        ):
            alike.setdefault(tuple(told), []).append(i)
        found = []
        for some in alike.values():
            first, count = firsts[some[0]].tolist(), counts[some[0]].tolist()
            members: dict[tuple[int, ...], list[int]] = {}
            for table, bits in enumerate(asked[some[0]].tolist()):
                if any(bits):
                    members.setdefault(tuple(bits), []).append(table)
            reads = []
            for run in (
                run
                for tables in members.values()
                for run in even_runs([(table,) for table in tables])
            ):
                ends = (
                    min(first[table] for (table,) in run),
                    max(count[table] for (table,) in run) + 1,
                )
                reads.append((some, _slice(run), *ends))
            found += self._joined(reads, some)
        return self._joined(found, one[0])

    def _joined(self, reads: list[tuple], entries: Sequence[int]) -> list[tuple]:
        """These reads, or one of all tables of ``entries`` if it reads few bytes in
        vain.
        """
        if len(reads) < 2:
            return reads
        one = (
            entries,
            slice(0, self.rules.tables),
            min(read[2] for read in reads),
            max(read[3] for read in reads),
        )
        return (
            [one]
            if self._bytes([one]) - self._bytes(reads) <= ONE_READ * (len(reads) - 1)
            else reads
        )

    def _bytes(self, reads: list[tuple]) -> int:
        tables = range(self.rules.tables)
        rows = sum(
            len(entries) * len(tables[some]) * (stop - start)
            for entries, some, start, stop in reads
        )
        return (
            rows
            * 2
            * self.k.shape[3]
            * self.k.element_size()
            * (self.rules.kv_heads // len(tables))
        )


class _Step(NamedTuple):
    """One new position of some entries: what it sees, and what it leaves for later
    ones.
    """

    positions: Tensor  # (entries, 1)
    mine: Tensor  # (entries, 1), whether the new row is kept on this rank
    counts: Tensor  # (entries, tables), slots in use before
    kept: Tensor  # (entries, tables), whether a later query sees the new row
    firsts: Tensor  # (entries, tables), the first slot that is seen
    asked: Tensor  # (entries, tables, seers), the bits by which the query sees
    mask: Tensor  # the same, where ``LiveRows.shown`` is
    shown: Tensor  # (entries, tables, seers), those of the new row
    first: int  # of all of ``firsts``
    used: int  # the most of ``counts``
    level: bool  # whether all ``counts`` are equal
    plain: bool  # whether the query sees each row, once


@dataclass
class _Recorded:
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
    def of(rows: LiveRows, table: Tensor) -> _Recorded:
        """Of a cache with tables like ``table`` (steps, entries, tables, numbers)."""
        from ..kernels import decode

        rules, b, d = rows.rules, len(rows.k), rows.k.shape[3]
        state, more = (table.new_tensor([AHEAD, 0]), table.new_tensor([AHEAD, 1]))
        # As many parts as the most rows are worth.
        lines = table.new_zeros(AHEAD + 1, *table.shape[1:])
        lines[..., decode.COUNT.value] = rules.slots
        lines[..., decode.ENTRY.value] = -1
        group = rules.heads // rules.kv_heads
        given = rows.k, rows.v, rows.shown, rules.bits, group, lines, state
        made = _Recorded(decode.Decoder(*given), state, more)
        made.decoder.table[..., decode.COUNT.value] = 0
        # Compiled and loaded before anything is recorded: nothing of it is kept.
        shapes = (b, 1, rules.heads, d), (b, 1, rules.kv_heads, d)
        q, k = (rows.k.new_zeros(shape) for shape in shapes)
        made.step(q, k, k, 1.0)
        return made

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
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        form = {"dtype": accumulation_dtype(q.dtype), "device": q.device}
        lse = torch.empty(q.shape[:3], **form)
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
        self.state[:1].fill_(AHEAD)
        self.state[1:].zero_()
        self.steps = 0


class _Ahead(NamedTuple):
    """The next steps of some entries, the next one last; after them rows of the entries
    ``due`` are dropped, or their segment ends. For a ``decoder``, which knows the rest,
    ``steps`` are which rows are kept (entries, tables).
    """

    entries: list[int]
    steps: list[_Step] | list[Tensor]
    due: list[int]
    decoder: Decoder | None = None


def _form(t: Tensor) -> tuple:
    """All of the dtype and the shape but the number of rows."""
    return t.dtype, t.dim(), t.shape[:2], t.shape[3:]


def _slices(entries: list[int]) -> Iterator[slice]:
    """The entries, as few slices of the batch."""
    return map(_slice, even_runs([(entry,) for entry in entries]))


def _slice(run: list[tuple[int]]) -> slice:
    """The slice of an arithmetic progression."""
    (first,), (last,) = run[0], run[-1]
    return slice(first, last + 1, max(1, (last - first) // max(1, len(run) - 1)))


def _of_heads(plan: Plan, heads: range, rows: int) -> Plan:
    """The forward of a plan for some of its heads; the others see nothing."""
    calls = (
        one
        for _, forward, _ in plan.blocks
        for call in forward
        for one in call.by_heads()
    )
    mine = tuple(filter(None, (call.part(heads.start, heads.stop) for call in calls)))
    return replace(
        plan, blocks=((heads, mine, mine),), uncovered=((0, rows),), merges=True
    )


def _neighbours(positions: Tensor) -> Iterator[range]:
    """The positions (m,), ascending, as ranges."""
    for some in positions.tensor_split((positions.diff() != 1).nonzero().flatten() + 1):
        yield range(int(some[0]), int(some[-1]) + 1)


def one_query(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """out (b, c, g, d), lse (b, c, g) of the queries q (b, c, g, d) over all rows k and
    v (b, c, m, d).

    ``bias`` (b, c or 1, g or 1, m) is log M, -inf where a query does not see a row;
    None: 0. By a kernel that reads rows where they lie, or by two matrix products.
    """
    b, c, g, d = q.shape
    if gathers(kernel):
        if bias is not None:
            bias = bias.transpose(1, 2).expand(-1, -1, c, -1)  # (b, g or 1, c, m)
        out, lse = kernel.forward(
            *(t.transpose(1, 2) for t in (q, k, v)), False, scale, bias
        )  # (b, g, c, d)
        return out.transpose(1, 2), lse
    if b > 1 and k.stride(0) != c * k.stride(
        1
    ):  # (b, c) is no one dimension of matrices
        parts = []
        for i in range(b):
            one = slice(i, i + 1)
            parts.append(
                one_query(
                    q[one],
                    k[one],
                    v[one],
                    None if bias is None else bias[one],
                    scale,
                    kernel,
                )
            )
        return torch.cat([o for o, _ in parts]), torch.cat([l for _, l in parts])
    q, k, v = (
        (x.to(accumulation_dtype(x.dtype)) if x is q else x).flatten(0, 1)
        for x in (q, k, v)
    )  # (b * c, ., d)
    step = CONVERTED if k.dtype in HALF else k.shape[1]
    pieces = (
        list(zip(k.split(step, 1), v.split(step, 1))) if step < k.shape[1] else [(k, v)]
    )
    scores = [
        torch.bmm(q * scale, k_.to(q.dtype).mT) for k_, _ in pieces
    ]  # (b * c, g, m)
    scores = torch.cat(scores, -1) if len(scores) > 1 else scores[0]
    scores = cap_(scores, getattr(kernel, "softcap", None))
    if bias is not None:
        by_head = scores.unflatten(0, (b, c))
        by_head.add_(bias).masked_fill_(
            bias == -torch.inf, -torch.inf
        )  # a key that is not finite stays hidden
    top = scores.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)  # (b * c, g, 1)
    parts = zip(weights.split(step, -1), pieces)
    out = reduce(Tensor.add_, (torch.bmm(w, v_.to(q.dtype)) for w, (_, v_) in parts))
    out = out / total.masked_fill(total == 0, 1.0)  # a query that sees nothing gets 0
    return out.unflatten(0, (b, c)), (top + total.log()).squeeze(-1).unflatten(
        0, (b, c)
    )


def log_counts(words: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The logarithm of how many of ``bits`` bits are set in each word."""
    if bits > 12:
        return sum(words >> i & 1 for i in range(bits)).to(dtype).log()
    return (
        _logs(bits, dtype, words.device)
        .index_select(0, words.flatten().long())
        .view(words.shape)
    )


@lru_cache(maxsize=64)
@outside_modes()
def _logs(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    words = torch.arange(1 << bits, device=device)
    return sum(words >> i & 1 for i in range(bits)).to(dtype).log()


@dataclass(frozen=True, eq=False)
class Rules:
    """Which queries see which rows, and which of ``ranks`` keeps them: Dense and
    Dilated patterns over ``n`` positions.

    Rows are looked at by tables, and by the ``seers`` of a table: the query heads of
    its K/V head, or one for all heads where these see alike. Positions are (tables, m).
    """

    pattern: Pattern
    heads: int
    kv_heads: int
    n: int
    max_crop: int
    rank: int
    ranks: int
    launches: bool = False
    run = RUN
    ahead = 1  # steps that may pass before rows that they no longer see are dropped

    @property
    def share(self) -> range:
        """The query heads for which this rank attends to new positions."""
        at = (
            self.kv_heads * rank // self.ranks * (self.heads // self.kv_heads)
            for rank in (self.rank, self.rank + 1)
        )
        return range(*at)

    def owns(self, positions: Tensor | int) -> Tensor | bool:
        """Which positions this rank keeps: runs of them, by a hash, so that no rate of
        a pattern favours a rank.
        """
        if self.ranks == 1:
            return positions == positions
        return (
            (positions // self.run * 2654435761 & 0xFFFFFFFF) >> 16
        ) % self.ranks == self.rank

    @cached_property
    def branches(self) -> list[Branch]:
        return sorted(
            self.pattern.branches(self.n, self.heads, self.kv_heads),
            key=lambda b: b.rate,
        )

    @property
    def bits(self) -> int:
        return len(self.branches)

    @cached_property
    def offsets(self) -> Tensor:
        """The offset of each branch (tables, seers, branches), -1 where a head does not
        run it.
        """
        found = torch.full((self.heads, self.bits), -1)
        for i, branch in enumerate(self.branches):
            found[list(branch.heads), i] = torch.tensor(branch.offsets)
        alike = bool((found == found[0]).all())
        return found[None, :1] if alike else found.unflatten(0, (self.kv_heads, -1))

    @cached_property
    def shared(self) -> bool:
        """Whether one table is for all heads."""
        return self.kv_heads > len(self.offsets)

    @property
    def tables(self) -> int:
        return len(self.offsets)

    @property
    def seers(self) -> int:
        return self.offsets.shape[1]

    @property
    def word(self) -> torch.dtype:
        """Of a bit for each branch."""
        return (
            torch.int16
            if self.bits < 16
            else torch.int32
            if self.bits < 32
            else torch.int64
        )

    def heads_of(self, table: int) -> slice:
        """The K/V heads of a table."""
        return slice(None) if self.shared else slice(table, table + 1)

    @cached_property
    def slots(self) -> int:
        """The rows that are kept at most, and those of ``ahead`` queries themselves."""
        each = {tuple(some.flatten().tolist()): some for some in self.offsets}
        return min(self.n + 1, self.ahead + max(map(self._most, each.values())))

    def _most(self, offsets: Tensor) -> int:
        """The most rows that a table with these offsets (seers, branches) keeps."""
        last = torch.full((self.n,), NEVER)
        for i, branch in enumerate(self.branches):
            for offset in set(offsets[:, i].tolist()) - {-1}:
                w, r, whole = (
                    branch.length,
                    branch.rate,
                    self.n // branch.length * branch.length,
                )
                for part, size in ((last[:whole], w), (last[whole:], self.n - whole)):
                    if offset < size and len(part):
                        rows = part.view(-1, size)[:, offset::r]  # of each segment
                        final = offset + (size - 1 - offset) // r * r
                        starts = torch.arange(len(rows)) * size + (
                            whole if size < w else 0
                        )
                        rows.copy_(torch.maximum(rows, (starts + final)[:, None]))
        return most_alive(
            last.masked_fill_(~self.owns(torch.arange(self.n)), NEVER) + self.max_crop
        )

    def needs_dropped(self, length: int, peak: int) -> bool:
        """Whether a query from ``length`` on sees a row that was dropped when there
        were ``peak`` positions.
        """
        if length >= peak - self.max_crop:
            return False
        last = self.last_anywhere(torch.arange(length).expand(self.tables, -1))
        return bool(((last >= length) & (last < peak - self.max_crop)).any())

    def last(self, positions: Tensor) -> Tensor:
        """The last query that sees each row, ``NEVER`` if there is none or another rank
        keeps it: (tables, m).
        """
        positions = positions.long()
        return self.last_anywhere(positions).masked_fill_(~self.owns(positions), NEVER)

    def last_anywhere(self, positions: Tensor) -> Tensor:
        """The same, whichever rank keeps it."""
        found = torch.full(positions.shape, NEVER)
        for i, branch in enumerate(self.branches):
            start = positions // branch.length * branch.length
            size = (self.n - start).clamp(max=branch.length)
            for j in range(self.seers):
                offset = self.offsets[:, j, i, None]  # (tables, 1)
                final = (
                    start + offset + (size - 1 - offset) // branch.rate * branch.rate
                )
                sees = (positions - start) % branch.rate == offset
                found = torch.maximum(found, torch.where(sees, final, NEVER))
        return found

    def visible(self, positions: Tensor, t: Tensor) -> Tensor:
        """By which branches a query at t (e,) could see each row (e, tables, m), as
        bits: (e, tables, seers, m).
        """
        found = torch.zeros(
            *positions.shape[:2], self.seers, positions.shape[2], dtype=torch.int64
        )
        for i, branch in enumerate(self.branches):
            start = t // branch.length * branch.length
            at = (positions.long() - start[:, None, None]).unsqueeze(
                2
            )  # (e, tables, 1, m)
            inside = (at >= 0) & (at < branch.length)
            found += (
                inside & (at % branch.rate == self.offsets[:, :, i, None])
            ).long() << i
        return found

    def row(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the positions t (e,): the bits of queries and of rows (e, tables, seers);
        last queries (e, tables).
        """
        w, r, powers = self._sizes
        t = t[:, None, None, None]
        start = t - t % w  # (e, 1, 1, branches)
        sees = t % w % r == self.offsets  # (e, tables, seers, branches)
        left = (self.n - start).clamp(max=w) - 1 - self.offsets
        final = torch.where(sees, start + self.offsets + left // r * r, NEVER).amax(
            (2, 3)
        )
        bits = (sees * powers).sum(-1)
        return bits, bits, final

    @cached_property
    def _sizes(self) -> tuple[Tensor, Tensor, Tensor]:
        lengths, rates = (
            torch.tensor([getattr(b, name) for b in self.branches])
            for name in ("length", "rate")
        )
        return lengths, rates, 2 ** torch.arange(self.bits)

    def end(self, t: Tensor) -> Tensor:
        """The next positions from which other rows are seen: where a segment ends."""
        w, *_ = self._sizes
        return ((t[:, None] // w + 1) * w).amin(1)


class BlockRules(Rules):
    """The same for block-sparse patterns, where all heads see alike."""

    branches, bits, offsets = (), 1, torch.zeros(1, 1, 1)

    @cached_property
    def _last(self) -> Tensor:
        """The last query that sees each block, or ``NEVER``: (blocks,)."""
        found = torch.full((self.pattern.count(self.n),), -1)
        for rows, cols, seen in self.pattern.chunks(self.n):
            seen = seen & (cols <= rows[:, None])
            newest = torch.where(seen, rows[:, None], -1).amax(0)
            found[cols] = torch.maximum(found[cols], newest)
        ends = ((found + 1) * self.pattern.block_size).clamp(max=self.n) - 1
        return torch.where(found < 0, NEVER, ends)

    @property
    def run(self):
        return self.pattern.block_size

    @property
    def ahead(self):
        """Many, where rows leave every few steps: a word has a bit for each."""
        return BITS if self.launches and self.run < BITS else 1

    @property
    def word(self):
        return torch.int64 if self.ahead > 1 else torch.int16

    def _most(self, offsets) -> int:
        return most_alive(self.last(torch.arange(self.n)) + self.max_crop)

    def last_anywhere(self, positions):
        return self._last[positions // self.pattern.block_size]

    def visible(self, positions, t):
        size = self.pattern.block_size
        numbers, where = (positions[:, 0].long() // size).unique(
            return_inverse=True
        )  # (blocks,), (e, m)
        queries, which = (t.clamp(max=self.n - 1) // size).unique(
            return_inverse=True
        )  # (queries,), (e,)
        seen = (
            self.pattern.blocks(self.n, queries, numbers)[which[:, None], where]
            & (t < self.n)[:, None]
        )
        return seen.long()[:, None, None]

    def row(self, t):
        block, at = (t // self.pattern.block_size).unique(return_inverse=True)
        own = self.pattern.blocks(self.n, block, block).diagonal().long()[at]
        return (
            torch.ones(len(t), 1, 1, dtype=torch.int64),
            own[:, None, None],
            self._last[block][at][:, None],
        )

    def end(self, t):
        return (t // self.pattern.block_size + 1) * self.pattern.block_size


def most_alive(last: Tensor) -> int:
    """The most rows at once, of rows x that are there from position x + 1 to
    ``last[x]`` (n,), if that is not before.

    >>> most_alive(torch.tensor([3, 0, 3, 3, NEVER]))
    2
    """
    n = len(last)
    there = last > torch.arange(n)
    gone = torch.bincount(last[there].clamp(max=n), minlength=n + 1)[:n]
    return int((there.long() - gone).cumsum(0).max())


@lru_cache(maxsize=64)
def rules_of(
    pattern: Pattern,
    heads: int,
    kv_heads: int,
    n: int,
    max_crop: int,
    rank: int,
    ranks: int,
    launches: bool = False,
) -> Rules:
    """``launches``: for a device on which ``decode`` may run."""
    kind = BlockRules if isinstance(pattern, BlockSparse) else Rules
    return kind(pattern, heads, kv_heads, n, max_crop, rank, ranks, launches)
