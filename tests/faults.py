"""The table of faults: each is injected, and how the job ends is judged. Run by hand;
it takes about nine minutes.

``python tests/faults.py [here] [hosts] [links] [random]`` with lib on PYTHONPATH; all
without one. "here": ranks of ``launch`` on this machine; "hosts": ranks of torchrun on
two hosts, made of namespaces, which needs root; "links": what happens to link and
hosts; "random": 200 jobs of four ranks, one of which is killed.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HELPERS = Path(__file__).parent / "helpers"
sys.path.insert(0, str(HELPERS))

import torch  # noqa: E402
import two_hosts  # noqa: E402
from fault_cases import COUNT, KINDS, OTHER_CALL, case_of, inject  # noqa: E402
from matrix import drawn  # noqa: E402
from ringlab import Simulated  # noqa: E402
from ringlab.ring import launch  # noqa: E402
from ringlab.ring.schemes import SCHEMES  # noqa: E402
from started import alive, gone  # noqa: E402

HERE_S, HOSTS_S, SLACK_S = 2.0, 4.0, 2.0


@dataclass
class Judged:
    in_time: bool
    left: int  # processes
    named: (
        bool | None
    )  # the right rank, or both where nobody can know; None: nothing to name
    known: bool  # whether it can be known
    said: str
    seconds: float


def nobody_knows(kind: str, ranks: int) -> bool:
    return ranks == 2 and kind in (*OTHER_CALL, *COUNT)


def right(kind: str, ranks: int, culprit: int, named: int | None, said: str) -> bool:
    if nobody_knows(kind, ranks):
        return (
            named is None
            and all(re.search(rf"\b{rank}\b", said) for rank in range(2))
            and "\n" not in said
        )
    return named == culprit and "\n" not in said


def here(
    kind: str, scheme: str, ranks: int, culprit: int, at: int, timeout_s: float = HERE_S
) -> Judged:
    """A fault of ranks of ``launch``."""
    pids, process = [], launch.Process

    class Recorded(process):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            pids.append(self.pid)

    launch.Process, started, named, said = Recorded, time.monotonic(), None, "nothing"
    try:
        launch.launch(
            inject,
            ranks,
            kind,
            case_of(ranks, scheme),
            culprit,
            at,
            timeout_s=timeout_s,
        )
    except launch.RankFailed as failure:
        named, said = failure.rank, str(failure)
    finally:
        launch.Process = process
    seconds = time.monotonic() - started
    known = not nobody_knows(kind, ranks)
    gone(pids, 0.5)
    left = sum(map(alive, pids))
    return Judged(
        seconds < timeout_s + SLACK_S,
        left,
        right(kind, ranks, culprit, named, said),
        known,
        said,
        seconds,
    )


def _link(**how):
    return lambda hosts: hosts.link(**how)


def _cut_for(seconds):
    def cut(hosts):
        hosts.link(open=(False, False))
        time.sleep(seconds)
        hosts.link()

    return cut


def _vanish(host):
    def vanish(hosts):
        hosts.link(open=(False, False))
        hosts.kill(host)

    return vanish


def _launcher(host):
    return lambda hosts: os.kill(hosts.started[host].pid, signal.SIGKILL)


def _at_end(hosts):
    """A launcher is killed when its ranks are done: the other one would wait for it."""
    while len(list(hosts.folder.glob("result-*"))) < len(
        list(hosts.folder.glob("ready-*"))
    ):
        time.sleep(0.01)
    os.kill(hosts.started[1].pid, signal.SIGKILL)
    return time.monotonic()


# What happens to the link or a host; the ranks that may be named, None if the job must
# end with the right answer; and the timeout.
LINKS = {
    "cut for good": (_link(open=(False, False)), "link", HOSTS_S),
    "cut from 0": (_link(open=(False, True)), "link", HOSTS_S),
    "cut from 1": (_link(open=(True, False)), "link", HOSTS_S),
    "cut for 5 s": (_cut_for(5.0), None, 15.0),
    "cut for 5 s, too long": (_cut_for(5.0), "link", HOSTS_S),
    "host 0 vanishes": (_vanish(0), 0, HOSTS_S),
    "host 1 vanishes": (_vanish(1), 1, HOSTS_S),
    "launcher 0 killed": (_launcher(0), "launcher 0", HOSTS_S),
    "launcher 1 killed": (_launcher(1), "launcher 1", HOSTS_S),
    "launcher 1 killed at the end": (_at_end, "end", HOSTS_S),
    "loss 1 %": (_link(loss=0.01), None, 15.0),
    "loss 5 %": (_link(loss=0.05), None, 15.0),
    "delay 200 ms": (_link(latency_s=0.2), None, 15.0),
}


def hosts(
    kind: str, scheme: str, per_host: int, culprit: int = 1, at: int = 4
) -> Judged:
    """A fault of ranks that torchrun started on two hosts, or of the link between
    these.
    """
    ranks = 2 * per_host
    act, expected, timeout_s = LINKS.get(kind, (None, culprit, HOSTS_S))
    with two_hosts.TwoHosts() as pair, tempfile.TemporaryDirectory() as folder:
        folder = pair.folder = Path(folder)
        calls = (30, 0.1) if act else (3, 0.0)
        script = [
            HELPERS / "fault_cases.py",
            kind,
            scheme,
            culprit,
            at,
            timeout_s,
            folder,
            *calls,
        ]
        logs = [open(folder / f"log-{host}", "w+") for host in range(2)]
        for host in range(2):
            arguments = [
                "--nnodes",
                2,
                "--node-rank",
                host,
                "--nproc-per-node",
                per_host,
                "--master-addr",
                two_hosts.ADDRESSES[0],
                "--master-port",
                29511,
                *script,
            ]
            env = {
                "PYTHONPATH": f"{HELPERS}:{Path(launch.__file__).parents[2]}",
                "OMP_NUM_THREADS": "1",
            }
            pair.run(host, arguments, env, logs[host])
        deadline = time.monotonic() + 90
        while len(list(folder.glob("ready-*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        started = time.monotonic()
        if act:
            time.sleep(0.2)
            started = time.monotonic()
            started = act(pair) or started
        while (
            any(map(pair.pids, range(2)))
            and time.monotonic() - started < timeout_s + 60
        ):
            time.sleep(0.05)
        seconds = time.monotonic() - started
        if (folder / "fault").exists():
            seconds = time.time() - (folder / "fault").stat().st_mtime
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
        lines = [
            line for text in texts for line in text.splitlines() if "ringlab: " in line
        ]
        said = max(lines, key=len, default=(texts[0] + texts[1])[-200:])
        left = sum(len(pair.pids(host)) for host in range(2))
        if expected is None:
            case = case_of(ranks, scheme)
            found = [folder / f"result-{rank}" for rank in range(ranks)]
            if not all(file.exists() for file in found):
                return Judged(
                    left == 0, left, False, True, f"did not go on: {said}", seconds
                )
            want = case.run(
                *drawn(case), group=Simulated(ranks, machines=2)
            )  # the order of sums is that of two hosts
            got = case.joined([torch.load(file) for file in found])
            equal = all(torch.equal(got[name], t) for name, t in want.items())
            return Judged(left == 0, left, equal, True, "goes on", seconds)
        if isinstance(expected, int) and act is None:
            known = not nobody_knows(kind, ranks)
            host = two_hosts.HOSTS[culprit // per_host]
            named = (
                all(f"rank {culprit} on {host}" in t for t in texts)
                if known
                else (all("rank 0" in t and "rank 1" in t for t in texts))
            )
        else:  # a host vanished, or the link: both hosts are named on each that is there
            known, there = True, [t for host, t in enumerate(texts) if expected != host]
            words = two_hosts.HOSTS
            if expected == "end":
                there, words = [], ()
            elif "launcher" in str(expected):
                words = (f"on {two_hosts.HOSTS[int(expected[-1])]}", "launcher")
            named = all(
                any(
                    "ringlab: " in line and all(w in line for w in words)
                    for line in t.splitlines()
                )
                for t in there
            )
        return Judged(seconds < timeout_s + SLACK_S, left, named, known, said, seconds)


HOST_RANKS = (
    "kill",
    "term",
    "stop",
    "hang",
    "raise",
    "exit",
    "dtype",
    "scheme",
    "more",
)


def show(title: str, rows: list[tuple[str, Judged]]) -> bool:
    """Print a line for each kind and one for all; whether all is as wanted."""
    kinds = defaultdict(list)
    for kind, judged in rows:
        kinds[kind].append(judged)
    print(
        f"{title:28} runs  in time  left  known: named  unknown: both named  slowest s"
    )
    for kind, some in [*kinds.items(), ("all", [judged for _, judged in rows])]:
        known, unknown = (
            [j.named for j in some if j.known == want] for want in (True, False)
        )
        named = f"{sum(known):6}/{len(known):<5}  {sum(unknown):10}/{len(unknown):<7}"
        counts = f"{kind:28} {len(some):4}  {sum(j.in_time for j in some):7}  {sum(j.left for j in some):4}"
        print(f"{counts}  {named}  {max(j.seconds for j in some):9.1f}", flush=True)
    for kind, judged in rows:
        if not (judged.in_time and judged.named) or judged.left:
            print(
                f"  {kind}: {judged.seconds:.1f} s, left {judged.left}: {judged.said}"
            )
    known = [j.named for _, j in rows if j.known]
    return all(j.in_time and not j.left for _, j in rows) and sum(known) >= 0.98 * len(
        known
    )


def main(which: list[str]) -> int:
    random.seed(0)
    good, began = True, time.monotonic()
    here(
        "raise", "plan", 2, 0, 0
    )  # the first launch also starts the server of processes, which is not timed
    if "here" in which:
        rows = []
        for ranks in (2, 3, 4):
            for kind in KINDS:
                for scheme in SCHEMES:
                    culprit = random.randrange(ranks)
                    rows.append(
                        (kind, here(kind, scheme, ranks, culprit, random.randrange(6)))
                    )
        good &= show("one host", rows)
    for name, kinds in (("hosts", HOST_RANKS), ("links", LINKS)):
        if name in which:
            try:
                with two_hosts.TwoHosts():
                    pass
            except two_hosts.NotAllowed as why:
                print(f"{name}: skipped: {why}")
                continue
            schemes, rows = list(SCHEMES), []
            for i, kind in enumerate(kinds):
                per_host = 1 + (i % 3 == 0)
                rows.append(
                    (
                        kind,
                        hosts(
                            kind, schemes[i % 4], per_host, culprit=i % (2 * per_host)
                        ),
                    )
                )
                print(
                    f"  {kind}, {schemes[i % 4]}, {per_host} a host, {rows[-1][1].seconds:.1f} s: {rows[-1][1].said}",
                    flush=True,
                )
            good &= show(f"two hosts: {name}", rows)
    if "random" in which:
        rows = []
        for _ in range(200):
            culprit, at, scheme = (
                random.randrange(4),
                random.randrange(12),
                random.choice(list(SCHEMES)),
            )
            rows.append(
                (
                    f"killed, {scheme}",
                    here("kill", scheme, 4, culprit, at, timeout_s=20.0),
                )
            )
        good &= show("random ends, 4 ranks", rows)
    print(
        f"{time.monotonic() - began:.0f} s; {'as wanted' if good else 'NOT as wanted'}"
    )
    return not good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["here", "hosts", "links", "random"]))
