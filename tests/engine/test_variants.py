"""The published systems by their published names: one function, executed in different
ways.
"""

import copy
import pickle

import pytest
import ringlab
import torch
from matrix import Case, differentiated, errors, judged
from ring_cases import error_of_original
from ringlab import (
    Dilated,
    DilatedAttention,
    RingDilatedAttentionV2Collective,
    RingDilatedAttentionV2Flash,
    kernels,
    native,
    reference,
)
from ringlab.ring.launch import launch

RINGS = "V2 V2Collective V2Robust V2Flash Production Hybrid SDPA Correct".split()


def worst_error(module, n, pattern, causal=False, layout=None) -> float:
    """Of out and the gradients."""
    case = Case(
        pattern,
        n,
        torch.float32,
        causal,
        2,
        heads=7,
        kv_heads=7,
        d=8,
        lse_cotangent=False,
        layout=layout,
    )
    inputs, dout, _, want, _ = judged(case)
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    found = []
    for _ in range(3):  # later steps reuse cached patterns and pooled buffers
        got = differentiated(
            module(q, k, v, is_causal=causal), want["lse"], (q, k, v), dout, None
        )
        found += errors(got, want, q, k, dout).values()
    return max(found)


def test_published_snippets_run_as_written():
    device = torch.device("cpu")
    pascal = RingDilatedAttentionV2Collective(
        segment_lengths=[2048, 4096],
        dilation_rates=[1, 2],
        device=device,
        dtype=torch.float32,  # Critical for Pascal!
        use_pattern_cache=True,
        enable_memory_pool=True,
        memory_pool_threshold_mb=16.0,
    )
    modern = RingDilatedAttentionV2Flash(
        segment_lengths=[2048, 4096],
        dilation_rates=[1, 2],
        device=device,
        # dtype auto-selected (FP16)
        use_flash_attention=True,
    )
    q, k, v = (torch.randn(1, 4096, 2, 8) for _ in range(3))
    out = pascal(q, k, v)
    assert (
        reference.sampled_errors(q, k, v, pascal.pattern, out=out, lse=None)["out"]
        <= 5e-6
    )
    assert torch.equal(out, modern(q, k, v))


