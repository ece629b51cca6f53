"""The kernels of torch: matrix products ("eager") and the operators behind
``scaled_dot_product_attention``.

The operators are called directly, because the public function returns no log-sum-exp.
All of them read strided views without a copy as long as the last dimension is
contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import (
    HALF,
    Kernel,
    accumulation_dtype,
    needs_bf16,
    needs_cuda,
    needs_head_dim,
    to_bhmd,
    wants_dtype,
)

_ATEN = torch.ops.aten


@dataclass(unsafe_hash=True)  # plans are kept by their kernel
class Eager(Kernel):
    """Scores, softmax, product, in fp32 or wider; runs everywhere, memory grows with
    m^2.

    With ``tile_bytes`` the batch is walked in pieces whose scores stay about that
    large, so they stay in cache. ``softcap``: scores are those of ``cap_``.
    """

    tile_bytes: int | None = None
    softcap: float | None = None
    name = "eager"
    takes_bias = takes_softcap = True

    def with_softcap(self, softcap: float) -> Eager:
        return replace(self, softcap=softcap)

    def _pieces(
        self,
        causal: bool,
        scale: float,
        bias: Tensor | None,
        q: Tensor,
        k: Tensor,
        *others: Tensor,
    ):
        """(batch entries, their masked scores (b', h, m, m_k), the derivative of scores
        in ``q k^T``, the tensors as (b', h, m, d)) of each piece.
        """
        (b, m, heads, _), m_k = q.shape, k.shape[1]
        step = (
            b if self.tile_bytes is None else self.tile_bytes // (4 * heads * m * m_k)
        )
        for i in range(0, b, max(1, step)):
            piece = slice(i, i + max(1, step))
            tensors = to_bhmd(
                *(t[piece].to(accumulation_dtype(q.dtype)) for t in (q, k, *others))
            )
            scores = torch.matmul(tensors[0], tensors[1].mT).mul_(scale)
            slope = scale
            if self.softcap is not None:
                # Not 1 - tanh^2, which is rounding where tanh is near 1.
                slope = scale * (scores / self.softcap).cosh_().pow_(-2)
                cap_(scores, self.softcap)
            if bias is not None:
                added = bias[piece].transpose(1, 2)  # (b', h, m or 1, m_k)
                scores.add_(added).masked_fill_(added == -torch.inf, -torch.inf)
            if causal:
                later = torch.ones(m, m_k, dtype=torch.bool, device=q.device)
                scores.masked_fill_(later.triu_(1), -torch.inf)
            yield piece, scores, slope, *tensors

    def forward(self, q, k, v, causal, scale, bias=None):
        b, m, h, d = q.shape
        out = torch.empty(
            q.shape, dtype=accumulation_dtype(q.dtype), device=q.device
        )  # (b, m, h, d)
        lse = torch.empty(b, h, m, dtype=out.dtype, device=q.device)
        pieces = self._pieces(causal, scale, bias, q, k, v)
        for piece, scores, _, _, _, v_t in pieces:
            top = scores.amax(-1)  # (b', h, m)
            prob = scores.softmax(-1)
            # The largest probability is exp(top - lse): the log-sum-exp without another
            # pass of exponentials.
            lse[piece] = top - prob.amax(-1).log_()
            out[piece] = torch.matmul(prob, v_t).transpose(1, 2)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, causal, scale, bias=None):
        grads = tuple(
            torch.empty(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v)
        )
        for piece, scores, slope, q_t, k_t, v_t, g, o in self._pieces(
            causal, scale, bias, q, k, v, dout, out
        ):
            prob = scores.sub_(
                lse[piece].unsqueeze(-1)
            ).exp_()  # (b', h, m, m_k), against the final lse
            delta = (g * o).sum(-1, keepdim=True)  # (b', h, m, 1)
            # A row that sees one key has gradient 0: sum as delta does, so that the
            # difference is 0 and not rounding.
            d_prob = (
                torch.matmul(g, v_t.mT)
                if k.shape[1] > 1
                else (g * v_t).sum(-1, keepdim=True)
            )
            d_scores = d_prob.sub_(delta).mul_(prob).mul_(slope)
            for grad, product in zip(
                grads, (d_scores @ k_t, d_scores.mT @ q_t, prob.mT @ g)
            ):
                grad[piece] = product.transpose(1, 2)
        return grads


def cap_(scores: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(scores / softcap)``, in place; None: the scores."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


# The kernel's backward in half precision takes up to three times as long as batched
# products for so few rows.
MAX_HALF_ROWS_BY_PRODUCTS = 128
# The gradients of few keys cancel: products sum in the same order and leave less.
MAX_KEYS_BY_PRODUCTS = 16
_MATMUL = Eager(tile_bytes=1 << 20)


@cache
def has_half_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies ``dtype`` natively; without, torch's backward in it
    takes ten times fp32's.
    """
    units = ("avx512_bf16", "amx_tile") if dtype == torch.bfloat16 else ("amx_fp16",)
    return any(map(torch.cpu.get_capabilities().get, units))


_CPU_FORWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlash(Kernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; backwards of few rows are
    tiled products.

    Half precision that the CPU does not multiply natively is computed, and returned, in
    fp32.
    """

    name = "cpu_flash"

    def refuses(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"needs a CPU tensor, this is {device.type}"
        return wants_dtype(dtype, (torch.float64, torch.float32, *HALF))

    def forward(self, q, k, v, causal, scale):
        tensors = to_bhmd(*_cpu_inputs(q, k, v))
        out, lse = _CPU_FORWARD(*tensors, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        few = k.shape[1] <= MAX_KEYS_BY_PRODUCTS
        short = max(q.shape[1], k.shape[1]) <= MAX_HALF_ROWS_BY_PRODUCTS
        if few or (q.dtype in HALF and short):
            return _MATMUL.backward(dout, q, k, v, out, lse, causal, scale)
        q, k, v = _cpu_inputs(q, k, v)
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        tensors = *to_bhmd(dout, q, k, v, out), lse
        return to_bhmd(*_CPU_BACKWARD(*tensors, 0.0, causal, scale=scale))


def _cpu_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype that the operator computes in."""
    if tensors[0].dtype in HALF and not has_half_units(tensors[0].dtype):
        return tuple(t.float() for t in tensors)
    return tensors


BY_PRODUCTS = Eager()  # for a GPU: calls that need no kernel


class OperatorKernel(Kernel):
    """A kernel for GPUs that calls an operator of torch or of another package.

    The engine hands over strided views, an fp32 ``out``, ``lse`` of any strides, and
    calls of a single key. Operators read memory as they expect it to lie, whatever the
    strides and dtypes say, or refuse. Here is what all of them need; subclasses have
    ``_forward`` and ``_backward``.

    ``max_head_dim``; ``oldest``: the compute capability from which on it runs, or the
    only one if ``alone``.
    """

    max_head_dim = 256
    oldest = (8, 0)
    alone = False

    def refuses(self, device, dtype, head_dim):
        return (
            needs_head_dim(head_dim, self.max_head_dim)
            or needs_cuda(device, self.oldest, self.alone)
            or wants_dtype(dtype, HALF)
        )

    def forward(self, q, k, v, causal, scale):
        if _needs_no_kernel(q, k):
            return BY_PRODUCTS.forward(q, k, v, causal, scale)
        return self._forward(*map(aligned, (q, k, v)), causal, scale)

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        if _needs_no_kernel(q, k):
            return BY_PRODUCTS.backward(dout, q, k, v, out, lse, causal, scale)
        reads = map(aligned, (dout.to(q.dtype), q, k, v, out.to(q.dtype)))
        return self._backward(*reads, lse.contiguous(), causal, scale)


def _needs_no_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether there is one key, whose values are the result, or no query."""
    return k.shape[1] == 1 or not q.numel()


ALIGNED = 16  # bytes that a kernel loads at once


def aligned(t: Tensor) -> Tensor:
    """A tensor whose rows begin at multiples of 16 bytes: a copy where they do not."""
    steps = [s for s, size in zip(t.stride(), t.shape[:-1]) if size > 1]
    if t.is_meta or not any(
        x % ALIGNED for x in (t.data_ptr(), *(s * t.element_size() for s in steps))
    ):
        return t
    return t.clone(memory_format=torch.contiguous_format)


class Flash(OperatorKernel):
    """``aten::_scaled_dot_product_flash_attention`` (FlashAttention-2 as built into
    torch).
    """

    name = "flash"

    def _forward(self, q, k, v, causal, scale):
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
            *to_bhmd(q, k, v), 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse[..., : q.shape[1]]

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        m = q.shape[1]
        n = k.shape[1]
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            *to_bhmd(dout, q, k, v, out),
            lse,
            None,
            None,
            m,
            n,
            0.0,
            causal,
            state,
            state,
            scale=scale,
        )
        return to_bhmd(*grads)


class Efficient(OperatorKernel):
    """``aten::_scaled_dot_product_efficient_attention`` (CUTLASS), the one fused kernel
    for fp32 and for Pascal.
    """

    name = "efficient"

    def refuses(self, device, dtype, head_dim):
        why = needs_cuda(device, (5, 0)) or needs_bf16(device, dtype)
        multiple = 4 if dtype == torch.float32 else 8
        if why is None and head_dim % multiple:
            return f"needs a head_dim that is a multiple of {multiple}, not {head_dim}"
        return why or wants_dtype(dtype, (torch.float32, *HALF))

    def _forward(self, q, k, v, causal, scale):
        out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
            *to_bhmd(q, k, v), None, True, 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse[..., : q.shape[1]]  # padded to 32 rows

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        # Read in whole 32 rows, of which the strides over heads must be multiples of 8.
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        # In half precision the kernel takes the rows of ``out`` to lie heads * head_dim
        # apart; in fp32 torch reads them by their strides.
        out = out.contiguous() if q.dtype in HALF else out
        # Of random numbers, which dropout 0 never reads.
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = _ATEN._scaled_dot_product_efficient_attention_backward(
            *to_bhmd(dout, q, k, v),
            None,
            out.transpose(1, 2),
            lse,
            state,
            state,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return to_bhmd(*grads[:3])


class CuDNN(OperatorKernel):
    """``aten::_scaled_dot_product_cudnn_attention``, the fastest of torch's kernels on
    Hopper and newer.
    """

    name = "cudnn"
    max_head_dim = 128

    def _forward(self, q, k, v, causal, scale):
        op = _ATEN._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(
            *to_bhmd(q, k, v), None, True, 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse.reshape(lse.shape[:3])

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        # cuDNN's backward graphs are cached by the strides of q, k and v alone, while
        # those of out, dout and lse are baked in: always hand them over dense.
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        dense = [t.contiguous().transpose(1, 2) for t in (dout, out)]
        grads = _ATEN._scaled_dot_product_cudnn_attention_backward(
            dense[0],
            *to_bhmd(q, k, v),
            dense[1],
            lse.unsqueeze(-1),
            state,
            state,
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            scale=scale,
        )
        return to_bhmd(*grads)
