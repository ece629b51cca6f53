"""What each optimisation is worth alone: rows that differ in one switch, and the square of dtype by optimisation."""

from __future__ import annotations

from . import figures
from .cells import PEAK, bound, error, ms, peak, peaks, times
from .rows import PLAIN, SHORT, document_rows, dtypes, is_optimised, is_plain, shape, switches
from .study import Study, best
from .tables import Table

NAMES = {
    "gather": "Strided views instead of gathered copies",
    "backend": "Fused kernel instead of eager",
    "cache": "Pattern cache on",
    "pool": "Memory pool on",
}
OFF = {"gather": True, "cache": False, "pool": False}


def switch_pairs(study: Study) -> list[tuple]:
    """(switch, switches before, switches after, row off, row on, Ratio) for rows that differ in one switch alone."""
    ours = document_rows(study, system="ringlab")
    found = []
    for a in ours:
        for b in ours:
            one, two = switches(a.point), switches(b.point)
            changed = [k for k in one.keys() | two.keys() if one.get(k) != two.get(k)]
            if len(changed) != 1 or a.point.dtype != b.point.dtype:
                continue
            name = changed[0]
            chosen = name == "backend" and (one[name], two[name]) == ("eager", "auto")
            if chosen or (name in OFF and one[name] == OFF[name]):
                found.append((name, one, two, a, b, study.ratio(a, b)))
    seen, kept = set(), []
    # With the others on first: that is the switch as one would use it.
    found.sort(key=lambda x: ([*NAMES].index(x[0]), x[3].point.dtype != "float32", _plainness(x[2]), x[5] is None))
    for x in found:
        key = (x[3].point.id, x[4].point.id)
        if key not in seen:
            seen.add(key)
            kept.append(x)
    return kept


def _plainness(s: dict) -> int:
    return sum(s[k] == v for k, v in PLAIN.items())


def with_others(switch: str, s: dict) -> str:
    """The other switches of a pair."""
    words = {
        "gather": "gathered" if s["gather"] else "strided", "backend": f"{s['backend']} kernel",
        "cache": "cache" if s["cache"] else "no cache", "pool": "pool" if s["pool"] else "no pool",
    }  # fmt: skip
    return ", ".join(v for k, v in words.items() if k != switch)


def switch_table(study: Study) -> Table:
    """Every switch varied alone, from interleaved pairs."""
    rows = [
        [NAMES[name], with_others(name, one), SHORT[a.point.dtype], ms(a), ms(b), times(ratio), error(b), bound(b),
         peaks(a, b)]
        for name, one, two, a, b, ratio in switch_pairs(study)
    ]  # fmt: skip
    for row in _dense_rows(study):
        rows.append(["Dense SDPA", "the same tokens", SHORT[row.point.dtype], None, ms(row), None, error(row),
                     bound(row), peak(row)])  # fmt: skip
    return study.table(
        f"Each switch alone ({shape()['seq_len']:,} tokens, forward)",
        ["Switch", "With", "dtype", ">Off (ms)", ">On (ms)", ">Faster by", ">Error", ">Lower bound (ms)", PEAK],
        rows,
        note="Strided views write this function's results in place, so that a pool has nothing to lend; gathered, it "
        "lends what each branch is gathered into.",
    )  # fmt: skip


def _dense_rows(study: Study) -> list:
    """Dense SDPA at the document's n, one row per dtype."""
    found = study.rows(system="dense_sdpa", **shape())
    return [best([r for r in found if r.point.dtype == d]) for d in dtypes(found)]


def switch_figure(study: Study) -> None:
    """Each pair in fp32, where there are any, by its names in the table."""
    pairs = switch_pairs(study)
    fp32 = [x for x in pairs if x[3].point.dtype == "float32"] or pairs
    items = [
        figures.Bar(f"{NAMES[name]}, {with_others(name, one)}", r and r.value, r and r.low, r and r.high,
                    missing="not quoted")
        for name, one, _, _, _, r in fp32
    ]  # fmt: skip
    if not items:
        return
    fig = figures.ratios(items, xlabel="Times faster with the switch on (line: no difference)")
    said = "; ".join(f"{b.label} {b.value:.2f} times" if b.value else f"{b.label} not quoted" for b in items)
    data = study.table(
        "Data: each switch alone, fp32",
        ["Switch", "With", ">Faster by", ">Rounds"],
        [[NAMES[n], with_others(n, one), times(r), r.rounds if r else None] for n, one, _, _, _, r in fp32],
    )
    caption = "Effect of each switch alone, fp32, with 95 % intervals."
    alt = f"Effect of each switch alone, with 95 % intervals: {said}."
    figures.show(fig, "optimization-switches", caption, alt, data, stamp=study.stamp)


def two_by_two(study: Study) -> Table:
    """dtype by optimisation, with each effect alone: what the document's one factor of 17.82 mixes."""
    ours = document_rows(study)
    low = next((d for d in dtypes(ours) if d in ("float16", "bfloat16")), "float16")

    def found(test, dtype):
        return best([r for r in ours if test(r) and r.point.dtype == dtype])

    a, b = found(is_plain, low), found(is_plain, "float32")
    c, d = found(is_optimised, low), found(is_optimised, "float32")
    dense = [best(study.rows(system="dense_sdpa", **shape(), dtype=x)) for x in (low, "float32")]
    rows = [
        ["No optimizations", ms(a), ms(b), times(study.ratio(a, b)), peak(a), peak(b)],
        ["All optimizations", ms(c), ms(d), times(study.ratio(c, d)), peak(c), peak(d)],
        ["Optimizations alone", times(study.ratio(a, c)), times(study.ratio(b, d)), None, None, None],
        ["Both at once", None, None, times(study.ratio(a, d)), None, None],
        ["Dense SDPA", *map(ms, dense), times(study.ratio(*dense)), *map(peak, dense)],
    ]
    return study.table(
        f"dtype and optimizations, each alone ({shape()['seq_len']:,} tokens, forward)",
        ["", f">{SHORT[low]} (ms)", ">fp32 (ms)", ">fp32 alone", f">Peak memory, {SHORT[low]} (× tensors)",
         ">Peak memory, fp32 (× tensors)"],
        rows,
        note="The document compares the first cell with the last of the square and names dtype as the cause; its two "
        "rows differ in both. A factor above 1 means faster.",
    )  # fmt: skip
