"""Memory pages on the CPU: ask Linux for huge ones."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Sequence

import torch

_HUGE_FROM, _MADV_HUGEPAGE = 4 << 20, 14  # a smaller buffer holds at most one huge page, and malloc recycles it


@functools.cache
def _madvise():
    if not sys.platform.startswith("linux"):
        return None
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def advise_huge(tensor: torch.Tensor) -> bool:
    """Ask Linux to back a CPU tensor of 4 MiB or more with huge pages; True if the system accepted.

    Call it before the first write: pages already touched stay as they are. The advice covers the whole pages inside the
    tensor's storage, changes no value, and ends with the memory. Elsewhere, or for smaller tensors: False.

    >>> advise_huge(torch.empty(8))
    False
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()  # a fake tensor's is on the meta device
    madvise = _madvise() if storage.device.type == "cpu" and storage.nbytes() >= _HUGE_FROM else None
    if madvise is None:
        return False
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    return madvise(start, stop - start, _MADV_HUGEPAGE) == 0


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocate as torch.empty does, with huge pages for large CPU tensors; contents are uninitialised.

    >>> empty((2, 3), torch.bfloat16).shape
    torch.Size([2, 3])
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    advise_huge(tensor)
    return tensor
