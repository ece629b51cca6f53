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
from ..block_patterns import BlockSparse
from ..cache import T
from ..checks import as_int, check_choice, is_int, short_repr
from ..kernels.base import device_type_of
from ..torch_private import outside_modes
from . import blocks
from .chunked import ChunkedKernel, OOMBackoff

MERGES = ("auto", "eager")


@dataclass(frozen=True)
class Execution:
    """The options of one call; none of them changes a value. A call refuses in one line
    an option that it cannot honour.

    ``gather``: copy rows by index-select instead of reading strided views; of dense and
    dilated patterns on one device, with as many keys as queries and no ``KVCache``.
    ``cache``: keep plans and index tensors (True: the global pattern cache, False:
    rebuild them in each call, or a ``PatternCache``). What a block-sparse pattern shows
    of a ``KVCache`` is planned anew each time. ``pool``: borrow large scratch buffers
    (True: the global pool, False: new ones, or a ``MemoryPool``), which are those of
    half precision and of ``gather``; other paths, "bsr" and "flex" make none. ``tile``:
    compute at most tile x tile scores at a time (None: whole calls, or an
    ``OOMBackoff``, which takes smaller tiles when memory runs out); a kernel that stores
    no scores gains nothing, and a single position beside a ``KVCache`` makes one row of
    them. ``blocks``: how a block-sparse pattern runs, one of ``engine.blocks.WAYS``;
    "bsr" and "flex" take no ``tile``, a ``KVCache`` takes "auto", the scheme "ulysses"
    all of them and the plan "views". ``merge``: how the branches of a dilated pattern are
    joined, "eager" one after another, in place, as other patterns, several ranks and a
    ``KVCache`` always do; "auto" is faster: on a GPU of compute capability 8.0 or newer
    one kernel joins all of them, which holds more memory and is left out with a
    ``pool``, ``tile`` or ``gather``, for float64 and the kernel "eager", and where
    memory runs out; on a CPU each visible pair is computed once where that is predicted
    to be faster. ``results``: on a CPU, large outputs reuse the memory of earlier
    outputs that were freed, which saves page faults (True: ``memory.RESULTS``, which
    keeps up to 512 MiB of the host's memory, see ``help(ringlab.memory)``; False: new
    memory; or a ``MemoryPool``). Outputs of ``gather``, "bsr", "flex", a ``KVCache``
    and a sequence on several ranks are new memory.

    >>> Execution(gather=True, cache=False)
    Execution(gather=True, cache=False, pool=False, tile=None, blocks='auto', merge='auto', results=True)
    """

    gather: bool = False
    cache: bool | caches.PatternCache = True
    pool: bool | memory.MemoryPool = False
    tile: int | OOMBackoff | None = None
    blocks: str = "auto"
    merge: str = "auto"
    results: bool | memory.MemoryPool = True

    def __post_init__(self) -> None:
        if (tile := as_int(self.tile)) is not None:
            object.__setattr__(self, "tile", tile)
        pool = bool | memory.MemoryPool
        kinds = {
            "gather": bool,
            "cache": bool | caches.PatternCache,
            "pool": pool,
            "results": pool,
        }
        for name, kind in (kinds | {"tile": int | OOMBackoff | None}).items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"Execution: {name} cannot be {short_repr(getattr(self, name))}"
                )
        for name, names in (("blocks", blocks.WAYS), ("merge", MERGES)):
            check_choice(name, getattr(self, name), names)
        if self.tile is not None and self.blocks in ("bsr", "flex"):
            raise ValueError(f"Execution: blocks={self.blocks!r} takes no tile")
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
        names = "gather", "tile", "blocks", "merge"
        pool = self.pool is not False
        return Execution(**{x: getattr(self, x) for x in names}, pool=pool)

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

    def check(self, pattern: object, where: str = "one device") -> None:
        """Raise ValueError for an option that a call of a pattern would not honour:
        on "one device", with "other keys" or "a cache", or over ranks by a scheme.
        """
        sparse = isinstance(pattern, BlockSparse)
        here = where == "one device"
        runs = here or where == "ulysses" or (where, self.blocks) == ("plan", "views")
        for name, honoured in (
            ("gather", not self.gather or here and not sparse),
            ("blocks", self.blocks == "auto" or runs and sparse),
        ):
            if not honoured:
                option = f"Execution({name}={getattr(self, name)!r})"
                raise ValueError(f"{option} is not for {pattern} ({where})")

    @property
    def plain(self) -> bool:
        """Whether a kernel that runs whole patterns can take the call: nothing is asked
        for that cuts it up.
        """
        return not self.gather and self.tile is None and self.blocks == "auto"


DEFAULT = Execution()
