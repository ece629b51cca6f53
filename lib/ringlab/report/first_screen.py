"""The first screen of a profile: which attention, how long a sequence, how fast, and how far to trust it.

Times are those of rows that may be quoted. What to use, what fits, rooflines and bytes come from ``advise`` and
``longest``, so that the page says what the commands say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import quantiles

from ..advise import Advice, advise, ladder
from ..estimate import longest
from ..hardware import Profile
from ..patterns import Dense, Dilated, Pattern
from ..ring import Problem, choose, contiguous
from ..ring.volume import sent_bytes
from . import curves, figures
from .figures import Figure
from .landscape import field
from .landscape.document import COLORS
from .predicted import rates_of
from .rows import SHORT
from .session.rows import percent
from .study import Study, best, pattern_of, together
from .tables import Cell, Table, number, size
from .trust import objection, threads

LENGTHS = (8192, 32768, 131072, 524288, 1048576)
OVERVIEW = (8192, 131072, 1048576)
WORDS = {"fwd": "forward", "fwd+bwd": "in training"}  # passes, as readers call them
SHAPE = {"batch": 1, "heads": 8, "head_dim": 64}  # of a call, as in the landscape
RANKS = 2  # for what moves between devices
LINES = {"dense": ("Dense", figures.GREY), "advised": ("LongNet from 2,048", figures.PURPLE),
         "local": ("Window of 2,048", figures.BLUE)}  # fmt: skip


@dataclass(frozen=True)
class FirstScreen:
    """What the index shows of a profile. In ``lines``, the finding first, **strong** and `code` are marked.

    ``overview``: for each length of ``OVERVIEW`` the forward time of what to use, and whether it fits.
    """

    title: str
    lines: list[str]
    table: Table
    figures: list[Figure]
    overview: list[str]

    def stored(self) -> dict:
        """What the manifest keeps, for the index; images are files in ``figures/``."""
        figures = [{"name": f.name, "caption": f.caption, "alt": f.alt} for f in self.figures]
        return {"title": self.title, "lines": self.lines, "html": self.table.html, "markdown": self.table.markdown,
                "figures": figures, "overview": self.overview}  # fmt: skip


def first_screen(study: Study) -> FirstScreen:
    """The first screen of a profile. It takes several seconds, to estimate memory."""
    ask = partial(advise, _with_rates(study), memory_bytes=study.memory_bytes, **SHAPE)
    advised = {(n, passes): _try(ask, n, passes=passes) for n in LENGTHS for passes in WORDS}
    known = next(a for a in advised.values() if isinstance(a, Advice))
    most = _longest(study, known)
    measured = {} if study.rehearsal else series(study)
    lines = [fastest(study) if measured else _roofline(advised), _memory(study, most), _call(known), _trust(study)]
    of_forward = {n: a for (n, passes), a in advised.items() if passes == "fwd" and isinstance(a, Advice)}
    there = replace(study.profile, memory_bytes=study.memory_bytes)
    found = [_measured_figure(study, measured)] if measured else []
    return FirstScreen(
        f"{study.profile.title}, computed" if study.rehearsal else f"{study.device}, measured",
        lines,
        _decisions(study, advised),
        [*found, rooflines(there, of_forward, most["fwd"][0] if most else None)],
        [_overview(study, n, advised) for n in OVERVIEW if n in LENGTHS],
    )


def _with_rates(study: Study) -> Profile:
    """The profile; that of a CPU with the rates that bound the rows of its most threads."""
    timed = [r for r in study.good if r.bound_seconds and r.point.world_size == 1]
    if study.profile.kind != "cpu":
        return study.profile
    most = max((threads(r) or 1 for r in timed), default=1)
    rates = rates_of(r for r in timed if (threads(r) or 1) == most and r.point.dtype == "float32")
    if rates.flops_per_s is None:
        return study.profile
    return replace(study.profile, flops={"float32": rates.flops_per_s}, bandwidth_bytes_per_s=rates.bytes_per_s)


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
    first = next((r for n in field.lengths(study) for _, _, r in field.standing(study, n)), None)
    if first is None:
        return {}
    alike = {"passes": "fwd", "causal": False, "world_size": 1, "dtype": first.point.dtype, **SHAPE}
    found: dict[str, list] = {}
    for entry in field.FIELD:
        if field.verdict(study, entry).word == field.RIGHT:
            rows = [r for r in study.rows(entry.rows(study), **alike) if not objection(r) and r.median]
            rows = [r for r in rows if threads(r) == threads(first) and not r.point.options]
            by_length = {n: [r for r in rows if r.point.seq_len == n] for n in {r.point.seq_len for r in rows}}
            # Rows that took turns with those of the landscape come first.
            found[entry.name] = [best([r for r in some if together(r, first)]) or best(some)
                                 for _, some in sorted(by_length.items())]  # fmt: skip
    return {name: rows for name, rows in found.items() if rows}


def fastest(study: Study) -> str:
    """The fastest at the longest length of the landscape, with all that the run does not tell apart from it."""
    ranked = next(x for n in reversed(field.lengths(study)) if (x := field.standing(study, n)))
    n = ranked[0][2].point.seq_len
    first = [(entry, row) for rank, entry, row in ranked if rank == ranked[0][0]]
    entry, row = first[0]
    dense = next((r for r in series(study).get("Dense SDPA", ()) if r.point.seq_len == n and r is not row), None)
    said = f"**{n:,} tokens, forward, measured: {entry.name} takes {number(row.median * 1e3)} ms**"
    said += f" ({number(row.ci[0] * 1e3, 2)} to {number(row.ci[1] * 1e3, 2)})"
    if ratio := study.ratio(dense, row):
        turns = "" if ratio.paired else ", not timed in turns with it"
        less = f"**{number(ratio.value, 2)} times less than dense attention**"
        said += f", {less} ({number(dense.median * 1e3)} ms{turns})"
    tied = " and ".join(other.name for other, _ in first[1:])
    said += f". {tied} {'is' if len(first) == 2 else 'are'} within noise of it" if tied else ""
    pairs = percent(field.density(row.point), 2)
    return f"{said}. It computes {pairs} of the query–key pairs. This ranks speed, not how well a model learns."


def _measured_figure(study: Study, measured: dict[str, list]) -> Figure:
    points = {name: [(r.point.seq_len, *(x * 1e3 for x in (r.median, *r.ci))) for r in rows]
              for name, rows in measured.items()}  # fmt: skip
    fig = curves.lines(points, xlabel="Tokens", ylabel="Measured: time of a forward call (ms)",
                       colors=[COLORS[name] for name in points])  # fmt: skip
    ends = "; ".join(f"{name} {number(p[-1][1])} ms at {p[-1][0]:,} tokens" for name, p in points.items())
    caption = f"Measured on {study.device}: time over length of every variant that passed its checks."
    return Figure.of(fig, "first-screen-measured", caption, f"{caption} {ends}.")


# ---------------------------------------------------------------------------------------------------------------------
# computed


def _longest(study: Study, known: Advice) -> dict[str, tuple[int, int]]:
    """By pass, the longest sequence that the memory holds: with LongNet's ladder, and dense."""
    if not study.memory_bytes:
        return {}
    how = {"dtype": known["dtype"], "profile": study.profile, "heads": SHAPE["heads"], "head_dim": SHAPE["head_dim"]}
    patterns = ladder(LENGTHS[-1]), Dense()
    return {passes: tuple(longest(p, study.memory_bytes, passes=passes, **how) for p in patterns) for passes in WORDS}


