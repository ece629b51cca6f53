"""Groups of ranks, and attention over them: a torch.distributed group, or ranks
simulated in this process.

A forward or backward over several ranks is one custom operator, so that a compiler sees
no communication and checkpointing can save its results. Before it moves data over a
process group it compares with the other ranks what is computed.
"""

from __future__ import annotations

import socket
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, count, product, zip_longest
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from .. import kernels
from ..checks import check_float_dtype, check_int, short_repr
from ..engine import Execution
from ..engine.autograd import (
    IN_GRAPHS,
    LSE_COLUMNS,
    in_transform,
    is_followed,
    local_attention,
    positive_scale,
    without_autocast,
)
from ..engine.documents import Documents
from ..engine.sinks import add_sinks_, sinks_gradient
from ..kernels.base import accumulation_dtype
from ..modes import outside_modes
from ..tracking import seen_inside
from .comm import all_to_all, drive
from .exchange import Problem, RankPlan, digest, on_hosts, plan_rank
from .layout import Layout, layout_named
from .rank import Rank, rank_of
from .schemes import algorithms, check_problem, check_scheme
from .ulysses import MeshScheme, head_share, mesh_of
from .volume import choose

# --------------------------------------------------------------------------------------
# groups


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
    shape: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self):
        if isinstance(self.ranks, tuple | list):
            if len(self.ranks) != 2:
                raise ValueError(
                    f"ranks must be a number or a pair, got {short_repr(self.ranks)}"
                )
            shape = tuple(check_int("ranks", ranks) for ranks in self.ranks)
            object.__setattr__(self, "shape", shape)
            object.__setattr__(self, "ranks", shape[0] * shape[1])
        for name in ("ranks", "machines"):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        if self.ranks % self.machines:
            raise ValueError(
                f"{short_repr(self.ranks)} ranks do not share {short_repr(self.machines)} machines evenly"
            )


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
        kept = group is None or not isinstance(group, dist.ProcessGroup)
        return group if kept else cls.of(group)

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
                f"group must be a 1-D mesh, got one of {len(shape)} dimensions; take one, as mesh['sp']"
            )
        if isinstance(group, Group):
            return group
        if isinstance(group, Simulated):
            return cls(group.ranks, range(group.ranks), None, shape)
        if isinstance(group, dist.DeviceMesh):
            group = group.get_group() if shape is None else _of_both_dimensions(group)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this rank is not a member of the group: new_group gave it no part"
            )
        if not isinstance(group, dist.ProcessGroup):
            wanted = "a ProcessGroup, a 1-D DeviceMesh or ringlab.Simulated"
            raise TypeError(f"group must be {wanted}, got {short_repr(group)}")
        rank = dist.get_rank(group)
        return cls(dist.get_world_size(group), range(rank, rank + 1), group, shape)

    @classmethod
    def sharing(cls, group) -> Group | None:
        """As ``of``; None if all rows are here: no group is given, or one of a single
        rank.
        """
        found = None if group is None else cls.of(group)
        return found if found is not None and found.size > 1 else None

    def split(
        self, t: Tensor | None, dim: int = 1, layout: Layout | None = None
    ) -> Sequence[Tensor | None]:
        """The shards of the ranks here: those of a layout, or equal ones."""
        if t is None or self.process_group is not None:
            return [t] * len(self.here)
        if layout is None or layout.kind == "contiguous":
            return (
                t.chunk(self.size, dim)
                if layout is None
                else t.split_with_sizes(layout.sizes, dim)
            )
        return [layout.shard(t, rank, dim) for rank in self.here]

    def join(
        self, parts: Sequence[Tensor], dim: int, layout: Layout | None = None
    ) -> Tensor:
        """The rows of the ranks here from their shards, contiguous."""
        if self.process_group is not None:
            return parts[0].contiguous()
        return torch.cat(parts, dim) if layout is None else layout.unshard(parts, dim)

    def hosts(self, device: torch.device) -> tuple[int, ...]:
        """A number for the host of each rank, by its name; () for simulated ranks and
        for fewer than three.

        The ranks of a process group tell each other once, before anything else, by an
        all-to-all of 8 bytes.
        """
        if self.process_group is None or self.size < 3:
            return ()
        if self.process_group not in _hosts:
            names, ones = (
                torch.full((self.size, 1), digest(socket.gethostname())),
                [1] * self.size,
            )
            names = names.to("cpu" if self._on_cpu else device)
            theirs = (
                drive(
                    [all_to_all(names, ones, ones, control=True)], self.process_group
                )[0]
                .flatten()
                .tolist()
            )
            _hosts[self.process_group] = tuple(map(theirs.index, theirs))
        return _hosts[self.process_group]

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
        stated, mine = _fields(passes, problem, (*shape, *options.items()))
        on_cpu, new = self._on_cpu, mine not in agreed
        if on_cpu or new:
            header, ones = [mine, number, new and plan is not None], [1] * self.size
            headers = torch.tensor(
                [header] * self.size, device="cpu" if on_cpu else t.device
            )
            theirs = drive(
                [all_to_all(headers, ones, ones, control=True)], self.process_group
            )[0].tolist()
            if any(row[:2] != header[:2] for row in theirs):
                raise _fields_differ(
                    self._gather(stated | {"forward call": f"number {number}"})
                )
            if any(row[2] for row in theirs):
                self._compare_rows(plan())
            if (
                len(agreed) >= MOST_AGREED
            ):  # as all ranks have: their calls are the same
                agreed.clear()
            agreed.add(mine)
        return number

    def _compare_rows(self, plan: RankPlan) -> None:
        """Compare, for every pair of ranks, the rows that one sends with those that the
        other expects.
        """
        each = (
            zip_longest(plan.send, plan.onward),
            zip_longest(plan.receive, plan.passed),
        )
        sent, expected = zip(*self._gather([list(map(digest, some)) for some in each]))
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
            (most, times), *others = Counter(chain(*bad)).most_common()
            odd = most if not others or times > others[0][1] else None
            raise PlanMismatch(f"ranks disagree about which rows move: {pairs}", odd)

    def _gather(self, value) -> list:
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.process_group)
        return found


