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
COLLECTIVE, ROBUST, HYBRID = (
    f"RingDilatedAttention{name}" for name in ("V2Collective", "V2Robust", "Hybrid")
)
SHORTEST = 4096  # a rehearsal goes no further


def benchmark_summary(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 001: throughput and memory per rank over n and p, of the systems that it tested.

    ``throughput``: on one rank and two; ``ranks``: four, where a GPU or core is there for each; ``simulated``: eight in
    one process, for what one rank's share comes to.
    """
    first = Point(SDPA, DOCUMENT)
    ns = _lengths(rehearsal, 2048, 4096, 8192, 16384)
    timed = [first.but(seq_len=n, world_size=p) for n in ns for p in (1, 2)]
    timed += [first.but(system=CORRECT, seq_len=ns[1], world_size=p) for p in (1, 2)]
    timed += [first.but(system=system, seq_len=ns[1]) for system in (HILBERT, "dense_sdpa")]
    timed[-1] = timed[-1].but(pattern=Dense())
    wide = [first.but(seq_len=n, world_size=4) for n in ns]
    simulated = [first.but(seq_len=n, options={"simulated": 8}) for n in ns[-1:]]
    return [
        Group("throughput", tuple(timed)),
        Group("ranks", tuple(wide), interleave=False),
        Group("simulated", tuple(simulated), timed=False),
    ]


def performance_comparison(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 003: gathering against the ring against the plan; time, memory and bytes.

    ``one device``: its table, where no ring code runs; ``schemes``: two ranks whose segments reach over the border.
    """
    first = Point(COLLECTIVE, LONG)
    one = [first.but(system=system, seq_len=4096, causal=causal)
           for system in (COLLECTIVE, ROBUST) for causal in (False, True)]  # fmt: skip
    schemes = []
    for n in (1024, 2048, 4096):
        point = first.but(seq_len=n, world_size=2)
        plan = point.but(system="ringlab", options={"scheme": "plan"})
        schemes += [point, point.but(system=ROBUST), plan]
    schemes += [p.but(causal=True) for p in schemes[-3:]]
    return [Group("one device", tuple(one)), Group("schemes", tuple(schemes))]


def hybrid_summary(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 004: the hybrid over n and p.

    ``hybrid``: its table on one rank and two; ``long``: what 32K and 64K hold on two ranks and four, untimed.
    """
    first = Point(HYBRID, DOCUMENT, world_size=2)
    ns = _lengths(rehearsal, 1024, 2048, 4096, 8192, 16384)
    timed = [first.but(seq_len=n) for n in ns] + [first.but(seq_len=n, world_size=1) for n in (ns[0], ns[-1])]
    groups = [Group("hybrid", tuple(timed))]
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
