"""How each implementation is called, what it offers and what was found in its source.

An adapter hands a statement over: it cuts the shards in the layout that the
implementation wants, names windows, documents and scales as it does, and returns the rows
that this rank owns. Numbers of lines are those of the named version.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import ringlab
import torch
import torch.distributed as dist
from cells import Adapter, Call, Result
from ringlab.blocks import sliding_window
from statements import Statement
from torch import nn

# --------------------------------------------------------------------------------------
# ringlab


def with_ringlab(call: Call, scheme: str, layout: str = "contiguous") -> Result:
    s, group = call.statement, dist.group.WORLD if scheme else None
    if ", " in scheme:
        scheme = tuple(scheme.split(", "))
        group = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    pattern = s.pattern_of(s.n)
    if s.window:  # the keys before and after; tokens counts the query too
        pattern = sliding_window(tokens=max(s.window) + 1)
    rows = call.rows(layout)
    q, k, v = call.shards(rows)
    if isinstance(pattern, ringlab.Selected):  # a rank lists the keys of its queries
        pattern = replace(pattern, indices=pattern.indices[:, :, rows])
        scheme = "auto" if scheme == "plan" else scheme
    options = {"causal": s.causal, "scale": s.scale, "softcap": s.softcap}
    if s.how == "chunks":
        sizes = {"heads": s.heads, "head_dim": s.width, "max_seq_len": s.n}
        cache = ringlab.KVCache(pattern, batch=s.batch, **sizes)
        chunks = zip(*(x.split([24, 1, 39], 1) for x in (q, k, v)))
        steps = [
            ringlab.attention(*step, pattern, causal=True, cache=cache)
            for step in chunks
        ]
        return torch.cat(steps, 1), rows, None
    if group is not None:
        options |= {"group": group, "scheme": scheme, "layout": call.layout(layout)}
    options |= {"sinks": call.sinks, "lengths": s.lengths or None}
    options |= {"cu_seqlens": call.limits if s.documents else None}
    out, lse = ringlab.attention(q, k, v, pattern, return_lse=True, **options)
    return out, rows, lse


# --------------------------------------------------------------------------------------
# ring-flash-attn


def flash_options(call: Call) -> dict:
    s = call.statement
    window = s.window or (-1, -1)
    return {"causal": s.causal, "softmax_scale": s.scale, "window_size": window}


def padded(call: Call, multiple: int) -> Call:
    """The call with zeros behind its rows, up to a multiple, as layers pad them."""
    more, n = -call.statement.n % multiple, call.statement.n
    tensors = {x: getattr(call, x) for x in "qkv"}
    wide = {x: nn.functional.pad(t, [0] * 5 + [more]) for x, t in tensors.items()}
    return replace(call, statement=replace(call.statement, n=n + more), **wide)


def packed_rows(call: Call, layout: str) -> torch.Tensor:
    """The rows of a rank where each document is cut by itself."""
    limits = call.limits.tolist()
    parts = []
    for start, stop in zip(limits, limits[1:]):
        one = replace(call, statement=replace(call.statement, n=stop - start))
        parts += [start + one.rows(layout)] if stop > start else []
    return torch.cat(parts)


def with_ring_flash_attn(call: Call, name: str, layout: str = "contiguous") -> Result:
    # Its adapters to Hugging Face import names of an older transformers.
    names = dict.fromkeys(("substitute_hf_flash_attn", "update_ring_flash_attn_params"))
    sys.modules["ring_flash_attn.adapters"] = SimpleNamespace(**names)
    import ring_flash_attn as package

    options, s, limits = flash_options(call), call.statement, call.limits
    rows, gathers = call.rows(layout), name == "llama3_flash_attn"
    packed = gathers or s.documents
    if gathers:
        about = package.llama3_flash_attn_prepare_cu_seqlens(
            limits, s.causal, call.rank, call.ranks
        )
        names = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k local_k_slice"
        options |= dict(zip(names.split(), about)) | {"heads_k_stride": 1}
    elif packed:
        rows = packed_rows(call, layout)
        options["cu_seqlens"] = (limits // call.ranks).int()
        options["max_seqlen"] = max(s.documents) // call.ranks
    function = getattr(package, f"{name}_{'varlen_' if packed else ''}func")
    shards = (x[0] if packed else x for x in call.shards(rows))
    out, lse, _ = function(*shards, return_attn_probs=True, **options)
    return (out[None], rows, lse[None]) if packed else (out, rows, lse)


# --------------------------------------------------------------------------------------
# yunchang


def with_yunchang(call: Call, ring: str, ulysses: int, xfuser=False) -> Result:
    import yunchang
    from yunchang.comm.extract_local import EXTRACT_FUNC_DICT

    s, options, first = call.statement, flash_options(call), ()
    if ring == "ulysses":
        rows, attention = call.rows(), yunchang.UlyssesAttention(dist.group.WORLD)
    else:
        sizes = ulysses, call.ranks // ulysses
        yunchang.set_seq_parallel_pg(*sizes, call.rank, call.ranks)
        positions = torch.arange(s.n).reshape(1, s.n, 1, 1)
        cut = EXTRACT_FUNC_DICT[ring]
        rows = cut(positions, call.rank, call.ranks, rd=sizes[1], ud=ulysses).flatten()
        attention = yunchang.LongContextAttention(ring_impl_type=ring)
    if xfuser:
        attention, first = xfuser_layer()(), (None,)
    else:
        options["softcap"] = s.softcap or 0.0
    return attention(*first, *call.shards(rows), **options), rows, None


@cache
def xfuser_layer() -> type[nn.Module]:
    """Its layer, without its pipelines, which import what is not here. Imported, it looks
    for a GPU.
    """
    [folder] = find_spec("xfuser").submodule_search_locations
    for name, path in (("xfuser", folder), ("xfuser.core", f"{folder}/core")):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [path]
    around = mock.MagicMock()  # whose names are there, and which says that it is a GPU
    for name in ("envs", "core.distributed", "core.cache_manager.cache_manager"):
        sys.modules[f"xfuser.{name}"] = around
    layers = "xfuser.core.long_ctx_attention"
    sys.modules[f"{layers}.ring.ring_npu_flash_attn"] = around
    return import_module(layers).xFuserLongContextAttention


# --------------------------------------------------------------------------------------
# axolotl-ringmaster


def with_ringmaster(
    call: Call, backend: str, balance="none", rotate="allgather"
) -> Result:
    import ringmaster
    from ringmaster.strategies.ring import make_ring_attention
    from ringmaster.strategies.ulysses import make_ulysses_attention

    zigzag = balance == "head_tail"
    call = padded(call, call.ranks * (1 + zigzag))
    s = call.statement
    config = ringmaster.RingmasterConfig(
        size=call.ranks,
        backend=ringmaster.Backend(backend),
        load_balance=ringmaster.LoadBalance(balance),
        rotate_method=ringmaster.RotateMethod(rotate),
    )
    mesh = dist.init_device_mesh("cpu", (call.ranks,), mesh_dim_names=("cp",))
    runtime = ringmaster.setup(
        config, num_kv_heads=s.kv_heads, device_mesh=mesh, inner_attn="sdpa"
    )
    if s.documents or zigzag:  # whose code for a CPU is that of documents
        runtime.varlen = call.limits, max(s.documents or (s.n,))
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = s.heads // s.kv_heads, s.causal
    if backend == "ulysses":
        attend = make_ulysses_attention("sdpa")
    else:  # its blocks for a CPU
        attend = make_ring_attention("math", "math", config.rotate_method)
    rows = call.rows("zigzag" if zigzag else "contiguous")
    q, k, v = (x.transpose(1, 2) for x in call.shards(rows))
    options = {"scaling": s.scale, "is_causal": s.causal}
    # As Gemma 2 and gpt-oss of transformers hand them to their attention.
    options |= {"softcap": s.softcap} if s.softcap else {}
    options |= {"s_aux": call.sinks} if s.sinks else {}
    options["sliding_window"] = s.window[0] + 1 if s.window else None
    return attend(module, q, k, v, None, **options)[0], rows, None


# --------------------------------------------------------------------------------------
# diffusers


def with_diffusers(call: Call, kind: str) -> Result:
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    s, anything = call.statement, call.statement.n % call.ranks > 0
    sizes = (call.ranks, 1) if kind == "ring" else (1, call.ranks)
    anything |= kind == "ulysses" and s.heads % call.ranks > 0
    options = dict(zip(("ring_degree", "ulysses_degree"), sizes))
    options |= {f"{kind}_anything": True} if anything else {}
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(ContextParallelConfig(**options))
    config.setup(call.rank, call.ranks, torch.device("cpu"), mesh=mesh)
    rows, more, causal = call.rows(), {}, s.causal
    mask = rows < torch.tensor(s.lengths)[:, None] if s.lengths else None
    if s.window and kind == "ring":
        more, causal = {"window_size": s.window}, False
    elif kind == "ulysses" and (s.causal or s.window or s.documents or s.pattern):
        mask, causal = dense_mask(call), False
    if s.how == "lse gradient":
        more = {"return_lse": True}
    out = dispatch_attention_fn(
        *call.shards(rows),
        attn_mask=mask,
        is_causal=causal,
        scale=s.scale,
        enable_gqa=s.kv_heads < s.heads,
        attention_kwargs=more,
        backend="flash" if kind == "ring" else "native",
        parallel_config=config,
    )
    if s.how == "lse gradient":
        return out[0], rows, out[1].transpose(1, 2)
    return out, rows, None


# --------------------------------------------------------------------------------------
# DeepSpeed


def weights(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """How often each query sees each key, int64 (batch, heads, rows, n)."""
    s, keys = call.statement, torch.arange(call.statement.n)
    pattern, about = s.pattern_of(s.n), {"heads": s.heads, "n": s.n}
    each = [
        pattern.multiplicity(rows, keys, head=head, **about).reshape(len(rows), s.n)
        for head in range(s.heads)
    ]
    seen = torch.stack(each)  # (heads, rows, n)
    if s.causal:
        seen = seen * (keys <= rows[:, None])
    if s.documents:
        document = torch.repeat_interleave(torch.tensor(s.documents))
        seen = seen * (document[rows][:, None] == document)
    lengths = torch.tensor(s.lengths or [s.n] * s.batch)
    return seen * (keys < lengths[:, None, None, None])


def dense_mask(call: Call) -> torch.Tensor:
    """The pairs that all heads see, bool (batch, 1, n, n), for torch's attention."""
    return weights(call, torch.arange(call.statement.n))[:, :1] > 0


