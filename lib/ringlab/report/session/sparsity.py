"""How near block-sparse attention comes to its share of dense attention: by mask and pass, over length, by pattern."""

from __future__ import annotations

from ...adaptive import Adaptive
from ...measure import suites as suite
from .. import curves, figures
from ..cells import bound, error, ms, times
from ..lengths import begins
from ..rows import SHORT
from ..study import Study, pattern_of
from ..tables import Cell, Table, number
from ..trust import objection
from . import rows

BACKWARD = 3.5  # dense forward and backward over dense forward where it is not timed: 14 FLOPs a pair for 4
SYSTEMS = {rows.OURS: "This library", suite.ORIGINAL: "Original", suite.OPTIMIZED: "Optimized"}
TARGETS = {"fwd": {128: 1.2, 64: 1.35}, "causal": 1.5, "fwd+bwd": 1.4}  # of dense time times density, set beforehand


def target(point) -> float:
    """At most so much of (dense time times density) should a call take."""
    if point.passes != "fwd":
        return TARGETS["fwd+bwd"]
    return TARGETS["causal"] if point.causal else TARGETS["fwd"][point.pattern["block_size"]]


def over_share(study: Study, row):
    """A row's time over (non-causal dense time times its density), a Ratio or None."""
    dense, times_ = rows.one(study, suite.EFFICIENCY, "dense_sdpa", passes=row.point.passes), 1.0
    if dense is None:
        dense, times_ = rows.one(study, suite.EFFICIENCY, "dense_sdpa", passes="fwd"), BACKWARD
    return rows.scaled(study.ratio(row, dense), 1 / (times_ * rows.density(row.point)))


def _word(ratio, most: float) -> Cell | None:
    if ratio is None:
        return None
    if ratio.high <= most:
        return Cell(f"{most:g}×", "met", "good")
    return Cell(f"{most:g}×", "missed" if ratio.low > most else "not told", "bad" if ratio.low > most else "")


def efficiency(study: Study) -> Table:
    """Time over dense time times density, beside the target and torch's compiled kernel on the same mask."""
    lines, fresh = [], rows.one(study, suite.EFFICIENCY, options=suite.FRESH)
    for row in study.rows(group=suite.EFFICIENCY, system=rows.OURS):
        p, ratio = row.point, over_share(study, row)
        same = {"pattern": p.pattern, "causal": p.causal, "passes": p.passes}
        flex = rows.one(study, suite.EFFICIENCY, "flex", **same)
        mask = str(pattern_of(p)) + ("; results in fresh memory" if row is fresh else "")
        lines.append([
            mask, rows.percent(rows.density(p)), _pass(p), ms(row), times(ratio),
            _word(ratio, target(p)), ms(flex) if flex else None, times(study.ratio(row, flex)) if flex else None,
            error(row), bound(row), rows.peak(row),
        ])  # fmt: skip
    dense = study.rows(group=suite.EFFICIENCY, system="dense_sdpa")
    lines += [["dense SDPA", "100 %", _pass(r.point), ms(r), None, None, None, None, error(r), bound(r), rows.peak(r)]
              for r in dense]  # fmt: skip
    p = dense[0].point if dense else None
    shape = f", {p.seq_len:,} tokens, {SHORT[p.dtype]}" if p else ""
    timed = any(r.point.passes != "fwd" for r in dense)
    return study.table(
        f"What a tenth of the pairs costs{shape}",
        ["Mask", ">Density", "Pass", ">Time (ms)", ">Over dense × density", ">At most", ">FlexAttention (ms)",
         ">Time over it", ">Error", ">Lower bound (ms)", ">Peak (MB)"],
        lines or [["not measured", *[None] * 10]],
        note="Over dense × density: 1 where a pair costs what it costs in dense attention; dense is not causal in any "
        "row. " + ("" if timed else f"Dense attention with its backward is not timed but taken as {BACKWARD} × its "
        "forward, by its FLOPs. ") + "FlexAttention is torch's compiled kernel on the same mask of blocks. "
        + _fresh(study, fresh),
    )  # fmt: skip


def _fresh(study: Study, fresh) -> str:
    """What the page faults of a result cost, where that was measured."""
    plain = fresh and rows.one(study, suite.EFFICIENCY, pattern=fresh.point.pattern, causal=False, passes="fwd")
    cell = times(study.ratio(fresh, plain)) if plain else None
    if cell is None:
        return ""
    return (
        "Calls write large results to the memory of earlier ones that were let go. In fresh memory (`Execution("
        f"results=False)`) they cost page faults: without these the call is {cell.text} as fast ({cell.sub})."
    )


def _pass(point) -> str:
    return ("causal, " if point.causal else "") + ("forward" if point.passes == "fwd" else "forward and backward")


