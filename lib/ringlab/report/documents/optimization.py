"""Document 000, the first of five published: what each optimization gains, where it
pays, and what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import torch

from ... import cost, hardware, kernels, patterns
from ...advise import advise
from ...engine import dilated, folding
from ...estimate import longest
from ...kernels.base import DeviceSpec
from .. import columns, figures, findings, rows
from ..columns import (
    MASK,
    PASS,
    PEAK,
    ROOFLINE,
    TIME,
    TOKENS,
    Column,
    beyond,
    shown,
    table,
    times,
)
from ..evidence import evidence
from ..findings import provenance, reading
from ..rows import (
    FULL,
    SHORT,
    dense_beside,
    document_rows,
    is_optimised,
    is_plain,
    label,
    pattern,
    shape,
    switches,
)
from ..study import Study, best, together, with_rates
from ..tables import Cell, Code, Table, Text, counted, number, size
from ..trust import reason, roofline_s

__all__ = [
    "answer",
    "efficiency",
    "failures",
    "folded",
    "implementations",
    "kernels_table",
    "length_figure",
    "limits",
    "passes",
    "provenance",
    "reading",
    "recommended",
    "reuse",
]
_longest = cache(longest)
DTYPES = ("float32", "float16", "bfloat16")
SWITCHES = {  # name: (what it does, off, on)
    "gather": ("Strided views instead of gathered copies", True, False),
    "backend": ("Fused kernel instead of eager", "eager", "auto"),
    "cache": ("Pattern cache on", False, True),
    "pool": ("Memory pool on", False, True),
}
FUNCTION = {
    k: v
    for k, v in shape().items()
    if k in ("batch", "heads", "head_dim", "world_size")
}
CALL = {
    k: v for k, v in shape().items() if k not in ("seq_len", "world_size")
}  # the document's, of any length


def answer(study: Study) -> Text:
    """What optimizing pays, what fits, dense attention, trust, what is missing."""
    fits = fits_line(study, pattern(), shape()["seq_len"])
    return answer_of(study, fits, _pays_line(study), fits, _dense_line(study))


def answer_of(study: Study, computed: str, *lines: str) -> Text:
    """The answer of a page in five lines at most: its ``lines``, then trust and what
    was not measured.

    In a rehearsal what is ``computed`` for the absent device comes first, and one line
    holds what another one took.
    """
    if study.rehearsal:
        here = " ".join(line for line in lines if line != computed).replace("**", "")
        lines = computed, f"**Measured on {study.device}, not on that GPU**: {here}"
    return Text(
        [*lines, findings.trust_line(study), findings.gaps_line(study)],
        kind="answer",
        bullets=True,
    )


def _pays_line(study: Study) -> str:
    ratios = [study.ratio(x["naive"], x["row"]) for x in entries(study) if x["engine"]]
    found = [x for x in ratios if x]
    if not found:
        return (
            "**What optimizing pays**: not measured, no pair of rows passed its check."
        )
    sure = [x for x in found if x.significantly_slower]
    factor = " to ".join(
        dict.fromkeys(number(f(x.value for x in sure or found), 2) for f in (min, max))
    )
    noise = (
        f", {len(sure)} of {len(found)} implementations beyond noise"
        if sure
        else ", within noise"
    )
    noise = "" if len(sure) == len(found) else noise
    where = f"{shape()['seq_len']:,} tokens, forward, segments {segments()}"
    said = [f"**Optimizing pays {factor} times here{noise}** ({where})"]
    effects = [
        (words.lower(), x[2])
        for name, (words, *_) in SWITCHES.items()
        if (x := _pair(study, name))
    ]
    for words, sign in (
        ("The gain comes from", 1),
        ("A loss", -1),
        ("No gain beyond noise", 0),
    ):
        if names := [
            f"{name} ({number(x.value)}×)"
            for name, x in effects
            if beyond(x) == sign and x.high < math.inf
        ]:
            said.append(f"{words}: {', '.join(names)}")
    if names := [name for name, x in effects if x.high == math.inf]:
        said.append(f"Too few samples: {', '.join(names)}")
    return f"{'. '.join(said)}."


def fits_line(study: Study, pattern, seq_len: int, ranks=(1,)) -> str:
    """How long a sequence fits on so many ranks, by ``longest``; in a rehearsal the
    roofline of the device too.
    """
    gpu, bound = study.profile, ""
    if study.rehearsal and (least := _bounds(gpu, pattern, seq_len)):
        dtype = SHORT[rows.hardware_dtype(study)]
        bound = f"computed for {gpu.title} in {dtype}, over {seq_len:,} tokens on one device: {pattern} takes {least}; "
    if not study.memory_bytes:
        return f"**How long a sequence fits**: {bound}not known, because the size of the memory is not."
    how = {
        "dtype": gpu.default_dtype(),
        "profile": gpu.name,
        **{k: shape()[k] for k in ("heads", "head_dim")},
    }

    def tokens(**more) -> str:
        return f"{_longest(pattern, study.memory_bytes, **how, **more):,}"

    if ranks == (1,):
        said = f"hold {tokens(ranks=1)} tokens in a forward call, {tokens(passes='fwd+bwd')} in training"
    else:
        each = " or ".join(
            f"{tokens(ranks=n)} tokens on {counted(n, 'rank')}" for n in ranks
        )
        said = f"a rank hold {each} in a forward call"
    held = size(study.memory_bytes)
    return f"**How long a sequence fits**: {bound}{held} {said}, by `ringlab.longest` for attention alone."


def _dense_line(study: Study) -> str:
    found = over_dense(study)
    known = [x for x in found if x[1] is not None]
    if not known:
        return "**Over dense attention**: not measured."
    n, ratio, _, row = known[-1]
    start = rows.begins([x for x in found if x[0] <= n])
    since = (
        f"It is faster from {start:,} tokens on. "
        if start
        else "It is not faster beyond noise. "
    )
    return (
        f"**Over dense attention** it is {times(ratio).text} as fast at {n:,} tokens in {SHORT[row.point.dtype]} "
        f"({times(ratio).sub.replace(';', ',')}). {since}It computes fewer pairs: another function."
    )


def segments(found: dict | None = None) -> str:
    """Segment lengths over rates of a stored pattern, by default the document's."""
    keys, text = ("segment_lengths", "dilation_rates"), " / " if found else " / rates "
    found = found or pattern().to_dict()
    return (
        text.join(", ".join(map(str, found[k])) for k in keys if k in found) or "dense"
    )


