"""Peak memory beside the tensors themselves: what a function holds besides its inputs and results."""

from __future__ import annotations

from . import figures
from .cells import error, has_peak, held, ms, within
from .engine import lists, pass_of
from .rows import DEFAULTS, SHORT, is_optimised, is_plain, label, pattern, shape, switches
from .study import Study
from .tables import Cell, Table, size

COMPARED = ("dense_sdpa", "contiguous_segments")


def memory_rows(study: Study) -> list:
    """Rows with a measured peak, one per system, pattern, dtype and pass: the longest sequence of each."""
    found: dict[tuple, object] = {}
    for r in sorted(study.good, key=lambda r: r.point.seq_len):
        if has_peak(r) and _worth_showing(r):
            p = r.point
            found[label(r), lists(p).text, p.dtype, p.passes, p.causal] = r
    return sorted(
        found.values(), key=lambda r: (r.point.passes, -r.point.seq_len, lists(r.point).text, r.point.dtype, within(r))
    )


def _worth_showing(r) -> bool:
    """Not the single switches, which differ from their ends in no buffer of note, and not the pool's own function."""
    return r.point.system != "sgemm" and r.point.batch == r.point.world_size == 1 and (
        r.point.system != "ringlab" or is_plain(r) or is_optimised(r) or switches(r.point) == DEFAULTS
    )  # fmt: skip


def memory(study: Study) -> Table:
    """Peak memory as a multiple of the tensors that the caller holds."""
    rows = [
        [label(r), SHORT[r.point.dtype], pass_of(r.point), lists(r.point), r.point.seq_len,
         size(r.memory["floor_bytes"]), Cell(size(r.memory["tracked_peak_bytes"]), f"{within(r):.2f} × tensors"),
         _high_water(r), ms(r), error(r)]
        for r in memory_rows(study)
    ]  # fmt: skip
    return study.table(
        "Peak memory beside the tensors themselves",
        ["System", "dtype", "Pass", "Segments / rates", ">Tokens", ">Tensors", ">Tracked peak",
         ">Process or allocator", ">Time (ms)", ">Error"],
        rows or [["not measured", *[None] * 9]],
        note="Tensors: q, k, v and out once; with the backward also dO, dq, dk and dv. Tracked: bytes of live torch "
        "storages. Process or allocator: growth of the process's resident memory, or the CUDA allocator's peak, "
        "inputs included; every point had a process of its own.",
    )  # fmt: skip


def _high_water(r) -> Cell | None:
    """Bytes of the process or allocator, for points large enough for it to say something."""
    more = held(r)
    return Cell(size(more[1] * r.memory["floor_bytes"]), f"{more[1]:.2f} × tensors") if more else None


def memory_figure(study: Study) -> None:
    """Peak over the tensors of the document's call: its segments at its length, and dense attention."""
    rows = [r for r in memory_rows(study) if _is_the_documents(r.point)]
    if not rows:
        return
    items = [
        figures.Bar(
            f"{label(r)}, {SHORT[r.point.dtype]}", within(r), bound=1.0,
            color=figures.GREY if r.point.system in COMPARED else figures.BLUE,
        )
        for r in rows
    ]  # fmt: skip
    fig = figures.bars(
        items,
        xlabel="Tracked peak, in multiples of the tensors themselves",
        bound_label="the tensors themselves",
        fmt="{:.2f}".format,
    )
    said = "; ".join(f"{b.label} {b.value:.2f}" for b in items)
    data = study.table(
        "Data: peak memory over tensors",
        ["System", "dtype", ">Tensors", ">Tracked peak", ">Multiple"],
        [[label(r), SHORT[r.point.dtype], size(r.memory["floor_bytes"]), size(r.memory["tracked_peak_bytes"]),
          f"{within(r):.2f}"] for r in rows],
    )  # fmt: skip
    where = f"{shape()['seq_len']:,} tokens, forward, segments of the document"
    caption = f"Peak memory of live tensors, in multiples of inputs and results themselves ({where})."
    figures.show(fig, "optimization-memory", caption, f"{caption} {said}.", data, stamp=study.stamp)


def _is_the_documents(point) -> bool:
    """The document's shape and pass, with its segments in either way of mixing, or dense."""
    names = ("seq_len", "passes", "causal")
    same = all(getattr(point, k) == shape()[k] for k in names)
    return same and point.pattern.get("segment_lengths") in (None, pattern().to_dict()["segment_lengths"])
