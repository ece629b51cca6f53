"""The appendix on GPU kernels: each way of running a pattern, measured.

Its rows are those of the suite ``kernels``, which only a GPU gives. A page without such
rows has no appendix.
"""

from __future__ import annotations

import json

from ..measure import suites as suite
from .columns import PEAK, ROOFLINE, TIME, TOKENS, Column, table, timed
from .findings import failures, missing_points
from .study import Study, open_study
from .tables import Cell, Table, interval, number

TITLE = """## Kernels on this GPU

Each way to run one pattern, and the time that it takes."""
TUNED = "tuned.json"  # beside the rows; `python -m ringlab tune` writes it
WAYS = {  # by way: what a reader calls it, and what it does
    "default": (
        "Default path",
        '`backend="auto"`; as the way with as many operator calls',
    ),
    "lists": (
        "Tile lists (Triton)",
        "one launch a pass; pairs of several branches are computed once, nothing is merged",
    ),
    "fused": (
        "torch's kernels on strided views, one merging kernel",
        "a call for each branch and offset, one merge",
    ),
    "strided": (
        "torch's kernels on strided views, eager merges",
        "a call for each branch and offset, merged by torch",
    ),
    "copying": (
        "Copying form",
        "the rows of each branch are copied, its results scattered and mixed",
    ),
    "cudnn": (
        "cuDNN, contiguous segments",
        "an upper limit: one branch, nothing dilated, nothing to merge",
    ),
    "flash": (
        "torch's flash, contiguous segments",
        "an upper limit: one branch, nothing dilated, nothing to merge",
    ),
    "flex": ("FlexAttention", "compiled for the mask"),
    "dense_sdpa": ("Dense SDPA", "another function: every key"),
}
PEERS = (*suite.RUNG_PEERS, "flex")


def appendix(profile: str = "auto", data: str = "") -> None:
    """Display the appendix of a profile, or of the folder ``data``; nothing where no
    kernel was measured or tuned.
    """
    from IPython.display import Markdown, display

    study = open_study(profile, data, "kernels")
    if found := [
        part for part in (times(study), tuned(study), rejected(study)) if part
    ]:
        display(Markdown(TITLE), *found)


def measured(study: Study) -> list:
    """The rows of this suite: by shape, then by way in the order of ``WAYS``."""
    passes, ways = list(suite.RUNG_PASSES), list(WAYS)

    def place(row) -> tuple:
        p = row.point
        shape = (
            row.group.startswith(suite.RUNGS_ON_BLOCKS),
            p.seq_len,
            -p.head_dim,
            passes.index(pass_of(p)),
        )
        return *shape, ways.index(way_of(p))

    return sorted(
        study.rows(group=lambda name: name.startswith(suite.RUNGS)), key=place
    )


def way_of(point) -> str:
    """The way, of ``WAYS``, that a point measures."""
    options = dict(point.options)
    if point.system != "ringlab":
        return options.get("backend", point.system)
    return next(name for name, known in suite.RUNG_WAYS.items() if known == options)


def pass_of(point) -> str:
    """The pass, of ``RUNG_PASSES``, that a point measures."""
    return (
        "causal"
        if point.causal
        else "forward"
        if point.passes == "fwd"
        else "forward and backward"
    )


def rate(row) -> float | None:
    """Useful TFLOP/s; None where no time may be quoted."""
    return row.cost["flops"] / 1e12 / row.median if timed(row) else None


def of_best_peer(study: Study, row) -> Cell | None:
    """The rate of a row over that of the fastest peer that took turns with it, by
    useful work; None for dense.
    """
    peers = [
        r for r in study.rows(group=row.group) if way_of(r.point) in PEERS and timed(r)
    ]
    peer = max(peers, key=rate, default=None)
    ratio = (
        study.ratio(peer, row)
        if peer is not row and row.point.system != "dense_sdpa"
        else None
    )
    if ratio is None:
        return None
    percent = 100 * row.cost["flops"] / peer.cost["flops"]
    return Cell(
        f"{number(percent * ratio.value)} %", interval(ratio.low, ratio.high, percent)
    )


def times(study: Study) -> Table | None:
    """Time, roofline, useful TFLOP/s and share of the best peer's rate, by way, length
    and pass.
    """
    rows = measured(study)
    missing = (
        f" Not measured: {len(m)} points, as {m[0].label()}."
        if (m := missing_points(study))
        else ""
    )
    return (
        table(
            f"Ways to run {suite.RUNG_PATTERN} and {suite.RUNG_MASK}, {suite.RUNG_HEADS} heads",
            [
                Column("Way", lambda r: Cell(*WAYS[way_of(r.point)])),
                TOKENS,
                Column(">head_dim", lambda r: r.point.head_dim),
                Column("Pattern", lambda r: r.point.pattern["kind"].replace("_", "-")),
                Column("Pass", lambda r: pass_of(r.point)),
                TIME,
                ROOFLINE,
                Column(">Of the best peer", lambda r: of_best_peer(study, r)),
                Column(
                    ">Useful TFLOP/s", lambda r: number(x) if (x := rate(r)) else None
                ),
                PEAK,
                Column(">Operator calls", lambda r: r.memory.get("operator_calls")),
            ],
            rows,
            note="Of the best peer: useful FLOPs a second, over those of the faster of cuDNN and torch's flash on "
            "contiguous segments, or of FlexAttention on the same blocks. Useful work is counted branch by branch."
            f"{missing}",
        )
        if rows
        else None
    )


def rejected(study: Study) -> Table | None:
    """The rows of this suite that are not shown, with the reason of each."""
    return failures(study) if measured(study) else None


def tuned(study: Study) -> Table | None:
    """The tile sizes that ``ringlab tune`` timed, by use and the fastest first; None
    where nothing was tuned.
    """
    try:
        found = json.loads((study.folder / TUNED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    default = {one["use"]: one["seconds"] for one in found["timed"] if one["default"]}
    lines = []
    for one in sorted(
        found["timed"], key=lambda x: (x["use"], x["seconds"] is None, x["seconds"])
    ):
        size, seconds, slow = one["size"], one["seconds"], default.get(one["use"])
        lines.append(
            [
                one["use"],
                f"{size['rows']} × {size['cols']}, {size['warps']}, {size['stages']}, {size['reads']}",
                number(1e3 * seconds) if seconds else Cell("refused", kind="bad"),
                f"{number(slow / seconds)}×" if seconds and slow else None,
                one["why"]
                or ", ".join(["kept"] * one["kept"] + ["the default"] * one["default"])
                or None,
            ]
        )
    about = found["about"]
    return Table(
        f"Tile sizes of the tile lists at {found['shape']['seq_len']:,} tokens",
        [
            "Pass",
            "Tile, warps, stages, reads",
            ">Time (ms)",
            ">Default over it",
            "Outcome",
        ],
        lines,
        note=f"{about['device']}, torch {about['torch']}, triton {about['triton']}, commit {about['commit'][:12]}"
        f"{' and changes' * (about['dirty'] is True)}. Medians of one candidate after another, so small differences "
        "tell nothing. Each result was checked against that of the defaults, and those against float64.",
        folded=True,
    )
