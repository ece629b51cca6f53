"""A sample of the table of faults, which ``python tests/faults.py`` runs whole; a job
that goes on with fewer ranks.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import faults
import pytest
import two_hosts
import watched
from ringlab.ring import launch, watch
from started import gone, torchrun
from watched import TOKEN

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "kind, scheme, ranks, culprit",
    [
        ("kill", "ring", 4, 3),
        ("segv", "plan", 3, 0),
        ("stop", "ulysses", 2, 1),
        ("dtype", "ring", 4, 1),
        ("layout", "all_gather", 3, 0),
        ("order", "plan", 4, 2),
        ("more", "ulysses", 3, 1),
        ("fewer", "ring", 2, 1),
        ("scheme", "plan", 2, 1),
        ("scale", "plan", 3, 2),
    ],
)
def test_ranks_of_one_host(kind, scheme, ranks, culprit):
    judged = faults.here(kind, scheme, ranks, culprit, at=4)
    assert (judged.left, judged.named) == (0, True), judged.said


@pytest.mark.parametrize(
    "kind, scheme",
    [("stop", "plan"), ("cut for good", "ring"), ("launcher 1 killed", "ring")],
)
def test_ranks_of_two_hosts(kind, scheme):
    try:
        judged = faults.hosts(kind, scheme, 1)
    except two_hosts.NotAllowed as why:
        pytest.skip(str(why))
    assert (judged.left, judged.named) == (0, True), judged.said


def test_a_process_that_is_stopped_is_seen_so(tmp_path):
    file = tmp_path / "beat"
    with open(file, "w+b") as opened, subprocess.Popen(["sleep", "100"]) as other:
        beat = watch.Beat(opened)
        beat.begins()
        beat.does("waits")
        assert watch.Progress.read(file, other.pid) == watch.Progress(0, "waits")
        assert watch.Progress.read(opened.fileno(), None) == watch.Progress(0, "waits")
        os.kill(other.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while (
            watch.Progress.read(file, other.pid).doing != "is stopped"
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert watch.Progress.read(file, other.pid) == watch.Progress(0, "is stopped")
        other.kill()
    assert watch.Progress.read(tmp_path / "none", None) == watch.Progress(-2)


def _endless(monitor):
    with suppress(OSError):
        while True:
            monitor.sendall(b"x" * (1 << 16))


STRANGERS = {
    "random": os.urandom(1 << 16) + b"\n",
    "words": b"GET / HTTP/1.1\r\n\r\n",
    "nested": b"[" * (1 << 16) + b"\n",
    "half a line": b"[1, ",
    "a wrong token": b"4" * 16 + b"\n[]\n",
    "the token, then half a line": f"{TOKEN}\n[1".encode(),
    **{
        f"the token, then {line}": f"{TOKEN}\n{line}\n".encode()
        for line in (
            "words",
            "[]",
            "{}",
            "1",
            "[1]",
            '[7, [1, "waits"], null, null]',
            "[1, [], null, null]",
            '[1, [1, "waits"], {"a": 1}, null]',
            '[[], [1, "waits"], null, null]',
        )
    },
}


def _connected(address) -> socket.socket:
    made = socket.create_connection(address)
    time.sleep(
        0.01
    )  # until it is accepted: what finds the queue full tries again after a second
    return made


def _figure(pid: int, name: str) -> int:
    return int(
        re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[
            1
        ]
    )


def test_strangers_neither_end_nor_slow_a_monitor_nor_make_it_grow(tmp_path):
    with watched.Job(tmp_path) as job:
        monitor, address, kept = job.monitors[0], ("127.0.0.1", job.port), []
        for line in STRANGERS.values():
            kept.append(_connected(address))
            with suppress(OSError):
                kept[-1].sendall(line)
        kept.append(_connected(address))
        _endless(kept[-1])
        kept += [_connected(address) for _ in range(150)]
        kept[-1].settimeout(2.0)
        with pytest.raises(TimeoutError):  # it is heard, and told nothing
            kept[-1].recv(1)
        assert len(list(Path(f"/proc/{monitor}/fd").iterdir())) < 100
        assert _figure(monitor, "VmRSS") < 40 << 10, "KiB"
        woken = _figure(monitor, "voluntary_ctxt_switches")
        time.sleep(2)
        assert _figure(monitor, "voluntary_ctxt_switches") - woken < 50
        assert job.stop() == [0, 0], job.said("log-0")
        for each in kept:
            each.close()
        assert gone(job.monitors, 10.0)


def test_a_rank_that_was_killed_is_seen_though_its_child_lives(tmp_path):
    with watched.Job(tmp_path, "forks, and is killed") as job:
        job.wait(30.0)
        for rank in range(2):
            assert re.search(
                "ringlab: rank 1 on .* was ended by SIGKILL", job.said(f"log-{rank}")
            )
        assert gone(job.monitors, 10.0)


def test_a_traceback_of_many_bytes_arrives(tmp_path):
    with watched.Job(tmp_path, "raises much") as job:
        assert job.wait(30.0) == [1, 1]
        assert re.search("rank 1 on .* raised ValueError", job.said("failed-0"))
        assert len(json.loads(job.said("failed-0"))["notes"][0]) == 20_000


@pytest.mark.parametrize("killed", [0, 1])
def test_a_monitor_that_is_killed_is_named_and_no_other_on_its_host(tmp_path, killed):
    with watched.Job(tmp_path, timeout_s=5.0) as job:
        os.kill(job.monitors[killed], signal.SIGKILL)
        assert job.wait(7.0) != [0, 0]
        host = socket.gethostname()
        assert f"{host} (rank {killed}) does not answer {host}" in job.said(
            f"log-{1 - killed}"
        )
        assert gone(job.monitors[1 - killed :][:1], 10.0)


def test_a_rank_whose_monitor_was_killed_ends_well(tmp_path):
    with watched.Job(tmp_path, ranks=1) as job:
        os.kill(job.monitors[0], signal.SIGKILL)
        assert job.stop() == [0], job.said("log-0")


def test_monitors_meet_over_ipv6(tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as why:
        pytest.skip(str(why))
    with watched.Job(tmp_path, address="::1", timeout_s=3.0) as job:
        time.sleep(3)
        assert job.stop() == [0, 0], job.said("log-0")


LINE = re.compile(r"step (\d+) on (\d) ranks: loss ([0-9.]+)")


def test_a_job_goes_on_with_fewer_ranks_from_its_checkpoint(tmp_path):
    """Two launchers of two ranks; the second is killed, and the first goes on with two
    ranks to the same losses.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script, steps = ROOT / "notebooks" / "tutorials" / "train_elastic.py", 40
    env = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    arguments = [
        "--nnodes=1:2",
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic",
        "--rdzv-conf=keep_alive_interval=1,last_call_timeout=5",
        script,
        tmp_path / "checkpoint.pt",
        steps,
    ]
    logs = [open(tmp_path / f"log-{i}", "w") for i in range(2)]
    started = []
    try:
        for log in logs:
            started.append(
                launch.Process(torchrun, arguments, env, output=(log.fileno(),) * 2)
            )
            while socket.socket().connect_ex(
                ("127.0.0.1", port)
            ):  # the first one holds the store
                time.sleep(0.1)
        deadline, lines = time.monotonic() + 120, []

        def printed() -> list:
            return [
                line
                for i in range(2)
                for line in LINE.findall((tmp_path / f"log-{i}").read_text())
            ]

        while (
            not any(int(step) >= 4 for step, *_ in lines)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
            lines = printed()
        children = (
            Path(f"/proc/{started[1].pid}/task/{started[1].pid}/children")
            .read_text()
            .split()
        )
        os.kill(started[1].pid, signal.SIGKILL)
        assert gone(list(map(int, children)), 10.0), "ranks end with their launcher"
        assert gone([started[0].pid], max(1.0, deadline - time.monotonic()))
        assert started[0].end() == 0, (tmp_path / "log-0").read_text()[-3000:]
    finally:
        for process, log in zip(started, logs):
            process.end()
            log.close()
    lines = printed()
    ranks = [int(count) for _, count, _ in lines]
    assert ranks == sorted(ranks, reverse=True) and set(ranks) == {4, 2}, (
        "on fewer ranks to the end"
    )
    by_step = {int(step): float(loss) for step, _, loss in lines}
    assert sorted(by_step) == list(range(steps)) and len(lines) - steps <= 1, (
        "from the last checkpoint"
    )
    with open(tmp_path / "alone", "w+") as log:
        process = launch.Process(
            torchrun,
            ["--standalone", script, tmp_path / "alone.pt", steps],
            env,
            output=(log.fileno(),) * 2,
        )
        assert gone([process.pid], 60.0) and process.end() == 0
        log.seek(0)
        alone = LINE.findall(log.read())
    assert len(alone) == steps
    for step, count, loss in alone:
        assert count == "1" and abs(by_step[int(step)] - float(loss)) < 1e-4 * float(
            loss
        ), step
