"""Attention on one device: which path runs, its autograd rule, and the operator that
compiled graphs call.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from .. import kernels
from ..block_patterns import BlockSparse
from ..kernels.base import accumulation_dtype, device_type_of
from ..patterns import Pattern, from_dict
from . import Execution, blocks, dilated, execute, folding, gather
from .documents import Documents

# ``_text`` is a constant of the compiled graph. torch.compiler.assume_constant_result
# sets the same attribute but loads the compiler with this module. With other versions
# of torch, attention is called outside of the graph.
IN_GRAPHS = (2, 13) <= torch.__version__ < (2, 14)


def local_attention(
    q,
    k,
    v,
    pattern: Pattern,
    *,
    causal: bool,
    scale: float,
    backend: str,
    execution: Execution,
    documents: Documents | None = None,
):
    """out (b, n, h, d), lse (b, h, n) for checked arguments; differentiable once, in q,
    k, v, through out and lse.
    """
    if documents is None and torch.compiler.is_compiling() and execution.plain:
        if (IN_GRAPHS or torch.compiler.is_exporting()) and not _transformed():
            return operator(
                q, k, v, _text(pattern, backend), causal, scale, is_followed(q, k, v)
            )
    q, k, v = _rows_dense(q, k, v)
    call = _Attention.apply if is_followed(q, k, v) else forward
    return outside_graphs(call)(
        q, k, v, pattern, causal, scale, backend, execution, documents
    )  # plans are lists


in_transform = getattr(
    torch._C, "_are_functorch_transforms_active", None
)  # None: another version of torch


def _transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is active, or may
    be.
    """
    level = getattr(
        forward_ad, "_current_level", 0
    )  # -1 outside of forward-mode derivatives
    return in_transform is None or in_transform() or level >= 0


def is_followed(*tensors: Tensor | None) -> bool:
    """Whether autograd or a transform must see the call; a plain function is faster."""
    return _transformed() or (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
    )


def outside_graphs(call):
    """``call`` as torch.compile may call it but not trace it; unchanged elsewhere,
    since this loads the compiler.
    """
    return torch.compiler.disable(call) if torch.compiler.is_compiling() else call


def without_autocast(t: Tensor):
    """A context in which operators keep the dtype of their inputs: it is the one that
    the caller asked for.
    """
    kind = device_type_of(t)
    return (
        torch.autocast(kind, enabled=False)
        if torch.is_autocast_enabled(kind)
        else nullcontext()
    )


def forward(
    q,
    k,
    v,
    pattern: Pattern,
    causal: bool,
    scale: float,
    backend,
    execution: Execution,
    documents=None,
):
    """out (b, n, h, d), lse (b, h, n)."""
    if documents is not None:
        return documents.forward(
            q,
            k,
            v,
            lambda *some: forward(*some, pattern, causal, scale, backend, execution),
        )
    flip, scale = positive_scale(scale)
    kernel = _kernel_for(
        q, causal, q.requires_grad or k.requires_grad or v.requires_grad, backend
    )
    q = flip(q)
    with without_autocast(q):
        alike = q.shape[1] == k.shape[1]  # not in cross-attention
        if (
            alike and execution.plain and hasattr(kernel, "attend")
        ):  # a kernel of whole patterns
            return kernel.attend(q, k, v, pattern, causal, scale, execution.cached)
        kernel = execution.tiled(kernel)
        if alike and execution.merge == "fused":
            plan, fused_merge = _fused(q, k, pattern, execution)
            return fused_merge.forward(
                q, k, v, plan, pattern, causal, scale, kernel, execution.cached
            )
        if isinstance(pattern, BlockSparse):
            return blocks.forward(
                q,
                k,
                v,
                pattern,
                causal,
                scale,
                kernel,
                execution,
                execution.results_of(q),
            )
        if alike and execution.gather:
            index = _gather_index(q, k, pattern, execution)
            return gather.forward(
                q, k, v, index, causal, scale, kernel, execution.scratch()
            )
        plan = _plan_for(q, k, pattern, causal, kernel, execution, backward=False)
        lent = {"pool": execution.scratch(), "results": execution.results_of(q)}
        return execute.forward(q, k, v, plan, causal, scale, kernel, **lent)


