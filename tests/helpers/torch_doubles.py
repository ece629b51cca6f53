"""Doubles on the CPU of torch's CUDA attention operators: same contract, in float64.

They raise where the real operators raise, and return rubbish where those read the
wrong memory. Sources: torch 2.13's own headers under ``mem_eff_attention/`` and, of
pytorch/pytorch, ``attention.cu``, ``attention_backward.cu``, ``flash_api.cpp`` and
``cudnn/MHA.cpp``. Not modelled, and refused with ``NotImplementedError``: dropout,
biases, windows, packed sequences.

    with torch_doubles.registered((6, 1)):
        torch.ops.aten._scaled_dot_product_efficient_attention(...)
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from flash_doubles import GARBAGE, raw, sdp_backward, sdp_forward
from torch import Tensor
from torch.nn import functional as F

CAPABILITY = (9, 0)  # of the pretended GPU; ``registered`` sets it
CUDNN_GRAPHS: dict = {}  # of cuDNN's backward: the strides baked in; ``clear()`` it

HALF = (torch.float16, torch.bfloat16)
MISALIGNED = "CUDA error: misaligned address"  # the kernels load 16 bytes at a time


@contextmanager
def registered(capability: tuple[int, int] = (9, 0)):
    """Within, the operators run on the CPU as on a GPU of this compute capability."""
    global CAPABILITY
    before, CAPABILITY = CAPABILITY, capability
    CUDNN_GRAPHS.clear()
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in _OPERATORS.items():
            library.impl(name, function, "CPU")
        yield
    finally:
        library._destroy()
        CAPABILITY = before


def _check(condition: bool, message: str) -> None:
    """TORCH_CHECK with a message."""
    if not condition:
        raise RuntimeError(message)


def _only(*unmodelled) -> None:
    """Refuse arguments that these doubles do not model."""
    if any(isinstance(x, Tensor) or x for x in unmodelled):
        raise NotImplementedError("these doubles do not model such a call")


# --- memory and mathematics, shared by all operators ---


def hidden_keys(m: int, m_k: int, shift: int | None) -> Tensor:
    """Bool (m, m_k): keys j > i + shift are hidden from query i; None: no key is."""
    if shift is None:
        return torch.zeros(m, m_k, dtype=torch.bool)
    return torch.ones(m, m_k, dtype=torch.bool).triu(1 + shift)


def exact_attention(q, k, v, scale, hidden) -> tuple[Tensor, Tensor]:
    """(out, lse) of float64 (b, h, m, d); a row that sees nothing has 0 and -inf."""
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    prob = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return prob @ v, lse


def exact_backward(dout, q, k, v, lse, delta, scale, hidden, dtype):
    """(dq, dk, dv) given a softmax's lse and delta = rowsum(dout * out), which may be
    of more keys. Probabilities too large for ``dtype`` are infinite.
    """
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    prob = (scores - lse.unsqueeze(-1)).exp()
    prob = prob.masked_fill(prob > torch.finfo(dtype).max, torch.inf)
    d_scores = prob * (dout @ v.mT - delta.unsqueeze(-1)) * scale
    return d_scores @ k, d_scores.mT @ q, prob.mT @ dout


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _misaligned(t: Tensor, elements: int, dims=(0, 1, 2)) -> bool:
    """Whether some access of ``elements`` elements at once to t is misaligned."""
    off = t.data_ptr() % (elements * t.element_size())
    return bool(off) or any(t.stride(i) % elements and t.shape[i] > 1 for i in dims)


def _fill(like: Tensor, values: Tensor) -> Tensor:
    """``values`` rounded into a fresh tensor of ``like``'s layout and dtype."""
    return torch.empty_like(like).copy_(values)


# --- efficient: CUTLASS ---


def _cc() -> int:
    return CAPABILITY[0] * 10 + CAPABILITY[1]


def _alignments(dtype: torch.dtype) -> tuple[int, int]:
    """Elements: kAlignment of the aligned kernels, and kMinimumAlignment."""
    # gemm_kernel_utils.h, DefaultGemmType; Simt kernels load single elements
    if dtype == torch.float32:
        return (4, 4) if _cc() >= 80 else (1, 1)
    return (8, 4) if _cc() >= 75 else (8, 2) if _cc() >= 70 else (1, 1)


