"""Training over a mesh: the sequence on one dimension, the weights (FSDP2) and the data
on the other.
"""

import pytest
import torch
from ring_cases import BORDERS, trained
from ringlab import Simulated
from ringlab.nn import average_gradients, mean_loss, next_tokens, shard_sequence
from ringlab.ring.launch import Process, launch


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_twenty_steps_are_those_of_one_device(kind):
    """Over two sequence ranks, and over 2 x 2 with FSDP2; every rank sees the loss of
    all.
    """
    if kind == "transformers":
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        Process(
            id, modules=(llama.__name__,)
        ).end()  # imported once, and not by each rank
    want = trained("one", kind)
    assert want[-1] < 0.8 * want[0]
    for how, ranks in (("sequence", 2), ("fsdp", 4)):
        for found in launch(trained, ranks, how, kind, timeout_s=180):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=0)


def test_targets_and_losses_of_one_device():
    tokens = torch.arange(64)[None] % 7
    targets = next_tokens(tokens, BORDERS)
    assert [i for i in range(64) if targets[0, i] < 0] == [19, 31, 63]
    assert next_tokens(tokens.expand(2, -1), lengths=[3, 0])[:, :4].tolist() == [
        [1, 2, -100, -100],
        [-100] * 4,
    ]
    logits = torch.randn(1, 64, 7, dtype=torch.float64)
    want = torch.nn.functional.cross_entropy(logits[0], targets[0])
    assert torch.allclose(mean_loss(logits, targets), want) and torch.allclose(
        mean_loss(logits, targets, None), want
    )
    assert torch.equal(
        mean_loss(logits, targets.clamp(min=-1)), mean_loss(logits, targets)
    ), "any negative one is none"
    assert mean_loss(logits, torch.full_like(targets, -100)) == 0
    assert shard_sequence(tokens, Simulated(2)) is tokens
    average_gradients(torch.nn.Linear(2, 2), Simulated(2))
