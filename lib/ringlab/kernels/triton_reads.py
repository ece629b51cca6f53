"""How list kernels read the tiles that they meet: by pointers, or by tensor descriptors, which the copy engine serves.

A descriptor spans the view (b, stride, h, n / stride, d) of a tensor, in which the rows of a tile, ``stride`` apart,
are a block. It is made on the host for each call; only the queries of specialised warps need one made on the GPU.
"""

from __future__ import annotations

import importlib
from contextvars import copy_context

import torch
from torch import Tensor

from ..lists import Lists
from .external import missing
from .triton_sizes import BY_HAND, Sizes, padded

ALIGNED = 16  # bytes: what a tensor descriptor asks of addresses and strides
GLUON = "triton.experimental.gluon.nvidia.hopper"
GROUP_ROWS = 64  # gluon_code: a descriptor of queries brings those of one warp group


def too_long(size: Sizes, lists: Lists) -> str | None:
    """Why a launch takes smaller tiles than ``size`` says, or None."""
    if (lists.rows, lists.cols) == (size.rows, size.cols):
        return None
    return f"the pattern's pieces are shorter than tiles of {size.rows} x {size.cols}"


def why_pointers(size: Sizes, lists: Lists, tensors: tuple[Tensor, ...], joins: bool = False) -> str | None:
    """Why sizes that read ``tensors`` (b, n, h, d) by descriptors cannot serve a launch, or None.

    ``joins``: the launch goes on from what another wrote.

    >>> lists = Lists(*[torch.zeros(0)] * 2, rows=64, cols=64, covered=True, stride=2, whole=True)
    >>> why_pointers(Sizes(64, 64, 4, 2, "descriptors"), lists, (torch.zeros(1, 129, 1, 64),))
    'the rows of a tile are no block of the sequence'
    """
    if size.reads == "pointers":
        return None
    if size.reads in BY_HAND:
        if joins:
            return "the kernels in Gluon start from nothing"
        if why := missing(GLUON, "Triton 3.6 or newer"):
            return why
        if any(t.shape[:3].numel() >= 1 << 31 for t in tensors):
            return "the kernels in Gluon count rows of all heads in 32 bits"
    if why := too_long(size, lists):
        return why
    if not lists.stride or any(t.shape[1] % lists.stride for t in tensors):
        return "the rows of a tile are no block of the sequence"
    if any(t.shape[3] != padded(t.shape[3]) or not t.numel() for t in tensors):
        return "descriptors take a head_dim of 2 to some power, and something to read"
    for t in tensors:
        steps = [s * t.element_size() for s in t.stride()[:3]]
        if t.data_ptr() % ALIGNED or any(s % ALIGNED or s < ALIGNED for s in steps):
            return f"descriptors take addresses and strides of {ALIGNED} bytes"
    return None


def described(t: Tensor, stride: int, rows: int, by_hand: bool = False):
    """A descriptor of ``t`` (b, n, h, d) for blocks of ``rows`` rows that lie ``stride`` apart."""
    (b, n, h, d), (s_b, s_n, s_h, _) = t.shape, t.stride()
    view = [b, stride, h, n // stride, d], [s_b, s_n, s_h, stride * s_n, 1], [1, 1, 1, rows, d]
    if by_hand:
        return importlib.import_module(GLUON).TensorDescriptor(t, *view, layout(d, 8 * t.element_size()))
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor(t, *view)


def layout(head_dim: int, bits: int):
    """How a block lies in shared memory, where the kernels in Gluon ask for it."""
    made = importlib.import_module("triton.experimental.gluon.language").NVMMASharedLayout
    return made(swizzle_byte_width=min(128, head_dim * bits // 8), element_bitwidth=bits, rank=5)


def as_read(size: Sizes, lists: Lists, owned: tuple[Tensor, ...], met: tuple[Tensor, ...]) -> tuple:
    """The tensors of which a kernel reads its own tile, and those of which it reads the tiles that it meets."""
    if size.reads != "pointers":
        by_hand = size.reads in BY_HAND
        met = tuple(described(t, lists.stride, size.cols, by_hand) for t in met)
        if size.reads != "specialized":
            owned = tuple(described(t, lists.stride, GROUP_ROWS if by_hand else size.rows, by_hand) for t in owned)
    return *owned, *met


def with_scratch(device: torch.device, size: Sizes, call, *arguments, **options) -> None:
    """Call a kernel, with memory for the descriptors that it makes itself, and leave Triton's own setting as it was."""
    if size.reads != "specialized":
        return call(*arguments, **options)

    def inside() -> None:
        importlib.import_module("triton").set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )
        call(*arguments, **options)

    copy_context().run(inside)
