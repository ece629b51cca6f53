"""What a request for a profile comes to on this machine: measure it, show what was recorded elsewhere, or rehearse.

Needs torch alone, so that a machine without the report's packages can measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import hardware
from .places import UsageError

REHEARSAL = "rehearsal"


@dataclass(frozen=True)
class Plan:
    """What a request for a profile comes to on this machine."""

    profile: hardware.Profile
    folder: str  # below reports/
    measure: bool
    rehearsal: bool
    device: str
    why: str = ""  # this profile cannot be measured here


def plan(name: str, machine: hardware.Machine, reports: Path, *, strict: bool = False, recorded: bool = True) -> Plan:
    """Decide between measuring, rendering what was recorded elsewhere (unless ``recorded`` is false), and a rehearsal.

    Raises UsageError for an unknown profile, for a GPU that is here but that torch cannot drive (one screen with the
    install line), and with ``strict`` for anything but real measurements.
    """
    try:
        profile = hardware.resolve(name, machine)
    except hardware.UnknownProfile as error:
        raise UsageError(str(error)) from None
    here = profile.kind == "cpu" or profile.name in (hardware.match(machine), "generic")
    if profile.kind != "cpu" and here and (screen := hardware.drivable(machine)):
        raise UsageError(screen)
    runnable, why = profile.runnable(machine)
    if runnable:
        return Plan(profile.on(machine), profile.name, True, False, "cpu" if profile.kind == "cpu" else "cuda")
    if strict:
        raise UsageError(
            f"profile {profile.name!r} cannot be measured here and a rehearsal was refused (strict): {why}"
        )
    if recorded and (reports / profile.name / "data" / "samples.jsonl").is_file():
        return Plan(profile, profile.name, False, False, "cpu", why)
    return Plan(profile, f"{profile.name}-{REHEARSAL}", True, True, "cpu", why)
