"""What a reader calls a row, by its system and switches, and what lies beside it."""

from dataclasses import replace

from .. import patterns
from ..measure.validity import why_not_quotable
from .study import Study, best, together

DEFAULTS = {"gather": False, "cache": True, "pool": False, "backend": "auto"}
FULL = {"gather": False, "cache": True, "pool": True, "backend": "auto"}
PLAIN = {"gather": True, "cache": False, "pool": False, "backend": "eager"}
CONTIGUOUS = {
    "cudnn": "cuDNN",
    "flash": "torch's flash",
    "efficient": "torch's efficient",
}
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def switches(point) -> dict:
    return DEFAULTS | dict(point.options)


def is_plain(result) -> bool:
    return result.point.system == "ringlab" and switches(result.point) == PLAIN


def is_optimised(result) -> bool:
    return result.point.system == "ringlab" and switches(result.point) == FULL


def label(result) -> str:
    """What a reader calls a row."""
    point = result.point
    options = dict(result.point.options)
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
    if point.system != "ringlab":
        return names.get(point.system, point.system)
    if is_plain(result):
        return "Naive (ours)"
    s = switches(point)
    if "twin" in s:
        return f"{label(replace(result, point=point.without_control))}, once more"
    if s == DEFAULTS:
        return "ringlab.attention as called"
    if not s.get("results", True):
        return "ringlab.attention, results in fresh memory"
    if "blocks" in s:
        return f"ringlab.attention, blocks={s['blocks']}" + (
            "" if s["cache"] else ", cache off"
        )
    if "pool_threshold_mb" in s:
        return f"Strided, pool from {s['pool_threshold_mb']:g} MiB"
    if s == FULL | {"backend": s["backend"]}:
        return "All optimizations" + (
            "" if s["backend"] == "auto" else f", {s['backend']} kernel"
        )
    parts = [
        "Gathered (ours)" if s["gather"] else "Strided",
        "cache on" if s["cache"] else "cache off",
    ]
    parts += ["pool on" if s["pool"] else "pool off"] + (
        [] if s["backend"] == "auto" else [s["backend"]]
    )
    return ", ".join(parts)


def steps_of(point) -> str:
    """What a ``plan_build`` builds."""
    options = dict(point.options)
    if "blocks" in options:
        return f"Calls of blocks, {options['blocks']}"
    return (
        "Index tensors, gathered" if options.get("gather") else "Plan of strided views"
    )


def pass_of(point) -> str:
    """A pass in words.

    >>> from ringlab.measure import sgemm
    >>> pass_of(sgemm(8).but(passes="fwd+bwd", causal=True))
    'training, causal'
    """
    return ("forward" if point.passes == "fwd" else "training") + (
        ", causal" if point.causal else ""
    )


def dense_beside(study: Study, row):
    """Dense SDPA on the shape, dtype and pass of a row, one that took turns with it
    where there is one.
    """
    p = row.point
    rows = study.rows(
        system="dense_sdpa", dtype=p.dtype, world_size=p.world_size, **p.shape
    )
    return best(
        [r for r in rows if together(r, row) and not why_not_quotable(r)]
    ) or best(rows)


def begins(ratios: list[tuple]) -> int | None:
    """The shortest n from which the pattern is faster than dense at every longer n
    measured, beyond noise.
    """
    start = None
    for n, ratio, *_ in reversed(ratios):
        if ratio is None or not ratio.significantly_slower:
            break
        start = n
    return start
