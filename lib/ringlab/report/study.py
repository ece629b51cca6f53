"""The rows of one profile as a notebook sees them: what may be quoted, what failed and
why.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from .. import cost, hardware, measure
from ..measure import provenance, store, suites
from ..measure.points import pattern_of
from ..measure.provenance import device_of, key
from ..measure.validity import (
    computed,
    mark_superlinear,
    reason,
    roofline_s,
    shown,
    status,
    threads,
    timed,
    why_not_quotable,
)
from .noise import Noise, noise_of, repeated, reproduced
from .places import (
    NO_MEASURING,
    ReportError,
    RunTarget,
    UsageError,
    locked,
    note,
    reports_folder,
    run_target,
    short_commit,
)

# Columns of a frame, whatever the rows have.
ALWAYS = ["floor_bytes", "tracked_peak_bytes", *(f.name for f in fields(cost.Cost))]
ANY = measure.Point(
    "ringlab", {"kind": "dense"}
)  # whose columns a frame without rows has
ADDED = "added"  # the folder, beside the rows, of points that no page lists


def source(profile: str = "auto", data: str = "", measure: bool = True) -> RunTarget:
    """Where the rows of a profile lie (in the folder ``data``, if named), and whether
    missing ones can be measured here (not with ``measure=False``) or all are computed.

    Raises UnknownProfile, and UsageError for a GPU that torch cannot drive here, a
    folder without rows, and one with those of another profile.
    """
    target = run_target(profile, hardware.detect(), reports_folder(), data)
    device = target.profile
    folder = target.data
    there = folder.is_dir() if target.computed else (folder / store.NAME).is_file()
    if data and not there:
        raise UsageError(f"there is no {store.NAME} in the folder {data}")
    if rows := store.load(folder):  # they say what they were measured on
        others = {row.provenance.get("profile", device.name) for row in rows}
        if others := others - {device.name}:
            raise UsageError(
                f"the rows in {folder} are of {', '.join(sorted(others))}, not of {device.name}"
            )
        device = Study(device, newest_origin(rows), folder).sized_profile
    why = target.why
    if not measure or NO_MEASURING in os.environ:
        why = why or "as asked"
    return replace(target, profile=device, why=why)


def measured(here: RunTarget, points: Iterable) -> Study:
    """The rows of these groups and points, of which those without a row are measured
    first, with a line of progress for each; its ``all_suites`` has all rows of the folder.
    For a device that is absent the rows are computed, and nothing is measured; so are
    those that a GPU's recorded rows lack.

    Rows of points that no page lists go to a folder of their own. Points by themselves
    are a group of the name ``ADDED``. A page never mixes rows of two machines, engines
    or numbers of threads: if those that are there are not of here and now and some are
    missing, all are measured. Points that crashed, or that other work disturbed, are
    tried again as ``measure.run`` says. Raises ReportError if another run uses the
    folder or it cannot be written.
    """
    groups = in_groups(points)
    from .predicted import rows_of  # which needs this module

    requested = {name for g in groups for name in g.keys}

    def stored() -> tuple[list, list]:
        """All rows of the folder, and those that are requested."""
        beside = store.read(here.data)
        both = [*beside, *store.read(here.data / ADDED)]
        return beside, [row for row in both if row.key in requested]

    beside, everything = stored()
    rows = newest_origin(everything)
    if here.runs:
        missing = requested - {row.key for row in rows}
        now = key(provenance.collect(here.profile.kind))
        if all(key(row.provenance) == now for row in rows):
            # Whether to try again is for the run to say.
            missing |= {
                row.key
                for row in rows
                if row.status == "crashed" or row.provenance.get("crowded")
            }
        elif missing:
            note(f"{len(rows)} rows are of another machine or engine: measuring all")
            missing = requested
        if incomplete := [g for g in groups if missing & {*g.keys}]:
            _measure(here, incomplete)
            beside, everything = stored()
            rows = newest_origin(everything)
    names = {g.name for g in groups}
    # The machine's pace shows in all that was measured beside these rows, too.
    if rows:
        same = key(rows[0].provenance)
        beside = [row for row in beside if key(row.provenance) == same]
    study = study_of(
        [*rows, *(row for row in beside if row.group not in names)],
        here.profile,
        here.data,
        groups=groups,
        all_suites=study_of(beside, here.profile, here.data) if beside else None,
    )
    excluded = len({row.key for row in everything}) - len(study.results)
    extra = []
    if here.profile.kind == "cuda" and not here.runs:
        have = {row.id for row in study.results}
        extra = [row for row in rows_of(here.profile, groups) if row.id not in have]
    return replace(study, results=[*study.results, *extra], excluded=excluded)


def _measure(here: RunTarget, groups: Iterable) -> None:
    suite_groups = (suite(here.profile) for suite in suites.SUITES.values())
    listed = {group.id for each in suite_groups for group in each}
    folders: dict[Path, list] = {}
    for group in groups:
        folder = here.data if group.id in listed else here.data / ADDED
        folders.setdefault(folder, []).append(group)
    try:
        with locked(here.data.parent):
            for folder, each in folders.items():
                measure.run(each, folder, profile=here.profile, progress=True)
    except (OSError, measure.Busy) as error:
        raise ReportError(f"cannot measure into {here.data}: {error}") from error


def in_groups(points: Iterable) -> list:
    """Groups as they are; points by themselves are a group of the name ``ADDED``."""
    points = list(points)
    groups = [x for x in points if isinstance(x, measure.Group)]
    alone = [x for x in points if isinstance(x, measure.Point)]
    if len(groups) + len(alone) < len(points):
        raise ValueError("points must be a list of measure.Group and measure.Point")
    if alone:
        groups.append(measure.Group(ADDED, dict.fromkeys(alone), interleave=False))
    return groups


def listed(points: Iterable):
    """The points of a page as a DataFrame, named as the rows that they get."""
    import pandas

    each = [
        _fields(group.name, point)
        for group in in_groups(points)
        for point in group.points
    ]
    return pandas.DataFrame(each, columns=[*_fields("", ANY)])


def read_study(profile, folder: Path) -> Study:
    """The rows in ``folder`` of its newest machine, device and engine: a page never
    mixes two of them.
    """
    return study_of(store.read(folder), profile, folder)


def study_of(everything: Sequence, profile, folder: Path, groups=(), **more) -> Study:
    """The Study of all rows of a folder: which of them count, in these ``groups`` if
    there are any; what noise widens their intervals; which times are unstable, as those
    that an earlier run does not reproduce.
    """
    newest = store.latest(everything)
    kept = newest_origin(newest)
    again = repeated(everything, kept)
    noise = noise_of(kept, again)
    agreed = reproduced(again, noise)
    names = {g.name for g in groups}
    rows = [
        replace(row, unstable=row.unstable or agreed.get(row.id) is False)
        for row in kept
        if not groups or row.group in names
    ]
    excluded = len(newest) - len(kept)
    return Study(
        profile,
        noise.times(rows),
        folder,
        excluded,
        noise=noise,
        reproduced=agreed,
        groups=groups,
        **more,
    )


def newest_origin(results: Sequence) -> list:
    """The results that share engine, method, machine, device, threads and torch with the
    one that was measured last.
    """
    newest = max(results, key=lambda r: r.provenance.get("utc", ""), default=None)
    return [r for r in results if key(r.provenance) == key(newest.provenance)]


@dataclass(eq=False)
class Study:
    """Everything a document's tables are filled from.

    ``all_suites``: all rows of the ``folder``, where these are some of them. ``groups``:
    of points that a page asked for. ``excluded``: how many rows
    there are of another machine, device or engine. ``noise``: what times of the same
    work differ by, in the intervals of all times already. ``reproduced``: by the ``id`` of
    a row, whether it agreed with an earlier run. ``computed``: nothing was measured,
    because the device is absent.
    """

    profile: object
    results: Sequence
    folder: Path
    excluded: int = 0
    noise: Noise = Noise()
    all_suites: Study | None = None
    groups: Sequence = ()
    reproduced: dict[tuple[str, str], bool] = field(default_factory=dict)
    computed: bool = False

    def __post_init__(self):
        self.results = mark_superlinear(self.results)
        self.computed = self.computed or bool(self.results) and not self.measured

    @property
    def measured(self) -> list:
        """The rows that say what a device did, not what its data sheet says."""
        return [
            row
            for row in self.results
            if not (computed(row) or row.provenance.get("computed"))
        ]

    def of(self, suite: str) -> Study:
        """The rows of one suite: all but those of groups that belong to another."""
        profile = self.sized_profile
        groups = {name: make(profile) for name, make in suites.SUITES.items()}
        own = {group.name for group in groups[suite]}
        listed = {group.name for each in groups.values() for group in each}
        kept = [row for row in self.results if row.group not in listed - own]
        return replace(self, results=kept, groups=groups[suite], all_suites=self)

    @property
    def sized_profile(self) -> hardware.Profile:
        """The profile with the memory of the machine that these rows come from, where
        it states none.
        """
        memory = self.profile.memory_bytes or self.memory_bytes
        return replace(self.profile, memory_bytes=memory)

    @property
    def time_axis(self) -> str:
        """What a figure of times shows."""
        return "Shortest possible time (ms), computed" if self.computed else "Time (ms)"

    @property
    def origin(self) -> str:
        """Said where the rows come from another machine or engine than the ones at
        hand; empty otherwise.
        """
        if self.computed or not self.results:
            return ""
        parts = []
        first = self.results[0].provenance
        if first.get("machine") != measure.machine_id():
            parts.append(
                f"measured on another machine ({self.device}), commit {short_commit(first)}"
            )
        if first.get("engine") != measure.engine_hash():
            parts.append("measured with an older engine")
        return f"These rows were {' and '.join(parts)}." if parts else ""

    @cached_property
    def device(self) -> str:
        """What the rows were measured on."""
        origins = (row.provenance for row in self.measured or self.results)
        return ", ".join(sorted({*map(device_of, origins)}))

    @property
    def memory_bytes(self) -> int | None:
        """Memory that a run may use, of the machine that the rows come from."""
        known = (row.provenance.get("device_memory_bytes") for row in self.results)
        return next(filter(None, known), self.profile.memory_bytes)

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda", what the rows are of."""
        return self.profile.kind

    @property
    def newest(self) -> dict:
        """The provenance of the row that was measured last."""
        about = (row.provenance for row in self.results)
        return max(about, key=lambda p: p.get("utc", ""), default={})

    @property
    def good(self) -> list:
        return [row for row in self.results if not why_not_quotable(row)]

    @property
    def failed(self) -> list:
        """The rows that are not shown."""
        return [row for row in self.results if not shown(row)]

    def rows(self, *, options=(), **fields) -> list:
        """Results but for the A/A controls whose point has these fields, and these
        options among others; a list means any of its values.
        """
        options = dict(options).items()
        return [
            row
            for row in self.results
            if not row.option("twin")
            and options <= dict(row.point.options).items()
            and all(
                getattr(row.point, name, getattr(row, name, None))
                in (value if isinstance(value, list) else [value])
                for name, value in fields.items()
            )
        ]

    def same_calls(self, *, options=(), **fields) -> list:
        """The rows of these fields and just these options; of forward calls that are
        not causal, unless it is said.
        """
        rows = self.rows(**{"passes": "fwd", "causal": False} | fields)
        return [row for row in rows if dict(row.point.options) == dict(options)]

    def ratio(self, slow, fast):
        """How many times longer ``slow`` takes than ``fast``, a ``measure.Ratio``; None
        unless both may be quoted.
        """
        if not all(timed(row) and row.seconds for row in (slow, fast)):
            return None
        ratio = measure.ratio(slow, fast)
        doubted = False in (self.reproduced.get(row.id) for row in (slow, fast))
        found = self.noise.of(ratio, (1 / self.noise_floor, self.noise_floor))
        return replace(found, unstable=ratio.unstable or doubted)

    @cached_property
    def controls(self) -> list:
        """The Ratio of each A/A control to the row that it repeats, which took turns."""
        timed = [row for row in self.good if row.seconds]
        return [
            measure.ratio(control, row)
            for control in timed
            if control.option("twin")
            for row in timed
            if row.point == control.point.without_control and together(row, control)
        ]

    @cached_property
    def noise_floor(self) -> float:
        """The largest factor by which the same work differed from itself: no smaller
        one is called a difference.
        """
        factors = (max(x.value, 1 / x.value) for x in self.controls)
        return max(factors, default=1.0)

    def frame(self, systems: Mapping | None = None):
        """Every row as a pandas DataFrame, for hands and ``summary.csv``: one row a point
        of a group, units in the names.

        ``status``: "ok", or the word for what is not quoted, and ``not_quoted_because``;
        ``timed``: it has a time to compare; ``shown_s``: that time, of a computed row the
        roofline; ``control``: it repeats another row;
        ``row``: the Result, which ``ratio`` and the cells of tables take; ``variant``:
        its name in ``systems`` (name -> (system, pattern at a length)), if given.
        """
        import pandas

        # Without results it has the columns of one.
        rows = self.results or [measure.Result(ANY, "", "")]
        frame = pandas.DataFrame([_flat(row) | {"row": row} for row in rows])
        frame = frame[: len(self.results)]
        if not self.computed:  # a bound is no time to draw beside others
            frame.loc[frame.status == "computed", "shown_s"] = None
        seconds = [name for name in frame if name.endswith("_s")]
        frame[seconds] = frame[seconds].astype(float)  # where all are None too
        if systems:
            frame["variant"] = [_named(row.point, systems) for row in self.results]
        return frame


