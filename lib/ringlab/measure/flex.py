"""torch's FlexAttention on a pattern's own mask, compiled: what a block-sparse pattern is compared with."""

from __future__ import annotations

import torch

from .. import flex as compiled
from .. import patterns
from .contract import System, only
from .points import Point


def flex(point: Point, device) -> System:
    """The kernel that ``Execution(blocks="flex")`` calls, without the lse that views make for it; forward alone.

    Compiled, and the mask built, before anything is timed; its tracked memory lacks what it holds inside. Raises
    NotImplementedError where it cannot run.
    """
    only(point)
    pattern = patterns.from_dict(point.pattern)
    if not isinstance(pattern, patterns.BlockSparse):
        raise ValueError(f"flex computes block-sparse patterns, not {pattern}")
    if point.passes != "fwd":
        raise NotImplementedError("flex is measured forward alone: its backward is that of views")
    system = System(point, device, lambda q, k, v: compiled.forward(q, k, v, mask, point.head_dim**-0.5))
    why = compiled.refusal(device, system.dtype, point.head_dim)
    if why:
        raise NotImplementedError(f"FlexAttention {why}")
    mask = compiled.prepare(pattern, point.seq_len, point.causal, device)
    system.run([torch.zeros(shape, dtype=system.dtype, device=device) for shape in system.shapes()])  # compiles
    return system
