"""Across ranks besides the values: what moves, what is read, what is refused; and ranks that are processes."""

import re

import pytest
import torch
from matrix import BLOCK, BLOCK_SPARSE, LADDER, fits
from ring_cases import call, compiled, mismatch, parity, peaks_of_a_shard, tensors, two_meshes, without_private_names
from ringlab import Simulated, attention, block_patterns, kernels
from ringlab.patterns import Dense, Dilated
from ringlab.ring import SCHEMES, Problem, choose, contiguous, counting, hilbert, plan_rank, striped, uneven, zigzag
from ringlab.ring.launch import launch
from ringlab.tracking import LiveStorageTracker

SIZE, N = BLOCK, 101  # the last block is short, and no number of ranks divides the sequence
PATTERNS = BLOCK_SPARSE


@pytest.mark.parametrize("pattern", [LADDER, Dense(), PATTERNS[0]], ids=str)
def test_one_rank_is_the_local_result_bit_for_bit(pattern):
    q, k, v, dout, dlse = tensors(contiguous(N, 1), 4, 2, 8, torch.float32, 0)
    want = call(q, k, v, dout, dlse, pattern, "contiguous", True, "auto", None)
    with counting() as traffic:
        found = call(q, k, v, dout, dlse, pattern, "contiguous", True, "auto", Simulated(1))
    assert all(map(torch.equal, found, want)) and traffic.total == 0


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "plan"])
def test_half_precision_is_rounded_once(scheme):
    """However many ranks add to a result: their parts are summed in fp32.

    By the eager kernel, which rounds nothing else; torch's own rounds the weights too, on CPUs with products in bf16.
    """
    q, k, v, *_ = tensors(contiguous(512, 16), 2, 2, 16, torch.bfloat16, 0)
    exact = attention(q.double(), k.double(), v.double(), Dense())
    rounding = (exact.bfloat16().double() - exact).norm()
    out = attention(q, k, v, Dense(), group=Simulated(16), scheme=scheme, backend="eager")
    assert (out.double() - exact).norm() <= 1.3 * rounding


def test_forward_derivatives_are_refused():
    q = torch.zeros(1, 8, 2, 8)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attention(q, q, q, Dense(), group=Simulated(2))
    with pytest.raises(NotImplementedError, match="does not support torch.func"):
        torch.func.grad(lambda q: attention(q, q, q, Dense(), group=Simulated(2)).sum())(q)


# ---------------------------------------------------------------------------------------------------------------------
# what moves, what is chosen, what is refused


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dense_schemes_move_their_closed_forms(ranks):
    """Bytes of K and V shards; gradients of bf16 travel in fp32, twice as long."""
    layout, shard = contiguous(16 * ranks, ranks), 16 * 2 * 2 * 8 * 2  # K and V in bf16, 2 heads of 8
    q, k, v, dout, _ = (t.requires_grad_() for t in tensors(layout, 2, 2, 8, torch.bfloat16, 0))

    def shards_sent(causal, scheme, backward=False):
        with counting() as traffic:
            out = attention(q, k, v, Dense(), causal=causal, group=Simulated(ranks), scheme=scheme)
            if backward:
                torch.autograd.grad(out, (q, k, v), dout)
        return [traffic.from_rank(r) / shard for r in range(ranks)]

    for scheme, more in (("ring", 1 + 2), ("all_gather", 1 + 2), ("plan", 2)):
        assert shards_sent(False, scheme) == [ranks - 1] * ranks, scheme
        assert shards_sent(False, scheme, backward=True) == [(ranks - 1) * (1 + more)] * ranks, scheme
    assert shards_sent(True, "ring") == [*range(1, ranks), 0], "no hop that no query needs"


WINDOW = block_patterns.sliding_window(1, block_size=SIZE)


@pytest.mark.parametrize(
    "pattern, layout, heads, scheme, why",
    [
        (Dilated([16], [1]), contiguous(64, 4), (8, 8), "plan", "a dilated pattern shows few foreign rows"),
        (WINDOW, contiguous(64, 4), (8, 8), "plan", "a block-sparse pattern shows few foreign rows"),
        (WINDOW, contiguous(64, 1), (8, 8), "plan", "one rank has all rows"),
        (Dense(), contiguous(64, 1), (8, 8), "ring", "one rank has all rows, and nothing moves"),
        (Dense(), zigzag(64, 4), (8, 8), "ulysses", "exchanging heads moves"),
        (Dense(), zigzag(64, 4), (32, 2), "ring", "exchanging heads would move"),
        (Dilated([16], [1]), striped(64, 4), (8, 8), "ulysses", "a dilated pattern over stripes"),
        (WINDOW, striped(64, 4), (8, 8), "ulysses", "a block-sparse pattern over stripes"),
    ],
)
def test_auto_takes_the_scheme_that_moves_least_and_says_why(pattern, layout, heads, scheme, why):
    found = choose(Problem(pattern, layout, True, *heads))
    assert found.scheme == scheme and found.why.startswith(why)


