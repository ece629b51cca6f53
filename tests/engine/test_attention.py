"""The engine equals the float64 oracle, forward and backward; broken engines do not."""

import random

import pytest
import torch
from helpers import engine_results, errors, oracle_results, random_case
from ringlab import Dense, Dilated, Execution, Simulated, attention, block_patterns, memory, reference
from ringlab.engine import execute
from ringlab.engine.execute import Call
from ringlab.kernels.torch_kernels import CpuFlash
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

PLAIN = Execution(gather=True, cache=False, pool=False)
CASES = 320


@pytest.mark.parametrize("seed", range(8))
def test_random_configurations(seed):
    """Both mixings, all offsets, causal or not, GQA, odd shapes, every dtype and switch, lse with a cotangent."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    zero_gradients = few_rows = 0
    for _ in range(CASES // 8):
        case = random_case(rng)
        q, k, v, dout, dlse = case.tensors()
        want = oracle_results(case, q, k, v, dout, dlse)
        if case.dtype in (torch.bfloat16, torch.float16) and int((want["dq"] != 0).any(-1).sum()) < 64:
            # Twice a typical rounding error needs a sample of rows; with a handful, check the shape in fp32 instead.
            case.dtype = torch.float32
            q, k, v, dout, dlse = case.tensors()
            want = oracle_results(case, q, k, v, dout, dlse)
            few_rows += 1
        got = engine_results(case, q, k, v, dout, dlse)
        bound = reference.tolerance(q, k, v, dout, pattern=case.pattern, causal=case.causal, scale=case.scale)
        found = errors(got, want, q, k, dout, case.scale)
        wrong = {n: (found[n], bound[n]) for n in found if not found[n] <= bound[n]}
        assert not wrong, f"{case}: {wrong}"
        assert got["out"].dtype == q.dtype and got["dq"].dtype == q.dtype and got["dk"].shape == k.shape
        zero_gradients += any(bool((want[n] == 0).all()) for n in ("dq", "dk", "dv"))
    assert few_rows <= CASES // 8 // 4
    assert zero_gradients <= CASES // 8 // 10  # a gradient that is zero everywhere tells little


LADDER = Dilated([150, 300], [1, 2])


@pytest.mark.parametrize("execution", [Execution(), PLAIN, Execution(cache=False, pool=True)])
@pytest.mark.parametrize("pattern", [LADDER, Dilated([40, 64], [3, 5]), Dilated([64], [2], "head_groups"), Dense()])
def test_switches_and_lengths(pattern, execution):
    """n below, at, above and far from a multiple of the segment length, primes included."""
    for n in (1, 2, 39, 40, 41, 64, 127, 131, 300, 301, 449):
        torch.manual_seed(n)
        q, k, v = (torch.randn(2, n, h, 16, requires_grad=True) for h in (4, 2, 2))
        dout = torch.randn(2, n, 4, 16)
        for causal in (False, True):
            out, lse = attention(q, k, v, pattern, causal=causal, execution=execution, return_lse=True)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
            ref, ref_lse = reference.attention(*exact, pattern, causal=causal)
            ref_grads = torch.autograd.grad(ref, exact, dout.double())
            found = errors(
                dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads))),
                dict(zip(("out", "lse", "dq", "dk", "dv"), (ref, ref_lse, *ref_grads))), q, k, dout,
            )  # fmt: skip
            assert max(found.values()) <= 5e-6, (n, causal, found)


def test_cache_and_pool_never_change_a_bit():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 4, 16, requires_grad=True) for _ in range(3))
    for gather in (False, True):
        seen = []
        for cache in (False, True, True):
            for pool in (False, True):
                out = attention(q, k, v, LADDER, causal=True, execution=Execution(gather, cache, pool))
                seen.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for other in seen[1:]:
            assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


@pytest.mark.parametrize("execution", [Execution(), PLAIN])
@pytest.mark.parametrize("backend", ["cpu_flash", "eager"])
@pytest.mark.parametrize(
    "pattern, n", [(Dilated([8, 20], [1, 3]), 33), (Dilated([140, 280], [1, 2]), 290), (Dense(), 140)]
)
def test_no_future_leaks_at_any_position(pattern, n, backend, execution):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8) for _ in range(3))
    run = lambda *t: attention(*t, pattern, causal=True, backend=backend, execution=execution)  # noqa: E731
    before = run(q, k, v)
    for p in range(1, n, 1 if n < 100 else 7):
        changed = [t.clone() for t in (q, k, v)]
        for t in changed:
            t[:, p:] = torch.randn_like(t[:, p:]) * 3
        assert torch.equal(run(*changed)[:, :p], before[:, :p]), p


def test_tokens_do_see_each_other():
    """Attention over the sequence, not over the heads: a value elsewhere in the segment moves the output."""
    q = torch.randn(1, 32, 4, 8)
    v = torch.zeros(1, 32, 4, 8)
    v[:, 5] = 1.0
    out = attention(q, q, v, Dense())
    assert bool((out.abs().sum(-1) > 0).all())


def test_values_of_one_give_one_wherever_something_is_seen():
    q, k, v = torch.randn(1, 77, 4, 8), torch.randn(1, 77, 4, 8), torch.ones(1, 77, 4, 8)
    out, lse = attention(q, k, v, Dilated([16, 50], [2, 3]), return_lse=True)
    seen = (lse != -torch.inf).transpose(1, 2)
    torch.testing.assert_close(out[seen], torch.ones_like(out[seen]))
    assert bool((out[~seen] == 0).all()) and bool((~seen).any())


def test_inputs_of_any_layout_are_not_changed():
    torch.manual_seed(0)
    base = torch.randn(2, 4, 90, 16)
    views = [base.transpose(1, 2), base.transpose(1, 2)[:, :, :, ::2], torch.randn(1, 90, 4, 16).expand(2, -1, -1, -1)]
    for q in views:
        kept = q.clone()
        out = attention(q, q, q, Dilated([32, 64], [1, 2]))
        assert torch.equal(q, kept) and torch.equal(out, attention(kept, kept, kept, Dilated([32, 64], [1, 2])))


def test_results_survive_later_calls():
    pool = Execution(pool=True)
    q = torch.randn(1, 128, 4, 16)
    out = attention(q, q, q, LADDER, execution=pool)
    kept = out.clone()
    for _ in range(10):
        attention(torch.randn_like(q), q, q, LADDER, execution=pool)
    assert torch.equal(out, kept)


@pytest.mark.parametrize("pattern", [LADDER, Dense(), block_patterns.local_global(1, 1, block_size=32)])
def test_results_have_the_memory_of_those_let_go(pattern):
    pool = memory.MemoryPool(threshold_bytes=0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 4, 16, requires_grad=True) for _ in range(3))

    def call(execution):
        out = attention(q, k, v, pattern, execution=execution)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    fresh, kept = call(Execution(results=False)), call(Execution(results=pool))
    view = call(Execution(results=pool))[0].detach()[:, -1:]  # of what is let go, a view of the result is kept
    stats = pool.stats()
    assert (stats.borrows, stats.allocations, stats.held_bytes) == (2, 2, 2 * 4 * q.numel())  # gradients are not lent
    kept_at, view_at = kept[0].data_ptr(), view.untyped_storage().data_ptr()
    third = call(Execution(results=pool))[0].data_ptr()
    again = call(Execution(results=pool))
    assert again[0].data_ptr() == third not in (kept_at, view_at)
    assert (pool.stats().allocations, pool.stats().reuses) == (3, 1) and torch.equal(view, fresh[0][:, -1:])
    for a, b, c in zip(fresh, kept, again):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_only_large_results_on_a_cpu_are_lent():
    held = []
    for n, dtype in ((2**14, torch.float32), (2**13, torch.float32), (2**14, torch.bfloat16)):
        q = torch.zeros(1, n, 4, 64, dtype=dtype)
        pool = Execution().results_of(q)
        held.append(pool is memory.RESULTS)
        assert Execution(results=False).results_of(q) is None
        assert Execution(results=memory.MemoryPool(max_bytes=1 << 20)).results_of(q) is None  # would not be kept
    assert held == [True, False, False] and memory.RESULTS.threshold_bytes == 16 << 20
    with FakeTensorMode():
        assert Execution().results_of(torch.zeros(1, 2**14, 4, 64)) is None
    with pytest.raises(TypeError, match="results cannot be 16"):
        Execution(results=16)


def test_no_gradient_is_computed_where_none_is_asked_for():
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    assert not attention(q, k, v, LADDER).requires_grad
    v.requires_grad_()
    out, lse = attention(q, k, v, LADDER, return_lse=True)
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert dv.shape == v.shape


def test_autocast_does_not_lower_the_precision():
    q, k, v = (torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3))
    for backend in ("cpu_flash", "eager"):
        want = attention(q, k, v, LADDER, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k, v, LADDER, backend=backend)
            (dq,) = torch.autograd.grad(out.sum(), q)
        assert torch.equal(out, want) and torch.equal(dq, torch.autograd.grad(want.sum(), q)[0])


def test_compiled_code_may_call_it():
    q = torch.randn(1, 40, 2, 8)
    for group in (None, Simulated(2)):

        def step(x, group=group):
            return attention(2 * x, x, x, LADDER, group=group) + 1

        torch.testing.assert_close(torch.compile(step, backend="eager")(q), step(q))


@pytest.mark.parametrize("power", [1, 2])
def test_double_backward_raises(power):
    """Also where the cotangent is a constant, so that only q, k and v lead to the second derivative."""
    q, k, v = (torch.randn(1, 20, 2, 8, requires_grad=True) for _ in range(3))
    loss = attention(q, k, v, LADDER).pow(power).sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported") as caught:
        (loss + dq.square().sum()).backward()
    assert "\n" not in str(caught.value)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        torch.autograd.functional.hessian(lambda q: attention(q, k, v, LADDER).pow(power).sum(), q)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch.func.jvp itself
def test_torch_func_derives_once_and_refuses_the_rest_in_one_line():
    q, k, v = (torch.randn(1, 20, 2, 8, requires_grad=True) for _ in range(3))

    def loss(q):
        return sum(x.square().sum() for x in attention(q, k.detach(), v.detach(), Dilated([8], [1]), return_lse=True))

    assert torch.equal(torch.func.grad(loss)(q), torch.autograd.grad(loss(q), q)[0])
    refused = {
        "vmap": lambda: torch.func.vmap(loss)(q.expand(2, *q.shape)),
        "vmap or batched": lambda: torch.func.jacrev(loss)(q),
        "jvp": lambda: torch.func.jvp(loss, (q,), (q,)),
        "double backward": lambda: torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q),
    }
    for words, call in refused.items():
        with pytest.raises(NotImplementedError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


# Broken engines: each of these must be told from the right one.


def fp32_case(pattern=LADDER, n=300):
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, 4, 16, requires_grad=True) for _ in range(3))
    return q, k, v, torch.randn(1, n, 4, 16)


def worst(attend, pattern=LADDER, causal=False):
    """The largest error of ``attend(q, k, v) -> out`` against the oracle, in units of the bound: <= 1 passes."""
    q, k, v, dout = fp32_case()
    out = attend(q, k, v)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    ref, _ = reference.attention(*exact, pattern, causal=causal)
    found = [reference.error(out, ref, 1.0)]
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(ref, exact, dout.double())):
        found.append(reference.error(a, b, reference.gradient_floor(q, k, dout)))
    return max(found) / 5e-6


def engine(q, k, v):
    return attention(q, k, v, LADDER, execution=Execution(cache=False))


def test_the_right_engine_passes_what_mutants_fail():
    assert worst(engine) <= 1


def test_mutant_dropped_scale(monkeypatch):
    right = CpuFlash.forward
    monkeypatch.setattr(CpuFlash, "forward", lambda self, q, k, v, causal, scale: right(self, q, k, v, causal, 1.0))
    assert worst(engine) > 100


def test_mutant_offset_off_by_one(monkeypatch):
    right = Dilated.offset
    wrong = lambda self, i, h, *rest: (right(self, i, h, *rest) + 1) % self.dilation_rates[i]  # noqa: E731
    q, k, v, _ = fp32_case()
    good = reference.attention(q, k, v, LADDER)[0]
    monkeypatch.setattr(Dilated, "offset", wrong)
    assert reference.error(engine(q, k, v), good, 1.0) > 1e-2


def test_mutant_detached_mixing_weights():
    def detached(q, k, v):
        parts = [attention(q, k, v, Dilated([w], [r]), return_lse=True) for w, r in ((150, 1), (300, 2))]
        return execute.merge([o for o, _ in parts], [lse.detach() for _, lse in parts])[0]

    def attached(q, k, v):
        parts = [attention(q, k, v, Dilated([w], [r]), return_lse=True) for w, r in ((150, 1), (300, 2))]
        return execute.merge([o for o, _ in parts], [lse for _, lse in parts])[0]

    assert worst(detached) > 100
    assert worst(attached) <= 1  # and the lse cotangent makes the same composition exact


def test_mutant_unnormalised_merge(monkeypatch):
    def wrong(out, lse, other_out, other_lse):
        out.add_(other_out * (other_lse - lse).exp().transpose(1, 2).unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, other_lse))

    monkeypatch.setattr(execute, "merge_", wrong)
    assert worst(engine) > 100


def test_mutant_averaged_branches():
    def mean(q, k, v):
        return sum(attention(q, k, v, Dilated([w], [r])) for w, r in ((150, 1), (300, 2))) / 2

    assert worst(mean) > 100


def test_mutant_low_precision_lse(monkeypatch):
    right = CpuFlash.forward

    def rounded(self, *args):
        out, lse = right(self, *args)
        return out, lse.bfloat16().float()

    monkeypatch.setattr(CpuFlash, "forward", rounded)
    assert worst(engine) > 100


def test_mutant_attention_over_heads():
    assert worst(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)) > 100


def test_mutant_shared_kv_gradient_not_summed(monkeypatch):
    """Grouped queries: the gradients of one K/V head's queries add up."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, h, 8, requires_grad=True) for h in (6, 2, 2))
    dout = torch.randn(1, 64, 6, 8)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(reference.attention(*exact, LADDER)[0], exact, dout.double())[2]
    floor = reference.gradient_floor(q, k, dout)
    assert reference.error(torch.autograd.grad(attention(q, k, v, LADDER), v, dout)[0], want, floor) <= 5e-6
    monkeypatch.setattr(Call, "shares_kv", property(lambda self: False))
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.autograd.grad(attention(q, k, v, LADDER), v, dout)
