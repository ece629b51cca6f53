"""Hugging Face transformers: ``attn_implementation="ringlab"`` for its models, and a
cache for ``generate``.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from ringlab import Dilated
>>> register()
>>> config = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
...                      intermediate_size=64, num_hidden_layers=2, pad_token_id=0, eos_token_id=None)
>>> model = LlamaForCausalLM._from_config(config, attn_implementation="ringlab")
>>> prompt = torch.tensor([[1, 2, 3]])
>>> model.generate(prompt, max_new_tokens=5).shape
torch.Size([1, 8])
>>> model = set_pattern(model, Dilated([16, 32], [1, 2]))
>>> model.generate(prompt, max_new_tokens=5).shape
torch.Size([1, 8])
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
)

from ..attention import as_autocast, attention, check_share
from ..block_patterns import sliding_window as window_of
from ..checks import LARGEST, check_int
from ..engine.autograd import outside_graphs
from ..engine.documents import Integers
from ..kv_cache import KVCache
from ..nn import mean_loss, next_tokens, positions, shard_sequence
from ..patterns import Dense, Pattern, as_pattern, from_dict
from ..ring.group import AnyGroup, Group, length_of, with_shared_refusals
from ..ring.layout import Layout, layout_named

NAME = "ringlab"
COLUMNS = 8  # that hide keys: kernels want head_dim in such steps
HIDING = 2.0**8, -(2.0**15)  # of q and k there: any dtype holds it, no score is as low
# Layers of a config that mix positions by their attention alone.
SHARDED = {"full_attention", "sliding_attention", "moe", "mlp"}
REFUSED = {
    "position_bias": "a bias of the scores is not supported",
    "cache": "a paged cache is not supported",
}


def register() -> None:
    """Make ``attn_implementation="ringlab"`` known to transformers.

    It is an argument of ``from_pretrained``;
    ``model.set_attn_implementation("ringlab")`` does the same. A layer then runs
    ``ringlab.attention``, forward and backward, over the keys that the model's mask
    shows: causal or not, sliding windows, padding on the left or the right, documents
    of packed batches, keys of an encoder and of transformers' caches; with the model's
    sinks and its soft cap, which "eager" computes. ``set_pattern`` gives layers a
    pattern, for which ``generate`` makes a ``LiveCache``.

    ``cu_seq_lens_q`` tells documents to any model; its ``position_ids`` are to start
    anew with each. By these alone transformers tells documents to most models that make
    causal masks, without an ``attention_mask`` and with ``use_cache=False``; where it
    does not, the call is refused if the model hands its positions on, else documents
    mix as with transformers' own attention (``lib/MODELS.md``). Positions of a pattern
    count from the first token of each document.

    Padding may lie between tokens, as behind the virtual tokens of peft: windows of the
    model count it as positions, as the model does; positions of a pattern do not.

    Refused in one line (NotImplementedError): a model that runs an attention of its
    own, and what this one cannot do: dropout, biases, masks of pairs. A compiled model
    breaks its graph at each mask.

    Over ranks ``model(**shard_inputs(group, tokens, labels, layout="zigzag"))`` takes a
    part of the sequence.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of)
    PreTrainedModel.get_correct_attn_implementation = _implementation
    GenerationMixin._prepare_cache_for_generation = _cache
    for kind in ("ForCausalLM", "ForConditionalGeneration"):
        LOSS_MAPPING[kind] = _causal_loss


_their_implementation = PreTrainedModel.get_correct_attn_implementation
_their_cache = GenerationMixin._prepare_cache_for_generation
_their_loss = LOSS_MAPPING["ForCausalLM"]


def _implementation(model: PreTrainedModel, *args, **options) -> str:
    """The attention that a model is to run, as transformers decides it; ours only for a
    model that calls it.
    """
    chosen = _their_implementation(model, *args, **options)
    if chosen == NAME and _attention_in(type(model).__module__) == "own":
        parts = ", ".join(model.config.sub_configs)
        parts = (
            parts and f"; attn_implementation={{...: 'ringlab'}} names one of {parts}"
        )
        raise NotImplementedError(
            f"{type(model).__name__} runs an attention of its own{parts}"
        )
    return chosen


