"""Folded plans equal the reference, compute each visible pair once, and are chosen
where they gain.
"""

import random
from dataclasses import replace
from itertools import accumulate, product

import matrix
import pytest
import torch
from matrix import BF16, F32, F64, Case, all_wrong
from random_cases import seeds
from ringlab import Dense, Dilated, Execution, attention, cost, reference
from ringlab.cache import PatternCache
from ringlab.engine import folding
from ringlab.engine.dilated import make_plan
from ringlab.kernels import KERNELS
from ringlab.kernels.base import Cost, Kernel
from ringlab.patterns import OFFSETS

LADDER = Dilated([16, 32, 64, 128], [1, 2, 4, 8])


def kernel_of(biases=1.2):
    """A kernel to which only pairs cost; rows with another M run together where biases
    cost no more than ``bias``.
    """

    class Priced(Kernel):
        cost = Cost(
            lambda rows, keys: rows * keys,
            call=0,
            merge=0,
            copied=1,
            bias=1,
            biases=biases,
            block=1,
            gain=1,
        )

    return Priced()


@pytest.fixture
def folded(monkeypatch):
    """Every plan that can be folded is: gives the number of such plans."""
    plans = []

    def fold(*given):
        plans.append(
            folding.fold(
                *given[:-2],
                kernel_of(1.0 if len(plans) % 2 else 1.2),
                cached=given[-1],
            )
        )
        return plans[-1] or make_plan(*given[:4])

    monkeypatch.setattr(folding, "faster", fold)
    return lambda: sum(plan is not None for plan in plans)


def drawn(seed: int) -> Case:
    """A case whose branches nest, in part or not at all."""
    chance = random.Random(seed)
    lengths, rates = [chance.choice([8, 12, 16, 24])], [chance.choice([1, 1, 1, 2])]
    for _ in range(chance.randint(1, 3)):
        nests = chance.random() < 0.8
        lengths.append(
            lengths[-1] * chance.choice([1, 2, 3, 4])
            if nests
            else chance.randint(8, 90)
        )
        rates.append(
            rates[-1] * chance.choice([1, 2, 2, 4]) if nests else chance.randint(1, 8)
        )
    pattern = Dilated(
        lengths,
        [min(r, w) for r, w in zip(rates, lengths)],
        offsets=chance.choice([*OFFSETS]),
    )
    case = replace(matrix.any_case(chance), pattern=pattern, layout=None)
    return replace(
        case,
        n=chance.choice([40, 48, 72, 73, 96]),
        dtype=chance.choice([F64, F32]),
        execution=Execution(cache=PatternCache(), results=matrix.STAINED),
    )


def test_random_patterns_equal_the_reference(folded, monkeypatch):
    """Squares on the diagonal are so small that causal calls are split, too."""
    monkeypatch.setattr(folding, "SQUARE", 8)
    folding._pieces.cache_clear()
    for seed in (some := seeds(50)):
        assert not all_wrong([drawn(seed)])
    folding._pieces.cache_clear()
    assert folded() > 0.6 * len(some)  # forward and backward share a plan


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(folded, causal):
    """At most twice the error of one dense call, with accumulators for some heads at a
    time.
    """
    cases = [
        Case(LADDER, 256, dtype, causal, batch, 4, 2)
        for dtype in (BF16, matrix.F16)
        for batch in (1, 2)
    ]
    assert not all_wrong(
        replace(case, execution=Execution(cache=PatternCache())) for case in cases
    )
    assert folded()


@pytest.mark.parametrize(
    "pattern", [LADDER, Dilated([32, 64], [1, 2]), Dilated([16, 64], [1, 4])], ids=str
)
def test_every_visible_pair_is_computed_once(pattern):
    for n in (128, 512, 320):
        plan = folding.fold(pattern, n, 8, 8, False, F32, kernel_of())
        assert (
            plan.pairs()
            == cost.count_pairs(pattern, n, 8)[1]
            < make_plan(pattern, n, 8, 8).pairs()
        )


def test_causal_calls_compute_little_that_is_hidden():
    pattern = Dilated([2048, 4096], [1, 2])
    plan = folding.fold(pattern, 16384, 8, 8, True, F32, kernel_of())
    assert plan.pairs() <= 1.13 * cost.count_pairs(pattern, 16384, 8, 8, True)[1]


