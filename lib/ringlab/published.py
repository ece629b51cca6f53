"""What the published systems share: their arguments, checked, and the engine's call that these come to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import hardware, kernels, memory, ring
from .advise import Advice, Auto
from .api import attention, check_tensors
from .checks import flag, float_dtype, positive, real, shown
from .local import Execution
from .patterns import Dilated
from .ring import Simulated

FLASH = ("flash_attn_3", "cudnn", "flash_attn_2", "flash", "cpu_flash")
FALLBACK = ("xformers", "efficient", "eager")  # the published chain below flash: xformers, SDPA, standard
NO_MASK, NO_DROPOUT = "masks are not arguments; use is_causal=True", "attention dropout is not supported"
REFUSED = {
    "sparsity_ratio": "it changed nothing in the original; state a density",
    **dict.fromkeys(("causal", "is_causal"), "forward takes is_causal=True"),
    "need_weights": "the attention weights are never formed",
    **dict.fromkeys(("dropout", "dropout_p", "attention_dropout"), NO_DROPOUT),
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "key_padding_mask"), NO_MASK),
}


class PublishedAttention(nn.Module):
    """What the published modules share: no parameters, ``forward(q, k, v, is_causal=False)`` on (b, n, h, d) tensors.

    q, k and v have one dtype; computes in ``dtype`` (None: that of the inputs) and returns that of the inputs.
    ``.half()``, ``.to(dtype)`` and ``.to(device)`` change ``dtype`` and ``device`` like those of a module with weights.
    ``use_flash_attention=False`` keeps to kernels without flash. ``memory_pool_threshold_mb`` is in MiB.
    The ring systems take a ``group`` (a ProcessGroup or 1-D mesh; q, k, v are then this rank's shards), or a
    ``ring_size``, which is simulated on one device. ``config="auto"`` runs the same function by the backend, scheme and
    execution that advice chooses for each shape, instead of those that name this system; switches that are given stay.
    With an ``Advice`` they are taken from it, and the dtype where the system chooses it. ``.advice`` is the last taken.
    Raises TypeError for an argument that this system does not have, ValueError for bad values, NotImplementedError for
    several ring members in a system of one device.

    >>> from ringlab import DilatedAttention
    >>> DilatedAttention([4, 8], [1, 2]).to(torch.bfloat16).dtype
    torch.bfloat16
    """

    gather = False  # index-select copies instead of strided views
    scheme: str | None = None  # how ranks share the work; None: one device
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
        config: str | Advice | None = None,
        **refused,
    ):
        super().__init__()
        name = type(self).__name__
        for argument, value in refused.items():
            if REFUSED.get(argument) is not NO_DROPOUT or value != 0:  # no dropout is what there is
                raise TypeError(f"{name} cannot honour {argument!r}: {REFUSED.get(argument, 'unknown argument')}")
        if ring_size is not None:
            positive("ring_size", ring_size)
        if self.scheme is None and (group is not None or ring_size not in (None, 1)):
            raise NotImplementedError(f"{name} runs on one device: ring_size must be 1 and group None")
        if group is not None and ring_size not in (None, size := ring.group_size(group)):
            raise ValueError(f"ring_size is {ring_size}, the group has {size} ranks")
        mb = memory_pool_threshold_mb
        if not real(mb) or not 0 <= mb < float("inf"):
            raise ValueError(f"memory_pool_threshold_mb must be finite and not negative, got {shown(mb)}")
        if dtype is not None:
            float_dtype(dtype)
        switches = {
            "use_pattern_cache": use_pattern_cache,
            "enable_memory_pool": enable_memory_pool,
            "use_flash_attention": use_flash_attention,
            "use_gradient_checkpointing": use_gradient_checkpointing,
        }
        for argument, value in switches.items():
            flag(argument, value)
        self.pattern = self._made_pattern(segment_lengths, dilation_rates, block_size, density)
        self.device = None if device is None else kernels.device_of(device)
        self.auto = None if config is None else Auto(config)
        if dtype is None and self.auto_dtype:
            dtype = self._policy_dtype() if self.advice is None else self.advice["dtype"]
        self.dtype = dtype
        self.group = Simulated(ring_size) if group is None and (ring_size or 1) > 1 else group
        self.chain = self.backend if use_flash_attention else FALLBACK
        self.use_gradient_checkpointing = use_gradient_checkpointing
        pool = memory.MemoryPool(threshold_bytes=int(mb * 2**20)) if enable_memory_pool else False
        self.execution = Execution(gather=self.gather, cache=use_pattern_cache, pool=pool)
        if self.auto is not None:  # what names the system is left open, what was asked for is not
            self.chain = "auto" if use_flash_attention else FALLBACK
            self.execution = replace(self.execution, gather=False)
            self.scheme = self.scheme and "auto"

    def _made_pattern(self, segment_lengths, dilation_rates, block_size, density):
        for argument, value in (("block_size", block_size), ("density", density)):
            if value is not None:
                name = type(self).__name__
                raise TypeError(f"{name} cannot honour {argument!r}: it belongs to the block-sparse systems")
        return Dilated(segment_lengths, dilation_rates, mixing="head_groups", offsets="branch")

    def _policy_dtype(self) -> torch.dtype:
        on_gpu = torch.cuda.is_available() if self.device is None else self.device.type == "cuda"
        return hardware.default_dtype(torch.cuda.get_device_capability(self.device) if on_gpu else None)

    def _apply(self, fn, recurse=True):
        """Follow ``.half()``, ``.to(...)`` and their like: there are no weights, so empty tensors show what fn does."""
        super()._apply(fn, recurse)
        own = self.device or torch.device("cpu")
        made = [fn(torch.empty(0, dtype=dtype, device=own)) for dtype in (torch.float32, torch.float64)]
        if made[0].dtype == made[1].dtype:
            float_dtype(made[0].dtype)
            self.dtype = made[0].dtype
        if made[0].device.type != own.type or made[0].device.index != own.index is not None:
            self.device = made[0].device
        return self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **refused) -> Tensor:
        """Attention over (b, n, h, d) tensors; returns (b, n, h, d) in the inputs' dtype."""
        name = type(self).__name__
        for argument in refused:
            raise TypeError(f"{name} cannot honour {argument!r}: {REFUSED.get(argument, 'unknown argument')}")
        check_tensors(q, k, v)
        flag("is_causal", is_causal)
        own = self.device or q.device
        if own.type != q.device.type or (own.type == "cuda" and own.index not in (None, q.device.index)):
            raise ValueError(f"{name} is on {self.device}, the input on {q.device}")
        if self.dtype is not None and q.dtype == torch.float64 != self.dtype:
            raise ValueError(f"{name} computes in {self.dtype}: for float64 pass dtype=torch.float64 or call .double()")
        args = [t if self.dtype is None else t.to(self.dtype) for t in (q, k, v)]
        if self.use_gradient_checkpointing and torch.is_grad_enabled():
            out = checkpoint(self._attend, *args, is_causal, use_reentrant=False)
        else:
            out = self._attend(*args, is_causal)
        return out.to(q.dtype)

    def _attend(self, q, k, v, is_causal):
        return self._attend_to(self.pattern, q, k, v, is_causal)

    def _attend_to(self, pattern, q, k, v, is_causal):
        options = {"causal": is_causal, "backend": self.chain, "execution": self.execution}
        options |= self._ranks(q.shape[1])
        if self.auto is not None:
            options = self.auto.fill(options, pattern, q, k)
        return attention(q, k, v, pattern, **options)

    @property
    def advice(self) -> Advice | None:
        """The advice that the last call followed; None before, or without ``config``."""
        return self.auto and self.auto.advice

    def _ranks(self, rows: int) -> dict:
        """Arguments for ``attention`` that say who shares q, k, v of so many rows."""
        return {} if self.group is None else {"group": self.group, "scheme": self.scheme}

    def backends(self, device: torch.device | str = "cpu", head_dim: int = 64) -> list[tuple]:
        """(kernel, runs, reason for a refusal, chosen) along this module's chain, each link probed by a call."""
        dtype = self.dtype or torch.float32
        rows = kernels.table(device, dtype, head_dim)
        chosen = kernels.choose(device, dtype, head_dim, backward=True, backend=self.chain).name
        return [(name, runs, why, name == chosen) for name, runs, why, _ in rows]

    def extra_repr(self) -> str:
        said = f"{self.pattern}, dtype={self.dtype}, {self.execution}"
        return said if self.auto is None else f"{said}, {self.auto}"
