"""The specification: pattern x path x dtype x causal x both passes x ranks, against the
float64 reference.
"""

import random
from dataclasses import replace

import matrix
import pytest
from matrix import (
    BF16,
    BLOCK_SPARSE,
    DILATED,
    F16,
    F32,
    F64,
    LADDER,
    PATTERNS,
    Case,
    all_wrong,
    paths,
)
from random_cases import seeds
from ringlab import Adaptive, BlockSparse, Dense, blocks
from ringlab.ring import SCHEMES, contiguous

ADAPTIVE = Adaptive(8, 3)
SHAPES = [
    {"n": 101, "heads": 2, "kv_heads": 2},
    {"n": 97, "batch": 2, "heads": 4, "kv_heads": 2},
]
BOTH = pytest.mark.parametrize("causal", [False, True])


@BOTH
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_path(pattern, causal):
    """In float64, causal also in float32; the last block and segment are short."""
    assert not all_wrong(
        paths(Case(pattern, dtype=F64, causal=causal, **SHAPES[causal]))
    )
    assert not causal or not all_wrong(
        paths(Case(pattern, dtype=F32, causal=causal, **SHAPES[0]))
    )


HALVED = (
    (Dense(), BF16, False),
    (Dense(), F16, True),
    (DILATED[0], BF16, True),
    (DILATED[0], F16, False),
    (DILATED[1], BF16, False),
    (DILATED[1], F16, True),
    (BLOCK_SPARSE[0], BF16, True),
    (BLOCK_SPARSE[0], F16, False),
    (BLOCK_SPARSE[9], BF16, True),
    (BLOCK_SPARSE[9], F16, True),
)


@pytest.mark.parametrize("pattern, dtype, causal", HALVED, ids=str)
def test_every_path_in_half_precision(pattern, dtype, causal):
    """At most twice the error of one dense call."""
    if isinstance(pattern, BlockSparse):  # the last block is of 5 rows
        pattern = replace(pattern, block_size=32)
    assert not all_wrong(paths(Case(pattern, 229, dtype, causal)))


@pytest.mark.parametrize(
    "pattern", [Dense(), *DILATED, blocks.local_global(1, 1, block_size=1)], ids=str
)
def test_every_length(pattern):
    cases = [
        Case(pattern, n, causal=n % 2 > 0, d=8)
        for n in (*range(1, 21), 36, 37, 40, 41, 64, 127)
    ]
    way = "batched" if isinstance(pattern, BlockSparse) else "gather"
    assert not all_wrong(
        replace(case, way=way) if case.n % 3 == 0 else case for case in cases
    )


@BOTH
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_blocks_chosen_by_content(dtype, weighted, causal):
    shapes = [*SHAPES, {"n": 96, "batch": 2, "heads": 2, "kv_heads": 1}]
    cases = [
        Case(ADAPTIVE, dtype=dtype, causal=causal, weighted=weighted, **shape)
        for shape in shapes
    ]
    if dtype == F64:
        cases += [
            replace(cases[1], pattern=Adaptive(8, k), scale=s)
            for k in (1, 3, 13)
            for s in (0.7, -0.3)
        ]
        cases += [replace(cases[1], scale=0.0)] if weighted else []
    assert not all_wrong(how for case in cases for how in paths(case))


@BOTH
@pytest.mark.parametrize("scheme", [*SCHEMES, "auto"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks(ranks, scheme, causal):
    """Every pattern in turn over every layout, in float64, and every third case in
    float32.
    """
    cases = []
    for layout in [*matrix.layouts(101, ranks), *matrix.layouts(59, ranks)]:
        for pattern in [p for p in PATTERNS if matrix.fits(p, layout, causal, scheme)]:
            heads, kv_heads = [(4, 2), (6, 2), (5, 1), (4, 4)][len(cases) % 4]
            more = {"batch": 1 + len(cases) % 2, "lse_cotangent": len(cases) % 5 > 0}
            more["sinks"] = len(cases) % 3 == 1
            cases.append(
                Case(
                    pattern,
                    layout.n,
                    F64 if len(cases) % 3 else F32,
                    causal,
                    heads=heads,
                    kv_heads=kv_heads,
                    d=8,
                    layout=layout,
                    scheme=scheme,
                    **more,
                )
            )
    assert not all_wrong(cases[:: 1 + len(cases) // 7])


@BOTH
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_blocks_chosen_by_content(ranks, weighted, causal):
    n = 16 * ranks if ranks > 1 else 37
    for dtype in (F64, F32, BF16):
        case = Case(
            ADAPTIVE,
            n * (4 if dtype == BF16 else 2),
            dtype,
            causal,
            batch=2,
            weighted=weighted,
        )
        assert not matrix.wrong(replace(case, layout=contiguous(case.n, ranks))), dtype


@pytest.mark.parametrize(
    "pattern", [Dense(), LADDER, blocks.local_global(1, 1, block_size=32)], ids=str
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_in_half_precision(scheme, pattern):
    cases = [
        Case(pattern, 256, dtype, causal, layout=contiguous(256, 4), scheme=scheme)
        for dtype, causal in ((BF16, True), (F16, False))
    ]
    assert not all_wrong(
        c for c in cases if matrix.fits(pattern, c.layout, c.causal, scheme)
    )


@pytest.mark.parametrize("seed", range(5))
def test_random_cases(seed):
    """Every axis at random, with scales of either sign and zero."""
    rng, few = random.Random(seed), 0
    for i in seeds(4):
        case = matrix.any_case(rng)
        if case.dtype in (F32, F64):  # few sinks are no sample of rounding in half
            case = replace(case, sinks=i % 3 == 0)
        if (
            case.dtype in (BF16, F16)
            and int((matrix.judged(case)[3]["dq"] != 0).any(-1).sum()) < 64
        ):
            case, few = (
                replace(case, dtype=F32),
                few + 1,
            )  # twice a typical rounding needs a sample of rows
        assert not (missed := matrix.wrong(case)), (case, missed)
    assert few <= 0.5 * len(seeds(4))
