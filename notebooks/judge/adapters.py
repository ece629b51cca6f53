"""How each implementation is called, what it offers and what was found in its source.

An adapter hands a statement over: it cuts the shards in the layout that the
implementation wants, names windows, documents and scales as it does, and returns the rows
that this rank owns. Numbers of lines are those of the named version.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import ringlab
import torch
import torch.distributed as dist
from cells import Adapter, Call, Result
from ringlab.blocks import sliding_window
from statements import Statement
from torch import nn

BF16 = torch.bfloat16
DOUBLE, FLASH = ("flash_double",), "flash-attn 2.8.3, by package_doubles.py"


# --------------------------------------------------------------------------------------
# ringlab


def with_ringlab(call: Call, scheme, layout: str = "contiguous") -> Result:
    s, group = call.statement, dist.group.WORLD if call.ranks > 1 else None
    if isinstance(scheme, tuple):
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


NO_CACHE = {"chunks": "a cache over ranks is replicated: asked on one device"}
RINGLAB = (
    Adapter("ringlab: one device", partial(with_ringlab, scheme=None), ranks=(1,)),
    *(
        Adapter(
            f"ringlab: {scheme}, {layout}",
            partial(with_ringlab, scheme=scheme, layout=layout),
            lacks=NO_CACHE,
        )
        for scheme, layout in (
            ("plan", "contiguous"),
            ("plan", "zigzag"),
            ("ring", "contiguous"),
            ("all_gather", "striped"),
            ("ulysses", "contiguous"),
        )
    ),
    Adapter(
        "ringlab: ulysses in rings",
        partial(with_ringlab, scheme=("ulysses", "ring")),
        ranks=(4,),
        lacks=NO_CACHE,
    ),
)

# --------------------------------------------------------------------------------------
# ring-flash-attn


def flash_options(call: Call) -> dict:
    s = call.statement
    window = s.window or (-1, -1)
    return {"causal": s.causal, "softmax_scale": s.scale, "window_size": window}


def packed_rows(call: Call, layout: str) -> torch.Tensor:
    """The rows of a rank where each document is cut by itself."""
    limits = call.limits.tolist()
    parts = []
    for start, stop in zip(limits, limits[1:]):
        one = replace(call, statement=replace(call.statement, n=stop - start))
        parts += [start + one.rows(layout)] if stop > start else []
    return torch.cat(parts)


def with_ring_flash_attn(call: Call, scheme: str) -> Result:
    # Its adapters to Hugging Face import names of an older transformers.
    names = dict.fromkeys(("substitute_hf_flash_attn", "update_ring_flash_attn_params"))
    sys.modules["ring_flash_attn.adapters"] = SimpleNamespace(**names)
    import ring_flash_attn as package

    options, s = flash_options(call), call.statement
    layout = {"zigzag": "zigzag", "stripe": "striped"}.get(scheme, "contiguous")
    limits = call.limits
    if scheme == "llama3":
        rows = call.rows()
        about = package.llama3_flash_attn_prepare_cu_seqlens(
            limits, s.causal, call.rank, call.ranks
        )
        names = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k local_k_slice"
        options |= dict(zip(names.split(), about)) | {"heads_k_stride": 1}
    elif s.documents:
        rows = packed_rows(call, layout)
        lengths = limits.diff() // call.ranks
        options["cu_seqlens"] = (limits // call.ranks).int()
        options["max_seqlen"] = int(lengths.max())
    else:
        rows = call.rows(layout)
    name = {
        "llama3": "llama3_flash_attn_varlen_func",
        "stripe": "stripe_flash_attn_func",
    }
    prefix = "zigzag_ring" if scheme == "zigzag" else "ring"
    varlen = "varlen_" if s.documents else ""
    function = getattr(package, name.get(scheme, f"{prefix}_flash_attn_{varlen}func"))
    q, k, v = call.shards(rows)
    if "cu_seqlens" in options or scheme == "llama3":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out, lse, _ = function(q, k, v, return_attn_probs=True, **options)
        return out[None], rows, lse[None]
    out, lse, _ = function(q, k, v, return_attn_probs=True, **options)
    return out, rows, lse


PLAIN = {
    "softcap": "no argument for it",
    "sinks": "no argument for it",
    "lengths": "no argument for it",
    "chunks": "no cache",
    "dilated": "no argument for it",
    "dilated groups": "no argument for it",
    "blocks": "no argument for it",
    "local and global": "no argument for it",
    "selected": "no argument for it",
    "chosen blocks": "no argument for it",
    "wide keys": "flash-attn 2 has one head_dim",
    "uneven length": "shards are of one size: the caller pads",
}
OF_RING_FLASH_ATTN = PLAIN | {
    "window": "README, Known Limitations: window_size is not supported",
    "lse gradient": "ring_flash_attn.py:184: backward(ctx, dout, *args) has none",
}


def of_ring_flash_attn(scheme: str, **lacks: str) -> Adapter:
    return Adapter(
        f"ring-flash-attn: {scheme}",
        partial(with_ring_flash_attn, scheme=scheme),
        "ring-flash-attn==0.1.8",
        "2025-09",
        dtype=BF16,
        preload=DOUBLE,
        stands_in=FLASH,
        lacks=OF_RING_FLASH_ATTN | lacks,
        taken=("window",),
        conventions="Windows count the keys before and after, as flash-attn does. "
        "Documents are cut one by one (all but llama3), each by twice the ranks under zigzag. "
        "Its adapters to Hugging Face are left out: they need an older transformers.",
    )


ODD = {
    "odd documents": "test/test_ring_flash_attn_varlen_func.py asserts that ranks divide "
    "cu_seqlens, that of zigzag twice the ranks"
}
RING_FLASH_ATTN = (
    of_ring_flash_attn("ring", **ODD),
    of_ring_flash_attn("zigzag", **ODD),
    of_ring_flash_attn("stripe", documents="README: stripe has no varlen variant"),
    of_ring_flash_attn("llama3"),
)

# --------------------------------------------------------------------------------------
# yunchang


def with_yunchang(call: Call, ring: str, ulysses: int) -> Result:
    import yunchang
    from yunchang.comm.extract_local import EXTRACT_FUNC_DICT

    s = call.statement
    options = flash_options(call) | {"softcap": s.softcap or 0.0}
    if ring == "ulysses":
        rows, group = call.rows(), dist.group.WORLD
        attention = yunchang.UlyssesAttention(group)
        return attention(*call.shards(rows), **options), rows, None
    sizes = ulysses, call.ranks // ulysses
    yunchang.set_seq_parallel_pg(*sizes, call.rank, call.ranks)
    positions = torch.arange(s.n).reshape(1, s.n, 1, 1)
    cut = EXTRACT_FUNC_DICT[ring]
    rows = cut(positions, call.rank, call.ranks, rd=sizes[1], ud=ulysses).flatten()
    attention = yunchang.LongContextAttention(ring_impl_type=ring)
    return attention(*call.shards(rows), **options), rows, None


IN_EACH_BLOCK = {
    "*": "yunchang/ring/ring_flash_attn.py:44, zigzag_ring_flash_attn.py:38, stripe_flash_attn.py:45: the "
    "window is handed to each block's kernel, which counts from that block's own first keys"
}


def of_yunchang(name: str, ring: str, ulysses: int, ranks=(2, 4), **fields) -> Adapter:
    none = PLAIN | {"documents": "no cu_seqlens", "lse gradient": "out alone"}
    del none["softcap"]
    return Adapter(
        f"yunchang: {name}",
        partial(with_yunchang, ring=ring, ulysses=ulysses),
        "yunchang==0.6.4",
        "2026-01",
        ranks=ranks,
        dtype=BF16,
        preload=DOUBLE,
        stands_in=FLASH,
        lacks=none,
        conventions="Shards are cut by its own EXTRACT_FUNC_DICT. Its README hands window_size to the layer.",
        causes=IN_EACH_BLOCK,
        **fields,
    )


YUNCHANG = (
    of_yunchang("ring", "basic", 1),
    of_yunchang("zigzag", "zigzag", 1),
    of_yunchang("stripe", "strip", 1),
    of_yunchang("USP, ulysses in zigzag rings", "zigzag", 2, ranks=(4,)),
    of_yunchang("ulysses", "ulysses", 0),
)

# --------------------------------------------------------------------------------------
# axolotl-ringmaster


def with_ringmaster(
    call: Call, backend: str, balance="none", rotate="allgather"
) -> Result:
    import ringmaster
    from ringmaster.strategies.ring import make_ring_attention
    from ringmaster.strategies.ulysses import make_ulysses_attention

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
    if s.documents:
        runtime.varlen = call.limits, max(s.documents)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = s.heads // s.kv_heads, s.causal
    if backend == "ulysses":
        attend = make_ulysses_attention("sdpa")
    else:  # its blocks for a CPU
        attend = make_ring_attention("math", "math", config.rotate_method)
    rows = call.rows("zigzag" if balance == "head_tail" else "contiguous")
    q, k, v = (x.transpose(1, 2) for x in call.shards(rows))
    options = {"scaling": s.scale, "is_causal": s.causal}
    options["sliding_window"] = s.window[0] + 1 if s.window else None
    return attend(module, q, k, v, None, **options)[0], rows, None


def of_ringmaster(name: str, *, lacks=(), **options) -> Adapter:
    return Adapter(
        f"axolotl-ringmaster: {name}",
        partial(with_ringmaster, **options),
        "axolotl-ringmaster==0.2.7",
        "2026-10",
        preload=("transformers.modeling_utils",),
        elsewhere="requires the CUDA flash kernel",
        stands_in="its own math blocks, or torch's attention on the CPU",
        lacks=PLAIN
        | {
            "two-sided window": "sliding_window is one number, of keys before",
            "lse gradient": "out alone",
            "wide keys": "one head_dim",
            "lengths": "README: right-padded batches by its context manager",
            "uneven length": "shards are of one size: its context manager pads",
        }
        | dict(lacks),
        conventions="sliding_window counts the query too; documents are global cu_seqlens.",
    )


DENSE_CAUSAL = {"full": "README: attention accepts dense causal sequences"}
RINGMASTER = (
    of_ringmaster("ulysses", backend="ulysses"),
    of_ringmaster("ring, all-gather", backend="ring"),
    of_ringmaster("ring, p2p", backend="ring", rotate="alltoall"),
    of_ringmaster("ring, zigzag", backend="ring", balance="head_tail"),
    of_ringmaster("ring, distflash", backend="ring", balance="distflash"),
)

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
    rows = call.rows()
    padded = None
    if s.lengths:
        keys = torch.arange(s.n) if kind == "ulysses" else rows
        padded = keys < torch.tensor(s.lengths)[:, None]
    out = dispatch_attention_fn(
        *call.shards(rows),
        attn_mask=padded,
        is_causal=s.causal,
        scale=s.scale,
        enable_gqa=s.kv_heads < s.heads,
        backend="flash" if kind == "ring" else "native",
        parallel_config=config,
    )
    return out, rows, None


AGAINST_THE_RING = {
    "*": "diffusers/models/attention_dispatch.py:2481, 2522: gradients of K and V hop to the next rank, while "
    "rank r takes the K/V of rank r + i at step i: on more than 2 ranks they are added to another shard's"
}


def of_diffusers(kind: str, version="0.42.1", released="2026-10", **fields) -> Adapter:
    ring = kind == "ring"
    return Adapter(
        f"diffusers {version}: {kind}" if fields else f"diffusers: {kind}",
        partial(with_diffusers, kind=kind),
        f"diffusers=={version}",
        released,
        full_only=True,
        dtype=BF16 if ring else torch.float32,
        preload=(*DOUBLE, "diffusers.models.attention_dispatch"),
        stands_in=FLASH if ring else "",
        lacks=PLAIN
        | {
            "window": "no argument for it",
            "documents": "no argument for it",
            "lse gradient": "lse is returned without a gradient",
        },
        conventions="For lengths and heads that ranks do not divide: ulysses_anything, ring_anything.",
        **{"causes": AGAINST_THE_RING} | fields,
    )


DIFFUSERS = (
    of_diffusers("ring"),
    of_diffusers("ulysses"),
    of_diffusers(
        "ring",
        "0.39.0",
        "2026-07",
        only=("dense", "causal", "strided inputs"),
        control="huggingface/diffusers#14265",
        causes={
            "*": "diffusers/models/attention_dispatch.py:2148: a step of the backward reads the K/V of step 0"
        },
    ),
)

# --------------------------------------------------------------------------------------
# DeepSpeed


def dense_mask(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """The pairs that a statement shows, bool (batch, 1, rows, n), for torch's attention."""
    s, keys = call.statement, torch.arange(call.statement.n)
    distance = keys[None] - rows[:, None]  # (rows, n)
    seen = distance <= 0 if s.causal else torch.ones_like(distance, dtype=torch.bool)
    if s.window:
        seen = seen & (distance >= -s.window[0]) & (distance <= s.window[1])
    if s.documents:
        document = torch.repeat_interleave(torch.tensor(s.documents))
        seen = seen & (document[rows][:, None] == document[None])
    lengths = torch.tensor(s.lengths or [s.n] * s.batch)
    return (seen & (keys < lengths[:, None, None]))[:, None]


