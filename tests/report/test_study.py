"""What a notebook asks for is measured once, and never mixed with rows of another
machine or engine.
"""

from dataclasses import replace

import pytest
from reporting import made_up, write_rows
from ringlab import hardware, measure
from ringlab.measure import Group, Point, provenance, suites
from ringlab.patterns import Dense
from ringlab.report import places, study

TINY = Point("ringlab", Dense(), seq_len=64, heads=2, head_dim=8)
LISTED = Group("listed", [TINY, TINY.but(seq_len=128)])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A source whose runs are recorded, and give made-up rows of this machine."""
    asked = []

    def run(groups, folder, **how):
        asked.append((folder.name, [g.name for g in groups]))
        now = provenance.collect("cpu") | {"utc": f"{len(asked)}"}
        rows = [made_up(p, g) for g in groups for p in g.points]
        write_rows(folder, [replace(r, provenance=r.provenance | now) for r in rows])

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(suites, "SUITES", {"only": lambda profile: [LISTED]})
    profile = hardware.get_profile("cpu")
    found = study.RunTarget(profile, tmp_path / "data")
    return found, asked


def test_what_is_missing_is_measured_and_what_is_there_is_used(here):
    source, asked = here
    first = study.measured(source, [LISTED])
    assert asked == [("data", ["listed"])] and len(first.results) == 2
    assert len(study.measured(source, [LISTED]).results) == 2 and len(asked) == 1


def test_a_cpu_is_named_with_its_instruction_set(here):
    """Processors of one name have AVX2 or AVX-512; old rows do not tell."""
    source, _ = here
    now = provenance.collect("cpu")
    name = f"{now['device_name']} ({now['cpu_capability']})"
    assert study.measured(source, [LISTED]).device == name
    gpu = {"device": "cuda", "device_name": "A", "cpu_capability": "AVX2"}
    old = {"device": "cpu", "device_name": "A"}
    assert [provenance.device_of(x) for x in (gpu, old)] == ["A", "A"]


def test_points_that_no_page_lists_have_rows_of_their_own(here):
    source, asked = here
    own = TINY.but(seq_len=256)
    found = study.measured(source, [LISTED, own])
    assert asked == [("data", ["listed"]), ("added", ["added"])]
    assert {r.group for r in found.results} == {"listed", "added"}
    alone = study.measured(source, [own])
    assert len(alone.results) == 1 and len(alone.all_suites.results) == 2
    assert len(measure.load(source.data)) == 2
    wider = Group("listed", [TINY.but(heads=4)])  # of the same name, and not listed
    assert len(study.measured(source, [wider]).results) == 1
    assert asked[-1] == ("added", ["listed"])
    assert len(study.measured(source, [LISTED, own]).results) == 3
    assert len(asked) == 3, "the rows of other points are still there"
    frame = study.listed([LISTED, own])
    assert list(frame.group) == ["listed", "listed", "added"]


def test_rows_of_another_machine_are_shown_alone_or_measured_anew(here):
    source, asked = here
    elsewhere = [made_up(p, LISTED, False) for p in LISTED.points]
    write_rows(source.data, elsewhere)
    assert len(study.measured(source, [LISTED]).results) == 2 and not asked
    found = study.measured(source, [LISTED, TINY.but(seq_len=256)])
    assert asked == [("data", ["listed"]), ("added", ["added"])]
    assert {r.provenance["machine"] for r in found.results} == {measure.machine_id()}
    assert len(found.results) == 3


def test_newer_rows_of_another_origin_take_nothing_from_a_page(here):
    """Nor do rows of points that no page lists."""
    source, asked = here
    study.measured(source, [LISTED])
    other = Group("other", [TINY.but(seq_len=512)])
    row = made_up(other.points[0], other, False)
    later = row.provenance | {"engine": "newer", "utc": "9"}
    write_rows(source.data, [replace(row, provenance=later)])
    found = study.measured(source, [LISTED])
    assert len(found.results) == 2 and len(asked) == 1 and found.excluded == 0
    assert {r.group for r in found.all_suites.results} == {"listed"}
    study.measured(source, [Group("listed", [TINY.but(heads=4)])])
    assert len(study.measured(source, [LISTED]).all_suites.results) == 2


def test_what_crashed_or_was_disturbed_is_tried_again_here_and_now(here):
    source, asked = here
    now = provenance.collect("cpu") | {"utc": "0", "crowded": True}
    rows = [made_up(p, LISTED, False) for p in LISTED.points]
    write_rows(source.data, [replace(r, provenance=r.provenance | now) for r in rows])
    study.measured(source, [LISTED])
    assert asked == [("data", ["listed"])]


def test_rows_of_another_profile_and_what_is_no_point_are_refused(here):
    source, _ = here
    row = made_up(TINY, LISTED, False)
    of_cpu = row.provenance | {"profile": "cpu"}
    write_rows(source.data, [replace(row, provenance=of_cpu)])
    with pytest.raises(places.UsageError, match="are of cpu, not of h200"):
        study.source("h200", str(source.data))
    with pytest.raises(ValueError, match="list of measure.Group and measure.Point"):
        study.measured(source, [[TINY]])
    assert list(study.listed([])) == list(study.listed([TINY]))


def test_a_machine_that_cannot_measure_shows_what_is_there(here, monkeypatch):
    source, asked = here
    found = study.measured(replace(source, why="as asked"), [LISTED])
    assert not asked and found.results == [] and len(found.frame()) == 0
    assert "status" in found.frame().query("not control")
    with pytest.raises(places.UsageError, match="no samples.jsonl in the folder"):
        study.source("cpu", str(source.data))
    write_rows(source.data, [made_up(TINY, LISTED, False)])
    asked = str(source.data)
    assert study.source("cpu", asked).runs
    assert not study.source("cpu", asked, measure=False).runs
    monkeypatch.setenv(places.NO_MEASURING, "1")
    assert not study.source("cpu", asked).runs


def test_the_source_follows_the_rows_that_are_there(here):
    source, _ = here
    with pytest.raises(places.UsageError, match="'generic' cannot be measured here"):
        study.source("generic", str(source.data))
    row = made_up(TINY, LISTED)
    gpu = row.provenance | {"device": "cuda", "device_memory_bytes": 7}
    write_rows(source.data, [replace(row, provenance=gpu)])
    found = study.source("generic", str(source.data))
    assert not found.computed and found.profile.memory_bytes == 7
    with pytest.raises(hardware.UnknownProfile):
        study.source("nothing")
