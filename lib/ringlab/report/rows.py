"""What a reader calls a row, and what lies beside it."""

from ..measure.validity import why_not_quotable
from .study import Study, best, together

DEFAULTS = {"gather": False, "cache": True, "pool": False, "backend": "auto"}
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def label(point) -> str:
    """A point in one line, without the options that stand as they do by default."""
    usual = DEFAULTS if point.system == "ringlab" else {}
    options = {k: v for k, v in point.options if k not in usual or v != usual[k]}
    return point.but(options=options).label()


def pass_of(point) -> str:
    """A pass in words.

    >>> from ringlab.measure import Point
    >>> pass_of(Point("ringlab", {"kind": "dense"}, passes="fwd+bwd", causal=True))
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
        if ratio is None or ratio.verdict != "slower":
            break
        start = n
    return start
