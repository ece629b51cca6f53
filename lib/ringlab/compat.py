"""The published systems under their published names and constructor arguments: torch
modules, each a few settings over ``ringlab.attention``. They have no weights, but for
the three that take ``embed_dim`` and ``num_heads`` in the original, where these are
given. For one of them see its own help, as ``help(ringlab.compat.DilatedAttention)``.

The dilated ones give the same values, but for the one along a Hilbert curve: heads are
split into as many groups as there are branches, group i runs branch i with offset i mod
r, and nothing is divided by the number of groups. So a head of rate r has one row in r,
and the others of its output are zero: 25 % of all rows for rates 1 and 2, 37.5 % for 1,
2 and 4. ``ringlab.attention`` over ``Dilated(..., mixing="lse")`` leaves none at zero
where a rate is 1: there every head runs every branch. They differ in how ranks share the
work, and in kernels and memory. ``RingDilatedAttentionV2``, ``V2Robust`` and ``Hybrid``
are one class under three names; on one device ``V2Collective`` makes the same call. The
published ``ring_communication_fix`` is not needed: a rank posts its sends and receives
at once. The block-sparse ones differ in how one device computes them. ``longnet`` lets a
LongNet of torchscale, as Prov-GigaPath's, run on the engine.

>>> q = torch.randn(1, 16, 2, 8)  # (batch, seq, heads, head_dim)
>>> out = ImprovedDilatedAttention([4, 8], [1, 2])(q, q, q, is_causal=True)
>>> out.shape, (out == 0).all(-1).float().mean().item()  # the share of rows that are zero
(torch.Size([1, 16, 2, 8]), 0.25)
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import baselines, hardware, kernels, memory, ring
from .attention import MASKS, REFUSED, attention, check_tensors
from .block_patterns import BlockSparse, Segment, sliding_window
from .checks import (
    LARGEST,
    Backend,
    Device,
    check_bool,
    check_float_dtype,
    check_int,
    check_unknown,
    is_int,
    is_real,
    short_repr,
)
from .engine import Execution
from .engine.chunked import OOMBackoff
from .integrations.torchscale import longnet as longnet
from .nn import check_x
from .patterns import Dilated, Pattern
from .ring import Simulated
from .ring.group import AnyGroup, Group, length_of, with_shared_refusals

FLASH = tuple(
    "flash_attn_4 flash_attn_3 cudnn flash_attn_2 flash compiled cpu_flash".split()
)
Lengths = Sequence[int]
# The published chain below flash: xformers, SDPA, standard.
FALLBACK = (
    "xformers",
    "efficient",
    "eager",
)
REASONS = REFUSED | {
    "sparsity_ratio": "it changed nothing in the original; state a density",
    **dict.fromkeys(
        ("embed_dim", "num_heads"),
        "it has no weights; give ringlab.nn.MultiheadAttention a pattern, or split heads before",
    ),
    **dict.fromkeys(("config", "sparse_config"), "pass its values by name, as density"),
    **dict.fromkeys(("causal", "is_causal"), "forward takes is_causal=True"),
    "need_weights": "the attention weights are never formed",
    **dict.fromkeys(MASKS, "masks are not arguments; use is_causal=True"),
    **dict.fromkeys(
        "total_seq_len already_split use_hilbert attention_backend benchmark_backends memory_pool_size "
        "lightweight_pool enable_error_recovery enable_profiling flash_chunk_size".split(),
        "it means nothing here: leave it out",
    ),
}


# What one rank refuses, all raise.
_shared = with_shared_refusals(lambda module, *_, **__: module.group)


class PublishedAttention(nn.Module):
    """Base of the published modules: no parameters, ``forward(q, k, v,
    is_causal=False)`` on (b, n, h, d) tensors.

    q, k and v have one dtype, which is that of the result. The module computes in
    ``dtype`` (None: that of q, k, v; of the dilated ring systems the hardware's, float32
    on a CPU and on Pascal). ``.half()``, ``.to(dtype)`` and ``.to(device)`` change
    ``dtype`` and ``device`` as those of a module with weights.
    ``use_flash_attention=False`` uses only kernels without flash.
    ``enable_memory_pool`` lends scratch buffers of at least ``memory_pool_threshold_mb``
    MiB. Systems that copy, on one device, and the block-sparse ones in half precision
    over ranks have some. A module whose first call has none, as it works in place,
    warns that the pool is idle.

    The ring systems take a ``group`` (a ProcessGroup or 1-D mesh; q, k, v are then this
    rank's shards), or a ``ring_size``, which is simulated on one device.

    Raises TypeError, with the reason, for an argument that this system does not have, as
    configs of the originals, ValueError for bad values, NotImplementedError for several
    ranks in a system of one device.

    >>> DilatedAttention([4, 8], [1, 2]).to(torch.bfloat16).dtype
    torch.bfloat16
    """

    _way: str | None = None  # of ``baselines``, on one device: how the original runs
    _scheme: str | None = None  # how ranks share the work; None: one device
    _backend: Backend = "auto"

    def __init__(
        self,
        segment_lengths: Lengths,
        dilation_rates: Lengths,
        ring_size: int | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        use_pattern_cache: bool = True,
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float = 16.0,
        use_flash_attention: bool = True,
        use_gradient_checkpointing: bool = False,
        block_size: int | None = None,
        density: float | None = None,
        group: AnyGroup = None,
        **refused: object,
    ):
        super().__init__()
        name = type(self).__name__
        *known, _ = inspect.signature(PublishedAttention).parameters
        check_unknown(name, refused, REASONS, f"known: {', '.join(known)}")
        self.pattern: Pattern = self._made_pattern(
            segment_lengths, dilation_rates, block_size, density
        )
        size = 1 if group is None else ring.group_size(group)
        ring_size = check_int("ring_size", size if ring_size is None else ring_size)
        if self._scheme is None and (group is not None or ring_size > 1):
            raise NotImplementedError(
                f"{name} runs on one device: ring_size must be 1 and group None"
            )
        if group is not None and ring_size != size:
            raise ValueError(f"ring_size is {ring_size}, the group has {size} ranks")
        mb = memory_pool_threshold_mb
        if not is_real(mb) or not 0 <= mb < float("inf"):
            raise ValueError(
                f"memory_pool_threshold_mb must be finite and not negative, got {short_repr(mb)}"
            )
        if dtype is not None:
            check_float_dtype(dtype)
        check_bool("use_pattern_cache", use_pattern_cache)
        check_bool("enable_memory_pool", enable_memory_pool)
        check_bool("use_flash_attention", use_flash_attention)
        check_bool("use_gradient_checkpointing", use_gradient_checkpointing)
        self.device: torch.device | None = (
            None if device is None else kernels.device_of(device)
        )
        # Block-sparse systems and those of one device keep the dtype of q, k, v.
        if dtype is None and self._scheme and isinstance(self.pattern, Dilated):
            on_gpu = (
                torch.cuda.is_available()
                if self.device is None
                else self.device.type == "cuda"
            )
            dtype = hardware.default_dtype(
                torch.cuda.get_device_capability(self.device) if on_gpu else None
            )
        self.dtype: torch.dtype | None = dtype
        self.group: AnyGroup = (
            Simulated(ring_size)
            if group is None and ring_size > 1
            else Group.kept(group)
        )
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self._untold = enable_memory_pool  # that the pool is idle
        pool = enable_memory_pool and memory.MemoryPool(threshold_bytes=int(mb * 2**20))
        self.chain: Backend = self._backend if use_flash_attention else FALLBACK
        self.way: str | None = self._way if self.group is None else None
        self.execution: Execution = Execution(cache=use_pattern_cache, pool=pool)

    def _made_pattern(self, segment_lengths, dilation_rates, block_size, density):
        blocks = {"block_size": block_size, "density": density}
        check_unknown(
            type(self).__name__,
            blocks,
            dict.fromkeys(blocks, "it belongs to the block-sparse systems"),
        )
        return Dilated(
            segment_lengths, dilation_rates, mixing="head_groups", offsets="branch"
        )

    def _apply(self, fn, recurse=True):
        """Follow ``.half()``, ``.to(...)`` and so on: empty tensors show what fn does,
        since there are no weights.
        """
        super()._apply(fn, recurse)
        own = self.device or torch.device("cpu")
        single, double = (
            fn(torch.empty(0, dtype=dtype, device=own))
            for dtype in (torch.float32, torch.float64)
        )
        if single.dtype == double.dtype:
            check_float_dtype(single.dtype)
            self.dtype = single.dtype
        device = single.device
        if device.type != own.type or device.index != own.index is not None:
            self.device = device
        return self

    @_shared
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        **refused: object,
    ) -> Tensor:
        """Attention over (b, n, h, d) tensors; returns (b, n, h, d) in the inputs'
        dtype.
        """
        check_unknown(type(self).__name__, refused, REASONS)
        check_tensors(q, k, v)
        args = [*map(self._taken, (q, k, v))]
        if self.use_gradient_checkpointing and torch.is_grad_enabled():
            out = checkpoint(self._attend, *args, is_causal, use_reentrant=False)
        else:
            out = self._attend(*args, is_causal)
        if self._untold:
            self._untold = False
            if not self.execution.pool.stats().borrows:
                warnings.warn(
                    f"{type(self).__name__} borrows nothing: its memory pool is idle",
                    stacklevel=5,
                )
        return out.to(q.dtype)

    def _taken(self, t: Tensor) -> Tensor:
        """An input in the module's dtype; ValueError on another device, and for float64
        that would be rounded.
        """
        name = type(self).__name__
        own = self.device or t.device
        if own.type != t.device.type or (
            own.type == "cuda" and own.index not in (None, t.device.index)
        ):
            raise ValueError(f"{name} is on {self.device}, the input on {t.device}")
        if self.dtype is not None and t.dtype == torch.float64 != self.dtype:
            raise ValueError(
                f"{name} computes in {self.dtype}: for float64 pass dtype=torch.float64 or call .double()"
            )
        return t if self.dtype is None else t.to(self.dtype)

    def _attend(self, q, k, v, is_causal):
        pattern = self.pattern_for(length_of(q, self.group, "contiguous"), is_causal)
        how = {"causal": is_causal, "backend": self.chain, "execution": self.execution}
        if self.way is not None:
            return baselines.attend(q, k, v, pattern, self.way, **how)[0]
        return attention(q, k, v, pattern, **how, **self._ranks(q.shape[1]))

    def pattern_for(self, n: int, causal: bool = False) -> Pattern:
        """The pattern over ``n`` positions."""
        return self.pattern

    def _ranks(self, rows: int) -> dict:
        """The arguments of ``attention`` across ranks, for q, k, v of so many rows."""
        return (
            {} if self.group is None else {"group": self.group, "scheme": self._scheme}
        )

    def extra_repr(self) -> str:
        return f"{self.pattern}, dtype={self.dtype}, {self.execution}"


class DilatedAttention(PublishedAttention):
    """Dilated attention by gathering each group's rows: the published definition,
    without its double dropout.

    >>> DilatedAttention([4, 8], [1, 2])(*[torch.randn(1, 16, 2, 8)] * 3).shape
    torch.Size([1, 16, 2, 8])
    """

    _way = "gather"


class ImprovedDilatedAttention(PublishedAttention):
    """The same function through strided views. (The original attended over the heads of
    each position.)
    """


class RingDilatedAttentionV2(PublishedAttention):
    """The ring simulated on one device, any ``ring_size``: K/V shards hop from rank to
    rank.

    >>> q = torch.randn(1, 16, 2, 8); a, b = (RingDilatedAttentionV2([8, 16], [1, 2], ring_size=p) for p in (1, 4))
    >>> torch.allclose(a(q, q, q), b(q, q, q), atol=1e-6)
    True
    """

    _scheme = "ring"


class RingDilatedAttentionV2Collective(PublishedAttention):
    """Every rank gathers K and V; on one device, as in document 000, nothing is
    gathered and no ring code runs.
    """

    _scheme = "all_gather"


class RingDilatedAttentionV2Robust(RingDilatedAttentionV2):
    """``RingDilatedAttentionV2`` under another name: its messages are asynchronous and
    point to point. No ring code runs on one device.
    """


class RingDilatedAttentionV2Flash(RingDilatedAttentionV2):
    """Flash kernels first, then xformers, SDPA, standard.

    >>> RingDilatedAttentionV2Flash([4, 8], [1, 2], device="cpu").dtype
    torch.float32
    """

    _backend = FLASH + FALLBACK


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """The ring with gradient checkpointing by default, and smaller tiles if memory runs
    out. It works in place: there is nothing that the original's memory pool could lend.

    >>> RingDilatedAttentionProduction([4, 8], [1, 2], use_gradient_checkpointing=False).execution.tile
    OOMBackoff((2048, 512, 128), level=0)
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{"use_gradient_checkpointing": True} | options)
        self.execution: Execution = replace(self.execution, tile=OOMBackoff())

    def agree(self) -> None:
        """Let all ranks use the smallest tile of any rank; call it on every rank,
        between two steps.
        """
        if not isinstance(self.group, Simulated | None):
            self.execution.tile.agree(Group.of(self.group).process_group)


