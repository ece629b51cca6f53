"""One description of a call: what it refuses, and that costs, problems across ranks,
points and runs without data are those of its fields.
"""

from dataclasses import replace

import pytest
import torch
from refusals import refused
from ringlab import Dense, Dilated, Execution, blocks, cost, hardware, kernels, meta_run
from ringlab.call import CallSpec
from ringlab.measure.points import Point
from ringlab.ring import Problem
from ringlab.ring.exchange import on_hosts
from ringlab.ring.layout import zigzag
from ringlab.ring.volume import sent_bytes

LADDER = Dilated([32, 96], [1, 3])
WORK = {"batch": 2, "seq_len": 384, "heads": 6, "kv_heads": 3, "head_dim": 40}
WORK |= {"dtype": torch.bfloat16, "causal": True, "passes": "fwd+bwd"}
CALL = CallSpec(
    LADDER, **WORK, ranks=4, layout="zigzag", hosts=(0, 0, 7, 7), exchange_dtype=None
)


@pytest.mark.parametrize(
    "wrong, error, why",
    [
        ({"pattern": "longnet"}, ValueError, "unknown pattern"),
        ({"seq_len": 0}, ValueError, "seq_len must be"),
        ({"seq_len": 2**40 + 1}, ValueError, "seq_len must be"),
        ({"batch": True}, ValueError, "batch must be"),
        ({"heads": 7}, ValueError, "multiple of K/V heads: 7 and 3"),
        ({"kv_heads": 0}, ValueError, "kv_heads must be"),
        ({"head_dim": 1.5}, ValueError, "head_dim must be"),
        ({"dtype": torch.int64}, ValueError, "dtype must be"),
        ({"causal": 1}, TypeError, "causal must be"),
        ({"passes": "bwd"}, ValueError, "unknown passes"),
        ({"ranks": 1}, ValueError, "hosts must be a tuple of 1"),
        ({"ranks": 1, "hosts": ()}, ValueError, "a layout is for several ranks"),
        ({"execution": None}, TypeError, "execution must be"),
        ({"profile": 3}, TypeError, "profile must be"),
        ({"profile": "gtx"}, hardware.UnknownProfile, "gtx"),
        ({"hosts": [0, 0, 1, 1]}, ValueError, "hosts must be"),
        ({"hosts": (0, 0, 1, -1)}, ValueError, "hosts must be"),
        ({"exchange_dtype": torch.float32}, ValueError, "must be narrower"),
    ],
)
def test_what_no_call_can_have_is_refused_in_one_line(wrong, error, why):
    with refused(error, match=why):
        replace(CALL, **wrong)


def test_a_call_costs_what_its_fields_cost():
    assert CALL.cost() == cost.count(LADDER, **WORK)
    assert CallSpec("dense", 8, heads=2) == CallSpec(Dense(), 8, heads=2, kv_heads=2)


def test_a_call_makes_the_problem_across_its_ranks():
    layout = zigzag(384, 4)
    expected = on_hosts(
        Problem(LADDER, layout, True, 6, 3), "plan", CALL.hosts
    )  # ranks 0, 1 on one host
    problem, scheme = replace(CALL, scheme="plan").problem()
    assert (problem, scheme) == (expected, "plan") and problem.hosts == (0, 0, 2, 2)
    narrow = replace(CALL, dtype=torch.float32, exchange_dtype=torch.bfloat16)
    assert narrow.problem()[0].exchange_dtype == torch.bfloat16
    shape = {"batch": 2, "head_dim": 40, "dtype": CALL.dtype, "passes": "fwd+bwd"}
    for scheme in ("plan", "ring", "all_gather"):
        call = replace(CALL, scheme=scheme)
        problem, _ = call.problem()
        of_rank = [sent_bytes(problem, rank, scheme, **shape) for rank in range(4)]
        sent = call.sent()
        assert of_rank == [
            sum(size for (rank, _), size in sent.items() if rank == own)
            for own in range(4)
        ]
    with pytest.raises(ValueError, match="unknown scheme"):
        replace(CALL, scheme="rings").problem()
    window = blocks.sliding_window(1, block_size=32)
    with pytest.raises(ValueError, match="does not serve block-sparse"):
        replace(CALL, pattern=window, scheme="ring").problem()


def test_the_scheme_of_auto_depends_on_the_passes_and_is_the_runs():
    run = meta_run.run(CALL)
    assert run.scheme == CALL.problem()[1] != "auto"
    call = replace(CALL, ranks=1, layout="contiguous", hosts=())
    one = meta_run.run(call)
    assert one.scheme is None and not call.sent()
    backward = one.parts()["gradients"]
    forward = meta_run.run(replace(call, passes="fwd"))
    assert backward > forward.parts()["gradients"] == 0


def test_a_point_is_the_call_that_it_measures():
    shape = {"batch": 2, "seq_len": 384, "heads": 6, "kv_heads": 3, "head_dim": 40}
    shape |= {"causal": True, "passes": "fwd+bwd"}
    point = Point("ringlab", LADDER, dtype="bfloat16", world_size=4, **shape)
    assert point.call() == CallSpec(LADDER, dtype=torch.bfloat16, ranks=4, **shape)
    assert point.shape == shape
    for name, value in {"dtype": "int64", "passes": "bwd", "world_size": 0}.items():
        with pytest.raises(ValueError, match="must be|unknown"):
            point.but(**{name: value})


def test_the_kernel_that_auto_takes_is_that_of_the_pattern_on_one_rank_alone():
    pattern = Dilated([2048, 4096], [1, 2])
    call = CallSpec(pattern, 8192, dtype=torch.bfloat16, causal=True, profile="h200")
    use = {"causal": True, "for_gradients": True}
    own, dense = (
        kernels.expected("cuda", (9, 0), torch.bfloat16, 64, pattern_kind=kind, **use)
        for kind in (kernels.kind_of(pattern, 8192, 8, 8), "dense")
    )
    assert call.kernel_choice(True) == own != dense
    assert call.kernel_choice().name != own.name  # forward
    tiled = replace(call, execution=Execution(tile=512))
    for other in (replace(call, ranks=2), tiled):
        assert other.kernel_choice(True) == dense
    devices = [replace(call, profile=name).device for name in (None, "cpu", "v100")]
    assert [x.type for x in devices] == ["cpu", "cpu", "cuda"]
    assert devices[-1].capability == (7, 0) and call.device.capability == (9, 0)
