"""Sessions in tests: systems that misbehave, real workers that measure the CPU's rates once, made-up ones."""

import os
from contextlib import contextmanager

import pytest
from ringlab.measure import provenance, timing
from ringlab.measure.session import Session
from ringlab.measure.workers import Workers

RATES: dict[tuple, dict] = {}


class OneProbe(Workers):
    """Real workers; what the CPU's rates are is asked of the first that is to say."""

    def ask(self, command, timeout_s, **arguments):
        if command != "probe":
            return super().ask(command, timeout_s, **arguments)
        names = tuple(arguments["dtypes"])
        if names not in RATES:
            RATES[names] = super().ask(command, timeout_s, **arguments)
        return dict(RATES[names])


def measure(groups, folder, force=False, minutes=None, workers=OneProbe, **how):
    return Session(folder, **{"profile": "cpu", "workers": workers} | how).run(groups, force, minutes)


@contextmanager
def importable(folder, source: str, threads: int):
    """Sessions of so many threads, whose workers can import ``source`` as the module "broken"."""
    (folder / "broken.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "threads", lambda: threads)
        patch.setattr(timing, "MAX_SAMPLES", timing.SAMPLES)
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        yield folder


COST = {"pairs": 1, "distinct_pairs": 1, "flops": 1, "folded_flops": 1, "floor_bytes": 8}
REPLIES = {
    "prepare": {"cost": COST, "errors": {"out": 0.0}, "tolerance": {"out": 1.0}, "warmups": 1, "known": {},
                "memory": {"tracked_peak_bytes": 8, "floor_bytes": 8}},
    "calibrate": {"estimate": 0.5, "warmups": 2, "loops": 1},
    "sample": {"seconds": 0.5},
    "probe": {"peaks": {"float32": [1e9, 1e9, 1e9]}},
}  # fmt: skip


class MadeUp:
    """``workers`` of a session: answers each command at once, and keeps what was asked in ``asked``.

    ``reply(system, command, arguments)`` changes a reply, or raises.
    """

    def __init__(self, reply=lambda system, command, arguments: {}):
        self.reply, self.asked = reply, []

    def __call__(self, settings, ranks=1):
        point = settings.get("point", {"system": "probe"})
        self.asked.append(("start", point))
        return MadeUpWorkers(self, point)

    @property
    def started(self) -> list[str]:
        """The systems whose processes were started, the probe's aside."""
        return [point["system"] for command, point in self.asked if command == "start" and point["system"] != "probe"]


class MadeUpWorkers:
    def __init__(self, owner: MadeUp, point: dict):
        self.owner, self.point = owner, point

    def ask(self, command, timeout_s, **arguments):
        self.owner.asked.append((command, self.point))
        found = {"status": "ok", "reason": "", "cpu_s": 0.0} | REPLIES.get(command, {})
        return found | self.owner.reply(self.point["system"], command, arguments)

    def close(self):
        pass
