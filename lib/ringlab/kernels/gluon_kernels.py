"""The Triton kernels for Hopper in Gluon: one warp fetches tiles, two warp groups of 64
rows each compute.

The same schedules and functions as ``triton_kernels`` read by descriptors, but
scheduled by hand, as in FlashAttention-3 (Shah et al. 2024): while a group computes
exponentials, its products run. A program owns tiles of 128 rows, one after the other,
and visits pairs of tiles, a and b: K and V where queries own, Q and dout where keys
own. They lie in rings of STAGES slots. Every slot has two barriers: "ready", which the
copy engine completes, and "free", at which both groups arrive. The n-th use of a slot
waits for phase n of each, and the fetching warp passes each "free" once before anyone
arrived. It runs ahead into the program's next tile.

Scores are in log2, and M counts by adding log2(M). Results are dense. No program writes
another's rows: no atomics, the same bits each time.

The assembler moves products behind exponentials that do not need them, unless a branch
follows. Therefore a ``mbarrier.wait`` follows products that are to overlap, if need be
for a barrier that was waited for before.

Order within a group. Forward: issue the next scores; exponentials of these; issue their
product with the values; wait for both. Backward, with the scores of a tile: issue the
products of dout and V; exponentials; issue the products that sum the results, and the
next scores; wait.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# As Triton 3.9 calls it; earlier ones have the other name alone.
load_tile = getattr(tma, "async_load", tma.async_copy_global_to_shared)

# Columns of a tile and bits of an entry, as in tile_schedule
HEAD, FIRST, COUNT, BASE, START, PARTIAL, FULL, MASKED = (
    gl.constexpr(i) for i in (0, 1, 2, 4, 5, 6, 7, 8)
)
COLUMNS = gl.constexpr(9)
LN2 = gl.constexpr(0.6931471805599453)
TIMES_AT = gl.constexpr(9)
MEMBER_AT = gl.constexpr(17)
ROWS_MASK = gl.constexpr(511)
TIMES_MASK = gl.constexpr(255)
GROUP_ROWS = gl.constexpr(64)  # of a warp group: what one of its products takes
# Barriers, STAGES of each kind, of which the owned rows, which have one slot, use the
# first
A_READY, A_FREE, B_READY, B_FREE, OWN_READY, OWN_FREE = (
    gl.constexpr(i) for i in range(6)
)
KINDS = gl.constexpr(6)


@gluon.jit
def allocate(own, a, b, OWNED: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for OWNED tensors' owned rows, for STAGES tiles of a and of b, and
    for their barriers.
    """
    own_ring = gl.allocate_shared_memory(
        own.dtype, [2 * OWNED] + own.block_type.shape, own.layout
    )
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    barriers = gl.allocate_shared_memory(
        gl.int64, [KINDS * STAGES, 1], mbarrier.MBarrierLayout()
    )
    for slot in gl.static_range(STAGES):
        for kind in gl.static_range(
            KINDS
        ):  # the copy engine completes the even ones, both groups free the odd ones
            mbarrier.init(barriers.index(kind * STAGES + slot), count=1 + kind % 2)
    return own_ring, a_ring, b_ring, barriers


