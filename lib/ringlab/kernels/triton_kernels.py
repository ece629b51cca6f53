"""The device code in Triton (Tillet et al. 2019): forward, dq, and dk with dv, over a tile schedule.

One program owns one tile of rows, reads them in place and visits the tiles of its schedule (see ``tile_schedule``). No
program writes another's rows, so there are no atomics and results are deterministic. Scores are in log2: ``scale`` is
the softmax scale times log2(e). A pair that counts M times adds log2(M) to its exponent. Sums are in fp32. lse outside
is natural. The offset of a row is 64 bits wide before it is multiplied. EARLY: the next entry of the schedule is
fetched one iteration early, because a load that waits for another load costs pipeline stages.

READS: "pointers". ``experimental`` alone sets others, which read by tensor descriptors over the view
(b, STEP, h, n / STEP, d), in which a tile of one residue class mod STEP is a block for the copy engine. "specialized"
(forward only) leaves reading to extra warps. Triton does so for a single loop, which masks every tile if MASK.
"""

import triton
import triton.language as tl

# Columns of a tile and bits of an entry, as in tile_schedule
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
    """Where entry i of the full or of the masked entries of a tile lies."""
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
        # M is left out of the maximum: a probability is then at most M, and no sum overflows.
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
    """out and lse of one tile of queries. JOIN: merged with the values that are there. MASK: see READS."""
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
        if READS == "specialized":  # two groups of warps share the rows; only a descriptor made here can be cut
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
    if READS == "specialized":  # the entries of a tile are contiguous: masked, full, masked
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


