"""The points of each report page. A suite is a function of a profile, so that every
machine measures the same list.

``suite(profile)`` returns groups of points, as the profile's kind of device gets them;
the points of a group take turns. The option ``twin`` marks an A/A control: the same
call once more, which shows the noise floor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from .. import block_patterns, hardware, kernels
from ..advise import WINDOW as NEIGHBOURS
from ..advise import local
from ..block_patterns import (
    BlockSparse,
    bigbird,
    hierarchical,
    local_global,
    sliding_window,
)
from ..checks import check_int, check_ints
from ..patterns import Dense, Dilated, Pattern
from ..presets import ladder
from . import peers
from .model_systems import STEPS, document_lengths
from .points import Group, Point, sgemm

TWIN = {"twin": True}


def own_dtype(profile: hardware.Profile) -> str:
    """The dtype that the profile's policy chooses; float32 on a CPU."""
    if profile.kind == "cpu":
        return "float32"
    return str(profile.default_dtype()).removeprefix("torch.")


def half_dtype(profile: hardware.Profile) -> str:
    """The half precision to use: bfloat16 on a CPU, else the profile's own or float16."""
    own = "bfloat16" if profile.kind == "cpu" else own_dtype(profile)
    return "float16" if own == "float32" else own


def by_size(profile: hardware.Profile, cpu: int, small: int, large: int) -> int:
    """One of these lengths or factors: for a CPU, a GPU, or a GPU of more than 16 GB."""
    if profile.kind == "cpu":
        return cpu
    return large if (profile.memory_bytes or 0) > 16e9 else small


def dense(point: Point) -> Point:
    """Dense attention by torch on the same tensors."""
    return point.but(system="dense_sdpa", pattern=Dense(), options={})


def again(point: Point) -> Point:
    """The A/A control of a point."""
    return point.but(options=dict(point.options) | TWIN)


def vary(groups: list[Group], *, longest: int = 0, **fields) -> list[Group]:
    """The groups with other values of these fields of every call, and without points
    beyond ``longest`` tokens; 0, "" and None keep what a suite has.

    Matrix products, which show the rate of the machine, stay as they are. Raises
    ValueError for a number that is no integer of at least 0.

    >>> [group] = vary([Group("g", [Point("ringlab", Dense())])], heads=2, head_dim=0)
    >>> group.points[0].heads, group.points[0].head_dim
    (2, 64)
    """
    for name in fields.keys() & {"batch", "heads", "kv_heads", "head_dim"}:
        check_int(name, fields[name] or 0, least=0)
    check_int("longest", longest, least=0)
    fields = {name: value for name, value in fields.items() if value}
    if "heads" in fields:
        fields.setdefault("kv_heads", fields["heads"])
    found = []
    for group in groups:
        kept = (p for p in group.points if not longest or p.seq_len <= longest)
        points = (p.but(**fields) if p.system != "sgemm" else p for p in kept)
        if points := tuple(dict.fromkeys(points)):
            found.append(replace(group, points=points))
    return found


# --------------------------------------------------------------------------------------
# document 000: what each optimisation is worth, and how close the engine comes to the rate of the machine

# b = 1, h = 8, d = 64; its classes compute head groups with offsets by branch.
DOCUMENT = Dilated([2048, 4096], [1, 2], mixing="head_groups", offsets="branch")
TOKENS = 8192
PLAIN = {"gather": True, "backend": "eager", "cache": False, "pool": False}
FULL = {"gather": False, "backend": "auto", "cache": True, "pool": True}
COLLECTIVE = {
    "use_pattern_cache": True,
    "enable_memory_pool": True,
    "memory_pool_threshold_mb": 16.0,
}  # its snippet

# The engine's own function: every head runs every branch.
LONG = Dilated([2048, 4096], [1, 2])
SHORT = Dilated([512, 1024], [1, 2])
LADDER = Dilated([1024, 2048, 4096, 8192, 16384], [1, 2, 4, 8, 16])
THREE = Dilated([2048, 4096, 8192], [1, 2, 4])
POOLED = Dilated(
    [512, 4096], [1, 8]
)  # few products; 16 sequences of 4096 accumulate 16 MiB in half precision


