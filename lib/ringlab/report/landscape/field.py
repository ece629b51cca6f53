"""Who is on the landscape: what each system says that it computes, its rows, and whether it may be ranked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...measure import suites as suite
from ..session.rows import scaled
from ..study import Study, best, cost_of
from ..tables import Cell
from ..trust import objection, reason, status

RIGHT = "right"
UNRANKED = WRONG, REFUSED, UNMEASURED = "wrong", "refused", "not measured"


@dataclass(frozen=True)
class Entry:
    """One system: the name that readers see, the function that it states, and its points by system and pattern.

    ``pattern`` is a function of the length.
    """

    name: str
    states: str
    system: str
    pattern: Callable[[int], object]

    def rows(self, study: Study, group: str | None = None) -> list:
        """Its rows, the shortest first."""
        found = study.rows(system=self.system, **({"group": group} if group else {}))
        mine = [r for r in found if r.point.pattern == self.pattern(r.point.seq_len).to_dict()]
        return sorted(mine, key=lambda r: r.point.seq_len)

    def at(self, study: Study, seq_len: int):
        """Its timed forward row at a length, None where there is none."""
        return best([r for r in self.rows(study, suite.LANDSCAPE) if r.point.seq_len == seq_len])


def _always(pattern) -> Callable[[int], object]:
    return lambda seq_len: pattern


FIELD = (
    Entry("Dense SDPA", "every key", "dense_sdpa", _always(suite.Dense())),
    Entry("Sliding window", "the blocks around a query", "ringlab", _always(suite.LANDSCAPE_WINDOW)),
    Entry("BigBird", "neighbours, a global block and a random one", "ringlab", _always(suite.BIGBIRD)),
    Entry("Local and global", "neighbours and global blocks, as Longformer", "ringlab", _always(suite.LOCAL_GLOBAL)),
    Entry("LongNet from 256", "dilated segments, one softmax over all", "ringlab", suite.landscape_ladder),
    Entry("FlexAttention", "the blocks of local and global, by torch's compiled kernel", "flex",
          _always(suite.LOCAL_GLOBAL)),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """``word``, and the reason that a reader is given."""

    word: str
    why: str = ""

    @property
    def cell(self) -> Cell:
        kind = {RIGHT: "good", WRONG: "bad"}.get(self.word, "none")
        return Cell(self.word, kind=kind)


def verdict(study: Study, entry: Entry) -> Verdict:
    """Right where a forward row passed and none of its rows, forward or backward, is off; else what keeps it out."""
    rows = entry.rows(study)
    wrong = sorted((r for r in rows if status(r) == "incorrect"), key=lambda r: r.point.passes)  # forward first
    if wrong:
        where = "output" if wrong[0].point.passes == "fwd" else "output right, gradients wrong"
        return Verdict(WRONG, f"{where}: {reason(wrong[0])}")
    timed = entry.rows(study, suite.LANDSCAPE)
    if any(not objection(r) for r in timed):
        return Verdict(RIGHT)
    if not rows:
        return Verdict(UNMEASURED, "no row of it is here")
    return Verdict(REFUSED, reason((timed or rows)[0]))


def lengths(study: Study) -> list[int]:
    """The lengths that were timed."""
    return sorted({r.point.seq_len for r in study.rows(group=suite.LANDSCAPE) if not objection(r) and r.median})


def standing(study: Study, seq_len: int) -> list[tuple[int, Entry, object]]:
    """(rank, entry, row) of the right systems at a length, the fastest first.

    Systems that the run does not tell apart share a rank with the fastest among them.
    """
    found = [(e, e.at(study, seq_len)) for e in FIELD if verdict(study, e).word == RIGHT]
    found = [(e, r) for e, r in found if r is not None and not objection(r) and r.median]
    ranked: list[tuple[int, Entry, object]] = []
    head = None
    for place, (entry, row) in enumerate(sorted(found, key=lambda x: x[1].median), 1):
        if head is None or study.ratio(row, head[1]).significantly_slower:
            head = place, row
        ranked.append((head[0], entry, row))
    return ranked


def dense(study: Study, seq_len: int):
    """The row of dense attention at a length."""
    return FIELD[0].at(study, seq_len)


def density(point) -> float:
    """Visible (query, key) pairs over all pairs, over batch and heads."""
    return cost_of(point).distinct_pairs / (point.batch * point.heads * point.seq_len**2)


def per_pair(row) -> float | None:
    """Seconds for each visible pair of a query and a key."""
    return row.median / cost_of(row.point).distinct_pairs if row and not objection(row) and row.median else None


def pair_cost(study: Study, row):
    """Time for a visible pair over that in dense attention of the same length, a Ratio or None."""
    whole = dense(study, row.point.seq_len)
    ratio = study.ratio(row, whole) if whole is not None else None
    return scaled(ratio, cost_of(whole.point).distinct_pairs / cost_of(row.point).distinct_pairs) if ratio else None
