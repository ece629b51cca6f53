"""Which points answer which document. A suite is a function of a profile: every machine measures the same list."""

from __future__ import annotations

from collections.abc import Callable

from .. import hardware, kernels
from ..patterns import Dense, Dilated
from .points import Group, Point, sgemm

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
LARGE_MEMORY = 16e9  # bytes; from here on a GPU takes longer sequences


def optimization(profile: hardware.Profile, *, device: str, rehearsal: bool = False) -> list[Group]:
    """The points of document 000 for a profile, about three minutes on two CPU cores.

    ``implementations``: no optimisation, all of them, and the published modules by dtype, each switch taken away and
    the two large ones added alone, every kernel by name (the refused ones give their reason), dense SDPA at the same
    n. ``lengths``: where the speed-up over dense begins. ``engine forward`` and ``engine backward``: the engine beside
    sgemm, the copying form, dense SDPA and torch's kernel on contiguous segments. ``memory ...``: half precision,
    checked but not timed. A rehearsal takes the first two with the profile's dtypes.
    """
    groups = [implementations(profile, device, rehearsal), lengths(profile, device, rehearsal)]
    return groups if rehearsal else [*groups, *engine(profile, device)]


def dtypes(profile: hardware.Profile, device: str, rehearsal: bool) -> list[str]:
    """float32, float16 and, where the hardware has it, bfloat16."""
    bf16 = device == "cpu" and not rehearsal or hardware.has_bf16(profile.capability)
    return ["float32", "float16", *(["bfloat16"] if bf16 else [])]


def implementations(profile: hardware.Profile, device: str, rehearsal: bool = False) -> Group:
    """The document's table, its dtype x optimisation 2x2, the switches and the kernels, all taking turns."""
    document = Point("ringlab", DOCUMENT, seq_len=TOKENS)
    dense = Point("dense_sdpa", Dense(), seq_len=TOKENS)
    points = [document.but(options=FULL), dense]
    for dtype in dtypes(profile, device, rehearsal):
        for point in (
            document.but(options=PLAIN),
            document.but(options=FULL),
            document.but(system="RingDilatedAttentionV2Flash"),
        ):
            # The document has no bfloat16 row; on a CPU it would only repeat what the float16 rows show.
            if device != "cpu" or dtype != "bfloat16" or point == document.but(options=FULL):
                points.append(point.but(dtype=dtype))
        # On a CPU torch computes half-precision dense attention up to six times slower: a minute for one row.
        if device != "cpu" and dtype != "float32":
            points.append(dense.but(dtype=dtype))
    points.append(document.but(system="RingDilatedAttentionV2Collective", options=COLLECTIVE))
    for name in FULL:
        points.append(document.but(options=FULL | {name: PLAIN[name]}))
        if name in ("gather", "backend"):  # cache and pool are far below what the plain path's time can resolve
            points.append(document.but(options=PLAIN | {name: FULL[name]}))
    points += [document.but(options=FULL | {"backend": name}) for name in kernels.KERNELS]
    chosen = str(profile.default_dtype()).removeprefix("torch.")
    if device == "cuda" and chosen != "float32":  # fp32 is refused by most GPU kernels
        points += [document.but(options=FULL | {"backend": name}, dtype=chosen) for name in kernels.KERNELS]
    return Group("implementations", tuple(dict.fromkeys(points)))


def lengths(profile: hardware.Profile, device: str, rehearsal: bool = False) -> Group:
    """All optimisations and dense SDPA over growing n."""
    longest = 4096 if device == "cpu" else 65536 if (profile.memory_bytes or 0) > LARGE_MEMORY else 32768
    dtype = "float32" if device == "cpu" else str(profile.default_dtype()).removeprefix("torch.")
    points = []
    for n in (2**i for i in range(10, 20)):
        if n <= longest and (n != TOKENS or device != "cpu"):  # 8192 is in the table
            points.append(Point("ringlab", DOCUMENT, seq_len=n, dtype=dtype, options=FULL))
            points.append(Point("dense_sdpa", Dense(), seq_len=n, dtype=dtype))
    return Group("lengths", tuple(points))


def engine(profile: hardware.Profile, device: str) -> list[Group]:
    """The engine's speed against what the machine can do, and its memory; a group's first point starts fresh."""
    on_gpu = device == "cuda"
    n = 65536 if on_gpu and (profile.memory_bytes or 0) > LARGE_MEMORY else 16384
    half = str(profile.default_dtype()).removeprefix("torch.") if on_gpu else "bfloat16"
    half = half if half != "float32" else "float16"
    long = Point("ringlab", LONG, seq_len=n, dtype=half if on_gpu else "float32")
    causal, short, ladder = long.but(causal=True), long.but(pattern=SHORT), long.but(pattern=LADDER)
    rate = () if on_gpu else (sgemm(),)
    forward = (
        long, long.but(system="copying"), long.but(system="contiguous_segments"),
        causal, causal.but(system="contiguous_segments"),
        short, ladder, ladder.but(system="copying"),
        Point("dense_sdpa", Dense(), seq_len=n, dtype=long.dtype), *rate,
    )  # fmt: skip
    backward = (long.but(passes="fwd+bwd"), short.but(passes="fwd+bwd"), *rate)
    return [
        Group("engine forward", forward),
        Group("engine backward", backward),
        *(
            Group(f"memory {half} {passes}", (long.but(dtype=half, passes=passes),), timed=False)
            for passes in ("fwd", "fwd+bwd")
        ),
    ]


SUITES: dict[str, Callable[..., list[Group]]] = {"optimization": optimization}
