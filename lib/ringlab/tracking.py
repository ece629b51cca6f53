"""Measures of memory: bytes of live tensor storages, the process's own high-water mark.

Each sees what the other does not. `LiveStorageTracker` counts tensor storages exactly,
touched or not; the high-water mark (Linux) sees everything that the process really
touched, scratch and libraries included.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .torch_private import OwnMode, coo_parts, storage_id

_ROWS = lambda t: (t.crow_indices(), t.col_indices(), t.values())  # noqa: E731
_COLUMNS = lambda t: (t.ccol_indices(), t.row_indices(), t.values())  # noqa: E731
_HELD = {  # the tensors that hold a tensor's bytes, by its layout
    torch.strided: lambda t: (t,),
    torch.sparse_coo: coo_parts,
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}

_MAY_HOLD = (torch.Tensor, list, tuple, dict, torch.UntypedStorage)
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",  # of cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: by its type or, as torch's CPU
    allocator does it, only by its words.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    words = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        phrase in words for phrase in OUT_OF_MEMORY
    )


def storages(value: object, meta: bool = False) -> Iterator[torch.UntypedStorage]:
    """Yield the storages that hold a tensor's bytes (a sparse tensor has several;
    opaque tensors none).

    ``value``: a tensor, a storage, or lists, tuples and dicts of them; anything else
    has none. Those on the meta device hold no bytes, and come only if ``meta``.

    >>> [s.nbytes() for s in storages(torch.zeros(4, 4)[0])]
    [64]
    """
    if isinstance(value, torch.Tensor):
        for part in _HELD[value.layout](value) if value.layout in _HELD else ():
            if meta or part.device.type != "meta":
                yield part.untyped_storage()
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, _MAY_HOLD):  # most arguments of an operator are numbers
                yield from storages(part, meta)
    elif isinstance(value, torch.UntypedStorage) and (
        meta or value.device.type != "meta"
    ):
        yield value


# Those entered.
_trackers: ContextVar[tuple["LiveStorageTracker", ...]] = ContextVar(
    "trackers", default=()
)
# Whether they count operators.
_counting: ContextVar[bool] = ContextVar("counting", default=True)


class LiveStorageTracker(OwnMode):
    """Count the bytes of live tensor storages, and their peak, while torch ops run;
    each storage counts once.

    A storage counts from the op that made it (or from `register`) until it is really
    freed, whoever holds it: names, views, saved tensors of a graph. Views and in-place
    ops add nothing. Memory that existed before counts only if it is registered. The
    backward pass is seen too. Trackers may be nested: each sees all ops inside it.
    Units: bytes. `operators` counts the aten ops, `views` those of them that only make
    another view and so start no kernel. Neither counts what is built once and cached
    (`not_counted`).

    Blind spots: scratch inside a kernel and temporaries inside one fused or compiled
    op; the old copy while `resize_` moves a storage; memory that C++ libraries hold
    outside torch storages; ops of other Python threads; tensor subclasses that wrap
    tensors; and two storages over the same memory (`from_numpy` or DLPack twice) count
    twice. flex_attention fails inside, since torch compiles nothing under a mode.

    >>> x = torch.zeros(1024)
    >>> with LiveStorageTracker() as tracker:
    ...     tracker.register(x)
    ...     y = (x + 1).mul_(2)[::2]
    >>> tracker.peak_bytes, tracker.operators, tracker.views
    (8192, 3, 1)
    """

    _meta = False  # whether tensors without data count, as if they had some

    def __init__(self) -> None:
        super().__init__()
        # StorageImpl address -> (weak reference, bytes). The weak reference keeps the
        # address from being given to another storage for as long as the entry exists;
        # the bytes themselves are freed without regard to it.
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._current = 0
        self.peak_bytes = (
            0  # the largest `current_bytes` that any op or `register` reached
        )
        self.operators = self.views = 0

    @property
    def current_bytes(self) -> int:
        """Bytes of the tracked storages that are alive now."""
        self._drop_freed()
        return self._current

    def register(self, *tensors: torch.Tensor) -> None:
        """Count tensors that exist already, such as the inputs; raise TypeError for
        anything else.
        """
        if odd := [t for t in tensors if not isinstance(t, torch.Tensor)]:
            raise TypeError(f"register: expected tensors, got {type(odd[0]).__name__}")
        self._drop_freed()
        self._count(storages(tensors, self._meta))

    def __enter__(self):
        _trackers.set((*_trackers.get(), self))
        return super().__enter__()

    def __exit__(self, *error):
        _trackers.set(_trackers.get()[:-1])
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten" and _counting.get():
            self.operators += 1
            self.views += func.is_view
        # ``torch.tensor(...)`` filled its argument out of sight.
        fresh = func is torch.ops.aten.lift_fresh.default
        if func.is_view and not fresh:
            return func(*args, **kwargs)  # no new memory
        sizes = (
            {}
            if fresh
            else {
                storage_id(s): s.nbytes() for s in storages((args, kwargs), self._meta)
            }
        )
        out = func(*args, **kwargs)
        made = storages(out, self._meta)
        # An output that shares an argument's unregistered storage is a view of foreign
        # memory, unless it grew.
        self._count(
            s
            for s in made
            if (key := storage_id(s)) in self._live or sizes.get(key, -1) < s.nbytes()
        )
        return out

    def _count(self, made: Iterator[torch.UntypedStorage]) -> None:
        for storage in made:
            key = storage_id(storage)
            size = storage.nbytes()
            reference, counted = self._live.get(key) or (StorageWeakRef(storage), 0)
            if size != counted:  # new, or resized in place
                self._live[key] = (reference, size)
                self._current += size - counted
        # What was freed is looked for only where it decides: with many storages alive
        # that takes longer than the op. An op frees nothing that lived before it, so
        # what is freed now was freed before the new storages came.
        if self._current > self.peak_bytes:
            self._drop_freed()
            self.peak_bytes = max(self.peak_bytes, self._current)

    def _drop_freed(self) -> None:
        # The storages' Python objects come and go while the memory stays, so only the
        # C++ weak count tells.
        for key in [
            key for key, (reference, _) in self._live.items() if reference.expired()
        ]:
            self._current -= self._live.pop(key)[1]


@contextmanager
def seen_inside() -> Iterator[None]:
    """Let the trackers at work see the ops of a custom operator's body, which no
    dispatch mode sees by itself.
    """
    with ExitStack() as stack:
        for tracker in _trackers.get():
            stack.enter_context(tracker)
        yield


@contextmanager
def not_counted() -> Iterator[None]:
    """Let the trackers at work count no operators: what is built once and kept is no
    part of every call.
    """
    token = _counting.set(False)
    try:
        yield
    finally:
        _counting.reset(token)
