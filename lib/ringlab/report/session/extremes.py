"""Extreme lengths: the document's ring table, what the stated work needs at least, and a window that was run."""

from __future__ import annotations

from ... import patterns
from ...measure import suites as suite
from ..cells import bound, error, ms
from ..published import MB
from ..rows import SHORT
from ..study import Study, pattern_of
from ..tables import Cell, Table, number, size
from . import rows


def ring(study: Study) -> Table:
    """The document's table of ring attention, with what its code computes and our row beside it."""
    n = rows.stated()[1]["seq_len"]
    mine = rows.extreme(study).get(n)
    lines = [
        [x["name"], f"{x['ms']:g}" if "ms" in x else None, f"{x['mb']:g}" if "mb" in x else None,
         f"{x['speedup']}×" if "speedup" in x else None, x.get("computes") or x.get("recorded"), None, None, None, None]
        for x in rows.document()["ring"]
    ]  # fmt: skip
    name = Cell("This library", f"{pattern_of(mine.point)}, {rows.heads(mine.point)}" if mine else "")
    lines.append([name, None, None, None, "another function, checked", ms(mine), bound(mine), rows.peak(mine),
                  error(mine)])  # fmt: skip
    floor = size(rows.work().floor_bytes)
    return study.table(
        f"Ring attention, {n:,} tokens: as published, and a window here",
        ["Implementation", ">Published (ms)", ">Published (MB)", ">Published factor", "What is computed",
         ">Here (ms)", ">Lower bound (ms)", ">Peak here (MB)", ">Error"],
        lines,
        note=f"What is computed, by the original's source and its own records. The published megabytes leave the "
        f"inputs out and rest on one cold call in fp16; q, k, v and out alone are {floor} there.",
    )  # fmt: skip


def work(study: Study) -> Table:
    """What three functions need at least at that length, by arithmetic, beside the published times."""
    n = rows.stated()[1]["seq_len"]
    own, rate, card = rows.stated()[0], rows.rate(study), rows.card()
    named = {"The stated function": own, "A window of 640": suite.FAR, "Dense attention": patterns.Dense()}
    lines = []
    for name, pattern in named.items():
        found = rows.work(pattern)
        least, here = rows.least_seconds(found, card), found.folded_flops / rate if rate else None
        lines.append([
            name, str(pattern), number(found.flops / 1e9), size(found.floor_bytes), number(least * 1e3),
            number(here * 1e3) if here else None, *(_times(least, x) for x in ("Production_r16", "RingV2_r16")),
        ])  # fmt: skip
    printed = {x["name"]: x for x in rows.document()["ring"]}
    return study.table(
        f"Computed: the least that {n:,} tokens need",
        ["Function", "Pattern", ">GFLOP", ">Floor of q, k, v, out", f">At least on {card.title} (ms)",
         ">At least here (ms)", *(f">Of {printed[x]['ms']:g} ms" for x in ("Production_r16", "RingV2_r16"))],
        lines,
        note=f"{rows.document()['shape']['dtype']}, 8 heads of 64, by peak rates: no code is faster. Here: by the "
        "rate that bounds dense attention in the first table. Of a published time: "
        f"how many times longer the work alone takes. {half_of_the_heads()}",
    )  # fmt: skip


def _times(least: float, name: str) -> str:
    printed = next(x for x in rows.document()["ring"] if x["name"] == name)
    return f"{number(least / (printed['ms'] / 1e3))}×"


def half_of_the_heads() -> str:
    """Where 23.5 comes from, in a sentence."""
    s, heads = rows.document()["source"], rows.document()["shape"]["heads"]
    left = heads - s["ring_zero_heads"]
    return (
        f"And 23.5 was found at {s['ring_seq_len']:,} tokens, where {s['ring_zero_heads']} of {heads} heads are zeros: "
        f"what is left out explains {heads / left:g}×, and where the segments fit, at 8,192 tokens, the same pair "
        f"gives {s['ring_longer_factor']}×."
    )


def extreme(study: Study) -> Table:
    """The lengths of the headlines: run, checked, with the floor in bytes and the bound in time."""
    printed, lines = {x["seq_len"]: x for x in rows.document()["extreme"]}, []
    for n, row in rows.extreme(study).items():
        paper = printed.get(n, {})
        floor = rows.work(seq_len=n).floor_bytes
        lines.append([
            n, ms(row), bound(row), error(row), size(rows.floor_bytes(row)), rows.peak(row), number(floor / MB),
            f"{paper['mb']}" if paper else None, f"{paper['ms']}" if "ms" in paper else None, rows.calls(row),
        ])  # fmt: skip
    row = next(iter(rows.extreme(study).values()), None)
    p = row.point if row else None
    named = f": {pattern_of(p)}, {rows.heads(p)} of {p.head_dim}, {SHORT[p.dtype]}" if p else ""
    return study.table(
        f"Extreme lengths, forward{named}",
        [">Tokens", ">Time (ms)", ">Lower bound (ms)", ">Error", ">Floor here", ">Peak (MB)",
         ">Floor in fp16 (MB)", ">Published (MB)", ">Published (ms)", ">Operator calls"],
        lines or [["not measured", *[None] * 9]],
        note="Floor: q, k, v and out once, at the row's dtype and, in fp16, at the document's. A published figure "
        "below the floor leaves inputs out. The check compares sampled rows of every head with the float64 oracle.",
    )  # fmt: skip