def _efficient_checks(q: Tensor, k: Tensor, v: Tensor, kernels: str) -> None:
    """What ..._efficient_attention_forward and ..._backward check first, of
    (b, m, h, d): neither heads nor batches broadcast.
    """
    # attention.cu / attention_backward.cu; torch quotes conditions without a message
    false = "to be true, but got false."
    _check(q.dim() == k.dim() == v.dim() == 4, f"Expected query.dim() == 4 {false}")
    names = {"query": q, "key": k, "value": v}
    for i, one, two in (
        (0, "query", "key"),
        (0, "query", "value"),
        (1, "key", "value"),
        (2, "query", "key"),
        (2, "query", "value"),
        (3, "query", "key"),
    ):
        same = names[one].shape[i] == names[two].shape[i]
        _check(same, f"Expected {one}.size({i}) == {two}.size({i}) {false}")
    # gemm_kernel_utils.h, CHECK_NOSPARSE_LASTCONTIGUOUS_CUDA
    for name, t in names.items():
        _check(t.stride(-1) == 1, f"{name}: last dimension must be contiguous")
    # gemm_kernel_utils.h, DISPATCH_TYPES: of query alone
    fits = q.dtype in (torch.float32, *HALF)
    _check(fits, "Only fp32, half & bf16 supported at the moment")
    # kernels/cutlassF.h and cutlassB.h, dispatch_cutlassF and ...B
    oldest = 80 if q.dtype == torch.bfloat16 else 50
    _check(oldest <= _cc() <= 121, f"{kernels}: no kernel found to launch!")


def _efficient_aligned(elements: int, dims: str, **tensors: Tensor) -> None:
    # kernel_forward.h / kernel_backward.h, check_supported
    for name, t in tensors.items():
        off = t.data_ptr() % (elements * t.element_size())
        _check(not off, f"p.{name}_ptr is not correctly aligned")
        for dim in dims if name in ("query", "key", "value") else "":
            i = "BMH".index(dim)
            fits = t.stride(i) % elements == 0 or (dim != "M" and t.shape[i] <= 1)
            _check(fits, f"{name} is not correctly aligned (stride{dim})")


def _efficient_mask(kind: int, m: int, m_k: int, rows: int) -> Tensor:
    """kernel_forward.h, advance_to_block: 1 is causal from the top left, 2 from the
    bottom right.
    """
    _check(0 <= kind < 3, "invalid value for `custom_mask_type`")
    return hidden_keys(rows, m_k, (None, 0, m_k - m)[kind])


