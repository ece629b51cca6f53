"""Attention on a CPU in C++, ``compiled.cpp``, compiled for this CPU when it is first asked for.

torch's own CPU kernel multiplies by a library that uses half of the vector width of some CPUs, and packs rows anew for
each call. This one keeps a block of scores in the cache and takes rows as they lie. It needs a C++ compiler with
OpenMP; what was compiled is kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .base import HALF, wants_dtype

SOURCE = Path(__file__).with_name("compiled.cpp")
FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC"
DTYPES = (torch.float32, *HALF)  # by their numbers in compiled.cpp


class Compiled:
    """Online softmax in blocks, in fp32; bf16 is multiplied as such where the CPU can. Results are fp32."""

    name = "compiled"
    lower_right = True

    def refuses(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"needs a CPU tensor, this is {device.type}"
        return wants_dtype(dtype, DTYPES) or _library()[1]

    def takes_bias(self, dtype):
        return dtype in DTYPES

    def forward(self, q, k, v, causal, scale, bias=None):
        b, m, h, _ = q.shape
        out, lse = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, (b, h, m)))
        self.forward_into(out, lse, q, k, v, causal, scale, bias, merge=False)
        return out, lse

    def forward_into(self, out, lse, q, k, v, causal, scale, bias=None, *, merge: bool):
        """Write fp32 out (b, m, h, d) and lse (b, h, m), or ``merge`` the results into those of other keys there."""
        tensors = {"q": q, "k": k, "v": v, "bias": bias, "out": out, "lse": lse}
        _run("forward", tensors, causal, scale, merge)

    def backward(self, dout, q, k, v, out, lse, causal, scale, bias=None):
        dout, out = (t.to(q.dtype) if t.stride(3) == 1 else t.to(q.dtype).contiguous() for t in (dout, out))
        dq, dk, dv = (torch.empty(t.shape, dtype=torch.float32, device=q.device) for t in (q, k, v))
        read = {"q": q, "k": k, "v": v, "dout": dout, "bias": bias, "final_out": out, "lse": lse}
        _run("backward", read | {"dq": dq, "dk": dk, "dv": dv}, causal, scale, False)
        return dq, dk, dv


# The tensors of a call in the order of the fields in compiled.cpp; all but lse (b, h, m) are (b, m, h, d).
TENSORS = ("q", "k", "v", "dout", "bias", "final_out", "out", "lse", "dq", "dk", "dv")


def _run(function: str, tensors: dict[str, Tensor | None], causal: bool, scale: float, merge: bool) -> None:
    q, bias = tensors["q"], tensors["bias"]
    if q.is_meta or hasattr(q, "fake_mode"):  # tensors without data
        return
    pointers, steps = [], []
    for name in TENSORS:
        t = tensors.get(name)
        if t is None:
            pointers.append(0)
            steps += 0, 0, 0
            continue
        batch, row, head, *_ = t.stride() if name != "lse" else t.transpose(1, 2).stride()
        pointers.append(t.data_ptr())
        steps += batch, 0 if name == "bias" and len(bias[0]) == 1 else row, head
    numbers = *q.shape[:1], q.shape[2], q.shape[1], tensors["k"].shape[1], q.shape[3], DTYPES.index(q.dtype)
    more = causal, merge, torch.get_num_threads(), 1 if bias is None else bias.stride(3)
    values = *pointers, *numbers, *more, *steps
    getattr(_library()[0], function)((ctypes.c_int64 * len(values))(*values), ctypes.c_double(scale))


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled functions, or why there are none."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        return None, "needs a C++ compiler (g++ or clang++), and none is here"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringlab"
    known = compiler, FLAGS, _cpu(), SOURCE.read_text()
    path = folder / f"compiled-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.so"
    mine = path.with_suffix(f".{os.getpid()}")
    try:
        if not path.exists():  # written under another name first: other processes may be compiling, too
            folder.mkdir(parents=True, exist_ok=True)
            command = [*compiler.split(), *FLAGS.split(), str(SOURCE), "-o", str(mine)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            mine.replace(path)
        return ctypes.CDLL(str(path)), None
    except subprocess.CalledProcessError as failure:
        said = [line for line in failure.stderr.splitlines() if "error" in line] or failure.stderr.splitlines() or [""]
        return None, f"{compiler} failed: {said[0][:200]}"
    except (OSError, subprocess.TimeoutExpired) as failure:
        return None, f"cannot be compiled: {str(failure).splitlines()[0][:200]}"


def _cpu() -> str:
    """What tells apart CPUs that one cache may serve."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return platform.machine() + flags
