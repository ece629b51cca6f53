"""A sample of the table of faults, which ``python tests/faults.py`` runs whole; a job
that goes on with fewer ranks.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
from ringlab.ring import launch, watch
from started import gone, torchrun

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


def test_a_process_that_is_stopped_is_seen_so(tmp_path):
    file = tmp_path / "beat"
    beat = watch.Beat(file)
    with subprocess.Popen(["sleep", "100"]) as other:
        beat.begins()
        beat.does("waits")
        assert watch.Progress.read(file, other.pid) == watch.Progress(0, "waits")
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


LINE = re.compile(r"step (\d+) on (\d) ranks: loss ([0-9.]+)")


@pytest.mark.slow
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
    env |= {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
    }
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
        deadline, lines = time.monotonic() + 300, []

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
        assert gone([process.pid], 120.0) and process.end() == 0
        log.seek(0)
        alone = LINE.findall(log.read())
    assert len(alone) == steps
    for step, count, loss in alone:
        assert count == "1" and abs(by_step[int(step)] - float(loss)) < 1e-4 * float(
            loss
        ), step