def optimization(profile: hardware.Profile) -> list[Group]:
    """Document 000, about three minutes on two CPU cores.

    ``implementations``: the document's table, dtype by optimisation, the switches and
    the kernels. ``lengths``: all optimisations and dense SDPA over growing n.
    ``passes``: the same, causal and with a backward. ``cache and pool``: the pattern
    cache cold and warm, and the pool by threshold. ``engine``, ``memory``: LongNet's
    own mixing beside other ways to compute it, and its peak. ``folding``: each visible
    pair once, and branch by branch, beside a matrix product. ``two ranks``: the length
    at which the document ran out of memory.
    """
    cpu = profile.kind == "cpu"
    dtype = own_dtype(profile)
    half = half_dtype(profile)
    ours = Point("ringlab", DOCUMENT, seq_len=TOKENS, options=FULL)
    plain = ours.but(options=PLAIN)
    flash = ours.but(system="RingDilatedAttentionV2Flash", options={})
    table = [ours, dense(ours), again(ours)]
    bf16 = cpu or hardware.has_bf16(profile.capability)
    for name in ("float32", "float16", "bfloat16") if bf16 else ("float32", "float16"):
        # The document has no bfloat16 row and no V2Flash in float32; on a CPU they
        # would repeat other rows.
        repeats = (
            {"bfloat16": (plain, flash), "float32": (flash,)}.get(name, ())
            if cpu
            else ()
        )
        table += [p.but(dtype=name) for p in (plain, ours, flash) if p not in repeats]
        # On a CPU torch computes half-precision dense attention up to six times slower:
        # a minute for one row.
        table += [dense(ours).but(dtype=name)] if not cpu and name != "float32" else []
    table.append(
        ours.but(system="RingDilatedAttentionV2Collective", options=COLLECTIVE)
    )
    table += [ours.but(options=FULL | {name: PLAIN[name]}) for name in FULL]
    if not cpu:  # where the plain path takes a second per call
        table += [
            ours.but(options=PLAIN | {name: FULL[name]})
            for name in ("gather", "backend")
        ]
    kernel = [ours.but(options=FULL | {"backend": name}) for name in kernels.KERNELS]
    # Only gathered does this function borrow buffers, of the published threshold of
    # 16 MB.
    table += [ours.but(options=FULL | {"gather": True, "pool": False}), *kernel]
    if dtype != "float32":  # which most GPU kernels refuse
        table += [p.but(dtype=dtype) for p in kernel]

    longest = by_size(profile, 4096, 32768, 65536)
    growing = [
        ours.but(seq_len=2**i, dtype=dtype) for i in range(10, 20) if 2**i <= longest
    ]
    growing = [p for each in growing for p in (each, dense(each))]
    n = by_size(
        profile, 4096, 8192, 32768
    )  # forward and backward of dense attention take a second at most
    ours = ours.but(seq_len=n, dtype=dtype)
    both = ours.but(passes="fwd+bwd")
    passes = [p for each in (ours.but(causal=True), both) for p in (each, dense(each))]

    build = Point("plan_build", DOCUMENT, seq_len=TOKENS)
    plans = [
        build.but(seq_len=1024),
        build,
        build.but(pattern=LADDER),
        build.but(options={"gather": True}),
    ]
    reuse = [p.but(options=dict(p.options) | {"warm": False}) for p in plans]
    reuse += [p.but(options=dict(p.options) | {"warm": True}) for p in plans[1:]]
    for tokens, thresholds in (
        (4096, (4.0, 16.0, 64.0)),
        (1024, (4.0,)),
    ):  # accumulators of 16 MiB, and of 4 MiB
        off = Point("ringlab", POOLED, batch=16, seq_len=tokens, heads=1, dtype=half)
        reuse += [
            off,
            *(
                off.but(options={"pool": True, "pool_threshold_mb": mb})
                for mb in thresholds
            ),
        ]
        reuse.append(again(off))

    long = Point("ringlab", LONG, seq_len=(2 if cpu else 4) * n, dtype=dtype)
    ladder = long.but(pattern=LADDER)
    others = ({}, {"system": "contiguous_segments"})
    forward = [
        long,
        long.but(system="copying"),
        long.but(**others[1]),
        long.but(pattern=SHORT),
    ]
    forward += [ladder, ladder.but(system="copying"), *([] if cpu else [dense(long)])]
    backward = [long.but(seq_len=n, passes="fwd+bwd", **how) for how in others]
    nested = [long.but(seq_len=16384, pattern=p) for p in (LONG, SHORT, LADDER, THREE)]
    nested += [
        nested[0].but(causal=True),
        *(nested[i].but(passes="fwd+bwd") for i in (0, 2)),
    ]
    folding = [
        sgemm(),
        *(p.but(options=how) for p in nested for how in ({}, {"merge": "eager"})),
    ]
    held = [long.but(dtype=half), long.but(seq_len=2 * n, dtype=half, passes="fwd+bwd")]
    across = Point(
        "ringlab", DOCUMENT, seq_len=16384, world_size=2
    )  # where its own run on two GPUs failed
    return [
        Group("implementations", dict.fromkeys(table)),
        Group("lengths", (*growing, again(growing[0]))),
        Group("passes", passes),
        Group("cache and pool", reuse),
        Group("engine forward", forward),
        Group("engine backward", backward),
        *([Group("folding", folding)] if cpu else []),
        Group("memory", dict.fromkeys(held), timed=False),
        Group("two ranks", (across,), timed=False),
    ]


