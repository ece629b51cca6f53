"""The points of the landscape: the field's attention functions, at a like number of keys for each query, on one page.

All take turns in one group. Dense attention sees every key; a query of the sparse ones 270 to 450 of them on average,
whatever the length, so that they differ in which keys they see and less in how many.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import blocks, hardware
from ..patterns import Dense, Dilated
from . import peers
from .points import Group, Point
from .ring_suites import LARGE_MEMORY, SHORTEST, TWIN, own_dtype

LANDSCAPE, CHECKS = "landscape", "landscape checks"
BLOCK = 64
WINDOW = blocks.sliding_window(2, block_size=BLOCK)  # five blocks: 320 keys
BIGBIRD = blocks.bigbird(1, 1, 1, block_size=BLOCK)  # three, a global and a random one
LOCAL_GLOBAL = blocks.local_global(1, 2, block_size=BLOCK)  # three and two global ones
KEPT = 256  # rows that each branch of ``ladder`` keeps of a segment, as LongNet's do


def ladder(seq_len: int, **how) -> Dilated:
    """LongNet's geometric ladder up to the whole sequence: segments of 256 x 4^i at rate 4^i, each keeping 256 rows.

    >>> str(ladder(16384))
    'dilated [256, 1024, 4096, 16384] / [1, 4, 16, 64]'
    """
    rates = [4**i for i in range(20) if KEPT * 4**i <= seq_len] or [1]
    return Dilated([KEPT * r for r in rates], rates, **how)


def landscape(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """The field on one page, under 45 seconds on two CPU cores.

    ``landscape``: each system over three lengths, forward; dense attention not where it takes a second, FlexAttention
    at the longest, for compiling it takes ten. ``landscape checks``: gradients at the shortest, untimed. A package of
    others that is installed stands in both, with its version, and causal too; one that is not, once, to be listed as
    absent.
    """
    dtype = own_dtype(profile) if device == "cuda" else "float32"
    large = (profile.memory_bytes or 0) > LARGE_MEMORY
    ns = [1024, 4096, 8192] if device == "cpu" else [4096, 16384, 65536]
    ns = [n for n in ns if not rehearsal or n <= SHORTEST]
    dense_to = SHORTEST if device == "cpu" else ns[-1] if large else ns[-2]
    dense = Point("dense_sdpa", Dense(), dtype=dtype)
    ours = [Point("ringlab", pattern, dtype=dtype) for pattern in (WINDOW, BIGBIRD, LOCAL_GLOBAL)]
    points = [dense.but(seq_len=n) for n in ns if n <= dense_to]
    for n in ns:
        points += [p.but(seq_len=n) for p in ours] + [ours[0].but(seq_len=n, pattern=ladder(n))]
    points.append(ours[0].but(seq_len=ns[0], options=TWIN))
    if not rehearsal:
        # Its mask is made from all pairs, 4 GiB of them at 65,536.
        points.append(ours[2].but(system="flex", seq_len=ns[-1] if device == "cpu" or large else ns[-2]))
    for name, pattern in PEERS.items():
        points += _peer(name, pattern, dtype, [n for n in ns if name != "ring_attention_pytorch" or n <= dense_to])
    return [Group(LANDSCAPE, tuple(dict.fromkeys(points))), checks(points, ns[0])]


def _peer(name: str, pattern: Callable, dtype: str, ns: list[int]) -> list[Point]:
    """A package's points with its version, and this library on the same function; one point where it is absent."""
    version = peers.installed(name)
    if version is None:
        return [Point(name, pattern(ns[0]), seq_len=ns[0], dtype=dtype)]
    theirs = [Point(name, pattern(n), seq_len=n, dtype=dtype, options={"version": version}) for n in ns]
    return theirs + [p.but(system="ringlab", options={}) for p in theirs if p.pattern["kind"] == "dilated"]


PEERS: dict[str, Callable[[int], Dilated | Dense]] = {  # what each says it computes, by sequence length
    "dilated_attention_pytorch": lambda n: ladder(n, mixing="head_groups", offsets="branch"),
    "torchscale_dilated": lambda n: ladder(n, offsets="block"),
    "ring_attention_pytorch": lambda n: Dense(),
}


def checks(points: list[Point], seq_len: int) -> Group:
    """Forward and backward of each system at one length, those of others causal too; FlexAttention has no backward."""
    there = [p for p in points if p.seq_len == seq_len and p.system != "flex" and not dict(p.options).get("twin")]
    there = [p.but(passes="fwd+bwd") for p in there if p.system not in PEERS or p.options]
    causal = [p.but(causal=True) for p in there if p.system in PEERS]
    return Group(CHECKS, tuple(dict.fromkeys([*there, *causal])), timed=False)


SUITES: dict[str, Callable[..., list[Group]]] = {"landscape": landscape}
