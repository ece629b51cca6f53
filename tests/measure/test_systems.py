"""The systems under measurement: each passes its own check, and refuses what it does not compute."""

import pytest
import torch
from ringlab import block_patterns, patterns
from ringlab.measure import Point, peers, sgemm
from ringlab.measure.systems import BLOCK_SPARSE, SYSTEMS, Refused, build

PATTERN = patterns.Dilated([16, 32], [1, 2])
PUBLISHED = patterns.Dilated([16, 32], [1, 2], "head_groups", "branch")
TINY = Point("ringlab", PATTERN, seq_len=64, heads=2, head_dim=8)


@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2, "seq_len": 100, "heads": 6, "kv_heads": 2, "pattern": patterns.Dilated([16, 25, 48], [1, 4, 7])},
        {"pattern": patterns.Dilated([32, 64], [2, 4], "head_groups", "branch"), "seq_len": 192},
        {"pattern": patterns.Dilated([8, 16], [1, 2], offsets="kv_head"), "heads": 4, "kv_heads": 2},
        {"pattern": patterns.Dilated([8, 16], [1, 2]), "dtype": "float64"},
        {"pattern": patterns.Dilated([32, 64], [1, 2]), "dtype": "bfloat16", "seq_len": 256},
    ],
)
def test_copying_form_is_the_same_function(changes, causal, passes):
    point = TINY.but(system="copying", causal=causal, passes=passes, **changes)
    system = build(point, "cpu")
    inputs = system.inputs()
    errors, tolerance = system.check(inputs, system.run(inputs))
    assert errors.keys() == ({"out"} if passes == "fwd" else {"out", "dq", "dk", "dv"})
    assert all(errors[name] <= tolerance[name] for name in errors), (errors, tolerance)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in peers.PEERS])  # test_landscape has these
@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
def test_every_system_passes_its_own_check(name, passes):
    pattern = patterns.Dilated([16, 32], [1, 2], "head_groups", "branch")
    if name in ("dense_sdpa", "adaptive", "pool_workload"):
        pattern = patterns.Dense()
    if name in (*BLOCK_SPARSE, "flex", "cache_workload"):
        pattern = block_patterns.local_global(1, 1, block_size=16)
    point = sgemm(64) if name == "sgemm" else TINY.but(system=name, passes=passes, pattern=pattern)
    options = {"adaptive": {"block_size": 16, "top_k": 2}, "pool_workload": {"size_mb": 0.25}}
    shape = {"cache_workload": {"seq_len": 512}}
    point = point.but(options=options.get(name, ()), **shape.get(name, {}))
    if (name, passes) == ("flex", "fwd+bwd"):
        with pytest.raises(NotImplementedError, match="forward alone"):
            build(point, "cpu")
        return
    system = build(point, "cpu")
    inputs = system.inputs()
    output = system.run(inputs)
    errors, tolerance = system.check(inputs, output)
    assert errors and all(errors[k] <= tolerance[k] for k in errors), (errors, tolerance)
    if name not in ("plan_build", "cache_workload", "pool_workload"):  # which have no tensors of their own
        assert system.cost.flops > 0
        assert sum(t.nbytes for t in [*inputs, output.out, *output.grads]) == system.cost.floor_bytes


def test_inputs_come_from_the_points_own_seed():
    one, same = (build(TINY, "cpu").inputs() for _ in range(2))
    other = build(TINY.but(options={"pool": True}), "cpu").inputs()
    assert all(torch.equal(a, b) for a, b in zip(one, same)) and not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"system": "flashy"}, "unknown system 'flashy'; known: ringlab, dense_sdpa"),
        ({"options": {"speed": 9}}, "ringlab has no option 'speed'; known: backend, gather, blocks, merge, cache"),
        ({"system": "dense_sdpa"}, "dense_sdpa computes dense attention"),
        ({"system": "contiguous_segments", "seq_len": 60}, "whole segments of 16"),
        ({"system": "contiguous_segments", "options": {"backend": "xformers"}}, "unknown kernel of torch's 'xformers'"),
        ({"system": "RingDilatedAttentionV2Flash"}, "head groups with offsets by branch"),
        ({"system": "BlockSparseOptimized"}, "BlockSparseOptimized computes block-sparse patterns, not dilated"),
        ({"system": "flex"}, "flex computes block-sparse patterns, not dilated"),
        ({"system": "cache_workload"}, "looks block-sparse patterns up"),
        ({"system": "adaptive", "batch": 2, "options": {"block_size": 16, "top_k": 3}}, "is measured with batch 1"),
        ({"system": "adaptive", "world_size": 2}, "adaptive runs on one device, not on 2 ranks"),
        ({"system": "pool_workload", "options": {"size": 3}}, "pool_workload has no option 'size'"),
        ({"options": {"blocks": "odd"}}, "blocks"),
        ({"system": "RingDilatedAttentionSDPA", "pattern": PUBLISHED, "options": {"ring_size": 0}}, "ring_size"),
    ],
)
def test_a_point_that_makes_no_sense_is_refused_in_one_line(changes, said):
    with pytest.raises(Refused, match="^[^\n]*$") as error:
        build(TINY.but(**changes), "cpu")
    assert said in str(error.value)


@pytest.mark.parametrize("options", [{"warm": False}, {"warm": True}, {"gather": True, "warm": False}])
@pytest.mark.parametrize(
    "changes",
    [{}, {"seq_len": 100, "heads": 6, "kv_heads": 2, "pattern": patterns.Dilated([16, 25, 48], [1, 4, 7])}],
)
def test_a_plan_is_checked_against_the_pattern_and_cleared_when_cold(options, changes):
    system = build(TINY.but(system="plan_build", options=options, **changes), "cpu")
    first, second = (system.run(system.inputs()) for _ in range(2))
    assert (first.plans is second.plans) == options["warm"]
    errors, tolerance = system.check([], second)
    assert errors.keys() == {"out", "lse"} and all(errors[k] <= tolerance[k] for k in errors), (errors, tolerance)
    other = build(TINY.but(system="plan_build", options=options, pattern=patterns.Dilated([8, 32], [1, 2])), "cpu")
    if not changes:
        assert system.check([], other.run([]))[0]["out"] > 0.01


def test_a_pools_threshold_is_an_option():
    point = TINY.but(dtype="bfloat16", options={"pool": True, "pool_threshold_mb": 0.0})
    system = build(point, "cpu")
    inputs = system.inputs()
    errors, tolerance = system.check(inputs, system.run(inputs))
    assert all(errors[k] <= tolerance[k] for k in errors)
    with pytest.raises(ValueError, match="needs pool=True"):
        build(point.but(options={"pool_threshold_mb": 0.0}), "cpu")


def test_torchs_kernel_on_contiguous_segments_is_the_one_that_is_named(monkeypatch):
    point = TINY.but(system="contiguous_segments", passes="fwd+bwd", head_dim=16, options={"backend": "flash"})
    with pytest.raises(NotImplementedError, match="flash: needs a CUDA device, this is cpu"):
        build(point, "cpu")
    monkeypatch.setattr("ringlab.measure.systems.kernels.choose", lambda *_, **__: None)
    system = build(point, "cpu")  # torch has a flash kernel for a CPU too, and none of cuDNN's
    inputs = system.inputs()
    errors, tolerance = system.check(inputs, system.run(inputs))
    assert errors.keys() == {"out", "dq", "dk", "dv"} and all(errors[k] <= tolerance[k] for k in errors)
    with pytest.raises(RuntimeError, match="No viable backend"):
        system = build(point.but(options={"backend": "cudnn"}), "cpu")
        system.run(system.inputs())
