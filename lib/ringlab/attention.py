"""``attention``, the public function: it checks a call, and passes it to one device, a
group of ranks or a cache.

A key that is not finite changes no query that it is hidden from. A value in v that is
not finite may make NaN of queries that it is hidden from, and products of q and k that
overflow fp32 (fp64 for fp64) make wrong or NaN the queries that see them, as in torch's
own kernels. Under autocast q, k and v are cast as those of torch's attention. With
documents, ``Selected``, a cache, simulated ranks, a 2-D mesh or ``execution`` options
for memory, a compiled function runs the call between its graphs; import ringlab before you load an
exported program.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from .block_patterns import PerHead
from .checks import (
    FLOATS,
    LARGEST,
    Backend,
    check_backend,
    check_bool,
    check_floats,
    check_plain,
    check_unknown,
    is_real,
    short_repr,
)
from .engine import DEFAULT, Execution
from .engine import selected as selected_engine
from .engine.autograd import local_attention, outside_graphs
from .engine.documents import Documents, Integers, integers
from .engine.ways import LocalCall
from .kv_cache import KVCache
from .patterns import AnyPattern, Dense, Dilated, Pattern, as_pattern, warn_of_idle
from .ring import Layout
from .ring.documents import attend_documents
from .ring.group import AnyGroup, length_of, with_shared_refusals
from .ring.operators import Across, check_one_device
from .ring.operators import attend as attend_shards
from .ring.selected import attend as attend_selected
from .ring.ulysses import HeadRange
from .selected import Selected

AXES = "tensors are (batch, seq, heads, head_dim)"
MANY_HEADS = 65  # few models have as many: these may be positions, in torch's layout
MASKS = ("attn_mask", "mask", "attention_mask", "key_padding_mask")
REFUSED = {
    **dict.fromkeys(
        MASKS,
        "masks are not arguments; use a pattern (blocks.from_mask), causal, cu_seqlens or lengths",
    ),
    **dict.fromkeys(
        ("dropout", "dropout_p", "attention_dropout"),
        "attention dropout is not supported",
    ),
    **dict.fromkeys(("softmax_scale", "sm_scale"), "it is called scale"),
    **dict.fromkeys(
        ("max_seqlen", "max_seqlen_q", "max_seqlen_k"),
        "cu_seqlens alone says how long documents are",
    ),
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k"), "q and k share their documents: cu_seqlens"
    ),
    **dict.fromkeys(("s_aux", "sink"), "they are called sinks"),
    "logits_soft_cap": "it is called softcap",
    "window_size": "a window is a pattern: ringlab.blocks.sliding_window(tokens=...)",
    "config": 'removed: the defaults are what "auto" took; what an Advice says is passed by name, as backend=',
}


Patterns = AnyPattern | str


def _group_of(*_, group=None, cache=None, **__):
    """The group of a call of ``attention``, its own or its cache's."""
    return cache.group if isinstance(cache, KVCache) else group


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Patterns, **options: Any
) -> Tensor: ...
@with_shared_refusals(_group_of)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: Backend = "auto",
    group: AnyGroup = None,
    scheme: str | tuple[str, str] = "auto",
    layout: str | Layout = "contiguous",
    exchange_dtype: torch.dtype | None = None,
    cu_seqlens: Integers | None = None,
    lengths: Integers | None = None,
    sinks: Tensor | Sequence[float] | None = None,
    softcap: float | None = None,
    cache: KVCache | None = None,
    return_lse: bool = False,
    execution: Execution = DEFAULT,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale * q k^T + log M) v`` for the multiplicities M of a pattern.

    q is (batch, seq, heads, head_dim), not (batch, heads, seq, head_dim) as in torch; k
    and v are (batch, seq, kv_heads, head_dim), heads a multiple of kv_heads; v may have
    another head_dim. Any length is legal. Returns out (batch, seq, heads, head_dim of
    v) in q's dtype, and with ``return_lse`` also lse (batch, heads, seq), natural log,
    in fp32 (fp64 for fp64). A query that sees nothing gets out 0 and lse -inf.

    ``pattern``: ``Dense()``, ``Dilated``, one of ``ringlab.blocks``, a name of the
    command line as "dense" or "ladder", or ``Selected``, whose keys were selected for
    each query. Of ``Dense`` k and v may have another length than q; with ``causal`` a
    longer one, and the queries are the last positions then. ``causal`` hides keys after
    the query.
    ``scale``: 1 / sqrt(head_dim) by default. ``backend``: "auto", "sdpa", a name of
    ``ringlab.kernels.KERNELS`` or a tuple of these to try in order. ``execution``:
    switches that change no value.

    Documents, each attended as if it stood alone: ``cu_seqlens`` (documents + 1,), the
    borders in a packed sequence of batch 1, which ascend from 0; they may end before
    seq. Or ``lengths`` (batch,), the rows of each entry that are no padding. Padding
    and rows behind the last border get out 0, lse -inf and gradient 0. Of a
    tensor on a GPU the values are read again only when torch's version counter says
    that it was written; writes through ``.data``, by collectives, by kernels of others
    or by the replay of a CUDA graph are not counted: give a new tensor, or a list.

    ``sinks`` (heads,): a logit per query head that takes part in the softmax and has no
    value, as in gpt-oss: out is ``sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))``,
    and lse, the logarithm of the denominator, counts it too: of results that you merge
    one alone may have sinks. A query that sees nothing gets out 0 and lse its sink,
    padding lse -inf. Over a ProcessGroup, where sinks are replicated, their gradient is
    the part of this rank's queries: sum it over the ranks. On one device, without
    documents and cache, they may be (heads, seq), one per query.

    ``softcap``: a score s becomes ``softcap * tanh(s / softcap)`` before log M is added,
    as in Gemma 2. Over ranks, with a cache and on a GPU only the kernel "eager" does it,
    so "auto" is that one: it computes scores as matrices,
    ``execution=Execution(tile=...)`` some at a time.

    Generation: with ``cache``, a ``ringlab.KVCache``, under ``torch.no_grad()`` and
    ``causal``, q, k, v are the rows of new positions, which see all positions so far.
    ``Selected`` takes a cache of ``Dense()``, on one device.

    Across ranks: ``group`` is a ProcessGroup or a DeviceMesh, and q, k, v are this
    rank's shards; or ``ringlab.Simulated(p)``, and they are whole. ``layout`` says who
    owns which position: "contiguous", "zigzag", "striped" or a ``ringlab.ring.Layout``;
    ``scheme`` how rows travel: "plan", "ring", "all_gather", "ulysses", or "auto", the
    one that sends the fewest bytes; over a 2-D mesh a pair, as ("ring", "ulysses"). Each
    is the answer of one device, but for ``exchange_dtype``: see ``help(ringlab.ring)``.

    Differentiable once, in q, k, v, sinks and the weights of a ``Selected``.
    ``torch.compile`` and ``torch.export`` take a call on one device whole, but for
    ``Selected``, as the operator ``ringlab::attention``. For callers of torch's
    ``scaled_dot_product_attention``, ``is_causal`` is ``causal``, and ``enable_gqa``,
    ``dropout_p=0.0`` and ``attn_mask=None`` change nothing.

    Warns of more than 64 heads that are more than the positions, if these are several:
    such tensors may be in torch's layout; and of branches that no head runs. Raises
    ValueError for tensors or arguments that disagree, TypeError for an argument that
    cannot be honoured, and NotImplementedError, with the reason, for a backend that
    cannot serve the call, a second derivative, ``vmap``, ``jvp`` and
    ``torch.jit.trace``.
    What one rank of a group refuses, all raise as ``PlanMismatch``.

    >>> from ringlab.patterns import Dilated
    >>> q = torch.randn(1, 100, 4, 16)
    >>> attention(q, q, q, Dilated([32, 64], [1, 2]), causal=True).shape
    torch.Size([1, 100, 4, 16])
    """
    if others:
        is_causal = others.pop("is_causal", causal)
        check_bool("is_causal", is_causal)
        if causal and not is_causal:
            raise ValueError("causal=True and is_causal=False disagree")
        others.pop("enable_gqa", None)
        check_unknown("attention()", others, REFUSED)
        causal = is_causal
    selected = pattern if isinstance(pattern, Selected) else None
    if selected is not None:
        pattern = Dense()  # is checked in its place: what is remembered has no tensors
        _check_selected(group, scheme, exchange_dtype, execution)
    q, k, v = as_autocast(q, k, v)
    check_tensors(q, k, v, shards=group is not None)
    if isinstance(pattern, str):
        n = (
            cache.policy.n
            if isinstance(cache, KVCache)
            else length_of(q, group, layout)
        )
        pattern = as_pattern(pattern, Pattern, n, q.shape[2])
    arguments = pattern, causal, scale, backend, execution, softcap
    arguments += return_lse, q.shape[3]
    across = Across(group, scheme, layout, exchange_dtype)
    if group is None:
        arguments += across[1:]
    try:
        check = _checked if torch.compiler.is_compiling() else _checked_once
        call = check(*arguments)
    except TypeError:  # an argument is wrong, or cannot be hashed
        call = _checked(*arguments)
    pattern = call.pattern
    if not torch.compiler.is_compiling():  # a warning would break the graph
        warn_of_idle(pattern, q.shape[2])
    alone = cu_seqlens is None and lengths is None and cache is None and group is None
    if q.shape[1] != k.shape[1]:
        if (
            not isinstance(pattern, Dense)
            or selected is not None
            or (causal and q.shape[1] > k.shape[1])
            or not alone
        ):
            if causal and q.shape[1] > k.shape[1]:
                raise ValueError(
                    f"{q.shape[1]} queries, {k.shape[1]} keys: causal needs as many keys, or more"
                )
            what = "only Dense() takes k and v of another length, longer if causal, on one device and without documents"
            raise ValueError(
                f"{what}, got q {tuple(q.shape)}, k {tuple(k.shape)}: {AXES}; ringlab.KVCache is for generation"
            )
    if isinstance(sinks, list | tuple) and all(map(is_real, sinks)):
        sinks = torch.tensor(sinks, dtype=torch.float32, device=q.device)
    if sinks is not None:
        axes = "(heads,)"
        shape = q.shape[2:3]
        by_query = q.shape[2:0:-1]
        if getattr(sinks, "shape", ()) == by_query and alone:
            axes = "(heads, seq)"
            shape = by_query
        check_floats("sinks", sinks, axes, shape, q.device)
    width = v.shape[3]
    if (
        width != q.shape[3]
    ):  # zeros change no score, and give no more than columns of zeros
        q, k, v = (
            F.pad(t, (0, max(width, q.shape[3]) - t.shape[3])) for t in (q, k, v)
        )
    if cache is not None:
        if cu_seqlens is not None or group is not None:
            raise ValueError(
                "with a cache, which knows its group, give no group, and lengths instead of cu_seqlens"
            )
        if not isinstance(cache, KVCache):
            raise TypeError(
                f"cache must be a ringlab.KVCache, got {type(cache).__name__}"
            )
        if lengths is None:
            lengths = [q.shape[1]] * len(q)
        else:
            Documents.padded(lengths, q)
            lengths = integers("lengths", lengths, q)
        attend = outside_graphs(partial(cache.attend, lengths))
    else:
        if cu_seqlens is not None or lengths is not None:
            n = length_of(q, group, layout)
            documents = documents_of(q, cu_seqlens, lengths, n)
            call = call._replace(documents=documents)
        if selected is not None:
            attend = selected_engine.attend
            if group is not None:
                attend = partial(attend_selected, across)
            attend = outside_graphs(attend)
        elif group is None:
            attend = local_attention
        elif call.documents is None:
            attend = partial(attend_shards, across)
        else:
            attend = outside_graphs(partial(attend_documents, across))
    if selected is not None:
        call = call._replace(pattern=selected)
    if isinstance(pattern, PerHead):
        out, lse = _by_head(attend, q, k, v, sinks, call)
    else:
        out, lse = attend(q, k, v, sinks, call)
    out = out if out.shape[3] == width else out[..., :width].contiguous()
    return (out, lse) if return_lse else out


def _check_selected(group, scheme, exchange_dtype, execution) -> None:
    """Raise NotImplementedError in one line for what ``Selected`` does not take."""
    across = group is not None
    refused = {
        "execution": execution != DEFAULT,
        f"scheme={scheme!r}": across and scheme != "auto",
        "exchange_dtype": across and exchange_dtype is not None,
    }
    for what, there in refused.items():
        if there:
            raise NotImplementedError(f"Selected takes no {what}")


def _checked(
    pattern,
    causal,
    scale,
    backend,
    execution,
    softcap,
    return_lse,
    head_dim: int,
    *across,
) -> LocalCall:
    """The call, checked without its tensors. ``across``: of a call without a group its
    scheme, layout and exchange_dtype.
    """
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    pattern = as_pattern(pattern, Pattern | PerHead)
    if scale is None:
        scale = head_dim**-0.5
    else:
        if not is_real(scale):
            raise TypeError(f"scale must be a number, got {short_repr(scale)}")
        if not abs(scale) <= torch.finfo(torch.float32).max:
            raise ValueError(f"scale must be finite, got {short_repr(scale)}")
        scale = float(scale)
    if not isinstance(execution, Execution):
        raise TypeError(
            f"execution must be a ringlab.Execution, got {short_repr(execution)}"
        )
    if execution == DEFAULT:
        execution = DEFAULT  # which is looked for by identity
    backend = check_backend(backend)
    if softcap is not None:
        if not is_real(softcap) or not 1e-30 <= softcap <= 1e30:  # within fp32
            expected = "softcap must be a number from 1e-30 to 1e30"
            raise ValueError(f"{expected}, got {short_repr(softcap)}")
        softcap = float(softcap)
    if across:
        check_one_device(*across)
    return LocalCall(pattern, causal, scale, backend, execution, softcap)


# A call in a loop has the same options; by type too, since True equals 1.
_checked_once = lru_cache(maxsize=256, typed=True)(_checked)


def _by_head(
    attend, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: LocalCall
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d), lse (b, h, n): one call for the heads of each pattern."""
    pattern = call.pattern
    heads = q.shape[2]
    group = q.shape[2] // k.shape[2]
    if len(pattern.patterns) != heads:
        raise ValueError(
            f"the pattern is for {len(pattern.patterns)} query heads, q has {heads}"
        )
    outs = []
    lses = []
    order = []
    for one, mine in pattern.heads().items():
        theirs = [head // group for head in mine]
        if len(mine) == group * len(set(theirs)):  # all query heads of their K/V heads
            theirs = theirs[::group]
        parts = q[:, :, mine], k[:, :, theirs], v[:, :, theirs]
        own = None if sinks is None else sinks[mine]
        out, lse = attend(*parts, own, call._replace(pattern=one))
        outs, lses, order = [*outs, out], [*lses, lse], order + mine
    back = sorted(range(heads), key=order.__getitem__)
    return torch.cat(outs, 2)[:, :, back], torch.cat(lses, 1)[:, back]


@lru_cache(maxsize=256)
def check_share(
    pattern, heads: int, kv_heads: int, all_heads: int, all_kv_heads: int
) -> None:
    """Raise in one line unless ``heads`` and ``kv_heads``, this tensor-parallel rank's
    share of all query and K/V heads, can count them from 0: every share must have the
    same part of the pattern, and the K/V heads of its query heads.

    ValueError for shares that differ, NotImplementedError for a pattern by head.
    """
    here = f"{heads} of {all_heads} query heads and {kv_heads} of {all_kv_heads} K/V heads are here"
    if heads * all_kv_heads != kv_heads * all_heads:
        raise ValueError(f"{here}: tensor parallel ranks must share out both alike")
    if not isinstance(pattern, Dilated):
        return
    sizes = LARGEST, heads, kv_heads
    for first in range(0, all_heads, heads):
        mine = range(first, first + heads)
        part = HeadRange(pattern, mine, all_heads, all_kv_heads)
        if part.branches(*sizes) != pattern.branches(*sizes):
            raise NotImplementedError(
                f"{here}, and {pattern} depends on which: take Dense(), offsets='branch', or rates that divide {heads}"
            )


def as_autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as autocast, where it is on, casts those of torch's attention: all
    but float64 to its dtype.
    """
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "meta"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [
        t.to(dtype) if isinstance(t, Tensor) and t.dtype in FLOATS[1:] else t
        for t in tensors
    ]


def documents_of(q: Tensor, cu_seqlens, lengths, n: int) -> Documents:
    """Where the documents lie in the sequence of n positions of which q holds some."""
    if cu_seqlens is not None and lengths is not None:
        raise ValueError(
            "give cu_seqlens, of a packed sequence, or lengths, of a padded batch, not both"
        )
    return (
        Documents.padded(lengths, q, n)
        if cu_seqlens is None
        else Documents.packed(cu_seqlens, q, n)
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, shards: bool = False) -> None:
    """Raise ValueError or TypeError in one line unless q, k, v fit together; ``shards``
    may have no rows.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
        check_plain(name, t)
        shape = t.shape
        if len(shape) != 4:
            raise ValueError(
                f"{name} must be (batch, seq, heads, head_dim), got shape {tuple(shape)}"
            )
        if t.dtype not in FLOATS:
            raise ValueError(
                f"{name} must be float64, float32, bfloat16 or float16, got {t.dtype}"
            )
        if 0 in shape and not (shards and 0 not in (*shape[:1], *shape[2:])):
            raise ValueError(f"{name} is empty: shape {tuple(shape)}")
    heads = q.shape[2]
    kv_heads = k.shape[2]
    if k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (
        k.shape[0],
        k.shape[3],
    ):
        what = "q and k must agree in batch and head_dim"
        what = (
            what
            if k.shape[:3] == v.shape[:3]
            else "k and v must agree in batch, seq and heads"
        )
        raise ValueError(
            f"{what}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: {AXES}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of K/V heads: {heads} and {kv_heads}: {AXES}"
        )
    many = MANY_HEADS <= heads == kv_heads and 1 < q.shape[1] < heads
    if many and not torch.compiler.is_compiling():  # a warning would break the graph
        what = f"q {tuple(q.shape)} has {heads} heads at {q.shape[1]} positions"
        warnings.warn(f"{what}: {AXES}, not as in torch", stacklevel=4)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device: {q.device}, {k.device}, {v.device}"
        )
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"attention runs on cpu and cuda tensors, got {q.device}"
        )