@lru_cache(maxsize=256)
def _attention_in(module: str) -> str:
    """Which attention the code of a model runs: "interface", of transformers, "own", or
    "" for none.
    """
    try:
        code = inspect.getsource(sys.modules.get(module))
    except (OSError, TypeError):  # typed into an interpreter: its masks will tell
        return "interface"
    if "ATTENTION_CLASSES[" in code:  # a table of its own beside it
        return "own"
    if "ALL_ATTENTION_FUNCTIONS" in code:
        return "interface"
    return "own" if re.search(r"^class \w*Attention\w*\(", code, re.M) else ""


def _cache(
    model, generation_config, model_kwargs: dict, mode, batch_size: int, length: int
) -> None:
    """Give a model with patterns a ``LiveCache`` in ``model_kwargs``, unless the caller
    chose a cache; others get transformers' own.
    """
    config = model.config.get_text_config()
    chosen = model_kwargs.get("past_key_values"), generation_config.cache_implementation
    free = chosen == (None, None) and generation_config.use_cache
    patterns = getattr(config, "ringlab_pattern", None)
    if free and patterns and any(patterns) and config._attn_implementation == NAME:
        drafts = mode == "assisted_generation" or generation_config.is_assistant
        cache = LiveCache(model, length, max_crop=length if drafts else 0)
        if (mask := model_kwargs.get("attention_mask")) is not None:
            cache.prompt = mask.shape[1]
        model_kwargs["past_key_values"] = cache
    else:
        _their_cache(model, generation_config, model_kwargs, mode, batch_size, length)


def _causal_loss(logits, labels, *args, ringlab_group=None, **options) -> Tensor:
    """Transformers' loss of causal models; of shards the mean over all ranks."""
    if ringlab_group is not None:
        targets = options.get("shift_labels")
        if targets is None:
            raise ValueError(
                "the loss of shards needs shift_labels, shifted before sharding: shard_inputs gives them"
            )
        if options.get("num_items_in_batch") is None:
            return mean_loss(logits, targets, ringlab_group)
    return _their_loss(logits, labels, *args, **options)


def shard_inputs(
    group: AnyGroup,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    layout: str | Layout = "contiguous",
    cu_seqlens: Integers | None = None,
) -> dict[str, Any]:
    """Return the arguments by which a causal model computes this rank's part of whole
    ``input_ids`` and ``labels`` (b, n), which every rank gives.

    ``group`` and ``layout`` are those of ``ringlab.attention``; n may be any number, and
    shards may differ in length. ``cu_seqlens``: the borders of packed documents. Labels
    are those of one device, -100 for the first token of a document. The arguments hold
    the rows of this rank, their positions in the documents and their targets: labels
    are shifted before they are cut, since the next token may lie on another rank.

    The model gives the logits of these rows, and as its loss, on every rank, the mean
    over the targets of all ranks, that of one device. Average its gradients over the
    ranks, as FSDP, DDP and ``ringlab.nn.average_gradients`` do. With
    ``num_items_in_batch=``, the number of all targets, the loss is the part of this
    rank, and its gradients are to be summed. The loss of a model that takes no
    ``shift_labels`` is NaN: take ``ringlab.nn.mean_loss`` of the logits, as for targets
    that are shared out over more groups.

    Raises ValueError for a shard without rows. The model refuses in one line padding, a
    cache, layers that mix positions by anything but attention, and a length from which
    on its rotary embedding is another one.

    >>> from ringlab import Simulated
    >>> shards = shard_inputs(Simulated(2), torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7]]))
    >>> shards["position_ids"].tolist(), shards["shift_labels"].tolist()
    ([[0, 1, 2]], [[6, 7, -100]])
    """
    where = positions(input_ids, cu_seqlens).expand_as(input_ids)
    whole = {"input_ids": input_ids, "position_ids": where}
    if labels is not None:
        # Of these a model that shifts the labels of a shard makes NaN.
        whole["labels"] = torch.full_like(labels, -100)
        whole["shift_labels"] = next_tokens(labels)
    ranks = Group.of(group, dimensions=2).size
    layout = layout_named(layout, input_ids.shape[1], ranks)
    if 0 in layout.sizes:
        raise ValueError(f"a model takes no shard without rows: {layout}")
    inputs = {t: shard_sequence(x, group, layout=layout) for t, x in whole.items()}
    how = {"ringlab_group": group, "ringlab_layout": layout}
    return inputs | how | {"cu_seq_lens_q": cu_seqlens, "use_cache": False}


