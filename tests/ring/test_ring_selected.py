"""Attention to selected keys across ranks: the answer of one device, and the bytes of
the closed form.
"""

import pytest
import torch
from random_cases import seeds
from ringlab import Selected, Simulated, attention, reference
from ringlab.ring import contiguous, counting
from ringlab.ring.launch import launch
from selected_cases import (
    errors,
    of_this_rank,
    rank_call,
    refused_on_one_rank,
    spans,
    weights_of,
)


def blocks_seen(q, k, pattern: Selected, options: dict, layout) -> tuple[list, list]:
    """All blocks as (batch entry, first position, end); and for each rank the (block,
    K/V head) that its queries see something of, from M.
    """
    (b, n, heads, _), kv_heads, size = q.shape, k.shape[2], pattern.granularity
    every, seen, row = [], [set() for _ in range(layout.ranks)], 0
    for entry, first, stop in spans(b, n, options):
        number = -(-(stop - first) // pattern.query_block)
        own = pattern.rows(slice(entry, entry + 1), slice(row, row + number))
        row += number if "cu_seqlens" in options else 0
        at = torch.arange(stop - first)
        starts = range(first, stop, size)
        blocks = [(entry, a, min(a + size, stop)) for a in starts]
        every += blocks
        for head in range(heads if blocks else 0):
            m = own.multiplicity(at, at, head=head, heads=heads)[0] > 0
            m = m & (at <= at[:, None]) if options["causal"] else m
            for rank in range(layout.ranks):
                rows = layout.ranges(rank)[0]
                mine = m[max(0, rows.start - first) : max(0, rows.stop - first)].any(0)
                for block in blocks:
                    if mine[block[1] - first : block[2] - first].any():
                        seen[rank].add((block, head * kv_heads // heads))
    return every, seen


def bytes_sent(q, k, blocks, seen, layout, rank: int) -> tuple[int, int]:
    """What a rank sends in the forward, and in the backward after it: a byte for each
    block and K/V head that it might ask for, each row of k and v that is asked for once,
    and its gradient back, in fp32 or wider.
    """
    ranges = [layout.ranges(other)[0] for other in range(layout.ranks)]

    def inside(block, other) -> int:
        own = ranges[other]
        return max(0, min(block[2], own.stop) - max(block[1], own.start))

    others = [other for other in range(layout.ranks) if other != rank]
    asks = sum(inside(block, other) > 0 for other in others for block in blocks)
    given = sum(inside(block, rank) for other in others for block, _ in seen[other])
    taken = sum(inside(block, other) for other in others for block, _ in seen[rank])
    row = 2 * q.shape[3] * q.element_size()
    return asks * k.shape[2] + given * row, taken * row


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_give_the_answer_of_one_device_for_the_bytes_of_the_closed_form(
    ranks, weighed
):
    some = seeds(12)
    cases = [case for seed in some if (case := rank_call(seed, ranks, weighed))]
    documents = [case for case in cases if {"cu_seqlens", "lengths"} & {*case[2]}]
    assert len(cases) >= len(some) // 3 and len(documents) >= len(some) // 8
    for tensors, pattern, options, layout in cases:
        sinks = torch.linspace(-1, 1, tensors[0].shape[2], dtype=torch.float64)
        options = options | {"sinks": sinks}
        group = {"group": Simulated(ranks), "layout": layout}
        with counting() as there:
            attention(*tensors, pattern, **group, **options)
        with counting() as both:
            found = errors(tensors, pattern, options, **group)
        assert max(found.values()) <= 1e-12, (str(pattern), found)
        blocks, seen = blocks_seen(*tensors[:2], pattern, options, layout)
        for rank in range(ranks):
            first, later = bytes_sent(*tensors[:2], blocks, seen, layout, rank)
            sent = there.from_rank(rank), both.from_rank(rank)
            assert sent == (first, first + later)


@pytest.mark.parametrize("weighed", [False, True])
def test_processes_give_the_answer_of_one_device(weighed):
    seeds = [seed for seed in range(120) if rank_call(seed, 3, weighed)][:12]
    assert any("cu_seqlens" in rank_call(seed, 3, weighed)[2] for seed in seeds)
    by_rank = launch(_all, 3, [(seed, weighed) for seed in seeds])
    for number, seed in enumerate(seeds):
        tensors, pattern, options, layout = rank_call(seed, 3, weighed)
        whole = [t.clone().requires_grad_() for t in tensors]
        out, lse = attention(*whole, pattern, return_lse=True, **options)
        (out * weights_of(out)).sum().backward()
        right = out, lse, *(t.grad for t in whole)
        floor = reference.gradient_floor(
            *tensors[:2], weights_of(out), options["scale"]
        )
        for i, want in enumerate(right):
            got = torch.cat([each[number][i] for each in by_rank], 2 if i == 1 else 1)
            assert reference.error(got, want, 1.0 if i < 2 else floor) <= 1e-12


def test_all_ranks_are_told_where_one_of_them_is_refused():
    """And the next call runs."""
    for told, out in launch(refused_on_one_rank, 2, None):
        assert told == [
            "PlanMismatch: rank 1 refuses what the others compute: ValueError: indices"
            " must be below the 8 blocks of 1 keys, got 9 in row 0",
            "PlanMismatch: ranks disagree about what is computed: groups is 1 on rank 0,"
            " 2 on rank 1",
        ]
        assert torch.equal(out, torch.ones_like(out))


def test_shards_that_cut_a_list_or_do_not_fit_are_refused():
    q = torch.ones(1, 24, 1, 8)
    lists = Selected(torch.zeros(1, 1, 4, 1, dtype=torch.int64), query_block=8)
    with pytest.raises(ValueError, match="shards must begin where 8 queries"):
        options = {"cu_seqlens": [0, 5, 24], "group": Simulated(2)}
        attention(q, q, q, lists, **options)
    with pytest.raises(ValueError, match="the layout has 16 positions here, q has 24"):
        attention(q, q, q, lists, group=Simulated(2), layout=contiguous(16, 2))


def test_transforms_over_a_group_are_refused():
    q = torch.ones(1, 8, 1, 8)
    lists = Selected(torch.zeros(1, 1, 8, 1, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="does not support torch.func"):
        torch.func.grad(lambda x: attention(x, x, x, lists, group=Simulated(2)).sum())(
            q
        )


def _all(calls):
    return [of_this_rank(*call) for call in calls]
