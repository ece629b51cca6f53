"""Run the engine without data: on tensors of the meta device, under the tracker that
measurements use.

Such tensors have shapes, strides and storages but no bytes. So the peak memory of a
call is known for any length, and for hardware that is not here. Index tensors of plans
have data: they are small, and the engine reads them. ``MetaRun`` is the tracker,
``MetaCall`` one call of attention: on one device, or on several ranks one after
another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import cache as caches
from . import cost, hardware, kernels, memory
from .attention import DEFAULT
from .block_patterns import BlockSparse
from .checks import (
    check_backend,
    check_bool,
    check_choice,
    check_float_dtype,
    check_int,
    is_int,
    short_repr,
)
from .engine import Execution, autograd, torch_sparse
from .kernels.base import HALF, DeviceSpec, wants_dtype
from .kernels.external import NOT_INSTALLED
from .patterns import Pattern, as_pattern
from .ring import Problem, choose
from .ring.comm import Steps, Traffic, Wait
from .ring.exchange import on_hosts, rows_moved
from .ring.layout import layout_named
from .ring.operators import check_exchange_dtype, check_one_device
from .ring.rank import rank_of
from .ring.schemes import algorithms, check_scheme
from .ring.volume import sent_to
from .tracking import LiveStorageTracker, storages

CPU = DeviceSpec("cpu")
PARTS = ("q", "k", "v", "out", "lse", "gradients", "received", "workspace")
_ATEN = torch.ops.aten
_TAKE_INDICES = {_ATEN.index, _ATEN.index_select}
# torch's own rules for these without data are in Python, slow, and import the compiler.
_ELEMENTWISE = {
    getattr(_ATEN, name)
    for name in "add div exp floor_divide log logaddexp mul sigmoid sub".split()
}


def _like(args) -> Tensor | None:
    """A tensor like the one that an elementwise operator returns; None where torch must
    tell.
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    alike = len({(x.shape, x.dtype) for x in tensors}) == 1 and all(
        x.is_meta for x in tensors
    )
    return (
        tensors[0]
        if alike and (tensors[0].is_floating_point() or isinstance(args[-1], int))
        else None
    )


@cache
def _only_writes(func) -> bool:
    """Whether an operator changes nothing but the data of its first argument."""
    return (
        func.overloadpacket.__name__.endswith("_")
        and torch.Tag.inplace_view not in func.tags
    )


def _without_data(value):
    """Arguments of one operator, with index tensors on the device of the others."""
    if isinstance(value, list | tuple):
        return type(value)(map(_without_data, value))
    return (
        torch.empty_like(value, device="meta")
        if isinstance(value, Tensor) and not value.is_meta
        else value
    )


class MetaRun(LiveStorageTracker):
    """Track one call without data: ``tensor`` makes its inputs, ``name`` says what
    storages are for.

    ``peak_bytes``, ``parts`` and ``traffic`` are what the call would hold and send.

    >>> run = MetaRun()
    >>> with run.on(kernels.KERNELS["eager"]):
    ...     q = run.tensor("q", (1, 1 << 20, 8, 64), torch.float32)
    ...     run.name("out", q * 2)
    >>> run.peak_bytes >> 30, run.parts()["out"] >> 30
    (4, 2)
    """

    _meta = True

    def __init__(self):
        super().__init__()
        self.traffic, self.real = (
            Traffic(),
            False,
        )  # real: tensors asked for on the meta device are made with data
        self._top: dict[int, tuple[StorageWeakRef, int]] = {}
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}

    @contextmanager
    def on(self, kernel, device: DeviceSpec = CPU) -> Iterator[None]:
        """Inside, operators on the run's tensors only count, and every choice takes
        ``kernel`` on ``device``.
        """
        with kernels.pretend(device, kernel), self:
            yield

    def tensor(self, part: str, shape, dtype: torch.dtype) -> Tensor:
        """Make an input of the call, or a tensor that stands for what the call would
        hold.
        """
        made = torch.empty(shape, dtype=dtype, device="meta")
        self.register(made)
        self.name(part, made)
        return made

    def name(self, part: str, *tensors) -> None:
        """Say what the storages of these tensors, or dicts of them, are for, one of
        ``PARTS``; the first name stays.
        """
        for storage in storages(tensors, True):
            self._names.setdefault(storage._cdata, (StorageWeakRef(storage), part))

    def parts(self) -> dict[str, int]:
        """Bytes at the peak by part; they sum to ``peak_bytes``."""
        found = dict.fromkeys(PARTS, 0)
        for key, (_, size) in self._top.items():
            found[self._names[key][1] if key in self._names else "workspace"] += size
        return found

    def drive(self, steps: Steps, rank: int):
        """Run one rank's algorithm alone: what it sends is counted, what others send
        arrives uninitialised.
        """
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if not isinstance(step, Wait):
                self.traffic.add(rank, step)
                self.name("received", step.receive)
            # A request is its own ticket: like those of a group it holds what is on its
            # way.
            answer = None if isinstance(step, Wait) else step
            step = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.is_view and not self.real:  # most operators
            return super().__torch_dispatch__(func, types, args, kwargs)
        if (
            kwargs
            and (asked := kwargs.get("device")) is not None
            and asked.type == "meta"
        ):
            if func is _ATEN._to_copy.default and not args[0].is_meta:
                return args[
                    0
                ]  # an index tensor goes where it is used: there it is already
            if self.real:
                kwargs = kwargs | {"device": torch.device("cpu")}
        if _only_writes(func) and args[0].is_meta:
            return args[0]
        if func.overloadpacket in _ELEMENTWISE and (like := _like(args)) is not None:
            func, args, kwargs = _ATEN.empty_like.default, (like,), {}
        if func.overloadpacket in _TAKE_INDICES:
            args = _without_data(args) if args[0].is_meta else args
        if self.real:  # torch.tensor(...) makes its result out of sight
            self._count(storages((args, kwargs), True))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, found) -> None:
        before = self.peak_bytes
        super()._count(found)
        if (
            self.peak_bytes > before
        ):  # its weak references keep addresses from being given away
            self._top = dict(self._live)


