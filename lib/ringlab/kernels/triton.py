"""Any pattern in one kernel launch per pass: the Triton backend, for compute capability
8.0 and newer.

Rows are read in place by strides; nothing is gathered. The branches of a pattern that
``tile_schedule.split`` groups are one softmax in one launch. If a pattern needs several
launches, each adds to the results of the one before. Only results are allocated, one
row sum per query and, for half precision in several launches, fp32 results.

On compute capability 9.0 the Gluon kernels run where they can (see ``gluon``),
elsewhere kernels that read by pointers. Values are tested by Triton's interpreter, and
the sizes compile for compute capability 8.0 to 12.0 without spills. Measured on an H200
(2026-11-26, tree 8f63b8c): right, and in half precision 2.6 to 71 times as fast as a
call for each branch or block; in fp32 torch's efficient kernel is 2.2 times as fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import cache as caches
from ..block_patterns import BlockSparse
from ..patterns import Dense, Pattern
from ..torch_private import refuse_recording
from . import gluon, jit, tile_schedule, triton_config
from .base import HALF, Kernel, capability, needs_cuda, wants_dtype
from .external import missing
from .tile_schedule import Source, TileSchedule
from .triton_config import LOG2E, LaunchKind, Sizes, early, padded, precision

MAX_HEAD_DIM = 256


def interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors instead of compiling them: for
    tests.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(eq=False)
class Launch:
    """One launch of a pass, for tensors that differ in nothing but their addresses.

    ``compiled`` is of ``jit.launch``, ``descriptors`` of ``gluon``.
    """

    size: Sizes
    schedule: TileSchedule
    compiled: dict = field(default_factory=dict)
    descriptors: list = field(default_factory=list)


def kind_of_launch(name: str, q: Tensor, joins: bool = False) -> LaunchKind:
    """Return the kind of a launch of the pass ``name``, for q (b, n, h, d)."""
    return LaunchKind(name, q.shape[3], q.dtype, compute_of(q), joins)


class TritonKernel(Kernel):
    """A dense kernel like the others, and whole patterns by ``attend`` and
    ``gradients``.
    """

    name = "triton"
    whole_patterns = True

    def refuses(self, device, dtype, head_dim):
        why = None if interpreted() else needs_cuda(device, (8, 0))
        if why := why or missing("triton", "triton"):
            return why
        if interpreted() and dtype == torch.bfloat16:
            return "triton's interpreter multiplies bfloat16 wrongly"
        if head_dim > MAX_HEAD_DIM:
            return f"needs a head_dim of at most {MAX_HEAD_DIM}, not {head_dim}"
        return wants_dtype(dtype, (torch.float32, *HALF))

    def forward(self, q, k, v, causal, scale):
        return self.attend(q, k, v, Dense(), causal, scale)

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        return self.gradients(dout, None, q, k, v, out, lse, Dense(), causal, scale)

    def attend(
        self,
        q,
        k,
        v,
        pattern: Pattern,
        causal: bool,
        scale: float,
        cached=caches.GLOBAL.get,
    ):
        """out (b, n, h, d) in q's dtype and lse (b, h, n) in fp32; q (b, n, h, d), k
        and v (b, m, h_kv, d).
        """
        refuse_recording("Triton's kernels", "efficient")
        b, n, heads, _ = q.shape
        launches = self._kept("forward", (q, k, v), pattern, causal, cached)
        dtype = q.dtype if len(launches) == 1 else torch.float32
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(b, heads, n, dtype=torch.float32, device=q.device)
        if not launches[0].schedule.covered:
            out.zero_()
            lse.fill_(-torch.inf)
        for i, launch in enumerate(launches):
            _launch("forward", launch, (q, k, v), (), (out, lse), scale, causal, i > 0)
        return out.to(q.dtype), lse

    def gradients(
        self,
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        pattern: Pattern,
        causal,
        scale,
        cached=caches.GLOBAL.get,
    ):
        """dq, dk, dv for the cotangents ``dout`` and ``dlse`` (b, h, n) or None, with
        the final out and lse.
        """
        dout, rows = dense_rows(dout), row_sums(dout, out, lse, dlse, cached)
        call = dout, rows, q, k, v, pattern, causal, scale, cached
        (dq,) = self.gradient("backward_q", *call)
        return dq, *self.gradient("backward_kv", *call)

    def gradient(
        self,
        name,
        dout,
        rows,
        q,
        k,
        v,
        pattern: Pattern,
        causal,
        scale,
        cached,
    ):
        """(dq,) of "backward_q" or (dk, dv) of "backward_kv"; ``rows`` is the result of
        ``row_sums``.
        """
        refuse_recording("Triton's kernels", "efficient")
        launches = self._kept(name, (dout, q, k, v), pattern, causal, cached)
        dtype = q.dtype if len(launches) == 1 else torch.float32
        new = torch.empty if launches[0].schedule.covered else torch.zeros
        inputs = (q,) if name == "backward_q" else (k, v)
        grads = [new(t.shape, dtype=dtype, device=t.device) for t in inputs]
        for i, launch in enumerate(launches):
            _launch(name, launch, (dout, q, k, v), rows, grads, scale, causal, i > 0)
        return tuple(t.to(q.dtype) for t in grads)

    def _kept(self, name, read, pattern: Pattern, causal: bool, cached) -> list[Launch]:
        """The launches of a pass, kept from call to call for one layout of the tensors
        that it reads.
        """
        q, k = read[-3:-1]
        kinds = (kind_of_launch(name, q, joins) for joins in (False, True))
        sizes = map(triton_config.sizes, kinds)
        key = "launches", name, pattern, causal, *sizes, *map(layout, read), q.device
        return cached(key, lambda: self.launches(name, read, pattern, causal, cached))

    def launches(
        self, name, read, pattern: Pattern, causal: bool, cached=caches.GLOBAL.get
    ) -> list[Launch]:
        """The launches of the pass ``name``, in order; ``read`` is (dout of a backward
        pass,) q, k, v.
        """
        (q, k), launches = read[-3:-1], []
        by = "key" if name == "backward_kv" else "query"
        rows = triton_config.sizes(kind_of_launch(name, q)).rows
        sources = tile_schedule.split(pattern, *q.shape[1:3], k.shape[2], rows)
        for i, source in enumerate(sources):
            kind = kind_of_launch(name, q, i > 0)
            size = triton_config.sizes(kind)
            schedule = _schedule(source, size, q, k, causal, by, cached)
            if size.reads == "gluon" and gluon.unfit(size, schedule, read, i > 0):
                size = triton_config.pointer_sizes(kind)
                schedule = _schedule(source, size, q, k, causal, by, cached)
            launches.append(Launch(size, schedule))
        return launches


def compute_of(t: Tensor) -> tuple[int, int]:
    """The compute capability of a tensor's device; where Triton interprets, that of the
    oldest supported one.
    """
    return capability(t.device) if t.is_cuda else (8, 0)


def layout(t: Tensor) -> tuple:
    """What a launch depends on of a tensor that it reads."""
    return t.shape, t.stride(), t.dtype, t.data_ptr() % jit.ALIGNED


def dense_rows(t: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _schedule(
    source: Source, size: Sizes, q: Tensor, k: Tensor, causal: bool, by: str, cached
) -> TileSchedule:
    """The cached schedule of a source, with smaller tiles if its row intervals are
    shorter.
    """
    most = padded(tile_schedule.interval_rows(source))
    rows = min(size.rows, most)
    cols = size.cols if isinstance(source, BlockSparse) else min(size.cols, most)
    (n, heads), (m, kv_heads) = q.shape[1:3], k.shape[1:3]
    options = {"rows": rows, "cols": cols, "causal": causal, "by": by, "keys": m}
    call = source, n, heads, kv_heads

    def build() -> TileSchedule:
        return tile_schedule.make_schedule(*call, **options).to(q.device)

    return cached(("tile schedule", *call, *options.values(), q.device), build)


def row_sums(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, cached
) -> tuple[Tensor, Tensor]:
    """(lse in log2, rowsum(dout * out) - dlse), each (b, h, n) in fp32, for (b, n, h,
    d) and lse, dlse (b, h, n): what every gradient pass reads of a row. The lse of a
    row that sees nothing becomes inf, so that its probabilities are 0.
    """
    from . import triton_kernels

    dout, out, lse = dense_rows(dout), dense_rows(out), lse.contiguous()
    (b, n, heads, d), rows = dout.shape, 32
    log2 = torch.empty_like(lse)
    less = torch.empty_like(lse)
    extra = less if dlse is None else dlse.float().contiguous()
    key = "row sums", layout(dout), layout(out), dlse is None, dout.device
    constants = {"ROWS": rows, "DIM": d, "PAD": padded(d), "HAS_LSE": dlse is not None}
    tiles = -(-n // rows)
    numbers = heads, n, tiles, *dout.stride()[:3], *out.stride()[:3]
    with torch.cuda.device_of(dout):
        jit.launch(
            triton_kernels.row_sums,
            cached(key, dict),
            tiles * b * heads,
            (dout, out, lse, extra, log2, less, *numbers),
            constants,
        )
    return log2, less


def _launch(name, launch: Launch, read, rows, results, scale, causal, join) -> None:
    """One launch, a program for each tile and batch entry: ``read`` is (dout,) q, k, v,
    ``rows`` what ``row_sums`` gave to a backward pass, ``results`` are written.
    """
    from . import triton_kernels

    size, schedule, (q, k) = launch.size, launch.schedule, read[-3:-1]
    (b, n, heads, d), programs = q.shape, len(schedule.tiles)
    if not programs:
        return
    if size.reads == "gluon":
        gluon.run(name, launch, read, rows, results, scale, causal)
        return
    constants = {
        "ROWS": schedule.rows,
        "COLS": schedule.cols,
        "DIM": d,
        "PAD": padded(d),
        "CAUSAL": causal,
        "BAND": schedule.band is not None,
        "JOIN": join,
        "PRECISION": precision(d, q.dtype),
        "EARLY": early(compute_of(q)),
    }
    strides = (s for t in (*read, results[0]) for s in t.stride()[:3])
    arguments = (
        *read,
        *rows,
        *results,
        schedule.tiles,
        schedule.entries,
        scale * LOG2E,
        programs,
        heads,
        heads // k.shape[2],
        n,
        *(schedule.band or (0, 0)),
        *strides,
    )
    with torch.cuda.device_of(q):
        jit.launch(
            getattr(triton_kernels, name),
            launch.compiled,
            programs * b,
            arguments,
            constants,
            num_warps=size.warps,
            num_stages=size.stages,
        )
