"""The device code of ``fused_merge`` in Triton.

A program owns ROWS positions of one head. It reads these rows once from the result of every call that has them. Sums
are in fp32, with one rounding to the result's dtype. No program writes another's rows, so results are deterministic.
The offset of a row is 64 bits wide before it is multiplied.
"""

import triton
import triton.language as tl

# Columns of the table, one line per (head, call), see fused_merge.Rows
START, LENGTH, SEGMENTS, RATE, KEPT, OUT, LSE = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 8))
COLUMNS = tl.constexpr(11)


@triton.jit
def _rows_of(line, positions, valid):
    """(whether a call has the ``positions``, their segment, their row in the segment), each (ROWS,)."""
    start, length = tl.load(line + START).to(tl.int32), tl.load(line + LENGTH).to(tl.int32)
    segments, rate = tl.load(line + SEGMENTS).to(tl.int32), tl.load(line + RATE).to(tl.int32)
    since = positions - start
    segment = since // length
    within = since - segment * length
    row = within // rate
    wrote = valid & (since >= 0) & (segment < segments) & (row * rate == within)
    wrote = wrote & (row < tl.load(line + KEPT).to(tl.int32))
    return wrote, segment.to(tl.int64), row.to(tl.int64)


@triton.jit
def _elements(place, entries, segment, row):
    """The first element of rows in a result, from (offset, stride of the batch, stride of rows) at ``place``."""
    step = tl.load(place + 1)
    return tl.load(place) + entries * step + segment * step + row * tl.load(place + 2)  # two products: fewer registers


@triton.jit
def _values(pointer, at, rows, DIM: tl.constexpr, PAD: tl.constexpr, ALIGNED: tl.constexpr):
    """(ROWS, PAD) from the elements ``at`` on, in fp32; zeros where not ``rows`` and past DIM."""
    dims = tl.arange(0, PAD)
    first = tl.multiple_of(at[:, None], [ALIGNED, ALIGNED])
    found = tl.load(pointer + first + dims[None, :], mask=rows[:, None] & (dims < DIM)[None, :], other=0.0)
    return found.to(tl.float32)


@triton.jit
def _joined(acc, top, total, values, lse):
    """Add the result of a softmax over other keys to (acc, top, total), sums relative to the maximum."""
    high = tl.maximum(top, lse)
    shift = tl.where(high == float("-inf"), 0.0, high)
    fade, weight = tl.exp(top - shift), tl.exp(lse - shift)
    return acc * fade[:, None] + values * weight[:, None], high, total * fade + weight


@triton.jit(do_not_specialize=["step", "n", "tiles", "owners"])
def join(
    parts, lses, out, lse, table, firsts, step, n, tiles, owners, s_b, s_n, s_h,
    WEIGH: tl.constexpr, OVER: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Every ``step``-th row of ``out`` (b, n, owners, d) from ``firsts`` on: the sum of the parts that have it.

    WEIGH: parts are softmax results with their log-sum-exps ``lses``, and the merged one goes to ``lse``
    (b, owners, n). A row that no part has gets 0 and -inf. OVER: the values in out are a part too, and rows that no
    other part has stay as they are. An owner sums the parts of GROUP heads.
    """
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    owner, batch = (rest % owners).to(tl.int64), (rest // owners).to(tl.int64)
    positions = tl.load(firsts + owner).to(tl.int32) + (tile * ROWS + tl.arange(0, ROWS)) * step  # (ROWS,)
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
                    found = tl.load(lses[i] + at, mask=wrote, other=float("-inf"))
                    acc, top, total = _joined(acc, top, total, values, found)
                else:
                    acc += values
                held = held | wrote
    into = batch * s_b + owner * s_h + positions.to(tl.int64) * s_n
    final = (batch * owners + owner) * n + positions
    if OVER:
        values = _values(out, into, held, DIM, PAD, ALIGNED)
        if WEIGH:
            acc, top, total = _joined(acc, top, total, values, tl.load(lse + final, mask=held, other=float("-inf")))
        else:
            acc += values
        valid = held
        # Several warps may have read a row, and one of them writes it: none before all have read.
        tl.debug_barrier()
    if WEIGH:
        total = tl.where(total == 0.0, 1.0, total)  # top of a row that sees nothing is -inf
        acc = acc / total[:, None]
        tl.store(lse + final, top + tl.log(total), mask=valid)
    dims = tl.arange(0, PAD)
    first = tl.multiple_of(into[:, None], [ALIGNED, ALIGNED])
    tl.store(out + first + dims[None, :], acc.to(out.dtype.element_ty), mask=valid[:, None] & (dims < DIM)[None, :])
