"""Memory pages on the CPU: ask Linux for huge ones.

Reuse memory: a pool of scratch buffers with a scope, and of results without.

torch's CUDA allocator caches already, so there the pool mostly repeats its work; on the CPU a large fresh buffer costs
page faults on first touch, which reuse avoids and huge pages lessen. Whether that pays is for measurements to say.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .checks import is_real, short_repr, tensor_bytes
from .tracking import is_out_of_memory

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


_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


@dataclass(frozen=True)
class PoolStats:
    """What a pool did: borrows = reuses + allocations + bypassed; bytes are capacities, live while borrowed."""

    borrows: int = 0
    reuses: int = 0
    allocations: int = 0
    bypassed: int = 0
    evictions: int = 0
    refused: int = 0
    idle_bytes: int = 0
    held_bytes: int = 0
    live_bytes: int = 0


class _Buffer:
    """Raw bytes in one place (device and stream); only the storage is kept, so no autograd history sticks to it."""

    __slots__ = ("alone", "capacity", "place", "rank", "storage")

    def __init__(self, capacity: int, device: torch.device, place: tuple) -> None:
        self.capacity, self.place = capacity, place
        self.rank = (1, 0)  # the least is given up first: what was to come back and did not, then the longest unused
        self.storage = empty((capacity,), torch.uint8, device).untyped_storage()
        self.alone = _references(self.storage)

    def intact(self) -> bool:
        """False once the bytes were resized, shared with a process, or exported to NumPy (unresizable from then)."""
        shared = self.storage.device.type == "cpu" and self.storage.is_shared()
        return self.storage.nbytes() == self.capacity and self.storage.resizable() and not shared


def _references(storage: torch.UntypedStorage) -> tuple[int, int]:
    # C++ owners (tensors, views, saved tensors, DLPack) and owners of the Python object. The numbers mean nothing by
    # themselves; equal before and after, they say that nobody new holds the bytes.
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


class MemoryPool:
    """Lend scratch tensors inside a `with` scope and reuse their bytes afterwards; thread-safe and bounded.

    `max_bytes` bounds what the pool keeps while nobody borrows it; the least recently used goes first. Requests below
    `threshold_bytes` are plain torch.empty. A buffer serves any shape and dtype that fills at least 1 / `waste` of it,
    on the same device and, on CUDA, the same stream (finish or order other streams' work before the scope ends).

    A borrowed tensor has uninitialised contents and must not outlive its scope. When the scope ends, by exception too,
    the tensor is emptied to shape (0,), so that its name, still bound, cannot read what the next borrower writes. If
    views, saved tensors, exports or more names refer to the bytes (returning the tensor is one), or it gained autograd
    history, nothing is touched and the buffer is refused instead: held until those references are gone, or given up
    where that cannot be known. A raw `data_ptr()` kept past the scope cannot be detected.

    >>> pool = MemoryPool(threshold_bytes=0)
    >>> with pool.borrow((2, 3), torch.float32, "cpu") as t:
    ...     total = t.fill_(2).sum().item()
    >>> total, t.shape, pool.stats().idle_bytes
    (12.0, torch.Size([0]), 64)
    """

    def __init__(self, max_bytes: int = 512 << 20, threshold_bytes: int = 16 << 20, waste: float = 2.0) -> None:
        given = max_bytes, threshold_bytes, waste
        if not (all(map(is_real, given)) and max_bytes >= 0 and threshold_bytes >= 0 and waste >= 1):
            raise ValueError(
                f"memory pool: max_bytes, threshold_bytes must be >= 0 and waste >= 1, got {short_repr(given)}"
            )
        self.max_bytes, self.threshold_bytes, self.waste = max_bytes, threshold_bytes, waste
        # Reentrant, since garbage collection may end an abandoned scope while this very thread holds the lock.
        self._lock, self._closed = threading.RLock(), False
        self._idle: dict[int, _Buffer] = {}  # by id, the last used one last
        self._held: dict[int, _Buffer] = {}  # returned, but somebody still refers to the bytes
        self._live, self._clock = 0, itertools.count()
        self._counts: Counter[str] = Counter()

    def __reduce__(self):  # a copy, as of a module that is cloned or saved, is an empty pool with the same bounds
        return MemoryPool, (self.max_bytes, self.threshold_bytes, self.waste)

    @contextlib.contextmanager
    def borrow(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Iterator[torch.Tensor]:
        """Lend an uninitialised contiguous tensor; ValueError for a negative size, RuntimeError once closed."""
        shape, device, nbytes = tensor_bytes(shape, dtype, device)
        place = self._place(device, nbytes)
        buffer = self._take(-(-nbytes // 64) * 64, device, place, self.waste)  # torch aligns to 64 bytes
        escaped, history = True, False
        try:
            with torch.inference_mode(False):  # a fresh normal tensor: no view, no history, fit for any mode
                tensor = _tensor(buffer, shape, dtype, device)
            storage = tensor.untyped_storage()
            lent, names = (tensor._use_count(), _references(storage)), sys.getrefcount(tensor)
            try:
                yield tensor
            finally:
                history = tensor.requires_grad or tensor.grad_fn is not None
                escaped = history or (tensor._use_count(), _references(storage)) != lent
                escaped |= sys.getrefcount(tensor) > names + 1  # one more is the name in the with statement
                del storage
                if not escaped:
                    tensor.data = torch.empty(0, dtype=dtype, device=device)
        finally:
            if buffer:
                self._give_back(buffer, escaped, reusable=not history, refused=escaped)

    def lend(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Make an uninitialised contiguous tensor to keep, as long as one likes: for results.

        Its bytes are lent again once nothing refers to them any more: no tensor, view, saved tensor or export. Only a
        buffer of just its size serves it, so that what saves its storage saves no more. Errors as of ``borrow``.

        >>> pool = MemoryPool(threshold_bytes=0)
        >>> a, b = pool.lend((4, 4)), pool.lend((4, 4))
        >>> address, view = a.data_ptr(), b[0]
        >>> del a, b
        >>> pool.lend((2, 8)).data_ptr() == address, pool.stats().allocations  # b is still there, for its view is
        (True, 2)
        """
        shape, device, nbytes = tensor_bytes(shape, dtype, device)
        buffer = self._take(nbytes, device, self._place(device, nbytes), waste=1.0)
        try:
            return _tensor(buffer, shape, dtype, device)
        finally:
            if buffer:
                self._give_back(buffer, held=True)

    def stats(self) -> PoolStats:
        """A consistent snapshot of the counters and of the bytes idle, held and live."""
        with self._lock:
            self._reclaim()
            idle, held = (sum(b.capacity for b in kept.values()) for kept in (self._idle, self._held))
            return PoolStats(**self._counts, idle_bytes=idle, held_bytes=held, live_bytes=self._live)

    def clear(self) -> None:
        """Free everything idle or held and reset the counters; what is borrowed stays valid and comes back later."""
        with self._lock:
            freed = (self._idle, self._held)  # freed outside the lock, for it may take long
            self._idle, self._held = {}, {}
            self._counts = Counter()
        del freed

    def close(self) -> None:
        """Free everything and refuse further borrowing; what is borrowed is freed when it comes back."""
        self._closed = True
        self.clear()

    def _place(self, device: torch.device, nbytes: int) -> tuple | None:
        """The device and stream that a buffer is bound to; None: a request that the pool leaves to torch."""
        if not nbytes or nbytes < self.threshold_bytes or any(map(torch._C._get_dispatch_mode, _TRACERS)):
            return None  # what is made under a tracer has no data, or belongs to a graph
        if device.type == "cpu":
            return ("cpu", 0, 0)
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():  # a graph keeps its own memory
            stream = torch.cuda.current_stream(device)
            return ("cuda", stream.device_index, stream.cuda_stream)
        return None

    def _take(self, capacity: int, device: torch.device, place: tuple | None, waste: float) -> _Buffer | None:
        with self._lock:
            if self._closed:
                raise RuntimeError("this memory pool is closed")
            self._counts["borrows"] += 1
            if place is None:
                self._counts["bypassed"] += 1
                return None
            self._reclaim()
            fits = [b for b in [*self._idle.values()] if b.place == place and 1 <= b.capacity / capacity <= waste]
            best = min(reversed(fits), key=lambda b: b.capacity, default=None)  # of equals the last used, still warm
            if self._idle.pop(id(best), None):
                self._counts["reuses"] += 1
                self._live += best.capacity
                return best
            self._counts["allocations"] += 1
        try:
            buffer = _Buffer(capacity, device, place)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            with self._lock:  # what the pool keeps idle must not be what is missing
                freed, self._idle = self._idle, {}
                self._counts["evictions"] += len(freed)
            if not freed:
                raise
            freed.clear()
            buffer = _Buffer(capacity, device, place)
        with self._lock:
            self._live += capacity
        return buffer

    def _give_back(self, buffer: _Buffer, held: bool, reusable: bool = True, refused: bool = False) -> None:
        freed = []  # outside the lock, for it may take long
        with self._lock:
            self._live -= buffer.capacity
            self._counts["refused"] += refused
            oversize = buffer.capacity > self.max_bytes  # it must not push out all the others first
            self._counts["evictions"] += oversize
            if self._closed or oversize or not reusable or not buffer.intact():
                return
            buffer.rank = (not refused, next(self._clock))
            (self._held if held else self._idle)[id(buffer)] = buffer
            kept = sorted([*self._held.values(), *self._idle.values()], key=lambda b: b.rank, reverse=True)
            while sum(b.capacity for b in kept) > self.max_bytes:
                freed.append(kept.pop())
                for place in (self._held, self._idle):
                    place.pop(id(freed[-1]), None)
                self._counts["evictions"] += 1

    def _reclaim(self) -> None:
        for buffer in [*self._held.values()]:
            alone, intact = _references(buffer.storage) == buffer.alone, buffer.intact()
            if (alone or not intact) and self._held.pop(id(buffer), None) and intact:
                buffer.rank = (True, buffer.rank[1])
                self._idle[id(buffer)] = buffer


def _tensor(buffer: _Buffer | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(0 if buffer else shape, dtype=dtype, device=device)
    return tensor.set_(buffer.storage, 0, shape) if buffer else tensor


GLOBAL_POOL = MemoryPool()
RESULTS = MemoryPool()  # what calls return on the CPU: a pool of its own, whose bounds do not push scratch out
