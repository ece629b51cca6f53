"""How many measured peaks of memory ``estimate`` predicts."""

from __future__ import annotations

from .predicted import NO_ATTENTION, Prediction, predict
from .study import Study
from .tables import Text

OPERATORS = 2000  # of all rows together that a page runs without data, so that it stays quick
BLOCKS = 4096  # a block-sparse row beyond would take seconds to plan
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
