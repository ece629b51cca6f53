"""Sinks beside what the matrix, documents, caches and ranks check of them."""

from dataclasses import replace

import pytest
import torch
from matrix import (
    BF16,
    BLOCK_SPARSE,
    DILATED,
    F16,
    F32,
    F64,
    Case,
    all_wrong,
    cache_for,
    drawn,
    errors,
    paths,
)
from ringlab import Dense, Simulated, attention, blocks, kernels, reference
from ringlab.engine import sinks as merged
from ringlab.kernels.torch_kernels import Eager
from ringlab.torch_private import IN_GRAPHS

CASE = Case(DILATED[1], 53, F64, True, batch=2, sinks=True)  # some queries see nothing


@pytest.mark.parametrize(
    "pattern", [Dense(), DILATED[1], BLOCK_SPARSE[5], BLOCK_SPARSE[13]], ids=str
)
def test_every_path(pattern, monkeypatch):
    """Rows come some at a time, as those of long sequences."""
    monkeypatch.setattr(merged, "ROWS", 40)
    case = Case(pattern, 101, F64, causal=True, sinks=True)
    assert not all_wrong(paths(case))
    if pattern is not BLOCK_SPARSE[13]:
        more = {"n": 229, "heads": 16}  # sinks enough for a sample of rounding
        halves = [replace(case, dtype=dtype, **more) for dtype in (BF16, F16)]
        assert not all_wrong(how for half in halves for how in paths(half))


