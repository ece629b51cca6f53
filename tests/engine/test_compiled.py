"""The compiled CPU kernel besides what ``test_kernels`` and the matrix check: log M,
merging, extremes, no compiler.
"""

import math
import os
from itertools import chain

import pytest
import torch
from refusals import refused
from ringlab import Dense, Dilated, attention, kernels, native
from ringlab.kernels import Eager
from ringlab.kernels.compiled import Compiled, Walk, dense_walk
from ringlab.tiles.dense import weighed
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

CPU = torch.device("cpu")
KERNEL, EXACT = Compiled(), Eager()


@pytest.fixture(params=["", " -mno-avx512f"], ids=["native", "narrow"])
def compiled(request, monkeypatch):
    """The kernel for this CPU, and for one with vectors of half the width."""
    _, why = native.library()
    if why:
        pytest.skip(why)
    if request.param:
        monkeypatch.setenv("CXX", os.environ.get("CXX", "g++") + request.param)
    native.library.cache_clear()
    if why := native.library()[1]:  # another compiler or CPU
        pytest.skip(why)
    yield KERNEL
    native.library.cache_clear()


def drawn(m, m_k, d, dtype=torch.float32, batch=2, heads=3):
    torch.manual_seed(m + m_k)
    return [torch.randn(batch, rows, heads, d).to(dtype) for rows in (m, m_k, m_k, m)]


def off(found, want) -> float:
    return float((found.double() - want).norm() / want.norm())


def into(out, lse, q, k, v, causal=False, merge=False) -> None:
    """Write or merge results of a dense call into strided rows."""
    dense_walk(q, k, causal, 0.2).forward(q, k, v, out, lse, merge)


