"""The engine's own function, mixed by log-sum-exp: its speed against the machine and against other forms."""

from __future__ import annotations

from .cells import PEAK, bound, error, ms, peak
from .rows import SHORT, dense_beside
from .study import Study, best, together
from .tables import Cell, Table
from .trust import objection

LONG, SHORTER, LADDER = (2048, 4096), (512, 1024), (1024, 2048, 4096, 8192, 16384)
# What the engine is held to on a CPU in fp32, by (segments, causal, passes). Set at 16,384 tokens; shorter sequences of
# the same segments do the same work a token.
TARGETS = {
    "share": {
        (LONG, False, "fwd"): 0.80, (SHORTER, False, "fwd"): 0.66,
        (LONG, False, "fwd+bwd"): 0.78, (SHORTER, False, "fwd+bwd"): 0.65,
    },
    "copying": {(LONG, False, "fwd"): 0.95, (LADDER, False, "fwd"): 0.80},
    "kernel": {(LONG, True, "fwd"): 0.97},
}  # fmt: skip


def speed(study: Study) -> Table:
    """The engine's times beside dense attention's."""
    rows = []
    for row in speed_rows(study):
        dense = dense_beside(study, row)
        rows.append([*_call(row), SHORT[row.point.dtype], ms(row), error(row), bound(row), peak(row), ms(dense),
                     peak(dense)])  # fmt: skip
    return study.table(
        "The engine, mixed by log-sum-exp, 8 heads of 64",
        ["Segments / rates", ">Tokens", "Pass", "dtype", ">Time (ms)", ">Error", ">Lower bound (ms)", PEAK,
         ">Dense SDPA (ms)", ">Peak memory, dense"],
        rows or [["not measured", *[None] * 9]],
    )  # fmt: skip


def against(study: Study) -> Table:
    """The same rows against this run's matrix product, the copying form, and torch's kernel, with what is aimed at."""
    rows = []
    for row in speed_rows(study):
        rows.append([
            *_call(row), _against(_of_rate(study, row), _target(row, "share"), percent=True),
            _against(_over_copying(study, row), _target(row, "copying"), less=True),
            _against(_of_kernel(study, row), _target(row, "kernel")),
        ])  # fmt: skip
    return study.table(
        "The engine against what this machine can do",
        ["Segments / rates", ">Tokens", "Pass", ">Of matmul rate", ">Time over copying form",
         ">Rate over torch's kernel"],
        rows or [["not measured", *[None] * 5]],
        note="Of matmul rate: useful FLOPs a second over those of an fp32 product that took turns with it; more than "
        "100 % says that something disturbed the product. Copying form: each branch made contiguous, the same kernel, "
        "scattered, then mixed; the same function. torch's kernel runs on segments that lie contiguous already: a "
        "ceiling for one kernel call, another function. Targets were set for 16,384 tokens in fp32 on a CPU.",
    )  # fmt: skip


def _call(row) -> list:
    return [lists(row.point), row.point.seq_len, pass_of(row.point)]


def _of_rate(study: Study, row) -> tuple | None:
    """Useful FLOPs a second over those of the run's matrix product, with its interval where both took turns."""
    if objection(row) or not row.share:
        return None
    product = best([r for r in study.rows(system="sgemm") if together(r, row)])
    ratio = study.ratio(product, row)
    if ratio is None or not product.cost.get("flops"):
        return row.share, None, None
    scale = row.cost["flops"] / product.cost["flops"]
    return ratio.value * scale, ratio.low * scale, ratio.high * scale


def _over_copying(study: Study, row) -> tuple | None:
    """Our time as a fraction of the copying form's, with its interval."""
    ratio = study.ratio(row, _mate(study, row, "copying"))
    return ratio and (ratio.value, ratio.low, ratio.high)


