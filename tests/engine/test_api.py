import pytest
import ringlab
import torch
from ringlab import Dense, Dilated, Simulated, attention

P = Dilated([8], [2])


def t(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


GOOD = (1, 16, 4, 8)


@pytest.mark.parametrize(
    "q, k, v, error, message",
    [
        (t(1, 16, 4), t(*GOOD), t(*GOOD), ValueError, r"q must be \(batch, .*, got shape \(1, 16, 4\)"),
        (t(*GOOD), t(1, 15, 4, 8), t(1, 15, 4, 8), ValueError, "agree in batch, seq and head_dim"),
        (t(*GOOD), t(2, 16, 4, 8), t(2, 16, 4, 8), ValueError, "agree in batch, seq and head_dim"),
        (t(*GOOD), t(1, 16, 4, 6), t(1, 16, 4, 6), ValueError, "agree in batch, seq and head_dim"),
        (t(*GOOD), t(*GOOD), t(1, 16, 2, 8), ValueError, "k and v must have one shape"),
        (t(*GOOD), t(1, 16, 3, 8), t(1, 16, 3, 8), ValueError, "multiple of K/V heads: 4 and 3"),
        (t(*GOOD, dtype=torch.int64), t(*GOOD), t(*GOOD), ValueError, "q must be float64, .* got torch.int64"),
        (t(*GOOD), t(*GOOD, dtype=torch.float64), t(*GOOD), ValueError, "one dtype"),
        (t(*GOOD), t(*GOOD), torch.zeros(GOOD, device="meta"), ValueError, "one device"),
        (t(1, 0, 4, 8), t(1, 0, 4, 8), t(1, 0, 4, 8), ValueError, "q is empty"),
        ([1.0], t(*GOOD), t(*GOOD), TypeError, "q must be a tensor, got list"),
        (t(*GOOD).to_sparse(), t(*GOOD), t(*GOOD), ValueError, "q must be a plain tensor, got a torch.sparse_coo one"),
        (*[torch.zeros(GOOD, device="meta")] * 3, NotImplementedError, "runs on cpu and cuda tensors, got meta"),
    ],
)
def test_bad_tensors_are_one_line(q, k, v, error, message):
    with pytest.raises(error, match=message) as caught:
        attention(q, k, v, P)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(scale=float("nan")), ValueError, "scale must be finite"),
        (dict(scale=float("inf")), ValueError, "scale must be finite"),
        (dict(scale=1e300), ValueError, "scale must be finite"),
        (dict(scale="a"), TypeError, "scale must be a number"),
        (dict(causal="no"), TypeError, "causal must be True or False"),
        (dict(execution="gather"), TypeError, "execution must be a ringlab.Execution"),
        (dict(backend=()), ValueError, "backend must be a name"),
        (dict(group="all"), TypeError, "group must be a ProcessGroup, a 1-D DeviceMesh or ringlab.Simulated"),
        (dict(scheme="ring"), ValueError, "scheme and layout are for several ranks"),
        (dict(group=Simulated(2), scheme="rings"), ValueError, "unknown scheme 'rings'; known: auto, plan, ring"),
        (dict(group=Simulated(2), layout="spiral"), ValueError, "unknown layout 'spiral'"),
        (dict(dropout_p=0.1), TypeError, "'dropout_p': attention dropout is not supported"),
        (dict(attn_mask=None), TypeError, "'attn_mask': masks are not arguments"),
        (dict(is_causal=True), TypeError, "write causal=True"),
        (dict(window=3), TypeError, "'window': unknown argument"),
        (dict(enable_gqa=True), TypeError, "'enable_gqa': k and v may have fewer heads without it"),
        (dict(backend="xla"), ValueError, "unknown backend 'xla'"),
    ],
)
def test_bad_arguments_are_one_line(arguments, error, message):
    q = t(*GOOD)
    with pytest.raises(error, match=message) as caught:
        attention(q, q, q, P, **arguments)
    assert "\n" not in str(caught.value)


def test_pattern_must_be_a_pattern():
    q = t(*GOOD)
    with pytest.raises(TypeError, match="pattern must be a ringlab pattern, got str"):
        attention(q, q, q, "dense")


def test_return_lse():
    q = torch.randn(2, 16, 4, 8)
    out, lse = attention(q, q, q, Dense(), return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 16) and lse.dtype == torch.float32
    low = attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), P, return_lse=True)
    assert low[0].dtype == torch.bfloat16 and low[1].dtype == torch.float32
    assert attention(q.double(), q.double(), q.double(), P, return_lse=True)[1].dtype == torch.float64


def test_torch_compile_runs_around_it_at_any_length():
    """Plans change with n: traced, the second length ended inside the compiler."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: attention(2 * q, q, q, P) + 1, backend="eager")
    for n in (32, 48):
        q = torch.randn(1, n, 2, 8, requires_grad=True)
        assert torch.equal(compiled(q), attention(2 * q, q, q, P) + 1)
        compiled(q).sum().backward()


def test_the_presets_of_blocks_are_imported_by_their_public_name():
    from ringlab.blocks import bigbird

    assert bigbird is ringlab.blocks.bigbird is ringlab.block_patterns.bigbird
