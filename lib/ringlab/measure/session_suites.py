"""The points of document 002, on block-sparse attention: its table, what each step is worth, how near to the work
itself, over length to extreme lengths, and one row for each pattern.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import blocks, hardware
from ..patterns import BlockSparse, Dense
from .points import Group, Point
from .ring_suites import LARGE_MEMORY, SHORTEST, TWIN, own_dtype

TABLE, JOURNEY, EFFICIENCY = "block sparse table", "journey", "efficiency"
LENGTHS, EXTREME, PATTERNS, REUSE = "window lengths", "extreme lengths", "block patterns", "reuse"
ORIGINAL, OPTIMIZED = "BlockSparseRingDilatedAttention", "BlockSparseOptimized"
TORCH_SPARSE = "BlockSparseTorchSparse"

TOKENS = 4096  # the document's: batch 1, 8 heads of 64, blocks of 64 and a window of 256 positions, two blocks each way
WINDOW = blocks.sliding_window(2, block_size=64)
LONG_TOKENS = 16384
FAR = blocks.sliding_window(2, block_size=128)
EXTREME_TOKENS = (65536, 131072, 262144)
WAYS = ("rows", "batched", "views")  # of execution, as the document's journey goes
FRESH = {"results": False}
ADAPTIVE = {"block_size": 64, "top_k": 5}  # as many blocks as the window shows
LOOKED_UP = 2048  # the longest of the lengths whose patterns are looked up
CACHES_MB = (0, 0.25, 1, 64)  # the last is the library's own; with 0 nothing is kept
SCRATCH_MB, THREADS = (1, 4, 16, 64), (1, 2)


def session_summary(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """The points of document 002 for a profile, about three minutes on two CPU cores.

    ``block sparse table``: its table and dense attention. ``journey``: what building the calls costs, cold and warm,
    and what each step is worth. ``efficiency``: how near a call comes to dense time times density, beside torch's
    compiled FlexAttention on the same masks. ``window lengths``: from which n on the pattern pays. ``extreme
    lengths``: the lengths of its headlines, each alone. ``block patterns``: density, time and error of each kind, and
    of blocks chosen by content. ``reuse``: a cache by its bytes where many patterns are looked up, and a pool beside
    fresh memory by size and threads. A rehearsal leaves out what is long.
    """
    dtype = own_dtype(profile) if device == "cuda" else "float32"
    groups = [table(dtype), journey(dtype), lengths(profile, device, dtype, rehearsal), patterns(dtype)]
    if not rehearsal:
        groups += [efficiency(profile, device, dtype), extreme(device, dtype), reuse()]
    return groups


def table(dtype: str) -> Group:
    """The document's rows; torch's sparse tensors know float32 alone, and where others have another dtype they stand
    beside it in float32 too.
    """
    ours = Point("ringlab", WINDOW, seq_len=TOKENS, dtype=dtype)
    published = [ours.but(system=system) for system in (ORIGINAL, OPTIMIZED)]
    points = [*published, ours, ours.but(options=TWIN)]
    points.append(ours.but(system="dense_sdpa", pattern=Dense()))
    points.append(ours.but(system=TORCH_SPARSE, dtype="float32"))
    if dtype != "float32":
        points += [p.but(dtype="float32") for p in (published[1], ours)]
    return Group(TABLE, tuple(points))


def journey(dtype: str) -> Group:
    """Calls built and found, the three ways, and the cache off and on."""
    call = Point("ringlab", WINDOW, seq_len=TOKENS, dtype=dtype)
    built = [call.but(system="plan_build", options={"blocks": way, "warm": warm}) for way in WAYS
             for warm in (False, True)]  # fmt: skip
    ways = [call.but(options={"blocks": way}) for way in WAYS]
    off = [call.but(options={"blocks": way, "cache": False}) for way in ("rows", "views")]
    return Group(JOURNEY, (*built, *ways, *off, call.but(options={"blocks": "views"} | TWIN)))


def efficiency(profile: hardware.Profile, device: str, dtype: str) -> Group:
    """Local and global blocks at about a tenth of all pairs; dense attention, and torch's kernel for the same mask.

    On a CPU once more with results in fresh memory, which shows what their page faults cost.

    It takes seconds for the dense call there, and its pace changes meanwhile: three rounds tell little, and one call
    of half a second beside it too.
    """
    times = 4 if device == "cuda" and (profile.memory_bytes or 0) > LARGE_MEMORY else 1
    long = Point("ringlab", local_global(128, times), seq_len=times * LONG_TOKENS, dtype=dtype)
    masks = (long, long.but(pattern=local_global(64, times)))
    points = [*masks, long.but(causal=True), long.but(passes="fwd+bwd")]
    if device == "cpu":
        points.append(long.but(options=FRESH))
    dense = long.but(system="dense_sdpa", pattern=Dense())
    points += [dense, *([dense.but(passes="fwd+bwd")] if device == "cuda" else [])]  # a CPU takes a minute for it
    points.append(long.but(system="flex"))  # compiling it takes as long as all else
    return Group(EFFICIENCY, tuple(points), rounds=6, sample_s=1.0 if device == "cpu" else 0.0)


def local_global(block_size: int, times: int = 1) -> BlockSparse:
    """A window and global blocks whose density at ``times`` 16,384 positions is about a tenth."""
    some = 128 // block_size * times
    return blocks.local_global(2 * some, 4 * some, block_size=block_size)


def lengths(profile: hardware.Profile, device: str, dtype: str, rehearsal: bool = False) -> Group:
    """A fixed window over growing n beside dense attention, and the document's two rows at a long n."""
    large = (profile.memory_bytes or 0) > LARGE_MEMORY
    longest = SHORTEST if rehearsal else LONG_TOKENS if device == "cpu" else 65536 if large else 32768
    dense_to = SHORTEST if device == "cpu" else longest
    ours = Point("ringlab", WINDOW, dtype=dtype)
    ns = [2**i for i in range(10, 20) if 2**i <= longest]
    points = [ours.but(seq_len=n) for n in ns]
    points += [ours.but(seq_len=n, system="dense_sdpa", pattern=Dense()) for n in ns if n <= dense_to]
    if longest > SHORTEST:
        far = longest // 2 if device == "cpu" else longest
        points += [ours.but(seq_len=far, system=system) for system in (ORIGINAL, OPTIMIZED)]
    return Group(LENGTHS, tuple(points))


