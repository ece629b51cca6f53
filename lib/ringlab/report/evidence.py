"""Stored rows as evidence for advice: what calls took on a profile's hardware, and what
small models learned with which attention.
"""

from collections.abc import Sequence
from itertools import chain

from .. import hardware, measure
from ..advise import Advice, Evidence, advise
from ..measure.suites import selecting_systems
from .places import read_manifest, reports_folder
from .study import Study, read_study, with_rates

# Attention that small models were trained with, on the page of quality, by what advice
# calls it.
TRAINED = {
    "dense": "Dense",
    "far": "Window, first layer dense",
    "local": "Window",
}


def evidence(study: Study) -> tuple[Evidence, ...]:
    """Every quoted time of this library, as it is called by itself, on one rank."""
    return tuple(
        Evidence(p.call(), row.median)
        for row in study.good
        for p in [row.point]
        if row.median and p.system == "ringlab" and p.world_size == 1 and not p.options
    )


def choosing(study: Study) -> tuple[Evidence, ...]:
    """Every quoted time of a method that chooses its keys by content beside that of
    dense attention, as it is called by itself, in one group.
    """
    compared = []
    dense = {
        (row.group, row.point.id): row.median
        for row in study.good
        if row.point.system == "ringlab" and not row.point.options
    }
    for name, (system, options) in selecting_systems(study.profile).items():
        for row in study.good:
            p = row.point
            if (p.system, dict(p.options)) != (system, options):
                continue
            beside = dense.get((row.group, p.but(system="ringlab", options={}).id))
            if beside and row.median:
                over = row.median / beside
                compared.append(Evidence(p.call(), row.median, name, over))
    return tuple(compared)


def stored(
    profile: hardware.Profile,
) -> tuple[hardware.Profile, tuple[Evidence, ...]]:
    """A profile and the evidence of its rows, methods that choose keys by content among
    them; none where there are none, or where they are of another CPU.

    This machine's CPU has the rates of its rows: a probe beside other work would find
    lower ones.
    """
    study = read_study(profile, reports_folder() / profile.name / "data")
    here = measure.machine_id()
    if profile.kind == "cpu" and any(
        row.provenance.get("machine") != here for row in study.good
    ):
        return profile, ()
    return with_rates(study), (*evidence(study), *choosing(study))


def advised(profile: hardware.Profile, seq_len: int, **asked) -> Advice:
    """``advise`` on the stored rows of a profile, and on what small models learned."""
    profile, rows = stored(profile)
    return advise(profile, seq_len, rows=rows, trained=learned(), **asked)


def learned(reports: Sequence[dict] = ()) -> dict[str, str]:
    """What small models recalled with each attention of ``TRAINED``, and what they
    answered with methods that choose keys by content, in words: from the
    page of quality among these ``reports`` of a manifest, else from a stored manifest;
    empty where there is none.
    """
    folders = sorted(reports_folder().glob("*/"))
    stored = (read_manifest(folder).get("reports", []) for folder in folders)
    known = chain(reports, chain.from_iterable(stored))
    facts = next((report["facts"] for report in known if report.get("facts")), None)
    if facts is None:
        return {}
    windows = f", with windows of {facts['window']}"
    said = {
        kind: f"trained small{'' if kind == 'dense' else windows}: most is recalled from up to "
        f"{facts['recalled'][name]:,} of {facts['tokens']:,} tokens back"
        for kind, name in TRAINED.items()
        if name in facts["recalled"]
    }
    answered = facts.get("answered", {})
    return said | {
        name: f"trained small, it answers {right} % of questions about"
        f" {facts['tokens']:,} tokens, dense attention {answered['Dense']} %"
        for name, right in answered.items()
        if name != "Dense"
    }
