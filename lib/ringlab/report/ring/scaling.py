"""Document 001, the second of five published: one sequence over one, two, four and eight ranks."""

from __future__ import annotations

from .. import curves, figures, findings
from .. import study as studies
from ..cells import error
from ..cells import times as factors
from ..findings import failures
from ..origins import provenance
from ..predictions import predictions, predictions_figure
from ..reading import reading
from ..study import Study
from ..tables import Cell, Table, Text, about, number, size
from ..trust import objection, status
from . import claims, rows
from .rows import KB, MB, limits, rows_of

__all__ = [
    "answer", "failures", "four_panels", "ledger", "limits", "longest", "memory", "open_study", "predictions",
    "predictions_figure", "provenance", "published_tables", "reading", "systems", "times",
]  # fmt: skip
RESERVE = 0.9  # share of a device's memory that a run may plan with
SYSTEM = "RingDilatedAttentionSDPA"  # whose tables the document prints
SYSTEMS = (SYSTEM, "RingDilatedAttentionCorrect", "RingDilatedAttentionHilbertGPUOptimized")


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this document's suite."""
    return studies.open_study(profile, data, "benchmark_summary")


def answer(study: Study) -> Text:
    """At most five lines: memory a rank, time, the longest sequence, error, what was not measured."""
    lines = [
        _memory_line(study),
        _time_line(study),
        _longest_line(study),
        rows.error_line(study),
        rows.gaps_line(study),
    ]
    return study.text(*lines, kind="answer", bullets=True)


def _memory_line(study: Study) -> str:
    found = reductions(study)
    if not found:
        return "**Memory a rank**: not measured on several ranks."
    n = max(n for n, _ in found)
    said = ", ".join(f"{number(x)}× less on {p}" for (length, p), x in sorted(found.items()) if length == n)
    return f"**Memory a rank** at {n:,} tokens, against one rank: {said}."


def reductions(study: Study, system: str = SYSTEM) -> dict[tuple[int, int], float]:
    """(tokens, ranks) -> peak on one rank over the peak on each of several."""
    found = {key: rows.peak_bytes(r) for key, r in rows_of(study, system).items()}
    return {
        (n, p): found[n, 1] / held for (n, p), held in found.items() if p > 1 and held and found.get((n, 1))
    }  # fmt: skip


def _time_line(study: Study) -> str:
    found = rows_of(study, SYSTEM)
    pairs = [
        (n, p, study.ratio(found[n, 1], r))
        for (n, p), r in found.items()
        if p > 1 and rows.timed(r) and (n, 1) in found
    ]
    known = [(n, p, x) for n, p, x in pairs if x]
    if not known:
        return "**Time**: no row on several ranks had a core for each of them."
    n, p, ratio = max(known, key=lambda x: x[:2])
    return (
        f"**Time** at {n:,} tokens on {p} ranks: **{number(ratio.value)}×** as fast as on one ({factors(ratio).sub}), "
        f"{100 * ratio.value / p:.0f} % of {p}×; threads a rank: {found[n, 1].ranks.get('threads')}."
    )


def _longest_line(study: Study) -> str:
    found = longest_lengths(study)
    if not found:
        return "**Longest sequence**: not known, no memory was measured."
    said = "; ".join(f"{about(tokens)} tokens on {p} rank{'s' * (p > 1)}" for p, (tokens, _) in found.items())
    return (
        f"**Longest sequence** forward, computed, if every rank had {size(study.memory_bytes)} of its own: {said}. "
        f"{failed_lengths(study)}"
    )


def failed_lengths(study: Study) -> str:
    """Whether a length was a limit, or only the longest that was asked for."""
    failed = [r for r in study.rows(system=SYSTEM) if objection(r)]
    said = ", ".join(f"{r.point.seq_len:,} on {rows.on(rows.ranks(r.point))} ({status(r)})" for r in failed)
    return f"Not quoted: {said}." if said else "Nothing failed at the lengths measured."


def longest_lengths(study: Study) -> dict[int, tuple[float, object]]:
    """ranks -> (tokens, row): the memory of a device over the bytes a token of the longest row."""
    found, memory = rows_of(study, SYSTEM), study.memory_bytes
    longest: dict[int, tuple[float, object]] = {}
    for (_, p), row in found.items():
        if memory and rows.per_token(row):
            longest[p] = (RESERVE * memory / (rows.per_token(row) * row.point.batch), row)
    return longest


