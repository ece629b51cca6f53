"""Document 000, the first of five published: what each optimization gains, where it pays, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .. import Execution, attention, cost, hardware, kernels, memory, patterns
from ..estimate import longest
from ..kernels.base import DeviceSpec
from . import columns, curves, figures, findings, rows, rung_rows, rungs
from . import study as studies
from .columns import MASK, PASS, PEAK, ROOFLINE, SHARD, TIME, TOKENS, Column, shown, table, times
from .findings import failures
from .origins import provenance
from .reading import reading
from .rows import FULL, SHORT, dense_beside, document_rows, is_optimised, is_plain, label, pattern, shape, switches
from .study import Study, best, pattern_of, together
from .tables import Cell, Code, Table, Text, about, number, size

__all__ = [
    "answer", "cache_table", "computed", "efficiency", "failures", "gpu_kernels", "implementations", "kernels_table",
    "ledger", "length_figure", "limits", "memory_exceptions", "open_study", "passes", "pool_table", "provenance",
    "reading", "recommended", "reuse", "switch_figure",
]  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")
NAMES = {
    "gather": "Strided views instead of gathered copies",
    "backend": "Fused kernel instead of eager",
    "cache": "Pattern cache on",
    "pool": "Memory pool on",
}
OFF = {"gather": True, "cache": False, "pool": False}
DEFAULT_MB = 16.0  # the threshold of the document, and of the library's own pool
EXCEPTION = 1.3  # times q, k, v and out, from which a peak is worth a line
CARD = 8 * 2**30  # bytes of the card in document 000
SCORES_LIVE = 3  # score tensors that the original held at once, by its own analysis of the failure
OVERHEAD = 1.15  # our peak over q, k, v and out, at most


def open_study(profile: str = "auto", data: str = "") -> Study:
    """The rows of this document's suite."""
    return studies.open_study(profile, data, "optimization")




def answer(study: Study) -> Text:
    """At most five lines: what optimizing pays, what fits, dense attention, trust, what was not measured."""
    lines = [_pays_line(study), _fits_line(study), _dense_line(study)]
    if study.rehearsal:  # what is computed for the device comes before times of another one
        lines[:2] = lines[1::-1]
    return study.text(*lines, findings.trust_line(study), findings.gaps_line(study), kind="answer", bullets=True)


def _pays_line(study: Study) -> str:
    lines = [x for x in entries(study) if x["engine"]]
    found = [x for line in lines if (x := study.ratio(line["naive"], line["row"]))]
    if not found:
        return "**What optimizing pays**: not measured, no pair of rows passed its check."
    factor = " to ".join(dict.fromkeys(number(f(x.value for x in found), 2) for f in (min, max)))
    noise = "" if all(x.significantly_slower for x in found) else ", within noise"
    effects = {name: _beyond(x[5]) for name in NAMES if (x := _pair(study, name))}
    said = [f"**Optimizing pays {factor} times here{noise}** ({shape()['seq_len']:,} tokens, forward, {_pattern_name()})"]
    for words, sign in (("It comes from", 1), ("A loss", -1), ("No measurable gain", 0)):
        if names := [NAMES[name].lower() for name, effect in effects.items() if effect == sign]:
            said.append(f"{words}: {', '.join(names)}")
    named = {label(r): _beyond(study.ratio(r, line["row"])) for line in lines for r in line["others"] if shown(r)}
    if named:
        apart = [name for name, effect in named.items() if effect]
        same = "though not as fast" if apart else "and as fast"
        said.append(f"{' and '.join(apart or named)} {'are' if len(apart or named) > 1 else 'is'} the same engine, {same}")
    return f"{'. '.join(said)}."


def _beyond(ratio) -> int:
    """1 where the second row of a ratio is faster beyond noise, -1 where it is slower."""
    return 0 if ratio is None else ratio.significantly_slower - ratio.significantly_faster


def _fits_line(study: Study) -> str:
    """How long a sequence fits, by ``longest``; in a rehearsal the roofline of the device too."""
    gpu, dtype, bound = study.profile, rows.hardware_dtype(study), ""
    if study.rehearsal:
        ours, dense = (_bound(gpu, p, dtype) for p in (pattern(), patterns.Dense()))
        least = f"the call takes at least {number(ours * 1e3)} ms, dense attention {number(dense * 1e3)} ms; "
        bound = f"computed for {gpu.title} in {SHORT[dtype]}, {least if ours and dense else ''}"
    if not study.memory_bytes:
        return f"**How long a sequence fits**: {bound}not known, because the size of the memory is not."
    most, train = (about(_longest(gpu.name, study.memory_bytes, dtype, p)) for p in ("fwd", "fwd+bwd"))
    return (
        f"**How long a sequence fits**: {bound}{size(study.memory_bytes)} hold {most} tokens in a forward call, {train} "
        "in training. This is attention alone, of one layer, as `ringlab.longest` says."
    )


