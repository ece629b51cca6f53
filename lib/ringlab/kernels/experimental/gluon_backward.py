"""The gradients over tile lists for Hopper, in Gluon, from the final lse and ``less``, which ``delta`` wrote.

Order within a group, scores of a tile being there: issue the products of dout and V; exponentials; then the products
that sum the results, and the next scores; wait. No program writes another's rows: no atomics, the same bits each time.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .gluon_code import (
    A_FREE,
    A_READY,
    B_FREE,
    B_READY,
    BASE,
    COLUMNS,
    FULL,
    GROUP_ROWS,
    HEAD,
    LN2,
    MASKED,
    MEMBER_AT,
    OWN_FREE,
    OWN_READY,
    ROWS_MASK,
    bonus_of,
    entry_of,
    free,
    places,
    positions,
    producer,
    put,
    rings,
    scores,
    scores_less,
    valid_rows,
    wait,
    weighted,
)


@gluon.jit
def _dq_step(
    s, acc, met, i, own_ring, entries, tile, final, minus, scale, k_ring, v_ring, barriers, WHICH: gl.constexpr,
    COLS: gl.constexpr, DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, RESULT: gl.constexpr, MASK: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    entry = entry_of(entries, tile, i)
    packed = gl.load(entry + 1)
    wait(barriers, met, B_READY, STAGES)
    dp = scores(own_ring.index(2 + WHICH).reshape([GROUP_ROWS, DIM]), v_ring, met, COLS, DIM, STAGES, SCORES)
    wait(barriers, met, A_READY, STAGES)  # it is there; see gluon_code
    p = gl.exp2(s * scale - (final - bonus_of(packed))[:, None])
    if MASK:
        span = gl.arange(0, COLS, gl.SliceLayout(0, SCORES))
        seen = (span < (packed & ROWS_MASK))[None, :]
        if CAUSAL:
            mine, other = places(tile, entry, WHICH, COLS, STEP, SCORES)
            seen = seen & (other <= mine)
        p = gl.where(seen, p, 0.0)
    if not LAST:
        wait(barriers, met + 1, A_READY, STAGES)
    dp = warpgroup_mma_wait(0, [dp])
    free(barriers, met, B_FREE, STAGES)
    acc = weighted(p * (dp - minus[:, None]), k_ring, met, acc, COLS, DIM, STAGES, RESULT)
    if LAST:
        acc = warpgroup_mma_wait(0, [acc])
    else:
        queries = own_ring.index(WHICH).reshape([GROUP_ROWS, DIM])
        s, acc = warpgroup_mma_wait(0, [scores(queries, k_ring, met + 1, COLS, DIM, STAGES, SCORES), acc])
    free(barriers, met, A_FREE, STAGES)
    return s, acc, met + 1


@gluon.jit
def _dq_consumer(
    lse, less, dq, tiles, entries, scale, programs, work, heads, n, own_ring, k_ring, v_ring, barriers,
    WHICH: gl.constexpr, COLS: gl.constexpr, DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    turn, met = 0, 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        tile = tiles + (index % programs) * COLUMNS
        full = gl.load(tile + FULL)
        last = full + gl.load(tile + MASKED) - 1
        at = (index // programs * heads + gl.load(tile + HEAD)) * n
        at += positions(tile, WHICH, STEP, ROWS)
        final = gl.load(lse + at, mask=valid_rows(tile, WHICH, ROWS), other=float("inf"))
        minus = gl.load(less + at, mask=valid_rows(tile, WHICH, ROWS), other=0.0)
        acc = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)

        wait(barriers, turn * STAGES, OWN_READY, STAGES)
        wait(barriers, met, A_READY, STAGES)
        queries = own_ring.index(WHICH).reshape([GROUP_ROWS, DIM])
        s = warpgroup_mma_wait(0, [scores(queries, k_ring, met, COLS, DIM, STAGES, SCORES)])
        whole = gl.minimum(full, last)
        for i in range(0, whole):
            s, acc, met = _dq_step(
                s, acc, met, i, own_ring, entries, tile, final, minus, scale, k_ring, v_ring, barriers, WHICH, COLS,
                DIM, STEP, CAUSAL, STAGES, SCORES, RESULT, False, False,
            )  # fmt: skip
        for i in range(whole, last):
            s, acc, met = _dq_step(
                s, acc, met, i, own_ring, entries, tile, final, minus, scale, k_ring, v_ring, barriers, WHICH, COLS,
                DIM, STEP, CAUSAL, STAGES, SCORES, RESULT, True, False,
            )  # fmt: skip
        s, acc, met = _dq_step(
            s, acc, met, last, own_ring, entries, tile, final, minus, scale, k_ring, v_ring, barriers, WHICH, COLS,
            DIM, STEP, CAUSAL, STAGES, SCORES, RESULT, True, True,
        )  # fmt: skip
        free(barriers, turn * STAGES, OWN_FREE, STAGES)
        turn += 1
        put(dq, acc * scale * LN2, tile, index // programs, heads, n, WHICH, DIM, STEP, STORED)


@gluon.jit(do_not_specialize=["programs", "work", "heads", "group", "n"])
def backward_q(
    dout, q, k, v, lse, less, dq, tiles, entries, scale, programs, work, heads, group, n, COLS: gl.constexpr,
    DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq of ``work`` tiles of 128 queries, none with an empty list; dout, q, k and v are descriptors."""
    own_ring, k_ring, v_ring, barriers = rings(q, k, v, 2, COLS, DIM, STAGES)
    gl.warp_specialize(
        [
            (_dq_consumer, (lse, less, dq, tiles, entries, scale, programs, work, heads, n, own_ring, k_ring, v_ring,
                            barriers, 0, COLS, DIM, STEP, CAUSAL, STAGES)),
            (_dq_consumer, (lse, less, dq, tiles, entries, scale, programs, work, heads, n, own_ring, k_ring, v_ring,
                            barriers, 1, COLS, DIM, STEP, CAUSAL, STAGES)),
            (producer, (q, dout, k, v, tiles, entries, programs, work, group, own_ring, k_ring, v_ring, barriers, 2,
                        False, STEP, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _dkv_step(
    s, dk, dv, met, i, own_ring, entries, tile, lse, less, rows, n, scale, q_ring, g_ring, barriers,
    WHICH: gl.constexpr, COLS: gl.constexpr, DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    entry = entry_of(entries, tile, i)
    packed = gl.load(entry + 1)
    span = gl.arange(0, COLS, gl.SliceLayout(0, SCORES))
    other = gl.load(tile + BASE) + gl.load(entry) + span * STEP
    at = rows + (packed >> MEMBER_AT) * n + other
    valid = span < (packed & ROWS_MASK)
    final = gl.load(lse + at, mask=valid, other=float("inf")) - bonus_of(packed)
    minus = gl.load(less + at, mask=valid, other=0.0)
    wait(barriers, met, B_READY, STAGES)
    values = own_ring.index(2 + WHICH).reshape([GROUP_ROWS, DIM])
    dp = scores_less(values, g_ring, met, minus, COLS, DIM, STAGES, SCORES)
    wait(barriers, met, A_READY, STAGES)  # it is there; see gluon_code
    p = gl.exp2(s * scale - final[None, :])
    if CAUSAL:
        p = gl.where(positions(tile, WHICH, STEP, gl.SliceLayout(1, SCORES))[:, None] <= other[None, :], p, 0.0)
    dv = weighted(p, g_ring, met, dv, COLS, DIM, STAGES, RESULT)
    dp = warpgroup_mma_wait(1, [dp])
    dk = weighted(p * dp, q_ring, met, dk, COLS, DIM, STAGES, RESULT)
    if LAST:
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
    else:
        wait(barriers, met + 1, A_READY, STAGES)
        keys = own_ring.index(WHICH).reshape([GROUP_ROWS, DIM])
        following = scores(keys, q_ring, met + 1, COLS, DIM, STAGES, SCORES)
        s, dk, dv = warpgroup_mma_wait(0, [following, dk, dv])
    free(barriers, met, A_FREE, STAGES)
    free(barriers, met, B_FREE, STAGES)
    return s, dk, dv, met + 1


@gluon.jit
def _dkv_consumer(
    lse, less, dk, dv, tiles, entries, scale, programs, work, heads, group, n, keys, own_ring, q_ring, g_ring, barriers,
    WHICH: gl.constexpr, COLS: gl.constexpr, DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STORED: gl.constexpr = RESULT
    turn, met = 0, 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        tile = tiles + (index % programs) * COLUMNS
        last = gl.load(tile + FULL) + gl.load(tile + MASKED) - 1
        at = (index // programs * heads + gl.load(tile + HEAD) * group) * n
        sum_k = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)
        sum_v = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)

        wait(barriers, turn * STAGES, OWN_READY, STAGES)
        wait(barriers, met, A_READY, STAGES)
        mine = own_ring.index(WHICH).reshape([GROUP_ROWS, DIM])
        s = warpgroup_mma_wait(0, [scores(mine, q_ring, met, COLS, DIM, STAGES, SCORES)])
        for i in range(0, last):
            s, sum_k, sum_v, met = _dkv_step(
                s, sum_k, sum_v, met, i, own_ring, entries, tile, lse, less, at, n, scale, q_ring, g_ring, barriers,
                WHICH, COLS, DIM, STEP, CAUSAL, STAGES, SCORES, RESULT, False,
            )  # fmt: skip
        s, sum_k, sum_v, met = _dkv_step(
            s, sum_k, sum_v, met, last, own_ring, entries, tile, lse, less, at, n, scale, q_ring, g_ring,
            barriers, WHICH, COLS, DIM, STEP, CAUSAL, STAGES, SCORES, RESULT, True,
        )  # fmt: skip
        free(barriers, turn * STAGES, OWN_FREE, STAGES)
        turn += 1
        put(dk, sum_k * scale * LN2, tile, index // programs, heads // group, keys, WHICH, DIM, STEP, STORED)
        put(dv, sum_v, tile, index // programs, heads // group, keys, WHICH, DIM, STEP, STORED)


@gluon.jit(do_not_specialize=["programs", "work", "heads", "group", "n", "keys"])
def backward_kv(
    dout, q, k, v, lse, less, dk, dv, tiles, entries, scale, programs, work, heads, group, n, keys, COLS: gl.constexpr,
    DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of ``work`` tiles of 128 of the ``keys`` keys, no list empty; what is read by descriptors."""
    own_ring, q_ring, g_ring, barriers = rings(k, q, dout, 2, COLS, DIM, STAGES)
    gl.warp_specialize(
        [
            (_dkv_consumer, (lse, less, dk, dv, tiles, entries, scale, programs, work, heads, group, n, keys, own_ring,
                             q_ring, g_ring, barriers, 0, COLS, DIM, STEP, CAUSAL, STAGES)),
            (_dkv_consumer, (lse, less, dk, dv, tiles, entries, scale, programs, work, heads, group, n, keys, own_ring,
                             q_ring, g_ring, barriers, 1, COLS, DIM, STEP, CAUSAL, STAGES)),
            (producer, (k, v, q, dout, tiles, entries, programs, work, group, own_ring, q_ring, g_ring, barriers, 2,
                        True, STEP, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
