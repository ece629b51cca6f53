"""Document 003, the fourth of five published: the all-gather against the P2P ring, and against the plan."""

from __future__ import annotations

from .. import claims_code, figures, findings
from .. import study as studies
from ..cells import error, times
from ..findings import failures
from ..origins import provenance
from ..predictions import predictions, predictions_figure
from ..reading import reading
from ..study import Study
from ..tables import Table, Text, number, size
from . import rows
from .rows import MB, limits, rows_of
from .volumes import volumes

__all__ = [
    "answer", "failures", "ledger", "limits", "memory_figure", "one_device", "open_study", "predictions",
    "predictions_figure", "provenance", "published_memory", "reading", "several", "volumes",
]  # fmt: skip
COLLECTIVE, ROBUST, PLAN = "RingDilatedAttentionV2Collective", "RingDilatedAttentionV2Robust", "ringlab"
NAMES = {COLLECTIVE: "All-gather", ROBUST: "P2P ring", PLAN: "Plan"}


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this document's suite."""
    return studies.open_study(profile, data, "performance_comparison")


def schemes(study: Study, **wanted) -> dict[str, dict]:
    """Scheme -> (tokens, ranks) -> row; all compute one function."""
    return {name: rows_of(study, system, **wanted) for system, name in NAMES.items()}


def answer(study: Study) -> Text:
    """At most five lines: one device, several, bytes, error, what was not measured."""
    lines = [_one_line(study), _memory_line(study), _bytes_line(study), rows.error_line(study), rows.gaps_line(study)]
    return study.text(*lines, kind="answer", bullets=True)


def _one_line(study: Study) -> str:
    found = one_device_rows(study)
    known = [(n, causal, a, b, study.ratio(b, a)) for n, causal, a, b in found]
    known = [x for x in known if x[4]]
    if not known:
        return "**One device**: not measured."
    n, causal, a, b, ratio = known[-1]
    return (
        f"**One device**, {n:,} tokens{', causal' if causal else ''}: the P2P ring takes {number(ratio.value)}× "
        "the time "
        f"of the all-gather ({number(ratio.low)} to {number(ratio.high)}) and "
        f"{rows.peak_bytes(b) / rows.peak_bytes(a):.2f}× its memory: neither runs any ring code."
    )


def one_device_rows(study: Study) -> list[tuple]:
    """(tokens, causal, all-gather row, ring row) on one rank."""
    found = []
    for causal in (False, True):
        both = schemes(study, causal=causal)
        found += [(n, causal, row, both["P2P ring"].get((n, 1)))
                  for (n, p), row in both["All-gather"].items() if p == 1]  # fmt: skip
    return [x for x in sorted(found, key=lambda x: x[:2]) if x[3] is not None]


def _most(study: Study) -> tuple[int, int] | None:
    """The longest sequence on the most ranks that every scheme has a quotable row of."""
    found = [{k for k, r in x.items() if rows.peak_bytes(r)} for x in schemes(study).values()]
    shared = {k for k in set.intersection(*found) if k[1] > 1} if found else set()
    return max(shared, key=lambda k: (k[1], k[0]), default=None)


def _memory_line(study: Study) -> str:
    at = _most(study)
    if at is None:
        return "**Memory on several ranks**: not measured."
    said = ", ".join(f"{name} {size(rows.peak_bytes(x[at]))}" for name, x in schemes(study).items())
    return f"**Memory a rank** at {at[0]:,} tokens on {at[1]} ranks: {said}; a shard is {_shard(study, at)}."


def _shard(study: Study, at) -> str:
    return size(rows.shard_bytes(schemes(study)["Plan"][at]))


def _bytes_line(study: Study) -> str:
    at = _most(study)
    if at is None:
        return "**Bytes sent**: not measured."
    said = ", ".join(f"{name} {size(rows.sent_bytes(x[at]))}" for name, x in schemes(study).items())
    return f"**Bytes sent by a rank** there, counted and equal to what was planned: {said}."


