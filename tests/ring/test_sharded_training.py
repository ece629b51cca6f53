"""Training over a mesh: the sequence on one dimension, the weights (FSDP2) and the data
on the other.
"""

import pytest
import torch
from matrix import apart
from ring_cases import (
    BORDERS,
    averaged,
    micro_batches,
    sharded_models,
    trained,
    two_steps,
)
from ringlab import Simulated
from ringlab.nn import average_gradients, mean_loss, next_tokens, shard_sequence
from ringlab.ring import uneven
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


@pytest.mark.parametrize(
    "names", [("tensor", "sequence"), ("data", "sequence"), ("data", "tensor")]
)
def test_two_ways_to_share_out_work_on_four_ranks_are_one_process(names):
    """Loss, gradients and weights after two steps."""
    losses, *want = two_steps()
    assert losses[1] < losses[0]
    for found in launch(two_steps, 4, names, timeout_s=180):
        for some, wanted in zip(found, (losses, *want)):
            assert apart(some, wanted) <= 1e-10


def test_micro_batches_of_other_numbers_of_targets_are_one_batch():
    (want, alone, *_), *_ = launch(micro_batches, 1)
    assert apart(alone, want) <= 1e-12
    for once, accumulated, *refused in launch(micro_batches, 2):
        assert max(apart(some, want) for some in (once, accumulated)) <= 1e-12
        assert [told.split(",")[0] for told in refused] == [
            "total must be the number of all targets"
        ] * 2
    logits, targets = torch.randn(1, 4, 5), torch.tensor([[1, 2, -100, 3]])
    for total in (torch.tensor(3), 3):
        assert torch.equal(
            mean_loss(logits, targets, total=total), mean_loss(logits, targets)
        )
    for total in (0, -1, 2.5, True, 2, torch.tensor([3, 4])):
        with pytest.raises(ValueError, match="^total must be .*$"):
            mean_loss(logits, targets, total=total)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_models_have_the_loss_and_gradients_of_one_device(ranks):
    """In every layout; documents with a tail that is of none."""
    pytest.importorskip("transformers")
    Process(id, modules=("model_sweep",)).end()  # imported once, and not by each rank
    uneven_sizes = uneven([5] * (ranks - 1) + [28 - 5 * ranks])
    by_document = uneven([7] + [16 // (ranks - 1)] * (ranks - 1))
    layouts = [(name, None) for name in ("contiguous", "zigzag", "striped")]
    layouts += [(uneven_sizes, None), (by_document, [0, 7, 15, 20])]
    layouts.append(("zigzag", [0, 7, 12, 20]))
    models = "LlamaForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM"
    cases = [(model, *layout) for model in models for layout in layouts]
    for *found, refused in launch(sharded_models, ranks, cases, timeout_s=180):
        assert max(found) <= 1e-6, found  # the models' own norms are in fp32
        assert "rank 1 refuses" in refused and "shard_inputs" in refused


def test_gradients_are_paired_by_parameter_and_none_counts_as_0():
    one, other, strided, sparse = launch(averaged, 2)[0]
    assert one == [[5.0], [5.5], None]
    assert other == [[[5.0] * 3] * 2, [5.5] * 2, None]
    assert strided == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert sparse == [[0.5, 1.0], [0.0, 0.0], [0.0, 0.0]]


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
    for wrong in ({"lengths": [4, 4]}, {"lengths": [65]}, {"lengths": [-1]}):
        with pytest.raises(ValueError, match="^lengths must be 1 numbers of 0 to 64"):
            next_tokens(tokens, **wrong)
    with pytest.raises(ValueError, match="^give cu_seqlens, .*, not both$"):
        next_tokens(tokens, [0, 64], [64])
    assert shard_sequence(tokens, Simulated(2)) is tokens
    average_gradients(torch.nn.Linear(2, 2), Simulated(2))