def with_deepspeed(call: Call) -> Result:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None):
        deepspeed.init_distributed("gloo", verbose=False)  # without compiling
    s = call.statement
    mask = dense_mask(call, torch.arange(s.n))

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


DEEPSPEED = (
    Adapter(
        "deepspeed: ulysses",
        with_deepspeed,
        "deepspeed==0.19.8",
        "2026-10",
        ("einops", "hjson", "msgpack", "py-cpuinfo", "ninja"),
        lacks={x: PLAIN[x] for x in ("softcap", "sinks", "chunks")}
        | {
            x: "a pattern is the caller's kernel, not its"
            for x in ("dilated", "dilated groups")
        }
        | {
            x: "a pattern is the caller's kernel, not its"
            for x in ("blocks", "local and global")
        }
        | {
            x: "a pattern is the caller's kernel, not its"
            for x in ("selected", "chosen blocks")
        }
        | {
            "lse gradient": "out alone",
            "uneven length": "layer.py:64: shards are of one size",
        },
        preload=("deepspeed.sequence.layer",),
        conventions="The attention of a rank is the caller's: torch's, with a mask.",
    ),
)

# --------------------------------------------------------------------------------------
# packages of lucidrains


def grouped(x: torch.Tensor, kv_heads: int, back: bool = False) -> torch.Tensor:
    """Heads in the order (g h) of einops: head i shares K/V head i mod kv_heads."""
    sizes = (-1, kv_heads) if back else (kv_heads, -1)
    return x.unflatten(2, sizes).transpose(2, 3).flatten(2, 3)