@dataclass(frozen=True)
class FirstCall(Execution):
    """An execution as at a first call: its cache and pools are empty. Index tensors are
    built with data.
    """

    run: MetaRun | None = None

    @classmethod
    def of(cls, execution: Execution, run: MetaRun) -> FirstCall:
        """The same switches with an empty cache and empty pools of the same bounds."""
        options = {f.name: getattr(execution, f.name) for f in fields(Execution)}
        for name, usual in (
            ("cache", caches.GLOBAL),
            ("pool", memory.GLOBAL_POOL),
            ("results", memory.RESULTS),
        ):
            own = usual if options[name] is True else options[name]
            if own is not False:
                empty = (
                    copy.copy(own)
                    if name == "cache"
                    else MetaPool(own.max_bytes, own.threshold_bytes, own.waste)
                )
                options[name] = empty
        return cls(**options, run=run)

    def cached(self, key, build):
        def built():
            before, self.run.real = (
                self.run.real,
                True,
            )  # a build may use the cache, too
            try:
                return build()
            finally:
                self.run.real = before

        return super().cached(key, built)


class MetaPool(memory.MemoryPool):
    """A pool that lends buffers without data, and reuses them by the rules of a real
    one.
    """

    def _place(self, device: torch.device, nbytes: int) -> tuple | None:
        return ("meta", 0, 0) if nbytes and nbytes >= self.threshold_bytes else None


