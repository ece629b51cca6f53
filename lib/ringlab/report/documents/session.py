"""The page of document 002: block-sparse attention, and attention at extreme lengths."""

from __future__ import annotations

from dataclasses import replace

import torch

from ... import cost, hardware
from ... import patterns as functions
from ...adaptive import Adaptive
from ...measure import cache_systems
from ...measure import suites as suite
from .. import columns, figures
from ..columns import (
    MASK,
    PASS,
    PEAK,
    ROOFLINE,
    TIME,
    Column,
    floor_bytes,
    peak_bytes,
    shown,
    table,
    timed,
    times,
)
from ..findings import failures, limits, provenance, reading
from ..published import MB, published
from ..rows import SHORT, dense_beside
from ..study import Study, best, cost_of, pattern_of
from ..tables import Cell, Table, Text, counted, interval, number, size
from .optimization import answer_of, draw_lengths, fits_line

__all__ = [
    "answer",
    "block_sparse",
    "efficiency",
    "extreme",
    "failures",
    "length_figure",
    "limits",
    "patterns",
    "provenance",
    "reading",
    "reuse",
]
OURS = "ringlab"
SYSTEMS = {
    OURS: "This library",
    suite.ORIGINAL: "Row by row",
    suite.OPTIMIZED: "Batched",
    suite.TORCH_SPARSE: "torch.sparse",
    "dense_sdpa": "Dense SDPA",
    "flex": "FlexAttention",
}


# --------------------------------------------------------------------------------------
# which rows are which


def document() -> dict:
    """Document 002 as data."""
    return published("002")


def one(study: Study, group: str, system: str = OURS, options=(), **wanted):
    """The row of a group with just these options, None where it is not there."""
    found = study.rows(group=group, system=system, **wanted)
    return best([r for r in found if dict(r.point.options) == dict(options)])


def in_table(study: Study, system: str, dtype: str = ""):
    """A system's row of the document's table, by default in the dtype of dense
    attention in it.
    """
    dense = one(study, suite.SPARSE_TABLE, "dense_sdpa")
    return one(
        study,
        suite.SPARSE_TABLE,
        system,
        dtype=dtype or (dense.point.dtype if dense else "float32"),
    )


def way(study: Study, name: str, **more):
    """The row of one way of execution among the optimization steps."""
    return one(study, suite.JOURNEY, options={"blocks": name, **more})


def shares(study: Study) -> dict[str, float]:
    """Way -> building its plan, as a part of the time of a first call, which builds and
    then computes.
    """
    found = {}
    for name in suite.BLOCK_WAYS:
        cold = one(study, suite.JOURNEY, "plan_build", {"blocks": name, "warm": False})
        if timed(cold) and timed(call := way(study, name)):
            found[name] = cold.median / (cold.median + call.median)
    return found


def operators(row, views: bool = True) -> int | None:
    """Aten operators of one call, with views or without; None where they were not
    counted.
    """
    count = row.memory.get("operator_calls") if shown(row) else None
    return (
        None
        if count is None
        else count
        if views
        else count - row.memory.get("view_calls", 0)
    )


def extreme_rows(study: Study) -> dict[int, object]:
    """Tokens -> our row."""
    return {
        n: row
        for n in suite.EXTREME_TOKENS
        if (row := one(study, suite.EXTREME_LENGTHS, seq_len=n)) is not None
    }


def over_dense(study: Study) -> list[tuple]:
    """(n, Ratio or None, dense row or None, our row) by n; dense attention of this
    suite, else of another.
    """
    ours = sorted(
        study.rows(group=suite.WINDOW_LENGTHS, system=OURS),
        key=lambda r: r.point.seq_len,
    )
    lines = [
        (dense_beside(study, row) or dense_beside(study.whole or study, row), row)
        for row in ours
    ]
    return [
        (row.point.seq_len, study.ratio(dense, row), dense, row) for dense, row in lines
    ]


# --------------------------------------------------------------------------------------
# what the work of a shape is


def density(point) -> float:
    """Visible pairs over all pairs."""
    if point.system == "adaptive":
        return (
            Adaptive(**dict(point.options)).pairs(point.seq_len, point.causal)
            / point.seq_len**2
        )
    return cost_of(point).distinct_pairs / (
        point.batch * point.heads * point.seq_len**2
    )


def pair_cost(study: Study, row, dense):
    """Time for a visible pair over that of a row of dense attention of the same length
    and pass, a Ratio or None.
    """
    if (ratio := study.ratio(row, dense)) is None:
        return None
    factor = density(dense.point) / density(row.point)
    return replace(
        ratio, **{k: getattr(ratio, k) * factor for k in ("value", "low", "high")}
    )


