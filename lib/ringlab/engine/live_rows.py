"""The K/V rows that later queries of a sequence still see: which they are, where they lie, and attention to them.

The rows of a K/V head lie one behind the other, by position. Rows that no later query sees are dropped when a segment,
or a block, ends. One new position is two matrix products on the rows that are seen; more of them are a plan of dense
calls, as elsewhere, on themselves and on the rows that are kept.

One of several ranks keeps its part of the positions, and computes its part of a result: over these, and for some heads
over the new positions themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..block_patterns import BlockSparse
from ..kernels import supports_lower_right_causal
from ..kernels.base import HALF, Kernel, accumulation_dtype
from ..patterns import Branch, Pattern
from . import blocks, dilated, execute
from .dilated import calls_on_rows, even_runs, fold_heads
from .execute import Plan

ONE_READ = 2 << 20  # so many bytes are rather read in vain than left out by another pair of products
NEVER = -(1 << 40)  # the last query of a row that none sees
RUN = 16  # so many positions one after another are on one rank
CONVERTED = 4096  # rows of half precision that are converted together


class LiveRows:
    """What one rank keeps of ``batch`` sequences: rows k and v (b, h_kv, slots, d), and which they are."""

    @torch.inference_mode(False)  # or it could not be used outside of that mode
    def __init__(self, rules: Rules, batch: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.rules = rules
        shape = batch, rules.kv_heads, rules.slots, head_dim
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.lanes = [Lane(rules, range(batch))]

    @property
    def lengths(self) -> list[int]:
        """How many positions each sequence has."""
        found = {entry: lane.length for lane in self.lanes for entry in lane.entries}
        return [found[entry] for entry in range(len(found))]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + sum(lane.positions.nbytes + lane.codes.nbytes for lane in self.lanes)

    @property
    def used(self) -> int:
        """How many slots hold a row of some sequence and head."""
        return max(max(lane.counts) for lane in self.lanes)

    def positions(self, entry: int) -> list[Tensor]:
        """The positions of the rows of a sequence, ascending, for each K/V head."""
        lane = self.lane_of(entry)
        found = [rows[:count].long() for rows, count in zip(lane.positions, lane.counts)]
        return found * (self.rules.kv_heads // len(found))

    def lane_of(self, entry: int) -> Lane:
        return next(lane for lane in self.lanes if entry in lane.entries)

    def crop(self, lengths: list[int]) -> None:
        """Forget the positions of each sequence from its length on."""
        self.split(lengths)
        for lane in self.lanes:
            if (length := lengths[lane.entries[0]]) < lane.length:
                for table, count in enumerate(lane.counts):
                    lane.counts[table] = int((lane.positions[table, :count] < length).sum())
                    self._clear(lane, table, lane.counts[table], count)
                lane.length = length
                lane.refresh()

    def reorder(self, index: list[int]) -> None:
        """Make sequence i a copy of what was sequence ``index[i]``."""
        used = self.used
        for rows in (self.k, self.v):
            rows[:, :, :used] = rows[index, :, :used]
        for lane in self.lanes:
            lane.entries = [i for i, old in enumerate(index) if old in lane.entries]
        self.lanes = [lane for lane in self.lanes if lane.entries]

    def reset(self) -> None:
        self.k.zero_()
        self.v.zero_()
        self.lanes = [Lane(self.rules, range(len(self.k)))]

    def state(self) -> dict:
        """A copy of all that is kept."""
        k, v = (rows[:, :, : self.used].clone() for rows in (self.k, self.v))
        return {"k": k, "v": v, "lanes": [lane.state() for lane in self.lanes]}

    def restore(self, state: dict) -> None:
        self.reset()
        used = state["k"].shape[2]
        self.k[:, :, :used], self.v[:, :, :used] = state["k"], state["v"]
        self.lanes = [Lane(self.rules, **lane) for lane in state["lanes"]]

    def split(self, values: list[int]) -> None:
        """Divide the lanes so that all entries of one have the same value."""
        lanes = []
        for lane in self.lanes:
            alike: dict[int, list[int]] = {}
            for entry in lane.entries:
                alike.setdefault(values[entry], []).append(entry)
            lane.entries, *others = alike.values()
            lanes += [lane, *(Lane(self.rules, **lane.state() | {"entries": entries}) for entries in others)]
        self.lanes = lanes

    def _clear(self, lane: Lane, table: int, start: int, stop: int) -> None:
        """Zero slots of v without a row: another head may have one there, and they are read with it, with weight 0."""
        for i in lane.slices():
            self.v[i, self.rules.heads_of(table), start:stop] = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """Take new rows k, v (b, c, h_kv, d), which see nothing."""
        for lane in self.lanes:
            self._store(lane, k, v, k.shape[1])

    def attend(self, q, k, v, lengths: list[int], scale: float, kernel: Kernel, execution) -> tuple[Tensor, Tensor]:
        """out (b, c, h, d), lse (b, h, c) of c new positions, of entry i the first ``lengths[i]``; their rows are kept.

        Of several ranks this rank's part of both.
        """
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)  # (b, c, h)
        self.split(lengths)
        for lane in self.lanes:
            if (count := lengths[lane.entries[0]]) == 1:
                self._step(lane, q, k, v, out, lse, scale)
            elif count:
                for i in lane.slices():
                    given = q[i, :count], k[i, :count], v[i, :count]
                    o, l = self._chunk(lane, i, *given, scale, execution.tiled(kernel), execution)
                    out[i, :count], lse[i, :count] = o, l.transpose(1, 2)
                self._store(lane, k, v, count)
        return out, lse.transpose(1, 2)

    def _chunk(self, lane: Lane, entries: slice, q, k, v, scale: float, kernel: Kernel, execution):
        """out (b, c, h, d), lse (b, h, c) of c new positions, over themselves and the rows of the cache."""
        rules, t, c = self.rules, lane.length, q.shape[1]
        heads, kv_heads, pattern = rules.heads, rules.kv_heads, rules.pattern
        new, held = range(t, t + c), max(lane.counts)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if isinstance(pattern, BlockSparse):
            mine = blocks.BlockParts.of([new], pattern.block_size)
            given, lower_right = (pattern, rules.n, mine), supports_lower_right_causal(kernel)
            how = {"causal": True, "lower_right": lower_right}
            own = blocks.plan_between(*given, mine, heads, kv_heads, itself=True, **how)
        else:
            own = dilated.plan_for(q, k, pattern, execution.cached, n=rules.n, chunk=new)
        if rules.ranks > 1:
            own = _of_heads(own, rules.share, c)
        if own.narrow(q.dtype, heads // kv_heads, backward=False):
            own = own.in_head_blocks(max(1, heads // 8))
        out, lse = execute.forward(q, k, v, own, True, scale, kernel, pool=execution.scratch())
        if not held:
            return out, lse
        if isinstance(pattern, BlockSparse):
            theirs = blocks.BlockParts.of(list(_neighbours(lane.positions[0, :held])), pattern.block_size)
            plan = blocks.plan_between(*given, theirs, heads, kv_heads, itself=False, **how)
            rows = [x[entries, :, :held].transpose(1, 2) for x in (self.k, self.v)]  # (b, held, h_kv, d)
        else:
            where, calls = {}, []
            for h, (count, positions) in enumerate(zip(lane.counts, lane.positions)):
                for head in range(kv_heads)[rules.heads_of(h)]:
                    where[head] = positions[:count], head * rules.slots + torch.arange(count)
            for branch in rules.branches:
                start = t // branch.length * branch.length
                asking = range(t, min(start + branch.length, t + c))
                calls += calls_on_rows(branch, heads // kv_heads, start, asking, range(start, t), 0, where)
            calls = tuple(fold_heads(calls))
            plan = Plan(((range(heads), calls, calls),), (), merges=True, same_rows=False, rows=range(c), period=c)
            rows = [x[entries].flatten(1, 2).unsqueeze(2) for x in (self.k, self.v)]  # (b, h_kv * slots, 1, d)
        if plan.calls:
            plan = plan.in_head_blocks(max(1, heads // 8)) if out.dtype in HALF else plan
            execute.forward(q, *rows, plan, True, scale, kernel, into=(out, lse))
        return out, lse

    def _store(self, lane: Lane, k: Tensor, v: Tensor, count: int) -> None:
        """Take ``count`` new rows of k and v, but for those that no later query sees."""
        t, tables = lane.length + count, len(lane.counts)
        new = torch.arange(lane.length, t, dtype=torch.int32)
        self._drop(lane, t)
        last = self.rules.last(new.expand(tables, -1))  # (tables, count)
        for table in range(tables):
            live, heads = last[table] >= t - self.rules.max_crop, self.rules.heads_of(table)
            kept = live.nonzero().flatten()
            start, stop = lane.counts[table], lane.counts[table] + len(kept)
            for i in lane.slices():
                for rows, given in ((self.k, k), (self.v, v)):
                    rows[i, heads, start:stop] = given[i, :, heads][:, kept.to(k.device)].transpose(1, 2)
            lane.positions[table, start:stop] = new[kept]
            lane.counts[table] = stop
        lane.length = t
        lane.refresh()

    def _drop(self, lane: Lane, t: int) -> None:
        """Drop the rows that no query from position ``t`` on sees, and move the others together."""
        last = self.rules.last(lane.positions[:, : max(lane.counts)])  # (tables, rows)
        for table, count in enumerate(lane.counts):
            live = last[table, :count] >= t - self.rules.max_crop
            if bool(live.all()):
                continue
            first, heads = int(live.int().argmin()), self.rules.heads_of(table)
            moved = live.nonzero().flatten()[first:]
            stop = first + len(moved)
            for i in lane.slices():
                for rows in (self.k, self.v):
                    rows[i, heads, first:stop] = rows[i, heads][:, :, moved.to(rows.device)]
            lane.positions[table, first:stop] = lane.positions[table, moved]
            lane.counts[table] = stop
            self._clear(lane, table, stop, count)

    def _step(self, lane: Lane, q, k, v, out, lse, scale: float) -> None:
        """Write out (b, c, h, d) and lse (b, c, h) of one new position, and take its row."""
        rules, t, g = self.rules, lane.length, self.rules.heads // self.rules.kv_heads
        asked, shown, last = rules.row(t)
        mine = rules.owns(t)
        for i in lane.slices() if mine else ():
            for rows, given in ((self.k, k), (self.v, v)):
                if len(set(lane.counts)) == 1:
                    rows[i, :, lane.counts[0]] = given[i, 0]
                else:  # a table for each K/V head
                    rows[i, torch.arange(len(lane.counts)), torch.tensor(lane.counts)] = given[i, 0]
        if mine:
            lane.add(t, asked, shown)
        for tables, start, stop in self._reads(lane, asked, int(mine)):
            heads = slice(None) if rules.shared else tables
            bias = lane.bias(tables, start, stop, asked, lse)
            for i in lane.slices():
                given = (
                    q[i, 0].unflatten(1, (-1, g))[:, heads],
                    self.k[i, heads, start:stop],
                    self.v[i, heads, start:stop],
                )
                o, l = one_query(*given, bias, scale)
                out[i, 0].unflatten(1, (-1, g))[:, heads] = o.to(out.dtype)
                lse[i, 0].unflatten(1, (-1, g))[:, heads] = l
        left = lane.keep(t, last if mine else [NEVER] * len(last))
        if mine and left and len(lane.counts) > 1:
            for i in lane.slices():
                self.v[i, torch.tensor(left), torch.tensor([lane.counts[table] for table in left])] = 0
        if t + 1 >= lane.until:
            self._drop(lane, t + 1)
            lane.refresh()

    def _reads(self, lane: Lane, asked: list[list[int]], new: int) -> list[tuple[slice, int, int]]:
        """(tables, first slot, end) to read for a query, with ``new`` rows; those that see alike are read together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for table, bits in enumerate(asked):
            if any(bits):
                alike.setdefault(tuple(bits), []).append(table)
        found = []
        for bits, members in alike.items():
            used = [i for i in range(self.rules.bits) if any(x >> i & 1 for x in bits)]
            for run in even_runs([(table,) for table in members]):
                tables = _slice(run)
                start = min(firsts[i] for firsts in lane.firsts[tables] for i in used)
                if start < (stop := max(lane.counts[tables]) + new):
                    found.append((tables, start, stop, len(run)))
        if not found:
            return []
        first, end = min(start for _, start, *_ in found), max(stop for *_, stop, _ in found)
        more = len(asked) * (end - first) - sum(count * (stop - start) for _, start, stop, count in found)
        row = 2 * len(lane.entries) * self.k.shape[3] * self.k.element_size() * (self.rules.kv_heads // len(asked))
        if more * row <= ONE_READ * (len(found) - 1):
            return [(slice(0, len(asked)), first, end)]
        return [some[:3] for some in found]


def _slice(run: list[tuple[int]]) -> slice:
    """The slice of an arithmetic progression."""
    (first,), (last,) = run[0], run[-1]
    return slice(first, last + 1, max(1, (last - first) // max(1, len(run) - 1)))


def _of_heads(plan: Plan, heads: range, rows: int) -> Plan:
    """The forward of a plan for some of its heads; the others see nothing."""
    calls = (one for _, forward, _ in plan.blocks for call in forward for one in call.by_heads())
    mine = tuple(filter(None, (call.part(heads.start, heads.stop) for call in calls)))
    return replace(plan, blocks=((heads, mine, mine),), uncovered=((0, rows),), merges=True)


def _neighbours(positions: Tensor) -> Iterator[range]:
    """The positions (m,), ascending, as ranges."""
    for some in positions.tensor_split((positions.diff() != 1).nonzero().flatten() + 1):
        yield range(int(some[0]), int(some[-1]) + 1)


def one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out (b, c, g, d), lse (b, c, g) of the queries q (b, c, g, d) over all rows k and v (b, c, m, d).

    ``bias`` (c, g or 1, m) is log M, -inf where a query does not see a row; None: 0. Two matrix products.
    """
    b, c, g, d = q.shape
    if b > 1 and k.stride(0) != c * k.stride(1):  # (b, c) is no one dimension of matrices
        parts = [one_query(q[i : i + 1], k[i : i + 1], v[i : i + 1], bias, scale) for i in range(b)]
        return torch.cat([o for o, _ in parts]), torch.cat([l for _, l in parts])
    q, k, v = ((x.to(accumulation_dtype(x.dtype)) if x is q else x).flatten(0, 1) for x in (q, k, v))  # (b * c, ., d)
    step = CONVERTED if k.dtype in HALF else k.shape[1]
    pieces = list(zip(k.split(step, 1), v.split(step, 1)))
    scores = [torch.bmm(q * scale, k_.to(q.dtype).mT) for k_, _ in pieces]  # (b * c, g, m)
    scores = torch.cat(scores, -1) if len(scores) > 1 else scores[0]
    if bias is not None:
        by_head = scores.unflatten(0, (b, c))
        by_head.add_(bias).masked_fill_(bias == -torch.inf, -torch.inf)  # a key that is not finite stays hidden
    top = scores.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)  # (b * c, g, 1)
    out = sum(torch.bmm(w, v_.to(q.dtype)) for w, (_, v_) in zip(weights.split(step, -1), pieces))
    out = out / total.masked_fill(total == 0, 1.0)  # a query that sees nothing gets 0
    return out.unflatten(0, (b, c)), (top + total.log()).squeeze(-1).unflatten(0, (b, c))


class Lane:
    """Sequences of equal history, and which rows are kept of them.

    Slot i of a table holds the row at ``positions[table, i]``, for i below ``counts[table]``. A table is for one K/V
    head, or for all of them where all heads see alike. ``kinds[codes[table, head, slot]]`` are the branches by which
    queries of the segments at ``length`` see a row, as bits. ``peak`` is the greatest length so far. Until the position
    ``until`` no row is to be dropped and no segment ends.
    """

    @torch.inference_mode(False)
    def __init__(self, rules: Rules, entries: Sequence[int], length: int = 0, peak: int = 0, positions=()):
        self.rules, self.entries, self.length, self.peak = rules, list(entries), length, peak
        self.positions = torch.zeros(rules.tables, rules.slots, dtype=torch.int32)
        self.codes = torch.zeros(rules.tables, rules.seers, rules.slots, dtype=torch.int16)
        self.counts = [0] * rules.tables
        for table, rows in enumerate(positions):
            self.counts[table] = len(rows)
            self.positions[table, : len(rows)] = rows
        self.refresh()

    def state(self) -> dict:
        rows = [positions[:count].clone() for positions, count in zip(self.positions, self.counts)]
        return {"entries": self.entries, "length": self.length, "peak": self.peak, "positions": rows}

    def slices(self) -> Iterator[slice]:
        """The entries, as few slices of the batch."""
        return map(_slice, even_runs([(entry,) for entry in self.entries]))

    def refresh(self) -> None:
        """Make the tables new after rows came or went, or a segment ended."""
        rules, used = self.rules, max(self.counts)
        self.peak = max(self.peak, self.length)
        positions = self.positions[:, :used]
        there = torch.arange(used) < torch.tensor(self.counts)[:, None]  # (tables, used)
        bits = rules.visible(positions, self.length).masked_fill_(~there[:, None], 0)  # (tables, seers, used)
        kinds = bits.unique()
        kinds = kinds[kinds > 0]
        self.codes.zero_()
        self.codes[:, :, :used] = torch.where(bits > 0, torch.searchsorted(kinds, bits) + 1, 0)
        self.kinds = [0, *kinds.tolist()]
        self.hidden = bool(((bits == 0) & there[:, None]).any())  # rows that are kept for later queries alone
        seen = torch.stack([(bits >> i & 1).any(1) for i in range(rules.bits)], 1)  # (tables, bits, used)
        first = seen.int().argmax(-1) if used else torch.zeros(seen.shape[:2], dtype=torch.int64)
        self.firsts = torch.where(seen.any(-1), first, torch.tensor(self.counts)[:, None]).tolist()
        leaves = rules.last(positions)[there].amin(0, keepdim=True) if there.any() else torch.tensor([rules.n])
        self.until = min(rules.end(self.length), int(leaves) + 1 + rules.max_crop)
        self.weights: dict[tuple, Tensor] = {}

    def add(self, t: int, asked: list[list[int]], shown: list[list[int]]) -> None:
        """Write the row at position t into the tables; ``keep`` decides whether it stays."""
        for bits in {bits for some in shown for bits in some} - set(self.kinds):
            self.kinds.append(bits)
            self.weights.clear()
        self.hidden |= any(a and not b for some in zip(asked, shown) for a, b in zip(*some))
        codes = torch.tensor([[self.kinds.index(bits) for bits in some] for some in shown], dtype=torch.int16)
        if len(set(self.counts)) == 1:
            self.positions[:, self.counts[0]], self.codes[:, :, self.counts[0]] = t, codes
        else:
            each, at = torch.arange(len(self.counts)), torch.tensor(self.counts)
            self.positions[each, at], self.codes[each, :, at] = t, codes

    def keep(self, t: int, last: list[int]) -> list[int]:
        """Keep the row at position t in the tables where a later query sees it; returns the other tables."""
        left = []
        self.length = t + 1
        self.peak = max(self.peak, self.length)
        for table, until in enumerate(last):
            if until + self.rules.max_crop > t:
                self.counts[table] += 1
                self.until = min(self.until, until + 1 + self.rules.max_crop)
            else:
                self.codes[table, :, self.counts[table]] = 0
                left.append(table)
        return left

    def bias(self, tables: slice, start: int, stop: int, asked: list[list[int]], like: Tensor) -> Tensor | None:
        """log M (tables, seers, rows) of the slots start .. stop - 1 for a query of the branches ``asked``."""
        key = tuple(map(tuple, asked[tables]))
        each = [bits for some in key for bits in some]
        if not self.hidden and len(self.kinds) == 2 and len(set(self.counts[tables])) == 1:
            if all((bits & self.kinds[1]).bit_count() == 1 for bits in each):
                return None
        if key not in self.weights:
            counts = [[(bits & kind).bit_count() for kind in self.kinds] for bits in each]
            self.weights[key] = torch.tensor(counts, dtype=like.dtype).log().unflatten(0, (len(key), -1))
        return self.weights[key].gather(-1, self.codes[tables, :, start:stop].long()).to(like.device)


@dataclass(frozen=True, eq=False)
class Rules:
    """Which queries see which rows, and which of ``ranks`` keeps them: Dense and Dilated patterns over ``n`` positions.

    Rows are looked at by tables, and by the ``seers`` of a table: the query heads of its K/V head, or one for all heads
    where these see alike. Positions are (tables, m).
    """

    pattern: Pattern
    heads: int
    kv_heads: int
    n: int
    max_crop: int
    rank: int = 0
    ranks: int = 1
    run = RUN

    @property
    def share(self) -> range:
        """The query heads for which this rank attends to new positions."""
        at = (self.kv_heads * rank // self.ranks * (self.heads // self.kv_heads) for rank in (self.rank, self.rank + 1))
        return range(*at)

    def owns(self, positions: Tensor | int) -> Tensor | bool:
        """Which positions this rank keeps: runs of them, by a hash, so that no rate of a pattern favours a rank."""
        if self.ranks == 1:
            return positions == positions
        return ((positions // self.run * 2654435761 & 0xFFFFFFFF) >> 16) % self.ranks == self.rank

    @cached_property
    def branches(self) -> list[Branch]:
        return sorted(self.pattern.branches(self.n, self.heads, self.kv_heads), key=lambda b: b.rate)

    @property
    def bits(self) -> int:
        return len(self.branches)

    @cached_property
    def offsets(self) -> Tensor:
        """The offset of each branch (tables, seers, branches), -1 where a head does not run it."""
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

    def heads_of(self, table: int) -> slice:
        """The K/V heads of a table."""
        return slice(None) if self.shared else slice(table, table + 1)

    @cached_property
    def slots(self) -> int:
        """The rows that are kept at most, and the one of the query itself."""
        each = {tuple(some.flatten().tolist()): some for some in self.offsets}
        return 1 + max(map(self._most, each.values()))

    def _most(self, offsets: Tensor) -> int:
        """The most rows that a table with these offsets (seers, branches) keeps."""
        last = torch.full((self.n,), NEVER)
        for i, branch in enumerate(self.branches):
            for offset in set(offsets[:, i].tolist()) - {-1}:
                w, r, whole = branch.length, branch.rate, self.n // branch.length * branch.length
                for part, size in ((last[:whole], w), (last[whole:], self.n - whole)):
                    if offset < size and len(part):
                        rows = part.view(-1, size)[:, offset::r]  # of each segment
                        final = offset + (size - 1 - offset) // r * r
                        starts = torch.arange(len(rows)) * size + (whole if size < w else 0)
                        rows.copy_(torch.maximum(rows, (starts + final)[:, None]))
        return most_alive(last.masked_fill_(~self.owns(torch.arange(self.n)), NEVER) + self.max_crop)

    def needs_dropped(self, length: int, peak: int) -> bool:
        """Whether a query from ``length`` on sees a row that was dropped when there were ``peak`` positions."""
        if length >= peak - self.max_crop:
            return False
        last = self.last_anywhere(torch.arange(length).expand(self.tables, -1))
        return bool(((last >= length) & (last < peak - self.max_crop)).any())

    def last(self, positions: Tensor) -> Tensor:
        """The last query that sees each row, ``NEVER`` if there is none or another rank keeps it: (tables, m)."""
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
                final = start + offset + (size - 1 - offset) // branch.rate * branch.rate
                sees = (positions - start) % branch.rate == offset
                found = torch.maximum(found, torch.where(sees, final, NEVER))
        return found

    def visible(self, positions: Tensor, t: int) -> Tensor:
        """By which branches a query at ``t`` could see each row, as bits: (tables, seers, m)."""
        positions = positions.long()
        found = torch.zeros(len(positions), self.seers, positions.shape[1], dtype=torch.int64)
        for i, branch in enumerate(self.branches):
            start = t // branch.length * branch.length
            at = (positions - start).unsqueeze(1)  # (tables, 1, m)
            inside = (at >= 0) & (at < branch.length)
            found += (inside & (at % branch.rate == self.offsets[:, :, i, None])).long() << i
        return found

    def row(self, t: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Of the position t: the bits of its query and of its row, by tables and seers, and the row's last query."""
        w, r, powers = self._sizes
        start = t - t % w
        sees = t % w % r == self.offsets  # (tables, seers, branches)
        left = (self.n - start).clamp(max=w) - 1 - self.offsets
        final = torch.where(sees, start + self.offsets + left // r * r, NEVER).amax((1, 2))
        bits = (sees * powers).sum(-1).tolist()
        return bits, bits, final.tolist()

    @cached_property
    def _sizes(self) -> tuple[Tensor, Tensor, Tensor]:
        lengths, rates = (torch.tensor([getattr(b, name) for b in self.branches]) for name in ("length", "rate"))
        return lengths, rates, 2 ** torch.arange(self.bits)

    def end(self, t: int) -> int:
        """The next position from which other rows are seen: where a segment ends."""
        return min((t // b.length + 1) * b.length for b in self.branches)


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

    def _most(self, offsets) -> int:
        last = self._last.repeat_interleave(self.pattern.block_size)[: self.n]
        return most_alive(last.masked_fill_(~self.owns(torch.arange(self.n)), NEVER) + self.max_crop)

    def last_anywhere(self, positions):
        return self._last[positions // self.pattern.block_size]

    def visible(self, positions, t):
        if t == self.n:
            return torch.zeros(1, 1, positions.shape[1], dtype=torch.int64)
        numbers, where = (positions[0].long() // self.pattern.block_size).unique(return_inverse=True)
        queries = torch.tensor([t // self.pattern.block_size])
        return self.pattern.blocks(self.n, queries, numbers)[:, where].long()[None]

    def row(self, t):
        block = torch.tensor([t // self.pattern.block_size])
        return [[1]], [[int(self.pattern.blocks(self.n, block, block))]], self._last[block].tolist()

    def end(self, t):
        return (t // self.pattern.block_size + 1) * self.pattern.block_size


def most_alive(last: Tensor) -> int:
    """The most rows at once, of rows x that are there from position x + 1 to ``last[x]`` (n,), if that is not before.

    >>> most_alive(torch.tensor([3, 0, 3, 3, NEVER]))
    2
    """
    n = len(last)
    there = last > torch.arange(n)
    gone = torch.bincount(last[there].clamp(max=n), minlength=n + 1)[:n]
    return int((there.long() - gone).cumsum(0).max())


@lru_cache(maxsize=64)
def rules_of(
    pattern: Pattern, heads: int, kv_heads: int, n: int, max_crop: int, rank: int = 0, ranks: int = 1
) -> Rules:
    kind = BlockRules if isinstance(pattern, BlockSparse) else Rules
    return kind(pattern, heads, kv_heads, n, max_crop, rank, ranks)
