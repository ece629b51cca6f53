"""Every model class of the installed transformers on ringlab's attention, made small:
each call must give what transformers' own attention gives, or be refused in one line.

    python tests/helpers/model_sweep.py                 # all classes, about ten minutes
    python tests/helpers/model_sweep.py LlamaForCausalLM BloomForCausalLM
    python tests/helpers/model_sweep.py --table lib/MODELS.md

Outcomes of a call: ``right``; ``mixed``, what transformers' own attention gives, whose
packed documents see each other; ``refused`` in one line; ``silent``, another value
without an error; ``traceback``, any other error where transformers has none. A call that
transformers' own attention does not take is left out.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import os
import re
import resource
import traceback
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from ringlab import Dilated
from ringlab.integrations.transformers import LiveCache, attend, register, set_pattern
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto as auto

NAMES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
LARGEST = 25_000_000  # parameters of a model that counts as small
WINDOW = 6
N = 20  # tokens
MEMORY = 9 * 2**30  # bytes of address space; what needs more is left out
VOCABULARY = 99
EXACT = 2e-6  # of float64 logits: transformers' own "eager" rounds them to float32
SIZES = {  # what a configuration calls its sizes: the first pattern that matches counts
    VOCABULARY: r".*vocab_size|n_vocab",
    128: r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions|"
    r"max_target_positions|seq_length|mamba_d_ssm",
    2: r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|"
    r"swa_num_key_value_heads|num_hidden_layers|n_layers?|num_layers|encoder_layers|"
    r"decoder_layers|num_decoder_layers|num_encoder_layers|depth|num_experts_per_tok|"
    r"num_experts_per_token|moe_topk|moe_k|top_k_experts|num_selected_experts",
    4: r"n_heads?|num_heads|.*attention_heads|decoder_num_heads|num_experts|"
    r"num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts|"
    r"mamba_d_state|state_size|ssm_state_size|mamba_d_conv",
    8: r"mamba_n_heads|n_mamba_heads|mamba_num_heads",
    1: r"mamba_n_groups|mamba_ngroups|n_groups",
    16: r"head_dim|attention_head_dim|swa_head_dim|global_head_dim|d_kv|kv_channels|"
    r"v_head_dim|qk_nope_head_dim|qk_rope_head_dim|rotary_dim|q_lora_rank|kv_lora_rank|"
    r"o_lora_rank|mamba_d_head|mamba_headdim|mamba_head_dim",
    64: r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|"
    r"d_embed|hidden_dim",
    48: r".*intermediate_size|n_inner|.*ffn_dim|d_ff|ffn_hidden_size|mlp_hidden_size|"
    r"dff|feedforward.*|.*mlp_dim",
}


def shrink(config) -> None:
    """Make the sizes of a configuration, and of its parts, small in place."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            for size, pattern in SIZES.items():
                if re.fullmatch(pattern, name):
                    setattr(config, name, size)
                    break
    if getattr(config, "layer_types", None) and isinstance(
        vars(config).get("layer_types"), list
    ):
        config.layer_types = list(dict.fromkeys(config.layer_types))
        config.num_hidden_layers = len(config.layer_types)
    if vars(config).get("head_dim", 0) is None:  # Ministral's class takes no None
        config.head_dim = 16
    if hasattr(config, "kv_lora_rank") and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and re.search("vl|omni|4v|ocr|asr", config.model_type):
        rope["mrope_section"] = [2, 3, 3]
    if hasattr(config, "default_language"):
        config.default_language = "en_XX"
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 1)
    if hasattr(config, "eos_token_id"):
        config.eos_token_id = 98  # no token of the prompts
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and type(value) in (
            int,
            float,
        ):
            setattr(config, name, type(value)(0))


def small(name: str, **more):
    """A small configuration for a class; ``more`` where it has such an attribute."""
    config = getattr(transformers, name).config_class()
    shrink(config)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in more.items():
            if key in part.to_dict():
                setattr(part, key, value)
        if getattr(part, "use_sliding_window", None) is False:  # Qwen2's and Qwen3's
            part.use_sliding_window, part.num_hidden_layers = True, 2
            part.layer_types = ["sliding_attention", "full_attention"]
    return config


def made(name: str, implementation: str, config) -> torch.nn.Module:
    """A model in float64 whose attention is far from uniform."""
    kind, config = getattr(transformers, name), copy.deepcopy(config)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise MemoryError(f"{count:,} parameters")
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the others take no float64
    torch.manual_seed(0)
    model = kind(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.2, generator=generator)
    return model


