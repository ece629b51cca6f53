"""``Execution``, the options of a call. The modules here compute attention on one
device: a planner turns a pattern into a plan of dense calls, which one executor runs
and merges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn import Parameter

from .. import cache as caches
from .. import kernels, memory
from ..cache import T
from ..checks import as_int, is_int, short_repr
from ..kernels.base import device_type_of
from ..torch_private import outside_modes
from .chunked import ChunkedKernel, OOMBackoff


@dataclass(frozen=True)
class Execution:
    """The options of one call; none of them changes a value. A call refuses in one line
    an option that it cannot honour.

    ``cache``: keep plans and index tensors (True: the global pattern cache, False:
    rebuild them in each call, or a ``PatternCache``). What a block-sparse pattern shows
    of a ``KVCache`` is planned anew each time. ``pool``: borrow large scratch buffers
    (True: the global pool, False: new ones, or a ``MemoryPool``), which only half
    precision has. ``tile``: compute at most tile x tile scores at a time (None: whole
    calls, or an ``OOMBackoff``, which takes smaller tiles when memory runs out); a
    kernel that stores no scores gains nothing, and a single position beside a
    ``KVCache`` makes one row of them. On a GPU of compute capability 8.0 or newer one
    kernel joins the branches of a dilated pattern, which holds more memory: with a
    ``pool`` or a ``tile`` they are joined one after another. ``results``: on a CPU,
    large outputs reuse the memory of earlier outputs that were freed, which saves page
    faults (True: ``memory.RESULTS``, which keeps up to 512 MiB of the host's memory, see
    ``help(ringlab.memory)``; False: new memory; or a ``MemoryPool``). Outputs of a
    ``KVCache`` and of a sequence on several ranks are new memory.

    >>> Execution(cache=False)
    Execution(cache=False, pool=False, tile=None, results=True)
    """

    cache: bool | caches.PatternCache = True
    pool: bool | memory.MemoryPool = False
    tile: int | OOMBackoff | None = None
    results: bool | memory.MemoryPool = True

    def __post_init__(self) -> None:
        if (tile := as_int(self.tile)) is not None:
            object.__setattr__(self, "tile", tile)
        pool = bool | memory.MemoryPool
        kinds = {"cache": bool | caches.PatternCache, "pool": pool, "results": pool}
        kinds["tile"] = int | OOMBackoff | None
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"Execution: {name} cannot be {short_repr(getattr(self, name))}"
                )
        if isinstance(self.tile, int) and not is_int(self.tile):
            raise ValueError(
                f"Execution: tile must be a positive number of rows, got {self.tile!r}"
            )

    @cached_property
    def text(self) -> str:
        """The options in words, as a part of names."""
        return str(self)

    @cached_property
    def switches(self) -> Execution:
        """The options that decide how a call runs."""
        return Execution(tile=self.tile, pool=self.pool is not False)

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of a key from the cache in use, or what ``build`` makes."""
        if self.cache is False:
            with outside_modes():
                return build()
        return (caches.GLOBAL if self.cache is True else self.cache).get(key, build)

    def scratch(self) -> memory.MemoryPool | None:
        """The pool for scratch buffers, or None."""
        return memory.GLOBAL_POOL if self.pool is True else self.pool or None

    def results_of(self, q: Tensor) -> memory.MemoryPool | None:
        """The pool for results like q: on a CPU, where it lends and keeps that much.
        None for subclasses of tensors.
        """
        pool = memory.RESULTS if self.results is True else self.results or None
        large = (
            pool is not None
            and pool.threshold_bytes <= q.numel() * q.element_size() <= pool.max_bytes
        )
        return (
            pool
            if large and device_type_of(q) == "cpu" and type(q) in (Tensor, Parameter)
            else None
        )

    def tiled(self, kernel: kernels.Kernel) -> kernels.Kernel | ChunkedKernel:
        """The kernel, in tiles where ``tile`` asks for them."""
        return kernel if self.tile is None else ChunkedKernel(kernel, self.tile)


DEFAULT = Execution()
