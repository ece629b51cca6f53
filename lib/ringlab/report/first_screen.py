"""The first screen of a profile: which attention, how long a sequence, how fast, how
sure; each a number and a few words, then a picture and a table of what to use.

What to use, its time and memory come from ``advise`` with the rows of the profile, so
that the page says what the command says. Facts are data; the templates of the index
have the sentences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pandas import DataFrame

from ..advise import (
    AT_LEAST,
    SECONDS,
    WHOLE,
    WINDOW,
    Advice,
    Option,
    advise,
    dtype_name,
    keys_of,
    local,
)
from ..cost import format_seconds
from ..estimate import longest
from ..measure import suites
from ..measure.validity import threads
from ..patterns import Dense
from .evidence import evidence
from .figures import Figure, lines, palette
from .findings import facts
from .rows import SHORT
from .study import Study, with_rates
from .tables import Cell, Table, number, size

LENGTHS = (8192, 32768, 131072, 524288, 1048576)
MILLION = 2**20
# The groups of points that this screen is made from, which are measured first: the times
# in its table; longer dense calls and the noise floor.
GROUPS = (suites.LANDSCAPE_ADVISED, suites.LANDSCAPE)
VERSION = 2  # of the facts that a manifest keeps: an index shows no others
FAST = 131072  # tokens of the answer to how fast
SHAPE = {"batch": 1, "heads": 8, "head_dim": 64}  # of a call, as in the landscape
# What a reader calls an option, by its need; a window has its color of all pages.
NAMES = {"exact": "Dense", "local": f"Window of {WINDOW:,}"}
ADVISED = "As advised"
LIMIT = f"{format_seconds(SECONDS)}, the limit"


@dataclass(frozen=True)
class FirstScreen:
    """What the index shows of a profile: ``facts`` for its four answers, the
    ``figure`` of the time of a layer, the ``table`` of what to use by length.
    """

    title: str
    facts: dict
    figure: Figure | None  # where rates are known
    table: Table

    def stored(self) -> dict:
        """What the manifest keeps, for the index; images are files in ``figures/``."""
        return {
            "version": VERSION,
            "title": self.title,
            "facts": self.facts,
            "figure": self.figure
            and {x: getattr(self.figure, x) for x in ("name", "caption", "alt")},
            "html": self.table.html,
            "markdown": self.table.markdown,
        }


def first_screen(study: Study, trained: Mapping[str, str]) -> FirstScreen:
    """Return the first screen of a profile, with what small models learned. It takes
    several seconds, to estimate memory.
    """
    ask = partial(
        advise,
        with_rates(study),
        memory_bytes=study.memory_bytes,
        rows=evidence(study),
        trained=trained,
        **SHAPE,
    )
    advised = {
        n: tuple(_try(ask, n, passes) for passes in ("fwd", "fwd+bwd")) for n in LENGTHS
    }
    known = next(a for pair in advised.values() for a in pair if isinstance(a, Advice))
    return FirstScreen(
        _title(study),
        _answers(study, advised, known),
        _figure([forward for forward, _ in advised.values() if forward]),
        _decisions(advised, study.profile.name, trained.get("far", "")),
    )


def _figure(advised: Sequence[Advice]) -> Figure | None:
    """Draw the time of a layer over the lengths that fit: dense attention, windows
    alone, and what is advised; None where no rate is known.
    """
    known = [a for a in advised if a.fits is not False and a.advised.seconds]
    if not known:
        return None
    seconds = {
        (NAMES[x.need], a.seq_len): x.seconds
        for a in known
        for x in a.options
        if x.need in NAMES
    }
    seconds |= {(ADVISED, a.seq_len): a.advised.seconds for a in known}
    seconds |= {(LIMIT, a.seq_len): SECONDS for a in known}
    # The shortest length at which not all layers are dense: the surest number.
    at = next((a for a in known if a.advised.share < 1), known[-1])
    dense = at.options[0]
    less = f", {number(dense.seconds / at.advised.seconds, 2)} times less"
    if at.advised.time == AT_LEAST:
        less = ": two lower bounds"
    caption = (
        f"At {at.seq_len:,} tokens a layer takes {dense.takes} dense and {at.advised.takes} as advised{less}. "
        "The price: in three layers of four a token sees only the "
        f"{keys_of(at.seq_len):,} around it. Both axes are logarithmic."
    )
    rows = [(*key, y) for key, y in seconds.items()]
    fig = lines(
        {
            "Forward call of a layer (s)": DataFrame(
                rows, columns=["variant", "seq_len", "y"]
            )
        },
        xlabel="Tokens",
        colors=palette([*NAMES.values(), ADVISED, LIMIT]),
        dashed=[LIMIT],
        height=2.6,
    )
    return Figure.of(fig, "advised", caption, caption)


def _title(study: Study) -> str:
    if study.computed:
        return f"{study.profile.title}, computed"
    counts = {threads(row) for row in study.good if row.point.world_size == 1} - {None}
    on_cpu = counts and study.device_type == "cpu"
    return f"{study.device}, {max(counts)} threads" if on_cpu else study.device


def _try(ask, n: int, passes: str) -> Advice | None:
    """The advice for a length; None where not even q, k and v fit."""
    try:
        return ask(n, passes=passes)
    except ValueError:
        return None


def _answers(study: Study, advised: Mapping, known: Advice) -> dict:
    """The numbers of the four answers."""
    dtype = known["dtype"]
    call = {"dtype": dtype, "profile": study.profile, **SHAPE}
    held = study.memory_bytes and {
        passes: min(
            longest(pattern, study.memory_bytes, passes=passes, **call)
            for pattern in (Dense(), local(MILLION))
        )
        for passes in ("fwd", "fwd+bwd")
    }
    advice = advised.get(FAST, [None])[0] or known
    takes = {each.need: each.takes for each in advice.options}
    same_call = known.call.shape, "fwd"
    calls = [e.call for e in evidence(study)]
    lengths = [x.seq_len for x in calls if (x.shape, x.passes) == same_call]
    return facts(study) | {
        "window": WINDOW,
        "dense_until": known.dense_until,
        "ends": known.ends,
        "memory": study.memory_bytes and size(study.memory_bytes),
        "longest": held,
        "seq_len": advice.seq_len,
        "takes": takes,
        "advised": advice.advised.takes,
        "measured_to": max(lengths, default=0),
        "dtype": SHORT[dtype_name(dtype)],
        "kernel": advice["kernel"],
        "computed": study.computed,
        "profile": study.profile.name,
    }


def _option(advice: Advice, need: str) -> Option | None:
    return next((each for each in advice.options if each.need == need), None)


def _takes(advice: Advice | None, need: str = "") -> Cell | None:
    """The time of what is advised, or of the option for a need."""
    if advice is None:
        return Cell("does not fit", kind="bad")
    option = _option(advice, need) if need else advice.advised
    if option is None:
        return None
    budget = advice.budget_bytes
    if budget is not None and (option.peak_bytes or 0) > budget:
        return Cell("does not fit", kind="bad")
    return Cell(option.takes)


def _decisions(advised: Mapping, profile: str, trained: str) -> Table:
    """For each length what to use, its time and memory, and what the others take."""
    lines = []
    for n, (forward, training) in advised.items():
        known = forward or training
        need = known.advised.need if known else ""
        trained_with = training and _option(training, need)
        held = trained_with and trained_with.peak_bytes
        lines.append(
            [
                n,
                known.advised.name if known else Cell("does not fit", kind="bad"),
                _takes(forward),
                _takes(training, need),
                size(held) if held else None,
                _takes(forward, "exact"),
                _takes(forward, "local"),
            ]
        )
    return Table(
        "What to use, by length",
        [
            ">Tokens",
            "Use",
            ">Forward",
            ">Training",
            ">Memory, training",
            ">Dense, forward",
            ">Windows, forward",
        ],
        lines,
        note="A call of one layer, 8 heads of 64, not causal; of mixed layers the average. Without a sign: measured. "
        "About: scaled from a measured call of another length. ≥: a computed lower bound. "
        f"{WHOLE} {keys_of(LENGTHS[0]):,} keys, at {LENGTHS[-1]:,} tokens {keys_of(LENGTHS[-1]):,}. "
        f"{f'One layer in 4 dense: {trained}. ' if trained else ''}Other lengths, shapes and needs: "
        f"`.venv/bin/python -m ringlab advise --profile {profile} --seq-len N`.",
        cards=True,
    )