def with_deepspeed(call: Call) -> Result:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None):
        deepspeed.init_distributed("gloo", verbose=False)  # without compiling
    s = call.statement
    mask = dense_mask(call)

    def local(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, scale=s.scale, enable_gqa=s.kv_heads < s.heads
        )
        return out.transpose(1, 2)

    rows = call.rows()
    groups._get_sequence_parallel_rank = lambda: call.rank  # as its own mesh says
    attention = DistributedAttention(local, dist.group.WORLD, 2, 1)
    return attention(*call.shards(rows), 0), rows, None


# --------------------------------------------------------------------------------------
# packages of lucidrains


def grouped(x: torch.Tensor, kv_heads: int, back: bool = False) -> torch.Tensor:
    """Heads in the order (g h) of einops: head i shares K/V head i mod kv_heads."""
    sizes = (-1, kv_heads) if back else (kv_heads, -1)
    return x.unflatten(2, sizes).transpose(2, 3).flatten(2, 3)


BUCKET = 8  # of queries and keys


def with_ring_attention_pytorch(call: Call, striped: bool) -> Result:
    from ring_attention_pytorch import ring_flash_attn

    lengths = call.statement.lengths
    if call.statement.n % (call.ranks * BUCKET):  # as its layer pads and masks
        lengths, call = (call.statement.n,), padded(call, call.ranks * BUCKET)
    s = call.statement
    rows = call.rows()
    if striped:  # bucket i has every i-th position of the whole sequence
        order = torch.arange(s.n).reshape(BUCKET, -1).T.flatten()
        rows = order.tensor_split(call.ranks)[call.rank]
    q, k, v = call.shards(rows)
    mask = rows < torch.tensor(lengths)[:, None] if lengths else None
    out = ring_flash_attn(
        grouped(q, s.kv_heads),
        k,
        v,
        mask,
        s.causal,
        1 if s.window else BUCKET,
        True,
        striped,
        s.window[0] if s.window else None,
        softclamp_qk_sim=s.softcap is not None,
        softclamp_value=s.softcap or 50.0,
    )
    return grouped(out, s.kv_heads, back=True), rows, None


