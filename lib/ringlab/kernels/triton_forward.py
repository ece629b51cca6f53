"""The device code of the list kernels, in Triton (Tillet et al. 2019); ``triton_lists`` imports it where Triton is.

One program owns one tile of rows, reads them where they lie and walks its list (see ``ringlab.kernels.tile_schedule``); no program
writes another's rows, so there are no atomics and results are deterministic. Scores are in log2: ``scale`` is the
softmax scale times log2(e); M counts by adding log2(M) to the exponent. Sums are in fp32. The log-sum-exp outside is
natural. The offset of a row is 64 bits wide before it is multiplied. EARLY: the next entry of a list is fetched an
iteration early, for a load that another load waits for costs pipeline stages.

READS: tensors are read by pointers, or by tensor descriptors over the view (b, STEP, h, n / STEP, d), in which a tile
of one residue class mod STEP is a block that the copy engine fetches: fewer registers. "specialized" (forward alone)
leaves the reading to warps of its own, which Triton does for one loop alone: with MASK that masks all that it meets.
"""

import triton
import triton.language as tl

# Columns of a tile and bits of an entry: ringlab.kernels.tile_schedule
HEAD, FIRST, COUNT, STRIDE, BASE, START, PARTIAL, FULL, MASKED = (tl.constexpr(i) for i in range(9))
COLUMNS = tl.constexpr(9)
TIMES_AT, MEMBER_AT = tl.constexpr(9), tl.constexpr(17)
ROWS_MASK, TIMES_MASK = tl.constexpr(511), tl.constexpr(255)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(pointer, positions, s_n, valid, DIM: tl.constexpr, PAD: tl.constexpr, MASK: tl.constexpr):
    """(rows, PAD) at ``positions``; zeros where not ``valid`` (if MASK) and past DIM."""
    dims = tl.arange(0, PAD)
    at = pointer + positions.to(tl.int64)[:, None] * s_n + dims[None, :]
    if MASK:
        return tl.load(at, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
    elif PAD != DIM:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _put(pointer, values, positions, s_n, valid, DIM: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr):
    dims = tl.arange(0, PAD)
    at = pointer + positions.to(tl.int64)[:, None] * s_n + dims[None, :]
    mask = valid[:, None] & (dims < DIM)[None, :]
    if ADD:
        values += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _place(i, start, partial, full, MASK: tl.constexpr):
    """Where entry i of the whole or the masked part of a tile's list lies."""
    if MASK:
        return start + i + tl.where(i >= partial, full, 0)
    else:
        return start + partial + i


@triton.jit
def _entry(entries, at):
    return tl.load(entries + 2 * at), tl.load(entries + 2 * at + 1)


@triton.jit
def _unpack(packed):
    """rows, log2(M) and member of an entry."""
    times = (packed >> TIMES_AT) & TIMES_MASK
    return packed & ROWS_MASK, tl.math.log2(times.to(tl.float32)), packed >> MEMBER_AT


@triton.jit
def _block(tensor, batch, head, first, STEP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """(ROWS, DIM) from position ``first`` on, STEP apart, by a descriptor; zeros past the end of the sequence."""
    return tensor.load([batch, first % STEP, head, first // STEP, 0]).reshape(ROWS, DIM)


@triton.jit
def _forward_part(
    acc, total, top, q, mine, k, v, s_kn, s_vn, batch, kv_head, entries, count, base, start, partial, full, stride,
    scale, COLS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, READS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, COLS)
    next_first, next_packed = _entry(entries, _place(0, start, partial, full, MASK))
    for i in tl.range(0, count, warp_specialize=READS == "specialized"):
        if EARLY:
            first, packed = next_first, next_packed
            next_first, next_packed = _entry(entries, _place(i + 1, start, partial, full, MASK))
        else:
            first, packed = _entry(entries, _place(i, start, partial, full, MASK))
        rows, bonus, _ = _unpack(packed)
        other = base + first + span * stride  # (COLS,)
        valid = span < rows
        if READS == "pointers":
            keys = _rows(k, other, s_kn, valid, DIM, PAD, MASK)  # (COLS, PAD)
        else:
            keys = _block(k, batch, kv_head, base + first, STEP, COLS, DIM)
        s = tl.dot(q, tl.trans(keys), input_precision=PRECISION)  # (ROWS, COLS)
        if MASK:
            seen = valid[None, :]
            if CAUSAL:
                seen = seen & (other[None, :] <= mine[:, None])
            s = tl.where(seen, s, float("-inf"))
        # M is left out of the maximum: a probability is then at most M, which no sum minds.
        high = tl.maximum(top, tl.max(s, 1) * scale)
        shift = tl.where(high == float("-inf"), 0.0, high) if MASK else high
        p = tl.math.exp2(s * scale - (shift - bonus)[:, None])
        fade = tl.math.exp2(top - shift)
        total = total * fade + tl.sum(p, 1)
        if READS == "pointers":
            values = _rows(v, other, s_vn, valid, DIM, PAD, MASK)  # (COLS, PAD)
        else:
            values = _block(v, batch, kv_head, base + first, STEP, COLS, DIM)
        acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
        top = high
    return acc, total, top


@triton.jit
def forward(
    q, k, v, out, lse, tiles, entries, scale, programs, heads, group, n,
    s_qb, s_qn, s_qh, s_kb, s_kn, s_kh, s_vb, s_vn, s_vh, s_ob, s_on, s_oh,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CAUSAL: tl.constexpr,
    JOIN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, READS: tl.constexpr, STEP: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries; JOIN: together with what stands there; MASK: if one loop serves, it masks."""
    batch = (tl.program_id(0) // programs).to(tl.int64)
    tile = tiles + (tl.program_id(0) % programs) * COLUMNS
    head, base = tl.load(tile + HEAD).to(tl.int64), tl.load(tile + BASE)
    start, partial, full = tl.load(tile + START), tl.load(tile + PARTIAL), tl.load(tile + FULL)
    stride = STEP if READS != "pointers" else tl.load(tile + STRIDE)
    span = tl.arange(0, ROWS)
    first = tl.load(tile + FIRST)
    mine, valid = first + span * stride, span < tl.load(tile + COUNT)  # (ROWS,)
    kv_head = head // group
    out += batch * s_ob + head * s_oh
    lse += (batch * heads + head) * n + mine
    if READS == "pointers":
        k += batch * s_kb + kv_head * s_kh
        v += batch * s_vb + kv_head * s_vh
        queries = _rows(q + batch * s_qb + head * s_qh, mine, s_qn, valid, DIM, PAD, True)  # (ROWS, PAD)
    else:
        if READS == "specialized":  # two groups of warps share the rows, and only a descriptor made here can be cut
            q += batch * s_qb + head * s_qh + (first % STEP).to(tl.int64) * s_qn
            rows = tl.make_tensor_descriptor(q, [n // STEP, DIM], [s_qn * STEP, 1], [ROWS, DIM])
            queries = rows.load([first // STEP, 0])
        else:
            queries = _block(q, batch.to(tl.int32), head.to(tl.int32), first, STEP, ROWS, DIM)
        batch, kv_head = batch.to(tl.int32), kv_head.to(tl.int32)
    if JOIN:
        acc = _rows(out, mine, s_on, valid, DIM, PAD, True).to(tl.float32)
        top = tl.load(lse, mask=valid, other=float("-inf")) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([ROWS, PAD], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    if READS == "specialized":  # the entries of a tile lie side by side: partial ones, whole ones, masked ones
        acc, total, top = _forward_part(
            acc, total, top, queries, mine, k, v, s_kn, s_vn, batch, kv_head, entries, full + tl.load(tile + MASKED),
            base, start, 0, 0, stride, scale, COLS, DIM, PAD, CAUSAL, MASK, PRECISION, EARLY, READS, STEP,
        )  # fmt: skip
    else:
        acc, total, top = _forward_part(
            acc, total, top, queries, mine, k, v, s_kn, s_vn, batch, kv_head, entries, full, base, start, partial,
            full, stride, scale, COLS, DIM, PAD, CAUSAL, False, PRECISION, EARLY, READS, STEP,
        )  # fmt: skip
        acc, total, top = _forward_part(
            acc, total, top, queries, mine, k, v, s_kn, s_vn, batch, kv_head, entries, tl.load(tile + MASKED), base,
            start, partial, full, stride, scale, COLS, DIM, PAD, CAUSAL, True, PRECISION, EARLY, READS, STEP,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # a query that sees nothing: out 0, lse -inf, as top is
    _put(out, acc / total[:, None], mine, s_on, valid, DIM, PAD, False)
    tl.store(lse, (top + tl.math.log2(total)) * LN2, mask=valid)
