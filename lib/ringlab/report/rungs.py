"""The appendix on kernels: what each way of running a pattern on this GPU was expected to reach, reached, and why."""

from __future__ import annotations

from ..measure import suites as suite
from . import rung_rows as rows
from . import study as studies
from .cells import PEAK, error, ms, peak, times
from .findings import missing_points
from .rung_targets import dense_beside, flex, targets, trained
from .rungs_tuned import tuned
from .study import Study, pattern_of
from .tables import Cell, Table, Text, number
from .trust import objection, reason, status

__all__ = ["blocks", "lengths", "memory", "open_study", "sources", "targets", "tuned", "unquoted", "versions"]


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of the suite of kernels, which may be none."""
    return studies.open_study(profile, data, "kernels")


def versions(study: Study) -> Table | Text:
    """Version, prediction, measurement and cause, by head_dim and pass; where there are no rows, why."""
    if not rows.measured(study):
        return study.text(_absent(study))
    lines = []
    for d in suite.RUNG_HEAD_DIMS:
        for name in suite.RUNG_PASSES:
            peer = rows.best_peer(study, name, d)
            for way in rows.ORDER:
                row = rows.one(study, way, name, d)
                if row is not None:
                    lines.append(_version(study, way, name, row, peer))
    return study.table(
        f"Ways to run {suite.RUNG_PATTERN}, {suite.RUNG_TOKENS:,} tokens, {suite.RUNG_HEADS} heads",
        ["Version", "Pass", ">Predicted (TFLOP/s)", ">Measured (TFLOP/s)", ">Of the best peer", ">Time (ms)", ">Error",
         "Cause"],
        lines,
        note="Rates count useful work, branch by branch. Cause: the products that are computed, over the useful ones "
        "(lists: fewer where branches fold, more where a tile is hidden in part), and what kernels must read and "
        "write. Best peer: the faster of cuDNN and torch's flash on segments that lie contiguous.",
    )  # fmt: skip


def _version(study: Study, way: str, name: str, row, peer) -> list:
    p, about = row.point, rows.data()["ways"][way]
    own, foreseen = rows.rate(row), rows.expected(study, way, name, p.head_dim)
    path = rows.path_of(study, way, name, p.head_dim)
    # How much of a causal diagonal torch's kernels compute in vain is not known here.
    known = path not in ("dense", "default") and not p.causal
    products = rows.computed(p, study.profile.capability) if path == "lists" else 1.0 if known else None
    moved = rows.least_bytes(path, p)
    part = rows.over(study, peer, row, per_work=True) if way != "dense" else None
    cause = [f"{products:.3f} of the useful products"] if products else []
    cause += [f"{number(moved / rows.GB)} GB at least"] if moved else []
    cause += [f"{calls:,} operator calls"] if (calls := row.memory.get("operator_calls")) else []
    cause.append(about["why"] if path == way else f"as {rows.data()['ways'][path]['name']}")
    return [
        about["name"], f"{name}, head_dim {p.head_dim}",
        None if foreseen is None else " to ".join(dict.fromkeys(map(number, foreseen))),
        Cell(number(own[0]), f"{number(own[1])} to {number(own[2])}") if own else Cell(status(row), kind="bad"),
        None if part is None else Cell(_percent(part[0]), f"{_percent(part[1])} to {_percent(part[2])}"),
        ms(row), error(row), ", ".join(cause),
    ]  # fmt: skip


def _percent(x: float) -> str:
    return f"{number(100 * x)} %"


def _absent(study: Study) -> str:
    if study.rehearsal or study.device_type != "cuda":
        return (
            "No rows: kernels are timed on the GPU itself, and these rows come from a CPU. On a machine that has it, "
            "`python -m ringlab measure --suite kernels` takes them."
        )
    return f"No rows yet: `python -m ringlab measure --profile {study.profile.name} --suite kernels` takes them."


def lengths(study: Study) -> Table | None:
    """The ways against the copying form, over n."""
    found = sorted({r.point.seq_len for r in study.rows(rows.measured(study), system="copying", head_dim=128)})
    lines = []
    for n in found:
        ways = ("default", "lists", "fused", "copying", "dense")
        ours, lists, fused, copied, dense = (rows.one(study, way, seq_len=n) for way in ways)
        lines.append([n, ms(ours), ms(lists), ms(fused), ms(copied), times(study.ratio(copied, ours)), ms(dense),
                      peak(ours), peak(fused), peak(copied)])  # fmt: skip
    return study.table(
        "Over length, forward, head_dim 128",
        [">Tokens", ">Default path (ms)", ">Tile lists (ms)", ">One merging kernel (ms)", ">Copying form (ms)",
         ">Copying over default", ">Dense SDPA (ms)", ">Peak, default (× tensors)", ">Peak, merging kernel",
         ">Peak, copying"],
        lines,
    ) if lines else None  # fmt: skip


def blocks(study: Study) -> Table | None:
    """Block-sparse attention against its share of dense attention and against FlexAttention."""
    lines = []
    for row in study.rows(rows.measured(study), pattern=suite.RUNG_MASK.to_dict()):
        p = row.point
        way = next((w for w, options in suite.RUNG_WAYS.items() if dict(p.options) == options), "")
        name = "FlexAttention" if p.system == "flex" else rows.data()["ways"][way]["name"]
        dense, share = dense_beside(study, row), pattern_of(p).density(p.seq_len)
        part = rows.over(study, row, dense)
        lines.append([
            name, "forward" if p.passes == "fwd" else "forward and backward", ms(row), ms(dense),
            None if part is None else Cell(f"{number(part[0] / share)}×", _range(part, share)),
            times(study.ratio(row, flex(study))) if p.passes == "fwd" and p.system != "flex" else None,
            error(row), peak(row),
        ])  # fmt: skip
    return study.table(
        f"{suite.RUNG_MASK}, {suite.RUNG_TOKENS:,} tokens: "
        f"{_percent(suite.RUNG_MASK.density(suite.RUNG_TOKENS))} of all pairs",
        ["Way", "Pass", ">Time (ms)", ">Dense SDPA (ms)", ">Over dense × density", ">Over FlexAttention", ">Error",
         PEAK],
        lines,
    ) if lines else None  # fmt: skip


def _range(found, share: float) -> str:
    return f"{number(found[1] / share)} to {number(found[2] / share)}"


def memory(study: Study) -> Table | None:
    """The longest training step, each way alone on the GPU."""
    found = {way: trained(study, way) for way in suite.RUNG_WAYS}
    lines = [
        [rows.data()["ways"][way]["name"], r.point.seq_len, ms(r), _rate(r), peak(r), error(r)]
        for way, r in found.items() if r is not None
    ]  # fmt: skip
    return study.table(
        "Forward and backward at the longest length, head_dim 128",
        ["Way", ">Tokens", ">Time (ms)", ">Useful TFLOP/s", PEAK, ">Error"], lines,
        note="Tensors: q, k, v, out and the gradients of the four.",
    ) if lines else None  # fmt: skip


def _rate(row) -> str | None:
    found = rows.rate(row)
    return found and number(found[0])


def sources(study: Study) -> Text | None:
    """What the predictions were made of, and what of this suite is missing."""
    if not rows.measured(study):
        return None
    lines = [f"Predicted from {source}." for source in rows.data()["sources"]]
    lines = lines if study.profile.name == rows.data()["profile"] else []
    missing = missing_points(study)
    lines += [f"Not measured: {len(missing)} points, as {missing[0].label()}."] if missing else []
    return study.text(*lines, bullets=True) if lines else None


def unquoted(study: Study) -> Table | None:
    """The rows of this suite that may not be quoted, with the reason of each."""
    failed = [r for r in rows.measured(study) if objection(r)]
    return study.table(
        f"{len(failed)} rows of this appendix are not quoted",
        ["Row", "Status", "Reason"], [[r.point.label(), Cell(status(r), kind="bad"), reason(r)] for r in failed],
    ) if failed else None  # fmt: skip
