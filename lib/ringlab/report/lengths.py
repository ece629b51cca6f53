"""Time over sequence length: where a sparse pattern begins to pay over dense attention."""

from __future__ import annotations

from . import curves, figures
from .cells import bound, error, ms, peak, times
from .rows import SHORT, dense_beside, hardware_dtype, is_optimised, label, pattern
from .study import Study
from .tables import Table, number
from .trust import objection


def over_dense(study: Study) -> list[tuple]:
    """(n, Ratio or None, dense row, our row) of dense SDPA over all optimizations, by n, in one dtype.

    The dtype is the profile's own where it was timed at more than one length, else fp32.
    """
    wanted = {"pattern": pattern().to_dict(), "passes": "fwd", "causal": False, "batch": 1, "world_size": 1}
    ours = [r for r in study.rows(**wanted) if is_optimised(r)]
    found: dict[str, list] = {}
    for dtype in dict.fromkeys((hardware_dtype(study), "float32")):
        for n in sorted({r.point.seq_len for r in ours if r.point.dtype == dtype}):
            pairs = [(r, dense_beside(study, r)) for r in ours if (r.point.dtype, r.point.seq_len) == (dtype, n)]
            pairs = [(study.ratio(d, r), d, r) for r, d in pairs if d is not None]
            if pairs:
                known = [p for p in pairs if p[0] is not None]
                chosen = max(known, key=lambda p: p[0].paired) if known else pairs[0]
                found.setdefault(dtype, []).append((n, *chosen))
    return max(found.values(), key=len, default=[])


def begins(found: list[tuple]) -> int | None:
    """The shortest n from which the pattern is faster than dense at every longer n measured, beyond its interval."""
    start = None
    for n, ratio, *_ in reversed(found):
        if ratio is None or not ratio.significantly_slower:
            break
        start = n
    return start


def _names(found: list[tuple]) -> tuple[str, str]:
    """What the two rows are called, in the table and in the figure."""
    return (label(found[0][2]), label(found[0][3])) if found else ("Dense SDPA", "With all optimizations")


def lengths(study: Study) -> Table:
    """Dense attention and the pattern over growing n."""
    found = over_dense(study)
    dense, ours = _names(found)
    dtype = f", {SHORT[found[0][3].point.dtype]}" if found else ""
    return study.table(
        f"Time over length, {pattern()}, forward{dtype}",
        [">Tokens", f">{dense} (ms)", f">{ours} (ms)", ">Faster than dense", ">Error", ">Lower bound, dense (ms)",
         ">Lower bound (ms)", ">Peak memory, dense (× tensors)", ">Peak memory (× tensors)"],
        [[n, ms(d), ms(r), times(ratio), error(r), bound(d), bound(r), peak(d), peak(r)] for n, ratio, d, r in found],
    )  # fmt: skip


def length_figure(study: Study) -> None:
    found = over_dense(study)
    dense, ours = _names(found)
    series: dict[str, list] = {dense: [], ours: [], "Lower bound": []}
    for n, _, d, r in found:
        for name, row in ((dense, d), (ours, r)):
            if not objection(row) and row.median:
                series[name].append((n, row.median * 1e3, row.ci[0] * 1e3, row.ci[1] * 1e3))
        if not objection(r) and r.bound_seconds:
            series["Lower bound"].append((n, r.bound_seconds * 1e3, None, None))
    colors = dict(zip(series, (figures.GREY, figures.BLUE, figures.SKY)))
    series = {name: points for name, points in series.items() if points}
    if not series:
        return
    fig = curves.lines(series, xlabel="Tokens", ylabel="Time (ms)", colors=[colors[name] for name in series],
                        dashed=["Lower bound"])  # fmt: skip
    said = "; ".join(f"{n:,} tokens {number(x.value)} times" for n, x, *_ in found if x) or "not quoted"
    data = study.table(
        "Data: time over length",
        [">Tokens", f">{dense} (ms)", f">{ours} (ms)", ">Lower bound (ms)", ">Peak memory, dense (× tensors)",
         ">Peak memory (× tensors)"],
        [[n, ms(d), ms(r), bound(r), peak(d), peak(r)] for n, _, d, r in found],
    )  # fmt: skip
    alt = f"Time over sequence length for {dense} and {ours}; the second is faster by: {said}."
    caption = "Time over sequence length, both axes logarithmic, with 95 % intervals."
    figures.show(fig, "optimization-length", caption, alt, data, stamp=study.stamp)
