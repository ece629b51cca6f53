"""The first screen of a profile: which attention, how long a sequence, how fast, and
how far to trust it.

Times are those of rows that may be quoted. What to use, what fits, rooflines and bytes
come from ``advise`` and ``longest``, so that the page says what the commands say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import quantiles

import pandas

from .. import kernels
from ..advise import Advice, Proposal, advise, dtype_name, ladder
from ..cost import far_queries
from ..estimate import longest
from ..hardware import Profile
from ..kernels.base import accumulation_dtype
from ..measure import suites
from ..measure.validity import objection, roofline_s, threads
from ..patterns import Dense, Dilated, Pattern
from . import figures
from .figures import Figure
from .findings import trust_line
from .predicted import CLOSE, compared
from .rows import SHORT
from .study import Study, best, pattern_of, with_rates
from .tables import Cell, Table, number, percent, size

LENGTHS = (8192, 32768, 131072, 524288, 1048576)
OVERVIEW = (8192, 131072, 1048576)
WORDS = {"fwd": "forward", "fwd+bwd": "in training"}  # passes, as readers call them
SHAPE = {"batch": 1, "heads": 8, "head_dim": 64}  # of a call, as in the landscape
RANKS = 2  # for what moves between devices
LINES = {
    "dense": ("Dense", figures.GREY),
    "advised": (suites.ADVISED, figures.PURPLE),
    "local": ("Window and global block", figures.BLUE),
}


@dataclass(frozen=True)
class FirstScreen:
    """What the index shows of a profile. In ``lines``, the finding first, **strong**
    and `code` are marked.

    ``overview``: for each length of ``OVERVIEW`` the forward time of what to use, and
    whether it fits.
    """

    title: str
    lines: list[str]
    table: Table
    figures: list[Figure]
    overview: list[str]

    def stored(self) -> dict:
        """What the manifest keeps, for the index; images are files in ``figures/``."""
        figures = [
            {"name": f.name, "caption": f.caption, "alt": f.alt} for f in self.figures
        ]
        return {
            "title": self.title,
            "lines": self.lines,
            "html": self.table.html,
            "markdown": self.table.markdown,
            "figures": figures,
            "overview": self.overview,
        }


def first_screen(
    study: Study, findings: Mapping[str, Sequence[str]], drawn: Mapping[str, Mapping]
) -> FirstScreen:
    """The first screen of a profile, with what its pages found (by page, the strongest
    line first) and drew (by name). It takes several seconds, to estimate memory.
    """
    ask = partial(advise, with_rates(study), memory_bytes=study.memory_bytes, **SHAPE)
    advised = {
        (n, passes): _try(ask, n, passes=passes) for n in LENGTHS for passes in WORDS
    }
    known = next(a for a in advised.values() if isinstance(a, Advice))
    most = _longest(study, known)
    ranked, learned = findings.get("landscape", []), findings.get("quality", [])
    picture = drawn.get("landscape-time")
    measured = not study.rehearsal and bool(ranked and picture)
    bounded = {
        n: a
        for (n, passes), a in advised.items()
        if passes == "fwd"
        and isinstance(a, Advice)
        and a.fits is not False
        and a.proposals[0].bound_s
    }
    lines = [
        f"{' '.join(ranked[:3])} This ranks speed, not how well a model learns."
        if measured
        else _roofline(bounded),
        _memory(study, most),
        _trust(study),
        *learned[:1],
        _call(known),
        *([_there(study, known)] if study.rehearsal else []),
    ]
    found = [Figure(**picture, png=b"")] if measured else []  # which the page has
    if bounded:
        there = replace(study.profile, memory_bytes=study.memory_bytes)
        found.append(rooflines(there, bounded, most["fwd"][0] if most else None))
    return FirstScreen(
        f"{study.profile.title}, computed" if study.rehearsal else _device(study),
        lines,
        _decisions(study, advised),
        found,
        [_overview(study, n, advised) for n in OVERVIEW if n in LENGTHS],
    )


def _device(study: Study) -> str:
    found = {threads(r) for r in study.good if r.point.world_size == 1} - {None}
    return (
        f"{study.device}, {max(found)} threads"
        if found and study.device_type == "cpu"
        else study.device
    )


def _try(ask, n: int, **how) -> Advice | str:
    """The advice for a length, or why there is none: where not even q, k and v fit, for
    one.
    """
    try:
        return ask(n, **how)
    except ValueError as error:
        return str(error)


# --------------------------------------------------------------------------------------
# computed


def _longest(study: Study, known: Advice) -> dict[str, tuple[int, int]]:
    """By pass, the longest sequence that the memory holds: with LongNet's ladder, and
    dense.
    """
    if not study.memory_bytes:
        return {}
    how = {
        "dtype": known["dtype"],
        "profile": study.profile,
        "heads": SHAPE["heads"],
        "head_dim": SHAPE["head_dim"],
    }
    patterns = ladder(LENGTHS[-1]), Dense()
    return {
        passes: tuple(
            longest(p, study.memory_bytes, passes=passes, **how) for p in patterns
        )
        for passes in WORDS
    }


def _memory(study: Study, most: dict[str, tuple[int, int]]) -> str:
    """How long a sequence the memory holds, and how many measured peaks are as
    computed.
    """
    if not most:
        return "**How long a sequence fits** is not known, because the size of the memory is not."
    said = " or ".join(
        f"{sparse:,} tokens {WORDS[passes]}" for passes, (sparse, _) in most.items()
    )
    dense = " or ".join(f"{whole:,}" for _, whole in most.values())
    found = [
        (r, abs(x) <= CLOSE)
        for r, x in compared(study)[0]
        if r.point.heads == SHAPE["heads"]
    ]
    right, end = (
        sum(close for _, close in found),
        max((r.point.seq_len for r, _ in found), default=0),
    )
    sure = f" On {study.device} {right} of {len(found)} measured peaks, of calls up to {end:,} tokens, are as computed "
    return (
        f"**{size(study.memory_bytes)} hold {said}** with {suites.ADVISED}, computed with all of it free; dense "
        f"attention {dense}. "
        "Sparse patterns save time in such a call, not memory; in generation their cache is smaller."
        f"{f'{sure}to 1 %.' if found else ''}"
    )


def _roofline(bounded: dict[int, Advice]) -> str:
    """What arithmetic says of a device that is not here."""
    if not bounded:
        return "**How fast** it is cannot be computed, because its rates are not known. No such device was here."
    n = OVERVIEW[1] if OVERVIEW[1] in bounded else max(bounded)
    advice = bounded[n]
    bounds = {p.name: p.bound_s for p in advice.proposals}
    return (
        f"**{n:,} tokens, forward, computed: {_name(advice['pattern'])} takes at least {_seconds(bounds['advised'])}, "
        f"dense attention at least {_seconds(bounds.get('dense', bounds['advised']))}**. No such device was here."
    )


def _call(advice: Advice) -> str:
    dtype = SHORT[dtype_name(advice["dtype"])]
    return (
        f"**A call** is attention alone: one layer, batch {SHAPE['batch']}, {SHAPE['heads']} heads of "
        f"{SHAPE['head_dim']}, {dtype}, not causal; without projections, other layers and an optimizer. Training: "
        "forward and backward of it."
    )


def _there(study: Study, advice: Advice) -> str:
    """What a call runs as on the device that is not here, and how to measure it there."""
    gpu, dtype = study.profile, advice["dtype"]
    how = f"`make report GPU={gpu.name}` measures it on that machine."
    try:
        call = gpu.kind, gpu.capability, dtype, SHAPE["head_dim"]
        found = kernels.expected(*call)
        pattern = kernels.expected(*call, pattern_kind="ladder")
    except NotImplementedError as error:
        return f"**On {gpu.title}**: {error}. {how}"
    flash = (
        f"; `flash` is refused: {found.refusals['flash']}"
        if "flash" in found.refusals
        else ""
    )
    kind = SHORT[dtype_name(dtype)]
    runs = f"dense calls should run in {kind} by the kernel `{found.name}`{flash}"
    runs += f"; LongNet by `{pattern.name}` ({pattern.rule.way})"
    return f"**On {gpu.title}** {runs}. {how}"


def _trust(study: Study) -> str:
    """How far the times are from their rooflines, and for measured ones the line of
    every page.
    """
    rows = study.frame(suites.landscape_systems())
    rows = rows[(rows.group == suites.LANDSCAPE) & rows.timed & rows.bound_s.notna()]
    pair = rows[rows.variant.isin([suites.ADVISED, "Dense SDPA"])]
    both = [
        one.drop_duplicates("variant").sort_values("variant", ascending=False).row
        for _, one in pair.groupby("seq_len")
    ][-1:]
    above = sorted(
        r.median / roofline_s(r) for r in study.good if r.median and roofline_s(r)
    )
    over = "Too few of the times here have a roofline to set them beside"
    if both and len(both[0]) == 2:
        near, dense = (number(row.median / roofline_s(row), 2) for row in both[0])
        n = both[0].iloc[0].point.seq_len
        over = f"On {study.device} {suites.ADVISED} takes {near} times its roofline, the shortest time that the "
        over += f"hardware allows, and dense attention {dense} times, at {n:,} tokens"
    elif len(above) > 3:
        low, middle, high = (number(x, 2) for x in quantiles(above, n=4))
        over = f"The middle half of the calls on {study.device} take {low} to {high} times their roofline"
    if study.rehearsal:
        return f"**Trust**: computed times are lower bounds, and nothing was measured on this device. {over}."
    return f"{trust_line(study)} {over}."


def _name(pattern: Pattern) -> str:
    if isinstance(pattern, Dilated):
        return f"LongNet from {pattern.segment_lengths[0]:,}"
    return "dense attention" if isinstance(pattern, Dense) else str(pattern)


def _seconds(seconds: float) -> str:
    """A time as people say it.

    >>> _seconds(0.0925), _seconds(31), _seconds(2500), _seconds(10581)
    ('92.5 ms', '31.0 s', '41.7 min', '2.94 h')
    """
    units = (
        (1, 1e-3, "ms"),
        (300, 1, "s"),
        (7200, 60, "min"),
        (float("inf"), 3600, "h"),
    )
    return next(
        f"{number(seconds / unit)} {name}"
        for below, unit, name in units
        if seconds < below
    )


def _other(study: Study, advice: Advice, name: str) -> Cell | None:
    """The time of another pattern, unless it needs more memory than there is: at least
    q, k, v, out and lse.
    """
    found, c = next((p for p in advice.proposals if p.name == name), None), advice.call
    if found is None:
        return None
    row = (
        2 * (c.heads + c.kv_heads) * c.head_dim * c.dtype.itemsize
        + c.heads * accumulation_dtype(c.dtype).itemsize
    )
    least = found.peak_bytes or c.batch * advice.seq_len * row
    if advice.budget_bytes is not None and least > advice.budget_bytes:
        return Cell("does not fit", kind="bad")
    time = _time(study, advice, found)
    return Cell(time) if time else None


def _overview(study: Study, n: int, advised: dict) -> str:
    advice = advised[n, "fwd"]
    if isinstance(advice, str) or advice.fits is False:
        held = [
            f"{a.enough_ranks} devices hold it {word}"
            for passes, word in WORDS.items()
            if isinstance(a := advised[n, passes], Advice) and a.enough_ranks
        ]
        return "; ".join(["does not fit", *held])
    training, dense = advised[n, "fwd+bwd"], _other(study, advice, "dense")
    also = (
        "fits"
        if isinstance(training, Advice) and training.fits
        else "fits forward only"
    )
    beside = f"; dense {dense.text}" if dense else ""
    return f"{_advised(study, advice).text}, {'memory not known' if advice.fits is None else also}{beside}"


def _decisions(study: Study, advised: dict) -> Table:
    """For each length what to use, its time and memory, and what the alternatives take."""
    lines, sent = [], set()
    for n in LENGTHS:
        both = [advised[n, passes] for passes in WORDS]
        known = next((a for a in both if isinstance(a, Advice)), None)
        if known is None:
            lines.append([n, Cell("does not fit", both[0]), *[None] * 6])
            continue
        lines.append(
            [
                n,
                _name(known["pattern"]),
                percent(known.proposals[0].share, 2),
                percent(far_queries(known["pattern"], n, SHAPE["heads"]) / n),
                *(_advised(study, a) for a in both),
                _other(study, known, "local"),
                _other(study, known, "dense"),
            ]
        )
        sent.add(_sent(known))
    ends = " to ".join(map(size, sorted({min(sent), max(sent)}))) if sent else ""
    across = (
        f" Split over {RANKS} devices, a training call of these lengths sends {ends} in all."
        if sent
        else ""
    )
    measured = any(
        isinstance(cell, Cell) and cell.text[0].isdigit()
        for line in lines
        for cell in line[4:]
    )
    return Table(
        "What to use, by length",
        [
            ">Tokens",
            "Advised",
            ">Of all pairs",
            ">See half away",
            ">Forward",
            ">Training",
            ">Window, forward",
            ">Dense, forward",
        ],
        lines,
        note="Advised: LongNet's pattern with segments of 2,048 tokens that double up to the sequence. See half "
        "away: the queries that see a key at least half the sequence away, in some head. Window: about 2,048 "
        "neighbours and a global block, in blocks of 128 tokens; from half a million on in longer blocks, which show "
        f"more. ≥: a computed lower bound{'; other times are measured' if measured else ''}. Beside what is advised, "
        f"the computed peak of memory.{across} `.venv/bin/python -m ringlab advise --profile {study.profile.name} "
        "--seq-len N` answers for other lengths and shapes.",
        cards=True,
    )


def _sent(advice: Advice) -> int:
    """Bytes that ranks would send in a training call by the scheme that ``auto`` takes."""
    call = replace(
        advice.call, pattern=advice["pattern"], passes="fwd+bwd", ranks=RANKS
    )
    return sum(call.sent(*call.problem(advice.seq_len)).values())


def _time(study: Study, advice: Advice, proposed: Proposal) -> str:
    """The measured time of a proposal, else its roofline; nothing where no rate of the
    device is known.
    """
    c = advice.call
    wanted = {
        "seq_len": advice.seq_len,
        "passes": c.passes,
        "dtype": dtype_name(c.dtype),
        **SHAPE,
    }
    systems = ["ringlab", "dense_sdpa"]
    rows = (
        []
        if study.rehearsal
        else study.rows(system=systems, causal=False, world_size=1, **wanted)
    )
    own = [
        r
        for r in rows
        if pattern_of(r.point) == proposed.pattern and not r.point.options
    ]
    if row := best([r for r in own if r.median and not objection(r)]):
        return _seconds(row.median)
    return f"≥ {_seconds(proposed.bound_s)}" if proposed.bound_s else ""


def _advised(study: Study, advice: Advice | str) -> Cell:
    """The time and the memory of what is advised."""
    if isinstance(advice, str):
        return Cell("does not fit", kind="bad")
    if advice.fits is False:
        ranks = (
            f", {advice.enough_ranks} devices hold it" if advice.enough_ranks else ""
        )
        return Cell("does not fit", f"{size(advice.need_bytes)}{ranks}", kind="bad")
    return Cell(
        _time(study, advice, advice.proposals[0]) or "not known",
        size(advice.need_bytes),
    )


def rooflines(profile: Profile, advised: dict[int, Advice], end: int | None) -> Figure:
    """Rooflines of a call over length, by the advice for each; ``end``: the length at
    which the memory is full.

    Raises ValueError where no rate of the device is known.
    """
    points = [
        (n, p.bound_s, LINES[p.name][0])
        for n, advice in advised.items()
        for p in (advice.proposals if advice.fits is not False else ())
        if p.bound_s and p.name in LINES
    ]
    if not points:
        raise ValueError(
            f"no rate is known of {profile.title}, so there is no roofline"
        )
    call = (
        "training"
        if any(advice.call.passes != "fwd" for advice in advised.values())
        else "forward"
    )
    frame = pandas.DataFrame(points, columns=["seq_len", "y", "variant"])
    panel = {f"Computed: shortest possible time of a {call} call (s)": frame}
    limit = (end, "memory full") if end else None
    fig = figures.lines(
        panel, xlabel="Tokens", colors=dict(LINES.values()), limit=limit
    )
    full = f" {size(profile.memory_bytes)} are full at {end:,} tokens." if end else ""
    caption = f"Computed for {profile.title}: rooflines over length, lower bounds of the time.{full}"
    ends = "; ".join(
        f"{name} at least {_seconds(part.y.iloc[-1])} at {part.seq_len.iloc[-1]:,} tokens"
        for name, part in frame.groupby("variant", sort=False)
    )
    return Figure.of(fig, "first-screen-computed", caption, f"{caption} {ends}.")
