"""What a rank sends: what is predicted is what is counted, and the ladder's closed
forms are the plan.
"""

import random
from pathlib import Path

import pytest
import torch
from matrix import BLOCK_SPARSE, Case, any_layout, drawn, fits
from ringlab import ladder
from ringlab.block_patterns import sliding_window
from ringlab.patterns import Dense, Dilated
from ringlab.ring import (
    SCHEMES,
    Problem,
    bytes_by_scheme,
    choose,
    contiguous,
    counting,
    plan_rank,
    striped,
    uneven,
    zigzag,
)
from ringlab.ring.exchange import rows_needed
from ringlab.ring.volume import ladder_rows, sent_bytes, unevenness


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


def test_auto_sends_the_fewest_bytes():
    """Of all schemes that serve a problem, for the passes asked; ulysses only where
    every rank gets heads. Of equal ones the most even.
    """
    rng, taken = random.Random(0), set()
    patterns = [
        Dense(),
        Dilated([16, 64], [1, 4]),
        Dilated([8, 32, 96], [1, 2, 4], "head_groups"),
        *BLOCK_SPARSE[:2],
    ]
    for _ in range(500):
        pattern, ranks = rng.choice(patterns), rng.choice([2, 3, 4, 6])
        layout, causal = (
            any_layout(rng, ranks, rng.randint(40, 200)),
            rng.random() < 0.5,
        )
        kv_heads = rng.choice([1, 2, 3, 8])
        heads = kv_heads * rng.choice([1, 2, 4])
        schemes = [s for s in SCHEMES if fits(pattern, layout, causal, s)]
        if not schemes:
            continue
        problem = Problem(pattern, layout, causal, heads, kv_heads)
        shape = {
            "head_dim": rng.choice([8, 64]),
            "dtype": rng.choice([torch.float32, torch.bfloat16]),
            "passes": rng.choice(["fwd", "fwd+bwd"]),
        }
        sent = {
            scheme: sum(
                sent_bytes(problem, rank, scheme, batch=1, **shape)
                for rank in range(ranks)
            )
            for scheme in schemes
        }
        if ranks > heads and len(sent) > 1:
            sent.pop("ulysses", None)
        scheme = choose(problem, **shape)
        assert sent[scheme] == min(sent.values()), (problem, shape)
        equal = [other for other in sent if sent[other] == sent[scheme]]
        work = [unevenness(problem, other) for other in equal]
        assert unevenness(problem, scheme) == min(work), (problem, shape)
        assert list(bytes_by_scheme(problem, **shape).values()) == sorted(sent.values())
        taken.add(scheme)
    assert taken == {"plan", "ring", "ulysses"}


@pytest.mark.parametrize(
    "pattern, layout, heads, passes, scheme",
    [
        (Dense(), contiguous(48, 3), (4, 4), "fwd", "ring"),  # 3 shards of K and V
        (Dense(), contiguous(48, 3), (4, 4), "fwd+bwd", "plan"),  # and 3 in fp32 back
        (Dense(), zigzag(64, 4), (8, 8), "fwd", "ulysses"),
        (Dense(), zigzag(64, 4), (32, 2), "fwd", "plan"),  # without chunks that hide
        (Dilated([16], [1]), contiguous(64, 4), (8, 8), "fwd", "plan"),
        (Dilated([16], [1]), striped(64, 4), (8, 8), "fwd", "ulysses"),
        (Dilated([16], [1]), striped(64, 4), (2, 2), "fwd", "ulysses"),
    ],
)
def test_what_auto_takes(pattern, layout, heads, passes, scheme):
    """Causal. Nothing moves of segments inside a shard; stripes need whole sequences,
    even where a rank is left without heads.
    """
    problem = Problem(pattern, layout, True, *heads)
    assert choose(problem, head_dim=64, dtype=torch.bfloat16, passes=passes) == scheme


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


def test_rows_of_a_window_of_tokens_are_counted_in_pieces():
    """A matrix of all queries and keys would have 2^34 elements."""
    window = sliding_window(tokens=4096)
    problem = Problem(window, contiguous(2**18, 2), True, 1, 1)
    assert rows_needed(problem) == [[0, 0], [4095, 0]]


def test_the_table_of_what_auto_takes():
    """As lib/README.md prints it: bf16, both passes, 131,072 positions, 32 heads of 128."""
    n, lines = 2**17, []
    for name, pattern, layout, causal in (
        ("dense", Dense(), contiguous, False),
        ("dense, causal, zigzag", Dense(), zigzag, True),
        (
            "window of 4,096 tokens, causal",
            sliding_window(tokens=4096),
            contiguous,
            True,
        ),
        ("LongNet's ladder, causal", ladder(n), contiguous, True),
    ):
        for kv_heads in (32, 8, 2):
            cells = []
            for ranks in (2, 4, 8, 16):
                problem = Problem(pattern, layout(n, ranks), causal, 32, kv_heads)
                totals = bytes_by_scheme(
                    problem, head_dim=128, dtype=torch.bfloat16, passes="fwd+bwd"
                )
                scheme, size = next(iter(totals.items()))
                cells.append(f"{scheme} {size / ranks / 2**20:,.0f}")
            lines.append(f"| {name} | {kv_heads} | {' | '.join(cells)} |")
    text = (Path(__file__).parents[2] / "lib/README.md").read_text()
    assert "\n".join(lines) in text, "\n".join(lines)
