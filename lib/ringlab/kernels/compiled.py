"""The kernel "compiled": attention on a CPU by ``native.cpp``.

torch's own CPU kernel multiplies by a library that uses half of the vector width of
some CPUs, and takes few queries at a time in short calls.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .. import native
from ..tiles.dense import dense
from ..tiles.table import Table
from ..torch_private import refuse_recording
from .base import HALF, Kernel, wants_dtype

DTYPES = (torch.float32, *HALF)  # by their numbers in native.cpp
ABSENT = (0,) * 5  # of a tensor: its address and strides
WALK_BYTES = 8 * (20 + 10 * len(ABSENT))  # of the structure that native.cpp reads


class Compiled(Kernel):
    """Online softmax in blocks; bf16 is multiplied as such where the CPU can.
    ``forward``, ``backward`` return fp32.
    """

    name = "compiled"

    def refuses(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"needs a CPU tensor, this is {device.type}"
        return wants_dtype(dtype, DTYPES) or native.library()[1]

    def forward(self, q, k, v, causal, scale):
        b, m, h, _ = q.shape
        out = q.new_empty(q.shape, dtype=torch.float32)
        lse = q.new_empty((b, h, m), dtype=torch.float32)
        dense_walk(q, k, causal, scale).forward(q, k, v, out, lse)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        dq = q.new_empty(q.shape, dtype=torch.float32)
        dk, dv = (t.new_zeros(t.shape, dtype=torch.float32) for t in (k, v))
        dout, out = (in_rows(t.to(q.dtype)) for t in (dout, out))
        walk = dense_walk(q, k, causal, scale)
        walk.backward(dout, None, q, k, v, out, lse, (dq, dk, dv))
        return dq, dk, dv


def in_rows(t: Tensor) -> Tensor:
    """Return t, with neighbouring items in its last dimension."""
    return t if t.stride(-1) == 1 else t.contiguous()


@dataclass(frozen=True, eq=False)
class Walk:
    """A walk of a table by native.cpp: attention of each tile's rows to its visits' keys.

    ``scale`` is positive; ``sinks`` (h,) and ``weights``, of the table's ``source``, are
    fp32. q, out and their gradients are (b, n, h, d), k and v (b, m, h_kv, d), dense in
    d; lse and dlse are (b, h, n). Rows that are in no tile are not written.
    """

    table: Table
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    weights: Tensor | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, merge=False
    ):
        """Write out, in fp32 or q's dtype, and fp32 lse. ``merge``: join the results
        with those of other keys, and the sinks, that are there, in fp32.
        """
        if merge and out.dtype != torch.float32:
            raise ValueError("results are merged in float32")
        self._run("walk_tiles", (q, k, v, out, lse), merge)

    def backward(
        self, dout, dlse, q, k, v, out, lse, grads, dweights=None, add=False
    ) -> None:
        """Write dq, in fp32 or q's dtype; add to fp32 dk, dv and ``dweights`` (c, weights), one for each
        of the tiles that share visits. ``grads``: dq, dk, dv; dlse may be None.
        ``add``: add to dq, too, which is fp32.
        """
        if add and grads[0].dtype != torch.float32:
            raise ValueError("gradients are added in float32")
        tensors = q, k, v, out, lse, dout, *grads, dlse
        self._run("walk_tiles_backward", tensors, add, dweights)

    @cached_property
    def _columns(self) -> list[int]:
        """The sizes and addresses of what does not change from call to call."""
        table = self.table
        weights = self.weights
        columns = table.tiles, table.visits, table.bands, table.numbers
        return [len(table.tiles), 0 if weights is None else len(weights)] + [
            0 if t is None else t.data_ptr() for t in (*columns, weights, self.sinks)
        ]

    def _run(
        self, function: str, tensors, merge: bool, dweights: Tensor | None = None
    ) -> None:
        """Call native.cpp; ``tensors`` are those of its ``Walk``, in that order."""
        q, k, _, out, *_ = tensors
        written = out if len(tensors) == 5 else tensors[6]
        refuse_recording("the compiled kernel", "cpu_flash")
        if q.is_meta or hasattr(q, "fake_mode"):  # tensors without data
            return
        threads = torch.get_num_threads()
        _, _, heads, d = q.shape
        _, keys, kv_heads, _ = k.shape
        numbers = [
            *self._columns,
            heads,
            kv_heads,
            keys,
            d,
            DTYPES.index(q.dtype),
            merge,
            written.dtype != torch.float32,
            threads,
            1 if dweights is None else len(dweights),
            0 if dweights is None else dweights.data_ptr(),
        ]
        copies = []  # kept until the call has ended
        for t in tensors:
            if t is not None and t.is_neg():
                copies.append(t := t.resolve_neg())
            numbers += _place(t)
        softcap = self.softcap or 0.0
        call = struct.pack(f"2d{len(numbers)}q", self.scale, softcap, *numbers)
        call = call.ljust(WALK_BYTES, b"\0")
        if getattr(native.library()[0], function)(call):
            raise MemoryError(f"no memory for the scratch of {threads} threads")


@lru_cache(maxsize=1024)
def _dense_walk(
    batch: int,
    rows: int,
    keys: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    scale: float,
) -> Walk:
    return Walk(dense(batch, rows, keys, heads, kv_heads, causal), scale)


def dense_walk(q: Tensor, k: Tensor, causal: bool, scale: float) -> Walk:
    """Return the walk of a dense call."""
    batch, rows, heads, _ = q.shape
    _, keys, kv_heads, _ = k.shape
    return _dense_walk(batch, rows, keys, heads, kv_heads, causal, scale)


def _place(t: Tensor | None) -> tuple[int, ...]:
    """The address and strides of t (b, rows, h, d) or (b, h, rows), as ``Rows``."""
    if t is None:
        return ABSENT
    pointer = t.data_ptr()
    if not pointer and t.numel():
        raise NotImplementedError(
            f"the compiled kernel needs plain tensors, got {type(t).__name__}"
        )
    if t.dim() == 4:
        return pointer, *t.stride()
    batch, head, row = t.stride()
    return pointer, batch, row, head, 0
