"""Kernels of other packages: xformers, flash-attn 2 and flash-attn 3. Probed, never
required.
"""

from __future__ import annotations

import importlib

import torch
from torch.nn import functional as F

from .base import HALF, needs_bf16, needs_cuda, needs_head_dim, wants_dtype

NOT_INSTALLED = "is not installed"


def missing(module: str, package: str) -> str | None:
    """Why the module of an optional package cannot be used, or None."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{package} {NOT_INSTALLED} ({str(error).splitlines()[0]})"
    return None


class Xformers:
    """``xformers.ops.fmha``; on fp32 and on Pascal this is torch's own efficient kernel
    under another name.
    """

    name = "xformers"

    def refuses(self, device, dtype, head_dim):
        why = (
            needs_cuda(device, (5, 0))
            or needs_bf16(device, dtype)
            or missing("xformers.ops.fmha", "xformers")
        )
        return why or wants_dtype(dtype, (torch.float32, *HALF))

    def forward(self, q, k, v, causal, scale):
        from xformers.ops import fmha

        bias = fmha.attn_bias.LowerTriangularMask() if causal else None
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(
            q, k, v, bias, 0.0, scale
        )
        return out, lse[..., : q.shape[1]]

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        from xformers.ops import fmha

        padding = -lse.shape[-1] % 32
        lse = F.pad(lse, (0, padding), value=torch.inf)[..., : lse.shape[-1]]
        bias = fmha.attn_bias.LowerTriangularMask() if causal else None
        return fmha.memory_efficient_attention_backward(
            dout, out, lse, q, k, v, bias, 0.0, scale
        )


class FlashAttn2:
    """The flash-attn package, version 2.7 or newer
    (github.com/Dao-AILab/flash-attention).
    """

    name = "flash_attn_2"

    def refuses(self, device, dtype, head_dim):
        why = needs_head_dim(head_dim, 256) or needs_cuda(device, (8, 0))
        return (
            why
            or missing("flash_attn.flash_attn_interface", "flash-attn")
            or wants_dtype(dtype, HALF)
        )

    def forward(self, q, k, v, causal, scale):
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            q,
            k,
            v,
            0.0,
            scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out, lse

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        from flash_attn.flash_attn_interface import _flash_attn_backward

        dq, dk, dv = (
            torch.empty_like(t, memory_format=torch.contiguous_format)
            for t in (q, k, v)
        )
        _flash_attn_backward(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse.contiguous(),
            dq,
            dk,
            dv,
            0.0,
            scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv


class FlashAttn3:
    """FlashAttention-3's Hopper build, module ``flash_attn_interface``."""

    name = "flash_attn_3"

    def refuses(self, device, dtype, head_dim):
        why = needs_head_dim(head_dim, 256) or needs_cuda(device, (9, 0), alone=True)
        return (
            why
            or missing("flash_attn_interface", "flash-attn 3")
            or wants_dtype(dtype, HALF)
        )

    def forward(self, q, k, v, causal, scale):
        from flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(q, k, v, softmax_scale=scale, causal=causal)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        from flash_attn_interface import _flash_attn_backward

        dq, dk, dv = (
            torch.empty_like(t, memory_format=torch.contiguous_format)
            for t in (q, k, v)
        )
        _flash_attn_backward(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse.contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=causal,
        )
        return dq, dk, dv
