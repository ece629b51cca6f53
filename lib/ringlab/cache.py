"""A cache of what is built from a configuration: thread-safe, bounded by bytes,
evicting the least recently used.
"""

import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch

from .checks import is_real, short_repr
from .torch_private import outside_modes, storage_id
from .tracking import not_counted, storages

T = TypeVar("T")


@dataclass(frozen=True)
class CacheStats:
    """Counts since the last clear: hits + misses = calls."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0


class _Entry(NamedTuple):
    value: Any
    storages: dict[int, int]  # the bytes of each, by its address
    cuda: list[torch.Tensor]  # the CUDA tensors of the value
    streams: dict[torch.device, Any]  # on which they were built


class PatternCache:
    """Values by key, within ``max_bytes`` of tensor storage and ``max_entries``; evicts
    the least recently used.

    A key names the kind of value first, then all that it depends on: patterns, numbers,
    strings, dtypes, devices and tuples of these compare by value. Use a tensor's own
    device: ``torch.device("cuda")`` does not name the GPU.

    A hit returns the object that was built, without a copy: treat it as read-only.
    Threads that miss the same key wait for one build. If a build fails, its caller gets
    the error and the next thread tries. A build may use the cache for other keys. A
    value larger than ``max_bytes`` is returned but not stored. What a CUDA graph reads
    while it is captured is kept for good, since a replay reads it again.

    The bytes are those of all storages under the tensors of the values (in lists,
    tuples, dicts, dataclasses, objects); one that several values share counts once.
    Values are built outside inference mode, so that training can use them, and must not
    require grad. A copied or unpickled cache is empty and has the same bounds.

    >>> cache = PatternCache(max_bytes=1 << 20)
    >>> index = cache.get(("rows", 8, torch.int64), lambda: torch.arange(8))
    >>> cache.get(("rows", 8, torch.int64), lambda: torch.arange(8)) is index, cache.stats().bytes
    (True, 64)
    """

    def __init__(self, max_bytes: int = 64 << 20, max_entries: int = 16384) -> None:
        if (
            not (is_real(max_bytes) and is_real(max_entries))
            or min(max_bytes, max_entries) < 0
        ):
            raise ValueError(
                f"max_bytes and max_entries must be >= 0, got {short_repr((max_bytes, max_entries))}"
            )
        self.max_bytes: int = max_bytes
        self.max_entries: int = max_entries
        self._captured: list[_Entry] = []  # kept for good, and not counted
        self._lock = threading.Lock()  # never held while building
        # Locks, for as long as one is held.
        self._building: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        self.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return PatternCache, (self.max_bytes, self.max_entries)

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of ``key``, built if it is missing.

        Raises what ``build`` raises, and ValueError for a value that requires grad.
        """
        entry = self._find(key)
        if entry is None:
            with self._lock:
                lock = self._building.setdefault(key, threading.RLock())
            with lock:
                # Another thread may have built it meanwhile.
                entry = self._find(key) or self._build(key, build)
        if entry.cuda and torch.cuda.is_current_stream_capturing():
            self._captured.append(entry)  # a CUDA graph reads it at every replay
        for device, built in entry.streams.items():
            # If another stream reads, the allocator must wait for it before it reuses
            # the bytes.
            if (stream := torch.cuda.current_stream(device)) != built:
                for tensor in entry.cuda:
                    if tensor.device == device:
                        tensor.record_stream(stream)
        return entry.value

    def stats(self) -> CacheStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            return CacheStats(
                **self._counts, entries=len(self._entries), bytes=self._bytes
            )

    def clear(self) -> None:
        """Drop all entries and counts."""
        with self._lock:
            # Least recently used first.
            self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
            self._bytes, self._counts = 0, Counter()
            self._holders: Counter[int] = Counter()  # the entries of each storage

    def _find(self, key: Hashable) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._counts["hits"] += 1
            return entry

    def _build(self, key: Hashable, build: Callable[[], T]) -> _Entry:
        with self._lock:
            self._counts["misses"] += 1
        with outside_modes(), not_counted():
            value = build()
            tensors = _tensors(value)
            if any(t.requires_grad for t in tensors):
                raise ValueError(
                    "cache: a cached value must not require grad; detach it, or do not cache it"
                )
            held = {storage_id(s): s.nbytes() for t in tensors for s in storages(t)}
            cuda = [t for t in tensors if t.is_cuda]
            streams = {t.device: torch.cuda.current_stream(t.device) for t in cuda}
            entry = _Entry(value, held, cuda, streams)
        capturing = bool(entry.cuda) and torch.cuda.is_current_stream_capturing()
        # Tensor subclasses, as a compiler's fake tensors, belong to whoever made them,
        # and memory that is made while a CUDA graph is captured to that graph.
        if capturing or any(
            type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors
        ):
            return entry
        for stream in entry.streams.values():
            stream.synchronize()  # so that readers on other streams need not wait
        evicted = []  # freed after the lock is released
        if sum(held.values()) <= self.max_bytes:
            with self._lock:
                self._entries[key] = entry
                self._bytes += sum(held[s] for s in held if not self._holders[s])
                self._holders.update(held.keys())
                while (
                    self._bytes > self.max_bytes
                    or len(self._entries) > self.max_entries
                ):
                    evicted.append(self._entries.popitem(last=False)[1])
                    for storage, nbytes in evicted[-1].storages.items():
                        self._holders[storage] -= 1
                        if not self._holders[storage]:
                            del self._holders[storage]
                            self._bytes -= nbytes
                    self._counts["evictions"] += 1
        return entry


_PLAIN = {int, bool, float, str, range, type(None), torch.dtype, types.FunctionType}


def _tensors(value: object) -> list[torch.Tensor]:
    """The tensors in a value, in lists, tuples, dicts, dataclasses and objects."""
    tensors = []
    seen = set()
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif id(one) not in seen and not isinstance(one, type | types.ModuleType):
            seen.add(id(one))
            is_list = isinstance(one, dict | list | tuple)
            held = one if is_list else getattr(one, "__dict__", ())
            # Another thread may add to a ``__dict__``.
            held = [*held.values()] if isinstance(held, dict) else held
            left += [x for x in held if type(x) not in _PLAIN]
    return tensors


GLOBAL = PatternCache()
