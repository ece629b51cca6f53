"""What the rows come to: verdicts, a configuration to use, what is missing, where everything comes from."""

from __future__ import annotations

import torch

from . import claims
from .rows import SHORT, fastest_row, hardware_dtype, label, pattern, published, shape, switches
from .study import Study
from .tables import Cell, Code, Table, Text, number, size


def ledger(study: Study) -> Table:
    """Every claim of the document with a verdict that is computed from the rows."""
    rows = [
        [claim["text"], claim["where"], Cell(verdict.word, kind=verdict.kind), verdict.ours, verdict.why]
        for claim, verdict in claims.judge(study, published()["claims"])
    ]
    return study.table(
        "Claims of the document, judged by these rows",
        ["Claim", "Where", "Verdict", "Measured here", "Why"],
        rows,
        note="Tolerances were written down with the claims, before anything was measured.",
    )


def recommended(study: Study) -> Code:
    """A configuration for this profile that runs as it stands: its dtype policy and what was fastest here."""
    dtype = hardware_dtype(study)
    device = "cuda" if study.device_type == "cuda" and torch.cuda.is_available() else "cpu"
    s, p, row = shape(), pattern(), fastest_row(study)
    measured = (
        "nothing passed"
        if row is None
        else f"{label(row)}, {SHORT[row.point.dtype]}, {number(row.median * 1e3)} ms on {study.device}"
    )
    on = switches(row.point) if row is not None and row.point.system == "ringlab" else {"cache": True, "pool": False}
    stamp = f"{study.stamp}, " if study.stamp else ""
    away = '  # "cuda" on the card itself' if study.profile.kind == "cuda" and device == "cpu" else ""
    return Code(
        f"# {stamp}{study.profile.title}: {study.profile.dtype_reason()}\n"
        f"# fastest measured: {measured}\n"
        "import torch\n"
        "import ringlab\n\n"
        f'device = "{device}"{away}\n'
        f"pattern = ringlab.Dilated({list(p.segment_lengths)}, {list(p.dilation_rates)}, mixing={p.mixing!r}, "
        f"offsets={p.offsets!r})\n"
        f"q, k, v = torch.randn(3, {s['batch']}, {s['seq_len']}, {s['heads']}, {s['head_dim']}, dtype=torch.{dtype}, "
        "device=device)\n"
        f"execution = ringlab.Execution(cache={on['cache']}, pool={on['pool']})\n"
        "out = ringlab.attention(q, k, v, pattern, execution=execution)\n"
    )


def limits(study: Study) -> Text:
    """What this run cannot tell, from rows that are missing or not quoted."""
    failed = study.failed()
    lines = []
    if study.rehearsal:
        lines.append(f"How fast {study.profile.title} is: {study.stamp_note}")
    if all(r.point.world_size == 1 for r in study.results):
        lines.append("Anything about several devices: every row ran on one.")
    have = {r.point.dtype for r in study.good}
    lines += [f"{SHORT[d]}: no row passed." for d in ("float16", "bfloat16", "float32") if d not in have]
    if study.profile.kind == "cpu":
        lines.append(
            "GPU kernels (flash, efficient, cuDNN, xformers): each was refused here, with its reason in the backend "
            "table."
        )
    for system in sorted({r.point.system for r, _ in failed}):
        why = sorted({w for r, w in failed if r.point.system == system})
        lines.append(
            f"`{system}`: {len([1 for r, _ in failed if r.point.system == system])} points not quoted ({why[0]})."
        )
    unstable = [r for r in study.good if r.unstable]
    if unstable:
        lines.append(
            f"Small differences between {len(unstable)} rows marked unstable: their spread exceeds 20 % of the median."
        )
    return study.text(*(lines or ["Nothing that was asked for is missing."]), bullets=True)


def failures(study: Study) -> Table | Text:
    """Every point that is not quoted, with the reason."""
    failed = study.failed()
    if not failed:
        return study.text("Every point passed its check.")
    return study.table(
        f"{len(failed)} of {len(study.results)} points are not quoted",
        ["System", "Shape", "dtype", "Status", "Reason"],
        [
            [label(r), f"{r.point.seq_len:,} tokens, {r.point.passes}{', causal' if r.point.causal else ''}",
             SHORT.get(r.point.dtype, r.point.dtype),
             Cell(r.status if r.status != "ok" else "suspect", kind="bad"), why]
            for r, why in failed
        ],
    )  # fmt: skip


def provenance(study: Study) -> Table:
    """Where the rows come from: each fact with the values it took, one where all rows agree."""
    names = {
        "commit": "Commit", "dirty": "Changed since that commit", "ringlab": "ringlab",
        "engine": "Engine (hash of its code)",
        "device_name": "Device", "device_memory_bytes": "Memory", "cpu": "CPU", "cpu_capability": "Instruction set",
        "threads": "Threads", "torch": "torch", "cuda": "CUDA", "driver": "Driver", "python": "Python",
        "machine": "Machine (salted id)",
        "load_average": "Load average of the last minute",
    }  # fmt: skip
    rows = []
    for key, name in names.items():
        values = [r.provenance.get(key) for r in study.results]
        rows.append([name, _spread(values, size if key == "device_memory_bytes" else str)])
    times = sorted(str(r.provenance["utc"]) for r in study.results if r.provenance.get("utc"))
    rows.append(["Measured (UTC)", f"{times[0]} to {times[-1]}" if times else None])
    rows.append(["Points", f"{len(study.results)} measured, {len(study.good)} quoted"])
    if study.left_out:
        rows.append(["Left out", f"{study.left_out} rows of another engine, machine or device"])
    rows.append(["Samples of one point, least to most", _samples(study)])
    rows.append(["Inputs", "normal, from a generator seeded by the point's own hash"])
    return study.table("Where these rows come from", ["What", "Value"], [r for r in rows if r[1] is not None])


def _spread(values: list, show) -> str | None:
    known = {v for v in values if v is not None}
    if not known:
        return None
    if len(known) > 2 and all(isinstance(v, int | float) for v in known):
        return f"{show(min(known))} to {show(max(known))}"
    return ", ".join(sorted(show(v) for v in known))


def _samples(study: Study) -> str | None:
    counts = [len(r.seconds) for r in study.good if r.seconds]
    return f"{min(counts)} to {max(counts)}, warm-up discarded; 95 % intervals by bootstrap" if counts else None
