"""The appendix on GPU kernels: each way of running a pattern, measured, beside what was predicted, and why.

Its rows are those of the suite ``kernels``, which only a GPU gives. A page without such rows has no appendix.
"""

from __future__ import annotations

import json
from functools import lru_cache

import torch

from ..kernels import triton_config
from ..kernels.tile_schedule import make_schedule, split
from ..measure import suites as suite
from . import study as studies
from .columns import PEAK, ROOFLINE, TIME, TOKENS, Column, table, timed
from .findings import failures, missing_points
from .study import Study, cost_of, pattern_of
from .tables import Cell, Table, interval, number
from .trust import status

TITLE = """## Kernels on this GPU

Each way to run one pattern: the time that it takes, and what was predicted before any had run."""
TUNED = "tuned.json"  # beside the rows; `python -m ringlab tune` writes it
WAYS = {  # by way: what a reader calls it, and what it does
    "default": ("Default path", 'what `backend="auto"` comes to'),
    "lists": (
        "Tile lists (Triton)",
        "one launch a pass; pairs of several branches are computed once, nothing is merged",
    ),
    "fused": ("torch's kernels on strided views, one merging kernel", "a call for each branch and offset, one merge"),
    "strided": ("torch's kernels on strided views, eager merges", "a call for each branch and offset, merged by torch"),
    "copying": ("Copying form", "the rows of each branch are copied, its results scattered and mixed"),
    "cudnn": ("cuDNN, contiguous segments", "an upper limit: one branch, nothing dilated, nothing to merge"),
    "flash": ("torch's flash, contiguous segments", "an upper limit: one branch, nothing dilated, nothing to merge"),
    "flex": ("FlexAttention", "compiled for the mask"),
    "dense_sdpa": ("Dense SDPA", "another function: every key"),
}
PEERS = (*suite.RUNG_PEERS, "flex")
# Predicted before any had run, for one GPU: useful TFLOP/s, branch by branch, of a way by head_dim and pass.
PREDICTED_FOR = "h200"
PREDICTED = {
    ("lists", 128): {"forward": (550, 620), "causal": (420, 470), "forward and backward": (390, 450)},
    ("lists", 64): {"forward": (480, 520)},
    ("fused", 128): {"forward": (600, 640), "causal": (440, 490), "forward and backward": (505, 520)},
    ("fused", 64): {"forward": (370, 390)},
    ("copying", 128): {"forward": (363, 363)},  # 5.3 ms with cuDNN inside
    # Forward and backward: 3.5 / (1 / 633 + 2.5 / 504).
    ("cudnn", 128): {"forward": (633, 633), "causal": (484, 484), "forward and backward": (535, 535)},
    ("cudnn", 64): {"forward": (395, 413), "causal": (334, 388)},
    ("flash", 128): {"forward": (362, 370)},
    ("flash", 64): {"forward": (318, 324), "causal": (262, 299)},
    ("dense_sdpa", 128): {"forward": (691, 702)},
}
SOURCES = (
    "Predicted from the rates of cuDNN 9.19 on H200 (NVIDIA cudnn-frontend, benchmark results h200_919), of cuDNN and "
    "FlashAttention-2 on H100 (FlashAttention-3, arXiv 2407.08608) and of Triton's tutorial kernel on H100, from the "
    "tiles that lists compute, and from 0.47 GB of partial results of strided views at 4.3 TB/s."
)


def appendix(profile: str = "auto", data: str = "") -> None:
    """Display the appendix of a profile, or of the folder ``data``; nothing where no kernel was measured or tuned."""
    from IPython.display import Markdown, display

    study = studies.open_study(profile, data, "kernels")
    if found := [part for part in (times(study), versions(study), tuned(study), rejected(study)) if part]:
        display(Markdown(TITLE), *found)


def measured(study: Study) -> list:
    """The rows of this suite: by shape, then by way in the order of ``WAYS``."""
    passes, ways = list(suite.RUNG_PASSES), list(WAYS)

    def place(row) -> tuple:
        p = row.point
        shape = row.group.startswith(suite.RUNGS_ON_BLOCKS), p.seq_len, -p.head_dim, passes.index(pass_of(p))
        return *shape, ways.index(way_of(p))

    return sorted(study.rows(group=lambda name: name.startswith(suite.RUNGS)), key=place)


def way_of(point) -> str:
    """The way, of ``WAYS``, that a point measures."""
    options = dict(point.options)
    if point.system != "ringlab":
        return options.get("backend", point.system)
    return next(name for name, known in suite.RUNG_WAYS.items() if known == options)


def pass_of(point) -> str:
    """The pass, of ``RUNG_PASSES``, that a point measures."""
    return "causal" if point.causal else "forward" if point.passes == "fwd" else "forward and backward"


def rate(row) -> float | None:
    """Useful TFLOP/s; None where no time may be quoted."""
    return row.cost["flops"] / 1e12 / row.median if timed(row) else None


def of_best_peer(study: Study, row) -> Cell | None:
    """The rate of a row over that of the fastest peer that took turns with it, by useful work; None for dense."""
    peers = [r for r in study.rows(group=row.group) if way_of(r.point) in PEERS and timed(r)]
    peer = max(peers, key=rate, default=None)
    ratio = study.ratio(peer, row) if peer is not row and row.point.system != "dense_sdpa" else None
    if ratio is None:
        return None
    percent = 100 * row.cost["flops"] / peer.cost["flops"]
    return Cell(f"{number(percent * ratio.value)} %", interval(ratio.low, ratio.high, percent))


