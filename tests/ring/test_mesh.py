"""Two dimensions: ulysses along one of a mesh, another scheme along the other."""

import random
from dataclasses import replace

import pytest
import torch
from matrix import NAMES, PATTERNS, Case, all_wrong, drawn, fits
from ring_cases import parity_over_a_mesh, part_of_the_processes
from ringlab import KVCache, Simulated, adaptive_attention, attention
from ringlab.adaptive import Adaptive
from ringlab.block_patterns import BlockSparse
from ringlab.nn import shard_sequence
from ringlab.patterns import Dense, Dilated
from ringlab.ring import Problem, contiguous, counting, hilbert, striped, zigzag
from ringlab.ring.launch import launch
from ringlab.ring.ulysses import MeshScheme
from ringlab.ring.volume import sent_bytes

MESHES = [(1, 2), (2, 1), (3, 1), (2, 2), (1, 4), (2, 3), (3, 2)]
SCHEMES = [
    ("ulysses", "ring"),
    ("ring", "ulysses"),
    ("ulysses", "plan"),
    ("plan", "ulysses"),
    ("ulysses", "all_gather"),
]


def cases(pattern, mesh, rng):
    """A few pairs of schemes, as far as they serve the pattern; layouts, heads and the
    rest at random, heads at least the ranks along ulysses.
    """
    for scheme in rng.sample(SCHEMES, 3):
        ranks, along = mesh[0] * mesh[1], mesh[scheme.index("ulysses")]
        layout = rng.choice([contiguous, zigzag, striped, hilbert])
        layout = layout(*([1] if layout is hilbert else []), 97, ranks)
        other = scheme[scheme[0] == "ulysses"]
        shared = along == ranks  # every rank has whole sequences
        if layout.kind == "striped" and not shared:
            shared = isinstance(pattern, Dense) and scheme[0] == "ulysses"
            layout = layout if shared else contiguous(97, ranks)
        if isinstance(pattern, BlockSparse) and other != "plan" and along < ranks:
            continue
        kv_heads = rng.choice([1, 2, 3])
        heads = kv_heads * max(2, -(-along // kv_heads) + rng.choice([0, 1]))
        case = Case(
            pattern,
            97,
            causal=rng.random() < 0.5 and layout.grid is None,
            batch=rng.choice([1, 2]),
            heads=heads,
            kv_heads=kv_heads,
            d=8,
            sinks=rng.random() < 0.3,
            lse_cotangent=rng.random() < 0.5,
            seed=rng.randrange(100),
            layout=layout,
            scheme=scheme,
            mesh=mesh,
        )
        if fits(pattern, layout, case.causal, "plan") or shared:
            yield case


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pattern_is_the_answer_of_one_device_and_moves_its_closed_form(mesh):
    rng = random.Random(str(mesh))
    for pattern in PATTERNS:
        for case in cases(pattern, mesh, rng):
            assert not all_wrong([case])
            plain = replace(case, lse_cotangent=False, sinks=False)
            inputs = drawn(plain)
            with counting() as forward:
                plain.call(*inputs[0])
            with counting() as both:
                plain.run(*inputs)
            problem = Problem(
                pattern, case.layout, case.causal, case.heads, case.kv_heads
            )
            shape = {"batch": case.batch, "head_dim": 8, "dtype": case.dtype}
            scheme = MeshScheme(case.scheme, mesh)
            for rank in range(case.layout.ranks):
                for traffic, passes in ((forward, "fwd"), (both, "fwd+bwd")):
                    assert sent_bytes(
                        problem, rank, scheme, passes=passes, **shape
                    ) == traffic.from_rank(rank), (case, rank, passes)


def test_bytes_of_both_dimensions_by_hand():
    """4 heads of 8 in float64 on 2 x 2 ranks with 16 positions each, not causal. A rank
    sends half of its heads of q, k and v, and as many rows of out and lse, to its
    neighbour along ulysses, and K and V of 32 positions of 2 heads along the ring.
    """
    case = Case(Dense(), 64, heads=4, kv_heads=4, d=8, layout=contiguous(64, 4))
    for scheme, (near, far) in (
        (("ring", "ulysses"), (1, 2)),
        (("ulysses", "ring"), (2, 1)),
    ):
        with counting() as traffic:
            replace(case, scheme=scheme, mesh=(2, 2)).call(*drawn(case)[0])
        heads, lse = 16 * 2 * 8 * 8, 16 * 2 * 8
        assert traffic.sent[0, near] == 4 * heads + lse
        assert traffic.sent[0, far] == 2 * 32 * 2 * 8 * 8
        assert (0, 3) not in traffic.sent


@pytest.mark.parametrize("heads, kv_heads, ranks", [(3, 1, 4), (2, 2, 6), (5, 5, 3)])
@pytest.mark.parametrize("pattern", [Dense(), PATTERNS[2], PATTERNS[-3]], ids=str)
def test_ulysses_takes_any_number_of_heads(pattern, heads, kv_heads, ranks):
    """Also fewer than ranks, and fewer K/V heads."""
    case = Case(
        pattern,
        97,
        causal=True,
        heads=heads,
        kv_heads=kv_heads,
        d=8,
        sinks=True,
        layout=zigzag(97, ranks),
        scheme="ulysses",
    )
    assert not all_wrong([case])


def test_documents_over_a_mesh():
    borders = [0, 5, 40, 41, 97]
    for scheme, layout in ((SCHEMES[1], zigzag), (SCHEMES[2], contiguous)):
        for pattern in (Dilated([8, 32], [1, 2]), Dense()):
            case = Case(
                pattern, 97, causal=True, d=8, documents={"cu_seqlens": borders}
            )
            want = case.run(*drawn(case))
            across = replace(case, layout=layout(97, 6), scheme=scheme, mesh=(3, 2))
            got = across.run(*drawn(case))
            for name in NAMES:
                assert (got[name] - want[name]).norm() <= 1e-12 * want[name].norm()


def test_real_ranks_are_the_simulated_ones():
    """Over a mesh of all processes, and over two meshes of half of them."""
    found = [
        Case(
            pattern,
            layout.n,
            causal=layout.grid is None,
            d=8,
            seed=i,
            sinks=i % 2 == 0,
            layout=layout,
            scheme=scheme,
            mesh=(2, 2),
        )
        for i, (pattern, layout, scheme) in enumerate(
            [
                (Dilated([8, 20], [1, 3]), zigzag(37, 4), ("ring", "ulysses")),
                (PATTERNS[-2], contiguous(97, 4), ("ulysses", "plan")),
                (Dense(), striped(41, 4), ("ulysses", "ring")),
                (Dilated([12], [2]), hilbert(4, 9, 4), ("all_gather", "ulysses")),
            ]
        )
    ]
    halves = Case(
        Dense(),
        37,
        causal=True,
        d=8,
        layout=contiguous(37, 2),
        scheme=("ulysses", "plan"),
        mesh=(2, 1),
    )
    everyone = launch(parity_over_a_mesh, 4, [*found, halves])
    for i, case in enumerate(found):
        assert_simulated(case, [each[i] for each in everyone])
    for members in (everyone[:2], everyone[2:]):
        assert_simulated(halves, [each[-1] for each in members])


def test_a_mesh_of_a_part_of_the_processes_leaves_the_others_alone():
    case = Case(
        Dilated([8, 24], [1, 2]),
        24,
        causal=True,
        d=8,
        layout=contiguous(24, 4),
        scheme=("ring", "ulysses"),
        mesh=(2, 2),
    )
    *members, (_, last) = launch(part_of_the_processes, 5, case, timeout_s=60.0)
    assert last == 5 and {count for _, count in members} == {5}
    assert_simulated(case, [results for results, _ in members])


def assert_simulated(case, results):
    want, got = case.run(*drawn(case)), case.joined(results)
    sums = [each.pop("dz") for each in (got, want) if case.sinks]  # over the ranks
    assert not sums or torch.allclose(*sums, rtol=1e-12)
    assert all(torch.equal(got[name], t) for name, t in want.items()), case


Q = torch.zeros(1, 24, 2, 8)


@pytest.mark.parametrize(
    "group, scheme, more, message",
    [
        ((2, 3), "plan", {}, "a 2-D mesh takes a scheme for each dimension"),
        ((2, 3), "auto", {}, "or take one dimension, as mesh"),
        ((2, 3), ("ulysses", "ulysses"), {}, "'ulysses' and one of plan, ring"),
        ((2, 3), ("ring", "plan"), {}, "'ulysses' and one of plan, ring"),
        ((2, 3), ("ulysses", "auto"), {}, "'ulysses' and one of plan, ring"),
        (6, ("ulysses", "ring"), {}, "needs a group of two dimensions"),
        (None, ("ulysses", "ring"), {}, "is for several ranks"),
        (
            (3, 2),
            ("ulysses", "ring"),
            {},
            "3 ranks along ulysses are more than 2 heads",
        ),
        (
            (3, 2),
            ("ring", "ulysses"),
            {"layout": "striped"},
            "needs ulysses along the first dimension",
        ),
        (
            (3, 2),
            ("ring", "ulysses"),
            {"pattern": PATTERNS[-2]},
            "'ring' does not serve block-sparse",
        ),
        (
            (3, 2),
            ("plan", "ulysses"),
            {"exchange_dtype": torch.bfloat16},
            "exchange_dtype is for scheme 'plan' alone",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(group, scheme, more, message):
    more = {"pattern": Dense(), **more}
    group = None if group is None else Simulated(group)
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        attention(Q, Q, Q, more.pop("pattern"), group=group, scheme=scheme, **more)


@pytest.mark.parametrize("borders", [[0, 12, 24], [0, 5, 24]], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "pattern, more, message",
    [
        (PATTERNS[-2], {"scheme": "ring"}, "does not serve block-sparse patterns"),
        (
            Dense(),
            {"scheme": "ring", "exchange_dtype": torch.bfloat16},
            "exchange_dtype is for scheme 'plan' alone",
        ),
        (Dense(), {"exchange_dtype": torch.float64}, "must be narrower"),
    ],
)
def test_documents_are_refused_whether_or_not_one_is_cut(
    borders, pattern, more, message
):
    with pytest.raises(ValueError, match=message):
        attention(Q, Q, Q, pattern, group=Simulated(2), cu_seqlens=borders, **more)


def test_caches_and_adaptive_patterns_take_one_dimension():
    group = Simulated((2, 2))
    for call in (
        lambda: KVCache(
            Dense(), batch=1, heads=2, head_dim=8, max_seq_len=64, group=group
        ),
        lambda: adaptive_attention(Q, Q, Q, Adaptive(4, 2), group=group),
    ):
        with pytest.raises(ValueError, match="must be a 1-D mesh"):
            call()


def test_a_sequence_is_sharded_row_by_row():
    x = torch.arange(24).view(1, 24)
    assert torch.equal(shard_sequence(x, Simulated((2, 3)), dim=1), x)
