"""Across ranks besides the values: what moves, what is read, what is refused; and ranks that are processes."""

import random
import re

import pytest
import torch
from matrix import BLOCK, BLOCK_SPARSE, LADDER, any_dilated, any_layout, fits
from ring_cases import call, compiled, mismatch, parity, peaks_of_a_shard, tensors, two_meshes, without_private_names
from ringlab import attention, block_patterns, reference
from ringlab.block_patterns import BlockSparse, Random, Window
from ringlab.patterns import Dense, Dilated
from ringlab.ring import (
    SCHEMES,
    Problem,
    Simulated,
    choose,
    contiguous,
    counting,
    hilbert,
    plan_rank,
    striped,
    uneven,
    zigzag,
)
from ringlab.ring.launch import launch
from ringlab.ring.volume import sent_bytes

SIZE, N = BLOCK, 101  # the last block is short, and no number of ranks divides the sequence
PATTERNS = BLOCK_SPARSE


@pytest.mark.parametrize("pattern", [LADDER, Dense(), PATTERNS[0]], ids=str)
def test_one_rank_is_the_local_result_bit_for_bit(pattern):
    q, k, v, dout, dlse = tensors(contiguous(N, 1), 4, 2, 8, torch.float32, 0)
    with counting() as traffic:
        found = call(q, k, v, dout, dlse, pattern, "contiguous", True, "auto", Simulated(1))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, pattern, causal=True, return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse.masked_fill(lse == -torch.inf, 0).to(lse.dtype)))
    assert all(map(torch.equal, found, (out, lse, *grads))) and traffic.total == 0


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "plan"])
def test_half_precision_is_rounded_once(scheme):
    """However many ranks add to a result: their parts are summed in fp32."""
    q, k, v, *_ = tensors(contiguous(512, 16), 2, 2, 16, torch.bfloat16, 0)
    exact = attention(q.double(), k.double(), v.double(), Dense())
    rounding = (exact.bfloat16().double() - exact).norm()
    out = attention(q, k, v, Dense(), group=Simulated(16), scheme=scheme)
    assert (out.double() - exact).norm() <= 1.3 * rounding


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_changes_nothing(scheme):
    q, k, v, *_ = tensors(contiguous(40, 2), 2, 2, 8, torch.float32, 0)
    how = {"group": Simulated(2), "scheme": scheme, "backend": "eager"}
    want = attention(q, k, v, Dense(), **how)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q, k, v, Dense(), **how), want)


def test_the_last_dimension_may_lie_anywhere():
    layout = contiguous(N, 3)
    given = tensors(layout, 2, 2, 8, torch.float64, 0)[:3]
    q, k, v = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in given)
    for pattern in (PATTERNS[0], Dilated([8, 24], [1, 2])):
        over = attention(q, k, v, pattern, group=Simulated(3), scheme="plan", layout=layout)
        assert reference.error(over, attention(q, k, v, pattern), 1.0) <= 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# what moves


def traffic_of(pattern, layout, causal, scheme, heads=2, kv_heads=2, d=8, dtype=torch.float32):
    """Bytes by (from, to), forward and backward."""
    q, k, v, dout, _ = tensors(layout, heads, kv_heads, d, dtype, 0)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with counting() as forward:
        out = attention(q, k, v, pattern, causal=causal, group=Simulated(layout.ranks), scheme=scheme, layout=layout)
    with counting() as backward:
        torch.autograd.grad(out, (q, k, v), dout)
    return forward, backward


