"""Dilated, ring and block-sparse attention that equals one float64 reference.

``attention`` is the function. ``Dense``, ``Dilated`` and ``ringlab.blocks`` are its
patterns, ``Simulated`` and ``ringlab.ring`` are for several ranks, ``KVCache`` is for
generation, ``ringlab.nn`` has layers. ``advise``, ``estimate`` and ``longest`` tell
what a call needs before it runs.

>>> import torch
>>> q = torch.randn(1, 64, 4, 16)
>>> attention(q, q, q, Dilated([16, 32], [1, 2])).shape
torch.Size([1, 64, 4, 16])
"""

from . import blocks, kernels, nn, reference, ring, selection
from .adaptive import Adaptive, AdaptiveBlockSparse, adaptive_attention
from .advise import Advice, Evidence, advise
from .attention import attention
from .block_patterns import BlockSparse
from .compat import (
    BlockSparseOptimized,
    BlockSparseRingDilatedAttention,
    BlockSparseTorchSparse,
    DilatedAttention,
    ImprovedDilatedAttention,
    RingDilatedAttentionCorrect,
    RingDilatedAttentionHilbertGPUOptimized,
    RingDilatedAttentionHybrid,
    RingDilatedAttentionProduction,
    RingDilatedAttentionSDPA,
    RingDilatedAttentionV2,
    RingDilatedAttentionV2Collective,
    RingDilatedAttentionV2Flash,
    RingDilatedAttentionV2Robust,
)
from .engine import Execution
from .engine.chunked import OOMBackoff
from .estimate import Estimate, estimate, longest
from .kv_cache import KVCache, cache_bytes
from .patterns import Dense, Dilated, Pattern
from .presets import ladder
from .ring import Simulated
from .selected import Selected

__version__ = "0.1.0"
__all__ = [
    "Adaptive",
    "AdaptiveBlockSparse",
    "Advice",
    "BlockSparse",
    "BlockSparseOptimized",
    "BlockSparseRingDilatedAttention",
    "BlockSparseTorchSparse",
    "Dense",
    "Dilated",
    "DilatedAttention",
    "Estimate",
    "Evidence",
    "Execution",
    "KVCache",
    "ImprovedDilatedAttention",
    "OOMBackoff",
    "Pattern",
    "RingDilatedAttentionCorrect",
    "RingDilatedAttentionHilbertGPUOptimized",
    "RingDilatedAttentionHybrid",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionSDPA",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2Flash",
    "RingDilatedAttentionV2Robust",
    "Selected",
    "Simulated",
    "adaptive_attention",
    "advise",
    "attention",
    "blocks",
    "cache_bytes",
    "estimate",
    "kernels",
    "ladder",
    "longest",
    "nn",
    "reference",
    "ring",
    "selection",
]
