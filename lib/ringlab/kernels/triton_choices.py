"""The sizes that tuning chose for the list kernels of this GPU, kept in a file of the user's cache folder.

One JSON file for each GPU model, version of Triton and code of the kernels, so that none outlives what it was timed
with. A file that cannot be read, or speaks of something else, is told of in one line and ignored: the defaults serve.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch

from .triton_sizes import Sizes, candidates

CODE = (
    "triton_code.py", "triton_backward.py", "gluon_code.py", "gluon_forward.py", "gluon_backward.py",
    "triton_lists.py", "triton_reads.py", "../lists.py", "../pieces.py",
)  # fmt: skip
FILES = "triton-lists-*.json"
MOST_MEMBERS = 8  # query heads for each K/V head, from which on all are tuned alike


@dataclass(frozen=True)
class Use:
    """What sizes are chosen for: never for one sequence length.

    ``name``: of the pass; ``joins``: a launch that goes on from what another wrote; ``group``: query heads for each
    K/V head, as a power of two.

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
    def of(cls, name: str, head_dim: int, dtype: torch.dtype, causal: bool, joins: bool, group: int) -> Use:
        """The use of a launch with any number of query heads for each K/V head."""
        return cls(name, head_dim, dtype, causal, joins, min(MOST_MEMBERS, 1 << (group.bit_length() - 1)))

    def __str__(self) -> str:
        said = (self.name, f"head_dim {self.head_dim}", str(self.dtype).removeprefix("torch."))
        return ", ".join([*said, *["causal"] * self.causal, *["joins"] * self.joins, f"groups of {self.group}"])

    def candidates(self, compute: tuple[int, int]) -> tuple[Sizes, ...]:
        """The sizes to choose among on a compute capability, the default first."""
        return candidates(self.name, self.head_dim, self.dtype, compute, self.joins)


def folder() -> Path:
    """``RINGLAB_CACHE``, else ``ringlab`` in the user's cache folder; it need not exist."""
    if given := os.environ.get("RINGLAB_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ringlab"


@lru_cache(maxsize=64)
def stamp(device: torch.device) -> tuple[tuple[str, str], ...]:
    """The GPU's model, Triton's version and a hash of the kernels' code: choices hold for these alone."""
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    here, sha = Path(__file__).parent, hashlib.sha256()
    for name in CODE:
        sha.update((here / name).read_bytes())
    return ("device", model), ("triton", version("triton")), ("engine", sha.hexdigest()[:12])


def path(device: torch.device) -> Path:
    """The file of the choices for a GPU; it need not exist."""
    return folder() / _name(device)


@lru_cache(maxsize=64)
def _name(device: torch.device) -> str:
    return FILES.replace("*", hashlib.sha256(json.dumps(stamp(device)).encode()).hexdigest()[:12])


def chosen(use: Use, device: torch.device, compute: tuple[int, int]) -> Sizes | None:
    """The sizes that were tuned for a use on a GPU; None where none were."""
    text = _read(path(device), device).get(str(use))
    if text is None:
        return None
    found = next((x for x in use.candidates(compute) if str(x) == text), None)
    if found is None:
        _tell(path(device), f"{text} is no candidate for {use}")
    return found


def keep(found: dict[Use, Sizes], device: torch.device) -> Path:
    """Add choices to the file of a GPU, and return it; the file is whole at every moment.

    Raises OSError where the folder cannot be written.
    """
    file = path(device)
    _read.cache_clear()  # another process may have written
    choices = _read(file, device) | {str(use): str(x) for use, x in found.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=f"{file.stem}-", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(dict(stamp(device)) | {"choices": dict(sorted(choices.items()))}, out, indent=1)
        os.replace(made, file)
    except BaseException:
        os.unlink(made)
        raise
    _read.cache_clear()
    return file


@lru_cache(maxsize=64)
def _read(file: Path, device: torch.device) -> dict[str, str]:
    """Sizes by use, both as they are shown; nothing, and a line about it, where the file is not what it should be."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        choices = found.pop("choices")
        if tuple(found.items()) != stamp(device):
            _tell(file, f"it is of {found}")
        elif not all(isinstance(x, str) for x in choices.values()):
            _tell(file, "it holds other things than sizes")
        else:
            return choices
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # JSON that is none is a ValueError
        _tell(file, f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")
    return {}


def _tell(file: Path, why: str) -> None:
    warnings.warn(f"sizes tuned for the Triton kernels are ignored, {file.name}: {why}", RuntimeWarning, stacklevel=2)