def heads(point) -> str:
    return "one head" if point.heads == 1 else f"{point.heads} heads"


def percent(share: float, digits: int = 3) -> str:
    return f"{number(100 * share, digits)} %"


def work(seq_len: int | None = None) -> cost.Cost:
    """FLOPs and bytes of the function that the document's benchmark states, at its own
    length by default.
    """
    ring, shape = document()["ring_shape"], document()["shape"]
    pattern = functions.Dilated(
        ring["segment_lengths"], ring["dilation_rates"], "head_groups", "branch"
    )
    fields = {k: shape[k] for k in ("batch", "heads", "head_dim")} | {
        "dtype": getattr(torch, shape["dtype"])
    }
    return cost.count(pattern, seq_len=seq_len or ring["seq_len"], **fields)


def card():
    """The profile of the document's GPU."""
    return hardware.get_profile(document()["profile"])


def least_ms(found: cost.Cost) -> float:
    """The shortest time of a work in ms that the printed rates of the document's GPU
    allow.
    """
    rate, bandwidth = (
        card().peak(document()["shape"]["dtype"]),
        card().bandwidth(found.floor_bytes),
    )
    return 1e3 * found.seconds(rate, bandwidth)


def held(row) -> str | None:
    """What a row holds, in words: as it is, and at the document's heads and dtype, as
    many times q, k, v and out.
    """
    peak, floor = peak_bytes(row), floor_bytes(row)
    if not peak or not floor:
        return None
    shape, p = document()["shape"], row.point
    there = peak / floor * work(seq_len=p.seq_len).floor_bytes
    return (
        f"{number(peak / MB)} MB with {heads(p)} in {SHORT[p.dtype]}, in proportion "
        f"{number(there / MB)} MB with {shape['heads']} in {SHORT[shape['dtype']]}"
    )


# --------------------------------------------------------------------------------------
# the answer


def answer(study: Study) -> Text:
    """A window beside dense, the impossible factor, the steps; trust, and what was not
    measured.
    """
    computed = (
        fits_line(study, suite.FAR, document()["ring_shape"]["seq_len"])
        if study.rehearsal
        else ""
    )
    return answer_of(
        study, computed, _window_line(study), _extreme_line(study), _journey_line(study)
    )


def _window_line(study: Study) -> str:
    known = [(n, x, d, r) for n, x, d, r in over_dense(study) if x]
    if not known:
        return "**Block-sparse attention**: not measured beside dense attention."
    n, ratio, dense, ours = known[-1]
    paired = "" if ratio.paired else ", not timed in turns with it"
    return (
        f"**A window that shows {percent(density(ours.point), 2)} of the pairs is {number(ratio.value, 2)} times as "
        f"fast as torch's dense attention** at {n:,} tokens: {number(ours.median * 1e3)} ms against "
        f"{number(dense.median * 1e3)} ms{paired} ({interval(*ratio.ci, digits=2)})."
    )


def _extreme_line(study: Study) -> str:
    printed = next(x for x in document()["ring"] if x.get("speedup", 0) > 1)
    ours = ""
    if found := {n: r for n, r in extreme_rows(study).items() if timed(r)}:
        n, row = max(found.items(), key=lambda x: x[0])
        ours = f" A window over {n:,} tokens with {heads(row.point)} took {number(row.median)} s here."
    return (
        f"**{printed['speedup']}× cannot be right**: {printed['ms']} ms for {document()['ring_shape']['seq_len']:,} "
        f"tokens, where an {card().title} needs at least {number(least_ms(work()))} ms for the stated work.{ours}"
    )


def _journey_line(study: Study) -> str:
    first, last = in_table(study, suite.ORIGINAL), in_table(study, OURS)
    if (ratio := study.ratio(first, last)) is None:
        return "**The optimization steps**: not measured."
    counted = [operators(r) for r in (first, last)]
    fewer = (
        f", {counted[0]:,} operator calls become {counted[1]:,}" if all(counted) else ""
    )
    return (
        f"**The optimization steps**, from one call for each block of queries to views, make it {number(ratio.value)}× "
        f"as fast ({interval(*ratio.ci)}){fewer}. All steps compute one function."
    )


# --------------------------------------------------------------------------------------
# block-sparse attention and its steps


def _calls(row) -> Cell | None:
    every, some = operators(row), operators(row, views=False)
    return None if every is None else Cell(f"{every:,}", f"{every - some:,} views")


DENSITY = Column(">Of all pairs", lambda r: percent(density(r.point)))
CALLS = Column(">Operator calls", _calls)


