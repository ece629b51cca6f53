"""Block-sparse patterns besides their values: what is computed, which keys are read,
densities, refusals.
"""

import math
import warnings
from dataclasses import replace
from itertools import product

import pytest
import ringlab
import torch
from doubles import gpu
from matrix import BF16, BLOCK, F32, F64, STAINED, Case, all_wrong, drawn, judged
from matrix import BLOCK_SPARSE as PATTERNS
from refusals import refused
from ringlab import (
    Execution,
    attention,
    baselines,
    blocks,
    kernels,
    patterns,
    reference,
)
from ringlab.blocks import (
    BlockSparse,
    Coarse,
    Given,
    Global,
    Random,
    Segment,
    Strided,
    Window,
)
from ringlab.cost import count_pairs
from ringlab.engine.blocks import make_plan
from ringlab.ring import contiguous
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

UNCACHED = Execution(cache=False)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_seen_pairs_are_those_of_all_blocks(pattern):
    n = (13 if "given" in str(pattern) else 300) * BLOCK  # more than are made at once
    assert torch.equal(torch.stack(pattern.seen(n), 1), pattern.blocks(n).nonzero())


def tensors(pattern, n, dtype=F32, batch=1, heads=2, kv_heads=2):
    """q, k, v."""
    return drawn(Case(pattern, n, dtype, batch=batch, heads=heads, kv_heads=kv_heads))[
        0
    ]


class Products(TorchDispatchMode):
    """Counts products of queries and keys, their scores, products with a BSR tensor;
    elements of dense results.
    """

    def __init__(self, d: int = 0):
        super().__init__()
        self.d, self.calls, self.scores, self.sparse, self.largest, self.total = (
            d,
            0,
            0,
            0,
            0,
            0,
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func is aten.bmm.default and args[0].shape[2] == self.d != args[1].shape[2]:
            self.calls += 1
            self.scores += found.numel()
        if func is aten.mm.default and args[0].layout == torch.sparse_bsr:
            self.sparse += 1
        if isinstance(found, torch.Tensor) and found.layout == torch.strided:
            size = min(
                found.numel(), found.untyped_storage().nbytes() // found.itemsize
            )  # a view may repeat elements
            self.largest = max(self.largest, size)
            self.total += size
        return found


def computed(pattern, n, way=None, causal=False, d=107):
    """What the eager kernel multiplies in a forward pass; no call has ``d`` keys."""
    q = torch.zeros(1, n, 1, d)
    kernels.choose(
        "cpu", F32, d, causal=causal, backend="eager"
    )  # its probe is not of a call
    with Products(d) as found:
        how = {"causal": causal, "backend": "eager", "execution": UNCACHED}
        if way is None:
            attention(q, q, q, pattern, **how)
        else:
            baselines.attend(q, q, q, pattern, way, **how)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", [None, "batched", "rows"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_each_pair_is_computed_once(pattern, way, causal):
    """Causal: and at most the later half of the blocks on the diagonal."""
    hidden = computed(pattern, 101, way, causal).scores - pattern.pairs(101, causal)
    assert hidden == 0 or causal and 0 < hidden <= 101 * BLOCK


@pytest.mark.parametrize("way", [None, "batched", "rows", "bsr"])
def test_rows_that_see_themselves_alone_send_nothing_to_scores(way):
    """Their gradient of q and k is 0: what sums in another order would leave roundings
    of it.
    """
    case = Case(
        blocks.sliding_window(0, block_size=1), 97, F32, batch=3, lse_cotangent=False
    )
    case = replace(case, way=way)
    inputs, dout, dlse, *_ = judged(case)
    found = case.run(inputs, dout, dlse)
    assert max(
        float(found[name].norm()) for name in ("dq", "dk")
    ) <= 1e-6 * reference.gradient_floor(*inputs[:2], dout)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 512), (2, 2, 512), (1, 4, 509)])
def test_blocks_of_long_sequences_share_queries_or_keys(shape, causal):
    batch, heads, n = shape
    wide = blocks.local_global(1, 2, block_size=64)
    for pattern, dtype in product((wide, PATTERNS[-2]), (F32, F64)):
        case = Case(
            pattern,
            n,
            dtype,
            causal,
            batch,
            heads,
            2,
            execution=Execution(results=STAINED),
        )
        assert not all_wrong([case])