def with_rates(study: Study) -> hardware.Profile:
    """The profile of a study; that of a CPU with the rates that bound the rows of its
    most threads.
    """
    if study.profile.kind != "cpu":
        return study.profile
    bound = [
        row for row in study.good if row.bound_seconds and row.point.world_size == 1
    ]
    most = max((threads(row) or 1 for row in bound), default=1)
    bound = [row for row in bound if (threads(row) or 1) == most]
    rates = rates_of(row for row in bound if row.point.dtype == "float32")
    if rates.flops_per_s is None:
        return study.profile
    flops = {"float32": rates.flops_per_s}
    return replace(study.profile, flops=flops, bandwidth_bytes_per_s=rates.bytes_per_s)


def rates_of(results: Iterable) -> hardware.Rates:
    """FLOP/s and bytes/s from which the rooflines of these rows were computed.

    A roofline is the larger of work over rate, so the largest quotient of work and
    roofline is the rate. Where a resource never binds it is less, which gives no
    roofline above those of the rows.
    """
    rows = [row for row in results if row.bound_seconds]

    def rate(name: str) -> float | None:
        known = (
            row.cost[name] / row.bound_seconds for row in rows if row.cost.get(name)
        )
        return max(known, default=None)

    return hardware.Rates(rate("folded_flops"), rate("floor_bytes"))