def recommended(study: Study) -> Code:
    """What ``advise`` chooses by these rows, as code that runs, under the pairs of rows
    that differ in one choice.
    """
    advice = advise(
        with_rates(study),
        shape()["seq_len"],
        pattern=pattern(),
        memory_bytes=study.memory_bytes,
        rows=evidence(study),
        **CALL,
    )
    found = [e for choice in advice.choices.values() for e in choice.evidence]
    said = [
        f"{e.text.partition(f', {e.label}')[0]}, {e.seq_len:,} tokens" for e in found
    ]
    of = f", {study.stamp}: the times are of a CPU" if study.stamp else ""
    lines = [f"Measured{of}:", *(said or ["no pair of rows passed"])]
    if study.profile.kind == "cuda":
        lines.append(
            f"The torch for it: {hardware.install_line(study.profile.capability)}"
        )
    return Code("".join(f"# {line}\n" for line in lines) + advice.code())


def document_row(study: Study, test: Callable, dtype: str):
    """The document's call in a dtype: the fastest of the rows that pass a test."""
    return best([r for r in document_rows(study, dtype=dtype) if test(r)])


def entries(study: Study) -> list[dict]:
    """A line by dtype of naive, the engine and dense; ``others`` are rows of the engine
    under published names.
    """
    ours, dense, found = (
        document_rows(study),
        study.rows(system="dense_sdpa", **shape()),
        [],
    )
    for some, test in ((ours, is_plain), (ours, rows.is_engine), (dense, bool)):
        for dtype in rows.dtypes(filter(test, some)):
            alike = [r for r in some if test(r) and r.point.dtype == dtype]
            row = best([r for r in alike if shown(r) and is_optimised(r)]) or best(
                alike
            )
            naive = document_row(study, is_plain, dtype)
            found.append(
                {
                    "row": row,
                    "engine": test is rows.is_engine,
                    "naive": None if row is naive else naive,
                    "dense": None if some is dense else dense_beside(study, row),
                    "others": [
                        r
                        for r in alike
                        if test is rows.is_engine and r.point.system != row.point.system
                    ],
                }
            )
    return found


