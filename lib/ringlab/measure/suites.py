"""Which points answer which document. A suite is a function of a profile: every machine measures the same list."""

from __future__ import annotations

from collections.abc import Callable

from .. import hardware, kernels
from ..patterns import Dense, Dilated
from . import kernel_suites, landscape_suites, ring_suites, session_suites
from .points import Group, Point, sgemm
from .ring_suites import LARGE_MEMORY, TWIN, half_dtype, own_dtype

# Document 000: b = 1, h = 8, d = 64; head groups with offsets by branch is what its classes compute.
DOCUMENT = Dilated([2048, 4096], [1, 2], mixing="head_groups", offsets="branch")
TOKENS = 8192
PLAIN = {"gather": True, "backend": "eager", "cache": False, "pool": False}
FULL = {"gather": False, "backend": "auto", "cache": True, "pool": True}
COLLECTIVE = {"use_pattern_cache": True, "enable_memory_pool": True, "memory_pool_threshold_mb": 16.0}  # its snippet

# The engine's own function: every head runs every branch.
LONG = Dilated([2048, 4096], [1, 2])
SHORT = Dilated([512, 1024], [1, 2])
LADDER = Dilated([1024, 2048, 4096, 8192, 16384], [1, 2, 4, 8, 16])
POOLED = Dilated([512, 4096], [1, 8])  # few products, and of 16 such sequences one head's accumulator is 16 MiB


