"""Attention to selected keys across ranks: the answer of one device, and the bytes of
the closed form.
"""

import pytest
import torch
from ringlab import Selected, Simulated, attention, reference
from ringlab.ring import counting
from ringlab.ring.launch import launch
from ringlab.ring.selected import bytes_sent
from selected_cases import of_this_rank, rank_call, weights_of


def blocks_seen(q, k, pattern: Selected, causal: bool, layout) -> list:
    """Of each rank, which blocks (b, blocks, h_kv) its queries see, from M."""
    (b, n, heads, _), kv_heads, size = q.shape, k.shape[2], pattern.granularity
    number, keys, seen = -(-n // size), torch.arange(n), []
    for rank in range(layout.ranks):
        queries = keys[layout.ranges(rank)[0].start : layout.ranges(rank)[0].stop]
        mine = torch.zeros(b, number, kv_heads, dtype=torch.bool)
        for head in range(heads):
            m = pattern.multiplicity(queries, keys, head=head, heads=heads)
            if causal:
                m = m & (keys <= queries[:, None])
            padded = torch.zeros(b, number * size, dtype=torch.bool)
            padded[:, :n] = m.any(1)
            mine[:, :, head * kv_heads // heads] |= padded.view(b, number, size).any(2)
        seen.append(mine)
    return seen


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_give_the_answer_of_one_device_for_the_bytes_of_the_closed_form(ranks):
    cases = [case for seed in range(120) if (case := rank_call(seed, ranks))]
    assert len(cases) >= 20
    for tensors, pattern, options, layout in cases:
        parts, whole = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
        sinks = torch.linspace(-1, 1, tensors[0].shape[2], dtype=torch.float64)
        more = options | {"return_lse": True, "sinks": sinks}
        group = {"group": Simulated(ranks), "layout": layout}
        with counting() as there:
            out, lse = attention(*parts, pattern, **group, **more)
        right, right_lse = attention(*whole, pattern, **more)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        with counting() as back:
            ((out * dout).sum() + (lse * dlse).sum()).backward()
        ((right * dout).sum() + (right_lse * dlse).sum()).backward()
        floor = reference.gradient_floor(*tensors[:2], dout, options["scale"])
        assert reference.error(out, right, 1.0) <= 1e-12
        assert reference.error(lse, right_lse, 1.0) <= 1e-12
        for t, e in zip(parts, whole):
            assert reference.error(t.grad, e.grad, floor) <= 1e-12, str(pattern)
        seen = blocks_seen(*tensors[:2], pattern, options["causal"], layout)
        for rank in range(ranks):
            sent = bytes_sent(pattern, layout, rank, seen, tensors[0])
            assert sent == (there.from_rank(rank), back.from_rank(rank))


def test_processes_give_the_answer_of_one_device():
    seeds = [seed for seed in range(120) if rank_call(seed, 3)][:12]
    by_rank = launch(_all, 3, seeds)
    for number, seed in enumerate(seeds):
        tensors, pattern, options, layout = rank_call(seed, 3)
        whole = [t.clone().requires_grad_() for t in tensors]
        out, lse = attention(*whole, pattern, return_lse=True, **options)
        (out * weights_of(out)).sum().backward()
        right = out, lse, *(t.grad for t in whole)
        floor = reference.gradient_floor(
            *tensors[:2], weights_of(out), options["scale"]
        )
        for i, want in enumerate(right):
            got = torch.cat([each[number][i] for each in by_rank], 2 if i == 1 else 1)
            assert reference.error(got, want, 1.0 if i < 2 else floor) <= 1e-12


def _all(seeds):
    return [of_this_rank(seed) for seed in seeds]