def efficient_forward(
    query,
    key,
    value,
    bias,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp=False,
    *,
    scale=None,
    seqlen_k=None,
    window_size=None,
):
    """aten::_efficient_attention_forward, of (b, m, h, d)."""
    _only(cu_seqlens_q, cu_seqlens_k, seqlen_k, bias, dropout_p, window_size)
    _efficient_checks(query, key, value, "cutlassF")
    (b, m, h, d), m_k, d_v = query.shape, key.shape[1], value.shape[3]
    # attention.cu, launchKernel: the strides over heads choose the kernel
    fast, slow = _alignments(query.dtype)
    sizes = (fast, slow) if _cc() < 80 else (fast,)
    fits = [n for n in sizes if not (query.stride(2) % n or key.stride(2) % n)]
    _check(bool(fits), "cutlassF: no kernel found to launch!")
    n = fits[0]
    rows = -(-m // 32) * 32 if compute_log_sumexp else 0  # kAlignLSE
    out = torch.empty(b, m, h, d_v, dtype=query.dtype)  # contiguous
    lse = torch.full((b, h, rows), torch.inf)
    seed = torch.zeros((), dtype=torch.int64)
    if 0 in (b, m, h, m_k):  # launchKernel: out is zeroed, lse never written
        return out.zero_(), lse.fill_(GARBAGE), seed, seed.clone(), m, m_k
    _efficient_aligned(n, "MH", query=query, key=key)
    # kAlignmentV is 1 and strides over the batch are not checked: the GPU faults
    fault = any(_misaligned(t, n) for t in (query, key, value))
    _check(not fault and d_v % n == 0, MISALIGNED)
    hidden = _efficient_mask(custom_mask_type, m, m_k, m)
    # whole vectors are read: of a ragged head_dim what lies behind it too
    wide = -(-d // n) * n
    q, k = (
        raw(t, query.dtype, (*t.shape[:3], wide), t.stride()).transpose(1, 2)
        for t in (query, key)
    )
    v = raw(value, query.dtype).transpose(1, 2)  # dtypes of key, value: unchecked
    found, found_lse = exact_attention(q, k, v, _scale(query, scale), hidden)
    if custom_mask_type == 2 and max(d, d_v) > 128:
        # kernel_forward.h, attention_kernel: the kernels with an accumulator in
        # memory write nothing for blocks of 32 queries that see no key
        unseen = torch.arange(m) // 32 * 32 + 32 + m_k - m <= 0
        found = found.masked_fill(unseen.view(m, 1), GARBAGE)
    out.copy_(found.transpose(1, 2))
    if compute_log_sumexp:
        # kernel_forward.h, step 7: 0 for rows that see nothing, inf as padding
        lse[..., :m] = found_lse.masked_fill(found_lse == -torch.inf, 0.0)
    return out, lse, seed, seed.clone(), m, m_k


def efficient_backward(
    grad_out_,
    query,
    key,
    value,
    bias,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    logsumexp,
    dropout_p,
    philox_seed,
    philox_offset,
    custom_mask_type,
    bias_requires_grad,
    *,
    scale=None,
    num_splits_key=None,
    window_size=None,
    shared_storage_dqdkdv=False,
):
    """aten::_efficient_attention_backward, of (b, m, h, d)."""
    _only(cu_seqlens_q, cu_seqlens_k, bias, bias_requires_grad, dropout_p, window_size)
    _efficient_checks(query, key, value, "cutlassB")
    (b, m, h, d), m_k, d_v = query.shape, key.shape[1], value.shape[3]
    dtype = query.dtype
    same = grad_out_.shape == (b, m, h, d_v)
    message = "Expected query.size(1) == grad_out_.size(1) to be true, but got false."
    _check(same, message)
    dout = grad_out_.contiguous()
    grads = [torch.zeros(t.shape, dtype=t.dtype) for t in (query, key, value)]
    if shared_storage_dqdkdv:
        message = "`shared_storage_dqdkdv` is only supported when Q/K/V have the same"
        _check(m == m_k, f"{message} sequence length")
        grads = torch.zeros(b, m, 3, h, d, dtype=dtype).unbind(2)
    # launchKernel: only the minimum alignment is asked for
    fast, slow = _alignments(dtype)
    fits = all(t.stride(2) % slow == 0 for t in (query, key, value))
    _check(fits, "cutlassB: no kernel found to launch!")
    if 0 in (b, m, h, m_k):
        return *grads, None
    # kernel_backward.h, check_supported
    strides = logsumexp.stride()
    fits = h <= 1 or strides[1] % 8 == 0
    _check(fits, "LSE is not correctly aligned (strideH)")
    fits = b <= 1 or strides[0] % 8 == 0
    _check(fits, "LSE is not correctly aligned (strideB)")
    _efficient_aligned(
        slow, "HBM", query=query, key=key, value=value, output=out, grad_output=dout
    )
    # ... while the kernel that is taken loads 16 bytes at once
    fault = any(_misaligned(t, fast) for t in (query, key, value, dout))
    _check(not fault and d % fast == 0 and d_v % fast == 0, MISALIGNED)
    # mma_from_smem.h, accumApplyLSEToSmem: lse's rows are contiguous, and kernels for
    # tensor cores (but Volta's) read them up to a multiple of 32
    rows = -(-m // 32) * 32 if slow == 4 else m
    lse = raw(logsumexp, torch.float32, (b, h, rows), (*strides[:2], 1))
    # dtypes of key, value and grad_out are not checked
    reads = [raw(t, dtype).transpose(1, 2) for t in (query, key, value, dout)]
    volta = 70 <= _cc() < 75  # kernel_backward.h, kKernelComputesDelta
    if dtype in HALF and not (volta and max(d, d_v) > 128):
        # kernel_backward.h, computeDelta, o_strideM(): rows h * d_v apart, q's dtype
        seen = (out.stride(0), h * d_v, out.stride(2), 1)
        o = raw(out, dtype, (b, m, h, d_v), seen).transpose(1, 2)
        delta = (reads[3] * o).sum(-1)
    else:  # attention_backward.cu, launchKernel: (grad_out.float() * out.float()).sum
        delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    hidden = _efficient_mask(custom_mask_type, m, m_k, rows)
    more = rows - m
    q, g = (F.pad(t, (0, 0, 0, more)) for t in (reads[0], reads[3]))
    found = exact_backward(
        g,
        q,
        reads[1],
        reads[2],
        lse,
        F.pad(delta, (0, more)),
        _scale(query, scale),
        hidden,
        dtype,
    )
    for grad, values in zip(grads, found):
        grad.copy_(values[..., : grad.shape[1], :].transpose(1, 2))
    return *grads, None


def sdp_efficient_forward(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
):
    """aten::_scaled_dot_product_efficient_attention, of (b, h, m, d)."""
    # attention.cu: causal is from the top left, whatever the lengths
    out, lse, seed, offset, _, _ = efficient_forward(
        *(t.transpose(1, 2) for t in (query, key, value)),
        attn_bias,
        None,
        None,
        None,
        None,
        dropout_p,
        int(is_causal),
        compute_log_sumexp,
        scale=scale,
    )
    return out.transpose(1, 2), lse, seed, offset


def sdp_efficient_backward(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    """aten::_scaled_dot_product_efficient_attention_backward, of (b, h, m, d)."""
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out_, query, key, value, out))
    # attention_backward.cu: of grad_input_mask, the bias' entry alone counts
    *grads, grad_bias = efficient_backward(
        dout,
        q,
        k,
        v,
        attn_bias,
        o,
        None,
        None,
        q.shape[1],
        k.shape[1],
        logsumexp,
        dropout_p,
        philox_seed,
        philox_offset,
        int(is_causal),
        grad_input_mask[3],
        scale=scale,
    )
    return *(g.transpose(1, 2) for g in grads), grad_bias


# --- cuDNN ---


def _grouped(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values (b, h_k, m_k, d), repeated for q's heads."""
    return t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def _cudnn_reads(q: Tensor, k: Tensor, v: Tensor) -> tuple[torch.dtype, list[Tensor]]:
    """The graph's checks; the dtype that it reads, and what it reads of (b, h, m, d)."""
    error = "cuDNN Frontend error: "
    # check_support finds no engine before Ampere
    _check(_cc() >= 80, f"{error}No valid engine configs for SDPA")
    most = 256 if CAPABILITY[0] == 9 else 128  # scaled_dot_product_flash_attention.h
    fits = all(t.shape[3] <= most and t.shape[3] % 8 == 0 for t in (q, v))
    message = f"Num hidden_dim should be less than or equal to {most} and hidden_dim"
    _check(fits, f"{error}{message} should be multiple of 8")
    fits = q.shape[1] % k.shape[1] == 0 and q.shape[1] % v.shape[1] == 0
    message = "number of heads for key and query must be a factor of number of heads"
    _check(fits, f"{error}For group-query attention, {message} for query")
    message = "The stride for the last dimension corresponding to the embedding size"
    dense = all(t.stride(-1) == 1 for t in (q, k, v))
    _check(dense, f"{error}{message} per head should be 1")
    _check(all(t.data_ptr() % 16 == 0 for t in (q, k, v)), MISALIGNED)
    # MHA.cpp, build_graph: HALF unless query is bf16, fp32 included; keys' and
    # values' dtypes are not looked at
    dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float16
    return dtype, [_grouped(raw(t, dtype), q) for t in (q, k, v)]


def _cudnn_writes(like: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    if like.dtype != dtype:  # halves written into memory of another dtype
        return torch.full_like(like, GARBAGE)
    return _fill(like, values)


def _layout(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """sdp_utils.h, alloc_with_matching_layout: dense, in the order of like's strides."""
    if tuple(like.shape) == shape:
        return torch.empty_like(like)
    strides, step = [0] * len(shape), 1
    far = [s or math.inf for s in like.stride()]
    for dim in sorted(range(len(shape)), key=far.__getitem__):
        strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=like.dtype)


def cudnn_forward(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    """aten::_scaled_dot_product_cudnn_attention, of (b, h, m, d)."""
    _only(attn_bias, dropout_p)
    (b, h, m, _), m_k = query.shape, key.shape[2]
    seed = torch.zeros((), dtype=torch.int64)
    rest = (None, None, m, m_k, seed, seed.clone(), None)
    if 0 in (query.numel(), key.numel(), value.numel()):
        return None, None, *rest  # MHA.cpp, run_cudnn_SDP_fprop: does nothing
    dtype, (q, k, v) = _cudnn_reads(query, key, value)
    hidden = hidden_keys(m, m_k, 0 if is_causal else None)  # set_causal_mask: top left
    found, lse = exact_attention(q, k, v, _scale(query, scale), hidden)
    out = _layout(query, (b, h, m, value.shape[3]))
    out = _cudnn_writes(out, found, dtype)
    return out, lse.float().unsqueeze(-1) if compute_log_sumexp else None, *rest


def cudnn_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    """aten::_scaled_dot_product_cudnn_attention_backward, of (b, h, m, d)."""
    _only(cum_seq_q, cum_seq_k, attn_bias)
    _only(dropout_p)
    tensors = (query, key, value, out, grad_out, logsumexp)
    if not all(t.numel() for t in tensors):
        # MHA.cpp, run_cudnn_SDP_bprop: does nothing
        return tuple(torch.full_like(t, GARBAGE) for t in tensors[:3])
    error = "cuDNN Frontend error: "
    (b, h, m, _), m_k = query.shape, key.shape[2]
    fits = m > 1 or m_k > 1  # cudnn_frontend, SDPA backward's validate
    _check(fits, f"{error}s_q = s_kv = 1 is not supported.")
    dtype, (q, k, v) = _cudnn_reads(query, key, value)
    _check(logsumexp.dim() == 4, f"{error}Stats should be (b, h, s_q, 1)")
    if grad_out.stride(-1) != 1:  # permute_to_matching_layout
        order = sorted(range(4), key=lambda i: -out.stride(i))
        back = [order.index(i) for i in range(4)]
        grad_out = grad_out.permute(order).contiguous().permute(back)
    # MHA.cpp, MHACacheKeyWrapper, up to 2.13: the key knows q, k and v alone
    graph = (dtype, max_q, max_k, bool(is_causal))
    graph += tuple((tuple(t.shape), t.stride()) for t in (query, key, value))
    baked = tuple(t.stride() for t in (out, grad_out, logsumexp))
    if graph not in CUDNN_GRAPHS:
        message = "The stride for the last dimension of O should be 1"
        _check(out.stride(-1) == 1, f"{error}{message}")
        CUDNN_GRAPHS[graph] = baked
    baked = CUDNN_GRAPHS[graph]
    shape = (b, h, m, value.shape[3])
    o, g = raw(out, dtype, shape, baked[0]), raw(grad_out, dtype, shape, baked[1])
    lse = raw(logsumexp, torch.float32, (b, h, m, 1), baked[2]).squeeze(-1)
    hidden = hidden_keys(m, m_k, 0 if is_causal else None)
    dq, *both = exact_backward(
        g, q, k, v, lse, (g * o).sum(-1), _scale(query, scale), hidden, dtype=dtype
    )
    dk, dv = (
        t.unflatten(1, (t_k.shape[1], -1)).sum(2) for t, t_k in zip(both, tensors[1:])
    )
    grads = zip(tensors, (dq, dk, dv))
    return tuple(_cudnn_writes(t, grad, dtype) for t, grad in grads)


_OPERATORS = {
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_efficient_attention": sdp_efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": sdp_efficient_backward,
    "_scaled_dot_product_flash_attention": sdp_forward,
    "_scaled_dot_product_flash_attention_backward": sdp_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
