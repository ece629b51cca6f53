"""Argument checks: what each function takes, and one clear line for everything else."""

import inspect
import re
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ringlab
import torch
from ringlab import (
    Dense,
    Dilated,
    Simulated,
    blocks,
    cache,
    checks,
    estimate,
    kernels,
    memory,
    patterns,
    ring,
)
from ringlab.checks import parse_bytes, parse_count, parse_dtype
from ringlab.nn import DecoderBlock, MultiheadAttention
from ringlab.presets import named

PACKAGE = Path(checks.__file__).parent


def one_line(call, error=(TypeError, ValueError, NotImplementedError)) -> str:
    with pytest.raises(error) as failure:
        call()
    assert "\n" not in str(failure.value) and len(str(failure.value)) < 400
    return str(failure.value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1",
        1.0,
        -1,
        True,
        2**41,
        [],
        np.array([1, 2]),
        np.True_,
        np.float64(1),
        torch.ones(3, 3),
        torch.tensor(True),
        torch.float32,
        object(),
    ],
)
def test_wrong_values_are_one_line(value):
    said = one_line(lambda: checks.check_int("n", value, most=checks.LARGEST))
    assert said.startswith("n must be a positive integer up to 2**40, got ")
    assert one_line(lambda: checks.check_choice("way", value, ("a", "b"))).endswith(
        "; known: a, b"
    )
    if value is not True:
        assert one_line(lambda: checks.check_bool("switch", value)).startswith(
            "switch must be True or False, got "
        )
    if value is not torch.float32:
        said = one_line(lambda: checks.check_float_dtype(value))
        assert said.startswith("dtype must be float64, float32, bfloat16 or float16")


Q, X = torch.zeros(1, 32, 4, 8), torch.zeros(1, 16, 32)
PATTERN, BLOCKS = Dilated([8, 16], [1, 2]), blocks.sliding_window(1, block_size=8)


def layouts(of) -> list:
    return [x(of(12), of(2)) for x in (ring.contiguous, ring.zigzag, ring.striped)]


TAKE_INTEGERS = [
    lambda of: checks.check_int("n", of(3)),
    lambda of: checks.check_int("seed", of(0), 0),
    lambda of: (checks.is_int(of(1)), checks.is_int(of(0))),
    lambda of: blocks.BlockSparse([blocks.Random(of(2), of(0))], of(8)).to_dict(),
    lambda of: blocks.BlockSparse([blocks.Window(of(1))], 8).density(of(64)),
    lambda of: Simulated(of(4), of(2)),
    lambda of: Dilated([of(4)], [of(2)]),
    lambda of: ringlab.OOMBackoff((of(8), of(4))),
    lambda of: ring.hilbert(of(4), of(8), of(2)),
    lambda of: ring.uneven([of(3), of(4)]),
    layouts,
    lambda of: [layout.ranges(of(1)) for layout in layouts(of)],
    lambda of: (
        ring.plan_rank(
            ring.Problem(Dilated([6], [2]), layouts(of)[1], False, 2, 2), of(1)
        ).received
    ),
    lambda of: ringlab.Adaptive(of(8), of(2)).pairs(of(64)),
    lambda of: estimate(
        Dense(), seq_len=of(64), heads=of(2), head_dim=of(8), ranks=of(2)
    ),
    lambda of: MultiheadAttention(of(32), of(4), PATTERN, num_kv_heads=of(2)),
    lambda of: ringlab.RingDilatedAttentionV2([4], [2], ring_size=of(2)).group,
]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_integers_of_every_kind_are_taken_as_pythons(kind):
    for call in TAKE_INTEGERS:
        assert repr(call(kind)) == repr(call(int))
    assert checks.is_real(-1.5) and not checks.is_real(True)


