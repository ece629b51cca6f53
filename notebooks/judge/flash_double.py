"""Imported, this puts the doubles of flash-attn 2 and of torch's own flash attention on a
GPU in place for the whole process, and the version for those who ask.
"""

import importlib.metadata
from types import SimpleNamespace

import package_doubles
import torch

look_up = importlib.metadata.version


def version(name: str) -> str:
    return "2.8.3" if name in ("flash_attn", "flash-attn") else look_up(name)


installed = package_doubles.installed((8, 0), ("flash_attn",))
installed.__enter__()
importlib.metadata.version = version


def sdp_forward(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    """aten::_scaled_dot_product_flash_attention of a GPU, of (b, h, n, d)."""
    a = SimpleNamespace(is_causal=is_causal, softmax_scale=scale)
    a.q, a.k, a.v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, empty, _ = package_doubles.forward(a, False)
    seed = torch.zeros((), dtype=torch.int64)
    sizes = q.shape[2], k.shape[2]
    return out.transpose(1, 2), lse, None, None, *sizes, seed, seed.clone(), empty


def sdp_backward(dout, q, k, v, out, lse, *rest, scale=None):
    """aten::_scaled_dot_product_flash_attention_backward of a GPU, which makes dout and
    out contiguous.
    """
    a = SimpleNamespace(is_causal=rest[5], softmax_scale=scale, deterministic=False)
    a.q, a.k, a.v, a.out, a.dout = (t.transpose(1, 2) for t in (q, k, v, out, dout))
    a.out, a.dout = a.out.contiguous(), a.dout.contiguous()
    a.softmax_lse, a.dq, a.dk, a.dv = lse, None, None, None
    grads = package_doubles.backward(a, False)[1:]
    return tuple(grad.transpose(1, 2) for grad in grads)


library = torch.library.Library("aten", "IMPL")
library.impl("_scaled_dot_product_flash_attention", sdp_forward, "CPU")
library.impl("_scaled_dot_product_flash_attention_backward", sdp_backward, "CPU")
