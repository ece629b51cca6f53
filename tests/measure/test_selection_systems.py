"""Systems that choose keys by content: what they count, what their checks find, what
they refuse.
"""

import pytest
import torch
from ringlab import patterns, selection
from ringlab.measure import Point
from ringlab.measure.systems import Refused, build

OPTIONS = {
    "moba": {"block_size": 8, "top_k": 3},
    "nsa": {"block_size": 8, "top_k": 4, "window": 9},
    "dsa": {"top_k": 9, "index_dim": 8},
    "vertical_slash": {"block_size": 8, "vertical": 2, "slash": 2},
    "adaptive": {"block_size": 8, "top_k": 3},
}
FIRST = Point(
    "moba",
    patterns.Dense(),
    causal=True,
    seq_len=100,
    heads=4,
    kv_heads=2,
    head_dim=8,
    options=OPTIONS["moba"],
)
EACH = [FIRST.but(system=name, options=options) for name, options in OPTIONS.items()]
each = pytest.mark.parametrize("point", EACH, ids=OPTIONS)


def ran(point: Point):
    system = build(point, "cpu")
    inputs = system.inputs()
    return system, inputs, system.run(inputs)


def wrong(system, inputs, output) -> bool:
    errors, tolerance = system.check(inputs, output)
    return any(not x <= tolerance[name] for name, x in errors.items())


@each
def test_pairs_are_those_that_the_choice_shows(point):
    system, (q, k, *_), _ = ran(point)
    choice = system.choose(q, k)
    at = torch.arange(100)
    pairs = 0
    for head in range(4):
        seen = choice.multiplicity(at, at, head=head, heads=4)[0]
        pairs += int(seen.tril().sum())
    if point.system == "nsa":
        pairs += 4 * sum((t + 1) // 8 + min(t + 1, 9) for t in range(100))
    assert system.cost.pairs == pairs


@each
def test_a_choice_alone_is_checked_against_the_best_in_float64(point):
    point = point.but(options=dict(point.options) | {"choice": True})
    system, inputs, output = ran(point)
    assert not wrong(system, inputs, output)
    exact = system.function

    def wrong_in_float32(q, *rest, **own):
        return exact(q if q.dtype == torch.float64 else q.flip(1), *rest, **own)

    system.function = wrong_in_float32
    assert wrong(system, inputs, system.run(inputs))


@each
def test_results_for_other_keys_are_wrong(point):
    system, inputs, output = ran(point)
    assert not wrong(system, inputs, output)
    other = system.run([inputs[0], inputs[1].flip(1), inputs[2]])
    assert wrong(system, inputs, other)


@pytest.mark.parametrize("part", ["nsa_compressed", "attention"])
def test_each_part_of_nsa_is_checked(monkeypatch, part):
    point = EACH[1].but(passes="fwd+bwd")
    exact = getattr(selection, part)
    monkeypatch.setattr(selection, part, lambda *x, **y: 1.001 * exact(*x, **y))
    assert wrong(*ran(point))
    monkeypatch.undo()
    system, inputs, output = ran(point)
    for name in ("out", "dq", "dk", "dv"):
        worse = vars(output) | {name: 1.001 * getattr(output, name)}
        assert wrong(system, inputs, type(output)(**worse))


@pytest.mark.parametrize(
    "point",
    [
        FIRST.but(batch=2),
        FIRST.but(causal=False),
        FIRST.but(pattern=patterns.Dilated([16], [1])),
        FIRST.but(options={"window": 3}),
        FIRST.but(options={"top_k": 0}),
        EACH[4].but(options={"top_k": 14}),
        FIRST.but(passes="fwd+bwd", options={"choice": True}),
        EACH[3].but(passes="fwd+bwd"),
        EACH[1].but(options={"top_k": 2}),
    ],
    ids=Point.label,
)
def test_what_is_not_measured_is_refused(point):
    with pytest.raises(Refused) as refused:
        build(point, "cpu")
    assert "\n" not in str(refused.value)


def test_adaptive_blocks_are_seen_in_any_order():
    """Each of 12 whole blocks and one of four rows is seen by all that choose it."""
    system, inputs, output = ran(EACH[4].but(causal=False))
    assert not wrong(system, inputs, output)
    picks = system.choose(*inputs[:2]).indices
    keys = torch.where(picks == 12, 4, 8).sum(3)  # (1, heads, blocks)
    rows = torch.tensor([8] * 12 + [4])
    assert system.cost.pairs == int((keys * rows).sum())
