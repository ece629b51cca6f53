"""Blocks chosen by content, across ranks: the one-device S bit for bit, its answer, and
what moves for it.
"""

import pytest
import torch
from content_cases import SIZE, TOP_K, D, chosen, content, forward, step, tensors
from ring_cases import content_disagreed
from ringlab import (
    Adaptive,
    AdaptiveBlockSparse,
    Simulated,
    adaptive_attention,
    reference,
)
from ringlab.adaptive import choose
from ringlab.ring import counting
from ringlab.ring.launch import launch

KINDS = (
    "means",
    "z",
    "scorer",
)  # what chooses: the means, a z that is given, a scorer that trains


def compared(got, want, given, kind):
    floor, forward = (
        reference.gradient_floor(given[0], given[1], given[-2]),
        1 if kind == "scorer" else 2,
    )
    return [
        reference.error(a, b, 1.0 if i < forward else floor)
        for i, (a, b) in enumerate(zip(got, want))
    ]


def foreign(picks, kv_heads, ranks, causal):
    """By (rank, owner): the (batch entry, K/V head, block) that a rank's queries see of
    another's, from S by definition.
    """
    b, heads, blocks, _ = picks.shape
    share, found = blocks // ranks, {}
    for *at, i in torch.cartesian_prod(*map(torch.arange, (b, heads, blocks))).tolist():
        for j in picks[(*at, i)][: i + 1 if causal else None].tolist():
            if i // share != j // share:
                found.setdefault((i // share, j // share), set()).add(
                    (at[0], at[1] * kv_heads // heads, j)
                )
    return found


def expected_bytes(shape, ranks, picks, kind, causal, dtype, backward):
    """What every rank sends: summaries once, requests, chosen blocks once, and their
    gradients.
    """
    (b, h, kv, blocks), seen = shape, foreign(picks, shape[2], ranks, causal)
    share, wide = blocks // ranks, 4 if dtype.itemsize < 4 else dtype.itemsize
    summaries, row = b * share * (h + kv) * D * wide, 2 * SIZE * D
    sent = []
    for me in range(ranks):
        given, taken = (
            sum(len(s) for pair, s in seen.items() if pair[i] == me) for i in (1, 0)
        )
        times = (kind != "z") + (kind == "scorer" and backward)
        sent.append(
            (ranks - 1) * (times * summaries + b * share * kv)
            + given * row * dtype.itemsize
            + taken * row * wide * backward
        )
    return sent


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_is_the_same_bit_for_bit(dtype, causal):
    """Also where memory lies otherwise, and where logits are equal or differ by their
    rounding alone.
    """
    generator = torch.Generator().manual_seed(1)
    for heads, kv_heads, ranks, share, d in (
        (2, 1, 4, 1, 24),
        (4, 4, 3, 5, 8),
        (3, 1, 2, 16, 40),
        (1, 1, 5, 2, 1),
    ):
        n = ranks * share * SIZE
        q, k = (
            torch.randn(2, n, h, d, generator=generator).to(dtype)
            for h in (heads, kv_heads)
        )
        near = k[:, :1] + 1e-7 * torch.randn(k.shape, generator=generator).to(dtype)
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)]
        for pair in (
            (q, k),
            turned,
            (q, near),
            (q.round(), k.round()),
            (q, torch.ones_like(k)),
        ):
            pattern, group = Adaptive(SIZE, min(TOP_K, ranks * share)), Simulated(ranks)
            found, whole = (
                choose(*pair, pattern, causal=causal, group=x) for x in (group, None)
            )
            assert torch.equal(found.indices, whole.indices)
            one, many = (
                AdaptiveBlockSparse(d, SIZE, pattern.top_k, group=x)
                for x in (None, group)
            )
            assert torch.equal(one.logits(*pair, causal), many.logits(*pair, causal))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_summaries_once_and_chosen_blocks_once(kind):
    cases = (
        (3, (2, 4, 2, 9), True, torch.float64),
        (2, (1, 2, 1, 8), False, torch.bfloat16),
    )
    for ranks, shape, causal, dtype in cases:
        given = tensors(shape, kind, dtype)
        with counting() as both:
            step(given, kind, causal, Simulated(ranks))
        with counting() as once, torch.no_grad():
            forward(given[:-2], kind, causal, Simulated(ranks))
        for traffic, backward in ((once, False), (both, True)):
            want = expected_bytes(
                shape, ranks, chosen(given, kind, causal), kind, causal, dtype, backward
            )
            assert [traffic.from_rank(r) for r in range(ranks)] == want and min(
                want
            ) > 0


