"""The points of the three documents on ring attention: published systems by rank and length, float32 as they have it.

With segments of 512 and 1024 a shard of 1024 rows or more needs nothing from others, and the plan and the ring move
nothing; ``LONG`` reaches over a border. Rows on more ranks than the machine has cores have memory and bytes, no time.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import hardware
from ..patterns import Dense, Dilated
from .points import Group, Point

DOCUMENT = Dilated([512, 1024], [1, 2], mixing="head_groups", offsets="branch")
LONG = Dilated([2048, 4096], [1, 2], mixing="head_groups", offsets="branch")
SDPA, CORRECT = "RingDilatedAttentionSDPA", "RingDilatedAttentionCorrect"
HILBERT = "RingDilatedAttentionHilbertGPUOptimized"
COLLECTIVE, ROBUST, HYBRID = (f"RingDilatedAttention{name}" for name in ("V2Collective", "V2Robust", "Hybrid"))
TWIN = {"twin": True}  # the same work once more
SHORTEST = 4096  # a rehearsal goes no further


def benchmark_summary(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 001: throughput and memory per rank over n and p, of the systems that it tested.

    ``throughput``: on one rank and two; ``four ranks``: four, timed where a core or GPU is there for each;
    ``simulated``: eight in one process, which has no memory of a rank to show.
    """
    first = Point(SDPA, DOCUMENT)
    ns = _lengths(rehearsal, 2048, 4096, 8192, 16384)
    timed = [first.but(seq_len=n, world_size=p) for n in ns for p in (1, 2)]
    timed += [first.but(system=CORRECT, seq_len=ns[1], world_size=p) for p in (1, 2)]
    timed += [first.but(system=HILBERT, seq_len=ns[1]), first.but(system="dense_sdpa", pattern=Dense(), seq_len=ns[1])]
    timed += [first.but(seq_len=ns[1], world_size=p, options=TWIN) for p in (1, 2)]
    wide = [first.but(seq_len=n, world_size=4) for n in ns]
    return [
        Group("throughput", tuple(timed)),
        Group("four ranks", tuple(wide), interleave=False),
        Group("simulated", (first.but(seq_len=ns[-1], options={"simulated": 8}),), timed=False),
    ]


def performance_comparison(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 003: gathering against the ring against the plan; time, memory and bytes.

    ``one device``: its tables, where no ring code runs; ``schemes``: two ranks whose segments reach over the border;
    ``schemes on four``: what a rank of four holds and sends.
    """
    first = Point(COLLECTIVE, LONG)
    one = [first.but(system=system, seq_len=n) for n in (1024, 2048, 4096) for system in (COLLECTIVE, ROBUST)]
    one += [p.but(causal=True) for p in one[-2:]]
    one += [one[-3].but(options=TWIN), first.but(system="dense_sdpa", pattern=Dense(), seq_len=4096)]

    def schemes(n: int, ranks: int) -> list[Point]:
        point = first.but(seq_len=n, world_size=ranks)
        return [point, point.but(system=ROBUST), point.but(system="ringlab", options={"scheme": "plan"})]

    two = [p for n in (1024, 2048, 4096) for p in schemes(n, 2)]
    two += [p.but(causal=True) for p in two[-3:]]
    two += [two[-1].but(options=dict(two[-1].options) | TWIN)]
    return [
        Group("one device", tuple(one)),
        Group("schemes", tuple(two)),
        Group("schemes on four", tuple(schemes(4096, 4)), timed=False),
    ]


def hybrid_summary(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 004: the hybrid over n and p.

    ``hybrid``: its table on one rank and two; ``long``: what 32K and 64K hold on several ranks, untimed.
    """
    first = Point(HYBRID, DOCUMENT, world_size=2)
    ns = _lengths(rehearsal, 1024, 2048, 4096, 8192, 16384)
    timed = [first.but(seq_len=n) for n in ns] + [first.but(seq_len=n, world_size=1) for n in (ns[0], ns[-1])]
    timed += [first.but(seq_len=ns[0], options=TWIN)]
    groups = [Group("hybrid", tuple(timed)),
              Group("hybrid on four", (first.but(seq_len=ns[-1], world_size=4),), timed=False)]  # fmt: skip
    if not rehearsal:
        long = [first.but(seq_len=n, world_size=p) for n, p in ((32768, 2), (32768, 4), (65536, 2))]
        groups.append(Group("long", tuple(long), timed=False))
    return groups


def _lengths(rehearsal: bool, *lengths: int) -> list[int]:
    return [n for n in lengths if not rehearsal or n <= SHORTEST]


SUITES: dict[str, Callable[..., list[Group]]] = {
    "benchmark_summary": benchmark_summary,
    "performance_comparison": performance_comparison,
    "hybrid_summary": hybrid_summary,
}
