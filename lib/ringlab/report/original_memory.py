"""What the original code allocated, by reading its source, and what it comes to: the published memory, explained.

Document 001 measured peak - before around a forward call: inputs and weights are not in it. Document 003 states the
tables of a dense n x n attention in which no ring code runs. MB in both are 2^20 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
CUBLAS = 8.125 * MIB  # workspace that the first matrix product of a process allocates
SEGMENTS = {2048: ([512, 1024], [1, 2])}  # of the script of document 001; longer ones: n/8, n/4, n/2 at 1, 2, 4


@dataclass(frozen=True)
class Allocation:
    """Bytes by what they were for, all alive at the peak."""

    parts: dict[str, float]

    @property
    def mb(self) -> float:
        """Their sum, as printed.

        >>> Allocation({"a": 2**20, "b": 2**19}).mb
        1.5
        """
        return sum(self.parts.values()) / MIB


def scaling(seq_len: int, ranks: int, *, batch: int = 2, heads: int = 8, head_dim: int = 64) -> Allocation:
    """One rank of ``RingDilatedAttentionSDPA`` (document 001) in fp32, while it averages its branches.

    >>> round(scaling(2048, 1).mb, 2), round(scaling(32768, 2).mb, 2)
    (86.01, 816.03)
    """
    default = [seq_len // 8, seq_len // 4, seq_len // 2], [1, 2, 4]
    lengths, rates = SEGMENTS.get(seq_len, default)
    rows = seq_len // ranks
    unit = 4 * batch * rows * heads * head_dim  # one activation of a rank
    ran = [(w, r) for w, r in zip(lengths, rates) if w <= rows]  # longer segments are dropped
    selected = min(ran[-1][0], rows // ran[-1][1])  # rows of the last branch, counted as the source does
    return Allocation({
        "the rank's part of the input": unit if ranks > 1 else 0,
        "q, k and v": 3 * unit,
        "each branch's output at full length": len(ran) * unit,
        "the same, stacked": len(ran) * unit,
        "their mean": unit,
        "q, k, v and output of the last branch": 4 * unit * selected / rows,
        "zeros that padded the first branch": unit * (rows - ran[0][0]) / rows,
        "positions": 8 * selected,
    })  # fmt: skip


def robust(seq_len: int, heads: int, *, causal: bool = False, counted: int = 0, head_dim: int = 64) -> Allocation:
    """``RingDilatedAttentionV2Robust`` (document 003) on one GPU, batch 1, fp32: scores and their softmax, n x n.

    ``counted``: tensors of q's size outside of the call that the measurement included, as inputs and an earlier result.

    >>> robust(4096, 4).mb, robust(4096, 8, causal=True, counted=4).mb
    (532.125, 1104.125)
    """
    rows = 4 * seq_len * heads * head_dim
    return Allocation({
        "scores": 4 * heads * seq_len**2,
        "their softmax": 4 * heads * seq_len**2,
        "mask": seq_len**2 if causal else 0,
        "k and v, dilated at full length, and the output": 3 * rows,
        "tensors outside of the call": counted * rows,
        "cuBLAS": CUBLAS,
    })  # fmt: skip
