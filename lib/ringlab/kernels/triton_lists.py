"""Every pattern in one launch a pass, over tile lists: the Triton backend, for compute capability 8.0 and newer.

Rows are read by stride where they lie: nothing is gathered, and the branches of a pattern that fold (``pieces.split``)
are one softmax in one kernel; the next launch, if a pattern needs several, goes on from what the one before wrote.
Nothing is allocated but results, a row sum per query and, for half precision in several launches, fp32 results.

Proved without a GPU: values, by Triton's interpreter, and that the default sizes compile for every architecture from
8.0 to 12.0 without spills and within its shared memory. Not measured: any speed; so ``backend="auto"`` never takes it.
Open for measuring: sizes per GPU, the order of programs, ``split``'s rule, tensor descriptors in place of pointers.
"""

from __future__ import annotations

import importlib
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import cache as caches
from ..lists import Lists, make_lists
from ..patterns import BlockSparse, Dense, Pattern
from ..pieces import Source, piece_rows, split
from .base import HALF, capability, needs_cuda, wants_dtype
from .external import missing

WIDEST, LEAST = 256, 16  # head_dim; rows of the smallest tile that tensor cores take
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Sizes:
    """Rows of a tile that a program owns and of one that it meets, warps of a program, stages of its pipeline."""

    rows: int
    cols: int
    warps: int
    stages: int


# By pass, then head_dim up to: (2-byte dtypes; the same on Hopper and data-centre Blackwell; fp32 anywhere).
SIZES = {
    "forward": {
        64: (Sizes(128, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 32, 8, 1)),
        128: (Sizes(64, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 8, 1)),
        256: (Sizes(64, 64, 8, 1), Sizes(128, 32, 8, 2), Sizes(16, 16, 4, 1)),
    },
    "backward_q": {
        64: (Sizes(128, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 32, 8, 1)),
        128: (Sizes(128, 32, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 8, 2)),
        256: (Sizes(32, 32, 8, 1), Sizes(32, 32, 8, 1), Sizes(16, 16, 8, 2)),
    },
    "backward_kv": {
        64: (Sizes(128, 32, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 4, 1)),
        128: (Sizes(64, 32, 8, 2), Sizes(128, 32, 8, 2), Sizes(32, 16, 8, 1)),
        256: (Sizes(32, 32, 8, 1), Sizes(32, 32, 8, 1), Sizes(16, 16, 8, 1)),
    },
}


def sizes(name: str, head_dim: int, dtype: torch.dtype, compute: tuple[int, int], joins: bool = False) -> Sizes:
    """The sizes of the pass ``name`` on a compute capability, before a pattern of short pieces makes them smaller.

    ``joins``: of a launch that goes on from what another wrote, which takes more registers.
    """
    small, large, single = next(x for most, x in SIZES[name].items() if head_dim <= most)
    return single if dtype not in HALF else large if compute[0] in (9, 10) and not joins else small


def precision(head_dim: int, dtype: torch.dtype) -> str:
    """How products are taken: of fp32 as three of tf32, which keeps its accuracy, or, of wide heads, one by one."""
    return "tf32" if dtype in HALF else "tf32x3" if head_dim <= 64 else "ieee"


def early(compute: tuple[int, int]) -> bool:
    """Whether a program fetches the next entry of its list early; Triton 3.7 fails to compile that for 10.x."""
    return compute[0] != 10


def padded(head_dim: int) -> int:
    """Columns that a program computes with: a power of two that tensor cores take."""
    return max(LEAST, 1 << (head_dim - 1).bit_length())


def interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors instead of compiling them: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonLists:
    """Attention by tile lists: a dense kernel like the others, and whole patterns by ``attend`` and ``gradients``."""

    name = "triton"

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
        (b, n, heads, _), kv_heads = q.shape, k.shape[2]
        sources = split(pattern, n, heads, kv_heads, _sizes("forward", q).rows)
        taken = [_sizes("forward", q, i > 0) for i in range(len(sources))]
        found = [_lists(source, size, q, k, causal, "query", cached) for source, size in zip(sources, taken)]
        dtype = q.dtype if len(found) == 1 else torch.float32
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(b, heads, n, dtype=torch.float32, device=q.device)
        if not found[0].covered:
            out.zero_()
            lse.fill_(-torch.inf)
        tensors = (q, k, v, out)
        for i, (lists, size) in enumerate(zip(found, taken)):
            _launch("forward", lists, size, tensors, (q, k, v, out, lse), heads, kv_heads, n, scale, causal, i > 0)
        return out.to(q.dtype), lse

    def gradients(self, dout, dlse, q, k, v, out, lse, pattern: Pattern, causal, scale, cached=caches.GLOBAL.get):
        """dq, dk, dv for the cotangents ``dout`` and ``dlse`` (b, h, n) or None, with the final out and lse."""
        (_, n, heads, _), kv_heads = q.shape, k.shape[2]
        dout, out, lse = _dense_rows(dout), _dense_rows(out), lse.contiguous()
        less = _delta(dout, out, dlse, n, heads)
        grads = []
        for name, by, results in (("backward_q", "query", (q,)), ("backward_kv", "key", (k, v))):
            sources = split(pattern, n, heads, kv_heads, _sizes(name, q).rows)
            taken = [_sizes(name, q, i > 0) for i in range(len(sources))]
            found = [_lists(source, size, q, k, causal, by, cached) for source, size in zip(sources, taken)]
            dtype = q.dtype if len(found) == 1 else torch.float32
            into = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in results]
            if not found[0].covered:
                for t in into:
                    t.zero_()
            pointers, tensors = (dout, q, k, v, lse, less, *into), (dout, q, k, v, into[0])
            for i, (lists, size) in enumerate(zip(found, taken)):
                _launch(name, lists, size, tensors, pointers, heads, kv_heads, n, scale, causal, i > 0)
            grads += [t.to(q.dtype) for t in into]
        return tuple(grads)


def _sizes(name: str, q: Tensor, joins: bool = False) -> Sizes:
    return sizes(name, q.shape[3], q.dtype, _compute(q), joins)


def _compute(t: Tensor) -> tuple[int, int]:
    return capability(t.device) if t.is_cuda else (8, 0)


def _dense_rows(t: Tensor) -> Tensor:
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


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None, n: int, heads: int) -> Tensor:
    code = importlib.import_module("ringlab.kernels.triton_code")
    b, d, rows = dout.shape[0], dout.shape[3], 32
    found = torch.empty(b, heads, n, dtype=torch.float32, device=dout.device)
    extra = found if dlse is None else dlse.float().contiguous()
    with on_device(dout):
        code.delta[(-(-n // rows), b * heads)](
            dout, out, extra, found, heads, n, *dout.stride()[:3], *out.stride()[:3],
            ROWS=rows, DIM=d, PAD=padded(d), HAS_LSE=dlse is not None,
        )  # fmt: skip
    return found


def _launch(name, lists: Lists, size: Sizes, strided, pointers, heads, kv_heads, n, scale, causal, join) -> None:
    """One program for each tile and batch entry."""
    programs, (b, *_, d) = len(lists.tiles), strided[0].shape
    if not programs:
        return
    code = importlib.import_module("ringlab.kernels.triton_code")
    with on_device(strided[0]):
        getattr(code, name)[(programs * b,)](
            *pointers, lists.tiles, lists.entries, scale * LOG2E, programs, heads, heads // kv_heads, n,
            *(s for t in strided for s in t.stride()[:3]),
            ROWS=lists.rows, COLS=lists.cols, DIM=d, PAD=padded(d), CAUSAL=causal, JOIN=join,
            PRECISION=precision(d, strided[0].dtype), EARLY=early(_compute(strided[0])),
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
