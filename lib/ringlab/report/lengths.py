"""Time over sequence length: where a sparse pattern begins to pay over dense attention."""

from __future__ import annotations

from . import figures
from .rows import SHORT, SPARSE_NOTE, best, hardware_dtype, is_optimised, pattern, same
from .study import Study, bound, error, ms, objection, times
from .tables import Table, number


def over_dense(study: Study) -> list[tuple]:
    """(n, Ratio or None, dense row, our row) of dense SDPA over all optimizations, by n, in one dtype.

    The dtype is the profile's own where it was timed at more than one length, else fp32.
    """
    wanted = {"pattern": pattern().to_dict(), "passes": "fwd", "causal": False}
    ours = [r for r in study.rows(**wanted) if is_optimised(r)]
    found: dict[str, list] = {}
    for dtype in dict.fromkeys((hardware_dtype(study), "float32")):
        for n in sorted({r.point.seq_len for r in ours if r.point.dtype == dtype}):
            here = [r for r in ours if r.point.dtype == dtype and r.point.seq_len == n]
            dense = study.rows(system="dense_sdpa", seq_len=n, **same(here[0]))
            if not dense:
                continue
            pairs = [(study.ratio(d, r), d, r) for d in dense for r in here]
            known = [p for p in pairs if p[0] is not None]
            chosen = max(known, key=lambda p: p[0].paired) if known else (None, best(dense), best(here))
            found.setdefault(dtype, []).append((n, *chosen))
    return max(found.values(), key=len, default=[])


def begins(found: list[tuple]) -> int | None:
    """The shortest n from which the pattern is faster than dense at every longer n measured, beyond its interval."""
    start = None
    for n, ratio, *_ in reversed(found):
        if ratio is None or ratio.low <= 1:
            break
        start = n
    return start


def lengths(study: Study) -> Table:
    """Dense attention and the pattern over growing n."""
    found = over_dense(study)
    dtype = SHORT[found[0][3].point.dtype] if found else ""
    return study.table(
        f"Time over length, {pattern()}, forward, {dtype}",
        [">Tokens", ">Dense SDPA (ms)", ">Dilated (ms)", ">Faster than dense", ">Error", ">Bound, dense (ms)",
         ">Bound, dilated (ms)"],
        [[n, ms(d), ms(r), times(ratio), error(r), bound(d), bound(r)] for n, ratio, d, r in found],
        note=SPARSE_NOTE,
    )  # fmt: skip


def length_figure(study: Study) -> None:
    found = over_dense(study)
    series: dict[str, list] = {"Dense SDPA": [], "Dilated": [], "its bound": []}
    for n, _, d, r in found:
        for name, row in (("Dense SDPA", d), ("Dilated", r)):
            if not objection(row) and row.median:
                series[name].append((n, row.median * 1e3, row.ci[0] * 1e3, row.ci[1] * 1e3))
        if not objection(r) and r.bound_seconds:
            series["its bound"].append((n, r.bound_seconds * 1e3, None, None))
    series = {name: points for name, points in series.items() if points}
    if not series:
        return
    fig = figures.lines(
        series,
        xlabel="Tokens",
        ylabel="Time (ms)",
        colors=(figures.GREY, figures.BLUE, figures.SKY),
        dashed=["its bound"],
    )
    said = "; ".join(f"{n:,} tokens {number(x.value)} times" for n, x, *_ in found if x)
    data = study.table(
        "Data: time over length",
        [">Tokens", ">Dense SDPA (ms)", ">Dilated (ms)", ">Lower bound of dilated (ms)"],
        [[n, ms(d), ms(r), bound(r)] for n, _, d, r in found],
    )
    alt = f"Time over sequence length for dense and dilated attention; dilated is faster by: {said}."
    caption = "Time over sequence length, both axes logarithmic, with 95 % intervals."
    figures.show(fig, "optimization-length", caption, alt, data, stamp=study.stamp)