def _of_kernel(study: Study, row) -> tuple | None:
    """Our useful FLOPs a second over those of torch's kernel on contiguous segments, with its interval."""
    mate = _mate(study, row, "contiguous_segments")
    ratio = study.ratio(mate, row)
    if ratio is None or not mate.cost.get("flops"):
        return None
    scale = row.cost["flops"] / mate.cost["flops"]
    return ratio.value * scale, ratio.low * scale, ratio.high * scale


def _against(found: tuple | None, target: float | None, *, less: bool = False, percent: bool = False) -> Cell | None:
    """A figure with its interval, and whether it meets its target, with all of the interval or by the median alone."""
    if found is None:
        return None
    value, low, high = found
    show = (lambda x: f"{x * 100:.0f} %") if percent else "{:.2f}".format
    said = [f"{show(low)} to {show(high)}"] if low is not None else []
    if target:
        met = value <= target if less else value >= target
        alone = " by the median alone" if low is not None and low <= target <= high else ""
        said.append(f"{'at most' if less else 'target'} {show(target)}, {'met' if met else 'missed'}{alone}")
    return Cell(show(value), "; ".join(said))


def _target(row, what: str) -> float | None:
    p = row.point
    if p.dtype != "float32" or row.provenance.get("device") == "cuda":
        return None
    return TARGETS[what].get((_segments(p), p.causal, p.passes))


def ceilings(study: Study) -> Table:
    """torch's own kernel on contiguous segments, forward and backward: what the engine's rates are held against."""
    rows = []
    for r in _sorted(study.rows(system="contiguous_segments", world_size=1)):
        share = f"{r.share * 100:.0f} %" if r.share and not objection(r) else None
        dense = dense_beside(study, r)
        rows.append([segment_rows(r.point), r.point.seq_len, pass_of(r.point), SHORT[r.point.dtype], ms(r), error(r),
                     bound(r), share, peak(r), ms(dense), peak(dense)])  # fmt: skip
    return study.table(
        "The ceiling: torch's kernel on segments that lie contiguous",
        [">Segment", ">Tokens", "Pass", "dtype", ">Time (ms)", ">Error", ">Lower bound (ms)", ">Of matmul rate", PEAK,
         ">Dense SDPA (ms)", ">Peak memory, dense"],
        rows or [["not measured", *[None] * 10]],
        note="Another function than the engine's: one branch, undilated.",
    )  # fmt: skip


def segment_rows(point) -> int:
    """Rows of the first branch's segments, as long as the segments of the ceiling are."""
    return point.pattern["segment_lengths"][0] // point.pattern["dilation_rates"][0]


def speed_rows(study: Study) -> list:
    """Our rows that took turns with a matrix product, a copying form or torch's kernel."""
    companions = [r for r in study.results if r.point.system in ("sgemm", "copying", "contiguous_segments")]
    ours = study.rows(system="ringlab", world_size=1)
    return _sorted([r for r in ours if any(together(r, c) for c in companions)])


def _sorted(results) -> list:
    return sorted(results, key=lambda r: (r.point.passes, r.point.causal, -max(_segments(r.point)), r.point.seq_len))


def pass_of(point) -> str:
    return point.passes + (", causal" if point.causal else "")


def _segments(point) -> tuple:
    return tuple(point.pattern.get("segment_lengths", (point.seq_len,)))


def lists(point) -> Cell:
    """Segment lengths over rates."""
    if point.pattern["kind"] == "dense":
        return Cell("dense")
    lengths, rates = (", ".join(map(str, point.pattern[k])) for k in ("segment_lengths", "dilation_rates"))
    return Cell(f"{lengths} / {rates}", kind="keep" if len(lengths) < 16 else "")


def _mate(study: Study, row, system: str):
    """The row of ``system`` that took turns with ``row`` on the same shape and pass."""
    p = row.point
    same = {"seq_len": p.seq_len, "causal": p.causal, "passes": p.passes, "dtype": p.dtype, "pattern": p.pattern}
    return best([r for r in study.rows(system=system, **same) if together(r, row)])
