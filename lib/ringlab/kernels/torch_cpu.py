"""torch's flash kernel for the CPU, with its log-sum-exp and backward."""

from __future__ import annotations

import torch

from .base import HALF, to_bhmd, wants_dtype
from .eager import Eager

# The kernel takes 32-row query blocks for short rows; below this many, batched matrix products in cache-sized tiles
# are 1.1 to 1.2 times faster in fp32 and up to twice in bf16.
SHORT = 128
_MATMUL = Eager(tile_bytes=4 << 20)


class CpuFlash:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; segments of at most 128 rows go to tiled products."""

    name = "cpu_flash"

    def refuses(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"needs a CPU tensor, this is {device.type}"
        return wants_dtype(dtype, (torch.float64, torch.float32, *HALF))

    def forward(self, q, k, v, causal, scale):
        if q.shape[1] <= SHORT:
            return _MATMUL.forward(q, k, v, causal, scale)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(*to_bhmd(q, k, v), 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        if q.shape[1] <= SHORT:
            return _MATMUL.backward(dout, q, k, v, out, lse, causal, scale)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return to_bhmd(*op(*to_bhmd(dout, q, k, v, out), lse, 0.0, causal, scale=scale))