def extreme(device: str, dtype: str) -> Group:
    """What the headlines are about, one after the other: each has the machine's memory to itself.

    A CPU takes one head of the eight: all of them are alike, and it would spend minutes on them.
    """
    heads = 1 if device == "cpu" else 8
    points = [Point("ringlab", FAR, seq_len=n, heads=heads, dtype=dtype) for n in EXTREME_TOKENS]
    return Group(EXTREME, tuple(points), interleave=False)


def patterns(dtype: str) -> Group:
    """One row for each kind of pattern, and one for blocks chosen by content."""
    point = Point("ringlab", WINDOW, seq_len=TOKENS, dtype=dtype)
    chosen = point.but(system="adaptive", pattern=Dense(), options=ADAPTIVE)
    return Group(PATTERNS, (*(point.but(pattern=pattern) for pattern in KINDS.values()), chosen))


def reuse() -> Group:
    """Lookups of many patterns by what the cache may hold, and scratch from a pool and without it."""
    lookup = Point("cache_workload", WINDOW, seq_len=LOOKED_UP)
    points = [lookup.but(options={"max_mb": mb, "blocks": "batched"}) for mb in CACHES_MB]
    points.append(lookup.but(options={"max_mb": CACHES_MB[-1], "blocks": "views"}))
    scratch = Point("pool_workload", Dense(), seq_len=1)
    points += [scratch.but(options={"size_mb": mb, "threads": threads, "pool": pool})
               for mb in SCRATCH_MB for threads in THREADS for pool in (False, True)]  # fmt: skip
    return Group(REUSE, tuple(points))


KINDS: dict[str, BlockSparse] = {
    "window": WINDOW,
    "strided": BlockSparse([blocks.Window(1), blocks.Strided(8)], 64),
    "local and global": blocks.local_global(1, 2, block_size=64),
    "BigBird": blocks.bigbird(1, 2, 3, block_size=64),
    "hierarchical": blocks.hierarchical([(1, 2), (8, 32)], block_size=64),
}
SUITES: dict[str, Callable[..., list[Group]]] = {"session_summary": session_summary}