def seen(pattern, layout, causal, heads, kv_heads, rank, source) -> set[tuple[int, int]]:
    """(K/V head, position) of every row of ``source`` that a query of ``rank`` sees, by the pattern's definition."""
    q, k = (torch.tensor([x for r in layout.ranges(i) for x in r], dtype=torch.long) for i in (rank, source))
    found = set()
    for head in range(heads if len(q) and len(k) else 0):
        m = pattern.multiplicity(q, k, n=layout.n, head=head, heads=heads, kv_heads=kv_heads)
        m = m * (k[None] <= q[:, None]) if causal else m
        found |= {(head // (heads // kv_heads), x) for x in k[(m > 0).any(0)].tolist()}
    return found


def test_a_plan_moves_the_rows_that_are_seen_and_their_gradients():
    rng, count = random.Random(5), 0
    while count < 40:
        layout = any_layout(rng, rng.choice([2, 3, 4]), rng.randint(40, 70))
        pattern, causal = rng.choice([any_dilated(rng), rng.choice(PATTERNS[:-1])]), rng.random() < 0.5
        heads, kv_heads = rng.choice([(4, 4), (4, 2), (6, 2), (5, 1)])
        if layout.n < 30 or not fits(pattern, layout, causal, "plan"):
            continue
        forward, backward = traffic_of(pattern, layout, causal, "plan", heads, kv_heads)
        ranks, wanted = range(layout.ranks), {}
        for rank, source in ((a, b) for a in ranks for b in ranks if a != b):
            if rows := len(seen(pattern, layout, causal, heads, kv_heads, rank, source)):
                wanted[source, rank] = rows * 2 * 8 * 4
        assert forward.sent == wanted, (str(pattern), layout, causal)
        assert backward.sent == {(b, a): size for (a, b), size in wanted.items()}, "the same rows, the other way"
        count += 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dense_schemes_move_their_closed_forms(ranks):
    """s rows a shard of m bytes; gradients of bf16 travel in fp32 (c = 2)."""
    n, layout = 16 * ranks, contiguous(16 * ranks, ranks)
    shard = n // ranks * 2 * 2 * 8 * 2  # s * m in bf16: K and V of 2 heads of 8
    for scheme, backward_shards in (("ring", 1 + 2), ("all_gather", 1 + 2), ("plan", 2)):
        forward, backward = traffic_of(Dense(), layout, False, scheme, dtype=torch.bfloat16)
        assert all(forward.from_rank(r) == (ranks - 1) * shard for r in range(ranks)), scheme
        assert all(backward.from_rank(r) == (ranks - 1) * shard * backward_shards for r in range(ranks)), scheme
    forward, _ = traffic_of(Dense(), layout, True, "ring", dtype=torch.bfloat16)
    sent = [forward.from_rank(r) for r in range(ranks)]
    assert sent == [(r + 1) * shard for r in range(ranks - 1)] + [0], "no hop that no query needs"


@pytest.mark.parametrize(
    "pattern, layout, causal",
    [
        (Dilated([8, 32], [1, 3]), contiguous(32, 4), False),
        (BlockSparse([Window(1, 0), Random(1, seed=3)], SIZE), contiguous(59, 3), False),
        (BlockSparse([Window(1, 0), Random(1, seed=3)], SIZE), zigzag(59, 2), True),
    ],
)
def test_only_rows_that_are_seen_are_read_and_all_of_them(pattern, layout, causal):
    """NaN in every row that is neither owned nor seen changes nothing; NaN in any that is seen reaches the output."""
    q, k, v, *_ = tensors(layout, 2, 2, 8, torch.float64, 0)

    def rows_of(rank, k, v):
        group = Simulated(layout.ranks)
        return layout.shard(attention(q, k, v, pattern, causal=causal, group=group, scheme="plan", layout=layout), rank)

    for rank in range(layout.ranks):
        others = [source for source in range(layout.ranks) if source != rank]
        foreign = set().union(*(seen(pattern, layout, causal, 2, 2, rank, source) for source in others))
        mine = {x for r in layout.ranges(rank) for x in r}
        k_, v_ = k.clone(), v.clone()
        for head, x in {(head, x) for head in (0, 1) for x in range(layout.n) if x not in mine} - foreign:
            k_[:, x, head] = v_[:, x, head] = torch.nan
        own = rows_of(rank, k_, v_)
        assert k_.isnan().any() and torch.equal(own, rows_of(rank, k, v)) and own.isfinite().all()
        for head, x in sorted(foreign)[:: max(1, len(foreign) // 5)]:
            single = v.clone()
            single[:, x, head] = torch.nan
            assert not rows_of(rank, k, single).isfinite().all(), (rank, head, x)


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


def test_auto_takes_the_scheme_that_moves_least_and_says_why():
    assert choose(Problem(Dilated([16], [1]), contiguous(64, 4), True, 8, 8)).scheme == "plan"
    assert choose(Problem(Dense(), contiguous(64, 1), True, 8, 8)).why == "one rank has all rows, and nothing moves"
    assert choose(Problem(Dense(), zigzag(64, 4), True, 8, 8)).scheme == "ulysses"
    grouped = choose(Problem(Dense(), zigzag(64, 4), True, 32, 2))
    assert grouped.scheme == "ring" and "exchanging heads would move" in grouped.why
    assert choose(Problem(Dilated([16], [1]), striped(64, 4), True, 8, 8)).scheme == "ulysses"


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
            "block_size 128 exceeds the sequence length 101",
        ),
    ],
)
def test_refusals_are_one_line(pattern, layout, causal, scheme, said):
    q, k, v, *_ = tensors(layout, 2, 2, 8, torch.float32, 0)
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        attention(q, k, v, pattern, causal=causal, group=Simulated(layout.ranks), scheme=scheme, layout=layout)


# ---------------------------------------------------------------------------------------------------------------------
# real processes over gloo


@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_ranks_are_the_simulated_ones(ranks):
    cases = []
    for i, scheme in enumerate(SCHEMES):
        for layout, pattern in ((contiguous(37, ranks), Dilated([8, 20], [1, 3])), (zigzag(36, ranks), Dense()),
                                (hilbert(4, 9, ranks), Dilated([12], [2], "head_groups", "branch")),
                                (uneven([22, 37, 42][:ranks]), PATTERNS[1]), (zigzag(N, ranks), PATTERNS[-1]),
                                (striped(N, ranks), PATTERNS[0])):  # fmt: skip
            if not fits(pattern, layout, False, scheme):
                continue
            causal = layout.grid is None and i % 2 == 0
            cases.append((pattern, layout, causal, 4, 2, scheme, torch.float64, 8, i, i % 2 == 1))
    everyone = launch(parity, ranks, cases)
    for i, (pattern, layout, causal, heads, kv_heads, scheme, dtype, d, seed, with_lse) in enumerate(cases):
        q, k, v, dout, dlse = tensors(layout, heads, kv_heads, d, dtype, seed)
        with counting() as traffic:
            want = call(q, k, v, dout, dlse if with_lse else None, pattern, layout, causal, scheme, Simulated(ranks))
        for part in range(5):
            got = layout.unshard([each[i][0][part] for each in everyone], 2 if part == 1 else 1)
            assert torch.equal(got, want[part]), (scheme, layout, part)
        assert [each[i][1] for each in everyone] == [traffic.from_rank(r) for r in range(ranks)]
    copied = launch(parity, ranks, cases, "cpu", True)
    same = [torch.equal(a, b) for x, y in zip(everyone, copied) for (u, *_), (w, *_) in zip(x, y) for a, b in zip(u, w)]
    assert all(same) and len(same) == 5 * ranks * len(cases)
    again, header = launch(parity, ranks, cases[:1] * 2), 24 * (ranks - 1)  # to each other rank, in each pass
    assert [[control for *_, control in each] for each in again] == [[2 * header + 8 * (ranks - 1), 2 * header]] * ranks


ONE, OTHER = Dilated([12, 48], [1, 2]), Dilated([12, 48], [1, 2], offsets="block")


@pytest.mark.parametrize(
    "calls, order, what",
    [
        ([(ONE, False), (ONE, True)], ((0, 1), (1, 0)), "causal is False on rank 0, True on rank 1"),
        ([(ONE, False), (OTHER, False)], ((0, 1), (1, 0)), f"pattern is {ONE} on rank 0, {OTHER} on rank 1"),
        ([(ONE, False), (ONE, True)], ((1, -2), (-2, 1)), "pass is forward on rank 0, backward on rank 1"),
        ([(ONE, False)] * 2, ((-2, -1), (-1, -2)), "forward call is number 1 on rank 0, number 2 on rank 1"),
    ],
)
def test_calls_in_another_order_are_told_on_every_rank(calls, order, what):
    """Calls that the ranks have made before in one order."""
    told = launch(mismatch, 2, [calls], contiguous(48, 2), order, timeout_s=30.0)
    assert told == [f"ranks disagree about what is computed: {what}"] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_little_more_than_its_shard(ranks):
    """Peak bytes of a forward by the bytes of a shard of q, k, v and out: what is received, and a piece at a time."""
    n, heads, d = 2048, 32, 64
    ladder = Dilated([n // 4, n], [1, 4])
    cases = [(Dense(), "ring"), (Dense(), "all_gather"), (ladder, "plan")]
    shard = 4 * 4 * n // ranks * heads * d
    for rank, peaks in enumerate(launch(peaks_of_a_shard, ranks, cases, n, heads, d)):
        ring, gathered, planned = (peak / shard for peak in peaks)
        plan = plan_rank(Problem(ladder, contiguous(n, ranks), False, heads, heads), rank)
        moved = 4 * 2 * d * (sum(plan.sent) + sum(plan.received)) / shard
        assert ring <= 2.1 and gathered <= 1.1 * (2 + 2 * ranks) / 4 and planned <= 1.3 + moved, (peaks, shard, moved)


def test_process_groups_are_found_without_private_functions():
    for one, other in launch(without_private_names, 2, Dilated([8, 24], [1, 2]), contiguous(24, 2)):
        assert all(map(torch.equal, one, other))


def test_a_mesh_of_two_sequences():
    pattern, layout = Dilated([8, 24], [1, 2]), contiguous(24, 2)
    found = launch(two_meshes, 4, pattern, layout, 7)
    for data in (0, 1):
        mine = [each for which, each in found if which == data]
        q, k, v, dout, dlse = tensors(layout, 4, 2, 8, torch.float64, 7 + data)
        want = call(q, k, v, dout, dlse, pattern, layout, True, "plan", Simulated(2))
        for part in range(5):
            assert torch.equal(layout.unshard([each[part] for each in mine], 2 if part == 1 else 1), want[part])


@pytest.mark.parametrize("scheme", ["plan", "ring"])
def test_compiled_and_checkpointed_steps_are_the_eager_one(scheme):
    """One graph; saving the operator's results replays no exchange, where plain checkpointing replays the forward."""
    for results, messages in launch(compiled, 2, Dilated([8, 40], [1, 2]), contiguous(40, 2), scheme):
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other))
        eager, compiled_messages, plain, selective = messages
        assert eager == compiled_messages == selective < plain


def test_ranks_with_different_masks_are_told():
    """Masks that differ only within shards need the same rows; the patterns' names tell them apart."""
    mask = torch.eye(8, dtype=torch.bool)
    other = mask.clone()
    other[0, 1] = True
    calls = [[(block_patterns.from_mask(m, block_size=SIZE), True)] for m in (mask, other, mask)]
    said = "pattern is blocks of 8: a given mask .* on rank 1, blocks of 8: a given mask .* on the others"
    for told in launch(mismatch, 3, calls, contiguous(64, 3)):
        assert re.search(said, told)
