"""Across ranks besides the values: what moves, what is read, what is refused; and ranks
that are processes.
"""

import re
from dataclasses import replace

import pytest
import torch
from matrix import BF16, BLOCK, BLOCK_SPARSE, F32, LADDER, NAMES, Case, drawn, fits
from ring_cases import (
    as_simulated,
    compiled,
    mismatch,
    parity,
    peaks_of_a_shard,
    two_meshes,
    without_private_names,
)
from ringlab import Simulated, attention, block_patterns, kernels
from ringlab.patterns import Dense, Dilated
from ringlab.ring import (
    SCHEMES,
    Problem,
    contiguous,
    counting,
    hilbert,
    plan_rank,
    striped,
    uneven,
    zigzag,
)
from ringlab.ring.launch import launch
from ringlab.tracking import LiveStorageTracker

SIZE, N = (
    BLOCK,
    101,
)  # the last block is short, and no number of ranks divides the sequence
PATTERNS = BLOCK_SPARSE


@pytest.mark.parametrize("pattern", [LADDER, Dense(), PATTERNS[0]], ids=str)
def test_one_rank_is_the_local_result_bit_for_bit(pattern):
    case = Case(pattern, N, F32, causal=True, d=8)
    want = case.run(*drawn(case))
    with counting() as traffic:
        found = replace(case, layout=contiguous(N, 1)).run(*drawn(case))
    assert (
        all(torch.equal(found[name], t) for name, t in want.items())
        and traffic.total == 0
    )


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "plan"])
def test_half_precision_is_rounded_once(scheme):
    """However many ranks add to a result: their parts are summed in fp32.

    By the eager kernel, which rounds nothing else; torch's own rounds the weights too,
    on CPUs with products in bf16.
    """
    q, k, v = drawn(Case(Dense(), 512, BF16, heads=2))[0]
    exact = attention(q.double(), k.double(), v.double(), Dense())
    rounding = (exact.bfloat16().double() - exact).norm()
    out = attention(
        q, k, v, Dense(), group=Simulated(16), scheme=scheme, backend="eager"
    )
    assert (out.double() - exact).norm() <= 1.3 * rounding


def test_forward_derivatives_are_refused():
    q = torch.zeros(1, 8, 2, 8)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode"),
    ):
        attention(q, q, q, Dense(), group=Simulated(2))
    with pytest.raises(NotImplementedError, match="does not support torch.func"):
        torch.func.grad(
            lambda q: attention(q, q, q, Dense(), group=Simulated(2)).sum()
        )(q)


# --------------------------------------------------------------------------------------
# what moves, what is chosen, what is refused


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dense_schemes_move_their_closed_forms(ranks):
    """Bytes of K and V shards; gradients of bf16 travel in fp32, twice as long."""
    layout = contiguous(16 * ranks, ranks)
    dense = Case(
        Dense(), layout.n, BF16, heads=2, d=8, lse_cotangent=False, layout=layout
    )
    given, shard = drawn(dense), 16 * 2 * 2 * 8 * 2  # K and V in bf16, 2 heads of 8

    def shards_sent(causal, scheme, backward=False):
        case = replace(dense, causal=causal, scheme=scheme)
        with counting() as traffic:
            case.run(*given) if backward else case.call(*given[0])
        return [traffic.from_rank(r) / shard for r in range(ranks)]

    for scheme, more in (("ring", 1 + 2), ("all_gather", 1 + 2), ("plan", 2)):
        assert shards_sent(False, scheme) == [ranks - 1] * ranks, scheme
        assert (
            shards_sent(False, scheme, backward=True)
            == [(ranks - 1) * (1 + more)] * ranks
        ), scheme
    assert shards_sent(True, "ring") == [*range(1, ranks), 0], (
        "no hop that no query needs"
    )


@pytest.mark.parametrize(
    "pattern, layout, causal, scheme, said",
    [
        (
            PATTERNS[0],
            contiguous(N, 2),
            False,
            "ring",
            "'ring' does not serve block-sparse patterns; 'plan' and 'ulys",
        ),
        (
            PATTERNS[0],
            zigzag(N, 2),
            True,
            "all_gather",
            "'all_gather' does not serve block-sparse patterns",
        ),
        (
            PATTERNS[0],
            striped(N, 2),
            True,
            "plan",
            "a striped layout with dense attention only, not blocks of 8",
        ),
        (PATTERNS[0], hilbert(1, N, 2), True, "plan", "not in time order"),
        (Dilated([4], [1]), striped(N, 2), True, "ring", "another layout, or ulysses"),
        (
            Dense(),
            contiguous(N, 2),
            True,
            "spiral",
            "unknown scheme 'spiral'; known: auto, plan, ring",
        ),
    ],
)
def test_refusals_are_one_line(pattern, layout, causal, scheme, said):
    case = Case(
        pattern, layout.n, F32, causal, heads=2, d=8, layout=layout, scheme=scheme
    )
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        case.call(*drawn(case)[0])


# --------------------------------------------------------------------------------------
# real processes over gloo


