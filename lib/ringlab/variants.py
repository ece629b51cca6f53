"""The published systems by their published names and constructor arguments, each a row over the engine.

All of them compute head-group dilated attention: group i of the heads runs branch i, with offset i mod r, and nothing
is divided by the number of groups. They differ in how it is executed and in how ranks share it, and are equal in value;
only along a Hilbert curve the pattern itself is another.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from . import ring
from .published import FALLBACK, FLASH, PublishedAttention
from .ring import Simulated
from .tiles import Ladder


class DilatedAttention(PublishedAttention):
    """Dilated attention by gathering each group's rows: the published definition, without its double dropout.

    >>> import torch
    >>> DilatedAttention([4, 8], [1, 2])(*[torch.randn(1, 16, 2, 8)] * 3).shape
    torch.Size([1, 16, 2, 8])
    """

    gather = True


class ImprovedDilatedAttention(PublishedAttention):
    """The same function through strided views. (The original attended over the heads of each position.)

    >>> import torch
    >>> q = torch.randn(1, 16, 2, 8); a, b = DilatedAttention([4, 8], [1, 2]), ImprovedDilatedAttention([4, 8], [1, 2])
    >>> torch.allclose(a(q, q, q), b(q, q, q), atol=1e-6)
    True
    """


class RingDilatedAttentionV2(PublishedAttention):
    """The ring simulated on one device, any ``ring_size``: K/V shards hop from rank to rank.

    >>> import torch
    >>> q = torch.randn(1, 16, 2, 8); a, b = (RingDilatedAttentionV2([8, 16], [1, 2], ring_size=p) for p in (1, 4))
    >>> torch.allclose(a(q, q, q), b(q, q, q), atol=1e-6)
    True
    """

    scheme = "ring"


class RingDilatedAttentionV2Collective(PublishedAttention):
    """Every rank gathers K and V; on one device, as in document 000, there is nothing to gather and no ring code runs.

    >>> import torch
    >>> RingDilatedAttentionV2Collective([4, 8], [1, 2], dtype=torch.float32)(*[torch.randn(1, 16, 2, 8)] * 3).shape
    torch.Size([1, 16, 2, 8])
    """

    scheme = "all_gather"


class RingDilatedAttentionV2Robust(RingDilatedAttentionV2):
    """The ring by asynchronous point-to-point messages into buffers of their own; no ring code runs on one device."""


class RingDilatedAttentionV2Flash(RingDilatedAttentionV2):
    """Flash kernels first, then xformers, SDPA, standard; dtype chosen by the hardware policy, an explicit one wins.

    >>> RingDilatedAttentionV2Flash([4, 8], [1, 2], device="cpu").dtype
    torch.float32
    """

    backend = FLASH + FALLBACK
    auto_dtype = True


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """The ring with gradient checkpointing and the memory pool, unless said otherwise, and with smaller tiles where
    memory runs out.

    >>> RingDilatedAttentionProduction([4, 8], [1, 2], use_gradient_checkpointing=False).execution.tile
    Ladder((2048, 512, 128), level=0)
    """

    def __init__(self, segment_lengths, dilation_rates, ring_size: int | None = None, **options):
        defaults = {"use_gradient_checkpointing": True, "enable_memory_pool": True}
        super().__init__(segment_lengths, dilation_rates, ring_size, **defaults | options)
        self.execution = replace(self.execution, tile=Ladder())

    def agree(self) -> None:
        """Let all ranks take the smallest tile that one has come to; call it on every rank, between two steps."""
        if self.group is not None and not isinstance(self.group, Simulated):
            self.execution.tile.agree(self.group)


class RingDilatedAttentionHybrid(RingDilatedAttentionV2):
    """Ring hops with segment-wise dilation inside each hop, accumulated by log-sum-exp."""


class RingDilatedAttentionSDPA(RingDilatedAttentionV2):
    """The ring on torch's own SDPA kernels alone."""

    backend = "sdpa"


class RingDilatedAttentionCorrect(RingDilatedAttentionV2):
    """The ring on the plain eager kernel, with the right split of the sequence: the reference of the ring systems."""

    backend = "eager"


class RingDilatedAttentionHilbertGPUOptimized(PublishedAttention):
    """The pattern along a Hilbert curve over the most nearly square grid whose cells are the sequence, row by row.

    On one device, or a ``ring_size`` simulated on it. Raises ValueError for ``is_causal=True``: steps of the curve are
    not in time order.

    >>> import torch
    >>> RingDilatedAttentionHilbertGPUOptimized([4, 8], [1, 2], ring_size=2)(*[torch.randn(1, 16, 2, 8)] * 3).shape
    torch.Size([1, 16, 2, 8])
    """

    scheme = "plan"

    def _ranks(self, rows: int) -> dict:
        if self.group is not None and not isinstance(self.group, Simulated):
            raise NotImplementedError(f"{type(self).__name__} takes ring_size: over a group, pass attention a layout")
        height = max(h for h in range(1, isqrt(rows) + 1) if rows % h == 0)
        group = self.group or Simulated(1)
        return {"group": group, "scheme": self.scheme, "layout": ring.hilbert(height, rows // height, group.ranks)}
