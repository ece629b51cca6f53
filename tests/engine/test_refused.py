"""What torch may ask of a call beyond its value and one gradient: a recording, a second
derivative, a batch of gradients, tensors that are none. Each is refused in one line.
"""

import pytest
import torch
from call_cases import ONES, calls, refusals, refusals_of_ranks, said
from ringlab import Dense, KVCache, Simulated, attention, nn, selection
from ringlab.ring.launch import launch
from torch.testing._internal.two_tensor import TwoTensor

GROUPS = [None, Simulated(1), Simulated(2)]


@pytest.mark.parametrize("group", [*GROUPS, "ranks"])
def test_second_derivatives_and_batched_gradients(group):
    ranks = [refusals(group)] if group != "ranks" else launch(refusals_of_ranks, 2)
    for found in ranks:
        for kind, (twice, batched) in found.items():
            assert "differentiable once" in twice and "\n" not in twice, (kind, twice)
            assert "batched gradients" in batched and "\n" not in batched, kind


def others() -> dict:
    """Calls of one tensor (1, 4, 2, 8), by name."""
    cache = KVCache(
        Dense(), batch=1, heads=2, head_dim=8, max_seq_len=9, dtype=torch.float64
    )
    sizes = {"block_size": 2}
    gates = torch.ones(1, 4, 2, 3, dtype=torch.float64)
    return {
        "step": lambda x: attention(
            *[x[:, :1].detach()] * 3, "dense", causal=True, cache=cache
        ),
        "append": lambda x: cache.append(x, x),
        "moba": lambda x: selection.moba(x, x, top_k=1, **sizes),
        "nsa": lambda x: selection.nsa(x, x, x, gates, top_k=3, window=2, **sizes),
        "dsa": lambda x: selection.dsa(x, x[:, :, :1], gates[..., 0], top_k=1),
        "vertical_slash": lambda x: selection.vertical_slash(x, x, **sizes),
    }


def every_call(group) -> dict:
    by_name = {n: lambda x, f=f: f(x, x, x)[0] for n, f in calls(group).items()}
    return by_name if group else by_name | others()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("followed", [False, True])
def test_torchscript_is_told_that_it_cannot_record(group, followed):
    x = ONES.clone().requires_grad_(followed)
    for name, call in every_call(group).items():
        with torch.set_grad_enabled(followed):
            why = said(torch.jit.trace, call, (x,), check_trace=False)
        assert "cannot record attention; use torch.export" in why, (name, why)
        assert "\n" not in why


def test_torchscript_is_told_so_by_modules_and_by_what_reads_tensors():
    x = torch.ones(1, 4, 16)
    layer = nn.MultiheadAttention(16, 2, Dense())
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 8, 0.0, batch_first=True)
    encoder.self_attn = layer
    borders = torch.tensor([0, 1, 4])
    traced = {
        "layer": (layer, x),
        "encoder": (encoder, x),
        "eval": (encoder.eval(), x),
        "positions": (lambda t: nn.positions(x, t), borders),
        "shard": (lambda t: nn.shard_sequence(t, Simulated(2)), x),
    }
    for name, (call, t) in traced.items():
        why = said(torch.jit.trace, call, (t,), check_trace=False)
        assert "cannot record" in why and "\n" not in why, (name, why)
    why = said(torch.onnx.export, encoder, (x,), "unused.onnx", dynamo=False)
    assert "cannot record" in why and "\n" not in why


class Plain(torch.Tensor):
    """A subclass with memory of its own."""


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
            "got a zero tensor of torch",
        ),
        (lambda x: TwoTensor(x, x), "got a TwoTensor, which wraps"),
    ],
)
def test_zero_tensors_and_wrappers_are_told_apart(make, words, group):
    for name, call in every_call(group).items():
        with torch.no_grad():
            why = said(call, make(ONES))
        assert words in why and "\n" not in why, (name, why)
    for name, call in calls(group).items():
        x = ONES.clone().requires_grad_()
        why = said(call(x, x, x)[0].backward, make(ONES))
        assert words in why or not x.grad.any(), (name, why)
    same = ONES.as_subclass(Plain)
    out = attention(same, same, same, "dense", group=group)
    assert torch.equal(out, attention(ONES, ONES, ONES, "dense", group=group))
