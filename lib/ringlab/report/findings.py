"""What every page says of its rows: how far to trust them, what is missing or failed,
what the numbers mean, where they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from .. import cost, hardware, patterns
from ..advise import dtype_name
from ..estimate import longest
from ..measure import suites
from ..measure.peers import PEERS
from ..measure.validity import objection, reason, status
from .rows import SHORT, label, pass_of
from .study import Study
from .tables import FINDING, Cell, Table, Text, counted, number, size, some

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
    measured = *lines, trust_line(study), gaps_line(study)
    lines = [*filter(None, computed if study.computed else measured)]
    return Finding(lines, kind="answer", bullets=True)


def fits(study: Study, pattern, seq_len: int, ranks=(1,), **shape) -> str:
    """A line of how long a sequence fits on one rank and on so many, by ``longest``;
    where nothing was measured with the rooflines too. ``shape``: other ``HEADS``.
    """
    gpu = study.profile
    bound = ""
    ranks = sorted({1, *ranks})
    if study.computed and (least := bounds(gpu, pattern, seq_len, **shape)):
        dtype = SHORT[dtype_name(gpu.default_dtype())]
        bound = f" Over {seq_len:,} tokens in {dtype}, on one device, {pattern} takes {least}."
    if not study.memory_bytes:
        return f"**How long a sequence fits**: not known, because the size of the memory is not.{bound}"
    how = {"dtype": gpu.default_dtype(), "profile": gpu.name, **HEADS, **shape}

    def tokens(**more) -> str:
        return f"{_longest(pattern, study.memory_bytes, **how, **more):,}"

    if ranks == [1]:
        said = f"hold {tokens(ranks=1)} tokens in a forward call, {tokens(passes='fwd+bwd')} in training"
    else:
        each = " or ".join(
            f"{tokens(ranks=n)} tokens on {counted(n, 'rank')}" for n in ranks
        )
        said = f"a rank hold {each} in a forward call"
    held = size(study.memory_bytes)
    return f"**How long a sequence fits**: {held} {said}, by `ringlab.longest` for attention alone.{bound}"


def bounds(profile: hardware.Profile, pattern, seq_len: int, **shape) -> str:
    """The rooflines of a pattern and of dense attention on a profile; empty for no
    rates.
    """
    dtype = profile.default_dtype()
    rate = profile.peak(dtype)
    bandwidth = profile.bandwidth_bytes_per_s
    if not rate or not bandwidth:
        return ""
    how = {"batch": 1, "dtype": dtype, "seq_len": seq_len, **HEADS, **shape}
    ours = cost.count(pattern, **how).seconds(rate, bandwidth)
    dense = cost.count(patterns.Dense(), **how).seconds(rate, bandwidth)
    return f"at least {number(ours * 1e3)} ms, dense attention {number(dense * 1e3)} ms"


# --------------------------------------------------------------------------------------
# trust, and what is missing


def trust_line(study: Study) -> str:
    """The line of an answer about checks, noise and repetition."""
    if not study.results:
        return "**Trust**: none of the points that this page asks for has a row."
    shares = [
        e / r.tolerance[k]
        for r in study.good
        for k, e in r.errors.items()
        if r.tolerance[k]
    ]
    timed = [r for r in study.good if r.median]
    again, agreed = study.repeats
    good = len(study.good)
    ran = [r for r in study.results if status(r) != "unsupported"]
    kinds = Counter(rejected(r) for r in ran if objection(r))
    rejects = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    twice = (
        f"{agreed} of {again} times agree with an earlier run"
        if again
        else "no second run to compare with"
    )
    floor = f"The same work, measured twice in turns, differed by up to {number(study.noise_floor)}×"
    return (
        f"**Trust**: {good} of {len(ran)} measurements passed their check against the float64 reference "
        f"(largest error: {100 * max(shares, default=0):.0f} % of what is allowed)"
        f"{f'; rejected: {rejects}' if rejects else ''}. "
        f"{f'{absent} more could not run on this device. ' if (absent := len(study.results) - len(ran)) else ''}"
        f"{floor if study.controls else 'No call was measured twice in a run'}. "
        f"Unstable times: {sum(r.unstable for r in timed)} of {len(timed)}; {twice}."
    )


def rejected(row) -> str:
    """What a rejected row is of."""
    if row.point.system in PEERS:
        return "of other packages"
    return (
        "faster than so many ranks can be"
        if reason(row).startswith("superlinear")
        else "of this library"
    )


def _crowded(study: Study) -> float:
    """How many cores other processes used at most, where that disturbed rows."""
    return max(
        (
            r.provenance["others_cores"]
            for r in study.results
            if r.provenance.get("crowded")
        ),
        default=0,
    )


def gaps_line(study: Study) -> str:
    """The line of an answer about what was not measured."""
    gaps = ["any GPU"] if study.device_type == "cpu" else []
    crowded = sorted(
        {r.point.world_size for r in study.good if r.ranks.get("oversubscribed")}
    )
    if crowded:
        gaps.append(
            f"times on {' and '.join(map(str, crowded))} ranks, for which there are too few cores"
        )
    if missing := missing_points(study):
        gaps.append(f"{counted(len(missing), 'point')} of this profile")
    if failed := study.failed:
        gaps.append(
            f"{len(failed)} of {len(study.results)} points, which are not quoted (their reasons stand below)"
        )
    return (
        "**Not measured**: " + "; ".join(gaps or ["nothing that was asked for"]) + "."
    )


HOST_BOUND = 0.8  # of a call's time on a GPU, in which the host issues it


def limits(study: Study, *more: str) -> Text:
    """What this run cannot tell: ``more``, and points that are missing, failed,
    unstable or on one device.
    """
    lines = [study.origin] if study.origin else []
    if study.results and all(r.point.world_size == 1 for r in study.results):
        lines.append("Anything about several devices: every row ran on one.")
    if not study.turns and any(r.median for r in study.good):
        lines.append("How far times differ from run to run: these are of one run.")
    lines += more
    if missing := [p.label() for p in missing_points(study)]:
        lines.append(f"What points without a row would have shown: {some(missing)}.")
    if unbound := [
        r
        for r in study.good
        if r.median and not r.bound_seconds and r.cost.get("flops")
    ]:
        lines.append(
            f"Whether all times are possible: the roofline of {len(unbound)} is not known."
        )
    if waits := [
        f"{label(r)}, {_shape(r.point)}"
        for r in study.good
        if r.host_seconds and r.host_seconds > HOST_BOUND * r.median
    ]:
        named = "; ".join([*dict.fromkeys(waits)][:3])
        lines.append(
            f"What the GPU alone takes for {len(waits)} short calls, which it waits for "
            f"the host to issue, as {named}: a CUDA graph leaves that out."
        )
    if unstable := [f"{label(r)}, {_shape(r.point)}" for r in study.good if r.unstable]:
        named = "; ".join([*dict.fromkeys(unstable)][:3])
        lines.append(f"Unstable times: {len(unstable)}, among them {named}.")
    return Text(lines or ["Nothing that was asked for is missing."], bullets=True)


def _shape(point) -> str:
    many = f"{point.batch} × " if point.batch > 1 else ""
    ranks = f", {point.world_size} ranks" if point.world_size > 1 else ""
    return f"{SHORT.get(point.dtype, point.dtype)}, {many}{point.seq_len:,} tokens, {pass_of(point)}{ranks}"


def suite_points(study: Study) -> list:
    """(group, point) of all that is asked for on this profile."""
    names = [study.suite] if study.suite else suites.SUITES
    groups = study.groups or [g for name in names for g in study.asked(name)]
    return [(g.name, p) for g in groups for p in g.points]


def missing_points(study: Study) -> list:
    """Points of the suite without a result."""
    have = {(r.group, r.point.id) for r in study.results}
    return [p for group, p in suite_points(study) if (group, p.id) not in have]


def failures(study: Study, told: Sequence = ()) -> Table | None:
    """Every point that is not quoted, but for those ``told`` elsewhere; points of one
    shape and reason share a line.

    None where there are none.
    """
    failed = [r for r in study.failed if not any(r is x for x in told)]
    if not failed:
        return None
    found: dict[tuple, list[str]] = {}
    for r in failed:
        found.setdefault((_shape(r.point), status(r), reason(r)), []).append(label(r))
    return Table(
        f"{len(failed)} of {len(study.results)} rows are not shown",
        ["Systems", "Shape", "Status", "Reason"],
        [
            ["; ".join(names), shape, Cell(word, kind="bad"), why]
            for (shape, word, why), names in found.items()
        ],
        folded=True,
    )


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
    crowded = _crowded(study)
    told = any("others_cores" in r.provenance for r in study.results)
    quiet = (
        f"no: others used up to {crowded:g} of its cores"
        if crowded
        else "yes"
        if told
        else None
    )
    found = {"Machine quiet": quiet} | {
        name: _spread(
            [r.provenance.get(key) for r in study.results],
            size if key == "device_memory_bytes" else _plain,
        )
        for key, name in NAMES.items()
    }
    for key, name in STATES.items():
        found[name] = _states([r.provenance.get(key) or {} for r in study.results])
    times = sorted(
        str(r.provenance["utc"]) for r in study.results if r.provenance.get("utc")
    )
    missing = missing_points(study)
    counts = {len(r.seconds) for r in study.good if r.seconds}
    samples = (
        " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else ""
    )
    found |= {
        "Groups begun (UTC)": f"{times[0]} to {times[-1]}" if times else None,
        "Points": f"{len(study.results)} measured, {len(study.good)} quoted",
        "Complete": f"no, {len(missing)} of {len(suite_points(study))} are missing"
        if missing
        else "yes",
        "Left out": f"{study.left_out} rows of another engine, machine or device"
        if study.left_out
        else None,
        "Samples of one point, least to most": f"{samples}, warm-up discarded; 95 % intervals"
        if samples
        else None,
    }
    known = [[name, value] for name, value in found.items() if value is not None]
    return Table("Where these rows come from", ["What", "Value"], known, folded=True)


def _states(states: list[dict]) -> str | None:
    """Clocks, temperature and the like, each with the values it took."""
    keys = dict.fromkeys(k for state in states for k in state)
    said = {k: _spread([s.get(k) for s in states], _plain) for k in keys}
    return (
        "; ".join(
            f"{k.replace('_', ' ')} {v}" for k, v in said.items() if v is not None
        )
        or None
    )


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
