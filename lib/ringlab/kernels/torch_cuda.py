"""torch's CUDA kernels behind ``scaled_dot_product_attention``: cuDNN, flash and memory-efficient, by their own ops.

All three read strided views without a copy as long as the last dimension is contiguous.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .base import HALF, needs_bf16, needs_cuda, to_bhmd, wants_dtype

_ATEN = torch.ops.aten


def _no_state(device):
    """The random state that the backward ops ask for; dropout is 0, so it is never read."""
    return torch.zeros((), dtype=torch.int64, device=device)


class Flash:
    """``aten::_scaled_dot_product_flash_attention`` (FlashAttention-2 as built into torch)."""

    name = "flash"

    def refuses(self, device, dtype, head_dim):
        if head_dim > 256 or head_dim % 8:
            return f"needs a head_dim that is a multiple of 8 and at most 256, not {head_dim}"
        return needs_cuda(device, (8, 0)) or wants_dtype(dtype, HALF)

    def forward(self, q, k, v, causal, scale):
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(*to_bhmd(q, k, v), 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse[..., : q.shape[1]]

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        m, state = q.shape[1], torch.zeros(2, dtype=torch.uint64, device=q.device)
        # This op reads the log-sum-exp by pointer, without its strides.
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            *to_bhmd(dout, q, k, v, out), lse.contiguous(), None, None, m, m, 0.0, causal, state, state, scale=scale
        )
        return to_bhmd(*grads)


class Efficient:
    """``aten::_scaled_dot_product_efficient_attention`` (CUTLASS), the one fused kernel for fp32 and for Pascal."""

    name = "efficient"

    def refuses(self, device, dtype, head_dim):
        why = needs_cuda(device, (5, 0)) or needs_bf16(device, dtype)
        aligned = 4 if dtype == torch.float32 else 8
        if why is None and head_dim % aligned:
            return f"needs a head_dim that is a multiple of {aligned}, not {head_dim}"
        return why or wants_dtype(dtype, (torch.float32, *HALF))

    def forward(self, q, k, v, causal, scale):
        op = _ATEN._scaled_dot_product_efficient_attention
        out, lse, *_ = op(*to_bhmd(q, k, v), None, True, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse[..., : q.shape[1]]  # the kernel pads its rows to 32

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        padding = -lse.shape[-1] % 32
        lse = F.pad(lse, (0, padding), value=torch.inf)[..., : lse.shape[-1]]  # keeps the padded row stride
        state = _no_state(q.device)
        grads = _ATEN._scaled_dot_product_efficient_attention_backward(
            *to_bhmd(dout, q, k, v), None, out.transpose(1, 2), lse, state, state, 0.0, [True, True, True, False],
            causal, scale=scale,
        )  # fmt: skip
        return to_bhmd(*grads[:3])


class CuDNN:
    """``aten::_scaled_dot_product_cudnn_attention``, the fastest of torch's kernels on Hopper and newer."""

    name = "cudnn"

    def refuses(self, device, dtype, head_dim):
        if head_dim > 128 or head_dim % 8:
            return f"needs a head_dim that is a multiple of 8 and at most 128, not {head_dim}"
        return needs_cuda(device, (8, 0)) or wants_dtype(dtype, HALF)

    def forward(self, q, k, v, causal, scale):
        op = _ATEN._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(*to_bhmd(q, k, v), None, True, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.reshape(lse.shape[:3])

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        # cuDNN's backward graphs are cached by the strides of q, k and v alone, while those of out, dout and lse are
        # baked in: always hand them over dense.
        m, state = q.shape[1], _no_state(q.device)
        dense = [t.contiguous().transpose(1, 2) for t in (dout, out)]
        grads = _ATEN._scaled_dot_product_cudnn_attention_backward(
            dense[0], *to_bhmd(q, k, v), dense[1], lse.contiguous().unsqueeze(-1), state, state, None, None, None,
            m, m, 0.0, causal, scale=scale,
        )  # fmt: skip
        return to_bhmd(*grads)
