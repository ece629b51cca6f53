"""Partial results whose log-sum-exps lie far apart; ordinary ones are in the matrix."""

import pytest
import torch
from ringlab.engine.execute import merge, merge_

INF = float("inf")


def in_place(outs, lses):
    """``merge_`` of one part after another."""
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -INF)
    for part in zip(outs, lses):
        merge_(out, lse, *part)
    return out, lse


@pytest.mark.parametrize("join", [merge, in_place])
@pytest.mark.parametrize(
    "a, b, out, lse",
    [
        (0, 800, 1, 800),
        (800, 0, 0, 800),
        (-INF, 3, 1, 3),
        (3, -INF, 0, 3),
        (-INF, -INF, 0, -INF),
    ],
)
def test_extreme_differences_do_not_overflow(join, a, b, out, lse):
    one = torch.ones(1, 1, 1, 1)
    found = join([0 * one, one], [torch.full((1, 1, 1), float(x)) for x in (a, b)])
    assert [float(x) for x in found] == [out, lse]