def with_local_attention(call: Call) -> Result:
    from local_attention import LocalAttention

    s = call.statement
    options = {"window_size": 16, "look_backward": 4, "look_forward": 4}
    if s.window:
        options = {"window_size": s.window[0], "exact_windowsize": True}
        options["look_forward"] = 1
    options |= {"look_forward": 0} if s.causal else {}
    options |= {} if s.scale is None else {"scale": s.scale}
    attention = LocalAttention(causal=s.causal, autopad=True, **options)
    rows = call.rows()
    q, k, v = (x.transpose(1, 2) for x in call.shards(rows))
    seen = {}
    if s.lengths:
        seen["mask"] = torch.arange(s.n) < torch.tensor(s.lengths)[:, None]
    return attention(q, k, v, **seen).transpose(1, 2), rows, None


# --------------------------------------------------------------------------------------
# transformers: a layer of a model, whose mask, cache and scale the model makes


class Given(nn.Module):
    """In place of a projection: it returns a tensor."""

    def forward(self, x):
        return self.tensor


class Found(Exception):
    """What a layer's attention returns, before it is projected."""


class Caught(nn.Module):
    def forward(self, x):
        raise Found(x)


def with_transformers(call: Call, kind: str, kernel: str) -> Result:
    import transformers

    s, sizes = call.statement, {"hidden_size": 64, "intermediate_size": 8}
    sizes |= {"num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 8, "head_dim": s.width}
    sizes["sliding_window"] = s.window[0] + 1 if s.window else s.n
    sizes |= {"use_sliding_window": bool(s.window), "max_window_layers": 0}
    if s.softcap or s.sinks:
        sizes["layer_types"] = ["full_attention"]
    if s.scale is not None:
        kind, sizes["attention_multiplier"] = "Granite", s.scale
    if s.softcap:
        kind, sizes["attn_logit_softcapping"] = "Gemma2", s.softcap
        sizes["query_pre_attn_scalar"] = s.width
    if s.sinks:
        kind, sizes["num_local_experts"] = "GptOss", 2
    config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=0)
    model = transformers.AutoModel.from_config(config, attn_implementation=kernel)
    layer = model.layers[0].self_attn
    layer.q_proj, layer.k_proj, layer.v_proj = Given(), Given(), Given()
    layer.o_proj = Caught()
    rotary = model.rotary_emb  # by no angle
    rotary.inv_freq.zero_()
    rotary.attention_scaling = 1.0
    if s.sinks:
        del layer.sinks
        layer.sinks = call.sinks
    rows = call.rows()
    shards = [x.flatten(2) for x in call.shards(rows)]
    lengths = s.documents or (s.n,)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    chunks, cache = [s.n], None
    if s.how == "chunks":
        chunks, cache = [24, 1, 39], transformers.DynamicCache(config=config)
    outs = []
    for *parts, at in zip(*(x.split(chunks, 1) for x in (*shards, positions))):
        for name, part in zip("qkv", parts):
            getattr(layer, f"{name}_proj").tensor = part
        x = torch.zeros(1, at.shape[1], 64, dtype=call.q.dtype)
        about = {"inputs_embeds": x, "position_ids": at, "use_cache": cache is not None}
        try:
            model(**about, past_key_values=cache)
        except Found as found:
            outs.append(found.args[0])
    return torch.cat(outs, 1).unflatten(2, (s.heads, -1)), rows, None


