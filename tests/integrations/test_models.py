"""Models of transformers, made small: each call is what transformers' own attention
gives, or is refused in one line.
"""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
import model_sweep  # noqa: E402
import refusals  # noqa: E402
from model_sweep import FIRST, LEFT, RIGHT, WHERE, N, made, small, tokens  # noqa: E402
from ringlab import Dense, Dilated, Simulated, blocks  # noqa: E402
from ringlab.integrations.transformers import (  # noqa: E402
    LiveCache,
    register,
    set_pattern,
    shard_inputs,
)

register()

refused = partial(refusals.refused, NotImplementedError)
ROOT = Path(__file__).resolve().parents[2]
W = 6  # tokens of a window
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
WINDOWS = {
    f"{name}ForCausalLM": {"sliding_window": W} | more
    for name, more in {
        "Cohere2": {},
        "Gemma2": {"attn_logit_softcapping": 5.0},
        "Gemma3": {},
        "GptOss": {},
        "Ministral": BOTH,
        "Ministral3": {},
        "Mistral": {},
        "Olmo3": {},
        "Phi3": {},
        "Qwen2": {},
        "Qwen3": {},
    }.items()
}
FAMILIES = WINDOWS | {
    "LlamaForCausalLM": {},
    "GPT2LMHeadModel": {},
    "BertForMaskedLM": {},
    "BartForConditionalGeneration": {},
    "WhisperForConditionalGeneration": {},
}
CAUSAL = [name for name in FAMILIES if "Causal" in name or "GPT2" in name]
SAMPLE = """
BloomForCausalLM
DeepseekV3ForCausalLM
DistilBertForMaskedLM
FalconH1ForCausalLM
Gemma2ForCausalLM
Gemma3ForCausalLM
GPTBigCodeForCausalLM
GptOssForCausalLM
MarianMTModel
NllbMoeForConditionalGeneration
PhimoeForCausalLM
T5ForConditionalGeneration
ViTModel
""".split()


def pair(name: str, **sizes):
    """A model on ringlab, and on transformers' SDPA, with equal weights."""
    config = small(name, **{"sliding_window": 4096} | sizes)
    judge = "sdpa" if getattr(transformers, name)._supports_sdpa else "eager"
    ours, theirs = (made(name, kind, config) for kind in ("ringlab", judge))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.fixture(autouse=True)
def eager_in_float64(monkeypatch):
    """Transformers' eager attention rounds its probabilities to float32."""
    plain = torch.nn.functional.softmax

    def softmax(x, dim=None, dtype=None, **how):
        return plain(x, dim, dtype=None if x.dtype == torch.float64 else dtype, **how)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


def greedy(count: int) -> dict:
    """What ``generate`` takes to make exactly ``count`` tokens."""
    return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}


def inputs_of(model, b: int = 2) -> dict:
    if model.main_input_name == "input_features":
        sound = torch.randn(b, model.config.num_mel_bins, 256, dtype=model.dtype)
        return {"input_features": sound}
    return {"input_ids": tokens(b)}