WRONG = [
    None,
    "x",
    1.5,
    float("nan"),
    -1,
    0,
    True,
    10**30,
    b"x",
    [],
    ["x"],
    [None],
    {},
    {1},
    ("x", 1),
    int,
    object(),
    np.array([1, 2]),
    torch.ones(2, 2),
]
SHAPE = {"seq_len": 32, "heads": 4, "head_dim": 8, "batch": 1, "kv_heads": 2}
CACHE = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "max_seq_len": 32}
ENGINE = {
    "scheme": "auto",
    "layout": "contiguous",
    "backend": "auto",
    "execution": ringlab.Execution(),
}
TENSORS = {"q": Q, "k": Q, "v": Q}
PARTS = {
    blocks.Window: {"before": 1, "after": 1},
    blocks.Strided: {"rate": 1, "steps": 1},
    blocks.Segment: {"length": 1, "rate": 1},
    blocks.Global: {"count": 1, "rows": True, "columns": True},
    blocks.Random: {"count": 1, "seed": 0},
    blocks.Coarse: {"stride": 1, "reach": 1},
    blocks.Given: {"rows": ("1",)},
}
CHOICE = {"device": "cpu", "dtype": torch.float32, "head_dim": 8, "causal": False}
CHOICE["backward"] = False


def block_sparse(part):
    return lambda **given: blocks.BlockSparse([part(**given)], 8)


def fitting(call, *others: dict, **given):
    """A call, and a value that fits for each argument: its default, or a given one."""
    arguments = inspect.signature(call).parameters.values()
    # Rows of measurements, and what they say, ``advise`` gets from other code alone.
    values = {x.name: x.default for x in arguments if x.default not in (x.empty, ())}
    for more in (*others, given):
        values |= more
    values.pop("trained", None)
    return call, values


FITTING = [
    *(fitting(block_sparse(part), given) for part, given in PARTS.items()),
    fitting(
        ringlab.Selected,
        indices=torch.zeros(1, 1, 32, 1, dtype=torch.int64),
        granularity=8,
        window=4,
        first=1,
    ),
    fitting(ringlab.Adaptive, block_size=8, top_k=2),
    fitting(ringlab.Adaptive(8, 2).pairs, n=32),
    fitting(ringlab.AdaptiveBlockSparse, head_dim=8, block_size=8, top_k=2),
    fitting(ringlab.AdaptiveBlockSparse(8, 8, 2), TENSORS, is_causal=False),
    fitting(ringlab.AdaptiveBlockSparse(8, 8, 2).logits, q=Q, k=Q),
    fitting(ringlab.adaptive_attention, TENSORS, pattern=ringlab.Adaptive(8, 2)),
    fitting(ringlab.BlockSparse, parts=[blocks.Window(1)], block_size=8),
    fitting(BLOCKS.pairs, n=32),
    fitting(BLOCKS.density, n=32),
    fitting(BLOCKS.with_density, density=0.5, n=32),
    fitting(blocks.sliding_window, before=1, block_size=8),
    fitting(blocks.sliding_window, tokens=8),
    fitting(blocks.hierarchical, levels=[(1, 1)]),
    fitting(blocks.bigbird, before=1, count=1, random=1, block_size=8),
    fitting(blocks.from_mask, mask=torch.ones(4, 4) > 0, block_size=8),
    fitting(Dilated, segment_lengths=[4], dilation_rates=[2]),
    *(
        fitting(lambda **fields: patterns.from_dict(fields), pattern.to_dict())
        for pattern in (PATTERN, BLOCKS)
    ),
    fitting(patterns.from_dict, data=PATTERN.to_dict()),
    fitting(patterns.show, pattern=PATTERN, n=32, width=8),
    fitting(ringlab.Execution),
    fitting(ringlab.OOMBackoff, tiles=(8, 4)),
    fitting(Simulated, ranks=2),
    fitting(ringlab.attention, TENSORS, pattern=PATTERN),
    fitting(ringlab.attention, TENSORS, pattern=BLOCKS, group=Simulated(2)),
    fitting(
        estimate,
        SHAPE,
        ENGINE,
        pattern=PATTERN,
        dtype=torch.float32,
        causal=False,
        passes="fwd",
        ranks=1,
        profile=None,
    ),
    fitting(
        estimate,
        SHAPE,
        ENGINE,
        pattern=BLOCKS,
        ranks=2,
        hosts=(),
        exchange_dtype=torch.bfloat16,
        profile="gtx1080",
    ),
    fitting(ringlab.KVCache, CACHE, pattern=PATTERN),
    fitting(ringlab.cache_bytes, CACHE, pattern=BLOCKS, max_crop=1, ranks=2),
    fitting(ringlab.attention, TENSORS, pattern=PATTERN, causal=True),
    fitting(
        ringlab.longest,
        pattern=PATTERN,
        memory_bytes=1 << 20,
        heads=4,
        head_dim=8,
        ranks=1,
    ),
    fitting(ringlab.ladder, seq_len=1 << 20),
    fitting(
        ringlab.advise,
        SHAPE,
        profile="gtx1080",
        ranks=2,
        pattern=Dense(),
        estimates=False,
    ),
    fitting(
        MultiheadAttention, embed_dim=32, num_heads=4, pattern=PATTERN, num_kv_heads=2
    ),
    fitting(MultiheadAttention(32, 4, PATTERN), x=X),
    (kernels.choose, CHOICE | {"backend": "auto"}),
    (kernels.table, CHOICE),
    *(
        fitting(layout, n=32, ranks=2)
        for layout in (ring.contiguous, ring.zigzag, ring.striped)
    ),
    fitting(ring.uneven, sizes=[16, 16]),
    fitting(ring.hilbert, height=4, width=8, ranks=2),
    fitting(ring.group_size, group=Simulated(2)),
    fitting(memory.MemoryPool, max_bytes=64, threshold_bytes=0),
    fitting(memory.MemoryPool().lend, shape=(2,)),
    fitting(cache.PatternCache, max_bytes=64, max_entries=8),
    *(
        fitting(system, segment_lengths=[16], dilation_rates=[2])
        for system in (
            ringlab.DilatedAttention,
            ringlab.RingDilatedAttentionV2Flash,
            ringlab.RingDilatedAttentionHilbertGPUOptimized,
        )
    ),
    fitting(ringlab.DilatedAttention([8, 16], [1, 2]), TENSORS, is_causal=False),
    *(
        fitting(ringlab.BlockSparseOptimized, more)
        for more in (
            {"segment_lengths": [16], "dilation_rates": [2], "block_size": 8},
            {"density": 0.5, "block_size": 8},
            {"pattern": BLOCKS},
        )
    ),
    fitting(ringlab.BlockSparseOptimized(density=0.5, block_size=8).pattern_for, n=32),
]


