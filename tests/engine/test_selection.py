"""What MoBA, NSA, DSA and vertical-slash choose, beside loops that follow the papers."""

import random

import pytest
import torch
from refusals import refused
from ringlab import Dense, Selected, attention, reference, selection


def tensors(choose: random.Random, n: int):
    """q, k, v in float64 with shared K/V heads."""
    kv_heads = choose.choice([1, 2])
    heads, batch = kv_heads * choose.choice([1, 3]), choose.choice([1, 2])
    shapes = [(batch, n, h, 8) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def cases(count: int):
    """(q, k, v), and the generator of what else is drawn, for lengths of all kinds."""
    torch.manual_seed(0)
    for seed in range(count):
        choose = random.Random(seed)
        yield tensors(choose, choose.choice([1, 5, 16, 33, 64, 100])), choose


def sets(pattern: Selected) -> dict:
    """The blocks of each (batch, group, row), each at most once."""
    listed = pattern.indices
    found = {}
    for at in torch.cartesian_prod(*map(torch.arange, listed.shape[:3])).tolist():
        blocks = [x for x in listed[tuple(at)].tolist() if x >= 0]
        assert len({*blocks}) == len(blocks)
        found[tuple(at)] = {*blocks}
    return found


def best(scores: dict[int, float], number: int, always=()) -> set[int]:
    order = sorted(scores, key=lambda x: (x not in always, -scores[x]))
    return {*order[:number]}


@pytest.fixture(params=[1 << 21, 64], ids=["whole", "pieces"])
def pieces(request, monkeypatch):
    monkeypatch.setattr(selection, "PIECE", request.param)


@pytest.mark.usefixtures("pieces")
def test_moba_chooses_the_own_block_and_those_with_the_best_mean():
    for (q, k, _), choose in cases(12):
        size, top_k = choose.choice([1, 4, 16]), choose.choice([1, 2, 5])
        found = sets(selection.moba(q, k, block_size=size, top_k=top_k))
        for (b, h, t), blocks in found.items():
            keys = k[b, :, h * k.shape[2] // q.shape[2]]
            means = [x.mean(0) for x in keys.split(size)][: t // size + 1]
            scores = {i: float(q[b, t, h] @ mean) for i, mean in enumerate(means)}
            assert blocks == best(scores, top_k, [t // size])


@pytest.mark.usefixtures("pieces")
def test_dsa_chooses_the_keys_with_the_best_scores_of_the_indexer():
    for (q, k, _), choose in cases(12):
        k, weights, top_k = (
            k[:, :, :1],
            torch.randn_like(q[..., 0]),
            choose.choice([1, 7]),
        )
        found = sets(selection.dsa(q, k, weights, top_k=top_k))
        for (b, _, t), keys in found.items():
            each = (q[b, t] @ k[b, : t + 1, 0].T).relu()  # (heads, keys)
            scores = dict(enumerate((weights[b, t] @ each).tolist()))
            # Equal scores, as of keys that no head likes: any of them.
            least = sorted(scores.values())[-min(top_k, t + 1)]
            assert len(keys) == min(top_k, t + 1)
            assert {i for i, x in scores.items() if x > least + 1e-12} <= keys
            assert all(scores[i] >= least - 1e-12 for i in keys)


def test_vertical_slash_takes_the_lines_that_the_last_queries_see():
    for (q, k, _), choose in cases(40):
        q = 3 * q  # queries that see few keys
        n, size, last = q.shape[1], choose.choice([4, 16]), choose.choice([1, 8, 200])
        lines = {"vertical": choose.choice([1, 2]), "slash": choose.choice([1, 3])}
        choice = selection.vertical_slash(q, k, block_size=size, last=last, **lines)
        assert (choice.granularity, choice.query_block) == (size, size)
        seen = reference.weights(q, k, Dense(), causal=True)  # (b, h, n, n)
        for b, h in torch.cartesian_prod(*map(torch.arange, seen.shape[:2])).tolist():
            down, along = ({x: 0.0 for x in range(-(-n // size))} for _ in range(2))
            for t in range(max(0, n - last), n):
                for s in range(t + 1):
                    down[s // size] += float(seen[b, h, t, s])
                    along[(t - s) // size] += float(seen[b, h, t, s])
            down = best(down, lines["vertical"], [0])
            along = best(along, lines["slash"], [0])
            for row, listed in enumerate(choice.indices[b, h].tolist()):
                wanted = {x for x in down if x <= row}
                wanted |= {row - x - more for x in along for more in (0, 1)}
                assert {x for x in listed if x >= 0} == {x for x in wanted if x >= 0}


def naive_nsa(q, k, v, gates, size: int, top_k: int, window: int):
    """NSA by its paper, query by query, and the blocks that it selects."""
    (b, n, heads, d), kv_heads = q.shape, k.shape[2]
    out, chosen = torch.zeros_like(q), {}
    rows = []
    for i in range(b):
        for t in range(n):
            for group in range(kv_heads):
                share = heads // kv_heads
                whole, own = (t + 1) // size, t // size
                pooled = [
                    x[i, : whole * size, group].unflatten(0, (whole, size)).mean(1)
                    if whole
                    else x[i, :0, group]
                    for x in (k, v)
                ]
                many = q[i, t, group * share : (group + 1) * share]  # (share, d)
                weight = (d**-0.5 * many @ pooled[0].T).softmax(1)
                shares = weight.detach().sum(0).tolist() + [0.0]
                scores = dict(enumerate(shares[: own + 1]))
                blocks = best(scores, top_k, [0, own, own - 1])
                chosen[i, group, t] = blocks
                keys = torch.arange(t + 1)
                listed = sum(keys // size == x for x in blocks).bool()
                parts = [weight @ pooled[1]]
                for seen in (listed, keys > t - window):
                    some = [x[i, : t + 1, group][seen] for x in (k, v)]
                    parts.append((d**-0.5 * many @ some[0].T).softmax(1) @ some[1])
                gate = gates[i, t, group * share : (group + 1) * share]  # (share, 3)
                rows.append(sum(gate[:, x, None] * y for x, y in enumerate(parts)))
    return torch.stack(rows).view(out.shape), chosen


def test_nsa_and_its_gradients_are_the_sum_of_its_three_parts():
    for (q, k, v), choose in cases(12):
        q = 4 * q  # heads that prefer few blocks
        gates = torch.rand(*q.shape[:3], 3, dtype=torch.float64)
        size, top_k = choose.choice([2, 2, 16]), choose.choice([3, 8])
        options = {"block_size": size, "top_k": top_k}
        ours, theirs = (
            [t.clone().requires_grad_() for t in (q, k, v, gates)] for _ in range(2)
        )
        out = selection.nsa(*ours, window=9, **options)
        right, chosen = naive_nsa(*theirs, size, top_k, 9)
        assert sets(selection.nsa_blocks(q, k, **options)) == chosen
        assert reference.error(out, right, 1.0) <= 1e-12
        dout = torch.randn_like(out)
        for x in (out, right):
            x.backward(dout)
        for t, exact in zip(ours, theirs):
            assert reference.error(t.grad, exact.grad, 0.1) <= 1e-12


@pytest.mark.usefixtures("pieces")
def test_scores_that_are_equal_or_not_finite_leave_no_slot_empty_and_none_twice():
    q = torch.ones(1, 64, 2, 8)
    for value in (0.0, torch.inf, -torch.inf, torch.nan):
        k = torch.full((1, 64, 1, 8), value)
        weights = torch.full((1, 64, 2), -1.0)
        for choice, size in (
            (selection.moba(q, k, block_size=8, top_k=3), 8),
            (selection.nsa_blocks(q, k, block_size=8, top_k=3), 8),
            (selection.dsa(q, k, weights, top_k=3), 1),
        ):
            for (_, _, t), blocks in sets(choice).items():
                assert len(blocks) == min(3, t // size + 1)
                assert max(blocks) <= t // size


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_always_taken_is_so_whatever_the_scores_are(value):
    """A block whose score is NaN comes after all others."""
    q, k = torch.rand(1, 64, 2, 8), torch.rand(1, 64, 1, 8)
    k[:, 8:16] = value  # the second block of 8
    for choice, always in (
        (selection.moba(q, k, block_size=8, top_k=1), lambda t: {t // 8}),
        (
            selection.nsa_blocks(q, k, block_size=8, top_k=3),
            lambda t: {0, max(t // 8 - 1, 0), t // 8},
        ),
        (
            selection.vertical_slash(q, k, block_size=8, vertical=1, slash=1),
            lambda row: {0, row},
        ),
    ):
        for row in range(choice.indices.shape[2]):
            for blocks in choice.indices[0, :, row].tolist():
                assert always(row) <= {*blocks}
    if value != value:
        weights = torch.ones(1, 64, 2)
        for choice, number in (
            (selection.moba(q, k, block_size=8, top_k=3), 1),
            (selection.nsa_blocks(q, k, block_size=8, top_k=4), 1),
            (selection.dsa(q, k, weights, top_k=20), range(8, 16)),
        ):
            late = choice.indices[:, :, 40:]
            assert not torch.isin(late, torch.tensor(number)).any()


def test_padding_reaches_no_gradient_whoever_chose():
    q, k, v = (torch.randn(2, 40, h, 8) for h in (2, 1, 1))
    padding = torch.arange(40) >= torch.tensor([[29], [0]])
    tensors = [t.masked_fill(padding[:, :, None, None], torch.nan) for t in (q, k, v)]
    for choose in (
        selection.moba,
        selection.nsa_blocks,
        selection.vertical_slash,
        lambda q, k, **_: selection.dsa(q, k, torch.ones(q.shape[:3]), top_k=5),
    ):
        pattern = choose(*tensors[:2], block_size=4)
        results = []
        for given in ((q, k, v), tensors):
            leaves = [t.clone().requires_grad_() for t in given]
            out = attention(*leaves, pattern, causal=True, lengths=[29, 0])
            dout = torch.ones_like(out)
            dout[padding] = given[0][padding]
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
        assert all(map(torch.equal, *results))


def test_half_precision_is_scored_in_float32():
    q, k = (torch.randn(1, 128, 2, 8) for _ in range(2))
    q, k = q.bfloat16(), k.bfloat16()
    for choose in (selection.moba, selection.nsa_blocks, selection.vertical_slash):
        half, wide = (
            choose(*x, block_size=8) for x in ((q, k), (q.float(), k.float()))
        )
        with torch.autocast("cpu"):
            under = choose(q.float(), k.float(), block_size=8)
        for other in (half, under):
            assert torch.equal(
                other.indices.sort(3).values, wide.indices.sort(3).values
            )


def test_what_does_not_fit_is_refused():
    q, gates = torch.randn(1, 32, 4, 8), torch.rand(1, 32, 4, 3)
    k, weights = q[:, :, :1], gates[..., 0]
    for choose, given, how in (
        (selection.moba, (q, k[:, :16]), {}),
        (selection.moba, (q, k), {"block_size": 0}),
        (selection.moba, (q, k), {"top_k": 0}),
        (selection.nsa_blocks, (q, k), {"top_k": 2}),
        (selection.nsa, (q, k, k, gates[..., :2]), {}),
        (selection.nsa, (q, k, k, gates), {"window": None}),
        (selection.dsa, (q, q, weights), {"top_k": 4}),
        (selection.dsa, (q, k, weights[:, :, :1]), {"top_k": 4}),
        (selection.dsa, (q, k, weights), {"top_k": 0}),
        (selection.vertical_slash, (q, k), {"last": 0}),
        (selection.vertical_slash, (q, k), {"slash": 0}),
    ):
        with refused(ValueError):
            choose(*given, **how)
    with refused(TypeError):
        selection.moba(q, None)


@pytest.mark.parametrize("at", [16, 47, 60, 69])
def test_a_key_that_is_not_finite_changes_no_earlier_row_of_nsa(at):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 70, h, 8, generator=generator) for h in (4, 2, 2))
    gates = torch.rand(2, 70, 4, 3, generator=generator)
    sizes = {"block_size": 16, "top_k": 3, "window": 20}
    clean = selection.nsa(q, k, v, gates, **sizes)
    k = k.clone()
    k[:, at] = float("nan")
    out = selection.nsa(q, k, v, gates, **sizes)
    assert reference.error(out[:, :at], clean[:, :at], 1.0) <= 1e-6
    assert out[:, at].isnan().all()
