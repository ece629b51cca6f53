"""Attention to selected keys against the reference: by queries, by keys, by choice."""

import random

import pytest
import torch
from ringlab import Dense, KVCache, Selected, Simulated, attention, blocks, reference
from ringlab.engine import selected

ORDERS = {
    "chosen": selected.parts,
    "by keys": lambda call, kernel: selected.parts_by_keys(call),
    "by list": lambda call, kernel: selected.parts_by_queries(
        call, call.pattern.query_block
    ),
    "by tile": lambda call, kernel: selected.parts_by_queries(
        call, 3 * call.pattern.query_block
    ),
}


def borders(choose: random.Random, n: int) -> list[int]:
    return [0, *sorted(choose.choices(range(n + 1), k=choose.randint(0, 3))), n]


def random_call(seed: int, dtype=torch.float64) -> tuple:
    """q, k, v, a pattern and the options of a call: duplicates, empty slots and rows,
    keys after the query, documents.
    """
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, kv_heads = choose.choice([1, 7, 33, 64, 100, 130]), choose.choice([1, 2, 3])
    heads, batch = kv_heads * choose.choice([1, 2, 4]), choose.choice([1, 2])
    groups = [
        groups
        for groups in range(1, heads + 1)
        if heads % groups == 0 and (groups % kv_heads == 0 or kv_heads % groups == 0)
    ]
    shape = {"granularity": choose.choice([1, 4, 16, 64])}
    shape |= {"query_block": choose.choice([1, 1, 8, 64])}
    shape |= {"window": choose.choice([0, 0, 1, 9, 40])}
    shape |= {"first": choose.choice([0, 0, 1, 5, 70])}
    options = {"causal": choose.random() < 0.6}
    options |= {"scale": choose.choice([None, 0.3, -0.4, 0.0])}
    options |= {"backend": choose.choice(["auto", "eager"])}
    kind = choose.choice([None, None, "cu_seqlens", "lengths"])
    if kind == "cu_seqlens":
        batch, options[kind] = 1, borders(choose, n)
    if kind == "lengths":
        options[kind] = choose.choices(range(n + 1), k=batch)
    lengths = [stop - start for _, start, stop in spans(batch, n, options)]
    block = shape["query_block"]
    rows = -(-n // block)
    if kind == "cu_seqlens":
        rows = sum(-(-length // block) for length in lengths)
    groups, slots = choose.choice(groups), choose.choice([0, 1, 3, 8])
    indices = torch.empty(batch, groups, rows, slots, dtype=torch.int64)
    at = 0
    for i, length in enumerate(lengths):
        entry, own = (i, slice(None)) if kind != "cu_seqlens" else (0, None)
        if own is None:
            own = slice(at, at := at - (-length // block))
        most = -(-length // shape["granularity"])
        drawn = torch.rand(indices[entry, :, own].shape, generator=generator)
        indices[entry, :, own] = (drawn * (most + 1)).long() - 1
    counts = None
    if choose.random() < 0.5:
        counts = torch.randint(0, slots + 1, indices.shape[:3], generator=generator)
    tensors = [
        torch.randn(batch, n, h, 8, dtype=dtype, generator=generator)
        for h in (heads, kv_heads, kv_heads)
    ]
    return tensors, Selected(indices, counts=counts, **shape), options


def spans(batch: int, n: int, options: dict) -> list[tuple[int, int, int]]:
    if "cu_seqlens" in options:
        at = options["cu_seqlens"]
        return [(0, a, b) for a, b in zip(at, at[1:])]
    lengths = options.get("lengths", [n] * batch)
    return [(i, 0, length) for i, length in enumerate(lengths)]


def reference_of(q, k, v, pattern: Selected, options: dict):
    """out and lse, document by document."""
    out = 0.0 * q
    lse = torch.full_like(q[..., 0], -torch.inf, dtype=torch.float64).transpose(1, 2)
    outs, lses, row = [], [], 0
    for entry, start, stop in spans(*q.shape[:2], options):
        count = -(-(stop - start) // pattern.query_block)
        own = slice(entry, entry + 1), slice(None), slice(row, row + count)
        if "cu_seqlens" in options:
            row += count
        counts = None if pattern.counts is None else pattern.counts[own]
        fields = {name: getattr(pattern, name) for name in ("granularity", "window")}
        fields |= {"query_block": pattern.query_block, "first": pattern.first}
        one = Selected(pattern.indices[own], counts=counts, **fields)
        if start == stop:
            continue
        document = [t[entry : entry + 1, start:stop] for t in (q, k, v)]
        call = {"causal": options["causal"], "scale": options["scale"]}
        o, l = reference.attention(*document, one, **call)
        outs.append(((entry, slice(start, stop)), o[0]))
        lses.append(((entry, slice(None), slice(start, stop)), l[0]))
    for where, o in outs:
        out = out.index_put(_grid(out, where), o)
    for where, l in lses:
        lse = lse.index_put(_grid(lse, where), l)
    return out, lse


def _grid(t, where):
    number = torch.arange(t.numel()).view(t.shape)[where]
    return torch.unravel_index(number, t.shape)


def errors(tensors, pattern, options, **more) -> dict[str, float]:
    given = [t.clone().requires_grad_() for t in tensors]
    exact = [t.double().clone().requires_grad_() for t in tensors]
    out, lse = attention(*given, pattern, return_lse=True, **options, **more)
    right, right_lse = reference_of(*exact, pattern, options)
    found = {"out": reference.error(out, right, 1.0)}
    found["lse"] = reference.error(lse, right_lse, 1.0)
    generator = torch.Generator().manual_seed(0)
    dout, dlse = (
        torch.randn(t.shape, dtype=torch.float64, generator=generator)
        for t in (right, right_lse)
    )
    dead = right_lse == -torch.inf
    for o, l in ((out, lse), (right, right_lse)):
        ((o * dout).sum() + (l.masked_fill(dead, 0) * dlse).sum()).backward()
    floor = reference.gradient_floor(*tensors[:2], dout, options["scale"])
    for name, t, e in zip("qkv", given, exact):
        e.grad = torch.zeros_like(e) if e.grad is None else e.grad
        found[f"d{name}"] = reference.error(t.grad, e.grad, floor)
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype, limit", reference.EXACT.items())
def test_random_selections_equal_the_reference(monkeypatch, order, dtype, limit):
    monkeypatch.setattr(selected, "parts", ORDERS[order])
    for seed in range(100 if dtype == torch.float64 else 40):
        call = random_call(seed, dtype)
        assert max(errors(*call).values()) <= limit, (seed, errors(*call))


def test_a_list_of_all_keys_is_dense_attention_and_a_window_that_of_blocks():
    q, k, v = (torch.randn(1, 96, h, 16, dtype=torch.float64) for h in (4, 2, 2))
    every = torch.arange(12).expand(1, 1, 96, 12)
    for causal in (False, True):
        dense = attention(q, k, v, Dense(), causal=causal)
        out = attention(q, k, v, Selected(every, granularity=8), causal=causal)
        assert reference.error(out, dense, 1.0) <= 1e-12
    nothing = torch.empty(1, 1, 96, 0, dtype=torch.int64)
    pattern = Selected(nothing, granularity=16, window=20)
    window = attention(q, k, v, blocks.sliding_window(tokens=20), causal=True)
    assert (
        reference.error(attention(q, k, v, pattern, causal=True), window, 1.0) < 1e-12
    )


def test_the_kernel_that_reads_rows_where_they_lie_takes_any_layout():
    """Strided q, k and v; half precision; other numbers of heads."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, 96, 8, 64
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    k, v = k[:, :, ::4], v[:, :, ::4]
    q = q.transpose(1, 3).contiguous().transpose(1, 3)
    indices = torch.randint(0, 6, (1, 4, 96, 3), generator=generator)
    for causal in (False, True):
        options = {"causal": causal, "scale": None}
        found = errors((q, k, v), Selected(indices, granularity=16), options)
        assert max(found.values()) <= 5e-6
        half = [t.bfloat16() for t in (q, k, v)]
        limits = reference.tolerance(*half, half[0], pattern=Dense(), causal=causal)
        found = errors(half, Selected(indices, granularity=16), options)
        assert found["out"] <= 2 * limits["out"] and found["dv"] <= 2 * limits["dv"]


def test_sinks_and_a_soft_cap_count():
    q, k, v = (torch.randn(1, 40, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    pattern = Selected(torch.randint(0, 5, (1, 2, 40, 2)), granularity=8, window=4)
    sinks = torch.randn(4, dtype=torch.float64)
    for more in ({"sinks": sinks}, {"softcap": 0.7}, {"sinks": sinks, "softcap": 2.0}):
        tensors = [t.clone().requires_grad_() for t in (q, k, v)]
        exact = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attention(*tensors, pattern, causal=True, **more)
        right, _ = reference.attention(*exact, pattern, causal=True, **more)
        assert reference.error(out, right, 1.0) <= 1e-12
        dout = torch.randn_like(out)
        for o in (out, right):
            o.backward(dout)
        for t, e in zip(tensors, exact):
            assert reference.error(t.grad, e.grad, 1.0) <= 1e-12


def test_a_key_that_is_not_finite_changes_no_query_that_it_is_hidden_from():
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    indices = torch.zeros(1, 1, 64, 1, dtype=torch.int64)
    pattern = Selected(indices, granularity=16, window=3)
    clean = attention(q, k, v, pattern, causal=True)
    k = k.clone()
    k[:, 40] = float("nan")
    out = attention(q, k, v, pattern, causal=True)
    sees = torch.zeros(64, dtype=torch.bool)
    sees[40:43] = True
    assert torch.equal(out[:, ~sees], clean[:, ~sees])
    assert out[:, sees].isnan().all()


def test_what_does_not_fit_is_refused():
    q = torch.randn(1, 32, 4, 8)
    indices = torch.zeros(1, 2, 32, 1, dtype=torch.int64)
    refused = [
        (ValueError, lambda: Selected(indices.float())),
        (ValueError, lambda: Selected(indices[0])),
        (TypeError, lambda: Selected([[0]])),
        (ValueError, lambda: Selected(indices, granularity=0)),
        (ValueError, lambda: Selected(indices, window=-1)),
        (ValueError, lambda: Selected(indices, counts=indices)),
        (ValueError, lambda: Selected(indices, counts=indices[..., 0].float())),
        (ValueError, lambda: attention(q, q, q, Selected(indices + 32))),
        (ValueError, lambda: attention(q, q, q, Selected(indices[:, :, :31]))),
        (ValueError, lambda: attention(q, q, q, Selected(indices, query_block=2))),
        (ValueError, lambda: attention(q, q[:, :16], q[:, :16], Selected(indices))),
        (
            ValueError,
            lambda: attention(q, q, q, Selected(indices[:, :1].expand(1, 3, 32, 1))),
        ),
        (
            ValueError,
            lambda: attention(q, q, q, Selected(indices + 20), cu_seqlens=[0, 10, 32]),
        ),
        (
            NotImplementedError,
            lambda: attention(q, q, q, Selected(indices), group=Simulated(2)),
        ),
    ]
    for number, (error, call) in enumerate(refused):
        with pytest.raises(error) as raised:
            call()
        assert "\n" not in str(raised.value), number
    cache = KVCache(Dense(), heads=4, max_seq_len=64, batch=1, kv_heads=4, head_dim=8)
    with torch.no_grad(), pytest.raises(NotImplementedError):
        attention(q, q, q, Selected(indices), cache=cache, causal=True)


def test_writing_to_indices_before_the_backward_is_noticed():
    q = torch.randn(1, 32, 2, 8, requires_grad=True)
    indices = torch.zeros(1, 1, 32, 1, dtype=torch.int64)
    out = attention(q, q, q, Selected(indices, granularity=8))
    indices.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