@pytest.mark.parametrize(
    "call, given", FITTING, ids=[str(i) for i in range(len(FITTING))]
)
def test_every_argument_takes_a_wrong_value_or_refuses_it_in_one_line_of_the_library(
    call, given
):
    call(**given)
    found = []
    for name, value in ((name, value) for name in given for value in WRONG):
        try:
            call(**given | {name: value})
        except Exception as error:  # noqa: BLE001  whichever comes is judged
            last = traceback.extract_tb(error.__traceback__)[-1]
            own = PACKAGE in Path(last.filename).parents and last.line.startswith(
                "raise "
            )
            if not own or "\n" in str(error):
                found.append(
                    f"{name}={checks.short_repr(value)}: {type(error).__name__}: {error}"
                )
    assert found == []


def test_all_public_callables_are_tried_with_wrong_values():
    results = {
        "Advice",
        "Estimate",
        "Evidence",
    }  # what calls return, and rows of the report
    no_arguments = {"Dense", "Pattern"}
    modules = {
        name for name in ringlab.__all__ if inspect.ismodule(getattr(ringlab, name))
    }
    tried = {call for call, _ in FITTING}
    alike = {
        name
        for name in ringlab.__all__
        if name.startswith(("Ring", "Improved", "BlockSparse"))
    }
    left = set(ringlab.__all__) - results - no_arguments - modules - alike
    assert [name for name in left if getattr(ringlab, name) not in tried] == []


T, TOP2 = torch.zeros(1, 20, 2, 8), ringlab.Adaptive(8, 2)
OTHER = {
    "seq_len": 4096,
    "ranks": 2,
    "layout": ring.zigzag(64, 2),
}  # a layout of another length
X = torch.randn(1, 8, 16)


def taken_over(**options):
    theirs = torch.nn.MultiheadAttention(16, 4, **{"batch_first": True} | options)
    return MultiheadAttention.from_torch(theirs, Dense())


