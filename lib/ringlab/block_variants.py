"""The published block-sparse systems: the published arguments over one engine, equal in value."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .blocks import BlockSparse, Segment, sliding_window
from .checks import LARGEST, flag, positive, positive_ints, shown
from .published import PublishedAttention
from .ring import Simulated, group_size


class BlockSparseRingDilatedAttention(PublishedAttention):
    """Block-sparse attention, a call for each block of queries: the published definition, with one softmax per row.

    Takes one of: ``segment_lengths`` and ``dilation_rates``, which then dilate blocks (each length a multiple of
    ``block_size``, each rate in blocks); ``density`` in (0, 1], for which the window of blocks is solved that comes
    nearest, at each sequence length; or ``pattern``, a ``ringlab.BlockSparse``. ``block_size`` is 128 unless said.
    Raises ValueError for none or several of them and for lengths that are no multiple.

    >>> import torch
    >>> q = torch.randn(1, 64, 2, 8); a = BlockSparseRingDilatedAttention([32], [2], block_size=8)
    >>> torch.allclose(a(q, q, q), BlockSparseOptimized([32], [2], block_size=8)(q, q, q), atol=1e-6)
    True
    """

    blocks = "rows"
    scheme = "plan"

    def __init__(self, segment_lengths=None, dilation_rates=None, ring_size=None, *, pattern=None, **options):
        self.given = pattern
        super().__init__(segment_lengths, dilation_rates, ring_size, **options)
        if self.auto is None:
            self.execution = replace(self.execution, blocks=self.blocks)

    def _made_pattern(self, segment_lengths, dilation_rates, block_size, density):
        name = type(self).__name__
        segments = segment_lengths is not None or dilation_rates is not None
        if segments + (density is not None) + (self.given is not None) != 1:
            raise ValueError(f"{name} takes segment_lengths and dilation_rates, or density, or pattern: one of them")
        self.density, size = density, positive("block_size", 128 if block_size is None else block_size, most=LARGEST)
        if self.given is not None:
            if not isinstance(self.given, BlockSparse):
                raise ValueError(f"{name}: pattern must be a BlockSparse, got {shown(self.given)}")
            if block_size is not None:
                raise ValueError(f"{name}: the pattern has its own block size, {self.given.block_size}")
            return self.given
        if density is not None:
            window = sliding_window(0, block_size=size)
            window.with_density(density, size)  # raises what is wrong with it now, not at the first call
            return window
        lengths = positive_ints("segment_lengths", segment_lengths)
        rates = positive_ints("dilation_rates", dilation_rates)
        if len(lengths) != len(rates):
            raise ValueError(f"segment_lengths and dilation_rates differ in length: {len(lengths)} and {len(rates)}")
        for length in lengths:
            if length % size:
                raise ValueError(f"{name}: segment length {length} is no multiple of the block size {size}")
        return BlockSparse([Segment(w // size, r) for w, r in zip(lengths, rates)], size)

    def pattern_for(self, n: int, causal: bool = False) -> BlockSparse:
        """The pattern over ``n`` positions: the one given, or the window whose density is nearest to that asked for."""
        positive("n", n, most=LARGEST)
        flag("causal", causal)
        return self.pattern if self.density is None else _solved(self.pattern, self.density, n, causal)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.density is None else f", density={self.density}")

    def _attend(self, q, k, v, is_causal):
        shards = 1 if self.group is None or isinstance(self.group, Simulated) else group_size(self.group)
        return self._attend_to(self.pattern_for(q.shape[1] * shards, is_causal), q, k, v, is_causal)


class BlockSparseOptimized(BlockSparseRingDilatedAttention):
    """The same with the blocks of all rows that see equally many copied together, a call for each such number."""

    blocks = "batched"


class BlockSparseTorchSparse(BlockSparseRingDilatedAttention):
    """The same with the probabilities in a ``torch.sparse`` BSR tensor, in float32 or float64."""

    blocks = "bsr"


@lru_cache(maxsize=64)
def _solved(pattern: BlockSparse, density: float, n: int, causal: bool) -> BlockSparse:
    return pattern.with_density(density, n, causal)
