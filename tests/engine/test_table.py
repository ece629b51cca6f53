"""The table of tiles: it shows the pairs that lists, windows and documents name, and the
kernel that walks it computes attention to them.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from random_cases import seeds
from ringlab import Selected, attention, reference
from ringlab.block_patterns import bigbird
from ringlab.kernels.compiled import Walk
from ringlab.tiles.lists import Lists
from ringlab.tiles.table import VISIT


def random_lists(seed: int) -> tuple[Lists, torch.Tensor]:
    """Lists of two documents, and whether (heads, rows, keys) are seen."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads = choose.choice([1, 2])
    heads = kv_heads * choose.choice([1, 3])
    groups = choose.choice([1, kv_heads, heads])
    lengths = [choose.choice([1, 33, 200]), choose.choice([0, 70, 600])]
    late = min(
        choose.choice([0, 1, 200]), lengths[0] - 1
    )  # keys before the first query
    granularity = choose.choice([1, 3, 8, 16, 64])
    step = choose.choice([1, 5, 16, 24, 64, 100, 128])
    before = choose.choice([-1, -1, 0, 4, 90])
    causal, first = choose.random() < 0.5, choose.choice([0, 0, 1, 70])
    after = choose.choice([0, 7]) if before >= 0 and not causal else min(before, 0)
    counts = [lengths[0] - late, lengths[1]]
    number = [-(-length // granularity) for length in lengths]
    rows = [-(-count // step) for count in counts]
    listed = torch.zeros(groups, sum(rows), sum(number), dtype=torch.bool)
    slots = torch.rand(listed.shape, generator=generator) < choose.choice([0, 0.1, 0.6])
    listed[:, : rows[0], : number[0]] = slots[:, : rows[0], : number[0]]
    listed[:, rows[0] :, number[0] :] = slots[:, rows[0] :, number[0] :]
    pairs = listed.flatten(0, 1).nonzero()
    starts = torch.searchsorted(
        pairs[:, 0].contiguous(), torch.arange(len(slots) * sum(rows) + 1)
    )
    keys = sum(lengths)
    spans = torch.tensor([[0, lengths[0]], [lengths[0], keys]])
    queries = [[0, counts[0], late], [counts[0], counts[1], lengths[0]]]
    seen = torch.zeros(heads, sum(counts), keys, dtype=torch.bool)
    for document, (row, count, position) in enumerate(queries):
        start, stop = spans[document].tolist()
        at = position + torch.arange(count).unsqueeze(1)
        key = torch.arange(start, stop)
        block = sum(number[:document]) + (key - start) // granularity
        list_row = sum(rows[:document]) + torch.arange(count) // step
        near = (key >= at - before) & (key <= at + after) & (before >= 0)
        own = near | (key - start < first) | listed[:, list_row][:, :, block]
        own = own & ((key <= at) | (not causal))
        seen[:, row : row + count, start:stop] = own.repeat_interleave(
            heads // groups, 0
        )
    lists = Lists(
        spans,
        torch.tensor(queries),
        heads,
        kv_heads,
        causal,
        granularity,
        step,
        before,
        after,
        first,
        groups,
        pairs[:, 1],
        sum(number),
        torch.tensor([0, rows[0]]),
        starts,
    )
    return lists, seen


def multiplicity(table, shape: tuple[int, int, int], kv_heads: int) -> torch.Tensor:
    """M (heads, rows, keys): what a walk adds up of equal scores and one-hot values."""
    heads, rows, keys = shape
    q, k = torch.zeros(1, rows, heads, keys), torch.zeros(1, keys, kv_heads, keys)
    v = torch.eye(keys).view(1, keys, 1, keys).expand(k.shape).contiguous()
    out, lse = torch.empty(q.shape), torch.empty(1, heads, rows)
    Walk(table, 1.0).forward(q, k, v, out, lse)
    return out[0].transpose(0, 1).double() * lse[0].double().exp().unsqueeze(2)


def test_a_table_shows_each_pair_of_its_lists_once():
    for seed in seeds(40):
        lists, seen = random_lists(seed)
        found = multiplicity(lists.table(), seen.shape, lists.kv_heads)
        assert (found - seen.double()).abs().max() < 1e-4, seed


def walked(walk: Walk, q, k, v, dout, dlse):
    """out, lse and the gradients of q, k and v, in the layouts of tensors and dout."""
    out, lse = torch.empty(q.shape), torch.empty(1, q.shape[2], q.shape[1])
    walk.forward(q, k, v, out, lse)
    grads = [torch.zeros(t.shape) for t in (q, k, v)]
    walk.backward(dout, dlse, q, k, v, out, lse, grads)
    return out, lse, *grads


@pytest.mark.parametrize("head_dim", [8, 64, 20])
def test_a_walk_is_attention_to_what_the_table_shows(head_dim):
    """With M, sinks and a soft cap, for every number of threads in the same bits."""
    for seed in seeds(20):
        lists, seen = random_lists(seed)
        table = lists.table()
        torch.manual_seed(seed)
        table.visits[:, -1] = torch.rand(len(table.visits)).view(torch.int32)
        heads, rows, keys = seen.shape
        q, dout = torch.randn(2, 1, rows, heads, head_dim)
        k, v = torch.randn(2, 1, keys, lists.kv_heads, head_dim)
        dlse = torch.randn(1, heads, rows)
        softcap = 2.0 if seed % 2 else None
        sinks = torch.randn(heads) if seed // 2 % 2 else None
        walk = Walk(table, 0.2, softcap, sinks)
        found = walked(walk, q, k, v, dout, dlse)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        m = multiplicity(table, seen.shape, lists.kv_heads).unsqueeze(0)
        pattern = SimpleNamespace(multiplicity=lambda *_, head, m=m, **__: m[:, head])
        options = {"scale": 0.2, "softcap": softcap, "sinks": sinks}
        out, lse = reference.attention(*exact, pattern, **options)
        given = dout.double(), dlse.masked_fill(lse == -torch.inf, 0.0).double()
        grads = torch.autograd.grad((out, lse), exact, given)
        floor = reference.gradient_floor(q, k, dout, 0.2)
        for got, want, least in zip(found, (out, lse, *grads), (1, 1, *[floor] * 3)):
            assert reference.error(got, want, least) < 5e-6, seed
        before = torch.get_num_threads()
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            again = walked(walk, q, k, v, dout, dlse)
            torch.set_num_threads(before)
            assert all(map(torch.equal, found, again)), (seed, threads)


def test_a_block_pattern_of_any_size_is_lists_of_its_blocks():
    pattern, n = bigbird(block_size=16), 700
    row, block = pattern.seen(n)
    starts = torch.searchsorted(row, torch.arange(pattern.count(n) + 1))
    whole = torch.tensor([[0, n]]), torch.tensor([[0, n, 0]]), 1, 1, True
    options = {"granularity": 16, "query_block": 16, "blocks": pattern.count(n)}
    table = Lists(*whole, lists=block, starts=starts, **options).table()
    positions = torch.arange(n)
    want = pattern.multiplicity(positions, positions, head=0, heads=1, n=n)
    assert (multiplicity(table, (1, n, n), 1) - want.double().tril()).abs().max() < 1e-4
    # Blocks that neighbour each other are one visit, with a range for each list.
    assert len(table.visits) < len(block) / 2
    assert set(table.visits[:, VISIT.index("grain")].tolist()) == {16}


@pytest.mark.parametrize("window", [0, 9])
def test_a_document_has_the_same_bits_alone_and_packed(window):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 300, 2, 16)
    indices = torch.randint(-1, 4, (1, 2, 300, 3))
    first, second = indices[:, :, :140], indices[:, :, 140:]
    options = {"granularity": 32, "window": window}
    packed = attention(
        q, k, v, Selected(indices, **options), causal=True, cu_seqlens=[0, 140, 300]
    )
    for rows, lists in ((slice(0, 140), first), (slice(140, 300), second)):
        some = (t[:, rows] for t in (q, k, v))
        alone = attention(*some, Selected(lists, **options), causal=True)
        assert torch.equal(packed[:, rows], alone)


@pytest.mark.parametrize("granularity", [1, 16])
def test_a_key_that_is_no_number_reaches_the_queries_that_list_it_alone(granularity):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 64, 2, 16)
    k[:, 3], v[:, 3] = torch.nan, torch.nan
    indices = torch.randint(1, 64 // granularity, (1, 2, 64, 2))
    indices[indices == 3 // granularity] = -1
    indices[:, :, 50, 0] = 3 // granularity
    out = attention(q, k, v, Selected(indices, granularity))
    assert out[:, 50].isnan().all() and out.isnan().sum() == out[:, 50].numel()
