"""Document 002, the third of five published: block-sparse attention, and ring attention at extreme lengths."""

from __future__ import annotations

from ...measure import suites as suite
from .. import figures, findings
from .. import study as studies
from ..cells import bound, error, ms, times
from ..findings import failures
from ..origins import provenance
from ..predictions import predictions, predictions_figure
from ..reading import reading
from ..rows import SHORT
from ..study import Study
from ..tables import Cell, Table, Text, number
from ..trust import objection
from . import claims, rows
from .extremes import extreme, ring, work
from .journey import building, journey, journey_figure
from .reuse import cache_workload, pool_workload
from .sparsity import efficiency, length_figure, lengths, patterns

__all__ = [
    "answer", "block_sparse", "block_sparse_figure", "building", "cache_workload", "efficiency", "extreme",
    "failures", "journey", "journey_figure", "ledger", "length_figure", "lengths", "limits", "open_study", "patterns",
    "pool_workload", "predictions", "predictions_figure", "provenance", "reading", "ring", "work",
]  # fmt: skip


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this document's suite."""
    return studies.open_study(profile, data, "session_summary")


def answer(study: Study) -> Text:
    """At most five lines: the block-sparse table, the journey, the extreme lengths, error, what was not measured."""
    lines = [_table_line(study), _journey_line(study), _extreme_line(study), findings.trust_line(study),
             findings.gaps_line(study)]  # fmt: skip
    return study.text(*lines, kind="answer", bullets=True)


def _table_line(study: Study) -> str:
    ours, original, dense = (rows.in_table(study, s) for s in (rows.OURS, suite.ORIGINAL, "dense_sdpa"))
    factors = [(study.ratio(other, ours), name) for other, name in ((original, "row by row"), (dense, "dense SDPA"))]
    said = " and ".join(f"**{number(x.value)}×** as fast as {name} ({number(x.low)} to {number(x.high)})"
                        for x, name in factors if x)  # fmt: skip
    if not said or objection(ours):
        return "**Block-sparse attention**: not measured."
    return (
        f"**Block-sparse attention**, {ours.point.seq_len:,} tokens of which a query sees "
        f"{rows.percent(rows.density(ours.point), 2)}: {number(ours.median * 1e3)} ms, {said}."
    )


def _journey_line(study: Study) -> str:
    first, last = rows.way(study, "rows"), rows.way(study, "views")
    ratio = study.ratio(first, last)
    if ratio is None:
        return "**The journey**: not measured."
    counted = [rows.operators(r) for r in (first, last)]
    fewer = f", {counted[0]:,} operator calls become {counted[1]:,}" if all(counted) else ""
    return (
        f"**The journey**: from a call for each block of queries to views, {number(ratio.value)}× as fast "
        f"({number(ratio.low)} to {number(ratio.high)}){fewer}; all steps compute one function."
    )


def _extreme_line(study: Study) -> str:
    printed = next(x for x in rows.document()["ring"] if x.get("speedup", 0) > 1)
    least = rows.least_seconds(rows.work(), rows.card())
    found = {n: r for n, r in rows.extreme(study).items() if not objection(r) and r.median}
    ours = ""
    if found:
        n, row = max(found.items(), key=lambda x: x[0])
        ours = f" A window over {n:,} tokens with {rows.heads(row.point)} passed here in {number(row.median)} s."
    return (
        f"**{printed['speedup']}×** is no attention: {printed['ms']} ms for {rows.stated()[1]['seq_len']:,} tokens, "
        f"where the stated work takes at least {number(least * 1e3)} ms on that {rows.card().title}.{ours}"
    )


def entries(study: Study) -> list[tuple[str, dict, object]]:
    """(name, published row or {}, our row or None): the document's rows, ours, then what is in fp32 besides."""
    main, found = rows.dtype_of(study), []
    for paper in rows.document()["block_rows"]:
        row = rows.in_table(study, paper["system"]) or rows.in_table(study, paper["system"], "float32")
        found.append((paper["name"], paper, row))
    found.append(("This library, `auto`", {}, rows.in_table(study, rows.OURS)))
    if main != "float32":
        named = (("Optimized", suite.OPTIMIZED), ("This library, `auto`", rows.OURS))
        found += [(name, {}, rows.in_table(study, system, "float32")) for name, system in named]
    return [(name.replace("`", ""), paper, row) for name, paper, row in found]