def times(study: Study) -> Table | None:
    """Time, roofline and share of the best peer's rate, by way, length and pass."""
    rows = measured(study)
    missing = f" Not measured: {len(m)} points, as {m[0].label()}." if (m := missing_points(study)) else ""
    return table(
        study,
        f"Ways to run {suite.RUNG_PATTERN} and {suite.RUNG_MASK}, {suite.RUNG_HEADS} heads",
        [Column("Way", lambda r: WAYS[way_of(r.point)][0]), TOKENS, Column(">head_dim", lambda r: r.point.head_dim),
         Column("Pattern", lambda r: r.point.pattern["kind"].replace("_", "-")),
         Column("Pass", lambda r: pass_of(r.point)), TIME, ROOFLINE,
         Column(">Of the best peer", lambda r: of_best_peer(study, r)), PEAK],
        rows,
        note="Of the best peer: useful FLOPs a second, over those of the faster of cuDNN and torch's flash on "
        f"contiguous segments, or of FlexAttention on the same blocks.{missing}",
    ) if rows else None  # fmt: skip


def versions(study: Study) -> Table | None:
    """What was predicted of each way at one length, what it reached, and the cause."""
    rows = [r for r in measured(study) if r.group.startswith(f"{suite.RUNGS}, ")]
    foreseen = study.profile.name == PREDICTED_FOR
    return study.table(
        f"Useful TFLOP/s at {suite.RUNG_TOKENS:,} tokens, predicted and measured",
        ["Version", "Pass", ">Predicted", ">Measured", "Cause"],
        [_version(study, r, foreseen) for r in rows],
        note="Useful work is counted branch by branch. Cause: the products that are computed over the useful ones "
        f"(fewer where branches fold, more where a tile is hidden in part).{f' {SOURCES}' if foreseen else ''}",
        folded=True,
    ) if rows else None  # fmt: skip


def _version(study: Study, row, foreseen: bool) -> list:
    p, way = row.point, way_of(row.point)
    expected = PREDICTED.get((way, p.head_dim), {}).get(pass_of(p)) if foreseen else None
    path, own = path_of(study, row), rate(row)
    cause = [f"{computed(p, study.profile.capability):.3f} of the useful products"] if path == "lists" else []
    cause += [f"{calls:,} operator calls"] if (calls := row.memory.get("operator_calls")) else []
    cause.append(WAYS[path][1] if path == way else f"as {WAYS[path][0]}")
    return [
        WAYS[way][0], f"{pass_of(p)}, head_dim {p.head_dim}",
        " to ".join(dict.fromkeys(map(number, expected))) if expected else None,
        Cell(number(own)) if own else Cell(status(row), kind="bad"), ", ".join(cause),
    ]  # fmt: skip


def path_of(study: Study, row) -> str:
    """The way of a row; the default path runs as the way that makes the same operator calls."""
    way, calls = way_of(row.point), row.memory.get("operator_calls")
    if way != "default" or not calls:
        return way
    ours = {way_of(r.point): r.memory.get("operator_calls") for r in study.rows(group=row.group, system="ringlab")}
    return next((other for other in suite.RUNG_WAYS if other != way and ours.get(other) == calls), way)


@lru_cache(maxsize=64)
def computed(point, capability: tuple[int, int]) -> float:
    """Products that the tile lists compute, over the useful ones: whole tiles, and folded branches once."""
    passes = [("forward", "query", 4)]
    if point.passes != "fwd":  # the backward forms the scores twice: three products for dq, four for dk and dv
        passes += [("backward_q", "query", 6), ("backward_kv", "key", 8)]
    pattern, n, heads, kv = pattern_of(point), point.seq_len, point.heads, point.kv_heads
    done = 0
    for name, by, flops in passes:
        size = triton_config.sizes(name, point.head_dim, getattr(torch, point.dtype), capability)
        for source in split(pattern, n, heads, kv, size.rows):
            lists = make_schedule(source, n, heads, kv, rows=size.rows, cols=size.cols, causal=point.causal, by=by)
            done += flops * lists.visits * size.rows * size.cols
    return point.batch * done * point.head_dim / cost_of(point).flops


def rejected(study: Study) -> Table | None:
    """The rows of this suite that are not shown, with the reason of each."""
    return failures(study) if measured(study) else None


def tuned(study: Study) -> Table | None:
    """The tile sizes that ``ringlab tune`` timed, by use and the fastest first; None where nothing was tuned."""
    try:
        found = json.loads((study.folder / TUNED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    default = {one["use"]: one["seconds"] for one in found["timed"] if one["default"]}
    lines = []
    for one in sorted(found["timed"], key=lambda x: (x["use"], x["seconds"] is None, x["seconds"])):
        size, seconds, slow = one["size"], one["seconds"], default.get(one["use"])
        lines.append([
            one["use"], f"{size['rows']} × {size['cols']}, {size['warps']}, {size['stages']}, {size['reads']}",
            number(1e3 * seconds) if seconds else Cell("refused", kind="bad"),
            f"{number(slow / seconds)}×" if seconds and slow else None,
            one["why"] or ", ".join(["kept"] * one["kept"] + ["the default"] * one["default"]) or None,
        ])  # fmt: skip
    about = found["about"]
    return study.table(
        f"Tile sizes of the tile lists at {found['shape']['seq_len']:,} tokens",
        ["Pass", "Tile, warps, stages, reads", ">Time (ms)", ">Default over it", "Outcome"],
        lines,
        note=f"{about['device']}, torch {about['torch']}, triton {about['triton']}, commit {about['commit'][:12]}"
        f"{' and changes' * (about['dirty'] is True)}. Medians of one candidate after another, so small differences "
        "tell nothing. Each result was checked against that of the defaults, and those against float64.",
        folded=True,
    )  # fmt: skip
