"""The compiled CPU kernel besides what ``test_kernels`` and the matrix check: bias,
merging, extremes, no compiler.
"""

import math
import os

import pytest
import torch
from refusals import refused
from ringlab import Dense, Dilated, attention, kernels, native
from ringlab.engine.execute import merge
from ringlab.kernels import Eager
from ringlab.kernels.compiled import Compiled
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


@pytest.mark.parametrize(
    "dtype, most",
    [(torch.float32, 2e-6), (torch.float16, 2e-6), (torch.bfloat16, 4e-3)],
)
@pytest.mark.parametrize(
    "m, m_k, d",
    [
        (5, 7, 8),
        (3, 2100, 33),
        (8, 1100, 128),
        (64, 96, 64),
        (65, 97, 33),
        (600, 250, 48),
        (70, 300, 128),
    ],
)
def test_a_bias_is_added_however_it_lies(compiled, m, m_k, d, dtype, most):
    """The same for all queries, for each query, rows or keys side by side; hidden keys
    have -inf.
    """
    q, k, v, dout = drawn(m, m_k, d, dtype)
    whole = torch.randn(2, m, 3, m_k)
    whole[:, :, 0, : m_k // 2] = -torch.inf
    by_row = whole.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    for bias in (whole[:, :1], whole, by_row, whole[:1, :, :1].expand(2, -1, 3, -1)):
        exact = [t.double() for t in (q, k, v)]
        want, want_lse = EXACT.forward(*exact, False, 0.3, bias.double())
        out, lse = compiled.forward(q, k, v, False, 0.3, bias)
        assert off(out, want) <= most and off(lse, want_lse) <= 2e-6
        grads = compiled.backward(
            dout, q, k, v, want.to(dtype), want_lse.float(), False, 0.3, bias
        )
        wanted = EXACT.backward(
            dout.double(),
            *exact,
            want.to(dtype).double(),
            want_lse,
            False,
            0.3,
            bias.double(),
        )
        floor = 0.01 * float(dout.double().norm())
        for found, grad in zip(grads, wanted):
            assert float((found.double() - grad).norm()) <= 5e-6 * max(
                float(grad.norm()), floor
            )


@pytest.mark.parametrize("m", [130, 4])
def test_results_are_merged_in_place_into_strided_rows(compiled, m):
    """As ``merge`` does it; what sees no key changes nothing, and is replaced where it
    came first.
    """
    q, k, v, _ = drawn(m, 200, 40)
    parts = [
        compiled.forward(q, k[:, a:b], v[:, a:b], False, 0.2)
        for a, b in ((0, 70), (70, 200))
    ]
    want, want_lse = merge(*zip(*parts))
    out, lse = (
        torch.full((2, 2 * m, 3, 64), 7.0)[:, ::2, :, 8:48],
        torch.empty(2, m, 3).transpose(1, 2),
    )
    compiled.forward_into(out, lse, q, k[:, :70], v[:, :70], False, 0.2, merge=False)
    compiled.forward_into(out, lse, q, k[:, 70:], v[:, 70:], False, 0.2, merge=True)
    assert off(out, want.double()) <= 1e-6 and off(lse, want_lse.double()) <= 1e-6
    hidden, before = torch.full((2, 1, 3, 200), -torch.inf), (out.clone(), lse.clone())
    compiled.forward_into(out, lse, q, k, v, False, 0.2, hidden, merge=True)
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
    compiled.forward_into(out, lse, q, k, v, False, 0.2, hidden, merge=False)
    assert not out.any() and (lse == -torch.inf).all()
    compiled.forward_into(out, lse, q, k, v, False, 0.2, merge=True)
    assert off(out, want.double()) <= 1e-6 and off(lse, want_lse.double()) <= 1e-6


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("m", [70, 450])  # 450: three panels of keys
def test_gradients_are_added_in_place_as_torch_adds_them(compiled, m, causal):
    q, k, v, dout = drawn(m, m, 40)
    out, lse = compiled.forward(q, k, v, causal, 0.2)
    call = dout, q, k, v, out, lse, causal, 0.2
    grads = compiled.backward(*call)
    for add in ((False, True), (True, False), (True, True)):
        there = [torch.randn(2, 2 * m, 3, 48)[:, ::2, :, 8:] for _ in grads]
        summed = [t + g for t, g in zip(there, grads)]
        compiled.backward_into(*there, *call, add=add)
        for t, one, total, adds in zip(there, grads, summed, (add[0], add[1], add[1])):
            assert torch.equal(t, total if adds else one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_as_torch_rounds(compiled, dtype):
    q, k, v, _ = drawn(70, 90, 40, dtype)
    v[0, :, 1] = 6e-6  # a subnormal number of fp16
    v[1, 5, 2, 7] = math.nan
    out, lse = torch.empty(2, 70, 3, 40, dtype=dtype), torch.empty(2, 3, 70)
    compiled.forward_into(out, lse, q, k, v, False, 0.2, merge=False)
    wide, _ = compiled.forward(q, k, v, False, 0.2)
    assert wide.dtype == torch.float32 and torch.equal(
        out.nan_to_num(7), wide.to(dtype).nan_to_num(7)
    )


def test_extreme_scores(compiled):
    """Far apart, large, or not numbers: no overflow, and NaN stays where it is seen."""
    q, k, v, _ = drawn(80, 120, 16)
    for factor in (1e-20, 1e3, 1e15):
        want, want_lse = EXACT.forward(
            q.double() * factor, k.double(), v.double(), True, 1.0
        )
        out, lse = compiled.forward(q * factor, k, v, True, 1.0)
        assert (
            off(out, want) <= 2e-3 * min(1, factor) + 2e-6
            and off(lse, want_lse) <= 1e-6
        )
        dout = torch.randn_like(q)
        *_, dv = compiled.backward(dout, q * factor, k, v, out, lse, True, 1.0)
        exact = dout.double(), q.double() * factor, k.double(), v.double()
        *_, wanted = EXACT.backward(*exact, want, want_lse, True, 1.0)
        assert off(dv, wanted) <= 2e-3 * min(1, factor) + 5e-6
    k[1, 50, 2, 3] = math.nan
    out, lse = compiled.forward(q, k, v, False, 1.0)
    seen = torch.zeros(2, 80, 3, dtype=torch.bool)
    seen[1, :, 2] = True
    assert torch.equal(out.isnan().all(-1), seen) and torch.equal(
        out.isnan().any(-1), seen
    )
    assert torch.equal(lse.isnan().transpose(1, 2), seen)


def test_bits_of_two_numbers_are_no_number(compiled):
    """bf16 is read in pairs: where one is 0 and denormal numbers count as 0, or one is
    -inf, the other stays.
    """
    q, k, v, _ = drawn(70, 70, 16, torch.bfloat16)
    k[..., 1::2] = 0
    want = EXACT.forward(q.double(), k.double(), v.double(), True, 0.3)
    torch.set_flush_denormal(True)
    try:
        out, lse = compiled.forward(q, k, v, True, 0.3)
    finally:
        torch.set_flush_denormal(False)
    assert off(out, want[0]) <= 4e-3 and off(lse, want[1]) <= 2e-6
    q, k[0, 3, :, 1] = q.abs(), -math.inf
    out, lse = compiled.forward(q, k, v, False, 0.3)
    assert out.isfinite().all() and lse.isfinite().all()


def test_tensors_without_memory_or_with_a_pending_sign(compiled):
    q = torch.randn(1, 40, 2, 8)
    found = compiled.forward(torch._neg_view(q), q, q, False, 0.3)
    assert all(
        torch.equal(a, b) for a, b in zip(found, compiled.forward(-q, q, q, False, 0.3))
    )
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scattered_keys_are_read_as_their_copies_are(compiled, dtype):
    """Any rows, in any order and twice, others for each head; the bits are those of a
    call on copies.
    """
    q, k, v, _ = drawn(70, 333, 40, dtype)
    index = torch.randint(0, 333, (2, 3, 205))
    copies = [
        torch.gather(t, 1, index.transpose(1, 2)[..., None].expand(-1, -1, -1, 40))
        for t in (k, v)
    ]
    bias = torch.randn(2, 1, 3, 205)
    for more in (None, bias):
        found, want = (
            compiled.forward(q, k, v, False, 0.2, more, index),
            compiled.forward(q, *copies, False, 0.2, more),
        )
        assert all(map(torch.equal, found, want))
    one = index[:, :1].expand(-1, 3, -1)  # the same for all heads
    want = compiled.forward(
        q, *(t[torch.arange(2)[:, None], index[:, 0]] for t in (k, v)), False, 0.2
    )
    assert all(map(torch.equal, compiled.forward(q, k, v, False, 0.2, None, one), want))


def test_half_precision_results_are_not_merged(compiled):
    q, k, v, _ = drawn(8, 8, 8, torch.bfloat16)
    out, lse = torch.zeros_like(q), torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match="merged in float32"):
        compiled.forward_into(out, lse, q, k, v, False, 1.0, merge=True)


def test_threads_change_no_bit(compiled):
    q, k, v, dout = drawn(700, 3000, 24)
    found = []
    for threads in (1, 2, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        out, lse = KERNEL.forward(q, k, v, True, 0.2)
        grads = KERNEL.backward(dout, q, k, v, out, lse, True, 0.2)
        found.append(
            [out, lse, *grads, *KERNEL.forward(q[:, :3], k, v, False, 0.2)]
        )  # few queries: by parts of keys
        torch.set_num_threads(before)
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other)
    )


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