def set_pattern(model, pattern: Pattern | str | Sequence[Pattern | None]):
    """Give a model one pattern for all layers, or one for each, and return it.

    None, for a layer, is what the model says: dense, or its sliding window, as in
    ``[None if kind == "sliding_attention" else pattern for kind in config.layer_types]``.
    It is kept in ``model.config.ringlab_pattern``, which ``save_pretrained`` and
    ``from_pretrained`` carry; load with ``attn_implementation="ringlab"``, or the model
    is dense. ValueError for a model that runs another attention, or has
    cross-attention.
    """
    several = isinstance(pattern, list | tuple)
    patterns = [
        layer_pattern and as_pattern(layer_pattern)
        for layer_pattern in (pattern if several else [pattern])
    ]
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if len(patterns) not in (1, layers):
        raise ValueError(
            f"set_pattern takes one pattern, or {layers} for the layers, got {len(patterns)}"
        )
    _check_runs(config)
    cross = "(?i)cross_?att|encoder_attn|encdec"
    if any(re.search(cross, name) for name, _ in model.named_modules()):
        raise ValueError("patterns are for models without cross-attention")
    parts = {type(m).__module__ for m in model.modules() if hasattr(m, "config")}
    if "interface" not in map(_attention_in, parts):
        raise ValueError(f"{type(model).__name__} has no attention that takes patterns")
    config.ringlab_pattern = [
        layer_pattern and layer_pattern.to_dict() for layer_pattern in patterns
    ]
    return model


def _check_runs(config) -> None:
    """Raise ValueError for a model that runs another attention."""
    if (runs := config._attn_implementation) != NAME:
        raise ValueError(
            f"the model runs {runs!r}: model.set_attn_implementation({NAME!r}) comes first"
        )


def pattern_of(config, layer: int | None) -> Pattern | None:
    """The pattern that ``set_pattern`` gave a layer of a model with this config."""
    patterns = getattr(config.get_text_config(), "ringlab_pattern", None) or [None]
    if len(patterns) > 1 and layer is None:
        raise NotImplementedError(
            "the layers of this model do not tell their number: give it one pattern for all"
        )
    entry = patterns[layer if len(patterns) > 1 else 0]
    return entry and _pattern(json.dumps(entry))


@lru_cache(maxsize=256)
def _pattern(text: str) -> Pattern:
    return from_dict(json.loads(text))


@dataclass(eq=False)
class Mask:
    """What a model says about a call of its attention, in the place of a mask (b, 1,
    queries, keys).

    ``first``: the key at which the first query stands. ``keys``: how many keys are
    there, without those after all queries if the call is ``causal``. ``window``: keys
    at a distance below it are seen; None: all. ``borders``: where the documents of a
    packed batch begin and end, its entries in a row; None: each entry is one. ``real``
    (b, keys): which keys are no padding; None: all.

    Only ``attend`` reads it. Every operator of a tensor raises NotImplementedError: a
    model that computes with its mask runs an attention that is not ours.
    """

    shape: tuple[int, int, int, int]
    device: torch.device | str
    causal: bool
    window: int | None
    first: int
    keys: int
    borders: Tensor | None = None
    real: Tensor | None = None
    fitting: Tensor | None = None  # position_ids that were seen to agree

    ndim = 4
    dtype = torch.bool

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """The entries that share their ``real`` tokens, and the places of these."""
        if self.real is None:
            return []
        kinds, kind = self.real.cpu().unique(dim=0, return_inverse=True)
        return [
            ((kind == i).nonzero()[:, 0], row.nonzero()[:, 0])
            for i, row in enumerate(kinds)
        ]

    def to(self, *args, **options) -> Mask:
        """The mask on another device, as hooks for models on several GPUs ask for it."""
        like = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **options)
        if like.dtype != torch.bool:
            _refuse("to")
        moved = [
            t if t is None else t.to(like.device) for t in (self.borders, self.real)
        ]
        return replace(self, device=like.device, borders=moved[0], real=moved[1])

    def contiguous(self) -> Mask:
        """Itself: generate asks for it."""
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _refuse(func.__name__)

    def __getattr__(self, name: str):
        if not name.startswith("_") and hasattr(Tensor, name):
            _refuse(name)
        raise AttributeError(name)


