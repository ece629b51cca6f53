"""Packages of others beside this library: each is checked on the function that it documents, and timed where right."""

from __future__ import annotations

from ..measure import peers as packages
from . import columns
from .columns import TIME, TOKENS, Column, table
from .study import Study, best, pattern_of, together
from .tables import Cell, Table, Text
from .trust import objection, reason, status

SOURCES = {  # what a package's own code does where that explains a failed check
    "dilated_attention_pytorch": "divides each output by the sum of the outputs over positions, which may be near zero "
    "or negative, and gives groups of unequal size the wrong heads",
    "torchscale_dilated": "takes no gradient of the weights by which it mixes the branches",
}


def peers(study: Study) -> Table | Text:
    """Each package on its own function: correct or its error, and its time over this library's, which took turns."""
    order = [*packages.PEERS]
    rows = sorted(study.rows(system=lambda name: name in order), key=lambda r: order.index(r.point.system))
    rows = [r for r in rows if r.option("version")]
    if not rows:
        names = ", ".join(p.package for p in packages.PEERS.values())
        return study.text(f"No other package was measured: `make report PEERS=1` installs and measures {names}.")
    here = {r.point.system: packages.PEERS[r.point.system] for r in rows}
    kernels = [f"{p.kernel} in {p.package}" for p in here.values() if p.kernel and study.device_type == "cpu"]
    wrong = {r.point.system for r in rows if status(r) == "incorrect"}
    why = [f"{here[name].package} {source}" for name, source in SOURCES.items() if name in wrong]
    absent = [f"{p.package} ({p.how})" for name, p in packages.PEERS.items() if name not in here]
    return table(
        study, "Beside the packages of others, on the same function",
        [Column("Package", lambda x: _package(x["row"])),
         Column("Pattern", lambda x: str(pattern_of(x["row"].point))), TOKENS.of("row"), Column("Pass", _pass),
         Column("Check", lambda x: _checked(x["row"])),
         columns.ratio(study, "row", "ours", ">Its time over ours"), TIME.of("row"), TIME.of("ours", ">Ours (ms)")],
        [{"row": r, "ours": _ours(study, r)} for r in rows],
        note="Ours: `ringlab.attention` on the same tensors, in turns. Check: the largest error against the float64 "
        "reference, of gradients too where a pass has them; what is wrong, or causal, is not timed."
        + (f" By their source code, {'; '.join(why)}." if why else "")
        + (f" On a CPU torch's own kernel stands in for {' and '.join(kernels)}." if kernels else "")
        + (f" Absent: {'; '.join(absent)}." if absent else ""),
    )  # fmt: skip


def _ours(study: Study, row):
    """This library on the same function, in turns with the row."""
    mine = row.point.but(system="ringlab", options={})
    found = [r for r in study.rows(system="ringlab", group=row.group) if r.point == mine and together(r, row)]
    return best(found)


def _package(row) -> Cell:
    return Cell(packages.PEERS[row.point.system].package, row.option("version", ""))


def _pass(line: dict) -> str:
    point = line["row"].point
    return ("forward" if point.passes == "fwd" else "training") + ", causal" * point.causal


def _checked(row) -> Cell:
    """The error if it is within its tolerance, how a row fails its check, or why there is none."""
    if not objection(row):
        return Cell("correct", f"{max(row.errors.values()):.1e}", kind="good")
    if status(row) != "incorrect":
        return Cell(status(row), reason(row), kind="none")
    return Cell("incorrect", reason(row), kind="bad")
