"""Document 000 filled from measured rows: what ``notebooks/optimization_results.ipynb`` shows, in its order."""

from __future__ import annotations

import torch

from .. import hardware
from . import backends as kernel_tables
from . import figures
from .answer import answer
from .computed import computed_table, fit_table
from .engine import memory, memory_figure, speed
from .findings import failures, ledger, limits, provenance, recommended
from .lengths import length_figure, lengths
from .rows import (
    FULL,
    SHORT,
    SPARSE_NOTE,
    best,
    document_rows,
    dtypes,
    fastest_row,
    implementation_rows,
    is_optimised,
    is_plain,
    label,
    pattern,
    published,
    shape,
    switch_pairs,
    switches,
)  # fmt: skip
from .study import Study, bound, error, ms, objection, open_study, times
from .tables import Cell, Table, Text, number

__all__ = [
    "answer", "backends", "backends_by_rule", "computed", "failures", "implementations", "ledger",
    "length_figure", "lengths",
    "limits", "memory", "memory_figure", "open_study", "policy", "provenance", "recommended", "speed", "switch_figure",
    "switch_table", "time_figure", "two_by_two", "two_cards",
]  # fmt: skip


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
            name, SHORT[dtype], ms(row), _throughput(row), speedup, error(row), bound(row),
            f"{paper['ms']:.2f}" if paper else None, f"{paper['speedup']:.2f}×" if paper else None,
        ])  # fmt: skip
        if row is not None and row is fastest:
            marked.append(i)
    s = shape()
    return study.table(
        f"One device, {s['seq_len']:,} tokens, {s['heads']} heads of {s['head_dim']}, forward",
        ["Implementation", "dtype", ">Time (ms)", ">Tokens/s", ">Speed-up", ">Error", ">Lower bound (ms)",
         ">Published (ms)", ">Published speed-up"],
        rows, marked=marked,
        note=f"{str(pattern()).capitalize()}. Published on {published()['device']}, where the original's source "
        "attends over the "
        "heads of each position: its times are of other work. Speed-ups are over "
        f"{label(base) if base else 'the original'}"
        f"{', ' + SHORT[base.point.dtype] if base else ''}; intervals are 95 %. {SPARSE_NOTE}",
    )  # fmt: skip


def _throughput(row) -> str | None:
    return None if row is None or objection(row) or not row.median else number(row.tokens_per_s)


def two_by_two(study: Study) -> Table:
    """dtype by optimisation, with each effect alone: what the document's one factor of 17.82 mixes."""
    ours = document_rows(study)
    low = next((d for d in dtypes(ours) if d in ("float16", "bfloat16")), "float16")

    def cell_of(test, dtype):
        return best([r for r in ours if test(r) and r.point.dtype == dtype])

    a, b = cell_of(is_plain, low), cell_of(is_plain, "float32")
    c, d = cell_of(is_optimised, low), cell_of(is_optimised, "float32")
    rows = [
        ["No optimizations", ms(a), ms(b), times(study.ratio(a, b))],
        ["All optimizations", ms(c), ms(d), times(study.ratio(c, d))],
        ["Optimizations alone", times(study.ratio(a, c)), times(study.ratio(b, d)), Cell("both at once:", kind="none")],
        ["Both at once", None, None, times(study.ratio(a, d))],
    ]
    rows[2][3] = None
    return study.table(
        f"dtype and optimizations, each alone ({shape()['seq_len']:,} tokens, forward, ms)",
        ["", f">{SHORT[low]} (ms)", ">fp32 (ms)", ">fp32 alone"],
        rows,
        note="The document compares the first cell with the last and names dtype as the cause; its two rows differ "
        "in both. A factor above 1 means faster.",
    )


NAMES = {
    "gather": "Strided views instead of gathered copies",
    "backend": "Fused kernel instead of eager",
    "cache": "Pattern cache on",
    "pool": "Memory pool on",
}


def _others(switch: str, s: dict) -> str:
    words = {
        "gather": "gathered" if s["gather"] else "strided", "backend": f"{s['backend']} kernel",
        "cache": "cache" if s["cache"] else "no cache", "pool": "pool" if s["pool"] else "no pool",
    }  # fmt: skip
    return ", ".join(v for k, v in words.items() if k != switch)


def switch_table(study: Study) -> Table:
    """Every switch varied alone, from interleaved pairs."""
    rows = [
        [NAMES[name], _others(name, one), SHORT[a.point.dtype], ms(a), ms(b), times(ratio), error(b), bound(b)]
        for name, one, two, a, b, ratio in switch_pairs(study)
    ]
    return study.table(
        f"Each switch alone ({shape()['seq_len']:,} tokens, forward)",
        ["Switch", "With", "dtype", ">Off (ms)", ">On (ms)", ">Faster by", ">Error", ">Lower bound (ms)"],
        [*rows, *_dense_rows(study, 8)],
        note=f"Ratios are medians over rounds in which both took turns in one process. {SPARSE_NOTE}",
    )


