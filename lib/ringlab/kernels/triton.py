"""How list kernels read the tiles that they meet: by pointers, or by tensor descriptors, which the copy engine serves.

A descriptor spans the view (b, stride, h, n / stride, d) of a tensor, in which the rows of a tile, ``stride`` apart,
are a block. It is made on the host for each call; only the queries of specialised warps need one made on the GPU.

Every pattern in one launch a pass, over tile lists: the Triton backend, for compute capability 8.0 and newer.

Rows are read by stride where they lie: nothing is gathered, and the branches of a pattern that fold (``pieces.split``)
are one softmax in one kernel; the next launch, if a pattern needs several, goes on from what the one before wrote.
Nothing is allocated but results, a row sum per query (with the kernels in Gluon, its log-sum-exp once more) and, for
half precision in several launches, fp32 results.

Proved without a GPU: values, by Triton's interpreter (of the kernels in Gluon, by the tests' own), and that the sizes
compile for every architecture from 8.0 to 12.0 within its shared memory and without spills. Not measured: any speed; so
``backend="auto"`` never takes it.
Tile sizes, and how tensors are read (by pointers, by tensor descriptors, or by the kernels in Gluon for Hopper), are
what ``triton_tune`` chose for this GPU, else the defaults, by pointers. Open for measuring: the order of programs,
``split``'s rule.

The list kernels as operators, so that torch.compile traces a call of them without a break in its graph.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import cache as caches
from ..block_patterns import BlockSparse
from ..patterns import Dense, Pattern, from_dict
from . import triton_config
from .base import HALF, capability, needs_cuda, wants_dtype
from .external import missing
from .tile_schedule import TileSchedule, Source, make_schedule, piece_rows, split
from .triton_config import BY_HAND, LEAST, Sizes, early, padded, precision, sizes

ALIGNED = 16  # bytes: what a tensor descriptor asks of addresses and strides
GLUON = "triton.experimental.gluon.nvidia.hopper"
GROUP_ROWS = 64  # gluon_code: a descriptor of queries brings those of one warp group


def too_long(size: Sizes, lists: TileSchedule) -> str | None:
    """Why a launch takes smaller tiles than ``size`` says, or None."""
    if (lists.rows, lists.cols) == (size.rows, size.cols):
        return None
    return f"the pattern's pieces are shorter than tiles of {size.rows} x {size.cols}"


def why_pointers(size: Sizes, lists: TileSchedule, tensors: tuple[Tensor, ...], joins: bool = False) -> str | None:
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


def as_read(size: Sizes, lists: TileSchedule, owned: tuple[Tensor, ...], met: tuple[Tensor, ...]) -> tuple:
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


WIDEST = 256  # head_dim
REGISTERS = 168  # of a thread of the twelve warps in Gluon, before those that compute take from the one that fetches
LOG2E = 1.4426950408889634
BY_HAND_CODE = {
    "forward": "experimental.gluon_forward",
    "backward_q": "experimental.gluon_backward",
    "backward_kv": "experimental.gluon_backward",
}
CODE = {"forward": "triton_forward", "backward_q": "triton_backward", "backward_kv": "triton_backward"}
Pick = Callable[[str, Tensor, Tensor, bool, bool], Sizes]  # by pass, q, k, causal and joins


def interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors instead of compiling them: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """One launch of a pass; ``why``: what keeps the sizes that were picked from serving, so that the defaults do."""

    size: Sizes
    lists: TileSchedule
    why: str | None


def tuned(name: str, q: Tensor, k: Tensor, causal: bool, joins: bool) -> Sizes:
    """The sizes that were tuned for a launch on this GPU, else the defaults."""
    d, compute = q.shape[3], compute_of(q)
    found = None
    if q.is_cuda or interpreted():
        use = triton_config.Use.of(name, d, q.dtype, causal, joins, q.shape[2] // k.shape[2])
        found = triton_config.chosen(use, q.device, compute)
    return found or sizes(name, d, q.dtype, compute, joins)


class TritonLists:
    """Attention by tile lists: a dense kernel like the others, and whole patterns by ``attend`` and ``gradients``.

    ``pick`` chooses the sizes of a launch.
    """

    name = "triton"

    def __init__(self, pick: Pick = tuned) -> None:
        self._pick = pick

    def refuses(self, device, dtype, head_dim):
        why = None if interpreted() else needs_cuda(device, (8, 0))
        why = why or missing("triton", "triton")
        if why is not None:
            return why
        if interpreted() and dtype == torch.bfloat16:
            return "triton's interpreter multiplies bfloat16 wrongly"
        if head_dim > WIDEST:
            return f"needs a head_dim of at most {WIDEST}, not {head_dim}"
        return wants_dtype(dtype, (torch.float32, *HALF))

    def forward(self, q, k, v, causal, scale):
        return self.attend(q, k, v, Dense(), causal, scale)

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        return self.gradients(dout, None, q, k, v, out, lse, Dense(), causal, scale)

    def attend(self, q, k, v, pattern: Pattern, causal: bool, scale: float, cached=caches.GLOBAL.get):
        """out (b, n, h, d) in q's dtype and lse (b, h, n) in fp32; q (b, n, h, d), k and v (b, m, h_kv, d)."""
        b, n, heads, _ = q.shape
        found = self.launches("forward", q, k, v, pattern, causal, cached)
        dtype = q.dtype if len(found) == 1 else torch.float32
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(b, heads, n, dtype=torch.float32, device=q.device)
        if not found[0].lists.covered:
            out.zero_()
            lse.fill_(-torch.inf)
        for i, one in enumerate(found):
            arguments = (*as_read(one.size, one.lists, (q,), (k, v)), out, lse)
            _launch("forward", one, (q, k, v, out), arguments, k.shape[2], n, scale, causal, i > 0)
        return out.to(q.dtype), lse

    def gradients(self, dout, dlse, q, k, v, out, lse, pattern: Pattern, causal, scale, cached=caches.GLOBAL.get):
        """dq, dk, dv for the cotangents ``dout`` and ``dlse`` (b, h, n) or None, with the final out and lse."""
        dout, lse, less = dense_rows(dout), lse.contiguous(), row_sums(dout, out, dlse)
        parts = (self.gradient(name, dout, less, q, k, v, lse, pattern, causal, scale, cached)
                 for name in ("backward_q", "backward_kv"))  # fmt: skip
        return tuple(t for part in parts for t in part)

    def gradient(self, name, dout, less, q, k, v, lse, pattern: Pattern, causal, scale, cached=caches.GLOBAL.get):
        """(dq,) of "backward_q" or (dk, dv) of "backward_kv"; ``less`` is of ``row_sums``."""
        found = self.launches(name, q, k, v, pattern, causal, cached, dout)
        dtype = q.dtype if len(found) == 1 else torch.float32
        into = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in ((q,) if name == "backward_q" else (k, v))]
        if not found[0].lists.covered:
            for t in into:
                t.zero_()
        for i, one in enumerate(found):
            if name == "backward_q":
                read = as_read(one.size, one.lists, (dout, q), (k, v))
            else:
                *mine, g, queries = as_read(one.size, one.lists, (k, v), (dout, q))
                read = g, queries, *mine
            final = lse if one.size.reads not in BY_HAND else alive(lse)
            arguments = (*read, final, less, *into)
            _launch(name, one, (dout, q, k, v, into[0]), arguments, k.shape[2], q.shape[1], scale, causal, i > 0)
        return tuple(t.to(q.dtype) for t in into)

    def launches(self, name, q, k, v, pattern: Pattern, causal: bool, cached=caches.GLOBAL.get, dout=None):
        """What the pass ``name`` launches, one after the other; a backward pass says its ``dout``."""
        tensors = (q, k, v) if dout is None else (dout, q, k, v)
        (_, n, heads, d), kv_heads, by = q.shape, k.shape[2], "key" if name == "backward_kv" else "query"
        found: list[Launch] = []
        for source in split(pattern, n, heads, kv_heads, self._pick(name, q, k, causal, False).rows):
            size = self._pick(name, q, k, causal, bool(found))
            lists = _lists(source, size, q, k, causal, by, cached)
            if why := why_pointers(size, lists, tensors, bool(found)):
                size = sizes(name, d, q.dtype, compute_of(q), bool(found))
                lists = _lists(source, size, q, k, causal, by, cached)
            found.append(Launch(size, lists, why))
        return found


