"""What a call will cost, told without running it: equal to what the tracker sees when
it runs.
"""

import random
import sys

import numpy as np
import pytest
import torch
from refusals import refused
from ringlab import (
    Execution,
    advise,
    attention,
    block_patterns,
    hardware,
    kernels,
    longest,
    memory,
    meta_run,
    ring,
)
from ringlab.cache import PatternCache
from ringlab.estimate import estimate
from ringlab.hardware import Rates
from ringlab.patterns import Dense, Dilated
from ringlab.ring import Problem
from ringlab.ring.layout import layout_named
from ringlab.ring.volume import sent_bytes
from ringlab.tracking import LiveStorageTracker

estimate_module = sys.modules[
    "ringlab.estimate"
]  # the package's name of it is the function
LADDER = Dilated([256, 512], [1, 2])
WIDE = Dilated([256, 1024], [1, 4], mixing="head_groups", offsets="branch")
BLOCKS = block_patterns.bigbird(1, 1, 1, block_size=64)
SHAPE = {"heads": 4, "head_dim": 16}


def tracked(pattern, n, dtype, passes, causal, backend, execution, kv_heads=4) -> int:
    """The peak of a first call with data."""
    shapes = [(1, n, h, 16) for h in (4, kv_heads, kv_heads, 4)]
    q, k, v, dout = (torch.randn(shape).to(dtype) for shape in shapes)
    back = passes != "fwd"
    kernels.choose("cpu", dtype, 16, causal=causal, backward=back, backend=backend)
    q, k, v = (t.requires_grad_(back) for t in (q, k, v))
    with LiveStorageTracker() as tracker:
        tracker.register(q, k, v, *([dout] if back else []))
        out, lse = attention(
            q,
            k,
            v,
            pattern,
            causal=causal,
            backend=backend,
            execution=execution,
            return_lse=True,
        )
        if back:
            grads = torch.autograd.grad(out, (q, k, v), dout)  # noqa: F841  all results are held
    return tracker.peak_bytes


@pytest.mark.parametrize(
    "pattern, dtype, passes, causal, backend, how, kv_heads",
    [
        (LADDER, torch.float32, "fwd+bwd", True, "auto", {}, 4),
        (LADDER, torch.bfloat16, "fwd+bwd", False, "auto", {"pool": 0}, 2),
        (WIDE, torch.float32, "fwd", False, "auto", {"cache": False}, 4),
        (WIDE, torch.float32, "fwd+bwd", False, "eager", {"tile": 128}, 4),
        (Dense(), torch.float32, "fwd+bwd", True, "auto", {}, 1),
        (BLOCKS, torch.float32, "fwd+bwd", True, "auto", {}, 4),
        (BLOCKS, torch.bfloat16, "fwd", False, "auto", {"pool": 0}, 2),
        (LADDER, torch.float32, "fwd+bwd", False, "auto", {"results": 0}, 4),
        (BLOCKS, torch.float32, "fwd+bwd", False, "auto", {"results": 0}, 4),
    ],
)
def test_the_peak_is_the_one_that_the_tracker_sees(
    pattern, dtype, passes, causal, backend, how, kv_heads
):
    def execution():
        own = {
            k: memory.MemoryPool(threshold_bytes=size)
            for k, size in how.items()
            if k in ("pool", "results")
        }
        return Execution(**{"cache": PatternCache()} | how | own)

    n = 1000
    found = estimate(
        pattern,
        seq_len=n,
        dtype=dtype,
        passes=passes,
        causal=causal,
        backend=backend,
        execution=execution(),
        kv_heads=kv_heads,
        **SHAPE,
    )
    real = tracked(pattern, n, dtype, passes, causal, backend, execution(), kv_heads)
    assert real <= found.peak_bytes <= 1.01 * real
    assert (
        sum(found.parts.values()) == found.peak_bytes and min(found.parts.values()) >= 0
    )
    assert found.parts["q"] == n * 4 * 16 * dtype.itemsize and set(found.parts) == set(
        meta_run.PARTS
    )


