"""Document 004, the last of five published: the hybrid ring over length and ranks, beside standard attention."""

from __future__ import annotations

from .. import claims_code, curves, figures, findings
from .. import study as studies
from ..cells import error
from ..findings import failures
from ..origins import provenance
from ..predictions import predictions, predictions_figure
from ..reading import reading
from ..study import Study
from ..tables import Cell, Table, Text, number, size
from . import rows
from .rows import KB, MB, limits, rows_of

__all__ = [
    "answer", "failures", "ledger", "limits", "memory", "memory_figure", "open_study", "predictions",
    "predictions_figure", "provenance", "published_table", "reading", "standard",
]  # fmt: skip
SYSTEM = "RingDilatedAttentionHybrid"


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this document's suite."""
    return studies.open_study(profile, data, "hybrid_summary")


def answer(study: Study) -> Text:
    """At most five lines: memory, throughput, beside standard attention, error, what was not measured."""
    lines = [_memory_line(study), _throughput_line(study), _standard_line(study), rows.error_line(study),
             rows.gaps_line(study)]  # fmt: skip
    return study.text(*lines, kind="answer", bullets=True)


def _memory_line(study: Study) -> str:
    known = {k: r for k, r in rows_of(study, SYSTEM).items() if rows.per_token(r)}
    if not known:
        return "**Memory a rank**: not measured."
    (n, p), row = max(known.items(), key=lambda x: x[0])
    return (
        f"**Memory a rank** at {n:,} tokens on {p}: {size(rows.peak_bytes(row))}, "
        f"{rows.per_token(row) / KB:.2f} KB a token, {rows.peak_bytes(row) / rows.shard_bytes(row):.2f} × its shard."
    )


def _throughput_line(study: Study) -> str:
    known = {k: r for k, r in rows_of(study, SYSTEM).items() if rows.timed(r)}
    if not known:
        return "**Throughput**: no row had a core for each rank."
    ends = [known[k] for k in (min(known), max(known))]
    said = " and ".join(f"{number(r.tokens_per_s)} at {r.point.seq_len:,} on {rows.ranks(r.point)}" for r in ends)
    return f"**Tokens per second**: {said}."


def _standard_line(study: Study) -> str:
    known = {k: r for k, r in rows_of(study, SYSTEM).items() if rows.peak_bytes(r)}
    if not known:
        return "**Standard attention**: no row to set beside it."
    row = known[max(known)]
    return (
        f"**Standard attention** would hold {size(score_bytes(row.point))} of scores at {row.point.seq_len:,} "
        "tokens in "
        f"{row.point.dtype}; torch's fused kernel holds none, and neither does this."
    )


def score_bytes(point) -> int:
    """Bytes of the (b, h, n, n) scores in a point's dtype."""
    import torch

    return point.batch * point.heads * point.seq_len**2 * getattr(torch, point.dtype).itemsize


def published_table(study: Study) -> Table:
    """The document's table with ours beside it, on two ranks."""
    found, lines = rows_of(study, SYSTEM), []
    for paper in rows.published("004")["rows"]:
        row = found.get((paper["seq_len"], 2))
        held = rows.peak_bytes(row)
        lines.append([
            paper["seq_len"], paper["batch"], paper["mb"], f"{held / MB:.1f}" if held else None,
            f"{paper['kb_per_token']:.2f}", f"{paper['mb'] * MB / paper['seq_len'] / KB:.2f}",
            f"{rows.per_token(row) / KB:.2f}" if rows.per_token(row) else None, f"{paper['tokens_per_s']:,}",
            rows.throughput(row),
        ])  # fmt: skip
    return study.table(
        "Two ranks: as published, and here",
        [">Tokens", ">Published batch", ">Published (MB)", ">A rank here (MB)", ">Published KB a token",
         ">The same, MB over tokens", ">KB a token here", ">Published tokens/s", ">Tokens/s here"],
        lines,
        note="The first two published rows divide by twice the tokens, as their batch was 2, which the text does "
        "not say. "
        "Here inputs and results are counted. MB and KB are decimal, as published. "
        f"{rows.work_of(next(iter(found.values()))) if found else ''}",
    )  # fmt: skip


def memory(study: Study) -> Table:
    """Memory and throughput over length and ranks, beyond what the document tested."""
    lines = [
        [n, rows.ranks_cell(r), size(rows.shard_bytes(r)), rows.peak(r),
         f"{rows.per_token(r) / KB:.2f}" if rows.per_token(r) else None, size(rows.sent_bytes(r)), rows.time(r),
         rows.throughput(r), error(r), rows.bound(r)]
        for (n, _), r in rows_of(study, SYSTEM).items()
    ]  # fmt: skip
    return study.table(
        "The hybrid ring over length and ranks, forward",
        [">Tokens", ">Ranks", ">Shard of q, k, v, out", ">Peak of a rank", ">KB a token", ">Sent by a rank",
         ">Time (ms)", ">Tokens/s", ">Error", ">Lower bound (ms)"],
        lines or [["not measured", *[None] * 9]],
        note="More ranks than cores enter no time. Lengths without a time were run once, for their memory and "
        "their check.",
    )  # fmt: skip


def standard(study: Study) -> Table:
    """Standard attention's scores, in the dtype of the rows, beside what a rank holds here."""
    lines = []
    for (n, p), row in rows_of(study, SYSTEM).items():
        held = rows.peak_bytes(row)
        if held and p == 2:
            scores = score_bytes(row.point)
            lines.append([n, p, size(scores), size(scores // 2), size(held),
                          Cell(f"{100 * (1 - held / scores):.1f} %", "of scores alone")])  # fmt: skip
    return study.table(
        "Beside standard attention that forms its scores",
        [">Tokens", ">Ranks", ">Its scores in fp32", ">In half precision", ">Peak of a rank here", ">Less"],
        lines or [["not measured", *[None] * 5]],
        note="Computed: batch × heads × tokens² × bytes of an element. The document prints 4 GB at 16K tokens for "
        "fp32, "
        "which is the figure of half precision. Nobody needs to form scores: torch's own kernel does not.",
    )


def memory_figure(study: Study) -> None:
    """Peak of a rank over length, by ranks, with its shard at the most ranks."""
    found = {k: r for k, r in rows_of(study, SYSTEM).items() if rows.peak_bytes(r)}
    counts = sorted({p for _, p in found})[:4]
    series = {
        f"{p} rank{'s' * (p > 1)}": [
            (n, rows.peak_bytes(r) / 2**20, None, None) for (n, q), r in found.items() if q == p
        ]
        for p in counts
    }
    if not series:
        return
    data = study.table(
        "Data: peak of a rank",
        [">Tokens", ">Ranks", ">Peak of a rank", ">Shard"],
        [[n, p, size(rows.peak_bytes(r)), size(rows.shard_bytes(r))] for (n, p), r in found.items()],
    )
    said = "; ".join(f"{name} {number(xs[-1][1])} MiB at {xs[-1][0]:,} tokens" for name, xs in series.items())
    caption = f"{SYSTEM}: peak memory of a rank over length, both axes logarithmic."
    fig = curves.lines(series, xlabel="Tokens", ylabel="Peak of a rank (MiB)")
    figures.show(fig, "hybrid-memory", caption, f"{caption} {said}.", data, stamp=study.stamp)


def ledger(study: Study) -> Table:
    """Every claim of the document, judged."""
    return findings.ledger(study, claims_code.judged(study, "004"))
