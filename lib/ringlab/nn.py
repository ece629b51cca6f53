"""Modules for models: attention with its projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import ring
from .advise import Advice, Auto
from .attention import DEFAULT, REFUSED, attention
from .checks import LARGEST, check_bool, check_float_dtype, check_int, check_one_device, check_unknown
from .engine import Execution
from .kernels import device_of
from .patterns import Pattern


class MultiheadAttention(nn.Module):
    """Self-attention over a pattern with q, k, v and output projections: (b, n, embed_dim) to (b, n, embed_dim).

    ``num_kv_heads`` (default: ``num_heads``) must divide ``num_heads``, and ``num_heads`` must divide ``embed_dim``.
    ``group``, ``scheme``, ``layout``, ``backend`` and ``execution`` are those of ``ringlab.attention``: over a
    ProcessGroup or 1-D mesh, x is this rank's shard of the sequence. The weights are replicated then, and their
    gradients are this rank's part: sum them over the ranks. ``use_gradient_checkpointing`` saves only x for the
    backward and recomputes the rest, exchanges included. ``config="auto"`` chooses backend, scheme and execution for
    each shape by advice, where they have their defaults; an ``Advice`` is taken as it is. ``layer.advice`` is the
    advice that the last call followed; it changes no value. The state dict holds ``q_proj``, ``k_proj``, ``v_proj``
    and ``out_proj``.

    Raises ValueError for sizes that do not fit, TypeError for unsupported arguments, as dropout or a mask.

    >>> from ringlab.patterns import Dilated
    >>> layer = MultiheadAttention(64, 8, Dilated([32, 64], [1, 2]), num_kv_heads=2, causal=True)
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        causal: bool = False,
        group=None,
        scheme: str = "auto",
        layout: str | ring.Layout = "contiguous",
        backend: str | tuple[str, ...] = "auto",
        execution: Execution = DEFAULT,
        use_gradient_checkpointing: bool = False,
        config: str | Advice | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **refused,
    ):
        super().__init__()
        check_unknown("MultiheadAttention", refused, REFUSED)
        embed_dim, num_heads = check_int("embed_dim", embed_dim, most=LARGEST), check_int("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads)
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern must be a ringlab pattern, got {type(pattern).__name__}")
        if embed_dim % num_heads or num_heads % num_kv_heads:
            wanted = "num_heads must divide embed_dim and num_kv_heads num_heads"
            raise ValueError(f"{wanted}, got {embed_dim}, {num_heads}, {num_kv_heads}")
        check_bool("causal", causal)
        for name, value in (("bias", bias), ("use_gradient_checkpointing", use_gradient_checkpointing)):
            if not isinstance(value, int | None):  # torch's modules take 0, 1 and None too
                check_bool(name, value)
        if dtype is not None:
            check_float_dtype(dtype)
        device = device if device is None else device_of(device)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.pattern, self.use_gradient_checkpointing = pattern, use_gradient_checkpointing
        self.auto = None if config is None else Auto(config)
        self.options = {"causal": causal, "group": group, "backend": backend, "execution": execution}
        if group is not None:
            self.options |= {"scheme": scheme, "layout": layout}
        else:
            check_one_device(scheme, layout)
        kv_dim, made = embed_dim // num_heads * num_kv_heads, {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **made)
        self.k_proj = nn.Linear(embed_dim, kv_dim, **made)
        self.v_proj = nn.Linear(embed_dim, kv_dim, **made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **made)

    def forward(self, x: Tensor, *, cu_seqlens=None, lengths=None, **refused) -> Tensor:
        """Attention of x (b, n, embed_dim) to itself; returns (b, n, embed_dim).

        ``cu_seqlens`` are the borders of packed documents, ``lengths`` those of a padded batch, as of ``attention``.
        """
        check_unknown("MultiheadAttention", refused, REFUSED)
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be (batch, seq, {self.embed_dim}), got shape {tuple(x.shape)}")
        if x.dtype != self.q_proj.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype}, the layer {self.q_proj.weight.dtype}: convert one, or use autocast")
        documents = {"cu_seqlens": cu_seqlens, "lengths": lengths}
        if self.use_gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._forward, x, documents, use_reentrant=False)
        return self._forward(x, documents)

    def _forward(self, x: Tensor, documents: dict) -> Tensor:
        projected = ((self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads))
        q, k, v = (proj(x).unflatten(-1, (heads, -1)) for proj, heads in projected)  # (b, n, h, d), (b, n, h_kv, d)
        options = self.options if self.auto is None else self.auto.fill(self.options, self.pattern, q, k)
        return self.out_proj(attention(q, k, v, self.pattern, **options, **documents).flatten(2))

    @property
    def advice(self) -> Advice | None:
        """The advice that the last call followed; None before, or without ``config``."""
        return self.auto and self.auto.advice

    def extra_repr(self) -> str:
        text = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, {self.pattern}, causal={self.options['causal']}"
        return text if self.auto is None else f"{text}, {self.auto}"
