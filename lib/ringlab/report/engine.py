"""The engine beyond a document: speed against the machine and against other forms, memory against its floor."""

from __future__ import annotations

from . import figures
from .rows import DEFAULTS, SHORT, SPARSE_NOTE, best, is_optimised, is_plain, label, same, switches
from .study import Study, bound, error, ms, objection, within
from .tables import Cell, Table, size

LONG, SHORTER, LADDER = (2048, 4096), (512, 1024), (1024, 2048, 4096, 8192, 16384)
# What the engine is held to on a CPU in fp32, by (segments, causal, passes) at 16,384 tokens.
TARGETS = {
    "share": {
        (LONG, False, "fwd"): 0.80, (SHORTER, False, "fwd"): 0.66,
        (LONG, False, "fwd+bwd"): 0.78, (SHORTER, False, "fwd+bwd"): 0.65,
    },
    "copying": {(LONG, False, "fwd"): 0.95, (LADDER, False, "fwd"): 0.80},
    "kernel": {(LONG, True, "fwd"): 0.97},
}  # fmt: skip


def speed(study: Study) -> Table:
    """The engine against this run's matrix product, against the copying form, and against torch's kernel."""
    rows = []
    for row in speed_rows(study):
        p = row.point
        dense = best(study.rows(system="dense_sdpa", seq_len=p.seq_len, **same(row)))
        share = None if objection(row) else row.share
        rows.append([
            _lists(p), p.seq_len, _pass(p), SHORT[p.dtype], ms(row), error(row),
            bound(row), _against((share, None, None) if share else None, _target(row, "share"), percent=True),
            _against(_over_copying(study, row), _target(row, "copying"), less=True),
            _against(_of_kernel(study, row), _target(row, "kernel")), ms(dense),
        ])  # fmt: skip
    rows = rows or [["not measured", *[None] * 10]]
    return study.table(
        "The engine, mixed by log-sum-exp, 8 heads of 64",
        ["Segments / rates", ">Tokens", "Pass", "dtype", ">Time (ms)", ">Error", ">Lower bound (ms)",
         ">Of matmul rate", ">Time over copying form", ">Rate over torch's kernel", ">Dense SDPA (ms)"],
        rows,
        note="Of matmul rate: useful FLOPs a second over those of an fp32 product in the same process. Copying form: "
        "each branch made contiguous, the same kernel, scattered, then mixed; the same function. torch's kernel runs "
        f"on segments that lie contiguous already: a ceiling for one kernel call, another function. {SPARSE_NOTE}",
    )  # fmt: skip


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
    """A figure with its interval, and whether it meets its target."""
    if found is None:
        return None
    value, low, high = found
    said = [f"{low:.2f} to {high:.2f}"] if low is not None else []
    if target:
        met = value <= target if less else value >= target
        aim = f"{target * 100:.0f} %" if percent else f"{target:.2f}"
        said.append(f"{'at most' if less else 'target'} {aim}, {'met' if met else 'missed'}")
    return Cell(f"{value * 100:.0f} %" if percent else f"{value:.2f}", "; ".join(said))


def _target(row, what: str) -> float | None:
    p = row.point
    if p.seq_len != 16384 or p.dtype != "float32" or row.provenance.get("device") == "cuda":
        return None
    return TARGETS[what].get((_segments(p), p.causal, p.passes))


def speed_rows(study: Study) -> list:
    """Our rows that were timed in one process with a matrix product, a copying form or torch's kernel."""
    companions = ("sgemm", "copying", "contiguous_segments")
    runs = {(r.run, r.composition) for r in study.results if r.point.system in companions}
    ours = [r for r in study.rows(system="ringlab") if (r.run, r.composition) in runs]
    return sorted(ours, key=lambda r: (r.point.passes, r.point.causal, -max(_segments(r.point)), r.point.seq_len))


def _pass(point) -> str:
    return point.passes + (", causal" if point.causal else "")


def _segments(point) -> tuple:
    return tuple(point.pattern.get("segment_lengths", (point.seq_len,)))


def _lists(point) -> Cell:
    """Segment lengths over rates."""
    if point.pattern["kind"] == "dense":
        return Cell("dense")
    lengths, rates = (", ".join(map(str, point.pattern[k])) for k in ("segment_lengths", "dilation_rates"))
    return Cell(f"{lengths} / {rates}", kind="keep" if len(lengths) < 16 else "")


