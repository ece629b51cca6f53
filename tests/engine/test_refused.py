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


def every_call(group) -> dict:
    """Calls of one tensor (1, 4, 2, 8), by name."""
    of_three = {name: lambda x, f=f: f(x, x, x)[0] for name, f in calls(group).items()}
    if group is not None:
        return of_three
    sizes = {"batch": 1, "heads": 2, "head_dim": 8, "max_seq_len": 9}
    cache = KVCache(Dense(), dtype=torch.float64, **sizes)
    step = {"pattern": "dense", "causal": True, "cache": cache}
    ones = ONES[..., :3]  # gates, and weights of an indexer
    return of_three | {
        "step": lambda x: attention(x, x, x, **step),
        "append": lambda x: cache.append(x, x),
        "moba": lambda x: selection.moba(x, x),
        "nsa": lambda x: selection.nsa(x, x, x, ones),
        "dsa": lambda x: selection.dsa(x, x[:, :, :1], ones[..., 0], top_k=1),
        "vertical_slash": lambda x: selection.vertical_slash(x, x),
    }


WITHOUT_MEMORY = {
    "got a zero tensor of torch": lambda x: torch._efficientzerotensor(
        x.shape, dtype=x.dtype
    ),
    "got a TwoTensor, which wraps": lambda x: TwoTensor(x, x),
}
ASKED = {
    words: lambda call, x, make=make: call(make(x))
    for words, make in WITHOUT_MEMORY.items()
} | {
    "cannot record attention; use torch.export": lambda call, x: torch.jit.trace(
        call, (x,), check_trace=False
    )
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("words", ASKED)
@pytest.mark.parametrize("followed", [False, True])
def test_every_call_refuses_in_one_line(words, followed, group):
    x = ONES.clone().requires_grad_(followed)
    for name, call in every_call(group).items():
        why = said(ASKED[words], call, x)
        assert words in why and "\n" not in why, (name, why)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("words", WITHOUT_MEMORY)
def test_cotangents_without_memory_are_refused_or_right(words, group):
    for name, call in calls(group).items():
        x = ONES.clone().requires_grad_()
        why = said(call(x, x, x)[0].backward, WITHOUT_MEMORY[words](ONES))
        assert words in why or not x.grad.any(), (name, why)


def test_modules_and_what_reads_positions_are_not_recorded():
    x = torch.ones(1, 4, 16)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 8, 0.0, batch_first=True)
    encoder.self_attn = layer = nn.MultiheadAttention(16, 2, Dense())
    trace = torch.jit.trace
    borders = (torch.tensor([0, 1, 4]),)
    for why in (
        said(trace, layer, (x,)),
        said(trace, encoder, (x,)),
        said(torch.onnx.export, encoder.eval(), (x,), "unused.onnx", dynamo=False),
        said(trace, lambda t: nn.positions(x, t), borders),
        said(trace, lambda t: nn.shard_sequence(t, Simulated(2)), (x,)),
    ):
        assert "cannot record attention" in why and "\n" not in why