# --------------------------------------------------------------------------------------
# torch


OPEN = []  # contexts


def with_context_parallel(call: Call) -> Result:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    s, mesh = call.statement, dist.init_device_mesh("cpu", (call.ranks,))
    _cp_options.enable_load_balance = s.causal
    rows = torch.arange(s.n)  # it cuts these in place

    def scaled_dot_product_attention(q, k, v, is_causal=False, scale=None):
        """What torch's attention runs on a GPU."""
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        return operator(q, k, v, 0.0, is_causal, scale=scale)[0]

    functional, chosen = nn.functional, scaled_dot_product_attention
    if not OPEN:  # until the process ends, with the backward in it
        OPEN.append(mock.patch.object(functional, chosen.__name__, chosen))
        OPEN[0].start()
    OPEN.append(context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0]))
    OPEN[-1].__enter__()
    q, k, v = (x.transpose(1, 2) for x in call.shards(rows.clone()))
    attend = functional.scaled_dot_product_attention
    out = attend(q, k, v, is_causal=s.causal, scale=s.scale)
    return out.transpose(1, 2), rows, None


def with_flex_attention(call: Call) -> Result:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s, rows = call.statement, call.rows()
    seen = weights(call, rows)
    sizes = s.batch, s.heads, s.n, s.n
    mask = create_block_mask(lambda b, h, i, j: seen[b, h, i, j] > 0, *sizes, "cpu")
    weight, cap = seen.double().log(), s.softcap

    def changed(score, b, h, i, j):
        score = cap * torch.tanh(score / cap) if cap else score
        return score + weight[b, h, i, j]  # keys that count twice

    q, k, v = (x.transpose(1, 2) for x in call.shards(rows))
    options = {"scale": s.scale, "enable_gqa": s.kv_heads < s.heads, "block_mask": mask}
    options["score_mod"] = changed
    out, lse = flex_attention(q, k, v, return_lse=True, **options)
    out = out.transpose(1, 2)
    if s.sinks:  # as its documentation does it: by lse
        out = out * torch.sigmoid(lse - call.sinks[:, None]).transpose(1, 2)[..., None]
        lse = torch.logaddexp(lse, call.sinks[:, None].expand_as(lse))
    return out, rows, lse


