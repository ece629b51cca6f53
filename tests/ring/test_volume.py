"""What a rank sends: what is predicted is what is counted, and the ladder's closed
forms are the plan.
"""

import random

import pytest
import torch
from matrix import BLOCK_SPARSE, Case, drawn, fits
from ringlab.patterns import Dense, Dilated
from ringlab.ring import (
    SCHEMES,
    Problem,
    contiguous,
    counting,
    plan_rank,
    uneven,
    zigzag,
)
from ringlab.ring.volume import ladder_rows, sent_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_predicted_for_every_scheme(scheme, dtype):
    rng = random.Random(scheme)
    for layout in (
        contiguous(37, 3),
        zigzag(40, 2),
        uneven([5, 0, 20, 7]),
        zigzag(101, 3),
        uneven([5, 0, 47, 7]),
    ):
        pattern = rng.choice([Dense(), Dilated([8, 20], [1, 3]), *BLOCK_SPARSE[:2]])
        causal, kv_heads, batch = (
            rng.random() < 0.5,
            rng.choice([2, 4]),
            rng.choice([1, 2]),
        )
        if not fits(pattern, layout, causal, scheme):
            pattern = Dense()
        case = Case(
            pattern,
            layout.n,
            dtype,
            causal,
            batch,
            4,
            kv_heads,
            8,
            lse_cotangent=False,
            layout=layout,
            scheme=scheme,
        )
        problem, given = Problem(pattern, layout, causal, 4, kv_heads), drawn(case)
        shape = {"batch": batch, "head_dim": 8, "dtype": dtype}
        with counting() as forward:
            case.call(*given[0])
        with counting() as both:
            case.run(*given)
        for rank in range(layout.ranks):
            assert sent_bytes(problem, rank, scheme, **shape) == forward.from_rank(
                rank
            ), (layout, rank)
            assert sent_bytes(
                problem, rank, scheme, passes="fwd+bwd", **shape
            ) == both.from_rank(rank), (layout, rank)
        assert forward.total > 0


@pytest.mark.parametrize(
    "n, ranks", [(2**17, 8), (2**17, 32), (2**18, 4), (2**13, 2), (2**20, 64)]
)
def test_the_closed_form_is_the_plan(n, ranks):
    """w0 (1 - 1/a) log_a p positions a head; the last rank of a causal sequence
    receives as many.
    """
    lengths = [2**i for i in range(11, n.bit_length())]
    pattern, moved = (
        Dilated(lengths, [length // 2048 for length in lengths]),
        ladder_rows(n, ranks),
    )
    plans = [
        plan_rank(Problem(pattern, contiguous(n, ranks), False, 1, 1), rank)
        for rank in (0, ranks // 2)
    ]
    plans.append(
        plan_rank(Problem(pattern, contiguous(n, ranks), True, 1, 1), ranks - 1)
    )
    assert (
        {sum(plan.received) for plan in plans} == {sum(plans[0].sent)} == {moved.plan}
    )
    assert moved.ring == n - n // ranks
    # LongNet: all of the segment's rows that lie outside the shard, once per branch
    assert moved.segment_gather == sum(
        max(0, w - n // ranks) // r for w, r in zip(lengths, pattern.dilation_rates)
    )


def test_published_sizes_and_what_is_refused():
    """The figures of the formulas for 16M positions on 512 ranks; 16 M rows against
    nine thousand.
    """
    moved = ladder_rows(2**24, 512)
    assert (moved.plan, moved.segment_gather, moved.world_gather, moved.ring) == (
        9216,
        16388,
        1044484,
        16744448,
    )
    for n, ranks in ((3 * 2**17, 8), (2**17, 3), (2**17, 128)):
        with pytest.raises(ValueError, match="ladder|sparsest"):
            ladder_rows(n, ranks)