def one_device(study: Study) -> Table:
    """The document's table of one device, with ours beside it."""
    printed = {x["causal"]: x for x in rows.published("003")["times"]}
    lines = []
    for n, causal, a, b in one_device_rows(study):
        paper = printed[causal] if n == 4096 else None
        lines.append([
            n, "causal" if causal else "not causal", rows.time(a), rows.time(b), times(study.ratio(b, a)), rows.peak(a),
            rows.peak(b), error(b), rows.bound(b), f"{paper['collective_ms']}" if paper else None,
            f"{paper['robust_ms']}" if paper else None,
        ])  # fmt: skip
    return study.table(
        "One device: all-gather (V2Collective) and P2P ring (V2Robust)",
        [">Tokens", "Mask", ">All-gather (ms)", ">P2P ring (ms)", ">Ring's time over it", ">Peak, all-gather",
         ">Peak, ring", ">Error", ">Lower bound (ms)", ">Published, all-gather (ms)", ">Published, ring (ms)"],
        lines or [["not measured", *[None] * 10]],
        note="By the originals' sources the published columns are two functions: attention over the heads of each "
        "position, "
        f"and dense attention with its n × n scores. {_work(study)}",
    )  # fmt: skip


def _work(study: Study) -> str:
    row = next(iter(rows_of(study, COLLECTIVE).values()), None)
    return rows.work_of(row) if row else ""


def published_memory(study: Study) -> Table:
    """The document's table of memory over length, with ours beside it."""
    both, lines = schemes(study), []
    for paper in rows.published("003")["memory"]:
        a, b = (both[name].get((paper["seq_len"], 1)) for name in ("All-gather", "P2P ring"))
        held = [rows.peak_bytes(r) for r in (a, b)]
        lines.append([
            paper["seq_len"], paper["collective_mb"], paper["robust_mb"],
            f"{paper['robust_mb'] / paper['collective_mb']:.1f}×", *(f"{x / MB:.1f}" if x else None for x in held),
            f"{held[1] / held[0]:.2f}×" if all(held) else None,
        ])  # fmt: skip
    return study.table(
        "Memory on one device, as published and here",
        [">Tokens", ">Published, all-gather (MB)", ">Published, ring (MB)", ">Ratio", ">All-gather (MB)", ">Ring (MB)",
         ">Ratio here"],
        lines,
        note="The published ring's megabytes are those of two n × n score matrices in fp32, to four digits; here "
        "inputs "
        "and results are counted too, and no scores are held.",
    )  # fmt: skip


def several(study: Study) -> Table:
    """Every scheme on every number of ranks: time, memory, bytes."""
    lines = []
    for causal in (False, True):
        for name, found in schemes(study, causal=causal).items():
            for (n, p), row in found.items():
                if p > 1:
                    lines.append([
                        name, n, rows.ranks_cell(row), "causal" if causal else "not causal", rows.time(row),
                        rows.peak(row), size(rows.sent_bytes(row)), rows.messages(row), error(row),
                        rows.bound(row),
                    ])  # fmt: skip
    lines.sort(key=lambda x: (x[1], str(x[2].text), x[3]))
    return study.table(
        "Several ranks: what each scheme takes, holds and sends",
        ["Scheme", ">Tokens", ">Ranks", "Mask", ">Time (ms)", ">Peak of a rank", ">Sent by a rank", ">Messages",
         ">Error", ">Lower bound (ms)"],
        lines or [["not measured", *[None] * 9]],
        note="Over gloo, on one machine: times say nothing of a network. Bytes are counted as they are sent.",
    )  # fmt: skip


def memory_figure(study: Study) -> None:
    """Peak of a rank by scheme, at the longest sequence on the most ranks."""
    at = _most(study)
    if at is None:
        return
    found = {name: x[at] for name, x in schemes(study).items()}
    items = [figures.Bar(f"{name}: peak of a rank", rows.peak_bytes(r) / 2**20, bound=rows.shard_bytes(r) / 2**20)
             for name, r in found.items()]  # fmt: skip
    items += [figures.Bar(f"{name}: sent by a rank", (rows.sent_bytes(r) or 0) / 2**20, color=figures.ORANGE)
              for name, r in found.items()]  # fmt: skip
    data = study.table(
        "Data: memory and bytes by scheme",
        ["Scheme", ">Shard", ">Peak of a rank", ">Sent by a rank"],
        [
            [name, size(rows.shard_bytes(r)), size(rows.peak_bytes(r)), size(rows.sent_bytes(r))]
            for name, r in found.items()
        ],
    )
    said = "; ".join(f"{b.label} {number(b.value)} MiB" for b in items)
    caption = f"Memory and bytes of one rank in {at[1]}, {at[0]:,} tokens, forward."
    fig = figures.bars(items, xlabel="MiB", bound_label="its shard of q, k, v, out", fmt=number)
    figures.show(fig, "comparison-memory", caption, f"{caption} {said}.", data, stamp=study.stamp)


def ledger(study: Study) -> Table:
    """Every claim of the document, judged."""
    return findings.ledger(study, claims_code.judged(study, "003"))