def test_calls_do_not_grow_with_the_sequence():
    pattern = Dilated([2048 * 2**i for i in range(10)], [2**i for i in range(10)])
    for n in (1 << 17, 1 << 20):
        assert len(folding.fold(pattern, n, 8, 8, False, F32).calls) < 200
        assert (
            len(
                folding.fold(
                    Dilated([64, 128], [1, 2]), n, 8, 8, True, F32, kernel_of()
                ).calls
            )
            < 10
        )


def test_those_branches_are_folded_that_make_the_calls_cheapest():
    """Of a ladder fewer together than the pairs alone would ask for: rows of high rates
    see few keys.
    """
    pattern, ours = (
        Dilated([1024 * 2**i for i in range(5)], [2**i for i in range(5)]),
        KERNELS["compiled"],
    )
    chosen, all_folded = (
        folding.fold(pattern, 16384, 8, 8, False, F32, kernel)
        for kernel in (ours, kernel_of())
    )
    apart = make_plan(pattern, 16384, 8, 8)
    assert all_folded.pairs() < chosen.pairs() < apart.pairs() and len(
        chosen.calls
    ) < len(all_folded.calls)
    taken = [folding.cost(plan, False, ours) for plan in (chosen, all_folded, apart)]
    assert taken[0] < 0.97 * taken[1] < 0.95 * taken[2]


def test_what_does_not_nest_is_left_alone():
    for pattern in (
        Dilated([50, 100], [1, 7]),
        Dilated([2, 1 << 14], [1, 1 << 12]),
        Dilated([64], [2]),
    ):
        assert folding.fold(pattern, 1 << 14, 2, 2, False, F32) is None
    assert folding.fold(Dense(), 64, 2, 2, False, F32) is None


def test_the_choice():
    """Long calls gain. Short ones do not, nor causal ones: the kernel's own causal mask
    costs less than a bias.
    """
    first = Dilated([2048, 4096], [1, 2])
    ours, torchs = KERNELS["compiled"], KERNELS["cpu_flash"]
    given = first, 16384, 8, 8
    for causal, kernel in product((False, True), (ours, torchs)):
        assert folding.faster(*given, causal, F32, kernel).same_rows == causal
    given = Dilated([32, 64], [1, 2]), 64, 4, 4, False, F32, ours
    assert folding.faster(*given).same_rows  # branch by branch


def test_the_error_is_that_of_branch_by_branch(monkeypatch):
    """In fp32 at most 1.2 times as large, forward and backward."""
    case = Case(
        Dilated([256, 512, 1024], [1, 2, 4]), 1024, F32, heads=4, kv_heads=4, d=64
    )
    inputs, dout, dlse, want, _ = matrix.judged(case)
    found = []
    monkeypatch.setattr(
        folding, "faster", lambda *given: folding.fold(*given[:-2], kernel_of())
    )
    for way in (None, "views"):
        got = replace(case, way=way, execution=Execution(cache=False)).run(
            inputs, dout, dlse
        )
        found.append(matrix.errors(got, want, inputs[0], inputs[1], dout))
    folded, apart = found
    assert folded != apart and all(folded[name] <= 1.2 * apart[name] for name in apart)


def test_plans_of_many_lengths_share_the_tables_of_their_biases(folded):
    """Of 60 lengths, each a table of its own would be 11 MiB and more."""
    lengths, pattern = range(200, 320, 2), Dilated([128, 256], [1, 2])
    q, execution = torch.randn(1, sum(lengths), 4, 8), Execution(cache=PatternCache())
    how = {"cu_seqlens": [0, *accumulate(lengths)], "backend": "eager"}
    for _ in range(2):
        out = attention(q, q, q, pattern, execution=execution, **how)
        stats = execution.cache.stats()
        assert stats.misses < 80 and 1 << 16 < stats.bytes < 2 << 20
    assert folded() == 60
    for start, n in [*zip(accumulate([0, *lengths]), lengths)][::20]:
        alone = q[:, start : start + n].double()
        want, _ = reference.attention(alone, alone, alone, pattern)
        assert reference.error(out[:, start : start + n], want, 1.0) < 5e-6
