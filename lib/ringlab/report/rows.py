"""Names of rows for a reader, by their systems and switches, and the rows beside them."""

from dataclasses import replace

from ..measure.points import pattern_of
from ..measure.suites import FULL, PLAIN
from ..measure.validity import why_not_quotable
from .study import Study, best, together

DEFAULTS = {"gather": False, "cache": True, "pool": False, "backend": "auto"}
CONTIGUOUS = {
    "cudnn": "cuDNN",
    "flash": "torch's flash",
    "efficient": "torch's efficient",
}
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def switches(point) -> dict:
    return DEFAULTS | dict(point.options)


def label(result) -> str:
    """What a reader calls a row."""
    point = result.point
    options = dict(point.options)
    kernel = CONTIGUOUS.get(options.get("backend"), "torch")
    names = {
        "dense_sdpa": "Dense SDPA",
        "copying": "Copying form",
        "contiguous_segments": f"{kernel}'s kernel, contiguous segments",
        "sgemm": "Matrix product",
        "plan_build": f"{steps_of(point)}, {'found' if options.get('warm') else 'built'}",
        "flex": f"FlexAttention, {pattern_of(point)}",
        "adaptive": f"Blocks chosen by content, {options.get('top_k')} of {options.get('block_size')}",
    }
    if point.system != "ringlab":
        return names.get(point.system, point.system)
    s = switches(point)
    if s == PLAIN:
        return "Naive (ours)"
    if "twin" in s:
        return f"{label(replace(result, point=point.without_control))}, once more"
    if s == DEFAULTS:
        return "ringlab.attention as called"
    if not s.get("results", True):
        return "ringlab.attention, results in fresh memory"
    if "blocks" in s:
        cache = "" if s["cache"] else ", cache off"
        return f"ringlab.attention, blocks={s['blocks']}{cache}"
    if "pool_threshold_mb" in s:
        return f"Strided, pool from {s['pool_threshold_mb']:g} MiB"
    auto = s["backend"] == "auto"
    if s == FULL | {"backend": s["backend"]}:
        return "All optimizations" + ("" if auto else f", {s['backend']} kernel")
    return ", ".join(
        [
            "Gathered (ours)" if s["gather"] else "Strided",
            "cache on" if s["cache"] else "cache off",
            "pool on" if s["pool"] else "pool off",
            *([] if auto else [s["backend"]]),
        ]
    )


def steps_of(point) -> str:
    """What a ``plan_build`` builds."""
    options = dict(point.options)
    if "blocks" in options:
        return f"Calls of blocks, {options['blocks']}"
    gathered = options.get("gather")
    return "Index tensors, gathered" if gathered else "Plan of strided views"


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
