"""Hugging Face transformers: ``attn_implementation="ringlab"`` for its models, and a
cache for ``generate``.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from ringlab import Dilated
>>> register()
>>> config = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
...                      intermediate_size=64, num_hidden_layers=2, pad_token_id=0, eos_token_id=None)
>>> model = set_pattern(LlamaForCausalLM._from_config(config, attn_implementation="ringlab"), Dilated([16, 32], [1, 2]))
>>> prompt = torch.tensor([[1, 2, 3]])
>>> model.generate(prompt, max_new_tokens=5, past_key_values=LiveCache(model, 32)).shape
torch.Size([1, 8])
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from ..attention import attention
from ..checks import check_int
from ..kv_cache import KVCache
from ..patterns import Dense, Pattern, from_dict

NAME = "ringlab"
KNOWN_MASKS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "packed_sequence_",
)
REFUSED = {
    "softcap": "soft-capped scores are not supported",
    "s_aux": "attention sinks are not supported",
    "position_bias": "a bias of the scores is not supported",
    "head_mask": "masks of heads are not supported",
}


def register() -> None:
    """Make ``attn_implementation="ringlab"`` known to transformers.

    It is an argument of ``from_pretrained``;
    ``model.set_attn_implementation("ringlab")`` does the same. A layer then runs
    ``ringlab.attention`` over its pattern (see ``set_pattern``; dense by default),
    forward and backward. Padding, which ``attention_mask`` tells, is left out, on the
    right or the left. ``position_ids`` that start anew, without padding, or
    ``cu_seq_lens_q`` tell the documents of packed batches; transformers' own attention
    needs ``use_cache=False`` for that. Positions count from the first token of each
    document.

    ``model(..., ringlab_group=group, use_cache=False)`` takes shards of the sequence
    (``ringlab.nn.shard_sequence``): of the tokens, and of their ``position_ids``; but
    ``cu_seq_lens_q`` of the whole.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding)


def set_pattern(model, pattern: Pattern | Sequence[Pattern]):
    """Give a model one pattern for all layers, or one for each, and return it.

    It is kept in ``model.config.ringlab_pattern``, which ``save_pretrained`` and
    ``from_pretrained`` carry; load with ``attn_implementation="ringlab"``, or the model
    is dense. ValueError for a model that runs another attention.
    """
    patterns = [pattern] if isinstance(pattern, Pattern) else list(pattern)
    if not all(isinstance(p, Pattern) for p in patterns):
        raise TypeError("set_pattern takes a ringlab pattern, or a list of them")
    layers = model.config.get_text_config().num_hidden_layers
    if len(patterns) not in (1, layers):
        raise ValueError(
            f"set_pattern takes one pattern, or {layers} for the layers, got {len(patterns)}"
        )
    if (runs := model.config.get_text_config()._attn_implementation) != NAME:
        raise ValueError(
            f"the model runs {runs!r}, not patterns: model.set_attn_implementation({NAME!r}) comes first"
        )
    model.config.get_text_config().ringlab_pattern = [p.to_dict() for p in patterns]
    return model


def pattern_of(config, layer: int) -> Pattern:
    """The pattern of a layer of a model with this config."""
    given = getattr(config.get_text_config(), "ringlab_pattern", None)
    if not given:
        return Dense()
    return _pattern(json.dumps(given[layer if len(given) > 1 else 0]))


@lru_cache(maxsize=256)
def _pattern(text: str) -> Pattern:
    return from_dict(json.loads(text))


def padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    **how,
) -> Tensor | None:
    """What transformers passes to ``attend`` as mask: which tokens are no padding, bool
    (b, kv_length), or None.
    """
    if how.get("use_vmap") or not _is_known(mask_function):
        raise NotImplementedError(
            "ringlab's attention takes causal masks, padding and packing; use a pattern instead"
        )
    return (
        None
        if attention_mask is None or attention_mask.all()
        else attention_mask[:, :kv_length]
    )


def _is_known(mask: Callable) -> bool:
    """Whether a mask function of transformers is one of ``KNOWN_MASKS``, or made of
    these.
    """
    cells = [cell.cell_contents for cell in mask.__closure__ or ()]
    inner = [
        f
        for cell in cells
        for f in (cell if isinstance(cell, tuple) else (cell,))
        if callable(f)
    ]
    return (
        all(map(_is_known, inner))
        if inner
        else mask.__qualname__.startswith(KNOWN_MASKS)
    )


def attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    ringlab_group=None,
    **others,
) -> tuple[Tensor, None]:
    """(out (b, n, h, d), None) for query (b, h, n, d), key and value (b, h_kv, n, d):
    what transformers calls.
    """
    layer = getattr(key, "ringlab_layer", None)
    cache = layer and layer.taken()
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
        raise NotImplementedError(
            "attention dropout is not supported: set config.attention_dropout = 0.0"
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # (b, n, h, d)
    (b, n), seen = q.shape[:2], k.shape[1] + (layer.seen if layer else 0)
    if layer is None and k.shape[1] != n:
        ours = "generate(..., past_key_values=ringlab.integrations.transformers.LiveCache(model, length))"
        raise NotImplementedError(
            f"{n} queries on {k.shape[1]} keys of another cache: use {ours}"
        )
    if sliding_window is not None and sliding_window < seen:
        pattern = "give it a pattern, as ringlab.blocks.sliding_window(...), and set config.sliding_window = None"
        raise NotImplementedError(
            f"a sliding window of {sliding_window} tokens is not supported: {pattern}"
        )
    if ringlab_group is not None and (layer or attention_mask is not None):
        raise NotImplementedError(
            "a ringlab_group takes whole documents, without a mask of padding and a cache"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = pattern_of(module.config, module.layer_idx)
    how = {
        "causal": causal or layer is not None,
        "scale": scaling,
        "cache": cache,
        "group": ringlab_group,
    }
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(
            "ringlab's attention takes a mask of padding (batch, tokens), no mask of pairs"
        )
    real = (
        None
        if attention_mask is None or attention_mask[:, -n:].all()
        else attention_mask[:, -n:].bool()
    )
    where = (
        None if ringlab_group is not None else position_ids
    )  # those of shards tell no borders
    borders = None if layer else _borders(b, n, where, cu_seq_lens_q, real)
    if layer:
        layer.check(attention_mask, n)
    if real is not None:
        out = _padded(q, k, v, pattern, real, how)
    elif borders is None:
        out = attention(q, k, v, pattern, **how)
    else:
        packed = (t.flatten(0, 1)[None] for t in (q, k, v))
        out = attention(*packed, pattern, cu_seqlens=borders.to(q.device), **how)[
            0
        ].unflatten(0, (b, n))
    if layer:
        layer.keep(real, b, n)
    return out, None


def _padded(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, real: Tensor, how: dict
) -> Tensor:
    """Attention of the rows that are ``real`` (b, n), which are moved to the front; 0
    elsewhere.
    """
    n, lengths, first = real.shape[1], real.sum(1), real.int().argmax(1)
    at = torch.arange(n, device=real.device)
    if not torch.equal(
        real, (at >= first[:, None]) & (at < (first + lengths)[:, None])
    ):
        raise NotImplementedError(
            "padding between tokens is not supported: pad on the left or the right"
        )
    if not first.any():
        return attention(q, k, v, pattern, lengths=lengths, **how)
    entry, there = (
        torch.arange(len(q), device=real.device)[:, None],
        (at + first[:, None]) % n,
    )
    moved = (t[entry, there] for t in (q, k, v))
    return attention(*moved, pattern, lengths=lengths, **how)[
        entry, (at - first[:, None]) % n
    ]


def _borders(
    b: int,
    n: int,
    position_ids: Tensor | None,
    given: Tensor | None,
    real: Tensor | None,
) -> Tensor | None:
    """The borders of the documents of a batch in one row, None if these are its
    entries; ``real`` None: no padding.
    """
    if given is not None:
        return given
    if position_ids is None or position_ids.shape[-1] != n or position_ids.dim() != 2:
        return None
    anew = (position_ids.diff(dim=1) != 1).expand(b, -1)  # (b, n - 1)
    if real is not None:
        if (anew & real[:, 1:] & real[:, :-1]).any():
            raise NotImplementedError(
                "position_ids that start anew and padding do not go together: pack without it"
            )
        return None
    starts = anew.nonzero()
    if not len(starts):
        return None
    found = torch.cat(
        [
            starts[:, 0] * n + starts[:, 1] + 1,
            torch.arange(0, b * n + 1, n, device=starts.device),
        ]
    )
    return found.sort().values


class LiveCache(Cache):
    """The cache of a model for ``generate(..., past_key_values=cache)``: a
    ``ringlab.KVCache`` for each layer.

    For up to ``max_length`` tokens, prompt and padding included. ``max_crop``: so many
    tokens can be taken back, as assisted generation does; ``crop(-2)`` takes back two,
    as of transformers' caches, and ``reset`` all. ``nbytes`` are those of all layers,
    allocated by the first call; ``ringlab.cache_bytes`` tells those of each beforehand.
    """

    def __init__(self, model, max_length: int, *, max_crop: int = 0):
        config = model.config.get_text_config()
        if config._attn_implementation != NAME:
            raise ValueError(
                f"the model runs {config._attn_implementation!r}: model.set_attn_implementation({NAME!r})"
            )
        n = check_int("max_length", max_length)
        layers = range(config.num_hidden_layers)
        super().__init__(
            [
                _Layer(pattern_of(config, i), config.num_attention_heads, n, max_crop)
                for i in layers
            ]
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all layers."""
        return sum(layer.live.nbytes for layer in self.layers if layer.live)


class _Layer(CacheLayerMixin):
    """One layer: ``update`` hands the new rows on to ``attend``, which finds the cache
    by ``key.ringlab_layer``.
    """

    is_sliding, is_croppable = False, True

    def __init__(self, pattern: Pattern, heads: int, max_length: int, max_crop: int):
        super().__init__()
        self.pattern, self.heads, self.max_length, self.max_crop = (
            pattern,
            heads,
            max_length,
            max_crop,
        )
        self.live: KVCache | None = None
        self.seen, self.waiting = 0, False
        self.real: Tensor | None = (
            None  # which of the tokens so far are no padding (b, seen); None: all
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        b, kv_heads, _, d = key_states.shape
        sizes = {
            "batch": b,
            "heads": self.heads,
            "kv_heads": kv_heads,
            "head_dim": d,
            "max_seq_len": self.max_length,
        }
        made = {
            "dtype": key_states.dtype,
            "device": key_states.device,
            "max_crop": self.max_crop,
        }
        self.live, self.is_initialized = KVCache(self.pattern, **sizes, **made), True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if self.waiting:
            raise NotImplementedError(
                "the attention of this model does not pass its keys on to ringlab as they are"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.waiting = True
        key_states = key_states.view_as(
            key_states
        )  # the attribute belongs to this call alone
        key_states.ringlab_layer = self
        return key_states, value_states

    def taken(self) -> KVCache:
        """The cache, for the rows of the last ``update``, which are taken once."""
        if not self.waiting:
            raise NotImplementedError(
                "this model attends several times to the same keys: use it without a LiveCache"
            )
        self.waiting = False
        return self.live

    def check(self, mask: Tensor | None, n: int) -> None:
        """Raise NotImplementedError if a mask (b, seen + n) hides other tokens than
        when they were kept.
        """
        old = (
            None if mask is None or mask[:, :-n].all() else mask[:, :-n].bool()
        )  # None: nothing is hidden
        other = (old is None) != (self.real is None) or (
            old is not None and not torch.equal(old, self.real)
        )
        if self.seen and other:
            raise NotImplementedError(
                "the mask hides other tokens than when the cache took them; reset() empties it"
            )

    def keep(self, real: Tensor | None, b: int, n: int) -> None:
        """Count n new tokens, of which those that are ``real`` (b, n) are no padding;
        None: all.
        """
        if self.real is not None or real is not None:
            ones = torch.ones(
                b, self.seen + n, dtype=torch.bool, device=self.live.device
            )
            before, new = ones.split([self.seen, n], 1)
            self.real = torch.cat(
                [
                    before if self.real is None else self.real,
                    new if real is None else real,
                ],
                1,
            )
        self.seen += n

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        self.seen, self.waiting, self.real = 0, False, None
        if self.live:
            self.live.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.live.reorder(beam_idx)
        self.real = (
            None if self.real is None else self.real[beam_idx.to(self.real.device)]
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError(
            "a LiveCache is for one batch size: make it for the whole batch"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError(
            "a LiveCache is for one batch size: make it for the whole batch"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a number of them, negative as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes how many tokens to remove as a negative number, got {tokens_to_remove}"
            )
        if self.live and tokens_to_remove:
            self.live.crop([length + tokens_to_remove for length in self.live.lengths])
            self.seen += tokens_to_remove
            self.real = None if self.real is None else self.real[:, : self.seen]