def _memory(study: Study, most: dict[str, tuple[int, int]]) -> str:
    if not most:
        return "**How long a sequence fits** is not known, because the size of the memory is not."
    said = " or ".join(f"{sparse:,} tokens {WORDS[passes]}" for passes, (sparse, _) in most.items())
    dense = " or ".join(f"{whole:,}" for _, whole in most.values())
    return (
        f"**{size(study.memory_bytes)} hold {said}** with LongNet from 2,048, computed; dense attention {dense}. "
        "Sparse patterns save time, not memory."
    )


def _roofline(advised: dict) -> str:
    """What arithmetic says of a device that is not here."""
    known = [(n, a) for (n, passes), a in advised.items() if passes == "fwd" and isinstance(a, Advice) and a.fits]
    n, advice = next(((n, a) for n, a in known if n == OVERVIEW[1]), known[-1])
    bounds = {p.name: p.bound_s for p in advice.proposals}
    return (
        f"**{n:,} tokens, forward, computed: {_name(advice['pattern'])} takes at least {_seconds(bounds['advised'])}, "
        f"dense attention at least {_seconds(bounds.get('dense', bounds['advised']))}**. No such device was here."
    )


def _call(advice: Advice) -> str:
    dtype = SHORT[str(advice["dtype"]).removeprefix("torch.")]
    return (
        f"**A call** is attention alone: one layer, batch {SHAPE['batch']}, {SHAPE['heads']} heads of "
        f"{SHAPE['head_dim']}, {dtype}, not causal; without projections, other layers and an optimizer."
    )


