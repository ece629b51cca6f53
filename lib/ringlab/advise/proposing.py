"""Patterns to propose for a length."""

from __future__ import annotations

from ..blocks import local_global, sliding_window
from ..patterns import BlockSparse, Dense, Dilated, Pattern

PAPER = 2048  # LongNet's first segment (Ding et al. 2023, arXiv 2307.02486)
BLOCK, MOST_BLOCKS = 128, 4096  # positions of a block, and larger ones where there would be more of them


def ladder(seq_len: int, first: int = PAPER) -> Pattern:
    """LongNet's ladder up to the sequence: segments first, 2 first, ... at rates 1, 2, ...; dense where one holds all.

    >>> str(ladder(10000)), str(ladder(2048))
    ('dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 8]', 'dense')
    """
    steps = max(0, (-(-seq_len // first) - 1).bit_length())
    return Dilated([first << i for i in range(steps + 1)], [1 << i for i in range(steps + 1)]) if steps else Dense()


def local(seq_len: int, ranks: int = 1, width: int = PAPER) -> BlockSparse:
    """A sliding window of about ``width`` positions; on one rank a global block too, which needs rows of everyone's.

    >>> str(local(10000)), str(local(10000, ranks=2))
    ('blocks of 128: window 8, 1 global', 'blocks of 128: window 8')
    """
    block = min(max(BLOCK, 1 << (seq_len // MOST_BLOCKS).bit_length()), seq_len, width // 2)
    before = max(1, width // (2 * block))
    return local_global(before, 1, block_size=block) if ranks == 1 else sliding_window(before, block_size=block)
