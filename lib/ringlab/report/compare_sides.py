"""The rows of one side of a comparison: those of a profile, of a folder or file, or of a profile at a git revision."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .. import measure
from ..measure import store
from ..measure.store import NAME
from .places import UsageError, note
from .study import Study, settle

# What rows must agree in for the code to be the only thing that differs: the engine is what a check is about.
DEMANDED = ("machine", "device", "device_name", "torch", "method")


@dataclass(frozen=True)
class Side:
    """Rows with the name that the user gave them."""

    name: str
    study: Study

    @property
    def newest(self) -> dict:
        """The provenance of the row that was measured last."""
        return max((r.provenance for r in self.study.results), key=lambda p: p.get("utc", ""))

    def about(self) -> dict[str, str]:
        """Where the rows come from, for the head of a comparison."""
        p = self.newest
        commits = {r.provenance.get("commit") for r in self.study.results}
        more = f" and {len(commits) - 1} more" if len(commits) > 1 else ""
        said = {name: str(p.get(name)) for name in ("device_name", "device", "threads", "torch", "engine", "method")}
        said["commit"] = f"{str(p.get('commit'))[:10]}{' with changes' if p.get('dirty') is True else ''}{more}"
        said |= {"machine": str(p.get("machine")), "measured": str(p.get("utc")), "rows": str(len(self.study.results))}
        if self.study.left_out:
            said["rows"] += f" ({self.study.left_out} of another machine, device or engine left out)"
        return said


def read_side(text: str, reports: Path) -> Side:
    """The rows that ``text`` names, of their newest machine, device and engine.

    ``text`` is a profile of ``reports``, a folder with samples.jsonl, such a file by any name, or REVISION:PROFILE, the
    rows as they were committed. Raises UsageError, one line, where there are none or another version wrote them.
    """
    data = _committed(text, reports) if ":" in text else _found(text, reports)
    _refuse_other_schemas(text, data)
    with tempfile.TemporaryDirectory() as folder:  # the store reads a folder; a committed file lies in none
        path = Path(folder) / NAME
        path.write_bytes(data)
        skipped: list[str] = []
        try:
            everything = store.read(folder, warn=skipped.append)
        except (AttributeError, TypeError) as error:
            raise UsageError(f"{text}: a row is damaged ({error}); restore the file or measure again") from None
    if not everything:
        raise UsageError(f"{text}: no complete row in it")
    for said in skipped:
        note(f"ringlab: {said.replace(str(path), text)}")
    return Side(text, Study(None, folder=Path(text), **settle(everything)))


def _found(text: str, reports: Path) -> bytes:
    try:
        for path in (reports / text / "data" / NAME, Path(text) / NAME, Path(text) / "data" / NAME, Path(text)):
            if text and path.is_file():
                return path.read_bytes()
        there = sorted(path.parents[1].name for path in reports.glob(f"*/data/{NAME}"))
    except OSError as error:
        raise UsageError(f"cannot read rows of {text!r}: {error.strerror or error}") from None
    raise UsageError(
        f"no rows of {text!r}; name a profile with rows ({', '.join(there) or 'there is none yet'}), a folder with "
        f"{NAME}, such a file, or REVISION:PROFILE"
    )


def _committed(text: str, reports: Path) -> bytes:
    revision, _, profile = text.partition(":")
    what = f"{revision}:./{profile}/data/{NAME}"  # ./ is the folder that git is run in
    try:
        done = subprocess.run(["git", "-C", str(reports), "show", "--end-of-options", what], capture_output=True)
    except OSError as error:
        raise UsageError(f"{text}: git cannot be run: {error.strerror or error}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise UsageError(f"no rows of {text!r}: {said[0].removeprefix('fatal: ')}")
    return done.stdout


def _refuse_other_schemas(text: str, data: bytes) -> None:
    found = set()
    for line in data.splitlines():
        try:
            found.add(json.loads(line)["schema"])
        except (ValueError, KeyError, TypeError):  # the store says which lines it cannot read
            continue
    if other := sorted(map(str, found - {measure.SCHEMA})):
        raise UsageError(
            f"{text}: rows of schema {', '.join(other)}, this version of ringlab reads schema {measure.SCHEMA}; "
            "compare runs of one version"
        )


def demand_alike(now: Side, base: Side) -> None:
    """Refuse to check rows of another machine, device, torch or way of measuring; raises UsageError."""
    for name in DEMANDED:
        one, other = (sorted({str(r.provenance.get(name)) for r in side.study.results}) for side in (base, now))
        if len({*one, *other}) > 1:
            raise UsageError(
                f"no check of {now.name} against {base.name}: they differ in {name} ({', '.join(one)}; "
                f"{', '.join(other)}); compare shows them side by side"
            )
