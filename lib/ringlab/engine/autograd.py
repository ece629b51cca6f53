"""Attention on one device as autograd sees it: the forward, its gradient, and the
operator that compiled graphs call. Which way a call runs stands in ``ways``.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import Backend, check_plain
from ..cost import count_pairs
from ..kernels.base import accumulation_dtype, device_type_of
from ..patterns import Pattern, from_dict
from ..torch_private import (
    IN_GRAPHS,
    constant_in_graphs,
    flop_counters,
    in_functorch,
    is_fake,
    is_transformed,
)
from . import DEFAULT
from .sinks import add_sinks_, sinks_gradient
from .walk import Walked
from .ways import LocalCall, way_of


def local_attention(
    q,
    k,
    v,
    sinks: Tensor | None,
    call: LocalCall,
) -> tuple[Tensor, Tensor]:
    """Return out (b, n, h, d), lse (b, h, n) of a checked call; differentiable once, in
    q, k, v and sinks (h,), through out and lse.
    """
    followed = is_followed(q, k, v, sinks)
    # An operator takes neither.
    if call.documents is None and call.execution is DEFAULT:
        if torch.compiler.is_compiling():
            whole = IN_GRAPHS or torch.compiler.is_exporting()
        else:
            for counter in (counters := flop_counters()):
                for op, formula in _flop_formulas().items():
                    counter.flop_registry.setdefault(op, formula)
            whole = counters or is_fake(q)
        if whole and not is_transformed():
            text = _text(call.pattern, call.backend)
            if text is None:  # the compiled function makes it: only a trace has fields
                text = _text(call.pattern.to_dict(), call.backend)
            options = call.causal, call.scale, followed, sinks, call.softcap
            return operator(q, k, v, text, *options)
    q, k, v = _rows_dense(q, k, v)
    attend = _Attention.apply if followed else forward
    return outside_graphs(attend)(q, k, v, sinks, call)  # plans are lists


def is_followed(*tensors: Tensor | None) -> bool:
    """Whether autograd or a transform must see the call; a plain function is faster."""
    return is_transformed() or (torch.is_grad_enabled() and requires_grad(*tensors))


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors requires a gradient."""
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return False


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


def forward(q, k, v, sinks: Tensor | None, call: LocalCall):
    """out (b, n, h, d), lse (b, h, n)."""
    differentiable = requires_grad(q, k, v, sinks)
    documents = call.documents
    if documents is None or isinstance(way_of(q, k, call, differentiable), Walked):
        return _forward(q, k, v, sinks, call, differentiable)
    rest = sinks, call._replace(documents=None), differentiable
    return documents.forward(q, k, v, lambda *tensors: _forward(*tensors, *rest))


def _forward(q, k, v, sinks, call: LocalCall, differentiable: bool):
    """As ``forward``; ``differentiable``: a gradient will be asked for."""
    way = way_of(q, k, call, differentiable)
    flip, scale = positive_scale(call.scale)
    with without_autocast(q):
        out, lse = way.forward((flip(q), k, v), scale, call)
    if sinks is not None:
        out, lse = add_sinks_(out, lse, sinks)
        if call.documents is not None:
            call.documents.pad_(lse)
    return out, lse


def backward(dout, dlse, q, k, v, out, lse, call: LocalCall):
    """dq, dk, dv for cotangents of out and, if not None, of lse."""
    way = way_of(q, k, call, True, True)
    if call.documents is not None and not isinstance(way, Walked):
        reads = (dout, dlse, q, k, v, out, lse)
        alone = call._replace(documents=None)
        return call.documents.backward(
            *reads, lambda *tensors: backward(*tensors, alone)
        )
    flip, scale = positive_scale(call.scale)
    q, head_dim = flip(q), q.shape[3]
    with without_autocast(q):
        reads = dout, q, k, v, out, lse
        if folds := dlse is not None and not way.takes_dlse:
            reads = fold_lse_gradient(*reads, dlse)
            way, dlse = way_of(*reads[1:3], call, True, True), None  # of wider heads
        if not way.takes_dlse:
            reads = *_rows_dense(*reads[:5]), lse
        grads = way.backward(dlse, reads, scale, call)
    dq, dk, dv = (grad[..., :head_dim] for grad in grads) if folds else grads
    return flip(dq), dk, dv