def tokens(b: int = 2, n: int = N) -> torch.Tensor:
    return torch.randint(3, 90, (b, n), generator=torch.Generator().manual_seed(2))


RIGHT = (torch.arange(N) < torch.tensor([[N], [13]])).long()
LEFT = RIGHT.flip(1)
FIRST = 8  # tokens of the first packed document
WHERE = torch.cat([torch.arange(FIRST), torch.arange(N - FIRST)]).expand(2, -1)
GENERATE = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
PADDED = "generate, padding", "generate, LiveCache"
STATIC = {"cache_implementation": "static", "disable_compile": True}


def logits(model, inputs: dict, keep=None) -> torch.Tensor:
    torch.manual_seed(0)  # some draw what they hide
    with torch.no_grad():
        found = model(**inputs)
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if (value := getattr(found, name, None)) is not None:
            return value if keep is None else value * keep[..., None]
    raise LookupError("no logits")


def other_inputs(config, main: str) -> list[dict]:
    """Inputs that models of images and of sound might take, by their main input."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parts = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    first = {}
    for part in reversed(parts):
        first |= {k: v for k, v in vars(part).items() if isinstance(v, int | list)}
    side = first.get("image_size", 32)
    side = side if isinstance(side, int) else side[0]
    channels = first.get("num_channels", 3)
    bins = first.get("num_mel_bins", first.get("input_feat_per_channel", 80))
    frames = 2 * first.get("max_source_positions", 64)
    shapes = {
        "pixel_values": [(2, channels, side, side), (2, 4, channels, side, side)],
        "input_features": [(2, bins, frames), (2, 64, bins)],
        "input_values": [(2, 4000), (2, 1, 4000), (2, 64, 128)],
    }
    small = [shape for shape in shapes[main] if math.prod(shape) <= 2**20]
    return [{main: drawn(*shape)} for shape in small]


def cases(model) -> dict:
    """The calls that a class takes: name to a function of a model."""
    text, config = tokens(), model.config
    both, others = {"input_ids": text}, {}
    taken = inspect.signature(model.forward).parameters
    for main in ("pixel_values", "input_features", "input_values"):
        beside = "decoder_input_ids" if config.is_encoder_decoder else "input_ids"
        for i, given in enumerate(other_inputs(config, main) if main in taken else []):
            for name in {None, beside if beside in taken else None}:
                more = given | ({name: tokens(2, 11)} if name else {})
                case = f"{'+'.join(more)} {i + 1}"
                others[case] = lambda m, more=more: logits(m, more)
                if model.can_generate():
                    run = lambda m, more=more: m.generate(**more, **GENERATE)  # noqa: E731
                    others[f"generate, {case}"] = run
    if config.is_encoder_decoder:
        even = both | {"decoder_input_ids": text}
        other = both | {"decoder_input_ids": tokens(2, 11)}
        right, left = {"attention_mask": RIGHT}, {"attention_mask": LEFT}
        calls = {
            "plain": lambda m: logits(m, even),
            "padding": lambda m: logits(m, even | right),
            "padding, other length": lambda m: logits(m, other | right),
            "padding, left": lambda m: logits(m, other | left),
        }
        prompts = {"generate": both, "generate, padding": both | right}
    else:
        right, left = both | {"attention_mask": RIGHT}, both | {"attention_mask": LEFT}
        calls = {
            "plain": lambda m: logits(m, both),
            "padding": lambda m: logits(m, right, RIGHT),
            "padding, left": lambda m: logits(m, left, LEFT),
            "packed": lambda m: packed(m, 2),
            "packed, one row": lambda m: packed(m, 1),
        }
        prompts = {"generate": both, "generate, padding": left}
    if model.can_generate():
        for case, given in prompts.items():
            calls[case] = lambda m, given=given: m.generate(**given, **GENERATE)
        calls["generate, beams"] = lambda m: m.generate(**both, **GENERATE, num_beams=2)
        calls["generate, static"] = lambda m: m.generate(**both, **GENERATE, **STATIC)
        if not config.is_encoder_decoder:
            calls["generate, LiveCache"] = live
    return calls | others


def packed(model, b: int, change: int = 0) -> torch.Tensor:
    """Logits of two documents in a row; ``change`` is added to the tokens of the first."""
    text = tokens(b)
    text[:, :FIRST] += change
    told = {"input_ids": text, "position_ids": WHERE[:b], "use_cache": False}
    return logits(model, told)


def mixes(model, b: int) -> bool:
    """Whether the second document sees the first."""
    found = (packed(model, b, change)[:, FIRST:] for change in (0, 1))
    return distance(*found) > EXACT


def live(model) -> torch.Tensor:
    """Tokens from a cache of live rows; of transformers, from no cache."""
    more = {"use_cache": False}
    if model.config.get_text_config()._attn_implementation == "ringlab":
        more = {"past_key_values": LiveCache(model, N + 10)}
    given = {"input_ids": tokens(), "attention_mask": LEFT}
    return model.generate(**given, **GENERATE, **more)


def outcome(ours, judges, call) -> tuple[str, str]:
    """(outcome, why) of a call; "" if transformers' own attention does not take it."""
    wanted, why = [], ""
    for judge in judges:
        try:
            want = call(judge)
        except Exception as error:
            why = brief(error)
        else:
            if not want.is_floating_point() or want.isfinite().all():
                wanted.append(want)
    if not wanted:
        return "", why or "not finite"
    try:
        got = call(ours)
    except Exception as error:
        return failure(error)
    off = min(distance(got, want) for want in wanted)
    return ("right", "") if off <= EXACT else ("silent", f"{off:.1e} off")


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1))


