"""Ranks as processes: a fault ends in time, the culprit is named in one line, and
nothing is left running.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch.distributed as dist
from fault_cases import case_of, inject
from ring_cases import late_rank, refused_by_rank_1
from ringlab import ring
from ringlab.ring import launch
from ringlab.ring.launch import RankFailed
from started import gone

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
DIFFERS = "rank 1 differs: PlanMismatch: ranks disagree about"
FAULTS = {
    "raise": "rank 1 raised ValueError: a bad day",
    "peer": "rank 1 raised RuntimeError: connection closed by peer: the nccl experiment timed out",
    "interrupt": "rank 1 raised KeyboardInterrupt: ",
    "exit": "rank 1 left with exit code 7 before it was done",
    "kill": "rank 1 was ended by SIGKILL before it was done",
    "leave": "rank 1 left with exit code 0 before it was done",
    "hang": "rank 1 hangs: after 2 s it has begun 3 exchanges, others 3",
    "stop": "rank 1 is stopped: after 2 s it has begun 3 exchanges, others 3",
    "more": "rank 1 made other calls: after 2 s it has begun 10 exchanges, others 9",
    "heads": f"{DIFFERS} what is computed: heads is 8 / 8 on rank 1, 4 / 4 on the others",
    "scheme": f"{DIFFERS} what is computed: scheme is ring on rank 1, plan on the others",
    "rows": f"{DIFFERS} which rows move: rank 0 against rank 1, rank 1 against rank 2",
}


@pytest.fixture(autouse=True, scope="module")
def server():
    """The server of processes is there: no test waits for its start."""
    launch.launch(dist.get_rank, 2)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_ends_in_time_with_the_culprit_named(kind, capfd):
    timeout_s = 2.0 if "after 2 s" in FAULTS[kind] else 60.0
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        launch.launch(inject, 3, kind, case_of(3, "plan"), 1, 2, timeout_s=timeout_s)
    assert time.monotonic() - start < timeout_s + 2
    assert str(failure.value) == FAULTS[kind] and failure.value.rank == 1
    shown = "".join(getattr(failure.value, "__notes__", [])) + capfd.readouterr().err
    assert shown.count("Traceback") == (
        "raised" in FAULTS[kind] or "differs" in FAULTS[kind]
    ), "the culprit's alone"


REFUSED = {
    "borders": "cu_seqlens must ascend",
    "heads": "query heads must be a multiple",
    "layout": "the layout has 2 positions here, q has 4",
    "ulysses": "causal must be True or False",
    "mesh": "rings",
    "selected": "sinks must be",
    "cache": "lengths must be",
    "adaptive": "top_k 9 exceeds",
    "layer": "x must be (batch, seq, 32)",
    "loss": "rank 1 refuses its loss",
}


def test_what_one_rank_refuses_all_raise_with_its_number_and_its_reason():
    """And the next call runs."""
    first, second = launch.launch(refused_by_rank_1, 2, timeout_s=60.0)
    kinds = [told.pop("kinds") for told in (first, second)]
    assert all("disagree about gradients of weight" in why for why in kinds)
    assert first == second and first.pop("right") == "nothing"
    for name, why in REFUSED.items():
        assert first[name].startswith("rank 1 refuses") and why in first[name], name
    assert "pass is forward on rank 0, forward of documents" in first["documents"]
    assert "requires_grad is True on rank 0, False on rank 1" in first["gradient"]
    assert "parameter weight is (2, 2)" in first["gradients"]


def test_ranks_that_all_hang_end_in_time():
    start = time.monotonic()
    with pytest.raises(
        RankFailed, match="hangs: after 2 s it has begun 0 exchanges, others 0"
    ):
        launch.launch(time.sleep, 2, 1000.0, timeout_s=2.0)
    assert 2 <= time.monotonic() - start < 12


def test_a_rank_that_never_joins_is_named(monkeypatch):
    monkeypatch.setattr(launch, "_rank", late_rank)
    monkeypatch.setattr(launch, "JOIN_S", 4.0)
    with pytest.raises(RankFailed) as failure:
        launch.launch(dist.get_rank, 3)
    assert (
        str(failure.value) == "rank 1 has not joined within 4 s"
        and failure.value.rank == 1
    )


def test_as_many_ranks_as_memory_and_open_files_allow(monkeypatch):
    assert launch.most_ranks() > 2
    for memory, files, most in (
        (1 << 30, 1024, 128),
        (1 << 30, 66, 22),
        (None, 66, 22),
        (1 << 30, -1, 128),
    ):
        monkeypatch.setattr(launch, "ram_bytes", lambda read, memory=memory: memory)
        monkeypatch.setattr(
            launch.resource, "getrlimit", lambda which, files=files: (files, files)
        )
        assert launch.most_ranks() == most


def test_a_process_has_the_environment_of_its_time(monkeypatch):
    monkeypatch.setenv("SET_LATER", "yes")
    assert launch.launch(os.getenv, 1, "SET_LATER") == ["yes"]


def test_nothing_is_left_of_ranks_whose_caller_is_killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")  # a short path: a socket lies below it
    command = "import time; from ringlab.ring.launch import launch; launch(time.sleep, 2, 999.0)"
    env = ENVIRONMENT | {"TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", command], env=env) as process:
        while process.poll() is None and not list(folder.glob("ringlab-*/1.beat")):
            time.sleep(0.05)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while (left := list(folder.glob("ringlab-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


BARE = "import torch.distributed as dist\nfrom ringlab.ring.launch import launch\nprint(launch(dist.get_rank, 2))\n"


def test_a_script_needs_no_guard(tmp_path):
    (tmp_path / "script.py").write_text(BARE)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")


@pytest.mark.parametrize(
    "function, args, options, why",
    [
        (lambda: 0, (), {}, "put it into a module"),
        (inject, (lambda: 1,), {}, "the arguments cannot be sent to other processes"),
        (
            np.ones((2, 2)),
            (),
            {},
            r"array\(\[\[1., 1..* cannot be imported by other processes: put it into a module",
        ),
        (inject, (), {"ranks": 0}, "ranks must be a positive integer, got 0"),
        (
            inject,
            (),
            {"ranks": 10**9},
            "ranks is 1000000000: this machine has memory and open files for .* at most",
        ),
        *(
            (
                inject,
                (),
                {"timeout_s": given},
                "timeout_s must be a positive number of seconds up to 1,000,000, got ",
            )
            for given in (0, float("nan"), float("inf"), "9", np.ones((2, 2)))
        ),
        (inject, (), {"threads": True}, "threads must be a positive integer, got True"),
    ],
)
def test_what_cannot_be_launched_is_one_line(function, args, options, why):
    options = {"ranks": 2} | options
    with pytest.raises(ValueError, match=why) as failure:
        launch.launch(function, options.pop("ranks"), *args, **options)
    assert "\n" not in str(failure.value)


UNSENDABLE = "^rank 1 raised TypeError: its result, of type lock, cannot be sent back: TypeError: cannot pick"
UNREADABLE = "^rank 1 returned what cannot be read back: TypeError: TwoParts"


@pytest.mark.parametrize(
    "kind, why", [("unsendable", UNSENDABLE), ("unreadable", UNREADABLE)]
)
def test_a_result_that_cannot_come_back_names_its_rank_and_why(kind, why):
    with pytest.raises(RankFailed, match=why) as failure:
        launch.launch(inject, 2, kind, case_of(2, "plan"))
    assert failure.value.rank == 1 and "\n" not in str(failure.value)


def test_joined_says_where_it_went():
    with pytest.raises(NotImplementedError, match="^joined went: .*train_elastic.py$"):
        ring.joined("gloo", timeout_s=60)


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    with pytest.raises(RankFailed, match="rank 1 raised"):
        launch.launch(
            inject, 2, "raise", case_of(2, "plan"), 1, 0, str(tmp_path / "child")
        )
    assert gone([int((tmp_path / "child").read_text())], 60.0)


def test_a_group_that_is_destroyed_is_gone(tmp_path):
    """What holds a group keeps its threads alive, and these abort the process at its
    end, now and then.
    """
    (tmp_path / "script.py").write_text(
        "import gc, sys, weakref\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "from ringlab import Dense, Simulated, attention\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=0, world_size=1)\n"
        "q = torch.ones(1, 8, 1, 4, requires_grad=True)\n"
        "attention(q, q, q, Dense(), group=Simulated(2)).sum().backward()\n"
        "group = weakref.ref(dist.group.WORLD)\n"
        "dist.destroy_process_group()\n"
        "gc.collect()\n"
        "assert 'torch._dynamo' in sys.modules, 'operators import it, and it what holds the group'\n"
        "assert group() is None\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "store"],
        env=ENVIRONMENT,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
