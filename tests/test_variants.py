import pytest
import ringlab
import torch
from ringlab import Dilated, reference
from ringlab.variants import RingDilatedAttentionV2Collective, RingDilatedAttentionV2Flash

NAMES = (
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2Flash",
)


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
    outs = [module(q, k, v) for module in (pascal, modern)]
    errors = reference.sampled_errors(
        q, k, v, Dilated([2048, 4096], [1, 2], "head_groups", "branch"), out=outs[0], lse=None
    )
    assert errors["out"] <= 5e-6
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_system_is_one_function(name, causal):
    torch.manual_seed(0)
    module = getattr(ringlab, name)([32, 64, 128], [1, 2, 4], enable_memory_pool=True, memory_pool_threshold_mb=0)
    q, k, v = (torch.randn(2, 150, 7, 8, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 150, 7, 8)
    pattern = Dilated([32, 64, 128], [1, 2, 4], "head_groups", "branch")
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    ref, _ = reference.attention(*exact, pattern, causal=causal)
    want = torch.autograd.grad(ref, exact, dout.double())
    for _ in range(3):  # later steps reuse cached patterns and pooled buffers
        out = module(q, k, v, is_causal=causal)
        assert reference.error(out, ref, 1.0) <= 5e-6
        for got, exact_grad in zip(torch.autograd.grad(out, (q, k, v), dout), want):
            assert reference.error(got, exact_grad, reference.gradient_floor(q, k, dout)) <= 5e-6


def test_gradient_checkpointing_changes_nothing():
    q = torch.randn(1, 64, 4, 8, requires_grad=True)
    grads = []
    for use in (False, True):
        module = ringlab.ImprovedDilatedAttention([16, 32], [1, 2], use_gradient_checkpointing=use)
        grads.append(torch.autograd.grad(module(q, q, q).square().sum(), q)[0])
    assert torch.equal(*grads)


def test_dtype_policy_and_callers_dtype():
    flash = RingDilatedAttentionV2Flash([16], [2], device="cpu")
    assert flash.dtype == torch.float32  # the hardware's policy reaches the subclass
    assert RingDilatedAttentionV2Flash([16], [2], dtype=torch.bfloat16).dtype == torch.bfloat16  # explicit wins
    q = torch.randn(1, 32, 2, 8)
    assert flash(*[q.half()] * 3).dtype == torch.float16  # caller's dtype in, caller's dtype out
    assert RingDilatedAttentionV2Collective([16], [2]).dtype is None
    with pytest.raises(ValueError, match="pass dtype=torch.float64"):
        flash(*[q.double()] * 3)


def test_policy_on_a_faked_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, dtype in (((6, 1), torch.float32), ((7, 0), torch.float16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        assert RingDilatedAttentionV2Flash([16], [2]).dtype == dtype


def test_flash_switch_and_refusals_are_visible():
    on, off = (RingDilatedAttentionV2Flash([16], [2], use_flash_attention=x) for x in (True, False))
    assert {name for name, *_, chosen in on.backends() if chosen} == {"cpu_flash"}
    assert {name for name, *_, chosen in off.backends() if chosen} == {"eager"}
    assert all(why for _, runs, why, _ in on.backends() if not runs)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(sparsity_ratio=0.9), TypeError, "'sparsity_ratio': it changed nothing in the original"),
        (dict(dropout=0.1), TypeError, "attention dropout is not supported"),
        (dict(heads=4), TypeError, "'heads': unknown argument"),
        (dict(block_size=64), TypeError, "'block_size': it belongs to the block-sparse systems"),
        (dict(ring_size=2), NotImplementedError, "ring_size must be 1"),
        (dict(memory_pool_threshold_mb=-1), ValueError, "finite and not negative"),
        (dict(memory_pool_threshold_mb=float("nan")), ValueError, "finite and not negative"),
        (dict(ring_size=0), ValueError, "ring_size must be a positive integer"),
        (dict(dtype=torch.int32), ValueError, "dtype must be float64"),
        (dict(use_pattern_cache=None), TypeError, "use_pattern_cache must be True or False"),
    ],
)
def test_bad_constructor_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ringlab.DilatedAttention([16], [2], **arguments)


def test_bad_forward_arguments():
    module = ringlab.DilatedAttention([16], [2])
    q = torch.randn(1, 32, 2, 8)
    with pytest.raises(TypeError, match="attention_mask"):
        module(q, q, q, attention_mask=None)
