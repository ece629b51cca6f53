"""Where the rows come from: code, versions, machine, its state before and after, and whether they are all there."""

from __future__ import annotations

import json

from .findings import missing_points, suite_points
from .study import Study
from .tables import Table, number, size

NAMES = {
    "commit": "Commit", "dirty": "Changed since that commit", "ringlab": "ringlab",
    "engine": "Engine (hash of its code)", "method": "Method (hash of its code)", "device_name": "Device",
    "device_memory_bytes": "Memory", "cpu": "CPU", "cpu_capability": "Instruction set", "threads": "Threads",
    "cpu_mhz": "CPU clock at the start of a group (MHz)", "torch": "torch", "cuda": "CUDA", "driver": "Driver",
    "python": "Python", "machine": "Machine (salted id)", "load_average": "Load average of the last minute",
    "others_cores": "Cores that others used meanwhile",
}  # fmt: skip
STATES = {"gpu_before": "GPU before a group", "gpu_after": "GPU after a group"}


def provenance(study: Study) -> Table:
    """Where the rows come from: each fact with the values it took, one where all rows agree."""
    rows = []
    for key, name in NAMES.items():
        values = [r.provenance.get(key) for r in study.results]
        rows.append([name, _spread(values, size if key == "device_memory_bytes" else _plain)])
    for key, name in STATES.items():
        rows.append([name, _states([r.provenance.get(key) or {} for r in study.results])])
    times = sorted(str(r.provenance["utc"]) for r in study.results if r.provenance.get("utc"))
    rows.append(["Groups begun (UTC)", f"{times[0]} to {times[-1]}" if times else None])
    rows.append(["Spent on these points (s)", _spent(study)])
    rows.append(["Points", f"{len(study.results)} measured, {len(study.good)} quoted"])
    missing = missing_points(study)
    rows.append(["Complete", "yes" if not missing else f"no, {len(missing)} of {len(suite_points(study))} are missing"])
    if study.left_out:
        rows.append(["Left out", f"{study.left_out} rows of another engine, machine or device"])
    rows.append(["Samples of one point, least to most", _samples(study)])
    rows.append(["Inputs", "normal, from a generator seeded by the point's own hash"])
    known = [r for r in rows if r[1] is not None]
    return study.table("Where these rows come from", ["What", "Value"], known, folded=True)


def _spent(study: Study) -> str | None:
    """Seconds from the file of rows: starting, checking and warming up included."""
    path = study.folder / "samples.jsonl"
    if not path.is_file():
        return None
    ours = {(r.run, r.point.id) for r in study.results}
    seconds = 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # a writer that was killed left half a line
            continue
        if isinstance(row, dict) and row.get("kind") == "result" and (row["run"], row["point"]) in ours:
            seconds += row["duration"]
    return number(seconds)


def _states(states: list[dict]) -> str | None:
    """Clocks, temperature and the like, each with the values it took."""
    keys = dict.fromkeys(k for state in states for k in state)
    said = {k: _spread([s.get(k) for s in states], _plain) for k in keys}
    return "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in said.items() if v is not None) or None


def _plain(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _spread(values: list, show) -> str | None:
    known = {v for v in values if v is not None}
    if not known:
        return None
    if len(known) > 2 and all(isinstance(v, int | float) for v in known):
        return f"{show(min(known))} to {show(max(known))}"
    return ", ".join(sorted(show(v) for v in known))


def _samples(study: Study) -> str | None:
    counts = [len(r.seconds) for r in study.good if r.seconds]
    said = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else ""
    return f"{said}, warm-up discarded; 95 % intervals" if counts else None
