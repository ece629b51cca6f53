"""How a call runs is asked once for each kind of call, and again where it may differ."""

import gc
import weakref

import pytest
import torch
from ringlab import Dense, Dilated, Execution, attention, kernels
from ringlab.cache import PatternCache
from ringlab.engine import dilated
from ringlab.engine.ways import LocalCall, way_of
from ringlab.kernels.base import DeviceSpec

LADDER = Dilated([16, 32], [1, 2])
EAGER = type(kernels.KERNELS["eager"])


def tensors(n=64, heads=4, kv_heads=2, dtype=torch.float32, d=16):
    shapes = ((1, n, h, d) for h in (heads, kv_heads, kv_heads))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(x, generator=generator).to(dtype) for x in shapes]


def way(
    pattern=LADDER,
    causal=True,
    backend="auto",
    differentiable=False,
    execution=None,
    softcap=None,
    **of,
):
    q, k, _ = tensors(**of)
    execution = execution or Execution()
    call = LocalCall(pattern, causal, 0.25, backend, execution, softcap)
    return way_of(q, k, call, differentiable)


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": Dense()},
        {"causal": False},
        {"backend": "eager"},
        {"softcap": 5.0},
        {"n": 128},
        {"kv_heads": 4},
        {"dtype": torch.float64},
        {"execution": Execution(tile=8)},
        {"execution": Execution(pool=True)},
        {"differentiable": True},
    ],
    ids=str,
)
def test_equal_kinds_have_one_way_and_others_their_own(change):
    assert way() is way()
    assert way(**change) is way(**change)
    assert way(**change) is not way()


def test_caches_and_pools_of_results_do_not_decide():
    other = Execution(cache=False, results=False)
    assert way(execution=other) is way()


def test_a_way_keeps_no_cache_of_a_caller_alive():
    own = PatternCache()
    attention(*tensors(), LADDER, causal=True, execution=Execution(cache=own))
    assert own.stats().entries
    execution = Execution(cache=own)
    way(execution=execution)
    held = weakref.ref(execution)
    del execution
    gc.collect()
    assert held() is None


def test_without_a_cache_plans_are_built_each_time(monkeypatch):
    make, made = dilated.make_plan, []
    monkeypatch.setattr(
        dilated, "make_plan", lambda *args: made.append(args) or make(*args)
    )
    options = {"execution": Execution(cache=False), "backend": "cpu_flash"}
    for _ in range(3):
        attention(*tensors(), Dense(), **options)
    assert len(made) == 3


class Doubled(EAGER):
    """Twice the values: a kernel that another one must not be taken for."""

    def forward(self, *args):
        out, lse = super().forward(*args)
        return 2 * out, lse


def test_forgotten_probes_are_forgotten_ways(monkeypatch):
    inputs = tensors()
    before = attention(*inputs, LADDER, backend="eager")
    monkeypatch.setitem(kernels.KERNELS, "eager", Doubled())
    monkeypatch.setattr(kernels, "_wrong", lambda *_: None)
    try:
        kernels.forget_probes()
        again = attention(*inputs, LADDER, backend="eager")
    finally:
        monkeypatch.undo()
        kernels.forget_probes()
    assert torch.allclose(again, 2 * before)
    assert torch.equal(attention(*inputs, LADDER, backend="eager"), before)


def test_nothing_is_remembered_of_a_pretended_device():
    before = way(Dense())
    for capability in ((6, 1), (9, 0)):
        with kernels.pretend(DeviceSpec("cuda", capability), Doubled()):
            assert type(way(Dense()).kernel) is Doubled
    assert way(Dense()) is before


def test_a_probe_out_of_memory_is_asked_again(monkeypatch):
    inputs, choose, failures = tensors(n=48), kernels.choose, [1]

    def fails_once(*args, **options):
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return choose(*args, **options)

    monkeypatch.setattr(kernels, "choose", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        attention(*inputs, LADDER)
    assert attention(*inputs, LADDER).isfinite().all()


def test_what_a_context_changes_is_not_remembered():
    kernels.forget_probes()
    leaves = [t.requires_grad_() for t in tensors(n=96)]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert attention(*leaves, LADDER).dtype == torch.bfloat16
    with torch.device("meta"):
        attention(*leaves, LADDER)
    out = attention(*leaves, LADDER)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = attention(*exact, LADDER)
    grads, right = (
        torch.autograd.grad(o, x, torch.ones_like(o))
        for o, x in ((out, leaves), (want, exact))
    )
    for x, y in zip((out, *grads), (want, *right)):
        assert (x - y).norm() / y.norm() < 1e-5


def test_kernels_are_asked_for_the_heads_that_they_get(monkeypatch):
    """A cotangent of lse makes heads wider in the backward."""
    kernels.forget_probes()
    choose, asked = kernels.choose, []
    monkeypatch.setattr(
        kernels,
        "choose",
        lambda *args, **options: asked.append(args[2]) or choose(*args, **options),
    )
    leaves = [t.requires_grad_() for t in tensors(n=80)]
    out, lse = attention(*leaves, LADDER, return_lse=True, backend="cpu_flash")
    torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert asked == [16, 16, 16, 16, 24, 24]