BUCKET = 8  # of queries and keys


def with_ring_attention_pytorch(call: Call, striped: bool) -> Result:
    from ring_attention_pytorch import ring_flash_attn

    s = call.statement
    rows = call.rows()
    if striped:  # bucket i has every i-th position of the whole sequence
        order = torch.arange(s.n).reshape(BUCKET, -1).T.flatten()
        rows = order.tensor_split(call.ranks)[call.rank]
    q, k, v = call.shards(rows)
    padded = (
        torch.arange(s.n)[rows] < torch.tensor(s.lengths)[:, None]
        if s.lengths
        else None
    )
    out = ring_flash_attn(
        grouped(q, s.kv_heads),
        k,
        v,
        padded,
        s.causal,
        1 if s.window else BUCKET,
        True,
        striped,
        s.window[0] if s.window else None,
        softclamp_qk_sim=s.softcap is not None,
        softclamp_value=s.softcap or 50.0,
    )
    return grouped(out, s.kv_heads, back=True), rows, None


SUM_OF_BOTH = {
    "*": "ring_attention_pytorch/ring_flash_attention.py:383, 385: ring_pass returns what was received and "
    "what was sent, and these are taken for dk and dv (the same in ring_flash_attention_cuda.py:345); "
    "with the first alone, all is right",
    **dict.fromkeys(
        ("window", "window of a few tokens"),
        "ring_attention_pytorch/ring_flash_attention.py:102: passes are counted from a shard's last row, "
        "so that its first rows miss keys of the shard before; and line 385, see dense",
    ),
}