def _mate(study: Study, row, system: str):
    """The row of ``system`` that took turns with ``row`` on the same shape and pass."""
    p = row.point
    same = {"seq_len": p.seq_len, "causal": p.causal, "passes": p.passes, "dtype": p.dtype, "pattern": p.pattern}
    found = [r for r in study.rows(system=system, **same) if (r.run, r.composition) == (row.run, row.composition)]
    return best(found)


def memory_rows(study: Study) -> list:
    """Rows with a measured peak, one per system, pattern, dtype and pass: the longest sequence of each."""
    found: dict[tuple, object] = {}
    for r in sorted(study.good, key=lambda r: r.point.seq_len):
        if r.memory.get("tracked_peak_bytes") and r.memory.get("floor_bytes") and _worth_showing(r):
            p = r.point
            found[label(r), _lists(p).text, p.dtype, p.passes, p.causal] = r
    return sorted(
        found.values(), key=lambda r: (r.point.passes, -r.point.seq_len, _lists(r.point).text, r.point.dtype, within(r))
    )


def _worth_showing(r) -> bool:
    """Not the single switches, which differ from their ends in no buffer of note."""
    return r.point.system != "sgemm" and (
        r.point.system != "ringlab" or is_plain(r) or is_optimised(r) or switches(r.point) == DEFAULTS
    )


def memory(study: Study) -> Table:
    """Peak memory as a multiple of the tensors that the caller holds."""
    rows = [
        [label(r), _lists(r.point), r.point.seq_len, SHORT[r.point.dtype],
         _pass(r.point), size(r.memory["floor_bytes"]),
         Cell(size(r.memory["tracked_peak_bytes"]), f"{within(r):.2f} × floor"), _high_water(r), ms(r), error(r)]
        for r in memory_rows(study)
    ]  # fmt: skip
    return study.table(
        "Peak memory beside its floor",
        [
            "System",
            "Segments / rates",
            ">Tokens",
            "dtype",
            "Pass",
            ">Floor",
            ">Tracked peak",
            ">Process or allocator",
            ">Time (ms)",
            ">Error",
        ],
        rows,
        note="Floor: q, k, v and out once; with the backward also dO, dq, dk and dv. Tracked: bytes of live torch "
        "storages. Process or allocator: growth of the process's resident memory, or the CUDA allocator's peak, "
        f"inputs included. {SPARSE_NOTE}",
    )


def _high_water(r) -> Cell | None:
    high = r.memory.get("high_water_bytes") or r.memory.get("allocator_peak_bytes")
    return Cell(size(high), f"{high / r.memory['floor_bytes']:.2f} × floor") if high else None


def memory_figure(study: Study) -> None:
    """Peak over floor, one bar per system and pass at the document's or the longest common n."""
    rows = memory_rows(study)[:12]
    items = [
        figures.Bar(
            f"{label(r)}, {SHORT[r.point.dtype]}\n{figures.tokens(r.point.seq_len)}, {r.point.passes}"
            + (", causal" if r.point.causal else ""), within(r),
            color=figures.GREY if r.point.system in ("dense_sdpa", "contiguous_segments") else figures.BLUE, bound=1.0,
        )
        for r in rows
    ]  # fmt: skip
    fig = figures.bars(
        items,
        xlabel="Tracked peak, as a multiple of the tensors themselves",
        bound_label="the tensors themselves",
        fmt="{:.2f}".format,
    )
    said = "; ".join(f"{b.label.replace(chr(10), ', ')} {b.value:.2f}" for b in items)
    data = study.table(
        "Data: peak memory over floor",
        ["System", ">Tokens", "dtype", "Pass", ">Floor", ">Tracked peak", ">Multiple"],
        [[label(r), r.point.seq_len, SHORT[r.point.dtype], r.point.passes, size(r.memory["floor_bytes"]),
          size(r.memory["tracked_peak_bytes"]), f"{within(r):.2f}"] for r in rows],
    )  # fmt: skip
    figures.show(
        fig,
        "optimization-memory",
        "Peak memory of live tensors, as a multiple of inputs and outputs themselves.",
        f"Peak memory as a multiple of inputs and outputs: {said}.",
        data,
        stamp=study.stamp,
    )