def implementations(study: Study) -> Table:
    """The document's table: ours beside what is printed; names of one engine share a
    line.
    """
    tests = {
        "original": is_plain,
        "optimised": is_optimised,
        "flash": lambda r: r.point.system.endswith("V2Flash"),
    }

    def name(x: dict) -> Cell:
        slower = {label(r): beyond(study.ratio(r, x["row"])) for r in x["others"]}
        also = (
            f"also {name}{', not as fast' if apart else ''}"
            for name, apart in slower.items()
        )
        return Cell(label(x["row"]), "; ".join([SHORT[x["row"].point.dtype], *also]))

    def paper(x: dict) -> Cell | None:
        for r in (x["row"], *x["others"]):
            for p in rows.published()["rows"]:
                if tests[p["key"]](r) and r.point.dtype == p["dtype"]:
                    return Cell(f"{p['ms']:.2f}", f"{p['speedup']:.2f}×; {p['name']}")
        return None

    def by_dtype(test) -> str:
        half, single = (
            document_row(study, test, dtype) for dtype in ("float16", "float32")
        )
        return (
            cell.plain if (cell := times(study.ratio(half, single))) else "not measured"
        )

    s, d, gpu = shape(), rows.published(), gpu_of(study)
    return table(
        f"{s['seq_len']:,} tokens, {s['heads']} heads of {s['head_dim']}, forward, segments {segments()}",
        [
            Column("Implementation", name),
            TIME.of("row"),
            ROOFLINE.of("row"),
            columns.ratio(study, "naive", "row", ">Faster than naive"),
            columns.ratio(study, "dense", "row", ">Faster than dense"),
            PEAK.of("row"),
            *([] if study.rehearsal else [Column(">Published (ms)", paper)]),
        ],
        entries(study),
        note="Naive is this library's gathered, eager path: the original does not run here. fp32 instead of fp16 alone "
        f"gains {by_dtype(is_plain)} in the naive path and {by_dtype(is_optimised)} in the optimized one; the "
        f"published {d['rows'][1]['speedup']}× mixes dtype and optimizations. Published "
        f"on {d['device']}; according to its source code the original attends across heads instead of tokens. Computed "
        f"for {gpu.title}: the call takes {_bounds(gpu, pattern(), s['seq_len'])}.",
    )


def _pair(study: Study, name: str, **others) -> tuple | None:
    """(row off, row on, Ratio) of a switch, the ``others`` on, in fp32 where there is
    one; the faster of each.
    """
    ours, (_, off, on), found = (
        document_rows(study, system="ringlab"),
        SWITCHES[name],
        [],
    )
    for one in rows.dtypes(ours):
        pair = [
            best(
                [
                    r
                    for r in ours
                    if r.point.dtype == one
                    and switches(r.point) == FULL | others | {name: way}
                ]
            )
            for way in (off, on)
        ]
        if ratio := study.ratio(*pair):
            found.append((*pair, ratio))
    return min(found, key=lambda x: x[1].point.dtype != "float32", default=None)