def published_tables(study: Study) -> Table:
    """The document's two tables with ours beside them."""
    found, lines = rows_of(study, SYSTEM), []
    for paper in rows.published("001")["rows"]:
        row = found.get((paper["seq_len"], paper["ranks"]))
        own = rows.per_token(row)
        lines.append([
            paper["seq_len"], paper["ranks"], f"{paper['seconds'] * 1e3:,.0f}", rows.time(row),
            f"{paper['tokens_per_s']:,}", rows.throughput(row), f"{paper['mb']:.2f}",
            f"{rows.peak_bytes(row) / MB:.2f}" if rows.peak_bytes(row) else None, f"{paper['kb_per_token']:.2f}",
            f"{own / KB:.2f}" if own else None,
        ])  # fmt: skip
    return study.table(
        f"{SYSTEM}: as published, and here",
        [">Tokens", ">Ranks", ">Published (ms)", ">Here (ms)", ">Published tokens/s", ">Tokens/s",
         ">Published memory (MB)", ">Memory a rank (MB)", ">Published KB a token", ">KB a token"],
        lines,
        note=f"Published on {rows.published('001')['device']}, batch 2 by its script, inputs and weights not "
        "counted and "
        "projections included; by its source 38 to 56 % of the published outputs are zero. Here inputs and results are "
        f"counted, and a token is one of the whole sequence. MB and KB are decimal, as published. {work(study)}",
    )  # fmt: skip


def work(study: Study) -> str:
    """What every call of this page computes."""
    row = next(iter(rows_of(study, SYSTEM).values()), None)
    return rows.work_of(row) if row else ""


def memory(study: Study) -> Table:
    """Peak memory of a rank over length and ranks."""
    reduced = reductions(study)
    lines = []
    for (n, p), row in rows_of(study, SYSTEM).items():
        held, reduction = rows.per_token(row), reduced.get((n, p))
        lines.append([
            n, rows.ranks_cell(row), size(rows.shard_bytes(row)), rows.peak(row), f"{held / KB:.2f}" if held else None,
            f"{reduction:.2f}×" if reduction else None, f"{100 * reduction / p:.0f} %" if reduction else None,
            size(rows.sent_bytes(row)), error(row),
        ])  # fmt: skip
    return study.table(
        "Memory of the rank that holds most, forward",
        [">Tokens", ">Ranks", ">Shard of q, k, v, out", ">Peak", ">KB a token", ">Less than one rank",
         ">Of the possible", ">Sent by a rank", ">Error"],
        lines or [["not measured", *[None] * 8]],
        note="Peak: live tensors on that rank, its shard included. Of the possible: the reduction over the number of "
        f"ranks. {verdict_on_scaling(study)}",
    )  # fmt: skip


def verdict_on_scaling(study: Study) -> str:
    """O(n/p) is called shown only with three values of p or more."""
    found = reductions(study)
    n = max((n for n, _ in found), default=0)
    at = {p: p / x for (length, p), x in found.items() if length == n}
    if len(at) < 2:
        return f"O(n/p) is not shown by {len(at) + 1} number{'s' * (len(at) > 0)} of ranks."
    said = ", ".join(f"{x:.2f} on {p}" for p, x in at.items())
    return f"O(n/p), where ranks × peak stay what one rank holds: at {n:,} tokens {said}."


def times(study: Study) -> Table:
    """Time over length and ranks, with the scaling figure."""
    found, lines = rows_of(study, SYSTEM), []
    for (n, p), row in found.items():
        ratio = study.ratio(found.get((n, 1)), row) if p > 1 and rows.timed(row) else None
        share = None
        if ratio:
            share, low, high = (f"{100 * x / p:.0f} %" for x in (ratio.value, ratio.low, ratio.high))
            share = Cell(share, f"{low} to {high}")
        lines.append([
            n, rows.ranks_cell(row), rows.time(row), rows.throughput(row), share, rows.bound(row), error(row),
        ])  # fmt: skip
    return study.table(
        "Time of one forward call, the slowest rank's",
        [">Tokens", ">Ranks", ">Time (ms)", ">Tokens/s", ">Of one rank's time / ranks", ">Lower bound (ms)", ">Error"],
        lines or [["not measured", *[None] * 6]],
        note="Every rank has the same number of threads. More ranks than cores enter no time.",
    )  # fmt: skip


