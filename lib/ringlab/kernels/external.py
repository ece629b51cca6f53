"""Kernels of other packages: xformers, flash-attn 2, 3 and 4. Probed, never required."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging

import torch
from torch import Tensor

from .. import cache as caches
from ..block_patterns import BlockSparse, Window
from ..patterns import Dense
from ..torch_private import refuse_recording
from .base import HALF, capability, needs_cuda, needs_head_dim, wants_dtype
from .torch_kernels import Efficient, OperatorKernel

NOT_INSTALLED = "is not installed"


def missing(module: str, package: str) -> str | None:
    """Why the module of an optional package cannot be used, or None. Nothing is printed:
    xformers warns of an extension that it cannot load, its probe raises then.
    """
    logger = logging.getLogger("xformers")
    before = logger.disabled
    logger.disabled = True
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{package} {NOT_INSTALLED} ({str(error).splitlines()[0]})"
    finally:
        logger.disabled = before
    return None


def not_installed(package: str) -> str | None:
    """As ``missing``, by what is installed: nothing is loaded."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} {NOT_INSTALLED}"
    return None


class _FromPackage(OperatorKernel):
    """A kernel of another package: ``source`` is its module and the package."""

    def refuses(self, device, dtype, head_dim):
        why = super().refuses(device, dtype, head_dim)
        return why or missing(*self.source)


class Xformers(_FromPackage, Efficient):
    """``xformers.ops.fmha``, which picks a kernel by itself: for fp32 and on Pascal it
    is torch's own efficient one.
    """

    name = "xformers"
    source = "xformers.ops.fmha", "xformers"

    def _forward(self, q, k, v, causal, scale):
        from xformers.ops import fmha

        if not fmha.common._built_with_cuda:
            raise ImportError("this release of xformers was built for another torch")
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


NO_MASK = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


class FlashAttn2(_FromPackage):
    """The flash-attn package, version 2.7 or newer (github.com/Dao-AILab/flash-
    attention).
    """

    name = "flash_attn_2"
    source = "flash_attn.flash_attn_interface", "flash-attn"

    def _forward(self, q, k, v, causal, scale):
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            q,
            k,
            v,
            0.0,
            scale,
            causal=causal,
            **NO_MASK,
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
            **NO_MASK,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


class FlashAttn3(_FromPackage):
    """FlashAttention-3's Hopper build, module ``flash_attn_interface``, of November 2025
    or newer.
    """

    name = "flash_attn_3"
    oldest = (9, 0)
    alone = True
    source = "flash_attn_interface", "flash-attn 3"

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
        # probe loads it, and gives the reason. flash-attn 2 may hold an older copy.
        return needs_head_dim(head_dim, most) or not_installed("flash-attn-4")

    def _forward(self, q, k, v, causal, scale, **options):
        from flash_attn.cute.interface import _flash_attn_fwd

        refuse_recording("FlashAttention-4", "cudnn")
        options |= {"softmax_scale": scale, "causal": causal, "return_lse": True}
        with torch.cuda.device_of(q):
            out, lse, *_ = _flash_attn_fwd(q, k, v, **options)
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, causal, scale, **options):
        from flash_attn.cute.interface import _flash_attn_bwd

        refuse_recording("FlashAttention-4", "cudnn")
        dq, dk, dv = _dense_like(q, k, v)
        with torch.cuda.device_of(q):
            return _flash_attn_bwd(
                q,
                k,
                v,
                out,
                dout,
                lse,
                softmax_scale=scale,
                causal=causal,
                dq=dq,
                dk=dk,
                dv=dv,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                **options,
            )


BLOCK = 128  # rows of a tile of FlashAttention-4, which takes lists of whole tiles


class FlashAttn4Blocks(FlashAttn4):
    """FlashAttention-4 by lists of blocks: block-sparse patterns of blocks of 128, and
    dense ones, in one launch a pass, on compute capability 9.0.
    """

    name = "flash_attn_4_blocks"
    whole_patterns = True

    def refuses(self, device, dtype, head_dim):
        return (
            needs_cuda(device, (9, 0), alone=True)
            or needs_head_dim(head_dim, 128)  # wider tiles are shorter
            or super().refuses(device, dtype, head_dim)
        )

    def attend(
        self, q, k, v, pattern, causal: bool, scale: float, cached=caches.GLOBAL.get
    ):
        """out (b, n, h, d) in q's dtype and lse (b, h, n) in fp32; k and v (b, n, h_kv,
        d). Raises NotImplementedError for other patterns.
        """
        lists = _block_lists(q, pattern, causal, False, cached)
        # Packed heads would be tiles of other rows.
        options = {"block_sparse_tensors": lists, "pack_gqa": False}
        return self._forward(q, k, v, causal, scale, **options)

    def gradients(
        self,
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        pattern,
        causal: bool,
        scale: float,
        cached=caches.GLOBAL.get,
    ):
        """dq, dk, dv for the cotangents ``dout`` and ``dlse`` (b, h, n) or None, with
        the final out and lse.
        """
        if torch.are_deterministic_algorithms_enabled():
            raise NotImplementedError(
                "flash_attn_4_blocks sums dq in any order; use backend='triton'"
            )
        lists = _block_lists(q, pattern, causal, True, cached)
        dout, out = (t.to(q.dtype) for t in (dout, out))
        options = {"block_sparse_tensors": lists, "dlse": dlse}
        return self._backward(dout, q, k, v, out, lse, causal, scale, **options)


def _block_lists(q: Tensor, pattern, causal: bool, by_key: bool, cached):
    """The cached lists of blocks of a pattern for a pass: of each block of queries those
    of keys that it sees, ascending; ``by_key``, of each of keys those of queries.
    """
    n = q.shape[1]
    if isinstance(pattern, Dense):
        pattern = BlockSparse([Window(n)], BLOCK)
    if not isinstance(pattern, BlockSparse) or pattern.block_size != BLOCK:
        raise NotImplementedError(
            f"flash_attn_4_blocks runs patterns of blocks of {BLOCK}, not {pattern}"
        )

    def build():
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        pairs = torch.stack(pattern.seen(n))  # (2, pairs)
        if causal:  # the kernel masks what is left of a block on the diagonal
            pairs = pairs[:, pairs[1] <= pairs[0]]
        if by_key:
            pairs = pairs.flip(0)[:, pairs[1].argsort(stable=True)]
        rows, cols = pairs
        counts = rows.bincount(minlength=pattern.count(n))
        place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        index = torch.zeros(len(counts), max(1, int(counts.max())), dtype=torch.int32)
        index[rows, place] = cols.int()
        counts, index = (t.to(q.device)[None, None] for t in (counts.int(), index))
        # (1, 1, blocks) and (1, 1, blocks, most): of every entry and head. None of them
        # has a mask of its own.
        return BlockSparseTensorsTorch(
            torch.zeros_like(counts), index, counts, index, block_size=(BLOCK, BLOCK)
        )

    key = "blocks of flash_attn_4", pattern, n, causal, by_key, q.device
    return cached(key, build)


def _dense_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised contiguous tensors, of expanded heads too."""
    dense = torch.contiguous_format
    return tuple(torch.empty_like(t, memory_format=dense) for t in tensors)