@pytest.mark.parametrize(
    "m, m_k, d", [(1, 300, 8), (3, 3301, 33), (8, 1100, 128), (20, 300, 40)]
)
def test_queries_see_keys_by_their_log_m(compiled, m, m_k, d):
    """The same for all queries of a head, or for each; what a query does not see has
    -inf, and may be no number.
    """
    q, k, v, dout = drawn(m, m_k, d)
    k[:, 0], v[:, 0] = math.nan, math.nan
    whole = torch.randn(2, 3, m, m_k)
    whole[..., : m_k // 3] = -torch.inf
    whole[0, 1] = -torch.inf
    exact = [t.double().nan_to_num(0.0) for t in (q, k, v)]
    for log_m in (whole, whole[:, :, :1]):
        bias = log_m.double().transpose(1, 2).expand(2, m, 3, m_k)
        want, want_lse = EXACT.forward(*exact, False, 0.3, bias)
        want[0, :, 1], want_lse[0, 1] = 0.0, -torch.inf  # of what sees nothing
        out, lse = torch.empty(q.shape), torch.empty(2, 3, m)
        table, weights = weighed(log_m, m)
        walk = Walk(table, 0.3, weights=weights)
        walk.forward(q, k, v, out, lse)
        assert off(out, want) <= 2e-6
        assert ((lse == want_lse) | ((lse - want_lse).abs() < 1e-5)).all()
        grads = [torch.zeros(t.shape) for t in (q, k, v)]
        slopes = torch.zeros(1, len(weights))
        walk.backward(dout, None, q, k, v, out, lse, grads, slopes)
        lse = want_lse.masked_fill(want_lse == -math.inf, math.inf)
        wanted = EXACT.backward(dout.double(), *exact, want, lse, False, 0.3, bias)
        assert all(off(a, b) <= 5e-6 for a, b in zip(grads, wanted))
        scores = torch.einsum("bmhd,bnhd->bhmn", *exact[:2]) * 0.3 + log_m
        p = (scores - lse.unsqueeze(3)).exp()  # (b, h, m, m_k)
        dp = torch.einsum("bmhd,bnhd->bhmn", dout.double(), exact[2])
        delta = (dout * want).sum(3).transpose(1, 2).unsqueeze(3)
        of_keys = (p * (dp - delta)).sum_to_size(log_m.shape)
        assert off(slopes[0], of_keys[log_m > -math.inf]) <= 5e-6


@pytest.mark.parametrize("m", [130, 40, 4, 1])
def test_results_are_merged_in_place_into_strided_rows(compiled, m):
    """As if all keys came at once; what sees no key changes nothing, and is replaced
    where it came first.
    """
    q, k, v, _ = drawn(m, 2301, 48)
    v = v.repeat_interleave(2, 1)[:, ::2]
    want, want_lse = EXACT.forward(q.double(), k.double(), v.double(), False, 0.2)
    out, lse = (
        torch.full((2, 2 * m, 3, 64), 7.0)[:, ::2, :, 8:56],
        torch.empty(2, m, 3).transpose(1, 2),
    )
    into(out, lse, q, k[:, :70], v[:, :70])
    into(out, lse, q, k[:, 70:], v[:, 70:], merge=True)
    assert off(out, want) <= 1e-6 and off(lse, want_lse) <= 1e-6
    none = k[:, :0], v[:, :0]
    before = out.clone(), lse.clone()
    into(out, lse, q, *none, merge=True)
    assert all(map(torch.equal, (out, lse), before))
    into(out, lse, q, *none)
    assert not out.any() and (lse == -torch.inf).all()
    into(out, lse, q, k, v, merge=True)
    assert off(out, want) <= 1e-6 and off(lse, want_lse) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_as_torch_rounds(compiled, dtype):
    q, k, v, _ = drawn(70, 90, 40, dtype)
    v[0, :, 1] = 6e-6  # a subnormal number of fp16
    v[1, 5, 2, 7] = math.nan
    out, lse = torch.empty(2, 70, 3, 40, dtype=dtype), torch.empty(2, 3, 70)
    into(out, lse, q, k, v)
    wide, _ = compiled.forward(q, k, v, False, 0.2)
    assert wide.dtype == torch.float32 and torch.equal(
        out.nan_to_num(7), wide.to(dtype).nan_to_num(7)
    )


def test_extreme_scores(compiled):
    """Far apart, large, or not numbers: no overflow, and NaN stays where it is seen."""
    q, k, v, _ = drawn(120, 120, 16)
    for factor in (1e-20, 1e3, 1e15):
        exact = q.double() * factor, k.double(), v.double()
        want, want_lse = EXACT.forward(*exact, True, 1.0)
        out, lse = compiled.forward(q * factor, k, v, True, 1.0)
        assert (
            off(out, want) <= 2e-3 * min(1, factor) + 2e-6
            and off(lse, want_lse) <= 1e-6
        )
        dout = torch.randn_like(q)
        *_, dv = compiled.backward(dout, q * factor, k, v, out, lse, True, 1.0)
        *_, wanted = EXACT.backward(dout.double(), *exact, want, want_lse, True, 1.0)
        assert off(dv, wanted) <= 2e-3 * min(1, factor) + 5e-6
    k[1, 50, 2, 3] = math.nan
    out, lse = compiled.forward(q, k, v, False, 1.0)
    seen = torch.zeros(2, 120, 3, dtype=torch.bool)
    seen[1, :, 2] = True
    assert torch.equal(out.isnan().all(-1), seen) and torch.equal(
        out.isnan().any(-1), seen
    )
    assert torch.equal(lse.isnan().transpose(1, 2), seen)


def test_bits_of_two_numbers_are_no_number(compiled):
    """bf16 is read in pairs: where one is 0 and denormal numbers count as 0, or one is
    -inf, the other stays.
    """
    q, k, v, _ = drawn(71, 71, 16, torch.bfloat16)
    k[..., 1::2] = 0
    want = EXACT.forward(q.double(), k.double(), v.double(), False, 0.3)
    torch.set_flush_denormal(True)
    try:
        out, lse = compiled.forward(q, k, v, False, 0.3)
    finally:
        torch.set_flush_denormal(False)
    assert off(out, want[0]) <= 4e-3 and off(lse, want[1]) <= 2e-6
    q, k[0, 3, :, 1] = q.abs(), -math.inf
    out, lse = compiled.forward(q, k, v, False, 0.3)
    assert out.isfinite().all() and lse.isfinite().all()


def test_tensors_without_memory_or_with_a_pending_sign(compiled):
    q = torch.randn(1, 40, 2, 8)
    found = compiled.forward(torch._neg_view(q), q, q, False, 0.3)
    assert all(map(torch.equal, found, compiled.forward(-q, q, q, False, 0.3)))
    with pytest.raises(NotImplementedError, match="needs plain tensors, got TwoTensor"):
        compiled.forward(*[TwoTensor(q, q)] * 3, False, 0.3)


def test_a_damaged_file_is_compiled_anew(monkeypatch, tmp_path):
    if why := native.library()[1]:
        pytest.skip(why)
    monkeypatch.setattr(
        native, "FLAGS", native.FLAGS.replace("-O3", "-O0")
    )  # compiled in an eighth of the time
    whole, damaged = (tmp_path / name / "ringlab" for name in ("whole", "damaged"))
    damaged.mkdir(parents=True)
    try:
        for folder in (
            whole,
            damaged,
        ):  # of one path, the system would take what it has loaded
            monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
            native.library.cache_clear()
            assert native.library()[1] is None
            (made,) = folder.glob("*.so")
            if folder is whole:
                (damaged / made.name).write_text("")
        assert made.stat().st_size > 0
    finally:
        native.library.cache_clear()


def test_half_precision_results_are_not_merged(compiled):
    q, k, v, _ = drawn(8, 8, 8, torch.bfloat16)
    out, lse = torch.zeros_like(q), torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match="merged in float32"):
        into(out, lse, q, k, v, merge=True)


