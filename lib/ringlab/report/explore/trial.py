"""The explorer's Run: the chosen point on this machine, in its own workers, checked against the oracle, then timed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from ... import hardware, measure
from ...estimate import estimate
from ...hardware import Machine, Profile
from ...measure.timing import available_bytes, samples_for
from ..cells import bound, error, ms
from ..tables import Cell, Table, number, size
from ..trust import objection
from .choice import Choice

LIMIT_S = 60.0  # that a run may take


@dataclass(frozen=True)
class Here:
    """Where a run takes place: this machine, the profile that drives it, and its memory now."""

    machine: Machine
    profile: Profile
    free_bytes: int | None

    @classmethod
    def now(cls, machine: Machine | None = None) -> Here:
        machine = machine or hardware.detect()
        found = hardware.resolve("auto", machine)
        if not found.runnable(machine)[0]:
            found = hardware.get_profile("cpu")
        found = found.on(machine)
        free = available_bytes(machine.ram_bytes) if found.kind == "cpu" else found.memory_bytes
        return cls(machine, found, free)


def point(choice: Choice) -> measure.Point:
    """The point of a choice; raises ValueError for what cannot be."""
    call = choice.call
    ranks, n = call.pop("ranks", 1), call.pop("seq_len")
    options = {name: call.pop(name) for name in ("scheme", "layout") if name in call}
    return measure.Point("ringlab", choice.pattern, seq_len=n, world_size=ranks, options=options, **call)


def refusal(choice: Choice, here: Here) -> str:
    """Why a run would not end well here, in one line by the estimate, or an empty text."""
    found = estimate(choice.pattern, **choice.call, profile=here.profile)
    sharing = choice.ranks if here.profile.kind == "cpu" else 1  # ranks on GPUs have one each
    # One rank gathers inputs and outputs of all, twice, to compare them with the oracle's.
    needs = found.peak_bytes * sharing + (2 * found.cost.floor_bytes if choice.ranks > 1 else found.cost.floor_bytes)
    if here.free_bytes and needs > here.free_bytes:
        return (
            f"too large for this machine: a checked run needs about {size(needs)}, free are {size(here.free_bytes)}; "
            "take a shorter sequence"
        )
    seconds = found.bound_s * sharing
    if seconds * (calls := 2 + samples_for(seconds)) > LIMIT_S:
        return (
            f"too long for this machine: {calls} calls of at least {number(seconds)} s each, {found.binds} binds; "
            "take a shorter sequence"
        )
    return ""


def run(choice: Choice, here: Here) -> measure.Result:
    """Measure the point of a choice into a folder that is thrown away.

    Raises ValueError for a point that cannot be, or is too large here; ``measure.Interrupted`` on Ctrl-C.
    """
    chosen = point(choice)
    if why := refusal(choice, here):
        raise ValueError(why)
    with tempfile.TemporaryDirectory(prefix="ringlab-explore-", ignore_cleanup_errors=True) as folder:
        group = measure.Group("explore", (chosen,))
        (result,) = measure.run([group], folder, profile=here.profile, timeout_s=LIMIT_S)
    return result


def table(results: list[tuple[Choice, measure.Result]], here: Here) -> Table:
    """What was measured, the newest first, beside what the estimate said; no number where the check did not pass."""
    title = f"Measured on {here.profile.title}"
    columns = ["Point", ">Time (ms)", ">Lower bound (ms)", ">Peak of a rank", ">Sent in all", ">Error"]
    others = sorted({c.profile for c, _ in results} - {here.profile.name})
    note = f"Estimates for {', '.join(others)} are of other hardware: these times are not theirs." if others else ""
    return Table(title, columns, [_line(c, r, here) for c, r in reversed(results)], note=note)


def _line(choice: Choice, result: measure.Result, here: Here) -> list:
    label = result.point.label()
    if why := objection(result):
        return [label, Cell(why, kind="bad"), None, None, None, None]
    found = estimate(choice.pattern, **choice.call, profile=here.profile)
    peak, planned, moved = result.memory["tracked_peak_bytes"], sum(found.sent.values()), None
    if choice.ranks > 1:
        sent = sum(result.ranks["bytes_sent"])
        moved = Cell(size(sent), "as estimated" if sent == planned else f"estimated {size(planned)}")
    crowded = result.ranks.get("oversubscribed")
    return [
        label,
        Cell("not timed", "more ranks than cores", kind="none") if crowded else ms(result),
        bound(result),
        Cell(size(peak), f"estimated {size(found.peak_bytes)}; {100 * (found.peak_bytes / peak - 1):+.2g} %"),
        moved,
        error(result),
    ]
