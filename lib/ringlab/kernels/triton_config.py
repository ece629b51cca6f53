"""Tile sizes of the Triton and Gluon kernels: defaults, candidates for tuning, and the
file of tuned sizes.

The defaults were compiled without a GPU, in bfloat16 for head_dim 64, 128 and 256,
causal or not, for compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0. None spills
registers or needs more shared memory than there is. On an H200 (2026-11-26, tree
8f63b8c) the Gluon kernels were the fastest of each pass in half precision, and right:
they are the default for compute capability 9.0.

The tuned sizes of each GPU model are one JSON file in the user's cache folder, valid
for one version of Triton and of the kernels' code. A file that cannot be read or does
not fit is ignored with one warning; the defaults are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch

from .base import HALF

LEAST = 16  # rows of the smallest tile that tensor cores take
LOG2E = 1.4426950408889634
TILE_PASSES = ("forward", "backward_q", "backward_kv")
MAX_GROUP = 8  # query heads per K/V head; more are tuned as if there were 8


@dataclass(frozen=True)
class Sizes:
    """Rows of a program's own tile, rows of a tile that it visits, warps of a program,
    stages of its pipeline.

    ``reads``: how tensors are read, by "pointers", or by "gluon", the kernels of
    ``gluon``.

    >>> str(Sizes(128, 64, 8, 2))
    '128 x 64, 8 warps, 2 stages, pointers'
    """

    rows: int
    cols: int
    warps: int
    stages: int
    reads: str = "pointers"

    def __str__(self) -> str:
        return f"{self.rows} x {self.cols}, {self.warps} warps, {self.stages} stages, {self.reads}"


@dataclass(frozen=True)
class LaunchKind:
    """What tile sizes depend on. The sequence length is not part of it.

    ``name``: the pass. ``capability``: the GPU's. ``joins``: the launch adds to the
    results of an earlier one. ``group``: query heads per K/V head; its text, by which
    sizes are stored, rounds them to a power of two.

    >>> str(LaunchKind("forward", 128, torch.bfloat16, (8, 6), causal=True, group=12))
    'forward, head_dim 128, bfloat16, causal, groups of 8'
    """

    name: str
    head_dim: int
    dtype: torch.dtype
    capability: tuple[int, int]
    causal: bool = False
    joins: bool = False
    group: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        group = min(MAX_GROUP, 1 << (self.group.bit_length() - 1))
        flags = [*["causal"] * self.causal, *["joins"] * self.joins]
        parts = self.name, f"head_dim {self.head_dim}", dtype, *flags
        return ", ".join([*parts, f"groups of {group}"])


# By pass, then head_dim up to: (2-byte dtypes; the same on Hopper and data-centre
# Blackwell; fp32 anywhere).
SIZES = {
    "forward": {
        64: (Sizes(128, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 32, 8, 1)),
        128: (Sizes(64, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 8, 1)),
        256: (Sizes(64, 64, 8, 1), Sizes(128, 32, 8, 2), Sizes(16, 16, 4, 1)),
    },
    "backward_q": {
        64: (Sizes(128, 64, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 32, 8, 1)),
        128: (Sizes(128, 32, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 8, 2)),
        256: (Sizes(32, 32, 4, 1), Sizes(32, 32, 4, 1), Sizes(16, 16, 8, 2)),
    },
    "backward_kv": {
        64: (Sizes(128, 32, 8, 2), Sizes(128, 64, 8, 2), Sizes(32, 16, 4, 1)),
        128: (Sizes(64, 32, 8, 2), Sizes(128, 32, 8, 2), Sizes(32, 16, 8, 1)),
        256: (Sizes(32, 32, 8, 1), Sizes(32, 32, 8, 1), Sizes(16, 16, 8, 1)),
    },
}


# The Gluon kernels for 9.0, by pass and head_dim: 2-byte dtypes, launches that start
# from nothing. Eight computing warps come on top.
GLUON = {
    ("forward", 64): Sizes(128, 128, 4, 3, "gluon"),
    ("forward", 128): Sizes(128, 128, 4, 2, "gluon"),
    ("backward_q", 64): Sizes(128, 128, 4, 2, "gluon"),
    ("backward_q", 128): Sizes(128, 64, 4, 3, "gluon"),
    ("backward_kv", 64): Sizes(128, 64, 4, 3, "gluon"),
    ("backward_kv", 128): Sizes(128, 32, 4, 3, "gluon"),
}


# Whose default sizes were measured: nothing is left to tune.
MEASURED = ((9, 0),)
# What tuning times besides the defaults in 2-byte dtypes. Not each fits each GPU: one
# that does not is refused when it is launched.
CANDIDATES = (
    Sizes(128, 64, 8, 2),
    Sizes(128, 32, 8, 2),
    Sizes(64, 64, 8, 2),
    Sizes(64, 64, 4, 2),
    Sizes(64, 32, 4, 2),
    Sizes(32, 32, 4, 1),
)


def sizes(kind: LaunchKind) -> Sizes:
    """The default of a kind of launch: Gluon where it can run."""
    known = (kind.name, kind.head_dim) in GLUON and kind.dtype in HALF
    if known and kind.capability == (9, 0) and not kind.joins:
        return GLUON[kind.name, kind.head_dim]
    return pointer_sizes(kind)


def pointer_sizes(kind: LaunchKind) -> Sizes:
    """The default among those that read by pointers. Patterns with short row intervals
    make it smaller, and a launch that joins takes more registers.
    """
    by_head_dim = SIZES[kind.name].items()
    small, large, fp32 = next(x for most, x in by_head_dim if kind.head_dim <= most)
    if kind.dtype not in HALF:
        return fp32
    return large if kind.capability[0] in (9, 10) and not kind.joins else small


def candidates(kind: LaunchKind) -> tuple[Sizes, ...]:
    """The ``Sizes`` that tuning times, the default first.

    >>> candidates(LaunchKind("backward_kv", 128, torch.float32, (8, 6)))
    (Sizes(rows=32, cols=16, warps=8, stages=1, reads='pointers'),)
    """
    if kind.dtype not in HALF:
        return (sizes(kind),)
    more = () if kind.capability in MEASURED else CANDIDATES
    return tuple(dict.fromkeys((sizes(kind), pointer_sizes(kind), *more)))


def precision(head_dim: int, dtype: torch.dtype) -> str:
    """How products are computed: fp32 as three tf32 products, which keeps its accuracy,
    or "ieee" for wide heads.
    """
    return "tf32" if dtype in HALF else "tf32x3" if head_dim <= 64 else "ieee"


def early(compute: tuple[int, int]) -> bool:
    """Whether a program fetches the next entry of its schedule early, which Triton 3.7
    fails to compile for 10.x.
    """
    return compute[0] != 10


def shortened(size: Sizes, schedule) -> str | None:
    """Why a launch has smaller tiles than its sizes, or None."""
    if (schedule.rows, schedule.cols) == (size.rows, size.cols):
        return None
    return f"the row intervals of the pattern are shorter than tiles of {size.rows} x {size.cols}"


def padded(head_dim: int) -> int:
    """Columns that a program computes with: a power of two that tensor cores take."""
    return max(LEAST, 1 << (head_dim - 1).bit_length())


# The files of the code that is timed: tuned sizes hold for this code alone.
CODE = (
    "triton.py",
    "triton_config.py",
    "triton_kernels.py",
    "tile_schedule.py",
    "gluon.py",
    "gluon_kernels.py",
)
FILES = "triton-lists-*.json"


def folder() -> Path:
    """``RINGLAB_CACHE``, else ``ringlab`` in the user's cache folder. It need not
    exist.
    """
    if named := os.environ.get("RINGLAB_CACHE"):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "ringlab")


@lru_cache(maxsize=64)
def stamp(device: torch.device) -> dict[str, str]:
    """The GPU model, Triton's version and a hash of the kernels' code: tuned sizes hold
    for these alone.
    """
    model = "interpreter"
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
    sha = hashlib.sha256()
    for name in CODE:
        sha.update((Path(__file__).parent / name).read_bytes())
    engine = sha.hexdigest()[:12]
    return {"device": model, "triton": version("triton"), "engine": engine}


def path(device: torch.device) -> Path:
    """The file of the tuned sizes for a GPU. It need not exist."""
    digest = hashlib.sha256(json.dumps(stamp(device)).encode()).hexdigest()
    return folder() / FILES.replace("*", digest[:12])


@lru_cache(maxsize=64)  # it takes as long as a launch
def _path(device: torch.device, _folder: str | None) -> Path:
    return path(device)


def tuned(kind: LaunchKind, device: torch.device) -> Sizes:
    """The sizes of a kind of launch on a GPU: those that were tuned, or the default."""
    return chosen(kind, device) or sizes(kind)


def chosen(kind: LaunchKind, device: torch.device) -> Sizes | None:
    """The sizes that were tuned for a kind of launch on a GPU, or None."""
    choices = _read(_path(device, os.environ.get("RINGLAB_CACHE")), device)
    if not choices or not (text := choices.get(str(kind))):
        return None
    known = {str(x): x for x in candidates(kind)}
    if str(text) not in known:
        _warn(path(device), f"{text} is no candidate for {kind}")
    return known.get(str(text))


def keep(best: dict[LaunchKind, Sizes], device: torch.device) -> Path:
    """Add tuned sizes to the file of a GPU and return its path. The file is replaced at
    once, never half written.

    Raises OSError where the folder cannot be written.
    """
    file = path(device)
    _read.cache_clear()  # another process may have written
    choices = _read(file, device) | {str(kind): str(x) for kind, x in best.items()}
    contents = stamp(device) | {"choices": dict(sorted(choices.items()))}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(contents, indent=1), encoding="utf-8")
    os.replace(temporary, file)
    _read.cache_clear()
    return file


@lru_cache(maxsize=64)
def _read(file: Path, device: torch.device) -> dict[str, str]:
    """Sizes by kind of launch, both as text. Nothing, and one warning, if the file is
    not valid for this GPU and code.
    """
    try:
        origin = json.loads(file.read_text(encoding="utf-8"))
        choices = origin.pop("choices")
        if origin == stamp(device):
            return dict(choices)
        _warn(file, f"it is of {origin}")
    except FileNotFoundError:
        pass
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # ValueError: not JSON
        _warn(file, f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")
    return {}


def _warn(file: Path, why: str) -> None:
    warnings.warn(
        f"sizes tuned for the Triton kernels are ignored, {file.name}: {why}",
        RuntimeWarning,
        stacklevel=2,
    )
