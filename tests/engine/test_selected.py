"""Attention to selected keys against the reference: by queries, by keys, by choice."""

from itertools import product

import pytest
import torch
from matrix import cache_for
from random_cases import seeds
from refusals import refused
from ringlab import (
    Dense,
    KVCache,
    Selected,
    Simulated,
    attention,
    blocks,
    kernels,
    reference,
)
from ringlab.engine import selected
from selected_cases import errors, random_call, rank_call, stained, weighed_call

ORDERS = {
    "chosen": selected.parts,
    "by keys": lambda call, *_: selected.parts_by_keys(call),
    "by list": lambda call, *_: selected.parts_by_queries(
        call, call.pattern.query_block
    ),
    "by tile": lambda call, *_: selected.parts_by_queries(
        call, 3 * call.pattern.query_block
    ),
}


EACH_ORDER = pytest.mark.parametrize(
    "order, backend", [*product(ORDERS, ["eager", "cpu_flash"]), ("chosen", "auto")]
)


@pytest.mark.parametrize(
    "order, make", [*zip(ORDERS, [random_call] * 4), ("chosen", weighed_call)]
)
@pytest.mark.parametrize("dtype, limit", reference.EXACT.items())
def test_random_calls_equal_the_reference(monkeypatch, order, make, dtype, limit):
    monkeypatch.setattr(selected, "parts", ORDERS[order])
    for seed in seeds(10):
        call = make(seed, dtype)
        assert max(errors(*call).values()) <= limit, (seed, errors(*call))


