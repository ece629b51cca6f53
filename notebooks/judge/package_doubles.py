"""CPU doubles of the attention packages flash-attn 2, 3 and 4 and xformers.

They have the contract of the real entry points and compute in float64. What a real one
refuses, they refuse with the same kind of error. Where it reads memory whatever a
tensor's strides or dtype say, they read the same memory: the result is as wrong.

``installed(capability)`` puts them in place and undoes it; nothing happens at import.
xformers is the real package. It needs CPU versions of aten::_efficient_attention_*.

FA2 is csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention, FA3
hopper/flash_api.cpp, FA4 flash_attn/cute/interface.py of flash-attn-4 4.0.0b36. Not
modelled: checks of the device type, dropout, alibi, fp8, ... Packed documents
(varlen) are those of FA2.
"""

import ast
import importlib.metadata
import sys
from collections import namedtuple
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module, reload
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch.library import Library, _scoped_library, custom_op
from torch.nn.functional import pad

GARBAGE = -30000.0  # read beyond an allocation, or never written


def check(condition: bool, message: str) -> None:  # TORCH_CHECK
    if not condition:
        raise RuntimeError(message)


def raw(t: torch.Tensor, dtype: torch.dtype, size=None, stride=None) -> torch.Tensor:
    """What a kernel reads from t's pointer, taking it for ``dtype`` and these strides
    (in elements; by default t's own), as float64; GARBAGE beyond the allocation.
    """
    if size is None and stride is None and t.dtype == dtype:
        return t.double()
    size = tuple(t.shape if size is None else size)
    stride = t.stride() if stride is None else stride
    memory = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    memory = memory[t.storage_offset() * t.element_size() :].clone()
    memory = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    at = torch.zeros(size, dtype=torch.int64)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = n
        at += (torch.arange(n) * step).view(shape)
    memory = pad(memory.double(), (0, 1), value=GARBAGE)
    return memory[at.clamp(max=memory.numel() - 1)]


