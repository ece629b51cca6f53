"""Combining partial softmax results: branches, ring blocks and ranks are all joined here.

A partial result is (out, lse) over some keys. The union over disjoint multisets of keys is
``lse = log sum exp lse_i``, ``out = sum exp(lse_i - lse) out_i``; a partial that saw no key has lse -inf and weight 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join partial results out (b, n, h, d), lse (b, h, n) into one; max-shifted, exact for lse -inf, differentiable.

    >>> out, lse = merge([torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)], [torch.zeros(1, 1, 1)] * 2)
    >>> out.flatten().tolist(), round(float(lse), 4)
    ([0.5, 0.5], 0.6931)
    """
    stacked = torch.stack(lses)  # (p, b, h, n)
    top = stacked.detach().amax(0)  # (b, h, n)
    shift = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = (stacked - shift).exp()  # (p, b, h, n)
    total = weights.sum(0)  # (b, h, n)
    dead = total == 0
    weights = weights / total.masked_fill(dead, 1.0)
    out = sum(o.to(w.dtype) * w.transpose(1, 2).unsqueeze(-1) for o, w in zip(outs, weights))  # (b, n, h, d)
    lse = (shift + total.masked_fill(dead, 1.0).log()).masked_fill(dead, -torch.inf)
    return out, lse


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Join a partial result into (out, lse) in place; all may be strided views, out in fp32 or wider.

    Shapes as in :func:`merge`: out (b, n, h, d), lse (b, h, n).

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    >>> merge_(out, lse, torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)); out.flatten().tolist(), float(lse)
    ([1.0, 1.0], 0.0)
    """
    # sigmoid(b - a) is exp(b - logaddexp(a, b)): 1 for a = -inf, 0 for b = -inf, nan only where neither saw a key.
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(0.0)  # (b, h, n)
    lse.copy_(torch.logaddexp(lse, other_lse))
    out.lerp_(other_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))
