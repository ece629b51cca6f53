"""The device code of the backward list kernels; helpers and conventions are those of ``triton_forward``.

``delta`` comes first; then dq by tiles of queries and dk, dv by tiles of keys, each from the final log-sum-exp, so that
a program writes its own rows alone.
"""

import triton
import triton.language as tl

from .triton_forward import (  # fmt: skip
    BASE,
    COLUMNS,
    COUNT,
    FIRST,
    FULL,
    HEAD,
    LN2,
    LOG2E,
    MASKED,
    PARTIAL,
    START,
    STRIDE,
    _block,
    _entry,
    _place,
    _put,
    _rows,
    _unpack,
)


@triton.jit
def delta(
    dout, out, dlse, found, heads, n, s_gb, s_gn, s_gh, s_ob, s_on, s_oh,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """rowsum(dout * out) - dlse, (b, h, n) in fp32: what a flash backward subtracts from ``dout v^T``."""
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
    """log2-sum-exps by which probabilities are 0 where a row sees nothing, or is none."""
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
    """dq of one tile of queries by the final lse and ``less``, which ``delta`` wrote; JOIN: added to what is there."""
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
    """dk and dv of one tile of keys, over the queries of all heads of the group; dk and dv have the same strides."""
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
