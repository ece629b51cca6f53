"""Generation: a cache of the K/V rows that later queries still see, and attention of new positions to it.

The rows of a K/V head lie one behind the other, by position. Rows that no later query sees are dropped when a segment,
or a block, ends. One new position is two matrix products on the rows that are seen; more of them are a plan of dense
calls, as elsewhere, on themselves and on the rows of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .. import kernels
from ..block_patterns import BlockSparse
from ..checks import LARGEST, check_float_dtype, check_int, short_repr
from ..kernels import device_of, supports_lower_right_causal
from ..kernels.base import HALF, Kernel, accumulation_dtype
from ..patterns import Branch, Pattern
from . import blocks, dilated, execute
from .autograd import is_followed, positive_scale, without_autocast
from .dilated import calls_on_rows, even_runs, fold_heads
from .documents import integers
from .execute import Plan

ONE_READ = 2 << 20  # so many bytes are rather read in vain than left out by another pair of products
NEVER = -(1 << 40)  # the last query of a row that none sees
CONVERTED = 4096  # rows of half precision that are converted together


class KVCache:
    """The K/V rows of ``batch`` sequences that queries after them still see under causal attention, and no others.

    ``attention(q, k, v, pattern, causal=True, cache=cache)`` takes the rows of new positions, one or many, and returns
    their rows of attention over all positions so far, whatever the pieces were. The sequences may differ in length:
    ``lengths=`` of ``attention`` says how many of the new rows of each are not padding. The memory is allocated once:
    ``cache.nbytes``, which ``cache_bytes`` tells beforehand.

    A dense pattern keeps all rows, a window those within it, a dilated one the selected rows of the segments that are
    open: [2048 * 2^i] / [2^i], i = 0..9, keeps at most 11,263 of 1,048,576. Patterns with random blocks or a given mask
    are those of ``max_seq_len`` positions. ``max_crop`` more positions can be taken back by ``crop``, for instance
    those of a draft that was refused; their rows are kept as long.

    ``heads`` and ``kv_heads`` (default: as many) are those of q and of k; ``dtype`` and ``device`` those of k and v.
    Raises ValueError for sizes that do not fit.

    >>> from ringlab import Dilated, attention
    >>> cache = KVCache(Dilated([4, 8], [1, 2]), batch=1, heads=2, head_dim=8, max_seq_len=100)
    >>> q = torch.randn(1, 7, 2, 8)
    >>> parts = [attention(some, some, some, cache.pattern, causal=True, cache=cache) for some in q.split(3, 1)]
    >>> torch.allclose(torch.cat(parts, 1), attention(q, q, q, cache.pattern, causal=True), atol=1e-6)
    True
    >>> cache.lengths, [rows.tolist() for rows in cache.live_rows()]
    ([7], [[4, 5, 6], [1, 3, 4, 5, 6]])
    """

    def __init__(
        self, pattern: Pattern, *, batch: int, heads: int, kv_heads: int | None = None, head_dim: int, max_seq_len: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", max_crop: int = 0,
    ):  # fmt: skip
        self.rules = _checked(pattern, heads, kv_heads, max_seq_len, max_crop)
        check_float_dtype(dtype)
        sizes = (check_int(name, size, most=LARGEST) for name, size in (("batch", batch), ("head_dim", head_dim)))
        shape = (next(sizes), self.rules.kv_heads, self.rules.slots, next(sizes))
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device_of(device)) for _ in range(2))
        self._lanes = [_Lane(self.rules, range(batch))]

    @property
    def pattern(self) -> Pattern:
        return self.rules.pattern

    @property
    def lengths(self) -> list[int]:
        """How many positions each sequence has."""
        found = {entry: lane.length for lane in self._lanes for entry in lane.entries}
        return [found[entry] for entry in range(len(found))]

    @property
    def nbytes(self) -> int:
        """The bytes of the memory: rows of k and v, and tables that say which they are."""
        return self.k.nbytes + self.v.nbytes + sum(lane.positions.nbytes + lane.codes.nbytes for lane in self._lanes)

    def live_rows(self, entry: int = 0) -> list[Tensor]:
        """The positions of the rows that are kept of a sequence, ascending, for each K/V head."""
        lane = self._lane_of(entry)
        found = [rows[:count].long() for rows, count in zip(lane.positions, lane.counts)]
        return found * (self.rules.kv_heads // len(found))

    def crop(self, lengths: int | Sequence[int]) -> None:
        """Forget the positions from ``lengths`` on, one number or one for each sequence.

        ValueError, and nothing changes, for a number beyond what is there, or where a row is needed that was dropped.
        """
        alike = not isinstance(lengths, Sequence | Tensor)
        wanted = integers("lengths", [lengths] * len(self.k) if alike else lengths, self.k)
        if len(wanted) != len(self.k):
            raise ValueError(f"crop takes one length, or {len(self.k)} for the sequences, got {len(wanted)}")
        for entry, length in enumerate(wanted):
            lane = self._lane_of(entry)
            if not 0 <= length <= lane.length:
                raise ValueError(f"sequence {entry} has {lane.length} positions and cannot be cropped to {length}")
            if length <= lane.dropped and length < lane.length:
                kept = f"the rows before {lane.dropped + 1} are in part dropped; KVCache(max_crop=...) keeps them"
                raise ValueError(f"sequence {entry} cannot be cropped to {length}: {kept}")
        self._split(wanted)
        for lane in self._lanes:
            if (length := wanted[lane.entries[0]]) < lane.length:
                for table, count in enumerate(lane.counts):
                    lane.counts[table] = int((lane.positions[table, :count] < length).sum())
                    self._clear(lane, table, lane.counts[table], count)
                lane.length = length
                lane.refresh()

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Make sequence i a copy of what was sequence ``index[i]``, for beam search."""
        index, b = integers("index", index, self.k), len(self.k)
        if len(index) != b or not all(0 <= i < b for i in index):
            raise ValueError(f"reorder takes the numbers of {b} sequences, got {short_repr(index)}")
        used = self._used()
        for rows in (self.k, self.v):
            rows[:, :, :used] = rows[index, :, :used]
        for lane in self._lanes:
            lane.entries = [i for i, old in enumerate(index) if old in lane.entries]
        self._lanes = [lane for lane in self._lanes if lane.entries]

    def reset(self) -> None:
        """Forget all positions."""
        self.k.zero_()
        self.v.zero_()
        self._lanes = [_Lane(self.rules, range(len(self.k)))]

    def state_dict(self) -> dict:
        """A copy of all that is kept; ``load_state_dict`` restores it into a cache that was made alike."""
        k, v = (rows[:, :, : self._used()].clone() for rows in (self.k, self.v))
        return {"made": self._made(), "k": k, "v": v, "lanes": [lane.state() for lane in self._lanes]}

    def load_state_dict(self, state: dict) -> None:
        """Restore what ``state_dict`` gave; ValueError for the state of a cache that was made otherwise."""
        if state["made"] != self._made():
            raise ValueError(f"the state is of another cache: {short_repr(state['made'])}, this is {self._made()}")
        self.reset()
        used = state["k"].shape[2]
        self.k[:, :, :used], self.v[:, :, :used] = state["k"], state["v"]
        self._lanes = [_Lane(self.rules, **lane) for lane in state["lanes"]]

    def _made(self) -> str:
        rules, (b, kv_heads, _, d) = self.rules, self.k.shape
        heads = f"{rules.heads} heads, {kv_heads} K/V heads of {d}"
        return f"{rules.pattern}, {b} x {rules.n} positions, {heads}, {self.k.dtype}, max_crop {rules.max_crop}"

    def __repr__(self) -> str:
        return f"KVCache({self._made()}, {self.nbytes:,} bytes)"

    def _used(self) -> int:
        return max(max(lane.counts) for lane in self._lanes)

    def _lane_of(self, entry: int) -> _Lane:
        found = [lane for lane in self._lanes if entry in lane.entries]
        if not found:
            raise ValueError(f"there is no sequence {short_repr(entry)} among {len(self.k)}")
        return found[0]

    def _split(self, values: list[int]) -> None:
        """Divide the lanes so that all entries of one have the same value."""
        lanes = []
        for lane in self._lanes:
            alike: dict[int, list[int]] = {}
            for entry in lane.entries:
                alike.setdefault(values[entry], []).append(entry)
            lane.entries, *others = alike.values()
            lanes += [lane, *(_Lane(self.rules, **lane.state() | {"entries": entries}) for entries in others)]
        self._lanes = lanes

    def _clear(self, lane: _Lane, table: int, start: int, stop: int) -> None:
        """Zero slots without a row: another head may have one there, and they are read with it, with weight 0."""
        for i in lane.slices():
            for rows in (self.k, self.v):
                rows[i, self.rules.heads_of(table), start:stop] = 0

    def check(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool, lengths: list[int]) -> None:
        """Raise ValueError in one line unless q, k, v, new positions of a pattern, fit this cache."""
        if pattern != self.pattern:
            raise ValueError(f"the cache is of another pattern: {self.pattern}, not {pattern}")
        if not causal:
            raise ValueError("a cache needs causal=True: what comes later is not there yet")
        if is_followed(q, k, v):
            raise ValueError("a cache is for generation, without gradients: call it under torch.no_grad()")
        b, kv_heads, _, d = self.k.shape
        if (len(k), *k.shape[2:], q.shape[2]) != (b, kv_heads, d, self.rules.heads):
            made = f"a batch of {b}, {self.rules.heads} heads, {kv_heads} K/V heads, head_dim {d}"
            raise ValueError(f"the cache is for {made}, got q {tuple(q.shape)}, k {tuple(k.shape)}")
        if (k.dtype, k.device) != (self.k.dtype, self.k.device):
            raise ValueError(f"the cache is {self.k.dtype} on {self.k.device}, k is {k.dtype} on {k.device}")
        for entry, (have, new) in enumerate(zip(self.lengths, lengths)):
            if have + new > self.rules.n:
                full = f"{have} of {self.rules.n} positions are taken in sequence {entry}, and {new} are new"
                raise ValueError(f"the cache is full: {full}")

    def attend(self, q, k, v, pattern, *, causal, scale: float, backend, execution, lengths: list[int] | None = None):
        """out (b, c, h, d), lse (b, h, c) of c new positions (of entry i the first ``lengths[i]``), which it keeps."""
        b, c, heads, _ = q.shape
        lengths = [c] * b if lengths is None else lengths
        self.check(q, k, v, pattern, causal, lengths)
        kernel = kernels.choose(q.device, q.dtype, q.shape[3], causal=True, backend=backend).kernel
        self._split(lengths)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full((b, c, heads), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
        flip, scale = positive_scale(scale)
        q = flip(q)
        with without_autocast(q):
            for lane in self._lanes:
                if (count := lengths[lane.entries[0]]) == 1:
                    self._step(lane, q, k, v, out, lse, scale)
                elif count:
                    for i in lane.slices():
                        given = q[i, :count], k[i, :count], v[i, :count]
                        o, l = self._chunk(lane, i, *given, scale, execution.tiled(kernel), execution)
                        out[i, :count], lse[i, :count] = o, l.transpose(1, 2)
                    self._store(lane, k, v, count)
        return out, lse.transpose(1, 2)

    def _chunk(self, lane: _Lane, entries: slice, q, k, v, scale: float, kernel: Kernel, execution):
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

    def _store(self, lane: _Lane, k: Tensor, v: Tensor, count: int) -> None:
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
            lane.dropped = max(lane.dropped, *last[table].masked_fill(live, -1).amax(0, keepdim=True).tolist())
        lane.length = t
        lane.refresh()

    def _drop(self, lane: _Lane, t: int) -> None:
        """Drop the rows that no query from position ``t`` on sees, and move the others together."""
        last = self.rules.last(lane.positions[:, : max(lane.counts)])  # (tables, rows)
        for table, count in enumerate(lane.counts):
            live = last[table, :count] >= t - self.rules.max_crop
            if bool(live.all()):
                continue
            lane.dropped = max(lane.dropped, int(last[table, :count][~live].max()))
            first, heads = int(live.int().argmin()), self.rules.heads_of(table)
            moved = live.nonzero().flatten()[first:]
            stop = first + len(moved)
            for i in lane.slices():
                for rows in (self.k, self.v):
                    rows[i, heads, first:stop] = rows[i, heads][:, :, moved.to(rows.device)]
            lane.positions[table, first:stop] = lane.positions[table, moved]
            lane.counts[table] = stop
            self._clear(lane, table, stop, count)

    def _step(self, lane: _Lane, q, k, v, out, lse, scale: float) -> None:
        """Write out (b, c, h, d) and lse (b, c, h) of one new position, and take its row."""
        rules, t, g = self.rules, lane.length, self.rules.heads // self.rules.kv_heads
        asked, shown, last = rules.row(t)
        for i in lane.slices():
            for rows, given in ((self.k, k), (self.v, v)):
                if len(set(lane.counts)) == 1:
                    rows[i, :, lane.counts[0]] = given[i, 0]
                else:  # a table for each K/V head
                    rows[i, torch.arange(len(lane.counts)), torch.tensor(lane.counts)] = given[i, 0]
        lane.add(t, asked, shown)
        for tables, start, stop in self._reads(lane, asked):
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
        lane.keep(t, shown, last)
        if t + 1 >= lane.until:
            self._drop(lane, t + 1)
            lane.refresh()

    def _reads(self, lane: _Lane, asked: list[list[int]]) -> list[tuple[slice, int, int]]:
        """(tables, first slot, end) to read for a query; those that see alike are read together."""
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
                found.append((tables, start, max(lane.counts[tables]) + 1, len(run)))
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


class _Lane:
    """Sequences of equal history, and which rows are kept of them.

    Slot i of a table holds the row at ``positions[table, i]``, for i below ``counts[table]``. A table is for one K/V
    head, or for all of them where all heads see alike. ``kinds[codes[table, head, slot]]`` are the branches by which
    queries of the segments at ``length`` see a row, as bits. ``dropped`` is the last query that saw a dropped row;
    until the position ``until`` no row is to be dropped and no segment ends.
    """

    def __init__(self, rules: _Rules, entries: Sequence[int], length: int = 0, dropped: int = -1, positions=()):
        self.rules, self.entries, self.length, self.dropped = rules, list(entries), length, dropped
        self.positions = torch.zeros(rules.tables, rules.slots, dtype=torch.int32)
        self.codes = torch.zeros(rules.tables, rules.seers, rules.slots, dtype=torch.int16)
        self.counts = [0] * rules.tables
        for table, rows in enumerate(positions):
            self.counts[table] = len(rows)
            self.positions[table, : len(rows)] = rows
        self.refresh()

    def state(self) -> dict:
        rows = [positions[:count].clone() for positions, count in zip(self.positions, self.counts)]
        return {"entries": self.entries, "length": self.length, "dropped": self.dropped, "positions": rows}

    def slices(self) -> Iterator[slice]:
        """The entries, as few slices of the batch."""
        return map(_slice, even_runs([(entry,) for entry in self.entries]))

    def refresh(self) -> None:
        """Make the tables new after rows came or went, or a segment ended."""
        rules, used = self.rules, max(self.counts)
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

    def keep(self, t: int, shown: list[list[int]], last: list[int]) -> None:
        """Keep the row at position t in the tables where a later query sees it."""
        self.length = t + 1
        for table, until in enumerate(last):
            if until + self.rules.max_crop > t:
                self.counts[table] += 1
                self.hidden |= 0 in shown[table]
                self.until = min(self.until, until + 1 + self.rules.max_crop)
            else:
                self.codes[table, :, self.counts[table]] = 0
                self.dropped = max(self.dropped, until)

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
class _Rules:
    """Which queries see which rows, for Dense and Dilated patterns over ``n`` positions.

    Rows are looked at by tables, and by the ``seers`` of a table: the query heads of its K/V head, or one for all heads
    where these see alike. Positions are (tables, m).
    """

    pattern: Pattern
    heads: int
    kv_heads: int
    n: int
    max_crop: int

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
        return most_alive(last + self.max_crop)

    def last(self, positions: Tensor) -> Tensor:
        """The last query that sees each row, or ``NEVER``: (tables, m)."""
        positions = positions.long()
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


class _BlockRules(_Rules):
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

    def _most(self, offsets) -> int:
        return most_alive(self._last.repeat_interleave(self.pattern.block_size)[: self.n] + self.max_crop)

    def last(self, positions):
        return self._last[positions.long() // self.pattern.block_size]

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


def _checked(pattern, heads, kv_heads, max_seq_len, max_crop) -> _Rules:
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a ringlab pattern, got {type(pattern).__name__}")
    heads = check_int("heads", heads, most=2**20)
    kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads)
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of K/V heads: {heads} and {kv_heads}")
    n, max_crop = check_int("max_seq_len", max_seq_len, most=2**31), check_int("max_crop", max_crop, 0, 2**31)
    return _rules(pattern, heads, kv_heads, n, max_crop)


@lru_cache(maxsize=64)
def _rules(pattern: Pattern, heads: int, kv_heads: int, n: int, max_crop: int) -> _Rules:
    kind = _BlockRules if isinstance(pattern, BlockSparse) else _Rules
    return kind(pattern, heads, kv_heads, n, max_crop)


def cache_bytes(
    pattern: Pattern, *, max_seq_len: int, batch: int = 1, heads: int = 8, kv_heads: int | None = None,
    head_dim: int = 64, dtype: torch.dtype = torch.float32, max_crop: int = 0,
) -> int:  # fmt: skip
    """The bytes that a ``KVCache`` made with these sizes takes at most, tables included.

    >>> from ringlab import Dense, Dilated
    >>> ladder = Dilated([2048 << i for i in range(10)], [1 << i for i in range(10)])
    >>> [cache_bytes(pattern, max_seq_len=1 << 20) >> 20 for pattern in (Dense(), ladder)]
    [4102, 42]
    """
    rules = _checked(pattern, heads, kv_heads, max_seq_len, max_crop)
    check_float_dtype(dtype)
    row = 2 * rules.kv_heads * check_int("head_dim", head_dim) * dtype.itemsize
    table = rules.tables * (4 + 2 * rules.seers)
    return check_int("batch", batch) * rules.slots * (row + table)
