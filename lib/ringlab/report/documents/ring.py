"""The pages of documents 001, 003 and 004, which are about attention across ranks.

001 and 004 show memory and time over length and ranks, 003 what the plan, the ring and
the all-gather take, hold and send. The rows of a study are those of one page; its suite
says which.
"""

from __future__ import annotations

from ...measure.suites import CORRECT, HILBERT, ROBUST, SDPA, V2_COLLECTIVE
from ...ring.volume import ladder_rows
from .. import columns, figures
from ..columns import (
    PEAK,
    ROOFLINE,
    TIME,
    Column,
    beyond,
    peak_bytes,
    ratio,
    rows_of,
    sent_bytes,
    table,
    timed,
    times,
)
from ..findings import failures, limits, provenance, reading
from ..predicted import accuracy
from ..published import DOCUMENTS, number_of, published
from ..rows import SHORT
from ..study import Study, pattern_of
from ..tables import Cell, Table, Text, counted, number, size
from ..trust import objection, status, threads
from .optimization import answer_of, fits_line

__all__ = [
    "accuracy",
    "answer",
    "bytes_figure",
    "failures",
    "lengths",
    "limits",
    "names",
    "provenance",
    "reading",
    "schemes",
    "speed_figure",
    "volumes",
]


def _document(study: Study) -> dict:
    """The document that a page answers, as data."""
    return published(number_of(study.suite))


def answer(study: Study) -> Text:
    """The finding first, how long a sequence fits, trust, and what was not measured."""
    system, schemes = _document(study)["system"], study.suite == DOCUMENTS["003"].suite
    found, fits = (
        rows_of(study, system),
        "**How long a sequence fits**: not known, without a row.",
    )
    counts = tuple(sorted({1, *(p for (_, p), row in found.items() if timed(row))}))
    if found and (study.rehearsal or not schemes):
        fits = fits_line(
            study,
            pattern_of(next(iter(found.values())).point),
            max(n for n, _ in found),
            counts,
        )
    if schemes:
        return answer_of(
            study, fits, *_schemes_lines(study)[: 2 if study.rehearsal else 3]
        )
    run = _longest_run(rows_of(study, system, heads=lambda heads: True))
    return answer_of(
        study,
        fits,
        _shards_line(study, system),
        fits if study.rehearsal else f"{fits} {run}",
    )


def _work(rows: list) -> str:
    """What every call of a table computes, and with how many threads."""
    if not rows:
        return ""
    row = rows[0]
    p, pattern, own = row.point, pattern_of(row.point), threads(row)
    segments, rates = (
        " and ".join(f"{x:,}" for x in xs)
        for xs in (pattern.segment_lengths, pattern.dilation_rates)
    )
    each = f"; {counted(own, 'thread')} a rank" if own else ""
    return (
        f"Every call: batch {p.batch}, {p.heads} heads of {p.head_dim}, {SHORT[p.dtype]}, dilated attention with "
        f"segments of {segments} tokens at rates {rates}, forward{each}."
    )


def _at(tokens: int, ranks: int) -> str:
    return f"{tokens:,} tokens on {counted(ranks, 'rank')}"


# --------------------------------------------------------------------------------------
# 001 and 004: one function over length and ranks


def _peaks(found: dict) -> dict[tuple[int, int], int]:
    """(tokens, ranks) -> peak of the rank that holds most."""
    return {key: peak for key, row in found.items() if (peak := peak_bytes(row))}


def _speed_ups(study: Study, found: dict) -> dict[tuple[int, int], object]:
    """(tokens, ranks) -> how many times as fast several ranks are as one."""
    both = {
        (n, p): (found.get((n, 1)), row)
        for (n, p), row in found.items()
        if p > 1 and timed(row)
    }
    return {key: faster for key, rows in both.items() if (faster := study.ratio(*rows))}