def _of_both_dimensions(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a 2-D mesh, numbered row by row."""
    numbers = mesh.mesh.flatten().tolist()
    if numbers != sorted(numbers):
        raise ValueError(f"a 2-D mesh must number its ranks row by row, got {numbers}")
    if len(numbers) == dist.get_world_size():
        return dist.group.WORLD
    if not hasattr(mesh, "_flatten"):  # a private method of torch, made once by mesh
        raise NotImplementedError(
            "this torch does not flatten a mesh of a part of the ranks"
        )
    return mesh._flatten().get_group()


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
    found = {
        "pass": passes,
        "pattern": str(problem.pattern),
        "layout": str(problem.layout),
        "causal": str(problem.causal),
        "heads": f"{problem.heads} / {problem.kv_heads}",
        "hosts": str(problem.hosts),
        "exchange_dtype": str(problem.exchange_dtype),
    }
    found |= {name: str(value) for name, value in options}
    return found, digest(found)


def _fields_differ(fields: list[dict[str, str]]) -> PlanMismatch:
    """The first field that differs, and the rank that differs from all others, if one
    does.
    """
    name = next(
        name for name in fields[0] if len({each.get(name) for each in fields}) > 1
    )
    values = [each.get(name) for each in fields]
    (common, times), (_, next_times), *_ = Counter(values).most_common()
    if times == next_times:
        found, odd = (
            ", ".join(
                f"{value} on rank {values.index(value)}"
                for value in dict.fromkeys(values)
            ),
            [],
        )
    else:
        odd = [rank for rank, value in enumerate(values) if value != common]
        found = (
            ", ".join(f"{values[rank]} on rank {rank}" for rank in odd)
            + f", {common} on the others"
        )
    message = f"ranks disagree about what is computed: {name} is {found}"
    return PlanMismatch(message, odd[0] if len(odd) == 1 else None)


def group_size(group) -> int:
    """The number of ranks of a ProcessGroup, a 1-D DeviceMesh or Simulated ranks."""
    return Group.of(group).size


# --------------------------------------------------------------------------------------
# attention


@dataclass(frozen=True, eq=False)
class _Call:
    """All of a call but its group, tensors and scale. Operators take its name, by which
    they find it.
    """

    name: str
    problem: Problem
    scheme: str | MeshScheme
    backend: str | tuple[str, ...]
    execution: Execution

    def ranks(
        self, group: Group, q: Tensor, scale: float, backward: bool, columns: int = 0
    ) -> tuple[list[Rank], Callable]:
        """The work of the ranks here, for a positive scale, and what makes q, and dq of
        its, one for that scale. ``columns``: by how many the heads will be wider.
        """
        needs = {
            "causal": self.problem.causal,
            "backward": backward,
            "backend": self.backend,
        }
        head_dim = q.shape[3] + columns
        kernel = kernels.choose(q.device, q.dtype, head_dim, **needs).kernel
        (flip, scale), problem = positive_scale(scale), self.problem
        if group.process_group is not None:
            problem = on_hosts(problem, self.scheme, group.hosts(q.device))
        return [
            rank_of(problem, rank, kernel, scale, self.execution) for rank in group.here
        ], flip

    def options(self, scale: float) -> dict:
        """What all ranks must have equal beside the problem."""
        return {"scheme": self.scheme, "scale": scale, "backend": self.backend}


_calls: WeakValueDictionary[str, _Call] = (
    WeakValueDictionary()
)  # by name; whoever passes a name on holds its call
_compiled: set[_Call] = set()  # the calls of compiled graphs
_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()  # by name


def attend(
    q,
    k,
    v,
    pattern,
    *,
    group,
    scheme: str | tuple[str, str],
    layout,
    causal: bool,
    scale: float,
    backend,
    execution: Execution,
    exchange_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
):
    """out and lse for checked tensors: local shards over a group or mesh, whole ones
    over Simulated ranks.
    """
    compiling, simulated = torch.compiler.is_compiling(), isinstance(group, Simulated)
    options = {
        "causal": causal,
        "scale": scale,
        "backend": backend,
        "execution": execution,
        "sinks": sinks,
    }
    if compiling and (simulated or not IN_GRAPHS or not isinstance(scheme, str)):
        across = {
            "group": group,
            "scheme": scheme,
            "layout": layout,
            "exchange_dtype": exchange_dtype,
        }
        return torch.compiler.disable(attend)(q, k, v, pattern, **across, **options)
    if not compiling and (
        in_transform
        and in_transform()
        or getattr(forward_ad, "_current_level", -1) >= 0
    ):  # operators know neither
        raise NotImplementedError(
            "attention over a group does not support torch.func or forward-mode derivatives"
        )
    q, k, v = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v)
    )  # kernels need that
    machines, group = group.machines if simulated else 1, Group.of(group, dimensions=2)
    check_exchange_dtype(exchange_dtype, q.dtype)
    shape, where = (
        (*q.shape[1:3], k.shape[2]),
        (exchange_dtype, group.size, machines, group.process_group),
    )
    passes = "fwd+bwd" if is_followed(q, k, v, sinks) else "fwd"
    scheme, width = check_scheme(scheme, group.shape), (q.shape[3], q.dtype, passes)
    about = shape, width, pattern, layout, scheme, causal, backend, execution, *where
    if compiling:
        name = _name_in_graph(*about)
    else:
        call = _call(*about)  # held until the operator has found it
        name = call.name
    if group.size > 1 and simulated and passes == "fwd":
        return forward(q, k, v, sinks, scale, "", name, operator=False)[:2]
    if group.size > 1:
        where = "" if simulated else group.process_group.group_name
        return ranks_forward(q, k, v, sinks, scale, where, name)[:2]
    if not simulated or call.problem.layout.grid is None:
        return local_attention(q, k, v, pattern, **options)
    layout = call.problem.layout  # the pattern runs along the curve
    out, lse = local_attention(
        *(layout.shard(t, 0) for t in (q, k, v)), pattern, **options
    )
    return layout.unshard([out]), layout.unshard([lse], 2)


def attend_documents(
    q,
    k,
    v,
    pattern,
    documents: Documents,
    *,
    group,
    scheme: str | tuple[str, str],
    layout,
    exchange_dtype=None,
    **options,
):
    """As ``attend`` for packed or padded documents, whose positions are global.

    Documents inside a shard are attended there, and nothing moves. One that borders of
    shards cut is a call of all ranks on its part of the layout.
    """
    found = Group.of(group, dimensions=2)
    check_scheme(scheme, found.shape)
    layout = layout_named(layout, documents.n, found.size)
    if layout.kind not in ("contiguous", "zigzag"):
        raise ValueError(
            f"documents across ranks need a contiguous or zigzag layout, not a {layout.kind} one"
        )
    rank = None if found.process_group is None else found.here[0]
    rows = layout.n if rank is None else layout.size(rank)
    if q.shape[1] != rows:
        raise ValueError(f"the layout has {rows} positions here, q has {q.shape[1]}")
    if found.size == 1:
        return local_attention(q, k, v, pattern, documents=documents, **options)
    problem = Problem(pattern, layout, options["causal"], q.shape[2], k.shape[2])
    borders = [(start, stop) for _, start, stop in documents.spans]
    found.agree(
        "documents",
        problem,
        q,
        borders=f"{short_repr(borders)} ({digest(documents.spans)})",
    )
    whole, cut, index = _documents_here(documents, layout, rank)
    out, lse = local_attention(q, k, v, pattern, documents=whole, **options)
    if not cut:
        return out, lse
    index = index.to(q.device)
    parts = [
        t.flatten(0, 1)[index].split([e * r for _, e, r in cut]) for t in (q, k, v)
    ]
    results = []
    for (shards, *size), *some in zip(cut, *parts):
        some = (t.unflatten(0, size) for t in some)
        across = {
            "group": group,
            "scheme": scheme,
            "layout": shards,
            "exchange_dtype": exchange_dtype,
        }
        results.append(attend(*some, pattern, **across, **options))
    outs, lses = zip(
        *((o.flatten(0, 1), l.transpose(1, 2).flatten(0, 1)) for o, l in results)
    )
    shape, lse = out.shape, lse.transpose(1, 2)  # (b, n, h)
    out = out.flatten(0, 1).index_copy(0, index, torch.cat(outs)).view(shape)
    lse = lse.flatten(0, 1).index_copy(0, index, torch.cat(lses)).view(shape[:3])
    return out, lse.transpose(1, 2)


@lru_cache(maxsize=64)
@outside_modes()
def _documents_here(
    documents: Documents, layout: Layout, rank: int | None
) -> tuple[Documents, list[tuple[Layout, int, int]], Tensor]:
    """Where documents lie in what a rank holds, or (None) in all rows: those inside a
    shard, and those that are cut.

    Of the second, (layout of the document, batch entries, rows here) for each place in
    the sequence, and the index of all their rows, counted through the batch.
    """
    cuts, whole, cut = layout.cuts, [], {}
    for entry, start, stop in documents.spans:
        if start < stop:
            parts = range(bisect_right(cuts, start) - 1, bisect_right(cuts, stop - 1))
            owners = {layout.owners[i] for i in parts}
            if len(owners) > 1:
                cut.setdefault((start, stop), []).append(entry)
            elif rank is None or rank in owners:
                rows = (
                    range(start, stop)
                    if rank is None
                    else _rows_of(layout, rank, start, stop)
                )
                whole.append((entry, int(rows[0]), int(rows[-1]) + 1))
    held, found, index = (
        layout.n if rank is None else layout.size(rank),
        [],
        [torch.arange(0)],
    )
    for (start, stop), entries in cut.items():
        shards = Layout(
            layout.kind, tuple(min(max(x, start), stop) - start for x in cuts)
        )
        rows = (
            torch.arange(start, stop)
            if rank is None
            else _rows_of(layout, rank, start, stop)
        )
        found.append((shards, len(entries), len(rows)))
        index.append((held * torch.tensor(entries)[:, None] + rows).flatten())
    return Documents(tuple(whole), held), found, torch.cat(index)


def _rows_of(layout: Layout, rank: int, start: int, stop: int) -> Tensor:
    """The rows of a rank's shard that hold positions start .. stop - 1."""
    each = [
        torch.arange(max(start - at.start, 0), min(stop, at.stop) - at.start) + row
        for row, at in layout.chunks(rank)
        if start < at.stop and at.start < stop
    ]
    return torch.cat(each) if each else torch.arange(0)


def check_exchange_dtype(value, dtype: torch.dtype) -> None:
    """Raise ValueError unless rows of a dtype can travel as ``value``: None, that dtype
    or a narrower one.
    """
    if value is not None and value is not dtype:
        check_float_dtype(value)
        if value.itemsize >= dtype.itemsize:
            raise ValueError(
                f"exchange_dtype must be narrower than {dtype}, got {value}"
            )


def check_one_device(scheme, layout, exchange_dtype=None) -> None:
    """Raise ValueError for an unknown scheme, and for what is for several ranks,
    without a group.
    """
    if not isinstance(scheme, tuple | list):
        check_scheme(scheme)
    for what, given in (
        ("a scheme", scheme != "auto"),
        ("an exchange_dtype", exchange_dtype is not None),
        ("a layout", not isinstance(layout, str) or layout != "contiguous"),
    ):
        if given:
            raise ValueError(
                f"{what} is for several ranks: give a group, or ringlab.Simulated(p)"
            )


def length_of(t: Tensor, group, layout) -> int:
    """The length of the sequence of which ``t`` (b, n, ...) holds the rows here."""
    if isinstance(layout, Layout):
        return layout.n
    return t.shape[1] * (
        1 if group is None or isinstance(group, Simulated) else Group.of(group).size
    )


def _call(
    shape,
    width,
    pattern,
    layout,
    scheme,
    causal,
    backend,
    execution,
    exchange_dtype,
    ranks: int,
    machines: int,
    process_group,
) -> _Call:
    """The call, checked; ``shape``: rows, heads, K/V heads; ``width``: head_dim, dtype
    and passes, which decide between schemes.
    """
    if not isinstance(layout, str | Layout):
        layout_named(layout, 1, 1)  # raises
    rank = None
    if process_group is not None:
        rank, _groups[process_group.group_name] = (
            dist.get_rank(process_group),
            process_group,
        )
    if scheme != "auto":
        width = None
    problem, scheme, text = _problem(
        pattern,
        layout,
        scheme,
        causal,
        exchange_dtype,
        shape,
        width,
        ranks,
        machines,
        rank,
    )
    name = f"{text} {backend} {id(execution)}"  # a call holds its execution, so that the id is its alone
    return _calls.setdefault(name, _Call(name, problem, scheme, backend, execution))


@lru_cache(maxsize=64)
def _problem(
    pattern,
    layout,
    scheme: str | MeshScheme,
    causal: bool,
    exchange_dtype: torch.dtype | None,
    shape: tuple[int, int, int],
    width: tuple[int, torch.dtype, str] | None,
    ranks: int,
    machines: int,
    rank: int | None,
) -> tuple[Problem, str | MeshScheme, str]:
    """Problem, scheme, and a text for both, checked. ``shape``: rows, heads, K/V heads;
    ``rank`` None: of all rows.
    """
    rows, heads, kv_heads = shape
    n = (
        rows
        if rank is None
        else layout.n
        if isinstance(layout, Layout)
        else rows * ranks
    )
    layout = layout_named(layout, n, ranks)
    if rank is not None and layout.size(rank) != rows:
        raise ValueError(
            f"the layout has {layout.size(rank)} positions here, q has {rows}"
        )
    problem = Problem(
        pattern, layout, causal, heads, kv_heads, exchange_dtype=exchange_dtype
    )
    if scheme == "auto":
        head_dim, dtype, passes = width
        scheme = choose(problem, head_dim=head_dim, dtype=dtype, passes=passes)
    check_problem(problem, scheme)
    problem = on_hosts(
        problem, scheme, tuple(i * machines // ranks for i in range(ranks))
    )
    return problem, scheme, f"{digest(problem):x} {scheme}"


# --------------------------------------------------------------------------------------
# autograd: one operator a pass


def _name_in_graph(*about) -> str:
    """The name of a call that lives as long as compiled graphs."""
    call = _call(*about)
    _compiled.add(call)
    return call.name


# Python objects and shapes in, a string out: a compiler need not trace it. This is
# ``assume_constant_result`` of torch.compiler, without its import of the compiler.
_name_in_graph._dynamo_marked_constant = True


def _found(name: str, group: str) -> tuple[_Call, Group]:
    """The call of a name, and the process group of a name or, of "", its simulated
    ranks.
    """
    call = _calls[name]
    if not group:
        return call, Group(call.problem.layout.ranks, range(call.problem.layout.ranks))
    return call, Group.of(_named(group))


def _named(name: str) -> dist.ProcessGroup | None:
    """The process group of a name."""
    # A private function of torch. It also knows a group that was made anew under the
    # name since a graph was compiled.
    return getattr(dist.distributed_c10d, "_resolve_process_group", _groups.get)(name)


def _restored(name: str, size: int, shape: tuple[int, int] | None = None) -> Group:
    """The group that a pickle has named; RuntimeError unless it is here, with as many
    ranks.
    """
    found = None
    if dist.is_initialized():
        world = dist.group.WORLD
        try:
            found = Group.of(world if world.group_name == name else _named(name))
        except (RuntimeError, TypeError):  # torch's, and ours for None
            pass
    if found is None or found.size != size:
        raise RuntimeError(
            f"there is no process group {name!r} of {size} ranks as in the pickle: make it before, or load a state dict"
        )
    return replace(found, shape=shape)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    group: str,
    name: str,
    operator: bool = True,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out, lse, the number of the call, and what else its backward needs, for one rank
    here after the other.

    q, k, v hold the rows of the ranks here. ``operator``: it is one, hence needs a
    kernel that has a backward.
    """
    call, group = _found(name, group)
    ranks, flip = call.ranks(
        group, q, scale, operator
    )  # probes the kernel, which is no part of the call
    layout = call.problem.layout
    with seen_inside() if operator else nullcontext(), without_autocast(q):
        number = group.agree(
            "forward",
            ranks[0].problem,
            q,
            plan=lambda: ranks[0].plan,
            sinks=sinks is not None,
            **call.options(scale),
        )
        shards = zip(*(group.split(t, 1, layout) for t in (flip(q), k, v)))
        steps = [
            algorithms(call.scheme)[0](rank, *mine) for rank, mine in zip(ranks, shards)
        ]
        found = drive(steps, group.process_group)
        if sinks is not None:
            mesh = mesh_of(call.scheme, layout.ranks)
            for rank, (out, lse, *kept) in zip(group.here, found):
                add_sinks_(out, lse, sinks)
                if mesh is not None:  # its backward reads those of its heads
                    share = head_share(call.problem, mesh, rank)
                    if heads := share.queries[share.place]:
                        add_sinks_(*kept[3:5], sinks[heads.start : heads.stop])
        out, lse = (
            group.join([each[i] for each in found], dim, layout)
            for i, dim in ((0, 1), (1, 2))
        )
    return out, lse, torch.full((), number), [t for each in found for t in each[2:]]


ranks_forward = torch.library.custom_op(
    "ringlab::ranks_forward",
    forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, str group, str name)"
    " -> (Tensor, Tensor, Tensor, Tensor[])",
)


@ranks_forward.register_fake
def _(q, k, v, sinks, scale, group, name):
    (call, group), (b, s, h, d), saved = _found(name, group), q.shape, []
    layout, broad = call.problem.layout, accumulation_dtype(q.dtype)
    for rank in group.here:
        problem, scheme = call.problem, call.scheme
        if (mesh := mesh_of(scheme, layout.ranks)) is not None:
            share = head_share(problem, mesh, rank)
            rank = share.across.index(rank)
            n, queries, keys = (
                share.problem.layout.size(rank),
                len(share.queries[share.place]),
                len(share.keys[share.place]),
            )
            saved += [
                q.new_empty(b, n, heads, d) for heads in (queries, keys, keys, queries)
            ]
            saved.append(q.new_empty(b, queries, n, dtype=broad))
            problem, scheme = share.problem, mesh.other
        if scheme == "plan":
            saved.append(k.new_empty(plan_rank(problem, rank).rows, 2, b, d))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return (
        out,
        q.new_empty(b, h, s, dtype=broad),
        torch.empty((), dtype=torch.long),
        saved,
    )


@torch.library.custom_op("ringlab::ranks_backward", mutates_args=())
def ranks_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    saved: list[Tensor],
    scale: float,
    group: str,
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the rows here; ``number`` and ``saved``, of all ranks here, are
    those of the forward.
    """
    call, group = _found(name, group)
    with seen_inside(), without_autocast(q):
        columns = 0 if dlse is None else LSE_COLUMNS
        ranks, flip = call.ranks(group, q, scale, True, columns)
        options = call.options(scale) | {"gradient of lse": dlse is not None}
        group.agree("backward", ranks[0].problem, q, int(number), **options)
        layout, whole = (
            call.problem.layout,
            ((dout, 1), (dlse, 2), (flip(q), 1), (k, 1), (v, 1), (out, 1), (lse, 2)),
        )
        shards = zip(*(group.split(t, dim, layout) for t, dim in whole))
        count = len(saved) // len(ranks)
        each = zip(
            ranks,
            shards,
            (saved[i * count : (i + 1) * count] for i in range(len(ranks))),
        )
        steps = [
            algorithms(call.scheme)[1](rank, *mine, *more) for rank, mine, more in each
        ]
        found = drive(steps, group.process_group)
        dq, dk, dv = (
            group.join([g.to(q.dtype) for g in parts], 1, layout)
            for parts in zip(*found)
        )
        return flip(dq), dk, dv


@ranks_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)
    )


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.group, name = inputs
    out, lse, number, saved = output
    ctx.call = _calls[name]  # lives until the backward has found it
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, number, *saved)


def _backward(ctx, dout, dlse, *_):
    q, k, v, sinks, out, lse, number, *saved = ctx.saved_tensors
    if (
        dout is None
    ):  # also without any gradient: the other ranks go through their backward, so this one does too
        dout = torch.zeros_like(out)
    how = ctx.scale, ctx.group, ctx.call.name
    dsinks = None if sinks is None else sinks_gradient(dout, dlse, out, lse, sinks)
    return (
        *ranks_backward(dout, dlse, q, k, v, out, lse, number, saved, *how),
        dsinks,
        None,
        None,
        None,
    )


ranks_forward.register_autograd(_backward, setup_context=_setup)