def _refuse(name: str):
    raise NotImplementedError(
        f"this model computes with its mask ({name}): it runs an attention that is not ringlab's"
    )


for _name in (
    "getitem len iter bool eq ne lt le gt ge add radd sub rsub mul rmul truediv "
    "and rand or ror xor rxor invert neg float int"
).split():
    setattr(Mask, f"__{_name}__", lambda self, *args, name=_name: _refuse(name))
Mask.__hash__ = object.__hash__


def mask_of(*args, attention_mask: Tensor | Mask | None = None, **options) -> Mask:
    """What transformers passes to ``attend`` as mask; its arguments are those of
    ``transformers.masking_utils.sdpa_mask``.
    """
    if isinstance(attention_mask, Mask):  # made by generate before the model is called
        return attention_mask
    return outside_graphs(_mask)(*args, padding=attention_mask, **options)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    *,
    padding: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options,
) -> Mask:
    statements = dict(_statements(mask_function, kv_offset + kv_length))
    causal = "causal" in statements
    first = int(q_offset) - kv_offset
    keys = min(kv_length, first + q_length) if causal else kv_length
    shape = batch_size, 1, q_length, kv_length
    mask = Mask(shape, device, causal, statements.get("window"), first, keys)
    if "documents" in statements:  # (b, queries)
        begins = statements["documents"].diff(dim=1) != 0
        begins = F.pad(begins, (1, 0), value=True).flatten()
        mask.borders = F.pad(begins.nonzero()[:, 0], (0, 1), value=len(begins))
    if padding is not None:
        if len(padding) != batch_size:
            raise ValueError(
                f"the attention_mask is of {len(padding)} entries, the batch of {batch_size}"
            )
        real = padding[:, kv_offset : kv_offset + keys].bool()
        real = F.pad(real, (0, keys - real.shape[1]))  # what is not told is hidden
        if not real.all():
            mask.real = real
    return mask


def _statements(mask: Callable, length: int) -> Iterator[tuple[str, object]]:
    """What a mask function of transformers says about ``length`` positions, by name."""
    name = mask.__qualname__.partition(".")[0]
    inside = inspect.getclosurevars(mask).nonlocals
    if name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _statements(part, length)
    elif name == "remap_positions_for_packed_sequence":
        yield from _statements(inside["mask_function"], length)
    elif name == "causal_mask_function":
        yield "causal", True
    elif name == "sliding_window_overlay":
        yield "window", inside["sliding_window"]
    elif name == "sliding_window_bidirectional_overlay":
        yield "window", inside["sliding_window"] + 1
    elif name == "packed_sequence_mask_function":
        yield "documents", inside["packed_sequence_mask"]
    elif name == "chunked_overlay" and length <= inside["chunk_size"]:
        return  # one chunk
    elif name != "bidirectional_mask_function":
        raise NotImplementedError(
            f"ringlab's attention takes causal masks, windows, padding and packing, not {name}"
        )


