"""The claims of document 002, each judged by a function of the rows, or of the document's own figures where they
decide it; ``verdicts`` says what the words mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import cache
from ...measure import suites as suite
from ..ring.judging import CPU_TIMES, UNMEASURED, within
from ..ring.rows import MB
from ..study import Study
from ..tables import number, size
from ..trust import objection
from ..verdicts import Verdict, by_interval, said, undecided, untestable
from . import rows


def judge(study: Study) -> Iterator[tuple[dict, Verdict]]:
    """(claim, verdict) in the document's order; raises KeyError for a claim whose test does not exist."""
    for claim in rows.document()["claims"]:
        yield claim, TESTS[claim["test"]](study, claim)


def _printed(key: str, table: str = "block_rows") -> dict:
    return next(x for x in rows.document()[table] if x.get("key", x.get("name")) == key)


def _by_time(study: Study, claim: dict, ratio, what: str, why: str = "") -> Verdict:
    """By an interval, where the rows are of the profile's own device."""
    if study.rehearsal:
        return untestable(CPU_TIMES, said(ratio))
    found = by_interval(ratio, claim["low"], claim.get("high", float("inf")), what)
    return Verdict(found.word, found.ours, f"{found.why}; {why}" if why else found.why)


def _longest(study: Study) -> tuple[int, object] | None:
    passed = {n: r for n, r in rows.extreme(study).items() if rows.peak_bytes(r)}
    return max(passed.items(), default=None, key=lambda x: x[0])


def below_its_work(study: Study, claim: dict) -> Verdict:
    """A printed time against the least that the stated work takes on the printed device."""
    printed, n = _printed(claim["row"], "ring"), rows.stated()[1]["seq_len"]
    least, mine = rows.least_seconds(rows.work(), rows.card()), rows.extreme(study).get(n)
    passed = mine is not None and not objection(mine) and mine.median
    ours = f"a window over {n:,} tokens, {rows.heads(mine.point)}: {number(mine.median * 1e3)} ms" if passed else None
    if printed["ms"] / 1e3 < least:
        why = (f"{printed['ms']} ms is below the {number(least * 1e3)} ms that the stated work takes at the peak "
               f"rate of its device, {rows.card().title}: by its source it computes {printed['computes']}")  # fmt: skip
        return Verdict("refuted", ours, why)
    why = f"possible, at {number(least * 1e3)} ms or more for the stated work; the original does not run here"
    return untestable(f"{why}, and by its source computes {printed['computes']}", ours)


def half_of_the_heads(study: Study, claim: dict) -> Verdict:
    """A factor between two functions; ours is the largest between two ways of computing one."""
    s, heads = rows.document()["source"], rows.document()["shape"]["heads"]
    ratio = study.ratio(rows.in_table(study, suite.ORIGINAL), rows.in_table(study, rows.OURS))
    if s["ring_zero_heads"]:
        why = (f"by its source {s['ring_zero_heads']} of {heads} heads of the faster side are zeros at "
               f"{s['ring_seq_len']:,} tokens; at 8,192, where its segments fit, the same pair gives "
               f"{s['ring_longer_factor']}×")  # fmt: skip
        ours = f"row by row over this library, one function: {said(ratio)}" if ratio else None
        return Verdict("confounded", ours, why)
    return _by_time(study, claim, ratio, "row by row over this library")


def fits(study: Study, claim: dict) -> Verdict:
    found = {n: r for n, r in rows.extreme(study).items() if rows.peak_bytes(r)}
    row = found.get(claim["seq_len"])
    if row is None:
        return undecided(f"no row of {claim['seq_len']:,} tokens has passed")
    if rows.held_there(row) > claim["memory_bytes"]:
        return Verdict("refuted", rows.held(row), f"{size(claim['memory_bytes'])} do not hold that")
    why = f"that fits {size(claim['memory_bytes'])}; it is a window, which the document's row is not"
    return Verdict("reproduced", rows.held(row), why)


def below_its_tensors(study: Study, claim: dict) -> Verdict:
    row, floor = rows.extreme(study).get(claim["seq_len"]), rows.work(seq_len=claim["seq_len"]).floor_bytes
    ours = None if row is None else rows.held(row)
    if claim["mb"] * MB < floor:
        computes = _printed(claim["row"], "ring")["computes"]
        why = (f"q, k, v and out are {number(floor / MB)} MB in fp16, out alone {number(floor / 4 / MB)}: the figure "
               f"leaves the inputs out, and by its source that row computes {computes}")  # fmt: skip
        return Verdict("refuted", ours, why)
    there = row and rows.held_there(row)
    if not there:
        return undecided(UNMEASURED)
    return within([there / MB], 0, claim["mb"], ours, "the peak at the document's shape, in MB,")