@cache
def _longest(profile: str, budget: int, dtype: str, passes: str) -> int:
    how = {k: shape()[k] for k in ("batch", "heads", "head_dim")} | {"profile": hardware.get_profile(profile)}
    return longest(pattern(), budget, dtype=getattr(torch, dtype), passes=passes, **how)


def _dense_line(study: Study) -> str:
    found = over_dense(study)
    known = [x for x in found if x[1] is not None]
    if not known:
        return "**Over dense attention**: not measured."
    n, ratio, _, row = known[-1]
    start = begins([x for x in found if x[0] <= n])
    since = f"It is faster from {start:,} tokens on. " if start else "Longer sequences are not faster beyond noise. "
    return (
        f"**Over dense attention** it is {times(ratio).text} as fast at {n:,} tokens in {SHORT[row.point.dtype]} "
        f"({times(ratio).sub.replace(';', ',')}). {since}It computes fewer pairs: another function."
    )


def _pattern_name() -> str:
    return f"segments {segments(pattern().to_dict())}"


def segments(found: dict) -> str:
    """Segment lengths over rates of a stored pattern."""
    if found["kind"] == "dense":
        return "dense"
    return " / ".join(", ".join(map(str, found[k])) for k in ("segment_lengths", "dilation_rates"))


# ---------------------------------------------------------------------------------------------------------------------
# a configuration to use


def recommended(study: Study) -> Code:
    """A block that runs as it stands, on this profile's device or, where that is absent, on a CPU."""
    s, p = shape(), pattern()
    dtype, evidence = _chosen_dtype(study)
    chosen = {name: _chosen_switch(study, name, dtype) for name in NAMES}
    on = {name: value for name, (value, _) in chosen.items()}
    stamp = f"{study.stamp}, the times are a CPU's; " if study.stamp else ""
    comments = [f"{stamp}{study.profile.title}: {study.profile.dtype_reason()}", evidence, *(x for _, x in chosen.values())]
    device = '"cuda" if torch.cuda.is_available() else "cpu"' if study.profile.kind == "cuda" else '"cpu"'
    return Code(
        "".join(f"# {line}\n" for line in comments) + "import torch\n"
        "import ringlab\n\n"
        f"device = {device}\n"
        f"pattern = ringlab.Dilated({list(p.segment_lengths)}, {list(p.dilation_rates)}, mixing={p.mixing!r}, "
        f"offsets={p.offsets!r})\n"
        f"q, k, v = torch.randn(3, {s['batch']}, {s['seq_len']}, {s['heads']}, {s['head_dim']}, dtype=torch.{dtype}, "
        "device=device)\n"
        f"execution = ringlab.Execution(gather={on['gather']}, cache={on['cache']}, pool={on['pool']})\n"
        f'out = ringlab.attention(q, k, v, pattern, backend="{on["backend"]}", execution=execution)\n'
    )


def _chosen_dtype(study: Study) -> tuple[str, str]:
    """The profile's policy, or another dtype that was faster beyond noise; and the times that say so."""
    policy = rows.hardware_dtype(study)
    ours = [r for r in document_rows(study) if is_optimised(r) and columns.timed(r)]
    timed = sorted((best([r for r in ours if r.point.dtype == d]) for d in rows.dtypes(ours)), key=lambda r: r.median)
    if not timed:
        return policy, "dtype: the hardware's policy, because no row of this function passed"
    said = ", ".join(f"{SHORT[r.point.dtype]} {number(r.median * 1e3)} ms" for r in timed)
    line = f"dtype: {label(timed[0])}, {shape()['seq_len']:,} tokens: {said}"
    own = next((r for r in timed if r.point.dtype == policy), None)
    if study.rehearsal or _beyond(study.ratio(own, timed[0])) <= 0:
        return policy, f"{line}; {SHORT[policy]} by the policy"
    return timed[0].point.dtype, f"{line}; faster than the policy's choice"


def _chosen_switch(study: Study, name: str, dtype: str) -> tuple[object, str]:
    """A switch as its pair says; the default where neither side is faster, or a CPU stands in for a GPU."""
    pair, default = _pair(study, name, dtype), rows.DEFAULTS[name]
    if pair is None:
        return default, f"{NAMES[name]}: no pair of rows passed, so the default"
    *_, off, on, ratio = pair
    said = f"{NAMES[name]}: {number(off.median * 1e3)} to {number(on.median * 1e3)} ms, {times(ratio).plain}"
    effect = 0 if study.rehearsal else _beyond(ratio)
    return switches((on if effect > 0 else off).point)[name] if effect else default, f"{said}{'' if effect else ', so the default'}"


# ---------------------------------------------------------------------------------------------------------------------
# implementations and switches