def block_sparse(study: Study) -> Table:
    """The document's table of block-sparse attention with ours beside it, and what a
    cached plan gains.
    """
    d, original = document(), in_table(study, suite.ORIGINAL)
    lines = [
        (in_table(study, x["system"]) or in_table(study, x["system"], "float32"), x)
        for x in d["block_rows"]
    ]
    ours = [in_table(study, OURS)]
    if original is not None and original.point.dtype != "float32":
        ours += [
            in_table(study, system, "float32") for system in (suite.OPTIMIZED, OURS)
        ]
    lines += [
        (row, {})
        for row in (
            *ours,
            way(study, "rows", cache=False),
            way(study, "views", cache=False),
        )
    ]
    lines = [
        {"row": row, "printed": x, "original": None if row is original else original}
        for row, x in lines
        if row or x and not study.rehearsal
    ]  # what is published is of the GPU

    def name(line: dict) -> Cell:
        row, paper = line["row"], line["printed"]
        ours = SYSTEMS[row.point.system if row else paper["system"]]
        if row and row.option("cache") is False:
            ours = {"rows": "Row by row", "views": ours}[
                row.option("blocks")
            ] + ", the plan built in each call"
        more = paper.get("name", ""), SHORT[row.point.dtype] if row else ""
        return Cell(ours, "; ".join(filter(None, more)))

    def faster(line: dict) -> Cell | None:
        row, first = line["row"], line["original"]
        same = row and first and row.point.dtype == first.point.dtype
        ratio = study.ratio(first, row) if same else None
        return times(ratio) if ratio and ratio.paired else None

    def paper(key: str, unit: str = ""):
        return lambda line: (
            f"{line['printed'][key]:g}{unit}" if key in line["printed"] else None
        )

    beside = "" if study.rehearsal else ", and as published"
    computed = "; ".join(f"{x['name']} {x['computes']}" for x in d["block_rows"])
    return table(
        f"Block-sparse attention, {d['block_sparse']['seq_len']:,} tokens: here{beside}",
        [
            Column("Here (published name)", name),
            TIME.of("row"),
            Column(">Faster than row by row", faster),
            ROOFLINE.of("row"),
            PEAK.of("row"),
            CALLS.of("row"),
            *(
                []
                if study.rehearsal
                else [
                    Column(">Published (ms)", paper("ms")),
                    Column(">Published (MB)", paper("mb")),
                    Column(">Published factor", paper("over_original", "×")),
                ]
            ),
        ],
        lines if any(line["row"] for line in lines) else [],
        note=f"Blocks of {d['block_sparse']['block_size']}, a window of two blocks each way. Here all but dense SDPA "
        "compute one function. According to its source code the published code computes, in fp16: "
        f"{computed}. Operator calls are those of one forward call, views included.",
    )


def reuse(study: Study) -> Text:
    """What a cache for many patterns and a pool for scratch buffers come to, each in a
    line.
    """
    (_, none), *kept = (
        (
            mb,
            one(
                study,
                suite.SESSION_REUSE,
                "cache_workload",
                {"blocks": "batched", "max_mb": mb},
            ),
        )
        for mb in suite.CACHES_MB
    )
    said = [
        f"{mb:g} MiB hit {percent(m['cache_hits'] / (m['cache_hits'] + m['cache_misses']))}, {times(ratio).plain}"
        for mb, row in kept
        if (ratio := study.ratio(none, row)) and "cache_hits" in (m := row.memory)
    ]
    cache = f"{cache_systems.LOOKUPS} lookups of many patterns, as fast as without a cache: {'; '.join(said)}"
    pool, buffers = [], "not measured"
    for mb in suite.SCRATCH_MB:
        for threads in suite.THREADS:
            fresh, lent = (
                one(
                    study,
                    suite.SESSION_REUSE,
                    "pool_workload",
                    {"size_mb": mb, "threads": threads, "pool": on},
                )
                for on in (False, True)
            )
            if ratio := study.ratio(fresh, lent):
                pool.append((f"{mb:g} MiB on {counted(threads, 'thread')}", ratio))
    if pool:
        won, lost = (
            [name for name, x in pool if columns.beyond(x) == sign] for sign in (1, -1)
        )
        ends = " to ".join(number(f(x.value for _, x in pool)) for f in (min, max))
        lines = [
            f"{word} for {', '.join(names)}"
            for word, names in (("faster", won), ("slower", lost))
            if names
        ]
        buffers = (
            f"{ends}× as fast as fresh memory: {'; '.join(lines) or 'all within noise'}"
        )
    lines = (
        f"**Pattern cache**: {cache if said else 'not measured'}.",
        f"**Scratch buffers from the pool**: {buffers}.",
    )
    return Text(lines, bullets=True)


# --------------------------------------------------------------------------------------
# beside dense attention


