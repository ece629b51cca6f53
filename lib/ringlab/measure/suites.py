"""The points of each report page. A suite is a function of a profile, so that every
machine measures the same list.

``suite(profile)`` returns groups of points, as the profile's kind of device gets them;
the points of a group take turns. The option ``twin`` marks an A/A control: the same
call once more, which shows the noise floor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from .. import block_patterns, hardware, kernels
from ..advise import WINDOW as NEIGHBOURS
from ..advise import dtype_name, local
from ..block_patterns import (
    BlockSparse,
    bigbird,
    hierarchical,
    local_global,
    sliding_window,
)
from ..checks import check_int, check_ints
from ..patterns import Dense, Dilated, Pattern
from ..presets import SHAPES, ladder
from ..ring import SCHEMES
from . import peers
from .model_systems import STEPS, document_lengths
from .points import Group, Point
from .selection_systems import CHOICES


def own_dtype(profile: hardware.Profile) -> str:
    """The dtype that the profile's policy chooses; float32 on a CPU."""
    if profile.kind == "cpu":
        return "float32"
    return dtype_name(profile.default_dtype())


def half_dtype(profile: hardware.Profile) -> str:
    """The half precision to use: bfloat16 on a CPU, else the profile's own or float16."""
    own = "bfloat16" if profile.kind == "cpu" else own_dtype(profile)
    return "float16" if own == "float32" else own


def by_size(profile: hardware.Profile, cpu: int, small: int, large: int) -> int:
    """One of these lengths or factors: for a CPU, a GPU, or a GPU of more than 16 GB."""
    if profile.kind == "cpu":
        return cpu
    return large if (profile.memory_bytes or 0) > 16e9 else small


def grid(point: Point, **values: Iterable) -> list[Point]:
    """The point with every combination of values of some of its fields.

    >>> [(p.seq_len, p.world_size) for p in grid(Point("ringlab", Dense()), seq_len=(8, 16), world_size=(1, 2))]
    [(8, 1), (8, 2), (16, 1), (16, 2)]
    """
    return [point.but(**dict(zip(values, each))) for each in product(*values.values())]


def dense(point: Point) -> Point:
    """Dense attention by torch on the same tensors."""
    return point.but(system="dense_sdpa", pattern=Dense(), options={})


def beside_dense(points: Iterable[Point]) -> list[Point]:
    """Each point, and dense attention after it."""
    return [q for point in points for q in (point, dense(point))]


def doubled(longest: int) -> list[int]:
    """The powers of two from 1,024 tokens on, up to ``longest``."""
    return [2**i for i in range(10, 20) if 2**i <= longest]


def having(point: Point, **options) -> Point:
    """The point with these options beside its own."""
    return point.but(options=dict(point.options) | options)


def aa_control(point: Point) -> Point:
    """The A/A control of a point."""
    return having(point, twin=True)