# --------------------------------------------------------------------------------------
# natten


def with_natten(call: Call) -> Result:
    from natten import na1d

    s, rows = call.statement, call.rows()
    options = {"is_causal": s.causal, "scale": s.scale, "return_lse": True}
    options["kernel_size"] = s.window[0] + 1 if s.window else s.n
    out, lse = na1d(*call.shards(rows), backend="flex-fna", **options)
    return out, rows, lse.transpose(1, 2)


# --------------------------------------------------------------------------------------
# dilated-attention-pytorch


def with_dilated_attention_pytorch(call: Call) -> Result:
    def attend(query, key, value, attn_bias=None, op=None):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        causal = attn_bias is not None
        kernel = nn.functional.scaled_dot_product_attention
        return kernel(q, k, v, is_causal=causal).transpose(1, 2)

    double = SimpleNamespace(AttentionOp=object, LowerTriangularMask=object)
    double.memory_efficient_attention = attend
    sys.modules["xformers"] = SimpleNamespace(ops=double)
    sys.modules["xformers.ops"] = double
    from dilated_attention_pytorch.dilated_attention import DilatedAttention

    s, rows = call.statement, call.rows()
    pattern = branches_of(s)
    sizes = list(pattern.segment_lengths), list(pattern.dilation_rates)
    attention = DilatedAttention(*sizes, softmax_scale=s.scale)
    return attention(*call.shards(rows), is_causal=s.causal), rows, None


def branches_of(s: Statement) -> ringlab.Dilated:
    """Its branches; dense: two groups of heads with one segment each."""
    two = [s.n, s.n], [1, 1], "head_groups"
    return s.pattern_of(s.n) if s.pattern else ringlab.Dilated(*two)


def over_its_sums(statement: Statement, out: torch.Tensor) -> torch.Tensor:
    """What it computes of an attention's out: the rows of each branch over their sum,
    under a causal mask that of the rows so far, over the number of branches
    (dilated_attention.py:106, 131).
    """
    pattern = branches_of(statement)
    parts = torch.zeros_like(out)
    for branch in pattern.branches(statement.n, statement.heads):
        for head, offset in zip(branch.heads, branch.offsets):
            rows = torch.arange(statement.n) % branch.length % branch.rate == offset
            chosen = out[:, rows, head]
            total = (
                chosen.cumsum(1) if statement.causal else chosen.sum(1, keepdim=True)
            )
            parts[:, rows, head] = chosen / total
    return parts / len(pattern.segment_lengths)


# --------------------------------------------------------------------------------------
# the facts of packages.toml


def spread(lacks: dict[str, str]) -> dict[str, str]:
    """The reasons of lists of needs, by each need."""
    return {need: why for needs, why in lacks.items() for need in needs.split(", ")}


def read(path: Path) -> tuple[Adapter, ...]:
    """The adapters of a file as packages.toml."""
    adapters = []
    for title, facts in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for call in facts.pop("calls"):
            own = facts | call
            if (package := facts.get("package", "==")) and "==" not in package:
                own["package"] = f"{package} {version(package)}"
            lacks = spread(facts.get("lacks", {}) | call.get("lacks", {}))
            own["causes"] = facts.get("causes", {}) | call.get("causes", {})
            attend = partial(globals()[own.pop("function")], **own.pop("how", {}))
            name = ": ".join(filter(None, (title.strip(), own.pop("name"))))
            own |= {
                "lacks": lacks,
                "dtype": getattr(torch, own.get("dtype", "float32")),
            }
            if "translate" in own:
                own["translate"] = globals()[own["translate"]]
            adapters.append(Adapter(name, attend, **own))
    return tuple(adapters)


ADAPTERS = read(Path(__file__).with_name("packages.toml"))
