"""A pool that lends memory again once nothing refers to it, on the CPU in huge pages.

torch's CUDA allocator caches already, so there the pool mostly repeats its work. On the
CPU a large new buffer costs page faults at its first write: reuse avoids them, huge
pages reduce them.

``RESULTS`` lends the outputs of attention on a CPU by default. It keeps the memory of
outputs that were freed: at most a 64th of the machine's memory and 512 MiB.
``RESULTS.stats()`` tells how much that is, ``RESULTS.clear()`` gives it back,
``RESULTS.max_bytes = 64 << 20`` sets another limit, from the next output on, and 0 or
``Execution(results=False)`` keeps nothing. An output of 32 MiB in new memory costs
8,192 page faults, up to a tenth of the time of a window's forward over 16,384 positions.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .checks import check_device, is_real, short_repr
from .torch_private import is_traced, storage_references
from .tracking import is_out_of_memory

# A smaller buffer holds at most one huge page, and malloc recycles it.
_HUGE_FROM = 4 << 20


def _use_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask Linux for huge pages in the whole pages of a new CPU storage, before its
    first write.
    """
    if (
        storage.device.type == "cpu"
        and storage.nbytes() >= _HUGE_FROM
        and hasattr(mmap, "MADV_HUGEPAGE")
    ):
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        # A system that refuses changes nothing.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE
        )


@dataclass(frozen=True)
class PoolStats:
    """Counts since the last clear: borrows = reuses + allocations + bypassed (served by
    torch.empty).

    ``idle_bytes`` can be lent now, ``held_bytes`` are lent and still referred to.
    """

    borrows: int = 0
    reuses: int = 0
    allocations: int = 0
    bypassed: int = 0
    idle_bytes: int = 0
    held_bytes: int = 0


class _Buffer:
    """Raw bytes of one place (device and stream). Only the storage is kept, so no
    autograd history sticks to it.
    """

    def __init__(self, capacity: int, device: torch.device, place: tuple) -> None:
        self.capacity, self.place = capacity, place
        self.storage = torch.empty(
            capacity, dtype=torch.uint8, device=device
        ).untyped_storage()
        _use_huge_pages(self.storage)
        self.alone = self.references()

    def references(self) -> tuple[int, int]:
        """References from C++ (tensors, views, saved tensors, DLPack) and from Python.

        The numbers mean nothing by themselves. If they are those of the new buffer,
        nobody else refers to its bytes.
        """
        return storage_references(self.storage), sys.getrefcount(self.storage)

    def intact(self) -> bool:
        """False once the bytes were resized, shared with a process, or exported to
        NumPy (unresizable from then).
        """
        shared = self.storage.device.type == "cpu" and self.storage.is_shared()
        return (
            self.storage.nbytes() == self.capacity
            and self.storage.resizable()
            and not shared
        )

    def idle(self) -> bool:
        return self.references() == self.alone and self.intact()

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.storage.device).set_(
            self.storage, 0, shape
        )


def counts_references() -> bool:
    """Whether a reference to a buffer is seen while it lives and not after: torch has
    no public function for that.

    It is not in free-threaded builds of Python, which defer their counts.
    """
    seen = []
    try:
        buffer = _Buffer(64, torch.device("cpu"), ())
        for refer in (
            lambda: buffer.tensor(torch.Size([64]), torch.uint8)[1:],
            lambda: buffer.storage,
        ):
            reference = refer()
            seen += [not buffer.idle()]
            del reference
            seen += [buffer.idle()]
    except (AttributeError, TypeError):  # another version of torch
        return False
    return all(seen) and getattr(sys, "_is_gil_enabled", lambda: True)()


COUNTED = counts_references()