class RingDilatedAttentionHybrid(RingDilatedAttentionV2):
    """``RingDilatedAttentionV2`` under another name: hops with segment-wise dilation
    inside each, accumulated by log-sum-exp.
    """


class ProjectedAttention(PublishedAttention):
    """Base of the systems that are layers in the original: with ``embed_dim, num_heads,
    segment_lengths, dilation_rates, dropout=0.0, bias=True``, the others by name, they
    are layers here too.

    ``forward(x, is_causal=False)`` then takes x (b, n, embed_dim), over a ``group`` this
    rank's shard, and returns as much in x's dtype. The weights ``qkv_proj`` and
    ``out_proj`` have the original's names, so that its state dictionaries load. Over a
    group they are replicated, and their gradients are this rank's part, as of
    ``ringlab.nn.MultiheadAttention``.

    >>> layer = RingDilatedAttentionSDPA(64, 8, [16, 32], [1, 2])
    >>> layer(torch.randn(2, 100, 64), is_causal=True).shape, [*layer.state_dict()]
    (torch.Size([2, 100, 64]), ['qkv_proj.weight', 'qkv_proj.bias', 'out_proj.weight', 'out_proj.bias'])
    """

    embed_dim: int = 0  # no weights

    def __init__(self, *args: Any, **options: Any):
        if "embed_dim" in options or args and is_int(args[0]):
            self._init_layer(*args, **options)
        else:
            super().__init__(*args, **options)

    def _init_layer(
        self,
        embed_dim,
        num_heads,
        segment_lengths,
        dilation_rates,
        dropout=0.0,
        bias=True,
        **options,
    ):
        super().__init__(segment_lengths, dilation_rates, dropout=dropout, **options)
        embed_dim = self.embed_dim = check_int("embed_dim", embed_dim)
        self.num_heads: int = check_int("num_heads", num_heads)
        if embed_dim % self.num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim, got {num_heads} and {embed_dim}"
            )
        made = bias, self.device, self.dtype
        self.qkv_proj: nn.Linear = nn.Linear(embed_dim, 3 * embed_dim, *made)
        self.out_proj: nn.Linear = nn.Linear(embed_dim, embed_dim, *made)

    @_shared
    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        """Attention of x (b, n, embed_dim); without weights of q, k and v."""
        if not self.embed_dim:
            return super().forward(*tensors, **options)
        if len(tensors) != 1:
            raise TypeError(
                f"{type(self).__name__} with projections takes x, the others by name, as is_causal=True"
            )
        (x,) = tensors
        check_x(x, self.embed_dim)
        qkv = self.qkv_proj(self._taken(x))  # (b, n, 3 embed_dim)
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)  # (b, n, h, d) each
        out = super().forward(*qkv, **options)
        return self.out_proj(out.flatten(2)).to(x.dtype)


