"""Modules for models: attention with its projections, rotary embedding, a decoder
block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Linear, Module, RMSNorm
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .adaptive import Adaptive, choose
from .attention import (
    DEFAULT,
    REFUSED,
    as_autocast,
    attention,
    check_share,
    documents_of,
)
from .block_patterns import PerHead
from .checks import (
    FLOATS,
    LARGEST,
    Backend,
    Device,
    check_bool,
    check_float_dtype,
    check_int,
    check_unknown,
    is_real,
    short_repr,
)
from .engine import Execution
from .engine.documents import Documents, Integers, integers
from .kernels import device_of
from .kv_cache import KVCache
from .patterns import Pattern, as_pattern
from .ring.group import (
    AnyGroup,
    Group,
    PlanMismatch,
    length_of,
    shared_refusals,
    with_shared_refusals,
)
from .ring.layout import Layout, layout_named
from .ring.operators import check_one_device
from .ring.schemes import check_scheme
from .selected import Selected
from .torch_private import NotTorchsAttention, has_pre_hooks, refuse_tracing

KINDS = Pattern | PerHead | Adaptive
Choice = Callable[[Tensor, Tensor], Selected]  # of q and k
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class _NotTorchs(Tensor):
    """A weight that torch's encoder does not hand to its own kernel."""