class FusedMeta:
    """The memory of a fused GPU kernel, without arithmetic: out and lse; in a backward
    dq, dk, dv, rowsum(dO * O).

    Half precision also has dq in fp32, as FlashAttention-2 allocates it (Dao 2023,
    arXiv 2307.08691). The log-sum-exp is padded to 32 rows, as CUTLASS's is. What else
    a library holds inside is not counted.
    """

    name = "fused"

    def refuses(self, device, dtype, head_dim) -> str | None:
        """Never: ``MetaCall.kernel`` knows which dtypes such a kernel serves."""
        return None

    def forward(self, q, k, v, causal, scale):
        """out (b, m, h, d) in q's dtype and lse (b, h, m), uninitialised."""
        lse = q.new_empty(
            q.shape[0], q.shape[2], -(-q.shape[1] // 32) * 32, dtype=torch.float32
        )
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse[
            ..., : q.shape[1]
        ]

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        """dq, dk, dv (b, m, h, d), uninitialised."""
        held = [torch.empty(lse.shape, dtype=lse.dtype, device=q.device)]
        if q.dtype in HALF:
            held.append(torch.empty(q.shape, dtype=torch.float32, device=q.device))
        return tuple(
            torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
        )


class ListsMeta(FusedMeta):
    """The memory of the list kernels, likewise: out and lse; in a backward the row sums,
    dq, dk, dv. Of ``several`` launches results are summed in fp32.
    """

    name = kernels.LISTS

    def __init__(self, several: bool):
        self.several = several

    def _results(self, *like: Tensor) -> tuple[Tensor, ...]:
        summed = [
            torch.empty(t.shape, dtype=torch.float32, device=t.device)
            for t in like
            if self.several
        ]
        found = tuple(
            torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like
        )
        del summed  # rounded into the results
        return found

    def attend(self, q, k, v, pattern, causal, scale, cached):
        """out (b, n, h, d) in q's dtype and lse (b, h, n), uninitialised."""
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return *self._results(q), lse

    def gradients(self, dout, dlse, q, k, v, out, lse, pattern, causal, scale, cached):
        """dq, dk, dv (b, n, h, d), uninitialised."""
        sums = torch.empty_like(lse)  # of each row, held for both passes
        grads = *self._results(q), *self._results(k, v)
        del sums
        return grads


def _largest(problem: Problem) -> set[int]:
    """The ranks to run: all; of more than ``FEW_RANKS`` with equal shards the ends and
    those that move most rows.

    One of these holds most, to within the few rows by which shards and messages differ.
    """
    sizes, moved = problem.layout.sizes, rows_moved(problem)
    if len(sizes) <= FEW_RANKS or max(sizes) - min(sizes) > 1:
        return set(range(len(sizes)))
    received, sent = list(map(sum, moved)), list(map(sum, zip(*moved)))
    both = list(map(sum, zip(received, sent)))
    # The last but one of a causal ring holds messages to pass on, the last one none.
    return {
        0,
        len(sizes) - 2,
        len(sizes) - 1,
        *(each.index(max(each)) for each in (sizes, received, sent, both)),
    }


MOST_ELEMENTS = {
    "cpu": 2**35,
    "cuda": 2**40,
}  # beyond, a run takes minutes: the engine cuts it into small pieces
FEW_RANKS = 16
MOST_RANKS = 128  # of dense attention a run has a few calls for each pair of ranks


@dataclass(frozen=True)
class MetaCall:
    """All of a call of attention but its length, checked; ``at`` runs it without data.

    ``kv_heads`` None: as many as heads. ``profile``: a hardware profile or its name;
    None: this CPU. ``hosts``: a number for the host of each rank; () for one host.
    ``exchange_dtype``: as of ``ringlab.attention``.
    """

    pattern: Pattern
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    kv_heads: int | None = None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    passes: str = "fwd"
    ranks: int = 1
    scheme: str = "auto"
    layout: object = "contiguous"
    backend: str | tuple[str, ...] = "auto"
    execution: Execution = DEFAULT
    profile: hardware.Profile | str | None = None
    hosts: tuple[int, ...] = ()
    exchange_dtype: torch.dtype | None = None

    def __post_init__(self):
        given = {
            name: getattr(self, name)
            for name in ("batch", "heads", "kv_heads", "head_dim", "ranks")
        }
        if self.kv_heads is None:
            given["kv_heads"] = self.heads
        given = {name: check_int(name, value) for name, value in given.items()}
        given["pattern"] = as_pattern(self.pattern)
        if isinstance(self.profile, str):
            given["profile"] = hardware.resolve(self.profile)
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"query heads must be a multiple of K/V heads: {self.heads} and {self.kv_heads}"
            )
        check_float_dtype(self.dtype)
        if not isinstance(self.execution, Execution):
            raise TypeError(
                f"execution must be a ringlab.Execution, got {short_repr(self.execution)}"
            )
        if not isinstance(self.profile, hardware.Profile | None):
            raise TypeError(
                f"profile must be a hardware profile or its name, got {short_repr(self.profile)}"
            )
        hosts = self.hosts
        if (
            not isinstance(hosts, tuple)
            or len(hosts) not in (0, self.ranks)
            or not all(is_int(i, 0) for i in hosts)
        ):
            raise ValueError(
                f"hosts must be a tuple of {self.ranks} numbers or of none, got {short_repr(hosts)}"
            )
        check_choice("passes", self.passes, cost.PASSES)
        check_bool("causal", self.causal)
        if self.ranks == 1:
            check_one_device(self.scheme, self.layout, self.exchange_dtype)
        check_exchange_dtype(self.exchange_dtype, self.dtype)

    @property
    def device_type(self) -> str:
        return self.profile.kind if self.profile else "cpu"

    @property
    def device(self) -> DeviceSpec:
        """Of a GPU of unknown capability: a new one, on which more is held."""
        if self.device_type == "cpu":
            return CPU
        return DeviceSpec("cuda", self.profile.capability or (9, 0))

    @cached_property
    def kernel(self):
        """On a CPU the kernel that runs here; for a GPU, which may be absent, by rule.

        ``FusedMeta`` stands for every fused kernel, where torch has one for the dtype
        and head_dim (``kernels.expected``); all else is eager. Raises as
        ``kernels.choose`` does, for a GPU ValueError for an unknown name alone.
        """
        if self.device_type == "cpu":
            how = {
                "causal": self.causal,
                "backward": self.passes != "fwd",
                "backend": self.backend,
            }
            return kernels.choose("cpu", self.dtype, self.head_dim, **how).kernel
        backend, capability = (
            check_backend(self.backend),
            self.profile.capability or (9, 0),
        )
        names = (backend,) if isinstance(backend, str) else backend
        refused = []
        for name in names:
            check_choice("backend", name, ("auto", "sdpa", *kernels.KERNELS))
            if name in kernels.KERNELS:
                why = kernels.KERNELS[name].refuses(
                    DeviceSpec("cuda", capability), self.dtype, self.head_dim
                )
                # What is not installed here may be where that hardware is.
                refused += (
                    [f"{name}: {why}"] if why and NOT_INSTALLED not in why else []
                )
        if len(refused) == len(names):
            why = f"cannot run on this hardware in {self.dtype}: {'; '.join(refused)}"
            raise NotImplementedError(f"backend {backend!r} {why}")
        fused = (
            kernels.expected("cuda", capability, self.dtype, self.head_dim).name
            != "eager"
        )
        return (
            FusedMeta()
            if fused and {*names} - {"eager", "cpu_flash"}
            else kernels.KERNELS["eager"]
        )

    def choice(self, n: int, for_gradients: bool = False) -> kernels.Choice:
        """What "auto" should choose for a pass over ``n`` positions, on several ranks
        for their dense calls. Raises as ``kernels.expected`` does.
        """
        kind, have = "dense", self.profile.capability if self.profile else None
        free = self.execution.plain and self.execution.merge == "auto"
        if self.ranks == 1 and free:
            kind = kernels.kind_of(self.pattern, n, self.heads, self.kv_heads)
        return kernels.expected(
            self.device_type,
            have,
            self.dtype,
            self.head_dim,
            causal=self.causal,
            pattern_kind=kind,
            for_gradients=for_gradients,
        )

    def _stand_in(self, n: int, execution: Execution, for_gradients: bool):
        """The kernel that stands for a pass without data."""
        free = execution.plain and execution.merge == "auto"
        named, kernel = self.backend == kernels.LISTS, self.kernel
        if self.device_type == "cuda" and (named or self.backend == "auto") and free:
            if self.profile.capability is not None:
                if named or self.choice(n, for_gradients).name == kernels.LISTS:
                    given = self.pattern, n, self.heads, self.kv_heads
                    return ListsMeta(kernels.kind_of(*given) == "ladder")
        return kernel

    def check(self, n: int) -> None:
        """Raise ValueError for what takes minutes to run without data."""
        if self.ranks > MOST_RANKS:
            given = short_repr(self.ranks)
            raise ValueError(
                f"estimates are for at most {MOST_RANKS} ranks, got {given}"
            )
        elements, most = (
            self.batch * n * self.heads * self.head_dim,
            MOST_ELEMENTS[self.device_type],
        )
        check_int("batch * seq_len * heads * head_dim", elements, most=most)

    def at(self, n: int) -> tuple[MetaRun, str | None, str]:
        """(the run of the rank that holds most, with the traffic of all; the scheme;
        why it may hold more).
        """
        self.check(n)
        if self.ranks > 1:
            return self._on_ranks(n)
        run, way = MetaRun(), self.execution.blocks
        execution = FirstCall.of(self.execution, run)
        call = self.pattern, self.causal, self.head_dim**-0.5, "auto"
        with torch.no_grad():
            with run.on(self._stand_in(n, execution, False), self.device):
                q, k, v, dout = self._inputs(run, n)
                if isinstance(self.pattern, BlockSparse) and way in ("bsr", "flex"):
                    self._lower_bound(run, way, q, k, dout)
                    return run, None, f"blocks={way!r} does not run without data"
                out, lse = autograd.forward(q, k, v, None, *call, execution)
                run.name("out", out)
                run.name("lse", lse)
            if dout is not None:
                with run.on(self._stand_in(n, execution, True), self.device):
                    tensors = dout, None, q, k, v, out, lse
                    run.name(
                        "gradients", *autograd.backward(*tensors, *call, execution)
                    )
        return run, None, ""

    def _inputs(self, run: MetaRun, rows: int):
        """q, k, v, and dout for a backward, else None."""
        shapes = [
            (self.batch, rows, h, self.head_dim)
            for h in (self.heads, self.kv_heads, self.kv_heads)
        ]
        made = [
            run.tensor(part, shape, self.dtype) for part, shape in zip("qkv", shapes)
        ]
        return *made, run.tensor(
            "gradients", shapes[0], self.dtype
        ) if self.passes != "fwd" else None

    def _lower_bound(self, run: MetaRun, way: str, q, k, dout) -> None:
        """Inputs, results, and for torch.sparse, which needs data to run, one head's
        probabilities.
        """
        dtypes = torch_sparse.FLEX_DTYPES if way == "flex" else torch_sparse.BSR_DTYPES
        torch_sparse.refuse(way, wants_dtype(self.dtype, dtypes))
        seen, size = self.pattern.blocks(q.shape[1]), self.pattern.block_size
        held = (
            int((seen.tril() if self.causal else seen).sum()) * size * size
            if way == "bsr"
            else 0
        )
        del seen
        made = [
            run.tensor("out", q.shape, q.dtype),
            run.tensor("lse", q.shape[:3], q.dtype),
        ]
        made += [run.tensor("workspace", (held,), q.dtype)]
        made += (
            [run.tensor("gradients", t.shape, t.dtype) for t in (q, k, k)]
            if dout is not None
            else []
        )

    def _on_ranks(self, n: int) -> tuple[MetaRun, str, str]:
        """What ``at`` returns for several ranks: those that may hold most are run, each
        alone.
        """
        problem, scheme = self.problem(n)
        most = max(
            (self.on_rank(problem, scheme, rank) for rank in _largest(problem)),
            key=lambda run: run.peak_bytes,
        )
        most.traffic.sent = self.sent(problem, scheme)
        return most, scheme, ""

    def sent(self, problem: Problem, scheme: str) -> dict[tuple[int, int], int]:
        """Bytes of one call by (from rank, to rank)."""
        how = {
            "batch": self.batch,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "passes": self.passes,
        }
        ranks = range(self.ranks)
        each = (
            (rank, to, size)
            for rank in ranks
            for to, size in sent_to(problem, rank, scheme, **how).items()
        )
        return {(rank, to): size for rank, to, size in each}

    def problem(self, n: int) -> tuple[Problem, str]:
        """The problem of several ranks and its scheme, checked."""
        layout = layout_named(self.layout, n, self.ranks)
        shape = self.heads, self.kv_heads
        problem = Problem(
            self.pattern,
            layout,
            self.causal,
            *shape,
            exchange_dtype=self.exchange_dtype,
        )
        check_scheme(self.scheme)
        scheme = self.scheme
        if scheme == "auto":
            scheme = choose(
                problem,
                head_dim=self.head_dim,
                dtype=self.dtype,
                passes=self.passes,
            )
        problem.check(scheme)
        return on_hosts(problem, scheme, self.hosts), scheme

    def on_rank(self, problem: Problem, scheme: str, number: int) -> MetaRun:
        """One rank of several, alone."""
        run = MetaRun()
        execution = FirstCall.of(self.execution, run)
        forward, backward = algorithms(scheme)
        with torch.no_grad(), run.on(self.kernel, self.device):
            q, k, v, dout = self._inputs(run, problem.layout.size(number))
            rank = rank_of(problem, number, self.kernel, self.head_dim**-0.5, execution)
            held = run.drive(forward(rank, q, k, v), number)
            for part, t in zip(("out", "lse", *["received"] * len(held)), held):
                run.name(part, t)
            out, lse, saved = held[0].contiguous(), held[1].contiguous(), held[2:]
            del held, t  # what was copied is freed here
            run.name("out", out)
            run.name("lse", lse)
            if dout is not None:
                grads = run.drive(
                    backward(rank, dout, None, q, k, v, out, lse, *saved), number
                )
                run.name("gradients", *(g.to(q.dtype).contiguous() for g in grads))
        return run