@triton.jit
def delta(
    dout, out, dlse, found, heads, n, s_gb, s_gn, s_gh, s_ob, s_on, s_oh,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """rowsum(dout * out) - dlse, (b, h, n) in fp32, which a flash backward subtracts from ``dout v^T``."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = mine < n
    g = _rows(dout + batch * s_gb + head * s_gh, mine, s_gn, valid, DIM, PAD, True).to(tl.float32)
    o = _rows(out + batch * s_ob + head * s_oh, mine, s_on, valid, DIM, PAD, True).to(tl.float32)
    at = (batch * heads + head) * n + mine
    total = tl.sum(g * o, 1)
    if HAS_LSE:
        total -= tl.load(dlse + at, mask=valid, other=0.0)
    tl.store(found + at, total, mask=valid)


@triton.jit
def _alive(lse, valid):
    """lse in log2, inf for rows that see nothing or do not exist, so that their probabilities are 0."""
    found = tl.load(lse, mask=valid, other=float("inf"))
    return tl.where(found == float("-inf"), float("inf"), found * LOG2E)


@triton.jit
def _dq_part(
    acc, q, g, lse, less, mine, k, v, s_kn, s_vn, batch, kv_head, entries, count, base, start, partial, full, stride,
    scale, COLS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, READS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, COLS)
    next_first, next_packed = _entry(entries, _place(0, start, partial, full, MASK))
    for i in range(count):
        if EARLY:
            first, packed = next_first, next_packed
            next_first, next_packed = _entry(entries, _place(i + 1, start, partial, full, MASK))
        else:
            first, packed = _entry(entries, _place(i, start, partial, full, MASK))
        rows, bonus, _ = _unpack(packed)
        other = base + first + span * stride
        valid = span < rows
        if READS == "pointers":
            keys = _rows(k, other, s_kn, valid, DIM, PAD, MASK)  # (COLS, PAD)
            values = _rows(v, other, s_vn, valid, DIM, PAD, MASK)  # (COLS, PAD)
        else:
            keys = _block(k, batch, kv_head, base + first, STEP, COLS, DIM)
            values = _block(v, batch, kv_head, base + first, STEP, COLS, DIM)
        s = tl.dot(q, tl.trans(keys), input_precision=PRECISION)  # (ROWS, COLS)
        p = tl.math.exp2(s * scale - (lse - bonus)[:, None])
        if MASK:
            seen = valid[None, :]
            if CAUSAL:
                seen = seen & (other[None, :] <= mine[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(g, tl.trans(values), input_precision=PRECISION) - less[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)
    return acc


@triton.jit
def backward_q(
    dout, q, k, v, lse, less, dq, tiles, entries, scale, programs, heads, group, n,
    s_gb, s_gn, s_gh, s_qb, s_qn, s_qh, s_kb, s_kn, s_kh, s_vb, s_vn, s_vh, s_db, s_dn, s_dh,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CAUSAL: tl.constexpr,
    JOIN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, READS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries from the final lse and the sums of ``delta``. JOIN: added to what is there."""
    batch = (tl.program_id(0) // programs).to(tl.int64)
    tile = tiles + (tl.program_id(0) % programs) * COLUMNS
    head, stride, base = tl.load(tile + HEAD).to(tl.int64), tl.load(tile + STRIDE), tl.load(tile + BASE)
    start, partial, full = tl.load(tile + START), tl.load(tile + PARTIAL), tl.load(tile + FULL)
    span = tl.arange(0, ROWS)
    mine, valid = tl.load(tile + FIRST) + span * stride, span < tl.load(tile + COUNT)
    kv_head = head // group
    if READS == "pointers":
        k += batch * s_kb + kv_head * s_kh
        v += batch * s_vb + kv_head * s_vh
        queries = _rows(q + batch * s_qb + head * s_qh, mine, s_qn, valid, DIM, PAD, True)
        g = _rows(dout + batch * s_gb + head * s_gh, mine, s_gn, valid, DIM, PAD, True)
    else:
        queries = _block(q, batch.to(tl.int32), head.to(tl.int32), tl.load(tile + FIRST), STEP, ROWS, DIM)
        g = _block(dout, batch.to(tl.int32), head.to(tl.int32), tl.load(tile + FIRST), STEP, ROWS, DIM)
    at = (batch * heads + head) * n + mine
    final, minus = _alive(lse + at, valid), tl.load(less + at, mask=valid, other=0.0)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    acc = _dq_part(
        acc, queries, g, final, minus, mine, k, v, s_kn, s_vn, batch.to(tl.int32), kv_head.to(tl.int32), entries, full,
        base, start, partial, full, stride, scale, COLS, DIM, PAD, CAUSAL, False, PRECISION, EARLY, READS, STEP,
    )  # fmt: skip
    acc = _dq_part(
        acc, queries, g, final, minus, mine, k, v, s_kn, s_vn, batch.to(tl.int32), kv_head.to(tl.int32), entries,
        tl.load(tile + MASKED), base, start, partial, full, stride, scale, COLS, DIM, PAD, CAUSAL, True, PRECISION,
        EARLY, READS, STEP,
    )  # fmt: skip
    _put(dq + batch * s_db + head * s_dh, acc * (scale * LN2), mine, s_dn, valid, DIM, PAD, JOIN)


@triton.jit
def _dkv_part(
    dk, dv, keys, values, mine, dout, q, lse, less, s_gn, s_gh, s_qn, s_qh, n, batch, q_head, entries, count, base,
    start, partial, full, stride, scale,
    COLS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, READS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, COLS)
    next_first, next_packed = _entry(entries, _place(0, start, partial, full, MASK))
    for i in range(count):
        if EARLY:
            first, packed = next_first, next_packed
            next_first, next_packed = _entry(entries, _place(i + 1, start, partial, full, MASK))
        else:
            first, packed = _entry(entries, _place(i, start, partial, full, MASK))
        rows, bonus, member = _unpack(packed)
        other = base + first + span * stride
        valid = span < rows
        if READS != "pointers":
            queries = _block(q, batch, q_head + member, base + first, STEP, COLS, DIM)
            g = _block(dout, batch, q_head + member, base + first, STEP, COLS, DIM)
        member = member.to(tl.int64)
        if READS == "pointers":
            queries = _rows(q + member * s_qh, other, s_qn, valid, DIM, PAD, MASK)  # (COLS, PAD)
            g = _rows(dout + member * s_gh, other, s_gn, valid, DIM, PAD, MASK)  # (COLS, PAD)
        final = _alive(lse + member * n + other, valid)
        minus = tl.load(less + member * n + other, mask=valid, other=0.0)
        s = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)  # (ROWS, COLS)
        p = tl.math.exp2(s * scale - (final - bonus)[None, :])
        if MASK:
            if CAUSAL:
                p = tl.where(mine[:, None] <= other[None, :], p, 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision=PRECISION)
        ds = p * (tl.dot(values, tl.trans(g), input_precision=PRECISION) - minus[None, :])
        dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def backward_kv(
    dout, q, k, v, lse, less, dk, dv, tiles, entries, scale, programs, heads, group, n,
    s_gb, s_gn, s_gh, s_qb, s_qn, s_qh, s_kb, s_kn, s_kh, s_vb, s_vn, s_vh, s_db, s_dn, s_dh,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CAUSAL: tl.constexpr,
    JOIN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, READS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, from the queries of all heads of its group. dk and dv have the same strides."""
    batch = (tl.program_id(0) // programs).to(tl.int64)
    tile = tiles + (tl.program_id(0) % programs) * COLUMNS
    head, stride, base = tl.load(tile + HEAD).to(tl.int64), tl.load(tile + STRIDE), tl.load(tile + BASE)
    start, partial, full = tl.load(tile + START), tl.load(tile + PARTIAL), tl.load(tile + FULL)
    span = tl.arange(0, ROWS)
    mine, valid = tl.load(tile + FIRST) + span * stride, span < tl.load(tile + COUNT)
    if READS == "pointers":
        keys = _rows(k + batch * s_kb + head * s_kh, mine, s_kn, valid, DIM, PAD, True)
        values = _rows(v + batch * s_vb + head * s_vh, mine, s_vn, valid, DIM, PAD, True)
        q += batch * s_qb + head * group * s_qh
        dout += batch * s_gb + head * group * s_gh
    else:
        keys = _block(k, batch.to(tl.int32), head.to(tl.int32), tl.load(tile + FIRST), STEP, ROWS, DIM)
        values = _block(v, batch.to(tl.int32), head.to(tl.int32), tl.load(tile + FIRST), STEP, ROWS, DIM)
    q_head = (head * group).to(tl.int32)
    lse += (batch * heads + head * group) * n
    less += (batch * heads + head * group) * n
    sum_k, sum_v = tl.zeros([ROWS, PAD], tl.float32), tl.zeros([ROWS, PAD], tl.float32)
    sum_k, sum_v = _dkv_part(
        sum_k, sum_v, keys, values, mine, dout, q, lse, less, s_gn, s_gh, s_qn, s_qh, n, batch.to(tl.int32),
        q_head, entries, full, base, start, partial, full, stride, scale, COLS, DIM, PAD, CAUSAL, False, PRECISION,
        EARLY, READS, STEP,
    )  # fmt: skip
    sum_k, sum_v = _dkv_part(
        sum_k, sum_v, keys, values, mine, dout, q, lse, less, s_gn, s_gh, s_qn, s_qh, n, batch.to(tl.int32),
        q_head, entries, tl.load(tile + MASKED), base, start, partial, full, stride, scale, COLS, DIM, PAD, CAUSAL,
        True, PRECISION, EARLY, READS, STEP,
    )  # fmt: skip
    _put(dk + batch * s_db + head * s_dh, sum_k * (scale * LN2), mine, s_dn, valid, DIM, PAD, JOIN)
    _put(dv + batch * s_db + head * s_dh, sum_v, mine, s_dn, valid, DIM, PAD, JOIN)
