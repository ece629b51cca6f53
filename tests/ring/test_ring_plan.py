"""Layouts are partitions; a plan moves exactly the rows that are seen, each once."""

import random
from itertools import product

import pytest
import torch
from matrix import BLOCK_SPARSE, any_dilated, any_layout, fits
from ringlab.block_patterns import BlockSparse, sliding_window
from ringlab.patterns import Dense, Dilated
from ringlab.ring import Problem, comm, contiguous, hilbert, plan_rank, uneven, zigzag
from ringlab.ring.exchange import rows_needed
from ringlab.ring.layout import layout_named


def any_problem(rng: random.Random) -> Problem:
    ranks, kv_heads = rng.choice([1, 2, 3, 4, 5]), rng.choice([1, 2, 3])
    layout = any_layout(rng, ranks, rng.randint(ranks, 70))
    pattern = rng.choices(
        [Dense(), any_dilated(rng), rng.choice(BLOCK_SPARSE[:-1])], [2, 5, 3]
    )[0]
    causal = layout.grid is None and rng.random() < 0.5
    fitting = fits(pattern, layout, causal, "plan") and (
        layout.n >= 40 or not isinstance(pattern, BlockSparse)
    )
    return Problem(
        pattern if fitting else Dense(),
        layout,
        causal,
        kv_heads * rng.choice([1, 2, 4]),
        kv_heads,
    )


def seen(problem: Problem, rank: int, source: int) -> set[tuple[int, int]]:
    """(K/V head, position) of every foreign row that some query sees, by the pattern's
    own definition.
    """
    q, k = (
        torch.tensor([x for r in problem.layout.ranges(i) for x in r], dtype=torch.long)
        for i in (rank, source)
    )
    found = set()
    for head in range(problem.heads if len(q) and len(k) else 0):
        m = problem.pattern.multiplicity(
            q,
            k,
            n=problem.layout.n,
            head=head,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
        )
        m = m * (k[None] <= q[:, None]) if problem.causal else m
        found |= {
            (head // (problem.heads // problem.kv_heads), x)
            for x in k[(m > 0).any(0)].tolist()
        }
    return found


def test_a_plan_moves_what_is_seen_and_each_row_once():
    rng = random.Random(0)
    pairs = 0
    for _ in range(100):
        problem = any_problem(rng)
        needed = rows_needed(problem)
        for rank in range(problem.layout.ranks):
            plan = plan_rank(problem, rank)
            assert needed[rank] == plan.received, problem
            for source, blocks in enumerate(plan.receive):
                rows = [
                    (head, x)
                    for block in blocks
                    for head, where in block.members()
                    for x in where
                ]
                assert len(rows) == len(set(rows)) == sum(b.rows for b in blocks), (
                    problem
                )
                assert source == rank or set(rows) == seen(problem, rank, source), (
                    problem,
                    rank,
                    source,
                )
                assert blocks == plan_rank(problem, source).send[rank], (
                    "both ends agree"
                )
                pairs += 1
    assert pairs > 600


def test_long_sequences_are_planned_in_few_ranges():
    plan = plan_rank(Problem(Dense(), zigzag(2**24, 512), True, 32, 32), 511)
    assert max(len(blocks) for blocks in plan.receive) <= 2
    for causal, (layout, neighbours) in product(
        (False, True), ((contiguous, 2), (zigzag, 4))
    ):
        plan = plan_rank(
            Problem(sliding_window(2), layout(1 << 20, 64), causal, 8, 2), 31
        )
        assert sum(map(len, plan.receive)) == neighbours // (1 + causal)
        assert sum(plan.received) == 2 * 256 * neighbours // (1 + causal)


def test_offsets_decide_what_grouped_heads_save():
    """Of all foreign rows of a segment over two ranks, with 8 query heads on 2 K/V
    heads and rate 4.
    """
    shares = {}
    for offsets in ("head", "block", "kv_head"):
        problem = Problem(
            Dilated([4096], [4], offsets=offsets), contiguous(4096, 2), False, 8, 2
        )
        shares[offsets] = sum(plan_rank(problem, 0).received) / (2048 * 2)
    assert shares == {"head": 1.0, "block": 0.5, "kv_head": 0.25}


def test_layouts_are_partitions_and_go_round():
    rng = random.Random(1)
    for _ in range(100):
        ranks = rng.randint(1, 6)
        layout = any_layout(rng, ranks, rng.randint(1, 40))
        everyone = torch.cat([layout.positions(k) for k in range(ranks)])
        assert everyone.sort().values.tolist() == list(range(layout.n))
        x = torch.randn(2, layout.n, 3)
        shards = [layout.shard(x, k) for k in range(ranks)]
        assert [s.shape[1] for s in shards] == [layout.size(k) for k in range(ranks)]
        assert torch.equal(layout.unshard(shards), x)
        y = x.transpose(1, 2)
        assert torch.equal(
            layout.unshard([layout.shard(y, k, 2) for k in range(ranks)], 2), y
        )


def test_hilbert_steps_are_neighbours():
    for height, width in ((4, 4), (8, 8), (3, 5), (6, 10), (16, 2), (1, 9)):
        cells = hilbert(height, width, 1).positions(0)
        steps = (
            torch.stack([cells // width, cells % width]).diff(dim=1).abs()
        )  # (2, cells - 1)
        assert steps.amax() <= 1 and (steps.sum(0) == 2).sum() <= 1, (
            "at most one diagonal step, where a side is odd"
        )


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: contiguous(0, 2), "n must be a positive integer"),
        (lambda: zigzag(8, 0), "ranks must be a positive integer"),
        (lambda: uneven([]), "with a positive sum"),
        (lambda: uneven([3, -1]), "integers from 0 up"),
        (lambda: hilbert(0, 4, 2), "height must be"),
        (
            lambda: layout_named("spiral", 8, 2),
            "unknown layout 'spiral'; known: contiguous, zigzag, striped",
        ),
        (lambda: layout_named(contiguous(8, 4), 8, 2), "for 4 ranks, the group has 2"),
        (lambda: contiguous(8, 2).ranges(2), "rank must be in 0 .. 1"),
        (
            lambda: contiguous(8, 2).shard(torch.ones(1, 9), 0),
            "of 8 positions, the tensor has 9",
        ),
        (
            lambda: contiguous(8, 2).unshard([torch.ones(1, 3), torch.ones(1, 5)]),
            r"sizes \[3, 5\]",
        ),
    ],
)
def test_bad_arguments_are_one_line(make, said):
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        make()


@pytest.mark.parametrize(
    "odd, error",
    [
        (None, None),
        ("shape", "sends rank 1 other rows"),
        ("dtype", "sends rank 1 other rows"),
        ("does not wait", "do not agree"),
        ("ends", "do not agree"),
    ],
)
def test_requests_of_simulated_ranks_must_fit_together(odd, error):
    def steps(rank):
        change = odd if rank else None
        if change == "ends":
            return None
        into = torch.zeros(4 if change == "shape" else 1, 2)
        if change == "dtype":
            into = into.double()
        rows = torch.full((1, 2), float(rank))
        ticket = yield comm.Exchange({1 - rank: (rows,)}, {1 - rank: (into,)})
        yield comm.Exchange() if change == "does not wait" else comm.Wait(ticket)
        yield comm.Wait([])
        return into.tolist()

    if error is None:
        assert comm.drive([steps(0), steps(1)]) == [[[1, 1]], [[0, 0]]]
    else:
        with pytest.raises(RuntimeError, match=error):
            comm.drive([steps(0), steps(1)])
