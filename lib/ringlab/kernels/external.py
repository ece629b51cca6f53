"""Kernels of other packages: xformers, flash-attn 2, 3 and 4. Probed, never required."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from ..modes import refuse_recording
from .base import (
    HALF,
    capability,
    needs_bf16,
    needs_cuda,
    needs_head_dim,
    wants_dtype,
)
from .torch_kernels import OperatorKernel

NOT_INSTALLED = "is not installed"


def missing(module: str, package: str) -> str | None:
    """Why the module of an optional package cannot be used, or None."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{package} {NOT_INSTALLED} ({str(error).splitlines()[0]})"
    return None


def not_found(module: str, package: str) -> str | None:
    """As ``missing``, but only what the module is in is loaded, not the module."""
    try:
        found = importlib.util.find_spec(module)
    except ImportError:  # of what it is in
        found = None
    return f"{package} {NOT_INSTALLED}" if found is None else None


class Xformers(OperatorKernel):
    """``xformers.ops.fmha``, which picks a kernel by itself: for fp32 and on Pascal it
    is torch's own efficient one.
    """

    name = "xformers"

    def refuses(self, device, dtype, head_dim):
        why = (
            needs_cuda(device, (5, 0))
            or needs_bf16(device, dtype)
            or missing("xformers.ops.fmha", "xformers")
        )
        multiple = 4 if dtype == torch.float32 else 8
        if why is None and head_dim % multiple:
            return f"needs a head_dim that is a multiple of {multiple}, not {head_dim}"
        return why or wants_dtype(dtype, (torch.float32, *HALF))

    def _forward(self, q, k, v, causal, scale):
        from xformers.ops import fmha

        bias = fmha.attn_bias.LowerTriangularMask() if causal else None
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(
            q, k, v, bias, 0.0, scale
        )
        return out, lse[..., : q.shape[1]]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        from xformers.ops import fmha

        bias = fmha.attn_bias.LowerTriangularMask() if causal else None
        # Its kernels pad lse as each needs it, and read out by its strides or not.
        out = out.contiguous()
        return fmha.memory_efficient_attention_backward(
            dout, out, lse, q, k, v, bias, 0.0, scale
        )


class FlashAttn2(OperatorKernel):
    """The flash-attn package, version 2.7 or newer (github.com/Dao-AILab/flash-
    attention).
    """

    name = "flash_attn_2"

    def refuses(self, device, dtype, head_dim):
        why = needs_head_dim(head_dim, 256) or needs_cuda(device, (8, 0))
        return (
            why
            or missing("flash_attn.flash_attn_interface", "flash-attn")
            or wants_dtype(dtype, HALF)
        )

    def _forward(self, q, k, v, causal, scale):
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

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        from flash_attn.flash_attn_interface import _flash_attn_backward

        grads = dq, dk, dv = _dense_like(q, k, v)
        _flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
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
        return grads


class FlashAttn3(OperatorKernel):
    """FlashAttention-3's Hopper build, module ``flash_attn_interface``, of November 2025
    or newer.
    """

    name = "flash_attn_3"

    def refuses(self, device, dtype, head_dim):
        why = needs_head_dim(head_dim, 256) or needs_cuda(device, (9, 0), alone=True)
        return (
            why
            or missing("flash_attn_interface", "flash-attn 3")
            or wants_dtype(dtype, HALF)
        )

    def _forward(self, q, k, v, causal, scale):
        from flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(q, k, v, softmax_scale=scale, causal=causal)
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        from flash_attn_interface import _flash_attn_backward

        grads = dq, dk, dv = _dense_like(q, k, v)
        _flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=causal,
        )
        return grads


class FlashAttn4(OperatorKernel):
    """FlashAttention-4, module ``flash_attn.cute`` of the package flash-attn-4
    (4.0.0b36). The first call of a kind compiles for seconds.
    """

    name = "flash_attn_4"

    def refuses(self, device, dtype, head_dim):
        if why := needs_cuda(device, (9, 0)) or wants_dtype(dtype, HALF):
            return why
        # 9.x takes up to 256, 12.x up to 128; 10.x and 11.x that, and 256.
        either = 256 if head_dim == 256 else 128
        most = {9: 256, 12: 128}.get(capability(device)[0], either)
        # It takes seconds to load, and an early version may fail with any exception: the
        # probe loads it, and gives the reason.
        return needs_head_dim(head_dim, most) or not_found(
            "flash_attn.cute", "flash-attn-4"
        )

    def _forward(self, q, k, v, causal, scale):
        from flash_attn.cute.interface import _flash_attn_fwd

        refuse_recording("FlashAttention-4", "cudnn")
        with torch.cuda.device_of(q):
            out, lse, *_ = _flash_attn_fwd(
                q, k, v, softmax_scale=scale, causal=causal, return_lse=True
            )
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        from flash_attn.cute.interface import _flash_attn_bwd

        refuse_recording("FlashAttention-4", "cudnn")
        dq, dk, dv = _dense_like(q, k, v)
        how = {"softmax_scale": scale, "causal": causal, "dq": dq, "dk": dk, "dv": dv}
        with torch.cuda.device_of(q):
            return _flash_attn_bwd(q, k, v, out, dout, lse, **how)


def _dense_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised contiguous tensors, of expanded heads too."""
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors
    )
