"""Documents across ranks: each is the answer that it has alone, wherever shards cut it."""

import random
from dataclasses import replace

import pytest
import torch
from document_cases import drawn_case, wrong
from matrix import BLOCK_SPARSE, DILATED, Case
from random_cases import seeds
from ring_cases import as_simulated, borders_disagreed
from ringlab import BlockSparse, Dense, Execution, Simulated, attention
from ringlab.ring import SCHEMES, Layout, contiguous, counting, uneven, zigzag
from ringlab.ring.launch import launch


def split_case(rng: random.Random, ranks: int) -> Case:
    """Documents over so many ranks."""
    while True:
        case = drawn_case(rng)
        schemes = (
            ["plan", "ulysses"]
            if isinstance(case.pattern, BlockSparse)
            else list(SCHEMES)
        )
        scheme = rng.choice(schemes)
        if case.n >= 2 * ranks and (scheme != "ulysses" or case.heads >= ranks):
            break
    most = case.n // ranks
    sizes = uneven([0] + [most] * (ranks - 2) + [case.n - most * (ranks - 2)])
    layout = rng.choice([contiguous(case.n, ranks), zigzag(case.n, ranks), sizes])
    return replace(case, execution=Execution(), layout=layout, scheme=scheme)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_document_is_attended_as_if_it_stood_alone(ranks):
    rng = random.Random(ranks)
    for i in seeds(6):
        case = replace(split_case(rng, ranks), sinks=i % 3 == 0)
        assert not (missed := wrong(case)), (case, missed)


@pytest.mark.parametrize("pattern", [Dense(), DILATED[0], BLOCK_SPARSE[0]], ids=str)
@pytest.mark.parametrize("layout", [contiguous(96, 3), zigzag(96, 3)], ids=str)
def test_a_document_inside_a_shard_moves_nothing_and_one_that_is_cut_what_it_moves_alone(
    pattern, layout
):
    q, k, v = (torch.randn(1, 96, 4, 8, requires_grad=True) for _ in range(3))

    def sent(*some, **how):
        with counting() as traffic:
            attention(
                *some, pattern, group=Simulated(3), scheme="plan", causal=True, **how
            ).sum().backward()
        return [traffic.from_rank(rank) for rank in range(3)]

    edges = sorted(
        {
            edge
            for rank in range(3)
            for part in layout.ranges(rank)
            for edge in (part.start, part.stop)
        }
    )
    within = sorted({*edges, *(edge + 5 for edge in edges[:-1])})
    assert sent(q, k, v, layout=layout, cu_seqlens=within) == [0, 0, 0]
    borders, alone = [0, 20, 41, 90, 96], [0, 0, 0]
    for a, b in zip(borders, borders[1:]):
        part = Layout(
            layout.kind, tuple(min(max(cut, a), b) - a for cut in layout.cuts)
        )
        if sum(size > 0 for size in part.sizes) > 1:
            moved = sent(
                *(t[:, a:b].detach().requires_grad_() for t in (q, k, v)), layout=part
            )
            alone = [x + y for x, y in zip(alone, moved)]
    assert sent(q, k, v, layout=layout, cu_seqlens=borders) == alone and sum(alone) > 0


def test_gloo_ranks_are_the_simulated_ones():
    rng = random.Random(0)
    as_simulated([split_case(rng, 3) for _ in seeds(2)])


def test_ranks_whose_borders_differ_are_told():
    told = launch(borders_disagreed, 2, [[0, 4, 16], [0, 5, 16]])
    assert all(
        "ranks disagree about what is computed: borders is" in said for said in told
    ), told


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how, message",
    [
        (
            {"layout": Layout("contiguous", (0, 8))},
            "is for 1 ranks|the layout has 8 positions here, q has 16",
        ),
        (
            {"layout": "striped"},
            "need a contiguous or zigzag layout, not a striped one",
        ),
        ({"layout": "spiral"}, "unknown layout 'spiral'"),
        ({"scheme": "rings"}, "unknown scheme 'rings'"),
    ],
)
def test_what_does_not_fit_is_refused_whatever_the_documents(ranks, how, message):
    q, end = (
        torch.zeros(1, 16, 2, 8),
        8 if isinstance(how.get("layout"), Layout) else 16,
    )
    with pytest.raises(ValueError, match=message):
        attention(
            q, q, q, Dense(), group=Simulated(ranks), cu_seqlens=[0, 4, end], **how
        )


def test_borders_met_first_in_inference_can_be_trained_on():
    q = torch.randn(1, 16, 2, 8)
    with torch.inference_mode():
        attention(q, q, q, DILATED[0], group=Simulated(2), cu_seqlens=[0, 5, 16])
    q.requires_grad_()
    attention(
        q, q, q, DILATED[0], group=Simulated(2), cu_seqlens=[0, 5, 16]
    ).sum().backward()
    assert q.grad.norm() > 0
