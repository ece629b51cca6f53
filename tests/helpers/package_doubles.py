"""CPU doubles of the attention packages flash-attn 3 and 4 and xformers, beside those of
flash-attn 2 in notebooks/judge/flash_doubles.py, which says what a double is.

``installed(capability)`` puts all in place and undoes it; nothing happens at import.
xformers is the real package. It needs CPU versions of aten::_efficient_attention_*.
FA4 is flash_attn/cute/interface.py of flash-attn-4 4.0.0b36.
"""

import importlib.metadata
from collections import namedtuple
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module, reload
from types import ModuleType, SimpleNamespace
from unittest import mock

import flash_doubles
import torch
from flash_doubles import (
    GRADS,
    SAVED,
    backward,
    check,
    entry,
    exact_attention,
    exact_gradients,
    forward,
)
from torch.library import Library, _scoped_library

# Arguments of the compiled functions, which xformers calls, and of flash-attn 3.
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


def flash_attn(space: str) -> dict[str, dict]:
    """The modules of flash-attn 2 or 3, with the compiled functions."""
    if space == "flash_attn":
        made = flash_doubles.flash_attn_2()
        short = {"fwd": (forward, FA2_FWD), "bwd": (backward, FA2_BWD)}
        compiled = {n: entry(*how, False, True) for n, how in short.items()}
        inner = made["flash_attn.flash_attn_interface"]
        return made | {
            "flash_attn.flash_attn_interface": inner
            | {"flash_attn_gpu": SimpleNamespace(**compiled)}
        }
    schemas = {forward: FA3_FORWARD, backward: FA3_BACKWARD}
    functions = flash_doubles.operators(space, schemas, True)
    library = Library(space, "FRAGMENT")
    library.define(f"fwd({FA3_FWD}) -> (Tensor(out!), Tensor, Tensor, Tensor)")
    library.define(f"bwd({FA3_BWD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
    for name, run, schema in (("fwd", forward, FA3_FWD), ("bwd", backward, FA3_BWD)):
        library.impl(name, entry(run, schema, True, True), "CPU")
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
    made = {}
    get = "torch.cuda.get_device_capability"
    with mock.patch(get, lambda *_: capability), ExitStack() as stack:
        if "flash_attn_4" in packages:
            made |= flash_attn_4()
            stack.enter_context(mock.patch("importlib.metadata.distribution", known))
        for space in set(packages) - {"xformers", "flash_attn_4"}:
            made |= flash_attn(space)
        stack.enter_context(flash_doubles.placed(made))
        if fmha:
            stack.enter_context(xformers_on_cuda(fmha))
        yield