def efficiency(study: Study) -> Table:
    """Time over dense time times the share of the pairs, of ours and of torch's
    compiled kernel.
    """
    found = study.rows(group=suite.EFFICIENCY)
    dense = [r for r in found if r.point.system == "dense_sdpa"]

    def system(row) -> Cell:
        fresh = dict(row.point.options) == suite.FRESH
        return Cell(
            SYSTEMS[row.point.system], "results in fresh memory" if fresh else ""
        )

    p = dense[0].point if dense else None

    def over(row):
        alike = [r for r in dense if r.point.passes == row.point.passes]
        return None if row in dense else times(pair_cost(study, row, best(alike)))

    return table(
        "What a tenth of the pairs costs"
        + (f", {p.seq_len:,} tokens, {SHORT[p.dtype]}" if p else ""),
        [
            Column("System", system),
            Column("Mask", lambda r: str(pattern_of(r.point))),
            DENSITY,
            replace(MASK, header="Causal"),
            PASS,
            TIME,
            ROOFLINE,
            Column(">Cost of a pair, dense = 1", over),
        ],
        sorted(found, key=lambda r: [*SYSTEMS].index(r.point.system)),
        note="In fresh memory (`Execution(results=False)`) a large result costs page faults; else it takes the memory "
        "of a freed one.",
    )


def length_figure(study: Study) -> None:
    """A fixed window and dense attention over length, with the window's roofline and
    the document's two ways.
    """
    found = over_dense(study)
    also = [
        r
        for system in (suite.ORIGINAL, suite.OPTIMIZED)
        for r in study.rows(group=suite.WINDOW_LENGTHS, system=system)
    ]
    apart = [d for _, x, d, _ in found if x and not x.paired]
    system = Column(
        "System",
        lambda r: Cell(
            SYSTEMS[r.point.system],
            SHORT[r.point.dtype]
            + "; not timed in turns with ours" * any(r is d for d in apart),
        ),
    )
    data = table(
        "Data: time over length",
        [system, columns.TOKENS, DENSITY, TIME, ROOFLINE, PEAK],
        [*(r for *_, r in found), *also, *(d for _, _, d, _ in found if d is not None)],
    )
    looks = {
        "Dense SDPA": figures.GREY,
        "Row by row": figures.ORANGE,
        "Batched": figures.GREEN,
        "This library": figures.BLUE,
    }
    what = f"{pattern_of(found[0][3].point)}, forward" if found else ""
    draw_lengths(
        study,
        "session-length",
        found,
        what,
        looks,
        lambda r: SYSTEMS[r.point.system],
        data,
        also,
    )


def patterns(study: Study) -> Table:
    """One row for each kind of pattern: its share of the pairs, and its time."""
    lines = [
        {
            "name": name,
            "said": str(p),
            "row": one(study, suite.BLOCK_PATTERNS, pattern=p.to_dict()),
        }
        for name, p in suite.KINDS.items()
    ]
    chosen = one(study, suite.BLOCK_PATTERNS, "adaptive", suite.ADAPTIVE)
    lines.append(
        {"name": "by content", "said": str(Adaptive(**suite.ADAPTIVE)), "row": chosen}
    )
    return table(
        "Every kind of pattern",
        [
            Column("Pattern", lambda line: line["name"]),
            Column("Blocks", lambda line: line["said"]),
            DENSITY.of("row"),
            TIME.of("row"),
            ROOFLINE.of("row"),
            PEAK.of("row"),
        ],
        [line for line in lines if line["row"] is not None],
        note="The share of the pairs is what the pattern comes to at this length; the original's `sparsity_ratio` was "
        "ignored by its generators. By content: every head chooses its blocks in each call, which its time includes.",
    )


# --------------------------------------------------------------------------------------
# extreme lengths


def extreme(study: Study) -> Table:
    """The lengths of the headlines: run and checked, beside the least memory and the
    published figures.
    """
    printed = {x["seq_len"]: x for x in document()["extreme"]}
    found = list(extreme_rows(study).values())
    p = found[0].point if found else None
    named = (
        f": {pattern_of(p)}, {heads(p)} of {p.head_dim}, {SHORT[p.dtype]}" if p else ""
    )
    return table(
        f"Extreme lengths, forward{named}",
        [
            columns.TOKENS,
            TIME,
            ROOFLINE,
            PEAK,
            Column(
                ">q, k, v and out in fp16, 8 heads",
                lambda r: size(work(seq_len=r.point.seq_len).floor_bytes),
            ),
            Column(
                ">Published (MB)", lambda r: printed.get(r.point.seq_len, {}).get("mb")
            ),
        ],
        found,
        note="A published memory that is smaller than q, k, v and out leaves the inputs out. The check compares "
        "sampled rows of every head with the float64 reference.",
    )
