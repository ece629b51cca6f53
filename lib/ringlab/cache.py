"""A cache of what is built from a configuration: thread-safe, bounded by bytes, evicting the least recently used."""

import dataclasses
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from .checks import is_real, short_repr
from .tracking import not_counted, storages

T = TypeVar("T")


@dataclass(frozen=True)
class CacheStats:
    """Counts since the last clear: hits + misses = calls; ``uncached`` values were returned but not stored."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0
    uncached: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    value: Any
    bytes: int
    storable: bool
    cuda: tuple[torch.Tensor, ...]  # the CUDA tensors of the value


class _Build:
    """A key under construction: whoever holds the lock builds, and those who wait for it take the entry."""

    def __init__(self) -> None:
        self.lock, self.entry = threading.RLock(), None


class PatternCache:
    """Values by key, within ``max_bytes`` of tensor storage and ``max_entries``; evicts the least recently used.

    A key names the kind of value first, then all that it depends on: patterns, numbers, strings, dtypes, devices and
    tuples of these compare by value. Use a tensor's own device: ``torch.device("cuda")`` does not name the GPU.

    A hit returns the object that was built, without a copy: treat it as read-only. Threads that miss the same key
    wait for one build. If a build fails, its caller gets the error and the next thread tries. A build may use the cache
    for other keys. A value larger than ``max_bytes`` is returned but not stored.

    The bytes of a value are those of all storages under its tensors (in sequences, dicts, dataclasses and objects),
    each counted once. Values are built outside inference mode, so that training can use them, and must not require
    grad. A copied or unpickled cache is empty and has the same bounds.

    >>> cache = PatternCache(max_bytes=1 << 20)
    >>> index = cache.get(("rows", 8, torch.int64), lambda: torch.arange(8))
    >>> cache.get(("rows", 8, torch.int64), lambda: torch.arange(8)) is index, cache.stats().bytes
    (True, 64)
    """

    def __init__(self, max_bytes: int = 64 << 20, max_entries: int = 4096) -> None:
        if not (is_real(max_bytes) and is_real(max_entries)) or min(max_bytes, max_entries) < 0:
            raise ValueError(f"max_bytes and max_entries must be >= 0, got {short_repr((max_bytes, max_entries))}")
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self._lock = threading.Lock()  # never held while building
        self._reset()

    def __reduce__(self):
        return PatternCache, (self.max_bytes, self.max_entries)

    def _reset(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # least recently used first
        self._builds: dict[Hashable, _Build] = {}
        self._bytes, self._counts = 0, Counter()

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of ``key``, built if it is missing.

        Raises what ``build`` raises, and ValueError for a value that requires grad.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._counts["hits"] += 1
            else:
                work = self._builds.setdefault(key, _Build())
        if entry is None:
            entry = self._built(key, build, work)
        for tensor in entry.cuda:
            # The current stream may not be the builder's: the allocator must wait for it before it reuses the bytes.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return entry.value

    def stats(self) -> CacheStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            return CacheStats(**self._counts, entries=len(self._entries), bytes=self._bytes)

    def clear(self) -> None:
        """Drop all entries and counts. Values under construction are returned to their callers but not stored."""
        with self._lock:
            dropped = self._entries
            self._reset()
        del dropped  # freeing may take long, so it is done outside the lock

    def _built(self, key: Hashable, build: Callable[[], T], work: _Build) -> _Entry:
        with work.lock:
            with self._lock:
                if work.entry is not None:  # another thread built it meanwhile
                    self._counts["hits"] += 1
                    return work.entry
                self._counts["misses"] += 1
                self._builds[key] = work  # a failed build before this one removed it
            evicted = []  # freed after the lock is released
            try:
                with torch.inference_mode(False), not_counted():
                    work.entry = _entry(build())
            finally:  # also after KeyboardInterrupt
                with self._lock:
                    if self._builds.get(key) is work:  # else the cache was cleared meanwhile
                        del self._builds[key]
                        if work.entry is not None:
                            self._store(key, work.entry, evicted)
            return work.entry

    def _store(self, key: Hashable, entry: _Entry, evicted: list[_Entry]) -> None:
        if not entry.storable or entry.bytes > self.max_bytes or not self.max_entries:
            self._counts["uncached"] += 1
            return
        self._entries[key] = entry
        self._bytes += entry.bytes
        while self._bytes > self.max_bytes or len(self._entries) > self.max_entries:
            evicted.append(self._entries.popitem(last=False)[1])
            self._bytes -= evicted[-1].bytes
            self._counts["evictions"] += 1


def _entry(value: Any) -> _Entry:
    tensors = list(_tensors(value, set()))
    if any(t.requires_grad for t in tensors):
        raise ValueError("cache: a cached value must not require grad; detach it, or do not cache it")
    sizes = {s._cdata: s.nbytes() for t in tensors for s in storages(t)}
    cuda = tuple(t for t in tensors if t.is_cuda)
    capturing = bool(cuda) and torch.cuda.is_current_stream_capturing()
    # Tensor subclasses, as a compiler's fake tensors, belong to whoever made them, and memory that is made while a CUDA
    # graph is captured to that graph.
    storable = not capturing and all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    if not capturing:
        for device in {t.device for t in cuda}:
            torch.cuda.current_stream(device).synchronize()  # so that readers on other streams need not wait
    return _Entry(value, sum(sizes.values()), storable, cuda)


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in a value, in sequences, dicts, dataclasses and objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in seen and not isinstance(leaf, type | types.ModuleType | types.FunctionType):
            seen.add(id(leaf))
            if dataclasses.is_dataclass(leaf):  # also with slots
                yield from _tensors([getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)], seen)
            else:
                yield from _tensors(list(getattr(leaf, "__dict__", {}).values()), seen)


GLOBAL = PatternCache()
