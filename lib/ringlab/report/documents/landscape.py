"""The landscape: attention functions and packages on one page, each checked first,
ranked by time where it is right.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

from ...advise import PAPER, ladder
from ...measure import peers as packages
from ...measure import suites as suite
from ...measure.model_systems import STEPS
from .. import columns, figures
from ..columns import ROOFLINE, TIME, TOKENS, Column, table, times
from ..findings import failures, limits, provenance, reading
from ..rows import SHORT, pass_of
from ..study import Study, best, cost_of, pattern_of, together
from ..tables import Cell, Table, Text, interval, number, size
from ..theme import INK
from ..trust import objection, reason, status
from .optimization import answer_of, fits_line
from .session import DENSITY, density, pair_cost, percent

__all__ = [
    "answer",
    "documents",
    "failures",
    "generation",
    "limits",
    "peers",
    "provenance",
    "ranking",
    "reading",
    "time_figure",
    "training",
    "unranked",
]
COMPUTED = 131072  # tokens of the call that is computed where the device is absent
WORDS = RIGHT, WRONG, REFUSED, UNMEASURED = "right", "wrong", "refused", "not measured"
Verdict = namedtuple(
    "Verdict", "word why", defaults=("",)
)  # the reason is what a reader is given


# --------------------------------------------------------------------------------------
# the systems


@dataclass(frozen=True)
class Entry:
    """One system: the name that readers see, the function that it states, and its
    points by system and pattern.

    ``pattern`` is a function of the length.
    """

    name: str
    states: str
    system: str
    pattern: Callable[[int], object]
    color: str = INK

    def rows(self, study: Study, **wanted) -> list:
        """Its rows, the shortest first."""
        found = study.rows(system=self.system, **wanted)
        mine = [
            r
            for r in found
            if r.point.pattern == self.pattern(r.point.seq_len).to_dict()
        ]
        return sorted(mine, key=lambda r: r.point.seq_len)

    def timed(self, study: Study, **wanted) -> list:
        """Its timed rows on one device, not causal, by default of a forward call."""
        wanted = {
            "group": suite.LANDSCAPE,
            "passes": "fwd",
            "causal": False,
            "world_size": 1,
            **wanted,
        }
        return [r for r in self.rows(study, **wanted) if columns.timed(r)]

    def at(self, study: Study, seq_len: int, **wanted):
        """The fastest of them at a length, None where there is none."""
        return best(self.timed(study, seq_len=seq_len, **wanted))


def _always(pattern) -> Callable[[int], object]:
    return lambda seq_len: pattern


ADVISED = "LongNet from 2,048"  # what `advise` proposes
FIELD = (
    Entry(
        "Dense SDPA", "every key", "dense_sdpa", _always(suite.Dense()), figures.GREY
    ),
    Entry(
        "Dense, ours",
        "every key, by this library",
        "ringlab",
        _always(suite.Dense()),
        INK,
    ),
    Entry(
        "Sliding window",
        "the blocks around a query",
        "ringlab",
        _always(suite.LANDSCAPE_WINDOW),
        figures.BLUE,
    ),
    Entry(
        "BigBird",
        "neighbours, a global block and a random one",
        "ringlab",
        _always(suite.BIGBIRD),
        figures.ORANGE,
    ),
    Entry(
        "Local and global",
        "neighbours and global blocks, as Longformer",
        "ringlab",
        _always(suite.LOCAL_GLOBAL),
        figures.GREEN,
    ),
    Entry(
        "LongNet from 256",
        "dilated segments, one softmax over all",
        "ringlab",
        suite.landscape_ladder,
        figures.SKY,
    ),
    Entry(
        ADVISED,
        "dilated segments, one softmax over all",
        "ringlab",
        ladder,
        figures.PURPLE,
    ),
    Entry(
        "FlexAttention",
        "the blocks of local and global, by torch's compiled kernel",
        "flex",
        _always(suite.LOCAL_GLOBAL),
        figures.RED,
    ),
)
DENSE = FIELD[0]
TRAINING = {
    "group": suite.LANDSCAPE_TRAINING,
    "passes": "fwd+bwd",
}  # the same calls, forward and backward
COLORS = {e.name: e.color for e in FIELD}
SYSTEM = Column("System", lambda line: line["entry"].name)


def verdict(study: Study, entry: Entry) -> Verdict:
    """Right where a forward row passed and none of its rows, forward or backward, is
    off; else what keeps it out.
    """
    rows = entry.rows(study)
    wrong = sorted(
        (r for r in rows if status(r) == "incorrect"), key=lambda r: r.point.passes
    )  # forward first
    if wrong:
        where = (
            "output"
            if wrong[0].point.passes == "fwd"
            else "output right, gradients wrong"
        )
        return Verdict(WRONG, f"{where}: {reason(wrong[0])}")
    forward = entry.rows(study, group=suite.LANDSCAPE, passes="fwd")
    if any(not objection(r) for r in forward):
        return Verdict(RIGHT)
    if not rows:
        return Verdict(UNMEASURED, "no row of it is here")
    return Verdict(REFUSED, reason((forward or rows)[0]))


def lengths(study: Study) -> list[int]:
    """The lengths at which anything but dense attention was timed; where nothing was,
    those of dense attention.
    """
    return sorted(
        {r.point.seq_len for e in FIELD[1:] for r in e.timed(study)}
        or {r.point.seq_len for r in DENSE.timed(study)}
    )


def standing(study: Study, seq_len: int, **wanted) -> list[tuple[int, Entry, object]]:
    """(rank, entry, row) of the right systems at a length, the fastest first, by
    default of a forward call.

    Systems that the run does not tell apart share a rank with the fastest among them.
    """
    found = [
        (e, r)
        for e in FIELD
        if verdict(study, e).word == RIGHT and (r := e.at(study, seq_len, **wanted))
    ]
    ranked: list[tuple[int, Entry, object]] = []
    head = None
    for place, (entry, row) in enumerate(sorted(found, key=lambda x: x[1].median), 1):
        if head is None or study.ratio(row, head[1]).significantly_slower:
            head = place, row
        ranked.append((head[0], entry, row))
    return ranked


def ranked(study: Study) -> list[tuple[int, Entry, object]]:
    """The standing at the longest length at which any right system was timed."""
    return next(
        (found for n in reversed(lengths(study)) if (found := standing(study, n))), []
    )


def series(study: Study) -> dict[Entry, list]:
    """The forward rows of each right system, one a length, the shortest first."""
    found: dict[Entry, list] = {e: [] for e in FIELD}
    for n in lengths(study):
        for _, entry, row in standing(study, n):
            found[entry].append(row)
    return {entry: rows for entry, rows in found.items() if rows}


# --------------------------------------------------------------------------------------
# the page


def answer(study: Study) -> Text:
    """The fastest, what a pair costs, what is wrong or absent; trust, and what was not
    measured.
    """
    computed = (
        fits_line(study, suite.landscape_ladder(COMPUTED), COMPUTED)
        if study.rehearsal
        else ""
    )
    first = (
        fastest(study)
        or "**Fastest**: none, no system that passed its checks was timed."
    )
    return answer_of(
        study,
        computed,
        first,
        _pair_line(study),
        _wrong_line(study),
        _model_line(study),
    )


def fastest(study: Study) -> str:
    """The fastest at the longest length, with all that the run does not tell apart from
    it; empty where none is.
    """
    if not (found := ranked(study)):
        return ""
    first = [entry for rank, entry, _ in found if rank == found[0][0]]
    entry, row = found[0][1:]
    said = f"**{row.point.seq_len:,} tokens, forward, measured: {entry.name} takes {number(row.median * 1e3)} ms**"
    said += f" ({interval(*row.ci, 1e3, 2)})"
    dense = next((r for rank, e, r in found if e is DENSE and rank > found[0][0]), None)
    if ratio := study.ratio(dense, row):
        turns = "" if ratio.paired else ", not timed in turns with it"
        less = f"**{number(ratio.value, 2)} times as fast as torch's dense attention**"
        said += f", {less} ({number(dense.median * 1e3)} ms{turns})"
    tied = " and ".join(other.name for other in first[1:])
    said += (
        f". {tied} {'is' if len(first) == 2 else 'are'} within noise of it"
        if tied
        else ""
    )
    return f"{said}. {entry.name} computes {percent(density(row.point), 2)} of the query–key pairs."


def over_dense(study: Study, row):
    """What a visible pair costs over dense attention of the same length."""
    return pair_cost(study, row, DENSE.at(study, row.point.seq_len))


def _noise(ratio) -> str:
    return "" if columns.beyond(ratio) else "within noise"


def _pair_line(study: Study) -> str:
    """At the longest length at which dense attention was timed too."""
    for n in reversed(lengths(study)):
        if found := [
            (x, e)
            for _, e, r in standing(study, n)
            if e is not DENSE and (x := over_dense(study, r))
        ]:
            ends = dict.fromkeys(f(found, key=lambda x: x[0].value) for f in (min, max))
            said = " to ".join(
                f"**{number(x.value)}×** ({'; '.join(filter(None, (e.name, _noise(x))))})"
                for x, e in ends
            )
            return f"**A visible pair** costs {said} what it costs in dense SDPA, at {n:,} tokens."
    return "**A visible pair**: not compared with dense SDPA, which was not timed beside a sparse function."


def _wrong_line(study: Study) -> str:
    words = {e.name: verdict(study, e).word for e in FIELD}
    named = {word: [name for name, x in words.items() if x == word] for word in WORDS}
    said = "; ".join(
        f"{word}: {', '.join(names)}"
        for word, names in named.items()
        if names and word != RIGHT
    )
    right, here = len(named[RIGHT]), len(named[RIGHT] + named[WRONG])
    return f"**Right**: {right} of the {here} systems that can be ranked{f'. Not ranked: {said}' if said else ''}."


def _model_line(study: Study) -> str:
    """A step of generation and packed documents, at the longest position and for the
    dearest pattern.
    """
    if not (steps := _steps(study)):
        return ""
    n = steps[-1].point.seq_len
    said = [
        f"{kind(r)} {number(r.median * 1e3 / STEPS)} ms{' (unstable)' * r.unstable} and "
        f"{size(r.memory['cache_bytes'])}"
        for r in steps
        if r.point.seq_len == n
    ]
    found = [
        x
        for line in _packed(study)
        if (x := study.ratio(line["uneven"], line["equal"]))
    ]
    dear = max(found, key=lambda x: x.value, default=None)
    more = (
        f" Documents of different length take at most {times(dear).plain} the time of equal ones."
        if dear
        else ""
    )
    where = f"a step of generation at position {n + STEPS:,}"
    return f"**In models**: {where} takes, with its cache, {'; '.join(said)}.{more}"


def ranking(study: Study) -> Table:
    """The right systems at the longest length, the fastest first."""
    found = ranked(study)
    p = found[0][2].point if found else None
    shape = (
        f", {p.seq_len:,} tokens, {p.heads} heads of {p.head_dim}, {SHORT[p.dtype]}, forward"
        if p
        else ""
    )

    def over(line) -> Cell | None:
        cost = over_dense(study, line["row"])
        return cost and Cell(
            times(cost).text, "" if line["entry"] is DENSE else _noise(cost)
        )

    overlaps = [
        f"{e.name} shows {percent(more, 2)} more, counting those of several branches each time"
        for _, e, r in found
        if (more := (x := cost_of(r.point)).pairs / x.distinct_pairs - 1)
    ]
    more = f": {'; '.join(overlaps)}" if overlaps else ""
    return table(
        f"Ranked by time{shape}",
        [
            SYSTEM,
            Column(">Rank", lambda x: x["rank"]),
            TIME.of("row"),
            ROOFLINE.of("row"),
            DENSITY.of("row"),
            Column(">Cost of a pair, dense = 1", over),
            Column(
                "A query sees",
                lambda x: Cell(x["entry"].states, str(pattern_of(x["row"].point))),
            ),
        ],
        [{"rank": rank, "entry": e, "row": r} for rank, e, r in found],
        marked=[i for i, (rank, *_) in enumerate(found) if rank == 1],
        note="The ranking is by speed: the variants compute different things and are not interchangeable. Rows share a "
        f"rank where their difference is within noise. Each visible pair is counted once{more}.",
        cards=True,
    )


def training(study: Study) -> Table:
    """Forward and backward of the right systems by length, the fastest first, beside
    dense attention.
    """
    found = [
        (e, r)
        for e in FIELD
        if verdict(study, e).word == RIGHT
        for r in e.timed(study, **TRAINING)
    ]
    dense = {r.point.seq_len: r for e, r in found if e is DENSE}
    found.sort(key=lambda x: (x[1].point.seq_len, x[1].median))
    return table(
        "Training: forward and backward of one call",
        [
            SYSTEM,
            TOKENS.of("row"),
            TIME.of("row"),
            ROOFLINE.of("row"),
            columns.ratio(study, "dense", "row", ">Faster than dense"),
            columns.PEAK.of("row"),
        ],
        [
            {
                "entry": e,
                "row": r,
                "dense": None if e is DENSE else dense.get(r.point.seq_len),
            }
            for e, r in found
        ],
        note="With a random gradient of the output. Every gradient passed its check. Peak memory counts q, k, v, the "
        "output and their gradients.",
        folded=True,
    )


def unranked(study: Study) -> Table | Text:
    """The systems without a rank: wrong, refused, with the reason of each."""
    checked = (
        "Checked against the float64 reference of its own function: the output at every length, gradients at the "
        "shortest."
    )
    found = [(e, v) for e in FIELD if (v := verdict(study, e)).word != RIGHT]
    if not found:
        return Text([f"Every system of this ranking is right. {checked}"])
    return Table(
        "Without a rank",
        ["System", "Verdict", "Why"],
        [
            [e.name, Cell(v.word, kind="bad" if v.word == WRONG else "none"), v.why]
            for e, v in found
        ],
        note=checked
        + " Wrong: one of these is off by more than is allowed."
        * any(v.word == WRONG for _, v in found),
    )


def draw(study: Study, ylabel: str) -> tuple | None:
    """(figure of time over length of the right systems, where its lines end); None
    where nothing was timed.
    """
    points = {
        e.name: [(r.point.seq_len, *(x * 1e3 for x in (r.median, *r.ci))) for r in rows]
        for e, rows in series(study).items()
    }
    if not points:
        return None
    fig = figures.lines({ylabel: points}, xlabel="Tokens", colors=COLORS)
    return fig, "; ".join(
        f"{x} {number(p[-1][1])} ms at {p[-1][0]:,} tokens" for x, p in points.items()
    )


def time_figure(study: Study) -> None:
    """Time over length of the right systems; its data has what every length says beside
    dense attention.
    """
    if (drawn := draw(study, "Time (ms)")) is None:
        return
    fig, ends = drawn
    lines = [
        {
            "entry": e,
            "row": r,
            "dense": None if e is DENSE else DENSE.at(study, r.point.seq_len),
        }
        for e, rows in series(study).items()
        for r in rows
    ]
    data = table(
        "Data: time over length",
        [
            SYSTEM,
            TOKENS.of("row"),
            TIME.of("row"),
            ROOFLINE.of("row"),
            columns.ratio(study, "dense", "row", ">Faster than dense"),
            Column(
                ">Cost of a pair, dense = 1",
                lambda x: times(pair_cost(study, x["row"], x["dense"])),
            ),
        ],
        lines,
    )
    over = [
        (x, line)
        for line in lines
        if columns.beyond(x := study.ratio(line["dense"], line["row"])) > 0
    ]
    most, line = max(over, key=lambda x: x[0].value, default=(None, None))
    caption = "Time over length of the systems that passed their checks; both axes are logarithmic."
    if most:
        n = line["row"].point.seq_len
        tied = [
            e.name
            for _, e, r in standing(study, n)
            if r is not line["row"]
            and (x := study.ratio(r, line["row"]))
            and not columns.beyond(x)
        ]
        less = f" (with {' and '.join(tied)} within noise of it)" if tied else ""
        where = f"{line['entry'].name}{less} at {n:,} tokens"
        caption = f"Up to {number(most.value, 2)} times as fast as torch's dense attention: {where}."
        caption += " Both axes are logarithmic."
    figures.show(
        fig, "landscape-time", caption, f"{caption} {ends}.", data, stamp=study.stamp
    )


# --------------------------------------------------------------------------------------
# in models: steps of generation, packed documents

KINDS = {
    "dense": "Dense",
    "block_sparse": "Sliding window",
    "dilated": "LongNet from 256",
}


def kind(row) -> str:
    """What a reader calls the pattern of a row."""
    pattern = row.point.pattern
    return (
        ADVISED
        if pattern.get("segment_lengths", [0])[0] == PAPER
        else KINDS[pattern["kind"]]
    )


def _steps(study: Study) -> list:
    """The timed steps of generation, the shortest position first."""
    return sorted(
        filter(columns.timed, study.rows(system=suite.GENERATION)),
        key=lambda r: r.point.seq_len,
    )


def generation(study: Study) -> Text | None:
    """Tokens per second and bytes of the cache over the position, of one layer."""
    if not (rows := _steps(study)):
        return Text(["No step of generation was measured."])
    speed: dict[str, list[tuple]] = {}
    held: dict[str, list[tuple]] = {}
    for r in rows:
        name, n, (slow, quick) = (
            kind(r),
            r.point.seq_len + STEPS,
            (r.ci or (None, None))[::-1],
        )
        speed.setdefault(name, []).append(
            (n, *(t and STEPS / t for t in (r.median, slow, quick)))
        )
        held.setdefault(name, []).append(
            (n, r.memory["cache_bytes"] / 2**20, None, None)
        )
    panels = {"Tokens per second, one layer": speed, "Cache (MiB)": held}
    fig = figures.lines(
        panels, xlabel="Position", colors=COLORS | {"Dense": DENSE.color}, height=2.5
    )
    data = table(
        "Data: a step of generation",
        [
            Column("Pattern", kind),
            Column(">Position", lambda r: r.point.seq_len + STEPS),
            Column(">A step (ms)", lambda r: columns.time(r, 1e3 / STEPS)),
            Column(
                ">Roofline (ms)",
                lambda r: r.bound_seconds and number(r.bound_seconds * 1e3 / STEPS),
            ),
            Column(">Cache", lambda r: size(r.memory["cache_bytes"])),
            Column(">Error", columns.error),
        ],
        rows,
        note="The roofline reads each visible row of k and v once, at the rate that the run's probe reached.",
    )
    most = max(n for n, *_ in speed.get("Dense") or speed[next(iter(speed))])
    said = "; ".join(
        f"{name} {number(x[1])} tokens per second, {number(y[1])} MiB"
        for name, rates in speed.items()
        for x, y in zip(rates, held[name])
        if x[0] == most
    )
    heads = f"{rows[0].point.heads} heads of {rows[0].point.head_dim}"
    caption = f"One layer of {heads} at position {most:,}: {said}. A window and LongNet keep live rows alone."
    figures.show(fig, "landscape-generation", caption, caption, data, stamp=study.stamp)
    return None


def _packed(study: Study) -> list[dict]:
    """For each pattern of packed documents the row of different lengths and that of
    equal ones, by name.
    """
    rows = study.rows(system="packed")
    found = {
        (r.option("documents"), str(pattern_of(r.point)), r.option("equal", False)): r
        for r in rows
    }
    return [
        {"uneven": r, "equal": found.get((*key, True))}
        for (*key, equal), r in found.items()
        if not equal
    ]


def documents(study: Study) -> Table | Text:
    """Packed documents of different length beside equal ones with as many pairs, in
    turns.
    """
    if not (lines := _packed(study)):
        return Text(["No packed documents were measured."])
    count, tokens = (
        f"{x:,}"
        for x in (
            lines[0]["uneven"].option("documents"),
            lines[0]["uneven"].point.seq_len,
        )
    )
    return table(
        "Packed documents: different lengths beside equal ones",
        [
            Column("Pattern", kind).of("uneven"),
            TIME.of("uneven", ">Different (ms)"),
            TIME.of("equal", ">Equal (ms)"),
            columns.ratio(study, "uneven", "equal", ">Different over equal"),
        ],
        lines,
        note=f"Causal, forward. {count} documents of 64 to 4,096 tokens, {tokens} in all; the equal ones have "
        "as many tokens and pairs.",
        folded=True,
    )


# --------------------------------------------------------------------------------------
# packages of others beside this library: each is checked on the function that it documents, and timed where right

SOURCES = {  # what a package's own code does where that explains a failed check
    "dilated_attention_pytorch": "divides each output by the sum of the outputs over positions, which may be near zero "
    "or negative, and gives groups of unequal size the wrong heads",
    "torchscale_dilated": "takes no gradient of the weights by which it mixes the branches",
}


def peers(study: Study) -> Table | Text:
    """Each package on its own function: correct or its error, and its time over this
    library's, which took turns.
    """
    rows = [
        r
        for name in packages.PEERS
        for r in study.rows(system=name)
        if r.option("version")
    ]
    if not rows:
        names = ", ".join(p.package for p in packages.PEERS.values())
        return Text(
            [
                f"No other package was measured: `make report PEERS=1` installs and measures {names}."
            ]
        )
    here = {r.point.system: packages.PEERS[r.point.system] for r in rows}
    kernels = [
        f"{p.kernel} in {p.package}"
        for p in here.values()
        if p.kernel and study.device_type == "cpu"
    ]
    wrong = {r.point.system for r in rows if status(r) == "incorrect"}
    why = [
        f"{here[name].package} {source}"
        for name, source in SOURCES.items()
        if name in wrong
    ]
    absent = [
        f"{p.package} ({p.how})"
        for name, p in packages.PEERS.items()
        if name not in here
    ]
    return table(
        "Beside the packages of others, on the same function",
        [
            Column(
                "Package",
                lambda x: Cell(
                    here[x["row"].point.system].package, x["row"].option("version")
                ),
            ),
            Column("Pattern", lambda x: str(pattern_of(x["row"].point))),
            TOKENS.of("row"),
            Column("Pass", lambda x: pass_of(x["row"].point)),
            Column("Check", _checked).of("row"),
            columns.ratio(study, "row", "ours", ">Its time over ours"),
            TIME.of("row"),
            TIME.of("ours", ">Ours (ms)"),
        ],
        [{"row": r, "ours": _ours(study, r)} for r in rows],
        note="Ours: `ringlab.attention` on the same tensors, in turns. Check: the largest error against the float64 "
        "reference, of gradients too where a pass has them; what is wrong, or causal, is not timed."
        + (f" By their source code, {'; '.join(why)}." if why else "")
        + (
            f" On a CPU torch's own kernel stands in for {' and '.join(kernels)}."
            if kernels
            else ""
        )
        + (f" Absent: {'; '.join(absent)}." if absent else ""),
    )


def _ours(study: Study, row):
    """This library on the same function, in turns with the row."""
    mine = row.point.but(system="ringlab", options={})
    found = [
        r
        for r in study.rows(system="ringlab", group=row.group)
        if r.point == mine and together(r, row)
    ]
    return best(found)


def _checked(row) -> Cell:
    """The error if it is within its tolerance, how a row fails its check, or why there
    is none.
    """
    if not objection(row):
        return Cell("correct", f"{max(row.errors.values()):.1e}", kind="good")
    return Cell(
        status(row), reason(row), kind="bad" if status(row) == "incorrect" else "none"
    )
