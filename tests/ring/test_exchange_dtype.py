"""Rows of k and v that travel in a narrower dtype: the reference of the rounded rows,
and half the bytes.
"""

import pytest
import torch
from matrix import BF16, BLOCK_SPARSE, F16, F32, F64, LADDER, NAMES, Case, drawn
from ring_cases import told
from ringlab import Dense, Simulated, attention, reference
from ringlab.estimate import estimate
from ringlab.ring import Problem, choose, contiguous, counting, striped, uneven, zigzag
from ringlab.ring.launch import launch
from ringlab.ring.volume import sent_bytes

LAYOUTS = [contiguous(96, 4), zigzag(101, 4), uneven([20, 0, 41, 40]), striped(70, 4)]


def step(case: Case, given, group, **how):
    """out, dq, dk, dv."""
    inputs, dout, _ = given
    inputs = [t.detach().requires_grad_() for t in inputs]
    how |= {
        "group": group,
        "scheme": case.scheme,
        "layout": case.layout,
        "causal": case.causal,
    }
    out = attention(*inputs, case.pattern, **how)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def of_rounded_rows(case: Case, given, dtype):
    """By the float64 reference, rank by rank: its own rows as they are, all others
    rounded; gradients are summed.
    """
    (q, k, v), dout, _ = given
    out, grads = (
        torch.zeros_like(q, dtype=F64),
        [torch.zeros_like(t, dtype=F64) for t in (q, k, v)],
    )
    for rank in range(case.layout.ranks):
        mine = torch.zeros(case.n, dtype=torch.bool).index_fill(
            0, case.layout.positions(rank), True
        )[:, None, None]
        rows = [q, *(torch.where(mine, t, t.to(dtype).to(t.dtype)) for t in (k, v))]
        rows = [t.double().requires_grad_() for t in rows]
        part, _ = reference.attention(*rows, case.pattern, causal=case.causal)
        part = torch.where(mine, part, 0)
        for total, grad in zip(grads, torch.autograd.grad(part, rows, dout.double())):
            total += grad
        out += part.detach()
    return [out, *grads]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_values_are_those_of_rounded_foreign_rows(layout, dtype):
    for pattern in (
        (Dense(), LADDER, BLOCK_SPARSE[0]) if layout.kind != "striped" else (Dense(),)
    ):
        for causal in (False, True) if dtype == BF16 else (pattern != LADDER,):
            case = Case(
                pattern, layout.n, F32, causal, 2, d=8, layout=layout, scheme="plan"
            )
            given = drawn(case)
            (q, k, _), dout, _ = given
            want, floor = (
                of_rounded_rows(case, given, dtype),
                reference.gradient_floor(q, k, dout),
            )
            exact = step(case, given, Simulated(4))
            for machines in (1, 2):
                found = step(case, given, Simulated(4, machines), exchange_dtype=dtype)
                for name, a, b in zip((NAMES[0], *NAMES[2:]), found, want, strict=True):
                    assert (
                        reference.error(a, b, 1.0 if name == "out" else floor) <= 5e-6
                    ), (case, machines, name)
                assert not torch.equal(found[0], exact[0])


def test_rows_take_half_the_bytes_and_gradients_as_many():
    case = Case(LADDER, 96, F32, d=8, layout=contiguous(96, 4), scheme="plan")
    given = drawn(case)
    for machines in (1, 2):
        moved = []
        for dtype in (None, BF16):
            problem = Problem(LADDER, case.layout, False, 4, 2, exchange_dtype=dtype)
            with counting() as forward:
                attention(
                    *given[0],
                    LADDER,
                    group=Simulated(4, machines),
                    scheme="plan",
                    exchange_dtype=dtype,
                )
            with counting() as both:
                step(case, given, Simulated(4, machines), exchange_dtype=dtype)
            moved.append((forward.total, both.total))
            for traffic, passes in ((forward, "fwd"), (both, "fwd+bwd")):
                how = {"batch": 1, "head_dim": 8, "dtype": F32, "passes": passes}
                assert traffic.total == sum(
                    sent_bytes(problem, rank, "plan", **how) for rank in range(4)
                )
                call = {
                    "heads": 4,
                    "kv_heads": 2,
                    "head_dim": 8,
                    "ranks": 4,
                    "passes": passes,
                    "scheme": "plan",
                }
                hosts = () if machines == 1 else (0, 0, 1, 1)
                assert (
                    estimate(
                        LADDER, seq_len=96, exchange_dtype=dtype, hosts=hosts, **call
                    ).sent
                    == traffic.sent
                )
        (fwd, both), (narrow_fwd, narrow_both) = moved
        assert 2 * narrow_fwd == fwd and narrow_both == both - narrow_fwd


def test_the_own_dtype_changes_no_bit():
    case = Case(LADDER, 96, BF16, d=8, layout=contiguous(96, 4), scheme="plan")
    given = drawn(case)
    found = [
        step(case, given, Simulated(4), exchange_dtype=dtype) for dtype in (None, BF16)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_auto_is_the_plan_and_what_cannot_be_is_one_line():
    q = torch.zeros(1, 8, 4, 8)
    assert (
        choose(
            Problem(Dense(), contiguous(8, 2), False, 4, 4, exchange_dtype=BF16),
            head_dim=8,
            dtype=F32,
        )
        == "plan"
    )
    for how, said in (
        ({"scheme": "ring"}, "exchange_dtype is for scheme 'plan' alone, got 'ring'"),
        ({"scheme": "ulysses"}, "exchange_dtype is for scheme 'plan' alone"),
        ({"group": None}, "an exchange_dtype is for several ranks"),
        (
            {"exchange_dtype": F64},
            "exchange_dtype must be narrower than torch.float32, got torch.float64",
        ),
        ({"exchange_dtype": torch.int8}, "dtype must be float64, float32"),
        ({"exchange_dtype": "bf16"}, "dtype must"),
    ):
        with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
            attention(
                q,
                q,
                q,
                Dense(),
                **{"group": Simulated(2), "exchange_dtype": BF16} | how,
            )


def over_processes(case, dtypes):
    """This rank's results, then what it is told where each rank has its own dtype."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    found = step(case, case.shards(rank), group, exchange_dtype=dtypes[0])
    q, k, v = case.shards(rank)[0]
    how = {
        "group": group,
        "scheme": "plan",
        "layout": case.layout,
        "exchange_dtype": dtypes[rank],
    }
    return dict(zip((NAMES[0], *NAMES[2:]), found)), told(
        attention, q, k, v, case.pattern, **how
    )


def test_gloo_ranks_are_the_simulated_ones_and_agree_on_the_dtype():
    case = Case(
        LADDER, 72, F32, causal=True, d=8, layout=contiguous(72, 2), scheme="plan"
    )
    found, said = zip(*launch(over_processes, 2, case, (BF16, None)))
    want = step(case, drawn(case), Simulated(2), exchange_dtype=BF16)
    assert all(torch.equal(a, b) for a, b in zip(case.joined(found).values(), want))
    wanted = "ranks disagree about what is computed: exchange_dtype is torch.bfloat16 on rank 0, None on rank 1"
    assert said == (wanted, wanted)