EDGES = [Window(0), Window(6), Window(150), Window(20, 7), Window(600, 3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", EDGES, ids=str)
def test_windows_of_tokens_are_cut_exactly(part, causal):
    """In tiles that are whole, short, or cut by an end of the sequence."""
    case = Case(BlockSparse([part], 1), 301, F32, causal, 1, 2, 1, execution=UNCACHED)
    assert not all_wrong(
        replace(case, dtype=dtype, backend=backend, memory=memory)
        for dtype, backend, memory in [
            (F32, "auto", "every other"),
            (F32, "eager", "contiguous"),
            (F64, "cpu_flash", "packed"),
            (BF16, "auto", "contiguous"),
        ]
    )
    with gpu((6, 1)):
        assert not all_wrong([replace(case, backend="auto", d=8)])
    assert not all_wrong([replace(case, layout=contiguous(301, 2), dtype=F64)])
    assert len(make_plan(case.pattern, 4000, causal=causal).calls) <= 32


@pytest.mark.parametrize("backend", ["auto", "cpu_flash", "eager"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_key_changes_no_row_behind_its_window(value, backend):
    window = blocks.sliding_window(tokens=50)
    q, k, v = tensors(window, 300)
    spoiled, how = k.clone(), {"causal": True, "backend": backend}
    spoiled[:, 160] = value
    clean, found = (attention(q, x, v, window, **how) for x in (k, spoiled))
    for rows in (slice(0, 160), slice(210, 300)):
        assert reference.error(found[:, rows], clean[:, rows], 1.0) <= 5e-6


@pytest.mark.parametrize("value", [3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_later_key_changes_no_earlier_row_whatever_it_is(value, dtype):
    """Its scores overflow: an additive mask alone would make NaN of infinite ones that
    it hides.
    """
    window = blocks.sliding_window(1, block_size=64)
    q, k, v = (t.requires_grad_() for t in tensors(window, 256, dtype))
    dout = torch.ones(1, 160, 2, 16, dtype=dtype)
    spoiled = k.detach().clone()
    spoiled[:, 160] = value
    bound = reference.EXACT[F32] if dtype == F32 else 2**-8  # one rounding
    clean, found = (
        attention(q, x, v, window, causal=True)[:, :160] for x in (k, spoiled)
    )
    assert reference.error(found, clean, 1.0) <= bound
    if value == 3e38:  # 0 times others is NaN in any product of keys and gradients
        want, got = (
            torch.autograd.grad(out, q, dout)[0][:, :160] for out in (clean, found)
        )
        assert reference.error(got, want, 1.0) <= bound


@pytest.mark.parametrize("causal", [False, True])
def test_counts_are_brute_force(causal):
    for pattern in (*PATTERNS, BlockSparse([Window(3, 1)], 1)):
        x = torch.arange(101)
        shown = pattern.multiplicity(x, x, n=101, head=0, heads=1)
        pairs = int((shown.tril() if causal else shown).sum())
        assert (
            pattern.pairs(101, causal) == pairs
            and pattern.density(101, causal) == pairs / 101**2
        )
        assert count_pairs(pattern, 101, 4, 2, causal) == (4 * pairs, 4 * pairs)
        for first, last in ((0, 0), (40, 55), (96, 100)):
            start, stop = pattern.reach(first, last, 101)
            assert (
                not shown[first : last + 1, :start].any()
                and not shown[first : last + 1, stop:].any()
            )
        assert patterns.from_dict(pattern.to_dict()) == pattern and "\n" not in str(
            pattern
        )


def test_near_misses_nothing_and_neighbours_in_it_are_neighbours():
    far = BlockSparse([Window(20), Global(3), Coarse(16, 40), Strided(7, 2)], BLOCK)
    for pattern in (
        *PATTERNS[:-1],
        far,
        BlockSparse([Global(2, columns=False), Window(2**40, 0)], BLOCK),
    ):
        n = 8 * 200 - 3
        whole = pattern.blocks(n)
        for rows in (
            [0],
            [*range(5, 70)],
            [*range(150, 200)],
            [*range(20, 30), *range(170, 180)],
        ):
            cols, seen = pattern.near(torch.tensor(rows), n), whole[rows].any(0)
            assert seen.sum() == seen[cols].sum()
            gaps = cols.diff() > 1
            assert not (seen[cols[:-1]] & seen[cols[1:]] & gaps).any()


@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_grows_with_what_is_visible_and_its_calls_do_not(causal):
    """Over four times the length a plan forms four times as many elements, not sixteen."""
    size = {"block_size": 64}
    parts = (
        blocks.sliding_window(2, **size),
        blocks.local_global(2, 4, **size),
        blocks.bigbird(1, 2, 3, **size),
    )
    for pattern in (
        *parts,
        BlockSparse([Random(3)], 64),
        blocks.hierarchical([(1, 1), (8, 64)], **size),
    ):
        formed, calls = [], []
        for n in (2**16, 2**18):
            with Products() as found:
                calls.append(len(make_plan(pattern, n, causal=causal).calls))
            formed.append(found.total)
        assert formed[1] < 6 * formed[0]
        assert calls[1] <= calls[0] + 4 <= 40


@pytest.mark.parametrize("number, count", [(2, 5), (3, 5), (1, 4), (4, 4), (9, 4)])
def test_random_blocks_differ_and_every_set_of_them_is_as_likely(number, count):
    """5,000 draws or more; the bound is five standard deviations."""
    seen = torch.cat(
        [BlockSparse([Random(number, seed)], 1).blocks(count) for seed in range(1250)]
    )
    assert (seen.sum(1) == min(number, count)).all()
    codes = (seen * 2 ** torch.arange(count)).sum(1)
    sets = math.comb(count, min(number, count))
    found = codes.unique(return_counts=True)[1] / len(codes)
    assert len(found) == sets
    assert (found - 1 / sets).abs().max() <= 5 * (
        1 / sets * (1 - 1 / sets) / len(codes)
    ) ** 0.5


def test_density_is_solved_for():
    pattern = blocks.local_global(1, 4)
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
    assert (
        BlockSparse([Window(2**40, 0), Strided(2**33, 2**33)], 16)
        .blocks(64)
        .equal(torch.ones(4, 4).bool().tril())
    )


def parts(*given):
    """From parts that ``to_dict`` would not write."""
    return lambda: patterns.from_dict(
        {"kind": "block_sparse", "parts": list(given), "block_size": 8}
    )


WINDOW = {"part": "window", "before": 1}
MASK = torch.ones(7, 7, dtype=torch.bool)
EACH = (
    torch.rand(4, 4, 4, generator=torch.Generator().manual_seed(3)) < 0.6
)  # (heads, blocks, blocks)


def block_mask(rule, heads=None, batch=None, n=64):
    return flex_attention.create_block_mask(rule, batch, heads, n, n, "cpu", 16)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("group", [None, ringlab.Simulated(2)])
def test_each_head_has_its_own_mask(kv_heads, group):
    """Equal to torch's attention with the mask of all heads; two heads share theirs."""
    mask = EACH.clone()
    mask[3] = mask[0]
    pattern = blocks.from_mask(mask, block_size=16)
    q, k, v = (
        torch.randn(2, 64, heads, 8, dtype=F64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    )
    whole = (
        mask.repeat_interleave(16, 1).repeat_interleave(16, 2).tril()
    )  # (heads, n, n)
    out, lse = attention(q, k, v, pattern, causal=True, return_lse=True, group=group)
    bias = torch.zeros(whole.shape, dtype=F64).masked_fill_(~whole, -torch.inf)
    inputs = (t.transpose(1, 2) for t in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        *inputs, attn_mask=bias, enable_gqa=True
    ).transpose(1, 2)
    want = torch.where(whole.any(-1).T[None, :, :, None], want, 0.0)
    assert reference.error(out, want, 1.0) <= 1e-12
    assert torch.equal(lse == -torch.inf, ~whole.any(-1).expand(2, 4, 64))
    assert (
        reference.error(
            reference.attention(q, k, v, pattern, causal=True)[0], want, 1.0
        )
        <= 1e-12
    )
    dout = torch.randn_like(out)
    for dx, wanted in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(want, (q, k, v), dout),
    ):
        assert reference.error(dx, wanted.nan_to_num(), 1.0) <= 1e-12


@pytest.mark.parametrize(
    "rule, causal",
    [
        (lambda b, h, q, k: k >= 0, False),
        (lambda b, h, q, k: q >= k, True),
        (lambda b, h, q, k: (q >= k) & ((q // 16 - k // 16 < 2) | (k < 16)), True),
        (lambda b, h, q, k: (q // 32 == k // 32) & (h % 2 == 0) | (k < 16), False),
    ],
)
@pytest.mark.parametrize("n", [64, 90])
def test_a_block_mask_of_flex_attention_is_a_pattern(rule, causal, n):
    pattern = blocks.from_mask(block_mask(rule, 4, n=n), causal=causal)
    shown = flex_attention.create_mask(rule, None, 4, n, n, "cpu")[0]
    at = torch.arange(n)
    for head in range(4):
        seen = pattern.multiplicity(at, at, n=n, head=head, heads=4) > 0
        assert torch.equal(seen.tril() if causal else seen, shown[head])


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: BlockSparse([], 8), r"parts must be a list of parts, .*, got \[\]"),
        (
            lambda: BlockSparse(Window(1), 8),
            r"parts must be a list of parts, as \[Window\(1\)\], got Window",
        ),
        (
            lambda: BlockSparse([type("Near", (Window,), {})(1)], 8),
            r"one of Window.*, no subclass, got Near\(before",
        ),
        (lambda: Global(1, False, False), "rows, columns or both must be True"),
        (
            lambda: Given(("ff", "1")),
            "rows must be hexadecimal bit sets, one for each block",
        ),
        (
            lambda: blocks.hierarchical([(1,)]),
            r"levels must be a list of \(stride, reach\), .*, got \[\(1,\)\]",
        ),
        (
            lambda: blocks.from_mask(torch.ones(0, 0, dtype=torch.bool)),
            "of at least one block",
        ),
        (
            lambda: blocks.from_mask(MASK, block_size=8).blocks(64),
            "the mask given is of 7 blocks, n = 64 has 8; .*block_size=1",
        ),
        (
            lambda: blocks.from_mask(MASK[:, :6]),
            r"got Tensor of torch.bool, shape \(7, 6\), torch.strided on cpu",
        ),
        (
            lambda: blocks.from_mask(MASK.to_sparse()),
            r"got Tensor of .*, shape \(7, 7\), torch.sparse_coo on cpu",
        ),
        (
            lambda: blocks.from_mask(MASK.to("meta")),
            r"neither nested, sparse nor meta, got .*, torch.strided on meta",
        ),
        (
            lambda: blocks.from_mask(
                torch.nested.nested_tensor([MASK[0]], layout=torch.jagged)
            ),
            "got NestedTensor$",
        ),
        (lambda: blocks.from_mask(MASK, causal=True), "is not causal itself"),
        (
            lambda: blocks.from_mask(block_mask(lambda b, h, q, k: q >= k)),
            "head 0: block 0 .* not seen whole; is the mask c",
        ),
        (
            lambda: blocks.from_mask(
                block_mask(lambda b, h, q, k: q - k < 9), causal=True
            ),
            "neither whole nor cut by causal.* BLOCK_SIZE .*sliding_window.tokens=",
        ),
        (
            lambda: blocks.from_mask(block_mask(lambda b, h, q, k: q >= k, 1, 2)),
            "one batch entry, got .* 2 entries",
        ),
        (
            lambda: blocks.PerHead([]),
            r"PerHead takes a tuple of block-sparse patterns, got \[\]",
        ),
        (
            lambda: attention(*[torch.ones(1, 64, 3, 8)] * 3, blocks.from_mask(EACH)),
            "for 4 query heads, q has 3",
        ),
        (lambda: blocks.sliding_window(), "give before, .*, or tokens"),
        (lambda: blocks.sliding_window(1, tokens=2), "give before, .*, or tokens"),
        (lambda: blocks.sliding_window(tokens=2, block_size=0), "tokens, without one"),
        (lambda: blocks.sliding_window(tokens=0), "tokens must be a positive integer"),
        (
            lambda: blocks.sliding_window(1) | blocks.sliding_window(1, block_size=64),
            "one block size, got 128 and 64",
        ),
        (
            lambda: BlockSparse([Window(1), Window(3)], 8).with_density(0.5, 64),
            "must have one window, or none and one",
        ),
        (
            lambda: BlockSparse([Strided(2)], 8).with_density(0.5, 64),
            "must have one window, or none and one",
        ),
        (
            lambda: blocks.local_global(1, 1).with_density(1.5, 1024),
            r"density must be in \(0, 1\], got 1.5",
        ),
        (
            lambda: patterns.from_dict({"kind": "dense", 3: 4, "size": 5}),
            "'dense': keywords must be strings",
        ),
        (parts(7), "unknown part of a block-sparse pattern: 7; known: window, strided"),
        (
            parts({"part": ["window"]}),
            r"unknown part of a block-sparse pattern: {'part': \['window'\]}",
        ),
        (
            parts({"part": "x" * 3000}),
            r"unknown part of a block-sparse pattern: {'part': 'x{87}\.\.\.; known: window",
        ),
        (
            parts({"part": "window"}),
            "no part of .*: {'part': 'window'}: .* missing 1 required positional .*: 'before'",
        ),
        (
            parts(WINDOW | {"size": 2}),
            "no part of .*: .* got an unexpected keyword argument 'size'",
        ),
        (parts(WINDOW | {5: 2}), "no part of .*: keywords must be strings"),
        (parts({"part": "given", "rows": [[1]]}), "rows must be hexadecimal bit sets"),
    ],
)
def test_wrong_values_are_one_line(make, why):
    with refused(ValueError, match=why):
        make()


@pytest.mark.parametrize(
    "system",
    [
        ringlab.BlockSparseRingDilatedAttention,
        ringlab.BlockSparseOptimized,
        ringlab.BlockSparseTorchSparse,
    ],
)
def test_published_systems_compute_one_function(system):
    q, k, v = tensors(PATTERNS[0], 101, F64)
    dilated = BlockSparse([Segment(4), Segment(8, 2)], BLOCK)
    for causal in (False, True):
        by_lengths = system([32, 64], [1, 2], block_size=BLOCK)(
            q, k, v, is_causal=causal
        )
        given = system(pattern=dilated, use_gradient_checkpointing=True)(
            q, k, v, is_causal=causal
        )
        want, _ = reference.attention(q, k, v, dilated, causal=causal)
        assert (
            reference.error(by_lengths, want, 1.0) <= 1e-12
            and reference.error(given, want, 1.0) <= 1e-12
        )
        asked = system(density=0.3, block_size=BLOCK)
        solved = asked.pattern_for(101, causal)
        assert abs(solved.density(101, causal) - 0.3) < 0.08 and isinstance(
            solved.parts[0], Window
        )
        want, _ = reference.attention(q, k, v, solved, causal=causal)
        assert reference.error(asked(q, k, v, is_causal=causal), want, 1.0) <= 1e-12


@pytest.mark.parametrize(
    "arguments, why",
    [
        (
            {},
            "takes segment_lengths and dilation_rates, or density, or pattern: one of them",
        ),
        ({"density": 0.1, "pattern": PATTERNS[0]}, "one of them"),
        (
            {"segment_lengths": [32], "dilation_rates": [1, 2]},
            "differ in length: 1 and 2",
        ),
        (
            {"segment_lengths": [100], "dilation_rates": [1], "block_size": 64},
            "100 is no multiple of the block size",
        ),
        ({"pattern": patterns.Dense()}, "pattern must be a BlockSparse"),
    ],
)
def test_published_systems_refuse_in_one_line(arguments, why):
    with refused(ValueError, match=why):
        ringlab.BlockSparseOptimized(**arguments)


@pytest.mark.parametrize("tokens", [1, 6, 40, 99])
def test_a_window_in_tokens_is_exact(tokens):
    at = torch.arange(70)
    window = blocks.sliding_window(tokens=tokens)
    shown = window.multiplicity(at, at, n=70, head=0, heads=1)
    assert torch.equal(shown > 0, (at[:, None] - at).abs() < tokens)


@pytest.mark.parametrize(
    "before, size, warned",
    [(64, {}, True), (63, {}, False), (512, {"block_size": 128}, False)],
)
def test_blocks_that_may_be_meant_as_tokens_are_warned_of(before, size, warned):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pattern = blocks.sliding_window(before, **size)
    assert [one.filename for one in found] == [__file__] * warned
    assert all(f"tokens={before}" in str(one.message) for one in found)
    assert pattern == BlockSparse([Window(before)], 128)


def test_the_names_of_blocks_are_patterns_and_their_makers():
    assert set(dir(blocks)) == set(blocks.__all__) >= {"Window", "sliding_window"}
    modules = {getattr(blocks, name).__module__ for name in dir(blocks)}
    assert modules == {"ringlab.block_patterns"}


def test_patterns_are_drawn():
    assert (
        patterns.show(patterns.Dilated([2, 4], [1, 2]), 4) == "███ \n██  \n█ ██\n  ██"
    )
    assert patterns.show(patterns.Dense(), 3, causal=True) == "█  \n██ \n███"
    with refused(ValueError, match="below heads"):
        patterns.show(patterns.Dense(), 3, head=1)
    lines = patterns.show(blocks.local_global(1, 1), 1 << 14, width=32).split("\n")
    assert (
        [len(line) for line in lines] == [32] * 32
        and lines[20][20] in "▒▓█"
        and lines[20][5] == " "
    )


def test_a_sequence_may_be_shorter_than_a_block_and_have_fewer_blocks_than_a_part_asks_for():
    short = BlockSparse([Window(1), Global(9), Random(5)], 8)
    for n in (1, 7, 13):
        assert short.blocks(n).all() and short.pairs(n) == n * n
    q, k, v = (torch.randn(1, 100, 2, 8, dtype=torch.float64) for _ in range(3))
    want, _ = reference.attention(q, k, v, ringlab.Dense(), causal=True)
    assert (
        reference.error(
            attention(q, k, v, blocks.bigbird(1, 1, 2, block_size=128), causal=True),
            want,
            1.0,
        )
        < 1e-12
    )
