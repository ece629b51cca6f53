"""Block-sparse patterns across ranks: the one-device answer, and no more rows moved than are seen."""

import random
import re

import pytest
import torch
from ring_cases import call, mismatch, parity, tensors
from ringlab import Dilated, Execution, attention, block_patterns, reference
from ringlab.block_patterns import BlockSparse, Coarse, Random, Strided, Window
from ringlab.engine import block_passes
from ringlab.engine.autograd import local_attention
from ringlab.ring import (  # fmt: skip
    Problem,
    Simulated,
    choose,
    contiguous,
    counting,
    exchange,
    hilbert,
    plan_rank,
    striped,
    uneven,
    zigzag,
)
from ringlab.ring.launch import launch
from ringlab.ring.volume import sent_bytes
from test_ring import BOUND, comm_attend, errors

SIZE, N = 8, 59  # the last block is short, and no number of ranks divides the sequence
PATTERNS = [
    block_patterns.local_global(1, 1, block_size=SIZE),
    block_patterns.bigbird(0, 1, 1, block_size=SIZE),
    BlockSparse([Window(2, 0)], SIZE),
    BlockSparse([Window(0), Strided(3)], SIZE),
    BlockSparse([Coarse(2, 5)], SIZE),
    BlockSparse([Random(2, seed=1)], SIZE),
    block_patterns.from_mask(torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.3, block_size=SIZE),
]


def layouts(ranks: int):
    """Borders inside blocks everywhere; chunks shorter than a block; a shard without rows."""
    sizes = [[N], [22, N - 22], [0, 30, N - 30], [3, 2, 41, N - 46]][ranks - 1]
    return contiguous(N, ranks), zigzag(N, ranks), uneven(sizes), zigzag(N // 2 + 1, ranks), hilbert(1, N, ranks)


def fits(pattern, layout) -> bool:
    return layout.n == N or not isinstance(pattern.parts[0], block_patterns.Given)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("scheme", ["plan", "ulysses"])
def test_ranks_are_the_oracle(scheme, ranks):
    rng = random.Random(f"{scheme} {ranks}")
    for i, layout in enumerate(layouts(ranks) * (2 if scheme == "plan" else 1)):
        pattern = rng.choice([p for p in PATTERNS if fits(p, layout)])
        causal, heads, kv_heads = layout.grid is None and i < 5, *rng.choice([(4, 4), (4, 2), (6, 2), (5, 1)])
        dtype = torch.float64 if i % 3 else torch.float32
        q, k, v, dout, dlse = tensors(layout, heads, kv_heads, 8, dtype, i, batch=rng.choice([1, 2]))
        dlse = dlse if i % 2 else None
        found = call(q, k, v, dout, dlse, pattern, layout, causal, scheme, Simulated(ranks))
        worst = max(errors(found, q, k, v, dout, dlse, pattern, layout, causal))
        assert worst <= BOUND[dtype], (worst, str(pattern), layout, causal, heads, kv_heads)


def test_every_pattern_over_three_ranks_is_the_oracle():
    for causal in (False, True):
        for pattern in PATTERNS:
            layout = contiguous(N, 3)
            given = tensors(layout, 2, 1, 8, torch.float64, 0)
            found = call(*given, pattern, layout, causal, "plan", Simulated(3))
            assert max(errors(found, *given, pattern, layout, causal)) <= 1e-12, (str(pattern), causal)


def test_half_precision_stays_within_twice_a_dense_call():
    pattern, layout = block_patterns.local_global(1, 1, block_size=64), zigzag(500, 2)
    q, k, v, dout, _ = tensors(layout, 4, 2, 16, torch.bfloat16, 0)
    found = call(q, k, v, dout, None, pattern, layout, True, "plan", Simulated(2))
    limit = reference.tolerance(q, k, v, dout, pattern=pattern, causal=True)
    worst = dict(zip(("out", "lse", "dq", "dk", "dv"), errors(found, q, k, v, dout, None, pattern, layout, True)))
    assert all(worst[name] <= limit[name] for name in ("out", "dq", "dk", "dv")), (worst, limit)
    assert found[0].dtype == found[2].dtype == torch.bfloat16 and found[1].dtype == torch.float32


def test_one_rank_is_the_local_result_bit_for_bit():
    q, k, v, dout, dlse = tensors(contiguous(N, 1), 4, 2, 8, torch.float32, 0)
    with counting() as traffic:
        found = call(q, k, v, dout, dlse, PATTERNS[0], "contiguous", True, "auto", Simulated(1))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = local_attention(*leaves, PATTERNS[0], causal=True, scale=8**-0.5, backend="auto", execution=Execution())
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
    assert all(torch.equal(x, y) for x, y in zip(found, (out, lse, *grads))) and traffic.total == 0


def test_the_last_dimension_may_lie_anywhere():
    layout = contiguous(N, 3)
    given = tensors(layout, 2, 2, 8, torch.float64, 0)[:3]
    q, k, v = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in given)
    for pattern in (PATTERNS[0], Dilated([8, 24], [1, 2])):
        over = attention(q, k, v, pattern, group=Simulated(3), scheme="plan", layout=layout)
        assert reference.error(over, attention(q, k, v, pattern), 1.0) <= 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# what moves