def optimization(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """The points of document 000 for a profile, about three minutes on two CPU cores; each group answers a question.

    ``implementations``: how fast is each in each dtype, and what is each switch and each kernel worth (the refused ones
    give their reason)? ``lengths``: from which n on does the pattern pay? ``passes``: does it also causal, and in
    training? ``cache and pool``: what does a plan cost, and when does a pool help? ``engine forward`` and ``engine
    backward``: how near is it to this machine's matrix product and to torch's own kernel, how far from the copying
    form? ``memory``: what does it hold in half precision? Dense SDPA is timed at each n that occurs, and in each of the
    first four groups a call stands twice. A rehearsal takes the first two with the profile's dtypes.
    """
    groups = [implementations(profile, device, rehearsal), lengths(profile, device, rehearsal)]
    return groups if rehearsal else [*groups, passes(profile, device), reuse(profile, device), *engine(profile, device)]


def dtypes(profile: hardware.Profile, device: str, rehearsal: bool) -> list[str]:
    """float32, float16 and, where the hardware has it, bfloat16."""
    bf16 = device == "cpu" and not rehearsal or hardware.has_bf16(profile.capability)
    return ["float32", "float16", *(["bfloat16"] if bf16 else [])]


def implementations(profile: hardware.Profile, device: str, rehearsal: bool = False) -> Group:
    """The document's table, its dtype x optimisation 2x2, the switches and the kernels, all taking turns."""
    document = Point("ringlab", DOCUMENT, seq_len=TOKENS)
    dense = Point("dense_sdpa", Dense(), seq_len=TOKENS)
    flash = document.but(system="RingDilatedAttentionV2Flash")
    points = [document.but(options=FULL), dense, document.but(options=FULL | TWIN)]
    for dtype in dtypes(profile, device, rehearsal):
        for point in (document.but(options=PLAIN), document.but(options=FULL), flash):
            # The document has no bfloat16 row and no V2Flash in float32; on a CPU they would repeat what others show.
            repeats = {"bfloat16": (document.but(options=PLAIN), flash), "float32": (flash,)}.get(dtype, ())
            if device != "cpu" or point not in repeats:
                points.append(point.but(dtype=dtype))
        # On a CPU torch computes half-precision dense attention up to six times slower: a minute for one row.
        if device != "cpu" and dtype != "float32":
            points.append(dense.but(dtype=dtype))
    points.append(document.but(system="RingDilatedAttentionV2Collective", options=COLLECTIVE))
    points += [document.but(options=FULL | {name: PLAIN[name]}) for name in FULL]
    if device != "cpu":  # there the plain path takes a second a call, and its switches as long again
        points += [document.but(options=PLAIN | {name: FULL[name]}) for name in ("gather", "backend")]
    if not rehearsal:
        # Strided views borrow nothing for this function; gathered, its buffers reach the published threshold of 16 MB.
        points.append(document.but(options=FULL | {"gather": True, "pool": False}))
        points += [document.but(options=FULL | {"backend": name}) for name in kernels.KERNELS]
    chosen = own_dtype(profile)
    if device == "cuda" and chosen != "float32":  # fp32 is refused by most GPU kernels
        points += [document.but(options=FULL | {"backend": name}, dtype=chosen) for name in kernels.KERNELS]
    return Group("implementations", tuple(dict.fromkeys(points)))


def long_length(profile: hardware.Profile, device: str) -> int:
    """A sequence that a forward and backward of dense attention takes a second for, or less."""
    return 4096 if device == "cpu" else 32768 if (profile.memory_bytes or 0) > LARGE_MEMORY else 8192


def lengths(profile: hardware.Profile, device: str, rehearsal: bool = False) -> Group:
    """All optimisations and dense SDPA over growing n."""
    longest = 4096 if device == "cpu" else 65536 if (profile.memory_bytes or 0) > LARGE_MEMORY else 32768
    dtype = "float32" if device == "cpu" else own_dtype(profile)
    points = []
    for n in (2**i for i in range(10, 20)):
        if n <= longest and (n != TOKENS or device != "cpu"):  # 8192 is in the table
            points.append(Point("ringlab", DOCUMENT, seq_len=n, dtype=dtype, options=FULL))
            points.append(Point("dense_sdpa", Dense(), seq_len=n, dtype=dtype))
    points.append(points[0].but(options=FULL | TWIN))
    return Group("lengths", tuple(points))


def passes(profile: hardware.Profile, device: str) -> Group:
    """All optimisations and dense SDPA: causal, and forward with backward. The plain forward stands in ``lengths``."""
    n, dtype = long_length(profile, device), own_dtype(profile)
    ours = Point("ringlab", DOCUMENT, seq_len=n, dtype=dtype, options=FULL)
    dense = Point("dense_sdpa", Dense(), seq_len=n, dtype=dtype)
    ways = ({"causal": True}, {"passes": "fwd+bwd"}, {"causal": True, "passes": "fwd+bwd"})
    points = [p.but(**way) for way in ways for p in (ours, dense)]
    return Group("passes", (*points, ours.but(passes="fwd+bwd", options=FULL | TWIN)))


def reuse(profile: hardware.Profile, device: str) -> Group:
    """The pattern cache cold and warm, and the pool by threshold where it borrows: accumulators of half precision.

    The pool's function is chosen for it: few products, and in every call one accumulator of 16 MiB, or of 4 MiB at a
    quarter of the length.
    """
    build = Point("plan_build", DOCUMENT, seq_len=TOKENS)
    short, ladder, gathered = build.but(seq_len=1024), build.but(pattern=LADDER), {"gather": True}
    cold = [short, build, ladder, build.but(options=gathered)]
    warm = [build, ladder, build.but(options=gathered)]
    points = [p.but(options=dict(p.options) | {"warm": False}) for p in cold]
    points += [p.but(options=dict(p.options) | {"warm": True}) for p in warm]
    for n, thresholds in ((4096, (4.0, 16.0, 64.0)), (1024, (4.0,))):
        off = Point("ringlab", POOLED, batch=16, seq_len=n, heads=1, dtype=half_dtype(profile, device))
        points += [off, *(off.but(options={"pool": True, "pool_threshold_mb": mb}) for mb in thresholds)]
        points.append(off.but(system="dense_sdpa", pattern=Dense()))
        points.append(off.but(options=TWIN))
    return Group("cache and pool", tuple(points))


def engine(profile: hardware.Profile, device: str) -> list[Group]:
    """The engine's speed against what the machine can do, and its memory; dense SDPA at a shorter n is timed above."""
    n, half = long_length(profile, device), half_dtype(profile, device)
    long = Point("ringlab", LONG, seq_len=(2 if device == "cpu" else 4) * n, dtype=own_dtype(profile))
    causal, short, ladder = long.but(causal=True, seq_len=n), long.but(pattern=SHORT), long.but(pattern=LADDER)
    rate = () if device == "cuda" else (sgemm(),)
    forward = (
        long, long.but(system="copying"), long.but(system="contiguous_segments"),
        causal, causal.but(system="contiguous_segments"),
        short, ladder, ladder.but(system="copying"), long.but(system="dense_sdpa", pattern=Dense()), *rate,
    )  # fmt: skip
    backward = [p.but(seq_len=n, passes="fwd+bwd", system=system) for p in (long, short)
                for system in ("ringlab", "contiguous_segments")]  # fmt: skip
    held = (long.but(dtype=half), long.but(seq_len=2 * n, dtype=half, passes="fwd+bwd"))
    return [
        Group("engine forward", forward),
        Group("engine backward", (*backward, *rate)),
        Group("memory", tuple(dict.fromkeys(held)), timed=False),
    ]


SUITES: dict[str, Callable[..., list[Group]]] = {
    **kernel_suites.SUITES,
    "optimization": optimization,
    **ring_suites.SUITES,
    **session_suites.SUITES,
    **landscape_suites.SUITES,
}