def of_ring_attention_pytorch(name: str, striped: bool, **lacks) -> Adapter:
    none = PLAIN | {
        "scale": "no argument for it",
        "documents": "no argument for it",
        "lse gradient": "out alone",
        "two-sided window": "max_lookback_seq_len: an assertion asks for causal",
    }
    del none["softcap"], none["lengths"]
    return Adapter(
        f"ring-attention-pytorch: {name}",
        partial(with_ring_attention_pytorch, striped=striped),
        "ring-attention-pytorch==0.5.20",
        "2025-05",
        ("einops", "beartype", "jaxtyping", "wadler-lindig"),
        lacks=none | lacks,
        causes=SUM_OF_BOTH,
        conventions="K/V heads are shared (g h). A window counts buckets: of one key here. "
        "softclamp is the soft cap.",
    )


RING_ATTENTION_PYTORCH = (
    of_ring_attention_pytorch("ring", False),
    of_ring_attention_pytorch(
        "striped",
        True,
        window="look-back counts buckets, of which each has all positions",
    ),
)


def with_local_attention(call: Call) -> Result:
    from local_attention import LocalAttention

    s = call.statement
    options = {
        "window_size": 16,
        "look_backward": 4,
        "look_forward": 0 if s.causal else 4,
    }
    if s.window:
        options = {"window_size": s.window[0], "exact_windowsize": True}
        options["look_forward"] = int(not s.causal)
    if s.scale is not None:
        options["scale"] = s.scale
    attention = LocalAttention(causal=s.causal, autopad=True, **options)
    rows = call.rows()
    q, k, v = (x.transpose(1, 2) for x in call.shards(rows))
    seen = {}
    if s.lengths:
        seen["mask"] = torch.arange(s.n) < torch.tensor(s.lengths)[:, None]
    return attention(q, k, v, **seen).transpose(1, 2), rows, None