def entries(study: Study) -> list[dict]:
    """A line for each thing that runs, by dtype: naive, the engine under all of its names, dense attention.

    ``row`` is the one that is shown, ``others`` are those of the same engine under published names.
    """
    ours, dense, found = document_rows(study), study.rows(system="dense_sdpa", **shape()), []
    for some, test in ((ours, is_plain), (ours, rows.is_engine), (dense, bool)):
        for dtype in rows.dtypes(filter(test, some)):
            alike = [r for r in some if test(r) and r.point.dtype == dtype]
            row = best([r for r in alike if shown(r) and is_optimised(r)]) or best(alike)
            naive = best([r for r in ours if is_plain(r) and r.point.dtype == dtype])
            found.append({
                "row": row, "engine": test is rows.is_engine, "naive": None if row is naive else naive,
                "dense": None if some is dense else dense_beside(study, row),
                "others": [r for r in alike if test is rows.is_engine and r.point.system != row.point.system],
            })  # fmt: skip
    return found


def implementations(study: Study) -> Table:
    """The document's table: ours beside what is printed; names of one engine share a line."""
    lines, fastest = entries(study), rows.fastest_row(study)
    tests = {"original": is_plain, "optimised": is_optimised, "flash": lambda r: r.point.system.endswith("V2Flash")}

    def name(x: dict) -> Cell:
        return Cell(label(x["row"]), "; ".join([SHORT[x["row"].point.dtype], *(f"also {label(r)}" for r in x["others"])]))

    def paper(x: dict) -> Cell | None:
        mine = [(r, p) for r in (x["row"], *x["others"]) for p in rows.published()["rows"] if r.point.dtype == p["dtype"]]
        found = [Cell(f"{p['ms']:.2f}", f"{p['speedup']:.2f}×; {p['name']}") for r, p in mine if tests[p["key"]](r)]
        return found[0] if found else None

    def leads(x: dict) -> bool:
        return x["row"] is fastest or x["engine"] and not _beyond(study.ratio(x["row"], fastest)) and shown(x["row"])

    def by_dtype(test) -> str:
        one, two = (best([r for r in document_rows(study, dtype=d) if test(r)]) for d in ("float16", "float32"))
        return cell.plain if (cell := times(study.ratio(one, two))) else "not measured"

    s, d = shape(), rows.published()
    return table(
        study, f"{s['seq_len']:,} tokens, {s['heads']} heads of {s['head_dim']}, forward, {_pattern_name()}",
        [Column("Implementation", name), TIME.of("row", ">Time (ms)"), ROOFLINE.of("row", ">Roofline (ms)"),
         columns.ratio(study, "naive", "row", ">Faster than naive"),
         columns.ratio(study, "dense", "row", ">Faster than dense"),
         *([] if study.rehearsal else [Column(">Published (ms)", paper)])],
        lines, marked=[i for i, x in enumerate(lines) if leads(x)],
        note="Naive is this library's gathered, eager path: the original does not run here. Marked lines are equally "
        f"fast, within noise. fp32 instead of fp16 alone gains {by_dtype(is_plain)} in the naive path and "
        f"{by_dtype(is_optimised)} in the optimized one; the published {d['rows'][1]['speedup']}× mixes both. Published "
        f"on {d['device']}; according to its source code the original attends across heads instead of tokens.",
    )  # fmt: skip


def switch_pairs(study: Study) -> list[tuple]:
    """(switch, switches before, switches after, row off, row on, Ratio) for rows that differ in one switch alone."""
    ours = document_rows(study, system="ringlab")
    found = []
    for a in ours:
        for b in ours:
            one, two = switches(a.point), switches(b.point)
            changed = [k for k in one.keys() | two.keys() if one.get(k) != two.get(k)]
            if len(changed) != 1 or a.point.dtype != b.point.dtype:
                continue
            name = changed[0]
            chosen = name == "backend" and (one[name], two[name]) == ("eager", "auto")
            if chosen or (name in OFF and one[name] == OFF[name]):
                found.append((name, one, two, a, b, study.ratio(a, b)))

    def order(x: tuple) -> tuple:  # with the others on first: that is the switch as one would use it
        plain = sum(x[2][k] == v for k, v in rows.PLAIN.items())
        return [*NAMES].index(x[0]), x[3].point.dtype != "float32", plain, x[5] is None

    return list({(x[3].point.id, x[4].point.id): x for x in sorted(found, key=order, reverse=True)}.values())[::-1]


def _pair(study: Study, name: str, dtype: str = "float32") -> tuple | None:
    """The pair of a switch with all others on, in a dtype where there is one."""
    found = [x for x in switch_pairs(study) if x[0] == name and x[2] == FULL and x[5] is not None]
    return min(found, key=lambda x: x[3].point.dtype != dtype, default=None)


def with_others(switch: str, s: dict) -> str:
    """The other switches of a pair."""
    words = {
        "gather": "gathered" if s["gather"] else "strided", "backend": f"{s['backend']} kernel",
        "cache": "cache" if s["cache"] else "no cache", "pool": "pool" if s["pool"] else "no pool",
    }  # fmt: skip
    return ", ".join(v for k, v in words.items() if k != switch)