def out_of_memory(study: Study, claim: dict) -> Verdict:
    ring, row = rows.document()["ring_shape"], _longest(study)
    ours = f"{row[0]:,} tokens passed here" if row else None
    longest = max(ring["segment_lengths"])
    if ring["seq_len"] % longest:
        why = (f"its record says refused, not out of memory: a segment of {longest:,} does not divide "
               f"{ring['seq_len']:,} tokens")  # fmt: skip
        return Verdict("refuted", ours, why)
    return untestable("the segments divide the length, and the original does not run here", ours)


def one_device_only(study: Study, claim: dict) -> Verdict:
    found = {n: held / n for n, r in rows.extreme(study).items() if (held := rows.peak_bytes(r))}
    ours = ", ".join(f"{x / 1e3:.2f} KB a token at {n:,}" for n, x in found.items()) or None
    sizes = {x["ring_size"]: x["mb"] * x["ring_size"] for x in rows.document()["ring"] if "ring_size" in x}
    if len(sizes) < 2:
        return untestable("it prints one ring size, on one device: the reports on rings measure memory by rank", ours)
    figures = list(sizes.values())
    same = max(figures) <= 1.1 * min(figures)
    why = f"ring size × memory of its rows: {', '.join(f'{x:g} MB at {p}' for p, x in sizes.items())}"
    return Verdict("reproduced" if same else "inconsistent as printed", ours, why)


def original_over_baseline(study: Study, claim: dict) -> Verdict:
    ratio = study.ratio(rows.in_table(study, suite.ORIGINAL), rows.in_table(study, "dense_sdpa"))
    a, b = _printed("original"), _printed("baseline")
    why = f"its only figures give {a['ms'] / b['ms']:.2f}×, between two functions that are neither"
    return _by_time(study, claim, ratio, "row by row over dense SDPA", why)


def pattern_share(study: Study, claim: dict) -> Verdict:
    found = rows.shares(study)
    ours = ", ".join(f"{rows.percent(x, 2)} of a first call ({name})" for name, x in found.items()) or None
    if study.rehearsal:
        return untestable(CPU_TIMES, ours)
    return within(list(found.values()), claim["low"], claim["high"], ours, "building, of a first call,")


def hit_rate(study: Study, claim: dict) -> Verdict:
    """Counted on a cache, as many identical calls as the document made."""
    found, times = cache.PatternCache(), rows.document()["source"]["calls"]
    for _ in range(times):
        found.get("one pattern", lambda: 0)
    stats = found.stats()
    share = stats.hits / (stats.hits + stats.misses)
    ours = f"{stats.hits} of {times} identical calls, {rows.percent(share)}"
    verdict = within([share], claim["low"], claim["high"], ours, "the share of hits")
    return Verdict(
        verdict.word, ours, f"{verdict.why}: any cache gives it, by the number of calls, and it says nothing of time"
    )


def cache_saves(study: Study, claim: dict) -> Verdict:
    ratio = study.ratio(rows.way(study, "rows", cache=False), rows.way(study, "rows"))
    return _by_time(study, claim, ratio, "time without the cache over time with it, row by row")


def operations(study: Study, claim: dict) -> Verdict:
    before, after = (rows.in_table(study, s) for s in (suite.ORIGINAL, suite.OPTIMIZED))
    counted = [rows.computing(r) for r in (before, after)]
    d = rows.document()
    blocks = {n: int(suite.WINDOW.blocks(n).sum()) for n in (d["source"]["launches_seq_len"], suite.SESSION_TOKENS)}
    arithmetic = "; ".join(f"2 products × {c} blocks = {2 * c} at {n:,} tokens" for n, c in blocks.items())
    if None in counted:
        return undecided(f"operator calls were not counted in both rows; {arithmetic}")
    ours = f"{counted[0]:,} row by row, {counted[1]:,} batched, views not counted"
    if claim["low"] <= counted[0] <= claim["high"] and counted[1] <= claim["most"]:
        return Verdict("reproduced", ours, f"both lie within the tolerance; {arithmetic}")
    why = f"not both of {claim['low']} to {claim['high']} and at most {claim['most']}"
    return Verdict("refuted", ours, f"{why}; {arithmetic}, and by its source a loop over the blocks remains")