PADDED_KEYS = {
    "*": "local_attention/local_attention.py:126, 208: keys that autopad appends are seen, unless a mask is given: "
    "with mask=torch.ones(1, n, dtype=torch.bool) it is right"
}


def of_local_attention(version: str, released: str, needs=(), **fields) -> Adapter:
    none = PLAIN | {
        "GQA": "k and v have the heads of q",
        "documents": "no argument for it",
        "lse gradient": "out alone",
        "bf16": "it runs on one device",
    }
    del none["lengths"], none["uneven length"]
    return Adapter(
        f"local-attention {version}" if fields else "local-attention",
        with_local_attention,
        f"local-attention=={version}",
        released,
        needs,
        ranks=(1,),
        lacks=none,
        **{"causes": PADDED_KEYS} | fields,
        conventions="exact_windowsize counts the keys before, as flash-attn does. Dense is a window of all.",
    )


LOCAL_ATTENTION = (
    of_local_attention("1.11.2", "2025-07", ("einops", "hyper-connections")),
    of_local_attention(
        "1.2.1",
        "2021-01",
        only=("dense", "causal", "window", "window of a few tokens"),
        control="lucidrains/local-attention#5",
        causes={
            "*": "local_attention/local_attention.py:150: causal and window are joined by and"
        },
    ),
)

