"""The systems under measurement: each passes its own check, which fails for wrong
results, and refuses other points.
"""

import pytest
import torch
from ringlab import baselines, block_patterns, patterns
from ringlab.measure import Point, peers
from ringlab.measure.model_systems import STEPS, document_lengths
from ringlab.measure.systems import BLOCK_SPARSE, SYSTEMS, Refused, build

PATTERN = patterns.Dilated([16, 32], [1, 2])
PUBLISHED = patterns.Dilated([16, 32], [1, 2], "head_groups", "branch")
UNEVEN = {
    "seq_len": 100,
    "heads": 6,
    "kv_heads": 2,
    "pattern": patterns.Dilated([16, 25, 48], [1, 4, 7]),
}
TINY = Point("ringlab", PATTERN, seq_len=64, heads=2, head_dim=8)
WINDOW = block_patterns.sliding_window(2, block_size=16)
CHOSEN = {
    "system": "adaptive",
    "pattern": patterns.Dense(),
    "options": {"block_size": 16, "top_k": 3},
}
BY_CONTENT = {"pattern": patterns.Dense(), "causal": True, "heads": 4, "kv_heads": 2}
NEEDS = {  # by system, where it is something else than the pattern of the published modules
    "dense_sdpa": {"pattern": patterns.Dense()},
    "flex": {"pattern": WINDOW, "passes": "fwd"},
    "adaptive": CHOSEN,
    "moba": BY_CONTENT | {"options": {"block_size": 8, "top_k": 3}},
    "nsa": BY_CONTENT | {"options": {"block_size": 8, "top_k": 4, "window": 9}},
    "dsa": BY_CONTENT | {"options": {"top_k": 9, "index_dim": 8}},
    "vertical_slash": BY_CONTENT
    | {"options": {"block_size": 8, "vertical": 2, "slash": 2}, "passes": "fwd"},
    "generation": {
        "passes": "fwd",
        "causal": True,
        "pattern": PATTERN,
        "heads": 4,
        "kv_heads": 2,
    },
    "packed": {
        "seq_len": sum(document_lengths(2)),
        "options": {"documents": 2},
        "causal": True,
    },
    **dict.fromkeys(BLOCK_SPARSE, {"pattern": WINDOW}),
}


def passes(point: Point):
    """(system, inputs, output) of a call that passes its check, and its errors."""
    system = build(point, "cpu")
    inputs = system.inputs()
    output = system.run(inputs)
    errors, tolerance = system.check(inputs, output)
    assert errors and all(errors[name] <= tolerance[name] for name in errors), (
        errors,
        tolerance,
    )
    return system, inputs, output, errors


def error(system, inputs, output) -> float:
    return system.check(inputs, output)[0]["out"]


def call_of(name: str, direction: str) -> Point:
    """A small call of a system; of one that runs forward alone the same for both
    directions.
    """
    return TINY.but(
        **{"system": name, "pattern": PUBLISHED, "passes": direction}
        | NEEDS.get(name, {})
    )


OWN = [
    name for name in SYSTEMS if name not in peers.PEERS
]  # test_landscape has the others


@pytest.mark.parametrize(
    "point",
    dict.fromkeys(call_of(x, y) for x in OWN for y in ("fwd", "fwd+bwd")),
    ids=lambda point: f"{point.passes}-{point.system}",
)
def test_every_system_passes_its_own_check(point):
    name = point.system
    if name == "flex" and (why := baselines.refusal("cpu", torch.float32)):
        pytest.skip(why)
    system, inputs, output, _ = passes(point)
    if name != "plan_build":  # which has no tensors of its own
        assert system.cost.flops > 0
        results = [t for name, t in output.named().items() if name != "lse"]
        if name == "generation":
            return  # its steps read the rows that they see
        assert sum(t.nbytes for t in [*inputs, *results]) == system.cost.floor_bytes


FAR = patterns.Dilated([16, 128], [1, 2])  # heads of a group read other rows


