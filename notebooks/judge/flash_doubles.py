"""CPU doubles of flash-attn 2: its operators, and torch's own, which are the same code.

They have the contract of the real entry points and compute in float64. What a real one
refuses, they refuse with the same kind of error. Where it reads memory whatever a
tensor's strides or dtype say, they read the same memory: the result is as wrong.
``placed(flash_attn_2())`` puts them in place and undoes it.

FA2 is csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention, FA3 (``hopper``)
hopper/flash_api.cpp. Not modelled: checks of the device type, dropout, alibi, fp8, ...
Packed documents (varlen) are those of FA2.
"""

import ast
import sys
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import torch
from torch.library import custom_op
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
    """The documents of a packed call of FA2, mha_varlen_fwd, each as a call of its own."""
    limits = []
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        cu = getattr(a, name)
        check(cu.dtype == torch.int32, f"{name} must have dtype int32")
        check(cu.is_contiguous(), f"{name} must be contiguous")
        limits.append(pairwise(cu.tolist()))
    calls = []
    for (q_start, q_end), (k_start, k_end) in zip(*limits, strict=True):
        rows, keys = slice(q_start, q_end), slice(k_start, k_end)
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
            # The grid is of max_seqlen_q: rows beyond are never written.
            out[call.rows.start + a.max_seqlen_q : call.rows.stop] = GARBAGE
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


# Arguments of the Python functions, without those that none passes.
SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
GRADS = "Tensor(dq!)? dq, Tensor(dk!)? dk, Tensor(dv!)? dv, "
REST = """float dropout_p, float softmax_scale, bool causal, SymInt window_size_left,
SymInt window_size_right, float softcap, Tensor? alibi_slopes, """
PACKED = """Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,
SymInt max_seqlen_k, """
QKV = "Tensor q, Tensor k, Tensor v, "
NO_RANDOM = "bool deterministic, Tensor? rng_state=None"
FA2 = {
    forward: f"{QKV}{REST}bool return_softmax",
    backward: f"{SAVED}{GRADS}{REST}{NO_RANDOM}",
    varlen_forward: QKV
    + PACKED
    + """float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1,
    SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None,
    bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None,
    Tensor? seqused_k=None, bool zero_tensors=False""",
    varlen_backward: f"{SAVED}{GRADS}{PACKED}{REST}{NO_RANDOM}, bool zero_tensors=False",
}
# What no double knows, of flash-attn 3 too.
UNKNOWN = """dropout_p p alibi_slopes alibi gen k_new v_new q_v qv out_ pack_gqa
cu_seqlens_k_new seqused_q seqused_k sequed_q sequed_k attention_chunk block_table
scheduler_metadata leftpad_k page_table kv_batch_idx rotary_cos rotary_sin
seqlens_rotary q_descale k_descale v_descale""".split()


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
    """FlashAttnFunc of flash-attn 2, whose lse has no gradient."""

    @staticmethod
    def forward(ctx, functions, q, k, v, options, deterministic):
        out, lse, *_ = functions[0](q, k, v, **options, return_softmax=False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = functions[1], options | {"deterministic": deterministic}
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        (backward, options), saved = ctx.call, ctx.saved_tensors
        grads = [torch.empty_like(t) for t in saved[:3]]
        backward(dout, *saved, *grads, **options)
        return None, *grads, None, None


def operators(space: str, schemas: dict, hopper: bool) -> dict:
    """The functions of ``space`` with these schemas, registered as it registers them."""
    functions = {}
    for run, schema in schemas.items():
        name = f"_flash_attn_{run.__name__}"
        returns, mutated = "(Tensor, Tensor, Tensor, Tensor)", ()
        if "dout" in schema:
            returns, mutated = "Tensor", ("dq", "dk", "dv")
        options = {"schema": f"({schema}) -> {returns}", "device_types": "cpu"}
        make = custom_op(f"{space}::{name}", mutates_args=mutated, **options)
        functions[name] = make(entry(run, schema, hopper, False))
    return functions


def flash_attn_2() -> dict[str, dict]:
    """The modules of flash-attn 2."""
    functions = operators("flash_attn", FA2, False)
    lower = [*functions.values()][:2]

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        options = {"dropout_p": dropout_p, "softmax_scale": scale, "causal": causal}
        options |= zip(("window_size_left", "window_size_right"), window_size)
        options |= {"softcap": softcap, "alibi_slopes": alibi_slopes}
        out, lse = Flash.apply(lower, q, k, v, options, deterministic)
        return (out, lse, None) if return_attn_probs else out

    # The registered operators, by the names that callers import.
    functions |= {f"_wrapped{name}": each for name, each in functions.items()}
    public = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": None}
    functions["flash_attn_gpu"] = SimpleNamespace()  # xformers looks for it
    inner = {"flash_attn.flash_attn_interface": functions | public}
    return {"flash_attn": {"__version__": "2.8.3"} | public} | inner


@contextmanager
def placed(modules: dict[str, dict]):
    """Within, these modules are there, with what they hold; "undo" is called at the end."""
    known = torch._library.custom_ops.OPDEF_TO_LIB
    with ExitStack() as stack:
        try:
            for name, contents in modules.items():
                sys.modules[name] = module = ModuleType(name)
                stack.callback(sys.modules.pop, name)
                vars(module).update(contents, __path__=[])
                module.__spec__ = ModuleSpec(name, None, is_package=True)
                outer, _, inner = name.rpartition(".")
                vars(sys.modules[outer or name])[inner] = module
                stack.callback(contents.get("undo", int))
            yield
        finally:
            own = ("flash_attn", "xformers_flash")
            for name in [n for n in known if n.startswith(own)]:
                known.pop(name)._destroy()


def sdp_call(tensors: dict, is_causal: bool, scale, dropout_p: float):
    """A call of the operators below, of (b, h, n, d), as one of flash-attn."""
    if dropout_p:
        raise NotImplementedError("not part of these doubles: dropout")
    turned = {name: t.transpose(1, 2) for name, t in tensors.items()}
    return SimpleNamespace(is_causal=is_causal, softmax_scale=scale, **turned)


def sdp_forward(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    """aten::_scaled_dot_product_flash_attention of a GPU, of (b, h, n, d)."""
    call = sdp_call({"q": q, "k": k, "v": v}, is_causal, scale, dropout_p)
    out, lse, empty, _ = forward(call, False)
    seed = torch.zeros(2, dtype=torch.uint64)
    sizes = q.shape[2], k.shape[2]
    return out.transpose(1, 2), lse, None, None, *sizes, seed, seed[0], empty


def sdp_backward(dout, q, k, v, out, lse, *rest, scale=None):
    """aten::_scaled_dot_product_flash_attention_backward of a GPU, which makes dout and
    out contiguous.
    """
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
    a = sdp_call(tensors, rest[5], scale, rest[4])
    a.out, a.dout, a.softmax_lse = a.out.contiguous(), a.dout.contiguous(), lse
    a.dq = a.dk = a.dv = a.deterministic = None
    return tuple(grad.transpose(1, 2) for grad in backward(a, False)[1:])


NAMES = {
    sdp_forward: "_scaled_dot_product_flash_attention",
    sdp_backward: "_scaled_dot_product_flash_attention_backward",
}
