"""Memory pages on the CPU: ask Linux for huge ones, and the C library to keep those that were freed.

A large result is written to pages that the system hands out one by one, a page fault each, and takes back when it is
freed: a few per cent of a call of half a second whose result is 32 MiB (row "freed memory kept" of the session report).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import sys
from collections.abc import Sequence

import torch

_HUGE_FROM, _MADV_HUGEPAGE = 4 << 20, 14  # a smaller buffer holds at most one huge page, and malloc recycles it
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


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


def keep_freed() -> bool:
    """Have the C library keep freed memory for this process until it ends; True if it does.

    By default glibc returns a freed tensor of 32 MiB or more, and the free end of its heap, to the system, so that the
    next call's result costs page faults again. Call it once, at the start of a program that calls attention again and
    again on the CPU; it changes no value. The first calls still fault, until the heap has room. The price is memory:
    the process, all of its libraries, never shrinks and may come to hold twice what is live at its peak, as a new
    tensor does not always fit where an old one was. Large tensors of other threads than the first are still returned,
    and where another allocator stands in, as jemalloc, this plays no part. Elsewhere than on glibc: False. Source:
    mallopt(3).

    >>> keep_freed()  # doctest: +SKIP
    True
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.libc_ver()[0] == "glibc" else None
    return mallopt is not None and mallopt(_M_MMAP_MAX, 0) == 1 and mallopt(_M_TRIM_THRESHOLD, -1) == 1
