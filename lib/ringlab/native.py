"""Compiles ``native.cpp`` for this CPU when it is first needed, and loads it.

It needs a C++ compiler with OpenMP: the variable CXX, or g++ or clang++. What was compiled is kept in the folder
``ringlab`` of the user's cache (XDG_CACHE_HOME, or ~/.cache), for each source, compiler and CPU apart.
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

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC"


@lru_cache(maxsize=1)
def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled functions, or why there are none."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        return None, "needs a C++ compiler (g++ or clang++), and none is here"
    known = compiler, FLAGS, _cpu(), SOURCE.read_text()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringlab"
        path = folder / f"native-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.so"
        mine = path.with_suffix(f".{os.getpid()}")
        if not path.exists():  # written under another name first: other processes may be compiling, too
            folder.mkdir(parents=True, exist_ok=True)
            command = [*compiler.split(), *FLAGS.split(), str(SOURCE), "-o", str(mine)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            mine.replace(path)
        return ctypes.CDLL(str(path)), None
    except subprocess.CalledProcessError as failure:
        said = [line for line in failure.stderr.splitlines() if "error" in line] or failure.stderr.splitlines() or [""]
        return None, f"{compiler} failed: {said[0][:200]}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as failure:  # no home, no room, no permission, no end
        return None, f"cannot be compiled: {str(failure).splitlines()[0][:200]}"


def _cpu() -> str:
    """What tells apart CPUs that one cache may serve."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return platform.machine() + flags


def multiply_rate(threads: int, bf16: bool, seconds_of) -> float:
    """FLOP/s of fused multiplications and additions in registers, which no product exceeds; 0 without a compiler.

    ``seconds_of(call)`` returns the shortest time of a call.
    """
    found, _ = library()
    if found is None:
        return 0.0
    found.multiply.restype = ctypes.c_double
    given = [ctypes.c_int64(x) for x in (threads, 1_000_000, bf16)]
    return found.multiply(*given) / seconds_of(lambda: found.multiply(*given))