def rows_of(plan) -> list[list[tuple[int, int]]]:
    """(K/V head, position) of every row received, by source."""
    return [[(head, x) for block in each for head, where in block.members() for x in where] for each in plan.receive]


def seen(problem: Problem, rank: int, source: int) -> set[tuple[int, int]]:
    """The same by the pattern's own definition."""
    q, k = (torch.tensor([x for r in problem.layout.ranges(i) for x in r], dtype=torch.long) for i in (rank, source))
    m = problem.pattern.multiplicity(q, k, n=problem.layout.n, head=0, heads=1)
    m = m * (k[None] <= q[:, None]) if problem.causal else m
    return {(head, x) for head in range(problem.kv_heads) for x in k[(m > 0).any(0)].tolist()}


def test_a_plan_moves_what_is_seen_once_and_in_ranges():
    cases = [(p, layout, bool((i + j) % 2)) for i, layout in enumerate(layouts(2) + layouts(4))
             for j, p in enumerate(PATTERNS) if fits(p, layout)]  # fmt: skip
    for pattern, layout, causal in cases:
        problem = Problem(pattern, layout, causal, 4, 2)
        plans = [plan_rank(problem, rank) for rank in range(layout.ranks)]
        for rank, plan in enumerate(plans):
            for source, rows in enumerate(rows_of(plan)):
                assert len(rows) == len(set(rows))
                assert source == rank or set(rows) == seen(problem, rank, source), (str(pattern), layout)
                assert plan.receive[source] == plans[source].send[rank], "both ends agree"
                stops = [block.first[0] + block.count for block in plan.receive[source]]
                assert all(b.first[0] > stop for b, stop in zip(plan.receive[source][1:], stops)), "joined"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_predicted_and_counted(dtype):
    for scheme in ("plan", "ulysses"):
        for pattern, layout, causal in ((PATTERNS[0], zigzag(N, 3), True), (PATTERNS[1], uneven([5, 0, 47, 7]), False)):
            given = tensors(layout, 4, 2, 8, dtype, 0)
            problem, group = Problem(pattern, layout, causal, 4, 2), Simulated(layout.ranks)
            shape = {"batch": 1, "head_dim": 8, "dtype": dtype}
            with counting() as forward:
                attention(*given[:3], pattern, causal=causal, group=group, scheme=scheme, layout=layout)
            with counting() as both:
                call(*given[:4], None, pattern, layout, causal, scheme, group)
            assert forward.total > 0
            for rank in range(layout.ranks):
                assert sent_bytes(problem, rank, scheme, **shape) == forward.from_rank(rank)
                assert sent_bytes(problem, rank, scheme, passes="fwd+bwd", **shape) == both.from_rank(rank)


