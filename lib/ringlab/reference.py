"""The float64 reference: the definition that every fast path is compared with, the
error of the comparison, and the ``tolerance`` within which it must lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .patterns import AnyPattern, Dense, Pattern, as_pattern
from .selected import Selected

PART = 1 << 27  # elements that are converted to float64 at a time
EXACT = {torch.float64: 1e-12, torch.float32: 5e-6}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: AnyPattern | str,
    *,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense float64 ``softmax(scale * q k^T + log M) v``: out (b, n, h, d), lse (b, h,
    n); differentiable. ``pattern`` may be a name, as "window". ``sinks``, (h,) or (h,
    n): the score of one more key, whose value is 0.
    ``softcap``: scores s are ``softcap * tanh(s / softcap)``.

    q is (b, n, h, d); k, v are (b, n, h_kv, d) with h a multiple of h_kv; for ``Dense``
    they may have another length, as of ``ringlab.attention``. ``scale`` defaults to
    1 / sqrt(d). A query that sees no key has out 0, lse -inf (its sink, if there are
    any) and zero gradients. Time and memory grow with n^2.

    >>> from ringlab.patterns import Dense
    >>> q = torch.zeros(1, 3, 1, 2); v = torch.arange(6.).reshape(1, 3, 1, 2)
    >>> attention(q, q, v, Dense(), causal=True)[0].flatten().tolist()
    [0.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    """
    n = q.shape[1]
    heads = q.shape[2]
    kv_heads = k.shape[2]
    if isinstance(pattern, str):
        pattern = as_pattern(pattern, AnyPattern, n, heads)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    queries, keys = (torch.arange(t.shape[1], device=q.device) for t in (q, k))
    if causal:  # queries are the last positions, all of them in self-attention
        queries = queries + (k.shape[1] - n)
    outs = []
    lses = []
    for h in range(heads):
        about = {"n": n, "head": h, "heads": heads, "kv_heads": kv_heads}
        bias, kv = (
            _log_multiplicity(pattern, queries, keys, causal, about),
            h // (heads // kv_heads),
        )  # bias (n, n)
        prob, lse = _softmax(
            q[:, :, h].double(),
            k[:, :, kv].double(),
            bias,
            scale,
            None if sinks is None else sinks[h].double()[..., None],
            softcap,
        )  # (b, n, n), (b, n)
        outs.append(prob @ v[:, :, kv].double())  # (b, n, d)
        lses.append(lse)
    return torch.stack(outs, 2), torch.stack(lses, 1)


def weights(
    q: Tensor,
    k: Tensor,
    pattern: AnyPattern | str,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The probabilities (b, h, n, n) of each query over the keys, float64: for plots,
    as memory grows with n^2.

    >>> from ringlab.patterns import Dense
    >>> weights(torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2), Dense(), causal=True).tolist()
    [[[[1.0, 0.0], [0.5, 0.5]]]]
    """
    b, n, kv_heads, _ = k.shape
    unit = torch.eye(n, dtype=torch.float64, device=k.device)[None, :, None].expand(
        b, n, kv_heads, n
    )
    return attention(q, k, unit, pattern, causal=causal, scale=scale)[0].transpose(1, 2)


def error(x: Tensor, ref: Tensor, floor: float) -> float:
    """``||x - ref|| / max(||ref||, floor)`` in float64; inf if x is not finite where
    ref is, or where -inf differs.
    """
    if x.shape != ref.shape:
        return float("inf")
    apart = size = 0.0
    for part, right in zip(_parts(x.detach()), _parts(ref.detach())):
        part, right = part.double(), right.double()
        far = float((part - right).norm())
        large = float(right.norm())
        if not math.isfinite(
            far + large
        ):  # only then, since it takes longer than the rest
            finite = torch.isfinite(right)
            if not torch.equal(finite, torch.isfinite(part)) or not torch.equal(
                part[~finite], right[~finite]
            ):
                return float("inf")
            far, large = (
                float((part[finite] - right[finite]).norm()),
                float(right[finite].norm()),
            )
        apart, size = math.hypot(apart, far), math.hypot(size, large)
    return apart / max(size, floor)


def _parts(t: Tensor) -> tuple[Tensor, ...]:
    """Parts of a tensor to convert one by one: in float64, a million tokens at once
    would take tens of GB.
    """
    if t.numel() <= PART:
        return (t,)
    longest = max(range(t.dim()), key=t.shape.__getitem__)
    return t.split(max(1, PART * t.shape[longest] // t.numel()), longest)


def gradient_floor(
    q: Tensor, k: Tensor, dout: Tensor, scale: float | None = None
) -> float:
    """The norm below which a gradient counts as zero: 0.01 ||dO|| max(1, |scale|
    max(||q||, ||k||) / sqrt(n h)).
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rows = (q.shape[0] * q.shape[1] * q.shape[2]) ** 0.5
    size = (
        max(float(q.detach().double().norm()), float(k.detach().double().norm())) / rows
    )
    return 0.01 * float(dout.detach().double().norm()) * max(1.0, abs(scale) * size)


