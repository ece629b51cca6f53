"""The kernel "compiled": attention on a CPU by ``native.cpp``.

torch's own CPU kernel multiplies by a library that uses half of the vector width of
some CPUs, and takes few queries at a time in short calls.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import native
from ..tiles.table import Table
from ..torch_private import refuse_recording
from .base import HALF, Cost, Kernel, wants_dtype

DTYPES = (torch.float32, *HALF)  # by their numbers in native.cpp
ABSENT = (0,) * 5  # of a tensor: its address and strides


def _work(rows: int, keys: Tensor | float) -> Tensor | float:
    """Queries are padded to 64; 512 of them share a copy of the keys."""
    padded = -(-rows // 64) * 64
    return keys * ((padded + rows) / 2 + 33 * -(-rows // 512)) + 58 * padded


COST = Cost(
    _work, call=90_000, merge=20, copied=1.1, bias=1.04, biases=1.2, block=96, gain=0.95
)


class Compiled(Kernel):
    """Online softmax in blocks; bf16 is multiplied as such where the CPU can.
    ``forward``, ``backward`` return fp32.
    """

    name = "compiled"
    lower_right = takes_bias = in_place = True
    cost = COST

    def refuses(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"needs a CPU tensor, this is {device.type}"
        return wants_dtype(dtype, DTYPES) or native.library()[1]

    def forward(self, q, k, v, causal, scale, bias=None, index=None):
        b, m, h, _ = q.shape
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty((b, h, m), dtype=torch.float32, device=q.device)
        self.forward_into(out, lse, q, k, v, causal, scale, bias, index, merge=False)
        return out, lse

    def forward_into(
        self,
        out,
        lse,
        q,
        k,
        v,
        causal,
        scale,
        bias=None,
        index=None,
        *,
        merge: bool,
    ):
        """Write out (b, m, h, d), in fp32 or q's dtype, and fp32 lse (b, h, m).

        ``merge``: join the results with those of other keys that are there, in fp32.
        """
        tensors = q, k, v, bias, out, lse, index
        _run("forward", tensors, causal, scale, merge)

    def backward(self, dout, q, k, v, out, lse, causal, scale, bias=None):
        grads = [
            torch.empty(t.shape, dtype=torch.float32, device=q.device)
            for t in (q, k, v)
        ]
        reads = dout, q, k, v, out, lse
        self.backward_into(*grads, *reads, causal, scale, bias, add=(False, False))
        return grads

    def backward_into(
        self,
        dq,
        dk,
        dv,
        dout,
        q,
        k,
        v,
        out,
        lse,
        causal,
        scale,
        bias=None,
        *,
        add,
    ):
        """Write fp32 dq, dk, dv; ``add``: whether to add to what is there, of dq, and of
        dk and dv.
        """
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        if dout.stride(3) != 1:
            dout = dout.contiguous()
        if out.stride(3) != 1:
            out = out.contiguous()
        tensors = q, k, v, bias, out, lse, None, dout, dq, dk, dv
        _run("backward", tensors, causal, scale, add[0] + 2 * add[1])


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor):
        """Write out, in fp32 or q's dtype, and fp32 lse."""
        self._run("walk_tiles", (q, k, v, out, lse))

    def backward(self, dout, dlse, q, k, v, out, lse, grads, dweights=None) -> None:
        """Write fp32 dq; add to fp32 dk, dv and ``dweights`` (c, weights), one for each
        of the tiles that share visits. ``grads``: dq, dk, dv; dlse may be None.
        """
        tensors = q, k, v, out, lse, dout, *grads, dlse
        self._run("walk_tiles_backward", tensors, dweights)

    def _run(self, function: str, tensors, dweights: Tensor | None = None) -> None:
        """Call native.cpp; ``tensors`` are those of its ``Walk``, in that order."""
        q, k, _, out, *_ = tensors
        refuse_recording("the compiled kernel", "cpu_flash")
        threads = torch.get_num_threads()
        table = self.table
        numbers = [
            len(table.tiles),
            q.shape[2],
            k.shape[2],
            k.shape[1],
            q.shape[3],
            DTYPES.index(q.dtype),
            0,
            out.dtype != torch.float32,
            threads,
            1 if dweights is None else len(dweights),
        ]
        columns = table.tiles, table.visits, table.bands, table.numbers
        columns += self.weights, dweights, self.sinks
        numbers += [0 if t is None else t.data_ptr() for t in columns]
        numbers += [0 if self.weights is None else len(self.weights)]
        for t in (*tensors, *[None] * (10 - len(tensors))):
            numbers += _place(t)
        softcap = self.softcap or 0.0
        scale = float(self.scale)
        call = struct.pack(f"dd{len(numbers)}q", scale, softcap, *numbers)
        if getattr(native.library()[0], function)(call):
            raise MemoryError(f"no memory for the scratch of {threads} threads")


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


def _run(
    function: str,
    tensors: tuple[Tensor | None, ...],
    causal: bool,
    scale: float,
    merge: int,
) -> None:
    """Call native.cpp; ``tensors`` are the first ones of its ``Call``, in that order."""
    q, k, _, bias, out, _, index, *_ = tensors
    refuse_recording("the compiled kernel", "cpu_flash")
    if q.is_meta or hasattr(q, "fake_mode"):  # tensors without data
        return
    batch, queries, heads, d = q.shape
    narrow = function == "forward" and out.dtype != torch.float32
    if narrow and merge:
        raise ValueError("results are merged in float32")
    threads = torch.get_num_threads()
    keys = k.shape[1] if index is None else index.shape[2]
    values = [
        batch,
        heads,
        queries,
        keys,
        d,
        DTYPES.index(q.dtype),
        causal,
        merge,
        narrow,
        threads,
    ]
    if bias is not None and bias.shape[1] == 1:
        tensors = *tensors[:3], bias.expand(-1, queries, -1, -1), *tensors[4:]
    copies = []  # kept until the call has ended
    for t in tensors:
        if t is None:
            values += ABSENT
            continue
        if t.is_neg():
            copies.append(t := t.resolve_neg())
        values += _place(t)
    if getattr(native.library()[0], function)(
        struct.pack(f"d{len(values)}q", scale, *values)
    ):
        raise MemoryError(f"no memory for the scratch of {threads} threads")
