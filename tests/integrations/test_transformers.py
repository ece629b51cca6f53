"""Models of Hugging Face on our attention: dense is their SDPA; patterns are the same
with and without a cache.
"""

import copy

import pytest
import torch
from matrix import apart
from refusals import refused
from ringlab import Dense, Dilated, blocks

transformers = pytest.importorskip("transformers")
from ringlab.integrations.transformers import (  # noqa: E402
    LiveCache,
    pattern_of,
    register,
    set_pattern,
)

register()
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 200}),
}
PATTERNS = [Dense(), Dilated([8, 32], [1, 2]), blocks.local_global(1, 1, block_size=8)]


def model_of(name: str, implementation: str = "ringlab", dtype=torch.float32, **more):
    torch.manual_seed(0)
    kind, own = MODELS[name]
    config = kind(**SMALL | own | more)
    config._attn_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)  # far from uniform attention
    return model


def pair(name: str, **how):
    ours, theirs = model_of(name, **how), model_of(name, "sdpa", **how)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def trained(model, **inputs):
    """The loss and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


TOKENS = torch.randint(2, 97, (3, 50), generator=torch.Generator().manual_seed(1))
RIGHT = torch.arange(50) < torch.tensor([50, 20, 33])[:, None]
LEFT = RIGHT.flip(1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mask", [None, RIGHT, LEFT], ids=["whole", "right", "left"])
def test_dense_is_their_sdpa_in_loss_and_gradients(name, mask):
    ours, theirs = pair(name)
    inputs = {"input_ids": TOKENS, "labels": TOKENS}
    inputs |= (
        {}
        if mask is None
        else {"attention_mask": mask.long(), "labels": TOKENS.masked_fill(~mask, -100)}
    )
    assert apart(trained(ours, **inputs), trained(theirs, **inputs)) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_batches_are_theirs_and_each_document_alone(name, batch):
    ours, theirs = pair(name, dtype=torch.float64)
    lengths, tokens = ([20, 7, 23], [30, 20, 0])[:batch], TOKENS[:batch]
    where = torch.stack(
        [torch.cat([torch.arange(n) for n in some]) for some in lengths]
    )
    inputs = {"input_ids": tokens, "position_ids": where, "use_cache": False}
    assert torch.allclose(ours(**inputs).logits, theirs(**inputs).logits, atol=1e-10)
    set_pattern(ours, PATTERNS[1])
    got = ours(**inputs).logits
    for entry, some in enumerate(lengths):
        start = 0
        for n in filter(None, some):
            alone = ours(tokens[entry : entry + 1, start : start + n]).logits
            assert torch.allclose(got[entry, start : start + n], alone[0], atol=1e-10)
            start += n
    if batch == 1:
        borders = torch.tensor([0, 20, 27, 50], dtype=torch.int32)
        told = ours(
            **inputs,
            cu_seq_lens_q=borders,
            cu_seq_lens_k=borders,
            max_length_q=23,
            max_length_k=23,
        ).logits
        assert torch.equal(told, got)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_takes_the_tokens_of_sdpa(name, how):
    """Whole and left-padded prompts, one token at a time from the cache of live rows."""
    ours, theirs = pair(name, dtype=torch.float64)
    for mask in (None, LEFT):
        given = {
            "attention_mask": torch.ones(3, 50, dtype=torch.long)
            if mask is None
            else mask.long()
        }
        given |= {"max_new_tokens": 16, "do_sample": False} | how
        got = ours.generate(TOKENS, past_key_values=LiveCache(ours, 66), **given)
        assert torch.equal(got, theirs.generate(TOKENS, **given))


@pytest.mark.parametrize("name", MODELS)
def test_patterns_by_layer_generate_what_whole_forwards_say(name):
    model = set_pattern(model_of(name, dtype=torch.float64), PATTERNS)
    cache = LiveCache(model, 74)
    got = model.generate(
        TOKENS, max_new_tokens=24, do_sample=False, past_key_values=cache
    )
    want = TOKENS
    for _ in range(24):
        want = torch.cat([want, model(want).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, want)
    dense = LiveCache(set_pattern(model, Dense()), 74)
    model.generate(TOKENS, max_new_tokens=2, past_key_values=dense)
    assert cache.nbytes < 0.8 * dense.nbytes


def test_assisted_generation_takes_drafts_back():
    model, draft = (
        model_of("llama", dtype=torch.float64),
        model_of("llama", num_hidden_layers=1, dtype=torch.float64),
    )
    set_pattern(model, PATTERNS[1])
    want = model.generate(
        TOKENS[:1],
        max_new_tokens=30,
        do_sample=False,
        past_key_values=LiveCache(model, 90),
    )
    cache = LiveCache(model, 90, max_crop=30)
    draft.set_attn_implementation("sdpa")
    got = model.generate(
        TOKENS[:1],
        max_new_tokens=30,
        do_sample=False,
        past_key_values=cache,
        assistant_model=draft,
    )
    assert torch.equal(got, want)


def test_a_saved_model_comes_back_with_its_patterns(tmp_path):
    model = set_pattern(model_of("llama"), PATTERNS)
    model.save_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="ringlab"
    )
    assert [pattern_of(other.config, i) for i in range(3)] == PATTERNS
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


def forward(change: dict, **how):
    model = model_of("llama", **change.pop("config", {}))
    if change.pop("train", False):
        model.train()
    model(TOKENS, **change, **how)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"config": {"attention_dropout": 0.1}, "train": True},
            "attention dropout is not supported",
        ),
        ({"attention_mask": torch.ones(3, 1, 50, 50)}, "a mask of padding"),
        ({"output_attentions": True}, "keeps no weights"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(change, words):
    with refused(NotImplementedError, match=words):
        forward(change)


def test_wrong_calls_are_refused():
    model = model_of("llama")
    with pytest.raises(ValueError, match="the cache is full: 0 of 20 positions"):
        model.generate(TOKENS, max_new_tokens=3, past_key_values=LiveCache(model, 20))
    with pytest.raises(ValueError, match="set_attn_implementation"):
        LiveCache(model_of("llama", "sdpa"), 20)
    with pytest.raises(ValueError, match="one pattern, or 3 for the layers, got 2"):
        set_pattern(model, PATTERNS[:2])
    with pytest.raises(ValueError, match="unknown pattern 'local'; known: "):
        set_pattern(model, "local")
    assert pattern_of(set_pattern(model, "dense").config, 0) == Dense()


def test_a_mask_that_hides_other_tokens_than_before_is_refused_and_a_refused_call_leaves_the_cache():
    ours, theirs = pair("llama", dtype=torch.float64)
    cache, one = LiveCache(ours, 60), TOKENS[:, :1]
    with pytest.raises(ValueError, match="no_grad"):
        ours(TOKENS, past_key_values=cache)
    with torch.no_grad():
        past = theirs(TOKENS, attention_mask=LEFT.long()).past_key_values
        ours(TOKENS, attention_mask=LEFT.long(), past_key_values=cache)
        assert cache.get_seq_length() == 50
        with pytest.raises(
            NotImplementedError,
            match="the mask hides other tokens than when the cache took them",
        ):
            ours(one, past_key_values=cache, attention_mask=torch.ones(3, 51))
    cache.reset()
    with torch.no_grad():
        ours(TOKENS, attention_mask=LEFT.long(), past_key_values=cache)
        more = {"attention_mask": torch.cat([LEFT, LEFT[:, -1:]], 1).long()}
        got, want = (
            m(one, past_key_values=c, **more).logits
            for m, c in ((ours, cache), (theirs, past))
        )
    assert torch.allclose(got, want, atol=1e-10)


@pytest.mark.parametrize("kind", ["DiffLlama", "DeepseekV3"])
def test_models_whose_attention_is_another_are_right_or_refused(kind):
    """Two calls a layer for the same keys; values of another width, also in packed
    batches.
    """
    torch.manual_seed(0)
    own = {
        "DeepseekV3": {
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 3,
        }
    }
    config = getattr(transformers, f"{kind}Config")(
        **SMALL | {"num_key_value_heads": 4} | own.get(kind, {})
    )
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        .double()
        .eval()
        for _ in "12"
    )
    theirs.load_state_dict(ours.state_dict())
    ours.set_attn_implementation("ringlab")
    theirs.set_attn_implementation("sdpa")
    where = torch.arange(50).remainder(25)[None].expand(3, -1)
    for more in ({}, {"position_ids": where, "use_cache": False}):
        assert torch.allclose(
            ours(TOKENS, **more).logits, theirs(TOKENS, **more).logits, atol=1e-10
        )
    with pytest.raises(
        NotImplementedError,
        match="several times to the same keys|keys on to ringlab|head_dim",
    ):
        ours.generate(TOKENS, past_key_values=LiveCache(ours, 60), max_new_tokens=3)
