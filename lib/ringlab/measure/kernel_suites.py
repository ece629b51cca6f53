"""The points of the kernels on a GPU: each way to run a pattern there, beside the fastest calls that do like work.

One shape throughout: 16 heads in the GPU's half precision, three branches that fold; all that is compared takes turns.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import hardware
from ..patterns import Dense, Dilated
from .points import Group, Point
from .ring_suites import TWIN, half_dtype
from .session_suites import local_global

RUNGS, LENGTHS, BLOCKS, MEMORY = "rungs", "rungs by length", "rungs on blocks", "rungs in memory"  # groups begin so
PATTERN = Dilated([2048, 4096, 8192], [1, 2, 4])
TOKENS, HEADS, HEAD_DIMS = 65536, 16, (128, 64)
LONGER = (262_144, 1_048_576)
MASK = local_global(128, 4)  # of 65,536 positions about a tenth of all pairs

# Each way of this library by the options of the system "ringlab"; the next one is one more row here and one in
# report/rungs.toml.
WAYS: dict[str, dict] = {
    "default": {},
    "lists": {"backend": "triton"},
    "fused": {"backend": "sdpa", "merge": "fused"},
    "strided": {"backend": "sdpa", "merge": "eager"},
}
PEERS = ("cudnn", "flash")  # torch's own kernels, on segments that lie contiguous already
PASSES: dict[str, dict] = {
    "forward": {},
    "forward and backward": {"passes": "fwd+bwd"},
    "causal": {"causal": True},
}


def kernels(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """The points for a GPU that is here, about four minutes on a data-centre GPU; none for a CPU or a rehearsal.

    ``rungs``: every way, the copying form and torch's kernels at 65,536 tokens, by head_dim and pass; dense attention
    beside the first. ``rungs by length``: from 16,384 tokens to a million, where the copying form is held against.
    ``rungs on blocks``: a tenth of all pairs in blocks of 128. ``rungs in memory``: the longest, forward and backward,
    each alone on the GPU.
    """
    if device == "cpu" or rehearsal:
        return []
    first = Point("ringlab", PATTERN, seq_len=TOKENS, heads=HEADS, head_dim=HEAD_DIMS[0],
                  dtype=half_dtype(profile, device))  # fmt: skip
    longer = [n for n in LONGER if _fits(first.but(seq_len=n), profile.memory_bytes)]
    groups = [rungs(first.but(head_dim=d, **how), name) for d in HEAD_DIMS for name, how in PASSES.items()]
    groups += [by_length(first.but(seq_len=n)) for n in (TOKENS // 4, *longer)]
    groups += [on_blocks(first.but(pattern=MASK, **PASSES[name]), name) for name in ("forward", "forward and backward")]
    training = first.but(seq_len=max(longer, default=TOKENS), passes="fwd+bwd")
    trained = (training, _way(training, "lists"), _way(training, "fused"))
    return [*groups, Group(MEMORY, trained, interleave=False)]


def rungs(point: Point, name: str) -> Group:
    """Every way and every peer on the shape and pass of a point."""
    points = [_way(point, way) for way in WAYS] + [point.but(system="copying")]
    points += [point.but(system="contiguous_segments", options={"backend": peer}) for peer in PEERS]
    if (point.head_dim, name) == (HEAD_DIMS[0], "forward"):
        points += [_dense(point), point.but(options=TWIN)]
    return Group(f"{RUNGS}, head_dim {point.head_dim}, {name}", tuple(points))


def by_length(point: Point) -> Group:
    """Every way but eager merges, and the copying form; dense attention where it takes less than a tenth of a second.

    A million tokens leave the copying form no room beside others: each has the GPU to itself.
    """
    points = [point, _way(point, "lists"), _way(point, "fused"), point.but(system="copying")]
    points += [_dense(point)] if point.seq_len <= TOKENS else []
    return Group(f"{LENGTHS}, {point.seq_len:,} tokens", tuple(points), interleave=point.seq_len < max(LONGER))


def on_blocks(point: Point, name: str) -> Group:
    """Two ways on a block-sparse pattern, dense attention, and torch's FlexAttention, which is compiled last."""
    points = [point, _way(point, "lists"), _dense(point)]
    points += [point.but(system="flex")] if point.passes == "fwd" else []
    return Group(f"{BLOCKS}, {name}", tuple(points))


def _way(point: Point, name: str) -> Point:
    return point.but(options=WAYS[name])


def _dense(point: Point) -> Point:
    return point.but(system="dense_sdpa", pattern=Dense())


def _fits(point: Point, memory_bytes: int | None) -> bool:
    """Room for q, k, v, out and their gradients twice: a timed call's results are held against the checked one's."""
    return 16 * 2 * point.seq_len * point.heads * point.head_dim <= (memory_bytes or 0)


SUITES: dict[str, Callable[..., list[Group]]] = {"kernels": kernels}