def tolerance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    *,
    pattern: Pattern | Selected | str | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> dict[str, float]:
    """The error that each result may have: 1e-12 in fp64, 5e-6 in fp32, else twice that
    of a dense kernel call.

    The dense calls are torch's ``scaled_dot_product_attention`` in q's dtype, on up to
    1024 positions and, given a ``pattern``, on as few rows as the pattern's
    ``fewest_keys`` (gradients over few keys cancel more). The largest error counts.
    """
    names = ("out", "lse", "dq", "dk", "dv")
    if q.dtype in EXACT:
        return dict.fromkeys(names, EXACT[q.dtype])
    n = q.shape[1]
    heads = q.shape[2]
    sizes = {min(n, 1024)}
    if isinstance(pattern, str):
        pattern = as_pattern(pattern, AnyPattern, n, heads)
    if pattern is not None:
        sizes.add(min(n, pattern.fewest_keys(n, heads, k.shape[2])))
    calls = [
        _dense_call_errors(q, k, v, dout, m, causal, scale) for m in sizes if m <= 1024
    ]
    # A call on a row or two may round nothing at all; storing a result rounds by up to
    # half an epsilon.
    least = torch.finfo(q.dtype).eps / 2
    found = {
        name: max([least, *(2 * c[name] for c in calls)])
        for name in ("out", "dq", "dk", "dv")
    }
    return found | {
        "lse": found["out"]
    }  # lse is in fp32; the rounding of its products is bounded by out's error


def _dense_call_errors(q, k, v, dout, m: int, causal: bool, scale) -> dict[str, float]:
    if (
        scale is not None and scale < 0
    ):  # the same problem; torch's causal kernels multiply their -inf by the scale
        q, scale = -q, -scale
    groups = q.shape[2] // k.shape[2]
    segments = min(q.shape[1], 1024) // m
    whole = (q, k, v, torch.randn_like(q) if dout is None else dout)
    *cut, g = (
        t[0, : segments * m].detach().unflatten(0, (segments, m)) for t in whole
    )  # (segments, m, h, d)
    cut[1:] = [t.repeat_interleave(groups, 2) for t in cut[1:]]
    low = [t.clone().requires_grad_() for t in cut]
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in low), is_causal=causal, scale=scale
    )
    out.backward(g.transpose(1, 2))
    exact = [t.double().requires_grad_() for t in cut]
    ref, _ = attention(*exact, Dense(), causal=causal, scale=scale)
    ref.backward(g.double())
    floor = gradient_floor(*cut[:2], g, scale)
    grads = {
        name: error(a.grad, b.grad, floor)
        for name, a, b in zip(("dq", "dk", "dv"), low, exact)
    }
    return {"out": error(out.transpose(1, 2), ref, 1.0)} | grads


def sampled_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Selected,
    *,
    out: Tensor,
    lse: Tensor | None,
    causal: bool = False,
    scale: float | None = None,
    dout: Tensor | None = None,
    grads: Sequence[Tensor] | None = None,
    samples: int = 32,
    seed: int = 0,
    start: int | None = None,
) -> dict[str, float]:
    """Errors of a result at full size, exact on sampled rows: out, lse and dq by query,
    dk and dv by key.

    Costs O(samples * n) instead of O(n^2). out (b, n, h, d) and lse (b, h, n) or None;
    ``grads`` = (dq, dk, dv) for the cotangent ``dout``. dk and dv need the exact
    softmax of every query that sees a sampled key, so those keys come from one random
    stretch of the sequence (or one from ``start`` on): in a segmented pattern few
    queries see them.
    """
    b, n, heads, d = q.shape
    kv_heads, scale = k.shape[2], d**-0.5 if scale is None else scale
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(n, generator=generator)[:samples].to(q.device)
    rows = torch.unique(
        torch.cat([picked, torch.tensor([0, n - 1], device=q.device)])
    )  # (s,)
    stretch = min(n, 8 * samples)
    anywhere = int(torch.randint(n - stretch + 1, (1,), generator=generator))
    start = anywhere if start is None else min(start, n - stretch)
    cols = start + torch.randperm(stretch, generator=generator)[
        :samples
    ].sort().values.to(q.device)  # (c,)
    pairs: dict[str, list] = {
        "out": [],
        "lse": [],
        "dq": [],
    }  # of the result and the reference, by head
    d_k, d_v = (
        torch.zeros(b, len(cols), kv_heads, d, dtype=torch.float64, device=q.device)
        for _ in range(2)
    )
    for i in range(b):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            q_h, k_h, v_h = (
                q[i, :, h].double(),
                k[i, :, kv].double(),
                v[i, :, kv].double(),
            )  # (n, d)
            g_h = None if dout is None else dout[i, :, h].double()  # (n, d)
            head = (
                pattern,
                causal,
                scale,
                {"n": n, "head": h, "heads": heads, "kv_heads": kv_heads},
                i,
            )
            o_r, l_r, dq_r = _query_rows(q_h, k_h, v_h, rows, g_h, head)
            pairs["out"].append((out[i, rows, h], o_r))
            if lse is not None:
                pairs["lse"].append((lse[i, h, rows], l_r))
            if grads is not None:
                pairs["dq"].append((grads[0][i, rows, h], dq_r))
                dk_c, dv_c = _key_columns(q_h, k_h, v_h, cols, g_h, head)
                d_k[i, :, kv] += dk_c
                d_v[i, :, kv] += dv_c
    results = {
        name: [torch.cat(parts) for parts in zip(*both)]
        for name, both in pairs.items()
        if both
    }
    found = {
        name: error(*results[name], 1.0) for name in ("out", "lse") if name in results
    }
    if grads is not None:
        zero = gradient_floor(q, k, dout, scale)
        found["dq"] = error(*results["dq"], zero * (len(rows) / n) ** 0.5)
        zero *= (len(cols) / n) ** 0.5
        found |= {
            "dk": error(grads[1][:, cols], d_k, zero),
            "dv": error(grads[2][:, cols], d_v, zero),
        }
    return found


