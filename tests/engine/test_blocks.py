"""Block-sparse patterns: what they show, the calls they become, and one softmax per row in every way of running."""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import STAINED, Case, engine_results, errors, oracle_results
from ringlab import (
    BlockSparseOptimized,
    BlockSparseRingDilatedAttention,
    BlockSparseTorchSparse,
    Execution,
    attention,
    block_patterns,
    patterns,
    reference,
)
from ringlab.block_patterns import BlockSparse, Coarse, Given, Global, Random, Segment, Strided, Window
from ringlab.cost import count_pairs
from ringlab.engine import blocks, torch_sparse
from ringlab.engine.blocks import Cuts
from ringlab.measure import Point, systems
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 8
PATTERNS = [
    block_patterns.local_global(1, 1, block_size=SIZE),
    block_patterns.bigbird(1, 1, 2, block_size=SIZE),
    block_patterns.sliding_window(3, block_size=SIZE),
    BlockSparse([Window(2, 0)], SIZE),
    block_patterns.hierarchical([(1, 1), (4, 8)], block_size=SIZE),
    BlockSparse([Window(0), Strided(4, 2)], SIZE),
    BlockSparse([Strided(3)], SIZE),
    BlockSparse([Segment(4), Segment(8, 2)], SIZE),
    BlockSparse([Random(2, seed=1)], SIZE),
    BlockSparse([Global(2, rows=False)], SIZE),
    block_patterns.sliding_window(1, block_size=SIZE) | BlockSparse([Random(1)], SIZE),
    block_patterns.from_mask(torch.rand(13, 13, generator=torch.Generator().manual_seed(0)) < 0.3, block_size=SIZE),
]
FLEX = [BlockSparse(p.parts, 16) for p in PATTERNS[:-1]]  # torch's CPU kernel takes multiples of 16
TILED = ["views", "batched", "rows"]  # ways that are calls of kernels
WAYS = [*TILED, "bsr"]
REFUSED = torch_sparse.refusal("cpu", torch.float32)
needs_flex = pytest.mark.skipif(REFUSED is not None, reason=f"FlexAttention {REFUSED}")
SHAPES = [(1, 2, 2, 101), (3, 4, 2, 97)]  # (batch, heads, K/V heads, n): odd lengths, a short last block


def calls_of(pattern, n, causal=False, way="views", lower_right=False):
    """The calls of a plan: those on strided rows as runs, those on gathered ones as picked."""
    plan = blocks.make_plan(pattern, n, 1, 1, causal, way, lower_right)
    strided = [c for c in plan.calls if c.k.index is None]
    runs = [
        SimpleNamespace(call=c, rows=c.q.rows, keys=c.k.rows, nodes=c.nodes, query=(c.q.first, c.q.node_step),
                        key=(c.k.first, c.k.node_step), causal=c.causal, first=c.first,
                        shared=c.nodes > 1 and c.q.node_step == 0) for c in strided]  # fmt: skip
    picked = [
        SimpleNamespace(rows=c.q.rows, queries=c.q.index[:, 0], keys=c.k.index)
        for c in plan.calls if c.k.index is not None
    ]  # fmt: skip
    return SimpleNamespace(plan=plan, runs=runs, picked=picked, bare=plan.uncovered)


def tensors(shape, dtype, seed=0):
    b, h, kv, n = shape
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, n, heads, 16, generator=generator, dtype=torch.float64).to(dtype) for heads in (h, kv, kv)]


def case(pattern, shape, dtype, causal, way):
    b, h, kv, n = shape
    execution = Execution(blocks=way, results=STAINED)
    return Case(pattern, b, n, h, kv, 16, causal, dtype, None, execution, "auto", True, False)


def brute(pattern, n, causal):
    x = torch.arange(n)
    m = pattern.multiplicity(x, x, n=n, head=0, heads=1)
    return m.tril() if causal else m


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_way_is_the_oracle(pattern, way, causal):
    torch.manual_seed(0)
    for shape in SHAPES:
        for dtype in (torch.float64, torch.float32):
            one = case(pattern, shape, dtype, causal, way)
            given = one.tensors()
            found = errors(engine_results(one, *given), oracle_results(one, *given), *given[:2], given[3])
            assert max(found.values()) <= reference.EXACT[dtype], (shape, dtype, found)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_see_themselves_alone_send_nothing_to_scores(way):
    """Their gradient of q and k is 0: what sums in another order would leave roundings of it."""
    torch.manual_seed(0)
    one = case(block_patterns.sliding_window(0, block_size=1), SHAPES[1], torch.float32, False, way)
    given = one.tensors()
    found = errors(engine_results(one, *given), oracle_results(one, *given), *given[:2], given[3])
    assert max(found.values()) <= 1e-6, found