def vary(groups: list[Group], *, longest: int = 0, **fields) -> list[Group]:
    """The groups with other values of these fields of every call, and without points
    beyond ``longest`` tokens; 0, "" and None keep what a suite has.

    Raises ValueError for what no call has.

    >>> [group] = vary([Group("g", [Point("ringlab", Dense())])], heads=2, head_dim=0)
    >>> group.points[0].heads, group.points[0].head_dim
    (2, 64)
    """
    check_int("longest", longest, least=0)
    fields = {name: value for name, value in fields.items() if value}
    if "heads" in fields:
        fields.setdefault("kv_heads", fields["heads"])
    varied = []
    for group in groups:
        points = [
            point.but(**fields)
            for point in group.points
            if not longest or point.seq_len <= longest
        ]
        if points:
            varied.append(replace(group, points=dict.fromkeys(points)))
    return varied


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
    pair once, and branch by branch. ``two ranks``: the length at which the document ran
    out of memory.
    """
    cpu = profile.kind == "cpu"
    dtype = own_dtype(profile)
    half = half_dtype(profile)
    ours = Point("ringlab", DOCUMENT, seq_len=TOKENS, options=FULL)
    plain = ours.but(options=PLAIN)
    flash = ours.but(system="RingDilatedAttentionV2Flash", options={})
    table = [ours, dense(ours), aa_control(ours)]
    # The document has no bfloat16 row and no V2Flash in float32; on a CPU they would
    # repeat other rows. There torch computes half-precision dense attention up to six
    # times slower: a minute for one row.
    rows = {
        "float32": [plain, ours, flash],
        "float16": [plain, ours, flash, dense(ours)],
    }
    if hardware.has_bf16(profile.capability):
        rows["bfloat16"] = rows["float16"]
    if cpu:
        rows = {
            "float32": [plain, ours],
            "float16": [plain, ours, flash],
            "bfloat16": [ours],
        }
    table += [
        point.but(dtype=name) for name, points in rows.items() for point in points
    ]
    table.append(
        ours.but(system="RingDilatedAttentionV2Collective", options=COLLECTIVE)
    )
    switched = [FULL | {name: PLAIN[name]} for name in FULL]
    if not cpu:  # where the plain path takes a second per call
        switched += [PLAIN | {name: FULL[name]} for name in ("gather", "backend")]
    # Only gathered does this function borrow buffers, of the published threshold of
    # 16 MB.
    switched.append(FULL | {"gather": True, "pool": False})
    by_kernel = [FULL | {"backend": name} for name in kernels.KERNELS]
    table += grid(ours, options=switched + by_kernel)
    if dtype != "float32":  # which most GPU kernels refuse
        table += grid(ours.but(dtype=dtype), options=by_kernel)

    lengths = doubled(by_size(profile, 4096, 32768, 65536))
    growing = beside_dense(grid(ours.but(dtype=dtype), seq_len=lengths))
    # Forward and backward of dense attention take a second at most.
    n = by_size(profile, 4096, 8192, 32768)
    ours = ours.but(seq_len=n, dtype=dtype)
    passes = beside_dense([ours.but(causal=True), ours.but(passes="fwd+bwd")])

    build = Point("plan_build", DOCUMENT, seq_len=TOKENS)
    gathered = build.but(options={"gather": True})
    plans = [build.but(seq_len=1024), build, build.but(pattern=LADDER), gathered]
    reuse = [having(point, warm=False) for point in plans]
    reuse += [having(point, warm=True) for point in plans[1:]]
    # Accumulators of 16 MiB, and of 4 MiB.
    for tokens, thresholds in ((4096, (4.0, 16.0, 64.0)), (1024, (4.0,))):
        off = Point("ringlab", POOLED, batch=16, seq_len=tokens, heads=1, dtype=half)
        pools = [{"pool": True, "pool_threshold_mb": mb} for mb in thresholds]
        reuse += [off, *grid(off, options=pools), aa_control(off)]

    long = Point("ringlab", LONG, seq_len=(2 if cpu else 4) * n, dtype=dtype)
    ladder = long.but(pattern=LADDER)
    segments = long.but(system="contiguous_segments")
    forward = [long, long.but(system="copying"), segments, long.but(pattern=SHORT)]
    forward += [ladder, ladder.but(system="copying"), *([] if cpu else [dense(long)])]
    backward = [point.but(seq_len=n, passes="fwd+bwd") for point in (long, segments)]
    nested = grid(long.but(seq_len=16384), pattern=(LONG, SHORT, LADDER, THREE))
    nested.append(nested[0].but(causal=True))
    nested += [nested[i].but(passes="fwd+bwd") for i in (0, 2)]
    folding = [
        q for point in nested for q in grid(point, options=({}, {"merge": "eager"}))
    ]
    held = [long.but(dtype=half), long.but(seq_len=2 * n, dtype=half, passes="fwd+bwd")]
    # Where its own run on two GPUs failed.
    two_ranks = Point("ringlab", DOCUMENT, seq_len=16384, world_size=2)
    return [
        Group("implementations", dict.fromkeys(table)),
        Group("lengths", (*growing, aa_control(growing[0]))),
        Group("passes", passes),
        Group("cache and pool", reuse),
        Group("engine forward", forward),
        Group("engine backward", backward),
        *([Group("folding", folding)] if cpu else []),
        Group("memory", dict.fromkeys(held), timed=False),
        Group("two ranks", (two_ranks,), timed=False),
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


def benchmark_pattern(seq_len: int) -> Dilated:
    """The segments of document 001's script, which grow with the length.

    >>> [benchmark_pattern(n).segment_lengths for n in (2048, 8192)]
    [(512, 1024), (1024, 2048, 4096)]
    """
    shortest = max(512, seq_len // 8)
    rates = [rate for rate in (1, 2, 4) if rate * shortest < seq_len]
    lengths = [rate * shortest for rate in rates]
    return Dilated(lengths, rates, mixing="head_groups", offsets="branch")


def benchmark_summary(profile: hardware.Profile) -> list[Group]:
    """Document 001: throughput and memory per rank over n and p.

    ``throughput``: its tables, batch 2 on one rank and two, and on four. ``million``: a
    million tokens on two, untimed, on a CPU with one of the eight heads, which are
    alike. ``simulated``: eight ranks in one process, which shows no rank's memory.
    """
    first = Point(SDPA, RING_DOCUMENT, batch=2)
    ns = (2048, 4096, 8192, 16384)
    each = [
        first.but(seq_len=n, pattern=benchmark_pattern(n)) for n in (*ns, 2 * ns[-1])
    ]
    second, *_, longest = each[1:]
    points = [q for point in each[:-1] for q in grid(point, world_size=(1, 2, 4))]
    points.append(longest.but(world_size=2))
    points += grid(second, system=(CORRECT, HILBERT), world_size=(1, 2, 4))
    points += [dense(second), *grid(aa_control(second), world_size=(1, 2))]
    simulated = each[3].but(options={"simulated": 8})
    heads = ONE_HEAD if profile.kind == "cpu" else {}
    million = first.but(batch=1, seq_len=MILLION, world_size=2, **heads)
    return [
        Group("throughput", points),
        Group("simulated", (simulated,), timed=False),
        Group("million", (million,), timed=False),
    ]


def performance_comparison(profile: hardware.Profile) -> list[Group]:
    """Document 003: gathering, the ring and the plan; time, memory and bytes.

    ``one device``: its tables, where no ring code runs; the original's record has four
    heads in that of memory. ``schemes``: two and four ranks, with segments across a
    border.
    """
    first = Point(V2_COLLECTIVE, DOCUMENT)
    ns = (1024, 2048, 4096)
    both = V2_COLLECTIVE, ROBUST
    one = grid(first.but(seq_len=ns[-1]), system=both, causal=(False, True))
    one += grid(first.but(heads=4, kv_heads=4), seq_len=ns, system=both)
    one.append(aa_control(one[0]))
    plan = first.but(system="ringlab", options={"scheme": "plan"})
    ways = first, first.but(system=ROBUST), plan
    two, four = (
        [way.but(seq_len=n, world_size=ranks) for n in ns for way in ways]
        for ranks in (2, 4)
    )
    two += [point.but(causal=True) for point in two[-3:]]
    return [
        Group("one device", one),
        Group("schemes", (*two, aa_control(two[-1]), *four[-3:])),
    ]


# By the names that readers see: a pattern, and the schemes that serve it.
LINKED = {
    "dense": (Dense(), tuple(SCHEMES)),
    "LongNet's ladder": (ladder(4096), tuple(SCHEMES)),
    "window of 256 tokens": (sliding_window(tokens=256), ("plan", "ulysses")),
}


def links(profile: hardware.Profile) -> list[Group]:
    """Document 003's question over a link, about ten minutes on two CPU cores; none for
    a GPU.

    ``links, PATTERN, PASS``: the schemes between two ranks of a thread, over links of
    10, 1 and 0.2 Gbit/s and one without a limit, which ``measure.links`` makes.
    """
    if profile.kind != "cpu":
        return []
    first = Point("ringlab", Dense(), seq_len=4096, heads=4, causal=True, world_size=2)
    groups = []
    for name, passes in product(LINKED, ("fwd", "fwd+bwd")):
        pattern, schemes = LINKED[name]
        ways = [
            {"scheme": scheme, "link_gbps": gbps}
            for scheme, gbps in product(schemes, (0, 10, 1, 0.2))
        ]
        points = grid(first.but(pattern=pattern, passes=passes), options=ways)
        groups.append(Group(f"links, {name}, {passes}", points))
    return groups


def hybrid_summary(profile: hardware.Profile) -> list[Group]:
    """Document 004: the hybrid over n and p, the two shortest with batch 2 as there.
    ``long``: 32K and 64K, which it leaves for the future.
    """
    first = Point("RingDilatedAttentionHybrid", RING_DOCUMENT, world_size=2)
    points = grid(first, seq_len=doubled(16384))
    points[:2] = [point.but(batch=2) for point in points[:2]]
    first_point, *_, last = points
    points += [first_point.but(world_size=1), *grid(last, world_size=(1, 4))]
    long = grid(first, seq_len=(32768,), world_size=(1, 2, 4))
    long.append(first.but(seq_len=65536))
    return [
        Group("hybrid", (*points, aa_control(points[0]))),
        Group("long", long),
    ]


# --------------------------------------------------------------------------------------
# document 002: block-sparse attention

SPARSE_TABLE = "block sparse table"
JOURNEY = "journey"
EFFICIENCY = "efficiency"
WINDOW_LENGTHS = "window lengths"
EXTREME_LENGTHS = "extreme lengths"
RING = "ring of sixteen"
BLOCK_PATTERNS = "block patterns"
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
RING_SEGMENTS = Dilated(
    [65536, 131072, 262144], [1, 2, 4], mixing="head_groups", offsets="branch"
)  # of its script
ADAPTIVE = {"block_size": 64, "top_k": 5}  # as many blocks as the window has
KINDS = {
    "window": WINDOW,
    "strided": BlockSparse([block_patterns.Window(1), block_patterns.Strided(8)], 64),
    "local and global": local_global(1, 2, block_size=64),
    "BigBird": bigbird(1, 2, 3, block_size=64),
    "hierarchical": hierarchical([(1, 2), (8, 32)], block_size=64),
}


def a_tenth(block_size: int, seq_len: int) -> BlockSparse:
    """A window and global blocks whose density at so many positions is about a tenth."""
    count = seq_len // (64 * block_size)
    return local_global(count, 2 * count, block_size=block_size)


def session_summary(profile: hardware.Profile) -> list[Group]:
    """Document 002, about three minutes on two CPU cores.

    ``block sparse table``: its table and dense attention. ``journey``: plans built and
    looked up, the three ways of execution, and the cache off and on. ``window
    lengths``: a fixed window and dense attention over growing n, and the document's two
    rows at a long n. ``block patterns``: each kind, and blocks chosen by content.
    ``efficiency``: a tenth of all pairs in local and global blocks, beside dense
    attention and FlexAttention. ``extreme lengths``: those of its headlines, each
    alone. ``ring of sixteen``: its table of rings, sixteen ranks simulated on one
    device as there.
    """
    cpu = profile.kind == "cpu"
    ours = Point("ringlab", WINDOW, seq_len=SESSION_TOKENS, dtype=own_dtype(profile))
    # torch's sparse tensors exist in float32 only, so others are measured in float32
    # too.
    # The document has half precision.
    first = ours if cpu else ours.but(dtype=half_dtype(profile))
    both = grid(first, system=(ORIGINAL, OPTIMIZED))
    table = [*both, first, aa_control(first), dense(first)]
    exact = ours.but(dtype="float32")
    table += grid(exact, system=(TORCH_SPARSE, OPTIMIZED, "ringlab"))

    # Ways of execution, in the order of the document.
    ways = [{"blocks": way} for way in ("rows", "batched", "views")]
    built = [way | {"warm": warm} for way in ways for warm in (False, True)]
    uncached = [way | {"cache": False} for way in (ways[0], ways[-1])]
    journey = grid(ours.but(system="plan_build"), options=built)
    journey += grid(ours, options=(*ways, *uncached))
    journey.append(aa_control(ours.but(options=ways[-1])))

    longest = by_size(profile, LONG_TOKENS, 32768, 65536)
    growing = grid(ours, seq_len=doubled(longest))
    growing += [
        dense(point) for point in growing if not cpu or point.seq_len <= SESSION_TOKENS
    ]
    long = ours.but(seq_len=longest // 2 if cpu else longest)
    growing += grid(long, system=(ORIGINAL, OPTIMIZED))

    by_content = ours.but(system="adaptive", pattern=Dense(), options=ADAPTIVE)
    kinds = [*grid(ours, pattern=KINDS.values()), by_content]
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
    gpu = [dense(long), dense(tenth[-1]), long.but(system="flex")]
    tenth += [long.but(options={"results": False}), dense(long)] if cpu else gpu
    efficiency = Group(EFFICIENCY, tenth, rounds=10)

    # A CPU takes one of the eight heads, which are alike; all would take minutes.
    far = ours.but(pattern=FAR, **(ONE_HEAD if cpu else {}))
    far = grid(far, seq_len=EXTREME_TOKENS)
    extreme = Group(EXTREME_LENGTHS, far, interleave=False)

    # On a CPU its segments of 65,536 and more would take minutes for a call.
    how = {"pattern": RING_DOCUMENT, "heads": 2, "kv_heads": 2}
    if not cpu:
        how = {"pattern": RING_SEGMENTS, "dtype": first.dtype}
    ring = ours.but(options={"ring_size": 16}, **how)
    names = "RingDilatedAttentionV2", "RingDilatedAttentionProduction"
    ring = grid(ring, system=names, seq_len=EXTREME_TOKENS[1:])
    ring.append(ring[0].but(system="ImprovedDilatedAttention", options={}))
    return [*groups, efficiency, extreme, Group(RING, ring)]


# --------------------------------------------------------------------------------------
# kernels on a GPU: each way to run a pattern there, beside the fastest calls that do similar work

# One shape: 16 heads in the GPU's half precision, three branches that fold.
RUNGS = "rungs"
RUNGS_BESIDE_FA4 = "rungs beside FlashAttention-4"
RUNG_PATTERN = THREE
RUNG_TOKENS = 65536
RUNG_HEADS = 16
RUNG_HEAD_DIMS = (128, 64)
RUNG_LONGER = (262_144, 1_048_576)
RUNG_MASK = a_tenth(128, RUNG_TOKENS)
# Each way of this library by the options of the system "ringlab"; the notebook
# optimization_results describes each.
LISTS = {"backend": "triton"}
MERGED = {"backend": "sdpa"}
RUNG_WAYS = {}, LISTS, MERGED, MERGED | {"merge": "eager"}
RUNG_PASSES = {
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
    groups = []
    # torch's own kernels, on segments that lie contiguous already
    segments = [{"backend": name} for name in ("cudnn", "flash")]
    for head_dim, (name, passes) in product(RUNG_HEAD_DIMS, RUNG_PASSES.items()):
        point = first.but(head_dim=head_dim, **passes)
        points = [*grid(point, options=RUNG_WAYS), point.but(system="copying")]
        points += grid(point.but(system="contiguous_segments"), options=segments)
        points += [dense(point), aa_control(point)] if point == first else []
        groups.append(Group(f"{RUNGS}, head_dim {head_dim}, {name}", points))
    shapes = ((RUNG_TOKENS, 128), (RUNG_TOKENS, 64), (RUNG_TOKENS // 4, 128))
    for (n, head_dim), name in product(shapes, ("forward", "forward and backward")):
        point = first.but(pattern=ladder(n), seq_len=n, head_dim=head_dim)
        points = grid(point.but(**RUNG_PASSES[name]), options=RUNG_WAYS[:3])
        shape = f"{n:,} tokens, head_dim {head_dim}"
        groups.append(Group(f"rungs on a ladder, {shape}, {name}", points))
    # Memory for q, k, v, out and their gradients twice: the last results are compared
    # with the first.
    most = (profile.memory_bytes or 0) // (16 * 2 * RUNG_HEADS * RUNG_HEAD_DIMS[0])
    longer = [n for n in RUNG_LONGER if n <= most]
    for n in (RUNG_TOKENS // 16, RUNG_TOKENS // 4, *longer):
        point = first.but(seq_len=n)
        points = grid(point, options=RUNG_WAYS[:3])
        points.append(point.but(system="copying"))
        if n <= RUNG_TOKENS:  # in less than a tenth of a second
            points.append(dense(point))
        # At the longest the copying form needs the whole memory.
        title = f"rungs by length, {n:,} tokens"
        turns = n < max(RUNG_LONGER)
        groups.append(Group(title, points, interleave=turns))
    for name in ("forward", "forward and backward"):
        point = first.but(pattern=RUNG_MASK, **RUNG_PASSES[name])
        points = [*grid(point, options=RUNG_WAYS[:2]), dense(point)]
        if name == "forward":  # FlexAttention comes last, for the forward only
            points.append(point.but(system="flex"))
        groups.append(Group(f"rungs on blocks, {name}", points))
    training = first.but(seq_len=max(longer, default=RUNG_TOKENS), passes="fwd+bwd")
    points = grid(training, options=RUNG_WAYS[:3])
    groups.append(Group("rungs in memory", points, interleave=False))
    newer = profile.capability is not None and profile.capability >= (9, 0)
    if newer and (packages or peers.version_of("flash-attn-4")):
        groups += _beside_fa4(first)
    return groups


def _beside_fa4(first: Point) -> list[Group]:
    """The branches and the ladder by head_dim and pass, and dense attention."""
    groups = []
    dense_calls = []
    patterns = {"branches": RUNG_PATTERN, "a ladder": ladder(RUNG_TOKENS)}
    cudnn = {"backend": "cudnn"}
    fa4 = {"backend": "flash_attn_4"}
    for head_dim, (name, passes) in product(RUNG_HEAD_DIMS, RUNG_PASSES.items()):
        call = first.but(head_dim=head_dim, **passes)
        for kind, pattern in patterns.items():
            points = grid(call, pattern=[pattern], options=(LISTS, MERGED, fa4))
            title = f"{RUNGS_BESIDE_FA4}, {kind}, head_dim {head_dim}, {name}"
            groups.append(Group(title, points))
        short = call.but(pattern=Dense(), seq_len=RUNG_TOKENS // 4)
        dense_calls += grid(short, options=(cudnn, fa4))
    return [*groups, Group(f"{RUNGS_BESIDE_FA4}, dense", dense_calls)]


# --------------------------------------------------------------------------------------
# the landscape: attention functions of the field on one page

# A query of the sparse patterns sees 270 to 450 keys on average at every length: they
# differ in which keys, not in how many. Beside them stands LongNet's own ladder, which
# `advise` proposes.
LANDSCAPE = "landscape"
LANDSCAPE_TRAINING = "landscape training"
LANDSCAPE_ADVISED = "advised"
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
    return Dilated([ROWS_KEPT * rate for rate in rates], rates, **how)


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


BRANCHES = (
    [512, 1024, 2048],
    [1, 2, 4],
)  # rates up to the number of heads: beyond it torchscale pads the heads
LANDSCAPE_PEERS = {  # the documented function, lengths over `half`
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
            ours = grid(point.but(pattern=pattern), seq_len=[half * x for x in times])
            ours.append(ours[0].but(passes="fwd+bwd"))
            other = {"system": name, "options": {"version": version}}
            points = [q for p in ours for q in (p.but(**other), p)]
            groups.append(Group(f"beside {peers.PEERS[name].package}", points))
            causal.append(points[-2].but(causal=True))
    if causal:
        groups.append(Group("beside, causal", causal, timed=False))
    return groups


GENERATION = "generation"


def model_groups(point: Point, cpu: bool) -> list[Group]:
    """``generation``: a step from the cache over the position. ``packed documents``:
    uneven ones beside equal ones, few of them on a CPU.
    """
    step = point.but(system=GENERATION, causal=True)
    steps = []
    for n in (4096, 16384, 65536, *([] if cpu else [262_144])):
        kinds = Dense(), LANDSCAPE_WINDOW, landscape_ladder(n), ladder(n)
        steps += grid(step.but(seq_len=n - STEPS), pattern=kinds)  # segments are full
    count = 40 if cpu else 1000
    one = point.but(system="packed", seq_len=sum(document_lengths(count)), causal=True)
    kinds = Dense(), landscape_ladder(4096), LANDSCAPE_WINDOW
    ways = {"documents": count}, {"documents": count, "equal": True}
    return [
        Group(GENERATION, (*steps, aa_control(steps[0]))),
        Group("packed documents", grid(one, pattern=kinds, options=ways), rounds=6),
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

    calls = {
        name: [window.but(system=x, seq_len=n, pattern=pattern(n)) for n in ns]
        for name, (x, pattern) in systems.items()
    }
    more = [name for name in systems if name not in known]
    for name, other in product(more, systems):
        if name != other and calls[name] == calls[other]:
            raise ValueError(f"{name!r} and {other!r} are one system")
    each_dense = [dense(window.but(seq_len=n)) for n in ns]
    points = [*each_dense]
    added = []
    for first, *others in zip(each_dense, *calls.values()):
        at = dict(zip(calls, others))
        added += [first, *(at[name] for name in more)]
        short = {LONGNET, ADVISED} if first.seq_len <= NEIGHBOURS else set()
        own = known.keys() - short - {"Dense SDPA", "FlexAttention"}
        points += [point for name, point in at.items() if name in own]
    trained = [
        point.but(passes="fwd+bwd") for point in points if point.seq_len in ns[:2]
    ]
    points.append(aa_control(window.but(seq_len=ns[0])))
    if flex := calls.get("FlexAttention"):
        # Its mask is made from all pairs: 4 GiB at 65,536.
        points.append(flex[-2:][by_size(profile, -1, 0, -1)])
    half = 2048 if cpu else 8192
    ns = 8192, 32768, *([] if cpu else [131_072])
    advised = [window.but(seq_len=n, pattern=local(n)) for n in ns]
    advised.append(advised[0].but(pattern=Dense()))
    # At the next length their checks take minutes.
    advised += [point.but(passes="fwd+bwd") for point in (advised[0], advised[-1])]
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
        Group(LANDSCAPE_ADVISED, advised, rounds=5),
        *model_groups(window, cpu),
        *peer_groups(window, half),
    ]


# --------------------------------------------------------------------------------------
# selected keys: methods that choose by content, beside the best dense kernel

SELECTION_SHAPES = "selection, shape of"


def selecting_systems(profile: hardware.Profile) -> dict[str, tuple[str, dict]]:
    """The methods of the page by the names that readers see: (system of a point, its
    options). Blocks and their number are those of the papers.
    """
    names = {"MoBA": "moba", "NSA": "nsa", "DSA": "dsa"}
    names |= {"Vertical and slash": "vertical_slash"}
    systems = {name: (system, CHOICES[system][1]) for name, system in names.items()}
    if profile.kind == "cpu":
        systems["DSA"] = "dsa", CHOICES["dsa"][1] | {"top_k": 512}
    return systems


def selection(
    profile: hardware.Profile,
    *,
    seq_lens: Sequence[int] = (),
    systems: Mapping[str, tuple[str, dict]] | None = None,
) -> list[Group]:
    """Keys that are selected by content, causal, about six minutes on two CPU cores.

    ``selection, N tokens``: dense attention, each method, and its choice alone, by
    length; ``seq_lens`` in place of those for this kind of device, and without the
    rest. ``selection training``: forward and backward of those that train.
    ``selection, shape of MODEL``: dense attention, the model's own pattern, MoBA and
    NSA. A CPU has fewer points: dense attention by torch and DSA, whose lists are of
    single keys, at the shortest length, and no MoBA in the shapes of models.
    """
    cpu = profile.kind == "cpu"
    systems = selecting_systems(profile) if systems is None else systems
    own = [4096, 8192, 16384, 32768] if cpu else [8192, 16384, 32768, 65536, 131_072]
    ns = sorted({*check_ints("seq_lens", seq_lens)}) if seq_lens else own
    ours = Point("ringlab", Dense(), causal=True, dtype=own_dtype(profile))

    def methods(point: Point, left_out: Iterable[str]) -> list[Point]:
        return [
            point.but(system=system, options=options)
            for system, options in systems.values()
            if system not in left_out
        ]

    groups = []
    for n in ns:
        point = ours.but(seq_len=n)
        few = cpu and n > ns[0]
        chosen = methods(point, ["dsa"] * few)
        alone = [having(point, choice=True) for point in chosen]
        points = [point, *[dense(point)] * (not few), *chosen, *alone]
        points += [aa_control(point)] * (n == ns[0])
        groups.append(Group(f"selection, {n:,} tokens", points, rounds=5))
    if seq_lens:
        return groups
    slow = ["dsa"] * cpu + ["vertical_slash"]
    for n in [8192] if cpu else ns[:4]:
        point = ours.but(seq_len=n, passes="fwd+bwd")
        points = [point, *[dense(point)] * (not cpu), *methods(point, slow)]
        groups.append(Group(f"selection training, {n:,} tokens", points, rounds=5))
    for name, shape in SHAPES.items():
        own = ours.but(seq_len=4096 if cpu else 65536, **shape)
        point = own.but(pattern=Dense())
        points = [point, *[dense(point)] * (not cpu), own]
        if point.causal:
            points += methods(point, [*slow, *["moba"] * cpu])
        points = dict.fromkeys(points)
        groups.append(Group(f"{SELECTION_SHAPES} {name}", points, rounds=5))
    return groups


_PAGES = (
    optimization,
    benchmark_summary,
    performance_comparison,
    hybrid_summary,
    session_summary,
    landscape,
    selection,
)
SUITES: dict[str, Callable[..., list[Group]]] = {
    "kernels": kernel_suite,
    **{suite.__name__: suite for suite in (*_PAGES, links)},
}


def every_group(profile: hardware.Profile) -> list[Group]:
    """The groups of all suites."""
    return [group for suite in SUITES.values() for group in suite(profile)]