def over_dense(study: Study) -> list[tuple]:
    """(n, Ratio or None, dense row, our row) by n, in the profile's dtype or in fp32,
    whichever has more lengths.
    """
    wanted = FUNCTION | {
        "pattern": pattern().to_dict(),
        "passes": "fwd",
        "causal": False,
    }
    found: dict[str, dict[int, tuple]] = {rows.hardware_dtype(study): {}, "float32": {}}
    for r in filter(is_optimised, study.rows(**wanted)):
        if (dense := dense_beside(study, r)) and r.point.dtype in found:
            ratio, lines = study.ratio(dense, r), found[r.point.dtype]
            n, known = r.point.seq_len, lines.get(r.point.seq_len)
            if (
                known is None
                or ratio
                and (known[0] is None or ratio.paired > known[0].paired)
            ):
                lines[n] = (ratio, dense, r)
    return [(n, *line) for n, line in sorted(max(found.values(), key=len).items())]


def length_figure(study: Study) -> None:
    """Time over length of dense attention and of the pattern, with the pattern's
    roofline.
    """
    found = over_dense(study)
    data = table(
        "Data: time over length",
        [
            TOKENS.of("ours"),
            TIME.of("dense", ">Dense SDPA (ms)"),
            TIME.of("ours", ">All optimizations (ms)"),
            ROOFLINE.of("ours"),
            columns.ratio(study, "dense", "ours", ">Faster than dense"),
        ],
        [{"dense": d, "ours": r} for _, _, d, r in found],
    )
    what = (
        f"segments {segments()}, forward, {SHORT[found[0][3].point.dtype]}"
        if found
        else ""
    )
    looks = {"Dense SDPA": figures.GREY, "All optimizations": figures.BLUE}
    draw_lengths(study, "optimization-length", found, what, looks, label, data)


def draw_lengths(
    study: Study,
    name: str,
    found: list,
    what: str,
    looks: dict,
    label,
    data: Table,
    also=(),
) -> None:
    """Time over length beside dense attention, with the roofline of our rows; nothing
    where there is no time.

    Args:
        found: (tokens, Ratio or None, dense row or None, our row), the shortest first; ``also`` are rows besides.
        what: the call, in words.
        looks: name -> color, in the order of the legend; ``label`` gives the name of a row.
    """
    series: dict[str, list] = {}
    for row in [r for _, _, *both in found for r in both] + [*also]:
        if columns.timed(row):
            n = row.point.seq_len
            series.setdefault(label(row), []).append(
                (n, *(x * 1e3 for x in (row.median, *row.ci)))
            )
            if (bound := roofline_s(row)) and any(row is x[3] for x in found):
                series.setdefault("Its roofline", []).append(
                    (n, bound * 1e3, None, None)
                )
    if not series:
        return
    looks = looks | {"Its roofline": figures.SKY}
    ordered = {k: series[k] for k in looks if k in series}
    fig = figures.lines(
        {"Time (ms)": ordered}, xlabel="Tokens", colors=looks, dashed=["Its roofline"]
    )
    start = rows.begins([x for x in found if x[2] is not None])
    said = (
        f"Faster than dense attention from {start:,} tokens on"
        if start
        else "Not faster than dense attention"
    )
    faster = (
        "; ".join(f"{n:,} tokens {number(x.value)} times" for n, x, *_ in found if x)
        or "not shown"
    )
    caption = f"{said}: {what}."
    figures.show(
        fig, name, caption, f"{caption} Faster by: {faster}.", data, stamp=study.stamp
    )


