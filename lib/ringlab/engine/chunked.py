"""Attention in tiles, with tile x tile scores at a time, and back-off to smaller tiles
when memory runs out.

A tile is a kernel call on some queries and some keys. Results are merged by
log-sum-exp, and each tile's backward is exact with the final (out, lse). All of it
happens inside one call of a kernel: messages between ranks do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..cache import T
from ..checks import as_int, is_int, short_repr
from ..kernels.base import Kernel, accumulation_dtype
from ..tracking import is_out_of_memory
from .execute import merge_

TILES = (2048, 512, 128)


class OOMBackoff:
    """The tile size in use: none at first, and the next smaller one each time memory
    runs out.

    It never goes up again, since what did not fit once will not fit again. ``tiles``:
    rows, from large to small.

    >>> from ringlab import OOMBackoff
    >>> backoff = OOMBackoff((512, 64))
    >>> backoff.tile is None, backoff
    (True, OOMBackoff((512, 64), level=0))
    """

    def __init__(self, tiles: tuple[int, ...] = TILES):
        if not isinstance(tiles, Sequence) or not tiles or not all(map(is_int, tiles)):
            raise ValueError(
                f"OOMBackoff: tiles must be positive integers, got {short_repr(tiles)}"
            )
        if list(tiles) != sorted(set(tiles), reverse=True):
            raise ValueError(
                f"OOMBackoff: each tile must be smaller than the one before, got {tiles!r}"
            )
        self.tiles: tuple[int, ...] = tuple(map(as_int, tiles))
        self.level: int = 0

    def __repr__(self) -> str:
        return f"OOMBackoff({self.tiles}, level={self.level})"

    @property
    def tile(self) -> int | None:
        """Rows of a tile now; None: no tiles."""
        return self.tiles[self.level - 1] if self.level else None

    def run(self, attempt: Callable[[int | None], T]) -> T:
        """``attempt(tile)``, again with smaller tiles as long as memory runs out; it
        must have no side effects.

        Raises what the smallest tile raised, with a note of the tiles tried; other
        errors at once.
        """
        while True:
            level = self.level
            try:
                return attempt(self.tile)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if level == len(self.tiles):
                    error.add_note(
                        f"out of memory without tiles and with tiles of {', '.join(map(str, self.tiles))}"
                    )
                    raise
            self.level = max(
                self.level, level + 1
            )  # the memory of the failed attempt is free only here

    def agree(self, group: dist.ProcessGroup | dist.DeviceMesh) -> None:
        """Take the smallest tile of all ranks; a collective call, between two training
        steps.

        Values and messages are the same at every level, so without it results are right
        too, only speeds differ.
        """
        pg = group.get_group() if isinstance(group, dist.DeviceMesh) else group
        levels = [0] * dist.get_world_size(pg)
        dist.all_gather_object(levels, self.level, group=pg)
        self.level = max(levels)


@dataclass(frozen=True)
class ChunkedKernel(Kernel):
    """A kernel whose calls form at most tile x tile scores at a time, over all batch
    entries and heads.

    >>> from ringlab.kernels import KERNELS
    >>> q, k, v = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64).unbind()
    >>> eager = KERNELS["eager"]
    >>> (a, _), (b, _) = (f.forward(q, k, v, True, 1.0) for f in (eager, ChunkedKernel(eager, 16)))
    >>> torch.allclose(a, b, rtol=1e-12)
    True
    """

    kernel: Kernel
    tile: int | OOMBackoff

    def forward(self, *call: Tensor | bool | float) -> tuple[Tensor, Tensor]:
        """As ``Kernel.forward``."""
        return self._run(_forward, *call)

    def backward(self, *call: Tensor | bool | float) -> tuple[Tensor, ...]:
        """As ``Kernel.backward``."""
        return self._run(_backward, *call)

    def _run(self, passes: Callable, *args):
        if isinstance(self.tile, OOMBackoff):
            return self.tile.run(lambda tile: passes(self.kernel, tile, *args))
        return passes(self.kernel, self.tile, *args)


def _forward(kernel: Kernel, tile: int | None, q, k, v, causal, scale):
    if _fits(q, k, tile):
        return kernel.forward(q, k, v, causal, scale)
    b, m, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.empty(b, heads, m, dtype=out.dtype, device=q.device)
    for batch, rows, cols, head in _tiles(q, k, tile, causal):
        queries = (batch, rows, head)
        keys = (batch, cols, head)
        o, l = kernel.forward(
            q[queries], k[keys], v[keys], causal and rows == cols, scale
        )
        if cols.start == 0:
            out[queries] = o
            lse[batch, head, rows] = l
        else:
            merge_(out[queries], lse[batch, head, rows], o, l)
    return out, lse


def _backward(kernel: Kernel, tile: int | None, dout, q, k, v, out, lse, causal, scale):
    if _fits(q, k, tile):
        return kernel.backward(dout, q, k, v, out, lse, causal, scale)
    dq, dk, dv = (
        torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v)
    )
    for batch, rows, cols, head in _tiles(q, k, tile, causal):
        queries = (batch, rows, head)
        keys = (batch, cols, head)
        reads = (
            dout[queries],
            q[queries],
            k[keys],
            v[keys],
            out[queries],
            lse[batch, head, rows],
        )
        grads = kernel.backward(*reads, causal and rows == cols, scale)
        for grad, where, part in zip((dq, dk, dv), (queries, keys, keys), grads):
            grad[where] += part
    return dq, dk, dv


def _fits(q: Tensor, k: Tensor, tile: int | None) -> bool:
    b, m, heads, _ = q.shape
    return tile is None or b * heads * m * k.shape[1] <= tile * tile


def _tiles(
    q: Tensor, k: Tensor, tile: int, causal: bool
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """(batch, queries, keys, heads) of each tile; keys in order for the same queries,
    those all hidden left out.
    """
    (b, m, heads, _), m_k = q.shape, k.shape[1]
    pairs = (
        tile * tile // (min(m, tile) * min(m_k, tile))
    )  # short rows: several heads, then batch entries, at a time
    for batch in _cuts(b, max(1, pairs // heads)):
        for head in _cuts(heads, pairs):
            for rows in _cuts(m, tile):
                for cols in _cuts(rows.stop if causal else m_k, tile):
                    yield batch, rows, cols, head


def _cuts(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
