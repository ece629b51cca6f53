"""The opening answer of a report: at most five lines, each computed from rows that passed."""

from __future__ import annotations

from .cells import has_peak
from .findings import missing_points, taken_by_others
from .lengths import begins, over_dense
from .rows import SHORT, computes_pattern, fastest_row, hardware_dtype, label
from .study import Study
from .tables import Text, about, number, size

RESERVE = 0.9  # share of a device's memory that a run may plan with; the rest is context, allocator and other users


def answer(study: Study) -> Text:
    """At most five lines: fastest, longest, over dense, error, not measured."""
    fastest = fastest_row(study)
    lines = [
        _fastest_line(study, fastest),
        _longest_line(study),
        _dense_line(study),
        _error_line(study),
        _gaps_line(study),
    ]
    return study.text(*lines, kind="answer", bullets=True)


def _fastest_line(study: Study, row) -> str:
    if row is None:
        return "**Fastest correct variant**: none, no row of the document's function passed its check."
    n = row.point.seq_len
    low, high = (x * 1e3 for x in row.ci)
    return (
        f"**Fastest correct variant**: {label(row)}, {SHORT[row.point.dtype]}: **{number(row.median * 1e3)} ms** "
        f"({_span(low, high, row.unstable)}) for {n:,} tokens forward on {study.device}, {number(row.tokens_per_s)} "
        "tokens/s."
    )


def _span(low: float, high: float, unstable: bool) -> str:
    return f"{number(low)} to {number(high)}{', unstable' if unstable else ''}"


def _longest_line(study: Study) -> str:
    found = longest(study)
    if found is None:
        return "**Longest sequence**: not known, no memory was measured."
    tokens, row, per_token, memory = found
    return (
        f"**Longest sequence** for {size(memory)} ({study.profile.title if study.rehearsal else study.device}): about "
        f"{about(tokens)} tokens forward in {SHORT[row.point.dtype]}, computed from {size(per_token)} a token "
        f"measured at {row.point.seq_len:,} and {RESERVE * 100:.0f} % of the memory."
    )


def longest(study: Study):
    """(tokens, row, bytes per token, memory) of the leanest quotable forward row, None where memory is not known."""
    rows = [
        r
        for r in study.good
        if r.point.passes == "fwd"
        and computes_pattern(r.point.system)
        and has_peak(r)
        and r.point.batch == r.point.world_size == 1
    ]
    memory = study.memory_bytes
    if not rows or not memory:
        return None
    preferred = hardware_dtype(study)
    rows = [r for r in rows if r.point.dtype == preferred] or rows
    rows = [r for r in rows if r.point.seq_len == max(r.point.seq_len for r in rows)]

    def per_token(r):
        return r.memory["tracked_peak_bytes"] / (r.point.batch * r.point.seq_len)

    row = min(rows, key=per_token)
    return RESERVE * memory / per_token(row), row, per_token(row), memory


def _dense_line(study: Study) -> str:
    found = over_dense(study)
    known = [x for x in found if x[1] is not None]
    if not known:
        return "**Over dense SDPA**: not measured."
    n, ratio, _, row = known[-1]
    start = begins([x for x in found if x[0] <= n])
    if start is None:
        since = "not faster at the longest"
    else:
        since = f"faster from {start:,} tokens on" + (", the shortest measured" if start == found[0][0] else "")
        since = "the longest measured and the first at which it is faster" if start == n else since
    sure = _span(ratio.low, ratio.high, ratio.unstable)
    return (
        f"**Over dense SDPA**: **{number(ratio.value)}×** ({sure}) at {n:,} "
        f"tokens in {SHORT[row.point.dtype]}, {since}. It is another function: the pattern computes fewer keys."
    )


def _error_line(study: Study) -> str:
    rows = study.good
    shares = [(e / r.tolerance[k], e, k, r) for r in rows for k, e in r.errors.items() if r.tolerance[k]]
    if not shares:
        return "**Error**: no row has passed its check."
    share, e, what, row = max(shares, key=lambda x: x[0])
    return (
        f"**Error** against the float64 oracle: at worst {e:.1e} ({what}, {label(row)}, {SHORT[row.point.dtype]}), "
        f"{share * 100:.0f} % of what is allowed, over {len(rows)} checked points."
    )


def _gaps_line(study: Study) -> str:
    gaps = _gaps(study)
    return "**Not measured**: " + "; ".join(gaps) + "." if gaps else "**Not measured**: nothing that was asked for."


def _gaps(study: Study) -> list[str]:
    failed = study.failed()
    gaps = (
        ["any GPU" if study.profile.kind == "cpu" else study.profile.title]
        if study.rehearsal or study.profile.kind == "cpu"
        else []
    )
    if all(r.point.world_size == 1 for r in study.results):
        gaps.append("more than one device")
    if missing := missing_points(study):
        gaps.append(f"{len(missing)} points of this profile")
    if others := taken_by_others(study):
        gaps.append(f"anything undisturbed: other processes used up to {others:g} cores")
    if failed:
        gaps.append(f"{len(failed)} of {len(study.results)} points are not quoted (listed below)")
    return gaps
