"""Ranks compare what they are about to do before the first exchange: a wrong one would complete, with garbage."""

from __future__ import annotations

import json
from collections import Counter

import torch

from .comm import AllToAll, Post, Steps, Wait
from .plan import RankPlan, digest, text_digest

BYTES = 24  # to each other rank where all agree: two digests and a verdict


class PlanMismatch(RuntimeError):
    """Ranks disagree about what is computed or which rows move; ``rank`` differs from the others, if one does."""

    def __init__(self, said: str, rank: int | None = None):
        super().__init__(said)
        self.rank = rank


def agree(plan: RankPlan, same: dict | None = None, device=None) -> Steps:
    """Compare, for every pair of ranks, digests of the problem and of the rows to be sent and expected.

    ``same``: what else must be equal on all ranks, by name. All ranks raise PlanMismatch together, so that none waits
    in vain; it says which field differs and on which rank.
    """
    p = plan.problem.layout.ranks
    fields = _fields(plan.problem) | {name: str(value) for name, value in (same or {}).items()}
    problem = text_digest(json.dumps(fields))
    mine = torch.tensor([[problem, digest(blocks)] for blocks in plan.send], device=device)  # (p, 2)
    theirs = yield from _to_all(mine)
    expected = [[problem, digest(blocks)] for blocks in plan.receive]
    wrong = [j for j, found in enumerate(theirs.tolist()) if found != expected[j]]
    verdicts = yield from _to_all(torch.tensor([wrong[0] if wrong else -1] * p, device=device))
    bad = [(receiver, sender) for receiver, sender in enumerate(verdicts.tolist()) if sender >= 0]
    if bad:
        texts = yield from _texts(json.dumps(fields), p, device)
        raise _mismatch([json.loads(text) for text in texts], bad)


def _fields(problem) -> dict[str, str]:
    return {
        "pattern": str(problem.pattern), "layout": str(problem.layout), "causal": str(problem.causal),
        "heads": f"{problem.heads} / {problem.kv_heads}",
    }  # fmt: skip


def _to_all(rows: torch.Tensor) -> Steps:
    """Row j of ``rows`` to rank j; what the ranks sent, by rank."""
    received, ones = torch.empty_like(rows), [1] * len(rows)
    yield Wait((yield Post(AllToAll(rows, ones, received, ones))))
    return received


def _texts(text: str, p: int, device) -> Steps:
    """A text of each rank; only ranks that disagree come here."""
    data = list(text.encode())
    lengths = yield from _to_all(torch.tensor([len(data)] * p, device=device))
    received = [int(length) for length in lengths]
    send, into = (torch.empty(n, dtype=torch.uint8, device=device) for n in (p * len(data), sum(received)))
    send.copy_(torch.tensor(data * p, dtype=torch.uint8))
    yield Wait((yield Post(AllToAll(send, [len(data)] * p, into, received))))
    return [bytes(part.tolist()).decode() for part in into.cpu().split(received)]


def _mismatch(fields: list[dict[str, str]], bad: list[tuple[int, int]]) -> PlanMismatch:
    """Who differs from whom: by a field that the ranks state, else by the rows that move between them."""
    for name in fields[0]:
        values = [each.get(name) for each in fields]
        (common, times), *others = Counter(values).most_common()
        if not others:
            continue
        odd = [rank for rank, value in enumerate(values) if value != common]
        if times == others[0][1]:  # as many say this as that
            said = ", ".join(f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values))
            return PlanMismatch(f"ranks disagree about what is computed: {name} is {said}")
        found = ", ".join(f"{values[rank]} on rank {rank}" for rank in odd)
        return PlanMismatch(
            f"ranks disagree about what is computed: {name} is {found}, {common} on the others",
            odd[0] if len(odd) == 1 else None,
        )
    pairs = ", ".join(f"rank {sender} against rank {receiver}" for receiver, sender in bad)
    (most, times), *others = Counter(rank for pair in bad for rank in pair).most_common()
    alone = most if not others or times > others[0][1] else None
    return PlanMismatch(f"ranks disagree about which rows move: {pairs}", alone)