def layer(**more):
    return MultiheadAttention(16, 4, Dense(), **more)


MODULE, LAYER = (ringlab.DilatedAttention([16], [2]), layer(dropout=0.0))
PROJECTED = ringlab.RingDilatedAttentionSDPA(16, 4, [16], [2])


def published(**more):
    return ringlab.DilatedAttention([16], [2], **more)


def adaptive(*more, **options):
    return ringlab.adaptive_attention(T, T, T, *more, **options)


REFUSED = {
    TypeError: [
        (
            lambda: memory.MemoryPool().lend((2,), "float"),
            "dtype must be a torch.dtype, .* got 'float'",
        ),
        (
            lambda: memory.MemoryPool().lend(2.5),
            "a shape must be a sequence of integers, got 2.5",
        ),
        (
            lambda: ringlab.AdaptiveBlockSparse(8, group=object()),
            "group must be a ProcessGroup, a DeviceMesh",
        ),
        (lambda: adaptive(Dense()), "must be a ringlab.Adaptive, got Dense"),
        (
            lambda: layer(dropout=0.1),
            "cannot honour 'dropout': attention dropout is not supported",
        ),
        (
            lambda: layer(config="auto"),
            "MultiheadAttention cannot honour 'config': removed: the defaults are what",
        ),
        (
            lambda: published(config="auto"),
            "DilatedAttention cannot honour 'config': pass its values by name",
        ),
        (lambda: LAYER(X, X, X, need_weights=True), "it computes no weights"),
        (
            lambda: LAYER(X, attn_mask=torch.zeros(8, 8)),
            "'attn_mask': masks are not arguments",
        ),
        (
            lambda: LAYER(X, attn_mask=torch.eye(8), is_causal=True),
            "'attn_mask': masks are not arguments",
        ),
        (
            lambda: LAYER(X, attn_mask=torch.ones(8, 8).triu(1).byte()),
            "'attn_mask': masks are not arguments",
        ),
        (
            lambda: MultiheadAttention.from_torch(LAYER, Dense()),
            "takes a torch.nn.MultiheadAttention",
        ),
        (
            lambda: published(sparsity_ratio=0.9),
            "'sparsity_ratio': it changed nothing in the original",
        ),
        (lambda: published(dropout=0.1), "attention dropout is not supported"),
        (lambda: published(embed_dim=64), "'embed_dim': .*MultiheadAttention"),
        (lambda: published(use_hilbert=True), "'use_hilbert': .*leave it out"),
        (lambda: PROJECTED(X, 8), "takes x, the others by name"),
        (lambda: published(chunk=64), "'chunk': known: segment_lengths, .*, group$"),
        (
            lambda: published(block_size=64),
            "'block_size': it belongs to the block-sparse systems",
        ),
        (
            lambda: published(is_causal=True),
            "'is_causal': forward takes is_causal=True",
        ),
        (
            lambda: MODULE(T, T, T, attention_mask=T),
            "DilatedAttention cannot honour 'attention_mask': masks are not arguments",
        ),
        (
            lambda: MODULE(T, T, T, causal=True),
            "'causal': forward takes is_causal=True",
        ),
        (
            lambda: estimate(Dense(), seq_len=64, batch_size=1),
            "^estimate: got an unexpected .* 'batch_size'; it takes batch, heads, ",
        ),
    ],
    ValueError: [
        (lambda: memory.MemoryPool().lend((2, -3)), r"got \(2, -3\)"),
        (lambda: memory.MemoryPool(waste=0.5), "memory pool: .* got"),
        (lambda: cache.PatternCache(max_entries=-1), "must be >= 0"),
        (lambda: Dilated([4, 8], [1]), "differ in length"),
        (lambda: Dilated([], []), r"segment_lengths must be a list of .*, got \[\]"),
        (lambda: Dilated([4], [5]), "rate 5 exceeds its segment length 4"),
        (
            lambda: Dilated([4.0], [1]),
            "segment_lengths must be a positive integer up to 2..40, got 4.0",
        ),
        (lambda: Dilated([10**5000], [1]), "got a int too long to show"),
        (lambda: Dilated([4], [1], "mean"), "unknown mixing 'mean'"),
        (lambda: patterns.from_dict({"kind": "ring"}), "unknown pattern kind 'ring'"),
        (
            lambda: patterns.from_dict({"kind": "dilated"}),
            "'dilated': .*missing 2 .*'segment_lengths'",
        ),
        (
            lambda: ring.contiguous(8, 10**9),
            "ranks must be a positive integer up to 2..20, got 1000000000",
        ),
        (
            lambda: ringlab.longest(Dense(), 10**30),
            "in bytes must be .* up to 2..50, got 10000",
        ),
        (
            lambda: estimate(Dense(), seq_len=64, heads=10**30),
            "heads . head_dim must be .* up to 2..35",
        ),
        (
            lambda: ringlab.Adaptive(8, 0),
            "top_k must be a positive integer up to 2..40, got 0",
        ),
        (
            lambda: ringlab.AdaptiveBlockSparse(0),
            "head_dim must be a positive integer up to 2..40, got 0",
        ),
        (
            lambda: ringlab.AdaptiveBlockSparse(4, 8, 2)(T, T, T),
            "the scorer is for head_dim 4, got 8",
        ),
        (
            lambda: adaptive(ringlab.Adaptive(8, 4)),
            "top_k 4 exceeds the 3 blocks of n = 20",
        ),
        (
            lambda: adaptive(TOP2, torch.zeros(1, 2, 3, 2)),
            r"z must be \(batch, heads, blocks, blocks\) = \(1, 2, 3, 3\), floats on cpu; got \(1, 2, 3, 2\)",
        ),
        (lambda: adaptive(TOP2, T.long()), "torch.int64 on cpu"),
        (lambda: adaptive(TOP2, scale=float("nan")), "a finite number"),
        (lambda: adaptive(TOP2, backend="fast"), "unknown backend 'fast'"),
        (lambda: layer(rotary_base=-1), "rotary_base must be a positive number"),
        (
            lambda: MultiheadAttention(12, 4, Dense(), rotary_base=10),
            "needs an even head_dim, got 3",
        ),
        (
            lambda: DecoderBlock(16, 4, Dense(), hidden_dim=0),
            "hidden_dim must be a positive",
        ),
        (lambda: layer(batch_first=False), "batch_first must be True"),
        (
            lambda: LAYER(X, X, X + 1),
            "must be one tensor: the layer is self-attention alone",
        ),
        (
            lambda: LAYER(X, key_padding_mask=torch.eye(1, 8) > 0),
            "must hide the end of rows: pad on the right",
        ),
        (
            lambda: LAYER(X, key_padding_mask=torch.ones(1, 8)),
            "must be of bools, or of 0 and -inf",
        ),
        (
            lambda: LAYER(X, key_padding_mask=torch.ones(8) > 0),
            "key_padding_mask must be a tensor .1, 8., got",
        ),
        (lambda: taken_over(dropout=0.1), "attention dropout 0.1 is not supported"),
        (lambda: taken_over(kdim=8), "takes no layer with kdim"),
        (lambda: taken_over(batch_first=False), "make it with batch_first=True"),
        (
            lambda: DecoderBlock(16, 4, Dense())(
                torch.ones(1, 8, 16), cu_seqlens=[0, 9]
            ),
            "ascend from 0",
        ),
        (
            lambda: layer(num_kv_heads=3),
            "num_heads must divide embed_dim and num_kv_heads num_heads, got 16, 4, 3",
        ),
        (lambda: layer(layout="zigzag"), "a layout is for several ranks"),
        (lambda: layer(scheme="ring"), "a scheme is for several ranks"),
        (
            lambda: LAYER(torch.randn(1, 8, 12)),
            r"x must be \(batch, seq, 16\), got shape \(1, 8, 12\)",
        ),
        (
            lambda: published(memory_pool_threshold_mb=float("nan")),
            "finite and not negative",
        ),
        (
            lambda: ringlab.RingDilatedAttentionV2(64, 8, [16], [2]),
            "segment_lengths must be .*, got 64",
        ),
        (
            lambda: ringlab.RingDilatedAttentionSDPA(18, 4, [16], [2]),
            "num_heads must divide embed_dim, got 4 and 18",
        ),
        (
            lambda: ringlab.RingDilatedAttentionHilbertGPUOptimized(16, 4, [8], [1])(
                X, is_causal=True
            ),
            "not in time order",
        ),
        (lambda: PROJECTED(X.int()), "dtype must be float64, .*, got torch.int32"),
        (lambda: PROJECTED(X.half()), "x is torch.float16, the layer torch.float32"),
        (lambda: PROJECTED(X.double()), "x is torch.float64, the layer"),
        (lambda: published(device=3.5), "device must be a torch.device or its name"),
        (
            lambda: published(dtype=torch.float32)(*[T.double()] * 3),
            "pass dtype=torch.float64",
        ),
        (
            lambda: published().type(torch.int32),
            "dtype must be float64, .*, got torch.int32",
        ),
        (lambda: ringlab.longest(Dense(), "80"), "a number with a unit, as"),
        (lambda: named("windw"), "unknown pattern 'windw'; known: dilated, "),
        (lambda: named("dense", before=1), "'dense' takes no before"),
        (lambda: parse_bytes("8G"), "with a unit, as 80GiB or 80GB, got '8G'"),
        (lambda: parse_count("1_0e999"), "as 131072, 128K, 1M or 1e6, got '1_0"),
        (lambda: parse_dtype("half"), "unknown dtype 'half'; known: float64, "),
        (
            lambda: estimate(Dense(), **OTHER),
            "^the layout is for 64 positions, the sequence has 4096$",
        ),
    ],
    NotImplementedError: [(lambda: published(ring_size=2), "ring_size must be 1")],
}