def test_threads_change_no_bit(compiled):
    q, k, v, dout = drawn(700, 3000, 24)
    calls = (q, True), (q[:, :20], True), (q[:, :3], False), (q[:, :1], False)
    found = []
    for threads in (1, 2, 3, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        # The last calls, of few rows, are split by keys, and continue what is there.
        results = [KERNEL.forward(t, k, v, causal, 0.2) for t, causal in calls]
        grads = KERNEL.backward(dout, q, k, v, *results[0], True, 0.2)
        for (t, causal), (out, lse) in zip(calls, results):
            into(out, lse, t, v, k, causal, merge=True)
        torch.set_num_threads(before)
        found.append([*grads, *chain(*results)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_what_records_operators_is_told_that_this_is_none(compiled):
    q, other = torch.randn(2, 1, 20, 2, 8)

    def call(backend):
        return lambda t: attention(t, t, t, Dense(), backend=backend)

    want = call("cpu_flash")(other)  # which also probes the kernel
    call("compiled")(other)
    with pytest.raises(
        NotImplementedError,
        match="cannot record the compiled kernel; use torch.export, or backend=",
    ):
        make_fx(call("compiled"))(q)
    with pytest.raises(NotImplementedError, match="cannot record the compiled kernel"):
        make_fx(call("compiled"), pre_dispatch=True)(q)
    assert torch.equal(make_fx(call("cpu_flash"))(q)(other), want)


@pytest.mark.parametrize(
    "compiler, why",
    [
        ("no-such-compiler", "cannot be compiled: .*no-such-compiler"),
        ("g++ --no-such-flag", "failed: .*no-such-flag"),
        (None, "needs a C\\+\\+ compiler"),
    ],
)
def test_without_a_compiler_torchs_kernel_runs_and_the_reason_is_told(
    compiler, why, monkeypatch, tmp_path
):
    q = torch.randn(1, 64, 2, 8)
    want = attention(q, q, q, Dilated([16, 32], [1, 2]), backend="cpu_flash")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    else:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    native.library.cache_clear()
    kernels.forget_probes()
    try:
        choice = kernels.choose("cpu", torch.float32, 8)
        assert choice.name == "cpu_flash"
        with refused(NotImplementedError, match=why):
            attention(q, q, q, Dense(), backend="compiled")
        assert torch.equal(attention(q, q, q, Dilated([16, 32], [1, 2])), want)
        assert native.multiply_rate(1, False, None) == 0
        assert not [*tmp_path.rglob("*.so")]
    finally:
        native.library.cache_clear()
        kernels.forget_probes()
