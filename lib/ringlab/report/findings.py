"""What every page says of its rows: how far to trust them, what is missing or failed,
what the numbers mean, where they come from.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from ..estimate import longest
from ..measure.peers import PEERS
from ..measure.validity import reason, status, why_not_quotable
from .rows import label
from .study import Study
from .tables import FINDING, Cell, Table, Text, counted, number, size
from .templates import lines_of

_longest = cache(longest)
HEADS = {"heads": 8, "head_dim": 64}  # of a call for which lengths are computed


# --------------------------------------------------------------------------------------
# the finding


@dataclass
class Finding(Text):
    """The finding of a page, its first line before all: as text, and as data for the
    index, with ``facts`` for who reads no sentences.
    """

    facts: dict = field(default_factory=dict)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        data = {"finding": list(self.lines), "facts": self.facts}
        return super()._repr_mimebundle_() | {FINDING: data}


def finding(study: Study, *lines: str, computed: Sequence[str] = ()) -> Finding:
    """What a page found: its ``lines``, the strongest first, then how far to trust it
    and what was not measured; where nothing was, the lines ``computed`` alone.
    """
    if not study.computed:
        computed = *lines, *trust_lines(study)
    elif study.all_suites:
        none = "**Nothing of this page was measured yet**: its numbers are computed, as bounds (≥)."
        computed = *computed, none
    return Finding([*filter(None, computed)], kind="answer", bullets=True)


def fits(study: Study, pattern, ranks=(1,), **shape) -> str:
    """Return a line of how long a sequence of a pattern fits on one rank and on so
    many, by ``longest``. ``shape``: other ``HEADS``.
    """
    gpu = study.profile
    if not study.memory_bytes:
        return "**How long a sequence fits**: not known, because the size of the memory is not."
    call = {"dtype": gpu.default_dtype(), "profile": gpu.name, **HEADS, **shape}
    each = " or ".join(
        f"{_longest(pattern, study.memory_bytes, **call, ranks=n):,} tokens on {counted(n, 'rank')}"
        for n in sorted({1, *ranks})
    )
    return (
        f"**How long a sequence of {pattern} fits**: {size(study.memory_bytes)} a rank hold {each} "
        "in a forward call of attention alone, by `ringlab.longest`."
    )


# --------------------------------------------------------------------------------------
# trust, and what is missing


def facts(study: Study) -> dict:
    """What is known of checks, noise and repetition, in counts of rows."""
    ran = [row for row in study.measured if status(row) != "unsupported"]
    timed = [row for row in study.good if row.median]
    agreed = [study.reproduced.get(row.id) for row in study.results]
    again = [each for each in agreed if each is not None]
    return {
        "checked": [len(study.good), len(ran)],
        "rejected": Counter(map(rejected, filter(why_not_quotable, ran))),
        "noise": number(study.noise_floor) if study.controls else None,
        "unstable": [sum(row.unstable for row in timed), len(timed)],
        "again": [sum(again), len(again)],
    }


def rejected(row) -> str:
    """What a rejected row is of."""
    if row.point.system in PEERS:
        return "of other packages"
    if status(row) == "timeout":
        return "beyond the time limit"
    superlinear = reason(row).startswith("superlinear")
    return "faster than so many ranks can be" if superlinear else "of this library"


def trust_lines(study: Study) -> list[str]:
    """How far to trust the rows of a page, and what was not measured."""
    shares = [
        e / row.tolerance[key]
        for row in study.good
        for key, e in row.errors.items()
        if row.tolerance[key]
    ]
    slow = {
        row.point.world_size for row in study.good if row.ranks.get("oversubscribed")
    }
    ranks = " and ".join(map(str, sorted(slow)))
    missing = missing_points(study)
    failed = study.failed
    rows = len(study.results)
    gaps = {
        "any GPU": study.device_type == "cpu",
        f"times on {ranks} ranks, for which there are too few cores": slow,
        f"{counted(len(missing), 'point')} of this profile": missing,
        f"{len(failed)} of {rows} points, which are not quoted (their reasons stand below)": failed,
    }
    return lines_of(
        "finding",
        study=study,
        largest_error=100 * max(shares, default=0),
        gaps=[text for text, applies in gaps.items() if applies],
        **facts(study),
    )


HOST_BOUND = 0.8  # of a call's time on a GPU, in which the host issues it


def limits(study: Study, *more: str) -> Text:
    """What this run cannot tell: ``more``, and points that are missing, failed,
    unstable or on one device.
    """
    timed = [row for row in study.good if row.median]
    on_one = study.results and all(row.point.world_size == 1 for row in study.results)
    unbound = [row for row in timed if not row.bound_seconds and row.cost.get("flops")]
    waits = [row for row in timed if (row.host_seconds or 0) > HOST_BOUND * row.median]
    unstable = [row for row in study.good if row.unstable]
    lines = lines_of(
        "limits",
        study=study,
        on_one=on_one,
        one_run=timed and not study.noise.turns,
        more=more,
        missing=[*map(label, missing_points(study))],
        unbound=len(unbound),
        waits=[label(row.point) for row in waits],
        unstable=[label(row.point) for row in unstable],
    )
    return Text(lines or ["Nothing that was asked for is missing."], bullets=True)


def missing_points(study: Study) -> list:
    """Points that a page asked for without a result."""
    known = {row.id for row in study.measured}
    return [
        point
        for group in study.groups
        for point in group.points
        if (group.name, point.id) not in known
    ]


def failures(study: Study, elsewhere: Sequence = ()) -> Table | None:
    """Every point that is not quoted, but for those that stand ``elsewhere``; points of one
    reason share a line.

    None where there are none.
    """
    failed = [row for row in study.failed if not any(row is each for each in elsewhere)]
    if not failed:
        return None
    labels = defaultdict(list)
    for row in failed:
        labels[status(row), reason(row)].append(label(row.point))
    lines = [
        ["; ".join(names), Cell(word, kind="bad"), why]
        for (word, why), names in labels.items()
    ]
    caption = f"{len(failed)} of {len(study.results)} rows are not shown"
    return Table(caption, ["Points", "Status", "Reason"], lines, folded=True)


# --------------------------------------------------------------------------------------
# where the rows come from

NAMES = {
    "commit": "Commit",
    "dirty": "Changed since that commit",
    "engine": "Engine (hash of its code)",
    "method": "Method (hash of its code)",
    "device_name": "Device",
    "device_memory_bytes": "Memory",
    "cpu": "CPU",
    "cpu_capability": "Instruction set",
    "threads": "Threads",
    "torch": "torch",
    "cuda": "CUDA",
    "driver": "Driver",
    "python": "Python",
    "machine": "Machine (salted id)",
    "others_cores": "Cores that others used meanwhile",
}
STATES = {"gpu_before": "GPU before a group", "gpu_after": "GPU after a group"}


def provenance(study: Study) -> Table:
    """Where the rows come from: each fact with the values it took, one where all rows
    agree.
    """
    origins = [row.provenance for row in study.measured]
    crowded = [each["others_cores"] for each in origins if each.get("crowded")]
    quiet = "yes" if any("others_cores" in each for each in origins) else ""
    if crowded:
        quiet = f"no: others used up to {max(crowded):g} of its cores"
    values = {"Machine quiet": quiet}
    for key, name in NAMES.items():
        show = size if key == "device_memory_bytes" else _plain
        values[name] = _spread([each.get(key) for each in origins], show)
    for key, name in STATES.items():
        values[name] = _states([each.get(key) or {} for each in origins])
    times = sorted(str(each["utc"]) for each in origins if each.get("utc"))
    missing = len(missing_points(study))
    points = sum(len(group.points) for group in study.groups)
    counts = sorted({len(row.seconds) for row in study.good if row.seconds})
    samples = " to ".join(map(str, dict.fromkeys(counts[:1] + counts[-1:])))
    values |= {
        "Groups begun (UTC)": times and f"{times[0]} to {times[-1]}",
        "Points": f"{len(study.measured)} measured, {len(study.good)} quoted",
        "Complete": f"no, {missing} of {points} are missing" if missing else "yes",
        "Left out": study.excluded
        and f"{study.excluded} rows of another engine, machine or device",
        "Samples of one point, least to most": samples
        and f"{samples}, warm-up discarded; 95 % intervals",
    }
    known = [[name, value] for name, value in values.items() if value]
    return Table("Where these rows come from", ["What", "Value"], known, folded=True)


def _states(states: list[dict]) -> str:
    """Clocks, temperature and the like, each with the values it took."""
    keys = dict.fromkeys(k for state in states for k in state)
    texts = {k: _spread([s.get(k) for s in states], _plain) for k in keys}
    return "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in texts.items() if v)


def _plain(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _spread(values: list, show) -> str:
    known = {value for value in values if value is not None}
    if len(known) > 2 and all(isinstance(value, int | float) for value in known):
        return f"{show(min(known))} to {show(max(known))}"
    return ", ".join(sorted(map(show, known)))
