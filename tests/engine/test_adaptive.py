"""Blocks chosen by content: the dense oracle with an explicit M, forward and backward,
causality, and training.
"""

from dataclasses import replace

import pytest
import torch
from matrix import Case, adaptive_reference, chosen, drawn, means
from ringlab import (
    Adaptive,
    AdaptiveBlockSparse,
    Selected,
    adaptive_attention,
    reference,
)
from ringlab.adaptive import choose_blocks

SIZE, TOP_K = 8, 3
ONE = Case(
    Adaptive(SIZE, TOP_K), 101, heads=2, kv_heads=2, weighted=True
)  # a last block of 5 rows
THREE = Case(Adaptive(SIZE, TOP_K), 97, batch=3, weighted=True)  # of 1
EVEN = Case(Adaptive(SIZE, TOP_K), 96, batch=2, heads=2, kv_heads=1, weighted=True)


def tensors(case, dtype=torch.float64):
    """q, k, v and z with gradients, a cotangent for out, one for lse."""
    inputs, *cotangents = drawn(replace(case, dtype=dtype))
    return [*(t.requires_grad_() for t in inputs), *cotangents]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_and_large_scales_of_half_precision(dtype):
    """log M / scale is beyond float16's range; scores are summed in fp32, and lse shows
    that log M is not rounded.
    """
    for scale in (1e-4, 20.0, None):
        case = replace(ONE, dtype=dtype, scale=scale)
        inputs, *_ = drawn(case)
        out, lse = case.call(*inputs)
        want, right = adaptive_reference(case, *(t.double() for t in inputs))
        apart = reference.error(out, want, 1.0), reference.error(lse, right, 1.0)
        assert max(apart) <= 10 * torch.finfo(dtype).eps and (
            scale is not None or apart[1] <= 1e-4
        ), (scale, apart)


def test_ones_stay_ones_and_extreme_weights_stay_finite():
    for dtype, most in (
        (torch.float64, 1e-12),
        (torch.float32, 1e-6),
        (torch.float16, 2e-3),
    ):
        q, k, _, z, *_ = tensors(THREE, dtype)
        with torch.no_grad():
            z[:, :, ::2] *= 1e4
            z[0, :, 1::4, 0] = -torch.inf  # M = 0: chosen and not seen
        for causal in (False, True):
            for logits in (None, z):
                out = adaptive_attention(
                    q,
                    k,
                    torch.ones_like(k),
                    Adaptive(SIZE, TOP_K),
                    logits,
                    causal=causal,
                )
                assert (out - 1).abs().max() <= most
            grads = torch.autograd.grad(out.double().square().sum(), (q, k, z))
            assert all(torch.isfinite(g).all() for g in grads)