def _trust(study: Study) -> str:
    timed = [r for r in study.good if r.median]
    above = sorted(r.median / r.bound_seconds for r in timed if r.bound_seconds)
    over = ""
    if len(above) > 3:
        low, middle, high = (number(x, 2) for x in quantiles(above, n=4))
        over = f"Times measured on {study.device} are {middle} times their roofline in the median ({low} to {high})"
    if study.rehearsal:
        return f"**Trust**: computed times are lower bounds. {over}; this device was not tried."
    shares = [e / r.tolerance[k] for r in study.good for k, e in r.errors.items() if r.tolerance[k]]
    again, agreed = study.repeats
    twice = f"{agreed} of {again} times agree with an earlier run" if again else "the run was not repeated"
    return (
        f"**Trust**: {len(study.good)} of {len(study.results)} measurements passed their check against the float64 "
        f"reference (largest error: {100 * max(shares, default=0):.0f} % of what is allowed); the others are rejected. "
        f"The same work, measured twice in a run, differed by up to {number(study.noise_floor)}×. "
        f"{sum(r.unstable for r in timed)} of {len(timed)} times are unstable; {twice}. {over}."
    )


def _name(pattern: Pattern) -> str:
    if isinstance(pattern, Dilated):
        return f"LongNet from {pattern.segment_lengths[0]:,}"
    return "dense attention" if isinstance(pattern, Dense) else str(pattern)


def _seconds(seconds: float) -> str:
    """A time as people say it.

    >>> _seconds(0.0925), _seconds(31), _seconds(2500), _seconds(10581)
    ('92.5 ms', '31.0 s', '41.7 min', '2.94 h')
    """
    units = ((1, 1e-3, "ms"), (300, 1, "s"), (7200, 60, "min"), (float("inf"), 3600, "h"))
    return next(f"{number(seconds / unit)} {name}" for below, unit, name in units if seconds < below)


def _bound(advice: Advice, name: str) -> str | None:
    found = next((p.bound_s for p in advice.proposals if p.name == name), None)
    return f"≥ {_seconds(found)}" if found else None


def _overview(study: Study, n: int, advised: dict) -> str:
    advice = advised[n, "fwd"]
    if isinstance(advice, str) or advice.fits is False:
        return "does not fit"
    training = advised[n, "fwd+bwd"]
    also = "fits" if isinstance(training, Advice) and training.fits else "fits forward only"
    return f"{_time(study, n, advice).text}, {also}"


def _decisions(study: Study, advised: dict) -> Table:
    """For each length what to use, its time and memory, what the alternatives take, and what two devices send."""
    lines = []
    for n in LENGTHS:
        both = [advised[n, passes] for passes in WORDS]
        known = next((a for a in both if isinstance(a, Advice)), None)
        if known is None:
            lines.append([n, Cell("does not fit", both[0]), *[None] * 6])
            continue
        lines.append([
            n, _name(known["pattern"]), percent(known.proposals[0].share, 2), *(_time(study, n, a) for a in both),
            _bound(known, "local"), _bound(known, "dense"), size(_sent(known)),
        ])  # fmt: skip
    return Table(
        "What to use, by length",
        [">Tokens", "Use", ">Query–key pairs", ">Forward", ">Training", ">Window of 2,048, forward",
         ">Dense, forward", f">{RANKS} devices send"],
        lines,
        note="Use: LongNet's pattern with segments of 2,048 tokens, as in its paper, that double up to the sequence, "
        "so that every query reaches all of it; a window is about as fast and sees its neighbours alone. ≥ marks a "
        "computed lower bound, other times are measured. Below a time stands the peak of memory, computed. Sent: by "
        f"both devices together in a training call. `python -m ringlab advise --profile {study.profile.name} --seq-len "
        "N` answers for other lengths and shapes.",
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
        ranks = f", {advice.enough_ranks} devices hold it" if advice.enough_ranks else ""
        return Cell("does not fit", f"{size(advice.need_bytes)}{ranks}", kind="bad")
    return Cell(time, size(advice.need_bytes))


def rooflines(profile: Profile, advised: dict[int, Advice], end: int | None) -> Figure:
    """Rooflines of a call over length, by the advice for each; ``end``: the length at which the memory is full."""
    points: dict[str, list] = {}
    for n, advice in advised.items():
        for p in advice.proposals if advice.fits is not False else ():
            if p.bound_s and p.name in LINES:
                points.setdefault(LINES[p.name][0], []).append((n, p.bound_s, None, None))
    colors = dict(LINES.values())
    call = "training" if any(advice.call.passes != "fwd" for advice in advised.values()) else "forward"
    fig = curves.lines(points, xlabel="Tokens", ylabel=f"Computed: shortest possible time of a {call} call (s)",
                       colors=[colors[name] for name in points], limit=end, limit_label="memory full")  # fmt: skip
    full = f" {size(profile.memory_bytes)} are full at {end:,} tokens." if end else ""
    caption = f"Computed for {profile.title}: rooflines over length, lower bounds of the time.{full}"
    ends = "; ".join(f"{name} at least {_seconds(p[-1][1])} at {p[-1][0]:,} tokens" for name, p in points.items())
    return Figure.of(fig, "first-screen-computed", caption, f"{caption} {ends}.")