@pytest.mark.parametrize("backend", ["eager", "cpu_flash", "compiled"])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_weights_of_blocks_that_their_own_queries_see(backend, heads, kv_heads):
    """Causal squares with weights, by every kernel."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 77, h, 64, generator=generator)
        for h in (heads, kv_heads, kv_heads)
    ]
    before = torch.rand(2, heads, 10, 10, generator=generator).tril(-1).topk(3)
    indices = before.indices.masked_fill(before.values == 0, -1)
    own = torch.arange(10)[:, None].expand(2, heads, -1, 1)
    indices = torch.cat([indices, own], 3)
    weights = torch.randn(indices.shape, generator=generator)
    pattern = Selected(indices, 8, 8, log_weights=weights)
    for scale in (None, 0.01, -3.0):
        options = {"causal": True, "scale": scale, "backend": backend}
        found = errors(tensors, pattern, options)
        assert max(found.values()) <= reference.EXACT[torch.float32], found


def test_a_weight_that_is_not_a_number_reaches_the_queries_that_see_its_block_alone():
    q = torch.randn(1, 32, 2, 16)
    blocks = torch.tensor([[0, -1], [1, 0], [2, 3], [3, 0]])[None, None]
    weights = torch.zeros(1, 1, 4, 2)
    pattern = Selected(blocks, 8, 8, log_weights=weights)
    clean = attention(q, q, q, pattern, causal=True)
    for row, slot in ((0, 1), (2, 1)):  # an empty slot; a block after the query
        weights[0, 0, row, slot] = float("nan")
    for backend in ("auto", "eager"):
        out = attention(q, q, q, pattern, causal=True, backend=backend)
        assert reference.error(out, clean, 1.0) <= 1e-6
    weights[0, 0, 3, 1] = float("nan")
    assert attention(q, q, q, pattern, causal=True)[:, 24:].isnan().all()


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_weights_far_below_the_largest_of_a_row_are_none(backend):
    """Whatever the dtypes and the scale, and with gradients."""
    indices = torch.arange(4).expand(1, 1, 32, 4)
    for dtype in (torch.float32, torch.float16):
        q = torch.randn(1, 32, 2, 16).to(dtype)
        for scale in (1.0, None, 1e-3):
            weights = torch.zeros(1, 1, 32, 4, dtype=torch.float64)
            weights[..., 1:3] = torch.tensor([-torch.inf, -torch.inf])
            results = []
            for low in (-torch.inf, -1e300, -1e9):
                weights[..., 3] = low
                pattern = Selected(indices, 8, log_weights=weights)
                given = [q.clone().requires_grad_() for _ in range(3)]
                out = attention(*given, pattern, scale=scale, backend=backend)
                grads = torch.autograd.grad(out.square().sum(), given)
                results.append((out, *grads))
            for result in results[1:]:
                for got, want in zip(result, results[0]):
                    assert reference.error(got, want, 1.0) <= 2e-3
                    assert got.isfinite().all()


def test_weights_that_do_not_fit_are_refused():
    indices = torch.zeros(1, 1, 8, 2, dtype=torch.int64)
    q = torch.randn(1, 8, 1, 8)
    weights = torch.zeros(1, 1, 8, 2)
    for fields, why in (
        ({"log_weights": weights[..., :1]}, r"^log_weights must be \(batch"),
        ({"log_weights": weights.long()}, r"^log_weights must be \(batch"),
        ({"log_weights": weights, "window": 2}, "no window"),
    ):
        with pytest.raises(ValueError, match=why):
            Selected(indices, **fields)
    for large in (2e4, -2e4, 1e300, torch.inf):
        each = torch.full_like(weights[..., :1], large, dtype=torch.float64)
        with pytest.raises(ValueError, match="^the largest log_weight that a"):
            attention(q, q, q, Selected(indices[..., :1], log_weights=each))
    hidden = torch.tensor([-5e4, -6e4, 0.0]).expand(1, 1, 8, 3)
    for step in (1, 2):
        some = torch.arange(3).mul(2).expand(1, 1, 8 // step, 3)
        fields = {"query_block": step, "log_weights": hidden[:, :, ::step]}
        with pytest.raises(ValueError, match="^the largest log_weight that a"):
            attention(q, q, q, Selected(some, 1, **fields), causal=True)
        attention(q, q, q, Selected(some, 1, **fields))
    small = Selected(indices[..., :1], log_weights=weights[..., :1] + 8.0)
    with pytest.raises(NotImplementedError, match="need a larger scale than 1e-09"):
        attention(*[q.half()] * 3, small, scale=1e-9)
    twice = Selected(indices, log_weights=weights)
    with pytest.raises(ValueError, match="no block may be listed twice"):
        attention(q, q, q, twice)
    once = Selected(indices[..., :1], log_weights=weights[..., :1])
    with pytest.raises(NotImplementedError, match="no soft cap"):
        attention(q, q, q, once, softcap=1.0)
    cache = KVCache(Dense(), batch=1, heads=1, head_dim=8, max_seq_len=8)
    with pytest.raises(ValueError, match="without gradients"):
        learned = Selected(once.indices, log_weights=once.log_weights.requires_grad_())
        attention(q, q, q, learned, causal=True, cache=cache)


def test_a_list_of_all_keys_is_dense_attention_and_a_window_that_of_blocks():
    q, k, v = (torch.randn(1, 96, h, 16, dtype=torch.float64) for h in (4, 2, 2))
    every = torch.arange(12).expand(1, 1, 96, 12)
    window = Selected(every[..., :0], window=20), blocks.sliding_window(tokens=20)
    whole = Selected(every, granularity=8), Dense()
    for causal, equal in ((False, whole), (True, whole), (True, window)):
        found = (attention(q, k, v, pattern, causal=causal) for pattern in equal)
        assert reference.error(*found, 1.0) <= 1e-12


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


@pytest.mark.parametrize("dtype, limit", reference.EXACT.items())
@pytest.mark.parametrize("group", [None, Simulated(3)])
def test_sinks_and_a_soft_cap_count(group, dtype, limit):
    """Padding has no sink; a row that sees nothing has one."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 48, h, 8) for h in (4, 2, 2)] + [(4,)]
    *tensors, sinks = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    indices = torch.randint(-1, 3, (2, 2, 48, 2), generator=generator)
    each = {"sinks": sinks}, {"softcap": 0.7}, {"sinks": sinks, "softcap": 2.0}
    for more, window in product(each, (0, 4)):
        pattern = Selected(indices, granularity=8, window=window)
        options = {"causal": True, "scale": None, "lengths": [48, 20]} | more
        found = errors(tensors, pattern, options, group=group)
        assert max(found.values()) <= limit, (more, window, found)


@EACH_ORDER
def test_padding_and_queries_that_see_nothing_reach_no_gradient(
    monkeypatch, order, backend
):
    monkeypatch.setattr(selected, "parts", ORDERS[order])
    smallest = [
        (Selected(torch.zeros(1, 1, 2, 1).long()), {"lengths": [1]}),
        (Selected(torch.zeros(2, 1, 2, 1).long()), {"lengths": [1, 2]}),
        (Selected(torch.tensor([[[[0], [-1]]]])), {}),
    ]
    calls = []
    for pattern, how in smallest:
        tensors = [torch.ones(len(pattern.indices), 2, 1, 8)] * 3
        calls.append((tensors, pattern, {"causal": True, "scale": None} | how, {}))
    for seed in range(12):
        weighed = seed % 3 == 0 and order == "chosen"
        call = (weighed_call if weighed else random_call)(seed, torch.float32)
        shared = seed % 2 and rank_call(seed, 2, weighed) is not None
        calls.append((*call, {"group": Simulated(2)} if shared else {}))
    for number, (*call, options, more) in enumerate(calls):
        options = options | {"backend": backend}
        clean, *found = (
            stained(*call, options, bad, **more) for bad in (0.0, torch.nan, torch.inf)
        )
        for each in found:
            assert all(map(torch.equal, each, clean)), number


