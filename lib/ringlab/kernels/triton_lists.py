"""Every pattern in one launch a pass, over tile lists: the Triton backend, for compute capability 8.0 and newer.

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
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .. import cache as caches
from ..lists import Lists, make_lists
from ..patterns import BlockSparse, Dense, Pattern
from ..pieces import Source, piece_rows, split
from . import triton_choices
from .base import HALF, capability, needs_cuda, wants_dtype
from .external import missing
from .triton_reads import as_read, why_pointers, with_scratch
from .triton_sizes import BY_HAND, LEAST, Sizes, early, padded, precision, sizes

WIDEST = 256  # head_dim
REGISTERS = 168  # of a thread of the twelve warps in Gluon, before those that compute take from the one that fetches
LOG2E = 1.4426950408889634
BY_HAND_CODE = {"forward": "gluon_forward", "backward_q": "gluon_backward", "backward_kv": "gluon_backward"}
CODE = {"forward": "triton_code", "backward_q": "triton_backward", "backward_kv": "triton_backward"}
Pick = Callable[[str, Tensor, Tensor, bool, bool], Sizes]  # by pass, q, k, causal and joins


def interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors instead of compiling them: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """One launch of a pass; ``why``: what keeps the sizes that were picked from serving, so that the defaults do."""

    size: Sizes
    lists: Lists
    why: str | None


def tuned(name: str, q: Tensor, k: Tensor, causal: bool, joins: bool) -> Sizes:
    """The sizes that were tuned for a launch on this GPU, else the defaults."""
    d, compute = q.shape[3], compute_of(q)
    found = None
    if q.is_cuda or interpreted():
        use = triton_choices.Use.of(name, d, q.dtype, causal, joins, q.shape[2] // k.shape[2])
        found = triton_choices.chosen(use, q.device, compute)
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


def _lists(source: Source, size: Sizes, q: Tensor, k: Tensor, causal: bool, by: str, cached) -> Lists:
    rows, cols = _tile(source, size)
    (n, heads), (m, kv_heads) = q.shape[1:3], k.shape[1:3]

    def build() -> Lists:
        keys = None if m == n else m
        found = make_lists(source, n, heads, kv_heads, rows=rows, cols=cols, causal=causal, by=by, keys=keys)
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
