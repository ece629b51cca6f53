"""What torch may ask of a call beyond its value and one gradient: a recording, a second
derivative, a batch of gradients; and tensors without memory. Each is refused in one line.
"""

import pytest
import torch
from call_cases import ONES, calls, refusals, said
from ringlab import Dense, KVCache, Simulated, attention, nn, selection
from ringlab.ring.launch import launch
from torch.testing._internal.two_tensor import TwoTensor

GROUPS = [None, Simulated(1), Simulated(2)]


@pytest.mark.parametrize("group", [*GROUPS, "ranks"])
def test_second_derivatives_and_batched_gradients(group):
    for found in launch(refusals, 2) if group == "ranks" else [refusals(group)]:
        for words, why in found:
            assert words in why and "\n" not in why


def every_call(group) -> list:
    """Calls of one tensor (1, 4, 2, 8)."""
    sizes = {"batch": 1, "heads": 2, "head_dim": 8, "max_seq_len": 9}
    cache = KVCache(Dense(), dtype=torch.float64, **sizes)
    ones = ONES[..., :3]  # gates, and weights of an indexer
    return [
        *(lambda x, call=call: call(x, x, x)[0] for call in calls(group)),
        lambda x: attention(x, x, x, "dense", causal=True, cache=cache),
        lambda x: cache.append(x, x),
        lambda x: selection.moba(x, x),
        lambda x: selection.nsa(x, x, x, ones),
        lambda x: selection.dsa(x, x[:, :, :1], ones[..., 0], top_k=1),
        lambda x: selection.vertical_slash(x, x),
    ]


WITHOUT_MEMORY = {
    "a zero tensor of torch": torch._efficientzerotensor(ONES.shape, dtype=ONES.dtype),
    "a TwoTensor, which wraps": TwoTensor(ONES, ONES),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("words", WITHOUT_MEMORY)
def test_tensors_without_memory_are_told_apart(words, group):
    given = WITHOUT_MEMORY[words]
    for call in every_call(group):
        assert words in said(call, given)
    for call in calls(group):
        x = ONES.clone().requires_grad_()
        why = said(call(x, x, x)[0].backward, given)
        assert words in why or not x.grad.any()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("followed", [False, True])
def test_torchscript_cannot_record_a_call(followed, group):
    x = ONES.clone().requires_grad_(followed)
    for call in every_call(group):
        why = said(torch.jit.trace, call, (x,))
        assert "cannot record attention; use torch.export" in why and "\n" not in why


def test_torchscript_cannot_record_modules_and_what_reads_positions():
    x = torch.ones(1, 4, 16)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 8, 0.0, batch_first=True)
    encoder.self_attn = nn.MultiheadAttention(16, 2, Dense())
    borders = torch.tensor([0, 1, 4])
    for call, t in (
        (encoder.self_attn, x),
        (lambda t: nn.positions(x, t), borders),
        (lambda t: nn.shard_sequence(t, Simulated(2)), x),
    ):
        assert "cannot record attention" in said(torch.jit.trace, call, (t,))
    call = encoder.eval(), (x,), "unused.onnx"
    assert "cannot record attention" in said(torch.onnx.export, *call, dynamo=False)
