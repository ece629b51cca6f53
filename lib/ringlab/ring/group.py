"""Groups of ranks: of torch.distributed, or simulated in this process. Before they move
data the ranks of a process group compare what is computed.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from itertools import chain, product, zip_longest
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..cache import T
from ..checks import check_int, short_repr
from ..torch_private import group_named, is_transformed, keep_name, refuse_tracing
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

    def __post_init__(self) -> None:
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

    With a process group that is one rank; without it is all of them, simulated. Tensors
    hold the rows of the ranks here, one rank after the other. Copies share the process
    group; a pickle keeps its name and size.

    A 2-D mesh has a ``shape``, its ranks are numbered row by row, and there are two
    ``process_groups``: this rank's column and its row.
    """

    size: int
    here: range
    process_groups: tuple[dist.ProcessGroup, ...] = ()
    shape: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        if self.process_groups:
            return _restored, (self.name, self.size)
        return Group, (self.size, self.here, (), self.shape)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """That of a 1-D group; of a mesh the first. None of simulated ranks."""
        return self.process_groups[0] if self.process_groups else None

    @property
    def name(self) -> str:
        """By which ``named`` finds the group; "" of simulated ranks."""
        return " ".join(group.group_name for group in self.process_groups)

    def keep_name(self) -> None:
        """Let ``named`` find the group with any torch."""
        for group in self.process_groups:
            keep_name(group)

    @classmethod
    def named(cls, name: str) -> Group:
        """The group of processes with this name."""
        return cls.over([*map(group_named, name.split())])

    @classmethod
    def over(cls, groups: Sequence[dist.ProcessGroup]) -> Group:
        """The ranks of a process group, or of a mesh with this column and this row."""
        rank = 0
        shape: list[int] = []
        for group in groups:
            if not isinstance(group, dist.ProcessGroup):
                expected = "a ProcessGroup, a DeviceMesh or ringlab.Simulated"
                raise TypeError(f"group must be {expected}, got {short_repr(group)}")
            shape.append(dist.get_world_size(group))
            rank = rank * shape[-1] + dist.get_rank(group)
        here = range(rank, rank + 1)
        mesh = tuple(shape) if len(shape) == 2 else None
        return cls(math.prod(shape), here, tuple(groups), mesh)

    @classmethod
    def kept(cls, group: AnyGroup) -> AnyGroup:
        """What a module keeps of its ``group``: a Group in place of a ProcessGroup,
        which cannot be copied or pickled.
        """
        return cls.of(group) if isinstance(group, dist.ProcessGroup) else group

    @classmethod
    def of(cls, group: AnyGroup, dimensions: int = 1) -> Group:
        """The group of a ProcessGroup, a DeviceMesh or Simulated ranks, with at most so
        many ``dimensions``; raises TypeError for anything else.
        """
        refuse_tracing()
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
            return cls(group.size, range(group.size), (), shape)
        if shape is not None:
            return cls.over(_groups_of_mesh(group))
        if isinstance(group, dist.DeviceMesh):
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this rank is not a member of the group: new_group gave it no part"
            )
        return cls.over([group])

    @classmethod
    def sharing(cls, group: AnyGroup, dimensions: int = 1) -> Group | None:
        """As ``of``; None if all rows are here: no group is given, or one of a single
        rank.
        """
        if group is not None and (ranks := cls.of(group, dimensions)).size > 1:
            return ranks
        return None

    def split(
        self, t: Tensor | None, dim: int = 1, layout: Layout | None = None
    ) -> Sequence[Tensor | None]:
        """The shards of the ranks here: those of a layout, or equal ones."""
        if t is None or self.process_groups:
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
        if self.process_groups:
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
        if not self.process_groups or self.size < 3:
            return ()
        if self._history.hosts is None:
            names = self._all_rows([digest(socket.gethostname())], device)
            self._history.hosts = tuple(map(names.index, names))
        return self._history.hosts

    def among(self, members: Sequence[int]) -> dist.ProcessGroup:
        """The process group of these ranks: all, or a column or a row of a mesh."""
        if self.shape is None:
            return self.process_groups[0]
        columns = self.shape[1]
        column = range(self.here[0] % columns, self.size, columns)
        return self.process_groups[tuple(members) != tuple(column)]

    @property
    def _lines(self) -> list[Group]:
        """Groups over which one after the other reaches all ranks, in their order."""
        return [Group.of(group) for group in reversed(self.process_groups)]

    def _all_rows(self, row: list[int], device: torch.device) -> list[list[int]]:
        """The rows of all ranks, of which this one has ``row``, by an all-to-all."""
        rows = torch.tensor([row], device="cpu" if self._on_cpu else device)
        for line in self._lines:
            counts = [len(rows)] * line.size
            send = rows.repeat(line.size, 1)
            (rows,) = drive([all_to_all(send, counts, counts, control=True)], line)
        return rows.tolist()

    @property
    def _history(self) -> History:
        return _histories.setdefault(self.process_group, {}).setdefault(
            self.name, History()
        )

    @property
    def _on_cpu(self) -> bool:
        return "cpu:" in dist.get_backend_config(self.process_group)

    def agree(
        self,
        passes: str,
        problem: Problem,
        t: Tensor,
        number: int = 0,
        plan: Callable[[], RankPlan] | None = None,
        **options: object,
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
        if not self.process_groups:  # simulated ranks cannot differ
            return 0
        history = self._history
        number = number or history.calls + 1
        history.begun += 1  # what follows, no other rank waits for here
        history.calls = max(history.calls, number)
        shape = ("batch", t.shape[0]), ("head_dim", t.shape[3]), ("dtype", t.dtype)
        fields, own_digest = _fields(passes, problem, (*shape, *options.items()))
        new = own_digest not in history.agreed
        if new or self._on_cpu:
            header = [own_digest, number, new and plan is not None]
            fields = fields | {"forward call": f"number {number}"}
            headers = self._compare(header, fields, t)
            if any(row[2] for row in headers):
                self._compare_rows(plan(), t)
            # As all ranks have: their calls are the same.
            if len(history.agreed) >= MOST_AGREED:
                history.agreed.clear()
            history.agreed.add(own_digest)
        return number

    def _compare(
        self, header: list[int], fields: dict[str, str], t: Tensor
    ) -> list[list[int]]:
        """The headers of all ranks: a digest of the ``fields`` that must be equal, the
        number of the call, and what may differ. PlanMismatch for the first that is not
        equal.
        """
        self._history.begun += 1
        self.hosts(t.device)  # the first exchange of every kind of call
        headers = self._all_rows(header, t.device)
        if any(row[:2] != header[:2] for row in headers):
            history = self._history  # of a rank that refuses, too
            history.calls = max(history.calls, *(row[1] for row in headers))
            raise _fields_differ(self.gather(fields, t))
        return headers

    def everyone(self, fields: dict[str, str], value: T, t: Tensor) -> list[T]:
        """The values of all ranks, whose ``fields`` must be equal (PlanMismatch); one
        value where all are. It costs as much as ``agree``, and a gather where values
        differ.
        """
        headers = self._compare([digest(fields), 0, digest(value)], fields, t)
        alike = all(row == headers[0] for row in headers)
        return [value] if alike else self.gather(value, t)

    def refuse(self, error: Exception) -> None:
        """Raise PlanMismatch on all ranks, which have begun or refuse a call that this
        one refuses; return where all refuse.

        A group of NCCL alone, whose ranks may not compare what they agreed on before,
        does so until they have agreed on something.
        """
        if self._on_cpu or not self._history.agreed:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            t = torch.empty(0, device="cpu" if self._on_cpu else "cuda")
            self._compare([REFUSED, 0, 0], {"refused": why}, t)

    def _compare_rows(self, plan: RankPlan, t: Tensor) -> None:
        """Compare, for every pair of ranks, the rows that one sends with those that the
        other expects.
        """
        each = (
            zip_longest(plan.send, plan.onward),
            zip_longest(plan.receive, plan.passed),
        )
        sent, expected = zip(
            *self.gather([list(map(digest, blocks)) for blocks in each], t)
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

    def gather(self, value: T, t: Tensor) -> list[T]:
        """The values of all ranks. NCCL sends objects by the current GPU, which is that
        of ``t`` meanwhile.
        """
        values = [value]
        with torch.cuda.device_of(t):
            for line in self._lines:
                parts = [None] * line.size
                dist.all_gather_object(parts, values, group=line.process_group)
                values = [*chain(*parts)]
        return values


AnyGroup = dist.ProcessGroup | dist.DeviceMesh | Simulated | Group | None


def _groups_of_mesh(mesh: dist.DeviceMesh) -> list[dist.ProcessGroup]:
    """This rank's column and row of a 2-D mesh, as torch made them: a group of both
    would be one more that all processes of the job have to make.
    """
    numbers = mesh.mesh.flatten().tolist()
    if numbers != sorted(numbers):
        raise ValueError(f"a 2-D mesh must number its ranks row by row, got {numbers}")
    if mesh.get_coordinate() is None:
        raise ValueError("this rank is not a member of the mesh")
    return mesh.get_all_groups()


MOST_AGREED = 4096  # digests that are kept
REFUSED = -1  # in place of a digest, which is not negative


@dataclass
class History:
    """What the ranks of a group have told each other: the host of each, the digests of
    calls that they agreed on, the number of the last forward, and how many comparisons
    this rank has begun.
    """

    hosts: tuple[int, ...] | None = None
    agreed: set[int] = field(default_factory=set)
    calls: int = 0
    begun: int = 0


# By the first process group, then by the name of the group.
_histories: WeakKeyDictionary[dist.ProcessGroup, dict[str, History]] = (
    WeakKeyDictionary()
)


def refuse_transforms(*tensors: Tensor) -> None:
    """Raise NotImplementedError under a transform of torch.func, and for tangents."""
    if is_transformed(*tensors):
        what = "torch.func or forward-mode derivatives"
        raise NotImplementedError(f"attention over a group does not support {what}")


class PlanMismatch(RuntimeError):
    """Ranks disagree about what is computed or which rows move, or one refuses it.
    ``rank`` differs from all others, if one does.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


@contextmanager
def shared_refusals(group) -> Iterator[None]:
    """Tell the other ranks of ``group`` what this one raises before it has begun to
    agree with them: all raise PlanMismatch with its number and its reason, or each its
    own error where all refuse. Nothing is sent unless something is raised.
    """
    ranks = None if group is None else Group.sharing(group, dimensions=2)
    if ranks is None or ranks.process_group is None:
        yield
        return
    history = ranks._history
    begun = history.begun
    try:
        yield
    except Exception as error:
        if history.begun == begun:
            ranks.refuse(error)
        raise


Call = TypeVar("Call", bound=Callable)


def with_shared_refusals(group_of: Callable[..., object]) -> Callable[[Call], Call]:
    """Decorate a call to run inside ``shared_refusals`` of the group that ``group_of``
    gives for its arguments; graphs are traced without.
    """

    def decorate(call):
        @wraps(call)
        def wrapped(*args, **options):
            group = group_of(*args, **options)
            if group is None or torch.compiler.is_compiling():
                return call(*args, **options)
            with shared_refusals(group):
                return call(*args, **options)

        return wrapped

    return decorate


def given_group(*_, group=None, **__):
    """The ``group`` among the arguments of a call."""
    return group


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
        "exchange_dtype": str(problem.exchange_dtype),
    }
    fields |= {name: str(value) for name, value in options}
    fields["hosts"] = str(problem.hosts)  # after the scheme, which decides it
    return fields, digest(fields)


def _fields_differ(fields: list[dict[str, str]]) -> PlanMismatch:
    """What a rank refuses, or the first field that differs, and the rank that differs
    from all others, if one does.
    """
    refused = [rank for rank, each in enumerate(fields) if "refused" in each]
    if refused:
        why = fields[refused[0]]["refused"]
        message = f"rank {refused[0]} refuses what the others compute: {why}"
        return PlanMismatch(message, refused[0] if len(refused) == 1 else None)
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


def group_size(group: AnyGroup) -> int:
    """The number of ranks of a ProcessGroup, a 1-D DeviceMesh or Simulated ranks."""
    return Group.of(group).size


def length_of(t: Tensor, group: AnyGroup, layout: str | Layout) -> int:
    """The length of the sequence of which ``t`` (b, n, ...) holds the rows here."""
    if isinstance(layout, Layout):
        return layout.n
    all_here = group is None or isinstance(group, Simulated)
    return t.shape[1] * (1 if all_here else Group.of(group, dimensions=2).size)


def _restored(name: str, size: int) -> Group:
    """The group that a pickle has named; RuntimeError unless it is here, with as many
    ranks.
    """
    group = None
    if dist.is_initialized():
        try:
            group = Group.named(name)
        except (RuntimeError, TypeError):  # torch's, and ours for None
            pass
    if group is None or group.size != size:
        raise RuntimeError(
            f"there is no process group {name!r} of {size} ranks as in the pickle: make it before, or load a state dict"
        )
    return group
