"""Ranks by torch's own elastic launcher, for benchmarks, GPUs and several machines.

``launch`` starts all ranks on this machine. Over several, write the job into a folder that all of them see, then run
the same command on each; results and blame are read from the folder::

    elastic.write_job("job", function, *args)            # once
    python -m torch.distributed.run --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \\
        --rdzv-endpoint=HOST:29400 -m ringlab.ring.elastic job    # on each machine
    elastic.collect("job", ranks=16)                     # once they have ended

Set ``GLOO_SOCKET_IFNAME`` (or ``NCCL_SOCKET_IFNAME``) where a machine's name does not lead to its address.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from . import launch as started
from .launch import End, checked, checked_numbers
from .processes import death

POLL_S = 0.1
END_S = 2.0  # for the launcher to end by itself once its ranks are gone
FAILURE = re.compile(r"rank\s*: (\d+) .*?\n\s*exitcode\s*: (-?\d+)")  # in what torch's launcher says of a dead rank


def launch(function: Callable, ranks: int, *args, timeout_s: float = 60.0, threads: int = 1) -> list:
    """``function(*args)`` on every rank of a gloo group, started by ``torch.distributed.run``; the results by rank.

    Takes seconds, as every rank imports torch. ``function`` must be importable by name; ``threads`` per rank;
    ``timeout_s`` for the whole call, from when all have joined, and for every exchange. Raises RankFailed that names
    the rank which raised, died, left early, hangs or never joined, and RuntimeError where torch's launcher itself is
    killed before any rank has raised. Nothing is left running: ranks end by themselves when that launcher, or the
    process that called this, is.
    """
    checked(function, args, ranks, timeout_s, threads)
    with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
        write_job(folder, function, *args, timeout_s=timeout_s, threads=threads)
        with open(Path(folder, "caller"), "w") as alive, open(Path(folder, "stderr"), "w") as stderr:
            fcntl.flock(alive, fcntl.LOCK_EX)  # ranks see it fall with this process, however that ends
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}",
                "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0",
                f"--monitor-interval={POLL_S}", f"--log-dir={folder}/logs", "--redirects=3",
                "-m", "ringlab.ring.elastic", folder,
            ]  # fmt: skip
            env = os.environ | {"GLOO_SOCKET_IFNAME": started.loopback(), "OMP_NUM_THREADS": str(threads),
                                "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # fmt: skip
            agent = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True
            )
            try:
                _watch(agent, folder, ranks, timeout_s)
                ends, counts = _ends(agent, folder, ranks), started.beats(folder, ranks)
                raised = any(end.kind == "error" for end in ends.values())
                if not raised and agent.returncode is not None and agent.returncode < 0:
                    raise RuntimeError(f"torch's launcher {death(agent.returncode)}")
            finally:
                _stop(agent, folder, ranks)
        said = Path(folder, "stderr").read_text(errors="replace")
        codes = {int(rank): int(code) for rank, code in FAILURE.findall(said)}
        for rank, end in ends.items():
            if end.kind == "died":
                end.value = death(codes.get(rank, 0), _last_line(folder, rank))
    return started.results(ends, counts, timeout_s)


def write_job(folder: Path | str, function: Callable, *args, timeout_s: float = 60.0, threads: int = 1) -> None:
    """Write what the ranks of ``python -m ringlab.ring.elastic folder`` are to run; the folder holds nothing else."""
    checked(function, args, 1, timeout_s, threads)
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "settings").write_bytes(pickle.dumps((timeout_s, threads)))
    Path(folder, "job").write_bytes(pickle.dumps((function, args)))


def collect(folder: Path | str, ranks: int, timeout_s: float = 60.0) -> list:
    """What the ranks of a job returned, by rank; raises RankFailed with the culprit, or with one that left no word."""
    checked_numbers(ranks, timeout_s)
    return started.results(_read_ends(folder, ranks), started.beats(folder, ranks), timeout_s)


def _watch(agent: subprocess.Popen, folder: str, ranks: int, timeout_s: float) -> None:
    """Until the launcher has ended, a rank has failed and a grace is over, or the time is up."""
    joining, failed, deadline = True, False, time.monotonic() + started.JOIN_S
    while agent.poll() is None and time.monotonic() < deadline:
        if joining and min(started.beats(folder, ranks)) >= 0:
            joining, deadline = False, time.monotonic() + timeout_s
        if not failed and any(end.kind != "ok" for end in _read_ends(folder, ranks).values()):
            joining, failed, deadline = False, True, min(deadline, time.monotonic() + started.GRACE_S)
        time.sleep(POLL_S / 2)


def _ends(agent: subprocess.Popen, folder: str, ranks: int) -> dict[int, End]:
    """How the ranks ended, those that did so without a word among them."""
    processes = [started.beat_of(folder, rank)[0] for rank in range(ranks)]
    gone = [pid is not None and not _alive(pid) for pid in processes]  # first, as they write their end before they go
    found = _read_ends(folder, ranks)
    return found | {rank: End("died") for rank in range(ranks) if gone[rank] and rank not in found}


def _write_end(folder: Path | str, rank: int, end: End) -> None:
    partial, whole = Path(folder, f"{rank}.end.partial"), Path(folder, f"{rank}.end")
    partial.write_bytes(pickle.dumps(end))
    partial.replace(whole)


def _read_ends(folder: Path | str, ranks: int) -> dict[int, End]:
    """What the ranks have left so far."""
    paths = {rank: Path(folder, f"{rank}.end") for rank in range(ranks)}
    return {rank: pickle.loads(path.read_bytes()) for rank, path in paths.items() if path.exists()}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _stop(agent: subprocess.Popen, folder: str, ranks: int) -> None:
    """Kill what still runs: ranks lead sessions of their own, so the launcher's group is not all."""
    if agent.poll() is None:
        for rank in range(ranks):
            pid = started.beat_of(folder, rank)[0]
            if pid is not None and _alive(pid):
                os.killpg(pid, signal.SIGKILL)
        try:
            agent.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()


