"""Points on several ranks: checked, then timed by the slowest rank; the plan's bytes; a
culprit is named.
"""

import os
import signal
import subprocess
import time

import pytest
from hosts import measure, misbehaving
from ringlab.measure import Group, Point, links
from ringlab.measure.timing import FEWEST_LONG
from ringlab.patterns import Dense, Dilated
from ringlab.ring import launch
from started import alive, gone, rows_of

PATTERN = Dilated([16, 128], [1, 2])
TINY = Point("ringlab", PATTERN, seq_len=128, heads=2, head_dim=8, world_size=2)
BOTH = TINY.but(passes="fwd+bwd", causal=True)
VERDICTS = {
    "broken:wrong": ("incorrect", "out is off by"),
    "broken:bad_grad": ("incorrect", "dv is off by"),
    "broken:longer": ("incorrect", "out is off by inf"),
    "broken:other_bytes": ("incorrect", "bytes were sent, the plan has"),
    "broken:raises": ("crashed", "rank 1: ZeroDivisionError: division by zero"),
    "broken:refuses": ("unsupported", "needs another machine"),
    "dense_sdpa": ("unsupported", "dense_sdpa runs on one device, not on 2 ranks"),
}
BAD = {
    name: TINY.but(system=name, passes="fwd+bwd" if "grad" in name else "fwd")
    for name in VERDICTS
}
PUBLISHED = TINY.but(
    system="RingDilatedAttentionV2Robust",
    pattern=Dilated([16, 128], [1, 2], "head_groups", "branch"),
)
SLOW = TINY.but(system="broken:slow")
POINTS = [
    TINY,
    TINY.but(world_size=1),
    BOTH,
    TINY.but(options={"scheme": "ring"}),
    PUBLISHED,
    TINY.but(pattern=Dense(), options={"scheme": "ring", "layout": "zigzag"}),
    TINY.but(world_size=1, options={"simulated": 4}),
    PUBLISHED.but(world_size=1, options={"simulated": 4}),
    PUBLISHED.but(system="RingDilatedAttentionHilbertGPUOptimized"),
    SLOW,
    *BAD.values(),
]
KILLED = TINY.but(system="broken:dies_once")
THREE = TINY.but(world_size=3, seq_len=129)  # and two cores
GROUPS = [
    Group("ranks", POINTS, interleave=False),
    Group("killed", [KILLED, TINY]),
    Group("wide", [THREE, TINY]),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with misbehaving(folder, threads=2):
        yield folder, measure(GROUPS, folder)


def found(measured, point, group="ranks"):
    (result,) = [r for r in measured[1] if r.point == point and r.group == group]
    return result


@pytest.mark.parametrize("point", [*POINTS[:9], SLOW], ids=Point.label)
def test_a_right_point_is_checked_and_timed(measured, point):
    row = found(measured, point)
    assert row.status == "ok" and len(row.seconds) >= FEWEST_LONG, row.reason
    assert all(row.errors[name] <= row.tolerance[name] for name in row.errors)
    assert row.ranks["threads"] == 1 and not row.ranks["oversubscribed"], (
        "equal in all rows, one rank or two"
    )
    assert {"dq", "dk", "dv"} <= row.errors.keys() or point.passes == "fwd"
    assert point != SLOW or min(row.seconds) >= 0.05, "the slowest rank's"


def test_bytes_are_the_plans_and_memory_is_a_ranks(measured):
    for point in (TINY, BOTH, *POINTS[3:6]):
        row, scheme = found(measured, point), "ring" if point is PUBLISHED else "plan"
        assert row.ranks["scheme"] == dict(point.options).get("scheme", scheme)
        assert row.ranks["bytes_sent"] == row.ranks["planned"]
        assert sum(row.ranks["bytes_sent"]) > 0 and max(row.ranks["messages"]) > 0
        assert row.memory["tracked_peak_bytes"] == max(row.ranks["tracked_peak_bytes"])
        assert row.memory["floor_bytes"] == row.cost["floor_bytes"] // 2
    row = found(
        measured, POINTS[5]
    )  # the ring holds the other's shard of K and V besides its own tensors
    assert (
        row.memory["tracked_peak_bytes"]
        >= row.memory["floor_bytes"] + 2 * 64 * 2 * 8 * 4
    )
    one, two = (found(measured, p).cost for p in (TINY.but(world_size=1), TINY))
    assert one == two, "the whole point's, however many share it"


@pytest.mark.parametrize("system", VERDICTS)
def test_a_rank_that_is_wrong_is_no_time(measured, system):
    row, (status, said) = found(measured, BAD[system]), VERDICTS[system]
    assert row.status == status and said in row.reason and row.median is None


def test_a_rank_that_is_killed_costs_its_point_and_is_named(measured):
    killed, other = (found(measured, point, "killed") for point in (KILLED, TINY))
    assert killed.status == "crashed" and killed.reason.startswith(
        "rank 1: the worker was ended by SIGKILL"
    )
    assert (
        killed.median is None
        and other.status == "ok"
        and len(other.seconds) >= FEWEST_LONG
    )
    again = measured[0], measure(GROUPS, measured[0])
    killed = found(again, KILLED, "killed")
    assert (
        found(again, TINY, "killed") == other
        and killed.status == "ok"
        and len(killed.seconds) >= FEWEST_LONG
    )


def test_more_ranks_than_cores_have_no_time(measured):
    three, two = (found(measured, point, "wide") for point in (THREE, TINY))
    assert (
        three.status == two.status == "ok"
        and three.ranks["oversubscribed"]
        and not two.ranks["oversubscribed"]
    )
    assert three.median is None and three.seconds == () and two.median
    assert (
        three.ranks["threads"] == two.ranks["threads"] == 1
        and len(three.ranks["bytes_sent"]) == 3
    )
    assert (
        three.errors["out"] <= three.tolerance["out"]
        and three.ranks["bytes_sent"] == three.ranks["planned"]
    )


def hold(channel, point, folder):
    measure([Group("group", [point])], folder)


def test_a_link_has_its_rate_and_ends_with_its_session(measured, tmp_path):
    """Its namespaces have no names, so that none lives without a process."""
    point = TINY.but(system="broken:sleeps", options={"link_gbps": 0.2})
    process = launch.Process(hold, point, tmp_path)
    files = [measured[0] / f"pid-{point.id}-{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        if not alive(process.pid):
            (row,) = rows_of(tmp_path, "result")
            assert "a link needs" in row["reason"]
            pytest.skip(row["reason"])
        time.sleep(0.02)
    pids = [int(file.read_text()) for file in files]
    for pid in pids:
        command = f"nsenter --net=/proc/{pid}/ns/net tc qdisc show dev link0"
        assert "rate 200Mbit" in subprocess.getoutput(command)
    os.kill(process.pid, signal.SIGKILL)
    assert gone(pids, 60.0) and not os.path.exists("/sys/class/net/link0")
    with pytest.raises(NotImplementedError, match="two ranks"):
        links.join(tmp_path, 0, 3, 0.2)


def test_a_rank_that_hangs_is_named(measured, tmp_path):
    (row,) = measure(
        [Group("group", [TINY.but(system="broken:sleeps")])], tmp_path, timeout_s=2.0
    )
    assert row.status == "timeout" and row.reason.startswith(
        "took more than 2 s: rank 1 hangs: "
    ), row.reason
