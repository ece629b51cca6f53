"""Every kernel with what it says of this machine, and what its rules say of a profile whose GPU is absent."""

from __future__ import annotations

import torch

from .. import hardware, kernels
from ..kernels.base import DeviceSpec
from .cells import PEAK, error, ms, peak
from .computed import gpu_of
from .rows import FULL, SHORT, document_rows, dtypes, is_optimised, shape, switches
from .study import Study, best
from .tables import Cell, Table
from .trust import objection, reason

WORDS = {name: SHORT[name] for name in ("float32", "float16", "bfloat16")}
REFUSED = Cell("refused", kind="none")


def backends(study: Study) -> Table:
    """Every kernel that this device runs or refuses, with the reason, and its time and memory where it was timed."""
    if study.device_type == "cuda" and not torch.cuda.is_available():
        return recorded(_kernel_rows(study))
    ours = [r for r in document_rows(study, system="ringlab") if not objection(r)]
    timed: dict[str, list] = {}
    for row in ours:
        name = switches(row.point)["backend"]
        if name != "auto" and switches(row.point) == FULL | {"backend": name}:
            timed.setdefault(name, []).append(row)
    auto = [r for r in ours if is_optimised(r)]
    return probed(study.device_type, timed, auto, best(study.rows(system="dense_sdpa", **shape())))


def _kernel_rows(study: Study) -> list[list]:
    """What each kernel did when the rows were measured elsewhere."""
    rows = [r for r in document_rows(study, system="ringlab") if switches(r.point)["backend"] != "auto"]
    rows = [r for r in rows if switches(r.point) == {**FULL, "backend": switches(r.point)["backend"]}]
    rows += study.rows(system="dense_sdpa", **shape())
    return [[_kernel(r), SHORT[r.point.dtype], ms(r), error(r), peak(r), reason(r) if objection(r) else None]
            for r in rows]  # fmt: skip


def _kernel(result) -> str:
    return "Dense SDPA" if result.point.system == "dense_sdpa" else switches(result.point)["backend"]


def backends_by_rule(study: Study) -> Table:
    """What the kernels' rules say of the profile's own GPU; for a CPU, of the document's."""
    return by_rule(gpu_of(study))


def probed(device: str, timed: dict[str, list], auto: list, dense, head_dim: int = 64) -> Table:
    """Every kernel called on a tiny tensor here, forward and backward, by dtype; rows of those that were ``timed``.

    ``auto``: the rows of the chosen kernel, shown where it was not timed by its name.
    """
    named = [r for found in timed.values() for r in found]
    shown = [SHORT[d] for d in dtypes(named or auto)]
    found = {name: kernels.table(device, getattr(torch, name), head_dim, backward=True) for name in WORDS}
    rows = []
    for kernel, *_ in found["float32"]:
        row, reasons = [kernel], {}
        for name, word in WORDS.items():
            _, ok, why, chosen = next(x for x in found[name] if x[0] == kernel)
            row.append(Cell("chosen" if chosen else "runs", kind="good" if chosen else "") if ok else REFUSED)
            reasons[word] = why
        chosen = any(x[0] == kernel and x[3] for x in found["float32"])
        times = timed.get(kernel) or (auto if chosen else [])
        by_dtype = {SHORT[r.point.dtype]: r for r in times}
        cells = [f(by_dtype.get(word)) if word in by_dtype else None for word in shown for f in (ms, peak)]
        rows.append([*row, *cells, _why(reasons)])
    heads = [name for word in shown for name in (f">Time, {word} (ms)", f">Peak memory, {word} (× tensors)")]
    beside = [f(dense) if dense and SHORT[dense.point.dtype] == word else None for word in shown for f in (ms, peak)]
    here = "GPU" if device == "cuda" else "CPU"
    return Table(
        f"Kernels on this {here}, in order of preference",
        ["Kernel", *WORDS.values(), *heads, "Why refused"],
        [*rows, ["Dense SDPA", None, None, None, *beside, None]],
        note="Each was called on a tiny tensor, forward and backward, and compared with float64. Times are of the "
        "document's forward with all optimizations; dense SDPA is another function.",
    )


def recorded(rows: list[list]) -> Table:
    """What each kernel did on a GPU that is not here now, from its rows."""
    columns = ["Kernel", "dtype", ">Time (ms)", ">Error", PEAK, "Why not quoted"]
    return Table("Kernels, as recorded on that device", columns, rows)


def by_rule(profile, head_dim: int = 64) -> Table:
    """What each kernel would say on the profile's compute capability: by its rules, not by a call."""
    rows = []
    device = DeviceSpec("cuda", profile.capability)
    for name in kernels.order(device):
        kernel = kernels.KERNELS[name]
        reasons = {word: kernel.refuses(device, getattr(torch, dtype), head_dim) for dtype, word in WORDS.items()}
        rows.append([name, *(REFUSED if why else "allowed" for why in reasons.values()), _why(reasons)])
    return Table(
        f"Kernels on {profile.title} ({hardware.sm(profile.capability)}), by their rules",
        ["Kernel", *WORDS.values(), "Why refused"],
        rows,
        note="Computed from each kernel's stated needs; nothing was called on that device.",
    )


def _why(reasons: dict[str, str | None]) -> str | None:
    """One reason for all dtypes, or each with its dtype."""
    known = {why for why in reasons.values() if why}
    if len(known) == 1 and all(reasons.values()):
        return known.pop()
    return "; ".join(f"{word}: {why}" for word, why in reasons.items() if why) or None