def _last_line(folder: str, rank: int) -> str:
    """The last line that a rank wrote to stderr."""
    for path in Path(folder, "logs").glob(f"*/attempt_0/{rank}/stderr.log"):
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# a rank: python -m ringlab.ring.elastic folder, by torch.distributed.run


def main(folder: str) -> int:
    """Run the folder's job as the rank that the environment says; the exit code."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a thread waits for it: the main one may be in C
    beat = started.Beat(folder, rank)
    threading.Thread(target=_when_told, args=(folder, rank), daemon=True).start()
    threading.Thread(target=_when_orphaned, args=(folder, os.getppid()), daemon=True).start()
    end = _run(folder, rank, ranks, beat)
    _write_end(folder, rank, end)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stderr.write(end.trace)
    return 0 if end.kind == "ok" else 1


def _run(folder: str, rank: int, ranks: int, beat: started.Beat) -> End:
    try:
        timeout_s, threads = pickle.loads(Path(folder, "settings").read_bytes())
        function, args = pickle.loads(Path(folder, "job").read_bytes())
        torch.set_num_threads(threads)
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=started.JOIN_S)))
        started.join_group(store, rank, ranks, timeout_s, beat)
        result = function(*args)
        dist.barrier()  # none leaves while another still talks to it
        return End.ok(result)
    except Exception as error:  # noqa: BLE001  whatever a rank raises is told to who reads the folder
        return End.of(error)


def _when_told(folder: str, rank: int) -> None:
    """torch's launcher ends all ranks once one has failed: say so, or this one would seem to have died."""
    signal.sigwait({signal.SIGTERM})
    if not Path(folder, f"{rank}.end").exists():
        _write_end(folder, rank, End("stopped"))
    os._exit(1)


def _when_orphaned(folder: str, launcher: int) -> None:
    """End with the launcher, and with the caller of ``launch`` where there is one."""
    caller = Path(folder, "caller")
    while os.getppid() == launcher:
        try:
            with open(caller) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break  # the caller holds it no more
        except BlockingIOError:
            pass
        except FileNotFoundError:  # started by hand, or the folder is gone with its caller
            if not Path(folder).exists():
                break
        time.sleep(POLL_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
