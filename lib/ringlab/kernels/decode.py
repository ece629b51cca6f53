"""A few new positions of each sequence on a GPU, in one or two launches of Triton:
store their rows, attend to the kept rows, join the results of several programs.

A program reads some of the kept rows of one K/V head of one sequence for all query
heads of it at all new positions, which are the rows of a tile for tensor cores. The
first one of each head also attends to the new rows, which it has from the caller, and
stores them behind those that are read: no program reads what another writes. Scores are
in log2, sums in fp32, and a weight in half precision is two numbers, so that only the
result is rounded.

What differs from step to step is prepared for many steps and lies on the GPU: see
``step_table``. Only ``LiveRows`` calls this, where ``TritonKernel.refuses`` nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .base import HALF
from .triton import dense_rows
from .triton_config import LEAST, LOG2E, padded, precision
from .triton_kernels import LN2

ENTRY, FIRST, COUNT, KEPT = (tl.constexpr(i) for i in range(4))
COLUMNS = tl.constexpr(4)
TILE = 16384  # bytes of a tile of k; its rows are at most WIDE
WIDE = 128
PROGRAMS = 2  # for each multiprocessor
PART = 128  # rows that are worth a program
MOST_PARTS = 128  # of one head
JOINED = 32  # parts that a program reads together
# Of several new positions: elements and rows of q's tile, and scores of a tile, which
# spill no registers. In fp32, whose products are three, LEAST rows.
QUERIES = 4096
MOST_ROWS = 64
SCORES = 2048


def step_table(
    entries: Sequence[int], firsts, counts, kept, query_masks, row_masks
) -> Tensor:
    """A table (steps, entries, tables, 4 + 2 viewers) int64 of the next steps: entry,
    first slot that is seen, slots in use, whether the row is kept; then the masks of
    queries, and of the new row. Arguments are (steps, entries, tables) and (steps,
    entries, tables, viewers).
    """
    entry = torch.tensor(entries)[:, None].expand_as(firsts)
    numbers = torch.stack([entry, firsts, counts, kept.long()], -1)
    return torch.cat([numbers, query_masks, row_masks], -1)


class Decoder:
    """The launches of prepared steps over the rows k and v (b, h_kv, slots, d) and the
    ``masks`` (b, tables, viewers, slots) of a cache.

    ``bits`` of a mask are in use: a row counts as often as bits of the query's mask are
    set in its own; 1: once if any is. ``group``: query heads of a K/V head. ``table``
    is what ``step_table`` gives. With a ``counter`` (1,) int64 on the device, steps are
    counted from what it holds; all after the table's last line are that line.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        masks: Tensor,
        bits: int,
        group: int,
        table: Tensor,
        counter: Tensor | None = None,
    ):
        self.rows, self.table = (k, v, masks), table.to(k.device)
        _, kv_heads, slots, d = k.shape
        entries, tables, viewers = table.shape[1], *masks.shape[1:3]
        width = padded(d)
        counted = 0 if counter is None else len(table)
        self.counter, self.group = self.table if counter is None else counter, group
        rows = min(MOST_ROWS if k.dtype in HALF else LEAST, QUERIES // width)
        self.most = max(1, rows // group)  # positions of a step
        reads = int((table[..., COUNT.value] - table[..., FIRST.value]).max())
        self.heads = entries * kv_heads
        self.parts = min(
            max(1, PROGRAMS * multiprocessors(k.device) // self.heads),
            max(1, reads // PART),
            MOST_PARTS,
        )
        self.sizes = entries, kv_heads, slots, self.parts
        self.constants = {
            "COUNTED": counted,
            "GROUP": group,
            "TABLES": tables,
            "SEERS": viewers,
            "BITS": bits,
            "DIM": d,
            "PAD": width,
            "HALVES": k.dtype in HALF,
            "PRECISION": precision(0, k.dtype),
            "WHOLE": self.parts == 1,
        }
        self.joins = {
            "COUNTED": counted,
            "STEP": table[0, 0].numel(),
            "DIM": d,
            "PAD": width,
            "PARTS": triton.next_power_of_2(self.parts),
            "TOGETHER": JOINED,
        }
        self.tiles: dict[int, dict[str, int]] = {}  # by the number of positions
        self.split = None
        self.stream = torch.cuda.current_stream(k.device) if k.is_cuda else None

    def step(self, number: int, new: int, scale: float, q, k, v, out, lse) -> None:
        """Store the rows k and v (b, c, h_kv, d) of the first ``new`` positions, at most
        ``most``, and write out (b, c, h, d), lse (b, c, h) of their queries q: of the
        entries of the steps from ``number`` on.
        """
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        heads, d = out.shape[2:]
        positions = out.stride(0) // (heads * d)
        rows = self.heads * self.group * new
        if self.parts > 1 and (self.split is None or self.split[1].shape[1] < rows):
            results = self.parts, rows
            self.split = (
                torch.empty(*results, d, dtype=torch.float32, device=q.device),
                torch.empty(*results, dtype=torch.float32, device=q.device),
            )
        if q.is_cuda and (stream := torch.cuda.current_stream(q.device)) != self.stream:
            for t in (self.table, *(self.split or ())):
                t.record_stream(stream)  # or the allocator would not wait for it
        into = (out, lse) if self.split is None else self.split
        strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
        steps = self.table, self.counter
        if (tile := self.tiles.get(new)) is None:
            queries = max(LEAST, triton.next_power_of_2(self.group * new))
            cols = columns(self.constants["PAD"], k.element_size(), queries)
            tile = self.tiles[new] = {"ROWS": queries, "COLS": cols, **self.constants}
        with torch.cuda.device_of(q):
            launch(
                attend,
                self.heads * self.parts,
                (q, k, v, *self.rows, *steps, *into),
                (number, scale * LOG2E, *self.sizes, new, positions, *strides),
                **tile,
            )
            if self.split is not None:
                launch(
                    join,
                    rows,
                    (*self.split, *steps, out, lse),
                    (number, rows, self.parts, heads, new, positions),
                    **self.joins,
                )


def columns(width: int, size: int, rows: int) -> int:
    """Rows of a tile of k that has ``width`` elements of ``size`` bytes a row, beside
    ``rows`` of q.
    """
    few = SCORES // rows if rows > LEAST else WIDE
    return min(WIDE, max(LEAST, min(few, TILE // (width * size))))


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return LEAST  # interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


_compiled: dict[tuple, object] = {}


def launch(kernel, programs: int, tensors: tuple, numbers: tuple, **constants) -> None:
    """One launch of a kernel that is ``general``; ``constants`` are in the order of its
    signature. The second time Triton binds no arguments, which takes longer than all
    else: what it compiled depends on the dtypes and the constants alone.
    """
    dtypes = (t.dtype for t in tensors)
    key = kernel, tensors[0].device, *dtypes, *constants.values()
    if (compiled := _compiled.get(key)) is not None:
        compiled[programs, 1, 1](*tensors, *numbers, *constants.values())
        return
    made = kernel[(programs,)](*tensors, *numbers, **constants)
    if made is not None:  # as it is where Triton interprets
        _compiled[key] = made


def general(f):
    """A kernel that is compiled for any integers and any alignment of tensors, but for
    k and v, which are memory of their own.
    """
    names = f.__code__.co_varnames[: f.__code__.co_argcount]
    free = [name for name in names if name.islower() and name not in ("k", "v")]
    return triton.jit(do_not_specialize=free)(f)


@triton.jit
def _times(words, asked, BITS: tl.constexpr):
    """How often rows with these words count for a query that asks by ``asked``."""
    seen = words & asked
    if BITS == 1:
        return tl.where(seen != 0, 1.0, 0.0)
    found = seen & 1
    for i in tl.static_range(1, BITS):
        found += (seen >> i) & 1
    return found.to(tl.float32)


@triton.jit
def _words(shown, at, stop, slots, members, real, SEERS: tl.constexpr):
    """The words of the slots ``at`` for each query of a tile, 0 from ``stop`` on."""
    there = (at < stop)[None, :]
    if SEERS == 1:
        return tl.load(shown + at[None, :], mask=there, other=0)  # (1, COLS)
    else:
        where = shown + members[:, None] * slots + at[None, :]
        return tl.load(where, mask=there & real[:, None], other=0)  # (ROWS, COLS)


@triton.jit
def _weighed(p, values, acc, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """acc + p values, with p as exact in half precision as two numbers are."""
    high = p.to(values.dtype)
    acc = tl.dot(high, values, acc, input_precision=PRECISION)
    if HALVES:
        low = (p - high.to(tl.float32)).to(values.dtype)
        acc = tl.dot(low, values, acc, input_precision=PRECISION)
    return acc


@general
def attend(
    q,
    new_k,
    new_v,
    k,
    v,
    shown,
    table,
    counter,
    out,
    lse,
    number,
    scale,
    entries,
    kv_heads,
    slots: tl.int64,
    parts,
    new,
    positions,
    s_qb: tl.int64,
    s_qn: tl.int64,
    s_qh: tl.int64,
    s_kb: tl.int64,
    s_kn: tl.int64,
    s_kh: tl.int64,
    s_vb: tl.int64,
    s_vn: tl.int64,
    s_vh: tl.int64,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    COUNTED: tl.constexpr,
    GROUP: tl.constexpr,
    TABLES: tl.constexpr,
    SEERS: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """out and lse of the query heads of a K/V head at ``new`` positions
    over one part of its kept rows; the first part has the new rows, too, and stores
    them. WHOLE: there is one part, and these are the results; else out (parts, entries,
    new, heads, d) and, in log2, lse. NaN for a step that was not prepared.
    """
    part = tl.program_id(0) % parts
    pair = tl.program_id(0) // parts
    head = (pair % kv_heads).to(tl.int64)
    order = (pair // kv_heads).to(tl.int64)
    which = head if TABLES > 1 else head * 0
    line: tl.constexpr = COLUMNS + 2 * SEERS
    step = entries.to(tl.int64) * TABLES * line
    if COUNTED:
        number = tl.minimum(number + tl.load(counter), COUNTED - 1)
    header = table + number * step + (order * TABLES + which) * line
    entry = tl.load(header + ENTRY)
    count = tl.load(header + COUNT)
    first = tl.load(header + FIRST)
    for i in range(1, new):
        first = tl.minimum(first, tl.load(header + i * step + FIRST))
    unknown = tl.where(entry < 0, float("nan"), 0.0)
    entry = tl.where(entry < 0, order, entry)
    shown += (entry * TABLES + which) * SEERS * slots
    k += (entry * kv_heads + head) * slots * DIM
    v += (entry * kv_heads + head) * slots * DIM
    queries = tl.arange(0, ROWS)
    dims = tl.arange(0, PAD)
    cols = tl.arange(0, COLS)
    place, members = queries // GROUP, queries % GROUP  # (ROWS,)
    real = queries < GROUP * new
    wide = dims < DIM
    heads = head * GROUP + members
    tile = entry * s_qb + place[:, None] * s_qn + heads[:, None] * s_qh + dims[None, :]
    asking = tl.load(
        q + tile, mask=real[:, None] & wide[None, :], other=0.0
    )  # (ROWS, PAD)
    seers = members if SEERS > 1 else queries * 0
    asked = tl.load(header + place * step + COLUMNS + seers, mask=real, other=0)
    asked = asked.to(shown.dtype.element_ty)

    new_k += entry * s_kb + head * s_kh
    new_v += entry * s_vb + head * s_vh
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32) + unknown
    if part == 0:
        for i in range(new):
            words = tl.load(header + COLUMNS + SEERS + seers, mask=real, other=0)
            words = words.to(shown.dtype.element_ty)
            kept = tl.load(header + KEPT) != 0
            at = tl.load(header + COUNT)
            key = tl.load(new_k + i * s_kn + dims, mask=wide, other=0.0)
            value = tl.load(new_v + i * s_vn + dims, mask=wide, other=0.0)
            if kept:
                tl.store(k + at * DIM + dims, key, mask=wide)
                tl.store(v + at * DIM + dims, value, mask=wide)
                mine = (queries < SEERS) & ((TABLES > 1) | (head == 0))
                tl.store(shown + queries * slots + at, words, mask=mine)
            # Later positions see it if it is kept.
            sees = (place == i) | (kept & (place > i))
            own = tl.where(sees, _times(words, asked, BITS), 0.0)
            score = tl.sum(asking.to(tl.float32) * key.to(tl.float32)[None, :], 1)
            score = tl.where(own > 0.0, score * scale, float("-inf"))
            high = tl.maximum(top, score)
            shift = tl.where(high == float("-inf"), 0.0, high)
            p = tl.math.exp2(score - shift) * own
            fade = tl.math.exp2(top - shift)
            total = total * fade + p
            weighed = tl.where((own > 0.0)[:, None], value.to(tl.float32)[None, :], 0.0)
            acc = acc * fade[:, None] + p[:, None] * weighed
            top = high
            header += step

    share = tl.cdiv(tl.cdiv(tl.maximum(count - first, 0), parts), COLS) * COLS
    first += part * share
    stop = tl.minimum(first + share, count)
    early = _words(shown, first + cols, stop, slots, members, real, SEERS)
    for start in range(first, stop, COLS):
        at = start + cols
        times = _times(early, asked[:, None], BITS)  # (ROWS, COLS)
        early = _words(shown, at + COLS, stop, slots, members, real, SEERS)
        rows = at[:, None] * DIM + dims[None, :]
        there = (at < stop)[:, None] & wide[None, :]
        keys = tl.load(k + rows, mask=there, other=0.0)  # (COLS, PAD)
        s = tl.dot(asking, tl.trans(keys), input_precision=PRECISION) * scale
        s = tl.where(times > 0.0, s, float("-inf"))
        # M is left out of the maximum: a probability is then at most M.
        high = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(high == float("-inf"), 0.0, high)
        p = tl.math.exp2(s - shift[:, None]) * times
        fade = tl.math.exp2(top - shift)
        total = total * fade + tl.sum(p, 1)
        values = tl.load(v + rows, mask=there, other=0.0)
        acc = _weighed(p, values, acc * fade[:, None], HALVES, PRECISION)
        top = high
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]  # out 0 where nothing is seen
    found = top + tl.math.log2(total) + unknown  # and lse -inf, as top is
    if WHOLE:
        row = entry * positions + place
        found *= LN2
    else:
        row = (part.to(tl.int64) * entries + order) * new + place
    heads += row * kv_heads * GROUP
    into = out + heads[:, None] * DIM + dims[None, :]
    acc = acc.to(out.dtype.element_ty)
    tl.store(into, acc, mask=real[:, None] & wide[None, :])
    tl.store(lse + heads, found, mask=real)


@general
def join(
    some,
    weights,
    table,
    counter,
    out,
    lse,
    number,
    rows,
    parts,
    heads,
    new,
    positions,
    COUNTED: tl.constexpr,
    STEP: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """out and lse of one query head of one new position of one entry from its parts:
    ``some`` (parts, rows, d) and, in log2, ``weights`` (parts, rows), with a row for
    each entry, position and head. STEP: the numbers of one entry in the table.
    """
    row = tl.program_id(0).to(tl.int64)
    place = row // heads
    head = row % heads
    order = place // new
    entries = rows // (heads * new)
    if COUNTED:
        number = tl.minimum(number + tl.load(counter), COUNTED - 1)
    entry = tl.load(table + (number * entries + order) * STEP + ENTRY)
    entry = tl.where(entry < 0, order, entry)
    every = tl.arange(0, PARTS).to(tl.int64)
    dims = tl.arange(0, PAD)
    logs = tl.load(
        weights + every * rows + row, mask=every < parts, other=float("-inf")
    )
    top = tl.max(logs, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.math.exp2(logs - shift), 0)
    acc = tl.zeros([PAD], tl.float32)
    for start in range(0, parts, TOGETHER):
        at = start + tl.arange(0, TOGETHER).to(tl.int64)
        log = tl.load(weights + at * rows + row, mask=at < parts, other=float("-inf"))
        where = some + (at * rows + row)[:, None] * DIM + dims[None, :]
        there = (at < parts)[:, None] & (dims < DIM)[None, :]
        found = tl.load(where, mask=there, other=0.0)  # (TOGETHER, PAD)
        acc += tl.sum(tl.math.exp2(log - shift)[:, None] * found, 0)
    acc /= tl.where(total == 0.0, 1.0, total)
    result = (entry * positions + place % new) * heads + head
    into = out + result * DIM + dims
    tl.store(into, acc.to(out.dtype.element_ty), mask=dims < DIM)
    tl.store(lse + result, (top + tl.math.log2(total)) * LN2)