def test_calls_show_each_pair_once():
    for pattern in PATTERNS:
        for way in TILED:
            for causal, lower_right in ((False, False), (True, False), (True, True)):
                tiling = calls_of(pattern, 101, causal, way, lower_right)
                seen, written = torch.zeros(101, 101, dtype=torch.long), torch.zeros(101, dtype=torch.bool)
                bare = torch.zeros(101, dtype=torch.bool)
                for start, stop in tiling.bare:
                    bare[start:stop] = True
                for run in tiling.runs:
                    for i in range(run.nodes):
                        q, k = (at[0] + i * at[1] for at in (run.query, run.key))
                        shown = torch.ones(run.rows, run.keys, dtype=torch.long)
                        shown = shown.tril(run.keys - run.rows) if run.causal else shown
                        seen[q : q + run.rows, k : k + run.keys] += shown
                        assert lower_right or not run.causal or run.rows == run.keys
                        assert not (run.first and (run.shared or (written | bare)[q : q + run.rows].any()))
                        assert run.first or (written | bare)[q : q + run.rows].all()
                        written[q : q + run.rows] = True
                for call in tiling.picked:
                    for q, keys in zip(call.queries.tolist(), call.keys):
                        seen[q : q + call.rows, keys] += 1
                        assert (written | bare)[q : q + call.rows].all()
                assert (written | bare).all()
                assert torch.equal(seen, brute(pattern, 101, causal)), (str(pattern), way, causal)


def test_plans_of_many_blocks_show_each_pair_once():
    """More blocks than are looked at together."""
    size, n = 4, 4 * 1300 - 1
    levels = [(1, 2), (64, 700)]
    for pattern in (
        block_patterns.local_global(2, 3, block_size=size),
        block_patterns.hierarchical(levels, block_size=size),
    ):
        for causal in (False, True):
            for way in ("views", "batched"):
                tiling = calls_of(pattern, n, causal, way, lower_right=way == "views")
                rows = torch.zeros(n, dtype=torch.long)
                for r in tiling.runs:
                    at = r.query[0] + torch.arange(r.nodes)[:, None] * r.query[1] + torch.arange(r.rows)
                    fewer = torch.arange(r.rows).flip(0) * r.causal
                    rows.index_add_(0, at.flatten(), (r.keys - fewer).repeat(r.nodes))
                for c in tiling.picked:
                    rows[(c.queries[:, None] + torch.arange(c.rows)).flatten()] += c.keys.shape[1]
                sample = torch.arange(0, n, 41)
                seen = pattern.multiplicity(sample, torch.arange(n), n=n, head=0, heads=1)
                seen = seen * (torch.arange(n) <= sample[:, None]) if causal else seen
                assert torch.equal(rows[sample], seen.sum(1)) and int(rows.sum()) == pattern.pairs(n, causal)


def test_squares_join_the_calls_before_them():
    """A causal window is one call for all blocks with as many keys, where kernels mask the lower right corner."""
    window = block_patterns.sliding_window(2, block_size=128)
    joined, apart = (calls_of(window, 16384, True, lower_right=here).runs for here in (True, False))
    assert [(r.rows, r.keys, r.nodes, r.causal) for r in joined] == [
        (128, 384, 126, True), (128, 128, 1, True), (128, 256, 1, True)]  # fmt: skip
    assert all(r.rows == r.keys for r in apart if r.causal) and len(apart) > 1


@pytest.mark.parametrize("value", [3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_key_changes_no_earlier_row_whatever_it_is(value, dtype):
    """Its scores overflow: an additive mask alone would make NaN of infinite ones that it hides."""
    window = block_patterns.sliding_window(1, block_size=64)
    assert any(r.causal and r.keys > r.rows for r in calls_of(window, 256, True, lower_right=True).runs)
    q, k, v = (t.requires_grad_() for t in tensors((1, 2, 2, 256), dtype))
    dout = torch.ones(1, 160, 2, 16, dtype=dtype)
    spoiled = k.detach().clone()
    spoiled[:, 160] = value
    bound = reference.EXACT[torch.float32] if dtype == torch.float32 else 2**-8  # one rounding
    for way in TILED:
        how = {"causal": True, "execution": Execution(blocks=way)}
        clean, found = (attention(q, x, v, window, **how)[:, :160] for x in (k, spoiled))
        assert reference.error(found, clean, 1.0) <= bound, way
        if value == 3e38:  # 0 times others is NaN in any product of keys and gradients
            want, got = (torch.autograd.grad(out, q, dout)[0][:, :160] for out in (clean, found))
            assert reference.error(got, want, 1.0) <= bound, way


def test_results_are_contiguous_whatever_the_inputs_are():
    laid_out = [torch.randn(2, 4, 256, 16).transpose(1, 2) for _ in range(3)]  # (b, n, h, d), as other libraries hold
    window = block_patterns.local_global(1, 1, block_size=32)
    for pattern in (window, block_patterns.sliding_window(1, block_size=64), patterns.Dense(), patterns.Dilated([64], [1]),
                    patterns.Dilated([64, 128], [1, 2])):  # fmt: skip
        for dtype, causal in product((torch.float32, torch.bfloat16), (False, True)):
            out = attention(*(t.to(dtype) for t in laid_out), pattern, causal=causal)
            assert out.is_contiguous() and out.untyped_storage().nbytes() == out.nbytes, (str(pattern), dtype, causal)


def test_neighbours_that_see_the_same_keys_are_one_call():
    """The global rows of small blocks: eight of 64 queries by all keys are one of 512, by 1024 keys a node."""
    runs = calls_of(block_patterns.local_global(4, 8, block_size=64), 16384).runs
    assert [(r.nodes, r.rows, r.query[1]) for r in runs if r.keys == 1024] == [(15, 512, 0)]


def test_many_queries_of_few_keys_are_nodes_of_about_a_thousand():
    """So that a thread writes pages of its own: the first call, which is the output, and the causal ones."""
    wide = block_patterns.local_global(2, 4)
    found = calls_of(wide, 16384)
    first = found.runs[0]
    assert (first.nodes, first.rows, first.key) == (16, 1024, (0, 0)) and found.plan.whole(16384, 1)
    assert (15, 1024, 512) in [(r.nodes, r.rows, r.keys) for r in calls_of(wide, 16384, True).runs]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 2, 512), (2, 2, 2, 512), (1, 4, 2, 509)])
