"""Faults of ranks: one rank misbehaves at an exchange, or makes another call than the
others.

``inject`` runs on every rank.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from matrix import Case
from ringlab.patterns import Dilated
from ringlab.ring import comm, contiguous, zigzag
from ringlab.ring.rows import Intervals

STEPS = 3  # forward and backward each


def case_of(ranks: int, scheme: str) -> Case:
    how = {
        "heads": 4,
        "kv_heads": 4,
        "d": 8,
        "layout": contiguous(48, ranks),
        "scheme": scheme,
    }
    return Case(Dilated([8, 48], [1, 2]), 48, causal=True, dtype=torch.float32, **how)


class TwoParts(Exception):
    """Is pickled, but not read back: that calls it with its message alone."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def _killed(number):
    return lambda: os.kill(os.getpid(), number)


def _raises(error):
    def act():
        raise error

    return act


def _last_words():
    print("first words\nlast words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


AT_EXCHANGE = {
    "kill": _last_words,
    "segv": _killed(signal.SIGSEGV),
    "term": _killed(signal.SIGTERM),
    "abort": os.abort,
    "stop": _killed(signal.SIGSTOP),
    "hang": lambda: time.sleep(1000),
    "raise": _raises(ValueError("a bad day")),
    "peer": _raises(
        RuntimeError("connection closed by peer: the nccl experiment timed out")
    ),
    "interrupt": _raises(KeyboardInterrupt()),
    "exit": lambda: sys.exit(7),
    "leave": lambda: os._exit(0),
}
OTHER_CALL = {
    "dtype": lambda case: replace(case, dtype=torch.float64),
    "scale": lambda case: replace(case, scale=0.5),
    "pattern": lambda case: replace(case, pattern=Dilated([8, 48], [1, 4])),
    "scheme": lambda case: replace(
        case, scheme="ring" if case.scheme == "plan" else "plan"
    ),
    "layout": lambda case: replace(case, layout=zigzag(case.n, case.layout.ranks)),
    "heads": lambda case: replace(case, heads=8, kv_heads=8),
    "order": lambda case: replace(case, causal=False),
}
COUNT = ("more", "fewer")  # calls
KINDS = (*AT_EXCHANGE, *OTHER_CALL, *COUNT)


def inject(kind: str, case: Case, culprit: int = 1, at: int = 0, path: str = ""):
    """Three steps on this rank, a fault of ``kind`` on rank ``culprit``: at its
    exchange ``at``, or from the second step on. Returns the last results.
    """
    rank, ours = dist.get_rank(), dist.get_rank() == culprit
    if ours and path:
        Path(path).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    if ours and kind in AT_EXCHANGE:
        post, count = comm._post, iter(range(10**9))

        def acts(*args):
            if next(count) == at:
                AT_EXCHANGE[kind]()
            return post(*args)

        comm._post = acts
    calls = [case] * STEPS
    if kind == "order":
        calls[1] = OTHER_CALL[kind](case)
        calls = [calls[i] for i in (0, 2, 1)] if ours else calls
    elif ours and kind in OTHER_CALL:
        calls[1:] = [OTHER_CALL[kind](case)] * 2
    elif kind in COUNT:
        calls = calls[: STEPS - 1] if ours == (kind == "fewer") else calls
    if ours and kind == "rows":
        right = Intervals.strided
        Intervals.strided = lambda self: right(self)[:-1]
    results = None
    for each in calls:
        results = each.run(*each.shards(rank), dist.group.WORLD)
    others = {"unsendable": threading.Lock, "unreadable": lambda: TwoParts(1, 2)}
    return others[kind]() if ours and kind in others else results
