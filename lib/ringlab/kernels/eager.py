"""Attention by matrix products with materialised scores: the textbook form, and the fast form for short segments."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import to_bhmd, wide


class Eager:
    """Scores, softmax, product, in fp32 or wider; runs everywhere, memory grows with m^2.

    With ``tile_bytes`` the batch is walked in pieces whose scores stay about that large, so they stay in cache.
    """

    name = "eager"
    lower_right = True

    def __init__(self, tile_bytes: int | None = None):
        self.tile_bytes = tile_bytes

    def refuses(self, device, dtype, head_dim):
        return None

    def _tiles(self, q: Tensor, k: Tensor) -> range:
        b, m, h, _ = q.shape
        if self.tile_bytes is None:
            return range(0, b, max(1, b))
        return range(0, b, max(1, self.tile_bytes // (4 * h * m * k.shape[1])))

    def forward(self, q, k, v, causal, scale):
        b, m, h, d = q.shape
        acc = wide(q.dtype)
        out = torch.empty(q.shape, dtype=acc, device=q.device)  # (b, m, h, d)
        lse = torch.empty(b, h, m, dtype=acc, device=q.device)
        hidden = hidden_keys(m, k.shape[1], q.device) if causal else None
        tiles = self._tiles(q, k)
        for i in tiles:
            part = slice(i, i + tiles.step)
            q_t, k_t, v_t = to_bhmd(*(t[part].to(acc) for t in (q, k, v)))  # (b', h, m, d)
            scores = torch.matmul(q_t, k_t.mT).mul_(scale)  # (b', h, m, m_k)
            if causal:
                scores.masked_fill_(hidden, -torch.inf)
            top = scores.amax(-1)  # (b', h, m)
            prob = scores.softmax(-1)
            # The largest probability is exp(top - lse): the log-sum-exp without another pass of exponentials.
            lse[part] = top - prob.amax(-1).log_()
            out[part] = torch.matmul(prob, v_t).transpose(1, 2)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        m, acc = q.shape[1], lse.dtype
        grads = tuple(torch.empty(t.shape, dtype=acc, device=t.device) for t in (q, k, v))
        hidden = hidden_keys(m, k.shape[1], q.device) if causal else None
        tiles = self._tiles(q, k)
        for i in tiles:
            part = slice(i, i + tiles.step)
            g, q_t, k_t, v_t, o = to_bhmd(*(t[part].to(acc) for t in (dout, q, k, v, out)))  # (b', h, m, d)
            scores = torch.matmul(q_t, k_t.mT).mul_(scale)
            if causal:
                scores.masked_fill_(hidden, -torch.inf)
            prob = scores.sub_(lse[part].unsqueeze(-1)).exp_()  # (b', h, m, m_k), against the final lse
            delta = (g * o).sum(-1, keepdim=True)  # (b', h, m, 1)
            # A row that sees one key has gradient 0: sum as delta does, so that the difference is 0 and not rounding.
            d_prob = torch.matmul(g, v_t.mT) if k.shape[1] > 1 else (g * v_t).sum(-1, keepdim=True)
            d_scores = d_prob.sub_(delta).mul_(prob).mul_(scale)
            for grad, product in zip(grads, (d_scores @ k_t, d_scores.mT @ q_t, prob.mT @ g)):
                grad[part] = product.transpose(1, 2)
        return grads


def hidden_keys(m: int, m_k: int, device) -> Tensor:
    """Which keys a causal call hides from which queries, bool (m, m_k): the last query sees all."""
    return torch.ones(m, m_k, dtype=torch.bool, device=device).triu(1 + m_k - m)