@with_shared_refusals(lambda *_, ringlab_group=None, **__: ringlab_group)
def attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    ringlab_group: AnyGroup = None,
    ringlab_layout: str | Layout = "contiguous",
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """(out (b, n, h, d), None) for query (b, h, n, d), key and value (b, h_kv, m, d):
    what transformers calls.
    """
    layer = getattr(key, "ringlab_layer", None)
    if layer:
        layer.take()
    for name, why in REFUSED.items():
        if others.get(name) is not None:
            raise NotImplementedError(
                f"ringlab's attention cannot honour {name!r}: {why}"
            )
    if others.get("output_attentions"):
        raise NotImplementedError(
            "attention keeps no weights; ringlab.reference.weights has those of short sequences"
        )
    if dropout:
        fields = vars(getattr(module, "config", module)).items()
        name = next((n for n, x in fields if "att" in n and x == dropout), "dropout")
        raise NotImplementedError(
            f"attention dropout is not supported: load the model with {name}=0.0"
        )
    q, k, v = as_autocast(*(t.transpose(1, 2) for t in (query, key, value)))
    b, n, seen = *q.shape[:2], layer.seen if layer else 0
    mask = attention_mask
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if mask is None:
        mask = _plain_mask(module, q, k, causal)
    elif not isinstance(mask, Mask):
        raise NotImplementedError(
            "ringlab's attention takes a mask of padding (batch, tokens), no mask of pairs"
        )
    if mask.shape != (shape := (b, 1, n, seen + k.shape[1])):
        raise NotImplementedError(
            f"the mask is (batch, 1, queries, keys) {mask.shape}, the attention {shape}"
        )
    if causal and not mask.causal and n > 1:
        raise NotImplementedError(
            f"the mask shows later keys, and {type(module).__name__} is causal"
        )
    if mask.causal and is_causal is False:
        raise NotImplementedError("the mask is causal, and is_causal is False")
    documents = cu_seq_lens_q
    if ringlab_group is None:
        documents = _documents(mask, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    elif position_ids is None or mask.fitting is not position_ids:
        whole = ringlab_group, ringlab_layout
        wanted = positions(q, cu_seq_lens_q, *whole)
        _check_shard(module.config, position_ids, wanted, length_of(q, *whole))
        mask.fitting = position_ids
    if ringlab_group is not None or documents is not None:
        if layer or mask.real is not None or n != mask.keys:
            raise NotImplementedError(
                "documents of a packed batch and shards take no padding and no cache: use_cache=False"
            )
    most = layer.max_length if layer else LARGEST if ringlab_group else mask.keys
    pattern = _pattern_here(mask, module, sliding_window, most, q.shape[2], k.shape[2])
    by_position = False
    if pattern is None:
        local = mask.window is not None and mask.window < most
        pattern = window_of(tokens=mask.window) if local else Dense()
        if local and not mask.causal and n != mask.keys:
            raise NotImplementedError("a window of other keys has to be causal")
        by_position = local and any((seen.diff() > 1).any() for _, seen in mask.groups)
        if by_position and (layer or softcap is not None):
            raise NotImplementedError(
                "padding between tokens of a window takes no soft cap (attn_implementation='eager' does) and no "
                "LiveCache: give use_cache=False"
            )
    elif layer is None and n != mask.keys and not isinstance(pattern, Dense):
        raise NotImplementedError(
            "a pattern needs a LiveCache: generate makes it, or give past_key_values=LiveCache(model, length); "
            "with prefix tuning, Dense()"
        )
    options = {
        "causal": mask.causal,
        "scale": scaling,
        "sinks": s_aux,
        "softcap": softcap,
    }
    k, v = k[:, : mask.keys], v[:, : mask.keys]
    if layer:
        out = layer.attend(q, k, v, pattern, mask, options)
    elif ringlab_group is not None:
        whole = {"group": ringlab_group, "layout": ringlab_layout}
        out = attention(q, k, v, pattern, cu_seqlens=documents, **whole, **options)
    elif documents is not None:
        packed = (t.flatten(0, 1)[None] for t in (q, k, v))
        out = attention(*packed, pattern, cu_seqlens=documents, **options)
        out = out[0].unflatten(0, (b, n))
    elif mask.real is not None:
        padded = _of_positions if by_position else _of_groups
        out = outside_graphs(padded)(q, k, v, pattern, mask, options)
    else:
        out = _of_last(q, k, v, pattern, mask, options)
    return out, None


def _plain_mask(module, q: Tensor, k: Tensor, causal: bool | None) -> Mask:
    """The mask of a model that makes none: causal, or all keys, as its module says."""
    n = q.shape[1]
    keys = k.shape[1]
    if causal is None or causal and n != keys:
        raise NotImplementedError(
            f"this model gives no mask, and {type(module).__name__} does not say which keys are seen"
        )
    kind = causal_mask_function if causal else bidirectional_mask_function
    return mask_of(len(q), n, keys, mask_function=kind, device=q.device)


def _documents(
    mask: Mask, position_ids: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None
) -> Tensor | None:
    """The borders of the documents of a packed batch, as the mask, cu_seq_lens and
    position_ids agree on them.
    """
    n = mask.shape[2]
    begins = mask.borders
    new = begins is None and mask.fitting is not position_ids
    if new and position_ids.shape[1:] == (n,):
        anew = position_ids.diff(dim=1) != 1  # (b or 1, n - 1)
        if mask.real is not None:
            real = mask.real[:, mask.first : mask.first + n]
            anew = anew & real[:, 1:] & real[:, :-1]
        if cu_q is None and anew.any():
            raise NotImplementedError(
                "position_ids do not go up by one, but the mask has no documents: cu_seq_lens_q tells them to any model"
            )
        begins = F.pad(anew, (1, 0)).flatten().nonzero()[:, 0]
    told = mask.borders
    if cu_q is not None:
        told = torch.as_tensor(cu_q)
        same = cu_k is None or torch.equal(torch.as_tensor(cu_k).to(told), told)
        if begins is not None:  # rows behind the last document may tell anything
            same &= bool(torch.isin(begins[begins < told[-1]].to(told), told).all())
        if not same:
            raise NotImplementedError(
                "cu_seq_lens_q disagrees with cu_seq_lens_k, or with position_ids"
            )
    mask.fitting = position_ids
    return told


def _check_shard(config, position_ids: Tensor | None, wanted: Tensor, n: int) -> None:
    """Raise ValueError unless the positions of a shard (b, rows) are the ``wanted``
    ones (rows,), NotImplementedError for a model that computes more than its attention
    from all n positions.
    """
    told = position_ids is not None and position_ids.shape[-1:] == wanted.shape
    if not told or not (position_ids == wanted).all():
        raise ValueError(
            "position_ids of a shard, as the model tells its attention, must be those of its rows by ringlab_layout "
            "in the documents that cu_seq_lens_q of the whole tells: shard_inputs gives them"
        )
    config = config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - SHARDED
    if kinds:
        raise NotImplementedError(
            f"layers of {', '.join(sorted(kinds))} mix positions: a ringlab_group takes none"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("rope_type") in ("dynamic", "longrope"):
            most = each.get("original_max_position_embeddings")
            most = most or config.max_position_embeddings
            if n > most:
                raise NotImplementedError(
                    f"the rotary embedding changes beyond {most} positions: a ringlab_group takes no more"
                )


def _pattern_here(
    mask: Mask, module, sliding_window: int | None, most: int, heads: int, kv_heads: int
) -> Pattern | None:
    """The pattern that ``set_pattern`` gave a layer, which sees at most so many keys, of
    which so many query and K/V heads are here.
    """
    if sliding_window is not None and mask.causal:
        if sliding_window != mask.window and sliding_window < most:
            raise NotImplementedError(
                f"the layer has a window of {sliding_window} tokens, the mask of {mask.window}"
            )
    config = getattr(module, "config", None)
    pattern = config and pattern_of(config, getattr(module, "layer_idx", None))
    if pattern and mask.window is not None and mask.window < most:
        raise NotImplementedError(
            f"the layer has a window of {mask.window} tokens: give set_pattern a list, with None for this layer"
        )
    if pattern:
        config = config.get_text_config()
        every = config.num_attention_heads
        if heads != every:  # tensor parallel ranks have a share of them
            kv_every = getattr(config, "num_key_value_heads", None) or every
            check_share(pattern, heads, kv_heads, every, kv_every)
    return pattern


def _of_groups(q, k, v, pattern: Pattern, mask: Mask, options: dict) -> Tensor:
    """Attention (b, n, h, d) of the keys that are no padding; 0 for queries that are,
    but for those of ``_parts``.
    """
    b, n, heads, _ = q.shape
    out = q.new_zeros(b, n, heads, v.shape[3])
    for entries, seen in mask.groups:
        for rows, shown, causal in _parts(seen, mask, isinstance(pattern, Dense), n):
            queries = _taken(q, entries, rows)
            keys, values = (_taken(t, entries, shown) for t in (k, v))
            if not queries.numel() or not keys.numel():
                continue
            how = options | {"causal": causal}
            part = _of_last(queries, keys, values, pattern, mask, how)
            if part.shape == out.shape:
                return part
            out[entries[:, None], rows] = part
    return out


def _taken(t: Tensor, *indices: Tensor) -> Tensor:
    """t at ascending ``indices`` of its first dimensions; a view where none is left out
    between others.
    """
    for dim, index in enumerate(indices):
        if (index.diff() == 1).all():
            t = t.narrow(dim, int(index[0]) if len(index) else 0, len(index))
        else:
            t = t.index_select(dim, index.to(t.device))
    return t


def _parts(
    seen: Tensor, mask: Mask, dense: bool, n: int
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """(those of n queries, the keys that they see, whether causally) where keys
    ``seen`` are shown.

    Of a causal call the padding of queries is that of the keys at their positions, and
    between tokens a dense query sees those before it: the last one tells the loss the
    next token. Otherwise it is not known, and all queries count.
    """
    if not mask.causal:
        yield torch.arange(n, device="cpu") if dense else seen, seen, False
        return
    yield seen[seen >= mask.first] - mask.first, seen, True
    for i in (seen.diff() > 1).nonzero()[:, 0].tolist() if dense else ():
        gap = torch.arange(int(seen[i]) + 1, int(seen[i + 1]), device="cpu")
        yield gap[gap >= mask.first] - mask.first, seen[: i + 1], False


def _of_positions(q, k, v, pattern: Pattern, mask: Mask, options: dict) -> Tensor:
    """Attention (b, n, h, d) under a window that counts padding between tokens as
    positions.

    More columns of q and k hide padding: they add 0 to a score, or all but minus
    infinity.
    """
    d = q.shape[3]
    hidden = ~mask.real[..., None, None]  # (b, keys, 1, 1)
    k, v = (t.masked_fill(hidden, 0) for t in (k, v))
    q = F.pad(q, (0, COLUMNS), value=HIDING[0])  # (b, n, h, d + 8)
    hiding = (hidden * HIDING[1]).to(k).expand(*k.shape[:3], COLUMNS)
    k = torch.cat([k, hiding], 3)  # (b, keys, kv_heads, d + 8)
    options = options | {"scale": options["scale"] or d**-0.5}
    return _of_last(q, k, v, pattern, mask, options)


def _of_last(q, k, v, pattern: Pattern, mask: Mask, options: dict) -> Tensor:
    """Attention of queries at the last positions of the keys (b, n, h, d)."""
    n = q.shape[1]
    keys = k.shape[1]
    if n == keys or isinstance(pattern, Dense):
        return attention(q, k, v, pattern, **options)
    keys = min(keys, n + mask.window - 1)  # no query sees one before these
    k, v = k[:, -keys:], v[:, -keys:]
    if n == 1:
        return attention(q, k, v, Dense(), **options)
    q = F.pad(q, (0, 0, 0, 0, keys - n, 0))
    return attention(q, k, v, pattern, **options)[:, -n:]


def _padded(q, k, v, pattern: Pattern, real: Tensor, options: dict) -> Tensor:
    """Attention of the rows that are ``real`` (b, n), which are moved to the front; 0
    elsewhere.
    """
    order = (~real).int().argsort(dim=1, stable=True)  # (b, n)
    entry = torch.arange(len(q), device=real.device)[:, None]
    moved = (t[entry, order] for t in (q, k, v))
    out = attention(*moved, pattern, lengths=real.sum(1), **options)
    return out[entry, order.argsort(1)]


class LiveCache(Cache):
    """The cache of a model for ``generate(..., past_key_values=cache)``: a
    ``ringlab.KVCache`` for each layer. ``generate`` makes one by itself for models with
    patterns; give it for several turns, or to keep less for windows.

    It keeps the rows that later tokens still see under the layer's pattern or window.
    For up to ``max_length`` tokens, prompt and padding included. ``max_crop``: so many
    tokens can be taken back, as assisted generation does; ``crop(-2)`` takes back two,
    as of transformers' caches, and ``reset`` all. ``nbytes`` are those of all layers,
    allocated by the first call; ``ringlab.cache_bytes`` tells those of each beforehand.
    Layers without attention keep transformers' own state.
    """

    prompt: int | None = None  # tokens that generate knows of: peft adds virtual ones

    def __init__(self, model, max_length: int, *, max_crop: int = 0):
        self.config = config = model.config.get_text_config()
        _check_runs(config)
        if config.is_encoder_decoder:
            raise ValueError(
                "a LiveCache is for decoders alone: leave past_key_values out"
            )
        n = check_int("max_length", max_length)
        layers = []
        own = DynamicCache(config=config).layers
        for layer in own or [DynamicLayer() for _ in range(config.num_hidden_layers)]:
            ours = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            layers.append(_Layer(n, max_crop) if ours else layer)
        if not any(isinstance(layer, _Layer) for layer in layers):
            raise ValueError(
                f"a LiveCache serves no layer of {type(model).__name__}: leave past_key_values out"
            )
        super().__init__(layers)
        self.max_cache_len = n  # peft asks for it
        self.layers: list = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """As of transformers' caches; only for layers that the config tells."""
        _check_runs(self.config)
        if layer_idx >= len(self.layers):
            raise NotImplementedError(
                "this model has more layers than its config says: leave past_key_values out"
            )
        layer = self.layers[layer_idx]
        n = key_states.shape[2]
        if self.prompt is not None and isinstance(layer, _Layer) and not layer.seen:
            layer.max_length = self.max_cache_len + max(0, n - self.prompt)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """The bytes of all layers of attention."""
        caches = (getattr(layer, "live", None) for layer in self.layers)
        return sum(cache.nbytes for cache in caches if cache)


def _hiding(real: Tensor | None, part: slice) -> Tensor | None:
    """A part of ``real`` (b, keys); None where it hides no token."""
    if real is None or real[:, part].all():
        return None
    return real[:, part]


class _Layer(CacheLayerMixin):
    """One layer: ``update`` hands the new rows on to ``attend``, which finds the layer
    by ``key.ringlab_layer``.
    """

    is_sliding = False
    is_croppable = True
    live: KVCache | None = None
    seen = 0
    waiting = False
    # Which of the tokens so far are no padding (b, seen); None: all.
    real: Tensor | None = None

    def __init__(self, max_length: int, max_crop: int):
        super().__init__()
        self.max_length = max_length
        self.max_crop = max_crop

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first call of ``attend`` knows the pattern."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if self.waiting:
            raise NotImplementedError(
                "the attention of this model does not pass its keys on to ringlab as they are"
            )
        self.waiting = True
        # The attribute belongs to this call alone.
        key_states = key_states.view_as(key_states)
        key_states.ringlab_layer = self
        return key_states, value_states

    def take(self) -> None:
        """Take the rows of the last ``update``, once."""
        if not self.waiting:
            raise NotImplementedError(
                "this model attends several times to the same keys: use it without a LiveCache"
            )
        self.waiting = False

    def attend(self, q, k, v, pattern: Pattern, mask: Mask, options: dict) -> Tensor:
        """Attention (b, n, h, d) of new rows to all so far, which are kept."""
        b, n, heads, d = q.shape
        if not mask.causal or mask.first != self.seen:
            raise NotImplementedError(
                "a LiveCache is for causal attention to all tokens before"
            )
        old = _hiding(mask.real, slice(self.seen))
        other = (old is None) != (self.real is None)
        if other or old is not None and not torch.equal(old, self.real):
            raise NotImplementedError(
                "the mask hides other tokens than when the cache took them; reset() empties it"
            )
        if self.live is None:
            self.live = KVCache(
                pattern,
                batch=b,
                heads=heads,
                kv_heads=k.shape[2],
                head_dim=max(d, v.shape[3]),
                max_seq_len=self.max_length,
                max_crop=self.max_crop,
                dtype=k.dtype,
                device=k.device,
            )
        real = _hiding(mask.real, slice(self.seen, None))
        options = options | {"cache": self.live}
        if real is None:
            out = attention(q, k, v, pattern, **options)
        else:
            out = _padded(q, k, v, pattern, real, options)
        self.real = mask.real
        self.seen += n
        return out

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        self.seen = 0
        self.waiting = False
        self.real = None
        self.live = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.live:
            self.live.reorder(beam_idx)
        if self.real is not None:
            self.real = self.real[beam_idx.to(self.real.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError(
            "a LiveCache is for one batch size: make it for the whole batch"
        )

    batch_select_indices = batch_repeat_interleave

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a number of them, negative as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes how many tokens to remove as a negative number, got {tokens_to_remove}"
            )
        if self.live and tokens_to_remove:
            self.live.crop([length + tokens_to_remove for length in self.live.lengths])
            self.seen += tokens_to_remove
            if self.real is not None:
                self.real = self.real[:, : self.seen]
