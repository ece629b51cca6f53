import torch
from ringlab.engine.execute import merge, merge_

INF = float("inf")


def parts(count=4, b=2, n=5, h=3, d=4):
    torch.manual_seed(0)
    outs = [torch.randn(b, n, h, d, dtype=torch.float64) for _ in range(count)]
    lses = [torch.randn(b, h, n, dtype=torch.float64) * 3 for _ in range(count)]
    for i, lse in enumerate(lses):
        lse[0, 0, i] = -INF  # a different row is empty in each part
        lse[1, 2, 4] = -INF  # and this one in all of them
    return outs, lses


def plain(outs, lses):
    w = torch.stack(lses).exp()  # (p, b, h, n)
    total = w.sum(0)
    out = sum(o * x.transpose(1, 2).unsqueeze(-1) for o, x in zip(outs, w)) / total.transpose(1, 2).unsqueeze(-1)
    return out.nan_to_num(0.0), total.log()


def test_merge_equals_the_plain_formula_in_any_order():
    outs, lses = parts()
    want = plain(outs, lses)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        got = merge([outs[i] for i in order], [lses[i] for i in order])
        for x, y in zip(got, want):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_merge_in_place_equals_merge_on_strided_views():
    outs, lses = parts()
    want = merge(outs, lses)
    big = torch.full((2, 5, 6, 4), 7.0, dtype=torch.float64)
    out, lse = big[:, :, ::2], torch.empty(2, 5, 3, dtype=torch.float64).transpose(1, 2)
    out.zero_(), lse.fill_(-INF)
    for o, l in zip(outs, lses):
        merge_(out, lse, o, l)
    torch.testing.assert_close(out, want[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want[1], rtol=1e-12, atol=1e-12)
    assert bool((big[:, :, 1::2] == 7.0).all())
    assert bool((out[1, 4, 2] == 0).all()) and float(lse[1, 2, 4]) == -INF


def test_extreme_differences_do_not_overflow():
    one = torch.ones(1, 1, 1, 2)
    for a, b, want_out, want_lse in (
        (0.0, 800.0, 1.0, 800.0), (800.0, 0.0, 0.0, 800.0), (-INF, 3.0, 1.0, 3.0), (3.0, -INF, 0.0, 3.0),
        (-INF, -INF, 0.0, -INF),
    ):  # fmt: skip
        lses = [torch.full((1, 1, 1), x) for x in (a, b)]
        out, lse = merge([0 * one, one], lses)
        assert float(out[0, 0, 0, 0]) == want_out and float(lse) == want_lse
        out, lse = 0 * one, lses[0].clone()
        merge_(out, lse, one, lses[1])
        assert float(out[0, 0, 0, 0]) == want_out and float(lse) == want_lse


def test_merge_gradient():
    outs, lses = parts(count=2)
    outs, lses = [o.requires_grad_() for o in outs], [x.clamp(min=-5).requires_grad_() for x in lses]
    assert torch.autograd.gradcheck(lambda a, b, c, d: merge([a, b], [c, d]), (*outs, *lses))
