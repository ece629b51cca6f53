import random

import pytest
import torch
from matrix import BLOCK_SPARSE, any_dilated
from ringlab import Dense, Dilated, blocks, cost
from ringlab.advise import local
from ringlab.presets import ladder


def test_pairs_equal_the_multiplicity_matrix():
    rng = random.Random(0)
    for _ in range(150):
        n, kv_heads = rng.randint(1, 60), rng.randint(1, 4)
        heads = kv_heads * rng.choice([1, 2])
        p, causal, x = any_dilated(rng), rng.random() < 0.5, torch.arange(n)
        m = torch.stack(
            [
                p.multiplicity(x, x, head=h, heads=heads, kv_heads=kv_heads)
                for h in range(heads)
            ]
        )
        m = m * (x[None] <= x[:, None]) if causal else m
        assert cost.count_pairs(p, n, heads, kv_heads, causal) == (
            int(m.sum()),
            int((m > 0).sum()),
        ), p


def test_far_queries_equal_the_multiplicity_matrix():
    rng, found = random.Random(0), set()
    sparse = [
        *(p for p in BLOCK_SPARSE if not isinstance(p.parts[0], blocks.Given)),
        blocks.BlockSparse([blocks.Global(1, columns=False)], 4),  # most see nothing
        blocks.BlockSparse([blocks.Window(1, 3), blocks.Random(1)], 3),
        blocks.BlockSparse([blocks.Coarse(3, 9), blocks.Segment(5, 2)], 2),
    ]
    for i in range(600):
        n, kv_heads = rng.randint(1, 90), rng.randint(1, 4)
        heads, causal = kv_heads * rng.choice([1, 2]), rng.random() < 0.5
        p = [any_dilated(rng), any_dilated(rng, 180), Dense(), rng.choice(sparse)][
            i % 4
        ]
        x = torch.arange(n)
        away = x[:, None] - x[None, :]  # (n, n), keys before the query are positive
        away = (away if causal else away.abs()) >= n // 2
        how = {"heads": heads, "kv_heads": kv_heads, "n": n}
        seen = sum(p.multiplicity(x, x, head=h, **how) for h in range(heads)) > 0
        want = int((seen & away).any(1).sum())
        assert cost.far_queries(p, n, heads, kv_heads, causal) == want, (p, n)
        found.add((type(p), causal, (want > 0) + (want == n)))
    for kind in (Dilated, blocks.BlockSparse):
        assert {(kind, False, x) for x in (0, 1, 2)} <= found


def test_far_queries_of_given_masks_and_of_several_chunks():
    given = blocks.from_mask(torch.eye(5, dtype=torch.bool).flip(0), block_size=4)
    assert cost.far_queries(given, 20, 1) == 8 + 2 + 2  # block 1 sees 3, and 3 sees 1
    hidden = blocks.from_mask(torch.zeros(1, 1, dtype=torch.bool), block_size=64)
    assert cost.far_queries(hidden, 64, 1) == 0
    rows = blocks.BlockSparse([blocks.Global(1, columns=False)], 2)
    assert cost.far_queries(rows, 600, 1) == 2  # later chunks see nothing at all
    n = 2048 * 300  # of 300 blocks: the first sees all, the last 150 see the first
    assert cost.far_queries(blocks.local_global(1, 1, block_size=2048), n, 1) == (
        n // 2 + 2048
    )


def test_far_queries_of_longnet_and_of_windows_at_a_million_tokens():
    for heads, shares in ((8, (1, 8, 32, 64)), (32, (1, 2, 8, 16))):
        lengths = 8192, 131072, 524288, 2**20
        for n, share in zip(lengths, shares):
            assert cost.far_queries(ladder(n), n, heads) == n // share
    n = 2**20
    assert cost.far_queries(Dense(), n, 8) == n
    assert cost.far_queries(Dense(), n, 8, causal=True) == n // 2
    assert cost.far_queries(local(n), n, 8) == 0  # a window alone
    assert cost.far_queries(ladder(2**40), 2**40, 8) == 8 * 2048


def test_branches_that_do_not_nest_are_counted_or_refused():
    lengths, rates = (
        [30, 42, 70, 8, 12, 90, 51],
        [4, 3, 5, 8, 5, 7, 2],
    )  # 8 divides 30 and 42 in neither way
    p, x = Dilated(lengths, rates, offsets="kv_head"), torch.arange(700)
    m = p.multiplicity(x, x, head=0, heads=1)
    assert cost.count_pairs(p, 700, 1) == (int(m.sum()), int((m > 0).sum()))
    long = Dilated(
        [2048 << i for i in range(25)], [1 << i for i in range(25)]
    )  # nested, over 2**36 positions
    pairs, distinct = cost.count_pairs(long, 2**36, 1)
    assert distinct == pairs - sum(2**36 * 2048 >> i + 2 for i in range(24))
    odd = Dilated([2 * i + 101 for i in range(25)], [1 + i % 7 for i in range(25)])
    with pytest.raises(
        ValueError,
        match="^25 branches that do not nest have too many pairs in common[^\n]*$",
    ):
        cost.count_pairs(odd, 8192, 8)


def test_flops_and_bytes_by_hand():
    shape = dict(
        batch=2, seq_len=64, heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16
    )
    forward = cost.count(Dense(), **shape)
    assert forward.pairs == 2 * 4 * 64 * 64
    assert forward.flops == forward.folded_flops == 4 * 16 * forward.pairs
    assert forward.floor_bytes == 2 * 64 * 16 * (4 + 2 + 2 + 4) * 2
    both = cost.count(Dense(), **shape, passes="fwd+bwd")
    assert both.flops == 14 * 16 * forward.pairs  # two products forward, five backward
    assert both.floor_bytes == 2 * forward.floor_bytes
    causal = cost.count(Dense(), **shape, causal=True)
    assert causal.pairs == 2 * 4 * 64 * 65 // 2


def test_published_configuration():
    """Document 000: 8192 tokens, 8 heads of 64 in two groups: 25.8 GFLOP, so at least
    2.9 ms at 8.87 TFLOP/s.
    """
    pattern = Dilated([2048, 4096], [1, 2], "head_groups", "branch")
    c = cost.count(
        pattern, batch=1, seq_len=8192, heads=8, head_dim=64, dtype=torch.float32
    )
    assert c.seconds(8.87e12, 320e9) == pytest.approx(2.905e-3, rel=1e-3)
    assert c.seconds(None, 320e9) == c.floor_bytes / 320e9
    assert c.seconds(None, None) == 0.0


def test_times_and_sizes_are_never_in_exponent_form():
    times = [2e-9, 2.5e-7, 9.999e-4, 0.0213, 0.9999, 1.0, 999.4, 999.6, 86400.0]
    said = [
        "0.002 µs",
        "0.25 µs",
        "1,000 µs",
        "21.3 ms",
        "1,000 ms",
        "1 s",
        "16.7 min",
        "16.7 min",
        "24 h",
    ]
    assert [cost.format_seconds(x) for x in times] == said
    sizes = [
        7,
        1536,
        660.8 * 2**20,
        1.002 * 2**30,
        9999.4 * 2**30,
        9999.6 * 2**30,
        2**50,
    ]
    said = [
        "7 B",
        "1.5 KiB",
        "660.8 MiB",
        "1.002 GiB",
        "9999 GiB",
        "10,000 GiB",
        "1,048,576 GiB",
    ]
    assert [cost.format_bytes(x) for x in sizes] == said
