"""Groups of ranks: of torch.distributed, or simulated in this process. Before they move
data the ranks of a process group compare what is computed.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, count, product, zip_longest
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_int, short_repr
from ..torch_private import group_named
from .comm import all_to_all, drive
from .exchange import Problem, RankPlan, digest
from .layout import Layout


@dataclass(frozen=True)
class Simulated:
    """``ranks`` simulated in this process: q, k, v are whole, sharded inside, and the
    result is whole. A pair of numbers is a 2-D mesh of ranks.

    ``machines``: over so many simulated hosts the ranks are spread evenly, in order. It
    decides what scheme "plan" moves between which ranks, and in what order gradients
    are summed. With one host the example has 512 bytes between the halves.

    >>> from ringlab import Dense, attention, ring
    >>> q = torch.ones(1, 8, 1, 4)
    >>> with ring.counting() as traffic:
    ...     out = attention(q, q, q, Dense(), group=Simulated(4, machines=2), scheme="plan")
    >>> sum(size for (a, b), size in traffic.sent.items() if a // 2 != b // 2), traffic.total
    (256, 768)
    """

    ranks: int | tuple[int, int]
    machines: int = 1

    def __post_init__(self):
        ranks = self.ranks
        if isinstance(ranks, tuple | list):
            if len(ranks) != 2:
                raise ValueError(
                    f"ranks must be a number or a pair, got {short_repr(ranks)}"
                )
            ranks = tuple(check_int("ranks", each) for each in ranks)
        else:
            ranks = check_int("ranks", ranks)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "machines", check_int("machines", self.machines))
        if self.size % self.machines:
            raise ValueError(
                f"{short_repr(self.ranks)} ranks do not share {short_repr(self.machines)} machines evenly"
            )

    @cached_property
    def shape(self) -> tuple[int, int] | None:
        return self.ranks if isinstance(self.ranks, tuple) else None

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape or (self.ranks,))


@dataclass(frozen=True)
class Group:
    """The ranks that share a sequence. ``here`` are the ranks of this process.

    With a process group that is one rank; without (None) it is all of them, simulated.
    Tensors hold the rows of the ranks here, one rank after the other. Copies share the
    process group; a pickle keeps its name and size. ``shape``: of a 2-D mesh, whose
    ranks are numbered row by row.
    """

    size: int
    here: range
    process_group: dist.ProcessGroup | None = None
    shape: tuple[int, int] | None = None

    def __reduce__(self):
        if self.process_group is None:
            return Group, (self.size, self.here, None, self.shape)
        return _restored, (self.process_group.group_name, self.size, self.shape)

    @classmethod
    def kept(cls, group):
        """What a module keeps of its ``group``: a Group in place of a ProcessGroup,
        which cannot be copied or pickled.
        """
        return cls.of(group) if isinstance(group, dist.ProcessGroup) else group

    @classmethod
    def of(cls, group, dimensions: int = 1) -> Group:
        """The group of a ProcessGroup, a DeviceMesh or Simulated ranks, with at most so
        many ``dimensions``; raises TypeError for anything else.
        """
        shape = group.shape if isinstance(group, Group | Simulated) else None
        if isinstance(group, dist.DeviceMesh) and group.ndim > 1:
            shape = group.shape
        if shape is not None and len(shape) > dimensions:
            raise ValueError(
                f"group must be a {'1-D' if dimensions == 1 else '1-D or 2-D'} mesh, got one of {len(shape)}"
                " dimensions; take one, as mesh['sp']"
            )
        if isinstance(group, Group):
            return group
        if isinstance(group, Simulated):
            return cls(group.size, range(group.size), None, shape)
        if isinstance(group, dist.DeviceMesh):
            group = group.get_group() if shape is None else _of_both_dimensions(group)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this rank is not a member of the group: new_group gave it no part"
            )
        if not isinstance(group, dist.ProcessGroup):
            expected = "a ProcessGroup, a DeviceMesh or ringlab.Simulated"
            raise TypeError(f"group must be {expected}, got {short_repr(group)}")
        rank = dist.get_rank(group)
        return cls(dist.get_world_size(group), range(rank, rank + 1), group, shape)

    @classmethod
    def sharing(cls, group) -> Group | None:
        """As ``of``; None if all rows are here: no group is given, or one of a single
        rank.
        """
        if group is not None and (ranks := cls.of(group)).size > 1:
            return ranks
        return None

    def split(
        self, t: Tensor | None, dim: int = 1, layout: Layout | None = None
    ) -> Sequence[Tensor | None]:
        """The shards of the ranks here: those of a layout, or equal ones."""
        if t is None or self.process_group is not None:
            return [t] * len(self.here)
        if layout is None:
            return t.chunk(self.size, dim)
        if layout.kind == "contiguous":
            return t.split_with_sizes(layout.sizes, dim)
        return [layout.shard(t, rank, dim) for rank in self.here]

    def join(
        self, parts: Sequence[Tensor], dim: int, layout: Layout | None = None
    ) -> Tensor:
        """The rows of the ranks here from their shards, contiguous."""
        if self.process_group is not None:
            return parts[0].contiguous()
        if layout is None or layout.kind == "contiguous":
            return torch.cat(parts, dim)
        return layout.unshard(parts, dim)

    def hosts(self, device: torch.device) -> tuple[int, ...]:
        """A number for the host of each rank, by its name; () for simulated ranks and
        for fewer than three.

        The ranks of a process group tell each other once, before anything else, by an
        all-to-all of 8 bytes.
        """
        if self.process_group is None or self.size < 3:
            return ()
        if self.process_group not in _hosts:
            names = self._all_rows([digest(socket.gethostname())], device)
            _hosts[self.process_group] = tuple(map(names.index, names))
        return _hosts[self.process_group]

    def _all_rows(self, row: list[int], device: torch.device) -> list[list[int]]:
        """The rows of all ranks, of which this one has ``row``, by an all-to-all."""
        ones = [1] * self.size
        rows = torch.tensor([row] * self.size, device="cpu" if self._on_cpu else device)
        steps = all_to_all(rows, ones, ones, control=True)
        return drive([steps], self.process_group)[0].tolist()

    @property
    def _on_cpu(self) -> bool:
        return "cpu:" in dist.get_backend_config(self.process_group)

    def agree(
        self,
        passes: str,
        problem: Problem,
        t: Tensor,
        number: int = 0,
        plan=None,
        **options,
    ) -> int:
        """Compare with the other ranks what a call computes, before it moves data;
        returns the call's number.

        The batch, head_dim and dtype of ``t`` and all ``options`` must be equal as
        well. ``number``: of the forward, in its backward. ``plan()``: the RankPlan,
        which is compared if it is new to a rank. Raises PlanMismatch on all ranks.

        It costs one all-to-all of 24 bytes to each other rank, from CPU memory. The
        digest cannot travel with the data: data of unexpected size ends the process
        inside gloo. A group of NCCL alone compares only what is new to it, because
        reading the digests would stall the GPU.
        """
        if self.process_group is None:  # simulated ranks cannot differ
            return 0
        self.hosts(t.device)  # the first exchange of every kind of call
        agreed, calls = _history.setdefault(self.process_group, (set(), count(1)))
        number = number or next(calls)
        shape = ("batch", t.shape[0]), ("head_dim", t.shape[3]), ("dtype", t.dtype)
        fields, own_digest = _fields(passes, problem, (*shape, *options.items()))
        new = own_digest not in agreed
        if new or self._on_cpu:
            header = [own_digest, number, new and plan is not None]
            headers = self._all_rows(header, t.device)
            if any(row[:2] != header[:2] for row in headers):
                raise _fields_differ(
                    self._gather(fields | {"forward call": f"number {number}"}, t)
                )
            if any(row[2] for row in headers):
                self._compare_rows(plan(), t)
            if (
                len(agreed) >= MOST_AGREED
            ):  # as all ranks have: their calls are the same
                agreed.clear()
            agreed.add(own_digest)
        return number

    def _compare_rows(self, plan: RankPlan, t: Tensor) -> None:
        """Compare, for every pair of ranks, the rows that one sends with those that the
        other expects.
        """
        each = (
            zip_longest(plan.send, plan.onward),
            zip_longest(plan.receive, plan.passed),
        )
        sent, expected = zip(
            *self._gather([list(map(digest, blocks)) for blocks in each], t)
        )
        pairs = product(range(self.size), repeat=2)
        bad = [
            (sender, rank)
            for rank, sender in pairs
            if sent[sender][rank] != expected[rank][sender]
        ]
        if bad:
            pairs = ", ".join(
                f"rank {sender} against rank {receiver}" for sender, receiver in bad
            )
            (suspect, times), *others = Counter(chain(*bad)).most_common()
            culprit = suspect if not others or times > others[0][1] else None
            raise PlanMismatch(
                f"ranks disagree about which rows move: {pairs}", culprit
            )

    def _gather(self, value, t: Tensor) -> list:
        """The values of all ranks. NCCL sends objects by the current GPU, which is that
        of ``t`` meanwhile.
        """
        values = [None] * self.size
        with torch.cuda.device_of(t):
            dist.all_gather_object(values, value, group=self.process_group)
        return values


def _of_both_dimensions(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a 2-D mesh, numbered row by row."""
    numbers = tuple(mesh.mesh.flatten().tolist())
    if numbers != tuple(sorted(numbers)):
        raise ValueError(f"a 2-D mesh must number its ranks row by row, got {numbers}")
    if len(numbers) == dist.get_world_size():
        return dist.group.WORLD
    if (group := _flat.get(numbers)) is None:
        # Made by its members alone: other processes may never come here.
        group = dist.new_group([*numbers], use_local_synchronization=True)
        _flat[numbers] = group
    return group


# The groups of 2-D meshes that are a part of the processes, by their ranks.
_flat: WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = WeakValueDictionary()
MOST_AGREED = 4096  # digests that are kept
# By process group: the digests that its ranks agreed on, and the numbers of its next
# forward calls.
_history: WeakKeyDictionary[dist.ProcessGroup, tuple[set[int], Iterator[int]]] = (
    WeakKeyDictionary()
)
_hosts: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = (
    WeakKeyDictionary()
)  # the host of each rank


class PlanMismatch(RuntimeError):
    """Ranks disagree about what is computed or which rows move. ``rank`` differs from
    all others, if one does.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


@lru_cache(maxsize=256)
def _fields(
    passes: str, problem: Problem, options: tuple
) -> tuple[dict[str, str], int]:
    """What all ranks must have equal, by name, and its digest."""
    fields = {
        "pass": passes,
        "pattern": str(problem.pattern),
        "layout": str(problem.layout),
        "causal": str(problem.causal),
        "heads": f"{problem.heads} / {problem.kv_heads}",
        "hosts": str(problem.hosts),
        "exchange_dtype": str(problem.exchange_dtype),
    }
    fields |= {name: str(value) for name, value in options}
    return fields, digest(fields)


def _fields_differ(fields: list[dict[str, str]]) -> PlanMismatch:
    """The first field that differs, and the rank that differs from all others, if one
    does.
    """
    name = next(
        name
        for name in fields[0]
        if len({rank_fields.get(name) for rank_fields in fields}) > 1
    )
    values = [rank_fields.get(name) for rank_fields in fields]
    (common, times), (_, next_times), *_ = Counter(values).most_common()
    if times == next_times:
        difference = ", ".join(
            f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values)
        )
        differing = []
    else:
        differing = [rank for rank, value in enumerate(values) if value != common]
        difference = (
            ", ".join(f"{values[rank]} on rank {rank}" for rank in differing)
            + f", {common} on the others"
        )
    message = f"ranks disagree about what is computed: {name} is {difference}"
    if name == "layout":
        message += "; shards of unequal sizes need a ringlab.ring.Layout"
    return PlanMismatch(message, differing[0] if len(differing) == 1 else None)


def group_size(group) -> int:
    """The number of ranks of a ProcessGroup, a 1-D DeviceMesh or Simulated ranks."""
    return Group.of(group).size


def length_of(t: Tensor, group, layout) -> int:
    """The length of the sequence of which ``t`` (b, n, ...) holds the rows here."""
    if isinstance(layout, Layout):
        return layout.n
    all_here = group is None or isinstance(group, Simulated)
    return t.shape[1] * (1 if all_here else Group.of(group, dimensions=2).size)


def _restored(name: str, size: int, shape: tuple[int, int] | None = None) -> Group:
    """The group that a pickle has named; RuntimeError unless it is here, with as many
    ranks.
    """
    group = None
    if dist.is_initialized():
        world = dist.group.WORLD
        try:
            group = Group.of(world if world.group_name == name else group_named(name))
        except (RuntimeError, TypeError):  # torch's, and ours for None
            pass
    if group is None or group.size != size:
        raise RuntimeError(
            f"there is no process group {name!r} of {size} ranks as in the pickle: make it before, or load a state dict"
        )
    return replace(group, shape=shape)
