"""The device code in Triton (Tillet et al. 2019): forward, dq, and dk with dv, over a
tile schedule.

One program owns one tile of rows, reads them in place and visits the tiles of its
schedule (see ``tile_schedule``). No program writes another's rows, so there are no
atomics and results are deterministic. Scores are in log2: ``scale`` is the softmax
scale times log2(e). A pair that counts M times adds log2(M) to its exponent. Sums are
in fp32. lse outside is natural. The offset of a row is 64 bits wide before it is
multiplied. EARLY: the next entry of the schedule is fetched one iteration early,
because a load that waits for another load costs pipeline stages. BAND: what is masked
and no PARTIAL entry is seen from ``before`` to ``after``.
"""

import triton
import triton.language as tl

# Columns of a tile and bits of an entry, as in tile_schedule
HEAD, FIRST, COUNT, STRIDE, BASE, START, PARTIAL, FULL, MASKED = (
    tl.constexpr(i) for i in range(9)
)
COLUMNS = tl.constexpr(9)
TIMES_AT = tl.constexpr(9)
MEMBER_AT = tl.constexpr(17)
ROWS_MASK = tl.constexpr(511)
TIMES_MASK = tl.constexpr(255)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(
    pointer,
    positions,
    s_n,
    valid,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    MASK: tl.constexpr,
):
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
def _put(
    pointer,
    values,
    positions,
    s_n,
    valid,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    ADD: tl.constexpr,
):
    dims = tl.arange(0, PAD)
    at = pointer + positions.to(tl.int64)[:, None] * s_n + dims[None, :]
    mask = valid[:, None] & (dims < DIM)[None, :]
    if ADD:
        values += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _program(tiles, programs):
    """batch, tile, head, base, start, partial, full of this program."""
    tile = tiles + (tl.program_id(0) % programs) * COLUMNS
    batch, head = (
        (tl.program_id(0) // programs).to(tl.int64),
        tl.load(tile + HEAD).to(tl.int64),
    )
    base = tl.load(tile + BASE)
    start = tl.load(tile + START)
    return batch, tile, head, base, start, tl.load(tile + PARTIAL), tl.load(tile + FULL)


@triton.jit
def _entry(entries, i, start, partial, full, MASK: tl.constexpr):
    """(first position less the base, packed) of entry i of the full or of the masked
    entries of a tile.
    """
    if MASK:
        at = start + i + tl.where(i >= partial, full, 0)
    else:
        at = start + partial + i
    return tl.load(entries + 2 * at), tl.load(entries + 2 * at + 1)


@triton.jit
def _visit(
    entries,
    i,
    next_first,
    next_packed,
    others,
    base,
    start,
    partial,
    full,
    stride,
    MASK: tl.constexpr,
    EARLY: tl.constexpr,
    BAND: tl.constexpr,
):
    """Entry i: positions (COLS,), which exist, log2(M), member; then the next entry if
    EARLY.
    """
    if EARLY:
        first = next_first
        packed = next_packed
        next_first, next_packed = _entry(entries, i + 1, start, partial, full, MASK)
    else:
        first, packed = _entry(entries, i, start, partial, full, MASK)
    times = (packed >> TIMES_AT) & TIMES_MASK
    if BAND:
        first = tl.where(first < 0, -1 - first, base + first)
    else:
        first += base
    bonus = tl.math.log2(times.to(tl.float32))
    member = packed >> MEMBER_AT
    return (
        first + others * stride,
        others < (packed & ROWS_MASK),
        bonus,
        member,
        next_first,
        next_packed,
    )


@triton.jit
def _near(mine, other, before, after):
    """Which rows ``other`` (COLS,) those of the tile (ROWS,) see in a band."""
    apart = other[None, :] - mine[:, None]
    return (apart >= -before) & (apart <= after)


@triton.jit
def forward(
    q,
    k,
    v,
    out,
    lse,
    tiles,
    entries,
    scale,
    programs,
    heads,
    group,
    n,
    before,
    after,
    s_qb,
    s_qn,
    s_qh,
    s_kb,
    s_kn,
    s_kh,
    s_vb,
    s_vn,
    s_vh,
    s_ob,
    s_on,
    s_oh,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    JOIN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out and lse of one tile of queries. JOIN: merged with the values that are there."""
    batch, tile, head, base, start, partial, full = _program(tiles, programs)
    stride = tl.load(tile + STRIDE)
    span = tl.arange(0, ROWS)
    others = tl.arange(0, COLS)
    mine = tl.load(tile + FIRST) + span * stride  # (ROWS,)
    valid = span < tl.load(tile + COUNT)
    kv_head = head // group
    out += batch * s_ob + head * s_oh
    lse += (batch * heads + head) * n + mine
    k += batch * s_kb + kv_head * s_kh
    v += batch * s_vb + kv_head * s_vh
    q += batch * s_qb + head * s_qh
    queries = _rows(q, mine, s_qn, valid, DIM, PAD, True)  # (ROWS, PAD)
    if JOIN:
        acc = _rows(out, mine, s_on, valid, DIM, PAD, True).to(tl.float32)
        top = tl.load(lse, mask=valid, other=float("-inf")) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([ROWS, PAD], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    for MASK in tl.static_range(2):  # full entries, then masked ones
        count = tl.load(tile + MASKED) if MASK else full
        next_first, next_packed = _entry(entries, 0, start, partial, full, MASK)
        for i in range(count):
            other, shown, bonus, member, next_first, next_packed = _visit(
                entries,
                i,
                next_first,
                next_packed,
                others,
                base,
                start,
                partial,
                full,
                stride,
                MASK,
                EARLY,
                BAND,
            )
            keys = _rows(k, other, s_kn, shown, DIM, PAD, MASK)
            s = tl.dot(
                queries, tl.trans(keys), input_precision=PRECISION
            )  # (ROWS, COLS)
            if MASK:
                seen = shown[None, :]
                if CAUSAL:
                    seen = seen & (other[None, :] <= mine[:, None])
                if BAND:
                    seen &= _near(mine, other, before, after) | (i < partial)
                s = tl.where(seen, s, float("-inf"))
            # M is left out of the maximum: a probability is then at most M, and no
            # sum overflows.
            high = tl.maximum(top, tl.max(s, 1) * scale)
            shift = tl.where(high == float("-inf"), 0.0, high) if MASK else high
            p = tl.math.exp2(s * scale - (shift - bonus)[:, None])
            fade = tl.math.exp2(top - shift)
            total = total * fade + tl.sum(p, 1)
            values = _rows(v, other, s_vn, shown, DIM, PAD, MASK)
            acc = tl.dot(
                p.to(values.dtype),
                values,
                acc * fade[:, None],
                input_precision=PRECISION,
            )
            top = high
    total = tl.where(
        total == 0.0, 1.0, total
    )  # a query that sees nothing: out 0, lse -inf, as top is
    _put(out, acc / total[:, None], mine, s_on, valid, DIM, PAD, False)
    tl.store(lse, (top + tl.math.log2(total)) * LN2, mask=valid)


@triton.jit
def row_sums(
    dout,
    out,
    lse,
    dlse,
    log2,
    less,
    heads,
    n,
    tiles,
    s_gb,
    s_gn,
    s_gh,
    s_ob,
    s_on,
    s_oh,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Of each row ``log2``, its lse in log2, inf if it sees nothing, and ``less``,
    rowsum(dout * out) - dlse, which a flash backward subtracts from ``dout v^T``; all
    (b, h, n) in fp32.
    """
    rest = tl.program_id(0) // tiles
    batch = (rest // heads).to(tl.int64)
    head = (rest % heads).to(tl.int64)
    mine = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    valid = mine < n
    g = _rows(dout + batch * s_gb + head * s_gh, mine, s_gn, valid, DIM, PAD, True).to(
        tl.float32
    )
    o = _rows(out + batch * s_ob + head * s_oh, mine, s_on, valid, DIM, PAD, True).to(
        tl.float32
    )
    at = (batch * heads + head) * n + mine
    total = tl.sum(g * o, 1)
    if HAS_LSE:
        total -= tl.load(dlse + at, mask=valid, other=0.0)
    tl.store(less + at, total, mask=valid)
    seen = tl.load(lse + at, mask=valid, other=0.0)
    seen = tl.where(seen == float("-inf"), float("inf"), seen * LOG2E)
    tl.store(log2 + at, seen, mask=valid)


@triton.jit
def backward_q(
    dout,
    q,
    k,
    v,
    log2,
    less,
    dq,
    tiles,
    entries,
    scale,
    programs,
    heads,
    group,
    n,
    before,
    after,
    s_gb,
    s_gn,
    s_gh,
    s_qb,
    s_qn,
    s_qh,
    s_kb,
    s_kn,
    s_kh,
    s_vb,
    s_vn,
    s_vh,
    s_db,
    s_dn,
    s_dh,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    JOIN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """dq of one tile of queries from ``log2`` and ``less`` of ``row_sums``. JOIN:
    added to what is there.
    """
    batch, tile, head, base, start, partial, full = _program(tiles, programs)
    span, others, stride = (
        tl.arange(0, ROWS),
        tl.arange(0, COLS),
        tl.load(tile + STRIDE),
    )
    mine = tl.load(tile + FIRST) + span * stride  # (ROWS,)
    valid = span < tl.load(tile + COUNT)
    kv_head = head // group
    k += batch * s_kb + kv_head * s_kh
    v += batch * s_vb + kv_head * s_vh
    q += batch * s_qb + head * s_qh
    dout += batch * s_gb + head * s_gh
    queries = _rows(q, mine, s_qn, valid, DIM, PAD, True)  # (ROWS, PAD)
    g = _rows(dout, mine, s_gn, valid, DIM, PAD, True)  # (ROWS, PAD)
    at = (batch * heads + head) * n + mine
    final, minus = (
        tl.load(log2 + at, mask=valid, other=float("inf")),
        tl.load(less + at, mask=valid, other=0.0),
    )
    acc = tl.zeros([ROWS, PAD], tl.float32)
    for MASK in tl.static_range(2):  # full entries, then masked ones
        next_first, next_packed = _entry(entries, 0, start, partial, full, MASK)
        for i in range(tl.load(tile + MASKED) if MASK else full):
            other, shown, bonus, member, next_first, next_packed = _visit(
                entries,
                i,
                next_first,
                next_packed,
                others,
                base,
                start,
                partial,
                full,
                stride,
                MASK,
                EARLY,
                BAND,
            )
            keys = _rows(k, other, s_kn, shown, DIM, PAD, MASK)
            values = _rows(v, other, s_vn, shown, DIM, PAD, MASK)
            s = tl.dot(
                queries, tl.trans(keys), input_precision=PRECISION
            )  # (ROWS, COLS)
            p = tl.math.exp2(s * scale - (final - bonus)[:, None])
            if MASK:
                seen = shown[None, :]
                if CAUSAL:
                    seen = seen & (other[None, :] <= mine[:, None])
                if BAND:
                    seen &= _near(mine, other, before, after) | (i < partial)
                p = tl.where(seen, p, 0.0)
            ds = p * (
                tl.dot(g, tl.trans(values), input_precision=PRECISION) - minus[:, None]
            )
            acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)
    _put(
        dq + batch * s_db + head * s_dh,
        acc * (scale * LN2),
        mine,
        s_dn,
        valid,
        DIM,
        PAD,
        JOIN,
    )


@triton.jit
def backward_kv(
    dout,
    q,
    k,
    v,
    log2,
    less,
    dk,
    dv,
    tiles,
    entries,
    scale,
    programs,
    heads,
    group,
    n,
    before,
    after,
    s_gb,
    s_gn,
    s_gh,
    s_qb,
    s_qn,
    s_qh,
    s_kb,
    s_kn,
    s_kh,
    s_vb,
    s_vn,
    s_vh,
    s_db,
    s_dn,
    s_dh,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    JOIN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """dk and dv of one tile of keys, from the queries of all heads of its group. dk and
    dv have the same strides.
    """
    batch, tile, head, base, start, partial, full = _program(tiles, programs)
    span, others, stride = (
        tl.arange(0, ROWS),
        tl.arange(0, COLS),
        tl.load(tile + STRIDE),
    )
    mine = tl.load(tile + FIRST) + span * stride  # (ROWS,)
    valid = span < tl.load(tile + COUNT)
    k += batch * s_kb + head * s_kh
    v += batch * s_vb + head * s_vh
    q += batch * s_qb + head * group * s_qh
    dout += batch * s_gb + head * group * s_gh
    keys = _rows(k, mine, s_kn, valid, DIM, PAD, True)  # (ROWS, PAD)
    values = _rows(v, mine, s_vn, valid, DIM, PAD, True)  # (ROWS, PAD)
    log2 += (batch * heads + head * group) * n
    less += (batch * heads + head * group) * n
    sum_k = tl.zeros([ROWS, PAD], tl.float32)
    sum_v = tl.zeros([ROWS, PAD], tl.float32)
    for MASK in tl.static_range(2):  # full entries, then masked ones
        next_first, next_packed = _entry(entries, 0, start, partial, full, MASK)
        for i in range(tl.load(tile + MASKED) if MASK else full):
            other, shown, bonus, member, next_first, next_packed = _visit(
                entries,
                i,
                next_first,
                next_packed,
                others,
                base,
                start,
                partial,
                full,
                stride,
                MASK,
                EARLY,
                BAND,
            )
            q_of = q + member.to(tl.int64) * s_qh
            g_of = dout + member.to(tl.int64) * s_gh
            queries = _rows(q_of, other, s_qn, shown, DIM, PAD, MASK)
            g = _rows(g_of, other, s_gn, shown, DIM, PAD, MASK)
            at = member.to(tl.int64) * n + other
            final, minus = (
                tl.load(log2 + at, mask=shown, other=float("inf")),
                tl.load(less + at, mask=shown, other=0.0),
            )
            s = tl.dot(
                keys, tl.trans(queries), input_precision=PRECISION
            )  # (ROWS, COLS)
            p = tl.math.exp2(s * scale - (final - bonus)[None, :])
            if MASK:
                if CAUSAL:
                    p = tl.where(mine[:, None] <= other[None, :], p, 0.0)
                if BAND:
                    seen = _near(mine, other, before, after) | (i < partial)
                    p = tl.where(seen, p, 0.0)
            sum_v = tl.dot(p.to(g.dtype), g, sum_v, input_precision=PRECISION)
            ds = p * (
                tl.dot(values, tl.trans(g), input_precision=PRECISION) - minus[None, :]
            )
            sum_k = tl.dot(
                ds.to(queries.dtype), queries, sum_k, input_precision=PRECISION
            )
    _put(
        dk + batch * s_db + head * s_dh,
        sum_k * (scale * LN2),
        mine,
        s_dn,
        valid,
        DIM,
        PAD,
        JOIN,
    )
    _put(dv + batch * s_db + head * s_dh, sum_v, mine, s_dn, valid, DIM, PAD, JOIN)