def _log_multiplicity(
    pattern, queries, keys, causal: bool, about: dict, entry: int | None = None
) -> Tensor:
    """log M (q, k); (b, q, k) of a pattern by batch entry, unless one is given."""
    m = pattern.multiplicity(queries, keys, **about)
    if entry is not None and m.dim() == 3:
        m = m[entry]
    if causal:
        m = m * (keys[None, :] <= queries[:, None])
    m = m.double()
    none = m == 0  # as log 0 is, but with a gradient that is finite
    return m.masked_fill(none, 1.0).log().masked_fill(none, -torch.inf)


def _scores(q, k, bias, scale: float, softcap: float | None = None) -> Tensor:
    """``scale * q k^T + log M``, and -inf where M is 0 whatever q and k hold."""
    scores = scale * q @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.where(bias == -torch.inf, bias, scores + bias)


def _softmax(
    q, k, bias, scale: float, sink=None, softcap=None
) -> tuple[Tensor, Tensor]:
    """The probabilities (..., q, k) and their lse (..., q); 0 and -inf for a query that
    sees nothing, not even a ``sink``.
    """
    dead = (bias == -torch.inf).all(-1)  # (q,)
    scores = _scores(q, k, bias, scale, softcap)
    if sink is not None:
        dead = dead & (sink[..., 0] == -torch.inf)
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    lse = scores.masked_fill(dead[..., None], 0.0).logsumexp(
        -1
    )  # finite, and so are its gradients
    prob = (scores - lse[..., None]).exp()[..., : k.shape[-2]]
    return prob, lse.masked_fill(dead, -torch.inf)


def _query_rows(q, k, v, rows, dout, head):
    """Exact out (s, d), lse (s,), dq (s, d) of one head at query positions ``rows``; q,
    k, v are (n, d) float64.
    """
    pattern, causal, scale, about, entry = head
    start, stop = pattern.reach(int(rows.min()), int(rows.max()), len(k))
    keys, k, v = (
        torch.arange(start, stop, device=k.device),
        k[start:stop],
        v[start:stop],
    )
    prob, lse = _softmax(
        q[rows], k, _log_multiplicity(pattern, rows, keys, causal, about, entry), scale
    )
    out = prob @ v
    dq = None
    if dout is not None:
        g = dout[rows]  # (s, d)
        dq = scale * (prob * (g @ v.T - (g * out).sum(-1, keepdim=True))) @ k
    return out, lse, dq


def _key_columns(q, k, v, cols, dout, head):
    """Exact dk, dv (s, d) of one head at key positions ``cols``, over 1024 queries at a
    time, of those that see any.
    """
    pattern, causal, scale, about, entry = head
    dk = torch.zeros_like(k[cols])
    dv = torch.zeros_like(k[cols])
    for rows in torch.arange(len(q), device=q.device).split(1024):
        bias = _log_multiplicity(pattern, rows, cols, causal, about, entry)  # (1024, s)
        sees = (bias > -torch.inf).any(-1)
        if not sees.any():
            continue
        rows, bias = rows[sees], bias[sees]
        out, lse, _ = _query_rows(q, k, v, rows, None, head)
        g = dout[rows]  # (rows, d)
        prob = (
            _scores(q[rows], k[cols], bias, scale) - lse[:, None]
        ).exp()  # (rows, s)
        delta = (g * out).sum(-1, keepdim=True)  # (rows, 1)
        dv += prob.T @ g
        dk += scale * (prob * (g @ v[cols].T - delta)).T @ q[rows]
    return dk, dv