@pytest.mark.parametrize(
    "pattern, layout, causal, scheme, said",
    [
        (PATTERNS[0], contiguous(N, 2), False, "ring", "'ring' does not serve block-sparse patterns; 'plan' and 'ulys"),
        (PATTERNS[0], zigzag(N, 2), True, "all_gather", "'all_gather' does not serve block-sparse patterns"),
        (PATTERNS[0], striped(N, 2), True, "plan", "a striped layout with dense attention only, not blocks of 8"),
        (PATTERNS[0], hilbert(1, N, 2), True, "plan", "not in time order"),
        (Dilated([4], [1]), striped(N, 2), True, "ring", "another layout, or ulysses"),
        (PATTERNS[0], contiguous(N, 4), True, "ulysses", "4 ranks are more than 2 heads"),
        (Dense(), contiguous(N, 2), True, "spiral", "unknown scheme 'spiral'; known: auto, plan, ring"),
    ],
)
def test_refusals_are_one_line(pattern, layout, causal, scheme, said):
    q, k, v, *_ = tensors(layout, 2, 2, 8, torch.float32, 0)
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        attention(q, k, v, pattern, causal=causal, group=Simulated(layout.ranks), scheme=scheme, layout=layout)


# ---------------------------------------------------------------------------------------------------------------------
# real processes over gloo


def test_gloo_ranks_are_the_simulated_ones():
    ranks, cases = 3, []
    for i, scheme in enumerate(SCHEMES):
        for layout, pattern in ((contiguous(37, ranks), Dilated([8, 20], [1, 3])), (zigzag(36, ranks), Dense()),
                                (hilbert(4, 9, ranks), Dilated([12], [2], "head_groups", "branch")),
                                (uneven([22, 37, 42]), PATTERNS[1]), (zigzag(N, ranks), PATTERNS[-1]),
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
    assert [[control for *_, control in each] for each in again] == [[2 * header] * 2] * ranks


ONE, OTHER = Dilated([12, 48], [1, 2]), Dilated([12, 48], [1, 2], offsets="block")
MASKS = [torch.eye(6, dtype=torch.bool) for _ in range(2)]
MASKS[1][0, 1] = True  # within a shard: the ranks need the same rows


@pytest.mark.parametrize(
    "calls, order, what",
    [
        ([[(ONE, False), (ONE, True)]], ((0, 1), (1, 0)), "causal is False on rank 0, True on rank 1"),
        ([[(ONE, False), (OTHER, False)]], ((0, 1), (1, 0)), f"pattern is {ONE} on rank 0, {OTHER} on rank 1"),
        ([[(ONE, False), (ONE, True)]], ((1, -2), (-2, 1)), "pass is forward on rank 0, backward on rank 1"),
        ([[(ONE, False)] * 2], ((-2, -1), (-1, -2)), "forward call is number 1 on rank 0, number 2 on rank 1"),
        ([[(block_patterns.from_mask(mask, block_size=SIZE), True)] for mask in MASKS], None,
         "pattern is blocks of 8: a given mask .* on rank 0, blocks of 8: a given mask .* on rank 1"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told(calls, order, what):
    """In calls that they have made before in one order (``order``), or at once."""
    for told in launch(mismatch, 2, calls, contiguous(48, 2), order, timeout_s=30.0):
        wanted = what if order is None else re.escape(what)
        assert re.fullmatch(f"ranks disagree about what is computed: {wanted}", told)


def test_a_rank_holds_little_more_than_its_shard():
    """Peak bytes of a forward by the bytes of a shard of q, k, v and out: what is received, and a piece at a time."""
    n, heads, d, ranks = 2048, 32, 64, 4
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


def test_compiled_and_checkpointed_steps_are_the_eager_one():
    """One graph; saving the operator's results replays no exchange, where plain checkpointing replays the forward."""
    for by_scheme in launch(compiled, 2, Dilated([8, 40], [1, 2]), contiguous(40, 2), ("plan", "ring")):
        for results, messages in by_scheme:
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other))
            eager, compiled_messages, plain, selective = messages
            assert eager == compiled_messages == selective < plain


def test_the_probe_of_a_kernel_is_no_part_of_the_first_call():
    q = torch.randn(1, 8, 4, 8, requires_grad=True)
    kernels.forget_probes()
    with LiveStorageTracker() as tracker:
        attention(q, q, q, Dense(), group=Simulated(2), scheme="plan")
    assert tracker.peak_bytes < 64 * q.nbytes