class NoVmap(torch.autograd.Function):
    """Refuses torch's transforms other than one reverse-mode derivative."""

    @classmethod
    def apply(cls, *args):
        """As torch's, which outside of transforms spends longer than a small call on
        looking for default arguments.
        """
        return (
            super().apply(*args)
            if in_functorch()
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


def _is_batched(t: Tensor) -> bool:
    """Whether t is of torch's older vmap, which autograd.grad(is_grads_batched=True)
    runs and which no autograd function is told of: it has no storage of its own.
    """
    try:
        return t.untyped_storage() is None
    except NotImplementedError:
        return True


class _Once(NoVmap):
    @staticmethod
    def forward(gradients, *args):
        return gradients(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *second):  # or a second derivative would silently be zero
        raise NotImplementedError(
            "attention is differentiable once: double backward is not supported"
        )


def gradients_once(gradients, *args):
    """Return ``gradients(*args)``, cotangents first, for every backward of this library.

    Raises NotImplementedError for batched cotangents; and where the result is
    differentiated once more, by any tensor of ``args``.
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not is_transformed() and any(map(_is_batched, tensors[:2])):
        NoVmap.vmap(None, None)
    for t in tensors[:2]:
        check_plain("a gradient", t)
    if is_followed(*tensors):
        return _Once.apply(gradients, *args)
    return gradients(*args)


def differentiable_once(forward, backward, count: int) -> type[torch.autograd.Function]:
    """The autograd function of ``out, lse = forward(*tensors, *rest)`` for ``count``
    tensors.

    ``backward(dout, dlse, *tensors, out, lse, *rest)`` gives the gradients of the first
    tensors; dlse may be None.
    """

    class Attention(NoVmap):
        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.rest = inputs[count:]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[:count], *output)

        @staticmethod
        def backward(ctx, dout, dlse):
            grads = ()
            # Read once: checkpointing recomputes them when they are read.
            tensors = ctx.saved_tensors
            if dout is not None or dlse is not None:
                dout = torch.zeros_like(tensors[-2]) if dout is None else dout
                cotangents = dout, dlse
                grads = gradients_once(backward, *cotangents, *tensors, *ctx.rest)
            return *grads, *[None] * (count + len(ctx.rest) - len(grads))

    Attention.forward = staticmethod(forward)
    return Attention


def with_sinks(backward):
    """``backward``, which gives dq, dk, dv, with the gradient of sinks or None."""

    def gradients(dout, dlse, q, k, v, sinks, out, lse, *rest):
        dsinks = None if sinks is None else sinks_gradient(dout, dlse, out, lse, sinks)
        return *backward(dout, dlse, q, k, v, out, lse, *rest), dsinks

    return gradients


_Attention = differentiable_once(forward, with_sinks(backward), 4)


@constant_in_graphs
def _text(pattern: Pattern | dict, backend: Backend) -> str | None:
    """A pattern, or its ``to_dict()``, and a backend as text; None for a pattern that
    has no fields yet.
    """
    try:
        return json.dumps([pattern, backend], default=lambda one: one.to_dict())
    except AttributeError:
        return None


@lru_cache(maxsize=256)
def _of_text(
    text: str, causal: bool, scale: float, softcap: float | None = None
) -> LocalCall:
    pattern, backend = json.loads(text)
    backend = backend if isinstance(backend, str) else tuple(backend)
    return LocalCall(from_dict(pattern), causal, scale, backend, DEFAULT, softcap)


def _rows_dense(*tensors: Tensor) -> list[Tensor]:
    dense = []
    for t in tensors:
        dense.append(t if t.stride(-1) == 1 else t.contiguous())
    return dense


@torch.library.custom_op("ringlab::attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    text: str,
    causal: bool,
    scale: float,
    followed: bool,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``forward`` for the pattern and backend of a text: torch.compile and torch.export
    keep it whole.
    """
    call = _of_text(text, causal, scale, softcap)
    out, lse = _forward(*_rows_dense(q, k, v), sinks, call, followed)
    return out, lse.contiguous()


@operator.register_fake
def _(q, k, v, *rest):
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
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``backward``, likewise."""
    call = _of_text(text, causal, scale, softcap)
    grads = backward(dout, dlse, *_rows_dense(q, k, v), out, lse, call)
    return tuple(grad.contiguous() for grad in grads)


@operator_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, *rest, _, sinks, softcap = inputs
    ctx.rest = *rest, softcap
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, *output)


def _backward(ctx, dout, dlse):
    tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 9
    dout = torch.zeros_like(tensors[4]) if dout is None else dout
    run = with_sinks(operator_backward)
    *grads, dsinks = gradients_once(run, dout, dlse, *tensors, *ctx.rest)
    return *grads, *[None] * 4, dsinks, None


operator.register_autograd(_backward, setup_context=_setup)


@cache
def _flop_formulas() -> dict:
    """What torch's FLOP counter is told of the operators: two products for each visible
    pair, five in the backward. It sees calls on one device without options, documents
    or a cache; of others it counts what torch's own operators compute.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    def flops(q, k, v, text, causal: bool, products: tuple[int, int]) -> int:
        (b, n, heads, d), (m, kv_heads, d_v) = q, v[1:]
        pattern = from_dict(json.loads(text)[0])
        pairs = heads * n * m
        if n == m:
            _, pairs = count_pairs(pattern, n, heads, kv_heads, causal)
        elif causal:  # the queries are the last positions
            pairs -= heads * n * (n - 1) // 2
        return 2 * b * pairs * (products[0] * d + products[1] * d_v)

    ops = torch.ops.ringlab.attention, torch.ops.ringlab.attention_backward

    @register_flop_formula(ops[0])
    def forward_flops(q, k, v, text, causal, *_, **__) -> int:
        return flops(q, k, v, text, causal, (1, 1))

    @register_flop_formula(ops[1])
    def backward_flops(dout, dlse, q, k, v, out, lse, text, causal, *_, **__) -> int:
        return flops(q, k, v, text, causal, (3, 2))

    return {op: flop_registry[op] for op in ops}


def positive_scale(scale: float):
    """(what makes q, and dq, of theirs, a positive scale): kernels take the maximum
    before they scale.
    """
    if scale > 0:
        return lambda t: t, scale
    if scale < 0:
        return torch.neg, -scale
    return torch.zeros_like, 1.0


LSE_COLUMNS = 8  # that every kernel's alignment allows


def fold_lse_gradient(dout, q, k, v, out, lse, dlse: Tensor | None):
    """Widen the heads so that a flash backward, which takes no lse cotangent g,
    computes ``rowsum(dO * O) - g``.

    Two more columns of O hold -g, its rounded value and the remainder; those of dO hold
    1. q, k and v get zeros, so no score and no ``dO v^T`` changes. LSE_COLUMNS are
    added in all. None changes nothing.
    """
    if dlse is None:
        return dout, q, k, v, out, lse
    g = -dlse.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
    dead = lse.transpose(1, 2).unsqueeze(-1) == -torch.inf
    g = g.masked_fill(dead, 0.0)
    high = g.to(out.dtype)
    low = (g - high.to(g.dtype)).to(out.dtype)
    zeros = out.new_zeros(*out.shape[:3], LSE_COLUMNS - 2)
    ones = torch.ones_like(high)
    wide_q, wide_k, wide_v = (F.pad(t, (0, LSE_COLUMNS)) for t in (q, k, v))
    return (
        torch.cat([dout, ones, ones, zeros], -1),
        wide_q,
        wide_k,
        wide_v,
        torch.cat([out, high, low, zeros], -1),
        lse,
    )
