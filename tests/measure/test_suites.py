"""The lists of points that the reports need: the same as those of the rows that are
stored, by digest.
"""

import importlib.util
from pathlib import Path

import pytest
from ringlab import block_patterns, hardware
from ringlab.measure import Point, suites
from ringlab.measure.systems import SYSTEMS

GOLDEN = Path(__file__).parent.parent / "golden.py"


def test_points_and_groups_are_those_of_the_rows_that_are_stored():
    """A change here orphans rows: ``python tests/golden.py --points`` shows what has
    become of which point.
    """
    spec = importlib.util.spec_from_file_location("golden", GOLDEN)
    golden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(golden)
    assert golden.lines() == GOLDEN.with_name(
        "golden_points.txt"
    ).read_text().splitlines(True)


@pytest.mark.parametrize("name", ["cpu", "gtx1080", "h200"])
def test_points_can_be_stored_groups_have_names_of_their_own_and_dense_attention_is_timed_at_every_shape(
    name,
):
    made = {
        suite: make(hardware.get_profile(name)) for suite, make in suites.SUITES.items()
    }
    groups = [g for each in made.values() for g in each]
    assert len({g.name for g in groups}) == len(groups)
    for point in (p for g in groups for p in g.points):
        assert Point.from_dict(point.to_dict()) == point and point.system in SYSTEMS
    beside_dense = [
        g for g in made["optimization"] if g.timed and g.name != "folding"
    ]  # that compares two plans
    timed = [
        p
        for g in beside_dense
        for p in g.points
        if p.pattern != suites.POOLED.to_dict()
    ]
    shapes = {tuple(p.shape.values()) for p in timed if p.system != "plan_build"}
    assert shapes == {
        tuple(p.shape.values()) for p in timed if p.system == "dense_sdpa"
    }


def test_a_reader_adds_a_system_to_the_landscape():
    own = {"Mine": ("ringlab", lambda n: block_patterns.sliding_window(tokens=n // 4))}
    systems = suites.landscape_systems() | own
    groups = {
        g.name: g
        for g in suites.landscape(hardware.get_profile("cpu"), systems=systems)
    }
    added = groups.pop(suites.LANDSCAPE_ADDED).points
    assert {p.system for p in added} == {"dense_sdpa", "ringlab"}
    assert [g.id for g in groups.values()] == [
        g.id for g in suites.landscape(hardware.get_profile("cpu"))
    ]
    with pytest.raises(ValueError, match="'Mine' and 'Same' are one system"):
        suites.landscape(
            hardware.get_profile("cpu"), systems=systems | {"Same": own["Mine"]}
        )