class MultiheadAttention(NotTorchsAttention, Module):
    """Self-attention over a pattern with q, k, v and output projections: (b, n,
    embed_dim) to (b, n, embed_dim).

    ``pattern`` may be a name, as "window". With an ``Adaptive`` pattern the means of q
    and k choose the blocks; it takes no documents and no cache. Nor does a function ``f(q, k) -> Selected``, as
    ``functools.partial(ringlab.selection.moba, top_k=4)``: each call asks it, with q and
    k (b, n, heads, d) after the rotary embedding, and it takes no group. ``num_kv_heads`` (default: ``num_heads``) must
    divide ``num_heads``, and ``num_heads`` must divide ``embed_dim``. ``group``,
    ``scheme``, ``layout``, ``backend`` and ``execution`` are those of
    ``ringlab.attention``: over a ProcessGroup or 1-D mesh, x is this rank's shard of
    the sequence. The weights are replicated then, and their gradients are this rank's
    part: sum them over the ranks. A copy shares the group; a pickle keeps its name and
    size, and is loaded where there is such a group. ``use_gradient_checkpointing``
    saves only x for the backward and recomputes the rest, exchanges included.
    ``rotary_base`` (Llama's is 10,000) turns q and k by their positions, which count
    from the start of each document and are global across ranks. The state dict holds
    ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``; that of
    ``torch.nn.MultiheadAttention`` is loaded too.

    The projections may be any modules of these sizes, and tensor parallel ones
    (``ColwiseParallel`` q, k, v and ``RowwiseParallel`` out): the heads are those that
    are on this rank, counted from 0. A pattern that this would change is refused
    (NotImplementedError), as offsets="head" unless the rates divide that number.

    It is called with x, or as torch's layer is (see ``forward``), whose place it can
    take in ``torch.nn.TransformerEncoderLayer``; ``from_torch`` takes over the weights.

    Raises ValueError for sizes that do not fit, TypeError for unsupported arguments, as
    dropout.

    >>> from ringlab.patterns import Dilated
    >>> layer = MultiheadAttention(64, 8, Dilated([32, 64], [1, 2]), num_kv_heads=2, causal=True)
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: KINDS | Choice | str,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        causal: bool = False,
        group: AnyGroup = None,
        scheme: str | tuple[str, str] = "auto",
        layout: str | Layout = "contiguous",
        backend: Backend = "auto",
        execution: Execution = DEFAULT,
        use_gradient_checkpointing: bool = False,
        batch_first: bool = True,
        rotary_base: float | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        **refused: object,
    ):
        super().__init__()
        check_unknown("MultiheadAttention", refused, REFUSED)
        embed_dim = check_int("embed_dim", embed_dim, most=LARGEST)
        num_heads = check_int("num_heads", num_heads)
        num_kv_heads = check_int(
            "num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads
        )
        if not callable(pattern) or isinstance(pattern, type):
            pattern = as_pattern(pattern, KINDS, heads=num_heads)
        elif group is not None:
            raise ValueError(
                "a pattern that is a function takes no group: q and k of a rank are not all"
            )
        if group is not None:
            check_scheme(scheme, Group.of(group, dimensions=2).shape)
        else:
            check_one_device(scheme, layout)
        usual = scheme == "auto" and layout == "contiguous" and execution == DEFAULT
        if isinstance(pattern, Adaptive) and not usual:
            raise ValueError(
                "an Adaptive pattern takes no scheme, layout or execution: it has one of each"
            )
        if embed_dim % num_heads or num_heads % num_kv_heads:
            expected = "num_heads must divide embed_dim and num_kv_heads num_heads"
            raise ValueError(
                f"{expected}, got {embed_dim}, {num_heads}, {num_kv_heads}"
            )
        check_bool("causal", causal)
        if batch_first is not True:
            raise ValueError(
                "batch_first must be True: x is (batch, seq, embed_dim), so transpose (seq, batch, ...)"
            )
        for name, value in (
            ("bias", bias),
            ("use_gradient_checkpointing", use_gradient_checkpointing),
        ):
            # torch's modules take 0, 1 and None too.
            if not isinstance(value, int | None):
                check_bool(name, value)
        if dtype is not None:
            check_float_dtype(dtype)
        device = device if device is None else device_of(device)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.pattern: KINDS | Choice = pattern
        self.use_gradient_checkpointing = use_gradient_checkpointing
        if rotary_base is not None:
            if not is_real(rotary_base) or not 0 < rotary_base < float("inf"):
                raise ValueError(
                    f"rotary_base must be a positive number, got {short_repr(rotary_base)}"
                )
            if embed_dim // num_heads % 2:
                raise ValueError(
                    f"a rotary embedding needs an even head_dim, got {embed_dim // num_heads}"
                )
        self.rotary_base = rotary_base
        self.options: dict[str, Any] = {
            "causal": causal,
            "group": Group.kept(group),
            "backend": backend,
            "execution": execution,
            "scheme": scheme,
            "layout": layout,
        }
        kv_dim = embed_dim // num_heads * num_kv_heads
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj: Linear = Linear(embed_dim, embed_dim, **made)
        self.k_proj: Linear = Linear(embed_dim, kv_dim, **made)
        self.v_proj: Linear = Linear(embed_dim, kv_dim, **made)
        self.out_proj: Linear = Linear(embed_dim, embed_dim, **made)
        self.register_load_state_dict_pre_hook(_split_projections)

    # What torch's encoder asks of its attention beside ``NotTorchsAttention``.
    batch_first = True
    in_proj_bias = None

    @property
    def in_proj_weight(self) -> Tensor:
        weight = _weight(self.q_proj)
        weight = _NOTHING if weight is None else weight
        return weight.as_subclass(_NotTorchs)

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        pattern: KINDS | Choice | str,
        **options: Any,
    ) -> MultiheadAttention:
        """The layer with the weights of torch's, copied, for a pattern; ``options`` as
        of the constructor.

        Raises ValueError for what has no counterpart: dropout, keys and values of other
        sizes, extra rows, and a layer that is called with (seq, batch, embed_dim).

        >>> from ringlab.patterns import Dilated
        >>> module = nn.MultiheadAttention(64, 8, batch_first=True)
        >>> MultiheadAttention.from_torch(module, Dilated([32, 64], [1, 2]), causal=True)(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(
                f"from_torch takes a torch.nn.MultiheadAttention, got {type(module).__name__}"
            )
        if not module.batch_first:
            raise ValueError(
                "from_torch takes a layer of (batch, seq, embed_dim): make it with batch_first=True"
            )
        if wrong := {"num_kv_heads", "bias", "device", "dtype"} & set(options):
            raise ValueError(
                f"from_torch takes {', '.join(sorted(wrong))} from the layer"
            )
        if (
            module.in_proj_weight is None
            or module.bias_k is not None
            or module.add_zero_attn
        ):
            raise ValueError(
                "from_torch takes no layer with kdim, vdim, add_bias_kv or add_zero_attn"
            )
        if module.dropout:
            raise ValueError(
                f"attention dropout {module.dropout} is not supported: set module.dropout = 0.0 before"
            )
        weight = module.in_proj_weight
        layer = cls(
            module.embed_dim,
            module.num_heads,
            pattern,
            bias=module.in_proj_bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            **options,
        ).train(module.training)
        layer.load_state_dict(module.state_dict())
        return layer

    @with_shared_refusals(lambda layer, *_, **__: layer.options["group"])
    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        cu_seqlens: Integers | None = None,
        lengths: Integers | None = None,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
        cache: KVCache | None = None,
        **refused: object,
    ) -> Tensor | tuple[Tensor, None]:
        """Attention of x (b, n, embed_dim) to itself: (b, n, embed_dim).

        ``cu_seqlens`` are the borders of packed documents, ``lengths`` those of a
        padded batch, as of ``attention``. With a ``cache``, which ``make_cache`` makes,
        x holds new positions after those that the cache has seen; over a group all of
        them on every rank.

        As torch's layer: ``layer(x, x, x)``, self-attention alone, returns (out, None).
        ``is_causal`` makes a call causal, as ``causal=True`` makes all.
        ``key_padding_mask`` (b, n) hides with True, or -inf, the end of rows that are
        padded on the right. ``attn_mask`` must be the causal one. Weights are not
        computed, and x needs its batch.
        """
        refuse_tracing()
        check_unknown("MultiheadAttention", refused, REFUSED)
        if any(t is not None and t is not x for t in (key, value)):
            raise ValueError(
                "query, key and value must be one tensor: the layer is self-attention alone"
            )
        if need_weights:
            raise TypeError(
                "MultiheadAttention cannot honour need_weights=True: it computes no weights"
            )
        check_bool("is_causal", is_causal)
        check_x(x, self.embed_dim, _weight(self.q_proj))
        if key_padding_mask is not None:
            if lengths is not None or self.options["group"] is not None:
                raise ValueError(
                    "key_padding_mask is for one device and comes alone; lengths does the same anywhere"
                )
            lengths = lengths_of(key_padding_mask, x)
        causal = _is_causal(attn_mask, x) or is_causal or self.options["causal"]
        # As lists: a backward that computes all again must not read what a caller wrote
        # to the tensors meanwhile.
        documents = {"cu_seqlens": cu_seqlens, "lengths": lengths}
        options = {
            name: None if value is None else integers(name, value, x)
            for name, value in documents.items()
        }
        options["causal"] = causal
        if self.use_gradient_checkpointing and torch.is_grad_enabled():
            out = checkpoint(self._forward, x, options, cache, use_reentrant=False)
        else:
            out = self._forward(x, options, cache)
        return out if key is None else (out, None)

    def make_cache(self, batch: int, max_seq_len: int, *, max_crop: int = 0) -> KVCache:
        """An empty ``ringlab.KVCache`` for calls with ``cache=``, in the dtype of the
        layer or of autocast, for the heads that are on this rank.

        Projections that hide their weight, or have hooks as those of tensor parallel
        layers, are called with a row of zeros.
        """
        k = _weight(self.k_proj)
        heads = self.num_heads
        kv_heads = self.num_kv_heads
        # Others are not called: FSDP gathers their weights in the forward alone.
        if k is None or has_pre_hooks(self.k_proj):
            tensors = [*self.k_proj.parameters(), *self.parameters()]
            like = next((t for t in tensors if t.dtype in FLOATS), _NOTHING)
            made = {"dtype": like.dtype, "device": like.device}
            with torch.no_grad():
                q, k, _ = self._projected(torch.zeros(1, 1, self.embed_dim, **made))
            heads = q.shape[2]
            kv_heads = k.shape[2]
        like = torch.empty(0, dtype=k.dtype, device=k.device)
        return KVCache(
            self.pattern,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.embed_dim // self.num_heads,
            max_seq_len=max_seq_len,
            max_crop=max_crop,
            dtype=as_autocast(like)[0].dtype,
            device=k.device,
            group=self.options["group"],
        )

    def _projected(self, x: Tensor) -> list[Tensor]:
        """q (b, n, h, d), k and v (b, n, h_kv, d) of x (b, n, embed_dim): of the heads
        that are on this rank.
        """
        d = self.embed_dim // self.num_heads
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (proj(x).unflatten(-1, (-1, d)) for proj in projections)
        here = (q.shape[2], k.shape[2])
        whole = (self.num_heads, self.num_kv_heads)
        if here != whole:
            check_share(self.pattern, *here, *whole)
        return [q, k, v]

    def _forward(self, x: Tensor, call: dict, cache: KVCache | None) -> Tensor:
        q, k, v = self._projected(x)
        options = self.options | call
        adaptive = isinstance(self.pattern, Adaptive)
        by_content = adaptive or callable(self.pattern)
        if by_content and any(
            x is not None for x in (cache, call["cu_seqlens"], call["lengths"])
        ):
            raise NotImplementedError(
                "an Adaptive pattern and a function take no cache, cu_seqlens or lengths"
            )
        if cache is not None:  # it knows its group, and x is whole on every rank
            options |= {"group": None, "scheme": "auto", "layout": "contiguous"}
        if self.rotary_base is not None:
            if cache is None:
                where = positions(
                    x, call["cu_seqlens"], options["group"], options["layout"]
                )
            else:
                lengths = torch.tensor(cache.lengths, device=x.device)
                where = lengths[:, None] + positions(x)  # (b, n)
            q, k = (rotary(t, where, self.rotary_base) for t in (q, k))
        pattern = self.pattern
        if adaptive:
            causal, group = options["causal"], options["group"]
            pattern = choose(q, k, pattern, causal=causal, group=group)
        elif callable(pattern):
            pattern = pattern(q, k)
        out = attention(q, k, v, pattern, cache=cache, **options)
        return self.out_proj(out.flatten(2))

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, {self.pattern}, causal={self.options['causal']}"