@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("scheme", ["plan", "ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(
    "ranks, layout, pattern",
    [(4, "contiguous", WIDE), (3, "zigzag", WIDE), (2, "striped", Dense())],
)
def test_bytes_between_ranks_are_those_of_the_plan(
    ranks, layout, pattern, scheme, passes
):
    across = {"ranks": ranks, "layout": layout, "scheme": scheme}
    found = estimate(
        pattern, seq_len=1200, passes=passes, causal=True, **across, **SHAPE
    )
    problem = Problem(pattern, layout_named(layout, 1200, ranks), True, 4, 4)
    how = {"batch": 1, "head_dim": 16, "dtype": torch.float32, "passes": passes}
    for rank in range(ranks):
        assert found.sent_by_rank[rank] == sent_bytes(problem, rank, scheme, **how)
    assert found.scheme == scheme and (passes == "fwd") == (
        found.parts["gradients"] == 0
    )
    assert found.parts["received"] > 0


@pytest.mark.parametrize("scheme", ["plan", "ring", "all_gather", "ulysses"])
def test_two_sequences_take_twice_the_memory_of_one(scheme):
    each = [
        estimate(
            LADDER,
            seq_len=1024,
            batch=b,
            ranks=2,
            scheme=scheme,
            passes="fwd+bwd",
            causal=True,
            **SHAPE,
        )
        for b in (1, 2)
    ]
    assert 1.9 < each[1].peak_bytes / each[0].peak_bytes <= 2


@pytest.mark.parametrize("scheme", ["plan", "ring", "all_gather", "ulysses"])
def test_the_rank_that_holds_most_is_among_the_few_that_are_run(scheme, monkeypatch):
    rng = random.Random(scheme)
    for _ in range(5):
        ranks, layout = rng.randint(5, 7), rng.choice(["contiguous", "zigzag"])
        call = {
            "ranks": ranks,
            "layout": layout,
            "scheme": scheme,
            "causal": rng.random() < 0.5,
            "heads": 8,
            "head_dim": 16,
            "passes": rng.choice(["fwd", "fwd+bwd"]),
        }
        pattern, n = rng.choice([WIDE, LADDER, Dense()]), rng.randint(300, 700)
        every = estimate(pattern, seq_len=n, **call)
        with monkeypatch.context() as patch:
            patch.setattr(meta_run, "FEW_RANKS", 1)
            few = estimate(pattern, seq_len=n, **call)
        assert 0.98 * every.peak_bytes <= few.peak_bytes <= every.peak_bytes, (
            pattern,
            n,
            call,
        )
        assert few.sent == every.sent


def test_many_ranks_and_long_batches_are_little_work(monkeypatch):
    """A few ranks of 128 are run; a batch of a thousand calls the kernel no more often
    than one of two.
    """
    runs = []
    run = meta_run.run_rank
    monkeypatch.setattr(
        meta_run, "run_rank", lambda *given: runs.append(given[-1]) or run(*given)
    )
    found = estimate(
        LADDER, seq_len=1 << 15, ranks=128, profile="gtx1080", scheme="plan"
    )
    assert (
        len(runs) <= 6
        and found.ranks == 128
        and {rank for rank, _ in found.sent} == set(range(128))
    )
    kernel, made = kernels.KERNELS["eager"], []
    forward = kernel.forward
    monkeypatch.setattr(
        kernel, "forward", lambda *given: made.append(given) or forward(*given)
    )
    counts = []
    for batch in (2, 1000):
        made.clear()
        estimate(LADDER, seq_len=4096, batch=batch, backend="eager", causal=True)
        counts.append(len(made))
    assert 0 < counts[1] <= 2 * counts[0]


def test_block_sparse_ranks():
    found = estimate(BLOCKS, seq_len=1024, ranks=2, **SHAPE)
    assert found.scheme == "plan" and found.sent


def test_bounds_are_the_profiles_rates_and_say_which_binds():
    card = hardware.get_profile("gtx1080")
    found = estimate(Dense(), seq_len=8192, ranks=2, scheme="ring", profile=card)
    flops, moved = 4 * 64 * 8 * 8192**2, 4 * 8192 * 8 * 64 * 4
    assert found.bounds["compute"] == pytest.approx(flops / 2 / 8.873e12)
    assert found.bounds["memory"] == pytest.approx(moved / 2 / 320e9)
    assert found.bounds["network"] == pytest.approx(moved / 4 / 15.75e9)
    assert (found.binds, found.bound_s) == ("compute", found.bounds["compute"])
    assert found.bounded(Rates(link_bytes_per_s=1.0)).binds == "network"
    assert (
        estimate(Dense(), seq_len=64).bounds == {}
        and estimate(Dense(), seq_len=64).binds is None
    )
    assert estimate(Dense(), seq_len=64, ranks=2, profile="generic").bounds == {}


def test_the_busiest_rank_decides():
    """Not the average: ranks that hold and send unequal amounts."""
    layout = ring.uneven((900, 60, 40))
    found = estimate(
        Dense(),
        seq_len=1000,
        ranks=3,
        layout=layout,
        scheme="all_gather",
        profile="gtx1080",
        **SHAPE,
    )
    assert found.parts["q"] == 900 * 4 * 16 * 4
    sent = found.sent_by_rank
    assert sent == [2 * 2 * rows * 4 * 16 * 4 for rows in (900, 60, 40)]
    assert found.bounds["network"] == pytest.approx(sent[0] / 15.75e9)


def test_a_cpus_rates_are_measured_once_and_only_for_its_profile(monkeypatch):
    asked = []
    peaks = hardware.Peaks(1e11, 4e10, 4e10)
    monkeypatch.setattr(
        hardware, "measure_cpu_peaks", lambda name: asked.append(name) or peaks
    )
    estimate_module._probed.cache_clear()
    assert (
        estimate(Dense(), seq_len=64).bounds
        == estimate(Dense(), seq_len=64, profile="generic").bounds
        == {}
    )
    first, again = (estimate(Dense(), seq_len=64, profile="cpu") for _ in range(2))
    estimate_module._probed.cache_clear()
    assert asked == ["float32"] and first == again
    assert first.bounds["memory"] == pytest.approx(
        first.cost.floor_bytes / (1.1 * 4e10)
    )


@pytest.mark.parametrize(
    "profile, dtype, head_dim, backend, fused",
    [
        ("gtx1080", torch.float32, 64, "auto", True),
        ("a100", torch.bfloat16, 64, "auto", True),
        ("gtx1080", torch.bfloat16, 64, "auto", False),
        ("h100", torch.float64, 64, "auto", False),
        ("h100", torch.float32, 3, "auto", False),
        ("h100", torch.float32, 64, "eager", False),
        ("h100", torch.float32, 64, ("flash", "efficient"), True),
        ("generic", torch.bfloat16, 64, "auto", True),
    ],
)
def test_a_gpus_kernel_is_told_by_rule(profile, dtype, head_dim, backend, fused):
    """An eager kernel holds the scores, a fused one does not."""
    found = estimate(
        Dense(),
        seq_len=2048,
        head_dim=head_dim,
        dtype=dtype,
        profile=profile,
        backend=backend,
    )
    assert (found.peak_bytes < 2048**2 * 8 * 4) == fused


@pytest.mark.parametrize(
    "pattern, more",
    [
        (LADDER, {}),
        (WIDE, {"ranks": 3, "scheme": "ring", "passes": "fwd+bwd"}),
        (Dense(), {"profile": "gtx1080"}),
        (BLOCKS, {"passes": "fwd+bwd"}),
    ],
)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(pattern, more):
    budget = np.int64(4 << 20)
    n = longest(pattern, budget, **SHAPE, **more)
    step = max(128 * more.get("ranks", 1), n // 128)
    assert (
        n % 128 == 0
        and estimate(pattern, seq_len=n, **SHAPE, **more).peak_bytes <= budget
    )
    assert estimate(pattern, seq_len=n + step, **SHAPE, **more).peak_bytes > budget


@pytest.mark.parametrize(
    "given, said",
    [
        ({"seq_len": -5}, "seq_len must be a positive"),
        ({"profile": "gtx180"}, "unknown profile 'gtx180'"),
        ({"layout": "zigzag"}, "for several ranks"),
        ({"scheme": "ring"}, "for several ranks"),
        ({"ranks": 2, "scheme": "rng"}, "unknown scheme 'rng'"),
        (
            {"ranks": 6, "scheme": ("ulysses", "ring")},
            "needs a group of two dimensions",
        ),
        ({"passes": "bwd"}, "unknown passes 'bwd'"),
        ({"kv_heads": 3}, "multiple of K/V heads"),
        ({"dtype": torch.int32}, "dtype must be float64"),
        ({"ranks": 2, "layout": "zagzig"}, "unknown layout"),
        (
            {"pattern": BLOCKS, "ranks": 2, "scheme": "ring"},
            "does not serve block-sparse",
        ),
        ({"ranks": 1000}, "at most 128 ranks, got 1000"),
        ({"heads": 10**300}, r"up to 2\*\*35, got"),
        ({"seq_len": 10**300}, r"up to 2\*\*40, got"),
        ({"profile": "h100", "backend": "flsh"}, "unknown backend 'flsh'"),
        ({"execution": "auto"}, "execution must be a"),
        ({"profile": 3}, "profile must be a"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given, said):
    with refused((ValueError, NotImplementedError, TypeError), match=said):
        estimate(**{"pattern": Dense(), "seq_len": 1024} | given)


def test_no_length_is_told_where_none_fits():
    with pytest.raises(ValueError, match="more than the 1,000 there are"):
        longest(LADDER, 1000)


def test_a_budget_is_a_number_or_a_text():
    assert longest(LADDER, "1GiB", **SHAPE) == longest(LADDER, 1 << 30, **SHAPE)


def test_the_length_that_advice_names_is_the_longest_that_fits():
    """With checkpointing, where all layers would need more."""
    how = {"layers": 16, "passes": "fwd+bwd", "heads": 2, "pattern": Dense()}
    how["memory_bytes"] = 1 << 26
    found = advise("gtx1080", 32768, **how)
    longer = advise("gtx1080", found.longest + 128, **how)
    assert advise("gtx1080", found.longest, **how).fits and not longer.fits
