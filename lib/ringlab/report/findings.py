"""What the rows come to: verdicts, and what is missing, failed or doubtful."""

from __future__ import annotations

from collections.abc import Iterable

from ..measure import suites
from . import claims
from .claims import Verdict
from .rows import SHORT, label, pass_of
from .study import Study
from .tables import Cell, Table, Text, number
from .trust import reason, status


def ledger(study: Study, judged: Iterable[tuple[dict, Verdict]]) -> Table:
    """Every claim of a document with its verdict."""
    return study.table(
        "Claims of the document, and what these rows say about them",
        claims.COLUMNS,
        [claims.cells(claim, verdict) for claim, verdict in judged],
        note="The tolerance follows from what is printed, not from these rows. The page of claims explains the words.",
        cards=True,
    )


def trust_line(study: Study) -> str:
    """The line of an answer about checks, noise and repetition."""
    shares = [e / r.tolerance[k] for r in study.good for k, e in r.errors.items() if r.tolerance[k]]
    timed = [r for r in study.good if r.median]
    again, agreed = study.repeats
    twice = f"{agreed} of {again} times were the same in an earlier run" if again else "the run was not repeated"
    good, count, worst = len(study.good), len(study.results), f"worst error {100 * max(shares, default=0):.0f} %"
    passed = f"all {count} rows" if good == count else f"{good} of {count} rows are shown, which"
    floor = f"the same work differed by up to {number(study.noise_floor)}× (the noise floor)"
    return (
        f"**Trust**: {passed} passed their check against the float64 reference ({worst} of the tolerance); "
        f"{floor if study.twins else 'no call was measured twice'}; {sum(r.unstable for r in timed)} of {len(timed)} "
        f"times are unstable; {twice}."
    )


def gaps_line(study: Study) -> str:
    """The line of an answer about what was not measured."""
    gaps = [study.profile.title if study.rehearsal else "any GPU"] if study.device_type == "cpu" else []
    crowded = sorted({r.point.world_size for r in study.good if r.ranks.get("oversubscribed")})
    if crowded:
        gaps.append(f"times on {' and '.join(map(str, crowded))} ranks, for which there are too few cores")
    if missing := missing_points(study):
        gaps.append(f"{len(missing)} points of this profile")
    if failed := study.failed():
        gaps.append(f"{len(failed)} of {len(study.results)} points are not quoted (listed below)")
    return "**Not measured**: " + "; ".join(gaps or ["nothing that was asked for"]) + "."


def limits(study: Study, *more: str) -> Text:
    """What this run cannot tell: ``more``, and points that are missing, failed, unstable or on one device."""
    lines = [f"How fast {study.profile.title} is: it was not here."] if study.rehearsal else []
    if all(r.point.world_size == 1 for r in study.results):
        lines.append("Anything about several devices: every row ran on one.")
    lines += more
    missing = [p.label() for p in missing_points(study)]
    if missing:
        count = f"{len(missing)} of the {len(suite_points(study))} points of this profile"
        lines.append(f"What {count} would have shown, for they are not measured: {_some(missing)}.")
    for (why, word, shape), names in _by_reason(study).items():
        lines.append(f"{'; '.join(names)} ({shape}): {word}, {why.rstrip('.')}.")
    if others := taken_by_others(study):
        lines.append(f"How fast this machine is when quiet: other processes used up to {others:g} of its cores.")
    if unbound := [r for r in study.good if r.median and not r.bound_seconds and r.cost.get("flops")]:
        lines.append(f"Whether {len(unbound)} times are possible: their roofline is not known.")
    if study.pace:
        lines.append(
            f"The machine's speed drifted by about {number(100 * study.pace, 1)} % between parts of the run. Intervals "
            "of times include it; speed-ups of calls that took turns are not affected by it."
        )
    count, agreed = study.repeats
    if count > agreed:
        lines.append(f"{count - agreed} of {count} times do not agree with an earlier run; they are marked unstable.")
    unstable = [point_name(r) for r in study.good if r.unstable]
    if unstable:
        lines.append(f"{len(unstable)} times are unstable, as {_some(unstable)}.")
    return study.text(*(lines or ["Nothing that was asked for is missing."]), bullets=True)


def _by_reason(study: Study) -> dict[tuple, list[str]]:
    """Names of the points that are not quoted, by (reason, status, shape): those that agree in it share a line."""
    found: dict[tuple, list[str]] = {}
    for r, _ in study.failed():
        found.setdefault((reason(r), status(r), _shape(r.point)), []).append(label(r))
    return found


def _shape(point) -> str:
    many = f"{point.batch} × " if point.batch > 1 else ""
    ranks = f", {point.world_size} ranks" if point.world_size > 1 else ""
    return f"{SHORT.get(point.dtype, point.dtype)}, {many}{point.seq_len:,} tokens, {pass_of(point)}{ranks}"


def taken_by_others(study: Study) -> float | None:
    """Cores that others used while rows were measured, where that left too few."""
    crowded = [r.provenance for r in study.results if r.provenance.get("crowded")]
    return max((p["others_cores"] for p in crowded), default=None)


def _some(names: list[str], most: int = 3) -> str:
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more" if len(names) > most else "")


def point_name(result) -> str:
    """A point in the words of the tables."""
    return f"{label(result)}, {_shape(result.point)}"


def suite_points(study: Study) -> list:
    """(group, point) of all that is asked for on this profile."""
    names = [study.suite] if study.suite else suites.SUITES
    return [(g.name, p) for name in names for g in study.asked(name) for p in g.points]


def missing_points(study: Study) -> list:
    """Points of the suite without a result."""
    have = {(r.group, r.point.id) for r in study.results}
    return [p for group, p in suite_points(study) if (group, p.id) not in have]


def failures(study: Study) -> Table | None:
    """Every point that is not quoted, with the reason; None where all are."""
    failed = study.failed()
    if not failed:
        return None
    return study.table(
        f"{len(failed)} of {len(study.results)} rows are not shown",
        ["System", "Shape", "Status", "Reason"],
        [
            [label(r), _shape(r.point), Cell(status(r), kind="bad"), reason(r)]
            for r, _ in failed
        ],
        folded=True,
    )  # fmt: skip