class MemoryPool:
    """Lends uninitialised tensors whose bytes are reused once nothing refers to them;
    thread-safe and bounded.

    The bytes are free when no tensor, view, saved tensor, export or storage refers to
    them; a raw ``data_ptr()`` does not count. ``max_bytes`` bounds what the pool keeps:
    the least recently lent buffer goes first, and tensors that were lent stay valid.
    Requests below ``threshold_bytes`` are torch.empty, and so is every request where
    references cannot be counted (free-threaded Python). A request fills at least 1 /
    ``waste`` of the buffer that serves it; with 1, saving a tensor saves no more than
    its own bytes. On CUDA a buffer serves one stream: order the work of other streams
    before you let a tensor go. A copied or unpickled pool is empty and has the same
    bounds.

    >>> pool = MemoryPool(threshold_bytes=0)
    >>> a, b = pool.lend((4, 4)), pool.lend((4, 4))
    >>> address, view = a.data_ptr(), b[0]
    >>> del a, b
    >>> pool.lend((2, 8)).data_ptr() == address, pool.stats().allocations  # the view still refers to b's bytes
    (True, 2)
    """

    def __init__(
        self,
        max_bytes: int = 512 << 20,
        threshold_bytes: int = 16 << 20,
        waste: float = 2.0,
    ) -> None:
        bounds = max_bytes, threshold_bytes, waste
        if not (
            all(map(is_real, bounds))
            and max_bytes >= 0
            and threshold_bytes >= 0
            and waste >= 1
        ):
            expected = "max_bytes, threshold_bytes must be >= 0 and waste >= 1"
            raise ValueError(f"memory pool: {expected}, got {short_repr(bounds)}")
        self.max_bytes = max_bytes
        self.threshold_bytes = threshold_bytes
        self.waste = waste
        # Reentrant, since letting go of a tensor may run code of its owner.
        self._lock = threading.RLock()
        self._kept: list[_Buffer] = []  # idle or lent, the least recently lent first
        self._counts: Counter[str] = Counter()

    def __reduce__(self) -> tuple[object, ...]:
        return MemoryPool, (self.max_bytes, self.threshold_bytes, self.waste)

    def lend(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """An uninitialised contiguous tensor, to keep for as long as it is needed.

        Raises TypeError for a dtype or a shape that is none, ValueError for a negative
        size or an unknown device.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"dtype must be a torch.dtype, as torch.float32, got {short_repr(dtype)}"
            )
        try:
            shape = torch.Size(shape)
        except (TypeError, OverflowError):
            raise TypeError(
                f"a shape must be a sequence of integers, got {short_repr(shape)}"
            ) from None
        if any(size < 0 for size in shape):
            raise ValueError(f"sizes of a tensor must be >= 0, got {tuple(shape)}")
        device, nbytes = check_device(device), math.prod(shape) * dtype.itemsize
        place = self._place(device, nbytes) if COUNTED else None
        with self._lock:
            buffer = self._take_idle(nbytes, place) if place else None
            self._counts.update(
                (
                    "borrows",
                    "reuses" if buffer else "allocations" if place else "bypassed",
                )
            )
        if place is None:
            return torch.empty(shape, dtype=dtype, device=device)
        buffer = buffer or self._allocate(nbytes, device, place)
        tensor = buffer.tensor(shape, dtype)
        if buffer.capacity <= self.max_bytes:  # a larger one must not evict the others
            with self._lock:
                self._kept.append(buffer)
                while sum(b.capacity for b in self._kept) > self.max_bytes:
                    self._kept.pop(0)
        return tensor

    def stats(self) -> PoolStats:
        """A consistent snapshot of the counters and of the bytes idle and held."""
        with self._lock:
            kept = sum(b.capacity for b in self._kept if b.intact())
            idle = sum(b.capacity for b in self._kept if b.idle())
            return PoolStats(**self._counts, idle_bytes=idle, held_bytes=kept - idle)

    def clear(self) -> None:
        """Forget all buffers and reset the counters; tensors that were lent stay valid."""
        with self._lock:
            self._kept, self._counts = [], Counter()

    def _place(self, device: torch.device, nbytes: int) -> tuple | None:
        """The device and stream that a buffer is bound to; None if torch.empty serves
        the request.
        """
        if not nbytes or nbytes < self.threshold_bytes or is_traced():
            return None
        if device.type == "cpu":
            return ("cpu",)
        # A graph keeps its own memory.
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(device)
            return ("cuda", stream.device_index, stream.cuda_stream)
        return None

    def _take_idle(self, nbytes: int, place: tuple) -> _Buffer | None:
        """Take out the smallest idle buffer that fits; of equal ones the last lent,
        which may still be in a cache.
        """
        fits = [
            b
            for b in self._kept
            if b.place == place and 1 <= b.capacity / nbytes <= self.waste and b.idle()
        ]
        best = min(reversed(fits), key=lambda b: b.capacity, default=None)
        self._kept = [b for b in self._kept if b is not best and b.intact()]
        return best

    def _allocate(self, nbytes: int, device: torch.device, place: tuple) -> _Buffer:
        try:
            return _Buffer(nbytes, device, place)
        except (MemoryError, RuntimeError) as error:
            with self._lock:
                lent = [b for b in self._kept if not b.idle()]
                if len(lent) == len(self._kept) or not is_out_of_memory(error):
                    raise
                self._kept = lent  # the idle ones may be what is missing
            return _Buffer(nbytes, device, place)


GLOBAL_POOL = MemoryPool()
# For the outputs of calls on a CPU, so that they do not evict scratch.
_MACHINE = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
RESULTS = MemoryPool(min(512 << 20, _MACHINE // 64), waste=1.0)
