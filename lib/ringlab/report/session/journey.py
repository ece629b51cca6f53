"""The optimization journey of document 002, step by step: what building costs, and what each step is worth."""

from __future__ import annotations

from ...measure import suites as suite
from .. import figures
from ..cells import bound, error, ms, us
from ..study import Study
from ..tables import Table, number
from ..trust import objection
from . import rows


def steps(study: Study) -> list[tuple[str, str, object, object]]:
    """(name, what the document says of it, row before, row after)."""
    j = rows.document()["journey"]
    off, on, batched, views = (rows.way(study, "rows", cache=False), *(rows.way(study, w) for w in suite.BLOCK_WAYS))
    sparse = rows.in_table(study, suite.TORCH_SPARSE, "float32")
    optimized = rows.in_table(study, suite.OPTIMIZED, "float32")

    def span(name: str) -> str:
        return f"saves {j[name][0]} to {j[name][1]} %"

    return [
        (f"Row by row, calls built each time: {rows.WAYS['rows']}", f"{j['launches']} launches", None, off),
        ("The same, calls kept in the cache", span("cache"), off, on),
        (f"Batched: {rows.WAYS['batched']}", f"{span('batching')}, to {j['batched_launches']} launches", on, batched),
        ("Sparse tensors: a real torch BSR tensor, fp32", "slower", optimized, sparse),
        (f"Views: {rows.WAYS['views']}", "", batched, views),
        ("Views, calls built each time", "", views, rows.way(study, "views", cache=False)),
    ]  # fmt: skip


def journey(study: Study) -> Table:
    """Each step with what it saves over the one before, in time and in operator calls."""
    found = steps(study)
    lines = [
        [name, printed or None, ms(row), rows.saved(study.ratio(before, row)) if before else None, rows.calls(row),
         error(row), bound(row), rows.peak(row)]
        for name, printed, before, row in found
    ]  # fmt: skip
    return study.table(
        "The optimization journey, one function at every step",
        ["Step", "Published", ">Time (ms)", ">Saves over the step before", ">Operator calls", ">Error",
         ">Lower bound (ms)", ">Peak (MB)"],
        lines if any(row for *_, row in found) else [["not measured", *[None] * 7]],
        note="Sparse tensors are set against Optimized of the table above, views against batched. A cache saves what "
        "the next table calls built; operator calls of what is built once and kept are not counted. Copied keys are "
        "bounded in bytes, so that on a CPU a call of the batched way takes few blocks at a time.",
    )  # fmt: skip


def shares(study: Study) -> dict[str, float]:
    """Way -> building its calls, as a part of the time of a first call, which builds and then computes."""
    found = {}
    for name in suite.BLOCK_WAYS:
        cold, call = rows.built(study, name, False), rows.way(study, name)
        if cold and call and not objection(cold) and not objection(call) and cold.median and call.median:
            found[name] = cold.median / (cold.median + call.median)
    return found


def building(study: Study) -> Table:
    """What it costs to build the calls of a pattern, and to find them."""
    found, lines = shares(study), []
    for name in suite.BLOCK_WAYS:
        cold, warm, call = rows.built(study, name, False), rows.built(study, name, True), rows.way(study, name)
        if cold or warm:
            share = rows.percent(found[name], 2) if name in found else None
            lines.append([name, us(cold), us(warm), ms(call), share, error(cold)])
    j = rows.document()
    return study.table(
        "Pattern and calls, built and found",
        ["Way", ">Built (µs)", ">Found (µs)", ">The call (ms)", ">Built, of a first call", ">Error"],
        lines or [["not measured", *[None] * 5]],
        note=f"Published: {j['journey']['pattern_share']} % of the time, {j['journey']['hit_rate']} % hits. By the "
        "original's source a pattern is made once for each instance, so that this is the first call's share, and "
        f"{j['source']['calls']} identical calls hit {j['source']['calls'] - 1} times whatever is kept. The error is "
        "the share of sampled pairs that the calls get wrong.",
    )  # fmt: skip


def journey_figure(study: Study) -> None:
    """Time of every step."""
    known = [(name.partition(":")[0], r) for name, _, _, r in steps(study) if r and not objection(r) and r.median]
    if not known:
        return
    items = [figures.Bar(name, r.median * 1e3, r.ci[0] * 1e3, r.ci[1] * 1e3, bound=(r.bound_seconds or 0) * 1e3 or None)
             for name, r in known]  # fmt: skip
    fig = figures.bars(items, xlabel="Time (ms)", bound_label="lower bound", fmt=number)
    counted = {name: rows.operators(r) for name, r in known}
    said = "; ".join(f"{b.label} {number(b.value)} ms" + (f" in {counted[b.label]:,} operator calls"
                     if counted[b.label] is not None else "") for b in items)  # fmt: skip
    caption = f"The journey over {known[0][1].point.seq_len:,} tokens, forward, with 95 % intervals."
    data = study.table(
        "Data: the journey", ["Step", ">Time (ms)", ">Lower bound (ms)", ">Operator calls", ">Error"],
        [[name, ms(r), bound(r), rows.calls(r), error(r)] for name, r in known],
    )  # fmt: skip
    figures.show(fig, "session-journey", caption, f"{caption} {said}.", data, stamp=study.stamp)