def switch_figure(study: Study) -> None:
    """What each switch gains alone, and all of them together, in fp32 where there are such rows."""
    lines = [dict(zip(("name", "with", "off", "on"), (NAMES[n], with_others(n, one), a, b)))
             for n, one, _, a, b, _ in switch_pairs(study)]  # fmt: skip
    lines += [{"name": "All together", "with": "over naive", "off": x["naive"], "on": x["row"]}
              for x in entries(study) if x["engine"] and x["naive"]]  # fmt: skip
    lines = [x for x in lines if x["on"].point.dtype == "float32"] or lines
    if not lines:
        return
    ratios = {f"{x['name']}, {x['with']}": study.ratio(x["off"], x["on"]) for x in lines}
    items = [figures.Bar(k, r and r.value, r and r.low, r and r.high, missing="not shown") for k, r in ratios.items()]
    fig = figures.ratios(items, xlabel="Times as fast with it (line: no difference)")
    data = table(
        study, "Data: each optimization alone",
        [Column("Switch", lambda x: x["name"]), Column("With", lambda x: x["with"]), TIME.of("off", ">Off (ms)"),
         TIME.of("on", ">On (ms)"), ROOFLINE.of("on", ">Roofline (ms)"), columns.ratio(study, "off", "on", ">Faster by")],
        lines,
        note="With strided views results are written in place and the pool is never used. With gathered copies the "
        "pool supplies the copy buffers.",
    )  # fmt: skip
    tells = [name for name, r in ratios.items() if _beyond(r)]
    found = f"Beyond noise: {'; '.join(tells)}." if tells else "Every factor is within noise."
    said = "; ".join(f"{b.label} {b.value:.2f} times" if b.value else f"{b.label} not shown" for b in items)
    caption = f"What each optimization gains alone, {SHORT[lines[0]['on'].point.dtype]}. {found}"
    figures.show(fig, "optimization-switches", caption, f"{caption} {said}.", data, stamp=study.stamp)


# ---------------------------------------------------------------------------------------------------------------------
# length, passes, memory


def over_dense(study: Study) -> list[tuple]:
    """(n, Ratio or None, dense row, our row) of dense SDPA over all optimizations, by n, in one dtype.

    The dtype is the profile's own where it was timed at more than one length, else fp32.
    """
    wanted = {"pattern": pattern().to_dict(), "passes": "fwd", "causal": False, "batch": 1, "world_size": 1}
    ours = [r for r in study.rows(**wanted) if is_optimised(r)]
    found: dict[str, list] = {}
    for dtype in dict.fromkeys((rows.hardware_dtype(study), "float32")):
        for n in sorted({r.point.seq_len for r in ours if r.point.dtype == dtype}):
            pairs = [(r, dense_beside(study, r)) for r in ours if (r.point.dtype, r.point.seq_len) == (dtype, n)]
            pairs = [(study.ratio(d, r), d, r) for r, d in pairs if d is not None]
            if pairs:
                known = [p for p in pairs if p[0] is not None]
                chosen = max(known, key=lambda p: p[0].paired) if known else pairs[0]
                found.setdefault(dtype, []).append((n, *chosen))
    return max(found.values(), key=len, default=[])


def begins(found: list[tuple]) -> int | None:
    """The shortest n from which the pattern is faster than dense at every longer n measured, beyond noise."""
    start = None
    for n, ratio, *_ in reversed(found):
        if ratio is None or not ratio.significantly_slower:
            break
        start = n
    return start


def length_figure(study: Study) -> None:
    """Time over length of dense attention and of the pattern, with the pattern's roofline."""
    found, series = over_dense(study), {}
    looks = {"Dense SDPA": figures.GREY, "All optimizations": figures.BLUE, "Its roofline": figures.SKY}
    for row in (r for _, _, d, ours in found for r in (d, ours)):
        if columns.timed(row):
            series.setdefault(label(row), []).append((row.point.seq_len, *(x * 1e3 for x in (row.median, *row.ci))))
    bounds = [(n, r.bound_seconds * 1e3, None, None) for n, _, _, r in found if columns.timed(r) and r.bound_seconds]
    series |= {"Its roofline": bounds} if bounds else {}
    if not series:
        return
    fig = curves.lines({name: series[name] for name in looks if name in series}, xlabel="Tokens", ylabel="Time (ms)",
                       colors=[looks[name] for name in looks if name in series], dashed=["Its roofline"])  # fmt: skip
    data = table(
        study, "Data: time over length",
        [TOKENS.of("ours", ">Tokens"), TIME.of("dense", ">Dense SDPA (ms)"), TIME.of("ours", ">All optimizations (ms)"),
         ROOFLINE.of("ours", ">Roofline (ms)"), columns.ratio(study, "dense", "ours", ">Faster than dense")],
        [{"dense": d, "ours": r} for _, _, d, r in found],
    )  # fmt: skip
    start = begins(found)
    said = f"The pattern is faster than dense attention from {start:,} tokens on" if start else "No length is faster"
    caption = f"{said}: {_pattern_name()}, forward, {SHORT[found[0][3].point.dtype]}."
    faster = "; ".join(f"{n:,} tokens {number(x.value)} times" for n, x, *_ in found if x) or "not shown"
    figures.show(fig, "optimization-length", caption, f"{caption} It is faster by: {faster}.", data, stamp=study.stamp)


