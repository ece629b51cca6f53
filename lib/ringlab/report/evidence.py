"""Stored rows as evidence for advice: pairs of rows that took turns and differ in one
setting, both quotable.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations

from .. import cost, hardware, measure
from ..advise import Evidence
from ..engine import Execution
from ..patterns import Dense, Pattern
from .places import REHEARSAL, reports_folder
from .rows import SHORT
from .study import Study, pattern_of, read_study, together, with_rates

DENSE = Dense()
SWITCHES = ("gather", "cache", "pool", "blocks")
TAKEN = {
    "backend",
    "scheme",
    *SWITCHES,
}  # options that are settings; a row with others is of its own kind


def evidence(study: Study, here: str | None = None) -> tuple[Evidence, ...]:
    """Every comparison of two rows of a study that differ in one setting alone.

    ``here``: the machine for which they count (default: their own); those of others,
    and a rehearsal's, decide nothing.
    """
    known = [
        (r, s)
        for r in study.good
        if r.median and not r.ranks.get("oversubscribed") and (s := settings(r))
    ]
    found = []
    for (a, one), (b, two) in combinations(known, 2):
        if not together(a, b) or (a.point.shape, a.point.world_size) != (
            b.point.shape,
            b.point.world_size,
        ):
            continue
        changed = [name for name in one.keys() & two.keys() if one[name] != two[name]]
        if len(changed) == 1 and (changed != ["pattern"] or _against_dense(one, two)):
            found.append(_compared(study, changed[0], (a, one), (b, two), here))
    return tuple(
        e for e in found if e.high < math.inf
    )  # an interval needs five samples


def stored(profile: hardware.Profile) -> tuple[hardware.Profile, tuple[Evidence, ...]]:
    """A profile and the evidence of its rows, or else of its rehearsal; none where
    there are neither.

    This machine's CPU has the rates of its rows: a probe beside other work would find
    lower ones.
    """
    for folder in (profile.name, f"{profile.name}-{REHEARSAL}"):
        study = read_study(profile, reports_folder() / folder / "data")
        if study.results:
            here = measure.machine_id()
            mine = all(r.provenance.get("machine") == here for r in study.good)
            return with_rates(study) if mine else profile, evidence(study, here)
    return profile, ()


def settings(result) -> dict[str, str]:
    """What a row was run with, by setting; empty for a row that is not the library as
    it is called.

    Dense SDPA has a dtype and a pattern. On several ranks a published system is its
    scheme.
    """
    point, options, plain = result.point, dict(result.point.options), Execution()
    found = {"dtype": point.dtype, "pattern": str(pattern_of(point))}
    if point.system == "dense_sdpa":
        return found if not options else {}
    scheme = result.ranks.get("scheme") if point.world_size > 1 else ""
    if options.keys() - TAKEN or not (
        point.system == "ringlab" or (scheme and not options)
    ):
        return {}
    found |= {name: str(options.get(name, getattr(plain, name))) for name in SWITCHES}
    return found | {"backend": options.get("backend", "auto"), "scheme": scheme}


def _against_dense(one: dict, two: dict) -> bool:
    """Dense SDPA, and a sparse pattern as one would run it: two sparse ones are no
    measure of each other.
    """
    sparse = [s for s in (one, two) if s["pattern"] != "dense"]
    usual = {"backend": "auto", "gather": "False", "cache": "True", "blocks": "auto"}
    return len(sparse) == 1 and all(
        sparse[0].get(name) == value for name, value in usual.items()
    )


def _share(result) -> float:
    """Of the pairs of dense attention, those that a row's pattern computes, branch by
    branch.
    """
    p = result.point
    shape = p.seq_len, p.heads, p.kv_heads, p.causal
    return _pairs(pattern_of(p), *shape) / _pairs(DENSE, *shape)


@lru_cache(maxsize=256)
def _pairs(pattern: Pattern, *shape) -> int:
    return cost.count_pairs(pattern, *shape)[0]


def _compared(
    study: Study, about: str, quick: tuple, slow: tuple, here: str | None
) -> Evidence:
    (a, one), (b, two), point = quick, slow, quick[0].point
    ratio = study.ratio(b, a)
    dtype = "" if about == "dtype" else point.dtype
    pattern = next(
        s["pattern"]
        for s in (one, two)
        if s["pattern"] != "dense" or about != "pattern"
    )
    label = [
        "" if about == "pattern" else pattern,
        f"{point.seq_len:,} tokens",
        SHORT.get(dtype, dtype),
        "causal" if point.causal else "",
        "forward" if point.passes == "fwd" else "forward and backward",
        f"{point.world_size} ranks" if point.world_size > 1 else "",
    ]
    foreign = here is not None and a.provenance.get("machine") != here
    origin = [
        f"rows at commit {str(a.provenance.get('commit'))[:10]}",
        "a rehearsal" if study.rehearsal else "",
        f"another machine ({study.device})" if foreign else "",
    ]
    return Evidence(
        about,
        one[about],
        two[about],
        ratio.value,
        ratio.low,
        ratio.high,
        ", ".join(filter(None, label)),
        ", ".join(filter(None, origin)),
        pattern=pattern,
        dtype=dtype,
        seq_len=point.seq_len,
        passes=point.passes,
        causal=point.causal,
        ranks=point.world_size,
        counts=not (foreign or study.rehearsal),
        least=ratio.noise_floor,
        share=_share(b if pattern == two["pattern"] else a)
        if about == "pattern"
        else 0.0,
    )