def over_dense(study: Study) -> list[tuple]:
    """(n, Ratio or None, dense row or None, our row) by n."""
    ours = sorted(study.rows(group=suite.WINDOW_LENGTHS, system=rows.OURS), key=lambda r: r.point.seq_len)
    found = []
    for row in ours:
        dense = rows.one(study, suite.WINDOW_LENGTHS, "dense_sdpa", seq_len=row.point.seq_len)
        found.append((row.point.seq_len, study.ratio(dense, row), dense, row))
    return found


def lengths(study: Study) -> Table:
    """A fixed window over growing n beside dense attention, and the document's two rows at a long n."""
    found = over_dense(study)
    also = [(r.point.seq_len, None, None, r) for system in (suite.ORIGINAL, suite.OPTIMIZED)
            for r in study.rows(group=suite.WINDOW_LENGTHS, system=system)]  # fmt: skip
    lines = [
        [n, SYSTEMS[r.point.system], rows.percent(rows.density(r.point)), ms(r), ms(d) if d else None, times(x),
         error(r), bound(r), rows.peak(r), rows.calls(r)]
        for n, x, d, r in (*found, *also)
    ]  # fmt: skip
    first = begins([x for x in found if x[2] is not None])
    said = f"The window pays from {first:,} tokens on." if first else "No length is shown from which on it pays."
    named = f"{pattern_of(found[0][3].point)}, {SHORT[found[0][3].point.dtype]}" if found else "a fixed window"
    return study.table(
        f"Time over length, {named}, forward",
        [">Tokens", "System", ">Density", ">Time (ms)", ">Dense SDPA (ms)", ">Faster than dense", ">Error",
         ">Lower bound (ms)", ">Peak (MB)", ">Operator calls"],
        lines or [["not measured", *[None] * 9]],
        note=f"{said} Dense attention computes another function.",
    )  # fmt: skip


def length_figure(study: Study) -> None:
    """Both over length."""
    found, series = over_dense(study), {}
    for _, _, d, r in found:
        for name, row in (("Dense SDPA", d), ("Window", r)):
            if row is not None and not objection(row) and row.median:
                point = (row.point.seq_len, row.median * 1e3, row.ci[0] * 1e3, row.ci[1] * 1e3)
                series.setdefault(name, []).append(point)
        if not objection(r) and r.bound_seconds:
            series.setdefault("Lower bound", []).append((r.point.seq_len, r.bound_seconds * 1e3, None, None))
    if not series:
        return
    looks = {"Dense SDPA": figures.GREY, "Window": figures.BLUE, "Lower bound": figures.SKY}
    fig = curves.lines(series, xlabel="Tokens", ylabel="Time (ms)", colors=[looks[name] for name in series],
                       dashed=["Lower bound"])  # fmt: skip
    data = study.table(
        "Data: time over length", [">Tokens", ">Window (ms)", ">Dense SDPA (ms)", ">Lower bound (ms)", ">Error"],
        [[n, ms(r), ms(d) if d else None, bound(r), error(r)] for n, _, d, r in found],
    )  # fmt: skip
    said = "; ".join(f"{n:,} tokens {number(x.value)} times" for n, x, *_ in found if x) or "not quoted"
    caption = "Time over sequence length for a fixed window, both axes logarithmic, with 95 % intervals."
    alt = f"{caption} Beside dense attention the window is faster by: {said}."
    figures.show(fig, "session-length", caption, alt, data, stamp=study.stamp)


def patterns(study: Study) -> Table:
    """One row for each kind of pattern: the density that it comes to, time and error."""
    lines = []
    found = {
        name: (str(p), rows.one(study, suite.BLOCK_PATTERNS, pattern=p.to_dict())) for name, p in suite.KINDS.items()
    }
    chosen = rows.one(study, suite.BLOCK_PATTERNS, "adaptive", suite.ADAPTIVE)
    found["by content"] = str(Adaptive(**suite.ADAPTIVE)), chosen
    for name, (said, row) in found.items():
        if row is not None:
            lines.append([name, said, rows.percent(rows.density(row.point)), ms(row), bound(row), error(row),
                          rows.peak(row), rows.calls(row)])  # fmt: skip
    return study.table(
        "Every kind of pattern, by the density that it comes to",
        ["Pattern", "Blocks", ">Density", ">Time (ms)", ">Lower bound (ms)", ">Error", ">Peak (MB)", ">Operator calls"],
        lines or [["not measured", *[None] * 7]],
        note="Density is what the pattern comes to at this length, never what was asked for: the original's "
        "`sparsity_ratio` was ignored by its generators. By content: every head chooses its blocks anew in each call, "
        "which its time includes; the oracle is that of the blocks it chose, and no better ones were left out.",
    )
