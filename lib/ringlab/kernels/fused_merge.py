"""On a GPU the calls of a dilated pattern keep their results, and one Triton kernel
merges them.

Forward: if the first call alone writes every row, its result is the output. The kernel
then merges, max-shifted in fp32, the rows that other calls have too, each read once.
Other rows are not touched. (lse is copied once: kernels lay it out by segments.)
Backward: the gradients of each call, from the final out and lse, are summed in the same
way.

The results of all calls but that first are held until they are merged: out and lse once
more for each branch, divided by its rate, and in the backward dq, dk and dv. If
segments do not fold with the batch, one batch entry runs at a time. ``estimate`` counts
these bytes. Calls are not cut into pieces and no pool is used.

Values are tested by Triton's interpreter, and the kernel compiles for compute
capability 8.0 to 12.0 without spills. Measured on an H200 (2026-11-26, tree 8f63b8c)
around cuDNN: a forward of 65,536 tokens takes 2.0 to 3.3 ms, with calls merged one
after another 13 ms. With causal masks of head_dim 64, and for ladders of
head_dim 128, it is faster than the Triton kernels.

The engine passes its plan, of which this module reads ``calls`` and ``whole``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from types import SimpleNamespace

import torch
from torch import Tensor

from ..torch_private import refuse_recording
from . import jit
from .base import HALF, DeviceSpec, Kernel, accumulation_dtype, needs_cuda, wants_dtype
from .external import missing
from .triton import dense_rows, interpreted
from .triton_config import padded

try:
    import triton
    import triton.language as tl
except ImportError:  # ``refuses`` says why, and an estimate starts no kernel
    triton, tl = (
        SimpleNamespace(jit=lambda *f, **_: f[0] if f else lambda g: g),
        SimpleNamespace(constexpr=int),
    )

ELEMENTS = 2048  # of a program's tile, in 64 registers of four warps


def refuses(device: torch.device | DeviceSpec, dtype: torch.dtype) -> str | None:
    """Why the merging kernel cannot run on a device and a dtype, or None."""
    why = None if interpreted() else needs_cuda(device, (8, 0))
    if why is None and not isinstance(device, DeviceSpec):
        why = missing("triton", "triton")
    return why or wants_dtype(dtype, (torch.float32, *HALF))


@dataclass(frozen=True)
class Rows:
    """Where the rows of each call's result lie, for the device code.

    ``table`` (heads, calls, 11) int64, in each line

    - of the positions: the first one, the length of a segment, segments (0: the call
      does not have the head), rate, rows of a segment;
    - of the result: the first element, the strides of batch and rows;
    - the same three of its lse.

    ``firsts`` (owners,): the first row to merge; further ones are ``step`` apart.
    ``aligned``: a common divisor of all elements, at most 16. ``compiled`` is of
    ``jit.launch``.
    """

    table: Tensor
    firsts: Tensor
    step: int
    aligned: int
    compiled: dict = field(default_factory=dict)


def make_rows(
    calls: list,
    heads: int,
    n: int,
    group: int,
    strides: tuple,
    over: bool,
    device="cpu",
) -> Rows:
    """The Rows of ``calls``. ``strides`` of each result: out's (batch, rows, heads),
    lse's (batch, heads, rows).

    An owner is a K/V head with its ``group`` of heads. ``over``: only rows that the
    calls have are merged.

    >>> from ringlab.engine.execute import Call, View
    >>> rows = make_rows([Call(View(4, 1, 2, 8), View(4, 1, 2, 8))], 1, 8, 1, (((32, 8, 8), (4, 4, 1)),), True)
    >>> rows.step, rows.firsts.tolist(), rows.aligned, rows.table.flatten().tolist()
    (2, [1], 8, [1, 8, 1, 2, 4, 0, 32, 8, 0, 4, 1])
    """
    table = [[[0] * 11 for _ in calls] for _ in range(heads)]
    for i, (call, ((o_b, o_n, o_h), (l_b, l_h, l_n))) in enumerate(zip(calls, strides)):
        for j in range(call.heads):
            q = call.q
            # A GPU divides by the length: one segment must have one.
            length = q.repeat_step if call.repeats > 1 else n
            rows = q.first + j * q.shift, length, call.repeats, q.step, q.rows
            elements = j * o_h, o_b, o_n, j * l_h, l_b, l_n
            table[q.head + j * q.head_step][i] = [*rows, *elements]
    aligned = gcd(16, *(x for head in table for line in head for x in line[5:8]))
    firsts = [0] * (heads // group)
    step = 1
    if over:
        step = 0
        for owner in range(heads // group):
            members = table[owner * group : (owner + 1) * group]
            lines = [line for head in members for line in head if line[2]]
            firsts[owner] = lines[0][0] if lines else n
            for start, length, segments, rate, rows, *_ in lines:
                steps = rate if rows > 1 else 0, length if segments > 1 else 0
                step = gcd(step, start - firsts[owner], *steps)
        step = step or n
        firsts = [first if first == n else first % step for first in firsts]
    return Rows(
        torch.tensor(table, device=device),
        torch.tensor(firsts, device=device),
        step,
        aligned,
    )


def forward(q, k, v, plan, causal: bool, scale: float, kernel: Kernel, cached):
    """out (b, n, h, d) in q's dtype and lse (b, h, n) in fp32; q (b, n, h, d), k, v (b,
    n, h_kv, d).
    """
    b, n, heads, _ = q.shape
    reads = (q, k, v)
    kv = (1, 2)
    first, views = _first(plan, n, reads, kv)
    rest = [call for call in plan.calls if call is not first]
    if first is not None:
        out, lse = kernel.forward(*views, causal, scale)  # (b', m, h, d), (b', h, m)
        out = out.reshape(q.shape).to(q.dtype)
        lse = lse.unflatten(0, (b, first.repeats)).transpose(1, 2)  # (b, h, repeats, m)
        lse = lse.reshape(b, heads, n).contiguous()
    else:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dtype = accumulation_dtype(q.dtype)
        lse = torch.empty(b, heads, n, dtype=dtype, device=q.device)
    over = first is not None
    for entries, calls in _entries(rest, reads, kv):
        if results := [kernel.forward(*views, causal, scale) for views in calls]:
            into = out[entries], lse[entries]
            _merge(*into, rest, *zip(*results), 1, over, cached)
        del results  # before those of the next entry are made
    return out, lse


def backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    plan,
    causal: bool,
    scale: float,
    kernel: Kernel,
    cached,
):
    """dq (b, n, h, d), dk, dv (b, n, h_kv, d): the kernel's backward per call, with the
    final out and lse (b, h, n).
    """
    n = q.shape[1]
    group = q.shape[2] // k.shape[2]
    reads, kv = (dout, q, k, v, out, lse.transpose(1, 2)), (2, 3)  # lse: (b, n, h)
    first, views = _first(plan, n, reads, kv) if group == 1 else (None, None)
    rest = [call for call in plan.calls if call is not first]
    if first is not None:
        grads = kernel.backward(*views, causal, scale)
        grads = tuple(g.reshape(q.shape).to(q.dtype) for g in grads)
    else:
        like = torch.contiguous_format
        grads = tuple(torch.empty_like(t, memory_format=like) for t in (q, k, v))
    over = first is not None
    for entries, calls in _entries(rest, reads, kv):
        results = [kernel.backward(*views, causal, scale) for views in calls]
        for grad, parts, members in zip(grads, zip(*results), (1, group, group)):
            _merge(grad[entries], None, rest, parts, parts, members, over, cached)
        del results
    return grads


def _first(plan, n: int, reads, kv):
    """(the call whose result becomes the output, its views), or two None if no call
    writes every row at once.
    """
    call = plan.covering_call(n, reads[0].shape[2])
    views = [] if call is None else call.views(reads, kv)
    return (call, views[0]) if len(views) == 1 else (None, None)


def _entries(calls: list, reads, kv) -> list[tuple[slice, list[list[Tensor]]]]:
    """(batch entries to run together, the views of each call): all entries, or one at a
    time if some do not fold.
    """
    b = reads[0].shape[0]
    folds = all(len(call.views(reads, kv)) == 1 for call in calls)
    entries = [slice(0, b)] if folds else [slice(i, i + 1) for i in range(b)]
    return [
        (entry, [call.views([t[entry] for t in reads], kv)[0] for call in calls])
        for entry in entries
    ]


def _merge(
    into: Tensor,
    lse: Tensor | None,
    calls,
    parts,
    lses,
    group: int,
    over: bool,
    cached,
) -> None:
    """Sum the results of ``calls``, ``parts`` (b', m, h', d), in ``into`` (b, n,
    owners, d).

    ``lses`` (b', h', m) are ignored unless there is an ``lse`` (b, owners, n) to write.
    """
    refuse_recording("the merging kernel", "efficient")
    b, n, owners, d = into.shape
    parts = tuple(map(dense_rows, parts))
    strides = tuple((_strides(part), _strides(l)) for part, l in zip(parts, lses))
    dtypes = into.dtype, *(t.dtype for t in (*parts, *lses))
    places = tuple((call.q, call.heads, call.repeats) for call in calls)
    shape = n, owners, d, group, strides, over, lse is None
    key = "rows", places, *shape, *dtypes, into.device
    rows = cached(
        key,
        lambda: make_rows(calls, owners * group, n, group, strides, over, into.device),
    )
    if into.is_meta:  # a run without data
        return
    size = max(1, ELEMENTS // padded(d))
    tiles = -(-n // (rows.step * size))
    arguments = (
        parts,
        tuple(lses),
        into,
        into if lse is None else lse,
        rows.table,
        rows.firsts,
        rows.step,
        n,
        tiles,
        owners,
        *into.stride()[:3],
    )
    constants = {
        "WEIGH": lse is not None,
        "OVER": over,
        "GROUP": group,
        "ROWS": size,
        "DIM": d,
        "PAD": padded(d),
        "ALIGNED": gcd(rows.aligned, *into.stride()[:3]),
    }
    with torch.cuda.device_of(into):
        programs = tiles * owners * b
        jit.launch(join, rows.compiled, programs, arguments, constants, num_warps=4)


def _strides(t: Tensor) -> tuple[int, ...]:
    """The first three strides; 0 where a dimension of one element gives none meaning."""
    sizes = zip(t.shape[:3], t.stride())
    return tuple(step if size > 1 else 0 for size, step in sizes)


# --------------------------------------------------------------------------------------
# device code: a program owns ROWS positions of one head and reads these rows once from the result of every call that
# has them. The offset of a row is 64 bits wide before it is multiplied. No program writes another's rows.

# Columns of the table, one line per (head, call), see ``Rows``
START, LENGTH, SEGMENTS, RATE, KEPT, OUT, LSE = (
    tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 8)
)
COLUMNS = tl.constexpr(11)


@triton.jit
def _rows_of(line, positions, valid):
    """(whether a call has the ``positions``, their segment, their row in the segment),
    each (ROWS,).
    """
    start, length = (
        tl.load(line + START).to(tl.int32),
        tl.load(line + LENGTH).to(tl.int32),
    )
    segments, rate = (
        tl.load(line + SEGMENTS).to(tl.int32),
        tl.load(line + RATE).to(tl.int32),
    )
    since = positions - start
    segment = since // length
    within = since - segment * length
    row = within // rate
    wrote = valid & (since >= 0) & (segment < segments) & (row * rate == within)
    wrote = wrote & (row < tl.load(line + KEPT).to(tl.int32))
    return wrote, segment.to(tl.int64), row.to(tl.int64)


@triton.jit
def _elements(place, entries, segment, row):
    """The first element of rows in a result, from (offset, stride of the batch, stride
    of rows) at ``place``.
    """
    step = tl.load(place + 1)
    return (
        tl.load(place) + entries * step + segment * step + row * tl.load(place + 2)
    )  # two products: fewer registers


@triton.jit
def _values(
    pointer, at, rows, DIM: tl.constexpr, PAD: tl.constexpr, ALIGNED: tl.constexpr
):
    """(ROWS, PAD) from the elements ``at`` on, in fp32; zeros where not ``rows`` and
    past DIM.
    """
    dims = tl.arange(0, PAD)
    first = tl.multiple_of(at[:, None], [ALIGNED, ALIGNED])
    values = tl.load(
        pointer + first + dims[None, :],
        mask=rows[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    return values.to(tl.float32)


@triton.jit
def _joined(acc, top, total, values, lse):
    """Add the result of a softmax over other keys to (acc, top, total), sums relative
    to the maximum.
    """
    high = tl.maximum(top, lse)
    shift = tl.where(high == float("-inf"), 0.0, high)
    fade = tl.exp(top - shift)
    weight = tl.exp(lse - shift)
    return acc * fade[:, None] + values * weight[:, None], high, total * fade + weight


@triton.jit(do_not_specialize=["step", "n", "tiles", "owners"])
def join(
    parts,
    lses,
    out,
    lse,
    table,
    firsts,
    step,
    n,
    tiles,
    owners,
    s_b,
    s_n,
    s_h,
    WEIGH: tl.constexpr,
    OVER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Every ``step``-th row of ``out`` (b, n, owners, d) from ``firsts`` on: the sum of
    the parts that have it.

    WEIGH: parts are softmax results with their log-sum-exps ``lses``, and the merged
    one goes to ``lse`` (b, owners, n). A row that no part has gets 0 and -inf. OVER:
    the values in out are a part too, and rows that no other part has stay as they are.
    An owner sums the parts of GROUP heads.
    """
    tile = tl.program_id(0) % tiles
    rest = tl.program_id(0) // tiles
    owner = (rest % owners).to(tl.int64)
    batch = (rest // owners).to(tl.int64)
    positions = (
        tl.load(firsts + owner).to(tl.int32) + (tile * ROWS + tl.arange(0, ROWS)) * step
    )  # (ROWS,)
    valid = positions < n
    held = tl.zeros([ROWS], tl.int1)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for member in range(GROUP):
        for i in tl.static_range(len(parts)):
            line = table + ((owner * GROUP + member) * len(parts) + i) * COLUMNS
            segments = tl.load(line + SEGMENTS)
            if segments > 0:  # the call has this head
                wrote, segment, row = _rows_of(line, positions, valid)
                at = _elements(line + OUT, batch * segments, segment, row)
                values = _values(parts[i], at, wrote, DIM, PAD, ALIGNED)
                if WEIGH:
                    at = _elements(line + LSE, batch * segments, segment, row)
                    part_lse = tl.load(lses[i] + at, mask=wrote, other=float("-inf"))
                    acc, top, total = _joined(acc, top, total, values, part_lse)
                else:
                    acc += values
                held = held | wrote
    into = batch * s_b + owner * s_h + positions.to(tl.int64) * s_n
    final = (batch * owners + owner) * n + positions
    if OVER:
        values = _values(out, into, held, DIM, PAD, ALIGNED)
        if WEIGH:
            acc, top, total = _joined(
                acc,
                top,
                total,
                values,
                tl.load(lse + final, mask=held, other=float("-inf")),
            )
        else:
            acc += values
        valid = held
        # Several warps may have read a row, and one of them writes it: none before all
        # have read.
        tl.debug_barrier()
    if WEIGH:
        total = tl.where(
            total == 0.0, 1.0, total
        )  # top of a row that sees nothing is -inf
        acc = acc / total[:, None]
        tl.store(lse + final, top + tl.log(total), mask=valid)
    dims = tl.arange(0, PAD)
    first = tl.multiple_of(into[:, None], [ALIGNED, ALIGNED])
    tl.store(
        out + first + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=valid[:, None] & (dims < DIM)[None, :],
    )