def together(a, b) -> bool:
    """The two took turns in one run."""
    return (a.run, a.composition) == (b.run, b.composition)


def best(results):
    """The fastest row that may be quoted, else a failed one, else None."""
    return min(
        results,
        key=lambda r: (bool(why_not_quotable(r)), r.median or float("inf")),
        default=None,
    )


def _named(point, systems: Mapping) -> str | None:
    """The first of the systems whose point this is."""
    for name, (system, pattern) in systems.items():
        if system == point.system and pattern(point.seq_len).to_dict() == point.pattern:
            return name
    return None


def _fields(group: str, point) -> dict:
    options = dict(point.options)
    return (
        {"point": point.id, "group": group}
        | asdict(point)
        | {
            "pattern": str(pattern_of(point)),
            "options": " ".join(f"{k}={v}" for k, v in options.items()),
            "control": bool(options.get("twin")),
        }
    )


def _flat(result) -> dict:
    low, high = result.ci or (None, None)
    time = result.median if timed(result) else None
    origin = result.provenance
    return _fields(result.group, result.point) | {
        "status": status(result) or "ok",
        "not_quoted_because": why_not_quotable(result),
        "why": reason(result),
        "timed": timed(result),
        "shown_s": result.bound_seconds if computed(result) else time,
        "median_s": result.median,
        "ci_low_s": low,
        "ci_high_s": high,
        "samples": len(result.seconds),
        "unstable": result.unstable,
        "bound_s": roofline_s(result),
        "host_s": result.host_seconds,
        "threads": threads(result),
        **{f"error_{k}": value for k, value in result.errors.items()},
        **dict.fromkeys(ALWAYS),
        **result.memory,
        **result.cost,
        **{
            f"ranks_{k}": " ".join(map(str, value))
            if isinstance(value, list)
            else value
            for k, value in result.ranks.items()
        },
        "device": device_of(origin),
        **{name: origin.get(name) for name in ("others_cores", "commit", "machine")},
    }