def systems(study: Study) -> Table:
    """The document's three systems side by side."""
    lines = []
    for system in SYSTEMS:
        for (n, _), row in rows_of(study, system).items():
            lines.append([system, n, rows.ranks_cell(row), rows.time(row), rows.throughput(row), rows.peak(row),
                          size(rows.sent_bytes(row)), error(row)])  # fmt: skip
    for row in study.rows(system="dense_sdpa", world_size=1):
        lines.append(["Dense SDPA", row.point.seq_len, rows.ranks_cell(row), rows.time(row), rows.throughput(row),
                      rows.peak(row), None, error(row)])  # fmt: skip
    lines.sort(key=lambda x: (x[1], str(x[2].text)))
    return study.table(
        "The document's systems, one function but for the Hilbert curve's",
        ["System", ">Tokens", ">Ranks", ">Time (ms)", ">Tokens/s", ">Peak of a rank", ">Sent by a rank", ">Error"],
        lines or [["not measured", *[None] * 7]],
    )


def longest(study: Study) -> Table:
    """What a device's memory would hold, and what was run."""
    lines = [
        [p, row.point.seq_len, f"{rows.per_token(row) / KB:.2f}", size(study.memory_bytes), about(tokens)]
        for p, (tokens, row) in longest_lengths(study).items()
    ]
    return study.table(
        "The longest sequence for a memory budget, computed",
        [">Ranks", ">Longest measured", ">KB a token there", ">Budget a rank", ">Tokens that fit"],
        lines or [["not measured", *[None] * 4]],
        note=f"Bytes a token at the longest length that was measured, and {RESERVE * 100:.0f} % of the budget. The "
        f"lengths measured are chosen for their time. {failed_lengths(study)}",
    )


def four_panels(study: Study) -> None:
    """The document's figure: memory, reduction, throughput, memory a token, by ranks over length."""
    found = rows_of(study, SYSTEM)
    counts = sorted({p for _, p in found})[:4]
    reduced = reductions(study)

    def series(value) -> dict:
        points = {p: [(n, value(n, p, r), None, None) for (n, q), r in found.items() if q == p] for p in counts}
        points = {p: [x for x in xs if x[1]] for p, xs in points.items()}
        return {f"{p} rank{'s' * (p > 1)}": xs for p, xs in points.items() if xs}

    drawn = [
        ("Peak of a rank (MiB)", series(lambda n, p, r: (rows.peak_bytes(r) or 0) / 2**20)),
        ("Less than one rank (×)", series(lambda n, p, r: reduced.get((n, p)))),
        ("Tokens/s", series(lambda n, p, r: r.tokens_per_s if rows.timed(r) else None)),
        ("KB a token", series(lambda n, p, r: (rows.per_token(r) or 0) / KB)),
    ]
    drawn = [(title, lines) for title, lines in drawn if lines]
    if not drawn:
        return
    said = "; ".join(
        f"{title}: "
        + ", ".join(f"{name} {number(xs[-1][1])} at {curves.tokens(xs[-1][0])}" for name, xs in lines.items())
        for title, lines in drawn
    )
    data = study.table(
        "Data: memory and throughput by ranks",
        [">Tokens", ">Ranks", ">Peak of a rank", ">Less than one rank", ">Tokens/s", ">KB a token"],
        [[n, p, size(rows.peak_bytes(r)), f"{reduced[n, p]:.2f}×" if (n, p) in reduced else None, rows.throughput(r),
          f"{rows.per_token(r) / KB:.2f}" if rows.per_token(r) else None] for (n, p), r in found.items()],
    )  # fmt: skip
    caption = f"{SYSTEM}: memory and throughput over length, by ranks; axes are logarithmic."
    figures.show(
        curves.panels(drawn, xlabel="Tokens"), "scaling-panels", caption, f"{caption} {said}.", data, stamp=study.stamp
    )


def ledger(study: Study) -> Table:
    """Every claim of the document, judged."""
    return findings.ledger(study, claims.judge(study, "001"))
