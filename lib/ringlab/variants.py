"""The published systems by their published names and constructor arguments, each a row over the engine.

All of them compute head-group dilated attention: group i of the heads runs branch i, with offset i mod r, and nothing
is divided by the number of groups. They differ in how it is executed, and are equal in value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import hardware, kernels, memory
from .api import FLOATS, attention
from .local import Execution
from .patterns import Dilated

FLASH = ("flash_attn_3", "cudnn", "flash_attn_2", "flash", "cpu_flash")
FALLBACK = ("xformers", "efficient", "eager")  # the published chain below flash: xformers, SDPA, standard
REFUSED = {
    "sparsity_ratio": "it changed nothing in the original; state a density",
    "dropout": "attention dropout is not supported",
    "attention_dropout": "attention dropout is not supported",
}


class PublishedAttention(nn.Module):
    """What the published modules share: no parameters, ``forward(q, k, v, is_causal=False)`` on (b, n, h, d) tensors.

    Computes in ``dtype`` (None: the inputs' own) and returns the inputs' dtype. ``use_flash_attention=False`` keeps to
    kernels without flash. ``memory_pool_threshold_mb`` is in MiB. Raises TypeError for an argument that this system
    does not have, ValueError for bad values, NotImplementedError for more than one ring member.
    """

    gather = False  # index-select copies instead of strided views
    backend: str | tuple[str, ...] = "auto"
    auto_dtype = False  # dtype=None means the hardware's best, not the inputs' own

    def __init__(
        self,
        segment_lengths,
        dilation_rates,
        ring_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        use_pattern_cache: bool = True,
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float = 16.0,
        use_flash_attention: bool = True,
        use_gradient_checkpointing: bool = False,
        block_size: int | None = None,
        density: float | None = None,
        group=None,
        **refused,
    ):
        super().__init__()
        name = type(self).__name__
        for argument in refused:
            raise TypeError(f"{name} cannot honour {argument!r}: {REFUSED.get(argument, 'unknown argument')}")
        for argument, value in (("block_size", block_size), ("density", density)):
            if value is not None:
                raise TypeError(f"{name} cannot honour {argument!r}: it belongs to the block-sparse systems")
        if ring_size is not None and (isinstance(ring_size, bool) or not isinstance(ring_size, int) or ring_size < 1):
            raise ValueError(f"ring_size must be a positive integer, got {ring_size!r}")
        if group is not None or ring_size not in (None, 1):
            raise NotImplementedError(f"{name} runs on one device: ring_size must be 1 and group None")
        if not isinstance(memory_pool_threshold_mb, float | int) or not 0 <= memory_pool_threshold_mb < float("inf"):
            given = repr(memory_pool_threshold_mb)
            raise ValueError(f"memory_pool_threshold_mb must be finite and not negative, got {given}")
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype!r}")
        switches = {
            "use_pattern_cache": use_pattern_cache,
            "enable_memory_pool": enable_memory_pool,
            "use_flash_attention": use_flash_attention,
            "use_gradient_checkpointing": use_gradient_checkpointing,
        }
        for argument, value in switches.items():
            if not isinstance(value, bool):
                raise TypeError(f"{argument} must be True or False, got {value!r}")
        self.pattern = Dilated(segment_lengths, dilation_rates, mixing="head_groups", offsets="branch")
        self.device = None if device is None else torch.device(device)
        if dtype is None and self.auto_dtype:
            dtype = self._policy_dtype()
        self.dtype = dtype
        self.chain = self.backend if use_flash_attention else FALLBACK
        self.use_gradient_checkpointing = use_gradient_checkpointing
        pool = memory.MemoryPool(threshold_bytes=int(memory_pool_threshold_mb * 2**20)) if enable_memory_pool else False
        self.execution = Execution(gather=self.gather, cache=use_pattern_cache, pool=pool)

    def _policy_dtype(self) -> torch.dtype:
        on_gpu = torch.cuda.is_available() if self.device is None else self.device.type == "cuda"
        return hardware.default_dtype(torch.cuda.get_device_capability(self.device) if on_gpu else None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Attention over (b, n, h, d) tensors; returns (b, n, h, d) in the inputs' dtype."""
        if self.device is not None and q.device.type != self.device.type:
            raise ValueError(f"{type(self).__name__} is on {self.device}, the input on {q.device}")
        if self.dtype is not None and q.dtype == torch.float64 != self.dtype:
            raise ValueError(f"{type(self).__name__} computes in {self.dtype}: for float64 pass dtype=torch.float64")
        args = [t if self.dtype is None else t.to(self.dtype) for t in (q, k, v)]
        if self.use_gradient_checkpointing and torch.is_grad_enabled():
            out = checkpoint(self._attend, *args, is_causal, use_reentrant=False)
        else:
            out = self._attend(*args, is_causal)
        return out.to(q.dtype)

    def _attend(self, q, k, v, is_causal):
        return attention(q, k, v, self.pattern, causal=is_causal, backend=self.chain, execution=self.execution)

    def backends(self, device: torch.device | str = "cpu", head_dim: int = 64) -> list[tuple]:
        """(kernel, runs, reason for a refusal, chosen) along this module's chain, each link probed by a call."""
        dtype = self.dtype or torch.float32
        chosen = kernels.choose(device, dtype, head_dim, backward=True, backend=self.chain).name
        rows = kernels.table(device, dtype, head_dim)
        return [(name, runs, why, name == chosen) for name, runs, why, _ in rows]

    def extra_repr(self) -> str:
        return f"{self.pattern}, dtype={self.dtype}, {self.execution}"


class DilatedAttention(PublishedAttention):
    """Dilated attention by gathering each group's rows: the published definition, without its double dropout.

    >>> DilatedAttention([4, 8], [1, 2])(*[torch.randn(1, 16, 2, 8)] * 3).shape
    torch.Size([1, 16, 2, 8])
    """

    gather = True


class ImprovedDilatedAttention(PublishedAttention):
    """The same function through strided views. (The original attended over the heads of each position.)

    >>> q = torch.randn(1, 16, 2, 8); a, b = DilatedAttention([4, 8], [1, 2]), ImprovedDilatedAttention([4, 8], [1, 2])
    >>> torch.allclose(a(q, q, q), b(q, q, q), atol=1e-6)
    True
    """


class RingDilatedAttentionV2Collective(PublishedAttention):
    """The all-gather ring; on one device, as in document 000, there is nothing to gather and no ring code runs.

    >>> RingDilatedAttentionV2Collective([4, 8], [1, 2], dtype=torch.float32)(*[torch.randn(1, 16, 2, 8)] * 3).shape
    torch.Size([1, 16, 2, 8])
    """


class RingDilatedAttentionV2Flash(PublishedAttention):
    """Flash kernels first, then xformers, SDPA, standard; dtype chosen by the hardware policy, an explicit one wins.

    >>> RingDilatedAttentionV2Flash([4, 8], [1, 2], device="cpu").dtype
    torch.float32
    """

    backend = FLASH + FALLBACK
    auto_dtype = True
