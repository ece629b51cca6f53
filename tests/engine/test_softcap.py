"""Soft-capped scores: the kernel that has them, on every path, and refusals elsewhere."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from matrix import (
    BF16,
    BLOCK_SPARSE,
    DILATED,
    F32,
    F64,
    Case,
    all_wrong,
    apart,
    cache_for,
    drawn,
)
from refusals import refused
from ringlab import Dense, Execution, Selected, attention, blocks, kernels, reference
from ringlab.kernels.torch_kernels import Eager
from ringlab.ring import contiguous
from ringlab.torch_private import IN_GRAPHS

# Scores far beyond the cap.
CASE = Case(Dense(), 101, F64, causal=True, batch=2, scale=-1.0, softcap=1.5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [Dense(), DILATED[0], BLOCK_SPARSE[0], blocks.sliding_window(tokens=9)],
    ids=str,
)
def test_every_path(pattern, causal):
    case = replace(CASE, pattern=pattern, causal=causal, sinks=causal)
    assert not all_wrong(
        [
            replace(case, backend="eager"),
            replace(case, dtype=F32),
            replace(case, dtype=BF16, scale=None, softcap=30.0),
            replace(case, execution=Execution(tile=32)),
            replace(case, layout=contiguous(101, 2), scheme="plan"),
            replace(case, layout=contiguous(101, 2), scheme="ulysses"),
        ]
    )


@pytest.mark.parametrize(
    "pattern", [DILATED[0], blocks.sliding_window(tokens=9)], ids=str
)
def test_documents_and_caches(pattern):
    q, k, v = drawn(CASE)[0]
    how = {"causal": True, "scale": -1.0, "softcap": 1.5}
    want = attention(q, k, v, pattern, **how)
    cache = cache_for(pattern, q, k, 101)
    parts = zip(*(t.split([40, 1, 1, 59], 1) for t in (q, k, v)))
    found = [attention(*some, pattern, cache=cache, **how) for some in parts]
    lengths = attention(q, k, v, pattern, lengths=[101, 60], **how)
    assert torch.allclose(torch.cat(found, 1), want, rtol=0, atol=1e-12)
    assert torch.allclose(lengths[1, :60], want[1, :60], rtol=0, atol=1e-12)
    other = attention(q, k, v, pattern, causal=True, scale=-1.0)
    assert not torch.allclose(other, want, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    "pattern", [DILATED[0], blocks.sliding_window(tokens=9)], ids=str
)
def test_compiled_graphs(pattern):
    inputs, *cotangents = drawn(CASE)
    whole = torch.compile(attention, backend="aot_eager", fullgraph=IN_GRAPHS)
    how = {"causal": True, "scale": -1.0, "softcap": 1.5, "return_lse": True}
    leaves = [t.requires_grad_() for t in inputs]
    found, want = (f(*leaves, pattern, **how) for f in (whole, attention))
    assert all(map(torch.equal, found, want))
    grads = (torch.autograd.grad(x, leaves, cotangents) for x in (found, want))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", [F64, F32, BF16, torch.float16])
@pytest.mark.parametrize("softcap", [1e-30, 1e-6, 0.01, 1.0, 1e4, 1e30])
def test_caps_of_any_size_train(softcap, dtype):
    """Far beyond the cap, where all derivatives are 0, and about as large as it."""
    case = replace(CASE, softcap=softcap, dtype=dtype)
    scales = None, min(softcap, 1.0)
    sizes = 1, 101
    assert not all_wrong(
        [replace(case, scale=s, n=n) for s, n in product(scales, sizes)]
    )


@pytest.mark.parametrize(
    "pattern", [Dense(), Selected(torch.zeros(1, 1, 9, 1).int(), 9)]
)
def test_slopes_far_beyond_the_cap_are_right_relative_to_themselves(pattern):
    """Of about 7 times the cap: 1 - tanh(x)^2 would be off by a hundredth in fp32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = 1 + 0.1 * torch.rand(3, 1, 9, 2, 8, generator=generator)
    found = []
    for attend, dtype in ((attention, F32), (reference.attention, F64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k)]
        out = attend(*leaves, v.to(dtype), pattern, scale=0.75, softcap=1.0)
        out = out if dtype == F32 else out[0]
        found.append(torch.autograd.grad(out[..., 0].sum(), leaves))
    assert 0 < apart(*found) <= 1e-3


CPU = torch.device("cpu")


def test_a_kernel_that_ignores_the_cap_is_found(monkeypatch):
    monkeypatch.setattr(Eager, "with_softcap", lambda self, softcap: self)
    for backward in (False, True):
        kernels.forget_probes()
        why = kernels.probe("eager", CPU, F32, 16, False, backward, 0.01)
        assert "wrong result" in why
    kernels.forget_probes()


def test_the_kernel_is_chosen_in_silence(caplog):
    kernels.forget_probes()
    for backend in ("auto", ("sdpa", "eager")):
        choice = kernels.choose("cpu", F32, 16, backend=backend, softcap=3.0)
        assert choice.kernel == Eager(softcap=3.0) != Eager()
        assert choice.refusals["cpu_flash"] == "takes no softcap"
    assert not caplog.records


def test_what_has_no_soft_cap_is_refused():
    q = torch.zeros(1, 16, 2, 8)
    with refused(NotImplementedError, match="^backend 'sdpa' .*takes no softcap"):
        attention(q, q, q, BLOCK_SPARSE[0], softcap=30.0, backend="sdpa")
    for cap in (0, float("nan")):
        with refused(ValueError, match=f"^softcap must be a number .*, got {cap}$"):
            attention(q, q, q, BLOCK_SPARSE[0], softcap=cap)