def backward(
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    pattern: Pattern,
    causal: bool,
    scale: float,
    backend,
    execution,
    documents=None,
):
    """dq, dk, dv for cotangents of out and, if not None, of lse."""
    if documents is not None:
        given = dout, dlse, q, k, v, out, lse
        return documents.backward(
            *given,
            lambda *some: backward(*some, pattern, causal, scale, backend, execution),
        )
    flip, scale = positive_scale(scale)
    q = flip(q)
    kernel = _kernel_for(q, causal, True, backend)
    with without_autocast(q):
        alike = q.shape[1] == k.shape[1]
        if alike and execution.plain and hasattr(kernel, "gradients"):
            dq, dk, dv = kernel.gradients(
                dout, dlse, q, k, v, out, lse, pattern, causal, scale, execution.cached
            )
            return flip(dq), dk, dv
        kernel, d, tensors = (
            execution.tiled(kernel),
            q.shape[3],
            fold_lse_gradient(dout, q, k, v, out, lse, dlse),
        )
        tensors = [*_rows_dense(*tensors[:5]), lse]
        _, q, k, *_ = tensors
        if alike and execution.merge == "fused":
            plan, fused_merge = _fused(q, k, pattern, execution)
            grads = fused_merge.backward(
                *tensors, plan, pattern, causal, scale, kernel, execution.cached
            )
        elif isinstance(pattern, BlockSparse):
            grads = blocks.backward(*tensors, pattern, causal, scale, kernel, execution)
        elif alike and execution.gather:
            index = _gather_index(q, k, pattern, execution)
            grads = gather.backward(
                *tensors, index, causal, scale, kernel, execution.scratch()
            )
        else:
            plan = _plan_for(q, k, pattern, causal, kernel, execution, backward=True)
            into = (
                None
                if alike
                else [
                    torch.zeros(t.shape, dtype=lse.dtype, device=t.device)
                    for t in tensors[1:4]
                ]
            )
            grads = execute.backward(
                *tensors,
                plan,
                causal,
                scale,
                kernel,
                into=into,
                pool=execution.scratch(),
            )
            grads = grads if alike else tuple(grad.to(q.dtype) for grad in grads)
    dq, dk, dv = grads if dlse is None else (g[..., :d] for g in grads)
    return flip(dq), dk, dv


def _kernel_for(
    q: Tensor, causal: bool, needs_backward: bool, backend
) -> kernels.Kernel:
    return kernels.choose(
        q.device,
        q.dtype,
        q.shape[3],
        causal=causal,
        backward=needs_backward,
        backend=backend,
    ).kernel


def _plan_for(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    causal: bool,
    kernel,
    execution: Execution,
    *,
    backward: bool,
):
    if execution.merge == "eager":
        return dilated.plan_for(q, k, pattern, execution.cached, backward=backward)
    return folding.plan_for(
        q, k, pattern, causal, kernel, execution.cached, backward=backward
    )


def _fused(q: Tensor, k: Tensor, pattern: Pattern, execution: Execution):
    """The plan, and the experimental kernel that merges its results;
    NotImplementedError where it cannot run.
    """
    from ..kernels import fused_merge

    if not q.is_meta:  # a run without data is of hardware that need not be here
        fused_merge.check(q.device, q.dtype, pattern)
    given = pattern, q.shape[1], q.shape[2], k.shape[2]
    return execution.cached(
        ("plan", *given), lambda: dilated.make_plan(*given)
    ), fused_merge


def _gather_index(q: Tensor, k: Tensor, pattern: Pattern, execution: Execution):
    given = pattern, q.shape[1], q.shape[2], k.shape[2], q.device
    return execution.cached(("gather", *given), lambda: gather.gather_indices(*given))


class NoVmap(torch.autograd.Function):
    """Refuses torch's transforms other than one reverse-mode derivative."""

    @classmethod
    def apply(cls, *args):
        """As torch's, which outside of transforms spends longer than a small call on
        looking for default arguments.
        """
        return (
            super().apply(*args)
            if in_transform is None or in_transform()
            else super(torch.autograd.Function, cls).apply(*args)
        )

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(
            "attention does not support torch.func.vmap or batched gradients; use the batch axis"
        )

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "attention does not support forward-mode derivatives (torch.func.jvp); use backward"
        )


