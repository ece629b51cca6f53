"""The lists of points that the reports need."""

import pytest
from ringlab import hardware, patterns
from ringlab.kernels import KERNELS
from ringlab.measure import Point, suites
from ringlab.measure.systems import SYSTEMS

TINY = Point("ringlab", patterns.Dilated([16, 32], [1, 2]), seq_len=64, heads=2, head_dim=8)


@pytest.mark.parametrize("name", ["cpu", "gtx1080", "v100", "h100", "generic"])
@pytest.mark.parametrize("rehearsal", [False, True])
def test_optimization_suite_holds_the_documents_points(name, rehearsal):
    profile = hardware.get_profile(name)
    device = "cpu" if rehearsal else profile.kind
    groups = suites.optimization(profile, device=device, rehearsal=rehearsal)
    assert len({g.name for g in groups}) == len(groups)
    table = groups[0].points
    dtypes = {p.dtype for p in table}
    assert {"float32", "float16"} <= dtypes and ("bfloat16" in dtypes) == (name in ("cpu", "h100") and
                                                                         not (name == "cpu" and rehearsal))  # fmt: skip
    full = [p for p in table if dict(p.options) == suites.FULL]
    plain = [p for p in table if dict(p.options) == suites.PLAIN]
    assert {"float32", "float16"} <= {p.dtype for p in full} & {p.dtype for p in plain}
    systems = {"RingDilatedAttentionV2Flash", "RingDilatedAttentionV2Collective", "dense_sdpa"}
    assert systems <= {p.system for p in table}
    for switch in suites.FULL:
        wanted = TINY.but(options=suites.FULL | {switch: suites.PLAIN[switch]}).options
        assert any(p.options == wanted and p.dtype == "float32" for p in table), switch
    names = {dict(p.options).get("backend") for p in table}
    assert "auto" in names and (rehearsal or names >= set(KERNELS))
    assert [g.name for g in groups[:2]] == ["implementations", "lengths"]
    assert len(groups) == (2 if rehearsal else 7)
    for p in (p for g in groups for p in g.points):
        assert Point.from_dict(p.to_dict()) == p and p.system in SYSTEMS


@pytest.mark.parametrize("name, device", [("cpu", "cpu"), ("gtx1080", "cuda")])
@pytest.mark.parametrize("suite", suites.RING_SUITES)
def test_ring_suites_hold_their_documents_points(suite, name, device):
    groups = suites.SUITES[suite](hardware.get_profile(name), device=device)
    points = [p for g in groups for p in g.points]
    assert len({g.name for g in groups}) == len(groups) and len(points) <= 30
    sizes = {p.world_size for p in points}
    ns = {p.seq_len for p in points if p.world_size == 2}
    if suite == "benchmark_summary":
        assert sizes == {1, 2, 4} and {2048, 4096, 8192, 16384} <= ns
        assert any(dict(p.options).get("simulated") == 8 for p in points)
    elif suite == "performance_comparison":
        for n in (1024, 2048, 4096):
            systems = {p.system for p in points if p.seq_len == n and p.world_size == 2}
            assert systems == {suites.V2_COLLECTIVE, suites.ROBUST, "ringlab"}
    else:
        assert {1024 * 2**i for i in range(7)} <= ns and {p.system for p in points} == {suites.HYBRID}
    short = suites.SUITES[suite](hardware.get_profile(name), device="cpu", rehearsal=True)
    assert max(p.seq_len for g in short for p in g.points) <= 4096
    for p in points:
        assert Point.from_dict(p.to_dict()) == p and p.system in SYSTEMS


@pytest.mark.parametrize("name, device", [("cpu", "cpu"), ("gtx1080", "cuda"), ("h200", "cuda")])
def test_dense_attention_is_timed_at_the_shape_of_every_timed_point(name, device):
    timed = [p for g in suites.optimization(hardware.get_profile(name), device=device) if g.timed for p in g.points]
    fields = ("seq_len", "batch", "heads", "head_dim", "passes", "causal")
    dense = {tuple(getattr(p, k) for k in fields) for p in timed if p.system == "dense_sdpa"}
    attention = [p for p in timed if p.system not in ("sgemm", "plan_build")]
    assert {tuple(getattr(p, k) for k in fields) for p in attention} <= dense


def test_a_backward_on_a_cpu_is_short():
    groups = suites.optimization(hardware.get_profile("cpu"), device="cpu")
    assert max(p.seq_len for g in groups for p in g.points) == 8192
    assert max(p.seq_len for g in groups if g.timed for p in g.points if p.passes != "fwd") == 4096


@pytest.mark.parametrize("name", [n for n in hardware.profiles() if hardware.get_profile(n).kind == "cuda"])
def test_the_suite_of_kernels_holds_every_way_and_peer_on_a_gpu_that_is_here(name):
    profile = hardware.get_profile(name)
    for device, rehearsal in (("cpu", True), ("cpu", False), ("cuda", True)):
        assert suites.kernel_suite(profile, device=device, rehearsal=rehearsal) == []
    groups = {g.name: g for g in suites.kernel_suite(profile, device="cuda")}
    points = {p.id: p for g in groups.values() for p in g.points}.values()
    assert {p.dtype for p in points} <= {"float16", "bfloat16"} and all(p.system in SYSTEMS for p in points)
    for d in (128, 64):
        for how in suites.RUNG_PASSES:
            (group,) = [g for x, g in groups.items() if x == f"rungs, head_dim {d}, {how}"]
            asked = {(p.system, p.options) for p in group.points if dict(p.options) != suites.TWIN}
            ways = [(), (("backend", "triton"),), *((("backend", "sdpa"), ("merge", x)) for x in ("eager", "fused"))]
            peers = [("contiguous_segments", (("backend", x),)) for x in ("cudnn", "flash")]
            wanted = {("copying", ()), *peers, *(("ringlab", way) for way in ways)}
            assert group.interleave and group.timed and asked >= wanted
    large = (profile.memory_bytes or 0) > 70e9
    ns = {p.seq_len for p in points if p.system == "copying"}
    assert {16384, 65536} <= ns and (1_048_576 in ns) == large
    training, lists, _ = groups[suites.RUNGS_IN_MEMORY].points
    assert training.passes == "fwd+bwd" and training.seq_len == max(ns) and dict(lists.options)["backend"] == "triton"
    assert suites.RUNG_MASK.density(65536) == pytest.approx(0.1, abs=0.01)


def test_no_two_suites_have_a_group_of_the_same_name():
    for name, device in (("cpu", "cpu"), ("gtx1080", "cuda"), ("h200", "cuda")):
        names = [g.name for make in suites.SUITES.values() for g in make(hardware.get_profile(name), device=device)]
        assert len(set(names)) == len(names)
