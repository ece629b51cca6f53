"""The forward pass over tile lists for Hopper, in Gluon; what it shares with the gradients is in ``gluon_code``.

Order within a group: issue the next scores; exponentials of these; issue their product with the values; wait for both.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .gluon_code import (
    A_FREE,
    A_READY,
    B_FREE,
    B_READY,
    COLUMNS,
    FULL,
    GROUP_ROWS,
    HEAD,
    LN2,
    MASKED,
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
    valid_rows,
    wait,
    weighted,
)


@gluon.jit
def _step(
    s, acc, total, top, met, i, queries, entries, tile, scale, k_ring, v_ring, barriers, WHICH: gl.constexpr,
    COLS: gl.constexpr, DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, RESULT: gl.constexpr, MASK: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Take the scores ``s`` of entry i, tile number ``met``, into acc, total and top; the next scores unless LAST."""
    entry = entry_of(entries, tile, i)
    packed = gl.load(entry + 1)
    bonus = bonus_of(packed)
    if not LAST:
        wait(barriers, met + 1, A_READY, STAGES)
        following = scores(queries, k_ring, met + 1, COLS, DIM, STAGES, SCORES)
    wait(barriers, met, B_READY, STAGES)
    if MASK:
        span = gl.arange(0, COLS, gl.SliceLayout(0, SCORES))
        seen = (span < (packed & ROWS_MASK))[None, :]
        if CAUSAL:
            mine, other = places(tile, entry, WHICH, COLS, STEP, SCORES)
            seen = seen & (other <= mine)
        s = gl.where(seen, s, float("-inf"))
    # M is left out of the maximum: a probability is then at most M, which no sum minds.
    high = gl.maximum(top, gl.max(s, 1) * scale)
    shift = gl.where(high == float("-inf"), 0.0, high) if MASK else high
    p = gl.exp2(s * scale - (shift - bonus)[:, None])
    fade = gl.exp2(top - shift)
    total = total * fade + gl.sum(p, 1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, RESULT))[:, None]
    acc = weighted(p, v_ring, met, acc, COLS, DIM, STAGES, RESULT)
    if LAST:
        acc = warpgroup_mma_wait(0, [acc])
    else:
        s, acc = warpgroup_mma_wait(0, [following, acc])
        free(barriers, met + 1, A_FREE, STAGES)
    free(barriers, met, B_FREE, STAGES)
    return s, acc, total, high, met + 1


@gluon.jit
def _consumer(
    out, lse, tiles, entries, scale, programs, work, heads, n, q_ring, k_ring, v_ring, barriers, WHICH: gl.constexpr,
    COLS: gl.constexpr, DIM: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STORED: gl.constexpr = (  # of 256 columns, another layout takes more registers than there are
        gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0]) if DIM < 256 else RESULT
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    queries = q_ring.index(WHICH).reshape([GROUP_ROWS, DIM])
    turn, met = 0, 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        tile = tiles + (index % programs) * COLUMNS
        full = gl.load(tile + FULL)
        last = full + gl.load(tile + MASKED) - 1
        acc = gl.zeros([GROUP_ROWS, DIM], gl.float32, RESULT)
        top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROWS)
        total = gl.zeros([GROUP_ROWS], gl.float32, ROWS)

        wait(barriers, turn * STAGES, OWN_READY, STAGES)
        wait(barriers, met, A_READY, STAGES)
        s = warpgroup_mma_wait(0, [scores(queries, k_ring, met, COLS, DIM, STAGES, SCORES)])
        free(barriers, met, A_FREE, STAGES)
        whole = gl.minimum(full, last)
        for i in range(0, whole):
            s, acc, total, top, met = _step(
                s, acc, total, top, met, i, queries, entries, tile, scale, k_ring, v_ring, barriers, WHICH, COLS, DIM,
                STEP, CAUSAL, STAGES, SCORES, RESULT, False, False,
            )  # fmt: skip
        for i in range(whole, last):
            s, acc, total, top, met = _step(
                s, acc, total, top, met, i, queries, entries, tile, scale, k_ring, v_ring, barriers, WHICH, COLS, DIM,
                STEP, CAUSAL, STAGES, SCORES, RESULT, True, False,
            )  # fmt: skip
        free(barriers, turn * STAGES, OWN_FREE, STAGES)
        turn += 1
        s, acc, total, top, met = _step(
            s, acc, total, top, met, last, queries, entries, tile, scale, k_ring, v_ring, barriers, WHICH, COLS, DIM,
            STEP, CAUSAL, STAGES, SCORES, RESULT, True, True,
        )  # fmt: skip

        total = gl.where(total == 0.0, 1.0, total)  # a query that sees nothing: out 0, lse -inf, as top is
        batch = index // programs
        at = (batch * heads + gl.load(tile + HEAD)) * n + positions(tile, WHICH, STEP, ROWS)
        gl.store(lse + at, (top + gl.log2(total)) * LN2, mask=valid_rows(tile, WHICH, ROWS))
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, RESULT))[:, None]
        put(out, acc, tile, batch, heads, n, WHICH, DIM, STEP, STORED)


@gluon.jit(do_not_specialize=["programs", "work", "heads", "group", "n"])
def forward(
    q, k, v, out, lse, tiles, entries, scale, programs, work, heads, group, n, COLS: gl.constexpr, DIM: gl.constexpr,
    STEP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out and lse of ``work`` tiles of 128 queries, none with an empty list; q, k and v are descriptors."""
    q_ring, k_ring, v_ring, barriers = rings(q, k, v, 1, COLS, DIM, STAGES)
    gl.warp_specialize(
        [
            (_consumer, (out, lse, tiles, entries, scale, programs, work, heads, n, q_ring, k_ring, v_ring, barriers, 0,
                         COLS, DIM, STEP, CAUSAL, STAGES)),
            (_consumer, (out, lse, tiles, entries, scale, programs, work, heads, n, q_ring, k_ring, v_ring, barriers, 1,
                         COLS, DIM, STEP, CAUSAL, STAGES)),
            (producer, (q, q, k, v, tiles, entries, programs, work, group, q_ring, k_ring, v_ring, barriers, 1, False,
                        STEP, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
