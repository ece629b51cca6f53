"""What a caller switches on for its own operators does not change what this library
builds, and a FLOP counter sees attention.
"""

import random

import pytest
import torch
from matrix import Case, any_case, drawn, wrong
from random_cases import seeds
from ringlab import Dense, Dilated, attention, blocks, cost, kernels
from ringlab import cache as caches
from ringlab.ring import contiguous, exchange
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("seed", range(3))
def test_first_calls_under_a_default_device_are_right(seed):
    """As under torch.set_default_device("cuda"), with tensors on another device."""
    rng = random.Random(seed)
    for _ in seeds(2):
        case = any_case(rng)
        inputs, dout, dlse = drawn(case)
        caches.GLOBAL.clear()
        kernels.forget_probes()
        with torch.device("meta"):
            case.run(inputs, dout, dlse)
        assert not wrong(case)


def test_first_calls_of_ranks_under_a_default_device_are_right():
    for scheme in ("plan", "ring", "auto"):
        case = Case(Dense(), 48, causal=True, layout=contiguous(48, 2), scheme=scheme)
        inputs, dout, dlse = drawn(case)
        caches.GLOBAL.clear()
        exchange.rows_needed.cache_clear()
        with torch.device("meta"):
            case.run(inputs, dout, dlse)
        assert not wrong(case)


def test_the_first_call_of_a_process_may_be_without_data():
    caches.GLOBAL.clear()
    kernels.forget_probes()
    with FakeTensorMode():
        q = torch.randn(1, 64, 4, 16)
        out = attention(q, q, q, Dilated([16, 32], [1, 2]), causal=True)
    assert out.shape == (1, 64, 4, 16)
    assert not wrong(Case(Dilated([16, 32], [1, 2]), 64, causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [Dense(), Dilated([16, 64], [1, 2]), blocks.sliding_window(1, block_size=16)],
)
def test_a_flop_counter_counts_each_visible_pair_once(pattern, causal):
    q = torch.randn(2, 64, 4, 16, requires_grad=True)
    k, v = (torch.randn(2, 64, 2, 16, requires_grad=True) for _ in range(2))
    _, pairs = cost.count_pairs(pattern, 64, 4, 2, causal)
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, pattern, causal=causal)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 2 * 2 * 16 * pairs  # batch, products, a multiply and an add
    assert counter.get_total_flops() == 3.5 * forward
