"""Which rows are which in the documents about several ranks, and what each says of one rank."""

from __future__ import annotations

from .. import findings
from ..documents import published as published
from ..findings import missing_points
from ..rows import SHORT
from ..study import Study, best, pattern_of
from ..tables import Cell, Text, number, size
from ..trust import objection, status

KB = 1e3  # the documents' KB and MB are decimal
MB = 1e6


def ranks(point) -> int:
    """Ranks that share a point's work, as processes or simulated in one."""
    return max(point.world_size, dict(point.options).get("simulated", 1))


def simulated(point) -> bool:
    return "simulated" in dict(point.options)


def rows_of(study: Study, system: str, **wanted) -> dict[tuple[int, int], object]:
    """(tokens, ranks) -> row of a system, real processes before simulated ones; forward and not causal by default."""
    wanted = {"passes": "fwd", "causal": False, **wanted}
    found: dict[tuple[int, int], list] = {}
    for r in study.rows(system=system, **wanted):
        found.setdefault((r.point.seq_len, ranks(r.point)), []).append(r)
    return {key: best(sorted(rows, key=lambda r: simulated(r.point))) for key, rows in sorted(found.items())}


def timed(row) -> bool:
    """Whether a row's time may enter a figure: a process and a core for each rank, and a passed check."""
    if row is None or objection(row) or not row.median or simulated(row.point):
        return False
    return not row.ranks.get("oversubscribed")


def time(row) -> Cell:
    """Median time in ms over the slowest rank, or why there is none."""
    if row is None:
        return Cell("not measured", kind="none")
    if objection(row):
        return Cell(status(row), kind="bad")
    if simulated(row.point):
        return Cell("simulated", kind="none")
    if row.ranks.get("oversubscribed"):
        return Cell("more ranks than cores", kind="none")
    if row.median is None:
        return Cell("not timed", kind="none")
    low, high = (number(x * 1e3) for x in row.ci)
    return Cell(number(row.median * 1e3), f"{low} to {high}" + ("; unstable" if row.unstable else ""))


def throughput(row) -> str | None:
    return number(row.tokens_per_s) if timed(row) else None


def peak_bytes(row) -> int | None:
    """Peak of live tensors on the rank that holds most, inputs and results included; ranks in one process have none."""
    if row is None or objection(row) or simulated(row.point):
        return None
    return row.memory.get("tracked_peak_bytes")


def shard_bytes(row) -> int | None:
    """Bytes of q, k, v and out on that rank."""
    return row.memory.get("floor_bytes") if peak_bytes(row) else None


def sent_bytes(row) -> int | None:
    """Bytes that the busiest rank sends in one call, counted; a row is ok only if they are those planned."""
    if row is None or objection(row):
        return None
    return max(row.ranks["bytes_sent"]) if "bytes_sent" in row.ranks else 0 if ranks(row.point) == 1 else None


def messages(row) -> int | None:
    """Messages that the busiest rank sends in one call."""
    return max(row.ranks["messages"]) if row and not objection(row) and "messages" in row.ranks else None


def per_token(row) -> float | None:
    """Peak bytes of a rank for each token of the whole sequence and batch."""
    held = peak_bytes(row)
    return held / (row.point.batch * row.point.seq_len) if held else None


def peak(row) -> Cell | None:
    """Peak of a rank, and as a multiple of its shard."""
    held, own = peak_bytes(row), shard_bytes(row)
    return Cell(size(held), f"{held / own:.2f} × shard") if held and own else None


def on(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def work_of(row) -> str:
    """What a call computes, and with how many threads a rank."""
    p, threads = row.point, row.ranks.get("threads") or row.provenance.get("threads")
    shape = f"batch {p.batch}, {p.heads} heads of {p.head_dim}, {SHORT[p.dtype]}"
    each = f"; {threads} thread{'s' * (threads != 1)} a rank" if threads else ""
    return f"Every call here: {shape}, {pattern_of(p)}{each}."


def ranks_cell(row) -> Cell:
    """The number of ranks, and where they are no processes."""
    return Cell(str(ranks(row.point)), "simulated" if simulated(row.point) else "")


def error_line(study: Study) -> str:
    """The line of an answer about errors."""
    shares = [(e / r.tolerance[k], e, r) for r in study.good for k, e in r.errors.items() if r.tolerance[k]]
    if not shares:
        return "**Error**: no row has passed its check."
    share, e, row = max(shares, key=lambda x: x[0])
    where = f", {on(ranks(row.point))}" if any(r.point.world_size > 1 for r in study.results) else ""
    return (
        f"**Error** against the float64 oracle: at worst {e:.1e} ({row.point.system}{where}), "
        f"{share * 100:.0f} % of what is allowed, over {len(study.good)} checked points."
    )


def gaps_line(study: Study) -> str:
    """The line of an answer about what was not measured."""
    gaps = [study.profile.title if study.rehearsal else "any GPU"] if study.device_type == "cpu" else []
    crowded = sorted({r.point.world_size for r in study.good if r.ranks.get("oversubscribed")})
    if crowded:
        gaps.append(f"times on {' and '.join(map(str, crowded))} ranks, for which there are too few cores")
    if missing := missing_points(study):
        gaps.append(f"{len(missing)} points of this profile")
    if failed := study.failed():
        gaps.append(f"{len(failed)} of {len(study.results)} points are not quoted (listed below)")
    return "**Not measured**: " + "; ".join(gaps or ["nothing that was asked for"]) + "."


def bound(row) -> str | None:
    """Lower bound of a row's time in ms."""
    return number(row.bound_seconds * 1e3) if timed(row) and row.bound_seconds else None


def limits(study: Study) -> Text:
    """What this run cannot tell, of ranks above all."""
    return findings.limits(
        study,
        "A network: all ranks are processes of this machine, and what they exchange goes through its memory.",
        *(["NCCL, and a GPU for each rank: these ranks talk through gloo."] if study.device_type == "cpu" else []),
    )