def test_gloo_ranks_are_the_simulated_ones():
    ranks = 3
    cases = [
        ((2, 4, 2, 9), kind, causal, torch.float64)
        for kind in KINDS
        for causal in (False, True)
    ]
    everyone = launch(content, ranks, cases)
    for i, (shape, kind, causal, dtype) in enumerate(cases):
        given = tensors(shape, kind, dtype)
        want = step(given, kind, causal, Simulated(ranks))
        parts = [[each[i][0][part] for each in everyone] for part in range(len(want))]
        dims = [1, 1, 1, 1, None, None] if kind == "scorer" else [1, 2, 1, 1, 1, 2]
        got = [
            sum(p) if dim is None else torch.cat(p, dim) for p, dim in zip(parts, dims)
        ]
        assert max(found := compared(got, want, given, kind)) <= 1e-12, found
        assert (
            max(found := compared(got, step(given, kind, causal, None), given, kind))
            <= 1e-12
        ), found
        sent = expected_bytes(
            shape, ranks, chosen(given, kind, causal), kind, causal, dtype, True
        )
        assert [each[i][1] for each in everyone] == sent


def test_ranks_that_disagree_are_told():
    two, three = Adaptive(8, 2), Adaptive(8, 3)
    half = Adaptive(8, 2, top_p=0.5)
    z, wrong = (1, 2, 2, 4), (1, 2, 2, 5)
    cases = [  # by rank
        ((2, two, z), (2, three, z)),
        ((2, two, z), (2, half, z)),
        ((2, half, None), (2, two, None)),
        ((2, two, z), (2, two, wrong)),
        ((2, two, None), (3, two, None)),
        ((2, two, None), (2, two, z)),
    ]
    best = "blocks of 8: the best 2 by content"
    say = f"{best}, up to a share of 0.5"
    said = (
        f"pattern is {best} on rank 0, blocks of 8: the best 3 by content on rank 1",
        f"pattern is {best} on rank 0, {say} on rank 1",
        f"pattern is {say} on rank 0, {best} on rank 1",
        "rank 1 refuses what the others compute: ValueError: z must be (batch, heads, blocks, blocks) = (1, 2, 2, 4),"
        " floats on cpu; got (1, 2, 2, 5), torch.float32 on cpu",
        "layout is contiguous:0,16,32 on rank 0, contiguous:0,24,48 on rank 1; shards of unequal sizes need a"
        " ringlab.ring.Layout",
        "z is False on rank 0, True on rank 1",
    )
    first, second = launch(content_disagreed, 2, cases)
    assert first == second and all(map(str.endswith, first, said))


def test_one_rank_is_the_local_result_bit_for_bit():
    for kind in KINDS:
        given = tensors((2, 4, 2, 5), kind, torch.float32)
        with counting() as traffic:
            got = step(given, kind, True, Simulated(1))
        assert (
            all(map(torch.equal, got, step(given, kind, True, None)))
            and traffic.total == 0
        )


def test_shards_and_logits_that_do_not_fit_are_one_line():
    q = torch.zeros(1, 48, 2, 8)
    with pytest.raises(ValueError, match="^q and k must agree in seq, got 48 and 40$"):
        adaptive_attention(q, q[:, :40], q[:, :40], Adaptive(8, 2))
    for group, z, why in (
        (
            Simulated(5),
            None,
            r"^every rank needs equally many whole blocks of 8, got n = 48 on 5 ranks$",
        ),
        (
            Simulated(3),
            torch.zeros(1, 2, 2, 6),
            r"^z must be .*blocks, blocks\) = \(1, 2, 6, 6\)",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            adaptive_attention(q, q, q, Adaptive(8, 2), z, group=group)