def _over_original(study: Study, row):
    original = rows.in_table(study, suite.ORIGINAL)
    if None in (row, original) or row is original or row.point.dtype != original.point.dtype:
        return None
    return study.ratio(original, row)


def block_sparse(study: Study) -> Table:
    """The document's table of block-sparse attention, with ours beside it."""
    lines = []
    for name, paper, row in entries(study):
        name = f"{name}: dense SDPA here" if paper.get("key") == "baseline" else name
        lines.append([
            Cell(name, SHORT[row.point.dtype] if row else ""), ms(row), times(_over_original(study, row)), error(row),
            bound(row), rows.peak(row), rows.calls(row), *(_printed(paper, k) for k in ("ms", "mb", "over_original")),
        ])  # fmt: skip
    measured = any(row is not None for *_, row in entries(study))
    d = rows.document()
    computed = "; ".join(f"{x['name']} {x['computes']}" for x in d["block_rows"])
    return study.table(
        f"Block-sparse attention, {d['block_sparse']['seq_len']:,} tokens: as published, and here",
        ["System", ">Time (ms)", ">Faster than Original", ">Error", ">Lower bound (ms)", ">Peak (MB)",
         ">Operator calls", ">Published (ms)", ">Published (MB)", ">Published, Original over it"],
        lines if measured else [["not measured", *[None] * 9]],
        note=f"Blocks of {d['block_sparse']['block_size']}, a window of two blocks each way. Here all but dense SDPA "
        "compute one function, with one softmax for each query. By the original's source, in fp16: "
        f"{computed}. Operator calls: aten operators of one forward, views included.",
    )  # fmt: skip


def _printed(paper: dict, key: str) -> str | None:
    unit = "×" if key == "over_original" else ""
    return f"{paper[key]:g}{unit}" if key in paper else None


def block_sparse_figure(study: Study) -> None:
    """The table's times with their lower bounds."""
    found = [
        (name if row.point.system != "dense_sdpa" else "Dense SDPA", row)
        for name, _, row in entries(study)
        if row is not None
    ]
    known = [(f"{name} ({SHORT[r.point.dtype]})", r) for name, r in found if not objection(r) and r.median]
    if not known:
        return
    items = [figures.Bar(name, r.median * 1e3, r.ci[0] * 1e3, r.ci[1] * 1e3,
                         figures.GREY if r.point.system == "dense_sdpa" else figures.BLUE,
                         (r.bound_seconds or 0) * 1e3 or None) for name, r in known]  # fmt: skip
    fig = figures.bars(items, xlabel="Time (ms)", bound_label="lower bound", fmt=number)
    said = "; ".join(f"{b.label} {number(b.value)} ms" for b in items)
    caption = f"Block-sparse attention over {known[0][1].point.seq_len:,} tokens, forward, with 95 % intervals."
    data = study.table(
        "Data: block-sparse attention", ["System", ">Time (ms)", ">Lower bound (ms)", ">Error", ">Peak (MB)"],
        [[name, ms(r), bound(r), error(r), rows.peak(r)] for name, r in known],
    )  # fmt: skip
    figures.show(fig, "session-block-sparse", caption, f"{caption} {said}.", data, stamp=study.stamp)


def ledger(study: Study) -> Table:
    """Every claim of the document, judged."""
    return findings.ledger(study, claims.judge(study))


def limits(study: Study) -> Text:
    """What this run cannot tell, of the originals above all."""
    return findings.limits(
        study,
        "How fast the published code is: it does not run here, and its rows compute other functions than their names.",
        "What a ring holds on several devices: reports `benchmark_summary` and `hybrid_summary` measure it.",
        *(["What a kernel launch costs on a GPU: on a CPU an operator call costs less of the whole."]
          if study.device_type == "cpu" else []),
    )  # fmt: skip
