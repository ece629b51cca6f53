"""Sinks: a logit per head that takes part in the softmax of every query and has no
value (gpt-oss; Xiao et al. 2023, arXiv 2309.17453).

A sink is one more part to merge, with out 0 and lse its logit. Every backward reads the
final out and lse, so that q, k and v need nothing more.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 1 << 14  # at a time, so that copies of half precision in fp32 stay small


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n), changed in place to those with ``sinks``, (h,)
    or (h, n).

    >>> out, lse = add_sinks_(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.zeros(1))
    >>> out.flatten().tolist(), round(float(lse), 4)
    ([0.5, 0.5], 0.6931)
    """
    if sinks is not None:
        sinks = sinks.to(lse.dtype).view(len(sinks), -1)  # (h, 1 or n)
        # exp(lse - logaddexp(lse, sink)); nan where both are -inf
        weight = torch.sigmoid(lse - sinks).masked_fill_(lse == -torch.inf, 0.0)
        weight = weight.transpose(1, 2).unsqueeze(-1)  # (b, n, h, 1)
        for part, factor in zip(out.split(ROWS, 1), weight.split(ROWS, 1)):
            part.mul_(factor)
        torch.logaddexp(lse, sinks, out=lse)
    return out, lse


def sinks_gradient(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor
) -> Tensor:
    """The gradient of ``sinks``, (h,) or (h, n), for the final out (b, n, h, d) and lse
    (b, h, n).
    """
    parts = zip(dout.split(ROWS, 1), out.split(ROWS, 1))
    delta = torch.cat([(x * y.to(lse.dtype)).sum(-1) for x, y in parts], 1)  # (b, n, h)
    delta = delta.transpose(1, 2) - (0.0 if dlse is None else dlse)  # (b, h, n)
    logits = sinks.to(lse.dtype).view(len(sinks), -1)  # (h, 1 or n)
    weight = (logits - lse).exp()  # of the sink: (b, h, n)
    grad = (weight * delta).masked_fill(lse == -torch.inf, 0.0)  # no query: padding
    return -grad.sum_to_size(logits.shape).view_as(sinks).to(sinks.dtype)
