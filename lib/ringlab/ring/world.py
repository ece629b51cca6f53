"""The ranks that share a sequence, whether each is a process of a group or all are simulated in this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import agree
from .comm import Steps, drive, simulate
from .plan import Problem, RankPlan
from .ranks import process_group
from .simulated import Simulated

_agreed: WeakKeyDictionary = WeakKeyDictionary()  # process group -> what its ranks were found to share


@dataclass(frozen=True)
class World:
    """The ranks of a sequence; ``here`` are those of this process: one of a ``group``, or all, simulated (None).

    Tensors hold the rows of the ranks here, one behind the other.
    """

    ranks: int
    here: range
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, group) -> World | None:
        """None where there is one rank, or no group: all rows are here."""
        if group is None:
            return None
        if isinstance(group, Simulated):
            found = cls(group.ranks, range(group.ranks), None)
        else:
            group = process_group(group)
            rank = dist.get_rank(group)
            found = cls(dist.get_world_size(group), range(rank, rank + 1), group)
        return found if found.ranks > 1 else None

    def positions(self, rows: int, size: int) -> int:
        """The length of the sequence; ValueError unless shards end where blocks of ``size`` end."""
        n = rows if self.group is None else rows * self.ranks
        if n % (self.ranks * size):
            raise ValueError(f"every rank needs equally many whole blocks of {size}, got n = {n} on {self.ranks} ranks")
        return n

    def run(self, algorithms: list[Steps]) -> list:
        """What the algorithms of the ranks here return."""
        return simulate(algorithms) if self.group is None else [drive(each, self.group) for each in algorithms]

    def shards(self, t: Tensor | None, dim: int = 1) -> Sequence[Tensor | None]:
        """By rank here."""
        return [None] * len(self.here) if t is None else t.chunk(len(self.here), dim)

    def agree(self, problem: Problem, same: dict, device: torch.device) -> None:
        """Compare once what is about to be done, as in ``agree``: simulated ranks cannot differ."""
        if self.group is None:
            return
        known, key = _agreed.setdefault(self.group, set()), (problem, *same.values())
        if key not in known:
            nothing = ((),) * self.ranks  # which rows move is asked for, later
            drive(agree(RankPlan(problem, self.here[0], nothing, nothing), same, device), self.group)
            known.add(key)
