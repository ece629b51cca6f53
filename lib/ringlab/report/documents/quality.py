"""Which attention learns: small models that differ in their attention alone, scored on
held-out sequences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from operator import itemgetter
from pathlib import Path

import torch

from ... import hardware
from ...adaptive import Adaptive
from ...block_patterns import BlockSparse
from ...kv_cache import cache_bytes
from ...measure import learning
from ...measure import quality as suite
from ...measure.tasks import TASKS, VALUES, distances
from .. import figures
from ..columns import Column, table
from ..compare import quantile
from ..places import data_folder
from ..tables import DASH, Cell, Table, Text, counted, number, size, some
from ..theme import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY

__all__ = [
    "answer",
    "choice",
    "frontier",
    "failures",
    "growing",
    "learning_figure",
    "limits",
    "open_quality",
    "provenance",
    "reach_table",
    "recall_figure",
]
COLORS = {
    "Dense": GREY,
    "Window": BLUE,
    "LongNet": PURPLE,
    "Local and global": GREEN,
    "BigBird": ORANGE,
    "Hierarchical": RED,
    "Adaptive": INK,
    "Window, first layer dense": SKY,
    "Window, last layer dense": BLUE,
    "LongNet and window": PURPLE,
}
MIXED = ("Window, first layer dense", "Window, last layer dense", "LongNet and window")
RECALLED = 0.5  # accuracy from which a distance counts as recalled
PATTERN = Column("Pattern", lambda pattern: pattern)
Score = Callable[[dict], float | None]  # a number of the held-out scores of a training
bits: Score = itemgetter("bits")
accuracy: Score = itemgetter("accuracy")


def within(low: int, high: int) -> Score:
    """The part of right answers whose distance is above ``low`` and at most ``high``."""

    def of(score: dict) -> float | None:
        found = [
            (right, count)
            for end, (_, right, count) in score["by_distance"].items()
            if low < int(end) <= high
        ]
        total = sum(count for _, count in found)
        return sum(right * count for right, count in found) / total if total else None

    return of


def listed(patterns: Iterable[str]) -> str:
    """Names of patterns, in which commas separate patterns alone.

    >>> listed(["Dense", "Window, last layer dense"])
    'Dense, Window with last layer dense'
    """
    return ", ".join(name.replace(", ", " with ") for name in patterns)


@dataclass(frozen=True)
class Mean:
    """The mean over seeds with its 95 % interval by Student's t; without one for a
    single seed.
    """

    value: float
    half: float | None

    @classmethod
    def of(cls, values: list[float]) -> Mean:
        few = len(values)
        half = (
            quantile(few - 1) * statistics.stdev(values) / math.sqrt(few)
            if few > 1
            else None
        )
        return cls(statistics.fmean(values), half)

    def percent(self) -> tuple[float, float | None, float | None]:
        """(value, low, high) of a part of 1, in percent."""
        if self.half is None:
            return 100 * self.value, None, None
        return (
            100 * self.value,
            100 * max(0, self.value - self.half),
            100 * min(1, self.value + self.half),
        )

    def cell(self, scale: float = 1.0) -> Cell:
        low = "" if self.half is None else f"± {number(self.half * scale, 2)}"
        return Cell(number(self.value * scale), low)


@dataclass
class Quality:
    """The rows of a profile: trainings and timed steps."""

    rows: list[dict]

    def trained(self, task: str, pattern: str) -> list[dict]:
        found = [r for r in self.rows if r["kind"] == "trained" and r["status"] == "ok"]
        mine = [
            r
            for r in found
            if (r["definition"]["task"], r["definition"]["pattern"]) == (task, pattern)
        ]
        return sorted(mine, key=lambda r: r["definition"]["seed"])

    def by_seed(
        self, task: str, pattern: str, of: Score, seq: int | None = None
    ) -> dict[int, float]:
        """Seed -> a number of the last held-out scores at ``seq`` tokens (default: the
        longest).
        """
        found = {}
        for row in self.trained(task, pattern):
            ended = [s for s in row["scores"] if s["ended"] and seq in (None, s["seq"])]
            if ended and (x := of(ended[-1])) is not None:
                found[row["definition"]["seed"]] = x
        return found

    def score(
        self, task: str, pattern: str, of: Score, seq: int | None = None
    ) -> Mean | None:
        """The mean over seeds."""
        found = self.by_seed(task, pattern, of, seq)
        return Mean.of([*found.values()]) if found else None

    def apart(
        self, task: str, one: str, other: str, of: Score, seq: int | None = None
    ) -> Mean | None:
        """The mean over seeds of the score of ``one`` minus that of ``other`` with the
        same seed.
        """
        first, second = (
            self.by_seed(task, pattern, of, seq) for pattern in (one, other)
        )
        both = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
        return Mean.of(both) if both else None

    def step(self, task: str, pattern: str, seq: int | None = None) -> float | None:
        """Seconds of training for a token in sequences of ``seq`` tokens (default: the
        longest).
        """
        seq = seq or self.length(task)
        for r in self.rows:
            if r["kind"] == "timed" and (r["task"], r["pattern"], r["seq"]) == (
                task,
                pattern,
                seq,
            ):
                return statistics.median(r["seconds"]) / (r["seq"] * r["batch"])
        return None

    @property
    def patterns(self) -> list[str]:
        there = {
            r["definition"]["pattern"] for r in self.rows if r["kind"] == "trained"
        }
        return [name for name in COLORS if name in there]

    @property
    def kind(self) -> str:
        return self.rows[0]["origin"]["device"]

    @property
    def sizes(self) -> learning.Sizes:
        return learning.SIZES[self.kind]

    def length(self, task: str) -> int:
        """Tokens of the longest sequences of a task."""
        return max(seq for seq, *_ in self.sizes.phases[task])

    def layers(self, task: str, pattern: str) -> list:
        """What each layer attends to in the longest sequences of a task."""
        return learning.Run(task, pattern, 0, self.sizes).layers(self.length(task))

    def recalled(self, task: str, pattern: str) -> dict[int, Mean]:
        """The end of each range of distances -> the right answers in it, as a part of
        1.
        """
        each = {end: within(low, end) for low, end in pairwise([0, *self.ends(task)])}
        return {
            end: right
            for end, of in each.items()
            if (right := self.score(task, pattern, of))
        }

    def farthest(self, pattern: str) -> int:
        """The longest distance up to which more than half of the answers of recall are
        right, else 0.
        """
        right = takewhile(
            lambda x: x[1].value >= RECALLED, self.recalled("recall", pattern).items()
        )
        return max((end for end, _ in right), default=0)

    def ends(self, task: str) -> list[int]:
        """The ends of the ranges of distances of the longest sequences."""
        rows = next(
            (rows for p in self.patterns if (rows := self.trained(task, p))), None
        )
        return (
            sorted(int(end) for end in rows[0]["scores"][-1]["by_distance"])
            if rows
            else []
        )

    def learned(self, pattern: str) -> list[tuple[float, float | None, float]]:
        """(tokens, seconds or None, bits a byte) of text at the end of each length,
        means over seeds.

        The scores between are of fewer held-out sequences, so that they cannot be set
        beside these.
        """
        rows, found, seconds = self.trained("text", pattern), [], 0.0
        ended = zip(*([s for s in r["scores"] if s["ended"]] for r in rows))
        for (seq, batch, steps), scores in zip(self.sizes.phases["text"], ended):
            each = self.step("text", pattern, seq)
            seconds = (
                None
                if None in (seconds, each)
                else seconds + seq * batch * steps * each
            )
            found.append(
                (scores[0]["tokens"], seconds, statistics.fmean(map(bits, scores)))
            )
        return found


def open_quality(profile: str = "auto", data: str = "") -> Quality:
    """The rows of a profile, or of a folder; FileNotFoundError as ``open_study``."""
    name = hardware.match(hardware.detect()) if profile == "auto" else profile
    return Quality(suite.read(Path(data) if data else data_folder(name)))


# --------------------------------------------------------------------------------------
# the finding


def answer(q: Quality) -> Text:
    """What recalls how far, what reads text best, what to use, how sure that is."""
    return Text([*lines(q), _trust(q)], kind="answer")


def lines(q: Quality) -> list[str]:
    """The findings, for the page and for the index."""
    return [line for line in (_use_line(q), _recall_line(q), _text_line(q)) if line]


def _use_line(q: Quality) -> str:
    """Of the patterns that none beats beyond noise, the one with the quickest step of
    training, for each need.
    """
    uses: dict[str, list[Need]] = {}
    for need in needs(q):
        steps = {p: t for p in not_beaten(q, need) if (t := q.step("text", p))}
        if steps:
            mine = uses.setdefault(min(steps, key=steps.get), [])
            if (
                need.span
                and mine
                and mine[-1].span
                and mine[-1].span[1] == need.span[0]
            ):  # one range of distances
                need = Need.of_recall(mine.pop().span[0], need.span[1])
            mine.append(need)
    if not uses:
        return ""
    said = "; ".join(
        f"{listed([pattern])} to {', to '.join(x.words for x in mine)}"
        for pattern, mine in uses.items()
    )
    widths = {task: _width(q.layers(task, "Window")[0]) for task in ("recall", "text")}
    return (
        f"**What small models learned**, of {q.sizes.layers} layers: use {said}. Where patterns tie for best, "
        f"the one that trains fastest is named. A layer's window shows at most {widths['recall']} tokens, "
        f"{widths['text']} for source code, and LongNet's first segment has "
        f"{q.layers('recall', 'LongNet')[0].segment_lengths[0]}: LongNet from 2,048 was not trained."
    )


def _width(window: BlockSparse) -> int:
    """The most keys that a query sees in a causal window."""
    return (window.parts[0].before + 1) * window.block_size


def _recall_line(q: Quality) -> str:
    by_reach: dict[int, list[str]] = {}
    for pattern in q.patterns:
        if q.trained("recall", pattern):
            by_reach.setdefault(q.farthest(pattern), []).append(pattern)
    if not by_reach:
        return ""
    (*far, last), said = sorted(by_reach.items(), reverse=True), []
    for end, names in (
        *far,
        (last[0], ["the others"] if far and len(last[1]) > 2 else last[1]),
    ):
        said.append(
            f"{listed(names)} {f'up to {end:,} tokens' if end else 'at no distance'}"
        )
    seeds = min(len(rows) for p in q.patterns if (rows := q.trained("recall", p)))
    sure = "" if seeds >= suite.SEEDS else f" ({seeds} of {suite.SEEDS} seeds so far)"
    return f"**Recall**{sure}: small models recall more than half of what stands back with {'; '.join(said)}."


def _text_line(q: Quality, seq: int = 4096) -> str:
    dense = q.score("text", "Dense", bits, seq)
    if dense is None:
        return ""
    said = f"**Text**: dense attention reaches {number(dense.value)} bits a byte at {seq:,} tokens"
    if dense.half is None:
        return f"{said}; one seed."
    found: dict[str, list[str]] = {"within noise of it": [], "worse": [], "better": []}
    for pattern in q.patterns:
        off = q.apart("text", pattern, "Dense", bits, seq)
        if pattern != "Dense" and off is not None:
            known = off.half is not None and abs(off.value) > off.half
            word = (
                "within noise of it"
                if not known
                else "worse"
                if off.value > 0
                else "better"
            )
            more = f" ({off.value:+.3f} ± {number(off.half, 2)})" if known else ""
            found[word].append(listed([pattern]) + more)
    said += "".join(
        f"; {word}: {', '.join(names)}" for word, names in found.items() if names
    )
    return f"{said}." + (
        " Why dense is behind: see below the figure of text." if found["better"] else ""
    )


def _trust(q: Quality) -> str:
    trained = [r for r in q.rows if r["kind"] == "trained"]
    seeds = counted(len({r["definition"]["seed"] for r in trained}), "seed")
    return (
        f"**Trust**: {len(trained)} of {len(suite.runs(q.sizes))} trainings, {seeds}; models of one seed begin with "
        "the same weights, read the same tokens and differ in attention alone. ± is a 95 % interval over seeds. Models "
        f"are tiny: {q.sizes.layers} layers of {q.sizes.dim}, trained for minutes; large ones may rank otherwise."
    )


# --------------------------------------------------------------------------------------
# what to use


@dataclass(frozen=True)
class Need:
    """What a task needs, as the end of a sentence that begins with "to", and the score
    that judges it.
    """

    words: str
    task: str
    of: Score
    seq: int | None = None  # default: the longest
    span: tuple[int, int] | None = None  # distances of what is looked up

    @classmethod
    def of_recall(cls, low: int, high: int) -> Need:
        words = f"look up what stands {f'{low + 1:,} to' if low else 'up to'} {high:,} tokens back"
        return cls(words, "recall", within(low, high), span=(low, high))

    @property
    def sign(self) -> int:
        """1 where more is better."""
        return -1 if TASKS[self.task].measure == "bits" else 1


def needs(q: Quality) -> list[Need]:
    """The needs that models here were trained for."""
    ends = q.ends("recall")
    edges = [0, *(ends[i] for i in (2, 4, -1))] if len(ends) > 5 else []
    found = [Need.of_recall(low, high) for low, high in pairwise(edges)]
    found += [
        Need(
            f"copy strings from anywhere in {q.length('copy'):,} tokens",
            "copy",
            accuracy,
        ),
        Need("work out nested lists", "lists", accuracy),
        Need("predict source code in 4,096 tokens", "text", bits, 4096),
    ]
    return [
        need
        for need in found
        if any(q.score(need.task, p, need.of, need.seq) for p in q.patterns)
    ]


def not_beaten(q: Quality, need: Need) -> list[str]:
    """The patterns that are not worse than the best one beyond noise, the best first;
    [] with a single seed.
    """
    means = {
        p: m for p in q.patterns if (m := q.score(need.task, p, need.of, need.seq))
    }
    order = sorted(means, key=lambda p: -need.sign * means[p].value)
    found = []
    for pattern in order:
        off = q.apart(need.task, pattern, order[0], need.of, need.seq)
        if (
            off is not None
            and off.half is not None
            and -need.sign * off.value <= off.half
        ):
            found.append(pattern)
    return found


def choice(q: Quality) -> Table | Text:
    """For each need the best pattern, those within noise of it, and which of them cost
    least.
    """
    found = [(need, some) for need in needs(q) if (some := not_beaten(q, need))]
    if not found:
        return Text(["One seed tells no difference from noise: train more seeds."])

    def best(x) -> Cell:
        need, (first, *_) = x
        scale, unit = (100, " %") if need.sign > 0 else (1, " bits a byte")
        cell = q.score(need.task, first, need.of, need.seq).cell(scale)
        return Cell(f"{first}: {cell.text}{unit}", cell.sub)

    def least(of: Callable[[str], float | None], show: Callable) -> Callable:
        def told(x) -> Cell | None:
            costs = {p: cost for p in x[1] if (cost := of(p)) is not None}
            return (
                Cell(first := min(costs, key=costs.get), show(costs[first]))
                if costs
                else None
            )

        return told

    short = [
        t * 1e6 for p in q.patterns if (t := q.step("recall", p))
    ]  # where patterns differ little
    ends = " to ".join(number(f(short), 2) for f in (min, max)) if short else ""
    return table(
        "By what a task needs",
        [
            Column("To …", lambda x: x[0].words),
            Column("Best", best),
            Column("Within noise of it", lambda x: listed(x[1][1:]) or DASH),
            Column(
                "Of these, fastest training",
                least(
                    lambda p: q.step("text", p),
                    lambda t: f"{number(t * 1e6)} µs a token",
                ),
            ),
            Column("Of these, smallest cache", least(lambda p: cached(q, p), size)),
        ],
        found,
        note=f"Look up and copy: right answers in sequences of {q.length('recall'):,} tokens. Time and cache: at "
        f"{q.length('text'):,} tokens. Within noise: compared seed by seed, the difference from the best is within "
        "its 95 % interval."
        + (
            f" At {q.length('recall'):,} tokens a step takes {ends} µs a token."
            if ends
            else ""
        ),
    )


# --------------------------------------------------------------------------------------
# recall over distance


def recall_figure(q: Quality) -> Text | None:
    """Accuracy over the distance at which the answer lies, for recall and copying."""
    each, told = {}, []
    for task in ("recall", "copy"):
        series, title = {}, TASKS[task].title
        for pattern in q.patterns:
            if points := [
                (end, *right.percent())
                for end, right in q.recalled(task, pattern).items()
            ]:
                series[pattern] = points
                told.append(
                    f"{title}, {pattern}: {number(points[-1][1], 2)} % at {points[-1][0]:,}"
                )
        if series:
            each[f"{title}: right answers (%)"] = series
    if not each:
        return Text(["No model was trained on recall or copying."])
    xlabel = "Distance of the answer (tokens)"
    fig = figures.lines(
        each, xlabel=xlabel, colors=COLORS, dashed=MIXED, linear=True, height=2.5
    )
    ends = q.ends("recall") or q.ends("copy")
    last = {p: x[-1][1] for p, x in next(iter(each.values())).items()}
    good = [p for p, right in last.items() if right >= 100 * RECALLED]
    rest = max((right for p, right in last.items() if p not in good), default=None)
    caption = f"Up to {ends[-1]:,} tokens back, over half of the answers are right with {listed(good) or 'none'}."
    caption += (
        "" if rest is None else f" With the other patterns {number(rest, 2)} % or less."
    )
    figures.show(
        fig, "quality-recall", caption, f"{caption} {'; '.join(told)}.", scores(q)
    )
    return None


def scores(q: Quality) -> Table:
    """Accuracy by pattern and range of distances."""
    ends, rows = (
        q.ends("recall"),
        {p: found for p in q.patterns if (found := q.recalled("recall", p))},
    )
    lines = [
        [p, *(found[end].cell(100) if end in found else None for end in ends)]
        for p, found in rows.items()
    ]
    names = [f">{low + 1:,} to {end:,} (%)" for low, end in pairwise([0, *ends])]
    return Table(
        "Data: associative recall by distance",
        ["Pattern", *names],
        lines,
        note=f"Guessing one of the {VALUES} values is right in {100 / VALUES:.2g} %.",
    )


@cache
def connected(device: str, task: str, pattern: str) -> dict[int, float] | None:
    """Of each range of distances, the part of (query, key) pairs that the layers
    together connect; None by content.

    A key counts as seen if it or its successor is, of which the embedding shows the
    token before.
    """
    sizes = learning.SIZES[device]
    run = learning.Run(task, pattern, 0, sizes)
    n = run.phases[-1][0]
    reached, at = torch.eye(n, dtype=torch.bool), torch.arange(n)
    causal = at[:, None] >= at
    for layer in run.layers(n):
        if isinstance(layer, Adaptive):
            return None
        seen = torch.zeros(n, n, dtype=torch.bool)
        for head in range(sizes.heads):
            seen |= layer.multiplicity(at, at, n=n, head=head, heads=sizes.heads) > 0
        step = (seen & causal | torch.eye(n, dtype=torch.bool)).float()
        reached = (step @ reached.float()) > 0
    reached[:, :-1] |= reached[:, 1:]
    apart, found, before = at[:, None] - at, {}, 0
    for end in distances(n, {"recall": 8, "copy": 16}[task]):
        mine = (apart > before) & (apart <= end)
        found[end] = float(reached[mine].float().mean())
        before = end
    return found


def reach_table(q: Quality) -> Table:
    """Which part of the pairs the layers connect, predicted from the pattern, beside
    what was recalled.
    """
    ends = q.ends("recall")

    def reach(p: str) -> Cell:
        found = connected(q.kind, "recall", p)
        if found is None:
            return Cell("chosen by content")
        whole, part = (
            max(
                takewhile(lambda end, least=least: found[end] > least, found), default=0
            )
            for least in (0.95, 0.01)
        )
        return Cell(f"{whole:,}", f"in part {part:,}" if part > whole else "")

    return table(
        "How far information can travel through all layers, and how far models recalled",
        [
            PATTERN,
            Column(
                "Each layer",
                lambda p: " and ".join(dict.fromkeys(map(str, q.layers("recall", p)))),
            ),
            Column(">Can connect up to", reach),
            Column(
                ">Over half right up to",
                lambda p: f"{x:,}" if (x := q.farthest(p)) else DASH,
            ),
        ],
        [p for p in q.patterns if q.trained("recall", p)],
        note=f"Sequences of {q.length('recall'):,} tokens. Can connect: the longest distance up to which "
        "at least 95 % of the pairs are connected, through any layers; in part: some of them. That is needed, and not "
        "enough: what passes through several layers is harder to learn. The longest range ends at "
        f"{ends[-1] if ends else 0:,}.",
    )


# --------------------------------------------------------------------------------------
# quality beside time


def learning_figure(q: Quality) -> Text | None:
    """Bits a byte of held-out text over the tokens and over the seconds of training."""
    found = {p: q.learned(p) for p in q.patterns if q.trained("text", p)}
    if not found:
        return Text(["No model was trained on text."])
    timed = all(s is not None for x in found.values() for _, s, _ in x)
    each = {
        p: [(s if timed else t, b, None, None) for t, s, b in x]
        for p, x in found.items()
    }
    each, xlabel = (
        {"Held-out bits a byte": each},
        f"{'Seconds' if timed else 'Tokens'} of training",
    )
    fig = figures.lines(
        each, xlabel=xlabel, colors=COLORS, dashed=MIXED, linear=True, height=2.5
    )
    last = {p: x[-1][2] for p, x in found.items()}
    low, high = min(last, key=last.get), max(last, key=last.get)
    caption = f"Text: the models end between {last[low]:.2f} ({low}) and {last[high]:.2f} ({high}) bits a byte."
    lines_ = [(p, t, s, b) for p, x in found.items() for t, s, b in x]
    data = table(
        "Data: held-out bits a byte over tokens and seconds",
        [
            Column("Pattern", lambda x: x[0]),
            Column(">Tokens", lambda x: x[1]),
            Column(">Seconds", lambda x: x[2] and number(x[2])),
            Column(">Bits a byte", lambda x: number(x[3])),
        ],
        lines_,
        note="At the end of each length. Seconds: tokens times the time of a step of training, measured apart.",
    )
    figures.show(fig, "quality-text", caption, caption, data)
    return None


def growing(q: Quality) -> Table | None:
    """Where dense is behind the window on text: how far, at the first and the last
    score of each length.
    """
    rows = [q.trained("text", p) for p in ("Dense", "Window")]
    pairs = [
        (a, b)
        for a in rows[0]
        for b in rows[1]
        if a["definition"]["seed"] == b["definition"]["seed"]
    ]
    apart: dict[int, list[float]] = {}  # means over seeds of each score, by length
    for scores in zip(*(zip(a["scores"], b["scores"]) for a, b in pairs)):
        off = statistics.fmean(bits(a) - bits(b) for a, b in scores)
        apart.setdefault(scores[0][0]["seq"], []).append(off)
    if not apart or [*apart.values()][-1][-1] <= 0:
        return None
    return Table(
        "Text: bits a byte of Dense above those of Window",
        [">Tokens", ">At the first score of this length", ">At the last"],
        [[n, f"{found[0]:+.3f}", f"{found[-1]:+.3f}"] for n, found in apart.items()],
        note="Dense falls behind where sequences grow, and then catches up. The probable cause: its queries meet "
        "distances (rotary positions) that it was never trained on, and a window shows none. A model that is trained "
        "long enough at its full length need not fall behind.",
    )


def cached(q: Quality, pattern: str) -> int | None:
    """Bytes of K and V of all layers at the longest text; None where no cache is there
    for the pattern.
    """
    layers, heads, longest = q.layers("text", pattern), q.sizes.heads, q.length("text")
    if any(isinstance(layer, Adaptive) for layer in layers):
        return None
    return sum(
        cache_bytes(x, max_seq_len=longest, heads=heads, head_dim=q.sizes.dim // heads)
        for x in layers
    )


def frontier(q: Quality) -> Table:
    """What each pattern reaches and what it costs."""
    longest = q.length("text")

    def right(header: str, task: str) -> Column:
        return Column(
            header, lambda p: (mean := q.score(task, p, accuracy)) and mean.cell(100)
        )

    def text(seq: int) -> Column:
        return Column(
            f">Bits a byte, {seq:,}",
            lambda p: (mean := q.score("text", p, bits, seq)) and mean.cell(),
        )

    def step(seq: int) -> Column:
        return Column(
            f">Step, {seq:,} (µs a token)",
            lambda p: (t := q.step("text", p, seq)) and number(t * 1e6),
        )

    return table(
        "Quality and cost",
        [
            PATTERN,
            right(">Recall (%)", "recall"),
            right(">Copying (%)", "copy"),
            right(">Lists (%)", "lists"),
            text(4096),
            text(longest),
            step(4096),
            step(longest),
            Column(
                ">Cache", lambda p: None if (x := cached(q, p)) is None else size(x)
            ),
        ],
        q.patterns,
        note="All models have the same parameters, tokens and steps. Recall, copying, lists: right answers over all "
        f"distances. Cache: K/V of all layers at {longest:,} tokens, where one is there for the pattern.",
    )


def limits(q: Quality) -> Text:
    """What such small models cannot tell."""
    return Text(
        [
            f"How models of a real size rank: these have {q.sizes.layers} layers of {q.sizes.dim} and saw few tokens.",
            "What an attention could learn if trained longer: a task that is not learned here may be learned later. "
            "What layers cannot connect (see the table above) is never learned.",
            f"Text at {q.length('text'):,} tokens: a few steps alone were trained at that length.",
            "Other sizes of windows and blocks: every sparse layer shows about 2.5 blocks of keys.",
        ],
        bullets=True,
    )


def failures(q: Quality) -> Table | None:
    """Trainings that did not end."""
    failed = [r for r in q.rows if r["kind"] == "trained" and r["status"] != "ok"]
    if not failed:
        return None
    named = [[r["definition"][x] for x in ("task", "pattern", "seed")] for r in failed]
    lines_ = [
        [*map(str, name), Cell(r["status"], kind="bad"), r["reason"]]
        for name, r in zip(named, failed)
    ]
    return Table(
        f"{len(failed)} trainings have no result",
        ["Task", "Pattern", "Seed", "Status", "Reason"],
        lines_,
        folded=True,
    )


def provenance(q: Quality) -> Table:
    """Where the rows come from."""
    origins = [r["origin"] for r in q.rows]
    names = {
        "commit": "Commit",
        "code": "Training (hash of its code)",
        "engine": "Engine (hash of its code)",
        "device_name": "Device",
        "threads": "Threads",
        "torch": "torch",
        "python": "Python",
        "machine": "Machine (salted id)",
    }
    found = [
        [title, ", ".join(sorted({str(o.get(key)) for o in origins}))]
        for key, title in names.items()
    ]
    times = sorted(o["utc"] for o in origins)
    texts = {f"{kind} {digest}" for o in origins for kind, digest in o["text"].items()}
    found += [
        ["Rows written (UTC)", f"{times[0]} to {times[-1]}"],
        ["Text (digests)", some(sorted(texts))],
        [
            "CPU time of all trainings",
            f"{sum(r.get('cpu_s', 0) for r in q.rows) / 60:.0f} min",
        ],
    ]
    note = f"The rows: [{suite.NAME}](data/{suite.NAME})."
    return Table(
        "Where these rows come from", ["What", "Value"], found, note=note, folded=True
    )