def off(got, want, keep=None) -> float:
    """The largest difference, as a part of the largest value."""
    keep = torch.ones(got.shape[:2]) if keep is None else keep
    return float(((got - want) * keep[..., None]).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_64_greedy_tokens_are_transformers_own(name):
    ours, theirs = pair(name, **FAMILIES[name])
    inputs = inputs_of(ours)
    more = {"decoder_input_ids": tokens(2, 7)} if ours.config.is_encoder_decoder else {}
    with torch.no_grad():
        want = theirs(**inputs, **more).logits
        assert off(ours(**inputs, **more).logits, want) <= 1e-12
    if ours.can_generate():
        how = greedy(64)
        got, want = (m.generate(**inputs, **how) for m in (ours, theirs))
        assert want.shape[1] >= 64 and torch.equal(got, want)
    if name in WINDOWS:
        got = ours.generate(**inputs, **how, past_key_values=(c := LiveCache(ours, 99)))
        assert torch.equal(got, want)
        kept = [len(layer.live.live_rows()[0]) for layer in c.layers]
        # Of 83 tokens, as the last one was not fed back; the next one is a window's W-th.
        assert kept == [W - 1 if local else 83 for local in windowed(ours)]
    ours, theirs = ours.float(), theirs.float()
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        found = (m(**inputs, **more).logits for m in (ours, theirs))
        assert off(*found) <= 1e-5


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_documents_and_gradients_are_those_of_transformers_alone(name):
    ours, theirs = pair(name, **FAMILIES[name])
    packed = {"input_ids": tokens(1), "position_ids": WHERE[:1], "use_cache": False}
    alike, told = packed, {}
    if name == "GptOssForCausalLM":  # its masks are made without position_ids
        with refused("^position_ids do not go up"):
            ours(**packed)
        alike = {"input_ids": tokens(1)}
        told = {"cu_seq_lens_q": torch.tensor([0, FIRST, N])}
    weights = torch.randn(1, N, ours.config.vocab_size, dtype=ours.dtype)
    for model in (ours, theirs):
        (model(**alike).logits * weights).sum().backward()
    grads = [[p.grad for p in m.parameters()] for m in (ours, theirs)]
    largest = max(float(g.norm()) for g in grads[1])
    assert max(float((a - b).norm()) for a, b in zip(*grads)) <= 1e-12 * largest
    with torch.no_grad():
        got = ours(**packed, **told).logits
        for part in (slice(0, FIRST), slice(FIRST, N)):
            assert off(got[:, part], theirs(tokens(1)[:, part]).logits) <= 1e-12


def windowed(model) -> list[bool]:
    """Which layers have a window."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 2
    assert len(kinds) == config.num_hidden_layers == 2
    return [kind == "sliding_attention" for kind in kinds]


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
def test_full_layers_take_a_pattern_beside_windows(name):
    ours, theirs = pair(name, **WINDOWS[name])

    def patterned(pattern):
        return set_pattern(
            ours, [None if local else pattern for local in windowed(ours)]
        )

    packed = {"input_ids": tokens(1), "position_ids": WHERE[:1], "use_cache": False}
    with torch.no_grad():
        dense = patterned(Dense())(**packed).logits
        assert off(dense, theirs(**packed).logits) <= 1e-12
        got = patterned(Dilated([4, 8], [1, 2]))(**packed).logits
        alone = ours(tokens(1)[:, FIRST:]).logits
    assert off(got[:, FIRST:], alone) <= 1e-12 < off(got, dense)
    how = {
        "input_ids": tokens(),
        "attention_mask": LEFT,
        "return_dict_in_generate": True,
    }
    how |= greedy(20)
    found = ours.generate(**how)
    assert torch.equal(found.sequences, ours.generate(**how, use_cache=False).sequences)
    assert isinstance(found.past_key_values, LiveCache)


def test_windows_of_another_kind_are_refused():
    llama4, _ = pair("Llama4ForCausalLM", attention_chunk_size=W)
    with refused("^.* windows, .* not chunked_overlay$"):
        llama4(tokens())
    ours, _ = pair("MistralForCausalLM", sliding_window=W)
    one = ours.model.layers[1].self_attn
    one.config = copy.copy(one.config)
    one.config.sliding_window = W - 1
    words = "^the layer has a window of 5 tokens, the mask of 6$"
    with refused(words):
        ours(tokens())


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_sweep_is_right_or_refused(name):
    found = model_sweep.sweep(name)
    assert "left out" not in found and found["calls"]
    kinds = {kind for kind, _ in found["calls"].values()}
    assert kinds <= {"right", "mixed", "refused"}, found["calls"]


def test_the_table_of_models_has_no_silent_value():
    text = " ".join((ROOT / "lib" / "MODELS.md").read_text().split())
    assert "0 give another value, 0 another error" in text


@pytest.mark.parametrize("window", [4096, 6])
def test_a_decoder_may_be_told_to_see_later_tokens_but_not_against_its_mask(window):
    ours, theirs = pair("MistralForCausalLM", sliding_window=window)
    told = {"is_causal": False, "attention_mask": RIGHT}
    with torch.no_grad():
        got, want = (m(tokens(), **told).logits for m in (ours, theirs))
        assert off(got, want, RIGHT) <= 1e-12 < off(ours(tokens()).logits, want, RIGHT)
        bert, _ = pair("BertModel")
        bert.encoder.layer[1].attention.self.is_causal = True
        with refused("^the mask shows later keys"):
            bert(tokens())


def test_models_with_an_attention_of_their_own_are_refused():
    bloom = transformers.BloomForCausalLM(small("BloomForCausalLM"))
    for name in ("BloomForCausalLM", "XLNetLMHeadModel", "GitModel"):
        with refused("^.* an attention of its own.*$"):
            made(name, "ringlab", small(name))
    with pytest.raises(ValueError, match="^the model runs 'eager': .*$"):
        set_pattern(bloom, Dense())
    none = made("MambaForCausalLM", "ringlab", small("MambaForCausalLM"))
    with pytest.raises(ValueError, match="^.* has no attention that takes patterns$"):
        set_pattern(none, Dense())
    with pytest.raises(ValueError, match="^a LiveCache serves no layer of .*$"):
        LiveCache(none, 20)


def mask():
    from transformers.masking_utils import create_causal_mask

    config = small("LlamaForCausalLM")
    config._attn_implementation = "ringlab"
    return create_causal_mask(config, torch.zeros(1, 4, 8), None, None)


@pytest.mark.parametrize(
    "use",
    [
        lambda m: torch.zeros(1, 1, 4, 4) + m,
        lambda m: m + 1,
        lambda m: 1.0 - m,
        lambda m: ~m,
        lambda m: m == 0,
        lambda m: m[:, :, :, :2],
        lambda m: m.float(),
        lambda m: m.masked_fill(m, 0.0),
        lambda m: torch.where(m, 0.0, 1.0),
        lambda m: torch.zeros(1, 1, 4, 4).masked_fill(m, 0.0),
        lambda m: torch.nn.functional.scaled_dot_product_attention(
            *[torch.zeros(1, 1, 4, 8)] * 3, attn_mask=m
        ),
        lambda m: bool(m),
        lambda m: torch.zeros(4, 4)[m],
    ],
)
def test_a_mask_is_for_our_attention_alone(use):
    assert mask().shape == (1, 1, 4, 4) and mask().ndim == 4
    with refused("^this model computes with its mask"):
        use(mask())


def llama(**how):
    return pair("LlamaForCausalLM", **how)


def test_documents_and_other_keys_need_what_they_cannot_have():
    ours, _ = llama()
    three, borders = tokens(1, 3), torch.tensor([0, 1, 3], dtype=torch.int32)
    with torch.no_grad():
        where = {"position_ids": torch.tensor([[0, 0, 1]])}
        alone = {"cu_seq_lens_q": borders, "use_cache": False}
        told = ours(three, **where, **alone).logits
        assert off(told[:, 1:], ours(three[:, 1:]).logits) <= 1e-12
        tail = alone | {"cu_seq_lens_q": borders[:2]}
        told = ours(three, **where, **tail).logits
        assert off(told[:, :1], ours(three[:, :1]).logits) <= 1e-12
        for more in ({"past_key_values": LiveCache(ours, 9)}, {"use_cache": True}):
            if "use_cache" not in more:
                with refused("^documents .*cache"):
                    ours(three, cu_seq_lens_q=borders, **more)
            with refused("^position_ids do not go up by one"):
                ours(three, **where, **more)
        ones = {"attention_mask": torch.ones(1, 3), "use_cache": False}
        with refused("^position_ids do not go up by one"):
            ours(three, position_ids=torch.tensor([[0, 0, 1]]), **ones)
        with refused("^cu_seq_lens_q disagrees"):
            where = torch.tensor([[0, 1, 0]])
            ours(three, position_ids=where, cu_seq_lens_q=borders, use_cache=False)
        with refused("^cu_seq_lens_q disagrees"):
            ours(three, position_ids=where, cu_seq_lens_q=borders, **ones)


def test_wrong_calls_are_refused_in_words_that_help():
    ours, _ = llama()
    with pytest.raises(ValueError, match="^the attention_mask is of 1 entries"):
        ours(tokens(), attention_mask=RIGHT[1:])
    with torch.no_grad():
        ours(tokens(), past_key_values=(cache := LiveCache(ours, 30)))
        cache.reset()
        ours(tokens(1), past_key_values=cache)
        ours.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="^the model runs 'sdpa': "):
            ours(tokens(1)[:, :1], past_key_values=cache)
    config = small("BertModel")
    config.attention_probs_dropout_prob = 0.1
    bert = made("BertModel", "ringlab", config).train()
    with refused("with attention_probs_dropout_prob=0.0$"):
        bert(tokens())


def test_a_cache_takes_the_dtype_of_autocast():
    model, _ = llama()
    model = model.float()
    how = greedy(6)
    with torch.autocast("cpu", torch.bfloat16):
        cache = LiveCache(model, 30)
        got = model.generate(tokens(), past_key_values=cache, **how)
        want = model.generate(tokens(), **how)
    assert torch.equal(got, want) and cache.layers[0].live.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kind", ["chat", "chunks", "assisted", "static", "copies", "all rows"]
)
@pytest.mark.parametrize(
    "name, window", [("LlamaForCausalLM", 4096), ("MistralForCausalLM", 6)]
)
def test_generation_from_transformers_caches(name, window, kind):
    """Continued chats, prefill in chunks, drafts that are taken back, static caches, and
    copies of a prompt's cache; with left padding where it can be.
    """
    ours, theirs = pair(name, sliding_window=window)
    how = greedy(8)
    prompt = {"input_ids": tokens(), "attention_mask": LEFT}
    if kind == "assisted":
        prompt = {"input_ids": tokens(1)}
        how["assistant_model"] = pair(name, sliding_window=window, num_hidden_layers=1)[
            1
        ]
    elif kind == "static":
        how |= model_sweep.STATIC
    elif kind == "chunks":
        how["prefill_chunk_size"] = 7

    def run(model):
        if kind not in ("chat", "copies", "all rows"):
            return model.generate(**prompt, **how)
        told = {} if kind == "all rows" else {"config": model.config}
        cache = transformers.DynamicCache(
            **told
        )  # without, it keeps what no window shows
        first = model.generate(**prompt, **how, past_key_values=cache)
        new = first if kind == "copies" else torch.cat([first, tokens(2, 5)], 1)
        seen = torch.cat([LEFT, torch.ones(2, new.shape[1] - N, dtype=torch.long)], 1)
        return model.generate(new, attention_mask=seen, **how, past_key_values=cache)

    assert torch.equal(run(ours), run(theirs))


def test_patterns_keep_to_their_layers_and_refuse_what_they_cannot_have():
    ours, theirs = pair("MistralForCausalLM", sliding_window=6)
    pattern = Dilated([4, 8], [1, 2])
    with torch.no_grad():
        set_pattern(ours, [None, None])
        assert off(ours(tokens()).logits, theirs(tokens()).logits) <= 1e-12
        set_pattern(ours, pattern)
        with refused("^the layer has a window of 6"):
            ours(tokens())
    ours, _ = llama()
    set_pattern(ours, [pattern, None])
    for chosen in (
        {"past_key_values": transformers.DynamicCache()},
        model_sweep.STATIC,
    ):
        with refused("^a pattern needs a LiveCache"):
            ours.generate(tokens(), max_new_tokens=3, **chosen)
    bart, _ = pair("BartForConditionalGeneration")
    with pytest.raises(ValueError, match="^patterns are for models without cross-"):
        set_pattern(bart, pattern)
    with pytest.raises(ValueError, match="^a LiveCache is for decoders alone"):
        LiveCache(bart, 20)
    distil = pair("DistilBertForMaskedLM")[0]
    whole = distil(tokens()).logits
    assert off(set_pattern(distil, [Dense()]).__call__(tokens()).logits, whole) <= 1e-12
    with refused("do not tell their number"):
        set_pattern(distil, [Dense(), pattern])(tokens())


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, "assisted"],
)
def test_generate_makes_the_cache_of_patterns(how):
    ours, draft = llama()
    set_pattern(ours, [Dilated([4, 8], [1, 2]), None])
    given = {"input_ids": tokens(), "attention_mask": LEFT}
    if how == "assisted":
        how, given = {"assistant_model": draft}, {"input_ids": tokens(1)}
    given |= greedy(9)
    out = ours.generate(**given, **how, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, LiveCache)
    without = {k: v for k, v in how.items() if k != "assistant_model"}
    assert torch.equal(
        out.sequences, ours.generate(**given, **without, use_cache=False)
    )


def test_half_of_the_heads_take_patterns_that_do_not_count_them():
    """As on a tensor parallel rank, whose projections have fewer columns."""
    ours, _ = llama()
    for layer in ours.model.layers:
        attention = layer.self_attn
        for name, kept in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
            projection = getattr(attention, name)
            projection.weight = torch.nn.Parameter(projection.weight[:kept])
        attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight[:, :32])
    with torch.no_grad():
        set_pattern(ours, Dilated([4, 8], [1, 2], offsets="branch"))
        got = ours(tokens()).logits
        cache = LiveCache(ours, N)
        parts = [ours(t, past_key_values=cache).logits for t in tokens().split(7, 1)]
        assert off(torch.cat(parts, 1), got) <= 1e-12
        with refused("^2 of 4 query heads"):
            set_pattern(ours, Dilated([4, 8, 12], [1, 2, 3]))(tokens())


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForConditionalGeneration"])
def test_shards_tell_their_positions_and_their_targets(name):
    """Simulated ranks take whole tensors, as their first rank."""
    (ours, theirs), text = pair(name), tokens(1)
    shards = shard_inputs(Simulated(2), text, text, layout="zigzag")
    want = theirs(text, labels=text).loss
    for count in (None, N - 1):
        got = ours(**shards, num_items_in_batch=count).loss
        assert abs(float(got - want)) <= 1e-5  # transformers' loss is in fp32
    positions = "^position_ids of a shard"
    for change, words in (
        ({"shift_labels": None}, "^the loss of shards needs shift_labels"),
        ({"position_ids": WHERE[:1]}, positions),
        ({"cu_seq_lens_q": [0, 8, N]}, positions),
    ):
        with pytest.raises(ValueError, match=words):
            ours(**shards | change)
    with refused("^documents of a packed batch and shards take no padding"):
        ours(**shards | {"attention_mask": LEFT[1:]})
    with pytest.raises(ValueError, match="^a model takes no shard without rows"):
        shard_inputs(Simulated(N + 1), text)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "layers"])
def test_models_that_compute_more_from_all_positions_take_no_shards(kind):
    sizes = {"max_position_embeddings": N - 1}
    sizes["rope_parameters"] = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        sizes["rope_parameters"] |= {
            f"{n}_factor": [1.0] * 8 for n in ("short", "long")
        }
    name = "FalconH1ForCausalLM" if kind == "layers" else "LlamaForCausalLM"
    model = made(name, "ringlab", small(name, **{} if kind == "layers" else sizes))
    with refused("a ringlab_group takes no"):
        model(**shard_inputs(Simulated(2), tokens()))


def test_layers_without_attention_keep_their_own_state():
    ours, theirs = pair("Qwen3NextForCausalLM")
    how = greedy(8)
    cache = LiveCache(ours, 40)
    got = ours.generate(tokens(), past_key_values=cache, **how)
    assert torch.equal(got, theirs.generate(tokens(), use_cache=True, **how))


@pytest.mark.parametrize("keep", [RIGHT, LEFT], ids=["right", "left"])
def test_padded_queries_of_encoders_are_transformers_own_too(keep):
    ours, theirs = pair("BertModel")
    with torch.no_grad():
        got, want = (
            m(tokens(), attention_mask=keep).last_hidden_state for m in (ours, theirs)
        )
        assert off(got, want) <= 1e-12
        window = set_pattern(ours, blocks.sliding_window(tokens=4))
        got = window(tokens(), attention_mask=keep).last_hidden_state
        alone = window(tokens()[1:, keep[1].bool()]).last_hidden_state
        if keep is RIGHT:  # BERT counts positions from the padding
            assert off(got[1:, keep[1].bool()], alone) <= 1e-12


VIRTUAL = 3  # tokens in front of all others, as peft's prompt and prefix tuning have
GAPS = torch.ones(2, N, dtype=torch.long)
GAPS[0, 4:11] = 0
GAPS[1, [5, 6, 9, 19]] = 0


def told(text: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    """What peft puts before a mask or labels."""
    return torch.cat([text.new_full((len(text), VIRTUAL), value), mask], 1)


def tuned(model, kind: str, mask: torch.Tensor) -> list[torch.Tensor]:
    """The loss, and its gradients by virtual tokens and weights, as peft calls a model."""
    text, b, config = tokens(), len(mask), model.config
    generator = torch.Generator().manual_seed(4)
    labels = text.masked_fill(mask == 0, -100)
    given = {"attention_mask": told(mask, mask, 1)}
    if kind == "prompt":
        shape = VIRTUAL, config.hidden_size
    else:
        heads = config.num_key_value_heads, VIRTUAL, config.head_dim
        shape = config.num_hidden_layers, 2, *heads
    virtual = torch.randn(shape, generator=generator).double().requires_grad_()
    if kind == "prompt":
        embeds = virtual.expand(b, -1, -1), model.get_input_embeddings()(text)
        given |= {"inputs_embeds": torch.cat(embeds, 1)}
        labels = told(labels, labels, -100)
    else:
        keys = [[t.expand(b, -1, -1, -1) for t in layer] for layer in virtual]
        cache = transformers.DynamicCache(keys, config=config)
        given |= {"input_ids": text, "past_key_values": cache}
    loss = model(**given, labels=labels).loss
    weights = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, [virtual, *weights])]


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize(
    ("name", "window"),
    [("Llama", 0), ("Mistral", W), ("Gemma3", W), ("GptOss", W), ("Gemma2", 4096)],
)
def test_virtual_tokens_before_left_padding_give_loss_and_gradients_of_theirs(
    name, window, kind
):
    """A query of the padding sees them too: the last one predicts the first token."""
    ours, theirs = pair(f"{name}ForCausalLM", sliding_window=window)
    for got, want in zip(tuned(ours, kind, LEFT), tuned(theirs, kind, LEFT)):
        assert (got - want).abs().max() <= 1e-12 * max(1, want.abs().max())


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "GptOss", "Bert", "ModernBert", "GPT2"]
)
def test_padding_anywhere_gives_logits_and_gradients_of_theirs(name):
    tail = {"Bert": "Model", "ModernBert": "Model", "GPT2": "LMHeadModel"}
    ours, theirs = pair(name + tail.get(name, "ForCausalLM"), sliding_window=W)
    found = []
    for model in (ours, theirs):
        out = model(tokens(), attention_mask=GAPS)[0] * GAPS[..., None]
        weight = model.get_input_embeddings().weight
        found.append([out, *torch.autograd.grad(out.sin().sum(), weight)])
    for got, want in zip(*found):
        assert (got - want).abs().max() <= 1e-12 * want.abs().max()


@pytest.mark.parametrize("window", [4096, W])
def test_generation_with_padding_between_tokens(window):
    """A window counts padding, which a LiveCache drops; a pattern does not."""
    ours, theirs = pair("MistralForCausalLM", sliding_window=window)
    how = greedy(8)
    given = {"input_ids": tokens(), "attention_mask": GAPS[:, :19].clone()}
    given["input_ids"] = given["input_ids"][:, :19]
    want = theirs.generate(**given, **how)
    assert torch.equal(ours.generate(**given, **how), want)
    own = {"past_key_values": LiveCache(ours, 40)}
    if window == W:
        with refused("use_cache=False$"):
            ours.generate(**given, **how, **own)
        own = {"use_cache": False}
    assert torch.equal(ours.generate(**given, **how, **own), want)
    capped, _ = pair("Gemma2ForCausalLM", sliding_window=W)
    with refused("attn_implementation='eager'"):
        capped(tokens(), attention_mask=GAPS)
    patterned, _ = llama()
    set_pattern(patterned, Dilated([4, 8], [1, 2]))
    where = (GAPS.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        got = patterned(tokens(), attention_mask=GAPS, position_ids=where).logits
        for entry, real in enumerate(GAPS.bool()):
            alone = patterned(tokens()[entry : entry + 1, real]).logits
            assert off(got[entry : entry + 1, real], alone) <= 1e-12


def test_a_cache_that_generate_makes_has_room_for_virtual_tokens(monkeypatch):
    """As peft adds them: to what the first call is given, and to each mask."""
    ours, _ = llama()
    set_pattern(ours, Dilated([4, 8], [1, 2]))
    virtual = torch.randn(2, VIRTUAL, 64).double()
    plain = ours.prepare_inputs_for_generation

    def prepared(*args, **kwargs):  # transformers looks at this name
        given = plain(*args, **kwargs)
        given["attention_mask"] = told(*[given["attention_mask"]] * 2, 1)
        cache = given.get("past_key_values")
        if cache is None or not cache.get_seq_length():
            embeds = ours.get_input_embeddings()(given.pop("input_ids"))
            given["inputs_embeds"] = torch.cat([virtual, embeds], 1)
        given.pop("position_ids", None)
        return given

    monkeypatch.setattr(ours, "prepare_inputs_for_generation", prepared)
    given = {"input_ids": tokens(), "attention_mask": LEFT} | greedy(8)
    got = ours.generate(**given)
    assert torch.equal(got, ours.generate(**given, use_cache=False))
