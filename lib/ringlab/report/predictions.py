"""Predicted and measured, as every document shows it: peak memory and its distance, bound and measured time."""

from __future__ import annotations

import matplotlib.pyplot as plt

from . import figures
from .cells import error
from .figures import BLUE, WIDTH, drawing
from .predicted import NO_ATTENTION, Prediction, predict
from .study import Study
from .tables import Cell, Table, Text, number, size
from .theme import INK

OPERATORS = 2000  # of all rows together that a page runs without data, so that it stays quick
BLOCKS = 4096  # a block-sparse row beyond would take seconds to plan
SHOWN = 14
DENSE = "Dense SDPA"


def found(study: Study) -> tuple[list[Prediction], int]:
    """(the predictions of the rows that may be quoted, how many rows are left out): rows of few operators first."""
    rows = [r for r in study.good if r.memory.get("tracked_peak_bytes") and not r.option("twin")
            and r.point.system not in (*NO_ATTENTION, "sgemm")]  # fmt: skip
    rows.sort(key=lambda r: r.memory.get("operator_calls") or 0)
    kept, left = [], OPERATORS
    for row in rows:
        left -= row.memory.get("operator_calls") or 0
        if left >= 0 and row.point.seq_len // row.point.pattern.get("block_size", row.point.seq_len) <= BLOCKS:
            kept.append(row)
    return predict(kept, study.profile if study.device_type == "cuda" else None), len(rows) - len(kept)


def predictions(study: Study) -> Table:
    """Peak predicted and measured, and the lower bound beside the time."""
    known, left = found(study)
    longest: dict[tuple, Prediction] = {}
    for x in sorted(known, key=lambda x: x.row.point.seq_len):
        p = x.row.point
        longest[p.system, p.options, p.dtype, p.passes, p.causal, p.world_size, p.pattern["kind"]] = x
    shown = sorted(longest.values(), key=lambda x: (name(x) != DENSE, name(x), x.row.point.world_size, -(x.time or 0)))
    lines = [_line(x) for x in shown[:SHOWN]]
    return study.table(
        "Predicted and measured", ["System", ">Tokens", ">Ranks", ">Peak memory, predicted", ">Measured", ">Distance",
                                   ">Lower bound (ms)", ">Time (ms)", ">Time over bound", ">Error"],
        lines or [["not measured", *[None] * 9]],
        note=f"{said(known)} Peaks are of the rank that holds most, predicted by running the same code without data; "
        f"bounds are from the same rates as the rows' own."
        + (f" {left} rows of many calls are not predicted here." if left else ""),
    )  # fmt: skip


def said(known: list[Prediction]) -> str:
    """All predictions in one sentence or two."""
    peaks = [x.peak for x in known if x.peak]
    ratios = [x.time for x in known if x.time]
    lines = []
    if peaks:
        lines.append(f"{len(peaks)} peaks: predicted over measured {min(peaks):.4f} to {max(peaks):.4f}.")
    if ratios:
        lines.append(f"{len(ratios)} times: {number(min(ratios))} to {number(max(ratios))} times their bounds.")
    return " ".join(lines) or "Nothing was measured to set a prediction beside."


def accuracy(study: Study) -> Text:
    """In a sentence how many peaks ``estimate`` predicts to 1 %, and which it does not."""
    known, left = found(study)
    known = [x for x in known if x.peak]
    if not known:
        return study.text("Nothing was measured to set a prediction of memory beside.")
    off = [x for x in known if abs(x.peak - 1) > 0.01]
    exceptions = "; ".join(
        f"{name(x)}, {x.row.point.seq_len:,} tokens on {x.row.point.world_size} ranks ({100 * (x.peak - 1):+.1f} %)"
        for x in off
    )
    return study.text(
        f"`ringlab.estimate` predicts {len(known) - len(off)} of {len(known)} peaks of memory to 1 %, without running "
        f"the calls{f'; not of {exceptions}' if off else ''}."
        + (f" {left} rows of many operators were not tried." if left else "")
    )


def name(x: Prediction) -> str:
    """What a reader calls the system."""
    return {"dense_sdpa": DENSE, "ringlab": "This library"}.get(x.row.point.system, x.row.point.system)


def _line(x: Prediction) -> list:
    p, measured = x.row.point, x.row.memory["tracked_peak_bytes"]
    options = ", ".join(f"{k}={v}" for k, v in p.options)
    about = "; ".join(part for part in (p.dtype, p.passes, "causal" if p.causal else "", options) if part)
    distance = f"{100 * (x.peak - 1):+.2f} %" if x.peak else Cell("at least", x.estimate.at_least)
    bound = x.estimate.bound_s
    return [
        Cell(name(x), about), p.seq_len, p.world_size, size(x.estimate.peak_bytes), size(measured), distance,
        number(bound * 1e3) if bound else None, number(x.row.median * 1e3) if x.row.median else None,
        f"{number(x.time)}×" if x.time else None, error(x.row),
    ]  # fmt: skip


def predictions_figure(study: Study) -> None:
    """The distance of each prediction over the measured peak, and each time over its bound."""
    known, _ = found(study)
    peaks = [(x.row.memory["tracked_peak_bytes"] / 2**20, 100 * (x.peak - 1)) for x in known if x.peak]
    times = [(x.estimate.bound_s * 1e3, x.time) for x in known if x.time]
    if not peaks:
        return
    with drawing(**{"axes.grid": True}):
        fig, axes = plt.subplots(1 + bool(times), 1, figsize=(WIDTH, 2.4 * (1 + bool(times))), squeeze=False)
        top = axes[0][0]
        top.plot(*zip(*peaks), "o", color=BLUE, ms=5, alpha=0.6)
        top.axhspan(0, 5, color=BLUE, alpha=0.1, lw=0)
        top.set_xscale("log")
        top.set_ylim(min(-1, *(y for _, y in peaks)) - 0.5, max(5, *(y for _, y in peaks)) + 0.5)
        top.set_title("Predicted peak over measured (%)", loc="left", fontsize=10)
        top.set_xlabel("Measured peak (MiB)")
        if times:
            below = axes[1][0]
            below.plot(*zip(*times), "o", color=BLUE, ms=5, alpha=0.6)
            below.axhline(1, color=INK, lw=1.2)
            below.set_xscale("log")
            below.set_yscale("log")
            below.set_title("Measured time over its bound (×)", loc="left", fontsize=10)
            below.set_xlabel("Lower bound (ms)")
    caption = "Predictions beside measurements: each dot is a row; the band is 0 to 5 %, the line the bound itself."
    data = study.table("Data: predicted and measured", ["System", ">Tokens", ">Distance", ">Time over bound"],
                       [[name(x), x.row.point.seq_len, f"{100 * (x.peak - 1):+.3f} %" if x.peak else None,
                         f"{number(x.time)}×" if x.time else None] for x in known])  # fmt: skip
    file = f"predicted-{study.suite}" if study.suite else "predicted"
    figures.show(fig, file, caption, f"{caption} {said(known)}", data, stamp=study.stamp)
