"""What the page of quality asks of its rows: frames of scores, means over seeds and
their noise, how far the layers of a pattern reach.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from ringlab.patterns import Pattern
from ringlab.report.tables import Cell, number
from scipy.stats import t

PATTERNS = [
    "Dense",
    "Window",
    "LongNet",
    "Local and global",
    "BigBird",
    "Hierarchical",
    "Adaptive",
    "MoBA",
    "NSA",
    "DSA",
    "Window, first layer dense",
    "Window, last layer dense",
    "LongNet and window",
]
MIXED = [name for name in PATTERNS if ", " in name or " and window" in name]
# Selected keys, and what readers set them beside.
BESIDE = ["MoBA", "NSA", "DSA", "Dense", "Window", "LongNet"]
ANSWERS = "Right answers of recall in 512 tokens (%)"
JUDGED = {  # task, score, seq, scale
    ANSWERS: ("recall", "accuracy", 512, 100),
    "Bits a byte of text in 4,096 tokens": ("text", "bits", 4096, 1),
}

# --------------------------------------------------------------------------------------
# rows as frames


def frames(rows: Sequence[dict]) -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
    """Rows of ``quality.jsonl`` as scores, answers and seconds.

    scores: one row for each time that a training was scored, ``number`` counts them;
    ``ended`` where a length of sequences ended. answers: the part of ``right`` ones for
    each range of distances, which ends at ``end``, of the last scores. seconds: of
    training for a token, by (task, pattern, seq).
    """
    scores, answers, seconds = [], [], {}
    for row in rows:
        if row["kind"] == "timed":
            each = statistics.median(row["seconds"]) / (row["seq"] * row["batch"])
            seconds[row["task"], row["pattern"], row["seq"]] = each
        elif row["status"] == "ok":
            about = {key: row["definition"][key] for key in ("task", "pattern", "seed")}
            for i, score in enumerate(row["scores"]):
                scores.append(about | {"number": i} | score)
            for end, (_, right, count) in row["scores"][-1]["by_distance"].items():
                part = {"end": int(end), "right": right, "count": count}
                answers.append(about | part)
    about = ["task", "pattern", "seed"]
    names = [*about, "number", "seq", "tokens", "ended", "bits", "accuracy"]
    return (
        pd.DataFrame(scores, columns=names),
        pd.DataFrame(answers, columns=[*about, "end", "right", "count"]),
        pd.Series(seconds, dtype=float),
    )


def by_seed(frame: pd.DataFrame, values: str) -> pd.DataFrame:
    """A column as pattern x seed, patterns in the order of ``PATTERNS``."""
    found = frame.pivot(index="pattern", columns="seed", values=values)
    return found.reindex([name for name in PATTERNS if name in found.index])


def right_answers(answers: pd.DataFrame, low: int, high: int) -> pd.DataFrame:
    """The part of right answers of one task whose distance is above ``low`` and at most
    ``high``, as pattern x seed.
    """
    some = answers[answers.end.between(low + 1, high)]
    some = some.assign(right=some.right * some["count"])
    sums = some.groupby(["pattern", "seed"])[["right", "count"]].sum().reset_index()
    return by_seed(sums.assign(part=sums.right / sums["count"]), "part")


# --------------------------------------------------------------------------------------
# means over seeds


def mean_and_half(values: Iterable[float]) -> tuple[float, float]:
    """The mean over seeds, and half of its 95 % interval by Student's t; nan for a
    single seed.
    """
    known = [float(x) for x in values if not math.isnan(x)]
    few, mean = len(known), statistics.fmean(known)
    if few == 1:
        return mean, math.nan
    half = t.isf(0.025, few - 1) * statistics.stdev(known) / math.sqrt(few)
    return mean, float(half)


def score_cell(table: pd.DataFrame, pattern: str, scale: float = 1.0) -> Cell | None:
    """The mean of a pattern over seeds with its interval; None where it was not
    trained.
    """
    if pattern not in table.index:
        return None
    mean, half = mean_and_half(table.loc[pattern])
    known = not math.isnan(half)
    return Cell(
        number(mean * scale), f"± {number(half * scale, 2)}" if known else "one seed"
    )


def learned(rows: Sequence[dict]) -> dict[str, list[Cell]]:
    """What each attention of ``BESIDE`` learned, as columns."""
    scores, *_ = frames(rows)
    found = {}
    for title, (task, score, seq, scale) in JUDGED.items():
        some = scores[
            (scores.task == task) & (scores.seq == seq) & scores.ended.eq(True)
        ]
        table = by_seed(some, score)
        cells = [score_cell(table, p, scale) for p in BESIDE]
        found[title] = [cell or Cell("not trained") for cell in cells]
    return found


def learned_line(rows: Sequence[dict]) -> str:
    """The same in a sentence."""
    said = [
        f"{title}: {', '.join(f'{p} {cell.plain}' for p, cell in zip(BESIDE, cells))}"
        for title, cells in learned(rows).items()
    ]
    return f"**Selected keys**. {'; '.join(said)}. ± is over seeds."


@dataclass
class Need:
    """What a task needs, as the end of a sentence that begins with "to", and the scores
    that judge it, as pattern x seed.
    """

    words: str
    scores: pd.DataFrame
    unit: str = "%"
    span: tuple[int, int] | None = None  # distances of what is looked up

    @property
    def scale(self) -> float:
        return 100.0 if self.unit == "%" else 1.0

    @property
    def not_beaten(self) -> list[str]:
        """The patterns that are not worse than the best one beyond noise, compared seed
        by seed, the best first; [] with a single seed.
        """
        losses = self.scores if self.unit != "%" else -self.scores
        means = losses.mean(axis=1).sort_values(kind="stable")
        found = []
        for pattern in means.index:
            behind = (losses.loc[pattern] - losses.loc[means.index[0]]).dropna()
            if len(behind):
                mean, half = mean_and_half(behind)
                found += [pattern] * (mean <= half)
        return found


def listed(patterns: Iterable[str]) -> str:
    """Names of patterns, in which commas separate patterns alone.

    >>> listed(["Dense", "Window, last layer dense"])
    'Dense, Window with last layer dense'
    """
    return ", ".join(name.replace(", ", " with ") for name in patterns)


# --------------------------------------------------------------------------------------
# patterns and figures


def connected(
    layers: Sequence, heads: int, n: int, ends: Sequence[int]
) -> dict[int, float] | None:
    """Of each range of distances, the part of (query, key) pairs that the layers
    together connect in ``n`` positions; None by content.

    A key counts as seen if it or its successor is, of which the embedding shows the
    token before.
    """
    reached, at = torch.eye(n, dtype=torch.bool), torch.arange(n)
    causal = at[:, None] >= at
    for layer in layers:
        if not isinstance(layer, Pattern):
            return None
        seen = torch.zeros(n, n, dtype=torch.bool)
        for head in range(heads):
            seen |= layer.multiplicity(at, at, n=n, head=head, heads=heads) > 0
        step = (seen & causal | torch.eye(n, dtype=torch.bool)).float()
        reached = (step @ reached.float()) > 0
    reached[:, :-1] |= reached[:, 1:]
    apart, found, before = at[:, None] - at, {}, 0
    for end in ends:
        some = (apart > before) & (apart <= end)
        found[end] = float(reached[some].float().mean())
        before = end
    return found


def means(frame: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The mean of ``y`` over seeds by ``pattern`` and ``x``, with its interval where
    there are several seeds, as ``figures.lines`` draws it.
    """
    found = []
    for (pattern, at), part in frame.groupby(["pattern", x], sort=False):
        mean, half = mean_and_half(part[y])
        found.append((pattern, at, mean, mean - half, mean + half))
    return pd.DataFrame(found, columns=["pattern", x, "y", "low", "high"])
