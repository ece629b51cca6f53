"""Verdicts on published claims: few words that mean the same everywhere.

reproduced                    our interval lies in the tolerance that was set beforehand
refuted                       it lies outside
undecided                     the rows are too few or too uncertain, and the reason says which
inconsistent as printed       the document's own numbers disagree
confounded                    the document changed several things at once
not testable on this profile  this hardware cannot decide it
"""

from __future__ import annotations

from dataclasses import dataclass

from .tables import number

WORDS = {
    "reproduced": "reproduced",
    "refuted": "refuted",
    "undecided": "untestable",
    "inconsistent as printed": "inconsistent",
    "confounded": "confounded",
    "not testable on this profile": "untestable",
}


@dataclass(frozen=True)
class Verdict:
    """A word of ``WORDS``, what we have measured, and why the one follows from the other."""

    word: str
    ours: str | None
    why: str

    @property
    def kind(self) -> str:
        return WORDS[self.word]


def untestable(why: str, ours: str | None = None) -> Verdict:
    """For what the hardware of this profile cannot decide, whatever is measured on it."""
    return Verdict("not testable on this profile", ours, why)


def undecided(why: str, ours: str | None = None) -> Verdict:
    """For what more rows, or steadier ones, would decide."""
    return Verdict("undecided", ours, why)


def said(ratio) -> str | None:
    return None if ratio is None else f"{number(ratio.value)}× ({number(ratio.low)} to {number(ratio.high)})"


def by_interval(ratio, low: float, high: float, what: str) -> Verdict:
    """Compare an interval, widened by what the same work differs by in its run, with a tolerance.

    Inside, outside, or too wide to say.
    """
    if ratio is None:
        return undecided(f"{what}: no pair of rows that passed")
    least, most = ratio.low / ratio.noise_floor, ratio.high * ratio.noise_floor
    if low <= least and most <= high:
        return Verdict("reproduced", said(ratio), f"{what} lies within {span(low, high)}")
    if most < low or least > high:
        return Verdict("refuted", said(ratio), f"{what} lies outside {span(low, high)}")
    edge = "crosses 1" if (low, high) == (1.0, float("inf")) else f"crosses the edge of {span(low, high)}"
    same = f", widened by the {number(ratio.noise_floor)}× that the same work differs by here,"
    its = f"its interval{same if ratio.noise_floor > 1 else ''}"
    return undecided(f"{what} is not known well enough: {its} {edge}", said(ratio))


def span(low: float, high: float) -> str:
    """A tolerance in words.

    >>> span(5.0, 10.0), span(1.0, float("inf"))
    ('5 to 10', 'above 1')
    """
    return f"above {low:g}" if high == float("inf") else f"{low:g} to {high:g}"