def test_gloo_ranks_are_the_simulated_ones():
    ranks, cases = 3, []
    for i, scheme in enumerate(SCHEMES):
        for layout, pattern in (
            (contiguous(37, ranks), Dilated([8, 20], [1, 3])),
            (zigzag(36, ranks), Dense()),
            (hilbert(4, 9, ranks), Dilated([12], [2], "head_groups", "branch")),
            (uneven([22, 37, 42]), PATTERNS[1]),
            (zigzag(N, ranks), PATTERNS[-1]),
            (striped(N, ranks), PATTERNS[0]),
        ):
            if not fits(pattern, layout, False, scheme):
                continue
            causal = layout.grid is None and i % 2 == 0
            cases.append(
                Case(
                    pattern,
                    layout.n,
                    causal=causal,
                    d=8,
                    seed=i,
                    lse_cotangent=i % 2 == 1,
                    sinks=len(cases) % 3 == 0,
                    layout=layout,
                    scheme=scheme,
                )
            )
    everyone = as_simulated(cases)
    copied = launch(parity, ranks, cases, "cpu", True)
    for (found, *_), (want, *_) in zip(sum(copied, []), sum(everyone, []), strict=True):
        assert all(torch.equal(found[name], want[name]) for name in NAMES)
    again, header = (
        launch(parity, ranks, cases[:1] * 2),
        24 * (ranks - 1),
    )  # to each other rank, in each pass
    names = 8 * (ranks - 1)  # of machines, told once
    assert [[control for *_, control in each] for each in again] == [
        [2 * header + names, 2 * header]
    ] * ranks


ONE, OTHER = Dilated([12, 48], [1, 2]), Dilated([12, 48], [1, 2], offsets="block")
MASKS = [torch.eye(6, dtype=torch.bool) for _ in range(2)]
MASKS[1][0, 1] = True  # within a shard: the ranks need the same rows


@pytest.mark.parametrize(
    "calls, order, what",
    [
        (
            [[(ONE, False), (ONE, True)]],
            ((0, 1), (1, 0)),
            "causal is False on rank 0, True on rank 1",
        ),
        (
            [[(ONE, False), (OTHER, False)]],
            ((0, 1), (1, 0)),
            f"pattern is {ONE} on rank 0, {OTHER} on rank 1",
        ),
        (
            [[(ONE, False), (ONE, True)]],
            ((1, -2), (-2, 1)),
            "pass is forward on rank 0, backward on rank 1",
        ),
        (
            [[(ONE, False), (ONE, False, torch.zeros(2))]],
            ((0, 1), (1, 0)),
            "sinks is False on rank 0, True on rank 1",
        ),
        (
            [[(ONE, False, None, 1.0), (ONE, False, None, 2.0)]],
            ((0, 1), (1, 0)),
            "softcap is 1.0 on rank 0, 2.0 on rank 1",
        ),
        (
            [[(ONE, False)] * 2],
            ((-2, -1), (-1, -2)),
            "forward call is number 1 on rank 0, number 2 on rank 1",
        ),
        (
            [
                [(block_patterns.from_mask(mask, block_size=SIZE), True)]
                for mask in MASKS
            ],
            None,
            "pattern is blocks of 8: a given mask .* on rank 0, blocks of 8: a given mask .* on rank 1",
        ),
    ],
)
def test_ranks_that_disagree_are_told(calls, order, what):
    """In calls that they have made before in one order (``order``), or at once."""
    for told in launch(mismatch, 2, calls, contiguous(48, 2), order, timeout_s=30.0):
        wanted = what if order is None else re.escape(what)
        assert re.fullmatch(f"ranks disagree about what is computed: {wanted}", told)


def test_a_rank_holds_little_more_than_its_shard():
    """Peak bytes of a forward by the bytes of a shard of q, k, v and out: what is
    received, and a piece at a time.
    """
    n, heads, d, ranks = 2048, 32, 64, 4
    ladder = Dilated([n // 4, n], [1, 4])
    cases = [(Dense(), "ring"), (Dense(), "all_gather"), (ladder, "plan")]
    shard = 4 * 4 * n // ranks * heads * d
    for rank, peaks in enumerate(launch(peaks_of_a_shard, ranks, cases, n, heads, d)):
        ring, gathered, planned = (peak / shard for peak in peaks)
        plan = plan_rank(
            Problem(ladder, contiguous(n, ranks), False, heads, heads), rank
        )
        moved = 4 * 2 * d * (sum(plan.sent) + sum(plan.received)) / shard
        assert (
            ring <= 2.1
            and gathered <= 1.1 * (2 + 2 * ranks) / 4
            and planned <= 1.3 + moved
        ), (peaks, shard, moved)


def test_process_groups_are_found_without_private_functions():
    case = Case(
        Dilated([8, 24], [1, 2]),
        24,
        causal=True,
        heads=2,
        d=8,
        layout=contiguous(24, 2),
        scheme="plan",
    )
    for one, other in launch(without_private_names, 2, case):
        assert all(torch.equal(one[name], other[name]) for name in NAMES)


def test_a_mesh_of_two_sequences():
    cases = [
        Case(
            Dilated([8, 24], [1, 2]),
            24,
            causal=True,
            d=8,
            seed=seed,
            layout=contiguous(24, 2),
            scheme="plan",
        )
        for seed in (7, 8)
    ]
    found = launch(two_meshes, 4, cases)
    for data, case in enumerate(cases):
        got, want = (
            case.joined([each for which, each in found if which == data]),
            case.run(*drawn(case)),
        )
        assert all(torch.equal(got[name], want[name]) for name in NAMES)


def test_compiled_and_checkpointed_steps_are_the_eager_one():
    """One graph; saving the operator's results replays no exchange, where plain
    checkpointing replays the forward.
    """
    case = Case(
        Dilated([8, 40], [1, 2]), 40, F32, d=8, seed=3, layout=contiguous(40, 2)
    )
    for by_scheme in launch(
        compiled, 2, [replace(case, scheme=scheme) for scheme in ("plan", "ring")]
    ):
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