def passes(study: Study) -> Table:
    """Forward and training, not causal and causal, at the longest n at which training was timed."""
    ours = [r for r in study.rows(pattern=pattern().to_dict(), world_size=1, batch=1) if is_optimised(r)]
    p = max((r.point for r in ours if r.point.passes == "fwd+bwd"), key=lambda p: p.seq_len, default=None)
    here = [r for r in ours if p and (r.point.seq_len, r.point.dtype) == (p.seq_len, p.dtype)]
    ways = {(passes, causal): [r for r in here if (r.point.passes, r.point.causal) == (passes, causal)]
            for passes in ("fwd", "fwd+bwd") for causal in (False, True)}  # fmt: skip
    where = f", {p.seq_len:,} tokens, {SHORT[p.dtype]}" if p else ""
    return table(
        study, f"All optimizations beside dense attention{where}, {_pattern_name()}",
        [PASS.of("ours", "Pass"), MASK.of("ours", "Mask"), TIME.of("ours", ">All optimizations (ms)"),
         ROOFLINE.of("ours", ">Roofline (ms)"), TIME.of("dense", ">Dense SDPA (ms)"),
         ROOFLINE.of("dense", ">Roofline, dense (ms)"), columns.ratio(study, "dense", "ours", ">Faster than dense")],
        [{"ours": best(some), "dense": dense_beside(study, best(some))} for some in ways.values() if some],
        note="Training: forward and backward together, with a random gradient of the output.",
    )  # fmt: skip


def memory_exceptions(study: Study) -> Table | Text:
    """The calls whose peak is far above the tensors that the caller holds, each at its longest sequence."""
    by_call: dict[tuple, object] = {}
    for r in sorted(study.rows(world_size=1), key=lambda r: r.point.seq_len):
        p = r.point
        if columns.floor_bytes(r) and p.system != "sgemm":
            by_call[label(r), segments(p.pattern), p.dtype, p.batch, p.passes, p.causal] = r
    found = sorted(by_call.values(), key=_multiple, reverse=True)
    above, below = [r for r in found if _multiple(r) > EXCEPTION], [r for r in found if _multiple(r) <= EXCEPTION]
    rest = f"{len(below)} calls hold at most {_multiple(below[0]):.2f} × their tensors" if below else "not measured"
    if not above:
        return study.text(f"**Peak memory**: {rest}.")
    return table(
        study, f"Peak memory above {EXCEPTION} × q, k, v and out",
        [columns.SYSTEM, Column("Segments / rates", lambda r: segments(r.point.pattern)),
         Column("Pass", lambda r: rows.pass_of(r.point)), Column(">Tokens", lambda r: _tokens(r.point)), SHARD, PEAK],
        above,
        note=f"The other {rest}. A peak counts live tensors, q, k, v and out included; in training their gradients too.",
    )  # fmt: skip


def _multiple(row) -> float:
    return columns.peak_bytes(row) / columns.floor_bytes(row)


def _tokens(point) -> str:
    return f"{point.batch} × {point.seq_len:,}" if point.batch > 1 else f"{point.seq_len:,}"


# ---------------------------------------------------------------------------------------------------------------------
# what is kept from call to call: the pattern cache and the memory pool


def cache_rows(study: Study) -> list[dict]:
    """Building a plan, finding it, and the call that needs it, by what is built."""
    builds, found = study.rows(system="plan_build", world_size=1), []
    for cold in [r for r in builds if not dict(r.point.options)["warm"]]:
        p, options = cold.point, dict(cold.point.options)
        alike = {"seq_len": p.seq_len, "pattern": p.pattern, "passes": "fwd", "causal": False, "batch": 1}
        wanted = {"backend": "auto", "gather": options.get("gather", False), "cache": True}
        calls = [r for r in study.rows(system="ringlab", world_size=1, **alike) if columns.timed(r)]
        call = best([r for r in calls if wanted.items() <= switches(r.point).items()])
        warm = best([r for r in builds if r.point == p.but(options=options | {"warm": True})])
        share = cold.median / call.median if call and columns.timed(cold) else None
        found.append({"cold": cold, "warm": warm, "call": call, "share": share})
    return sorted(found, key=lambda x: (rows.steps_of(x["cold"].point), x["cold"].point.seq_len))


