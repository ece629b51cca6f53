"""The first screen of a profile: which attention, how long a sequence, how fast, and how far to trust it.

Times are those of rows that may be quoted. What to use, what fits, rooflines and bytes come from ``advise`` and
``longest``, so that the page says what the commands say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..advise import Advice, advise
from ..estimate import longest
from ..patterns import Dense, Dilated, Pattern
from ..ring import Problem, choose, contiguous
from ..ring.volume import sent_bytes
from . import curves, figures, findings
from .figures import Figure
from .landscape import field
from .landscape.drawn import COLORS
from .rows import SHORT
from .session.rows import percent
from .study import Study, best, pattern_of, together
from .tables import Cell, Table, about, number, size
from .trust import objection, threads

LENGTHS = (8192, 32768, 131072, 524288, 1048576)
WORDS = {"fwd": "a forward call", "fwd+bwd": "training"}  # passes, as readers call them
SHAPE = {"batch": 1, "heads": 8, "head_dim": 64}  # of a call, as in the landscape
RANKS = 2  # for what moves between ranks
LINES = {"dense": ("Dense", figures.GREY), "advised": ("LongNet ladder", figures.PURPLE),
         "local": ("Local window", figures.BLUE)}  # fmt: skip


@dataclass(frozen=True)
class FirstScreen:
    """What the index shows of a profile. In ``lines``, the finding first, **strong** and `code` are marked."""

    title: str
    lines: list[str]
    table: Table
    figures: list[Figure]

    def stored(self) -> dict:
        """What the manifest keeps, for the index; images are files in ``figures/``."""
        figures = [{"name": f.name, "caption": f.caption, "alt": f.alt} for f in self.figures]
        return {"title": self.title, "lines": self.lines, "html": self.table.html, "markdown": self.table.markdown,
                "figures": figures}  # fmt: skip


def first_screen(study: Study) -> FirstScreen:
    """The first screen of a profile. It takes a few seconds, to estimate memory."""
    budget = study.memory_bytes
    ask = partial(advise, _with_rates(study), memory_bytes=budget, **SHAPE)
    advised = {(n, passes): _try(ask, n, passes=passes) for n in LENGTHS for passes in WORDS}
    how = {"dtype": _known(advised)["dtype"], "profile": study.profile, "heads": SHAPE["heads"],
           "head_dim": SHAPE["head_dim"]}  # fmt: skip
    most = {passes: longest(Dense(), budget, passes=passes, **how) for passes in WORDS} if budget else {}
    measured = {} if study.rehearsal else series(study)
    lines = [_fastest(study) if measured else _roofline(advised), _memory(study, advised, most), _call(_known(advised))]
    found = [_measured_figure(study, measured)] if measured else []
    return FirstScreen(
        f"{study.profile.title}, computed" if study.rehearsal else study.device,
        [*lines, findings.trust_line(study)],
        _decisions(study, advised),
        [*found, _computed_figure(study, advised, most)],
    )


def _with_rates(study: Study):
    """The profile; that of a CPU with the rates that bound the rows, of as many threads."""
    timed = [r for r in study.good if r.bound_seconds and r.cost.get("folded_flops") and r.point.world_size == 1]
    if study.profile.kind != "cpu" or not timed:
        return study.profile
    threads_ = max(threads(r) or 1 for r in timed)
    timed = [r for r in timed if (threads(r) or 1) == threads_ and r.point.dtype == "float32"]
    # A bound is the larger of work over rate and bytes over bandwidth, so that the largest quotients are the rates.
    flops = max(r.cost["folded_flops"] / r.bound_seconds for r in timed)
    moved = max(r.cost["floor_bytes"] / r.bound_seconds for r in timed)
    return replace(study.profile, flops={"float32": flops}, bandwidth_bytes_per_s=moved)


def _try(ask, n: int, **how) -> Advice | str:
    """The advice for a length, or why there is none: where not even q, k and v fit, for one."""
    try:
        return ask(n, **how)
    except ValueError as error:
        return str(error)


# ---------------------------------------------------------------------------------------------------------------------
# measured


def series(study: Study) -> dict[str, list]:
    """By name, the quotable forward rows of each right system of the landscape, one a length, the shortest first.

    Dense attention and the library stand in other suites too, at longer lengths; a row counts if shape, dtype and
    threads are those of the landscape.
    """
    ns = field.lengths(study)
    if not ns:
        return {}
    first = next(r for _, _, r in field.standing(study, ns[0]))
    alike = {"passes": "fwd", "causal": False, "world_size": 1, "dtype": first.point.dtype, **SHAPE}
    found: dict[str, list] = {}
    for entry in field.FIELD:
        if field.verdict(study, entry).word == field.RIGHT:
            rows = [r for r in study.rows(entry.rows(study), **alike) if not objection(r) and r.median]
            rows = [r for r in rows if threads(r) == threads(first) and (entry.peer or not r.point.options)]
            by_length = {n: [r for r in rows if r.point.seq_len == n] for n in {r.point.seq_len for r in rows}}
            # Rows that took turns with those of the landscape come first.
            found[entry.name] = [best([r for r in some if together(r, first)]) or best(some)
                                 for _, some in sorted(by_length.items())]  # fmt: skip
    return found


def _fastest(study: Study) -> str:
    """The fastest at the longest length of the landscape, with all that the run does not tell apart from it."""
    n = field.lengths(study)[-1]
    ranked = field.standing(study, n)
    first = [(entry, row) for rank, entry, row in ranked if rank == ranked[0][0]]
    dense, row = (next((r for r in series(study)["Dense SDPA"] if r.point.seq_len == n), None), first[0][1])
    names = [f"{entry.name} ({percent(field.density(r.point), 2)} of all pairs)" for entry, r in first]
    tied = ", which differ by less than noise," if len(first) > 1 else ""
    said = f"**At {n:,} tokens the fastest is {' or '.join(names)}{tied} with {number(row.median * 1e3)} ms**"
    if ratio := study.ratio(dense, row):
        turns = "" if ratio.paired else " in another group of calls"
        said += f": {number(ratio.value, 2)} times less than dense attention ({number(dense.median * 1e3)} ms{turns})"
    return f"{said}. They compute different functions: this says which is fast, not which a model learns from."


def _measured_figure(study: Study, measured: dict[str, list]) -> Figure:
    points = {name: [(r.point.seq_len, *(x * 1e3 for x in (r.median, *r.ci))) for r in rows]
              for name, rows in measured.items() if rows}  # fmt: skip
    fig = curves.lines(points, xlabel="Tokens", ylabel="Time of a forward call (ms)",
                       colors=[COLORS[name] for name in points])  # fmt: skip
    ends = "; ".join(f"{name} {number(p[-1][1])} ms at {p[-1][0]:,} tokens" for name, p in points.items())
    caption = f"Measured on {study.device}: time over length of every variant that passed its checks."
    return Figure.of(fig, "first-screen-measured", caption, f"{caption} {ends}.")


# ---------------------------------------------------------------------------------------------------------------------
# computed


def _memory(study: Study, advised: dict, most: dict[str, int]) -> str:
    if not most:
        return "**How long a sequence fits** is not known, because the size of the memory is not."
    said = " or ".join(f"{about(n)} tokens in {WORDS[passes]}" for passes, n in most.items())
    peaks = [{p.name: p.peak_bytes for p in a.proposals} for a in advised.values() if isinstance(a, Advice)]
    apart = max((abs(each["advised"] / each["dense"] - 1) for each in peaks if each.get("dense")), default=0)
    return (
        f"**{size(study.memory_bytes)} hold {said}**, by dense attention. Sparse patterns save time and no memory: "
        f"theirs differs by {'less than 1' if apart < 0.01 else f'at most {100 * apart:.0f}'} %."
    )


def _roofline(advised: dict) -> str:
    """What arithmetic says of a device that is not here."""
    known = [(n, a) for (n, passes), a in advised.items() if passes == "fwd" and isinstance(a, Advice) and a.fits]
    n, advice = next(((n, a) for n, a in known if n == 131072), known[-1])
    bounds = {p.name: p.bound_s for p in advice.proposals}
    return (
        f"**At {n:,} tokens a forward call of {_name(advice['pattern'])} takes at least "
        f"{_seconds(bounds['advised'])}**, dense attention at least "
        f"{_seconds(bounds.get('dense', bounds['advised']))}. This is computed from the peak rates: no such device was "
        "here."
    )


def _known(advised: dict) -> Advice:
    return next(a for a in advised.values() if isinstance(a, Advice))


def _call(advice: Advice) -> str:
    dtype = SHORT[str(advice["dtype"]).removeprefix("torch.")]
    return (
        f"**A call** is attention alone, of one layer: batch {SHAPE['batch']}, {SHAPE['heads']} heads of "
        f"{SHAPE['head_dim']}, {dtype}, not causal. A model needs more time and memory."
    )


def _name(pattern: Pattern) -> str:
    if isinstance(pattern, Dilated):
        return f"LongNet's ladder, segments {pattern.segment_lengths[0]:,} to {pattern.segment_lengths[-1]:,}"
    return "dense attention" if isinstance(pattern, Dense) else str(pattern)


def _seconds(seconds: float) -> str:
    return f"{number(seconds * 1e3)} ms" if seconds < 1 else f"{number(seconds)} s"


def _decisions(study: Study, advised: dict) -> Table:
    """For each length what to use, whether it fits, its time and what two ranks would send."""
    lines = []
    for n in LENGTHS:
        both = [advised[n, passes] for passes in WORDS]
        known = next((a for a in both if isinstance(a, Advice)), None)
        if known is None:
            lines.append([n, Cell("does not fit", both[0]), *[None] * 5])
            continue
        dense = next((p for p in known.proposals if p.name == "dense"), known.proposals[0])
        lines.append([
            n, _name(known["pattern"]), percent(known.proposals[0].share, 2), *(_time(study, n, a) for a in both),
            _seconds(dense.bound_s) if dense.bound_s else None, size(_sent(known)),
        ])  # fmt: skip
    return Table(
        "What to use, by length",
        [">Tokens", "Use", ">Of all pairs", ">Forward", ">Training", ">Dense, forward", f">{RANKS} ranks send"],
        lines,
        note="Training is forward and backward. A time is measured, or after ≥ the roofline: the shortest that the "
        "device's rates allow; below it stands the peak of memory. Dense: its roofline. Sent: by all ranks together in "
        f"one training call. Another length: `python -m ringlab advise --profile {study.profile.name} --seq-len N`.",
    )  # fmt: skip


def _sent(advice: Advice) -> int:
    """Bytes that ranks would send in a training call by the scheme that ``auto`` takes."""
    c = advice.call
    problem = Problem(advice["pattern"], contiguous(advice.seq_len, RANKS), c.causal, c.heads, c.kv_heads)
    how = {"batch": c.batch, "head_dim": c.head_dim, "dtype": c.dtype, "passes": "fwd+bwd"}
    return sum(sent_bytes(problem, rank, choose(problem).scheme, **how) for rank in range(RANKS))


def _time(study: Study, n: int, advice: Advice | str) -> Cell:
    """The measured time of what is advised, else its roofline; and its memory where that is too much."""
    if isinstance(advice, str):
        return Cell("does not fit", kind="bad")
    c = advice.call
    wanted = {"seq_len": n, "passes": c.passes, "causal": False, "world_size": 1, "options": {}, **SHAPE}
    rows = [] if study.rehearsal else study.rows(dtype=str(c.dtype).removeprefix("torch."), **wanted)
    row = best([r for r in rows if r.median and not objection(r) and pattern_of(r.point) == advice["pattern"]])
    bound = advice.proposals[0].bound_s
    time = _seconds(row.median) if row else f"≥ {_seconds(bound)}" if bound else "not known"
    if advice.fits is False:
        ranks = f", {advice.enough_ranks} ranks hold it" if advice.enough_ranks else ""
        return Cell("does not fit", f"{size(advice.need_bytes)}{ranks}", kind="bad")
    return Cell(time, size(advice.need_bytes))


def _computed_figure(study: Study, advised: dict, most: dict) -> Figure:
    """Rooflines of a forward call over length, up to where the memory is full."""
    points: dict[str, list] = {}
    for (n, passes), advice in advised.items():
        for p in advice.proposals if passes == "fwd" and isinstance(advice, Advice) else ():
            if p.bound_s and p.name in LINES:
                points.setdefault(LINES[p.name][0], []).append((n, p.bound_s * 1e3, None, None))
    colors = dict(LINES.values())
    end = most.get("fwd")
    fig = curves.lines(points, xlabel="Tokens", ylabel="Shortest possible time of a forward call (ms)",
                       colors=[colors[name] for name in points], limit=end)  # fmt: skip
    full = f" The line shows where {size(study.memory_bytes)} are full: {number(end, 4)} tokens." if end else ""
    caption = f"Computed for {study.profile.title}: rooflines over length.{full}"
    ends = "; ".join(f"{name} {number(p[-1][1])} ms at {p[-1][0]:,} tokens" for name, p in points.items())
    return Figure.of(fig, "first-screen-computed", caption, f"{caption} {ends}.")