def test_heads_with_patterns_of_their_own_a_wide_v_and_more_keys_than_queries():
    q, k, v, sinks = drawn(replace(CASE, pattern=Dense()))[0]
    leaves = [t.requires_grad_() for t in (q, k, v, sinks)]
    windows = [blocks.sliding_window(i % 3, block_size=4) for i in range(4)]
    each = [
        reference.attention(
            q[:, :, i : i + 1],
            k[:, :, i // 2 :][:, :, :1],
            v[:, :, i // 2 :][:, :, :1],
            windows[i],
            sinks=sinks[i : i + 1],
        )
        for i in range(4)
    ]
    want = torch.cat([out for out, _ in each], 2)
    wide, few = torch.cat([v, -v], 3), q[:, -9:]
    for found, exact in (
        (attention(q, k, v, blocks.PerHead(tuple(windows)), sinks=sinks), want),
        (
            attention(few, k, wide, Dense(), causal=True, sinks=sinks),
            reference.attention(few, k, wide, Dense(), causal=True, sinks=sinks)[0],
        ),
    ):
        dout = torch.randn_like(exact)
        for a, b in zip(
            (found, *torch.autograd.grad(found, leaves, dout)),
            (exact, *torch.autograd.grad(exact, leaves, dout)),
        ):
            assert reference.error(a.detach(), b.detach(), 1e-9) <= 1e-12


def test_sinks_that_differ_by_query():
    """-inf is none; some queries see nothing else."""
    inputs, dout, dlse = drawn(CASE)
    sinks = 4 * torch.randn(4, CASE.n, dtype=F64)
    sinks[1, ::3] = -torch.inf
    leaves = [t.requires_grad_() for t in (*inputs[:3], sinks)]

    def run(attend, **how):
        out, lse = attend(*leaves[:3], CASE.pattern, causal=True, sinks=sinks, **how)
        dead = lse == -torch.inf
        given = dout, dlse.masked_fill(dead, 0.0)
        return out, lse, *torch.autograd.grad([out, lse], leaves, given)

    for a, b in zip(run(attention, return_lse=True), run(reference.attention)):
        assert reference.error(a, b, 1e-9) <= 1e-12


@pytest.mark.parametrize("dtype", [BF16, F16, F64])
def test_sinks_of_any_dtype_get_gradients_of_theirs(dtype):
    """Under autocast too, which casts q, k and v alone."""
    inputs, dout, _ = drawn(replace(CASE, dtype=F32))
    q, k, v, sinks = (t.requires_grad_() for t in (*inputs[:3], inputs[3].to(dtype)))
    want = reference.attention(q, k, v, CASE.pattern, causal=True, sinks=sinks)[0]
    (exact,) = torch.autograd.grad(want, sinks, dout.double())
    for autocast, bound in ((False, 5e-6), (True, 0.02)):
        with torch.autocast("cpu", BF16, enabled=autocast):
            out = attention(q, k, v, CASE.pattern, causal=True, sinks=sinks)
        (grad,) = torch.autograd.grad(out, sinks, dout.to(out.dtype))
        assert reference.error(out.detach(), want.detach(), 1.0) <= bound
        assert grad.dtype == dtype
        bound = max(bound, torch.finfo(dtype).eps)
        assert reference.error(grad, exact, 0.0) <= bound


@pytest.mark.parametrize("how", [{}, {"group": Simulated(3), "scheme": "ulysses"}])
def test_a_sink_of_minus_infinity_is_none(how):
    inputs, dout, dlse = drawn(CASE)
    none = torch.full((4,), -torch.inf)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    out, lse = attention(*leaves, CASE.pattern, return_lse=True, sinks=none, **how)
    want = attention(*leaves, CASE.pattern, return_lse=True, **how)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    dlse = dlse.masked_fill(lse == -torch.inf, torch.nan)
    grads, wanted = (
        torch.autograd.grad(results, leaves, (dout, dlse))
        for results in ((out, lse), want)
    )
    assert all(map(torch.equal, grads, wanted))


def test_padding_is_no_query():
    """Of documents and of a cache: out 0, lse -inf; NaN there reaches no gradient."""
    q, k, v, sinks = drawn(replace(CASE, pattern=Dense()))[0]
    lengths, dead = [53, 20], torch.arange(53) >= 20
    cache = cache_for(Dense(), q, k, 53)
    how = {"causal": True, "return_lse": True, "sinks": sinks, "lengths": lengths}
    out, lse = attention(q, k, v, Dense(), cache=cache, **how)
    same = attention(q, k, v, Dense(), **how | {"sinks": sinks.requires_grad_()})
    for o, l in ((out, lse), same):
        assert not o[1, dead].any() and (l[1, :, dead] == -torch.inf).all()
        assert l.isfinite().sum() == 4 * 73
    with pytest.raises(ValueError, match="without gradients"):
        attention(q, k, v, Dense(), cache=cache, **how)
    assert reference.error(out, same[0].detach(), 1.0) <= 1e-12
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    (clean,) = torch.autograd.grad(same, sinks, (dout, dlse), retain_graph=True)
    dout[1, dead], dlse[1, :, dead] = torch.nan, torch.nan
    assert torch.equal(torch.autograd.grad(same, sinks, (dout, dlse))[0], clean)


def test_gradients_run_no_wider_heads(monkeypatch):
    """The backward of every call takes the final out and lse, not a cotangent of lse."""
    widths, run = [], Eager.backward
    monkeypatch.setattr(
        Eager,
        "backward",
        lambda self, dout, *rest: (
            widths.append(dout.shape[3]) or run(self, dout, *rest)
        ),
    )
    for group in (None, Simulated(2)):
        *leaves, logits = (t.requires_grad_() for t in drawn(CASE)[0])
        how = {"backend": "eager", "causal": True, "sinks": logits, "group": group}
        attention(*leaves, CASE.pattern, **how).sum().backward()
    assert set(widths) == {16}


def test_compiled_whole():
    inputs, dout, dlse = drawn(CASE)
    leaves = [t.requires_grad_() for t in inputs]

    def step(q, k, v, sinks):
        how = {"causal": True, "return_lse": True}
        return attention(q, k, v, CASE.pattern, sinks=sinks * 1, **how)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=IN_GRAPHS, backend="aot_eager")
    found, want = (
        (*results, *torch.autograd.grad(results, leaves, (dout, dlse)))
        for results in (compiled(*leaves), step(*leaves))
    )
    assert (
        max(
            errors(
                dict(enumerate(found)), dict(enumerate(want)), *leaves[:2], dout
            ).values()
        )
        < 1e-14
    )


def test_derived_once_also_where_sinks_alone_are_trained(monkeypatch):
    asked, choose = [], kernels.choose
    monkeypatch.setattr(
        kernels,
        "choose",
        lambda *given, **how: asked.append(how["backward"]) or choose(*given, **how),
    )
    inputs, dout, _ = drawn(CASE)
    *given, sinks = inputs
    sinks.requires_grad_()

    def loss(sinks, **how):
        return (attention(*given, CASE.pattern, sinks=sinks, **how) * dout).sum()

    (grad,) = torch.autograd.grad(loss(sinks), sinks)
    (same,) = torch.autograd.grad(loss(sinks, group=Simulated(2)), sinks)
    assert reference.error(same, grad, 0.0) <= 1e-12 and all(asked)
    assert torch.equal(torch.func.grad(loss)(sinks), grad) and grad.all()


@pytest.mark.parametrize(
    "sinks, said",
    [
        (torch.zeros(3), r"\(3,\), torch.float32 on cpu"),
        (torch.zeros(4, 1), r"\(4, 1\)"),
        (torch.zeros(4, dtype=torch.long), r"\(4,\), torch.int64"),
        (torch.zeros(4, device="meta"), ".* on meta"),
    ],
    ids=str,
)
def test_refusals_are_one_line(sinks, said):
    wanted = r"^sinks must be \(heads,\) = \(4,\), floats on cpu; got "
    with pytest.raises(ValueError, match=f"{wanted}{said}[^\n]*$"):
        attention(*drawn(CASE)[0][:3], CASE.pattern, sinks=sinks)


def test_sinks_that_differ_by_query_are_for_one_device_without_documents():
    by_query = torch.zeros(4, CASE.n)
    for how in ({"lengths": [53, 40]}, {"group": Simulated(2)}):
        with pytest.raises(ValueError, match=r"\(heads,\) = \(4,\)"):
            attention(*drawn(CASE)[0][:3], CASE.pattern, sinks=by_query, **how)