def passes(study: Study) -> Table:
    """Forward and training, not causal and causal, at the longest n at which training
    was timed.
    """
    ours = [
        r
        for r in study.rows(pattern=pattern().to_dict(), **FUNCTION)
        if is_optimised(r)
    ]
    p = max(
        (r.point for r in ours if r.point.passes == "fwd+bwd"),
        key=lambda p: p.seq_len,
        default=None,
    )
    here = [
        r
        for r in ours
        if p and (r.point.seq_len, r.point.dtype) == (p.seq_len, p.dtype)
    ]
    fastest = [
        best([r for r in here if (r.point.passes, r.point.causal) == way])
        for way in product(cost.PASSES, (False, True))
    ]
    where = f", {p.seq_len:,} tokens, {SHORT[p.dtype]}" if p else ""
    return table(
        f"All optimizations beside dense attention{where}, segments {segments()}",
        [
            PASS.of("ours"),
            MASK.of("ours"),
            TIME.of("ours", ">All optimizations (ms)"),
            ROOFLINE.of("ours"),
            TIME.of("dense", ">Dense SDPA (ms)"),
            ROOFLINE.of("dense", ">Roofline, dense (ms)"),
            columns.ratio(study, "dense", "ours", ">Faster than dense"),
        ],
        [
            {"ours": r, "dense": dense_beside(study, r)}
            for r in fastest
            if r is not None
        ],
        note="Training: forward and backward together, with a random gradient of the output.",
    )


def built(study: Study) -> list[tuple]:
    """(row that builds a plan, call that needs the plan, its part of the call), the
    largest part first.
    """
    found = []
    for cold in study.rows(system="plan_build", world_size=1, options={"warm": False}):
        p = cold.point
        alike = {
            k: getattr(p, k)
            for k in ("seq_len", "pattern", "heads", "head_dim", "batch", "world_size")
        }
        wanted = {
            "backend": "auto",
            "gather": cold.option("gather") or False,
            "cache": True,
        }
        calls = study.rows(system="ringlab", passes="fwd", causal=False, **alike)
        call = best(
            [
                r
                for r in calls
                if columns.timed(r) and wanted.items() <= switches(r.point).items()
            ]
        )
        if call and columns.timed(cold):
            found.append((cold, call, cold.median / call.median))
    return sorted(found, key=lambda x: -x[2])


def pool_rows(study: Study) -> list[tuple]:
    """(row without a pool, row with one, Ratio) of each call and threshold; the
    document's calls last.
    """
    ours = study.rows(system="ringlab", world_size=1)
    swept = [r for r in ours if r.option("pool_threshold_mb") is not None]
    swept.sort(key=lambda r: r.option("pool_threshold_mb"))
    pairs = [
        (best([r for r in ours if r.point == on.point.but(options=())]), on)
        for on in swept
    ]
    found = [(off, on, ratio) for off, on in pairs if (ratio := study.ratio(off, on))]
    return found + [
        x for gather in (False, True) if (x := _pair(study, "pool", gather=gather))
    ]


def reuse(study: Study) -> Text:
    """What the cache and the pool come to, each in a line."""
    cache_line = pool_line = "not measured."
    if found := built(study):
        cold, call, share = found[0]
        cache_line = (
            f"building a plan takes at most {number(100 * share, 2)} % of a call ({cold.point.seq_len:,} tokens, "
            f"{number(cold.median * 1e6)} µs of {number(call.median * 1e3)} ms), so no cache can save more. A plan is "
            "the list of dense calls that a pattern comes to."
        )
    if used := [x for *_, x in pool_rows(study)]:
        won, lost = (sum(beyond(x) == sign for x in used) for sign in (1, -1))
        ends = [f"{f(x.value for x in used):.2f}" for f in (min, max)]
        pool_line = (
            f"of {counted(len(used), 'call')} {won} are faster with it, {lost} slower, "
            f"{len(used) - won - lost} within noise ({' to '.join(ends)} times as fast). Strided views write results "
            "in place and borrow nothing but an fp32 accumulator; gathered copies borrow their buffers."
        )
    return Text(
        [f"**Pattern cache**: {cache_line}", f"**Memory pool**: {pool_line}"],
        bullets=True,
    )


