"""Keep what is built from a configuration: a thread-safe cache, bounded by bytes, least recently used goes first."""

import dataclasses
import enum
import re
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .checks import is_real, short_repr
from .tracking import not_counted, storages

T = TypeVar("T")
_DEVICE_NAME = re.compile(r"(cpu|cuda)(:\d+)?")


def key(*parts: object) -> Hashable:
    """Make a hashable key of patterns (any dataclass), shapes, dtypes, devices and plain values, nested or not.

    Devices, and strings that name one, always carry their index: "cuda" is the current CUDA device, so two GPUs never
    share an entry. Equal numbers of different type (True, 1, 1.0) stay apart; tuples, lists and torch.Size do not.
    Raises TypeError for what has no value of its own (tensors, functions), ValueError for "cuda" without a GPU.

    >>> key((1, 2), "cpu") == key([1, 2], torch.device("cpu", 0)), key(True) == key(1)
    (True, False)
    """
    return tuple(_frozen(part) for part in parts)


def _frozen(part: object) -> Hashable:
    match part:  # the frequent ones first
        case int() | bytes() | enum.Enum():
            return (type(part), part)
        case tuple() | list():
            return ("sequence", *map(_frozen, part))
        case str() if not _DEVICE_NAME.fullmatch(part):
            return (str, part)
        case str() | torch.device():
            return _device(torch.device(part))
        case None | torch.dtype() | torch.layout() | torch.memory_format() | type():
            return part
        case float():
            return (type(part), part.hex())  # keeps -0.0 apart from 0.0, and nan equal to itself
        case range() | slice():
            return (type(part), part.start, part.stop, part.step)
        case set() | frozenset():
            return ("set", frozenset(map(_frozen, part)))
        case dict():
            return ("mapping", frozenset((_frozen(name), _frozen(value)) for name, value in part.items()))
    if dataclasses.is_dataclass(part):
        return (type(part), *(_frozen(getattr(part, f.name)) for f in dataclasses.fields(part)))
    allowed = "dataclasses, numbers, strings, dtypes, devices, and sequences, sets, mappings of them"
    raise TypeError(f"cache key: cannot use a {type(part).__name__}; allowed: {allowed}")


