"""Document 000, the first of five published, from measured rows: all that its notebook shows, in its order."""

from __future__ import annotations

from . import claims_code, figures, findings
from . import study as studies
from .answer import answer
from .backends import backends, backends_by_rule
from .cells import PEAK, bound, error, ms, peak, times
from .computed import computed, policy
from .computed import two_cards_table as two_cards
from .engine import against, ceilings, speed
from .findings import failures
from .footprints import memory, memory_figure
from .lengths import length_figure, lengths
from .origins import provenance
from .passes import passes
from .predictions import predictions, predictions_figure
from .reading import reading
from .recommend import recommended
from .reuse import cache_and_pool, cache_table, pool_figure, pool_table
from .rows import (
    SHORT,
    fastest_row,
    implementation_rows,
    is_plain,
    label,
    pattern,
    published,
    shape,
)  # fmt: skip
from .study import Study
from .switches import switch_figure, switch_table, two_by_two
from .tables import Cell, Table, Text, number
from .trust import objection, status

__all__ = [
    "against", "answer", "backends", "backends_by_rule", "cache_and_pool", "cache_table", "ceilings", "computed",
    "failures", "implementations", "ledger", "length_figure", "lengths", "limits", "memory", "memory_figure",
    "open_study", "passes", "policy", "pool_figure", "pool_table", "predictions", "predictions_figure", "provenance",
    "reading", "recommended", "speed", "switch_figure", "switch_table", "time_figure", "two_by_two", "two_cards",
]  # fmt: skip


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this document's suite."""
    return studies.open_study(profile, data, "optimization")


def ledger(study: Study) -> Table:
    """Every claim of the document, judged."""
    return findings.ledger(study, claims_code.judged(study, "000"))


def limits(study: Study) -> Text:
    """What this run cannot tell."""
    lines = ["Training, causal attention, the cache, the pool and the engine: a rehearsal leaves them out."]
    lines = lines if study.rehearsal else []
    for dtype in ("float16", "bfloat16", "float32"):
        if not [r for r in study.good if r.point.dtype == dtype]:
            tried = [r for r in study.results if r.point.dtype == dtype]
            said = "no row passed, each with its reason below" if tried else "not measured"
            lines.append(f"{SHORT[dtype]}: {said}.")
    if study.profile.kind == "cpu":
        lines.append("GPU kernels (flash, efficient, cuDNN, xformers): see the table of kernels for each refusal.")
    return findings.limits(study, *lines)


def implementations(study: Study) -> Table:
    """Implementation by dtype, this machine beside the published values, dense SDPA at the same n."""
    entries = implementation_rows(study)
    originals = [r for _, r in entries if r is not None and is_plain(r)]
    base = next((r for r in originals if not objection(r)), None)  # fp16 as published, where it may be quoted
    rows, marked, fastest = [], [], fastest_row(study)
    for i, (paper, row) in enumerate(entries):
        name = paper["name"] if paper else label(row)
        dtype = paper["dtype"] if paper else row.point.dtype
        ratio = study.ratio(base, row) if row is not base else None
        speedup = Cell("1×", "the base") if row is base and row is not None else times(ratio)
        rows.append([
            name, SHORT[dtype], ms(row), _throughput(row), speedup, error(row), bound(row), peak(row),
            f"{paper['ms']:.2f}" if paper else None, f"{paper['speedup']:.2f}×" if paper else None,
        ])  # fmt: skip
        if row is not None and row is fastest:
            marked.append(i)
    s = shape()
    return study.table(
        f"One device, {s['seq_len']:,} tokens, {s['heads']} heads of {s['head_dim']}, forward",
        ["Implementation", "dtype", ">Time (ms)", ">Tokens/s", ">Speed-up", ">Error", ">Lower bound (ms)",
         PEAK, ">Published (ms)", ">Published speed-up"],
        rows, marked=marked,
        note=f"{str(pattern()).capitalize()}. Published on {published()['device']}, where the original's source "
        "attends over the heads of each position: its times are of other work. Speed-ups are over "
        f"{label(base) if base else 'the original'}{', ' + SHORT[base.point.dtype] if base else ''}.",
    )  # fmt: skip


def _throughput(row) -> str | None:
    return None if row is None or objection(row) or not row.median else number(row.tokens_per_s)


def time_figure(study: Study) -> None:
    """Time by implementation with its interval and lower bound."""
    entries = [(p, r) for p, r in implementation_rows(study) if r is not None]
    items = []
    for paper, row in entries:
        quoted = not objection(row) and row.median
        color = figures.GREY if row.point.system == "dense_sdpa" else figures.BLUE
        items.append(figures.Bar(
            f"{paper['name'] if paper else label(row)}, {SHORT[row.point.dtype]}", row.median * 1e3 if quoted else None,
            row.ci[0] * 1e3 if quoted else None, row.ci[1] * 1e3 if quoted else None, color,
            row.bound_seconds * 1e3 if quoted and row.bound_seconds else None, status(row),
        ))  # fmt: skip
    spread = [b.value for b in items if b.value]
    log = bool(spread) and max(spread) > 20 * min(spread)
    scale = ", logarithmic" if log else ""
    fig = figures.bars(items, xlabel=f"Time (ms){scale}", bound_label="lower bound", log=log, fmt=number)
    said = "; ".join(
        f"{b.label} {number(b.value)} ms" if b.value else f"{b.label} {b.missing or 'not measured'}" for b in items
    )
    data = study.table(
        "Data: time by implementation",
        ["Implementation", "dtype", ">Time (ms)", ">Lower bound (ms)", PEAK],
        [[p["name"] if p else label(r), SHORT[r.point.dtype], ms(r), bound(r), peak(r)] for p, r in entries],
    )
    figures.show(
        fig,
        "optimization-time",
        f"Time of one forward call at {shape()['seq_len']:,} tokens, with 95 % intervals and lower bounds.",
        f"Time of one forward call at {shape()['seq_len']:,} tokens: {said}.",
        data,
        stamp=study.stamp,
    )