@pytest.mark.parametrize("causal, layout", [(False, contiguous(N, 3)), (True, zigzag(N, 2))])
def test_only_planned_rows_are_read_and_all_of_them(causal, layout):
    """NaN in every row that is neither owned nor planned changes nothing; NaN in any planned one reaches the output."""
    pattern, heads = BlockSparse([Window(1, 0), Random(1, seed=3)], SIZE), 2
    q, k, v, *_ = tensors(layout, heads, heads, 8, torch.float64, 0)
    clean = comm_attend(q, k, v, pattern, layout, causal, "plan")[0]
    for rank in range(layout.ranks):
        plan = plan_rank(Problem(pattern, layout, causal, heads, heads), rank)
        planned = [row for rows in rows_of(plan) for row in rows]
        mine = {x for r in layout.ranges(rank) for x in r}
        left = [x for x in range(layout.n) if x not in mine and (0, x) not in planned]
        poisoned = [t.clone() for t in (k, v)]
        for t in poisoned:
            t[:, left] = torch.nan
        own = layout.shard(comm_attend(q, *poisoned, pattern, layout, causal, "plan")[0], rank)
        assert left and torch.equal(own, layout.shard(clean, rank)) and own.isfinite().all()
        for head, x in planned[:: max(1, len(planned) // 5)]:
            single = v.clone()
            single[:, x, head] = torch.nan
            got = comm_attend(q, k, single, pattern, layout, causal, "plan")[0]
            assert not layout.shard(got, rank).isfinite().all(), (rank, head, x)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_many_ranks_is_planned_in_few_ranges_and_calls(causal):
    n, ranks = 1 << 20, 64
    for layout, neighbours in ((contiguous(n, ranks), 2), (zigzag(n, ranks), 4)):
        problem = Problem(block_patterns.sliding_window(2), layout, causal, 8, 2)
        plan = plan_rank(problem, 31)
        assert sum(map(len, plan.receive)) == neighbours // (1 + causal)
        assert sum(plan.received) == 2 * 256 * neighbours // (1 + causal)
        held = [next(block.members())[1] for each in plan.receive for block in each]
        for received in (None, held):
            tiling = exchange.block_calls(problem.pattern, layout, causal, 31, received)
            assert len(tiling.runs) <= 10 and not tiling.picked


# ---------------------------------------------------------------------------------------------------------------------
# what is refused, and what goes wrong


def test_auto_is_the_plan_and_says_why():
    pattern = block_patterns.sliding_window(1, block_size=SIZE)
    found = choose(Problem(pattern, contiguous(64, 4), True, 8, 8))
    assert found.scheme == "plan" and found.why.startswith("a block-sparse pattern shows few foreign rows")
    assert choose(Problem(pattern, striped(64, 4), True, 8, 8)).scheme == "ulysses"
    assert choose(Problem(pattern, contiguous(64, 1), True, 8, 8)).scheme == "plan"


@pytest.mark.parametrize(
    "pattern, layout, causal, scheme, said",
    [
        (PATTERNS[0], contiguous(N, 2), False, "ring", "'ring' does not serve block-sparse patterns; 'plan' and 'ulys"),
        (PATTERNS[0], zigzag(N, 2), True, "all_gather", "'all_gather' does not serve block-sparse patterns"),
        (PATTERNS[0], striped(N, 2), True, "plan", "a striped layout with dense attention only, not blocks of 8"),
        (PATTERNS[0], hilbert(1, N, 2), True, "plan", "not in time order"),
        (PATTERNS[0], contiguous(N, 4), True, "ulysses", "4 ranks are more than 2 heads"),
        (
            block_patterns.sliding_window(1),
            contiguous(N, 2),
            True,
            "auto",
            "block_size 128 exceeds the sequence length 59",
        ),
    ],
)
def test_refusals_are_one_line(pattern, layout, causal, scheme, said):
    q, k, v, *_ = tensors(layout, 2, 2, 8, torch.float32, 0)
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        attention(q, k, v, pattern, causal=causal, group=Simulated(layout.ranks), scheme=scheme, layout=layout)


def later_keys(monkeypatch):
    """Causality by blocks alone: the rest of a cut block is seen from its start."""
    monkeypatch.setattr(exchange.BlockParts, "before", lambda self, others: self.blocks[None] <= others.blocks[:, None])


def unmerged(monkeypatch):
    """The second call on a row overwrites the first."""
    right = block_passes.forward
    monkeypatch.setattr(block_passes, "forward", lambda *args: right(*args) if len(args) == 6 else [
        t.copy_(o) for t, o in zip(args[6][:1], right(*args[:6])[:1])])  # fmt: skip


@pytest.mark.parametrize("mutant", [later_keys, unmerged])
def test_mutants_are_caught(monkeypatch, mutant):
    pattern, layout = PATTERNS[0], contiguous(N, 3)
    given = tensors(layout, 2, 2, 8, torch.float64, 0)
    mutant(monkeypatch)
    monkeypatch.setattr("ring_cases.Execution", lambda: Execution(cache=False))
    wrong = call(*given, pattern, layout, True, "plan", Simulated(3))
    assert max(errors(wrong, *given, pattern, layout, True)) > 1e-3


def test_ranks_with_different_masks_are_told():
    """Masks that differ only within shards need the same rows; the patterns' names tell them apart."""
    mask = torch.eye(8, dtype=torch.bool)
    other = mask.clone()
    other[0, 1] = True
    calls = [[(block_patterns.from_mask(m, block_size=SIZE), True)] for m in (mask, other, mask)]
    said = "pattern is blocks of 8: a given mask .* on rank 1, blocks of 8: a given mask .* on the others"
    for told in launch(mismatch, 3, calls, contiguous(64, 3)):
        assert re.search(said, told)


def test_gloo_ranks_are_the_simulated_ones():
    cases = [
        (pattern, layout, causal, 4, 2, scheme, torch.float64, 8, i, True)
        for i, (pattern, layout, causal, scheme) in enumerate(
            [(PATTERNS[1], uneven([22, 37]), True, "plan"), (PATTERNS[6], zigzag(N, 2), False, "auto"),
             (PATTERNS[0], striped(N, 2), True, "auto")])
    ]  # fmt: skip
    everyone = launch(parity, 2, cases)
    for i, (pattern, layout, causal, heads, kv_heads, scheme, dtype, d, seed, _) in enumerate(cases):
        given = tensors(layout, heads, kv_heads, d, dtype, seed)
        with counting() as traffic:
            want = call(*given, pattern, layout, causal, scheme, Simulated(2))
        for part in range(5):
            got = layout.unshard([each[i][0][part] for each in everyone], 2 if part == 1 else 1)
            assert torch.equal(got, want[part]), (str(pattern), layout, part)
        assert [each[i][1] for each in everyone] == [traffic.from_rank(r) for r in range(2)]