def _device(device: torch.device) -> Hashable:
    if device.index is not None or device.type != "cuda":
        return (torch.device, device.type, device.index or 0)
    try:
        return (torch.device, "cuda", torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:  # torch built without CUDA, or no driver
        raise ValueError(f"cache key: device 'cuda' given, but there is no CUDA device ({error})") from error


@dataclass(frozen=True)
class CacheStats:
    """Counts since the last clear: hits + misses = calls; `uncached` values were returned but not kept."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0
    uncached: int = 0


@dataclass(eq=False)
class _Entry:
    value: Any
    bytes: int
    plain: bool  # False if it holds tensor subclasses, such as the fake tensors of a compiler
    cuda: tuple[torch.Tensor, ...]

    def lend(self) -> Any:
        # Another stream than the builder's may read the value: the allocator must wait for it before reusing the bytes.
        for tensor in self.cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.value


class _Build:
    def __init__(self, owner: int, generation: int) -> None:
        self.owner, self.generation, self.done = owner, generation, threading.Event()
        self.entry: _Entry | None = None  # stays None if the build failed


class PatternCache:
    """Remember values by key, within `max_bytes` of tensor storage and `max_entries`; the least recently used goes.

    A hit returns the very object that was built: nothing is copied or moved, so treat it as read-only. Threads that
    miss the same key wait for one build; if that fails, its error goes to the builder and the next one tries. A build
    may use the cache for other keys. A value larger than `max_bytes` is returned but not kept.

    Bytes are those of the storages under every tensor in the value (in sequences, mappings, dataclasses and objects),
    each once. Values are built outside inference mode, so that they serve training too, and must not require grad.

    >>> cache = PatternCache(max_bytes=1 << 20)
    >>> index = cache.get(key("rows", 8, torch.int64), lambda: torch.arange(8))
    >>> cache.get(key("rows", 8, torch.int64), lambda: torch.arange(8)) is index, cache.stats().bytes
    (True, 64)
    """

    def __init__(self, max_bytes: int = 64 << 20, max_entries: int = 4096) -> None:
        if not (is_real(max_bytes) and is_real(max_entries)) or min(max_bytes, max_entries) < 0:
            raise ValueError(f"max_bytes and max_entries must be >= 0, got {short_repr((max_bytes, max_entries))}")
        self._lock = threading.Lock()  # never held while building
        self._building: dict[Hashable, _Build] = {}
        self._waiting: dict[int, _Build] = {}  # thread -> the build it waits for
        self.max_bytes, self.max_entries, self._generation = max_bytes, max_entries, 0
        self._reset()

    def __reduce__(self):  # a copy, as of a module that is cloned or saved, is an empty cache with the same bounds
        return PatternCache, (self.max_bytes, self.max_entries)

    def _reset(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # least recently used first
        self._bytes = self._hits = self._misses = self._evictions = self._uncached = 0

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value of `key`, building it once if it is missing.

        Raises what `build` raises, ValueError if the value requires grad, RuntimeError if a build needs its own key.
        """
        me = threading.get_ident()
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                    self._hits += 1
                    break
                work = self._building.get(key)
                if mine := work is None:
                    work = self._building[key] = _Build(me, self._generation)
                    self._misses += 1
                else:
                    self._refuse_cycle(key, work, me)
                    self._waiting[me] = work
            if mine:
                return self._build(key, build, work)
            try:
                work.done.wait()
            finally:
                with self._lock:
                    del self._waiting[me]
                    self._hits += work.entry is not None
            if work.entry is not None:
                return work.entry.lend()  # from the build itself, for it may not have been kept
        return entry.lend()

    def stats(self) -> CacheStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            counts = (self._hits, self._misses, self._evictions, len(self._entries), self._bytes, self._uncached)
            return CacheStats(*counts)

    def clear(self) -> None:
        """Forget all entries and counts; what is being built meanwhile is returned to its callers but not kept."""
        with self._lock:
            freed = self._entries  # freed outside the lock, for it may take long
            self._generation += 1
            self._reset()
        del freed

    def _build(self, key: Hashable, build: Callable[[], T], work: _Build) -> T:
        freed, entry = [], None
        try:
            with torch.inference_mode(False), not_counted():
                entry = _entry(build())
        finally:  # whatever happened, KeyboardInterrupt included: no debris, and the waiters go on
            with self._lock:
                del self._building[key]
                if entry is not None:
                    self._keep(key, entry, work, freed)
                    work.entry = entry
                work.done.set()
        return entry.value

    def _keep(self, key: Hashable, entry: _Entry, work: _Build, freed: list[_Entry]) -> None:
        if entry.bytes > self.max_bytes or not self.max_entries or not entry.plain:
            self._uncached += 1
            return
        if work.generation != self._generation:  # cleared meanwhile
            return
        self._entries[key] = entry
        self._bytes += entry.bytes
        while self._bytes > self.max_bytes or len(self._entries) > self.max_entries:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.bytes
            self._evictions += 1
            freed.append(oldest)

    def _refuse_cycle(self, key: Hashable, work: _Build, me: int) -> None:
        # Who waits while building needs the awaited key for that build; so a ring of waiting owners is a key that needs
        # itself, in one thread or across several, and would wait for ever.
        while work is not None and not work.done.is_set():
            if work.owner == me:
                raise RuntimeError(f"cache: building {key!r} needs its own result")
            work = self._waiting.get(work.owner)


def _entry(value: Any) -> _Entry:
    tensors = list(_tensors(value, set()))
    if any(t.requires_grad for t in tensors):
        raise ValueError("cache: a value to keep must not require grad; detach it, or do not cache it")
    sizes = {s._cdata: s.nbytes() for t in tensors for s in storages(t)}
    cuda = tuple(t for t in tensors if t.is_cuda)
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    if cuda and torch.cuda.is_current_stream_capturing():
        plain = False  # memory made while a graph is captured belongs to that graph
    else:
        for device in {t.device for t in cuda}:
            torch.cuda.current_stream(device).synchronize()  # readers on other streams need not wait then
    return _Entry(value, sum(sizes.values()), plain, cuda)


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, type | types.ModuleType | types.FunctionType):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        parts = ()
    elif isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, tuple | list | set | frozenset):
        parts = value
    elif dataclasses.is_dataclass(value):  # also with slots
        parts = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    else:
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    for part in parts:
        yield from _tensors(part, seen)


GLOBAL = PatternCache()
