"""Which rows are which in document 000: found by system, pattern, shape and switches, not by the names of groups."""

from __future__ import annotations

from dataclasses import replace

from .. import patterns
from . import published as documents
from .study import Study, best, together
from .trust import objection

DEFAULTS = {"gather": False, "cache": True, "pool": False, "backend": "auto"}
FULL = {"gather": False, "cache": True, "pool": True, "backend": "auto"}
CONTIGUOUS = {"cudnn": "cuDNN", "flash": "torch's flash", "efficient": "torch's efficient"}
PLAIN = {"gather": True, "cache": False, "pool": False, "backend": "eager"}
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def published() -> dict:
    """Document 000 as data."""
    return documents.published("000")


def shape() -> dict:
    """The document's configuration as fields of a point, its pattern aside, on one device."""
    found = {k: v for k, v in published()["shape"].items() if k not in ("segment_lengths", "dilation_rates")}
    return found | {"world_size": 1}


def pattern() -> patterns.Dilated:
    """The document's pattern: head groups, offsets by branch, as the published classes have it."""
    s = published()["shape"]
    return patterns.Dilated(s["segment_lengths"], s["dilation_rates"], mixing="head_groups", offsets="branch")


def document_rows(study: Study, **more) -> list:
    """Timed or failed rows of the document's function at its shape."""
    return study.rows(**{**shape(), "pattern": pattern().to_dict(), "system": computes_pattern, **more})


def computes_pattern(system: str) -> bool:
    return system not in ("sgemm", "dense_sdpa", "contiguous_segments", "plan_build")


def switches(point) -> dict:
    return DEFAULTS | dict(point.options)


def is_plain(result) -> bool:
    return result.point.system == "ringlab" and switches(result.point) == PLAIN


def is_optimised(result) -> bool:
    return result.point.system == "ringlab" and switches(result.point) == FULL


def label(result) -> str:
    """What a reader calls a row."""
    point, options = result.point, dict(result.point.options)
    names = {
        "dense_sdpa": "Dense SDPA",
        "copying": "Copying form",
        "contiguous_segments": f"{CONTIGUOUS.get(options.get('backend'), 'torch')}'s kernel, contiguous segments",
        "sgemm": "Matrix product",
        "plan_build": f"{steps_of(point)}, {'found' if options.get('warm') else 'built'}",
        "flex": f"FlexAttention, {patterns.from_dict(point.pattern)}",
        "adaptive": f"Blocks chosen by content, {options.get('top_k')} of {options.get('block_size')}",
        "cache_workload": f"Lookups of many patterns, {options.get('blocks')}, cache of {options.get('max_mb')} MiB",
        "pool_workload": f"Scratch of {options.get('size_mb')} MiB, {options.get('threads')} threads, "
        + ("pooled" if options.get("pool") else "fresh"),
    }
    if point.system in names:
        return names[point.system]
    if point.system != "ringlab":
        return point.system
    if is_plain(result):
        return "Original (no optimizations)"
    if is_optimised(result):
        return "With all optimizations"
    s = switches(point)
    if "twin" in s:
        return f"{label(replace(result, point=point.first))}, once more"
    if s == DEFAULTS:
        return "ringlab.attention as called"
    if not s.get("results", True):
        return "ringlab.attention, results in fresh memory"
    if "blocks" in s:
        return f"ringlab.attention, blocks={s['blocks']}" + ("" if s["cache"] else ", cache off")
    if "pool_threshold_mb" in s:
        return f"strided, pool from {s['pool_threshold_mb']:g} MiB"
    if s == FULL | {"backend": s["backend"]}:
        return f"With all optimizations, {s['backend']} kernel"
    said = ["gathered" if s["gather"] else "strided", "cache on" if s["cache"] else "cache off"]
    said += ["pool on" if s["pool"] else "pool off"] + ([] if s["backend"] == "auto" else [s["backend"]])
    return ", ".join(said)


def steps_of(point) -> str:
    """What a ``plan_build`` builds."""
    options = dict(point.options)
    if "blocks" in options:
        return f"Calls of blocks, {options['blocks']}"
    return "Index tensors, gathered" if options.get("gather") else "Plan of strided views"


def dtypes(results) -> list[str]:
    """Names of the dtypes present, the document's fp16 first."""
    order = ["float16", "bfloat16", "float32", "float64"]
    return sorted({r.point.dtype for r in results}, key=order.index)


def fastest_row(study: Study):
    """The fastest quotable row of the implementations; single switches are its variants and differ by noise."""
    found = [r for _, r in implementation_rows(study) if r is not None and not objection(r) and r.median]
    return best([r for r in found if computes_pattern(r.point.system)])


def hardware_dtype(study: Study) -> str:
    return str(study.profile.default_dtype()).removeprefix("torch.")


def dense_beside(study: Study, row):
    """Dense SDPA on the shape, dtype and pass of a row, one that took turns with it where there is one."""
    names = ("seq_len", "dtype", "passes", "causal", "batch", "heads", "kv_heads", "head_dim", "world_size")
    found = study.rows(system="dense_sdpa", **{k: getattr(row.point, k) for k in names})
    return best([r for r in found if together(r, row) and not objection(r)]) or best(found)


def implementation_rows(study: Study) -> list[tuple]:
    """(published row or None, our row or None): the document's rows in their dtype, then all else in every dtype."""
    ours = document_rows(study)
    roles = {"original": is_plain, "optimised": is_optimised, "flash": lambda r: r.point.system.endswith("V2Flash")}
    entries, used = [], set()
    for paper in published()["rows"]:
        row = best([r for r in ours if roles[paper["key"]](r) and r.point.dtype == paper["dtype"]])
        entries.append((paper, row))
        used.add(id(row))
    for test in roles.values():
        for dtype in dtypes(ours):
            row = best([r for r in ours if test(r) and r.point.dtype == dtype])
            if row is not None and id(row) not in used:
                entries.append((None, row))
                used.add(id(row))
    named = sorted({r.point.system for r in ours if r.point.system not in ("ringlab",) and not roles["flash"](r)})
    for system in [*named, "dense_sdpa"]:
        pool = (
            study.rows(system="dense_sdpa", **shape())
            if system == "dense_sdpa"
            else [r for r in ours if r.point.system == system]
        )
        for dtype in dtypes(pool):
            entries.append((None, best([r for r in pool if r.point.dtype == dtype])))
    return entries