def largest_share(study: Study) -> float | None:
    """The largest part of a call that building its plan takes, for the document's pattern."""
    ours = [x for x in cache_rows(study) if pattern_of(x["cold"].point) == pattern()]
    return max((x["share"] for x in ours if x["share"]), default=None)


def cache_table(study: Study) -> Table:
    """What a plan costs when it is built, when it is found, and how much of a call that is."""
    micros = Column("", lambda r: columns.time(r, 1e6))
    return table(
        study, "The pattern cache: a plan built in each call, and found",
        [Column("Plan", lambda x: rows.steps_of(x["cold"].point)),
         Column("Segments / rates", lambda x: segments(x["cold"].point.pattern)), TOKENS.of("cold", ">Tokens"),
         micros.of("cold", ">Built (µs)"), micros.of("warm", ">Found (µs)"), TIME.of("call", ">The call (ms)"),
         Column(">Built, of the call", lambda x: f"{number(100 * x['share'], 2)} %" if x["share"] else None)],
        cache_rows(study), folded=True,
        note="Built: the cache is cleared before each call. Found: the same call again. The difference is all that the "
        "cache can save.",
    )  # fmt: skip


@dataclass(frozen=True)
class Lent:
    """How many buffers a call asks for, and how many of them come from the pool."""

    served: int
    asked: int


@cache
def lent(point, threshold_mb: float) -> Lent:
    """What one forward call of a point borrows, counted by making it once on the CPU; a GPU borrows the same."""
    pool = memory.MemoryPool(threshold_bytes=int(threshold_mb * 2**20))
    execution = Execution(gather=switches(point)["gather"], blocks=switches(point).get("blocks", "auto"), pool=pool)
    shape = point.batch, point.seq_len, point.heads, point.head_dim
    q, k, v = torch.zeros(3, *shape, dtype=getattr(torch, point.dtype))
    attention(q, k, v, pattern_of(point), causal=point.causal, execution=execution)
    stats = pool.stats()
    return Lent(stats.borrows - stats.bypassed, stats.borrows)


def threshold(point) -> float | None:
    """The threshold of a point's pool in MiB; None without a pool."""
    s = switches(point)
    return float(s.get("pool_threshold_mb", DEFAULT_MB)) if s["pool"] else None


def pool_rows(study: Study) -> list[tuple]:
    """(row without a pool, [(row with one, Ratio or None), ...] by threshold), by call; the document's calls last."""
    ours, found = study.rows(system="ringlab", world_size=1), []
    swept = sorted((r for r in ours if "pool_threshold_mb" in switches(r.point)), key=lambda r: threshold(r.point))
    for plain in dict.fromkeys(r.point.but(options=()) for r in swept):
        if off := best([r for r in ours if r.point == plain]):
            found.append((off, [(r, study.ratio(off, r)) for r in swept if r.point.but(options=()) == plain]))
    return found + [(off, [(on, ratio)]) for name, _, _, off, on, ratio in switch_pairs(study) if name == "pool"]


def pool_table(study: Study) -> Table:
    """Each threshold beside plain allocation; what is borrowed is counted."""
    lines = [{"off": off, "on": on, "lent": lent(on.point, threshold(on.point))}
             for off, pairs in pool_rows(study) for on, _ in pairs]  # fmt: skip

    def call(x: dict) -> Cell:
        p = x["on"].point
        return Cell("Gathered" if switches(p)["gather"] else "Strided", f"{SHORT[p.dtype]}, {_tokens(p)} tokens")

    return table(
        study, "The memory pool by its threshold",
        [Column("Call", call), Column(">Pool from", lambda x: f"{threshold(x['on'].point):g} MiB"),
         Column(">Buffers from the pool", lambda x: f"{x['lent'].served} of {x['lent'].asked}"),
         TIME.of("off", ">Without (ms)"), TIME.of("on", ">With (ms)"), ROOFLINE.of("on", ">Roofline (ms)"),
         columns.ratio(study, "off", "on", ">Faster with it")],
        lines, folded=True,
        note="Buffers are counted in a call that is made for this page. The batched calls need an fp32 accumulator.",
    )  # fmt: skip


def reuse(study: Study) -> Text:
    """What the cache and the pool come to, each in a line."""
    return study.text(_cache_line(study), _pool_line(study), bullets=True)


def _cache_line(study: Study) -> str:
    most = max((x for x in cache_rows(study) if x["share"]), key=lambda x: x["share"], default=None)
    if most is None:
        return "**Pattern cache**: not measured."
    took = f"{number(most['cold'].median * 1e6)} µs of {number(most['call'].median * 1e3)} ms"
    return (
        f"**Pattern cache**: building a plan takes at most {number(100 * most['share'], 2)} % of a call "
        f"({most['cold'].point.seq_len:,} tokens, {took}), so no cache can save more."
    )