def _shards_line(study: Study, system: str) -> str:
    found = {
        k: row
        for k, row in rows_of(study, system).items()
        if not columns.simulated(row)
    }
    held, faster = _peaks(found), _speed_ups(study, found)
    less = {
        (n, p): held[n, 1] / peak
        for (n, p), peak in held.items()
        if p > 1 and (n, 1) in held
    }
    if not less:
        return "**Memory and time on several ranks**: not measured."
    n = max(n for n, _ in less)
    memory = [f"{number(x)}× on {p}" for (length, p), x in less.items() if length == n]
    said = [f"the memory of a rank falls {' and '.join(memory)} ranks"]
    if most := max((p for length, p in faster if length == n), default=0):
        cell = times(faster[n, most])
        said.insert(
            0,
            f"{most} ranks are {cell.text} as fast as one ({cell.sub.replace(';', ',')})",
        )
    sent = {
        k: b
        for k, row in found.items()
        if k[1] > 1 and (b := sent_bytes(row)) is not None
    }
    some = {k: b for k, b in sent.items() if b}
    if len(some) == len(sent):
        return f"**At {n:,} tokens {' and '.join(said)}.**"
    segment = max(pattern_of(found[n, 1].point).segment_lengths)
    said = (
        f"**At {n:,} tokens {', '.join(said)}**. Ranks exchange nothing while every segment (of at most {segment:,} "
        "tokens) lies in one shard, the part of the sequence that a rank holds."
    )
    for key, sent_there in some.items():
        fall = f", and its memory falls {number(less[key])}×" if key in less else ""
        said += (
            f" Segments are cut at {_at(*key)}: a rank sends {size(sent_there)}{fall}."
        )
    return said


def _longest_run(found: dict) -> str:
    """The longest sequence that was measured, and what failed."""
    held = _peaks(found)
    failed = ", ".join(
        f"{_at(*key)} ({status(row)})" for key, row in found.items() if objection(row)
    )
    said = [f"Not shown: {failed}."] if failed else []
    if held:
        last = max(held, key=lambda k: (k[0], -k[1]))
        heads = ", with one head" if found[last].point.heads == 1 else ""
        said.insert(
            0,
            f"The longest run here, {_at(*last)}{heads}, held {size(held[last])} a rank.",
        )
    return " ".join(said)


AT = (Column(">Tokens", lambda x: x["tokens"]), Column(">Ranks", lambda x: x["ranks"]))


def _paper(header: str, key: str) -> Column:
    """A column of what the document prints, in its own unit."""
    return Column(
        header, lambda x: f"{x['paper'][key]:,}" if key in x["paper"] else None
    )


def lengths(study: Study) -> Table:
    """001 and 004: time and peak memory by length and ranks, beside what the document
    prints.
    """
    paper = _document(study)
    system = paper["system"]
    beside = (
        [] if study.rehearsal else paper["rows"]
    )  # times of a CPU are nothing to set beside a GPU's
    printed = {
        (x["seq_len"], x.get("ranks", paper["shape"].get("ranks"))): x for x in beside
    }
    found = {
        key: row
        for key, row in rows_of(study, system).items()
        if not columns.simulated(row)
    }
    apart = any(p > 1 and sent_bytes(row) == 0 for (_, p), row in found.items())
    crossing = (
        f" [Document 003]({DOCUMENTS['003'].report}.md) has a pattern that crosses shards."
        if apart
        else ""
    )
    lines = [
        {
            "tokens": n,
            "ranks": p,
            "row": found.get((n, p)),
            "paper": printed.get((n, p), {}),
            "one": found.get((n, 1)) if p > 1 and timed(found.get((n, p))) else None,
        }
        for n, p in (sorted({*found, *printed}) if found else ())
    ]
    return table(
        f"{system} of this library by length and ranks{', and as published' if printed else ''}",
        [
            *AT,
            TIME.of("row"),
            ROOFLINE.of("row"),
            ratio(study, "one", "row", ">Faster than one rank"),
            PEAK.of("row"),
            columns.RATE.of("row"),
            *(
                [
                    _paper(">Published tokens/s", "tokens_per_s"),
                    _paper(">Published (MB)", "mb"),
                ]
                if printed
                else []
            ),
        ],
        lines,
        note=f"{_work([*found.values()])} Peak memory: of the rank that holds most, with its q, k, v and out.{crossing}"
        + (f" Published: {paper['device']}. {paper['note']}" if printed else ""),
    )