def compute_of(t: Tensor) -> tuple[int, int]:
    """The compute capability under a tensor; that of the oldest supported where Triton interprets."""
    return capability(t.device) if t.is_cuda else (8, 0)


def dense_rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _tile(source: Source, size: Sizes) -> tuple[int, int]:
    """Rows owned and met for a source whose pieces may be shorter than a tile."""
    short = max(LEAST, 1 << (piece_rows(source) - 1).bit_length())
    return min(size.rows, short), size.cols if isinstance(source, BlockSparse) else min(size.cols, short)


def _lists(source: Source, size: Sizes, q: Tensor, k: Tensor, causal: bool, by: str, cached) -> TileSchedule:
    rows, cols = _tile(source, size)
    (n, heads), (m, kv_heads) = q.shape[1:3], k.shape[1:3]

    def build() -> TileSchedule:
        keys = None if m == n else m
        found = make_schedule(source, n, heads, kv_heads, rows=rows, cols=cols, causal=causal, by=by, keys=keys)
        return found.to(q.device)

    return cached(caches.key("lists", source, n, m, heads, kv_heads, rows, cols, causal, by, q.device), build)


def on_device(t: Tensor):
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def row_sums(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, (b, h, n) in fp32, for (b, n, h, d): what every gradient pass subtracts."""
    code = importlib.import_module("ringlab.kernels.triton_backward")
    dout, out = dense_rows(dout), dense_rows(out)
    (b, n, heads, d), rows = dout.shape, 32
    found = torch.empty(b, heads, n, dtype=torch.float32, device=dout.device)
    extra = found if dlse is None else dlse.float().contiguous()
    with on_device(dout):
        code.delta[(-(-n // rows), b * heads)](
            dout, out, extra, found, heads, n, *dout.stride()[:3], *out.stride()[:3],
            ROWS=rows, DIM=d, PAD=padded(d), HAS_LSE=dlse is not None,
        )  # fmt: skip
    return found


def _launch(name, one: Launch, strided, arguments, kv_heads, n, scale, causal, join) -> None:
    """One program for each tile and batch entry."""
    (size, lists, _), (b, _, heads, d) = one, strided[0].shape
    programs = len(lists.tiles)
    if not programs:
        return
    scalars = (scale * LOG2E, programs)
    if size.reads in BY_HAND:
        return _launch_by_hand(name, one, strided[0], arguments, (*scalars, programs * b), kv_heads, n, causal)
    kernel = getattr(importlib.import_module(f"ringlab.kernels.{CODE[name]}"), name)[(programs * b,)]
    fixed = {
        "ROWS": lists.rows, "COLS": lists.cols, "DIM": d, "PAD": padded(d), "CAUSAL": causal, "JOIN": join,
        "PRECISION": precision(d, strided[0].dtype), "EARLY": early(compute_of(strided[0]), size.reads),
        "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    fixed |= {"READS": size.reads, "STEP": 0 if size.reads == "pointers" else lists.stride}
    if name == "forward":
        fixed["MASK"] = size.reads != "specialized" or not lists.whole
    strides = (s for t in strided for s in t.stride()[:3])
    scalars = (*scalars, heads, heads // kv_heads, n, *strides)
    with on_device(strided[0]):
        with_scratch(strided[0].device, size, kernel, *arguments, lists.tiles, lists.entries, *scalars, **fixed)


def _launch_by_hand(name, one: Launch, q, arguments, scalars, kv_heads, n, causal) -> None:
    """The same by a kernel in Gluon."""
    (size, lists, _), (_, _, heads, d), (*_, work) = one, q.shape, scalars
    at_once = min(work, multiprocessors(q.device)) if size.reads == "persistent" else work
    kernel = getattr(importlib.import_module(f"ringlab.kernels.{BY_HAND_CODE[name]}"), name)[(at_once,)]
    lengths = (n, arguments[-1].shape[1]) if name == "backward_kv" else (n,)
    fixed = {"COLS": lists.cols, "DIM": d, "STEP": lists.stride, "CAUSAL": causal, "STAGES": size.stages}
    with on_device(q):
        kernel(*arguments, lists.tiles, lists.entries, *scalars, heads, heads // kv_heads, *lengths, **fixed,
               num_warps=size.warps, maxnreg=REGISTERS)  # fmt: skip


def alive(lse: Tensor) -> Tensor:
    """log2-sum-exps by which the probabilities of a row that sees nothing are 0."""
    return torch.where(lse == -torch.inf, torch.inf, lse * LOG2E)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of what stands for one in tests, two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


_KERNEL = TritonLists()


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n) for a positive ``scale``; differentiable once.

    Raises NotImplementedError, with the reason, where the kernels cannot run.
    """
    return lists_forward(q, k, v, _text(pattern), causal, scale)


def _text(pattern: Pattern) -> str:
    return json.dumps(pattern.to_dict())


# A Python object in, a string out: nothing that a compiler must trace (as in ``ring.ranks``).
_text._dynamo_marked_constant = True


@lru_cache(maxsize=256)
def _pattern(text: str) -> Pattern:
    return from_dict(json.loads(text))


def _ready(q: Tensor, *others: Tensor) -> list[Tensor]:
    why = _KERNEL.refuses(q.device, q.dtype, q.shape[3])
    if why is not None:
        raise NotImplementedError(f"backend 'triton' cannot run on {q.device.type} in {q.dtype}: {why}")
    return [t if t.stride(-1) == 1 else t.contiguous() for t in (q, *others)]


@torch.library.custom_op("ringlab::lists_forward", mutates_args=())
def lists_forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: str, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse."""
    return _KERNEL.attend(*_ready(q, k, v), _pattern(pattern), causal, scale)


@lists_forward.register_fake
def _(q, k, v, pattern, causal, scale):
    b, n, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(b, heads, n, dtype=torch.float32)


@torch.library.custom_op("ringlab::lists_backward", mutates_args=())
def lists_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: str,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    q, k, v = _ready(q, k, v)
    return _KERNEL.gradients(dout, dlse, q, k, v, out, lse, _pattern(pattern), causal, scale)


@lists_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup(ctx, inputs, output):
    q, k, v, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 6
    dout = torch.zeros_like(out) if dout is None else dout
    return *lists_backward(dout, dlse, q, k, v, out, lse, *ctx.rest), None, None, None


lists_forward.register_autograd(_backward, setup_context=_setup)