def efficiency(study: Study) -> Text:
    """Time over roofline: of the document's call, of dense attention, of LongNet's own
    mixing and of other forms.
    """
    call = document_row(study, is_optimised, rows.hardware_dtype(study))
    found = {
        "the document's call": [call],
        "dense SDPA": [call and dense_beside(study, call)],
    }
    forms = {
        "ringlab": "LongNet's own mixing",
        "contiguous_segments": "torch's kernel on contiguous segments",
        "copying": "copied branches",
    }
    for system, name in forms.items():
        ours = [
            r
            for r in study.rows(system=system, **FUNCTION)
            if r.option("merge") is None
        ]
        found[name] = [r for r in ours if r.point.pattern != pattern().to_dict()]
    over = {
        name: [
            r.median / roofline_s(r) for r in some if columns.timed(r) and roofline_s(r)
        ]
        for name, some in found.items()
    }
    ends = {
        name: dict.fromkeys(number(f(some), 2) for f in (min, max))
        for name, some in over.items()
        if some
    }
    said = ", ".join(f"{name} {' to '.join(x)}×" for name, x in ends.items())
    return Text(
        [
            f"**Time over roofline**: {said or 'not measured'}. The roofline is that of the row's threads."
        ]
    )


def kernels_table(study: Study) -> Table:
    """Each kernel: its time here or why it is refused, and what its rules say of a GPU."""
    gpu = gpu_of(study)
    card = DeviceSpec("cuda", gpu.capability)

    def here(name: str) -> Cell:
        row = _kernel_row(study, name)
        if row and row.status == "unsupported":
            return Cell("refused", reason(row), "none")
        time = columns.time(row)
        return (
            Cell(time.text, f"{SHORT[row.point.dtype]}; {time.sub}", time.kind)
            if row
            else time
        )

    def by_rule(name: str) -> Cell:
        why = {
            SHORT[d]: kernels.KERNELS[name].refuses(
                card, getattr(torch, d), shape()["head_dim"]
            )
            for d in DTYPES
        }
        allowed = ", ".join(dtype for dtype, reason in why.items() if not reason)
        return Cell(
            allowed or "refused",
            "; ".join({x: 1 for x in why.values() if x}),
            "" if allowed else "none",
        )

    def chosen(dtype: str) -> str:
        given = pattern(), shape()["seq_len"], shape()["heads"], shape()["heads"]
        how = {"pattern_kind": kernels.kind_of(*given)}
        call = getattr(torch, dtype), shape()["head_dim"]
        choice = kernels.expected("cuda", gpu.capability, *call, **how)
        return f"{SHORT[dtype]} by {choice.name}, {choice.rule}"

    found: dict[tuple, list[str]] = {}  # those that are refused alike share a line
    for name in kernels.order(
        card if study.device_type == "cuda" else torch.device("cpu")
    ):
        cells = here(name), by_rule(name)
        alike = all(c.kind == "none" for c in cells)
        found.setdefault((*cells, "" if alike else name), []).append(name)
    return Table(
        f"Kernels here, and according to their rules on {gpu.title} ({hardware.sm(gpu.capability)})",
        ["Kernel", ">Time here (ms)", f"On {gpu.title}"],
        [[", ".join(names), *cells[:2]] for cells, names in found.items()],
        folded=True,
        note="For a dense call the first that is not refused is chosen. Rules are stated needs; nothing was called on "
        f"that device. For the document's pattern there: {'; '.join(map(chosen, DTYPES))}.",
    )


def _kernel_row(study: Study, name: str):
    """The document's call by one kernel."""
    return best(
        [
            r
            for r in document_rows(study, system="ringlab")
            if switches(r.point) == FULL | {"backend": name}
        ]
    )


def failures(study: Study) -> Table | None:
    """Every point that is not quoted, but for the refusals that the table of kernels
    shows.
    """
    return findings.failures(
        study, told=[_kernel_row(study, name) for name in kernels.KERNELS]
    )


