"""The kernel "compiled": attention on a CPU by ``native.cpp``.

torch's own CPU kernel multiplies by a library that uses half of the vector width of
some CPUs, and takes few queries at a time in short calls.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from .. import native
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
        rows=None,
    ):
        """Write out (b, m, h, d), in fp32 or q's dtype, and fp32 lse (b, h, m).

        ``merge``: join the results with those of other keys that are there, in fp32.
        ``rows`` (b, h, queries), int64: query i is row ``rows[i]`` of q, out and lse;
        none below 0.
        """
        tensors = q, k, v, bias, out, lse, index, rows
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
        rows=None,
    ):
        """Write fp32 dq, dk, dv; ``add``: whether to add to what is there, of dq, and of
        dk and dv. ``rows`` as of ``forward_into``.
        """
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        if dout.stride(3) != 1:
            dout = dout.contiguous()
        if out.stride(3) != 1:
            out = out.contiguous()
        tensors = q, k, v, bias, out, lse, None, rows, dout, dq, dk, dv
        _run("backward", tensors, causal, scale, add[0] + 2 * add[1])


def _run(
    function: str,
    tensors: tuple[Tensor | None, ...],
    causal: bool,
    scale: float,
    merge: int,
) -> None:
    """Call native.cpp; ``tensors`` are the first ones of its ``Call``, in that order."""
    q, k, _, bias, out, _, index, rows, *_ = tensors
    refuse_recording("the compiled kernel", "cpu_flash")
    if q.is_meta or hasattr(q, "fake_mode"):  # tensors without data
        return
    batch, queries, heads, d = q.shape
    if rows is not None:
        queries = rows.shape[2]
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
        pointer = t.data_ptr()
        if not pointer and t.numel():
            raise NotImplementedError(
                f"the compiled kernel needs plain tensors, got {type(t).__name__}"
            )
        if t.dim() == 4:
            values += pointer, *t.stride()
        else:  # (b, h, m)
            batch, head, row = t.stride()
            values += pointer, batch, row, head, 0
    if getattr(native.library()[0], function)(
        struct.pack(f"d{len(values)}q", scale, *values)
    ):
        raise MemoryError(f"no memory for the scratch of {threads} threads")