# --------------------------------------------------------------------------------------
# documents 001, 003, 004: ring attention by rank and length, float32 as they have it

# With segments of 512 and 1024 a shard of 1024 rows or more needs nothing from other
# ranks; those of DOCUMENT cross a border. Points on more ranks than the machine has
# cores have memory and no time.
RING_DOCUMENT = Dilated([512, 1024], [1, 2], mixing="head_groups", offsets="branch")
SDPA = "RingDilatedAttentionSDPA"
CORRECT = "RingDilatedAttentionCorrect"
HILBERT = "RingDilatedAttentionHilbertGPUOptimized"
MILLION = 2**20  # tokens
ONE_HEAD = {"heads": 1, "kv_heads": 1}
V2_COLLECTIVE = "RingDilatedAttentionV2Collective"
ROBUST = "RingDilatedAttentionV2Robust"
HYBRID = "RingDilatedAttentionHybrid"


def benchmark_summary(profile: hardware.Profile) -> list[Group]:
    """Document 001: throughput and memory per rank over n and p.

    ``throughput``: on one rank, two and four. ``million``: a million tokens on two,
    untimed, on a CPU with one of the eight heads, which are alike. ``simulated``: eight
    ranks in one process, which shows no rank's memory.
    """
    first = Point(SDPA, RING_DOCUMENT)
    ns = (2048, 4096, 8192, 16384)
    second = first.but(seq_len=ns[1])
    points = [first.but(seq_len=n, world_size=p) for n in ns for p in (1, 2, 4)]
    points += [
        second.but(system=system, world_size=p)
        for system in (CORRECT, HILBERT)
        for p in (1, 2, 4)
    ]
    points += [dense(second), *(second.but(world_size=p, options=TWIN) for p in (1, 2))]
    simulated = first.but(seq_len=ns[-1], options={"simulated": 8})
    million = first.but(
        seq_len=MILLION, world_size=2, **(ONE_HEAD if profile.kind == "cpu" else {})
    )
    return [
        Group("throughput", points),
        Group("simulated", (simulated,), timed=False),
        Group("million", (million,), timed=False),
    ]


def performance_comparison(profile: hardware.Profile) -> list[Group]:
    """Document 003: gathering, the ring and the plan; time, memory and bytes.

    ``one device``: its tables, where no ring code runs. ``schemes``: two and four
    ranks, with segments across a border.
    """
    first = Point(V2_COLLECTIVE, DOCUMENT)
    ns = (1024, 2048, 4096)
    one = [
        first.but(system=system, seq_len=n)
        for n in ns
        for system in (V2_COLLECTIVE, ROBUST)
    ]
    one += [*(p.but(causal=True) for p in one[-2:]), again(one[-1])]
    ways = (
        {},
        {"system": ROBUST},
        {"system": "ringlab", "options": {"scheme": "plan"}},
    )
    two, four = (
        [first.but(seq_len=n, world_size=p, **way) for n in ns for way in ways]
        for p in (2, 4)
    )
    two += [p.but(causal=True) for p in two[-3:]]
    return [
        Group("one device", one),
        Group("schemes", (*two, again(two[-1]), *four[-3:])),
    ]


def hybrid_summary(profile: hardware.Profile) -> list[Group]:
    """Document 004: the hybrid over n and p. ``long``: memory at 32K and 64K on several
    ranks, untimed.
    """
    first = Point(HYBRID, RING_DOCUMENT, world_size=2)
    ns = (1024, 2048, 4096, 8192, 16384)
    points = [first.but(seq_len=n) for n in ns]
    points += [
        first.but(seq_len=n, world_size=p)
        for n, p in ((ns[0], 1), (ns[-1], 1), (ns[-1], 4))
    ]
    long = [
        first.but(seq_len=n, world_size=p)
        for n, p in ((32768, 2), (32768, 4), (65536, 2))
    ]
    return [
        Group("hybrid", (*points, again(points[0]))),
        Group("long", long, timed=False),
    ]