def folded(study: Study) -> Table | None:
    """Each visible pair once beside branch by branch: what both compute, the predicted
    and the measured gain.
    """
    lines = []
    for eager in study.rows(system="ringlab", options={"merge": "eager"}):
        p = eager.point
        auto = next(
            (
                r
                for r in study.rows()
                if together(r, eager) and r.point == p.but(options={})
            ),
            None,
        )
        if auto is not None:
            given = patterns.from_dict(p.pattern), p.seq_len, p.heads, p.kv_heads
            kernel = kernels.choose(
                "cpu", torch.float32, p.head_dim, causal=p.causal
            ).kernel
            apart, how = (
                dilated.make_plan(*given),
                (*given, p.causal, torch.float32, kernel),
            )
            plans, chosen = (
                (apart, folding.fold(*how) or apart),
                folding.faster(*how) is not None,
            )
            gain = folding.cost(apart, p.causal, kernel) / folding.cost(
                plans[1], p.causal, kernel
            )
            line = {"eager": eager, "auto": auto, "plans": plans}
            lines.append(
                line
                | {"gain": gain, "chosen": "folded" if chosen else "branch by branch"}
            )
    if not lines:
        return None

    def both(header: str, said: Callable) -> Column:
        return Column(
            header,
            lambda x: " → ".join(said(plan, x["auto"].point) for plan in x["plans"]),
        )

    def merges(plan, p) -> str:
        return number(
            sum(c.nodes * c.heads * c.q.rows for c in plan.calls if not c.first)
            / (p.heads * p.seq_len)
        )

    def pairs(plan, p) -> str:
        return number(plan.pairs(p.causal) / (p.heads * p.seq_len))

    def over_roofline(row) -> str | None:
        return (
            f"{number(row.median / roofline_s(row))}×"
            if columns.timed(row) and roofline_s(row)
            else None
        )

    return table(
        "Nested branches: branch by branch → folded, each visible pair once",
        [
            Column("Segments / rates", lambda x: segments(x["auto"].point.pattern)),
            TOKENS.of("auto"),
            PASS.of("auto"),
            MASK.of("auto"),
            both(">Calls", lambda plan, p: str(len(plan.calls))),
            both(">Pairs a position", pairs),
            both(">Merges a row", merges),
            Column(
                ">Predicted gain",
                lambda x: Cell(f"{number(x['gain'])}×", f"chosen: {x['chosen']}"),
            ),
            columns.ratio(study, "eager", "auto", ">Measured gain"),
            TIME.of("auto"),
            ROOFLINE.of("auto"),
            Column(">Time over roofline", over_roofline).of("auto"),
        ],
        lines,
        folded=True,
        note="A key that M branches show counts once, with log M added to its scores. The gain is the time branch by "
        "branch over the time chosen; predicted for the forward pass. Pairs: queries times keys that are computed.",
    )


def gpu_of(study: Study):
    """The GPU that computed figures are for: the profile's own, or the document's where
    the profile has none.
    """
    own = study.profile.kind == "cuda" and study.profile.capability is not None
    return study.profile if own else hardware.get_profile(rows.published()["profile"])


def _bounds(profile, pattern, seq_len: int) -> str:
    """The rooflines of a pattern and of dense attention in the document's heads on a
    profile; empty for no rates.
    """
    dtype = profile.default_dtype()
    rate, bandwidth = profile.peak(dtype), profile.bandwidth_bytes_per_s
    if not rate or not bandwidth:
        return ""
    fields = CALL | {"dtype": dtype, "seq_len": seq_len}
    ours, dense = (
        cost.count(p, **fields).seconds(rate, bandwidth)
        for p in (pattern, patterns.Dense())
    )
    return f"at least {number(ours * 1e3)} ms, dense attention {number(dense * 1e3)} ms"


def limits(study: Study) -> Text:
    """What this run cannot tell."""
    lines = []
    for dtype in DTYPES:
        tried = [r for r in study.results if r.point.dtype == dtype]
        if not any(map(shown, tried)):
            lines.append(
                f"{SHORT[dtype]}: {'no row passed, each with its reason below' if tried else 'not measured'}."
            )
    return findings.limits(study, *lines)