def differentiable_once(forward, backward, count: int) -> type[torch.autograd.Function]:
    """The autograd function of ``out, lse = forward(*tensors, *rest)`` for ``count``
    tensors.

    ``backward(dout, dlse, *tensors, out, lse, *rest)`` gives the gradients of the first
    tensors; dlse may be None.
    """

    class Gradients(NoVmap):
        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *second):  # or a second derivative would silently be zero
            raise NotImplementedError(
                "attention is differentiable once: double backward is not supported"
            )

    class Attention(NoVmap):
        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.rest = inputs[count:]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[:count], *output)

        @staticmethod
        def backward(ctx, dout, dlse):
            grads, tensors = (
                (),
                ctx.saved_tensors,
            )  # once: checkpointing recomputes them when they are read
            if dout is not None or dlse is not None:
                dout = torch.zeros_like(tensors[-2]) if dout is None else dout
                grads = Gradients.apply(dout, dlse, *tensors, *ctx.rest)
            return *grads, *[None] * (count + len(ctx.rest) - len(grads))

    Attention.forward, Gradients.forward = staticmethod(forward), staticmethod(backward)
    return Attention


_Attention = differentiable_once(forward, backward, 3)


def _text(pattern: Pattern, backend: str | tuple[str, ...]) -> str:
    return json.dumps([pattern.to_dict(), backend])


if IN_GRAPHS:
    _text._dynamo_marked_constant = True


@lru_cache(maxsize=256)
def _of_text(text: str) -> tuple[Pattern, str | tuple[str, ...], Execution]:
    pattern, backend = json.loads(text)
    return (
        from_dict(pattern),
        backend if isinstance(backend, str) else tuple(backend),
        Execution(),
    )


def _rows_dense(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


@torch.library.custom_op("ringlab::attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    text: str,
    causal: bool,
    scale: float,
    followed: bool,
) -> tuple[Tensor, Tensor]:
    """``forward`` for the pattern and backend of a text: torch.compile and torch.export
    keep it whole.
    """
    pattern, backend, execution = _of_text(text)
    backend = _kernel_for(
        q, causal, followed, backend
    ).name  # no tensor in here asks for its gradient
    out, lse = forward(
        *_rows_dense(q, k, v), pattern, causal, scale, backend, execution
    )
    return out, lse.contiguous()


@operator.register_fake
def _(q, k, v, text, causal, scale, followed):
    b, n, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(
        b, heads, n, dtype=accumulation_dtype(q.dtype)
    )


@torch.library.custom_op("ringlab::attention_backward", mutates_args=())
def operator_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    text: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``backward``, likewise."""
    pattern, backend, execution = _of_text(text)
    grads = backward(
        dout,
        dlse,
        *_rows_dense(q, k, v),
        out,
        lse,
        pattern,
        causal,
        scale,
        backend,
        execution,
    )
    return tuple(grad.contiguous() for grad in grads)


@operator_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, *ctx.rest, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 7
    dout = torch.zeros_like(out) if dout is None else dout
    return (
        *operator_backward(dout, dlse, q, k, v, out, lse, *ctx.rest),
        None,
        None,
        None,
        None,
    )


operator.register_autograd(_backward, setup_context=_setup)


def positive_scale(scale: float):
    """(what makes q, and dq, of theirs, a positive scale): kernels take the maximum
    before they scale.
    """
    if scale > 0:
        return lambda t: t, scale
    if scale < 0:
        return torch.neg, -scale
    return torch.zeros_like, 1.0


def fold_lse_gradient(dout, q, k, v, out, lse, dlse: Tensor | None):
    """Widen the heads so that a flash backward, which takes no lse cotangent g,
    computes ``rowsum(dO * O) - g``.

    Two more columns of O hold -g, its rounded value and the remainder; those of dO hold
    1. q, k and v get zeros, so no score and no ``dO v^T`` changes. Padded to 8 columns,
    as every kernel's alignment allows. None changes nothing.
    """
    if dlse is None:
        return dout, q, k, v, out, lse
    g = -dlse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    dead = lse.transpose(1, 2).unsqueeze(-1) == -torch.inf
    g = g.masked_fill(dead, 0.0)
    high = g.to(out.dtype)
    low = (g - high.to(g.dtype)).to(out.dtype)
    zeros = out.new_zeros(*out.shape[:3], 6)
    ones = torch.ones_like(high)
    wide_q, wide_k, wide_v = (F.pad(t, (0, 8)) for t in (q, k, v))
    return (
        torch.cat([dout, ones, ones, zeros], -1),
        wide_q,
        wide_k,
        wide_v,
        torch.cat([out, high, low, zeros], -1),
        lse,
    )