# --------------------------------------------------------------------------------------
# transformers: a layer of a model, whose mask, cache and scale the model makes


class Given(nn.Module):
    """In place of a projection: it returns a tensor."""

    def forward(self, x):
        return self.tensor


class Unrotated(nn.Module):
    """In place of rotary embeddings: the same shapes, and no rotation."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, *args, **kwargs):
        cos, sin = self.rotary(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)


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
    if s.window:
        sizes |= {"sliding_window": s.window[0] + 1, "use_sliding_window": True}
        sizes["max_window_layers"] = 0
    if s.scale is not None:
        kind, sizes["attention_multiplier"] = "Granite", s.scale
    if s.softcap:
        kind, sizes["attn_logit_softcapping"] = "Gemma2", s.softcap
        sizes["query_pre_attn_scalar"] = s.width
    if s.sinks:
        kind, sizes["num_local_experts"] = "GptOss", 2
    if kind == "Mistral" and not s.window:
        sizes["sliding_window"] = None
    config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=0)
    if s.softcap or s.sinks:
        config.layer_types = ["full_attention"]
    model = transformers.AutoModel.from_config(config, attn_implementation=kernel)
    layer = model.layers[0].self_attn
    layer.q_proj, layer.k_proj, layer.v_proj = Given(), Given(), Given()
    layer.o_proj, model.rotary_emb = Caught(), Unrotated(model.rotary_emb)
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


def of_transformers(kind: str, kernel: str, version="", needs=(), **fields) -> Adapter:
    package, preload = "transformers", ("transformers.modeling_utils",)
    if version:
        package, preload = f"transformers=={version}", ()
    return Adapter(
        f"transformers{' ' * bool(version)}{version}: {kind}, {kernel}",
        partial(with_transformers, kind=kind, kernel=kernel),
        package,
        "2025-01" if version else "2026-10",
        needs,
        preload=preload,
        ranks=(1,),
        lacks={
            "full": "a decoder is asked, which is causal",
            "wide keys": "of models with MLA alone",
            "lse gradient": "out alone",
            **{x: "no model for it" for x in ("selected", "chosen blocks")},
        },
        conventions="One layer of the model, with its own mask, cache and scale; projections and "
        "rotary embeddings are taken out. Scale: Granite, soft cap: Gemma 2, sinks: gpt-oss.",
        **fields,
    )


TRANSFORMERS = (
    of_transformers("Mistral", "eager"),
    of_transformers("Mistral", "sdpa"),
    of_transformers("Qwen2", "eager"),
    of_transformers(
        "Qwen2",
        "eager",
        "4.48.1",
        ("tokenizers==0.21.0", "huggingface-hub==0.27.1"),
        only=("causal", "GQA", "scale", "window", "window of a few tokens"),
        control="huggingface/transformers#35924",
        causes={
            "*": "transformers/models/qwen2/modeling_qwen2.py:199: eager attention ignores the window, "
            "and no mask has it; line 236 warns in a log"
        },
    ),
)

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
    pattern = s.pattern_of(s.n) if s.pattern else None
    if pattern is None:
        seen = dense_mask(call, rows)[:, 0]  # (batch, n, n)
    else:
        about = {"head": 0, "heads": s.heads, "n": s.n}
        seen = pattern.multiplicity(rows, rows, **about).reshape(-1, s.n, s.n) > 0
        seen = seen & (rows[None] <= rows[:, None]) if s.causal else seen
    sizes = s.batch, None, s.n, s.n
    mask = create_block_mask(lambda b, h, i, j: seen[b, i, j], *sizes, device="cpu")
    cap = s.softcap

    def capped(score, b, h, i, j):
        return cap * torch.tanh(score / cap)

    q, k, v = (x.transpose(1, 2) for x in call.shards(rows))
    options = {"scale": s.scale, "enable_gqa": s.kv_heads < s.heads, "block_mask": mask}
    options["score_mod"] = capped if cap else None
    out, lse = flex_attention(q, k, v, return_lse=True, **options)
    out = out.transpose(1, 2)
    if s.sinks:  # as its documentation does it: by lse
        out = out * torch.sigmoid(lse - call.sinks[:, None]).transpose(1, 2)[..., None]
        lse = torch.logaddexp(lse, call.sinks[:, None].expand_as(lse))
    return out, rows, lse


TORCH = (
    Adapter(
        "torch: context_parallel",
        with_context_parallel,
        "torch",
        "2026-07",
        preload=(*DOUBLE, "torch.distributed.tensor.experimental"),
        dtype=BF16,
        stands_in="torch's flash attention of a GPU, by flash_double.py",
        lacks=PLAIN
        | {
            "window": "it takes scaled_dot_product_attention, without a mask",
            "documents": "it takes scaled_dot_product_attention, without a mask",
            "lse gradient": "out alone",
        },
        conventions="Shards are zigzag under a causal mask (enable_load_balance), else contiguous. "
        "torch's choice of an operator, which a CPU makes otherwise, is that of a GPU.",
    ),
    Adapter(
        "torch: FlexAttention",
        with_flex_attention,
        "torch",
        "2026-07",
        ranks=(1,),
        gradients=False,
        lacks={
            "chunks": "no cache",
            "dilated": "a mask counts a key once; branches would be merged by lse",
            "dilated groups": "a mask by head: asked for one head alone",
            "chosen blocks": "a mask by head: asked for one head alone",
            "lse gradient": "flex_attention.py: no backward on a CPU",
        },
        conventions="Forward alone: its backward is refused on a CPU. Not compiled.",
    ),
)


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
    over the number of branches (dilated_attention.py:121, 131).
    """
    pattern = branches_of(statement)
    parts = torch.zeros_like(out)
    for branch in pattern.branches(statement.n, statement.heads):
        for head, offset in zip(branch.heads, branch.offsets):
            rows = torch.arange(statement.n) % branch.length % branch.rate == offset
            chosen = out[:, rows, head]
            parts[:, rows, head] = chosen / chosen.sum(1, keepdim=True)
    return parts / len(pattern.segment_lengths)