class RingDilatedAttentionSDPA(ProjectedAttention):
    """The ring on torch's own SDPA kernels alone. Also a layer, with ``embed_dim`` and
    ``num_heads``: see ``help(ringlab.compat.ProjectedAttention)``.
    """

    _scheme = "ring"
    _backend = "sdpa"


class RingDilatedAttentionCorrect(ProjectedAttention):
    """The ring on the plain eager kernel, with the right split of the sequence: the
    reference of the ring systems. Also a layer, with ``embed_dim`` and ``num_heads``:
    see ``help(ringlab.compat.ProjectedAttention)``.
    """

    _scheme = "ring"
    _backend = "eager"


class RingDilatedAttentionHilbertGPUOptimized(ProjectedAttention):
    """The pattern along a Hilbert curve over the most nearly square grid whose cells
    are the sequence, row by row.

    On one device, or a ``ring_size`` simulated on it. Raises ValueError for
    ``is_causal=True``: steps of the curve are not in time order.

    Also a layer, with ``embed_dim`` and ``num_heads``: see
    ``help(ringlab.compat.ProjectedAttention)``.
    """

    _scheme = "plan"

    def _ranks(self, rows: int) -> dict:
        group = self.group or Simulated(1)
        if not isinstance(group, Simulated):
            raise NotImplementedError(
                f"{type(self).__name__} takes ring_size: over a group, pass attention a layout"
            )
        height = max(h for h in range(1, isqrt(rows) + 1) if rows % h == 0)
        return {
            "group": group,
            "scheme": self._scheme,
            "layout": ring.hilbert(height, rows // height, group.ranks),
        }


_solved = lru_cache(maxsize=64)(BlockSparse.with_density)


class BlockSparseRingDilatedAttention(PublishedAttention):
    """Block-sparse attention, a call for each block of queries: the published
    definition, with one softmax per row. Over several ranks it and those made from it
    run the plan, on views.

    Takes exactly one of: ``segment_lengths`` and ``dilation_rates``, which dilate
    blocks here (each length a multiple of ``block_size``, each rate in blocks);
    ``density`` in (0, 1], for which each sequence length gets the window of blocks that
    comes nearest; or ``pattern``, a ``ringlab.BlockSparse``. ``block_size`` is 128 by
    default. Raises ValueError for none or several of them, and for lengths that are not
    multiples.

    >>> q = torch.randn(1, 64, 2, 8); a = BlockSparseRingDilatedAttention([32], [2], block_size=8)
    >>> torch.allclose(a(q, q, q), BlockSparseOptimized([32], [2], block_size=8)(q, q, q), atol=1e-6)
    True
    """

    _way = "rows"
    _scheme = "plan"

    def __init__(
        self,
        segment_lengths: Lengths | None = None,
        dilation_rates: Lengths | None = None,
        ring_size: int | None = None,
        *,
        pattern: BlockSparse | None = None,
        **options: Any,
    ):
        self._own_pattern = pattern
        super().__init__(segment_lengths, dilation_rates, ring_size, **options)

    def _made_pattern(self, segment_lengths, dilation_rates, block_size, density):
        name = type(self).__name__
        own = self._own_pattern
        segments = segment_lengths is not None or dilation_rates is not None
        if (segments, density is not None, own is not None).count(True) != 1:
            raise ValueError(
                f"{name} takes segment_lengths and dilation_rates, or density, or pattern: one of them"
            )
        self.density: float | None = density
        size = check_int(
            "block_size", 128 if block_size is None else block_size, most=LARGEST
        )
        if own is not None:
            if not isinstance(own, BlockSparse) or block_size is not None:
                expected = (
                    "pattern must be a BlockSparse, and block_size is the pattern's own"
                )
                raise ValueError(
                    f"{name}: {expected}, got {short_repr(own)} and {short_repr(block_size)}"
                )
            return own
        if density is not None:
            window = sliding_window(0, block_size=size)
            # Raises for a bad density now, not at the first call.
            window.with_density(density, size)
            return window
        tokens = Dilated(segment_lengths, dilation_rates)
        branches = []
        for length, rate in zip(tokens.segment_lengths, tokens.dilation_rates):
            if length % size:
                raise ValueError(
                    f"{name}: segment length {length} is no multiple of the block size {size}"
                )
            branches.append(Segment(length // size, rate))
        return BlockSparse(branches, size)

    def pattern_for(self, n: int, causal: bool = False) -> Pattern:
        """The pattern over ``n`` positions: the one given, or the window whose density
        is nearest to the one given.
        """
        check_int("n", n, most=LARGEST)
        check_bool("causal", causal)
        return (
            self.pattern
            if self.density is None
            else _solved(self.pattern, self.density, n, causal)
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + (
            "" if self.density is None else f", density={self.density}"
        )


class BlockSparseOptimized(BlockSparseRingDilatedAttention):
    """The same with one call for all rows that see equally many blocks, on copies of
    these blocks.
    """

    _way = "batched"


class BlockSparseTorchSparse(BlockSparseRingDilatedAttention):
    """The same with the probabilities in a ``torch.sparse`` BSR tensor, in float32 or
    float64.
    """

    _way = "bsr"
