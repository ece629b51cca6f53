import pytest
import torch
from ringlab.engine.execute import merge, merge_

INF = float("inf")


def in_place(outs, lses):
    """``merge_`` of one part after another, on strided views."""
    out = torch.zeros(*outs[0].shape[:2], 2 * outs[0].shape[2], outs[0].shape[3], dtype=outs[0].dtype)[:, :, ::2]
    lse = torch.full_like(lses[0].transpose(1, 2), -INF).transpose(1, 2)
    for part in zip(outs, lses):
        merge_(out, lse, *part)
    return out, lse


@pytest.mark.parametrize("join", [merge, in_place])
def test_parts_are_joined_by_their_weights_in_any_order(join):
    torch.manual_seed(0)
    outs = [torch.randn(2, 5, 3, 4, dtype=torch.float64) for _ in range(4)]  # (b, n, h, d)
    lses = [torch.randn(2, 3, 5, dtype=torch.float64) * 3 for _ in range(4)]  # (b, h, n)
    for i, lse in enumerate(lses):
        lse[0, 0, i] = -INF  # a different row is empty in each part
        lse[1, 2, 4] = -INF  # and this one in all of them
    weights = torch.stack(lses).exp().transpose(2, 3).unsqueeze(-1)  # (p, b, n, h, 1)
    want = (torch.stack(outs) * weights / weights.sum(0)).sum(0).nan_to_num(0.0), torch.stack(lses).logsumexp(0)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        found = join([outs[i] for i in order], [lses[i] for i in order])
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("join", [merge, in_place])
@pytest.mark.parametrize(
    "a, b, out, lse", [(0, 800, 1, 800), (800, 0, 0, 800), (-INF, 3, 1, 3), (3, -INF, 0, 3), (-INF, -INF, 0, -INF)]
)
def test_extreme_differences_do_not_overflow(join, a, b, out, lse):
    one = torch.ones(1, 1, 1, 1)
    found = join([0 * one, one], [torch.full((1, 1, 1), float(x)) for x in (a, b)])
    assert [float(x) for x in found] == [out, lse]