def failure(error: Exception) -> tuple[str, str]:
    """Whether an error is one line, of ringlab or of the model, that says what to do."""
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    one_line = "\n" not in str(error).strip()
    if one_line and isinstance(error, NotImplementedError | ValueError):
        by = "" if "ringlab" in file.parts else "transformers: "
        return "refused", by + str(error)
    return "traceback", f"{brief(error)} ({file.name})"


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def patterned(ours) -> tuple[str, str]:
    """Whether a pattern takes part wherever ringlab is called."""
    calls = []

    def counted(*args, **how):
        calls.append(args)
        return attend(*args, **how)

    AttentionInterface.register("ringlab", counted)
    try:
        model = set_pattern(copy.deepcopy(ours), Dilated([4, 8], [1, 2]))
        dense, got = (logits(m, {"input_ids": tokens()}) for m in (ours, model))
    except Exception as error:
        return failure(error)
    finally:
        register()
    if not calls:
        return "right", "never called"
    same = torch.equal(dense, got)
    return ("silent", "the pattern changes nothing") if same else ("right", "")


def sweep(name: str) -> dict:
    """The outcomes of a class, by call."""
    found = {"class": name, "calls": {}}
    for window, size in (("", 4096), ("window, ", WINDOW)):
        try:
            config = small(name, sliding_window=size)
            found["type"] = config.model_type
            kinds = ["sdpa"] * getattr(transformers, name)._supports_sdpa + ["eager"]
            judges = [made(name, kind, config) for kind in kinds]
        except Exception as error:
            found.setdefault("left out", brief(error))
            return found
        if window and config.get_text_config().to_dict().get("sliding_window") != size:
            return found
        try:
            ours = made(name, "ringlab", config)
        except Exception as error:
            found["calls"]["construction"] = failure(error)
            return found
        for model in (ours, *judges[1:]):
            model.load_state_dict(judges[0].state_dict())
        why = ""
        for case, call in cases(judges[0]).items():
            # A judge whose logits are not finite gives tokens that tell nothing.
            if case in PADDED and f"{window}padding, left" not in found["calls"]:
                continue
            kind, reason = outcome(ours, judges, call)
            if kind == "right" and case.startswith("packed"):
                kind = "mixed" if mixes(ours, 2 if case == "packed" else 1) else kind
            if kind:
                found["calls"][window + case] = kind, reason
            else:
                why = reason
        if not found["calls"]:
            found["left out"] = f"transformers' own attention takes no call: {why}"
            return found
        if not window and found["calls"].get("plain", ("",))[0] == "right":
            found["calls"]["pattern"] = patterned(ours)
    return found


def classes() -> list[str]:
    found = {}
    for mapping in NAMES:
        for names in getattr(auto, mapping).values():
            for name in [names] if isinstance(names, str) else names:
                if hasattr(transformers, name):
                    found[name] = None
    return list(found)


SHORT = {  # calls that the table names together
    "padding": ("padding", "padding, left", "padding, other length"),
    "packed": ("packed", "packed, one row"),
    "generate": (
        "generate",
        "generate, padding",
        "generate, beams",
        "generate, static",
    ),
}