DILATED = (
    Adapter(
        "dilated-attention-pytorch",
        with_dilated_attention_pytorch,
        "dilated-attention-pytorch==0.2.0",
        "2023-08",
        ("einops",),
        ranks=(1,),
        dtype=torch.float64,  # sums near 0 enlarge what is rounded
        translate=over_its_sums,
        stands_in="xformers' memory_efficient_attention, by torch's attention",
        lacks={
            **{
                x: PLAIN[x]
                for x in ("softcap", "sinks", "lengths", "chunks", "wide keys")
            },
            **{
                x: PLAIN[x]
                for x in ("blocks", "local and global", "selected", "chosen blocks")
            },
            **{x: "no argument for it" for x in ("window", "documents")},
            "GQA": "k and v have the heads of q",
            "dilated": "groups of heads run one branch each",
            "lse gradient": "out alone",
            "uneven length": "segments divide the sequence: rearrange says so",
        },
        causes={
            "scale": "dilated_attention_pytorch/dilated_attention.py:36, 98: softmax_scale is kept and not handed on"
        },
        conventions="Its out is over the sum of all rows of a branch, over the number of branches: "
        "the answer is translated. Dense is two groups of heads, one segment each.",
    ),
)

ADAPTERS = (
    *RINGLAB,
    *RING_FLASH_ATTN,
    *YUNCHANG,
    *RINGMASTER,
    *DIFFUSERS,
    *DEEPSPEED,
    *RING_ATTENTION_PYTORCH,
    *LOCAL_ATTENTION,
    *TRANSFORMERS,
    *TORCH,
    *DILATED,
)