# --------------------------------------------------------------------------------------
# document 002: block-sparse attention

SPARSE_TABLE = "block sparse table"
JOURNEY = "journey"
EFFICIENCY = "efficiency"
WINDOW_LENGTHS = "window lengths"
EXTREME_LENGTHS = "extreme lengths"
BLOCK_PATTERNS = "block patterns"
SESSION_REUSE = "reuse"
ORIGINAL = "BlockSparseRingDilatedAttention"
OPTIMIZED = "BlockSparseOptimized"
TORCH_SPARSE = "BlockSparseTorchSparse"

# The document has batch 1, 8 heads of 64, blocks of 64 and a window of 256 positions,
# two blocks each way.
SESSION_TOKENS = 4096
WINDOW = sliding_window(2, block_size=64)
LONG_TOKENS = 16384
FAR = sliding_window(2, block_size=128)
EXTREME_TOKENS = (65536, 131072, 262144)
BLOCK_WAYS = ("rows", "batched", "views")  # of execution, in the order of the document
FRESH = {"results": False}
ADAPTIVE = {"block_size": 64, "top_k": 5}  # as many blocks as the window has
LOOKED_UP = 2048  # the longest length whose patterns are looked up
CACHES_MB = (0, 0.25, 1, 64)  # 64 is the library's default; with 0 nothing is kept
SCRATCH_MB = (1, 4, 16, 64)
THREADS = (1, 2)
KINDS: dict[str, BlockSparse] = {
    "window": WINDOW,
    "strided": BlockSparse([block_patterns.Window(1), block_patterns.Strided(8)], 64),
    "local and global": local_global(1, 2, block_size=64),
    "BigBird": bigbird(1, 2, 3, block_size=64),
    "hierarchical": hierarchical([(1, 2), (8, 32)], block_size=64),
}


def a_tenth(block_size: int, seq_len: int) -> BlockSparse:
    """A window and global blocks whose density at so many positions is about a tenth."""
    some = seq_len // (64 * block_size)
    return local_global(some, 2 * some, block_size=block_size)


