"""The list kernels as operators, so that torch.compile traces a call of them without a break in its graph."""

from __future__ import annotations

import json
from functools import lru_cache

import torch
from torch import Tensor

from ..patterns import Pattern, from_dict
from .triton_lists import TritonLists

_KERNEL = TritonLists()


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n) for a positive ``scale``; differentiable once.

    Raises NotImplementedError, with the reason, where the kernels cannot run.
    """
    return lists_forward(q, k, v, _text(pattern), causal, scale)


def _text(pattern: Pattern) -> str:
    return json.dumps(pattern.to_dict())


# A Python object in, a string out: nothing that a compiler must trace (as in ``ring.ranks``).
_text._dynamo_marked_constant = True


@lru_cache(maxsize=256)
def _pattern(text: str) -> Pattern:
    return from_dict(json.loads(text))


def _ready(q: Tensor, *others: Tensor) -> list[Tensor]:
    why = _KERNEL.refuses(q.device, q.dtype, q.shape[3])
    if why is not None:
        raise NotImplementedError(f"backend 'triton' cannot run on {q.device.type} in {q.dtype}: {why}")
    return [t if t.stride(-1) == 1 else t.contiguous() for t in (q, *others)]


@torch.library.custom_op("ringlab::lists_forward", mutates_args=())
def lists_forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: str, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse."""
    return _KERNEL.attend(*_ready(q, k, v), _pattern(pattern), causal, scale)


@lists_forward.register_fake
def _(q, k, v, pattern, causal, scale):
    b, n, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(b, heads, n, dtype=torch.float32)


@torch.library.custom_op("ringlab::lists_backward", mutates_args=())
def lists_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: str,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    q, k, v = _ready(q, k, v)
    return _KERNEL.gradients(dout, dlse, q, k, v, out, lse, _pattern(pattern), causal, scale)


@lists_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 6
    dout = torch.zeros_like(out) if dout is None else dout
    return *lists_backward(dout, dlse, q, k, v, out, lse, *ctx.rest), None, None, None


lists_forward.register_autograd(_backward, setup_context=_setup)