def speed_figure(study: Study) -> None:
    """001 and 004: how many times as fast several ranks are as one."""
    faster = _speed_ups(study, rows_of(study, _document(study)["system"]))
    if not faster:
        return
    items = [
        figures.Bar(_at(*key), x.value, x.low, x.high) for key, x in faster.items()
    ]
    low, high = min(b.value for b in items), max(b.value for b in items)
    counts = " or ".join(f"{p}" for p in sorted({p for _, p in faster}))
    caption = f"{counts} ranks are {number(low)} to {number(high)} times as fast as one; {counts} would be perfect."
    said = "; ".join(f"{b.label} {number(b.value)}×" for b in items)
    fig = figures.bars(
        items, xlabel="Times as fast as one rank", line=1, fmt="{:.2f}×".format
    )
    figures.show(
        fig, f"{study.suite}-speed", caption, f"{caption} {said}.", stamp=study.stamp
    )


KINDS = {
    SDPA: "the ring on torch's SDPA kernel",
    CORRECT: "the ring on the eager kernel",
    HILBERT: "another pattern, along a Hilbert curve",
    "dense_sdpa": "dense attention: every key",
}


def names(study: Study) -> Table:
    """001: the document's systems where all were measured, and dense attention."""
    by_system = {system: rows_of(study, system) for system in KINDS}
    n = max((n for n, _ in by_system[CORRECT]), default=0)
    lines = [
        {
            "system": system,
            "row": row,
            "base": by_system[SDPA].get(key) if system != SDPA else None,
        }
        for system, found in by_system.items()
        for key, row in found.items()
        if key[0] == n
    ]
    own = {threads(x["row"]) for x in lines} - {None}
    each = (
        f" Each rank has {counted(*own, 'thread')}, and so has dense attention."
        if len(own) == 1
        else ""
    )
    system = Column(
        "System",
        lambda x: Cell(
            KINDS[x["system"]], "" if x["system"] == "dense_sdpa" else x["system"]
        ),
    )
    of_row = [x.of("row") for x in (columns.RANKS, TIME, ROOFLINE, PEAK)]
    return table(
        f"The systems of the document at {n:,} tokens, all run by this library",
        [system, *of_row, ratio(study, "row", "base", ">Over the first")],
        sorted(lines, key=lambda x: columns.ranks(x["row"])),
        note="Over the first: times as long as the ring on torch's kernel on as many ranks. The two rings compute one "
        f"function.{each}",
    )


# --------------------------------------------------------------------------------------
# 003: three schemes for one function

PLAN, RING, GATHER = "plan", "ring", "all-gather"
SCHEMES = {PLAN: "ringlab", RING: ROBUST, GATHER: V2_COLLECTIVE}


def by_scheme(study: Study) -> list[dict]:
    """For each length, number of ranks and mask the rows of the schemes, by name; the
    most ranks last.
    """
    found: dict[tuple, dict] = {}
    for causal in (False, True):
        for name, system in SCHEMES.items():
            for (n, p), row in rows_of(study, system, causal=causal).items():
                found.setdefault(
                    (p, n, causal), {"tokens": n, "ranks": p, "causal": causal}
                )[name] = row
    return [line for _, line in sorted(found.items())]


def _shared(lines: list[dict], value) -> list[dict]:
    """The lines of several ranks in which every scheme has this value."""
    return [
        x
        for x in lines
        if x["ranks"] > 1 and all(value(x.get(name)) for name in SCHEMES)
    ]


def _each(line: dict, value) -> dict[str, int]:
    """The bytes of each scheme of a line; those that have as many share a name."""
    found: dict[int, list[str]] = {}
    for name in SCHEMES:
        found.setdefault(value(line[name]), []).append(name)
    return {" and ".join(names): count for count, names in found.items()}


def _schemes_lines(study: Study) -> list[str]:
    lines = by_scheme(study)
    several = [
        x
        for x in _shared(lines, lambda row: peak_bytes(row) and sent_bytes(row))
        if not x["causal"]
    ]
    found = ["**Several ranks**: not measured."]
    if several:
        last = several[-1]
        each = [_each(last, value).items() for value in (sent_bytes, peak_bytes)]
        sent, held = (
            ", ".join(f"{size(x)} by {name}" for name, x in found) for found in each
        )
        pairs = [
            (x.get(name), x.get(PLAN))
            for x in lines
            if x["ranks"] > 1
            for name in (RING, GATHER)
        ]
        told = [beyond(r) != 0 for a, b in pairs if (r := study.ratio(a, b))]
        found = [
            f"**A rank sends {sent}**, at {_at(last['tokens'], last['ranks'])}: the plan "
            "sends only the rows that a query of another rank sees.",
            f"**A rank holds {held}** there; its q, k, v and out alone are {size(columns.floor_bytes(last[PLAN]))}. In "
            f"time, {len(told) - sum(told)} of {len(told)} differences from the plan are within noise.",
        ]
    single = [x for x in lines if x["ranks"] == 1 and not x["causal"]]
    alone = [(x, r) for x in single if (r := study.ratio(x.get(RING), x.get(GATHER)))]
    if not alone:
        return [*found, "**One device**: not measured."]
    x, faster = alone[-1]
    cell, memory = times(faster), peak_bytes(x[RING]) / peak_bytes(x[GATHER])
    return [
        *found,
        f"**On one device ring and all-gather are one call under two names**: {cell.text} the time "
        f"({cell.sub.replace(';', ',')}) and {memory:.2f}× the memory at {x['tokens']:,} tokens.",
    ]