@pytest.mark.parametrize("pattern", [patterns.Dense(), PATTERN, FAR, WINDOW], ids=str)
def test_steps_of_generation_count_the_rows_that_they_see_and_are_checked(pattern):
    system, inputs, output, _ = passes(
        call_of("generation", "fwd").but(pattern=pattern)
    )
    n, seen, rows = 64, 0, set()
    for t in range(n, n + STEPS):
        for h in range(4):
            of = {"n": n + STEPS, "head": h, "heads": 4, "kv_heads": 2}
            m = pattern.multiplicity(torch.tensor([t]), torch.arange(t + 1), **of)
            seen += int((m > 0).sum())
            rows |= {(t, h // 2, k) for k in m[0].nonzero().flatten().tolist()}
    assert (
        system.cost.distinct_pairs == seen and system.cost.folded_flops == 4 * 8 * seen
    )
    assert system.cost.floor_bytes == 2 * 8 * 4 * len(rows), "each step, K/V head, row"
    assert output.counted["cache_bytes"] > 0 and torch.equal(
        system.run(inputs).out, output.out
    )
    assert error(system, [inputs[0], inputs[1].flip(1), inputs[2]], output) > 0.01
    with pytest.raises(Refused, match="generation is causal"):
        build(call_of("generation", "fwd").but(causal=False), "cpu")


@pytest.mark.parametrize("seq_len", [64, 80, 96, 112])
def test_gradients_of_some_heads_are_checked_with_the_pattern_of_these(seq_len):
    pattern = patterns.Dilated([16, 32], [1, 4])  # other rows for each of four heads
    passes(TINY.but(pattern=pattern, seq_len=seq_len, heads=6, passes="fwd+bwd"))
    grouped = {"heads": 6, "kv_heads": 3, "passes": "fwd+bwd"}
    passes(TINY.but(pattern=pattern, seq_len=seq_len, **grouped))


def test_packed_documents_are_checked_one_by_one_and_equal_ones_have_as_many_tokens():
    point = call_of("packed", "fwd+bwd")
    system, inputs, output, _ = passes(point)
    assert system.cost.pairs == sum(
        build(TINY.but(pattern=PUBLISHED, seq_len=n, causal=True), "cpu").cost.pairs
        for n in document_lengths(2)
    )
    whole = build(point.but(system="ringlab", options={}), "cpu").run(inputs)
    assert error(system, inputs, whole) > 0.01, (
        "documents that see each other are wrong"
    )
    equal = passes(point.but(passes="fwd", options={"documents": 2, "equal": True}))[0]
    assert abs(equal.cost.pairs / system.cost.pairs - 1) < 0.05
    with pytest.raises(Refused, match="2 documents have 5163 tokens, not 64"):
        build(point.but(seq_len=64), "cpu")


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {**UNEVEN, "pattern": patterns.Dilated([16, 24, 49], [1, 4, 7])},
        {
            "pattern": patterns.Dilated([32, 64], [2, 4], "head_groups", "branch"),
            "seq_len": 192,
        },
        {
            "pattern": patterns.Dilated([8, 16], [1, 2], offsets="kv_head"),
            "heads": 4,
            "kv_heads": 2,
        },
        {"pattern": patterns.Dilated([8, 16], [1, 2]), "dtype": "float64"},
        {
            "pattern": patterns.Dilated([32, 64], [1, 2]),
            "dtype": "bfloat16",
            "seq_len": 256,
        },
    ],
)
def test_copying_form_is_the_same_function(changes, causal, direction):
    *_, errors = passes(
        TINY.but(system="copying", causal=causal, passes=direction, **changes)
    )
    assert errors.keys() == (
        {"out"} if direction == "fwd" else {"out", "dq", "dk", "dv"}
    )