def scored(q, k, weights, causal):
    """The module's logits by definition, in float64: (b, h, blocks, blocks)."""
    q_, k_ = (
        means(q, SIZE) @ weights[0],
        means(k.repeat_interleave(q.shape[2] // k.shape[2], 2), SIZE) @ weights[1],
    )
    z = q.shape[3] ** -0.5 * (q_.roll(1, 2) if causal else q_) @ k_.mT
    return z.tril(-1) if causal else z


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", [ONE, THREE, EVEN], ids=["one", "three", "even"])
def test_the_scorer_gets_the_oracles_gradient(case, dtype, causal):
    torch.manual_seed(1)
    q, k, v, _, dout, _ = tensors(case, dtype)
    layer = AdaptiveBlockSparse(16, SIZE, TOP_K, dtype=dtype)
    assert all(
        torch.equal(weight, torch.eye(16, dtype=dtype)) for weight in layer.parameters()
    )
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.3 * torch.randn_like(weight)).mul_(2)
    given = (q, k, v, *layer.parameters())
    out = layer(q, k, v, is_causal=causal)
    exact = [t.detach().double().requires_grad_() for t in given]
    z = scored(*exact[:2], exact[3:], causal)
    want, _ = adaptive_reference(replace(case, causal=causal), *exact[:3], z)
    grads, wanted = (
        torch.autograd.grad((o * dout).sum(), of)
        for o, of in ((out, given), (want, exact))
    )
    floor = reference.gradient_floor(q, k, dout)
    found = [
        reference.error(out, want, 1.0),
        *(reference.error(g, w, floor) for g, w in zip(grads, wanted)),
    ]
    assert max(found) <= reference.EXACT[dtype], dict(
        zip(("out", "dq", "dk", "dv", "q_score", "k_score"), found)
    )


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_changes_nothing_before_it(dtype, backend):
    q, k, v, *_ = (t.detach() for t in tensors(THREE, dtype))
    layer, plain = (
        AdaptiveBlockSparse(16, SIZE, TOP_K, backend=backend),
        (Adaptive(SIZE, TOP_K), None),
    )
    for run in (
        lambda *t: layer(*t, is_causal=True),
        lambda *t: adaptive_attention(*t, *plain, causal=True, backend=backend),
    ):
        with torch.no_grad():
            before = run(q, k, v)
            for t in (0, 5, 8, 15, 16, 43, 95, 96):
                other = [x.clone() for x in (q, k, v)]
                for x in other:
                    x[:, t] = 30 * torch.randn_like(x[:, t])
                after = run(*other)
                assert torch.equal(after[:, :t], before[:, :t]) and not torch.equal(
                    after[:, t:], before[:, t:]
                )


@pytest.mark.parametrize("causal", [False, True])
def test_training_moves_the_scorer_and_lowers_the_loss(causal):
    """A teacher reads the key block that matches along one hidden direction; only the
    scorer can learn which.
    """
    torch.manual_seed(0)
    b, n, h, d = 4, 64, 2, 8
    teacher, layer = (AdaptiveBlockSparse(d, SIZE, 4) for _ in range(2))
    with torch.no_grad():
        teacher.q_score.copy_(6 * torch.randn(d, d))
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=0.1), []
    start = [p.detach().clone() for p in layer.parameters()]
    q, k, v = (
        torch.randn(b, n // SIZE, 1, h, d).expand(-1, -1, SIZE, -1, -1).flatten(1, 2)
        for _ in range(3)
    )
    want = teacher(q, k, v, is_causal=causal).detach()
    for _ in range(40):
        optimizer.zero_grad()
        loss = (layer(q, k, v, is_causal=causal) - want).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = [(p - was).norm().item() for p, was in zip(layer.parameters(), start)]
    assert losses[-1] < 0.6 * losses[0] and min(moved) > 0.5, (losses[::10], moved)


def test_autocast_changes_nothing():
    q, k, v, *_ = tensors(THREE, torch.float32)
    layer = AdaptiveBlockSparse(16, SIZE, TOP_K)
    for run in (layer, lambda *t: adaptive_attention(*t, layer.pattern)):
        want = run(q, k, v)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(run(q, k, v), want)


def kept_by_share(z, picks, top_p: float, causal: bool) -> bool:
    """Whether ``picks`` of rows z (rows, blocks) are the best of which those before each
    have less than a share of ``top_p``.
    """
    for i, (row, chosen_) in enumerate(zip(z, picks.tolist())):
        shares = (row[:i] if causal else row).softmax(0)
        order = shares.argsort(descending=True).tolist()
        before = [i] if causal else []
        kept, total = list(before), 0.0
        for block in order[: len(chosen_) - len(before)]:
            if total >= top_p:
                break
            kept.append(block)
            total += float(shares[block])
        if kept + [-1] * (len(chosen_) - len(kept)) != chosen_:
            return False
    return True


@pytest.mark.parametrize("causal", [False, True])
def test_top_p_keeps_the_best_blocks_whose_shares_reach_it(causal):
    *inputs, _, _ = tensors(EVEN)
    q, k, v, z = (t.detach() for t in inputs)
    z = 2 * z
    counts = []
    for top_p in (0.2, 0.6, 0.9, 1.0):
        pattern = Adaptive(SIZE, 5, top_p)
        picks = choose_blocks(z, pattern, causal, None)
        assert all(
            kept_by_share(z[b, h], picks[b, h], top_p, causal)
            for b in range(2)
            for h in range(2)
        )
        out = adaptive_attention(q, k, v, pattern, z, causal=causal)
        weights = z.gather(-1, picks.clamp(min=0)).masked_fill(picks < 0, -torch.inf)
        number = (picks >= 0).sum(-1, keepdim=True)
        log_m = weights.log_softmax(-1) + number.log()
        selected = Selected(picks, SIZE, SIZE, log_weights=log_m)
        right, _ = reference.attention(q, k, v, selected, causal=causal)
        assert reference.error(out, right, 1.0) <= 1e-12
        counts.append(int((picks >= 0).sum()))
    assert counts == sorted(set(counts)), counts
    assert str(Adaptive(SIZE, 5, 0.5)).endswith("up to a share of 0.5")
    for wrong in (0.0, 1.5, float("nan"), "all"):
        with pytest.raises(ValueError, match="top_p must be above 0 and at most 1"):
            Adaptive(SIZE, 5, wrong)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_has_the_whole_share(value):
    """And a causal row its own block."""
    z = torch.zeros(1, 1, 4, 4)
    z[..., 1] = value
    picks = [
        choose_blocks(z, Adaptive(8, 3, 0.5), causal, None)[0, 0].tolist()
        for causal in (False, True)
    ]
    own = [[0, -1, -1], [1, 0, -1], [2, 1, -1], [3, 1, -1]]
    assert picks == [[[1, -1, -1]] * 4, own]


def test_pairs_are_brute_force():
    for n in (96, 97, 101):
        count = -(-n // SIZE)
        z, at = torch.randn(1, 1, count, count), torch.arange(n) // SIZE
        for causal in (False, True):
            for top_k in (1, 3, count):
                shown = chosen(z, top_k, causal)[0, 0][at][:, at]
                pairs = int((shown.tril() if causal else shown).sum())
                said = Adaptive(SIZE, top_k).pairs(n, causal)
                assert said == pairs or (
                    not causal and n % SIZE and pairs < said <= pairs + n * SIZE
                )
