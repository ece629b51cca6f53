"""torch's flash kernel for the CPU, with its log-sum-exp and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import HALF, to_bhmd, wants_dtype
from .eager import Eager, hidden_keys

# The kernel's backward in half precision takes up to three times as long as batched products for so few rows.
SHORT = 128
FEW = 16  # keys, whose gradients cancel: the products sum in the same order and leave less
_MATMUL = Eager(tile_bytes=1 << 20)


def has_half_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies ``dtype`` natively; without, torch's backward in it takes ten times fp32's."""
    bf16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    flags = bf16 if dtype == torch.bfloat16 else ("_is_amx_fp16_supported",)
    return any(getattr(torch.cpu, flag, bool)() for flag in flags)


def _computable(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = tensors[0].dtype
    return tuple(t.float() for t in tensors) if dtype in HALF and not has_half_units(dtype) else tensors


class CpuFlash:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; backwards of few rows are tiled products.

    Half precision that the CPU does not multiply natively is computed, and returned, in fp32.
    """

    name = "cpu_flash"
    lower_right = True

    def refuses(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"needs a CPU tensor, this is {device.type}"
        return wants_dtype(dtype, (torch.float64, torch.float32, *HALF))

    def forward(self, q, k, v, causal, scale):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = _computable(q, k, v)
        square, mask = _mask(q, k, causal)
        out, lse = op(*to_bhmd(q, k, v), 0.0, square, attn_mask=mask, scale=scale)
        if mask is not None and not _finite(lse):
            return _MATMUL.forward(q, k, v, causal, scale)
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        if k.shape[1] <= FEW or (q.dtype in HALF and max(q.shape[1], k.shape[1]) <= SHORT):
            return _MATMUL.backward(dout, q, k, v, out, lse, causal, scale)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dout, q, k, v, out = _computable(dout, q, k, v, out)
        square, mask = _mask(q, k, causal)
        dq, dk, dv = op(*to_bhmd(dout, q, k, v, out), lse, 0.0, square, attn_mask=mask, scale=scale)
        if mask is not None and not _finite(dv.sum()):
            return _MATMUL.backward(dout, q, k, v, out, lse, causal, scale)
        return to_bhmd(dq, dk, dv)


def _mask(q: Tensor, k: Tensor, causal: bool) -> tuple[bool, Tensor | None]:
    """(whether the kernel's own causal mask does, or else the mask (1, 1, m, m_k) to add)."""
    m, m_k = q.shape[1], k.shape[1]
    if not causal or m == m_k:  # the kernel's own mask begins in the upper left corner
        return causal, None
    mask = torch.zeros(m, m_k, dtype=q.dtype).masked_fill_(hidden_keys(m, m_k, q.device), -torch.inf)
    return False, mask[None, None]


def _finite(t: Tensor) -> bool:
    """Whether a masked result is free of NaN: an infinite score and the -inf that hides it make one, in rows that must
    not see that key. A run without data (meta) takes it for granted.
    """
    found = t.isfinite().all()
    return found.is_meta or bool(found)
