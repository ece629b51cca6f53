"""torch's FlexAttention on a pattern's own mask, compiled: what a block-sparse pattern is compared with."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import patterns
from .contract import System, only
from .points import Point


def flex(point: Point, device) -> System:
    """FlexAttention (Dong et al. 2024, arXiv 2412.05496) on the blocks of a block-sparse pattern; forward alone.

    Compiled, and the mask built, before anything is timed; its tracked memory lacks what it holds inside. Raises
    NotImplementedError without a compiler.
    """
    only(point)
    pattern = patterns.from_dict(point.pattern)
    if not isinstance(pattern, patterns.BlockSparse):
        raise ValueError(f"flex computes block-sparse patterns, not {pattern}")
    if point.passes != "fwd":
        raise NotImplementedError("flex is measured forward alone: on a CPU it has no backward")
    if torch.device(device).type == "cpu" and shutil.which("g++") is None:
        raise NotImplementedError("FlexAttention on a CPU needs a C++ compiler, g++ is not there")
    # Loaded here: these bring the compiler with them.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, size = point.seq_len, pattern.block_size
    seen = pattern.blocks(n).to(device)

    def mask_mod(b, h, q, k):
        whole = seen[q // size, k // size]
        return whole & (k <= q) if point.causal else whole

    tile = size if torch.device(device).type == "cpu" else 128
    mask = create_block_mask(mask_mod, None, None, n, n, device=device, BLOCK_SIZE=tile)
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (b, h, n, d)
        # Under a memory tracker nothing would be compiled, and n x n scores formed: it sees the result alone.
        tracked = torch._C._len_torch_dispatch_stack() > 0
        with _disable_current_modes() if tracked else nullcontext():
            out = compiled(q, k, v, block_mask=mask, enable_gqa=point.heads != point.kv_heads)
        return (out.clone() if tracked else out).transpose(1, 2), None

    return System(point, device, forward)
