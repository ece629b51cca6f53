"""Document 002, the third of five published: block-sparse attention, and attention at extreme lengths."""

from __future__ import annotations

from dataclasses import replace

from ...adaptive import Adaptive
from ...measure import cache_systems
from ...measure import suites as suite
from ...measure.points import Point
from ...patterns import Dense
from .. import claims_code, columns, curves, figures, findings
from .. import study as studies
from ..columns import MASK, PASS, PEAK, ROOFLINE, TIME, Column, shown, table, times
from ..findings import failures
from ..optimization import lent
from ..origins import provenance
from ..reading import reading
from ..rows import SHORT, begins
from ..study import Study, pattern_of
from ..tables import Cell, Table, Text, interval, number, size
from . import rows

__all__ = [
    "answer", "block_sparse", "cache_workload", "efficiency", "extreme", "failures", "journey", "ledger",
    "length_figure", "limits", "open_study", "patterns", "pool_workload", "provenance", "reading", "ring",
]  # fmt: skip
SYSTEMS = {rows.OURS: "This library", suite.ORIGINAL: "Row by row", suite.OPTIMIZED: "Batched",
           suite.TORCH_SPARSE: "torch.sparse", "dense_sdpa": "Dense SDPA", "flex": "FlexAttention"}  # fmt: skip
BACKWARD = 3.5  # dense forward and backward over dense forward where it is not timed: 14 FLOPs a pair for 4
DENSITY = Column(">Of all pairs", lambda r: rows.percent(rows.density(r.point)))
CALLS = Column(">Operator calls", rows.calls)
NAME = Column("System", lambda r: Cell(SYSTEMS[r.point.system], SHORT[r.point.dtype]))


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this document's suite."""
    return studies.open_study(profile, data, "session_summary")


# ---------------------------------------------------------------------------------------------------------------------
# the answer


def answer(study: Study) -> Text:
    """At most five lines: a window beside dense, the impossible factor, the steps, error, what was not measured."""
    lines = [_window_line(study), _extreme_line(study), _journey_line(study), findings.trust_line(study),
             findings.gaps_line(study)]  # fmt: skip
    return study.text(*lines, kind="answer", bullets=True)


def _window_line(study: Study) -> str:
    known = [(n, x, d, r) for n, x, d, r in over_dense(study) if x]
    if not known:
        return "**Block-sparse attention**: not measured beside dense attention."
    n, ratio, dense, ours = known[-1]
    paired = "" if ratio.paired else ", in another group of calls"
    return (
        f"**A window that shows {rows.percent(rows.density(ours.point), 2)} of the pairs is "
        f"{number(ratio.value, 2)} times as fast as dense attention** at {n:,} tokens: {number(ours.median * 1e3)} ms "
        f"against {number(dense.median * 1e3)} ms{paired} ({interval(*ratio.ci, digits=2)})."
    )


def _extreme_line(study: Study) -> str:
    printed = next(x for x in rows.document()["ring"] if x.get("speedup", 0) > 1)
    least = rows.least_seconds(rows.work(), rows.card())
    found = {n: r for n, r in rows.extreme(study).items() if columns.timed(r)}
    ours = ""
    if found:
        n, row = max(found.items(), key=lambda x: x[0])
        ours = f" A window over {n:,} tokens with {rows.heads(row.point)} took {number(row.median)} s here."
    return (
        f"**{printed['speedup']}× cannot be right**: {printed['ms']} ms for {rows.stated()[1]['seq_len']:,} tokens, "
        f"where a {rows.card().title} needs at least {number(least * 1e3)} ms for the stated work.{ours}"
    )


def _journey_line(study: Study) -> str:
    first, last = rows.way(study, "rows"), rows.way(study, "views")
    ratio = study.ratio(first, last)
    if ratio is None:
        return "**The optimization steps**: not measured."
    counted = [rows.operators(r) for r in (first, last)]
    fewer = f", {counted[0]:,} operator calls become {counted[1]:,}" if all(counted) else ""
    return (
        f"**The optimization steps**, from one call for each block of queries to views, make it {number(ratio.value)}× "
        f"as fast ({interval(*ratio.ci)}){fewer}. All steps compute one function."
    )