def batching_saves(study: Study, claim: dict) -> Verdict:
    ratio = study.ratio(rows.way(study, "rows"), rows.way(study, "batched"))
    return _by_time(study, claim, ratio, "row by row over batched")


def torch_sparse_slower(study: Study, claim: dict) -> Verdict:
    sparse, dense = (rows.in_table(study, s, "float32") for s in (suite.TORCH_SPARSE, suite.OPTIMIZED))
    why = "by its source the original calls no sparse operator, so it could not tell"
    return _by_time(study, claim, study.ratio(sparse, dense), "a BSR tensor over batched dense products, fp32", why)


def optimized_over_original(study: Study, claim: dict) -> Verdict:
    ratio = study.ratio(*(rows.in_table(study, s) for s in (suite.ORIGINAL, suite.OPTIMIZED)))
    return _by_time(study, claim, ratio, "Original over Optimized")


def optimized_memory(study: Study, claim: dict) -> Verdict:
    held = [rows.peak_bytes(rows.in_table(study, s)) for s in (suite.OPTIMIZED, suite.ORIGINAL)]
    found = [held[0] / held[1]] if all(held) else []
    ours = f"{number(held[0] / MB)} and {number(held[1] / MB)} MB, {found[0]:.2f}×" if found else None
    return within(found, claim["low"], claim["high"], ours, "Optimized's peak over Original's")


def overall_printed(study: Study, claim: dict) -> Verdict:
    """The percentage against the document's own table."""
    a, b = _printed("original")["ms"], _printed("optimized")["ms"]
    ratio = study.ratio(*(rows.in_table(study, s) for s in (suite.ORIGINAL, suite.OPTIMIZED)))
    ours = f"{100 * (1 - 1 / ratio.value):.0f} % of Original's time saved" if ratio else None
    table = 100 * (1 - b / a)
    if abs(table - claim["percent"]) > 1:
        first, second = rows.document()["source"]["other_run_ms"]
        why = (f"its table gives {a} to {b} ms, {table:.1f} %; {claim['percent']} is another run's, {first} to "
               f"{second} ms: one configuration differs by {b / second:.2f}× from run to run")  # fmt: skip
        return Verdict("inconsistent as printed", ours, why)
    if ratio is None or study.rehearsal:
        return untestable(CPU_TIMES, ours) if ratio else undecided(UNMEASURED)
    low, high = (1 / (1 - claim[k]) for k in ("low", "high"))
    return by_interval(ratio, low, high, "Original over Optimized")


def longest_over_original(study: Study, claim: dict) -> Verdict:
    found = study.rows(group=suite.WINDOW_LENGTHS, system=suite.ORIGINAL)
    row = max(found, key=lambda r: r.point.seq_len, default=None)
    if row is None:
        return untestable(CPU_TIMES) if study.rehearsal else undecided(UNMEASURED)
    n = row.point.seq_len
    ratio = study.ratio(row, rows.one(study, suite.WINDOW_LENGTHS, suite.OPTIMIZED, seq_len=n))
    return _by_time(study, claim, ratio, f"Original over Optimized at {n:,} tokens")


def baseline_over_optimized(study: Study, claim: dict) -> Verdict:
    ratio = study.ratio(*(rows.in_table(study, s) for s in ("dense_sdpa", suite.OPTIMIZED)))
    a, b = _printed("baseline")["ms"], _printed("optimized")["ms"]
    spread = b / rows.document()["source"]["other_run_ms"][1]
    why = f"its own {a / b:.2f}× is smaller than the {spread:.2f}× by which its runs of Optimized differ"
    return _by_time(study, claim, ratio, "dense SDPA over Optimized", why)


TESTS = {
    f.__name__: f
    for f in (
        below_its_work, half_of_the_heads, fits, below_its_tensors, out_of_memory, one_device_only,
        original_over_baseline, pattern_share, hit_rate, cache_saves, operations, batching_saves, torch_sparse_slower,
        optimized_over_original, optimized_memory, overall_printed, longest_over_original, baseline_over_optimized,
    )
}  # fmt: skip
