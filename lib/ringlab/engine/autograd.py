"""Attention on one device: the autograd rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import triton
from ..patterns import Pattern
from . import Execution, pattern_kernel, plain, run

IN_GRAPHS = triton.IN_GRAPHS


def local_attention(q, k, v, pattern: Pattern, *, causal: bool, scale: float, backend: str, execution: Execution):
    """out (b, n, h, d), lse (b, h, n) for checked arguments; differentiable once, in q, k, v, through out and lse."""
    if backend == "triton" and IN_GRAPHS and torch.compiler.is_compiling() and plain(execution):
        flip, positive = positive_scale(scale)
        return triton.attend(flip(q), k, v, pattern, causal, positive)
    return outside_graphs(_attend)(q, k, v, pattern, causal, scale, backend, execution)  # plans are lists


def outside_graphs(call):
    """``call`` as torch.compile makes it but may not trace it; itself elsewhere, for this loads the compiler."""
    return torch.compiler.disable(call) if torch.compiler.is_compiling() else call


def _attend(q, k, v, *rest):
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _Attention.apply(q, k, v, *rest)


class Once(torch.autograd.Function):
    """What both passes refuse: torch's transforms other than one reverse-mode derivative."""

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError("attention does not support torch.func.vmap or batched gradients; use the batch axis")

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("attention does not support forward-mode derivatives (torch.func.jvp); use backward")


class FirstDerivative(Once):
    """A backward as a node of its own, so that every way to a second derivative ends here and none is silently zero."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *second):
        raise NotImplementedError("attention is differentiable once: double backward is not supported")


class _Attention(Once):
    @staticmethod
    def forward(q, k, v, pattern, causal, scale, backend, execution):
        flip, positive = positive_scale(scale)
        if whole := pattern_kernel(q, causal, any(t.requires_grad for t in (q, k, v)), backend, execution):
            with torch.autocast(q.device.type, enabled=False):
                return whole.attend(flip(q), k, v, pattern, causal, positive, execution.cached)
        return run("forward", (flip(q), k, v), pattern, causal, positive, backend, execution)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *ctx.rest = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, out, lse = ctx.saved_tensors  # once: checkpointing recomputes them as they are read
        dout = torch.zeros_like(out) if dout is None else dout
        return *_Gradients.apply(dout, dlse, q, k, v, out, lse, *ctx.rest), None, None, None, None, None


class _Gradients(FirstDerivative):
    """dq, dk, dv."""

    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, pattern, causal, scale, backend, execution):
        flip, positive = positive_scale(scale)
        tensors = (dout, flip(q), k, v, out, lse)
        if whole := pattern_kernel(q, causal, True, backend, execution):
            with torch.autocast(q.device.type, enabled=False):
                rest = (*tensors[1:], pattern, causal, positive, execution.cached)
                dq, dk, dv = whole.gradients(dout, dlse, *rest)
            return flip(dq), dk, dv
        d = q.shape[3]
        if dlse is not None:
            tensors = fold_lse_gradient(*tensors, dlse)
        tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors[:-1]] + [tensors[-1]]
        dq, dk, dv = (g[..., :d] for g in run("backward", tensors, pattern, causal, positive, backend, execution))
        return flip(dq), dk, dv


def positive_scale(scale: float):
    """Fused kernels find the maximum before they scale, which is wrong for scale <= 0: give q the sign instead."""
    if scale > 0:
        return (lambda t: t), scale
    if scale < 0:
        return torch.neg, -scale
    return torch.zeros_like, 1.0


def fold_lse_gradient(dout, q, k, v, out, lse, dlse: Tensor):
    """Widen the head so that a flash backward, which knows no lse cotangent g, computes ``rowsum(dO * O) - g``.

    Two more columns of O hold -g, its rounded value and the rest, those of dO hold 1; v, q and k get zeros, so no score
    and no ``dO v^T`` changes. Padded to 8 columns, which every kernel's alignment allows.
    """
    g = -dlse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    dead = lse.transpose(1, 2).unsqueeze(-1) == -torch.inf
    g = g.masked_fill(dead, 0.0)
    high = g.to(out.dtype)
    low = (g - high.to(g.dtype)).to(out.dtype)
    zeros = out.new_zeros(*out.shape[:3], 6)
    ones = torch.ones_like(high)
    wide_q, wide_k, wide_v = (F.pad(t, (0, 8)) for t in (q, k, v))
    return torch.cat([dout, ones, ones, zeros], -1), wide_q, wide_k, wide_v, torch.cat([out, high, low, zeros], -1), lse