def test_inputs_come_from_the_points_own_seed():
    one, same, other = (
        build(point, "cpu").inputs()
        for point in (TINY, TINY, TINY.but(options={"pool": True}))
    )
    assert all(torch.equal(a, b) for a, b in zip(one, same)) and not torch.equal(
        one[0], other[0]
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"system": "flashy"}, "unknown system 'flashy'; known: ringlab, dense_sdpa"),
        (
            {"options": {"speed": 9}},
            "ringlab has no option 'speed'; known: cache, pool, results, backend",
        ),
        ({"options": {"pool_threshold_mb": 0.0}}, "needs pool=True"),
        ({"options": {"blocks": "odd"}}, "unknown way ('blocks', 'odd')"),
        ({"options": {"gather": True}, "pattern": WINDOW}, "'gather' does not serve"),
        ({"options": {"gather": True}, "world_size": 2}, "on one device"),
        ({"system": "dense_sdpa"}, "dense_sdpa computes dense attention"),
        ({"system": "contiguous_segments", "seq_len": 60}, "whole segments of 16"),
        (
            {"system": "contiguous_segments", "options": {"backend": "xformers"}},
            "unknown kernel of torch's 'xformers'",
        ),
        (
            {"system": "RingDilatedAttentionV2Flash"},
            "head groups with offsets by branch",
        ),
        (
            {"system": "BlockSparseOptimized"},
            "BlockSparseOptimized computes block-sparse patterns, not dilated",
        ),
        ({"system": "flex"}, "flex computes block-sparse patterns, not dilated"),
        ({"system": "flex", "pattern": WINDOW, "passes": "fwd+bwd"}, "forward alone"),
        (
            {"system": "contiguous_segments", "options": {"backend": "flash"}},
            "flash: needs a CUDA device, this is cpu",
        ),
        ({**CHOSEN, "batch": 2}, "is measured with batch 1"),
        (
            {"system": "adaptive", "world_size": 2},
            "adaptive runs on one device, not on 2 ranks",
        ),
        (
            {"system": "plan_build", "options": {"size": 3}},
            "plan_build has no option 'size'",
        ),
        (
            {
                "system": "RingDilatedAttentionSDPA",
                "pattern": PUBLISHED,
                "options": {"ring_size": 0},
            },
            "ring_size",
        ),
    ],
)
def test_a_point_that_makes_no_sense_is_refused_in_one_line(changes, said):
    with pytest.raises(NotImplementedError, match="^[^\n]*$") as refusal:
        build(TINY.but(**changes), "cpu")
    assert said in str(refusal.value)


def test_a_pools_threshold_is_an_option():
    passes(TINY.but(dtype="bfloat16", options={"pool": True, "pool_threshold_mb": 0.0}))


def test_torchs_kernel_on_contiguous_segments_is_the_one_that_is_named(monkeypatch):
    point = TINY.but(
        system="contiguous_segments",
        passes="fwd+bwd",
        head_dim=16,
        options={"backend": "flash"},
    )
    monkeypatch.setattr("ringlab.measure.systems.kernels.choose", lambda *_, **__: None)
    passes(point)  # torch has a flash kernel for a CPU too, and none of cuDNN's
    with pytest.raises(RuntimeError, match="No viable backend"):
        passes(point.but(options={"backend": "cudnn"}))


@pytest.mark.parametrize(
    "options, changes",
    [
        ({"gather": True}, UNEVEN),
        *(
            ({"blocks": way}, {"pattern": WINDOW})
            for way in ("rows", "batched", "views")
        ),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_a_plan_is_checked_against_the_pattern_and_cleared_when_cold(
    warm, options, changes
):
    for how, more in ((options, changes), ({}, {"causal": True, **changes})):
        point = TINY.but(system="plan_build", options={"warm": warm, **how}, **more)
        system, _, first, errors = passes(point)
        assert (
            errors.keys() == {"out", "lse"}
            and (first.plan is system.run([]).plan) == warm
        )


def test_a_plan_of_another_pattern_is_wrong():
    system, other = (
        build(TINY.but(system="plan_build", pattern=p), "cpu")
        for p in (PATTERN, PUBLISHED)
    )
    output = system.run([])
    output.plan = other.run([]).plan
    assert error(system, [], output) > 0.01
