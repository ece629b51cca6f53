"""The C++ of ``native.cpp``: compiled for this CPU when it is first needed, and loaded.

It needs a C++ compiler with OpenMP, g++ 12 or clang++ 15 or newer: the variable CXX,
g++, clang++ or c++. What was compiled is kept in the folder ``ringlab`` of the user's
cache (XDG_CACHE_HOME, or ~/.cache), for each source, compiler and CPU apart.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
# Every a * b + c is one instruction: with some rounded twice (gcc on AMD Zen 3), equal
# sums would differ.
FLAGS = (
    "-std=c++17 -O3 -march=native -ffp-contract=fast --param=avoid-fma-max-bits=0 -fno-math-errno -fno-trapping-math "
    "-fopenmp -shared -fPIC"
)


@lru_cache(maxsize=1)
def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled functions, or why there are none."""
    with _LOCK:
        return _loaded()


_LOCK = threading.Lock()


def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    compiler = (
        os.environ.get("CXX", "").split()
        or [*filter(shutil.which, ("g++", "clang++", "c++"))][:1]
    )
    if not compiler:
        return None, "needs a C++ compiler (g++ or clang++), and none is here"
    try:
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60
        ).stdout
        known = compiler, version, FLAGS, _cpu(), SOURCE.read_text("utf-8")
        folder = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringlab"
        )
        path = (
            folder
            / f"native-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.so"
        )
        if path.exists():
            with suppress(OSError):  # a damaged file is made anew
                return ctypes.CDLL(str(path)), None
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder
        ) as alone:  # other processes may be compiling, too
            made = Path(alone) / path.name
            command = [*compiler, *FLAGS.split(), str(SOURCE), "-o", str(made)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=300
            )
            made.replace(path)
        return ctypes.CDLL(str(path)), None
    except subprocess.CalledProcessError as failure:
        said = (
            [line for line in failure.stderr.splitlines() if "error" in line]
            or failure.stderr.splitlines()
            or [""]
        )
        said = said[0].replace(
            f"{SOURCE.parent}{os.sep}", ""
        )  # a refusal is part of reports, which hold no paths
        return None, f"{Path(compiler[0]).name} failed: {said[:200]}"
    except (
        OSError,
        RuntimeError,
        ValueError,
        subprocess.TimeoutExpired,
    ) as failure:  # no home, room, permission, end
        return None, f"cannot be compiled: {str(failure).splitlines()[0][:200]}"


def _cpu() -> str:
    """What tells apart CPUs that one cache may serve."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next(
        (line for line in lines if line.startswith(("flags", "Features"))),
        platform.processor(),
    )
    return platform.machine() + flags


def multiply_rate(threads: int, bf16: bool, seconds_of) -> float:
    """FLOP/s of products in registers and the nearest cache, the kernel's inner loop; 0
    without a compiler.

    ``seconds_of(call)`` returns the shortest time of a call.
    """
    found, _ = library()
    if found is None:
        return 0.0
    found.multiply.restype = ctypes.c_double
    given = [ctypes.c_int64(x) for x in (threads, 20_000, bf16)]
    return found.multiply(*given) / seconds_of(lambda: found.multiply(*given))
