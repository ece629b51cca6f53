"""Sessions in tests: systems that misbehave, real workers that measure the CPU's rates
once, made-up ones.
"""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from ringlab import hardware
from ringlab.measure import provenance, session, timing
from ringlab.measure.session import Session
from ringlab.measure.workers import Workers

BROKEN = '''
import os, signal, time
import torch, torch.distributed as dist
from dataclasses import replace
from pathlib import Path
from ringlab import attention
from ringlab.measure.systems import Refused, System

HERE = Path(__file__).parent

def system(p, d, change, scheme=None, **cost):
    """Attention whose output becomes ``change(out, q, k, v)``, on the last rank alone."""
    rank, how = (dist.get_rank(), {"group": dist.group.WORLD, "scheme": "plan"}) if p.world_size > 1 else (0, {})
    (HERE / f"pid-{p.id}-{rank}").write_text(str(os.getpid()))
    made = System(p, d, None)
    def forward(q, k, v):
        out = attention(q, k, v, made.pattern, **how)
        return (change(out, q, k, v) if rank == p.world_size - 1 else out), None
    made.forward, made.scheme, made.cost = forward, scheme, replace(made.cost, **cost)
    return made

def zeros(p, d): return system(p, d, lambda out, *_: torch.zeros_like(out))
def nans(p, d): return system(p, d, lambda out, *_: out * float("nan"))
def wide(p, d): return system(p, d, lambda out, *_: out.double())
def short(p, d): return system(p, d, lambda out, *_: out[:, :-1])
def longer(p, d): return system(p, d, lambda out, *_: torch.cat([out, out], 1))
def wrong(p, d): return system(p, d, lambda out, *_: out * 1.001)
def bad_grad(p, d): return system(p, d, lambda out, q, k, v: out + 0.1 * (v - v.detach()))
def other_bytes(p, d): return system(p, d, lambda out, *_: out, scheme="ring")
def raises(p, d): return system(p, d, lambda *_: 1 / 0)
def refuses(p, d): raise NotImplementedError("needs another machine")
def declines(p, d): raise Refused("not this pattern")
def buggy(p, d): return system(p, d, lambda *_: int("x"))
def starves(p, d): return system(p, d, lambda *_: torch.ones(1 << 31, dtype=torch.uint8))
def exhausted(p, d): raise MemoryError
def too_fast(p, d): return system(p, d, lambda out, *_: out, folded_flops=10**15)
def too_small(p, d): return system(p, d, lambda out, *_: out, floor_bytes=10**9)
def sleeps(p, d): return system(p, d, lambda *_: time.sleep(1000))
def slow(p, d): return system(p, d, lambda out, *_: (time.sleep(0.05), out)[1])
def aborts(p, d): return system(p, d, lambda *_: os.abort())
def killed(p, d): return system(p, d, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

def turns(p, d):
    """Wrong from the third call on."""
    calls = []
    return system(p, d, lambda out, *_: calls.append(0) or (out if len(calls) < 3 else torch.zeros_like(out)))

def dies_once(p, d):
    """In the sixth call of its first process."""
    calls, flag = [], HERE / "died"
    def change(out, *_):
        calls.append(0)
        if len(calls) == 6 and not flag.exists():
            flag.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.06)
        return out
    return system(p, d, change)
'''
RATES: dict[tuple, dict] = {}
ASKED: set[tuple] = set()  # by the session at hand


class OneProbe(Workers):
    """Real workers, of which the first measures the CPU's rates for all sessions.

    A session that asks again, since a row is below a roofline that a busy machine set,
    gets new rates.
    """

    def ask(self, command, timeout_s, **arguments):
        if command != "probe":
            return super().ask(command, timeout_s, **arguments)
        names = tuple(arguments["dtypes"])
        if names in ASKED or names not in RATES:
            RATES[names] = super().ask(command, timeout_s, **arguments)
        ASKED.add(names)
        return dict(RATES[names])


def measure(groups, folder, force=False, minutes=None, workers=OneProbe, **how):
    ASKED.clear()
    return Session(folder, **{"profile": "cpu", "workers": workers} | how).run(
        groups, force, minutes
    )


@contextmanager
def misbehaving(folder, threads: int):
    """Sessions of so many threads, whose workers can import the systems of ``BROKEN``
    from a module "broken".
    """
    (folder / "broken.py").write_text(BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "threads", lambda: threads)
        patch.setattr(timing, "MAX_SAMPLES", timing.SAMPLES)
        patch.setattr(session, "available_bytes", lambda ram_bytes: 1 << 30)
        patch.syspath_prepend(str(folder))
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        )
        yield folder


COST = {
    "pairs": 1,
    "distinct_pairs": 1,
    "flops": 1,
    "folded_flops": 1,
    "floor_bytes": 8,
}
REPLIES = {
    "prepare": {
        "cost": COST,
        "errors": {"out": 0.0},
        "tolerance": {"out": 1.0},
        "warmups": 1,
        "known": {},
        "memory": {"tracked_peak_bytes": 8, "floor_bytes": 8},
    },
    "calibrate": {"estimate": 0.5, "warmups": 2, "loops": 1},
    "sample": {"seconds": 0.5},
    "probe": {"peaks": {"float32": hardware.Peaks(1e9, 1e9, 1e9)}},
}


class MadeUp:
    """``workers`` of a session: answers each command at once, and keeps (command,
    system) in ``asked``.

    ``reply(command)`` changes a reply.
    """

    def __init__(self, reply=lambda command: {}):
        self.reply, self.asked = reply, []

    def __call__(self, settings, ranks=1):
        system = settings["point"]["system"] if "point" in settings else "the CPU"

        def ask(command, timeout_s=0.0, **arguments):
            self.asked.append((command, system))
            return (
                {"status": "ok", "reason": "", "cpu_s": 0.0}
                | REPLIES.get(command, {})
                | self.reply(command)
            )

        ask("start")
        return SimpleNamespace(ask=ask, close=lambda: None)

    @property
    def started(self) -> list[str]:
        """The systems whose processes were started."""
        return [
            system
            for command, system in self.asked
            if command == "start" and system != "the CPU"
        ]
