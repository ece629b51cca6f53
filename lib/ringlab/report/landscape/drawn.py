"""The figures of the landscape: time and memory over length, of the systems that have a rank."""

from __future__ import annotations

from .. import curves, figures
from ..cells import has_peak
from ..published import MB
from ..study import Study
from ..tables import number
from ..theme import INK
from .field import FIELD, INSIDE, lengths, standing

COLORS = dict(zip((e.name for e in FIELD), (
    figures.GREY, figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE, figures.RED, INK, INK, INK,
)))  # fmt: skip
FLOOR = "q, k, v and out"


def _series(study: Study, value) -> dict[str, list[tuple]]:
    """Name -> (n, y, low, high) of the systems that have a rank; ``value(row)`` gives the last three or None."""
    found: dict[str, list[tuple]] = {}
    for n in lengths(study):
        for _, e, r in standing(study, n):
            if (y := value(r)) is not None:
                found.setdefault(e.name, []).append((n, *y))
    return {e.name: found[e.name] for e in FIELD if e.name in found}


def _show(study: Study, series: dict, name: str, ylabel: str, caption: str, unit: str, dashed=()) -> None:
    colors = [COLORS.get(x, figures.SKY) for x in series]
    fig = curves.lines(series, xlabel="Tokens", ylabel=ylabel, colors=colors, dashed=dashed)
    said = "; ".join(f"{x} {number(p[-1][1])} {unit} at {p[-1][0]:,} tokens" for x, p in series.items())
    at = {x: {n: number(y) for n, y, *_ in points} for x, points in series.items()}
    ns = sorted({n for found in at.values() for n in found})
    lines = [[x, *(found.get(n) for n in ns)] for x, found in at.items()]
    data = study.table(f"Data: {ylabel[0].lower()}{ylabel[1:]}", ["System", *(f">{n:,} tokens" for n in ns)], lines)
    figures.show(fig, name, caption, f"{caption} {said}.", data, stamp=study.stamp)


def time_figure(study: Study) -> None:
    """Time over length of the systems that have a rank."""
    series = _series(study, lambda r: tuple(x * 1e3 for x in (r.median, *r.ci)))
    if series:
        caption = "Time over length, both axes logarithmic, with 95 % intervals; only systems that passed their checks."
        _show(study, series, "landscape-time", "Time (ms)", caption, "ms")


def memory_figure(study: Study) -> None:
    """Peak of live tensors over length, and what the tensors themselves take."""

    def held(row):
        seen = has_peak(row) and row.point.system not in INSIDE
        return (row.memory["tracked_peak_bytes"] / MB, None, None) if seen else None

    series = _series(study, held)
    if not series:
        return
    floors = {n: r.memory["floor_bytes"] / MB for n in lengths(study) for _, _, r in standing(study, n) if has_peak(r)}
    series[FLOOR] = [(n, mb, None, None) for n, mb in floors.items()]
    caption = "Peak of live tensors over length, inputs and result included, both axes logarithmic."
    _show(study, series, "landscape-memory", "Peak memory (MB)", caption, "MB", [FLOOR])