# ---------------------------------------------------------------------------------------------------------------------
# the table of block-sparse attention


def entries(study: Study) -> list[dict]:
    """The document's rows with ours beside them, and what is in fp32 besides."""
    main = rows.dtype_of(study)
    found = []
    for paper in rows.document()["block_rows"]:
        ours = rows.in_table(study, paper["system"]) or rows.in_table(study, paper["system"], "float32")
        found.append({"printed": paper, "ours": ours})
    found.append({"ours": rows.in_table(study, rows.OURS)})
    if main != "float32":
        found += [{"ours": rows.in_table(study, system, "float32")} for system in (suite.OPTIMIZED, rows.OURS)]
    return found


def _over_original(study: Study, row) -> Cell | None:
    original = rows.in_table(study, suite.ORIGINAL)
    if None in (row, original) or row is original or row.point.dtype != original.point.dtype:
        return None
    return times(study.ratio(original, row))


def block_sparse(study: Study) -> Table:
    """The document's table of block-sparse attention, with ours beside it."""

    def name(line: dict) -> Cell:
        row, paper = line["ours"], line.get("printed", {})
        ours = SYSTEMS[row.point.system] if row else SYSTEMS.get(paper.get("system"), "")
        more = paper.get("name", "").replace("`", ""), SHORT[row.point.dtype] if row else ""
        return Cell(ours, "; ".join(filter(None, more)))

    def paper(key: str, unit: str = ""):
        return lambda line: f"{line['printed'][key]:g}{unit}" if key in line.get("printed", {}) else None

    d, lines = rows.document(), entries(study)
    computed = "; ".join(f"{x['name']} {x['computes']}" for x in d["block_rows"]).replace("`", "")
    return table(
        study,
        f"Block-sparse attention, {d['block_sparse']['seq_len']:,} tokens: here, and as published",
        [Column("Here (published name)", name), TIME.of("ours", ">Time (ms)"),
         Column(">Faster than row by row", lambda line: _over_original(study, line["ours"])),
         ROOFLINE.of("ours", ">Roofline (ms)"), PEAK.of("ours", ">Peak memory"), CALLS.of("ours", ">Operator calls"),
         Column(">Published (ms)", paper("ms")), Column(">Published (MB)", paper("mb")),
         Column(">Published factor", paper("over_original", "×"))],
        lines if any(line["ours"] is not None for line in lines) else [],
        note=f"Blocks of {d['block_sparse']['block_size']}, a window of two blocks each way. Here all but dense SDPA "
        "compute one function. According to its source code the published code computes, in fp16: "
        f"{computed}. Operator calls are those of one forward call, views included.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# the optimization steps


def steps(study: Study) -> list[dict]:
    """Each step: its name, what the document says of it, the row before and the row after."""
    j = rows.document()["journey"]
    off, on, batched, views = (rows.way(study, "rows", cache=False), *(rows.way(study, w) for w in suite.BLOCK_WAYS))
    sparse = rows.in_table(study, suite.TORCH_SPARSE, "float32")
    optimized = rows.in_table(study, suite.OPTIMIZED, "float32")

    def span(name: str) -> str:
        return f"saves {j[name][0]} to {j[name][1]} %"

    found = [
        ("Row by row, the plan built in each call", f"{j['launches']} launches", None, off),
        ("Row by row, the plan cached", span("cache"), off, on),
        (
            "Batched: keys of many blocks copied together",
            f"{span('batching')}, to {j['batched_launches']} launches",
            on,
            batched,
        ),
        ("torch.sparse tensors, fp32", "slower", optimized, sparse),
        ("Views: neighbouring blocks read in place", None, batched, views),
        ("Views, the plan built in each call", None, views, rows.way(study, "views", cache=False)),
    ]
    return [dict(zip(("name", "printed", "before", "after"), line)) for line in found]


def journey(study: Study) -> Table:
    """Each step with what it saves over the one before, in time and in operator calls."""
    lines = steps(study)

    def saves(line: dict) -> Cell | None:
        return rows.saved(study.ratio(line["before"], line["after"])) if line["before"] else None

    built = ", ".join(f"{way} {rows.percent(share, 2)}" for way, share in rows.shares(study).items())
    building = f"Building the plan is this part of a first call: {built}. " if built else ""
    j = rows.document()["journey"]
    return table(
        study, "The optimization steps, one function at every step",
        [Column("Step", lambda line: line["name"]), TIME.of("after", ">Time (ms)"),
         Column(">Saves", saves),
         CALLS.of("after", ">Operator calls"), ROOFLINE.of("after", ">Roofline (ms)"),
         Column("Published", lambda line: line["printed"])],
        lines if any(line["after"] for line in lines) else [],
        note=f"Each step is compared with the one above it; torch.sparse with batched in fp32, views with batched. "
        f"{building}Published: {j['pattern_share']} % of the time, and {j['hit_rate']} % cache hits, which "
        "any cache gives where one pattern is used throughout.",
    )  # fmt: skip


def cache_workload(study: Study) -> Table:
    """Hits, misses, evictions and time per lookup by the bytes that the cache may hold."""

    def counted(name: str):
        return lambda line: line["row"].memory.get(f"cache_{name}") if shown(line["row"]) else None

    def rate(line: dict) -> str | None:
        hits, misses = (counted(name)(line) for name in ("hits", "misses"))
        return None if None in (hits, misses) else rows.percent(hits / (hits + misses))

    def row_of(way: str, mb: float):
        return rows.one(study, suite.SESSION_REUSE, "cache_workload", {"blocks": way, "max_mb": mb})

    ways = [("batched", mb) for mb in suite.CACHES_MB] + [("views", suite.CACHES_MB[-1])]
    lines = [{"way": way, "mb": mb, "row": row} for way, mb in ways if (row := row_of(way, mb)) is not None]
    nothing = row_of("batched", 0)
    drawn = cache_systems.workload(Point("cache_workload", suite.WINDOW, seq_len=suite.LOOKED_UP))

    def faster(line: dict) -> Cell | None:
        return times(study.ratio(nothing, line["row"])) if line["way"] == "batched" and line["mb"] else None

    return table(
        study, f"The pattern cache where {len(set(drawn))} patterns are looked up {len(drawn)} times",
        [Column("Way", lambda line: line["way"]),
         Column("The cache may hold", lambda line: f"{line['mb']:g} MiB" if line["mb"] else "keeps nothing"),
         Column(">Hit rate", rate), Column(">Evictions", counted("evictions")),
         Column(">Held at the end", lambda line: size(counted("bytes")(line))),
         Column(">A lookup (µs)", lambda line: columns.time(_each(line["row"], cache_systems.LOOKUPS), 1e6)),
         Column(">Faster than keeping nothing", faster)],
        lines, folded=True,
        note=f"Six kinds of pattern at four lengths up to {suite.LOOKED_UP:,} tokens, drawn by a Zipf law with a fixed "
        "seed, each time from an empty cache. The row that keeps nothing builds in every lookup.",
    )  # fmt: skip


def _each(row, count: int):
    """A row with the time of one of ``count`` alike things that its call does."""
    if row is None or not row.median:
        return row
    return replace(row, median=row.median / count, ci=tuple(x / count for x in row.ci))


def pool_workload(study: Study) -> Table:
    """Scratch from a pool beside fresh memory, by size and by threads."""

    def row_of(mb: float, threads: int, pool: bool):
        return rows.one(study, suite.SESSION_REUSE, "pool_workload", {"size_mb": mb, "threads": threads, "pool": pool})

    lines = [
        {"mb": mb, "threads": threads, "fresh": row_of(mb, threads, False), "pool": row_of(mb, threads, True)}
        for mb in suite.SCRATCH_MB for threads in suite.THREADS
    ]  # fmt: skip

    def reused(line: dict) -> str | None:
        on = line["pool"]
        if not shown(on) or "pool_reuses" not in on.memory:
            return None
        return f"{on.memory['pool_reuses']} of {on.memory['pool_reuses'] + on.memory['pool_allocations']}"

    def micros(name: str):
        return lambda line: columns.time(_each(line[name], cache_systems.BORROWS), 1e6)

    half = Point("ringlab", suite.WINDOW, seq_len=512, heads=1, dtype="bfloat16")
    most = max(lent(half.but(options={"blocks": way}), 0.0).asked for way in ("views", "batched"))
    return table(
        study, "Scratch buffers from the pool and fresh, by size and threads",
        [Column(">Size", lambda line: f"{line['mb']:g} MiB"), Column(">Threads", lambda line: line["threads"]),
         Column(">Fresh (µs)", micros("fresh")), Column(">From the pool (µs)", micros("pool")),
         columns.ratio(study, "fresh", "pool", ">Faster with it"), Column(">Reused", reused)],
        [line for line in lines if line["fresh"] or line["pool"]], folded=True,
        note=f"Each thread takes scratch {cache_systems.BORROWS} times, writes every byte once and gives it back. A "
        f"block-sparse call in half precision takes at most {most} buffer{'s' * (most != 1)} from a pool.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# beside dense attention


def over_share(study: Study, row):
    """A row's time over (dense time, not causal, times the row's share of the pairs), a Ratio or None."""
    dense, factor = rows.one(study, suite.EFFICIENCY, "dense_sdpa", passes=row.point.passes), 1.0
    if dense is None:
        dense, factor = rows.one(study, suite.EFFICIENCY, "dense_sdpa", passes="fwd"), BACKWARD
    return rows.scaled(study.ratio(row, dense), 1 / (factor * rows.density(row.point)))


def efficiency(study: Study) -> Table:
    """Time over dense time times the share of the pairs, beside torch's compiled kernel on the same mask."""
    fresh = rows.one(study, suite.EFFICIENCY, options=suite.FRESH)
    dense = study.rows(group=suite.EFFICIENCY, system="dense_sdpa")

    def flex(row):
        p = row.point
        return rows.one(study, suite.EFFICIENCY, "flex", pattern=p.pattern, causal=p.causal, passes=p.passes)

    def mask(row) -> Cell:
        said = "results in fresh memory" if row is fresh else ""
        return Cell("dense SDPA" if row in dense else str(pattern_of(row.point)), said)

    def ours(show):
        return lambda row: None if row in dense else show(row)

    def flex_time(row):
        return columns.time(flex(row)) if flex(row) else None

    p = dense[0].point if dense else None
    untimed = all(r.point.passes == "fwd" for r in dense)
    backward = f"A dense backward is not timed; forward and backward are taken as {BACKWARD} × the forward. "
    return table(
        study, "What a tenth of the pairs costs" + (f", {p.seq_len:,} tokens, {SHORT[p.dtype]}" if p else ""),
        [Column("Mask", mask), DENSITY, replace(MASK, header="Causal"), PASS, TIME, ROOFLINE,
         Column(">Cost of a pair, dense = 1", ours(lambda row: times(over_share(study, row)))),
         *([Column(">FlexAttention (ms)", ours(flex_time)),
            Column(">Its time over ours", ours(lambda row: times(study.ratio(flex(row), row)) if flex(row) else None))]
           if study.rows(group=suite.EFFICIENCY, system="flex") else [])],
        study.rows(group=suite.EFFICIENCY, system=rows.OURS) + dense,
        note=f"{backward if untimed else ''}FlexAttention is torch's compiled kernel on the same blocks. "
        f"{_fresh(study, fresh)}",
    )  # fmt: skip


def _fresh(study: Study, fresh) -> str:
    """What the page faults of a result cost, where that was measured."""
    plain = fresh and rows.one(study, suite.EFFICIENCY, pattern=fresh.point.pattern, causal=False, passes="fwd")
    cell = times(study.ratio(fresh, plain)) if plain else None
    if cell is None:
        return ""
    return (
        "Large results reuse the memory of earlier ones that were freed. In fresh memory "
        f"(`Execution(results=False)`) they cost page faults: reuse makes the call {cell.text} as fast ({cell.sub})."
    )


def over_dense(study: Study) -> list[tuple]:
    """(n, Ratio or None, dense row or None, our row) by n; dense attention from any group of the suite."""
    ours = sorted(study.rows(group=suite.WINDOW_LENGTHS, system=rows.OURS), key=lambda r: r.point.seq_len)
    found = []
    for row in ours:
        n, alike = row.point.seq_len, {"passes": "fwd", "causal": False, "dtype": row.point.dtype}
        dense = rows.one(study, suite.WINDOW_LENGTHS, "dense_sdpa", seq_len=n)
        dense = dense or rows.one(study, suite.EFFICIENCY, "dense_sdpa", seq_len=n, **alike)
        found.append((n, study.ratio(dense, row), dense, row))
    return found


def length_figure(study: Study) -> None:
    """A fixed window and dense attention over length, with the window's roofline and the document's two ways."""
    found, series = over_dense(study), {}
    looks = {"Dense SDPA": figures.GREY, "Row by row": figures.ORANGE, "Batched": figures.GREEN,
             "This library": figures.BLUE, "Its roofline": figures.SKY}  # fmt: skip
    also = [r for system in (suite.ORIGINAL, suite.OPTIMIZED)
            for r in study.rows(group=suite.WINDOW_LENGTHS, system=system)]  # fmt: skip
    for row in [r for _, _, d, r in found for r in (d, r)] + also:
        if columns.timed(row):
            point = (row.point.seq_len, row.median * 1e3, row.ci[0] * 1e3, row.ci[1] * 1e3)
            series.setdefault(SYSTEMS[row.point.system], []).append(point)
    bounds = [(n, r.bound_seconds * 1e3, None, None) for n, _, _, r in found if columns.timed(r) and r.bound_seconds]
    series |= {"Its roofline": bounds} if bounds else {}
    if not series:
        return
    order = [name for name in looks if name in series]
    fig = curves.lines({name: series[name] for name in order}, xlabel="Tokens", ylabel="Time (ms)",
                       colors=[looks[name] for name in order], dashed=["Its roofline"])  # fmt: skip
    first = begins([x for x in found if x[2] is not None])
    said = f"The window is faster than dense attention from {first:,} tokens on." if first else "No length is faster."
    data = table(
        study, "Data: time over length", [NAME, columns.TOKENS, DENSITY, TIME, ROOFLINE, PEAK],
        [*(r for *_, r in found), *also, *(d for _, _, d, _ in found if d is not None)],
    )  # fmt: skip
    faster = "; ".join(f"{n:,} tokens {number(x.value)} times" for n, x, *_ in found if x) or "not shown"
    caption = f"{said} Forward, {pattern_of(found[0][3].point) if found else 'a fixed window'}."
    figures.show(fig, "session-length", caption, f"{caption} It is faster by: {faster}.", data, stamp=study.stamp)


def patterns(study: Study) -> Table:
    """One row for each kind of pattern: its share of the pairs, and its time."""
    lines = [
        {"name": name, "said": str(p), "row": rows.one(study, suite.BLOCK_PATTERNS, pattern=p.to_dict())}
        for name, p in suite.KINDS.items()
    ]
    chosen = rows.one(study, suite.BLOCK_PATTERNS, "adaptive", suite.ADAPTIVE)
    lines.append({"name": "by content", "said": str(Adaptive(**suite.ADAPTIVE)), "row": chosen})
    return table(
        study, "Every kind of pattern",
        [Column("Pattern", lambda line: line["name"]), Column("Blocks", lambda line: line["said"]),
         DENSITY.of("row", ">Of all pairs"), TIME.of("row", ">Time (ms)"), ROOFLINE.of("row", ">Roofline (ms)"),
         PEAK.of("row", ">Peak memory")],
        [line for line in lines if line["row"] is not None],
        note="The share of the pairs is what the pattern comes to at this length; the original's `sparsity_ratio` was "
        "ignored by its generators. By content: every head chooses its blocks in each call, which its time includes.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# extreme lengths


def ring(study: Study) -> Table:
    """The document's table of ring attention at 131,072 tokens: what its code computes, and what the work needs."""
    n, least = rows.stated()[1]["seq_len"], rows.least_seconds(rows.work(), rows.card())

    def paper(key: str, unit: str = ""):
        return lambda x: f"{x[key]:g}{unit}" if key in x else None

    others = {"a window of 640": suite.FAR, "dense attention": Dense()}
    needs = {name: rows.least_seconds(rows.work(p), rows.card()) * 1e3 for name, p in others.items()}
    said = ", ".join(f"{name} {number(ms)} ms" for name, ms in needs.items())

    def too_fast(x: dict) -> str | None:
        return f"{number(least / (x['ms'] / 1e3))}×" if "ms" in x and x["ms"] / 1e3 < least else None

    return table(
        study, f"Ring attention, {n:,} tokens, as published on a {rows.card().title}",
        [Column("Implementation", lambda x: x["name"]), Column(">Time (ms)", paper("ms")),
         Column(">Memory (MB)", paper("mb")), Column(">Factor", paper("speedup", "×")),
         Column(">Too fast by", too_fast),
         Column("What is computed, according to its source code", lambda x: x.get("computes") or x.get("recorded"))],
        rows.document()["ring"],
        note=f"The stated work takes at least {number(least * 1e3)} ms on that card by its peak rate in "
        f"{rows.document()['shape']['dtype']}; {said}. q, k, v and out alone are {size(rows.work().floor_bytes)}, more "
        f"than the published memory. {half_of_the_heads()}",
    )  # fmt: skip


def half_of_the_heads() -> str:
    """Where 23.5 comes from, in a sentence."""
    s, heads = rows.document()["source"], rows.document()["shape"]["heads"]
    left = heads - s["ring_zero_heads"]
    return (
        f"The factor 23.5 was measured at {s['ring_seq_len']:,} tokens, where {s['ring_zero_heads']} of {heads} heads "
        f"are zero: that explains {heads / left:g}×. At 8,192 tokens, where the segments fit, the same pair gives "
        f"{s['ring_longer_factor']}×."
    )


def extreme(study: Study) -> Table:
    """The lengths of the headlines: run and checked, beside the least memory and the published figures."""
    printed = {x["seq_len"]: x for x in rows.document()["extreme"]}

    def paper(key: str):
        return lambda r: f"{printed[r.point.seq_len][key]}" if key in printed.get(r.point.seq_len, {}) else None

    found = list(rows.extreme(study).values())
    p = found[0].point if found else None
    named = f": {pattern_of(p)}, {rows.heads(p)} of {p.head_dim}, {SHORT[p.dtype]}" if p else ""
    return table(
        study, f"Extreme lengths, forward{named}",
        [columns.TOKENS, TIME, ROOFLINE, PEAK,
         Column(">q, k, v and out in fp16, 8 heads", lambda r: size(rows.work(seq_len=r.point.seq_len).floor_bytes)),
         Column(">Published (MB)", paper("mb")), Column(">Published (ms)", paper("ms"))],
        found,
        note="A published memory that is smaller than q, k, v and out leaves the inputs out. The check compares "
        "sampled rows of every head with the float64 reference.",
    )  # fmt: skip


def ledger(study: Study) -> Table:
    """Every claim of the document, judged."""
    return findings.ledger(study, claims_code.judged(study, "002"))


def limits(study: Study) -> Text:
    """What this run cannot tell, of the originals above all."""
    return findings.limits(
        study,
        "How fast the published code is: it does not run here, and its rows compute other functions than their names.",
        "What a ring holds on several devices: the pages `benchmark_summary` and `hybrid_summary` measure it.",
        *(["What a kernel launch costs on a GPU: on a CPU an operator call costs less of the whole."]
          if study.device_type == "cpu" else []),
    )  # fmt: skip
