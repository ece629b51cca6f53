"""What a reader calls a row, and what lies beside it."""

DEFAULTS = {"gather": False, "cache": True, "pool": False, "backend": "auto"}
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def label(point) -> str:
    """A point in one line, without the options that stand as they do by default."""
    usual = DEFAULTS if point.system == "ringlab" else {}
    options = {
        key: value
        for key, value in point.options
        if key not in usual or value != usual[key]
    }
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
