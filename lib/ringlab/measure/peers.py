"""Attention of other packages, if they are installed; each is checked against the
function that it documents.

A package is imported when one of its points is built, and never required: ``make report
PEERS=1`` installs them. The option ``version`` of a point makes each version another
point. Where a package imports a kernel that needs a GPU, its algorithm runs on a CPU
with torch's kernel, in a copy of the package's module; ``PEERS`` says which.
"""

import importlib.util
import json
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import NamedTuple

import torch

from .. import patterns
from ..block_patterns import sliding_window
from ..kernels.external import missing
from .points import Point
from .systems import Refused, System, parse_options, require_pattern


class Peer(NamedTuple):
    """A package: its distribution, how to install it, and the GPU kernel that torch's
    stands in for on a CPU.
    """

    package: str
    how: str = "`make report PEERS=1` installs it"
    kernel: str = ""


PEERS = {
    "dilated_attention_pytorch": Peer("dilated-attention-pytorch", kernel="xformers"),
    "torchscale_dilated": Peer(
        "torchscale",
        "no release has its DilatedAttention; `make report PEERS=1` installs it from GitHub",
        "flash-attn",
    ),
    "local_attention": Peer("local-attention"),
    "ring_attention_pytorch": Peer("ring-attention-pytorch"),
}


def installed(system: str) -> str | None:
    """The installed version of a peer's package, as ``version_of`` says it.

    >>> version = installed("ring_attention_pytorch")  # as "0.5.20"
    """
    return version_of(PEERS[system].package)


def version_of(package: str) -> str | None:
    """The installed version of a package, with the commit if it came from git; None if
    it is absent.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    commit = (
        json.loads(distribution.read_text("direct_url.json") or "{}")
        .get("vcs_info", {})
        .get("commit_id", "")
    )
    return distribution.version + (f"+{commit[:7]}" if commit else "")


def _module(point: Point, name: str):
    """A module of the point's package; NotImplementedError if it is absent or cannot be
    imported.
    """
    package, how, _ = PEERS[point.system]
    version = installed(point.system)
    requested = parse_options(point, "version").get("version", version)
    if version is None:
        raise NotImplementedError(f"{package} is not installed: {how}")
    if requested != version:
        raise Refused(f"{package} {requested} was asked for, {version} is installed")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(
            f"{package} {version} cannot be imported: {error}; {how}"
        ) from error


def _dilated(point: Point, mixing: str, offsets: str) -> patterns.Dilated:
    """The pattern of a point, if the package documents its function."""
    computed = f"dilated {mixing} with offsets by {offsets}"
    pattern = require_pattern(
        point, computed, kind="dilated", mixing=mixing, offsets=offsets
    )
    if point.kv_heads != point.heads:
        raise Refused(
            f"{point.system} needs as many K/V heads as heads, got {point.kv_heads} and {point.heads}"
        )
    return pattern


def _flash(q, k, v, causal: bool):
    """torch's kernel for the CPU: out (b, n, h, d) and log-sum-exp (b, h, n) of q, k, v
    (b, n, h, d).
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(*(t.transpose(1, 2) for t in (q, k, v)), 0.0, causal)
    return out.transpose(1, 2), lse


def _copy_with(module, **values):
    """A copy of a module in which names have other values; the module stays as it is."""
    spec = importlib.util.find_spec(module.__name__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    vars(copy).update(values)
    return copy


def dilated_attention_pytorch(point: Point, device) -> System:
    """DilatedAttention of dilated-attention-pytorch: a group of heads for each branch,
    over the number of groups.

    On the CPU torch's kernel replaces that of xformers.
    """
    missing("xformers.ops", "xformers")  # loads it without its warnings
    module = _module(point, "dilated_attention_pytorch.dilated_attention")
    pattern = _dilated(point, "head_groups", "branch")
    if rest := [w for w in pattern.segment_lengths if point.seq_len % w]:
        raise Refused(
            f"{point.system} needs whole segments of {rest[0]}, got {point.seq_len} positions"
        )

    def kernel(query, key, value, op=None, attn_bias=None):
        return _flash(query, key, value, attn_bias is not None)[0]

    if torch.device(device).type == "cpu":
        ours = {"memory_efficient_attention": kernel, "LowerTriangularMask": object}
        module = _copy_with(module, xops=SimpleNamespace(**ours))
    attention = module.DilatedAttention(
        list(pattern.segment_lengths), list(pattern.dilation_rates)
    )

    def forward(q, k, v):
        return attention(q, k, v, is_causal=point.causal), None

    system = System(point, device, forward)
    system.divided_by = len(pattern.dilation_rates)
    return system


def torchscale_dilated(point: Point, device) -> System:
    """DilatedAttention of torchscale, LongNet's own code, without its projections:
    offsets by block of heads.

    On the CPU torch's kernel replaces that of flash-attn.
    """
    module = _module(point, "torchscale.component.dilated_attention")
    pattern = _dilated(point, "lse", "block")
    arguments = SimpleNamespace(
        segment_length=list(pattern.segment_lengths),
        dilated_ratio=list(pattern.dilation_rates),
        flash_attention=True,
        seq_parallel=False,
        multiway=False,
        layernorm_eps=1e-5,
        xpos_rel_pos=False,
        xpos_scale_base=512,
    )

    def kernel(q, k, v, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):
        return _flash(q, k, v, is_causal)

    attention = module.DilatedAttention(
        arguments, point.heads * point.head_dim, point.heads, self_attention=True
    )
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(attention, name, torch.nn.Identity())
    if torch.device(device).type == "cpu":  # the method of its base calls the kernel
        base = _module(point, "torchscale.component.multihead_attention")
        base = _copy_with(base, flash_attn_func=kernel).MultiheadAttention
        attention.attention_ops = partial(base.attention_ops, attention)

    def forward(q, k, v):
        out, _ = attention(
            *(t.flatten(2) for t in (q, k, v)), is_causal=point.causal
        )  # (b, n, h * d)
        return out.unflatten(2, (point.heads, point.head_dim)), None

    return System(point, device, forward)


def local_attention(point: Point, device) -> System:
    """LocalAttention of local-attention, without its rotary embedding: the block of a
    query and one either way.
    """
    module = _module(point, "local_attention")
    window = sliding_window(1).to_dict()
    pattern = require_pattern(
        point,
        "a window of one block either way",
        kind=window["kind"],
        parts=window["parts"],
    )
    if point.seq_len % pattern.block_size:
        raise Refused(
            f"{point.system} needs whole blocks of {pattern.block_size}, got {point.seq_len} positions"
        )
    attention = module.LocalAttention(
        pattern.block_size, causal=point.causal, use_rotary_pos_emb=False
    )

    def forward(q, k, v):
        return attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(
            1, 2
        ), None  # (b, h, n, d) inside

    return System(point, device, forward)


def ring_attention_pytorch(point: Point, device) -> System:
    """ring_flash_attn of ring-attention-pytorch on one device: dense attention in
    buckets of 1024, no ring.
    """
    gpu = torch.device(device).type == "cuda"
    module = _module(
        point, f"ring_attention_pytorch.ring_flash_attention{'_cuda' if gpu else ''}"
    )
    require_pattern(point, "dense attention", kind="dense")
    attention = module.ring_flash_attn_cuda if gpu else module.ring_flash_attn

    def forward(q, k, v):
        return attention(
            q, k, v, causal=point.causal, bucket_size=min(1024, point.seq_len)
        ), None

    return System(point, device, forward)