@pytest.mark.parametrize(
    "error, call, why",
    [(error, *row) for error, rows in REFUSED.items() for row in rows],
)
def test_what_is_wrong_is_refused_by_name_in_one_line(error, call, why):
    said = one_line(call, error)
    assert re.search(why, said), said


ON_A_DEVICE = [
    *((call, given) for call, given in FITTING if "device" in given),
    (kernels.choose, {"dtype": torch.float32, "head_dim": 8}),
]
ON_A_DEVICE = [x for x in ON_A_DEVICE if x[0] is not ringlab.cache_bytes]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), "xpu"])
def test_a_device_that_is_not_there_is_one_line(device):
    """A build of torch for CUDA answers otherwise than one for CPUs: it looks for a
    driver."""
    for call, given in ON_A_DEVICE:
        line = one_line(partial(call, **given | {"device": device}))
        no_device = device == 0 and torch.version.cuda is None  # in a build for CPUs
        assert (
            "torch finds no GPU" in line
            or "torch cannot use 'xpu'" in line
            or (no_device and "device must be a torch.device or its name" in line)
        )


def test_ranges_generators_and_numpys_numbers_are_taken():
    assert (
        ring.uneven(x for x in [3, 4])
        == ring.uneven([3, 4])
        == ring.uneven(dict(a=3, b=4).values())
    )
    assert (
        cache.PatternCache(max_bytes=np.int64(64), max_entries=float("inf")).max_bytes
        == 64
    )
    assert memory.MemoryPool(np.int64(64), waste=np.float32(2)).waste == 2
    for names in (["auto"], ("auto",)):
        assert (
            kernels.choose("cpu", torch.float32, np.int64(8), backend=names).kernel
            is not None
        )
        assert (
            estimate(Dense(), seq_len=64, heads=1, head_dim=8, backend=names).peak_bytes
            > 0
        )
        assert (
            ringlab.attention(
                Q, Q, Q, PATTERN, backend=names, scale=np.float32(0.5)
            ).shape
            == Q.shape
        )
    assert ringlab.Adaptive(8, 2).count(np.int64(64)) == 8
    assert ringlab.OOMBackoff(range(512, 0, -256)).tiles == (512, 256)
    assert (
        ringlab.BlockSparseOptimized(
            range(16, 33, 16), range(1, 3), block_size=8
        ).pattern.block_size
        == 8
    )
    assert MultiheadAttention(32, 4, PATTERN, bias=0).q_proj.bias is None
    assert patterns.show(PATTERN, 32, head=2, heads=4).count("\n") == 31