@EACH_ORDER
def test_a_key_that_is_not_finite_changes_no_query_that_it_is_hidden_from(
    monkeypatch, order, backend
):
    """Short lists beside longer ones, a last block that is short, tiles of which a query
    sees nothing.
    """
    monkeypatch.setattr(selected, "parts", ORDERS[order])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 61, 2, 16, generator=generator) for _ in range(3))
    at = torch.arange(61)
    for size, step, window, causal in product((1, 8), (1, 8), (0, 2), (False, True)):
        rows = 1, 1, -(-61 // step), 3
        indices = torch.randint(-1, -(-61 // size), rows, generator=generator)
        indices[0, 0, 1::2, 1:] = -1
        indices[0, 0, -1, 0] = 40 // size
        shape = {"granularity": size, "query_block": step, "window": window * causal}
        pattern = Selected(indices, **shape)
        how = {"causal": causal, "backend": backend}
        clean = attention(q, k, v, pattern, **how)
        m = pattern.multiplicity(at, at, head=0, heads=2)[0]
        for key in (0, 40):
            sees = m[:, key] & (~torch.tensor(causal) | (at >= key))
            bad = [t.index_fill(1, torch.tensor(key), torch.nan) for t in (k, v)]
            alone = order == "by list" and not causal  # else a mask hides values
            out = attention(q, bad[0], bad[1] if alone else v, pattern, **how)
            assert reference.error(out[:, ~sees], clean[:, ~sees], 1.0) <= 1e-6
            # Rows of which cpu_flash gets this key alone are 0 there.
            assert out[:, sees].isnan().all() or order == "by keys"


def test_a_kernel_that_is_wrong_in_causal_mode_is_refused(monkeypatch):
    """A block that its own queries see up to themselves is a causal call."""

    class Flawed(type(kernels.KERNELS["eager"])):
        name = "flawed"

        def forward(self, q, k, v, causal, scale, bias=None):
            return super().forward(q, k, v, False, scale, bias)

    monkeypatch.setitem(kernels.KERNELS, "flawed", Flawed())
    kernels.forget_probes()
    q = torch.randn(1, 64, 2, 16)
    pattern = Selected((torch.arange(64) // 16)[None, None, :, None], granularity=16)
    attention(q, q, q, pattern, backend="flawed")
    with pytest.raises(NotImplementedError):
        attention(q, q, q, pattern, causal=True, backend="flawed")
    kernels.forget_probes()


def test_sizes_are_cut_to_the_sequence():
    one = torch.zeros(2, 1, 1, 1, dtype=torch.int64)
    for name in ("granularity", "query_block", "window", "first"):
        rows = one if name == "query_block" else one.expand(-1, -1, 77, -1)
        pattern = Selected(rows, **{name: 2**40})
        for dtype, limit in reference.EXACT.items():
            q = torch.randn(2, 77, 2, 16, dtype=dtype)
            found = errors([q, q, q], pattern, {"causal": True, "scale": None})
            assert max(found.values()) <= limit, (name, found)


def test_what_does_not_fit_is_refused():
    q = torch.randn(1, 32, 4, 8)
    indices = torch.zeros(1, 2, 32, 1, dtype=torch.int64)
    for fields in (
        {"indices": indices.float()},
        {"indices": indices[0]},
        {"granularity": 0},
        {"window": -1},
        {"counts": indices},
        {"counts": indices[..., 0].float()},
    ):
        with refused(ValueError):
            Selected(**{"indices": indices} | fields)
    with refused(TypeError):
        Selected([[0]])
    group = {"group": Simulated(2)}
    for pattern, how in (
        (Selected(indices + 32), {}),
        (Selected(indices[:, :, :31]), {}),
        (Selected(indices, query_block=2), {}),
        (Selected(indices[:, :1].expand(1, 3, 32, 1)), {}),
        (Selected(indices + 20), {"cu_seqlens": [0, 10, 32]}),
        (Selected(indices), group | {"layout": "zigzag"}),
        (Selected(indices[:, :, :2], query_block=16), {"group": Simulated(3)}),
    ):
        with refused(ValueError):
            attention(q, q, q, pattern, **how)
    with refused(ValueError):
        attention(q, q[:, :16], q[:, :16], Selected(indices))
    with refused(NotImplementedError):
        attention(q, q, q, Selected(indices), scheme="ring", **group)


@pytest.mark.parametrize("at_most", [29, 60])
def test_a_cache_gives_the_rows_of_the_whole_sequence(at_most):
    """Pieces of any length until one sequence is full, sequences of their own lengths,
    sinks; what does not fit changes nothing.
    """
    generator = torch.Generator().manual_seed(0)
    made = {"dtype": torch.float64, "generator": generator}
    q, k, v = (torch.randn(2, 50, h, 8, **made) for h in (4, 2, 2))
    sinks = torch.randn(4, **made)
    indices = torch.randint(-1, 7, (2, 2, 50, 3), generator=generator)
    indices = indices.minimum(torch.arange(50)[:, None] // 8)  # none is not there yet
    fields = {"granularity": 8, "window": 5, "first": 2}
    options = {"causal": True, "sinks": sinks, "return_lse": True}
    whole = attention(q, k, v, Selected(indices, **fields), **options)
    cache = cache_for(Dense(), q, k, at_most)
    at = [0, 0]
    with torch.no_grad():
        for new in ([17, 17], [1, 1], [1, 0], [9, 3], [1, 1]):
            most = max(new)
            piece = [t.new_zeros(2, most, *t.shape[2:]) for t in (q, k, v)]
            lists = torch.full((2, 2, most, 3), -1)
            for entry, (start, count) in enumerate(zip(at, new)):
                rows = slice(start, start + count)
                for to, t in zip(piece, (q, k, v)):
                    to[entry, :count] = t[entry, rows]
                lists[entry, :, :count] = indices[entry, :, rows]
            step = options | {"cache": cache, "lengths": new}
            wrong = Selected(lists + 60, **fields)
            with pytest.raises(ValueError, match="indices"):
                attention(*piece, wrong, **step)
            with pytest.raises(NotImplementedError):
                attention(*piece, Selected(lists, **fields), backend="flash", **step)
            assert cache.lengths == at
            out, lse = attention(*piece, Selected(lists, **fields), **step)
            for entry, (start, count) in enumerate(zip(at, new)):
                rows = slice(start, start + count)
                want = whole[0][entry, rows], whole[1][entry, :, rows]
                assert reference.error(out[entry, :count], want[0], 1.0) <= 1e-12
                assert reference.error(lse[entry, :, :count], want[1], 1.0) <= 1e-12
                assert not out[entry, count:].any()
                at[entry] += count
            assert cache.lengths == at


def test_writing_to_indices_before_the_backward_is_noticed():
    q = torch.randn(1, 32, 2, 8, requires_grad=True)
    indices = torch.zeros(1, 1, 32, 1, dtype=torch.int64)
    out = attention(q, q, q, Selected(indices, granularity=8))
    indices.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tolerances_and_sampled_errors_take_selected_keys():
    """Also where batch entries have lists of their own."""
    generator = torch.Generator().manual_seed(0)
    made = {"dtype": torch.float64, "generator": generator}
    tensors = [torch.randn(2, 70, h, 8, **made).requires_grad_() for h in (4, 2, 2)]
    indices = torch.randint(-1, 9, (2, 2, 70, 3), generator=generator)
    pattern = Selected(indices, granularity=8, window=3)
    out, lse = attention(*tensors, pattern, causal=True, return_lse=True)
    dout = torch.randn(out.shape, **made)
    grads = torch.autograd.grad(out, tensors, dout)
    q, k, v = (t.detach() for t in tensors)
    result = {"out": out.detach(), "lse": lse.detach(), "dout": dout, "grads": grads}
    found = reference.sampled_errors(q, k, v, pattern, causal=True, **result)
    assert len(found) == 5 and max(found.values()) <= 1e-12
    result["out"] = result["out"].roll(1, 0)
    found = reference.sampled_errors(q, k, v, pattern, causal=True, **result)
    assert found["out"] > 0.1
    half = [t.bfloat16() for t in (q, k, v)]
    assert reference.tolerance(*half, pattern=pattern, causal=True)["out"] < 0.1
