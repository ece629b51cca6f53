"""The tile schedule of GPU kernels: it visits every visible pair as often as the
pattern says, and no tile in vain.
"""

import random

import pytest
import torch
from matrix import any_dilated
from ringlab import Dense, Dilated, block_patterns, cost
from ringlab.block_patterns import BlockSparse, Global, Segment, Window
from ringlab.kernels.tile_schedule import (
    BASE,
    COUNT,
    FIRST,
    HEAD,
    STRIDE,
    interval_rows,
    make_schedule,
    split,
)


def visits(schedule, tile: int):
    """(first position, rows, M, member, whether it is masked, whether by the band) of
    each tile that a tile visits, from its description.
    """
    *_, base, start, partial, full, masked = schedule.tiles[tile].tolist()
    for at in range(start, start + full + masked):
        first, packed = schedule.entries[at].tolist()
        mask = not partial <= at - start < partial + full
        near = schedule.band is not None and at - start >= partial + full
        first = -1 - first if schedule.band and first < 0 else base + first
        yield first, packed & 511, packed >> 9 & 255, packed >> 17, mask, near


def multiplicity(
    schedule, n: int, m: int, heads: int, kv_heads: int, causal: bool, by: str
) -> torch.Tensor:
    """M of every (head, query, key), int64 (heads, n, m), added up from the schedule."""
    found = torch.zeros(heads, n, m, dtype=torch.int64)
    for tile, (head, first, count, stride, *_) in enumerate(schedule.tiles.tolist()):
        mine = first + stride * torch.arange(count)
        for begin, rows, times, member, masked, near in visits(schedule, tile):
            other = begin + stride * torch.arange(rows)
            q, k = (mine, other) if by == "query" else (other, mine)
            seen = (
                k[None, :] <= q[:, None]
                if causal
                else torch.ones(len(q), len(k), dtype=torch.bool)
            )
            if near:
                before, after = schedule.band
                apart = other[None, :] - mine[:, None]
                near = (-before <= apart) & (apart <= after)
                seen = seen & (near if by == "query" else near.T)
            assert masked or (rows == schedule.cols and seen.all()), (
                "a full tile in which something is hidden"
            )
            assert seen.any(), "a visit in vain"
            h = head if by == "query" else head * (heads // kv_heads) + member
            found[h][q[:, None], k[None, :]] += times * seen
    return found


def of_tokens(rng: random.Random) -> BlockSparse:
    """Windows, first tokens and segments of tokens, in any union."""
    parts = [
        Window(rng.randint(0, 40), rng.choice([None, 0, 9])),
        Window(rng.randint(0, 5), 30),
        Global(
            rng.randint(1, 20),
            *rng.choice([(True, True), (False, True), (True, False)]),
        ),
        Segment(rng.randint(1, 30)),
        Segment(rng.choice([2, 8])),
    ]
    return BlockSparse(rng.sample(parts, rng.randint(1, 4)), 1)


def random_pattern(rng: random.Random, n: int):
    if rng.random() < 0.7:
        lengths = [8 * 2**i for i in range(rng.randint(1, 4))]
        return (
            any_dilated(rng)
            if rng.random() < 0.6
            else Dilated(lengths, [rng.choice([1, 2, 4, 8]) for _ in lengths])
        )
    if rng.random() < 0.3:
        return Dense()
    if rng.random() < 0.5:
        return of_tokens(rng)
    size = rng.randint(1, min(n, 20))
    count = -(-n // size)
    if rng.random() < 0.3:
        return block_patterns.from_mask(torch.rand(count, count) < 0.3, block_size=size)
    parts = (
        block_patterns.Window(rng.randint(0, 3)),
        block_patterns.Random(rng.randint(1, count), 1),
    )
    return block_patterns.BlockSparse(
        rng.sample([*parts, block_patterns.Global(1)], 2), size
    )


def test_schedules_visit_each_pair_as_often_as_the_pattern_says():
    rng = random.Random(0)
    torch.manual_seed(0)
    folded = 0
    for _ in range(60):
        kv_heads, n, causal = rng.randint(1, 3), rng.randint(1, 90), rng.random() < 0.5
        heads = kv_heads * rng.choice([1, 2, 3])
        pattern, x = random_pattern(rng, n), torch.arange(n)
        want = torch.stack(
            [
                pattern.multiplicity(x, x, n=n, head=h, heads=heads, kv_heads=kv_heads)
                for h in range(heads)
            ]
        )
        want = want * (x[None, :] <= x[:, None]) if causal else want
        sources = split(pattern, n, heads, kv_heads, rng.choice([1, 4, 16]))
        sizes = {
            "rows": rng.choice([2, 4, 16]),
            "cols": rng.choice([3, 4, 16]),
            "causal": causal,
        }
        for by, owners in (("query", heads), ("key", kv_heads)):
            found = torch.zeros_like(want)
            for source in sources:
                schedule = make_schedule(source, n, heads, kv_heads, by=by, **sizes)
                part = multiplicity(schedule, n, n, heads, kv_heads, causal, by)
                found += part
                folded += int((part > 1).sum())
                tiles = schedule.tiles.tolist()
                rows = [
                    (t[HEAD], t[FIRST] + t[STRIDE] * j)
                    for t in tiles
                    for j in range(t[COUNT])
                ]
                assert len(set(rows)) == len(rows), "a row owned twice"
                assert schedule.covered == (len(rows) == n * owners)
            assert torch.equal(found, want), (pattern, n, heads, kv_heads, by, sizes)
    assert folded > 1000


@pytest.mark.parametrize("causal, share", [(False, 0.786), (True, 0.928)])
def test_three_branches_in_one_launch_compute_fewer_pairs_than_apart(causal, share):
    pattern, n, heads = Dilated([2048, 4096, 8192], [1, 2, 4]), 65536, 16
    (source,) = split(pattern, n, heads, heads)
    pairs, distinct = cost.count_pairs(pattern, n, heads, causal=causal)
    for by in ("query", "key"):
        schedule = make_schedule(
            source, n, heads, heads, rows=128, cols=64, causal=causal, by=by
        )
        assert round(schedule.visits * 128 * 64 / pairs, 3) == share
        assert len(schedule.tiles) == heads * n // 128 and schedule.covered
        assert (
            len(schedule.entries) < 3000 and (schedule.tiles[:, BASE] > 0).any()
        )  # one period's, used again
    assert (
        causal or schedule.visits * 128 * 64 == distinct
    )  # without a causal edge nothing hidden is computed


def test_schedules_of_long_dense_sequences_stay_short():
    (source,) = split(Dense(), 1 << 20, 1, 1)
    schedule = make_schedule(source, 1 << 20, 1, 1, rows=128, cols=64, causal=True)
    assert (len(schedule.tiles), len(schedule.entries)) == (8192, 16385)
    assert schedule.visits == sum(2 * (i + 1) for i in range(8192))


def test_queries_and_keys_of_different_number():
    (source,) = split(Dense(), 50, 2, 1)
    for by in ("query", "key"):
        schedule = make_schedule(source, 50, 2, 1, rows=16, cols=16, by=by, keys=35)
        assert torch.equal(
            multiplicity(schedule, 50, 35, 2, 1, False, by),
            torch.ones(2, 50, 35, dtype=torch.int64),
        )
        assert schedule.covered


def test_branches_fold_while_their_pieces_stay_long():
    ladder = [8, 16, 32]
    assert [len(s) for s in split(Dilated(ladder, [1, 2, 4]), 64, 2, 2, rows=16)] == [
        1,
        1,
        1,
    ]
    (fold,) = split(Dilated([64 * w for w in ladder], [1, 2, 4]), 4096, 2, 2, rows=16)
    assert interval_rows(fold) == 128
    (groups,) = split(
        Dilated(ladder, [1, 3, 5], "head_groups"), 64, 3, 3, rows=16
    )  # a branch a head: one launch
    schedule = make_schedule(groups, 64, 3, 3, rows=16, cols=16)
    assert {(t[HEAD], t[STRIDE]) for t in schedule.tiles.tolist()} == {
        (0, 1),
        (1, 3),
        (2, 5),
    }


def test_what_does_not_fit_a_schedule_is_refused():
    (source,) = split(Dense(), 8, 1, 1)
    with pytest.raises(ValueError, match="positions must fit 32 bits"):
        make_schedule(source, 8, 1, 1, rows=16, cols=16, keys=1 << 31)
    with pytest.raises(ValueError, match="at most 255 branches"):
        make_schedule(
            split(Dilated([4] * 256, [1] * 256), 8, 1, 1, rows=1)[0],
            8,
            1,
            1,
            rows=16,
            cols=16,
        )
    with pytest.raises(ValueError, match="cannot serve 16384 query heads"):
        make_schedule(source, 8, 16384, 1, rows=16, cols=16, by="key")
