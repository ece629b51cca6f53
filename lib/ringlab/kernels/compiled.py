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
        out, lse = (torch.empty(s, dtype=torch.float32, device=q.device) for s in (q.shape, (b, h, m)))
        self.forward_into(out, lse, q, k, v, causal, scale, bias, merge=False)
        return out, lse

    def forward_into(self, out, lse, q, k, v, causal, scale, bias=None, *, merge: bool):
        """Write fp32 out (b, m, h, d) and lse (b, h, m), or ``merge`` the results into those of other keys there."""
        by_row = lse.stride(0), lse.stride(2), lse.stride(1)
        pointers = (q, k, v, None, bias, None, out, lse, None, None, None)
        _run("forward", q, k, pointers, (q, k, v, None, bias, out), by_row, causal, scale, merge)

    def backward(self, dout, q, k, v, out, lse, causal, scale, bias=None):
        dout, out = (t.to(q.dtype).contiguous() if t.stride(-1) != 1 else t.to(q.dtype) for t in (dout, out))
        grads = [torch.empty(t.shape, dtype=torch.float32, device=q.device) for t in (q, k, v)]
        by_row = lse.stride(0), lse.stride(2), lse.stride(1)
        pointers = (q, k, v, dout, bias, out, None, lse, *grads)
        _run("backward", q, k, pointers, (q, k, v, dout, bias, out), by_row, causal, scale, False, *grads[:2])
        return tuple(grads)


def _run(name: str, q: Tensor, k: Tensor, pointers, strided, by_row, causal: bool, scale: float, merge: bool, *grads):
    if q.is_meta or hasattr(q, "fake_mode"):  # tensors without data
        return
    (b, m, h, d), steps = q.shape, []
    for t in strided:
        if t is None:
            steps += 0, 0, 0
        else:
            s = t.stride()
            steps += s[0], s[1] if t.shape[1] > 1 else 0, s[2]
    steps += by_row
    for t in grads:
        steps += t.stride()[:3]
    numbers = b, h, m, k.shape[1], d, DTYPES.index(q.dtype), causal, merge, torch.get_num_threads()
    values = *(0 if t is None else t.data_ptr() for t in pointers), *numbers, *steps
    getattr(_library()[0], name)((ctypes.c_int64 * len(values))(*values), ctypes.c_double(scale))


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
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
