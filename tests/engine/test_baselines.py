"""Ways of computing that the engine is measured against: their values by the float64
reference, forward and backward, what they multiply, and refusals.
"""

from dataclasses import replace

import pytest
import torch
from matrix import (
    BF16,
    BLOCK,
    BLOCK_SPARSE,
    DILATED,
    F16,
    F32,
    F64,
    STAINED,
    Case,
    all_wrong,
    drawn,
    wrong,
)
from refusals import refused
from ring_cases import warnings_of_bsr
from ringlab import Dense, Execution, baselines, blocks, reference
from ringlab.measure import Point, systems
from ringlab.memory import MemoryPool
from ringlab.ring.launch import launch
from test_blocks import Products

SPARSE = BLOCK_SPARSE[0]
WAYS = {True: ("rows", "batched", "bsr", "views"), False: ("gather", "views")}


def cases(pattern, causal, dtype):
    case = Case(pattern, 101, dtype, causal, batch=2)
    for way in WAYS[pattern in BLOCK_SPARSE]:
        if way != "bsr" or dtype in (F32, F64):
            yield replace(case, way=way, execution=Execution(results=STAINED))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", [Dense(), *DILATED, *BLOCK_SPARSE], ids=str)
def test_every_way_is_the_reference(pattern, causal):
    assert not all_wrong(
        case for dtype in (F64, F32) for case in cases(pattern, causal, dtype)
    )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("pattern", [DILATED[0], DILATED[3], SPARSE], ids=str)
def test_every_way_in_half_precision(pattern, dtype):
    assert not all_wrong(cases(pattern, True, dtype))


@pytest.mark.parametrize("way, pattern", [("gather", DILATED[0]), ("rows", SPARSE)])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_tiles_pools_scales_and_memory(way, pattern, scale):
    pool = MemoryPool(threshold_bytes=0)
    case = Case(pattern, 101, F64, True, scale=scale, memory="packed", way=way)
    how = Execution(pool=pool, tile=20, cache=False)
    assert not wrong(replace(case, execution=how, backend="eager"))
    assert pool.stats().borrows


@pytest.mark.parametrize(
    "error, way, pattern, dtype, why",
    [
        (ValueError, "gather", SPARSE, F32, "'gather' does not serve"),
        (ValueError, "rows", Dense(), F32, "'rows' does not serve"),
        (ValueError, "flex", SPARSE, F32, "unknown way 'flex'"),
        (NotImplementedError, "bsr", SPARSE, BF16, "takes float32, float64, not bf"),
        (NotImplementedError, "bsr", SPARSE, F16, "takes float32, float64, not float"),
    ],
)
def test_what_a_way_does_not_serve_is_refused(error, way, pattern, dtype, why):
    q = torch.ones(1, 64, 2, 8, dtype=dtype)
    with refused(error, match=why):
        baselines.attend(q, q, q, pattern, way)
    with refused(ValueError, match="agree in seq"):
        baselines.attend(q, q[:, :9], q[:, :9], Dense(), "views")


# --------------------------------------------------------------------------------------
# torch.sparse


def test_bsr_multiplies_by_torch_sparse_and_forms_seen_blocks_alone():
    b, h, n = 2, 4, 1021
    case = Case(SPARSE, n, F32, batch=b, heads=h, way="bsr")
    q, k, v = (t.requires_grad_() for t in drawn(case)[0])
    with Products() as forward:
        out, _ = case.call(q, k, v)
    with Products() as backward:
        out.backward(torch.ones_like(out))
    assert (forward.sparse, backward.sparse) == (b * h, 0)
    # The scores of a head, or a result.
    formed = max(int(SPARSE.blocks(n).sum()) * BLOCK**2, q.numel())
    assert max(forward.largest, backward.largest) <= formed < n**2 / 4


def test_bsr_prints_no_warning():
    """In a process that has printed none: torch warns of its sparse tensors once."""
    assert launch(warnings_of_bsr, 1) == [[]]


# --------------------------------------------------------------------------------------
# FlexAttention: one shape and dtype, so that one kernel is compiled


def by_flex(pattern, causal=False):
    """With AVX2, torch's is wrong for blocks of 8."""
    wide = replace(pattern, block_size=16)
    case = Case(wide, 205, F32, causal)
    return case, baselines.flex_prepare(wide, 205, causal)


@pytest.fixture(scope="module")
def flex():
    """Skips where torch has no compiled FlexAttention for these."""
    if why := baselines.refusal("cpu", F32, 16, 16):
        pytest.skip(why)


@pytest.mark.parametrize("causal", [False, True])
def test_flex_is_the_reference(flex, causal):
    for pattern in BLOCK_SPARSE:
        case, mask = by_flex(pattern, causal)
        q, k, v = drawn(case)[0]
        out = baselines.flex_forward(q, k, v, mask, 0.25)
        want, _ = reference.attention(q, k, v, case.pattern, causal=causal)
        assert reference.error(out, want, 1.0) <= 5e-6


def test_flex_is_compiled_whoever_looks_on(flex, recwarn):
    """Under a dispatch mode, or called out of a graph, torch would form all scores, and
    warn once at most.
    """
    case, mask = by_flex(SPARSE)
    q, k, v = drawn(case)[0]
    # Compiled, if no test before did it: the compiler forms small products of its own.
    want = baselines.flex_forward(q, k, v, mask, 0.25)
    with Products() as mode:
        out = baselines.flex_forward(q, k, v, mask, 0.25)
    assert torch.equal(out, want) and mode.largest <= q.numel() < 4 * 205**2
    assert not [w for w in recwarn if "flex_attention" in str(w.message)]


@pytest.mark.parametrize(
    "dtype, size, why",
    [
        (F64, 16, "takes float32, float16, bfloat16, not float64"),
        (F32, 8, "needs a block size that is a multiple of 16"),
    ],
)
def test_flex_says_why_it_cannot_run(dtype, size, why):
    assert why in baselines.refusal("cpu", dtype, 64, size)


def test_flex_without_a_compiler_or_headers_says_so(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda name: None)
        patch.delenv("CXX", raising=False)
        window = blocks.sliding_window(1, block_size=16)
        with refused(NotImplementedError, match=r"FlexAttention needs a C\+\+ comp"):
            systems.build(Point("flex", window, seq_len=64), "cpu")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "needs Python's headers" in baselines.refusal("cpu", F32)
