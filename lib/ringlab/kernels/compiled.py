"""Attention on a CPU by ``native.cpp``, which is compiled for this CPU.

torch's own CPU kernel multiplies by a library that uses half of the vector width of some CPUs, and takes few queries at
a time in short calls.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import native
from .base import HALF, Cost, wants_dtype

DTYPES = (torch.float32, *HALF)  # by their numbers in native.cpp


def _work(rows: int, keys: Tensor | float) -> Tensor | float:
    """Queries are padded to 64; 512 of them share a copy of the keys."""
    padded = -(-rows // 64) * 64
    return keys * ((padded + rows) / 2 + 33 * -(-rows // 512)) + 58 * padded


COST = Cost(_work, call=90_000, merge=20, copied=1.1, bias=1.04, biases=1.2, block=96, gain=0.95)


class Compiled:
    """Online softmax in blocks; bf16 is multiplied as such where the CPU can. ``forward``, ``backward`` return fp32."""

    name = "compiled"
    lower_right = True
    gathers = True
    cost = COST

    def refuses(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"needs a CPU tensor, this is {device.type}"
        return wants_dtype(dtype, DTYPES) or native.library()[1]

    def takes_bias(self, dtype):
        return dtype in DTYPES

    def forward(self, q, k, v, causal, scale, bias=None, index=None):
        b, m, h, _ = q.shape
        out, lse = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, (b, h, m)))
        self.forward_into(out, lse, q, k, v, causal, scale, bias, index, merge=False)
        return out, lse

    def forward_into(self, out, lse, q, k, v, causal, scale, bias=None, index=None, *, merge: bool):
        """Write out (b, m, h, d), in fp32 or q's dtype, and fp32 lse (b, h, m).

        ``merge``: join the results with those of other keys that are there, in fp32.
        """
        tensors = {"q": q, "k": k, "v": v, "bias": bias, "out": out, "lse": lse, "index": index}
        _run("forward", tensors, causal, scale, merge)

    def backward(self, dout, q, k, v, out, lse, causal, scale, bias=None):
        dout, out = (t.to(q.dtype) if t.stride(3) == 1 else t.to(q.dtype).contiguous() for t in (dout, out))
        dq, dk, dv = (torch.empty(t.shape, dtype=torch.float32, device=q.device) for t in (q, k, v))
        read = {"q": q, "k": k, "v": v, "dout": dout, "bias": bias, "final_out": out, "lse": lse}
        _run("backward", read | {"dq": dq, "dk": dk, "dv": dv}, causal, scale, False)
        return dq, dk, dv


def _is_recorded() -> bool:
    """Whether torch.fx records the operators that are called; False with a torch that does not tell."""
    keys = getattr(torch._C, "_TorchDispatchModeKey", None)
    before = getattr(torch._ops, "_get_dispatch_mode_pre_dispatch", None)
    modes = (getattr(torch._C, "_get_dispatch_mode", None), before)
    return keys is not None and any(mode is not None and mode(keys.PROXY) is not None for mode in modes)


# The tensors of a call in the order of the fields in native.cpp; all but lse and index (b, h, m) are (b, m, h, d).
TENSORS = ("q", "k", "v", "dout", "bias", "final_out", "out", "lse", "dq", "dk", "dv", "index")


def _run(function: str, tensors: dict[str, Tensor | None], causal: bool, scale: float, merge: bool) -> None:
    q, bias = tensors["q"], tensors["bias"]
    if _is_recorded():
        why = "torch.fx cannot record the compiled kernel"
        raise NotImplementedError(f"{why}; use torch.export, or backend='cpu_flash'")
    if q.is_meta or hasattr(q, "fake_mode"):  # tensors without data
        return
    pointers, steps = [], []
    for name in TENSORS:
        t = tensors.get(name)
        if t is not None and t.is_neg():
            t = tensors[name] = t.resolve_neg()
        if t is None:
            pointers.append(0)
            steps += 0, 0, 0
            continue
        batch, row, head, *_ = (t.transpose(1, 2) if name in ("lse", "index") else t).stride()
        pointers.append(t.data_ptr())
        if not pointers[-1] and t.numel():
            raise NotImplementedError(f"the compiled kernel needs plain tensors, got {type(t).__name__}")
        steps += batch, 0 if name == "bias" and t.shape[1] == 1 else row, head
    keys = tensors["k"].shape[1] if tensors.get("index") is None else tensors["index"].shape[2]
    numbers = *q.shape[:1], q.shape[2], q.shape[1], keys, q.shape[3], DTYPES.index(q.dtype)
    narrow = "out" in tensors and tensors["out"].dtype != torch.float32
    if narrow and merge:
        raise ValueError("results are merged in float32")
    more = causal, merge, narrow, torch.get_num_threads(), 1 if bias is None else bias.stride(3)
    values = *pointers, *numbers, *more, *steps
    if getattr(native.library()[0], function)((ctypes.c_int64 * len(values))(*values), ctypes.c_double(scale)):
        raise MemoryError(f"no memory for the scratch of {torch.get_num_threads()} threads")