def test_nodes_that_share_queries_or_keys_are_the_oracle(monkeypatch, shape, causal):
    """With short limits for what is cut: the first call in nodes, and global rows some keys at a time."""
    monkeypatch.setattr(blocks, "LONG", 32)
    monkeypatch.setattr(blocks, "SHORT", 24)
    torch.manual_seed(0)
    pattern, n = block_patterns.local_global(1, 2, block_size=SIZE), shape[3]
    found = calls_of(pattern, n, causal)
    first, *others = found.runs
    whole = found.plan.whole(n, 1) is not None
    assert causal or (first.nodes > 1 and whole == (n == 512) and any(r.shared for r in others))
    rows = BlockSparse([Global(2, columns=False)], SIZE)  # no other call writes these first
    for which, dtype in product((pattern, rows), (torch.float64, torch.float32)):
        one = case(which, shape, dtype, causal, "views")
        one = replace(one, execution=Execution(blocks="views", cache=False))  # other plans than other tests use
        given = one.tensors()
        apart = errors(engine_results(one, *given), oracle_results(one, *given), *given[:2], given[3])
        assert max(apart.values()) <= reference.EXACT[dtype], (str(which), dtype, apart)


def test_causal_calls_in_strips_are_the_oracle_and_leave_out_what_is_hidden(monkeypatch):
    monkeypatch.setattr(blocks, "STRIP", 4)
    monkeypatch.setattr(blocks, "WIDE", 12)
    torch.manual_seed(0)
    for pattern, shape, dtype in product(PATTERNS[:3], SHAPES, (torch.float64, torch.float32)):
        ((_, strips, calls),) = blocks.make_plan(pattern, shape[3], causal=True, lower_right=True).blocks
        both = [[c for c in some if c.causal] for some in (calls, strips)]
        hidden = [sum(c.nodes * c.q.rows * (c.q.rows - 1) // 2 for c in some) for some in both]
        computed = [sum(c.nodes * c.q.rows * c.k.rows for c in some) for some in both]
        assert hidden[1] < hidden[0] and computed[0] - hidden[0] == computed[1] - hidden[1]
        one = case(pattern, shape, dtype, True, "views")
        given = one.tensors()
        apart = errors(engine_results(one, *given), oracle_results(one, *given), *given[:2], given[3])
        assert max(apart.values()) <= reference.EXACT[dtype], (str(pattern), shape, dtype, apart)


def test_a_window_is_few_calls_whatever_its_length():
    few = [len(calls_of(block_patterns.local_global(2, 4), n).runs) for n in (1 << 13, 1 << 15)]
    assert few[0] <= 30 and few[1] <= 50 and not calls_of(block_patterns.local_global(2, 4), 1 << 13).picked


@pytest.mark.parametrize("causal", [False, True])
def test_counts_are_brute_force(causal):
    for pattern in PATTERNS:
        pairs = int(brute(pattern, 101, causal).sum())
        assert pattern.pairs(101, causal) == pairs and pattern.density(101, causal) == pairs / 101**2
        assert count_pairs(pattern, 101, 4, 2, causal) == (4 * pairs, 4 * pairs)
        shown = brute(pattern, 101, False)
        for first, last in ((0, 0), (40, 55), (96, 100)):
            start, stop = pattern.reach(first, last, 101)
            assert not shown[first : last + 1, :start].any() and not shown[first : last + 1, stop:].any()
        assert patterns.from_dict(pattern.to_dict()) == pattern and "\n" not in str(pattern)


def test_ones_stay_ones_and_a_row_that_sees_nothing_is_zero():
    q, k, _ = tensors((1, 2, 2, 101), torch.float64)
    ones = torch.ones_like(k)
    mask = torch.ones(13, 13, dtype=torch.bool)
    mask[5] = False
    for way in WAYS:
        how = {"execution": Execution(blocks=way), "return_lse": True}
        out, _ = attention(q, k, ones, PATTERNS[1], **how)
        assert (out - 1).abs().max() <= 1e-12
        out, lse = attention(q, k, ones, block_patterns.from_mask(mask, block_size=SIZE), **how)
        assert not out[:, 40:48].any() and (lse[..., 40:48] == -torch.inf).all() and torch.isfinite(lse[..., 48:]).all()


@pytest.mark.parametrize("way", TILED)
def test_bfloat16_stays_within_twice_a_dense_call(way):
    torch.manual_seed(0)
    for pattern in (*PATTERNS[:2], BlockSparse([Random(2)], SIZE)):
        one = case(pattern, (1, 4, 2, 200), torch.bfloat16, False, way)
        given = one.tensors()
        found = errors(engine_results(one, *given), oracle_results(one, *given), *given[:2], given[3])
        allowed = reference.tolerance(*given[:4], pattern=pattern)
        assert all(found[name] <= allowed[name] for name in found), (str(pattern), found, allowed)


def test_bsr_refuses_half_precision_in_one_line():
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(NotImplementedError, match=f"^blocks='bsr' takes float32, float64, not {name}$"):
            attention(*tensors((1, 2, 2, 64), dtype), PATTERNS[0], execution=Execution(blocks="bsr"))


@needs_flex
def test_flex_is_the_oracle():
    """One shape and dtype, so one kernel is compiled, for every pattern, causal or not."""
    for pattern, causal in product(FLEX, (False, True)):
        torch.manual_seed(0)
        one = case(pattern, (1, 4, 2, 101), torch.float32, causal, "flex")
        given = one.tensors()
        found = errors(engine_results(one, *given), oracle_results(one, *given), *given[:2], given[3])
        assert max(found.values()) <= 5e-6, (str(pattern), causal, found)


@needs_flex
def test_flex_is_compiled_whoever_looks_on(recwarn):
    """Under a dispatch mode, or called out of a graph, torch would form all scores, and warn once at most."""
    q, k, v = tensors((1, 4, 2, 101), torch.float32)
    want, _ = reference.attention(q, k, v, FLEX[0])
    with Products() as mode:
        out, _ = torch_sparse.flex_forward(q, k, v, torch_sparse.flex_prepare(FLEX[0], 101), 0.25)
    assert reference.error(out, want, 1.0) <= 5e-6 and mode.largest <= q.numel() < 4 * 101**2
    how = {"execution": Execution(blocks="flex")}
    outer = torch.compile(lambda x: attention(x, k, v, FLEX[0], **how), backend="eager")
    assert torch.equal(outer(q), out)
    assert not [w for w in recwarn if "flex_attention" in str(w.message)]


@pytest.mark.parametrize("causal", [False, True])
def test_the_mask_of_flex_is_the_pattern(causal):
    for pattern in PATTERNS:
        for width in (1, 3, 4):
            mask = torch_sparse.flex_prepare(pattern, 101, causal, tile=width * SIZE).blocks
            shown, at = torch.zeros(104 + 3 * SIZE, 104 + 3 * SIZE, dtype=torch.bool), torch.arange(101)
            cut = torch.zeros_like(shown[:101, :101])
            cut[:] = mask.mask_mod(0, 0, at[:, None], at[None, :])
            tiles = {}
            for name in ("", "full_"):
                count, which = (getattr(mask, f"{name}kv_{x}")[0, 0] for x in ("num_blocks", "indices"))
                tiles[name] = {(i, j) for i in range(len(count)) for j in which[i, : count[i]].tolist()}
            assert not tiles[""] & tiles["full_"] and (width > 1 or causal or not tiles[""])
            for name, found in tiles.items():
                for i, j in found:
                    rows, cols = (slice(x * width * SIZE, (x + 1) * width * SIZE) for x in (i, j))
                    shown[rows, cols] = True
                    if not name:
                        shown[:101, :101][rows, cols] = cut[rows, cols]
            assert torch.equal(shown[:101, :101].long(), brute(pattern, 101, causal)), (str(pattern), width)


def test_flex_refuses_in_one_line(monkeypatch):
    how = {"execution": Execution(blocks="flex")}
    with pytest.raises(NotImplementedError, match="^blocks='flex' takes float32, float16, bfloat16, not float64$"):
        attention(*tensors((1, 2, 2, 64), torch.float64), FLEX[0], **how)
    with pytest.raises(
        NotImplementedError, match="^blocks='flex' needs a block size that is a multiple of 16 on a CPU"
    ):
        attention(*tensors((1, 2, 2, 64), torch.float32), PATTERNS[0], **how)
    monkeypatch.setattr(torch_sparse.shutil, "which", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"^blocks='flex' needs a C\+\+ compiler on a CPU, g\+\+ is"):
        attention(*tensors((1, 2, 2, 64), torch.float32), FLEX[0], **how)
    point = Point("flex", FLEX[0], seq_len=64)
    with pytest.raises(NotImplementedError, match=r"^FlexAttention needs a C\+\+ compiler"):
        systems.build(point, "cpu")
    assert torch_sparse.refusal("cuda", torch.float32, 8) == "needs a head_dim of 16 at least on a GPU, got 8"


def test_near_misses_nothing_and_neighbours_in_it_are_neighbours():
    far = BlockSparse([Window(20), Global(3), Coarse(16, 40), Strided(7, 2)], SIZE)
    for pattern in (*PATTERNS[:-1], far, BlockSparse([Global(2, columns=False), Window(2**40, 0)], SIZE)):
        n = 8 * 200 - 3
        whole = pattern.blocks(n)
        for rows in (range(0, 1), range(5, 70), range(150, 200)):
            cols, seen = pattern.near(rows, n), whole[rows.start : rows.stop].any(0)
            assert seen.sum() == seen[cols].sum()
            gaps = cols.diff() > 1
            assert not (seen[cols[:-1]] & seen[cols[1:]] & gaps).any()


@pytest.mark.parametrize("causal", [False, True])
def test_the_index_of_bsr_is_the_pattern(causal):
    for pattern in PATTERNS:
        index = torch_sparse.bsr_prepare(pattern, 101, causal)
        seen = pattern.blocks(101).tril() if causal else pattern.blocks(101)
        ones = torch.ones(len(index.cols), 1, 1)
        for starts, cols, want in (
            (index.starts, index.cols, seen),
            (index.starts_by_column, index.rows[index.order], seen.T),
        ):
            made = torch.sparse_bsr_tensor(starts, cols, ones, seen.shape, check_invariants=True)
            assert torch.equal(made.to_dense(), want.float())


class Products(TorchDispatchMode):
    """Counts what is multiplied with a BSR tensor, and keeps the size of the largest dense result."""

    def __init__(self):
        super().__init__()
        self.sparse, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and args[0].layout == torch.sparse_bsr:
            self.sparse += 1
        if isinstance(found, torch.Tensor) and found.layout == torch.strided:
            self.largest = max(self.largest, found.numel())
        return found


def test_bsr_multiplies_by_torch_sparse_and_forms_seen_blocks_alone():
    pattern, shape = PATTERNS[0], (2, 4, 2, 1021)
    b, h, _, n = shape
    q, k, v = (t.requires_grad_() for t in tensors(shape, torch.float32))
    with Products() as forward:
        out = attention(q, k, v, pattern, execution=Execution(blocks="bsr", cache=False))
    with Products() as backward:
        out.backward(torch.ones_like(out))
    assert (forward.sparse, backward.sparse) == (b * h, 3 * b * h)
    formed = max(int(pattern.blocks(n).sum()) * SIZE**2, q.numel())  # the scores of a head, or a result
    assert max(forward.largest, backward.largest) <= formed < n**2 / 4


def test_bsr_prints_no_warning():
    code = (
        "import torch, ringlab; from ringlab.block_patterns import sliding_window as window\n"
        "q = torch.ones(1, 20, 2, 8, requires_grad=True); way = ringlab.Execution(blocks='bsr')\n"
        "ringlab.attention(q, q, q, window(1, block_size=8), execution=way).sum().backward()"
    )
    env = {"PYTHONPATH": str(Path(blocks.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_block_of_queries_that_sees_all_keys_in_half_precision():
    """Its keys come some at a time, by nodes that share their queries: a single call, whose results are merged."""
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[3] = True
    pattern = block_patterns.from_mask(mask, block_size=128)
    q, k, v = tensors((1, 2, 2, 2048), torch.bfloat16)
    want, _ = reference.attention(q, k, v, pattern)
    assert reference.error(attention(q, k, v, pattern), want, 1.0) <= 1e-2


def test_density_is_solved_for():
    pattern = block_patterns.local_global(1, 4)
    for causal, target in ((False, 0.1), (True, 0.1), (False, 0.5), (False, 1.0)):
        found = pattern.with_density(target, 16384, causal)
        step = abs(found.density(16384, causal) - target)
        for change in (-1, 1):
            window = Window(max(0, found.parts[0].before + change))
            other = BlockSparse([window, *found.parts[1:]], 128)
            assert step <= abs(other.density(16384, causal) - target)
    assert BlockSparse([Random(1)], 64).with_density(0.25, 1024).parts == (Random(4),)
    for window in (Window(3, 0), Window(0, 3)):  # one side stays one side
        one = BlockSparse([window], 16)
        assert one.with_density(one.density(640), 640) == one
    assert BlockSparse([Window(2**40, 0), Strided(2**33, 2**33)], 16).blocks(64).equal(torch.ones(4, 4).bool().tril())


ODD = [  # parts as no to_dict writes them
    (5, r"parts must be a list of parts, as \[Window\(1\)\], got 5"),
    ("window", "parts must be a list of parts, .*, got 'window'"),
    (None, "parts must be a list of parts, .*, got None"),
    ([7], "unknown part of a block-sparse pattern: 7; known: window, strided"),
    ([Window(1)], r"unknown part of a block-sparse pattern: Window\(before=1"),
    ([{}], "unknown part of a block-sparse pattern: {}"),
    ([{"part": ["window"]}], r"unknown part of a block-sparse pattern: {'part': \['window'\]}"),
    ([{"part": "window"}], "no part of .*: {'part': 'window'}: .* missing 1 required positional argument: 'before'"),
    ([{"part": "window", "before": 1, "size": 2}], "no part of .*: .* got an unexpected keyword argument 'size'"),
    ([{"part": "window", "before": 1, 5: 2}], "no part of .*: keywords must be strings"),
    ([{"part": "window", "before": "1"}], "Window before must be an integer of at least 0 .*, got '1'"),
    ([{"part": "window", "before": [1]}], r"Window before must be an integer of at least 0 .*, got \(1,\)"),
    ([{"part": "global", "count": 1, "rows": "yes"}], r"rows, columns or both must be True, .*, got \('yes', True\)"),
    ([{"part": "given", "rows": [[1]]}], "rows must be hexadecimal bit sets"),
    ([{"part": "x" * 3000}], r"unknown part of a block-sparse pattern: {'part': 'x{87}\.\.\.; known: window"),
]


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: BlockSparse([Window(1)], 0), "block_size must be a positive integer up to 2..40, got 0"),
        (lambda: BlockSparse([], 8), "needs at least one part"),
        (lambda: BlockSparse([type("Near", (Window,), {})(1)], 8), r"one of Window.*, no subclass, got Near\(before"),
        (lambda: block_patterns.sliding_window(None), "Window before must be an integer of at least 0 up to 2..40, got None"),
        (lambda: block_patterns.local_global(1, None), "Global count must be a positive integer up to 2..40, got None"),
        (lambda: block_patterns.hierarchical([(2, None)]), "Coarse reach must be an integer of at least 0 .*, got None"),
        (lambda: block_patterns.hierarchical([(None, 2)]), "Coarse stride must be a positive integer .*, got None"),
        (lambda: BlockSparse([Segment(None)], 8), "Segment length must be a positive integer .*, got None"),
        (lambda: BlockSparse([Segment(2, None)], 8), "Segment rate must be a positive integer .*, got None"),
        (lambda: BlockSparse([Strided(None)], 8), "Strided rate must be a positive integer .*, got None"),
        (lambda: BlockSparse([Strided(2, True)], 8), "Strided steps must be a positive integer .*, got True"),
        (lambda: BlockSparse([Random(None)], 8), "Random count must be a positive integer .*, got None"),
        (lambda: Random(1, None), "Random seed must be an integer of at least 0 .*, got None"),
        (lambda: BlockSparse([Global(True)], 8), "Global count must be a positive integer .*, got True"),
        (lambda: Global(1, [True], True), r"both must be True, the other False, got \(\[True\], True\)"),
        (lambda: Global(1, True, 1), r"rows, columns or both must be True, the other False, got \(True, 1\)"),
        (lambda: Global(1, torch.ones(90, 90)), r"the other False, got \(tensor\(\[\[1., .*\.\.\.$"),
        (lambda: block_patterns.hierarchical(list(range(2000))), r"^levels must be .*, got \[0, 1, 2, .{87}\.\.\.$"),
        (lambda: BlockSparse([3], 8), "a part must be one of Window"),
        (lambda: BlockSparse([[1]], 8), r"a part must be one of Window.*, got \[1\]"),
        (lambda: block_patterns.hierarchical([(1,)]), r"levels must be a list of \(stride, reach\), .*, got \[\(1,\)\]"),
        (lambda: block_patterns.hierarchical(3), r"levels must be a list of \(stride, reach\)"),
        (lambda: block_patterns.from_mask(torch.ones(0, 0, dtype=torch.bool)), "of at least one block"),
        (lambda: BlockSparse(Window(1), 8), r"parts must be a list of parts, as \[Window\(1\)\], got Window"),
        (lambda: BlockSparse([Window(10**30)], 8), "Window before must be an integer of at least 0 up to 2"),
        (lambda: Random(1, 1.5), "Random seed must be an integer of at least 0"),
        (lambda: Global(1, False, False), "rows, columns or both must be True"),
        (lambda: Given(("ff", "1")), "rows must be hexadecimal bit sets, one for each block"),
        (lambda: Given(["1"]), "rows must be hexadecimal bit sets"),
        (lambda: block_patterns.sliding_window(1).density(64.5), "length must be a positive integer up to 2..40, got 64.5"),
        (lambda: BlockSparse([Window(1), Window(3)], 8).with_density(0.5, 64), "several parts of a kind"),
        (lambda: patterns.show(patterns.Dense(), 64, width=0), "width must be a positive integer up to"),
        (lambda: BlockSparse([Window(-1)], 8), "Window before must be an integer of at least 0 up to 2..40, got -1"),
        (lambda: BlockSparse([Random(0)], 8), "Random count must be a positive integer up to 2..40, got 0"),
        (lambda: BlockSparse([Coarse(-1, 1)], 8), "Coarse stride must be a positive integer up to 2..40, got -1"),
        (lambda: BlockSparse([Window(1)], 64).blocks(63), "block_size 64 exceeds the sequence length 63"),
        (lambda: BlockSparse([Global(9)], 8).blocks(64), "9 global blocks exceed the 8 of n = 64"),
        (lambda: block_patterns.from_mask(torch.ones(7, 7, dtype=torch.bool), block_size=8).blocks(64),
         "the mask given is of 7 blocks, n = 64 has 8"),
        (lambda: block_patterns.from_mask(torch.ones(7, 8, dtype=torch.bool)), "a square bool tensor"),
        (lambda: block_patterns.from_mask(torch.ones(7, 8, dtype=torch.bool)),
         r"got Tensor of torch.bool, shape \(7, 8\), torch.strided on cpu"),
        (lambda: block_patterns.from_mask(torch.ones(7, 7)), r"got Tensor of torch.float32, shape \(7, 7\)"),
        (lambda: block_patterns.from_mask(torch.ones(7, 7, dtype=torch.bool).to_sparse()),
         r"got Tensor of torch.bool, shape \(7, 7\), torch.sparse_coo on cpu"),
        (lambda: block_patterns.from_mask(torch.ones(7, 7, dtype=torch.bool, device="meta")),
         r"neither nested, sparse nor meta, got Tensor of torch.bool, shape \(7, 7\), torch.strided on meta"),
        (lambda: block_patterns.from_mask(torch.nested.nested_tensor([torch.ones(2) > 0], layout=torch.jagged)),
         "neither nested, sparse nor meta, got NestedTensor$"),
        (lambda: block_patterns.from_mask([[True]]), "got list"),
        (lambda: block_patterns.local_global(1, 1).with_density(0.0, 1024), r"density must be in \(0, 1\], got 0.0"),
        (lambda: block_patterns.local_global(1, 1).with_density(1.5, 1024), r"density must be in \(0, 1\], got 1.5"),
        (lambda: BlockSparse([Strided(2)], 8).with_density(0.5, 64), "no window and no random blocks"),
        (lambda: block_patterns.sliding_window(1) | block_patterns.sliding_window(1, block_size=64), "one block size, got 128 and 64"),
        (lambda: Execution(blocks="fast"), "unknown blocks 'fast'; known: auto, views"),
        (lambda: Execution(blocks=["views"]), r"unknown blocks \['views'\]; known: auto, views"),
        (lambda: Execution(blocks=np.array(["auto"])), r"unknown blocks array\(\['auto'\], dtype='<U4'\); known: auto"),
        (lambda: Execution(blocks=np.ones((2, 2))), r"unknown blocks array\(\[\[1., 1.\], \[1., 1.\]\]\); known: auto"),
        (lambda: Execution(blocks=None), "unknown blocks None; known: auto"),
        (lambda: Execution(merge=np.array(["auto", "eager"])), r"unknown merge array\(\['auto', 'eager'\]"),
        (lambda: Execution(merge={}), "unknown merge {}; known: auto, eager, fused"),
        (lambda: patterns.from_dict({"kind": "block_sparse", "parts": [{"part": "ring"}], "block_size": 8}),
         "unknown part of a block-sparse pattern"),
        *((lambda parts=parts: BlockSparse.from_dict({"parts": parts, "block_size": 8}), why) for parts, why in ODD),
        (lambda: BlockSparse.from_dict({"block_size": 8}), "needs at least one part"),
        (lambda: BlockSparse.from_dict({"parts": [], "size": 8}), r"parts and block_size alone, got {'parts': \[\]"),
        (lambda: BlockSparse.from_dict([Window(1)]), r"parts and block_size alone, got \[Window\(before=1"),
        (lambda: patterns.from_dict([3]), "a pattern is restored from a dict, got list"),
        (lambda: patterns.from_dict({"kind": ["dense"]}), r"unknown pattern kind \['dense'\]; known: dense"),
        (lambda: patterns.from_dict({"kind": "dense", 3: 4, "size": 5}), "unknown fields for pattern 'dense': 3, size"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, why):
    with pytest.raises(ValueError, match=why) as failure:
        make()
    assert "\n" not in str(failure.value)


def test_mutants_fail():
    """What the originals did: a softmax per block summed, a causal mask of blocks alone, a stale pattern."""
    pattern, (q, k, v) = PATTERNS[0], tensors((1, 2, 2, 64), torch.float64)
    want, _ = reference.attention(q, k, v, pattern)
    seen, parts = pattern.blocks(64), 0
    for i, j in seen.nonzero().tolist():
        rows, cols = slice(i * SIZE, i * SIZE + SIZE), slice(j * SIZE, j * SIZE + SIZE)
        part = torch.zeros_like(q)
        part[:, rows] = reference.attention(q[:, rows], k[:, cols], v[:, cols], patterns.Dense())[0]
        parts = parts + part
    assert reference.error(parts, want, 1.0) > 1.0
    causal, _ = reference.attention(q, k, v, pattern, causal=True)
    by_block, _ = reference.attention(
        q, k, v, BlockSparse([Given(block_patterns.from_mask(seen.tril()).parts[0].rows)], SIZE)
    )
    assert reference.error(by_block, causal, 1.0) > 0.1
    assert reference.error(attention(q, k, v, PATTERNS[2]), want, 1.0) > 0.1


SYSTEMS = (BlockSparseRingDilatedAttention, BlockSparseOptimized, BlockSparseTorchSparse)


@pytest.mark.parametrize("system", SYSTEMS)
def test_published_systems_compute_one_function(system):
    q, k, v = tensors((1, 2, 2, 101), torch.float64)
    dilated = BlockSparse([Segment(4), Segment(8, 2)], SIZE)
    for causal in (False, True):
        by_lengths = system([32, 64], [1, 2], block_size=SIZE)(q, k, v, is_causal=causal)
        given = system(pattern=dilated, use_gradient_checkpointing=True)(q, k, v, is_causal=causal)
        want, _ = reference.attention(q, k, v, dilated, causal=causal)
        assert reference.error(by_lengths, want, 1.0) <= 1e-12 and reference.error(given, want, 1.0) <= 1e-12
        asked = system(density=0.3, block_size=SIZE)
        solved = asked.pattern_for(101, causal)
        assert abs(solved.density(101, causal) - 0.3) < 0.08 and isinstance(solved.parts[0], Window)
        want, _ = reference.attention(q, k, v, solved, causal=causal)
        assert reference.error(asked(q, k, v, is_causal=causal), want, 1.0) <= 1e-12


@pytest.mark.parametrize(
    "arguments, why",
    [
        ({}, "takes segment_lengths and dilation_rates, or density, or pattern: one of them"),
        ({"density": 0.1, "pattern": PATTERNS[0]}, "one of them"),
        ({"density": 0}, r"density must be in \(0, 1\], got 0"),
        ({"segment_lengths": [32], "dilation_rates": [1, 2]}, "differ in length: 1 and 2"),
        ({"segment_lengths": [100], "dilation_rates": [1], "block_size": 64}, "100 is no multiple of the block size"),
        ({"pattern": patterns.Dense()}, "pattern must be a BlockSparse"),
        ({"density": 0.1, "block_size": 0}, "block_size must be a positive integer up to 2..40, got 0"),
    ],
)
def test_published_systems_refuse_in_one_line(arguments, why):
    with pytest.raises(ValueError, match=why) as failure:
        BlockSparseOptimized(**arguments)
    assert "\n" not in str(failure.value)
    with pytest.raises(TypeError, match="cannot honour 'sparsity_ratio': it changed nothing in the original"):
        BlockSparseOptimized(density=0.1, sparsity_ratio=0.9)


@pytest.mark.parametrize("causal", [False, True])
def test_plans_show_just_the_patterns_pairs(causal):
    for options in ({}, {"warm": False}, {"blocks": "rows"}, {"blocks": "batched"}):
        point = Point("plan_build", PATTERNS[1], seq_len=500, heads=2, causal=causal, options=options)
        system = systems.build(point, "cpu")
        assert system.check([], system.run([])) == ({"out": 0.0}, {"out": 0.0})


def test_patterns_are_drawn():
    assert patterns.show(patterns.Dilated([2, 4], [1, 2]), 4) == "███ \n██  \n█ ██\n  ██"
    assert patterns.show(patterns.Dense(), 3, causal=True) == "█  \n██ \n███"
    lines = patterns.show(block_patterns.local_global(1, 1), 1 << 14, width=32).split("\n")
    assert [len(line) for line in lines] == [32] * 32 and lines[20][20] in "▒▓█" and lines[20][5] == " "


def test_cuts_and_runs_of_a_short_last_block():
    cuts = Cuts.of(20, 8)
    assert cuts.starts.tolist() == [0, 8, 16] and cuts.lengths.tolist() == [8, 8, 4]
    runs = calls_of(block_patterns.sliding_window(0, block_size=8), 20, True).runs
    assert {(r.rows, r.keys, r.nodes, r.query, r.key, r.causal, r.first) for r in runs} == {
        (8, 8, 2, (0, 8), (0, 8), True, True), (4, 4, 1, (16, 0), (16, 0), True, True)}  # fmt: skip