def named(calls: set[str], other: set[str] = frozenset()) -> str:
    """The names of calls, short where none of its kind is among the ``other`` ones."""
    calls = {c for c in calls if c.removeprefix("window, ") not in calls - {c}}
    for short, members in SHORT.items():
        for prefix in ("", "window, "):
            kind = {prefix + member for member in members}
            if calls & kind and not kind & other:
                calls = calls - kind | {prefix + short}
    return "; ".join(sorted(calls))


def table(rows: list[dict]) -> str:
    """The families of models, and what is refused of them, as Markdown."""
    every = [kind for row in rows for kind, _ in row["calls"].values()]
    counts, count = Counter(every), sum(bool(row["calls"]) for row in rows)
    families: dict[str, dict[str, set]] = {}  # calls by outcome
    for row in rows:
        for call, (kind, why) in row["calls"].items():
            why = re.sub(r"^\w+ (runs|has) ", r"it \1 ", why)
            why = re.sub(r" of \w+: leave", ": leave", why)
            why = re.sub(r"\((\d+, )+\d+\)", "(...)", why)
            why = f"{kind}: {why}".removeprefix("refused: ")
            of = families.setdefault(row["type"], {})
            of.setdefault(why, set()).add(call)
    lines, whole = [], []
    for family, reasons in sorted(families.items()):
        right, mixed = (reasons.pop(f"{kind}: ", set()) for kind in ("right", "mixed"))
        if not reasons:
            whole.append(f"{family}*" if mixed else family)
            continue
        cells = [f"{named(calls, right)}: {why}" for why, calls in reasons.items()]
        refused = set().union(*reasons.values())
        works = named(right - refused, refused) or "nothing"
        works += "; documents mix" * bool(mixed)
        lines.append(f"| {family} | {works} | {'<br>'.join(cells)} |")
    left = sorted({row["class"] for row in rows if not row["calls"]})
    return f"""# Models of transformers {transformers.__version__} on ringlab's attention

Made by `python tests/helpers/model_sweep.py --table lib/MODELS.md`. Each class was
made small, in float64, and each call compared with transformers' own attention (to
{EXACT:g}). Of {len(rows)} classes {count} could be called: {counts["right"]:,} calls are
right, {counts["mixed"]} are what transformers gives, where packed documents see each
other, {counts["refused"]:,} are refused in one line, {counts["silent"]} give another
value, {counts["traceback"]} another error.

The calls: `plain`; `padding` on the right and the left; `packed` documents, told by
position_ids; `generate` with transformers' own cache, growing and static, greedy and
with beams, or with a `LiveCache`; the same with a `window` of {WINDOW} of {N} tokens;
a dilated `pattern`. Models of images and of sound are called with one input alone.
Calls that transformers' own attention did not take were not judged. Not called: masks
of pairs (batch, 1, tokens, tokens), which are refused, and padding between tokens.

Where packed `documents mix` (marked * in the list), position_ids tell transformers of
no documents: models whose masks are made without them, and layers that carry a state.
`cu_seq_lens_q` tells them to attention, not to a state.

## All calls are right

{", ".join(whole)}.

## Some calls are refused

| family | right | refused |
|---|---|---|
{chr(10).join(lines)}

## Left out

The sweep could not make these small, they need other inputs, or a package is missing.

{", ".join(left)}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes; default: all")
    parser.add_argument("--rows", default="models.json", help="file of the outcomes")
    parser.add_argument(
        "--table", help="file for the table of these, and of other, rows"
    )
    parser.add_argument("--part", default="0/1", help="i/k: each k-th class from i on")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    register()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    (part, parts), file = map(int, given.part.split("/")), Path(given.rows)
    rows = json.loads(file.read_text()) if file.exists() else []  # goes on after these
    done = {row["class"] for row in rows}
    for name in (given.names or classes())[part::parts]:
        if name in done:
            continue
        rows.append({"class": name, "calls": {}, "left out": "it ended the process"})
        file.write_text(json.dumps(rows, indent=1))
        rows[-1] = row = sweep(name)
        counts = dict(Counter(kind for kind, _ in row["calls"].values()))
        bad = {
            c: w for c, (k, w) in row["calls"].items() if k in ("silent", "traceback")
        }
        print(f"{name}: {row.get('left out') or counts} {bad or ''}", flush=True)
        file.write_text(json.dumps(rows, indent=1))
    if given.table:
        Path(given.table).write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