def _dense_rows(study: Study, width: int) -> list[list]:
    """Dense SDPA at the document's n as a last row of a table with (off, on, ratio, error, bound) columns."""
    found = study.rows(system="dense_sdpa", **shape())
    return [
        ["Dense SDPA", "the same tokens", SHORT[d], None, ms(row), None, error(row), bound(row)][:width]
        for d in dtypes(found)
        for row in [best([r for r in found if r.point.dtype == d])]
    ]


def switch_figure(study: Study) -> None:
    pairs = [x for x in switch_pairs(study)]
    fp32 = [x for x in pairs if x[3].point.dtype == "float32"] or pairs
    items = [
        figures.Bar(
            f"{name}: {_short(name, two)}\n({_others(name, one)})",
            r and r.value,
            r and r.low,
            r and r.high,
            missing="not quoted",
        )
        for name, one, two, a, b, r in fp32
    ]
    fig = figures.ratios(items, xlabel="Times faster with the switch on (line: no difference)")
    said = "; ".join(f"{NAMES[n]} ({_others(n, one)}) {r.value:.2f} times" for n, one, _, _, _, r in fp32 if r)
    data = study.table(
        "Data: each switch alone, fp32",
        ["Switch", "With", ">Faster by", ">Rounds"],
        [[NAMES[n], _others(n, one), times(r), r.rounds if r else None] for n, one, _, _, _, r in fp32],
    )
    figures.show(
        fig,
        "optimization-switches",
        "Effect of each switch alone, fp32, with 95 % intervals.",
        f"Effect of each switch alone, with 95 % intervals: {said}.",
        data,
        stamp=study.stamp,
    )


def _short(name: str, two: dict) -> str:
    return {"gather": "strided", "backend": str(two["backend"]), "cache": "on", "pool": "on"}[name]


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
            row.bound_seconds * 1e3 if quoted and row.bound_seconds else None, objection(row).split(":")[0],
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
        ["Implementation", "dtype", ">Time (ms)", ">Lower bound (ms)"],
        [[p["name"] if p else label(r), SHORT[r.point.dtype], ms(r), bound(r)] for p, r in entries],
    )
    figures.show(
        fig,
        "optimization-time",
        f"Time of one forward call at {shape()['seq_len']:,} tokens, with 95 % intervals and lower bounds.",
        f"Time of one forward call at {shape()['seq_len']:,} tokens: {said}.",
        data,
        stamp=study.stamp,
    )


def backends(study: Study) -> Table:
    """Every kernel that this device runs or refuses, with the reason, and its time where it was timed."""
    timed = {}
    for row in document_rows(study, system="ringlab"):
        s = switches(row.point)
        if s == {**FULL, "backend": s["backend"]} and s["backend"] != "auto" and not objection(row):
            timed.setdefault(s["backend"], []).append(row)
    times_of = {name: ", ".join(f"{ms(r).plain} {SHORT[r.point.dtype]}" for r in rows) for name, rows in timed.items()}
    dense = best(study.rows(system="dense_sdpa", **shape()))
    if study.device_type == "cuda" and not torch.cuda.is_available():
        return kernel_tables.recorded(_kernel_rows(study), study.stamp)
    return kernel_tables.probed(study.device_type, study.stamp, times_of, ms(dense).plain)


def _kernel_rows(study: Study) -> list[list]:
    """What each kernel did when the rows were measured elsewhere."""
    rows = [r for r in document_rows(study, system="ringlab") if switches(r.point)["backend"] != "auto"]
    rows = [r for r in rows if switches(r.point) == {**FULL, "backend": switches(r.point)["backend"]}]
    return [[switches(r.point)["backend"], SHORT[r.point.dtype], ms(r), error(r), objection(r) or None] for r in rows]


def backends_by_rule(study: Study) -> Table:
    """What the kernels' rules say of the profile's own GPU; for a CPU, of the document's."""
    return kernel_tables.by_rule(_gpu(study), study.stamp)


def _gpu(study: Study):
    """The GPU that computed figures are for: the profile's own, or the document's where the profile has none."""
    if study.profile.kind == "cuda" and study.profile.capability is not None:
        return study.profile
    return hardware.get_profile(published()["profile"])


def computed(study: Study) -> Table:
    """What arithmetic alone says of the document's call on a GPU that was not at hand."""
    return computed_table(_gpu(study), shape(), pattern(), study.stamp)


def two_cards(study: Study) -> Table:
    """Whether the document's failed run, 16K tokens on two 8 GB cards, fits."""
    return fit_table(study.stamp)


def policy(study: Study) -> Text:
    """The dtype that the profile's policy chooses and why, and the torch build that drives it."""
    gpu = _gpu(study)
    lines = [f"**{gpu.title}**: {gpu.dtype_reason()}."]
    lines.append(f"The torch that drives it: `{hardware.install_line(gpu.capability)}`")
    if study.profile.kind == "cpu":
        lines.insert(0, f"**{study.device}**: {study.profile.dtype_reason()}.")
    return study.text(*lines)