MASKED = Column(
    ">Tokens", lambda x: Cell(f"{x['tokens']:,}", "causal" if x["causal"] else "")
)


def schemes(study: Study) -> Table:
    """003: time and peak memory of each scheme on several ranks."""
    lines = [x for x in by_scheme(study) if x["ranks"] > 1]
    over = [
        ratio(study, name, PLAN, f">{name.capitalize()} over plan")
        for name in (RING, GATHER)
    ]
    peaks = [PEAK.of(name, f">Peak memory, {name}") for name in SCHEMES]
    return table(
        "Several ranks: time of the plan, times of the others over its, and peak memory of a rank",
        [MASKED, AT[1], TIME.of(PLAN, ">Plan (ms)"), *over, ROOFLINE.of(PLAN), *peaks],
        lines,
        note="Plan: this library's scheme, which finds out beforehand which rows of K and V each rank needs, and sends "
        "no others. Ring: ranks pass their shards on. All-gather: each rank gets all shards. A shard is the part of "
        "the sequence that a rank holds. Not causal but where marked. "
        f"{_work([x[PLAN] for x in lines if PLAN in x])}",
    )


def bytes_figure(study: Study) -> None:
    """003: bytes that the busiest rank sends, by scheme and shape."""
    lines = _shared(by_scheme(study), sent_bytes)
    if not lines:
        return

    def shape(line: dict) -> str:
        return _at(line["tokens"], line["ranks"]) + (
            ", causal" if line["causal"] else ""
        )

    items = [
        figures.Bar(
            f"{shape(line)}: {name}",
            sent / 2**20,
            color=figures.BLUE if PLAN in name else figures.GREY,
        )
        for line in lines
        for name, sent in _each(line, sent_bytes).items()
    ]
    less = [
        max(sent_bytes(x[name]) for name in SCHEMES) / sent_bytes(x[PLAN])
        for x in lines
    ]
    caption = f"The plan sends {number(min(less))} to {number(max(less))} times less than the others."
    said = "; ".join(f"{b.label} {number(b.value)} MiB" for b in items)
    fig = figures.bars(items, xlabel="Sent by a rank in one call (MiB)", fmt=number)
    figures.show(
        fig, "comparison-bytes", caption, f"{caption} {said}.", stamp=study.stamp
    )


HEADS, HEAD_DIM, BYTES = 32, 128, 2
LADDERS = ((2**17, 8), (2**20, 8), (2**20, 64), (2**22, 64), (2**24, 64), (2**24, 512))


def volumes(study: Study) -> Table:
    """003: bytes of K and V that the busiest rank receives under LongNet's ladder,
    computed for long sequences.
    """

    def received(header: str, way: str) -> Column:
        return Column(
            header,
            lambda moved: size(getattr(moved, way) * 2 * HEADS * HEAD_DIM * BYTES),
        )

    return table(
        "Computed: K and V that a rank receives, by length, ranks and scheme",
        [
            Column(">Tokens", lambda x: x.seq_len),
            Column(">Ranks", lambda x: x.ranks),
            received(">Plan", "plan"),
            received(">Segment gather (LongNet)", "segment_gather"),
            received(">World gather (torchscale)", "world_gather"),
            received(">Ring or all-gather", "ring"),
        ],
        [ladder_rows(*each) for each in LADDERS],
        note=f"One forward call, {HEADS} heads of {HEAD_DIM}, fp16, not causal. Segments of 2,048, 4,096 ... up to "
        "the sequence, at rates 1, 2 ... The closed form agrees with the plans that the library makes.",
    )