def scores_of(a, *others: torch.Tensor):
    """Masked scores, what they are differentiated by, and q, k, v, others as float64
    (b, h, m, d).
    """
    (_, m, heads, d), n = a.q.shape, a.k.shape[1]
    q, *rest = (
        t.double().transpose(1, 2).repeat_interleave(heads // t.shape[2], 1)
        for t in (a.q, a.k, a.v, *others)
    )
    # FA2 src/mask.h, FA3 mask.h: the diagonal ends at the lower right. Causal is a
    # window of no key after; a window of -1 has no end.
    before, after = (
        getattr(a, f"window_size_{side}", -1) for side in ("left", "right")
    )
    after = 0 if a.is_causal else after
    seen = torch.ones(m, n, dtype=torch.bool).tril(n - m + after if after >= 0 else n)
    seen = seen.triu(n - m - before) if before >= 0 else seen
    seen = seen & getattr(a, "blocks", True)  # of FA4
    scale = d**-0.5 if a.softmax_scale is None else a.softmax_scale
    scores = scale * (q @ rest[0].mT)
    if cap := getattr(a, "softcap", 0.0):
        scores = cap * torch.tanh(scores / cap)
        scale = scale * (1 - (scores / cap) ** 2)
    return scores.masked_fill(~seen, -torch.inf), scale, q, *rest


def exact_attention(a, out: torch.Tensor) -> torch.Tensor:
    """The lse (b, h, m); ``out`` (b, m, h, d) is written."""
    scores, *_, v = scores_of(a)
    lse = scores.logsumexp(-1)
    p = scores.softmax(-1).masked_fill(lse.isneginf().unsqueeze(-1), 0.0)
    out.copy_((p @ v).transpose(1, 2))
    return lse


def check_inputs(a, hopper: bool, **others: torch.Tensor) -> None:
    """Device, dtypes, strides and sizes: mha_fwd and mha_bwd of FA2 and FA3 (d_v = d)."""
    q, tensors = a.q, {"query": a.q, "key": a.k, "value": a.v, **others}
    major = torch.cuda.get_device_capability()[0]
    check(major >= 8, "FlashAttention only supports Ampere GPUs or newer.")
    check(q.dtype.itemsize == 2, "FlashAttention only support fp16 and bf16 data type")
    for name, t in tensors.items():
        check(t.dtype == q.dtype, f"query and {name} must have the same dtype")
        check(t.stride(-1) == 1, f"{name} tensor must have contiguous last dimension")
    (b, _, h, d), (_, n, h_k, _) = q.shape, a.k.shape
    check(hopper or b > 0, "batch size must be positive")
    check(d <= 256, "FlashAttention only supports head dimension at most 256")
    check(d % 8 == 0, "head_size should be a multiple of 8")
    divides = h_k > 0 and h % h_k == 0
    check(divides, "Number of heads in key/value must divide number of heads in query")
    for name, t in tensors.items():
        want = (b, n, h_k, d) if name in ("key", "value", "dk", "dv") else q.shape
        check(t.shape == want, f"{name} must have shape {tuple(want)}")


def launch(hopper: bool, grid: bool, *tensors: torch.Tensor) -> None:
    """What fails on the device: an empty grid (FA2), an architecture without kernels (FA3
    setup.py), steps that are no 16 bytes (FA2 src/kernel_traits.h, uint128_t; FA3 TMA).
    """
    known = not hopper or torch.cuda.get_device_capability() <= (9, 0)
    check(known, "CUDA error: no kernel image is available for execution on the device")
    check(hopper or grid, "CUDA error: invalid configuration argument")
    why = "an illegal instruction was encountered" if hopper else "misaligned address"
    for t in filter(torch.Tensor.numel, tensors):
        steps = [s for s, size in zip(t.stride()[:-1], t.shape) if size > 1]
        off = t.data_ptr() % 16 or any(s % 8 for s in steps)
        check(not off, f"CUDA error: {why}")


def forward(a, hopper: bool):
    """mha_fwd of FA2, or of FA3 (``hopper``): out, lse and two more tensors."""
    check_inputs(a, hopper)
    out = a.q.new_empty(a.q.shape) if hopper else torch.empty_like(a.q)  # keeps strides
    lse = torch.zeros(out.transpose(1, 2).shape[:3])
    if a.k.shape[1] == 0:
        out.zero_(), lse.fill_(torch.inf)
    elif out.numel() or not hopper:
        launch(hopper, out.numel() > 0, a.q, a.k, a.v, out)
        found = exact_attention(a, out)
        # FA2 src/softmax.h, FA3 softmax.h: a row that sees nothing, or whose sum is nan.
        unseen = -torch.inf if hopper else torch.inf
        lse.copy_(found.masked_fill(found.isneginf() | found.isnan(), unseen))
    return out, lse, lse.new_empty(0), torch.zeros(2).long()


def exact_gradients(a, lse: torch.Tensor, dlse: torch.Tensor | None = None):
    """rowsum(dout * out) and dq, dk, dv (b, h, m, d), of the softmax that lse is of."""
    scores, scale, q, k, v, dout, out = scores_of(a, a.dout, a.out)
    # FA2 src/softmax.h, scale_apply_exp2; FA3 flash_bwd_preprocess_kernel.h; FA4
    # flash_bwd_preprocess.py.
    lse = lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)
    p = (scores - lse).exp()
    total = (dout * out).sum(-1, keepdim=True)
    less = total if dlse is None else total - dlse.double().unsqueeze(-1)
    ds = scale * p * (dout @ v.mT - less)  # scale: of each score, under a soft cap
    return total, ds @ k, ds.mT @ q, p.mT @ dout


