"""The table of tiles: it shows the pairs that lists, windows and documents name, and the
kernel that walks it computes attention to them.
"""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from matrix import F32, Case, all_wrong
from random_cases import seeds
from ringlab import Dense, Dilated, Selected, attention, blocks, cost, reference
from ringlab.engine.execute import merge
from ringlab.kernels.compiled import Walk
from ringlab.patterns import OFFSETS
from ringlab.tiles import dilated
from ringlab.tiles.lists import Lists
from ringlab.tiles.patterns import tables_of
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
    out, lse = torch.zeros(q.shape), torch.full((1, heads, rows), -torch.inf)
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


def random_pattern(choose: random.Random):
    """Dense, a window, blocks or branches, of which many nest."""
    kind = choose.choice(["dense", "window", "blocks", "nested", "nested", "branches"])
    if kind == "dense":
        return Dense()
    if kind == "window":
        return blocks.sliding_window(tokens=choose.choice([1, 2, 33, 300]))
    if kind == "blocks":
        size = choose.choice([1, 3, 8, 16, 20, 48, 67, 128])
        parts = [
            blocks.Window(choose.randint(0, 3), choose.choice([None, 0])),
            blocks.Strided(choose.randint(1, 4)),
            blocks.Segment(choose.randint(1, 5), choose.randint(1, 2)),
            blocks.Global(choose.randint(1, 3)),
            blocks.Random(choose.randint(1, 3)),
            blocks.Coarse(choose.randint(1, 3), choose.randint(1, 4)),
        ]
        return blocks.BlockSparse(choose.sample(parts, choose.randint(1, 3)), size)
    number = choose.randint(1, 4)
    if kind == "nested":
        lengths = [choose.choice([8, 12, 16, 32])]
        rates = [choose.choice([1, 1, 1, 2])]
        for _ in range(number - 1):
            lengths.append(lengths[-1] * choose.choice([1, 2, 3, 4]))
            rates.append(rates[-1] * choose.choice([1, 2, 2, 4]))
    else:
        lengths = [choose.choice([3, 10, 64, 100, 333]) for _ in range(number)]
        rates = [choose.randint(1, min(length, 9)) for length in lengths]
    rates = [min(rate, length) for rate, length in zip(rates, lengths)]
    names = choose.choice(["lse", "lse", "head_groups"]), choose.choice([*OFFSETS])
    return Dilated(lengths, rates, *names)


@pytest.mark.parametrize("rows", [4, 64])
def test_the_tables_of_a_pattern_show_its_multiplicities(rows, monkeypatch):
    """With so few rows and gain that branches are folded and have tables of their own."""
    for name, value in {"NESTED": 2, "FEWEST": rows, "ROWS": 64, "GAIN": 1.1}.items():
        monkeypatch.setattr(dilated, name, value)
    tables = 0
    for seed in seeds(60):
        choose = random.Random(seed)
        pattern, causal = random_pattern(choose), choose.random() < 0.5
        kv_heads = choose.choice([1, 2])
        heads = kv_heads * choose.choice([1, 3])
        borders = sorted(choose.choices(range(300), k=choose.choice([0, 0, 3])))
        borders = [0, *borders, 300]
        spans = [(a, b) for a, b in pairwise(borders) if a < b]
        plan = tables_of(pattern, (1, 300, heads, 300, kv_heads), causal, spans)
        tables = max(tables, len(plan.tables))
        shape = heads, 300, 300
        found = sum(multiplicity(table, shape, kv_heads) for table in plan.tables)
        want = torch.zeros(shape, dtype=torch.float64)
        for start, stop in spans:
            at = torch.arange(stop - start)
            options = {"n": stop - start, "heads": heads, "kv_heads": kv_heads}
            for head in range(heads):
                m = pattern.multiplicity(at, at, head=head, **options).double()
                want[head, start:stop, start:stop] = m.tril() if causal else m
        assert (found - want).abs().max() < 1e-4, seed
        once = tables_of(pattern, (1, 300, heads, 300, kv_heads), causal, spans, True)
        assert len(once.tables) == 1
        found = multiplicity(once.tables[0], shape, kv_heads)
        assert (found - want).abs().max() < 1e-4, seed
    assert tables > 1


def test_nested_branches_are_computed_once(monkeypatch):
    """Each pair of a query and a key that any branch shows is in one visit."""
    monkeypatch.setattr(dilated, "GAIN", 1.0)
    for pattern in (
        Dilated([2048, 4096, 8192], [1, 2, 4]),
        Dilated([2048, 8192], [1, 4], offsets="block"),
        Dilated([512, 8192], [2, 4]),
    ):
        table = tables_of(pattern, (1, 8192, 8, 8192, 8), False).tables[0]
        columns = table.visits.long()
        pairs = columns[:, VISIT.index("rows")] * columns[:, VISIT.index("keys")]
        before = torch.cat([pairs.new_zeros(1), pairs.cumsum(0)])
        start, stop = table.tiles[:, -2:].long().unbind(1)
        assert (
            int((before[stop] - before[start]).sum())
            == (cost.count_pairs(pattern, 8192, 8)[1])
        )


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
        k, v = torch.randn(2, 1, keys, lists.kv_heads, 20)
        other_k, other_v = torch.randn(2, 1, keys, lists.kv_heads, 20)
        walk = Walk(table, 0.2, softcap, torch.randn(heads) if seed % 2 else None)
        more = replace(walk, sinks=None)
        out, lse = torch.full(q.shape, torch.nan), torch.empty(1, heads, rows)
        other = torch.empty(q.shape), torch.empty(1, heads, rows)
        walk.forward(q, k, v, out, lse)
        more.forward(q, other_k, other_v, *other)
        parts = (
            [t.double() for t in (out, other[0])],
            [t.double() for t in (lse, other[1])],
        )
        want, want_lse = merge(*parts)
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
