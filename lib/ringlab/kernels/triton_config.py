"""Tile sizes of the Triton and Gluon kernels: defaults, candidates for tuning, and the
file of tuned sizes.

Candidates were compiled without a GPU, in bfloat16 for head_dim 64, 128 and 256, causal
or not, for compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0. None spills registers
or needs more shared memory than there is. On an H200 (2026-11-26, tree 8f63b8c) the
Gluon kernels were the fastest of each pass in half precision, and right: they are the
default for compute capability 9.0.

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
# What tuning times besides the defaults in 2-byte dtypes, by architecture class and
# pass: for head_dim up to 64, to 128 and to 256. As Sizes read by pointers.
CANDIDATES = {
    ("10.x", "forward"): ([(128, 64, 4, 2)], [(128, 32, 8, 2)], [(64, 64, 8, 2)]),
    ("10.x", "backward_q"): (
        [(128, 32, 8, 2), (64, 64, 4, 2)],
        [(64, 64, 8, 2)],
        [(32, 64, 8, 1)],
    ),
    ("10.x", "backward_kv"): (
        [(128, 32, 8, 2), (64, 64, 8, 2)],
        [(64, 32, 8, 2), (64, 64, 8, 2)],
        [(32, 64, 8, 1)],
    ),
    ("8.0", "forward"): (
        [(64, 64, 4, 2)],
        [(64, 32, 4, 2), (64, 32, 4, 3)],
        [(64, 32, 8, 2), (32, 32, 4, 2)],
    ),
    ("8.0", "backward_q"): (
        [(128, 32, 8, 2), (128, 64, 8, 3)],
        [(64, 64, 8, 2), (128, 32, 8, 3)],
        [(64, 64, 8, 1), (64, 32, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1)],
    ),
    ("8.0", "backward_kv"): (
        [(128, 32, 8, 3), (64, 32, 4, 2)],
        [(64, 64, 8, 1)],
        [(32, 64, 8, 1)],
    ),
    ("small", "forward"): (
        [(64, 64, 4, 2)],
        [(64, 32, 4, 2), (64, 32, 4, 3)],
        [(64, 32, 8, 2), (32, 32, 4, 2)],
    ),
    ("small", "backward_q"): (
        [(128, 32, 8, 2)],
        [(64, 64, 8, 2), (64, 32, 4, 2)],
        [(32, 32, 4, 1)],
    ),
    ("small", "backward_kv"): ([(64, 32, 4, 2)], [(32, 32, 4, 2)], []),
}


def sizes(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    compute: tuple[int, int],
    joins: bool = False,
) -> Sizes:
    """The default of the pass ``name`` on a compute capability: Gluon where it can run.

    ``joins``: for a launch that adds to the results of an earlier one.
    """
    if compute == (9, 0) and dtype in HALF and not joins and (name, head_dim) in GLUON:
        return GLUON[name, head_dim]
    return pointer_sizes(name, head_dim, dtype, compute, joins)


def pointer_sizes(
    name: str, head_dim: int, dtype: torch.dtype, compute: tuple[int, int], joins: bool
) -> Sizes:
    """The default among those that read by pointers. Patterns with short row intervals
    make it smaller, and a launch that ``joins`` takes more registers.
    """
    small, large, single = next(
        x for most, x in SIZES[name].items() if head_dim <= most
    )
    return (
        single
        if dtype not in HALF
        else large
        if compute[0] in (9, 10) and not joins
        else small
    )


def candidates(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    compute: tuple[int, int],
    joins: bool = False,
):
    """The ``Sizes`` that tuning times, at most six, the default first.

    >>> candidates("backward_kv", 128, torch.float32, (8, 6))
    (Sizes(rows=32, cols=16, warps=8, stages=1, reads='pointers'),)
    """
    default = sizes(name, head_dim, dtype, compute, joins)
    if dtype not in HALF:
        return (default,)
    pointers, listed = pointer_sizes(name, head_dim, dtype, compute, joins), []
    if compute not in MEASURED:
        large = "8.0" if compute in ((8, 0), (8, 7)) else "small"
        kind = "10.x" if compute[0] == 10 else large
        listed = CANDIDATES[kind, name][(head_dim > 64) + (head_dim > 128)]
    return tuple(dict.fromkeys((default, pointers, *(Sizes(*x) for x in listed))))


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
MOST_MEMBERS = 8  # query heads per K/V head; more are tuned as if there were 8


@dataclass(frozen=True)
class Use:
    """What sizes are tuned for. The sequence length is not part of it.

    ``name``: the pass. ``joins``: a launch that adds to the results of an earlier one.
    ``group``: query heads per K/V head, as a power of two.

    >>> str(Use.of("forward", 128, torch.bfloat16, True, False, 12))
    'forward, head_dim 128, bfloat16, causal, groups of 8'
    """

    name: str
    head_dim: int
    dtype: torch.dtype
    causal: bool
    joins: bool
    group: int

    @classmethod
    def of(
        cls,
        name: str,
        head_dim: int,
        dtype: torch.dtype,
        causal: bool,
        joins: bool,
        group: int,
    ) -> Use:
        """The use of a launch with any number of query heads per K/V head."""
        return cls(
            name,
            head_dim,
            dtype,
            causal,
            joins,
            min(MOST_MEMBERS, 1 << (group.bit_length() - 1)),
        )

    def __str__(self) -> str:
        said = (
            self.name,
            f"head_dim {self.head_dim}",
            str(self.dtype).removeprefix("torch."),
        )
        return ", ".join(
            [
                *said,
                *["causal"] * self.causal,
                *["joins"] * self.joins,
                f"groups of {self.group}",
            ]
        )


def folder() -> Path:
    """``RINGLAB_CACHE``, else ``ringlab`` in the user's cache folder. It need not
    exist.
    """
    if given := os.environ.get("RINGLAB_CACHE"):
        return Path(given)
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        / "ringlab"
    )


@lru_cache(maxsize=64)
def stamp(device: torch.device) -> dict[str, str]:
    """The GPU model, Triton's version and a hash of the kernels' code: tuned sizes hold
    for these alone.
    """
    model = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    )
    here, sha = Path(__file__).parent, hashlib.sha256()
    for name in CODE:
        sha.update((here / name).read_bytes())
    return {
        "device": model,
        "triton": version("triton"),
        "engine": sha.hexdigest()[:12],
    }


def path(device: torch.device) -> Path:
    """The file of the tuned sizes for a GPU. It need not exist."""
    return folder() / FILES.replace(
        "*", hashlib.sha256(json.dumps(stamp(device)).encode()).hexdigest()[:12]
    )


@lru_cache(maxsize=64)  # it takes as long as a launch
def _path(device: torch.device, _folder: str | None) -> Path:
    return path(device)


def chosen(use: Use, device: torch.device, compute: tuple[int, int]) -> Sizes | None:
    """The sizes that were tuned for a use on a GPU, or None."""
    file = _path(device, os.environ.get("RINGLAB_CACHE"))
    text = (choices := _read(file, device)) and choices.get(str(use))
    if not text:
        return None
    known = {
        str(x): x
        for x in candidates(use.name, use.head_dim, use.dtype, compute, use.joins)
    }
    if str(text) not in known:
        _warn(path(device), f"{text} is no candidate for {use}")
    return known.get(str(text))


def keep(found: dict[Use, Sizes], device: torch.device) -> Path:
    """Add tuned sizes to the file of a GPU and return its path. The file is replaced at
    once, never half written.

    Raises OSError where the folder cannot be written.
    """
    file = path(device)
    _read.cache_clear()  # another process may have written
    choices = _read(file, device) | {str(use): str(x) for use, x in found.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(f".{os.getpid()}.tmp")
    made.write_text(
        json.dumps(
            stamp(device) | {"choices": dict(sorted(choices.items()))}, indent=1
        ),
        encoding="utf-8",
    )
    os.replace(made, file)
    _read.cache_clear()
    return file


@lru_cache(maxsize=64)
def _read(file: Path, device: torch.device) -> dict[str, str]:
    """Sizes by use, both as text. Nothing, and one warning, if the file is not valid
    for this GPU and code.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        choices = found.pop("choices")
        if found == stamp(device):
            return dict(choices)
        _warn(file, f"it is of {found}")
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
