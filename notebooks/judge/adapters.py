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
        conventions="Shards are cut by its own EXTRACT_FUNC_DICT.",
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
        **fields,
    )


DIFFUSERS = (
    of_diffusers("ring"),
    of_diffusers("ulysses"),
    of_diffusers(
        "ring",
        "0.39.0",
        "2026-07",
        control="huggingface/diffusers#14265",
        causes={
            "dense": "attention_dispatch.py: every step of the backward reads the K/V of step 0"
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
    group = dist.group.WORLD
    with mock.patch.object(groups, "_get_sequence_parallel_rank", lambda: call.rank):
        attention = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
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
        | {"lse gradient": "out alone"},
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


def with_ring_attention_pytorch(call: Call, striped: bool) -> Result:
    from ring_attention_pytorch import ring_flash_attn

    s = call.statement
    rows = call.rows("striped" if striped else "contiguous")
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
        1 if s.window else 8,
        True,
        striped,
        s.window[0] if s.window else None,
        softclamp_qk_sim=s.softcap is not None,
        softclamp_value=s.softcap or 50.0,
    )
    return grouped(out, s.kv_heads, back=True), rows, None


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
        conventions="K/V heads are shared (g h). A window counts buckets: of one key here. "
        "softclamp is the soft cap.",
    )


RING_ATTENTION_PYTORCH = (
    of_ring_attention_pytorch("ring", False),
    of_ring_attention_pytorch("striped", True),
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
        conventions="exact_windowsize counts the keys before, as flash-attn does. Dense is a window of all.",
        **fields,
    )


LOCAL_ATTENTION = (
    of_local_attention("1.11.2", "2025-07", ("einops", "hyper-connections")),
    of_local_attention("1.2.0", "2020-12", control="lucidrains/local-attention#5"),
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
)