def positions(
    x: Tensor,
    cu_seqlens: Integers | None = None,
    group: AnyGroup = None,
    layout: str | Layout = "contiguous",
) -> Tensor:
    """The positions (n,) in their documents of the rows of x (b, n, ...), which is a
    shard if there is a group. Rows behind the last document count on.

    >>> positions(torch.empty(1, 5, 8), cu_seqlens=[0, 3, 5]).tolist()
    [0, 1, 2, 0, 1]
    """
    n = length_of(x, group, layout)
    if cu_seqlens is None and group is None:  # no copy, which a CUDA graph refuses
        return torch.arange(n, device=x.device)
    where = torch.arange(n, device="cpu")
    if cu_seqlens is not None:
        spans = Documents.packed(cu_seqlens, x, n).spans
        starts = torch.tensor([start for _, start, _ in spans], device="cpu")
        where -= starts[torch.searchsorted(starts, where, right=True) - 1]
    if group is not None:
        where = shard_sequence(where, group, layout=layout, dim=0)
    return where.to(x.device)


def rotary(t: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """t (b, n, h, d) turned by angles that grow with its ``positions``, (n,) or (b, n):
    rotary embedding.

    As in arXiv 2104.09864; column i turns with column i + d / 2, as in Llama. A product
    of a row of q and one of k then depends on how far they are apart alone. Angles are
    computed in fp64, the rest in fp32 (fp64 for fp64). Raises ValueError for an odd d.

    >>> rotary(torch.ones(1, 1, 1, 2), torch.tensor([0])).flatten().tolist()
    [1.0, 1.0]
    """
    d = t.shape[3]
    dtype = torch.promote_types(t.dtype, torch.float32)
    if d % 2:
        raise ValueError(f"a rotary embedding needs an even head_dim, got {d}")
    rates = base ** (
        -torch.arange(0, d, 2, dtype=torch.float64, device=t.device) / d
    )  # (d / 2,)
    angles = (positions[..., None] * rates).unsqueeze(
        -2
    )  # (n, 1, d / 2); fp32 would lose turns far on
    a, b = t.to(dtype).chunk(2, -1)  # (b, n, h, d / 2)
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(t.dtype)


def next_tokens(
    tokens: Tensor, cu_seqlens: Integers | None = None, lengths: Integers | None = None
) -> Tensor:
    """The targets (b, n) of whole sequences ``tokens`` (b, n): the token after each;
    -100 at the end of a document, and where there is none.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8]]), cu_seqlens=[0, 2, 3]).tolist()
    [[6, -100, -100, -100]]
    """
    b, n = tokens.shape
    targets = F.pad(tokens.long()[:, 1:], (0, 1), value=-100)  # (b, n)
    if cu_seqlens is None and lengths is None:
        return targets
    none = torch.ones(b * n, dtype=torch.bool, device="cpu")
    for start, stop in documents_of(tokens, cu_seqlens, lengths, n).rows:
        none[start : stop - 1] = False
    return targets.masked_fill(none.view(b, n).to(tokens.device), -100)


def shard_sequence(
    t: Tensor,
    group: AnyGroup,
    *,
    layout: str | Layout = "contiguous",
    dim: int = 1,
) -> Tensor:
    """This rank's part of a whole tensor along its sequence ``dim``, as ``attention``
    takes it over ``group``.

    ``layout`` is the attention's. Shard tokens, targets, and ``positions`` of a model
    that takes them; targets are shifted before, by ``next_tokens`` of whole sequences.
    """
    ranks = Group.of(group, dimensions=2)
    if ranks.process_group is None:
        return t  # simulated ranks take whole tensors
    return layout_named(layout, t.shape[dim], ranks.size).shard(t, ranks.here[0], dim)


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def mean_loss(
    logits: Tensor,
    targets: Tensor,
    *groups: AnyGroup,
    total: int | Tensor | None = None,
) -> Tensor:
    """The mean cross-entropy of ``logits`` (b, n, vocabulary) over the ``targets`` (b,
    n) that are not negative.

    ``groups``: process groups, 1-D meshes, over whose ranks the tokens are shared out,
    as mesh["data"] and mesh["sequence"]. The value is the mean over all of them, on
    every rank. Its gradients are those of that mean once they are averaged over these
    ranks, as FSDP and DDP do, and ``average_gradients``. 0 where there is no target.

    ``total``, for micro-batches whose gradients are summed: the number of targets in
    all of them, on all ranks. Value and gradients are then the part of these tokens in
    the mean over that many, and the sum over the micro-batches is that mean.

    Targets are those of whole sequences, shifted before they are sharded, since the
    last token of a shard has its target on the next rank:
    ``shard_sequence(next_tokens(tokens), group)``. A model of transformers computes this
    loss itself from ``integrations.transformers.shard_inputs``.

    Raises ValueError for ``targets`` that are no integers, and for a ``total`` that is
    no positive integer, is less than the targets of this call, or differs between ranks.
    Where one rank refuses its logits, targets or total, all raise PlanMismatch.

    >>> logits, targets = torch.randn(2, 8, 5), torch.tensor([[1] * 8, [2] * 3 + [-100] * 5])
    >>> parts = [mean_loss(logits[i : i + 1], targets[i : i + 1], total=11) for i in range(2)]
    >>> torch.allclose(sum(parts), mean_loss(logits, targets))
    True
    """
    shared = _of_processes(groups)
    ranks = math.prod(group.size for group in shared)
    refused = None
    try:
        loss, sums = _loss_here(logits, targets, total)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if not shared:
            raise
        refused = error  # the others must not wait for this rank
        sums = torch.full((3,), torch.nan, dtype=torch.float64, device=logits.device)
    for group in shared:
        dist.all_reduce(sums, group=group.process_group)
    if shared and sums[1].isnan():
        why = []  # of the ranks that refuse, by number
        if refused is not None:
            text = " ".join(str(refused).split())
            why = [(dist.get_rank(), f"{type(refused).__name__}: {text}")]
        for group in shared:
            why = sorted(chain(*group.gather(why, sums)))
        if refused is not None and len(why) == ranks:
            raise refused
        rank, text = why[0]
        raise PlanMismatch(f"rank {rank} refuses its loss: {text}", rank)
    count = sums[1].clamp(min=1)
    if total is not None:
        total = int(total)
        if sums[2] != total * ranks or sums[1] > total:
            raise ValueError(
                f"total must be the number of all targets, one for all ranks, got {total}; this call has {int(sums[1])}"
            )
        count = sums.new_tensor(total)
    if not shared:
        return loss / count.to(loss.dtype)
    share = loss * ranks / count.to(loss.dtype)
    return share - share.detach() + (sums[0] / count).to(loss.dtype)


def _loss_here(logits: Tensor, targets: Tensor, total) -> tuple[Tensor, Tensor]:
    """The sum of the losses here, and what ranks add up in float64: (that sum, how many
    targets, ``total`` or 0).
    """
    total = 0 if total is None else check_int("total", total)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    if targets.dtype not in INTEGERS:
        raise ValueError(
            f"targets must be integers, as targets.long(), got {targets.dtype}"
        )
    targets = targets.long()
    known = targets >= 0
    loss = F.cross_entropy(
        logits, targets.masked_fill(~known, -100).flatten(), reduction="sum"
    )
    known = known.sum().double()
    return loss, torch.stack([loss.detach().double(), known, known.new_tensor(total)])


def average_gradients(module: Module, *groups: AnyGroup) -> None:
    """Replace the gradients of replicated weights by their means over the ranks of
    ``groups``; FSDP and DDP do it.

    Gradients are paired by the names of the parameters. A rank that has none counts as
    0, and gets the mean; a parameter that no rank has one of keeps None. Ranks compare
    their parameters first, by an all-to-all of 24 bytes to each other rank, and raise
    PlanMismatch where names, shapes or dtypes differ.

    Of weights that a tensor parallel mesh shares out, each rank's part is averaged over
    the ranks that have the same part. Raises ValueError for a group that such a mesh,
    or FSDP's, has other ranks of.
    """
    for group in _of_processes(groups):
        with shared_refusals(group):
            _average(dict(module.named_parameters()), group)


def _of_processes(groups) -> list[Group]:
    """Those of the groups that share work with other processes."""
    return [x for x in map(Group.sharing, groups) if x and x.process_group]


def _average(parameters: dict[str, nn.Parameter], group: Group) -> None:
    """``average_gradients`` of parameters by name over the ranks of a process group."""
    ranks = group.process_group
    fields = {"pass": "average of gradients"}
    kinds = []  # of the gradients here, (dtype, sparse dimensions), or None
    for name, parameter in parameters.items():
        if hasattr(parameter, "device_mesh"):  # a DTensor
            mesh = parameter.device_mesh.mesh.flatten().tolist()
            if len({*mesh} & {*dist.get_process_group_ranks(ranks)}) > 1:
                raise ValueError(
                    f"ranks {mesh} have parts of one gradient: average_gradients takes groups with the same part"
                )
        fields[f"parameter {name}"] = f"{tuple(parameter.shape)} of {parameter.dtype}"
        grad = parameter.grad
        sparse = grad.sparse_dim() if getattr(grad, "is_sparse", False) else 0
        kinds.append(None if grad is None else (grad.dtype, sparse))
    like = next(iter(parameters.values()), _NOTHING)
    everyone = group.everyone(fields, kinds, like)
    for name, parameter, *found in zip(parameters, parameters.values(), *everyone):
        found = {*found} - {None}
        if len(found) > 1:
            raise PlanMismatch(f"ranks disagree about gradients of {name}: {found}")
        if not found:
            continue
        _, sparse = found.pop()
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros.to_sparse(sparse) if sparse else zeros
        grad = parameter.grad
        if hasattr(grad, "to_local"):
            grad = grad.to_local()
        # In one order: the strides of ranks may differ.
        mean = grad.coalesce() if sparse else grad.contiguous()
        dist.all_reduce(mean, group=ranks)
        grad.copy_(mean / group.size)


class DecoderBlock(Module):
    """A block of a decoder, as in Llama: causal attention, then SwiGLU, each after
    RMSNorm and added to x.

    ``hidden_dim`` (default: 8 / 3 ``embed_dim``) is the width inside SwiGLU (arXiv
    2002.05202); other ``options`` are those of ``MultiheadAttention``. Called with x
    (b, n, embed_dim) and ``cu_seqlens``, ``lengths`` or ``cache``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: KINDS | Choice | str,
        *,
        hidden_dim: int | None = None,
        **options: Any,
    ):
        super().__init__()
        made = {"device": options.get("device"), "dtype": options.get("dtype")}
        hidden_dim = (
            embed_dim * 8 // 3
            if hidden_dim is None
            else check_int("hidden_dim", hidden_dim)
        )
        self.attention_norm: RMSNorm = RMSNorm(embed_dim, eps=1e-5, **made)
        self.mlp_norm: RMSNorm = RMSNorm(embed_dim, eps=1e-5, **made)
        usual = {"causal": True, "bias": False, "rotary_base": 10000.0}
        self.attention: MultiheadAttention = MultiheadAttention(
            embed_dim, num_heads, pattern, **usual | options
        )
        self.gate: Linear = Linear(embed_dim, hidden_dim, bias=False, **made)
        self.up: Linear = Linear(embed_dim, hidden_dim, bias=False, **made)
        self.down: Linear = Linear(hidden_dim, embed_dim, bias=False, **made)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **options)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def check_x(x: Tensor, embed_dim: int, weight: Tensor | None) -> None:
    """Raise TypeError or ValueError unless x is a floating-point tensor (b, n,
    embed_dim), without autocast of the dtype of ``weight``.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    check_float_dtype(x.dtype)
    if x.dim() != 3 or x.shape[2] != embed_dim:
        raise ValueError(
            f"x must be (batch, seq, {embed_dim}), got shape {tuple(x.shape)}"
        )
    if (
        weight is not None
        and x.dtype != weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
    ):
        raise ValueError(
            f"x is {x.dtype}, the layer {weight.dtype}: convert one, or use autocast"
        )


def _weight(projection: Module) -> Tensor | None:
    """The weight of a projection; None where it has none of a dtype to compute in, as a
    wrapper or a quantised layer.
    """
    weight = getattr(projection, "weight", None)
    return weight if getattr(weight, "dtype", None) in FLOATS else None


def _split_projections(layer: MultiheadAttention, state: dict, prefix: str, *_) -> None:
    """Turn the entries of torch's layer, q, k and v in one tensor, into those of
    ``layer``.
    """
    for kind in ("weight", "bias"):
        if (joined := state.pop(f"{prefix}in_proj_{kind}", None)) is not None:
            for name, part in zip("qkv", joined.chunk(3)):
                state[f"{prefix}{name}_proj.{kind}"] = part


def lengths_of(mask: Tensor, x: Tensor) -> Tensor:
    """How many rows of each batch entry of x (b, n, dim) a padding mask leaves;
    ValueError unless they come first.
    """
    if not isinstance(mask, Tensor) or mask.shape != x.shape[:2]:
        raise ValueError(
            f"key_padding_mask must be a tensor {tuple(x.shape[:2])}, got {short_repr(mask)}"
        )
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf  # (b, n)
    if not (hidden | (mask == 0)).all():
        raise ValueError("key_padding_mask must be of bools, or of 0 and -inf")
    lengths = (~hidden).sum(1)  # (b,)
    if not torch.equal(
        hidden, torch.arange(x.shape[1], device=hidden.device) >= lengths[:, None]
    ):
        raise ValueError(
            "key_padding_mask must hide the end of rows: pad on the right, or pack them with cu_seqlens"
        )
    return lengths


def _is_causal(mask: Tensor | None, x: Tensor) -> bool:
    """Whether a mask is given, which must be torch's causal one: True or -inf hides the
    keys after each query.
    """
    if mask is None:
        return False
    n = x.shape[1]
    if isinstance(mask, Tensor) and mask.shape == (n, n):
        fits = mask.dtype == torch.bool or mask.is_floating_point()
        if fits and torch.equal(mask, torch.full_like(mask, -torch.inf).triu(1)):
            return True
    raise TypeError(
        f"MultiheadAttention cannot honour 'attn_mask': {REFUSED['attn_mask']}"
    )
