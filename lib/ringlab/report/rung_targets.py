"""What the kernels are held to on a GPU, each met or missed by the rows."""

from __future__ import annotations

from collections.abc import Callable

from ..measure import suites as suite
from . import rung_rows as rows
from .cells import held
from .study import Study, pattern_of
from .tables import Cell, Table, number
from .trust import objection, status

Found = tuple[float, float | None, float | None]  # value, interval


def targets(study: Study) -> Table | None:
    """Each target with the default path's figure, its verdict, and the figure of the way that comes nearest to it."""
    if not rows.measured(study):
        return None
    lines = []
    for target in rows.data()["targets"]:
        if target["test"] == "rate" and study.profile.name != rows.data()["profile"]:
            continue  # what another GPU can do is not known here
        words, show, test = TESTS[target["test"]]
        own = {way: subject(study, way, target) for way in suite.RUNG_WAYS}
        found = {way: test(study, row, target) for way, row in own.items() if row is not None}
        known = {way: x for way, x in found.items() if x is not None}
        near = (max if "least" in target else min)(known, key=lambda way: known[way][0], default=None)
        best = Cell(rows.data()["ways"][near]["name"], _text(known[near], show)) if near else None
        lines.append([
            words.format_map(target), _aim(target, show), _figure(found.get("default"), own["default"], show),
            verdict(found.get("default"), target), best,
        ])  # fmt: skip
    return study.table(
        "What is aimed at, and what these rows say",
        ["Target of the default path", "Aim", ">Measured", "Verdict", "Best way"],
        lines,
        note="Met or missed with all of the interval; not told, where the aim lies inside it. Best peer: the faster of "
        "cuDNN and torch's flash on segments of one branch that lie contiguous, by useful FLOPs a second.",
    )  # fmt: skip


def subject(study: Study, way: str, target: dict):
    """The row of a way that a target is about."""
    if target["test"] == "memory":
        return trained(study, way)
    if target["test"] == "error":
        return nearest_its_bound(study, way)
    shape = {k: target[k] for k in ("head_dim", "seq_len") if k in target}
    mask = suite.RUNG_MASK if target["test"] in ("over_density", "over_flex") else None
    return rows.one(study, way, target.get("pass", "forward"), mask=mask, **shape)


def verdict(found: Found | None, target: dict) -> Cell:
    """ "met", "missed", or "not told" where the aim lies inside the interval; "open" without a figure."""
    if found is None:
        return Cell("open", kind="none")
    value, low, high = found
    low, high = (value if x is None else x for x in (low, high))
    least, most = target.get("least", -float("inf")), target.get("most", float("inf"))
    if low >= least and high <= most:
        return Cell("met", kind="good")
    return Cell("missed", kind="bad") if high < least or low > most else Cell("not told", kind="none")


def share(study: Study, own, target: dict) -> Found | None:
    """Of the best peer's rate."""
    return rows.over(study, rows.best_peer(study, target["pass"], target["head_dim"]), own, per_work=True)


def rate(study: Study, own, target: dict) -> Found | None:
    return rows.rate(own)


def over_copying(study: Study, own, target: dict) -> Found | None:
    return rows.over(study, rows.one(study, "copying", seq_len=target["seq_len"]), own)


def over_strided(study: Study, own, target: dict) -> Found | None:
    slow = rows.one(study, "strided")
    return rows.over(study, slow, own) if own is not slow else None


def over_density(study: Study, own, target: dict) -> Found | None:
    """Time over dense time times density."""
    found = rows.over(study, own, dense_beside(study, own))
    return found and tuple(x / pattern_of(own.point).density(own.point.seq_len) for x in found)


def over_flex(study: Study, own, target: dict) -> Found | None:
    return rows.over(study, own, flex(study))


def memory(study: Study, own, target: dict) -> Found | None:
    """The allocator's peak over the tensors."""
    found = held(own)
    return found and (found[1], None, None)


def error(study: Study, own, target: dict) -> Found | None:
    """Over its bound, which is twice a dense call's."""
    return _over_bound(own), None, None


def _over_bound(row) -> float:
    return max(e / row.tolerance[name] for name, e in row.errors.items())


def nearest_its_bound(study: Study, way: str):
    """The checked row of a way whose error comes nearest to its bound, or goes beyond."""
    own = [
        r for r in study.rows(rows.measured(study), system="ringlab") if dict(r.point.options) == suite.RUNG_WAYS[way]
    ]
    checked = [r for r in own if r.errors and r.errors.keys() <= r.tolerance.keys()]
    return max(checked, key=_over_bound, default=None)


def dense_beside(study: Study, row):
    """Dense attention that took turns with a row on blocks."""
    same = {"group": row.group, "passes": row.point.passes, "seq_len": row.point.seq_len}
    return next(iter(study.rows(rows.measured(study), system="dense_sdpa", **same)), None)


def flex(study: Study):
    """FlexAttention on the mask of the suite."""
    return next(iter(study.rows(rows.measured(study), system="flex")), None)


def trained(study: Study, way: str):
    """The longest sequence that was trained on, each way alone on the GPU."""
    found = [r for r in study.rows(group=suite.RUNGS_IN_MEMORY) if dict(r.point.options) == suite.RUNG_WAYS[way]]
    return max(found, key=lambda r: r.point.seq_len, default=None)


def _percent(x: float) -> str:
    return f"{number(100 * x)} %"


def _times(x: float) -> str:
    return f"{number(x)}×"


def _tflops(x: float) -> str:
    return f"{number(x)} TFLOP/s"


# By test: what is aimed at in words, how its figures are shown, and the figure of a way's own row.
TESTS: dict[str, tuple[str, Callable[[float], str], Callable[..., Found | None]]] = {
    "share": ("Of the best peer's rate, {pass}, head_dim {head_dim}", _percent, share),
    "rate": ("Useful work, {pass}, head_dim {head_dim}", _tflops, rate),
    "over_copying": ("Faster than the copying form, {seq_len:,} tokens", _times, over_copying),
    "over_strided": ("Faster than strided views with eager merges", _times, over_strided),
    "over_density": ("Blocks: time over dense time times density", _times, over_density),
    "over_flex": ("Blocks: time over FlexAttention's", _times, over_flex),
    "memory": ("Peak memory of the longest training step, of its tensors", _times, memory),
    "error": ("Largest error, of twice that of one dense call", _percent, error),
}


def _aim(target: dict, show: Callable) -> str:
    return f"at least {show(target['least'])}" if "least" in target else f"at most {show(target['most'])}"


def _text(found: Found, show: Callable) -> str:
    value, low, high = found
    return show(value) if low is None else f"{show(value)}; {show(low)} to {show(high)}"


def _figure(found: Found | None, row, show: Callable) -> Cell:
    """The figure, or what became of the row, or of one that it would be held against."""
    if found is not None:
        return Cell(show(found[0]), "" if found[1] is None else f"{show(found[1])} to {show(found[2])}")
    if row is None:
        return Cell("not measured", kind="none")
    return Cell(status(row), kind="bad") if objection(row) else Cell("nothing to hold it against", kind="none")
