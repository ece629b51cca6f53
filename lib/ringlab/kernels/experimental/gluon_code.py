"""What the kernels in Gluon share: for Hopper, one warp fetches tiles, two warp groups of 64 rows each compute.

The same lists and functions as ``triton_forward`` and ``triton_backward`` read by descriptors, scheduled by hand, as in
FlashAttention-3 (Shah et al. 2024): while a group takes exponentials, products that it issued are under way. A program
owns tiles of 128 rows, one after the other, and meets pairs of tiles: a and b, which are K and V where queries own,
Q and dout where keys do. They lie in rings of STAGES slots. Every slot has two barriers: "ready", which the copy engine
completes, and "free", at which both groups arrive; the n-th use of a slot waits for phase n of each, and the warp that
fetches passes each "free" once before anyone arrived. It runs ahead into the program's next tile.

Scores are in log2, as in ``triton_forward``: M counts by adding log2(M) to the exponent. Results are dense.

Products are issued where the source says only if a branch follows: the assembler moves them behind exponentials that do
not need them. So ``mbarrier.wait`` stands after products that are to overlap with what comes next, if need be for a
barrier that was waited for before.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

# Columns of a tile and bits of an entry: ringlab.kernels.tile_schedule
HEAD, FIRST, COUNT, BASE, START, PARTIAL, FULL, MASKED = (gl.constexpr(i) for i in (0, 1, 2, 4, 5, 6, 7, 8))
COLUMNS = gl.constexpr(9)
LN2 = gl.constexpr(0.6931471805599453)
TIMES_AT, MEMBER_AT = gl.constexpr(9), gl.constexpr(17)
ROWS_MASK, TIMES_MASK = gl.constexpr(511), gl.constexpr(255)
GROUP_ROWS = gl.constexpr(64)  # of a warp group: what one of its products takes
# Barriers, STAGES of each kind, of which the owned rows, which have one slot, use the first
A_READY, A_FREE, B_READY, B_FREE, OWN_READY, OWN_FREE = (gl.constexpr(i) for i in range(6))
KINDS = gl.constexpr(6)


@gluon.jit
def rings(own, a, b, OWNED: gl.constexpr, COLS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for OWNED tensors' owned rows, for STAGES tiles of a and of b, and for their barriers."""
    own_ring = gl.allocate_shared_memory(own.dtype, [2 * OWNED, 1, 1, 1, GROUP_ROWS, DIM], own.layout)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, 1, COLS, DIM], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, 1, COLS, DIM], b.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [KINDS * STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        for kind in gl.static_range(KINDS):  # the copy engine completes the even ones, both groups free the odd ones
            mbarrier.init(barriers.index(kind * STAGES + slot), count=1 + kind % 2)
    return own_ring, a_ring, b_ring, barriers


@gluon.jit
def wait(barriers, met, KIND: gl.constexpr, STAGES: gl.constexpr):
    """Until tile number ``met`` is there."""
    mbarrier.wait(barriers.index(KIND * STAGES + met % STAGES), met // STAGES & 1)


@gluon.jit
def free(barriers, met, KIND: gl.constexpr, STAGES: gl.constexpr):
    """This group needs tile number ``met`` no more."""
    mbarrier.arrive(barriers.index(KIND * STAGES + met % STAGES))


@gluon.jit
def entry_of(entries, tile, i):
    """Where entry i of a tile lies: those met whole come first, then those to be masked."""
    partial, full = gl.load(tile + PARTIAL), gl.load(tile + FULL)
    at = gl.where(i < full, partial + i, gl.where(i - full < partial, i - full, i))
    return entries + 2 * (gl.load(tile + START) + at)


@gluon.jit
def bonus_of(packed):
    """log2(M)."""
    return gl.log2(gl.cast(packed >> TIMES_AT & TIMES_MASK, gl.float32))


@gluon.jit
def positions(tile, WHICH: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the rows of a group lie: (64,)."""
    return gl.load(tile + FIRST) + (WHICH * GROUP_ROWS + gl.arange(0, GROUP_ROWS, LAYOUT)) * STEP


@gluon.jit
def valid_rows(tile, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Which rows of a group are rows of the tile: (64,)."""
    return gl.arange(0, GROUP_ROWS, LAYOUT) < gl.load(tile + COUNT) - WHICH * GROUP_ROWS


@gluon.jit
def places(tile, entry, WHICH: gl.constexpr, COLS: gl.constexpr, STEP: gl.constexpr, SCORES: gl.constexpr):
    """Positions of a group's rows (64, 1) and of those of an entry (1, COLS), for masks.

    The latter from a number that each step loads: of columns alone, they would be kept from step to step, and registers
    are what there is least of.
    """
    mine = positions(tile, WHICH, STEP, gl.SliceLayout(1, SCORES))
    other = gl.load(tile + BASE) + gl.load(entry) + gl.arange(0, COLS, gl.SliceLayout(0, SCORES)) * STEP
    return mine[:, None], other[None, :]


@gluon.jit
def _fetch(source, batch, head, first, ready, into, STEP: gl.constexpr):
    """Ask the copy engine for a block of one residue class, from position ``first`` on; zeros past its end."""
    tma.async_copy_global_to_shared(source, [batch, first % STEP, head, first // STEP, 0], ready, into)


@gluon.jit
def producer(
    own, also, a, b, tiles, entries, programs, work, group, own_ring, a_ring, b_ring, barriers, OWNED: gl.constexpr,
    BY_KEY: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch owned rows, of ``also`` too if OWNED is 2, and all that they meet."""
    own_ready, turn, met = barriers.index(OWN_READY * STAGES), 0, 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        batch, tile = index // programs, tiles + (index % programs) * COLUMNS
        head, first, base = gl.load(tile + HEAD), gl.load(tile + FIRST), gl.load(tile + BASE)
        mbarrier.wait(barriers.index(OWN_FREE * STAGES), (turn & 1) ^ 1)
        mbarrier.expect(own_ready, 2 * OWNED * own.block_type.nbytes)
        for half in gl.static_range(2):
            _fetch(own, batch, head, first + half * GROUP_ROWS * STEP, own_ready, own_ring.index(half), STEP)
            if OWNED == 2:
                _fetch(also, batch, head, first + half * GROUP_ROWS * STEP, own_ready, own_ring.index(2 + half), STEP)
        turn += 1
        for i in range(gl.load(tile + FULL) + gl.load(tile + MASKED)):
            entry = entry_of(entries, tile, i)
            other = base + gl.load(entry)
            if BY_KEY:
                other_head = head * group + (gl.load(entry + 1) >> MEMBER_AT)
            else:
                other_head = head // group
            slot, phase = met % STAGES, (met // STAGES & 1) ^ 1
            a_ready, b_ready = barriers.index(A_READY * STAGES + slot), barriers.index(B_READY * STAGES + slot)
            mbarrier.wait(barriers.index(A_FREE * STAGES + slot), phase)
            mbarrier.expect(a_ready, a.block_type.nbytes)
            _fetch(a, batch, other_head, other, a_ready, a_ring.index(slot), STEP)
            mbarrier.wait(barriers.index(B_FREE * STAGES + slot), phase)
            mbarrier.expect(b_ready, b.block_type.nbytes)
            _fetch(b, batch, other_head, other, b_ready, b_ring.index(slot), STEP)
            met += 1


@gluon.jit
def scores(own, ring, met, COLS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr):
    """Issue the product of owned rows with those of tile number ``met``: (64, COLS)."""
    zeros = gl.zeros([GROUP_ROWS, COLS], gl.float32, SCORES)
    other = ring.index(met % STAGES).reshape([COLS, DIM]).permute((1, 0))
    return warpgroup_mma(own, other, zeros, use_acc=False, is_async=True)


@gluon.jit
def scores_less(own, ring, met, less, COLS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
                SCORES: gl.constexpr):  # fmt: skip
    """The same, less a number for each column (COLS,): as what the product is added to, it takes no register more."""
    acc = gl.zeros([GROUP_ROWS, COLS], gl.float32, SCORES) - less[None, :]
    other = ring.index(met % STAGES).reshape([COLS, DIM]).permute((1, 0))
    return warpgroup_mma(own, other, acc, is_async=True)


@gluon.jit
def weighted(p, ring, met, acc, COLS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, RESULT: gl.constexpr):
    """Issue the sum of the rows of tile number ``met``, weighted by p (64, COLS), onto acc (64, DIM)."""
    p = gl.convert_layout(p.to(ring.dtype), gl.DotOperandLayout(0, RESULT, 2))
    return warpgroup_mma(p, ring.index(met % STAGES).reshape([COLS, DIM]), acc, is_async=True)


@gluon.jit
def put(into, values, tile, batch, heads, n, WHICH: gl.constexpr, DIM: gl.constexpr, STEP: gl.constexpr,
        STORED: gl.constexpr):  # fmt: skip
    """Write a group's rows (64, DIM) to where they lie in ``into`` (b, n, heads, DIM)."""
    row = (batch * n + positions(tile, WHICH, STEP, gl.SliceLayout(1, STORED))) * heads + gl.load(tile + HEAD)
    at = (row.to(gl.int64) * DIM)[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, STORED))[None, :]
    values = gl.convert_layout(values.to(into.dtype.element_ty), STORED)
    gl.store(into + at, values, mask=valid_rows(tile, WHICH, gl.SliceLayout(1, STORED))[:, None])
