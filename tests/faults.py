"""The table of faults of ``launch``: each is injected, and how the job ends is judged.
Run by hand; it takes some minutes.

``python tests/faults.py [here] [random]`` with lib on PYTHONPATH; both without one.
"here": each fault with each scheme; "random": 200 jobs of four ranks, one of which is
killed.
"""

import random
import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from fault_cases import COUNT, KINDS, OTHER_CALL, case_of, inject  # noqa: E402
from ringlab.ring import launch  # noqa: E402
from ringlab.ring.schemes import SCHEMES  # noqa: E402
from started import alive, gone  # noqa: E402

HERE_S, SLACK_S = 2.0, 2.0


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
    sys.exit(main(sys.argv[1:] or ["here", "random"]))
