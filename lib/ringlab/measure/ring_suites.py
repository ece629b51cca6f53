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
LARGE_MEMORY = 16e9  # bytes; from here on a GPU takes longer sequences


def benchmark_summary(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 001: throughput and memory per rank over n and p, of the systems that it tested.

    ``throughput``: on one rank, two and four; ``simulated``: eight in one process, which has no memory of a rank to
    show. Four are timed where each has a core or GPU of its own; all rows of a group have the same threads a rank.
    """
    first = Point(SDPA, DOCUMENT)
    ns = _lengths(rehearsal, 2048, 4096, 8192, 16384)
    points = [first.but(seq_len=n, world_size=p) for n in ns for p in (1, 2, 4)]
    points += [first.but(system=CORRECT, seq_len=ns[1], world_size=p) for p in (1, 2)]
    points += [first.but(system=HILBERT, seq_len=ns[1]), first.but(system="dense_sdpa", pattern=Dense(), seq_len=ns[1])]
    points += [first.but(seq_len=ns[1], world_size=p, options=TWIN) for p in (1, 2)]
    return [
        Group("throughput", tuple(points)),
        Group("simulated", (first.but(seq_len=ns[-1], options={"simulated": 8}),), timed=False),
    ]


def performance_comparison(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 003: gathering against the ring against the plan; time, memory and bytes.

    ``one device``: its tables, where no ring code runs; ``schemes``: two ranks and four whose segments reach over the
    border.
    """
    first = Point(COLLECTIVE, LONG)
    one = [first.but(system=system, seq_len=n) for n in (1024, 2048, 4096) for system in (COLLECTIVE, ROBUST)]
    one += [p.but(causal=True) for p in one[-2:]]
    one += [one[-3].but(options=TWIN)]

    def schemes(n: int, ranks: int) -> list[Point]:
        point = first.but(seq_len=n, world_size=ranks)
        return [point, point.but(system=ROBUST), point.but(system="ringlab", options={"scheme": "plan"})]

    several = [p for n in (1024, 2048, 4096) for p in schemes(n, 2)]
    several += [p.but(causal=True) for p in several[-3:]]
    several += [several[-1].but(options=dict(several[-1].options) | TWIN), *schemes(4096, 4)]
    return [Group("one device", tuple(one)), Group("schemes", tuple(several))]


def hybrid_summary(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """Document 004: the hybrid over n and p.

    ``hybrid``: its table on one rank, two and four; ``long``: what 32K and 64K hold on several ranks, untimed.
    """
    first = Point(HYBRID, DOCUMENT, world_size=2)
    ns = _lengths(rehearsal, 1024, 2048, 4096, 8192, 16384)
    points = [first.but(seq_len=n) for n in ns]
    points += [first.but(seq_len=n, world_size=p) for n, p in ((ns[0], 1), (ns[-1], 1), (ns[-1], 4))]
    groups = [Group("hybrid", (*points, first.but(seq_len=ns[0], options=TWIN)))]
    if not rehearsal:
        long = [first.but(seq_len=n, world_size=p) for n, p in ((32768, 2), (32768, 4), (65536, 2))]
        groups.append(Group("long", tuple(long), timed=False))
    return groups


def own_dtype(profile: hardware.Profile) -> str:
    """What the profile's policy chooses."""
    return str(profile.default_dtype()).removeprefix("torch.")


def half_dtype(profile: hardware.Profile, device: str) -> str:
    """The half precision to use: the profile's own, bfloat16 on a CPU, else float16."""
    own = own_dtype(profile)
    return "bfloat16" if device == "cpu" else own if own != "float32" else "float16"


def _lengths(rehearsal: bool, *lengths: int) -> list[int]:
    return [n for n in lengths if not rehearsal or n <= SHORTEST]


SUITES: dict[str, Callable[..., list[Group]]] = {
    "benchmark_summary": benchmark_summary,
    "performance_comparison": performance_comparison,
    "hybrid_summary": hybrid_summary,
}