def _pool_line(study: Study) -> str:
    pairs = [(lent(on.point, threshold(on.point)).served, x) for _, pairs in pool_rows(study) for on, x in pairs if x]
    used, control = [x for served, x in pairs if served], [x.value for served, x in pairs if not served]
    if not used:
        return "**Memory pool**: not measured where it lends anything."
    won, lost = (sum(_beyond(x) == sign for x in used) for sign in (1, -1))
    ends = [f"{f(x.value for x in used):.2f}" for f in (min, max)]
    same = f" Calls in which it lends nothing: {min(control):.2f} to {max(control):.2f} times." if control else ""
    return (
        f"**Memory pool**: of {len(used)} calls in which it lends a buffer {won} are faster with it, {lost} slower, "
        f"{len(used) - won - lost} within noise ({' to '.join(ends)} times as fast).{same}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# efficiency and kernels


def over_roofline(row) -> float | None:
    """Time over the shortest that the device's rates allow."""
    return row.median / row.bound_seconds if columns.timed(row) and row.bound_seconds else None


def efficiency(study: Study) -> Table:
    """Time over roofline: of the document's call, of dense attention, and by pattern in LongNet's own mixing."""
    call = best([r for r in document_rows(study, dtype=rows.hardware_dtype(study)) if is_optimised(r)])
    dense = dense_beside(study, call) if call else None
    plain = [r for r in study.rows(system="ringlab", world_size=1, batch=1) if not r.point.options and columns.timed(r)]
    plain.sort(key=lambda r: (r.point.passes, r.point.causal, -max(r.point.pattern["segment_lengths"])))

    def beside(row, system: str):
        same = {k: getattr(row.point, k) for k in ("seq_len", "causal", "passes", "dtype", "pattern")}
        return best([r for r in study.rows(system=system, **same) if together(r, row)])

    def multiple(row) -> str | None:
        return f"{number(over_roofline(row), 2)}×" if over_roofline(row) else None

    ends = [multiple(f(plain, key=over_roofline)) for f in (min, max)] if all(map(over_roofline, plain)) and plain else []
    mixing = f", LongNet's mixing {' to '.join(ends)}" if ends else ""
    torchs = Column(">torch's kernel", lambda r: multiple(beside(r, "contiguous_segments")))
    copying = Column(">Faster than copying", lambda r: times(study.ratio(beside(r, "copying"), r)))
    return table(
        study, f"Time over roofline: the document's call {multiple(call) or 'not shown'}, dense SDPA "
        f"{multiple(dense) or 'not shown'}{mixing}",
        [Column("Call", lambda r: Cell(segments(r.point.pattern), f"{rows.pass_of(r.point)}, {SHORT[r.point.dtype]}")),
         TOKENS, TIME, ROOFLINE, Column(">Time over roofline", multiple), torchs, copying],
        [r for r in (call, dense) if r] + plain, folded=True,
        note="The roofline is that of the threads of the row. torch's kernel: its time over its roofline on contiguous "
        "segments of the first branch. Copying: each branch is copied, the same kernel, scattered, then mixed.",
    )  # fmt: skip


def kernels_table(study: Study) -> Table:
    """Each kernel: what it says when it is called here, its time, and what its rules say of a GPU."""
    gpu, head_dim = gpu_of(study), shape()["head_dim"]
    card = DeviceSpec("cuda", gpu.capability)
    ours = [r for r in document_rows(study, system="ringlab") if switches(r.point) | {"backend": "auto"} == FULL]
    timed = {name: best([r for r in ours if switches(r.point)["backend"] == name]) for name in kernels.KERNELS}
    absent = study.device_type == "cuda" and not torch.cuda.is_available()
    asked = {} if absent else {d: kernels.table(study.device_type, getattr(torch, d), head_dim, backward=True) for d in DTYPES}
    here = {name: {SHORT[d]: why for d, found in asked.items() for x, _, why, _ in found if x == name} for name in timed}
    chosen = [name for name, _, _, taken in asked.get("float32", ()) if taken]

    def says(reasons: dict[str, str | None]) -> Cell | None:
        right, why = [k for k, x in reasons.items() if not x], "; ".join(dict.fromkeys(filter(None, reasons.values())))
        return Cell(", ".join(right) or "refused", why, kind="" if right else "none") if reasons else None

    def by_rule(name: str) -> Cell:
        return says({SHORT[d]: kernels.KERNELS[name].refuses(card, getattr(torch, d), head_dim) for d in DTYPES})

    names = [x[0] for x in asked.get("float32", ())] or [*timed]
    said = f"{' and '.join(chosen)} is chosen, {sum(not all(here[x].values()) for x in names)} of {len(names)} run"
    return table(
        study, f"Kernels: {'as recorded on that device' if absent else said}",
        [Column("Kernel", lambda x: x), Column("Called here", lambda x: says(here[x])),
         Column(">The document's call (ms)", lambda x: columns.time(timed[x])),
         Column(f"By its rules on {gpu.title} ({hardware.sm(gpu.capability)})", by_rule)],
        names, folded=True, marked=[names.index(x) for x in chosen],
        note="In order of preference. Each was called on a tiny tensor, forward and backward, and compared with float64. "
        "By its rules: computed from each kernel's stated needs, nothing was called on that device.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# computed, not measured


def gpu_of(study: Study):
    """The GPU that computed figures are for: the profile's own, or the document's where the profile has none."""
    own = study.profile.kind == "cuda" and study.profile.capability is not None
    return study.profile if own else hardware.get_profile(rows.published()["profile"])


def _bound(profile, pattern, dtype: str) -> float | None:
    """The roofline of a pattern at the document's shape on a profile, in seconds."""
    fields = {k: shape()[k] for k in ("batch", "seq_len", "heads", "head_dim", "causal", "passes")}
    rate, bandwidth = profile.peak(getattr(torch, dtype)), profile.bandwidth_bytes_per_s
    work = cost.count(pattern, dtype=getattr(torch, dtype), **fields)
    return work.seconds(rate, bandwidth) if rate and bandwidth else None


@dataclass(frozen=True)
class TwoCards:
    """16K tokens on two cards, bytes a card: the original's score tensors, and ours."""

    original_bytes: int
    ours_bytes: float

    @property
    def original_fits(self) -> bool:
        return self.original_bytes < CARD

    @property
    def ours_fits(self) -> bool:
        return self.ours_bytes < CARD


def two_cards(seq_len: int = 16384, heads: int = 8, head_dim: int = 64, dtype=torch.float32) -> TwoCards:
    """The document's failed run: every query against half of the keys, whole score tensors in fp32, three alive.

    Ours holds a shard of q, k, v and out; segments of 2048 and 4096 fit a shard of 8192, so that nothing is received.

    >>> fit = two_cards()
    >>> fit.original_bytes // 2**30, fit.original_fits, fit.ours_fits
    (12, False, True)
    """
    shard = seq_len // 2
    scores = heads * seq_len * shard * 4
    return TwoCards(SCORES_LIVE * scores, OVERHEAD * 4 * shard * heads * head_dim * dtype.itemsize)


def computed(study: Study) -> Table:
    """Rooflines of the document's call and of dense attention on a GPU, its dtype, and what fits two cards."""
    gpu, fit = gpu_of(study), two_cards()

    def bound(p):
        return lambda d: number(seconds * 1e3) if (seconds := _bound(gpu, p, d)) else None

    return table(
        study, f"Computed for {gpu.title}: {shape()['seq_len']:,} tokens, forward, {_pattern_name()}",
        [Column("dtype", SHORT.get), Column(">Roofline (ms)", bound(pattern())),
         Column(">Roofline, dense (ms)", bound(patterns.Dense())), Column("Rate used", gpu.peak_reason)],
        DTYPES,
        note=f"Use {gpu.dtype_reason()}; the torch that drives it: `{hardware.install_line(gpu.capability)}`. The failed "
        f"run of the document, 16,384 tokens on two cards of {size(CARD)}: the original's three score tensors need "
        f"{size(fit.original_bytes)} a card, which {'fits' if fit.original_fits else 'does not fit'}; this library needs "
        f"at most {size(fit.ours_bytes)}, which {'fits' if fit.ours_fits else 'does not fit'}.",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# claims, limits, the appendix


def ledger(study: Study) -> Table:
    """Every claim of the document, judged."""
    from . import claims  # its functions select rows by those of this module

    return findings.ledger(study, claims.judge(study, rows.published()["claims"]))


def limits(study: Study) -> Text:
    """What this run cannot tell."""
    lines = ["Training, causal attention, the cache, the pool and the engine: a rehearsal leaves them out."]
    lines = lines if study.rehearsal else []
    for dtype in ("float16", "bfloat16", "float32"):
        if not [r for r in study.good if r.point.dtype == dtype]:
            tried = [r for r in study.results if r.point.dtype == dtype]
            said = "no row passed, each with its reason below" if tried else "not measured"
            lines.append(f"{SHORT[dtype]}: {said}.")
    return findings.limits(study, *lines)


def gpu_kernels(study: Study) -> None:
    """The appendix on GPU kernels, from the rows of their own suite; nothing where there are none."""
    from IPython.display import Markdown, display

    if not rung_rows.measured(study) and rungs.tuned(study) is None:
        return
    display(Markdown(
        "## Kernels on this GPU\n\nEach way to run one pattern at 65,536 tokens in half precision: what was predicted "
        "before it ran, what it reached, why, and what is aimed at."
    ))  # fmt: skip
    parts = (rungs.versions, rungs.tuned, rungs.targets, rungs.lengths, rungs.blocks, rungs.memory, rungs.sources,
             rungs.unquoted)  # fmt: skip
    for found in (part(study) for part in parts):
        if found is not None:
            display(found)
