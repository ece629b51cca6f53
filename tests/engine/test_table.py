"""The table of tiles: it shows the pairs that lists, windows and documents name, and the
kernel that walks it computes attention to them.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from matrix import BF16, F32, Case, all_wrong
from random_cases import seeds
from ringlab import Dense, Dilated, Selected, attention, blocks, cost, reference
from ringlab.engine.execute import merge
from ringlab.engine.walk import backward, forward
from ringlab.kernels.compiled import Walk
from ringlab.patterns import OFFSETS
from ringlab.tiles import dilated
from ringlab.tiles.lists import Lists
from ringlab.tiles.patterns import tables_of
from ringlab.tiles.table import VISIT, shown


def random_lists(seed: int) -> tuple[Lists, torch.Tensor]:
    """Lists of two documents, and whether (heads, rows, keys) are seen."""
    torch.manual_seed(seed)
    choose = random.Random(seed)
    pick = choose.choice
    kv_heads = pick([1, 2, 4])
    heads = kv_heads * pick([1, 3])
    groups = pick([1, math.gcd(kv_heads, 2), kv_heads, heads])
    lengths = [pick([1, 33, 200]), pick([0, 70, 600])]
    late = min(pick([0, 1, 200]), lengths[0] - 1)  # keys before the first query
    granularity = pick([1, 3, 8, 16, 64])
    step = pick([1, 5, 16, 24, 64, 100, 128])
    before = pick([-1, -1, 0, 4, 90])
    causal, first = choose.random() < 0.5, pick([0, 0, 1, 70])
    after = pick([0, 7]) if before >= 0 and not causal else min(before, 0)
    counts = [lengths[0] - late, lengths[1]]
    number = [-(-length // granularity) for length in lengths]
    rows = [-(-count // step) for count in counts]
    listed = torch.zeros(groups, sum(rows), sum(number), dtype=torch.bool)
    slots = torch.rand(listed.shape) < pick([0, 0.1, 0.6])
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


def test_a_table_shows_each_pair_of_its_lists_once():
    for seed in seeds(40):
        lists, seen = random_lists(seed)
        m, _ = shown(lists.table(), (1, *seen.shape))
        assert torch.equal(m[0], seen.double()), seed


def test_keys_are_seen_where_their_blocks_are_held():
    for seed in seeds(20):
        lists, seen = random_lists(seed)
        size = lists.granularity
        # (blocks,), the first position of each
        starts = torch.cat([torch.arange(*x, size) for x in lists.spans.tolist()])
        held = size * torch.randperm(len(starts))
        table = replace(lists, held=held).table()
        found, _ = shown(table, (1, *seen.shape[:2], int(held.max()) + size))
        position = torch.arange(seen.shape[2])
        block = torch.searchsorted(starts, position, right=True) - 1
        where = held[block] + position - starts[block]
        assert torch.equal(found[0, :, :, where], seen.double()), seed
        assert found.sum() == seen.sum()


def random_pattern(choose: random.Random):
    """Dense, a window, blocks or branches, of which many nest, or nearly."""
    pick, draw = choose.choice, choose.randint
    kind = pick(["dense", "window", "blocks", "blocks", "nested", "nested", "branches"])
    if kind == "dense":
        return Dense()
    if kind == "window":
        return blocks.sliding_window(tokens=pick([1, 2, 33, 300]))
    if kind == "blocks":
        size = pick([1, 3, 8, 16, 20, 48, 67, 128])
        parts = [
            blocks.Window(draw(0, 3), pick([None, 0])),
            blocks.Strided(draw(1, 4)),
            blocks.Segment(draw(1, 5), draw(1, 2)),
            blocks.Global(draw(1, 3)),
            blocks.Random(draw(1, 3)),
            blocks.Coarse(draw(1, 3), draw(1, 4)),
        ]
        return blocks.BlockSparse(choose.sample(parts, draw(1, 3)), size)
    number = draw(1, 4)
    if kind == "nested":
        lengths = [pick([8, 12, 16, 32])]
        rates = [pick([1, 1, 2])]
        for _ in range(number - 1):
            lengths.append(lengths[-1] * pick([2, 3, 4, 8]) // 2)
            rates.append(rates[-1] * pick([2, 3, 4, 4, 8]) // 2)
    else:
        lengths = [pick([3, 10, 64, 100, 333]) for _ in range(number)]
        rates = [draw(1, min(length, 9)) for length in lengths]
    rates = [min(rate, length) for rate, length in zip(rates, lengths)]
    names = pick(["lse", "lse", "head_groups"]), pick([*OFFSETS])
    return Dilated(lengths, rates, *names)


def cut_small(monkeypatch, fewest: int) -> None:
    """So few rows and gain that branches are folded and have tables of their own."""
    sizes = {"NESTED": 2, "FEWEST": fewest, "ROWS": 64, "GAIN": 1.1}
    for name, value in sizes.items():
        monkeypatch.setattr(dilated, name, value)


@pytest.mark.parametrize("rows", [4, 64])
def test_the_tables_of_a_pattern_show_its_multiplicities(rows, monkeypatch):
    cut_small(monkeypatch, rows)
    most = [0, 0]
    for seed in seeds(80):
        choose = random.Random(seed)
        pick = choose.choice
        pattern, causal = random_pattern(choose), choose.random() < 0.5
        kv_heads = pick([1, 2])
        heads = kv_heads * pick([1, 3])
        places = range(0, 304, pick([1, 38]))
        borders = choose.choices(places, k=pick([0, 0, 3, 5]))
        spans = [*pairwise(sorted({0, *borders, 304}))]
        shape = 1, heads, 304, 304
        want = torch.zeros(shape, dtype=torch.float64)
        for start, stop in spans:
            at = torch.arange(stop - start)
            options = {"n": stop - start, "heads": heads, "kv_heads": kv_heads}
            for head in range(heads):
                m = pattern.multiplicity(at, at, head=head, **options).double()
                want[0, head, start:stop, start:stop] = m.tril() if causal else m
        for once in (False, True):
            call = pattern, (1, 304, heads, 304, kv_heads), causal, spans, once
            plan = tables_of(*call).tables
            found = sum(shown(table, shape)[0] for table in plan)
            assert (found - want).abs().max() < 1e-6, (seed, once)
            most[once] = max(most[once], len(plan))
    assert most[0] > most[1] == 1


def as_pattern(table, shape: tuple[int, ...]):
    """What a table shows, as ``reference`` asks a pattern."""
    m, _ = shown(table, (1, *shape))
    return SimpleNamespace(multiplicity=lambda *_, head, **__: m[:, head])


def test_the_reference_is_computed_from_a_table():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 300, 2, 16)
    for pattern in (blocks.bigbird(block_size=16), Dilated([128, 256], [1, 2])):
        (table,) = tables_of(pattern, (1, 300, 2, 300, 2), True).tables
        want = reference.attention(q, k, v, pattern, causal=True)
        found = reference.attention(q, k, v, as_pattern(table, (2, 300, 300)))
        assert all(reference.error(*pair, 1) < 1e-6 for pair in zip(found, want))


def random_table(seed: int):
    """The table of lists, or of a pattern, with log M; its (heads, rows, keys), and K/V
    heads.
    """
    if seed % 3:
        lists, seen = random_lists(seed)
        table, shape, kv_heads = lists.table(), seen.shape, lists.kv_heads
    else:
        shape, kv_heads = (6, 300, 300), 2
        sizes = 1, 300, 6, 300, kv_heads
        pattern = random_pattern(random.Random(1000 + seed))
        table = tables_of(pattern, sizes, seed % 2 == 0).tables[0]
    torch.manual_seed(seed)
    table.visits[:, -1] = torch.rand(len(table.visits)).view(torch.int32)
    return table, shape, kv_heads


def walked(walk: Walk, q, k, v, dout, dlse):
    """out, lse and the gradients of q, k and v."""
    out, lse = forward([walk], q, k, v, covered=False)
    return out, lse, *backward([walk], dlse, (dout, q, k, v, out, lse))


@pytest.mark.parametrize("head_dim", [8, 64, 20])
def test_a_walk_is_attention_to_what_the_table_shows(head_dim, monkeypatch):
    """With M, sinks and a soft cap, for every number of threads in the same bits."""
    cut_small(monkeypatch, 4)
    for seed in seeds(20):
        table, (heads, rows, keys), kv_heads = random_table(seed)
        q, dout = torch.randn(2, 1, rows, heads, head_dim)
        k, v = torch.randn(2, 1, keys, kv_heads, head_dim)
        dlse = torch.randn(1, heads, rows)
        softcap = 2.0 if seed % 2 else None
        sinks = torch.randn(heads) if seed % 3 == 1 else None  # every row is in a tile
        walk = Walk(table, 0.2, softcap, sinks)
        found = walked(walk, q, k, v, dout, dlse)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        pattern = as_pattern(table, (heads, rows, keys))
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


def test_nested_branches_are_computed_once(monkeypatch):
    """Each pair of a query and a key that any branch shows is in one visit."""
    monkeypatch.setattr(dilated, "GAIN", 1.0)
    for pattern in (
        Dilated([512, 1024, 1024], [1, 2, 4]),
        Dilated([512, 1024], [1, 4], offsets="block"),
        Dilated([512, 1024], [2, 4]),
    ):
        table = tables_of(pattern, (1, 1024, 4, 1024, 4), False).tables[0]
        table.visits[:, VISIT.index("log_m")] = 0
        m, _ = shown(table, (1, 4, 1024, 1024))
        assert m.max() == 1 and m.sum() == cost.count_pairs(pattern, 1024, 4)[1]


def test_odd_ranges_of_keys_and_a_second_table():
    """bf16 is multiplied in pairs of keys; rates of which none divides the other."""
    odd = Case(blocks.bigbird(block_size=17), 150, BF16)
    assert not all_wrong([odd, Case(Dilated([12, 24], [2, 3]), 99, F32)])


@pytest.mark.parametrize("n, size", [(1, 128), (5, 128), (150, 67)])
def test_few_rows_of_many_heads_see_blocks(n, size):
    """Rows of each head stand in columns of their own."""
    pattern = blocks.BlockSparse([blocks.Window(1)], size)
    assert not all_wrong([Case(pattern, n, F32, heads=32, kv_heads=2, d=16)])


def test_lists_of_blocks_that_neighbour_each_other_are_one_visit():
    """With a range for each list."""
    pattern = blocks.bigbird(block_size=16)
    table = tables_of(pattern, (1, 700, 1, 700, 1), True).tables[0]
    assert len(table.visits) < len(pattern.seen(700)[0]) / 2
    assert set(table.visits[:, VISIT.index("grain")].tolist()) == {16}


@pytest.mark.parametrize("window", [0, 9])
def test_a_document_has_the_same_bits_alone_and_packed(window):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 300, 2, 16)
    indices = torch.randint(-1, 4, (1, 2, 300, 3))
    options = {"granularity": 32, "window": window}
    packed = attention(
        q, k, v, Selected(indices, **options), causal=True, cu_seqlens=[0, 140, 300]
    )
    for rows in (slice(0, 140), slice(140, 300)):
        some = (t[:, rows] for t in (q, k, v))
        own = Selected(indices[:, :, rows], **options)
        alone = attention(*some, own, causal=True)
        assert torch.equal(packed[:, rows], alone)


def test_bits_depend_on_no_other_list():
    """Of a tile of few rows, whose keys are many."""
    q, k, v = torch.randn(3, 1, 2080, 1, 8)
    indices = torch.zeros(1, 1, 2080, 1).long()
    want = attention(q, k, v, Selected(indices, 2048))
    indices[:, :, -1] = 1
    out = attention(q, k, v, Selected(indices, 2048))
    assert torch.equal(out[:, :-1], want[:, :-1])


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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_walk_continues_the_result_of_another_one(softcap):
    """As two results are merged by their log-sum-exps: also rows that saw nothing, and
    log M. Gradients of the second walk are added to those of the first.
    """
    for seed in seeds(20):
        lists, seen = random_lists(seed)
        table = lists.table()
        torch.manual_seed(seed)
        table.visits[:, -1] = torch.rand(len(table.visits)).view(torch.int32)
        heads, rows, keys = seen.shape
        q, dout = torch.randn(2, 1, rows, heads, 20)
        k, v, other_k, other_v = torch.randn(4, 1, keys, lists.kv_heads, 20)
        walk = Walk(table, 0.2, softcap, torch.randn(heads) if seed % 2 else None)
        more = replace(walk, sinks=None)
        out, lse = torch.full(q.shape, torch.nan), torch.empty(1, heads, rows)
        other = torch.empty(q.shape), torch.empty(1, heads, rows)
        walk.forward(q, k, v, out, lse)
        more.forward(q, other_k, other_v, *other)
        want, want_lse = merge(
            [t.double() for t in (out, other[0])], [t.double() for t in (lse, other[1])]
        )
        out[:, :1], lse[..., :1] = torch.nan, -torch.inf  # as if nothing was there
        want[:, :1], want_lse[..., :1] = other[0][:, :1], other[1][..., :1]
        more.forward(q, other_k, other_v, out, lse, merge=True)
        assert reference.error(out, want, 1) < 2e-6, seed
        assert reference.error(lse, want_lse, 1) < 2e-6, seed
        one, two = ([torch.zeros(t.shape) for t in (q, k, v)] for _ in range(2))
        walk.backward(dout, None, q, k, v, out, lse, one)
        more.backward(dout, None, q, other_k, other_v, out, lse, two)
        total = one[0] + two[0]
        more.backward(
            dout, None, q, other_k, other_v, out, lse, [one[0], *two[1:]], add=True
        )
        assert reference.error(one[0], total, 1) < 2e-6, seed