def backward(a, hopper: bool):
    """mha_bwd of FA2, or of FA3: softmax_d, dq, dk, dv. Nothing checks the lse."""
    given = ((a.dq, a.q), (a.dk, a.k), (a.dv, a.v))
    dq, dk, dv = (torch.empty_like(like) if t is None else t for t, like in given)
    check_inputs(a, hopper, out=a.out, dout=a.dout, dq=dq, dk=dk, dv=dv)
    (b, m, h, d), n = a.q.shape, a.k.shape[1]
    rounded = not hopper or d <= 192 or not a.deterministic
    check(rounded, "Deterministic backward not supported for hdim 256.")
    softmax_d = torch.zeros(b, h, -(-m // 128) * 128)
    if b * m == 0 or (hopper and n == 0):
        return softmax_d, dq.zero_(), dk.zero_(), dv.zero_()
    grid = h * (n or a.deterministic) > 0
    launch(hopper, grid, a.dout, a.q, a.k, a.v, a.out, dq, dk, dv)
    # FA2 src/flash_bwd_kernel.h, row_offset_lse; FA3 flash_bwd_launch_template.h.
    lse = raw(a.softmax_lse, torch.float32, (b, h, m), (h * m, m, 1))
    total, *grads = exact_gradients(a, lse)
    dq.copy_(grads[0].transpose(1, 2))
    for into, grad in zip((dk, dv), grads[1:]):
        # FA2 rounds the gradients of shared heads before it sums them (dk_expanded).
        grad = grad if hopper else grad.to(into.dtype).double()
        into.copy_(grad.unflatten(1, (into.shape[2], -1)).sum(2).transpose(1, 2))
    softmax_d[:, :, :m] = total.squeeze(-1)
    return softmax_d, dq, dk, dv


def documents(a) -> list[SimpleNamespace]:
    """The documents of a packed call of FA2, mha_varlen_fwd, each as a call of its own;
    rows beyond max_seqlen are not reached.
    """
    limits = []
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        cu = getattr(a, name)
        check(cu.dtype == torch.int32, f"{name} must have dtype int32")
        check(cu.is_contiguous(), f"{name} must be contiguous")
        limits.append(pairwise(cu.tolist()))
    calls = []
    for (q_start, q_end), (k_start, k_end) in zip(*limits, strict=True):
        rows = slice(q_start, min(q_end, q_start + a.max_seqlen_q))
        keys = slice(k_start, min(k_end, k_start + a.max_seqlen_k))
        cut = {
            name: t[None, keys if name in ("k", "v", "dk", "dv") else rows]
            for name, t in vars(a).items()
            if name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        }
        calls.append(SimpleNamespace(**vars(a) | cut | {"rows": rows}))
    return calls


def varlen_forward(a, hopper: bool):
    """mha_varlen_fwd of FA2: out (total, h, d), lse (h, total) and two more."""
    out = torch.full_like(a.q, GARBAGE)
    lse = torch.full((a.q.shape[1], len(a.q)), GARBAGE)
    for call in documents(a):
        if call.q.numel():
            found = forward(call, hopper)
            out[call.rows], lse[:, call.rows] = found[0][0], found[1][0]
    return out, lse, lse.new_empty(0), torch.zeros(2).long()


def varlen_backward(a, hopper: bool):
    """mha_varlen_bwd of FA2, which reads lse as (h, total) whatever its strides are."""
    heads, total = a.q.shape[1], len(a.q)
    lse = raw(a.softmax_lse, torch.float32, (heads, total), (total, 1)).float()
    for call in documents(a):
        call.softmax_lse = lse[None, :, call.rows].contiguous()
        if call.k.numel():
            backward(call, hopper)
        else:
            call.dq.zero_()
    return (lse.new_zeros(heads, total),)


# Arguments of the Python functions (_FORWARD, _BACKWARD) and of the compiled ones.
SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
GRADS = "Tensor(dq!)? dq, Tensor(dk!)? dk, Tensor(dv!)? dv, "
REST = """float dropout_p, float softmax_scale, bool causal, SymInt window_size_left,
SymInt window_size_right, float softcap, Tensor? alibi_slopes, """
PACKED = """Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,
SymInt max_seqlen_k, """
FA2_FORWARD = f"Tensor q, Tensor k, Tensor v, {REST}bool return_softmax"
FA2_BACKWARD = f"{SAVED}{GRADS}{REST}bool deterministic, Tensor? rng_state=None"
FA2_VARLEN_BACKWARD = f"{SAVED}{GRADS}{PACKED}{REST}bool deterministic"
FA2_VARLEN_BACKWARD += ", Tensor? rng_state=None, bool zero_tensors=False"
REST = "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1,"
REST += "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
FA2_VARLEN_FORWARD = f"Tensor q, Tensor k, Tensor v, {PACKED}{REST}"
FA2_VARLEN_FORWARD += """bool return_softmax=False, Tensor? block_table=None,
Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False"""
REST = "softmax_scale, is_causal, window_size_left, window_size_right, softcap"
FA2_FWD = f"q, k, v, out_, alibi, p, {REST}, return_softmax, gen"
FA2_BWD = f"{SAVED}{GRADS}alibi, p, {REST}, deterministic, gen, rng_state"
GRADS = GRADS.replace(",", "=None,")
VARLEN = """Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,
Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, """
REST = """float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,
int window_size_right=-1, """
MORE = """page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale
k_descale v_descale"""
FA3_FWD = f"""Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None,
Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None,
{VARLEN.replace("seqlens_k=None,", "seqlens_k=None, Tensor? cu_seqlens_k_new=None,")}
{"".join(f"Tensor? {name}=None, " for name in MORE.split())}{REST}int attention_chunk=0,
float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None,
int num_splits=0, bool? pack_gqa=None, int sm_margin=0"""
REST += "float softcap=0.0, bool deterministic=False, int sm_margin=0"
FA3_BWD = SAVED + GRADS + VARLEN + REST
FA3_BACKWARD = SAVED + VARLEN.replace("seqused", "sequed") + GRADS + REST
FA3_FORWARD = FA3_FWD.replace("(k_new!)", "").replace("(v_new!)", "").replace("is_", "")
FA3_FORWARD = FA3_FORWARD.replace("q_v=", "qv=").replace("(out!)? out=", "? out_=")
FA3_FORWARD = FA3_FORWARD.replace("num_splits=0", "num_splits=1")
UNKNOWN = f"""dropout_p p alibi_slopes alibi gen k_new v_new q_v qv out_ pack_gqa
cu_seqlens_k_new seqused_q seqused_k sequed_q sequed_k attention_chunk
scheduler_metadata block_table leftpad_k {MORE}""".split()


def entry(run, schema: str, hopper: bool, compiled: bool):
    """The double of a function of flash_attn_interface.py, or a ``compiled`` one."""
    declared = [part.split()[-1].partition("=") for part in schema.split(",")]
    default = {name: ast.literal_eval(text or "None") for name, _, text in declared}
    packed = run in (varlen_forward, varlen_backward)

    def function(*args, **kwargs):
        given = default | dict(zip(default, args)) | kwargs
        unknown = UNKNOWN if packed else [*UNKNOWN, "cu_seqlens_q", "cu_seqlens_k"]
        if given.get("dropout_p", 1) < 2**-24:  # it keeps all that is at most 1 - p
            given["dropout_p"] = 0
        others = [name for name in unknown if given.get(name) not in (None, 0, -1)]
        if others:
            raise NotImplementedError(f"not part of these doubles: {others}")
        a = SimpleNamespace(**{"is_causal": given.get("causal")} | given)
        for name in () if compiled else ("dout", "q", "k", "v", "out"):
            t = given.get(name)  # maybe_contiguous, which leaves lse alone
            fp8 = hopper and run is forward and name == "v" and t.stride(-3) == 1
            if t is not None and t.stride(-1) != 1 and not fp8:
                vars(a)[name] = t.contiguous()
        found = run(a, hopper)
        goes_forward = run in (forward, varlen_forward)
        if goes_forward or not compiled:
            return found if goes_forward else found[0]
        return (found[0], *torch.zeros(4, 0)) if hopper else (*found[1:], found[0])

    # Callers look which arguments there are.
    names = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n, *_ in declared]
    ends = [Parameter.empty if not given else default[n] for n, given, _ in declared]
    names = [name.replace(default=end) for name, end in zip(names, ends)]
    vars(function)["__signature__"] = Signature(names)
    return function


class Flash(torch.autograd.Function):
    """FlashAttnFunc and FlashAttnVarlenFunc of flash-attn 2: lse has no gradient."""

    @staticmethod
    def forward(ctx, forward, backward, q, k, v, packed, options):
        scale = options.pop("softmax_scale")
        options["softmax_scale"] = q.shape[-1] ** -0.5 if scale is None else scale
        deterministic = options.pop("deterministic")
        out, lse, *_ = forward(q, k, v, **packed, **options, return_softmax=False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = backward, {**packed, **options, "deterministic": deterministic}
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, *_):
        (backward, options), (q, k, v, out, lse) = ctx.call, ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        backward(dout, q, k, v, out, lse, *grads, **options)
        return None, None, *grads, None, None


def public(forward, backward, packed: tuple[str, ...] = ()):
    """flash_attn_func, or with the names of ``packed`` flash_attn_varlen_func."""

    def flash_attn(
        q,
        k,
        v,
        *sizes,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        **named,
    ):
        sizes = dict(zip(packed, sizes)) | named
        assert set(sizes) == set(packed), f"not part of these doubles: {named}"
        options = {"dropout_p": dropout_p, "softmax_scale": softmax_scale}
        options |= {"causal": causal, "softcap": softcap, "alibi_slopes": alibi_slopes}
        options |= zip(("window_size_left", "window_size_right"), window_size)
        options["deterministic"] = deterministic
        out, lse = Flash.apply(forward, backward, q, k, v, sizes, options)
        return (out, lse, None) if return_attn_probs else out

    return flash_attn


def flash_attn(space: str) -> dict[str, dict]:
    """The modules of flash-attn 2 or 3. xformers calls the compiled functions."""
    hopper, functions, compiled = space == "flash_attn_3", {}, {}
    schemas = {forward: (FA2_FORWARD, FA2_FWD), backward: (FA2_BACKWARD, FA2_BWD)}
    schemas |= {varlen_forward: (FA2_VARLEN_FORWARD, "")}
    schemas |= {varlen_backward: (FA2_VARLEN_BACKWARD, "")}
    if hopper:
        schemas = {forward: (FA3_FORWARD, FA3_FWD), backward: (FA3_BACKWARD, FA3_BWD)}
    for run, (schema, below) in schemas.items():
        name = f"_flash_attn_{run.__name__}"
        returns, short, mutated = "(Tensor, Tensor, Tensor, Tensor)", "fwd", ()
        if run in (backward, varlen_backward):
            returns, short, mutated = "Tensor", "bwd", ("dq", "dk", "dv")
        options = {"schema": f"({schema}) -> {returns}", "device_types": "cpu"}
        make = custom_op(f"{space}::{name}", mutates_args=mutated, **options)
        functions[name] = make(entry(run, schema, hopper, False))
        if below:
            compiled[short] = entry(run, below, hopper, True)
    if not hopper:
        functions["flash_attn_gpu"] = SimpleNamespace(**compiled)
        lower = [functions[f"_flash_attn_{run.__name__}"] for run in schemas]
        packed = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        # Their registered operators, by the names that callers import.
        functions |= {
            f"_wrapped{n}": functions[n] for n in list(functions) if n[0] == "_"
        }
        functions["flash_attn_func"] = public(*lower[:2])
        functions["flash_attn_varlen_func"] = public(*lower[2:], packed)
        inner = {"flash_attn.flash_attn_interface": functions}
        outer = {n: f for n, f in functions.items() if n.endswith("_func")}
        return {"flash_attn": {"__version__": "2.8.3"} | outer} | inner
    library = Library(space, "FRAGMENT")
    library.define(f"fwd({FA3_FWD}) -> (Tensor(out!), Tensor, Tensor, Tensor)")
    library.define(f"bwd({FA3_BWD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
    for name, function in compiled.items():
        library.impl(name, function, "CPU")
    made = {space: {"undo": library._destroy}, f"{space}._C": {}}
    return made | {"flash_attn_interface": functions}


def check_4(a, least: int, like_q: dict, like_k: dict) -> None:
    """The assertions of FA4: capability, head_dim, shapes and dtypes."""
    q, (b, m, h, d), (_, n, h_k, _) = a.q, a.q.shape, a.k.shape
    major = torch.cuda.get_device_capability()[0]
    assert major in range(least, 13), "Unsupported compute capability."
    for name, t in (like_q | like_k).items():
        shape = (b, n, h_k, d) if name in like_k else (b, m, h, d)
        assert t.shape == shape, f"{name} shape {tuple(t.shape)} != expected {shape}"
        assert t.dtype == q.dtype, "inputs must have the same dtype"
    assert q.dtype.itemsize == 2, "inputs must be float16 or bfloat16"
    assert h % h_k == 0, "num_head must be divisible by num_head_kv"
    if major in (9, 10, 11):  # _validate_head_dims
        known = 8 <= d <= (256 if major == 9 else 128) or d == 256
        assert known and d % 8 == 0, f"head_dim {d} is not supported"


def read_4(t: torch.Tensor) -> torch.Tensor:
    """maybe_contiguous: FA4 copies what is not aligned, lse too."""
    steps = t.stride()[:-1]
    off = any(s * t.element_size() % 16 for s in (*steps, t.data_ptr()))
    dense = t.is_contiguous() and not t.data_ptr() % 16
    return t if dense or (t.stride(-1) == 1 and not off) else t.contiguous()


FIELDS = "mask_block_cnt mask_block_idx full_block_cnt full_block_idx block_size"
Lists = namedtuple("BlockSparseTensorsTorch", FIELDS, defaults=(None,) * 3)


def seen_4(a, lists: Lists | None, by_key: bool):
    """The pairs that lists of blocks show, bool (m, n), as the kernels of 9.0 read them."""
    if lists is None:
        return True
    m, n, d = a.q.shape[1], a.k.shape[1], a.q.shape[3]
    assert torch.cuda.get_device_capability()[0] == 9 and d <= 128, "tiles of 128 x 128"
    assert lists.block_size == (128, 128) and not lists.mask_block_cnt.any()
    rows, cols = (-(-x // 128) for x in ((n, m) if by_key else (m, n)))
    counts, index = lists.full_block_cnt, lists.full_block_idx
    assert counts.dtype == index.dtype == torch.int32, "must have dtype torch.int32"
    assert counts.shape == (1, 1, rows) and index.shape[:3] == counts.shape
    assert index.shape[3] <= cols, "n-block dimension"
    seen = torch.zeros(rows, cols, dtype=torch.bool)
    for row in range(rows):
        listed = index[0, 0, row, : counts[0, 0, row]].long()
        seen[row, listed] = True
        # Of the keys behind the end those of the last block listed are masked alone.
        check(by_key or listed.equal(listed.sort()[0]), "reads behind the last key")
    seen = seen.mT if by_key else seen
    return seen.repeat_interleave(128, 0).repeat_interleave(128, 1)[:m, :n]


def forward_4(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    return_lse=False,
    block_sparse_tensors=None,
    pack_gqa=None,
):
    """_flash_attn_fwd: out, lse (None unless asked for) and three more."""
    packs = pack_gqa is None and q.shape[2] > k.shape[2]
    assert block_sparse_tensors is None or not packs, "not modelled"
    a = SimpleNamespace(softmax_scale=softmax_scale, is_causal=causal)
    a.q, a.k, a.v = map(read_4, (q, k, v))
    check_4(a, 8, {"q": q}, {"k": k, "v": v})
    a.blocks = seen_4(a, block_sparse_tensors, False)
    out, lse = q.new_zeros(q.shape), torch.full(q.transpose(1, 2).shape[:3], -torch.inf)
    if out.numel() and k.shape[1]:
        found = exact_attention(a, out)
        # softmax.py, finalize: a row that sees nothing, or whose sum is nan.
        lse.copy_(found.masked_fill(found.isnan(), -torch.inf))
    return out, lse if return_lse else None, None, None, None


def backward_4(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    *,
    dq=None,
    dk=None,
    dv=None,
    deterministic=False,
    block_sparse_tensors=None,
    dlse=None,
):
    """_flash_attn_bwd: dq, dk, dv, which are written by 16 bytes."""
    given = ((dq, q), (dk, k), (dv, v))
    dq, dk, dv = (torch.empty_like(like) if t is None else t for t, like in given)
    a = SimpleNamespace(softmax_scale=softmax_scale, is_causal=causal)
    a.q, a.k, a.v, a.out, a.dout = map(read_4, (q, k, v, out, dout))
    like_q = {"q": q, "out": out, "dout": dout, "dq": dq}
    check_4(a, 9, like_q, {"k": k, "v": v, "dk": dk, "dv": dv})
    assert lse.shape == q.transpose(1, 2).shape[:3], "lse must have shape (b, h, m)"
    assert lse.dtype == torch.float32, "lse must be float32"
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    for t in (dq, dk, dv):
        dense = t.stride(-1) == 1 and 0 not in t.stride() and not t.data_ptr() % 16
        check(dense, "a gradient is not aligned to 16 bytes, or has no last dimension")
    a.blocks = seen_4(a, block_sparse_tensors, True)
    if dlse is not None:  # of rows that see nothing it is not read: no list has them
        dlse = dlse.masked_fill(lse.isneginf(), 0.0)
    _, *grads = exact_gradients(a, lse.double(), dlse)
    for into, grad in zip((dq, dk, dv), grads):
        # Shared heads are summed in fp32.
        shared = grad.unflatten(1, (into.shape[2], -1)).sum(2)
        into.copy_(shared.transpose(1, 2))
    return dq, dk, dv


def known(package: str, look_up=importlib.metadata.distribution):
    """importlib.metadata.distribution, where FA4 is installed."""
    four = SimpleNamespace(version="4.0.0b36", read_text=lambda file: None)
    return four if package == "flash-attn-4" else look_up(package)


def flash_attn_4() -> dict[str, dict]:
    """The modules of flash-attn-4, whose outer one is that of FA2 if both are there."""
    functions = {"_flash_attn_fwd": forward_4, "_flash_attn_bwd": backward_4}
    names = ("flash_attn", {}), ("flash_attn.cute", {})
    lists = {"flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": Lists}}
    return dict(names) | lists | {"flash_attn.cute.interface": functions}


def torch_flash_forward(q, k, v, *rest, scale=None, **_):
    """aten::_flash_attention_forward, torch's own FA2: attention.cu."""
    a = SimpleNamespace(q=q, k=k, v=v, is_causal=rest[5], softmax_scale=scale)
    out, lse, empty, state = forward(a, False)
    return out, lse, state, state.clone(), empty


def torch_flash_backward(dout, q, k, v, out, lse, *rest, scale=None, **_):
    """attention_backward.cu, which makes dout and out contiguous."""
    a = SimpleNamespace(q=q, k=k, v=v, is_causal=rest[5], softmax_scale=scale)
    a.dout, a.out, a.softmax_lse = dout.contiguous(), out.contiguous(), lse
    a.dq = a.dk = a.dv = a.deterministic = None
    return backward(a, False)[1:]


class OnCuda(torch.Tensor):
    """A view of a tensor that says it is on a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))


@contextmanager
def xformers_on_cuda(fmha: ModuleType):
    """xformers chooses operators as on CUDA, and looks for flash-attn once more."""
    choose = fmha.dispatch._run_priority_list

    def on_cuda(name, operators, given, *rest):
        tensors = {n: getattr(given, n) for n in ("query", "key", "value")}
        tensors = {n: t.as_subclass(OnCuda) for n, t in tensors.items()}
        return choose(name, operators, replace(given, **tensors), *rest)

    with (
        mock.patch("torch.version.cuda", "12.8"),
        mock.patch("torch.backends.cuda.is_flash_attention_available", lambda: True),
        mock.patch("xformers.ops.fmha.common._built_with_cuda", True),
        mock.patch("xformers.ops.fmha.dispatch._run_priority_list", on_cuda),
        mock.patch("xformers.ops.common.OPERATORS_REGISTRY", []),
        mock.patch("xformers.ops.common.FUNC_TO_XFORMERS_OPERATOR", {}),
        mock.patch.dict("torch.utils.flop_counter.flop_registry"),
        mock.patch.dict(vars(fmha.flash)),
        mock.patch.dict(vars(fmha.flash3)),
        _scoped_library("aten", "IMPL") as library,
    ):
        library.impl("_flash_attention_forward", torch_flash_forward, "CPU")
        library.impl("_flash_attention_backward", torch_flash_backward, "CPU")
        for part in (reload(fmha.flash), reload(fmha.flash3)):
            for name in ("_flash_fwd", "_flash_bwd", "mha_fwd", "mha_bwd"):
                if operator := getattr(part, name, None):
                    operator.register_kernel("cpu", operator._init_fn)
        yield


@contextmanager
def installed(
    capability=(9, 0),
    packages=("flash_attn", "flash_attn_3", "flash_attn_4", "xformers"),
):
    """Within, these packages are there, as on a device of this compute capability."""
    fmha = "xformers" in packages and import_module("xformers.ops.fmha")
    made, operators = {}, torch._library.custom_ops.OPDEF_TO_LIB
    get, own = "torch.cuda.get_device_capability", ("flash_attn", "xformers_flash")
    with mock.patch(get, lambda *_: capability), ExitStack() as stack:
        try:
            if "flash_attn_4" in packages:
                made |= flash_attn_4()
                stack.enter_context(
                    mock.patch("importlib.metadata.distribution", known)
                )
            for space in set(packages) - {"xformers", "flash_attn_4"}:
                made |= flash_attn(space)
            for name, contents in made.items():
                sys.modules[name] = module = ModuleType(name)
                stack.callback(sys.modules.pop, name)
                vars(module).update(contents, __path__=[])
                module.__spec__ = ModuleSpec(name, None, is_package=True)
                outer, _, inner = name.rpartition(".")
                vars(sys.modules[outer or name])[inner] = module
                stack.callback(contents.get("undo", int))
            if fmha:
                stack.enter_context(xformers_on_cuda(fmha))
            yield
        finally:
            for name in [n for n in operators if n.startswith(own)]:
                operators.pop(name)._destroy()