@pytest.mark.filterwarnings("ignore:.* memory pool is idle")
@pytest.mark.parametrize(
    "name, ring_size",
    [
        ("DilatedAttention", 1),
        ("ImprovedDilatedAttention", 1),
        *(
            (f"RingDilatedAttention{name}", ring_size)
            for name in RINGS
            for ring_size in (1, 3)
        ),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_system_is_one_function(name, ring_size, causal):
    made = {
        "ring_size": ring_size,
        "enable_memory_pool": True,
        "memory_pool_threshold_mb": 0,
        "dropout": 0.0,
    }
    module = getattr(ringlab, name)([32, 64, 128], [1, 2, 4], **made)
    assert (
        worst_error(
            module,
            150,
            Dilated([32, 64, 128], [1, 2, 4], "head_groups", "branch"),
            causal,
        )
        <= 5e-6
    )


def test_dtype_policy_and_callers_dtype():
    flash = RingDilatedAttentionV2Flash([16], [2], device="cpu")
    q = torch.randn(1, 32, 2, 8)
    assert (
        flash(*[q.half()] * 3).dtype == torch.float16
    )  # caller's dtype in, caller's dtype out
    assert DilatedAttention([16], [2]).dtype is None  # no ring system


def test_modules_follow_half_and_to_as_those_with_weights_do():
    module = DilatedAttention([16], [2], device="cpu")
    q = torch.randn(1, 32, 2, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), module)
    for convert, dtype in (
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("double", torch.float64),
    ):
        getattr(model, convert)()
        assert module.dtype == dtype and module.device == torch.device("cpu")
        assert module(*[q.to(dtype)] * 3).dtype == dtype
    before = module.dtype
    assert (
        model.to("meta") is model
        and module.dtype == before
        and module.device == torch.device("meta")
    )
    assert (
        DilatedAttention([16], [2], dtype=torch.float16).cpu().device is None
    )  # nothing to move
    low = module.to_empty(device="cpu").to(torch.bfloat16)(*[q] * 3)
    assert low.dtype == torch.float32 and torch.equal(
        low, low.bfloat16().float()
    )  # computed in bf16


@pytest.mark.parametrize(
    "name, dtype, lends",
    [
        ("DilatedAttention", torch.float32, True),
        ("RingDilatedAttentionV2Collective", torch.bfloat16, False),
        ("BlockSparseRingDilatedAttention", torch.bfloat16, True),
        ("BlockSparseOptimized", torch.float32, True),
        ("BlockSparseTorchSparse", torch.float32, False),
    ],
)
def test_a_pool_lends_or_is_said_once_to_be_idle(name, dtype, lends, recwarn):
    pool = {"enable_memory_pool": True, "memory_pool_threshold_mb": 0}
    module = getattr(ringlab, name)([128, 384], [2, 1], **pool)
    for _ in range(2):
        module(*[torch.randn(1, 384, 2, 8, dtype=dtype)] * 3)
    assert bool(module.execution.pool.stats().borrows) == lends
    told = [str(x.message) for x in recwarn]
    assert ["pool is idle" in x for x in told] == [True] * (not lends)


def test_modules_are_copied_and_pickled_with_a_pool_of_their_own():
    module = DilatedAttention(
        [16], [2], enable_memory_pool=True, memory_pool_threshold_mb=1
    )
    q = torch.randn(1, 32, 2, 8)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.execution.pool is not module.execution.pool
        assert other.execution.pool.threshold_bytes == 2**20
        assert torch.equal(other(q, q, q), module(q, q, q))


@pytest.mark.parametrize("name", [*RINGS, "HilbertGPUOptimized"])
def test_policy_on_a_faked_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, dtype in (
        ((6, 1), torch.float32),
        ((7, 0), torch.float16),
        ((9, 0), torch.bfloat16),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None, c=capability: c
        )
        made = getattr(ringlab, f"RingDilatedAttention{name}")
        assert made([16], [2]).dtype == dtype
        assert made([16], [2], dtype=torch.float64).dtype == torch.float64


def test_the_flash_switch_chooses_kernels():
    on, off = (
        RingDilatedAttentionV2Flash([16], [2], use_flash_attention=x)
        for x in (True, False)
    )
    best = "cpu_flash" if native.library()[1] else "compiled"
    for module, name in ((on, best), (off, "eager")):
        call = {"backward": True, "backend": module.chain}
        assert kernels.choose("cpu", torch.float32, 64, **call).name == name


@pytest.mark.parametrize("ring_size", [1, 4])
def test_the_hilbert_system_runs_the_pattern_along_the_curve(ring_size):
    module = ringlab.RingDilatedAttentionHilbertGPUOptimized(
        [8, 24], [1, 2], ring_size=ring_size
    )
    assert (
        worst_error(module, 48, module.pattern, layout=ringlab.ring.hilbert(6, 8, 1))
        <= 5e-6
    )
    q = torch.zeros(1, 48, 4, 8)
    with pytest.raises(ValueError, match="not in time order"):
        module(q, q, q, is_causal=True)


@pytest.mark.parametrize("name", ["SDPA", "Correct", "HilbertGPUOptimized"])
def test_layers_of_the_original_are_linear_and_attention(name):
    name = f"RingDilatedAttention{name}"
    assert error_of_original(name, None) <= 1e-12
    if "Hilbert" not in name:  # it takes no group
        assert max(launch(error_of_original, 2, name)) <= 1e-12


def test_a_layer_loads_a_state_dictionary_of_the_original():
    layer = ringlab.RingDilatedAttentionSDPA(32, 4, [16], [2])
    shapes = {"qkv_proj.weight": (96, 32), "qkv_proj.bias": (96,)}
    shapes |= {"out_proj.weight": (32, 32), "out_proj.bias": (32,)}
    layer.load_state_dict({name: torch.ones(shape) for name, shape in shapes.items()})
