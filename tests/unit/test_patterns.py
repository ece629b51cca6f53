import pytest
import torch
from ringlab import Dense, Dilated
from ringlab.engine.dilated import make_plan
from ringlab.patterns import from_dict


def matrix(pattern, n, head=0, heads=1, kv_heads=None):
    x = torch.arange(n)
    return pattern.multiplicity(
        x, x, head=head, heads=heads, kv_heads=kv_heads
    ).tolist()


def test_multiplicity_literal():
    # branch 0: segments of 3, rate 1; branch 1: segments of 5, rate 2, rows 0, 2, 4
    # (head 0) or 1, 3 (head 1)
    p = Dilated([3, 5], [1, 2])
    assert matrix(p, 6, head=0, heads=2) == [
        [2, 1, 2, 0, 1, 0],
        [1, 1, 1, 0, 0, 0],
        [2, 1, 2, 0, 1, 0],
        [0, 0, 0, 1, 1, 1],
        [1, 0, 1, 1, 2, 1],
        [0, 0, 0, 1, 1, 2],
    ]
    assert matrix(p, 4, head=1, heads=2) == [
        [1, 1, 1, 0],
        [1, 2, 1, 1],
        [1, 1, 1, 0],
        [0, 1, 0, 2],
    ]


@pytest.mark.parametrize(
    "rule, offsets",
    [
        ("head", [0, 1, 2, 3, 0, 1]),
        ("block", [0, 0, 1, 1, 2, 2]),
        ("branch", [0] * 6),
        ("kv_head", [0, 0, 1, 1, 2, 2]),
    ],
)
def test_offsets_name_four_different_functions(rule, offsets):
    assert [
        Dilated([16], [4], offsets=rule).offset(0, h, 6, 3) for h in range(6)
    ] == offsets


def test_offsets_by_branch_and_of_fewer_heads_than_the_rate():
    two = Dilated([16, 16, 16], [1, 2, 2], offsets="branch")
    assert [two.offset(i, 3, 6) for i in range(3)] == [0, 1, 0]
    assert [Dilated([16], [8], offsets="block").offset(0, h, 3) for h in range(3)] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    "heads, sizes", [(12, [3, 3, 2, 2, 2]), (7, [2, 2, 1, 1, 1]), (3, [1, 1, 1, 0, 0])]
)
def test_head_groups_cover_every_head_once(heads, sizes):
    p = Dilated([8] * 5, [1] * 5, mixing="head_groups")
    groups = [list(p.heads_of(i, heads)) for i in range(5)]
    assert [len(g) for g in groups] == sizes
    assert sum(groups, []) == list(range(heads))


def test_round_trip_and_labels():
    for p in (
        Dense(),
        Dilated([4, 8], [1, 2]),
        Dilated([4], [2], "head_groups", "branch"),
    ):
        assert from_dict(p.to_dict()) == p
        assert hash(from_dict(p.to_dict())) == hash(p)
    label = "dilated [4, 8] / [1, 2] head groups offsets by branch"
    assert str(Dilated([4, 8], [1, 2], "head_groups", "branch")) == label


def test_plan_needs_few_calls():
    """At most min(r, heads / r) strided calls for a branch of whole segments: no
    gather, no index tensor.
    """
    for rate, calls in ((1, 1), (2, 2), (4, 2), (8, 1), (16, 1)):
        plan = make_plan(Dilated([64], [rate]), 256, 8, 8)
        assert len(plan.calls) == calls
    assert not make_plan(Dilated([64, 128], [1, 2]), 256, 8, 8).uncovered
    assert make_plan(Dilated([64, 128], [2, 2]), 256, 8, 8).uncovered == ((0, 256),)
