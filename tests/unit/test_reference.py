import functools

import pytest
import torch
from ringlab import Dense, Dilated, attention, reference
from ringlab.blocks import sliding_window
from torch.nn import functional as F


def tensors(n=40, heads=4, kv_heads=2, d=8, dtype=torch.float64):
    torch.manual_seed(0)
    return tuple(
        torch.randn(2, n, h, d, dtype=dtype) for h in (heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("causal", [False, True])
def test_dense_equals_torch(causal):
    q, k, v = tensors()
    out, lse = reference.attention(q, k, v, Dense(), causal=causal)
    bhnd = [
        t.transpose(1, 2)
        for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    ]
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(*bhnd, is_causal=causal).transpose(1, 2)
    )
    scores = bhnd[0] @ bhnd[1].mT / 8**0.5
    scores = (
        scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
        if causal
        else scores
    )
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_a_key_shown_twice_counts_twice():
    """M = 2 equals writing the key and its value down twice."""
    q, k, v = (t[:1, :4, :1] for t in tensors(kv_heads=4))
    out, _ = reference.attention(q, k, v, Dilated([4, 4], [1, 2]))
    rows = torch.tensor(
        [0, 1, 2, 3, 0, 2]
    )  # for a selected query: every key, and the selected ones again
    twice = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q[:, ::2], k[:, rows], v[:, rows]))
    )
    torch.testing.assert_close(out[:, ::2], twice.transpose(1, 2))
    once = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q[:, 1::2], k, v))
    )
    torch.testing.assert_close(out[:, 1::2], once.transpose(1, 2))


def test_a_sink_is_a_key_without_a_value():
    q, k, v = tensors(kv_heads=4)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0], dtype=torch.float64)
    found = reference.attention(q, k, v, Dense(), scale=0.3, sinks=sinks)
    q, k, v = (
        F.pad(q, (0, 1), value=1.0),
        F.pad(k, (0, 1, 0, 0, 0, 1)),
        F.pad(v, (0, 1, 0, 0, 0, 1)),
    )
    k[:, -1, :, -1] = sinks / 0.3
    out, lse = reference.attention(q, k, v, Dense(), scale=0.3)
    torch.testing.assert_close(found, (out[..., :-1], lse))


def test_dead_rows_are_zero_with_zero_gradient():
    q, k, v = (t.requires_grad_() for t in tensors(n=12))
    out, lse = reference.attention(q, k, v, Dilated([4], [2]))
    dead = (torch.arange(12) % 4 % 2)[None, :] != (torch.arange(4) % 2)[
        :, None
    ]  # (h, n)
    assert bool((lse[:, dead] == -torch.inf).all()) and bool(
        (lse[:, ~dead] > -torch.inf).all()
    )
    assert bool((out.transpose(1, 2)[:, dead] == 0).all())
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert bool((dq.transpose(1, 2)[:, dead] == 0).all())
    assert all(bool(torch.isfinite(g).all()) for g in (dq, dk, dv))


@pytest.mark.parametrize(
    "pattern", [Dense(), Dilated([16, 32], [1, 2]), Dilated([10], [3], "head_groups")]
)
@pytest.mark.parametrize("causal", [False, True])
def test_sampled_errors_find_what_the_full_oracle_finds(pattern, causal):
    q, k, v = (t.float().requires_grad_() for t in tensors(n=200))
    dout = torch.randn(2, 200, 4, 8)
    out, lse = attention(q, k, v, pattern, causal=causal, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    common = dict(causal=causal, out=out, lse=lse, dout=dout, grads=grads, samples=20)
    found = reference.sampled_errors(q, k, v, pattern, **common)
    assert set(found) == {"out", "lse", "dq", "dk", "dv"} and max(found.values()) < 5e-6
    broken = dict(
        common, out=1.01 * out, lse=lse + 0.01, grads=[1.01 * g for g in grads]
    )
    found = reference.sampled_errors(q, k, v, pattern, **broken)
    assert found.pop("lse") > 1e-3 and found == pytest.approx(
        dict.fromkeys(found, 0.01), rel=0.01
    )
    zero = dict(
        common, out=torch.zeros_like(out), grads=[torch.zeros_like(g) for g in grads]
    )
    assert (
        min(
            reference.sampled_errors(q, k, v, pattern, **zero)[n]
            for n in ("out", "dq", "dk", "dv")
        )
        > 0.5
    )


def test_error_is_infinite_for_the_wrong_infinities():
    good = torch.tensor([1.0, -torch.inf])
    assert reference.error(good, good, 1.0) == 0
    for wrong in ([1.0, 0.0], [1.0, torch.inf], [torch.nan, -torch.inf]):
        assert reference.error(torch.tensor(wrong), good, 1.0) == torch.inf


def test_tolerance():
    q, k, v = tensors(dtype=torch.float32)
    assert set(reference.tolerance(q, k, v).values()) == {5e-6}
    low = reference.tolerance(
        *(t.bfloat16() for t in (q, k, v)), pattern=Dilated([16], [4])
    )
    assert all(2e-3 < x < 2e-2 for x in low.values())
    turned = reference.tolerance(
        *(t.half() for t in (q, k, v)), causal=True, scale=-0.25
    )
    assert all(2e-4 < x < 2e-3 for x in turned.values()), (
        "torch's own causal kernels give nan at a negative scale"
    )


def test_an_error_of_many_parts_is_that_of_the_whole(monkeypatch):
    ref = torch.randn(2, 3, 50, 4, dtype=torch.float64)
    ref[0, 1, 7] = -torch.inf
    x = ref + 1e-3 * torch.randn_like(ref)
    whole = reference.error(x, ref, 1.0)
    monkeypatch.setattr(reference, "PART", 100)
    assert reference.error(x, ref, 1.0) == pytest.approx(whole, rel=1e-12)
    assert reference.error(x[:, :, :26], ref, 1.0) == float("inf"), (
        "of another shape, though its parts are alike"
    )
    x[1, 2, 49, 3] = torch.nan
    assert reference.error(x, ref, 1.0) == float("inf")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "pattern", [Dense(), Dilated([16, 32], [1, 2]), sliding_window(1, block_size=8)]
)
def test_a_key_that_is_not_finite_changes_only_the_queries_that_see_it(pattern, value):
    q, k, v = tensors()
    wrong = k.clone()
    wrong[:, 20] = value
    for attend in (reference.attention, functools.partial(attention, return_lse=True)):
        (out, _), (want, _) = (
            attend(q, keys, v, pattern, causal=True) for keys in (wrong, k)
        )
        for head in range(4):
            m = pattern.multiplicity(
                torch.arange(40), torch.tensor([20]), n=40, head=head, heads=4
            )
            hidden = (m[:, 0] == 0) | (torch.arange(40) < 20)
            assert (
                reference.error(out[:, hidden, head], want[:, hidden, head], 1.0)
                <= 1e-12
            )
            assert (
                reference.error(out[:, ~hidden, head], want[:, ~hidden, head], 1.0)
                > 0.1
            )