@gluon.jit
def wait(barriers, nth, KIND: gl.constexpr):
    """Until tile number ``nth`` is there."""
    STAGES: gl.constexpr = barriers.shape[0] // KINDS
    mbarrier.wait(barriers.index(KIND * STAGES + nth % STAGES), nth // STAGES & 1)


@gluon.jit
def free(barriers, nth, KIND: gl.constexpr):
    """This group needs tile number ``nth`` no more."""
    STAGES: gl.constexpr = barriers.shape[0] // KINDS
    mbarrier.arrive(barriers.index(KIND * STAGES + nth % STAGES))


@gluon.jit
def entry_of(entries, tile, i):
    """Where entry i of a tile lies: full ones come first, then masked ones."""
    partial = gl.load(tile + PARTIAL)
    full = gl.load(tile + FULL)
    at = gl.where(i < full, partial + i, gl.where(i - full < partial, i - full, i))
    return entries + 2 * (gl.load(tile + START) + at)


@gluon.jit
def bonus_of(packed):
    """log2(M)."""
    return gl.log2(gl.cast(packed >> TIMES_AT & TIMES_MASK, gl.float32))


@gluon.jit
def positions(tile, WHICH: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the rows of a group lie: (64,)."""
    return (
        gl.load(tile + FIRST)
        + (WHICH * GROUP_ROWS + gl.arange(0, GROUP_ROWS, LAYOUT)) * STEP
    )


@gluon.jit
def valid_rows(tile, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Which rows of a group are rows of the tile: (64,)."""
    return gl.arange(0, GROUP_ROWS, LAYOUT) < gl.load(tile + COUNT) - WHICH * GROUP_ROWS


@gluon.jit
def visible(
    tile,
    entry,
    packed,
    s,
    WHICH: gl.constexpr,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Which rows of an entry the rows of a group see, for scores s: (64, COLS), or (1,
    COLS) without a causal mask.
    """
    COLS: gl.constexpr = s.shape[1]
    span = gl.arange(0, COLS, gl.SliceLayout(0, SCORES))
    seen = (span < (packed & ROWS_MASK))[None, :]
    if CAUSAL:
        # From a number that each step loads: of columns alone, positions would take
        # registers from step to step.
        other = gl.load(tile + BASE) + gl.load(entry) + span * STEP
        seen = seen & (
            other[None, :]
            <= positions(tile, WHICH, STEP, gl.SliceLayout(1, SCORES))[:, None]
        )
    return seen


@gluon.jit
def _fetch(source, batch, head, first, ready, into, STEP: gl.constexpr):
    """Ask the copy engine for a block of one residue class, from position ``first`` on;
    zeros past its end.
    """
    load_tile(source, [batch, first % STEP, head, first // STEP, 0], ready, into)


@gluon.jit
def producer(
    own,
    also,
    a,
    b,
    tiles,
    entries,
    programs,
    work,
    group,
    rings,
    OWNED: gl.constexpr,
    BY_KEY: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fetch owned rows, of ``also`` too if OWNED is 2, and every tile that they visit."""
    own_ring, a_ring, b_ring, barriers = rings
    own_ready = barriers.index(OWN_READY * STAGES)
    turn = 0
    nth = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        batch = index // programs
        tile = tiles + (index % programs) * COLUMNS
        head, first, base = (
            gl.load(tile + HEAD),
            gl.load(tile + FIRST),
            gl.load(tile + BASE),
        )
        mbarrier.wait(barriers.index(OWN_FREE * STAGES), (turn & 1) ^ 1)
        mbarrier.expect(own_ready, 2 * OWNED * own.block_type.nbytes)
        for half in gl.static_range(2):
            _fetch(
                own,
                batch,
                head,
                first + half * GROUP_ROWS * STEP,
                own_ready,
                own_ring.index(half),
                STEP,
            )
            if OWNED == 2:
                _fetch(
                    also,
                    batch,
                    head,
                    first + half * GROUP_ROWS * STEP,
                    own_ready,
                    own_ring.index(2 + half),
                    STEP,
                )
        turn += 1
        for i in range(gl.load(tile + FULL) + gl.load(tile + MASKED)):
            entry = entry_of(entries, tile, i)
            other = base + gl.load(entry)
            if BY_KEY:
                other_head = head * group + (gl.load(entry + 1) >> MEMBER_AT)
            else:
                other_head = head // group
            slot = nth % STAGES
            phase = (nth // STAGES & 1) ^ 1
            a_ready, b_ready = (
                barriers.index(A_READY * STAGES + slot),
                barriers.index(B_READY * STAGES + slot),
            )
            mbarrier.wait(barriers.index(A_FREE * STAGES + slot), phase)
            mbarrier.expect(a_ready, a.block_type.nbytes)
            _fetch(a, batch, other_head, other, a_ready, a_ring.index(slot), STEP)
            mbarrier.wait(barriers.index(B_FREE * STAGES + slot), phase)
            mbarrier.expect(b_ready, b.block_type.nbytes)
            _fetch(b, batch, other_head, other, b_ready, b_ring.index(slot), STEP)
            nth += 1


@gluon.jit
def tile_in(ring, nth):
    """Tile number ``nth``: (COLS, DIM)."""
    COLS: gl.constexpr = ring.shape[4]
    DIM: gl.constexpr = ring.shape[5]
    return ring.index(nth % ring.shape[0]).reshape([COLS, DIM])


@gluon.jit
def scores(own, ring, nth, SCORES: gl.constexpr):
    """Issue the product of owned rows with those of tile number ``nth``: (64, COLS)."""
    COLS: gl.constexpr = ring.shape[4]
    zeros = gl.zeros([GROUP_ROWS, COLS], gl.float32, SCORES)
    return warpgroup_mma(
        own, tile_in(ring, nth).permute((1, 0)), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def weighted(p, ring, nth, acc, RESULT: gl.constexpr):
    """Issue the sum of the rows of tile number ``nth``, weighted by p (64, COLS), onto
    acc (64, DIM).
    """
    p = gl.convert_layout(p.to(ring.dtype), gl.DotOperandLayout(0, RESULT, 2))
    return warpgroup_mma(p, tile_in(ring, nth), acc, is_async=True)


@gluon.jit
def put(
    into,
    values,
    tile,
    batch,
    heads,
    n,
    WHICH: gl.constexpr,
    DIM: gl.constexpr,
    STEP: gl.constexpr,
    STORED: gl.constexpr,
):
    """Write a group's rows (64, DIM) to where they lie in ``into`` (b, n, heads, DIM)."""
    row = (
        batch * n + positions(tile, WHICH, STEP, gl.SliceLayout(1, STORED))
    ) * heads + gl.load(tile + HEAD)
    at = (row.to(gl.int64) * DIM)[:, None] + gl.arange(
        0, DIM, gl.SliceLayout(0, STORED)
    )[None, :]
    values = gl.convert_layout(values.to(into.dtype.element_ty), STORED)
    gl.store(
        into + at,
        values,
        mask=valid_rows(tile, WHICH, gl.SliceLayout(1, STORED))[:, None],
    )


@gluon.jit
def _forward_step(
    s,
    acc,
    total,
    top,
    nth,
    i,
    entries,
    tile,
    scale,
    rings,
    WHICH: gl.constexpr,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCORES: gl.constexpr,
    RESULT: gl.constexpr,
    MASK: gl.constexpr,
    LAST: gl.constexpr,
):
    """Take the scores ``s`` of entry i, tile number ``nth``, into acc, total and top;
    the next scores unless LAST.
    """
    q_ring, k_ring, v_ring, barriers = rings
    entry = entry_of(entries, tile, i)
    packed = gl.load(entry + 1)
    bonus = bonus_of(packed)
    if not LAST:
        wait(barriers, nth + 1, A_READY)
        following = scores(tile_in(q_ring, WHICH), k_ring, nth + 1, SCORES)
    wait(barriers, nth, B_READY)
    if MASK:
        s = gl.where(
            visible(tile, entry, packed, s, WHICH, STEP, CAUSAL, SCORES),
            s,
            float("-inf"),
        )
    # M is left out of the maximum: a probability is then at most M, so no sum
    # overflows.
    high = gl.maximum(top, gl.max(s, 1) * scale)
    shift = gl.where(high == float("-inf"), 0.0, high) if MASK else high
    p = gl.exp2(s * scale - (shift - bonus)[:, None])
    fade = gl.exp2(top - shift)
    total = total * fade + gl.sum(p, 1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, RESULT))[:, None]
    acc = weighted(p, v_ring, nth, acc, RESULT)
    if LAST:
        acc = warpgroup_mma_wait(0, [acc])
    else:
        s, acc = warpgroup_mma_wait(0, [following, acc])
        free(barriers, nth + 1, A_FREE)
    free(barriers, nth, B_FREE)
    return s, acc, total, high, nth + 1


@gluon.jit
def _forward_consumer(
    arguments, rings, WHICH: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr
):
    out, lse, tiles, entries, scale, programs, work, heads, n = arguments
    q_ring, k_ring, v_ring, barriers = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    COLS: gl.constexpr = k_ring.shape[4]
    DIM: gl.constexpr = k_ring.shape[5]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STORED: gl.constexpr = (  # of 256 columns, another layout takes more registers than there are
        gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
        if DIM < 256
        else RESULT
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    turn = 0
    nth = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        tile = tiles + (index % programs) * COLUMNS
        full = gl.load(tile + FULL)
        last = full + gl.load(tile + MASKED) - 1
        acc = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)
        top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROWS)
        total = gl.zeros([GROUP_ROWS], gl.float32, ROWS)

        wait(barriers, turn * STAGES, OWN_READY)
        wait(barriers, nth, A_READY)
        s = warpgroup_mma_wait(0, [scores(tile_in(q_ring, WHICH), k_ring, nth, SCORES)])
        free(barriers, nth, A_FREE)
        whole = gl.minimum(full, last)
        for MASK in gl.static_range(2):
            for i in range(whole if MASK else 0, last if MASK else whole):
                s, acc, total, top, nth = _forward_step(
                    s,
                    acc,
                    total,
                    top,
                    nth,
                    i,
                    entries,
                    tile,
                    scale,
                    rings,
                    WHICH,
                    STEP,
                    CAUSAL,
                    SCORES,
                    RESULT,
                    MASK,
                    False,
                )
        free(barriers, turn * STAGES, OWN_FREE)
        turn += 1
        s, acc, total, top, nth = _forward_step(
            s,
            acc,
            total,
            top,
            nth,
            last,
            entries,
            tile,
            scale,
            rings,
            WHICH,
            STEP,
            CAUSAL,
            SCORES,
            RESULT,
            True,
            True,
        )

        total = gl.where(
            total == 0.0, 1.0, total
        )  # a query that sees nothing: out 0, lse -inf, as top is
        batch = index // programs
        at = (batch * heads + gl.load(tile + HEAD)) * n + positions(
            tile, WHICH, STEP, ROWS
        )
        gl.store(
            lse + at, (top + gl.log2(total)) * LN2, mask=valid_rows(tile, WHICH, ROWS)
        )
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, RESULT))[:, None]
        put(out, acc, tile, batch, heads, n, WHICH, DIM, STEP, STORED)


@gluon.jit(do_not_specialize=["programs", "work", "heads", "group", "n"])
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
    work,
    heads,
    group,
    n,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out and lse of ``work`` tiles of 128 queries, each visiting something; q, k and v
    are descriptors.
    """
    rings = allocate(q, k, v, 1, STAGES)
    arguments = (out, lse, tiles, entries, scale, programs, work, heads, n)
    gl.warp_specialize(
        [
            (_forward_consumer, (arguments, rings, 0, STEP, CAUSAL)),
            (_forward_consumer, (arguments, rings, 1, STEP, CAUSAL)),
            (
                producer,
                (
                    q,
                    q,
                    k,
                    v,
                    tiles,
                    entries,
                    programs,
                    work,
                    group,
                    rings,
                    1,
                    False,
                    STEP,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dq_step(
    s,
    acc,
    nth,
    i,
    entries,
    tile,
    final,
    minus,
    scale,
    rings,
    WHICH: gl.constexpr,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCORES: gl.constexpr,
    RESULT: gl.constexpr,
    MASK: gl.constexpr,
    LAST: gl.constexpr,
):
    own_ring, k_ring, v_ring, barriers = rings
    entry = entry_of(entries, tile, i)
    packed = gl.load(entry + 1)
    wait(barriers, nth, B_READY)
    dp = scores(tile_in(own_ring, 2 + WHICH), v_ring, nth, SCORES)
    wait(barriers, nth, A_READY)  # it is there; see the top
    p = gl.exp2(s * scale - (final - bonus_of(packed))[:, None])
    if MASK:
        p = gl.where(
            visible(tile, entry, packed, s, WHICH, STEP, CAUSAL, SCORES), p, 0.0
        )
    if not LAST:
        wait(barriers, nth + 1, A_READY)
    dp = warpgroup_mma_wait(0, [dp])
    free(barriers, nth, B_FREE)
    acc = weighted(p * (dp - minus[:, None]), k_ring, nth, acc, RESULT)
    if LAST:
        acc = warpgroup_mma_wait(0, [acc])
    else:
        s, acc = warpgroup_mma_wait(
            0, [scores(tile_in(own_ring, WHICH), k_ring, nth + 1, SCORES), acc]
        )
    free(barriers, nth, A_FREE)
    return s, acc, nth + 1


@gluon.jit
def _dq_consumer(
    arguments, rings, WHICH: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr
):
    lse, less, dq, tiles, entries, scale, programs, work, heads, n = arguments
    own_ring, k_ring, v_ring, barriers = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    COLS: gl.constexpr = k_ring.shape[4]
    DIM: gl.constexpr = k_ring.shape[5]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STORED: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    turn = 0
    nth = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        tile = tiles + (index % programs) * COLUMNS
        full = gl.load(tile + FULL)
        last = full + gl.load(tile + MASKED) - 1
        at = (index // programs * heads + gl.load(tile + HEAD)) * n
        at += positions(tile, WHICH, STEP, ROWS)
        final = gl.load(
            lse + at, mask=valid_rows(tile, WHICH, ROWS), other=float("inf")
        )
        minus = gl.load(less + at, mask=valid_rows(tile, WHICH, ROWS), other=0.0)
        acc = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)

        wait(barriers, turn * STAGES, OWN_READY)
        wait(barriers, nth, A_READY)
        s = warpgroup_mma_wait(
            0, [scores(tile_in(own_ring, WHICH), k_ring, nth, SCORES)]
        )
        whole = gl.minimum(full, last)
        for MASK in gl.static_range(2):
            for i in range(whole if MASK else 0, last if MASK else whole):
                s, acc, nth = _dq_step(
                    s,
                    acc,
                    nth,
                    i,
                    entries,
                    tile,
                    final,
                    minus,
                    scale,
                    rings,
                    WHICH,
                    STEP,
                    CAUSAL,
                    SCORES,
                    RESULT,
                    MASK,
                    False,
                )
        s, acc, nth = _dq_step(
            s,
            acc,
            nth,
            last,
            entries,
            tile,
            final,
            minus,
            scale,
            rings,
            WHICH,
            STEP,
            CAUSAL,
            SCORES,
            RESULT,
            True,
            True,
        )
        free(barriers, turn * STAGES, OWN_FREE)
        turn += 1
        put(
            dq,
            acc * scale * LN2,
            tile,
            index // programs,
            heads,
            n,
            WHICH,
            DIM,
            STEP,
            STORED,
        )


@gluon.jit(do_not_specialize=["programs", "work", "heads", "group", "n"])
def backward_q(
    dout,
    q,
    k,
    v,
    lse,
    less,
    dq,
    tiles,
    entries,
    scale,
    programs,
    work,
    heads,
    group,
    n,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """dq of ``work`` tiles of 128 queries, each visiting something; dout, q, k and v
    are descriptors.
    """
    rings = allocate(q, k, v, 2, STAGES)
    arguments = (lse, less, dq, tiles, entries, scale, programs, work, heads, n)
    gl.warp_specialize(
        [
            (_dq_consumer, (arguments, rings, 0, STEP, CAUSAL)),
            (_dq_consumer, (arguments, rings, 1, STEP, CAUSAL)),
            (
                producer,
                (
                    q,
                    dout,
                    k,
                    v,
                    tiles,
                    entries,
                    programs,
                    work,
                    group,
                    rings,
                    2,
                    False,
                    STEP,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _dkv_step(
    s,
    dk,
    dv,
    nth,
    i,
    entries,
    tile,
    lse,
    less,
    rows,
    n,
    scale,
    rings,
    WHICH: gl.constexpr,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCORES: gl.constexpr,
    RESULT: gl.constexpr,
    LAST: gl.constexpr,
):
    own_ring, q_ring, g_ring, barriers = rings
    COLS: gl.constexpr = q_ring.shape[4]
    entry = entry_of(entries, tile, i)
    packed = gl.load(entry + 1)
    span = gl.arange(0, COLS, gl.SliceLayout(0, SCORES))
    other = gl.load(tile + BASE) + gl.load(entry) + span * STEP
    at = rows + (packed >> MEMBER_AT) * n + other
    valid = span < (packed & ROWS_MASK)
    final = gl.load(lse + at, mask=valid, other=float("inf")) - bonus_of(packed)
    minus = gl.load(less + at, mask=valid, other=0.0)
    wait(barriers, nth, B_READY)
    # The row sums are subtracted as what the product is added to, which takes no more
    # registers.
    acc = gl.zeros([GROUP_ROWS, COLS], gl.float32, SCORES) - minus[None, :]
    dp = warpgroup_mma(
        tile_in(own_ring, 2 + WHICH),
        tile_in(g_ring, nth).permute((1, 0)),
        acc,
        is_async=True,
    )
    wait(barriers, nth, A_READY)  # it is there; see the top
    p = gl.exp2(s * scale - final[None, :])
    if CAUSAL:
        p = gl.where(
            positions(tile, WHICH, STEP, gl.SliceLayout(1, SCORES))[:, None]
            <= other[None, :],
            p,
            0.0,
        )
    dv = weighted(p, g_ring, nth, dv, RESULT)
    dp = warpgroup_mma_wait(1, [dp])
    dk = weighted(p * dp, q_ring, nth, dk, RESULT)
    if LAST:
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
    else:
        wait(barriers, nth + 1, A_READY)
        following = scores(tile_in(own_ring, WHICH), q_ring, nth + 1, SCORES)
        s, dk, dv = warpgroup_mma_wait(0, [following, dk, dv])
    free(barriers, nth, A_FREE)
    free(barriers, nth, B_FREE)
    return s, dk, dv, nth + 1


@gluon.jit
def _dkv_consumer(
    arguments, rings, WHICH: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr
):
    lse, less, dk, dv, tiles, entries, scale, programs, work, heads, group, n, keys = (
        arguments
    )
    own_ring, q_ring, g_ring, barriers = rings
    STAGES: gl.constexpr = q_ring.shape[0]
    COLS: gl.constexpr = q_ring.shape[4]
    DIM: gl.constexpr = q_ring.shape[5]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STORED: gl.constexpr = RESULT
    turn = 0
    nth = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        tile = tiles + (index % programs) * COLUMNS
        last = gl.load(tile + FULL) + gl.load(tile + MASKED) - 1
        at = (index // programs * heads + gl.load(tile + HEAD) * group) * n
        sum_k = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)
        sum_v = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)

        wait(barriers, turn * STAGES, OWN_READY)
        wait(barriers, nth, A_READY)
        s = warpgroup_mma_wait(
            0, [scores(tile_in(own_ring, WHICH), q_ring, nth, SCORES)]
        )
        for i in range(0, last):
            s, sum_k, sum_v, nth = _dkv_step(
                s,
                sum_k,
                sum_v,
                nth,
                i,
                entries,
                tile,
                lse,
                less,
                at,
                n,
                scale,
                rings,
                WHICH,
                STEP,
                CAUSAL,
                SCORES,
                RESULT,
                False,
            )
        s, sum_k, sum_v, nth = _dkv_step(
            s,
            sum_k,
            sum_v,
            nth,
            last,
            entries,
            tile,
            lse,
            less,
            at,
            n,
            scale,
            rings,
            WHICH,
            STEP,
            CAUSAL,
            SCORES,
            RESULT,
            True,
        )
        free(barriers, turn * STAGES, OWN_FREE)
        turn += 1
        put(
            dk,
            sum_k * scale * LN2,
            tile,
            index // programs,
            heads // group,
            keys,
            WHICH,
            DIM,
            STEP,
            STORED,
        )
        put(
            dv,
            sum_v,
            tile,
            index // programs,
            heads // group,
            keys,
            WHICH,
            DIM,
            STEP,
            STORED,
        )


@gluon.jit(do_not_specialize=["programs", "work", "heads", "group", "n", "keys"])
def backward_kv(
    dout,
    q,
    k,
    v,
    lse,
    less,
    dk,
    dv,
    tiles,
    entries,
    scale,
    programs,
    work,
    heads,
    group,
    n,
    keys,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """dk and dv of ``work`` tiles of 128 of the ``keys`` keys, each visiting something;
    reads by descriptors.
    """
    rings = allocate(k, q, dout, 2, STAGES)
    arguments = (
        lse,
        less,
        dk,
        dv,
        tiles,
        entries,
        scale,
        programs,
        work,
        heads,
        group,
        n,
        keys,
    )
    gl.warp_specialize(
        [
            (_dkv_consumer, (arguments, rings, 0, STEP, CAUSAL)),
            (_dkv_consumer, (arguments, rings, 1, STEP, CAUSAL)),
            (
                producer,
                (
                    k,
                    v,
                    q,
                    dout,
                    tiles,
                    entries,
                    programs,
                    work,
                    group,
                    rings,
                    2,
                    True,
                    STEP,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
