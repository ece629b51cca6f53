"""The Gluon kernels for Hopper on the host: what they can serve, and their launch.

They read tensors by descriptors, which the copy engine serves. A descriptor spans the
view (b, stride, h, n / stride, d) of a tensor, in which the rows of a tile, ``stride``
apart, are a block. The host makes it for each call.

Measured on an H200 (2026-11-26, tree 8f63b8c, Triton 3.6.0): about 235 random calls
equal float64. Forward they reach 0.81 to 0.92 of the rate of the best dense kernel
there, backward 0.55 to 0.8. Reading by pointers takes 1.3 to 1.8 times as long.
head_dim 256 was not tried.
"""

from __future__ import annotations

import copy
import importlib
import logging
from functools import cache

import torch
from torch import Tensor

from . import jit
from .external import missing
from .tile_schedule import TileSchedule
from .triton_config import LOG2E, Sizes, shortened

DEVICE_CODE = f"{__package__}.gluon_kernels"
HOPPER = "triton.experimental.gluon.nvidia.hopper"
GROUP_ROWS = 64  # of a warp group: a descriptor of owned rows reads those of one group
REGISTERS = 168  # of a thread, before the computing warps take some of the reading one


@cache
def unavailable() -> str | None:
    """Why this Triton has no Gluon for Hopper, or None. The reason is logged once."""
    if why := missing(HOPPER, "Triton 3.6 or newer"):
        logging.getLogger("ringlab").warning(
            "the Gluon kernels cannot run, slower Triton kernels run instead: %s", why
        )
    return why


def unfit(
    size: Sizes, schedule: TileSchedule, tensors: tuple[Tensor, ...], joins: bool
) -> str | None:
    """Why the Gluon kernels cannot read ``tensors`` (b, n, h, d) in a launch, or None.

    ``joins``: the launch adds to the results of an earlier one.
    """
    if joins:
        return "the Gluon kernels start from nothing"
    if any(t.shape[:3].numel() >= 1 << 31 for t in tensors):
        return "the Gluon kernels count rows of all heads in 32 bits"
    if schedule.band:
        return "the Gluon kernels know no band"
    if why := unavailable() or shortened(size, schedule):
        return why
    if not schedule.stride or any(t.shape[1] % schedule.stride for t in tensors):
        return "the rows of a tile are no block of the sequence"
    for t in tensors:
        steps = [s * t.element_size() for s in t.stride()[:3]]
        if t.data_ptr() % jit.ALIGNED or any(s % jit.ALIGNED or not s for s in steps):
            return f"descriptors take addresses and strides of {jit.ALIGNED} bytes"
        if not t.numel():
            return "descriptors take tensors that hold something"
    return None


def run(
    name: str,
    launch,
    read: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    results,
    scale: float,
    causal: bool,
) -> None:
    """One launch, a program for each tile and batch entry.

    ``launch`` is a ``triton.Launch``, ``read`` (dout,) q, k, v, ``rows`` what
    ``row_sums`` gave to a backward pass; ``results`` are written.
    """
    (b, n, heads, _), (_, keys, kv_heads, _) = read[-3].shape, read[-2].shape
    size = launch.size
    schedule = launch.schedule
    by_key = name == "backward_kv"
    if not launch.descriptors:
        launch.descriptors = [
            _with_base(descriptor(t, schedule.stride, block_rows), None)
            for t, block_rows in zip(read, _block_rows(size, by_key, len(read)))
        ]  # which keep no tensor
    descriptors = map(_with_base, launch.descriptors, read)
    programs = len(schedule.tiles)
    arguments = (
        *descriptors,
        *rows,
        *results,
        schedule.tiles,
        schedule.entries,
        scale * LOG2E,
        programs,
        programs * b,
        heads,
        heads // kv_heads,
        *((n, keys) if by_key else (n,)),
    )
    with torch.cuda.device_of(read[0]):
        jit.launch(
            getattr(importlib.import_module(DEVICE_CODE), name),
            launch.compiled,
            programs * b,
            arguments,
            {"STEP": schedule.stride, "CAUSAL": causal, "STAGES": size.stages},
            num_warps=size.warps,
            maxnreg=REGISTERS,
        )


def _block_rows(size: Sizes, by_key: bool, count: int) -> list[int]:
    """The rows that a descriptor reads at once of each of (dout,) q, k, v: of k and v
    where these own the tiles, else of the others, those of a warp group.
    """
    own, other = (size.cols, GROUP_ROWS) if by_key else (GROUP_ROWS, size.cols)
    return [own] * (count - 2) + [other] * 2


def _with_base(descriptor, t: Tensor | None):
    """The same descriptor of another tensor, of the same shape and strides."""
    other = copy.copy(descriptor)
    other.base = t
    return other


def descriptor(t: Tensor, stride: int, rows: int):
    """A descriptor of ``t`` (b, n, h, d) for blocks of ``rows`` rows that lie
    ``stride`` apart.
    """
    (b, n, h, d), (s_b, s_n, s_h, _) = t.shape, t.stride()
    return importlib.import_module(HOPPER).TensorDescriptor(
        t,
        [b, stride, h, n // stride, d],
        [s_b, s_n, s_h, stride * s_n, 1],
        [1, 1, 1, rows, d],
        layout(d, 8 * t.element_size()),
    )


def layout(head_dim: int, bits: int):
    """The layout of a block in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(
        swizzle_byte_width=min(128, head_dim * bits // 8), element_bitwidth=bits, rank=5
    )