def session_summary(profile: hardware.Profile) -> list[Group]:
    """Document 002, about three minutes on two CPU cores.

    ``block sparse table``: its table and dense attention. ``journey``: plans built and
    looked up, the three ways of execution, and the cache off and on. ``window
    lengths``: a fixed window and dense attention over growing n, and the document's two
    rows at a long n. ``block patterns``: each kind, and blocks chosen by content.
    ``efficiency``: a tenth of all pairs in local and global blocks, beside dense
    attention and FlexAttention. ``extreme lengths``: those of its headlines, each
    alone. ``reuse``: the cache by its bytes, and the pool by size and threads.
    """
    cpu = profile.kind == "cpu"
    ours = Point("ringlab", WINDOW, seq_len=SESSION_TOKENS, dtype=own_dtype(profile))
    original, optimized = (ours.but(system=system) for system in (ORIGINAL, OPTIMIZED))
    # torch's sparse tensors exist in float32 only, so others are measured in float32
    # too.
    table = [original, optimized, ours, again(ours), dense(ours)]
    table += [
        p.but(dtype="float32") for p in (ours.but(system=TORCH_SPARSE), optimized, ours)
    ]

    built = [
        {"blocks": way, "warm": warm} for way in BLOCK_WAYS for warm in (False, True)
    ]
    ways = [{"blocks": way} for way in BLOCK_WAYS] + [
        {"blocks": way, "cache": False} for way in ("rows", "views")
    ]
    journey = [ours.but(system="plan_build", options=how) for how in built]
    journey += [ours.but(options=how) for how in (*ways, {"blocks": "views"} | TWIN)]

    longest = by_size(profile, LONG_TOKENS, 32768, 65536)
    growing = [ours.but(seq_len=2**i) for i in range(10, 20) if 2**i <= longest]
    growing += [dense(p) for p in growing if not cpu or p.seq_len <= SESSION_TOKENS]
    growing += [
        p.but(seq_len=longest // 2 if cpu else longest) for p in (original, optimized)
    ]

    chosen = ours.but(system="adaptive", pattern=Dense(), options=ADAPTIVE)
    kinds = [*(ours.but(pattern=pattern) for pattern in KINDS.values()), chosen]
    groups = [
        Group(SPARSE_TABLE, dict.fromkeys(table)),
        Group(JOURNEY, journey),
        Group(WINDOW_LENGTHS, growing),
        Group(BLOCK_PATTERNS, kinds),
    ]
    n = by_size(profile, LONG_TOKENS // 2, LONG_TOKENS, 4 * LONG_TOKENS)
    long = ours.but(pattern=a_tenth(128, n), seq_len=n)
    tenth = [
        long,
        long.but(pattern=a_tenth(64, n)),
        long.but(causal=True),
        long.but(passes="fwd+bwd"),
    ]
    # On a CPU results in fresh memory show the cost of page faults, a dense backward
    # takes a minute, and the landscape has FlexAttention, whose compiling takes as long
    # as all else.
    gpu = [dense(long), dense(long).but(passes="fwd+bwd"), long.but(system="flex")]
    tenth += [long.but(options=FRESH), dense(long)] if cpu else gpu
    efficiency = Group(EFFICIENCY, tenth, rounds=10)

    # A CPU takes one of the eight heads, which are alike; all would take minutes.
    far = ours.but(pattern=FAR, **(ONE_HEAD if cpu else {}))
    extreme = Group(
        EXTREME_LENGTHS, [far.but(seq_len=n) for n in EXTREME_TOKENS], interleave=False
    )

    lookup = Point("cache_workload", WINDOW, seq_len=LOOKED_UP)
    scratch = Point("pool_workload", Dense(), seq_len=1)
    reuse = [
        lookup.but(options={"max_mb": mb, "blocks": "batched"}) for mb in CACHES_MB
    ]
    reuse.append(lookup.but(options={"max_mb": CACHES_MB[-1], "blocks": "views"}))
    for mb, threads in product(SCRATCH_MB, THREADS):
        how = {"size_mb": mb, "threads": threads}
        reuse += [scratch.but(options=how | {"pool": pool}) for pool in (False, True)]
    return [*groups, efficiency, extreme, Group(SESSION_REUSE, reuse)]


# --------------------------------------------------------------------------------------
# kernels on a GPU: each way to run a pattern there, beside the fastest calls that do similar work

# One shape: 16 heads in the GPU's half precision, three branches that fold.
RUNGS = "rungs"
RUNGS_ON_A_LADDER = "rungs on a ladder"
RUNGS_BESIDE_FA4 = "rungs beside FlashAttention-4"
RUNGS_BY_LENGTH = "rungs by length"
RUNGS_ON_BLOCKS = "rungs on blocks"
RUNGS_IN_MEMORY = "rungs in memory"
RUNG_PATTERN = Dilated([2048, 4096, 8192], [1, 2, 4])
RUNG_TOKENS = 65536
RUNG_HEADS = 16
RUNG_HEAD_DIMS = (128, 64)
RUNG_LONGER = (262_144, 1_048_576)
RUNG_MASK = a_tenth(128, RUNG_TOKENS)
# Each way of this library by the options of the system "ringlab"; the notebook
# optimization_results describes each.
RUNG_WAYS: dict[str, dict] = {
    "default": {},
    "lists": {"backend": "triton"},
    "merged": {"backend": "sdpa"},
    "strided": {"backend": "sdpa", "merge": "eager"},
}
FA4 = "flash_attn_4"
RUNG_PEERS = (
    "cudnn",
    "flash",
)  # torch's own kernels, on segments that lie contiguous already
RUNG_PASSES: dict[str, dict] = {
    "forward": {},
    "forward and backward": {"passes": "fwd+bwd"},
    "causal": {"causal": True},
}


def kernel_suite(profile: hardware.Profile, *, packages: bool = False) -> list[Group]:
    """Points for a GPU, about five minutes on a data-centre GPU; none for a CPU.

    ``rungs``: every way, the copying form and torch's kernels at 65,536 tokens, by
    head_dim and pass. ``rungs on a ladder``: LongNet's. ``rungs by length``: from 4,096 tokens to a million. ``rungs on
    blocks``: a tenth of all pairs in blocks of 128. ``rungs in memory``: the longest,
    forward and backward, each alone on the GPU. ``rungs beside FlashAttention-4``:
    where that package is installed, or with ``packages`` in any case.
    """
    if profile.kind == "cpu":
        return []
    first = Point(
        "ringlab",
        RUNG_PATTERN,
        seq_len=RUNG_TOKENS,
        heads=RUNG_HEADS,
        head_dim=RUNG_HEAD_DIMS[0],
        dtype=half_dtype(profile),
    )

    def ways(point: Point, *names: str) -> list[Point]:
        return [point.but(options=RUNG_WAYS[name]) for name in names]

    groups = []
    for head_dim, (name, how) in product(RUNG_HEAD_DIMS, RUNG_PASSES.items()):
        point = first.but(head_dim=head_dim, **how)
        points = [*ways(point, *RUNG_WAYS), point.but(system="copying")]
        points += [
            point.but(system="contiguous_segments", options={"backend": peer})
            for peer in RUNG_PEERS
        ]
        points += [dense(point), again(point)] if point == first else []
        groups.append(Group(f"{RUNGS}, head_dim {head_dim}, {name}", points))
    shapes = ((RUNG_TOKENS, 128), (RUNG_TOKENS, 64), (RUNG_TOKENS // 4, 128))
    for (n, head_dim), name in product(shapes, ("forward", "forward and backward")):
        point = first.but(pattern=ladder(n), seq_len=n, head_dim=head_dim)
        points = ways(point.but(**RUNG_PASSES[name]), "default", "lists", "merged")
        shape = f"{n:,} tokens, head_dim {head_dim}"
        groups.append(Group(f"{RUNGS_ON_A_LADDER}, {shape}, {name}", points))
    # Memory for q, k, v, out and their gradients twice: the last results are compared
    # with the first.
    bytes_per_token = 16 * 2 * RUNG_HEADS * RUNG_HEAD_DIMS[0]
    longer = [
        n for n in RUNG_LONGER if bytes_per_token * n <= (profile.memory_bytes or 0)
    ]
    for n in (RUNG_TOKENS // 16, RUNG_TOKENS // 4, *longer):
        point = first.but(seq_len=n)
        points = [
            *ways(point, "default", "lists", "merged"),
            point.but(system="copying"),
        ]
        points += (
            [dense(point)] if n <= RUNG_TOKENS else []
        )  # in less than a tenth of a second
        turns = n < max(
            RUNG_LONGER
        )  # at that length the copying form needs the whole memory
        groups.append(
            Group(f"{RUNGS_BY_LENGTH}, {n:,} tokens", points, interleave=turns)
        )
    for name in (
        "forward",
        "forward and backward",
    ):  # FlexAttention comes last, for the forward only
        point = first.but(pattern=RUNG_MASK, **RUNG_PASSES[name])
        flex = [point.but(system="flex")] if name == "forward" else []
        groups.append(
            Group(
                f"{RUNGS_ON_BLOCKS}, {name}",
                (*ways(point, "default", "lists"), dense(point), *flex),
            )
        )
    training = first.but(seq_len=max(longer, default=RUNG_TOKENS), passes="fwd+bwd")
    groups.append(
        Group(
            RUNGS_IN_MEMORY,
            ways(training, "default", "lists", "merged"),
            interleave=False,
        )
    )
    newer = profile.capability is not None and profile.capability >= (9, 0)
    if newer and (packages or peers.version_of("flash-attn-4")):
        groups += _beside_fa4(first, ways)
    return groups


def _beside_fa4(first: Point, ways: Callable) -> list[Group]:
    """The branches and the ladder by head_dim and pass, and dense attention."""
    groups, dense_calls = [], []
    for head_dim, (name, how) in product(RUNG_HEAD_DIMS, RUNG_PASSES.items()):
        for pattern in (RUNG_PATTERN, ladder(RUNG_TOKENS)):
            point = first.but(pattern=pattern, head_dim=head_dim, **how)
            points = ways(point, "lists", "merged")
            points.append(point.but(options={"backend": FA4}))
            kind = "branches" if pattern == RUNG_PATTERN else "a ladder"
            title = f"{RUNGS_BESIDE_FA4}, {kind}, head_dim {head_dim}, {name}"
            groups.append(Group(title, points))
        short = first.but(pattern=Dense(), head_dim=head_dim, **how)
        short = short.but(seq_len=RUNG_TOKENS // 4)
        dense_calls += [short.but(options={"backend": x}) for x in ("cudnn", FA4)]
    return [*groups, Group(f"{RUNGS_BESIDE_FA4}, dense", dense_calls)]


# --------------------------------------------------------------------------------------
# the landscape: attention functions of the field on one page

# A query of the sparse patterns sees 270 to 450 keys on average at every length: they
# differ in which keys, not in how many. Beside them stands LongNet's own ladder, which
# `advise` proposes.
LANDSCAPE = "landscape"
LANDSCAPE_TRAINING = "landscape training"
LANDSCAPE_ADDED = "landscape, added"
LANDSCAPE_WINDOW = WINDOW  # five blocks: 320 keys
BIGBIRD = bigbird(1, 1, 1, block_size=64)  # three, a global and a random one
LOCAL_GLOBAL = local_global(1, 2, block_size=64)  # three and two global ones
ROWS_KEPT = (
    256  # rows that each branch of the ladder keeps of a segment, as LongNet's do
)


def landscape_ladder(seq_len: int, **how) -> Dilated:
    """LongNet's geometric ladder within the sequence: segments of 256 x 4^i at rate
    4^i, each keeping 256 rows.

    >>> str(landscape_ladder(16384))
    'dilated [256, 1024, 4096, 16384] / [1, 4, 16, 64]'
    """
    rates = [4**i for i in range(20) if ROWS_KEPT * 4**i <= seq_len] or [1]
    return Dilated([ROWS_KEPT * r for r in rates], rates, **how)


ADVISED = f"Window of {NEIGHBOURS:,}"  # what `advise` proposes for neighbours
LONGNET = "LongNet from 2,048"


def landscape_systems() -> dict[str, tuple[str, Callable[[int], Pattern]]]:
    """The systems of the landscape by the names that readers see: (system of a point,
    its pattern at a length).
    """
    return {
        "Dense SDPA": ("dense_sdpa", lambda n: Dense()),
        "Dense, ours": ("ringlab", lambda n: Dense()),
        "Sliding window": ("ringlab", lambda n: LANDSCAPE_WINDOW),
        "BigBird": ("ringlab", lambda n: BIGBIRD),
        "Local and global": ("ringlab", lambda n: LOCAL_GLOBAL),
        "LongNet from 256": ("ringlab", landscape_ladder),
        LONGNET: ("ringlab", ladder),
        ADVISED: ("ringlab", local),
        "FlexAttention": ("flex", lambda n: LOCAL_GLOBAL),
    }


def windows(tokens: Sequence[int]) -> dict[str, tuple[str, Callable[[int], Pattern]]]:
    """Systems to add to the landscape: sliding windows of so many tokens each way,
    which a query's own is one of.

    >>> list(windows([1024]))
    ['Window of 1,024 each way']
    """
    found = {}
    for n in check_ints("windows", tokens) if tokens else ():
        window = sliding_window(tokens=n)
        found[f"Window of {n:,} each way"] = "ringlab", lambda _, window=window: window
    return found


BESIDE = "beside"
BESIDE_CAUSAL = "beside, causal"
BRANCHES = (
    [512, 1024, 2048],
    [1, 2, 4],
)  # rates up to the number of heads: beyond it torchscale pads the heads
LANDSCAPE_PEERS: dict[
    str, tuple[Pattern, tuple[int, ...]]
] = {  # the documented function, lengths over `half`
    "dilated_attention_pytorch": (
        Dilated(*BRANCHES, mixing="head_groups", offsets="branch"),
        (2,),
    ),
    "torchscale_dilated": (Dilated(*BRANCHES, offsets="block"), (2, 8)),
    "local_attention": (sliding_window(1, block_size=128), (2, 8)),
    "ring_attention_pytorch": (Dense(), (1,)),  # it takes seconds at twice the length
}


def peer_groups(point: Point, half: int) -> list[Group]:
    """Each other package in a group ``beside PACKAGE``, in turns with this library; the
    shortest with a backward too.

    ``beside, causal``: gradients of causal attention, untimed. A package that is not
    installed has no points.
    """
    groups = []
    causal = []
    for name, (pattern, times) in LANDSCAPE_PEERS.items():
        if version := peers.installed(name):
            first = point.but(
                system=name, pattern=pattern, options={"version": version}
            )
            theirs = [first.but(seq_len=half * x) for x in times]
            theirs.append(theirs[0].but(passes="fwd+bwd"))
            points = [
                q for p in theirs for q in (p, p.but(system="ringlab", options={}))
            ]
            groups.append(Group(f"{BESIDE} {peers.PEERS[name].package}", points))
            causal.append(theirs[-1].but(causal=True))
    return groups + ([Group(BESIDE_CAUSAL, causal, timed=False)] if causal else [])


GENERATION = "generation"
PACKED = "packed documents"


def model_groups(point: Point, cpu: bool) -> list[Group]:
    """``generation``: a step from the cache over the position. ``packed documents``:
    uneven ones beside equal ones, few of them on a CPU.
    """
    ns = (4096, 16384, 65536, *([] if cpu else [262_144]))
    step = point.but(system=GENERATION, causal=True)
    kinds = (
        (n, p)
        for n in ns
        for p in (Dense(), LANDSCAPE_WINDOW, landscape_ladder(n), ladder(n))
    )
    steps = [
        step.but(seq_len=n - STEPS, pattern=p) for n, p in kinds
    ]  # where segments are full
    count = 40 if cpu else 1000
    one = point.but(system="packed", seq_len=sum(document_lengths(count)), causal=True)
    kinds = Dense(), landscape_ladder(4096), LANDSCAPE_WINDOW
    ways = {"documents": count}, {"documents": count, "equal": True}
    return [
        Group(GENERATION, (*steps, again(steps[0]))),
        Group(
            PACKED,
            [one.but(pattern=p, options=way) for p in kinds for way in ways],
            rounds=6,
        ),
    ]


def landscape(
    profile: hardware.Profile,
    *,
    seq_lens: Sequence[int] = (),
    systems: Mapping[str, tuple[str, Callable[[int], Pattern]]] | None = None,
) -> list[Group]:
    """The field on one page, about three minutes on two CPU cores, most of them dense
    attention at the longest.

    ``seq_lens``: those of the ranking alone, in place of three for this kind of device
    and all other groups. ``systems``: by default ``landscape_systems``, to which a
    reader may add; dense attention by torch is always there. ``landscape``: each system
    over the lengths, forward; FlexAttention at the longest only, because it compiles
    for ten seconds. ``landscape training``: forward and backward at the two shorter ones.
    ``landscape, added``: systems besides the default ones, beside dense attention.
    ``advised``: the window that ``advise`` proposes, and dense attention, at lengths of
    the first screen's table. Then those of ``model_groups``. The other packages that are installed have
    groups of their own, by ``peer_groups``; they take about a minute.
    """
    known = landscape_systems()
    cpu = profile.kind == "cpu"
    own = [1024, 4096, 16384] if cpu else [4096, 16384, 65536]
    ns = sorted({*check_ints("seq_lens", seq_lens)}) if seq_lens else own
    window = Point("ringlab", LANDSCAPE_WINDOW, dtype=own_dtype(profile))
    systems = known if systems is None else systems

    def points_at(n: int, names) -> list[Point]:
        return [
            window.but(system=system, seq_len=n, pattern=pattern(n))
            for system, pattern in (systems[name] for name in names)
        ]

    ours = [
        name
        for name in systems
        if name in known and systems[name][0] not in ("dense_sdpa", "flex")
    ]
    points = [dense(window.but(seq_len=n)) for n in ns]
    for n in ns:
        points += points_at(
            n, [x for x in ours if x not in (LONGNET, ADVISED) or n > NEIGHBOURS]
        )
    points.append(window.but(seq_len=ns[0], options=TWIN))
    if "FlexAttention" in systems:
        # Its mask is made from all pairs: 4 GiB at 65,536.
        n = by_size(profile, ns[-1], ns[len(ns) > 1 and -2], ns[-1])
        points += points_at(n, ["FlexAttention"])
    trained = [
        p for p in points if p.seq_len in ns[:2] and p.system != "flex" and p == p.first
    ]
    trained = [p.but(passes="fwd+bwd") for p in trained]
    more = [name for name in systems if name not in known]
    for name, other in product(more, systems):
        same = systems[name][0] == systems[other][0] and all(
            systems[name][1](n) == systems[other][1](n) for n in ns
        )
        if same and name != other:
            raise ValueError(f"{name!r} and {other!r} are one system")
    added = [p for n in ns for p in (dense(window.but(seq_len=n)), *points_at(n, more))]
    half = 2048 if cpu else 8192
    advised = [
        window.but(seq_len=n, pattern=local(n))
        for n in (8192, 32768, *([] if cpu else [131_072]))
    ]
    advised.append(advised[0].but(pattern=Dense()))
    # At the next length their checks take minutes.
    advised += [p.but(passes="fwd+bwd") for p in (advised[0], advised[-1])]
    # Dense attention takes seconds, and is what all others are compared with.
    ranking = [
        Group(LANDSCAPE, dict.fromkeys(points), rounds=8),
        Group(LANDSCAPE_TRAINING, trained, rounds=8),
        *([Group(LANDSCAPE_ADDED, dict.fromkeys(added))] if more else []),
    ]
    if seq_lens:
        return ranking
    return [
        *ranking,
        Group("advised", advised, rounds=5),
        *model_groups(window, cpu),
        *peer_groups(window, half),
    ]


_PAGES = (
    optimization,
    benchmark_summary,
    performance_comparison,
    hybrid_summary,
    session_summary,
    landscape,
)
SUITES: dict[str, Callable[..., list[Group]]] = {
    "kernels": kernel_suite,
    **{suite.__name__: suite for suite in _PAGES},
}
